"""Ops over rows (…, features): MulMat, RmsNorm, LayerNorm, SoftMax, Embedding, Argmax."""

from __future__ import annotations

from tilewright.base.dtypes import i64
from tilewright.graphs.kernels import rows
from tilewright.graphs.registry import Lowered, NodeCall, OpParam, OpRecord, TensorType, add_op
from tilewright.graphs.tensor import Tensor


def _floats(call: NodeCall, *names: str) -> None:
    for name in names:
        found: Tensor = call[name]
        if found is not None and not found.dtype.is_float and found.dtype.kind != "q":
            raise call.fail(f"'{name}' is {found.form}, not an array of floats", "TW009")


def _at_least_one_axis(call: NodeCall) -> Tensor:
    x: Tensor = call["x"]
    if not x.ndim:
        raise call.fail(f"'x' is {x.form}: it has no axis of features", "TW003")
    return x


def _mul_mat_rule(call: NodeCall) -> TensorType:
    _floats(call, "x", "weight", "bias")
    x, weight = _at_least_one_axis(call), call.rank("weight", 2)
    call.same(x.sizes[-1], weight.sizes[1], f"features of '{x.name}' and columns of the weight '{weight.name}'")
    if "bias" in call:
        call.same(call.rank("bias", 1).sizes[0], weight.sizes[0], f"the bias '{call['bias'].name}' and rows of the weight '{weight.name}'")
    return TensorType((*x.sizes[:-1], weight.sizes[0]), x.dtype)


def _mul_mat(call: NodeCall) -> Lowered:
    kernel = rows.mul_mat_bias if "bias" in call else rows.mul_mat
    return Lowered(kernel, {"x": call["x"].rows()})


def _norm_rule(call: NodeCall) -> TensorType:
    _floats(call, "x", "gamma", "beta")
    x = _at_least_one_axis(call)
    for name in ("gamma", "beta"):
        if name in call:
            call.same(call.rank(name, 1).sizes[0], x.sizes[-1], f"'{name}' and the features of '{x.name}'")
    return TensorType(x.sizes, x.dtype)


def _same(call: NodeCall) -> TensorType:
    _floats(call, "x")
    x = _at_least_one_axis(call)
    return TensorType(x.sizes, x.dtype)


def _embedding_rule(call: NodeCall) -> TensorType:
    weight, ids = call.rank("weight", 2), call["ids"]
    if not ids.dtype.is_int:
        raise call.fail(f"'ids' is {ids.form}, not an array of integers", "TW009")
    return TensorType((*ids.sizes, weight.sizes[1]), weight.dtype)


def _argmax_rule(call: NodeCall) -> TensorType:
    x = _at_least_one_axis(call)
    return TensorType(x.sizes[:-1], i64)


_EPSILON = OpParam("epsilon", float, 1e-6, "scalar", "added to the mean square")
add_op(OpRecord("MulMat", ("x", "weight", "bias?"), _mul_mat_rule, _mul_mat, doc="x[…, k] times weight[n, k]: weight rows are outputs"))
add_op(OpRecord("RmsNorm", ("x", "gamma"), _norm_rule, lambda call: Lowered(rows.rms_norm, {"x": call["x"].rows()}), (_EPSILON,), doc="rows divided by the root of their mean square, times gamma"))
add_op(
    OpRecord(
        "LayerNorm", ("x", "gamma", "beta"), _norm_rule, lambda call: Lowered(rows.layer_norm, {"x": call["x"].rows()}),
        (OpParam("epsilon", float, 1e-5, "scalar", "added to the variance"),), doc="rows less their mean, divided by their standard deviation",
    )
)  # fmt: skip
add_op(OpRecord("SoftMax", ("x",), _same, lambda call: Lowered(rows.softmax, {"x": call["x"].rows()}), doc="exponentials of each row, divided by their sum"))
add_op(OpRecord("Embedding", ("ids", "weight"), _embedding_rule, lambda call: Lowered(rows.embedding, {"ids": call["ids"].reshape(-1)}), doc="rows of the weight that the ids name"))
add_op(OpRecord("Argmax", ("x",), _argmax_rule, lambda call: Lowered(rows.argmax, {"x": call["x"].rows()}), doc="where each row is largest"))
