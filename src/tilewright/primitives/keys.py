"""Keys of a radix sort: unsigned integers in the order of the numbers they stand for.

In: numbers of any dtype. Signed integers get their sign bit turned; floats too, and negative ones all others as well, so that
-inf is first, then up to +inf, and every NaN last, as in NumPy. -0.0 comes before 0.0, unless `merge`d, which is for keys that
nobody gets back. Descending keys are those with all bits turned: equal ones keep their order.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, i8, i16, i32, i64, u8, u16, u32, u64
from tilewright.primitives.code import Code, Num

_UNSIGNED = {8: u8, 16: u16, 32: u32, 64: u64}
_SIGNED = {8: i8, 16: i16, 32: i32, 64: i64}


def key_dtype(dtype: DType) -> DType:
    return u8 if dtype.is_bool else _UNSIGNED[dtype.bits]


def raw(value: Num) -> Num:
    """The bits of a number, whatever they mean."""
    return value.to(u8) if value.dtype.is_bool else value.bits(key_dtype(value.dtype))


def cooked(bits: Num, dtype: DType) -> Num:
    """The number of those bits."""
    return bits.ne(0) if dtype.is_bool else bits.bits(dtype)


def to_key(c: Code, bits: Num, dtype: DType, descending: bool, merge: bool = False) -> Num:
    """The key of the number with these bits."""
    unsigned = bits.dtype
    top = 1 << (unsigned.bits - 1)
    key = bits
    if dtype.is_float:
        everything = (1 << unsigned.bits) - 1
        magnitude = bits & (top - 1)
        if merge:
            bits = c.select(magnitude.eq(0), magnitude, bits)
        turn = (bits.bits(_SIGNED[unsigned.bits]) >> (unsigned.bits - 1)).bits(unsigned) | top
        key = c.select(magnitude > _infinity(dtype), c.const(everything, unsigned), bits ^ turn)
    elif dtype.is_signed:
        key = bits ^ top
    return ~key if descending else key


def from_key(c: Code, key: Num, dtype: DType, descending: bool) -> Num:
    """The bits of the number with that key."""
    unsigned = key.dtype
    top = 1 << (unsigned.bits - 1)
    if descending:
        key = ~key
    if dtype.is_float:
        # Keys of numbers that are not negative have the top bit: that is turned back, else all bits are.
        turn = (~(key.bits(_SIGNED[unsigned.bits]) >> (unsigned.bits - 1))).bits(unsigned) | top
        return key ^ turn
    return key ^ top if dtype.is_signed else key


def _infinity(dtype: DType) -> int:
    """The bits of infinity, or of the largest number where there is none."""
    return {"f8e4m3": 0x7E, "f8e5m2": 0x7C, "f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF0000000000000}[dtype.name]
