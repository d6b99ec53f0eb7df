"""All kernels of a program as one, whose blocks stay and share out the work of each in turn. `Program -> Program`.

In: a program at the thread stage. Out: the same with a single call. Each kernel becomes a loop over its blocks, from this
block's number on in steps of the number of blocks there are; a `grid_barrier` stands before a kernel that depends on one
since the last. Before and after, for kernels of 1000 and 10 blocks of which the second reads what the first writes:

    kernel @a grid=[1000] { … program_id … }        kernel @p grid=[1000] persistent {
    kernel @b grid=[10] { … program_id … }              for %i = program_id, 1000, grid_size { … }
                                                        grid_barrier
                                                        for %i = program_id, 10, grid_size { … } }

A block has the threads of the largest kernel. Those that a smaller kernel has no use for run further blocks of it where its
threads need not meet; else they wait, and its barriers are named ones. Shared memory of one kernel lies where that of
another does (`phase`). An array that kernels see with several shapes stays several parameters; `coherent` lists those that
another one writes.

Clusters, the copy engine and warp groups divide a block's work in ways that do not survive this: `lean` is a target without
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType

from tilewright.base.artifact import FAILURE
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size, ceildiv, maximum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, OrderedCalls, Program, call_tree
from tilewright.ir.rewrite import clone_block, rewrite_block
from tilewright.ir.types import Tensor
from tilewright.passes.common.size_values import size_value
from tilewright.passes.common.steps import each_step, in_turn

_WITHOUT = frozenset({"cluster", "tma", "mbarrier", "wgmma", "setmaxnreg", "early"})
"""Features that kernels of one launch do without."""
_REFUSED = frozenset({
    "tensor_map", "mbarrier_init", "cluster_rank", "cluster_sync", "load_remote", "copy_remote", "named_barrier", "set_registers",
    "wgmma", "wgmma_registers", "raise_flag", "await_flag",
})  # fmt: skip
_OWN_BARRIER = 1
"""The number of the barrier of the threads that take part where some do not."""


def lean(target: Target) -> Target:
    """The target as kernels see it that are to be one launch."""
    return replace(target, features=target.features - _WITHOUT)


def persistent_kernel(program: Program) -> Program:
    """The program as one call."""
    if len(program.calls) < 2 and not program.loops:
        return program
    return replace(program, calls=(merged(program),), loops=())


def merged(program: Program) -> KernelCall:
    """All calls of the program as one, with its ordered loops."""
    for call in program.calls:
        _check(call.kernel)
    return _Merger(program).run()


def _check(kernel: Kernel) -> None:
    found = next((op for op in walk(kernel.body) if op.opcode in _REFUSED), None)
    reason = f"uses {found.opcode}" if found is not None else "has clusters" if kernel.attrs.get("cluster", 1) != 1 else ""
    if reason:
        raise UserError.at(
            "TW020", f"launches=1: kernel {kernel.name} {reason}, which cannot be part of a larger kernel", kernel.span,
            "leave launches= out, or schedule= where it asks for that",
        )  # fmt: skip


def _meets(kernel: Kernel) -> bool:
    """Whether threads of a block depend on each other beyond their warps."""
    return any(op.opcode == "barrier" or _is_shared(op) for op in walk(kernel.body))


def _is_shared(op: Op) -> bool:
    return op.opcode == "alloc" and isinstance(op.results[0].type, Tensor) and op.results[0].type.space == "shared"


def _written(kernel: Kernel) -> set[Value]:
    """The parameters the kernel writes."""
    writes = {op.operands[0] for op in walk(kernel.body) if op.operands and OPS[op.opcode].effect == "write"}
    return writes & set(kernel.params)


@dataclass
class _Since:
    """What was touched and written since all blocks met."""

    touched: set[str]
    written: set[str]

    def meet(self, b: Builder, touched: set[str], written: set[str]) -> bool:
        """All blocks meet where this is needed before something touches and writes these arrays; says whether they do."""
        needed = bool(written & self.touched or touched & self.written)
        if needed:
            b.multi("grid_barrier")
            self.touched, self.written = set(), set()
        self.touched |= touched
        self.written |= written
        return needed


class _Merger:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.kernels = [call.kernel for call in program.calls]
        self.threads = max(kernel.threads for kernel in self.kernels)
        self.params: dict[tuple[str, str], Value] = {}
        """By name and type: an array may be seen with several shapes."""
        self.writers: set[Value] = set()
        self.head = Builder(program.span)
        self.block = self.head.op("program_id", axis=0, name="block")
        self.blocks = self.head.op("grid_size", axis=0, name="blocks")
        self.thread = self.head.op("thread_id", name="thread")
        self.body = Builder(program.span)
        self.number = 0
        """Of the next kernel."""
        self.wanted: list[Size] = []
        self.indices: dict[str, Value] = {}
        """The numbers of the steps of the ordered loops around."""

    def run(self) -> KernelCall:
        self._items(self.body, call_tree(self.program), _Since(set(), set()))
        blocks = reduce(maximum, self.wanted)
        return self._call(maximum(blocks, Size.of(1)) if self.program.loops else blocks)

    def _items(self, b: Builder, items: Sequence[KernelCall | OrderedCalls], since: _Since) -> None:
        for item in items:
            if isinstance(item, KernelCall):
                with b.at(item.kernel.span):
                    self._kernel(b, item, since)
            else:
                with b.at(item.loop.span):
                    self._steps(b, item, since)

    def _kernel(self, b: Builder, call: KernelCall, since: _Since) -> None:
        names = dict(zip(call.kernel.params, call.args, strict=True))
        # Nobody reads what index checks leave behind, so it is no reason to wait.
        touched, written = set(call.args) - {FAILURE}, {names[p] for p in _written(call.kernel)} - {FAILURE}
        if not since.meet(b, touched, written) and self.number and _meets(call.kernel):
            b.multi("barrier")  # others may still use the shared memory that becomes this kernel's
        self.wanted.append(self._widest(self._one(b, call, self.number)))
        self.number += 1

    def _steps(self, b: Builder, item: OrderedCalls, since: _Since) -> None:
        """An ordered loop. All blocks meet at the end of each step, so that the next may rely on all of it."""
        loop = item.loop
        cell = None
        if loop.cell:
            type_ = self.program.array(loop.cell).type
            cell = self.params.setdefault((loop.cell, str(type_)), Value(type_, loop.cell))
            since.meet(b, {loop.cell}, set())

        def step(inner: Builder, number: Value) -> Sequence[Value]:
            self.indices[loop.name] = number
            for turn, calls in item.turns:

                def body(b: Builder, calls: Sequence[KernelCall | OrderedCalls] = calls) -> Sequence[Value]:
                    self._items(b, calls, _Since(set(since.touched), set(since.written)))
                    return []

                in_turn(inner, turn, number, body)
            inner.multi("grid_barrier")
            del self.indices[loop.name]
            return []

        each_step(b, loop, self.indices, cell, step)

    def _widest(self, blocks: Size) -> Size:
        """As many blocks as a kernel has use for in the first step, or in the last."""
        ends = [blocks]
        for loop in self.program.loops:
            last = [Size.of(0)] if loop.count is None else [Size.of(0), loop.count - 1]
            ends = [end.substitute({loop.name: step}) for end in ends for step in (last if loop.name in end.names else last[:1])]
        return reduce(maximum, dict.fromkeys(ends))

    def _call(self, blocks: Size) -> KernelCall:
        args = tuple(name for name, _ in self.params)
        params = tuple(self.params.values())
        named = {name for (name, _), value in self.params.items() if value in self.writers}
        coherent = tuple(i for i, value in enumerate(params) if args[i] in named and value not in self.writers)
        facts = {name: divisor for kernel in self.kernels for name, divisor in kernel.facts.items()}
        attrs: dict[str, Attr] = {"persistent": True}
        if coherent:
            attrs["coherent"] = coherent
        ops = (*self.head.ops, *self.body.ops)
        span = self.kernels[0].span
        known, marks = MappingProxyType(facts), MappingProxyType(attrs)
        kernel = Kernel(self.program.name, Stage.THREAD, params, Block((), ops), (blocks,), self.threads, known, marks, span)
        return KernelCall(kernel, args)

    def _one(self, b: Builder, call: KernelCall, number: int) -> Size:
        """Append a kernel; gives how many blocks it has use for."""
        kernel = call.kernel
        mapping: dict[Value, Value] = {}
        for param, name in zip(kernel.params, call.args, strict=True):
            mapping[param] = self.params.setdefault((name, str(param.type)), Value(param.type, param.name))
        self.writers |= {mapping[p] for p in _written(kernel)}
        body = clone_block(kernel.body, mapping)
        total = product(kernel.grid)
        if kernel.threads == self.threads:
            self._loop(b, kernel, body, total, self.block, self.blocks, self.thread, number)
            return total
        if not _meets(kernel) and self.threads % kernel.threads == 0:
            beside, width = b.index(self.threads // kernel.threads), b.index(kernel.threads)
            first = b.add(b.mul(self.block, beside), b.op("floordiv", self.thread, width))
            thread = b.op("mod", self.thread, width)
            self._loop(b, kernel, body, total, first, b.mul(self.blocks, beside), thread, number)
            return ceildiv(total, self.threads // kernel.threads)

        def take_part(inner: Builder) -> Sequence[Value]:
            self._loop(inner, kernel, body, total, self.block, self.blocks, self.thread, number)
            return []

        b.if_(b.op("lt", self.thread, b.index(kernel.threads)), take_part, lambda inner: [])
        return total

    def _loop(
        self, b: Builder, kernel: Kernel, body: Block, total: Size, first: Value, step: Value, thread: Value, number: int
    ) -> None:
        """The kernel's blocks from `first` on, with `thread` as the number of the thread."""
        meets = _meets(kernel)

        def turn(inner: Builder, index: Value) -> Sequence[Value]:
            ids = self._along(inner, index, kernel.grid)
            placed = rewrite_block(body, lambda at, op: self._placed(at, op, ids, thread, kernel.threads, number), {})
            inner.ops += placed.ops
            if meets:
                _barrier(inner, kernel.threads, self.threads)  # before the next block writes to the shared memory of this one
            return []

        b.for_(first, size_value(b, total, self.indices), step, [], turn, name="block")

    def _placed(
        self, b: Builder, op: Op, ids: Sequence[Value], thread: Value, threads: int, number: int
    ) -> Sequence[Value] | None:
        """What stands for an op of the kernel; None for the op itself."""
        if op.opcode == "program_id":
            axis = op.attrs["axis"]
            assert isinstance(axis, int)
            return [ids[axis]]
        if op.opcode == "thread_id":
            return [thread]
        size = op.attrs.get("value")
        if op.opcode == "size" and isinstance(size, Size) and not size.names.isdisjoint(self.indices):
            return [size_value(b, size, self.indices)]
        if op.opcode in ("wait_previous", "release_next"):
            return []
        if op.opcode == "alloc":
            # Memory of a thread must not grow with every turn of a loop.
            attrs = {**op.attrs, "phase": number} if _is_shared(op) else op.attrs
            self.head.append(replace(op, attrs=MappingProxyType(dict(attrs))))
            return op.results
        if op.opcode == "barrier" and threads < self.threads:
            _barrier(b, threads, self.threads)
            return []
        return None


    def _along(self, b: Builder, index: Value, grid: Sequence[Size]) -> list[Value]:
        """A block's number along each axis of a grid, from its number counted along x first."""
        ids: list[Value] = []
        for extent in grid[:-1]:
            size = size_value(b, extent, self.indices)
            ids.append(b.op("mod", index, size))
            index = b.op("floordiv", index, size)
        return [*ids, index]


def _barrier(b: Builder, threads: int, of: int) -> None:
    """Of so many threads of a block."""
    if threads == of:
        b.multi("barrier")
    else:
        b.multi("named_barrier", b.index(_OWN_BARRIER), threads=threads)
