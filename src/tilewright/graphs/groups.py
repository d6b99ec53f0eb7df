"""Which calls of a plan become one program.

In: the calls of a graph, in order. Out: groups of neighbours. A function that is no kernel is alone, and so is what has to do with an array in place by
another view. A graph of more calls than are compiled together is cut: where calls repeat, as in the layers of a network, into the repetitions, which are
one program; elsewhere where the fewest values cross.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.graphs.lower import PlannedCall, PlannedValue, Ref

MOST_PARTS = 32
"""Calls that are compiled together."""


EACH = frozenset({"Add", "Sub", "Mul", "Div", "Silu", "Gelu", "Relu", "Sigmoid", "Tanh", "Exp", "Copy"})
"""Ops of single elements, which products compute of their sums."""


def group_calls(calls: Sequence[PlannedCall], fuse: bool) -> list[list[PlannedCall]]:
    """Calls that become one program each."""
    if not fuse:
        return [[call] for call in calls]
    found: list[list[PlannedCall]] = []
    cuts = {*_cuts(calls)} if len(calls) > MOST_PARTS else set()
    for number, call in enumerate(calls):
        alone = not found or number in cuts or not call.joins or not found[-1][0].joins or call.constant != found[-1][0].constant
        if alone or _conflict(found[-1], call) or _new_keys(found[-1], call):
            found.append([call])
        else:
            found[-1].append(call)
    return [part for group in found for part in _short(group)]


def _short(group: list[PlannedCall]) -> list[list[PlannedCall]]:
    """A group in parts that are short enough, cut where the fewest values cross."""
    found: list[list[PlannedCall]] = []
    while len(group) > MOST_PARTS:
        crossing = _crossing(group)
        at = min(range(MOST_PARTS // 2, MOST_PARTS + 1), key=lambda n: (crossing[n], -n))
        found.append(group[:at])
        group = group[at:]
    return [*found, group]


def _crossing(calls: Sequence[PlannedCall]) -> list[int]:
    """How many values are made before each call and read from it on."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, call in enumerate(calls):
        for value in call.arguments.values():
            if isinstance(value, Ref) and isinstance(value.root, PlannedValue):
                last[value.root.number] = number
        for value in call.values:
            made[value.number] = number
    counts = [0] * (len(calls) + 1)
    for value_number, end in last.items():
        for at in range(made.get(value_number, -1) + 1, end + 1):
            counts[at] += 1
    return counts


def _cuts(calls: Sequence[PlannedCall]) -> list[int]:
    """Where repetitions begin and end; nothing where calls do not repeat."""
    names: dict[object, int] = {}
    form = [names.setdefault(_form(call), len(names)) for call in calls]
    best = (0, 0, 0)
    """How many calls repeat, the length of a repetition (negative), and where they begin."""
    for period in range(2, len(form) // 2 + 1):
        run = 0
        for at in range(len(form) - period):
            run = run + 1 if form[at] == form[at + period] else 0
            if run >= period:
                whole = (run + period) // period * period
                best = max(best, (whole, -period, at + 1 - run), key=lambda b: (b[0], b[1]))
    covered, period, start = best[0], -best[1], best[2]
    if not covered:
        return []
    crossing = _crossing(calls)
    least = min(range(period), key=lambda t: (crossing[start + t], t))
    turn = min(range(period), key=lambda t: (not _ends_product(calls, start + period + t), crossing[start + t], (least - t) % period))
    cuts = list(range(start + turn, start + covered + 1, period))
    # What follows the last repetition may repeat it, too.
    while cuts[-1] + period <= len(form) and form[cuts[-1] : cuts[-1] + period] == form[cuts[-2] : cuts[-1]]:
        cuts.append(cuts[-1] + period)
    return cuts


def _ends_product(calls: Sequence[PlannedCall], at: int) -> bool:
    """Whether a product, and what is computed of its elements one by one, ends before a call that is no such thing: a norm then begins the next program, whose product computes it."""
    if calls[at].node.op in EACH:
        return False
    while at and calls[at - 1].node.op in EACH:
        at -= 1
    return at > 0 and calls[at - 1].node.op == "MulMat"


def _form(call: PlannedCall) -> tuple[object, ...]:
    """What calls of the same program have in common."""
    args: list[object] = []
    for value in call.arguments.values():
        if not isinstance(value, Ref):
            args.append(type(value))  # numbers are arguments of the program
        elif isinstance(value.root, PlannedValue):
            args.append((value.shape, value.dtype, value.places))
        elif isinstance(value.root, np.ndarray):
            args.append((id(value.root), value.shape))
        else:
            # Layers differ in the dtypes of their weights: the program is the same, its code is not.
            args.append((value.shape, value.dtype.is_packed or value.dtype, value.steps))
    return id(call.kernel), call.constant, tuple(args), tuple((v.shape, v.memory, v.dtype) for v in call.values)


def _new_keys(group: Sequence[PlannedCall], call: PlannedCall) -> bool:
    """Whether a call is attention over keys that the group makes, and no cache.

    Heads are then places in the rows of a product whose width is a size of the program, so that each access would be checked as it runs, and attention would not be
    recognised. Keys that come from another program are arrays with heads of their own.
    """
    keys = call.arguments.get("k")
    if call.node.op != "Attention" or not isinstance(keys, Ref) or not isinstance(keys.root, PlannedValue):
        return False
    return any(value.number == keys.root.number for other in group for value in other.values)


def _conflict(group: Sequence[PlannedCall], call: PlannedCall) -> bool:
    """Whether a call has to do with memory that the group writes, or writes what the group reads, by another view."""
    both = (*group, call)
    written = {v.root for c in both for n in c.written if isinstance(v := c.arguments[n], Ref) and isinstance(v.root, str)}
    views: dict[str, set[object]] = {}
    for other in both:
        for value in other.arguments.values():
            if isinstance(value, Ref) and isinstance(value.root, str) and value.root in written:
                views.setdefault(value.root, set()).add(value.key)
    return any(len(keys) > 1 for keys in views.values())
