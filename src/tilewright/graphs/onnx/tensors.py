"""Tensors of an ONNX file as NumPy arrays: raw and typed data, element types, data in other files.

In: a `TensorRecord`. Out: an array, a view of the file where its data can be read in place. The data must be exactly as long as the
dims say, so nothing is allocated that the file does not hold. External data must lie in the folder of the model.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import ml_dtypes
import numpy as np

from tilewright.graphs.onnx.model import TensorRecord
from tilewright.graphs.onnx.wire import Malformed, fixed, varints

DTYPES: dict[int, np.dtype] = {
    number: np.dtype(kind)
    for number, kind in {
        1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16,
        11: np.float64, 12: np.uint32, 13: np.uint64, 16: ml_dtypes.bfloat16, 17: ml_dtypes.float8_e4m3fn, 19: ml_dtypes.float8_e5m2,
    }.items()
}  # fmt: skip
"""Element types by their numbers in the file. Four-bit integers (21, 22) are unpacked to bytes."""
NAMES = {
    0: "undefined", 8: "string", 14: "complex64", 15: "complex128", 18: "float8e4m3fnuz", 20: "float8e5m2fnuz", 21: "uint4", 22: "int4",
    23: "float4e2m1", 24: "float8e8m0", 25: "uint2", 26: "int2",
}  # fmt: skip
_NIBBLES = {21: np.dtype(np.uint8), 22: np.dtype(np.int8)}
MOST_ELEMENTS = 1 << 48
"""More than any machine holds: extents beyond are mistakes, and their products would leave 64 bits."""


def dtype_of(number: int, what: str) -> np.dtype:
    """The NumPy dtype of an element type of the file."""
    found = DTYPES.get(number) or _NIBBLES.get(number)
    if found is None:
        raise Malformed(f"{what} has element type {NAMES.get(number, number)}, which there is not here")
    return found


def shape_of(record: TensorRecord) -> tuple[int, ...]:
    """Its extents, none negative and not too many elements."""
    if any(d < 0 for d in record.dims) or math.prod(record.dims) > MOST_ELEMENTS or len(record.dims) > 32:
        raise Malformed(f"tensor '{record.name}' has the dims {record.dims[:33]}")
    return tuple(record.dims)


class ExternalFiles:
    """Data that lie beside the model: files inside its folder, mapped once each."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._mapped: dict[Path, memoryview] = {}

    def data(self, record: TensorRecord) -> memoryview:
        """The bytes of a tensor."""
        what = f"external data of tensor '{record.name}'"
        location = record.external.get("location", "")
        if self.folder is None:
            raise Malformed(f"{what} lie in '{location}', and the model came as bytes, without a folder")
        root = self.folder.resolve()
        path = (root / location).resolve() if location else root
        if not location or Path(location).is_absolute() or root not in path.parents:
            raise Malformed(f"{what} lie in '{location}', which is not inside the model's folder")
        try:
            offset, length = (int(record.external.get(key, "0")) for key in ("offset", "length"))
        except ValueError:
            raise Malformed(f"{what} have no whole number as offset or length") from None
        view = self._map(path, what)
        length = length if "length" in record.external else len(view) - offset
        if offset < 0 or length < 0 or offset + length > len(view):
            raise Malformed(f"{what}: bytes {offset} to {offset + length} of '{location}', which has {len(view)}")
        return view[offset : offset + length]

    def _map(self, path: Path, what: str) -> memoryview:
        found = self._mapped.get(path)
        if found is None:
            if not path.is_file():
                raise Malformed(f"{what}: there is no file '{path.name}'")
            found = self._mapped[path] = map_file(path)
        return found


def map_file(path: Path) -> memoryview:
    """The bytes of a file, read only and mapped where that goes. Raises `OSError`."""
    with path.open("rb") as file:
        try:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:  # empty files cannot be mapped
            return memoryview(file.read())


def array_of(record: TensorRecord, files: ExternalFiles) -> np.ndarray:
    """The tensor as an array, read only where it is a view. Raises `Malformed`."""
    what = f"tensor '{record.name}'"
    dtype, shape = dtype_of(record.data_type, what), shape_of(record)
    if record.segmented:
        raise Malformed(f"{what} comes in segments, which no ONNX file uses")
    count = math.prod(shape)
    if record.location == 1 or record.external:
        return _from_raw(files.data(record), record.data_type, dtype, shape, count, what)
    if record.raw is not None:
        return _from_raw(record.raw, record.data_type, dtype, shape, count, what)
    return _from_typed(record, dtype, shape, count, what)


def _from_raw(data: memoryview, number: int, dtype: np.dtype, shape: tuple[int, ...], count: int, what: str) -> np.ndarray:
    packed = number in _NIBBLES
    needed = (count + 1) // 2 if packed else count * dtype.itemsize
    if len(data) != needed:
        raise Malformed(f"{what} of shape {list(shape)} takes {needed} bytes, and has {len(data)}")
    if packed:
        return _unpacked(np.frombuffer(data, np.uint8), number, count).reshape(shape)
    if dtype == np.bool_:
        return np.frombuffer(data, np.uint8).astype(bool).reshape(shape)
    found = np.frombuffer(data, dtype)
    return (found if found.flags.aligned else found.copy()).reshape(shape)


def _unpacked(data: np.ndarray, number: int, count: int) -> np.ndarray:
    """Four-bit integers, the lower half of each byte first."""
    halves = np.stack([data & 15, data >> 4], axis=-1).reshape(-1)[:count]
    return halves if number == 21 else ((halves.astype(np.int8) ^ 8) - 8).astype(np.int8)


_HOLDERS = {"float": {1}, "int32": {2, 3, 4, 5, 6, 9, 10, 16, 17, 19, 21, 22}, "int64": {7}, "double": {11}, "uint64": {12, 13}}
"""Which field holds the data of which element types."""


def _from_typed(record: TensorRecord, dtype: np.dtype, shape: tuple[int, ...], count: int, what: str) -> np.ndarray:
    values: list[float] = []
    for holder, kind, value in record.typed:
        if record.data_type not in _HOLDERS.get(holder, ()):
            raise Malformed(f"{what} has {holder}_data, which its element type does not use")
        values += fixed(value, kind, "f" if holder == "float" else "d") if holder in ("float", "double") else varints(value, kind)
    packed = record.data_type in _NIBBLES
    if len(values) != ((count + 1) // 2 if packed else count):
        raise Malformed(f"{what} of shape {list(shape)} has {len(values)} numbers")
    if record.data_type == 1 or record.data_type == 11:
        return np.array(values, dtype).reshape(shape)
    integers = np.array([int(v) & 0xFFFFFFFFFFFFFFFF for v in values], np.uint64)
    if packed:
        return _unpacked((integers & np.uint64(255)).astype(np.uint8), record.data_type, count).reshape(shape)
    if record.data_type == 9:
        return np.asarray(integers != 0).reshape(shape)
    bits = np.dtype(f"u{dtype.itemsize}")
    return integers.astype(bits).view(dtype).reshape(shape)
