"""Calls an exported CPU library through ctypes."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tilewright.runtime.loaders.common import (
    BoundSizes,
    CallArguments,
    Description,
    bind,
    check,
    check_in_place,
    checked_number,
    from_interface,
    outputs_of,
    overlapping,
)

_CTYPES = {
    "bool": ctypes.c_uint8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}  # fmt: skip
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_RUNNER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class ExportedCpuProgram:
    """The exported function: arrays and numbers in, arrays out. `threads` limits the threads of a call; 0 means all cores."""

    def __init__(self, description: Description, folder: str = "") -> None:
        self.description = description
        self._sizes = BoundSizes()
        path = os.path.join(folder or os.path.dirname(os.path.abspath(__file__)), description["library"])
        self._library = ctypes.CDLL(path)
        self._function = getattr(self._library, description["symbol"] + "_with")
        self._function.restype = ctypes.c_int32
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, *inputs: Any, out: Any = None, threads: int = 0) -> Any:
        d = self.description
        if len(inputs) != len(d["inputs"]):
            raise TypeError(f"{d['name']} takes {', '.join(p[0] for p in d['inputs'])}; got {len(inputs)} argument(s)")
        arrays: dict[str, CallArguments] = {}
        scalars: dict[str, Any] = {}
        for param, value in zip(d["inputs"], inputs):
            if len(param) > 2:
                arrays[param[0]] = _array(param[0], param[1], value, param[0] in d["in_place"])
            else:
                scalars[param[0]] = checked_number(param[0], param[1], value)
        given = outputs_of(out, len(d["outputs"]))
        arrays.update({p[0]: _array(p[0], p[1], item, True) for p, item in zip(d["outputs"], given) if item is not None})
        sizes = bind(d, arrays, scalars)
        results = []
        for param, item in zip(d["outputs"], given):
            if item is None:
                item = _empty(param[0], param[1], self._sizes.values(param[2], sizes))
                arrays[param[0]] = _array(param[0], param[1], item)
            results.append(item)
        sizes.update({k: v for k, v in bind(d, arrays, scalars).items() if k not in sizes})
        check(d, sizes, arrays, self._sizes)
        check_in_place(d, arrays)
        copies: list[tuple[Any, Any]] = []
        for param, item in zip(d["outputs"], given):
            # An array that is read or written elsewhere, too, gets its result at the end.
            if item is not None and overlapping(param[0], d, arrays):
                temporary = _empty(param[0], param[1], arrays[param[0]].shape)
                copies.append((arrays[param[0]].holder, temporary))
                arrays[param[0]] = _array(param[0], param[1], temporary)
        words: list[Any] = []
        for param in (*d["inputs"], *d["outputs"]):
            scalar = len(param) == 2
            words.append(_CTYPES[param[1]](scalars[param[0]]) if scalar else ctypes.c_void_p(arrays[param[0]].pointer))
        words += [ctypes.c_int64(sizes[name]) for name in d["sizes"]]
        self._call(words, threads if threads > 0 else os.cpu_count() or 1)
        for target, temporary in copies:
            target[...] = temporary
        return results[0] if len(results) == 1 else tuple(results) or None

    def _call(self, words: list[Any], threads: int) -> None:
        errors: list[BaseException] = []

        def run(context: object, body: int, slots: int, blocks: int) -> None:
            try:
                self._run(_BODY(body), slots, blocks, threads)
            except BaseException as error:  # must not pass through the library
                errors.append(error)

        runner = _RUNNER(run)
        code = self._function(*words, runner if threads > 1 else None, None)
        if errors:
            raise errors[0]
        if code == -1:
            raise MemoryError(f"{self.description['name']}: no memory for scratch arrays")
        if code == -4:
            raise ValueError(f"{self.description['name']}: a number computed from the sizes is more than 64 bits hold")
        if code < -1000:
            raise IndexError(self.description["sites"][-1001 - code])
        if code:
            raise ValueError(f"{self.description['name']} refused the call with code {code}")

    def _run(self, body: Any, slots: int, blocks: int, threads: int) -> None:
        """All blocks, a few pieces for each thread; ctypes lets go of the interpreter's lock meanwhile."""
        grain = max(1, -(-blocks // (4 * threads)))
        if blocks <= grain:
            body(slots, 0, blocks)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads)
        pieces = [self._pool.submit(body, slots, start, min(blocks, start + grain)) for start in range(0, blocks, grain)]
        for piece in pieces:
            piece.result()


def _array(name: str, dtype: str, value: Any, written: bool = False) -> CallArguments:
    interface = getattr(value, "__array_interface__", None)
    if interface is None and hasattr(value, "__array__"):
        import numpy

        if written and not type(value).__module__.startswith("torch"):
            raise TypeError(f"out= for '{name}' is a {type(value).__name__}, which does not share its memory")
        value = numpy.asarray(value)
        interface = value.__array_interface__
    if interface is None:
        raise TypeError(f"'{name}' is a {type(value).__name__}, not an array with __array_interface__")
    return from_interface(name, dtype, interface, value, written)


def _empty(name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """A new array; needs NumPy (and ml_dtypes for the small floats), so that without them `out=` must be given."""
    import numpy

    special = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
    if dtype in special:
        import ml_dtypes

        return numpy.empty(shape, getattr(ml_dtypes, special[dtype]))
    kinds = {"f": "float", "i": "int", "u": "uint"}
    return numpy.empty(shape, "bool" if dtype == "bool" else kinds[dtype[0]] + dtype[1:])
