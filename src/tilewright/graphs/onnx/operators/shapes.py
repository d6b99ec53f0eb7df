"""Operators about shapes and constants, and those that choose between graphs."""

from __future__ import annotations

import math

import numpy as np

from tilewright.graphs.onnx.loops import cast, choose, x_of
from tilewright.graphs.onnx.operator_rules import NodeView, is_float, operator
from tilewright.graphs.onnx.tensors import DTYPES
from tilewright.graphs.onnx.values import Known

I64 = np.dtype(np.int64)


@operator("Shape")
def shape(node: NodeView) -> Known:
    x = node.input(0)
    start, end = node.integer("start"), node.integer("end", x.rank)
    return node.known(np.array(x.shape[slice(start, end)], I64))


@operator("Size")
def size(node: NodeView) -> Known:
    return node.known(np.array(node.input(0).size, I64))


@operator("Constant")
def constant(node: NodeView) -> Known:
    found = node.attribute_tensor("value")
    if found is not None:
        return node.known(found)
    for name, dtype in (("value_float", np.float32), ("value_int", np.int64)):
        if node.has(name):
            return node.known(np.array(node.number(name) if name == "value_float" else node.integer(name), dtype))
    for name, dtype in (("value_floats", np.float32), ("value_ints", np.int64)):
        if node.has(name):
            value = node.record.attributes[name].value
            if not isinstance(value, list):
                raise node.error(f"its attribute '{name}' is no list", "TW009")
            return node.known(np.array(value, dtype))
    raise node.error("its value is of a kind that there is not here")


@operator("ConstantOfShape")
def constant_of_shape(node: NodeView) -> Known:
    wanted = node.host_ints(0)
    fill = node.attribute_tensor("value")
    fill = np.zeros(1, np.float32) if fill is None else fill
    if fill.size != 1:
        raise node.error(f"its value has {fill.size} elements", "TW004")
    node.check_size(wanted, fill.dtype)
    return _full(node, tuple(wanted), fill.reshape(()))


def _full(node: NodeView, wanted: tuple[int, ...], fill: np.ndarray) -> Known:
    if math.prod(wanted) <= 1 << 16:
        return node.known(np.full(wanted, fill, fill.dtype))
    kernel = node.kernel()
    source = node.known(fill)
    out = kernel.output(wanted, fill.dtype)
    with kernel.grid(*wanted) as indices:
        kernel.store(out, indices, kernel.read(source))
    return kernel.finish_one()


@operator("Range")
def number_range(node: NodeView) -> Known:
    start, limit, delta = (node.host(n).reshape(-1) for n in range(3))
    if any(a.size != 1 for a in (start, limit, delta)) or start.dtype != limit.dtype or start.dtype != delta.dtype:
        raise node.error("its inputs are not three numbers of one type", "TW009")
    first, last, step = (a[0].item() if start.dtype.kind in "iu" else float(a[0]) for a in (start, limit, delta))
    if step == 0 or not all(math.isfinite(v) for v in (first, last, step)):
        raise node.error(f"goes from {first} to {last} by {step}", "TW004")
    count = int(max(0, math.ceil((last - first) / step)) if start.dtype.kind == "f" else max(0, -((first - last) // step)))
    node.check_size((count,), start.dtype)
    if count <= 1 << 16:
        return node.known((first + np.arange(count) * step).astype(start.dtype))
    kernel = node.kernel()
    out = kernel.output((count,), start.dtype)
    with kernel.grid(count) as (i,):
        kernel.store(out, (i,), cast(x_of(first) + cast(i, start.dtype) * step, start.dtype))
    return kernel.finish_one()


@operator("Identity")
def identity(node: NodeView) -> Known:
    return node.input(0)


@operator("Dropout", note="inference: the mask is all true")
def dropout(node: NodeView) -> list[Known | None]:
    x = node.input(0)
    if node.has_input(2) and bool(node.host(2).reshape(-1)[0]):
        raise node.error("is in training mode")
    mask = _full(node, x.shape, np.array(True)) if node.outputs > 1 else None
    return [x, mask]


@operator("If", note="the condition must be known when the model is planned")
def choice(node: NodeView) -> list[Known]:
    condition = node.host(0)
    if condition.dtype != np.bool_ or condition.size != 1:
        raise node.error(f"its condition is {condition.dtype} of shape {list(condition.shape)}", "TW009")
    return node.subgraph("then_branch" if condition.reshape(-1)[0] else "else_branch")


@operator("EyeLike")
def eye_like(node: NodeView) -> Known:
    x = node.input(0)
    if x.rank != 2:
        raise node.error(f"its input has {x.rank} axes, not 2", "TW003")
    number = node.integer("dtype")
    dtype = DTYPES.get(number, x.dtype)
    node.check_size(x.shape, dtype)
    return node.known(np.eye(x.shape[0], x.shape[1], k=node.integer("k"), dtype=dtype)) if x.size <= 1 << 22 else _eye(node, x, dtype)


def _eye(node: NodeView, x: Known, dtype: np.dtype) -> Known:
    kernel = node.kernel()
    out = kernel.output(x.shape, dtype)
    one, zero = (1.0, 0.0) if is_float(dtype) else (1, 0)
    with kernel.grid(*x.shape) as (i, j):
        kernel.store(out, (i, j), choose(j - i == node.integer("k"), one, zero))
    return kernel.finish_one()
