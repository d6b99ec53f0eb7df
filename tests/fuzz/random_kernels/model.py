"""A random kernel as data: typed expressions, statements, inputs with their layouts. Equal data prints and runs the same.

Every expression has the dtype of its value. `weak` is set where the value takes the type of what it meets: a literal, and a loop
index or what is made of indices and literals alone. Sizes are `dim * times + plus` over the kernel's named dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Size:
    dim: str = ""
    times: int = 1
    plus: int = 0

    def value(self, dims: dict[str, int]) -> int:
        return (dims[self.dim] * self.times if self.dim else 0) + self.plus

    def text(self) -> str:
        if not self.dim:
            return str(self.plus)
        scaled = self.dim if self.times == 1 else f"{self.times} * {self.dim}"
        return scaled if not self.plus else f"{scaled} {'+' if self.plus > 0 else '-'} {abs(self.plus)}"


# -- expressions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expr:
    dtype: str


@dataclass(frozen=True)
class Lit(Expr):
    """A literal; its dtype is that of what it stands beside."""

    value: int | float


@dataclass(frozen=True)
class Index(Expr):
    """A loop index."""

    name: str


@dataclass(frozen=True)
class Extent(Expr):
    """A size as a number."""

    size: Size


@dataclass(frozen=True)
class Var(Expr):
    """A variable or a number the kernel is given."""

    name: str


@dataclass(frozen=True)
class Load(Expr):
    """Where whole arrays are computed with, `view` is the subscript that makes the elements at `indices` of an array meet the others."""

    array: str
    indices: tuple[Expr, ...]
    view: str = ""


@dataclass(frozen=True)
class Binary(Expr):
    """`dtype` is that of the result, `at` that in which both operands meet."""

    op: str
    left: Expr
    right: Expr
    at: str


@dataclass(frozen=True)
class Unary(Expr):
    op: str
    value: Expr


@dataclass(frozen=True)
class Function(Expr):
    name: str
    value: Expr


@dataclass(frozen=True)
class Draw(Expr):
    """`tw.random.uniform(seed, indices…)` or another; `low` and `high` are the bounds of `randint`."""

    name: str
    seed: int
    indices: tuple[Expr, ...]
    low: int = 0
    high: int = 0


@dataclass(frozen=True)
class Cast(Expr):
    value: Expr


@dataclass(frozen=True)
class Compare(Expr):
    op: str
    left: Expr
    right: Expr
    at: str


@dataclass(frozen=True)
class Logic(Expr):
    """`and` and `or`: the right side is only looked at where the left one leaves the question open."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Choice(Expr):
    """`a if c else b`, or with `eager` `tw.where(c, a, b)`."""

    cond: Expr
    then: Expr
    other: Expr
    eager: bool = False


@dataclass(frozen=True)
class Shuffle(Expr):
    """Of explicit kernels: the value of the thread whose lane differs by `mask`."""

    value: Expr
    mask: int


# -- statements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stmt:
    pass


@dataclass(frozen=True)
class Make(Stmt):
    """`name = tw.empty(shape, dtype)` and its like; `fill` None is empty."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    fill: int | float | None = None


@dataclass(frozen=True)
class Set(Stmt):
    """`name = value`; `dtype` is the variable's. `fixed`: the text converts, which is what gives the variable its dtype."""

    name: str
    dtype: str
    value: Expr
    declares: bool = True
    fixed: bool = False


@dataclass(frozen=True)
class Accumulate(Stmt):
    """`name += value`, or `name = max(name, value)` and the like; `dtype` is the variable's."""

    name: str
    dtype: str
    op: str
    value: Expr
    running: bool = False
    """The value is read between two terms; terms may still be added in any order."""


@dataclass(frozen=True)
class Swap(Stmt):
    """`a, b = b, a` of arrays."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Store(Stmt):
    array: str
    dtype: str
    indices: tuple[Expr, ...]
    value: Expr
    op: str = ""


@dataclass(frozen=True)
class Range:
    """`range(start, stop, step)`; start and stop are integer expressions."""

    start: Expr
    stop: Expr
    step: int = 1


@dataclass(frozen=True)
class For(Stmt):
    names: tuple[str, ...]
    ranges: tuple[Range, ...]
    body: tuple[Stmt, ...]
    grid: bool = False


@dataclass(frozen=True)
class If(Stmt):
    cond: Expr
    then: tuple[Stmt, ...]
    other: tuple[Stmt, ...] = ()


@dataclass(frozen=True)
class While(Stmt):
    """`counter = 0; while counter < most and cond: body; counter += 1`"""

    counter: str
    most: int
    cond: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Whole(Stmt):
    """`name = value` over whole arrays: loads in `value` stand for arrays with trailing indices of `names`.

    With `reduce` the value is reduced along `axes`."""

    name: str
    dtype: str
    names: tuple[str, ...]
    shape: tuple[Size, ...]
    value: Expr
    reduce: str = ""
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shared(Stmt):
    """Of explicit kernels: an array of the block."""

    name: str
    dtype: str
    length: int


@dataclass(frozen=True)
class Sync(Stmt):
    pass


@dataclass(frozen=True)
class Atomic(Stmt):
    """Of explicit kernels, on integers: the order does not matter."""

    op: str
    array: str
    dtype: str
    index: Expr
    value: Expr


# -- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """An array given to the kernel. `values`: `data`, or `index` below `below`, or `unique`, a permutation of the numbers below it."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    layout: str = "contiguous"
    values: str = "data"
    below: Size = Size("", 1, 1)
    style: str = "small"
    written: bool = False


@dataclass(frozen=True)
class Number:
    name: str
    dtype: str
    value: int | float


@dataclass(frozen=True)
class Kernel:
    seed: int
    dims: tuple[tuple[str, int], ...]
    inputs: tuple[Input, ...]
    numbers: tuple[Number, ...]
    body: tuple[Stmt, ...]
    results: tuple[str, ...]
    out: str = ""
    """How `out=` is given: not at all, or in a layout, or `alias:name` of an input whose memory it is."""
    explicit: bool = False
    grid: int = 1
    block: int = 32
    tags: frozenset[str] = field(default_factory=frozenset)
    given: tuple[str, ...] = ()
    """Dims that calls give as whole numbers, in place of an axis or a constant."""

    @property
    def extents(self) -> dict[str, int]:
        return dict(self.dims)


def children(node: Any) -> Iterator[Any]:
    """Nodes directly inside a node."""
    for each in fields(node):
        value = getattr(node, each.name)
        for item in value if isinstance(value, tuple) else (value,):
            if is_dataclass(item) and not isinstance(item, type):
                yield item


def walk(node: Any) -> Iterator[Any]:
    yield node
    for child in children(node):
        yield from walk(child)


def walk_body(body: tuple[Stmt, ...]) -> Iterator[Any]:
    for stmt in body:
        yield from walk(stmt)


def nests(kernel: Kernel) -> int:
    """Top-level statements that compute: loops and assignments of whole arrays."""
    return sum(isinstance(s, For | Whole) for s in kernel.body)


def used_names(kernel: Kernel) -> set[str]:
    names: set[str] = set()
    for node in walk_body(kernel.body):
        if isinstance(node, Load | Store | Atomic):
            names.add(node.array)
        if isinstance(node, Var):
            names.add(node.name)
        if isinstance(node, Swap):
            names.update(node.names)
    return names


def trimmed(kernel: Kernel) -> Kernel:
    """Without inputs and numbers that nothing uses."""
    names = used_names(kernel)
    changed = {node.array for node in walk_body(kernel.body) if isinstance(node, Store | Atomic)}
    changed |= {name for node in walk_body(kernel.body) if isinstance(node, Swap) for name in node.names}
    given = [i if i.name in changed or kernel.explicit else replace(i, written=False) for i in kernel.inputs]  # an array in place that nothing writes is refused
    return replace(
        kernel,
        inputs=tuple(i for i in given if i.name in names or i.written),
        numbers=tuple(n for n in kernel.numbers if n.name in names),
    )
