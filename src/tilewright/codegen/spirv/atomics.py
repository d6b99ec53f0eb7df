"""Atomic accesses -> SPIR-V. In: the writer of a kernel's function and the op. Out: the parts of its results.

Integers of 32 and, where the target has them, 64 bits have instructions; floats, and the kinds that have none, are a loop around compare-and-swap
on their bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import bool_, u32, u64
from tilewright.codegen.spirv.emitter import KernelText, Parts
from tilewright.codegen.spirv.ops import Handler, compare, extreme, select
from tilewright.ir.nodes import Op
from tilewright.ir.types import Scalar, Tensor

_WORDS = {
    "add": ("OpAtomicIAdd",) * 2, "sub": ("OpAtomicISub",) * 2, "min": ("OpAtomicSMin", "OpAtomicUMin"), "max": ("OpAtomicSMax", "OpAtomicUMax"),
    "and": ("OpAtomicAnd",) * 2, "or": ("OpAtomicOr",) * 2, "xor": ("OpAtomicXor",) * 2, "exchange": ("OpAtomicExchange",) * 2,
}  # fmt: skip
"""For signed and unsigned integers."""
_ORDERS = {"relaxed": 0, "acquire": 2, "release": 4, "acq_rel": 8}


class _SpirvAccess:
    """Where an op accesses memory, and how."""

    def __init__(self, w: KernelText, op: Op) -> None:
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        self.w, self.memory, self.dtype = w, memory, memory.type.dtype
        end = 1 + memory.type.rank
        self.offset = w.offset(memory, [w.names[v][0] for v in op.operands[1:end]])
        self.values = [w.names[v][0] for v in op.operands[end:]]
        self.element = f"i{self.dtype.bits}"
        self.type = w.module.type(self.element)
        if self.dtype.bits == 64:
            w.module.capabilities.add("Int64Atomics")
        scope = 2 if op.attrs.get("scope") == "block" or memory.type.space == "shared" else 1
        order = _ORDERS.get(str(op.attrs.get("order", "relaxed")), 0)
        kind = 0x100 if memory.type.space == "shared" else w.flavour.array_memory
        self.scope = w.module.constant("i32", scope)
        self.order = w.module.constant("i32", order | kind if order else 0)
        self.relaxed = w.module.constant("i32", 0)
        self.reads = w.module.constant("i32", (2 if order in (2, 8) else 0) | kind if order in (2, 8) else 0)

    def place(self) -> str:
        """A pointer to the element's bits."""
        w, storage = self.w, self.w.storage(self.memory)
        stored = w.module.stored(self.dtype)
        if storage == "PhysicalStorageBuffer":
            return w.bits_pointer(self.memory, self.offset, self.element)
        where = w.pointer(self.memory, self.offset)
        return where if stored == self.element else w.let("OpBitcast", w.module.pointer(storage, self.type), where)

    def bits(self, value: str) -> str:
        return value if self.w.module.element(self.dtype) == self.element else self.w.let("OpBitcast", self.type, value)

    def number(self, value: str) -> str:
        element = self.w.module.element(self.dtype)
        return value if element == self.element else self.w.let("OpBitcast", self.w.module.type(element), value)


def _atomic(w: KernelText, op: Op) -> Sequence[Parts]:
    access, kind = _SpirvAccess(w, op), str(op.attrs["kind"])
    dtype = access.dtype
    if kind == "cas":
        expected, new = (access.bits(v) for v in access.values)
        found = w.let("OpAtomicCompareExchange", access.type, access.place(), access.scope, access.order, access.reads, new, expected)
        return [(access.number(found),)]
    if kind in _WORDS and (not dtype.is_float or kind == "exchange"):
        word = _WORDS[kind][0 if dtype.kind == "i" else 1]
        found = w.let(word, access.type, access.place(), access.scope, access.order, access.bits(access.values[0]))
        return [(access.number(found),)]
    return [(_loop(access, kind),)]


def _loop(access: _SpirvAccess, kind: str) -> str:
    """Read, compute, and swap if nobody was faster."""
    w, dtype, truth = access.w, access.dtype, access.w.module.type("bool")
    type_, whole = Scalar(dtype), Scalar(bool_)
    place = access.place()
    start = w.let("OpAtomicLoad", access.type, place, access.scope, access.relaxed)

    def test(carried: Sequence[Parts]) -> tuple[str, Sequence[Parts]]:
        # A bool says whether the swap is still to be made.
        return carried[1][0], carried

    def turn(carried: Sequence[Parts]) -> Sequence[Parts]:
        old = carried[0][0]
        new = access.bits(_combined(w, kind, type_, access.number(old), access.values[0]))
        found = w.let("OpAtomicCompareExchange", access.type, place, access.scope, access.order, access.reads, new, old)
        return [(found,), (w.let("OpINotEqual", truth, found, old),)]

    handed = w.loop([Scalar(u64 if dtype.bits == 64 else u32), whole], [(start,), (w.module.constant("bool", True),)], test, turn)
    return access.number(handed[0][0])


def _combined(w: KernelText, kind: str, type_: Scalar, old: str, value: str) -> str:
    if kind in ("add", "sub"):
        return w.each("OpFAdd" if kind == "add" else "OpFSub", type_, (old,), (value,))[0]
    if kind in ("min", "max"):
        return extreme(w, kind, type_, (old,), (value,))[0]
    one, zero = w.splat(1, type_), w.splat(0, type_)
    if kind == "inc":
        over = compare(w, "ge", type_, (old,), (value,))
        return select(w, type_, over, zero, w.each("OpIAdd", type_, (old,), one))[0]
    over = w.each("OpLogicalOr", Scalar(bool_), compare(w, "eq", type_, (old,), zero), compare(w, "gt", type_, (old,), (value,)))
    return select(w, type_, over, (value,), w.each("OpISub", type_, (old,), one))[0]


def _atomic_load(w: KernelText, op: Op) -> Sequence[Parts]:
    access = _SpirvAccess(w, op)
    return [(access.number(w.let("OpAtomicLoad", access.type, access.place(), access.scope, access.order)),)]


def _atomic_store(w: KernelText, op: Op) -> Sequence[Parts]:
    access = _SpirvAccess(w, op)
    w.line(f"OpAtomicStore {access.place()} {access.scope} {access.order} {access.bits(access.values[0])}")
    return []


ATOMICS: dict[str, Handler] = {"atomic": _atomic, "atomic_load": _atomic_load, "atomic_store": _atomic_store}
