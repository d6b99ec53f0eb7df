"""Loop stage -> tile stage for attention (`analysis/attention.py`) on a CPU: queries lie along SIMD registers.

In: a loop-stage kernel that is attention, and its schedule (`family=cpu_attention`). Out: a tile-stage kernel whose blocks are
single threads. A block has up to `m` rows, in strips of `nr`, few rows at the end in strips of one register. It walks the keys in
steps of `n`, whose keys and values it copies (and widens) for all strips, and keeps the maximum so far and both sums of each strip
in local memory:

    for %start { copy keys, values; for %strip {
      for %panel { %s = keys[panel, :] · queries[:, strip] in registers, mr keys at a time; %f = the score; %max = max(%max, %f) }
      for %j { %p = exp(%f - %max); %sum += %p }
      for %panel { sums[panel] = sums[panel] * shrink + values[:, panel] · %p in registers, mr columns at a time } } }

As every lane is a row of its own, maxima, exponentials and sums are elementwise, keys and values are single numbers that meet
whole vectors, and nothing but queries, results and what else a score reads (a mask) is ever turned round. Rows past the last one repeat it and are not stored. Steps
beyond a limit `j < i + c` are left out; only panels that a limit or the last key cuts through are masked. A row whose scores are
all -inf has no maximum to subtract: 0 is subtracted instead, and it gets what the text gives, as in `lower_attention`. One kernel
serves all sizes; rows of more terms or columns than there is room for are computed as the text has it, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.attention import Attention, find_attention
from tilewright.base.dtypes import DType, f32
from tilewright.base.errors import CompilerBug
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, floordiv, maximum, minimum
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.nest_shapes import Condition, shape_of
from tilewright.passes.schedules.attention import CpuAttention
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.to_tile.lower_loops import LoopLowering

MANY = 4
"""Strips for each core, from which on blocks have more than one."""
NOTHING = {"exp": -104.0, "exp2": -151.0}
"""Below this the exponential rounds to 0."""


@record
class Strip:
    """Rows that are computed together, and how many keys or columns beside them are in registers at once."""

    rows: int
    beside: int


def lower_attention_cpu(kernel: Kernel, schedule: CpuAttention, target: Target) -> Kernel:
    """The tile-stage kernel."""
    found = find_attention(kernel)
    if found is None:
        raise CompilerBug.at("TW040", f"{kernel.name} is not attention", kernel.span)
    return _CpuAttentionLowering(kernel, found, schedule, target).run_attention()


class _CpuAttentionLowering(LoopLowering):
    """Bodies are lowered as for loops, over tiles of rank 2 with one row: scores of one key, or results of one query."""

    def __init__(self, kernel: Kernel, found: Attention, schedule: CpuAttention, target: Target) -> None:
        super().__init__(kernel, Schedule((1,) * len(found.extents)), target)
        self.found, self.matrix = found, schedule
        self.rank = 2
        self.lanes = schedule.nr // schedule.vectors
        self.wide, self.narrow = Strip(schedule.nr, schedule.mr), Strip(self.lanes, 2 * schedule.mr)
        self.everything = list(walk(found.parallel.regions[0]))
        self.made = {result: op for op in self.everything for result in op.results}
        self.i = found.indices[found.row]
        self.rows = found.extents[found.row]
        self.depth, self.columns = found.depth, found.column_extent
        self.reductions = (found.maximum, *found.sums, found.weighted)
        self.count: Value | None = None
        """How many keys there are, where a number in memory says it."""
        self.turned: list[tuple[Op, Value]] = []
        """Loads of a score whose rows are turned round first, and where to."""

    def run_attention(self) -> Kernel:
        found, s = self.found, self.matrix
        b = Builder(self.kernel.span)
        env: dict[Value, Value] = {p: p for p in self.kernel.params}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], env)
        batch = ONE
        for position in found.batch:
            batch = batch * found.extents[position]
        strips = ceildiv(batch * ceildiv(self.rows, s.nr), MANY * self.target.multiprocessors)
        height = maximum(ONE, minimum(Size.of(s.m // s.nr), strips)) * s.nr
        down = ceildiv(self.rows, height)
        rest, row = self._divide(b, b.op("program_id", axis=0), down)
        if found.reach is not None:
            row = b.sub(b.index(down - 1), row)  # the longest first
        for position in reversed(found.batch[1:]):
            rest, env[found.indices[position]] = self._divide(b, rest, found.extents[position])
        if found.batch:
            env[found.indices[found.batch[0]]] = rest
        top = b.mul(row, b.index(height))
        bottom = b.op("min", b.add(top, b.index(height)), b.index(self.rows))
        with b.at(found.maximum.span):
            fits = b.logical_and(*(b.op("le", b.index(size), b.index(s.k)) for size in (self.depth, self.columns)))
            b.if_(fits, lambda at: self._block(at, top, bottom, env), lambda at: self._plainly(at, top, bottom, env))
        attrs: dict[str, Attr] = {**self.kernel.attrs, "schedule": s.describe()}
        return replace(self.kernel, stage=Stage.TILE, body=Block((), tuple(b.ops)), grid=(batch * down,), attrs=MappingProxyType(attrs))

    def _divide(self, b: Builder, value: Value, by: Size) -> tuple[Value, Value]:
        quotient = b.op("floordiv", value, b.index(by))
        return quotient, b.sub(value, b.mul(quotient, b.index(by)))

    def _plainly(self, b: Builder, top: Value, bottom: Value, env: dict[Value, Value]) -> list[Value]:
        """Rows as the text has them."""
        found = self.found
        region = found.parallel.regions[0]

        def row(at: Builder, number: Value) -> list[Value]:
            local = {**env, self.i: number}
            if found.loop is not None:
                self.ops(at, region.ops, local, [])
                return []

            def column(inner: Builder, index: Value) -> list[Value]:
                self.ops(inner, region.ops, {**local, found.column: index}, [])
                return []

            at.for_(at.index(0), at.index(self.columns), at.index(1), [], column, name="column")
            return []

        b.for_(top, bottom, b.index(1), [], row, name="row")
        return []

    # -- one block ----------------------------------------------------------------------------------------------

    def _block(self, b: Builder, top: Value, bottom: Value, env: dict[Value, Value]) -> list[Value]:
        found, s = self.found, self.matrix
        if found.count is not None:
            self._evaluate(b, [found.count], env, [])
            self.count = env[found.count]
        self.queries = self._local(b, "queries", s.m * s.k)
        self.sums = self._local(b, "sums", s.m * s.k)
        self.most = self._local(b, "most", s.m)
        self.total = self._local(b, "total", s.m)
        self.keys = self._local(b, "keys", s.n * s.k)
        self.values = self._local(b, "values", s.n * s.k)
        self.weights = self._local(b, "weights", s.n * s.nr)
        self.turned = [(op, self._local(b, "further", s.n * s.nr, dtype_of(op.result.type))) for op in self._further()]
        wide, lanes = b.index(s.nr), b.index(self.lanes)
        # A few rows at the end go in strips of one register each, where that takes less time.
        whole = b.mul(b.op("floordiv", b.sub(bottom, top), wide), wide)
        left = b.sub(b.sub(bottom, top), whole)
        few = b.op("le", left, b.index(s.vectors // 2 * self.lanes))
        whole = b.select(few, whole, b.add(whole, wide))

        def each_strip(at: Builder, body: Callable[[Builder, Strip, Value], object]) -> None:
            def one(inner: Builder, place: Value, strip: Strip) -> list[Value]:
                body(inner, strip, place)
                return []

            at.for_(at.index(0), whole, wide, [], lambda inner, place: one(inner, place, self.wide), name="strip")
            end = at.sub(bottom, top)
            at.for_(whole, end, lanes, [], lambda inner, place: one(inner, place, self.narrow), name="strip")

        each_strip(b, lambda at, strip, place: self._begin(at, strip, place, top, env))
        end = self._before(b, b.sub(bottom, b.index(1)))

        def step(at: Builder, start: Value) -> list[Value]:
            own = at.op("min", at.sub(end, start), at.index(s.n))
            d, j = found.score.regions[0].args[0], found.weighted.regions[0].args[0]
            self._copy(at, found.key, self.keys, (found.j, d), start, own, self.depth, env)
            self._copy(at, found.value, self.values, (j, found.column), start, own, self.columns, env)
            each_strip(at, lambda inner, strip, place: self._step(inner, strip, place, top, start, env))
            return []

        b.for_(b.index(0), end, b.index(s.n), [], step, name="start")
        each_strip(b, lambda at, strip, place: self._finish(at, strip, place, top, env))
        return []

    def _further(self) -> list[Op]:
        """Loads of a score, beside queries and keys, that walk memory along the keys and differ from row to row."""
        found, loads = self.found, []
        for op in found.maximum.regions[0].ops if not found.strict else ():
            if op.opcode != "load" or op in (found.query, found.key) or op.attrs.get("masked"):
                continue
            tensor, axis = op.operands[0].type, found.axis(op, found.j)
            assert isinstance(tensor, Tensor)
            by_row = any(found.forms[v].factor(self.i) != ZERO for v in op.operands[1:])
            if axis >= 0 and tensor.strides[axis] == ONE and by_row:
                loads.append(op)
        return loads

    def _local(self, b: Builder, name: str, size: int, dtype: DType = f32) -> Value:
        return b.op("alloc", dtype=dtype, shape=(size,), space="local", align=64, name=name)

    def _before(self, b: Builder, row: Value) -> Value:
        """How many keys a row has."""
        if self.count is not None:
            return self.count
        keys, reach = b.index(self.found.keys), self.found.reach
        if reach is None:
            return keys
        return b.op("max", b.op("min", b.add(self.found.start(b, row), b.index(reach)), keys), b.index(0))

    def _of(self, b: Builder, strip: Strip, place: Value, size: Size, number: Value) -> Value:
        """Where line `number` of a strip's queries or sums lies: they have `size` lines of as many elements as the strip has rows."""
        first = b.add(b.mul(place, b.index(size)), b.mul(number, b.index(strip.rows)))
        return self.index_tile(b, first, 1, strip.rows)

    def _line(self, b: Builder, strip: Strip, number: Value) -> Value:
        return self.index_tile(b, b.mul(number, b.index(strip.rows)), 1, strip.rows)

    def _vectors(self, b: Builder, high: Value, body: Callable[[Builder, Value], object]) -> None:
        """Indices below `high` as vectors, and one by one at the end."""
        zero, lanes = b.index(0), b.index(self.lanes)
        whole = b.mul(b.op("floordiv", high, lanes), lanes)

        def several(at: Builder, first: Value) -> list[Value]:
            body(at, self.index_tile(at, first, 1, self.lanes))
            return []

        def single(at: Builder, index: Value) -> list[Value]:
            body(at, index)
            return []

        b.for_(zero, whole, lanes, [], several, name="c")
        b.for_(whole, high, b.index(1), [], single, name="c")

    # -- copies -------------------------------------------------------------------------------------------------

    def _begin(self, b: Builder, strip: Strip, place: Value, top: Value, env: dict[Value, Value]) -> None:
        """Turn a strip's queries round, and set its sums to nothing."""
        found = self.found
        across = self.index_tile(b, place, 1, strip.rows)
        nothing = b.op("broadcast", b.const(0, f32), shape=(1, strip.rows))
        b.multi("store", self.most, across, b.splat(-math.inf, nothing))
        b.multi("store", self.total, across, nothing)

        def clear(at: Builder, column: Value) -> list[Value]:
            return list(at.multi("store", self.sums, self._of(at, strip, place, self.columns, column), nothing))

        b.for_(b.index(0), b.index(self.columns), b.index(1), [], clear, name="column")
        origin = b.mul(place, b.index(self.depth))

        def query(at: Builder, number: Value) -> list[Value]:
            row = at.op("min", at.add(at.add(top, place), number), at.index(self.rows - 1))

            def some(inner: Builder, terms: Value) -> None:
                local = {**env, self.i: row, found.score.regions[0].args[0]: terms}
                self._evaluate(inner, [found.query.result], local, [])
                to = inner.add(inner.like(inner.add(origin, number), terms), inner.mul(terms, inner.like(inner.index(strip.rows), terms)))
                inner.multi("store", self.queries, to, inner.cast(local[found.query.result], f32))

            self._vectors(at, at.index(self.depth), some)
            return []

        b.for_(b.index(0), b.index(strip.rows), b.index(1), [], query, name="query")

    def _copy(
        self, b: Builder, load: Op, to: Value, indices: tuple[Value, Value], start: Value, count: Value, width: Size,
        env: dict[Value, Value],
    ) -> None:  # fmt: skip
        """Rows of keys or values from `start` on; the last panel is filled up with its last row."""
        panel = b.index(self.narrow.beside)
        whole = b.mul(b.op("floordiv", b.add(count, b.sub(panel, b.index(1))), panel), panel)

        def row(at: Builder, number: Value) -> list[Value]:
            own = at.add(start, at.op("min", number, at.sub(count, at.index(1))))
            origin = at.mul(number, at.index(width))

            def some(inner: Builder, terms: Value, known: Mapping[Value, Value] = MappingProxyType({})) -> None:
                local = {**env, indices[0]: own, indices[1]: terms, **known}
                self._evaluate(inner, [load.result], local, [])
                inner.multi("store", to, inner.add(inner.like(origin, terms), terms), self.widen(inner, inner.cast(local[load.result], f32), shape_of(terms)))

            def block(inner: Builder, number: Value) -> list[Value]:
                """A block of packed numbers: what is the same for all of it is computed once."""
                first = inner.mul(number, inner.index(length))

                def part(deep: Builder, place: Value) -> None:
                    known = {op.result: number if op.opcode == "floordiv" else place for op in digits}
                    some(deep, deep.add(deep.like(first, place), place), known)

                self._vectors(inner, inner.index(length), part)
                return []

            if digits:
                at.for_(at.index(0), at.index(floordiv(width, Size.of(length))), at.index(1), [], block, name="block")
            else:
                self._vectors(at, at.index(width), some)
            return []

        digits, length = self._digits(load, indices[1], width)
        b.for_(b.index(0), whole, b.index(1), [], row, name="row")

    def _digits(self, element: Op, index: Value, width: Size) -> tuple[list[Op], int]:
        """The quotients and remainders of an index that a computed element is read by, and the one number they are by: that of elements in a block. None
        where blocks do not fill rows."""
        found: list[Op] = []
        seen: set[Value] = set()
        waiting = list(element.operands) if element.opcode != "load" else []
        while waiting:
            value = waiting.pop()
            op = self.made.get(value)
            if op is None or value in seen:
                continue
            seen.add(value)
            if op.opcode in ("floordiv", "mod") and op.operands[0] is index:
                found.append(op)
            waiting += op.operands
        lengths = {self.found.forms[op.operands[1]].constant.constant for op in found}
        length = lengths.pop() if len(lengths) == 1 else None
        if length is None or length % self.lanes or not width.divisible_by(length, self.kernel.facts):
            return [], 1
        return found, length

    def _turn(self, b: Builder, strip: Strip, first: Value, start: Value, count: Value, env: dict[Value, Value]) -> None:
        """What else the scores of a step read, with rows along vectors."""

        def row(at: Builder, number: Value) -> list[Value]:
            own = at.op("min", at.add(first, number), at.index(self.rows - 1))

            def some(inner: Builder, keys: Value) -> None:
                to = inner.add(inner.like(number, keys), inner.mul(keys, inner.like(inner.index(strip.rows), keys)))
                for load, memory in self.turned:
                    local = {**env, self.i: own, self.found.j: inner.add(inner.like(start, keys), keys)}
                    self._evaluate(inner, [load.result], local, [])
                    inner.multi("store", memory, to, local[load.result])

            self._vectors(at, count, some)
            return []

        if self.turned:
            b.for_(b.index(0), b.index(strip.rows), b.index(1), [], row, name="row")

    # -- one step of one strip ------------------------------------------------------------------------------------

    def _step(self, b: Builder, strip: Strip, place: Value, top: Value, start: Value, env: dict[Value, Value]) -> None:
        first = b.add(top, place)
        last = b.op("min", b.add(first, b.index(strip.rows)), b.index(self.rows))
        end = self._before(b, b.sub(last, b.index(1)))
        count = b.op("min", b.sub(end, start), b.index(self.matrix.n))

        def some(at: Builder) -> list[Value]:
            self._attend(at, strip, place, first, start, count, env)
            return []

        if self.found.reach is None:
            some(b)
        else:
            b.if_(b.op("gt", count, b.index(0)), some, lambda at: [])

    def _attend(
        self, b: Builder, strip: Strip, place: Value, first: Value, start: Value, count: Value, env: dict[Value, Value]
    ) -> None:
        found, zero, one = self.found, b.index(0), b.index(1)
        across = self.index_tile(b, place, 1, strip.rows)
        most = b.op("load", self.most, across)
        self._turn(b, strip, first, start, count, env)
        new = self._scores(b, strip, place, first, start, count, most, env)
        empty = b.op("eq", new, b.splat(-math.inf, new))
        shift = b.select(empty, b.splat(0, new), new)
        shrink = b.op(found.exponential, b.sub(most, shift))

        def weigh(at: Builder, j: Value, total: Value) -> list[Value]:
            line = self._line(at, strip, j)
            weight = self._weight(at, at.sub(at.op("load", self.weights, line), shift))
            at.multi("store", self.weights, line, weight)
            return [at.add(total, weight)]

        (added,) = b.for_(zero, count, one, [b.splat(0, new)], weigh, name="j")
        b.multi("store", self.most, across, new)
        b.multi("store", self.total, across, b.fma(b.op("load", self.total, across), shrink, added))
        self._weighted(b, strip, place, count, shrink)

    def _weight(self, b: Builder, exponent: Value) -> Value:
        """The exponential. Where scores may be -inf, what is nothing is not computed: CPUs take long over a product that is lost."""
        found = self.found
        if found.reach is None and not found.conditions and not self.turned:
            return b.op(found.exponential, exponent)
        nothing = b.splat(0, exponent)
        lost = b.op("lt", exponent, b.splat(NOTHING[found.exponential], exponent))
        return b.select(lost, nothing, b.op(found.exponential, b.select(lost, nothing, exponent)))

    def _scores(
        self, b: Builder, strip: Strip, place: Value, first: Value, start: Value, count: Value, most: Value, env: dict[Value, Value]
    ) -> Value:
        """Scores of a step's keys, written down, and the maximum up to them."""
        found, shape = self.found, (1, strip.rows)
        zero, one, beside = b.index(0), b.index(1), b.index(strip.beside)
        row = self.index_tile(b, first, 1, strip.rows)
        local = {**env, self.i: b.op("min", row, b.like(b.index(self.rows - 1), row))}

        def panel(at: Builder, number: Value, most: Value, masked: bool) -> list[Value]:
            down = at.mul(number, beside)
            rows = [at.mul(at.add(down, at.index(r)), at.index(self.depth)) for r in range(strip.beside)]
            nothing = at.op("broadcast", at.const(0, f32), shape=shape)

            def term(inner: Builder, d: Value, *sums: Value) -> list[Value]:
                query = inner.op("load", self.queries, self._of(inner, strip, place, self.depth, d))
                keys = [inner.op("load", self.keys, inner.add(own, d)) for own in rows]
                return [inner.fma(inner.like(key, query), query, acc) for key, acc in zip(keys, sums, strict=True)]

            with at.at(found.score.span):
                sums = at.for_(zero, at.index(self.depth), one, [nothing] * strip.beside, term, name="d")
            for r, value in enumerate(sums):
                j = at.add(down, at.index(r))
                line = self._line(at, strip, at.op("min", j, at.sub(count, one)) if masked else j)
                own = {load.result: at.op("load", memory, line) for load, memory in self.turned}
                score = self._score(at, at.add(start, j), value, masked, {**local, **own}, shape)
                most = at.op("max", most, score)
                at.multi("store", self.weights, self._line(at, strip, j), score)
            return [most]

        # Of these keys no row leaves out any for its limit.
        whole = b.op("min", b.op("max", b.sub(self._before(b, first), start), zero), count)
        full, panels = b.op("floordiv", whole, beside), b.op("floordiv", b.add(count, b.index(strip.beside - 1)), beside)
        (most,) = b.for_(zero, full, one, [most], lambda at, p, m: panel(at, p, m, False), name="panel")
        return b.for_(full, panels, one, [most], lambda at, p, m: panel(at, p, m, True), name="panel")[0]

    def _score(
        self, b: Builder, j: Value, product: Value, masked: bool, env: dict[Value, Value], shape: tuple[int, int]
    ) -> Value:
        """f of one key and all rows of a strip, and -inf where a term does not count."""
        found = self.found
        local = {**env, found.j: j, found.score.result: product}
        keep: list[Value] = []
        masks: list[Condition] = []
        if masked:
            last = self.count if self.count is not None else b.index(found.keys)
            keep.append(b.op("lt", j, last))
            local[found.j] = j = b.op("min", j, b.sub(last, b.index(1)))
        if masked and found.reach is not None:
            ahead = b.sub(b.like(j, local[self.i]), found.start(b, local[self.i]))
            keep.append(b.op("lt", ahead, b.like(b.index(found.reach), ahead)))
            if found.strict:
                masks.append(Condition(keep[-1], edge=False))
        for condition in found.conditions:
            self._evaluate(b, [condition], local, masks)
            keep.append(local[condition])
            if found.strict:
                masks.append(Condition(keep[-1], edge=False))
        self._evaluate(b, [found.term], local, masks)
        score = self.widen(b, local[found.term], shape)
        for value in keep:
            score = b.select(self.widen(b, value, shape), score, b.splat(-math.inf, score))
        return score

    def _weighted(self, b: Builder, strip: Strip, place: Value, count: Value, shrink: Value) -> None:
        """Scale the sums of weighted values down, and add those of a step."""
        zero, one, width = b.index(0), b.index(1), b.index(self.columns)

        def columns(at: Builder, first: Value, number: int) -> list[Value]:
            places = [at.add(first, at.index(r)) for r in range(number)]
            lines = [self._of(at, strip, place, self.columns, own) for own in places]
            before = [at.mul(at.op("load", self.sums, line), shrink) for line in lines]

            def key(inner: Builder, j: Value, *sums: Value) -> list[Value]:
                weight = inner.op("load", self.weights, self._line(inner, strip, j))
                origin = inner.mul(j, width)
                values = [inner.op("load", self.values, inner.add(origin, own)) for own in places]
                return [inner.fma(inner.like(value, weight), weight, acc) for value, acc in zip(values, sums, strict=True)]

            for line, value in zip(lines, at.for_(zero, count, one, before, key, name="j"), strict=True):
                at.multi("store", self.sums, line, value)
            return []

        with b.at(self.found.weighted.span):
            low = zero
            for number in (strip.beside, 2, 1):
                step = b.index(number)
                high = b.add(low, b.mul(b.op("floordiv", b.sub(width, low), step), step))
                b.for_(low, high, step, [], lambda at, first, n=number: columns(at, first, n), name="panel")
                low = high

    # -- finishing ------------------------------------------------------------------------------------------------

    def _finish(self, b: Builder, strip: Strip, place: Value, top: Value, env: dict[Value, Value]) -> None:
        """The rest of the kernel, row by row."""
        first = b.add(top, place)

        def row(at: Builder, number: Value) -> list[Value]:
            self._finish_row(at, strip, place, number, {**env, self.i: at.add(first, number)})
            return []

        b.for_(b.index(0), b.op("min", b.sub(b.index(self.rows), first), b.index(strip.rows)), b.index(1), [], row, name="row")

    def _finish_row(self, b: Builder, strip: Strip, place: Value, number: Value, env: dict[Value, Value]) -> None:
        found = self.found
        most, total = (b.op("load", memory, b.add(place, number)) for memory in (self.most, self.total))
        lost = self._lost(b, most, env)
        if lost is not None:
            total = b.select(lost, b.const(math.nan, f32), total)
        env[found.maximum.result] = most
        env |= {op.result: total for op in found.sums}
        origin = b.add(b.mul(place, b.index(self.columns)), number)

        def columns(at: Builder, column: Value, ops: Sequence[Op]) -> None:
            local = {**env, found.column: column}
            out = at.op("load", self.sums, at.add(at.like(origin, column), at.mul(column, at.like(at.index(strip.rows), column))))
            if lost is not None:
                out = at.select(at.like(lost, out), at.splat(math.nan, out), out)
            for scale in found.scales:
                self._evaluate(at, [scale.value], local, [])
                out = at.op("div" if scale.divides else "mul", out, self.widen(at, local[scale.value], shape_of(out)))
            local[found.weighted.result] = out
            self.ops(at, [op for op in ops if op not in self.reductions], local, [])

        outside = found.parallel.regions[0].ops
        if found.loop is None:
            self._vectors(b, b.index(self.columns), lambda at, column: columns(at, column, outside))
            return
        inside = found.loop.regions[0].ops
        for op in outside:
            if op is found.loop:
                self._vectors(b, b.index(self.columns), lambda at, column: columns(at, column, inside))
            elif op not in self.reductions and op.opcode != "yield":
                self.ops(b, [op], env, [])

    def _lost(self, b: Builder, most: Value, env: dict[Value, Value]) -> Value | None:
        """Whether a row has scores of -inf only, and the text has such terms: they are exp(-inf - -inf), NaN."""
        found = self.found
        if found.shifted or (found.strict and found.conditions):
            return None
        lost = b.op("eq", most, b.const(-math.inf, f32))
        lost = b.logical_and(lost, b.op("gt", b.index(found.keys), b.index(0)))
        if found.strict and found.reach is not None:
            lost = b.logical_and(lost, b.op("gt", b.add(found.start(b, env[self.i]), b.index(found.reach)), b.index(0)))
        return lost

    def _evaluate(self, b: Builder, values: Sequence[Value], env: dict[Value, Value], masks: list[Condition]) -> None:
        """Compute values of the nest from what is bound already."""
        wanted: set[Value] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            op = self.made.get(value)
            if op is None or value in wanted or value in env:
                continue
            wanted.update(op.results)
            waiting += op.operands
            waiting += [v for region in op.regions for inner in walk(region) for v in inner.operands]
        inside = {id(inner) for op in self.everything if wanted & {*op.results} for region in op.regions for inner in walk(region)}
        self.ops(b, [op for op in self.everything if wanted & {*op.results} and id(op) not in inside], env, masks)
