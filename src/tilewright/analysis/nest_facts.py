"""What notes about speed ask of a loop-stage kernel: which loops an op stands in, how long they are, and what values are made of.

In: a loop-stage kernel and what is known of sizes. Out: a `NestFacts`, which answers single questions.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.affine import analyse
from tilewright.base.sizes import ZERO
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk

LOOPS = ("parallel", "reduce", "for", "while")
UNKNOWN = 1 << 40
"""What a length nobody knows counts for."""


class NestFacts:
    """One kernel, looked at."""

    def __init__(self, kernel: Kernel, sizes: Mapping[str, int], name: str = "") -> None:
        self.kernel, self.sizes, self.name = kernel, sizes, name or kernel.name
        self.forms = analyse(kernel)
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.inside: dict[int, tuple[Op, ...]] = {}
        """By the identity of an op, the ops it stands in, the outermost first."""
        self.owner: dict[Value, Op] = {}
        """The loop that gives a block argument its values."""
        self._deps: dict[Value, frozenset[Value]] = {}
        self._visit(kernel.body, ())

    def _visit(self, block: Block, around: tuple[Op, ...]) -> None:
        for op in block.ops:
            self.inside[id(op)] = around
            for region in op.regions:
                self.owner.update((arg, op) for arg in region.args)
                self._visit(region, (*around, op))

    def depends(self, value: Value) -> frozenset[Value]:
        """The block arguments (loop indices and carried values) that a value is made of."""
        known = self._deps.get(value)
        if known is None:
            op = self.made.get(value)
            if op is None:
                known = frozenset({value}) if value in self.owner else frozenset()
            else:
                self._deps[value] = frozenset()  # a loop's results may be asked for from inside it
                parts = [*op.operands, *(v for region in op.regions for inner in walk(region) for v in inner.operands)]
                known = frozenset().union(*(self.depends(v) for v in parts))
            self._deps[value] = known
        return known

    def reads(self, value: Value) -> bool:
        """Whether a value is made of elements of arrays."""
        seen: set[Value] = set()
        waiting = [value]
        while waiting:
            op = self.made.get(waiting.pop())
            if op is None or op.results[0] in seen:
                continue
            seen.add(op.results[0])
            if op.opcode == "load":
                return True
            waiting += [*op.operands, *(v for region in op.regions for v in region.yields)]
        return False

    def indices(self, op: Op) -> tuple[Value, ...]:
        """The indices of a loop, without what it carries."""
        args = op.regions[0].args
        return args[:1] if op.opcode == "for" else () if op.opcode == "while" else args

    def turns(self, op: Op) -> int:
        """How often a loop turns for each turn of those around it, `UNKNOWN` where nobody knows before the call."""
        if op.opcode == "while":
            return UNKNOWN
        if op.opcode == "for":
            low, high, step = (self.forms.get(v) for v in op.operands[:3])
            if low is None or high is None or step is None:
                return UNKNOWN
            gap = high.minus(low)
            if gap.factors or step.factors or not gap.constant.names <= self.sizes.keys() or not step.constant.constant:
                return UNKNOWN
            return max(0, -(-gap.constant.evaluate(self.sizes) // step.constant.constant))
        total = 1
        for operand in op.operands:
            total *= self.length(operand)
        return min(total, UNKNOWN)

    def length(self, extent: Value) -> int:
        """The value of an extent."""
        op = self.made.get(extent)
        if op is not None and op.opcode == "max" and (form := self.forms.get(op.operands[1])) is not None and not form.factors and form.constant == ZERO:
            extent = op.operands[0]
        form = self.forms.get(extent)
        if form is None or form.factors or not form.constant.names <= self.sizes.keys():
            return UNKNOWN
        return form.constant.evaluate(self.sizes)

    def is_size(self, extent: Value) -> bool:
        """Whether an extent is made of sizes of arrays."""
        form = self.forms.get(extent)
        return form is not None and not form.factors
