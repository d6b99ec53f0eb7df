"""A maximum and the sum of exponentials below it, of rows that a cluster shares: its blocks meet once for both.

`find_meeting(kernel)` looks at a tile-stage kernel:

    m = max(x);  e = exp(x - m);  s = sum(e);  … e / s …  f(m, s) …

`ClusterMeeting` has each thread compute its exponentials below its own maximum m' and add them up to s', as soon as its part of the
row is there. Then threads meet: pairs (m', s') become the one of all, s = sum(s' exp(m' - m)), with one barrier of the
cluster where there were two. A thread's e are too large by exp(m - m'), so it divides them by s exp(m - m'); other uses of m
and s have the true ones. Only where few bits of the exponentials count (`narrow`): the factor is another rounding. Rows of
-inf only give NaN, as `-inf - -inf` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilewright.base.dtypes import bf16, f16, f32
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.ir.types import dtype_of
from tilewright.passes.common.registers import Held, Registers, shape_of
from tilewright.passes.to_thread.tile_reductions import TileReductions

LOWEST = -(2 - 2.0**-23) * 2.0**127
"""The lowest f32 that is finite."""


@record
class Found:
    peak: Op
    """The maximum."""
    peak_values: tuple[Value, ...]
    """It, and the scalars that are it."""
    total: Op
    total_values: tuple[Value, ...]
    quotients: frozenset[Op]
    """Divisions of exponentials by the sum."""


def find_meeting(kernel: Kernel) -> Found | None:
    """The first such pair, or None."""
    users: dict[Value, list[Op]] = {}
    for op in kernel.body.ops:
        for value in {*op.operands, *(v for region in op.regions for inner in region.ops for v in inner.operands)}:
            users.setdefault(value, []).append(op)
    places = {op: place for place, op in enumerate(kernel.body.ops)}
    constants = {op.results[0]: op.attrs["value"] for op in kernel.body.ops if op.opcode == "const"}
    for peak in kernel.body.ops:
        if peak.opcode == "reduce_tile" and peak.attrs["kind"] == "max" and dtype_of(peak.results[0].type) is f32:
            found = _below(peak, users, places, constants)
            if found is not None:
                return found
    return None


Users = dict[Value, list[Op]]


def _below(peak: Op, users: Users, places: dict[Op, int], constants: Mapping[Value, object]) -> Found | None:
    tops = _scalars(peak, "max", -math.inf, users, constants)
    if tops is None:
        return None
    wide = [op for op in users.get(tops[-1], []) if op.opcode == "broadcast"]
    exponentials: list[Op] = []
    for below in [op for b in wide for op in users.get(b.results[0], [])]:
        first, second = below.operands if below.opcode == "sub" else (None, None)
        if second is first or second not in {b.results[0] for b in wide}:
            return None
        exponentials += users.get(below.results[0], [])
    if len(exponentials) != 1 or exponentials[0].opcode != "exp" or "narrow" not in exponentials[0].attrs:
        return None
    power = exponentials[0]
    totals, quotients = [], []
    for op in users.get(power.results[0], []):
        if op.opcode == "select" and op.operands[1] is power.results[0] and _zeros(op.operands[2], users, constants):
            totals += users.get(op.results[0], [])
        elif op.opcode == "div" and op.operands[0] is power.results[0] and op.operands[1] is not power.results[0]:
            quotients.append(op)
        else:
            totals.append(op)
    if len(totals) != 1 or totals[0].opcode != "reduce_tile":
        return None
    if (totals[0].attrs["kind"], totals[0].attrs["axis"]) != ("add", peak.attrs["axis"]):
        return None
    sums = _scalars(totals[0], "add", 0.0, users, constants)
    if sums is None or any(places[op] < places[totals[0]] for op in users.get(tops[-1], []) if op not in wide):
        return None
    spread = {op.results[0] for op in users.get(sums[-1], []) if op.opcode == "broadcast"}
    divided = [op for value in spread for op in users.get(value, [])]
    if any(op not in quotients for op in divided) or any(op.operands[1] not in spread for op in quotients):
        return None
    return Found(peak, tops, totals[0], sums, frozenset(quotients))


def _scalars(reduced: Op, kind: str, neutral: float, users: Users, constants: Mapping[Value, object]) -> tuple[Value, ...] | None:
    """A reduction's result, its item, and that combined with what changes nothing."""
    values = [reduced.results[0]]
    for opcode in ("item", kind):
        using = users.get(values[-1], [])
        same = len(using) == 1 and using[0].opcode == kind and any(constants.get(v) == neutral for v in using[0].operands)
        if opcode == kind and not same:
            break
        if len(using) != 1 or using[0].opcode != opcode:
            return None
        values.append(using[0].results[0])
    return tuple(values)


def _zeros(value: Value, users: Users, constants: Mapping[Value, object]) -> bool:
    """Whether a tile holds nothing but zeros."""
    zeros = [source for source, number in constants.items() if number == 0.0]
    return any(op.opcode == "broadcast" and op.results[0] is value for source in zeros for op in users.get(source, []))


class ClusterMeeting:
    """One meeting, as its ops come along. `env`: what values are held as, for it to read and to write."""

    def __init__(self, found: Found, reductions: TileReductions, env: dict[Value, Held]) -> None:
        self.found, self.reductions, self.env = found, reductions, env
        self.own: Value | None = None
        """This thread's maximum."""
        self.local: Value | None = None
        """The sum in this thread's units."""

    def lower(self, b: Builder, op: Op) -> bool:
        """Lower the op, if it is one of the meeting's."""
        if op is self.found.peak:
            self._peak(b, op)
        elif op is self.found.total:
            self._total(b, op)
        else:
            return False
        return True

    def divisor(self, op: Op) -> Value | None:
        """What a quotient is divided by in this thread, where the op is one of the meeting's."""
        return self.local if op in self.found.quotients else None

    def _peak(self, b: Builder, op: Op) -> None:
        cell, own = self.reductions.own_part(b, op, self.env[op.operands[0]])
        # Not -inf, so that what is below it is a number; of -inf and what lies outside nothing is left all the same.
        self.own = b.op("max", own, b.const(LOWEST, f32))
        self.env[op.results[0]] = Registers(shape_of(op.results[0]), {cell: self.own})

    def _total(self, b: Builder, op: Op) -> None:
        assert self.own is not None
        cell, own = self.reductions.own_part(b, op, self.env[op.operands[0]])
        top = self.reductions.across_lanes(b, "max", self.own)
        part = self.reductions.across_lanes(b, "add", b.mul(own, self._shrink(b, self.own, top)))
        pairs = self.reductions.exchanged_pairs(b, (top, part))
        most = pairs[0][0]
        for other, _ in pairs[1:]:
            most = b.op("max", most, other)
        total: Value | None = None
        for other, amount in pairs:
            term = b.mul(amount, self._shrink(b, other, most))
            total = term if total is None else b.add(total, term)
        assert total is not None
        top = self.reductions.across_warps_read(b, "max", most)
        total = self.reductions.across_warps_read(b, "add", b.mul(total, self._shrink(b, most, top)))
        self.local = b.emit("div", [total, self._shrink(b, self.own, top)], {"narrow": f16})[0]
        # The maximum itself adds 1: a sum of 0 is one of nothing but -inf. From here on sum and maximum are those of all.
        empty = b.op("eq", total, b.const(0.0, f32))
        self.env[op.results[0]] = Registers(shape_of(op.results[0]), {cell: b.select(empty, b.const(math.nan, f32), total)})
        top = b.select(empty, b.const(-math.inf, f32), top)
        self.env[self.found.peak.results[0]] = Registers(shape_of(self.found.peak.results[0]), {cell: top})
        self.env.update(dict.fromkeys(self.found.peak_values[1:], top))

    @staticmethod
    def _shrink(b: Builder, value: Value, top: Value) -> Value:
        return b.emit("exp", [b.sub(value, top)], {"narrow": bf16})[0]
