"""More of a kernel: ordered loops around grids with arrays that change places, arrays in place, running sums.

In: a drawing under way. Out: statements, inputs and tags added to it. All of it comes from a random stream of its own, so that the rest
of a seed's kernel does not depend on it. What is drawn is legal by the rules of `draw`.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from .arithmetic import KINDS
from .model import (
    Accumulate,
    Binary,
    Expr,
    Extent,
    For,
    Input,
    Lit,
    Load,
    Make,
    Range,
    Set,
    Size,
    Stmt,
    Store,
    Swap,
    Var,
)

if TYPE_CHECKING:
    from .draw import Drawing, Place

IN_PLACE_LAYOUTS = ("contiguous", "contiguous", "negative", "padded", "permuted")
"""Layouts that calls accept for arrays in place: every element has its own, aligned memory."""
STEP_POINTS = 70
"""Iterations of a nest inside a step."""


class Steps:
    """What is added to one drawing."""

    def __init__(self, drawing: Drawing) -> None:
        self.d = drawing
        self.r = random.Random(f"steps {drawing.seed}")

    def chance(self, percent: float) -> bool:
        return self.r.random() * 100 < percent

    def first(self) -> None:
        """Before all nests: arrays in place, which any nest may then read and change."""
        if self.chance(14):
            self.with_own_stream(self.array_in_place)

    def last(self) -> None:
        """After all nests."""
        given = any(i.written for i in self.d.inputs)
        for percent, act in ((14, self.time_steps), (8, self.elimination), (14, self.running), (100 * given, self.into_arrays_in_place)):
            if self.chance(percent):
                self.with_own_stream(act)

    def with_own_stream(self, act: object) -> None:
        """The drawing's own choices come from this stream, too, meanwhile."""
        before, self.d.r = self.d.r, self.r
        act()  # type: ignore[operator]
        self.d.r = before

    # -- arrays in place ---------------------------------------------------------------------------------------------

    def array_in_place(self) -> None:
        for _ in range(2 if self.chance(25) else 1):
            dims = [d for d in self.d.dims if self.d.dims[d]] or list(self.d.dims)
            shape = tuple(Size(self.r.choice(dims)) for _ in range(self.r.choice((1, 1, 2))))
            if self.d.elements(shape) > 2 * STEP_POINTS:
                shape = shape[:1]
            name, dtype = self.d.name("y"), self.d.dtype()
            layout = self.r.choice(IN_PLACE_LAYOUTS)
            self.d.inputs.append(Input(name, dtype, shape, layout, style=self.d.style, written=True))
            self.d.made[name] = dtype, shape
            self.d.tags.add("array in place")

    def into_arrays_in_place(self) -> None:
        """A grid that writes some elements of an array in place, or combines into elements that data decide."""
        given = [i for i in self.d.inputs if i.written and all(self.d.value(s) for s in i.shape)]
        if not given:
            return
        from .draw import Place, Scope

        target = self.r.choice(given)
        places = [Place(self.d.name("i"), s) for s in target.shape]
        held = self.d.made.pop(target.name)
        scope = Scope(places, [])
        if self.chance(40) and len(places) == 1:
            size = Size(self.r.choice(list(self.d.dims)))
            index = Place(self.d.name("i"), size)
            scope = Scope([index], [])
            numbers = self.d.index_input((size,), target.shape[0])
            found = next(i for i in self.d.inputs if i.name == numbers)
            op = self.d.scatter_op(target.dtype) or ("|" if target.dtype == "bool" else "max")
            value: Expr = self.d.cast_to(self.d.expr(scope, 1), target.dtype)
            body: list[Stmt] = [Store(target.name, target.dtype, (Load(found.dtype, numbers, (index.expr,)),), value, op)]
            self.d.add_nest([index.name], [Range(Lit("i64", 0), Extent("i64", size))], body)
            self.d.tags |= {"scatter", "grid scatter"}
        else:
            ranges = []
            for place in places:
                bounds, place.lowest, _ = self.d.range_over(place.size, [])
                ranges.append(bounds)
            value = self.d.stored(self.d.expr(scope, 2), target.dtype)
            self.d.add_nest([p.name for p in places], ranges, [Store(target.name, target.dtype, tuple(p.expr for p in places), value)])
        self.d.made[target.name] = held

    # -- ordered loops -----------------------------------------------------------------------------------------------

    def count(self) -> tuple[Expr, Size]:
        """How often a step runs, as an expression and as the size of an axis that the step's index can run along."""
        small = [d for d, e in self.d.dims.items() if 0 < e <= 5]
        size = Size(self.r.choice(small)) if small and self.chance(60) else Size("", 1, self.r.randint(1, 4))
        return Extent("i64", size), size

    def array_to_step(self) -> str:
        """An array the kernel made that is small enough, or a new one; wholly written."""
        ready = [n for n, (_, s) in self.d.made.items() if s and self.d.elements(s) <= STEP_POINTS and not self.is_given(n)]
        if ready and self.chance(40):
            return self.r.choice(ready)
        dims = [d for d, e in self.d.dims.items() if e <= STEP_POINTS] or list(self.d.dims)
        shape = tuple(Size(self.r.choice(dims)) for _ in range(self.r.choice((1, 1, 2))))
        shape = shape if self.d.elements(shape) <= STEP_POINTS else shape[:1]
        return self.fresh(shape, self.d.dtype())

    def fresh(self, shape: tuple[Size, ...], dtype: str) -> str:
        """An array of values from an input."""
        from .draw import Place, Scope

        name = self.d.name("t")
        places = [Place(self.d.name("i"), s) for s in shape]
        value = self.d.stored(self.d.expr(Scope(places, []), 1), dtype)
        self.d.body.append(Make(name, dtype, shape))
        ranges = tuple(Range(Lit("i64", 0), Extent("i64", s)) for s in shape)
        store = Store(name, dtype, tuple(p.expr for p in places), value)
        self.d.body.append(For(tuple(p.name for p in places), ranges, (store,), grid=True))
        self.d.made[name] = dtype, shape
        return name

    def is_given(self, name: str) -> bool:
        return any(i.name == name for i in self.d.inputs)

    def time_steps(self) -> None:
        """`for t in range(steps):` with grids that read one array and write another; the two change places."""
        from .draw import Place, Scope

        now = self.array_to_step()
        dtype, shape = self.d.made[now]
        after = self.d.name("t")
        # What no step writes of it is seen after the swap.
        self.d.body.append(Make(after, dtype, shape, self.r.choice((0, 0, 1))))
        stop, size = self.count()
        step = Place(self.d.name("t"), size)
        places = [Place(self.d.name("i"), s) for s in shape]
        scope = Scope([step, *places] if self.chance(50) else list(places), [])
        body: list[Stmt] = []
        if self.chance(25):
            stmts, variable = self.d.reduction(Scope([step], []), STEP_POINTS)
            body += stmts
            scope.variables.append(variable)
        ranges = []
        for place in places:
            bounds = Range(Lit("i64", 0), Extent("i64", place.size))
            if self.chance(25):
                bounds, place.lowest, _ = self.d.range_over(place.size, [step])
            ranges.append(bounds)
        indices = self.d.fit(shape, Scope(list(places), []))
        before: Expr = Load(dtype, now, indices if indices is not None else tuple(p.expr for p in places))
        value = self.d.stored(self.d.binary(before, self.d.expr(scope, 1)), dtype)
        body.append(For(tuple(p.name for p in places), tuple(ranges), (Store(after, dtype, tuple(p.expr for p in places), value),), grid=True))
        if self.chance(75):
            body.append(Swap((now, after)))
        if self.chance(30):
            body += self.own_update(now, step)
        self.d.body.append(For((step.name,), (Range(Lit("i64", 0), stop),), tuple(body)))
        self.d.made[after] = dtype, shape
        self.d.tags.add("ordered")

    def own_update(self, name: str, step: Place) -> list[Stmt]:
        """A grid that changes each element from itself."""
        from .draw import Place, Scope

        dtype, shape = self.d.made.pop(name)
        places = [Place(self.d.name("i"), s) for s in shape]
        own = Load(dtype, name, tuple(p.expr for p in places))
        value = self.d.stored(self.d.binary(own, self.d.expr(Scope([step, *places], []), 1)), dtype)
        self.d.made[name] = dtype, shape
        ranges = tuple(Range(Lit("i64", 0), Extent("i64", s)) for s in shape)
        return [For(tuple(p.name for p in places), ranges, (Store(name, dtype, own.indices, value),), grid=True)]

    def elimination(self) -> None:
        """`for t in range(n): for i in tw.grid(range(t + 1, n)):` each element from itself and from the step's own one."""
        from .draw import Place, Scope

        small = [d for d, e in self.d.dims.items() if 0 < e <= 12]
        if not small:
            return
        size = Size(self.r.choice(small))
        given = [i.name for i in self.d.inputs if i.written and i.shape == (size,)]
        name = self.r.choice(given) if given and self.chance(50) else self.fresh((size,), self.d.dtype())
        dtype, shape = self.d.made.pop(name)
        step, place = Place(self.d.name("t"), size), Place(self.d.name("i"), size)
        own, pivot = (Load(dtype, name, (p.expr,)) for p in (place, step))
        other: Expr = self.d.binary(pivot, self.d.expr(Scope([place], []), 1)) if self.chance(60) else pivot
        value = self.d.stored(self.d.binary(own, other), dtype)
        self.d.made[name] = dtype, shape
        bounds = Range(Binary("i64", "+", step.expr, Lit("i64", 1), "i64"), Extent("i64", size))
        inner = For((place.name,), (bounds,), (Store(name, dtype, (place.expr,), value),), grid=True)
        self.d.body.append(For((step.name,), (Range(Lit("i64", 0), Extent("i64", size)),), (inner,)))
        self.d.tags |= {"ordered", "triangular"}

    # -- running sums ------------------------------------------------------------------------------------------------

    def running(self) -> None:
        """A running sum, product, minimum or the like along an axis, with or without its own element, forwards or backwards."""
        from .draw import Place, Scope

        dims = list(self.d.dims)
        along = Place(self.d.name("i"), Size(self.r.choice(dims)))
        rows = [Place(self.d.name("i"), Size(self.r.choice([d for d in dims if self.d.dims[d] * self.d.value(along.size) <= 2 * STEP_POINTS] or dims)))]
        if self.chance(50) or self.d.elements((rows[0].size, along.size)) > 4 * STEP_POINTS:
            rows = []
        term = self.d.load(Scope([*rows, along], []))
        if self.chance(30):
            term = self.d.binary(term, None)
        op = self.r.choice(("+", "+", "+", "*", "min", "max"))
        if term.dtype == "bool":
            term = self.d.cast_to(term, "i32")
        dtype, kind = term.dtype, KINDS[term.dtype]
        variable, name, held = self.d.name("s"), self.d.name("t"), self.d.dtype()
        first: int | float = int(op == "*")
        if op in ("min", "max"):
            first = max(kind.low, -100) if kind.kind != "f" else -2.5
        start = Set(variable, dtype, Lit(dtype, float(first) if kind.kind == "f" else first), fixed=True)
        add = Accumulate(variable, dtype, op, term, running=True)
        order = [*rows, along] if not rows or self.chance(70) else [along, *rows]
        store = Store(name, held, tuple(p.expr for p in order), self.d.stored(Var(dtype, variable), held))
        pair: tuple[Stmt, ...] = (store, add) if self.chance(30) else (add, store)
        bounds = Range(Lit("i64", 0), Extent("i64", along.size))
        if self.chance(25) and self.d.value(along.size):
            bounds = Range(Extent("i64", Size(along.size.dim, 1, -1)), Lit("i64", -1), -1)
        nest: tuple[Stmt, ...] = (start, For((along.name,), (bounds,), pair))
        self.d.body.append(Make(name, held, tuple(p.size for p in order)))
        if rows:
            nest = (For((rows[0].name,), (Range(Lit("i64", 0), Extent("i64", rows[0].size)),), nest, grid=True),)
        self.d.body += nest
        self.d.made[name] = held, tuple(p.size for p in order)
        self.d.tags.add("running")

