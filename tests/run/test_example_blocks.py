"""The example kernels made of kernels, in Python and ZynML, on the CPU and in the emulator, against float64; and what of them is fused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw

PATH = Path(__file__).parents[2] / "examples" / "blocks.py"
_SPECIFICATION = importlib.util.spec_from_file_location("example_blocks", PATH)
assert _SPECIFICATION is not None and _SPECIFICATION.loader is not None
MODULE = importlib.util.module_from_spec(_SPECIFICATION)
sys.modules["example_blocks"] = MODULE
_SPECIFICATION.loader.exec_module(MODULE)
ALL = (*MODULE.BLOCKS, MODULE.LONGER)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("name", [block.name for block in ALL])
def test_blocks_against_float64(name: str, device: str) -> None:
    block = next(b for b in ALL if b.name == name)
    for number in (1, 3000) if device == "cpu" else (100,):
        inputs = block.make(np.random.default_rng(number), number)
        if isinstance(block.program, Path):
            found = tw.load(block.program).run(**inputs, device=device)[block.result]
        else:
            found = block.program(*inputs.values(), device=device)
        wide = [x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in inputs.values()]
        expected = block.reference(*wide)
        for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True):
            scale = max(1.0, float(np.abs(other).max(initial=0)))
            assert np.abs(np.asarray(one, np.float64) - other).max(initial=0) <= block.tolerance * scale


@pytest.mark.parametrize(("name", "before", "after"), [("gelu_mlp", 3, 2), ("gated_mlp", 4, 3), ("residual_mlp", 5, 3)])
def test_how_many_launches_are_left(name: str, before: int, after: int) -> None:
    block = next(b for b in ALL if b.name == name)
    inputs = block.make(np.random.default_rng(0), 1 << 16)
    report = block.program.stages(*inputs.values(), target="sm_90a").fusion
    assert (report.before, report.after) == (before, after)
