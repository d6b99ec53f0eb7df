"""Atomics on a CPU: LLVM text.

In: a function writer, the op and its operands' names. Out: the old value's name. Global memory is updated by the CPU's own atomic
instructions, whatever the scope: other blocks run on other cores. Shared and local memory belong to the one thread that runs the block,
so a read and a write are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.llvm.emitter import FunctionWriter, literal, memory_type
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import BOOL, Scalar, Tensor

_DIRECT = {"add": "add", "sub": "sub", "and": "and", "or": "or", "xor": "xor", "exchange": "xchg"}
"""Kinds of integers that are one instruction's."""
_ORDERS = {"relaxed": "monotonic", "acquire": "acquire", "release": "release", "acq_rel": "acq_rel", "seq_cst": "seq_cst"}


def emit(w: FunctionWriter, op: Op, operands: Sequence[str]) -> list[str]:
    """Any op of them."""
    if op.opcode == "atomic":
        return [atomic(w, op, operands)]
    if op.opcode == "atomic_load":
        return [atomic_load(w, op, operands)]
    atomic_store(w, op, operands)
    return []


def atomic(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    memory = op.operands[0]
    assert isinstance(memory.type, Tensor)
    rank, dtype, kind = memory.type.rank, memory.type.dtype, str(op.attrs["kind"])
    where = w.element_pointer(memory, operands[1 : 1 + rank])
    given = list(operands[1 + rank :])
    if memory.type.space != "global":
        old = w.load(op, operands)
        _keep(w, op, where, _next(w, op, old, given))
        return old
    order = _ORDERS.get(str(op.attrs.get("order", "relaxed")), "seq_cst")
    if kind in _DIRECT and dtype.is_int:
        return w.let(f"atomicrmw {_DIRECT[kind]} ptr {where}, {dtype.llvm} {given[0]} {order}")
    if kind in ("min", "max") and dtype.is_int:
        sign = "" if dtype.kind == "i" else "u"
        return w.let(f"atomicrmw {sign}{kind} ptr {where}, {dtype.llvm} {given[0]} {order}")
    return _by_exchange(w, op, where, given, order)


def atomic_load(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    memory = op.operands[0]
    assert isinstance(memory.type, Tensor)
    dtype, where = memory.type.dtype, w.element_pointer(memory, operands[1:])
    bits = f"i{8 * dtype.itemsize}"
    order = "acquire" if op.attrs.get("order") == "acquire" else "monotonic"
    return _from_bits(w, w.let(f"load atomic {bits}, ptr {where} {order}, align {dtype.itemsize}"), bits, dtype.llvm)


def atomic_store(w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
    memory = op.operands[0]
    assert isinstance(memory.type, Tensor)
    dtype, where = memory.type.dtype, w.element_pointer(memory, operands[1:-1])
    bits = f"i{8 * dtype.itemsize}"
    order = "release" if op.attrs.get("order") == "release" else "monotonic"
    w.line(f"store atomic {bits} {_to_bits(w, operands[-1], bits, dtype.llvm)}, ptr {where} {order}, align {dtype.itemsize}")


def _by_exchange(w: FunctionWriter, op: Op, where: str, given: Sequence[str], order: str) -> str:
    """Compute what is next until nobody has changed the element meanwhile."""
    assert isinstance(op.operands[0].type, Tensor)
    dtype = op.operands[0].type.dtype
    bits, element = f"i{8 * dtype.itemsize}", dtype.llvm
    loop, done = w.new_label("again"), w.new_label("swapped")
    first = w.let(f"load atomic {bits}, ptr {where} monotonic, align {dtype.itemsize}")
    entry = w.label
    w.line(f"br label %{loop}")
    w.open_label(loop)
    seen, found = w.fresh("seen"), w.fresh("found")
    w.line(f"{seen} = phi {bits} [ {first}, %{entry} ], [ {found}, %{loop} ]")
    old = _from_bits(w, seen, bits, element)
    following = _to_bits(w, _next(w, op, old, given), bits, element)
    pair = w.let(f"cmpxchg ptr {where}, {bits} {seen}, {bits} {following} {order} monotonic")
    w.line(f"{found} = extractvalue {{ {bits}, i1 }} {pair}, 0")
    w.line(f"br i1 {w.let(f'extractvalue {{ {bits}, i1 }} {pair}, 1')}, label %{done}, label %{loop}")
    w.open_label(done)
    return old


def _from_bits(w: FunctionWriter, value: str, bits: str, element: str) -> str:
    if bits == element:
        return value
    return w.let(f"trunc {bits} {value} to i1") if element == "i1" else w.let(f"bitcast {bits} {value} to {element}")


def _to_bits(w: FunctionWriter, value: str, bits: str, element: str) -> str:
    if bits == element:
        return value
    return w.let(f"zext i1 {value} to {bits}") if element == "i1" else w.let(f"bitcast {element} {value} to {bits}")


def _next(w: FunctionWriter, op: Op, old: str, given: Sequence[str]) -> str:
    """What an update leaves in memory."""
    assert isinstance(op.operands[0].type, Tensor)
    dtype, kind = op.operands[0].type.dtype, str(op.attrs["kind"])
    element, type_ = dtype.llvm, Scalar(dtype)

    def compute(opcode: str, a: str, b: str, result: Scalar = type_) -> str:
        return w.elementwise(Op(opcode, (Value(type_), Value(type_)), (Value(result),), span=op.span), (a, b))

    def choose(condition: str, a: str, b: str) -> str:
        return w.let(f"select i1 {condition}, {element} {a}, {element} {b}")

    if kind == "exchange":
        return given[0]
    if kind == "cas":
        bits = f"i{8 * dtype.itemsize}"
        same = w.let(f"icmp eq {bits} {_to_bits(w, old, bits, element)}, {_to_bits(w, given[0], bits, element)}")
        return choose(same, given[1], old)
    zero, one = literal(0, dtype), literal(1, dtype)
    if kind == "inc":
        return choose(compute("ge", old, given[0], BOOL), zero, compute("add", old, one))
    if kind == "dec":
        wraps = w.let(f"or i1 {compute('eq', old, zero, BOOL)}, {compute('gt', old, given[0], BOOL)}")
        return choose(wraps, given[0], compute("sub", old, one))
    return compute(kind, old, given[0])


def _keep(w: FunctionWriter, op: Op, where: str, value: str) -> None:
    assert isinstance(op.operands[0].type, Tensor)
    dtype = op.operands[0].type.dtype
    if dtype.is_bool:
        value = w.let(f"zext i1 {value} to i8")
    w.line(f"store {memory_type(dtype)} {value}, ptr {where}, align {dtype.itemsize}")
