"""Explicit kernels on a GPU: every construct against NumPy, device arrays in place, both launches, streams and aliasing."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from simt_constructs import CASES, check
from tilewright.runtime.device_array import DeviceArray

pytestmark = pytest.mark.requires("cuda")


@pytest.mark.parametrize("name", CASES)
def test_construct(name: str) -> None:
    kernel, launch, arguments, _ = CASES[name]
    given = arguments()
    kernel[launch](*given, device="cuda")
    check(name, given)


@pytest.mark.parametrize("name", CASES)
def test_construct_on_device_arrays(name: str) -> None:
    kernel, launch, arguments, _ = CASES[name]
    given = [tw.to_device(a, "cuda") if isinstance(a, np.ndarray) else a for a in arguments()]
    for _ in range(2):
        kernel[launch](*given)
        if name in ("saxpy", "counted", "mixed"):
            break  # these add to what is there
    check(name, [a.numpy() if isinstance(a, DeviceArray) else a for a in given])
