"""Explicit kernels in warps of 64 and of 8 lanes on the emulator: the front end, masks and checks follow the target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tilewright as tw
from simt_constructs import CASES, check
from simt_kernels import Case, all_cases, assert_equal, outcome
from tilewright.base.target import NVPTX
from tilewright.execute.devices import Device, emulator_device


def device_of(warp_size: int) -> Device:
    """The emulator of a GPU that has such warps and nothing else new."""
    return emulator_device("thread", replace(NVPTX["sm_90a"], name=f"wave{warp_size}", warp_size=warp_size))


NAMES_32 = {
    "warp_sum": "adds 32 lanes and numbers warps by i // 32",
    "warp_scan": "scans 32 lanes",
    "broadcast_of_a_lane": "two warps of 32 have two lanes 5",
    "shuffle_of_64_bits": "the ends of a warp keep their own values",
    "rotate_within_a_warp": "rotates modulo 32",
    "any_and_all": "asks each 32 threads",
    "ballots": "keeps ballots as u32",
    "rank_among_chosen": "counts in ballots of u32",
    "block_sum_by_warps": "has four sums for 128 threads",
    "block_scan_by_warps": "lane 31 holds a warp's total",
    "warp_for_each_row": "has three warps of 32 in 96 threads",
    "one_atomic_for_a_warp": "adds 32 lanes and numbers warps by i // 32",
}
"""Kernels whose text, or whose arrays, are for warps of 32."""
LARGER_THAN_8 = {
    "butterfly_max": "exchanges with lanes 16 apart",
    "shuffle_of_wide_integers": "exchanges lane 0 with lane 31",
    "transpose_by_shuffles": "32 threads walk in step",
    "bitonic_in_a_warp": "sorts 32 lanes",
}
"""Kernels that need warps of 32 or more."""


@pytest.mark.parametrize("one", [c for c in all_cases() if c.name not in NAMES_32], ids=str)
def test_in_warps_of_64(one: Case) -> None:
    assert_equal(outcome(one, device_of(64)), outcome(one, "emulator"), one.ulp, one.name)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("sizes", "warps")])  # these two print sizes and lanes of 32
def test_constructs_in_warps_of_64(name: str) -> None:
    kernel, launch, arguments, _ = CASES[name]
    given = arguments()
    kernel[launch](*given, device=device_of(64))
    check(name, given)


@pytest.mark.parametrize(
    "one",
    [c for c in all_cases() if c.kernel.python.__module__ in ("simt_warps", "simt_blocks") and c.name not in NAMES_32 | LARGER_THAN_8],
    ids=str,
)
def test_in_warps_of_8(one: Case) -> None:
    assert_equal(outcome(one, device_of(8)), outcome(one, "emulator"), one.ulp, one.name)


@pytest.mark.parametrize("name", NAMES_32)
def test_the_list_has_no_kernel_that_could_run(name: str) -> None:
    one = next(c for c in all_cases() if c.name == name)
    try:
        found = outcome(one, device_of(64))
    except tw.UserError:
        return
    assert any(not np.array_equal(a, b) for a, b in zip(found, outcome(one, "emulator"), strict=True))


# -- kernels that ask for the size ------------------------------------------------------------------------------------

SIZES = pytest.mark.parametrize("size", [8, 32, 64])


@tw.gpu
def sums(x, y):
    i = tw.gpu_thread_id()
    v = x[i]
    offset = tw.warp.size // 2
    while offset > 0:
        v += tw.shuffle_xor(v, offset)
        offset //= 2
    y[i] = v


@tw.gpu
def scans(x, y):
    i = tw.thread.x
    v = x[i]
    d = 1
    while d < tw.warp.size:
        other = tw.shuffle_up(v, d)
        if tw.lane_id() >= d:
            v += other
        d *= 2
    y[i] = v


@tw.gpu
def ranks(x, y, z):
    i = tw.thread.x
    votes = tw.ballot(x[i] > 0)
    y[i] = tw.popcount(votes & tw.lane_mask("lt"))
    z[i] = tw.popcount(tw.match_any(x[i]))


@tw.gpu
def half(x, y):
    """The upper half of each warp talks among itself."""
    i = tw.thread.x
    upper = tw.ballot(tw.lane_id() >= tw.warp.size // 2)
    y[i] = tw.popcount(tw.active_mask())
    if tw.lane_id() >= tw.warp.size // 2:
        y[i] = tw.redux_add(x[i], upper) + tw.shuffle(x[i], tw.warp.size - 1, lanes=upper)


@tw.gpu
def warps_meet(x, y):
    i = tw.thread.x
    s = tw.shared(128, tw.i32)
    s[i] = x[i]
    if i < tw.warp.size * 2:
        tw.named_barrier(1, tw.warp.size * 2)
        y[i] = s[tw.warp.size * 2 - 1 - i] + 1000 * tw.warp_id()


def numbers() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(3).integers(-3, 4, 128).astype(np.int32), np.zeros(128, np.int32)


@SIZES
def test_sums_and_scans(size: int) -> None:
    x, y = numbers()
    sums[1, 128](x, y, device=device_of(size))
    by_warp = x.reshape(-1, size)
    np.testing.assert_array_equal(y, np.repeat(by_warp.sum(axis=1), size))
    scans[1, 128](x, y, device=device_of(size))
    np.testing.assert_array_equal(y, np.cumsum(by_warp, axis=1).reshape(-1))


@SIZES
def test_masks_have_a_bit_for_each_lane(size: int) -> None:
    x, y = numbers()
    z = np.zeros(128, np.int32)
    ranks[1, 128](x, y, z, device=device_of(size))
    chosen = (x > 0).reshape(-1, size)
    np.testing.assert_array_equal(y, (np.cumsum(chosen, axis=1) - chosen).reshape(-1))
    by_warp = x.reshape(-1, size)
    np.testing.assert_array_equal(z, (by_warp[:, :, None] == by_warp[:, None, :]).sum(axis=2).reshape(-1))


@SIZES
def test_lanes_of_a_mask(size: int) -> None:
    x, y = numbers()
    half[1, 128](x, y, device=device_of(size))
    by_warp = x.reshape(-1, size)
    wanted = np.full(by_warp.shape, size)
    wanted[:, size // 2 :] = (by_warp[:, size // 2 :].sum(axis=1) + by_warp[:, -1])[:, None]
    np.testing.assert_array_equal(y, wanted.reshape(-1))


@SIZES
def test_a_named_barrier_counts_whole_warps(size: int) -> None:
    x, y = numbers()
    warps_meet[1, 128](x, y, device=device_of(size))
    wanted = np.zeros(128, np.int32)
    wanted[: 2 * size] = x[: 2 * size][::-1] + 1000 * (np.arange(2 * size) // size)
    np.testing.assert_array_equal(y, wanted)


@tw.gpu
def neighbours(y):
    s = tw.shared(64, tw.i32)
    s[tw.thread.x] = tw.thread.x
    tw.warp_sync()
    y[tw.thread.x] = s[tw.thread.x ^ 32]


def test_a_sync_of_the_warp_orders_as_many_threads_as_it_has() -> None:
    y = np.zeros(64, np.int32)
    neighbours[1, 64](y, device=device_of(64))
    np.testing.assert_array_equal(y, np.arange(64) ^ 32)
    with pytest.raises(tw.UserError, match=r"race on shared memory: load of 's'\[32\], which thread 32 stores"):
        neighbours[1, 64](y, device="emulator")


def test_matrix_instructions_are_of_warps_of_32() -> None:
    @tw.gpu
    def product(a: tw.Array, b: tw.Array, c: tw.Array):
        found = tw.fragment_mma(tw.fragment_a(a, (0, 0)), tw.fragment_b(b, (0, 0)), tw.fragment_c(), tw.f16)
        tw.fragment_store(c, (0, 0), found)

    a = np.ones((16, 16), np.float16)
    with pytest.raises(tw.UserError, match="mma is an instruction of warps of 32 lanes, and here they have 64"):
        product[1, 64](a, a, np.zeros((16, 16), np.float32), device=device_of(64))


def test_too_wide_a_shuffle_is_refused() -> None:
    @tw.gpu
    def shuffled(x):
        x[tw.thread.x] = tw.shuffle(x[tw.thread.x], 0, 16)

    with pytest.raises(tw.UserError, match="the width of a shuffle is 16"):
        shuffled[1, 16](np.zeros(16, np.int32), device=device_of(8))


# -- primitives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 64])
def test_primitives(size: int) -> None:
    x = np.random.default_rng(5).integers(-50, 50, 700).astype(np.int32)
    device = device_of(size)
    assert tw.gpu_reduce(x, device=device) == x.sum()
    np.testing.assert_array_equal(tw.gpu_scan(x, device=device), np.cumsum(x))
    np.testing.assert_array_equal(tw.gpu_filter(x, x > 0, device=device), x[x > 0])
    np.testing.assert_array_equal(tw.gpu_sort(x, device=device), np.sort(x))
