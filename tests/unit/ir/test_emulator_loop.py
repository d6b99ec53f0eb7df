"""The emulator at the loop stage: maps, reductions of every kind, control flow, strides, faults, programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest

from tilewright.base.dtypes import DType, bf16, bool_, by_name, f32, f64, i32, i64, u8
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size
from tilewright.base.source import Source, Span
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_kernel, run_program
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray, ProgramCheck, ScalarInput
from tilewright.ir.types import INDEX, Scalar, Tensor, tensor

TEXT = Source("k.py", "first line\nout[i] = x[i + 1]\n")
LINE_2 = Span(TEXT, 2, 10, 2, 18)


def kernel(params: Sequence[Value], body: Callable[[Builder], None]) -> Kernel:
    builder = Builder(LINE_2)
    body(builder)
    return Kernel("k", Stage.LOOP, tuple(params), Block((), tuple(builder.ops)))


def store(b: Builder, target: Value, *rest: Value) -> None:
    b.multi("store", target, *rest)


def test_elementwise_with_a_scalar_parameter() -> None:
    x, a, out = Value(tensor(f32, "n"), "x"), Value(Scalar(f32), "a"), Value(tensor(f32, "n"), "out")

    def body(b: Builder) -> None:
        def point(b: Builder, i: Value) -> list[Value]:
            store(b, out, i, b.op("fma", b.op("load", x, i), a, b.const(0.5, f32)))
            return []

        b.parallel([b.index(Size.of("n"))], point)

    data = np.arange(7, dtype=np.float32)
    result = np.empty(7, np.float32)
    run_kernel(kernel([x, a, out], body), [data, 3.0, result], {"n": 7})
    np.testing.assert_array_equal(result, data * 3 + np.float32(0.5))


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a, lambda a: a.T, lambda a: a[::-1], lambda a: a[:, ::-1], lambda a: a[::2, 1::3],
        lambda a: np.broadcast_to(a[:, :1], (a.shape[0], 5)), lambda a: np.broadcast_to(a[0], (4, a.shape[1])),
    ],
)  # fmt: skip
def test_any_strides(view: Callable[[np.ndarray], np.ndarray]) -> None:
    data = view(np.arange(48, dtype=np.float32).reshape(6, 8))
    rows, cols = Size.of("rows"), Size.of("cols")
    x = Value(Tensor(f32, (rows, cols), (Size.of("x$s0"), Size.of("x$s1"))), "x")
    out = Value(tensor(f32, "rows", "cols"), "out")

    def body(b: Builder) -> None:
        def point(b: Builder, i: Value, j: Value) -> list[Value]:
            store(b, out, i, j, b.op("neg", b.op("load", x, i, j)))
            return []

        b.parallel([b.index(rows), b.index(cols)], point)

    result = np.empty(data.shape, np.float32)
    strides = [s // 4 for s in data.strides]
    sizes = {"rows": data.shape[0], "cols": data.shape[1], "x$s0": strides[0], "x$s1": strides[1]}
    run_kernel(kernel([x, out], body), [data, result], sizes)
    np.testing.assert_array_equal(result, -data)
    with pytest.raises(UserError, match="has strides"):
        run_kernel(kernel([x, out], body), [data, result], {**sizes, "x$s0": strides[0] + 1})


def reduction(kind: str, dtype: DType, index: DType | None = None) -> Kernel:
    """out[i] = reduce over k of x[i, k]; for arg kinds also where[i]."""
    x, out = Value(tensor(dtype, "n", "m"), "x"), Value(tensor(dtype, "n"), "out")
    where = Value(tensor(index or i64, "n"), "where")

    def body(b: Builder) -> None:
        def point(b: Builder, i: Value) -> list[Value]:
            def element(b: Builder, k: Value) -> list[Value]:
                value = b.op("load", x, i, k)
                return [value] if index is None else [value, b.cast(k, index)]

            results = b.reduce(kind, [b.index(Size.of("m"))], element)
            store(b, out, i, results[0])
            if index is not None:
                store(b, where, i, results[1])
            return []

        b.parallel([b.index(Size.of("n"))], point)

    return kernel([x, out, where] if index else [x, out], body)


@pytest.mark.parametrize("dtype", ["f32", "f64", "i32", "u8"])
@pytest.mark.parametrize(
    ("kind", "reference"), [("add", np.add), ("mul", np.multiply), ("min", np.minimum), ("max", np.maximum)]
)
def test_arithmetic_reductions(kind: str, dtype: str, reference: np.ufunc) -> None:
    data = np.random.default_rng(1).integers(1, 5, (5, 7)).astype(by_name(dtype).numpy)
    result = np.empty(5, data.dtype)
    run_kernel(reduction(kind, by_name(dtype)), [data, result], {"n": 5, "m": 7})
    np.testing.assert_array_equal(result, reference.reduce(data, axis=1, dtype=data.dtype))


@pytest.mark.parametrize("dtype", ["bool", "i32", "u8"])
def test_bit_reductions(dtype: str) -> None:
    data = np.random.default_rng(2).integers(0, 200, (6, 3)).astype(by_name(dtype).numpy)
    for kind, reference in (("and", np.bitwise_and), ("or", np.bitwise_or)):
        result = np.empty(6, data.dtype)
        run_kernel(reduction(kind, by_name(dtype)), [data, result], {"n": 6, "m": 3})
        np.testing.assert_array_equal(result, reference.reduce(data, axis=1))


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("add", "f32", 0.0), ("mul", "f32", 1.0), ("min", "f32", np.inf), ("max", "f32", -np.inf), ("min", "i32", 2**31 - 1),
        ("max", "i32", -(2**31)), ("max", "u8", 0), ("and", "i32", -1), ("and", "bool", True), ("or", "bool", False),
    ],
)  # fmt: skip
def test_an_empty_reduction_is_the_identity(kind: str, dtype: str, expected: float) -> None:
    data = np.empty((2, 0), by_name(dtype).numpy)
    result = np.zeros(2, data.dtype)
    run_kernel(reduction(kind, by_name(dtype)), [data, result], {"n": 2, "m": 0})
    assert list(result) == [expected, expected]


def test_min_and_max_propagate_nan() -> None:
    data = np.asarray([[1, np.nan, 2], [3, 1, 2]], np.float32)
    for kind, clean in (("min", 1.0), ("max", 3.0)):
        result = np.empty(2, np.float32)
        run_kernel(reduction(kind, f32), [data, result], {"n": 2, "m": 3})
        assert np.isnan(result[0])
        assert result[1] == clean


@pytest.mark.parametrize("index", [i32, i64])
def test_arg_reductions_ties_and_nan(index: DType) -> None:
    nan = np.nan
    data = np.asarray([[3, 1, 3, 1], [1, nan, 9, nan], [-np.inf] * 4, [nan] * 4], np.float32)
    for kind, wanted in (("argmax", [0, 1, 0, 0]), ("argmin", [1, 1, 0, 0])):
        value, where = np.empty(4, np.float32), np.empty(4, index.numpy)
        run_kernel(reduction(kind, f32, index), [data, value, where], {"n": 4, "m": 4})
        assert list(where) == wanted
        np.testing.assert_array_equal(value, [data[r, w] for r, w in enumerate(wanted)])


def test_arg_reduction_of_nothing_has_an_index_that_never_wins() -> None:
    value, where = np.empty(1, np.float32), np.empty(1, np.int32)
    run_kernel(reduction("argmax", f32, i32), [np.empty((1, 0), np.float32), value, where], {"n": 1, "m": 0})
    assert (value[0], where[0]) == (-np.inf, 2**31 - 1)


def test_a_long_f32_sum_is_pairwise(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(3).random((1, 300_000), np.float32)
    result = np.empty(1, np.float32)
    run_kernel(reduction("add", f32), [data, result], {"n": 1, "m": 300_000})
    assert abs(result[0] / data.sum(dtype=np.float64) - 1) < 3e-7
    # Cut into blocks it is as good.
    monkeypatch.setattr("tilewright.ir.emulator.loop.CHUNK", 5000)
    run_kernel(reduction("add", f32), [data, result], {"n": 1, "m": 300_000})
    assert abs(result[0] / data.sum(dtype=np.float64) - 1) < 3e-7


def test_small_floats_are_summed_in_f32() -> None:
    data = np.ones((1, 4096), ml_dtypes.bfloat16)
    result = np.empty(1, ml_dtypes.bfloat16)
    run_kernel(reduction("add", bf16), [data, result], {"n": 1, "m": 4096})
    assert float(result[0]) == 4096.0


def test_chunks_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.ir.emulator.loop.CHUNK", 7)
    monkeypatch.setattr("tilewright.ir.emulator.loop._RUN", 3)
    data = np.random.default_rng(4).integers(-9, 9, (10, 11)).astype(np.int32)
    value, where = np.empty(10, np.int32), np.empty(10, np.int64)
    run_kernel(reduction("argmin", i32, i64), [data, value, where], {"n": 10, "m": 11})
    np.testing.assert_array_equal(where, data.argmin(axis=1))
    np.testing.assert_array_equal(value, data.min(axis=1))


def test_ragged_reduction_and_reduction_inside_if() -> None:
    """out[i] = sum of x[0..i], only for odd i; -1 elsewhere."""
    x, out = Value(tensor(f64, "n"), "x"), Value(tensor(f64, "n"), "out")

    def body(b: Builder) -> None:
        def point(b: Builder, i: Value) -> list[Value]:
            odd = b.op("eq", b.op("mod", i, b.index(2)), b.index(1))

            def then(b: Builder) -> list[Value]:
                return list(b.reduce("add", [b.add(i, b.index(1))], lambda b, k: [b.op("load", x, k)]))

            (value,) = b.if_(odd, then, lambda b: [b.const(-1.0, f64)])
            store(b, out, i, value)
            return []

        b.parallel([b.index(Size.of("n"))], point)

    data = np.arange(1.0, 10.0)
    result = np.empty(9)
    run_kernel(kernel([x, out], body), [data, result], {"n": 9})
    np.testing.assert_array_equal(result, [data[: i + 1].sum() if i % 2 else -1.0 for i in range(9)])


def test_serial_for_with_bounds_of_each_lane_both_directions() -> None:
    """out[i] = sum over j = i, i-1 … 1 of j, and the number of steps from 0 to i by 2."""
    out, steps = Value(tensor(i64, "n"), "out"), Value(tensor(i64, "n"), "steps")

    def body(b: Builder) -> None:
        def point(b: Builder, i: Value) -> list[Value]:
            zero, one = b.index(0), b.index(1)
            (total,) = b.for_(i, zero, b.index(-1), [zero], lambda b, j, s: [b.add(s, j)])
            (count,) = b.for_(zero, i, b.index(2), [zero], lambda b, j, s: [b.add(s, one)])
            store(b, out, i, total)
            store(b, steps, i, count)
            return []

        b.parallel([b.index(Size.of("n"))], point)

    result, counted = np.empty(6, np.int64), np.empty(6, np.int64)
    run_kernel(kernel([out, steps], body), [result, counted], {"n": 6})
    np.testing.assert_array_equal(result, [sum(range(i + 1)) for i in range(6)])
    np.testing.assert_array_equal(counted, [len(range(0, i, 2)) for i in range(6)])


def test_while_runs_as_long_as_each_lane_wants() -> None:
    """Collatz steps of i + 1."""
    out = Value(tensor(i64, "n"), "out")

    def body(b: Builder) -> None:
        def point(b: Builder, i: Value) -> list[Value]:
            one, two = b.index(1), b.index(2)
            start = b.add(i, one)
            types = [INDEX, INDEX]

            def test(b: Builder, x: Value, steps: Value) -> list[Value]:
                return [b.op("ne", x, one), x, steps]

            def step(b: Builder, x: Value, steps: Value) -> list[Value]:
                even = b.op("eq", b.op("mod", x, two), b.index(0))
                up = b.add(b.mul(x, b.index(3)), one)
                return [b.select(even, b.op("floordiv", x, two), up), b.add(steps, one)]

            regions = (b.region(types, ["x", "s"], test), b.region(types, ["x", "s"], step))
            results = (Value(INDEX), Value(INDEX))
            b.append(Op("while", (start, b.index(0)), results, {}, regions, LINE_2))
            store(b, out, i, results[1])
            return []

        b.parallel([b.index(Size.of("n"))], point)

    def collatz(x: int) -> int:
        return 0 if x == 1 else 1 + collatz(x // 2 if x % 2 == 0 else 3 * x + 1)

    result = np.empty(30, np.int64)
    run_kernel(kernel([out], body), [result], {"n": 30})
    np.testing.assert_array_equal(result, [collatz(i + 1) for i in range(30)])


def shifted(guard: bool) -> Kernel:
    """out[i] = x[i + 1], behind `if i + 1 < n` or not."""
    x, out = Value(tensor(f32, "n"), "x"), Value(tensor(f32, "n"), "out")

    def body(b: Builder) -> None:
        n = b.index(Size.of("n"))

        def point(b: Builder, i: Value) -> list[Value]:
            after = b.add(i, b.index(1))
            if guard:
                (value,) = b.if_(
                    b.op("lt", after, n), lambda b: [b.op("load", x, after)], lambda b: [b.const(0.0, f32)]
                )
            else:
                value = b.op("load", x, after)
            store(b, out, i, value)
            return []

        b.parallel([n], point, ["i"])

    return kernel([x, out], body)


def test_out_of_bounds_names_buffer_index_extent_iteration_and_line() -> None:
    data = np.ones(4, np.float32)
    with pytest.raises(UserError) as error:
        run_kernel(shifted(guard=False), [data, np.empty(4, np.float32)], {"n": 4})
    assert str(error.value) == (
        "k.py:2:10: error[TW050]: load of 'x' at [4] is out of bounds: index 4, extent 4, in iteration i = 3\n"
        "   |\n 2 | out[i] = x[i + 1]\n   |          ^^^^^^^^"
    )


def test_inactive_lanes_cannot_fail() -> None:
    data = np.asarray([1, 2, 3, 4], np.float32)
    result = np.empty(4, np.float32)
    run_kernel(shifted(guard=True), [data, result], {"n": 4})
    np.testing.assert_array_equal(result, [2, 3, 4, 0])


def test_a_store_to_a_read_only_array_is_a_fault() -> None:
    result = np.empty(4, np.float32)
    result.flags.writeable = False
    with pytest.raises(UserError, match="store to 'out', which is read-only"):
        run_kernel(shifted(guard=True), [np.ones(4, np.float32), result], {"n": 4})


def test_a_step_of_zero_is_a_fault() -> None:
    out = Value(tensor(i64), "out")

    def body(b: Builder) -> None:
        zero = b.index(0)
        b.parallel([], lambda b: (store(b, out, *b.for_(zero, b.index(3), zero, [zero], lambda b, j, s: [s])), [])[1])

    with pytest.raises(UserError, match=r"error\[TW050\]: a loop's step is 0"):
        run_kernel(kernel([out], body), [np.empty((), np.int64)], {})


def test_constants_wrap_and_bool_masks() -> None:
    out, mask = Value(tensor(u8, 1), "out"), Value(tensor(bool_, 1), "mask")

    def body(b: Builder) -> None:
        def point(b: Builder, i: Value) -> list[Value]:
            store(b, out, i, b.const(-1, u8))
            store(b, mask, i, b.op("not", b.const(False, bool_)))
            return []

        b.parallel([b.index(1)], point)

    result, flags = np.empty(1, np.uint8), np.zeros(1, np.bool_)
    run_kernel(kernel([out, mask], body), [result, flags], {})
    assert (result[0], flags[0]) == (255, True)


def scale_program() -> Program:
    """tmp = x + x; out = tmp * a, of which the first half only when `half`."""

    def step(kind: str) -> Kernel:
        source, target = Value(tensor(f32, "n"), "source"), Value(tensor(f32, "n"), "target")
        a = Value(Scalar(f32), "a")

        def body(b: Builder) -> None:
            def point(b: Builder, i: Value) -> list[Value]:
                value = b.op("load", source, i)
                store(b, target, i, b.op("add", value, value) if kind == "double" else b.op("mul", value, a))
                return []

            b.parallel([b.index(Size.of("n"))], point)

        return kernel([source, target] if kind == "double" else [source, a, target], body)

    n = tensor(f32, "n")
    return Program(
        "scale", (ProgramArray("x", n, "input"), ScalarInput("a", f32)), (ProgramArray("out", n, "output"),), (ProgramArray("tmp", n, "scratch"),),
        (KernelCall(step("double"), ("x", "tmp")), KernelCall(step("scale"), ("tmp", "a", "out"))),
        (ProgramCheck(Size.of("n"), "le", Size.of(8), "too long: {left} > {right}"),),
    )  # fmt: skip


def test_program_binds_sizes_and_makes_outputs_and_scratch() -> None:
    data = np.arange(5, dtype=np.float32)
    result = run_program(scale_program(), {"x": data, "a": 2.0})
    np.testing.assert_array_equal(result["out"], data * 4)
    given = np.empty(5, np.float32)
    assert run_program(scale_program(), {"x": data, "a": 2.0}, {"out": given})["out"] is given
    np.testing.assert_array_equal(run_program(scale_program(), {"x": data, "a": np.float32(2)})["out"], data * 4)
    with pytest.raises(UserError, match="output 'out' has rank 1, got 2"):
        run_program(scale_program(), {"x": data, "a": 2.0}, {"out": np.empty((5, 1), np.float32)})


def test_program_outputs_start_poisoned() -> None:
    program = scale_program()
    silent = Program(program.name, program.inputs, program.outputs, program.scratch, (), ())
    assert np.isnan(run_program(silent, {"x": np.ones(3, np.float32), "a": 1.0})["out"]).all()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": np.ones(9, np.float32), "a": 1.0}, r"error\[TW004\]: too long: 9 > 8"),
        ({"a": 1.0}, r"error\[TW008\]: missing input 'x'"),
        ({"x": np.ones(3, np.float64), "a": 1.0}, r"error\[TW009\]: .*has dtype f32, got f64"),
        ({"x": np.ones((3, 1), np.float32), "a": 1.0}, r"error\[TW003\]: input 'x' has rank 1, got 2"),
    ],
)
def test_program_checks_its_inputs(inputs: dict[str, np.ndarray | float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_program(scale_program(), inputs)


def test_a_kernel_of_a_hundred_thousand_elements() -> None:
    data = np.random.default_rng(5).random((100_000, 3), np.float32)
    result = np.empty(100_000, np.float32)
    run_kernel(reduction("add", f32), [data, result], {"n": 100_000, "m": 3})
    np.testing.assert_allclose(result, data.sum(axis=1), rtol=1e-6)
