"""Functions and methods of the ZynML host language that work on arrays, devices and memory.

In: the name of a function or method, its arguments by parameter, and the device the program runs on. Out: a value: an array (NumPy on the
host, a `DeviceArray` on a GPU; views where strides allow it), a list, a record. What is wrong with the arguments is a `UserError` without a
place; whoever calls adds the place of the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.base import dtypes, registry
from tilewright.base.dtypes import DType, f32
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.exchange.libraries import is_tensor
from tilewright.zyn.host import values as host_values
from tilewright.zyn.lazy.lazy_array import LazyArray

Shape = tuple[int, ...]
MOST_AXES = 64


@dataclass(frozen=True)
class HostSignature:
    """The parameters of a function: those it needs, those it may be given, and whether the first takes several values."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    several: bool = False

    def shown(self, name: str) -> str:
        return f"{name}({', '.join((*self.needed, *(f'{o}=…' for o in self.optional)))})"


FUNCTIONS: dict[str, HostSignature] = {
    "reshape": HostSignature(("x", "shape")),
    "split": HostSignature(("x", "parts"), ("axis",)),
    "transpose": HostSignature(("x",), ("axes",)),
    "concat": HostSignature(("arrays",), ("axis",)),
    "zeros": HostSignature(("shape",), ("dtype", "device"), several=True),
    "ones": HostSignature(("shape",), ("dtype", "device"), several=True),
    "full": HostSignature(("shape", "value"), ("dtype", "device")),
    "copy": HostSignature(("x",)),
    "len": HostSignature(("x",)),
    "str": HostSignature(("x",)),
    "print": HostSignature(("values",), several=True),
    "read": HostSignature(("path",)),
    "compute_devices": HostSignature(()),
    "allocate": HostSignature(("shape",), ("dtype", "device", "pinned", "managed")),
    "memory_pool": HostSignature((), ("device", "size", "limit")),
}
"""Functions of the host language; those on numbers and whole arrays that kernels have too are not here."""

METHODS: dict[str, HostSignature] = {
    "to_device": HostSignature(("device",), ("copy",)),
    "reshape": HostSignature(("shape",), several=True),
    "transpose": HostSignature((), ("axes",)),
    "allocate": HostSignature(("shape",), ("dtype",)),
    "free": HostSignature(("array",)),
    "reset": HostSignature(()),
    "flush": HostSignature((), ("wait",)),
    "done": HostSignature(()),
    "cancel": HostSignature(()),
}

_OF_POOLS = frozenset({"allocate", "free", "reset", "flush"})
_OF_FUTURES = frozenset({"done", "cancel"})


def fail(code: str, message: str, help: str = "") -> UserError:
    error = UserError.at(code, message, help=help)
    assert isinstance(error, UserError)
    return error


def call(name: str, given: Mapping[str, object], device: str) -> object:
    """The value of a host function; `given` has its arguments by parameter, `device` is where new arrays are."""
    found = view_of(name, given)
    if found is not None:
        return found
    values = {key: settled(value) for key, value in given.items()}
    return _IMPLEMENTED[name](_HostCall(device, values))


def method(name: str, receiver: object, given: Mapping[str, object]) -> object:
    """The value of `receiver.name(…)`."""
    if name in _OF_FUTURES or name in _OF_POOLS:
        return _object_method(name, receiver, given)
    found = view_of(name, {**given, "x": receiver})
    if found is not None:
        return found
    values = {key: settled(value) for key, value in given.items()}
    receiver = settled(receiver)
    if name == "to_device" and isinstance(receiver, np.generic):
        # The sum of an array that host and device share is a number already.
        if values.get("device") == "cpu":
            return receiver
        receiver = np.asarray(receiver)
    array = as_array(receiver, f".{name}()")
    call = _HostCall("cpu", {**values, "x": array})
    return _to_device(call) if name == "to_device" else _IMPLEMENTED[name](call)


def view_of(name: str, given: Mapping[str, object]) -> object:
    """What a function or method gives for an array that waits and need not be there for it; None where that is not so."""
    if name not in ("reshape", "split", "transpose", "len") or not isinstance(given.get("x"), LazyArray):
        return None
    return _IMPLEMENTED[name](_HostCall("cpu", {key: value if key == "x" else settled(value) for key, value in given.items()}))


def _object_method(name: str, receiver: object, given: Mapping[str, object]) -> object:
    from tilewright.runtime.core.futures import Future

    kind = "a future" if name in _OF_FUTURES else "a memory pool"
    if name in _OF_FUTURES:
        if not isinstance(receiver, Future):
            raise fail("TW009", f"'.{name}()' of a {type(receiver).__name__}", f"only {kind} has it")
        return receiver.done() if name == "done" else receiver.cancel()
    from tilewright.execute.memory import Pool

    if not isinstance(receiver, Pool):
        raise fail("TW009", f"'.{name}()' of a {type(receiver).__name__}", f"only {kind} has it")
    if name == "allocate":
        return receiver.allocate(extents(given["shape"]), made_dtype(given.get("dtype", f32)))
    if name == "flush":
        return receiver.flush(bool(given.get("wait", False)))
    if name == "free":
        receiver.free(given["array"])
    else:
        receiver.reset()
    return None


def settled(value: object) -> Any:
    """A future's result, an array that waits to be computed, and what else there is as it is."""
    from tilewright.runtime.core import streams

    if isinstance(value, LazyArray):
        return value.force()

    return value.result() if isinstance(value, streams.FUTURES) else value  # type: ignore[attr-defined]


def as_array(value: object, what: str) -> Any:
    """An array, as it is; a list of numbers as a new one."""
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        return value
    if isinstance(value, list | tuple) and value and all(host_values.as_scalar(v) is not None for v in value):
        return np.array(value, np.float32 if any(isinstance(v, float) for v in value) else None)
    raise fail("TW009", f"{what} takes an array, got a {type(value).__name__}")


def whole(value: object, what: str) -> int:
    number = host_values.as_whole(value)
    if number is None:
        raise fail("TW009", f"{what} is {shown(value)}, no whole number")
    return number


def extents(value: object) -> Shape:
    """A shape: a list of whole numbers, or one of them."""
    parts = value if isinstance(value, list | tuple) else [value]
    found = tuple(whole(part, "an extent") for part in parts)
    if any(extent < -1 for extent in found):
        raise fail("TW004", f"an array cannot have shape {list(found)}")
    if len(found) > MOST_AXES:
        raise fail("TW003", f"an array cannot have {len(found)} axes", f"it has at most {MOST_AXES}")
    return found


def made_dtype(value: object) -> DType:
    """The element type of an array that is made."""
    found = dtype_of(value)
    if found.is_packed:
        raise fail("TW005", f"'{found}' holds packed blocks, which are made from an array by tw.quantize", "use a type of whole elements, such as f16 or i8")
    return found


def dtype_of(value: object) -> DType:
    if isinstance(value, DType):
        return value
    if isinstance(value, str) and dtypes.is_name(value):
        return dtypes.by_name(value)
    if str(value).startswith("torch.") and dtypes.is_name(str(value)[6:]):
        return dtypes.by_name(str(value)[6:])
    found = dtypes.from_numpy(value) if isinstance(value, np.dtype) else None
    if found is None:
        raise fail("TW009", f"{shown(value)} is no element type", f"choose one of {', '.join(d.name for d in dtypes.SCALARS)}")
    return found


def _axis(value: object, rank: int) -> int:
    axis = whole(value, "axis")
    if not -rank <= axis < rank:
        raise fail("TW003", f"axis {axis} of an array of rank {rank}")
    return axis % rank


def _is_on_gpu(value: object) -> bool:
    return type(value).__name__ == "DeviceArray"


@dataclass(frozen=True)
class _HostCall:
    """One call: the device of new arrays, and the arguments."""

    device: str
    values: dict[str, Any]

    def get(self, name: str, default: object = None) -> Any:
        return self.values.get(name, default)

    def text(self, name: str, default: str) -> str:
        found = self.values.get(name, default)
        if not isinstance(found, str):
            raise fail("TW009", f"{name}={shown(found)} is no string", f"write for example {registry.examples(chr(34))}")
        return found

    def place(self) -> str:
        """Where new arrays are: the emulator's are the host's."""
        from tilewright.execute.devices import array_device, find_device

        found = find_device(self.text("device", self.device))
        return found.id if array_device(found) is not None else "cpu"


# -- shapes -----------------------------------------------------------------------------------------------------------


def _reshape(call: _HostCall) -> object:
    array, shape = as_array(call.get("x"), "reshape"), extents(call.get("shape"))
    size, known = math.prod(array.shape), math.prod(e for e in shape if e >= 0)
    holes = sum(e == -1 for e in shape)
    if holes > 1 or (holes == 0 and known != size) or (holes and (known == 0 or size % known)):
        raise fail("TW004", f"an array of shape {list(array.shape)} ({size} elements) cannot have shape {list(shape)}", "the sizes must agree")
    if isinstance(array, LazyArray):
        return array.reshape(tuple(size // max(1, known) if e == -1 else e for e in shape))
    if is_tensor(array):
        return array.reshape(shape)
    if not _is_on_gpu(array):
        return np.asarray(array).reshape(shape)
    try:
        return array.reshape(*shape)
    except UserError:
        return array.copy().reshape(*shape)


def _split(call: _HostCall) -> object:
    array = as_array(call.get("x"), "split")
    axis = _axis(call.get("axis", 0), len(array.shape))
    extent, parts = int(array.shape[axis]), call.get("parts")
    if isinstance(parts, list | tuple):
        sizes = list(extents(parts))
        if sum(sizes) != extent or min(sizes, default=-1) < 0:
            raise fail("TW004", f"parts of {sizes} are {sum(sizes)} elements, axis {axis} has {extent}")
    else:
        count = whole(parts, "the number of parts")
        if count < 1 or extent % count:
            raise fail("TW004", f"axis {axis} has {extent} elements, which cannot be split into {count} equal parts")
        sizes = [extent // count] * count
    found, first = [], 0
    for size in sizes:
        place = (*(slice(None),) * axis, slice(first, first + size))
        found.append(array.part(axis, first, size) if isinstance(array, LazyArray) else array[place])
        first += size
    return tuple(found)


def _transpose(call: _HostCall) -> object:
    array = as_array(call.get("x"), "transpose")
    if "axes" not in call.values:
        return array.permute(*reversed(range(len(array.shape)))) if is_tensor(array) else array.transpose()
    axes = tuple(_axis(axis, len(array.shape)) for axis in extents(call.get("axes")))
    if sorted(axes) != list(range(len(array.shape))):
        raise fail("TW003", f"axes {list(axes)} are not an order of the {len(array.shape)} axes of the array")
    return array.permute(*axes) if is_tensor(array) else array.transpose(*axes)


def _concat(call: _HostCall) -> object:
    parts = call.get("arrays")
    if not isinstance(parts, list | tuple) or not parts:
        raise fail("TW009", "concat takes a list of arrays", "write concat([a, b], axis=0)")
    arrays = [as_array(settled(part), "concat") for part in parts]
    first = arrays[0]
    axis = _axis(call.get("axis", 0), len(first.shape))
    for position, array in enumerate(arrays):
        rest = [list(a.shape[:axis]) + list(a.shape[axis + 1 :]) for a in (first, array)]
        if len(array.shape) != len(first.shape) or rest[0] != rest[1]:
            raise fail("TW004", f"part 0 has shape {list(first.shape)}, part {position} {list(array.shape)}: they differ beside axis {axis}")
        if array.dtype != first.dtype:
            raise fail("TW006", f"part 0 is {first.dtype}, part {position} {array.dtype}", "convert one with cast")
    if not any(_is_on_gpu(a) for a in arrays):
        return np.concatenate(arrays, axis)
    from tilewright.execute import arrays as made
    from tilewright.execute.devices import device_of

    place = device_of(arrays)
    assert place is not None
    moved = [made.to_device(a, place) for a in arrays]
    total = sum(int(a.shape[axis]) for a in moved)
    result = made.allocate((*first.shape[:axis], total, *first.shape[axis + 1 :]), moved[0].dtype, place)
    start = 0
    for array in moved:
        end = start + int(array.shape[axis])
        result[(*(slice(None),) * axis, slice(start, end))].assign(array)
        start = end
    return result


def _copy(call: _HostCall) -> object:
    array = as_array(call.get("x"), "copy")
    return array.clone() if is_tensor(array) else array.copy()


# -- new arrays -------------------------------------------------------------------------------------------------------


def _filled(call: _HostCall, value: object) -> object:
    shape, dtype, place = extents(call.get("shape")), made_dtype(call.get("dtype", f32)), call.place()
    if any(extent < 0 for extent in shape):
        raise fail("TW004", f"an array cannot have shape {list(shape)}")
    number = host_values.as_scalar(value)
    if number is None:
        raise fail("TW009", f"the value is a {type(value).__name__}, no number")
    if place == "cpu":
        try:
            return np.full(shape, host_values.call("cast", [number, dtype]), dtype.numpy)  # type: ignore[list-item]
        except (MemoryError, ValueError, OverflowError) as error:
            if math.prod(shape) * dtype.itemsize < 1 << 30:
                raise fail("TW006", f"an array of {dtype} cannot hold {shown(number)}") from None
            raise DeviceError.at("TW031", f"no memory for an array of shape {list(shape)} and {dtype}: {error}") from None
    from tilewright.execute.arrays import allocate

    array = allocate(shape, dtype, place)
    array.fill(number)
    return array


def _allocate(call: _HostCall) -> object:
    from tilewright.execute.arrays import allocate

    flags: dict[str, bool] = {}
    for name in ("pinned", "managed"):
        value = call.get(name, False)
        if not isinstance(value, bool):
            raise fail("TW009", f"{name}={shown(value)} is neither true nor false")
        flags[name] = value
    place = None if flags["pinned"] and call.place() == "cpu" else call.place()
    return allocate(extents(call.get("shape")), made_dtype(call.get("dtype", f32)), place, **flags)


def _memory_pool(call: _HostCall) -> object:
    from tilewright.execute.memory import memory_pool

    asked = call.get("device")
    place = None if asked is None and call.place() == "cpu" else call.text("device", call.place())
    return memory_pool(place, call.get("size"), call.get("limit"))


def _to_device(call: _HostCall) -> object:
    from tilewright.execute.arrays import to_device

    copy = call.get("copy")
    if copy is not None and not isinstance(copy, bool):
        raise fail("TW009", f"copy={shown(copy)} is neither true nor false")
    return to_device(call.get("x"), call.place(), copy)


# -- the rest ---------------------------------------------------------------------------------------------------------


def _devices(call: _HostCall) -> object:
    from tilewright.execute.devices import array_device, devices

    found: list[dict[str, object]] = []
    for device in devices():
        has_memory = array_device(device) is not None
        record: dict[str, object] = {"id": device.id, "type": "gpu" if has_memory else device.kind, "name": device.name}
        record |= {"memory": device.memory} if has_memory else {"cores": device.target.multiprocessors}
        found.append(record)
    return found


def _len(call: _HostCall) -> object:
    value = call.get("x")
    shape = getattr(value, "shape", None)
    if isinstance(value, list | tuple | str | dict):
        return len(value)
    if not shape:
        raise fail("TW009", f"len() of a {type(value).__name__}", "it takes a list, a string, a record or an array")
    return int(shape[0])


def _read(call: _HostCall) -> object:
    from tilewright.execute.array_files import read_values

    return read_values(call.text("path", ""))


def _print(call: _HostCall) -> object:
    print(*(shown(value, plain=True) for value in call.get("values", ())))
    return None


def shown(value: object, plain: bool = False) -> str:
    """A value as ZynML writes it; `plain` strings have no quotes."""
    value = settled(value) if plain else value
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if plain else f'"{value}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(shown, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, np.generic):
        return str(value.item())
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return np.array2string(np.asarray(value), threshold=20, edgeitems=3, separator=", ")
    return str(value)


_IMPLEMENTED: dict[str, Callable[[_HostCall], object]] = {
    "reshape": _reshape, "split": _split, "transpose": _transpose, "concat": _concat, "copy": _copy, "len": _len, "print": _print,
    "zeros": lambda call: _filled(call, 0), "ones": lambda call: _filled(call, 1), "full": lambda call: _filled(call, call.get("value")),
    "str": lambda call: shown(call.get("x"), plain=True), "read": _read, "compute_devices": _devices, "allocate": _allocate,
    "memory_pool": _memory_pool,
}  # fmt: skip


# -- arguments --------------------------------------------------------------------------------------------------------


def mismatch(name: str, signature: HostSignature, positional: int, keywords: Sequence[str]) -> str:
    """What is wrong with a call's arguments; empty where nothing is."""
    params = (*signature.needed, *signature.optional)
    for keyword in keywords:
        if keyword not in params:
            return f"{name} has no parameter '{keyword}'"
        if (not signature.several and keyword in params[:positional]) or list(keywords).count(keyword) > 1:
            return f"{name} gets '{keyword}' twice"
    if signature.several:
        return "" if positional or name == "print" or set(signature.needed) <= set(keywords) else f"{name} takes {signature.needed[0]}"
    if positional > len(params):
        return f"{name} takes {len(params)} argument(s), got {positional}"
    missing = [p for p in signature.needed[positional:] if p not in keywords]
    return f"{name} lacks '{missing[0]}'" if missing else ""


def bound(signature: HostSignature, positional: Sequence[object], keywords: Mapping[str, object]) -> dict[str, object]:
    """Arguments by parameter, of a call that has no mismatch."""
    if signature.several and len(positional) > 1 and isinstance(positional[-1], DType) and "dtype" in signature.optional and "dtype" not in keywords:
        return bound(signature, positional[:-1], {**keywords, "dtype": positional[-1]})  # zeros(n, m, f32)
    if signature.several and positional:
        first: object = list(positional)
        if signature.needed[0] == "shape" and len(positional) == 1 and isinstance(positional[0], list | tuple):
            first = positional[0]
        return {signature.needed[0]: first, **keywords}
    return dict(zip((*signature.needed, *signature.optional), positional)) | dict(keywords)
