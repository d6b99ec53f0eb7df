"""Images that are read past their borders, and need no copy with a frame of zeros for that: vectors inside are read where they lie, those at a border under a mask.

In: a contraction whose second factor has a guard, such as `0 <= i + k - 1 < n`. Out: what has to be at least 0 for an element to count, as affine forms; and whether that
holds for a whole panel of columns and all terms of the sum.
"""

from __future__ import annotations

from tilewright.analysis.affine import Affine
from tilewright.analysis.contraction import Contraction
from tilewright.base.sizes import ONE, ZERO
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value, walk
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.to_tile.panels.sides import SORTED, order
from tilewright.passes.windows.guards import guard_tests


def column_step(found: Contraction, column: Value, target: Target) -> int:
    """Elements from one column of the second factor to the next, where a vector of them is read by vectors of memory; else 0."""
    load = found.b.load
    assert load is not None
    memory = load.operands[0].type
    assert isinstance(memory, Tensor)
    steps = [form.factor(column) for form in found.access(found.b)]
    step = steps[-1].constant
    if step is None or memory.strides[-1] != ONE or any(other != ZERO for other in steps[:-1]):
        return 0
    few = target.has_lane_masks and found.accumulator.itemsize >= 4
    return step if step == 1 or (few and 1 < step <= SORTED) else 0


def frame_of(found: Contraction, target: Target) -> tuple[Affine, ...]:
    """The forms, none of which may be less than 0; nothing where a copy with a frame is read instead."""
    factor, load = found.b, found.b.load
    if not target.has_lane_masks or load is None or factor.guard is None or factor.value is not load.result:
        return ()
    if dtype_of(load.operands[0].type) is not found.accumulator or "watch" in load.attrs:
        return ()
    indices = {*(found.indices[p] for p in found.n), *found.k}
    if any(value not in indices for form in found.access(factor) for value in form.values):
        return ()
    if not column_step(found, found.indices[order(found, found.n, [factor], stores=True)[-1]], target):
        return ()
    made = {result: op for op in walk(found.parallel.regions[0]) for result in op.results}
    tests = guard_tests(factor.guard, made, found.forms)
    forms = tuple(test.form for test in tests if test.form is not None and not test.divisor)
    known = all(value in indices and number.constant is not None for form in forms for value, number in form.factors)
    return forms if known and len(forms) == len(tests) else ()


def is_inside(b: Builder, found: Contraction, frame: tuple[Affine, ...], columns: dict[Value, Value], last: Value, width: int) -> Value:
    """Whether all terms count for `width` columns, which differ in index `last` and begin at `columns`."""
    inside: Value | None = None
    for form in frame:
        least = b.index(form.constant)
        for index, factor in form.factors:
            number = factor.constant
            assert number is not None
            if index in columns:
                first = columns[index]
                if index is last and number < 0:
                    first = b.add(first, b.index(width - 1))
                least = b.add(least, b.mul(first, b.index(number)))
            elif number < 0:
                extent = found.reduce_extents[found.k.index(index)]
                least = b.add(least, b.index((extent - 1) * number))
        holds = b.op("ge", least, b.index(0))
        inside = holds if inside is None else b.logical_and(inside, holds)
    assert inside is not None
    return inside
