"""Operators that read and write where data say: gathers and scatters."""

from __future__ import annotations

import numpy as np

from tilewright.graphs.onnx.loops import X, call, choose
from tilewright.graphs.onnx.operator_rules import NodeKernel, NodeView, is_float, operator
from tilewright.graphs.onnx.values import Known, as_rows

MOST_FOLDED = 1 << 24


def _index(value: X, extent: int, unsigned: bool = False) -> X:
    """An index that may count from the end."""
    return value if unsigned else choose(value < 0, value + extent, value)


def _known(node: NodeView, indices: Known, extent: int) -> np.ndarray | None:
    """Indices that are constants, inside."""
    if indices.host is None:
        return None
    if indices.size and (int(indices.host.min()) < -extent or int(indices.host.max()) >= extent):
        raise node.error(f"index {int(indices.host.min())} or {int(indices.host.max())} is outside of an axis of {extent}", "TW013")
    return indices.host


def _integers(node: NodeView, value: Known) -> None:
    if value.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise node.error(f"its indices are {value.dtype}", "TW009")


@operator("Gather")
def gather(node: NodeView) -> Known:
    x, indices = node.input(0), node.input(1)
    _integers(node, indices)
    if not x.rank:
        raise node.error("takes elements of a number", "TW003")
    axis = node.axis(node.integer("axis"), x.rank)
    extent = x.shape[axis]
    constant = _known(node, indices, extent)
    if constant is not None and x.host is not None and constant.size * (x.size // max(extent, 1)) <= MOST_FOLDED:
        return node.known(as_rows(np.take(x.host, np.where(constant < 0, constant + extent, constant), axis=axis)))
    if constant is not None and constant.size == 1:
        at = int(constant.reshape(-1)[0]) % extent
        one = node.slice(x, axis, at, 1)
        return node.reshape(one, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    kernel = node.kernel()
    out = kernel.output(shape, x.dtype)
    with kernel.grid(*(shape or (1,))) as i:
        i = i if shape else ()
        middle = i[axis : axis + indices.rank]
        place = kernel.let(_index(kernel.read(indices, *middle, literal=False), extent))
        kernel.store(out, i or [0], kernel.read(x, *i[:axis], place, *i[axis + indices.rank :], literal=False))
    return kernel.finish_one()


@operator("GatherElements")
def gather_elements(node: NodeView) -> Known:
    x, indices = node.input(0), node.input(1)
    _integers(node, indices)
    axis = node.axis(node.integer("axis"), x.rank)
    if indices.rank != x.rank or any(a > b for k, (a, b) in enumerate(zip(indices.shape, x.shape, strict=True)) if k != axis):
        raise node.error(f"takes {list(indices.shape)} of {list(x.shape)}", "TW004")
    _known(node, indices, x.shape[axis])
    kernel = node.kernel()
    out = kernel.output(indices.shape, x.dtype)
    with kernel.grid(*indices.shape) as i:
        place = kernel.let(_index(kernel.read(indices, *i, literal=False), x.shape[axis]))
        kernel.store(out, i, kernel.read(x, *(place if a == axis else i[a] for a in range(x.rank)), literal=False))
    return kernel.finish_one()


def _tuple_of(node: NodeView, kernel: NodeKernel, indices: Known, at: tuple[X, ...], x: Known, batch: int) -> list[X]:
    """The indices that a row of `indices` holds."""
    count = indices.shape[-1]
    return [kernel.let(_index(kernel.read(indices, *at, k, literal=False), x.shape[batch + k])) for k in range(count)]


@operator("GatherND")
def gather_nd(node: NodeView) -> Known:
    x, indices = node.input(0), node.input(1)
    _integers(node, indices)
    batch = node.integer("batch_dims")
    count = indices.shape[-1] if indices.rank else 0
    if not count or not 0 <= batch < indices.rank or batch + count > x.rank or x.shape[:batch] != indices.shape[:batch]:
        raise node.error(f"takes {list(indices.shape)} of {list(x.shape)}, batch_dims {batch}", "TW004")
    rest = x.shape[batch + count :]
    shape = (*indices.shape[:-1], *rest)
    kernel = node.kernel()
    out = kernel.output(shape, x.dtype)
    with kernel.grid(*(shape or (1,))) as i:
        i = i if shape else ()
        outer = indices.rank - 1
        place = _tuple_of(node, kernel, indices, i[:outer], x, batch)
        kernel.store(out, i or [0], kernel.read(x, *i[:batch], *place, *i[outer:], literal=False))
    return kernel.finish_one()


def _combined(kernel: NodeKernel, out: str, place: list[object], value: X, how: str) -> None:
    """`out[place] how= value`"""
    if how in ("none", ""):
        kernel.store(out, place, value)
    elif how in ("add", "mul"):
        kernel.store(out, place, value, "+" if how == "add" else "*")
    else:
        kernel.store(out, place, call(how, kernel.at(out, *place), value))


def _copied(node: NodeView, kernel: NodeKernel, x: Known) -> str:
    out = kernel.output(x.shape, x.dtype)
    with kernel.grid(*x.shape) as i:
        kernel.store(out, i, kernel.read(x, *i, literal=False))
    return out


def _reduction(node: NodeView, x: Known) -> str:
    how = node.text("reduction", "none")
    if how not in ("none", "add", "mul", "min", "max"):
        raise node.error(f"its reduction is '{how}'")
    if how != "none" and x.dtype.kind == "b":
        raise node.error("combines bools", "TW009")
    return how


@operator("ScatterND")
def scatter_nd(node: NodeView) -> Known:
    x, indices, updates = node.input(0), node.input(1), node.input(2)
    _integers(node, indices)
    count = indices.shape[-1] if indices.rank else 0
    if not count or count > x.rank or updates.shape != (*indices.shape[:-1], *x.shape[count:]) or updates.dtype != x.dtype:
        raise node.error(f"writes {updates.dtype}{list(updates.shape)} at {list(indices.shape)} of {x.dtype}{list(x.shape)}", "TW004")
    how = _reduction(node, x)
    kernel = node.kernel()
    out = _copied(node, kernel, x)
    outer = indices.rank - 1
    with _ordered(kernel, updates.shape or (1,)) as i:
        i = i if updates.shape else ()
        place = _tuple_of(node, kernel, indices, i[:outer], x, 0)
        _combined(kernel, out, [*place, *i[outer:]], kernel.read(updates, *i, literal=False), how)
    return kernel.finish_one()


@operator("ScatterElements", "Scatter")
def scatter_elements(node: NodeView) -> Known:
    x, indices, updates = node.input(0), node.input(1), node.input(2)
    _integers(node, indices)
    axis = node.axis(node.integer("axis"), x.rank)
    if indices.shape != updates.shape or indices.rank != x.rank or updates.dtype != x.dtype:
        raise node.error(f"writes {updates.dtype}{list(updates.shape)} at {list(indices.shape)} of {x.dtype}{list(x.shape)}", "TW004")
    how = _reduction(node, x)
    kernel = node.kernel()
    out = _copied(node, kernel, x)
    with _ordered(kernel, indices.shape) as i:
        place = kernel.let(_index(kernel.read(indices, *i, literal=False), x.shape[axis]))
        _combined(kernel, out, [place if a == axis else i[a] for a in range(x.rank)], kernel.read(updates, *i, literal=False), how)
    return kernel.finish_one()


def _ordered(kernel: NodeKernel, extents: tuple[int, ...]) -> _OrderedLoops:
    return _OrderedLoops(kernel, extents)


class _OrderedLoops:
    """Loops inside each other, in order: later updates win."""

    def __init__(self, kernel: NodeKernel, extents: tuple[int, ...]) -> None:
        self._loops = [kernel.loop(n) for n in extents]

    def __enter__(self) -> tuple[X, ...]:
        return tuple(loop.__enter__() for loop in self._loops)

    def __exit__(self, *error: object) -> None:
        for loop in reversed(self._loops):
            loop.__exit__(*error)  # type: ignore[arg-type]


@operator("OneHot")
def one_hot(node: NodeView) -> Known:
    indices, values = node.input(0), node.input(2)
    depth = int(node.host(1).reshape(-1)[0])
    rank = indices.rank + 1
    axis = node.axis(node.integer("axis", -1), rank)
    shape = (*indices.shape[:axis], depth, *indices.shape[axis:])
    kernel = node.kernel()
    out = kernel.output(shape, values.dtype)
    with kernel.grid(*shape) as i:
        raw = kernel.read(indices, *i[:axis], *i[axis + 1 :], literal=False)
        zero = 0.0 if is_float(indices.dtype) else 0
        place = choose(raw < zero, raw + (float(depth) if is_float(indices.dtype) else depth), raw)
        kernel.store(out, i, choose(place == i[axis], kernel.read(values, 1), kernel.read(values, 0)))
    return kernel.finish_one()
