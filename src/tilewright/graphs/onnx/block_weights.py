"""The weights of `MatMulNBits`: as the model has them, as one packed array, or as floats.

In: numbers of 2, 4 or 8 bits in blocks along rows, scales, zero points. Out: a `PackedArray` whose elements are the same numbers to the last bit, or an
array of f32 where there is no packed dtype for them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.execute.packed.arrays import packed_array
from tilewright.runtime.memory.packed_array import PackedArray

F16, F32, U8 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.uint8)
SCALES = (F16, F32, np.dtype(ml_dtypes.bfloat16))
"""Scales that packed groups have, or take without rounding."""


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """Rows of blocks, the last of which may be part padding. Numbers and zero points (floats, or packed like numbers) have sizes that fit."""

    columns: int
    blocks: int
    bits: int
    block: int
    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None

    @functools.cached_property
    def dtype(self) -> DType | None:
        """The packed dtype that holds them, None where none does.

        `q4_0` and `q8_0` are read fastest: they take scales that are f16 without rounding, for each 32 numbers. Groups take the others.
        """
        if self.block not in dtypes.GROUP_BLOCKS or self.scales.dtype not in SCALES or (self.zeros is not None and self.zeros.dtype != U8):
            return None
        bits, zero_point = max(self.bits, 4), self.zeros is not None and self.bits > 2
        with np.errstate(over="ignore"):
            narrow = self.scales.astype(F16)
        if not zero_point and self.block % 32 == 0 and bool((np.isfinite(narrow) & (narrow.astype(F32) == self.scales.astype(F32))).all()):
            return dtypes.q4_0 if bits == 4 else dtypes.q8_0
        scale = "f16" if self.scales.dtype == F16 else "f32"
        return next(d for d in dtypes.GROUPS if (d.bits, d.block, d.scale, d.zero_point) == (bits, self.block, scale, zero_point))

    def packed(self) -> PackedArray:
        """One array [columns, blocks * block] of the packed dtype."""
        dtype = self.dtype
        assert dtype is not None
        if not dtype.scale:
            return PackedArray(self._fixed(dtype), dtype)
        numbers, zeros = self.numbers, self.zeros
        if self.bits == 2:
            plain = self._four_bits()
            numbers, zeros = plain[:, 0::2] | plain[:, 1::2] << 4, None
        scales = self.scales if dtype.scale == "f16" else self.scales.astype(F32)
        return packed_array(np.ascontiguousarray(numbers).reshape(self.columns, self.blocks, -1), scales.reshape(self.columns, self.blocks), zeros, bits=dtype.bits)

    def _fixed(self, dtype: DType) -> np.ndarray:
        """The bytes of `q4_0` or `q8_0`, whose blocks may be parts of these."""
        numbers = (self._four_bits() if self.bits == 2 else self._plain(self.numbers, self.blocks * self.block)).reshape(self.columns, -1, dtype.block)
        scales = np.repeat(self.scales.astype(F16).reshape(self.columns, self.blocks, 1), self.block // dtype.block, axis=1)
        half = dtype.block // 2
        rest = numbers ^ 128 if dtype.bits == 8 else numbers[..., :half] | numbers[..., half:] << 4
        return np.concatenate([np.ascontiguousarray(scales).view(U8), rest], axis=-1)

    def _four_bits(self) -> np.ndarray:
        """Numbers of two bits less their zero points, as numbers of four bits whose zero point is 8: u8 [columns, blocks * block]."""
        numbers = self._plain(self.numbers, self.blocks * self.block).reshape(self.columns, self.blocks, self.block)
        zeros = 2 if self.zeros is None else self._plain(self.zeros, self.blocks)[..., None]
        return np.asarray(numbers + np.uint8(8) - zeros, U8).reshape(self.columns, -1)

    def _plain(self, packed: np.ndarray, count: int) -> np.ndarray:
        """Small numbers packed along rows, one in each byte: u8 [columns, count]."""
        wide = packed.reshape(self.columns, -1)
        return np.stack([wide >> shift & (1 << self.bits) - 1 for shift in range(0, 8, self.bits)], -1).reshape(self.columns, -1)[:, :count]

    def floats(self) -> np.ndarray:
        """f32 [columns, blocks * block]."""
        numbers = self._plain(self.numbers, self.blocks * self.block).reshape(self.columns, self.blocks, self.block).astype(F32)
        offsets: np.ndarray = np.full((self.columns, self.blocks), 1 << self.bits - 1, F32)
        if self.zeros is not None:
            offsets = (self._plain(self.zeros, self.blocks) if self.zeros.dtype == U8 else self.zeros).astype(F32).reshape(self.columns, self.blocks)
        with np.errstate(all="ignore"):
            return np.asarray((numbers - offsets[..., None]) * self.scales.astype(F32).reshape(self.columns, self.blocks, 1)).reshape(self.columns, -1)
