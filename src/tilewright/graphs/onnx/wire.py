"""The wire format of protocol buffers, read only: fields of a message, one after the other, without copies.

In: bytes that may be anything. Out: `(number, kind, value)` for each field; a value is an integer or a view of the bytes. What is
not a message raises `Malformed` with the offset in the file. Nothing is allocated that the bytes do not hold.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MOST_VARINT = 10
"""Bytes of the longest varint: 64 bits, seven in each."""


class Malformed(Exception):
    """The bytes are not the message they should be."""


def fields(view: memoryview, start: int = 0) -> Iterator[tuple[int, int, int | memoryview]]:
    """The fields of a message; `start` is where it lies in the file, for messages of errors."""
    at, end = 0, len(view)
    while at < end:
        begin = at
        key, at = varint(view, at, start)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise Malformed(f"a field at byte {start + begin} has the number 0")
        if kind == VARINT:
            value, at = varint(view, at, start)
            yield number, kind, value
            continue
        if kind == BYTES:
            length, at = varint(view, at, start)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise Malformed(f"field {number} at byte {start + begin} is of wire type {kind}, which no ONNX file has")
        if length > end - at:
            raise Malformed(f"field {number} at byte {start + begin} is {length} bytes long, and {end - at} are left")
        part = view[at : at + length]
        at += length
        yield number, kind, part if kind == BYTES else int.from_bytes(part, "little")


def varint(view: memoryview, at: int, start: int = 0) -> tuple[int, int]:
    """An unsigned integer of up to 64 bits, and where it ends."""
    value = 0
    for count in range(_MOST_VARINT):
        if at + count >= len(view):
            raise Malformed(f"the number at byte {start + at} goes beyond the end of its message")
        byte = view[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            if value >> 64:
                raise Malformed(f"the number at byte {start + at} has more than 64 bits")
            return value, at + count + 1
    raise Malformed(f"the number at byte {start + at} is longer than {_MOST_VARINT} bytes")


def signed(value: int) -> int:
    """A varint as a signed 64-bit integer."""
    return value - (1 << 64) if value >> 63 else value


def varints(value: int | memoryview, kind: int) -> list[int]:
    """One element of a repeated field of integers, or all of a packed one; signed."""
    if kind == VARINT:
        assert isinstance(value, int)
        return [signed(value)]
    if kind != BYTES:
        raise Malformed("a list of integers holds something else")
    assert isinstance(value, memoryview)
    found, at = [], 0
    while at < len(value):
        number, at = varint(value, at)
        found.append(signed(number))
    return found


def fixed(value: int | memoryview, kind: int, code: str) -> list[float]:
    """One element of a repeated field of floats (`code` is `f` or `d`), or all of a packed one."""
    size = struct.calcsize(code)
    if kind == BYTES:
        assert isinstance(value, memoryview)
        if len(value) % size:
            raise Malformed(f"a list of {size}-byte floats is {len(value)} bytes long")
        return [item for (item,) in struct.iter_unpack("<" + code, value)]
    if kind != (FIXED32 if size == 4 else FIXED64):
        raise Malformed("a list of floats holds something else")
    assert isinstance(value, int)
    return [float(struct.unpack("<" + code, value.to_bytes(size, "little"))[0])]
