"""Kernels with structs, each with its answer in NumPy: `CASES`. `tests/run` has them on the CPU and the emulator, `tests/gpu` on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import tilewright as tw

SIZES = (0, 1, 31, 33, 1027)
PARTICLE = np.dtype([("x", "f4"), ("y", "f4"), ("id", "i4")])
LAYOUTS = {
    "plain": PARTICLE,
    "of doubles": np.dtype([("x", "f8"), ("y", "f8"), ("id", "i8")]),
    "mixed and aligned": np.dtype([("x", "f8"), ("y", "f4"), ("id", "i2")], align=True),
    "padded": np.dtype(
        {"names": ["x", "y", "id"], "formats": ["f4", "f4", "i4"], "offsets": [8, 16, 4], "itemsize": 32}
    ),
    "packed": np.dtype([("id", "i1"), ("x", "f4"), ("y", "f8")]),
}


class Particle(tw.State):
    """The same, as a class."""

    x: tw.f32
    y: tw.f32
    id: tw.i32


@tw.kernel
def sums(p: tw.Array) -> tw.Array:
    (n,) = p.shape
    out = tw.empty(n, tw.f64)
    for i in tw.grid(n):
        out[i] = tw.cast(p[i].x, tw.f64) + 2 * p["y"][i] - tw.cast(p[i]["id"], tw.f64)
    return out


@tw.kernel
def turned(p: tw.Array) -> tw.Array:
    n = len(p)
    out = tw.empty(n, p.dtype)
    for i in tw.grid(n):
        out[i] = p[n - 1 - i]
        out[i].x = p[i].y
        out[i]["id"] += 1
    return out


@tw.kernel
def larger(p: tw.Array) -> tw.Array:
    (n,) = p.shape
    out = tw.zeros_like(p)
    for i in tw.grid(n):
        v = p[i]
        w = p[(i + 1) % n]
        best = v if v.x > w.x else w
        if v == w:
            best.id = -1
        out[i] = best
    return out


@tw.kernel
def whole(p: tw.Array) -> tw.Array:
    out = tw.empty_like(p)
    out["x"] = p["x"] * 2 + p["y"].astype(p["x"].dtype)
    out["y"] = p["y"][::-1]
    out["id"] = 6
    out["id"] += 1
    return out


@tw.kernel
def exchanged(p: tw.Array) -> tw.Array:
    (n,) = p.shape
    out = tw.empty(n, p.dtype)
    for i in tw.grid(n):
        v = p[i]
        v.x, v.y = v.y, v.x
        out[i] = v
    return out


@tw.kernel
def totals(p: tw.Array) -> tuple[tw.Array, tw.Array]:
    (n,) = p.shape
    mean = p["x"].sum() / (n + 1)
    out = tw.empty(n, p.dtype)
    for i in tw.grid(n):
        out[i] = (p[i].x - mean, 0, i)
    return out, p["id"].sum()


def _wide(p: np.ndarray) -> dict[str, np.ndarray]:
    return {name: p[name].astype(np.float64) for name in ("x", "y", "id")}


def _larger(p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    q = {name: np.roll(v, -1) for name, v in p.items()}
    take = p["x"] > q["x"]
    out = {name: np.where(take, p[name], q[name]) for name in p}
    same = np.logical_and.reduce([p[name] == q[name] for name in p])
    out["id"] = np.where(same, -1, out["id"])
    return out


@dataclass(frozen=True)
class StructCase:
    """A kernel of an array of particles, and what it computes, from float64."""

    name: str
    kernel: tw.Kernel
    reference: Callable[[dict[str, np.ndarray]], object]

    def check(self, device: str, layout: str, size: int) -> None:
        p = draw(size, LAYOUTS[layout])
        before = p.copy()
        got, want = self.kernel(p, device=device), self.reference(_wide(p))
        assert (p == before).all()
        several = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        for found, wanted in several:
            if isinstance(wanted, dict):
                assert found.dtype == p.dtype and found.shape == (size,), (self.name, found.dtype)
                for field, values in wanted.items():
                    np.testing.assert_allclose(
                        found[field],
                        values,
                        rtol=3e-6,
                        atol=1e-5,
                        err_msg=f"{self.name} of {size} on {device}: {field}",
                    )
            else:
                np.testing.assert_allclose(
                    found, wanted, rtol=3e-6, atol=1e-5, err_msg=f"{self.name} of {size} on {device}"
                )


def draw(size: int, dtype: np.dtype) -> np.ndarray:
    rng = np.random.default_rng(size)
    p = np.zeros(size, dtype)
    p["x"], p["y"] = rng.standard_normal(size), rng.standard_normal(size)
    p["id"] = rng.integers(0, 50, size)
    if size > 4:
        p[3] = p[4]
    return p


CASES = [
    StructCase("sums", sums, lambda p: p["x"] + 2 * p["y"] - p["id"]),
    StructCase("turned", turned, lambda p: {"x": p["y"], "y": p["y"][::-1], "id": p["id"][::-1] + 1}),
    StructCase("larger", larger, _larger),
    StructCase("whole", whole, lambda p: {"x": 2 * p["x"] + p["y"], "y": p["y"][::-1], "id": np.full(len(p["x"]), 7)}),
    StructCase("exchanged", exchanged, lambda p: {"x": p["y"], "y": p["x"], "id": p["id"]}),
]
