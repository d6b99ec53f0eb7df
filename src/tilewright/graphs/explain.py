"""What became of a graph's nodes: `print(plan.explain())`.

In: a plan and a target. Out: text: for each program its nodes, what was fused and how, what was not and why, and the launches that are left. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewright.base.target import Target, parse_target
from tilewright.compile.driver import Compilation, compile_stages
from tilewright.graphs.lower import PlannedValue, Ref
from tilewright.graphs.plan import GraphPlan, GraphSegment
from tilewright.runtime.memory.packed_array import PackedArray


def explain(plan: GraphPlan, target: str = "cpu") -> str:
    """The text for a target."""
    chosen = parse_target(target)
    lines = [f"{plan.name}: {len(plan.calls)} nodes in {len(plan.segments)} segments, {plan.programs} programs; workspace {plan.peak_bytes:,} bytes"]
    if plan.dropped:
        lines.append(f"dropped, since no output needs them: {', '.join(plan.dropped)}")
    known: dict[int, str] = {}
    for number, segment in enumerate(plan.segments):
        nodes = ", ".join(dict.fromkeys(call.node.name for call in segment.calls))
        once = " (computed once: weights alone)" if segment.constant else ""
        lines.append(f"[{number}] {nodes}{once}")
        if segment.runner is None:
            lines.append(f"    runs by itself: {getattr(segment.function, '__name__', 'a function')} is no kernel of plain options")
            continue
        same = known.get(id(segment.runner))
        if same is not None:
            lines.append(f"    the program of [{same}]")
            continue
        known[id(segment.runner)] = str(number)
        lines += [f"    {line}" for line in _segment_lines(segment, chosen)]
    return "\n".join(lines)


def stages_of(segment: GraphSegment, target: Target) -> Compilation:
    """A segment compiled for a target, with all stages to look at."""
    assert segment.runner is not None
    values = {name: stand_in(value) if isinstance(value, Ref) else value for name, value in segment.arguments.items()}
    arguments = segment.runner.arguments(values, target.is_gpu)
    return compile_stages(segment.runner.function, segment.runner.signature(arguments, target.is_gpu), target)


def stand_in(ref: Ref) -> np.ndarray | PackedArray:
    """An array of that form, with nothing in it."""
    if ref.dtype.is_packed:
        return PackedArray(np.empty((*ref.shape[:-1], ref.shape[-1] // ref.dtype.block, ref.dtype.block_bytes), np.uint8), ref.dtype)
    if not isinstance(ref.root, PlannedValue):
        return np.empty(ref.shape, ref.dtype.numpy)
    apart = _row_major(ref.root.memory)
    itemsize = ref.dtype.itemsize
    strides = tuple(sum(p.steps[a] * s for p, s in zip(ref.places, apart, strict=True)) * itemsize for a in range(len(ref.shape)))
    if strides == tuple(s * itemsize for s in _row_major(ref.shape)):
        return np.empty(ref.shape, ref.dtype.numpy)
    return np.lib.stride_tricks.as_strided(np.empty(ref.root.memory, ref.dtype.numpy), ref.shape, strides)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    found: list[int] = []
    step = 1
    for extent in reversed(shape):
        found.insert(0, step)
        step *= extent
    return tuple(found)


def _segment_lines(segment: GraphSegment, target: Target) -> list[str]:
    done = stages_of(segment, target)
    report: Any = done.fusion
    lines = [f"{report.before} kernels as written, {len(done.stages.thread.calls)} launches for {target.name}"]
    for made in report.fused:
        lines.append(f"{made.array}: {_WAYS.get(made.how, made.how)}")
    here = {name for call in done.stages.thread.calls for name in call.args}
    gone = dict.fromkeys(kept.array for kept in report.refused if kept.array not in here)
    lines += [f"{name}: computed by what reads it, in every block" for name in gone]
    lines += [f"{kept.array}: stays in memory: {kept.reason}" for kept in report.refused if kept.array in here]
    for call in done.stages.thread.calls:
        lines.append(f"launch {call.kernel.name}({', '.join(call.args)})")
    return lines


_WAYS: Mapping[str, str] = {
    "merged": "computed right after it is made",
    "continued": "computed in the same loop over rows",
    "rows": "made again from the row's reductions",
    "inlined": "computed where it is used",
    "beside": "computed beside the product it is combined with",
    "prologue": "computed by the products that read it, in every block",
    "shared": "read once for products that are computed side by side",
}
