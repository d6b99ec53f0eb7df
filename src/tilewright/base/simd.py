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


f32x4, f32x8, f32x16 = (simd_type(f32, width) for width in (4, 8, 16))
f64x2, f64x4, f64x8 = (simd_type(f64, width) for width in (2, 4, 8))
i64x2, i64x4, i64x8 = (simd_type(i64, width) for width in (2, 4, 8))
u64x2, u64x4, u64x8 = (simd_type(u64, width) for width in (2, 4, 8))
i32x4, i32x8, i32x16 = (simd_type(i32, width) for width in (4, 8, 16))
u32x4, u32x8, u32x16 = (simd_type(u32, width) for width in (4, 8, 16))
i16x8, i16x16, i16x32 = (simd_type(i16, width) for width in (8, 16, 32))
u16x8, u16x16, u16x32 = (simd_type(u16, width) for width in (8, 16, 32))
i8x16, i8x32, i8x64 = (simd_type(i8, width) for width in (16, 32, 64))
u8x16, u8x32, u8x64 = (simd_type(u8, width) for width in (16, 32, 64))

TYPES: dict[str, SimdType] = {
    made.__name__: made
    for made in (
        f32x4, f32x8, f32x16, f64x2, f64x4, f64x8, i64x2, i64x4, i64x8, u64x2, u64x4, u64x8, i32x4, i32x8, i32x16,
        u32x4, u32x8, u32x16, i16x8, i16x16, i16x32, u16x8, u16x16, u16x32, i8x16, i8x32, i8x64, u8x16, u8x32, u8x64,
    )
}  # fmt: skip
"""By name: every type a program can write. One, two or four registers of a CPU hold each."""


def mask_of(kind: SimdType) -> SimdType:
    """The mask of that many lanes."""
    return simd_type(bool_, kind.width)
