"""A kernel from a seed. What is drawn is legal by construction:

- indices stay inside their arrays: extents follow from the indices, and numbers that index are drawn below the extent;
- a grid writes each element at most once, unless all that it does there combines; what else may meet (plain stores to places from data, recurrences) stands
  in a `range`, which keeps its order;
- everything that is read has been written;
- types meet without losing data, or a conversion is written.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from .arithmetic import FLOATS, INTEGERS, KINDS, carried, meet, stores
from .model import (
    Accumulate,
    Binary,
    Cast,
    Choice,
    Compare,
    Draw,
    Expr,
    Extent,
    For,
    Function,
    If,
    Index,
    Input,
    Kernel,
    Lit,
    Load,
    Logic,
    Make,
    Number,
    Range,
    Set,
    Size,
    Stmt,
    Store,
    Unary,
    Var,
    While,
    Whole,
    trimmed,
    walk,
)
from .steps import Steps
from .views import Views

EXTENTS = (1, 2, 2, 3, 3, 4, 5, 5, 7, 8, 9, 12, 16, 17, 31, 33, 40)
POINTS = 260
"""Iterations of a nest."""
FUNCTIONS = ("exp", "exp2", "log", "log2", "sin", "cos", "tan", "tanh", "sinh", "cosh", "erf", "rsqrt", "sigmoid", "sqrt", "sqrt", "floor", "ceil", "round", "trunc")
HOSTILE = ("negative", "negative", "zero", "overlapping", "misaligned", "odd", "padded", "permuted")
DISTINCT = ("negative", "misaligned", "odd", "padded", "permuted")
"""Layouts in which every element has its own memory."""
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
GATHERING = ("i8", "i32", "i32", "i64", "i64", "u8", "u16", "u32")


@dataclass
class Place:
    """An index in scope: its values are below `size`; `lowest` is the least of them."""

    name: str
    size: Size
    lowest: int = 0

    @property
    def expr(self) -> Expr:
        return Index("i64", self.name)


@dataclass
class Scope:
    places: list[Place] = field(default_factory=list)
    variables: list[tuple[str, str]] = field(default_factory=list)

    def with_places(self, *places: Place) -> Scope:
        return Scope([*self.places, *places], list(self.variables))


def whole(value: int) -> Expr:
    return Lit("i64", value)


def plus(expr: Expr, value: int) -> Expr:
    return Binary("i64", "+" if value > 0 else "-", expr, whole(abs(value)), "i64") if value else expr


class Drawing:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.r = random.Random(seed)
        self.draws = random.Random(f"draws {seed}")
        """Of its own, so that the rest of a seed's kernel does not depend on it."""
        self.is_random = self.draws.random() < 0.2
        self.views = Views(self)
        self.tags: set[str] = set()
        self.inputs: list[Input] = []
        self.numbers: list[Number] = []
        self.made: dict[str, tuple[str, tuple[Size, ...]]] = {}
        """Arrays the kernel made, wholly written."""
        self.scalars: list[tuple[str, str]] = []
        self.body: list[Stmt] = []
        self.count = 0
        self.used: set[str] = set()
        self.hostile = self.chance(54)
        self.gathers = self.chance(40)
        self.style = self.r.choice(("small",) * 6 + ("wide", "wide", "special"))
        self.palette = self.draw_palette()
        self.dims = self.draw_dims()

    # -- choices -----------------------------------------------------------------------------------------------------

    def chance(self, percent: float) -> bool:
        return self.r.random() * 100 < percent

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def draw_palette(self) -> list[str]:
        kind = self.r.random()
        if kind < 0.3:
            return ["f32", self.r.choice(FLOATS)] if self.chance(60) else self.r.sample(FLOATS, self.r.randint(1, 2))
        if kind < 0.5:
            return self.r.sample(INTEGERS, self.r.randint(1, 3))
        if kind < 0.75:
            return ["f32", self.r.choice(INTEGERS), self.r.choice(FLOATS)]
        return self.r.sample(tuple(KINDS), self.r.randint(2, 5))

    def draw_dims(self) -> dict[str, int]:
        dims = {f"n{k}": self.r.choice(EXTENTS) for k in range(self.r.choice((1, 2, 2, 3)))}
        if self.chance(2):
            dims[self.r.choice(list(dims))] = 0
            self.tags.add("empty")
        return dims

    def dtype(self) -> str:
        return self.r.choice(self.palette)

    def value(self, size: Size) -> int:
        return size.value(self.dims)

    # -- inputs ------------------------------------------------------------------------------------------------------

    def layout(self, rank: int, distinct: bool = False) -> str:
        if not self.hostile or not rank or self.chance(35):
            return "contiguous"
        layout = self.r.choice(DISTINCT if distinct else HOSTILE)
        if layout in ("padded", "permuted") or (layout == "overlapping" and rank == 1):
            return layout
        self.tags.add("hostile")
        return layout

    def new_input(self, dtype: str, shape: tuple[Size, ...]) -> str:
        name = self.name("x")
        self.inputs.append(Input(name, dtype, shape, self.layout(len(shape)), style=self.style))
        return name

    def index_input(self, shape: tuple[Size, ...], below: Size, unique: bool = False) -> str:
        """An array of indices below an extent."""
        name = self.name("g")
        top = self.value(below)
        dtype = self.r.choice([d for d in GATHERING if KINDS[d].high >= top])
        layout = self.layout(len(shape), distinct=unique)
        self.inputs.append(Input(name, dtype, shape, layout, "unique" if unique else "index", below))
        return name

    def number(self) -> Expr:
        if self.numbers and self.chance(50):
            found = self.r.choice(self.numbers)
            return Var(found.dtype, found.name)
        dtype = self.dtype()
        if KINDS[dtype].small or dtype == "bool":
            dtype = "f32"
        value = self.r.choice((0.5, 1.25, -3.0, 2.0)) if dtype in FLOATS else self.r.choice((1, 2, 3, 7))
        name = self.name("a")
        self.numbers.append(Number(name, dtype, value))
        return Var(dtype, name)

    # -- loads -------------------------------------------------------------------------------------------------------

    def form(self, place: Place, scope: Scope) -> tuple[Expr, Size]:
        """An index made of one in scope, and the extent of the axis it runs along."""
        size, expr = place.size, place.expr
        full = size.dim and size.times == 1 and not size.plus
        empty = self.value(size) == 0
        kind = self.r.choice(("plain",) * 9 + ("shift", "reverse", "double", "half", "remainder", "clamp", "less"))
        if kind == "shift":
            by = self.r.randint(1, 4)
            return plus(expr, by), replace(size, plus=size.plus + by)
        if kind == "less" and place.lowest > 0:
            return plus(expr, -self.r.randint(1, place.lowest)), size
        if empty or not full:
            return expr, size
        if kind == "reverse":
            return Binary("i64", "-", Extent("i64", replace(size, plus=-1)), expr, "i64"), size
        if kind == "double":
            return plus(Binary("i64", "*", whole(2), expr, "i64"), self.r.randint(0, 1)), replace(size, times=2)
        if kind == "half":
            return Binary("i64", "//", expr, whole(2), "i64"), size
        if kind == "remainder":
            return Binary("i64", "%", plus(expr, self.r.randint(1, 9)), Extent("i64", size), "i64"), size
        if kind == "clamp":
            return Binary("i64", "min", plus(expr, self.r.randint(1, 5)), Extent("i64", replace(size, plus=-1)), "i64"), size
        if self.gathers and self.chance(40):
            return self.gathered(place, scope)
        return expr, size

    def gathered(self, place: Place, scope: Scope, below: Size | None = None) -> tuple[Expr, Size]:
        """`g[i]`, which may be any number below an extent."""
        self.tags.add("gather")
        if below is None:
            below = self.r.choice((Size("", 1, self.r.randint(1, 9)), Size(self.r.choice(list(self.dims)))))
            if self.value(below) == 0:
                below = Size("", 1, 5)
        known = [i for i in self.inputs if i.values == "index" and i.below == below and i.shape == (place.size,)]
        name = self.r.choice(known).name if known and self.chance(60) else self.index_input((place.size,), below)
        found = next(i for i in self.inputs if i.name == name)
        return Load(found.dtype, name, (place.expr,)), below

    def load(self, scope: Scope, dtype: str = "") -> Expr:
        """An element of an array that is there, or of a new input."""
        arrays = [(n, d, s) for n, (d, s) in self.made.items()] + [(i.name, i.dtype, i.shape) for i in self.inputs if i.values == "data" and not i.written]
        if arrays and not dtype and (self.chance(55) or len(self.inputs) > 6):
            name, found, shape = self.r.choice(arrays)
            indices = self.fit(shape, scope)
            if indices is not None:
                self.used.add(name)
                return Load(found, name, indices)
        places = list(scope.places)
        self.r.shuffle(places)
        if self.chance(70):
            places = [p for p in scope.places if p in places]
        places = [p for p in places if self.chance(80)][:4]
        forms = [self.form(p, scope) for p in places]
        if self.chance(4):
            forms.insert(self.r.randint(0, len(forms)), (whole(self.r.choice((0, 1, -1))), Size("", 1, 2)))
        while forms and self.elements(s for _, s in forms) > 1200:
            forms.pop()
        forms = forms[:4]
        dtype = dtype or self.dtype()
        name = self.new_input(dtype, tuple(s for _, s in forms))
        return Load(dtype, name, tuple(e for e, _ in forms))

    def elements(self, sizes: object) -> int:
        total = 1
        for size in sizes:  # type: ignore[attr-defined]
            total *= max(1, self.value(size))
        return total

    def fit(self, shape: tuple[Size, ...], scope: Scope) -> tuple[Expr, ...] | None:
        """Indices for an array of that shape, or None where none are safe."""
        indices: list[Expr] = []
        free = list(scope.places)
        for size in shape:
            extent = self.value(size)
            same = [p for p in free if p.size == size] or [p for p in scope.places if p.size == size]
            if same and not (self.gathers and extent and self.chance(15)):
                place = self.r.choice(same) if self.chance(30) else same[0]
                if place in free:
                    free.remove(place)
                if extent and size.dim and size.times == 1 and not size.plus and self.chance(25):
                    indices.append(self.r.choice((
                        Binary("i64", "-", Extent("i64", replace(size, plus=-1)), place.expr, "i64"),
                        Binary("i64", "//", place.expr, whole(2), "i64"),
                        Binary("i64", "%", plus(place.expr, self.r.randint(1, 5)), Extent("i64", size), "i64"),
                        Binary("i64", "max", plus(place.expr, -1), whole(0), "i64"),
                    )))  # fmt: skip
                else:
                    indices.append(place.expr)
            elif not extent:
                return None
            elif scope.places and self.gathers and self.chance(60):
                indices.append(self.gathered(self.r.choice(scope.places), scope, size)[0])
            elif size.dim and scope.places and self.chance(60):
                indices.append(Binary("i64", "%", self.r.choice(scope.places).expr, Extent("i64", size), "i64"))
            else:
                indices.append(whole(0 if self.chance(60) else -1 if not size.dim else 0))
        return tuple(indices)

    def stencil(self, scope: Scope) -> Expr:
        """`x[i + 1] if i + 1 < n else 0`"""
        places = [p for p in scope.places if p.size.dim and p.size.times == 1 and not p.size.plus]
        if not places:
            return self.load(scope)
        place = self.r.choice(places)
        dtype = self.dtype()
        name = self.new_input(dtype, (place.size,))
        by = self.r.choice((-2, -1, 1, 2))
        at = plus(place.expr, by)
        cond = Compare("bool", "<", at, Extent("i64", place.size), "i64") if by > 0 else Compare("bool", ">=", at, whole(0), "i64")
        other: Expr = Load(dtype, name, (place.expr,)) if dtype == "bool" or self.chance(40) else self.literal(dtype)
        return Choice(dtype, cond, Load(dtype, name, (at,)), other)

    # -- expressions -------------------------------------------------------------------------------------------------

    def literal(self, dtype: str) -> Lit:
        kind = KINDS[dtype].kind
        if kind == "f":
            return Lit(dtype, self.r.choice((0.5, 2.0, 1.5, -1.25, 0.25, 3, 2, -1, 0.1, 0.0)))
        if kind == "b":
            return Lit("i64", self.r.choice((0, 1, 2, 3)))
        return Lit(dtype, self.r.choice((0, 1, 2, 3, 5, 7, 100) if kind == "u" else (0, 1, 2, 3, -1, -5, 100)))

    def drawn(self, scope: Scope) -> Expr:
        """A random number, by indices in scope."""
        r = self.draws
        name = r.choice(("uniform", "uniform", "normal", "randint", "bits"))
        dtype = r.choice({"bits": ("u32", "u64"), "randint": ("i32", "i64", "u32", "u64")}.get(name, ("f16", "bf16", "f32", "f32", "f64")))
        low = r.choice((0, 1, 100)) if dtype.startswith("u") else r.choice((-7, 0, 3))
        high = low + r.choice((1, 2, 6, 1000, 1 << 30))
        indices: list[Expr] = []
        for _ in range(r.choice((1, 1, 1, 2, 2, 3, 4))):
            place = r.choice(scope.places).expr
            indices.append(r.choice((place, place, place, plus(place, r.randint(1, 9)), whole(r.choice((0, 1, 1 << 40))))))
        self.tags.add("random")
        return Draw(dtype, name, r.choice((0, 1, 7, (1 << 63) - 1)), tuple(indices), low, high)

    def leaf(self, scope: Scope) -> Expr:
        if self.is_random and scope.places and self.draws.random() < 0.3:
            return self.drawn(scope)
        kind = self.r.random()
        if scope.variables and kind < 0.3:
            name, dtype = self.r.choice(scope.variables)
            return Var(dtype, name)
        if scope.places and kind < 0.4:
            return self.r.choice(scope.places).expr
        if kind < 0.45:
            return self.number()
        if self.scalars and kind < 0.52:
            name, dtype = self.r.choice(self.scalars)
            self.used.add(name)
            return Var(dtype, name)
        return self.stencil(scope) if kind < 0.57 else self.load(scope)

    def expr(self, scope: Scope, depth: int = 2) -> Expr:
        """A value with a type of its own."""
        if depth == 2 and self.chance(50):
            depth = 1
        kind = self.r.random()
        if depth == 0 or kind < 0.12:
            found = self.leaf(scope)
            return found if not weak(found) else Cast(self.dtype(), found)
        if kind < 0.6:
            return self.binary(self.expr(scope, depth - 1), self.operand(scope, depth - 1))
        if kind < 0.7:
            return self.unary(self.expr(scope, depth - 1))
        if kind < 0.78:
            return Cast(self.dtype(), self.expr(scope, depth - 1))
        if kind < 0.84:
            return self.function(self.expr(scope, depth - 1))
        if kind < 0.93:
            return self.choice(scope, depth - 1)
        return self.condition(scope, depth - 1)

    def operand(self, scope: Scope, depth: int) -> Expr | None:
        """The right side: None stands for a literal."""
        return None if self.chance(25) else self.leaf(scope) if self.chance(30) else self.expr(scope, depth)

    def together(self, a: Expr, b: Expr) -> tuple[Expr, Expr, str]:
        """Both operands, one of them converted where they would not meet."""
        if weak(a) and weak(b):
            return a, b, "i64"
        at = meet_weak(a, b)
        if at is None:
            if weak(b) or (not weak(a) and self.chance(50)):
                b, at = Cast(a.dtype, b), a.dtype
            else:
                a, at = Cast(b.dtype, a), b.dtype
        return a, b, at

    def binary(self, a: Expr, b: Expr | None) -> Expr:
        if b is None:
            lit = self.literal(a.dtype)
            b, at = lit, lit.dtype
        else:
            a, b, at = self.together(a, b)
        kind = KINDS[at].kind
        if kind == "b":
            op = self.r.choice(("&", "|", "^", "+", "*"))
            return Binary("bool", op, a, b, "bool") if op in "&|^" else Binary("i64", op, a, b, "i64")
        if kind == "f":
            op = self.r.choice(("+", "-", "*", "+", "-", "*", "+", "-", "*", "/", "/", "min", "max", "min", "max", "**", "%" if self.chance(30) else "//"))
        else:
            op = self.r.choice(("+", "-", "*", "min", "max", "&", "|", "^", "<<", ">>", "//", "%", "+", "*", "/", "**"))
        if op == "**":
            a = a if a.dtype == at else Cast(at, a)
            return Binary(at, op, a, Lit(at, self.r.choice((2, 3))), at)
        if op == "/" and kind != "f":
            return Binary("f64", op, a, b, "f64")
        if op in ("//", "%", "/") and isinstance(b, Lit) and b.value == 0:
            b = replace(b, value=3)
        return Binary(at, op, a, b, at)

    def unary(self, a: Expr) -> Expr:
        kind = KINDS[a.dtype].kind
        op = self.r.choice({"f": ("-", "abs"), "b": ("not", "~", "-"), "i": ("-", "abs", "~", "not"), "u": ("-", "~", "abs")}[kind])
        if op == "not":
            return Unary("bool", op, a)
        return Unary("i64" if kind == "b" and op == "-" else a.dtype, op, a)

    def function(self, a: Expr) -> Expr:
        if self.style != "small" and self.chance(50):
            return self.unary(a)
        name = self.r.choice(FUNCTIONS)
        if KINDS[a.dtype].kind != "f":
            return a if name in ("floor", "ceil", "round", "trunc") else Function("f64", name, a)
        return Function(a.dtype, name, a)

    def condition(self, scope: Scope, depth: int) -> Expr:
        kind = self.r.random()
        if depth > 0 and kind < 0.2:
            return Logic("bool", self.r.choice(("and", "or")), self.condition(scope, depth - 1), self.condition(scope, depth - 1))
        if kind < 0.3:
            return Unary("bool", "not", self.condition(scope, 0))
        a = self.expr(scope, depth)
        if self.chance(50):
            lit = self.literal(a.dtype)
            return Compare("bool", self.r.choice(COMPARISONS), a, lit, lit.dtype)
        a, b, at = self.together(a, self.leaf(scope))
        return Compare("bool", self.r.choice(COMPARISONS), a, b, at)

    def choice(self, scope: Scope, depth: int) -> Expr:
        a, b, at = self.together(self.expr(scope, depth), self.leaf(scope))
        return Choice(at, self.condition(scope, min(depth, 1)), a, b, self.chance(40))

    def cast_to(self, value: Expr, dtype: str) -> Expr:
        return value if value.dtype == dtype and not weak(value) else Cast(dtype, value)

    def stored(self, value: Expr, dtype: str) -> Expr:
        return value if (stores(value.dtype, dtype) and not weak(value)) else Cast(dtype, value)

    # -- statements --------------------------------------------------------------------------------------------------

    def range_over(self, size: Size, outer: list[Place]) -> tuple[Range, int, str]:
        """A range within `0..size`: full, triangular, stepped, backwards. With the least value, and a tag."""
        stop: Expr = Extent("i64", size)
        kind = self.r.random()
        same = [p for p in outer if p.size == size]
        if kind < 0.5:
            return Range(whole(0), stop), 0, ""
        if same and kind < 0.75:
            index = self.r.choice(same).expr
            if self.chance(50):
                return Range(whole(0), plus(index, 1)), 0, "triangular"
            return Range(index, stop), 0, "triangular"
        if kind < 0.9:
            start = self.r.randint(0, 2)
            return Range(whole(start), stop, self.r.randint(2, 3)), start, "stepped"
        if kind < 0.95:
            return Range(whole(1), stop), 1, ""
        return Range(Extent("i64", replace(size, plus=size.plus - 1)), whole(-1), -self.r.choice((1, 1, 2))), 0, "stepped"

    def reduction(self, scope: Scope, budget: int) -> tuple[list[Stmt], tuple[str, str]]:
        """A loop that accumulates, and its variable."""
        dims = [d for d, e in self.dims.items() if e <= budget] or [min(self.dims, key=lambda d: self.dims[d])]
        loops: list[tuple[str, Range]] = []
        inner = scope
        for _ in range(2 if self.chance(20) else 1):
            size = Size(self.r.choice(dims)) if self.chance(85) else Size("", 1, self.r.randint(1, 6))
            bounds, lowest, tag = self.range_over(size, inner.places)
            self.tags.update((tag,) if tag else ())
            name = self.name("k")
            loops.append((name, bounds))
            inner = inner.with_places(Place(name, size, lowest))
        op = self.r.choice(("+", "+", "+", "+", "-", "*", "min", "max", "min", "max", "and", "or"))
        variable = self.name("s")
        start, dtype, term = self.accumulator(op, inner, variable)
        add: Stmt = Accumulate(variable, dtype, op, term)
        if self.chance(20):
            add = If(self.condition(inner, 1), (add,))
        for name, bounds in reversed(loops):
            add = For((name,), (bounds,), (add,))
        self.tags.add("reduction")
        return [start, add], (variable, dtype)

    def accumulator(self, op: str, scope: Scope, name: str) -> tuple[Stmt, str, Expr]:
        """How a variable starts, its dtype, and a term for it."""
        if op in ("and", "or"):
            return Set(name, "bool", Lit("bool", op == "and"), fixed=True), "bool", self.condition(scope, 1)
        term = self.expr(scope, 2)
        if op in ("min", "max"):
            if term.dtype == "bool":
                term = Cast("i32", term)
            dtype = term.dtype
            first = self.load(scope_without(scope), dtype) if dtype == "f8e4m3" or self.chance(30) else None
            if first is not None:
                return Set(name, dtype, first, fixed=True), dtype, term
            kind = KINDS[dtype]
            start = float("-inf" if op == "max" else "inf") if kind.kind == "f" else kind.low if op == "max" else kind.high
            if kind.kind == "f":
                return Set(name, dtype, Lit(dtype, start)), dtype, term
            return Set(name, dtype, Lit("i64" if start <= KINDS["i64"].high else "u64", start), fixed=True), dtype, term
        if op == "*" and KINDS[term.dtype].kind == "f":
            two = Cast(term.dtype, Lit(term.dtype, 2.0))
            term = Choice(term.dtype, self.condition(scope, 0), two, Lit(term.dtype, 0.5)) if self.chance(50) else term
        if KINDS[term.dtype].kind == "f":
            first = Lit(term.dtype, 1.0 if op == "*" else 0.0)
            if self.chance(40):
                return Set(name, term.dtype, first, fixed=True), term.dtype, term
            return Set(name, term.dtype, first), term.dtype, term
        start = int(op == "*")
        if self.chance(50) and term.dtype != "bool":
            return Set(name, term.dtype, Lit(term.dtype, start), fixed=True), term.dtype, term
        wide = carried(term.dtype)
        return Set(name, wide, Lit(wide, start)), wide, term

    def locals(self, scope: Scope, budget: int) -> list[Stmt]:
        """Statements before a store: variables, conditions, loops."""
        found: list[Stmt] = []
        for _ in range(self.r.choice((0, 0, 1, 1, 2))):
            kind = self.r.random()
            if kind < 0.3:
                value = self.expr(scope, 2)
                name = self.name("v")
                found.append(Set(name, value.dtype, value))
                scope.variables.append((name, value.dtype))
            elif kind < 0.5:
                found += self.branch(scope)
            elif kind < 0.62:
                found += self.repeated(scope)
            elif kind < 0.7:
                found += self.serial(scope, budget)
            elif budget > 1:
                stmts, variable = self.reduction(scope, budget)
                found += stmts
                scope.variables.append(variable)
        return found

    def changing(self, scope: Scope) -> tuple[Stmt, str, str]:
        """A variable that will be assigned to again."""
        dtype = self.dtype()
        name = self.name("v")
        return Set(name, dtype, self.expr(scope, 1), fixed=True), name, dtype

    def assign(self, name: str, dtype: str, scope: Scope) -> Stmt:
        value = self.expr(scope, 2)
        fixed = value.dtype != dtype or mentions_sum(value, name)
        return Set(name, dtype, value, declares=False, fixed=fixed)

    def branch(self, scope: Scope) -> list[Stmt]:
        start, name, dtype = self.changing(scope)
        inner = Scope(scope.places, [*scope.variables, (name, dtype)])
        then = self.assign(name, dtype, inner)
        other = (self.assign(name, dtype, inner),) if self.chance(50) else ()
        scope.variables.append((name, dtype))
        return [start, If(self.condition(inner, 1), (then,), other)]

    def repeated(self, scope: Scope) -> list[Stmt]:
        start, name, dtype = self.changing(scope)
        counter = self.name("c")
        inner = Scope(scope.places, [*scope.variables, (name, dtype), (counter, "i32")])
        body = self.assign(name, dtype, inner)
        cond = self.condition(inner, 1)
        scope.variables.append((name, dtype))
        self.tags.add("while")
        return [start, While(counter, self.r.randint(1, 4), cond, (body,))]

    def serial(self, scope: Scope, budget: int) -> list[Stmt]:
        """A loop that carries a value in order."""
        start, name, dtype = self.changing(scope)
        index = self.name("k")
        size = Size("", 1, self.r.randint(1, min(5, max(1, budget))))
        bounds, lowest, _ = self.range_over(size, scope.places)
        inner = Scope([*scope.places, Place(index, size, lowest)], [*scope.variables, (name, dtype)])
        value = self.binary(Var(dtype, name), self.expr(inner, 1))
        scope.variables.append((name, dtype))
        return [start, For((index,), (bounds,), (Set(name, dtype, value, declares=False, fixed=True),))]

    # -- nests -------------------------------------------------------------------------------------------------------

    def domain(self, most: int = 4) -> list[Place]:
        """Indices of a nest over dims, within the budget."""
        places: list[Place] = []
        budget = POINTS
        for _ in range(self.r.choice((1, 1, 2, 2, 2, 3, 4))):
            fitting = [d for d, e in self.dims.items() if e <= budget]
            if not fitting or len(places) == most:
                break
            dim = self.r.choice(fitting)
            budget //= max(1, self.dims[dim])
            places.append(Place(self.name("i"), Size(dim)))
        return places or [Place(self.name("i"), Size("", 1, 3))]

    def elementwise(self) -> None:
        """A grid (or the same as ranges) that writes one or two new arrays, each element once."""
        places = self.domain()
        points = self.elements(p.size for p in places)
        ranges, partial = [], self.chance(22)
        for place in places:
            bounds = Range(whole(0), Extent("i64", place.size))
            if partial and self.chance(60):
                bounds, place.lowest, tag = self.range_over(place.size, [])
                self.tags.update((tag,) if tag else ())
            ranges.append(bounds)
        scope = Scope(places, [])
        body = self.locals(scope, max(1, POINTS * 4 // max(1, points)))
        guard = self.chance(10)
        stores_: list[Stmt] = []
        for _ in range(2 if self.chance(18) else 1):
            name, dtype = self.name("t"), self.dtype()
            order = list(places)
            if self.chance(25):
                self.r.shuffle(order)
            fill: int | float | None = self.r.choice((0, 0, 1)) if partial or guard else None if self.chance(85) else 0
            self.body.append(Make(name, dtype, tuple(p.size for p in order), fill))
            indices = tuple(
                Binary("i64", "-", Extent("i64", replace(p.size, plus=-1)), p.expr, "i64") if self.chance(8) and p.size.dim else p.expr for p in order
            )
            stores_.append(Store(name, dtype, indices, self.stored(self.expr(scope, 2), dtype)))
            self.pending.append((name, dtype, tuple(p.size for p in order)))
        if guard:
            stores_ = [If(self.condition(scope, 1), tuple(stores_))]
        body += stores_
        self.add_nest([p.name for p in places], ranges, body)

    def add_nest(self, names: list[str], ranges: list[Range], body: list[Stmt]) -> None:
        if self.chance(70) or (any(isinstance(s, Set | If | For | While) for s in body) and self.chance(50)):
            self.body.append(For(tuple(names), tuple(ranges), tuple(body), grid=True))
        else:
            inner = tuple(body)
            for name, bounds in reversed(list(zip(names, ranges, strict=True))):
                inner = (For((name,), (bounds,), inner),)
            self.body += inner
        for name, dtype, shape in self.pending:
            self.made[name] = dtype, shape
        self.pending.clear()

    def total(self) -> None:
        """A reduction at the top, whose value is a number."""
        stmts, (name, dtype) = self.reduction(Scope(), POINTS)
        self.body += stmts
        self.scalars.append((name, dtype))
        self.tags.add("total")

    def scan(self) -> None:
        """A loop that carries a value and stores it: in order."""
        size = Size(self.r.choice(list(self.dims)))
        name, dtype, index = self.name("t"), self.dtype(), self.name("i")
        place = Place(index, size)
        start, variable, held = self.changing(Scope())
        scope = Scope([place], [(variable, held)])
        step = Set(variable, held, self.binary(Var(held, variable), self.expr(Scope([place], []), 1)), declares=False, fixed=True)
        self.body += [Make(name, dtype, (size,)), start]
        value = self.stored(self.expr(scope, 1), dtype)
        self.body.append(For((index,), (Range(whole(0), Extent("i64", size)),), (step, Store(name, dtype, (place.expr,), value))))
        self.made[name] = dtype, (size,)
        self.tags.add("scan")

    def recurrence(self) -> None:
        """Each element from the one before, through memory."""
        size = Size(self.r.choice(list(self.dims)))
        name, dtype, index = self.name("t"), self.dtype(), self.name("i")
        place = Place(index, size, 1)
        before = Load(dtype, name, (plus(place.expr, -1),))
        value = self.stored(self.binary(before, self.expr(Scope([place], []), 1)), dtype)
        self.body += [
            Make(name, dtype, (size,), self.r.choice((0, 1))),
            For((index,), (Range(whole(1), Extent("i64", size)),), (Store(name, dtype, (place.expr,), value),)),
        ]  # fmt: skip
        self.made[name] = dtype, (size,)
        self.tags.add("recurrence")

    def scatter(self) -> None:
        """Stores to places that data or arithmetic decide: combining ones in a grid or a range, plain ones in a range or to places that are all different."""
        size = Size(self.r.choice(list(self.dims)))
        below = self.r.choice((Size("", 1, self.r.randint(1, 9)), Size(self.r.choice(list(self.dims)))))
        if not self.value(below):
            below = Size("", 1, 4)
        index, name, dtype = self.name("i"), self.name("t"), self.dtype()
        unique = self.value(size) <= self.value(below) and self.chance(35)
        scope = Scope([Place(index, size)], [])
        places = self.index_input((size,), below, unique)
        found = next(i for i in self.inputs if i.name == places)
        indices: tuple[Expr, ...] = (self.scatter_place(Load(found.dtype, places, (Index("i64", index),)), Index("i64", index), below, unique),)
        shape: tuple[Size, ...] = (below,)
        loops: list[tuple[str, Range]] = [(index, Range(whole(0), Extent("i64", size)))]
        if self.chance(30):
            second = Place(self.name("i"), Size(self.r.choice([d for d, e in self.dims.items() if e * self.value(size) <= POINTS] or ["n0"])))
            if self.value(second.size) * self.value(size) <= 2 * POINTS:
                scope.places.append(second)
                loops.append((second.name, Range(whole(0), Extent("i64", second.size))))
                indices, shape = (*indices, second.expr), (*shape, second.size)
        op = self.scatter_op(dtype)
        body: list[Stmt] = self.locals(scope, 4)
        stores = [(name, dtype, op)]
        if op and self.chance(25):
            other = self.dtype()
            stores.append((self.name("t"), other, self.scatter_op(other) or ("|" if other == "bool" else "+")))
        for target, kind, how in stores:
            value = self.stored(self.expr(scope, 2), kind)
            if how in ("min", "max", "&", "|", "^"):
                value = Cast(kind, value)
            body.append(Store(target, kind, indices, value, how))
            if self.chance(15):
                body[-1] = If(self.condition(scope, 1), (body[-1],))
            self.body.append(Make(target, kind, shape, self.r.choice((0, 0, 1))))
        inner = tuple(body)
        if op and self.chance(50):
            self.tags.add("grid scatter")
            names, ranges = zip(*loops, strict=True)
            inner = (For(tuple(names), tuple(ranges), inner, grid=True),)
        else:
            for each, bounds in reversed(loops):
                inner = (For((each,), (bounds,), inner),)
        self.body += inner
        self.made |= {target: (kind, shape) for target, kind, _ in stores}
        self.tags.add("scatter")

    def scatter_op(self, dtype: str) -> str:
        """How a scatter combines; empty where it only stores."""
        if dtype == "bool":
            return self.r.choice(("", "&", "|", "^"))
        ops = ("", "", "+", "+", "+", "-", "*", "min", "max")
        return self.r.choice(ops if KINDS[dtype].kind == "f" else (*ops, "&", "|", "^"))

    def scatter_place(self, loaded: Expr, index: Expr, below: Size, unique: bool) -> Expr:
        """Where a scatter goes: what data names, or what arithmetic makes of the index."""
        kind = self.r.random()
        if unique or kind < 0.7:
            return loaded
        if kind < 0.85:
            return Binary("i64", "%", index, Extent("i64", below) if below.dim else whole(below.plus), "i64")
        if kind < 0.95:
            top = Extent("i64", replace(below, plus=below.plus - 1)) if below.dim else whole(below.plus - 1)
            return Binary("i64", "min", Binary("i64", "//", index, whole(self.r.randint(2, 4)), "i64"), top, "i64")
        return whole(0)

    def contraction(self) -> None:
        """A sum of products: a matrix product, perhaps batched, with what is done to its factors and its sum."""
        dims = [d for d, e in self.dims.items() if e]
        sizes = [Size(self.r.choice(dims)) if dims and self.chance(70) else Size("", 1, self.r.choice((4, 8, 16, 17))) for _ in range(3)]
        while self.elements(sizes) > 8 * POINTS:
            sizes[self.r.randrange(3)] = Size("", 1, 4)
        rows, columns, inner = (Place(self.name(n), s) for n, s in zip("iik", sizes, strict=True))
        dtype = self.r.choice(("f16", "bf16", "f32", "f32", "f64", "f8e4m3", "f8e5m2", "i8", "u8", "i32"))
        factors: list[Expr] = []
        for first, second in ((rows, inner), (inner, columns)):
            places = (first, second) if self.chance(70) else (second, first)
            name = self.name("x")
            self.inputs.append(Input(name, dtype, tuple(p.size for p in places), self.layout(2), style="small"))
            factors.append(Load(dtype, name, tuple(p.expr for p in places)))
        total, name = self.name("s"), self.name("t")
        floats = dtype in FLOATS
        held = "f32" if KINDS[dtype].small and self.chance(50) else dtype if floats else self.r.choice(("i32", carried(dtype)))
        if not stores(dtype, held):
            held = carried(dtype)
        left, right = factors if held == dtype or floats else [Cast(held, f) for f in factors]
        product = Binary(left.dtype, "*", left, right, left.dtype)
        start = Set(total, held, Lit(held, 0.0 if floats else 0), fixed=True)
        add: Stmt = Accumulate(total, held, "+", product)
        scope = Scope([rows, columns], [(total, held)])
        result = self.dtype()
        value = Var(held, total) if self.chance(50) else self.binary(Var(held, total), self.operand(scope, 0))
        self.body += [
            Make(name, result, (rows.size, columns.size)),
            For((rows.name, columns.name), tuple(Range(whole(0), Extent("i64", p.size)) for p in (rows, columns)), (
                start, For((inner.name,), (Range(whole(0), Extent("i64", inner.size)),), (add,)),
                Store(name, result, (rows.expr, columns.expr), self.stored(value, result)),
            ), grid=True),
        ]  # fmt: skip
        self.made[name] = result, (rows.size, columns.size)
        self.tags.add("contraction")

    def in_place(self) -> None:
        """A grid that changes an array made before, each element from itself."""
        if not self.made:
            self.elementwise()
            return
        name = self.r.choice(list(self.made))
        dtype, shape = self.made[name]
        if not shape:
            return
        places = [Place(self.name("i"), s) for s in shape]
        scope = Scope(places, [])
        own = Load(dtype, name, tuple(p.expr for p in places))
        held = self.made.pop(name)
        value = self.stored(self.binary(own, self.expr(scope, 1)), dtype)
        op = self.r.choice(("", "", "+", "*")) if dtype != "bool" else ""
        if op:
            value = self.stored(self.expr(scope, 1), dtype)
        self.made[name] = held
        ranges = [Range(whole(0), Extent("i64", s)) for s in shape]
        self.add_nest([p.name for p in places], ranges, [Store(name, dtype, own.indices, value, op)])
        self.tags.add("in place")

    def whole_arrays(self) -> None:
        """Arithmetic on whole arrays, perhaps reduced."""
        shape = tuple(Size(self.r.choice(list(self.dims))) for _ in range(self.r.choice((1, 1, 2, 2, 3))))
        while self.elements(shape) > POINTS:
            shape = shape[1:]
        if not shape:
            shape = (Size("", 1, 4),)
        names = tuple(f"w{a}" for a in range(len(shape)))
        places = [Place(n, s) for n, s in zip(names, shape, strict=True)]

        def array(trailing: bool) -> Expr:
            rank = self.r.randint(1, len(shape)) if trailing else len(shape)
            axes = shape[len(shape) - rank :]
            known = [(n, d) for n, (d, s) in self.made.items() if s == axes] + [(i.name, i.dtype) for i in self.inputs if i.shape == axes and i.values == "data" and not i.written]
            if known and self.chance(60):
                name, dtype = self.r.choice(known)
                self.used.add(name)
            else:
                dtype = self.dtype()
                view = self.views.draw(places[len(shape) - rank :], trailing)
                name = self.new_input(dtype, view.shape)
                return Load(dtype, name, view.indices, view.text)
            return Load(dtype, name, tuple(p.expr for p in places[len(shape) - rank :]))

        value = array(False)
        for _ in range(self.r.choice((0, 1, 1, 2))):
            kind = self.r.random()
            if kind < 0.75:
                value = self.binary(value, None if self.chance(30) else array(True))
            elif kind < 0.9 and KINDS[value.dtype].kind in "fi":
                value = Unary(value.dtype, self.r.choice(("-", "abs")), value)
            else:
                value = self.function(value)
        name = self.name("t")
        if self.chance(45) and not any(self.value(s) == 0 for s in shape):
            kind = self.r.choice(("sum", "sum", "prod", "min", "max", "all", "any", "argmin", "argmax"))
            if kind in ("min", "max", "argmin", "argmax") and value.dtype == "bool":
                value = Cast("i32", value)
            axes = tuple(range(len(shape))) if len(shape) == 1 or self.chance(30) else (self.r.randrange(len(shape)),)
            if kind in ("argmin", "argmax") and len(axes) > 1:
                axes = (0,)
            dtype = {"all": "bool", "any": "bool", "argmin": "i64", "argmax": "i64"}.get(kind, value.dtype)
            if kind in ("sum", "prod") and KINDS[value.dtype].kind != "f":
                dtype = carried(value.dtype)
            self.body.append(Whole(name, dtype, names, shape, value, kind, axes))
            kept = tuple(s for a, s in enumerate(shape) if a not in axes)
            self.made[name] = dtype, kept
            if not kept:
                # A number: it is used by its name.
                del self.made[name]
                self.results.append(name)
            self.tags.add("reduction")
        else:
            if isinstance(value, Load):
                value = self.binary(value, None)
            if KINDS[value.dtype].small:
                value = Cast(value.dtype, value)
            self.body.append(Whole(name, value.dtype, names, shape, value))
            self.made[name] = value.dtype, shape
        self.tags.add("whole arrays")

    # -- the kernel --------------------------------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        self.pending: list[tuple[str, str, tuple[Size, ...]]] = []
        self.results: list[str] = []
        kinds = [self.elementwise] * 10 + [self.total, self.scan, self.recurrence, self.in_place, self.whole_arrays, self.whole_arrays, self.contraction]
        kinds += [self.scatter] * (6 if self.gathers else 1)
        more = Steps(self)
        more.first()
        for _ in range(self.r.choice((1, 1, 1, 1, 2, 2, 2, 2, 3, 3))):
            self.r.choice(kinds)()
        more.last()
        results = [*self.results]
        given = {i.name for i in self.inputs if i.written}
        results += [n for n in self.made if (n not in self.used or self.chance(25)) and n not in given]
        results += [n for n, _ in self.scalars if n not in self.used or self.chance(30)]
        if not results:
            results = [*[n for n in self.made if n not in given][-1:], *(n for n, _ in self.scalars[-1:])][:1]
        kernel = Kernel(
            self.seed, tuple(self.dims.items()), tuple(self.inputs), tuple(self.numbers), tuple(self.body), tuple(results),
        )  # fmt: skip
        kernel = trimmed(kernel)
        kernel = replace(kernel, out=self.outputs(kernel), tags=frozenset(self.tags | tags_of(kernel)))
        chance = random.Random(f"given {self.seed}")  # of its own, so that a seed draws the kernel it always drew
        return replace(kernel, given=tuple(dim for dim, _ in kernel.dims if chance.random() < 0.25))

    def outputs(self, kernel: Kernel) -> str:
        """How `out=` is given."""
        if not kernel.results or not all(n in self.made and self.made[n][1] for n in kernel.results) or self.chance(65):
            return ""
        if len(kernel.results) == 1 and self.chance(60):
            dtype, shape = self.made[kernel.results[0]]
            same = [i for i in kernel.inputs if i.dtype == dtype and [self.value(s) for s in i.shape] == [self.value(s) for s in shape]]
            same = [i for i in same if i.layout not in ("zero", "overlapping") and not i.written]
            if same:
                self.tags.add("aliasing out")
                return f"{self.r.choice(('alias', 'alias', 'shifted'))}:{self.r.choice(same).name}"
        self.tags.add("out")
        return self.r.choice(("contiguous", "padded", "negative", "permuted", "misaligned", "odd"))


def tags_of(kernel: Kernel) -> set[str]:
    ranks = {len(i.shape) for i in kernel.inputs}
    return {f"rank {r}" for r in ranks} | {f"dtype {i.dtype}" for i in kernel.inputs} | ({"explicit"} if kernel.explicit else set())


def scope_without(scope: Scope) -> Scope:
    """Outside the innermost loop."""
    return Scope(scope.places[:-2], [])


def weak(expr: Expr) -> bool:
    if isinstance(expr, Index | Extent | Lit):
        return True
    return isinstance(expr, Binary) and weak(expr.left) and weak(expr.right) and expr.op != "/"


def meet_weak(a: Expr, b: Expr) -> str | None:
    """The type two operands meet in, one of which may be a loop index."""
    if weak(a) or weak(b):
        strong = b if weak(a) else a
        return strong.dtype if KINDS[strong.dtype].kind == "f" else "i64" if strong.dtype == "bool" else meet(strong.dtype, "i64")
    return meet(a.dtype, b.dtype)


def mentions_sum(value: Expr, name: str) -> bool:
    """Whether `name = value` reads as an accumulation, whose type would be another matter."""
    return any(isinstance(n, Var) and n.name == name for n in walk(value))


def draw(seed: int) -> Kernel:
    """The kernel of a seed."""
    from .explicit import draw_explicit

    return draw_explicit(seed) if seed % 10 == 9 else Drawing(seed).kernel()
