"""Operators along axes: sums and the like, softmax, indices of the largest, the largest few, running sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tilewright.graphs.onnx.loops import X, call, cast, choose
from tilewright.graphs.onnx.operator_rules import NodeKernel, NodeView, is_float, operator
from tilewright.graphs.onnx.operators.elementwise import converted
from tilewright.graphs.onnx.values import Known, Shape

I64 = np.dtype(np.int64)


def reduced_axes(node: NodeView, rank: int) -> list[int]:
    """The axes that a node reduces: an attribute once, an input today. Without any, all of them, or none where it says so."""
    axes = node.host_ints(1) if node.has_input(1) else node.integers("axes")
    if not axes:
        return [] if node.integer("noop_with_empty_axes") else list(range(rank))
    found = sorted({node.axis(a, rank) for a in axes})
    if len(found) != len(axes):
        raise node.error(f"axes {axes} name one twice", "TW003")
    return found


_KINDS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")


def extremes(dtype: np.dtype) -> tuple[float, float]:
    """The smallest and the largest number of a type."""
    if is_float(dtype):
        return -math.inf, math.inf
    if dtype.kind == "b":
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def kept(shape: Shape, axes: Sequence[int], keep: bool) -> Shape:
    """What is left of a shape."""
    return tuple(1 if a in axes else n for a, n in enumerate(shape) if keep or a not in axes)


def reduce_nest(node: NodeView, x: Known, axes: Sequence[int], keep: bool, compute: str) -> Known:
    """One kernel that reduces along axes. `compute` is the name after `Reduce`."""
    kernel = node.kernel(f"onnx_reduce_{compute.lower()}")
    out = kernel.output(kept(x.shape, axes, keep), x.dtype)
    count = math.prod(x.shape[a] for a in axes)
    one, zero = (1.0, 0.0) if is_float(x.dtype) else (1, 0)
    low, high = extremes(x.dtype)
    start: float = {"Max": low, "Min": high, "Prod": one}.get(compute, zero)
    rest = [a for a in range(x.rank) if a not in axes]
    with kernel.grid(*([x.shape[a] for a in rest] or [1])) as outer:
        place = dict(zip(rest, outer, strict=False))

        def element(inner: tuple[X, ...]) -> X:
            return kernel.read(x, *({**place, **dict(zip(axes, inner, strict=True))}[a] for a in range(x.rank)))

        extents = [x.shape[a] for a in axes]
        top = kernel.reduce(extents, low, lambda acc, i: kernel.set(acc, call("max", acc, element(i)))) if compute == "LogSumExp" else None
        if top is not None:
            top = kernel.let(choose(call("abs", top) == math.inf, 0.0, top))

        def step(acc: X, inner: tuple[X, ...]) -> None:
            value = element(inner)
            if compute in ("Max", "Min"):
                kernel.set(acc, call(compute.lower(), acc, value))
            elif compute == "Prod":
                kernel.set(acc, value, "*")
            else:
                if compute == "L1":
                    value = call("abs", value)
                elif compute in ("L2", "SumSquare"):
                    value = value * value
                elif compute == "LogSumExp":
                    assert top is not None
                    value = call("exp", value - top)
                kernel.set(acc, value, "+")

        found = kernel.reduce(extents, start, step)
        if compute == "Mean":
            found = found / float(count) if is_float(x.dtype) and count else (found // count if count else found / 0.0)
        elif compute == "L2":
            found = call("sqrt", found) if is_float(x.dtype) else call("sqrt", cast(found, np.dtype(np.float64)))
        elif compute == "LogSum":
            found = call("log", found)
        elif compute == "LogSumExp":
            assert top is not None
            found = call("log", found) + top
        if not is_float(x.dtype):
            found = cast(found, x.dtype)
        indices: list[object] = [place.get(a, 0) for a in range(x.rank) if keep or a not in axes]
        kernel.store(out, indices or [0], found)
    return kernel.finish_one()


@operator(*_KINDS, note="axes as input or attribute")
def reduction(node: NodeView) -> Known:
    x = node.input(0)
    axes = reduced_axes(node, x.rank)
    keep = bool(node.integer("keepdims", 1))
    compute = node.op.removeprefix("Reduce")
    if compute in ("LogSum", "LogSumExp", "Mean"):
        node.float_input(0) if compute != "Mean" else None
    if not axes and compute in ("Sum", "Mean", "Max", "Min", "Prod"):
        return x
    if x.dtype.kind == "b" and compute not in ("Max", "Min"):
        raise node.error("its input is bool", "TW009")
    if x.dtype.kind == "b":
        return _any_or_all(node, x, axes, keep, compute)
    return reduce_nest(node, x, axes, keep, compute)


def _any_or_all(node: NodeView, x: Known, axes: Sequence[int], keep: bool, compute: str) -> Known:
    numbers = converted(node, x, np.dtype(np.uint8))
    return converted(node, reduce_nest(node, numbers, axes, keep, compute), np.dtype(bool))


# -- softmax --------------------------------------------------------------------------------------------------------


def softmax_along(node: NodeView, x: Known, axis: int, logarithm: bool) -> Known:
    """Softmax along one axis, or its logarithm."""
    kernel = node.kernel()
    out = kernel.output(x.shape, x.dtype)
    rest = [n for a, n in enumerate(x.shape) if a != axis]
    with kernel.grid(*(rest or [1])) as outer:

        def place(j: X) -> list[object]:
            indices: list[object] = list(outer) if rest else []
            indices.insert(axis, j)
            return indices

        top = kernel.reduce([x.shape[axis]], -math.inf, lambda acc, j: kernel.set(acc, call("max", acc, kernel.read(x, *place(j[0])))))
        total = kernel.reduce([x.shape[axis]], 0.0, lambda acc, j: kernel.set(acc, call("exp", kernel.read(x, *place(j[0])) - top), "+"))
        if logarithm:
            total = kernel.let(call("log", total))
        with kernel.loop(x.shape[axis]) as j:
            shifted = kernel.read(x, *place(j)) - top
            kernel.store(out, place(j), shifted - total if logarithm else call("exp", shifted) / total)
    return kernel.finish_one()


@operator("Softmax", "LogSoftmax", note="before opset 13 over all axes from `axis` on")
def softmax(node: NodeView) -> Known:
    node.float_input(0)
    x = node.input(0)
    logarithm = node.op == "LogSoftmax"
    if x.rank == 0:
        flat = node.reshape(x, (1,))
        return node.reshape(softmax_along(node, flat, 0, logarithm), ())
    if node.opset >= 13:
        return softmax_along(node, x, node.axis(node.integer("axis", -1), x.rank), logarithm)
    axis = node.axis(node.integer("axis", 1), x.rank)
    rows = math.prod(x.shape[:axis])
    flat = node.reshape(x, (rows, math.prod(x.shape[axis:])))
    return node.reshape(softmax_along(node, flat, 1, logarithm), x.shape)


@operator("Hardmax")
def hardmax(node: NodeView) -> Known:
    x = node.input(0)
    axis = node.axis(node.integer("axis", -1), x.rank)
    best = _best(node, x, axis, True, False, False)
    kernel = node.kernel()
    out = kernel.output(x.shape, x.dtype)
    with kernel.grid(*x.shape) as i:
        at = kernel.read(best, *(0 if a == axis else i[a] for a in range(x.rank)))
        kernel.store(out, i, choose(at == i[axis], 1.0, 0.0))
    return kernel.finish_one()


# -- indices --------------------------------------------------------------------------------------------------------


def _best(node: NodeView, x: Known, axis: int, keep: bool, smallest: bool, last: bool) -> Known:
    """Where the largest or smallest element along an axis is."""
    kernel = node.kernel("onnx_argmin" if smallest else "onnx_argmax")
    out = kernel.output(kept(x.shape, (axis,), keep), I64)
    rest = [n for a, n in enumerate(x.shape) if a != axis]
    if not x.shape[axis]:
        raise node.error("there is no largest of no elements", "TW004")
    with kernel.grid(*(rest or [1])) as outer:

        def element(j: object) -> X:
            indices: list[object] = list(outer) if rest else []
            indices.insert(axis, j)
            return kernel.read(x, *indices)

        value, index = kernel.let(element(0)), kernel.let(0)
        with kernel.loop(x.shape[axis], 1) as j:
            here = kernel.let(element(j))
            better = (here < value if smallest else here > value) if not last else (here <= value if smallest else here >= value)
            with kernel.when(better):
                kernel.set(value, here)
                kernel.set(index, j)
        indices: list[object] = list(outer) if rest else []
        if keep:
            indices.insert(axis, 0)
        kernel.store(out, indices or [0], index)
    return kernel.finish_one()


@operator("ArgMax", "ArgMin")
def arg_extreme(node: NodeView) -> Known:
    x = node.input(0)
    axis = node.axis(node.integer("axis"), x.rank)
    return _best(node, x, axis, bool(node.integer("keepdims", 1)), node.op == "ArgMin", bool(node.integer("select_last_index")))


@operator("TopK", note="the rank of each element is counted; k must be known")
def top_k(node: NodeView) -> list[Known]:
    x = node.input(0)
    axis = node.axis(node.integer("axis", -1), x.rank)
    counts = node.host_ints(1)
    if len(counts) != 1 or not 0 <= counts[0] <= x.shape[axis]:
        raise node.error(f"k is {counts}, and axis {axis} has {x.shape[axis]} elements", "TW004")
    k, largest = counts[0], bool(node.integer("largest", 1))
    kernel = node.kernel()
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    low, _ = extremes(x.dtype)
    values = kernel.output(shape, x.dtype, low if is_float(x.dtype) else 0)
    places = kernel.output(shape, I64, 0)
    rest = [n for a, n in enumerate(x.shape) if a != axis]
    with kernel.grid(*(rest or [1])) as outer:

        def at(j: object) -> list[object]:
            indices: list[object] = list(outer) if rest else []
            indices.insert(axis, j)
            return indices

        with kernel.loop(x.shape[axis]) as j:
            own = kernel.let(kernel.read(x, *at(j)))

            def step(acc: X, inner: tuple[X, ...], own: X = own, j: X = j) -> None:
                other = kernel.read(x, *at(inner[0]))
                before = (other > own if largest else other < own) | ((other == own) & (inner[0] < j))
                kernel.set(acc, choose(before, 1, 0), "+")

            place = kernel.reduce([x.shape[axis]], 0, step)
            with kernel.when(place < k):
                kernel.store(values, at(place), own)
                kernel.store(places, at(place), j)
    return kernel.finish()


@operator("CumSum")
def cumulative_sum(node: NodeView) -> Known:
    x = node.input(0)
    (axis,) = node.host_ints(1) or [0]
    axis = node.axis(axis, x.rank)
    exclusive, reverse = bool(node.integer("exclusive")), bool(node.integer("reverse"))
    kernel = node.kernel()
    out = kernel.output(x.shape, x.dtype)
    rest = [n for a, n in enumerate(x.shape) if a != axis]
    with kernel.grid(*(rest or [1])) as outer:
        total = kernel.let(0.0 if is_float(x.dtype) else 0)
        with kernel.loop(x.shape[axis]) as j:
            at: list[object] = list(outer) if rest else []
            at.insert(axis, x.shape[axis] - 1 - j if reverse else j)
            if exclusive:
                kernel.store(out, at, _narrow(kernel, total, x.dtype))
            kernel.set(total, kernel.read(x, *at), "+")
            if not exclusive:
                kernel.store(out, at, _narrow(kernel, total, x.dtype))
    return kernel.finish_one()


def _narrow(kernel: NodeKernel, value: X, dtype: np.dtype) -> X:
    return value if is_float(dtype) else cast(value, dtype)
