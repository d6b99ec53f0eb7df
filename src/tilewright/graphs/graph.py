"""`tw.TensorGraph`: a graph of named ops that runs on any device.

In: what `builder.py` builds, and the inputs of a run. Out: arrays. A run is planned once for each set of sizes (`plan.py`) and executed by
`executor.py`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tilewright.graphs.builder import GraphBuilder
from tilewright.graphs.executor import Executor
from tilewright.graphs.order import ordered
from tilewright.graphs.plan import GraphPlan
from tilewright.graphs.tensor import GraphNode


class TensorGraph(GraphBuilder):
    """A graph of tensors. Names of nodes are unique; shapes may have named sizes, which the inputs of a run bind."""

    @cached_property
    def executor(self) -> Executor:
        """What plans and runs it."""
        return Executor(self)

    def run(self, device: str | None = None, fuse: bool = True, **inputs: Any) -> Any:
        """The outputs for these inputs: one array, or a dictionary by their names.

        `fuse=False` runs each node as a kernel of its own. Arrays come back as the inputs came.
        """
        return self.executor.run(inputs, device, fuse)

    def plan(self, device: str | None = None, fuse: bool = True, **inputs: Any) -> GraphPlan:
        """What a run with such inputs does: arrays, or shapes."""
        return self.executor.plan_for(inputs, device, fuse)

    def validate(self) -> tuple[GraphNode, ...]:
        """The nodes in an order in which they can run. Missing nodes and cycles are errors that name nodes."""
        return ordered(self)

    def state(self, name: str, device: str | None = None) -> Any:
        """The array of a cache on a device."""
        return self.executor.state(name, device)

    def reset(self, device: str | None = None) -> None:
        """Caches are zero again."""
        self.executor.reset(device)
