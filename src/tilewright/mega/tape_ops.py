"""The ops of tapes: what each takes, and how it becomes nodes of a tensor graph.

In: an instruction with the values that it reads (`TapeNode`). Out: the values that it makes. Shapes broadcast by the rules of ONNX. Most ops are
the ONNX operator of their name (`graphs/onnx/operators`), or an op of tensor graphs; all end up as kernels in plain loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, by_name, from_numpy, is_name
from tilewright.base.errors import UserError
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.onnx.folding import folded
from tilewright.graphs.onnx.loops import X, call, cast
from tilewright.graphs.onnx.model import AttributeRecord, GraphRecord, NodeRecord, TensorRecord
from tilewright.graphs.onnx.operator_rules import OPERATORS, NodeView, elementwise, is_float
from tilewright.graphs.onnx.operators import FAMILIES
from tilewright.graphs.onnx.sink import GraphSink
from tilewright.graphs.onnx.tensors import DTYPES
from tilewright.graphs.onnx.values import Known, PackedWeights
from tilewright.graphs.tensor import Tensor

assert FAMILIES  # importing the package registers the rules
OPSET = 21
LARGEST = 1 << 34
"""Bytes of one slot."""
I64 = np.dtype(np.int64)
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


class TapeRecord(NodeRecord):
    """An instruction as a node of ONNX: its label is that of the instruction."""

    title = ""

    @property
    def label(self) -> str:
        return self.title


class CacheState:
    """The caches of a translation: the tensor that each is now, and the position of the launch."""

    def __init__(self, graph: TensorGraph, keys: list[Tensor], values: list[Tensor], position: Callable[[], Tensor]) -> None:
        self.graph, self.position = graph, position
        self.now = {"K": keys, "V": values}
        self.appended: set[tuple[str, int]] = set()


class TapeNode(NodeView):
    """An instruction for its rule."""

    def __init__(self, title: str, op: str, inputs: list[Known | None], names: Sequence[str], attributes: Mapping[str, Any], sink: GraphSink, caches: CacheState, packed: PackedWeights, dtypes: Mapping[str, DType]) -> None:
        record = TapeRecord(title, op, "", list(names), ["out"])
        record.title = title
        self._arrays: dict[int, np.ndarray] = {}
        self.given, self.caches, self.title, self.packed_weights, self.declared = attributes, caches, title, packed, dtypes
        super().__init__(record, inputs, OPSET, sink, LARGEST, lambda tensor: self._arrays[id(tensor)], self._no_graphs, packed)
        self.graph: TensorGraph = sink.graph
        self._set_attributes(attributes)

    def _no_graphs(self, graph: GraphRecord) -> list[Known]:
        raise self.error("instructions have no graphs inside", "TW005")

    def _set_attributes(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            kind, found = self._attribute_of(name, value)
            self.record.attributes[name] = AttributeRecord(name, kind, found)

    def _attribute_of(self, name: str, value: Any) -> tuple[int, object]:
        if isinstance(value, str) and is_name(value):
            value = by_name(value)
        if isinstance(value, DType) or (isinstance(value, type) and issubclass(value, np.generic)) or isinstance(value, np.dtype):
            dtype = value.numpy if isinstance(value, DType) else np.dtype(value)
            if dtype not in _NUMBERS:
                raise self.error(f"'{name}' is {value}, which slots cannot have", "TW009")
            return 2, _NUMBERS[dtype]
        if isinstance(value, bool | int | np.integer):
            return 2, int(value)
        if isinstance(value, float | np.floating):
            return 1, float(value)
        if isinstance(value, str):
            return 3, value.encode()
        if isinstance(value, np.ndarray):
            record = TensorRecord(name)
            self._arrays[id(record)] = value
            return 4, record
        if isinstance(value, list | tuple) and all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in value):
            return 7, [int(v) for v in value]
        raise self.error(f"its attribute '{name}' is {value!r}", "TW009", "attributes are numbers, texts, dtypes, lists of whole numbers, or arrays")

    def error(self, message: str, code: str = "TW005", help: str = "") -> UserError:
        error = UserError.at(code, f"{self.title}: {message}", help=help)
        assert isinstance(error, UserError)
        return error

    def number(self, name: str, default: float = 0.0) -> float:
        found = self.record.attributes.get(name)
        if found is not None and found.type == 2:  # whole numbers are floats, too
            return float(found.value)  # type: ignore[arg-type]
        return super().number(name, default)

    def as_onnx(self, op: str, domain: str = "", constants: Sequence[str] = (), inputs: list[Known | None] | None = None, attributes: Mapping[str, Any] | None = None) -> list[Known | None]:
        """What the ONNX operator makes. Attributes named in `constants` are its inputs behind the slots, where they are given."""
        own = list(self.inputs if inputs is None else inputs)
        rest = dict(self.given if attributes is None else attributes)
        for place, name in enumerate(constants, 1):
            if name in rest:
                while len(own) <= place:
                    own.append(None)
                if own[place] is not None:
                    raise self.error(f"'{name}' is given as a slot and as an attribute", "TW016")
                own[place] = self.known(np.asarray(rest.pop(name), I64))
        names = [*self.record.inputs, *(f"input {n}" for n in range(len(self.record.inputs), len(own)))]
        node = TapeNode(self.title, op, own, names, rest, self.graph_sink, self.caches, self.packed_weights, self.declared)
        node.record.domain = domain
        done = folded(node)
        if done is not None:
            return [self.known(a) for a in done]
        made = OPERATORS[domain, op].rule(node)
        return [made] if isinstance(made, Known) else list(made)

    @property
    def graph_sink(self) -> GraphSink:
        assert isinstance(self.sink, GraphSink)
        return self.sink

    def tensor(self, value: Known) -> Tensor:
        """The tensor of a value."""
        found = self.handle(value)
        assert isinstance(found, Tensor)
        return found

    def is_packed(self, number: int) -> bool:
        found = self.input(number)
        return found.host is None and isinstance(found.handle, Tensor) and found.handle.dtype.is_packed

    def of_graph(self, op: str, *inputs: Any, shape: Sequence[int], **params: Any) -> Known:
        """What an op of tensor graphs makes."""
        made: Tensor = self.graph.op(op, *inputs, name=self.graph_sink.name(self.title), **params)
        return Known(tuple(shape), made.dtype.numpy, None, made)


def extents_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor of a tape: numbers, all of them."""
    return tuple(size.evaluate({}) for size in tensor.sizes)


Rule = Callable[[TapeNode], "Known | Sequence[Known | None]"]


@dataclass(frozen=True)
class TapeOp:
    """One op of tapes."""

    name: str
    family: str
    inputs: tuple[int, int]
    """How many it takes, at least and at most."""
    attributes: tuple[str, ...]
    rule: Rule
    results: int = 1
    doc: str = ""
    cached: bool = False
    """Whether it reads or writes the caches of keys and values."""


TAPE_OPS: dict[str, TapeOp] = {}
MANY = 1 << 16


def _op(family: str, names: str, inputs: int | tuple[int, int], attributes: str, rule: Rule, doc: str, results: int = 1, cached: bool = False) -> None:
    counts = (inputs, inputs) if isinstance(inputs, int) else inputs
    for name in names.split():
        TAPE_OPS[name] = TapeOp(name, family, counts, tuple(attributes.split()), rule, results, doc, cached)


def ops() -> dict[str, TapeOp]:
    """The ops of tapes by name."""
    return dict(TAPE_OPS)


def _onnx(constants: str = "", name: str = "", domain: str = "") -> Rule:
    return lambda node: node.as_onnx(name or node.op, domain, constants.split())


# -- each element by itself -----------------------------------------------------------------------------------------


def _float_function(compute: Callable[[X], X]) -> Rule:
    def rule(node: TapeNode) -> Known:
        node.float_input(0)
        x = node.input(0)
        return elementwise(node, (x,), x.dtype, compute, "tape_" + node.op.lower())

    return rule


def _rsqrt(x: X) -> X:
    return 1.0 / call("sqrt", x)


def _silu(x: X) -> X:
    return x * call("sigmoid", x)


def _power(x: X, y: X, base: np.dtype, exponent: np.dtype) -> X:
    """`pow` of the language has the special cases of IEEE 754; integers go through f64."""
    wide = base if is_float(base) else np.dtype(np.float64)
    made = call("pow", x if base == wide else cast(x, wide), y if exponent == wide else cast(y, wide))
    return made if base == wide else cast(made, base)


def _pow(node: TapeNode) -> Known:
    a, b = node.input(0), node.input(1)
    if a.dtype.kind == "b" or b.dtype.kind == "b":
        raise node.error("its inputs are bool", "TW009")
    return elementwise(node, (a, b), a.dtype, lambda x, y: _power(x, y, a.dtype, b.dtype), "tape_pow")


_SCALAR: dict[str, Callable[[X, Any], X]] = {
    "AddScalar": lambda x, s: x + s, "SubScalar": lambda x, s: x - s, "MulScalar": lambda x, s: x * s, "DivScalar": lambda x, s: x / s,
}  # fmt: skip


def _scalar(node: TapeNode) -> Known:
    x = node.input(0)
    if "scalar" not in node.given:
        raise node.error("is missing its attribute 'scalar'", "TW008")
    value = node.given["scalar"]
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating) or x.dtype.kind == "b":
        raise node.error(f"its scalar is {value!r}, for {x.dtype}", "TW009", "give a number")
    if not is_float(x.dtype):
        if int(value) != value:
            raise node.error(f"its scalar is {value!r}, for {x.dtype}", "TW009", "give a whole number, or cast the slot first")
        constant = np.asarray(int(value), x.dtype)
    else:
        constant = np.asarray(value, x.dtype)
    other = node.known(constant)
    if node.op == "PowScalar":
        return elementwise(node, (x, other), x.dtype, lambda a, b: _power(a, b, x.dtype, x.dtype), "tape_pow_scalar")
    if not is_float(x.dtype) and node.op == "DivScalar":
        found = node.as_onnx("Div", inputs=[x, other], attributes={})[0]
        assert found is not None
        return found
    if math.isnan(float(value)) or (float(value) == 0 and math.copysign(1, float(value)) < 0):  # no literals: they are arrays of one element
        return elementwise(node, (x, other), x.dtype, lambda a, b: _SCALAR[node.op](a, b), "tape_" + node.op.lower())
    return elementwise(node, (x,), x.dtype, lambda a: _SCALAR[node.op](a, constant.item() if constant.dtype.kind in "iu" else float(constant)), "tape_" + node.op.lower())


# -- rows -----------------------------------------------------------------------------------------------------------


def _rms_norm(node: TapeNode) -> Known:
    x, gamma = node.input(0), node.input(1)
    node.float_input(0, 1)
    axis = node.axis(node.integer("axis", -1), x.rank)
    epsilon = node.number("epsilon", 1e-6)
    if axis == x.rank - 1 and gamma.shape == x.shape[-1:]:
        return node.of_graph("RmsNorm", node.tensor(x), node.tensor(gamma), shape=x.shape, epsilon=epsilon)
    if gamma.shape != x.shape[axis:]:
        raise node.error(f"its gamma is {list(gamma.shape)}, for axes of {list(x.shape[axis:])}", "TW004")
    found = node.as_onnx("RMSNormalization", attributes={"axis": axis, "epsilon": epsilon})[0]
    assert found is not None
    return found


def _several(node: TapeNode) -> Known:
    """Sum and Max: element by element over several slots; with `axes` over those of the only one."""
    if "axes" in node.given or "keepdims" in node.given:
        if len(node.inputs) != 1:
            raise node.error(f"has axes, and {len(node.inputs)} inputs", "TW016", "with axes it takes one")
        found = node.as_onnx("Reduce" + node.op)[0]
    else:
        found = node.as_onnx(node.op)[0]
    assert found is not None
    return found


def _matmul(node: TapeNode) -> Known:
    """Products; a frozen matrix may have another dtype, or packed blocks along its last axis (`transB=1`: rows of it are outputs)."""
    a, b, turned = node.input(0), node.input(1), bool(node.integer("transB"))
    frozen = b.rank == 2 and (node.is_packed(1) or a.dtype != b.dtype or (b.host is None and turned))
    if node.is_packed(1) and not turned:
        raise node.error("its weight is packed along its columns", "TW016", "give it as [outputs, inputs] with transB=1: blocks lie along the inputs")
    if turned and b.rank != 2:
        raise node.error(f"transB=1 with {list(b.shape)}", "TW003", "transB is for matrices")
    if frozen and is_float(a.dtype) and is_float(b.dtype) and (b.host is not None or (isinstance(b.handle, Tensor) and b.handle.node.kind == "weight")):
        depth, columns = (b.shape[1], b.shape[0]) if turned else b.shape
        if not a.rank or a.shape[-1] != depth:
            raise node.error(f"multiplies {list(a.shape)} and {list(b.shape)}" + (" turned" if turned else ""), "TW004")
        weight = node.tensor(b)
        return node.of_graph("MulMat", node.tensor(a), weight if turned else weight.transpose(1, 0), shape=(*a.shape[:-1], columns))
    right = node.transpose(b, (1, 0)) if turned else b
    found = node.as_onnx("MatMul", inputs=[a, right], attributes={})[0]
    assert found is not None
    return found


# -- moving ---------------------------------------------------------------------------------------------------------


def _gather(node: TapeNode) -> Known:
    if node.is_packed(0):
        x, ids = node.input(0), node.input(1)
        if node.axis(node.integer("axis"), x.rank) != 0 or x.rank != 2 or ids.dtype.kind != "i":
            raise node.error("gathers from packed weights", "TW005", "rows of a matrix can be gathered: axis=0")
        return node.of_graph("Embedding", node.tensor(ids), node.tensor(x), shape=(*ids.shape, x.shape[1]))
    found = node.as_onnx("Gather")[0]
    assert found is not None
    return found


def _repeat(node: TapeNode) -> Known:
    """Each element `repeats` times along an axis, as `np.repeat` does."""
    x, count = node.input(0), node.integer("repeats", 1)
    if not x.rank or count < 0:
        raise node.error(f"repeats {list(x.shape)} by {count}", "TW004")
    axis = node.axis(node.integer("axis"), x.rank)
    shape = node.check_size([n * count if a == axis else n for a, n in enumerate(x.shape)], x.dtype)
    if count == 1:
        return x
    if x.host is not None and x.size * count <= 1 << 16:
        return node.known(np.repeat(x.host, count, axis))
    kernel = node.kernel("tape_repeat")
    out = kernel.output(shape, x.dtype)
    with kernel.grid(*shape) as i:
        kernel.store(out, i, kernel.read(x, *(i[a] // count if a == axis else i[a] for a in range(x.rank)), literal=False))
    return kernel.finish_one()


def _range(node: TapeNode) -> Sequence[Known | None]:
    """start, limit and delta: slots, or attributes."""
    if not node.inputs:
        numbers = [node.given.get(name, default) for name, default in (("start", 0), ("limit", None), ("delta", 1))]
        if numbers[1] is None:
            raise node.error("is missing its limit", "TW008")
        dtype = np.dtype(np.float32) if any(isinstance(n, float) for n in numbers) else I64
        return node.as_onnx("Range", inputs=[node.known(np.asarray(n, dtype)) for n in numbers], attributes={})
    if node.given or len(node.inputs) != 3:
        raise node.error("takes three slots, or attributes start, limit and delta", "TW016")
    return node.as_onnx("Range")


def _constant_of_shape(node: TapeNode) -> Sequence[Known | None]:
    value = node.given.get("value", 0.0)
    if not isinstance(value, np.ndarray):
        wanted = node.given.get("dtype")
        dtype = wanted.numpy if isinstance(wanted, DType) else np.dtype(wanted) if wanted is not None else np.dtype(bool) if isinstance(value, bool) else I64 if isinstance(value, int) else np.dtype(np.float32)
        value = np.asarray([value], dtype)
    if not node.inputs and "shape" not in node.given:
        raise node.error("has neither a slot nor an attribute 'shape'", "TW008")
    shape = node.input(0) if node.inputs else node.known(np.asarray(node.given["shape"], I64).reshape(-1))
    return node.as_onnx("ConstantOfShape", inputs=[shape], attributes={"value": value})


# -- caches ---------------------------------------------------------------------------------------------------------


def _auto_positions(node: TapeNode) -> Known:
    """The positions of the launch's tokens: position, position + 1, …"""
    tokens = node.integer("tokens", 1)
    position = node.caches.position()
    (batch,) = extents_of(position)
    if tokens < 1:
        raise node.error(f"tokens is {tokens}", "TW009")
    dtype = _dtype(node, I64)
    own = Known((batch,), position.dtype.numpy, None, position)
    kernel = node.kernel("tape_positions")
    out = kernel.output((batch, tokens), dtype)
    with kernel.grid(batch, tokens) as (b, t):
        kernel.store(out, (b, t), cast(kernel.read(own, b, literal=False), dtype) + cast(t, dtype))
    return kernel.finish_one()


def _length(node: TapeNode) -> Known:
    """How many positions of the caches count: position + tokens, which is position + 1 for one token."""
    tokens = node.integer("tokens", 1)
    if tokens < 1:
        raise node.error(f"tokens is {tokens}", "TW009")
    position = node.caches.position()
    (batch,) = extents_of(position)
    dtype = _dtype(node, I64)
    own = Known((batch,), position.dtype.numpy, None, position)
    return elementwise(node, (own,), dtype, lambda p: cast(p, dtype) + tokens, "tape_kv_length")


def _dtype(node: TapeNode, default: np.dtype) -> np.dtype:
    found = node.record.attributes.get("dtype")
    if found is None:
        return default
    dtype = DTYPES.get(found.value) if isinstance(found.value, int) else None
    if dtype is None or dtype.kind not in "iu":
        raise node.error(f"dtype is {node.given['dtype']!r}", "TW009", "give a dtype of integers")
    return dtype


def _zero_cache(node: TapeNode) -> Sequence[Known | None]:
    """An empty cache: zeros of the shape of one layer, or of `shape`."""
    shape, dtype = node.given.get("shape"), node.given.get("dtype")
    own = node.caches.now["K"]
    if shape is None:
        if not own:
            raise node.error("the tape has no caches, and it has no shape", "TW008")
        shape = list(extents_of(own[0]))
    kind = own[0].dtype.numpy if dtype is None and own else dtype.numpy if isinstance(dtype, DType) else np.dtype(dtype or np.float32)
    return node.as_onnx("ConstantOfShape", inputs=[node.known(np.asarray(shape, I64).reshape(-1))], attributes={"value": np.zeros(1, kind)})


def _append(which: str) -> Rule:
    def rule(node: TapeNode) -> Sequence[Known | None]:
        layer, rows = node.integer("layer"), node.input(0)
        cache = node.caches.now[which][layer]
        wanted = cache.ndim
        if rows.rank != wanted:
            raise node.error(f"appends {rows.dtype}{list(rows.shape)} to a cache of {cache.form}", "TW003", f"rows are [{'sequence, ' if wanted == 4 else ''}token, head, feature]")
        made = node.graph.op("KVAppend", cache, node.tensor(rows), node.caches.position(), name=node.graph_sink.name(node.title))
        node.caches.now[which][layer] = made
        node.caches.appended.add((which, layer))
        shape = extents_of(made)
        return [Known(shape, made.dtype.numpy, None, made)]

    return rule


def _get(which: str) -> Rule:
    def rule(node: TapeNode) -> Known:
        cache = node.caches.now[which][node.integer("layer")]
        return Known(extents_of(cache), cache.dtype.numpy, None, cache)

    return rule


# -- the table ------------------------------------------------------------------------------------------------------

_op("element", "Add Sub Mul Div", 2, "", _onnx(), "two slots, with broadcasting; integers divide toward zero")
_op("element", "Pow", 2, "", _pow, "powers with the special cases of IEEE 754")
_op("element", "Exp Log Sqrt Tanh Neg Abs Cos Sin", 1, "", _onnx(), "a function of each element")
_op("element", "Rsqrt", 1, "", _float_function(_rsqrt), "1 / √x")
_op("element", "Silu", 1, "", _float_function(_silu), "x · sigmoid(x)")
_op("element", "AddScalar SubScalar MulScalar DivScalar PowScalar", 1, "scalar", _scalar, "a slot and a number that is part of the code")
_op("rows", "RMSNorm", 2, "axis epsilon", _rms_norm, "rows divided by the root of their mean square, times gamma")
_op("rows", "Softmax", 1, "axis", _onnx(), "exponentials along an axis, divided by their sum")
_op("rows", "ReduceSum ReduceMean", (1, 2), "axes keepdims noop_with_empty_axes", _onnx(), "sums and means over axes")
_op("rows", "Sum Max", (1, MANY), "axes keepdims", _several, "of several slots, element by element; of one slot over its axes")
_op("products", "MatMul", 2, "transB", _matmul, "products of matrices, batches of them, and vectors")
_op("products", "MatMulNBits", (3, 6), "N K bits block_size accuracy_level", _onnx(domain="com.microsoft"), "a product with weights of 2, 4 or 8 bits, which stay packed")
_op("moving", "Gather", 2, "axis", _gather, "elements along an axis by index")
_op("moving", "Slice", (1, 5), "starts ends axes steps", _onnx("starts ends axes steps"), "parts of axes")
_op("moving", "Repeat", 1, "axis repeats", _repeat, "each element several times along an axis")
_op("moving", "Concat", (1, MANY), "axis", _onnx(), "slots one after the other")
_op("moving", "Reshape", (1, 2), "shape allowzero", _onnx("shape"), "another shape of the same elements")
_op("moving", "Transpose", 1, "perm", _onnx(), "axes in another order")
_op("moving", "Unsqueeze", (1, 2), "axes", _onnx(), "new axes of one element")
_op("moving", "Expand", (1, 2), "shape", _onnx("shape"), "axes of one element repeated")
_op("moving", "Trilu", (1, 2), "k upper", _onnx("k"), "a triangle of matrices; the rest is zero")
_op("moving", "ScatterND", 3, "reduction", _onnx(), "slices written where indices say")
_op("choosing", "Where", 3, "", _onnx(), "elements of one slot or another")
_op("choosing", "Greater Equal", 2, "", _onnx(), "comparisons, as bool")
_op("choosing", "Cast", 1, "to saturate", _onnx(), "another dtype")
_op("planning", "Shape", 1, "start end", _onnx(), "extents: known when the tape is planned")
_op("planning", "Range", (0, 3), "start limit delta", _range, "start, start + delta, …: known when the tape is planned")
_op("planning", "ConstantOfShape", (0, 1), "shape value dtype", _constant_of_shape, "one number everywhere: known when the tape is planned")
_op("caches", "AutoPositionIds", 0, "tokens dtype", _auto_positions, "positions of the launch's tokens, [sequence, token]")
_op("caches", "AutoZeroKVCache", 0, "shape dtype", _zero_cache, "zeros of the shape of a cache")
_op("caches", "KVCacheAppendK", 1, "layer", _append("K"), "rows go to the keys of a layer, at the position of the launch", 0, True)
_op("caches", "KVCacheAppendV", 1, "layer", _append("V"), "rows go to the values of a layer", 0, True)
_op("caches", "KVCacheGetK", 0, "layer", _get("K"), "the keys of a layer as they are now, all of their capacity", cached=True)
_op("caches", "KVCacheGetV", 0, "layer", _get("V"), "the values of a layer", cached=True)
_op("caches", "KVCacheSeqLen", 0, "tokens dtype", _length, "how many positions count: position + 1", cached=True)
assert len(TAPE_OPS) == 52, len(TAPE_OPS)


def storable(dtype: np.dtype) -> DType | None:
    """The dtype of a slot."""
    return from_numpy(dtype)
