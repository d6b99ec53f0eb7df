"""A strategy for random explicit kernels: Python source that is free of races by construction.

A kernel has three i32 variables and an f32 one, and works on them with arithmetic, loads, conditions, loops with `break` and `continue`, `while`,
device functions, shuffles, votes, and exchanges through shared memory between barriers. What needs all threads (barriers, shuffles,
votes) is only made where all of them come: at the top, in loops of a constant length, in conditions that are the same for all.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis import strategies as st

import tilewright as tw

VARIABLES = ("a", "b", "c")
INPUTS = 97
"""Elements of the array that is read."""
_numbers = count()


@dataclass
class SimtKernel:
    """Source, launch and the kernel itself."""

    source: str
    grid: int
    block: int

    def __repr__(self) -> str:
        return f"grid {self.grid}, block {self.block}\n{self.source}"

    def kernel(self) -> Any:
        """The function, with its source where `inspect` finds it."""
        path = f"<fuzzed {next(_numbers)}>"
        linecache.cache[path] = (len(self.source), None, self.source.splitlines(keepends=True), path)
        names: dict[str, Any] = {"tw": tw}
        exec(compile(self.source, path, "exec"), names)
        return names["fuzzed"]


@dataclass
class _Writer:
    draw: Any
    block: int
    lines: list[str] = field(default_factory=list)
    loops: int = 0

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def number(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def add(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    # -- expressions --------------------------------------------------------------------------------------------------

    def atom(self) -> str:
        return str(self.pick(*VARIABLES, "t", "i", str(self.number(-9, 40))))

    def expression(self) -> str:
        a, b = self.atom(), self.atom()
        return str(self.pick(
            f"{a} + {b}", f"{a} - {b}", f"{a} * {b}", f"{a} ^ {b}", f"{a} & {b}", f"{a} | {b}", f"min({a}, {b})", f"max({a}, {b})",
            f"{a} // {self.pick(1, 2, 3, 7)}", f"{a} % {self.pick(1, 2, 5, 13)}", f"({a} << {self.number(0, 4)})", f"({a} >> {self.number(0, 4)})",
            f"x[({a}) % {INPUTS}]", f"({a} if {self.condition()} else {b})", f"mixed({a}, {b})", f"-{a}",
        ))  # fmt: skip

    def condition(self) -> str:
        return f"{self.atom()} {self.pick('<', '<=', '==', '!=', '>', '>=')} {self.atom()}"

    # -- statements ---------------------------------------------------------------------------------------------------

    def assign(self, depth: int) -> None:
        self.add(depth, f"{self.pick(*VARIABLES)} {self.pick('=', '+=', '^=', '=')} {self.expression()}")

    def float(self, depth: int) -> None:
        """Sums and products, which every device rounds alike, kept within bounds."""
        number = f"tw.f32({self.pick(*VARIABLES)} % {self.pick(3, 8, 17)})"
        self.add(depth, self.pick(
            f"f = f * {self.pick('0.5', '0.75', '-1.25', '0.1')} + {number}", f"f = f - {number} * 0.3", f"f = f if f < {number} else -f",
            f"f = min(max(f, {number} - 9.0), {number} + 9.5)", f"f = {number} / 7.0 - f", "f = abs(f) + 0.5",
        ))  # fmt: skip
        self.add(depth, "f = min(max(f, -1000.0), 1000.0)")
        if self.pick(True, False):
            self.add(depth, f"{self.pick(*VARIABLES)} += tw.i32(f)")

    def exchange(self, depth: int) -> None:
        """Through shared memory: each thread writes its own element and reads another's."""
        source, target, step = self.pick(*VARIABLES), self.pick(*VARIABLES), self.number(0, self.block)
        self.add(depth, f"s[t] = {source}")
        self.add(depth, "tw.gpu_sync()")
        self.add(depth, f"{target} = {self.pick(f's[(t + {step}) % {self.block}]', f's[{self.block - 1} - t]', f's[abs({source}) % {self.block}]')}")
        self.add(depth, "tw.gpu_sync()")

    def counted(self, depth: int) -> None:
        """Counts of all threads in a few bins."""
        variable = self.pick(*VARIABLES)
        self.add(depth, "if t < 4:")
        self.add(depth + 1, "bins[t] = 0")
        self.add(depth, "tw.gpu_sync()")
        self.add(depth, f"if {self.condition()}:")
        self.add(depth + 1, f"tw.atomic_{self.pick('add', 'max', 'or', 'xor')}(bins, abs({variable}) % 4, {self.pick('1', variable, 't')})")
        self.add(depth, "tw.gpu_sync()")
        self.add(depth, f"{self.pick(*VARIABLES)} += bins[{self.number(0, 3)}]")
        self.add(depth, "tw.gpu_sync()")

    def warp(self, depth: int) -> None:
        target, source = self.pick(*VARIABLES), self.pick(*VARIABLES)
        width = self.pick(2, 8, 32)
        word = self.pick(
            f"tw.shuffle_xor({source}, {self.number(0, width - 1)}, width={width})", f"tw.shuffle_up({source}, {self.number(0, width)}, width={width})",
            f"tw.shuffle_down({source}, {self.number(0, width)}, width={width})", f"tw.shuffle({source}, {self.number(0, 31)}, width={width})",
            f"tw.i32(tw.ballot({self.condition()}) & 1023)", f"tw.i32(tw.vote_any({self.condition()}))", f"tw.i32(tw.vote_all({self.condition()}))",
        )  # fmt: skip
        self.add(depth, f"{target} = {word}")
        if self.pick(True, False):
            self.add(depth, f"f = tw.shuffle_xor(f, {self.number(0, 31)})")

    def branch(self, depth: int, uniform: bool, size: int) -> None:
        same = uniform and self.pick(True, False)
        self.add(depth, f"if {self.pick('tw.block.x % 2 == 0', 'n > 50', 'n > 500') if same else self.condition()}:")
        self.statements(depth + 1, same, size - 1)
        if self.pick(True, False):
            self.add(depth, "else:")
            self.statements(depth + 1, same, size - 1)

    def loop(self, depth: int, uniform: bool, size: int) -> None:
        self.loops += 1
        index = f"k{self.loops}"
        length = self.pick("3", "n % 5", f"abs({self.pick(*VARIABLES)}) % 4", "t % 3")
        same = uniform and length in ("3", "n % 5")
        self.add(depth, f"for {index} in range({length}):")
        if not same and self.pick(True, False):
            self.add(depth + 1, f"if {self.condition()}:")
            self.add(depth + 2, self.pick("break", "continue"))
        self.statements(depth + 1, same, size - 1)
        self.add(depth + 1, f"{self.pick(*VARIABLES)} += {index}")

    def repeated(self, depth: int, size: int) -> None:
        self.loops += 1
        index = f"w{self.loops}"
        self.add(depth, f"{index} = 0")
        self.add(depth, f"while {index} < {self.number(1, 5)} and {self.condition()}:")
        self.add(depth + 1, f"{index} += 1")
        self.statements(depth + 1, False, size - 1)

    def statements(self, depth: int, uniform: bool, size: int) -> None:
        for _ in range(self.number(1, 3)):
            kinds = ["assign", "assign", "float"]
            if size > 0:
                kinds += ["branch", "loop", "repeated"]
            if uniform:
                kinds += ["exchange", "counted", "warp", "warp"]
            kind = self.pick(*kinds)
            if kind in ("branch", "loop"):
                getattr(self, kind)(depth, uniform, size)
            elif kind == "repeated":
                self.repeated(depth, size)
            else:
                getattr(self, kind)(depth)


@st.composite
def simt_kernels(draw: st.DrawFn) -> SimtKernel:
    block = draw(st.sampled_from((32, 64, 96, 128)))
    grid = draw(st.integers(1, 3))
    writer = _Writer(draw, block)
    head = (
        "@tw.device", "def mixed(p, q):", "    if p > q:", "        return p - q", "    return p * 3 + q", "",
        "@tw.gpu", "def fuzzed(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.i32], n: tw.i32):",
        f"    s = tw.shared({block}, tw.i32)", "    bins = tw.shared(4, tw.i32)", "    t = tw.i32(tw.thread.x)", "    i = tw.i32(tw.gpu_thread_id())",
        f"    a, b, c, f = x[i % {INPUTS}], t + 1, tw.i32(7), tw.f32(0.5)",
    )  # fmt: skip
    writer.lines += head
    writer.statements(1, True, 3)
    writer.statements(1, True, 2)
    writer.add(1, "y[i] = a + 31 * b + 1009 * c + tw.bitcast(f, tw.i32)")
    return SimtKernel("\n".join(writer.lines) + "\n", grid, block)
