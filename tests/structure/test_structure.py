"""The shape of what the compiler makes: how many loops and kernels, which instructions, no spills."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

import tilewright as tw
from assembled import assemble_all
from gallery_cases import GALLERY_BY_NAME as BY_NAME
from gallery_cases import GALLERY_CASES as KERNELS
from gallery_cases import GalleryCase
from kernel_table import add_cubes, add_matrices, scale_columns, transpose, whole_arrays
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.compile.build import llvm_text
from tilewright.ir.nodes import Kernel, Op, walk
from tilewright.ir.program import Program

F32 = np.float32
REDUCTIONS = ("total", "row_sums", "column_sums", "root_mean_square", "largest", "where_largest", "any_set")
ELEMENTWISE = ("relu", "multiply_add", "scale", "gelu", "silu", "sigmoid")


def ops(program: Program) -> Iterator[Op]:
    for call in program.calls:
        yield from walk(call.kernel.body)


def count(program: Program, *opcodes: str) -> int:
    return sum(op.opcode in opcodes for op in ops(program))


def entries(ptx: str) -> list[str]:
    """The text of each kernel of a module."""
    return re.split(r"(?=\.visible \.entry)", ptx)[1:]


def zeros(*shape: int, dtype: type[np.generic] = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


# -- loops and kernels ------------------------------------------------------------------------------------------------


def only_parallel(kernel: Kernel) -> Op:
    (found,) = (op for op in walk(kernel.body) if op.opcode == "parallel")
    return found


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_contiguous_cubes_collapse_to_one_loop(target: str) -> None:
    stages = add_cubes.stages(zeros(3, 5, 7), zeros(3, 5, 7), target=target).stages
    assert len(only_parallel(stages.loop.calls[0].kernel).operands) == 1


def test_transposed_input_keeps_its_loops() -> None:
    stages = add_matrices.stages(zeros(5, 3).T, zeros(3, 5), target="cpu").stages
    assert len(only_parallel(stages.loop.calls[0].kernel).operands) == 2


def test_broadcast_keeps_its_loops() -> None:
    stages = scale_columns.stages(zeros(3, 5), zeros(5), target="sm_90a").stages
    assert len(only_parallel(stages.loop.calls[0].kernel).operands) == 2


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_a_chain_of_array_operations_is_one_kernel(target: str) -> None:
    program = whole_arrays.stages(zeros(4, 4, 4), zeros(4, 4, 4), target=target).stages.loop
    assert len(program.calls) == 1
    assert program.scratch == ()
    assert count(program, "load") == 2  # x is read once though it is used twice


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_a_full_sum_of_many_is_two_kernels(target: str) -> None:
    stages = BY_NAME["total"].kernel.stages(zeros(1 << 22), target=target).stages
    assert len(stages.thread.calls) == 2
    assert len(stages.thread.scratch) == 1


def test_a_full_sum_of_few_is_one_kernel_on_a_gpu() -> None:
    stages = BY_NAME["total"].kernel.stages(zeros(1000), target="sm_90a").stages
    assert len(stages.thread.calls) == 1


def test_row_sums_are_one_kernel() -> None:
    stages = BY_NAME["row_sums"].kernel.stages(zeros(4096, 1024), target="sm_90a").stages
    assert len(stages.thread.calls) == 1


# -- PTX ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_accesses_are_sixteen_bytes_wide(name: str) -> None:
    ptx = BY_NAME[name].ptx()
    assert re.search(r"ld\.global\.nc(\.\w+)*\.v4\.[bf]32", ptx), "no 16-byte loads"
    assert re.search(r"st\.global(\.\w+)*\.v4\.[bf]32", ptx), "no 16-byte stores"


@pytest.mark.parametrize(("dtype", "pattern"), [(np.float16, r"v4\.b32|v2\.b64"), (np.float64, r"v2\.[bf]64"), (np.int8, r"v2\.b32|\.b64|v4\.b32")])
def test_other_widths_are_wide_too(dtype: type[np.generic], pattern: str) -> None:
    ptx = BY_NAME["relu"].kernel.compile(zeros(1 << 16, dtype=dtype), target="sm_90a").code.decode()
    assert re.search(rf"ld\.global\.nc(\.\w+)*\.({pattern})", ptx)
    assert re.search(rf"st\.global(\.\w+)*\.({pattern})", ptx)


def test_inputs_are_read_past_the_coherent_cache() -> None:
    for kernel in KERNELS:
        first = entries(kernel.ptx())[0]
        if "griddepcontrol.wait" in first:  # ptxas would move such loads above the wait
            assert "ld.global.nc" not in first, kernel.name
            continue
        assert "ld.global.nc" in first, kernel.name
        assert not re.search(r"ld\.global\.(?!nc)", first), f"{kernel.name}: plain loads of read-only arrays"


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_shuffles_and_meets_once(name: str) -> None:
    first, *others = entries(BY_NAME[name].ptx())
    if name == "column_sums":
        # The few parts of a column are added up by one thread: nobody meets.
        (second,) = others
        assert not re.search(r"shfl|\.shared|\bbar", second)
        others = []
    for entry in (first, *others):
        barriers = len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?sync", entry))
        # Columns meet in shared memory only, on the path of full blocks and on that of the edge.
        assert ("st.shared" if name == "column_sums" else "shfl.sync.bfly") in entry
        assert barriers <= (2 if name == "column_sums" else 1), f"{name}: {barriers} barriers"


def test_nothing_is_masked_when_sizes_divide() -> None:
    stages = add_cubes.stages(zeros(64, 64, 64), zeros(64, 64, 64), target="sm_90a").stages
    assert count(stages.tile, "if") == 0
    assert not any(op.attrs.get("masked") for op in ops(stages.tile))
    ptx = add_cubes.compile(zeros(64, 64, 64), zeros(64, 64, 64), target="sm_90a").code.decode()
    assert not re.search(r"\bbra\b", ptx)


def test_only_the_edge_is_masked_otherwise() -> None:
    stages = add_cubes.stages(zeros(3, 5, 7), zeros(3, 5, 7), target="sm_90a").stages
    (branch,) = (op for op in ops(stages.tile) if op.opcode == "if")
    full, edge = branch.regions
    assert not any(op.attrs.get("masked") for op in walk(full))
    assert all(op.attrs.get("masked") for op in walk(edge) if op.opcode in ("load", "store"))


def test_cpu_code_has_no_masks() -> None:
    for kernel in KERNELS:
        stages = kernel.kernel.stages(*kernel.arguments(), target="cpu").stages
        assert not any(op.attrs.get("masked") for op in ops(stages.thread)), kernel.name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_floats_are_ieee(kernel: GalleryCase) -> None:
    ptx = kernel.ptx()
    assert ".ftz" not in ptx.replace("ex2.approx.ftz", "")
    assert not re.search(r"(div|sqrt|rcp|rsqrt)\.(approx|full)", ptx)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_code_points_at_its_source(kernel: GalleryCase) -> None:
    ptx = kernel.ptx()
    assert "gallery.py" in ptx
    assert ptx.count(".loc") >= 2
    assert ".extern .func" not in ptx


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_75", "sm_90a"])
def test_no_gallery_kernel_spills(target: str) -> None:
    for kernel, done in zip(KERNELS, assemble_all([(kernel.ptx(target), target) for kernel in KERNELS]), strict=True):
        assert done.spills == 0, f"{kernel.name} spills on {target}: {done.log}"
        assert done.local == 0, f"{kernel.name} has local memory on {target}: {done.log}"
        assert max(done.registers) <= 96, f"{kernel.name}: {done.registers} registers"


def test_transpose_reads_or_writes_in_order() -> None:
    """Lanes read neighbours of a transposition's rows and write neighbours of its columns; in between elements are in shared memory."""
    ptx = transpose.compile(zeros(256, 256), target="sm_90a").code.decode()
    places = [ptx.index(word) for word in ("ld.global", "st.shared", "bar.sync", "ld.shared", "st.global")]
    assert places == sorted(places)


# -- CPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "register"), [("x86-64-avx2", "ymm"), ("x86-64-avx512", "zmm"), ("aarch64-neon", r"\.4s|q\d")])
@pytest.mark.parametrize("name", ["relu", "gelu", "total", "row_sums", "where_largest"])
def test_cpu_code_is_vectorised(name: str, target: str, register: str) -> None:
    kernel = BY_NAME[name]
    stages = kernel.kernel.stages(*kernel.arguments(), target=target).stages
    text, _ = llvm_text(stages.thread, parse_target(target))
    assembly = emit_assembly(text, parse_target(target))
    assert re.search(register, assembly)
    assert not re.search(r"\b(call|bl)\s+(?!tw_)\w*(exp|tanh|log|sin|mem)\w*", assembly)


@pytest.mark.parametrize(("name", "lines"), [("relu", 4), ("scale", 5)])  # a step writes four registers of 64 bytes; behind whole steps of a row, one
def test_lines_of_results_are_asked_for_where_stores_wait_for_them(name: str, lines: int) -> None:
    kernel = BY_NAME[name]
    asked = {}
    for target in ("x86-64-avx512", "x86-64-avx2", "aarch64-neon"):
        text, _ = llvm_text(kernel.kernel.stages(*kernel.arguments(), target=target).stages.thread, parse_target(target))
        asked[target] = len(re.findall(r"\bprefetchw\b|\bprfm\b|\bprefetch", emit_assembly(text, parse_target(target))))
    assert asked == {"x86-64-avx512": lines, "x86-64-avx2": 0, "aarch64-neon": 0}


# -- determinism ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["total", "row_sums", "column_sums", "root_mean_square", "mean_and_variance", "where_largest"])
def test_same_bits_on_every_run_and_with_any_number_of_threads(name: str) -> None:
    kernel = BY_NAME[name]
    rng = np.random.default_rng(1)
    shape = (1_000_003,) if np.ndim(kernel.arguments()[0]) == 1 else (1009, 997)
    argument = rng.standard_normal(shape).astype(F32)
    before = tw.get_num_threads()
    seen: set[bytes] = set()
    try:
        for threads in (1, 2, 3, before):
            tw.set_num_threads(threads)
            for _ in range(5):
                seen.add(np.asarray(kernel.kernel(argument)).tobytes())
    finally:
        tw.set_num_threads(before)
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["total", "column_sums"])
def test_compiling_twice_gives_the_same_code(name: str) -> None:
    kernel = BY_NAME[name]
    first, second = (kernel.kernel.stages(*kernel.arguments(), target="sm_90a").stages.thread for _ in range(2))
    assert llvm_text(first, parse_target("sm_90a")) == llvm_text(second, parse_target("sm_90a"))
