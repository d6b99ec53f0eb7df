"""Kernels that start early fetch what they will read into the second-level cache while they wait. `Program -> Program`, at the thread stage.

In: a program of several kernels, of which some begin with `release_next` and `wait_previous`. Out: the same; between the two stand prefetches of the arrays that no
kernel of the program writes, such as weights, at the addresses that the first step of each of its loops reads behind its wait. Memory then is busy while the kernels before
it run. A prefetch changes no result, whoever writes the array: the cache is the one that all multiprocessors share. More than the first step is measured to be slower.

    release_next                       release_next
    wait_previous            ->        %i = thread_id; prefetch %weight, %i, 0
    %i = thread_id; for k …            wait_previous; %i = thread_id; for k …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilewright.base.dtypes import u16, u32
from tilewright.base.sizes import product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_ops, eliminate_dead
from tilewright.ir.types import Tensor, Vec

LEAST_BYTES = 256 << 10
"""Smaller arrays are not worth the instructions."""
PIECES = (32, 64, 128)
"""Bytes that a lane asks for of a packed row."""
MOST_WAVES = 2
"""Times that the blocks of a product of packed rows fill all multiprocessors, at most, for its rows to be fetched."""
BYTES = 16
"""What a lane reads at once where it is worth a prefetch."""


def prefetch_early(program: Program, target: Target, hints: Mapping[str, int]) -> Program:
    """The program with prefetches in front of waits."""
    if "early" not in target.features or len(program.calls) < 2 or program.loops:
        return program
    written = {
        name for call in program.calls for param, name in zip(call.kernel.params, call.args, strict=True)
        if any(OPS[op.opcode].effect not in ("pure", "read") and param in op.operands for op in walk(call.kernel.body))
    }  # fmt: skip
    return replace(program, calls=tuple(_fetching(call, written, target, hints) for call in program.calls))


def _is_short(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> bool:
    """Whether its blocks are all there at about the same time, so that all of them wait."""
    blocks, resident = product(kernel.grid), kernel.attrs.get("min_blocks", 1)
    assert isinstance(resident, int)
    return blocks.names <= hints.keys() and blocks.evaluate(hints) <= MOST_WAVES * target.multiprocessors * max(1, resident)


def _packed_rows(kernel: Kernel, read: set[Value]) -> frozenset[Value]:
    """Arrays of packed blocks that products walk: [row, block, word]."""
    if "family=gemv" not in str(kernel.attrs.get("schedule", "")):
        return frozenset()
    return frozenset(p for p in read if isinstance(p.type, Tensor) and p.type.rank == 3 and p.type.dtype in (u16, u32) and p.type.shape[-1].constant is not None)


def _fetching(call: KernelCall, written: set[str], target: Target, hints: Mapping[str, int]) -> KernelCall:
    kernel = call.kernel
    names = [op.opcode for op in kernel.body.ops[:2]]
    if names != ["release_next", "wait_previous"]:
        return call
    read = {param for param, name in zip(kernel.params, call.args, strict=True) if isinstance(param.type, Tensor) and name not in written}
    slice_ = _Slice(read, _packed_rows(kernel, read) if _is_short(kernel, target, hints) else frozenset(), hints)
    ops = kernel.body.ops[2:]
    if not slice_.has_any(ops, set(kernel.params)):
        return call
    b = Builder(kernel.span)
    slice_.build(b, ops, {}, set(kernel.params))
    body = Block(kernel.body.args, (kernel.body.ops[0], *b.ops, *kernel.body.ops[1:]))
    made: Kernel = eliminate_dead(replace(kernel, body=body))
    return replace(call, kernel=made)


class _Slice:
    """What of a kernel's body computes the addresses of its reads."""

    def __init__(self, read: set[Value], packed: frozenset[Value], hints: Mapping[str, int]) -> None:
        self.read, self.packed, self.hints = read, packed, hints
        self.fetched: set[tuple[Value, Value]] = set()
        """Rows of packed blocks that are asked for."""

    def is_wanted(self, op: Op, known: set[Value]) -> bool:
        """Whether it is a wide read of one of the arrays, or one of a packed row, at indices that are known before anything is read."""
        if op.opcode == "load" and op.operands[0] in self.packed:
            return op.operands[1] in known
        if op.opcode != "load" or op.operands[0] not in self.read or not isinstance(op.result.type, Vec):
            return False
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        size = self.bytes_of(memory)
        if size is not None and size < LEAST_BYTES:
            return False
        return op.result.type.width * memory.dtype.itemsize == BYTES and all(v in known for v in op.operands[1 : 1 + memory.rank])

    def has_any(self, ops: Sequence[Op], known: set[Value]) -> bool:
        known = set(known)
        for op in ops:
            if self.is_wanted(op, known):
                return True
            if op.opcode == "for" and all(v in known for v in op.operands[:3]) and self.has_any(op.regions[0].ops, known | {op.regions[0].args[0]}):
                return True
            if op.opcode == "if" and op.operands[0] in known and any(self.has_any(region.ops, known) for region in op.regions):
                return True
            if self.is_pure(op, known):
                known |= set(op.results)
        return False

    def is_pure(self, op: Op, known: set[Value]) -> bool:
        return not op.regions and OPS[op.opcode].effect == "pure" and all(v in known for v in op.operands)

    def build(self, b: Builder, ops: Sequence[Op], mapping: dict[Value, Value], known: set[Value]) -> None:
        for op in ops:
            if self.is_wanted(op, known):
                memory = op.operands[0].type
                assert isinstance(memory, Tensor)
                if op.operands[0] in self.packed:
                    self.fetch_row(b, op.operands[0], mapping.get(op.operands[1], op.operands[1]))
                    continue
                b.emit("prefetch", tuple(mapping.get(v, v) for v in op.operands[: 1 + memory.rank]), {})
            elif op.opcode == "for" and all(v in known for v in op.operands[:3]):
                region = op.regions[0]
                inside = known | {region.args[0]}
                if not self.has_any(region.ops, inside):
                    continue
                self.build(b, region.ops, {**mapping, region.args[0]: mapping.get(op.operands[0], op.operands[0])}, inside)
            elif op.opcode == "if" and op.operands[0] in known:
                if any(self.has_any(region.ops, known) for region in op.regions):
                    ways = [self.branch(region, mapping, known) for region in op.regions]
                    b.if_(mapping.get(op.operands[0], op.operands[0]), *ways)
            elif self.is_pure(op, known):
                clone_ops(b, [op], mapping)
                known |= set(op.results)

    def fetch_row(self, b: Builder, rows: Value, row: Value) -> None:
        """A packed row, whose blocks begin anywhere: lanes ask for it piece by piece, as far as their number reaches. Once for each row."""
        memory = rows.type
        assert isinstance(memory, Tensor)
        if (rows, row) in self.fetched:
            return
        self.fetched.add((rows, row))
        words, blocks = memory.shape[-1].constant or 1, memory.shape[1]
        size = blocks * (words * memory.dtype.itemsize)
        length = size.evaluate(self.hints) if size.names <= self.hints.keys() else 0
        piece = next((p for p in PIECES if 32 * p >= length), PIECES[-1])
        lane = b.op("and", b.op("thread_id"), b.index(31))
        element = b.mul(lane, b.index(piece // memory.dtype.itemsize))

        def fetch(inner: Builder) -> Sequence[Value]:
            inner.emit("prefetch", (rows, row, inner.op("floordiv", element, inner.index(words)), inner.op("mod", element, inner.index(words))), {})
            return ()

        b.if_(b.op("lt", element, b.mul(b.index(blocks), b.index(words))), fetch, lambda _: ())

    def branch(self, region: Block, mapping: dict[Value, Value], known: set[Value]) -> Callable[[Builder], Sequence[Value]]:
        def build(b: Builder) -> Sequence[Value]:
            self.build(b, region.ops, dict(mapping), set(known))
            return ()

        return build

    def bytes_of(self, memory: Tensor) -> int | None:
        count = product(memory.shape)
        return count.evaluate(self.hints) * memory.dtype.itemsize if count.names <= self.hints.keys() else None
