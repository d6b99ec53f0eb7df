"""Targets: their names, what they have, and how many blocks fit on a multiprocessor."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest

from tilewright.base import target as targets
from tilewright.base.errors import UserError
from tilewright.base.limits import Limits
from tilewright.base.occupancy import occupancy
from tilewright.base.target import (
    DEFAULT_NVPTX,
    NVPTX,
    Target,
    for_device,
    host_cpu,
    names,
    parse_target,
    register_target,
    sve_bytes,
)

HOPPER = NVPTX["sm_90a"]


@pytest.mark.parametrize("name", names())
def test_every_name_is_a_target(name: str) -> None:
    found = parse_target(name)
    assert found.name == name or name in ("cpu", "nvptx")
    assert found.is_gpu is not found.is_host
    assert found.simt is found.is_gpu
    assert found.simt_warp == found.ballot_bits == (64 if found.has("cdna") else 32)
    assert found.vector_bytes & (found.vector_bytes - 1) == 0
    assert found.name in found.key()


def test_short_names() -> None:
    assert parse_target("cpu") is host_cpu()
    assert parse_target("nvptx") is NVPTX[DEFAULT_NVPTX]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"error\[TW021\]: unknown target 'sm_42'") as caught:
        parse_target("sm_42")
    assert all(name in str(caught.value) for name in names())


def test_a_target_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_registered", {})
    mine = Target("toaster", "toast")
    register_target(mine)
    assert parse_target("toaster") is mine and "toaster" in names()
    with pytest.raises(UserError, match="'sm_80' is the name of another target"):
        register_target(replace(mine, name="sm_80"))


@pytest.mark.parametrize("target", NVPTX.values(), ids=lambda t: t.name)
def test_gpus_are_consistent(target: Target) -> None:
    assert f"sm_{target.sm}" == target.name.removesuffix("a")
    assert target.max_shared <= target.shared_per_sm
    assert target.max_threads <= target.threads_per_sm
    assert not target.has("wgmma") or target.has("tma", "mbarrier", "cluster")
    assert all(target.peak(name) > 0 for name, _ in target.peaks)
    assert target.peak("no such arithmetic") == 0.0


def test_what_decides_code_is_in_the_key() -> None:
    changed = [replace(HOPPER, cpu="x"), replace(HOPPER, ptx=99), replace(HOPPER, multiprocessors=1), replace(HOPPER, cpu_features="+y")]
    assert len({target.key() for target in (HOPPER, *changed)}) == 5


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "sm_90a"), ((8, 0), "sm_80"), ((8, 8), "sm_87"), ((12, 1), "sm_120"), ((10, 0), "sm_100a")])
def test_the_target_of_a_device(capability: tuple[int, int], name: str) -> None:
    found = for_device(*capability, 100, 99 << 10)
    assert (found.name, found.multiprocessors, found.max_shared) == (name, 100, 99 << 10)


def test_a_device_nobody_knows() -> None:
    with pytest.raises(UserError, match=r"compute capability 5\.2"):
        for_device(5, 2, 1, 1)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks", "limits"),
    [
        (256, 32, 0, 8, ("threads", "registers")),
        (256, 0, 0, 8, ("threads",)),
        (32, 16, 0, 32, ("blocks",)),
        (128, 168, 0, 3, ("registers",)),
        (128, 32, 100 << 10, 2, ("shared memory",)),
        (33, 0, 0, 32, ("threads", "blocks")),
    ],
)
def test_occupancy(threads: int, registers: int, shared: int, blocks: int, limits: tuple[str, ...]) -> None:
    found = occupancy(HOPPER, threads, registers, shared)
    assert found is not None
    assert (found.blocks, found.limits) == (blocks, limits)
    assert found.warps == blocks * -(-threads // 32) and found.most_warps == 64
    assert found.fraction == found.warps / 64


def test_a_cpu_has_no_occupancy() -> None:
    assert occupancy(parse_target("x86-64-avx2"), 128, 32, 0) is None
    assert occupancy(HOPPER, 0, 32, 0) is None


def test_limits_without_a_device_are_those_of_one_thread() -> None:
    assert Limits().threads_per_block == Limits().warp_size == Limits().cluster == 1


@pytest.mark.parametrize(("has", "length", "level", "width"), [(True, 32, "sve256", 32), (True, 64, "sve512", 64), (True, 16, "neon", 16), (True, 128, "neon", 16), (False, 32, "neon", 16), (True, 0, "neon", 16)])
def test_sve_is_taken_at_the_length_that_code_is_for(monkeypatch: pytest.MonkeyPatch, has: bool, length: int, level: str, width: int) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("tilewright.base.llvm_library.host_features", lambda: {"neon": True, "sve": has})
    monkeypatch.setattr("tilewright.base.target.sve_bytes", lambda: length)
    found = host_cpu.__wrapped__()
    assert (found.name, found.vector_bytes, found.vector_scale) == (f"aarch64-{level}", width, width // 16 if width > 16 else 0)
    assert found.has_lane_masks == (width > 16)


def test_other_machines_have_no_sve() -> None:
    assert parse_target("aarch64-neon").vector_scale == parse_target("x86-64-avx512").vector_scale == 0
    assert platform.machine() in ("aarch64", "arm64") or sve_bytes() == 0
