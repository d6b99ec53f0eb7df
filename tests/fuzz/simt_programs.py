"""Random explicit kernels as Python source: integers and floats, nested control flow that parts, shared memory between barriers, warp ops, atomics.

`kernel_source(rng)` gives the text of a function `kernel(x, y, out, counts)` for blocks of `THREADS` threads. It has no races, no barrier that only some threads
reach and no access outside, so every device must agree to the bit.
"""

from __future__ import annotations

import random

THREADS = (32, 48, 64, 96)
LENGTH = 256


class Writer:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.threads = rng.choice(THREADS)
        self.lines: list[str] = []
        self.integers = ["a", "b", "c"]
        self.floats = ["u", "v"]
        self.loops = 0
        self.depth = 0

    def line(self, indent: int, text: str) -> None:
        self.lines.append("    " * indent + text)

    # -- expressions ---------------------------------------------------------------------------------------------------

    def integer(self, depth: int = 2) -> str:
        r = self.rng
        if depth == 0 or r.random() < 0.25:
            return r.choice([*self.integers, *self.integers, "t32", str(r.randint(-9, 9))])
        kind = r.randrange(9)
        left, right = self.integer(depth - 1), self.integer(depth - 1)
        if kind < 4:
            return f"({left} {r.choice(['+', '-', '*', '^', '&', '|'])} {right})"
        if kind == 4:
            return f"({left} {r.choice(['//', '%'])} {r.randint(2, 9)})"
        if kind == 5:
            return f"{r.choice(['min', 'max'])}({left}, {right})"
        if kind == 6:
            return f"(tw.i32({left}) if {self.condition(depth - 1)} else tw.i32({right}))"
        if kind == 7:
            return f"x[({left}) % {LENGTH}]"
        return f"(tw.i32({left}) >> {r.randint(0, 7)})"

    def condition(self, depth: int = 1) -> str:
        r = self.rng
        sign = r.choice(["<", "<=", ">", ">=", "==", "!="])
        kind = r.randrange(5)
        if depth and kind == 0:
            return f"({self.condition(depth - 1)} {r.choice(['and', 'or'])} {self.condition(depth - 1)})"
        if kind == 1:
            return f"t {r.choice(['<', '>='])} {r.randint(0, self.threads)}"
        if kind == 2:
            return f"({self.integer(1)}) % {r.randint(2, 5)} == {r.randint(0, 1)}"
        if kind == 3:
            return f"{r.choice(self.floats)} {sign} {r.choice(self.floats)}"
        return f"{self.integer(1)} {sign} {self.integer(1)}"

    def real(self, depth: int = 2) -> str:
        r = self.rng
        if depth == 0 or r.random() < 0.3:
            return r.choice([*self.floats, *self.floats, f"tw.f32({r.choice(self.integers)} % 16)", f"{r.randint(-4, 4)}.5"])
        kind = r.randrange(5)
        left, right = self.real(depth - 1), self.real(depth - 1)
        if kind < 3:
            return f"({left} {r.choice(['+', '-', '*'])} {right})"
        if kind == 3:
            return f"{r.choice(['min', 'max'])}({left}, {right})"
        return f"y[({self.integer(1)}) % {LENGTH}]"

    # -- statements ----------------------------------------------------------------------------------------------------

    def block(self, indent: int, depth: int, together: bool, loop: str = "") -> None:
        """`together`: every thread comes here, so barriers and warp ops may stand here. `loop`: the kind of loop around it."""
        for _ in range(self.rng.randint(1, 3)):
            self.statement(indent, depth, together, loop)

    def statement(self, indent: int, depth: int, together: bool, loop: str) -> None:
        r = self.rng
        choice = r.random()
        if together and choice < 0.3:
            self.meeting(indent)
        elif depth and choice < 0.5:
            self.line(indent, f"if {self.condition()}:")
            self.block(indent + 1, depth - 1, False, loop)
            if r.random() < 0.5:
                self.line(indent, "else:")
                self.block(indent + 1, depth - 1, False, loop)
        elif depth and choice < 0.62:
            self.for_loop(indent, depth, together)
        elif depth and choice < 0.72:
            self.while_loop(indent, depth)
        elif loop and choice < 0.78:
            self.line(indent, f"if {self.condition()}:")
            self.line(indent + 1, r.choice(["break", "continue"]) if loop == "for" else "break")
        elif choice < 0.82:
            self.line(indent, f"tw.atomic_add(counts, ({self.integer(1)}) % 8, tw.i32({self.integer(1)}) % 100)")
        elif choice < 0.92:
            self.line(indent, f"{r.choice(self.integers)} = tw.i32({self.integer()})")
        else:
            self.line(indent, f"{r.choice(self.floats)} = tw.f32({self.real()})")

    def meeting(self, indent: int) -> None:
        """Something that all threads of a block, or a warp, do together."""
        r, name = self.rng, self.rng.choice(self.integers)
        kind = r.randrange(5)
        if kind < 2:
            self.line(indent, f"s[t] = {r.choice(self.integers)}")
            self.line(indent, "tw.gpu_sync()")
            place = r.choice([f"(t + {r.randint(1, 40)}) % {self.threads}", f"{self.threads - 1} - t", "t // 2", "0", f"(t * 5) % {self.threads}"])
            self.line(indent, f"{name} = s[{place}]")
            self.line(indent, "tw.gpu_sync()")
        elif kind == 2 and self.threads % 32 == 0:
            word = r.choice([f"shuffle_xor({name}, {r.randint(1, 31)})", f"shuffle({name}, (t * 3) % 32)", f"shuffle({name}, {r.randint(0, 31)})"])
            self.line(indent, f"{name} = tw.{word}")
        elif kind == 3 and self.threads % 32 == 0:
            self.line(indent, f"if tw.{r.choice(['vote_any', 'vote_all'])}({self.condition()}):")
            self.line(indent + 1, f"{name} = {name} + 1")
        else:
            self.line(indent, f"w[t] = {r.choice(self.floats)}")
            self.line(indent, "tw.gpu_sync()")
            self.line(indent, f"{r.choice(self.floats)} = w[(t + {r.randint(1, 20)}) % {self.threads}]")
            self.line(indent, "tw.gpu_sync()")

    def for_loop(self, indent: int, depth: int, together: bool) -> None:
        r = self.rng
        self.loops += 1
        uniform = together and r.random() < 0.6
        high = str(r.randint(1, 4)) if uniform else f"({self.integer(1)}) % {r.randint(2, 5)}"
        self.line(indent, f"for k{self.loops} in range({r.choice(['', '1, '])}{high}):")
        self.line(indent + 1, f"{r.choice(self.integers)} += tw.i32(k{self.loops})")
        self.block(indent + 1, depth - 1, uniform, "" if uniform else "for")

    def while_loop(self, indent: int, depth: int) -> None:
        self.loops += 1
        name = f"n{self.loops}"
        self.line(indent, f"{name} = tw.i32({self.integer(1)}) % {self.rng.randint(2, 6)}")
        self.line(indent, f"while {name} > 0 and {self.condition(0)}:")
        self.line(indent + 1, f"{name} -= 1")
        self.block(indent + 1, depth - 1, False, "while")

    def kernel(self) -> str:
        self.line(0, "import tilewright as tw")
        self.line(0, "")
        self.line(0, "@tw.gpu")
        self.line(0, "def kernel(x: tw.GpuBuffer[tw.i32], y: tw.GpuBuffer[tw.f32], out: tw.Array, reals: tw.Array, counts: tw.GpuBuffer[tw.i32]):")
        self.line(1, "t = tw.thread.x")
        self.line(1, "t32 = tw.i32(t)")
        self.line(1, f"s = tw.shared({self.threads}, tw.i32)")
        self.line(1, f"w = tw.shared({self.threads}, tw.f32)")
        self.line(1, f"i = tw.block.x * {self.threads} + t")
        self.line(1, f"a = x[i % {LENGTH}]")
        self.line(1, "b = tw.i32(tw.block.x + 1)")
        self.line(1, "c = t32")
        self.line(1, f"u = y[i % {LENGTH}]")
        self.line(1, "v = tw.f32(t)")
        for _ in range(self.rng.randint(2, 5)):
            self.statement(1, 3, True, "")
        if self.rng.random() < 0.3:
            self.line(1, f"if {self.condition()}:")
            self.line(2, "out[0, i] = -1")
            self.line(2, "return")
        for number, name in enumerate(self.integers):
            self.line(1, f"out[{number}, i] = {name}")
        for number, name in enumerate(self.floats):
            self.line(1, f"reals[{number}, i] = {name}")
        return "\n".join(self.lines) + "\n"


def kernel_source(seed: int) -> tuple[str, int]:
    """The text, and the threads of a block."""
    writer = Writer(random.Random(seed))
    return writer.kernel(), writer.threads
