"""Contractions on CPUs: which schedule they get, what their innermost loop looks like, and frames of zeros for windows."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

import tilewright as tw
from support import array, loop_kernel, program, stages_of
from tilewright.analysis.contraction import find_contraction
from tilewright.base.dtypes import DType, by_name, f32, f64
from tilewright.base.sizes import Size
from tilewright.base.target import parse_target
from tilewright.codegen.llvm.native import emit_assembly
from tilewright.compile.build import llvm_text
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, Vec
from tilewright.passes.routes import lower
from tilewright.passes.schedules.matrix import CpuPanels, MatrixSchedule
from tilewright.passes.to_tile.panels.active_steps import without_frames
from tilewright.passes.to_tile.panels.in_place import InPlaceProduct
from tilewright.passes.to_tile.panels.sides import Side, join_terms, order


def product(dtype: DType = f32) -> Kernel:
    a, b, o = array("a", dtype, "m", "k"), array("b", dtype, "k", "n"), array("o", dtype, "m", "n")

    def body(at: Builder, i: Value, j: Value) -> None:
        def term(inner: Builder, p: Value) -> list[Value]:
            return [inner.mul(inner.op("load", a, i, p), inner.op("load", b, p, j))]

        at.multi("store", o, i, j, at.reduce("add", [at.index(a.type.shape[1])], term)[0])  # type: ignore[union-attr]

    return loop_kernel("product", (a, b, o), ("m", "n"), body)


def window(extra: bool = False) -> Kernel:
    """A convolution along one axis, three wide; with `extra` its guard tests something else as well."""
    x, w, o = array("x", f32, "c", "n"), array("w", f32, "f", "c", 3), array("o", f32, "f", "n")

    def body(at: Builder, f: Value, j: Value) -> None:
        def term(inner: Builder, c: Value, s: Value) -> list[Value]:
            z = inner.sub(inner.add(j, s), inner.index(1))
            width = inner.index(x.type.shape[1])  # type: ignore[union-attr]
            inside = inner.logical_and(inner.op("ge", z, inner.index(0)), inner.op("lt", z, width))
            if extra:
                inside = inner.logical_and(inside, inner.op("ne", s, inner.index(1)))
            return list(
                inner.if_(
                    inside,
                    lambda deep: [deep.mul(deep.op("load", x, c, z), deep.op("load", w, f, c, s))],
                    lambda deep: [deep.const(0, f32)],
                )
            )

        channels = at.index(x.type.shape[0])  # type: ignore[union-attr]
        at.multi("store", o, f, j, at.reduce("add", [channels, at.index(3)], term)[0])

    return loop_kernel("window", (x, w, o), ("f", "n"), body)


def innermost(kernel: Kernel) -> Op:
    """The loop with most values carried, of two the one that copies nothing."""
    loops = [op for op in walk(kernel.body) if op.opcode == "for"]
    return max(loops, key=lambda op: (len(op.results), not any(inner.opcode == "store" for inner in walk(op.regions[0]))))


@pytest.mark.parametrize(
    ("target", "dtype", "rows", "vectors", "lanes"),
    [("x86-64-avx512", "f32", 9, 3, 16), ("x86-64-avx512", "f64", 9, 3, 8), ("x86-64-avx2", "f32", 6, 2, 8),
     ("aarch64-neon", "f32", 8, 3, 4), ("x86-64", "i32", 6, 2, 4)],
)  # fmt: skip
def test_the_innermost_loop_is_multiplications_on_registers(target: str, dtype: str, rows: int, vectors: int, lanes: int) -> None:
    stages = stages_of(product(by_name(dtype)), target)
    (schedule,) = stages.schedules
    assert isinstance(schedule, MatrixSchedule)
    assert (schedule.family, schedule.mr, schedule.vectors, schedule.nr) == ("cpu", rows, vectors, vectors * lanes)
    loop = innermost(stages.thread.calls[0].kernel)
    codes = [op.opcode for op in walk(loop.regions[0])]
    assert len(loop.results) == rows * vectors
    assert all(isinstance(r.type, Vec) and r.type.width == lanes for r in loop.results)
    assert codes.count("fma" if dtype.startswith("f") else "mul") == rows * vectors
    assert codes.count("load") == rows + vectors
    assert not {"store", "if", "for"} & set(codes)


@pytest.mark.parametrize(("target", "word"), [("x86-64-avx512", "zmm"), ("x86-64-avx2", "ymm")])
def test_no_register_of_the_innermost_loop_is_spilled(target: str, word: str) -> None:
    stages = stages_of(product(), target)
    text = emit_assembly(llvm_text(stages.thread, parse_target(target))[0], parse_target(target))
    bodies = [part for part in re.split(r"^\.LBB\S+:.*$", text, flags=re.M) if "vfmadd" in part]
    loops = [part[: part.index("\tj")] for part in bodies]
    sums = len(innermost(stages.thread.calls[0].kernel).results)
    found = [loop for loop in loops if loop.count("vfmadd") == sums]
    assert found and all(word in loop for loop in found)
    assert not [line for loop in found for line in loop.splitlines() if "rsp" in line and "mm" in line], "no vector is spilled"
    copying = [loop for loop in found if re.search(rf"vmov\S+\s+%{word}\d+, ", loop)]
    assert [loop for loop in found if loop not in copying and "rsp" not in loop and "rbp" not in loop], "one loop works on registers alone"


def test_sums_have_one_order_for_any_number_of_cores() -> None:
    rng = np.random.default_rng(0)
    inputs = {"a": rng.standard_normal((30, 700)).astype(np.float32), "b": rng.standard_normal((700, 70)).astype(np.float32)}
    found = []
    for cores in (1, 2, 7):
        target = replace(parse_target("x86-64-avx512"), multiprocessors=cores)
        found.append(run_program(lower(program(product()), target).tile, inputs)["o"])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_allclose(found[0], inputs["a"].astype(np.float64) @ inputs["b"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns", "cores", "blocks"), [(2954, 346, 2, 4), (3001, 100, 2, 4), (5000, 200, 4, 8), (40, 346, 2, 2), (2954, 346, 3, 3), (1, 5, 2, 1)])
def test_a_tall_product_has_as_many_blocks_as_cores_finish_together(rows: int, columns: int, cores: int, blocks: int) -> None:
    target = replace(parse_target("aarch64-neon"), multiprocessors=cores)
    (call,) = lower(program(product(f64)), target).tile.calls
    (grid,) = call.kernel.grid
    assert grid.evaluate({"m": rows, "n": columns, "k": 138}) == blocks


def test_a_sum_is_not_cut_between_kernels() -> None:
    assert [call.kernel.name for call in stages_of(product(f64), "x86-64-avx512").loop.calls] == ["product"]


def test_a_matrix_times_a_vector_is_no_contraction() -> None:
    a, x, o = array("a", f32, "m", "k"), array("x", f32, "k"), array("o", f32, "m")

    def body(at: Builder, i: Value) -> None:
        def term(inner: Builder, p: Value) -> list[Value]:
            return [inner.mul(inner.op("load", a, i, p), inner.op("load", x, p))]

        at.multi("store", o, i, at.reduce("add", [at.index(a.type.shape[1])], term)[0])  # type: ignore[union-attr]

    stages = stages_of(loop_kernel("product", (a, x, o), ("m",), body), "x86-64-avx512")
    assert not any(isinstance(s, MatrixSchedule) for s in stages.schedules)


def test_a_window_gets_a_frame_of_zeros() -> None:
    stages = stages_of(window(), "x86-64-avx512")
    assert [call.kernel.name for call in stages.loop.calls] == ["window.pad", "window"]
    main, forms = without_frames(stages.loop.calls[1].kernel)
    assert not any(op.opcode == "if" for op in walk(main.body)) and len(forms) == 2
    (frame,) = stages.loop.scratch
    assert [str(size) for size in frame.type.shape] == ["c", "n + 2"]


def test_a_window_with_another_condition_keeps_its_guard() -> None:
    stages = stages_of(window(extra=True), "x86-64-avx512")
    assert not stages.loop.scratch
    assert any(op.opcode == "if" for op in walk(stages.loop.calls[0].kernel.body))


def test_windows_on_a_gpu_keep_their_guards() -> None:
    assert not any("padded" in array.name for array in stages_of(window(), "sm_80").loop.scratch)


@pytest.mark.parametrize("extra", [False, True])
def test_windows_are_right_at_their_borders(extra: bool) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((4, 37)).astype(np.float32), rng.standard_normal((5, 4, 3)).astype(np.float32)
    wide = np.pad(x.astype(np.float64), ((0, 0), (1, 1)))
    taps = (0, 2) if extra else (0, 1, 2)
    want = sum(w[:, :, s].astype(np.float64) @ wide[:, s : s + 37] for s in taps)
    stages = lower(program(window(extra)), parse_target("x86-64-avx2"))
    for stage in (stages.loop, stages.tile, stages.thread):
        np.testing.assert_allclose(run_program(stage, {"x": x, "w": w})["o"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 48, 40), (33, 31, 37), (9, 700, 13), (17, 33, 5)])
def test_functions_after_a_product_are_exact_at_all_edges(shape: tuple[int, int, int]) -> None:
    """Functions are computed on several vectors side by side, and what is left over on one, or on single numbers."""

    @tw.kernel
    def gelu(x: tw.Array, w: tw.Array, b: tw.Array) -> tw.Array:
        (m, k), n = x.shape, len(w)
        out = tw.empty((m, n), tw.f32)
        for i, j in tw.grid(m, n):
            total = 0.0
            for p in range(k):
                total += x[i, p] * w[j, p]
            u = total + b[j]
            out[i, j] = 0.5 * u * (1.0 + tw.erf(0.7071067811865476 * u))
        return out

    m, k, n = shape
    random = np.random.default_rng(5)
    x, w, b = (random.standard_normal(form).astype(np.float32) for form in ((m, k), (n, k), (n,)))
    u = x.astype(np.float64) @ w.astype(np.float64).T + b
    expected = 0.5 * u * (1 + np.vectorize(math.erf)(u * 0.5**0.5))
    np.testing.assert_allclose(gelu(x, w, b), expected, rtol=2e-4, atol=2e-4)


def rows_with_gaps() -> Kernel:
    """Three terms of each of some channels, from rows that lie `2 * w + 4` apart and of which `w` columns count."""
    x, w, o = array("x", f32, "c", "size"), array("w", f32, "f", "c", 3), array("o", f32, "f", "h", "w")

    def body(at: Builder, f: Value, i: Value, j: Value) -> None:
        def term(inner: Builder, c: Value, s: Value) -> list[Value]:
            place = inner.add(inner.mul(i, inner.index(Size.of("w") * 2 + 4)), inner.add(j, s))
            return [inner.mul(inner.op("load", x, c, place), inner.op("load", w, f, c, s))]

        channels = at.index(x.type.shape[0])  # type: ignore[union-attr]
        at.multi("store", o, f, i, j, at.reduce("add", [channels, at.index(3)], term)[0])

    return loop_kernel("rows", (x, w, o), ("f", "h", "w"), body)


def test_gaps_between_rows_are_numbered_where_filters_are_few() -> None:
    found = find_contraction(rows_with_gaps())
    assert found is not None
    side = Side(found, found.b, order(found, found.n, [found.b], stores=True), range(len(found.k)))
    many = {"f": 40, "c": 90, "h": 13, "w": 32}
    assert [size.evaluate(many) for size in side.numbered] == [13, 32]
    assert [size.evaluate(many) for size in side.copied_extents] == [13, 32]
    few = {**many, "f": 1}
    assert [size.evaluate(few) for size in side.numbered] == [13, 68]
    assert [size.evaluate(few) for size in side.copied_extents] == [1, 13 * 68]


def test_terms_one_behind_the_other_are_one_axis() -> None:
    kernel = rows_with_gaps()
    found = find_contraction(kernel)
    assert found is not None
    joined = join_terms(kernel, found)
    assert [str(p.type) for p in joined.params if p.name == "w"] == ["tensor<f32, [f, 3*c], [3*c, 1]>"]
    again = find_contraction(joined)
    assert again is not None
    assert Side(again, again.a, again.m, range(len(again.k))).run == 2
    assert Side(found, found.a, found.m, range(len(found.k))).run == 1


@pytest.mark.parametrize(
    ("columns", "cores", "blocks"),
    [(30240, 2, 12), (30240, 4, 12), (392, 2, 2), (2000, 2, 4), (150, 1, 1), (14400, 2, 6), (5, 2, 1)],
)
def test_blocks_of_columns_keep_all_cores_busy_to_the_end(columns: int, cores: int, blocks: int) -> None:
    target = replace(parse_target("aarch64-neon"), multiprocessors=cores)
    (grid,) = lower(program(rows_with_gaps()), target).tile.calls[0].kernel.grid
    assert grid.evaluate({"f": 40, "c": 90, "h": 1, "w": columns}) == blocks


IN_PLACE = [(9, 17, 5), (3, 70, 33), (13, 40, 40), (26, 3, 0), (5, 33, 530)]


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize(("m", "n", "k"), IN_PLACE)
def test_few_rows_or_columns_are_read_where_they_lie(m: int, n: int, k: int, dtype: DType) -> None:
    stages = stages_of(product(dtype), "x86-64-avx512")
    rng = np.random.default_rng(m + n + k)
    a, b = rng.standard_normal((m, k)).astype(dtype.numpy), rng.standard_normal((k, n)).astype(dtype.numpy)
    for stage in (stages.tile, stages.thread):
        found = run_program(stage, {"a": a, "b": b})["o"]
        np.testing.assert_allclose(found, a.astype("float64") @ b.astype("float64"), rtol=0, atol=1e-10 if dtype is f64 else 1e-4)


def test_copies_are_made_where_they_are_used_often() -> None:
    """The same kernel serves all sizes: rows and columns say which way it goes. Without masks of lanes there is one way."""
    (kernel,) = (call.kernel for call in stages_of(product(), "x86-64-avx512").tile.calls)
    (choice,) = (op for op in kernel.body.ops if op.opcode == "if")
    test = next(op for op in kernel.body.ops if choice.operands[0] in op.results)
    size = next(op for op in kernel.body.ops if test.operands[0] in op.results).attrs["value"]
    assert isinstance(size, Size)
    in_place, panels = choice.regions
    one, other = ({op.result.name for op in walk(region) if op.opcode == "alloc"} for region in (in_place, panels))
    assert "columns" not in one and "columns" in other
    for (m, n), wanted in {(67, 40): 1, (20, 300): 1, (9, 5124): 1, (400, 16): 1, (48, 9000): 1, (96, 96): 1, (97, 97): 0, (512, 512): 0, (200, 300): 0, (50, 9000): 0, (2, 2): 1}.items():
        assert size.evaluate({"m": m, "n": n, "k": 1000}) == wanted, (m, n)
    for target in ("aarch64-neon", "x86-64-avx2"):
        (kernel,) = (call.kernel for call in stages_of(product(), target).tile.calls)
        assert not any(op.opcode == "if" for op in kernel.body.ops)


def test_rooms_for_sums_hold_every_block() -> None:
    """Rows and columns of a block, rounded up to tiles, fit what is allocated for them."""
    (kernel,) = (call.kernel for call in stages_of(product(), "x86-64-avx512").tile.calls)
    (choice,) = (op for op in kernel.body.ops if op.opcode == "if")
    memory = next(op for op in walk(choice.regions[0]) if op.opcode == "alloc").result.type
    assert isinstance(memory, Tensor)
    rows, width = (extent.evaluate({}) for extent in memory.shape)
    found = find_contraction(product())
    assert found is not None
    (schedule,) = stages_of(product(), "x86-64-avx512").schedules
    assert isinstance(schedule, CpuPanels)
    target = parse_target("x86-64-avx512")
    shares = InPlaceProduct(product(), found, schedule, target).shares()
    for m, n in ((1, 1), (2, 10**6), (10**6, 2), (128, 128), (64, 10**5), (10**5, 64), (4160, 65), (65, 4160), (127, 129), (33, 33), (20, 300)):
        height, columns = (size.evaluate({"m": m, "n": n, "k": 9}) for size in shares)
        down, across = min(height, m), min(columns, n)
        used = -(-down // 24) * 24 * -(-across // width)
        assert 2 * used <= rows, (m, n)
        assert height > 0 and columns > 0
