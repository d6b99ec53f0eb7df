"""`run_blocks` on a CPU: the body is a function of its own, like that of a kernel, which the pool's threads call for ranges of blocks.

In: a kernel with `run_blocks` ops. Out: a kernel for each of them, which takes what its body uses as arguments, and the code that launches it from
within the first. A launch of little work stays in the thread that asks for it (`codegen/host/pool.py`).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.base.abi import LAUNCH_DECLARATIONS, SLOT_BYTES
from tilewright.base.record import record
from tilewright.base.sizes import ONE
from tilewright.codegen.llvm.emitter import FunctionWriter, memory_type
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.types import Scalar, Tensor


@record
class SharedBlocks:
    """The kernel of a `run_blocks`, the symbol of its function, and where its arguments lie."""

    kernel: Kernel
    entry: str
    slots: str
    failing: bool
    """Whether it takes the word that failures are reported to."""


def bodies(kernel: Kernel) -> dict[Op, Kernel]:
    """The kernel of each `run_blocks`."""
    ops = [op for op in walk(kernel.body) if op.opcode == "run_blocks"]
    return {op: _body(kernel, op, number) for number, op in enumerate(ops)}


def _body(kernel: Kernel, op: Op, number: int) -> Kernel:
    (region,) = op.regions
    inside = {v for inner in walk(region) for v in inner.results} | {v for inner in walk(region) for r in inner.regions for v in r.args}
    used = dict.fromkeys(v for inner in walk(region) for v in inner.operands if v not in inside and v not in region.args)
    block = Op("program_id", (), region.args, MappingProxyType({"axis": 0}), (), op.span)
    ops = (block, *region.ops[:-1])
    return Kernel(f"{kernel.name}.{number}", Stage.THREAD, tuple(used), Block((), ops), (ONE,), 1, kernel.facts, op.attrs, op.span)


def launch(w: FunctionWriter, op: Op, blocks: SharedBlocks, count: str, work: str) -> None:
    """Hand out the blocks; leave the function where one of them failed."""
    words = [(_slot_type(param), w.names[param], isinstance(param.type, Scalar) and param.type.dtype.is_bool) for param in blocks.kernel.params]
    sizes = [("i64", w.size_names[name], False) for name in blocks.kernel.size_names]
    report = [("ptr", "%report", False)] if blocks.failing else []
    for position, (kind, value, is_bool) in enumerate((*words, *sizes, *report)):
        where = w.let(f"getelementptr inbounds i8, ptr {blocks.slots}, i64 {position * SLOT_BYTES}")
        stored = w.let(f"zext i1 {value} to i8") if is_bool else value
        w.line(f"store {kind} {stored}, ptr {where}, align 8")
    w.declarations |= set(LAUNCH_DECLARATIONS)
    w.line(f"call void @tilewright_launch(ptr @tilewright_pool, ptr @{blocks.entry}, ptr {blocks.slots}, i64 {count}, i64 {work})")
    cells = dict.fromkeys(inner.operands[0] for inner in walk(op.regions[0]) if inner.opcode == "report")
    for cell in (*(w.names[v] for v in cells), *(["%report"] if blocks.failing else [])):
        failed = w.let(f"icmp ne i64 {w.let(f'load atomic i64, ptr {cell} monotonic, align 8')}, 0")
        on = w.new_label("on")
        w.line(f"br i1 {failed}, label %out, label %{on}")
        w.open_label(on)


def _slot_type(param: Value) -> str:
    if isinstance(param.type, Tensor):
        return "ptr"
    assert isinstance(param.type, Scalar)
    return memory_type(param.type.dtype)


def without_bodies(kernel: Kernel) -> Kernel:
    """The kernel without what its `run_blocks` run: what its own function needs memory for."""
    if not any(op.opcode == "run_blocks" for op in walk(kernel.body)):
        return kernel

    def block(old: Block) -> Block:
        return Block(old.args, tuple(op if not op.regions else replace(op, regions=() if op.opcode == "run_blocks" else tuple(map(block, op.regions))) for op in old.ops))

    return replace(kernel, body=block(kernel.body))
