"""Several steps of a stencil in one visit of its memory, on a GPU. `Program -> Program`.

In: a program at the thread stage with ordered loops, and the same at the loop stage. Out: the same, where a loop whose two turns are a stencil of one array into
another and back first takes many steps at a time: a block copies a tile and a frame around it to shared memory, takes several steps there and stores
the tile. What the frame lacks spoils it from outside, by one radius each step, and never reaches the tile. The last steps are taken one by one.

    ordered t count n {                      ordered t.tiles count 2*max(0, (n - 2)//(2*K)) {
      turn 0 of 2 { call @a(u, v) }            turn 0 of 2 { call @a.tiles(u, v) }      K steps, u -> v
      turn 1 of 2 { call @b(v, u) }     ->     turn 1 of 2 { call @b.tiles(u, v) }      K steps, v -> u
    }                                        }
                                             ordered t count n - K*(2*max(0, (n - 2)//(2*K))) { … as before … }

The two kernels write the same part of arrays of the same shape, read one array at constant distances, and compute with few plain ops. Each point is computed from the
same numbers in the same way, so that results have the same bits. At least two steps are left for the loop itself, if there are two, so that both arrays
hold at the end what they would hold without this. Elements outside of the part are those of each array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import analyse
from tilewright.analysis.loop_nest import nest_of
from tilewright.base.dtypes import f32, f64, i64, u32
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv, contiguous_strides, maximum
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.program import KernelCall, LoopTurn, OrderedLoop, Program
from tilewright.ir.rewrite import has_effects
from tilewright.ir.types import Scalar, Tensor, dtype_of

_PLAIN = frozenset({
    "add", "sub", "mul", "div", "fma", "neg", "abs", "min", "max", "smaller", "larger", "sqrt", "select", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "const",
})  # fmt: skip
"""Ops that code generators take as they are."""
_MOST_OPS = 32
"""Ops of a point: points of the frame are computed several times."""
_MOST_REACH = 4
_COLUMNS = 128
"""Columns of a tile with its frame: one for each thread of a row of threads."""
_STRIPS = 2
"""Rows of threads."""
_AT_ONCE = 8
"""Rows that a thread computes together: they share what they read."""
_MEDIUM = 1 << 18
"""Points from which on larger tiles are enough for all multiprocessors."""
_LARGE = 1 << 23
"""Points from which on they lie in memory, not in a cache, and fewer steps with a thinner frame are better."""


@record
class TimeTile:
    """Steps taken at a time, and the rows of a tile with its frame."""

    steps: int
    rows: int


@record
class Stencil:
    """A kernel that computes one array from its neighbourhoods in another."""

    kernel: Kernel
    source: Value
    target: Value
    start: tuple[int, int]
    """Where the part begins that it writes."""
    extents: tuple[Size, Size]
    reads: Mapping[Value, tuple[int, int]]
    """Of each load's result: how far from the point it lies."""
    ops: tuple[Op, ...]
    """What is computed for a point."""
    result: Value

    @property
    def reach(self) -> tuple[int, int]:
        return max(abs(d[0]) for d in self.reads.values()), max(abs(d[1]) for d in self.reads.values())


def time_tiles(program: Program, target: Target, loop: Program | None, hints: Mapping[str, int]) -> Program:
    """The program with stencils in time tiles."""
    if not target.simt or target.warp_size * 2 > _COLUMNS or loop is None or [c.kernel.name for c in program.calls] != [c.kernel.name for c in loop.calls]:
        return program
    calls: list[KernelCall] = []
    loops = list(program.loops)
    position = 0
    while position < len(program.calls):
        pair = _pair(program, loop, position, target, hints)
        if pair is None:
            calls.append(program.calls[position])
            position += 1
            continue
        around, tiles = pair
        first, second = program.calls[position : position + 2]
        assert around.count is not None
        steps = tiles[0].tile.steps
        rounds = 2 * maximum(Size.of(0), (around.count - 2) // (2 * steps))
        name = f"{around.name}.tiles"
        loops[loops.index(around)] = replace(around, count=around.count - rounds * steps)
        loops.insert(0, OrderedLoop(name, rounds, span=around.span))
        calls += [KernelCall(t.kernel(), t.args, (LoopTurn(name, 2, turn),)) for turn, t in enumerate(tiles)]
        calls += [first, second]
        position += 2
    return replace(program, calls=tuple(calls), loops=tuple(loops))


def _pair(program: Program, loop: Program, position: int, target: Target, hints: Mapping[str, int]) -> tuple[OrderedLoop, list[_Tiles]] | None:
    """The loop around two calls that are a stencil and the way back, and the kernels that take several steps."""
    both = program.calls[position : position + 2]
    if len(both) != 2 or any(len(call.loops) != 1 or call.varies for call in both) or both[0].loops[0].loop != both[1].loops[0].loop:
        return None
    name = both[0].loops[0].loop
    turns = [call.loops[0] for call in both]
    if [(t.period, t.turn) for t in turns] != [(2, 0), (2, 1)] or sum(any(t.loop == name for t in call.loops) for call in program.calls) != 2:
        return None
    around = program.ordered(name)
    stencils = [stencil_of(loop.calls[position + k].kernel) for k in (0, 1)]
    there, back = stencils
    if around.count is None or there is None or back is None:
        return None
    named = [dict(zip(loop.calls[position + k].kernel.params, loop.calls[position + k].args, strict=True)) for k in (0, 1)]
    first, second = named[0][there.source], named[0][there.target]
    if first == second or (named[1][back.source], named[1][back.target]) != (second, first):
        return None
    if (there.start, there.extents, there.source.type, there.source.type) != (back.start, back.extents, back.source.type, there.target.type):
        return None
    reach = tuple(max(pair) for pair in zip(there.reach, back.reach, strict=True))
    tile = _tile(there, max(1, *reach), target, hints)
    if tile is None:
        return None
    scalars = {name: param.type for k in (0, 1) for param, name in named[k].items() if isinstance(param.type, Scalar)}
    return around, [_Tiles(there, back, tile, (reach[0], reach[1]), (first, second), scalars, named, k) for k in (0, 1)]


def stencil_of(kernel: Kernel) -> Stencil | None:
    """What a loop-stage kernel is as a stencil; None where it is none."""
    nests = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(nests) != 1 or any(op.opcode != "parallel" and (op.regions or has_effects(op)) for op in kernel.body.ops if op.opcode != "yield"):
        return None
    region = nests[0].regions[0]
    arrays = [p for p in kernel.params if isinstance(p.type, Tensor)]
    if len(region.args) != 2 or len(arrays) != 2 or any(op.regions for op in region.ops):
        return None
    stores = [op for op in region.ops if op.opcode == "store"]
    loads = [op for op in region.ops if op.opcode == "load"]
    if len(stores) != 1 or not loads or any(op.attrs for op in (*stores, *loads)):
        return None
    target = stores[0].operands[0]
    source = next(p for p in arrays if p is not target)
    if any(op.operands[0] is not source for op in loads) or not all(_is_plain_array(p.type) for p in arrays):
        return None
    forms = analyse(kernel)

    def distance(op: Op) -> tuple[int, int] | None:
        places = [forms.get(v) for v in op.operands[1:3]]
        ends = [form.constant.constant for form, index in zip(places, region.args, strict=True) if form is not None and form.minus(forms[index]).factors == ()]
        return (ends[0], ends[1]) if len(ends) == 2 and ends[0] is not None and ends[1] is not None else None

    start, reads = distance(stores[0]), {op.results[0]: distance(op) for op in loads}
    if start is None:
        return None
    near = {value: (place[0] - start[0], place[1] - start[1]) for value, place in reads.items() if place is not None}
    ops = _computed(kernel, region, stores[0].operands[3], set(near))
    if len(near) != len(loads) or ops is None or max(max(map(abs, d)) for d in near.values()) > _MOST_REACH:
        return None
    extents = nest_of(kernel).extents
    return Stencil(kernel, source, target, start, (extents[0], extents[1]), near, ops, stores[0].operands[3])


def _is_plain_array(type_: object) -> bool:
    return isinstance(type_, Tensor) and type_.dtype in (f32, f64) and type_.rank == 2 and tuple(type_.strides) == contiguous_strides(type_.shape)


def _computed(kernel: Kernel, region: Block, result: Value, loaded: set[Value]) -> tuple[Op, ...] | None:
    """The ops between loads and what is stored, in order; None where there are others than plain ones, or too many."""
    made = {r: op for op in (*kernel.body.ops, *region.ops) for r in op.results}
    needed: set[int] = set()
    waiting = [result]
    while waiting:
        value = waiting.pop()
        if value in loaded or (value in kernel.params and isinstance(value.type, Scalar)):
            continue
        op = made.get(value)
        if op is None or not (op.opcode in _PLAIN or _changes_width(op)) or op.attrs.keys() - {"value", "dtype"}:
            return None
        if id(op) not in needed:
            needed.add(id(op))
            waiting += op.operands
    ops = tuple(op for op in (*kernel.body.ops, *region.ops) if id(op) in needed)
    return ops if len(ops) <= _MOST_OPS else None


def _changes_width(op: Op) -> bool:
    """A conversion that has an instruction everywhere."""
    return op.opcode == "cast" and {dtype_of(op.operands[0].type), dtype_of(op.results[0].type)} <= {f32, f64}


def _tile(stencil: Stencil, reach: int, target: Target, hints: Mapping[str, int]) -> TimeTile | None:
    """How many steps are taken at a time, and the rows of a tile."""
    type_ = stencil.source.type
    assert isinstance(type_, Tensor)
    points = stencil.extents[0] * stencil.extents[1]
    count = points.evaluate(hints) if points.names <= hints.keys() else _LARGE
    steps, rows = 4 if count >= _LARGE else 8, 64 if count >= _MEDIUM and type_.dtype is f32 else 32
    steps = max(2, steps // reach // 2 * 2)
    fits = 2 * ((rows + 2 * reach) * (_COLUMNS + 2 * reach) + _COLUMNS * _STRIPS) * type_.dtype.itemsize <= target.max_shared
    return TimeTile(steps, rows) if fits and rows > 2 * steps * reach else None


@record
class _Tiles:
    """A kernel that takes several steps: the array at the place `turn` of the two holds the state, the other one gets it."""

    there: Stencil
    back: Stencil
    tile: TimeTile
    reach: tuple[int, int]
    arrays: tuple[str, str]
    scalars: Mapping[str, Scalar]
    named: Sequence[Mapping[Value, str]]
    turn: int

    @property
    def args(self) -> tuple[str, ...]:
        return (*self.arrays, *self.scalars)

    @property
    def frame(self) -> tuple[int, int]:
        return self.tile.steps * self.reach[0], self.tile.steps * self.reach[1]

    @property
    def core(self) -> tuple[int, int]:
        """Rows and columns of a tile without its frame."""
        return self.tile.rows - 2 * self.frame[0], _COLUMNS - 2 * self.frame[1]

    def kernel(self) -> Kernel:
        original = (self.there, self.back)[self.turn].kernel
        type_ = self.there.source.type
        params = [Value(type_, name) for name in self.arrays] + [Value(t, name) for name, t in self.scalars.items()]
        b = Builder(original.span)
        _TileCode(self, b, dict(zip(self.args, params, strict=True))).run()
        grid = ceildiv(self.there.extents[0], self.core[0]) * ceildiv(self.there.extents[1], self.core[1])
        attrs = {"schedule": f"steps={self.tile.steps}, tiles={self.core}, threads={_COLUMNS * _STRIPS}"}
        return Kernel(
            f"{original.name}.tiles", Stage.THREAD, tuple(params), Block((), tuple(b.ops)), (grid,), _COLUMNS * _STRIPS, original.facts,
            MappingProxyType(attrs), original.span,
        )  # fmt: skip


Chunk = Callable[[Builder, Value, Value], None]
"""Writes what a thread does with some of its rows: the first of them, and where it lies in shared memory."""


class _TileCode:
    """Writes the kernel."""

    def __init__(self, plan: _Tiles, b: Builder, params: Mapping[str, Value]) -> None:
        self.plan, self.b, self.params = plan, b, params
        self.pitch = _COLUMNS + 2 * plan.reach[1]
        type_ = plan.there.source.type
        assert isinstance(type_, Tensor)
        self.type = type_
        self.elements = (plan.tile.rows + 2 * plan.reach[0]) * self.pitch
        # Behind the tile each thread has a place for what it computes outside of the part.
        extent = self.elements + _COLUMNS * _STRIPS
        self.buffers = [b.op("alloc", space="shared", dtype=type_.dtype, shape=(extent,), align=16) for _ in (0, 1)]
        self.thread = b.op("thread_id")
        self.unread = b.cast(b.add(self.thread, b.index(self.elements)), u32)
        self.column, self.strip = b.op("mod", self.thread, b.index(_COLUMNS)), b.op("floordiv", self.thread, b.index(_COLUMNS))
        across = ceildiv(plan.there.extents[1], plan.core[1])
        block = b.op("program_id", axis=0)
        tile = b.op("floordiv", block, b.index(across)), b.op("mod", block, b.index(across))
        # Where the tile with its frame begins.
        self.origin = [
            b.add(b.mul(tile[axis], b.index(plan.core[axis])), b.index(plan.there.start[axis] - plan.frame[axis])) for axis in (0, 1)
        ]  # fmt: skip
        self.place = b.add(self.origin[1], self.column)
        self.array = self._rows(Size.of(0), type_.shape[0], self._between(self.place, Size.of(0), type_.shape[1]))
        ends = [(Size.of(plan.there.start[axis]), plan.there.extents[axis] + plan.there.start[axis]) for axis in (0, 1)]
        self.part = self._rows(*ends[0], self._between(self.place, *ends[1]))
        in_core = self._between(self.column, Size.of(plan.frame[1]), Size.of(plan.frame[1] + plan.core[1]))
        self.core = self._rows(*ends[0], b.op("and", in_core, self._between(self.place, *ends[1])), plan.frame[0])
        inside = [self._between(self.origin[axis], *ends[axis]) for axis in (0, 1)]
        inside += [b.op("le", b.add(self.origin[axis], b.index(extent)), b.index(ends[axis][1])) for axis, extent in ((0, plan.tile.rows), (1, _COLUMNS))]
        self.whole = b.op("and", b.op("and", inside[0], inside[1]), b.op("and", inside[2], inside[3]))
        """Whether the tile and its frame lie in the part."""
        base = b.add(b.mul(self.strip, b.index(plan.tile.rows // _STRIPS * self.pitch)), b.add(self.column, b.index(plan.reach[1])))
        self.base = b.add(base, b.index(plan.reach[0] * self.pitch))
        """Of the thread's first row, in shared memory."""
        self.first = b.mul(self.strip, b.index(plan.tile.rows // _STRIPS))

    def _between(self, value: Value, low: Size, high: Size) -> Value:
        return self.b.op("and", self.b.op("ge", value, self.b.index(low)), self.b.op("lt", value, self.b.index(high)))

    def _rows(self, low: Size, high: Size, column: Value, frame: int = 0) -> tuple[Value, Value]:
        """Which rows of the tile lie in rows `low` to `high` of the array, but for a frame of the tile: the first, and how many. None where `column` does not
        hold."""
        b = self.b
        least, most = b.index(frame), b.index(self.plan.tile.rows - frame)
        ends = [b.op("min", b.op("max", b.sub(b.index(end), self.origin[0]), least), most) for end in (low, high)]
        count = b.select(column, b.sub(ends[1], ends[0]), b.index(0))
        return b.cast(ends[0], u32), b.cast(count, u32)

    @staticmethod
    def _holds(b: Builder, row: Value, k: int, rows: tuple[Value, Value]) -> Value:
        """Whether the row `k` below a row of the tile is one of them."""
        first = b.cast(row, u32)
        return b.op("lt", b.sub(b.add(first, b.const(k, u32)) if k else first, rows[0]), rows[1])

    def run(self) -> None:
        b, plan = self.b, self.plan
        self._clear()
        self._chunks(b, self._load_whole, self._load)
        b.multi("barrier")

        def two_steps(inner: Builder, _: Value) -> Sequence[Value]:
            for number, stencil in enumerate((plan.there, plan.back)):
                bodies = [
                    lambda at, row, place, n=number, s=stencil, w=whole: self._step(at, row, place, n, s, w) for whole in (True, False)
                ]  # fmt: skip
                self._chunks(inner, *bodies)
                inner.multi("barrier")
            return []

        b.for_(b.index(0), b.index(plan.tile.steps // 2), b.index(1), [], two_steps, name="step")
        self._chunks(b, self._store, self._store)

    def _clear(self) -> None:
        """The rim around the frame, which steps read and never write, holds numbers, too."""
        b, (rows, columns) = self.b, self.plan.reach
        above, beside, height = rows * self.pitch, 2 * columns, self.plan.tile.rows

        def ends(inner: Builder, number: Value) -> Value:
            first = inner.op("lt", number, inner.index(above))
            return inner.select(first, number, inner.add(number, inner.index(height * self.pitch)))

        def sides(inner: Builder, number: Value) -> Value:
            row, column = inner.op("floordiv", number, inner.index(beside)), inner.op("mod", number, inner.index(beside))
            first = inner.op("lt", column, inner.index(columns))
            place = inner.select(first, column, inner.add(column, inner.index(_COLUMNS)))
            return inner.add(inner.mul(inner.add(row, inner.index(rows)), inner.index(self.pitch)), place)

        for count, place in ((2 * above, ends), (beside * height, sides)):

            def one(inner: Builder, number: Value, place: Callable[[Builder, Value], Value] = place) -> Sequence[Value]:
                for buffer in self.buffers:
                    inner.multi("store", buffer, place(inner, number), inner.const(0.0, self.type.dtype))
                return []

            if count:
                b.for_(self.thread, b.index(count), b.index(_COLUMNS * _STRIPS), [], one, name="rim")

    def _chunks(self, b: Builder, whole: Chunk, other: Chunk) -> None:
        """The thread's rows, some at a time: a body is given the first of them, and its place in shared memory. `whole` is for tiles that lie in the part."""

        def rows(body: Chunk) -> Callable[[Builder], Sequence[Value]]:
            def chunk(inner: Builder, number: Value) -> Sequence[Value]:
                offset = inner.mul(number, inner.index(_AT_ONCE))
                body(inner, inner.add(self.first, offset), inner.add(self.base, inner.mul(offset, inner.index(self.pitch))))
                return []

            def all_of_them(at: Builder) -> Sequence[Value]:
                at.for_(at.index(0), at.index(self.plan.tile.rows // _STRIPS // _AT_ONCE), at.index(1), [], chunk, name="chunk")
                return []

            return all_of_them

        if whole == other:
            rows(whole)(b)
        else:
            b.if_(self.whole, rows(whole), rows(other))

    def _load_whole(self, b: Builder, row: Value, place: Value) -> None:
        """The state; the first step writes all of the other buffer."""
        mine = self.params[self.plan.arrays[self.plan.turn]]
        first = b.add(self.origin[0], row)
        loaded = [b.op("load", mine, b.add(first, b.index(k)), self.place) for k in range(_AT_ONCE)]
        for k, value in enumerate(loaded):
            b.multi("store", self.buffers[0], b.add(place, b.index(k * self.pitch)), value)

    def _load(self, b: Builder, row: Value, place: Value) -> None:
        """The state, and what each array holds around the part."""
        plan = self.plan
        mine, other = (self.params[plan.arrays[plan.turn]], self.params[plan.arrays[1 - plan.turn]])
        for k in range(_AT_ONCE):
            y = b.add(self.origin[0], b.add(row, b.index(k)))
            inside, part = self._holds(b, row, k, self.array), self._holds(b, row, k, self.part)
            around = b.op("and", inside, b.op("not", part))
            state = b.op("load", mine, y, self.place, inside, masked=True)
            rest = b.op("load", other, y, self.place, around, masked=True)
            spot = b.add(place, b.index(k * self.pitch))
            b.multi("store", self.buffers[plan.turn], spot, state)
            b.multi("store", self.buffers[1 - plan.turn], spot, b.select(part, state, rest))

    def _step(self, b: Builder, row: Value, place: Value, number: int, stencil: Stencil, whole: bool) -> None:
        plan = self.plan
        loaded: dict[tuple[int, int], Value] = {}
        named = plan.named[number]
        results: list[Value] = []
        short = b.cast(place, u32)
        for k in range(_AT_ONCE):
            values: dict[Value, Value] = {p: self.params[named[p]] for p in stencil.kernel.params if isinstance(p.type, Scalar)}
            for value, (down, right) in stencil.reads.items():
                at = (down + k, right)
                if at not in loaded:
                    loaded[at] = b.op("load", self.buffers[number], b.add(place, b.index(at[0] * self.pitch + at[1])))
                values[value] = loaded[at]
            for op in stencil.ops:
                (values[op.results[0]],) = b.emit(op.opcode, [values[v] for v in op.operands], op.attrs)
            results.append(values[stencil.result])
        for k, result in enumerate(results):
            if whole:
                b.multi("store", self.buffers[1 - number], b.add(place, b.index(k * self.pitch)), result)
                continue
            # A place nobody reads costs less than a branch.
            spot = b.select(self._holds(b, row, k, self.part), b.add(short, b.const(k * self.pitch, u32)), self.unread)
            b.multi("store", self.buffers[1 - number], b.cast(spot, i64), result)

    @staticmethod
    def _put(b: Builder, array: Value, places: Sequence[Value], value: Value) -> Sequence[Value]:
        b.multi("store", array, *places, value)
        return []

    def _store(self, b: Builder, row: Value, place: Value) -> None:
        plan = self.plan
        target = self.params[plan.arrays[1 - plan.turn]]
        for k in range(_AT_ONCE):
            y = b.add(self.origin[0], b.add(row, b.index(k)))
            value = b.op("load", self.buffers[0], b.add(place, b.index(k * self.pitch)))
            mine = self._holds(b, row, k, self.core)
            b.if_(mine, lambda inner, y=y, value=value: self._put(inner, target, [y, self.place], value), lambda inner: [])
