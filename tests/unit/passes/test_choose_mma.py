"""Which tiles warp-level schedules get: by rates from data sheets, room on the multiprocessors, and how sums are added up."""

from __future__ import annotations

import numpy as np
import pytest
from bench.families import convolutions

import tilewright as tw
from kernels_matrix import PLAIN, again
from tilewright.base.dtypes import bf16, f32, f64
from tilewright.base.target import parse_target
from tilewright.passes.choose.mma import TileWork, cost, in_levels, rate, shared_bytes
from tilewright.passes.schedules.matrix import MatrixSchedule, Mma, Wgmma
from tilewright.passes.schedules.text import parse_schedule


def chosen(target: str, m: int, n: int, k: int, layout: str = "kn", dtype: type = np.float32, precision: str = "ieee") -> MatrixSchedule:
    a, b = np.zeros((m, k), dtype), np.zeros((k, n) if layout == "kn" else (n, k), dtype)
    kernel: tw.Kernel[..., tw.Array] = again(PLAIN[layout], precision)
    schedule = kernel.stages(a, b, target=target).stages.schedules[-1]
    assert isinstance(schedule, MatrixSchedule)
    return schedule


@pytest.mark.parametrize(("target", "family"), [("sm_80", "mma"), ("sm_90a", "mma"), ("sm_86", "fma"), ("sm_89", "fma"), ("sm_120", "fma")])
def test_three_products_of_tf32_only_where_they_are_faster_than_one_of_f32(target: str, family: str) -> None:
    assert chosen(target, 2048, 2048, 2048, precision="3xtf32").family == family
    assert chosen(target, 2048, 2048, 2048, precision="tf32").family == ("wgmma" if target == "sm_90a" else "mma")


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"])
def test_tiles_shrink_with_the_result(target: str) -> None:
    areas = [s.m * s.n for s in (chosen(target, size, size, 512) for size in (4096, 1024, 256, 64))]
    assert areas == sorted(areas, reverse=True)
    assert areas[0] == 128 * 128 and areas[-1] == 32 * 32


def test_large_factors_that_lie_along_the_sum_are_packed_across_it() -> None:
    large, small = (chosen("sm_90a", size, size, size, "nk") for size in (4096, 512))
    assert (large.a_copy, large.b_copy) == ("pack", "pack")
    assert "pack" not in (small.a_copy, small.b_copy)
    one = chosen("sm_90a", 4096, 4096, 4096)
    assert (one.a_copy, one.b_copy) == ("pack", "tma")
    assert "pack" not in (chosen("sm_90a", 4096, 4096, 4097, "nk").a_copy, chosen("sm_90a", 4096, 4096, 4097, "nk").b_copy)


def test_rates_are_those_of_the_data_sheet() -> None:
    fma, mma = parse_schedule("family=fma m=128 n=128 k=8"), parse_schedule("family=mma m=128 n=128 k=16")
    a100 = parse_target("sm_80")
    per_tflop = 1e6 / (2 * a100.multiprocessors)
    for schedule, operand, total, precision, tflops in (
        (fma, f32, f32, "ieee", 19.5), (mma, f32, f32, "tf32", 156.0), (mma, f32, f32, "3xtf32", 52.0), (mma, bf16, f32, "ieee", 312.0),
        (mma, f64, f64, "ieee", 19.5), (fma, f64, f64, "ieee", 9.7),
    ):  # fmt: skip
        assert rate(schedule, TileWork(operand, total, precision, 1, 64, 64, 64), a100) == pytest.approx(tflops * per_tflop)


def test_a_last_round_costs_what_is_left_of_it() -> None:
    target = parse_target("sm_80")
    tile = parse_schedule("family=fma m=64 n=64 k=32 stages=2 warps_m=2 warps_n=2 persistent=0")
    times = [cost(tile, target, TileWork(f32, f32, "ieee", tiles, 64, 64, 1024)) for tiles in (1, 108, 109, 216)]
    assert times[0] == times[1] < times[2] == times[3]


@pytest.mark.parametrize(
    ("tile", "operand", "precision", "k", "words"),
    [
        ("family=fma m=32 n=32 k=32 stages=3 warps_m=2", f32, "ieee", 32, ""),
        ("family=fma m=32 n=32 k=32 stages=3 warps_m=2", f32, "ieee", 300, "chunk=32"),
        ("family=fma m=32 n=32 k=32 stages=3 warps_m=2", f32, "ieee", 2560, "chunk=32 chunks=8"),
        ("family=fma m=128 n=128 k=8 stages=3 warps_m=2 warps_n=2", f32, "ieee", 512, ""),
        ("family=fma m=128 n=128 k=8 stages=3 warps_m=2 warps_n=2", f32, "ieee", 4096, "chunk=512"),
        ("family=mma m=128 n=128 k=16 stages=4 warps_m=2 warps_n=4", f32, "3xtf32", 256, "chunk=16 tf32_terms=4"),
        ("family=mma m=128 n=128 k=16 stages=4 warps_m=2 warps_n=4", f32, "3xtf32", 4096, "chunk=128"),
        ("family=mma m=64 n=64 k=16 stages=4 warps_m=2 warps_n=2", f32, "3xtf32", 2560, "chunk=16 chunks=8"),
        ("family=mma m=128 n=128 k=16 stages=4 warps_m=2 warps_n=4", f32, "tf32", 4096, ""),
        ("family=mma m=128 n=128 k=32 stages=4 warps_m=2 warps_n=2", bf16, "ieee", 4096, ""),
    ],
)
def test_stretches_go_with_the_length_of_the_sum(tile: str, operand: tw.DType, precision: str, k: int, words: str) -> None:
    target, schedule = parse_target("sm_90a"), parse_schedule(tile)
    work = TileWork(operand, f32, precision, 1, 4096, 4096, k)
    assert in_levels(schedule, work, target) == parse_schedule(f"{tile} {words}")


def test_sums_kept_in_shared_memory_are_counted() -> None:
    tile = "family=fma m=128 n=128 k=8 stages=3 warps_m=2 warps_n=2"
    plain, kept = (shared_bytes(parse_schedule(text), f32, f32) for text in (tile, f"{tile} chunk=512"))
    assert kept - plain == 128 * 128 * 4
    work = TileWork(f32, f32, "ieee", 1, 4096, 4096, 4096)
    # Two such blocks would not share a multiprocessor of these any more.
    assert in_levels(parse_schedule(tile), work, parse_target("sm_86")) == parse_schedule(tile)


@pytest.mark.parametrize(("filters", "channels"), [(24, 60), (58, 55)])
def test_windows_with_few_filters_take_the_time_of_multiplying(filters: int, channels: int) -> None:
    """What they read comes from a cache: they are no thin products, whose one factor takes the time to read."""
    images, weights = np.zeros((8, channels, 99, 97), np.float32), np.zeros((filters, channels, 3, 5), np.float32)
    schedule = convolutions.conv2d((1, 1), (1, 2), 1, False).stages(images, weights, target="sm_90a").stages.schedules[-1]
    assert isinstance(schedule, Wgmma) and schedule.tf32_terms == 4


def test_work_is_thin_where_one_factor_takes_the_time_to_read() -> None:
    assert TileWork(f32, f32, "3xtf32", 1, 43, 8192, 8192).is_thin
    assert not TileWork(f32, f32, "3xtf32", 1, 43, 8192, 8192, windows=True).is_thin
    assert not TileWork(f32, f32, "3xtf32", 1, 100, 8192, 8192).is_thin


def only_product(m: int, n: int, k: int) -> Mma:
    """The schedule of a product of f32 by matrix instructions of warps, which is all there is besides adding up its parts."""
    a, b = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
    kernel: tw.Kernel[..., tw.Array] = again(PLAIN["kn"], "auto")
    (schedule,) = (s for s in kernel.stages(a, b, target="sm_90a").stages.schedules if isinstance(s, MatrixSchedule))
    assert isinstance(schedule, Mma)
    return schedule


@pytest.mark.parametrize(("rows", "tile"), [(24, 32), (39, 48), (64, 64)])
@pytest.mark.parametrize("turned", [False, True])
def test_few_rows_of_f32_have_tiles_as_high_and_fill_whole_rounds(rows: int, tile: int, turned: bool) -> None:
    """Elements of the long side are taken apart once, and no block is left over when all others are done."""
    m, n = (4250, rows) if turned else (rows, 4250)
    schedule = only_product(m, n, 14118)
    assert schedule.levels_held == 1
    short, warps = (schedule.n, schedule.warps_n) if turned else (schedule.m, schedule.warps_m)
    assert (short, warps) == (tile, 1)
    blocks = -(-m // schedule.m) * -(-n // schedule.n) * schedule.split_k
    places = 132 * (3 if tile == 32 else 2)
    assert 0.8 < blocks / (places * -(-blocks // places)) <= 1.0


@pytest.mark.parametrize(("m", "n", "k"), [(140, 177, 500000), (306, 200, 240858), (20, 300, 300001)])
def test_long_sums_of_f32_need_no_terms_in_memory(m: int, n: int, k: int) -> None:
    schedule = only_product(m, n, k)
    assert schedule.levels_held == 1 and schedule.split_k > 8
    # Tiles cover few results that nobody wants.
    down, across = -(-m // schedule.m) * schedule.m, -(-n // schedule.n) * schedule.n
    assert down * across < 1.5 * (m + 16) * (n + 16)


def test_long_sums_whose_factors_would_be_packed_go_to_warps() -> None:
    """Rows of 483,428 elements of two bytes begin anywhere: copies of them take longer than the product."""
    k = 483428
    a, b = np.zeros((397, k), np.float16), np.zeros((k, 104), np.float16)
    kernel: tw.Kernel[..., tw.Array] = again(PLAIN["kn"], "ieee")
    stages = kernel.stages(a, b, target="sm_90a").stages
    assert [s.family for s in stages.schedules if isinstance(s, MatrixSchedule)] == ["mma"] and stages.schedules[0].split_k > 8
    square = kernel.stages(np.zeros((4096, 4095), np.float16), np.zeros((4095, 4096), np.float16), target="sm_90a").stages
    assert isinstance(square.schedules[-1], Wgmma)


def test_images_of_f32_by_what_families_reach_with_them() -> None:
    """Matrix instructions of warps spend their time on parts of tf32 and on places of images: multiply-adds are faster there."""
    few = convolutions.pointwise.stages(np.zeros((16, 512, 128, 49), np.float32), np.zeros((120, 512), np.float32), target="sm_90a").stages.schedules[-1]
    assert isinstance(few, MatrixSchedule) and few.family == "fma"
    strided = convolutions.conv2d((2, 2), (0, 0), 1, False)
    many = strided.stages(np.zeros((13, 512, 144, 52), np.float32), np.zeros((144, 512, 1, 1), np.float32), target="sm_90a").stages.schedules[-1]
    assert isinstance(many, Wgmma) and many.folded == 3
    assert isinstance(chosen("sm_90a", 2048, 2048, 40), MatrixSchedule) and chosen("sm_90a", 2048, 2048, 2048, precision="3xtf32").family == "mma"


def empty(*shape: int) -> np.ndarray:
    """Memory that is never touched: only its form counts."""
    return np.empty(shape, bf16.numpy)


def long_sum(m: int, n: int, k: int, layout: str = "kn") -> MatrixSchedule:
    """What is chosen for a product of bf16."""
    second = (k, n) if layout == "kn" else (n, k)
    (schedule,) = (s for s in PLAIN[layout].stages(empty(m, k), empty(*second), target="sm_90a").stages.schedules if isinstance(s, MatrixSchedule))
    return schedule


@pytest.mark.parametrize(("m", "n"), [(103, 152), (132, 192), (250, 136)])
def test_a_tile_holds_few_results_of_a_long_sum(m: int, n: int) -> None:
    """Every byte comes once, to one of all multiprocessors."""
    schedule = long_sum(m, n, 500000)
    assert isinstance(schedule, Wgmma) and schedule.split_k == 132
    rows, columns = (n, m) if schedule.swap_ab else (m, n)
    assert schedule.m >= rows and schedule.n >= columns


@pytest.mark.parametrize(("m", "n"), [(287, 400), (270, 256), (140, 390)])
def test_columns_of_a_tile_fit_the_results_of_a_long_sum(m: int, n: int) -> None:
    """Rows that run along the sum are columns of a tile, of any multiple of eight: hardly any instruction is without work."""
    schedule = long_sum(m, n, 85328)
    assert isinstance(schedule, Wgmma)
    rows, columns = (n, m) if schedule.swap_ab else (m, n)
    down, across = -(-rows // schedule.m) * schedule.m, -(-columns // schedule.n) * schedule.n
    assert down * across < 1.4 * m * n


@pytest.mark.parametrize(("m", "n", "k", "layout"), [(400, 94, 454462, "kn"), (61, 250, 500000, "kn"), (60, 120, 400002, "nk")])
def test_long_sums_of_words_are_read_as_they_lie(m: int, n: int, k: int, layout: str) -> None:
    """Copies of four bytes take longer than those of whole lines, but packing first takes longer still; single elements are packed."""
    schedule = long_sum(m, n, k, layout)
    assert isinstance(schedule, Mma) and schedule.split_k >= 32
    blocks = -(-m // schedule.m) * -(-n // schedule.n) * schedule.split_k
    assert 0.9 * 264 < blocks <= 264
    assert isinstance(long_sum(m, n | 1, k | 1, layout), Wgmma)
    assert isinstance(long_sum(400, 400, k, layout), Wgmma)  # tiles would bring each byte several times


@pytest.mark.parametrize(("m", "n", "layout", "tile"), [(21, 5366, "kn", (32, 256, 32)), (5, 3522, "nk", (16, 64, 64)), (5366, 50, "nk", (64, 64, 64))])
def test_thin_products_of_words_are_not_packed(m: int, n: int, layout: str, tile: tuple[int, int, int]) -> None:
    """Rows of an even number of elements of two bytes are words, which copies bring one by one; odd ones are packed."""
    k = 11062
    for own, family in ((n, "mma"), (n + 1, "wgmma")) if layout == "kn" else ((n, "mma"),):
        shape = (k, own) if layout == "kn" else (own, k)
        (schedule,) = (s for s in PLAIN[layout].stages(empty(m, k), empty(*shape), target="sm_90a").stages.schedules if isinstance(s, MatrixSchedule))
        assert schedule.family == family
        if family == "mma":
            short, long = sorted((schedule.m, schedule.n))
            assert (short, long, schedule.k) == tile and schedule.split_k > 1
