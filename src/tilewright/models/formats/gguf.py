"""GGUF files, read. In: a path; out: a `ModelFile` whose metadata are decoded when they are asked for.

Files may come from strangers. Lengths are held against the bytes that are there before anything is taken for them, and what is wrong is a
`UserError` that names the file and the field. The header is read, never mapped, so that a file that shrinks meanwhile is an error too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.base.errors import UserError
from tilewright.execute.numpy_files import no_such, opened, shown_name
from tilewright.models.formats import gguf_layout as layout
from tilewright.models.formats.gguf_strings import decode, follow
from tilewright.models.formats.gguf_writer import write_gguf
from tilewright.models.formats.model_file import FileBytes, ModelFile, TensorEntry, bytes_of

__all__ = ["open_gguf", "write_gguf"]

LOOK = 1 << 24
"""Bytes that are read at first; of longer headers four times as many are read, and so on."""
_MOST_HEADER = 1 << 30
"""Bytes of a header; vocabularies have some millions."""
_MOST_NAME = 1 << 16
"""Bytes of a name of a key, as the format says, or of a tensor."""
_MOST_LISTED = 10

Wrong = Callable[[str], UserError]


class _MoreNeeded(Exception):
    """The header goes beyond the bytes that were read so far."""


@dataclass(frozen=True)
class _GGUFValue:
    """Where a value of the metadata lies. `count` is None but for arrays; `starts` are those of an array of strings."""

    kind: int
    begin: int
    end: int
    count: int | None = None
    starts: np.ndarray | None = None


class GGUFMetadata(Mapping[str, Any]):
    """The keys of a GGUF file. Values are decoded when they are read first, and kept: numbers, bools, strings, lists."""

    def __init__(self, data: np.ndarray, values: dict[str, _GGUFValue], wrong: Wrong) -> None:
        self._data = data
        self._values = values
        self._wrong = wrong
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._decode(key, self._values[key])
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"GGUFMetadata({len(self)} keys)"

    def _decode(self, key: str, value: _GGUFValue) -> Any:
        try:
            if value.starts is not None:
                return decode(self._data, value.starts, value.end)
            raw = self._data[value.begin : value.end]
            if value.kind == layout.STRING:
                return raw.tobytes().decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong(f"the value of {shown_name(key)} is not UTF-8") from None
        numbers = (raw != 0) if value.kind == layout.BOOL else np.frombuffer(raw.tobytes(), layout.NUMBERS[value.kind])
        return numbers.tolist() if value.count is not None else numbers[0].item()


class _GGUFHead:
    """The bytes of a header, taken one after the other."""

    def __init__(self, data: np.ndarray, size: int, wrong: Wrong) -> None:
        self.data, self.size, self.wrong = data, size, wrong
        self.at = 0

    def skip(self, count: int, what: str) -> int:
        """Where the next `count` bytes begin, which are passed over."""
        begin = self.at
        if count > self.size - begin:
            raise self.wrong(f"{what} takes {count} bytes at byte {begin}, and {self.size - begin} are left")
        if begin + count > len(self.data):
            raise _MoreNeeded
        self.at = begin + count
        return begin

    def number(self, width: int, what: str) -> int:
        begin = self.skip(width, what)
        return int.from_bytes(self.data[begin : begin + width].tobytes(), "little")

    def text(self, what: str) -> str:
        """A name."""
        length = self.number(8, f"the length of {what}")
        if length > min(_MOST_NAME, self.size):
            raise self.wrong(f"{what} would have {length} bytes")
        begin = self.skip(length, what)
        try:
            return self.data[begin : self.at].tobytes().decode("utf-8")
        except UnicodeDecodeError:
            raise self.wrong(f"{what}, at byte {begin}, is not UTF-8") from None

    def value(self, what: str) -> _GGUFValue:
        kind = self.number(4, f"the type of {what}")
        if kind in layout.NUMBERS:
            begin = self.skip(layout.NUMBERS[kind].itemsize, what)
            return _GGUFValue(kind, begin, self.at)
        if kind == layout.STRING:
            begin = self.skip(self.number(8, f"the length of {what}"), what)
            return _GGUFValue(kind, begin, self.at)
        if kind == layout.ARRAY:
            return self._array(what)
        raise self.wrong(f"{what} has the value type {kind}, which there is not")

    def _array(self, what: str) -> _GGUFValue:
        kind, count = self.number(4, f"the element type of {what}"), self.number(8, f"the number of elements of {what}")
        if kind in layout.NUMBERS:
            begin = self.skip(count * layout.NUMBERS[kind].itemsize, f"{what}, an array of {count},")
            return _GGUFValue(kind, begin, self.at, count)
        if kind == layout.ARRAY:
            raise self.wrong(f"{what} is an array of arrays, which are not read")
        if kind != layout.STRING:
            raise self.wrong(f"{what} has elements of the value type {kind}, which there is not")
        if count > (self.size - self.at) // 8:
            raise self.wrong(f"{what} is an array of {count} strings, and {self.size - self.at} bytes are left")
        begin = self.at
        starts, self.at = follow(self.data, begin, count)
        if len(starts) < count:
            if len(self.data) < self.size:
                raise _MoreNeeded
            raise self.wrong(f"string {len(starts)} of {what} goes beyond the end")
        return _GGUFValue(kind, begin, self.at, count, starts)


@dataclass(frozen=True)
class _GGUFTensor:
    """A tensor as the header has it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def open_gguf(path: str | os.PathLike[str]) -> ModelFile:
    """The model in a GGUF file of version 2 or 3, or in several, of which the first is given (`…-00001-of-00003.gguf`). Raises `UserError`."""
    first = _open_part(path)
    parts = [first, *map(_open_part, _others(first.metadata, Path(path)))]
    tensors: dict[str, TensorEntry] = {}
    for number, part in enumerate(parts):
        if number and (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, len(parts)):
            raise no_such(part.path, "GGUF", f"it is not part {number} of {len(parts)}, as its name says")
        for name, entry in part.tensors.items():
            if name in tensors:
                raise no_such(part.path, "GGUF", f"it has tensor {shown_name(name)}, and so has '{tensors[name].file}'")
            tensors[name] = entry
    wanted = first.metadata.get("split.tensors.count", len(tensors)) if len(parts) > 1 else len(tensors)
    if wanted != len(tensors):
        raise no_such(first.path, "GGUF", f"its split.tensors.count is {_short(wanted)}, and its {len(parts)} parts have {len(tensors)} tensors")
    return ModelFile(first.path, "gguf", first.metadata, tensors, {part.path: part.data for part in parts})


@dataclass(frozen=True)
class _GGUFPart:
    """One file of a model."""

    path: Path
    metadata: GGUFMetadata
    tensors: dict[str, TensorEntry]
    data: FileBytes


def _open_part(path: str | os.PathLike[str]) -> _GGUFPart:
    file, size = opened(path)  # type: ignore[arg-type]
    place = Path(path)

    def wrong(reason: str) -> UserError:
        return no_such(place, "GGUF", reason)

    with file:
        look = min(LOOK, size)
        while True:
            file.seek(0)
            data = np.frombuffer(file.read(look), np.uint8)
            if len(data) < look:
                raise wrong(f"it was made shorter while it was read: {len(data)} bytes are left of {size}")
            head = _GGUFHead(data, size, wrong)
            try:
                values, raw = _parse(head)
                break
            except _MoreNeeded:
                if look >= _MOST_HEADER:
                    raise wrong(f"its header goes beyond {_MOST_HEADER} bytes") from None
                look = min(look * 4, size)
        metadata = GGUFMetadata(data[: head.at].copy(), values, wrong)
        tensors = _placed(raw, _data_start(metadata, head.at, wrong), size, place, wrong)
        return _GGUFPart(place, metadata, tensors, FileBytes(file, size, wrong))


def _parse(head: _GGUFHead) -> tuple[dict[str, _GGUFValue], list[_GGUFTensor]]:
    wrong = head.wrong
    magic = head.data[:4].tobytes()
    if magic != layout.MAGIC:
        raise wrong("it is of the other byte order" if magic == layout.MAGIC[::-1] else f"it begins with {magic!r}, not with {layout.MAGIC!r}")
    head.skip(4, "the magic")
    version = head.number(4, "the version")
    if version not in layout.VERSIONS:
        other = int.from_bytes(version.to_bytes(4, "little"), "big")
        reason = "it is big-endian, and only little-endian files are read" if other in (1, *layout.VERSIONS) else f"it is of version {version}, and 2 and 3 are read"
        raise wrong(reason)
    tensors, keys = head.number(8, "the number of tensors"), head.number(8, "the number of keys")
    # A key takes at least 13 bytes, a tensor 24.
    if keys > (size := head.size) // 13 or tensors > size // 24:
        raise wrong(f"it has {size} bytes, and would have {keys} keys and {tensors} tensors")
    values: dict[str, _GGUFValue] = {}
    for number in range(keys):
        name = head.text(f"the name of key {number}")
        if name in values:
            raise wrong(f"it has the key {shown_name(name)} twice")
        values[name] = head.value(f"key {shown_name(name)}")
    return values, [_tensor(head, number) for number in range(tensors)]


def _tensor(head: _GGUFHead, number: int) -> _GGUFTensor:
    name = head.text(f"the name of tensor {number}")
    what = f"tensor {shown_name(name)}"
    axes = head.number(4, f"the number of axes of {what}")
    if axes > layout.MOST_AXES:
        raise head.wrong(f"{what} has {axes} axes, more than {layout.MOST_AXES}")
    extents = [head.number(8, f"the extents of {what}") for _ in range(axes)]
    kind = head.number(4, f"the type of {what}")
    return _GGUFTensor(name, tuple(reversed(extents)), kind, head.number(8, f"the offset of {what}"))


def _others(metadata: GGUFMetadata, place: Path) -> list[Path]:
    """The other files of a model in several parts."""
    count = metadata.get("split.count", 0)
    if type(count) is not int or count <= 1:
        return []
    number = metadata.get("split.no")
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", place.name, re.DOTALL)
    if number != 0 or match is None or int(match[2]) != count:
        raise UserError.at("TW007", f"'{place}' is one of {count} parts of a model, and not called as the first of them is", help=f"give the first, …-00001-of-{count:05}.gguf")
    return [place.with_name(f"{match[1]}-{part:05}-of-{match[2]}.gguf") for part in range(2, count + 1)]


def _data_start(metadata: GGUFMetadata, end: int, wrong: Wrong) -> tuple[int, int]:
    """Where the data begin, and the alignment."""
    alignment = metadata.get("general.alignment", layout.ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 30:
        raise wrong(f"its general.alignment is {_short(alignment)}, not a power of two")
    return -(-end // alignment) * alignment, alignment


def _placed(raw: list[_GGUFTensor], data_start: tuple[int, int], size: int, place: Path, wrong: Wrong) -> dict[str, TensorEntry]:
    """The tensors, each of a type that is known, inside the file and apart from the others."""
    unknown = [tensor for tensor in raw if tensor.kind not in layout.DTYPES]
    if unknown:
        lines = [f"  {shown_name(t.name)} is {layout.type_name(t.kind)}" for t in unknown[:_MOST_LISTED]]
        more = [f"  and {len(unknown) - _MOST_LISTED} more"] if len(unknown) > _MOST_LISTED else []
        listed = "\n".join([*lines, *more])
        raise UserError.at("TW005", f"'{place}' has {len(unknown)} tensor(s) of types that are not read:\n{listed}", help=f"quantise the model as one of {layout.SUPPORTED}")
    start, alignment = data_start
    found: dict[str, TensorEntry] = {}
    for tensor in raw:
        label, dtype = f"tensor {shown_name(tensor.name)}", layout.DTYPES[tensor.kind]
        if tensor.name in found:
            raise wrong(f"it has {label} twice")
        nbytes = bytes_of(dtype, tensor.shape)
        if nbytes is None:
            raise wrong(f"{label} is {dtype}{list(tensor.shape)}, which there cannot be" + (f": rows lie in blocks of {dtype.block}" if dtype.is_packed else ""))
        if tensor.offset % alignment:
            raise wrong(f"{label} is at offset {tensor.offset}, not a multiple of {alignment}")
        if start + tensor.offset + nbytes > size:
            raise wrong(f"{label} is {dtype}{list(tensor.shape)}, {nbytes} bytes at {start + tensor.offset}, and the file has {size}")
        found[tensor.name] = TensorEntry(tensor.name, dtype, tensor.shape, start + tensor.offset, nbytes, place)
    last, before = start, ""
    for entry in sorted(found.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset < last:
            raise wrong(f"tensor {shown_name(entry.name)}, at {entry.offset}, overlaps {before}, which ends at {last}")
        if entry.nbytes:
            last, before = entry.offset + entry.nbytes, f"tensor {shown_name(entry.name)}"
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
