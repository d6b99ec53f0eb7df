"""Steps of models by another engine: the same tokens as by captured graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

import tilewright as tw
from models.random_models import RandomModel
from models.test_random_models import check_tokens, made
from tilewright.models.generation import SamplingSettings

IDS = [5]
"""A prompt of one token needs no graph but that of a step."""


def test_engines_of_a_cpu(tmp_path: Path) -> None:
    random = made("llama")
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="cpu", context=40)
    graph = list(model.generate_ids(IDS, tokens=6))
    assert list(model.generate_ids(IDS, tokens=6, engine="mega")) == graph and model.stats.engine == "mega"
    assert list(model.generate_ids(IDS, tokens=6, engine="auto")) == graph
    assert set(model.stats.measured) == {"graph", "mega"} and model.stats.engine == min(model.stats.measured, key=lambda name: model.stats.measured[name])
    with pytest.raises(tw.UserError, match="engine='fast'"):
        model.generate_ids(IDS, engine="fast")


def _step(random: RandomModel, path: Path, count: int, **options: float) -> list[int]:
    model = tw.models.load(random.gguf(path), device="emulator", context=8)
    return list(model.generate_ids(IDS, tokens=count, engine="mega", **options))


def test_a_step_is_one_kernel_in_the_emulator(tmp_path: Path) -> None:
    """Windows, norms of heads and two kinds of layers; the second token needs what the first left in the caches."""
    random = made("gemma3", layers=2)
    chosen = _step(random, tmp_path / "m.gguf", 2)
    assert len(chosen) == 2
    check_tokens(random, IDS, chosen, 1e-4)


def test_layers_of_mixed_formats_share_a_loop(tmp_path: Path) -> None:
    """Formats and windows differ from layer to layer: a body for each format, which a table chooses, and a window from the table."""
    random = made("gemma3", layers=6, width=32, heads=2, groups=1, depth=16, hidden=32, words=35, formats=(tw.q8_0, tw.q5_0), by_layer=True)
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="emulator", context=8)
    chosen = list(model.generate_ids(IDS, tokens=1, engine="mega"))
    check_tokens(random, IDS, chosen, 1e-4)
    step = model.generator.step(SamplingSettings(), "mega").step.step
    loop = max(step.loops, key=lambda loop: loop.count)
    assert loop.count == 5 and len(step.loops) == 3
    assert any(op.others for op in loop.ops) and any(not op.others for op in loop.ops) and (0, "#window") in loop.columns
