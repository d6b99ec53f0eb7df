"""AMD GPUs: every op and every kernel of the table becomes a code object that links, disassembles and takes what was planned; the same thread-stage IR runs
in the emulator with waves of that size. Nothing here runs on a device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from op_kernels import map_kernels, module, reduction_kernels, thread_kernel

import tilewright as tw
from gallery_cases import CONTRACTION_CASES, GALLERY_CASES, GalleryCase
from instruction_kernels import instruction_cases
from kernel_table import BY_NAME
from support import array, as_wide, assert_close
from tilewright.base.artifact import ArrayParam, Artifact
from tilewright.base.dtypes import SCALARS, DType, bf16, bool_, f16, f32, from_numpy, i8, i32, i64, u8
from tilewright.base.errors import CompilerBug, TargetLimit
from tilewright.base.sizes import ONE
from tilewright.base.target import AMDGPU, Target, parse_target
from tilewright.codegen.amdgpu import code_object
from tilewright.codegen.amdgpu.simt import COUNTER_BYTES
from tilewright.codegen.llvm.native import compile_object
from tilewright.codegen.registry import backend_for
from tilewright.compile.build import build_artifact, describe_program, llvm_text
from tilewright.compile.driver import compile_stages
from tilewright.compile.primitives import finished_program
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_kernel, run_program
from tilewright.ir.layouts import INSTRUCTIONS, SIDE, WAVE_FORMS, Accumulator, wave_instruction
from tilewright.ir.needs import local_bytes, shared_places
from tilewright.ir.nodes import Block, Kernel, Stage, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, dtype_of
from tilewright.primitives.functions import Monoid
from tilewright.primitives.histogram import histogram_program
from tilewright.primitives.reduce import reduce_program
from tilewright.primitives.scan import scan_program
from tilewright.primitives.scan_plan import ScanPlan, StateFunction
from tilewright.primitives.sort import SortPlan, sort_program

OBJDUMP, LLD = shutil.which("llvm-objdump-19"), shutil.which("ld.lld-19")
TARGETS = tuple(AMDGPU)
CASES = {case.name: case for case in (*GALLERY_CASES, *CONTRACTION_CASES)}


def planned_bytes(kernel: Kernel) -> int:
    """Shared memory that the kernel asks for, with the word of barriers that count."""
    counts = any(op.opcode == "barrier_reduce" for op in walk(kernel.body))
    return shared_places(kernel)[1] + (COUNTER_BYTES if counts else 0)


def argument_bytes(kernel: Kernel) -> int:
    """Bytes of the kernel's arguments: each at the next place that its size divides."""
    end = 0
    for size in [*(8 if isinstance(p.type, Tensor) else dtype_of(p.type).itemsize for p in kernel.params), *[8] * len(kernel.size_names)]:
        end = -(-end // size) * size + size
    return end


def check_uses(code: bytes, program: Program, target: Target, spilled: int = 0) -> None:
    """Metadata and resources are those of the plan."""
    uses = code_object.kernel_uses(code)
    assert len(uses) == len(program.calls)
    for use, call in zip(uses, program.calls, strict=True):
        kernel = call.kernel
        assert (use.wave, use.threads, use.lds) == (target.warp_size, kernel.threads, planned_bytes(kernel)), use
        assert use.vgprs <= target.max_registers
        assert use.sgprs <= 112
        assert use.scratch <= spilled + local_bytes(kernel) * 2, use
        explicit = argument_bytes(kernel)
        assert use.arguments in (explicit, -(-explicit // 8) * 8) or use.arguments >= explicit + 256, use


def disassembled(code: bytes, folder: Path) -> list[str]:
    """The instructions of a code object, without places and bytes."""
    if OBJDUMP is None:
        pytest.skip("llvm-objdump-19 is not installed (Debian: llvm-19)")
    file = folder / "code.hsaco"
    file.write_bytes(code)
    text = subprocess.run([OBJDUMP, "-d", str(file)], capture_output=True, text=True, check=True).stdout
    return [line.split("//")[0].strip() for line in text.splitlines() if line.startswith("\t")]


def thread_program(case: GalleryCase, arguments: tuple[object, ...], target: Target) -> Program:
    runner = case.kernel.runner
    values = runner.arguments(case.kernel.bound(*arguments), True)
    return compile_stages(case.kernel.function, runner.signature(values, True), target).stages.thread


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_every_op_compiles(name: str, tmp_path: Path) -> None:
    target = parse_target(name)
    widest = name == "gfx942"
    kernels = [k for d in (SCALARS if widest else (bool_, i8, f16, f32)) for k in map_kernels(d, False)]
    kernels += [k for d in ((bool_, f16, f32, i64) if widest else (f32,)) for k in reduction_kernels(d)]
    program = module(kernels, target)
    program = replace(program, calls=(*program.calls, KernelCall(thread_kernel(target), ("o", "w"))))
    text, _ = llvm_text(program, target)
    code = code_object.link(compile_object(text, target, opt=1))
    check_uses(code, program, target)
    instructions = disassembled(code, tmp_path)
    assert sum(line == "s_endpgm" for line in instructions) >= len(program.calls)
    assert not [line for line in instructions if "unknown" in line]
    calls = describe_program(program, target).launches
    assert [launch.cooperative for launch in calls][-1]


@pytest.mark.parametrize("name", ["gfx942", "gfx1201"])
def test_instructions_compile_or_are_refused(name: str) -> None:
    target = parse_target(name)
    refused = {}
    for case in instruction_cases():
        program = finished_program(case.program(), target)
        try:
            check_uses(build_artifact(program, target).code, program, target)
        except TargetLimit as limit:
            refused[case.name] = str(limit).splitlines()[0].removeprefix(f"error[TW020]: {name} cannot do ")
    wide = "128 bits: it has no atomic access of that size"
    assert refused == {
        "atomic_cluster_scope": "atomic for a cluster: it has no cluster", "atomic_wide_global": f"atomic of {wide}", "atomic_wide_shared": f"atomic of {wide}",
        "atomic_accesses_global": f"atomic_load of {wide}", "atomic_accesses_shared": f"atomic_load of {wide}", "message_2": f"atomic_load of {wide}",
        "printing": "print: its code generator does not know it", "bulk_copies": "mbarrier_init: it has no mbarrier",
        "clusters": "cluster_rank: it has no cluster", "copies_with_hints": "copy_async: it has no cp.async", "mma_f8e4m3": "mma: it has no fp8",
        "mma_f8e5m2": "mma: it has no fp8",
    }  # fmt: skip


def _table(name: str) -> list[str]:
    """A quarter of the table for each target, or with TILEWRIGHT_AMDGPU=all the whole of it."""
    names = list(BY_NAME)
    return names if os.environ.get("TILEWRIGHT_AMDGPU") == "all" else names[TARGETS.index(name) :: 4 * len(TARGETS)]


@pytest.mark.parametrize(("target", "name"), [(target, name) for target in TARGETS for name in _table(target)])
def test_kernels_of_the_table(target: str, name: str) -> None:
    case = BY_NAME[name]
    arguments = case.inputs(np.random.default_rng(1), case.shapes[-1])
    artifact = case.kernel.compile(*arguments, target=target)
    chosen = parse_target(target)
    uses = code_object.kernel_uses(artifact.code)
    assert [use.name for use in uses] == [launch.entry for launch in artifact.launches]
    for use, launch in zip(uses, artifact.launches, strict=True):
        assert (use.wave, use.threads) == (chosen.warp_size, launch.threads)
        assert use.lds <= chosen.max_shared
        assert use.scratch == 0, use


# -- linking ----------------------------------------------------------------------------------------------------------


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    y = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        high = tw.max(x[i, :])
        total = tw.sum(tw.exp(x[i, :] - high))
        for j in tw.grid(columns):
            y[i, j] = tw.exp(x[i, j] - high) / total
    return y


def _object(name: str) -> tuple[bytes, Artifact]:
    """A kernel that meets all blocks of its grid, and looks numbers up in constant memory."""
    target = parse_target(name)
    out = array("o", f32, 64)
    b = Builder()
    thread = b.op("thread_id")
    table = b.op("alloc", dtype=f32, shape=(4,), space="constant", values=(1.0, 2.0, 4.0, 8.0))
    b.multi("grid_barrier")
    b.multi("store", out, thread, b.op("load", table, b.op("and", thread, b.index(3))))
    kernel = Kernel("looks_up", Stage.THREAD, (out,), Block((), tuple(b.ops)), grid=(ONE,), threads=64)
    assert isinstance(out.type, Tensor)
    program = Program("looks_up", (), (ProgramArray("o", out.type, "output"),), (), (KernelCall(kernel, ("o",)),))
    text, _ = llvm_text(program, target)
    return compile_object(text, target), build_artifact(program, target)


@pytest.mark.skipif(LLD is None, reason="ld.lld-19 is not installed (Debian: lld-19)")
@pytest.mark.parametrize("name", ["gfx942", "gfx1100"])
def test_linking_agrees_with_lld(name: str, tmp_path: Path) -> None:
    """Of code with constants, a variable and hidden arguments: the same instructions, but for the distances between sections."""
    data, artifact = _object(name)
    (tmp_path / "code.o").write_bytes(data)
    assert LLD is not None
    subprocess.run([LLD, "-shared", str(tmp_path / "code.o"), "-o", str(tmp_path / "lld.so")], check=True, capture_output=True)
    theirs = (tmp_path / "lld.so").read_bytes()
    assert code_object.metadata(artifact.code) == code_object.metadata(theirs)
    ours, wanted = (disassembled(code, tmp_path) for code in (artifact.code, theirs))
    assert len(ours) == len(wanted)
    different = [(a, b) for a, b in zip(ours, wanted, strict=True) if a != b]
    assert all(re.match(r"s_add(_co)?(_ci)?_u32|s_addc_u32", a) for a, _ in different), different
    reader = shutil.which("llvm-readelf-19")
    if reader is None:
        pytest.skip("llvm-readelf-19 is not installed (Debian: llvm-19)")
    (tmp_path / "ours.so").write_bytes(artifact.code)
    read = [
        subprocess.run([reader, "-h", "--dyn-syms", "--hash-symbols", str(tmp_path / file)], check=True, capture_output=True, text=True)
        for file in ("ours.so", "lld.so")
    ]
    assert not any(done.stderr for done in read)
    named = [sorted(re.findall(r"(FUNC|OBJECT) +GLOBAL +PROTECTED +\d+ (\S+)", done.stdout)) for done in read]
    assert named[0] == named[1] != []
    flags = [re.search(r"Flags: .*", done.stdout) for done in read]
    assert flags[0] is not None and flags[1] is not None and flags[0].group() == flags[1].group()


def test_what_is_nowhere_is_not_linked() -> None:
    target = parse_target("gfx942")
    text = "declare void @nowhere()\ndefine protected amdgpu_kernel void @k() {\n  call void @nowhere()\n  ret void\n}\n"
    with pytest.raises(CompilerBug, match=r"nowhere|relocation"):
        code_object.link(compile_object(text, target))


# -- the emulator, with waves of this size ----------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("name", CASES)
def test_gallery_in_the_emulator(name: str, target: str) -> None:
    case, chosen = CASES[name], parse_target(target)
    arguments = case.arguments(77)
    program = thread_program(case, arguments, chosen)
    check_uses(build_artifact(program, chosen).code, program, chosen)
    found = run_program(program, case.kernel.bound(*arguments), target=chosen)
    wanted = case.reference(*(as_wide(a) if isinstance(a, np.ndarray) else a for a in arguments))
    scale = max(1.0, max(float(np.size(a)) for a in arguments) ** 0.5)
    for output, want in zip(program.outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        got = np.asarray(found[output.name]).reshape(np.shape(want))
        dtype = from_numpy(got.dtype)
        assert dtype is not None
        assert_close(got, want, dtype, 32, scale * np.ones_like(as_wide(want)), name)


# -- contractions -----------------------------------------------------------------------------------------------------


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    _, n = b.shape
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        total = tw.f32(0.0)
        for q in range(k):
            total += tw.f32(a[i, q]) * tw.f32(b[q, j])
        out[i, j] = total * 2.0
    return out


@tw.kernel
def byte_product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n, _ = b.shape
    out = tw.empty((m, n), tw.i32)
    for i, j in tw.grid(m, n):
        total = tw.i32(0)
        for q in range(k):
            total += tw.i32(a[i, q]) * tw.i32(b[j, q])
        out[i, j] = total
    return out


FAMILIES = {"gfx90a": ("mfma", "v_mfma"), "gfx942": ("mfma", "v_mfma"), "gfx1100": ("wmma3", "v_wmma"), "gfx1201": ("wmma4", "v_wmma")}


@pytest.mark.parametrize("dtype", [f16, bf16, i8, u8, f32], ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_contractions(name: str, dtype: DType, tmp_path: Path) -> None:
    """By the matrix instructions of each family, with odd sizes; the emulator does what the instruction's table says."""
    target, (family, word) = parse_target(name), FAMILIES[name]
    rng = np.random.default_rng(5)
    a, b = (rng.integers(0 if dtype is u8 else -4, 5, shape).astype(dtype.numpy) for shape in ((70, 100), (100, 45)))
    kernel, second = (product, b) if dtype.is_float else (byte_product, np.ascontiguousarray(b.T))
    runner = kernel.runner
    done = compile_stages(kernel.function, runner.signature(runner.arguments(kernel.bound(a, second), True), True), target).stages
    program = done.thread
    by_matrix = dtype is not f32 and not (dtype is u8 and target.has("cdna"))
    assert f"family={family if by_matrix else 'fma'} " in done.schedules[0].describe()
    found = run_program(program, {"a": a, "b": second}, target=target)["out"]
    np.testing.assert_array_equal(found, (a.astype(np.float64) @ b.astype(np.float64)) * (2 if dtype.is_float else 1))
    code = build_artifact(program, target).code
    check_uses(code, program, target)
    assert any(line.startswith(word) for line in disassembled(code, tmp_path)) is by_matrix


def test_every_matrix_instruction_is_used() -> None:
    used = {
        found.name for target in AMDGPU.values() for dtype in (f16, bf16, i8, u8) for total in (f32, i32)
        if (found := wave_instruction(target.features, dtype, total)) is not None
    }  # fmt: skip
    assert used == set(INSTRUCTIONS)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_places_of_matrix_instructions(name: str) -> None:
    """Every sum lies in one register of one lane, and every product is computed once, or in both halves of the wave."""
    found = INSTRUCTIONS[name]
    places = {(found.row(lane, r), lane % SIDE) for lane in range(found.lanes) for r in range(found.sums)}
    assert len(places) == SIDE * SIDE
    assert found.lanes * found.width == SIDE * found.k * (2 if found.repeated else 1)
    form = WAVE_FORMS[found.family]
    layout = Accumulator(found.family, (SIDE, SIDE, found.k), (1, 1))
    for lane in range(found.lanes):
        held = [layout.coordinate((SIDE, SIDE), 0, lane, (0, r // form.vector), (0, r % form.vector)) for r in range(found.sums)]
        assert held == [(lane % SIDE, found.row(lane, r)) for r in range(found.sums)]


PRIMITIVES: dict[str, tuple[Callable[[Target], Program], str, Callable[[np.ndarray], np.ndarray]]] = {
    "scan": (lambda t: scan_program(ScanPlan((f32,), (f32,), StateFunction(Monoid(f32, "add"))), t), "y", np.cumsum),
    "reduce": (lambda t: reduce_program(f32, Monoid(f32, "add"), f32, t), "y", np.sum),
    "sort": (lambda t: sort_program(SortPlan(f32), t), "y", np.sort),
}


@pytest.mark.parametrize(("name", "target"), [("scan", "gfx942"), ("scan", "gfx1100"), ("reduce", "gfx942"), ("sort", "gfx942")])
def test_primitives_in_the_emulator(name: str, target: str) -> None:
    build, output, reference = PRIMITIVES[name]
    chosen = parse_target(target)
    program = finished_program(build(chosen), chosen)
    if name != "sort":  # long code
        check_uses(build_artifact(program, chosen).code, program, chosen)
    x = np.random.default_rng(3).integers(-50, 50, 1031).astype(np.float32)
    found = run_program(program, {"x": x, "keys": x, "init": np.float32(0.0)}, target=chosen)
    result = found[output if output in found else next(iter(found))]
    np.testing.assert_array_equal(np.asarray(result).reshape(-1), np.asarray(reference(x), np.float32).reshape(-1))


def test_histogram_compiles_within_its_memory() -> None:
    target = parse_target("gfx942")
    program = finished_program(histogram_program(f32, 256, target, False), target)
    check_uses(build_artifact(program, target).code, program, target)


# -- explicit kernels, and what is refused ----------------------------------------------------------------------------


@tw.gpu
def sums(x: tw.Array, out: tw.Array):
    total = x[tw.thread.x]
    step = tw.warp.size // 2
    while step > 0:
        total += tw.shuffle_xor(total, step)
        step //= 2
    if tw.lane_id() == 0:
        tw.atomic_add(out, 0, total)


def test_explicit_kernel_sees_the_wave() -> None:
    x, out = np.ones(128, np.float32), np.zeros(1, np.float32)
    for name in ("gfx90a", "gfx1201"):
        target = parse_target(name)
        program = sums[1, 128].thread_stage(x, out, target=name)
        found = np.zeros(1, np.float32)
        run_kernel(program.calls[0].kernel, [x, found], {"x$0": 128, "out$0": 1, "grid$x": 1}, target)
        artifact = sums[1, 128].compile(x, out, target=name)
        (use,) = code_object.kernel_uses(artifact.code)
        assert (use.wave, use.scratch) == (target.warp_size, 0)
        assert found[0] == 128


@tw.gpu
def waits(x: tw.Array):
    bars = tw.mbarriers(1)
    tw.mbarrier_init(bars, 0, 1)


@tw.gpu
def prints(x: tw.Array):
    print(x[0])


@tw.gpu
def shares(x: tw.Array):
    tile = tw.shared(20000, tw.f32)
    tile[tw.thread.x] = x[tw.thread.x]
    tw.barrier()
    x[tw.thread.x] = tile[31 - tw.thread.x]


@pytest.mark.parametrize(
    ("kernel", "problem", "line"),
    [
        (waits, "gfx942 cannot do mbarrier_init: it has no mbarrier", "tw.mbarrier_init(bars, 0, 1)"),
        (prints, "gfx942 cannot do print: its code generator does not know it", "print(x[0])"),
        (shares, "shares needs 80000 bytes of shared memory; a block of gfx942 has 65536", "def shares"),
    ],
)
def test_refusals_name_target_construct_and_line(kernel: tw.GpuKernel, problem: str, line: str) -> None:
    with pytest.raises(TargetLimit) as caught:
        kernel[1, 32].compile(np.zeros(64, np.float32), target="gfx942")
    text = str(caught.value)
    assert problem in text
    assert line in text


def test_waves_exchange_registers_without_memory(tmp_path: Path) -> None:
    """A sum of rows uses DPP and the crossbar; only what waves hand on goes through the LDS."""
    for name, words in (("gfx942", ("dpp", "ds_swizzle", "ds_bpermute")), ("gfx1100", ("dpp", "v_permlanex16"))):
        artifact = softmax.compile(np.zeros((8, 4096), np.float32), target=name)
        code = "\n".join(disassembled(artifact.code, tmp_path))
        for word in words:
            assert word in code, (name, word)


def test_backend_says_what_kernels_take() -> None:
    artifact = softmax.compile(np.zeros((8, 4096), np.float32), target="gfx90a")
    uses = backend_for(parse_target("gfx90a")).uses
    assert uses is not None
    taken = uses(artifact.code)
    assert list(taken) == [launch.entry for launch in artifact.launches]
    assert all(use.registers > 0 and use.spilled == 0 and use.source == "code object" for use in taken.values())
    assert all(isinstance(p, ArrayParam) for p in artifact.inputs)
