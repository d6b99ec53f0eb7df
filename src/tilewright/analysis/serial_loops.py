"""Kernels that end on one thread or in one block, and scans that run in order: what to tell their authors.

In: a loop-stage kernel and what is known of sizes. Out: diagnostics of severity `warning`, each with the reason and what to write instead.
Loops that are short, and loops that walk no array, are left alone: a kernel that computes a few numbers has nothing to share out.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.analysis.nest_facts import UNKNOWN, NestFacts
from tilewright.base.errors import Diagnostic
from tilewright.base.sizes import Size
from tilewright.base.source import Span
from tilewright.ir.nodes import Op, Value, walk

FEW_TURNS = 4096
"""A loop of so many turns in all may run on one thread without a word."""
SHORT_SUM = 65536
"""Terms that one block adds up without a word."""
_SCANS = {"add": "sum", "fma": "sum", "mul": "prod", "min": "min", "max": "max"}


def serial_notes(facts: NestFacts, gpu: bool, split: bool) -> list[Diagnostic]:
    """What is to be said about one kernel. `split`: its reduction is shared out over the device all the same."""
    kernel = facts.kernel
    parallel = next((op for op in kernel.body.ops if op.opcode == "parallel"), None)
    if parallel is None:
        return []
    if facts.turns(parallel) > 1:
        return _row_scans(facts, parallel)
    where = "in one block" if gpu else "on one thread"
    for op in parallel.regions[0].ops:
        found = _serial(facts, op, where, gpu, split)
        if found is not None:
            return [found]
    return []


def _serial(facts: NestFacts, op: Op, where: str, gpu: bool, split: bool) -> Diagnostic | None:
    """Of a statement of a kernel without parallel loops."""
    if op.opcode == "if":
        inner = (_serial(facts, x, where, gpu, split) for region in op.regions for x in region.ops)
        return next((found for found in inner if found is not None), None)
    if op.opcode == "reduce":
        return None if split else _sum(facts, op, where, gpu)
    if op.opcode not in ("for", "while") or not _is_long(facts, op):
        return None
    scan = _scan(facts, op)
    if scan is not None:
        return _warning("TW062", f"the scan over {_names(facts, op)} runs {where}: {scan[0]}", op.span, scan[1])
    reason, help = _reason(facts, op)
    return _warning("TW060", f"'{facts.name}' runs {where}: {reason}", op.span, help)


def _is_long(facts: NestFacts, op: Op) -> bool:
    """Whether a loop, or one inside it, walks an array for more than a few turns."""
    for loop in walk_loops(op):
        around = facts.inside[id(loop)]
        turns = 1
        for outer in (*(around[around.index(op) :] if op in around else ()), loop):
            if outer.opcode != "if":
                turns = min(UNKNOWN, turns * max(1, facts.turns(outer)))
        if turns > FEW_TURNS and _walks(facts, loop):
            return True
    return False


def walk_loops(op: Op) -> list[Op]:
    """A loop and all loops inside it."""
    return [op, *(inner for region in op.regions for inner in walk(region) if inner.opcode in ("for", "while", "reduce"))]


def _walks(facts: NestFacts, loop: Op) -> bool:
    """Whether elements of arrays that a loop reads or writes depend on its turn."""
    own = {arg for region in loop.regions for arg in region.args}
    for region in loop.regions:
        for op in walk(region):
            if op.opcode in ("load", "store", "atomic", "accumulate") and any(facts.depends(v) & own for v in _subscripts(op)):
                return True
    return False


def _subscripts(op: Op) -> tuple[Value, ...]:
    rank = getattr(op.operands[0].type, "rank", 0)
    return op.operands[1 : 1 + rank]


# -- sums ----------------------------------------------------------------------------------------------------------------


def _sum(facts: NestFacts, op: Op, where: str, gpu: bool) -> Diagnostic | None:
    """A reduction that is not shared out."""
    if facts.turns(op) <= (SHORT_SUM if gpu else FEW_TURNS):
        return None
    names, head = _names(facts, op), f"'{facts.name}' runs {where}: "
    if not all(facts.is_size(v) for v in op.operands):
        given = _number(facts, op.operands)
        reason = f"how long the loop over {names} is comes with {given}, not with an array, so it is not cut into parts"
        help = "take the length from an array's shape, or add up parts: a tw.grid loop over parts, each with an inner loop, then the sum of the parts"
    elif gpu and len(op.operands) > 1:
        reason = f"the sum runs over several loops ({names}), and only sums over one are cut into parts"
        help = "reshape the array to one axis, or sum over the inner loops for each turn of the outer one, and then those sums"
    else:
        reason = f"other work stands beside the sum over {names}, so it is not cut into parts"
        help = "give every sum a kernel of its own, or a loop of its own that stores its result before the next begins"
    return _warning("TW060", head + reason, op.span, help)


def _number(facts: NestFacts, extents: Sequence[Value]) -> str:
    params = set(facts.kernel.params)
    for extent in extents:
        waiting, seen = [extent], set()
        while waiting:
            value = waiting.pop()
            if value in params:
                return f"the number '{value.name}'"
            op = facts.made.get(value)
            if op is not None and id(op) not in seen:
                seen.add(id(op))
                if op.opcode == "load":
                    return f"an element of '{op.operands[0].name}'"
                waiting += op.operands
    return "a number"


# -- loops that run in order ----------------------------------------------------------------------------------------------


def _reason(facts: NestFacts, op: Op) -> tuple[str, str]:
    """Why a loop runs in order, and what to write instead."""
    if op.opcode == "while":
        return (
            "how often its while loop turns is known only as it runs",
            "use range where the number of turns is known; a while loop inside tw.grid runs once for each element, side by side",
        )
    names = _names(facts, op)
    inner = [x for region in op.regions for x in walk(region) if x.opcode == "for" and x.attrs.get("independent")]
    inner += [x for region in op.regions for x in walk(region) if x.opcode == "reduce"]
    inside = f", and the loops inside it ({', '.join(dict.fromkeys(_names(facts, x) for x in inner))}) are part of it" if inner else ""
    outside = f"move the loop over {names} out of the kernel, and call the kernel once for each turn"
    if op.results:
        carried = ", ".join(f"'{r.name}'" for r in op.results if r.name) or "a value"
        reason = f"{carried} is carried from one turn of the loop over {names} to the next{inside}"
        return reason, outside if inner else "let each turn write an element of its own, or only add up (`total += …`): both run side by side"
    own = set(op.regions[0].args)
    stores = [x for region in op.regions for x in walk(region) if x.opcode in ("store", "atomic", "accumulate")]
    for store in stores:
        if any(_from_memory(facts, v) for v in _subscripts(store)):
            name = store.operands[0].name
            return (
                f"data decides where the loop over {names} writes in '{name}', and two turns may write the same element",
                f"loop over the elements of '{name}' and read what belongs to each, use tw.histogram to count, or write an explicit kernel "
                f"(@tw.gpu) with tw.atomic_add",
            )
    for store in stores:
        name = store.operands[0].name
        moves = any(facts.depends(v) & own for v in _subscripts(store))
        loads = [x for region in op.regions for x in walk(region) if x.opcode == "load" and x.operands[0] is store.operands[0]]
        if not moves and loads:
            return f"every turn of the loop over {names} reads '{name}', which the turn before it wrote{inside}", outside
        if not moves:
            return f"every turn of the loop over {names} writes the same elements of '{name}'{inside}", outside
        if any(not _same_place(facts, load, store) for load in loads):
            return (
                f"a turn of the loop over {names} reads elements of '{name}' that other turns write{inside}",
                "store to an array of its own, and read the old values from another" if not inner else outside,
            )
    return f"it is not proven that the turns of the loop over {names} write different elements{inside}", "index the result by the loops' own indices"


def _from_memory(facts: NestFacts, value: Value) -> bool:
    return facts.reads(value)


def _same_place(facts: NestFacts, load: Op, store: Op) -> bool:
    for a, b in zip(_subscripts(load), _subscripts(store), strict=True):
        first, second = facts.forms.get(a), facts.forms.get(b)
        if a is not b and (first is None or second is None or first.minus(second).factors or first.constant != second.constant):
            return False
    return True


# -- scans ---------------------------------------------------------------------------------------------------------------


def _row_scans(facts: NestFacts, parallel: Op) -> list[Diagnostic]:
    """Scans inside parallel loops: each row of its own runs in order."""
    found: list[Diagnostic] = []
    for op in walk(parallel.regions[0]):
        if op.opcode == "for" and facts.turns(op) > FEW_TURNS and (scan := _scan(facts, op)) is not None:
            rows = ", ".join(f"'{a.name}'" for a in parallel.regions[0].args)
            message = f"the scan over {_names(facts, op)} runs in order for each {rows}: {scan[0]}"
            found.append(_warning("TW062", message, op.span, f"{scan[1]}, on each row"))
    return found[:1]


def _scan(facts: NestFacts, loop: Op) -> tuple[str, str] | None:
    """What a loop that is a scan does, and the primitive for it; None for other loops."""
    if loop.opcode != "for" or len(loop.regions[0].args) > 2 or any(op.regions for op in loop.regions[0].ops):
        return None
    region = loop.regions[0]
    index = region.args[0]
    stores = [op for op in region.ops if op.opcode == "store"]
    if len(stores) != 1 or not any(index in facts.depends(v) for v in _subscripts(stores[0])):
        return None
    stored, array = stores[0].operands[-1], stores[0].operands[0]
    if len(region.args) == 2:
        carried, (update,) = region.args[1], region.yields
        step = facts.made.get(update)
        if step is None or step.opcode not in _SCANS or stored not in (update, carried) or not _is_linear(step, carried):
            return None
        reason = f"'{array.name}' holds the values that '{loop.results[0].name or 'a variable'}' runs through, one after the other"
        return reason, _advice(step.opcode, array.name, stored is carried)
    step = facts.made.get(stored)
    if step is None or step.opcode not in _SCANS:
        return None
    for operand in step.operands:
        before = facts.made.get(operand)
        if before is not None and before.opcode == "load" and before.operands[0] is array and _is_linear(step, operand) and _is_before(facts, before, stores[0], index):
            return f"each element of '{array.name}' is made from the one before it", _advice(step.opcode, array.name, False)
    return None


def _is_linear(step: Op, carried: Value) -> bool:
    """Whether a step combines the carried value with a term: `carried + term`, or `a * b + carried`."""
    if step.opcode == "fma":
        return step.operands[2] is carried and carried not in step.operands[:2]
    return sum(1 for v in step.operands if v is carried) == 1


def _is_before(facts: NestFacts, load: Op, store: Op, index: Value) -> bool:
    differences = [facts.forms[b].minus(facts.forms[a]) for a, b in zip(_subscripts(load), _subscripts(store), strict=True)]
    moved = [d for d in differences if d.factors or d.constant != Size.of(0)]
    return len(moved) == 1 and not moved[0].factors and moved[0].constant.constant in (1, -1)


def _advice(opcode: str, name: str, exclusive: bool) -> str:
    kind = _SCANS[opcode]
    arguments = "" if kind == "sum" else f', "{kind}"'
    arguments += ", exclusive=True" if exclusive else ""
    return f"tw.scan(x{arguments}) computes it in parallel, on CPUs too; x are the terms that are combined"


def _names(facts: NestFacts, op: Op) -> str:
    return ", ".join(f"'{a.name.partition('.')[0]}'" for a in facts.indices(op) if a.name) or "its turns"


def _warning(code: str, message: str, span: Span, help: str) -> Diagnostic:
    return Diagnostic(code, message, span, help, "warning")
