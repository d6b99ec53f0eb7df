"""Draws of tokens: only words that are allowed, as often as their probability says, the same on every run."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.models.sampling import add_sampling

WORDS = 301


def draws(logits: np.ndarray, count: int, temperature: float, top_k: int, top_p: float, seed: int = 3) -> np.ndarray:
    g = tw.TensorGraph("sample")
    given = g.input("logits", (1, len(logits)), tw.f32)
    token, position, history = g.cache("token", (1,), tw.i32), g.cache("position", (1,), tw.i32), g.cache("history", (count + 1,), tw.i32)
    g.output("token", g.op("Advance", token, position, history, add_sampling(g, given, position, True, top_k > 0, top_p < 1)))
    inputs = {"logits": logits[None], "settings": np.array([1 / temperature, top_p], np.float32), "seed": np.array([seed], np.int64)}
    step = g.capture("cpu", **inputs, **({"top_k": np.array([top_k], np.int64)} if top_k else {}))
    g.reset()
    for _ in range(count):
        step()
    assert int(g.state("position", "cpu")[0]) == count
    return np.array(g.state("history", "cpu")[:count])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.6), (40, 0.9), (WORDS, 0.999)])
def test_draws_follow_the_probabilities(top_k: int, top_p: float) -> None:
    logits = (np.random.default_rng(1).standard_normal(WORDS) * 3).astype(np.float32)
    probability = np.exp((logits - logits.max()) / 0.8)
    order = np.argsort(-logits, kind="stable")
    keep = order[:top_k] if top_k else order
    share = probability[keep] / probability[keep].sum()
    keep = keep[: int((np.cumsum(share) < top_p).sum()) + 1] if top_p < 1 else keep
    found = draws(logits, 2000, 0.8, top_k, top_p)
    assert set(found.tolist()) <= set(keep.tolist())
    share = probability[keep] / probability[keep].sum()
    counts = np.bincount(found, minlength=WORDS)[keep]
    assert np.abs(counts / 2000 - share).max() < 5 * np.sqrt(0.25 / 2000)


def test_equal_logits_at_the_bound_stay_together_and_infinities_are_left_out() -> None:
    logits = np.full(WORDS, -np.inf, np.float32)
    logits[[7, 9, 11]] = 1.0
    assert set(draws(logits, 60, 1.0, 2, 1.0).tolist()) == {7, 9, 11}
