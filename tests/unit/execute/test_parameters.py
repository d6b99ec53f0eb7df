"""Defaults, keywords, keyword-only and optional parameters of kernels: what calls mean, which way they take, what is refused where."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed
from tilewright.base.errors import UserError
from tilewright.device_kinds.cpu.kind import CpuCalls

pytestmark = pytest.mark.requires("cpu")
X = np.array([-2.0, 3.0], np.float32)
ONE = np.ones(2, np.float32)


def make_leaky() -> Any:
    @tw.kernel
    def leaky(x: tw.Array, slope: float = 0.5, times: int = 1) -> tw.Array:
        out = tw.empty_like(x)
        for i in tw.grid(len(x)):
            out[i] = (x[i] if x[i] > 0 else slope * x[i]) * times
        return out

    return leaky


def make_linear() -> Any:
    @tw.kernel
    def linear(x: tw.Array, bias: tw.Array | None = None, *, scale: float | None = None, more: tw.Array | None = None) -> tw.Array:
        out = tw.empty_like(x)
        for i in tw.grid(len(x)):
            v = x[i] if scale is None else x[i] * scale
            if bias is not None and bias[i] > 0:
                v += bias[i]
            if more is not None:
                v += more[i]
            out[i] = v
        return out

    return linear


@contextmanager
def ways() -> Iterator[list[str]]:
    """The calls that took the general path inside."""
    seen: list[str] = []
    original = CpuCalls.run

    def run(self: CpuCalls, *args: object) -> object:
        seen.append(self.function.name)
        return original(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(CpuCalls, "run", run):
        yield seen


def test_defaults_and_keywords_take_the_straight_way() -> None:
    leaky, given = make_leaky(), np.empty(2, np.float32)
    with ways() as general:
        assert leaky(X).tolist() == [-1, 3]
        assert leaky(X, 0.25).tolist() == [-0.5, 3]
        assert leaky(X, slope=0.25).tolist() == [-0.5, 3]
        assert leaky(times=2, x=X).tolist() == [-2, 6]
        assert leaky(X, 1.0, 3).tolist() == [-6, 9]
        assert leaky(X, times=2, out=given) is given
        assert given.tolist() == [-2, 6]
        assert leaky(**{"".join(["x"]): X}).tolist() == [-1, 3]
    assert general == ["leaky"]


def test_other_arguments_still_find_their_code() -> None:
    leaky = make_leaky()
    for _ in range(2):
        assert leaky(X).dtype == np.float32
        assert leaky(X.astype(np.float64), times=2).tolist() == [-2, 6]
        assert leaky(X[::-1], slope=1.0).tolist() == [3, -2]
        assert leaky(X, device="emulator:thread", slope=0.0).tolist() == [0, 3]
        assert leaky(X, asynchronous=True).result().tolist() == [-1, 3]


@pytest.mark.parametrize("device", ["cpu", "emulator:loop", "emulator:tile", "emulator:thread"])
def test_optional_arrays_are_decided_when_compiled(device: str) -> None:
    linear = make_linear()
    for bias, scale, more in itertools.product((None, ONE), (None, 2.0), (None, X)):
        wanted = X * (scale or 1) + (0 if bias is None else bias) + (0 if more is None else more)
        assert linear(X, bias, scale=scale, more=more, device=device).tolist() == wanted.tolist()
    assert linear(X, device=device).tolist() == X.tolist()


def test_calls_without_an_array_take_the_straight_way() -> None:
    linear = make_linear()
    with ways() as general:
        for _ in range(3):
            assert linear(X).tolist() == X.tolist()
            assert linear(X, None, scale=None).tolist() == X.tolist()
        for _ in range(3):
            assert linear(X, scale=2.0, bias=ONE).tolist() == (2 * X + 1).tolist()
    assert general == ["linear"] * 2


@tw.kernel
def inner(x: tw.Array, bias: tw.Array | None = None, *, scale: float = 2.0) -> tw.Array:
    out = tw.empty_like(x)
    for i in tw.grid(len(x)):
        out[i] = x[i] * scale if bias is None else x[i] * scale + bias[i]
    return out


@tw.kernel
def outer(x: tw.Array, b: tw.Array | None = None) -> tw.Array:
    return inner(inner(x, b), scale=1.0) + inner(x, None, scale=0.0)


@tw.kernel
def required(x: tw.Array, y: tw.Array) -> tw.Array:
    return x + y


@tw.kernel
def gives_none(x: tw.Array, b: tw.Array | None = None) -> tw.Array:
    return required(x, b)


@tw.kernel
def by_position(x: tw.Array) -> tw.Array:
    return inner(x, x, 3.0)


def test_kernels_hand_optional_arrays_on() -> None:
    assert outer(X).tolist() == (2 * X).tolist()
    assert outer(X, ONE).tolist() == (2 * X + 1).tolist()
    assert gives_none(X, ONE).tolist() == (X + 1).tolist()
    with pytest.raises(UserError, match="required's 'y' cannot be None"):
        gives_none(X)
    with pytest.raises(UserError, match=r"inner\(x, bias, scale\) takes 2 argument\(s\) by position, got 3"):
        by_position(X)


def test_arguments_that_do_not_fit() -> None:
    linear, leaky = make_linear(), make_leaky()
    leaky(X)
    linear(X)
    for call, message in (
        (lambda: linear(X, None, 2.0), r"linear takes 2 argument\(s\) by position \(x, bias\), got 3"),
        (lambda: linear(None), "'x' must be an array, got None"),
        (lambda: linear(X, 3.0), "'bias' must be an array, got a number"),
        (lambda: leaky(X, None), r"'slope' must be a number \(float\), got None"),
        (lambda: leaky(), "leaky is missing 'x'"),
        (lambda: leaky(X, 0.5, slope=2.0), "leaky got 'slope' twice"),
        (lambda: leaky(X, steps=1), "leaky has no argument 'steps'"),
        (lambda: leaky(X, times=2.5), r"'times' must be a whole number \(int\)"),
    ):
        with pytest.raises(UserError, match=message):
            call()
    assert leaky(X).tolist() == [-1, 3]


def decorated(folder: Path, head: str) -> Any:
    path = folder / "kernels.py"
    path.write_text(f"import numpy as np\nimport tilewright as tw\nfrom typing import Optional\n@tw.kernel\n{head}\n    return x\n")
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


@pytest.mark.parametrize(
    ("head", "column", "message"),
    [
        ('def f(x: float = "a") -> float:', 18, "the default of 'x' is 'a', but 'x' must be a number (float)"),
        ("def f(x: tw.Array, t: bool = 2.5):", 30, "the default of 't' is 2.5, but 't' must be True or False (bool)"),
        ("def f(x: tw.Array, t: bool = 1):", 30, "the default of 't' is 1, but 't' must be True or False (bool)"),
        ("def f(x: tw.Array, n: int = 1.5):", 29, "the default of 'n' is 1.5, but 'n' must be a whole number (int)"),
        ("def f(x: tw.Array, n: tw.i8 = 300):", 31, "the default of 'n' is 300, but 'n' must be a number (i8)"),
        ("def f(x: tw.Array = None):", 21, "the default of 'x' is None, but 'x' must be an array"),
        ("def f(x, n='abc'):", 12, "the default of 'n' is 'abc', but 'n' must be an array or a number"),
        ("def f(x, n: float = 'a'.upper()):", 21, "the default of 'n' is 'A', but 'n' must be a number (float)"),
        ("def f(x: tw.Array) -> str:", 23, "'f' is annotated to return str, which no kernel returns"),
        ("def f(x: tw.Array) -> 'list[float]':", 23, "'f' is annotated to return list, which no kernel returns"),
    ],
)
def test_a_wrong_declaration_is_refused_when_decorated(tmp_path: Path, head: str, column: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        decorated(tmp_path, head)
    assert str(caught.value).splitlines()[0].endswith(f"kernels.py:5:{column}: error[TW009]: {message}")


@pytest.mark.parametrize(
    "head",
    [
        "def f(x: Optional[tw.Array], n: int = 3, s: float = 1, b: bool = False, k: tw.i8 = 7, z=None, *, r: 'float' = -1.5) -> tw.Array:",
        "def f(x: tw.Array, q=np.float32(2), n: int = np.int64(3), w: tw.Array = np.ones(3)) -> tuple[tw.Array, float]:",
        "def f(x: 'f32[n] | None' = None, *, m: int | None = None):",
    ],
)
def test_good_declarations(tmp_path: Path, head: str) -> None:
    decorated(tmp_path, head)


@tw.kernel
def rectified(x: tw.Array) -> tw.Array:
    out = tw.empty(x.shape, x.dtype)
    for i, j, k in tw.grid(*x.shape):
        out[i, j, k] = max(x[i, j, k], 0)
    return out


@tw.kernel
def repeated(x: tw.Array, n: int) -> tw.Array:
    a, _, _ = x.shape
    _, b, _ = x.shape
    out = tw.zeros((a, b, n), x.dtype)
    for i, j, k in tw.grid(*x.shape[:2], n):
        for _ in range(2):
            for _ in range(3):
                out[i, j, k] += x[i, j, 0]
    return out


def test_grid_over_a_shape_and_names_nobody_reads() -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 4)).astype(np.float32)
    assert rectified(x).tolist() == np.maximum(x, 0).tolist()
    np.testing.assert_allclose(repeated(x, 2), np.repeat(6 * x[:, :, :1], 2, 2), rtol=1e-6)
    with pytest.raises(UserError, match="'x' has rank 2, but 3 names are given"):
        rectified(x[0])


@tw.kernel
def ragged(x: tw.Array, lengths: tw.Array, position: tw.Array) -> tw.Array:
    rows, _ = x.shape
    out = tw.empty((rows,), x.dtype)
    at = position[0]
    for b in tw.grid(rows):
        total = 0.0
        for t in range(lengths[b]):
            total += x[b, t]
        out[b] = total + x[b, at]
    return out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_numbers_in_memory_change_between_replays(device: str) -> None:
    """Lengths and positions are read where they lie: nothing comes back to the host, and a graph sees new ones."""
    with installed(mode="lazy") if device == "cuda" else contextlib.nullcontext():
        x, lengths, position = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([0, 2, 4], np.int32), np.array([1])
        place = [tw.to_device(a, device) for a in (x, lengths, position)] if device == "cuda" else [x, lengths, position]
        graph = tw.graph(ragged, *place, device=device)
        for new, at in (([0, 2, 4], 1), ([4, 0, 1], 3), ([3, 3, 3], 0)):
            for target, source in zip(place[1:], (np.array(new, np.int32), np.array([at])), strict=True):
                if device == "cuda":
                    tw.copy(target, source)
                else:
                    target[...] = source
            found = graph.replay()
            wanted = [x[b, : new[b]].sum() + x[b, at] for b in range(3)]
            assert np.asarray(found.numpy() if device == "cuda" else found).tolist() == wanted
        graph.close()


def test_a_number_that_shapes_what_a_graph_computes_is_not_exchanged() -> None:
    @tw.kernel
    def first(x: tw.Array, n: int, scale: float = 1.0) -> tw.Array:
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] * scale
        return out

    graph = tw.graph(first, X, 2, 3.0)
    assert graph.replay().tolist() == [-6, 9]
    graph.update(n=1)
    assert graph.replay().tolist() == [-6]
    with tw.capture("cpu", n=2, scale=1.0) as captured:
        result = first(X, captured["n"], scale=captured["scale"])
    captured.update(scale=2.0, n=2)
    captured.replay()
    assert result.tolist() == [-4, 6]
    with pytest.raises(UserError, match="'n' decides the shape of what the graph computes, and would be 1 instead of 2"):
        captured.update(n=1)
