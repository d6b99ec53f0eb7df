"""Packed blocks -> f32, with NumPy. In: bytes [blocks, bytes of one]; out: numbers [blocks, elements of one].

The formats are those of GGML, and groups as ONNX's `MatMulNBits` has them. `d`, `m` and scales are f16 but where a group says f32.

    q4_0   d, 16 bytes            (q - 8) * d           the low half of byte j is element j, the high half element j + 16
    q4_1   d, m, 16 bytes         q * d + m             as q4_0
    q5_0   d, 4 bytes, 16 bytes   (q - 16) * d          bit j of the first four bytes is the fifth bit of element j
    q5_1   d, m, 4 + 16 bytes     q * d + m             as q5_0
    q8_0   d, 32 bytes            q * d                 signed
    q4_k   d, m, 12, 128 bytes    q * (d*s) - m*t       eight times 32 elements with scales s, t of six bits; 32 bytes hold two of them
    q5_k   d, m, 12, 32, 128      q * (d*s) - m*t       as q4_k; bit i of the 32 bytes is the fifth bit of the elements of sub-block i
    q6_k   128, 64, 16 bytes, d   (q - 32) * (d*s)      16 times 16 elements with scales of eight bits; two bits of each element in the 64 bytes
    group  scale, zero point?, q  (q - zero) * scale    two elements in each byte, or one; zero is 8 or 128 where the group has none

All products but those with a f32 scale are exact in f32, so that it does not matter whether they are fused with sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, by_name

Blocks = np.ndarray


def dequantize_blocks(blocks: Blocks, dtype: DType) -> np.ndarray:
    """f32 [blocks, dtype.block] of bytes [blocks, dtype.block_bytes]."""
    if not len(blocks):
        return np.empty((0, dtype.block), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        found = _group(blocks, dtype) if dtype.scale else _BY_NAME[dtype.name](blocks)
    return np.ascontiguousarray(found.reshape(len(blocks), dtype.block), np.float32)


def _half(blocks: Blocks, offset: int) -> Any:
    """A f16 of each block, as f32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks) -> Any:
    """The low halves of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Blocks) -> Any:
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")


def _q4_0(blocks: Blocks) -> Any:
    return (_nibbles(blocks[:, 2:]).astype(np.float32) - 8) * _half(blocks, 0)


def _q4_1(blocks: Blocks) -> Any:
    return _nibbles(blocks[:, 4:]).astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Any:
    numbers = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return (numbers.astype(np.float32) - 16) * _half(blocks, 0)


def _q5_1(blocks: Blocks) -> Any:
    numbers = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return numbers.astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> Any:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def k_scales(packed: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """The eight scales and the eight factors of the minimum that twelve bytes hold, six bits each."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1)
    minima = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1)
    return scales, minima


def _k(blocks: Blocks, numbers: np.ndarray) -> Any:
    scales, minima = (part.astype(np.float32) for part in k_scales(blocks[:, 4:16]))
    factors, lowest = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return factors[:, :, None] * numbers.reshape(len(blocks), 8, 32).astype(np.float32) - lowest[:, :, None]


def _q4_k(blocks: Blocks) -> Any:
    return _k(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(blocks: Blocks) -> Any:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    return _k(blocks, low | high << 4)


def _q6_k(blocks: Blocks) -> Any:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[None, None, :, None] & 15
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[None, None, :, None] & 3
    numbers = low.reshape(-1, 16, 16) | high.reshape(-1, 16, 16) << 4
    factors = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (numbers.astype(np.float32) - 32) * factors[:, :, None]


def _group(blocks: Blocks, dtype: DType) -> Any:
    width = by_name(dtype.scale).itemsize
    scale = np.ascontiguousarray(blocks[:, :width]).view(by_name(dtype.scale).numpy).astype(np.float32)
    numbers = blocks[:, width * (1 + dtype.zero_point) :]
    if dtype.bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(len(blocks), -1)
    zero = blocks[:, width : width + 1].astype(np.float32) if dtype.zero_point else np.float32(1 << dtype.bits - 1)
    return (numbers.astype(np.float32) - zero) * scale


_BY_NAME: dict[str, Callable[[Blocks], Any]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip
