"""Races and divergent barriers of an explicit kernel that its text alone shows.

In: a thread-stage kernel as its author wrote it. Out: nothing, or the `UserError` (TW051) for the first fault that every block which comes
there has. The kernel is walked once for all threads of a block, with what each of them holds (`thread_values.py`): loops whose rounds are
known are walked round by round, others for one round. What depends on numbers of the call is left to the emulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tilewright.analysis.thread_values import (
    UNKNOWN,
    Array,
    Terms,
    ThreadValue,
    choose,
    computed,
    joined,
    key_of,
    shared_unknown,
)
from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.types import Scalar, Tensor

_BARRIERS = frozenset({"barrier", "barrier_reduce", "grid_barrier"})
_LOCKS = ("atomic", "mbarrier", "bulk", "tma")
"""How the names of ops begin with which threads may order themselves one by one."""
_NO_ORDER = frozenset({"shuffle", "vote", "match", "redux", "active_mask", "clock", "global_timer", "nanosleep"})
_MOST_OPS = 1500
"""Ops that are walked beyond the first round of loops."""

_MOST_ACCESSES = 64
"""Accesses since a barrier that later ones are held against."""
_MOST_PAIRS = 400
"""Pairs of accesses that are looked at."""


@dataclass(frozen=True, eq=False)
class _BlockAccess:
    """An access of one element by some threads."""

    op: Op
    place: tuple[Terms, ...]
    indices: tuple[Array, ...]
    active: Array
    value: ThreadValue
    """Of a store."""

    @cached_property
    def keys(self) -> Array:
        """A number for the element of each thread; different elements may have the same."""
        return joined(self.indices)

    @cached_property
    def known(self) -> Array:
        """The numbers of the threads that come here, each once, in order."""
        return np.unique(self.keys[self.active])

    @property
    def apart(self) -> bool:
        """Whether each thread has an element of its own."""
        return len(self.known) == int(self.active.sum())

    @cached_property
    def threads(self) -> dict[tuple[int, ...], list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for thread in np.flatnonzero(self.active).tolist():
            found.setdefault(tuple(int(i[thread]) for i in self.indices), []).append(thread)
        return found


@dataclass(frozen=True, eq=False)
class _BlockWay:
    """How threads came to a block of ops."""

    active: Array
    """Those that can come, by the conditions that are known."""
    certain: bool = True
    """Whether all conditions around are known, or the same for all threads."""
    parted: Op | None = None
    """The op at which some threads went another way."""
    uneven: tuple[Op, Array] | None = None
    """The loop whose every round comes here, with the different rounds of the threads."""


def check_threads(kernel: Kernel) -> None:
    """Raise the `UserError` of a fault that is certain."""
    if kernel.threads > 1 and any(op.opcode in _BARRIERS or op.opcode == "store" for op in walk(kernel.body)):
        _FaultWalk(kernel).run()


class _FaultWalk:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.threads = kernel, kernel.threads
        self.values: dict[Value, ThreadValue] = {}
        self.accesses: list[_BlockAccess] = []
        """Those since the last barrier."""
        self.ordered = False
        """Whether threads may have ordered themselves by atomics."""
        self.left, self.pairs = _MOST_OPS, _MOST_PAIRS
        written = {v for op in walk(kernel.body) if OPS[op.opcode].effect not in ("pure", "read") for v in op.operands}
        self.constant = {p for p in kernel.tensors if p not in written}

    def run(self) -> None:
        for param in self.kernel.params:
            if isinstance(param.type, Scalar):
                self.values[param] = shared_unknown(param, self.threads)
        self.block(self.kernel.body, _BlockWay(np.ones(self.threads, np.bool_)))

    def get(self, value: Value) -> ThreadValue:
        return self.values.get(value, UNKNOWN)

    def set(self, targets: Sequence[Value], values: Iterable[ThreadValue]) -> None:
        self.values.update(zip(targets, values, strict=True))

    def forget(self, targets: Sequence[Value]) -> None:
        self.set(targets, [UNKNOWN] * len(targets))

    # -- ops ------------------------------------------------------------------------------------------------------

    def block(self, block: Block, way: _BlockWay) -> tuple[ThreadValue, ...]:
        """Walk the ops; gives what the block hands out."""
        for op in block.ops:
            self.left -= 1
            if op.opcode == "yield":
                continue
            if op.regions:
                {"if": self.branch, "for": self.counted, "while": self.repeated}.get(op.opcode, self.other)(op, way)
            else:
                self.plain(op, way)
        return tuple(self.get(v) for v in block.yields)

    def plain(self, op: Op, way: _BlockWay) -> None:
        if op.opcode in _BARRIERS:
            self.barrier(op, way)
        elif op.opcode.startswith(_LOCKS):
            self.ordered = True
        elif op.opcode in ("load", "store"):
            self.access(op, way)
        elif OPS[op.opcode].effect == "sync" and op.opcode not in _NO_ORDER:
            self.accesses.clear()
        if op.opcode == "load":
            self.values[op.result] = self.loaded(op)
        elif len(op.results) == 1:
            self.values[op.result] = computed(op, [self.get(v) for v in op.operands], self.threads)
        else:
            self.forget(op.results)

    def loaded(self, op: Op) -> ThreadValue:
        tensor, *indices = op.operands
        found = [self.get(v).parts for v in indices]
        if tensor not in self.constant or "width" in op.attrs or not found or any(f is None for f in found):
            return UNKNOWN
        if all(self.get(v).uniform for v in indices):
            return shared_unknown(("load", tensor, *(key_of(self.get(v)) for v in indices)), self.threads)
        return ThreadValue(data=joined([f for f in found if f is not None]))

    def other(self, op: Op, way: _BlockWay) -> None:
        """An op of which nothing is known."""
        self.forget([v for inner in walk(Block((), (op,))) for v in inner.results])
        self.accesses.clear()

    # -- ways -----------------------------------------------------------------------------------------------------

    def branch(self, op: Op, way: _BlockWay) -> None:
        condition = self.get(op.operands[0])
        mask, then, other = condition.exact, op.regions[0], op.regions[1]
        before = list(self.accesses)
        if mask is None:
            inner = replace(way, certain=way.certain and condition.uniform, uneven=None)
            handed = [self.block(then, inner)]
            self.accesses = list(before)
            handed.append(self.block(other, inner))
            self.set(op.results, (a if a is b else UNKNOWN for a, b in zip(*handed, strict=True)))
            self.accesses = before
        else:
            mask = mask.astype(np.bool_)
            handed = [self.side(op, then, way, mask), self.side(op, other, way, ~mask)]
            self.set(op.results, (choose(mask, a, b) for a, b in zip(*handed, strict=True)))
        if _waits(op):
            self.accesses.clear()

    def side(self, op: Op, block: Block, way: _BlockWay, mask: Array) -> tuple[ThreadValue, ...]:
        active = way.active & mask
        if not active.any():
            return tuple(UNKNOWN for _ in block.yields)
        parted = way.parted if (active == way.active).all() else op
        return self.block(block, _BlockWay(active, way.certain, parted))

    def counted(self, op: Op, way: _BlockWay) -> None:
        """A `for`."""
        body, way = op.regions[0], replace(way, uneven=None)
        low, high, step = (self.get(v) for v in op.operands[:3])
        carried = [self.get(v) for v in op.operands[3:]]
        self.enter(op)
        rounds = _rounds(low, high, step)
        if rounds is None:
            certain = way.certain and low.uniform and high.uniform and step.uniform
            self.one_round(op, replace(way, certain=certain), [low, *carried])
            return
        at = low
        most, least = int(rounds[way.active].max()), int(rounds[way.active].min())
        if most != least:
            active = way.active & (rounds > 0)
            first = _BlockWay(active, way.certain, way.parted if least else op, (op, rounds) if least else None)
            self.one_round(op, first, [low, *carried])
            return
        for _ in range(most):
            self.set(body.args, [at, *carried])
            carried = list(self.block(body, way))
            assert at.parts is not None and step.parts is not None
            at = ThreadValue(at.parts + step.parts, at.base)
            if self.left < 0:
                self.leave(op)
                return
        self.set(op.results, carried)

    def repeated(self, op: Op, way: _BlockWay) -> None:
        """A `while`."""
        (test, body), way = op.regions, replace(way, uneven=None)
        carried = [self.get(v) for v in op.operands]
        self.enter(op)
        while True:
            self.set(test.args, carried)
            condition, *handed = self.block(test, way)
            mask = condition.exact
            if mask is None:
                self.one_round(op, replace(way, certain=way.certain and condition.uniform), handed)
                return
            active = way.active & mask.astype(np.bool_)
            if not active.any():
                self.set(op.results, handed)
                return
            if not (active == way.active).all():
                self.one_round(op, _BlockWay(active, way.certain, op), handed)
                return
            self.set(body.args, handed)
            carried = list(self.block(body, way))
            if self.left < 0:
                self.leave(op)
                return

    def one_round(self, op: Op, way: _BlockWay, values: Sequence[ThreadValue]) -> None:
        """Walk a loop's body one time; how often it runs is not known."""
        before = list(self.accesses)
        self.set(op.regions[-1].args, values)
        self.block(op.regions[-1], way)
        self.accesses = before
        self.leave(op)

    def enter(self, op: Op) -> None:
        self.ordered |= any(inner.opcode.startswith(_LOCKS) for inner in walk(Block((), (op,))))

    def leave(self, op: Op) -> None:
        self.forget(op.results)
        if _waits(op):
            self.accesses.clear()

    # -- faults ---------------------------------------------------------------------------------------------------

    def barrier(self, op: Op, way: _BlockWay) -> None:
        here = int(way.active.sum())
        if here < self.threads and way.parted is not None:
            what = "left the loop" if way.parted.opcode in ("for", "while") else "went the other way at the `if`"
            others = np.flatnonzero(~way.active)
            raise _fault(
                f"divergent barrier: only {here} of {self.threads} threads of a block come here: {_named(others)} {what} at {way.parted.span.place()}",
                op.span, "put the barrier where all threads of the block come: outside the condition or the loop",
            )  # fmt: skip
        if way.uneven is not None:
            loop, rounds = way.uneven
            few, many = int(rounds.argmin()), int(rounds.argmax())
            raise _fault(
                f"divergent barrier: the loop at {loop.span.place()} has {rounds[few]} round(s) in thread {few} and {rounds[many]} in thread {many}",
                op.span, "let all threads run the same number of rounds, or put the barrier outside the loop",
            )  # fmt: skip
        self.accesses.clear()

    def access(self, op: Op, way: _BlockWay) -> None:
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor)
        count = 1 + tensor.rank + (op.opcode == "store")
        plain = len(op.operands) == count and (op.opcode == "load" or isinstance(op.operands[-1].type, Scalar))
        if self.ordered or not way.certain or not plain or "width" in op.attrs or tensor.space not in ("global", "shared"):
            return
        indices = [self.get(v) for v in op.operands[1 : 1 + tensor.rank]]
        parts = tuple(i.parts for i in indices if i.parts is not None)
        if len(parts) < tensor.rank:
            return
        value = self.get(op.operands[-1]) if op.opcode == "store" else UNKNOWN
        found = _BlockAccess(op, tuple(i.base for i in indices), parts, way.active, value)
        if op.opcode == "store":
            self.alone(found)
        for earlier in self.accesses:
            if self.pairs > 0 and earlier.op.operands[0] is op.operands[0] and earlier.place == found.place:
                self.pair(earlier, found)
        self.accesses = [*self.accesses[-_MOST_ACCESSES:], found]

    def alone(self, store: _BlockAccess) -> None:
        """Do two threads store different values to one element by the same statement?"""
        told = store.value.parts if store.value.parts is not None else store.value.data
        if told is None or store.apart:
            return
        for element, threads in store.threads.items():
            for thread in threads[1:]:
                if told[thread] != told[threads[0]]:
                    raise _fault(
                        f"race on {_space(store.op)} memory: threads {threads[0]} and {thread} of a block both store to {_element(store, element)}, each a value "
                        "of its own",
                        store.op.span, "give each thread its own element, let one thread store, or use an atomic such as tw.atomic_add",
                    )  # fmt: skip

    def pair(self, earlier: _BlockAccess, later: _BlockAccess) -> None:
        """Does a thread access what another one accesses, with no barrier between the two?"""
        stores = [a.op.opcode == "store" for a in (earlier, later)]
        if not any(stores):
            return
        self.pairs -= 1
        at = np.minimum(np.searchsorted(earlier.known, later.keys), len(earlier.known) - 1)
        met = later.active & (earlier.known[at] == later.keys)
        if earlier.apart:
            met &= ~earlier.active | (earlier.keys != later.keys)
        if not met.any():
            return
        before = earlier.threads
        for element, threads in later.threads.items():
            for thread in threads:
                for other in before.get(element, ()):
                    if other != thread and self.matters(earlier, later, other, thread, before[element]):
                        words = ["stores" if s else "loads" for s in stores]
                        raise _fault(
                            f"race on {_space(later.op)} memory: thread {thread} {words[1]} {_element(later, element)}, which thread {other} of its block {words[0]} "
                            f"at {earlier.op.span.place()}, with no barrier between the two",
                            later.op.span, "put tw.gpu_sync() between the two accesses",
                        )  # fmt: skip

    def matters(self, earlier: _BlockAccess, later: _BlockAccess, other: int, thread: int, threads: list[int]) -> bool:
        """Whether the order of the two makes a difference."""
        if later.op.opcode == "load":
            # A thread that stored there itself may well read its own value: `alone` says where that one differs.
            return thread not in threads
        if earlier.op.opcode == "load":
            return True
        one, two = earlier.value.exact, later.value.exact
        return one is not None and two is not None and bool(one[other] != two[thread])


def _rounds(low: ThreadValue, high: ThreadValue, step: ThreadValue) -> Array | None:
    """How often each thread runs a `for`."""
    if low.parts is None or high.parts is None or step.exact is None or low.base != high.base or not (step.exact != 0).all():
        return None
    return np.asarray(np.maximum(0, -((low.parts - high.parts) // step.exact)))


def _waits(op: Op) -> bool:
    return any(OPS[inner.opcode].effect == "sync" and inner.opcode not in _NO_ORDER for inner in walk(Block((), (op,))))


def _space(op: Op) -> str:
    tensor = op.operands[0].type
    assert isinstance(tensor, Tensor)
    return tensor.space


def _element(access: _BlockAccess, element: tuple[int, ...]) -> str:
    name = access.op.operands[0].name
    if any(access.place):
        return f"the same element of '{name}'"
    return f"'{name}'[{', '.join(map(str, element))}]"


def _named(threads: Array) -> str:
    first, last = int(threads[0]), int(threads[-1])
    if first == last:
        return f"thread {first}"
    return f"threads {first}-{last}" if last - first + 1 == len(threads) else f"{len(threads)} threads, {first} the first,"


def _fault(message: str, span: Span, help: str) -> UserError:
    error = UserError.at("TW051", message, span, help)
    assert isinstance(error, UserError)
    return error
