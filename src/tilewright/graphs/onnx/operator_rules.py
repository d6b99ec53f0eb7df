"""The registry of ONNX operators, and what a rule gets to see of its node.

A rule is a function under `@operator("Name", …)`. It takes a `NodeView`: inputs, attributes, opset; it makes kernels or views and returns
values, one for each output of the node that there can be. `OPERATORS` is the table that docs and the check for unknown operators read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tilewright.base import dtypes
from tilewright.base.errors import UserError
from tilewright.graphs.onnx.loops import LoopKernel, X, x_of
from tilewright.graphs.onnx.model import AttributeRecord, GraphRecord, NodeRecord, TensorRecord
from tilewright.graphs.onnx.values import Known, NodeSink, PackedWeights, Shape, as_rows
from tilewright.runtime.memory.packed_array import PackedArray

if TYPE_CHECKING:
    pass

Rule = Callable[["NodeView"], "Known | Sequence[Known | None]"]


@dataclass(frozen=True)
class OperatorRule:
    """An operator: its rule, the domain it is of, and the first opset whose meaning the rule has."""

    name: str
    domain: str
    rule: Rule
    note: str


OPERATORS: dict[tuple[str, str], OperatorRule] = {}
"""By domain and name."""


def operator(*names: str, domain: str = "", note: str = "") -> Callable[[Rule], Rule]:
    """Registers a rule for operators."""

    def register(rule: Rule) -> Rule:
        for name in names:
            assert (domain, name) not in OPERATORS, name
            OPERATORS[domain, name] = OperatorRule(name, domain, rule, note)
        return rule

    return register


class NeedsValues(Exception):
    """The numbers of these inputs are needed to translate the model."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names


class NodeView:
    """A node for its rule."""

    def __init__(
        self, record: NodeRecord, inputs: list[Known | None], opset: int, sink: NodeSink, limit: int,
        tensor: Callable[[TensorRecord], np.ndarray], subgraph: Callable[[GraphRecord], list[Known]], packed: PackedWeights,
    ) -> None:  # fmt: skip
        self.record, self.opset, self.sink, self.limit = record, opset, sink, limit
        self.op = record.op
        self.inputs = inputs
        self.outputs = len(record.outputs)
        self._tensor, self._subgraph, self._packed = tensor, subgraph, packed

    # -- errors ---------------------------------------------------------------------------------------------------

    def error(self, message: str, code: str = "TW005", help: str = "") -> UserError:
        """An error that names the node."""
        error = UserError.at(code, f"{self.record.label}: {message}", help=help)
        assert isinstance(error, UserError)
        return error

    # -- attributes -----------------------------------------------------------------------------------------------

    def _attribute(self, name: str, kind: int, what: str) -> AttributeRecord | None:
        found = self.record.attributes.get(name)
        if found is not None and found.type != kind:
            raise self.error(f"its attribute '{name}' is no {what}", "TW009")
        return found

    def integer(self, name: str, default: int = 0) -> int:
        found = self._attribute(name, 2, "integer")
        return default if found is None else found.value  # type: ignore[return-value]

    def number(self, name: str, default: float = 0.0) -> float:
        found = self._attribute(name, 1, "float")
        value = default if found is None else found.value
        assert isinstance(value, float)
        if math.isnan(value):
            raise self.error(f"its attribute '{name}' is not a number", "TW009")
        return value

    def text(self, name: str, default: str = "") -> str:
        found = self._attribute(name, 3, "text")
        if found is None:
            return default
        assert isinstance(found.value, bytes)
        return found.value.decode("utf-8", "replace")

    def integers(self, name: str) -> list[int] | None:
        found = self._attribute(name, 7, "list of integers")
        return None if found is None else list(found.value)  # type: ignore[call-overload]

    def has(self, name: str) -> bool:
        return name in self.record.attributes

    def attribute_tensor(self, name: str) -> np.ndarray | None:
        found = self._attribute(name, 4, "tensor")
        if found is None:
            return None
        assert isinstance(found.value, TensorRecord)
        return self._tensor(found.value)

    def subgraph(self, name: str) -> list[Known]:
        """The outputs of a graph among its attributes, translated here."""
        found = self._attribute(name, 5, "graph")
        if found is None:
            raise self.error(f"has no attribute '{name}'", "TW008")
        assert isinstance(found.value, GraphRecord)
        return self._subgraph(found.value)

    # -- inputs ---------------------------------------------------------------------------------------------------

    def has_input(self, number: int) -> bool:
        return number < len(self.inputs) and self.inputs[number] is not None

    def input(self, number: int) -> Known:
        """An input that must be there."""
        if not self.has_input(number):
            raise self.error(f"input {number} is missing", "TW008")
        found = self.inputs[number]
        assert found is not None
        return found

    def maybe(self, number: int) -> Known | None:
        return self.inputs[number] if self.has_input(number) else None

    def host(self, number: int) -> np.ndarray:
        """The elements of an input, which have to be known before anything runs."""
        found = self.input(number)
        if found.host is not None:
            return found.host
        if found.inputs:
            raise NeedsValues(found.inputs)
        raise self.error(
            f"input {number} ('{self.record.inputs[number]}') decides about shapes, and is computed from data", "TW005",
            "only constants, shapes and small integer inputs may decide about shapes",
        )  # fmt: skip

    def host_ints(self, number: int) -> list[int]:
        """A small list of integers that shapes depend on."""
        found = self.host(number)
        if found.dtype.kind not in "iu" or found.ndim > 1:
            raise self.error(f"input {number} is {found.dtype} of shape {list(found.shape)}, not a list of integers", "TW009")
        return [int(v) for v in found.reshape(-1)]

    def axis(self, value: int, rank: int) -> int:
        """An axis that may count from the end."""
        if not -rank <= value < max(rank, 1):
            raise self.error(f"axis {value} of {rank} axes", "TW003")
        return value % rank if rank else 0

    def float_input(self, *numbers: int) -> None:
        """These inputs must be floats."""
        for number in numbers:
            if self.has_input(number) and not is_float(self.input(number).dtype):
                raise self.error(f"input {number} is {self.input(number).dtype}, not a float", "TW009")

    # -- results --------------------------------------------------------------------------------------------------

    def known(self, array: np.ndarray) -> Known:
        """A value on the host."""
        return Known(array.shape, array.dtype, array)

    def packed(self, sources: Sequence[np.ndarray], form: tuple[object, ...], make: Callable[[], PackedArray]) -> Known:
        """A weight of packed blocks, which kernels read as f32. It is made of these constants, and of what `form` says, once for a model."""
        array = self._packed.of(sources, form, make)
        return Known(array.shape, np.dtype(np.float32), None, self.sink.weight(array))

    def handle(self, value: Known) -> object:
        """Who makes a value, as the sink knows it."""
        if value.handle is None:
            assert value.host is not None
            value.handle = self.sink.weight(as_rows(value.host).reshape(value.stored))
        return value.handle

    def check_size(self, shape: Sequence[int], dtype: np.dtype) -> Shape:
        """A shape that is not too large."""
        if any(n < 0 for n in shape):
            raise self.error(f"its result would have the shape {list(shape)}", "TW004")
        needed = math.prod(shape) * dtype.itemsize
        if needed > self.limit or any(n >= 1 << 48 for n in shape):
            raise self.error(f"its result of shape {list(shape)} needs {needed:,} bytes, and {self.limit:,} are allowed", "TW031", "raise max_bytes= where that is meant")
        return tuple(shape)

    def kernel(self, name: str = "") -> NodeKernel:
        """A kernel for this node."""
        return NodeKernel(self, name or "onnx_" + self.op.lower())

    def reshape(self, value: Known, shape: Sequence[int]) -> Known:
        """The same elements in another shape."""
        shape = tuple(shape)
        if math.prod(shape) != value.size:
            raise self.error(f"{list(value.shape)} has {value.size} elements, and {list(shape)} {math.prod(shape)}", "TW004")
        if value.host is not None:
            return self.known(value.host.reshape(shape))
        return Known(shape, value.dtype, None, self.sink.reshape(value.handle, shape or (1,)), value.inputs)

    def transpose(self, value: Known, axes: Sequence[int]) -> Known:
        """Axes in another order."""
        if value.host is not None:
            return self.known(as_rows(value.host.transpose(axes)))
        if not axes:
            return value
        return Known(tuple(value.shape[a] for a in axes), value.dtype, None, self.sink.transpose(value.handle, tuple(axes)), value.inputs)

    def slice(self, value: Known, axis: int, start: int, size: int, step: int = 1) -> Known:
        """Some elements along an axis."""
        if value.host is not None:
            index = (slice(None),) * axis + (slice(start, start + size * step, step),)
            return self.known(as_rows(value.host[index]))
        if start == 0 and size == value.shape[axis] and step == 1:
            return value
        shape = (*value.shape[:axis], size, *value.shape[axis + 1 :])
        return Known(shape, value.dtype, None, self.sink.slice(value.handle, axis, start, size, step), value.inputs)


class NodeKernel(LoopKernel):
    """A kernel of a node: reads values, makes results."""

    def __init__(self, node: NodeView, name: str) -> None:
        super().__init__(name)
        self.node = node
        self._args: list[Known] = []
        self._names_of: dict[int, str] = {}
        self._made: list[tuple[Shape, np.dtype]] = []

    def name_of(self, value: Known) -> str:
        """The parameter that a value is."""
        if id(value) not in self._names_of:
            self._args.append(value)
            self._names_of[id(value)] = self.param("x")
        return self._names_of[id(value)]

    def read(self, value: Known, *indices: object, literal: bool = True) -> X:
        """An element. One that is a number known on the host is that number."""
        number = literal_of(value) if literal else None
        if number is not None:
            return number
        if not value.shape:
            indices = (0,)
        return self.at(self.name_of(value), *indices)

    def spread(self, value: Known, indices: Sequence[X], shape: Shape, literal: bool = True) -> X:
        """An element by the indices of a shape that the value is repeated to."""
        skip = len(shape) - value.rank
        return self.read(value, *(0 if value.shape[a] == 1 != shape[skip + a] else indices[skip + a] for a in range(value.rank)), literal=literal)

    def output(self, shape: Sequence[int], dtype: np.dtype, fill: object = None) -> str:
        """A result of the node."""
        self._made.append((self.node.check_size(shape, dtype), dtype))
        return self.result(shape, dtype, fill)

    def finish(self) -> list[Known]:
        """The results, made by this kernel."""
        handles = self.node.sink.kernel(
            self.node.record.label, self.function(), [self.node.handle(v) for v in self._args], [(shape or (1,), dtype) for shape, dtype in self._made]
        )
        return [Known(shape, dtype, None, handle) for (shape, dtype), handle in zip(self._made, handles, strict=True)]

    def finish_one(self) -> Known:
        """The only result."""
        (found,) = self.finish()
        return found


def literal_of(value: Known) -> X | None:
    """A number that is known: its literal. NaN has none."""
    if value.host is None or value.size != 1:
        return None
    number = value.host.reshape(-1)[0]
    if value.dtype.kind == "b":
        return x_of(bool(number))
    if value.dtype.kind in "iu":
        return x_of(int(number)) if abs(int(number)) < 1 << 62 else None
    number = float(number)
    return None if math.isnan(number) else x_of(number)


def is_float(dtype: np.dtype) -> bool:
    found = dtypes.from_numpy(dtype)
    return found is not None and found.is_float


def broadcast(node: NodeView, *shapes: Shape) -> Shape:
    """The shape that all meet in."""
    rank = max((len(s) for s in shapes), default=0)
    found = [1] * rank
    for shape in shapes:
        for axis, extent in enumerate(shape, rank - len(shape)):
            if extent != 1 and found[axis] not in (1, extent):
                raise node.error(f"shapes {', '.join(str(list(s)) for s in shapes)} do not meet", "TW004")
            found[axis] = extent if extent != 1 else found[axis]
    return tuple(found)


def elementwise(node: NodeView, values: Sequence[Known], dtype: np.dtype, compute: Callable[..., X], name: str = "") -> Known:
    """One kernel over the elements of values that are repeated to one shape."""
    shape = broadcast(node, *(v.shape for v in values))
    kernel = node.kernel(name)
    out = kernel.output(shape, dtype)
    literal = any(literal_of(v) is None for v in values)  # a literal has no type where it meets nothing
    with kernel.grid(*(shape or (1,))) as indices:
        kernel.store(out, indices, compute(*(kernel.spread(v, indices, shape, literal) for v in values)))
    return kernel.finish_one()
