"""What contractions become: the schedule the model chooses for a size and the instructions that gives; nothing is spilled."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
import pytest
from bench import contraction_kernels as kernels
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from assembled import assemble
from kernels_matrix import BY_NAME, PLAIN, again, product_kernel
from tilewright.base.dtypes import DType, bf16, f8e4m3, f16, f32, f64, i8
from tilewright.base.errors import UserError
from tilewright.base.sizes import product
from tilewright.base.target import parse_target
from tilewright.compile.build import llvm_text
from tilewright.ir.nodes import walk
from tilewright.passes.pipeline import TO_THREAD, TO_TILE
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import CpuPanels, MatrixSchedule, WarpProduct, Wgmma
from tilewright.passes.schedules.text import FAMILIES, OLD_COPIES, OLD_NAMES, in_new_words, parse_schedule

Chosen = MatrixSchedule | Schedule
Arguments = tuple[np.ndarray, ...]


def empty(*shape: int, dtype: DType = bf16) -> np.ndarray:
    """Memory that is never touched: only its form counts."""
    return np.empty(shape, dtype.numpy)


def linear(m: int, n: int, k: int, dtype: DType = bf16) -> Arguments:
    return empty(m, k, dtype=dtype), empty(n, k, dtype=dtype)


PROBLEMS: dict[str, tuple[tw.Kernel[..., Any], Callable[[], Arguments]]] = {
    "1024": (kernels.linear, lambda: linear(1024, 1024, 1024)),
    "2048": (kernels.linear, lambda: linear(2048, 2048, 2048)),
    "4096": (kernels.linear, lambda: linear(4096, 4096, 4096)),
    "8192": (kernels.linear, lambda: linear(8192, 8192, 8192)),
    "3000": (kernels.linear, lambda: linear(3000, 3000, 3000)),
    "3001": (kernels.linear, lambda: linear(3001, 3001, 3001)),
    "product 4096": (kernels.matmul, lambda: (empty(4096, 4096), empty(4096, 4096))),
    "f16": (kernels.linear, lambda: linear(2048, 2048, 2048, f16)),
    "i8": (kernels.linear_i8, lambda: linear(2048, 2048, 2048, i8)),
    "f8": (kernels.linear_f8, lambda: linear(2048, 2048, 2048, f8e4m3)),
    "tf32": (kernels.precise(kernels.linear, "tf32"), lambda: linear(2048, 2048, 2048, f32)),
    "8 rows": (kernels.linear, lambda: linear(8, 8192, 4096)),
    "16 rows": (kernels.linear, lambda: linear(16, 4096, 4096)),
    "32 columns": (kernels.linear, lambda: linear(4096, 32, 4096)),
    "long sum": (kernels.linear, lambda: linear(256, 256, 16384)),
    "batched": (kernels.linear_batched, lambda: (empty(64, 512, 64), empty(64, 512, 64))),
    "batched product": (kernels.matmul_batched, lambda: (empty(64, 512, 64), empty(64, 64, 512))),
    "gelu": (kernels.linear_gelu, lambda: (*linear(2048, 2048, 2048), empty(2048), empty(2048, 2048))),
    "gelu 4096": (kernels.linear_gelu, lambda: (*linear(4096, 4096, 4096), empty(4096), empty(4096, 4096))),
    "bias 4096": (BY_NAME["bias"].kernel, lambda: (*linear(4096, 4096, 4096), empty(4096))),
    "convolution": (kernels.conv_nhwc, lambda: (empty(32, 56, 56, 64), empty(64, 3, 3, 64))),
    "convolution of 192 channels": (kernels.conv_nhwc, lambda: (empty(32, 28, 28, 192), empty(192, 3, 3, 192))),
}


def schedules(name: str, target: str) -> tuple[Chosen, ...]:
    kernel, arguments = PROBLEMS[name]
    return kernel.stages(*arguments(), target=target).stages.schedules


def contractions(name: str, target: str) -> list[MatrixSchedule]:
    return [s for s in schedules(name, target) if isinstance(s, MatrixSchedule)]


# -- instructions ---------------------------------------------------------------------------------------------------


def check_assembled(ptx: str, target: str) -> None:
    done = assemble(ptx, target)
    assert done.spills == 0, done.log
    assert done.local == 0, done.log
    # ptxas says so in words and by number when it puts waits between matrix instructions.
    assert not re.search(r"C75\d\d|serializ", done.log), done.log
    assert max(done.registers) <= 255


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("name", PROBLEMS)
def test_hopper_multiplies_by_warp_groups_and_copies_by_engine(name: str) -> None:
    kernel, arguments = PROBLEMS[name]
    ptx = kernel.compile(*arguments(), target="sm_90a").code.decode()
    kinds = {"i8": r"s32\.s8\.s8", "f8": r"f32\.e4m3\.e4m3", "tf32": r"f32\.tf32\.tf32", "f16": r"f32\.f16\.f16"}
    assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.{kinds.get(name, r'f32.bf16.bf16')}", ptx)
    assert "cp.async.bulk.tensor" in ptx
    assert "mbarrier.try_wait" in ptx
    if name.startswith("convolution"):
        assert ".im2col" in ptx
    check_assembled(ptx, "sm_90a")


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize(("channels", "extent"), [(64, 56), (256, 14), (192, 28), (512, 7)])
def test_hopper_turns_images_with_channels_first(channels: int, extent: int) -> None:
    """The pixels are copied once, not once for each place of the kernel."""
    arguments = empty(32, channels, extent, extent), empty(channels, channels, 3, 3)
    found = kernels.conv_nchw.stages(*arguments, target="sm_90a").stages
    (chosen,) = (s for s in found.schedules if isinstance(s, MatrixSchedule))
    assert (chosen.a_copy, chosen.b_copy) == ("im2col", "pack")
    sizes = {"n": 32, "c": channels, "k": channels, "height": extent, "width": extent}
    largest = max(product(array.type.shape).evaluate(sizes) for array in found.thread.scratch)
    assert largest == max(arguments[0].size, arguments[1].size)
    more = empty(channels, dtype=f32), empty(32, channels, extent, extent)
    for kernel, all_of_it in ((kernels.conv_nchw, arguments), (BY_NAME["conv_nchw_gelu_and_residual"].kernel, (*arguments, *more))):
        ptx = kernel.compile(*all_of_it, target="sm_90a").code.decode()
        assert ".im2col" in ptx
        check_assembled(ptx, "sm_90a")


def computed(name: str, m: int, n: int, k: int) -> Arguments:
    """Arguments of a case with a computed factor."""
    others = {"dequantised_rows": [(n,)], "dequantised_groups_of_128": [(n, k // 128)], "scaled_columns_of_the_first": [(k,), (m,)]}
    first, second = {"cast_to_bf16": (f32, bf16), "scaled_columns_of_the_first": (bf16, bf16)}.get(name, (bf16, i8))
    if name == "kn_tf32":
        return empty(m, k, dtype=f32), empty(k, n, dtype=f32)
    return empty(m, k, dtype=first), empty(n, k, dtype=second), *(empty(*shape, dtype=f32) for shape in others.get(name, []))


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("dequantised_rows", "m=128 n=256 k=64 stages=4 math_warpgroups=2 swap_ab=1"),
        ("dequantised_groups_of_128", "m=128 n=256 k=64 stages=4 math_warpgroups=2 swap_ab=1"),
        ("dequantised_groups_of_128", "m=64 n=16 k=64 stages=16 swap_ab=1 store=direct"),
        ("cast_to_bf16", "m=128 n=256 k=64 stages=3 math_warpgroups=2"),
        ("scaled_columns_of_the_first", "m=128 n=192 k=64 stages=4 math_warpgroups=2"),
        ("kn_tf32", "m=128 n=256 k=32 stages=4 math_warpgroups=2 swap_ab=1"),
    ],
)
def test_factors_computed_in_registers_run_beside_the_matrix_units(name: str, tile: str) -> None:
    """One kernel; operands come from registers, nothing is spilled, and no waits are put between instructions."""
    case = BY_NAME[name]
    kernel = again(case.kernel, case.precision, f"family=wgmma {tile} a_copy=rs")
    arguments = computed(name, 4096, 4096, 4096)
    assert len(kernel.stages(*arguments, target="sm_90a").stages.schedules) == 1
    ptx = kernel.compile(*arguments, target="sm_90a").code.decode()
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.\S+ \{[^}]*\}, \{%r\d+, %r\d+, %r\d+, %r\d+\}, db", ptx)
    assert "cvt.rn.f32.s" not in ptx, "bytes become floats by arithmetic"
    if "store=direct" not in tile and name.startswith("dequantised"):
        assert re.search(r"stmatrix\.sync\.aligned\.m8n8\.x4\.trans", ptx), "results that lie across leave by the copy engine"
    check_assembled(ptx, "sm_90a")


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("name", [n for n in PROBLEMS if n not in ("8 rows", "f8")])
def test_ampere_multiplies_by_warps_and_copies_ahead(name: str) -> None:
    if not contractions(name, "sm_80"):
        pytest.fail("matrix_schedules has nothing for sm_80")
    kernel, arguments = PROBLEMS[name]
    ptx = kernel.compile(*arguments(), target="sm_80").code.decode()
    assert re.search(r"\bmma\.sync\.aligned\.m16n8k\d+\.row\.col", ptx)
    assert "wgmma" not in ptx
    if name != "3001":
        # Rows of 3001 elements begin anywhere; copies have no instruction for two bytes.
        assert re.search(r"cp\.async\.c[ag]\.shared\.global", ptx)
    check_assembled(ptx, "sm_80")


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_plain_f32_is_plain_arithmetic(target: str) -> None:
    kernel = tw.kernel(precision="ieee")(PLAIN["kn"].python)
    ptx = kernel.compile(empty(1024, 1024, dtype=f32), empty(1024, 1024, dtype=f32), target=target).code.decode()
    assert "mma" not in ptx
    assert ptx.count("fma.rn.f32") >= 64
    check_assembled(ptx, target)


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize(("target", "is_matrix"), [("sm_75", False), ("sm_80", True), ("sm_90a", True)])
def test_f32_is_multiplied_in_parts_where_there_are_units_for_tf32(target: str, is_matrix: bool) -> None:
    size = 512 if target == "sm_90a" else 1024
    ptx = PLAIN["kn"].compile(empty(size, size, dtype=f32), empty(size, size, dtype=f32), target=target).code.decode()
    assert ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" in ptx) == is_matrix
    assert is_matrix or ptx.count("fma.rn.f32") >= 64
    check_assembled(ptx, target)


@pytest.mark.requires("ptxas")
def test_large_products_of_f32_are_warp_group_products_of_bf16_terms() -> None:
    ptx = PLAIN["kn"].compile(empty(2999, 2001, dtype=f32), empty(2001, 2003, dtype=f32), target="sm_90a").code.decode()
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16", ptx) and "mma.sync" not in ptx
    check_assembled(ptx, "sm_90a")


@pytest.mark.requires("ptxas")
def test_f64_has_matrix_instructions_where_they_are_faster() -> None:
    kernel = product_kernel("kn", "tw.f64(0)", "tw.f64")
    arguments = empty(1024, 1024, dtype=f64), empty(1024, 1024, dtype=f64)
    for target, is_matrix in (("sm_80", True), ("sm_90a", True), ("sm_86", False)):
        ptx = kernel.compile(*arguments, target=target).code.decode()
        assert bool(re.search(r"mma\.sync\.aligned\.m\d+n8k\d+\.row\.col\.f64", ptx)) is is_matrix, target
        check_assembled(ptx, target)


# -- choices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1024", "2048", "8192", "batched"])
def test_warp_groups_take_turns_where_finishing_a_tile_counts(name: str) -> None:
    (chosen,) = contractions(name, "sm_90a")
    assert chosen.pingpong
    assert chosen.split_k == chosen.cluster == 1


def test_warp_groups_take_turns_where_much_is_done_to_results() -> None:
    assert not contractions("4096", "sm_90a")[0].pingpong
    assert not contractions("bias 4096", "sm_90a")[0].pingpong
    assert contractions("gelu 4096", "sm_90a")[0].pingpong


def test_a_residual_is_brought_by_the_copy_engine() -> None:
    kernel, arguments = PROBLEMS["gelu 4096"]
    ptx = kernel.compile(*arguments(), target="sm_90a").code.decode()
    assert "ldmatrix.sync" in ptx
    # Only the bias is loaded by threads.
    assert len(re.findall(r"ld\.global", ptx)) <= 32


def test_small_products_have_small_tiles() -> None:
    small, large = (contractions(name, "sm_90a")[0] for name in ("1024", "8192"))
    assert small.m * small.n < large.m * large.n
    tiles = -(-1024 // small.m) * -(-1024 // small.n)
    assert tiles >= 0.75 * parse_target("sm_90a").multiprocessors


def test_blocks_share_operands_where_rows_are_ragged() -> None:
    (chosen,) = contractions("3000", "sm_90a")
    assert chosen.cluster == 2
    assert (chosen.a_copy, chosen.b_copy) == ("tma", "tma")


def test_rows_the_copy_engine_cannot_read_are_packed() -> None:
    *packing, last = schedules("3001", "sm_90a")
    assert len(packing) == 2
    assert isinstance(last, MatrixSchedule)
    assert (last.a_copy, last.b_copy) == ("pack", "pack")


def test_a_long_sum_of_few_results_is_cut() -> None:
    first, second = schedules("long sum", "sm_90a")
    assert isinstance(first, MatrixSchedule)
    assert first.split_k >= 8
    assert isinstance(second, Schedule), "the parts are added up by an ordinary kernel"


@pytest.mark.parametrize(("name", "swap", "side"), [("8 rows", True, 8), ("16 rows", True, 16), ("32 columns", False, 32)])
def test_thin_products_have_thin_tiles_and_deep_rings(name: str, swap: bool, side: int) -> None:
    first = contractions(name, "sm_90a")[0]
    assert (first.swap_ab, first.n, first.store) == (swap, side, "direct")
    assert first.stages >= 8


@pytest.mark.parametrize("name", ["16 rows", "32 columns"])
def test_sums_of_thin_products_are_shared_within_clusters_where_tiles_are_few(name: str) -> None:
    (chosen,) = schedules(name, "sm_90a")
    assert isinstance(chosen, MatrixSchedule)
    assert chosen.cluster_k == 2
    assert chosen.split_k == 1
    assert 4096 // chosen.m * chosen.cluster_k <= parse_target("sm_90a").multiprocessors


def test_sums_are_not_shared_where_there_are_tiles_enough() -> None:
    assert contractions("8 rows", "sm_90a")[0].cluster_k == 1


SHARED_SUMS = {
    "two": "family=wgmma m=64 n=16 k=64 stages=16 cluster_k=2 swap_ab=1 store=direct persistent=0",
    "four": "family=wgmma m=128 n=16 k=64 stages=8 math_warpgroups=2 cluster_k=4 swap_ab=1 store=direct",
    "stream": "family=wgmma m=128 n=256 k=64 stages=4 math_warpgroups=2 stream_k=1",
    "stream of three groups": "family=wgmma m=192 n=192 k=64 stages=4 math_warpgroups=3 epilogue_stages=1 stream_k=1",
}


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("name", SHARED_SUMS)
def test_shared_sums_stay_in_registers(name: str) -> None:
    ptx = again(kernels.linear, schedule=SHARED_SUMS[name]).compile(*linear(4096, 4096, 4096), target="sm_90a").code.decode()
    if name.startswith("stream"):
        assert len(re.findall(r"\.entry", ptx)) == 2, "the flags are cleared first"
        assert "ld.acquire.gpu" in ptx
        assert "st.release.gpu" in ptx
    else:
        assert len(re.findall(r"\.entry", ptx)) == 1
        assert "cp.async.bulk.shared::cluster.shared::cta" in ptx
        assert "barrier.cluster" in ptx
    check_assembled(ptx, "sm_90a")


@pytest.mark.parametrize(
    "words", ["cluster_k=3", "cluster_k=2 cluster=2", "stream_k=1 pingpong=1 math_warpgroups=2", "stream_k=1 split_k=2", "stream_k=1 cluster_k=2",
              "stream=1 persistent=0", "math_warpgroups=2", "math_warpgroups=3 pingpong=1", "math_warpgroups=2 mma_in_flight=1"],
)  # fmt: skip
def test_sums_that_cannot_be_shared_that_way_are_refused(words: str) -> None:
    kernel = again(kernels.linear, schedule=f"family=wgmma m=64 n=64 k=64 stages=3 {words}")
    with pytest.raises(UserError, match=r"error\[TW020\].*does not fit"):
        kernel.stages(*linear(128, 128, 1024), target="sm_90a")


def test_few_rows_are_sums_along_rows_without_warp_groups() -> None:
    (chosen,) = contractions("8 rows", "sm_80")
    assert isinstance(chosen, Gemv)


def test_images_are_read_as_pixels() -> None:
    (chosen,) = contractions("convolution", "sm_90a")
    assert (chosen.a_copy, chosen.b_copy, chosen.inner) == ("im2col", "tma", 2)


@pytest.mark.parametrize(
    ("name", "sizes", "swap"),
    [("dequantised_rows", (16, 4096, 4096), True), ("dequantised_groups_of_128", (16, 8192, 8192), True),
     ("dequantised_rows", (2048, 2048, 2048), True), ("kn_tf32", (4096, 4096, 4096), True)],
)  # fmt: skip
def test_factors_are_computed_in_registers_where_packing_costs_more(name: str, sizes: tuple[int, int, int], swap: bool) -> None:
    (chosen,) = BY_NAME[name].kernel.stages(*computed(name, *sizes), target="sm_90a").stages.schedules
    assert isinstance(chosen, MatrixSchedule)
    assert (chosen.a_copy, chosen.b_copy, chosen.swap_ab) == ("rs", "tma", swap)
    assert chosen.stages >= 4
    assert not chosen.pingpong


def test_long_products_of_many_results_are_worth_packing() -> None:
    *packing, last = BY_NAME["dequantised_rows"].kernel.stages(*computed("dequantised_rows", 8192, 8192, 8192), target="sm_90a").stages.schedules
    assert isinstance(last, MatrixSchedule)
    assert len(packing) == 1
    assert (last.a_copy, last.b_copy) == ("tma", "pack")


def test_rows_of_f32_along_the_sum_are_rounded_on_their_way() -> None:
    stages = PROBLEMS["tf32"][0].stages(*PROBLEMS["tf32"][1](), target="sm_90a").stages
    (chosen,), (call,) = stages.schedules, stages.thread.calls
    assert isinstance(chosen, MatrixSchedule)
    assert (chosen.a_copy, chosen.b_copy) == ("tma", "tma")
    maps = {op.result.name: op.attrs.get("round", False) for op in walk(call.kernel.body) if op.opcode == "tensor_map"}
    assert maps == {"a.map": True, "b.map": True, "out.map": False}


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("size", [(17, 33, 65), (1000, 1000, 1000), (4096, 4096, 4096), (64, 20000, 100)], ids=str)
def test_every_choice_fits_the_target(size: tuple[int, int, int], target: str) -> None:
    chosen = parse_target(target)
    for dtype in (bf16, f32):
        stages = kernels.linear.stages(*linear(*size, dtype), target=target).stages
        _, shared = llvm_text(stages.thread, chosen)
        launched = list(zip(stages.thread.calls, shared, strict=True))
        for tile, schedule in zip(stages.tile.calls, stages.schedules, strict=True):
            if isinstance(schedule, MatrixSchedule):
                # Kernels that pack may be one launch (launch_together); a contraction has its own.
                ((call, held),) = ((call, held) for call, held in launched if call.kernel.name == tile.kernel.name)
                assert call.kernel.threads == schedule.threads <= chosen.max_threads
                assert held <= chosen.max_shared
                assert held > 0 or schedule.family != "wgmma"


# -- texts ----------------------------------------------------------------------------------------------------------

POWERS = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256])
VALUES: dict[str, st.SearchStrategy[object]] = {
    "int": st.integers(0, 512), "bool": st.booleans(), "str": st.sampled_from(["tma", "im2col", "rs", "pack", "cp_async", "direct", "both"]),
}  # fmt: skip


@st.composite
def any_schedule(draw: st.DrawFn) -> MatrixSchedule:
    """Any family, with anything in its fields."""
    kind = draw(st.sampled_from(sorted(FAMILIES.values(), key=lambda kind: kind.family)))
    values = {field.name: draw(VALUES[str(field.type)]) for field in fields(kind)}
    if issubclass(kind, WarpProduct):
        values |= {name: draw(POWERS) for name in ("m", "n", "k", "warps_m", "warps_n")}
        values |= {"chunk": draw(st.integers(0, 4)) * cast(int, values["k"]), "chunks": draw(st.integers(1, 8))}
    if issubclass(kind, Gemv):
        values |= {name: draw(POWERS) for name in ("vector", "warps_n", "warps_k", "unit")}
        values |= {"stages": draw(st.integers(1, 8)), "fetch": draw(st.integers(0, 16))}
        lanes_n = draw(st.sampled_from([1, 2, 4, 8])) if values["matrix"] else 1
        values |= {"lanes_n": lanes_n, "m": draw(st.integers(1, 8)), "n": cast(int, values["warps_n"]) * lanes_n * draw(st.integers(1, 8))}
        values["k"] = 32 // lanes_n * cast(int, values["unit"]) * cast(int, values["vector"]) * cast(int, values["warps_k"]) * draw(st.integers(1, 8))
    return kind(**values)  # type: ignore[arg-type]


@given(any_schedule())
def test_a_schedule_parses_back(schedule: MatrixSchedule) -> None:
    assert parse_schedule(schedule.describe()) == schedule


@given(any_schedule())
def test_old_words_parse_to_the_same_schedule(schedule: MatrixSchedule) -> None:
    old = {new: word for word, new in OLD_NAMES.items()}
    copies = {new: word for word, new in OLD_COPIES.items()}
    words = []
    for word in schedule.describe().split():
        name, _, value = word.partition("=")
        words.append(f"{old.get(name, name)}={copies.get(value, value) if name.endswith('_copy') else value}")
    assert parse_schedule(" ".join(words)) == schedule
    assert in_new_words(" ".join(words)) == schedule.describe()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "family=wgmma m=128 n=192 k=64 stages=4 groups=2 turns=1 wait=1 buffers=3 early=1",
            "family=wgmma m=128 n=192 k=64 stages=4 math_warpgroups=2 pingpong=1 mma_in_flight=1 epilogue_stages=3 pdl=1",
        ),
        (
            "family=wgmma m=64 n=8 k=64 stages=4 persistent=0 swap=1 sum_cluster=2 a_copy=image store=direct turn=image",
            "family=wgmma m=64 n=8 k=64 stages=4 persistent=0 swap_ab=1 a_copy=im2col cluster_k=2 store=direct to_channels_last=image",
        ),
        ("family=wgmma m=64 n=64 k=64 stream=1 a_copy=registers", "family=wgmma m=64 n=64 k=64 a_copy=rs stream_k=1"),
        ("family=mma m=64 n=64 k=16 parts=4 beside=2 products=4", "family=mma m=64 n=64 k=16 split_k=4 horizontal=2 tf32_terms=4"),
        ("family=attention m=64 n=32 k=64 stages=2 wide=64", "family=attention m=64 n=32 k=64 head_dim_v=64 stages=2"),
        (
            "family=attention_mma m=64 n=48 k=64 stages=2 warps_m=4 persistent=0 a_copy=async wide=64",
            "family=attention_mma m=64 n=48 k=64 head_dim_v=64 stages=2 persistent=0 warps_m=4",
        ),
    ],
)
def test_old_words_are_printed_as_new_ones(old: str, new: str) -> None:
    assert in_new_words(old) == new
    assert in_new_words(new) == new


def test_a_family_has_only_its_own_words() -> None:
    for family, word in (("wgmma", "mr=4"), ("mma", "pingpong=1"), ("mma", "turns=1"), ("amx", "horizontal=2"), ("attention_mma", "dynamic=1")):
        with pytest.raises(UserError, match=f"'{word}' is not part of a schedule of family {family}"):
            parse_schedule(f"family={family} m=64 n=64 k=64 {word}")
    with pytest.raises(UserError, match="there is no family 'tensor'"):
        parse_schedule("family=tensor m=64 n=64 k=64")


def test_every_schedule_names_its_lowerings() -> None:
    for kind in FAMILIES.values():
        schedule = kind(64, 64, 64)
        assert schedule.to_tile in {rule.lowering.name for rule in TO_TILE}
        assert schedule.to_thread in {rule.lowering.name for rule in TO_THREAD}
    assert replace(CpuPanels(64, 64, 64), horizontal=2).to_tile == "lower_products_cpu"


@given(st.permutations(["family=wgmma", "m=64", "n=32", "k=16", "swap_ab=1", "store=direct"]))
def test_the_order_of_words_does_not_matter(words: list[str]) -> None:
    assert parse_schedule(" ".join(words)) == Wgmma(64, 32, 16, swap_ab=True, store="direct")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("family=mma m=64 n=64", "needs k"),
        ("family=mma m=64 n=64 k=32 depth=3", "'depth=3' is not part of a schedule"),
        ("family=mma m=64 n=64 k=32 swap_ab", "'swap_ab' is not part of a schedule"),
        ("family=mma m=wide n=64 k=32", "m is an integer"),
        ("family=mma m= n=64 k=32", "m is an integer"),
        ("", "needs family, m, n, k"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_schedule(text)
