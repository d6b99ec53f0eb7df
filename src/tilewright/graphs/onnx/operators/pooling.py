"""Pools: the largest or the mean of windows, or of whole images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tilewright.graphs.onnx.loops import X, call
from tilewright.graphs.onnx.operator_rules import NodeKernel, NodeView, operator
from tilewright.graphs.onnx.operators.reductions import extremes, reduce_nest
from tilewright.graphs.onnx.operators.windows import SlidingWindow, list_of, sliding
from tilewright.graphs.onnx.values import Known

I64 = np.dtype(np.int64)


def _image(node: NodeView) -> Known:
    x = node.input(0)
    if not 3 <= x.rank <= 5:
        raise node.error(f"its input is {list(x.shape)}", "TW003")
    return x


@operator("MaxPool")
def max_pool(node: NodeView) -> list[Known]:
    x = _image(node)
    sizes = list_of(node, "kernel_shape", x.rank - 2, 0)
    window = sliding(node, x.shape[2:], sizes, bool(node.integer("ceil_mode")))
    low, _ = extremes(x.dtype)
    kernel = node.kernel()
    shape = (*x.shape[:2], *window.results)
    out = kernel.output(shape, x.dtype)
    where = kernel.output(shape, I64) if node.outputs > 1 else None
    column_major = bool(node.integer("storage_order"))
    with kernel.grid(*shape) as i:
        outer, at = i[:2], i[2:]
        index = kernel.let(-1) if where is not None else None

        def step(acc: X, k: tuple[X, ...]) -> None:
            places, inside = window.places(kernel, at, k)
            with kernel.when(inside):
                value = kernel.read(x, *outer, *places)
                if index is None:
                    kernel.set(acc, call("max", acc, value))
                    return
                order = list(range(x.rank - 2))
                place: X | None = None
                for axis in reversed(order) if column_major else order:
                    place = places[axis] if place is None else place * x.shape[2 + axis] + places[axis]
                assert place is not None
                with kernel.when((value > acc) | (index < 0)):
                    kernel.set(acc, value)
                    kernel.set(index, (outer[0] * x.shape[1] + outer[1]) * math.prod(x.shape[2:]) + place)

        total = kernel.reduce(window.sizes, low, step)
        kernel.store(out, i, total)
        if where is not None and index is not None:
            kernel.store(where, i, index)
    return kernel.finish()


@operator("AveragePool", "LpPool")
def average_pool(node: NodeView) -> Known:
    node.float_input(0)
    x = _image(node)
    sizes = list_of(node, "kernel_shape", x.rank - 2, 0)
    window = sliding(node, x.shape[2:], sizes, bool(node.integer("ceil_mode")))
    with_pads = bool(node.integer("count_include_pad"))
    p = node.integer("p", 2)
    if node.op == "LpPool" and p < 1:
        raise node.error(f"p is {p}", "TW004")
    kernel = node.kernel()
    shape = (*x.shape[:2], *window.results)
    out = kernel.output(shape, x.dtype)
    with kernel.grid(*shape) as i:

        def step(acc: X, k: tuple[X, ...]) -> None:
            places, inside = window.places(kernel, i[2:], k)
            with kernel.when(inside):
                value = kernel.read(x, *i[:2], *places)
                if node.op == "LpPool":
                    value = call("abs", value) if p == 1 else value * value if p == 2 else call("pow", call("abs", value), float(p))
                kernel.set(acc, value, "+")

        total = kernel.reduce(window.sizes, 0.0, step)
        if node.op == "LpPool":
            kernel.store(out, i, total if p == 1 else call("sqrt", total) if p == 2 else call("pow", total, 1.0 / p))
        else:
            kernel.store(out, i, total / _counted(kernel, window, i[2:], with_pads))
    return kernel.finish_one()


def _counted(kernel: NodeKernel, window: SlidingWindow, at: Sequence[X], with_pads: bool) -> X | float:
    """How many elements of a window count: those inside the image, or also those in its frame."""
    constant, found = 1, None
    for axis, size in enumerate(window.sizes):
        before, dilation = window.before[axis], window.dilations[axis]
        low = -before if with_pads else 0
        high = window.extents[axis] + (window.after[axis] if with_pads else 0)
        reaches = (window.results[axis] - 1) * window.strides[axis] + (size - 1) * dilation - before
        if low == -before and reaches < high:
            constant *= size
            continue
        first = kernel.let(at[axis] * window.strides[axis] - before)
        beyond = call("max", high - 1 - first, -dilation) // dilation + 1  # elements below `high`
        under = call("max", low - first + dilation - 1, 0) // dilation  # elements below `low`
        count = call("min", beyond, size) - call("min", under, size)
        found = count if found is None else found * count
    return float(constant) if found is None else found * constant


@operator("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(node: NodeView) -> Known:
    x = node.input(0)
    if x.rank < 3:
        raise node.error(f"its input is {list(x.shape)}", "TW003")
    axes = list(range(2, x.rank))
    if node.op == "GlobalLpPool" and node.integer("p", 2) != 2:
        raise node.error(f"p is {node.integer('p', 2)}, not 2")
    return reduce_nest(node, x, axes, True, {"GlobalAveragePool": "Mean", "GlobalMaxPool": "Max", "GlobalLpPool": "L2"}[node.op])

