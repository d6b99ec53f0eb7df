"""Ops over rows (…, features): MulMat, RmsNorm, LayerNorm, SoftMax, Embedding, Argmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.base.dtypes import DType, f32, i64
from tilewright.execute.kernel import Kernel
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
    if call["activations"] not in ("", "q8"):
        raise call.fail(f"activations={call['activations']!r}", "TW016", 'give "q8", or leave it out')
    if call["activations"] and not weight.dtype.is_packed:
        raise call.fail(f"activations=\"q8\", and the weight '{weight.name}' is {weight.form}", "TW016", "packed weights only have products of eight bits")
    if "bias" in call:
        call.same(call.rank("bias", 1).sizes[0], weight.sizes[0], f"the bias '{call['bias'].name}' and rows of the weight '{weight.name}'")
    return TensorType((*x.sizes[:-1], weight.sizes[0]), x.dtype)


def _mul_mat(call: NodeCall) -> Lowered:
    x, columns = call["x"].rows(), call["weight"].sizes[:1]
    if x.sizes[0].constant == 1 and call["by_rows"]:
        return Lowered(_PRODUCTS["row", "bias" in call, call["activations"]], {"x": x.reshape(-1)}, (TensorType(columns, x.dtype),))
    return Lowered(_PRODUCTS["rows", "bias" in call, call["activations"]], {"x": x}, (TensorType((x.sizes[0], *columns), x.dtype),))


_PRODUCTS: dict[tuple[str, bool, str], Kernel[..., Any]] = {
    ("row", False, ""): rows.mul_row, ("row", True, ""): rows.mul_row_bias, ("row", False, "q8"): rows.mul_row_q8, ("row", True, "q8"): rows.mul_row_bias_q8,
    ("rows", False, ""): rows.mul_mat, ("rows", True, ""): rows.mul_mat_bias, ("rows", False, "q8"): rows.mul_mat_q8, ("rows", True, "q8"): rows.mul_mat_bias_q8,
}  # fmt: skip
"""Kernels of products: for one row or several, with a bias or without, and what is rounded."""


def _norm_rule(call: NodeCall) -> TensorType:
    _floats(call, "x", "gamma", "beta")
    x = _at_least_one_axis(call)
    for name in ("gamma", "beta"):
        if name in call:
            call.same(call.rank(name, 1).sizes[0], x.sizes[-1], f"'{name}' and the features of '{x.name}'")
    return TensorType(x.sizes, x.dtype)


def _of_rows(kernel: Kernel[..., Any]) -> Callable[[NodeCall], Lowered]:
    """A kernel of (rows, features), whatever axes there are in front."""

    def lower(call: NodeCall) -> Lowered:
        x = call["x"].rows()
        return Lowered(kernel, {"x": x}, (TensorType(x.sizes, x.dtype),))

    return lower


def _same(call: NodeCall) -> TensorType:
    _floats(call, "x")
    x = _at_least_one_axis(call)
    return TensorType(x.sizes, x.dtype)


def _embedding_rule(call: NodeCall) -> TensorType:
    weight, ids = call.rank("weight", 2), call["ids"]
    if not ids.dtype.is_int:
        raise call.fail(f"'ids' is {ids.form}, not an array of integers", "TW009")
    return TensorType((*ids.sizes, weight.sizes[1]), _embedding_dtype(call))


def _embedding_dtype(call: NodeCall) -> DType:
    own: DType = call["weight"].dtype
    wanted: DType | None = call["dtype"]
    if wanted is not None and not wanted.is_float:
        raise call.fail(f"'dtype' is {wanted}, not a dtype of floats", "TW009")
    return wanted or (f32 if own.is_packed else own)


def _embedding(call: NodeCall) -> Lowered:
    dtype = _embedding_dtype(call)
    kernel = rows.embedding if dtype is call["weight"].dtype else rows.embedding_as(dtype)
    ids = call["ids"].reshape(-1)
    return Lowered(kernel, {"ids": ids}, (TensorType((ids.sizes[0], call["weight"].sizes[1]), dtype),))


def _argmax_rule(call: NodeCall) -> TensorType:
    x = _at_least_one_axis(call)
    return TensorType(x.sizes[:-1], i64)


_EPSILON = OpParam("epsilon", float, 1e-6, "scalar", "added to the mean square")
_ACTIVATIONS = OpParam("activations", str, "", doc='"q8": x is rounded to eight bits for packed weights, block by block')
_BY_ROWS = OpParam("by_rows", bool, False, doc="where x is one row: the weight is walked row by row, not in panels, which CPUs do quicker with packed weights")
add_op(OpRecord("MulMat", ("x", "weight", "bias?"), _mul_mat_rule, _mul_mat, (_ACTIVATIONS, _BY_ROWS), doc="x[…, k] times weight[n, k]: weight rows are outputs"))
add_op(OpRecord("RmsNorm", ("x", "gamma"), _norm_rule, _of_rows(rows.rms_norm), (_EPSILON,), doc="rows divided by the root of their mean square, times gamma"))
add_op(
    OpRecord(
        "LayerNorm", ("x", "gamma", "beta"), _norm_rule, _of_rows(rows.layer_norm),
        (OpParam("epsilon", float, 1e-5, "scalar", "added to the variance"),), doc="rows less their mean, divided by their standard deviation",
    )
)  # fmt: skip
add_op(OpRecord("SoftMax", ("x",), _same, _of_rows(rows.softmax), doc="exponentials of each row, divided by their sum"))
add_op(
    OpRecord(
        "Embedding", ("ids", "weight"), _embedding_rule, _embedding, (OpParam("dtype", (DType, type(None)), None, doc="of the result; that of the weight, f32 for packed ones"),),
        doc="rows of the weight that the ids name",
    )
)  # fmt: skip
add_op(OpRecord("Argmax", ("x",), _argmax_rule, lambda call: Lowered(rows.argmax, {"x": call["x"].rows()}), doc="where each row is largest"))
