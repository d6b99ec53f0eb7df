"""`g.profile(x=…)`: launches and time of each node.

In: a graph and the inputs of a run. Out: a `GraphProfile`: a row for each node (for each program with `fuse=True`), a table as text, and a timeline for
chrome://tracing and ui.perfetto.dev. Time on a GPU is that between events around a node's launches, on the host that of the clock; the first run, which
compiles, is not counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.base.errors import UserError
from tilewright.execute.devices import array_device
from tilewright.graphs.executor import Executor
from tilewright.graphs.plan import GraphSegment
from tilewright.runtime.core import streams


@dataclass
class NodeTime:
    """A node, or the nodes of a program: launches of one run, and the least seconds of all runs."""

    nodes: tuple[str, ...]
    op: str
    launches: int
    seconds: float
    start: float = 0.0
    """In the last run, from its beginning."""


class GraphProfile:
    """What a run spent where."""

    def __init__(self, name: str, device: str, rows: list[NodeTime], runs: int) -> None:
        self.name, self.device, self.rows, self.runs = name, device, rows, runs

    @property
    def launches(self) -> int:
        return sum(row.launches for row in self.rows)

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    def trace(self, path: str | Path) -> None:
        """Write the timeline as a file that a browser's trace viewer opens."""
        events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": f"{self.name} on {self.device}"}}]
        for row in self.rows:
            more = {"op": row.op, "launches": row.launches, "nodes": list(row.nodes)}
            title = row.nodes[0] if len(row.nodes) == 1 else f"{row.nodes[0]} … {row.nodes[-1]}"
            events.append({"name": title, "cat": row.op, "ph": "X", "ts": row.start * 1e6, "dur": row.seconds * 1e6, "pid": 1, "tid": 1, "args": more})
        try:
            Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}), encoding="utf-8")
        except OSError as error:
            raise UserError.at("TW007", f"'{path}' cannot be written: {error.strerror or error}") from None

    def __str__(self) -> str:
        wide = max([len(", ".join(row.nodes)) for row in self.rows], default=4)
        wide = min(wide, 60)
        lines = [f"{self.name} on {self.device}: {self.launches} launches, {self.seconds * 1e6:.1f} us (best of {self.runs} runs)"]
        for row in self.rows:
            title = ", ".join(row.nodes)
            title = title if len(title) <= wide else f"{title[: wide - 1]}…"
            lines.append(f"  {title:{wide}}  {row.op:12}  {row.launches:3} launches  {row.seconds * 1e6:10.1f} us")
        return "\n".join(lines)


def profile(executor: Executor, inputs: Mapping[str, Any], device: str | None, fuse: bool, runs: int) -> GraphProfile:
    """Run it, once to compile and then `runs` times."""
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise UserError.at("TW009", f"runs is {runs!r}", help="give a number of runs")
    place = executor.device(inputs, device)
    gpu = array_device(place)
    rows: dict[int, NodeTime] = {}
    executor.run(inputs, device, fuse)
    for _ in range(runs):
        timed: list[tuple[GraphSegment, Any, Any]] = []
        stream = (streams.current(gpu.ordinal) or 0) if gpu is not None else 0
        began = time.perf_counter() if gpu is None else gpu.event(timing=True).record(stream)

        def watch(segment: GraphSegment, run: Callable[[], Any], timed: list[tuple[GraphSegment, Any, Any]] = timed, stream: int = stream) -> Any:
            start = time.perf_counter() if gpu is None else gpu.event(timing=True).record(stream)
            result = run()
            timed.append((segment, start, time.perf_counter() if gpu is None else gpu.event(timing=True).record(stream)))
            return result

        executor.run(inputs, device, fuse, watch)
        if gpu is not None:
            gpu.synchronize()
        for segment, start, stop in timed:
            seconds = stop - start if gpu is None else stop.milliseconds(start) / 1e3
            row = rows.get(id(segment))
            if row is None:
                ops = list(dict.fromkeys(str(call.node.op) for call in segment.calls))
                last = segment.runner.last if segment.runner is not None else None
                count = len(last.launches) if last is not None else 1
                row = rows[id(segment)] = NodeTime(tuple(dict.fromkeys(call.node.name for call in segment.calls)), ops[0] if len(ops) == 1 else "program", count, seconds)
            row.seconds = min(row.seconds, seconds)
            row.start = start - began if gpu is None else start.milliseconds(began) / 1e3
    return GraphProfile(executor.graph.name, place.id, list(rows.values()), runs)
