"""`untile` and `recover_reductions`: what is rewritten, and that everything that only looks like it stays and gives the numbers of its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kernels_tiled as text
import tilewright as tw
from tilewright.base.record import record
from tilewright.base.target import host_cpu
from tilewright.compile.driver import compile_stages
from tilewright.execute.calls.run import Runner
from tilewright.frontend.zyn.parse import parse_module
from tilewright.ir.nodes import Kernel, walk
from tilewright.passes.loop.recover_reductions import recover_reductions
from tilewright.passes.routes import prepare
from tilewright.passes.runner import Trace
from tilewright.tree.syntax import Function
from tilewright.zyn.module import ZynModule

X = np.random.default_rng(0).standard_normal((5, 21)).astype(np.float32)


def loop_stage(kernel: tw.Kernel[..., Any], *arguments: object) -> Kernel:
    (call,) = prepare(kernel.stages(*arguments, target="cpu").program, Trace()).calls
    return call.kernel


def carries(kernel: Kernel) -> bool:
    return any(op.opcode == "for" and len(op.operands) > 3 for op in walk(kernel.body))


def extents(kernel: Kernel) -> list[list[str]]:
    """The extents of the nest, then of each reduction."""
    made = {r: op for op in walk(kernel.body) for r in op.results}
    return [[str(made[v].attrs.get("value", "")) for v in op.operands] for op in walk(kernel.body) if op.opcode in ("parallel", "reduce")]


# -- rewritten ----------------------------------------------------------------------------------------------------------------------


def test_blocks_of_a_product() -> None:
    kernel = loop_stage(text.tiled_matmul, np.zeros((70, 40), np.float32), np.zeros((40, 50), np.float32))
    assert extents(kernel) == [["rows", "columns"], ["depth"]]
    assert not any(op.opcode == "if" for op in walk(kernel.body))


def test_a_carried_maximum_and_sums() -> None:
    q = np.zeros((1, 1, 70, 8), np.float32)
    kernel = loop_stage(text.flash, q, q, q, 0.5)
    assert not carries(kernel)
    assert extents(kernel) == [["batch*heads", "length"], ["keys"], ["width"], ["keys"], ["width"], ["keys"], ["width"]]
    (columns,) = [op for op in walk(kernel.body) if op.opcode == "for"]
    assert columns.attrs["independent"] is True
    assert recover_reductions(kernel) is kernel


@tw.kernel
def online(x):
    """Blocks of one."""
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        m = -tw.inf
        total = 0.0
        for j in range(columns):
            m_new = max(m, x[i, j])
            total = total * tw.exp(m - m_new) + tw.exp(x[i, j] - m_new)
            m = m_new
        out[i] = m + tw.log(total)
    return out


@tw.kernel
def from_a_number(x):
    """A maximum that does not begin at -inf, exponentials of two, weights that are divided, and a plain sum beside."""
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        m = 0.5
        total = 0.0
        beside = 0.0
        for j in range(0, columns, 8):
            part = x[i, j : j + 8]
            m_new = max(m, tw.max(part))
            total = tw.sum(tw.exp2(part - m_new) / 3.0 * part) + tw.exp2(-m_new + m) * total
            beside += tw.sum(part)
            m = m_new
        out[i] = m + total + beside
    return out


@tw.kernel
def where_weights(x):
    """Terms left out."""
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        m = -tw.inf
        total = 0.0
        for j in range(0, columns, 8):
            part = x[i, j : j + 8]
            m_new = max(m, tw.max(part))
            total = total * tw.exp(m - m_new) + tw.sum(tw.where(part > 0.0, tw.exp(part - m_new), 0.0))
            m = m_new
        out[i] = total
    return out


def exponentials(x: np.ndarray) -> np.ndarray:
    return np.exp(x - x.max(-1, keepdims=True))


def from_a_number_wanted(x: np.ndarray) -> np.ndarray:
    top = np.maximum(x.max(-1), 0.5)
    total: np.ndarray = top + (np.exp2(x - top[:, None]) / 3 * x).sum(-1) + x.sum(-1)
    return total


REWRITTEN: list[tuple[tw.Kernel[..., Any], Callable[[np.ndarray], np.ndarray]]] = [
    (online, lambda x: np.log(np.exp(x).sum(-1))),
    (from_a_number, from_a_number_wanted),
    (where_weights, lambda x: np.where(x > 0, exponentials(x), 0).sum(-1)),
]


@pytest.mark.parametrize(("kernel", "wanted"), REWRITTEN, ids=[kernel.__name__ for kernel, _ in REWRITTEN])
def test_rewritten(kernel: tw.Kernel[..., Any], wanted: Callable[[np.ndarray], np.ndarray]) -> None:
    assert not carries(loop_stage(kernel, X))
    for device in ("cpu", "emulator:loop"):
        np.testing.assert_allclose(kernel(X, device=device), wanted(X.astype(np.float64)), rtol=1e-5, atol=1e-5)


@tw.kernel
def shortened(x):
    """A range that may end before it begins."""
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        m = -tw.inf
        total = 0.0
        for j in range(columns - 5):
            m_new = max(m, x[i, j])
            total = total * tw.exp(m - m_new) + tw.exp(x[i, j] - m_new)
            m = m_new
        out[i] = total
    return out


@pytest.mark.parametrize("columns", [3, 5, 6, 21])
def test_ranges_that_are_empty(columns: int) -> None:
    x = np.ascontiguousarray(X[:, :columns])
    assert not carries(loop_stage(shortened, x))
    wanted = exponentials(x[:, : columns - 5]).sum(-1) if columns > 5 else np.zeros(len(x))
    for device in ("cpu", "emulator:loop"):
        np.testing.assert_allclose(shortened(x, device=device), wanted, rtol=1e-5)


# -- carried, but not rewritten -----------------------------------------------------------------------------------------------------


@record
class Loop:
    """A loop like that of an online sum."""

    start: str = "-inf"
    first: str = "0.0"
    factor: str = "exp(m - m_new)"
    term: str = "exp(part - m_new)"
    following: str = "m_new"

    @property
    def text(self) -> str:
        return f"""
let y = compute(x) {{
    for i in 0..rows:
        var m = {self.start}
        var l = {self.first}
        for j in 0..columns step 8:
            let part = x[i, j:j+8]
            let m_new = max(m, reduce(max, part))
            l = l * {self.factor} + reduce(+, {self.term})
            m = {self.following}
        out[i] = l
}}
"""

    def wanted(self, row: np.ndarray) -> float:
        names: dict[str, Any] = {"exp": np.exp, "exp2": np.exp2, "inf": np.inf}
        m, total = eval(self.start, names), eval(self.first, names)
        for begin in range(0, len(row), 8):
            part = row[begin : begin + 8]
            own = {**names, "m": m, "part": part, "l": total, "m_new": max(m, part.max())}
            total, m = total * eval(self.factor, own) + np.sum(eval(self.term, own)), eval(self.following, own)
        return float(total)

    def kernel(self) -> Kernel:
        functions: list[Function] = []

        def compute(function: Function, arguments: dict[str, object], device: str) -> object:
            functions.append(function)
            return np.zeros(len(X), np.float32)

        ZynModule(parse_module(self.text), compute).run(x=X)
        runner = Runner(functions[0], "auto", "")
        signature = runner.signature(runner.arguments({"x": X}, False), False)
        (call,) = compile_stages(functions[0], signature, host_cpu()).stages.loop.calls
        return call.kernel


KEPT = {
    "scaled the wrong way": Loop(start="0.5", factor="exp(m_new - m)"),
    "another function": Loop(factor="exp2(m - m_new)"),
    "scaled twice": Loop(factor="exp(m - m_new) * 0.5"),
    "the old maximum": Loop(start="0.5", term="exp(part - m)"),
    "the maximum added": Loop(start="0.5", term="exp(part + m_new)"),
    "the maximum twice": Loop(start="0.5", term="exp(part - m_new - m_new)"),
    "twice the maximum": Loop(start="0.5", term="exp(part - 2.0 * m_new)"),
    "a term beside": Loop(term="(exp(part - m_new) + 1.0)"),
    "two exponentials": Loop(term="(exp(part - m_new) * exp(part - m_new))"),
    "times the maximum": Loop(term="(exp(part - m_new) * m_new)"),
    "divided by it": Loop(start="0.5", term="(part / exp(part - m_new))"),
    "what is carried": Loop(start="0.5", term="exp(part - l)"),
    "another start": Loop(start="0.5", first="1.0"),
    "no maximum": Loop(start="0.5", following="m_new * 0.5"),
}


@pytest.mark.parametrize("name", ["as it should be", *KEPT])
def test_kept(name: str) -> None:
    loop = KEPT.get(name, Loop())
    assert carries(loop.kernel()) == (name in KEPT)
    found = tw.load(loop.text).run(device="emulator:loop", x=X)["y"]
    np.testing.assert_allclose(found, [loop.wanted(row) for row in X.astype(np.float64)], rtol=1e-4)  # type: ignore[arg-type]


# -- blocks of stores ---------------------------------------------------------------------------------------------------------------


@tw.kernel
def product(a, b):
    """Tiles without a loop around them."""
    rows = a.shape[0]
    columns = b.shape[1]
    out = tw.empty((rows, columns), a.dtype)
    for i, j in tw.grid(range(0, rows, 4), range(0, columns, 8)):
        out[i : i + 4, j : j + 8] = a[i : i + 4] @ b[:, j : j + 8]
    return out


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_blocks_of_stores(rows: int) -> None:
    a, b = X[:rows], np.ascontiguousarray(X.T)
    assert extents(loop_stage(product, a, b))[0] == ["rows", "columns"]
    for device in ("cpu", "emulator:loop"):
        np.testing.assert_allclose(product(a, b, device=device), a @ b, rtol=1e-5, atol=1e-5)


# -- blocks that stay ---------------------------------------------------------------------------------------------------------------


@tw.kernel
def by_block(x, scale):
    """The beginning of a block is used alone."""
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(range(0, n, 4)):
        out[i : i + 4] = x[i : i + 4] * scale[i]
    return out


@tw.kernel
def weighted_blocks(x, scale):
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        for j in range(0, columns, 4):
            total += tw.sum(x[i, j : j + 4] * scale[j])
        out[i] = total
    return out


@pytest.mark.parametrize("device", ["cpu", "emulator:loop"])
def test_blocks_used_alone_stay(device: str) -> None:
    scale = np.arange(1, 22, dtype=np.float32)
    spread = np.repeat(scale[::4], 4)[: X.shape[1]]
    assert extents(loop_stage(by_block, X[0], scale)) == [["ceildiv(n, 4)"]]
    np.testing.assert_allclose(by_block(X[0], scale, device=device), X[0] * spread, rtol=1e-6)
    assert "ceildiv(columns, 4)" in str(extents(loop_stage(weighted_blocks, X, scale)))
    np.testing.assert_allclose(weighted_blocks(X, scale, device=device), X @ spread, rtol=1e-4, atol=1e-5)
