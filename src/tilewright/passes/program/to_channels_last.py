"""Copy images whose channels lie first into ones that have them last, and results back. `Program -> Program`.

In: a program and the schedules of its contractions. Where one says `turn = image`, the convolution's input is first copied to scratch
[n, h, w, c], which the copy engine reads as pixels; where it says `turn = result`, results are written to scratch [n, h, w, k], and a kernel
after the contraction puts them where they belong; `turn = both` does both. `image_gather` turns the input, whose windows are then gathered (`window_rows`). Out: the program with the kernels that copy; the contraction's
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
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, maximum
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.loop.collapse import collapse
from tilewright.passes.schedules.matrix import Wgmma
from tilewright.passes.schedules.plans import Plan, Plans

PLACES = 3
"""Axes of an image, at most."""


def _last(rank: int) -> tuple[int, ...]:
    """The order of axes of an image with channels last."""
    return tuple(range(rank))


@record
class Turn:
    """An access of a kernel, and the axes of its array in the order [n, h, w, c], with one place or three instead of two alike."""

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
    turned: dict[tuple[str, tuple[int, ...]], Value] = {}
    """Images that were copied, by array and order of axes: several kernels read the same copy until somebody writes the array."""
    for call, schedule in zip(program.calls, plans, strict=True):
        written = _written(call)
        if not isinstance(schedule, Wgmma) or schedule.to_channels_last not in ("image", "result", "both", "image_gather"):
            calls.append(call)
            schedules.append(schedule)
            turned = {key: copy for key, copy in turned.items() if key[0] not in written}
            continue
        call = replace(call, kernel=upwards(call.kernel))
        turns = turns_of(call.kernel).get(schedule.to_channels_last.partition("_")[0])
        if turns is None:
            raise CompilerBug.at("TW040", f"{call.kernel.name} has no images to turn", call.kernel.span)
        names = dict(zip(call.kernel.params, call.args, strict=True))
        ready = [None if t.access.opcode != "load" or call.loops else turned.get((names[t.memory], t.order)) for t in turns]
        copies = [copy or _turned(call.kernel, turn, len(scratch) + number) for number, (turn, copy) in enumerate(zip(turns, ready, strict=True))]
        main = reading(call.kernel, turns, copies)
        given = names | {copy: copy.name for copy in copies}
        before: list[KernelCall] = []
        after: list[KernelCall] = []
        turned = {key: copy for key, copy in turned.items() if key[0] not in written}
        for turn, copy in zip(turns, copies, strict=True):
            if copy in ready:
                continue
            is_load = turn.access.opcode == "load"
            if is_load and not call.loops:
                turned[names[turn.memory], turn.order] = copy
            kernel = _copying(call.kernel, turn, copy)
            (before if is_load else after).append(KernelCall(kernel, (names[turn.memory], copy.name), call.loops))
            assert isinstance(copy.type, Tensor)
            scratch.append(ProgramArray(copy.name, copy.type, "scratch"))
        if schedule.to_channels_last == "image_gather":
            schedule = replace(schedule, to_channels_last="gather")
        calls += [*before, KernelCall(main, tuple(given[p] for p in main.params), call.loops), *after]
        schedules += [*(None for _ in before), schedule, *(None for _ in after)]
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def _written(call: KernelCall) -> set[str]:
    """The arrays that a call writes."""
    names = dict(zip(call.kernel.params, call.args, strict=True))
    return {names[op.operands[0]] for op in walk(call.kernel.body) if op.opcode in ("store", "atomic", "accumulate") and op.operands[0] in names}


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
    ragged = not memory.shape[order[-1]].divisible_by(max(1, 16 // memory.dtype.itemsize), kernel.facts)
    lies_otherwise = order != _last(memory.rank) or memory.strides[-1] != ONE or memory.rank == 3 or ragged
    image = [Turn(factor.load, order)] if lies_otherwise and factor.load.operands[0] not in written else []
    result = _result(kernel, found, factor)
    ways = {"image": image, "result": result, "both": [*image, *result] if image and result else []}
    # Where both lie channels first, turning the result alone leaves an image nobody can read.
    return {name: turns for name, turns in ways.items() if turns and not (name == "result" and image)}


def turned_kernel(kernel: Kernel, turn: str) -> Kernel:
    """The contraction as it is once its images have been turned."""
    kernel = upwards(kernel)
    turns = turns_of(kernel)[turn]
    return reading(kernel, turns, [_turned(kernel, t, number) for number, t in enumerate(turns)])


def _image_order(found: Contraction, factor: Factor) -> tuple[int, ...] | None:
    """The axes of a factor that is a plain load, in the order [n, h, w, c]; None where it is no load of an image."""
    memory = factor.tensor
    side = found.m if factor is found.a else found.n
    if memory is None or not 3 <= memory.rank <= PLACES + 2 or len(side) != memory.rank - 1:
        return None
    forms = found.access(factor)
    batch, *places = (found.indices[p] for p in side)
    if memory.rank == 3 and not any(k in form.values for form in forms for k in found.k if not form.is_just(k)):
        return None  # a product in batches, which is no image
    taken = [
        [axis for axis, form in enumerate(forms) if form.is_just(batch)],
        *([axis for axis, form in enumerate(forms) if own in form.values] for own in places),
        [axis for axis, form in enumerate(forms) if any(form.is_just(k) for k in found.k)],
    ]
    order = tuple(axes[0] for axes in taken if len(axes) == 1)
    return order if sorted(order) == list(_last(memory.rank)) else None


def _result(kernel: Kernel, found: Contraction, image: Factor) -> list[Turn]:
    """The only store of a kernel, where every result has a place of its own and what is not the image's side lies other than last."""
    stores = [op for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")]
    if len(stores) != 1 or stores[0].opcode != "store" or stores[0].attrs.get("masked"):
        return []
    (store,) = stores
    memory = store.operands[0]
    assert isinstance(memory.type, Tensor)
    pixels, others = (found.m, found.n) if image is found.a else (found.n, found.m)
    rank = memory.type.rank
    if not 3 <= rank <= PLACES + 2 or rank != len(pixels) + 1 or len(others) != 1 or store not in found.parallel.regions[0].ops:
        return []
    if any(memory in op.operands for op in walk(kernel.body) if op is not store):
        return []
    indices = [found.indices[p] for p in (*pixels, *others)]
    places = [next((axis for axis, v in enumerate(store.operands[1 : 1 + rank]) if found.forms[v].is_just(i)), -1) for i in indices]
    extents = [found.extents[p] for p in (*pixels, *others)]
    if -1 in places or places == list(_last(rank)):
        return []
    # What no loop writes stays as it is: the copy must not write it either. No array has a negative extent.
    if any(e not in (memory.type.shape[a], maximum(ZERO, memory.type.shape[a])) for a, e in zip(places, extents, strict=True)):
        return []
    return [Turn(store, tuple(places))]


def _turned(kernel: Kernel, turn: Turn, number: int) -> Value:
    memory = turn.memory.type
    assert isinstance(memory, Tensor)
    batch, *places, channels = (memory.shape[axis] for axis in turn.order)
    if turn.access.opcode == "load":
        # The copy engine's images have two axes at least, and rows of whole 16 bytes.
        places = [*([ONE] if memory.rank == 3 else []), *places]
        unit = max(1, 16 // memory.dtype.itemsize)
        channels = channels if channels.divisible_by(unit, kernel.facts) else ceildiv(channels, Size.of(unit)) * unit
    return Value(tensor(memory.dtype, batch, *places, channels, align=16), f"{kernel.name}.turned{number}")


def reading(kernel: Kernel, turns: Sequence[Turn], copies: Sequence[Value]) -> Kernel:
    """The contraction with each access going to its turned array."""
    changed: dict[Op, list[Op]] = {}
    for turn, copy in zip(turns, copies, strict=True):
        old, rank = turn.access.operands, len(turn.order)
        batch, *rest = (old[1 + axis] for axis in turn.order)
        b = Builder(turn.access.span)
        flat = [b.index(0)] if isinstance(copy.type, Tensor) and copy.type.rank > rank else []
        changed[turn.access] = [*b.ops, turn.access.with_operands(copy, batch, *flat, *rest, *old[1 + rank :])]
    body = _replaced(kernel.body, changed)
    used = {v for op in walk(body) for v in op.operands}
    return replace(kernel, body=body, params=(*(p for p in kernel.params if p in used), *copies))


def _replaced(block: Block, changed: Mapping[Op, list[Op]]) -> Block:
    ops: list[Op] = []
    for op in block.ops:
        ops += changed.get(op) or [replace(op, regions=tuple(_replaced(r, changed) for r in op.regions)) if op.regions else op]
    return replace(block, ops=tuple(ops))


def upwards(kernel: Kernel) -> Kernel:
    """The kernel with sums that read an image backwards, as transposed convolutions do, running the other way: the copy engine walks upwards. Weights follow."""
    found = find_contraction(kernel)
    if found is None:
        return kernel
    images = [f for f in (found.a, found.b) if _image_order(found, f) is not None]
    if len(images) != 1:
        return kernel
    numbers = {p: [n for form in found.access(images[0]) if (n := form.factor(k).constant)] for p, k in enumerate(found.k)}
    backwards = [p for p, own in numbers.items() if own and max(own) < 0]
    if not backwards:
        return kernel
    region = found.reduction.regions[0]
    b = Builder(found.reduction.span)
    mapping: dict[Value, Value] = {}
    args = [Value(a.type, a.name) for a in region.args]
    for p, (old, new) in enumerate(zip(region.args, args, strict=True)):
        mapping[old] = b.sub(b.index(found.reduce_extents[p] - 1), new) if p in backwards else new
    clone_ops(b, region.ops, mapping)
    turned = replace(found.reduction, regions=(Block(tuple(args), tuple(b.ops)),))
    return replace(kernel, body=_replaced(kernel.body, {found.reduction: [turned]}))


def _copying(kernel: Kernel, turn: Turn, copy: Value) -> Kernel:
    """A kernel that fills the turned array, or takes results from it. Height and width are walked as one where they lie so."""
    memory, order = turn.memory, turn.order
    assert isinstance(memory.type, Tensor) and isinstance(copy.type, Tensor)
    b = Builder(kernel.span)
    is_load = turn.access.opcode == "load"
    # Indices are those of the array that is written.
    flat = is_load and copy.type.rank > len(order)
    dtype, channels = memory.type.dtype, memory.type.shape[order[-1]]
    shape = [*(memory.type.shape[axis] for axis in order[:-1]), copy.type.shape[-1]] if is_load else memory.type.shape

    def body(inner: Builder, *indices: Value) -> list[Value]:
        if is_load:
            batch, *rest = indices
            places = [batch, *([inner.index(0)] if flat else []), *rest]
            element = [indices[order.index(axis)] for axis in _last(len(order))]
            if shape[-1] == channels:
                value = inner.op("load", memory, *element)
            else:
                inside = inner.op("lt", indices[-1], inner.index(channels))
                (value,) = inner.if_(inside, lambda deep: [deep.op("load", memory, *element)], lambda deep: [deep.const(0, dtype)])
            inner.multi("store", copy, *places, value)
        else:
            inner.multi("store", memory, *indices, inner.op("load", copy, *(indices[axis] for axis in order)))
        return []

    with b.at(turn.access.span):
        axes = list("dhw"[PLACES + 2 - len(order) :])
        b.parallel([b.index(e) for e in shape], body, ["n", *axes, "c"] if is_load else ["n", "c", *axes])
    params = (memory, copy)
    return collapse(Kernel(f"{kernel.name}.turn", Stage.LOOP, params, Block((), tuple(b.ops)), facts=kernel.facts, span=kernel.span))
