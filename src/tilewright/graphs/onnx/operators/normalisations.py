"""Normalisations: over layers, root mean squares, batches and instances."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tilewright.graphs.onnx.loops import X, call, choose
from tilewright.graphs.onnx.operator_rules import NodeView, is_float, operator
from tilewright.graphs.onnx.values import Known

F32 = np.dtype(np.float32)


def _rows(node: NodeView, x: Known, axis: int) -> tuple[int, int]:
    return math.prod(x.shape[:axis]), math.prod(x.shape[axis:])


def _flat(node: NodeView, value: Known | None, shape: tuple[int, ...], what: str) -> Known | None:
    """A scale or bias as one axis of the normalised elements."""
    if value is None:
        return None
    count = math.prod(shape)
    if value.size == count:
        return node.reshape(value, (count,))
    if value.size == 1:
        return node.reshape(value, ())
    raise node.error(f"its {what} is {list(value.shape)}, and it normalises {list(shape)}", "TW004")


def normalised(
    node: NodeView, x: Known, axis: int, scale: Known | None, bias: Known | None, epsilon: float, centred: bool,
    added: Sequence[Known] = (), statistics: bool = False,
) -> list[Known | None]:  # fmt: skip
    """`(x - mean) / sqrt(variance + epsilon) * scale + bias` over the axes from `axis` on; without a mean where not `centred`.
    `added` is summed up with `x` first, and the sum is the last result."""
    rows, columns = _rows(node, x, axis)
    inner = x.shape[axis:]
    scale, bias = _flat(node, scale, inner, "scale"), _flat(node, bias, inner, "bias")
    terms = [node.reshape(x, (rows, columns)), *(node.reshape(v, (rows, columns)) if v.size == x.size else _flat(node, v, inner, "bias") for v in added)]
    kernel = node.kernel("onnx_layer_norm" if centred else "onnx_rms_norm")
    out = kernel.output((rows, columns), x.dtype)
    wide = x.dtype if x.dtype == np.float64 else F32
    mean_out = kernel.output((rows,), wide) if statistics and centred else None
    deviation_out = kernel.output((rows,), wide) if statistics else None
    sum_out = kernel.output((rows, columns), x.dtype) if added else None
    with kernel.grid(rows) as (i,):

        def element(j: X) -> X:
            found: X | None = None
            for term in terms:
                assert term is not None
                value = kernel.read(term, *((i, j) if term.rank == 2 else (j,)), literal=term.rank == 0)
                found = value if found is None else found + value
            assert found is not None
            return found

        mean: X | None = None
        if centred:
            mean = kernel.let(kernel.reduce([columns], 0.0, lambda acc, j: kernel.set(acc, element(j[0]), "+")) / float(columns))

        def square(acc: X, j: tuple[X, ...]) -> None:
            value = element(j[0]) if mean is None else element(j[0]) - mean
            kernel.set(acc, value * value, "+")

        deviation = kernel.let(1.0 / call("sqrt", kernel.reduce([columns], 0.0, square) / float(columns) + epsilon))
        if mean_out is not None and mean is not None:
            kernel.store(mean_out, (i,), mean)
        if deviation_out is not None:
            kernel.store(deviation_out, (i,), deviation)
        with kernel.loop(columns) as j:
            value = element(j)
            if sum_out is not None:
                kernel.store(sum_out, (i, j), value)
            value = (value if mean is None else value - mean) * deviation
            if scale is not None:
                value = value * kernel.read(scale, j)
            if bias is not None:
                value = value + kernel.read(bias, j)
            kernel.store(out, (i, j), value)
    made = kernel.finish()
    found: list[Known | None] = [node.reshape(made.pop(0), x.shape)]
    small = (*x.shape[:axis], *(1 for _ in inner))
    found.append(node.reshape(made.pop(0), small) if mean_out is not None else None)
    found.append(node.reshape(made.pop(0), small) if deviation_out is not None else None)
    found.append(node.reshape(made.pop(0), x.shape) if sum_out is not None else None)
    return found


@operator("LayerNormalization")
def layer_normalisation(node: NodeView) -> list[Known | None]:
    node.float_input(0)
    x = node.input(0)
    axis = node.axis(node.integer("axis", -1), x.rank)
    return normalised(node, x, axis, node.input(1), node.maybe(2), node.number("epsilon", 1e-5), True, statistics=node.outputs > 1)[:3]


@operator("RMSNormalization")
def rms_normalisation(node: NodeView) -> list[Known | None]:
    node.float_input(0)
    x = node.input(0)
    return normalised(node, x, node.axis(node.integer("axis", -1), x.rank), node.input(1), None, node.number("epsilon", 1e-5), False)[:1]


@operator("SimplifiedLayerNormalization")
@operator("SimplifiedLayerNormalization", domain="com.microsoft")
def simplified_layer_normalisation(node: NodeView) -> list[Known | None]:
    node.float_input(0)
    x = node.input(0)
    found = normalised(node, x, node.axis(node.integer("axis", -1), x.rank), node.input(1), None, node.number("epsilon", 1e-5), False, statistics=node.outputs > 1)
    return [found[0], found[2]]


@operator("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain="com.microsoft")
def skip_layer_normalisation(node: NodeView) -> list[Known | None]:
    node.float_input(0)
    x, skip = node.input(0), node.input(1)
    centred = node.op == "SkipLayerNormalization"
    bias = node.maybe(3) if centred else None
    extra = node.maybe(4) if centred else node.maybe(3)
    if skip.shape != x.shape:
        raise node.error(f"adds {list(skip.shape)} to {list(x.shape)}", "TW004")
    added = [skip, *([extra] if extra is not None else [])]
    found = normalised(node, x, x.rank - 1, node.input(2), bias, node.number("epsilon", 1e-12), centred, added, statistics=False)
    return [found[0], None, None, found[3]]


@operator("BatchNormalization", note="inference")
def batch_normalisation(node: NodeView) -> Known:
    node.float_input(0)
    x, scale, bias, mean, variance = (node.input(n) for n in range(5))
    channels = x.shape[1] if x.rank > 1 else 1
    if node.integer("training_mode") or any(v.shape != (channels,) for v in (scale, bias, mean, variance)):
        raise node.error(f"is in training mode, or its statistics do not fit {channels} channels", "TW004")
    epsilon = node.number("epsilon", 1e-5)
    statistics = (scale, bias, mean, variance)
    kernel = node.kernel()
    out = kernel.output(x.shape, x.dtype)
    if all(v.host is not None for v in statistics):
        s, b, m, v = (np.asarray(value.host, np.float64) for value in statistics)
        factor = s / np.sqrt(v + epsilon)
        slope, offset = node.known(factor.astype(scale.dtype)), node.known((b - m * factor).astype(scale.dtype))
        with kernel.grid(*x.shape) as i:
            c = i[1] if x.rank > 1 else 0
            kernel.store(out, i, kernel.read(x, *i) * kernel.read(slope, c) + kernel.read(offset, c))
        return kernel.finish_one()
    with kernel.grid(*x.shape) as i:
        c = i[1] if x.rank > 1 else 0
        centred = kernel.read(x, *i) - kernel.read(mean, c)
        kernel.store(out, i, centred / call("sqrt", kernel.read(variance, c) + epsilon) * kernel.read(scale, c) + kernel.read(bias, c))
    return kernel.finish_one()


def _grouped(node: NodeView, x: Known, groups: int, scale: Known, bias: Known) -> Known:
    """Each group of channels of each image by itself; scale and bias by channel."""
    if x.rank < 2 or not groups or x.shape[1] % groups or scale.shape != (x.shape[1],) or bias.shape != (x.shape[1],):
        raise node.error(f"its input is {list(x.shape)}, {groups} groups, scale {list(scale.shape)}", "TW004")
    batch, channels = x.shape[:2]
    pixels, each = math.prod(x.shape[2:]), channels // groups
    cut = node.reshape(x, (batch, groups, each, pixels))
    kernel = node.kernel()
    out = kernel.output(cut.shape, x.dtype)
    count = float(each * pixels)
    epsilon = node.number("epsilon", 1e-5)
    with kernel.grid(batch, groups) as (b, g):
        mean = kernel.let(kernel.reduce([each, pixels], 0.0, lambda acc, k: kernel.set(acc, kernel.read(cut, b, g, *k), "+")) / count)

        def square(acc: X, k: tuple[X, ...]) -> None:
            value = kernel.read(cut, b, g, *k) - mean
            kernel.set(acc, value * value, "+")

        deviation = kernel.let(1.0 / call("sqrt", kernel.reduce([each, pixels], 0.0, square) / count + epsilon))
        with kernel.loop(each) as c, kernel.loop(pixels) as p:
            channel = g * each + c
            kernel.store(out, (b, g, c, p), (kernel.read(cut, b, g, c, p) - mean) * deviation * kernel.read(scale, channel) + kernel.read(bias, channel))
    return node.reshape(kernel.finish_one(), x.shape)


@operator("InstanceNormalization")
def instance_normalisation(node: NodeView) -> Known:
    node.float_input(0)
    x = node.input(0)
    return _grouped(node, x, x.shape[1] if x.rank > 1 else 0, node.input(1), node.input(2))


@operator("GroupNormalization")
def group_normalisation(node: NodeView) -> Known:
    node.float_input(0)
    x, scale, bias, groups = node.input(0), node.input(1), node.input(2), node.integer("num_groups")
    if scale.shape == (groups,) != (x.shape[1],) and scale.host is not None and bias.host is not None and groups and not x.shape[1] % groups:
        each = x.shape[1] // groups  # before opset 21 scale and bias are by group
        scale, bias = node.known(np.repeat(scale.host, each)), node.known(np.repeat(bias.host, each))
    return _grouped(node, x, groups, scale, bias)


@operator("LpNormalization")
def lp_normalisation(node: NodeView) -> Known:
    node.float_input(0)
    x = node.input(0)
    axis, p = node.axis(node.integer("axis", -1), x.rank), node.integer("p", 2)
    if p not in (1, 2) or not is_float(x.dtype):
        raise node.error(f"p is {p}", "TW004")
    kernel = node.kernel()
    out = kernel.output(x.shape, x.dtype)
    rest = [n for a, n in enumerate(x.shape) if a != axis]
    with kernel.grid(*(rest or [1])) as outer:

        def at(j: X) -> list[object]:
            indices: list[object] = list(outer) if rest else []
            indices.insert(axis, j)
            return indices

        def step(acc: X, j: tuple[X, ...]) -> None:
            value = kernel.read(x, *at(j[0]))
            kernel.set(acc, call("abs", value) if p == 1 else value * value, "+")

        total = kernel.reduce([x.shape[axis]], 0.0, step)
        norm = kernel.let(total if p == 1 else call("sqrt", total))
        with kernel.loop(x.shape[axis]) as j:
            kernel.store(out, at(j), choose(norm == 0.0, 0.0, kernel.read(x, *at(j)) / norm))
    return kernel.finish_one()
