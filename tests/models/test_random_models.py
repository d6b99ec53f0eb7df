"""Random models of every architecture against forwards in NumPy alone: odd sizes, grouped heads, windows, packed weights of several formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from models import reference
from models.random_models import RandomModel
from tilewright.models import generation

IDS = [1, 5, 33, 2, 66, 7, 12]
"""One chunk of a prompt. A prompt of a single token has none: tests that need only steps begin with that, since every graph is a few seconds of compilation."""
PACKED = (tw.q8_0, tw.q5_0, tw.q4_0, tw.bf16, tw.q4_1)
SMALL: dict[str, Any] = {"layers": 1, "width": 32, "heads": 3, "groups": 1, "depth": 10, "hidden": 64}


def made(architecture: str, **options: Any) -> RandomModel:
    return RandomModel(architecture, **SMALL | ({"window": 4, "layers": 6} if architecture == "gemma3" else {}) | options)


def check_tokens(random: RandomModel, ids: list[int], chosen: list[int], near: float) -> None:
    """Every token is the best one after those before it, or as good."""
    after = random.logits([*ids, *chosen])[len(ids) - 1 :]
    for row, token in zip(after, chosen, strict=False):
        assert row.max() - row[token] < near


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_packed_files_give_the_logits_of_the_reference(architecture: str, tmp_path: Path) -> None:
    random = made(architecture, formats=PACKED, **({"layers": 2} if architecture == "llama" else {}))
    changes: dict[str, Any] = {}
    if architecture == "llama":  # Llama 3: the file divides the angles of positions
        changes["factors"] = random.tensors["rope_freqs.weight"] = np.linspace(1, 8, random.depth // 2).astype(np.float32)
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="cpu", context=40, activations="exact")
    assert np.abs(model.logits(IDS) - random.logits(IDS, **changes)).max() < 1e-4
    if architecture == "gemma3":  # steps of one token go on from the caches that a chunk has filled, past the window
        check_tokens(random, IDS, list(model.generate_ids(IDS, tokens=5)), 1e-4)


def test_a_folder_gives_the_logits_of_the_reference(tmp_path: Path) -> None:
    """Folders turn halves of a head; positions are scaled as those of Llama 3."""
    random = made("llama", groups=3)
    said = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}
    turns = random.theta ** (-np.arange(0, random.depth, 2) / random.depth)
    smooth = np.clip((32 / (2 * np.pi / turns) - 1) / 3, 0, 1)
    factors = turns / ((1 - smooth) * turns / 8 + smooth * turns)
    model = tw.models.load(random.folder(tmp_path / "folder", said), device="cpu", context=16)
    assert np.abs(model.logits(IDS) - random.logits(IDS, factors=factors, pairs=False)).max() < 1e-4
    assert not model.has_tokenizer


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_folders_have_the_weights_and_shapes_of_files(architecture: str, tmp_path: Path) -> None:
    random = made(architecture)
    folder = tw.models.load(random.folder(tmp_path / "m"), device="cpu", context=40)
    file = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="cpu", context=40)
    assert file.shape.epsilon == pytest.approx(folder.shape.epsilon)  # f32 in files
    assert folder.shape == replace(file.shape, epsilon=folder.shape.epsilon)
    for name, array in random.weights.items():
        np.testing.assert_allclose(folder.weights(name), array, atol=1e-6)  # gains of Gemma are kept less 1
        np.testing.assert_array_equal(file.weights(name), array)


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_sentences_of_any_length_are_embedded(kind: str, tmp_path: Path) -> None:
    random = RandomModel("bert", layers=2 if kind == "gguf" else 1, width=32, hidden=64, depth=16, formats=(tw.q8_0, None) if kind == "gguf" else ())
    model = tw.models.load(random.gguf(tmp_path / "m.gguf") if kind == "gguf" else random.folder(tmp_path / "m"), device="cpu")
    texts = [[1, 2, 3], [5], list(range(1, 30)), [66, 65]]
    rows = np.stack([reference.bert(random.weights, random.shape(), ids, np.float64).mean(0) for ids in texts])
    if kind == "gguf":
        assert np.abs(model.embed(texts, normalize=False) - rows).max() < 1e-4
    else:
        assert np.abs(model.embed(texts) - rows / np.linalg.norm(rows, axis=1, keepdims=True)).max() < 1e-4
    assert model.embed([]).shape == (0, random.width)


def test_activations_of_eight_bits_are_close(tmp_path: Path) -> None:
    random = made("gemma3", formats=PACKED, layers=1)
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="cpu", context=24)
    assert model.activations == "q8"
    wanted = random.logits(IDS)
    assert 0 < np.abs(model.logits(IDS) - wanted).max() < 0.1 * np.abs(wanted).max()
    check_tokens(random, [1], list(model.generate_ids([1], tokens=4)), 0.1 * float(np.abs(wanted).max()))


def test_text_is_drawn_by_seed(tmp_path: Path) -> None:
    random = made("qwen2")
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="cpu", context=32)
    texts = ["".join(model.generate("", tokens=12, temperature=1.0, top_k=20, top_p=0.95, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    best = list(model.generate_ids([1], tokens=6, temperature=1.0, top_k=1, top_p=0.95, seed=5))
    check_tokens(random, [1], best, 1e-4)
    assert model.stats.tokens >= len(best)


def test_the_emulator_runs_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "CHUNKS", (2,))  # the caches have room for one chunk behind the context
    random = RandomModel("llama", layers=1, width=32, heads=2, groups=1, depth=8, hidden=32, words=35, formats=(tw.q8_0,))
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="emulator", context=2)
    assert model.activations == "exact"
    assert np.abs(model.logits([3, 4]) - random.logits([3, 4])).max() < 1e-4
