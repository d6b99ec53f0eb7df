"""Whether the threads of a kernel touch each other's elements: a thread-stage kernel in, the first dependence out.

Two accesses of one array, at least one a write, are apart when along some axis the index of both is `c * thread + k` with the same
constant c and values of k whose difference no two threads can make up. All else is a dependence, also what merely cannot be shown to be
none. Atomic operations do not disturb each other. The kernel has blocks of one thread, so that a block's number is the thread's.
"""

from __future__ import annotations

from tilewright.analysis.affine import Affine, Forms, analyse
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor

_WRITES = ("store", "atomic", "atomic_store")
_READS = ("load", "atomic_load")


@record
class Dependence:
    """Two accesses of different threads to one element."""

    name: str
    first: Op
    """It writes."""
    second: Op
    second_writes: bool
    distance: int = 0
    """How many threads apart; 0 where that is not known."""
    help: str = ""


def find_dependence(kernel: Kernel) -> Dependence | None:
    """The first pair of accesses that is not shown to be apart."""
    forms = analyse(kernel)
    threads = [op.results[0] for op in walk(kernel.body) if op.opcode == "program_id"]
    thread = threads[0] if threads else None
    # A block's only thread has one number: that is as good as a parameter.
    same = {*kernel.params, *(op.results[0] for op in walk(kernel.body) if op.opcode == "thread_id")}
    accesses = [op for op in walk(kernel.body) if op.opcode in (*_WRITES, *_READS) and op.operands[0] in kernel.params]
    for i, a in enumerate(accesses):
        for b in accesses[i:]:
            if a.operands[0] is not b.operands[0] or not (a.opcode in _WRITES or b.opcode in _WRITES):
                continue
            if a.opcode.startswith("atomic") and b.opcode.startswith("atomic"):
                continue
            found = _conflict(a, b, forms, thread, same)
            if found is not None:
                return found
    return None


def _conflict(a: Op, b: Op, forms: Forms, thread: Value | None, same: set[Value]) -> Dependence | None:
    memory = a.operands[0]
    assert isinstance(memory.type, Tensor)
    apart: list[int | None] = []
    for axis in range(memory.type.rank):
        distance = _distance(forms.get(a.operands[1 + axis]), forms.get(b.operands[1 + axis]), thread, same)
        if distance == 0:
            return None
        apart.append(distance)
    first, second = (a, b) if a.opcode in _WRITES else (b, a)
    known = next((abs(d) for d in apart if d is not None), 0)
    help_ = "" if known else "an index of the form c * i + k along some axis shows that iterations stay apart"
    return Dependence(memory.name, first, second, second.opcode in _WRITES, known, help_)


def _distance(a: Affine | None, b: Affine | None, thread: Value | None, same: set[Value]) -> int | None:
    """0: threads stay apart along this axis. Else how many threads apart they meet, None where that is not known."""
    if a is None or b is None or thread is None:
        return None
    step = a.factor(thread).constant
    if not step or step != b.factor(thread).constant:
        return None
    rest = a.plus(b, Size.of(-1))
    if rest.factors or rest.constant.constant is None:
        return None
    # What both have beside the thread must be the same for all threads.
    if any(value is not thread and value not in same for value in (*a.values, *b.values)):
        return None
    offset = rest.constant.constant
    return offset // step if offset % step == 0 else 0
