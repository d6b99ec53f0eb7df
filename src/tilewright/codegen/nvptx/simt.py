"""Ops of explicit kernels -> LLVM text for NVIDIA GPUs: what warps do together, clocks, and bit tricks that are one instruction.

In: one op of `ir.ops_simt`, the names of its operands, the writer of the function and the target. Out: the names of its results.
`HANDLERS` has a function for each op that no other device has, `BETTER` one for those that all have and this one does in one
instruction, `FAST` the intrinsic of each approximate function. Atomic accesses are in `nvptx_atomic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import f8e4m3, f8e5m2
from tilewright.base.errors import TargetLimit
from tilewright.base.target import Target
from tilewright.codegen.llvm.emitter import FunctionWriter, llvm_type, memory_type
from tilewright.codegen.nvptx import atomics as nvptx_atomic
from tilewright.codegen.nvptx import cache as nvptx_cache
from tilewright.codegen.nvptx.atomics import (
    CLUSTER,
    as_integer,
    atomic,
    atomic_load,
    atomic_store,
    from_integer,
    remote_place,
)
from tilewright.codegen.nvptx.report import assert_true, print_text, report_index
from tilewright.ir.nodes import Op
from tilewright.ir.types import Tensor, dtype_of

Handler = Callable[[FunctionWriter, Op, Sequence[str], Target], Sequence[str]]
_SHUFFLE = {"idx": "idx", "up": "up", "down": "down", "xor": "bfly"}
_ALL_LANES = "-1"
_PAIR = "{ i32, i1 }"
_SHARED = "ptr addrspace(3)"
_PTX_FP8 = 84
FAST = {
    "sin_approx": "llvm.nvvm.sin.approx.f", "cos_approx": "llvm.nvvm.cos.approx.f", "log2_approx": "llvm.nvvm.lg2.approx.ftz.f",
    "sqrt_approx": "llvm.nvvm.sqrt.approx.ftz.f", "rsqrt_approx": "llvm.nvvm.rsqrt.approx.ftz.f", "div_approx": "llvm.nvvm.div.approx.ftz.f",
}  # fmt: skip
"""Intrinsics of f32, element by element."""


def ptx_version(op: Op, target: Target) -> int:
    """The PTX version, times ten, without which the op cannot be spelled; 0 where any will do."""
    fp8 = op.opcode == "mma" and op.attrs["dtype"] in (f8e4m3, f8e5m2)
    return max(nvptx_atomic.ptx_version(op, target), nvptx_cache.ptx_version(op), _PTX_FP8 if fp8 else 0)


def _mask(operands: Sequence[str], count: int) -> tuple[str, str]:
    """The lanes that take part: the operand after the first `count`, if there is one."""
    return "i32", operands[count] if len(operands) > count else _ALL_LANES


def _need(op: Op, target: Target, sm: int) -> None:
    if target.sm < sm:
        raise TargetLimit.at("TW020", f"{target.name} cannot do {op.opcode}: that needs sm_{sm}", op.span)


# -- warps ------------------------------------------------------------------------------------------------------------


def _warp_sync(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    w.call("void", "llvm.nvvm.bar.warp.sync", _mask(operands, 0))
    return []


def _shuffle(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    mode, width = _SHUFFLE[str(op.attrs["mode"])], op.attrs.get("width", target.warp_size)
    assert isinstance(width, int)
    clamp = 0 if mode == "up" else target.warp_size - 1
    control = str(((target.warp_size - width) << 8) | clamp)
    dtype = dtype_of(op.operands[0].type)
    lane, bits = operands[1], dtype_of(op.operands[1].type).bits
    if bits != 32:
        lane = w.let(f"{'trunc' if bits > 32 else 'zext'} {llvm_type(op.operands[1].type)} {lane} to i32")
    name = f"llvm.nvvm.shfl.sync.{mode}.i32"

    def exchange(word: str) -> str:
        return w.call("i32", name, _mask(operands, 2), ("i32", word), ("i32", lane), ("i32", control))

    if dtype.is_bool:
        return [w.let(f"trunc i32 {exchange(w.let(f'zext i1 {operands[0]} to i32'))} to i1")]
    value = as_integer(w, operands[0], dtype.llvm, dtype.bits)
    if dtype.bits == 64:
        low = w.let(f"trunc i64 {value} to i32")
        high = w.let(f"trunc i64 {w.let(f'lshr i64 {value}, 32')} to i32")
        low, high = (w.let(f"zext i32 {exchange(part)} to i64") for part in (low, high))
        value = w.let(f"or i64 {w.let(f'shl i64 {high}, 32')}, {low}")
    elif dtype.bits == 32:
        value = exchange(value)
    else:
        narrow = f"i{dtype.bits}"
        value = w.let(f"trunc i32 {exchange(w.let(f'zext {narrow} {value} to i32'))} to {narrow}")
    return [from_integer(w, value, dtype.llvm, dtype.bits)]


def _vote(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    mode = {"uniform": "uni"}.get(str(op.attrs["mode"]), str(op.attrs["mode"]))
    kind = "i32" if mode == "ballot" else "i1"
    return [w.call(kind, f"llvm.nvvm.vote.{mode}.sync", _mask(operands, 1), ("i1", operands[0]))]


def _match(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    dtype = dtype_of(op.operands[0].type)
    value = (f"i{dtype.bits}", as_integer(w, operands[0], dtype.llvm, dtype.bits))
    if op.attrs["mode"] == "any":
        return [w.call("i32", f"llvm.nvvm.match.any.sync.i{dtype.bits}", _mask(operands, 1), value)]
    both = w.call(_PAIR, f"llvm.nvvm.match.all.sync.i{dtype.bits}p", _mask(operands, 1), value)
    return [w.let(f"extractvalue {_PAIR} {both}, {k}") for k in (0, 1)]


def _redux(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    _need(op, target, 80)
    kind = str(op.attrs["kind"])
    if kind in ("min", "max") and dtype_of(op.operands[0].type).kind == "u":
        kind = f"u{kind}"
    return [w.call("i32", f"llvm.nvvm.redux.sync.{kind}", ("i32", operands[0]), _mask(operands, 1))]


def _barrier_reduce(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    kind = {"count": "popc"}.get(str(op.attrs["kind"]), str(op.attrs["kind"]))
    result = "i32" if kind == "popc" else "i1"
    return [w.call(result, f"llvm.nvvm.barrier.cta.red.{kind}.aligned.all", ("i32", "0"), ("i1", operands[0]))]


def _register(name: str) -> Handler:
    def handler(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
        return [w.call("i32", name)]

    return handler


def _warp_id(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    # The device's own register of that name says where the warp runs, not which it is.
    return [w.let(f"lshr i32 {w.call('i32', 'llvm.nvvm.read.ptx.sreg.tid.x')}, {target.warp_size.bit_length() - 1}")]


def _lane_mask(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    return [w.call("i32", f"llvm.nvvm.read.ptx.sreg.lanemask.{op.attrs['relation']}")]


# -- copies and other blocks ------------------------------------------------------------------------------------------


def _integer(w: FunctionWriter, op: Op, operands: Sequence[str], position: int, bits: int) -> str:
    """An integer operand as one of that many bits."""
    dtype = dtype_of(op.operands[position].type)
    if dtype.bits == bits:
        return operands[position]
    kind = "trunc" if dtype.bits > bits else "sext" if dtype.kind == "i" else "zext"
    return w.let(f"{kind} {dtype.llvm} {operands[position]} to i{bits}")


def _shared_place(w: FunctionWriter, op: Op, operands: Sequence[str], first: int) -> str:
    """The address of a shared tensor's element: operand `first` is the tensor, the next one the offset."""
    memory = op.operands[first].type
    assert isinstance(memory, Tensor)
    offset = _integer(w, op, operands, first + 1, 64)
    return w.let(f"getelementptr inbounds {memory_type(memory.dtype)}, {_SHARED} {operands[first]}, i64 {offset}")


def _bulk(w: FunctionWriter, op: Op, operands: Sequence[str]) -> tuple[str, str, str]:
    """The place in shared memory, that in global memory, and the bytes."""
    memory = op.operands[2].type
    assert isinstance(memory, Tensor)
    last = 3 + memory.rank
    place = w.element_pointer(op.operands[2], [_integer(w, op, operands, k, 64) for k in range(3, last)])
    size = w.let(f"mul i32 {_integer(w, op, operands, last, 32)}, {memory.dtype.itemsize}")
    return _shared_place(w, op, operands, 0), place, size


def _bulk_load(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    to, place, size = _bulk(w, op, operands)
    barrier = _shared_place(w, op, operands, len(operands) - 2)
    there = w.let(f"addrspacecast {_SHARED} {to} to {CLUSTER}")
    told = "cache" in op.attrs
    w.call(
        "void", "llvm.nvvm.cp.async.bulk.global.to.shared.cluster", (CLUSTER, there), (_SHARED, barrier), ("ptr addrspace(1)", place),
        ("i32", size), ("i16", "0"), ("i64", nvptx_cache.policy_of(w, op) if told else "0"), ("i1", "false"), ("i1", "true" if told else "false"),
    )  # fmt: skip
    return []


def _bulk_store(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    source, place, size = _bulk(w, op, operands)
    name = "llvm.nvvm.cp.async.bulk.shared.cta.to.global"
    w.call("void", name, ("ptr addrspace(1)", place), (_SHARED, source), ("i32", size), ("i64", "0"), ("i1", "false"))
    return []


def _store_remote(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    there = remote_place(w, op, _shared_place(w, op, operands, 0), operands[2])
    value, kind = operands[3], llvm_type(op.operands[3].type)
    if kind == "i1":
        value, kind = w.let(f"zext i1 {value} to i8"), "i8"
    w.line(f"store {kind} {value}, {CLUSTER} {there}")
    return []


# -- time -------------------------------------------------------------------------------------------------------------


def _clock(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    if op.attrs.get("bits") == 32:
        return [w.let('call i32 asm sideeffect "mov.u32 $0, %clock;", "=r,~{memory}"()')]
    return [w.let('call i64 asm sideeffect "mov.u64 $0, %clock64;", "=l,~{memory}"()')]


def _timer(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    return [w.let('call i64 asm sideeffect "mov.u64 $0, %globaltimer;", "=l,~{memory}"()')]


def _nanosleep(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    w.call("void", "llvm.nvvm.nanosleep", ("i32", operands[0]))
    return []


# -- bits -------------------------------------------------------------------------------------------------------------


def _byte_perm(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    return w.call("i32", "llvm.nvvm.prmt", *(("i32", v) for v in operands))


def _dp4a(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    first, second = ("s" if dtype_of(v.type).kind == "i" else "u" for v in op.operands[:2])
    return w.call("i32", f"llvm.nvvm.idp4a.{first}.{second}", *(("i32", v) for v in operands))


BETTER: dict[str, Callable[[FunctionWriter, Op, Sequence[str]], str]] = {"byte_perm": _byte_perm, "dp4a": _dp4a}

HANDLERS: dict[str, Handler] = {
    "bulk_load": _bulk_load, "bulk_store": _bulk_store, "store_remote": _store_remote, "atomic_remote": atomic,
    "atomic": atomic, "atomic_load": atomic_load, "atomic_store": atomic_store,
    "warp_sync": _warp_sync, "shuffle": _shuffle, "vote": _vote, "match": _match, "redux": _redux, "barrier_reduce": _barrier_reduce,
    "active_mask": _register("llvm.nvvm.activemask"), "lane_id": _register("llvm.nvvm.read.ptx.sreg.laneid"), "warp_id": _warp_id,
    "print": print_text, "assert": assert_true, "report": report_index, "lane_mask": _lane_mask, "clock": _clock, "global_timer": _timer, "nanosleep": _nanosleep,
}  # fmt: skip
