"""NVPTX code of matrix units, asynchronous copies and their barriers: what PTX it becomes, and that the assembler takes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from matrix_kernels import (
    WGMMA_DTYPES,
    cluster,
    copies,
    flags,
    gemm,
    image_copy,
    kernel,
    matrices,
    matrix_kernels,
    mma,
    row_map,
    shared,
    store_matrices,
    tma_copy,
    wgmma,
)

from assembled import assemble, assemble_all
from support import array, program
from tilewright.base.artifact import MapParam
from tilewright.base.dtypes import bf16, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, u8, u64
from tilewright.base.errors import CompilerBug, TargetLimit
from tilewright.base.sizes import Size
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.codegen.nvptx.emitter import kernel_needs, nvptx_function
from tilewright.codegen.nvptx.matrix import HANDLERS
from tilewright.compile.build import build_artifact, describe_program, is_proven
from tilewright.ir.build import Builder
from tilewright.ir.needs import FEATURES
from tilewright.ir.nodes import Block, Kernel, Stage, walk
from tilewright.ir.ops import OPS
from tilewright.ir.ops_matrix import DEFINITIONS
from tilewright.passes.late.check_target import check_kernel_target

KNOWN = set((Path(__file__).parents[2] / "data" / "llvm22_nvvm.txt").read_text().split())
BY_NAME = {k.name: k for k in matrix_kernels()}
N = Size.of("n")


def llvm_of(*kernels: Kernel, target: str = "sm_90a") -> str:
    parts: list[str] = []
    declarations: set[str] = set()
    for position, one in enumerate(kernels):
        check_kernel_target(one, parse_target(target))
        text, needed, _ = nvptx_function(one, f"{one.name}_{position}", parse_target(target))
        parts.append(text.replace("!0 = !{}\n", "") if position else text)
        declarations |= needed
    return "\n".join(sorted(declarations)) + "\n" + "\n".join(parts)


def ptx_of(*kernels: Kernel, target: str = "sm_90a") -> str:
    return emit_assembly(llvm_of(*kernels, target=target), parse_target(target))


def lines_with(ptx: str, word: str) -> list[str]:
    return [" ".join(line.split()) for line in ptx.splitlines() if word in line]


# -- all of them ------------------------------------------------------------------------------------------------------


def test_every_op_has_a_kernel_and_a_function() -> None:
    seen = {op.opcode for k in matrix_kernels() for op in walk(k.body)}
    names = {row.name for row in DEFINITIONS if not row.name.startswith(("panel_", "wave_"))}  # of CPUs and AMD GPUs
    assert names <= seen
    assert names - HANDLERS.keys() == {"tensor_map", "await_count", "count_up", "tensor_at"}  # the emitter writes the last three itself
    assert FEATURES.keys() <= OPS.keys()
    assert all(is_proven(k) for k in matrix_kernels())


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("name", BY_NAME)
def test_every_op_assembles(name: str) -> None:
    text = llvm_of(BY_NAME[name])
    used = set(re.findall(r"declare [^@]*@(llvm\.nvvm\.[\w.]+)\(", text))
    unknown = {n for n in used if not any(n == k or n.startswith(k + ".") for k in KNOWN)}
    assert not unknown, f"LLVM 22 does not know {sorted(unknown)}"
    ptx = emit_assembly(text, parse_target("sm_90a"))
    assert ".extern .func" not in ptx, "a call of something that is not there"
    done = assemble(ptx, "sm_90a")
    assert done.spills == 0
    assert "serialized" not in done.log


def _ptx_or_reason(one: Kernel, target: str) -> str:
    try:
        return ptx_of(one, target=target)
    except TargetLimit as error:
        return str(error)


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_100a", "sm_120"])
def test_other_gpus_take_it_or_say_why_not(target: str) -> None:
    """On each GPU a kernel is either refused with a reason or becomes code the assembler takes; LLVM never ends the process."""
    taken: list[tuple[str, str]] = []
    for one in matrix_kernels():
        ptx = _ptx_or_reason(one, target)
        if ptx.startswith("error"):
            assert re.search(rf"error\[TW020\]: {target} cannot do \w+: it has no [\w.]+", ptx)
            continue
        taken.append((ptx, target))
    done = len(assemble_all(taken, level=0))
    # All have flags. sm_75 has only `ldmatrix` besides; the next ones `mma` and `copy_async` too; then come maps and mbarriers; `wgmma` is Hopper's own.
    assert done == {"sm_75": 2, "sm_80": 9, "sm_86": 9, "sm_89": 9, "sm_90": 18, "sm_100": 18, "sm_100a": 19, "sm_120": 18}[target]


def test_a_missing_feature_is_a_target_limit() -> None:
    with pytest.raises(TargetLimit, match=r"error\[TW020\]: sm_80 cannot do \w+: it has no (tma|mbarrier|wgmma)"):
        llvm_of(wgmma(bf16), target="sm_80")
    with pytest.raises(TargetLimit, match=r"error\[TW020\]: pair wants clusters of blocks; sm_80 has none"):
        llvm_of(kernel("pair", (), Builder(), cluster=2), target="sm_80")


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(1, 6))
def test_boxes_of_every_rank(rank: int) -> None:
    ptx = ptx_of(tma_copy(rank))
    (load,) = lines_with(ptx, f"cp.async.bulk.tensor.{rank}d.shared::cluster.global")
    (store,) = lines_with(ptx, f"cp.async.bulk.tensor.{rank}d.global.shared::cta")
    for line in (load, store):
        (coordinates,) = re.findall(r"\{([^}]*)\}", line)
        words = coordinates.split(", ")
        # The last of our axes comes first; all others have the same coordinate.
        assert len(words) == rank
        assert words[0] not in words[1:]
        assert len(set(words[1:])) <= 1
    assert re.search(r"cp\.async\.bulk\.wait_group\.read\s+1", ptx)
    assert re.search(r"cp\.async\.bulk\.wait_group\s+0", ptx)
    assert ptx.count(".param .align 64 .b8") == 2


@pytest.mark.parametrize("multicast", [False, True])
def test_copies_of_pixels(multicast: bool) -> None:
    ptx = ptx_of(image_copy(multicast))
    (load,) = lines_with(ptx, "cp.async.bulk.tensor.4d.shared::cluster.global.im2col")
    assert (".multicast::cluster" in load) == multicast
    where, offsets = (words.split(", ") for words in re.findall(r"\{([^}]*)\}", load))
    # Innermost first: our coordinates are the block's number plus 0 to 3 (n, h, w, c), then plus 4 and 5 (along h and w).
    assert [len(set(where)), len(set(offsets))] == [4, 2]
    text = llvm_of(image_copy(multicast))
    (call,) = (line for line in text.splitlines() if "call void @llvm.nvvm.cp.async.bulk.tensor.g2s.im2col.4d(" in line)
    names = [word.split()[-1] for word in re.findall(r"i(?:32|16) [^,]*", call)][:6]
    assert [_added(text, name) for name in names] == [3, 2, 1, 0, 5, 4]


def _added(text: str, name: str) -> int:
    """What the value adds to the block's number, seen through casts."""
    while cast := re.search(rf"{name} = trunc \w+ (%v\d+) to", text):
        name = cast.group(1)
    found = re.search(rf"{name} = add i64 %v\d+, (\d+)", text)
    assert found, f"no sum {name} in\n{text}"
    return int(found.group(1))


def test_the_launch_has_pixels() -> None:
    (launch,) = describe_program(program(image_copy(), ("o",)), parse_target("sm_90a")).launches
    n, h, w, c, pad, one = (Size.of(x) for x in ("n", "h", "w", "c", "pad", 1))
    strides = (h * w * c, w * c, c, one)
    pixels = MapParam("x", bf16, (n, h, w, c), strides, (1, 1, 1, 64), 128, 64, (one * -1, pad * -1), (one * -1, pad - 2), (1, 2))
    assert launch.maps == (pixels, MapParam("o", bf16, (Size.of("m"), Size.of("k")), (Size.of("k"), one), (64, 64), 128))


def test_masked_copies_zero_fill() -> None:
    ptx = ptx_of(copies())
    assert len(lines_with(ptx, "cp.async.cg.shared.global")) == 2
    assert len(lines_with(ptx, "cp.async.ca.shared.global")) == 4
    # A masked copy names the bytes to read besides those to write.
    assert [line.count(",") for line in lines_with(ptx, ".shared.global")] == [2, 3, 2, 3, 2, 3]
    assert [w.rstrip(";").split()[-1] for w in lines_with(ptx, "cp.async.wait_group")] == ["1", "0"]


def test_a_tensor_that_is_stored_through_a_map_is_written() -> None:
    text = llvm_of(tma_copy(2))
    assert re.search(r"noalias readonly align 16 %p0, ptr addrspace\(1\) noalias align 16 %p1", text)


def test_equal_maps_are_one_parameter() -> None:
    text = llvm_of(cluster())
    assert text.count('byval([128 x i8]) align 64 "nvvm.grid_constant"') == 1
    needs = kernel_needs(cluster())
    assert [(m.parameter, m.box, m.swizzle) for m in needs.maps] == [(0, (8, 32), 128)]


def test_a_map_must_be_of_a_parameter() -> None:
    b = Builder()
    row_map(b, array("y", f32, 64, 32), (8, 32))
    hidden = Kernel("hidden", Stage.THREAD, (), Block((), tuple(b.ops)))
    with pytest.raises(CompilerBug, match=r"a map of a tensor that is no parameter"):
        kernel_needs(hidden)


# -- shared memory and launches ---------------------------------------------------------------------------------------


def test_mbarriers_and_large_tiles_are_dynamic() -> None:
    needs = {k.name: kernel_needs(k).shared_bytes for k in (tma_copy(2), matrices(), gemm())}
    # The ring, the tile to store, then two rows of four mbarriers at multiples of 16.
    assert needs == {"copy_2d": 512 + 16, "matrices": 0, "gemm_k": 4 * (128 + 256) * 128 + 128 * 256 // 4 * 2 + 32 + 32}


def test_places_respect_alignment() -> None:
    b = Builder()
    first, second, third = shared(b, u8, 20000, 16), shared(b, f32, 8000, 1024), shared(b, u8, 3, 0)
    one = b.const(1, u8)
    b.multi("store", first, b.index(0), one)
    b.multi("store", second, b.index(0), b.const(1.0, f32))
    b.multi("store", third, b.index(0), one)
    large = kernel("large", (), b)
    assert kernel_needs(large).shared_bytes == 20480 + 32000 + 3
    text = llvm_of(large)
    assert re.findall(r"@large_0_shared, i64 (\d+)", text) == ["0", "20480", "52480"]
    assert "@large_0_shared = external addrspace(3) global [0 x i8], align 1024" in text


@pytest.mark.requires("ptxas")
def test_several_kernels_have_dynamic_memory_of_their_own() -> None:
    ptx = ptx_of(tma_copy(2), tma_copy(3))
    assert len(re.findall(r"\.extern \.shared \.align 1024", ptx)) == 2
    assemble(ptx, "sm_90a", level=0)


@pytest.mark.parametrize("target", ["sm_90a", "sm_86"])
def test_too_much_shared_memory_is_a_target_limit(target: str) -> None:
    b = Builder()
    shared(b, f32, 65536)
    limit = parse_target(target).max_shared
    with pytest.raises(TargetLimit, match=rf"TW020\]: large needs 262144 bytes .*; a block of {target} has {limit}$"):
        llvm_of(kernel("large", (), b), target=target)


def test_the_launch_has_maps_and_shared_memory() -> None:
    (launch,) = describe_program(program(gemm(), ("c",)), parse_target("sm_90a")).launches
    m, n, k = (Size.of(x) for x in "mnk")
    one = Size.of(1)
    assert launch.maps == (
        MapParam("a", bf16, (m, k), (k, one), (128, 64), 128), MapParam("b", bf16, (n, k), (k, one), (256, 64), 128),
        MapParam("c", bf16, (m, n), (n, one), (64, 64), 128),
    )  # fmt: skip
    assert launch.sizes == ("k", "m", "n")
    assert (launch.shared_bytes, launch.cluster, launch.dependent) == (213056, 1, False)


def test_the_launch_has_clusters() -> None:
    artifact = build_artifact(program(cluster()), parse_target("sm_90a"))
    (launch,) = artifact.launches
    assert (launch.cluster, launch.dependent, launch.shared_bytes) == (2, True, 1024 + 32)
    assert launch.maps == (MapParam("x", f32, (N, Size.of(32)), (Size.of(32), Size.of(1)), (8, 32), 128),)
    ptx = artifact.code.decode()
    assert ".explicitcluster" in ptx
    assert re.search(r"\.reqnctapercluster 2", ptx)
    assert re.search(r"\.minnctapersm 1", ptx)


def test_registers_can_be_bounded() -> None:
    assert ".maxnreg 64" in ptx_of(kernel("few", (), Builder(), max_registers=64))


# -- barriers ---------------------------------------------------------------------------------------------------------


def test_cluster_and_warp_roles() -> None:
    ptx = ptx_of(cluster())
    loads = lines_with(ptx, "cp.async.bulk.tensor.2d")
    assert [".multicast::cluster" in line for line in loads] == [True, False]
    (sending,) = lines_with(ptx, "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes")
    assert sending.count("mapa.shared::cluster") == 2
    assert len(lines_with(ptx, "mapa")) == 3
    (remote,) = lines_with(ptx, "shared::cluster.b64")
    assert "mbarrier.arrive" in remote
    # An arrival of the cluster's scope would cost a fence of the whole GPU.
    assert ".cluster." not in remote.replace("shared::cluster", "")
    assert "barrier.cluster.arrive" in ptx
    assert "barrier.cluster.arrive.aligned" not in ptx
    assert "setmaxnreg.dec.sync.aligned.u32" in ptx
    assert "setmaxnreg.inc.sync.aligned.u32" in ptx
    assert "griddepcontrol.wait" in ptx
    assert "griddepcontrol.launch_dependents" in ptx
    assert "elect.sync" in ptx
    assert len(lines_with(ptx, "mbarrier.init")) == 2
    # Waiting is a loop round the attempt.
    assert re.search(r"(\$L\w+):[^$:]*\n\s+mbarrier\.try_wait[^;]*;[^$]*@%p\d+ bra\s+\1;", ptx)
    named = [line for line in lines_with(ptx, "bar") if re.match(r"bar(rier)?(\.cta)?\.(sync|arrive)", line)]
    assert [line.split(".", 1)[1] for line in named] == ["sync 1, 128;", "arrive 2, 256;"]


def test_flags_release_and_acquire() -> None:
    ptx = ptx_of(flags())
    raising, waiting = (ptx.index(word) for word in ("st.release.gpu.global.u32", "ld.acquire.gpu.global.u32"))
    assert 0 <= ptx.index("fence.acq_rel.gpu") < raising < waiting
    # What other blocks wrote must not come from a cache that nobody keeps up to date.
    assert "ld.global.nc" not in ptx


# -- matrix units -----------------------------------------------------------------------------------------------------

SHAPES = {
    bf16: ("k16.f32.bf16.bf16", "1, 1, 1, 0, 0"), f16: ("k16.f32.f16.f16", "1, 1, 1, 0, 0"), f32: ("k8.f32.tf32.tf32", "1, 1, 1"),
    f8e4m3: ("k32.f32.e4m3.e4m3", "1, 1, 1"), f8e5m2: ("k32.f32.e5m2.e5m2", "1, 1, 1"), i8: ("k32.s32.s8.s8", "1"),
    u8: ("k32.s32.u8.u8", "1"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", WGMMA_DTYPES, ids=str)
def test_wgmma_is_one_group(dtype: object) -> None:
    ptx = ptx_of(BY_NAME[f"wgmma_{dtype}_k_k"])
    shape, tail = SHAPES[dtype]  # type: ignore[index]
    steps = lines_with(ptx, "wgmma.mma_async")
    assert len(steps) == 8
    assert all(s.startswith(f"wgmma.mma_async.sync.aligned.m64n64{shape} {{") for s in steps)
    assert all(s.endswith(f"}}, da, db, {tail}; }}") for s in steps)
    order = [w for w in re.findall(r"wgmma\.(\w+)", ptx) if w != "mma_async"]
    assert order == ["fence", "commit_group", "wait_group"]
    # Four steps of 32 bytes along k, each on two halves of 8 KB, in units of 16 bytes.
    moves = [tuple(map(int, re.findall(r"add\.s64 d[ab], %rd\d+, (\d+);", line))) for line in lines_with(ptx, "add.s64 da,")]
    assert moves == [(512 * half + 2 * s, 2 * s) for s in range(4) for half in (0, 1)]


@pytest.mark.parametrize("name", [*(f"{d}_k" for d in WGMMA_DTYPES), "bf16_mn"])
def test_wgmma_takes_words_of_registers(name: str) -> None:
    ptx = ptx_of(BY_NAME[f"wgmma_registers_{name}"])
    dtype, _, major = name.rpartition("_")
    shape, tail = next(found for d, found in SHAPES.items() if str(d) == dtype)
    if tail.count(",") == 4:
        tail = f"1, 1, 1, {int(major == 'mn')}"  # only b is in shared memory
    steps = lines_with(ptx, "wgmma.mma_async")
    assert len(steps) == 4
    assert all(s.startswith(f"wgmma.mma_async.sync.aligned.m64n64{shape} {{") for s in steps)
    found = [re.search(r"\}, \{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}, db, (.*); \}$", s) for s in steps]
    assert all(m is not None and m[5] == tail for m in found)
    assert len({word for m in found if m is not None for word in m.groups()[:4]}) == 16
    moves = [int(x) for x in re.findall(r"add\.s64 db, %rd\d+, (\d+);", ptx)]
    assert moves == [(2 if major == "k" else 128) * s for s in range(4)]


def _descriptor_words(kernel_: Kernel) -> list[int]:
    """The constant part of each descriptor."""
    return [int(x) for x in re.findall(r"or i64 %v\d+, (\d{10,})", llvm_of(kernel_))]


def test_descriptors() -> None:
    rows = 1 << 62 | (1024 >> 4) << 32 | 1 << 16
    blocks = 1 << 62 | (1024 >> 4) << 32 | (64 * 64 * 2 >> 4) << 16
    assert _descriptor_words(wgmma(bf16)) == [rows, rows]
    assert _descriptor_words(wgmma(bf16, a_major="mn")) == [blocks, rows]
    assert _descriptor_words(wgmma(f16, b_major="mn")) == [rows, blocks]
    assert _descriptor_words(wgmma(f8e4m3)) == [rows, rows]


@pytest.mark.parametrize(("a_major", "b_major", "bits"), [("mn", "k", "1, 0"), ("k", "mn", "0, 1"), ("mn", "mn", "1, 1")])
def test_rows_along_m_or_n(a_major: str, b_major: str, bits: str) -> None:
    ptx = ptx_of(wgmma(bf16, 128, a_major, b_major))
    assert all(line.endswith(f"1, 1, 1, {bits}; }}") for line in lines_with(ptx, "wgmma.mma_async"))


def test_only_the_last_wait_hands_the_accumulators_out() -> None:
    text = llvm_of(wgmma(bf16, wait=1))
    assert "call void @llvm.nvvm.wgmma.wait_group.sync.aligned(i64 1)" in text
    assert text.count("wgmma.wait_group.sync.aligned 0;") == 1
    tied = re.search(r'"wgmma\.wait_group\.sync\.aligned 0;", "([^"]*)"', text)
    assert tied
    assert tied.group(1).split(",") == ["=f"] * 64 + [str(k) for k in range(64)] + ["~{memory}"]


@pytest.mark.parametrize(
    ("dtype", "instruction"),
    [(bf16, "m16n8k16.row.col.f32.bf16.bf16.f32"), (f16, "m16n8k16.row.col.f32.f16.f16.f32"),
     (f32, "m16n8k8.row.col.f32.tf32.tf32.f32"), (i8, "m16n8k32.row.col.s32.s8.s8.s32"),
     (u8, "m16n8k32.row.col.s32.u8.u8.s32"), (f64, "m8n8k4.row.col.f64.f64.f64.f64")],
    ids=str,
)  # fmt: skip
def test_mma(dtype: object, instruction: str) -> None:
    assert f"mma.sync.aligned.{instruction}" in ptx_of(mma(dtype))  # type: ignore[arg-type]


def _counts(ptx: str, name: str) -> dict[str, int]:
    found: Sequence[str] = re.findall(rf"{name}\.sync\.aligned\.m8n8\.(x\d(?:\.trans)?)\.shared", ptx)
    return {kind: found.count(kind) for kind in found}


def test_matrices_of_eight_rows() -> None:
    every = {f"x{count}{trans}": 1 for count in (1, 2, 4) for trans in ("", ".trans")}
    assert _counts(ptx_of(matrices()), "ldmatrix") == every
    assert _counts(ptx_of(store_matrices()), "stmatrix") == every


def test_pairs_are_converted_together() -> None:
    ptx = ptx_of(store_matrices())
    assert [line.split()[0] for line in lines_with(ptx, "cvt.rn")] == ["cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"]


# -- a whole product --------------------------------------------------------------------------------------------------


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("b_major", ["k", "mn"])
def test_a_pipelined_product_runs_in_registers(b_major: str) -> None:
    ptx = ptx_of(gemm(b_major=b_major))
    assert len(lines_with(ptx, "wgmma.mma_async")) == 4
    assert len(lines_with(ptx, "cvt.rn.bf16x2.f32")) == 64
    done = assemble(ptx, "sm_90a")
    assert (done.spills, done.local) == (0, 0)
    assert "serialized" not in done.log
    assert done.registers == (168,)


def test_offsets_and_parities_of_any_width() -> None:
    """The same kernel in 32-bit and 64-bit indices has the same barriers and copies."""
    found = []
    for dtype in (i32, u64):
        b = Builder()
        barriers, one = shared(b, u64, 2, 8), b.const(1, dtype)
        b.multi("mbarrier_init", barriers, one, count=1)
        b.multi("mbarrier_wait", barriers, one, b.const(0, dtype))
        b.multi("named_barrier", one, threads=64)
        ptx = ptx_of(kernel("wide", (), b, 64))
        found.append([line.split()[0] for line in lines_with(ptx, "bar")])
    assert found[0] == found[1]
    assert any("try_wait" in word for word in found[0])
