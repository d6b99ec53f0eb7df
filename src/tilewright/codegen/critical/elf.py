"""Reading an ELF object of our own. In: bytes; out: the code of each function, and the symbols that it names, by place."""

from __future__ import annotations

import struct

from tilewright.base.errors import CompilerBug, TargetLimit
from tilewright.base.record import record

_SYMTAB, _RELA = 2, 4
_EXECUTABLE = 4
_FUNCTION = 2
X86, ARM = 62, 183


@record
class FunctionCode:
    """One function: its bytes, and which symbols its instructions name, by offset."""

    name: str
    code: bytes
    named: tuple[tuple[int, str, bool], ...]
    """Offset, symbol, and whether the object itself defines it."""


@record
class ObjectFunctions:
    """All functions of an object."""

    machine: int
    functions: tuple[FunctionCode, ...]
    undefined: tuple[str, ...]
    """Symbols that somebody else must bring."""


def read_functions(data: bytes) -> ObjectFunctions:
    """The functions of an object. Raises `TargetLimit` for objects that are not ELF."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise TargetLimit.at("TW020", "proofs read ELF objects, and this system's are others", help="export for a Linux target, and prove that")
    machine = struct.unpack_from("<H", data, 18)[0]
    table, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * k) for k in range(count)]
    symbols: list[tuple[str, int, int, int, int]] = []
    for section in sections:
        if section[1] == _SYMTAB:
            names = sections[section[6]]
            for at in range(section[4], section[4] + section[5], 24):
                name, info, _, index, value, size = struct.unpack_from("<IBBHQQ", data, at)
                start = names[4] + name
                symbols.append((data[start : data.index(b"\0", start)].decode(), info & 15, index, value, size))
    found: list[FunctionCode] = []
    for name, kind, index, value, size in symbols:
        if kind != _FUNCTION or not index or not sections[index][2] & _EXECUTABLE:
            continue
        if not size:
            raise CompilerBug.at("TW040", f"function {name} of the object has no size")
        begin = sections[index][4] + value
        named: list[tuple[int, str, bool]] = []
        for section in sections:
            if section[1] == _RELA and section[7] == index:
                for at in range(section[4], section[4] + section[5], 24):
                    offset, info, _ = struct.unpack_from("<QQq", data, at)
                    if value <= offset < value + size:
                        symbol = symbols[info >> 32]
                        named.append((offset - value, symbol[0], bool(symbol[2])))
        found.append(FunctionCode(name, data[begin : begin + size], tuple(sorted(named))))
    return ObjectFunctions(machine, tuple(found), tuple(sorted(name for name, _, index, _, _ in symbols if name and not index)))
