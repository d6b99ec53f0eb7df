"""Conditions at the borders of rows, which hold everywhere else: CPUs do the middle of a row without them, in vectors.

In: a loop-stage kernel and the parallel index along which vectors lie. Out: `Borders`, which comparisons, clamps and wrapped indices are known in the
middle, and from where to where that is. What they say depends on that index, the indices of sums of known length, and sizes; or on other indices, and
then a row is asked once whether it is one of the inner rows:

    if i >= 1 and j >= 1 and j < w - 1 { … }      the middle: 1 <= j < w - 1; an inner row: i >= 1
    x[max(j - 1, 0)]                              the middle: 1 <= j, where it is x[j - 1]

A condition that splits rows in the middle (`j < i`) is none of these: the borders of a row are as good as constant, and near its ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.affine import Affine, Forms
from tilewright.analysis.ranges import surely_not_negative
from tilewright.base.dtypes import bool_
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import INDEX, dtype_of
from tilewright.passes.common.combine import identities

WIDEST = 64
"""Elements of a border, at most."""
_TRIAL = 1021
"""The least of the sizes for which borders are looked at where they are not constants."""


@record
class MiddleValue:
    """What an op is in the middle: a truth, or its first operand plus `shift`."""

    truth: bool | None = None
    shift: Size = ZERO
    operand: int = 0


@record
class _BorderNeed:
    """`factor * index + rest >= 0`, in the middle of a row; `form` is all of it, for indices of rows. `worst` has the indices of sums at their worst."""

    form: Affine
    worst: Affine


class Borders:
    """What is known in the middle of a row, and in the middle of inner rows."""

    def __init__(self, kernel: Kernel, parallel: Op, forms: Forms, axis: int) -> None:
        self.forms, self.region = forms, parallel.regions[0]
        self.index = self.region.args[axis]
        self.extents = {arg: forms[v].constant for v, arg in zip(parallel.operands, self.region.args, strict=True) if not forms[v].factors}
        self.short: dict[Value, int] = {}
        """Indices of sums, and how long these are."""
        for op in walk(self.region):
            if op.opcode == "reduce":
                for extent, arg in zip(op.operands, op.regions[0].args, strict=True):
                    turns = forms[extent].constant.constant if extent in forms and not forms[extent].factors else None
                    if turns is not None and turns > 0:
                        self.short[arg] = turns
        self.along: dict[int, MiddleValue] = {}
        self.inner: dict[int, MiddleValue] = {}
        """What holds in the middle of a row, and in the middle of inner rows, by the identity of ops."""
        self.bounds: dict[int, _BorderNeed] = {}
        """Comparisons that bound the index of a sum, each as a need that is the comparison itself."""
        self._needs: list[tuple[_BorderNeed, bool]] = []
        for op in walk(self.region):
            self._visit(op)

    @property
    def any(self) -> bool:
        return bool(self.along)

    # -- what ops need ------------------------------------------------------------------------------------------------

    def _visit(self, op: Op) -> None:
        if op.opcode in ("lt", "le", "gt", "ge", "eq", "ne"):
            self._comparison(op)
        elif op.opcode in ("min", "max", "mod") and op.results[0].type == INDEX and all(v in self.forms for v in op.operands):
            self._clamp(op)

    def _comparison(self, op: Op) -> None:
        if any(v not in self.forms or v.type != INDEX for v in op.operands):
            return
        left, right = (self.forms[v] for v in op.operands)
        difference = left.minus(right)
        if op.opcode in ("eq", "ne"):
            # Never equal in the middle: beyond the one side, or before the other.
            for need in (_less(difference.times(-ONE)), _less(difference)):
                if self._accept(op, (need,), MiddleValue(truth=op.opcode == "ne")):
                    return
            return
        holds = {"lt": _less(difference), "le": difference.times(-ONE), "gt": _less(difference.times(-ONE)), "ge": difference}[op.opcode]
        fails = _less(holds)
        for need, truth in ((holds, True), (fails, False)):
            if self._accept(op, (need,), MiddleValue(truth=truth)):
                if truth:
                    self.bounds[id(op)] = _BorderNeed(need, need)
                return

    def _clamp(self, op: Op) -> None:
        a, b = (self.forms[v] for v in op.operands)
        if op.opcode == "mod":
            if not b.factors and surely_not_negative(b.constant):
                for shift in (ZERO, b.constant, -b.constant):
                    # a - shift lies in 0..b
                    inside = Affine(a.factors, a.constant - shift)
                    if self._accept(op, (inside, _less(inside.minus(b))), MiddleValue(shift=-shift)):
                        return
            return
        first = b.minus(a) if op.opcode == "min" else a.minus(b)
        for need, operand in ((first, 0), (first.times(-ONE), 1)):
            if self._accept(op, (need,), MiddleValue(operand=operand)):
                return

    def _accept(self, op: Op, needs: tuple[Affine, ...], known: MiddleValue) -> bool:
        found = [self._need(need) for need in needs]
        if any(need is None for need in found):
            return False
        along = any(need is not None and need[1] for need in found)
        self._needs += [need for need in found if need is not None]
        (self.along if along else self.inner)[id(op)] = known
        return True

    def _need(self, form: Affine) -> tuple[_BorderNeed, bool] | None:
        """The need, and whether it speaks of the row's own index; None where it does not leave out borders only."""
        constant, factors = form.constant, []
        for value, factor in form.factors:
            number = factor.constant
            if value in self.short:
                if number is None:
                    return None
                constant = constant + min(0, number * (self.short[value] - 1))
            elif value in self.extents and number is not None:
                factors.append((value, factor))
            else:
                return None
        if len(factors) != 1:
            return None
        (value, factor), number = factors[0], factors[0][1].constant
        assert number is not None
        before = number > 0 and (surely_not_negative(constant) or (constant.constant is not None and -number * WIDEST <= constant.constant))
        after = number < 0 and constant.constant is None and _is_near(self.extents[value], constant, -number)
        if not (before or after):
            return None
        return _BorderNeed(form, Affine(((value, factor),), constant)), value is self.index

    # -- code ---------------------------------------------------------------------------------------------------------

    def middle(self, b: Builder, low: Value, high: Value) -> tuple[Value, Value]:
        """Where the middle of a row begins and ends, between `low` and `high`."""
        begin, end = low, high
        for need, along in self._needs:
            if not along:
                continue
            ((_, factor),) = need.worst.factors
            number, rest = factor.constant or 0, need.worst.constant
            if number > 0 and rest.constant is None:
                continue  # holds everywhere
            if number > 0:
                assert rest.constant is not None
                begin = b.op("max", begin, b.index(-(rest.constant // number)))
            else:
                limit = b.index(rest) if number == -1 else b.op("floordiv", b.index(rest), b.index(-number))
                end = b.op("min", end, b.add(limit, b.index(1)))
        begin = b.op("min", begin, high)
        return begin, b.op("max", begin, end)

    def is_inner(self, b: Builder, env: Mapping[Value, Value]) -> Value | None:
        """Whether a row is an inner one; None where all are."""
        found: Value | None = None
        seen: set[tuple[Value, str, str]] = set()
        for need, along in self._needs:
            if along:
                continue
            ((value, factor),) = need.worst.factors
            key = (value, str(factor), str(need.worst.constant))
            if key in seen:
                continue
            seen.add(key)
            here = b.add(b.mul(env[value], b.index(factor)), b.index(need.worst.constant))
            holds = b.op("ge", here, b.index(0))
            found = holds if found is None else b.logical_and(found, holds)
        return found

    def known(self, b: Builder, op: Op, env: Mapping[Value, Value], is_inner: bool) -> Value | None:
        """What an op comes to in the middle of a row."""
        known = self.along.get(id(op)) or (self.inner.get(id(op)) if is_inner else None)
        if known is None:
            return None
        if known.truth is not None:
            return b.const(known.truth, bool_)
        value = env[op.operands[known.operand]]
        return value if known.shift == ZERO else b.add(value, b.like(b.index(known.shift), value))

    def clipped(self, op: Op, made: Mapping[Value, Op], is_middle: bool) -> dict[int, Affine]:
        """Comparisons that only say where a sum ends, as what is not negative inside it, by their identities: what fails them adds nothing. In the middle
        of a row those of its index are known."""
        yielded = op.regions[0].yields
        guarded = made.get(yielded[0])
        if len(op.results) != 1 or guarded is None or guarded.opcode != "if" or guarded not in op.regions[0].ops or len(guarded.results) != 1:
            return {}
        nothing = made.get(guarded.regions[1].yields[0])
        kind = str(op.attrs["kind"])
        if nothing is None or nothing.opcode != "const" or nothing.attrs["value"] != identities(kind, [dtype_of(op.results[0].type)])[0]:
            return {}
        found: dict[int, Affine] = {}
        pending = [guarded.operands[0]]
        while pending:
            test = made.get(pending.pop())
            if test is not None and test.opcode == "and":
                pending += test.operands
            elif test is not None and id(test) in self.bounds and not (is_middle and id(test) in self.along):
                form = self.bounds[id(test)].form
                own = [v for v in form.values if v in op.regions[0].args]
                if len(own) == 1 and form.factor(own[0]).constant in (1, -1):
                    found[id(test)] = form
        return found


def _is_near(extent: Size, constant: Size, step: int) -> bool:
    """Whether `step * index <= constant` leaves out a few of `extent` only, as far as some sizes tell."""
    names = sorted(extent.names | constant.names)
    for order in (names, names[::-1]):
        sizes = {name: _TRIAL + 1000 * place for place, name in enumerate(order)}
        if extent.evaluate(sizes) - (constant.evaluate(sizes) // step + 1) > WIDEST:
            return False
    return True


def _less(form: Affine) -> Affine:
    """`form < 0` as what is not negative then."""
    opposite = form.times(-ONE)
    return Affine(opposite.factors, opposite.constant - 1)
