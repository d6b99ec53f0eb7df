"""A step of a decoder as a megakernel: what `model.generate(…, engine="mega")` runs.

In: the graph of a step, its inputs and caches on a device. Out: a `MegaStep`, which `models/generation.py` runs in place of a captured graph: on a GPU and in the emulator one
persistent kernel of several steps, on a CPU tasks on threads. The token and the position of a step are in device memory, so the next step needs nothing of the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewright.base.errors import UserError
from tilewright.execute.devices import Device, array_device, place_of
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.plan import GraphPlan
from tilewright.mega.cpu_step import CpuStep
from tilewright.mega.persistent.entry import PersistentStep
from tilewright.mega.persistent.kept import find_step, step_key
from tilewright.mega.report import MegaReport, report_of
from tilewright.runtime.core import streams

STEPS = 16
"""Steps of one launch, at most."""


class MegaStep:
    """A step that is launched again and again."""

    graph = None
    """No captured graph."""

    def __init__(self, graph: TensorGraph, place: Device, inputs: Mapping[str, Any], steps: int = STEPS) -> None:
        executor = graph.executor
        self.from_cache = False
        """Whether nothing had to be planned."""
        if place.kind not in ("cpu", "cuda", "emulator"):
            raise UserError.at("TW020", f"a megakernel of '{graph.name}' on '{place.id}'", help="CPUs, NVIDIA GPUs and the emulator run them: engine=\"graph\" runs everywhere")
        executor.check_inputs(inputs)
        reads = place_of(list(inputs.values()), place)
        self.place, self.inputs = place, dict(inputs)
        """The arrays that launches read."""
        for name, value in inputs.items():
            node = graph.nodes[name]
            if node.kind == "input":
                self.inputs[name] = self._own(executor.given(node, value, reads))
        sizes = executor.bind(self.inputs)
        self.step: CpuStep | PersistentStep
        if place.kind == "cpu":
            self.step = CpuStep(executor, executor.plan(sizes, True), place, self.inputs)
        else:
            key = step_key(graph, sizes, place.target, place.multiprocessors, {"steps": steps})
            kept = find_step(key, place.target)
            self.from_cache = kept is not None
            self.step = PersistentStep(executor, kept.plan if kept is not None else executor.plan(sizes, True), place, self.inputs, steps=steps, kept=kept, keep_as=key)
        self.outputs = self.step.outputs
        self._executor, self._sizes = executor, sizes
        self._clocked: PersistentStep | None = None

    @property
    def plan(self) -> GraphPlan:
        """The programs of the step."""
        return self._executor.plan(self._sizes, True)

    def _own(self, value: Any) -> Any:
        """A copy that later settings are written to."""
        gpu = array_device(self.place)
        if gpu is None:
            return np.array(value, order="C")
        made = gpu.empty(value.shape, value.dtype, streams.current(gpu.ordinal) or 0)
        gpu.copy(made, value if value.is_contiguous else value.copy(), streams.current(gpu.ordinal) or 0)
        return made

    def __call__(self, steps: int = 1) -> None:
        """So many steps: one launch for each `STEPS` of them."""
        while steps > 0:
            now = min(steps, STEPS)
            self.step.launch(now)
            steps -= now

    def report(self, title: str) -> MegaReport:
        """What one more step did, task by task. It takes a token as every step does."""
        if isinstance(self.step, CpuStep):
            self.step.launch(clocks=True)
            return report_of(title, self.place.id, self.step)
        if self._clocked is None:
            self._clocked = PersistentStep(self._executor, self.plan, self.place, self.inputs, clocks=True)
            self._clocked.launch()
        self._clocked.launch()
        return report_of(title, self.place.id, self._clocked)

    def close(self) -> None:
        """Give up threads and memory."""
        self.step.close()
        if self._clocked is not None:
            self._clocked.close()

    def __repr__(self) -> str:
        return f"<mega step of {self._executor.graph.name} on {self.place.id}>"
