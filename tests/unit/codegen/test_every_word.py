"""Every word and operator of explicit kernels, for every dtype and target, becomes code or is refused at its line.

`TILEWRIGHT_EVERY_WORD=1` tries all spellings of each word for more targets and has NVIDIA's assembler read the PTX: 150 tests, a target and a dtype each, of about
half a minute (`-n` runs them side by side). `TILEWRIGHT_EVERY_WORD=sample` takes eight of them, other ones each day; `TILEWRIGHT_EVERY_WORD=sample:20261116` those of a day.
"""

from __future__ import annotations

import datetime
import os
import random
import re
from pathlib import Path

import pytest
from tests.word_cases import BODIES
from tests.word_matrix import chosen, failures

from tilewright.base.dtypes import SCALARS, DType, f32
from tilewright.codegen.nvptx.ptxas import ptxas_path
from tilewright.frontend.simt import printing, words_matrix, words_memory, words_warp  # noqa: F401 (they register words)
from tilewright.frontend.simt.words import CALLS

ASKED, _, SEED = os.environ.get("TILEWRIGHT_EVERY_WORD", "").partition(":")
EVERY = ASKED in ("1", "sample")
SEED = SEED or f"{datetime.date.today():%Y%m%d}"
TARGETS = ("cpu", "sm_75", "sm_80", "sm_90a", *(("x86-64-avx2", "x86-64-avx512", "aarch64-neon", "sm_89", "sm_100a", "sm_120") if EVERY else ()))
ALIASES = {"sync_threads", "max", "min"}
PARTS = {"fragment_a": "fragment_mma", "fragment_b": "fragment_mma", "fragment_store": "fragment_c", "wmma_load": "wmma_mma",
         "wmma_fill": "wmma_mma", "wmma_store": "wmma_mma", "tensor_map": "tma_load", "tma_store": "tma_load",
         "mbarrier_init": "mbarriers", "mbarrier_wait": "mbarriers", "mbarrier_expect": "bulk_load"}  # fmt: skip
"""Words that stand in the case of another."""


def test_every_word_has_a_case() -> None:
    tried = {word for word, _ in BODIES} | ALIASES
    # Vectors of `@tw.cpu` join the words once such a kernel was read in this process.
    words = [name for name in CALLS if not re.match(r"[fiub]\w*\d+x\d+", name)]
    assert {name for name in words if name not in tried and PARTS.get(name) not in tried} == set()
    for word, other in PARTS.items():
        assert any(f"tw.{word}(" in body for name, body in BODIES if name == other), word


def tried() -> list[tuple[str, tuple[DType, ...]]]:
    """Targets, and dtypes for each test."""
    if not EVERY:
        return [(target, SCALARS) for target in TARGETS]
    pairs = [(target, (dtype,)) for target in TARGETS for dtype in SCALARS]
    return random.Random(SEED).sample(pairs, 8) if ASKED == "sample" else pairs


@pytest.mark.parametrize(("target", "dtypes"), tried(), ids=lambda value: value if isinstance(value, str) else str(value[0]) if len(value) == 1 else "all")
def test_every_word_for_every_dtype(target: str, dtypes: tuple[DType, ...], tmp_path: Path) -> None:
    bad, made, refused = failures(tmp_path, target, chosen(EVERY), dtypes, assembled=EVERY)
    assert not bad, f"seed {SEED}\n" + "\n".join(f"{name}\n    {' '.join(message.split())[:300]}" for name, message in bad)
    assert made > 0 and refused > 0
    assert made > refused or len(dtypes) == 1


@pytest.mark.skipif(ptxas_path() is None, reason="there is no ptxas")
@pytest.mark.parametrize("target", ["sm_75", "sm_80"])
def test_cache_hints_are_spelled_in_a_version_that_has_them(target: str, tmp_path: Path) -> None:
    numbers = chosen(True, ("vload", "vstore", "copy_async", "prefetch"))
    bad, made, _ = failures(tmp_path, target, numbers, (f32,), assembled=True)
    assert not bad and made > 15
