"""What ranks the uses of an input show."""

from __future__ import annotations

import pytest

from tilewright.cli.guess import rank_in
from tilewright.frontend.zyn import parse_module


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
