"""LLVM's PTX -> PTX that ptxas assembles right.

ptxas (13.0 and others) takes the sign of a 16-bit negation or absolute value from the register of 32 bits that holds it. What follows
then sees 32768 for `-(-32768)`, where it should see -32768. A product with -1 is wrapped as it should be.

    neg.s16 %rs2, %rs1;   ->   mul.lo.s16 %rs2, %rs1, -1;
    abs.s16 %rs2, %rs1;   ->   { .reg .b16 %minus; mul.lo.s16 %minus, %rs1, -1; max.s16 %rs2, %rs1, %minus; }
"""

from __future__ import annotations

import re

_NEG = re.compile(r"\bneg\.s16(\s+)(%\w+), (%\w+);")
_ABS = re.compile(r"\babs\.s16(\s+)(%\w+), (%\w+);")


def avoid_faults(ptx: str) -> str:
    """The same program, without what ptxas gets wrong."""
    ptx = _NEG.sub(r"mul.lo.s16\1\2, \3, -1;", ptx)
    return _ABS.sub(r"{ .reg .b16 %minus; mul.lo.s16\1%minus, \3, -1; max.s16\1\2, \3, %minus; }", ptx)
