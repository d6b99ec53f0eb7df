"""An explicit kernel from a seed: several statements for each thread, with branches, loops, shared memory, shuffles and atomics.

Free of races: a thread writes its own element of arrays of global memory, exchanges through shared memory between barriers, and
uses atomics whose order does not matter. What all threads meet at stands where all of them come.
"""

from __future__ import annotations

import random

from .arithmetic import FLOATS, KINDS, meet
from .draw import COMPARISONS, DISTINCT
from .model import (
    Atomic,
    Binary,
    Cast,
    Choice,
    Compare,
    Expr,
    For,
    Function,
    If,
    Index,
    Input,
    Kernel,
    Lit,
    Load,
    Range,
    Set,
    Shared,
    Shuffle,
    Size,
    Stmt,
    Store,
    Sync,
    Unary,
    Var,
    While,
    trimmed,
)

VARIABLES = ("i32", "i32", "f32", "i64", "u32", "f64", "u8", "i16")
MEMORY = tuple(KINDS)
LENGTH = 41


class ExplicitDrawing:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.seed = seed
        self.block_size = self.r.choice((32, 32, 64, 96))
        self.grid = self.r.randint(1, 2)
        self.count = 0
        self.variables: list[tuple[str, str]] = []
        self.inputs: list[Input] = []
        self.shared: list[Stmt] = []
        self.indices: list[str] = []
        self.tags = {"explicit"}
        self.hostile = self.r.random() < 0.45

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def layout(self) -> str:
        if not self.hostile:
            return "contiguous"
        layout = self.r.choice((*DISTINCT, "zero"))
        if layout not in ("padded", "permuted"):
            self.tags.add("hostile")
        return layout

    # -- expressions -------------------------------------------------------------------------------------------------

    def within(self, length: int) -> Expr:
        """An index below a length, of the thread or of data."""
        kind = self.r.random()
        if kind < 0.5:
            return Binary("i32", "%", Index("i32", "i"), Lit("i32", length), "i32")
        integers = [(n, d) for n, d in self.variables if d == "i32"]
        if integers and kind < 0.9:
            self.tags.add("gather")
            name, dtype = self.r.choice(integers)
            return Binary(dtype, "%", Var(dtype, name), Lit(dtype, length), dtype)
        return Binary("i32", "%", Binary("i32", "*", Index("i32", "t"), Lit("i32", 5), "i32"), Lit("i32", length), "i32")

    def load(self) -> Expr:
        known = [i for i in self.inputs if not i.written]
        if not known or (len(known) < 4 and self.r.random() < 0.4):
            name, dtype = self.name("x"), self.r.choice(MEMORY)
            known = [Input(name, dtype, (Size("", 1, LENGTH),), self.layout(), style=self.r.choice(("small", "small", "wide")))]
            self.inputs += known
        found = self.r.choice(known)
        load = Load(found.dtype, found.name, (self.within(LENGTH),))
        return Cast("f32", load) if KINDS[found.dtype].small else load

    def leaf(self) -> Expr:
        kind = self.r.random()
        if self.variables and kind < 0.6:
            name, dtype = self.r.choice(self.variables)
            return Var(dtype, name)
        if kind < 0.7:
            return Index("i32", self.r.choice("ti"))
        return self.load()

    def literal(self, dtype: str) -> Lit:
        if dtype in FLOATS:
            return Lit(dtype, self.r.choice((0.5, 2.0, -1.25, 3.0)))
        return Lit(dtype, self.r.choice((1, 2, 3, 7) if KINDS[dtype].kind == "u" else (1, 2, 3, -5)))

    def expr(self, depth: int = 2) -> Expr:
        kind = self.r.random()
        if depth == 0 or kind < 0.2:
            found = self.leaf()
            return Cast("i32", found) if found.dtype == "bool" else found
        if kind < 0.65:
            a = self.expr(depth - 1)
            b: Expr = self.literal(a.dtype) if self.r.random() < 0.3 else self.expr(depth - 1)
            return self.binary(a, b)
        if kind < 0.75:
            a = self.expr(depth - 1)
            if a.dtype in FLOATS:
                return Function(a.dtype, self.r.choice(("floor", "sqrt", "trunc")), Unary(a.dtype, "abs", a))
            return Unary(a.dtype, self.r.choice(("-", "~", "abs") if KINDS[a.dtype].kind == "i" else ("~",)), a)
        if kind < 0.9:
            return Cast(self.r.choice(VARIABLES), self.expr(depth - 1))
        a, b = self.expr(depth - 1), self.expr(depth - 1)
        b = b if a.dtype == b.dtype else Cast(a.dtype, b)
        return Choice(a.dtype, self.condition(), a, b)

    def binary(self, a: Expr, b: Expr) -> Expr:
        at = meet(a.dtype, b.dtype)
        if at is None or KINDS[at].small:
            b, at = Cast(a.dtype, b), a.dtype
        if at in FLOATS:
            return Binary(at, self.r.choice(("+", "-", "*", "min", "max", "/")), a, b, at)
        op = self.r.choice(("+", "-", "*", "min", "max", "&", "|", "^", "//", "%", "<<", ">>"))
        if op in ("<<", ">>"):
            at = a.dtype  # a shift has the dtype of what is shifted
        return Binary(at, op, a, b, at)

    def condition(self) -> Expr:
        a = self.expr(1)
        if self.r.random() < 0.6:
            return Compare("bool", self.r.choice(COMPARISONS), a, self.literal(a.dtype), a.dtype)
        b = self.expr(0)
        at = meet(a.dtype, b.dtype)
        if at is None:
            b, at = Cast(a.dtype, b), a.dtype
        return Compare("bool", self.r.choice(COMPARISONS), a, b, at)

    # -- statements --------------------------------------------------------------------------------------------------

    def declared(self) -> Stmt:
        dtype, value = self.r.choice(VARIABLES), self.expr(2)
        name = self.name("v")
        self.variables.append((name, dtype))
        return Set(name, dtype, value, fixed=True)

    def assigned(self) -> Stmt:
        name, dtype = self.r.choice(self.variables)
        return Set(name, dtype, self.expr(2), declares=False, fixed=True)

    def statements(self, depth: int, together: bool, count: int) -> list[Stmt]:
        found: list[Stmt] = []
        for _ in range(count):
            kind = self.r.random()
            if together and kind < 0.3:
                found += self.meeting()
            elif depth and kind < 0.45:
                before = list(self.variables)
                cond = self.condition()
                then = tuple(self.statements(depth - 1, False, self.r.randint(1, 2)))
                other = tuple(self.statements(depth - 1, False, 1)) if self.r.random() < 0.5 else ()
                self.variables = before
                found.append(If(cond, then, other))
            elif depth and kind < 0.6:
                found.append(self.loop(depth, together))
            elif depth and kind < 0.68:
                before = list(self.variables)
                counter = self.name("c")
                cond = self.condition()
                self.variables.append((counter, "i32"))
                held = [v for v in self.variables if v[0] != counter]
                self.variables = held
                found.append(While(counter, self.r.randint(1, 4), cond, tuple(self.statements(depth - 1, False, 1))))
                self.variables = before
                self.tags.add("while")
            elif kind < 0.76:
                found.append(self.counted())
            else:
                found.append(self.assigned())
        return found

    def loop(self, depth: int, together: bool) -> Stmt:
        before = list(self.variables)
        index = self.name("k")
        uniform = together and self.r.random() < 0.5
        stop: Expr = Lit("i32", self.r.randint(1, 4)) if uniform else Binary("i32", "%", Index("i32", "t"), Lit("i32", self.r.randint(2, 5)), "i32")
        name, dtype = self.r.choice(self.variables)
        step: Stmt = Set(name, dtype, Binary("i64", "+", Cast("i64", Var(dtype, name)), Index("i64", index), "i64"), declares=False, fixed=True)
        body = (*self.statements(depth - 1, uniform, 1), step)
        self.variables = before
        return For((index,), (Range(Lit("i32", 0), stop, self.r.choice((1, 1, 2))),), body)

    def meeting(self) -> list[Stmt]:
        """Something all threads do together."""
        name, dtype = self.r.choice(self.variables)
        if self.r.random() < 0.3 and dtype in ("i32", "f32", "u32", "i64", "f64"):
            self.tags.add("shuffle")
            return [Set(name, dtype, Shuffle(dtype, Var(dtype, name), self.r.randint(1, 31)), declares=False)]
        other, kind = self.r.choice(self.variables)
        memory = self.name("m")
        self.shared.append(Shared(memory, kind, self.block_size))
        self.tags.add("shared")
        at: Expr = self.r.choice((
            Binary("i32", "-", Lit("i32", self.block_size - 1), Index("i32", "t"), "i32"),
            Binary("i32", "%", Binary("i32", "+", Index("i32", "t"), Lit("i32", self.r.randint(1, 40)), "i32"), Lit("i32", self.block_size), "i32"),
            self.within(self.block_size),
        ))  # fmt: skip
        return [
            Store(memory, kind, (Index("i32", "t"),), Var(kind, other)), Sync(),
            Set(name, dtype, Load(kind, memory, (at,)), declares=False, fixed=True), Sync(),
        ]  # fmt: skip

    def counted(self) -> Stmt:
        """An atomic on a few counters."""
        found = next((i for i in self.inputs if i.name == "counts"), None)
        if found is None:
            found = Input("counts", self.r.choice(("i32", "u32", "i64", "u64")), (Size("", 1, 5),), style="small", written=True)
            self.inputs.append(found)
            self.atomic = self.r.choice(("add", "add", "max", "min", "or", "xor", "and"))
        self.tags.add("scatter")
        return Atomic(self.atomic, "counts", found.dtype, self.within(5), Cast(found.dtype, self.expr(1)))

    def kernel(self) -> Kernel:
        threads = self.grid * self.block_size
        body: list[Stmt] = [self.declared() for _ in range(self.r.randint(2, 4))]
        body += self.statements(2, True, self.r.randint(2, 5))
        for _ in range(self.r.randint(1, 2)):
            name, dtype = self.name("y"), self.r.choice(MEMORY)
            self.inputs.append(Input(name, dtype, (Size("", 1, threads),), self.output_layout(), written=True))
            body.append(Store(name, dtype, (Index("i32", "i"),), Cast(dtype, self.expr(1))))
        kernel = Kernel(
            self.seed, (), tuple(self.inputs), (), (*self.shared, *body), (), explicit=True, grid=self.grid, block=self.block_size,
            tags=frozenset(self.tags | {f"dtype {i.dtype}" for i in self.inputs}),
        )  # fmt: skip
        return trimmed(kernel)

    def output_layout(self) -> str:
        return self.r.choice(("contiguous", "contiguous", *(DISTINCT if self.hostile else ())))


def draw_explicit(seed: int) -> Kernel:
    return ExplicitDrawing(seed).kernel()
