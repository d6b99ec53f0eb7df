"""Explicit SIMD types: `f32x4` is four f32 in one register. What Python code names, and what the compiler reads of it.

A type is called, and has `load`, only inside functions that Tilewright compiles; elsewhere these are errors that say so.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from tilewright.base.dtypes import DType, bool_, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from tilewright.base.errors import UserError


class _Member:
    """`f32x4.load`: a word of the language."""

    def __init__(self, word: str) -> None:
        self.__simt__ = word

    def __call__(self, *args: object, **named: object) -> Any:
        _refuse(self.__simt__)


class SimdType:
    """So many numbers of a dtype side by side. A mask is what comparisons of them give: of bools, named `mask4`."""

    load: Any
    """`f32x4.load(x, i)`: the elements of x from i on."""

    def __init__(self, dtype: DType, width: int) -> None:
        self.dtype, self.width = dtype, width
        self.__name__ = f"mask{width}" if dtype.is_bool else f"{dtype}x{width}"
        self.__simt__ = self.__name__
        self.load = _Member(f"{self.__name__}.load")

    def __call__(self, *args: object, **named: object) -> Any:
        _refuse(self.__name__)

    def __repr__(self) -> str:
        return f"tilewright.{self.__name__}"

    def __lt__(self, other: object) -> bool:
        return str(self) < str(other)

    def __reduce__(self) -> tuple[object, ...]:
        return simd_type, (self.dtype, self.width)


def _refuse(word: str) -> NoReturn:
    raise UserError.at(
        "TW005", f"tilewright.{word} has a meaning only inside a function that Tilewright compiles", help="mark the function with @tilewright.cpu"
    )


@functools.cache
def simd_type(dtype: DType, width: int) -> SimdType:
    """The one type of that dtype and width."""
    return SimdType(dtype, width)


TYPES: dict[str, SimdType] = {
    made.__name__: made
    for dtype, widths in (
        (f32, (2, 4, 8, 16)), (f64, (2, 4, 8)), (i64, (2, 4, 8)), (u64, (2, 4, 8)), (i32, (2, 4, 8, 16)), (u32, (2, 4, 8, 16)),
        (i16, (8, 16, 32)), (u16, (8, 16, 32)), (i8, (16, 32, 64)), (u8, (16, 32, 64)),
    )
    for made in (simd_type(dtype, width) for width in widths)
}  # fmt: skip
"""By name: every type a program can write. One, two or four registers of a CPU hold each."""


def mask_of(kind: SimdType) -> SimdType:
    """The mask of that many lanes."""
    return simd_type(bool_, kind.width)
