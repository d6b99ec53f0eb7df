"""What a kernel computes: statements run in order, one element at a time, on the numbers of `arithmetic`.

Expressions become closures over an environment (a dict of indices and variables). Float sums are kept as lists of terms until they
are read, since any order of adding them is right. Explicit kernels run as coroutines that stop where threads meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from . import philox
from .arithmetic import (
    KINDS,
    UNKNOWN,
    Near,
    Number,
    Undecided,
    any_order_product,
    any_order_sum,
    carried,
    compare,
    computed,
    convert,
    float_binary,
    function,
    integer_binary,
    negated,
    parts,
    round_near,
    wrap,
)
from .model import (
    Accumulate,
    Atomic,
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
    Kernel,
    Lit,
    Load,
    Logic,
    Make,
    Set,
    Shared,
    Shuffle,
    Stmt,
    Store,
    Swap,
    Sync,
    Unary,
    Var,
    While,
    Whole,
)

Env = dict[str, Any]
Eval = Callable[[Env], Number]
Act = Callable[[Env], None]
STEPS = 400_000
"""Statements after which a kernel is too long to be worth it."""


class TooLong(Exception):
    pass


class Terms:
    """A float sum or product that has not been needed yet."""

    __slots__ = ("op", "running", "terms")

    def __init__(self, op: str, terms: list[Number], running: bool = False) -> None:
        self.op, self.terms, self.running = op, terms, running

    def value(self, dtype: str, digits: int | None = None) -> Number:
        if len(self.terms) == 2 and digits is None:
            return float_binary(self.op, dtype, *self.terms)
        return any_order_sum(dtype, self.terms, digits) if self.op == "+" else any_order_product(dtype, self.terms, digits)


class Cells:
    """An array: its elements in row-major order, None where nothing was written."""

    def __init__(self, dtype: str, shape: Sequence[int], data: list[Any]) -> None:
        self.dtype, self.shape, self.data = dtype, tuple(shape), data

    @staticmethod
    def of(array: np.ndarray, dtype: str) -> Cells:
        flat = np.ascontiguousarray(array).reshape(-1)
        if KINDS[dtype].small:
            flat = flat.astype(np.float32)
        data = flat.tolist()
        return Cells(dtype, array.shape, [int(v) for v in data] if dtype == "bool" else data)

    def place(self, indices: Sequence[int]) -> int:
        at = 0
        for index, extent in zip(indices, self.shape, strict=True):
            assert -1 <= index < extent and extent, f"index {index} of {extent}"
            at = at * extent + (index if index >= 0 else index + extent)
        return at

    def read(self, at: int) -> Number:
        value = self.data[at]
        assert value is not None, "an element that was never written is read"
        if isinstance(value, Terms):
            kind = KINDS[self.dtype]
            value = self.data[at] = round_near(self.dtype, value.value(computed(self.dtype), kind.digits if kind.small else None))
        return value


class Reference:
    def __init__(self, kernel: Kernel, inputs: Mapping[str, np.ndarray]) -> None:
        self.kernel = kernel
        self.dims = kernel.extents
        self.arrays = {i.name: Cells.of(inputs[i.name], i.dtype) for i in kernel.inputs}
        self.env: Env = {n.name: convert(n.dtype, n.dtype, n.value) for n in kernel.numbers}
        self.steps = 0

    def run(self) -> dict[str, Cells]:
        if self.kernel.explicit:
            self.launch()
            return {i.name: self.arrays[i.name] for i in self.kernel.inputs if i.written}
        for stmt in self.kernel.body:
            self.statement(stmt)(self.env)
        results = {}
        results |= {i.name: self.arrays[i.name] for i in self.kernel.inputs if i.written}
        for name in self.kernel.results:
            if name in self.arrays:
                results[name] = self.arrays[name]
            else:
                declared = next(s for s in self.kernel.body if isinstance(s, Set) and s.name == name)
                value = convert(declared.dtype, declared.dtype, self.variable(name, declared.dtype)(self.env))
                results[name] = Cells(declared.dtype, (), [value])
        return results

    # -- statements --------------------------------------------------------------------------------------------------

    def block(self, body: Sequence[Stmt]) -> Act:
        acts = [self.statement(s) for s in body]

        def act(env: Env) -> None:
            self.steps += len(acts)
            if self.steps > STEPS:
                raise TooLong
            for each in acts:
                each(env)

        return act

    def statement(self, stmt: Stmt) -> Act:
        if isinstance(stmt, Make):
            return lambda env: self.make(stmt.name, stmt.dtype, [s.value(self.dims) for s in stmt.shape], stmt.fill)
        if isinstance(stmt, Set):
            return self.set(stmt)
        if isinstance(stmt, Accumulate):
            return self.accumulate(stmt)
        if isinstance(stmt, Store):
            return self.store(stmt)
        if isinstance(stmt, Swap):
            return self.swap(stmt)
        if isinstance(stmt, For):
            return self.loop(stmt, 0, self.block(stmt.body))
        if isinstance(stmt, If):
            cond, then, other = self.expr(stmt.cond), self.block(stmt.then), self.block(stmt.other)
            return lambda env: then(env) if decided(cond(env)) else other(env)
        if isinstance(stmt, While):
            return self.repeat(stmt)
        if isinstance(stmt, Whole):
            return self.whole(stmt)
        raise TypeError(stmt)

    def make(self, name: str, dtype: str, shape: Sequence[int], fill: int | float | None) -> None:
        first = fill if fill is None else float(fill) if KINDS[dtype].kind == "f" else int(fill)
        self.arrays[name] = Cells(dtype, shape, [first] * math.prod(shape))

    def set(self, stmt: Set) -> Act:
        name, value, source, dtype, fixed = stmt.name, self.expr(stmt.value), stmt.value.dtype, stmt.dtype, stmt.fixed

        def act(env: Env) -> None:
            env[name] = convert(source, dtype, value(env), rounds=fixed)

        return act

    def accumulate(self, stmt: Accumulate) -> Act:
        name, dtype, op, value, source = stmt.name, stmt.dtype, stmt.op, self.expr(stmt.value), stmt.value.dtype
        read = self.variable(name, dtype)
        floats = KINDS[dtype].kind == "f"

        def act(env: Env) -> None:
            term = convert(source, dtype, value(env), rounds=False)
            if op in ("min", "max"):
                rule = float_binary if floats else integer_binary
                env[name] = rule(op, dtype, read(env), term)
            elif op in ("and", "or"):
                before = read(env)
                env[name] = UNKNOWN if UNKNOWN in (before, term) else int(bool(before and term) if op == "and" else bool(before or term))
            elif not floats:
                env[name] = integer_binary(op, dtype, read(env), term)
            else:
                env[name] = added(env[name], op, term, stmt.running)

        return act

    def swap(self, stmt: Swap) -> Act:
        def act(env: Env) -> None:
            turned = [self.arrays[n] for n in (*stmt.names[1:], stmt.names[0])]
            self.arrays.update(zip(stmt.names, turned, strict=True))

        return act

    def store(self, stmt: Store) -> Act:
        array, dtype, op, source, name = stmt.array, stmt.dtype, stmt.op, stmt.value.dtype, stmt.array
        indices, value = [self.expr(i) for i in stmt.indices], self.expr(stmt.value)
        floats = KINDS[dtype].kind == "f"

        def act(env: Env) -> None:
            cells = self.arrays[name]
            at = cells.place([i(env) for i in indices])
            if not op:
                cells.data[at] = convert(source, dtype, value(env))
                return
            term = convert(source, dtype, value(env), rounds=False)
            if floats and op in ("min", "max"):
                cells.data[at] = float_binary(op, dtype, cells.read(at), convert(source, dtype, term))
            elif floats:
                assert cells.data[at] is not None, f"{array} is accumulated into before it is written"
                cells.data[at] = added(cells.data[at], op, term)
            else:
                cells.data[at] = integer_binary(op, dtype, cells.read(at), term)

        return act

    def loop(self, stmt: For, depth: int, body: Act) -> Act:
        name, bounds = stmt.names[depth], stmt.ranges[depth]
        start, stop, step = self.expr(bounds.start), self.expr(bounds.stop), bounds.step
        inner = body if depth + 1 == len(stmt.names) else self.loop(stmt, depth + 1, body)

        def act(env: Env) -> None:
            for value in range(decided(start(env)), decided(stop(env)), step):
                env[name] = value
                inner(env)

        return act

    def repeat(self, stmt: While) -> Act:
        cond, body = self.expr(stmt.cond), self.block(stmt.body)

        def act(env: Env) -> None:
            env[stmt.counter] = 0
            while env[stmt.counter] < stmt.most and decided(cond(env)):
                body(env)
                env[stmt.counter] += 1

        return act

    def whole(self, stmt: Whole) -> Act:
        value = self.expr(stmt.value)
        source = stmt.value.dtype

        def act(env: Env) -> None:
            shape = [s.value(self.dims) for s in stmt.shape]
            kept = [a for a in range(len(shape)) if a not in stmt.axes] if stmt.reduce else list(range(len(shape)))
            found: dict[tuple[int, ...], list[Number]] = {at: [] for at in np.ndindex(*[shape[a] for a in kept])}
            for at in np.ndindex(*shape):
                env.update(zip(stmt.names, at, strict=True))
                found[tuple(at[a] for a in kept)].append(value(env))
            data = [self.reduced(stmt.reduce, source, stmt.dtype, v) if stmt.reduce else convert(source, stmt.dtype, v[0]) for v in found.values()]
            self.arrays[stmt.name] = Cells(stmt.dtype, [shape[a] for a in kept], data)

        return act

    @staticmethod
    def reduced(kind: str, source: str, dtype: str, values: list[Number]) -> Number:
        if kind in ("sum", "prod"):
            wide = carried(source)
            terms = [convert(source, wide, v, rounds=False) for v in values]
            if KINDS[wide].kind == "f":
                total = any_order_sum(wide, terms) if kind == "sum" else any_order_product(wide, terms)
                return round_near(dtype, total)
            if any(t is UNKNOWN for t in terms):
                return UNKNOWN
            return wrap(dtype, sum(terms) if kind == "sum" else math.prod(terms))
        if any(v is UNKNOWN for v in values):
            return UNKNOWN
        if kind in ("all", "any"):
            truths = [compare("!=", v, 0) for v in values]
            return UNKNOWN if any(t is UNKNOWN for t in truths) else int((all if kind == "all" else any)(truths))
        if kind in ("argmin", "argmax"):
            if any(isinstance(v, Near) or v != v for v in values):
                return UNKNOWN
            return values.index((min if kind == "argmin" else max)(values))
        total = values[0]
        for value in values[1:]:
            total = (float_binary if KINDS[source].kind == "f" else integer_binary)(kind, source, total, value)
        return convert(source, dtype, total)

    # -- expressions -------------------------------------------------------------------------------------------------

    def variable(self, name: str, dtype: str) -> Eval:
        def read(env: Env) -> Number:
            value = env[name]
            if isinstance(value, Terms):
                running, value = value.running, value.value(computed(dtype))
                if not running:
                    env[name] = value
            return value

        return read

    def expr(self, expr: Expr) -> Eval:
        if isinstance(expr, Lit):
            value = float(expr.value) if KINDS[expr.dtype].kind == "f" else int(expr.value)
            if KINDS[expr.dtype].kind == "f" and isinstance(expr.value, float):
                value = round_near(computed(expr.dtype), value)
            return lambda env: value
        if isinstance(expr, Index):
            name = expr.name
            return lambda env: env[name]
        if isinstance(expr, Extent):
            extent = expr.size.value(self.dims)
            return lambda env: extent
        if isinstance(expr, Var):
            return self.variable(expr.name, expr.dtype)
        if isinstance(expr, Load):
            return self.load(expr)
        if isinstance(expr, Binary):
            return self.binary(expr)
        if isinstance(expr, Unary):
            return self.unary(expr)
        if isinstance(expr, Function):
            inner, name, dtype, source = self.expr(expr.value), expr.name, expr.dtype, expr.value.dtype
            return lambda env: function(name, dtype, convert(source, dtype, inner(env), rounds=False))
        if isinstance(expr, Draw):
            return self.draw(expr)
        if isinstance(expr, Cast):
            inner, source, dtype = self.expr(expr.value), expr.value.dtype, expr.dtype
            return lambda env: convert(source, dtype, inner(env))
        if isinstance(expr, Compare):
            left, right = self.operands(expr.left, expr.right, expr.at)
            op = expr.op
            return lambda env: compare(op, left(env), right(env))
        if isinstance(expr, Logic):
            return self.logic(expr)
        if isinstance(expr, Choice):
            return self.choice(expr)
        raise TypeError(expr)

    def draw(self, expr: Draw) -> Eval:
        indices, name, dtype, seed = [self.expr(i) for i in expr.indices], expr.name, expr.dtype, expr.seed

        def value(env: Env) -> Number:
            at = [decided(i(env)) for i in indices]
            if name == "bits":
                return philox.word(seed, *at, bits=KINDS[dtype].bits)
            if name == "randint":
                return philox.randint(seed, expr.low, expr.high, *at)
            if name == "uniform":
                return philox.uniform(seed, *at, dtype=dtype)
            exact = philox.normal(seed, *at, dtype="f64" if dtype == "f64" else "f32")
            return round_near(dtype, Near(exact, abs(exact) * (2.0**-48 if dtype == "f64" else 2.0**-20)))

        return value

    def operands(self, left: Expr, right: Expr, at: str) -> tuple[Eval, Eval]:
        """Both in the dtype they meet in."""

        def one(expr: Expr) -> Eval:
            inner, source = self.expr(expr), expr.dtype
            if source == at:
                return inner
            return lambda env: convert(source, at, inner(env), rounds=False)

        return one(left), one(right)

    def load(self, expr: Load) -> Eval:
        name, indices = expr.array, [self.expr(i) for i in expr.indices]

        def read(env: Env) -> Number:
            cells = self.arrays[name]
            return cells.read(cells.place([i(env) for i in indices]))

        return read

    def binary(self, expr: Binary) -> Eval:
        left, right = self.operands(expr.left, expr.right, expr.at)
        op, at = expr.op, expr.at
        if op == "**":
            assert isinstance(expr.right, Lit)
            return self.power(left, int(expr.right.value), at)
        rule = float_binary if KINDS[at].kind == "f" else integer_binary
        return lambda env: rule(op, at, left(env), right(env))

    def power(self, base: Eval, exponent: int, dtype: str) -> Eval:
        def value(env: Env) -> Number:
            x = base(env)
            if KINDS[dtype].kind != "f":
                return UNKNOWN if x is UNKNOWN else wrap(dtype, x**exponent)
            total = x
            for _ in range(exponent - 1):
                total = float_binary("*", dtype, total, x)
                if isinstance(total, Near) and total.factors and exponent > 2:
                    total = Near(total.value, abs(total.value) * 2.0 ** (2 - KINDS[computed(dtype)].digits))
            return total

        return value

    def unary(self, expr: Unary) -> Eval:
        inner, dtype, source = self.expr(expr.value), expr.dtype, expr.value.dtype
        if expr.op == "not":
            return lambda env: UNKNOWN if (v := inner(env)) is UNKNOWN else int(compare("==", v, 0))
        if expr.op == "~":
            return lambda env: UNKNOWN if (v := inner(env)) is UNKNOWN else int(not v) if dtype == "bool" else wrap(dtype, ~v)

        def value(env: Env) -> Number:
            x = convert(source, dtype, inner(env), rounds=False)
            if x is UNKNOWN:
                return x
            if KINDS[dtype].kind != "f":
                return wrap(dtype, -x if expr.op == "-" else abs(x))
            if expr.op == "-":
                return negated(x)
            if isinstance(x, Near):
                return negated(x) if x.value < 0 else x
            return abs(x)

        return value

    def logic(self, expr: Logic) -> Eval:
        left, right, stop = self.expr(expr.left), self.expr(expr.right), int(expr.op == "or")

        def value(env: Env) -> Number:
            first = left(env)
            if first is UNKNOWN:
                second = right(env)
                return stop if second is not UNKNOWN and int(bool(second)) == stop else UNKNOWN
            return stop if int(bool(first)) == stop else right(env)

        return value

    def choice(self, expr: Choice) -> Eval:
        cond = self.expr(expr.cond)
        then, other = self.operands(expr.then, expr.other, expr.dtype)
        lazy = not expr.eager

        def value(env: Env) -> Number:
            which = cond(env)
            if which is UNKNOWN:
                a, b = then(env), other(env)
                return a if not isinstance(a, Near) and a == b and (a != 0 or math.copysign(1.0, a) == math.copysign(1.0, b)) else UNKNOWN
            if not lazy:
                then(env), other(env)
            return then(env) if which else other(env)

        return value

    # -- explicit kernels --------------------------------------------------------------------------------------------

    def launch(self) -> None:
        kernel = self.kernel
        code = self.thread_block(kernel.body)
        for block in range(kernel.grid):
            threads = []
            for s in (s for s in kernel.body if isinstance(s, Shared)):
                self.make(s.name, s.dtype, [s.length], None)
            envs = [dict(self.env) | {"t": t, "i": block * kernel.block + t} for t in range(kernel.block)]
            threads = [code(env) for env in envs]
            while True:
                asked = [next(thread, None) for thread in threads]
                if all(a is None for a in asked):
                    break
                assert len({a is None or a[0] for a in asked}) == 1, "threads part at a meeting"
                if asked[0] is not None and asked[0][0] == "shuffle":
                    for lane, env in enumerate(envs):
                        env["$shuffled"] = asked[lane ^ asked[lane][1]][2]  # type: ignore[index]

    def thread_block(self, body: Sequence[Stmt]) -> Callable[[Env], Generator[Any, None, None]]:
        codes = [self.thread_statement(s) for s in body]

        def run(env: Env) -> Generator[Any, None, None]:
            self.steps += len(codes)
            if self.steps > STEPS:
                raise TooLong
            for code in codes:
                found = code(env)
                if found is not None:
                    yield from found

        return run

    def thread_statement(self, stmt: Stmt) -> Callable[[Env], Any]:
        """What one thread does: nothing to yield, or a coroutine."""
        if isinstance(stmt, Sync):
            return lambda env: iter([("sync",)])
        if isinstance(stmt, Shared):
            return lambda env: None
        if isinstance(stmt, Set) and isinstance(stmt.value, Shuffle):
            inner, mask, name = self.expr(stmt.value.value), stmt.value.mask, stmt.name

            def shuffled(env: Env) -> Generator[Any, None, None]:
                yield "shuffle", mask, inner(env)
                env[name] = env["$shuffled"]

            return shuffled
        if isinstance(stmt, Atomic):
            return self.atomic(stmt)
        if isinstance(stmt, If):
            cond, then, other = self.expr(stmt.cond), self.thread_block(stmt.then), self.thread_block(stmt.other)
            return lambda env: then(env) if decided(cond(env)) else other(env)
        if isinstance(stmt, For):
            return self.thread_loop(stmt)
        if isinstance(stmt, While):
            return self.thread_repeat(stmt)
        return self.statement(stmt)

    def thread_loop(self, stmt: For) -> Callable[[Env], Any]:
        bounds, body, name = stmt.ranges[0], self.thread_block(stmt.body), stmt.names[0]
        start, stop = self.expr(bounds.start), self.expr(bounds.stop)

        def run(env: Env) -> Generator[Any, None, None]:
            for value in range(decided(start(env)), decided(stop(env)), bounds.step):
                env[name] = value
                yield from body(env)

        return run

    def thread_repeat(self, stmt: While) -> Callable[[Env], Any]:
        cond, body = self.expr(stmt.cond), self.thread_block(stmt.body)

        def run(env: Env) -> Generator[Any, None, None]:
            env[stmt.counter] = 0
            while env[stmt.counter] < stmt.most and decided(cond(env)):
                yield from body(env)
                env[stmt.counter] += 1

        return run

    def atomic(self, stmt: Atomic) -> Act:
        index, value, source, name, dtype = self.expr(stmt.index), self.expr(stmt.value), stmt.value.dtype, stmt.array, stmt.dtype
        op = {"add": "+", "and": "&", "or": "|", "xor": "^"}.get(stmt.op, stmt.op)

        def act(env: Env) -> None:
            cells = self.arrays[name]
            at = cells.place([index(env)])
            cells.data[at] = integer_binary(op, dtype, cells.read(at), convert(source, dtype, value(env)))

        return act


def added(before: Any, op: str, term: Number, running: bool = False) -> Terms:
    """A sum with one more term; differences are sums of negated terms."""
    if op == "-":
        op, term = "+", UNKNOWN if term is UNKNOWN else negated(term)
    if isinstance(before, Terms):
        if before.op == op:
            before.terms.append(term)
            return before
        before = UNKNOWN
    return Terms(op, [before, term], running)


def decided(value: Number) -> int:
    """A number that steers the kernel."""
    if value is UNKNOWN or isinstance(value, Near):
        raise Undecided
    return int(value)


def evaluate(kernel: Kernel, inputs: Mapping[str, np.ndarray]) -> dict[str, Cells]:
    """Results by name, and the inputs that are written."""
    results = Reference(kernel, inputs).run()
    for cells in results.values():
        for at in range(len(cells.data)):
            cells.read(at)
    return results


def difference(got: np.ndarray, want: Cells) -> str:
    """The first element that is not what it must be; empty where all are."""
    if tuple(got.shape) != want.shape:
        return f"shape {tuple(got.shape)} instead of {want.shape}"
    floats = KINDS[want.dtype].kind == "f"
    if got.dtype != np.dtype(KINDS[want.dtype].numpy):
        return f"dtype {got.dtype} instead of {want.dtype}"
    flat = np.ascontiguousarray(got).reshape(-1)
    values = flat.astype(np.float64).tolist() if floats else flat.tolist()
    for at, (found, wanted) in enumerate(zip(values, want.data, strict=True)):
        if not _agrees(found, wanted, floats):
            return f"{found!r} instead of {wanted!r} at {tuple(map(int, np.unravel_index(at, want.shape)))}"
    return ""


def _agrees(found: Any, wanted: Number, floats: bool) -> bool:
    if wanted is UNKNOWN:
        return True
    if not floats:
        return int(found) == wanted
    value, err = parts(wanted)
    if math.isnan(value):
        return math.isnan(found)
    if math.isinf(value):
        return bool(found == value)
    if isinstance(wanted, Near):
        return abs(found - value) <= err * 1.0000001
    return found == value and (value != 0 or math.copysign(1.0, found) == math.copysign(1.0, value))
