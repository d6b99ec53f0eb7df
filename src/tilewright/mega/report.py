"""What a launch of a megakernel did: tasks, where and when they ran, what they moved, and the path that its time goes along.

In: a step that ran once with clocks on. Out: a `MegaReport`: its text, plain data, and a picture (`gantt.py`). Times are those of the device's own clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.mega.cpu_step import CpuStep
from tilewright.mega.cpu_tasks import TaskTime
from tilewright.mega.persistent.entry import PersistentStep
from tilewright.mega.persistent.records import OpWait, TaskLoop


@dataclass(frozen=True)
class ReportedTask:
    """All tasks of one kernel in one launch."""

    number: int
    title: str
    nodes: str
    tasks: int
    processors: int
    bytes: int
    """Of the arrays that it touches."""
    after: tuple[int, ...]
    start: int
    end: int
    busy: int
    """Nanoseconds, summed over processors."""


@dataclass
class MegaReport:
    """A launch, task by task. Nanoseconds from its beginning."""

    name: str
    device: str
    times: list[TaskTime]
    tasks: list[ReportedTask]
    path: list[int] = field(default_factory=list)
    """The critical path: kernels, each of which ends last of those that the next one waits for."""

    @property
    def span(self) -> int:
        return max((t.end for t in self.times), default=0)

    @property
    def processors(self) -> int:
        return len({t.processor for t in self.times})

    @property
    def bytes(self) -> int:
        return sum(task.bytes for task in self.tasks)

    def as_data(self) -> dict[str, Any]:
        return {
            "name": self.name, "device": self.device, "nanoseconds": self.span, "processors": self.processors, "bytes": self.bytes, "critical_path": list(self.path),
            "tasks": [vars(task) | {"after": list(task.after)} for task in self.tasks],
            "times": [vars(time) for time in self.times],
        }  # fmt: skip

    def text(self, most: int = 60) -> str:
        """A table of the tasks, how busy processors were, and the critical path."""
        busy = sum(t.end - t.start for t in self.times)
        share = busy / (self.span * self.processors) if self.span and self.processors else 0.0
        rate = f", {self.bytes / self.span:.1f} GB/s" if self.span else ""
        lines = [f"{self.name} on {self.device}: {len(self.tasks)} kernels on {self.processors} processors, {self.span / 1e3:.1f} µs, busy {share:.0%}; {self.bytes:,} bytes{rate}"]
        lines.append(f"{'':4} {'kernel':28} {'tasks':>6} {'start µs':>9} {'end µs':>9} {'bytes':>13}  {'after':14} nodes")
        critical = set(self.path)
        for task in self.tasks[:most]:
            mark = "*" if task.number in critical else " "
            after = ",".join(map(str, task.after)) or "-"
            lines.append(f"{task.number:3}{mark} {task.title[:28]:28} {task.tasks:6} {task.start / 1e3:9.1f} {task.end / 1e3:9.1f} {task.bytes:13,}  {after[:14]:14} {task.nodes[:60]}")
        if len(self.tasks) > most:
            lines.append(f"     and {len(self.tasks) - most} more")
        by_title: dict[str, list[int]] = {}
        for number in self.path:
            task = self.tasks[number]
            by_title.setdefault(task.title, []).append(task.end - task.start)
        lines.append(f"critical path (*): {len(self.path)} kernels; " + "; ".join(f"{title} {len(found)} × {sum(found) / len(found) / 1e3:.1f} µs" for title, found in sorted(by_title.items(), key=lambda i: -sum(i[1]))[:8]))
        return "\n".join(lines)


def report_of(name: str, device: str, step: CpuStep | PersistentStep) -> MegaReport:
    """What the latest launch of a step with clocks did."""
    times, titles, nodes, sizes, after = _of_cpu(step) if isinstance(step, CpuStep) else _of_kernel(step)
    begin = min((t.arrived for t in times if t.arrived), default=0)
    times = sorted((TaskTime(t.processor, t.number, t.title, max(0, t.arrived - begin), max(0, t.start - begin), max(0, t.end - begin)) for t in times), key=lambda t: (t.processor, t.start, t.number))
    tasks: list[ReportedTask] = []
    for number, title in enumerate(titles):
        own = [t for t in times if t.number == number]
        tasks.append(
            ReportedTask(
                number, title, nodes[number], len(own), len({t.processor for t in own}), sizes[number], after[number], min((t.start for t in own), default=0), max((t.end for t in own), default=0),
                sum(t.end - t.start for t in own),
            )
        )  # fmt: skip
    return MegaReport(name, device, times, tasks, critical_path(tasks))


def critical_path(tasks: Sequence[ReportedTask]) -> list[int]:
    """From the kernel that ends last, back along those that end last of what it waits for."""
    ran = [task for task in tasks if task.tasks]
    if not ran:
        return []
    path = [max(ran, key=lambda task: (task.end, task.number)).number]
    while True:
        before = [number for number in tasks[path[0]].after if tasks[number].tasks and number not in path]
        if not before:
            return path
        path.insert(0, max(before, key=lambda number: (tasks[number].end, number)))


Found = tuple[list[TaskTime], list[str], list[str], list[int], list[tuple[int, ...]]]


def _of_cpu(step: CpuStep) -> Found:
    launches = step.tasks.launches
    nodes = [step.nodes[one.program] if 0 <= one.program < len(step.nodes) else "" for one in launches]
    sizes = [sum(high - low for low, high, _ in one.extents) for one in launches]
    return list(step.tasks.times), list(step.tasks.titles), nodes, sizes, list(step.tasks.waits)


def _of_kernel(step: PersistentStep) -> Found:
    stamps = step.stamps()
    instances = [(loop, iteration, op) for loop in step.step.loops for iteration in range(loop.count) for op in loop.ops]
    titles = [title for _, title in step.instance_titles()]
    place = {(id(loop), iteration, op.number): number for number, (loop, iteration, op) in enumerate(instances)}
    home = {op.number: loop for loop in step.step.loops for op in loop.ops}
    groups = {group.number: group for group in step.tasks}
    times: list[TaskTime] = []
    if stamps is not None:
        for block in range(step.blocks):
            times += [TaskTime(block, number, titles[number], int(row[0]), int(row[1]), int(row[2])) for number, row in enumerate(stamps[block]) if row[2]]
    after = [_before(loop, iteration, loop.first[op.number] if iteration == 0 else loop.rest[op.number], home, place) for loop, iteration, op in instances]
    return times, titles, [groups[op.number].nodes for _, _, op in instances], [groups[op.number].bytes for _, _, op in instances], after


def _before(loop: TaskLoop, iteration: int, waits: Sequence[OpWait], home: dict[int, TaskLoop], place: dict[tuple[int, int, int], int]) -> tuple[int, ...]:
    """The kernels that one of an iteration waits for, in this step."""
    found: set[int] = set()
    for wait in waits:
        other = home[wait.op]
        if wait.which == "same":
            found.add(place[id(other), iteration if other is loop else other.count - 1, wait.op])
        elif wait.which == "previous" and iteration:
            found.add(place[id(other), iteration - 1, wait.op])
        elif wait.which == "all":
            found.add(place[id(other), other.count - 1, wait.op])
    return tuple(sorted(found))
