"""Random explicit kernels give the same on the CPU as on the emulator."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from simt_programs import LENGTH, kernel_source

BLOCKS = 2


def outcome(path: Path, threads: int, device: str) -> list[np.ndarray]:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    rng = np.random.default_rng(5)
    x, y = rng.integers(-99, 100, LENGTH).astype(np.int32), rng.integers(-8, 9, LENGTH).astype(np.float32)
    arrays = [np.zeros((3, BLOCKS * threads), np.int32), np.zeros((2, BLOCKS * threads), np.float32), np.zeros(8, np.int32)]
    module.kernel[BLOCKS, threads](x, y, *arrays, device=device)
    return arrays


@pytest.mark.parametrize("seed", range(60))
def test_cpu_and_emulator_agree(seed: int, tmp_path: Path) -> None:
    source, threads = kernel_source(seed)
    path = tmp_path / f"fuzz_{seed}.py"
    path.write_text(source, encoding="utf-8")
    with np.errstate(all="ignore"):
        found, wanted = outcome(path, threads, "cpu"), outcome(path, threads, "emulator")
    for name, a, b in zip(("out", "reals", "counts"), found, wanted, strict=True):
        np.testing.assert_array_equal(a, b, f"{name} of\n{source}")
