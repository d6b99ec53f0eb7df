"""Join products of the same rows: contractions that read the same first factor become one kernel. `Program -> Program`.

In: a prepared program and its plans. Out: the same, where the calls that a plan puts `beside` each other are one: every block brings its
rows once and multiplies them with a tile of each second factor, which stay where they are. What one of them makes for another, at the
place it makes it, is never written:

    gate[i, j] = sum x[i, k] * u[k, j]                       one kernel: two sums, then
    out[i, j] = silu(gate[i, j]) * sum x[i, k] * v[k, j]     out[i, j] = silu(gate) * sum

Which products could be joined is asked of the program alone (`find_joins`); whether they are is for the cost model to say
(`horizontal_fusion.py`), with the sizes of the call at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import analyse
from tilewright.analysis.contraction import Contraction, Factor, find_contraction, find_products
from tilewright.base.record import record
from tilewright.base.sizes import Size, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import Tensor
from tilewright.passes.common.fusion_report import Fused, FusionReport, Refused
from tilewright.passes.program.fuse import cleaned, joined_facts, names_of, read_by, written_by
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.matrix import MatrixSchedule, products_of
from tilewright.passes.schedules.plans import Plan, Plans

MOST = 4
"""Products one kernel has."""


@record
class Join:
    """Calls that may be one, in order."""

    members: tuple[int, ...]
    shared: str
    """The array all of them read as their first factor."""


class _NotJoined(Exception):
    """These are not joined; the text says why."""


def find_joins(program: Program) -> tuple[tuple[Join, ...], tuple[Refused, ...]]:
    """Calls that may become one, and those of the same first factor that may not."""
    products = {
        number: found for number, call in enumerate(program.calls)
        if (found := find_contraction(call.kernel)) is not None and _is_plain(found)
    }  # fmt: skip
    joins: list[Join] = []
    refused: list[Refused] = []
    taken: set[int] = set()
    for first, found in products.items():
        if first in taken:
            continue
        members, shared = [first], _array(program, first, found.a)
        for later, other in products.items():
            if later <= first or later in taken or len(members) == MOST or _array(program, later, other.a) != shared:
                continue
            try:
                _check(program, products, members, later)
            except _NotJoined as no:
                refused.append(Refused(shared, found.reduction.span, other.reduction.span, f"not one product beside the other: {no}"))
                continue
            members.append(later)
        if len(members) > 1:
            taken.update(members)
            joins.append(Join(tuple(members), shared))
    return tuple(joins), tuple(refused)


def find_row_joins(program: Program, plans: Plans) -> tuple[Join, ...]:
    """Products with few rows (`family=gemv`) that read the same x and may become one, whatever their weights are made of: loads, or packed blocks."""
    products = {number: plan for number, plan in enumerate(plans) if isinstance(plan, Gemv)}
    joins: list[Join] = []
    taken: set[int] = set()
    for first, plan in products.items():
        if first in taken:
            continue
        members, shared = [first], _summed(program, first, plan.n_index)
        for later, other in products.items():
            both = shared & _summed(program, later, other.n_index)
            if later <= first or later in taken or len(members) == MOST or not both:
                continue
            if (plan.m_index, plan.n_index, plan.unit) != (other.m_index, other.n_index, other.unit):
                continue
            try:
                _check_rows(program, members, later)
            except _NotJoined:
                continue
            members.append(later)
            shared = both
        if len(members) > 1:
            taken.update(members)
            joins.append(Join(tuple(members), min(shared)))
    return tuple(joins)


def _summed(program: Program, number: int, n: int) -> set[str]:
    """The arrays of which a call sums elements that index `n`, the row of the weight, has no part in: x."""
    call = program.calls[number]
    names, region = names_of(call), _nest(call).regions[0]
    made = {result: op for op in walk(call.kernel.body) for result in op.results}
    loads = [op for reduction in region.ops if reduction.opcode == "reduce" for op in walk(reduction.regions[0]) if op.opcode == "load"]
    return {names[op.operands[0]] for op in loads if op.operands[0] in names and region.args[n] not in _made_of(op, made)}


def _made_of(load: Op, made: Mapping[Value, Op]) -> set[Value]:
    """The values that the indices of a load are made of."""
    found, waiting = set[Value](), list(load.operands[1:])
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += made[value].operands if value in made else ()
    return found


def nest_extents(kernel: Kernel, nest: Op) -> tuple[Size, ...]:
    forms = analyse(kernel)
    return tuple(forms[v].constant if v in forms and not forms[v].factors else Size.of(0) for v in nest.operands)


def _check_rows(program: Program, members: Sequence[int], later: int) -> None:
    calls = [program.calls[n] for n in (*members, later)]
    extents = {nest_extents(call.kernel, _nest(call)) for call in calls}
    if len(extents) > 1 or Size.of(0) in extents.pop():
        raise _NotJoined("their results have different shapes")
    for number in members:
        _check_order(program, number, later, set(members))
    if any(op.opcode in ("atomic", "accumulate") for call in calls for op in walk(call.kernel.body)):
        raise _NotJoined("one of them has atomics")
    if any(call.kernel.attrs.get("precision") != calls[0].kernel.attrs.get("precision") for call in calls):
        raise _NotJoined("they multiply with different precision")


def side_by_side(kernel: Kernel) -> tuple[Contraction, ...]:
    """The products of a kernel whose nest has several sums of the same rows; none where one kernel cannot compute them side by side."""
    products = find_products(kernel)
    if not 1 < len(products) <= MOST or not all(_is_plain(found) for found in products):
        return ()
    first = products[0]
    memory = [f.b.load.operands[0] for f in products if f.b.load is not None]
    alike = all(
        (f.m, f.n, f.batch, f.reduce_extents, f.accumulator, f.b.dtype) == (first.m, first.n, first.batch, first.reduce_extents, first.accumulator, first.b.dtype)
        and f.a.load is not None and first.a.load is not None and f.a.load.operands[0] is first.a.load.operands[0]
        and _lies(f, f.a) == _lies(first, first.a) and _lies(f, f.b)[1:] == _lies(first, first.b)[1:]
        for f in products
    )  # fmt: skip
    return products if alike and len(set(memory)) == len(products) else ()


def _is_plain(found: Contraction) -> bool:
    """Both factors are loads and there is one sum."""
    return all(f.load is not None and f.guard is None for f in (found.a, found.b)) and len(found.k) == 1


def _array(program: Program, number: int, factor: Factor) -> str:
    assert factor.load is not None
    return names_of(program.calls[number])[factor.load.operands[0]]


def _check(program: Program, products: Mapping[int, Contraction], members: Sequence[int], later: int) -> None:
    """Complain of what keeps one more call from the others."""
    found, other = products[members[0]], products[later]
    if (found.extents, found.m, found.n, found.batch) != (other.extents, other.m, other.n, other.batch):
        raise _NotJoined(f"one has {_sizes(found)} results, the other {_sizes(other)}")
    if found.reduce_extents != other.reduce_extents or _lies(found, found.a) != _lies(other, other.a):
        raise _NotJoined(f"they read other elements of '{_array(program, later, other.a)}'")
    if (found.b.dtype, found.accumulator) != (other.b.dtype, other.accumulator) or _lies(found, found.b)[1:] != _lies(other, other.b)[1:]:
        raise _NotJoined("their second factors are of different dtypes, or lie in memory in different ways")
    if any(_array(program, n, products[n].b) == _array(program, later, other.b) for n in members):
        raise _NotJoined(f"both multiply with '{_array(program, later, other.b)}'")
    for number in members:
        _check_order(program, number, later, set(members))
    kernels = [program.calls[n].kernel for n in (*members, later)]
    if any(op.opcode in ("atomic", "accumulate") for kernel in kernels for op in walk(kernel.body)):
        raise _NotJoined("one of them has atomics")
    if any(kernel.attrs.get("precision") != kernels[0].attrs.get("precision") for kernel in kernels):
        raise _NotJoined("they multiply with different precision")


def _sizes(found: Contraction) -> str:
    return " x ".join(str(extent) for extent in found.extents)


def _lies(found: Contraction, factor: Factor) -> tuple[object, ...]:
    """Which array's elements a factor is, in terms of where its indices stand: the strides, and each index's form."""
    number: dict[Value, object] = {value: place for place, value in enumerate(found.indices)}
    number |= {value: f"k{place}" for place, value in enumerate(found.k)}
    tensor = factor.tensor
    assert tensor is not None
    forms = tuple(
        (form.constant, tuple(sorted((str(number.get(value, id(value))), str(size)) for value, size in form.factors)))
        for form in found.access(factor)
    )
    return tensor.strides, tensor.dtype, tensor.align, forms


def _check_order(program: Program, first: int, later: int, members: set[int]) -> None:
    """Whether the first call may run where the later one does, together with it."""
    reads, writes = read_by(program.calls[first]), set(written_by(program.calls[first]))
    for number in range(first + 1, later):
        call = program.calls[number]
        if number not in members and ((read_by(call) | set(written_by(call))) & writes or set(written_by(call)) & reads):
            raise _NotJoined(f"kernel '{call.kernel.name}' between them has to do with what is read or written here")
    last = program.calls[later]
    theirs = set(written_by(last))
    if shared := theirs & (reads | writes):
        raise _NotJoined(f"both have to do with '{min(shared)}'")
    for array in writes & read_by(last):
        if not _at_own_place(program, first, later, array):
            raise _NotJoined(f"'{array}' is needed at other places than where it is made")


def _at_own_place(program: Program, first: int, later: int, array: str) -> bool:
    """Whether a call reads what another makes just where it makes it, after its own sum."""
    writer, reader = program.calls[first], program.calls[later]
    (there, region), (here, other) = ((_accesses(c, array), _nest(c).regions[0]) for c in (writer, reader))
    stores = [op for op in there if op.opcode == "store"]
    if len(stores) != 1 or len(there) != 1 or stores[0] not in region.ops:
        return False
    rank = len(stores[0].operands) - 2
    place = dict(zip(region.args, other.args, strict=True))
    wanted = [place.get(v) for v in stores[0].operands[1 : 1 + rank]]
    return None not in wanted and len(set(wanted)) == len(region.args) == rank and all(
        op.opcode == "load" and not op.attrs.get("masked") and op in other.ops and list(op.operands[1 : 1 + rank]) == wanted for op in here
    )


def _accesses(call: KernelCall, array: str) -> list[Op]:
    names = names_of(call)
    return [op for op in walk(call.kernel.body) if op.opcode in ("load", "store", "atomic", "accumulate") and names.get(op.operands[0]) == array]


def _nest(call: KernelCall) -> Op:
    return next(op for op in call.kernel.body.ops if op.opcode == "parallel")


# -- joining -------------------------------------------------------------------------------------------------------------------


def fuse_horizontally(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with the calls joined that their plans put beside each other, and with nests made whole again that were cut in vain."""
    chosen, whole = chosen_joins(program, plans), _cut_in_vain(program, plans)
    if not chosen and not whole:
        return program, plans
    again = {join.members[-1] for join in whole}
    plans = tuple(None if number in again else plan for number, plan in enumerate(plans))
    chosen += whole
    gone = {number for join in chosen for number in join.members[:-1]}
    return cleaned(joined(program, chosen)), tuple(plan for number, plan in enumerate(plans) if number not in gone)


def chosen_joins(program: Program, plans: Plans) -> list[Join]:
    """The joins that plans ask for, in order."""
    if not any(_beside(plan) > 1 for plan in plans):
        return []
    found = [join for join in find_joins(program)[0] if all(_beside(plans[n]) == len(join.members) for n in join.members)]
    taken = {number for join in found for number in join.members}
    rows = [join for join in find_row_joins(program, plans) if all(_beside(plans[n]) == len(join.members) for n in join.members)]
    return sorted([*found, *(join for join in rows if not taken & set(join.members))], key=lambda join: join.members)


def _cut_in_vain(program: Program, plans: Plans) -> list[Join]:
    """Nests that `fission_products` cut although their sizes leave them to plain loops: one kernel reads less than several."""
    parts: dict[object, list[int]] = {}
    for number, call in enumerate(program.calls):
        if "parted" in call.kernel.attrs:
            parts.setdefault(call.kernel.attrs["parted"], []).append(number)
    return [
        Join(tuple(members), "") for members in parts.values()
        if not any(isinstance(plans[number], MatrixSchedule) for number in members)
    ]  # fmt: skip


def _beside(plan: Plan) -> int:
    return products_of(plan)


def joined_kernel(program: Program, join: Join) -> Kernel:
    """What the calls are as one."""
    return joined(program, [join]).calls[join.members[-1] - len(join.members) + 1].kernel


def joined(program: Program, joins: Sequence[Join]) -> Program:
    """The program with one call, where the last of them was, in place of those of each join."""
    gone = {number for join in joins for number in join.members[:-1]}
    made = {join.members[-1]: _joined_call(program, join) for join in joins}
    calls = [made.get(number, call) for number, call in enumerate(program.calls) if number not in gone]
    return _without_stores(replace(program, calls=tuple(calls)), {a.name for a in program.scratch})


def _joined_call(program: Program, join: Join) -> KernelCall:
    calls = [program.calls[n] for n in join.members]
    values: dict[str, Value] = {}
    mapping: dict[Value, Value] = {}
    for call in calls:
        for param, name in names_of(call).items():
            mapping[param] = values.setdefault(name, param)
    top, inner = Builder(calls[0].kernel.span), Builder(_nest(calls[0]).span)
    nests = [_nest(call) for call in calls]
    args = tuple(Value(arg.type, arg.name) for arg in nests[0].regions[0].args)
    made: dict[Value, Value] = {}
    for call, nest in zip(calls, nests, strict=True):
        clone_ops(top, [op for op in call.kernel.body.ops if op.opcode != "parallel"], mapping)
        mapping.update(zip(nest.regions[0].args, args, strict=True))
        for op in nest.regions[0].ops:
            memory = mapping.get(op.operands[0]) if op.operands else None
            if op.opcode == "load" and memory in made:
                mapping[op.result] = made[memory]
            elif op.opcode != "yield":
                clone_ops(inner, [op], mapping)
                if op.opcode == "store" and memory is not None:
                    made[memory] = inner.ops[-1].operands[-1]
    inner.multi("yield")
    extents = tuple(mapping[v] for v in nests[0].operands)
    parallel = replace(nests[0], operands=extents, regions=(Block(args, tuple(inner.ops)),))
    last = calls[-1].kernel
    attrs = MappingProxyType({name: value for call in calls for name, value in call.kernel.attrs.items()})
    kernel = replace(
        last, params=tuple(values.values()), body=Block((), (*top.ops, parallel)), attrs=attrs,
        facts=joined_facts(*(call.kernel for call in calls)),
    )  # fmt: skip
    return KernelCall(kernel, tuple(values))


def _without_stores(program: Program, scratch: set[str]) -> Program:
    """Without stores of scratch that nobody reads."""
    read = {name for call in program.calls for name in read_by(call)}
    calls = []
    for call in program.calls:
        names = names_of(call)
        idle = {op for op in walk(call.kernel.body) if op.opcode == "store" and names.get(op.operands[0]) in scratch - read}
        calls.append(replace(call, kernel=replace(call.kernel, body=_without(call.kernel.body, idle))) if idle else call)
    return replace(program, calls=tuple(calls))


def _without(block: Block, idle: set[Op]) -> Block:
    ops = (replace(op, regions=tuple(_without(r, idle) for r in op.regions)) if op.regions else op for op in block.ops if op not in idle)
    return Block(block.args, tuple(ops))


# -- what is said of it ---------------------------------------------------------------------------------------------------------


def with_joins(report: FusionReport, program: Program, plans: Plans, refused: Sequence[Refused]) -> FusionReport:
    """The report of fusion with the products that plans put beside each other, and with those that are not and why."""
    chosen = chosen_joins(program, plans)
    after, _ = fuse_horizontally(program, plans)
    here = {name for call in after.calls for name in call.args}
    fused: list[Fused] = []
    gone: set[str] = set()
    for join in chosen:
        for earlier, number in zip(join.members, join.members[1:], strict=False):
            spans = [_reduction(program.calls[n]).span for n in (earlier, number)]
            # Sums of a nest that was cut have no name of their author's.
            cut = "parted" in program.calls[earlier].kernel.attrs
            passed = [a for a in written_by(program.calls[earlier]) if not cut and any(a in read_by(program.calls[n]) for n in join.members)]
            for array in passed:
                fused.append(Fused(array, "beside", spans[0], spans[1], _bytes(program, array) * (1 if array in here else 2)))
            gone.update(passed)
            fused.append(Fused(join.shared, "shared", spans[0], spans[1], _bytes(program, join.shared)))
    kept = tuple(r for r in report.refused if r.array not in gone)
    return FusionReport((*report.fused, *fused), (*kept, *refused), report.before, len(after.calls))


def _reduction(call: KernelCall) -> Op:
    return next(op for op in _nest(call).regions[0].ops if op.opcode == "reduce")


def _bytes(program: Program, array: str) -> Size:
    type_ = program.array(array).type
    assert isinstance(type_, Tensor)
    return product(type_.shape) * type_.dtype.itemsize
