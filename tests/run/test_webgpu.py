"""The tables of kernels on a WebGPU device: what is not refused, with target, construct and line, is right."""

from __future__ import annotations

import os

import numpy as np
import pytest

import tilewright as tw
from gallery_cases import CONTRACTION_CASES, GALLERY_CASES
from kernel_table import CASES, Case
from simt_constructs import CASES as CONSTRUCTS
from simt_constructs import check
from simt_kernels import Case as ExplicitCase
from simt_kernels import all_cases, assert_equal, outcome
from webgpu_cases import ROUNDS_TWICE, refusal
from zyn_cases import CASES as ZYN
from zyn_cases import Case as ZynProgram
from zyn_cases import close

pytestmark = pytest.mark.requires("webgpu")
GALLERY = {case.name: case for case in (*GALLERY_CASES, *CONTRACTION_CASES)}
WHOLE = os.environ.get("TILEWRIGHT_WHOLE_TABLE") == "1"
"""Whether kernels run with all shapes of the table, and all programs, not one and a few."""
REFUSED_CONSTRUCTS = {"maths", "mixed", "warps"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table(case: Case) -> None:
    for shape in case.shapes if WHOLE else case.shapes[-1:]:
        refused = refusal(lambda shape=shape: case.check("webgpu", shape))  # type: ignore[misc]
        assert not refused or "64" in refused


@pytest.mark.parametrize("elements", [1, 77])
@pytest.mark.parametrize("name", GALLERY)
def test_gallery(name: str, elements: int) -> None:
    case = GALLERY[name]
    case.check("webgpu", case.arguments(elements))


@pytest.mark.parametrize("one", all_cases(), ids=str)
def test_explicit(one: ExplicitCase) -> None:
    got: list[np.ndarray] = []
    if refusal(lambda: got.extend(outcome(one, "webgpu"))):
        return
    if one.name in ROUNDS_TWICE:
        for mine, want in zip(got, outcome(one, "emulator"), strict=True):
            np.testing.assert_allclose(mine, want, rtol=2e-5, atol=1e-5)
        return
    assert_equal(got, outcome(one, "emulator"), one.ulp, one.name)


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_constructs(name: str) -> None:
    kernel, launch, arguments, _ = CONSTRUCTS[name]
    given = arguments()
    if refusal(lambda: kernel[launch](*given, device="webgpu")):
        assert name in REFUSED_CONSTRUCTS
        return
    check(name, given)


@pytest.mark.parametrize("case", [case for case in ZYN if WHOLE or case.name in ("softmax", "transformer")], ids=str)
def test_program(case: ZynProgram) -> None:
    inputs = case.inputs(1)
    module = tw.load(case.path)
    for _ in range(2):
        found = module.run(device="webgpu", **inputs)
        for name, wanted in case.references(inputs).items():
            close(found[name], wanted, case.tolerance, name)


def test_a_grid_of_many_blocks() -> None:
    """More blocks than a dimension has: they are folded over two."""

    @tw.gpu
    def count(y: tw.GpuBuffer[tw.i32], n: tw.i32):  # type: ignore[no-untyped-def]
        i = tw.gpu_thread_id()
        if i < n:
            y[i] = y[i] + i

    y = np.zeros(70_001, np.int32)
    count[70_001, 1](y, len(y), device="webgpu")
    np.testing.assert_array_equal(y, np.arange(len(y)))
