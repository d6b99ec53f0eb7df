"""Ops of one element each: arithmetic with broadcasting as in NumPy, functions, Copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.base.dtypes import DType
from tilewright.base.sizes import Size
from tilewright.execute.kernel import Kernel
from tilewright.graphs.kernels import elementwise
from tilewright.graphs.registry import Lowered, NodeCall, OpParam, OpRecord, TensorType, add_op
from tilewright.graphs.tensor import SizeShape, Tensor


def broadcast(call: NodeCall, *tensors: Tensor) -> SizeShape:
    """The shape of arrays together, as in NumPy; an axis of extent 1 repeats where it is known to be 1."""
    rank = max(t.ndim for t in tensors)
    shape: list[Size] = []
    for axis in range(rank):
        extents = [t.sizes[axis - rank + t.ndim] for t in tensors if axis - rank + t.ndim >= 0]
        wide = [e for e in extents if e.constant != 1] or extents[:1]
        for other in wide[1:]:
            call.same(wide[0], other, f"axis {axis} of {' and '.join(repr(t.name) for t in tensors)}")
        shape.append(wide[0])
    return tuple(shape)


def spread(tensor: Any, shape: SizeShape) -> Any:
    """A tensor as kernels of whole arrays take it: missing axes in front are theirs to repeat, axes of extent 1 are views."""
    if not isinstance(tensor, Tensor):
        return tensor
    own = shape[len(shape) - tensor.ndim :]
    return tensor.expand(*own) if any(a.constant == 1 and b.constant != 1 for a, b in zip(tensor.sizes, own, strict=True)) else tensor


def _pair_rule(call: NodeCall) -> TensorType:
    tensors = [t for t in (call["x"], call["y"]) if isinstance(t, Tensor)]
    if not tensors:
        raise call.fail("both inputs are numbers", "TW009")
    if len(tensors) == 2:
        call.same_dtype(*tensors)
    first = tensors[0]
    number = next((v for v in (call["x"], call["y"]) if not isinstance(v, Tensor)), 0)
    if not first.dtype.is_float and (isinstance(number, float) or call.op == "Div"):
        raise call.fail(f"'{first.name}' is {first.form}, and the result would be of floats", "TW006", "cast it with a Copy node: g.op(\"Copy\", x, dtype=tw.f32)")
    return TensorType(broadcast(call, *tensors), first.dtype)


def _pair(kernel: Kernel[..., Any]) -> Callable[[NodeCall], Lowered]:
    def lower(call: NodeCall) -> Lowered:
        shape = broadcast(call, *(t for t in (call["x"], call["y"]) if isinstance(t, Tensor)))
        dtype = next(t.dtype for t in (call["x"], call["y"]) if isinstance(t, Tensor))
        return Lowered(kernel, {name: spread(call[name], shape) for name in ("x", "y")}, (TensorType(shape, dtype),))

    return lower


def _one(kernel: Callable[[NodeCall], Kernel[..., Any]]) -> Callable[[NodeCall], Lowered]:
    """A kernel of each element."""
    return lambda call: Lowered(kernel(call), {}, (TensorType(call["x"].sizes, call["x"].dtype),))


def _always(kernel: Kernel[..., Any]) -> Callable[[NodeCall], Lowered]:
    return _one(lambda call: kernel)


def _one_rule(call: NodeCall) -> TensorType:
    x: Tensor = call["x"]
    if not x.dtype.is_float:
        raise call.fail(f"'x' is {x.form}, not an array of floats", "TW009")
    return TensorType(x.sizes, x.dtype)


def _copy_rule(call: NodeCall) -> TensorType:
    x: Tensor = call["x"]
    return TensorType(x.sizes, call["dtype"] or x.dtype)


for _name, _kernel, _doc in (
    ("Add", elementwise.add, "x + y"), ("Sub", elementwise.sub, "x - y"), ("Mul", elementwise.mul, "x * y"), ("Div", elementwise.div, "x / y"),
):  # fmt: skip
    add_op(OpRecord(_name, ("x", "y"), _pair_rule, _pair(_kernel), doc=f"{_doc}, with broadcasting; one of them may be a number"))
for _name, _function, _doc in (
    ("Silu", elementwise.silu, "x · sigmoid(x)"), ("Relu", elementwise.relu, "max(x, 0)"), ("Sigmoid", elementwise.sigmoid, "1 / (1 + exp(-x))"),
    ("Tanh", elementwise.tanh, "tanh(x)"), ("Exp", elementwise.exp, "exp(x)"),
):  # fmt: skip
    add_op(OpRecord(_name, ("x",), _one_rule, _always(_function), doc=_doc))
add_op(
    OpRecord(
        "Gelu", ("x",), _one_rule, _one(lambda call: elementwise.gelu_tanh if call["approximate"] else elementwise.gelu),
        (OpParam("approximate", bool, False, doc="the form with tanh"),), doc="x · Φ(x)",
    )
)  # fmt: skip
add_op(
    OpRecord(
        "Copy", ("x",), _copy_rule, lambda call: elementwise.copy_as(call["dtype"] or call["x"].dtype),
        (OpParam("dtype", (DType, type(None)), None, doc="the dtype of the copy"),), doc="a copy, row-major, of the same or another dtype",
    )
)  # fmt: skip
