"""What a file of a model offers, whatever its format: metadata, tensors by name, arrays that are views of the file.

In: bytes that a reader has checked. Out: a `ModelFile`. Every tensor lies inside its bytes; packed formats stay packed.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError, close_matches
from tilewright.execute.numpy_files import shown_name
from tilewright.execute.safetensors_files import MAPPED_FROM
from tilewright.runtime.memory.packed_array import PackedArray

MOST_ELEMENTS = 1 << 48
"""More than any machine holds: extents beyond are mistakes."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file. `shape` is in NumPy's order (rows, columns), `offset` counts bytes of `file`."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: Path

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


class FileBytes:
    """The bytes of an open file: read where that costs little, else mapped into memory.

    A file that is made shorter while it is mapped takes its pages with it, and the system ends the process that touches them. So small
    files are read, and a mapped one is asked for its size before each array is handed out. It must stay as it is while its arrays are in use.
    """

    def __init__(self, file: BinaryIO, size: int, wrong: Callable[[str], UserError]) -> None:
        self.size = size
        self._wrong = wrong
        self._map: mmap.mmap | None = None
        if size < MAPPED_FROM:
            file.seek(0)
            self.data = np.frombuffer(file.read(size), np.uint8)
            if len(self.data) < size:
                raise self._shorter(len(self.data))
            return
        try:
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise wrong(f"it cannot be mapped into memory: {error}") from None
        self.data = np.frombuffer(self._map, np.uint8)

    def _shorter(self, left: int) -> UserError:
        return self._wrong(f"it was made shorter while it was read: {left} bytes are left of {self.size}")

    def part(self, offset: int, nbytes: int) -> np.ndarray:
        """Bytes of the file, as a view."""
        if self._map is not None and (left := self._map.size()) < offset + nbytes:
            raise self._shorter(left)
        return self.data[offset : offset + nbytes]


class ModelFile:
    """A model as its file has it. `kind` is 'gguf' or 'safetensors'; `path` is the file, or the folder."""

    def __init__(self, path: Path, kind: str, metadata: Mapping[str, Any], tensors: dict[str, TensorEntry], files: Mapping[Path, FileBytes]) -> None:
        self.path = path
        self.kind = kind
        self.metadata = metadata
        self.tensors: Mapping[str, TensorEntry] = MappingProxyType(tensors)
        self._files = files

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def array(self, name: str) -> np.ndarray | PackedArray:
        """A tensor: a read-only view of the file, packed blocks as a `PackedArray`."""
        entry = self.tensors.get(name)
        if entry is None:
            near = close_matches(str(name), self.tensors, 1)
            raise UserError.at("TW002", f"'{self.path}' has no tensor {shown_name(str(name))}", help=f"did you mean {shown_name(near[0])}?" if near else f"it has {len(self.tensors)} tensors, listed in .tensors")
        data = self._files[entry.file].part(entry.offset, entry.nbytes)
        dtype = entry.dtype
        if dtype.is_packed:
            *lead, cols = entry.shape
            return PackedArray(data.reshape(*lead, cols // dtype.block, dtype.block_bytes), dtype)
        if data.ctypes.data % dtype.numpy.itemsize:
            data = data.copy()
        found: np.ndarray = data.view(dtype.numpy).reshape(entry.shape)
        found.flags.writeable = False
        return found

    def __repr__(self) -> str:
        return f"ModelFile({os.fspath(self.path)!r}, {self.kind}, {len(self.tensors)} tensors, {self.nbytes} bytes)"


def bytes_of(dtype: DType, shape: tuple[int, ...]) -> int | None:
    """Bytes of such a tensor; None if there are too many elements, or a last axis that blocks do not divide."""
    count = math.prod(shape)
    if count > MOST_ELEMENTS or max(shape, default=0) > MOST_ELEMENTS or (dtype.is_packed and (not shape or shape[-1] % dtype.block)):
        return None
    return count // dtype.block * dtype.itemsize
