"""What is made of attention for Hopper and for other GPUs: instructions, registers, and schedules by shape."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import kernels_attention as text
import tilewright as tw
from assembled import assemble
from tilewright.base.dtypes import bf16
from tilewright.base.target import parse_target
from tilewright.passes.choose.attention import attention_schedules
from tilewright.passes.schedules.attention import pitch
from tilewright.passes.schedules.matrix import MatrixSchedule
from tilewright.passes.schedules.text import parse_schedule


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
    *_, schedule = kernel.stages(*arguments, target="sm_90a").stages.schedules
    assert isinstance(schedule, MatrixSchedule)
    return schedule


LARGE, SHORT, MANY, LONGER, ODD = (192 * 8, 32), (512, 16), (512, 192), (1024, 512), (777, 64)
"""Rows and heads."""


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize(
    ("name", "size"),
    [*((n, LARGE) for n in ("plain", "causal", "ranged", "masked", "biased", "logarithm")),
     *((n, s) for n in ("plain", "causal") for s in (SHORT, MANY, LONGER, ODD)), ("masked", MANY)],
)  # fmt: skip
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


def test_short_rows_leave_shared_memory_at_once() -> None:
    assert chosen("plain", 512, 128, 32).a_copy == "rs"
    assert chosen("plain", 4096, 128, 32).a_copy == "tma"


@pytest.mark.parametrize("name", ["plain", "causal"])
def test_rows_with_few_keys_and_columns_have_blocks_apart(name: str) -> None:
    for heads in (96, 192):
        short = chosen(name, 512, 64, heads)
        assert (short.m, short.n, short.blocks, short.a_copy, short.pdl) == (64, 64, 3, "rs", True)
    longer = chosen(name, 1024, 64, 512)
    assert (longer.m, longer.n, longer.blocks) == (256, 64, 1)
    assert chosen(name, 4096, 128, 64).blocks == 1


def test_steps_are_as_long_as_keys_fill() -> None:
    assert chosen("plain", 777, 128, 64).n == 112
    assert chosen("plain", 1000, 128, 64).n == 128
    assert chosen("causal", 512, 128, 512).n == 64


def test_what_is_chosen_has_room() -> None:
    target = parse_target("sm_90a")
    for name in ("plain", "causal", "masked"):
        for depth in (64, 128, 256):
            for rows, heads in (SHORT, MANY, ODD, (64, 1)):
                assert chosen(name, rows, depth, heads).has_room(target), (name, depth, rows, heads)


def test_schedules_parse_back() -> None:
    for depth in (64, 128, 256):
        schedule = chosen("plain", 256, depth)
        assert parse_schedule(schedule.describe()) == schedule


def test_the_instructions_are_those_of_the_target() -> None:
    kernel, arguments = problem("plain", 64, 64)
    loop = kernel.stages(*arguments, target="sm_90a").stages.loop.calls[0].kernel
    families = {t: [s.family for s in attention_schedules(loop, parse_target(t), {})] for t in ("sm_90a", "sm_80", "sm_120", "sm_75")}
    assert families["sm_90a"][0] == "attention" and families["sm_90a"].count("attention_mma") == 1
    assert set(families["sm_80"]) == set(families["sm_120"]) == {"attention_mma"}
    assert not families["sm_75"]


# -- warp-level instructions --------------------------------------------------------------------------------------------


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize(
    ("name", "depth", "target"),
    [
        *((n, d, "sm_80") for n in ("causal", "masked", "biased") for d in (32, 64, 96, 128, 256)),
        *((n, 96, "sm_80") for n in ("plain", "ranged", "logarithm")),
        ("causal", 96, "sm_86"),
        *((n, d, t) for n in ("causal", "masked") for d in (64, 128, 256) for t in ("sm_89", "sm_120")),
    ],
)
def test_warps_do_not_spill(name: str, depth: int, target: str) -> None:
    kernel, arguments = problem(name, 2048, depth, 16)
    done = assemble(kernel.compile(*arguments, target=target).code.decode(), target)
    assert done.spills == 0 and done.local == 0, done.log


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_hopper_takes_them_where_asked(name: str) -> None:
    kernel, arguments = problem(name, 2048, 128, 16)
    given = "family=attention_mma m=64 n=64 k=128 stages=2 warps_m=4 persistent=0 a_copy=rs head_dim_v=128"
    ptx = tw.kernel(schedule=given)(kernel.python).compile(*arguments, target="sm_90a").code.decode()
    done = assemble(ptx, "sm_90a")
    assert done.spills == 0 and done.local == 0, done.log
    assert "wgmma" not in ptx and "mma.sync" in ptx


def test_a_step_of_warp_instructions_has_little_beside_them() -> None:
    """64 keys, 128 terms and columns: 8 x 8 and 4 x 16 products of 16 rows, each operand read by one instruction for two of them."""
    kernel, arguments = problem("plain", 2048, 128, 16)
    given = "family=attention_mma m=64 n=64 k=128 stages=2 warps_m=4 persistent=0 a_copy=rs head_dim_v=128"
    ptx = tw.kernel(schedule=given)(kernel.python).compile(*arguments, target="sm_80").code.decode()
    # Two loops would be there, one with conditions, if the keys were not a multiple of 64.
    assert ptx.count("mma.sync.aligned.m16n8k16") == 128
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4.shared") == 32 + 8 and ptx.count("ldmatrix.sync.aligned.m8n8.x4.trans") == 32
    assert ptx.count("ex2.approx.ftz.f32") == 32 + 2 and ptx.count("cvt.rn.bf16x2.f32") == 16 + 32
    # Addresses are a register and a constant.
    assert len(set(re.findall(r"ldmatrix[^;]*\[(%\w+)", ptx))) == 3
    # One barrier before the loop and one in it; nothing but the ring is in shared memory.
    assert ptx.count("bar.sync") == 2 and ptx.count("cp.async.wait_group") == 3


def test_rows_of_shared_memory_lie_in_different_banks() -> None:
    for columns in range(16, 257, 16):
        # Eight rows of 16 bytes, read at once.
        assert len({row * pitch(columns) * 2 // 16 % 8 for row in range(8)}) == 8


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize("depth", [32, 64, 128, 256])
def test_what_is_listed_fits_the_target(depth: int, target: str) -> None:
    kernel, arguments = problem("plain", 256, depth)
    loop = kernel.stages(*arguments, target=target).stages.loop.calls[0].kernel
    found = attention_schedules(loop, parse_target(target), {})
    assert found and all(parse_schedule(s.describe()) == s for s in found)
    assert all(s.has_room(parse_target(target)) for s in found)
    assert all(2 * s.shared_elements <= parse_target(target).max_shared for s in found)
