"""What GGUF files are made of: numbers of value types and tensor types, and their names.

Little endian throughout. A string is its length in bytes (u64) and UTF-8.

    header    "GGUF", version u32, tensors u64, keys u64
    keys      name, type u32, value; an array is the type of its elements u32, their number u64, elements
    tensors   name, number of axes u32, extents u64 (the fastest first), type u32, offset u64 from the start of the data
    data      begins at a multiple of `general.alignment` (32 if there is no such key), as does each tensor
"""

from __future__ import annotations

import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MOST_AXES = 4
"""GGML's arrays have no more."""

BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS: dict[int, np.dtype] = {
    number: np.dtype(kind)
    for number, kind in {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}.items()
}
"""Value types of a fixed size."""

DTYPES: dict[int, DType] = {
    0: dtypes.f32, 1: dtypes.f16, 2: dtypes.q4_0, 3: dtypes.q4_1, 6: dtypes.q5_0, 7: dtypes.q5_1, 8: dtypes.q8_0, 12: dtypes.q4_k, 13: dtypes.q5_k,
    14: dtypes.q6_k, 24: dtypes.i8, 25: dtypes.i16, 26: dtypes.i32, 27: dtypes.i64, 28: dtypes.f64, 30: dtypes.bf16,
}  # fmt: skip
"""Tensor types that are read and written, by their numbers."""
OTHERS = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Tensor types that GGML has and that are not read."""
SUPPORTED = ", ".join(dtype.name.upper() for dtype in DTYPES.values())


def type_name(number: int) -> str:
    """A tensor type as GGML calls it."""
    return DTYPES[number].name.upper() if number in DTYPES else OTHERS.get(number, f"number {number}")
