"""Safetensors files. In: a path; out: arrays by name, read-only; those of large files are mapped into memory.

A file that another program makes shorter while it is mapped takes its pages with it, and the system ends the process that touches them. So files are
read where reading costs little; a larger one must stay as it is while its arrays are in use, and is replaced by renaming a new one over it.

A header is believed only where it is exactly what the format says: UTF-8 JSON that begins with `{`, each name once, offsets that cover the
data without overlap or holes. Everything else is a `UserError` that names the file.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.execute.numpy_files import no_such, opened, shown_name

_DTYPES: dict[str, DType] = {
    "BOOL": dtypes.bool_, "I8": dtypes.i8, "I16": dtypes.i16, "I32": dtypes.i32, "I64": dtypes.i64, "U8": dtypes.u8, "U16": dtypes.u16,
    "U32": dtypes.u32, "U64": dtypes.u64, "F16": dtypes.f16, "BF16": dtypes.bf16, "F32": dtypes.f32, "F64": dtypes.f64,
    "F8_E4M3": dtypes.f8e4m3, "F8_E5M2": dtypes.f8e5m2,
}  # fmt: skip
_MOST_HEADER = 100 << 20
"""Bytes of a header; larger ones are refused, as the format says."""

MAPPED_FROM = 1 << 26
"""Bytes of data from which on a file is mapped into memory instead of read."""

Wrong = Callable[[str], UserError]


@dataclass(frozen=True)
class SafetensorsEntry:
    """Where an array lies in a file, from its first byte on."""

    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file by name, read-only; those of large files are mapped into memory."""

    def wrong(reason: str) -> UserError:
        return no_such(path, "safetensors", reason)

    file, size = opened(path)
    with file:
        first, entries = read_entries(file, size, path)
        data = _data(file, first, size - first, wrong)
    return {name: _array(entry, data[entry.begin - first : entry.end - first], name, wrong) for name, entry in entries.items()}


def read_entries(file: BinaryIO, size: int, path: str | Path) -> tuple[int, dict[str, SafetensorsEntry]]:
    """Where the data of an open file begin, and what its header says of the arrays. All of them lie inside the file, side by side."""

    def wrong(reason: str) -> UserError:
        return no_such(path, "safetensors", reason)

    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MOST_HEADER):
        raise wrong(f"it has {size} bytes, its header would have {length}")
    header = _header(file.read(length), wrong)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise wrong("its __metadata__ is no record")
    first = 8 + length
    places: list[tuple[int, int, str]] = []
    found = {name: _entry(path, name, entry, first, size - first, places, wrong) for name, entry in header.items()}
    _check_layout(places, size - first, wrong)
    return first, found


def _data(file: BinaryIO, first: int, count: int, wrong: Wrong) -> np.ndarray:
    """The bytes behind the header, all of which must be there."""
    if count < MAPPED_FROM:
        data = np.frombuffer(file.read(count), np.uint8)
        found = len(data)
    else:
        try:
            data = np.memmap(file, np.uint8, "r", offset=first, shape=(count,))
        except (OSError, ValueError) as error:
            raise wrong(f"it cannot be mapped into memory: {error}") from None
        found = os.fstat(file.fileno()).st_size - first
    if found < count:
        raise wrong(f"it was made shorter while it was read: {first + found} bytes are left of {first + count}")
    return data


def _header(data: bytes, wrong: Wrong) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise wrong(f"its header has {shown_name(name)} twice")
        return made

    def constant(word: str) -> float:
        raise ValueError(f"{word} is no number of JSON")

    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            raise wrong("its header begins with a byte order mark, not with '{'")
        header = json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except UnicodeDecodeError:
        raise wrong("its header is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise wrong(f"its header is no JSON: {error}") from None
    except ValueError as error:
        raise wrong(f"its header is no JSON: {error}") from None
    except RecursionError:
        raise wrong("its header is no JSON: it is nested too deep") from None
    if not isinstance(header, dict):
        raise wrong("its header is no record")
    return header


def _is_whole(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _entry(path: str | Path, name: str, entry: object, first: int, size: int, places: list[tuple[int, int, str]], wrong: Wrong) -> SafetensorsEntry:
    label = shown_name(name)
    kind, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets")) if isinstance(entry, dict) else (None, None, None)
    if not isinstance(kind, str) or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise wrong(f"{label} has no dtype, shape and offsets")
    if not all(map(_is_whole, shape)) or not all(map(_is_whole, offsets)):
        raise wrong(f"{label} has a shape or offsets that are no whole numbers")
    dtype = _DTYPES.get(kind)
    if dtype is None:
        raise UserError.at("TW007", f"{label} of '{path}' has element type {shown_name(kind)}", help=f"known are {', '.join(_DTYPES)}")
    begin, end = offsets
    wanted = math.prod(shape) * dtype.numpy.itemsize
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= size or end - begin != wanted:
        raise wrong(f"{label} is {kind} {_short(shape)}, {wanted} bytes, at {begin}..{end} of {size}")
    places.append((begin, end, label))
    return SafetensorsEntry(dtype, tuple(shape), first + begin, first + end)


def _array(entry: SafetensorsEntry, piece: np.ndarray, name: str, wrong: Wrong) -> np.ndarray:
    """The array whose bytes these are, read-only."""
    if piece.ctypes.data % entry.dtype.numpy.itemsize:
        piece = piece.copy()
    try:
        found: np.ndarray = piece.view(entry.dtype.numpy).reshape(entry.shape)
    except (ValueError, OverflowError):
        raise wrong(f"{shown_name(name)}: an array cannot have {len(entry.shape)} axes of {_short(list(entry.shape))}") from None
    found = found.view(np.ndarray)
    found.flags.writeable = False
    return found


def _check_layout(places: list[tuple[int, int, str]], size: int, wrong: Wrong) -> None:
    """The format wants the data covered by arrays side by side."""
    last, before = 0, "the header"
    for begin, end, label in sorted(places):
        if begin < last:
            raise wrong(f"{label}, at {begin}..{end}, overlaps {before}, which ends at {last}")
        if begin > last:
            raise wrong(f"between {before} and {label} are {begin - last} bytes of no array")
        last, before = end, label
    if last != size:
        raise wrong(f"behind {before} are {size - last} bytes of no array")


def _short(shape: list[int]) -> str:
    return str(shape) if len(shape) <= 8 else f"[{', '.join(map(str, shape[:8]))}, …]"
