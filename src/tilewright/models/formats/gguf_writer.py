"""GGUF files, written. In: a path, metadata, arrays by name; out: a file of version 3 that every reader of the format takes.

Numbers of Python become the narrowest of u32, i32, u64, i64 that holds them, floats f32; NumPy's keep their type. Packed arrays are written
as they are. The file is written beside its place and renamed, so that it is whole or absent.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.errors import UserError
from tilewright.execute.numpy_files import shown_name
from tilewright.models.formats import gguf_layout as layout
from tilewright.runtime.memory.packed_array import PackedArray

_TYPE_OF_NUMBERS = {dtype: number for number, dtype in layout.NUMBERS.items()}
_TYPE_OF_TENSORS = {dtype: number for number, dtype in layout.DTYPES.items()}


def write_gguf(path: str | os.PathLike[str], metadata: Mapping[str, Any], tensors: Mapping[str, Any], *, alignment: int = layout.ALIGNMENT) -> None:
    """Writes a model: metadata (numbers, bools, strings, lists of one kind) and arrays (NumPy's, or packed ones on the host)."""
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 30:
        raise UserError.at("TW016", f"alignment={alignment!r}: give a power of two from 8 on")
    given = metadata.get("general.alignment", alignment)
    if given != alignment:
        raise UserError.at("TW016", f"general.alignment is {given!r}, and alignment={alignment}", help="give alignment= alone")
    keys = {**metadata, **({"general.alignment": np.uint32(alignment)} if alignment != layout.ALIGNMENT else {})}
    head = [layout.MAGIC, struct.pack("<IQQ", layout.VERSIONS[-1], len(tensors), len(keys))]
    for key, value in keys.items():
        head += [_text(_name(key, "key")), _value(value, key)]
    arrays: list[np.ndarray] = []
    offset = 0
    for name, tensor in tensors.items():
        kind, shape, array = _tensor(name, tensor)
        head += [_text(_name(name, "tensor")), struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)]
        arrays.append(array)
        offset += -(-array.nbytes // alignment) * alignment
    header = b"".join(head)
    place = Path(path)
    try:
        handle, scratch = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    except OSError as error:
        raise UserError.at("TW007", f"'{place}' cannot be written: {error.strerror or error}") from None
    try:
        with open(handle, "wb") as file:
            file.write(header + bytes(-len(header) % alignment))
            for array in arrays:
                file.write(memoryview(array.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
                file.write(bytes(-array.nbytes % alignment))
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(scratch, 0o666 & ~mask)
        os.replace(scratch, place)
    except OSError as error:
        Path(scratch).unlink(missing_ok=True)
        raise UserError.at("TW007", f"'{place}' cannot be written: {error.strerror or error}") from None
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def _name(name: object, what: str) -> str:
    if not isinstance(name, str) or not name:
        raise UserError.at("TW009", f"{name!r} is no name of a {what}")
    return name


def _text(text: str) -> bytes:
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError.at("TW009", f"{shown_name(text)} has no form in UTF-8") from None
    return struct.pack("<Q", len(raw)) + raw


def _tensor(name: str, tensor: Any) -> tuple[int, tuple[int, ...], np.ndarray]:
    """Type, shape and bytes of a tensor."""
    if isinstance(tensor, PackedArray):
        kind, shape, array = _TYPE_OF_TENSORS.get(tensor.dtype), tensor.shape, tensor.blocks
        if not isinstance(array, np.ndarray):
            raise UserError.at("TW009", f"tensor {shown_name(name)} is on a device", help="copy its blocks to the host first")
        label = str(tensor.dtype)
    else:
        array = np.asarray(tensor)
        array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        dtype = dtypes.from_numpy(array.dtype)
        kind, shape, label = _TYPE_OF_TENSORS.get(dtype) if dtype else None, array.shape, str(array.dtype)
    if kind is None:
        raise UserError.at("TW006", f"tensor {shown_name(name)} is {label}, which GGUF has no type for", help=f"it has {layout.SUPPORTED}")
    if len(shape) > layout.MOST_AXES:
        raise UserError.at("TW003", f"tensor {shown_name(name)} has {len(shape)} axes, and GGUF's have at most {layout.MOST_AXES}")
    return kind, shape, np.ascontiguousarray(array)


def _value(value: Any, key: str) -> bytes:
    """The type of a value and its bytes."""
    if isinstance(value, str):
        return struct.pack("<I", layout.STRING) + _text(value)
    if isinstance(value, list | tuple):
        return struct.pack("<I", layout.ARRAY) + _list(value, key)
    array = _numbers(value, key)
    kind = struct.pack("<I", _TYPE_OF_NUMBERS[array.dtype])
    if not array.ndim:
        return kind + array.tobytes()
    if array.ndim > 1:
        raise UserError.at("TW003", f"the value of {shown_name(key)} has {array.ndim} axes", help="lists have one")
    return struct.pack("<I", layout.ARRAY) + kind + struct.pack("<Q", len(array)) + array.tobytes()


def _list(values: list[Any] | tuple[Any, ...], key: str) -> bytes:
    if values and all(isinstance(value, str) for value in values):
        return struct.pack("<IQ", layout.STRING, len(values)) + b"".join(map(_text, values))
    if values and not all(isinstance(value, bool | int | float | np.generic) for value in values):
        raise UserError.at("TW009", f"the value of {shown_name(key)} is a list of more than one kind, or of what GGUF has no type for")
    array = _numbers(list(values), key) if values else np.empty(0, np.int32)
    return struct.pack("<IQ", _TYPE_OF_NUMBERS[array.dtype], len(array)) + array.tobytes()


def _numbers(value: Any, key: str) -> np.ndarray:
    """Numbers in a type that GGUF has."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if array.dtype in _TYPE_OF_NUMBERS:
            return array
    elif isinstance(value, bool) or (isinstance(value, list) and all(type(v) is bool for v in value)):
        return np.array(value, np.bool_)
    elif isinstance(value, int | float | list):
        flat = value if isinstance(value, list) else [value]
        if all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in flat):
            low, high = min(flat), max(flat)
            for kind in ("<u4", "<i4", "<u8", "<i8"):
                bounds = np.iinfo(kind)
                if bounds.min <= low and high <= bounds.max:
                    return np.array(value, kind)
        elif all(isinstance(v, int | float | np.generic) and not isinstance(v, bool) for v in flat):
            return np.array(value, "<f4")
    raise UserError.at("TW009", f"the value of {shown_name(key)} is {shown_name(repr(value))}, which GGUF has no type for")
