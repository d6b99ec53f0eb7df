"""Memory that CPU programs give back is kept for their next calls, within limits, and has one owner at a time."""

from __future__ import annotations

import ctypes
import resource
import sys
import threading

import numpy as np
import pytest
from bench.families.convolutions import conv2d

from tilewright.base.target import host_cpu
from tilewright.codegen.host.spare_memory import LEAST, MOST, SLOTS, spare_memory_object
from tilewright.runtime.core.objects import ObjectCode


class Spare:
    """An allocator of its own."""

    def __init__(self) -> None:
        self.code = ObjectCode(spare_memory_object(host_cpu()))
        self.take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)(self.code.address("spare_take"))
        self.give = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.code.address("spare_give"))

    def kept(self) -> int:
        return ctypes.c_int64.from_address(self.code.data("kept")).value


@pytest.fixture
def spare() -> Spare:
    return Spare()


def test_a_block_serves_calls_that_want_at_least_half_of_it(spare: Spare) -> None:
    first = spare.take(1 << 20)
    assert first % 16 == 0
    spare.give(first)
    assert spare.kept() == 1 << 20
    assert spare.take((1 << 20) + 1) != first  # too small
    assert spare.take((1 << 19) - 1) != first  # too large
    assert spare.take(1 << 19) == first
    assert spare.kept() == 0
    assert spare.take(1 << 19) != first
    spare.give(first)
    assert spare.take(1 << 20) == first


def test_little_and_very_much_are_not_kept(spare: Spare) -> None:
    for size in (0, 1, LEAST - 1, MOST + 1):
        block = spare.take(size)
        ctypes.memset(block, 1, size)
        spare.give(block)
        assert spare.kept() == 0
    spare.give(None)
    spare.give(spare.take(LEAST))
    assert spare.kept() == LEAST


def test_no_memory_is_null(spare: Spare) -> None:
    assert spare.take(1 << 60) is None
    assert spare.take(-32) is None
    assert spare.kept() == 0


def test_what_is_kept_goes_before_memory_is_refused(spare: Spare) -> None:
    for block in [spare.take(1 << 20) for _ in range(3)]:
        spare.give(block)
    assert spare.kept() == 3 << 20
    assert spare.take(1 << 60) is None
    assert spare.kept() == 0
    assert spare.take(1 << 20) is not None


def test_older_blocks_make_room(spare: Spare) -> None:
    size = MOST // 4
    blocks = [spare.take(size) for _ in range(6)]
    for block in blocks:
        spare.give(block)
        assert spare.kept() <= MOST
    assert spare.kept() == MOST
    spare.give(spare.take(MOST))
    assert spare.kept() == MOST


def test_a_block_finds_a_slot_when_all_are_taken(spare: Spare) -> None:
    small = [spare.take(LEAST) for _ in range(2 * SLOTS)]
    for block in small:
        spare.give(block)
    assert spare.kept() == SLOTS * LEAST
    large = spare.take(1 << 22)
    spare.give(large)
    assert spare.kept() == (SLOTS - 1) * LEAST + (1 << 22)
    assert spare.take(1 << 22) == large


def test_threads_never_share_a_block(spare: Spare) -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        rng = np.random.default_rng(mark)
        for size in rng.integers(1, 4 * LEAST, 3000):
            block = spare.take(int(size))
            first, last = (ctypes.c_int8.from_address(place) for place in (block, block + int(size) - 1))
            first.value = last.value = mark
            for _ in range(3):
                if first.value != mark or last.value != mark:
                    wrong.append(mark)
            spare.give(block)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert 0 <= spare.kept() <= MOST


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults of Linux")
def test_calls_use_the_pages_of_the_ones_before() -> None:
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((1, 16, 331, 257), dtype=np.float32), rng.standard_normal((20, 16, 3, 3), dtype=np.float32)
    out, framed = np.empty((1, 20, 331, 257), np.float32), conv2d((1, 1), (1, 1), 1, False)
    for _ in range(3):
        framed(x, w, out=out)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        framed(x, w, out=out)
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10
    assert faults < x.nbytes / resource.getpagesize() / 10
