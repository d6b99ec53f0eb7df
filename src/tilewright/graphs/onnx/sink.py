"""Nodes of a tensor graph for what the rules of ONNX operators emit.

In: kernels as trees, views, constants. Out: a `TensorGraph`. Every kernel is a node of the op `Loops`, whose kernel is the tree that the node brings along;
reshapes, transposes and slices are views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.onnx.tree_kernels import kernel_of
from tilewright.graphs.onnx.values import Shape
from tilewright.graphs.registry import Lowered, NodeCall, OpParam, OpRecord, TensorType, add_op
from tilewright.graphs.tensor import Tensor
from tilewright.runtime.memory.packed_array import PackedArray
from tilewright.tree.syntax import Function


def _types(call: NodeCall) -> tuple[TensorType, ...]:
    return tuple(call["types"])


def _kernel(call: NodeCall) -> Lowered:
    kernel = kernel_of(call["tree"])
    return Lowered(kernel, dict(zip(kernel.parameter_names, call.inputs.values(), strict=True)))


LOOPS = add_op(
    OpRecord(
        "Loops", ("*x",), _types, _kernel,
        (OpParam("tree", Function, doc="the kernel, as a tree"), OpParam("types", tuple, doc="what it makes")),
        doc="A kernel that a node brings along: what imported models consist of.",
    )
)


class GraphSink:
    """Builds a graph."""

    def __init__(self, graph: TensorGraph) -> None:
        self.graph = graph
        self._weights: dict[int, tuple[np.ndarray | PackedArray, Tensor]] = {}
        self._used: dict[str, int] = {}
        """How many nodes were named alike."""

    def name(self, wanted: str) -> str:
        """A name that no node has."""
        found, number = wanted, self._used.get(wanted, 0)
        while found in self.graph.nodes:
            number += 1
            found = f"{wanted}_{number}"
        self._used[wanted] = number
        return found

    def weight(self, array: np.ndarray | PackedArray) -> Any:
        """A constant; the same array is one weight."""
        found = self._weights.get(id(array))
        if found is None:
            found = self._weights[id(array)] = array, self.graph.weight(self.name(f"weight_{len(self._weights)}"), array)
        return found[1]

    def kernel(self, label: str, function: Function, args: Sequence[Any], results: Sequence[tuple[Shape, np.dtype]]) -> Sequence[Any]:
        """A node."""
        types = []
        for shape, dtype in results:
            found = dtypes.from_numpy(dtype)
            assert found is not None
            types.append(TensorType(shape, found))
        made = self.graph.op("Loops", *args, name=self.name(label), tree=function, types=tuple(types))
        return made if isinstance(made, tuple) else (made,)

    def reshape(self, handle: Any, shape: Shape) -> Any:
        return handle.reshape(shape)

    def transpose(self, handle: Any, axes: Sequence[int]) -> Any:
        return handle.transpose(*axes)

    def slice(self, handle: Any, axis: int, start: int, size: int, step: int) -> Any:
        return handle.slice(axis, start, size, step)
