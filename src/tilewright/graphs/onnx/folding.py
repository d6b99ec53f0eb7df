"""Nodes of constants and shapes, computed on the host while a model is translated.

In: a node. Out: its results as arrays, where all its inputs are known and NumPy has the operator; else None. Large results that only
repeat what is known (`Expand`, `ConstantOfShape`) are left to kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright.graphs.onnx.operator_rules import NodeView, is_float

_MOST = 1 << 22
"""Elements of a result that is computed here though its inputs are smaller."""

Fold = Callable[[NodeView, list[np.ndarray]], "np.ndarray"]


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return np.asarray(np.divide(a, b))
    safe = np.where(b == 0, 1, b)
    quotient = np.abs(a) // np.abs(safe)
    return np.where(b == 0, 0, np.where((a < 0) != (b < 0), -quotient, quotient)).astype(a.dtype)


_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": _divide, "Equal": np.equal, "Less": np.less, "LessOrEqual": np.less_equal,
    "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor,
}  # fmt: skip
_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Neg": np.negative, "Abs": np.abs, "Not": np.logical_not, "Floor": np.floor, "Ceil": np.ceil, "Sqrt": np.sqrt}


def folded(node: NodeView) -> list[np.ndarray] | None:
    """The results of a node, where they are known."""
    if node.record.domain or not all(v is None or v.host is not None for v in node.inputs):
        return None
    arrays = [v.host for v in node.inputs if v is not None]
    known = [a for a in arrays if a is not None]
    if any(a is None for a in node.inputs):
        return None
    with np.errstate(all="ignore"):
        if node.op in _BINARY and len(known) == 2 and known[0].dtype == known[1].dtype:
            if any(a not in (b, 1) and b != 1 for a, b in zip(known[0].shape[::-1], known[1].shape[::-1], strict=False)):
                return None  # the rule says what is wrong
            if max(a.size for a in known) <= _MOST and np.broadcast(*known).size <= _MOST:
                return [np.asarray(_BINARY[node.op](*known))]
        if node.op in _UNARY and len(known) == 1 and known[0].size <= _MOST and (known[0].dtype.kind != "b" or node.op == "Not"):
            return [np.asarray(_UNARY[node.op](known[0]).astype(known[0].dtype))]
        if node.op == "Where" and len(known) == 3 and known[0].dtype == bool and all(a.size <= 1024 for a in known):
            try:
                return [np.where(*known)]
            except ValueError:
                return None
        if node.op == "ReduceProd" and len(known) == 1 and known[0].dtype.kind in "iu" and known[0].ndim == 1 and not node.has("axes"):
            return [np.prod(known[0], keepdims=bool(node.integer("keepdims", 1)), dtype=known[0].dtype)]
        if node.op in ("Max", "Min") and known and all(a.dtype == known[0].dtype and a.size <= 1024 for a in known):
            try:
                found = known[0]
                for other in known[1:]:
                    found = (np.maximum if node.op == "Max" else np.minimum)(found, other)
                return [np.asarray(found)]
            except ValueError:
                return None
        if node.op == "Mod" and len(known) == 2 and all(a.dtype.kind in "iu" and a.size == 1 and a.all() for a in known) and not node.integer("fmod"):
            return [np.asarray(np.mod(*known))]
        if node.op == "Pow" and len(known) == 2 and all(is_float(a.dtype) and a.size == 1 for a in known) and known[0].dtype == known[1].dtype:
            return [np.asarray(np.power(*known))]
    return None
