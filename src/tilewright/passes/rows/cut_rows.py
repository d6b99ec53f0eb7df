"""Rows and sums that one block would walk for long become several kernels, so that the whole device takes part. `Program -> Program`.

In: a program of loop-stage kernels. Out: the same, where a kernel without a plan, whose reductions walk several axes or whose rows are walked several
times, is cut on a GPU: each group of reductions is a kernel of partial results, for stretches that stay in registers, and one that combines them; what
was done along the rows is a kernel with a point for every element. On a CPU, reductions of whole arrays that stand beside one another are cut in this way:
the parts of a complex sum, say. `split_reductions` cuts single sums over one axis.

    parallel %c (%j) { %s = reduce %n, %m {x[i, j, k]}; …; %q = reduce %n, %m {(x[i, j, k] - mean)^2}; …; for %i { for %k { out[i, j, k] = … } } }
    -> parallel %c, %parts, %n (%j, %p, %i) { t = reduce 4096 {x[i, j, 4096*p + k]}; u = t / length; q = reduce 4096 {(x[…] - u)^2}; store }
       parallel %c (%j) { s = sum of t; q = sum of q + length * (t / length - mean)^2; store; … }
       parallel %n, %c, %m (%i, %j, %k) { out[i, j, k] = … }

Squares about a mean are taken about that of their own stretch, exponentials below a maximum below that of their own: nothing is read twice, and no digits
are lost (Chan's way to combine them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import Forms, address, analyse
from tilewright.analysis.loop_nest import Nest, aligned_rows, is_near, nest_of
from tilewright.analysis.recomputed import Keys
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size, ceildiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, is_watched, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.choose.loops import hint, power_of_two, row_schedule
from tilewright.passes.choose.wishes import wishes_for_loops
from tilewright.passes.common.combine import identities
from tilewright.passes.loop.collapse import collapse
from tilewright.passes.rows.flatten_rows import AxesWalk, flattened, row_walks
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.tree.metadata import KernelMetadata

LEAST = 1 << 17
"""Elements from which on further launches are worth it."""
LONGEST, SHORTEST = 8192, 32
"""Elements of a stretch: as many as stay in registers of a block, and as few as are worth a warp."""
LONG = 1024
"""Terms of a sum over several axes that is cut however many there are: blocks would meet once for each turn of the outer loops."""
LONG_ROW = 1 << 16
"""Rows from this long on are cut however many there are."""


@record(identity=True)
class _StretchReduction:
    """A reduction of a group. `about`: the one whose own stretch it is taken about, for `kind` squares or exponentials."""

    own: AxesWalk
    kind: str = "plain"
    about: Op | None = None
    centre: Value | None = None
    """What the text has in the place of that."""

    @property
    def op(self) -> Op:
        return self.own.op


@record(identity=True)
class _Cut:
    """How a nest is cut."""

    nest: Nest
    groups: tuple[tuple[_StretchReduction, ...], ...]
    sweeps: tuple[AxesWalk, ...]
    inner: int
    """The index of the walks that stretches lie along."""
    crosswise: bool
    chunk: Size
    parts: Size
    rows: int | None = None
    """The index along which rows lie, where stretches are of whole rows, and not of parts of one."""


def cut_rows(
    program: Program, plans: Plans, target: Target, hints: Mapping[str, int], metadata: KernelMetadata | None = None
) -> tuple[Program, Plans]:
    """The program with such kernels cut, and the plans for the calls there are then."""
    if target.has("serial"):
        return program, plans
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        own = metadata.of(call.kernel.name) if metadata is not None else None
        plain = schedule is None and not call.varies and "apart" not in call.kernel.attrs and not wishes_for_loops(own)
        made = _Cutting(call, len(scratch), target, hints).run() if plain else None
        if made is None:
            calls.append(call)
            schedules.append(schedule)
            continue
        for part in made.calls:
            calls.append(part)
            schedules.append(row_schedule(part.kernel, target, {}) if "stretch" in part.kernel.attrs and target.simt else None)
        scratch += made.arrays
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def would_cut(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> bool:
    """Whether a kernel without a plan is cut."""
    return not target.has("serial") and find_cut(kernel, target, hints) is not None


def find_cut(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> _Cut | None:
    """How a kernel is cut, if it is."""
    if is_watched(kernel) or kernel.attrs.keys() & {"reduce_extent", "rows_in_turn"} or kernel.attrs.get("in_order"):
        return None
    nest = nest_of(kernel)
    region = nest.parallel.regions[0]
    forms = analyse(kernel)
    walks = row_walks(region, forms)
    if not walks or any(w.extents != walks[0].extents for w in walks) or not walks[0].extents:
        return None
    reductions = [w for w in walks if w.op.opcode == "reduce"]
    sweeps = tuple(w for w in walks if w.op.opcode == "for")
    if not reductions or not _is_plain(region, walks) or any("packed" in w.op.attrs for w in reductions):
        return None
    several = len(walks[0].extents) > 1
    if len(walks) == 1 and not several:
        return None
    if not target.simt:
        return _cut_for_cores(nest, walks, reductions, target)
    lengths = [hint(e, hints) for e in walks[0].extents]
    results, length = hint(product(nest.extents), hints), hint(product(walks[0].extents), hints)
    crosswise = _walks_across(region, walks, forms)
    columns = 4 * target.warp_size if crosswise else 1
    busy = max(1, results // columns)
    few = busy <= target.multiprocessors * (target.costs.reductions.enough_across if crosswise else 1)
    wide = (several and not crosswise and length >= LONG) or (len(walks) > 1 and length >= LONG_ROW)
    if results * length < max(1, LEAST) or not (few or wide):
        return None
    inner = _inner(walks[0], lengths, crosswise, forms)
    extent = walks[0].extents[inner]
    if crosswise:
        if lengths[inner] <= target.costs.reductions.fewest_rows:
            return None
        wanted = Size.of(max(1, target.multiprocessors * target.costs.reductions.blocks_across))
        others = product([e for p, e in enumerate(walks[0].extents) if p != inner])
        points = maximum(ONE, ceildiv(product(nest.extents), Size.of(columns)) * others)
        parts = maximum(ONE, minimum(ceildiv(extent, Size.of(64)), ceildiv(wanted, points)))
        chunk = ceildiv(ceildiv(extent, parts), Size.of(64)) * 64
    else:
        stretch = _stretch_of_rows(walks, lengths, inner, results, target)
        if stretch is not None:
            several_rows, count = stretch
            parts = maximum(ONE, ceildiv(walks[0].extents[several_rows], Size.of(count)))
            return _Cut(nest, _groups(region, reductions), (), several_rows, False, Size.of(count), parts, inner)
        if lengths[inner] < SHORTEST:
            return None
        vector = max(1, min(8, target.vector_bytes // nest.narrowest))
        shift = vector if aligned_rows(kernel, nest, vector) < vector else 0  # a stretch that begins between vectors has room for what is before it
        chunk = Size.of(max(SHORTEST, min(LONGEST - shift, power_of_two(lengths[inner]))))
        parts = maximum(ONE, ceildiv(extent, chunk))
        if len(reductions) == 1 and lengths[inner] > LONGEST:
            # Nothing has to stay in registers: stretches are about equally long, and whole steps of a block but for the last of a row.
            step = max(1, LONGEST // 4)
            chunk = ceildiv(ceildiv(extent, parts), Size.of(step)) * step
    if results * length // max(1, min(lengths[inner], hint(chunk, hints))) * 8 > _read(reductions, hints):
        return None  # windows that overlap: there would be more partial results than numbers
    groups = _groups(region, reductions)
    return _Cut(nest, groups, sweeps, inner, crosswise, chunk, parts)


def _stretch_of_rows(walks: Sequence[AxesWalk], lengths: Sequence[int], inner: int, results: int, target: Target) -> tuple[int, int] | None:
    """The index across rows that is cut, and how many rows a block adds up one after another, where rows are short and one reduction is all there is. None where blocks are
    better off with parts of a row."""
    costs = target.costs.reductions
    others = [p for p in range(len(lengths)) if p != inner]
    if len(walks) != 1 or not others or not SHORTEST // 2 <= lengths[inner] <= costs.short_row or str(walks[0].op.attrs["kind"]).startswith("arg"):
        return None
    axis = max(others, key=lambda p: (lengths[p], p))
    points = results
    for p in others:
        points *= lengths[p]
    count = min(costs.stretch // lengths[inner], lengths[axis], points // (target.multiprocessors * costs.blocks_of_rows))
    return (axis, power_of_two(count + 1) // 2) if count > 1 else None


def _cut_for_cores(nest: Nest, walks: Sequence[AxesWalk], reductions: Sequence[AxesWalk], target: Target) -> _Cut | None:
    """On a CPU, reductions of all there is, beside one another: results that are more than one are shared out among the cores as they are."""
    if nest.extents or len(walks[0].extents) != 1 or len(reductions) != len(walks):
        return None
    chunk = Size.of(target.costs.reductions.cpu_stretch)
    groups = _groups(nest.parallel.regions[0], reductions)
    return _Cut(nest, groups, (), 0, True, chunk, maximum(ONE, ceildiv(walks[0].extents[0], chunk)))


def _read(reductions: Sequence[AxesWalk], hints: Mapping[str, int]) -> int:
    """Elements of the largest array that reductions read."""
    loads = [op for w in reductions for op in walk(Block((), w.ops)) if op.opcode == "load"]
    return max((hint(product(op.operands[0].type.shape), hints) for op in loads if isinstance(op.operands[0].type, Tensor)), default=0)


def _walks_across(region: Block, walks: Sequence[AxesWalk], forms: Forms) -> bool:
    """Whether memory lies along an index of the results, and not along the walks."""
    along = across = 0
    for w in walks:
        for op in walk(Block((), w.ops)):
            if op.opcode in ("load", "store"):
                form = address(op, forms)
                if not any(v in form.values for v in w.indices):
                    continue
                size = dtype_of(op.operands[0].type).itemsize
                along += size * any(is_near(form.factor(v)) for v in w.indices)
                across += size * any(is_near(form.factor(v)) for v in region.args)
    return across >= along


def _is_plain(region: Block, walks: Sequence[AxesWalk]) -> bool:
    """Whether all beside the walks can be computed again anywhere, but for stores at the end; and nothing that is written is read."""
    own = {w.op for w in walks}
    written = {op.operands[0] for op in walk(region) if op.opcode == "store"}
    for op in region.ops:
        if op in own or op.opcode in ("store", "yield"):
            continue
        if has_effects(op) or any(inner.opcode in ("reduce", "for", "while") for inner in walk(Block((), (op,)))):
            return False
    for w in walks:
        if w.op.opcode == "reduce" and has_effects(w.op):
            return False
        if any(op.opcode in ("while", "for", "reduce", "accumulate", "atomic") for o in w.ops for op in walk(Block((), (o,)))):
            return False
    return all(_keeps_order(region, walks, memory) for memory in written)


def _keeps_order(region: Block, walks: Sequence[AxesWalk], memory: Value) -> bool:
    """Whether an array that is written is read where the kernels that come of the nest still read the same: by reductions and the last sweep, which alone
    writes it, or only beside the walks, for what is stored there."""
    places: dict[int, set[str]] = {}
    for position, op in enumerate(region.ops):
        for inner in walk(Block((), (op,))):
            if memory in inner.operands:
                places.setdefault(position, set()).add(inner.opcode)
    own = {region.ops.index(w.op): w for w in walks}
    stored = [p for p, found in places.items() if "store" in found]
    loaded = [p for p, found in places.items() if found != {"store"}]
    if not loaded:
        return True
    if any(found - {"load", "store"} for found in places.values()):
        return False
    if stored == [max(own)]:
        return all(p in own and (p == stored[0] or own[p].op.opcode == "reduce") for p in loaded)
    if any(p in own for p in places):
        return False
    results = {r for p in loaded for r in region.ops[p].results}
    made = {result: op for op in region.ops for result in op.results}
    return not any(_depends(w.op, results, made) for w in walks)


def _inner(own: AxesWalk, lengths: Sequence[int], crosswise: bool, forms: Forms) -> int:
    """The index of the walks that stretches lie along: the one that walks memory, or across memory the longest."""
    if crosswise:
        return max(range(len(lengths)), key=lambda p: (lengths[p], p))
    weights = [0] * len(lengths)
    for op in walk(Block((), own.ops)):
        if op.opcode in ("load", "store"):
            form = address(op, forms)
            for p, index in enumerate(own.indices):
                weights[p] += is_near(form.factor(index))
    return max(range(len(lengths)), key=lambda p: (weights[p], p))


# -- groups of reductions -----------------------------------------------------------------------------------------


def _groups(region: Block, reductions: Sequence[AxesWalk]) -> tuple[tuple[_StretchReduction, ...], ...]:
    """Reductions that one pass finds, in order."""
    groups: list[list[_StretchReduction]] = []
    made = {result: op for op in region.ops for result in op.results}
    for own in reductions:
        member = _StretchReduction(own)
        if groups:
            inside = {result for other in groups[-1] for result in other.op.results}
            if _depends(own.op, inside, made):
                found = _about(own, groups[-1], made)
                if found is None:
                    groups.append([])
                else:
                    member = found
        else:
            groups.append([])
        groups[-1].append(member)
    return tuple(tuple(group) for group in groups)


def _depends(op: Op, on: set[Value], made: Mapping[Value, Op]) -> bool:
    """Whether an op, or what it is computed from beside it, uses one of the values."""
    pending = [v for o in (op, *(i for r in op.regions for i in walk(r))) for v in o.operands]
    seen: set[Value] = set()
    while pending:
        value = pending.pop()
        if value in on:
            return True
        source = made.get(value)
        if source is not None and value not in seen:
            seen.add(value)
            pending += [v for o in (source, *(i for r in source.regions for i in walk(r))) for v in o.operands]
    return False


def _about(own: AxesWalk, group: Sequence[_StretchReduction], made: Mapping[Value, Op]) -> _StretchReduction | None:
    """The reduction as one about its own stretch: squares of what terms of a sum are away from something, or exponentials below a maximum."""
    region = own.op.regions[0]
    if own.op.attrs["kind"] != "add" or len(own.op.results) != 1 or any(op.regions for op in region.ops):
        return None
    inside = {result: op for op in region.ops for result in op.results}
    last = inside.get(region.yields[0])
    if last is None or not dtype_of(last.results[0].type).is_float:
        return None
    kind = "squares" if last.opcode == "mul" and last.operands[0] is last.operands[1] else "exponentials" if last.opcode == "exp" else ""
    away = inside.get(last.operands[0]) if kind else None
    if away is None or away.opcode != "sub" or away.operands[0] not in inside or away.operands[1] in inside or away.operands[1] in region.args:
        return None
    term, centre = away.operands
    for other in group:
        wanted = "add" if kind == "squares" else "max"
        if other.kind != "plain" or other.op.attrs["kind"] != wanted or other.op.results[0].type != own.op.results[0].type:
            continue
        if kind == "exponentials" and centre is not other.op.results[0]:
            continue
        if _same_term(other.own, own, term):
            rest = {result for one in group if one is not other for result in one.op.results}
            trial = Op("unknown", (centre,))
            if not _depends(trial, rest, made):
                return _StretchReduction(own, kind, other.op, centre)
    return None


def _same_term(first: AxesWalk, second: AxesWalk, term: Value) -> bool:
    """Whether a value in the second walk is what the first one combines."""
    if any(op.regions for op in first.op.regions[0].ops):
        return False
    mapping = dict(zip(first.indices, second.indices, strict=True))
    b = Builder()
    clone_ops(b, first.op.regions[0].ops[:-1], mapping)
    value = mapping.get(first.op.regions[0].yields[0], first.op.regions[0].yields[0])
    trial = replace(second.op, regions=(Block(second.op.regions[0].args, (*b.ops, Op("yield", (value,)))),))
    keys = [Keys(second.indices[-1], op, set()).of(v) for op, v in ((trial, value), (second.op, term))]
    return keys[0] is not None and keys[0] == keys[1]


# -- the kernels --------------------------------------------------------------------------------------------------


class _Cutting:
    def __init__(self, call: KernelCall, number: int, target: Target, hints: Mapping[str, int]) -> None:
        self.call, self.kernel, self.target, self.hints = call, call.kernel, target, hints
        self.number = number
        self.calls: list[KernelCall] = []
        self.arrays: list[ProgramArray] = []
        self.names = dict(zip(self.kernel.params, call.args, strict=True))
        self.known: dict[Value, Value] = {}
        """Results of groups that are in memory, with the arrays that hold them."""

    def run(self) -> _Cutting | None:
        cut = find_cut(self.kernel, self.target, self.hints)
        if cut is None:
            return None
        flat = self.flat_sums(cut)
        self.begin(self.kernel, cut)
        if flat is not None:
            self.names.update(zip(flat[0].params, self.call.args, strict=True))
            self.begin(*flat)
        stores = [op for op in self.region.ops if op.opcode == "store"]
        for position, group in enumerate(self.cut.groups):
            self.group(group, stores if position == len(self.cut.groups) - 1 else [], position)
        self.begin(self.kernel, cut)
        for position, own in enumerate(cut.sweeps):
            self.sweep(own, position)
        return self

    def begin(self, kernel: Kernel, cut: _Cut) -> None:
        """Cut this form of the kernel."""
        self.cut = cut
        self.source = kernel
        self.region = cut.nest.parallel.regions[0]
        self.made = {result: op for op in self.region.ops for result in op.results}

    def flat_sums(self, cut: _Cut) -> tuple[Kernel, _Cut] | None:
        """The kernel with rows of one axis, where sums over them follow memory and need no quotients: stretches of them are longer, and all but the last are whole."""
        flat = flattened(self.kernel) if self.target.simt and not cut.crosswise else None
        whole = find_cut(flat, self.target, self.hints) if flat is not None else None
        if flat is None or whole is None or any(op.opcode == "floordiv" for group in whole.groups for member in group for o in member.own.ops for op in walk(Block((), (o,)))):
            return None
        return flat, whole

    def array(self, value: Value, shape: tuple[Size, ...], what: str) -> Value:
        found = Value(tensor(dtype_of(value.type), *shape, align=16), f"{self.kernel.name}.{what}{self.number + len(self.arrays)}")
        assert isinstance(found.type, Tensor)
        self.arrays.append(ProgramArray(found.name, found.type, "scratch"))
        self.names[found] = found.name
        return found

    def needed(self, values: Sequence[Value], given: set[Value]) -> list[Op]:
        """The ops beside the walks that values are computed from, in order."""
        chosen: set[int] = set()
        pending = list(values)
        while pending:
            value = pending.pop()
            op = self.made.get(value)
            if value in given or value in self.known or op is None or id(op) in chosen:
                continue
            chosen.add(id(op))
            pending += [v for o in (op, *(i for r in op.regions for i in walk(r))) for v in o.operands]
        return [op for op in self.region.ops if id(op) in chosen]

    def used(self, ops: Sequence[Op]) -> list[Value]:
        return [v for op in ops for o in (op, *(i for r in op.regions for i in walk(r))) for v in o.operands]

    def load_known(self, b: Builder, values: Sequence[Value], local: dict[Value, Value], indices: Sequence[Value]) -> None:
        """Load the results of earlier groups that some values are computed from."""
        wanted = set(self.used(self.needed(values, set()))) | set(values)
        for value, memory in self.known.items():
            if value in wanted and value not in local:
                local[value] = b.op("load", memory, *indices)

    def add(self, name: str, b: Builder, attributes: Mapping[str, Attr]) -> None:
        attrs = {**self.kernel.attrs, **attributes}
        kernel = Kernel(name, Stage.LOOP, (), Block((), tuple(b.ops)), facts=self.kernel.facts, attrs=MappingProxyType(attrs), span=self.kernel.span)
        kernel = eliminate_dead(kernel)
        used = {v for op in walk(kernel.body) for v in op.operands}
        kernel = replace(kernel, params=tuple(p for p in self.names if p in used))
        args = tuple(self.names[p] for p in kernel.params)
        self.calls.append(KernelCall(collapse(kernel), args, self.call.loops))

    def nest_of_points(self, name: str, extents: Sequence[Size], names: Sequence[str], body: Callable[..., list[Value]], **attributes: Attr) -> None:
        b = Builder(self.kernel.span)
        outside: dict[Value, Value] = {}
        clone_ops(b, [op for op in self.source.body.ops if op.opcode != "parallel"], outside)
        with b.at(self.cut.nest.parallel.span):
            b.parallel([b.index(e) for e in extents], lambda inner, *indices: body(inner, outside, *indices), names)
        self.add(name, b, attributes)

    def group(self, group: Sequence[_StretchReduction], stores: Sequence[Op], position: int) -> None:
        cut, nest = self.cut, self.cut.nest
        first = group[0].own
        outer = [p for p in range(len(first.extents)) if p not in (cut.inner, cut.rows)]
        count = len(nest.extents)
        own_names = [a.name for a in self.region.args]
        further = [cut.parts, *(first.extents[p] for p in outer)]
        extents = (*further, *nest.extents) if cut.crosswise else (*nest.extents, *further)
        others = ["part", *(first.indices[p].name for p in outer)]
        names = [*others, *own_names] if cut.crosswise else [*own_names, *others]
        partials = {result: self.array(result, extents, "part") for member in group for result in member.op.results}

        def points(indices: Sequence[Value]) -> tuple[Sequence[Value], Value, Sequence[Value]]:
            """The indices of a result, the number of the stretch, and the other indices of the walk."""
            own, rest = (indices[len(further) :], indices[: len(further)]) if cut.crosswise else (indices[:count], indices[count:])
            return own, rest[0], rest[1:]

        def begin(b: Builder, part: Value) -> Value:
            return b.mul(part, b.index(cut.chunk))

        def length(b: Builder, part: Value) -> Value:
            left = b.op("max", b.sub(b.index(first.extents[cut.inner]), begin(b, part)), b.index(0))
            return b.op("min", left, b.index(cut.chunk))

        def stretches(b: Builder, outside: dict[Value, Value], *indices: Value) -> list[Value]:
            own, part, rest = points(indices)
            local = dict(outside) | dict(zip(self.region.args, own, strict=True))
            results = {r for member in group for r in member.op.results}
            needs = [v for member in group for v in self.used(member.op.regions[0].ops)]
            beside = [op for op in self.needed(needs, results) if not self.reads(op, results)]
            self.load_known(b, needs, local, own)
            clone_ops(b, beside, local)
            start, found = begin(b, part), dict[Value, Value]()
            for member in group:
                values = self.reduce_stretch(b, member, local, start, length(b, part), rest, outer, found, cut.crosswise or self.is_single(group))
                found.update(zip(member.op.results, values, strict=True))
            # At the end, so that sums over the same range are added up in one loop.
            for old, new in found.items():
                b.multi("store", partials[old], *indices, new)
            return []

        attributes: dict[str, Attr] = {} if cut.crosswise else {"rows_in_turn": True} if cut.rows is not None else {"reduce_extent": cut.chunk} if self.is_single(group) else {"stretch": True} if len(group) > 1 else {}
        self.nest_of_points(f"{self.kernel.name}.parts{position}", extents, names, stretches, **attributes)
        kept = {} if not cut.sweeps and position == len(cut.groups) - 1 else {
            r: self.array(r, tuple(nest.extents), "result") for member in group for r in member.op.results
        }  # fmt: skip

        def combined(b: Builder, outside: dict[Value, Value], *own: Value) -> list[Value]:
            local = dict(outside) | dict(zip(self.region.args, own, strict=True))
            ends = [v for op in stores for v in op.operands]
            centres = [m.centre for m in group if m.centre is not None]
            self.load_known(b, [*ends, *centres], local, own)
            members = {member.op: member for member in group}
            wanted = {id(op) for op in self.needed([*ends, *centres], set())} | {id(m.op) for m in group} | {id(op) for op in stores}
            for op in self.region.ops:
                if op in members:
                    values = self.reduce_partials(b, members[op], local, own, partials, further, length)
                    for old, new in zip(op.results, values, strict=True):
                        local[old] = new
                        if old in kept:
                            b.multi("store", kept[old], *own, new)
                elif id(op) in wanted and all(r not in local for r in op.results):
                    clone_ops(b, [op], local)
            return []

        self.nest_of_points(f"{self.kernel.name}.{position}", nest.extents, own_names, combined)
        self.known |= kept

    def is_single(self, group: Sequence[_StretchReduction]) -> bool:
        """Whether one sum is all there is: blocks take stretches as long as they are, and the last may be shorter."""
        return len(group) == len(self.cut.groups) == 1 and not self.cut.sweeps and self.target.simt

    def reads(self, op: Op, results: set[Value]) -> bool:
        """Whether an op beside the walks needs a result of the group at hand."""
        return _depends(op, results, self.made)

    def reduce_stretch(
        self, b: Builder, member: _StretchReduction, local: Mapping[Value, Value], start: Value, count: Value, rest: Sequence[Value], outer: Sequence[int],
        found: Mapping[Value, Value], exact: bool,
    ) -> tuple[Value, ...]:  # fmt: skip
        """A reduction over one stretch, about what the stretch itself has. `exact`: it ends where the row does; else terms behind the end are left out."""
        cut, own = self.cut, member.own
        region = member.op.regions[0]
        extent = own.extents[cut.inner]
        dtypes = [dtype_of(r.type) for r in member.op.results]
        kind = str(member.op.attrs["kind"])
        centre: Value | None = None
        if member.about is not None:
            centre = found[member.about.results[0]]
            if member.kind == "squares":
                centre = b.op("div", centre, b.cast(count, dtypes[0]))

        def at(deep: Builder, position: Value, *along: Value) -> Sequence[Value]:
            inside = dict(local)
            inside[own.indices[cut.inner]] = position
            if cut.rows is not None:
                inside[own.indices[cut.rows]] = along[0]
            inside.update(zip((own.indices[p] for p in outer), rest, strict=True))
            if centre is not None and member.centre is not None:
                inside[member.centre] = centre
            clone_ops(deep, region.ops[:-1], inside)
            return [inside.get(v, v) for v in region.yields]

        even = extent.divisible_by(cut.chunk.constant, self.kernel.facts) if cut.chunk.constant is not None else False

        def term(deep: Builder, k: Value, *along: Value) -> Sequence[Value]:
            position = deep.add(start, k)
            if exact or even:
                return at(deep, position, *along)
            inside = deep.op("lt", position, deep.index(extent))
            nothing = [deep.const(v, d) for v, d in zip(identities(kind, dtypes), dtypes, strict=True)]
            return deep.if_(inside, lambda then: at(then, position), lambda otherwise: nothing)

        walked = [cut.inner] if cut.rows is None else [cut.inner, cut.rows]
        lengths = [count if exact else b.index(cut.chunk), *(b.index(own.extents[p]) for p in walked[1:])]
        return b.reduce(kind, lengths, term, [own.indices[p].name for p in walked])

    def reduce_partials(
        self, b: Builder, member: _StretchReduction, local: Mapping[Value, Value], own: Sequence[Value], partials: Mapping[Value, Value],
        further: Sequence[Size], length: Callable[[Builder, Value], Value],
    ) -> tuple[Value, ...]:  # fmt: skip
        """The results of all stretches as one."""
        kind = str(member.op.attrs["kind"])
        dtypes = [dtype_of(r.type) for r in member.op.results]

        def term(deep: Builder, *rest: Value) -> list[Value]:
            where = (*rest, *own) if self.cut.crosswise else (*own, *rest)
            values = [deep.op("load", partials[r], *where) for r in member.op.results]
            if member.about is None or member.centre is None:
                return values
            other = deep.op("load", partials[member.about.results[0]], *where)
            centre = local[member.centre]
            if member.kind == "squares":
                terms = length(deep, rest[0])
                count = deep.cast(terms, dtypes[0])
                away = deep.sub(deep.op("div", other, count), centre)
                moved = deep.op("fma", deep.mul(away, away), count, values[0])
                return [deep.select(deep.op("gt", terms, deep.index(0)), moved, deep.const(0, dtypes[0]))]
            scaled = deep.mul(values[0], deep.op("exp", deep.sub(other, centre)))
            low = deep.const(float("-inf"), dtypes[0])
            empty = deep.logical_and(deep.op("eq", other, low), deep.op("gt", centre, low))
            return [deep.select(empty, deep.const(0, dtypes[0]), scaled)]

        return b.reduce(kind, [b.index(e) for e in further], term, ["part", *(f"o{p}" for p in range(len(further) - 1))])

    def sweep(self, own: AxesWalk, position: int) -> None:
        """What is done along the rows, with a point for every element; walk indices come where memory has them."""
        nest = self.cut.nest
        order = self.memory_order(own)
        every = [*zip(self.region.args, nest.extents, strict=True), *zip(own.indices, own.extents, strict=True)]
        ordered = [every[p] for p in order]

        def body(b: Builder, outside: dict[Value, Value], *indices: Value) -> list[Value]:
            local = dict(outside) | dict(zip((v for v, _ in ordered), indices, strict=True))
            points = [local[v] for v in self.region.args]
            needs = self.used(own.ops)
            self.load_known(b, needs, local, points)
            clone_ops(b, self.needed(needs, set()), local)
            clone_ops(b, [op for op in own.ops if op.opcode != "yield"], local)
            return []

        suffix = "" if position == len(self.cut.sweeps) - 1 else f".rows{position}"
        self.nest_of_points(f"{self.kernel.name}{suffix}", [e for _, e in ordered], [v.name for v, _ in ordered], body)

    def memory_order(self, own: AxesWalk) -> list[int]:
        """The indices of the results and of the walk in the order in which what is stored lies in memory."""
        forms = analyse(self.kernel)
        indices = [*self.region.args, *own.indices]
        stores = [op for op in walk(Block((), own.ops)) if op.opcode == "store"]
        places: dict[Value, int] = {}
        for store in stores[:1]:
            memory = store.operands[0].type
            assert isinstance(memory, Tensor)
            for axis, index in enumerate(store.operands[1 : 1 + memory.rank]):
                for value in forms[index].values:
                    places.setdefault(value, axis)
        return sorted(range(len(indices)), key=lambda p: (places.get(indices[p], -1), p))
