"""A model and the sizes of a call become nodes of a sink.

In: a `Model`, what its inputs are (shapes, dtypes, and the numbers of those that shapes depend on). Out: the values of its outputs, and
the sink has the nodes. What depends on shapes and constants alone is computed here, on the host (`folding.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from tilewright.base.errors import UserError
from tilewright.graphs.onnx import operators
from tilewright.graphs.onnx.folding import folded
from tilewright.graphs.onnx.model import GraphRecord, Model, NodeRecord, TensorRecord
from tilewright.graphs.onnx.operator_rules import OPERATORS, NodeView
from tilewright.graphs.onnx.tensors import ExternalFiles, array_of
from tilewright.graphs.onnx.values import Known, NodeSink, PackedWeights
from tilewright.graphs.onnx.wire import Malformed

assert operators.FAMILIES  # importing the package registers the rules
MOST_NODES = 200_000
"""Nodes of a model with its functions in place."""
MOST_SMALL = 64
"""Elements of an integer input that shapes may depend on."""


class Translation:
    """One translation of a model."""

    def __init__(self, model: Model, files: ExternalFiles, sink: NodeSink, limit: int, constants: dict[int, np.ndarray], packed: PackedWeights) -> None:
        self.model, self.files, self.sink, self.limit = model, files, sink, limit
        self.constants, self.packed = constants, packed
        """Arrays of tensors that were read before, by the identity of their records; and weights that were packed."""

    def run(self, inputs: Mapping[str, Known]) -> dict[str, Known]:
        """The outputs by name."""
        graph = self.model.graph
        assert graph is not None
        scope: dict[str, Known] = {}
        self._graph(graph, scope, dict(inputs), self.model.opsets)
        found: dict[str, Known] = {}
        for output in graph.outputs:
            if output.name not in scope:
                raise UserError.at("TW008", f"output '{output.name}' of the model is made by no node")
            found[output.name] = scope[output.name]
        return found

    def _graph(self, graph: GraphRecord, scope: dict[str, Known], given: Mapping[str, Known], opsets: Mapping[str, int]) -> None:
        for tensor in graph.initializers:
            if tensor.name not in given:
                array = self.tensor(tensor)
                scope[tensor.name] = Known(array.shape, array.dtype, array)
        scope.update(given)
        for node in graph.nodes:
            self._node(node, scope, opsets)

    def tensor(self, record: TensorRecord) -> np.ndarray:
        """The array of a tensor; read once."""
        found = self.constants.get(id(record))
        if found is None:
            try:
                found = self.constants[id(record)] = array_of(record, self.files)
            except Malformed as error:
                raise UserError.at("TW007", str(error)) from None
        return found

    def _node(self, record: NodeRecord, scope: dict[str, Known], opsets: Mapping[str, int]) -> None:
        inputs: list[Known | None] = []
        for name in record.inputs:
            if name and name not in scope:
                raise UserError.at("TW008", f"{record.label}: its input '{name}' is made by no node before it")
            inputs.append(scope[name] if name else None)
        function = self.model.functions.get((record.domain, record.op))
        if function is not None:
            self._call(record, inputs, scope)
            return

        def subgraph(graph: GraphRecord) -> list[Known]:
            inner = dict(scope)
            self._graph(graph, inner, {}, opsets)
            missing = [o.name for o in graph.outputs if o.name not in inner]
            if missing:
                raise UserError.at("TW008", f"{record.label}: output '{missing[0]}' of its graph is made by no node")
            return [inner[o.name] for o in graph.outputs]

        view = NodeView(record, inputs, opsets.get(record.domain, 1), self.sink, self.limit, self.tensor, subgraph, self.packed)
        array = folded(view)
        if array is not None:
            results: list[Known | None] = [view.known(a) for a in array]
        else:
            made = OPERATORS[record.domain, record.op].rule(view)
            results = [made] if isinstance(made, Known) else list(made)
        sources = _sources(inputs)
        for number, name in enumerate(record.outputs):
            if not name:
                continue
            found = results[number] if number < len(results) else None
            if found is None:
                raise view.error(f"its output {number} ('{name}') is not made here", "TW005")
            if name in scope:
                raise view.error(f"makes '{name}', which there is already", "TW016", "names of values are unique in a graph")
            if sources is not None and found.host is None and found.inputs is None and found.dtype.kind in "iub" and found.size <= MOST_SMALL * 64:
                found.inputs = sources
            scope[name] = found

    def _call(self, record: NodeRecord, inputs: list[Known | None], scope: dict[str, Known]) -> None:
        """A function of the model: its nodes, with the node's attributes where they refer to them."""
        function = self.model.functions[record.domain, record.op]
        inner = {name: value for name, value in zip(function.inputs, inputs, strict=False) if value is not None}
        known = {**function.defaults, **record.attributes}
        for node in function.nodes:
            attributes = {
                name: replace(known[a.reference], name=name) if a.reference else a for name, a in node.attributes.items() if not a.reference or a.reference in known
            }
            self._node(replace(node, attributes=attributes, inputs=[i if i in inner else "" for i in node.inputs]), inner, {**self.model.opsets, **function.opsets})
        for outer, name in zip(record.outputs, function.outputs, strict=False):
            if outer:
                if name not in inner:
                    raise UserError.at("TW008", f"{record.label}: output '{name}' of its function is made by no node")
                scope[outer] = inner[name]


def _sources(inputs: list[Known | None]) -> frozenset[str] | None:
    """The small inputs that all of these are computed of; None where something else is."""
    found: frozenset[str] = frozenset()
    for value in inputs:
        if value is None or value.host is not None:
            continue
        if value.inputs is None:
            return None
        found |= value.inputs
    return found or None


def check_functions(model: Model) -> None:
    """Functions of a model that call each other in a circle, or that come to too many nodes where they are put in place, are errors."""
    sizes: dict[tuple[str, str], int] = {}
    path: list[tuple[str, str]] = []

    def size(key: tuple[str, str]) -> int:
        if key not in model.functions:
            return 1
        if key in path:
            names = [f"{domain}.{name}" for domain, name in (*path[path.index(key) :], key)]
            raise UserError.at("TW016", f"functions of the model call each other in a circle: {' -> '.join(names)}")
        if key not in sizes:
            path.append(key)
            if len(path) > 64:
                raise UserError.at("TW005", "functions of the model call each other more than 64 deep")
            sizes[key] = sum(size((node.domain, node.op)) for node in _with_inner(model.functions[key].nodes))
            path.pop()
        return sizes[key]

    total = sum(size((node.domain, node.op)) for node in _with_inner(model.graph.nodes if model.graph is not None else []))
    if total > MOST_NODES:
        raise UserError.at("TW005", f"the model has {total:,} nodes once its functions are put in place, and {MOST_NODES:,} are the most")


def unsupported(model: Model) -> list[NodeRecord]:
    """All nodes whose operators have no rule, those in functions and inner graphs too."""
    lists = [*([model.graph.nodes] if model.graph is not None else []), *(function.nodes for function in model.functions.values())]
    nodes = (node for some in lists for node in _with_inner(some))
    return [node for node in nodes if (node.domain, node.op) not in OPERATORS and (node.domain, node.op) not in model.functions]


def _with_inner(nodes: list[NodeRecord]) -> Iterator[NodeRecord]:
    """Nodes, and those of graphs among their attributes."""
    for node in nodes:
        yield node
        for attribute in node.attributes.values():
            for graph in attribute.value if isinstance(attribute.value, list) else [attribute.value]:
                if isinstance(graph, GraphRecord):
                    yield from _with_inner(graph.nodes)
