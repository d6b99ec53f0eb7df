"""Arrays of which every iteration of a loop reads only what it wrote itself, as arrays with a part for each iteration.

In: the statements of a kernel. Out: the same, where a loop that is parallel but for such arrays has others in their place, and is several loops where its statements allow it.
Only arrays that no statement after the loop reads. `coverage` proves that an element is written before it is read; what an array was filled with stays where that may be read.

    s = zeros(m)
    for i in 0..n:                                 for i in 0..n:
        for j in 0..m: s[j] = f(x[i, j])    ->         for j in 0..m: s$rows[i, j] = f(x[i, j])
        for j in 0..m: x[i, j] = s[m - 1 - j]      for i in 0..n:
                                                       for j in 0..m: x[i, j] = s$rows[i, m - 1 - j]

Where another array of the loop has as many elements as the new one, it takes no more memory than that. Elsewhere the loop runs through strips of iterations, which take turns with
the parts:

    v = zeros(k)                                   for t in 0..ceildiv(n, strip):
    for i in 0..n:                          ->         for i in t * strip..min((t + 1) * strip, n):
        v[…] = …                                           v$rows[…, i - t * strip] = …

Parts lie side by side, so that neighbouring iterations are lanes of vectors, where iterations do most of their work in the array, in loops that run in order. Else each has a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from tilewright.base.dtypes import i64
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, ceildiv, contiguous_strides, minimum, product
from tilewright.tree.order.coverage import coverage
from tilewright.tree.order.distribution import distributed
from tilewright.tree.order.independence import independent, is_reduction
from tilewright.tree.typed import (
    Apply,
    ArrayAssign,
    ArrayInfo,
    Const,
    Element,
    Expr,
    IndexRef,
    LoopVar,
    SizeValue,
    Stmt,
    Store,
    TypedLoop,
    TypedNode,
    TypedWhile,
)
from tilewright.tree.typed_walk import assigned, exprs_in, walk, walk_expr

Merge = Callable[[TypedLoop], TypedLoop]

_STRIP_BYTES = 4 << 20
"""Memory that the parts of a strip take, about what caches of two cores hold."""
_FEWEST, _MOST, _UNKNOWN = 1024, 16384, 256
"""Iterations of a strip, whatever they take; and where only a call knows how much that is."""
_PITCH = 8
"""Parts that lie side by side and that no iteration uses: lines of a cache are chosen by powers of two."""
_LARGEST = 64 << 20
"""Bytes of an array of known size that need no strips."""
_SMALL = 1024
"""Elements of an array whose loops are too short to be vectors."""


def with_rows(stmts: tuple[Stmt, ...], merge: Merge) -> tuple[Stmt, ...]:
    """The statements of a kernel with such loops. `merge` makes loops directly inside one another one."""
    result: list[Stmt] = []
    for stmt in stmts:
        own = [array for array in _temporaries(stmt) if not _needed(array, stmts, stmt)] if isinstance(stmt, TypedLoop) else []
        found = _with_rows(merge(stmt), own) if isinstance(stmt, TypedLoop) and own else None
        if found is None:
            result.append(stmt)
            continue
        kept = {a.name for a in _arrays_in(found.loops)}
        for position, other in enumerate(result):
            if isinstance(other, ArrayAssign) and other.array.name in found.filled:
                result[position] = replace(other, array=found.filled[other.array.name])
        gone = {array.name for array in own} - kept
        result = [s for s in result if not (isinstance(s, ArrayAssign) and s.array.name in gone)]
        result += found.loops
    return tuple(result)


@record
class _Found:
    loops: tuple[TypedLoop, ...]
    filled: dict[str, ArrayInfo]
    """By the names of arrays, those in their place that are filled as these were."""


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


def _with_rows(loop: TypedLoop, arrays: Sequence[ArrayInfo]) -> _Found | None:
    """The loop with parts of arrays for each iteration; None where it stays as it is."""
    extents = [var.full for var in loop.vars]
    if loop.until is not None or None in extents or assigned(loop.body) or independent(loop, loop.vars):
        return None
    known = [extent for extent in extents if extent is not None]
    proofs = {array.name: proof for array in arrays if _is_plain(loop.body, array) and (proof := coverage(loop.body, array)) is not None}
    own = [array for array in arrays if array.name in proofs]
    room = [Counter(array.shape) for array in _arrays_in(loop.body) if array.role != "scratch"]
    roomy = [a for a in own if any(Counter((*known, *a.shape)) <= there for there in room) or _is_little((*known, *a.shape), a)]
    for some in (roomy, own):
        larger = {a.name: _larger(a, known, last=False) for a in some}
        rows = replace(loop, body=_ScratchParts(larger, [IndexRef(var) for var in loop.vars], last=False).of(loop.body))
        if some and independent(rows, rows.vars):
            break
    else:
        return None
    last = _lie_side_by_side(loop, larger.keys())
    if some is roomy and not last:
        # Sums that are products of matrices stand alone then; what runs in order has nothing of it.
        found = tuple((None if _runs_in_order(loop, larger.keys()) else distributed(rows)) or [rows])
    elif some is roomy:
        larger = {a.name: _larger(a, known, last) for a in some}
        found = (replace(loop, body=_ScratchParts(larger, [IndexRef(var) for var in loop.vars], last).of(loop.body)),)
    else:
        strips = _strips(own, len(known))
        larger = {a.name: _larger(a, [minimum(extent, strips) + (_PITCH if last else 0) for extent in known], last) for a in some}
        found = (_in_strips(loop, larger, strips, last),)
    return _Found(found, {name: array for name, array in larger.items() if proofs[name].filled})


def _larger(array: ArrayInfo, extents: Sequence[Size], last: bool) -> ArrayInfo:
    """An array with a part for each iteration: rows, or side by side, along its last axes."""
    shape = (*array.shape, *extents) if last else (*extents, *array.shape)
    return replace(array, name=f"{array.name}$rows", shape=shape, strides=contiguous_strides(shape))


def _is_little(shape: Sequence[Size], array: ArrayInfo) -> bool:
    size = product(shape).constant
    return size is not None and size * array.dtype.itemsize <= _LARGEST


def _is_plain(body: tuple[Stmt, ...], array: ArrayInfo) -> bool:
    """Whether statements have to do with single elements of an array alone, and no loop ends where it says."""
    elements = [s for s in walk(body) if isinstance(s, Store)] + [e for e in exprs_in(body) if isinstance(e, Element)]
    bounds = tuple(s.vars for s in walk(body) if isinstance(s, TypedLoop))
    if any(a.name == array.name for a in _arrays_in(bounds)):
        return False
    return sum(e.array.name == array.name for e in elements) == sum(a.name == array.name for a in _arrays_in(body))


# -- how parts lie ------------------------------------------------------------------------------------------------


def _lie_side_by_side(loop: TypedLoop, names: Collection[str]) -> bool:
    """Whether iterations are lanes of vectors: two thirds of the work of innermost loops are in arrays of the iteration, and they run in order, or
    are short since these are small."""
    if any(isinstance(s, TypedWhile) or (isinstance(s, TypedLoop) and s.until is not None) for s in walk(loop.body)):
        return False  # lanes would wait for each other
    traffic = [_traffic(inner, loop.vars[-1], names) for inner in _innermost(loop.body)]
    small = all(a.shape and (size := product(a.shape).constant) is not None and size <= _SMALL for a in _arrays_in(loop.body) if a.name in names)
    return sum(within for _, within in traffic) >= 2 * sum(across for across, _ in traffic) and (small or _runs_in_order(loop, names))


def _runs_in_order(loop: TypedLoop, names: Collection[str]) -> bool:
    """Whether innermost loops with at least half of the accesses to arrays of the iteration run in order."""
    ordered = every = 0
    for inner in _innermost(loop.body):
        within = _traffic(inner, loop.vars[-1], names)[1]
        every += within
        if isinstance(inner, TypedWhile) or inner.until is not None or not (independent(inner, inner.vars) or is_reduction(inner, assigned(inner.body))):
            ordered += within
    return 2 * ordered >= every > 0


def _innermost(stmts: tuple[Stmt, ...]) -> Iterator[TypedLoop | TypedWhile]:
    for stmt in walk(stmts):
        if isinstance(stmt, TypedLoop | TypedWhile) and not any(isinstance(s, TypedLoop | TypedWhile) for s in walk(stmt.body)):
            yield stmt


def _traffic(loop: TypedLoop | TypedWhile, var: LoopVar, names: Collection[str]) -> tuple[int, int]:
    """Accesses to other arrays whose elements lie apart for neighbouring iterations, and accesses to arrays of the iteration; stores count twice."""
    across = within = 0
    places = [(e.array, e.indices, 1) for e in exprs_in((loop,)) if isinstance(e, Element)] + [(s.array, s.indices, 2) for s in walk((loop,)) if isinstance(s, Store)]
    for array, indices, weight in places:
        if array.name in names:
            within += weight
        elif any(isinstance(e, IndexRef) and e.var is var for index in indices[:-1] for e in walk_expr(index)):
            across += weight
    return across, within


def _strips(arrays: Sequence[ArrayInfo], indices: int) -> int:
    """Iterations of a strip along each index."""
    sizes = [product(a.shape).constant for a in arrays]
    known = sum(size * a.dtype.itemsize for a, size in zip(arrays, sizes, strict=True) if size is not None)
    total = _UNKNOWN if None in sizes else max(_FEWEST, min(_MOST, _STRIP_BYTES // max(1, known)))
    return 1 << (total.bit_length() - 1) // indices


# -- what takes their place ---------------------------------------------------------------------------------------


def _in_strips(loop: TypedLoop, larger: dict[str, ArrayInfo], strip: int, last: bool) -> TypedLoop:
    """The loop in strips, in loops around."""
    around, inside = [], []
    for var in loop.vars:
        assert var.full is not None
        turns = ceildiv(var.full, Size.of(strip))
        turn = LoopVar(f"{var.name}$strip", Const(0, i64, "int"), SizeValue(turns), first=ZERO, count=turns, low=ZERO, high=turns - 1)
        low = _apply("mul", IndexRef(turn), Const(strip, i64, "int"))
        high = _apply("min", _apply("add", low, Const(strip, i64, "int")), SizeValue(var.full))
        around.append((turn, low))
        inside.append(replace(var, lo=low, hi=high, first=None, count=None))
    parts = [_apply("sub", IndexRef(var), low) for var, (_, low) in zip(inside, around, strict=True)]
    body = _ScratchParts(larger, parts, last, dict(zip(loop.vars, inside, strict=True))).of(loop.body)
    result = replace(loop, vars=tuple(inside), body=body)
    for turn, _ in reversed(around):
        result = TypedLoop((turn,), (result,), span=loop.span)
    return result


def _apply(op: str, *args: Expr) -> Expr:
    return Apply(op, args, i64, "index")


class _ScratchParts:
    """Puts parts of larger arrays in the place of arrays, and indices in the place of others."""

    def __init__(self, larger: dict[str, ArrayInfo], parts: Sequence[Expr], last: bool, indices: Mapping[LoopVar, LoopVar] | None = None) -> None:
        self.larger, self.parts, self.last = larger, tuple(parts), last
        self.indices = dict(indices or {})

    def of(self, item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(self.of(one) for one in item)
        if isinstance(item, LoopVar):
            return self._index(item)
        if not isinstance(item, TypedNode):
            return item
        item = replace(item, **{field.name: self.of(getattr(item, field.name)) for field in fields(item) if field.name not in ("span", "array")})
        if isinstance(item, Element | Store) and item.array.name in self.larger:
            parts = tuple(replace(part, span=item.span) for part in self.parts)
            item = replace(item, array=self.larger[item.array.name], indices=(*item.indices, *parts) if self.last else (*parts, *item.indices))
        return item

    def _index(self, var: LoopVar) -> LoopVar:
        if not self.indices:
            return var
        if var not in self.indices:
            lo, hi = self.of(var.lo), self.of(var.hi)
            self.indices[var] = var if (lo, hi) == (var.lo, var.hi) else replace(var, lo=lo, hi=hi)
        return self.indices[var]
