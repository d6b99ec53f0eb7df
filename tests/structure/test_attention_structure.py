"""What is made of attention for Hopper: instructions, registers, and schedules by shape."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import kernels_attention as text
import tilewright as tw
from support import assemble
from tilewright.base.dtypes import bf16
from tilewright.base.target import parse_target
from tilewright.passes.choose_attention import attention_schedules
from tilewright.passes.schedule_matrix import MatrixSchedule, parse_schedule


def zeros(*shape: int, dtype: Any = bf16.numpy) -> np.ndarray:
    return np.zeros(shape, dtype)


def problem(name: str, rows: int, depth: int, heads: int = 2) -> tuple[tw.Kernel[..., Any], tuple[object, ...]]:
    q = zeros(1, heads, rows, depth)
    return {
        "plain": (text.plain, (q, q, q, 0.1)),
        "causal": (text.grouped_causal, (q, q, q, 0.1)),
        "ranged": (text.ranged, (q, q, q)),
        "masked": (text.masked, (q, q, q, zeros(rows, rows, dtype=np.uint8), 0.1)),
        "biased": (text.biased, (q, q, q, zeros(heads, rows, rows))),
        "logarithm": (text.with_logarithm, (q, q, q, 0.1)),
    }[name]


def chosen(name: str, rows: int, depth: int, heads: int = 2) -> MatrixSchedule:
    kernel, arguments = problem(name, rows, depth, heads)
    (schedule,) = kernel.stages(*arguments, target="sm_90a").stages.schedules
    assert isinstance(schedule, MatrixSchedule)
    return schedule


LARGE, SHORT = (192 * 8, 32), (512, 16)
"""Rows and heads."""


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize(
    ("name", "size"),
    [*((n, LARGE) for n in ("plain", "causal", "ranged", "masked", "biased", "logarithm")), ("plain", SHORT), ("causal", SHORT)],
)
def test_no_spills_and_no_waits_between_instructions(name: str, size: tuple[int, int], depth: int) -> None:
    kernel, arguments = problem(name, size[0], depth, size[1])
    ptx = kernel.compile(*arguments, target="sm_90a").code.decode()
    done = assemble(ptx, "sm_90a")
    assert done.spills == 0 and done.local == 0, done.log
    assert not re.search(r"C75\d\d|serializ", done.log), done.log


def test_the_weights_never_leave_their_registers() -> None:
    kernel, arguments = problem("plain", 512, 128)
    ptx = kernel.compile(*arguments, target="sm_90a").code.decode()
    # The second product takes its first operand from registers, the first adds to nothing.
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16 \{[^}]*\}, \{[^}]*\}, db, 1, 1, 1, 1;", ptx)
    assert re.search(r"wgmma\.mma_async[^;]*db, 0, 1, 1", ptx)
    # One instruction for each exponential and each step of a maximum: 64 of both in the first step and in each of two loops' bodies.
    assert ptx.count("ex2.approx.ftz.f32") >= 3 * 64 and ptx.count("max.NaN.f32") >= 3 * 64
    assert ptx.count("setp.nan") < 16


def test_many_rows_have_large_tiles_and_few_small_ones() -> None:
    assert chosen("plain", 1024, 128, 64).m == 128
    assert chosen("plain", 1536, 64, 64).m == 192
    assert chosen("plain", 64, 64).m == 64


def test_tiles_of_different_length_are_fetched_where_there_are_many() -> None:
    kernel, arguments = problem("causal", 2048, 128, 32)
    compiled = kernel.stages(*arguments, target="sm_90a").stages
    assert [call.kernel.name for call in compiled.thread.calls] == ["grouped_causal.zero", "grouped_causal"]
    large = compiled.schedules[1]
    assert isinstance(large, MatrixSchedule) and large.dynamic and large.raster == 32
    small = chosen("causal", 512, 64, 12)
    assert not small.dynamic and small.raster == 12


def test_short_rows_leave_shared_memory_at_once_or_have_deep_rings() -> None:
    assert chosen("plain", 512, 128, 32).a_copy == "registers"
    assert chosen("plain", 4096, 128, 32).a_copy == "tma"
    assert chosen("plain", 512, 64, 32).stages == 4


def test_schedules_parse_back() -> None:
    for depth in (64, 128, 256):
        schedule = chosen("plain", 256, depth)
        assert parse_schedule(schedule.describe()) == schedule


def test_other_targets_have_none() -> None:
    kernel, arguments = problem("plain", 64, 64)
    loop = kernel.stages(*arguments, target="sm_90a").stages.loop.calls[0].kernel
    assert attention_schedules(loop, parse_target("sm_90a"), {})
    assert not attention_schedules(loop, parse_target("sm_80"), {})
