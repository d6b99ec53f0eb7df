"""Control flow around barriers, for a block of threads on a CPU. Part of `simt_to_simd`.

In: an `if`, `for` or `while` with a barrier inside. Out: the same outside the loops over groups of threads. What it carries or gives is a scalar
where it is the same for the block, else an array over the threads. Where threads may go different ways, an array holds the mask of those that
go on, and the parts run under it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.uniform import control
from tilewright.base.dtypes import i32, u32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import NO_ATTRS, Block, Op, Value
from tilewright.ir.types import BOOL
from tilewright.passes.simt_to_simd.block_code import BlockCode, KeptValue, Stores
from tilewright.passes.simt_to_simd.lane_ops import LaneCode, unsupported
from tilewright.passes.simt_to_simd.lane_values import Varying


class BlockControl(BlockCode):
    def structured(self, op: Op) -> None:
        ways = {"if": (self._if, self._parting_if), "for": (self._for, self._parting_for), "while": (self._while, self._parting_while)}
        if op.opcode == "barrier" or (op.opcode == "named_barrier" and not op.attrs.get("arrive")):
            return
        if op.opcode == "barrier_reduce":
            self._barrier_reduce(op)
            return
        if op.opcode not in ways:
            raise unsupported(op)
        together, parting = ways[op.opcode]
        way = together if all(v in self.shared_values for v in control(op)) else parting
        way(op)

    def _barrier_reduce(self, op: Op) -> None:
        """Counts of the threads that are here and of those where the bool holds."""

        def count(code: LaneCode) -> Sequence[Value]:
            holds = code.both(code.mask, code.vec(self.resolve(code, op.operands[0])))
            bits = [code.b.op("mask_bits", holds), code.bits(code.mask)]
            return [code.b.op("popcount", b) for b in bits]

        true, here = self.count_groups(count)
        kind, b = op.attrs["kind"], self.b
        if kind == "count":
            self.scalars[op.result] = b.cast(true, i32)
        else:
            self.scalars[op.result] = b.op("eq", true, here) if kind == "and" else b.op("ne", true, b.const(0, u32))

    # -- pieces --------------------------------------------------------------------------------------------------

    def _inside(self, build: Callable[[], Sequence[Value]], args: Sequence[Value] = ()) -> Block:
        """A region of the block's code that yields what `build` gives."""
        before, self.b = self.b, Builder(self.b.span)
        self.b.multi("yield", *build())
        built, self.b = self.b, before
        return Block(tuple(args), tuple(built.ops))

    def _arrays(self, *positions: Sequence[Value]) -> list[Value | None]:
        """For each place an array that all these values of threads share; None where they are scalars of the block."""
        arrays: list[Value | None] = []
        for values in zip(*positions, strict=True):
            if all(v in self.shared_values for v in values):
                arrays.append(None)
                continue
            memory = self.array(values[0])
            arrays.append(memory)
            self.kept.update({v: KeptValue(memory, None) for v in values})
        return arrays

    def _stores(self, values: Sequence[Value], arrays: Sequence[Value | None]) -> Stores:
        return [(v, memory) for v, memory in zip(values, arrays, strict=True) if memory is not None]

    def _scalars(self, values: Sequence[Value], arrays: Sequence[Value | None]) -> list[Value]:
        return [self.scalars[v] for v, memory in zip(values, arrays, strict=True) if memory is None]

    def _fresh(self, values: Sequence[Value], arrays: Sequence[Value | None]) -> list[Value]:
        """New scalars for those of the values that are the block's."""
        fresh = [Value(v.type, v.name) for v, memory in zip(values, arrays, strict=True) if memory is None]
        own = [v for v, memory in zip(values, arrays, strict=True) if memory is None]
        self.scalars.update(zip(own, fresh, strict=True))
        return fresh

    def _under(self, mask: Value, build: Callable[[], None]) -> None:
        """Code for the threads of a mask only."""
        outer, self.mask = self.mask, mask
        build()
        self.mask = outer

    # -- all threads go one way ----------------------------------------------------------------------------------

    def _if(self, op: Op) -> None:
        arrays = self._arrays(op.results)

        def side(region: Block) -> Block:
            def build() -> Sequence[Value]:
                self.ops(region.ops, self._stores(region.yields, arrays))
                return self._scalars(region.yields, arrays)

            return self._inside(build)

        condition = self.scalars[op.operands[0]]
        blocks = tuple(side(region) for region in op.regions)
        self.b.append(Op("if", (condition,), tuple(self._fresh(op.results, arrays)), NO_ATTRS, blocks, op.span))

    def _for(self, op: Op) -> None:
        region = op.regions[0]
        carried = region.args[1:]
        arrays = self._arrays(carried, op.results)
        self.stretch((), self._stores(op.operands[3:], arrays))
        start = self._scalars(op.operands[3:], arrays)
        bounds = [self.scalars[v] for v in op.operands[:3]]
        index = Value(region.args[0].type, region.args[0].name)
        self.scalars[region.args[0]] = index
        args = self._fresh(carried, arrays)

        def build() -> Sequence[Value]:
            self.ops(region.ops, self._stores(region.yields, arrays))
            return self._scalars(region.yields, arrays)

        block = self._inside(build, (index, *args))
        self.b.append(Op("for", (*bounds, *start), tuple(self._fresh(op.results, arrays)), NO_ATTRS, (block,), op.span))

    def _while(self, op: Op) -> None:
        condition, body = op.regions
        arrays = self._arrays(condition.args, body.args, op.results)
        self.stretch((), self._stores(op.operands, arrays))
        start = self._scalars(op.operands, arrays)
        args = self._fresh(condition.args, arrays)

        def test() -> Sequence[Value]:
            goes_on, *passed = condition.yields
            changed = [None if p is a else memory for p, a, memory in zip(passed, condition.args, arrays, strict=True)]
            self.ops(condition.ops, self._stores(passed, changed))
            return [self.scalars[goes_on], *self._scalars(passed, arrays)]

        first = self._inside(test, args)
        inner = self._fresh(body.args, arrays)

        def turn() -> Sequence[Value]:
            self.ops(body.ops, self._stores(body.yields, arrays))
            return self._scalars(body.yields, arrays)

        second = self._inside(turn, inner)
        self.b.append(Op("while", tuple(start), tuple(self._fresh(op.results, arrays)), NO_ATTRS, (first, second), op.span))

    # -- threads part --------------------------------------------------------------------------------------------

    def _parting_if(self, op: Op) -> None:
        arrays = self._arrays(op.results)
        condition = op.operands[0]
        masks = [self.array(Value(BOOL, name)) for name in ("then", "otherwise")]
        some: list[Value] = []
        for number, mask in enumerate(masks):

            def each(code: LaneCode, number: int = number, mask: Value = mask) -> Value:
                chosen = code.vec(self.resolve(code, condition))
                chosen = code.both(code.mask, chosen if number == 0 else code.b.op("not", chosen))
                code.write(mask, self.where(code), Varying(chosen), None)
                return code.any(chosen)

            some.append(self.any_group(each))
        for region, mask, taken in zip(op.regions, masks, some, strict=True):

            def build(region: Block = region, mask: Value = mask) -> Sequence[Value]:
                self._under(mask, lambda: self.ops(region.ops, self._stores(region.yields, arrays)))
                return []

            if len(region.ops) > 1 or region.yields:
                self.b.append(Op("if", (taken,), (), NO_ATTRS, (self._inside(build), self._inside(list)), op.span))

    def _parting_for(self, op: Op) -> None:
        region = op.regions[0]
        arrays = self._arrays(region.args, (region.args[0], *op.results))
        self.stretch((), self._stores((op.operands[0], *op.operands[3:]), arrays))
        active = self.array(Value(BOOL, "active"))
        index, high, step = region.args[0], op.operands[1], op.operands[2]
        place = arrays[0]
        assert place is not None

        def goes_on(code: LaneCode) -> Value:
            less = code.b.op("lt", code.vec(self.resolve(code, index)), code.vec(self.resolve(code, high)))
            mask = code.both(code.mask, less)
            code.write(active, self.where(code), Varying(mask), None)
            return code.any(mask)

        def advance(code: LaneCode) -> None:
            following = code.b.add(code.vec(self.resolve(code, index)), code.vec(self.resolve(code, step)))
            code.write(place, self.where(code), Varying(following), code.mask)

        def turn() -> None:
            self.ops(region.ops, self._stores(region.yields, arrays[1:]))
            self.each_group(advance)

        self._turns(op, lambda: self.any_group(goes_on), active, turn)

    def _parting_while(self, op: Op) -> None:
        condition, body = op.regions
        arrays = self._arrays(condition.args, body.args, op.results)
        self.stretch((), self._stores(op.operands, arrays))
        active = self.array(Value(BOOL, "active"))
        goes_on, *passed = condition.yields

        def begin(code: LaneCode) -> Value:
            mask = code.truth() if code.mask is None else code.mask
            code.write(active, self.where(code), Varying(mask), None)
            return code.any(mask)

        self.any_group(begin)

        def narrow(code: LaneCode) -> Value:
            mask = code.both(code.mask, code.vec(self.resolve(code, goes_on)))
            code.write(active, self.where(code), Varying(mask), None)
            return code.any(mask)

        def test() -> Value:
            self.ops(condition.ops, self._stores(passed, arrays))
            return self.any_group(narrow)

        def under() -> Value:
            outer, self.mask = self.mask, active
            found = test()
            self.mask = outer
            return found

        self._turns(op, under, active, lambda: self.ops(body.ops, self._stores(body.yields, arrays)))

    def _turns(self, op: Op, test: Callable[[], Value], active: Value, turn: Callable[[], None]) -> None:
        """Turns of a loop as long as `test` holds for any thread, for the threads of the mask `active`."""

        def body() -> Sequence[Value]:
            self._under(active, turn)
            return []

        regions = (self._inside(lambda: [test()]), self._inside(body))
        self.b.append(Op("while", (), (), NO_ATTRS, regions, op.span))
