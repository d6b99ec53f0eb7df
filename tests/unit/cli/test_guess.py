"""What ranks the uses of an input show."""

from __future__ import annotations

import pytest

from tilewright.cli.guess import guess, rank_in
from tilewright.frontend.zyn.parse import parse_module


@pytest.mark.parametrize(
    ("body", "rank"),
    [
        ("for i in 0..n: out[i] = x[i]", 1),
        ("for i in 0..n: out[i] = dot(x[i], w)", 2),
        ("for i in 0..n: out[i] = dot(x[i, 0:4], w)", 2),
        ("for i in 0..n step 4: out[i:i+4] = row_max(x[i:i+4])", 2),
        ("for i in 0..n step 4 {\n let part = x[0, i:i+4]\n out[i:i+4] = part @ w\n}", 3),
        ("for i in 0..n: out[i] = x[i] @ w", 2),
    ],
)
def test_rank(body: str, rank: int) -> None:
    assert rank_in("x", parse_module("let y = compute(x, w) {\n" + body + "\n}\n")) == rank


@pytest.mark.parametrize(
    ("text", "name", "rank"),
    [
        ("let r = reduce(+, x * 2)", "x", 1),
        ("let y = exp(x) + 1\nlet r = reduce(max, y)", "x", 1),
        ("var y = x\nwhile reduce(max, y) > 1: y = y * 0.5", "x", 1),
        ("let y = x if k > 1 else -x\nlet r = y[0, 1]", "x", 2),
        ("let r = x @ w", "w", 2),
        ("let y = x * 2\nlet r = y @ w", "x", 2),
        ("let r = reduce(+, x[0, :] * eps)", "eps", None),
        ("let y = x * eps\nlet a = x[1]\nlet r = reduce(+, y)", "eps", None),
        ("let r = x * 2", "x", None),
    ],
)  # fmt: skip
def test_ranks_of_what_arrays_are_computed_from(text: str, name: str, rank: int | None) -> None:
    found = guess(name, None, parse_module(text + "\n"))
    assert (None if found.extents is None else len(found.extents)) == rank
