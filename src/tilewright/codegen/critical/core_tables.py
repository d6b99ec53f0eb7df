"""What cores take for instructions: tables for a static estimate of latency.

A `CoreTable` has kinds of instructions, each with its latency in cycles and the pipes that take it, and the patterns of names that are of a kind. The numbers are those
that makers publish in their optimisation guides, the same from which LLVM's scheduling models are made: Arm's guide for the Neoverse N1, Intel's figures for
Skylake. They hold for data in the first cache and for branches that are foreseen.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class CoreKind:
    """Instructions alike: cycles until a result can be used, the pipe, and how long an instruction holds it."""

    latency: int
    pipe: str
    holds: int = 1


@dataclass(frozen=True)
class CoreTable:
    """One core."""

    name: str
    width: int
    """Instructions that enter in a cycle."""
    window: int
    """Instructions that are under way at most."""
    pipes: dict[str, int]
    load: int
    """Cycles of a load that is part of another instruction."""
    forward: int
    """Cycles from a store to a load of the same place, more than those of a load."""
    rows: tuple[tuple[str, CoreKind], ...]
    """Patterns of "name operands", the first that fits."""

    def kind(self, name: str, operands: str) -> CoreKind:
        return _kind(self.name, name, re.sub(r"0x[0-9a-f]+|(?<![a-z0-9])\d+", "0", operands))


_ALU = CoreKind(1, "integer")

NEOVERSE_N1 = CoreTable(
    "Neoverse N1", 4, 128, {"branch": 1, "integer": 3, "multi": 1, "load": 2, "store": 1, "float": 2, "float0": 1}, 4, 1,
    (
        (r"(b|bl|br|ret|cbz|cbnz|tbz|tbnz|b\.\w+) ", CoreKind(1, "branch")),
        (r"(nop|hint|prfm)\b", CoreKind(1, "")),
        (r"mrs .*cntv", CoreKind(20, "multi", 20)),
        (r"(isb|dsb|dmb)\b", CoreKind(12, "multi", 12)),
        (r"(cas|swp|ldadd|ldclr|ldset|ldeor|ldsmax|ldsmin|ldumax|ldumin)", CoreKind(14, "load", 10)),
        (r"(stadd|stclr|stset|steor)", CoreKind(6, "store", 6)),
        (r"(ldxr|ldaxr)", CoreKind(5, "load")),
        (r"(stxr|stlxr)", CoreKind(6, "store", 2)),
        (r"(ldar|ldapr)", CoreKind(4, "load")),
        (r"stlr", CoreKind(1, "store", 1)),
        (r"ldn?p q", CoreKind(5, "load", 2)),
        (r"ld[pr]\w* q|ld[1-4]", CoreKind(5, "load")),
        (r"ld", CoreKind(4, "load")),
        (r"st", CoreKind(1, "store")),
        (r"(udiv|sdiv) w", CoreKind(12, "multi", 12)),
        (r"(udiv|sdiv) x", CoreKind(20, "multi", 20)),
        (r"(smulh|umulh)", CoreKind(5, "multi", 4)),
        (r"(mul|madd|msub|mneg) x", CoreKind(4, "multi", 3)),
        (r"(mul|madd|msub|mneg|smull|umull|smaddl|umaddl) ", CoreKind(2, "multi")),
        (r"fdiv .*(d|2d)", CoreKind(15, "float0", 10)),
        (r"fdiv", CoreKind(10, "float0", 7)),
        (r"fsqrt .*(d|2d)", CoreKind(17, "float0", 12)),
        (r"fsqrt", CoreKind(10, "float0", 7)),
        (r"(scvtf|ucvtf) [sdh]\d+, [wx]", CoreKind(6, "multi")),
        (r"fcvt[a-z]+ [wx]", CoreKind(4, "float0")),
        (r"fmov [sdh]\d+, [wx]|(dup|ins|mov) v.*, [wx]", CoreKind(3, "multi")),
        (r"(fmov|umov|smov|mov) [wx]\d+, [sdvh]\d", CoreKind(2, "float")),
        (r"(fmadd|fmsub|fnmadd|fnmsub|fmla|fmls)", CoreKind(4, "float")),
        (r"(fmul|fnmul|fmulx)", CoreKind(3, "float")),
        (r"(fcvt|frint|scvtf|ucvtf)", CoreKind(3, "float0")),
        (r"(faddp|addv|fmaxnmv|fminnmv|saddlv|uaddlv)", CoreKind(3, "float")),
        (r"(mul|mla|mls) v", CoreKind(4, "float0")),
        (r"f\w+ ", CoreKind(2, "float")),
        (r"\w+ [vdsqbh]\d+", CoreKind(2, "float")),
        (r"(add|sub|and|orr|eor|bic|cmp|tst|adds|subs|ands)\w* .*(lsl|lsr|asr|sxt|uxt)", CoreKind(2, "multi")),
        (r"(extr|bfm|bfi|bfxil)", CoreKind(2, "multi")),
        (r"", _ALU),
    ),
)  # fmt: skip

SKYLAKE = CoreTable(
    "Skylake", 4, 224, {"branch": 1, "integer": 4, "multi": 1, "load": 2, "store": 1, "float": 2, "float0": 1}, 5, 0,
    (
        (r"(j\w+|ret|retq|call|loop\w*)\b", CoreKind(1, "branch")),
        (r"(nop|prefetch\w*|endbr64)", CoreKind(1, "")),
        (r"rdtscp?", CoreKind(25, "multi", 25)),
        (r"lock |xchg .*\[|cmpxchg", CoreKind(18, "load", 18)),
        (r"v?mov\w* [^\[]*, .*\[", CoreKind(5, "load")),
        (r"v?mov\w* .*\[[^,]*\],", CoreKind(1, "store")),
        (r"mfence", CoreKind(33, "multi", 33)),
        (r"(div|idiv)", CoreKind(40, "multi", 24)),
        (r"(imul|mul|mulx) ", CoreKind(3, "multi")),
        (r"v?div[sp]d", CoreKind(14, "float0", 4)),
        (r"v?div[sp]s", CoreKind(11, "float0", 3)),
        (r"v?sqrt[sp]d", CoreKind(18, "float0", 6)),
        (r"v?sqrt[sp]s", CoreKind(12, "float0", 3)),
        (r"v?cvt", CoreKind(6, "float")),
        (r"v?(add|sub|mul|min|max)[sp][sd]|vf[n]?m(add|sub)", CoreKind(4, "float")),
        (r"v?round", CoreKind(8, "float")),
        (r"v?h(add|sub)", CoreKind(6, "float")),
        (r"v?u?comis", CoreKind(3, "float0")),
        (r"v?mov[dq] (r|e)", CoreKind(2, "float0")),
        (r"v?pmul", CoreKind(5, "float")),
        (r"(v?mov\w*|v?and\w*|v?xor\w*|v?or\w*|v?p\w+|v?shuf\w*|v?unpck\w*|v?perm\w*|vbroadcast\w*|v?blend\w*|vextract\w*|vinsert\w*) .*[xyz]mm", CoreKind(1, "float")),
        (r"", _ALU),
    ),
)  # fmt: skip
_TABLES = {table.name: table for table in (NEOVERSE_N1, SKYLAKE)}


@functools.cache
def _kind(table: str, name: str, operands: str) -> CoreKind:
    text = f"{name} {operands}"
    return next(kind for pattern, kind in _TABLES[table].rows if re.match(pattern, text))


def core_table(arm: bool) -> CoreTable:
    """The table for code of an architecture."""
    return NEOVERSE_N1 if arm else SKYLAKE
