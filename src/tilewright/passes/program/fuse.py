"""Fuse the kernels of a program: an array that only passes from one kernel to the next is never written.

In: a program of loop-stage kernels, simplified. Out: the program with fewer calls, and a report of what was joined and what was not, and
why. Values are rounded to the dtype of the array they no longer pass through, so results stay what they were.

Four ways, tried for every array and each of its readers, in order:

    merged    the reader asks for T[i, j] at its own i, j: its body goes behind the producer's (an epilogue; a chain of maps)
    continued the producer writes T in a loop over rows, the reader is a map of it: the map joins that loop
    rows      both walk rows: the reader's loops compute the producer's element again from what the row's reductions gave
    inlined   the producer is a map: the reader computes T[x] where it loaded it (a prologue; residual + norm)

Products of the same rows are joined later, where the sizes of a call are known (`fuse_horizontally.py`); the report lists them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from weakref import WeakKeyDictionary

from tilewright.analysis.affine import analyse
from tilewright.base.sizes import ONE, ZERO, Size, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects, rewrite_block
from tilewright.passes.common.fusion_report import Fused, FusionReport, Refused
from tilewright.passes.program.fuse_limits import needed_of, over_registers

CHEAP = 12
"""Ops of a map that may be computed again for every use in a sum."""
MOST_REPEATED = 48
"""Ops of a map that may be computed again for all places where one result of its reader loads it, as a window of neighbours does."""


class _NotFused(Exception):
    """This way does not go; the text says why."""


def fuse(program: Program) -> tuple[Program, FusionReport]:
    """The program with kernels joined, and the report."""
    fused: list[Fused] = []
    before = len(program.calls)
    while True:
        step = _one_step(program)
        if isinstance(step, list):
            kept = (replace(r, needed=needed_of(program, r.array)) for r in step)
            return program, FusionReport(tuple(fused), tuple(kept), before, len(program.calls))
        program, done = step
        fused.append(done)


def _one_step(program: Program) -> tuple[Program, Fused] | list[Refused]:
    """One array less, or why there is none to be had."""
    refused: list[Refused] = []
    for number, producer in enumerate(program.calls):
        for array in written_by(producer):
            for later in range(number + 1, len(program.calls)):
                consumer = program.calls[later]
                if array not in read_by(consumer) or producer.loops or consumer.loops:
                    continue
                pair = _FusedPair(program, number, later, array)
                reasons: list[str] = []
                for how, way in _WAYS:
                    try:
                        made = way(pair)
                        if too_much := over_registers(program, made):
                            raise _NotFused(f"!{too_much}")
                    except _NotFused as no:
                        reasons.append(str(no))
                        continue
                    return cleaned(made), Fused(array, how, pair.store.span, pair.loads[0].span, pair.saved(made))
                refused.append(Refused(array, pair.spans[0], pair.spans[1], _worst(reasons)))
    return refused


def _worst(reasons: Sequence[str]) -> str:
    """The reason that says most: that of the way that came furthest."""
    return max(reasons, key=lambda r: (r.startswith("!"), 0)).lstrip("!")


# -- what a call does ------------------------------------------------------------------------------------------------


def names_of(call: KernelCall) -> dict[Value, str]:
    return dict(zip(call.kernel.params, call.args, strict=True))


_accesses: WeakKeyDictionary[Kernel, tuple[tuple[Value, ...], tuple[Value, ...]]] = WeakKeyDictionary()
"""What kernels write and read. Every pair of calls asks, and kernels never change."""


def _accessed(kernel: Kernel) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    found = _accesses.get(kernel)
    if found is None:
        params = set(kernel.params)
        written: dict[Value, None] = {}
        read: dict[Value, None] = {}
        for op in walk(kernel.body):
            if op.opcode in ("load", "store", "atomic", "accumulate") and op.operands[0] in params:
                if op.opcode != "load":
                    written[op.operands[0]] = None
                if op.opcode != "store":
                    read[op.operands[0]] = None
        found = _accesses[kernel] = tuple(written), tuple(read)
    return found


def written_by(call: KernelCall) -> list[str]:
    names = names_of(call)
    return list(dict.fromkeys(names[value] for value in _accessed(call.kernel)[0]))


def read_by(call: KernelCall) -> set[str]:
    names = names_of(call)
    return {names[value] for value in _accessed(call.kernel)[1]}


def _writes(op: Op) -> bool:
    return op.opcode in ("store", "atomic", "accumulate")


def _acts(call: KernelCall) -> bool:
    """Whether it does something besides what it writes."""
    return any(op.opcode in ("print", "assert") for op in walk(call.kernel.body))


class _Nest:
    """A kernel as one parallel nest."""

    def __init__(self, call: KernelCall) -> None:
        self.call, self.kernel = call, call.kernel
        nests = [op for op in self.kernel.body.ops if op.opcode == "parallel"]
        if len(nests) != 1:
            raise _NotFused("a kernel that is no single nest of loops")
        self.parallel = nests[0]
        self.region = self.parallel.regions[0]
        self.forms = analyse(self.kernel)
        self.extents = tuple(self.size(v) for v in self.parallel.operands)
        self.head = [op for op in self.kernel.body.ops if op.opcode != "parallel"]
        self.body = [op for op in self.region.ops if op.opcode != "yield"]
        self.sweeps = [op for op in self.body if op.opcode == "for" and op.attrs.get("independent") and len(op.operands) == 3]

    def size(self, value: Value) -> Size | None:
        form = self.forms.get(value)
        return form.constant if form is not None and not form.factors else None

    def param(self, name: str) -> Value:
        return next(p for p, n in names_of(self.call).items() if n == name)

    def is_map(self) -> bool:
        """Whether every result is computed by itself: no loops, no reductions."""
        return not any(op.opcode in ("reduce", "for", "while", "parallel") for op in self._inside())

    def _inside(self) -> Iterable[Op]:
        return walk(self.region)

    def covers(self, sweep: Op, extent: Size) -> bool:
        return [self.size(v) for v in sweep.operands] == [ZERO, extent, ONE]


class _FusedPair:
    """A producer, a consumer, and the array between them."""

    def __init__(self, program: Program, first: int, second: int, array: str) -> None:
        self.program, self.first, self.second, self.array = program, first, second, array
        self.calls = program.calls
        producer, consumer = self.calls[first], self.calls[second]
        names = names_of(producer), names_of(consumer)
        self.stores = [op for op in walk(producer.kernel.body) if _writes(op) and names[0].get(op.operands[0]) == array]
        self.loads = [op for op in walk(consumer.kernel.body) if op.opcode == "load" and names[1].get(op.operands[0]) == array]
        self.spans = self.stores[0].span, (self.loads[0].span if self.loads else consumer.kernel.span)
        self.type = program.array(array).type

    # -- what all ways ask ----------------------------------------------------------------------------------------

    def check(self) -> None:
        writers = [n for n, call in enumerate(self.calls) if self.array in written_by(call)]
        if writers != [self.first]:
            raise _NotFused(f"'{self.array}' is written by {len(writers)} kernels")
        if "apart" in self.calls[self.first].kernel.attrs:
            raise _NotFused(f"'{self.array}' is handed on: {self.calls[self.first].kernel.attrs['apart']}")
        if any("watch" in op.attrs for op in (*self.stores, *self.loads)):
            raise _NotFused(f"'{self.array}' is accessed at indices that are checked as the kernel runs")
        if len(self.stores) != 1 or self.stores[0].opcode != "store":
            raise _NotFused(f"'{self.array}' is written in {len(self.stores)} places")
        if any(op.opcode in ("atomic", "accumulate") for call in (self.calls[self.first], self.calls[self.second]) for op in walk(call.kernel.body)):
            raise _NotFused("one of them has atomics")
        self.producer, self.consumer = _Nest(self.calls[self.first]), _Nest(self.calls[self.second])
        self.store = self.stores[0]

    def check_together(self) -> None:
        """Whether the consumer may run where the producer does."""
        reads, writes = read_by(self.calls[self.second]), set(written_by(self.calls[self.second]))
        for call in self.calls[self.first + 1 : self.second]:
            if set(written_by(call)) & (reads | writes) or read_by(call) & writes:
                raise _NotFused(f"kernel '{call.kernel.name}' between them has to do with what is read or written here")
        if (shared := (set(written_by(self.calls[self.first])) - {self.array}) & (reads | writes)) or (
            shared := read_by(self.calls[self.first]) & writes
        ):
            raise _NotFused(f"both have to do with '{min(shared)}'")

    def check_recomputed(self) -> None:
        """Whether what the producer reads is still the same where the consumer runs."""
        reads = read_by(self.calls[self.first])
        for call in self.calls[self.first + 1 : self.second + 1]:
            if changed := reads & set(written_by(call)):
                raise _NotFused(f"'{min(changed)}' is written between the two")

    def indices(self, op: Op) -> tuple[Value, ...]:
        return op.operands[1 : 1 + self.type.rank]

    def own(self, nest: _Nest, op: Op, extra: Sequence[Value] = ()) -> list[Value]:
        """The indices of an access, which must be each of the nest's own, once, over the whole array."""
        found = list(self.indices(op))
        args = [*nest.region.args, *extra]
        if len(found) != len(args) or {id(v) for v in found} != {id(v) for v in args}:
            raise _NotFused(f"'{self.array}' is not accessed at the loops' own indices")
        for axis, value in enumerate(found):
            if value in nest.region.args and nest.extents[list(nest.region.args).index(value)] != self.type.shape[axis]:
                raise _NotFused(f"the loops do not walk all of '{self.array}'")
        return found

    def is_needed(self, besides: int) -> bool:
        """Whether the array must exist: it is a result, or another kernel reads it."""
        return all(a.name != self.array for a in self.program.scratch) or any(
            self.array in read_by(call) for n, call in enumerate(self.calls) if n != besides
        )

    def saved(self, made: Program) -> Size:
        size = product(self.type.shape) * self.type.dtype.itemsize
        gone = not any(self.array in written_by(call) for call in made.calls)
        return size * 2 if gone else size

    def both(self, body: Callable[[_Joined], None]) -> Program:
        """The program with one kernel in place of the two."""
        joined = _Joined(self)
        body(joined)
        call = joined.call()
        calls = [c for n, c in enumerate(self.calls) if n != self.second]
        calls[self.first] = call
        return replace(self.program, calls=tuple(calls))


class _Joined:
    """A kernel under construction from two."""

    def __init__(self, pair: _FusedPair) -> None:
        self.pair = pair
        self.producer, self.consumer = pair.producer, pair.consumer
        self.values: dict[str, Value] = {}
        self.mapping: dict[Value, Value] = {}
        for nest in (self.producer, self.consumer):
            for param, name in names_of(nest.call).items():
                self.mapping[param] = self.values.setdefault(name, param)
        self.top = Builder(self.producer.kernel.span)
        clone_ops(self.top, self.producer.head, self.mapping)
        clone_ops(self.top, self.consumer.head, self.mapping)
        self.inner = Builder(self.producer.parallel.span)
        for arg in self.producer.region.args:
            self.mapping[arg] = Value(arg.type, arg.name)
        self.extents = [self.mapping[v] for v in self.producer.parallel.operands]

    def call(self) -> KernelCall:
        self.inner.multi("yield")
        args = tuple(self.mapping[a] for a in self.producer.region.args)
        parallel = replace(
            self.producer.parallel, operands=tuple(self.extents), regions=(Block(args, tuple(self.inner.ops)),)
        )
        kernel = replace(
            self.producer.kernel, params=tuple(self.values.values()), body=Block((), (*self.top.ops, parallel)),
            attrs=MappingProxyType({**self.producer.kernel.attrs, **self.consumer.kernel.attrs}),
            facts=joined_facts(self.producer.kernel, self.consumer.kernel),
        )  # fmt: skip
        return KernelCall(kernel, tuple(self.values))


def joined_facts(*kernels: Kernel) -> MappingProxyType[str, int]:
    """What is known of sizes in any of them: it is known of the call."""
    return MappingProxyType({name: known for kernel in kernels for name, known in kernel.facts.items()})


# -- the ways --------------------------------------------------------------------------------------------------------


def _merged(pair: _FusedPair) -> Program:
    """The consumer's body behind the producer's."""
    pair.check()
    producer, consumer = pair.producer, pair.consumer
    if pair.store not in producer.body:
        raise _NotFused(f"'{pair.array}' is written inside a loop")
    there = pair.own(producer, pair.store)
    here = pair.own(consumer, pair.loads[0])
    if any([*pair.indices(load)] != here for load in pair.loads):
        raise _NotFused(f"!'{pair.array}' is needed at other places than where it is made")
    if not producer.is_map() and not consumer.is_map():
        raise _NotFused(f"!{_one_after_the_other(pair)}")
    pair.check_together()
    keep = pair.is_needed(pair.second)

    def body(joined: _Joined) -> None:
        mapping = joined.mapping
        clone_ops(joined.inner, [op for op in producer.body if keep or op is not pair.store], mapping)
        for mine, its in zip(here, there, strict=True):
            mapping[mine] = mapping[its]
        _clone_with(joined.inner, consumer.body, mapping, pair, lambda b, load, local: mapping[pair.store.operands[-1]])

    return pair.both(body)


def _continued(pair: _FusedPair) -> Program:
    """A map of what a loop over rows writes joins that loop."""
    pair.check()
    producer, consumer = pair.producer, pair.consumer
    sweep = next((op for op in producer.sweeps if pair.store in op.regions[0].ops), None)
    if sweep is None or not consumer.is_map():
        raise _NotFused(f"'{pair.array}' is not made row by row for a map")
    index = sweep.regions[0].args[0]
    there = pair.own(producer, pair.store, [index])
    here = pair.own(consumer, pair.loads[0])
    if not producer.covers(sweep, pair.type.shape[there.index(index)]):
        raise _NotFused(f"the loop does not walk all of '{pair.array}'")
    if any([*pair.indices(load)] != here for load in pair.loads):
        raise _NotFused(f"!'{pair.array}' is needed at other places than where it is made")
    pair.check_together()
    keep = pair.is_needed(pair.second)

    def body(joined: _Joined) -> None:
        mapping = joined.mapping
        for op in producer.body:
            if op is not sweep:
                clone_ops(joined.inner, [op], mapping)
                continue
            deep = Builder(sweep.span)
            again = Value(index.type, index.name)
            mapping[index] = again
            clone_ops(deep, [x for x in sweep.regions[0].ops[:-1] if keep or x is not pair.store], mapping)
            for mine, its in zip(here, there, strict=True):
                mapping[mine] = mapping[its]
            _clone_with(deep, consumer.body, mapping, pair, lambda b, load, local: mapping[pair.store.operands[-1]])
            deep.multi("yield")
            joined.inner.append(
                replace(sweep, operands=tuple(mapping.get(v, v) for v in sweep.operands), regions=(Block((again,), tuple(deep.ops)),))
            )

    return pair.both(body)


def _rows(pair: _FusedPair) -> Program:
    """Both walk the same rows: the consumer computes the elements it needs from what the producer's reductions gave."""
    pair.check()
    producer, consumer = pair.producer, pair.consumer
    sweep = next((op for op in producer.sweeps if pair.store in op.regions[0].ops), None)
    if sweep is None or consumer.is_map():
        raise _NotFused(f"'{pair.array}' does not pass from rows to rows")
    index = sweep.regions[0].args[0]
    there = pair.own(producer, pair.store, [index])
    axis = there.index(index)
    if producer.extents != consumer.extents or not producer.covers(sweep, pair.type.shape[axis]):
        raise _NotFused(f"!their launches have different shapes: {_shape(producer)} and {_shape(consumer)}")
    element = [op for op in sweep.regions[0].ops[:-1] if op is not pair.store]
    if any(has_effects(op) for op in element):
        raise _NotFused("!the loop that makes it writes other things too")
    rank = {arg: n for n, arg in enumerate(producer.region.args)}
    for load in pair.loads:
        for a, value in enumerate(pair.indices(load)):
            if a != axis and value is not consumer.region.args[rank[there[a]]]:
                raise _NotFused(f"!'{pair.array}' is needed in other rows than where it is made")
    pair.check_together()
    keep = pair.is_needed(pair.second)

    def body(joined: _Joined) -> None:
        mapping = joined.mapping
        clone_ops(joined.inner, [op for op in producer.body if keep or op is not sweep], mapping)
        for mine, its in zip(consumer.region.args, producer.region.args, strict=True):
            mapping[mine] = mapping[its]

        def again(b: Builder, load: Op, local: dict[Value, Value]) -> Value:
            fresh = dict(mapping) | {index: local.get(load.operands[1 + axis], load.operands[1 + axis])}
            clone_ops(b, element, fresh)
            return fresh.get(pair.store.operands[-1], pair.store.operands[-1])

        _clone_with(joined.inner, consumer.body, mapping, pair, again)

    return pair.both(body)


def _shape(nest: _Nest) -> str:
    """What a nest's iterations are, and where it stands."""
    extents = " by ".join("?" if e is None else str(e) for e in nest.extents)
    return f"{extents or '1'} (line {nest.parallel.span.line})"


_COMBINED = {"add": "sums", "mul": "products", "min": "minima", "max": "maxima"}
"""What reductions are called."""


def _finished(pair: _FusedPair) -> str:
    """After which loop of its producer the array is there."""
    maker = next(op for op in walk(pair.producer.region) if op.opcode in ("reduce", "for", "while", "parallel"))
    made = f"its {_COMBINED.get(str(maker.attrs.get('kind')), 'reduction')} over" if maker.opcode == "reduce" else "a loop over"
    return f"'{pair.array}' is finished only after {made} {_walked(maker)}"


def _one_after_the_other(pair: _FusedPair) -> str:
    """Why kernels that both have loops do not run as one, although they share their results' indices."""
    reader = next(op for op in walk(pair.consumer.region) if op.opcode in ("reduce", "for", "while", "parallel"))
    return f"{_finished(pair)}, and the loop over {_walked(reader)} begins with it"


def _unfinished(pair: _FusedPair) -> str:
    """Why an array made by loops is not there yet where its reader runs."""
    after = _finished(pair)
    loops = [op for op in walk(pair.consumer.region) if op.opcode in ("reduce", "for", "while")]
    reader = next((op for op in loops if any(inner in pair.loads for inner in walk(op.regions[0]))), None)
    if reader is not None:
        return f"{after}, and the loop over {_walked(reader)} needs many elements of it"
    return f"{after}, and line {pair.loads[0].span.line} reads other elements of it than are made there"


def _walked(loop: Op) -> str:
    """The indices of a loop, and where it stands."""
    count = len(loop.operands) if loop.opcode in ("reduce", "parallel") else 1
    names = [f"'{arg.name}'" for arg in loop.regions[0].args[:count] if arg.name]
    return f"{' and '.join(names) or 'elements'} (line {loop.span.line})"


def _inlined(pair: _FusedPair) -> Program:
    """A map is computed where its result was loaded."""
    pair.check()
    producer = pair.producer
    if not producer.is_map() or pair.store not in producer.body:
        raise _NotFused(f"!{_unfinished(pair)}" if not producer.is_map() else "it is written under a condition")
    there = pair.own(producer, pair.store)
    if all(a.name != pair.array for a in pair.program.scratch):
        raise _NotFused(f"!'{pair.array}' is a result, so it is written anyway")
    pair.check_recomputed()
    element = [op for op in producer.body if op is not pair.store and not _writes(op)]
    work = sum(1 for op in element if op.opcode not in ("const", "size", "cast", "load"))
    heavy = any(OPS[op.opcode].group == "function" for op in element)
    # Packed weights that are only moved, as by `w.T`: the reader unpacks them as it would those that were not.
    moved = any("packed" in op.attrs and pair.store.operands[-1] in op.results for op in element)
    if not moved and (heavy or work > CHEAP) and any(_repeats(pair, load) for load in pair.loads):
        raise _NotFused(f"!every element would be computed many times over ({work} operations)")
    places = len({tuple(map(id, pair.indices(load))) for load in pair.loads})
    steps = work + sum(op.opcode == "load" for op in element)
    if not moved and places > 1 and places * steps > MOST_REPEATED:
        raise _NotFused(f"!every element would be computed {places} times over ({steps} operations each)")
    names = names_of(pair.calls[pair.first])
    consumer = pair.calls[pair.second]
    values = {name: param for param, name in names_of(consumer).items()}
    mapping: dict[Value, Value] = {}
    for param, name in names.items():
        if name != pair.array:
            mapping[param] = values.setdefault(name, param)
    top = Builder(consumer.kernel.span)
    clone_ops(top, producer.head, mapping)
    memory = values[pair.array]

    def at_load(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode != "load" or op.operands[0] is not memory:
            return None
        local = dict(mapping) | dict(zip(there, pair.indices(op), strict=True))
        clone_ops(b, element, local)
        value = pair.store.operands[-1]
        return (local.get(value, value),)

    body = rewrite_block(consumer.kernel.body, at_load, {})
    kernel = replace(
        consumer.kernel, params=tuple(values.values()), body=Block((), (*top.ops, *body.ops)), facts=joined_facts(producer.kernel, consumer.kernel)
    )
    calls = list(pair.calls)
    calls[pair.second] = KernelCall(kernel, tuple(values))
    return replace(pair.program, calls=tuple(calls))


def _repeats(pair: _FusedPair, load: Op) -> bool:
    """Whether an element is loaded many times: some index of the consumer, or of a sum around the load, has no part in where it lies."""
    around = _around(pair.consumer.body, load)
    used: set[Value] = set()
    for value in pair.indices(load):
        form = pair.consumer.forms.get(value)
        used |= {v for v, _ in form.factors} if form is not None else set()
    indices = {*pair.consumer.region.args, *(arg for op in around for arg in op.regions[0].args[: len(op.operands)] if op.opcode == "reduce")}
    return bool(around) and not indices <= used


def _around(body: Sequence[Op], load: Op) -> list[Op]:
    """The sums and loops that a load is in, the outermost first."""
    for op in body:
        if op.opcode in ("reduce", "for", "if") and any(load in list(walk(region)) for region in op.regions):
            inner = next(found for region in op.regions if load in list(walk(region)) for found in [_around(region.ops, load)])
            return [*([op] if op.opcode != "if" else []), *inner]
    return []


_WAYS: tuple[tuple[str, Callable[[_FusedPair], Program]], ...] = (
    ("merged", _merged), ("continued", _continued), ("rows", _rows), ("inlined", _inlined),
)  # fmt: skip


def _clone_with(
    b: Builder, ops: Sequence[Op], mapping: dict[Value, Value], pair: _FusedPair, loaded: Callable[[Builder, Op, dict[Value, Value]], Value]
) -> None:
    """Clone ops, with something else in place of loads of the pair's array."""
    memory = pair.consumer.param(pair.array)
    for op in ops:
        if op.opcode == "load" and op.operands[0] is memory:
            with b.at(op.span):
                mapping[op.result] = loaded(b, op, mapping)
        elif op.regions:
            regions = []
            for region in op.regions:
                args = tuple(Value(a.type, a.name) for a in region.args)
                mapping.update(zip(region.args, args, strict=True))
                inner = Builder(op.span)
                _clone_with(inner, region.ops, mapping, pair, loaded)
                regions.append(Block(args, tuple(inner.ops)))
            results = tuple(Value(r.type, r.name) for r in op.results)
            operands = tuple(mapping.get(v, v) for v in op.operands)
            mapping.update(zip(op.results, results, strict=True))
            b.append(replace(op, operands=operands, results=results, regions=tuple(regions)))
        else:
            clone_ops(b, [op], mapping)


def cleaned(program: Program) -> Program:
    """Without kernels, parameters and scratch that nothing needs any more."""
    results = {a.name for a in (*program.outputs, *program.input_arrays)}
    calls = list(program.calls)
    while True:
        read = {name for call in calls for name in read_by(call)} | {loop.cell for loop in program.loops}
        kept = [c for c in calls if _acts(c) or any(name in read or name in results for name in written_by(c))]
        if len(kept) == len(calls):
            break
        calls = kept
    tidy: list[KernelCall] = []
    for call in calls:
        kernel = eliminate_dead(call.kernel)
        used = {v for op in walk(kernel.body) for v in op.operands}
        pairs = [(p, n) for p, n in names_of(call).items() if p in used]
        tidy.append(KernelCall(replace(kernel, params=tuple(p for p, _ in pairs)), tuple(n for _, n in pairs), call.loops))
    named = {name for call in tidy for name in call.args} | {loop.cell for loop in program.loops}
    return replace(program, calls=tuple(tidy), scratch=tuple(a for a in program.scratch if a.name in named))
