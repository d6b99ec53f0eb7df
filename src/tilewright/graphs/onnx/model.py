"""The records of an ONNX file: model, graph, node, attribute, tensor, value. Plain data; nothing is checked beyond its form.

In: the bytes of a `ModelProto`. Out: a `Model`. Data of tensors stay where they are: a `TensorRecord` has views of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tilewright.graphs.onnx.wire import BYTES, FIXED32, VARINT, Malformed, fields, fixed, signed, varints

Value = int | memoryview
_DEEPEST = 32
"""Graphs inside attributes of nodes of graphs."""


@dataclass
class TensorRecord:
    """A `TensorProto`: dims, the number of its element type, and data in one of several places."""

    name: str = ""
    dims: list[int] = field(default_factory=list)
    data_type: int = 0
    raw: memoryview | None = None
    typed: list[tuple[str, int, Value]] = field(default_factory=list)
    """`(field, wire kind, value)` of typed data, unread."""
    external: dict[str, str] = field(default_factory=dict)
    location: int = 0
    segmented: bool = False


@dataclass
class ValueRecord:
    """A `ValueInfoProto`: an input or output. `dims` has integers, names, and None where nothing is said; it is None without a shape."""

    name: str = ""
    elem_type: int = 0
    dims: list[int | str | None] | None = None
    kind: str = "tensor"


@dataclass
class AttributeRecord:
    """An `AttributeProto`. `value` is a float, an integer, bytes, a tensor, a graph, or a list of one of these."""

    name: str = ""
    type: int = 0
    value: object = None
    reference: str = ""


@dataclass
class NodeRecord:
    """A `NodeProto`."""

    name: str = ""
    op: str = ""
    domain: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, AttributeRecord] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.op} node '{self.name or next((o for o in self.outputs if o), '?')}'"


@dataclass
class GraphRecord:
    """A `GraphProto`."""

    name: str = ""
    nodes: list[NodeRecord] = field(default_factory=list)
    initializers: list[TensorRecord] = field(default_factory=list)
    inputs: list[ValueRecord] = field(default_factory=list)
    outputs: list[ValueRecord] = field(default_factory=list)
    sparse: int = 0


@dataclass
class FunctionRecord:
    """A `FunctionProto`: an operator that the model itself defines."""

    name: str = ""
    domain: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    nodes: list[NodeRecord] = field(default_factory=list)
    opsets: dict[str, int] = field(default_factory=dict)
    defaults: dict[str, AttributeRecord] = field(default_factory=dict)


@dataclass
class Model:
    """A `ModelProto`."""

    ir_version: int = 0
    producer: str = ""
    opsets: dict[str, int] = field(default_factory=dict)
    graph: GraphRecord | None = None
    functions: dict[tuple[str, str], FunctionRecord] = field(default_factory=dict)


def read_model(data: memoryview) -> Model:
    """The model in these bytes. Raises `Malformed`."""
    model = Model()
    for number, kind, value in fields(data):
        if number == 1:
            model.ir_version = _integer(value, kind, "ir_version")
        elif number == 2:
            model.producer = _text(value, kind, "producer_name")
        elif number == 7:
            model.graph = _graph(_part(value, kind, "graph"), 0)
        elif number == 8:
            _opset(model.opsets, _part(value, kind, "opset_import"))
        elif number == 25:
            function = _function(_part(value, kind, "functions"))
            model.functions[function.domain, function.name] = function
    return model


def _part(value: Value, kind: int, what: str) -> memoryview:
    if kind != BYTES:
        raise Malformed(f"'{what}' is no message, text or list")
    assert isinstance(value, memoryview)
    return value


def _integer(value: Value, kind: int, what: str) -> int:
    if kind != VARINT:
        raise Malformed(f"'{what}' is no integer")
    assert isinstance(value, int)
    return signed(value)


def _text(value: Value, kind: int, what: str) -> str:
    try:
        return str(_part(value, kind, what), "utf-8")
    except UnicodeDecodeError:
        raise Malformed(f"'{what}' is no text") from None


def _opset(opsets: dict[str, int], data: memoryview) -> None:
    domain, version = "", 0
    for number, kind, value in fields(data):
        if number == 1:
            domain = _text(value, kind, "opset domain")
        elif number == 2:
            version = _integer(value, kind, "opset version")
    opsets["" if domain == "ai.onnx" else domain] = version


def _graph(data: memoryview, depth: int) -> GraphRecord:
    if depth > _DEEPEST:
        raise Malformed(f"graphs are nested more than {_DEEPEST} deep")
    graph = GraphRecord()
    for number, kind, value in fields(data):
        if number == 1:
            graph.nodes.append(_node(_part(value, kind, "node"), depth))
        elif number == 2:
            graph.name = _text(value, kind, "graph name")
        elif number == 5:
            graph.initializers.append(read_tensor(_part(value, kind, "initializer")))
        elif number == 11:
            graph.inputs.append(_value(_part(value, kind, "input")))
        elif number == 12:
            graph.outputs.append(_value(_part(value, kind, "output")))
        elif number == 15:
            graph.sparse += 1
    return graph


def _node(data: memoryview, depth: int) -> NodeRecord:
    node = NodeRecord()
    for number, kind, value in fields(data):
        if number == 1:
            node.inputs.append(_text(value, kind, "input of a node"))
        elif number == 2:
            node.outputs.append(_text(value, kind, "output of a node"))
        elif number == 3:
            node.name = _text(value, kind, "name of a node")
        elif number == 4:
            node.op = _text(value, kind, "op_type")
        elif number == 5:
            attribute = _attribute(_part(value, kind, "attribute"), depth)
            node.attributes[attribute.name] = attribute
        elif number == 7:
            node.domain = _text(value, kind, "domain of a node")
    if node.domain == "ai.onnx":
        node.domain = ""
    return node


_ONE: dict[int, int] = {2: 1, 3: 2, 4: 3, 5: 4, 6: 5}
"""The type that a field with one value stands for, where the attribute does not say it."""
_MANY: dict[int, int] = {7: 6, 8: 7, 9: 8, 10: 9, 11: 10}


def _attribute(data: memoryview, depth: int) -> AttributeRecord:
    found = AttributeRecord()
    values: dict[int, object] = {}
    lists: dict[int, list[object]] = {}
    for number, kind, value in fields(data):
        if number == 1:
            found.name = _text(value, kind, "name of an attribute")
        elif number == 2:
            if kind != FIXED32:
                raise Malformed(f"attribute '{found.name}' holds no float")
            values[1] = fixed(value, kind, "f")[0]
        elif number == 3:
            values[2] = _integer(value, kind, f"attribute {found.name}")
        elif number == 4:
            values[3] = bytes(_part(value, kind, f"attribute {found.name}"))
        elif number == 5:
            values[4] = read_tensor(_part(value, kind, f"attribute {found.name}"))
        elif number == 6:
            values[5] = _graph(_part(value, kind, f"attribute {found.name}"), depth + 1)
        elif number == 7:
            lists.setdefault(6, []).extend(fixed(value, kind, "f"))
        elif number == 8:
            lists.setdefault(7, []).extend(varints(value, kind))
        elif number == 9:
            lists.setdefault(8, []).append(bytes(_part(value, kind, f"attribute {found.name}")))
        elif number == 10:
            lists.setdefault(9, []).append(read_tensor(_part(value, kind, f"attribute {found.name}")))
        elif number == 11:
            lists.setdefault(10, []).append(_graph(_part(value, kind, f"attribute {found.name}"), depth + 1))
        elif number == 20:
            found.type = _integer(value, kind, "type of an attribute")
        elif number == 21:
            found.reference = _text(value, kind, "ref_attr_name")
    if not found.type:
        found.type = next(iter([*values, *lists]), 0)
    if found.type in _ONE.values():
        default: dict[int, object] = {1: 0.0, 2: 0, 3: b""}
        found.value = values.get(found.type, default.get(found.type))
    elif found.type in _MANY.values():
        found.value = lists.get(found.type, [])
    return found


def read_tensor(data: memoryview) -> TensorRecord:
    """A tensor; its data are not read."""
    tensor = TensorRecord()
    typed = {4: "float", 5: "int32", 6: "string", 7: "int64", 10: "double", 11: "uint64"}
    for number, kind, value in fields(data):
        if number == 1:
            tensor.dims += varints(value, kind)
        elif number == 2:
            tensor.data_type = _integer(value, kind, "data_type")
        elif number == 3:
            tensor.segmented = True
        elif number in typed:
            tensor.typed.append((typed[number], kind, value))
        elif number == 8:
            tensor.name = _text(value, kind, "name of a tensor")
        elif number == 9:
            tensor.raw = _part(value, kind, "raw_data")
        elif number == 13:
            key, text = _entry(_part(value, kind, "external_data"))
            tensor.external[key] = text
        elif number == 14:
            tensor.location = _integer(value, kind, "data_location")
    return tensor


def _entry(data: memoryview) -> tuple[str, str]:
    texts = {1: "", 2: ""}
    for number, kind, value in fields(data):
        if number in texts:
            texts[number] = _text(value, kind, "external_data")
    return texts[1], texts[2]


def _value(data: memoryview) -> ValueRecord:
    found = ValueRecord()
    for number, kind, value in fields(data):
        if number == 1:
            found.name = _text(value, kind, "name of a value")
        elif number == 2:
            for which, kind2, part in fields(_part(value, kind, "type")):
                if which == 1:
                    _tensor_type(found, _part(part, kind2, "tensor_type"))
                elif which in (4, 5, 8, 9):
                    found.kind = {4: "sequence", 5: "map", 8: "sparse tensor", 9: "optional"}[which]
    return found


def _tensor_type(found: ValueRecord, data: memoryview) -> None:
    for number, kind, value in fields(data):
        if number == 1:
            found.elem_type = _integer(value, kind, "elem_type")
        elif number == 2:
            found.dims = found.dims or []
            for which, kind2, part in fields(_part(value, kind, "shape")):
                if which == 1:
                    found.dims.append(_dim(_part(part, kind2, "dim")))


def _dim(data: memoryview) -> int | str | None:
    found: int | str | None = None
    for number, kind, value in fields(data):
        if number == 1:
            found = _integer(value, kind, "dim_value")
        elif number == 2:
            found = _text(value, kind, "dim_param") or None
    return found


def _function(data: memoryview) -> FunctionRecord:
    found = FunctionRecord()
    readers: dict[int, Callable[[Value, int], None]] = {
        1: lambda v, k: setattr(found, "name", _text(v, k, "name of a function")),
        4: lambda v, k: found.inputs.append(_text(v, k, "input of a function")),
        5: lambda v, k: found.outputs.append(_text(v, k, "output of a function")),
        7: lambda v, k: found.nodes.append(_node(_part(v, k, "node"), 0)),
        9: lambda v, k: _opset(found.opsets, _part(v, k, "opset_import")),
        10: lambda v, k: setattr(found, "domain", _text(v, k, "domain of a function")),
    }
    for number, kind, value in fields(data):
        if number in readers:
            readers[number](value, kind)
        elif number == 11:
            attribute = _attribute(_part(value, kind, "attribute_proto"), 0)
            found.defaults[attribute.name] = attribute
    return found
