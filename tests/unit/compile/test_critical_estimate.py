"""The static estimate of latencies: ways through the code, turns of loops, chains of instructions."""

from __future__ import annotations

import pytest

import tilewright as tw
from tilewright.base.target import parse_target
from tilewright.codegen.critical.c_function import c_function_text
from tilewright.codegen.critical.core_tables import NEOVERSE_N1, SKYLAKE
from tilewright.codegen.llvm import native
from tilewright.compile.critical import describe_critical, lower_built
from tilewright.compile.critical_estimate import LatencyEstimate
from tilewright.compile.critical_proof import SYMBOL, estimate_object

pytest.importorskip("capstone")
TARGETS = ("aarch64-neon", "x86-64-avx2")


class Numbers(tw.State):
    x: tw.f64[64]
    total: float
    count: int


@tw.critical
def nothing() -> None:
    pass


@tw.critical
def short(a: float, b: float) -> float:
    return a * b


@tw.critical
def long(a: float, b: float) -> float:
    return a * b * a * b * a * b


@tw.critical
def divided(a: float, b: float) -> float:
    return a / b


@tw.critical
def loop(s: Numbers) -> float:
    found = 0.0
    for k in range(48):
        found += s.x[k]
    return found


@tw.critical
def nested(s: Numbers) -> float:
    found = 0.0
    for i in range(5):
        for k in range(7):
            found = found * 0.5 + s.x[i + k]
    return found


@tw.critical(overflow="wrap")
def open_loop(n: int) -> int:
    found = 0
    for k in range(n):
        found = (found ^ k) * 7
    return found


@tw.critical(overflow="wrap")
def branches(a: int) -> int:
    if a > 100:
        return a // 7 + a // 11 + a // 13
    return a


@tw.critical(overflow="wrap")
def carried(s: Numbers) -> None:
    s.count = s.count * 3


def estimate(function: tw.CriticalFunction[..., object], target: str) -> LatencyEstimate:
    machine = parse_target(target)
    code = native.compile_object(c_function_text(describe_critical(function.built, lower_built(function.built, machine)), machine, SYMBOL), machine)
    return estimate_object(code)


@pytest.mark.parametrize("target", TARGETS)
def test_chains_and_loops(target: str) -> None:
    found = {f.__name__: estimate(f, target) for f in (nothing, short, long, divided, loop, nested, open_loop, branches, carried)}
    assert found["nothing"].alone <= 2
    multiply = 3 if "aarch64" in target else 4
    assert found["long"].alone == found["short"].alone + 4 * multiply
    assert found["divided"].alone >= 14
    add = 2 if "aarch64" in target else 4
    assert 48 * add <= found["loop"].alone <= 48 * add + 40
    assert max(block.turns for block in found["loop"].blocks) in (47, 48)
    assert found["nested"].steps > 35 * 3
    assert found["nested"].alone >= 35 * (5 if "aarch64" in target else 8)
    assert [f.open_loops for f in found.values()] == [0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert "1 loop(s) of unknown length counted once" in str(found["open_loop"])
    assert found["branches"].steps > 10
    # A call reads what the one before it wrote: it cannot begin sooner.
    assert found["carried"].repeated >= 6
    assert found["short"].repeated < found["short"].alone
    assert found["loop"].table().splitlines()[0].split() == ["block", "instructions", "turns", "cycles"]


def test_every_instruction_has_a_kind_and_a_pipe() -> None:
    for table in (NEOVERSE_N1, SKYLAKE):
        for _, kind in table.rows:
            assert not kind.pipe or kind.pipe in table.pipes
            assert kind.latency >= 1
            assert kind.holds >= 1
    assert NEOVERSE_N1.kind("fmadd", "d0, d1, d2, d3").latency == 4
    assert NEOVERSE_N1.kind("ldr", "x0, [x1, #0x10]").pipe == "load"
    assert NEOVERSE_N1.kind("add", "x0, x1, x2, lsl #3").latency == 2
    assert NEOVERSE_N1.kind("add", "x0, x1, x2").latency == 1
    assert SKYLAKE.kind("mov", "rax, qword ptr [rdi]").pipe == "load"
    assert SKYLAKE.kind("mov", "qword ptr [rdi], rax").pipe == "store"
    assert SKYLAKE.kind("imul", "rax, rdi").latency == 3
