"""Scatters, weighted histograms and sparse products, against NumPy, and Numba and PyTorch where they are installed; on a GPU PyTorch and CuPy.

In: whether the run is quick. Out: cases for `harness.measure`. Every variant returns its result, so that memory for it is part of the time of all.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Variant

Runs = dict[str, Callable[[], Any]]


def scatter_add(k: tw.Array, w: tw.Array, like: tw.Array) -> tw.Array:
    out = tw.zeros(like.shape, w.dtype)
    for i in tw.grid(k.shape[0]):
        out[k[i]] += w[i]
    return out


def histogram(x: tw.Array, w: tw.Array, like: tw.Array) -> tw.Array:
    (bins,) = like.shape
    out = tw.zeros((bins,), w.dtype)
    for i in tw.grid(x.shape[0]):
        b = tw.min(int(x[i] * bins), bins - 1)
        out[b] += w[i]
    return out


def rows_of(ids: tw.Array, grad: tw.Array, like: tw.Array) -> tw.Array:
    n, d = grad.shape
    out = tw.zeros(like.shape, grad.dtype)
    for i, j in tw.grid(n, d):
        out[ids[i], j] += grad[i, j]
    return out


def csr(starts: tw.Array, columns: tw.Array, values: tw.Array, x: tw.Array) -> tw.Array:
    rows = starts.shape[0] - 1
    out = tw.empty((rows,), values.dtype)
    for r in tw.grid(rows):
        total = tw.f32(0)
        for p in range(starts[r], starts[r + 1]):
            total += values[p] * x[columns[p]]
        out[r] = total
    return out


def csr_dense(starts: tw.Array, columns: tw.Array, values: tw.Array, x: tw.Array) -> tw.Array:
    rows, d = starts.shape[0] - 1, x.shape[1]
    out = tw.empty((rows, d), values.dtype)
    for r, j in tw.grid(rows, d):
        total = tw.f32(0)
        for p in range(starts[r], starts[r + 1]):
            total += values[p] * x[columns[p], j]
        out[r, j] = total
    return out


def segment_sums(starts: tw.Array, x: tw.Array) -> tw.Array:
    rows = starts.shape[0] - 1
    out = tw.empty((rows,), x.dtype)
    for r in tw.grid(rows):
        out[r] = tw.sum(x[starts[r] : starts[r + 1]])
    return out


def shift(by: int, w: tw.Array, like: tw.Array) -> tw.Array:
    out = tw.empty(like.shape, w.dtype)
    for i in tw.grid(w.shape[0]):
        out[i + by] = w[i]
    return out


def take(k: tw.Array, w: tw.Array, like: tw.Array) -> tw.Array:
    out = tw.empty(like.shape, w.dtype)
    for i in tw.grid(k.shape[0]):
        out[i] = w[k[i]]
    return out


def _numpy(result: Any) -> np.ndarray:
    if hasattr(result, "get"):
        return np.asarray(result.get())
    return np.asarray(result.cpu()) if hasattr(result, "cpu") else np.asarray(result)


def _case(op: str, shape: tuple[int, ...], dtype: str, nbytes: int, bar: float, make: Callable[[], tuple[Runs, np.ndarray]]) -> Case:
    def prepare() -> Prepared:
        runs, wanted = make()

        def verify(slot: int, returned: object, variant: Variant) -> str:
            found = _numpy(returned).astype(np.float64)
            if dtype.startswith("i"):
                return "" if np.array_equal(found, wanted) else "the result differs"
            # A sum of n numbers in f32 is off by up to n / 2^24 of itself; so is that of peers, which add up in order.
            worst = float((abs(found - wanted) / np.maximum(wanted, 1.0)).max(initial=0.0))
            return "" if worst < 2e-2 or (variant.name != OURS and worst < 1) else f"relative error {worst:.2g}"

        return Prepared([Variant(name, lambda _, run=run: run(), returns=True) for name, run in runs.items()], lambda: None, verify)  # type: ignore[misc]

    return Case(op, shape, dtype, nbytes, prepare, Bar(bar))


@functools.lru_cache(4)
def _keys(bins: int, count: int, spread: str) -> np.ndarray:
    if spread == "equal":
        return np.full(count, bins // 2, np.int32)
    return np.random.default_rng(1).integers(0, bins, count).astype(np.int32)


@functools.lru_cache(2)
def _weights(count: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(2)
    return rng.random(count, np.float32) if dtype == "f32" else rng.integers(0, 8, count).astype(np.int32)


def cpu_cases(quick: bool) -> list[Case]:
    count = 1 << (20 if quick else 24)
    numba_scatter = _numba_scatter()
    torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    found: list[Case] = []
    for bins in (1 << 8, 1 << 16, 1 << 22):
        for spread in ("uniform", "equal"):
            for dtype in ("f32", "i32"):
                for deterministic in (False, True):

                    def make(bins: int = bins, spread: str = spread, dtype: str = dtype, deterministic: bool = deterministic) -> tuple[Runs, np.ndarray]:
                        k, w = _keys(bins, count, spread), _weights(count, dtype)
                        like = np.empty(bins, w.dtype)
                        ours = tw.kernel(device="cpu", deterministic=deterministic)(scatter_add)
                        runs: Runs = {OURS: lambda: ours(k, w, like)}
                        runs["np.add.at"] = lambda: _add_at(k, w, bins)
                        runs["np.bincount"] = lambda: np.bincount(k, w, bins)
                        if numba_scatter is not None:
                            runs["numba"] = lambda: numba_scatter(k, w, bins)
                        if torch is not None:
                            keys, weights = torch.from_numpy(k.astype(np.int64)), torch.from_numpy(w)
                            runs["torch"] = lambda: torch.zeros(bins, dtype=weights.dtype).scatter_add_(0, keys, weights)
                        return runs, np.bincount(k, w.astype(np.float64), bins)

                    label = f"{dtype}, {spread}" + (", deterministic" if deterministic else "")
                    found.append(_case("scatter_add", (count, bins), label, 8 * count + 4 * bins, 1.0, make))
    for bins in (1 << 8, 1 << 16, 1 << 22):

        def weighted(bins: int = bins) -> tuple[Runs, np.ndarray]:
            rng = np.random.default_rng(3)
            x, w = rng.random(count, np.float32), _weights(count, "f32")
            like = np.empty(bins, np.float32)
            ours = tw.kernel(device="cpu")(histogram)
            places = np.minimum((x * np.float32(bins)).astype(np.int64), bins - 1)
            return {
                OURS: lambda: ours(x, w, like),
                "numpy": lambda: np.bincount(np.minimum((x * np.float32(bins)).astype(np.int64), bins - 1), w, bins),
            }, np.bincount(places, w.astype(np.float64), bins)  # fmt: skip

        found.append(_case("histogram", (count, bins), "f32", 8 * count + 4 * bins, 1.0, weighted))
    return [*found, *_rows_and_products(quick)]


def _rows_and_products(quick: bool) -> list[Case]:
    n, d, m = (1 << (14 if quick else 16)), 64, 4096
    rows, per_row = 1 << (14 if quick else 18), 32

    def gradients() -> tuple[Runs, np.ndarray]:
        rng = np.random.default_rng(4)
        ids, grad, like = rng.integers(0, m, n), rng.random((n, d), np.float32), np.empty((m, d), np.float32)
        ours = tw.kernel(device="cpu")(rows_of)
        wanted = np.zeros((m, d))
        np.add.at(wanted, ids, grad.astype(np.float64))
        return {OURS: lambda: ours(ids, grad, like), "np.add.at": lambda: _add_at(ids, grad, m)}, wanted

    def product() -> tuple[Runs, np.ndarray]:
        rng = np.random.default_rng(5)
        starts = np.arange(0, rows * per_row + 1, per_row).astype(np.int32)
        columns = rng.integers(0, rows, rows * per_row).astype(np.int32)
        values, x = rng.random(rows * per_row, np.float32), rng.random(rows, np.float32)
        ours = tw.kernel(device="cpu")(csr)
        runs: Runs = {OURS: lambda: ours(starts, columns, values, x), "numpy": lambda: np.add.reduceat(values * x[columns], starts[:-1])}
        if importlib.util.find_spec("scipy"):
            sparse: Any = importlib.import_module("scipy.sparse")
            matrix = sparse.csr_matrix((values, columns, starts), shape=(rows, rows))
            runs["scipy"] = lambda: matrix @ x
        return runs, np.add.reduceat(values.astype(np.float64) * x[columns], starts[:-1])

    return [
        _case("rows", (n, d, m), "f32", 4 * n * d + 8 * n + 4 * m * d, 1.0, gradients),
        _case("csr", (rows, per_row), "f32", 8 * rows * per_row + 12 * rows, 1.0, product),
    ]


def _add_at(k: np.ndarray, w: np.ndarray, bins: int) -> np.ndarray:
    out = np.zeros((bins, *w.shape[1:]), w.dtype)
    np.add.at(out, k, w)
    return out


def _numba_scatter() -> Callable[[np.ndarray, np.ndarray, int], np.ndarray] | None:
    if importlib.util.find_spec("numba") is None:
        return None
    numba: Any = importlib.import_module("numba")

    @numba.njit  # type: ignore[untyped-decorator]
    def scatter(k: np.ndarray, w: np.ndarray, bins: int) -> np.ndarray:
        out = np.zeros(bins, w.dtype)
        for i in range(k.size):
            out[k[i]] += w[i]
        return out

    return scatter  # type: ignore[no-any-return]


def gpu_cases(quick: bool) -> list[Case]:
    """The same on a GPU, with 2^26 points; also the deterministic sums, against PyTorch's."""
    torch: Any = importlib.import_module("torch")
    cupy: Any = importlib.import_module("cupy")
    count = 1 << (22 if quick else 26)
    found: list[Case] = []
    for bins in (1 << 8, 1 << 16, 1 << 22):
        for spread in ("uniform", "equal"):
            for dtype in ("f32", "i32"):
                for deterministic in (False, True):

                    def make(bins: int = bins, spread: str = spread, dtype: str = dtype, deterministic: bool = deterministic) -> tuple[Runs, np.ndarray]:
                        k, w = _keys(bins, count, spread), _weights(count, dtype)
                        keys, long, weights = torch.from_numpy(k).cuda(), torch.from_numpy(k.astype(np.int64)).cuda(), torch.from_numpy(w).cuda()
                        like = torch.empty(bins, dtype=weights.dtype, device="cuda")
                        ours = tw.kernel(deterministic=deterministic)(scatter_add)

                        def torchs() -> Any:
                            torch.use_deterministic_algorithms(deterministic)
                            try:
                                return torch.zeros(bins, dtype=weights.dtype, device="cuda").index_add_(0, long, weights)
                            finally:
                                torch.use_deterministic_algorithms(False)

                        runs: Runs = {OURS: lambda: ours(keys, weights, like), "torch": torchs}
                        if not deterministic:
                            given = cupy.asarray(keys), cupy.asarray(weights)

                            def cupys() -> Any:
                                out = cupy.zeros(bins, given[1].dtype)
                                cupy.add.at(out, given[0], given[1])
                                return out

                            runs["cupy"] = cupys
                        return runs, np.bincount(k, w.astype(np.float64), bins)

                    label = f"{dtype}, {spread}" + (", deterministic" if deterministic else "")
                    found.append(_case("scatter_add", (count, bins), label, 8 * count + 4 * bins, 1.0, make))
    return [*found, *_gpu_rows_of_data(quick, torch, cupy), *_gpu_checks(quick, torch)]


def _starts(rows: int, per_row: int, lengths: str) -> np.ndarray:
    """Where rows begin. Skewed lengths are those of a Pareto distribution with exponent 1.5, up to 32768."""
    if lengths == "uniform":
        return np.arange(0, rows * per_row + 1, per_row).astype(np.int32)
    own = np.minimum(np.random.default_rng(6).pareto(1.5, rows) * per_row / 2, 32768).astype(np.int64)
    return np.concatenate([[0], np.cumsum(own)]).astype(np.int32)


def _gpu_rows_of_data(quick: bool, torch: Any, cupy: Any) -> list[Case]:
    """Rows whose length data decide: sparse matrices times a vector and a dense matrix, and sums of segments."""
    rows, per_row, dense = 1 << (16 if quick else 20), 32, 64
    sparse: Any = importlib.import_module("cupyx.scipy.sparse")
    found: list[Case] = []
    for lengths in ("uniform", "skewed"):

        def matrix(rows: int, lengths: str) -> tuple[list[Any], np.ndarray, Any, Any]:
            rng, starts = np.random.default_rng(5), _starts(rows, per_row, lengths)
            columns, values = rng.integers(0, rows, starts[-1]).astype(np.int32), rng.random(starts[-1], np.float32)
            given = [torch.from_numpy(a).cuda() for a in (starts, columns, values)]
            theirs = sparse.csr_matrix(tuple(cupy.asarray(given[k]) for k in (2, 1, 0)), shape=(rows, rows))
            return given, starts, torch.sparse_csr_tensor(*given, size=(rows, rows)), theirs

        def product(lengths: str = lengths) -> tuple[Runs, np.ndarray]:
            given, starts, torchs, cupys = matrix(rows, lengths)
            x = torch.rand(rows, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
            ours, theirs = tw.kernel(csr), cupy.asarray(x)
            terms = (given[2].double() * x.double()[given[1].long()]).cpu().numpy()
            return {OURS: lambda: ours(*given, x), "torch": lambda: torchs @ x, "cupy": lambda: cupys @ theirs}, _sums(terms, starts)

        def product_with_matrix(lengths: str = lengths) -> tuple[Runs, np.ndarray]:
            given, _, torchs, cupys = matrix(rows // 4, lengths)
            x = torch.rand((rows // 4, dense), device="cuda", generator=torch.Generator("cuda").manual_seed(7))
            ours, theirs = tw.kernel(csr_dense), cupy.asarray(x)
            wanted = (torchs.double() @ x.double()).cpu().numpy()
            return {OURS: lambda: ours(*given, x), "torch": lambda: torchs @ x, "cupy": lambda: cupys @ theirs}, wanted

        def segments(lengths: str = lengths) -> tuple[Runs, np.ndarray]:
            starts = _starts(rows, per_row, lengths)
            offsets, x = torch.from_numpy(starts).cuda(), torch.rand(int(starts[-1]), device="cuda", generator=torch.Generator("cuda").manual_seed(8))
            ours, long = tw.kernel(segment_sums), offsets.long()
            lengths_of = long[1:] - long[:-1]
            ids = torch.repeat_interleave(torch.arange(rows, device="cuda"), lengths_of)
            return {
                OURS: lambda: ours(offsets, x), "torch": lambda: torch.segment_reduce(x, "sum", offsets=long, axis=0, initial=0),
                "torch index_add_": lambda: torch.zeros(rows, device="cuda").index_add_(0, ids, x),
            }, _sums(x.double().cpu().numpy(), starts)  # fmt: skip

        total = int(_starts(rows, per_row, lengths)[-1])
        found += [
            _case("csr", (rows, per_row), f"f32, {lengths}", 8 * total + 12 * rows, 0.9, product),
            _case("csr_dense", (rows // 4, per_row, dense), f"f32, {lengths}", 8 * total // 4 + 2 * rows * dense, 0.9, product_with_matrix),
            _case("segments", (rows, per_row), f"f32, {lengths}", 4 * total + 8 * rows, 1.0, segments),
        ]
    return found


def _sums(terms: np.ndarray, starts: np.ndarray) -> np.ndarray:
    whole = np.concatenate([[0.0], np.cumsum(terms)])
    return np.asarray(whole[starts[1:]] - whole[starts[:-1]])


def _gpu_checks(quick: bool, torch: Any) -> list[Case]:
    """What checks of indices cost: the same kernel without them is the peer."""
    count = 1 << (22 if quick else 26)
    found: list[Case] = []
    for name, kernel in (("checked_shift", shift), ("checked_scatter_add", scatter_add), ("checked_gather", take)):

        def make(name: str = name, kernel: Any = kernel) -> tuple[Runs, np.ndarray]:
            k = torch.randperm(count, device="cuda", generator=torch.Generator("cuda").manual_seed(9)).int()
            w = torch.rand(count, device="cuda", generator=torch.Generator("cuda").manual_seed(8))
            given = (0 if name == "checked_shift" else k), w, w
            checked, unchecked = tw.kernel(kernel), tw.kernel(unchecked=True)(kernel)
            wanted = w if name == "checked_shift" else w[k.long()] if name == "checked_gather" else torch.empty_like(w).index_copy_(0, k.long(), w)
            return {OURS: lambda: checked(*given), "unchecked": lambda: unchecked(*given)}, wanted.double().cpu().numpy()

        found.append(_case(name, (count,), "f32", 12 * count, 0.97, make))
    return found
