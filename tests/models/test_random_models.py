"""Random models of every architecture against forwards in NumPy alone: odd sizes, grouped heads, windows, packed weights of several formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from models import reference
from models.random_models import RandomModel

IDS = [1, 5, 33, 2, 66, 7, 7, 12, 31]
PACKED = (tw.q8_0, tw.q5_0, tw.q4_0, tw.bf16, tw.q4_1)


def made(architecture: str, **options: Any) -> RandomModel:
    return RandomModel(architecture, **({"window": 4} if architecture == "gemma3" else {}), **options)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_packed_files_give_the_logits_of_the_reference(architecture: str, tmp_path: Path) -> None:
    random = made(architecture, formats=PACKED, layers=3)
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="cpu", context=40, activations="exact")
    wanted = random.logits(IDS)
    assert np.abs(model.logits(IDS) - wanted).max() < 1e-4
    # The step of one token goes on from the caches that a chunk has filled, and agrees.
    best = list(model.generate_ids(IDS, tokens=5))
    ids = list(IDS)
    for token in best:
        after = random.logits(ids)[-1]
        assert after.max() - after[token] < 1e-4
        ids.append(token)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_folders_of_safetensors_are_the_same_models(architecture: str, tmp_path: Path) -> None:
    random = made(architecture)
    model = tw.models.load(random.folder(tmp_path / "m"), device="cpu", context=40)
    wanted = random.logits(IDS, pairs=False)  # folders turn halves
    assert np.abs(model.logits(IDS) - wanted).max() < 1e-4
    assert not model.has_tokenizer


def test_angles_of_llama_3_are_divided_by_the_file(tmp_path: Path) -> None:
    random = made("llama")
    factors = np.linspace(1, 8, random.depth // 2).astype(np.float32)
    random.tensors["rope_freqs.weight"] = factors
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="cpu", context=16)
    assert np.abs(model.logits(IDS) - random.logits(IDS, factors=factors)).max() < 1e-4
    said = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}
    del random.tensors["rope_freqs.weight"]
    turns = random.theta ** (-np.arange(0, random.depth, 2) / random.depth)
    waves = 2 * np.pi / turns
    smooth = np.clip((32 / waves - 1) / 3, 0, 1)
    factors = turns / ((1 - smooth) * turns / 8 + smooth * turns)
    model = tw.models.load(random.folder(tmp_path / "folder", said), device="cpu", context=16)
    assert np.abs(model.logits(IDS) - random.logits(IDS, factors=factors, pairs=False)).max() < 1e-4


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_sentences_of_any_length_are_embedded(kind: str, tmp_path: Path) -> None:
    random = RandomModel("bert", depth=16, formats=(tw.q8_0, None) if kind == "gguf" else ())
    model = tw.models.load(random.gguf(tmp_path / "m.gguf") if kind == "gguf" else random.folder(tmp_path / "m"), device="cpu")
    texts = [[1, 2, 3], [5], list(range(1, 30)), [66, 65]]
    rows = [reference.bert(random.weights, random.shape(), ids, np.float64).mean(0) for ids in texts]
    assert np.abs(model.embed(texts, normalize=False) - np.stack(rows)).max() < 1e-4
    vectors = model.embed(texts)
    assert np.abs(vectors - np.stack([r / np.linalg.norm(r) for r in rows])).max() < 1e-4
    assert model.embed([]).shape == (0, random.width)


def test_activations_of_eight_bits_are_close(tmp_path: Path) -> None:
    random = made("gemma3", formats=PACKED)
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="cpu", context=24)
    assert model.activations == "q8"
    wanted = random.logits(IDS)
    found = model.logits(IDS)
    assert 0 < np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()
    assert [t for t, _ in zip(model.generate_ids(IDS, tokens=4), range(4), strict=True)]


def test_text_is_drawn_by_seed(tmp_path: Path) -> None:
    model = tw.models.load(made("qwen2").gguf(tmp_path / "m.gguf"), device="cpu", context=32)
    texts = ["".join(model.generate("abc", tokens=12, temperature=1.0, top_k=20, top_p=0.95, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    best = "".join(model.generate("abc", tokens=12))
    assert best == "".join(model.generate("abc", tokens=12, temperature=1.0, top_k=1, seed=5))
    assert model.stats.tokens == len(list(model.generate_ids("abc", tokens=12)))


def test_the_emulator_runs_a_model(tmp_path: Path) -> None:
    random = RandomModel("llama", layers=1, width=32, heads=2, groups=1, depth=8, hidden=32, words=35, formats=(tw.q8_0,))
    model = tw.models.load(random.gguf(tmp_path / "m.gguf"), device="emulator", context=8)
    assert model.activations == "exact"
    assert np.abs(model.logits([3, 4]) - random.logits([3, 4])).max() < 1e-4
