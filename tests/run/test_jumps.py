"""`break`, `continue` and early `return`, against the same functions run by Python: on the CPU and at every stage of the emulator."""

# ruff: noqa: RET503, SIM110

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from support import CUDA

DEVICES = ["cpu", "emulator:loop", "emulator:tile", "emulator:thread"]


@tw.kernel
def sum_until_negative(x: tw.Array) -> float:
    total = 0.0
    for i in range(len(x)):
        if x[i] < 0:
            break
        total += x[i]
    return total


@tw.kernel
def sum_of_positive(x: tw.Array) -> float:
    total = 0.0
    for i in range(len(x)):
        if x[i] < 0:
            continue
        total += x[i]
    return total


@tw.kernel
def first_negative(x: tw.Array) -> int:
    for i in range(len(x)):
        if x[i] < 0:
            return i
    return -1


@tw.kernel
def first_repeated(x: tw.Array) -> tuple[int, int]:
    n = len(x)
    for i in range(n):
        for j in range(i):
            if x[i] == x[j]:
                return j, i
    return n, n


@tw.kernel
def mixed(x: tw.Array) -> float:
    total = 0.0
    k = 0
    while True:
        if k >= len(x):
            break
        v = x[k]
        k += 1
        if v < 0:
            if v < -1:
                continue
            total -= 1.0
        total += v
        if total > 5:
            break
    return total


@tw.kernel
def condition_is_not_asked_after_break(x: tw.Array) -> int:
    i = 0
    while x[i] > 0:
        i += 1
        if i == len(x):
            break
    return i


@tw.kernel
def backwards(x: tw.Array) -> int:
    found = -1
    for i in range(len(x) - 1, -1, -2):
        if x[i] > 0:
            found = i
            break
    return found


@tw.kernel
def rows(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        total = 0.0
        for j in range(m):
            if x[i, j] < -1:
                break
            if x[i, j] < 0:
                continue
            total += x[i, j]
        out[i] = total
    return out


@tw.kernel
def skipped(x: tw.Array) -> tw.Array:
    out = tw.zeros((len(x),), x.dtype)
    for i in tw.grid(len(x)):
        if x[i] < 0:
            continue
        out[i] = x[i] * 2
    return out


@tw.kernel
def guarded(x: tw.Array, n: int) -> float:
    if n <= 0:
        return -1.0
    total = 0.0
    for i in range(len(x)):
        total += x[i]
    if total < 0:
        return 0.0
    return total / n


@tw.kernel
def is_sorted(x: tw.Array) -> bool:
    for i in range(1, len(x)):
        if x[i] < x[i - 1]:
            return False
    return True


@tw.kernel
def clear_up_to(x: tw.InOut, limit: float) -> None:
    for i in range(len(x)):
        if x[i] > limit:
            return
        x[i] = 0.0


@tw.kernel
def filled(x: tw.Array) -> tw.Array:
    out = tw.zeros((len(x),), x.dtype)
    for i in range(len(x)):
        if x[i] < -1:
            return out
        out[i] = x[i]
    return out


@tw.kernel
def calls(x: tw.Array) -> int:
    return first_negative(x) * 10 + first_negative(x)


def python(kernel: Any) -> Any:
    """The function as Python runs it, with what kernels it calls, too."""
    scope = {"tw": _Words, "len": len, "first_negative": first_negative.python if kernel is calls else None}
    return type(kernel.python)(kernel.python.__code__, {**scope, "range": range, "__builtins__": __builtins__})


class _Words:
    @staticmethod
    def grid(*extents: int) -> Any:
        return range(*extents) if len(extents) == 1 else np.ndindex(*extents)

    zeros = staticmethod(np.zeros)
    empty = staticmethod(np.zeros)


SCALAR = [sum_until_negative, sum_of_positive, first_negative, first_repeated, mixed, backwards, skipped, is_sorted, filled, calls]


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("kernel", SCALAR, ids=lambda k: k.__name__)
def test_as_python(kernel: Any, device: str) -> None:
    for seed, n in enumerate((1, 2, 31, 33)):
        x = np.random.default_rng(seed).integers(-2, 7, n).astype(np.float64)
        for values in (x, abs(x), -abs(x) - 1, np.sort(x)):
            np.testing.assert_allclose(kernel(values, device=device), python(kernel)(values))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_rows(device: str) -> None:
    for shape in ((1, 1), (5, 33), (33, 7)):
        x = np.random.default_rng(0).integers(-2, 30, shape).astype(np.float32)
        np.testing.assert_allclose(rows(x, device=device), python(rows)(x))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_others(device: str) -> None:
    x = np.array([3.0, 1.0, 2.0])
    assert condition_is_not_asked_after_break(x, device=device) == 3
    assert condition_is_not_asked_after_break(np.array([1.0, -1.0]), device=device) == 1
    assert guarded(x, 0, device=device) == -1
    assert guarded(x, 3, device=device) == 2
    assert guarded(-x, 3, device=device) == 0
    y = np.array([1.0, 2.0, 9.0, 1.0])
    assert clear_up_to(y, 5.0, device=device) is None
    np.testing.assert_array_equal(y, [0, 0, 9, 1])


def test_a_break_saves_work() -> None:
    """The loop ends; it does not go on idly."""

    @tw.kernel
    def found(x: tw.Array, limit: int) -> int:
        at = 0
        for i in range(1 << 60):
            if i >= limit:
                at = i
                break
        return at

    assert found(np.zeros(1), 1000) == 1000


# -- wrong ----------------------------------------------------------------------------------------------------------


@tw.kernel
def break_in_grid(x: tw.Array) -> tw.Array:
    out = tw.zeros((len(x),), x.dtype)
    for i in tw.grid(len(x)):
        if x[i] < 0:
            break
        out[i] = x[i]
    return out


@tw.kernel
def return_in_grid(x: tw.Array) -> tw.Array:
    out = tw.zeros((len(x),), x.dtype)
    for i in tw.grid(len(x)):
        for j in range(3):
            if x[i] < j:
                return out
        out[i] = x[i]
    return out


@tw.kernel
def not_always(x: tw.Array) -> float:
    for i in range(len(x)):
        if x[i] < 0:
            return x[i]


@tw.kernel
def other_count(x: tw.Array) -> float:
    for i in range(len(x)):
        if x[i] < 0:
            return x[i], x[i]
    return 0.0


@pytest.mark.parametrize(
    ("kernel", "line", "message"),
    [
        (break_in_grid, 5, "TW012.*'break' in the grid of line"),
        (return_in_grid, 6, "TW012.*'return' in the grid of line"),
        (not_always, 4, "TW017.*returns a value on some ways through it, and none on others"),
        (other_count, 4, "TW016.*returns 1 value.s. on one way through it, and 2 on another"),
    ],
)
def test_wrong_jumps(kernel: Any, line: int, message: str) -> None:
    with pytest.raises(tw.UserError, match=message) as caught:
        kernel(np.ones(3))
    assert f".py:{kernel.python.__code__.co_firstlineno + line}:" in str(caught.value)


# -- ZynML ----------------------------------------------------------------------------------------------------------

PROGRAM = """
let sums = compute(x) {
    for i in 0..rows:
        var total = 0.0
        for j in 0..cols:
            if x[i, j] < -1: break
            if x[i, j] < 0: continue
            total += x[i, j]
        out[i] = total
}
var k = 0
var odd = 0
while true:
    k += 1
    if k > 10: break
    if k % 2 == 0 { continue }
    odd += k
for i in 0..100:
    for j in 0..5:
        if j == 2: break
        k = 10 * i + j
    if i == 7: break
"""


@pytest.mark.parametrize("device", ["cpu", "emulator", CUDA])
def test_jumps_of_zynml(device: str) -> None:
    program = tw.load(PROGRAM)
    x = np.random.default_rng(0).integers(-2, 30, (5, 33)).astype(np.float32)
    for _ in range(3):  # recorded and replayed, too
        found = program.run(x=x, device=device)
        np.testing.assert_allclose(found["sums"], python(rows)(x))
        assert (found["odd"], found["k"]) == (25, 71)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("let a = 1\nbreak", "TW005.*'break' outside a loop"),
        ("fn f(x):\n    continue\n    return x\nfor i in 0..3:\n    let y = f(str(i))", "TW005.*'continue' outside a loop"),
        ("let y = compute(x) {\n    break\n    for i in 0..n: out[i] = x[i]\n}", "TW005.*'break' outside a loop"),
        ("let y = compute(x) { for i in 0..n, j in 0..m { if x[i, j] < 0 { break }\n out[i, j] = 1.0 } }", "TW005.*'break' in a loop over several indices"),
        ("for i in 0..3:\n    break\n    print(i)", "TW005.*never reached: line 2 has left the loop"),
    ],
)
def test_wrong_jumps_of_zynml(text: str, message: str) -> None:
    with pytest.raises(tw.UserError, match=message):
        tw.load(text).run(**({"x": np.ones((2, 2), np.float32)} if "compute(x)" in text else {}))


@pytest.mark.parametrize("text", ["var break = 3", "let continue = 4", "let y = break + 1", "fn continue(x):\n    return x", "let y = f(break)"])
def test_the_words_are_reserved(text: str) -> None:
    with pytest.raises(tw.UserError, match=r"expected .*, found '(break|continue)'"):
        tw.load(text + "\n")
