"""Whole arrays assigned, swapped and updated in loops, ifs and whiles: the same text runs as Python with NumPy, and as a kernel.

A case either gives what NumPy gives, on every device, or is refused with an error of the compiler: never another result.
"""

from __future__ import annotations

import itertools
import linecache
import textwrap
import types
from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw

DEVICES = ("cpu", "emulator:loop", pytest.param("cuda", marks=pytest.mark.requires("cuda")))


def grid(*extents: int) -> object:
    return range(extents[0]) if len(extents) == 1 else itertools.product(*map(range, extents))


NUMPY = types.SimpleNamespace(
    kernel=lambda f: f, Array=np.ndarray, grid=grid, empty_like=np.zeros_like, zeros_like=np.zeros_like, f32=np.float32, f64=np.float64,
    sum=np.sum, max=np.max, exp=np.exp, zeros=np.zeros, empty=np.zeros, full=np.full, transpose=np.transpose,
)  # fmt: skip
HELPERS = """
@tw.kernel
def step(u: tw.Array, k: float) -> tw.Array:
    out = tw.empty_like(u)
    for i in tw.grid(len(u)):
        out[i] = u[i] * k + 1
    return out

@tw.kernel
def neighbours(u: tw.Array) -> tw.Array:
    out = tw.empty_like(u)
    for i in tw.grid(len(u)):
        out[i] = u[i]
        if i > 0:
            out[i] = u[i] + u[i - 1]
    return out
"""
_count = itertools.count()


def build(text: str, words: object) -> Callable[..., object]:
    """The function `k(a, b, n)` of the text."""
    source = HELPERS + "\n@tw.kernel\ndef k(a, b, n):\n" + textwrap.indent(textwrap.dedent(text).strip(), "    ") + "\n"
    name = f"<array loops {next(_count)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names: dict[str, object] = {"tw": words, "THREE": 3, "float": float}
    exec(compile(source, name, "exec"), names)
    result = names["k"]
    assert callable(result)
    return result


A, B = np.float32([1, 2, 3, 4, 5]), np.float32([2, 1, 0, 1, 2])
RIGHT = {
    "constant trips": "u = a * 1\nfor t in range(3):\n    u = u * 2\nreturn u",
    "captured trips": "u = a * 1\nfor t in range(THREE):\n    u = u * 2 + t\nreturn u",
    "steps and starts": "u = a * 1\nfor t in range(9, 0, -4):\n    u = u * 2 + t\nreturn u",
    "no trips": "u = a * 1\nfor t in range(0):\n    u = u * 2\nreturn u",
    "many constant trips": "u = a * 1\nfor t in range(100):\n    u = u + t\nreturn u",
    "symbolic trips": "u = a * 1\nfor t in range(len(a)):\n    u = u * 2 - t\nreturn u",
    "argument trips": "u = a * 1\nfor t in range(n):\n    u = u * 2 - t\nreturn u",
    "stepped argument trips": "u = a * 1\nfor t in range(1, 3 * n, 2):\n    u = u * 2 - t\nreturn u",
    "an input by another name": "u = a\nfor t in range(n):\n    u = u * 2\nreturn u, a * 1",
    "a parameter": "for t in range(n):\n    a = a * 2\nreturn a",
    "of zeros": "u = tw.zeros_like(a)\nfor t in range(n):\n    u = u + a\nreturn u",
    "an array that elements made": "u = tw.empty_like(a)\nfor i in tw.grid(len(a)):\n    u[i] = a[i]\nfor t in range(n):\n    u = u + b\nreturn u",
    "swap": "x = a * 1\ny = b * 1\nfor t in range(3):\n    x, y = y, x\nreturn x, y",
    "swap, argument": "x = a * 1\ny = b * 1\nfor t in range(n):\n    x, y = y, x + y\nreturn x, y",
    "swap of inputs": "for t in range(n):\n    a, b = b, a\nreturn a, b * 1",
    "three-way rotation": "x = a * 1\ny = b * 1\nz = a + b\nfor t in range(n):\n    x, y, z = y, z, x\nreturn x, y, z",
    "rotation by hand": "x = a * 1\ny = b * 1\nfor t in range(n):\n    z = x\n    x = y\n    y = z\nreturn x, y",
    "double buffer": """
        u = a * 1
        v = tw.empty_like(a)
        for t in range(n):
            for i in range(len(a)):
                v[i] = u[i] * 2
                if i > 0:
                    v[i] = u[i] + u[i - 1]
            u, v = v, u
        return u""",
    "double buffer, constant": """
        u = a * 1
        v = tw.empty_like(a)
        for t in range(4):
            for i in tw.grid(len(a)):
                v[i] = u[i] * 2
                if i > 0:
                    v[i] = u[i] + u[i - 1]
            u, v = v, u
        return u""",
    "updates": "u = a * 1\nfor t in range(n):\n    u += b\n    u *= 2\n    u -= a\nreturn u",
    "updates, constant": "u = a * 1\nfor t in range(2):\n    u += b\n    u *= 2\nreturn u",
    "updates at the top": "u = a * 1\nu += b\nu *= u\nu -= 1\nreturn u",
    "updates of zeros at the top": "u = tw.zeros_like(a)\nw = u\nu += b\nreturn u, w * 1",
    "slices": "u = a * 1\nfor t in range(n):\n    u[1:-1] = b[1:-1] * 2 + t\nreturn u",
    "a slice at a time": "u = a * 1\nfor t in range(2):\n    u = u[1:] + u[:-1]\nreturn u",
    "if": "u = a * 1\nif n > 1:\n    u = u * 2\nreturn u",
    "if and else": "u = a * 1\nif n > 2:\n    u = u * 2\nelse:\n    u = u + 1\n    u = u * u\nreturn u",
    "elif": "u = a * 1\nif n > 7:\n    u = u * 2\nelif n > 1:\n    u = u + 1\nelse:\n    u = u * u\nreturn u",
    "if in a loop": "u = a * 1\nfor t in range(n):\n    if t % 2 == 0:\n        u = u + b\n    else:\n        u = u * 2\nreturn u",
    "if in an unrolled loop": "u = a * 1\nfor t in range(4):\n    if t % 2 == 0:\n        u = u + b\n    elif t == 1:\n        u = u * 2\nreturn u",
    "on data": "u = a * 1\nfor t in range(n):\n    if u[0] < 4:\n        u = u * 2\nreturn u",
    "while": "u = a * 1\nt = 0\nwhile t < n:\n    u = u * 2 + b\n    t += 1\nreturn u",
    "while on data": "u = a * 1\nwhile u[1] < 30:\n    u = u * 2\nreturn u",
    "while in a loop": "u = a * 1\nfor t in range(3):\n    while u[0] < t:\n        u = u + 1\nreturn u",
    "nested loops": "u = a * 1\nfor t in range(n):\n    for s in range(t + 1):\n        u = u + s\n    u = u * 2\nreturn u",
    "a loop in an unrolled one": "u = a * 1\nfor t in range(2):\n    for s in range(n):\n        u = u + s\n    u = u * 2\nreturn u",
    "other elements": "u = a * 1\nfor t in range(n):\n    u = u * tw.sum(u) / 64\nreturn u",
    "a product": "m = tw.zeros((5, 5), tw.f32)\nfor i in tw.grid(5):\n    m[i, i] = a[i]\nu = b * 1\nfor t in range(n):\n    u = m @ u\nreturn u",
    "transposed": "m = tw.zeros((5, 5), tw.f32)\nfor i, j in tw.grid(5, 5):\n    m[i, j] = a[i] + 2 * b[j]\nfor t in range(n):\n    m = tw.transpose(m) + 1\nreturn m",
    "made in the loop": "u = a * 1\nfor t in range(n):\n    v = tw.empty_like(u)\n    for i in range(len(a)):\n        v[i] = u[i] + i\n    u = v\nreturn u",
    "zeros in the loop": "u = a * 1\nfor t in range(n):\n    v = tw.zeros((5,), tw.f32)\n    for i in range(5):\n        v[i] += u[i] + t\n    u = u + v\nreturn u",
    "a value of the loop": "u = a * 1\nfor t in range(n):\n    v = u * 2\n    u = u + 1\n    u = u + v\nreturn u",
    "a value that changes": "u = a * 1\nfor t in range(n):\n    v = u * 2\n    for s in range(2):\n        v = v + u\n    u = v\nreturn u",
    "before and after": "u = a * 1\nw = u\nfor t in range(n):\n    w = u\n    u = u * 2\nreturn u, w * 1",
    "kept from before": "u = a * 1\nw = u\nfor t in range(n):\n    u = u * 2\nreturn u, w * 1",
    "a kernel in a loop": "u = a * 1\nfor t in range(n):\n    u = step(u, 3.0)\nreturn u",
    "kernels in an unrolled loop": "u = a * 1\nfor t in range(3):\n    u = neighbours(step(u, 2.0))\nreturn u",
    "kernels in a loop": "u = a * 1\nfor t in range(n):\n    u = neighbours(step(u, 2.0)) + b\nreturn u",
    "several loops": "u = a * 1\nfor t in range(n):\n    u = u * 2\nv = u + b\nfor t in range(n):\n    v = v + u\nreturn v",
    "a sum beside": "u = a * 1\ntotal = 0.0\nfor t in range(n):\n    u = u * 2\n    total += tw.sum(u)\nreturn total",
    "a sum beside, unrolled": "u = a * 1\ntotal = 0.0\nfor t in range(3):\n    u = u * 2\n    total += u[1]\nreturn total",
    "doubling": "u = a * 0.001\nfor t in range(20):\n    u = u * u + u\nreturn u",
    "elements of a value": "u = a + b\nfor i in range(len(a)):\n    u[i] = u[i] * 2 + i\nreturn u",
    "elements through another name": "u = a + b\nw = u\nfor i in range(len(a)):\n    w[i] = u[i] * 2\nreturn u, w * 1",
    "annotated": "u: tw.Array = a * 1\nfor t in range(n):\n    u = u * 2\nreturn u",
}


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_change_as_in_numpy(device: str) -> None:
    wrong = []
    for name, text in RIGHT.items():
        for trips in (0, 3) if "argument" in name or "buffer" in name else (3,):
            with np.errstate(all="ignore"):
                expected = build(text, NUMPY)(A.copy(), B.copy(), trips)
            try:
                got = build(text, tw)(A, B, trips, device=device)
            except tw.TilewrightError as error:
                wrong.append(f"{name}: {error}")
                break
            pairs = zip(got, expected, strict=True) if isinstance(got, tuple) and isinstance(expected, tuple) else [(got, expected)]
            if not all(np.allclose(np.asarray(g), e, rtol=1e-5) and np.shape(g) == np.shape(e) for g, e in pairs):
                wrong.append(f"{name} with {trips}: {got} for {expected}")
    assert not wrong, "\n".join(wrong)
    assert np.array_equal(A, [1, 2, 3, 4, 5])


REFUSED = {
    "another dtype": ("u = a * 1\nfor t in range(n):\n    u = u.astype(tw.f64)\nreturn u", "TW006", "cannot become f64"),
    "another extent": ("u = a * 1\nfor t in range(n):\n    u = u[1:]\nreturn u", "TW004", "has extent 5 and cannot become 4"),
    "another rank": ("u = a * 1\nfor t in range(n):\n    u = tw.zeros((5, 5), tw.f32)\nreturn u", "TW003", "cannot become an array of rank 2"),
    "a number": ("u = a * 1\nfor t in range(n):\n    u = 1.0\nreturn u", "TW003", "cannot become a number"),
    "in a grid": ("u = a * 1\nfor t in tw.grid(3):\n    u = u * 2\nreturn u", "TW012", "carried from one to the next"),
    "in a grid in a loop": ("u = a * 1\nfor t in range(n):\n    for s in tw.grid(3):\n        u = u * 2\nreturn u", "TW012", "carried"),
    "a tuple": ("s = (1, 2)\nfor t in range(n):\n    s = (3, 4)\nreturn a * s[0]", "TW005", "a tuple and cannot be assigned again"),
    "two names": ("u = a * 1\nv = a * 2\nfor t in range(n):\n    v = u\n    for i in range(5):\n        u[i] = u[i] + 1\nreturn v", "TW005", "two names"),
    "two names, later": ("u = a * 1\nv = a * 2\nfor t in range(n):\n    v = u\nfor i in range(5):\n    u[i] = 0.0\nreturn v", "TW005", "two names"),
    "two names, updated": ("u = a * 1\nv = a * 2\nfor t in range(n):\n    v = u\n    u += 1\nreturn v", "TW005", "two names"),
    "two names at the top": ("u = a * 1\nv = u\nu += 1\nreturn v", "TW005", "two names"),
    "two names before": ("u = a * 1\nv = u\nfor t in range(n):\n    u[0] = 7.0\n    u = u * 2\nreturn v * 1", "TW005", "two names"),
    "a local alias": ("u = a * 1\ns = a * 1\nfor t in range(n):\n    w = u\n    u[0] = 7.0\n    s = s + w\nreturn s", "TW005", "two names"),
    "an input updated": ("a += 1\nreturn a", "TW015", "is an input"),
    "an input's elements": ("u = a\nfor t in range(n):\n    u[0] = 1.0\n    u = u * 2\nreturn u", "TW005", "two names"),
    "a number that becomes an array": ("u = 0.0\nfor t in range(n):\n    u = u + a\nreturn u", "TW003", "'u' is a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(name: str) -> None:
    text, code, words = REFUSED[name]
    with pytest.raises(tw.TilewrightError, match=rf"<array loops \d+>:\d+:\d+: error\[{code}\]: .*{words}"):
        build(text, tw)(A, B, 3)


def test_iterations_of_few_trips_run_in_parallel() -> None:
    kernel = build("u = a * 1\nfor t in range(3):\n    u = neighbours(u)\nreturn u", tw)
    assert "parallel" in str(kernel.stages(A, B, 3, target="sm_80").stages.loop.calls[0].kernel)  # type: ignore[attr-defined]
    assert len(kernel.stages(A, B, 3, target="sm_80").stages.loop.calls) >= 3  # type: ignore[attr-defined]
