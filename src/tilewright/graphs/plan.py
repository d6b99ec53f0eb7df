"""The plan of a run: programs, and what each reads and makes.

In: the calls of a graph (`lower.py`). Out: a `GraphPlan`: segments in order. A segment is a program of several nodes, which is compiled, fused and
launched as a whole, or one function that runs by itself. Segments that are alike, as those of a network's layers, are one program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.execute.calls.outputs import keep
from tilewright.execute.calls.run import Runner
from tilewright.graphs.groups import group_calls
from tilewright.graphs.lower import PlannedCall, PlannedValue, Ref
from tilewright.graphs.workspace import Lifetime, lower_bound, place_lifetimes
from tilewright.tree.block_graph import BlockCall, BlockGraph, BlockView
from tilewright.tree.syntax import Param


@dataclass(eq=False)
class GraphSegment:
    """Calls that run together: `runner` takes `arguments` by name and makes `results`."""

    calls: tuple[PlannedCall, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    """Numbers and `Ref`s, by the program's names."""
    results: tuple[PlannedValue, ...] = ()
    runner: Runner | None = None
    function: Callable[..., Any] | None = None
    written: tuple[str, ...] = ()
    """Names of the arguments that are written in place."""
    free: tuple[PlannedValue, ...] = ()
    """Values that nobody needs after it."""

    @property
    def constant(self) -> bool:
        """Whether it depends on weights alone, and runs once."""
        return all(call.constant for call in self.calls)

    @property
    def title(self) -> str:
        names = [call.node.name for call in self.calls]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


_runners: dict[tuple[object, ...], tuple[object, Runner]] = {}
"""Programs by what they are made of: like segments share one."""


def build_segment(name: str, calls: Sequence[PlannedCall], needed: Callable[[PlannedValue], bool], launches: int = 0) -> GraphSegment:
    """The calls as one program. `needed` says which values somebody reads later."""
    arguments: dict[str, Any] = {}
    names: dict[object, str] = {}
    numbers: dict[int, int] = {}
    wired: list[tuple[str | BlockView, ...]] = []
    written: list[str] = []
    for call in calls:
        args: list[str | BlockView] = []
        for param, value in call.arguments.items():
            if isinstance(value, Ref) and isinstance(value.root, PlannedValue) and value.root.number in numbers:
                args.append(BlockView(numbers[value.root.number], value.extents, value.places))
                continue
            same: object = ("array", value.key) if isinstance(value, Ref) else ("number", type(value), value)
            own = names.get(same)
            if own is None:
                own = _fresh(param, arguments)
                names[same] = own
                arguments[own] = value
            if param in call.written and own not in written:
                written.append(own)
            args.append(own)
        wired.append(tuple(args))
        for made in call.values:
            numbers[made.number] = len(numbers)
    results = tuple(value for call in calls for value in call.values if needed(value))
    layouts = tuple(tuple(value.layout for value in call.values) for call in calls)
    leaving = tuple(numbers[v.number] for v in results)
    key = name, tuple(id(c.kernel) for c in calls), tuple(wired), layouts, leaving, tuple(arguments), tuple(written), launches
    found = _runners.get(key)
    if found is None:
        span = calls[0].kernel.function.span
        if len(calls) == 1 and _is_plain(calls[0]):
            function = calls[0].kernel.function
            found = calls, Runner(function, launches=launches)
        else:
            parts = tuple(BlockCall(c.kernel.function, args, kept) for c, args, kept in zip(calls, wired, layouts, strict=True))  # type: ignore[arg-type]
            params = tuple(Param(n, in_place=n in written, span=span) for n in arguments)
            found = calls, Runner(BlockGraph(name, params, None, (), "compute", parts=parts, results=leaving, span=span), launches=launches)
        keep(_runners, key, found)
    if len(calls) == 1 and _is_plain(calls[0]):
        arguments = dict(calls[0].arguments)
        results = calls[0].values
    return GraphSegment(tuple(calls), arguments, results, found[1], written=tuple(written))


def _is_plain(call: PlannedCall) -> bool:
    """Whether a call makes arrays as its kernel writes them."""
    return all(value.memory == value.shape for value in call.values)


def _fresh(name: str, taken: Mapping[str, object]) -> str:
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def readers(call: PlannedCall) -> list[PlannedValue]:
    return [value.root for value in call.arguments.values() if isinstance(value, Ref) and isinstance(value.root, PlannedValue)]


class GraphPlan:
    """What a run does, for one set of sizes: segments in order, where the outputs are, and one workspace for the values between segments."""

    def __init__(self, name: str, calls: Sequence[PlannedCall], outputs: Mapping[str, Ref], fuse: bool, dropped: Sequence[str] = (), launches: int = 0) -> None:
        self.name, self.calls, self.outputs, self.fuse = name, tuple(calls), dict(outputs), fuse
        self.dropped = tuple(dropped)
        """Names of nodes that no output needs."""
        groups = group_calls(self.calls, fuse)
        last: dict[int, int] = {}
        for number, group in enumerate(groups):
            for call in group:
                for value in readers(call):
                    last[value.number] = number
        self.kept = frozenset(ref.root.number for ref in outputs.values() if isinstance(ref.root, PlannedValue))
        """Numbers of the values that are outputs, or views of which are."""
        self.segments: list[GraphSegment] = []
        self.lifetimes: list[Lifetime] = []
        for number, group in enumerate(groups):
            if not group[0].joins:
                call = group[0]
                segment = GraphSegment((call,), dict(call.arguments), call.values, function=call.kernel, written=call.written)
            else:
                segment = build_segment(name, group, lambda value: value.number in self.kept or last.get(value.number, -1) > number, launches)  # noqa: B023
            segment.free = tuple(
                {v.number: v for call in group for v in (*readers(call), *call.values) if last.get(v.number, -1) <= number and v.number not in self.kept}.values()
            )
            self.segments.append(segment)
            if segment.runner is not None and not segment.constant:
                self.lifetimes += [
                    Lifetime(v.number, v.nbytes, number, max(number, last.get(v.number, number))) for v in segment.results if v.number not in self.kept
                ]
        self.offsets, self.peak_bytes = place_lifetimes(self.lifetimes)
        """Where values lie in the workspace, and how large it is. Arrays inside a program are the program's own."""

    @property
    def least_bytes(self) -> int:
        """What values between segments take at the same time: no workspace can be smaller."""
        return lower_bound(self.lifetimes)

    @property
    def programs(self) -> int:
        """How many different programs there are."""
        return len({id(segment.runner) for segment in self.segments if segment.runner is not None})

    @property
    def values(self) -> list[PlannedValue]:
        return [value for call in self.calls for value in call.values]

    def __repr__(self) -> str:
        return f"<plan of {self.name}: {len(self.calls)} nodes in {len(self.segments)} segments, {self.programs} programs>"
