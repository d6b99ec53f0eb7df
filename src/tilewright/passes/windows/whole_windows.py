"""Loops over the part of a window that is inside an array become loops over the whole window, under conditions. `Kernel -> Kernel`.

In: a loop-stage kernel as the tree says. Out: the same, where sums over `max(a, …) .. min(b, …)` whose ends are a fixed length apart, but for those of borders, have that length:

    y in max(0, i - 1) .. min(n, i + 2): total += x[y] * w[y - i + 1]
    -> p in 0 .. 3: y = i - 1 + p; if y >= 0 and y < n: total += x[y] * w[p]

The rest of the compiler knows windows by such conditions: convolutions, pools and stencils. An end that stays in place counts only where the length is a number, or where both
ends are cut: loops that stop at the diagonal of a matrix keep their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.analysis.affine import Forms, analyse
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, maximum
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects, rewrite
from tilewright.ir.types import dtype_of
from tilewright.passes.common.combine import identities

KINDS = ("add", "mul", "min", "max", "and", "or")
LONGEST = 64
"""Turns of a window whose length is a number. Longer ones are loops of data, of which a condition would walk too much in vain."""


@record
class _Window:
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

    def widened(b: Builder, op: Op) -> Sequence[Value] | None:
        windows = found.get(op.results)
        return None if windows is None else _whole(b, op, windows)

    return eliminate_dead(rewrite(kernel, widened))


def _windows(op: Op, made: dict[Value, Op], forms: Forms) -> dict[int, _Window]:
    """Which loops of a reduction run over part of a window, by position."""
    if op.opcode != "reduce" or op.attrs["kind"] not in KINDS or len(op.results) != 1 or has_effects(op):
        return {}
    found = {position: _window(extent, made, forms) for position, extent in enumerate(op.operands)}
    return {position: window for position, window in found.items() if window is not None}


def _window(extent: Value, made: dict[Value, Op], forms: Forms) -> _Window | None:
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
    ways = []
    for first in lows:
        for last in highs:
            length = forms[last].minus(forms[first])
            if length.factors or (length.constant.constant or 0) > LONGEST:
                continue
            moves = bool(forms[first].factors)
            is_number = length.constant.constant is not None
            if is_number or moves or (len(lows) > 1 and len(highs) > 1):
                ways.append((is_number, moves, first, last, length.constant))
    if not ways:
        return None
    _, _, first, last, length = max(ways, key=lambda way: way[:2])
    return _Window(low, first, maximum(length, ZERO), tuple(v for v in lows if v is not first), tuple(v for v in highs if v is not last))


def _parts(value: Value, opcode: str, made: dict[Value, Op]) -> list[Value]:
    """What a largest number is the largest of; a smallest one, of what it is the smallest."""
    op = made.get(value)
    return [part for v in op.operands for part in _parts(v, opcode, made)] if op is not None and op.opcode == opcode else [value]


def _whole(b: Builder, op: Op, windows: dict[int, _Window]) -> Sequence[Value]:
    """The reduction over whole windows."""
    region = op.regions[0]
    extents = tuple(b.index(windows[p].length) if p in windows else v for p, v in enumerate(op.operands))
    (nothing,) = identities(str(op.attrs["kind"]), [dtype_of(op.result.type)])
    inner = Builder(op.span)
    mapping: dict[Value, Value] = {}
    tests: list[Value] = []
    for position, window in windows.items():
        turn = region.args[position]
        place = inner.add(window.first, turn)
        tests += [inner.op("ge", place, bound) for bound in window.above]
        tests += [inner.op("lt", place, bound) for bound in window.below]
        mapping |= {o.result: place for o in region.ops if o.opcode == "add" and set(o.operands) == {window.low, turn}}
        mapping[turn] = inner.sub(place, window.low)
    holds = tests[0]
    for test in tests[1:]:
        holds = inner.logical_and(holds, test)
    places = set(mapping)

    def then(at: Builder) -> list[Value]:
        clone_ops(at, [o for o in region.ops[:-1] if places.isdisjoint(o.results)], mapping)
        return [mapping.get(v, v) for v in region.yields]

    (term,) = inner.if_(holds, then, lambda at: [at.const(nothing, dtype_of(op.result.type))])
    inner.multi("yield", term)
    return b.append(replace(op, operands=extents, regions=(Block(region.args, tuple(inner.ops)),)))
