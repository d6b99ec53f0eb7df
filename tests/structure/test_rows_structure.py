"""Rows that stay in registers: how often memory is read, and no spills."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from kernels_rows import CASES
from support import assemble

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}


@pytest.mark.parametrize(("name", "arrays"), [("softmax", 1), ("layer_norm", 3), ("rms_norm", 2), ("residual_norm_gate", 4)])
@pytest.mark.parametrize("length", [2048, 4096, 16384, 50257])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_element_is_loaded_once_and_nothing_spills(name: str, arrays: int, length: int, dtype: str) -> None:
    inputs = CASES[name].inputs(np.random.default_rng(0), 2, length, DTYPES[dtype])
    ptx = CASES[name].kernel.compile(*inputs, target="sm_90a").code.decode()
    assert "whole=True" in CASES[name].kernel.stages(*inputs, target="sm_90a").stages.schedules[0].describe()
    assert assemble(ptx, "sm_90a").spills == 0
    vector = 1 if length % 2 else 16 // np.dtype(DTYPES[dtype]).itemsize
    threads = int(re.search(r"\.reqntid (\d+)", ptx).group(1))  # type: ignore[union-attr]
    cluster = re.search(r"\.reqnctapercluster (\d+)", ptx)
    together = threads * vector * (int(cluster.group(1)) if cluster else 1)
    assert len(re.findall(r"ld\.global", ptx)) == arrays * -(-length // together)
