"""Bounds checks in the code itself: every access by an index that nothing proves first compares it with the extent. Thread stage to thread stage.
Assertions become checks of the same kind, unless the kernel's attribute `asserts` says that they stay.

In: a kernel. Out: the kernel with one parameter more, `$failure`, an i64 array that is zero at the start, and the sites it can
name. An access that would leave its array is left out (a load gives 0; a bulk load, whose bytes an mbarrier waits for, brings
as many from the start of its array); the first to do so leaves its site, its place and its thread in `$failure`, and `failure_of` makes the same error of it as the emulator's. A thread that failed leaves loops without an
end, unless others wait for it there at a barrier.

    %v = load %x, %i : f32
    =>
    %inside = and (ge %i, 0), (lt %i, n) : bool
    %v = if %inside { yield load %x, %i } { atomic $failure, 0, 0, site {kind = "cas"} … yield 0 }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tilewright.analysis.index_proofs import access_width, unproven_accesses
from tilewright.base.dtypes import bool_, i64
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size
from tilewright.base.source import Span
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.opdef import integer
from tilewright.ir.ops import OPS
from tilewright.ir.places import block_text, thread_text
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Tensor, dtype_of, tensor

NAME = "$failure"
FIELDS = 16
_SITE, _AXIS, _EXTENT, _BLOCK, _THREAD, _INDEX = range(6)
"""What lies where: the site's number from 1 on, then its values; indices follow one another."""
_ACCESSES = frozenset({"load", "store", "atomic", "atomic_load", "atomic_store"})
_COPIES = frozenset({"copy_async", "bulk_load", "bulk_store"})
_REMOTE = frozenset({"load_remote", "store_remote", "atomic_remote"})
_UNIT = 16
"""Bytes of the smallest copy of the engine."""
_FAILED = "failed"
_INSIDE = "inside"
"""A mark of this pass alone."""


@dataclass(frozen=True)
class Site:
    """One access of the kernel: of which array, of how many elements."""

    opcode: str
    array: str
    rank: int
    width: int
    """0 where the kernel computes it; it follows the indices in what is left behind."""
    span: Span
    text: str = ""
    """Of an `assert`: what does not hold."""


def check_bounds(program: Program) -> tuple[Program, tuple[Site, ...]]:
    """A program of one thread-stage kernel with checks; `$failure` is its last input."""
    (call,) = program.calls
    kernel, sites = check_kernel(call.kernel)
    failure = kernel.params[-1]
    assert isinstance(failure.type, Tensor)
    inputs = (*program.inputs, ProgramArray(NAME, failure.type, "input"))
    return replace(program, inputs=inputs, calls=(KernelCall(kernel, (*call.args, NAME)),)), sites


def check_kernel(kernel: Kernel) -> tuple[Kernel, tuple[Site, ...]]:
    """The kernel with its last parameter, and its sites in the order of their numbers."""
    failure = Value(tensor(i64, FIELDS, align=16), NAME)
    checks = _Checks(kernel, failure)
    unproven = {id(op) for op, _ in unproven_accesses(kernel, opcodes=_ACCESSES)}
    checked = rewrite(replace(kernel, body=_with_marks(kernel.body, unproven)), checks.one)
    body = Block((), (*checks.prologue.ops, *checked.body.ops))
    return replace(checked, params=(*kernel.params, failure), body=body), tuple(checks.sites)


def failure_of(values: Sequence[int], sites: Sequence[Site], kernel: Kernel, grid: Sequence[int]) -> UserError | None:
    """The error a launch left behind; None where there is none."""
    if not values[_SITE]:
        return None
    site = sites[int(values[_SITE]) - 1]
    index = [int(v) for v in values[_INDEX : _INDEX + site.rank]]
    axis, extent, width = int(values[_AXIS]), int(values[_EXTENT]), site.width or int(values[_INDEX + site.rank])
    where = f"in {block_text(grid, int(values[_BLOCK]))}, {thread_text(kernel, int(values[_THREAD]))}"
    label = f"'{site.array}'" if site.array else "an array of the kernel"
    if site.opcode == "assert":
        text = f"assertion failed: {site.text}"
    elif axis < 0:
        text = f"{site.opcode} of {width} elements of {label} from {index} on is out of bounds: it has {extent} elements"
    else:
        which = f" (axis {axis})" if site.rank > 1 else ""
        text = f"{site.opcode} of {label} at {index} is out of bounds: index {index[axis]}{which}, extent {extent}"
    error = UserError.at("TW050", f"{text}, {where}", site.span)
    assert isinstance(error, UserError)
    return error


def _with_marks(block: Block, unproven: set[int]) -> Block:
    """The block with a mark on accesses that surely stay inside: they need no test."""
    ops: list[Op] = []
    for op in block.ops:
        if op.opcode in _ACCESSES and id(op) not in unproven:
            op = replace(op, attrs=MappingProxyType({**op.attrs, _INSIDE: True}))
        ops.append(replace(op, regions=tuple(_with_marks(r, unproven) for r in op.regions)) if op.regions else op)
    return Block(block.args, tuple(ops))


class _Checks:
    """The checks of one kernel."""

    def __init__(self, kernel: Kernel, failure: Value) -> None:
        self.kernel = kernel
        self.failure = failure
        self.sites: list[Site] = []
        self.prologue = Builder(kernel.span)
        self.failed: Value | None = None
        """Whether this thread has failed: one element of its own. Only where there are loops to leave."""
        if any(self._is_left(op) for op in walk(kernel.body)):
            self.failed = self.prologue.op("alloc", name=_FAILED, space="local", dtype=bool_, shape=(1,))
            self.prologue.multi("store", self.failed, self.prologue.index(0), self.prologue.const(False, bool_))

    @staticmethod
    def _is_left(op: Op) -> bool:
        """A `while` in which nobody waits for others."""
        return op.opcode == "while" and not any(
            OPS[inner.opcode].effect == "sync" for region in op.regions for inner in walk(region)
        )

    def one(self, b: Builder, op: Op) -> Sequence[Value] | None:
        if self._is_left(op):
            return self._leaving(b, op)
        if op.opcode == "assert":
            return None if self.kernel.attrs.get("asserts") else self._assertion(b, op)
        if op.opcode in _COPIES:
            return self._copy(b, op)
        if op.opcode in _REMOTE:
            return self._access(b, op, _tensor(op.operands[0]))
        if op.opcode not in _ACCESSES or not isinstance(op.operands[0].type, Tensor):
            return None
        if op.attrs.get(_INSIDE):
            attrs = MappingProxyType({k: v for k, v in op.attrs.items() if k != _INSIDE})
            results = tuple(Value(r.type, r.name) for r in op.results)
            return b.append(replace(op, attrs=attrs, results=results))
        return self._access(b, op, op.operands[0].type)

    def _leaving(self, b: Builder, op: Op) -> Sequence[Value]:
        """The loop, which also ends for a thread that has failed."""
        assert self.failed is not None
        test, body = op.regions
        inner = Builder(op.span)
        inner.ops = list(test.ops[:-1])
        condition, *values = test.yields
        lives = inner.op("not", inner.op("load", self.failed, inner.index(0)))
        inner.multi("yield", inner.op("and", condition, lives), *values)
        results = tuple(Value(v.type, v.name) for v in op.results)
        return b.append(replace(op, results=results, regions=(Block(test.args, tuple(inner.ops)), body)))

    def _assertion(self, b: Builder, op: Op) -> Sequence[Value]:
        """Without checks an assertion that fails ends the GPU's context; here it is left behind like any other failure."""
        self.sites.append(Site(op.opcode, "", 0, 1, op.span, str(op.attrs.get("text", ""))))
        number = len(self.sites)

        def failing(inner: Builder) -> Sequence[Value]:
            self._record(inner, number, inner.index(-1), inner.index(0), ())
            return ()

        return b.if_(op.operands[0], lambda inner: (), failing)

    # -- one access -------------------------------------------------------------------------------------------------

    def _access(self, b: Builder, op: Op, memory: Tensor) -> Sequence[Value]:
        indices = [b.cast(v, i64) for v in op.operands[1 : 1 + memory.rank]]
        width = access_width(op)
        self.sites.append(Site(op.opcode, op.operands[0].name, memory.rank, width, op.span))
        number = len(self.sites)
        zero = b.index(0)
        extents = [b.index(s) for s in memory.shape]
        outside = [
            b.op("or", b.op("lt", index, zero), b.op("ge", index, extent)) for index, extent in zip(indices, extents, strict=True)
        ]
        axis, limit = b.index(-1), b.index(0)
        bad = b.const(False, bool_)
        if width > 1:
            last = b.index(width - 1)
            for index, stride in zip(indices, memory.strides, strict=True):
                last = b.add(last, b.mul(index, b.index(stride)))
            limit = b.index(_reach(memory))
            bad = b.op("ge", last, limit)
        for at in reversed(range(memory.rank)):
            axis, limit = b.select(outside[at], b.index(at), axis), b.select(outside[at], extents[at], limit)
            bad = b.op("or", outside[at], bad)
        if op.attrs.get("masked"):
            bad = b.op("and", bad, op.operands[-1])

        def failing(inner: Builder) -> Sequence[Value]:
            self._record(inner, number, axis, limit, indices)
            return [inner.like(inner.const(0, dtype_of(r.type)), r) for r in op.results]

        def allowed(inner: Builder) -> Sequence[Value]:
            return inner.append(replace(op, results=tuple(Value(r.type, r.name) for r in op.results)))

        return b.if_(bad, failing, allowed)

    # -- copies -----------------------------------------------------------------------------------------------------

    def _copy(self, b: Builder, op: Op) -> Sequence[Value]:
        """A copy between shared memory, at an offset, and global memory, at indices: both sides are tested."""
        near, far = _tensor(op.operands[0]), _tensor(op.operands[2])
        count = b.index(integer(op.attrs, "bytes") // far.dtype.itemsize) if op.opcode == "copy_async" else b.cast(op.operands[3 + far.rank], i64)
        fixed = integer(op.attrs, "bytes") // far.dtype.itemsize if op.opcode == "copy_async" else 0
        offset = b.cast(op.operands[1], i64)
        indices = [b.cast(v, i64) for v in op.operands[3 : 3 + far.rank]]
        zero = b.index(0)
        first = zero
        for index, stride in zip(indices, far.strides, strict=True):
            first = b.add(first, b.mul(index, b.index(stride)))
        sizes = b.index(_reach(near)), b.index(_reach(far))
        bad_near = self._beyond(b, offset, count, sizes[0])
        bad_far = b.op("or", b.op("lt", count, zero), b.op("gt", b.add(first, count), sizes[1]))
        for index, extent in zip(indices, far.shape, strict=True):
            outside = b.op("or", b.op("lt", index, zero), b.op("ge", index, b.index(extent)))
            bad_far = b.op("or", bad_far, b.op("and", outside, b.op("ne", count, zero)))
        if op.attrs.get("masked"):
            bad_far = b.op("and", bad_far, op.operands[-1])
        self.sites += [
            Site(op.opcode, op.operands[0].name, 1, fixed, op.span),
            Site(op.opcode, op.operands[2].name, far.rank, fixed, op.span),
        ]
        number = len(self.sites)

        def failing(inner: Builder) -> Sequence[Value]:
            def at_near(one: Builder) -> Sequence[Value]:
                self._record(one, number - 1, one.index(-1), sizes[0], (offset, count))
                return ()

            def at_far(one: Builder) -> Sequence[Value]:
                self._record(one, number, one.index(-1), sizes[1], (*indices, count))
                return ()

            inner.if_(bad_near, at_near, at_far)
            if op.opcode == "bulk_load":
                self._as_many_bytes(inner, op, count, sizes)
            return ()

        return b.if_(b.op("or", bad_near, bad_far), failing, lambda inner: inner.append(replace(op)))

    @staticmethod
    def _beyond(b: Builder, first: Value, count: Value, size: Value) -> Value:
        outside = b.op("or", b.op("lt", first, b.index(0)), b.op("lt", count, b.index(0)))
        return b.op("or", outside, b.op("gt", b.add(first, count), size))

    @staticmethod
    def _as_many_bytes(b: Builder, op: Op, count: Value, sizes: tuple[Value, Value]) -> None:
        """Who waits for the copy gets its bytes: the first of the array, again and again where it has not as many."""
        memory = _tensor(op.operands[2])

        def load(inner: Builder, length: Value) -> Sequence[Value]:
            start = [inner.index(0)] * memory.rank
            inner.emit("bulk_load", (op.operands[0], inner.index(0), op.operands[2], *start, length, *op.operands[-2:]), op.attrs)
            return ()

        def pieces(inner: Builder) -> Sequence[Value]:
            few = inner.index(_UNIT // memory.dtype.itemsize)
            inner.for_(inner.index(0), count, few, (), lambda one, *_: load(one, few))
            return ()

        fits = b.op("and", b.op("le", count, sizes[0]), b.op("le", count, sizes[1]))
        b.if_(fits, lambda inner: load(inner, count), pieces)

    def _record(self, b: Builder, site: int, axis: Value, limit: Value, indices: Sequence[Value]) -> None:
        old = b.op("atomic", self.failure, b.index(_SITE), b.index(0), b.index(site), kind="cas", scope="device", order="relaxed")

        def first(inner: Builder) -> Sequence[Value]:
            values = {_AXIS: axis, _EXTENT: limit, _BLOCK: self._block(inner), _THREAD: inner.op("thread_id")}
            values |= {_INDEX + k: index for k, index in enumerate(indices)}
            for field, value in values.items():
                inner.multi("store", self.failure, inner.index(field), value)
            return ()

        b.if_(b.op("eq", old, b.index(0)), first, lambda inner: ())
        if self.failed is not None:
            b.multi("store", self.failed, b.index(0), b.const(True, bool_))

    def _block(self, b: Builder) -> Value:
        """The block's number in the grid, x fastest."""
        rank = max(1, len(self.kernel.grid))
        number = b.op("program_id", axis=rank - 1)
        for axis in reversed(range(rank - 1)):
            number = b.add(b.mul(number, b.op("grid_size", axis=axis)), b.op("program_id", axis=axis))
        return number


def _tensor(value: Value) -> Tensor:
    assert isinstance(value.type, Tensor)
    return value.type


def _reach(memory: Tensor) -> Size:
    """Elements from the first to behind the last in memory; strides of what vectors are taken from are positive."""
    reach = Size.of(1)
    for extent, stride in zip(memory.shape, memory.strides, strict=True):
        reach = reach + (extent - 1) * stride
    return reach
