"""NumPy's files of arrays, read by their format and nothing else. In: a path; out: one array (`.npy`), or arrays by name (`.npz`).

Files may come from strangers. What a header claims is held against the bytes that are there before memory is taken for it, nothing is
unpickled, and messages say what is wrong without quoting content. Every damaged file is a `UserError` that names it.
"""

from __future__ import annotations

import ast
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tilewright.base import dtypes
from tilewright.base.errors import DeviceError, TilewrightError, UserError

HELP = "give a .npy, .npz or .safetensors file"
_MAGIC = b"\x93NUMPY"
_MOST_HEADER = 10_000
"""Bytes of a header: enough for 64 axes, little enough to read as Python's literals."""
_MOST_RATIO = 1100
"""A compressed member has at most so many times its bytes: deflate cannot do more."""
_ELEMENTS = re.compile(r"([<>|=])([biuf])([1248])")
_PIECE = 1 << 24


def shown_name(name: str) -> str:
    """A name out of a file, in quotes and without what would confuse a terminal."""
    return repr(name if len(name) <= 80 else f"{name[:77]}…")


def no_such(path: str | Path, kind: str, reason: str) -> UserError:
    """The error for a file that is not what it should be."""
    error = UserError.at("TW007", f"file '{path}' is no {kind} file: {reason}")
    assert isinstance(error, UserError)
    return error


def opened(path: str | Path) -> tuple[BinaryIO, int]:
    """A plain file open for reading, and its bytes."""
    try:
        # A pipe is not waited for.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise UserError.at("TW007", f"file '{path}' cannot be read: it is no plain file", help=HELP)
        return open(descriptor, "rb"), status.st_size
    except FileNotFoundError:
        raise UserError.at("TW007", f"file '{path}' does not exist", help=HELP) from None
    except OSError as error:
        raise UserError.at("TW007", f"file '{path}' cannot be read: {error.strerror or error}", help=HELP) from None
    except (ValueError, TypeError):
        raise UserError.at("TW007", f"{shown_name(str(path))} is no path of a file", help=HELP) from None


def read_npy(path: str | Path) -> np.ndarray:
    """The array of a `.npy` file."""
    file, size = opened(path)
    with file:
        return _array(file, size, lambda reason: no_such(path, ".npy", reason))


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file by name."""
    file, size = opened(path)
    with file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _members(archive, size, lambda reason: no_such(path, ".npz", reason))
        except TilewrightError:
            raise
        except MemoryError:
            raise DeviceError.at("TW031", f"no memory for the arrays of '{path}'") from None
        except Exception as error:  # a damaged archive can raise nearly anything out of zipfile and the decompressors
            reason = "it is no zip archive" if size < 4 or not zipfile.is_zipfile(file) else f"its archive is damaged ({type(error).__name__})"
            raise no_such(path, ".npz", reason) from None


def _members(archive: zipfile.ZipFile, size: int, wrong: Callable[[str], UserError]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    items = archive.infolist()
    if sum(item.compress_size for item in items) > size:
        raise wrong("its members overlap, or have more bytes than the file")
    for item in items:
        name = item.filename.removesuffix(".npy")
        if name == item.filename:
            raise wrong(f"its member {shown_name(name)} is no .npy array")
        if name in found:
            raise wrong(f"it has two arrays with the name {shown_name(name)}")
        if item.file_size > item.compress_size * _MOST_RATIO + 1024:
            raise wrong(f"{shown_name(name)} claims {item.file_size} bytes out of {item.compress_size}")

        def of_member(reason: str, name: str = name) -> UserError:
            return wrong(f"{shown_name(name)}: {reason}")

        with archive.open(item) as file:
            found[name] = _array(file, item.file_size, of_member)  # type: ignore[arg-type]
    return found


def _array(file: BinaryIO, size: int, wrong: Callable[[str], UserError]) -> np.ndarray:
    """An array in `.npy` form that takes all `size` bytes of a file."""
    start = file.read(8)
    if len(start) < 8 or not start.startswith(_MAGIC):
        raise wrong("it does not begin as one" if not start.startswith(b"PK") else "it is a zip archive; name it .npz")
    if start[6] not in (1, 2, 3) or start[7] != 0:
        raise wrong(f"it is of version {start[6]}.{start[7]}, not of 1.0, 2.0 or 3.0")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    data = size - 8 - width - length
    if length > _MOST_HEADER or data < 0:
        raise wrong(f"it has {size} bytes, its header would have {length}" if data < 0 else f"its header has {length} bytes, more than {_MOST_HEADER}")
    dtype, shape, fortran = _header(file.read(length), start[6] == 3, wrong)
    count = math.prod(shape)
    if count * dtype.itemsize != data:
        raise wrong(f"its header says {dtype}{list(shape)}, {count * dtype.itemsize} bytes, but {data} are there")
    try:
        values = np.empty(count, dtype)
    except MemoryError:
        raise DeviceError.at("TW031", f"no memory for an array of shape {list(shape)} and {dtype}") from None
    room, at = memoryview(values.view(np.uint8)), 0  # type: ignore[arg-type]
    while at < data:
        piece = file.read(min(_PIECE, data - at))
        if not piece:
            raise wrong(f"its data ends after {at} of {data} bytes")
        room[at : at + len(piece)] = piece
        at += len(piece)
    if file.read(1):
        raise wrong(f"there is more behind its {data} bytes of data")
    if not dtype.isnative:
        values = values.astype(dtype.newbyteorder("="))
    try:
        return values.reshape(shape[::-1]).transpose() if fortran else values.reshape(shape)
    except (ValueError, OverflowError):
        raise wrong(f"an array cannot have {len(shape)} axes of {list(shape)[:8]}{'…' if len(shape) > 8 else ''}") from None


def _header(data: bytes, utf8: bool, wrong: Callable[[str], UserError]) -> tuple[np.dtype, tuple[int, ...], bool]:
    try:
        header = ast.literal_eval(data.decode("utf-8" if utf8 else "latin-1").strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise wrong("its header cannot be read") from None
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise wrong("its header has not descr, fortran_order and shape")
    kind, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not all(type(extent) is int and 0 <= extent < 1 << 63 for extent in shape):
        raise wrong("its shape is no tuple of whole numbers from 0 on")
    if type(fortran) is not bool:
        raise wrong("its fortran_order is neither True nor False")
    dtype = np.dtype(kind) if isinstance(kind, str) and _ELEMENTS.fullmatch(kind) and kind[1:] not in ("f1", "b2", "b4", "b8") else None
    if dtype is None or dtypes.from_numpy(dtype.newbyteorder("=")) is None:
        raise wrong(f"it has {_element_type(kind)}, which no array here can have")
    return dtype, shape, fortran


def _element_type(kind: object) -> str:
    if not isinstance(kind, str):
        return "records as elements"
    if kind.endswith("O"):
        return "pickled Python objects as elements"
    short = kind if re.fullmatch(r"[<>|=]?[a-zA-Z?]\d{0,6}(\[\w{1,8}\])?", kind) else "unknown"
    raw = "; .npy files have no type for bf16 and f8, safetensors files have" if re.fullmatch(r"[<|]V[12]", kind) else ""
    return f"elements of type {short}{raw}"
