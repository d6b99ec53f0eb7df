"""Counts of the iterations of a thread's loops: sizes, indices that cancel, both sides of conditions, numbers of a call."""

from __future__ import annotations

import pytest

from tilewright.ir.text_parse import parse_kernel
from tilewright.passes.portable.loop_turns import LoopTurns, loop_turns

HEAD = """kernel @k stage=thread grid=[ceildiv(n, 16)] threads=16 {
  param %x: tensor<i32, [n], [1], align=16>
  param %count: i64
  %thread = thread_id : i64
  %block = program_id {axis = 0} : i64
  %n = size {value = n} : i64
  %c0 = const {value = 0, dtype = i64} : i64
  %c1 = const {value = 1, dtype = i64} : i64
  %c16 = const {value = 16, dtype = i64} : i64
"""


def turns(body: str) -> LoopTurns:
    return loop_turns(parse_kernel(HEAD + body + "}\n"), lambda op: 0)


def loop(low: str, high: str, step: str = "%c1", inside: str = "", index: str = "i") -> str:
    return f"for {low}, {high}, {step} (%{index}: i64) {{\n{inside}yield\n}}\n"


@pytest.mark.parametrize(("body", "count"), [
    ("", "0"),
    (loop("%c0", "%c16"), "17"),
    (loop("%thread", "%n", "%c16"), "ceildiv(max(0, n), 16) + 1"),
    (loop("%c0", "%c16", inside=loop("%c0", "%i", index="j")), "17*17"),  # at most 15 inside, and one pass that leaves
    ("%start = mul %block, %c16 : i64\n%end = add %start, %c16 : i64\n%stop = min %end, %n : i64\n" + loop("%start", "%stop"), "min(16, n) + 1"),
    ("%quarter = floordiv %n, %c16 : i64\n" + loop("%c0", "%quarter"), "max(0, floordiv(n, 16)) + 1"),
    ("%rest = mod %thread, %c16 : i64\n" + loop("%c0", "%rest"), "16"),
    (loop("%c0", "%count"), "max(0, count$int) + 1"),
])  # fmt: skip
def test_counts(body: str, count: str) -> None:
    found = turns(body)
    assert not found.open_ended
    values = [{"n": n, "count$int": k} for n in (0, 1, 15, 16, 1000) for k in (-3, 0, 7)]
    expected = [eval(count.replace("$int", ""), {"ceildiv": lambda a, b: -(-a // b), "floordiv": lambda a, b: a // b}, {"n": v["n"], "count": v["count$int"]}) for v in values]
    assert [found.count.evaluate(v) for v in values] == expected


def test_a_branch_counts_both_sides_where_threads_part() -> None:
    sides = "{\n" + loop("%c0", "%n") + "yield\n} {\n" + loop("%c0", "%c16", index="j") + "yield\n}\n"
    apart = turns("%less = lt %thread, %c1 : bool\nif %less " + sides)
    together = turns("%less = lt %block, %c1 : bool\nif %less " + sides)
    assert apart.count.evaluate({"n": 100}) == 101 + 17
    assert together.count.evaluate({"n": 100}) == 101 + 1
    assert together.count.evaluate({"n": 2}) == 17 + 1


def test_ends_from_memory_are_not_known() -> None:
    found = turns("%e = load %x, %c0 : i32\n%end = cast %e {dtype = i64} : i64\n" + loop("%c0", "%end"))
    assert found.open_ended
    within = turns("%e = load %x, %c0 : i32\n%low = cast %e {dtype = i64} : i64\n%high = add %low, %c16 : i64\n" + loop("%low", "%high"))
    assert not within.open_ended
    assert within.count.constant == 17
