"""What the bit tricks of explicit kernels compute, on NumPy arrays: `RULES` has a function of the op and its operands for each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright.ir.nodes import Op

Array = np.ndarray
_REVERSED = np.asarray([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], np.uint8)
_LARGEST = 2.0**126
_SMALLEST = 2.0**-126


def _plain(value: Array) -> Array:
    unsigned: Array = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
    return unsigned


def _popcount(op: Op, value: Array) -> Array:
    return np.asarray(np.bitwise_count(_plain(value)))


def _smeared(value: Array) -> Array:
    """All bits below the highest 1 made 1."""
    plain = _plain(value)
    for distance in (1, 2, 4, 8, 16, 32):
        if distance < 8 * plain.dtype.itemsize:
            plain = plain | plain >> plain.dtype.type(distance)
    return plain


def _clz(op: Op, value: Array) -> Array:
    return np.asarray(8 * value.dtype.itemsize - np.bitwise_count(_smeared(value)).astype(np.int64))


def _ctz(op: Op, value: Array) -> Array:
    plain = _plain(value)
    below = ~plain & (plain - plain.dtype.type(1))
    return np.asarray(np.bitwise_count(below))


def _brev(op: Op, value: Array) -> Array:
    octets = np.ascontiguousarray(value).view(np.uint8).reshape(*value.shape, value.dtype.itemsize)
    turned = np.ascontiguousarray(_REVERSED[octets[..., ::-1]])
    return turned.view(value.dtype).reshape(value.shape)


def _byte_perm(op: Op, a: Array, b: Array, selector: Array) -> Array:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint64)
    for k in range(4):
        nibble = selector.astype(np.uint64) >> np.uint64(4 * k) & np.uint64(15)
        octet = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(octet & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(nibble & np.uint64(8), sign, octet) << np.uint64(8 * k)
    return result.astype(np.uint32)


def _funnel_shift(op: Op, low: Array, high: Array, count: Array) -> Array:
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    by = count.astype(np.uint64) & np.uint64(31)
    if op.attrs["mode"] == "left":
        return np.asarray(both << by >> np.uint64(32)).astype(np.uint32)
    return np.asarray(both >> by & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _mul_high(op: Op, a: Array, b: Array) -> Array:
    if a.dtype.itemsize == 4:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return np.asarray(a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = _plain(a), _plain(b)
    low = (x & mask) * (y & mask) >> half
    first = (x >> half) * (y & mask) + low
    second = (x & mask) * (y >> half) + (first & mask)
    high = (x >> half) * (y >> half) + (first >> half) + (second >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return np.asarray(high).view(a.dtype)


def _dp4a(op: Op, a: Array, b: Array, total: Array) -> Array:
    x, y = (
        np.ascontiguousarray(v).view(np.int8 if v.dtype.kind == "i" else np.uint8).reshape(*v.shape, 4).astype(np.int64)
        for v in (a, b)
    )
    wide = total.astype(np.int64) + (x * y).sum(axis=-1)
    return np.asarray(wide & 0xFFFFFFFF).astype(np.uint32).view(total.dtype)


def _div_approx(op: Op, a: Array, b: Array) -> Array:
    quotient = _flushed(a).astype(np.float64) / _flushed(b).astype(np.float64)
    far = (np.abs(b) > _LARGEST) & np.isfinite(b)
    with np.errstate(all="ignore"):
        result = np.where(far & np.isfinite(a), np.copysign(0.0, quotient), quotient).astype(np.float32)
    return _flushed(result)


def _flushed(value: Array) -> Array:
    """Denormals as zeros of their sign."""
    return np.where(np.abs(value) < _SMALLEST, np.copysign(np.float32(0), value), value)


RULES: dict[str, Callable[..., Array]] = {
    "popcount": _popcount, "clz": _clz, "ctz": _ctz, "brev": _brev, "byte_perm": _byte_perm, "funnel_shift": _funnel_shift,
    "mul_high": _mul_high, "dp4a": _dp4a, "div_approx": _div_approx,
}  # fmt: skip
