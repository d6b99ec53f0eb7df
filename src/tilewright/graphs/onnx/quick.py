"""The short way for runs on a CPU like those before: the machine code of each segment, with its arguments ready.

In: a plan that ran once. Out: a `QuickRun`, which takes arrays and gives arrays, or `NotImplemented` where something is not as it was; then the general
way runs. Weights are looked up once, and nothing is checked twice: the entries check what they are given themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewright.execute.device import Device
from tilewright.graphs.executor import Executor, stepped, strided
from tilewright.graphs.lower import PlannedValue, Ref
from tilewright.graphs.plan import GraphPlan


def _refuse(*args: object, **keywords: object) -> object:
    return NotImplemented


class QuickRun:
    """A plan as a list of calls."""

    def __init__(self, executor: Executor, plan: GraphPlan, place: Device) -> None:
        self.calls: list[tuple[Callable[..., Any], list[tuple[int, Any]], tuple[int, ...]]] = []
        """Machine code, its arguments (see `_source`), and the numbers of what it makes."""
        self.ready = True
        folded: Mapping[tuple[object, ...], Any] = executor.folded
        for segment in plan.segments:
            if executor.is_folded(plan, segment, place):
                continue
            entry = segment.runner.entry(place, _refuse) if segment.runner is not None and not segment.written else None
            if entry is None:
                self.ready = False
                return
            sources = [self._source(v, executor, plan, place, folded) for v in segment.arguments.values()]
            self.calls.append((entry, sources, tuple(v.number for v in segment.results)))
        self.outputs = {name: self._source(ref, executor, plan, place, folded) for name, ref in plan.outputs.items()}

    def _source(self, value: Any, executor: Executor, plan: GraphPlan, place: Device, folded: Mapping[tuple[object, ...], Any]) -> tuple[int, Any]:
        """0: the object itself; 1: an input by name; 2: a value by number; 3: a view of a value; 4: a view of an input."""
        if not isinstance(value, Ref):
            return 0, value
        if isinstance(value.root, PlannedValue) and (id(plan), value.root.number, place.id) not in folded:
            whole = value.shape == value.root.memory and all(p.axis == a for a, p in enumerate(value.places))
            return (2, value.root.number) if whole else (3, value)
        if isinstance(value.root, str) and executor.graph.nodes[value.root].kind == "input":
            return (4, (value.root, value.steps)) if value.steps else (1, value.root)
        return 0, executor.array(value, {}, {}, plan, place)

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """The outputs by name, or `NotImplemented`."""
        made: dict[int, Any] = {}

        def array(source: tuple[int, Any]) -> Any:
            kind, what = source
            if kind == 0:
                return what
            if kind == 1:
                return inputs[what]
            if kind == 4:
                return stepped(inputs[what[0]], what[1])
            return made[what] if kind == 2 else strided(made[what.root.number], what)

        for entry, sources, numbers in self.calls:
            result = entry(*map(array, sources))
            if result is NotImplemented:
                return NotImplemented
            for number, item in zip(numbers, result if isinstance(result, tuple) else (result,), strict=True):
                made[number] = np.asarray(item) if isinstance(item, np.generic) else item
        return {name: array(source) for name, source in self.outputs.items()}
