"""Library calls: sort, filter, transpose, the place of the largest."""

from __future__ import annotations

import numpy as np

import tilewright as tw
from bench.families.draw import Draw, Family, Problem, Spec


def sorting(draw: Draw) -> Problem:
    n = draw.size(1 << 20, 1 << 26, small=300) if draw.on_gpu else draw.size(1 << 18, 1 << 22, small=300)
    dtype = draw.pick("f32", "i32", "f64")
    kind = "bits" if dtype == "i32" else "normal"
    return Problem(f"sort {dtype}", (n,), (Spec((n,), dtype, kind),), lambda x: tw.sort(x), lambda x: x.sort().values, {"torch": lambda x: x.sort().values} | ({} if draw.on_gpu else {"numpy": np.sort}), 0.0)


def filtering(draw: Draw) -> Problem:
    n = draw.size(1 << 22, 1 << 27, small=300) if draw.on_gpu else draw.size(1 << 18, 1 << 23, small=300)
    return Problem("filter, positive ones", (n,), (Spec((n,)),), lambda x: tw.filter(x, lambda v: v > 0), lambda x: x[x > 0], {"torch": lambda x: x[x > 0]} | ({} if draw.on_gpu else {"numpy": lambda x: x[x > 0]}), 0.0)


def transposing(draw: Draw) -> Problem:
    rows, columns = draw.fitting((1e8 if draw.on_gpu else 4e6), (30, 20000), (30, 20000))
    dtype = draw.pick("f32", "f64", "f16")
    return Problem(f"transpose {dtype}", (rows, columns), (Spec((rows, columns), dtype),), turned_over, lambda x: x.T.contiguous(), {"torch": lambda x: x.T.contiguous()} | ({} if draw.on_gpu else {"numpy": lambda x: np.ascontiguousarray(x.T)}), 0.0)


@tw.kernel
def turned_over(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((columns, rows), x.dtype)
    for i, j in tw.grid(columns, rows):
        out[i, j] = x[j, i]
    return out


@tw.kernel
def place_of_largest(x: tw.Array) -> int:
    return tw.argmax(x)


def largest_place(draw: Draw) -> Problem:
    n = draw.size(1 << 22, 1 << 27, small=300) if draw.on_gpu else draw.size(1 << 18, 1 << 23, small=300)
    return Problem("argmax f32", (n,), (Spec((n,)),), place_of_largest, lambda x: x.argmax().double(), {"torch": lambda x: x.argmax()} | ({} if draw.on_gpu else {"numpy": np.argmax}), 0.0)


FAMILIES = (
    Family("sort", "2^20 to 2^26 (CPUs 2^18 to 2^22); f32, i32, f64", sorting, {"gpu": 1.0, "cpu": 1.0}),
    Family("filter", "2^22 to 2^27 (CPUs 2^18 to 2^23), f32, half of them kept", filtering, {"gpu": 2.5, "cpu": 1.0}),
    Family("transpose", "30-20000 each way; f16, f32, f64", transposing, {"gpu": 1.0, "cpu": 1.0}),
    Family("argmax", "2^22 to 2^27 (CPUs 2^18 to 2^23)", largest_place, {"gpu": 1.0, "cpu": 3.0}),
)  # fmt: skip
