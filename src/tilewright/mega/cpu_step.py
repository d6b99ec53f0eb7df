"""A plan on the CPU: its launches are recorded once, and run as tasks on threads.

In: an executor, a plan, the arrays of inputs and caches. Out: a step that is launched again and again; every launch fills the same outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tilewright.base.errors import UserError
from tilewright.execute import graphs
from tilewright.execute.devices import Device
from tilewright.graphs.executor import Executor
from tilewright.graphs.plan import GraphPlan
from tilewright.mega.cpu_tasks import CpuTasks, TaskTime


def _title(entry: str) -> str:
    """The name of a kernel from that of its entry: `tw_rms_norm_0` is `rms_norm`."""
    found = re.fullmatch(r"tw_(.+)_\d+", entry)
    return found[1] if found is not None else entry


class CpuStep:
    """A plan bound to arrays of the host."""

    def __init__(self, executor: Executor, plan: GraphPlan, place: Device, arrays: Mapping[str, Any], workspace: Any = None, workers: int | None = None) -> None:
        alone = [segment.title for segment in plan.segments if segment.runner is None]
        if alone:
            raise UserError.at("TW005", f"node '{alone[0]}' runs by itself: a function that is no kernel of plain options cannot be part of a megakernel")
        executor.prepare(plan, place, dict(arrays))
        recorded = graphs.Graph(place)
        with recorded.record():
            self.outputs = executor.execute(plan, dict(arrays), place, workspace=workspace)
        assert recorded.recorded is not None
        self._recorded: graphs.Graph | None = recorded
        """It has the arrays and the machine code that tasks know by address."""
        launches = recorded.recorded.launches()
        self.nodes = [segment.title for segment in plan.segments if not executor.is_folded(plan, segment, place)]
        """What each recorded program computes."""
        self.tasks = CpuTasks(launches, [_title(one.label) for one in launches], workers)
        self.workers = self.tasks.workers

    def launch(self, steps: int = 1, clocks: bool = False) -> None:
        """So many steps, one after the other."""
        for _ in range(steps):
            self.tasks.run(clocks)

    def timeline(self) -> list[TaskTime]:
        """When each task of the latest launch with clocks ran."""
        return list(self.tasks.times)

    def close(self) -> None:
        """Send the threads home."""
        self.tasks.close()
        self._recorded = None


class ViewsOnly:
    """A plan that runs nothing: its outputs are views of its inputs, or known."""

    def __init__(self, executor: Executor, plan: GraphPlan, place: Device, arrays: Mapping[str, Any]) -> None:
        executor.prepare(plan, place, dict(arrays))
        self.outputs = executor.execute(plan, dict(arrays), place)

    def launch(self) -> None:
        """There is nothing to do: the views are of the arrays that inputs were written to."""

    def check_failures(self) -> None:
        """Nothing can fail."""

    def close(self) -> None:
        """Nothing is held."""
