"""The gallery, Python and ZynML, on the CPU and the emulator: what the demo shows is right."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tilewright as tw
from gallery_cases import CONTRACTION_CASES, GALLERY_CASES, ZYN_CASES, GalleryCase, ZynCase
from support import as_wide, assert_close
from tilewright.base.dtypes import from_numpy

DEVICES = ("cpu", "emulator:thread")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*GALLERY_CASES, *CONTRACTION_CASES], ids=lambda case: case.name)
def test_python_kernels(case: GalleryCase, device: str) -> None:
    for elements in (1, 1000) if device != "cpu" else (1, 1000, 100_000):
        case.check(device, case.arguments(elements))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("example", ZYN_CASES, ids=lambda example: example.name)
def test_zyn_programs(example: ZynCase, device: str) -> None:
    inputs = example.make(np.random.default_rng(0), 1000)
    result = tw.load(example.path).run(**inputs, device=device)[example.result]
    want = example.reference(*(as_wide(v) if isinstance(v, np.ndarray) else v for v in inputs.values()))
    dtype = from_numpy(np.asarray(result).dtype)
    assert dtype is not None
    assert_close(result, want, dtype, 32, 32 * np.ones_like(as_wide(want)), example.name)


@pytest.mark.parametrize("case", CONTRACTION_CASES, ids=lambda case: case.name)
def test_contractions_are_recognised(case: GalleryCase) -> None:
    """Each is scheduled as one on every kind of device, and halves go to Hopper's matrix units."""
    for target, families in (("x86-64-avx2", {"cpu"}), ("sm_80", {"mma", "fma"}), ("sm_90a", {"wgmma", "mma", "fma"})):
        schedule = case.kernel.compile(*case.arguments(), target=target).schedule
        found = set(re.findall(r"family=(\w+)", schedule))
        assert len(found) == 1 and found <= families, f"{target}: {schedule}"
        if target == "sm_90a" and case.name.endswith("f16"):
            assert found == {"wgmma"}, schedule
