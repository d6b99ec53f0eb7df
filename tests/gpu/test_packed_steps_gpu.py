"""Decode steps over packed weights on a real GPU: norms in the blocks of products and in rotary positions, parts of attention, all captured in one graph, against the forward in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from models.random_models import RandomModel

pytestmark = pytest.mark.requires("cuda")


@pytest.mark.parametrize(("architecture", "formats"), [
    ("gemma3", (tw.q5_0, tw.q8_0, tw.q4_k, tw.q6_k)), ("qwen3", (tw.q4_k, tw.q6_k, tw.q5_k)), ("qwen2", (tw.q4_0, tw.q5_1)), ("llama", (tw.q8_0, tw.q4_1)),
])  # fmt: skip
def test_steps_choose_the_tokens_of_the_reference(architecture: str, formats: tuple[tw.DType, ...], tmp_path: Path) -> None:
    random = RandomModel(architecture, layers=3, width=256, heads=4, groups=1 if architecture == "gemma3" else 2, depth=64, hidden=512, words=331, formats=formats, window=4 if architecture == "gemma3" else 0)
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="cuda", context=48)
    chosen: list[list[int]] = []
    for _ in range(3):  # replays give the same tokens
        model.generator.known.clear()
        chosen.append(list(model.generate_ids([1, 7, 200], tokens=20)))
    assert chosen[0] == chosen[1] == chosen[2]
    after = random.logits([1, 7, 200, *chosen[0]])[2:]
    near = 2e-2 * float(np.abs(after).max())
    for row, token in zip(after, chosen[0], strict=False):
        assert row.max() - row[token] < near
