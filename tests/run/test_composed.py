"""Kernels made of kernels, in Python and as functions and pipelines of ZynML: results against NumPy in f64, and how many launches are left."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.compile.driver import compile_stages
from tilewright.execute.devices import find_device
from tilewright.frontend.zyn.parse import parse_module
from tilewright.passes.common.fusion_report import FusionReport
from tilewright.zyn.module import ZynModule

DEVICES = ["cpu", "emulator:thread"]


def numbers(*shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(7)
    return tuple(generator.standard_normal(shape).astype(np.float32) for shape in shapes)


@tw.kernel
def swish(x: float) -> float:
    return x * tw.sigmoid(x)


@tw.kernel
def project(x: tw.Array, w: tw.Array, bias: tw.Array) -> tw.Array:
    rows, depth = x.shape
    columns = w.shape[1]
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        total = 0.0
        for k in range(depth):
            total += x[i, k] * w[k, j]
        out[i, j] = total + bias[j]
    return out


@tw.kernel
def activate(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty_like(x)
    for i, j in tw.grid(rows, columns):
        out[i, j] = swish(x[i, j])
    return out


@tw.kernel(reduce="+", axis=1)
def row_sums(x):
    rows, columns = x.shape
    for i, j in tw.grid(rows, columns):
        yield x[i, j]


@tw.kernel
def normalise(x: tw.Array, eps: float = 1e-5) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty_like(x)
    mean = row_sums(x)
    for i in tw.grid(rows):
        spread = 0.0
        for j in range(columns):
            spread += (x[i, j] - mean[i] / columns) * (x[i, j] - mean[i] / columns)
        for j in range(columns):
            out[i, j] = (x[i, j] - mean[i] / columns) * tw.rsqrt(spread / columns + eps)
    return out


@tw.kernel
def layer(x: tw.Array, w: tw.Array, bias: tw.Array) -> tw.Array:
    return activate(project(x, w, bias))


@tw.kernel
def block(x: tw.Array, up: tw.Array, up_bias: tw.Array, down: tw.Array, down_bias: tw.Array) -> tw.Array:
    h = layer(x, up, up_bias)
    return normalise(x + project(h, down, down_bias), eps=1e-6)


@tw.kernel
def both_ends(x: tw.Array) -> tuple[float, float]:
    low, high = tw.min(x), tw.max(x)
    return low, high


@tw.kernel
def spread(x: tw.Array) -> tw.Array:
    low, high = both_ends(x)
    return (x - low) / (high - low)


ZYN = """
fn swish(x):
    return x * sigmoid(x)

fn project(x, w, bias):
    let h = compute(x, w, bias) {
        @kernel matmul
        for i in 0..M, j in 0..N:
            var sum = 0.0
            for k in 0..K:
                sum += x[i, k] * w[k, j]
            out[i, j] = sum + bias[j]
    }
    return h

fn layer(x, w, bias):
    return compute(h) {
        for i in 0..rows, j in 0..cols:
            out[i, j] = swish(h[i, j])
    }

pipeline normalise(x: tensor[rows, cols], eps: f32 = 1e-5) -> tensor[rows, cols]:
    let mean = compute(x) {
        @kernel reduce(+, axis=1)
        for i in 0..rows, j in 0..cols:
            yield x[i, j]
    } / cols
    return compute(x, mean) {
        @kernel fused
        for i in 0..rows:
            var spread = 0.0
            for j in 0..cols:
                spread += (x[i, j] - mean[i]) * (x[i, j] - mean[i])
            for j in 0..cols:
                out[i, j] = (x[i, j] - mean[i]) * rsqrt(spread / cols + eps)
    }

pipeline block(x, up, up_bias, down, down_bias):
    let h = swish(project(x, up, up_bias))
    return normalise(x + project(h, down, down_bias), 1e-6)
"""
ZYN = ZYN.replace("return compute(h) {", "let h = project(x, w, bias)\n    return compute(h) {")


def reference(x: np.ndarray, up: np.ndarray, up_bias: np.ndarray, down: np.ndarray, down_bias: np.ndarray) -> np.ndarray:
    x, up, up_bias, down, down_bias = (a.astype(np.float64) for a in (x, up, up_bias, down, down_bias))
    h = x @ up + up_bias
    y = x + (h / (1 + np.exp(-h))) @ down + down_bias
    centred = y - y.mean(1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-6)


def zyn_report(text: str, **inputs: np.ndarray) -> list[FusionReport]:
    """The report of each kernel of a program, for Hopper."""
    from tilewright.base.target import parse_target
    from tilewright.execute.calls.run import Runner

    found: list[FusionReport] = []

    def run(function: object, arguments: dict[str, object], device: str) -> object:
        runner = Runner(function)  # type: ignore[arg-type]
        target = parse_target("sm_90a")
        signature = runner.signature(runner.arguments(arguments, True), True)
        found.append(compile_stages(runner.function, signature, target).fusion)
        return runner.run(arguments, find_device("cpu"))

    ZynModule(parse_module(text), run).run(**inputs)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_of_kernels(device: str) -> None:
    arrays = numbers((9, 20), (20, 33), (33,), (33, 20), (20,))
    expected = reference(*arrays)
    np.testing.assert_allclose(block(*arrays, device=device), expected, rtol=2e-4, atol=2e-5)
    names = dict(zip(("x", "up", "up_bias", "down", "down_bias"), arrays, strict=True))
    found = tw.load(ZYN + "let y = block(x, up, up_bias, down, down_bias)\n").run(device=device, **names)["y"]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_results_of_several_values(device: str) -> None:
    (x,) = numbers((50,))
    expected = (x - x.min()) / (x.max() - x.min())
    np.testing.assert_allclose(spread(x, device=device), expected, rtol=1e-6, atol=1e-7)
    text = """
fn both_ends(x):
    return (reduce(min, x), reduce(max, x))
let (low, high) = both_ends(x)
let y = (x - low) / (high - low)
"""
    np.testing.assert_allclose(tw.load(text).run(device=device, x=x)["y"], expected, rtol=1e-6, atol=1e-7)


def test_a_layer_of_two_kernels_is_one_launch() -> None:
    x, w, bias = numbers((64, 64), (64, 64), (64,))
    report = layer.stages(x, w, bias, target="sm_90a").fusion
    assert (report.before, report.after) == (2, 1)
    assert [(f.how, str(f.saved)) for f in report.fused] == [("merged", "8*columns*rows")]
    (composed,) = zyn_report(ZYN + "let y = layer(x, w, bias)\n", x=x, w=w, bias=bias)
    assert (composed.before, composed.after) == (2, 1)
    assert [f.how for f in composed.fused] == ["merged"]


def test_places_of_what_was_fused_are_those_of_the_called_kernels() -> None:
    x, w, bias = numbers((64, 64), (64, 64), (64,))
    (made,) = layer.stages(x, w, bias, target="sm_90a").fusion.fused
    lines = open(__file__, encoding="utf-8").read().split("\n")  # noqa: SIM115
    assert lines[made.producer.line - 1].strip() == "out[i, j] = total + bias[j]"
    assert lines[made.consumer.line - 1].strip() == "out[i, j] = swish(x[i, j])"
    (call,) = made.producer.calls()
    assert lines[call.line - 1].strip() == "return activate(project(x, w, bias))"


@pytest.mark.parametrize("device", DEVICES)
def test_a_function_that_runs_block_by_block(device: str) -> None:
    (x,) = numbers((12,))
    text = """
fn twice(x):
    let h = compute(x) {
        @device("cpu")
        for i in 0..len:
            out[i] = x[i] * 2
    }
    return h + 1
let y = twice(x) * scale
"""
    np.testing.assert_allclose(tw.load(text).run(device=device, x=x, scale=3.0)["y"], (x * 2 + 1) * 3, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_functions_see_values_of_the_program(device: str) -> None:
    (x,) = numbers((12,))
    text = """
let scale = 3.0
fn scaled(x):
    return compute(x) {
        for i in 0..n:
            out[i] = x[i] * scale + shift[i]
    }
let by = 5.0
let y = scaled(x + by) |> scaled()
"""
    module = tw.load(text)
    assert module.inputs() == ("x", "shift")
    shift = np.arange(12, dtype=np.float32)
    found = module.run(device=device, x=x, shift=shift)["y"]
    np.testing.assert_allclose(found, ((x + 5) * 3 + shift) * 3 + shift, rtol=1e-6)


def test_scalars_stay_on_the_host() -> None:
    assert tw.load("fn half(x):\n    return x / 2.0\nlet y = half(3.0) + 1\n").run()["y"] == 2.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fn f(x):\n    return g(x)\nfn g(x):\n    return f(x) + 1\nlet y = f(x)\n", "error[TW005]: 'f' calls 'g' calls 'f': a function cannot call itself"),
        ("fn f(x):\n    return x\nlet y = f(x, x)\n", "error[TW016]: f(x) takes 1 argument(s), got 2"),
        ("fn f(x):\n    let y = x * 2\nlet y = f(x)\n", "error[TW017]: 'f' returns nothing"),
        ("fn f(x):\n    return x + missing\nlet y = f(x)\n", "error[TW008]: missing input 'missing'"),
        ("fn f(x):\n    return x[3]\nlet y = f(x)\n", "error[TW013]: index 3 of 'x' reaches 3, but axis 0 has extent 3"),
    ],
)
def test_wrong_functions(text: str, expected: str) -> None:
    with pytest.raises(tw.UserError) as caught:
        tw.load(text).run(x=np.ones(3, np.float32), device="cpu")
    assert expected in str(caught.value)


def test_sizes_that_do_not_fit_are_told_with_both_places() -> None:
    text = """
fn add(x, y):
    return compute(x, y) {
        for i in 0..n, j in 0..3: out[i] = x[i, j] + y[i, j]
    }
let z = add(a, b)
"""
    with pytest.raises(tw.UserError) as caught:
        tw.load(text).run(a=np.ones((4, 2), np.float32), b=np.ones((4, 3), np.float32), device="cpu")
    message = str(caught.value)
    assert "TW013" in message
    assert "<string>:4:" in message
    assert "called at <string>:6:9" in message
