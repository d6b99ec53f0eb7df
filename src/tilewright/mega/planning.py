"""A tape as a graph of tasks, with its workspace, for any target.

In: a tape. Out: a `TapePlan`: the tensor graph of the tape, the programs that its instructions become, the workspace. Nothing is compiled. The cache keeps the workspace by
the tape, so that the same tape need not be planned to be compiled or loaded again.
"""

from __future__ import annotations

import hashlib
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tilewright.base.artifact import Artifact
from tilewright.base.errors import UserError
from tilewright.compile.driver import package_version
from tilewright.compile.store import STORE
from tilewright.graphs.executor import Executor
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.lower import PlannedValue, Ref
from tilewright.graphs.plan import GraphPlan
from tilewright.mega.layout import WorkspaceLayout, lay_out, layout_of, text_of
from tilewright.mega.persistent.kept import graph_key
from tilewright.mega.tape import Tape
from tilewright.mega.tape_graph import TapeGraph, graph_of


@dataclass(frozen=True)
class MegaTask:
    """Instructions that are one program, and the tasks that it waits for."""

    number: int
    title: str
    nodes: tuple[str, ...]
    after: tuple[int, ...]
    read_bytes: int
    written_bytes: int
    once: bool = False
    """It depends on weights alone, and is computed when the runner is loaded."""


class TapePlan:
    """What a launch does."""

    def __init__(self, tape: Tape, fuse: bool = True) -> None:
        self.tape, self.fuse = tape, fuse
        self.found: TapeGraph = graph_of(tape)
        self.executor = executor_of(self.found)
        """What plans it; the graph's own, where the tape came from one, knows nothing of it."""
        if not self.found.graph.outputs:
            raise UserError.at("TW016", f"the outputs of the tape '{tape.name}' are known when it is planned: there is nothing to run")
        if not self.known:
            _ = self.workspace  # what is wrong is an error now

    @cached_property
    def graph_plan(self) -> GraphPlan:
        """The programs; they are found when they are first asked for, where the cache knows the workspace of such a tape."""
        made = plan_graph(self.found, self.executor, self.fuse)
        made.name = self.tape.name
        return made

    @cached_property
    def workspace(self) -> WorkspaceLayout:
        """Where slots lie."""
        if self.known is not None:
            return layout_of(self.known.code)
        inputs = {node.name: (tuple(size.evaluate(self.found.sizes) for size in node.results[0].sizes), node.results[0].dtype.itemsize) for node in self.graph.input_nodes}
        made = lay_out(self.graph_plan, self.found.tensors, inputs)
        if self.key:
            STORE.keep_also(self.key, Artifact(self.tape.name, "", "mega plan", text_of(made), (), (), (), (), (), (), key=self.key))
        return made

    @cached_property
    def known(self) -> Artifact | None:
        """The plan's entry in the cache."""
        return STORE.find(self.key) if self.key else None

    @property
    def graph(self) -> TensorGraph:
        """The tensor graph of the tape."""
        return self.found.graph

    @property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the outputs by name."""
        return {name: self.found.shapes[number] if self.tape.source is None else self._shape(name) for name, number in self.tape.outputs.items()}

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(size.evaluate(self.found.sizes) for size in self.graph.outputs[name].sizes)

    @cached_property
    def tasks(self) -> tuple[MegaTask, ...]:
        """The programs in order, each with those it waits for."""
        return _tasks(self.graph_plan)

    @cached_property
    def key(self) -> str:
        """A hash of the tape, of how it is planned, and of the compiler; empty where something of it is not plain: then it is planned each time."""
        graph = graph_key(self.graph, self.found.sizes)
        return hashlib.sha256(f"mega plan|{self.tape.key()}|{self.fuse}|{graph}|{package_version()}".encode()).hexdigest() if graph else ""

    @property
    def text(self) -> str:
        """What the programs are made of, where there is no key."""
        return _text(self.graph_plan)

    def __repr__(self) -> str:
        return f"<megakernel plan of {self.tape.name}: {len(self.tape)} instructions in {len(self.tasks)} tasks, workspace {self.workspace.nbytes:,} bytes>"


def executor_of(found: TapeGraph) -> Executor:
    """An executor of a tape's graph, for the sizes of the tape."""
    made = Executor(found.graph)
    made.capacity.update(found.sizes)
    return made


def plan_graph(found: TapeGraph, executor: Executor, fuse: bool) -> GraphPlan:
    """The programs of a graph; a copy, whose workspace may be another."""
    return copy(executor.plan(dict(found.sizes), fuse))


def _tasks(plan: GraphPlan) -> tuple[MegaTask, ...]:
    made: dict[int, int] = {}
    written: dict[str, int] = {}
    """The task that has written a cache last."""
    readers: dict[str, list[int]] = {}
    found: list[MegaTask] = []
    behind: list[set[int]] = []
    for number, segment in enumerate(plan.segments):
        direct: set[int] = set()
        read = 0
        for name, value in segment.arguments.items():
            if not isinstance(value, Ref):
                continue
            read += _nbytes(value)
            if isinstance(value.root, PlannedValue):
                direct.add(made[value.root.number])
            elif isinstance(value.root, str):
                if value.root in written:
                    direct.add(written[value.root])
                if name in segment.written:
                    direct.update(readers.pop(value.root, ()))
                    written[value.root] = number
                else:
                    readers.setdefault(value.root, []).append(number)
        direct.discard(number)
        implied: set[int] = set()
        needed = []
        for other in sorted(direct, reverse=True):
            if other not in implied:
                needed.append(other)
                implied |= {other} | behind[other]
        behind.append(implied)
        made.update((value.number, number) for value in segment.results)
        nodes = tuple(dict.fromkeys(call.node.name for call in segment.calls))
        found.append(MegaTask(number, segment.title, nodes, tuple(sorted(needed)), read, sum(v.nbytes for v in segment.results), segment.constant))
    return tuple(found)


def _nbytes(ref: Ref) -> int:
    if ref.dtype.is_packed:
        return prod(ref.shape) // ref.dtype.block * ref.dtype.block_bytes
    return prod(ref.shape) * ref.dtype.itemsize


def _text(plan: GraphPlan) -> str:
    """What the programs are made of."""
    parts = []
    for segment in plan.segments:
        arguments = [f"{n}:{v.dtype}{v.shape}{v.steps}{v.places}" if isinstance(v, Ref) else f"{n}:{v!r}" for n, v in segment.arguments.items()]
        function = segment.runner.function if segment.runner is not None else segment.function
        parts.append(f"{function!r} {arguments}")
    return "\n".join(parts)
