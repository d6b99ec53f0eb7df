"""f32 -> packed blocks, with NumPy. In: numbers [blocks, elements of one]; out: bytes [blocks, bytes of one].

q4_0 … q8_0 round as GGML's reference does, to the same bits. The K formats search, for each sub-block, the scale and minimum with the
least weighted squared error, as GGML does: rounding with slightly different steps, then least squares for the numbers found.
Groups round to the nearest, between the smallest and the largest number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, by_name
from tilewright.base.packed.dequantize import k_scales

_CHUNK = 1 << 14
"""Blocks that are searched at once."""


def quantize_blocks(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Bytes [blocks, dtype.block_bytes] of finite f32 [blocks, dtype.block]."""
    function = functools.partial(_group, dtype=dtype) if dtype.scale else _BY_NAME[dtype.name]
    parts = [function(values[start : start + _CHUNK]) for start in range(0, len(values), _CHUNK)]
    return np.concatenate(parts) if parts else np.empty((0, dtype.block_bytes), np.uint8)


def _half(values: np.ndarray) -> np.ndarray:
    """f16, as bytes."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values.astype("<f2")).view(np.uint8).reshape(len(values), -1)


def _inverse(d: np.ndarray) -> Any:
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(d == 0, np.float32(0), np.float32(1) / d).astype(np.float32)


def _truncated(values: np.ndarray, most: int) -> Any:
    with np.errstate(invalid="ignore"):
        return np.clip(np.trunc(values), 0, most).astype(np.uint8)


def _pairs(numbers: np.ndarray) -> Any:
    """Two halves of a block in the halves of bytes."""
    half = numbers.shape[-1] // 2
    return numbers[..., :half] & 15 | numbers[..., half:] << 4


def _symmetric(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of the largest size becomes the lowest one."""
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=-1, keepdims=True), axis=-1)
    d = largest / np.float32(-(1 << bits - 1))
    return d, _truncated(values * _inverse(d) + np.float32((1 << bits - 1) + 0.5), (1 << bits) - 1)


def _asymmetric(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lowest = values.min(axis=-1, keepdims=True)
    d = (values.max(axis=-1, keepdims=True) - lowest) / np.float32((1 << bits) - 1)
    return d, lowest, _truncated((values - lowest) * _inverse(d) + np.float32(0.5), (1 << bits) - 1)


def _fifth_bits(numbers: np.ndarray) -> np.ndarray:
    return np.packbits(numbers >> 4, axis=-1, bitorder="little")


def _q4_0(values: np.ndarray) -> np.ndarray:
    d, numbers = _symmetric(values, 4)
    return np.concatenate([_half(d), _pairs(numbers)], axis=-1)


def _q4_1(values: np.ndarray) -> np.ndarray:
    d, lowest, numbers = _asymmetric(values, 4)
    return np.concatenate([_half(d), _half(lowest), _pairs(numbers)], axis=-1)


def _q5_0(values: np.ndarray) -> np.ndarray:
    d, numbers = _symmetric(values, 5)
    return np.concatenate([_half(d), _fifth_bits(numbers), _pairs(numbers)], axis=-1)


def _q5_1(values: np.ndarray) -> np.ndarray:
    d, lowest, numbers = _asymmetric(values, 5)
    return np.concatenate([_half(d), _half(lowest), _fifth_bits(numbers), _pairs(numbers)], axis=-1)


def _q8_0(values: np.ndarray) -> np.ndarray:
    d = np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(d)
    size = np.abs(scaled)
    down = np.floor(size)
    rounded = np.sign(scaled) * (down + np.floor(2 * (size - down)))  # halves away from zero
    with np.errstate(invalid="ignore"):
        return np.concatenate([_half(d), rounded.astype(np.int8).view(np.uint8)], axis=-1)


# -- K formats ------------------------------------------------------------------------------------------------------------


def _fit_minimum(values: np.ndarray, most: int, weights: np.ndarray, first: float, step: float, tries: int, by_size: bool) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the (non-negative) minimum of each row for which `scale * q - minimum` is nearest to it."""
    lowest = np.minimum(values.min(axis=-1), 0)
    highest = values.max(axis=-1)
    span = highest - lowest
    total_w, total_x = weights.sum(axis=-1), (weights * values).sum(axis=-1)
    flat = span <= 0
    safe = np.where(flat, 1, span).astype(np.float32)

    def error(scale: np.ndarray, low: np.ndarray, numbers: np.ndarray) -> Any:
        off = scale[:, None] * numbers + low[:, None] - values
        return (weights * (np.abs(off) if by_size else off * off)).sum(axis=-1)

    def rounded(inverse: np.ndarray, low: np.ndarray) -> Any:
        return np.clip(np.rint(inverse[:, None] * (values - low[:, None])), 0, most).astype(np.float32)

    scale = span / np.float32(most)
    best_scale, best_low = scale, lowest
    best = error(scale, lowest, rounded(np.float32(most) / safe, lowest))
    for number in range(tries + 1):
        numbers = rounded(np.float32(first + step * number + most) / safe, best_low)
        weighted = weights * numbers
        sum_l, sum_l2, sum_xl = weighted.sum(axis=-1), (weighted * numbers).sum(axis=-1), (weighted * values).sum(axis=-1)
        determinant = total_w * sum_l2 - sum_l * sum_l
        good = determinant > 0
        divisor = np.where(good, determinant, 1)
        new_scale = (total_w * sum_xl - total_x * sum_l) / divisor
        new_low = (sum_l2 * total_x - sum_l * sum_xl) / divisor
        above = new_low > 0
        new_scale = np.where(above, sum_xl / np.where(sum_l2 > 0, sum_l2, 1), new_scale).astype(np.float32)
        new_low = np.where(above, 0, new_low).astype(np.float32)
        found = error(new_scale, new_low, numbers)
        better = good & (found < best)
        best, best_scale, best_low = np.where(better, found, best), np.where(better, new_scale, best_scale), np.where(better, new_low, best_low)
    return np.where(flat, 0, best_scale).astype(np.float32), -best_low.astype(np.float32)


def _k(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The head (d, m, scales) and the numbers of q4_k and q5_k."""
    most = (1 << bits) - 1
    rows = values.reshape(-1, 32)
    weights = np.sqrt((rows * rows).mean(axis=-1, keepdims=True, dtype=np.float32)) + np.abs(rows)
    search = (-1.0, 0.1, 20) if bits == 4 else (-0.5, 0.1, 15)
    scales, minima = (part.reshape(-1, 8) for part in _fit_minimum(rows, most, weights, *search, by_size=False))
    d, m = scales.max(axis=-1, keepdims=True), minima.max(axis=-1, keepdims=True)
    ls = np.clip(np.rint(np.float32(63) * scales * _inverse(d)), 0, 63).astype(np.uint8)
    lm = np.clip(np.rint(np.float32(63) * minima * _inverse(m)), 0, 63).astype(np.uint8)
    packed = np.concatenate([
        ls[:, :4] | ls[:, 4:] >> 4 << 6, lm[:, :4] | lm[:, 4:] >> 4 << 6, ls[:, 4:] & 15 | (lm[:, 4:] & 15) << 4,
    ], axis=-1)  # fmt: skip
    head = np.concatenate([_half(d / 63), _half(m / 63), packed], axis=-1)
    stored_d, stored_m = (head[:, at : at + 2].copy().view("<f2").astype(np.float32) for at in (0, 2))
    s, t = (part.astype(np.float32) for part in k_scales(packed))
    factor, low = (stored_d * s)[:, :, None], (stored_m * t)[:, :, None]
    numbers = np.rint((values.reshape(-1, 8, 32) + low) / np.where(factor == 0, 1, factor))
    return head, np.where(factor == 0, 0, np.clip(numbers, 0, most)).astype(np.uint8)


def _q4_k(values: np.ndarray) -> np.ndarray:
    head, numbers = _k(values, 4)
    return np.concatenate([head, _pairs(numbers.reshape(-1, 4, 64)).reshape(-1, 128)], axis=-1)


def _q5_k(values: np.ndarray) -> np.ndarray:
    head, numbers = _k(values, 5)
    high = np.bitwise_or.reduce(numbers >> 4 << np.arange(8, dtype=np.uint8)[None, :, None], axis=1)
    return np.concatenate([head, high, _pairs(numbers.reshape(-1, 4, 64)).reshape(-1, 128)], axis=-1)


def _fit_symmetric(values: np.ndarray, half: int) -> np.ndarray:
    """The scale of each row for which `scale * q`, q from -half to half - 1, is nearest to it; larger numbers count more."""
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=-1, keepdims=True), axis=-1)[:, 0]
    empty = np.abs(largest) < 1e-15
    safe = np.where(empty, 1, largest).astype(np.float32)
    weights = values * values
    best_gain = np.full(len(values), -1, np.float32)
    best_scale = np.zeros(len(values), np.float32)
    for number in (0, *(n for n in range(-9, 10) if n)):
        inverse = np.float32(-(half + 0.1 * number)) / safe
        numbers = np.clip(np.rint(inverse[:, None] * values), -half, half - 1).astype(np.float32)
        sum_xl = (weights * values * numbers).sum(axis=-1)
        sum_l2 = (weights * numbers * numbers).sum(axis=-1)
        found = sum_l2 > 0
        divisor = np.where(found, sum_l2, 1)
        gain = np.where(found, sum_xl * sum_xl / divisor, 0)
        better = gain > best_gain
        best_gain, best_scale = np.where(better, gain, best_gain), np.where(better, sum_xl / divisor, best_scale)
    return np.where(empty, 0, best_scale).astype(np.float32)


def _q6_k(values: np.ndarray) -> np.ndarray:
    scales = _fit_symmetric(values.reshape(-1, 16), 32).reshape(-1, 16)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=-1, keepdims=True), axis=-1)
    inverse = np.where(np.abs(largest) < 1e-15, 0, np.float32(-128) * _inverse(largest)).astype(np.float32)
    d = _half(_inverse(inverse))
    steps = np.clip(np.rint(inverse * scales), -128, 127).astype(np.int8)
    factor = d.copy().view("<f2").astype(np.float32) * steps
    factor = factor[:, :, None]
    numbers = np.rint(values.reshape(-1, 16, 16) / np.where(factor == 0, 1, factor))
    numbers = np.where(factor == 0, 32, np.clip(numbers, -32, 31) + 32).astype(np.uint8)
    quarters = numbers.reshape(-1, 2, 4, 32)
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(quarters >> 4 << np.array([0, 2, 4, 6], np.uint8)[None, None, :, None], axis=2)
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), steps.view(np.uint8), d], axis=-1)


# -- groups ---------------------------------------------------------------------------------------------------------------


def _group(values: np.ndarray, dtype: DType) -> np.ndarray:
    most, half = (1 << dtype.bits) - 1, 1 << dtype.bits - 1
    if dtype.zero_point:
        lowest = np.minimum(values.min(axis=-1, keepdims=True, initial=0), 0)
        d = (np.maximum(values.max(axis=-1, keepdims=True, initial=0), 0) - lowest) / np.float32(most)
    else:
        largest = np.take_along_axis(values, np.abs(values).argmax(axis=-1, keepdims=True), axis=-1)
        d, lowest = largest / np.float32(-half), largest
    scale = np.ascontiguousarray(d.astype(by_name(dtype.scale).numpy))
    inverse = _inverse(scale.astype(np.float32))
    zero = np.clip(np.rint(-lowest * inverse), 0, most) if dtype.zero_point else np.full_like(d, half)
    numbers = np.clip(np.rint(values * inverse) + zero, 0, most).astype(np.uint8)
    return join_group(numbers, scale, zero.astype(np.uint8) if dtype.zero_point else None, dtype)


def join_group(numbers: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, dtype: DType) -> np.ndarray:
    """The bytes of groups, of numbers [blocks, elements], scales [blocks, 1] and zero points [blocks, 1]."""
    packed = numbers[:, 0::2] | numbers[:, 1::2] << 4 if dtype.bits == 4 else numbers
    parts = [scale.view(np.uint8).reshape(len(numbers), -1)]
    if zero is not None:
        parts.append(np.pad(zero, ((0, 0), (0, by_name(dtype.scale).itemsize - 1))))
    return np.concatenate([*parts, packed], axis=-1)


_BY_NAME: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip
