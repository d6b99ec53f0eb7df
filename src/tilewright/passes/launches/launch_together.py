"""Short kernels that need nothing of each other are one launch. `Program -> Program`, at the thread stage.

In: a program of kernels, and the sizes of the call where code is made for these. Out: the same, where kernels of few threads that could run in any order are one: its first blocks are
those of the first kernel, the next ones those of the second. Launches of a decode step's small kernels (rotary positions, rows for the caches; queries, keys and
values as products of their own) cost more than their work.

    call @rope(q, …)  grid=[12]                      call @rope(q, …, k, …)  grid=[14]
    call @append(k, …)  grid=[2]            ->           if block < 12 { rope } else { append, block - 12 }

A block has the threads of the largest kernel; those that a smaller one has no use for leave at once, where its threads need not meet. Shared memory of one lies
where that of the other does (`phase`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.artifact import FAILURE
from tilewright.base.sizes import Size, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_block, rewrite_block
from tilewright.ir.types import Tensor

MOST_THREADS = 1 << 17
"""Of all kernels of one launch: what runs for long gains nothing."""
MOST = 4
"""Kernels of one launch."""
APART = frozenset({
    "tensor_map", "mbarrier_init", "cluster_rank", "cluster_sync", "load_remote", "copy_remote", "named_barrier", "set_registers", "wgmma", "wgmma_registers",
    "raise_flag", "await_flag", "grid_sync", "grid_barrier", "grid_size", "print", "assert", "atomic", "accumulate", "dynamic_shared",
})  # fmt: skip
"""What a kernel does that keeps it by itself: blocks or launches count for it."""
_MARKS = frozenset({"schedule", "min_blocks", "early", "dependent", "parted", "precision", "reduce_extent", "packed_rows", "packed_units", "phase", "phase_of"})
"""Attributes that a kernel of several can have."""


def launch_together(program: Program, target: Target, sizes: Mapping[str, int]) -> Program:
    """The program with fewer launches."""
    if not target.simt or len(program.calls) < 2 or program.loops:
        return program
    groups: list[list[KernelCall]] = []
    for call in program.calls:
        place = _place(groups, call, sizes)
        if place is None:
            groups.append([call])
        else:
            groups[place].append(call)
    return replace(program, calls=tuple(group[0] if len(group) == 1 else _together(group) for group in groups))


def _place(groups: Sequence[Sequence[KernelCall]], call: KernelCall, sizes: Mapping[str, int]) -> int | None:
    """The group that a call joins: it depends on none of its members, nor on anything that comes later."""
    if not _can_join(call):
        return None
    found: int | None = None
    for number in range(len(groups) - 1, -1, -1):
        group = groups[number]
        if len(group) < MOST and all(_can_join(other) for other in group) and _fit([*group, call], sizes) and not any(_depend(other, call) for other in group):
            found = number
        if any(_depend(other, call) for other in group):
            break
    return found


def _can_join(call: KernelCall) -> bool:
    kernel = call.kernel
    apart = any(op.opcode in APART or "tma" in op.opcode or "bulk" in op.opcode for op in walk(kernel.body))
    return not (apart or call.loops or len(kernel.grid) != 1 or kernel.attrs.get("cluster", 1) != 1 or set(kernel.attrs) - _MARKS)


def _fit(calls: Sequence[KernelCall], sizes: Mapping[str, int]) -> bool:
    """Whether they are short together, and blocks of one size serve all of them."""
    total = 0
    most = max(call.kernel.threads for call in calls)
    for call in calls:
        blocks = product(call.kernel.grid)
        if not blocks.names <= sizes.keys() or (call.kernel.threads != most and _meets(call.kernel)):
            return False
        total += blocks.evaluate(sizes) * most
    return total <= MOST_THREADS


def _meets(kernel: Kernel) -> bool:
    """Whether threads of a block depend on each other beyond their warps."""
    return any(op.opcode == "barrier" or _is_shared(op) for op in walk(kernel.body)) or kernel.threads % 32 != 0


def _is_shared(op: Op) -> bool:
    return op.opcode == "alloc" and isinstance(op.results[0].type, Tensor) and op.results[0].type.space == "shared"


def arrays_of(call: KernelCall) -> tuple[set[str], set[str]]:
    """The arrays that a call has to do with, and those that it writes. Nobody reads what index checks leave behind."""
    names = dict(zip(call.kernel.params, call.args, strict=True))
    ops = list(walk(call.kernel.body))
    # The copy engine is told of an array by its map.
    maps = {op.results[0]: op.operands[0] for op in ops if op.opcode == "tensor_map"}
    changing = [op for op in ops if OPS[op.opcode].effect not in ("pure", "read", "control", "barrier")]
    stored = {maps[v] for op in changing if op.opcode == "tma_store" for v in op.operands if v in maps}
    written = {v for op in changing for v in op.operands if v in names} | (stored & names.keys())
    touched = {n for p, n in names.items() if isinstance(p.type, Tensor)}
    return touched - {FAILURE}, {names[v] for v in written if isinstance(v.type, Tensor)} - {FAILURE}


def _depend(first: KernelCall, second: KernelCall) -> bool:
    (touched, written), (others, changed) = arrays_of(first), arrays_of(second)
    if first.kernel.attrs.get("phase_of", "") == second.kernel.attrs.get("phase_of"):
        # Phases of one kernel write elements of their own.
        both = written & changed
        written, changed = written - both, changed - both
        touched, others = touched - both, others - both
    return bool(written & others or touched & changed)


def _together(calls: Sequence[KernelCall]) -> KernelCall:
    """One call in place of several."""
    params: dict[tuple[str, str], Value] = {}
    kernels = [call.kernel for call in calls]
    threads = max(kernel.threads for kernel in kernels)
    head = Builder(kernels[0].span)
    early = any(kernel.attrs.get("dependent") for kernel in kernels)
    if early:
        head.multi("release_next")
        head.multi("wait_previous")
    block, thread = head.op("program_id", axis=0, name="block"), head.op("thread_id", name="thread")
    bodies: list[Block] = []
    for number, call in enumerate(calls):
        mapping = {param: params.setdefault((name, str(param.type)), Value(param.type, param.name)) for param, name in zip(call.kernel.params, call.args, strict=True)}
        bodies.append(_placed(head, clone_block(call.kernel.body, mapping), number))
    body = Builder(kernels[0].span)
    _choose(body, kernels, bodies, block, thread, threads, Size.of(0))
    grid = product(kernels[0].grid)
    for kernel in kernels[1:]:
        grid = grid + product(kernel.grid)
    attrs: dict[str, Attr] = {"schedule": "; ".join(f"{kernel.name}: {kernel.attrs.get('schedule', '')}" for kernel in kernels)}
    if early:
        attrs["dependent"] = True
    if all("min_blocks" in kernel.attrs for kernel in kernels):
        attrs["min_blocks"] = min(int(str(kernel.attrs["min_blocks"])) for kernel in kernels)
    facts = {name: divisor for kernel in kernels for name, divisor in kernel.facts.items()}
    made = Kernel(
        "_".join(kernel.name for kernel in kernels), Stage.THREAD, tuple(params.values()), Block((), (*head.ops, *body.ops)), (grid,), threads,
        MappingProxyType(facts), MappingProxyType(attrs), kernels[0].span,
    )  # fmt: skip
    return KernelCall(made, tuple(name for name, _ in params))


def _choose(b: Builder, kernels: Sequence[Kernel], bodies: Sequence[Block], block: Value, thread: Value, threads: int, first: Size) -> None:
    """The code of the kernel whose block it is."""

    def own(inner: Builder) -> Sequence[Value]:
        number = block if first == Size.of(0) else inner.sub(block, inner.index(first))

        def run(at: Builder) -> Sequence[Value]:
            placed = rewrite_block(bodies[0], lambda _, op: [number] if op.opcode == "program_id" else [thread] if op.opcode == "thread_id" else None, {})
            at.ops += placed.ops
            return []

        if kernels[0].threads == threads:
            return run(inner)
        inner.if_(inner.op("lt", thread, inner.index(kernels[0].threads)), run, lambda _: [])
        return []

    if len(kernels) == 1:
        own(b)
        return
    after = first + product(kernels[0].grid)

    def rest(inner: Builder) -> Sequence[Value]:
        _choose(inner, kernels[1:], bodies[1:], block, thread, threads, after)
        return []

    b.if_(b.op("lt", block, b.index(after)), own, rest)


def _placed(head: Builder, body: Block, number: int) -> Block:
    """A body without its own start, and with its memory at the start of the whole."""

    def place(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode in ("wait_previous", "release_next"):
            return []
        if op.opcode == "alloc":
            attrs = {**op.attrs, "phase": number} if _is_shared(op) else op.attrs
            head.append(replace(op, attrs=MappingProxyType(dict(attrs))))
            return op.results
        return None

    return rewrite_block(body, place, {})
