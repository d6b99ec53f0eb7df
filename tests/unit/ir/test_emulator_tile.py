"""The emulator at the tile stage: masked tails, tile ops, reductions, dot, shared memory, asynchronous copies, faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest

from tilewright.base.dtypes import DType, bf16, f16, f32, i8, i32, i64
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size, ceildiv
from tilewright.base.source import Source, Span
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_kernel
from tilewright.ir.nodes import Block, Kernel, Stage, Value
from tilewright.ir.types import dtype_of, tensor

N = Size.of("n")
LINE = Span(Source("k.zyn", "out = x"), 1, 1, 1, 4)


def kernel(params: Sequence[Value], grid: Sequence[Size], body: Callable[[Builder], None]) -> Kernel:
    builder = Builder(LINE)
    body(builder)
    return Kernel("k", Stage.TILE, tuple(params), Block((), tuple(builder.ops)), tuple(grid))


def span_of(b: Builder, extent: int, axis: int = 0) -> Value:
    """Indices of this block's elements along a grid axis."""
    start = b.mul(b.op("program_id", axis=axis), b.index(extent))
    return b.add(b.op("broadcast", start, shape=(extent,)), b.op("iota", shape=(extent,), axis=0))


def unary_kernel(rows: int, cols: int, body: Callable[[Builder, Value], Value], source: Value, target: Value) -> Kernel:
    """One block: load a whole tile, apply, store the whole result."""

    def whole(b: Builder) -> None:
        def grid_of(r: int, c: int) -> tuple[Value, Value]:
            return b.op("iota", shape=(r, 1), axis=0), b.op("iota", shape=(1, c), axis=1)

        result = body(b, b.op("load", source, *grid_of(rows, cols)))
        b.multi("store", target, *grid_of(*result.type.shape), result)  # type: ignore[union-attr]

    return kernel([source, target], [Size.of(1)], whole)


def masked_map(masked: bool = True) -> Kernel:
    """out = x * 2 in tiles of 16, the tail masked."""
    x, out = Value(tensor(f32, "n"), "x"), Value(tensor(f32, "n"), "out")

    def body(b: Builder) -> None:
        index = span_of(b, 16)
        if masked:
            inside = b.op("lt", index, b.like(b.index(N), index))
            value = b.op("load", x, index, inside, masked=True)
            b.multi("store", out, index, b.mul(value, b.splat(2.0, value)), inside, masked=True)
        else:
            b.multi("store", out, index, b.op("load", x, index))

    return kernel([x, out], [ceildiv(N, 16)], body)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 100])
def test_masked_tail(n: int) -> None:
    data = np.arange(n, dtype=np.float32)
    result = np.full(n, -1, np.float32)
    run_kernel(masked_map(), [data, result], {"n": n})
    np.testing.assert_array_equal(result, data * 2)


def test_missing_mask_is_out_of_bounds_with_its_block() -> None:
    with pytest.raises(UserError) as error:
        run_kernel(masked_map(masked=False), [np.ones(17, np.float32), np.ones(17, np.float32)], {"n": 17})
    assert str(error.value).splitlines()[0] == (
        "k.zyn:1:1: error[TW050]: load of 'x' at [17] is out of bounds: index 17, extent 17, in block (1)"
    )


def test_masked_lanes_load_zero() -> None:
    x, out = Value(tensor(f32, 4), "x"), Value(tensor(f32, 8), "out")

    def body(b: Builder) -> None:
        index = b.op("iota", shape=(8,), axis=0)
        inside = b.op("lt", index, b.splat(4, index))
        b.multi("store", out, index, b.op("load", x, index, inside, masked=True))

    result = np.full(8, -1, np.float32)
    run_kernel(kernel([x, out], [Size.of(1)], body), [np.ones(4, np.float32), result], {})
    np.testing.assert_array_equal(result, [1, 1, 1, 1, 0, 0, 0, 0])


@pytest.mark.parametrize("opcode", ["load", "store"])
@pytest.mark.parametrize(("shift", "right"), [(0, False), (1, False), (2, False), (3, True)])
def test_vectors_begin_where_an_access_says(opcode: str, shift: int, right: bool) -> None:
    """The second row of seven elements begins at element 7: the tile has to begin three before it."""
    x, out = Value(tensor(f32, 2, 7), "x"), Value(tensor(f32, 2, 7), "out")

    def body(b: Builder) -> None:
        places = b.op("iota", shape=(12,), axis=0)
        index = b.sub(places, b.splat(shift, places))
        inside = b.op("and", b.op("ge", index, b.splat(0, index)), b.op("lt", index, b.splat(7, index)))
        said = [{"aligned": 4} if opcode == name else {} for name in ("load", "store")]
        value = b.op("load", x, b.index(1), index, inside, masked=True, **said[0])
        b.multi("store", out, b.index(1), index, value, inside, masked=True, **said[1])

    data, result = np.arange(14, dtype=np.float32).reshape(2, 7), np.zeros((2, 7), np.float32)
    whole = kernel([x, out], [Size.of(1)], body)
    if not right:
        with pytest.raises(UserError, match=rf"{opcode} of '\w+': no vector of 4 elements begins at element"):
            run_kernel(whole, [data, result], {})
        return
    run_kernel(whole, [data, result], {})
    np.testing.assert_array_equal(result[1], data[1])


def test_two_dimensional_grid_and_broadcast_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.ir.emulator.tile.ELEMENTS", 24)  # three blocks at a time
    rows, cols = Size.of("rows"), Size.of("cols")
    bias, out = Value(tensor(f32, "cols"), "bias"), Value(tensor(f32, "rows", "cols"), "out")

    def body(b: Builder) -> None:
        i = b.op("reshape", span_of(b, 2, axis=1), shape=(2, 1))
        j = b.op("reshape", span_of(b, 4, axis=0), shape=(1, 4))
        row = b.op("broadcast", b.op("load", bias, b.op("reshape", j, shape=(4,))), shape=(4,))
        value = b.op("broadcast", b.op("reshape", row, shape=(1, 4)), shape=(2, 4))
        place = b.cast(b.op("broadcast", b.mul(i, b.splat(100, i)), shape=(2, 4)), f32)
        b.multi("store", out, i, j, b.add(value, place))

    data = np.arange(12, dtype=np.float32)
    result = np.empty((6, 12), np.float32)
    run_kernel(kernel([bias, out], [ceildiv(cols, 4), ceildiv(rows, 2)], body), [data, result], {"rows": 6, "cols": 12})
    np.testing.assert_array_equal(result, data + 100 * np.arange(6, dtype=np.float32)[:, None])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("kind", "reference"), [("add", np.sum), ("mul", np.prod), ("min", np.min), ("max", np.max)])
def test_reduce_tile_keeps_the_axis(kind: str, reference: Callable[..., np.ndarray], axis: int) -> None:
    shape = (4, 8)
    kept = tuple(1 if a == axis else e for a, e in enumerate(shape))
    x, out = Value(tensor(f32, *shape), "x"), Value(tensor(f32, *kept), "out")
    data = np.random.default_rng(0).integers(1, 4, shape).astype(np.float32)
    result = np.empty(kept, np.float32)
    program = unary_kernel(*shape, lambda b, v: b.op("reduce_tile", v, kind=kind, axis=axis), x, out)
    run_kernel(program, [data, result], {})
    np.testing.assert_array_equal(result, reference(data, axis=axis, keepdims=True))


def test_arg_reduction_and_item() -> None:
    x, out = Value(tensor(f32, "n", 8), "x"), Value(tensor(i64, "n"), "out")

    def body(b: Builder) -> None:
        row = b.op("program_id", axis=0)
        index = b.op("iota", shape=(8,), axis=0)
        _, where = b.multi("reduce_tile", b.op("load", x, row, index), index, kind="argmax", axis=0)
        b.multi("store", out, row, b.op("item", where))

    data = np.asarray([[0, 5, 5, 1, 2, 3, 4, 5], [0, np.nan, 9, np.nan, 0, 0, 0, 0], [7] * 8], np.float32)
    result = np.empty(3, np.int64)
    run_kernel(kernel([x, out], [N], body), [data, result], {"n": 3})
    assert list(result) == [1, 1, 0]


@pytest.mark.parametrize(("kind", "reference"), [("add", np.cumsum), ("max", np.maximum.accumulate)])
def test_scan_tile(kind: str, reference: Callable[..., np.ndarray]) -> None:
    x, out = Value(tensor(i32, 4, 8), "x"), Value(tensor(i32, 4, 8), "out")
    data = np.random.default_rng(0).integers(-9, 9, (4, 8)).astype(np.int32)
    result = np.empty_like(data)
    for position in range(2):
        result[:] = 0

        def body(b: Builder, v: Value, position: int = position) -> Value:
            first = b.op("broadcast", b.const(3, i32), shape=(4, 1))
            return b.multi("scan_tile", v, first, kind=kind, axis=1)[position]

        run_kernel(unary_kernel(4, 8, body, x, out), [data, result], {})
        found = reference(np.concatenate([np.full((4, 1), 3, np.int32), data], 1), axis=1)
        np.testing.assert_array_equal(result, found[:, :-1] if position == 0 else np.concatenate([found[:, -1:], np.zeros((4, 7), np.int32)], 1))


def test_transpose_reshape_slice() -> None:
    x, out = Value(tensor(f32, 4, 8), "x"), Value(tensor(f32, 2, 4), "out")
    data = np.arange(32, dtype=np.float32).reshape(4, 8)
    result = np.empty((2, 4), np.float32)

    def body(b: Builder, value: Value) -> Value:
        turned = b.op("convert_layout", b.op("transpose", value, order=(1, 0)))
        return b.op("slice", b.op("reshape", turned, shape=(4, 8)), start=(1, 3), shape=(2, 4))

    run_kernel(unary_kernel(4, 8, body, x, out), [data, result], {})
    np.testing.assert_array_equal(result, data.T.reshape(4, 8)[1:3, 3:7])


@pytest.mark.parametrize(
    ("dtype", "acc", "precision", "tolerance"),
    [
        (f32, f32, "ieee", 1e-6),
        (f32, f32, "tf32", 2e-3),
        (bf16, f32, "ieee", 1e-6),
        (f16, f16, "ieee", 1e-3),
        (i8, i32, "ieee", 0),
    ],
)
def test_dot(dtype: DType, acc: DType, precision: str, tolerance: float) -> None:
    x, y, out = Value(tensor(dtype, 4, 16), "x"), Value(tensor(dtype, 16, 8), "y"), Value(tensor(acc, 4, 8), "out")

    def body(b: Builder) -> None:
        def at(rows: int, cols: int) -> tuple[Value, Value]:
            return b.op("iota", shape=(rows, 1), axis=0), b.op("iota", shape=(1, cols), axis=1)

        start = b.op("broadcast", b.const(1, acc), shape=(4, 8))
        result = b.op("dot", b.op("load", x, *at(4, 16)), b.op("load", y, *at(16, 8)), start, precision=precision)
        b.multi("store", out, *at(4, 8), result)

    rng = np.random.default_rng(0)
    left = (rng.random((4, 16)) * 9 - 4).astype(dtype.numpy)
    right = (rng.random((16, 8)) * 9 - 4).astype(dtype.numpy)
    result = np.empty((4, 8), acc.numpy)
    run_kernel(kernel([x, y, out], [Size.of(1)], body), [left, right, result], {})
    expected = left.astype(np.float64) @ right.astype(np.float64) + 1
    error = np.abs(result.astype(np.float64) - expected).max() / np.abs(expected).max()
    assert error <= tolerance
    if precision == "tf32":
        assert error > 1e-6  # it is not f32 in disguise


def test_control_flow_differs_between_blocks() -> None:
    """Block p adds p+1 tiles of ones in a loop, and only even blocks store a 2-fold."""
    out = Value(tensor(f32, "n", 4), "out")

    def body(b: Builder) -> None:
        p = b.op("program_id", axis=0)
        zero = b.op("broadcast", b.const(0.0, f32), shape=(4,))
        one = b.op("broadcast", b.const(1.0, f32), shape=(4,))
        (total,) = b.for_(b.index(0), b.add(p, b.index(1)), b.index(1), [zero], lambda b, i, t: [b.add(t, one)])
        even = b.op("eq", b.op("mod", p, b.index(2)), b.index(0))
        (total,) = b.if_(even, lambda b: [b.add(total, total)], lambda b: [total])
        b.multi("store", out, p, b.op("iota", shape=(4,), axis=0), total)

    result = np.empty((5, 4), np.float32)
    run_kernel(kernel([out], [N], body), [result], {"n": 5})
    np.testing.assert_array_equal(result, np.repeat([[2], [2], [6], [4], [10]], 4, axis=1))


def test_atomics_from_all_blocks() -> None:
    """A histogram of i mod 3, a ticket for every element, and the largest value."""
    counts, tickets, top = (
        Value(tensor(i32, 3), "counts"),
        Value(tensor(i32, "n", 8), "tickets"),
        Value(tensor(f32, 1), "top"),
    )

    def body(b: Builder) -> None:
        p = b.op("program_id", axis=0)
        index = b.op("iota", shape=(8,), axis=0)
        one = b.op("broadcast", b.const(1, i32), shape=(8,))
        b.op("atomic", counts, b.op("mod", index, b.splat(3, index)), one, kind="add")
        zero = b.sub(index, index)
        b.multi("store", tickets, p, index, b.op("atomic", counts, zero, one, kind="add"))
        b.op("atomic", top, b.index(0), b.cast(p, f32), kind="max")

    histogram, order, best = np.zeros(3, np.int32), np.empty((5, 8), np.int32), np.zeros(1, np.float32)
    run_kernel(kernel([counts, tickets, top], [N], body), [histogram, order, best], {"n": 5})
    assert list(histogram) == [15 + 40, 15, 10]
    assert sorted(order.reshape(-1)) == list(range(15, 55))
    assert best[0] == 4


def shared_kernel(fill: bool = True) -> Kernel:
    """Copy rows of x through shared memory."""
    x, out = Value(tensor(f32, "n", 8), "x"), Value(tensor(f32, "n", 8), "out")

    def body(b: Builder) -> None:
        p = b.op("program_id", axis=0)
        buffer = b.op("alloc", name="buffer", dtype=f32, shape=(8,), space="shared")
        index = b.op("iota", shape=(8,), axis=0)
        if fill:
            b.multi("store", buffer, index, b.op("load", x, p, index))
        b.multi("store", out, p, index, b.op("load", buffer, index))

    return kernel([x, out], [N], body)


def test_each_block_has_shared_memory_of_its_own() -> None:
    data = np.arange(24, dtype=np.float32).reshape(3, 8)
    result = np.empty((3, 8), np.float32)
    run_kernel(shared_kernel(), [data, result], {"n": 3})
    np.testing.assert_array_equal(result, data)


def test_reading_what_nobody_wrote_is_a_fault() -> None:
    with pytest.raises(
        UserError, match=r"load of uninitialised shared memory: 'buffer'\[0\] was never written, in block \(0\)"
    ):
        run_kernel(shared_kernel(fill=False), [np.ones((3, 8), np.float32), np.ones((3, 8), np.float32)], {"n": 3})


def test_bf16_tiles() -> None:
    x, out = Value(tensor(bf16, 2, 8), "x"), Value(tensor(bf16, 2, 1), "out")
    data = np.full((2, 8), 1.5, ml_dtypes.bfloat16)
    result = np.zeros((2, 1), ml_dtypes.bfloat16)

    def body(b: Builder, value: Value) -> Value:
        assert dtype_of(value.type) is bf16
        return b.op("reduce_tile", b.op("mul", value, value), kind="add", axis=1)

    run_kernel(unary_kernel(2, 8, body, x, out), [data, result], {})
    np.testing.assert_array_equal(result.astype(np.float32), [[18.0], [18.0]])


def test_a_hundred_thousand_elements() -> None:
    data = np.random.default_rng(5).random(100_000, np.float32)
    result = np.empty_like(data)
    run_kernel(masked_map(), [data, result], {"n": 100_000})
    np.testing.assert_array_equal(result, data * 2)
