"""How attention of few queries can be cut into parts of its keys: which rows share keys, and where the keys begin and end.

In: a loop-stage kernel. Out: a `SplitForm`: the kernel with query heads that share keys (`k[j, h // 4, d]`), and several tokens, as one row index, and the
limits of j that its text says: a length in memory, `j <= pos[0] + i`, a window. `split_attention` makes kernels of it.

    parallel (i, h) { … k[j, h // 4, d] …, j <= pos[0] + i }  ->  parallel (g, r) { i = r // 4, h = 4 * g + r % 4, … }, highs = pos[0] + i + 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.analysis.affine import Affine, analyse, gap
from tilewright.analysis.attention import Attention, find_attention
from tilewright.base.affine import AffineForm
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, floordiv
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk, watched_axes
from tilewright.ir.rewrite import clone_ops, eliminate_dead, rewrite
from tilewright.ir.types import Tensor


def tensor_of(value: Value) -> Tensor:
    assert isinstance(value.type, Tensor)
    return value.type


# -- query heads that share keys --------------------------------------------------------------------------------------


def group_heads(kernel: Kernel, known: bool = True) -> Kernel:
    """The kernel with an index `h` that is also read as `h // G` as two, `G * outer + inner`; the same kernel where there is none. `known`: only
    where the extent is a multiple of G for sure."""
    parallel = _only_nest(kernel)
    if parallel is None:
        return kernel
    forms = analyse(kernel)
    region = parallel.regions[0]
    for position, index in enumerate(region.args):
        by = [forms[op.operands[1]] for op in walk(region) if op.opcode == "floordiv" and op.operands[0] is index]
        extent = forms[parallel.operands[position]]
        if not by or any(form != by[0] or form.factors for form in by) or extent.factors:
            continue
        group, total = by[0].constant, extent.constant
        outer = _groups(region, index, group, total)
        if outer is not None or not known:
            return _two_indices(kernel, parallel, position, group, outer if outer is not None else total // group)
    return kernel


def _groups(region: Block, index: Value, group: Size, total: Size) -> Size | None:
    """How many groups there are, where they are all of one size: both sizes are numbers; or `index // (total // X)` is read along an axis of extent X,
    which is only inside for all indices if X divides the total."""
    each, number = group.constant, total.constant
    if each is not None and number is not None:
        return Size.of(number // each) if each > 0 and number % each == 0 else None
    quotients = {op.result for op in walk(region) if op.opcode == "floordiv" and op.operands[0] is index}
    for op in walk(region):
        memory = op.operands[0].type if op.opcode == "load" else None
        if isinstance(memory, Tensor):
            for extent, place in zip(memory.shape, op.operands[1:], strict=False):
                if place in quotients and group == floordiv(total, extent):
                    return extent
    return None


def _only_nest(kernel: Kernel) -> Op | None:
    found = [op for op in kernel.body.ops if op.opcode == "parallel"]
    return found[0] if len(found) == 1 else None


def _two_indices(kernel: Kernel, parallel: Op, position: int, group: Size, outer: Size) -> Kernel:
    region = parallel.regions[0]
    b = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(b, [op for op in kernel.body.ops if op is not parallel], mapping)
    extents = [mapping.get(v, v) for v in parallel.operands]
    extents[position : position + 1] = [b.index(outer), b.index(group)]
    pair: list[Value] = []

    def body(inner: Builder, *indices: Value) -> list[Value]:
        high, low = indices[position : position + 2]
        whole = inner.add(inner.mul(high, inner.index(group)), low)
        pair.extend((whole, high, low))
        local = dict(mapping) | dict(zip(region.args, (*indices[:position], whole, *indices[position + 2 :]), strict=True))
        clone_ops(inner, region.ops[:-1], local)
        return []

    names = [a.name for a in region.args]
    names[position : position + 1] = [f"{names[position]}.group", names[position]]
    with b.at(parallel.span):
        b.parallel(extents, body, names)
    whole, high, low = pair

    def change(builder: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode not in ("floordiv", "mod") or op.operands[0] is not whole:
            return None
        return [high if op.opcode == "floordiv" else low]

    return eliminate_dead(rewrite(replace(kernel, body=Block((), tuple(b.ops))), change))


def _with_row(kernel: Kernel) -> Kernel | None:
    """The kernel with a row of its own, of extent 1, where each query has its keys to itself; None where no query is found."""
    parallel = _only_nest(kernel)
    if parallel is None:
        return None
    forms = analyse(kernel)
    region = parallel.regions[0]
    queries: dict[Op, int] = {}
    for outer in (op for op in walk(region) if op.opcode == "reduce"):
        for inner in (op for op in walk(outer.regions[0]) if op.opcode == "reduce"):
            for load in (op for op in inner.regions[0].ops if op.opcode == "load"):
                indices = load.operands[1 : 1 + tensor_of(load.operands[0]).rank]
                moving = any(forms[v].factor(outer.regions[0].args[0]) != ZERO for v in indices)
                places = [axis for axis, v in enumerate(indices) if any(forms[v].factor(i) == ONE for i in region.args)]
                if not moving and places:
                    queries[load] = places[-1]
    if not queries:
        return None
    b = Builder(kernel.span)
    extents = [*parallel.operands, b.index(1)]
    row = Value(region.args[0].type, "row")

    def change(builder: Builder, op: Op) -> Sequence[Value] | None:
        axis = queries.get(op)
        if axis is None:
            return None
        operands = list(op.operands)
        operands[1 + axis] = builder.add(operands[1 + axis], row)
        return builder.emit("load", operands, op.attrs)

    inside = rewrite(replace(kernel, body=Block((), region.ops)), change).body.ops
    nest = replace(parallel, operands=tuple(extents), regions=(Block((*region.args, row), inside),))
    before = [op for op in kernel.body.ops if op is not parallel]
    return replace(kernel, body=Block((), (*before, *b.ops, nest)))


def _other_row(kernel: Kernel, found: Attention) -> int | None:
    """A further parallel index that keys and values do not know: that of tokens, beside the one of heads."""
    made = {result: op for op in walk(kernel.body) for result in op.results}
    known = made_of([*found.key.operands, *found.value.operands], made)
    queries = made_of(found.query.operands, made)
    rows = [p for p in found.batch if found.indices[p] in queries and found.indices[p] not in known]
    return rows[-1] if rows and found.indices[found.row] in queries else None


def made_of(values: Sequence[Value], made: dict[Value, Op]) -> set[Value]:
    """All that values are made of, indices among it."""
    seen: set[Value] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            op = made.get(value)
            waiting += op.operands if op is not None else ()
    return seen


def _one_row(kernel: Kernel, found: Attention, other: int) -> Kernel:
    """The kernel with two parallel indices as one, the last: rows are the pairs of them. The one that says where keys end counts rows slowly: it grows
    with them."""
    parallel, region = found.parallel, found.parallel.regions[0]
    made = {result: op for op in walk(kernel.body) for result in op.results}
    ends = made_of([*found.conditions, *([found.count] if found.count is not None else [])], made)
    slow, fast = (found.row, other) if found.reach is not None or found.indices[found.row] in ends else (other, found.row)
    b = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(b, [op for op in kernel.body.ops if op is not parallel], mapping)
    kept = [p for p in range(len(region.args)) if p not in (other, found.row)]
    inner_extent = found.extents[fast]
    extents = [mapping.get(parallel.operands[p], parallel.operands[p]) for p in kept]

    def body(inner: Builder, *indices: Value) -> list[Value]:
        by = inner.index(inner_extent)
        local = dict(mapping) | {region.args[p]: v for p, v in zip(kept, indices[:-1], strict=True)}
        local[region.args[slow]] = inner.op("floordiv", indices[-1], by)
        local[region.args[fast]] = inner.op("mod", indices[-1], by)
        clone_ops(inner, region.ops[:-1], local)
        return []

    with b.at(parallel.span):
        names = [*(region.args[p].name for p in kept), "row"]
        b.parallel([*extents, b.index(found.extents[slow] * inner_extent)], body, names)
    return eliminate_dead(replace(kernel, body=Block((), tuple(b.ops))))


# -- where the keys begin and end -------------------------------------------------------------------------------------


@record
class SplitForm:
    """Attention with its query heads grouped. `highs` and `lows` are limits of j, all of which hold: j < high, low <= j. `guards` are the
    conditions that they do not say already, since they differ from row to row."""

    kernel: Kernel
    found: Attention
    highs: tuple[Affine, ...]
    lows: tuple[Affine, ...]
    guards: tuple[Value, ...]
    guards_reach: bool
    """`found.reach` is one of them."""
    guards_count: bool
    """So is the number of terms."""
    rooms: tuple[Size, ...]
    """Rows that keys and values have, where a length in memory may be more than that: none beyond them is read."""
    watched: tuple[Op, ...]
    """Loads whose index along j is checked as the kernel runs."""


def find_split(kernel: Kernel, known: bool = True) -> SplitForm | None:
    """How attention can be cut; None where a kernel is none, or where its keys end is not known before they are read. `known`: as for `group_heads`."""
    grouped = group_heads(kernel, known)
    found = find_attention(grouped)
    if found is not None and (other := _other_row(grouped, found)) is not None:
        flat = _one_row(grouped, found, other)
        rows = find_attention(flat)
        form = _limits(flat, rows) if rows is not None and rows.grain == 1 else None
        if form is not None:
            return form
    if found is None:
        single = _with_row(grouped)
        grouped, found = (single, find_attention(single)) if single is not None else (grouped, None)
    if found is None or found.grain != 1:
        return None
    return _limits(grouped, found)


def _limits(kernel: Kernel, found: Attention) -> SplitForm | None:
    made = {result: op for op in walk(kernel.body) for result in op.results}
    row = found.indices[found.row]
    late = {a for op in walk(found.parallel.regions[0]) for region in op.regions for a in region.args}

    def follows(value: Value) -> bool:
        """Whether a value grows with the row: it is the row, or the row divided by a number."""
        op = made.get(value)
        return value is row or (op is not None and op.opcode == "floordiv" and op.operands[0] is row and not found.forms[op.operands[1]].factors)

    def fits(form: Affine) -> bool:
        """Whether a limit is a number before the keys are read: what it is made of depends on no row, but for the row itself."""
        for value, factor in form.factors:
            if follows(value) and factor.constant is not None:
                continue
            waiting = [value]
            while waiting:
                one = waiting.pop()
                if one is row or one in late or one is found.column:
                    return False
                op = made.get(one)
                if op is not None and op.regions:
                    return False
                waiting += op.operands if op is not None else ()
        return True

    def by_row(form: Affine) -> bool:
        return any(follows(value) for value in form.values)

    watched = _watched(kernel, found)
    if watched is None:
        return None
    rooms: list[Size] = []
    for load, j in ((found.key, found.j), (found.value, found.weighted.regions[0].args[0])):
        axis, first = found.axis(load, j), found.loads(load)[0]
        if axis >= 0 and found.forms[first.operands[1 + axis]].is_just(j):
            rooms.append(tensor_of(first.operands[0]).shape[axis])
    highs: list[Affine] = [AffineForm((), found.keys)] if found.count is None else []
    lows: list[Affine] = []
    guards: list[Value] = []
    guards_reach = guards_count = False
    if found.count is not None:
        waiting = [found.count]
        while waiting:
            value = waiting.pop()
            op = made.get(value)
            if op is not None and op.opcode == "max" and _is_zero(op.operands[1], made):
                waiting.append(op.operands[0])
            elif op is not None and op.opcode == "min":
                waiting += op.operands
            elif fits(found.forms[value]):
                highs.append(found.forms[value])
                guards_count = guards_count or by_row(found.forms[value])
            else:
                return None
    if found.reach is not None:
        highs.append(AffineForm(((row, ONE),), found.reach))
        guards_reach = True
    for condition in found.conditions:
        distance = gap(made[condition], found.forms) if condition in made else None
        step = distance.factor(found.j) if distance is not None else ZERO
        if distance is None or step not in (ONE, Size.of(-1)):
            guards.append(condition)
            continue
        rest = AffineForm(tuple((v, f) for v, f in distance.factors if v is not found.j), distance.constant)
        if not fits(rest):
            guards.append(condition)
            continue
        if by_row(rest):
            guards.append(condition)
        if step == ONE:
            lows.append(rest.times(Size.of(-1)))
        else:
            highs.append(rest.plus(AffineForm((), ONE)))
    return SplitForm(kernel, found, tuple(highs), tuple(lows), tuple(guards), guards_reach, guards_count, tuple(dict.fromkeys(rooms)), watched)


def _watched(kernel: Kernel, found: Attention) -> tuple[Op, ...] | None:
    """One load of each array whose index along j is checked; None where something else is."""
    loads: dict[Value, Op] = {}
    known = ((found.key, found.j), (found.value, found.weighted.regions[0].args[0]))
    axes = {load.operands[0]: found.axis(operand, j) for operand, j in known for load in found.loads(operand)}
    for op in walk(kernel.body):
        if op.opcode == "within" or (watched_axes(op) and (op.opcode != "load" or axes.get(op.operands[0]) not in watched_axes(op))):
            return None
        if watched_axes(op) and len(watched_axes(op)) > 1:
            return None
    for operand, _ in known:
        for load in found.loads(operand):
            if watched_axes(load):
                loads[load.operands[0]] = load
    return tuple(loads.values())


def _is_zero(value: Value, made: dict[Value, Op]) -> bool:
    op = made.get(value)
    return op is not None and op.opcode == "const" and op.attrs["value"] == 0
