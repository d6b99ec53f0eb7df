"""Copy images whose channels lie first into ones that have them last, and results back. `Program -> Program`.

In: a program and the schedules of its contractions. Where one says `turn = image`, the convolution's input is first copied to scratch
[n, h, w, c], which the copy engine reads as pixels; where it says `turn = result`, results are written to scratch [n, h, w, k], and a kernel
after the contraction puts them where they belong; `turn = both` does both. Out: the program with the kernels that copy; the contraction's
schedule is meant for what it reads and writes now. Each copy reads and writes an array once; windows packed as a matrix have every pixel as
often as the convolution's kernel has places.

    parallel n, k, i, j { acc = reduce c, r, s { yield x[n, c, i + r, j + s] * w[k, c, r, s] }; out[n, k, i, j] = f(acc) }
    -> parallel n, hw, c { store x.turned[n, hw, c] = x[n, c, hw] }
       parallel n, k, i, j { acc = reduce c, r, s { yield x.turned[n, i + r, j + s, c] * w[k, c, r, s] }; out.turned[n, i, j, k] = f(acc) }
       parallel n, k, ij { store out[n, k, ij] = out.turned[n, ij, k] }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.contraction import Contraction, Factor, find_contraction
from tilewright.base.errors import CompilerBug
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, maximum
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.loop.collapse import collapse
from tilewright.passes.schedules.matrix import Wgmma
from tilewright.passes.schedules.plans import Plan, Plans

LAST = (0, 1, 2, 3)
"""The order of axes of an image with channels last."""


@record
class Turn:
    """An access of a kernel, and the axes of its array in the order [n, h, w, c]."""

    access: Op
    order: tuple[int, ...]

    @property
    def memory(self) -> Value:
        return self.access.operands[0]


def to_channels_last(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with kernels that turn images, and the schedules of its calls."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        if not isinstance(schedule, Wgmma) or not schedule.to_channels_last:
            calls.append(call)
            schedules.append(schedule)
            continue
        turns = turns_of(call.kernel).get(schedule.to_channels_last)
        if turns is None:
            raise CompilerBug.at("TW040", f"{call.kernel.name} has no images to turn", call.kernel.span)
        names = dict(zip(call.kernel.params, call.args, strict=True))
        copies = [_turned(call.kernel, turn, len(scratch) + number) for number, turn in enumerate(turns)]
        main = reading(call.kernel, turns, copies)
        given = names | {copy: copy.name for copy in copies}
        before: list[KernelCall] = []
        after: list[KernelCall] = []
        for turn, copy in zip(turns, copies, strict=True):
            is_load = turn.access.opcode == "load"
            kernel = _copying(call.kernel, turn, copy)
            (before if is_load else after).append(KernelCall(kernel, (names[turn.memory], copy.name), call.loops))
            assert isinstance(copy.type, Tensor)
            scratch.append(ProgramArray(copy.name, copy.type, "scratch"))
        calls += [*before, KernelCall(main, tuple(given[p] for p in main.params), call.loops), *after]
        schedules += [*(None for _ in before), schedule, *(None for _ in after)]
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def turns_of(kernel: Kernel, found: Contraction | None = None) -> dict[str, list[Turn]]:
    """What can be turned in a contraction, which may be at hand, for each value of a schedule's `to_channels_last`."""
    found = found or find_contraction(kernel)
    if found is None:
        return {}
    images = [(f, order) for f in (found.a, found.b) if (order := _image_order(found, f)) is not None]
    if len(images) != 1:
        return {}
    ((factor, order),) = images
    assert factor.load is not None
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    memory = factor.tensor
    assert memory is not None
    lies_otherwise = order != LAST or memory.strides[-1] != ONE
    image = [Turn(factor.load, order)] if lies_otherwise and factor.load.operands[0] not in written else []
    result = _result(kernel, found, factor)
    ways = {"image": image, "result": result, "both": [*image, *result] if image and result else []}
    # Where both lie channels first, turning the result alone leaves an image nobody can read.
    return {name: turns for name, turns in ways.items() if turns and not (name == "result" and image)}


def turned_kernel(kernel: Kernel, turn: str) -> Kernel:
    """The contraction as it is once its images have been turned."""
    turns = turns_of(kernel)[turn]
    return reading(kernel, turns, [_turned(kernel, t, number) for number, t in enumerate(turns)])


def _image_order(found: Contraction, factor: Factor) -> tuple[int, ...] | None:
    """The axes of a factor that is a plain load, in the order [n, h, w, c]; None where it is no load of an image."""
    memory = factor.tensor
    side = found.m if factor is found.a else found.n
    if memory is None or memory.rank != 4 or len(side) != 3:
        return None
    forms = found.access(factor)
    batch, down, along = (found.indices[p] for p in side)
    taken = [
        [axis for axis, form in enumerate(forms) if form.is_just(batch)],
        *([axis for axis, form in enumerate(forms) if own in form.values] for own in (down, along)),
        [axis for axis, form in enumerate(forms) if any(form.is_just(k) for k in found.k)],
    ]
    order = tuple(axes[0] for axes in taken if len(axes) == 1)
    return order if sorted(order) == list(LAST) else None


def _result(kernel: Kernel, found: Contraction, image: Factor) -> list[Turn]:
    """The only store of a kernel, where every result has a place of its own and what is not the image's side lies other than last."""
    stores = [op for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")]
    if len(stores) != 1 or stores[0].opcode != "store" or stores[0].attrs.get("masked"):
        return []
    (store,) = stores
    memory = store.operands[0]
    assert isinstance(memory.type, Tensor)
    pixels, others = (found.m, found.n) if image is found.a else (found.n, found.m)
    if memory.type.rank != 4 or len(others) != 1 or store not in found.parallel.regions[0].ops:
        return []
    if any(memory in op.operands for op in walk(kernel.body) if op is not store):
        return []
    indices = [found.indices[p] for p in (*pixels, *others)]
    places = [next((axis for axis, v in enumerate(store.operands[1:5]) if found.forms[v].is_just(i)), -1) for i in indices]
    extents = [found.extents[p] for p in (*pixels, *others)]
    if -1 in places or places == list(LAST):
        return []
    # What no loop writes stays as it is: the copy must not write it either. No array has a negative extent.
    if any(e not in (memory.type.shape[a], maximum(ZERO, memory.type.shape[a])) for a, e in zip(places, extents, strict=True)):
        return []
    return [Turn(store, tuple(places))]


def _turned(kernel: Kernel, turn: Turn, number: int) -> Value:
    memory = turn.memory.type
    assert isinstance(memory, Tensor)
    return Value(tensor(memory.dtype, *(memory.shape[axis] for axis in turn.order), align=16), f"{kernel.name}.turned{number}")


def reading(kernel: Kernel, turns: Sequence[Turn], copies: Sequence[Value]) -> Kernel:
    """The contraction with each access going to its turned array."""
    changed: dict[Op, Op] = {}
    for turn, copy in zip(turns, copies, strict=True):
        old = turn.access.operands
        changed[turn.access] = turn.access.with_operands(copy, *(old[1 + axis] for axis in turn.order), *old[5:])
    body = _replaced(kernel.body, changed)
    used = {v for op in walk(body) for v in op.operands}
    return replace(kernel, body=body, params=(*(p for p in kernel.params if p in used), *copies))


def _replaced(block: Block, changed: Mapping[Op, Op]) -> Block:
    ops = tuple(changed.get(op) or (replace(op, regions=tuple(_replaced(r, changed) for r in op.regions)) if op.regions else op) for op in block.ops)
    return replace(block, ops=ops)


def _copying(kernel: Kernel, turn: Turn, copy: Value) -> Kernel:
    """A kernel that fills the turned array, or takes results from it. Height and width are walked as one where they lie so."""
    memory, order = turn.memory, turn.order
    assert isinstance(memory.type, Tensor) and isinstance(copy.type, Tensor)
    b = Builder(kernel.span)
    is_load = turn.access.opcode == "load"
    # Indices are those of the array that is written.
    shape = copy.type.shape if is_load else memory.type.shape

    def body(inner: Builder, *indices: Value) -> list[Value]:
        if is_load:
            inner.multi("store", copy, *indices, inner.op("load", memory, *(indices[order.index(axis)] for axis in LAST)))
        else:
            inner.multi("store", memory, *indices, inner.op("load", copy, *(indices[axis] for axis in order)))
        return []

    with b.at(turn.access.span):
        b.parallel([b.index(e) for e in shape], body, ["n", "h", "w", "c"] if is_load else ["n", "c", "h", "w"])
    params = (memory, copy)
    return collapse(Kernel(f"{kernel.name}.turn", Stage.LOOP, params, Block((), tuple(b.ops)), facts=kernel.facts, span=kernel.span))
