"""What `print` writes: a text with places for numbers, as Python's format strings have them, and the same for C's `printf`.

In: the text and the dtypes of the numbers; out: pieces, from which come the format of `printf` on a device and the line the emulator
writes. Both say the same: a float without a format is written with `%g`, a bool as True or False.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from tilewright.base.dtypes import DType
from tilewright.base.record import record

_SPEC = re.compile(
    r"(?P<align>[<>])?(?P<sign>[+ ])?(?P<alternate>#)?(?P<zero>0)?(?P<width>\d+)?(?:\.(?P<precision>\d+))?(?P<kind>[a-zA-Z])?"
)
_KINDS = {"i": "dxXo", "u": "dxXo", "f": "eEfFgG", "b": ""}


class FormatError(ValueError):
    """The text cannot be written with these numbers."""


@record
class PrintPlace:
    """A place for one number: flags, width and precision as `printf` has them, and the letter."""

    flags: str
    kind: str
    dtype: DType

    @property
    def spelled(self) -> str:
        """For `printf`: a number of 64 bits says so."""
        long = "ll" if self.dtype.is_int and self.dtype.bits == 64 else ""
        return f"%{self.flags}{long}{self.kind}"

    def write(self, value: int | float | bool) -> str:
        if self.dtype.is_bool:
            return f"%{self.flags}s" % bool(value)
        if self.dtype.is_float:
            return f"%{self.flags}{self.kind}" % float(value)
        number, flags = int(value), self.flags
        if self.kind in "xXo":
            number &= (1 << max(self.dtype.bits, 32)) - 1
        if not number:
            flags = flags.replace("#", "")  # C puts no 0x before a zero
        return f"%{flags}{'d' if self.kind == 'u' else self.kind}" % number


Piece = str | PrintPlace


def pieces(text: str, dtypes: Sequence[DType]) -> tuple[Piece, ...]:
    """The text cut at its places. Raises FormatError."""
    found: list[Piece] = []
    left = list(dtypes)
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise FormatError(f"{text!r}: {error}") from error
    for before, name, spec, conversion in parsed:
        if before:
            found.append(before)
        if name is None:
            continue
        if name or conversion:
            raise FormatError(f"a place is {{}} or {{:format}}, got {{{name}{'!' + conversion if conversion else ''}}}")
        if not left:
            raise FormatError(f"{text!r} has more places than there are numbers ({len(dtypes)})")
        found.append(_place(spec or "", left.pop(0)))
    if left:
        raise FormatError(f"{text!r} has {len(dtypes) - len(left)} places for {len(dtypes)} numbers")
    return tuple(found)


def _place(spec: str, dtype: DType) -> PrintPlace:
    match = _SPEC.fullmatch(spec)
    kind = match["kind"] if match else None
    default = {"f": "g", "i": "d", "u": "u", "b": "s"}[dtype.kind]
    wrong = match is None or (kind is not None and kind not in _KINDS[dtype.kind])
    if match is None or wrong or (match["alternate"] and kind not in ("x", "X")):
        raise FormatError(
            f"{dtype} cannot be written as {spec!r}: sign, width, precision and one of {_KINDS[dtype.kind] or 'nothing'}"
        )
    flags = ("-" if match["align"] == "<" else "") + (match["sign"] or "") + (match["alternate"] or "") + (match["zero"] or "")
    flags += (match["width"] or "") + (f".{match['precision']}" if match["precision"] else "")
    if dtype.kind == "u" and kind == "d":
        kind = "u"
    return PrintPlace(flags, kind or default, dtype)


def written(parts: Sequence[Piece], values: Sequence[int | float | bool]) -> str:
    """The line with these numbers."""
    left = list(values)
    return "".join(part if isinstance(part, str) else part.write(left.pop(0)) for part in parts)


def printf_format(parts: Sequence[Piece]) -> str:
    """The format of C's `printf`."""
    return "".join(part.replace("%", "%%") if isinstance(part, str) else part.spelled for part in parts)
