"""Accesses that are watched get tests: where an index lies outside, the first is reported and the kernel ends. Tile stage, program to program.

In: a program whose loads and stores may have an attribute `watch`. Out: the program with a scratch array `$failure` that such kernels take last, and its
sites. On a CPU a tile is one thread's: a test stands before the access and ends the thread, so that the access stays as it was. Indices that walk with a
loop are tested once, before it: the first and the last. Others are tested a tile at a time.

    %v = load %x, %i {watch = [0]} : tile<f32, [64]>
    =>
    %largest = item (reduce_tile (bitcast %i {dtype = u32}) {kind = "max"})
    if lt %largest, %n {} { report $failure, %smallest, %n {site = 1} }
    %v = load %x, %i : tile<f32, [64]>

On a GPU a tile is many threads'. What lies outside is masked out and reported, and the kernel goes on (`mask_accesses`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from types import MappingProxyType

from tilewright.base.artifact import FAILURE, FAILURE_FIELDS, IndexSite
from tilewright.base.dtypes import i64, u8, u16, u32, u64
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, is_watched, walk, watched_axes
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import eliminate_dead, rewrite
from tilewright.ir.types import Tensor, Tile, dtype_of, tensor
from tilewright.passes.common.nest_shapes import Shape, join, shape_of, widen
from tilewright.passes.to_tile.index_sites import Sites, inside_of, parts, unwatched
from tilewright.passes.to_tile.mask_accesses import MaskedAccesses

_NARROW = 16
"""Bytes of registers that hold too few numbers of 64 bits to compare them together."""
_LIGHT = frozenset({
    "size", "program_id", "const", "iota", "broadcast", "add", "sub", "mul", "fma", "neg", "min", "max", "cast", "bitcast",
    "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "select", "load", "store", "if", "yield",
})  # fmt: skip
"""What kernels do that need few registers."""
_FEW = 8
"""Comparisons that compilers chain without branches between them."""


def check_indices(program: Program, target: Target) -> Program:
    """The program with tests; the very same one where nothing is watched."""
    if not any(is_watched(call.kernel) for call in program.calls):
        return program
    sites: list[IndexSite] = []
    calls = tuple(_checked(call, program, target, sites) for call in program.calls)
    cell = ProgramArray(FAILURE, tensor(i64, FAILURE_FIELDS, align=16), "scratch")
    return replace(program, calls=calls, scratch=(*program.scratch, cell), sites=tuple(sites))


def _checked(call: KernelCall, program: Program, target: Target, sites: list[IndexSite]) -> KernelCall:
    if not is_watched(call.kernel):
        return call
    failure, own = Value(tensor(i64, FAILURE_FIELDS, align=16), FAILURE), Sites(call, program.name, sites)
    attrs = call.kernel.attrs
    if target.simt:
        masked = MaskedAccesses(call.kernel, own, failure)
        body = rewrite(call.kernel, masked.one).body
        if masked.seldom and not attrs.keys() & {"min_blocks", "max_registers"} and _is_light(call.kernel):
            # Elements are asked one by one in blocks at an edge only: that must not take registers from blocks that are inside.
            attrs = MappingProxyType({**attrs, "light": True})
    else:
        body = _Tests(call, failure, own, target.vector_bytes <= _NARROW).block(call.kernel.body)
    kernel = eliminate_dead(replace(call.kernel, params=(*call.kernel.params, failure), body=body, attrs=attrs))
    return replace(call, kernel=kernel, args=(*call.args, FAILURE))


def _is_light(kernel: Kernel) -> bool:
    """Whether a kernel moves numbers and computes next to nothing: it needs few registers, and many threads."""
    return all(op.opcode in _LIGHT and not any(region.args for region in op.regions) for op in walk(kernel.body))


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

    def __init__(self, call: KernelCall, failure: Value, sites: Sites, narrow: bool) -> None:
        self.failure, self.sites = failure, sites
        self.narrow = narrow
        """Registers hold two numbers of 64 bits, or one: such numbers are compared one by one."""
        self.made = {result: op for op in walk(call.kernel.body) for result in op.results}
        self.written = {op.operands[0] for op in walk(call.kernel.body) if op.opcode in ("store", "accumulate")}

    def block(self, block: Block, loop: Op | None = None, before: dict[_Range, None] | None = None) -> Block:
        """The block with tests. Those that can stand before `loop`, whose body it is, go to `before`."""
        b = Builder()
        # Tests of the same indices, one for each array that they are used for, are made together.
        for ends, ops in groupby(block.ops, lambda op: op.operands[1:] if op.opcode == "within" else ()):
            for op in [] if ends else ops:
                with b.at(op.span):
                    self._op(b, op, loop, before)
            if ends:
                self._within(b, tuple(ops))
        return Block(block.args, tuple(b.ops))

    def _within(self, b: Builder, tests: tuple[Op, ...]) -> None:
        """Two ends lie inside all arrays, so inside the shortest. Which one they leave is asked only where they do not."""
        _, first, last = tests[0].operands
        extents: dict[Size, None] = {}
        for op in tests:
            memory, axis = op.operands[0].type, op.attrs["axis"]
            assert isinstance(memory, Tensor) and isinstance(axis, int)
            extents[memory.shape[axis]] = None
        least = functools.reduce(lambda one, other: b.op("min", one, other), map(b.index, extents))
        inside = inside_of(b, last, least)
        if last is not first:
            # The first is not after the last: as numbers without a sign it is then not negative either.
            inside = b.logical_and(b.op("le", b.cast(first, u64), b.cast(last, u64)), inside)

        def each(inner: Builder) -> Sequence[Value]:
            for op in tests:
                memory, axis = op.operands[0].type, op.attrs["axis"]
                assert isinstance(memory, Tensor) and isinstance(axis, int)
                with inner.at(op.span):
                    site = self.sites.number(replace(op, opcode=str(op.attrs["access"])), axis)
                    self._ends(inner, first, None if last is first else last, inner.index(memory.shape[axis]), site)
            return []

        b.if_(inside, lambda inner: [], each)

    def _op(self, b: Builder, op: Op, loop: Op | None, before: dict[_Range, None] | None) -> None:
        if op.opcode == "for":
            found: dict[_Range, None] = {}
            body = self.block(op.regions[0], op, found)
            self._ranges(b, op, tuple(found))
            op = replace(op, regions=(body,))
        elif op.regions:
            op = replace(op, regions=tuple(self.block(region) for region in op.regions))
        elif watched_axes(op):
            for axis in watched_axes(op):
                self._axis(b, op, axis, loop, before)
            operands = list(op.operands)
            for axis in watched_axes(op):
                operands[1 + axis] = self._loaded_here(b, operands[1 + axis])
            op = replace(op, operands=tuple(operands), attrs=unwatched(op))
        b.append(op)

    def _axis(self, b: Builder, op: Op, axis: int, loop: Op | None, before: dict[_Range, None] | None) -> None:
        """The test of one axis of an access."""
        memory, indices, _, mask = parts(op)
        assert isinstance(memory.type, Tensor)
        index, size, site = indices[axis], memory.type.shape[axis], self.sites.number(op, axis)
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
        begun = inside_of(b, first, extent)
        inside = begun if last is None else b.logical_and(begun, inside_of(b, last, extent))
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
            return inside_of(b, b.cast(index, i64), extent)
        if mask is not None:
            return self._reduced(b, "and", self._unless(b, inside_of(b, b.cast(index, i64), extent), mask, shape))
        if self._one_by_one(index):
            return b.op("inside", b.cast(index, i64), extent)
        narrow = self._again(b, index)
        if narrow is not None and dtype_of(narrow.type).bits <= 32:
            dtype = {8: u8, 16: u16, 32: u32}[dtype_of(narrow.type).bits]
            largest = self._reduced(b, "max", b.bitcast(narrow, dtype))
            most = b.op("min", extent, b.index(1 << (dtype.bits - 1)))
            return b.op("lt", b.cast(largest, i64), most)
        # Numbers all of whose bits say whether an index lies outside: that is how vectors of 64 bits are compared.
        wide = b.cast(narrow if narrow is not None else index, i64)
        bits = b.select(inside_of(b, wide, extent), b.splat(0, wide), b.splat(-1, wide))
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

    def _one_by_one(self, index: Value) -> bool:
        """Whether indices are compared one by one, as they are used, and are in registers for that."""
        source = self._source(index)
        few = isinstance(index.type, Tile) and prod(index.type.shape) <= _FEW
        return self.narrow and few and (source is None or dtype_of(source[0].result.type).bits > 32)

    def _again(self, b: Builder, index: Value) -> Value | None:
        """Such indices, loaded once more to be compared: that is best done together, and what is used one by one is best loaded so."""
        source = self._source(index)
        return b.emit("load", source[0].operands, {**unwatched(source[0]), "apart": True})[0] if source is not None else None

    def _loaded_here(self, b: Builder, index: Value) -> Value:
        """Such indices, loaded behind the test: no branch is then between them and what they are used for."""
        source = self._source(index)
        if source is None or self._one_by_one(index):
            return index
        load, casts = source
        (value,) = b.emit("load", load.operands, unwatched(load))
        for cast in reversed(casts):
            (value,) = b.emit("cast", [value], cast.attrs)
        return value

    def _unless(self, b: Builder, inside: Value, mask: Value, shape: Shape) -> Value:
        """Where an access is masked out its index does not count."""
        wide = join(shape, shape_of(mask))
        return b.op("or", widen(b, inside, wide), b.op("not", widen(b, mask, wide)))

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
        inside = inside_of(b, index, extent)
        if mask is not None:
            inside = self._unless(b, inside, mask, shape)
        wide = widen(b, index, shape_of(inside))
        return self._reduced(b, "min", b.select(inside, b.splat(i64.max_value, wide), wide))


def _defined(loop: Op) -> frozenset[Value]:
    """The values of a loop's body."""
    region = loop.regions[0]
    inner = (v for op in walk(region) for values in (op.results, *(r.args for r in op.regions)) for v in values)
    return frozenset((*region.args, *inner))
