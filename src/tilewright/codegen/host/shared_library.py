"""A relocatable object becomes a shared library, without a linker. In: one ELF object of our own code generators; out: ELF bytes.

The object's code and constants are laid out one after another and bound to each other; what it needs from outside (malloc, free,
memcpy, memset…) is looked up by the system's loader among what the process has loaded, the C library above all, through one table. Only what LLVM emits for position
independent code of the small model is known; anything else is our mistake and says so.

The file, from its start: header, program headers, symbols, names, hash, relocations (read only); code and constants (executable);
the table, the dynamic section and data (writable). Segments lie at the same place in the file and in memory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tilewright.base.errors import CompilerBug
from tilewright.base.record import record

X86, ARM = 62, 183
_PAGE = {X86: 0x1000, ARM: 0x10000}
_PROGBITS, _SYMTAB, _RELA, _NOBITS = 1, 2, 4, 8
_ALLOC, _WRITE, _EXECUTE = 2, 1, 4
_GLOBAL, _FUNCTION = 1, 2
_TEXT = 3
"""The number of the library's section of code."""


@dataclass
class _Section:
    name: str
    kind: int
    flags: int
    data: bytearray
    size: int
    align: int
    link: int
    info: int
    address: int = 0

    @property
    def kept(self) -> bool:
        # Nothing of ours unwinds.
        return bool(self.flags & _ALLOC) and self.kind in (_PROGBITS, _NOBITS) and self.name != ".eh_frame"


@record
class _Symbol:
    name: str
    bind: int
    section: int
    value: int


class _Object:
    """An ELF object taken apart."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise _bug("it is not a little-endian 64-bit ELF object")
        self.machine: int = struct.unpack_from("<H", data, 18)[0]
        if self.machine not in _PAGE:
            raise _bug(f"machine {self.machine} is not known")
        table, _, _, _, _, size, count, names = struct.unpack_from("<QIHHHHHH", data, 40)
        heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + size * index) for index in range(count)]
        text = data[heads[names][4] :]
        self.sections: list[_Section] = []
        for name, kind, flags, _, offset, length, link, info, align, _ in heads:
            content = bytearray(length) if kind == _NOBITS else bytearray(data[offset : offset + length])
            self.sections.append(_Section(_string(text, name), kind, flags, content, length, max(1, align), link, info))
        self.symbols: list[_Symbol] = []
        for section in self.sections:
            if section.kind == _SYMTAB:
                strings = bytes(self.sections[section.link].data)
                for at in range(0, section.size, 24):
                    name, info, _, index, value, _ = struct.unpack_from("<IBBHQQ", section.data, at)
                    self.symbols.append(_Symbol(_string(strings, name), info >> 4, index, value))

    def relocations(self) -> list[tuple[_Section, int, int, _Symbol, int]]:
        """Where, of which type, to which symbol, with which addend; of sections that are kept."""
        found = []
        for section in self.sections:
            if section.kind == _RELA and self.sections[section.info].kept:
                for at in range(0, section.size, 24):
                    offset, info, addend = struct.unpack_from("<QQq", section.data, at)
                    found.append((self.sections[section.info], offset, info & 0xFFFFFFFF, self.symbols[info >> 32], addend))
        return found


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _bug(problem: str) -> CompilerBug:
    error = CompilerBug.at("TW040", f"the object cannot become a shared library: {problem}")
    assert isinstance(error, CompilerBug)
    return error


def _round(value: int, align: int) -> int:
    return -(-value // align) * align


def shared_library(data: bytes, exports: tuple[str, ...], soname: str) -> bytes:
    """The library with the functions `exports`."""
    made = _Object(data)
    outside = sorted({symbol.name for _, _, _, symbol, _ in made.relocations() if not symbol.section})
    strings = bytearray(b"\0")

    def string(text: str) -> int:
        start = len(strings)
        strings.extend(text.encode() + b"\0")
        return start

    own_name = string(soname)
    names = [(string(name), name) for name in (*outside, *exports)]
    page = _PAGE[made.machine]

    # Read only: what the loader reads.
    symbols_at = 64 + 56 * 5
    count = 1 + len(names)
    strings_at = symbols_at + 24 * count
    hash_at = _round(strings_at + len(strings), 8)
    relocations_at = _round(hash_at + 4 * (3 + count), 8)
    head_size = relocations_at + 24 * len(outside)

    # Code and constants, then one jump for each function from outside.
    code_at = place = _round(head_size, page)
    for section in made.sections:
        if section.kept and not section.flags & _WRITE:
            place = section.address = _round(place, section.align)
            place += section.size
    stubs_at = _round(place, 16)
    code_end = stubs_at + 16 * len(outside)

    # Writable: the table of outside functions, the dynamic section, data.
    table_at = _round(code_end, page)
    dynamic_at = table_at + 8 * _round(len(outside), 2)
    entries = [(14, own_name), (4, hash_at), (5, strings_at), (6, symbols_at), (10, len(strings)), (11, 24)]
    entries += [(7, relocations_at), (8, 24 * len(outside)), (9, 24), (24, 0), (0x6FFFFFFB, 1), (0, 0)]
    place = dynamic_end = dynamic_at + 16 * len(entries)
    for section in made.sections:
        if section.kept and section.flags & _WRITE:
            place = section.address = _round(place, section.align)
            place += section.size
    end = place

    stub_of = {name: stubs_at + 16 * index for index, name in enumerate(outside)}
    _bind(made, stub_of)
    image = bytearray(end)
    for section in made.sections:
        if section.kept:
            image[section.address : section.address + section.size] = section.data
    for index, name in enumerate(outside):
        image[stub_of[name] : stub_of[name] + 16] = _stub(made.machine, stub_of[name], table_at + 8 * index)
        kind = {X86: 6, ARM: 1025}[made.machine]  # GLOB_DAT
        struct.pack_into("<QQq", image, relocations_at + 24 * index, table_at + 8 * index, (index + 1) << 32 | kind, 0)
    address_of = {s.name: made.sections[s.section].address + s.value for s in made.symbols if s.bind == _GLOBAL and s.section}
    for index, (start, name) in enumerate(names):
        inside = index >= len(outside)
        if inside and name not in address_of:
            raise _bug(f"it does not define {name}")
        values = (start, _GLOBAL << 4 | _FUNCTION, 0, _TEXT if inside else 0, address_of[name] if inside else 0, 0)
        struct.pack_into("<IBBHQQ", image, symbols_at + 24 * (index + 1), *values)
    image[strings_at : strings_at + len(strings)] = strings
    # One bucket: the names are few.
    struct.pack_into(f"<{3 + count}I", image, hash_at, 1, count, 1 if count > 1 else 0, *[i + 1 if 0 < i < count - 1 else 0 for i in range(count)])
    for index, entry in enumerate(entries):
        struct.pack_into("<qQ", image, dynamic_at + 16 * index, *entry)
    _headers(image, made.machine, page, head_size, (code_at, code_end), (table_at, dynamic_at, dynamic_end, end))
    _add_sections(image, (symbols_at, 24 * count), (strings_at, len(strings)), (code_at, code_end - code_at), (dynamic_at, dynamic_end - dynamic_at))
    return bytes(image)


def _headers(
    image: bytearray, machine: int, page: int, head: int, code: tuple[int, int], writable: tuple[int, int, int, int]
) -> None:
    """The file header and the program headers: three segments, the dynamic section, and a stack that is not executable."""
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    image[:64] = ident + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 5, 64, 0, 0)
    table, dynamic, dynamic_end, end = writable
    parts = [
        (1, 4, 0, head, page), (1, 5, code[0], code[1] - code[0], page), (1, 6, table, end - table, page),
        (2, 6, dynamic, dynamic_end - dynamic, 8), (0x6474E551, 6, 0, 0, 16),
    ]  # fmt: skip
    for index, (kind, flags, start, size, align) in enumerate(parts):
        struct.pack_into("<IIQQQQQQ", image, 64 + 56 * index, kind, flags, start, start, start, size, size, align)


def _add_sections(image: bytearray, *places: tuple[int, int]) -> None:
    """A table of sections behind everything: not for the system's loader, but for linkers, which find the symbols by it."""
    names = b"\0.dynsym\0.dynstr\0.text\0.dynamic\0.shstrtab\0"
    at = len(image)
    image += names
    image += bytes(-len(image) % 8)
    table = len(image)
    # Type, flags, link, info, alignment, size of an entry.
    forms = ((11, 2, 2, 1, 8, 24), (3, 2, 0, 0, 1, 0), (1, 6, 0, 0, 16, 0), (6, 3, 2, 0, 8, 16), (3, 0, 0, 0, 1, 0))
    rows = zip((b".dynsym", b".dynstr", b".text", b".dynamic", b".shstrtab"), forms, (*places, (at, len(names))), strict=True)
    image += bytes(64)
    for name, (kind, flags, link, info, align, entry), (start, size) in rows:
        address = start if flags else 0
        image += struct.pack("<IIQQQQIIQQ", names.index(name + b"\0"), kind, flags, address, start, size, link, info, align, entry)
    struct.pack_into("<Q", image, 40, table)
    struct.pack_into("<HHH", image, 58, 64, 6, 5)


def _stub(machine: int, at: int, slot: int) -> bytes:
    """Jump to where the table says."""
    if machine == X86:
        return b"\xff\x25" + struct.pack("<i", slot - (at + 6)) + b"\xcc" * 10
    pages = (slot >> 12) - (at >> 12)
    adrp = 0x90000010 | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    load = 0xF9400210 | (slot & 0xFFF) >> 3 << 10
    return struct.pack("<IIII", adrp, load, 0xD61F0200, 0xD4200000)  # ldr x16; br x16; brk


# -- relocations ----------------------------------------------------------------------------------------------------


def _bind(made: _Object, stub_of: dict[str, int]) -> None:
    """Write into code and data where everything lies."""
    apply = {X86: _bind_x86, ARM: _bind_arm}[made.machine]
    for section, offset, kind, symbol, addend in made.relocations():
        if symbol.section:
            if symbol.section >= len(made.sections) or not made.sections[symbol.section].kept:
                raise _bug(f"{section.name} refers to {symbol.name or 'a section'} that is left out")
            target = made.sections[symbol.section].address + symbol.value
        else:
            target = stub_of[symbol.name]
        apply(section.data, offset, kind, target + addend, section.address + offset)


def _fits(value: int, bits: int) -> int:
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise _bug(f"a distance of {value} does not fit {bits} bits")
    return value


def _bind_x86(data: bytearray, offset: int, kind: int, target: int, place: int) -> None:
    if kind in (2, 4):  # PC32, PLT32
        struct.pack_into("<i", data, offset, _fits(target - place, 32))
    elif kind == 24:  # PC64
        struct.pack_into("<q", data, offset, target - place)
    else:
        raise _bug(f"relocation type {kind} is not known")


def _bind_arm(data: bytearray, offset: int, kind: int, target: int, place: int) -> None:
    (word,) = struct.unpack_from("<I", data, offset)
    scale = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}
    if kind in (274, 275):  # ADR_PREL_LO21 and its page form
        step = _fits(target - place if kind == 274 else (target >> 12) - (place >> 12), 21)
        word |= (step & 3) << 29 | (step >> 2 & 0x7FFFF) << 5
    elif kind in scale:  # the low 12 bits, of an addition or a load
        word |= (target & 0xFFF) >> scale[kind] << 10
    elif kind in (282, 283):  # JUMP26, CALL26
        word |= _fits(target - place >> 2, 26) & 0x3FFFFFF
    elif kind == 261:  # PREL32
        word = _fits(target - place, 32) & 0xFFFFFFFF
    else:
        raise _bug(f"relocation type {kind} is not known")
    struct.pack_into("<I", data, offset, word)


