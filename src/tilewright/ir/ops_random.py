"""Rows of the op table for random numbers. `random_numbers` has their meaning, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, f32, f64, u32, u64
from tilewright.ir.nodes import Attrs
from tilewright.ir.opdef import OpDef, Rule, TypeRuleError
from tilewright.ir.types import Scalar, Tile, Type, Vec, is_number, with_dtype


def _words(least: int, most: int, result: DType) -> Rule:
    """Of `least` to `most` numbers of u64, all of one container."""

    def rule(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
        if not least <= len(types) <= most:
            raise TypeRuleError(f"takes {least} to {most} operands, got {len(types)}")
        first = types[0]
        if not isinstance(first, Scalar | Vec | Tile) or first.dtype is not u64 or any(t != first for t in types):
            raise TypeRuleError(f"takes u64 of one shape, got {', '.join(map(str, types))}")
        return (with_dtype(first, result),)

    return rule


def _normal(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    first = types[0] if len(types) == 1 else None
    if not isinstance(first, Scalar | Vec | Tile) or not is_number(first) or first.dtype not in (u32, u64):
        raise TypeRuleError(f"takes one u32 or u64, got {', '.join(map(str, types))}")
    return (with_dtype(first, f32 if first.dtype is u32 else f64),)


def _row(name: str, doc: str, rule: Rule, bound: str = "exact") -> OpDef:
    return OpDef(name, doc, rule, group="function", bound=bound)


DEFINITIONS = (
    _row("random_u32", "`random_u32 %key, %index`: word index % 4 of the block index // 4 of Philox 4x32-10 under the key. With a third operand `%high`: the "
         "blocks whose counter has these upper 64 bits, and the bit 2^63 set.", _words(2, 3, u32)),
    _row("random_u64", "`random_u64 %key, %index`: words 2 * (index % 2) and the next, as the lower and the upper half, of the block index // 2; `%high` as "
         "for `random_u32`.", _words(2, 3, u64)),
    _row("random_key", "`random_key %key, %index`: a key made of a key and an index: words 0 and 1 of Philox at the counter (index, 2^64 - 1).", _words(2, 2, u64)),
    _row("random_below", "`random_below %word, %count`: floor(word * count / 2^64).", _words(2, 2, u64)),
    _row("random_normal", "The normal distribution's quantile at (a + 1/2) / 2^32, f32, of a u32; of a u64 the same of its upper 54 bits, f64. The same bits on "
         "every device.", _normal, "8"),
)  # fmt: skip
