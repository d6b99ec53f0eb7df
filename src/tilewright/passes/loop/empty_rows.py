"""Rows of a softmax-weighted sum that a mask leaves without any term are zero.

In and out: a loop-stage kernel. Attention, written as a maximum of scores, sums of exponentials below it and weighted sums of them,

    m = max_j f(j); l = sum_j exp(f(j) - m); o = sum_j exp(f(j) - m) * v(j); out = o / l

gives 0 / 0, or exp(-inf - -inf), for a row all of whose scores are masked. Where the text masks scores (a condition around them,
`where(…, f, -inf)`, or a range that ends with the row or by a number in memory) such a row is defined: its sums are 0 and what is divided by them is 0.

    %empty = eq %m, -inf;  %shift = select %empty, 0, %m;  exp(f - %shift);  o / select(%empty, 1, %l)

That is what careful authors write by hand, and `analysis/attention.py` knows it. A maximum that is NaN is not -inf: rows with NaN
scores stay NaN. Text that masks nothing stays as it is, rows of -inf included. Sits before contraction, which would hide the
difference in an fma, and for all targets, so that whatever computes the kernel gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.rewrite import eliminate_dead, rewrite
from tilewright.ir.types import dtype_of

_EXPONENTIALS = ("exp", "exp2")


def empty_rows(kernel: Kernel) -> Kernel:
    """The kernel with masked rows defined."""
    maxima = [op for op in walk(kernel.body) if op.opcode == "reduce" and op.attrs["kind"] == "max" and len(op.results) == 1]
    if not maxima or not any(op.opcode in _EXPONENTIALS for op in walk(kernel.body)):
        return kernel
    finder = _EmptyRowFinder(kernel)
    chains = [chain for op in maxima if (chain := finder.chain(op)) is not None]
    if not chains:
        return kernel
    return eliminate_dead(rewrite(kernel, _Rewriting(finder, chains).op))


class _SoftmaxChain:
    """A masked maximum, the sums of exponentials below it, and those exponentials."""

    def __init__(self, maximum: Value, totals: frozenset[Value], exponentials: frozenset[Value]) -> None:
        self.maximum, self.totals, self.exponentials = maximum, totals, exponentials


class _EmptyRowFinder:
    def __init__(self, kernel: Kernel) -> None:
        self.ops = list(walk(kernel.body))
        self.made = {result: op for op in self.ops for result in op.results}
        self.indices = {arg for op in self.ops for region in op.regions for arg in region.args}

    def chain(self, op: Op) -> _SoftmaxChain | None:
        """What hangs on a maximum, where it is masked and weights something."""
        (maximum,) = op.results
        if not dtype_of(maximum.type).is_float or not self._is_masked(op):
            return None
        exponentials = frozenset(
            o.results[0] for o in self.ops if o.opcode in _EXPONENTIALS and self.subtracts(o.operands[0], maximum)
        )
        totals: set[Value] = set()
        weighted = False
        for total in self.ops:
            if total.opcode != "reduce" or total.attrs["kind"] != "add" or len(total.results) != 1:
                continue
            factors = self._factors(total.regions[0].yields[0])
            if any(f in exponentials for f in factors):
                totals.update(total.results if len(factors) == 1 else ())
                weighted = weighted or len(factors) > 1
        return _SoftmaxChain(maximum, frozenset(totals), exponentials) if totals and weighted else None

    def _is_masked(self, op: Op) -> bool:
        """Whether some terms of a maximum are -inf by the text, or it ends with its row."""
        if any(self._varies(v) for v in op.operands):
            return True
        made = self.made.get(op.regions[0].yields[0])
        if made is None or made.opcode not in ("if", "select"):
            return False
        if made.opcode == "select":
            return any(self._is_lowest(v) for v in made.operands[1:])
        place = made.results.index(op.regions[0].yields[0])
        return any(self._is_lowest(region.yields[place]) for region in made.regions)

    def _is_lowest(self, value: Value) -> bool:
        op = self.made.get(value)
        return op is not None and op.opcode == "const" and op.attrs["value"] == -math.inf

    def _varies(self, value: Value) -> bool:
        """Whether a loop's index, or a number in memory, is part of a value."""
        op = self.made.get(value)
        if op is None:
            return value in self.indices
        return op.opcode == "load" or any(self._varies(v) for v in op.operands)

    def _factors(self, value: Value) -> list[Value]:
        """What a term is a product of, under conditions outside of which it is 0; what it is divided by does not count."""
        op = self.made.get(value)
        if op is None:
            return [value]
        if op.opcode == "mul":
            return [f for v in op.operands for f in self._factors(v)]
        if op.opcode == "div":
            return [*self._factors(op.operands[0]), op.operands[1]]
        if op.opcode == "if":
            place = op.results.index(value)
            return self._factors(op.regions[0].yields[place])
        return self._factors(op.operands[1]) if op.opcode == "select" else [value]

    def subtracts(self, value: Value, maximum: Value) -> bool:
        """Whether a maximum is taken off in an exponent."""
        op = self.made.get(value)
        if op is None or op.opcode not in ("sub", "add", "neg", "mul", "div"):
            return False
        if op.opcode in ("sub", "neg") and op.operands[-1] is maximum:
            return True
        return any(self.subtracts(v, maximum) for v in op.operands)


class _Rewriting:
    def __init__(self, finder: _EmptyRowFinder, chains: Sequence[_SoftmaxChain]) -> None:
        self.finder = finder
        self.by_maximum = {chain.maximum: chain for chain in chains}
        self.by_total = {total: chain for chain in chains for total in chain.totals}
        self.by_exponential = {e: chain for chain in chains for e in chain.exponentials}
        self.empty: dict[Value, Value] = {}
        self.shift: dict[Value, Value] = {}
        self.divisor: dict[Value, Value] = {}

    def op(self, b: Builder, op: Op) -> Sequence[Value] | None:
        result = op.results[0] if len(op.results) == 1 else None
        if result in self.by_maximum:
            b.append(op)
            self.empty[result] = b.op("eq", result, b.splat(-math.inf, result))
            self.shift[result] = b.select(self.empty[result], b.splat(0.0, result), result)
            return op.results
        if result in self.by_total:
            b.append(op)
            empty = self.empty[self.by_total[result].maximum]
            self.divisor[result] = b.select(empty, b.splat(1.0, result), result)
            return op.results
        if result in self.by_exponential:
            return b.emit(op.opcode, [self._shifted(b, op.operands[0], self.by_exponential[result].maximum)], dict(op.attrs))
        if op.opcode == "div" and op.operands[1] in self.divisor:
            return b.emit("div", [op.operands[0], self.divisor[op.operands[1]]], dict(op.attrs))
        return None

    def _shifted(self, b: Builder, value: Value, maximum: Value) -> Value:
        """An exponent with what is subtracted from now on in the place of the maximum."""
        if not self.finder.subtracts(value, maximum):
            return value
        op = self.finder.made[value]
        last = len(op.operands) - 1
        operands = [
            self.shift[maximum] if n == last and v is maximum and op.opcode in ("sub", "neg") else self._shifted(b, v, maximum)
            for n, v in enumerate(op.operands)
        ]
        return b.emit(op.opcode, operands, dict(op.attrs))[0]
