"""Building a graph of named ops by hand.

In: inputs with symbolic shapes, weights, caches, and ops. Out: nodes and tensors. What an op does is in its record (`registry.py`); the shapes of a node
are known as soon as its inputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, by_name, from_numpy, is_name, q8_0
from tilewright.base.errors import UserError, public_methods
from tilewright.base.sizes import Size, size_text
from tilewright.execute.arrays import as_dtype
from tilewright.graphs.ops.table import op_record
from tilewright.graphs.registry import REQUIRED, NodeCall, OpRecord, TensorType, check_param, check_replacement
from tilewright.graphs.tensor import Extent, GraphNode, SizeShape, Tensor, as_sizes
from tilewright.runtime.exchange.libraries import is_array, is_tensor
from tilewright.runtime.memory.device_array import DeviceArray


def array_dtype(value: Any) -> DType | None:
    """The dtype of an array of any library; None where it is none of ours."""
    if isinstance(value, DeviceArray):
        return value.dtype
    if isinstance(value, np.ndarray):
        return from_numpy(value.dtype)
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, DType):
        return dtype
    if is_tensor(value):
        name = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8"}.get(str(dtype).rpartition(".")[2], str(dtype).rpartition(".")[2])
        return by_name(name) if is_name(name) else None
    try:
        return from_numpy(np.dtype(dtype))
    except TypeError:
        return None


def _cache_dtype(name: str, dtype: object) -> DType:
    """The dtype of a cache. Packed ones are those that rows can be rounded to as they come."""
    if isinstance(dtype, str) and is_name(dtype):
        dtype = by_name(dtype)
    if isinstance(dtype, DType) and dtype.is_packed:
        if dtype is not q8_0:
            raise UserError.at("TW009", f"the cache '{name}' cannot be {dtype}", help="of packed dtypes caches take q8_0")
        return dtype
    return as_dtype(dtype)


@public_methods()
class GraphBuilder:
    """A graph of tensors. Names of nodes are unique; shapes may have named sizes, which the inputs of a run bind."""

    def __init__(self, name: str = "graph") -> None:
        if not isinstance(name, str) or not name:
            raise UserError.at("TW009", f"the name of a graph is {name!r}", help="give a text")
        self.name = name
        self.nodes: dict[str, GraphNode] = {}
        self.outputs: dict[str, Tensor] = {}
        self.replaced: dict[tuple[str, str], Callable[..., Any]] = {}
        self.version = 0
        """Changes whenever the graph does: plans of other versions are not used."""
        self._inferring: list[str] = []

    # -- leaves -------------------------------------------------------------------------------------------------

    def input(self, name: str, shape: Extent | Sequence[Extent], dtype: object) -> Tensor:
        """An input of a run. Extents are numbers, or names of sizes."""
        sizes = as_sizes((shape,) if isinstance(shape, int | str | Size) else shape)
        node = self._add(GraphNode(self._fresh(name, "input"), "input"))
        return self._leaf(node, sizes, as_dtype(dtype))

    def weight(self, name: str, array: Any) -> Tensor:
        """An array that stays: it goes to a device once."""
        if not is_array(array) and not isinstance(array, np.ndarray) and not hasattr(array, "shape"):
            raise UserError.at("TW009", f"the weight '{name}' is a {type(array).__name__}, not an array")
        dtype = array_dtype(array)
        if dtype is None:
            raise UserError.at("TW009", f"the weight '{name}' has dtype {array.dtype}, which kernels do not have")
        node = self._add(GraphNode(self._fresh(name, "weight"), "weight", data=array))
        return self._leaf(node, as_sizes(tuple(int(e) for e in array.shape)), dtype)

    def cache(self, name: str, shape: Sequence[Extent], dtype: object) -> Tensor:
        """An array that lives on between runs and that ops write in place. It is zero at first.

        An extent may be a name, for which `g.capacity(name=…)` or `max_position=` of a capture gives the number. Of packed dtypes caches take `q8_0`, whose blocks
        of 32 are along the last axis.
        """
        sizes, kind = as_sizes(shape), _cache_dtype(name, dtype)
        if kind.is_packed and (not sizes or sizes[-1].constant is None or sizes[-1].constant % kind.block):
            raise UserError.at("TW004", f"the cache '{name}' of {kind} has the shape ({', '.join(map(size_text, sizes))})", help=f"its last extent must be a number, and a multiple of {kind.block}")
        node = self._add(GraphNode(self._fresh(name, "cache"), "cache"))
        return self._leaf(node, sizes, kind)

    def _leaf(self, node: GraphNode, sizes: SizeShape, dtype: DType) -> Tensor:
        tensor = Tensor(self, node, 0, sizes, dtype)
        node.results = (tensor,)
        return tensor

    # -- ops ----------------------------------------------------------------------------------------------------

    def op(self, op: str, *inputs: Any, name: str | None = None, **given: Any) -> Any:
        """A node. Inputs are tensors, names of nodes, numbers, or arrays (which become weights); keywords are inputs or parameters of the op's record.

        Gives a tensor, or a tuple of them. A node with an input by name has its shape once that node is there.
        """
        record = op_record(op)
        title = self._fresh(name if name is not None else self._numbered(op), "node")
        fixed = record.input_names[:-1] if record.variadic else record.input_names
        found: dict[str, Any] = {}
        if record.variadic:
            found.update(zip(fixed, inputs, strict=False))
            for number, value in enumerate(inputs[len(fixed) :]):
                found[f"{record.variadic}{number}"] = value
        elif len(inputs) > len(fixed):
            raise UserError.at("TW016", f"node '{title}' ({op}) takes {len(fixed)} input(s) ({', '.join(fixed)}), got {len(inputs)}")
        else:
            found.update(zip(fixed, inputs, strict=False))
        params: dict[str, Any] = {}
        known = {p.name: p for p in record.params} | {p.alias: p for p in record.params if p.alias}
        for key, value in given.items():
            if key in fixed:
                if key in found:
                    raise UserError.at("TW016", f"node '{title}' ({op}) got '{key}' twice")
                found[key] = value
            elif key in known:
                params[known[key].name] = check_param(title, record, known[key], value)
            else:
                names = (*fixed, *(p.name for p in record.params))
                raise UserError.at("TW016", f"node '{title}' ({op}) has no parameter '{key}'", help=f"it has {', '.join(names)}")
        for param in record.params:
            if param.name not in params:
                if param.default is REQUIRED:
                    raise UserError.at("TW008", f"node '{title}' ({op}) is missing the parameter '{param.name}'")
                params[param.name] = param.default
        missing = [n for n in record.needed if found.get(n) is None]
        if missing:
            raise UserError.at("TW008", f"node '{title}' ({op}) is missing the input '{missing[0]}'", help=f"its inputs are {', '.join(record.inputs)}")
        inputs_ = {n: self._input(title, op, n, v) for n, v in found.items() if v is not None}
        node = GraphNode(title, "op", op, inputs_, params)
        if all(not isinstance(v, str) for v in inputs_.values()):
            self._infer(node, record)
        else:
            # Shapes are known once the node is there.
            node.results = ()
        self._add(node)
        if not node.results:
            return PendingTensor(self, node) if record.results == 1 else tuple(PendingTensor(self, node, i) for i in range(record.results))
        return node.results[0] if len(node.results) == 1 else node.results

    def _input(self, node: str, op: str, name: str, value: Any) -> Tensor | str | int | float:
        if isinstance(value, Tensor):
            if value.graph is not self:
                raise UserError.at("TW009", f"node '{node}' ({op}): the input '{name}' is '{value.name}' of another graph, '{value.graph.name}'")
            return value
        if isinstance(value, np.generic) and value.ndim == 0:
            return value.item()  # type: ignore[no-any-return]
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return value
        if is_array(value) or isinstance(value, np.ndarray):
            return self.weight(self._free(f"{node}.{name}"), value)
        raise UserError.at("TW009", f"node '{node}' ({op}): the input '{name}' is a {type(value).__name__}", help="give a tensor, an array, a number or the name of a node")

    def _infer(self, node: GraphNode, record: OpRecord) -> None:
        """What the node makes, by the rule of its op."""
        if node.name in self._inferring:
            path = [*self._inferring[self._inferring.index(node.name) :], node.name]
            raise UserError.at("TW016", f"the graph has a cycle: {' -> '.join(path)}", help="a node's inputs must come before it")
        self._inferring.append(node.name)
        try:
            call = self.call_of(node)
            made = record.rule(call)
            types = (made,) if isinstance(made, TensorType) else tuple(made)
            node.constraints = call.constraints
            node.results = tuple(Tensor(self, node, i, as_sizes(t.shape), t.dtype) for i, t in enumerate(types))
        finally:
            self._inferring.pop()

    def call_of(self, node: GraphNode) -> NodeCall:
        """A node as its op's record sees it."""
        assert node.op is not None
        return NodeCall(node.name, node.op, {n: self.settled(node, v) if isinstance(v, str) else v for n, v in node.inputs.items()}, node.params)

    def settled(self, user: GraphNode, name: str) -> Tensor:
        """The tensor of a node that was named."""
        found = self.nodes.get(name)
        if found is None:
            raise UserError.at("TW008", f"node '{user.name}' ({user.op}): there is no node '{name}'", help=f"nodes: {', '.join(list(self.nodes)[:20])}")
        if not found.results:
            self._infer(found, op_record(str(found.op)))
        return found.results[0]

    def tensor(self, name: str) -> Tensor:
        """What the node of that name makes."""
        found = self.nodes.get(name)
        if found is None:
            raise UserError.at("TW002", f"the graph '{self.name}' has no node '{name}'", help=f"nodes: {', '.join(list(self.nodes)[:20])}")
        if not found.results:
            self._infer(found, op_record(str(found.op)))
        return found.results[0]

    def output(self, name: str, tensor: Any) -> None:
        """A result of every run."""
        if name in self.outputs:
            raise UserError.at("TW016", f"the graph '{self.name}' has an output '{name}' already")
        if isinstance(tensor, str):
            tensor = self.tensor(tensor)
        if isinstance(tensor, PendingTensor):
            tensor = tensor.settled()
        if not isinstance(tensor, Tensor) or tensor.graph is not self:
            raise UserError.at("TW009", f"the output '{name}' is a {type(tensor).__name__}, not a tensor of '{self.name}'")
        self.outputs[name] = tensor
        self.version += 1

    def replace(self, op: str, kernel: Callable[..., Any] | None, node: str = "") -> None:
        """Another kernel for an op in this graph, or for one node of it; None for the op's own again.

        Parameters of the kernel have names of the op's inputs and parameters. A function that is no kernel is called with arrays.
        """
        record = op_record(op)
        if node and (node not in self.nodes or self.nodes[node].op != op):
            raise UserError.at("TW002", f"the graph '{self.name}' has no node '{node}' of op '{op}'", help=f"nodes of that op: {', '.join(n.name for n in self.nodes.values() if n.op == op) or 'none'}")
        if kernel is None:
            self.replaced.pop((op, node), None)
        else:
            check_replacement(record, kernel)
            self.replaced[op, node] = kernel
        self.version += 1

    # -- names --------------------------------------------------------------------------------------------------

    def _add(self, node: GraphNode) -> GraphNode:
        node.number = len(self.nodes)
        self.nodes[node.name] = node
        self.version += 1
        return node

    def _fresh(self, name: str, what: str) -> str:
        if not isinstance(name, str) or not name:
            raise UserError.at("TW009", f"the name of the {what} is {name!r}", help="give a text")
        if name in self.nodes:
            raise UserError.at("TW016", f"the graph '{self.name}' has a node '{name}' already ({self.nodes[name].op or self.nodes[name].kind})", help="names are unique")
        return name

    def _free(self, name: str) -> str:
        found, number = name, 0
        while found in self.nodes:
            number += 1
            found = f"{name}_{number}"
        return found

    def _numbered(self, op: str) -> str:
        return self._free(op.lower())

    @property
    def input_nodes(self) -> tuple[GraphNode, ...]:
        return tuple(node for node in self.nodes.values() if node.kind == "input")

    def __repr__(self) -> str:
        ops = sum(node.kind == "op" for node in self.nodes.values())
        return f"<tensor graph {self.name}: {ops} ops, outputs {', '.join(self.outputs) or 'none'}>"


class PendingTensor(Tensor):
    """The result of a node with an input by name that is not there yet: settled when somebody asks for its shape."""

    def __init__(self, graph: GraphBuilder, node: GraphNode, index: int = 0) -> None:
        self.graph, self.node, self.index = graph, node, index
        self.base = self.step = None

    def settled(self) -> Tensor:
        self.graph.tensor(self.node.name)
        found: Tensor = self.node.results[self.index]
        return found

    @property
    def sizes(self) -> SizeShape:  # type: ignore[override]
        return self.settled().sizes

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.settled().dtype


def bind_inputs(graph: GraphBuilder, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, DType | None]) -> dict[str, int]:
    """The values of the named sizes; errors name the inputs."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    later: list[tuple[str, int, Size, int]] = []
    for node in graph.input_nodes:
        tensor = node.results[0]
        shape = shapes[node.name]
        if len(shape) != tensor.ndim:
            raise UserError.at("TW003", f"the input '{node.name}' is {tensor.form}, and was given with {len(shape)} axes: {shape}")
        given = dtypes[node.name]
        if given is not None and given is not tensor.dtype:
            raise UserError.at("TW006", f"the input '{node.name}' is {tensor.form}, and was given as {given}", help="convert it first")
        for axis, (size, extent) in enumerate(zip(tensor.sizes, shape, strict=True)):
            if size.name is not None and size.name not in sizes:
                sizes[size.name] = extent
                origin[size.name] = f"axis {axis} of '{node.name}'"
            else:
                later.append((node.name, axis, size, extent))
    for name, axis, size, extent in later:
        if not size.names <= sizes.keys():
            raise UserError.at("TW014", f"the size {size_text(size)} of the input '{name}' is not bound by any input")
        wanted = size.evaluate(sizes)
        if wanted != extent:
            where = ", ".join(f"'{n}' is {sizes[n]} ({origin[n]})" for n in sorted(size.names))
            raise UserError.at("TW004", f"axis {axis} of the input '{name}' is {extent}, but the graph says {size_text(size)}" + (f" = {wanted}: {where}" if where else ""))
    return sizes
