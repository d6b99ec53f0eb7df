"""Sizes as machine code compute what `Size.evaluate` computes."""

from __future__ import annotations

import ctypes
import itertools

import pytest

from tilewright.base.sizes import Size, ceildiv, floordiv, maximum, minimum, mod, parse_size
from tilewright.base.target import host_cpu
from tilewright.codegen.llvm.native import compile_object
from tilewright.codegen.llvm.sizes import CHECKED_STEPS, DECLARATIONS, SizeEmitter
from tilewright.runtime.core.objects import ObjectCode

A, B = Size.of("a"), Size.of("b")
SIZES = [
    Size.of(0), Size.of(-7), A, -A, A * B - 3, 2 * A * A + 5 * B - 1, 4 - A,
    *(f(A, c) for f in (floordiv, ceildiv, mod) for c in (1, 2, 7, 16, 100, -3)),
    *(f(A, B) for f in (floordiv, ceildiv, mod, minimum, maximum)),
    *(f(A - B, 5) for f in (floordiv, ceildiv, mod)),
    ceildiv(A * B + 3, 8) * 8 - mod(A, 3) * floordiv(B, 2),
    minimum(A, 10) + maximum(B, -2),
    parse_size("min(ceildiv(a, 4), b) * floordiv(a + b, max(b, 1))"),
]  # fmt: skip
VALUES = [-17, -8, -1, 0, 1, 2, 3, 7, 8, 100, 4097]


@pytest.fixture(scope="module")
def function() -> tuple[ObjectCode, ctypes._CFuncPtr]:
    """All sizes in one function: `void f(i64 a, i64 b, i64* results)`, through one emitter."""
    lines: list[str] = []
    emitter = SizeEmitter(lines, {"a": "%a", "b": "%b"})
    for index, size in enumerate(SIZES):
        value = emitter.value(size)
        lines.append(f"  %to{index} = getelementptr i64, ptr %out, i64 {index}")
        lines.append(f"  store i64 {value}, ptr %to{index}")
    text = "\n".join([*DECLARATIONS, "define void @f(i64 %a, i64 %b, ptr %out) {", *lines, "  ret void", "}"])
    code = ObjectCode(compile_object(text, host_cpu()))
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    return code, kind(code.address("f"))


def test_same_values(function: tuple[ObjectCode, ctypes._CFuncPtr]) -> None:
    out = (ctypes.c_int64 * len(SIZES))()
    for a, b in itertools.product(VALUES, VALUES):
        function[1](a, b, ctypes.addressof(out))
        for size, found in zip(SIZES, out):
            assert found == size.evaluate({"a": a, "b": b}), (str(size), a, b)


def test_equal_steps_are_computed_once() -> None:
    lines: list[str] = []
    emitter = SizeEmitter(lines, {"a": "%a", "b": "%b"})
    emitter.value(3 * A * B + 1)
    count = len(lines)
    emitter.value(5 * A * B + 2)
    assert len(lines) == count + 2, "a product by five, and a sum"
    emitter.product(["%a", "%b"])
    assert len(lines) == count + 3, "the code around may have branched since"


def test_a_checked_step_says_when_it_leaves_64_bits() -> None:
    lines: list[str] = []
    emitter = SizeEmitter(lines, {"a": "%a", "b": "%b"}, checked=True)
    value = emitter.value(A * B * B - 3)
    (left,) = emitter.take_overflows()
    assert emitter.take_overflows() == []
    lines += [f"  store i64 {value}, ptr %out", f"  %said = zext i1 {left} to i64", "  ret i64 %said"]
    text = "\n".join([*DECLARATIONS, *CHECKED_STEPS, "define i64 @f(i64 %a, i64 %b, ptr %out) {", *lines, "}"])
    code = ObjectCode(compile_object(text, host_cpu()))
    run, out = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(code.address("f")), ctypes.c_int64()
    for a, b in itertools.product((*VALUES, 1 << 40, -(1 << 62)), (*VALUES, 1 << 20)):
        exact = a * b * b - 3
        fits = all(-(1 << 63) <= step < 1 << 63 for step in (a * b, a * b * b, exact))
        assert run(a, b, ctypes.addressof(out)) == (not fits), (a, b)
        assert not fits or out.value == exact


def test_equal_sizes_are_computed_once() -> None:
    lines: list[str] = []
    emitter = SizeEmitter(lines, {"a": "%a", "b": "%b"})
    first = emitter.value(A * B + 1)
    count = len(lines)
    assert emitter.value(1 + B * A) == first
    assert len(lines) == count


def test_branches_share_numbers_but_not_results() -> None:
    lines: list[str] = []
    emitter = SizeEmitter(lines, {"a": "%a", "b": "%b"})
    emitter.value(A + 1)
    branch = emitter.branch()
    inside = branch.value(A * B)
    outside = emitter.value(A * B)
    assert inside != outside
    assert len({line.split(" = ")[0] for line in lines}) == len(lines)
