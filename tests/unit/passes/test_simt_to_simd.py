"""Explicit kernels on the CPU: the pass's output, as machine code, against the emulator's run of what went in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

import support
from tilewright.base.dtypes import DType, bool_, f32, i32, i64, u32
from tilewright.base.errors import TargetLimit
from tilewright.base.sizes import Size
from tilewright.base.target import host_cpu, parse_target
from tilewright.compile.build import build_artifact
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import NO_ATTRS, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.types import Scalar
from tilewright.ir.verify import verify_kernel
from tilewright.passes.common.simplify import simplify
from tilewright.passes.late.expand_casts import expand_casts
from tilewright.passes.late.expand_math import expand_math
from tilewright.passes.simt_to_simd.lower_threads import lane_count, simt_to_simd
from tilewright.runtime.cpu import program as cpu

Body = Callable[[Builder, Value, Value], None]


def kernel(params: Sequence[Value], threads: int, body: Body, grid: Sequence[Size | int] = (3,)) -> Kernel:
    """`body(builder, block, thread)` writes the code of one thread."""
    b = Builder()
    body(b, b.op("program_id", axis=0), b.op("thread_id"))
    return Kernel("k", Stage.THREAD, tuple(params), Block((), tuple(b.ops)), tuple(Size.of(g) for g in grid), threads)


def lowered(explicit: Kernel) -> Kernel:
    target = host_cpu()
    verify_kernel(explicit)
    result = simt_to_simd(explicit, target)
    for one in (lambda k: k, simplify, lambda k: expand_math(k, target), lambda k: expand_casts(k, target), simplify):
        result = one(result)
        verify_kernel(result)
    assert result.threads == 1 and len(result.grid) == 1
    return result


def on_cpu(explicit: Kernel, outputs: Sequence[str] = ("o",), **inputs: np.ndarray | float) -> dict[str, np.ndarray]:
    """What the machine code makes of zeros."""
    whole = support.program(explicit, outputs)
    sizes = support.hints_of(whole, inputs)
    found = {a.name: np.zeros(tuple(s.evaluate(sizes) for s in a.type.shape), a.type.dtype.numpy) for a in whole.outputs}
    calls = tuple(replace(call, kernel=lowered(call.kernel)) for call in whole.calls)
    loaded = cpu.load(build_artifact(replace(whole, calls=calls), host_cpu(), entry=False))
    arrays = {n: v.copy() for n, v in inputs.items() if isinstance(v, np.ndarray)}
    loaded.run({**arrays, **found}, {n: v for n, v in inputs.items() if not isinstance(v, np.ndarray)})
    return found


def compare(explicit: Kernel, outputs: Sequence[str] = ("o",), **inputs: np.ndarray | float) -> dict[str, np.ndarray]:
    """Run on the emulator and on the CPU, and on the emulator what the CPU runs; the results must be the same to the bit."""
    found = on_cpu(explicit, outputs, **inputs)
    wanted = {name: np.zeros_like(array) for name, array in found.items()}
    given = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in inputs.items()}
    run_program(support.program(explicit, outputs), given, wanted)
    again = {name: np.zeros_like(array) for name, array in found.items()}
    whole = support.program(simt_to_simd(explicit, host_cpu()), outputs)
    run_program(whole, {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in inputs.items()}, again)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, name)
        np.testing.assert_array_equal(again[name], array, name)
    return found


def if_(b: Builder, condition: Value, then: Callable[[Builder], Sequence[Value] | None], otherwise: Callable[[Builder], Sequence[Value]] = lambda _: []) -> tuple[Value, ...]:
    return b.if_(condition, lambda inner: then(inner) or [], otherwise)


def while_(
    b: Builder, initial: Sequence[Value], test: Callable[..., Value], body: Callable[..., Sequence[Value]]
) -> tuple[Value, ...]:
    args, inner = (tuple(Value(v.type) for v in initial) for _ in range(2))
    first, second = Builder(), Builder()
    first.multi("yield", test(first, *args), *args)
    second.multi("yield", *body(second, *inner))
    results = tuple(Value(v.type) for v in initial)
    b.append(Op("while", tuple(initial), results, NO_ATTRS, (Block(args, tuple(first.ops)), Block(inner, tuple(second.ops)))))
    return results


def shared(b: Builder, dtype: DType, *shape: int, space: str = "shared") -> Value:
    return b.op("alloc", dtype=dtype, shape=shape, space=space)


def global_index(b: Builder, block: Value, thread: Value, threads: int) -> Value:
    return b.add(b.mul(block, b.index(threads)), thread)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("threads", [1, 5, 16, 32, 40, 96, 256])
def test_a_guarded_map(rng: np.random.Generator, threads: int) -> None:
    x, o = support.array("x", f32, "n"), support.array("o", f32, "n")

    def body(b: Builder, block: Value, thread: Value) -> None:
        i = global_index(b, block, thread, threads)

        def then(inner: Builder) -> None:
            inner.multi("store", o, i, inner.op("sqrt", inner.op("abs", inner.op("load", x, i))))

        if_(b, b.op("lt", i, b.index(Size.of("n"))), then)

    n = threads * 3 - 2
    compare(kernel([x, o], threads, body), x=rng.normal(size=n).astype(np.float32))


def test_indices_of_two_axes_are_vector_accesses_where_rows_are_whole_vectors() -> None:
    x, o = support.array("x", f32, 32, 32), support.array("o", f32, 32, 32)

    def body(b: Builder, block: Value, thread: Value) -> None:
        column, row = b.op("mod", thread, b.index(16)), b.op("floordiv", thread, b.index(16))
        across = b.op("mod", block, b.index(2))
        i = b.add(b.mul(b.op("floordiv", block, b.index(2)), b.index(16)), row)
        j = b.add(b.mul(across, b.index(16)), column)
        b.multi("store", o, i, j, b.add(b.op("load", x, i, j), b.cast(j, f32)))

    explicit = kernel([x, o], 256, body, [4])
    opcodes = {op.opcode for op in walk(simt_to_simd(explicit, host_cpu()).body)}
    assert not opcodes & {"gather", "scatter"}
    compare(explicit, x=np.arange(1024, dtype=np.float32).reshape(32, 32))


def test_the_number_of_lanes_follows_the_block_and_the_target() -> None:
    def rows(count: int, warp: bool = False) -> Kernel:
        def body(b: Builder, block: Value, thread: Value) -> None:
            b.multi("store", support_o, b.op("mod", thread, b.index(count)), b.cast(thread, f32))
            if warp:
                b.op("vote", b.const(True, bool_), mode="any")

        return kernel([support_o], 64, body)

    support_o = support.array("o", f32, 64)
    wide = parse_target("x86-64-avx512")
    assert lane_count(rows(32), wide) == 16
    assert lane_count(rows(8), wide) == 8
    assert lane_count(rows(7), wide) == 16
    assert lane_count(rows(8, warp=True), wide) == 32


@pytest.mark.parametrize("threads", [32, 100, 128])
def test_values_that_live_across_barriers(rng: np.random.Generator, threads: int) -> None:
    """A value that was loaded, one of a group, and one that is computed again."""
    x, o = support.array("x", f32, "n"), support.array("o", f32, "n")

    def body(b: Builder, block: Value, thread: Value) -> None:
        i = global_index(b, block, thread, threads)
        memory = shared(b, f32, threads)
        value = b.op("load", x, i)
        b.multi("store", memory, thread, value)
        b.multi("barrier")
        opposite = b.sub(b.index(threads - 1), thread)
        b.multi("store", o, i, b.add(b.op("load", memory, opposite), b.mul(value, value)))

    compare(kernel([x, o], threads, body), x=rng.normal(size=3 * threads).astype(np.float32))


def test_a_loop_with_barriers_carries_arrays_and_scalars(rng: np.random.Generator) -> None:
    x, o = support.array("x", f32, 3, 64), support.array("o", f32, 3, 64)

    def body(b: Builder, block: Value, thread: Value) -> None:
        memory = shared(b, f32, 64)
        own = b.op("load", x, block, thread)

        def turn(inner: Builder, k: Value, a: Value, c: Value, scale: Value) -> Sequence[Value]:
            inner.multi("store", memory, thread, a)
            inner.multi("barrier")
            other = inner.op("load", memory, inner.op("mod", inner.add(thread, inner.add(k, inner.index(1))), inner.index(64)))
            inner.multi("barrier")
            return [c, inner.add(inner.mul(other, scale), a), inner.mul(scale, inner.const(0.5, f32))]

        start = [own, b.mul(own, own), b.const(1.0, f32)]
        a, c, scale = b.for_(b.index(0), b.index(7), b.index(1), start, turn)
        b.multi("store", o, block, thread, b.add(b.add(a, c), scale))

    compare(kernel([x, o], 64, body), x=rng.normal(size=(3, 64)).astype(np.float32))


def test_a_while_loop_that_ends_by_what_threads_wrote(rng: np.random.Generator) -> None:
    """The condition is loaded from shared memory: it is the same for all threads, but that cannot be seen."""
    x, o = support.array("x", i32, 3, 48), support.array("o", i32, 3, 48)

    def body(b: Builder, block: Value, thread: Value) -> None:
        flag = shared(b, i32, 1)
        value = b.op("load", x, block, thread)
        zero = b.index(0)

        def test(t: Builder, v: Value, going: Value) -> Value:
            return t.op("ne", going, t.const(0, i32))

        def turn(t: Builder, v: Value, going: Value) -> Sequence[Value]:
            if_(t, t.op("eq", thread, zero), lambda s: s.multi("store", flag, zero, s.const(0, i32)) and None)
            t.multi("barrier")
            more = t.op("gt", v, t.const(0, i32))
            (following,) = if_(t, more, lambda s: [s.sub(v, s.const(3, i32))], lambda s: [v])
            if_(t, t.op("gt", following, t.const(0, i32)), lambda s: s.multi("store", flag, zero, s.const(1, i32)) and None)
            t.multi("barrier")
            going = t.op("load", flag, zero)
            t.multi("barrier")
            return [following, going]

        value, _ = while_(b, [value, b.const(1, i32)], test, turn)
        b.multi("store", o, block, thread, value)

    compare(kernel([x, o], 48, body), x=rng.integers(-5, 40, (3, 48)).astype(np.int32))


def test_threads_that_left_are_not_waited_for(rng: np.random.Generator) -> None:
    """Whole warps skip a part with barriers."""
    x, o = support.array("x", f32, 3, 128), support.array("o", f32, 3, 128)

    def body(b: Builder, block: Value, thread: Value) -> None:
        memory = shared(b, f32, 128)
        value = b.op("load", x, block, thread)

        def then(t: Builder) -> Sequence[Value]:
            t.multi("store", memory, thread, value)
            t.multi("barrier")
            return [t.op("load", memory, t.op("xor", thread, t.index(33)))]

        (found,) = if_(b, b.op("lt", thread, b.index(64)), then, lambda t: [value])
        b.multi("store", o, block, thread, found)

    given = rng.normal(size=(3, 128)).astype(np.float32)
    found = on_cpu(kernel([x, o], 128, body), x=given)["o"]
    np.testing.assert_array_equal(found[:, :64], given[:, np.arange(64) ^ 33])
    np.testing.assert_array_equal(found[:, 64:], given[:, 64:])


def test_lanes_part_in_nested_loops(rng: np.random.Generator) -> None:
    """Collatz steps, and a loop whose ranges differ by thread."""
    x, o = support.array("x", i64, 3, 64), support.array("o", i64, 3, 64)

    def body(b: Builder, block: Value, thread: Value) -> None:
        start = b.op("load", x, block, thread)

        def going(t: Builder, v: Value, steps: Value) -> Value:
            return t.op("gt", v, t.index(1))

        def turn(t: Builder, v: Value, steps: Value) -> Sequence[Value]:
            odd = t.op("eq", t.op("mod", v, t.index(2)), t.index(1))
            (following,) = if_(
                t, odd, lambda s: [s.add(s.mul(v, s.index(3)), s.index(1))], lambda s: [s.op("floordiv", v, s.index(2))]
            )
            return [following, t.add(steps, t.index(1))]

        _, steps = while_(b, [start, b.index(0)], going, turn)

        def add(t: Builder, k: Value, total: Value) -> Sequence[Value]:
            def inner(s: Builder, m: Value, part: Value) -> Sequence[Value]:
                return [s.add(part, s.op("load", x, block, m))]

            (part,) = t.for_(t.index(0), t.op("min", k, t.index(5)), t.index(1), [total], inner)
            return [part]

        (total,) = b.for_(thread, b.add(thread, b.op("mod", start, b.index(9))), b.index(2), [steps], add)
        b.multi("store", o, block, thread, total)

    compare(kernel([x, o], 64, body), x=rng.integers(1, 60, (3, 64)))


@pytest.mark.parametrize("mode", ["idx", "up", "down", "xor"])
@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("kind", ["constant", "uniform", "varying"])
def test_shuffles(rng: np.random.Generator, mode: str, width: int, kind: str) -> None:
    x, o = support.array("x", f32, 3, 64), support.array("o", f32, 3, 64)
    d = support.array("d", i32, 3, 64)

    def body(b: Builder, block: Value, thread: Value) -> None:
        value = b.op("load", x, block, thread)
        distance = {
            "constant": lambda: b.const(3, i32),
            "uniform": lambda: b.op("load", d, block, b.index(0)),
            "varying": lambda: b.op("load", d, block, thread),
        }[kind]()
        b.multi("store", o, block, thread, b.op("shuffle", value, distance, mode=mode, width=width))

    compare(kernel([x, d, o], 64, body), x=rng.normal(size=(3, 64)).astype(np.float32), d=rng.integers(0, 32, (3, 64)).astype(np.int32))


@pytest.mark.parametrize("mode", ["any", "all", "ballot"])
@pytest.mark.parametrize("threads", [64, 50])
def test_votes(rng: np.random.Generator, mode: str, threads: int) -> None:
    x, o = support.array("x", i32, 3, threads), support.array("o", u32, 3, threads)

    def body(b: Builder, block: Value, thread: Value) -> None:
        value = b.op("load", x, block, thread)
        vote = b.op("vote", b.op("gt", value, b.const(1, i32)), mode=mode)
        few = b.op("gt", value, b.const(0, i32))

        def inner(t: Builder) -> Sequence[Value]:
            return [t.cast(t.op("vote", t.op("lt", value, t.const(3, i32)), mode=mode), u32)]

        (second,) = if_(b, few, inner, lambda t: [t.const(7, u32)])
        b.multi("store", o, block, thread, b.add(b.cast(vote, u32), second))

    compare(kernel([x, o], threads, body), x=rng.integers(-2, 5, (3, threads)).astype(np.int32))


@pytest.mark.parametrize("dtype", [i32, u32, i64, f32], ids=str)
@pytest.mark.parametrize("kind", ["add", "sub", "min", "max", "and", "or", "xor", "exchange", "cas", "inc", "dec"])
def test_atomics_of_memory_of_the_device_and_the_block(rng: np.random.Generator, kind: str, dtype: DType) -> None:
    if dtype is f32 and kind in ("and", "or", "xor", "inc", "dec"):
        pytest.skip("for integers")
    bins, threads = (70, 64) if kind in ("exchange", "cas", "sub") else (5, 64)
    x, o, s = support.array("x", dtype, threads), support.array("o", dtype, bins), support.array("s", dtype, 2, bins)
    old = support.array("old", dtype, threads)

    def body(b: Builder, block: Value, thread: Value) -> None:
        memory = shared(b, dtype, bins)

        def clear(t: Builder, k: Value) -> Sequence[Value]:
            t.multi("store", memory, k, t.const(1, dtype))
            return []

        b.for_(thread, b.index(bins), b.index(threads), [], clear)
        b.multi("barrier")
        value = b.op("load", x, thread)
        where = b.op("mod", b.mul(thread, b.index(3)), b.index(bins)) if bins < 64 else thread
        operands = [b.const(1, dtype), value] if kind == "cas" else [value]
        b.multi("atomic", memory, where, *operands, kind=kind, scope="block", order="relaxed")
        b.multi("barrier")

        def copy(t: Builder, k: Value) -> Sequence[Value]:
            t.multi("store", s, block, k, t.op("load", memory, k))
            return []

        b.for_(thread, b.index(bins), b.index(threads), [], copy)
        found = b.op("atomic", o, where, *operands, kind=kind, scope="device", order="relaxed")
        if bins >= 64:
            b.multi("store", old, thread, found)

    values = rng.integers(1, 9, threads).astype(dtype.numpy)
    explicit = kernel([x, o, s, old], threads, body, [1 if kind in ("exchange", "cas", "inc", "dec") else 2])
    compare(explicit, ("o", "s", "old"), x=values)


def test_arrays_of_threads(rng: np.random.Generator) -> None:
    x, o = support.array("x", f32, 3, 40), support.array("o", f32, 3, 40)

    def body(b: Builder, block: Value, thread: Value) -> None:
        own = shared(b, f32, 4, space="local")

        def fill(t: Builder, k: Value) -> Sequence[Value]:
            t.multi("store", own, k, t.mul(t.op("load", x, block, thread), t.cast(k, f32)))
            return []

        b.for_(b.index(0), b.index(4), b.index(1), [], fill)
        b.multi("barrier")
        b.multi("store", o, block, thread, b.op("load", own, b.op("mod", thread, b.index(4))))

    compare(kernel([x, o], 40, body), x=rng.normal(size=(3, 40)).astype(np.float32))


def test_short_vectors_of_threads(rng: np.random.Generator) -> None:
    x, o = support.array("x", f32, 3, 256, align=16), support.array("o", f32, 3, 256, align=16)

    def body(b: Builder, block: Value, thread: Value) -> None:
        at = b.mul(thread, b.index(4))
        value = b.op("load", x, block, at, width=4)
        low, high = b.multi("split", b.mul(value, value))
        turned = b.op("pack", *(b.op("extract", v, lane=k) for v in (high, low) for k in (1, 0)))
        b.multi("store", o, block, at, b.add(turned, b.op("broadcast", b.const(1.0, f32), width=4)))

    compare(kernel([x, o], 64, body), x=rng.normal(size=(3, 256)).astype(np.float32))


def test_numbers_taken_out_of_short_vectors(rng: np.random.Generator) -> None:
    x, o = support.array("x", f32, 3, 128, align=16), support.array("o", f32, 3, 64)

    def body(b: Builder, block: Value, thread: Value) -> None:
        pair = b.op("load", x, block, b.mul(thread, b.index(2)), width=2)
        first, second = b.op("extract", pair, lane=0), b.op("extract", pair, lane=1)
        larger = b.op("gt", first, second)
        (chosen,) = if_(b, larger, lambda t: [t.sub(first, second)], lambda t: [second])
        b.multi("store", o, block, thread, chosen)

    compare(kernel([x, o], 64, body), x=rng.normal(size=(3, 128)).astype(np.float32))


def test_single_threads_in_a_grid_of_two_axes() -> None:
    o = support.array("o", i64, 3, 4)

    def body(b: Builder, block: Value, thread: Value) -> None:
        row = b.op("program_id", axis=1)
        first = b.op("eq", block, b.index(0))
        (value,) = if_(b, first, lambda t: [t.index(7)], lambda t: [t.add(t.mul(row, t.index(10)), block)])
        b.multi("store", o, row, block, b.add(value, thread))

    found = compare(kernel([o], 1, body, [4, 3]))["o"]
    assert found.tolist() == [[7, 1, 2, 3], [7, 11, 12, 13], [7, 21, 22, 23]]


@pytest.mark.parametrize("block", [(32, 4), (16, 8), (8, 4, 2)])
def test_neighbouring_blocks_walk_their_rows_together(rng: np.random.Generator, block: tuple[int, ...]) -> None:
    """More blocks along x than walk together, and a guard at both edges."""
    x, o = support.array("x", f32, "m", "n"), support.array("o", f32, "m", "n")
    wide, high = block[0], int(np.prod(block[1:]))
    threads = wide * high

    def body(b: Builder, across: Value, thread: Value) -> None:
        j = b.add(b.mul(across, b.index(wide)), b.op("mod", thread, b.index(wide)))
        i = b.add(b.mul(b.op("program_id", axis=1), b.index(high)), b.op("floordiv", thread, b.index(wide)))
        inside = b.logical_and(b.op("lt", i, b.index(Size.of("m"))), b.op("lt", j, b.index(Size.of("n"))))

        def then(t: Builder) -> None:
            t.multi("store", o, i, j, t.add(t.op("load", x, i, j), t.cast(t.add(t.mul(i, t.index(1000)), j), f32)))

        if_(b, inside, then)

    m, n = 2 * high - 1, wide * 21 - 3
    explicit = replace(kernel([x, o], threads, body, [21, 2]), attrs=MappingProxyType({"block": block}))
    names = {v.name for op in walk(simt_to_simd(explicit, host_cpu()).body) for region in op.regions for v in region.args}
    assert {"row", "block", "group"} <= names
    compare(explicit, x=rng.normal(size=(m, n)).astype(np.float32))


def test_a_grid_of_three_axes() -> None:
    o = support.array("o", i64, 2, 3, 4, 32)

    def body(b: Builder, block: Value, thread: Value) -> None:
        y, z = b.op("program_id", axis=1), b.op("program_id", axis=2)
        size = b.op("grid_size", axis=1)
        b.multi("store", o, z, y, block, thread, b.add(b.mul(size, b.index(1000)), b.add(b.mul(y, b.index(100)), thread)))

    found = compare(kernel([o], 32, body, [4, 3, 2]))["o"]
    assert found[1, 2, 3, 31] == 3231


@pytest.mark.parametrize("opcode", ["grid_barrier", "cluster_sync"])
def test_what_only_gpus_have_is_named(opcode: str) -> None:
    o = support.array("o", f32, 64)
    explicit = kernel([o], 64, lambda b, block, thread: b.multi(opcode) and None)
    with pytest.raises(TargetLimit, match=opcode):
        simt_to_simd(explicit, host_cpu())


def test_a_kernel_of_single_threads_stays() -> None:
    o = support.array("o", f32, 64)
    explicit = kernel([o], 1, lambda b, block, thread: b.multi("store", o, block, b.const(1.0, f32)) and None, [64])
    assert simt_to_simd(explicit, host_cpu()) is explicit


def test_scalars_are_parameters_of_the_whole_block() -> None:
    a, o = Value(Scalar(f32), "a"), support.array("o", f32, 3, 48)

    def body(b: Builder, block: Value, thread: Value) -> None:
        b.multi("store", o, block, thread, b.mul(a, b.cast(thread, f32)))

    compare(kernel([a, o], 48, body), a=2.5)
