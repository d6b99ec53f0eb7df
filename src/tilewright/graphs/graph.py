"""`tw.TensorGraph`: a graph of named ops that runs on any device.

In: what `builder.py` builds, and the inputs of a run. Out: arrays. A run is planned once for each set of sizes (`plan.py`) and executed by
`executor.py`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tilewright.base.errors import public_methods
from tilewright.graphs.builder import GraphBuilder
from tilewright.graphs.captured import CapturedStep
from tilewright.graphs.executor import Executor
from tilewright.graphs.explain import explain
from tilewright.graphs.order import ordered
from tilewright.graphs.plan import GraphPlan
from tilewright.graphs.profile import GraphProfile, profile
from tilewright.graphs.tensor import GraphNode


@public_methods()
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

    def profile(self, device: str | None = None, fuse: bool = False, runs: int = 5, **inputs: Any) -> GraphProfile:
        """Launches and time of each node; with `fuse=True` of each program. `.trace("file.json")` writes a timeline."""
        return profile(self.executor, inputs, device, fuse, runs)

    def capture(self, device: str | None = None, max_position: int | None = None, launches: int = 0, **inputs: Any) -> CapturedStep:
        """The run recorded once: `step(x=…)` replays it. On a GPU one CUDA graph, elsewhere one list of launches.

        `max_position` is how many positions caches with a named extent hold. `launches=1` makes each program one launch on a GPU.
        """
        return CapturedStep(self.executor, device, max_position, inputs, launches)

    def capacity(self, **sizes: int) -> None:
        """How many positions caches with named extents hold. What is in them stays."""
        self.executor.set_capacity(sizes)

    def explain(self, target: str = "cpu", fuse: bool = True, **inputs: Any) -> str:
        """Which nodes became which launch, and why others did not; for a target such as `sm_90a`."""
        return explain(self.executor.plan_for(inputs, None, fuse), target)

    def validate(self) -> tuple[GraphNode, ...]:
        """The nodes in an order in which they can run. Missing nodes and cycles are errors that name nodes."""
        return ordered(self)

    def state(self, name: str, device: str | None = None) -> Any:
        """The array of a cache on a device."""
        return self.executor.state(name, device)

    def reset(self, device: str | None = None) -> None:
        """Caches are zero again."""
        self.executor.reset(device)
