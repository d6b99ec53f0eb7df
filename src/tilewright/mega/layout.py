"""The workspace of a megakernel: one piece of memory, with a place for each slot that needs one.

In: the plan of a tape's graph. Out: a `WorkspaceLayout`: offsets of inputs, outputs and values between programs. Slots that never live together share
memory; the same tape always has the same layout. Slots that stay inside one program have no place: they live in registers, or in scratch of the program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from tilewright.graphs.lower import PlannedValue, Ref
from tilewright.graphs.plan import GraphPlan
from tilewright.graphs.tensor import Tensor
from tilewright.graphs.workspace import Lifetime, lower_bound, place_lifetimes


@dataclass(frozen=True)
class WorkspaceLayout:
    """Where slots lie. Offsets and sizes are bytes."""

    nbytes: int
    least: int
    """What lives at the same time at most: no layout can be smaller."""
    offsets: Mapping[int, int]
    """By slot."""
    sizes: Mapping[int, int]
    """Bytes of these slots."""
    inside: Mapping[int, int]
    """Slots that stay inside a task, by the number of the task."""
    input_offsets: Mapping[str, int]
    output_offsets: Mapping[str, int]
    bytes_by_dtype: Mapping[str, int]
    values: Mapping[int, int] = field(repr=False, default_factory=dict)
    """Offsets by the numbers of the plan's values."""

    def __str__(self) -> str:
        lines = [f"workspace {self.nbytes:,} bytes (at least {self.least:,})"]
        lines += [f"  slot {slot:3} at {at:8}, {self.sizes[slot]:8} bytes" for slot, at in sorted(self.offsets.items(), key=lambda item: (item[1], item[0]))]
        lines += [f"  slot {slot:3} stays inside task {task}" for slot, task in sorted(self.inside.items())]
        return "\n".join(lines)


def lay_out(plan: GraphPlan, tensors: Mapping[int, Tensor], inputs: Mapping[str, tuple[tuple[int, ...], int]]) -> WorkspaceLayout:
    """The layout of a plan. `inputs` are shapes and bytes of an element."""
    last = len(plan.segments)
    ends: dict[object, int] = {}
    made: dict[int, int] = {}
    for number, segment in enumerate(plan.segments):
        for value in segment.arguments.values():
            if isinstance(value, Ref):
                ends[value.root.number if isinstance(value.root, PlannedValue) else value.root if isinstance(value.root, str) else id(value.root)] = number
        if not segment.constant and segment.runner is not None:
            made.update((value.number, number) for value in segment.results)
    by_number = {value.number: value for value in plan.values}
    lifetimes: list[Lifetime] = []
    names = sorted(inputs)
    first = max(by_number, default=-1) + 1
    for place, name in enumerate(names):
        shape, itemsize = inputs[name]
        lifetimes.append(Lifetime(first + place, max(prod(shape) * itemsize, 1), 0, last))  # the next launch may read them again
    for number, segment_number in made.items():
        end = last if number in plan.kept else max(segment_number, ends.get(number, segment_number))
        lifetimes.append(Lifetime(number, max(by_number[number].nbytes, 1), segment_number, end))
    offsets, total = place_lifetimes(lifetimes)
    home = {(call.node.name, index): value.number for call in plan.calls for index, value in enumerate(call.values)}
    inner = {value.number: number for number, segment in enumerate(plan.segments) for call in segment.calls for value in call.values}
    slots: dict[int, int] = {}
    sizes: dict[int, int] = {}
    inside: dict[int, int] = {}
    dtypes: dict[str, int] = {}
    counted: set[int] = set()
    for slot, tensor in tensors.items():
        root = tensor
        while root.base is not None:
            root = root.base
        if root.node.kind == "input" and root.node.name in inputs:
            number, nbytes = first + names.index(root.node.name), prod(inputs[root.node.name][0]) * inputs[root.node.name][1]
        elif (root.node.name, root.index) in home:
            number = home[root.node.name, root.index]
            nbytes = by_number[number].nbytes
        else:
            continue  # weights and caches are no part of it
        if number not in offsets:
            if number in inner:
                inside[slot] = inner[number]
            continue
        slots[slot], sizes[slot] = offsets[number], nbytes
        if number not in counted:
            counted.add(number)
            dtypes[root.dtype.name] = dtypes.get(root.dtype.name, 0) + nbytes
    outputs: dict[str, int] = {}
    for name, ref in plan.outputs.items():
        if isinstance(ref.root, PlannedValue) and ref.root.number in offsets:
            outputs[name] = offsets[ref.root.number]
        elif isinstance(ref.root, str) and ref.root in inputs:
            outputs[name] = offsets[first + names.index(ref.root)]
    return WorkspaceLayout(
        total, lower_bound(lifetimes), slots, sizes, inside, {name: offsets[first + place] for place, name in enumerate(names)}, outputs, dict(sorted(dtypes.items())),
        {number: at for number, at in offsets.items() if number < first},
    )  # fmt: skip


def text_of(layout: WorkspaceLayout) -> bytes:
    """The layout as JSON, for the cache."""
    whole = asdict(layout)
    return json.dumps({name: sorted(value.items()) if isinstance(value, dict) else value for name, value in whole.items()}, separators=(",", ":")).encode()


def layout_of(text: bytes) -> WorkspaceLayout:
    """The layout that such a text is."""
    fields: dict[str, Any] = {name: dict(map(tuple, value)) if isinstance(value, list) else value for name, value in json.loads(text).items()}
    return WorkspaceLayout(**fields)
