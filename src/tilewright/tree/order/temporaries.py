"""Arrays that every iteration of a loop writes before it reads them, as arrays with a row for each iteration.

In: the statements of a kernel. Out: the same, where a loop that is parallel but for such an array has one in its place that is as much larger, and is several loops where its
statements allow it. Only arrays that no other statement reads, and only where another array of the loop has as many elements as the new one: it takes no more memory than that.

    s = zeros(m)
    for i in 0..n:                                 for i in 0..n:
        for j in 0..m: s[j] = f(x[i, j])    ->         for j in 0..m: s$rows[i, j] = f(x[i, j])
        for j in 0..m: x[i, j] = s[m - 1 - j]      for i in 0..n:
                                                       for j in 0..m: x[i, j] = s$rows[i, m - 1 - j]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from tilewright.base.sizes import contiguous_strides
from tilewright.tree.order.distribution import distributed
from tilewright.tree.order.independence import independent
from tilewright.tree.typed import ArrayAssign, ArrayInfo, Element, IndexRef, LoopVar, Stmt, Store, TypedLoop, TypedNode
from tilewright.tree.typed_walk import assigned, exprs_in, walk

Merge = Callable[[TypedLoop], TypedLoop]


def with_rows(stmts: tuple[Stmt, ...], merge: Merge) -> tuple[Stmt, ...]:
    """The statements of a kernel with such loops. `merge` makes loops directly inside one another one."""
    result: list[Stmt] = []
    for stmt in stmts:
        own = [array for array in _temporaries(stmt) if not _needed(array, stmts, stmt)] if isinstance(stmt, TypedLoop) else []
        parts = _with_rows(merge(stmt), own, merge) if isinstance(stmt, TypedLoop) and own else None
        if parts is None:
            result.append(stmt)
            continue
        used = {array.name for array in _arrays_in(tuple(parts))}
        gone = {array.name for array in own} - used
        result = [s for s in result if not (isinstance(s, ArrayAssign) and s.array.name in gone)]
        result += parts
    return tuple(result)


def _temporaries(loop: TypedLoop) -> list[ArrayInfo]:
    """The arrays of the kernel itself that a loop writes."""
    written = {s.array.name: s.array for s in walk(loop.body) if isinstance(s, Store)}
    return [array for array in written.values() if array.role == "scratch" and array.packed is None]


def _needed(array: ArrayInfo, stmts: Sequence[Stmt], loop: Stmt) -> bool:
    """Whether other statements have to do with an array, but to fill all of it."""
    others = [s for s in stmts if s is not loop and not (isinstance(s, ArrayAssign) and s.array.name == array.name)]
    values = [s.value for s in stmts if isinstance(s, ArrayAssign) and s.array.name == array.name]
    return any(a.name == array.name for a in (*_arrays_in(tuple(others)), *_arrays_in(tuple(values))))


def _arrays_in(item: Any) -> Iterator[ArrayInfo]:
    """Every array that is mentioned, once for each time."""
    if isinstance(item, ArrayInfo):
        yield item
    elif isinstance(item, tuple | list):
        for one in item:
            yield from _arrays_in(one)
    elif isinstance(item, TypedNode | LoopVar):
        for field in fields(item):
            yield from _arrays_in(getattr(item, field.name))


def _with_rows(loop: TypedLoop, arrays: Sequence[ArrayInfo], merge: Merge) -> list[TypedLoop] | None:
    """The loop with rows of its own for each iteration; None where it stays as it is."""
    extents = [var.full for var in loop.vars]
    if loop.asked == "yes" or loop.until is not None or None in extents or assigned(loop.body) or independent(loop, loop.vars):
        return None
    known = [extent for extent in extents if extent is not None]
    own = [array for array in arrays if _is_plain(loop.body, array) and _is_written_first(loop.body, array, merge)]
    room = [Counter(array.shape) for array in _arrays_in(loop.body) if array.role != "scratch"]
    own = [array for array in own if any(Counter((*known, *array.shape)) <= there for there in room)]
    if not own:
        return None
    larger = {a.name: replace(a, name=f"{a.name}$rows", shape=(shape := (*known, *a.shape)), strides=contiguous_strides(shape)) for a in own}
    apart = replace(loop, body=_Rows(larger, loop.vars).of(loop.body))
    return (distributed(apart) or [apart]) if independent(apart, apart.vars) else None


def _is_plain(body: tuple[Stmt, ...], array: ArrayInfo) -> bool:
    """Whether statements have to do with single elements of an array alone, and no loop ends where it says."""
    elements = [s for s in walk(body) if isinstance(s, Store)] + [e for e in exprs_in(body) if isinstance(e, Element)]
    bounds = tuple(s.vars for s in walk(body) if isinstance(s, TypedLoop))
    if any(a.name == array.name for a in _arrays_in(bounds)):
        return False
    return sum(e.array.name == array.name for e in elements) == sum(a.name == array.name for a in _arrays_in(body))


def _is_written_first(body: tuple[Stmt, ...], array: ArrayInfo, merge: Merge) -> bool:
    """Whether the first loop that has to do with an array writes all of it, each element before it is read."""
    first = next((s for s in body if any(a.name == array.name for a in _arrays_in(s))), None)
    if not isinstance(first, TypedLoop) or first.until is not None:
        return False
    nest = merge(first)
    store = next((s for s in nest.body if any(a.name == array.name for a in _arrays_in(s))), None)
    if not isinstance(store, Store) or store.kind or sum(a.name == array.name for a in _arrays_in(store)) != 1:
        return False
    indices = [index.var for index in store.indices if isinstance(index, IndexRef)]
    if len(indices) != array.rank or Counter(indices) != Counter(nest.vars) or any(v.full != n for v, n in zip(indices, array.shape, strict=True)):
        return False
    places = [s.indices for s in walk(nest.body) if isinstance(s, Store) and s.array.name == array.name]
    places += [e.indices for e in exprs_in(nest.body) if isinstance(e, Element) and e.array.name == array.name]
    return all(place == store.indices for place in places)


class _Rows:
    """Puts rows of larger arrays in the place of arrays."""

    def __init__(self, larger: dict[str, ArrayInfo], over: Sequence[LoopVar]) -> None:
        self.larger, self.over = larger, over

    def of(self, item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(self.of(one) for one in item)
        if not isinstance(item, TypedNode):
            return item
        if isinstance(item, Element | Store) and item.array.name in self.larger:
            rows = tuple(IndexRef(var, span=item.span) for var in self.over)
            item = replace(item, array=self.larger[item.array.name], indices=(*rows, *item.indices))
        return replace(item, **{field.name: self.of(getattr(item, field.name)) for field in fields(item) if field.name not in ("span", "array")})
