"""Loops over the part of a window that is inside an array become loops over the whole window, under conditions. `Kernel -> Kernel`.

In: a loop-stage kernel as the tree says. Out: the same, where sums over `max(a, …) .. min(b, …)` whose ends are a fixed length apart, but for those of borders, have that length:

    y in max(0, i - 1) .. min(n, i + 2): total += x[y] * w[y - i + 1]
    -> p in 0 .. 3: y = i - 1 + p; if y >= 0 and y < n: total += x[y] * w[p]

The rest of the compiler knows windows by such conditions: convolutions, pools and stencils. Ends that stay in place (`p in max(0, 1 - i) .. min(k, n + 1 - i)`) count where the length is a
number or the others fall as i grows: loops that stop at the diagonal of a matrix, or near it, keep their length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.analysis.affine import Affine, Forms, analyse
from tilewright.base.intervals import surely_positive
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, maximum
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects, replace_values, rewrite
from tilewright.ir.types import dtype_of
from tilewright.passes.common.combine import identities

KINDS = ("add", "mul", "min", "max", "and", "or")
LONGEST = 64
"""Turns of a window whose length is a number. Longer ones are loops of data, of which a condition would walk too much in vain."""


@record
class _CutWindow:
    """A loop with its ends: the first place it may begin, how long it then is, and the other bounds."""

    low: Value
    """Where the loop begins as it is written."""
    first: Value
    length: Size
    above: tuple[Value, ...]
    """Places that no turn is before."""
    below: tuple[Value, ...]
    """Places that every turn is before."""


def whole_windows(kernel: Kernel) -> Kernel:
    """The kernel with whole windows; the very same one where there are none."""
    if kernel.opcodes.isdisjoint(("min", "max")):
        return kernel
    forms = analyse(kernel)
    made = {result: op for op in walk(kernel.body) for result in op.results}
    found = {op.results: windows for op in walk(kernel.body) if (windows := _windows(op, made, forms))}
    if not found:
        return kernel

    def begins(op: Op, low: Value, turn: Value) -> bool:
        """Whether an op says where a turn of a loop is, which begins at `low`."""
        return op.opcode == "add" and turn in op.operands and any(_alike(v, low, made, forms) for v in op.operands if v is not turn)

    def widened(b: Builder, op: Op) -> Sequence[Value] | None:
        windows = found.get(op.results)
        return None if windows is None else _whole(b, op, windows, begins)

    return eliminate_dead(rewrite(kernel, widened))


def _windows(op: Op, made: dict[Value, Op], forms: Forms) -> dict[int, _CutWindow]:
    """Which loops of a reduction run over part of a window, by position."""
    if op.opcode != "reduce" or op.attrs["kind"] not in KINDS or len(op.results) != 1 or has_effects(op):
        return {}
    found = {position: _window(extent, made, forms) for position, extent in enumerate(op.operands)}
    return {position: window for position, window in found.items() if window is not None}


def _window(extent: Value, made: dict[Value, Op], forms: Forms) -> _CutWindow | None:
    """`max(0, high - low)`, or `max(0, high)` of a loop from 0 on, taken apart."""
    op = made.get(extent)
    if op is None or op.opcode != "max" or forms.get(extent) is None:
        return None
    zeros = [v for v in op.operands if v in forms and not forms[v].factors and forms[v].constant == ZERO]
    if len(zeros) != 1:
        return None
    zero = zeros[0]
    high = next(v for v in op.operands if v is not zero)
    low, made_of = zero, made.get(high)
    if made_of is not None and made_of.opcode == "sub":
        high, low = made_of.operands
    lows, highs = _parts(low, "max", made), _parts(high, "min", made)
    if len(lows) + len(highs) < 3 or not all(v in forms for v in (*lows, *highs)):
        return None
    ways: list[tuple[bool, bool, Value, Value, Size]] = []
    for first in lows:
        for last in highs:
            apart = forms[last].minus(forms[first])
            number = apart.constant.constant
            others = [v for v in (*lows, *highs) if v is not first and v is not last]
            if apart.factors or (number is not None and number > LONGEST) or (len(lows) == 1 and any(_is_tile(forms[v].minus(forms[first]), number) for v in highs if v is not last)):
                continue
            if number is not None or forms[first].factors or all(_falls(forms[v]) for v in others):
                ways.append((number is not None, bool(forms[first].factors), first, last, apart.constant))
    if not ways:
        return None
    _, _, first, last, length = max(ways, key=lambda way: way[:2])
    return _CutWindow(low, first, maximum(length, ZERO), tuple(v for v in lows if v is not first), tuple(v for v in highs if v is not last))


def _is_tile(room: Affine, length: int | None) -> bool:
    """Whether loops begin where one of the same length before them ends: tiles of a longer loop, of which the last ends with it. `room`: how far it is to that end."""
    return any(factor.constant is not None and -factor.constant == length for _, factor in room.factors)


def _falls(form: Affine) -> bool:
    """Whether a bound falls as the place of a result grows: `height + 1 - i` is where a window's own index leaves the array."""
    return bool(form.factors) and all(surely_positive(-factor) for _, factor in form.factors)


def _parts(value: Value, opcode: str, made: dict[Value, Op]) -> list[Value]:
    """What a largest number is the largest of; a smallest one, of what it is the smallest."""
    op = made.get(value)
    return [part for v in op.operands for part in _parts(v, opcode, made)] if op is not None and op.opcode == opcode else [value]


def _alike(a: Value, b: Value, made: dict[Value, Op], forms: Forms) -> bool:
    """Whether two numbers are computed alike."""
    if a in forms and b in forms:
        apart = forms[a].minus(forms[b])
        if not apart.factors:
            return apart.constant == ZERO
    first, second = made.get(a), made.get(b)
    if first is None or second is None or first.opcode != second.opcode or first.opcode not in ("min", "max"):
        return False
    return all(_alike(v, w, made, forms) for v, w in zip(first.operands, second.operands, strict=True))


def _whole(b: Builder, op: Op, windows: dict[int, _CutWindow], begins: Callable[[Op, Value, Value], bool]) -> Sequence[Value]:
    """The reduction over whole windows. `begins`: whether an op adds a turn to where its loop begins."""
    region = op.regions[0]
    extents = tuple(b.index(windows[p].length) if p in windows else v for p, v in enumerate(op.operands))
    (nothing,) = identities(str(op.attrs["kind"]), [dtype_of(op.result.type)])
    inner = Builder(op.span)
    mapping: dict[Value, Value] = {}
    places: dict[Value, Value] = {}
    tests: list[Value] = []
    for position, window in windows.items():
        turn = region.args[position]
        place = inner.add(window.first, turn)
        tests += [inner.op("ge", place, bound) for bound in window.above]
        tests += [inner.op("lt", place, bound) for bound in window.below]
        places |= {o.result: place for o in walk(region) if begins(o, window.low, turn)}
        mapping[turn] = inner.sub(place, window.low)
    holds = tests[0]
    for test in tests[1:]:
        holds = inner.logical_and(holds, test)
    placed = replace_values(region, places)

    def then(at: Builder) -> list[Value]:
        clone_ops(at, placed.ops[:-1], mapping)
        return [mapping.get(v, v) for v in placed.yields]

    (term,) = inner.if_(holds, then, lambda at: [at.const(nothing, dtype_of(op.result.type))])
    inner.multi("yield", term)
    return b.append(replace(op, operands=extents, regions=(Block(region.args, tuple(inner.ops)),)))
