"""Atomic accesses and flags -> LLVM text for AMD GPUs.

In: `atomic`, `atomic_load`, `atomic_store`, `raise_flag`, `await_flag` or `grid_barrier`, the names of its operands and the writer of the
function. Out: the names of its results. LLVM keeps scope and order on this target, and makes a loop around compare-and-swap of what the
device has no instruction for: floats narrower than f32, extremes of floats, elements of 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import f32, f64
from tilewright.base.errors import CompilerBug
from tilewright.base.target import Target
from tilewright.codegen.amdgpu.values import (
    GLOBAL,
    Handler,
    as_integer,
    block_barrier,
    from_integer,
    scope_of,
    thread_id,
)
from tilewright.codegen.llvm.emitter import FunctionWriter, literal, llvm_type
from tilewright.ir.nodes import Kernel, Op, walk
from tilewright.ir.types import Scalar, Tensor, Vec

_RMW = {"and": "and", "or": "or", "xor": "xor", "exchange": "xchg"}
_ORDERS = {"relaxed": "monotonic", "acquire": "acquire", "release": "release", "acq_rel": "acq_rel", "volatile": "monotonic"}
_ORDINARY_MEMORY = ", !amdgpu.no.fine.grained.memory !0, !amdgpu.no.remote.memory !0, !amdgpu.ignore.denormal.mode !0"
"""Arrays lie in the device's own memory: then additions of floats are one instruction."""
GRID_WORD = "tilewright_grid"
_ALL = 1 << 31
"""What all blocks of a grid together add to its word."""


class _AmdAccess:
    """Where an op accesses memory, for whom, and in which order."""

    def __init__(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        self.w, self.op, self.dtype = w, op, memory.dtype
        self.pointer = w.dialect.pointer(memory.space)
        self.where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
        self.values = list(operands[1 + memory.rank :])
        self.order = str(op.attrs.get("order", "relaxed"))
        everywhere = self.order == "volatile"
        self.scope = scope_of("system" if everywhere else str(op.attrs.get("scope", "device")))
        self.tail = f"{self.scope} {_ORDERS[self.order]}, align {memory.dtype.itemsize}"

    def rmw(self, word: str, kind: str, value: str) -> str:
        plain = _ORDINARY_MEMORY if word == "fadd" and self.pointer == GLOBAL and self.dtype in (f32, f64) else ""
        return self.w.let(f"atomicrmw {word} {self.pointer} {self.where}, {kind} {value}{self.tail}{plain}")


def atomic(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    access = _AmdAccess(w, op, operands)
    type_, kind = op.results[0].type, str(op.attrs["kind"])
    if isinstance(type_, Vec):
        return [_vector_add(access, type_)]
    return [_one(access, kind, access.values[0])]


def _one(access: _AmdAccess, kind: str, value: str) -> str:
    w, dtype = access.w, access.dtype
    number, integer = dtype.llvm, f"i{dtype.bits}"
    if kind == "cas":
        return _compare_and_swap(access)
    if kind in _RMW:
        found = access.rmw(_RMW[kind], integer, as_integer(w, value, number, dtype.bits))
        return from_integer(w, found, number, dtype.bits)
    if kind in ("inc", "dec"):
        return access.rmw(f"u{kind}_wrap", number, value) if dtype.kind == "u" else _wrapped(access, kind)
    if dtype.is_float:
        return access.rmw({"add": "fadd", "sub": "fsub", "min": "fminimum", "max": "fmaximum"}[kind], number, value)
    return access.rmw(f"u{kind}" if dtype.kind == "u" and kind in ("min", "max") else kind, number, value)


def _compare_and_swap(access: _AmdAccess) -> str:
    w, dtype = access.w, access.dtype
    integer = f"i{dtype.bits}"
    expected, new = (as_integer(w, v, dtype.llvm, dtype.bits) for v in access.values)
    return from_integer(w, _swap(access, integer, expected, new, access.order), dtype.llvm, dtype.bits)


def _swap(access: _AmdAccess, integer: str, expected: str, new: str, order: str) -> str:
    w = access.w
    failed = {"release": "monotonic", "acq_rel": "acquire"}.get(order, _ORDERS[order])
    words = f"{access.scope} {_ORDERS[order]} {failed}, align {access.dtype.itemsize}"
    both = w.let(f"cmpxchg {access.pointer} {access.where}, {integer} {expected}, {integer} {new}{words}")
    return w.let(f"extractvalue {{ {integer}, i1 }} {both}, 0")


def _wrapped(access: _AmdAccess, kind: str) -> str:
    """`inc` and `dec` of signed integers: read, compute, and swap if nobody was faster."""
    w, dtype, value = access.w, access.dtype, access.values[0]
    number, zero, one = dtype.llvm, literal(0, dtype), literal(1, dtype)
    first = w.let(f"load atomic {number}, {access.pointer} {access.where}{access.scope} monotonic, align {dtype.itemsize}")
    again, done = w.new_label("again"), w.new_label("swapped")
    before, old, found = w.label, w.fresh("old"), w.fresh("found")
    w.line(f"br label %{again}")
    w.open_label(again)
    w.line(f"{old} = phi {number} [ {first}, %{before} ], [ {found}, %{again} ]")
    if kind == "inc":
        ended = w.let(f"icmp sge {number} {old}, {value}")
        new = w.let(f"select i1 {ended}, {number} {zero}, {number} {w.let(f'add {number} {old}, {one}')}")
    else:
        low, high = w.let(f"icmp eq {number} {old}, {zero}"), w.let(f"icmp sgt {number} {old}, {value}")
        new = w.let(f"select i1 {w.let(f'or i1 {low}, {high}')}, {number} {value}, {number} {w.let(f'sub {number} {old}, {one}')}")
    w.line(f"{found} = add {number} {_swap(access, number, old, new, access.order)}, 0")
    w.line(f"br i1 {w.let(f'icmp eq {number} {found}, {old}')}, label %{done}, label %{again}")
    w.open_label(done)
    return old


def _vector_add(access: _AmdAccess, type_: Vec) -> str:
    """Neighbours one by one; two halves at once are one instruction, which LLVM chooses itself."""
    w, kind, number = access.w, llvm_type(type_), type_.dtype.llvm
    if access.op.attrs["kind"] != "add":
        raise CompilerBug.at("TW040", f"atomic {access.op.attrs['kind']} of a vec", access.op.span)
    start, result = access.where, "poison"
    for lane in range(type_.width):
        access.where = w.let(f"getelementptr inbounds {number}, {access.pointer} {start}, i64 {lane}")
        one = _one(access, "add", w.let(f"extractelement {kind} {access.values[0]}, i64 {lane}"))
        result = w.let(f"insertelement {kind} {result}, {number} {one}, i64 {lane}")
    return result


def atomic_load(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    access = _AmdAccess(w, op, operands)
    kind, bits, volatile = _whole(op.results[0].type, access)
    found = w.let(f"load atomic {volatile}i{bits}, {access.pointer} {access.where}{access.scope} {_ORDERS[access.order]}, align {bits // 8}")
    return [from_integer(w, found, kind, bits)]


def atomic_store(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    access = _AmdAccess(w, op, operands)
    kind, bits, volatile = _whole(op.operands[-1].type, access)
    value = as_integer(w, access.values[0], kind, bits)
    w.line(f"store atomic {volatile}i{bits} {value}, {access.pointer} {access.where}{access.scope} {_ORDERS[access.order]}, align {bits // 8}")
    return []


def _whole(type_: object, access: _AmdAccess) -> tuple[str, int, str]:
    """The LLVM type of what one access reads or writes, its bits, and whether it is volatile."""
    assert isinstance(type_, Scalar | Vec)
    bits = type_.dtype.bits * (type_.width if isinstance(type_, Vec) else 1)
    return llvm_type(type_), bits, "volatile " if access.order == "volatile" else ""


# -- between blocks ---------------------------------------------------------------------------------------------------


def _raise_flag(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    access = _AmdAccess(w, op, operands)
    kind = access.dtype.llvm
    w.line(f'store atomic {kind} 1, {access.pointer} {access.where} syncscope("agent") release, align {access.dtype.itemsize}')
    return []


def _await_flag(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    access = _AmdAccess(w, op, operands)
    kind = access.dtype.llvm
    again, done = w.new_label("wait"), w.new_label("raised")
    w.line(f"br label %{again}")
    w.open_label(again)
    now = w.let(f'load atomic {kind}, {access.pointer} {access.where} syncscope("agent") acquire, align {access.dtype.itemsize}')
    w.line(f"br i1 {w.let(f'icmp ne {kind} {now}, 0')}, label %{done}, label %{again}")
    w.open_label(done)
    return []


def is_cooperative(kernel: Kernel) -> bool:
    """Whether the kernel's blocks must all run at once."""
    return any(op.opcode == "grid_barrier" for op in walk(kernel.body))


def grid_blocks(w: FunctionWriter, axis: int) -> str:
    """Blocks of the launch along an axis: hidden arguments of the kernel, i32 each."""
    hidden = w.call("ptr addrspace(4)", "llvm.amdgcn.implicitarg.ptr")
    place = w.let(f"getelementptr inbounds i32, ptr addrspace(4) {hidden}, i64 {axis}")
    return w.let(f"load i32, ptr addrspace(4) {place}, align 4, !invariant.load !0")


def _grid_barrier(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    """One thread of each block adds its share to a word of the module, block 0 so much that all shares together are 2^31: when all have come,
    the word's highest bit has changed, and the others are what they were. A device runs cooperative launches one after the other."""
    w.declarations.add(f"@{GRID_WORD} = protected addrspace(1) global i32 0, align 4")
    place = f"{GLOBAL} @{GRID_WORD}"
    groups = [w.call("i32", f"llvm.amdgcn.workgroup.id.{axis}") for axis in "xyz"]
    leads = w.let(f"icmp eq i32 {w.let(f'or i32 {groups[0]}, ' + w.let(f'or i32 {groups[1]}, {groups[2]}'))}, 0")
    blocks = w.let(f"mul i32 {w.let(f'mul i32 {grid_blocks(w, 0)}, {grid_blocks(w, 1)}')}, {grid_blocks(w, 2)}")
    share = w.let(f"select i1 {leads}, i32 {w.let(f'sub i32 {_ALL + 1 - (1 << 32)}, {blocks}')}, i32 1")
    meet, again, done, met = (w.new_label(name) for name in ("meet", "wait", "waited", "met"))
    w.line('fence syncscope("agent") release')
    block_barrier(w)
    w.line(f"br i1 {w.let(f'icmp eq i32 {thread_id(w)}, 0')}, label %{meet}, label %{met}")
    w.open_label(meet)
    before = w.let(f'atomicrmw add {place}, i32 {share} syncscope("agent") acq_rel, align 4')
    w.line(f"br label %{again}")
    w.open_label(again)
    w.call("void", "llvm.amdgcn.s.sleep", ("i32", "1"))
    now = w.let(f'load atomic i32, {place} syncscope("agent") acquire, align 4')
    changed = w.let(f"icmp slt i32 {w.let(f'xor i32 {before}, {now}')}, 0")
    w.line(f"br i1 {changed}, label %{done}, label %{again}")
    w.open_label(done)
    w.line(f"br label %{met}")
    w.open_label(met)
    block_barrier(w)
    w.line('fence syncscope("agent") acquire')
    return []


HANDLERS: dict[str, Handler] = {
    "atomic": atomic, "atomic_load": atomic_load, "atomic_store": atomic_store, "raise_flag": _raise_flag, "await_flag": _await_flag,
    "grid_barrier": _grid_barrier,
}  # fmt: skip
