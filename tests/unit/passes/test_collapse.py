"""Merging loops that walk memory as one."""

from __future__ import annotations

from support import add_2d, array, loop_kernel, scale_2d, strided
from tilewright.base.dtypes import f32
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor
from tilewright.ir.verify import verify_kernel
from tilewright.passes.loop.collapse import collapse


def loops(kernel: Kernel) -> list[Op]:
    verify_kernel(kernel)
    return [op for op in walk(kernel.body) if op.opcode in ("parallel", "reduce")]


def copy(rank: int, source: Value, target: Value, extents: list[str]) -> Kernel:
    def body(b: Builder, *indices: Value) -> None:
        b.multi("store", target, *indices, b.op("load", source, *indices))

    return loop_kernel("copy", [source, target], extents, body)


def test_contiguous_axes_merge() -> None:
    kernel = collapse(add_2d())
    (parallel,) = loops(kernel)
    assert len(parallel.operands) == 1
    for param in kernel.params:
        assert isinstance(param.type, Tensor)
        assert param.type.shape == (Size.of("rows") * Size.of("cols"),)
        assert param.type.strides == (Size.of(1),)


def test_four_axes_become_one() -> None:
    names = ["a", "b", "c", "d"]
    kernel = collapse(copy(4, array("x", f32, *names), array("o", f32, *names), names))
    assert len(loops(kernel)[0].operands) == 1


def test_rows_with_gaps_stay_apart() -> None:
    source = strided("x", f32, ["n", "m"], ["pitch", 1])
    kernel = collapse(copy(2, source, array("o", f32, "n", "m"), ["n", "m"]))
    assert len(loops(kernel)[0].operands) == 2


def test_only_the_inner_pair_merges_when_the_outer_has_gaps() -> None:
    source = strided("x", f32, ["n", "m", "k"], ["pitch", "k", 1])
    kernel = collapse(copy(3, source, array("o", f32, "n", "m", "k"), ["n", "m", "k"]))
    assert len(loops(kernel)[0].operands) == 2
    shape = kernel.params[0].type
    assert isinstance(shape, Tensor)
    assert shape.shape == (Size.of("n"), Size.of("m") * Size.of("k"))


def test_broadcast_operand_forbids_it() -> None:
    assert len(loops(collapse(scale_2d()))[0].operands) == 2


def test_transposition_forbids_it() -> None:
    x, o = array("x", f32, "n", "m"), array("o", f32, "m", "n")

    def body(b: Builder, i: Value, j: Value) -> None:
        b.multi("store", o, i, j, b.op("load", x, j, i))

    assert len(loops(collapse(loop_kernel("t", [x, o], ["m", "n"], body)))[0].operands) == 2


def test_an_index_used_as_a_number_forbids_it() -> None:
    x, o = array("x", f32, "n", "m"), array("o", f32, "n", "m")

    def body(b: Builder, i: Value, j: Value) -> None:
        b.multi("store", o, i, j, b.add(b.op("load", x, i, j), b.cast(j, f32)))

    assert len(loops(collapse(loop_kernel("numbered", [x, o], ["n", "m"], body)))[0].operands) == 2


def test_a_shifted_access_forbids_it() -> None:
    x, o = array("x", f32, "n", Size.of("m") + 1), array("o", f32, "n", "m")

    def body(b: Builder, i: Value, j: Value) -> None:
        b.multi("store", o, i, j, b.op("load", x, i, b.add(j, b.index(1))))

    assert len(loops(collapse(loop_kernel("shifted", [x, o], ["n", "m"], body)))[0].operands) == 2


def test_a_part_of_the_rows_forbids_it() -> None:
    """The loop must walk whole rows: `m - 1` of `m` columns leaves gaps."""
    x, o = array("x", f32, "n", "m"), array("o", f32, "n", "m")

    def body(b: Builder, i: Value, j: Value) -> None:
        b.multi("store", o, i, j, b.op("load", x, i, j))

    kernel = loop_kernel("part", [x, o], [Size.of("n"), Size.of("m") - 1], body)
    assert len(loops(collapse(kernel))[0].operands) == 2


def test_reduced_axes_merge() -> None:
    x, o = array("x", f32, "n", "m"), array("o", f32)

    def body(b: Builder) -> None:
        extents = [b.index(Size.of("n")), b.index(Size.of("m"))]
        b.multi("store", o, b.reduce("add", extents, lambda inner, i, j: [inner.op("load", x, i, j)])[0])

    kernel = collapse(loop_kernel("total", [x, o], [], body))
    assert [len(op.operands) for op in loops(kernel)] == [0, 1]
