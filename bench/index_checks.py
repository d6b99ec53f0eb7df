"""What checks of indices cost on a CPU: kernels with unproven indices, and the same kernels with `unchecked=True`.

In: whether to be quick. Out: cases whose only peer is the unchecked kernel. Tables of 64 KiB lie in caches, those of 256 MiB beyond the
last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Variant

Values = Sequence[np.ndarray]


def gather(x: tw.Array, places: tw.Array):
    out = tw.empty((len(places),), x.dtype)
    for i in tw.grid(len(places)):
        out[i] = x[places[i]]
    return out


def embedding(table: tw.Array, places: tw.Array):
    (n,) = places.shape
    _, width = table.shape
    out = tw.empty((n, width), table.dtype)
    for i, j in tw.grid(n, width):
        out[i, j] = table[places[i], j]
    return out


def sparse_rows(starts: tw.Array, columns: tw.Array, values: tw.Array, x: tw.Array):
    n = len(starts) - 1
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        total = tw.f32(0)
        for k in range(starts[i], starts[i + 1]):
            total += values[k] * x[columns[k]]
        out[i] = total
    return out


def _gathered(entries: int, count: int, dtype: type) -> Values:
    rng = np.random.default_rng(1)
    return rng.random(entries, np.float32), rng.integers(0, entries, count).astype(dtype)


def _rows(entries: int, count: int) -> Values:
    rng = np.random.default_rng(2)
    return rng.random((entries // 64, 64), np.float32), rng.integers(0, entries // 64, count).astype(np.int32)


def _sparse(entries: int, rows: int, per_row: int) -> Values:
    rng = np.random.default_rng(3)
    starts = np.arange(0, rows * per_row + 1, per_row, dtype=np.int64)
    columns = rng.integers(0, entries, rows * per_row).astype(np.int32)
    return starts, columns, rng.random(rows * per_row, np.float32), rng.random(entries, np.float32)


SMALL, LARGE = 1 << 14, 1 << 26
"""Numbers in a table: 64 KiB and 256 MiB."""


def cases(quick: bool) -> list[Case]:
    found: list[Case] = []
    for entries, count, bar in ((SMALL, 1 << 16, 0.87), (LARGE, 1 << (20 if quick else 22), 0.95)):
        found += [
            _case("gather", gather, (entries, count), "f32, i32", bar, lambda e=entries, c=count: _gathered(e, c, np.int32)),  # type: ignore[misc]
            _case("gather", gather, (entries, count), "f32, i64", bar, lambda e=entries, c=count: _gathered(e, c, np.int64)),  # type: ignore[misc]
            _case("embedding", embedding, (entries // 64, 64, count // 64), "f32, i32", bar, lambda e=entries, c=count: _rows(e, c // 64)),  # type: ignore[misc]
        ]
        for per_row in (16, 100):
            rows = count // per_row
            found.append(_case("sparse_rows", sparse_rows, (rows, per_row, entries), "f32, i32", bar, lambda e=entries, r=rows, p=per_row: _sparse(e, r, p)))  # type: ignore[misc]
    return found


def _case(op: str, body: Callable[..., object], shape: tuple[int, ...], dtype: str, bar: float, make: Callable[[], Values]) -> Case:
    checked, unchecked = tw.kernel(device="cpu")(body), tw.kernel(device="cpu", unchecked=True)(body)

    def prepare() -> Prepared:
        values = make()
        expected = np.asarray(unchecked(*values))
        out = np.empty_like(expected)

        def verify(slot: int, returned: object, variant: Variant) -> str:
            return "" if np.array_equal(out, expected) else "another result than the unchecked kernel's"

        variants = [
            Variant(OURS, lambda slot: checked(*values, out=out)),
            Variant("unchecked", lambda slot: unchecked(*values, out=out)),
        ]
        return Prepared(variants, lambda: out.fill(np.nan), verify, batch=20 if shape[-1] <= SMALL or out.size <= SMALL * 4 else 1)

    return Case(op, shape, dtype, 0, prepare, Bar(bar, ("unchecked",)))
