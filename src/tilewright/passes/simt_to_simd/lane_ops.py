"""The code of a group of threads as lanes: structured control flow of one thread -> vec ops under masks.

In: ops of a thread-stage kernel without barriers, and what the values they use are for the group. Out: ops for the group, appended to a
builder. A mask says which lanes are active; None stands for all. Code under a mask runs only where some lane is active, so accesses that are
the same for all lanes stay scalar. Where lanes part,

    if %c {A} {B}       both sides run, each under its part of the mask, if any lane takes it
    while …             goes on as long as any lane does; lanes that are done keep what they have
    for …               as it is where the range is the same for all lanes, else a while

Accesses whose indices are linear with step 1 are vector accesses, others gathers and scatters (`lane_memory.py`); what lanes of a warp tell each
other is rearranged within the vec (`lane_warps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

from tilewright.base.errors import TargetLimit
from tilewright.ir.build import Builder
from tilewright.ir.nodes import NO_ATTRS, Block, Op, Value, walk
from tilewright.ir.ops import OPS, TypeRuleError, result_types
from tilewright.ir.types import Vec, dtype_of
from tilewright.passes.simt_to_simd.lane_values import Lanes, Linear, Uniform, Varying, same_kind
from tilewright.passes.simt_to_simd.lane_warps import LaneWarps

_SMALL = 12
"""Pure ops that are computed rather than jumped over."""
_UNROLLED = 256
"""Ops of all turns of a loop up to which they are written one after the other."""
_DOUBLED = 400
"""Ops up to which a guarded body is generated a second time, without a mask, for groups that are wholly inside."""
_NOTHING = frozenset({"warp_sync", "prefetch", "wait_previous", "release_next", "nanosleep"})
"""Ops of threads that are nothing where the lanes of a warp go together."""
_PURE_GROUPS = frozenset({"elementwise", "function", "structure", "bits"})


class LaneCode(LaneWarps):
    """Writes the code of one group."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.forms: dict[Op, list[bool]] = {}
        """Loops whose carried values are known to vary, by position; kept while loops around them are tried again."""
        self.few: set[Value] = set()
        """Conditions that hardly hold for all lanes."""
        self.parting: set[Op] = set()
        """Loops whose lanes turn differently often."""

    # -- ops -----------------------------------------------------------------------------------------------------

    def ops(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if op.opcode == "yield":
                return
            with self.b.at(op.span):
                self.op(op)

    def op(self, op: Op) -> None:
        if op.opcode in _NOTHING:
            return
        structured = {"if": self._if, "for": self._for, "while": self._while}.get(op.opcode)
        if structured is not None:
            self.set(op.results, structured(op))
        elif op.opcode == "thread_id":
            self.set(op.results, [self.thread()])
        elif OPS[op.opcode].is_pure and OPS[op.opcode].group in _PURE_GROUPS:
            given = [self.get(v) for v in op.operands]
            self.set(op.results, [self.pure(op, given)] if self._has_vectors(op, given) else self.one_by_one(op))
            if op.opcode == "eq":
                self.few.add(op.results[0])
        elif not self.special(op):
            raise unsupported(op)

    def _has_vectors(self, op: Op, given: Sequence[Lanes]) -> bool:
        """Whether the op takes these lanes: some bit tricks are for single numbers."""
        if OPS[op.opcode].group != "bits" or all(isinstance(g, Uniform) for g in given):
            return True
        try:
            result_types(op.opcode, [Vec(dtype_of(v.type), self.width) for v in op.operands], op.attrs)
        except TypeRuleError:
            return False
        return True

    # -- regions -------------------------------------------------------------------------------------------------

    def region(self, block: Block, mask: Value | None) -> tuple[Builder, list[Lanes]]:
        """The block's code under a mask, in a builder of its own, and what it yields."""
        before, self.b = self.b, Builder(self.b.span)
        outer, self.mask = self.mask, mask
        self.ops(block.ops)
        built, yields = self.b, [self.get(v) for v in block.yields]
        self.b, self.mask = before, outer
        return built, yields

    def inside(self, builder: Builder, build: Callable[[], Sequence[Value]]) -> Block:
        """The builder's ops, and what `build` appends, as a region that yields what it gives."""
        before, self.b = self.b, builder
        builder.multi("yield", *build())
        self.b = before
        return Block((), tuple(builder.ops))

    def joined(self, a: Lanes, b: Lanes) -> Lanes | None:
        """The form that holds both; None for a vec."""
        return a if same_kind(a, b) and not isinstance(a, Varying) else None

    def plain(self, lanes: Lanes, form: Lanes | None) -> Value:
        """The one value that carries lanes of that form."""
        if form is None:
            return self.vec(lanes)
        assert same_kind(lanes, form)
        return lanes.base if isinstance(lanes, Linear) else lanes.value

    def formed(self, value: Value, form: Lanes | None) -> Lanes:
        if form is None:
            return Varying(value)
        return Linear(value, form.step) if isinstance(form, Linear) else Uniform(value)

    # -- if ------------------------------------------------------------------------------------------------------

    def _if(self, op: Op) -> Sequence[Lanes]:
        condition = self.get(op.operands[0])
        if isinstance(condition, Uniform):
            return self._uniform_if(op, condition.value)
        chosen = self.vec(condition)
        if self._is_small(op):
            return self._flat_if(op, chosen)
        if self.mask is None and op.operands[0] not in self.few and _is_empty(op.regions[1]) and sum(1 for _ in walk(op.regions[0])) <= _DOUBLED:
            return self._guarded(op, chosen)
        return self._masked_if(op, chosen)

    def _uniform_if(self, op: Op, condition: Value) -> Sequence[Lanes]:
        sides = [self.region(region, self.mask) for region in op.regions]
        forms = [self.joined(a, b) for a, b in zip(sides[0][1], sides[1][1], strict=True)]
        return self._if_op(op, condition, sides, forms)

    def _if_op(
        self, op: Op, condition: Value, sides: Sequence[tuple[Builder, Sequence[Lanes]]], forms: Sequence[Lanes | None]
    ) -> list[Lanes]:
        blocks = tuple(
            self.inside(built, lambda y=yields: [self.plain(v, f) for v, f in zip(y, forms, strict=True)])  # type: ignore[misc]
            for built, yields in sides
        )
        results = tuple(Value(v.type, r.name) for v, r in zip(blocks[0].yields, op.results, strict=True))
        self.b.append(Op("if", (condition,), results, NO_ATTRS, blocks, op.span))
        return [self.formed(v, f) for v, f in zip(results, forms, strict=True)]

    def _is_small(self, op: Op) -> bool:
        ops = [inner for region in op.regions for inner in region.ops if inner.opcode != "yield"]
        return len(ops) <= _SMALL and all(OPS[x.opcode].is_pure and not x.regions and OPS[x.opcode].group != "function" for x in ops)

    def _flat_if(self, op: Op, chosen: Value) -> Sequence[Lanes]:
        yields: list[Sequence[Lanes]] = []
        for region in op.regions:
            self.ops(region.ops)
            yields.append([self.get(v) for v in region.yields])
        return [self._merged(chosen, a, b) for a, b in zip(*yields, strict=True)]

    def _merged(self, chosen: Value, a: Lanes, b: Lanes) -> Lanes:
        if a == b:
            return a
        return Varying(self.b.select(chosen, self.vec(a), self.vec(b)))

    def _guarded(self, op: Op, chosen: Value) -> Sequence[Lanes]:
        """A body under a condition: once for groups wholly inside, and once under a mask."""
        forms: list[Lanes | None] = [None] * len(op.results)
        inside = self.region(op.regions[0], None)
        before, self.b = self.b, Builder(self.b.span)
        masked = list(self._masked_if(op, chosen))
        outside, self.b = (self.b, masked), before
        return self._if_op(op, self.b.op("every", chosen), [inside, outside], forms)

    def _masked_if(self, op: Op, chosen: Value) -> Sequence[Lanes]:
        yields: list[list[Lanes]] = []
        for number, region in enumerate(op.regions):
            if _is_empty(region):
                yields.append([self.get(v) for v in region.yields])
                continue
            mask = self.both(self.mask, chosen if number == 0 else self.b.op("not", chosen))
            built, found = self.region(region, mask)
            own = {r for inner in region.ops for r in inner.results}
            passed = [lanes for v, lanes in zip(region.yields, found, strict=True) if v in own]
            absent = Builder(self.b.span)
            blocks = (
                self.inside(built, lambda p=passed: [self.vec(v) for v in p]),  # type: ignore[misc]
                self.inside(absent, lambda p=passed: [self._unused(v) for v in p]),  # type: ignore[misc]
            )
            results = tuple(Value(v.type) for v in blocks[0].yields)
            self.b.append(Op("if", (self.any(mask),), results, NO_ATTRS, blocks, op.span))
            rest = iter(results)
            yields.append([Varying(next(rest)) if v in own else lanes for v, lanes in zip(region.yields, found, strict=True)])
        return [self._merged(chosen, a, b) for a, b in zip(*yields, strict=True)]

    def _unused(self, like: Lanes) -> Value:
        """A vec of that dtype, for lanes that nobody reads."""
        value = like.base if isinstance(like, Linear) else like.value
        return self.vec(Uniform(self.b.const(0, dtype_of(value.type))))

    # -- for -----------------------------------------------------------------------------------------------------

    def _for(self, op: Op) -> Sequence[Lanes]:
        low, high, step = (self.get(v) for v in op.operands[:3])
        if isinstance(low, Uniform) and isinstance(high, Uniform) and isinstance(step, Uniform):
            turns = self._few_turns(op, low, high, step)
            if turns is not None:
                return self._unrolled(op, turns)
            return self._uniform_for(op, low.value, high.value, step.value)
        return self._parting_for(op, low, high, step)

    def _few_turns(self, op: Op, *bounds: Lanes) -> range | None:
        """The indices of a short loop of known length, whose turns are written one after the other: no compiler after this one does that."""
        low, high, step = (self.constant(bound) for bound in bounds)
        if low is None or high is None or step is None or step <= 0:
            return None
        turns = range(low, high, step)
        return turns if len(turns) * sum(1 for _ in walk(op.regions[0])) <= _UNROLLED else None

    def _unrolled(self, op: Op, turns: range) -> Sequence[Lanes]:
        region, carried = op.regions[0], [self.get(v) for v in op.operands[3:]]
        dtype = dtype_of(op.operands[0].type)
        for turn in turns:
            index = self.b.const(turn, dtype)
            self.constants[index] = turn
            self.set(region.args, [Uniform(index), *carried])
            self.ops(region.ops)
            carried = [self.get(v) for v in region.yields]
        return carried

    def _uniform_for(self, op: Op, low: Value, high: Value, step: Value) -> Sequence[Lanes]:
        region, start = op.regions[0], [self.get(v) for v in op.operands[3:]]
        varies = self.forms.setdefault(op, [isinstance(v, Varying) for v in start])
        while True:
            forms: list[Lanes | None] = [None if wide else v for wide, v in zip(varies, start, strict=True)]
            initial = [self.plain(v, f) for v, f in zip(start, forms, strict=True)]
            index = Value(low.type, region.args[0].name)
            args = [Value(v.type, a.name) for v, a in zip(initial, region.args[1:], strict=True)]
            self.set(region.args, [Uniform(index), *(self.formed(a, f) for a, f in zip(args, forms, strict=True))])
            built, yields = self.region(region, self.mask)
            if self._settled(varies, forms, yields):
                break
        block = self.inside(built, lambda: [self.plain(v, f) for v, f in zip(yields, forms, strict=True)])
        results = tuple(Value(v.type, r.name) for v, r in zip(initial, op.results, strict=True))
        attrs = MappingProxyType({k: v for k, v in op.attrs.items() if k == "unroll"})
        self.b.append(Op("for", (low, high, step, *initial), results, attrs, (Block((index, *args), block.ops),), op.span))
        return [self.formed(v, f) for v, f in zip(results, forms, strict=True)]

    def _settled(self, varies: list[bool], forms: Sequence[Lanes | None], yields: Sequence[Lanes]) -> bool:
        """Whether what a loop's body yields fits what it was given; else that varies from now on."""
        settled = True
        for position, (form, found) in enumerate(zip(forms, yields, strict=True)):
            if form is not None and not same_kind(form, found):
                varies[position], settled = True, False
        return settled

    def _parting_for(self, op: Op, low: Lanes, high: Lanes, step: Lanes) -> Sequence[Lanes]:
        """A loop whose lanes turn differently often."""
        region = op.regions[0]
        linear = isinstance(low, Linear) and isinstance(step, Uniform)
        form: Lanes | None = low if linear else None
        state = _LaneState(self, op.operands[3:], region.args[1:], region.yields)
        first, on = self.plain(low, form), self.mask if self.mask is not None else self.truth()
        initial = [on, first, *state.initial()]

        def test(args: Sequence[Value]) -> tuple[Value, list[Value]]:
            index = self.formed(args[1], form)
            less = self.b.op("lt", self.vec(index), self.vec(high))
            active = self.both(args[0], less)
            return active, list(args[1:])

        def body(active: Value, args: Sequence[Value]) -> list[Value]:
            index = self.formed(args[0], form)
            self.set(region.args, [index, *state.lanes(args[1:])])
            outer, self.mask = self.mask, active
            self.ops(region.ops)
            following = state.following(active, args[1:], [self.get(v) for v in region.yields])
            self.mask = outer
            if form is not None:
                assert isinstance(step, Uniform)
                return [self.b.add(args[0], step.value), *following]
            return [self.b.add(args[0], self.vec(step)), *following]

        results = self._loop(op, initial, test, body)
        return state.lanes(results[1:])

    # -- while ---------------------------------------------------------------------------------------------------

    def _while(self, op: Op) -> Sequence[Lanes]:
        start = [self.get(v) for v in op.operands]
        varies = self.forms.setdefault(op, [isinstance(v, Varying) for v in start])
        while op not in self.parting:
            found = self._uniform_while(op, start, varies)
            if found is not None:
                return found
        return self._parting_while(op)

    def _uniform_while(self, op: Op, start: Sequence[Lanes], varies: list[bool]) -> Sequence[Lanes] | None:
        """The loop if all lanes turn alike; None where more varies than was thought."""
        condition, body = op.regions
        forms: list[Lanes | None] = [None if wide else v for wide, v in zip(varies, start, strict=True)]
        initial = [self.plain(v, f) for v, f in zip(start, forms, strict=True)]
        args = [Value(v.type, a.name) for v, a in zip(initial, condition.args, strict=True)]
        self.set(condition.args, [self.formed(a, f) for a, f in zip(args, forms, strict=True)])
        tested, (goes_on, *passed) = self.region(condition, self.mask)
        if not isinstance(goes_on, Uniform):
            self.parting.add(op)
            return None
        if not self._settled(varies, forms, passed):
            return None
        test = self.inside(tested, lambda: [goes_on.value, *(self.plain(v, f) for v, f in zip(passed, forms, strict=True))])
        inner = [Value(v.type, a.name) for v, a in zip(initial, body.args, strict=True)]
        self.set(body.args, [self.formed(a, f) for a, f in zip(inner, forms, strict=True)])
        built, yields = self.region(body, self.mask)
        if not self._settled(varies, forms, yields):
            return None
        turn = self.inside(built, lambda: [self.plain(v, f) for v, f in zip(yields, forms, strict=True)])
        results = tuple(Value(v.type, r.name) for v, r in zip(initial, op.results, strict=True))
        regions = (Block(tuple(args), test.ops), Block(tuple(inner), turn.ops))
        self.b.append(Op("while", tuple(initial), results, NO_ATTRS, regions, op.span))
        return [self.formed(v, f) for v, f in zip(results, forms, strict=True)]

    def _parting_while(self, op: Op) -> Sequence[Lanes]:
        condition, region = op.regions
        state = _LaneState(self, op.operands, condition.args, (), region.args)
        initial = [self.mask if self.mask is not None else self.truth(), *state.initial()]

        def test(args: Sequence[Value]) -> tuple[Value, list[Value]]:
            here = args[0]
            self.set(condition.args, state.lanes(args[1:]))
            outer, self.mask = self.mask, here
            self.ops(condition.ops)
            goes_on, *passed = [self.get(v) for v in condition.yields]
            self.mask = outer
            kept = state.following(here, args[1:], passed)
            return self.both(here, self.vec(goes_on)), kept

        def body(active: Value, args: Sequence[Value]) -> list[Value]:
            self.set(region.args, state.lanes(args))
            outer, self.mask = self.mask, active
            self.ops(region.ops)
            following = state.following(active, args, [self.get(v) for v in region.yields])
            self.mask = outer
            return following

        results = self._loop(op, initial, test, body)
        return state.lanes(results)

    def _loop(
        self, op: Op, initial: Sequence[Value], test: Callable[[Sequence[Value]], tuple[Value, list[Value]]],
        body: Callable[[Value, Sequence[Value]], list[Value]],
    ) -> Sequence[Value]:  # fmt: skip
        """A while that carries the mask of the lanes that go on, then values; gives the values at its end."""
        before = self.b
        self.b = Builder(before.span)
        args = tuple(Value(v.type) for v in initial)
        active, passed = test(args)
        self.b.multi("yield", self.any(active), active, *passed)
        first = Block(args, tuple(self.b.ops))
        self.b = Builder(before.span)
        inner = tuple(Value(v.type) for v in initial)
        following = body(inner[0], inner[1:])
        self.b.multi("yield", inner[0], *following)
        second = Block(inner, tuple(self.b.ops))
        self.b = before
        results = tuple(Value(v.type) for v in initial)
        self.b.append(Op("while", tuple(initial), results, NO_ATTRS, (first, second), op.span))
        return results[1:]


class _LaneState:
    """What a loop with parting lanes carries: vecs; values that no turn changes are not carried."""

    def __init__(self, code: LaneCode, start: Sequence[Value], args: Sequence[Value], yields: Sequence[Value], second: Sequence[Value] = ()) -> None:
        self.code = code
        self.start = [code.get(v) for v in start]
        self.kept = [not second and y is a for a, y in zip(args, yields or args, strict=True)] if yields else [False] * len(start)

    def initial(self) -> list[Value]:
        return [self.code.vec(v) for v, kept in zip(self.start, self.kept, strict=True) if not kept]

    def lanes(self, values: Sequence[Value]) -> list[Lanes]:
        rest = iter(values)
        return [v if kept else Varying(next(rest)) for v, kept in zip(self.start, self.kept, strict=True)]

    def following(self, active: Value, before: Sequence[Value], found: Sequence[Lanes]) -> list[Value]:
        """What lanes carry on: the new values where they are active, else what they had."""
        changed = [v for v, kept in zip(found, self.kept, strict=True) if not kept]
        following: list[Value] = []
        for old, new in zip(before, changed, strict=True):
            same = isinstance(new, Varying) and new.value is old
            following.append(old if same else self.code.b.select(active, self.code.vec(new), old))
        return following


def _is_empty(region: Block) -> bool:
    return len(region.ops) <= 1


def unsupported(op: Op) -> TargetLimit:
    """The op is not one a CPU can run."""
    error = TargetLimit.at("TW020", f"{op.opcode} is a construct of GPUs that the CPU has no counterpart for", op.span,
                           "run the kernel on a GPU or on the emulator")  # fmt: skip
    assert isinstance(error, TargetLimit)
    return error
