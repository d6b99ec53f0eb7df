"""Blocks of a pipeline as one program: what it computes, whatever views are between its blocks, and when it has to run earlier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import bf16
from tilewright.base.target import parse_target
from tilewright.compile.driver import compile_stages
from tilewright.execute.calls.run import Runner
from tilewright.execute.devices import find_device
from tilewright.ir.emulator import run_program
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.syntax import Function
from tilewright.zyn import module
from tilewright.zyn.host.block_runner import BlockRunner

BLOCK = Path(__file__).parents[2] / "examples" / "zyn" / "transformer_block.zyn"


class Noting(BlockRunner):
    """Runs blocks as `tw.load` does and keeps what ran; for `target`, in the emulator of its threads."""

    takes_futures = joins_blocks = True

    def __init__(self, target: str = "") -> None:
        self.ran: list[Function] = []
        self.target = target

    def __call__(self, function: Function, arguments: dict[str, object], device: str) -> object:
        self.ran.append(function)
        runner = Runner(function)
        if not self.target:
            return runner.run(arguments, find_device("cpu"))
        read = runner.arguments(arguments, True)
        done = compile_stages(function, runner.signature(read, True), parse_target(self.target))
        results = run_program(done.stages.thread, {a.name: a.value for a in read})  # type: ignore[misc]
        found = tuple(results[o.name] for o in done.stages.thread.outputs)
        return found if len(found) > 1 else found[0]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(hidden: int, inner: int, dtype: np.dtype) -> dict[str, np.ndarray]:
    shapes = {
        "qkv_proj": (hidden, 3 * hidden), "out_proj": (hidden, hidden), "ln1_weight": (hidden,), "ln1_bias": (hidden,),
        "ffn_up": (hidden, inner), "ffn_down": (inner, hidden), "ln2_weight": (hidden,), "ln2_bias": (hidden,),
    }  # fmt: skip
    made = {
        n: numbers(*s, seed=seed) / np.float32(s[0] ** 0.5 if len(s) > 1 else 1)
        for seed, (n, s) in enumerate(shapes.items(), 1)
    }
    return {name: array.astype(dtype) for name, array in made.items()}


def reference(x: np.ndarray, given: Mapping[str, np.ndarray], heads: int) -> np.ndarray:
    w = {name: array.astype(np.float64) for name, array in given.items()}
    x = x.astype(np.float64)
    q, k, v = (p.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for p in np.split(x @ w["qkv_proj"], 3, -1))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (shares / shares.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(x.shape)

    def norm(rows: np.ndarray, name: str) -> np.ndarray:
        return (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-6) * w[
            f"{name}_weight"
        ] + w[f"{name}_bias"]

    seen = norm(x + mixed @ w["out_proj"], "ln1")
    u = seen @ w["ffn_up"]
    return norm(seen + u * 0.5 * (1 + np.tanh(0.7978845608028654 * (u + 0.044715 * u**3))) @ w["ffn_down"], "ln2")


@pytest.mark.parametrize(("dtype", "bound"), [(np.dtype(np.float32), 2e-5), (bf16.numpy, 0.06)])
@pytest.mark.parametrize(("batch", "seq", "heads", "width"), [(2, 33, 2, 64), (1, 77, 3, 16)])
@pytest.mark.parametrize("target", ["", "sm_80", "sm_90a"])
def test_the_transformer_block_is_one_program(
    target: str, batch: int, seq: int, heads: int, width: int, dtype: np.dtype, bound: float
) -> None:
    hidden = heads * width
    given = weights(hidden, 96, dtype)
    x = numbers(batch, seq, hidden).astype(dtype)
    noting = Noting(target)
    found = module.load(BLOCK, noting).transformer_block(
        x, 0, model={"layers": [given]}, num_heads=heads, head_dim=width
    )
    assert [type(function) for function in noting.ran] == [BlockGraph]
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(np.float64), reference(x, given, heads), rtol=0, atol=bound)


def test_a_program_serves_other_batches_and_lengths() -> None:
    given, loaded = weights(32, 48, np.dtype(np.float32)), tw.load(BLOCK)
    for batch, seq in ((2, 16), (1, 16), (3, 7)):
        x = numbers(batch, seq, 32)
        found = loaded.transformer_block(x, 0, model={"layers": [given]}, num_heads=4, head_dim=8, device="cpu")
        np.testing.assert_allclose(found, reference(x, given, 4), rtol=0, atol=2e-5)


def run(text: str, name: str, *args: object) -> tuple[object, list[str]]:
    """What a pipeline gives, and the functions that ran."""
    noting = Noting()
    found = getattr(module.load(text, noting), name)(*args)
    return found, [
        " + ".join(p.function.name for p in f.parts) if isinstance(f, BlockGraph) else f.name for f in noting.ran
    ]


TWO = """
pipeline turned(x: tensor[n, m]) -> tensor[m, n]:
    let a = compute(x) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * 2.0 }
    let b = transpose(a, [1, 0])
    let c = compute(b) { for i in 0..m, j in 0..n: out[i, j] = b[i, j] + 1.0 }
    return c
"""


def test_views_between_blocks_are_indices() -> None:
    x = numbers(5, 7)
    found, ran = run(TWO, "turned", x)
    np.testing.assert_array_equal(found, (x * 2 + 1).T)
    assert ran == ["a + c"]


def test_results_may_be_views() -> None:
    text = """
pipeline parts(x: tensor[n, m]):
    let a = compute(x) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * 2.0 }
    let b = compute(a) { for i in 0..n, j in 0..m: out[i, j] = a[i, j] - 1.0 }
    let (left, right) = split(b, 2, axis=1)
    return { left: left, turned: right.T, all: [reshape(b, [-1]), a] }
"""
    x = numbers(3, 8)
    found, ran = run(text, "parts", x)
    b = x * 2 - 1
    np.testing.assert_array_equal(found["left"], b[:, :4])
    np.testing.assert_array_equal(found["turned"], b[:, 4:].T)
    np.testing.assert_array_equal(found["all"][0], b.reshape(-1))
    np.testing.assert_array_equal(found["all"][1], x * 2)
    assert ran == ["a + b"]


def test_axes_that_are_joined_after_being_turned_lie_so_from_the_beginning() -> None:
    text = """
pipeline heads(x: tensor[n, h, d], w: tensor[c, k]) -> tensor[n, k]:
    let y = compute(x) { for i in 0..h, j in 0..n, e in 0..d: out[i, j, e] = x[j, i, e] * 2.0 }
    let flat = reshape(transpose(y, [1, 0, 2]), [n, h * d])
    let z = compute(flat, w) {
        for i in 0..n, j in 0..k:
            var sum = 0.0
            for c in 0..h*d:
                sum += flat[i, c] * w[c, j]
            out[i, j] = sum
    }
    return z
"""
    x, w = numbers(6, 2, 8), numbers(16, 5, seed=1)
    found, ran = run(text, "heads", x, w)
    np.testing.assert_allclose(found, x.reshape(6, 16).astype(np.float64) * 2 @ w, rtol=1e-5, atol=1e-5)
    assert ran == ["y + z"]


def test_a_reshape_that_is_no_view_makes_what_it_needs() -> None:
    text = """
pipeline mixed(x: tensor[n, m]) -> tensor[m, n]:
    let a = compute(x) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * 2.0 }
    let b = compute(a) { for i in 0..n, j in 0..m: out[i, j] = a[i, j] + 1.0 }
    let flat = reshape(transpose(a, [1, 0]), [n * m])
    let c = compute(flat, b) { for i in 0..m, j in 0..n: out[i, j] = b[j, i] - 1.0 }
    return reshape(flat, [m, n]) - c
"""
    x = numbers(4, 6)
    found, ran = run(text, "mixed", x)
    np.testing.assert_allclose(found, np.zeros((6, 4)), rtol=0, atol=1e-6)
    assert ran[0] == "a + b" and len(ran) == 2


def test_numbers_that_decide_are_computed_when_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = """
pipeline stepwise(x: tensor[n]) -> tensor[n]:
    let a = compute(x) { for i in 0..n: out[i] = x[i] * 2.0 }
    print(a)
    let total = reduce(+, a)
    let b = compute(a) { for i in 0..n: out[i] = a[i] + 1.0 }
    if total > 0.0 {
        return b
    }
    let c = compute(b) { for i in 0..n: out[i] = b[i] * 10.0 }
    return c
"""
    found, ran = run(text, "stepwise", np.array([1, 2], np.float32))
    np.testing.assert_array_equal(found, [3, 5])
    assert capsys.readouterr().out == "[2., 4.]\n" and ran[0] == "a" and ran[-1] == "b"
    found, ran = run(text, "stepwise", np.array([-1, -2], np.float32))
    np.testing.assert_array_equal(found, [-10, -30])
    assert ran[-1] == "b + c"


def test_blocks_whose_results_nobody_needs_do_not_run() -> None:
    text = """
pipeline some(x: tensor[n]) -> tensor[n]:
    let a = compute(x) { for i in 0..n: out[i] = x[i] * 2.0 }
    let b = compute(x) { for i in 0..n: out[i] = x[i] * 3.0 }
    let c = compute(a) { for i in 0..n: out[i] = a[i] + 1.0 }
    print(b.shape)
    return c
"""
    _, ran = run(text, "some", numbers(4))
    assert ran == ["a + c"]


def test_an_array_that_several_blocks_take_is_one_argument_and_sizes_must_agree() -> None:
    text = """
pipeline twice(x: tensor[n], y: tensor[m]) -> tensor[n]:
    let a = compute(x) { for i in 0..n: out[i] = x[i] * 2.0 }
    let whole = reshape(a, [n])
    let b = compute(whole, x, y) { for i in 0..n: out[i] = whole[i] + x[i] * y[i] }
    return b
"""
    x, y = numbers(6), numbers(6, seed=1)
    noting = Noting()
    loaded = module.load(text, noting)
    np.testing.assert_allclose(loaded.twice(x, y), x * 2 + x * y, rtol=1e-6)
    assert isinstance(noting.ran[0], BlockGraph) and [p.name for p in noting.ran[0].params] == ["x", "y"]
    with pytest.raises(tw.UserError, match=r"axis 0 of 'y' is 5, but .* is 6"):
        loaded.twice(x, y[:5])


def test_a_pipeline_that_calls_another_one_gives_it_arrays() -> None:
    text = (
        TWO
        + """
pipeline outer(x: tensor[n, m]) -> tensor[m, n]:
    let first = compute(x) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] + 1.0 }
    let second = turned(first)
    return second * 2.0
"""
    )
    x = numbers(3, 4)
    found, ran = run(text, "outer", x)
    np.testing.assert_allclose(found, ((x + 1) * 2 + 1).T * 2, rtol=1e-6)
    assert ran[:2] == ["first", "a + c"]


def test_attributes_are_held_against_each_block() -> None:
    text = """
pipeline wrong(x: tensor[n, m]) -> tensor[n, m]:
    let a = compute(x) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * 2.0 }
    let b = reshape(a, [n, m])
    let c = compute(b) {
        @kernel matmul
        for i in 0..n, j in 0..m:
            var sum = 0.0
            for k in 0..m:
                sum += b[i, k] * b[i, k]
            out[i, j] = sum
    }
    return c
"""
    with pytest.raises(tw.UserError, match=r"<string>:[57]:.*@kernel matmul, but the loops are no such thing"):
        run(text, "wrong", numbers(3, 4))


def test_blocks_that_say_how_they_run_run_by_themselves() -> None:
    text = """
pipeline apart(x: tensor[n]) -> tensor[n]:
    let a = compute(x) { for i in 0..n: out[i] = x[i] * 2.0 }
    let b = compute(a) @tile(64, 64) { for i in 0..n: out[i] = a[i] + 1.0 }
    let c = compute(b) { for i in 0..n: out[i] = b[i] * 2.0 }
    let d = compute(c) { for i in 0..n: out[i] = c[i] - 1.0 }
    return reshape(d, [n])
"""
    x = numbers(9)
    found, ran = run(text, "apart", x)
    np.testing.assert_allclose(found, (x * 2 + 1) * 2 - 1, rtol=1e-6)
    assert ran == ["a", "b", "c + d"]


def test_views_that_differ_too_often_are_made_of_arrays_again() -> None:
    text = """
pipeline flat(x: tensor[n, m]):
    let a = compute(x) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * 2.0 }
    let b = reshape(transpose(a, [1, 0]), [n * m])
    let c = compute(b) { for i in 0..k: out[i] = b[i] + 1.0 }
    return c
"""
    noting = Noting()
    loaded = module.load(text, noting)
    for columns in range(1, 24):
        x = numbers(3, columns)
        np.testing.assert_allclose(loaded.flat(x), (x * 2 + 1).T.reshape(-1), rtol=1e-6)
    assert isinstance(noting.ran[0], BlockGraph) and not isinstance(noting.ran[-1], BlockGraph)


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    x = numbers(5, 7)
    found, ran = run(TWO, "turned", torch.from_numpy(x))
    np.testing.assert_array_equal(np.asarray(found), (x * 2 + 1).T)
    assert ran == ["a + c"]


def test_indices_make_views_too() -> None:
    text = """
pipeline first(x: tensor[b, s, h]) -> tensor[b, h]:
    let a = compute(x) { for i in 0..b, j in 0..s, k in 0..h: out[i, j, k] = x[i, j, k] * 2.0 }
    let token = a[:, 0]
    let c = compute(token) { for i in 0..b, k in 0..h: out[i, k] = token[i, k] + 1.0 }
    return reshape(c, [b, h])
"""
    x = numbers(3, 4, 5)
    found, ran = run(text, "first", x)
    np.testing.assert_allclose(found, x[:, 0] * 2 + 1, rtol=1e-6)
    assert ran == ["a + c"]
    with pytest.raises(tw.UserError, match="index out of range"):
        run(text.replace("a[:, 0]", "a[:, 4]"), "first", x)


def test_wishes_of_a_block_are_those_of_its_kernels() -> None:
    text = """
pipeline pair(x: tensor[n, m], w: tensor[m, k]) -> tensor[k, n]:
    let a = compute(x, w) {
        for i in 0..n, j in 0..k:
            var sum = 0.0
            for c in 0..m:
                sum += x[i, c] * w[c, j]
            out[i, j] = sum
    }
    let turned = transpose(a, [1, 0])
    let b = compute(turned, x) {
        @workgroup(64)
        for i in 0..k, j in 0..n:
            var sum = 0.0
            for c in 0..n:
                sum += turned[i, c] * x[c, 0]
            out[i, j] = sum * x[j, 0]
    }
    return b
"""
    noting = Noting("sm_80")
    x, w = numbers(40, 24), numbers(24, 33, seed=1)
    found = module.load(text, noting).pair(x, w)
    wanted = (x.astype(np.float64) @ w).T @ x[:, :1] @ x[:, :1].T
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    (function,) = noting.ran
    assert isinstance(function, BlockGraph)
    runner = Runner(function)
    read = runner.arguments({"x": x, "w": w}, True)
    metadata = compile_stages(function, runner.signature(read, True), parse_target("sm_80")).typed.metadata
    assert metadata.of("a").workgroup_size is None and metadata.of("b").workgroup_size == (64, 1, 1)


def test_a_number_may_have_the_name_of_a_size_of_another_block() -> None:
    text = """
pipeline scaled(x: tensor[rows, cols], n) -> tensor[rows, cols]:
    let a = compute(x) { for i in 0..m, j in 0..k: out[i, j] = x[i, j] * 2.0 }
    let turned = transpose(a, [1, 0])
    let m = n + 1.0
    let b = compute(turned, m) { for i in 0..c, j in 0..r: out[j, i] = turned[i, j] * m + n }
    return b
"""
    x = numbers(3, 5)
    found, ran = run(text, "scaled", x, 4.0)
    np.testing.assert_allclose(found, x * 2 * 5 + 4, rtol=1e-6)
    assert ran == ["a + b"]
