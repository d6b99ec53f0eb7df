"""Accesses that are watched get tests: where an index lies outside, the first is reported and the kernel ends. Tile stage, program to program.

In: a program whose loads and stores may have an attribute `watch`. Out: the program with a scratch array `$failure` that such kernels take last, and its
sites. On a CPU a tile is one thread's: a test stands before the access and ends the thread, so that the access stays as it was. Indices that walk with a
loop are tested once, before it: the first and the last. Others are tested a tile at a time.

    %v = load %x, %i {watch = [0]} : tile<f32, [64]>
    =>
    %largest = item (reduce_tile (bitcast %i {dtype = u32}) {kind = "max"})
    if lt %largest, %n {} { report $failure, %smallest, %n {site = 1} }
    %v = load %x, %i : tile<f32, [64]>

On a GPU a tile is many threads': each asserts that its own indices lie inside, and one that fails ends the kernel before it reads or writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.artifact import FAILURE, FAILURE_FIELDS, IndexSite
from tilewright.base.dtypes import i64, u8, u16, u32, u64
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attrs, Block, Op, Value, is_watched, walk, watched_axes
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import eliminate_dead, rewrite
from tilewright.ir.types import Tensor, Tile, dtype_of, tensor
from tilewright.passes.common.nest_shapes import Shape, join, shape_of


def check_indices(program: Program, target: Target) -> Program:
    """The program with tests; the very same one where nothing is watched."""
    if not any(is_watched(call.kernel) for call in program.calls):
        return program
    sites: list[IndexSite] = []
    calls = tuple(_checked(call, program, target, sites) for call in program.calls)
    if not sites:
        return replace(program, calls=calls)
    cell = ProgramArray(FAILURE, tensor(i64, FAILURE_FIELDS, align=16), "scratch")
    return replace(program, calls=calls, scratch=(*program.scratch, cell), sites=tuple(sites))


def _checked(call: KernelCall, program: Program, target: Target, sites: list[IndexSite]) -> KernelCall:
    if not is_watched(call.kernel):
        return call
    if target.simt:
        return replace(call, kernel=rewrite(call.kernel, _required))
    failure = Value(tensor(i64, FAILURE_FIELDS, align=16), FAILURE)
    body = _Tests(call, program.name, failure, sites).block(call.kernel.body)
    kernel = eliminate_dead(replace(call.kernel, params=(*call.kernel.params, failure), body=body))
    return replace(call, kernel=kernel, args=(*call.args, FAILURE))


def _parts(op: Op) -> tuple[Value, list[Value], list[Value], Value | None]:
    """Memory, indices, what is stored, and the mask of an access."""
    memory = op.operands[0]
    assert isinstance(memory.type, Tensor)
    rank = memory.type.rank
    rest = list(op.operands[1 + rank :])
    mask = rest.pop() if op.attrs.get("masked") else None
    return memory, list(op.operands[1 : 1 + rank]), rest, mask


def _inside(b: Builder, index: Value, extent: Value) -> Value:
    """Whether an index is neither negative nor too large: one comparison of numbers without a sign."""
    return b.op("lt", b.cast(index, u64), b.like(b.cast(extent, u64), index))


def _widen(b: Builder, value: Value, shape: Shape) -> Value:
    return value if shape_of(value) == shape or not shape else b.op("broadcast", value, shape=shape)


def _unwatched(op: Op) -> Attrs:
    return MappingProxyType({k: v for k, v in op.attrs.items() if k != "watch"})


def _required(b: Builder, op: Op) -> Sequence[Value] | None:
    """A watched access on a GPU, behind tests of every element."""
    axes = watched_axes(op)
    if not axes:
        return None
    memory, indices, _, mask = _parts(op)
    assert isinstance(memory.type, Tensor)
    verb = "read" if op.opcode == "load" else "written"
    for axis in axes:
        inside = _inside(b, b.cast(indices[axis], i64), b.index(memory.type.shape[axis]))
        if mask is not None:
            wide = join(shape_of(inside), shape_of(mask))
            inside = b.op("or", _widen(b, inside, wide), b.op("not", _widen(b, mask, wide)))
        which = f" of axis {axis}" if memory.type.rank > 1 else ""
        b.multi("require", inside, text=f"'{memory.name}' is {verb} at an index{which} inside its extent")
    return b.append(replace(op, attrs=_unwatched(op), results=tuple(Value(r.type, r.name) for r in op.results)))


@record
class _Walk:
    """An index that grows by ones along a tile and with a loop: a sum of numbers, some of them taken off."""

    added: tuple[Value, ...] = ()
    taken: tuple[Value, ...] = ()
    turns: int = 0
    """How often the index of the loop is among the numbers."""
    span: int = 0
    """How far the last element of a tile is from the first."""


@record
class _Range:
    """A test before a loop: all that the loop reaches along one axis."""

    walk: _Walk
    extent: Size
    site: int


class _Tests:
    """The tests of one kernel on a CPU. They stand before the accesses; where one fails, the kernel's thread ends."""

    def __init__(self, call: KernelCall, program: str, failure: Value, sites: list[IndexSite]) -> None:
        self.program, self.failure, self.sites = program, failure, sites
        self.names = dict(zip(call.kernel.params, call.args, strict=True))
        self.made = {result: op for op in walk(call.kernel.body) for result in op.results}
        self.written = {op.operands[0] for op in walk(call.kernel.body) if op.opcode == "store"}

    def block(self, block: Block, loop: Op | None = None, before: dict[_Range, None] | None = None) -> Block:
        """The block with tests. Those that can stand before `loop`, whose body it is, go to `before`."""
        b = Builder()
        for op in block.ops:
            with b.at(op.span):
                self._op(b, op, loop, before)
        return Block(block.args, tuple(b.ops))

    def _op(self, b: Builder, op: Op, loop: Op | None, before: dict[_Range, None] | None) -> None:
        if op.opcode == "for":
            found: dict[_Range, None] = {}
            body = self.block(op.regions[0], op, found)
            self._ranges(b, op, tuple(found))
            op = replace(op, regions=(body,))
        elif op.opcode == "within":
            memory, first, last = op.operands
            axis, access = op.attrs["axis"], op.attrs["access"]
            assert isinstance(memory.type, Tensor) and isinstance(axis, int)
            site = self._site(replace(op, opcode=str(access)), axis)
            self._ends(b, first, None if last is first else last, b.index(memory.type.shape[axis]), site)
            return
        elif op.regions:
            op = replace(op, regions=tuple(self.block(region) for region in op.regions))
        elif watched_axes(op):
            for axis in watched_axes(op):
                self._axis(b, op, axis, loop, before)
            operands = list(op.operands)
            for axis in watched_axes(op):
                operands[1 + axis] = self._loaded_here(b, operands[1 + axis])
            op = replace(op, operands=tuple(operands), attrs=_unwatched(op))
        b.append(op)

    def _axis(self, b: Builder, op: Op, axis: int, loop: Op | None, before: dict[_Range, None] | None) -> None:
        """The test of one axis of an access."""
        memory, indices, _, mask = _parts(op)
        assert isinstance(memory.type, Tensor)
        index, size, site = indices[axis], memory.type.shape[axis], self._site(op, axis)
        if mask is None:
            own = _defined(loop) if loop is not None else frozenset[Value]()
            walked = self._walked(index, loop, own)
            if walked is not None and before is not None:
                before[_Range(walked, size, site)] = None
                return
            walked = self._walked(index, None, frozenset())
            if walked is not None:
                self._walk_test(b, walked, b.index(size), site)
                return
        shape = join(*(shape_of(v) for v in indices))
        extent = b.index(size)
        inside = self._all(b, index, extent, mask, shape)
        self._unless_inside(b, inside, lambda inner: self._outside(inner, index, extent, mask, shape), extent, site)

    def _unless_inside(self, b: Builder, inside: Value, index: Callable[[Builder], Value], extent: Value, site: int) -> None:
        b.if_(inside, lambda inner: [], lambda inner: inner.multi("report", self.failure, index(inner), extent, site=site))

    def _site(self, op: Op, axis: int) -> int:
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        place, excerpt = (op.span.places(), op.span.excerpt()) if op.span.line else ("", "")
        name = self.names.get(memory, memory.name)
        site = IndexSite(self.program, op.opcode, name, axis, memory.type.rank, place, excerpt)
        if site not in self.sites:
            self.sites.append(site)
        return self.sites.index(site) + 1

    # -- indices that walk ------------------------------------------------------------------------------------------

    def _walked(self, index: Value, loop: Op | None, own: frozenset[Value]) -> _Walk | None:
        """The index as a sum of numbers that no turn of the loop changes, of the loop's own index, and of steps along a tile."""
        if loop is not None and index is loop.regions[0].args[0]:
            return _Walk(turns=1)
        op = self.made.get(index)
        if op is not None and op.opcode == "broadcast":
            return self._walked(op.operands[0], loop, own)
        if op is not None and op.opcode == "iota":
            assert isinstance(index.type, Tile)
            return _Walk(span=max(index.type.shape) - 1)
        inside = index in own
        if op is not None and op.opcode == "add" and (inside or isinstance(index.type, Tile)):
            a, c = (self._walked(v, loop, own) for v in op.operands)
            if a is None or c is None:
                return None
            return _Walk((*a.added, *c.added), (*a.taken, *c.taken), a.turns + c.turns, a.span + c.span)
        if op is not None and op.opcode == "sub" and (inside or isinstance(index.type, Tile)):
            a, c = (self._walked(v, loop, own) for v in op.operands)
            if a is None or c is None or c.turns or c.span:
                return None
            return _Walk((*a.added, *c.taken), (*a.taken, *c.added), a.turns, a.span)
        return None if inside or isinstance(index.type, Tile) else _Walk((index,))

    def _first(self, b: Builder, walked: _Walk) -> Value:
        total = b.index(0)
        for value in walked.added:
            total = b.add(total, b.cast(value, i64))
        for value in walked.taken:
            total = b.sub(total, b.cast(value, i64))
        return total

    def _walk_test(self, b: Builder, walked: _Walk, extent: Value, site: int) -> None:
        first = self._first(b, walked)
        self._ends(b, first, b.add(first, b.index(walked.span)) if walked.span else None, extent, site)

    def _ends(self, b: Builder, first: Value, last: Value | None, extent: Value, site: int) -> None:
        """Two ends lie inside, and so does all between them."""
        begun = _inside(b, first, extent)
        inside = begun if last is None else b.logical_and(begun, _inside(b, last, extent))
        wrong = first if last is None else last

        def index(inner: Builder) -> Value:
            return first if last is None else inner.select(begun, wrong, first)

        self._unless_inside(b, inside, index, extent, site)

    def _ranges(self, b: Builder, loop: Op, ranges: Sequence[_Range]) -> None:
        """The tests before a loop, for the case that it turns at all."""
        if not ranges:
            return
        low, high, step = loop.operands[:3]

        def tests(inner: Builder) -> Sequence[Value]:
            turns = inner.op("floordiv", inner.sub(inner.sub(high, inner.index(1)), low), step)
            reach = inner.mul(turns, step)
            for one in ranges:
                first = self._first(inner, one.walk)
                far = inner.index(one.walk.span)
                for _ in range(one.walk.turns):
                    first, far = inner.add(first, low), inner.add(far, reach)
                moves = one.walk.turns or one.walk.span
                self._ends(inner, first, inner.add(first, far) if moves else None, inner.index(one.extent), one.site)
            return []

        b.if_(b.op("lt", low, high), tests, lambda inner: [])

    # -- any other indices ------------------------------------------------------------------------------------------

    def _all(self, b: Builder, index: Value, extent: Value, mask: Value | None, shape: Shape) -> Value:
        """Whether all that is accessed lies inside along one axis."""
        if not isinstance(index.type, Tile) and mask is None:
            return _inside(b, b.cast(index, i64), extent)
        if mask is not None:
            return self._reduced(b, "and", self._unless(b, _inside(b, b.cast(index, i64), extent), mask, shape))
        narrow = self._again(b, index)
        if narrow is not None and dtype_of(narrow.type).bits <= 32:
            dtype = {8: u8, 16: u16, 32: u32}[dtype_of(narrow.type).bits]
            largest = self._reduced(b, "max", b.bitcast(narrow, dtype))
            most = b.op("min", extent, b.index(1 << (dtype.bits - 1)))
            return b.op("lt", b.cast(largest, i64), most)
        # Numbers all of whose bits say whether an index lies outside: that is how vectors of 64 bits are compared.
        wide = b.cast(narrow if narrow is not None else index, i64)
        bits = b.select(_inside(b, wide, extent), b.splat(0, wide), b.splat(-1, wide))
        return b.op("eq", self._reduced(b, "or", bits), b.index(0))

    def _source(self, index: Value) -> tuple[Op, list[Op]] | None:
        """The load of indices that come straight from an array of signed integers nobody writes, and their conversions, the last first."""
        casts: list[Op] = []
        op = self.made.get(index) if isinstance(index.type, Tile) else None
        while op is not None and op.opcode == "cast" and dtype_of(op.operands[0].type).kind == "i":
            casts.append(op)
            op = self.made.get(op.operands[0])
        if op is None or op.opcode != "load" or op.attrs.get("masked") or op.operands[0] in self.written:
            return None
        return op, casts

    def _again(self, b: Builder, index: Value) -> Value | None:
        """Such indices, loaded once more to be compared: that is best done together, and what is used one by one is best loaded so."""
        source = self._source(index)
        return b.emit("load", source[0].operands, {**_unwatched(source[0]), "apart": True})[0] if source is not None else None

    def _loaded_here(self, b: Builder, index: Value) -> Value:
        """Such indices, loaded behind the test: no branch is then between them and what they are used for."""
        source = self._source(index)
        if source is None:
            return index
        load, casts = source
        (value,) = b.emit("load", load.operands, _unwatched(load))
        for cast in reversed(casts):
            (value,) = b.emit("cast", [value], cast.attrs)
        return value

    def _unless(self, b: Builder, inside: Value, mask: Value, shape: Shape) -> Value:
        """Where an access is masked out its index does not count."""
        wide = join(shape, shape_of(mask))
        return b.op("or", _widen(b, inside, wide), b.op("not", _widen(b, mask, wide)))

    @staticmethod
    def _reduced(b: Builder, kind: str, value: Value) -> Value:
        if not isinstance(value.type, Tile):
            return value
        for axis, extent in enumerate(value.type.shape):
            if extent > 1:
                wide = dtype_of(value.type).is_int and kind in ("max", "or")
                value = b.emit("reduce_tile", [value], {"kind": kind, "axis": axis, **({"together": True} if wide else {})})[0]
        return b.op("item", value)

    def _outside(self, b: Builder, index: Value, extent: Value, mask: Value | None, shape: Shape) -> Value:
        """Which index lies outside: the smallest that does."""
        again = self._again(b, index) if mask is None else None
        index = b.cast(index if again is None else again, i64)
        if not isinstance(index.type, Tile) and mask is None:
            return index
        inside = _inside(b, index, extent)
        if mask is not None:
            inside = self._unless(b, inside, mask, shape)
        wide = _widen(b, index, shape_of(inside))
        return self._reduced(b, "min", b.select(inside, b.splat(i64.max_value, wide), wide))


def _defined(loop: Op) -> frozenset[Value]:
    """The values of a loop's body."""
    region = loop.regions[0]
    inner = (v for op in walk(region) for values in (op.results, *(r.args for r in op.regions)) for v in values)
    return frozenset((*region.args, *inner))
