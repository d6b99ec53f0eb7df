"""Several texts at once: each is what it is alone, whatever the lengths of the others are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tilewright as tw
from models.test_random_models import check_tokens, made
from tilewright.models.generation import SamplingSettings
from tilewright.models.language_model import LanguageModel

PROMPTS = [[5], [1, 5, 33, 2], [7]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    random = made("qwen3")
    loaded: LanguageModel = tw.models.load(random.gguf(tmp_path_factory.mktemp("m") / "m.gguf", tokenizer=False), device="cpu", context=40, activations="exact")
    return loaded


@pytest.mark.parametrize("engine", ["graph", "mega"])
def test_a_batch_is_its_texts(model: LanguageModel, engine: str) -> None:
    alone = [list(model.generate_ids(ids, tokens=n)) for ids, n in zip(PROMPTS, (6, 4, 9), strict=True)]
    assert model.generate_batch_ids(PROMPTS, tokens=[6, 4, 9], engine=engine) == alone
    assert model.stats.engine == engine and model.stats.tokens == 19
    assert model.generate_batch_ids(PROMPTS[::-1], tokens=3, engine=engine) == [ids[:3] for ids in alone[::-1]]  # the rows of the caches are others


def test_drawn_texts(model: LanguageModel) -> None:
    """Text n is drawn with the seed + n, inside the step."""
    how: dict[str, Any] = {"temperature": 1.5, "top_k": 20}
    alone = [list(model.generate_ids(ids, tokens=5, seed=11 + n, **how)) for n, ids in enumerate(PROMPTS[:2])]
    assert model.generate_batch_ids(PROMPTS[:2], tokens=5, seed=11, engine="mega", **how) == alone


def test_a_stop_token_ends_its_sequence_on_the_device(model: LanguageModel) -> None:
    """Steps behind it change nothing: neither the text nor the position."""
    alone = [list(model.generate_ids(ids, tokens=8)) for ids in PROMPTS]
    stop = next(token for token in alone[0] if token not in alone[2][: alone[0].index(token) + 1] and alone[0].index(token) < 6)
    batch = model._batches[3]
    found = batch.run(PROMPTS, [8, 8, 8], SamplingSettings(), {stop}, "mega")
    for own, want in zip(found, alone, strict=True):
        assert own == (want[: want.index(stop) + 1] if stop in want else want)
    step = batch.step(SamplingSettings(), "mega", {stop})
    before = [array.copy() for array in (batch._states["position"], batch._states["history"], batch._states["token"])]
    batch.single.advance_of(step)(5)
    assert all((a == batch._states[name]).all() for a, name in zip(before, ("position", "history", "token"), strict=True))


def test_a_batch_as_one_kernel_in_the_emulator(tmp_path: Path) -> None:
    random = made("llama", layers=1)
    model = tw.models.load(random.gguf(tmp_path / "m.gguf", tokenizer=False), device="emulator", context=8)
    found = model.generate_batch_ids([[5], [9]], tokens=[2, 1], engine="mega")
    assert [len(ids) for ids in found] == [2, 1]
    for prompt, ids in zip(([5], [9]), found, strict=True):
        check_tokens(random, prompt, ids, 1e-4)


def test_the_faster_engine_runs_a_batch(model: LanguageModel) -> None:
    """Measured once, for so many sequences; what was measured leaves nothing behind in the caches."""
    prompts, tokens = [[5, 7, 2], [9]], [6, 4]
    wanted = model.generate_batch_ids(prompts, tokens=tokens)
    assert model.generate_batch_ids(prompts, tokens=tokens, engine="auto") == wanted
    measured = model.stats.measured
    assert set(measured) == {"graph", "mega"} and model.stats.engine == min(measured, key=lambda name: measured[name])
    batch = model._batches[2]
    for slow, quick in (("graph", "mega"), ("mega", "graph")):
        batch.measured[False, False, False] = {slow: 2.0, quick: 1.0}
        assert model.generate_batch_ids(prompts, tokens=tokens, engine="auto") == wanted and model.stats.engine == quick


def test_refusals_of_batches(model: LanguageModel) -> None:
    cases: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ([], {}, "0 prompts for a batch"), ([[5]] * 9, {}, "9 prompts for a batch"), ("text", {}, "a text for a batch"), ([[5]], {"engine": "fast"}, "engine='fast' for a batch"),
        ([[5], [7]], {"tokens": [3]}, "tokens has 1 numbers, for 2 prompts"), ([[5], []], {}, "the prompt is empty"), ([[5], [1] * 50], {}, "the prompt has 50 tokens"),
    )  # fmt: skip
    for prompts, options, message in cases:
        with pytest.raises(tw.UserError, match=message):
            model.generate_batch_ids(prompts, **options)
