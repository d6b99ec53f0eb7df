"""Which loops can run in any order: the classification of a checked body.

In comes a typed body whose loops are as written; out comes one where every loop has its kind:

    parallel  top level only: no point reads or overwrites what another one writes; stores that only combine (`out[k[i]] += w[i]`)
              may meet in one element, and are then marked as scatters
    reduce    only accumulates, each target with one operation, and never reads a target otherwise
    each      inside a kernel: serial, but its iterations are independent
    ordered   serial, at the top or in another ordered loop, around parallel ones: its body is run statement by statement, each by the whole device
    serial    everything else

Loops directly inside one another become one loop over several indices where their ranges allow it. A top-level loop that
both stores and accumulates is split in two. Errors are about what the source promised: `grid` that is not parallel, an
elementwise kernel that accumulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tilewright.base.dtypes import bool_
from tilewright.base.errors import Diagnostics
from tilewright.base.record import replace
from tilewright.base.sizes import Size, product
from tilewright.tree.bounds import linear_indices, range_under
from tilewright.tree.order.distribution import distributed
from tilewright.tree.order.halves import halves, without
from tilewright.tree.order.independence import NOTHING_FIXED, Fixed, independent, is_reduction
from tilewright.tree.order.inner_products import products_inside
from tilewright.tree.order.pivots import around_pivot
from tilewright.tree.order.rotation import equal_sizes, is_ordered, needed_after, rotated
from tilewright.tree.order.temporaries import with_rows
from tilewright.tree.races import collision, promised
from tilewright.tree.typed import (
    Accumulate,
    ArrayAssign,
    Element,
    IndexRef,
    Local,
    LoopVar,
    ReduceLoop,
    SetVar,
    SizeCheck,
    Stmt,
    Store,
    TypedAssert,
    TypedBarrier,
    TypedIf,
    TypedLoop,
    TypedPrint,
    TypedWhile,
    TypedYield,
    Variable,
)
from tilewright.tree.typed_text import show_expr
from tilewright.tree.typed_walk import assigned, exprs_in, walk, walk_expr

_FEWEST_POINTS = 64
"""Iterations of a parallel loop for which a step of an ordered loop is worth more than one thread."""



def classify(stmts: tuple[Stmt, ...], elementwise: bool, sink: Diagnostics, checks: Sequence[SizeCheck] = ()) -> tuple[Stmt, ...]:
    """The top-level statements with every loop classified. `checks` hold at every call."""
    same = equal_sizes(checks)
    result: list[Stmt] = []
    stmts = with_rows(stmts, merge_nest)
    for position, stmt in enumerate(stmts):
        for part in _top_statement(stmt, sink, NOTHING_FIXED):
            result += rotated(part, needed_after(stmts[position + 1 :]), same) if is_ordered(part) else [part]
    _check_promises(stmts, sink)
    if elementwise:
        _check_elementwise(tuple(result), sink)
    return tuple(result)


def _top_statement(stmt: Stmt, sink: Diagnostics, fixed: Fixed) -> list[Stmt]:
    """A statement of the kernel's top, or of an ordered loop, with its loops classified."""
    if isinstance(stmt, TypedLoop):
        parts = _between_barriers(merge_nest(stmt))
        return [done for part in parts for done in _top_loop(merge_nest(part), sink, fixed)]
    if isinstance(stmt, TypedWhile):
        plain = without((stmt,), _is_barrier)
        assert isinstance(plain[0], TypedWhile)
        body = _ordered_body(plain[0].body, sink, fixed)
        return [replace(plain[0], body=body, kind="ordered")] if body is not None else [_inner(plain[0])]
    return list(_inners(without((stmt,), _is_barrier)))


def _check_promises(stmts: tuple[Stmt, ...], sink: Diagnostics) -> None:
    """`grid` promised independent iterations: two that surely race are an error, each store or read once."""
    said = {d.span for d in sink.errors}
    for loop in promised(stmts):
        found = None if independent(loop, loop.vars) else collision(loop)
        if found is not None and found.span not in said:
            said.add(found.span)
            sink.error(
                "TW012", found.message(), found.span,
                "use range for a loop whose order matters" + ("" if found.reads else ", or let each iteration write places of its own"),
            )  # fmt: skip


def merge_nest(loop: TypedLoop) -> TypedLoop:
    """`for i: for j: body` -> `for i, j: body`, as long as inner ranges do not depend on outer indices."""
    while len(loop.body) == 1 and isinstance(loop.body[0], TypedLoop):
        inner = loop.body[0]
        if loop.until is not None or inner.until is not None:
            break
        if (inner.asked == "yes") != (loop.asked == "yes") or not _rectangular(loop.vars, inner.vars):
            break
        loop = replace(loop, vars=loop.vars + inner.vars, body=inner.body)
    return loop


def _rectangular(outer: Sequence[LoopVar], inner: Sequence[LoopVar]) -> bool:
    for var in inner:
        for bound in (var.lo, var.hi):
            for expr in walk_expr(bound):
                if (isinstance(expr, IndexRef) and expr.var in outer) or isinstance(expr, Element):
                    return False
                if isinstance(expr, Local) and expr.var.mutable:
                    return False
    return True


def _is_barrier(stmt: Stmt) -> bool:
    return isinstance(stmt, TypedBarrier)


def _between_barriers(loop: TypedLoop) -> list[TypedLoop]:
    """A loop with barriers as one loop after the other, where its iterations are independent and no variable lives across one.

    A block then has the whole device for every part. Elsewhere statements run in order as they are, which is all a barrier asks.
    """
    plain = replace(loop, body=without(loop.body, _is_barrier))
    parts: list[list[Stmt]] = [[]]
    for stmt in loop.body:
        if isinstance(stmt, TypedBarrier):
            parts.append([])
        else:
            parts[-1].append(stmt)
    bodies = [without(tuple(part), _is_barrier) for part in parts]
    if len(bodies) == 1 or assigned(plain.body) or not _rectangular((), loop.vars) or not independent(plain, loop.vars):
        return [plain]
    for position, body in enumerate(bodies):
        declared = {s.var for s in walk(body) if isinstance(s, SetVar) and s.declares}
        later = tuple(s for other in bodies[position + 1 :] for s in other)
        if declared & set(assigned(later)) or any(isinstance(e, Local) and e.var in declared for e in exprs_in(later)):
            return [plain]
    return [replace(loop, body=body, asked="auto") for body in bodies if body]


# -- top level ----------------------------------------------------------------------------------------------------


def _top_loop(loop: TypedLoop, sink: Diagnostics, fixed: Fixed) -> list[Stmt]:
    if _prints(loop):
        return [_inner(loop)]  # in order, so that what is printed is
    outer = assigned(loop.body)
    domain_known = _rectangular((), loop.vars)
    if not outer and not fixed:
        ordered = products_inside(loop, merge_nest)
        if ordered is not loop:
            return _distributed(ordered, sink, fixed) or _top_loop(merge_nest(ordered), sink, fixed)
    if not outer:
        depth = max((d for d in range(len(loop.vars), 0, -1) if independent(loop, loop.vars[:d], fixed)), default=0)
        if loop.asked == "yes" and depth < len(loop.vars):
            _race(loop, loop.vars[depth:], sink)
        if depth and domain_known:
            rest = loop.vars[depth:]
            body = (replace(loop, vars=rest, kind=""),) if rest else loop.body
            if not rest or is_reduction(replace(loop, vars=rest), ()) or scattered(replace(loop, vars=rest)) is None:
                return [replace(loop, vars=loop.vars[:depth], body=_inners(body), kind="parallel")]
        turned = interchanged(loop) if domain_known else None
        if turned is not None:
            return _top_loop(turned, sink, fixed)
        apart = _distributed(loop, sink, fixed) if domain_known else None
        if apart is not None:
            return apart
        # Copies that scatters go to are made before the first step.
        steady = not fixed or all(var.count is not None for s in walk((loop,)) if isinstance(s, TypedLoop) for var in s.vars)
        scatter = scattered(loop) if domain_known and steady and not is_reduction(loop, ()) else None
        if scatter is not None:
            return [replace(scatter, body=_inners(scatter.body), kind="parallel")]
        return _pivoted(loop, sink, fixed) or [_ordered(loop, sink, fixed) or _inner(loop)]
    if is_reduction(loop, outer):
        return [replace(loop, body=_inners(loop.body), kind="reduce")]
    split = halves(loop, outer)
    if split is not None:
        return _top_loop(split[0], sink, fixed) + _top_loop(split[1], sink, fixed)
    if loop.asked == "yes":
        names = ", ".join(f"'{v.name}'" for v in outer)
        sink.error(
            "TW012", f"grid runs its iterations in any order, but {names} is carried from one to the next", loop.span,
            "use range for a loop whose order matters",
        )  # fmt: skip
    return [_ordered(loop, sink, fixed) or _inner(loop)]


# -- ordered loops --------------------------------------------------------------------------------------------------


def _ordered(loop: TypedLoop, sink: Diagnostics, fixed: Fixed) -> TypedLoop | None:
    """A loop whose iterations run one after the other, and whose body is worth the whole device; None where it is not."""
    if loop.asked == "yes" or loop.until is not None:
        return None
    var, rest = loop.vars[0], loop.vars[1:]
    nest = loop
    if not rest and len(loop.body) == 1 and isinstance(loop.body[0], TypedLoop) and loop.body[0].until is None and _rectangular(loop.vars, loop.body[0].vars):
        nest = replace(merge_nest(loop.body[0]), span=loop.span)
        nest = replace(nest, vars=(var, *nest.vars))
    inside = nest.vars[1:]
    if inside and not assigned(nest.body) and independent(nest, inside, fixed):
        # Inner iterations never meet: each runs through all outer ones by itself.
        inner = _inner(replace(nest, vars=(var,), asked="auto"))
        assert isinstance(inner, TypedLoop)
        return replace(nest, vars=inside, body=(inner,), kind="parallel")
    reached = range_under(var, fixed)
    around = dict(fixed) if reached is None else {**fixed, var: reached[0] + var.step * Size.of(step_name(var, fixed))}
    body = _ordered_body((replace(loop, vars=rest),) if rest else loop.body, sink, around)
    return None if body is None else replace(loop, vars=(var,), body=body, kind="ordered")


def _distributed(loop: TypedLoop, sink: Diagnostics, fixed: Fixed) -> list[Stmt] | None:
    """A loop as several that are all parallel, without stores that meet; None where that is not to be had."""
    parts = None if loop.asked == "yes" else distributed(loop, frozenset(step_name(var, dict(list(fixed.items())[:n])) for n, var in enumerate(fixed)))
    if parts is None:
        return None
    result = [done for part in parts for done in _top_loop(merge_nest(part), sink, fixed)]
    if not all(isinstance(done, TypedLoop) and done.kind == "parallel" for done in result):
        return None
    return None if any(isinstance(s, Store) and s.scatter for s in walk(tuple(result))) else result


def _pivoted(loop: TypedLoop, sink: Diagnostics, fixed: Fixed) -> list[Stmt] | None:
    """A loop of a step as the iterations before the one that the step chooses, this, and those after it; None where that makes nothing parallel."""
    parts = around_pivot(loop) if fixed else None
    if parts is None or parts.pivot not in fixed:
        return None
    sides = [[done for part in _between_barriers(merge_nest(side)) for done in _top_loop(part, sink, fixed)] for side in (parts.before, parts.after)]
    if not all(isinstance(side[0], TypedLoop) and side[0].kind == "parallel" for side in sides):
        return None
    return [*sides[0], *(done for stmt in parts.at for done in _top_statement(stmt, sink, fixed)), *sides[1]]


def step_name(var: LoopVar, fixed: Fixed) -> str:
    """The size that is the number of the step of an ordered loop inside others."""
    return f"{var.name}.{len(fixed)}"


def _ordered_body(stmts: tuple[Stmt, ...], sink: Diagnostics, fixed: Fixed) -> tuple[Stmt, ...] | None:
    """The body of an ordered loop, classified; None where it would not run in parallel, or has what only one thread can do."""
    result: list[Stmt] = []
    for stmt in without(stmts, _is_barrier):
        if isinstance(stmt, TypedIf) and any(isinstance(s, TypedLoop | TypedWhile) for s in walk((stmt,))):
            spread = _spread_if(stmt, sink, fixed)
            if spread is None:
                return None
            result += spread
        elif isinstance(stmt, _STEP_STATEMENTS):
            result += _top_statement(stmt, sink, fixed)
        else:
            return None
    body = tuple(result)
    return body if _pays(body, fixed) else None


_STEP_STATEMENTS = (SetVar, Accumulate, Store, TypedLoop, TypedWhile, TypedIf)


def _pays(stmts: tuple[Stmt, ...], fixed: Fixed) -> bool:
    """Whether something in the body is shared out over the device: a parallel loop whose extents are sizes and that is not surely short."""
    for stmt in stmts:
        if is_ordered(stmt):
            return True
        if isinstance(stmt, TypedLoop) and stmt.kind == "parallel":
            reached = [range_under(var, fixed) for var in stmt.vars]
            count = product(r[1] for r in reached if r is not None).constant
            if None not in reached and (count is None or count >= _FEWEST_POINTS):
                return True
    return False


def _spread_if(stmt: TypedIf, sink: Diagnostics, fixed: Fixed) -> list[Stmt] | None:
    """`if cond: loops` in an ordered loop as loops whose bodies are under the condition; None where that is not the same."""
    cond = Variable("condition", bool_)
    result: list[Stmt] = [SetVar(cond, stmt.cond, True, span=stmt.span)]
    for holds, body in ((True, stmt.then), (False, stmt.otherwise)):
        for inner in body:
            if not isinstance(inner, TypedLoop | Store | Accumulate) and not (isinstance(inner, SetVar) and not inner.declares):
                return None
            for parallel, run in groupby(_top_statement(inner, sink, fixed), _is_parallel):
                parts = tuple(run)
                if any(map(is_ordered, parts)):
                    return None
                if parallel:
                    result += [replace(part, body=(_under(cond, holds, part.body, stmt),)) for part in parts if isinstance(part, TypedLoop)]
                else:
                    result.append(_under(cond, holds, parts, stmt))  # together: one may set a variable that another one reads
    return result


def _is_parallel(stmt: Stmt) -> bool:
    return isinstance(stmt, TypedLoop) and stmt.kind == "parallel"


def _under(cond: Variable, holds: bool, body: tuple[Stmt, ...], stmt: TypedIf) -> TypedIf:
    return TypedIf(Local(cond, span=stmt.cond.span), body if holds else (), () if holds else body, span=stmt.span)


def _race(loop: TypedLoop, beyond: Sequence[LoopVar], sink: Diagnostics) -> None:
    """grid promised independence. What is surely broken is an error; what is only unproven is serialised. Stores that combine may meet."""
    for stmt in walk(loop.body):
        if isinstance(stmt, Store) and not stmt.kind:
            linear = linear_indices(stmt.indices)
            if linear is None:
                continue
            reached = {v for index in linear for v in index.values}
            inner = {v for s in walk(loop.body) if isinstance(s, TypedLoop) for v in s.vars}
            missing = [v.name for v in loop.vars if v not in reached and v.count is not None and v.count.constant != 1]
            if missing and not inner & reached:
                place = f"{stmt.array.name}[{', '.join(map(show_expr, stmt.indices))}]"
                sink.error(
                    "TW012", f"every '{missing[0]}' of the grid stores to the same {place}", stmt.span,
                    f"accumulate over '{missing[0]}' in an inner range loop",
                )  # fmt: skip


# -- inside a kernel ----------------------------------------------------------------------------------------------


def _inners(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    return tuple(done for s in stmts for done in _around_inner_pivot(s) or _inner_halves(s) or (_inner(s),))


def _inner_halves(stmt: Stmt) -> tuple[Stmt, ...] | None:
    """A loop along rows that stores and accumulates as two, so that both can be vectors; None for all else."""
    if not isinstance(stmt, TypedLoop) or _prints(stmt):
        return None
    loop = merge_nest(stmt)
    outer = assigned(loop.body)
    rows = [s for s in walk(loop.body) if isinstance(s, Store) and s.indices and any(isinstance(e, IndexRef) and e.var is loop.vars[-1] for e in walk_expr(s.indices[-1]))]
    if not outer or not rows or loop.until is not None or is_reduction(loop, outer):
        return None
    parts = halves(loop, outer)
    if parts is None:
        return None
    storing = next(part for part in parts if not assigned(part.body))
    if not independent(storing, storing.vars) or any(isinstance(s, TypedLoop) for part in parts if part is not storing for s in walk(part.body)):
        return None
    return tuple(map(_inner, parts))


def _around_inner_pivot(stmt: Stmt) -> tuple[Stmt, ...] | None:
    """A loop over one index that an outer index breaks in two halves of independent iterations; None for all else."""
    if not isinstance(stmt, TypedLoop) or len(stmt.vars) != 1 or _prints(stmt) or assigned(stmt.body) or independent(stmt, stmt.vars):
        return None
    parts = around_pivot(stmt)
    if parts is None:
        return None
    assert parts.pivot.first is not None
    fixed = {parts.pivot: parts.pivot.first + Size.of(f"{parts.pivot.name}.pivot")}
    if not all(independent(side, side.vars, fixed) for side in (parts.before, parts.after)):
        return None
    before, after = (replace(side, body=_inners(side.body), kind="each") for side in (parts.before, parts.after))
    return (before, *_inners(parts.at), after)


def _inner(stmt: Stmt) -> Stmt:
    """A statement inside a kernel, its loops classified."""
    if isinstance(stmt, TypedLoop):
        loop = merge_nest(stmt)
        outer = assigned(loop.body)
        if is_reduction(loop, outer):
            kind = "reduce"
        elif not outer and independent(loop, loop.vars):
            kind = "each"
        else:
            # A part of the nest may be simpler than the whole: `for i: for k: c[i] += …`.
            kind = "serial"
            if len(loop.vars) > 1:
                first, rest = loop.vars[:1], replace(loop, vars=loop.vars[1:])
                inner = _inner(rest)
                if not assigned((inner,)) and independent(replace(loop, vars=first, body=(inner,)), first):
                    kind = "each"
                return replace(loop, vars=first, body=(inner,), kind=kind)
        return replace(loop, body=_inners(loop.body), kind=kind)
    if isinstance(stmt, ReduceLoop | TypedWhile):
        return replace(stmt, body=_inners(stmt.body))
    if isinstance(stmt, TypedIf):
        return replace(stmt, then=_inners(stmt.then), otherwise=_inners(stmt.otherwise))
    return stmt


# -- scatters --------------------------------------------------------------------------------------------------------


def _prints(loop: TypedLoop) -> bool:
    return any(isinstance(s, TypedPrint | TypedAssert) for s in walk(loop.body))


def interchanged(loop: TypedLoop) -> TypedLoop | None:
    """`for k: for i: out[i] += x[i, k]` as `for i: for k: …`, so that the loop over results is outside and the sum inside; None for other nests."""
    joined = _joined(loop)
    stores = [s for s in walk(joined.body) if isinstance(s, Store)]
    reached = {e.var for s in stores for index in s.indices for e in walk_expr(index) if isinstance(e, IndexRef)}
    kept = tuple(v for v in joined.vars if v in reached)
    order = (*kept, *(v for v in joined.vars if v not in reached))
    if not kept or order == loop.vars or any(not s.kind for s in stores):
        return None
    turned = replace(joined, vars=order)
    inner = replace(joined, vars=order[len(kept) :])
    return turned if order != kept and independent(turned, kept) and is_reduction(inner, ()) else None


def _joined(loop: TypedLoop) -> TypedLoop:
    """The nest with the loops directly inside, whoever asked for which order: for bodies in which order does not count."""
    while len(loop.body) == 1 and isinstance(loop.body[0], TypedLoop) and _rectangular(loop.vars, loop.body[0].vars):
        if loop.until is not None or loop.body[0].until is not None:
            break
        loop = replace(loop, vars=loop.vars + loop.body[0].vars, body=loop.body[0].body)
    return loop


def scattered(loop: TypedLoop) -> TypedLoop | None:
    """The loop with its scatters marked, where its points can run in any order but for stores that combine; None where they cannot.

    A scatter combines into elements that nothing else in the loop reads or writes in another way. Loops directly inside join the nest: what is
    combined may come in any order.
    """
    loop = _joined(loop)
    if assigned(loop.body) or any(isinstance(s, ArrayAssign | ReduceLoop | TypedYield) for s in walk(loop.body)):
        return None
    kinds: dict[str, set[str]] = {}
    for stmt in walk(loop.body):
        if isinstance(stmt, Store):
            kinds.setdefault(stmt.array.name, set()).add(stmt.kind)
    read = {e.array.name for e in exprs_in(loop.body) if isinstance(e, Element)}
    combined = {name for name, found in kinds.items() if len(found) == 1 and "" not in found and name not in read}
    while True:
        marked = replace(loop, body=_marked(loop.body, combined))
        unneeded = [name for name in sorted(combined) if independent(replace(loop, body=_marked(loop.body, combined - {name})), loop.vars)]
        if not unneeded or not combined - {unneeded[0]}:
            break
        combined = combined - {unneeded[0]}
    return marked if combined and independent(marked, loop.vars) else None


def _marked(stmts: tuple[Stmt, ...], arrays: set[str]) -> tuple[Stmt, ...]:
    result: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, Store):
            stmt = replace(stmt, scatter=stmt.array.name in arrays)
        elif isinstance(stmt, TypedIf):
            stmt = replace(stmt, then=_marked(stmt.then, arrays), otherwise=_marked(stmt.otherwise, arrays))
        elif isinstance(stmt, TypedLoop | TypedWhile):
            stmt = replace(stmt, body=_marked(stmt.body, arrays))
        result.append(stmt)
    return tuple(result)


def _check_elementwise(stmts: tuple[Stmt, ...], sink: Diagnostics) -> None:
    for stmt in walk(stmts):
        if isinstance(stmt, TypedLoop) and stmt.kind in ("reduce", "serial"):
            names = ", ".join(f"'{v.name}'" for v in stmt.vars)
            sink.error(
                "TW012", f"an elementwise kernel computes each element on its own, but the loop over {names} carries values", stmt.span,
                "use @kernel reduce or @kernel fused",
            )  # fmt: skip
            return
        if isinstance(stmt, ReduceLoop):
            sink.error("TW012", "an elementwise kernel cannot yield", stmt.span, "use @kernel reduce(…)")
            return
