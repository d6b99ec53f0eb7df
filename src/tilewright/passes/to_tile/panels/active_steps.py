"""Steps of a contraction's sum that count for a panel of pixels, where others read nothing but the frame around an image: those are left out.

In: a kernel that reads an image from a copy with a frame of zeros, under the condition that the frame stands for (`pad_windows.py` marks the load as `framed`). Out: the kernel
without the condition; and tile-stage ops that find the steps for which the condition can hold in a panel. Pixels that are columns have them one by one, those that are rows as runs:

    steps[0, 0..count] = 0, 1, 2, …            ; all of a stretch: panels inside of the image
    steps[1, 0..fewer] = those that count      ; panels at a border, with the places in `places` beside them

    runs[0, 0..number] = first steps           ; one run for panels inside of the image
    runs[1, 0..number] = behind the last ones

A condition is a list of affine forms, none of which may be less than 0. What pixels add to a form is largest at one end of a panel, so a step counts where that, and what the step adds, is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.affine import Affine, analyse
from tilewright.analysis.contraction import Contraction
from tilewright.base.dtypes import i64
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import eliminate_dead
from tilewright.passes.to_tile.panels.steps import local_array
from tilewright.passes.windows.guards import guard_tests


def without_frames(kernel: Kernel) -> tuple[Kernel, tuple[Affine, ...]]:
    """The kernel without the condition around a framed load, and the forms of that condition; none where it says something else as well."""
    guarded = next((op for op in walk(kernel.body) if op.opcode == "if" and len(op.results) == 1 and any(inner.attrs.get("framed") for inner in op.regions[0].ops)), None)
    if guarded is None:
        return kernel, ()
    made = {result: op for op in walk(kernel.body) for result in op.results}
    tests = guard_tests(guarded.operands[0], made, analyse(kernel))
    forms = tuple(test.form for test in tests if test.form is not None and not test.divisor)
    mapping: dict[Value, Value] = {}

    def block(old: Block) -> Block:
        ops: list[Op] = []
        for op in old.ops:
            if op is guarded:
                inner = op.regions[0]
                ops += inner.ops[:-1]
                mapping[op.results[0]] = inner.yields[0]
                continue
            operands, regions = tuple(mapping.get(v, v) for v in op.operands), tuple(block(r) for r in op.regions)
            ops.append(replace(op, operands=operands, regions=regions) if regions or operands != op.operands else op)
        return Block(old.args, tuple(ops))

    plain = eliminate_dead(replace(kernel, body=block(kernel.body)))
    return plain, forms if len(forms) == len(tests) else ()


def steps_left_out(forms: Sequence[Affine], found: Contraction, pixels: Sequence[int]) -> tuple[Affine, ...]:
    """The forms that decide about steps of the sum; none where some speak of anything but pixels and steps, or by how much is not a number."""
    indices = {*(found.indices[p] for p in pixels), *found.k}
    if any(value not in indices or factor.constant is None for form in forms for value, factor in form.factors):
        return ()
    return tuple(form for form in forms if any(k in form.values for k in found.k))


Digits = Sequence[tuple[Value, Size]]
"""The indices that make up a pixel's number, outermost first, and how many values each has."""


Ends = tuple[Sequence[Value], Sequence[Value]]
"""The indices of the first and the last pixel of a panel."""


def _most(b: Builder, forms: Sequence[Affine], pixels: Digits, ends: Ends) -> list[Value]:
    """What the pixels of a panel, and the constant, come to at most in each form."""
    zero = b.index(0)
    bounds: dict[Value, tuple[Value, Value]] = {}
    together: Value | None = None
    for (index, extent), low, high in zip(pixels, *ends, strict=True):
        if together is not None:
            low, high = b.select(together, low, zero), b.select(together, high, b.index(extent - 1))
        bounds[index] = low, high
        same = b.op("eq", low, high)
        together = same if together is None else b.logical_and(together, same)
    found: list[Value] = []
    for form in forms:
        total = b.index(form.constant)
        for index, factor in form.factors:
            if index in bounds:
                number = factor.constant
                assert number is not None
                total = b.add(total, b.mul(bounds[index][number > 0], b.index(number)))
        found.append(total)
    return found


def _all_count(b: Builder, forms: Sequence[Affine], found: Contraction, most: Sequence[Value]) -> Value:
    """Whether all steps count, for these sums of pixels and constants."""
    every: Value | None = None
    for form, reach in zip(forms, most, strict=True):
        least = ZERO
        for k, extent in zip(found.k, found.reduce_extents, strict=True):
            number = form.factor(k).constant
            if number is not None and number < 0:
                least = least + (extent - 1) * number
        holds = b.op("ge", b.add(reach, b.index(least)), b.index(0))
        every = holds if every is None else b.logical_and(every, holds)
    assert every is not None
    return every


def _parts(b: Builder, forms: Sequence[Affine], indices: Mapping[Value, Value]) -> list[Value]:
    """What a step of the sum, given by its indices, adds to each form."""
    found: list[Value] = []
    for form in forms:
        total = b.index(0)
        for k, factor in form.factors:
            if k in indices:
                total = b.add(total, b.mul(indices[k], b.index(factor)))
        found.append(total)
    return found


@record
class ActiveSteps:
    """Of columns."""

    forms: tuple[Affine, ...]
    found: Contraction
    columns: tuple[tuple[Value, Size], ...]
    steps: Value
    """The numbers of steps: all of them, then those that count for the panel at hand."""
    parts: Value
    """What each step of the stretch adds to each form."""
    places: Value
    """Where each of these steps is read."""

    @staticmethod
    def allocate(b: Builder, forms: tuple[Affine, ...], found: Contraction, columns: Digits, places: Value, depth: int) -> ActiveSteps:
        """Room for the numbers of up to `depth` steps, all of which are written down."""
        steps = local_array(b, "steps", (2, depth), i64)
        parts = local_array(b, "parts", (len(forms), depth), i64)
        zero, one = b.index(0), b.index(1)
        b.for_(zero, b.index(depth), one, [], lambda at, k: list(at.multi("store", steps, zero, k, k)), name="k")
        return ActiveSteps(forms, found, tuple(columns), steps, parts, places)

    def note(self, b: Builder, step: Value, indices: Mapping[Value, Value]) -> None:
        """Write down what a step of the sum, given by its indices, adds to the forms."""
        for number, part in enumerate(_parts(b, self.forms, indices)):
            b.multi("store", self.parts, b.index(number), step, part)

    def of_panel(self, b: Builder, ends: Ends, count: Value) -> tuple[Value, Value]:
        """Which row of `steps` and `places` a panel of columns has, and how many steps."""
        zero, one = b.index(0), b.index(1)
        most = _most(b, self.forms, self.columns, ends)

        def step(at: Builder, k: Value, number: Value) -> list[Value]:
            parts = [at.op("load", self.parts, at.index(position), k) for position in range(len(most))]
            # Written in any case, and written over by the next one where it does not count: no branch that is hard to foresee.
            at.multi("store", self.steps, one, number, k)
            at.multi("store", self.places, one, number, at.op("load", self.places, zero, k))
            return [at.add(number, at.select(_counts(at, most, parts), one, zero))]

        def some(at: Builder) -> list[Value]:
            (number,) = at.for_(zero, count, one, [zero], step, name="k")
            return [one, number]

        row, number = b.if_(_all_count(b, self.forms, self.found, most), lambda at: [zero, count], some)
        return row, number


def _counts(b: Builder, most: Sequence[Value], parts: Sequence[Value]) -> Value:
    """Whether a step can count for some pixel of a panel."""
    least: Value | None = None
    for reach, part in zip(most, parts, strict=True):
        value = b.add(reach, part)
        least = value if least is None else b.op("min", least, value)
    assert least is not None
    return b.op("ge", least, b.index(0))


SHORT_RUN = 8
"""Steps of a run up to which leaving some out takes more time than it saves."""


@record
class ActiveRuns:
    """Of rows: a run is as many steps as follow one another along indices that no form has."""

    forms: tuple[Affine, ...]
    found: Contraction
    rows: tuple[tuple[Value, Size], ...]
    outer: tuple[tuple[Value, Size], ...]
    """The indices of the sum that number runs."""
    length: Size
    """Steps of a run."""
    runs: Value
    """The first steps of runs, and those behind their last ones."""

    @staticmethod
    def allocate(b: Builder, forms: tuple[Affine, ...], found: Contraction, rows: Digits, terms: Digits, depth: int) -> ActiveRuns:
        """Room for the runs of up to `depth` steps. `terms`: the indices of the sum, outermost first."""
        still = 0
        while not any(terms[-1 - still][0] in form.values for form in forms):
            still += 1
        runs = local_array(b, "runs", (2, depth + 2), i64)
        outer, inner = terms[: len(terms) - still], terms[len(terms) - still :]
        return ActiveRuns(forms, found, tuple(rows), tuple(outer), product(tuple(extent for _, extent in inner)), runs)

    def of_panel(self, b: Builder, ends: Ends, start: Value, count: Value) -> Value:
        """How many runs of a stretch count for a panel of rows."""
        zero, one, length = b.index(0), b.index(1), b.index(self.length)
        most = _most(b, self.forms, self.rows, ends)
        end = b.add(start, count)

        def run(at: Builder, number: Value, found: Value, begun: Value, reached: Value) -> list[Value]:
            digits: list[Value] = []
            rest = number
            for _, extent in reversed(self.outer[1:]):
                quotient = at.op("floordiv", rest, at.index(extent))
                digits.insert(0, at.sub(rest, at.mul(quotient, at.index(extent))))
                rest = quotient
            parts = _parts(at, self.forms, dict(zip((index for index, _ in self.outer), [rest, *digits], strict=True)))
            base = at.mul(number, length)
            first, behind = at.sub(at.op("max", base, start), start), at.sub(at.op("min", at.add(base, length), end), start)
            # A run that follows the one before is one with it. What does not count is written where the next one will be.
            counts = _counts(at, most, parts)
            joins = at.logical_and(counts, at.op("eq", first, reached))
            place, begin = at.select(joins, at.sub(found, one), found), at.select(joins, begun, first)
            at.multi("store", self.runs, zero, place, begin)
            at.multi("store", self.runs, one, place, behind)
            return [at.select(counts, new, old) for new, old in ((at.add(place, one), found), (begin, begun), (behind, reached))]

        def whole(at: Builder) -> list[Value]:
            at.multi("store", self.runs, zero, zero, zero)
            at.multi("store", self.runs, one, zero, count)
            return [one]

        def some(at: Builder) -> list[Value]:
            behind = at.op("floordiv", at.sub(at.add(end, length), one), length)
            number, *_ = at.for_(at.op("floordiv", start, length), behind, one, [zero, zero, at.index(-1)], run, name="run")
            return [number]

        every = b.op("or", b.op("lt", length, b.index(SHORT_RUN)), _all_count(b, self.forms, self.found, most))
        return b.if_(every, whole, some)[0]

    def over(self, b: Builder, number: Value, begun: Sequence[Value], body: Callable[[Builder, Value, Value, Sequence[Value]], Sequence[Value]]) -> list[Value]:
        """`body(builder, first, end, values)` for each of the runs found last, in turn."""
        zero, one = b.index(0), b.index(1)

        def run(at: Builder, position: Value, *values: Value) -> list[Value]:
            first, end = (at.op("load", self.runs, row, position) for row in (zero, one))
            return list(body(at, first, end, values))

        return list(b.for_(zero, number, one, list(begun), run, name="run"))
