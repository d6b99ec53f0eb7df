"""Kernels in loop style, built as trees: what the rules of ONNX operators are written with.

`X` wraps an expression of the tree and has Python's operators, so that a rule reads like the loop it makes. `LoopKernel` collects
statements and becomes a `Function`, which is compiled like a kernel somebody wrote in Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tilewright.base import dtypes
from tilewright.tree import syntax
from tilewright.tree.syntax import (
    Argument,
    Assign,
    Binary,
    Call,
    For,
    Function,
    If,
    IfExpr,
    Index,
    Let,
    Name,
    Number,
    Param,
    RangeExpr,
    Return,
    Stmt,
    Unary,
)

Shape = tuple[int, ...]


class X:
    """An expression. `==` and `!=` compare in the kernel, so an `X` is no key of a dict."""

    __slots__ = ("node",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, node: syntax.Expr) -> None:
        self.node = node

    def __add__(self, other: X | float) -> X:
        return _binary("+", self, other)

    def __radd__(self, other: X | float) -> X:
        return _binary("+", other, self)

    def __sub__(self, other: X | float) -> X:
        return _binary("-", self, other)

    def __rsub__(self, other: X | float) -> X:
        return _binary("-", other, self)

    def __mul__(self, other: X | float) -> X:
        return _binary("*", self, other)

    def __rmul__(self, other: X | float) -> X:
        return _binary("*", other, self)

    def __truediv__(self, other: X | float) -> X:
        return _binary("/", self, other)

    def __rtruediv__(self, other: X | float) -> X:
        return _binary("/", other, self)

    def __floordiv__(self, other: X | float) -> X:
        return _binary("//", self, other)

    def __mod__(self, other: X | float) -> X:
        return _binary("%", self, other)

    def __pow__(self, other: X | float) -> X:
        return _binary("**", self, other)

    def __and__(self, other: X | float) -> X:
        return _binary("and", self, other)

    def __or__(self, other: X | float) -> X:
        return _binary("or", self, other)

    def __xor__(self, other: X | float) -> X:
        return _binary("!=", self, other)

    def __invert__(self) -> X:
        return X(Unary("not", self.node))

    def __neg__(self) -> X:
        return X(Unary("-", self.node))

    def __lt__(self, other: X | float) -> X:
        return _binary("<", self, other)

    def __le__(self, other: X | float) -> X:
        return _binary("<=", self, other)

    def __gt__(self, other: X | float) -> X:
        return _binary(">", self, other)

    def __ge__(self, other: X | float) -> X:
        return _binary(">=", self, other)

    def __eq__(self, other: object) -> X:  # type: ignore[override]
        return _binary("==", self, other)

    def __ne__(self, other: object) -> X:  # type: ignore[override]
        return _binary("!=", self, other)


def x_of(value: object) -> X:
    """An expression, or the literal of a number."""
    if isinstance(value, X):
        return value
    if isinstance(value, bool | np.bool_):
        return X(syntax.Bool(bool(value)))
    if isinstance(value, int | np.integer):
        number = int(value)
        return X(Number(number)) if number >= 0 else X(Unary("-", Number(-number)))
    assert isinstance(value, float | np.floating), value
    real = float(value)
    assert not math.isnan(real)
    return X(Number(real)) if math.copysign(1.0, real) > 0 else X(Unary("-", Number(-real)))


def _binary(op: str, left: object, right: object) -> X:
    return X(Binary(op, x_of(left).node, x_of(right).node))


def call(function: str, *args: object) -> X:
    """`function(args…)` of a word of the language."""
    return X(Call(Name(function), tuple(Argument(x_of(a).node) for a in args)))


def choose(condition: X, then: object, otherwise: object) -> X:
    """`then if condition else otherwise`"""
    return X(IfExpr(condition.node, x_of(then).node, x_of(otherwise).node))


def word_of(dtype: np.dtype) -> str:
    """The word for a dtype in kernels."""
    found = dtypes.from_numpy(dtype)
    assert found is not None, dtype
    return "bool_" if found.is_bool else found.name


def cast(value: X, dtype: np.dtype) -> X:
    """`value` converted."""
    return X(Call(Name("cast"), (Argument(value.node), Argument(Name(word_of(dtype))))))


def both(*conditions: X) -> X | None:
    """All conditions; None for none."""
    found: X | None = None
    for condition in conditions:
        found = condition if found is None else found & condition
    return found


class LoopKernel:
    """A kernel under construction: parameters, statements, results."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.params: list[str] = []
        self.results: list[str] = []
        self._body: list[Stmt] = []
        self._names = 0

    # -- names ------------------------------------------------------------------------------------------------------

    def fresh(self, stem: str) -> str:
        """A name nobody has."""
        self._names += 1
        return f"{stem}{self._names}"

    def param(self, stem: str) -> str:
        """One more parameter."""
        self.params.append(self.fresh(stem))
        return self.params[-1]

    # -- statements -------------------------------------------------------------------------------------------------

    def emit(self, statement: Stmt) -> None:
        """One more statement, in the innermost open block."""
        self._body.append(statement)

    @contextmanager
    def _block(self) -> Iterator[list[Stmt]]:
        outer, self._body = self._body, []
        try:
            yield self._body
        finally:
            self._body = outer

    def array(self, shape: Sequence[int], dtype: np.dtype, fill: object = None, stem: str = "t") -> str:
        """A new array: empty, or full of `fill`."""
        name = self.fresh(stem)
        extents = syntax.Tuple(tuple(x_of(n).node for n in shape))
        args: list[syntax.Expr] = [extents, Name(word_of(dtype))] if fill is None else [extents, x_of(fill).node, Name(word_of(dtype))]
        self.emit(Let((name,), Call(Name("empty" if fill is None else "full"), tuple(map(Argument, args))), mutable=True))
        return name

    def result(self, shape: Sequence[int], dtype: np.dtype, fill: object = None) -> str:
        """A new array that the kernel returns. Without axes it has one of extent 1."""
        self.results.append(self.array(tuple(shape) or (1,), dtype, fill, "out"))
        return self.results[-1]

    def at(self, array: str, *indices: object) -> X:
        """An element."""
        return X(Index(Name(array), tuple(x_of(i).node for i in indices)))

    def store(self, array: str, indices: Sequence[object], value: object, op: str = "") -> None:
        """`array[indices] op= value`"""
        self.emit(Assign(self.at(array, *indices).node, x_of(value).node, op))

    def let(self, value: object, stem: str = "v") -> X:
        """A new variable."""
        name = self.fresh(stem)
        self.emit(Let((name,), x_of(value).node, mutable=True))
        return X(Name(name))

    def set(self, variable: X, value: object, op: str = "") -> None:
        """`variable op= value`"""
        self.emit(Assign(variable.node, x_of(value).node, op))

    @contextmanager
    def grid(self, *extents: object) -> Iterator[tuple[X, ...]]:
        """Independent iterations."""
        with self._loop(extents, "yes") as indices:
            yield indices

    @contextmanager
    def loop(self, extent: object, start: object = 0) -> Iterator[X]:
        """`for i in range(start, extent)`"""
        with self._loop((extent,), "no", start) as (index,):
            yield index

    @contextmanager
    def _loop(self, extents: Sequence[object], parallel: str, start: object = 0) -> Iterator[tuple[X, ...]]:
        names = tuple(self.fresh("i") for _ in extents)
        with self._block() as body:
            yield tuple(X(Name(name)) for name in names)
        ranges = tuple(RangeExpr(x_of(start).node, x_of(extent).node) for extent in extents)
        self.emit(For(names, ranges, tuple(body), parallel))

    @contextmanager
    def when(self, condition: X | None) -> Iterator[None]:
        """`if condition:`; without one, no condition."""
        if condition is None:
            yield
            return
        with self._block() as body:
            yield
        self.emit(If(condition.node, tuple(body)))

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, extents: Sequence[int], start: object, step: Callable[[X, tuple[X, ...]], None]) -> X:
        """A variable that begins with `start`, and loops around `step(variable, indices)`."""
        total = self.let(start, "acc")
        indices: list[X] = []

        def inside(axes: Sequence[int]) -> None:
            if not axes:
                step(total, tuple(indices))
                return
            with self.loop(axes[0]) as index:
                indices.append(index)
                inside(axes[1:])

        inside(extents)
        return total

    def function(self) -> Function:
        """The finished kernel."""
        names = tuple(Name(name) for name in self.results)
        end = Return(names[0] if len(names) == 1 else syntax.Tuple(names))
        return Function(self.name, tuple(Param(name) for name in self.params), None, (*self._body, end))
