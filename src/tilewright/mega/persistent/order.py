"""Which op waits for which, and the proof that it is enough.

In: a `StepPlan`. Out: the waits of each op in the first iteration of its loop and in the others. An op depends on another where one writes what the other
touches; a counter is something that its op writes, so that no block runs ahead into the next iteration of an op that others have not finished. A block that
waits for an op knows, by counters with release and acquire, of all that the op's blocks had waited for, too. Waits that follow from others are left out: of
what is left, none can be removed.

`check` is the proof. It uses nothing of the planner but the waits: it walks every op of two steps in the order in which every block walks them, and follows
what each knows to have ended. Two steps show all there is between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilewright.base.errors import UserError
from tilewright.mega.persistent.records import Instance, MemoryRegion, OpWait, PersistentOp, StepPlan, TaskLoop

_FEW = 4
"""Iterations of a loop in which all ways to depend on each other come up."""
_SAFE = 1 << 30
"""Arrivals by which a counter may be behind or ahead of what somebody waits for, at most: counters are compared modulo 2^32."""


def _touched(loop: TaskLoop, op: PersistentOp, iteration: int) -> list[tuple[MemoryRegion, bool]]:
    """What an op touches in an iteration, and whether it writes it."""
    slots = loop.slots[iteration][op.position]
    found = [(slots[name].region, name in op.writes) for name in sorted(op.reads | op.writes) if not slots[name].constant]
    return [*found, (MemoryRegion(f"counter {op.number}"), True)]


class Dependencies:
    """Of each op of each iteration: those that must have ended before it begins."""

    def __init__(self, step: StepPlan, most: int = 0) -> None:
        self.instances = list(step.instances(2 if step.many else 1, most))
        self.needed: dict[Instance, set[Instance]] = {}
        by_space: dict[str, list[tuple[MemoryRegion, bool, Instance]]] = {}
        ops = {op.number: op for op in step.ops}
        for instance in self.instances:
            loop = step.loops[instance.loop]
            needed = self.needed[instance] = set()
            mine = _touched(loop, ops[instance.op], instance.iteration)
            for region, writes in mine:
                live = by_space.setdefault(region.space, [])
                kept: list[tuple[MemoryRegion, bool, Instance]] = []
                for other, wrote, who in live:
                    clashes = (writes or wrote) and who != instance and region.overlaps(other)
                    if clashes:
                        needed.add(who)
                    # What is written over counts no more: who comes later depends on us.
                    if not (clashes and writes and region.covers(other)):
                        kept.append((other, wrote, who))
                live[:] = kept
            for region, writes in mine:
                by_space[region.space].append((region, writes, instance))


def relation(step: StepPlan, before: Instance, after: Instance) -> OpWait:
    """The wait that makes sure of a dependency, or of more."""
    if before.step != after.step:
        return OpWait(before.op, "last_step")
    if before.loop != after.loop:
        return OpWait(before.op, "all")
    return OpWait(before.op, "same" if before.iteration == after.iteration else "previous")


def plan_waits(step: StepPlan) -> None:
    """Give each op its waits. Where the first iterations of a loop do not show all of them, all iterations are looked at."""
    _plan(step, _FEW)
    if any(loop.count > _FEW for loop in step.loops) and _Proof(step, Dependencies(step)).missing() is not None:
        _plan(step, 0)
    check(step)


def _plan(step: StepPlan, most: int) -> None:
    few = Dependencies(step, most)
    for loop in step.loops:
        loop.first = {op.number: [] for op in loop.ops}
        loop.rest = {op.number: [] for op in loop.ops}
    proof = _Proof(step, few)
    ended: dict[Instance, int] = {}
    for after in few.instances:
        loop = step.loops[after.loop]
        waits = (loop.first if after.iteration == 0 else loop.rest)[after.op]
        known = proof.known(after, waits, ended)
        # What ended last is asked for first: the others follow from it, if from anything.
        for before in sorted(few.needed[after], key=proof.number.__getitem__, reverse=True):
            if not known & proof.bit[before]:
                waits.append(relation(step, before, after))
                known = proof.known(after, waits, ended)
        ended[after] = known
    for loop in step.loops:
        for lists in (loop.first, loop.rest):
            for number in lists:
                for wait in list(lists[number]) if len(lists[number]) > 1 else ():
                    kept, lists[number] = lists[number], [w for w in lists[number] if w != wait]
                    if proof.missing() is not None:
                        lists[number] = kept


def check(step: StepPlan, blocks: int = 0) -> None:
    """Raise where an op could begin before one that it depends on has ended, where a wait could last for ever, or where a counter is too small."""
    problem = _Proof(step, Dependencies(step)).missing()
    if problem is not None:
        raise UserError.at("TW016", problem)
    for loop in step.loops:
        for op in loop.ops:
            if op.tasks * max(1, loop.count) >= _SAFE or blocks * max(1, loop.count) >= _SAFE:
                raise UserError.at("TW016", f"op '{op.title}' of {', '.join(loop.titles)} counts {op.tasks} tasks in {loop.count} iterations: its counter could not be told from an older one")


class _Proof:
    """Walks a step's ops and says what is not ordered."""

    def __init__(self, step: StepPlan, dependencies: Dependencies) -> None:
        self.step, self.dependencies = step, dependencies
        self.bit = {instance: 1 << n for n, instance in enumerate(dependencies.instances)}
        self.number = {instance: n for n, instance in enumerate(dependencies.instances)}
        self.counts = {n: max((i.iteration for i in dependencies.instances if i.loop == n), default=0) + 1 for n in range(len(step.loops))}
        self.loop_of = {op.number: n for n, loop in enumerate(step.loops) for op in loop.ops}
        self.title = {op.number: f"'{op.title}' of {loop.titles[op.position]}" for loop in step.loops for op in loop.ops}

    def missing(self) -> str | None:
        """The first dependency that no wait makes sure of; None where there is none."""
        ended: dict[Instance, int] = {}
        for instance in self.dependencies.instances:
            loop = self.step.loops[instance.loop]
            waits = (loop.first if instance.iteration == 0 else loop.rest)[instance.op]
            for wait in waits:
                if any(before not in self.bit or self.number[before] >= self.number[instance] for before in self.waited(instance, wait)):
                    return f"op {self.title[instance.op]} waits for {self.title[wait.op]}, which comes after it: it would wait for ever"
            ended[instance] = known = self.known(instance, waits, ended)
            for before in self.dependencies.needed[instance]:
                if not known & self.bit[before]:
                    return (
                        f"op {self.title[instance.op]} (iteration {instance.iteration}) depends on {self.title[before.op]} (iteration {before.iteration}"
                        f"{', of the step before' if before.step != instance.step else ''}), and no wait makes sure that it has ended"
                    )
        return None

    def known(self, instance: Instance, waits: Iterable[OpWait], ended: Mapping[Instance, int]) -> int:
        """What an op knows to have ended after its waits, a bit for each."""
        found = 0
        for wait in waits:
            for before in self.waited(instance, wait):
                found |= self.bit[before] | ended[before]
        return found

    def waited(self, instance: Instance, wait: OpWait) -> Iterable[Instance]:
        """What has ended when a wait is over. The counter of an op shows only the last iteration that is asked for."""
        loop = self.loop_of[wait.op]
        last = self.counts[loop] - 1
        if wait.which == "same":
            return [Instance(instance.step, loop, instance.iteration, wait.op)]
        if wait.which == "previous":
            return [Instance(instance.step, loop, instance.iteration - 1, wait.op)]
        if wait.which == "all":
            return [Instance(instance.step, loop, last, wait.op)]
        return [Instance(instance.step - 1, loop, last, wait.op)] if instance.step else []


def wait_count(step: StepPlan) -> int:
    """Waits that a block comes by in a step."""
    return sum(len(w) for loop in step.loops for w in loop.first.values()) + sum(len(w) * (loop.count - 1) for loop in step.loops for w in loop.rest.values())


Waits = Mapping[int, list[OpWait]]
