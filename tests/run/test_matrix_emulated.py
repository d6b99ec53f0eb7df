"""Contractions for GPUs, executed by the emulator at the tile and the thread stage, against float64: every kernel of the table,
odd and zero sizes, views, NaN and infinity at edges, and schedules nobody would choose for these sizes.

Each kernel runs at one of its sizes, another one for each target. `TILEWRIGHT_ALL_SIZES=1` runs every kernel at all of them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from kernels_matrix import BY_NAME, MATRIX_CASES, PLAIN, Arrays, MatrixCase, Sizes, again, on, product_kernel
from support import as_wide
from tilewright.base.dtypes import bf16
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.passes.schedules.matrix import MatrixSchedule
from tilewright.passes.schedules.text import parse_schedule

DIVIDED = product_kernel("nk", dtype="tw.f32", term="tw.cast({a} / r[p], tw.bf16) * {b}", extra=", r")
EVERY_SIZE = bool(os.environ.get("TILEWRIGHT_ALL_SIZES"))
STAGES = ("tile", "thread")


def run_stages(kernel: tw.Kernel[..., Any], target: str, arguments: Arrays) -> dict[str, np.ndarray]:
    """The result at both stages of one compilation."""
    stages = kernel.stages(*arguments, target=target).stages
    inputs = {name: np.ascontiguousarray(a) for name, a in kernel.bound(*arguments).items()}
    found = {stage: run_program(getattr(stages, stage), inputs) for stage in STAGES}
    (name,) = found["tile"]
    return {stage: outputs[name] for stage, outputs in found.items()}


def check(case: MatrixCase, target: str, sizes: Sizes, kernel: tw.Kernel[..., Any] | None = None) -> dict[str, np.ndarray]:
    arguments = case.arguments(sizes)
    found = run_stages(kernel or case.kernel, target, arguments)
    for stage, result in found.items():
        case.compare(result, arguments, sizes, f"for {target} at the {stage} stage")
    return found


def some(case: MatrixCase, target: str) -> tuple[Sizes, ...]:
    if EVERY_SIZE:
        return case.sizes
    start = 0 if target == "sm_90a" else 3
    return (case.sizes[(MATRIX_CASES.index(case) + start) % len(case.sizes)],)


@pytest.mark.parametrize("case", MATRIX_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_the_table(case: MatrixCase, target: str) -> None:
    for sizes in some(case, target):
        check(case, target, sizes)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_zero_sizes(target: str) -> None:
    for number, case in enumerate(MATRIX_CASES if EVERY_SIZE else MATRIX_CASES[::2] if target == "sm_90a" else MATRIX_CASES[1::4]):
        for sizes in case.empty if EVERY_SIZE or number < 1 else (case.empty[number % len(case.empty)],):
            check(case, target, sizes)


# -- schedules ------------------------------------------------------------------------------------------------------

WGMMA = {
    "cooperative": "family=wgmma m=128 n=256 k=64 stages=4 math_warpgroups=2",
    "turns": "family=wgmma m=128 n=128 k=64 stages=6 math_warpgroups=2 pingpong=1 mma_in_flight=1",
    "three buffers": "family=wgmma m=128 n=192 k=64 stages=4 math_warpgroups=2 pingpong=1 mma_in_flight=1 epilogue_stages=3",
    "three groups": "family=wgmma m=192 n=192 k=64 stages=4 math_warpgroups=3 epilogue_stages=1",
    "cluster": "family=wgmma m=192 n=192 k=64 stages=4 math_warpgroups=3 epilogue_stages=1 cluster=2",
    "small cluster": "family=wgmma m=64 n=64 k=64 stages=4 cluster=2",
    "parts": "family=wgmma m=64 n=128 k=64 stages=3 math_warpgroups=2 pingpong=1 mma_in_flight=1 split_k=3",
    "parts, direct": "family=wgmma m=64 n=32 k=64 stages=8 split_k=3 store=direct",
    "shared sum": "family=wgmma m=64 n=32 k=64 stages=4 cluster_k=2 store=direct",
    "shared once": "family=wgmma m=64 n=8 k=64 stages=4 swap_ab=1 cluster_k=2 persistent=0 store=direct pdl=1",
    "shared by four": "family=wgmma m=128 n=16 k=64 stages=3 math_warpgroups=2 cluster_k=4 swap_ab=1 store=direct",
    "shared in turns": "family=wgmma m=64 n=64 k=64 stages=3 math_warpgroups=2 pingpong=1 mma_in_flight=1 cluster_k=2",
    "shared by eight": "family=wgmma m=64 n=128 k=64 stages=3 cluster_k=8",
    "stream": "family=wgmma m=64 n=64 k=64 stages=3 stream_k=1",
    "stream, direct": "family=wgmma m=128 n=16 k=64 stages=3 math_warpgroups=2 stream_k=1 swap_ab=1 store=direct",
    "swap": "family=wgmma m=64 n=32 k=64 stages=8 swap_ab=1",
    "swap, direct": "family=wgmma m=128 n=16 k=64 stages=8 math_warpgroups=2 swap_ab=1 store=direct",
    "direct": "family=wgmma m=128 n=64 k=64 stages=8 math_warpgroups=2 store=direct",
    "one stage": "family=wgmma m=64 n=64 k=64 stages=1",
    "row by row": "family=wgmma m=64 n=64 k=64 stages=3 raster=1",
    "a block a tile": "family=wgmma m=64 n=64 k=64 stages=3 persistent=0",
}
MMA = {
    "two by two": "family=mma m=64 n=64 k=32 stages=4 warps_m=2 warps_n=2 persistent=0",
    "wide": "family=mma m=128 n=64 k=32 stages=3 warps_m=2 warps_n=2 persistent=0",
    "one warp": "family=mma m=32 n=32 k=32 stages=2 persistent=0",
}
ALIGNED: Sizes = (72, 200, 328)
"""The copy engine reads operands of this size as they are."""
PACKED: Sizes = (65, 67, 201)
"""None of these."""


def followed(kernel: tw.Kernel[..., Any], arguments: Arrays, target: str = "sm_90a") -> list[MatrixSchedule]:
    """The schedules the kernel's contractions have."""
    chosen = kernel.stages(*arguments, target=target).stages.schedules
    return [s for s in chosen if isinstance(s, MatrixSchedule)]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((n, ALIGNED) for n in WGMMA), *((n, PACKED) for n in ("cooperative", "turns", "cluster", "parts", "swap", "direct"))],
)
def test_schedules_of_warp_group_instructions(name: str, sizes: Sizes) -> None:
    case = BY_NAME["nk_bf16" if sizes is ALIGNED else "kn_bf16"]
    kernel = again(case.kernel, schedule=WGMMA[name])
    check(case, "sm_90a", sizes, kernel)
    (chosen,) = followed(kernel, case.arguments(sizes))
    ways = {chosen.a_copy, chosen.b_copy}
    assert ways == ({"tma"} if sizes is ALIGNED else {"pack"})
    assert replace(chosen, a_copy="tma", b_copy="tma", split_k=1) == replace(parse_schedule(WGMMA[name]), split_k=1)


@pytest.mark.parametrize("name", ["shared sum", "shared once", "shared in turns", "stream"])
@pytest.mark.parametrize("k", [0, 8, 64, 136])
def test_shared_sums_of_few_steps(name: str, k: int) -> None:
    """None at all, or fewer than blocks to share them."""
    case = BY_NAME["nk_bf16"]
    check(case, "sm_90a", (9, 72, k), again(case.kernel, schedule=WGMMA[name]))


REGISTERS = {
    "together": "m=128 n=64 stages=3 math_warpgroups=2",
    "in turns": "m=128 n=64 stages=4 math_warpgroups=2 pingpong=1",
    "two stages": "m=64 n=64 stages=2",
    "three groups": "m=192 n=64 stages=2 math_warpgroups=3",
    "parts": "m=64 n=16 stages=4 split_k=2 store=direct",
}
COMPUTED = {
    "dequantised_rows": True, "dequantised_groups_of_64": True, "dequantised_groups_of_128": True, "cast_to_bf16": False,
    "scaled_columns_of_the_first": False, "scaled_rows_tf32": False, "kn_tf32": True,
}  # fmt: skip
"""Cases one of whose factors is computed, and whether it is the second."""


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("schedule", REGISTERS)
def test_factors_computed_in_registers(name: str, schedule: str) -> None:
    """Nothing is packed, and the results are the same to the last bit as with the factor packed first."""
    case, swap = BY_NAME[name], COMPUTED[name]
    number = 2 * list(COMPUTED).index(name) + list(REGISTERS).index(schedule)
    sizes = ((72, 136, 256), (130, 72, 336), (8, 200, 16))[number % 3]
    k = 32 if case.precision == "tf32" else 64
    text = f"family=wgmma {REGISTERS[schedule]} k={k} swap_ab={int(swap)}"
    kernel = again(case.kernel, case.precision, f"{text} a_copy=rs")
    found = check(case, "sm_90a", sizes, kernel)
    (chosen,) = followed(kernel, case.arguments(sizes))
    assert (chosen.a_copy, chosen.b_copy) == ("rs", "tma")
    packed = check(case, "sm_90a", sizes, again(case.kernel, case.precision, text))
    np.testing.assert_array_equal(found["thread"].view(np.uint8), packed["thread"].view(np.uint8))


def test_infinity_and_nan_beyond_the_sum_stay_out_of_registers() -> None:
    """Where a step reaches beyond the sum, scales are 0 and 1 / 0 is not: nothing of that may count."""
    kernel = again(DIVIDED, schedule="family=wgmma m=64 n=64 k=64 stages=2 a_copy=rs")
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((40, 80)).astype(bf16.numpy) for _ in range(2))
    r = np.exp2(rng.integers(-3, 3, 80)).astype(np.float32)
    want = (as_wide(a) / r) @ as_wide(b).T
    for result in run_stages(kernel, "sm_90a", (a, b, r)).values():
        np.testing.assert_allclose(as_wide(result), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layout", ["kn", "tn", "tt"])
def test_operands_that_lie_across_the_sum_come_as_they_are(layout: str) -> None:
    case = BY_NAME[f"{layout}_f16"]
    kernel = again(case.kernel, schedule=WGMMA["turns"])
    check(case, "sm_90a", ALIGNED, kernel)
    (chosen,) = followed(kernel, case.arguments(ALIGNED))
    assert (chosen.a_copy, chosen.b_copy) == ("tma", "tma")


@pytest.mark.parametrize("extent", [3000, 8192])
@pytest.mark.parametrize("name", ["kn_f16", "nk_f16", "tn_f16", "tt_f16", "into_columns"])
def test_what_is_chosen_for_large_sizes_is_right_at_small_ones(name: str, extent: int) -> None:
    case = BY_NAME[name]
    large = np.empty((extent, extent), case.arguments((1, 1, 1))[0].dtype)
    (chosen,) = followed(case.kernel, (large, large))
    check(case, "sm_90a", (200, 232, 72), again(case.kernel, schedule=chosen.describe()))


@pytest.mark.parametrize(
    "name", ["bias_gelu_residual", "scaled_rows_and_columns", "batched_rows_bf16", "nk_bf16_to_f32", "into_columns"]
)
@pytest.mark.parametrize("schedule", ["turns", "cluster", "swap, direct", "shared in turns", "stream"])
def test_schedules_finish_results_in_every_way(name: str, schedule: str) -> None:
    case = BY_NAME[name]
    sizes = (2, 130, 67, 72) if name.startswith("batched") else (130, 67, 72)
    check(case, "sm_90a", sizes, again(case.kernel, schedule=WGMMA[schedule]))


@pytest.mark.parametrize(
    "schedule",
    ["", " math_warpgroups=2 pingpong=1 mma_in_flight=1", " cluster=2", " store=direct", " cluster_k=2", " cluster_k=4 math_warpgroups=2 pingpong=1", " stream_k=1"],
    ids=["together", "in turns", "cluster", "direct", "shared sum", "shared by four, in turns", "stream"],
)
def test_blocks_that_compute_many_tiles(schedule: str) -> None:
    """On a GPU that is too small: more than two tiles for each multiprocessor, the last ones not for all."""
    case, sizes = BY_NAME["nk_f16"], (64 * 3 + 1, 16 * 3 + 3, 136)
    small = replace(parse_target("sm_90a"), multiprocessors=4)
    kernel = again(case.kernel, schedule=f"family=wgmma m=64 n=16 k=64 stages=2{schedule}")
    for stage in STAGES:
        case.check(on(kernel, emulator_device(stage, small)), sizes, f"at the {stage} stage")


FETCHED = {
    "in turns": "m=128 n=128 k=64 stages=2 math_warpgroups=2 pingpong=1 mma_in_flight=1",
    "three buffers": "m=128 n=192 k=64 stages=2 math_warpgroups=2 pingpong=1 mma_in_flight=1 epilogue_stages=3",
    "a whole tile": "m=128 n=128 k=64 stages=2 math_warpgroups=2 pingpong=1 mma_in_flight=1 epilogue_stages=4",
    "one buffer": "m=64 n=128 k=64 stages=2 epilogue_stages=1",
    "together": "m=128 n=256 k=64 stages=2 math_warpgroups=2",
    "a block a tile": "m=64 n=64 k=64 stages=2 persistent=0",
    "cluster": "m=64 n=64 k=64 stages=2 cluster=2",
    "cluster in turns": "m=128 n=128 k=64 stages=2 math_warpgroups=2 pingpong=1 mma_in_flight=1 cluster=2",
}


@pytest.mark.parametrize("schedule", FETCHED)
def test_an_array_of_the_results_own_size_comes_by_the_copy_engine(schedule: str) -> None:
    """On a GPU that is too small: each group finishes several tiles, the last of them at an edge."""
    case, sizes = BY_NAME["gelu_and_residual"], (200, 264, 72)
    small = replace(parse_target("sm_90a"), multiprocessors=2)
    kernel = again(case.kernel, schedule=f"family=wgmma {FETCHED[schedule]}")
    case.check(on(kernel, emulator_device("thread", small)), sizes)
    assert fetches(kernel, case.arguments(sizes))


@pytest.mark.parametrize(("name", "is_fetched"), [("residual_f32", True), ("residual_across", False), ("bias_gelu_residual", False)])
def test_what_does_not_lie_as_the_results_do_is_loaded(name: str, is_fetched: bool) -> None:
    case, sizes = BY_NAME[name], (136, 136, 72)
    kernel = again(case.kernel, schedule=f"family=wgmma {FETCHED['in turns']}")
    check(case, "sm_90a", sizes, kernel)
    assert fetches(kernel, case.arguments(sizes)) is is_fetched


@pytest.mark.parametrize("schedule", ["in turns", "together", "cluster"])
@pytest.mark.parametrize("name", ["gelu_and_residual", "scaled_rows_and_columns", "bias_gelu_residual", "residual_across"])
def test_pieces_that_are_inside_or_outside_as_a_whole(name: str, schedule: str) -> None:
    """Extents of whole pieces, not of whole tiles."""
    case = BY_NAME[name]
    check(case, "sm_90a", (192, 320, 72), again(case.kernel, schedule=f"family=wgmma {FETCHED[schedule]}"))


def fetches(kernel: tw.Kernel[..., Any], arguments: Arrays) -> bool:
    """Whether the epilogue has something brought by the copy engine."""
    (call,) = kernel.stages(*arguments, target="sm_90a").stages.thread.calls
    return sum(op.opcode == "tensor_map" for op in walk(call.kernel.body)) == 4


@pytest.mark.parametrize(("target", "name"), [*(("sm_80", name) for name in MMA), ("sm_90a", "two by two")])
def test_schedules_of_warp_instructions(name: str, target: str) -> None:
    for case, sizes in ((BY_NAME["nk_bf16"], ALIGNED), (BY_NAME["bias_gelu_residual"], PACKED)):
        kernel = again(case.kernel, schedule=MMA[name])
        check(case, target, sizes, kernel)
        assert followed(kernel, case.arguments(sizes), target) == [parse_schedule(MMA[name])]


# -- views, outputs, repetition ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_views(target: str) -> None:
    case, sizes = BY_NAME["kn_bf16"], (33, 31, 65)
    a, b = case.arguments(sizes)
    views = {
        "every second": (np.repeat(a, 2, axis=1)[:, ::2], np.repeat(b, 3, axis=0)[::3]),
        "backwards": (a[::-1, ::-1], b[::-1, ::-1]),
        "transposed": (np.asfortranarray(a), np.asfortranarray(b)),
        "from the middle": (np.pad(a, 3)[3:-3, 3:-3], np.pad(b, 1)[1:-1, 1:-1]),
        "one row for all": (np.broadcast_to(a[:1], a.shape), b),
    }
    for name, given in views.items():
        found = on(case.kernel, emulator_device("thread", parse_target(target)))(given)
        case.compare(np.asarray(found), given, sizes, f"{name}, for {target}")


def test_an_output_that_is_given_is_filled() -> None:
    case, sizes = BY_NAME["nk_bf16"], (17, 33, 40)
    a, b = case.arguments(sizes)
    out = np.full((17, 33), np.nan, bf16.numpy)
    device = emulator_device("thread", parse_target("sm_90a"))
    assert case.kernel.runner.run({"a": a, "b": b}, device, out) is out
    case.compare(out, (a, b), sizes)


@pytest.mark.parametrize("schedule", ["turns", "parts", "cluster", "shared by four", "stream"])
def test_the_same_bits_every_time(schedule: str) -> None:
    case = BY_NAME["nk_bf16_to_f32"]
    kernel = again(case.kernel, schedule=WGMMA[schedule])
    first, second = (run_stages(kernel, "sm_90a", case.arguments((65, 30, 328)))["thread"] for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))


# -- NaN and infinity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", ["kn_bf16", "nk_bf16", "tn_f16", "kn_f32", "nk_tf32", "nk_3xtf32", "kn_f64", "bias"])
def test_nan_and_infinity_reach_their_row_or_column_only(name: str, target: str) -> None:
    """At the last row, column and term, beside which copies read zeros or nothing at all."""
    case, sizes = BY_NAME[name], (35, 67, 43)
    arguments = case.arguments(sizes)
    a, b = arguments[:2]
    rows = a.T if name.startswith("tn") else a
    columns = b if name.startswith(("kn", "tn")) else b.T
    rows[34, 42], rows[0, 0], columns[42, 66] = np.nan, np.inf, -np.inf
    for stage, result in run_stages(case.kernel, target, arguments).items():
        wide = result.astype(np.float64)
        reached = np.zeros(wide.shape, bool)
        reached[34], reached[0], reached[:, 66] = True, True, True
        assert np.isnan(wide[34]).all(), stage
        assert not np.isfinite(wide[reached]).any(), stage
        assert np.isfinite(wide[~reached]).all(), f"{stage}: {np.argwhere(~np.isfinite(wide) & ~reached)[:3].tolist()}"
        # Infinity is infinity, not NaN, and has its sign: what is added to it is finite.
        signs = -np.sign(rows[1:34, 42].astype(np.float64))
        np.testing.assert_array_equal(wide[1:34, 66], signs * np.inf, err_msg=stage)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", ["batched_bf16", "batched_rows_bf16", "batched_f32"])
def test_one_matrix_of_a_batch_does_not_reach_the_next(name: str, target: str) -> None:
    case = BY_NAME[name]
    for sizes in ((3, 35, 19, 24), (3, 17, 33, 13)):
        arguments = case.arguments(sizes)
        arguments[0][1], arguments[1][1] = np.nan, np.inf
        for stage, result in run_stages(case.kernel, target, arguments).items():
            wide = result.astype(np.float64)
            assert np.isnan(wide[1]).all(), stage
            assert np.isfinite(wide[[0, 2]]).all(), stage


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", ["conv_nhwc_s1p1d1_bf16", "conv_nchw_s1p1d1_f32"])
def test_a_pixel_reaches_the_windows_it_is_in(name: str, target: str) -> None:
    """Pixels at borders: neither the next row nor the next image sees them."""
    case, sizes = BY_NAME[name], (3, 32 if "nhwc" in name else 5, 5, 6, 8, 3, 3)
    arguments = case.arguments(sizes)
    x = arguments[0] if "nchw" in name else arguments[0].transpose(0, 3, 1, 2)
    x[1, -1, 4, 5] = x[2, 0, 0, 3] = np.nan
    want = np.isnan(case.expected(arguments))
    assert want.sum() == 8 * (4 + 6)
    for stage, result in run_stages(case.kernel, target, arguments).items():
        np.testing.assert_array_equal(np.isnan(result.astype(np.float64)), want, err_msg=stage)


ROWS = {
    "in turns": "m=128 n=128 k=64 stages=2 math_warpgroups=2 pingpong=1 mma_in_flight=1",
    "together": "m=128 n=256 k=64 stages=2 math_warpgroups=2",
    "three buffers": "m=128 n=192 k=64 stages=2 math_warpgroups=2 pingpong=1 mma_in_flight=1 epilogue_stages=3",
    "one group": "m=64 n=64 k=64 stages=2",
    "parts": "m=64 n=128 k=64 stages=2 math_warpgroups=2 pingpong=1 mma_in_flight=1 split_k=3",
}


@pytest.mark.parametrize("schedule", ROWS)
@pytest.mark.parametrize(
    ("name", "columns"),
    [("nk_bf16", 67), ("nk_bf16", 260), ("nk_f16", 2), ("nk_f16", 301), ("nk_bf16_to_f32", 131), ("bias_gelu_residual", 193), ("batched_rows_bf16", 99)],
)
def test_rows_of_results_that_begin_anywhere(name: str, columns: int, schedule: str) -> None:
    """On a GPU that is too small: warps store their rows through shared memory, several tiles one after the other, and nothing beyond the edges."""
    case = BY_NAME[name]
    sizes = (2, 77, columns, 72) if name.startswith("batched") else (150, columns, 72)
    small = replace(parse_target("sm_90a"), multiprocessors=2)
    kernel = again(case.kernel, schedule=f"family=wgmma {ROWS[schedule]}")
    case.check(on(kernel, emulator_device("thread", small)), sizes)
    *_, call = kernel.stages(*case.arguments(sizes), target="sm_90a").stages.thread.calls
    found = [op.opcode for op in walk(call.kernel.body)]
    if schedule != "parts":
        assert "warp_sync" in found and "tma_store" not in found


@pytest.mark.parametrize(("layout", "sizes"), [("kn", (21, 514, 70)), ("kn", (3, 518, 131)), ("nk", (12, 514, 1030)), ("kn", (514, 40, 66))])
def test_thin_products_whose_rows_are_words(layout: str, sizes: Sizes) -> None:
    """Rows begin at every second element of two bytes: threads bring words. NaN at the edges stays where it belongs."""
    m, n, k = sizes
    rng = np.random.default_rng(m)
    a = rng.standard_normal((m, k)).astype(bf16.numpy)
    b = rng.standard_normal((k, n) if layout == "kn" else (n, k)).astype(bf16.numpy)
    a[m - 1, k - 1] = np.nan
    (chosen,) = followed(PLAIN[layout], (a, b))
    assert chosen.family == "mma"
    exact = as_wide(a) @ (as_wide(b) if layout == "kn" else as_wide(b).T)
    for stage, result in run_stages(PLAIN[layout], "sm_90a", (a, b)).items():
        np.testing.assert_allclose(as_wide(result), exact, rtol=2e-2, atol=2e-1, err_msg=stage)
