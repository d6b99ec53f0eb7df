"""Fusing multiplications with additions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from support import array, loop_kernel, program, run_cpu, run_stages
from tilewright.base.dtypes import DType, f32, i32
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Value, walk
from tilewright.ir.verify import verify_kernel
from tilewright.passes.loop.fuse_multiply_add import fuse_multiply_add


def kernel_of(expression: Callable[[Builder, Value, Value, Value], Value], dtype: DType = f32) -> Kernel:
    params = [array(n, dtype, "n") for n in "abc"]
    o = array("o", dtype, "n")

    def body(b: Builder, i: Value) -> None:
        b.multi("store", o, i, expression(b, *(b.op("load", p, i) for p in params)))

    return loop_kernel("fused", [*params, o], ["n"], body)


def opcodes(kernel: Kernel) -> list[str]:
    done = fuse_multiply_add(kernel)
    verify_kernel(done)
    return [op.opcode for op in walk(done.body) if op.opcode in ("add", "sub", "mul", "fma", "neg")]


def test_sum_of_a_product() -> None:
    assert opcodes(kernel_of(lambda b, x, y, z: b.add(b.mul(x, y), z))) == ["fma"]
    assert opcodes(kernel_of(lambda b, x, y, z: b.add(z, b.mul(x, y)))) == ["fma"]


def test_differences_negate_one_side() -> None:
    assert sorted(opcodes(kernel_of(lambda b, x, y, z: b.sub(b.mul(x, y), z)))) == ["fma", "neg"]
    assert sorted(opcodes(kernel_of(lambda b, x, y, z: b.sub(z, b.mul(x, y))))) == ["fma", "neg"]


def test_a_product_used_twice_stays() -> None:
    def twice(b: Builder, x: Value, y: Value, z: Value) -> Value:
        product = b.mul(x, y)
        return b.add(b.add(product, z), product)

    assert "fma" not in opcodes(kernel_of(twice))


def test_integers_stay() -> None:
    assert opcodes(kernel_of(lambda b, x, y, z: b.add(b.mul(x, y), z), i32)) == ["mul", "add"]


def test_one_of_two_products_is_fused() -> None:
    assert sorted(opcodes(kernel_of(lambda b, x, y, z: b.add(b.mul(x, y), b.mul(y, z))))) == ["fma", "mul"]


def test_a_product_stays_outside_the_loop_of_its_sum() -> None:
    """Moving it in would multiply once per iteration."""

    def looped(b: Builder, x: Value, y: Value, z: Value) -> Value:
        product = b.mul(x, y)
        return b.for_(b.index(0), b.index(5), b.index(1), [z], lambda inner, k, acc: [inner.add(product, acc)])[0]

    assert opcodes(kernel_of(looped)) == ["mul", "add"]


def test_all_devices_round_in_the_same_places() -> None:
    """(1 + e)(1 - e) - 1 is -e^2 when fused and 0 when not."""
    e = np.float32(2.0**-13)
    inputs = {"a": np.full(9, 1 + e), "b": np.full(9, 1 - e), "c": np.full(9, -1.0, np.float32)}
    whole = program(kernel_of(lambda b, x, y, z: b.add(b.mul(x, y), z)))
    results = run_stages(whole, inputs)
    for stage in ("loop", "tile", "thread"):
        np.testing.assert_array_equal(results[stage]["o"], np.float32(-(2.0**-26)))
    np.testing.assert_array_equal(run_cpu(whole, inputs)["o"], np.float32(-(2.0**-26)))


def test_sums_of_products_in_reductions() -> None:
    x, o = array("x", f32, "n"), array("o", f32)

    def body(b: Builder) -> None:
        def term(inner: Builder, k: Value) -> list[Value]:
            value = inner.op("load", x, k)
            return [inner.add(inner.mul(value, value), value)]

        b.multi("store", o, b.reduce("add", [b.index(Size.of("n"))], term)[0])

    assert opcodes(loop_kernel("dot", [x, o], [], body)) == ["fma"]


def test_a_product_of_a_fused_sum() -> None:
    """`(x*y + z)*y + z`: the inner sum is another value by the time the outer one is fused."""
    assert opcodes(kernel_of(lambda b, x, y, z: b.add(b.mul(b.add(b.mul(x, y), z), y), z))) == ["fma", "fma"]
    assert sorted(opcodes(kernel_of(lambda b, x, y, z: b.sub(z, b.mul(b.add(b.mul(x, y), z), y))))) == ["fma", "fma", "neg"]
