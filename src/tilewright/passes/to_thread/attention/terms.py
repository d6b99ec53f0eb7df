"""Attention of f32 in terms of bf16 on Hopper (`lower_wgmma_attention`): where terms lie, which are multiplied, and weights as terms.

In: the kernel, whose parameters have arrays of terms (`passes/terms/attention_terms.py`), and the weights of a step in registers. Out: places of what instructions
multiply, and words of their first operand. The smallest products come first, since matrix units drop bits of large sums when they add. A term has the sign of its number,
and none is zero but those of zero, so that an infinity gives what it gives in f32: a rest of nothing is a small part of the number.
"""

from __future__ import annotations

from tilewright.base.dtypes import bf16, f32, u32
from tilewright.base.errors import CompilerBug
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Value
from tilewright.passes.common.registers import Cell
from tilewright.passes.schedules.attention import OPERAND_TERMS, SWIZZLED, TERMS, WgmmaAttention
from tilewright.passes.terms.attention_terms import OPERANDS
from tilewright.passes.terms.split_terms import LAST_REST, PAIRS, REST, UPPER


class AttentionTerms:
    """Terms of queries, keys, values and weights."""

    def __init__(self, kernel: Kernel, schedule: WgmmaAttention) -> None:
        self.kernel, self.schedule = kernel, schedule

    def memory(self, name: str) -> Value:
        """The array of the terms of an operand: `q`, `k` or `v`."""
        names = self.kernel.attrs.get("terms")
        if not isinstance(names, tuple) or len(names) != OPERAND_TERMS:
            raise CompilerBug.at("TW040", f"{self.kernel.name} has no terms of its operands", self.kernel.span)
        return next(p for p in self.kernel.params if p.name == names[OPERANDS.index(name)])

    @property
    def score_columns(self) -> list[tuple[int, int]]:
        """The first columns of queries and of keys that each instruction of the first product multiplies."""
        k = self.schedule.k
        return [(first * k + column, second * k + column) for first, second in PAIRS for column in range(0, k, TERMS)]

    @property
    def weight_moves(self) -> list[tuple[int, int]]:
        """The first word of the weights, and the first element of the values, of each instruction of the second."""
        n, pitch = self.schedule.n, self.schedule.value_pitch
        return [(first * n // 4 + 4 * number, second * pitch * n + number * TERMS * SWIZZLED) for first, second in PAIRS for number in range(n // TERMS)]

    def packed(self, b: Builder, weights: dict[Cell, Value]) -> list[Value]:
        """Weights as words of the first operand: the first terms of all, then the second, then the third."""
        terms = [self._terms(b, weights[row, column]) for column in range(self.schedule.n // 8) for row in range(2)]
        return [words[number] for number in range(OPERAND_TERMS) for words in terms]

    def _terms(self, b: Builder, pair: Value) -> list[Value]:
        """The words of two neighbours."""
        first, rest = self._upper(b, pair, REST)
        second, last = self._upper(b, rest, LAST_REST)
        return [b.op("to_bits", b.cast(term, bf16)) for term in (first, second, last)]

    def _upper(self, b: Builder, pair: Value, part: float) -> tuple[Value, Value]:
        """The upper halves of two numbers, and what those leave: where that is nothing, a small part of the number, which is lost in any other rest."""

        def both(value: Value) -> Value:
            return b.op("broadcast", value, width=2)

        upper = b.bitcast(b.op("and", b.bitcast(pair, u32), both(b.const(UPPER, u32))), f32)
        return upper, b.fma(pair, both(b.const(part, f32)), b.sub(pair, upper))
