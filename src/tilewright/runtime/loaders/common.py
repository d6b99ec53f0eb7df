"""What loaders share: sizes from shapes, checks, and errors that name the argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Description = Mapping[str, Any]
_CALLS: dict[str, Callable[[int, int], int]] = {
    "floordiv": lambda a, b: a // b if b else 0,
    "ceildiv": lambda a, b: -(-a // b) if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "min": min,
    "max": max,
}
_TYPES = {
    "bool": ("|b1",), "i8": ("|i1",), "i16": ("<i2",), "i32": ("<i4",), "i64": ("<i8",), "u8": ("|u1",), "u16": ("<u2",),
    "u32": ("<u4",), "u64": ("<u8",), "f16": ("<f2",), "f32": ("<f4",), "f64": ("<f8",), "bf16": ("<V2", "|V2", "<u2", "<f2"),
    "f8e4m3": ("|V1", "<V1", "|u1", "<f1"), "f8e5m2": ("|V1", "<V1", "|u1", "<f1"),
}  # fmt: skip
"""How the array interface writes each element type; those it has no code for travel as bytes."""
_BYTES = {"bool": 1, "bf16": 2, "f8e4m3": 1, "f8e5m2": 1}


def itemsize(dtype: str) -> int:
    return _BYTES.get(dtype) or int(dtype[1:]) // 8


class BoundSizes:
    """Arithmetic over named sizes, each expression compiled once."""

    def __init__(self) -> None:
        self._compiled: dict[str, Any] = {}

    def value(self, expression: str, sizes: Mapping[str, int]) -> int:
        code = self._compiled.get(expression)
        if code is None:
            code = self._compiled[expression] = compile(expression, "<size>", "eval")
        return int(eval(code, {"__builtins__": {}, **_CALLS}, dict(sizes)))

    def values(self, expressions: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(self.value(expression, sizes) for expression in expressions)


_COMPUTED = BoundSizes()
"""Sizes that a call computes from its numbers."""


class CallArguments:
    """One array argument: address, shape, strides in elements."""

    def __init__(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, holder: object) -> None:
        self.pointer = pointer
        self.shape = shape
        self.strides = strides or row_major(shape)
        self.holder = holder


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def from_interface(name: str, dtype: str, interface: Mapping[str, Any], holder: object, written: bool = False) -> CallArguments:
    """An array by its `__array_interface__` or `__cuda_array_interface__`. Raises where it is not what the code takes."""
    if interface["typestr"] not in _TYPES[dtype]:
        raise TypeError(f"'{name}' has elements of type {interface['typestr']}, but this code takes {dtype}")
    if not _is_named(dtype, interface["typestr"], holder):
        raise TypeError(f"'{name}' has elements of type {getattr(holder, 'dtype', '?')}, but this code takes {dtype}")
    if interface.get("mask") is not None or (hasattr(holder, "mask") and hasattr(holder, "filled")):
        raise TypeError(f"'{name}' is a masked array, whose mask this code does not see; pass x.filled(value)")
    shape, size = tuple(int(extent) for extent in interface["shape"]), itemsize(dtype)
    strides, data = interface.get("strides"), interface.get("data")
    if not isinstance(data, tuple):
        raise TypeError(f"'{name}' does not say where its memory is")
    if any(extent < 0 for extent in shape) or (strides is not None and len(strides) != len(shape)):
        raise ValueError(f"'{name}' cannot have shape {shape} and strides {strides}")
    if strides is not None and any(step % size for extent, step in zip(shape, strides) if extent > 1):
        raise ValueError(f"'{name}' has strides of {tuple(strides)} bytes, which are not whole elements of {size}; copy it first")
    steps = None if strides is None else tuple(step // size for step in strides)
    return CallArguments(checked_pointer(name, int(data[0] or 0), shape, size, bool(data[1]) and written), shape, steps, holder)


_NAMES = {"bf16": ("bfloat16",), "f8e4m3": ("float8_e4m3fn",), "f8e5m2": ("float8_e5m2",)}


def _is_named(dtype: str, typestr: str, holder: object) -> bool:
    """Whether elements the interface has no code for are called what they should be; bytes (V, u) without such a name are taken as they are."""
    if dtype not in _NAMES:
        return True
    called = str(getattr(holder, "dtype", "")).rpartition(".")[2]
    return called in _NAMES[dtype] or ("float" not in called and "f" not in typestr)


def checked_pointer(name: str, pointer: int, shape: Sequence[int], size: int, refuse: bool = False) -> int:
    """The address of an array that has memory, at a whole number of elements; `refuse` is whether it is read-only and to be written."""
    if 0 not in shape and not pointer:
        raise ValueError(f"'{name}' has shape {tuple(shape)} and no memory")
    if 0 not in shape and pointer % size:
        raise ValueError(f"'{name}' lies at {pointer:#x}, which is not a multiple of its elements' {size} bytes; copy it first")
    if refuse:
        raise ValueError(f"'{name}' is read-only, and the function writes to it")
    return pointer


def checked_number(name: str, dtype: str, value: Any) -> Any:
    """A number as the code takes it: nothing is rounded to an integer, and nothing wraps."""
    if hasattr(value, "shape"):
        if tuple(value.shape):
            raise TypeError(f"'{name}' is a number, got an array of shape {tuple(value.shape)}")
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"'{name}' is {dtype}, got a {type(value).__name__}")
    if dtype[0] in "fb" and dtype != "bool":
        return float(value)
    if isinstance(value, float):
        raise TypeError(f"'{name}' is {dtype}, got {value!r}")
    if dtype == "bool":
        return bool(value)
    bits = int(dtype[1:])
    low, high = (0, (1 << bits) - 1) if dtype[0] == "u" else (-(1 << bits - 1), (1 << bits - 1) - 1)
    if not low <= value <= high:
        raise ValueError(f"'{name}' is {dtype}, which cannot hold {value}")
    return int(value)


def extent_of_memory(array: CallArguments, size: int) -> tuple[int, int]:
    """The first byte an array touches, and the one behind its last."""
    if 0 in array.shape:
        return array.pointer, array.pointer
    steps = [(extent - 1) * step * size for extent, step in zip(array.shape, array.strides)]
    return array.pointer + sum(min(0, s) for s in steps), array.pointer + sum(max(0, s) for s in steps) + size


def overlapping(name: str, description: Description, arrays: Mapping[str, CallArguments]) -> str:
    """The name of another array that may share memory with this one; '' where there is none."""
    sizes = {param[0]: itemsize(param[1]) for param in (*description["inputs"], *description["outputs"]) if len(param) > 2}
    first, last = extent_of_memory(arrays[name], sizes[name])
    for other, array in arrays.items():
        low, high = extent_of_memory(array, sizes[other])
        if other != name and low < last and first < high:
            return other
    return ""


def bind(description: Description, arrays: Mapping[str, CallArguments], scalars: Mapping[str, Any]) -> dict[str, int]:
    """The value of every size name. Raises ValueError with the values where shapes do not fit each other."""
    ranks = {param[0]: len(param[2]) for param in (*description["inputs"], *description["outputs"]) if len(param) > 2}
    for name, given in arrays.items():
        if len(given.shape) != ranks[name]:
            raise ValueError(f"'{name}' has {len(given.shape)} axes, but this code takes {ranks[name]}")
    sizes = {name: int(value) for name, value in scalars.items() if isinstance(value, int)}
    for name, array, axis, stride in description["bindings"]:
        if array in arrays:
            sizes[name] = arrays[array].strides[axis] if stride else arrays[array].shape[axis]
    for name, expression in description["computed"]:
        sizes[name] = _COMPUTED.value(expression, sizes)
    return sizes


def check(description: Description, sizes: Mapping[str, int], arrays: Mapping[str, CallArguments], evaluate: BoundSizes) -> None:
    """Everything the code relies on. Raises ValueError."""
    for left, relation, right, message in description["checks"]:
        a, b = evaluate.value(left, sizes), evaluate.value(right, sizes)
        if not {"eq": a == b, "le": a <= b, "lt": a < b}[relation]:
            raise ValueError(f"{message} ({left} is {a}, {right} is {b})")
    for name, _, shape, strides, align in (p for p in (*description["inputs"], *description["outputs"]) if len(p) > 2):
        given = arrays.get(name)
        if given is None:
            continue
        extents, steps = evaluate.values(shape, sizes), evaluate.values(strides, sizes)
        if given.shape != extents:
            raise ValueError(f"'{name}' has shape {given.shape}, but {extents} is needed")
        if 0 not in extents and any(n > 1 and s != e for n, s, e in zip(extents, given.strides, steps)):
            raise ValueError(f"'{name}' has strides {given.strides} (in elements), but this code was made for {steps}")
        if align > 1 and given.pointer % align:
            raise ValueError(f"'{name}' lies at {given.pointer:#x}, which is not a multiple of {align}")


def check_in_place(description: Description, arrays: Mapping[str, CallArguments]) -> None:
    """Arrays that are written where they lie share no memory with others, nor their elements with each other. Raises ValueError."""
    for name in description["in_place"]:
        other = overlapping(name, description, arrays)
        if other:
            raise ValueError(f"'{name}' is written in place and shares memory with '{other}'")
        reach = 0
        for step, extent in sorted((abs(s), e) for s, e in zip(arrays[name].strides, arrays[name].shape) if e > 1):
            if step <= reach and 0 not in arrays[name].shape:
                raise ValueError(f"'{name}' is written in place, and some of its elements share memory")
            reach += step * (extent - 1)


def outputs_of(out: object, count: int) -> tuple[object, ...]:
    """`out=` as one object for each output; None for those the loader makes."""
    given = (None,) * count if out is None else out if isinstance(out, tuple) else (out,)
    if len(given) != count:
        raise ValueError(f"out= has {len(given)} array(s), but there are {count} results")
    return given
