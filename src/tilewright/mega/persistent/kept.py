"""A planned step as an entry of the cache: what a later process needs to bind and launch it, without planning or compiling again.

In: the key of a graph for some sizes, a target and options; a step that was planned. Out: an entry of JSON (reading one runs nothing), and a `KeptStep` of it: the
ops with their waits, the columns of the address table, and the code. A graph whose nodes are not plain (kernels of the user's own, parameters that are objects) has no key.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tilewright.base.artifact import Artifact, IndexSite
from tilewright.base.dtypes import DType, by_name
from tilewright.base.target import Target
from tilewright.compile.driver import package_version
from tilewright.compile.store import STORE
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.lower import PlannedValue, Ref
from tilewright.graphs.ops.table import op_record
from tilewright.graphs.plan import GraphPlan
from tilewright.graphs.registry import changes
from tilewright.graphs.tensor import Tensor
from tilewright.ir.nodes import Block, Kernel, Stage
from tilewright.ir.program import Program
from tilewright.ir.text import print_program
from tilewright.ir.text_parse import parse_program
from tilewright.mega.persistent.records import ArraySlot, MemoryRegion, OpWait, PersistentOp, StepPlan, TaskLoop
from tilewright.tree.block_graph import AffineIndex
from tilewright.tree.syntax import Function

_MOST_BYTES = 1 << 12
"""Of a constant array that is part of an entry."""


# -- keys -----------------------------------------------------------------------------------------------------------


def graph_key(graph: TensorGraph, sizes: Mapping[str, int]) -> str:
    """A hash of the nodes of a graph and of the sizes of a run; empty where something in it is not plain."""
    if graph.replaced or changes() or not all(_is_ours(str(node.op)) for node in graph.nodes.values() if node.kind == "op"):
        return ""
    parts = [graph.name, repr(sorted(sizes.items()))]
    for node in graph.nodes.values():
        try:
            inputs = [f"{name}={_text(value)}" for name, value in node.inputs.items()]
            params = [f"{name}={_text(value)}" for name, value in node.params.items()]
        except TypeError:
            return ""
        parts.append(f"{node.name} {node.kind} {node.op} {inputs} {params} {[tensor.form for tensor in node.results]}")
    parts += [f"{name} -> {_text(tensor)}" for name, tensor in graph.outputs.items()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _is_ours(op: str) -> bool:
    """Whether the kernel of an op is the package's: the compiler's version says what it is then."""
    kernel: Any = op_record(op).kernel
    return str(getattr(getattr(kernel, "python", kernel), "__module__", "")).startswith("tilewright.")


def _text(value: Any) -> str:
    """What a plain value is; `TypeError` where it is not."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, DType):
        return value.name
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, Function):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{value.node.name}.{value.index}" if value.base is None else f"{_text(value.base)} -> {value.step!r} {value.form}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    raise TypeError(type(value).__name__)


def step_key(graph: TensorGraph, sizes: Mapping[str, int], target: Target, multiprocessors: int, options: Mapping[str, Any]) -> str:
    """Where a step of a graph is in the cache; empty where it cannot be kept."""
    graph_part = graph_key(graph, sizes)
    if not graph_part:
        return ""
    return hashlib.sha256(f"mega step|{graph_part}|{target.key()}|{multiprocessors}|{sorted(options.items())!r}|{package_version()}".encode()).hexdigest()


# -- entries --------------------------------------------------------------------------------------------------------


@dataclass
class KeptSegment:
    """What binding asks of a segment of a plan."""

    results: tuple[PlannedValue, ...]
    constant: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class KeptPlan:
    """What binding asks of a plan."""

    name: str
    peak_bytes: int
    offsets: dict[int, int]
    outputs: dict[str, Ref]
    segments: list[KeptSegment]


@dataclass
class KeptStep:
    """A step from the cache. Its ops have no kernels: the code is there."""

    plan: KeptPlan
    step: StepPlan
    blocks: int
    artifact: Artifact | None
    program: Program | None
    """For the emulator."""
    ring_slots: int = 0
    """Slots of a step that come by a ring."""


def keep_step(key: str, plan: GraphPlan, step: StepPlan, blocks: int, artifact: Artifact | None, program: Program, ring_slots: int = 0) -> None:
    """Make an entry; none where a plan has constants that are computed or large."""
    if any(segment.constant for segment in plan.segments):
        return
    values = {value.number: value for segment in plan.segments for value in segment.results}
    writer = _EntryWriter(values)
    try:
        entry = {
            "name": plan.name, "peak": plan.peak_bytes, "offsets": sorted(plan.offsets.items()), "values": [_value(v) for v in values.values()],
            "outputs": {name: writer.ref(ref) for name, ref in plan.outputs.items()}, "loops": [writer.loop(loop) for loop in step.loops],
            "scratch": {name: [nbytes, dtype.name] for name, (nbytes, dtype) in step.scratch.items()}, "many": step.many, "blocks": blocks, "ring": ring_slots,
            "failures": {name: [asdict(site) for site in (program.sites or ())] for name, program in step.failures.items()}, "sources": writer.sources,
            "artifact": artifact.key if artifact is not None else "", "program": print_program(program) if artifact is None else "",
        }  # fmt: skip
    except _CannotKeep:
        return
    code = json.dumps(entry, separators=(",", ":")).encode()
    STORE.keep_also(key, Artifact(plan.name, step.target.name, "mega step", code, (), (), (), (), (), (), key=key))


def find_step(key: str, target: Target) -> KeptStep | None:
    """The entry of that key with its code; None where either is not there."""
    found = STORE.find(key) if key else None
    if found is None:
        return None
    entry = json.loads(found.code)
    artifact = STORE.find(entry["artifact"]) if entry["artifact"] else None
    if entry["artifact"] and artifact is None:
        return None
    values = {row[0]: PlannedValue(row[0], by_name(row[1]), tuple(row[2]), tuple(row[3])) for row in entry["values"]}
    reader = _EntryReader(values, entry["sources"])
    plan = KeptPlan(
        entry["name"], entry["peak"], dict(entry["offsets"]), {name: reader.ref(ref) for name, ref in entry["outputs"].items()}, [KeptSegment(tuple(values.values()))]
    )
    step = StepPlan(entry["name"], target, [reader.loop(loop) for loop in entry["loops"]], [], {name: (n, by_name(d)) for name, (n, d) in entry["scratch"].items()}, entry["many"])
    step.failures = {
        name: Program(entry["name"], (), (), (), (), sites=tuple(IndexSite(**site) for site in sites)) for name, sites in entry["failures"].items()
    }
    program = parse_program(entry["program"], f"{entry['name']}.kir") if entry["program"] else None
    return KeptStep(plan, step, entry["blocks"], artifact, program, entry["ring"])


class _CannotKeep(Exception):
    """Something that an entry cannot hold."""


def _value(value: PlannedValue) -> list[Any]:
    return [value.number, value.dtype.name, value.shape, value.memory]


class _EntryWriter:
    def __init__(self, values: Mapping[int, PlannedValue]) -> None:
        self.values = values
        self.sources: list[Any] = []
        self.known: dict[object, int] = {}

    def ref(self, ref: Ref) -> dict[str, Any]:
        root: list[Any]
        if isinstance(ref.root, PlannedValue):
            if ref.root.number not in self.values:
                raise _CannotKeep
            root = ["value", ref.root.number]
        elif isinstance(ref.root, str):
            root = ["leaf", ref.root]
        else:
            array = np.ascontiguousarray(ref.root)
            if array.nbytes > _MOST_BYTES:
                raise _CannotKeep
            root = ["array", array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]
        return {"root": root, "shape": ref.shape, "dtype": ref.dtype.name, "extents": ref.extents, "places": [[p.offset, p.steps] for p in ref.places], "steps": ref.steps}

    def source(self, slot: ArraySlot) -> int:
        source = slot.source
        key = ("ref", source.key, str(source.dtype)) if isinstance(source, Ref) else ("value", source.number) if isinstance(source, PlannedValue) else source
        if key not in self.known:
            self.known[key] = len(self.sources)
            self.sources.append(["ref", self.ref(source)] if isinstance(source, Ref) else ["value", source.number] if isinstance(source, PlannedValue) else ["plain", source])
        return self.known[key]

    def loop(self, loop: TaskLoop) -> dict[str, Any]:
        ops = [[op.number, op.title, op.position, op.tasks, op.grid, op.args, sorted(op.reads), sorted(op.writes), op.kernel.threads, len(op.others), op.choice] for op in loop.ops]
        slots = [
            [{name: [self.source(slot), slot.nbytes, slot.align, slot.constant] for name, slot in programs.items()} for programs in iteration] for iteration in loop.slots
        ]
        waits = [[[number, [[w.op, w.which] for w in listed]] for number, listed in lists.items()] for lists in (loop.first, loop.rest)]
        return {
            "count": loop.count, "ops": ops, "slots": slots, "titles": loop.titles, "columns": loop.columns, "entry": loop.first_entry, "instance": loop.first_instance, "waits": waits,
        }  # fmt: skip


class _EntryReader:
    def __init__(self, values: Mapping[int, PlannedValue], sources: list[Any]) -> None:
        self.values = values
        self.sources = [self.ref(row[1]) if row[0] == "ref" else values[row[1]] if row[0] == "value" else row[1] for row in sources]

    def ref(self, row: dict[str, Any]) -> Ref:
        kind, *what = row["root"]
        root: Any = what[0]
        if kind == "value":
            root = self.values[root]
        elif kind == "array":
            root = np.frombuffer(base64.b64decode(what[2]), np.dtype(root)).reshape(what[1])
        places = tuple(AffineIndex(offset, tuple(steps)) for offset, steps in row["places"])
        return Ref(root, tuple(row["shape"]), by_name(row["dtype"]), tuple(row["extents"]), places, _tuples(row["steps"]))

    def loop(self, row: dict[str, Any]) -> TaskLoop:
        ops = [self._op(*op) for op in row["ops"]]
        slots = [
            [{name: ArraySlot(MemoryRegion(""), self.sources[source], nbytes, align, constant) for name, (source, nbytes, align, constant) in programs.items()} for programs in iteration]
            for iteration in row["slots"]
        ]
        made = TaskLoop(row["count"], ops, slots, row["titles"], [(place, name) for place, name in row["columns"]], row["entry"], row["instance"])
        made.first, made.rest = ({number: [OpWait(op, which) for op, which in listed] for number, listed in lists} for lists in row["waits"])
        return made

    @staticmethod
    def _op(number: int, title: str, position: int, tasks: int, grid: list[int], args: list[str], reads: list[str], writes: list[str], threads: int, others: int, choice: str) -> PersistentOp:
        empty = Kernel(title, Stage.THREAD, (), Block((), ()), (), threads)

        def one() -> PersistentOp:
            return PersistentOp(number, title, empty, tuple(args), frozenset(reads), frozenset(writes), {}, position, tasks, tuple(grid))

        found = one()
        found.others, found.choice = tuple(one() for _ in range(others)), choice
        return found


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
