"""Loads under conditions: which of their indices no condition speaks of.

In `if 0 <= y and y < h { … x[b, y, q] * w[o, q] … }` the condition is about y. The loop over q runs its course whatever y is, so
`w[o, q]` can be loaded without asking, and that q stays inside both arrays is a matter of their sizes, to be checked at a call.
So it is with numbers: under `if j != i`, which some points pass, `p[j, 2]` asks for three columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tilewright.analysis.affine import Affine, analyse
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import Tensor


@record
class Guarded:
    """A load under conditions. `plain` are the axes whose index is a loop's own and in no condition, with that loop's extent; `exact`
    those whose loop runs over just the axis, or whose index is a number within it. `numbered` are those whose index is a number, where conditions
    compare indices of loops alone; `turns` are how often the loops around run, and sizes that are positive where conditions about one index can hold.
    With such, an index that is a number is safe under its condition alone."""

    load: Op
    plain: tuple[tuple[int, Value, Size], ...]
    exact: tuple[int, ...]
    numbered: tuple[tuple[int, int], ...] = ()
    turns: tuple[Size, ...] = ()
    may_never_hold: bool = False
    """Whether `turns` speak of conditions, too."""

    @property
    def needs_no_guard(self) -> bool:
        """Whether it stays inside wherever the loops go, once the sizes of `plain` axes are known to fit."""
        memory = self.load.operands[0].type
        assert isinstance(memory, Tensor)
        numbers = set() if self.may_never_hold else {axis for axis, _ in self.numbered}
        return {axis for axis, _, _ in self.plain} | numbers | set(self.exact) == set(range(memory.rank))


def guarded_loads(kernel: Kernel) -> Iterator[Guarded]:
    """Every load that stands under an `if`, at the loop stage."""
    if any(op.opcode == "if" for op in walk(kernel.body)):
        yield from _GuardFinder(kernel).block(kernel.body, (), ())


_Tested = tuple[Value, bool]
"""A condition, and whether it holds."""
_OPPOSITE: Mapping[str, str] = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


class _GuardFinder:
    def __init__(self, kernel: Kernel) -> None:
        self.forms = analyse(kernel)
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.extents: dict[Value, Size] = {}
        for op in walk(kernel.body):
            if op.opcode in ("parallel", "reduce"):
                for extent, index in zip(op.operands, op.regions[0].args, strict=True):
                    if extent in self.forms and not self.forms[extent].factors:
                        self.extents[index] = self.forms[extent].constant

    def block(self, block: Block, tested: tuple[_Tested, ...], turns: tuple[Size, ...] | None) -> Iterator[Guarded]:
        """`tested`: the conditions around, and whether they hold. `turns`: of the loops around; None where one runs as data says."""
        for op in block.ops:
            if op.opcode == "load" and tested:
                yield self._load(op, tested, turns)
            around = turns
            if op.regions and op.opcode != "if":
                counts = [self.extents.get(arg) for arg in op.regions[0].args]
                own = tuple(count for count in counts if count is not None)
                around = (*turns, *own) if turns is not None and op.opcode in ("parallel", "reduce") and len(own) == len(counts) else None
            for place, region in enumerate(op.regions):
                inner = (*tested, (op.operands[0], place == 0)) if op.opcode == "if" else tested
                yield from self.block(region, inner, around)

    def _load(self, op: Op, under: tuple[_Tested, ...], turns: tuple[Size, ...] | None) -> Guarded:
        conditions = [condition for condition, _ in under]
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        tested = frozenset[Value]().union(*map(self._sources, conditions))
        compares = turns is not None and all(map(self._compares_indices, conditions))
        compared = frozenset[str]().union(*map(self._sizes, conditions)) if compares else frozenset()
        plain: list[tuple[int, Value, Size]] = []
        exact: list[int] = []
        numbered: list[tuple[int, int]] = []
        for axis, index in enumerate(op.operands[1 : 1 + memory.rank]):
            form = self.forms.get(index)
            number = form.constant.constant if form is not None and not form.factors else None
            if number is not None:
                extent = memory.shape[axis]
                if extent.constant is not None and 0 <= number < extent.constant:
                    exact.append(axis)
                elif number >= 0 and compares and not extent.names & compared.union(*(turn.names for turn in turns or ())):
                    numbered.append((axis, number))  # else how long the axis is may be what the condition asks
                continue
            own = next((v for v in self.extents if form is not None and form.is_just(v)), None)
            if own is None:
                continue
            if self.extents[own] == memory.shape[axis]:
                exact.append(axis)
            elif own not in tested:
                plain.append((axis, own, self.extents[own]))
        asked = [size for condition, holds in under for size in self._can_hold(condition, holds)] if numbered else []
        return Guarded(op, tuple(plain), tuple(exact), tuple(numbered), (*(turns or ()), *asked), bool(asked))

    def _can_hold(self, condition: Value, holds: bool) -> Iterator[Size]:
        """Sizes that are all positive where some value of an index makes a condition about it alone hold, or not. What compares several indices is taken to."""
        op = self.made.get(condition)
        if op is None:
            return
        if op.opcode == "not":
            yield from self._can_hold(op.operands[0], not holds)
        elif op.opcode in ("and", "or") and (op.opcode == "and") is holds:
            for operand in op.operands:
                yield from self._can_hold(operand, holds)
        elif op.opcode in _OPPOSITE:
            kind = op.opcode if holds else _OPPOSITE[op.opcode]
            left, right = (self.forms[operand] for operand in op.operands)
            apart = left.minus(right)
            if len(apart.factors) == 1 and apart.values[0] in self.extents:
                yield from self._some(kind, apart, self.extents[apart.values[0]])

    @staticmethod
    def _some(kind: str, apart: Affine, extent: Size) -> Iterator[Size]:
        """Sizes that are positive where `apart`, which is made of one index below `extent`, can be as `kind` says of it and 0."""
        factor = apart.factors[0][1].constant
        if factor not in (1, -1) or kind == "ne":
            return
        least, most = (apart.constant, apart.constant + extent - 1) if factor == 1 else (apart.constant - extent + 1, apart.constant)
        if kind in ("ge", "gt", "eq"):
            yield most + (0 if kind == "gt" else 1)
        if kind in ("le", "lt", "eq"):
            yield -least + (0 if kind == "lt" else 1)

    def _compares_indices(self, condition: Value) -> bool:
        """Whether a condition compares indices of loops, with each other or with sizes, and nothing else."""
        op = self.made.get(condition)
        if op is None:
            return False
        if op.opcode in ("and", "or", "not"):
            return all(map(self._compares_indices, op.operands))
        if op.opcode not in ("lt", "le", "gt", "ge", "eq", "ne") or not all(operand in self.forms for operand in op.operands):
            return False
        left, right = (self.forms[operand] for operand in op.operands)
        indices = left.minus(right).values
        return bool(indices) and all(index in self.extents for index in indices)

    def _sizes(self, condition: Value) -> frozenset[str]:
        """The names of sizes in a condition that compares indices."""
        op = self.made.get(condition)
        if op is not None and op.opcode in ("and", "or", "not"):
            return frozenset[str]().union(*map(self._sizes, op.operands))
        forms = [self.forms[operand] for operand in op.operands] if op is not None else []
        return frozenset[str]().union(*(size.names for form in forms for size in (form.constant, *(factor for _, factor in form.factors))))

    def _sources(self, value: Value) -> frozenset[Value]:
        """The loop indices, what was loaded, and whatever else no op computes, that a condition is made of."""
        found: set[Value] = set()
        seen: set[Value] = set()
        waiting = [value]
        while waiting:
            current = waiting.pop()
            if current in seen:
                continue
            seen.add(current)
            op = self.made.get(current)
            if op is None or op.opcode == "load":
                found.add(current)  # what was read is data: that an index was used to read it says nothing about the index
            else:
                waiting += [*op.operands, *(v for region in op.regions for inner in walk(region) for v in inner.operands)]
        return frozenset(found)
