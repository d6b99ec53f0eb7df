"""Which values of a thread-stage kernel are the same in all threads of a block, and where its threads wait for each other.

In: a kernel. Out: the values a block computes once (`block_values`) and the ops that are, or hold, a barrier (`waiting_ops`). A value is a
block's when only pure ops and loads of arrays the kernel never writes led to it, none of them from a thread's number, and when every
thread comes to it. An op with regions computes block values if all of it does, or if threads wait in it: then it is walked together.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.types import Tensor

BARRIERS = frozenset({"barrier", "named_barrier", "barrier_reduce"})
_OWN = frozenset({"thread_id", "lane_id", "warp_id", "lane_mask"})


def waiting_ops(kernel: Kernel) -> set[Op]:
    """Every barrier, and every op with one inside."""
    found: set[Op] = set()

    def visit(block: Block) -> bool:
        waits = False
        for op in block.ops:
            inner = [visit(region) for region in op.regions]
            if op.opcode in BARRIERS or any(inner):
                found.add(op)
                waits = True
        return waits

    visit(kernel.body)
    return found


def read_only(kernel: Kernel) -> set[Value]:
    """The tensor parameters that the kernel only reads, also through others that share their memory."""
    if kernel.attrs.get("aliased"):
        return set()
    written = {v for op in walk(kernel.body) if OPS[op.opcode].effect not in ("pure", "read") for v in op.operands}
    return {p for p in kernel.tensors if p not in written}


def control(op: Op) -> Sequence[Value]:
    """The values that decide which way threads go in an op with regions."""
    if op.opcode == "for":
        return op.operands[:3]
    return op.operands[:1] if op.opcode == "if" else op.regions[0].yields[:1]


def block_values(kernel: Kernel, waiting: set[Op]) -> set[Value]:
    """The values that one scalar of the block's code can stand for."""
    return _Uniform(kernel, waiting).run()


class _Uniform:
    def __init__(self, kernel: Kernel, waiting: set[Op]) -> None:
        self.kernel, self.waiting = kernel, waiting
        self.constant = read_only(kernel)
        self.varying: set[Value] = set()
        self.seen: set[Value] = {*kernel.params}

    def run(self) -> set[Value]:
        before = -1
        while before != len(self.varying):
            before = len(self.varying)
            self.block(self.kernel.body, True)
        return self.seen - self.varying

    def block(self, block: Block, together: bool) -> None:
        """`together`: every thread comes here."""
        for op in block.ops:
            if op.opcode != "yield":
                self.op(op, together)

    def op(self, op: Op, together: bool) -> None:
        self.seen.update(op.results)
        if op.regions:
            self.structured(op, together)
        elif op.opcode != "barrier_reduce" and (not self.is_block_op(op, together) or self.any_varying(op.operands)):
            self.varying.update(op.results)

    def is_block_op(self, op: Op, together: bool) -> bool:
        if op.opcode in _OWN or op.opcode == "alloc":
            return False
        if op.opcode == "load":
            return together and op.operands[0] in self.constant
        return OPS[op.opcode].effect == "pure" and not any(isinstance(r.type, Tensor) for r in op.results)

    def any_varying(self, values: Sequence[Value]) -> bool:
        return any(v in self.varying for v in values if not isinstance(v.type, Tensor))

    def structured(self, op: Op, together: bool) -> None:
        """Arguments of regions and results, from what controls the op and what its regions hand out."""
        for region in op.regions:
            self.seen.update(region.args)
        same = not self.any_varying(control(op))
        if op.opcode == "for":
            self.join((op.operands[3:], op.regions[0].yields), (op.regions[0].args[1:], op.results))
            if not same:
                self.varying.update(op.regions[0].args)
        elif op.opcode == "while":
            condition, body = op.regions
            self.join((op.operands, condition.yields[1:], body.yields), (condition.args, body.args, op.results))
        else:
            self.join(tuple(region.yields for region in op.regions), (op.results,))
        for region in op.regions:
            self.block(region, together and same)
        whole = op in self.waiting or self.is_pure(op, together)
        if not same or not whole:
            self.varying.update(op.results)
            for region in op.regions:
                self.varying.update(region.args)
            if not whole:
                self.leave(op)

    def join(self, sources: Sequence[Sequence[Value]], targets: Sequence[Sequence[Value]]) -> None:
        """Each target is at least as varying as the source in its place."""
        for source in sources:
            for target in targets:
                self.varying.update(t for s, t in zip(source, target, strict=True) if s in self.varying)

    def is_pure(self, op: Op, together: bool) -> bool:
        """Whether the op, and all in it, is the block's own computation."""
        for region in op.regions:
            for inner in region.ops:
                if inner.opcode == "yield":
                    if self.any_varying(inner.operands):
                        return False
                elif inner.regions:
                    if self.any_varying(inner.operands) or not self.is_pure(inner, together):
                        return False
                elif not self.is_block_op(inner, together) or self.any_varying(inner.operands):
                    return False
        return True

    def leave(self, op: Op) -> None:
        """What is computed in an op that the threads run on their own is theirs."""
        for region in op.regions:
            for inner in walk(region):
                self.varying.update(inner.results)
                for part in inner.regions:
                    self.varying.update(part.args)
