"""Relocatable objects of LLVM -> code objects that AMD's loader takes, and what their notes say. No linker and no ROCm is needed.

In: the ELF object of one module. Out: an ELF shared object: headers, the note with the kernels' metadata, dynamic symbols with both hash
tables, constants, code and variables, with relocations between them resolved. The layout is the one that `ld.lld -shared` makes; a test
compares the two.

    .text  .rela.text  .rodata  .rela.rodata  .note  …   ->   read only | code | dynamic table | variables
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from tilewright.base.errors import CompilerBug
from tilewright.base.record import record

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_RELOCATION = struct.Struct("<QQq")
_PAGE = 4096
_DYN, _MACHINE = 3, 224
_PROGBITS, _SYMTAB, _STRTAB, _RELA, _HASH, _DYNAMIC, _NOTE, _NOBITS, _DYNSYM, _GNU_HASH = 1, 2, 3, 4, 5, 6, 7, 8, 11, 0x6FFFFFF6
_WRITE, _ALLOC, _EXEC = 1, 2, 4
_ABSOLUTE = 0xFFF1
_ABS64, _REL32, _REL64, _REL32_LO, _REL32_HI = 3, 4, 5, 10, 11
"""Kinds of relocations that lie within one object; others name symbols of other objects, and there are none."""
_METADATA = 32
"""The type of the note that holds the kernels' metadata."""


@record
class _LinkedSection:
    name: str
    type: int
    flags: int
    size: int
    align: int
    link: int
    info: int
    data: bytes


@record
class _LinkedSymbol:
    name: str
    info: int
    other: int
    section: int
    value: int
    size: int


def _text(table: bytes, start: int) -> str:
    return table[start : table.index(b"\0", start)].decode()


def _up(value: int, align: int) -> int:
    return -(-value // align) * align


class _RelocatableObject:
    """What of an object the code object is made of."""

    def __init__(self, data: bytes) -> None:
        fields = _HEADER.unpack_from(data)
        self.identity, self.flags, start, count, names = fields[0], fields[7], fields[6], fields[12], fields[13]
        if self.identity[:4] != b"\x7fELF" or fields[2] != _MACHINE:
            raise CompilerBug.at("TW040", "LLVM's object is no ELF object of an AMD GPU")
        rows = [_SECTION.unpack_from(data, start + 64 * k) for k in range(count)]
        table = data[rows[names][4] : rows[names][4] + rows[names][5]]
        self.sections = [
            _LinkedSection(_text(table, r[0]), r[1], r[2], r[5], max(1, r[8]), r[6], r[7], b"" if r[1] == _NOBITS else data[r[4] : r[4] + r[5]])
            for r in rows
        ]
        symbols = next(s for s in self.sections if s.type == _SYMTAB)
        strings = self.sections[symbols.link].data
        found = [_SYMBOL.unpack_from(symbols.data, at) for at in range(0, symbols.size, _SYMBOL.size)]
        self.symbols = [_LinkedSymbol(_text(strings, f[0]), *f[1:]) for f in found]

    def kept(self, *, written: bool, executed: bool) -> list[int]:
        """The numbers of the sections that are in memory, with these rights."""
        return [
            k for k, s in enumerate(self.sections)
            if s.flags & _ALLOC and s.type != _NOTE and s.size and bool(s.flags & _WRITE) is written and bool(s.flags & _EXEC) is executed
        ]  # fmt: skip


def link(data: bytes) -> bytes:
    """The code object of a relocatable object."""
    return _CodeObjectLinker(_RelocatableObject(data)).image()


class _CodeObjectLinker:
    def __init__(self, source: _RelocatableObject) -> None:
        self.source = source
        self.exported = [s for s in source.symbols if s.info >> 4 and s.section]
        self.strings = _StringTable(s.name for s in self.exported)
        self.notes = b"".join(s.data for s in source.sections if s.type == _NOTE)
        self.addresses: dict[int, int] = {}
        """Of every section of the object that is in memory."""
        self.blobs: list[tuple[int, bytes]] = []
        """File offset and bytes."""
        self.rows: list[tuple[str, int, int, int, int, int, int, int, int, int]] = []
        """Sections of the result: name, type, flags, address, offset, size, link, info, alignment, size of an entry."""
        self.numbers: dict[int, int] = {}
        """The section of the result that holds a section of the object."""

    def image(self) -> bytes:
        segments = 7
        place = _HEADER.size + segments * _SEGMENT.size
        symbols = _SYMBOL.size * (1 + len(self.exported))
        place = self._table(".note", _NOTE, place, self.notes, 4)
        note = self.rows[-1]
        symbol_place = place = _up(place, 8)
        gnu, plain = _gnu_hash([s.name for s in self.exported]), _sysv_hash([s.name for s in self.exported])
        self.rows.append((".dynsym", _DYNSYM, _ALLOC, place, place, symbols, 4 + 1, 1, 8, _SYMBOL.size))
        place = self._table(".gnu.hash", _GNU_HASH, place + symbols, gnu, 8, link=2)
        place = self._table(".hash", _HASH, place, plain, 4, link=2, entry=4)
        hashes = self.rows[-2][3], self.rows[-1][3]
        place = self._table(".dynstr", _STRTAB, place, self.strings.data, 1)
        strings = self.rows[-1]
        constants_end = place = self._sections(place, place, written=False, executed=False)
        offset = _up(place, 256)
        code = offset + _PAGE
        code_end = self._sections(offset, code, written=False, executed=True)
        code_bytes = code_end - code
        offset, address = _up(offset + code_bytes, 16), _up(code_end, 16) + _PAGE
        address += (offset - address) % _PAGE
        tags = [(6, symbol_place), (11, _SYMBOL.size), (5, strings[3]), (10, strings[5]), (0x6FFFFEF5, hashes[0]), (4, hashes[1]), (0, 0)]
        dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)
        self.rows.append((".dynamic", _DYNAMIC, _WRITE | _ALLOC, address, offset, len(dynamic), 5, 0, 8, 16))
        self.blobs.append((offset, dynamic))
        data_at, data_offset = address + len(dynamic), offset + len(dynamic)
        data_end = self._sections(data_offset, data_at, written=True, executed=False)
        table = self._symbols()
        self.blobs.append((symbol_place, table))
        stored = max(at + len(blob) for at, blob in self.blobs)
        self.blobs += self._relocated()
        headers = [
            (6, 4, 64, 64, segments * 56, segments * 56, 8),
            (1, 4, 0, 0, constants_end, constants_end, _PAGE),
            (1, 5, code - _PAGE, code, code_bytes, code_bytes, _PAGE),
            (1, 6, offset, address, max(stored, offset + len(dynamic)) - offset, data_end - address, _PAGE),
            (2, 6, offset, address, len(dynamic), len(dynamic), 8),
            (0x6474E551, 6, 0, 0, 0, 0, 0),
            (4, 4, note[4], note[3], note[5], note[5], 4),
        ]  # fmt: skip
        image = bytearray(_up(stored, 8))
        image[64 : 64 + segments * 56] = b"".join(_SEGMENT.pack(kind, f, at, there, there, size, memory, align) for kind, f, at, there, size, memory, align in headers)
        for at, blob in self.blobs:
            image[at : at + len(blob)] = blob
        return self._finished(image, segments, table)

    def _table(self, name: str, type_: int, place: int, data: bytes, align: int, link: int = 0, entry: int = 0) -> int:
        """A section of ours in the first segment; where the next one may begin."""
        place = _up(place, align)
        self.rows.append((name, type_, _ALLOC, place, place, len(data), link, 0, align, entry))
        self.blobs.append((place, data))
        return place + len(data)

    def _sections(self, offset: int, address: int, *, written: bool, executed: bool) -> int:
        """The object's sections of one segment, at that place of the file and of memory; the address of their end. What is only zeros comes last."""
        chosen = self.source.kept(written=written, executed=executed)
        shift = address - offset
        for number in sorted(chosen, key=lambda k: self.source.sections[k].type == _NOBITS):
            section = self.source.sections[number]
            address = _up(address, section.align)
            self.addresses[number], self.numbers[number] = address, len(self.rows) + 1
            self.rows.append((section.name, section.type, section.flags & 7, address, address - shift, section.size, 0, 0, section.align, 0))
            if section.type != _NOBITS:
                self.blobs.append((address - shift, section.data))
            address += section.size
        return address

    def _value(self, symbol: _LinkedSymbol) -> int:
        return symbol.value if symbol.section == _ABSOLUTE else self.addresses[symbol.section] + symbol.value

    def _symbols(self) -> bytes:
        found = [_SYMBOL.pack(0, 0, 0, 0, 0, 0)]
        for s in self.exported:
            found.append(_SYMBOL.pack(self.strings.places[s.name], s.info, s.other, self.numbers[s.section], self._value(s), s.size))
        return b"".join(found)

    def _relocated(self) -> list[tuple[int, bytes]]:
        """The words of the file that addresses are written into."""
        found: list[tuple[int, bytes]] = []
        offsets = {row[3]: row[4] for row in self.rows if row[2] & _ALLOC}
        for table in self.source.sections:
            if table.type != _RELA or table.info not in self.addresses:
                continue
            base = self.addresses[table.info]
            for at in range(0, table.size, _RELOCATION.size):
                where, info, addend = _RELOCATION.unpack_from(table.data, at)
                symbol = self.source.symbols[info >> 32]
                if not symbol.section:
                    raise CompilerBug.at("TW040", f"the code calls '{symbol.name}', which is nowhere")
                found.append((offsets[base] + where, _word(info & 0xFFFFFFFF, self._value(symbol) + addend, base + where)))
        return found

    def _finished(self, image: bytearray, segments: int, symbols: bytes) -> bytes:
        """The image with the header, the table of sections and that of symbols, where AMD's loader looks for kernels."""
        names = _StringTable([*(row[0] for row in self.rows), ".symtab", ".strtab", ".shstrtab"])
        number = 1 + len(self.rows)
        for name, type_, data, link_, info, entry in (
            (".symtab", _SYMTAB, symbols, number + 1, 1, _SYMBOL.size), (".strtab", _STRTAB, self.strings.data, 0, 0, 0), (".shstrtab", _STRTAB, names.data, 0, 0, 0),
        ):  # fmt: skip
            image += bytes(-len(image) % 8)
            self.rows.append((name, type_, 0, 0, len(image), len(data), link_, info, 8 if entry else 1, entry))
            image += data
        image += bytes(-len(image) % 8)
        start = len(image)
        image += bytes(_SECTION.size)
        for name, type_, flags, address, offset, size, link_, info, align, entry in self.rows:
            image += _SECTION.pack(names.places[name], type_, flags, address, offset, size, link_, info, align, entry)
        image[: _HEADER.size] = _HEADER.pack(
            self.source.identity, _DYN, _MACHINE, 1, 0, _HEADER.size, start, self.source.flags, _HEADER.size, _SEGMENT.size, segments,
            _SECTION.size, 1 + len(self.rows), len(self.rows),
        )  # fmt: skip
        return bytes(image)


def _word(kind: int, value: int, here: int) -> bytes:
    """What a relocation writes."""
    if kind == _ABS64:
        raise CompilerBug.at("TW040", "an address in data: the loader would have to write it")
    if kind in (_REL64, _REL32, _REL32_LO, _REL32_HI):
        distance = value - here
        if kind == _REL64:
            return struct.pack("<q", distance)
        return struct.pack("<I", (distance >> 32 if kind == _REL32_HI else distance) & 0xFFFFFFFF)
    raise CompilerBug.at("TW040", f"a relocation of kind {kind} in LLVM's object")


class _StringTable:
    """A table of texts that end in zero, and where each begins."""

    def __init__(self, names: Iterable[str]) -> None:
        self.data, self.places = b"\0", {"": 0}
        for name in names:
            if name not in self.places:
                self.places[name] = len(self.data)
                self.data += name.encode() + b"\0"


def _sysv_hash(names: Sequence[str]) -> bytes:
    """The older table, in one bucket for each symbol."""
    count = 1 + len(names)
    buckets, chain = [0] * count, [0] * count
    for number, name in enumerate(names, 1):
        value = 0
        for letter in name.encode():
            value = (value << 4) + letter
            high = value & 0xF0000000
            value = (value ^ high >> 24) & ~high
        bucket = value % count
        chain[number], buckets[bucket] = buckets[bucket], number
    return struct.pack(f"<{2 + 2 * count}I", count, count, *buckets, *chain)


def _gnu_hash(names: Sequence[str]) -> bytes:
    """The newer table, in one bucket, so that symbols may stay in their order. The filter lets everything through."""
    hashes = []
    for name in names:
        value = 5381
        for letter in name.encode():
            value = (value * 33 + letter) & 0xFFFFFFFF
        hashes.append(value & ~1)
    if hashes:
        hashes[-1] |= 1
    return struct.pack(f"<4IQI{len(hashes)}I", 1, 1, 1, 0, (1 << 64) - 1, 1 if hashes else 0, *hashes)


# -- what the notes say -----------------------------------------------------------------------------------------------


@record
class KernelUse:
    """What one kernel of a code object takes of the device, as its metadata says."""

    name: str
    vgprs: int
    """Vector registers of a thread, the accumulation registers of matrix units included."""
    sgprs: int
    """Scalar registers of a wave."""
    lds: int
    """Bytes of memory that a block shares."""
    scratch: int
    """Bytes of memory of a thread's own: spilled registers and local arrays."""
    spills: int
    """Registers that are spilled."""
    wave: int
    """Threads of a wave."""
    threads: int
    """The most threads of a block."""
    arguments: int
    """Bytes of the arguments, hidden ones included."""


def kernel_uses(code: bytes) -> list[KernelUse]:
    """What the kernels of a code object, or of an object, use, in their order."""
    found = []
    kernels = metadata(code)["amdhsa.kernels"]
    assert isinstance(kernels, list)
    for kernel in kernels:
        found.append(KernelUse(
            kernel[".name"], max(kernel[".vgpr_count"], kernel.get(".agpr_count", 0)), kernel[".sgpr_count"], kernel[".group_segment_fixed_size"],
            kernel[".private_segment_fixed_size"], kernel[".vgpr_spill_count"] + kernel[".sgpr_spill_count"], kernel[".wavefront_size"],
            kernel[".max_flat_workgroup_size"], kernel[".kernarg_segment_size"],
        ))  # fmt: skip
    return found


def metadata(code: bytes) -> Mapping[str, object]:
    """The kernels' metadata, from the note of a code object or of an object."""
    for section in _notes(code):
        place = 0
        while place + 12 <= len(section):
            name, size, kind = struct.unpack_from("<III", section, place)
            start = place + 12 + _up(name, 4)
            if kind == _METADATA and section[place + 12 : place + 12 + name] == b"AMDGPU\0":
                found, _ = _unpack(section[start : start + size], 0)
                assert isinstance(found, dict)
                return found
            place = start + _up(size, 4)
    raise CompilerBug.at("TW040", "the code object has no metadata")


def _notes(code: bytes) -> list[bytes]:
    fields = _HEADER.unpack_from(code)
    rows = (_SECTION.unpack_from(code, fields[6] + 64 * k) for k in range(fields[12]))
    return [code[r[4] : r[4] + r[5]] for r in rows if r[1] == _NOTE]


_SIZES = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_LENGTHS = {0xD9: (">B", "text"), 0xDA: (">H", "text"), 0xDB: (">I", "text"), 0xDC: (">H", "list"), 0xDD: (">I", "list"), 0xDE: (">H", "map"), 0xDF: (">I", "map")}


def _unpack(data: bytes, at: int) -> tuple[object, int]:
    """One value of MessagePack, and where the next one begins."""
    head = data[at]
    at += 1
    if head < 0x80 or head >= 0xE0:
        return head if head < 0x80 else head - 256, at
    if head in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[head], at
    if head in _SIZES:
        return struct.unpack_from(_SIZES[head], data, at)[0], at + struct.calcsize(_SIZES[head])
    if head in _LENGTHS:
        form, kind = _LENGTHS[head]
        count = struct.unpack_from(form, data, at)[0]
        at += struct.calcsize(form)
    elif head >= 0xA0:
        count, kind = head & 31, "text"
    else:
        count, kind = head & 15, "list" if head >= 0x90 else "map"
    if kind == "text":
        return data[at : at + count].decode(), at + count
    items: list[object] = []
    for _ in range(count * (2 if kind == "map" else 1)):
        item, at = _unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind == "map" else items), at
