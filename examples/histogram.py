"""Histograms: counts and weighted sums in equal bins, with edges, and per row. `python examples/histogram.py` prints one.

Every one is a scatter: points combine into elements that data decides, side by side.
"""

from __future__ import annotations

import numpy as np

import tilewright as tw


@tw.kernel
def counts(x: tw.Array, lo: float, hi: float, bins: int = 24) -> tw.Array:
    """How many of `x` lie in each of equal bins between `lo` and `hi`."""
    out = tw.zeros((bins,), tw.i32)
    scale = bins / (hi - lo)
    for i in tw.grid(len(x)):
        if x[i] >= lo and x[i] < hi:
            b = min(int((x[i] - lo) * scale), bins - 1)
            out[b] += 1
    return out


@tw.kernel(deterministic=True)
def weighted(x: tw.Array, w: tw.Array, edges: tw.Array) -> tw.Array:
    """The sum of the weights in each bin `edges[b] <= x < edges[b + 1]`, the same bits on every run."""
    bins = len(edges) - 1
    out = tw.zeros((bins,), w.dtype)
    for i in tw.grid(len(x)):
        first = 0
        last = bins
        while first < last:
            middle = (first + last) // 2
            if edges[middle + 1] <= x[i]:
                first = middle + 1
            else:
                last = middle
        if x[i] >= edges[0] and first < bins:
            out[first] += w[i]
    return out


@tw.kernel
def rows_by_key(keys: tw.Array, rows: tw.Array, count: int) -> tw.Array:
    """Rows with one key are added up: the gradient of an embedding, or the sums of segments. There are `count` keys."""
    n, width = rows.shape
    out = tw.zeros((count, width), rows.dtype)
    for i, j in tw.grid(n, width):
        out[keys[i], j] += rows[i, j]
    return out


@tw.kernel
def largest_by_key(keys: tw.Array, x: tw.Array, count: int) -> tw.Array:
    """The largest of `x` for each key; -inf where a key has none."""
    out = tw.full((count,), -tw.inf, x.dtype)
    for i in tw.grid(len(keys)):
        out[keys[i]] = max(out[keys[i]], x[i])
    return out


def main() -> None:
    x = np.random.default_rng(7).normal(size=1_000_000).astype(np.float32)
    found = np.asarray(counts(x, -3.0, 3.0))
    for start, count in zip(np.linspace(-3, 3, 24, endpoint=False), found, strict=True):
        print(f"{start:6.2f} {'#' * (60 * int(count) // int(found.max()))}")


if __name__ == "__main__":
    main()
