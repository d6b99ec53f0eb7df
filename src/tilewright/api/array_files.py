"""Files of arrays as values: `.npy` is an array, `.npz` and `.safetensors` are records of arrays.

In: a path. Out: a NumPy array, or a record. Names with dots make records in records (`layers.0.attn.weight` is `r.layers[0].attn.weight`;
numbers from 0 on make lists). Safetensors are mapped, not read: what is not used is never loaded. Files that are missing, damaged or of
another kind are a `UserError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError

_DTYPES: dict[str, DType] = {
    "BOOL": dtypes.bool_, "I8": dtypes.i8, "I16": dtypes.i16, "I32": dtypes.i32, "I64": dtypes.i64, "U8": dtypes.u8, "U16": dtypes.u16,
    "U32": dtypes.u32, "U64": dtypes.u64, "F16": dtypes.f16, "BF16": dtypes.bf16, "F32": dtypes.f32, "F64": dtypes.f64,
    "F8_E4M3": dtypes.f8e4m3, "F8_E5M2": dtypes.f8e5m2,
}  # fmt: skip
_MOST_HEADER = 100 << 20
"""Bytes of a header; larger ones are refused, as the format says."""


def read_values(path: str | Path) -> Any:
    """The array or record in a `.npy`, `.npz` or `.safetensors` file."""
    suffix = Path(path).suffix.lower()
    if suffix == ".safetensors":
        return nested(read_safetensors(path), str(path))
    if suffix not in (".npy", ".npz"):
        raise UserError.at("TW007", f"'{path}' is no file of arrays", help="give a .npy, .npz or .safetensors file")
    try:
        found = np.load(path, allow_pickle=False)
        if suffix == ".npy":
            return found
        with found:
            return nested({name: found[name] for name in found.files}, str(path))
    except FileNotFoundError:
        raise UserError.at("TW007", f"file '{path}' does not exist", help="give a .npy, .npz or .safetensors file") from None
    except (OSError, ValueError, EOFError) as error:
        raise UserError.at("TW007", f"file '{path}' cannot be read as {suffix}: {error}") from None


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file by name, mapped into memory and read-only."""
    try:
        size = Path(path).stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER):
                raise _damaged(path, f"it has {size} bytes, its header would have {length}")
            header = json.loads(file.read(length))
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
        raise UserError.at("TW007", f"file '{path}' {reason}", help="give a .npy, .npz or .safetensors file") from None
    except ValueError as error:
        raise _damaged(path, f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no record")
    first = 8 + length
    data = np.memmap(path, np.uint8, "r", offset=first, shape=(size - first,)) if size > first else np.empty(0, np.uint8)
    return {name: _array(path, name, entry, data) for name, entry in header.items() if name != "__metadata__"}


def _array(path: str | Path, name: str, entry: object, data: np.ndarray) -> np.ndarray:
    try:
        kind, shape, (begin, end) = entry["dtype"], [int(n) for n in entry["shape"]], entry["data_offsets"]  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"'{name}' has no dtype, shape and offsets") from None
    dtype = _DTYPES.get(kind)
    if dtype is None:
        raise UserError.at("TW007", f"'{name}' of '{path}' has element type {kind!r}", help=f"known are {', '.join(_DTYPES)}")
    wanted = math.prod(shape) * dtype.numpy.itemsize
    if not all(isinstance(n, int) for n in (begin, end)) or min(shape, default=0) < 0 or not 0 <= begin <= end <= len(data) or end - begin != wanted:
        raise _damaged(path, f"'{name}' is {kind} {shape}, {wanted} bytes, at {begin}..{end} of {len(data)}")
    piece = data[begin:end]
    if piece.ctypes.data % dtype.numpy.itemsize:
        piece = piece.copy()
    found: np.ndarray = piece.view(dtype.numpy).reshape(shape)
    return found.view(np.ndarray)


def _damaged(path: str | Path, reason: str) -> UserError:
    error = UserError.at("TW007", f"file '{path}' is no safetensors file: {reason}")
    assert isinstance(error, UserError)
    return error


def nested(arrays: Mapping[str, np.ndarray], path: str = "") -> dict[str, Any]:
    """Arrays with dotted names as records in records."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
            if not isinstance(place, dict):
                raise UserError.at("TW007", f"'{name}' of '{path}' is inside an array", help="rename one of them")
        if last in place:
            raise UserError.at("TW007", f"'{name}' of '{path}' is an array and has others inside", help="rename one of them")
        place[last] = array
    return {key: _with_lists(value) for key, value in tree.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {key: _with_lists(part) for key, part in value.items()}
    numbers = [str(n) for n in range(len(parts))]
    return [parts[n] for n in numbers] if parts and set(parts) == set(numbers) else parts
