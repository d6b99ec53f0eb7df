"""Operators that move elements: reshape, transpose, slices, joins, repetition, frames."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tilewright.graphs.onnx.loops import X, both, call, choose
from tilewright.graphs.onnx.operator_rules import NodeView, broadcast, is_float, literal_of, operator
from tilewright.graphs.onnx.values import Known, as_rows

MOST_FOLDED = 1 << 24
MOST_JOINED = 32
"""Arrays that one kernel joins."""
"""Elements of constants that are moved on the host."""


@operator("Reshape")
def reshape(node: NodeView) -> Known:
    x = node.input(0)
    wanted = node.host_ints(1) if node.has_input(1) else (node.integers("shape") or [])
    found = [x.shape[a] if n == 0 and not node.integer("allowzero") and a < x.rank else n for a, n in enumerate(wanted)]
    if found.count(-1) > 1 or any(n < -1 for n in found):
        raise node.error(f"the shape is {wanted}", "TW004")
    if -1 in found:
        rest = math.prod(n for n in found if n != -1)
        if rest == 0 or x.size % rest:
            raise node.error(f"{list(x.shape)} cannot have the shape {wanted}", "TW004")
        found[found.index(-1)] = x.size // rest
    return node.reshape(x, found)


@operator("Flatten")
def flatten(node: NodeView) -> Known:
    x = node.input(0)
    axis = node.integer("axis", 1)
    if not -x.rank <= axis <= x.rank:
        raise node.error(f"axis {axis} of {x.rank} axes", "TW003")
    axis = axis + x.rank if axis < 0 else axis
    return node.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _axes(node: NodeView) -> list[int] | None:
    """Axes as an input (opset 13) or an attribute."""
    return node.host_ints(1) if node.has_input(1) else node.integers("axes")


@operator("Squeeze", note="axes as input or attribute")
def squeeze(node: NodeView) -> Known:
    x = node.input(0)
    asked = _axes(node)
    axes = [a for a, n in enumerate(x.shape) if n == 1] if asked is None else [node.axis(a, x.rank) for a in asked]
    if any(x.shape[a] != 1 for a in axes):
        raise node.error(f"axes {axes} of {list(x.shape)} are not all of extent 1", "TW004")
    return node.reshape(x, [n for a, n in enumerate(x.shape) if a not in axes])


@operator("Unsqueeze", note="axes as input or attribute")
def unsqueeze(node: NodeView) -> Known:
    x = node.input(0)
    asked = _axes(node)
    if asked is None:
        raise node.error("has no axes", "TW008")
    rank = x.rank + len(asked)
    axes = [node.axis(a, rank) for a in asked]
    if len(set(axes)) != len(axes) or rank > 32:
        raise node.error(f"axes are {asked}", "TW003")
    rest = iter(x.shape)
    return node.reshape(x, [1 if a in axes else next(rest) for a in range(rank)])


@operator("Transpose")
def transpose(node: NodeView) -> Known:
    x = node.input(0)
    order = node.integers("perm") or list(reversed(range(x.rank)))
    if sorted(order) != list(range(x.rank)):
        raise node.error(f"perm is {order}, and there are {x.rank} axes", "TW003")
    return node.transpose(x, order)


@operator("Slice", note="starts, ends, axes and steps as inputs or attributes")
def slices(node: NodeView) -> Known:
    x = node.input(0)
    if node.opset < 10 or not node.has_input(1):
        starts, ends, axes = node.integers("starts"), node.integers("ends"), node.integers("axes")
        steps = None
    else:
        starts, ends = node.host_ints(1), node.host_ints(2)
        axes = node.host_ints(3) if node.has_input(3) else None
        steps = node.host_ints(4) if node.has_input(4) else None
    if starts is None or ends is None:
        raise node.error("has no starts or ends", "TW008")
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise node.error(f"starts {starts}, ends {ends}, axes {axes} and steps {steps} do not fit", "TW004")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = node.axis(axis, x.rank)
        picked = range(*slice(start, None if step < 0 and end < -x.shape[axis] else end, step).indices(x.shape[axis]))
        if step < 0:
            x = _reversed(node, x, axis, picked)
        else:
            x = node.slice(x, axis, picked.start if len(picked) else 0, len(picked), step)
    return x


def _reversed(node: NodeView, x: Known, axis: int, picked: range) -> Known:
    if x.host is not None:
        return node.known(as_rows(np.take(x.host, list(picked), axis=axis)))
    kernel = node.kernel()
    shape = (*x.shape[:axis], len(picked), *x.shape[axis + 1 :])
    out = kernel.output(shape, x.dtype)
    with kernel.grid(*shape) as i:
        kernel.store(out, i, kernel.read(x, *(picked.start - i[a] * -picked.step if a == axis else i[a] for a in range(x.rank))))
    return kernel.finish_one()


@operator("Split", note="sizes as input or attribute")
def split(node: NodeView) -> list[Known]:
    x = node.input(0)
    axis = node.axis(node.integer("axis"), x.rank)
    sizes = node.host_ints(1) if node.has_input(1) else node.integers("split")
    if sizes is None:
        count = node.integer("num_outputs", node.outputs)
        if count < 1 or count > max(1, x.shape[axis]):
            raise node.error(f"cuts {x.shape[axis]} elements into {count} parts", "TW004")
        each = -(-x.shape[axis] // count)
        sizes = [each] * (count - 1) + [x.shape[axis] - each * (count - 1)]
    if sum(sizes) != x.shape[axis] or any(n < 0 for n in sizes) or len(sizes) != node.outputs:
        raise node.error(f"cuts {x.shape[axis]} elements into {sizes} for {node.outputs} outputs", "TW004")
    found, start = [], 0
    for size in sizes:
        found.append(node.slice(x, axis, start, size))
        start += size
    return found


@operator("Concat")
def concat(node: NodeView) -> Known:
    values = [node.input(n) for n in range(len(node.inputs))]
    if not values:
        raise node.error("has no inputs", "TW008")
    axis = node.axis(node.integer("axis"), values[0].rank)
    shapes = {(*v.shape[:axis], *v.shape[axis + 1 :]) for v in values if v.rank == values[0].rank}
    if len(shapes) != 1 or any(v.rank != values[0].rank or v.dtype != values[0].dtype for v in values):
        raise node.error(f"joins {', '.join(f'{v.dtype}{list(v.shape)}' for v in values)} along axis {axis}", "TW004")
    if all(v.host is not None for v in values) and sum(v.size for v in values) <= MOST_FOLDED:
        return node.known(np.concatenate([v.host for v in values if v.host is not None], axis))
    values = [v for v in values if v.size] or values[:1]
    while len(values) > MOST_JOINED:  # many are joined in groups
        values = [joined(node, values[n : n + MOST_JOINED], axis) for n in range(0, len(values), MOST_JOINED)]
    return values[0] if len(values) == 1 else joined(node, values, axis)


def joined(node: NodeView, values: Sequence[Known], axis: int) -> Known:
    """Arrays one after the other along an axis."""
    first = values[0]
    kernel = node.kernel("onnx_concat")
    shape = (*first.shape[:axis], sum(v.shape[axis] for v in values), *first.shape[axis + 1 :])
    out = kernel.output(shape, first.dtype)
    start = 0
    for value in values:
        with kernel.grid(*value.shape) as i:
            kernel.store(out, [i[a] + start if a == axis else i[a] for a in range(first.rank)], kernel.read(value, *i, literal=False))
        start += value.shape[axis]
    return kernel.finish_one()


@operator("Expand")
def expand(node: NodeView) -> Known:
    x = node.input(0)
    shape = broadcast(node, x.shape, tuple(node.host_ints(1)))
    node.check_size(shape, x.dtype)
    if shape == x.shape:
        return x
    if x.host is not None and math.prod(shape) <= 1 << 16:
        return node.known(as_rows(np.broadcast_to(x.host, shape)))
    kernel = node.kernel()
    out = kernel.output(shape, x.dtype)
    with kernel.grid(*shape) as i:
        kernel.store(out, i, kernel.spread(x, i, shape, literal=False))
    return kernel.finish_one()


@operator("Tile")
def tile(node: NodeView) -> Known:
    x = node.input(0)
    repeats = node.host_ints(1)
    if len(repeats) != x.rank or any(n < 0 for n in repeats):
        raise node.error(f"repeats {list(x.shape)} by {repeats}", "TW004")
    shape = node.check_size([n * r for n, r in zip(x.shape, repeats, strict=True)], x.dtype)
    if all(r == 1 for r in repeats):
        return x
    if x.host is not None and math.prod(shape) <= 1 << 16:
        return node.known(np.tile(x.host, repeats))
    kernel = node.kernel()
    out = kernel.output(shape, x.dtype)
    extents = [e for n, r in zip(x.shape, repeats, strict=True) for e in (r, n)]
    with kernel.grid(*extents) as i:
        place = [i[2 * a] * x.shape[a] + i[2 * a + 1] for a in range(x.rank)]
        kernel.store(out, place, kernel.read(x, *i[1::2], literal=False))
    return kernel.finish_one()


@operator("Pad", note="constant, edge, reflect and wrap; negative pads cut")
def pad(node: NodeView) -> Known:
    x = node.input(0)
    pads = node.host_ints(1) if node.has_input(1) else node.integers("pads")
    axes = [node.axis(a, x.rank) for a in node.host_ints(3)] if node.has_input(3) else list(range(x.rank))
    mode = node.text("mode", "constant")
    if pads is None or len(pads) != 2 * len(axes) or mode not in ("constant", "edge", "reflect", "wrap"):
        raise node.error(f"pads are {pads}, mode is '{mode}', for {len(axes)} axes", "TW004")
    before, after = [0] * x.rank, [0] * x.rank
    for n, axis in enumerate(axes):
        before[axis], after[axis] = pads[n], pads[n + len(axes)]
    fill = node.maybe(2)
    if fill is None:
        zero = node.number("value") if node.opset < 11 and node.has("value") else 0
        fill = node.known(np.asarray(zero, x.dtype))
    shape = node.check_size([b + n + a for b, n, a in zip(before, x.shape, after, strict=True)], x.dtype)
    if shape == x.shape and not any(before):
        return x
    return padded(node, x, before, shape, mode, fill)


def padded(node: NodeView, x: Known, before: Sequence[int], shape: tuple[int, ...], mode: str, fill: Known) -> Known:
    """An array in a frame. `before` is how wide the frame is at the beginning of each axis."""
    kernel = node.kernel(f"onnx_pad_{mode}")
    number = literal_of(fill)
    if mode == "constant" and number is not None and x.size and all(b >= 0 and b + n <= m for b, n, m in zip(before, x.shape, shape, strict=True)):
        out = kernel.output(shape, x.dtype, number)  # the frame, and what stands in it
        with kernel.grid(*x.shape) as i:
            kernel.store(out, [i[a] + before[a] if before[a] else i[a] for a in range(x.rank)], kernel.read(x, *i, literal=False))
        return kernel.finish_one()
    out = kernel.output(shape, x.dtype)
    moved = [b != 0 or n != m for b, n, m in zip(before, x.shape, shape, strict=True)]
    if mode != "constant" and any(m and not n for m, n in zip(moved, x.shape, strict=True)):
        raise node.error(f"repeats elements of {list(x.shape)}, which has none", "TW004")
    inner = mode != "constant" and all(b >= 0 and b + n <= m for b, n, m in zip(before, x.shape, shape, strict=True))
    if inner:  # what stands in the frame is copied, and the frame alone is looked up
        with kernel.grid(*x.shape) as i:
            kernel.store(out, [i[a] + before[a] if before[a] else i[a] for a in range(x.rank)], kernel.read(x, *i, literal=False))
    with kernel.grid(*(shape or (1,))) as i:
        if mode != "constant":
            source = [i[a] - before[a] if moved[a] else i[a] for a in range(x.rank)]
            outside = _any(*(c for a in range(x.rank) if moved[a] for c in (source[a] < 0, source[a] >= x.shape[a])))
            with kernel.when(outside if inner else None):
                kernel.store(out, i, kernel.read(x, *(_folded(source[a], x.shape[a], mode) if moved[a] else i[a] for a in range(x.rank))))
        else:
            source = [kernel.let(i[a] - before[a]) if moved[a] else i[a] for a in range(x.rank)]
            inside = both(*(c for a in range(x.rank) if moved[a] for c in (source[a] >= 0, source[a] < x.shape[a])))
            nothing = kernel.read(fill, *([0] * fill.rank)) if literal_of(fill) is not None or fill.size == 1 else None
            if nothing is None:
                raise node.error(f"fills with {list(fill.shape)} values", "TW004")
            value = kernel.read(x, *source)
            if not x.size:
                value = nothing
            kernel.store(out, i, value if inside is None or not x.size else choose(inside, value, nothing))
    return kernel.finish_one()


def _any(*conditions: X) -> X | None:
    found: X | None = None
    for condition in conditions:
        found = condition if found is None else found | condition
    return found


def _folded(at: X, extent: int, mode: str) -> X:
    """An index outside an axis as one inside."""
    if mode == "edge":
        return call("min", call("max", at, 0), extent - 1)
    if mode == "wrap":
        return at % extent
    period = 2 * (extent - 1)
    if period == 0:
        return at * 0
    around = at % period
    return call("min", around, period - around)


@operator("Trilu")
def triangle(node: NodeView) -> Known:
    x = node.input(0)
    if x.rank < 2:
        raise node.error(f"its input has {x.rank} axes", "TW003")
    k = int(node.host(1).reshape(-1)[0]) if node.has_input(1) else 0
    upper = bool(node.integer("upper", 1))
    if x.host is not None and x.size <= MOST_FOLDED:
        return node.known(np.triu(x.host, k) if upper else np.tril(x.host, k))
    kernel = node.kernel()
    out = kernel.output(x.shape, x.dtype)
    zero: object = 0.0 if is_float(x.dtype) else (False if x.dtype.kind == "b" else 0)
    with kernel.grid(*x.shape) as i:
        difference = i[-1] - i[-2]
        kernel.store(out, i, choose(difference >= k if upper else difference <= k, kernel.read(x, *i), zero))
    return kernel.finish_one()


@operator("DepthToSpace", "SpaceToDepth")
def blocks(node: NodeView) -> Known:
    x, size = node.input(0), node.integer("blocksize")
    if x.rank != 4 or size < 1:
        raise node.error(f"its input is {list(x.shape)}, blocksize {size}", "TW003")
    n, c, h, w = x.shape
    if node.op == "SpaceToDepth":
        if h % size or w % size:
            raise node.error(f"blocks of {size} do not divide {list(x.shape)}", "TW004")
        cut = node.reshape(x, (n, c, h // size, size, w // size, size))
        order = (0, 3, 5, 1, 2, 4) if node.text("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
        return node.reshape(node.transpose(cut, order), (n, c * size * size, h // size, w // size))
    if c % (size * size):
        raise node.error(f"blocks of {size} do not divide {c} channels", "TW004")
    depth_first = node.text("mode", "DCR") == "DCR"
    cut = node.reshape(x, (n, size, size, c // size**2, h, w) if depth_first else (n, c // size**2, size, size, h, w))
    return node.reshape(node.transpose(cut, (0, 3, 4, 1, 5, 2) if depth_first else (0, 1, 4, 2, 5, 3)), (n, c // size**2, h * size, w * size))
