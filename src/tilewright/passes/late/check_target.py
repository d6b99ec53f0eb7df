"""Check: does the target have what the program asks for?

In: a program at the thread stage, the target, and the ops its code generator knows (None: all). Out: nothing, or a `TargetLimit`
that names the target, the construct and the line. Limits and features are the target's data; every backend is checked here, and
nowhere else unless an instruction has a condition of its own.

    %s = fma %a, %b, %s : f64      ->  error[TW020]: toy8 cannot do fma of f64: it has no f64
"""

from __future__ import annotations

from collections.abc import Set

from tilewright.base.errors import TargetLimit, TilewrightError
from tilewright.base.source import Span
from tilewright.base.target import Target
from tilewright.ir.needs import cluster_of, feature_of, local_bytes, shared_places
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.program import Program
from tilewright.ir.types import Scalar, Tensor, Vec, dtype_of

_WAITS = frozenset({"atomic_load", "await_flag"})
_ATOMICS = frozenset({"atomic", "atomic_load", "atomic_store"})


def check_target(program: Program, target: Target, known: Set[str] | None = None) -> None:
    """Complain of the first construct that the target, or its code generator, has not."""
    for kernel in dict.fromkeys(call.kernel if call.common is None else call.common.kernel for call in program.calls):
        check_kernel_target(kernel, target, known)


def check_kernel_target(kernel: Kernel, target: Target, known: Set[str] | None = None) -> None:
    """The same for one kernel."""
    if kernel.threads > target.max_threads:
        raise _limit(f"{kernel.name} wants {kernel.threads} threads in a block; {target.name} allows {target.max_threads}", kernel.span)
    _, shared = shared_places(kernel)
    if target.simt and shared > target.max_shared:  # where threads are loops, shared memory is any memory
        raise _limit(f"{kernel.name} needs {shared} bytes of shared memory; a block of {target.name} has {target.max_shared}", kernel.span)
    local = local_bytes(kernel)
    if target.max_local and local > target.max_local:
        raise _limit(f"{kernel.name} needs {local} bytes of local memory; a thread of {target.name} has {target.max_local}", kernel.span)
    for param in kernel.params:
        if _dtype_name(param) in target.missing_dtypes:
            raise _limit(f"{target.name} cannot take '{param.name}' of {kernel.name}: it has no {_dtype_name(param)}", kernel.span)
    for op in walk(kernel.body):
        problem = _problem(op, target, known)
        if problem:
            raise _limit(f"{target.name} cannot do {problem}", op.span if op.span.line else kernel.span)
    if cluster_of(kernel) > 1 and not target.has("cluster"):
        raise _limit(f"{kernel.name} wants clusters of blocks; {target.name} has none", kernel.span)


def _problem(op: Op, target: Target, known: Set[str] | None) -> str:
    """What the target cannot do of an op, and why; empty where it can."""
    feature = feature_of(op)
    if feature and not target.has(feature):
        return f"{op.opcode}: it has no {feature}"
    for value in (*op.results, *op.operands):
        if _dtype_name(value) in target.missing_dtypes:
            return f"{op.opcode} of {_dtype_name(value)}: it has no {_dtype_name(value)}"
    if target.simt and op.attrs.get("scope") == "cluster" and not target.has("cluster"):
        return f"{op.opcode} for a cluster: it has no cluster"
    if op.opcode in _ATOMICS:
        bits = _access_bits(op)
        if bits not in target.atomic_bits:
            return f"{op.opcode} of {bits} bits: it has no atomic access of that size"
    if op.opcode == "while" and not target.forward_progress and any(inner.opcode in _WAITS for region in op.regions for inner in walk(region)):
        return "a loop that waits for other blocks: it does not promise that these go on meanwhile"
    if known is not None and op.opcode not in known:
        return f"{op.opcode}: its code generator does not know it"
    return ""


def _access_bits(op: Op) -> int:
    """Bits that one atomic access reads or writes."""
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    if op.opcode == "atomic" and op.attrs["kind"] == "add":
        return memory.dtype.itemsize * 8  # neighbours are added to each on its own
    values = [value.type for value in (*op.results, *op.operands[1 + memory.rank :])]
    return memory.dtype.itemsize * 8 * max((type_.width for type_ in values if isinstance(type_, Vec)), default=1)


def _dtype_name(value: Value) -> str:
    return dtype_of(value.type).name if isinstance(value.type, Scalar | Vec | Tensor) else ""


def _limit(problem: str, span: Span) -> TilewrightError:
    return TargetLimit.at("TW020", problem, span)
