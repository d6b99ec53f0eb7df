"""A few hundred steps of the fuzzer of model files; TILEWRIGHT_MODEL_FILES says how many."""

from __future__ import annotations

import os

import pytest
from fuzz_model_files import fuzz

STEPS = int(os.environ.get("TILEWRIGHT_MODEL_FILES", "300"))


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_files_are_read_or_refused(kind: str) -> None:
    counts, failures, _ = fuzz(kind, 600.0, STEPS)
    assert not failures, failures[0]
    assert counts["read"] > STEPS // 20 and sum(counts.values()) - counts["read"] > STEPS // 5, counts
