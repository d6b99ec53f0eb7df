"""Races of `tw.grid` that follow from the text, sizes that a condition does not speak of, and words that would do nothing."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

import tilewright as tw

_numbers = count()


def build(body: str) -> Callable[..., object]:
    source = "@tw.kernel\ndef k(x, y):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"
    name = f"<races {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names: dict[str, object] = {"tw": tw, "ONE": 1}
    exec(compile(source, name, "exec"), names)
    kernel = names["k"]
    assert callable(kernel)
    return kernel


def over(ranges: str, *body: str, start: str = "out = tw.zeros((64,), tw.f32)") -> str:
    return f"n = len(x)\n{start}\nfor {ranges}:\n" + textwrap.indent("\n".join(body), "    ") + "\nreturn out"


X = np.arange(8, dtype=np.float32)
RACES = {
    "halves": (over("i in tw.grid(n)", "out[i // 2] = x[i]"), "iterations i=0 and i=1 both write out[0]"),
    "remainders": (over("i in tw.grid(8)", "out[i % 4] = x[i]"), "iterations i=0 and i=4 both write out[0]"),
    "far remainders": (over("i in tw.grid(n)", "out[i % 32] = x[i]"), "iterations i=0 and i=32 both write out[0]"),
    "clamped": (over("i in tw.grid(n)", "out[min(i, 3)] = x[i]"), "iterations i=3 and i=4 both write out[3]"),
    "two stores": (over("i in tw.grid(n)", "out[i] = x[i]", "out[i + 1] = x[i]"), "i=0 and i=1 both write out[1]|i=1 and i=0 both write out[1]"),
    "an inner loop": (over("i in tw.grid(n)", "for r in range(3):", "    out[i + r] = x[i]"), "both write out"),
    "a sum of indices": (over("i, j in tw.grid(n, n)", "out[i + j] = x[i]"), "iterations i=0, j=1 and i=1, j=0 both write out[1]"),
    "the one before": (over("i in tw.grid(range(1, n))", "out[i] = out[i - 1] + x[i]"), "iteration i=2 reads out[1], which iteration i=1 writes"),
    "the one after": (over("i in tw.grid(n)", "out[i] = out[i + 1] + x[i]"), "iteration i=0 reads out[1], which iteration i=1 writes"),
    "the other end": (over("i in tw.grid(n)", "out[i] = out[n - 1 - i] + x[i]"), "with n = 53 iteration i=0 reads out[52], which iteration i=52 writes"),
    "folded": (over("i in tw.grid(n)", "out[min(i, n - 1 - i)] = x[i]"), "with n = 53 iterations i=1 and i=51 both write out[1]"),
    "the last one": (over("i in tw.grid(n)", "out[min(i, n - 2)] = x[i]"), "iterations i=51 and i=52 both write out[51]"),
    "in an ordered loop": (over("t in range(3)", "for i in tw.grid(n):", "    out[i // 2] = x[i]"), "iterations i=0 and i=1 both write out[0]"),
}
FINE = {
    "ordered": over("i in range(n)", "out[i // 2] = x[i]"),
    "sums": over("i in tw.grid(n)", "out[i // 2] += x[i]"),
    "from data": over("i in tw.grid(n)", "out[tw.cast(y[i], tw.i64)] = x[i]"),
    "under a condition": over("i in tw.grid(n)", "if i % 2 == 0:", "    out[i // 2] = x[i]"),
    "one iteration": over("i in tw.grid(1)", "out[i // 2] = x[i]"),
    "pairs": over("i in tw.grid(n)", "out[2 * i] = x[i]", "out[2 * i + 1] = x[i]"),
    "blocks": over("i in tw.grid(range(0, n, 4))", "for r in range(4):", "    out[i + r] = x[i]"),
    "forward substitution": over("i in range(n)", "s = x[i]", "for j in range(i):", "    s -= out[j] * 0.5", "out[i] = s", start="out = tw.empty((n,), tw.f32)"),
    "division by a captured one": over("i in tw.grid(n)", "out[i // ONE + i % ONE] = x[i]"),
}


@pytest.mark.parametrize("name", RACES)
def test_both_iterations_are_named(name: str) -> None:
    body, words = RACES[name]
    with pytest.raises(tw.TilewrightError, match=r"error\[TW012\]: grid runs its iterations in any order") as caught:
        build(body)(X, X)
    assert any(part in str(caught.value) for part in words.split("|")), str(caught.value)


def test_what_is_no_certain_race_runs() -> None:
    for name, body in FINE.items():
        got = np.asarray(build(body)(X, X))
        expected = np.zeros(len(got), np.float32)
        if name == "forward substitution":
            for i in range(len(X)):
                expected[i] = X[i] - 0.5 * expected[:i].sum()
        elif name == "ordered":
            expected[:4] = X[1::2]
        elif name == "sums":
            expected[:4] = X[::2] + X[1::2]
        elif name == "under a condition":
            expected[:4] = X[::2]
        elif name == "pairs":
            expected[:16] = np.repeat(X, 2)
        elif name == "blocks":
            expected[:8] = np.repeat(X[::4], 4)
        elif name != "one iteration":
            expected[:8] = X
        assert np.allclose(got, expected), name


GUARDED = """
rows, cols = x.shape
out = tw.empty((rows, cols), x.dtype)
for i, j in tw.grid(rows, cols):
    total = 0.0
    for r in range(y.shape[1]):
        if 0 <= j + r < cols:
            total += x[i, j + r] * y[i, r]
    out[i, j] = total
return out"""


def test_a_condition_speaks_for_its_own_indices() -> None:
    kernel = build(GUARDED)
    assert np.asarray(kernel(np.ones((2, 3), np.float32), np.ones((2, 2), np.float32))).tolist() == [[2, 2, 1]] * 2
    for rows in (1, 5):
        with pytest.raises(tw.TilewrightError, match=rf"TW004.*axis 0 of 'y' is {rows}, but 'rows' is 2"):
            kernel(np.ones((2, 3), np.float32), np.ones((rows, 2), np.float32))


@pytest.mark.parametrize(("body", "words"), [
    ("return tw.exp(x, base=None)", "exp"),
    ("return x * tw.f32(value=1)", "has no argument 'value'"),
    ("u: tw.f64 = tw.zeros((4,), tw.f32)\nreturn u", "must be f64"),
    ("u: tw.Array = 1.0\nreturn x * u", "must be an array"),
    ("u: tw.f32 = (1, 2)\nreturn x * u[0]", "got a tuple"),
])  # fmt: skip
def test_words_that_would_do_nothing_are_refused(body: str, words: str) -> None:
    with pytest.raises(tw.TilewrightError, match=words):
        build(body)(X, X)


def test_types_of_arrays_act() -> None:
    assert np.asarray(build("u: tw.f64 = x * 2\nreturn u")(X, X)).dtype == np.float64
