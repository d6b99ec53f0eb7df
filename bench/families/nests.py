"""Loop nests of scientific codes on CPUs: steps in order, eliminations, short sums, pairs, borders, serial bodies."""

from __future__ import annotations

from typing import Any

import numpy as np

import tilewright as tw
from bench.families.draw import Draw, Family, Problem, Spec

# -- steps in order -------------------------------------------------------------------------------------------------


def heat(steps: int) -> Any:
    @tw.kernel
    def spread(plate: tw.Array) -> tw.Array:
        rows, columns = plate.shape
        now = plate * 1.0
        after = plate * 1.0
        for _ in range(steps):
            for i, j in tw.grid(range(1, rows - 1), range(1, columns - 1)):
                after[i, j] = now[i, j] + 0.1 * (now[i - 1, j] + now[i + 1, j] + now[i, j - 1] + now[i, j + 1] - 4.0 * now[i, j])
            now, after = after, now
        return now

    return spread


def exact_heat(steps: int) -> Any:
    def run(plate: Any) -> Any:
        now, after = plate.copy(), plate.copy()
        for _ in range(steps):
            after[1:-1, 1:-1] = now[1:-1, 1:-1] + 0.1 * (now[:-2, 1:-1] + now[2:, 1:-1] + now[1:-1, :-2] + now[1:-1, 2:] - 4.0 * now[1:-1, 1:-1])
            now, after = after, now
        return now

    return run


@tw.kernel
def elimination(a: tw.Array) -> tw.Array:
    n = a.shape[0]
    u = a * 1.0
    for k in range(n):
        for i in range(k + 1, n):
            factor = u[i, k] / u[k, k]
            for j in range(k + 1, n):
                u[i, j] -= factor * u[k, j]
            u[i, k] = factor
    return u


def exact_elimination(a: Any) -> Any:
    u = a.copy()
    for k in range(len(u)):
        u[k + 1 :, k] /= u[k, k]
        u[k + 1 :, k + 1 :] -= np.outer(u[k + 1 :, k], u[k, k + 1 :])
    return u


@tw.kernel
def shortest_paths(weights: tw.Array) -> tw.Array:
    n = weights.shape[0]
    d = weights * 1.0
    for k in range(n):
        for i, j in tw.grid(n, n):
            d[i, j] = min(d[i, j], d[i, k] + d[k, j])
    return d


def exact_paths(weights: Any) -> Any:
    d = weights.copy()
    for k in range(len(d)):
        np.minimum(d, d[:, k : k + 1] + d[k : k + 1, :], out=d)
    return d


@tw.kernel
def forward_substitution(a: tw.Array, b: tw.Array) -> tw.Array:
    n, columns = b.shape
    x = b * 1.0
    for i in range(n):
        for k in range(i):
            for j in range(columns):
                x[i, j] -= a[i, k] * x[k, j]
        for j in range(columns):
            x[i, j] = x[i, j] / a[i, i]
    return x


def exact_substitution(a: Any, b: Any) -> Any:
    x = b.copy()
    for i in range(len(x)):
        x[i] = (x[i] - a[i, :i] @ x[:i]) / a[i, i]
    return x


# -- nests ----------------------------------------------------------------------------------------------------------


@tw.kernel
def distances(x: tw.Array, y: tw.Array) -> tw.Array:
    m, d = x.shape
    n = y.shape[0]
    out = tw.empty((m, n), x.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for k in range(d):
            away = x[i, k] - y[j, k]
            total += away * away
        out[i, j] = tw.sqrt(total)
    return out


@tw.kernel
def turned(x: tw.Array, w: tw.Array) -> tw.Array:
    n, m, _ = x.shape
    out = tw.empty((n, m, 2), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j, 0] = x[i, j, 0] * w[j, 0] - x[i, j, 1] * w[j, 1]
        out[i, j, 1] = x[i, j, 0] * w[j, 1] + x[i, j, 1] * w[j, 0]
    return out


def exact_turned(x: Any, w: Any) -> Any:
    a, b = x[..., 0], x[..., 1]
    return np.stack((a * w[:, 0] - b * w[:, 1], a * w[:, 1] + b * w[:, 0]), -1)


@tw.kernel
def bordered(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        if i > 0 and i < rows - 1 and j > 0 and j < columns - 1:
            out[i, j] = 0.25 * (x[i - 1, j] + x[i + 1, j] + x[i, j - 1] + x[i, j + 1])
        else:
            out[i, j] = x[i, j]
    return out


def exact_bordered(x: Any) -> Any:
    out = x.copy()
    out[1:-1, 1:-1] = 0.25 * (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:])
    return out


def box(r: int) -> Any:
    @tw.kernel
    def blurred(x: tw.Array) -> tw.Array:
        rows, columns = x.shape
        out = tw.empty((rows, columns), x.dtype)
        for i, j in tw.grid(rows, columns):
            total = 0.0
            for k in range(2 * r + 1):
                for m in range(2 * r + 1):
                    y = i + k - r
                    z = j + m - r
                    if y >= 0 and y < rows and z >= 0 and z < columns:
                        total += x[y, z]
            out[i, j] = total / ((2 * r + 1) * (2 * r + 1))
        return out

    return blurred


def exact_box(r: int) -> Any:
    def run(x: Any) -> Any:
        padded = np.pad(x, r)
        total = np.zeros_like(x)
        for k in range(2 * r + 1):
            for m in range(2 * r + 1):
                total += padded[k : k + x.shape[0], m : m + x.shape[1]]
        return total / (2 * r + 1) ** 2

    return run


def paths(steps: int) -> Any:
    @tw.kernel
    def options(start: tw.Array, drift: tw.Array) -> tw.Array:
        (n,) = start.shape
        out = tw.empty((n,), start.dtype)
        for i in tw.grid(n):
            price = start[i]
            best = price
            for _ in range(steps):
                price = price * (1.0 + drift[i]) / (1.0 + 0.001 * price)
                if price > best:
                    best = price
            out[i] = best
        return out

    return options


def exact_paths_of(steps: int) -> Any:
    def run(start: Any, drift: Any) -> Any:
        price, best = start.copy(), start.copy()
        for _ in range(steps):
            price = price * (1.0 + drift) / (1.0 + 0.001 * price)
            best = np.maximum(best, price)
        return best

    return run


@tw.kernel
def checksum(data: tw.Array) -> int:
    (n,) = data.shape
    a = tw.u32(1)
    b = tw.u32(0)
    for i in range(n):
        a = (a + data[i]) % 65521
        b = (b + a) % 65521
    return b * 65536 + a


def exact_checksum(data: Any) -> Any:
    import zlib

    return np.float64(zlib.adler32(data.astype(np.uint8).tobytes()))


# -- one matrix, read twice -----------------------------------------------------------------------------------------


@tw.kernel
def atax(a: tw.Array, x: tw.Array) -> tw.Array:
    m, n = a.shape
    y = tw.zeros((n,), a.dtype)
    for i in range(m):
        product = 0.0
        for j in range(n):
            product += a[i, j] * x[j]
        for j in range(n):
            y[j] = y[j] + a[i, j] * product
    return y


@tw.kernel
def covariance(data: tw.Array) -> tw.Array:
    n, m = data.shape
    mean = tw.zeros((m,), data.dtype)
    centred = tw.empty((n, m), data.dtype)
    out = tw.empty((m, m), data.dtype)
    for j in range(m):
        for i in range(n):
            mean[j] += data[i, j]
        mean[j] = mean[j] / n
    for i, j in tw.grid(n, m):
        centred[i, j] = data[i, j] - mean[j]
    for i in range(m):
        for j in range(i, m):
            total = 0.0
            for k in range(n):
                total += centred[k, i] * centred[k, j]
            total = total / (n - 1)
            out[i, j] = total
            out[j, i] = total
    return out


def exact_covariance(data: Any) -> Any:
    centred = data - data.mean(0)
    return centred.T @ centred / data.dtype.type(len(data) - 1)


@tw.kernel
def nearest(x: tw.Array, centres: tw.Array) -> tw.Array:
    n, d = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        best = 1e30
        for j in range(centres.shape[0]):
            total = 0.0
            for q in range(d):
                away = x[i, q] - centres[j, q]
                total += away * away
            if total < best:
                best = total
        out[i] = best
    return out


# -- draws ----------------------------------------------------------------------------------------------------------


def _numba(name: str, *constants: Any) -> Any:
    """The peer of that name, compiled when it is asked for."""

    def make() -> Any:
        from bench.families import numba_peers

        return getattr(numba_peers, name)(*constants)

    return make


def ordered(draw: Draw) -> Problem:
    kind = draw.pick("heat", "elimination", "shortest paths", "forward substitution")
    dtype = draw.pick("f32", "f64")
    tolerance = 1e-3 if dtype == "f32" else 1e-10
    if kind == "heat":
        rows, columns = draw.fitting(1e6, (100, 3000), (100, 3000))
        rows, columns, steps = rows + 2, columns + 2, draw.count(4, 60)
        exact = exact_heat(steps)
        return Problem(f"heat, {steps} steps {dtype}", (rows, columns), (Spec((rows, columns), dtype),), heat(steps), exact, {"numpy": exact, "numba": _numba("heat", steps)}, tolerance)
    if kind == "forward substitution":
        n, columns = draw.size(100, 500, small=20), draw.size(1, 200)
        specs = (Spec((n, n), dtype, "dominant"), Spec((n, columns), dtype))
        return Problem(f"{kind} {dtype}", (n, columns), specs, forward_substitution, exact_substitution, {"numpy": exact_substitution, "numba": _numba("substitution")}, tolerance)
    n = draw.size(100, 500, small=20)
    ours, exact, name = (elimination, exact_elimination, "elimination") if kind == "elimination" else (shortest_paths, exact_paths, "shortest_paths")
    spec = Spec((n, n), dtype, "dominant" if kind == "elimination" else "uniform")
    return Problem(f"{kind} {dtype}", (n, n), (spec,), ours, exact, {"numpy": exact, "numba": _numba(name)}, tolerance)


def short_sums(draw: Draw) -> Problem:
    d = draw.count(2, 16)
    m, n = draw.fitting(2e6, (100, 5000), (100, 5000))
    dtype = draw.pick("f32", "f64")

    def exact(x: Any, y: Any) -> Any:
        return np.sqrt(((x[:, None, :] - y[None, :, :]) ** 2).sum(-1))

    return Problem(f"pairwise distances, {d} coordinates {dtype}", (m, n, d), (Spec((m, d), dtype), Spec((n, d), dtype)), distances, exact, {"numba": _numba("distances")}, 1e-4)


def pairs(draw: Draw) -> Problem:
    n, m = draw.fitting(1e6, (16, 4000), (64, 8000))
    dtype = draw.pick("f32", "f64")
    specs = (Spec((n, m, 2), dtype), Spec((m, 2), dtype))

    def as_complex(x: Any, w: Any) -> Any:
        kind = np.complex64 if x.dtype == np.float32 else np.complex128
        return (x.view(kind)[..., 0] * w.view(kind)[:, 0]).view(x.dtype).reshape(x.shape)

    return Problem(f"complex factors, interleaved {dtype}", (n, m), specs, turned, exact_turned, {"numpy": as_complex, "numba": _numba("turned")}, 1e-4)


def borders(draw: Draw) -> Problem:
    rows, columns = draw.fitting(4e6, (200, 6000), (200, 6000))
    dtype = draw.pick("f32", "f64")
    rows, columns = rows + 2, columns + 2
    if draw.pick(True, False):
        return Problem(f"stencil with a border condition {dtype}", (rows, columns), (Spec((rows, columns), dtype),), bordered, exact_bordered, {"numpy": exact_bordered, "numba": _numba("bordered")}, 1e-4)
    r = draw.count(1, 4)
    return Problem(f"box of {2 * r + 1}, guarded {dtype}", (rows, columns), (Spec((rows, columns), dtype),), box(r), exact_box(r), {"numba": _numba("box", r)}, 1e-4)


def view_results(draw: Draw) -> Problem:
    rows, columns = draw.fitting(4e6, (200, 6000), (200, 6000))
    dtype = draw.pick("f32", "f64")
    whole = np.empty((rows + 2, columns + 3), np.float32 if dtype == "f32" else np.float64)
    view = whole[1:-1, 2:-1]

    @tw.kernel
    def scaled(x: tw.Array) -> tw.Array:
        return x * 2.0 + 1.0

    def numpy_peer(x: Any) -> Any:
        np.multiply(x, 2.0, out=view)
        np.add(view, 1.0, out=view)
        return view

    return Problem(f"out= a view {dtype}", (rows, columns), (Spec((rows, columns), dtype),), lambda x: scaled(x, out=view), lambda x: x * 2.0 + 1.0, {"numpy": numpy_peer, "numba": _numba("scaled_into", view)}, 1e-5)


def serial_bodies(draw: Draw) -> Problem:
    n, steps = draw.size(1000, 50000, small=40), draw.count(20, 200)
    dtype = draw.pick("f32", "f64")
    specs = (Spec((n,), dtype, "positive"), Spec((n,), dtype, "uniform", 0.05))
    return Problem(f"a path of {steps} steps each {dtype}", (n,), specs, paths(steps), exact_paths_of(steps), {"numba": _numba("paths", steps)}, 1e-3)


def checksums(draw: Draw) -> Problem:
    n = draw.size(100000, 4000000, small=1000)
    return Problem("Adler-32", (n,), (Spec((n,), "u8", "bits"),), checksum, exact_checksum, {"numba": _numba("checksum")}, 0.0)


def matrix_pairs(draw: Draw) -> Problem:
    m, n = draw.fitting(2e6, (100, 4000), (100, 4000))
    dtype = draw.pick("f32", "f64")

    def exact(a: Any, x: Any) -> Any:
        return (a @ x) @ a

    return Problem(f"A'Ax in one loop {dtype}", (m, n), (Spec((m, n), dtype), Spec((n,), dtype)), atax, exact, {"numpy": exact, "numba": _numba("atax")}, 1e-4)


def covariances(draw: Draw) -> Problem:
    n, m = draw.size(100, 2000), draw.size(50, 700)
    n, dtype = n + 2, draw.pick("f32", "f64")
    return Problem(f"covariance, triangle and mirror {dtype}", (n, m), (Spec((n, m), dtype),), covariance, exact_covariance, {"numpy": exact_covariance}, 1e-4)


def centres(draw: Draw) -> Problem:
    d = draw.count(2, 16)
    n, k = draw.fitting(4e5, (1000, 50000), (5, 200))
    dtype = draw.pick("f32", "f64")

    def exact(x: Any, y: Any) -> Any:
        return ((x[:, None, :] - y[None, :, :]) ** 2).sum(-1).min(1)

    return Problem(f"nearest centre, {d} coordinates {dtype}", (n, k, d), (Spec((n, d), dtype), Spec((k, d), dtype)), nearest, exact, {"numba": _numba("nearest")}, 1e-4)


FAMILIES = (
    Family("ordered", "heat in 4-60 steps, elimination, shortest paths, forward substitution; 100-3000 a side; f32, f64", ordered, {"cpu": 1.0}),
    Family("short_sums", "pairwise distances, 2-16 coordinates, 100-5000 points each", short_sums, {"cpu": 1.0}),
    Family("pairs", "interleaved complex numbers times factors; f32, f64", pairs, {"cpu": 1.5}),
    Family("borders", "a stencil with a border condition; guarded boxes of 3-9; f32, f64", borders, {"cpu": 1.0}),
    Family("view_results", "out= a view with another row length; f32, f64", view_results, {"cpu": 0.9}),
    Family("serial_bodies", "tw.grid around paths of 20-200 steps", serial_bodies, {"cpu": 1.0}),
    Family("matrix_pairs", "A'Ax in one loop over rows; f32, f64", matrix_pairs, {"cpu": 1.0}),
    Family("covariances", "covariance of 50-700 columns, half of it computed and mirrored; f32, f64", covariances, {"cpu": 1.0}),
    Family("centres", "smallest distance to 5-200 centres, 2-16 coordinates; f32, f64", centres, {"cpu": 1.0}),
    Family("checksums", "Adler-32 of 1e5 to 4e6 bytes, a serial loop of integers", checksums, {"cpu": 1.0}),
)  # fmt: skip
