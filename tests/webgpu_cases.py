"""What a WebGPU device refuses: shared by tests and by the table of `docs/targets.md`."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.errors import TargetLimit

REFUSALS = ("it has no f64", "no atomic access of that size", "where not every thread of the block comes by", "does not know it", "this target cannot do")
"""Reasons that kernels of the tables may be refused for."""
ROUNDS_TWICE = {"horner", "unrolled", "n_body", "seven_points", "edges_of_an_image", "rays_and_a_sphere", "fused", "numbers_of_every_kind"}
"""Explicit kernels that the emulator computes with an `fma` that rounds once; WGSL and Vulkan do not promise that."""


def refusal(call: Callable[[], object]) -> str:
    """Why a call was refused before launch, with a target, a construct and a line; empty where it was made."""
    try:
        call()
    except TargetLimit as error:
        text = str(error)
        if not any(reason in text for reason in REFUSALS) or not error.diagnostics[0].span.line:
            raise
        return text
    return ""
