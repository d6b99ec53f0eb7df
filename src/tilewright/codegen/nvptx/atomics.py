"""Atomic accesses -> LLVM text for NVIDIA GPUs.

In: `atomic`, `atomic_load` or `atomic_store`, the names of its operands and the writer of the function. Out: the names of its results.

LLVM's `atomicrmw` drops scope and order on this target: everything becomes relaxed and for the whole device. It is used for just
that, where LLVM may then optimise around it; everything else is inline assembly. What the device has no instruction for is a loop
around compare-and-swap, between fences where an order is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, bf16, f16, f32, f64, i32, i64, u32, u64
from tilewright.base.errors import TargetLimit
from tilewright.base.target import Target
from tilewright.codegen.llvm.emitter import FunctionWriter, literal, llvm_type
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Scalar, Tensor, Vec, dtype_of

CLUSTER = "ptr addrspace(7)"
SCOPES = {"block": "cta", "cluster": "cluster", "device": "gpu", "system": "sys"}
_LETTERS = {16: "h", 32: "r", 64: "l", 128: "q"}
_SIGNED = {i32: "s32", u32: "u32", i64: "s64", u64: "u64"}
_ADDED = {i32: "u32", u32: "u32", i64: "u64", u64: "u64", f32: "f32", f64: "f64", f16: "noftz.f16", bf16: "noftz.bf16"}
_RMW = {"and": "and", "or": "or", "xor": "xor", "exchange": "xchg", "inc": "uinc_wrap", "dec": "udec_wrap"}
_TURNS, _DELAY, _LONGEST = 32, 32, 13
"""A thread that has failed to change an element more often than this stays away for so many nanoseconds, doubled at most so often."""
_PTX_128, _PTX_128_EVERYWHERE, _PTX_VECTOR = 83, 84, 81
"""The PTX versions, times ten, that have accesses of 128 bits, those of the whole system, and additions of vectors of f32."""


def ptx_version(op: Op, target: Target) -> int:
    """The PTX version, times ten, without which the access cannot be spelled; 0 where any will do."""
    if op.opcode not in ("atomic", "atomic_load", "atomic_store"):
        return 0
    type_ = op.results[0].type if op.results else op.operands[-1].type
    if not isinstance(type_, Vec):
        return 0
    if op.opcode == "atomic" and op.attrs["kind"] == "add":
        return _PTX_VECTOR if target.sm >= 90 else 0
    everywhere = op.attrs.get("scope") == "system" or op.attrs.get("order") == "volatile"
    return (_PTX_128_EVERYWHERE if everywhere else _PTX_128) if _bits(type_) == 128 else 0


def _bits(type_: Scalar | Vec) -> int:
    return type_.dtype.bits * (type_.width if isinstance(type_, Vec) else 1)


class _Access:
    """Where an op accesses memory, and how it is spelled."""

    def __init__(self, w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> None:
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        self.w, self.op, self.target, self.dtype, self.space = w, op, target, memory.dtype, memory.space
        self.pointer = w.dialect.pointer(memory.space)
        self.where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
        self.values = list(operands[1 + memory.rank :])
        self.order = str(op.attrs.get("order", "relaxed"))
        remote = op.opcode == "atomic_remote"
        scope = str(op.attrs.get("scope", "cluster" if remote else "device"))
        if remote:
            self.space, self.pointer = "shared::cluster", CLUSTER
            self.where, self.values = remote_place(w, op, self.where, operands[2]), self.values[1:]
        if scope == "cluster" and "cluster" not in target.features:
            raise TargetLimit.at("TW020", f"{target.name} cannot do {op.opcode} for a cluster: it has no cluster", op.span)
        self.scope = SCOPES[scope]

    def address(self) -> tuple[str, str]:
        """The operand of inline assembly that is the address, and its constraint."""
        if self.space == "global":
            return f"{self.pointer} {self.where}", "l"
        return f"i32 {self.w.let(f'ptrtoint {self.pointer} {self.where} to i32')}", "r"

    def words(self) -> str:
        """Order, scope and space as the instruction has them."""
        return f"{self.order}.{self.scope}.{self.space}"

    def fence(self, orders: Sequence[str]) -> None:
        if self.order in orders:
            self.w.line(f'call void asm sideeffect "fence.acq_rel.{self.scope};", "~{{memory}}"()')

    def assembly(self, text: str, result: str, letter: str, *operands: tuple[str, str]) -> str:
        """One instruction; in `text`, $0 is the result, $1 the address, then come the operands (typed values, constraints)."""
        where, kind = self.address()
        given = ", ".join([where, *(value for value, _ in operands)])
        constraints = ",".join([f"={letter}", kind, *(constraint for _, constraint in operands), "~{memory}"])
        return self.w.let(f'call {result} asm sideeffect "{text}", "{constraints}"({given})')


def as_integer(w: FunctionWriter, value: str, kind: str, bits: int) -> str:
    """A number's or vector's bits as one integer."""
    return value if kind == f"i{bits}" else w.let(f"bitcast {kind} {value} to i{bits}")


def from_integer(w: FunctionWriter, value: str, kind: str, bits: int) -> str:
    return value if kind == f"i{bits}" else w.let(f"bitcast i{bits} {value} to {kind}")


def remote_place(w: FunctionWriter, op: Op, where: str, rank: str) -> str:
    """The address of a place of shared memory in the block with that rank in the cluster; `rank` is the op's third operand."""
    dtype = dtype_of(op.operands[2].type)
    if dtype.bits != 32:
        rank = w.let(f"{'trunc' if dtype.bits > 32 else 'zext'} {dtype.llvm} {rank} to i32")
    return w.call(CLUSTER, "llvm.nvvm.mapa.shared.cluster", ("ptr addrspace(3)", where), ("i32", rank))


def atomic(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    access = _Access(w, op, operands, target)
    type_, kind = op.results[0].type, str(op.attrs["kind"])
    if isinstance(type_, Vec):
        return [_vector_add(access, type_) if kind == "add" else _wide(access, type_, kind)]
    if kind == "sub":
        kind, access.values[0] = "add", _negated(access)
    if kind == "cas":
        return [_compare_and_swap(access)]
    suffix = _native(kind, access.dtype, target)
    if not suffix:
        return [_loop(access, kind)]
    # In shared memory nobody but the block is there to see it.
    anywhere = (access.scope == "gpu" and access.space != "shared::cluster") or (
        access.space == "shared" and access.scope == "cta"
    )
    if access.order == "relaxed" and access.scope == "gpu" and access.space == "global" and kind != "exchange" and op.results[0] not in w.used:
        return [_reduction(access, kind, suffix)]
    if access.order == "relaxed" and anywhere:
        return [_rmw(access, kind)]
    return [_instruction(access, kind, suffix)]


def _negated(access: _Access) -> str:
    kind = access.dtype.llvm
    return access.w.let(f"fneg {kind} {access.values[0]}" if access.dtype.is_float else f"sub {kind} 0, {access.values[0]}")


def _native(kind: str, dtype: DType, target: Target) -> str:
    """The instruction's last words; empty where there is no such instruction."""
    if kind == "add":
        return "" if dtype is bf16 and target.sm < 90 else f"add.{_ADDED[dtype]}" if dtype in _ADDED else ""
    if kind in ("min", "max"):
        return f"{kind}.{_SIGNED[dtype]}" if dtype in _SIGNED else ""
    if kind in ("inc", "dec"):
        return f"{kind}.u32" if dtype is u32 else ""
    return f"{'exch' if kind == 'exchange' else kind}.b{dtype.bits}" if dtype.bits in (32, 64) else ""


def _rmw(access: _Access, kind: str) -> str:
    w, dtype = access.w, access.dtype
    number, integer = dtype.llvm, f"i{dtype.bits}"
    if kind == "exchange" and dtype.is_float:
        value = as_integer(w, access.values[0], number, dtype.bits)
        found = w.let(f"atomicrmw xchg {access.pointer} {access.where}, {integer} {value} monotonic")
        return from_integer(w, found, number, dtype.bits)
    word = _RMW.get(kind) or ("f" if dtype.is_float else "u" if dtype.kind == "u" and kind != "add" else "") + kind
    return w.let(f"atomicrmw {word} {access.pointer} {access.where}, {number} {access.values[0]} monotonic")


def _instruction(access: _Access, kind: str, suffix: str) -> str:
    w, dtype = access.w, access.dtype
    # Only additions look at a float as a number.
    floats = {f32: "f", f64: "d"}.get(dtype, "") if kind == "add" else ""
    number = dtype.llvm if floats else f"i{dtype.bits}"
    letter = floats or _LETTERS[dtype.bits]
    value = access.values[0] if floats else as_integer(w, access.values[0], dtype.llvm, dtype.bits)
    text = f"atom.{access.words()}.{suffix} $0, [$1], $2;"
    found = access.assembly(text, number, letter, (f"{number} {value}", letter))
    return found if floats else from_integer(w, found, dtype.llvm, dtype.bits)


def _reduction(access: _Access, kind: str, suffix: str) -> str:
    """Nobody asks for the old value. The assembler finds that out itself, but not where the kernel has a fence anywhere."""
    w, dtype = access.w, access.dtype
    floats = {f32: "f", f64: "d"}.get(dtype, "") if kind == "add" else ""
    value = access.values[0] if floats else as_integer(w, access.values[0], dtype.llvm, dtype.bits)
    where, letter = access.address()
    text, number = f"red.{access.words()}.{suffix} [$0], $1;", dtype.llvm if floats else f"i{dtype.bits}"
    w.line(f'call void asm sideeffect "{text}", "{letter},{floats or _LETTERS[dtype.bits]},~{{memory}}"({where}, {number} {value})')
    return "poison"


def _compare_and_swap(access: _Access) -> str:
    w, dtype = access.w, access.dtype
    expected, new = (as_integer(w, v, dtype.llvm, dtype.bits) for v in access.values)
    return from_integer(w, _swap(access, expected, new, access.words()), dtype.llvm, dtype.bits)


def _swap(access: _Access, expected: str, new: str, words: str) -> str:
    bits = access.dtype.bits
    number, letter = f"i{bits}", _LETTERS[bits]
    text = f"atom.{words}.cas.b{bits} $0, [$1], $2, $3;"
    return access.assembly(text, number, letter, (f"{number} {expected}", letter), (f"{number} {new}", letter))


def _loop(access: _Access, kind: str) -> str:
    """Read, compute, and swap if nobody was faster. What would not change is not written."""
    w, dtype = access.w, access.dtype
    bits, number = dtype.bits, f"i{dtype.bits}"
    access.fence(("release", "acq_rel"))
    words = f"relaxed.{access.scope}.{access.space}"
    first = access.assembly(f"ld.{words}.b{bits} $0, [$1];", number, _LETTERS[bits])
    again, swap, retry, done = (w.new_label(name) for name in ("again", "swap", "retry", "swapped"))
    before, old, failures = w.label, w.fresh("old"), w.fresh("failures")
    w.line(f"br label %{again}")
    w.open_label(again)
    place = len(w.lines)
    w.lines += ["", ""]
    value = _next(access, kind, from_integer(w, old, dtype.llvm, bits))
    new = as_integer(w, value, dtype.llvm, bits)
    assert w.label == again, "a step of a compare-and-swap loop is straight-line code"
    w.line(f"br i1 {w.let(f'icmp eq {number} {new}, {old}')}, label %{done}, label %{swap}")
    w.open_label(swap)
    found = _swap(access, old, new, words)
    w.line(f"br i1 {w.let(f'icmp eq {number} {found}, {old}')}, label %{done}, label %{retry}")
    w.open_label(retry)
    # The lanes of one warp take turns. Where very many threads want one element, each would wait behind the attempts of all others: those
    # that have failed often stay away, longer each time.
    following = w.let(f"add i32 {failures}, 1")
    beyond = w.call("i32", "llvm.usub.sat.i32", ("i32", failures), ("i32", str(_TURNS)))
    shift = w.call("i32", "llvm.umin.i32", ("i32", beyond), ("i32", str(_LONGEST)))
    often = w.let(f"icmp ne i32 {beyond}, 0")
    delay = w.let(f"select i1 {often}, i32 {w.let(f'shl i32 {_DELAY}, {shift}')}, i32 0")
    w.call("void", "llvm.nvvm.nanosleep", ("i32", delay))
    current = access.assembly(f"ld.{words}.b{bits} $0, [$1];", number, _LETTERS[bits])
    w.line(f"br label %{again}")
    location = w.dialect.location(access.op)
    w.lines[place] = f"  {old} = phi {number} [ {first}, %{before} ], [ {current}, %{retry} ]{location}"
    w.lines[place + 1] = f"  {failures} = phi i32 [ 0, %{before} ], [ {following}, %{retry} ]{location}"
    w.open_label(done)
    access.fence(("acquire", "acq_rel"))
    return from_integer(w, old, dtype.llvm, bits)


def _next(access: _Access, kind: str, old: str) -> str:
    w, dtype, value = access.w, access.dtype, access.values[0]
    number = dtype.llvm
    if kind == "exchange":
        return value
    if kind in ("inc", "dec"):
        sign = "s" if dtype.kind == "i" else "u"
        one, zero = literal(1, dtype), literal(0, dtype)
        if kind == "inc":
            ended = w.let(f"icmp {sign}ge {number} {old}, {value}")
            return w.let(f"select i1 {ended}, {number} {zero}, {number} {w.let(f'add {number} {old}, {one}')}")
        low, high = w.let(f"icmp eq {number} {old}, {zero}"), w.let(f"icmp {sign}gt {number} {old}, {value}")
        ended = w.let(f"or i1 {low}, {high}")
        return w.let(f"select i1 {ended}, {number} {value}, {number} {w.let(f'sub {number} {old}, {one}')}")
    return elementwise(w, access.op, kind, dtype, old, value)


def elementwise(w: FunctionWriter, op: Op, opcode: str, dtype: DType, *operands: str) -> str:
    """The result of an elementwise op on these names."""
    inputs = tuple(Value(Scalar(dtype)) for _ in operands)
    w.names.update(zip(inputs, operands, strict=True))
    # Of zeros, -0 is the smaller.
    (result,) = w.op(Op(opcode, inputs, (Value(Scalar(dtype)),), {"hardware": True}, span=op.span))
    return result


def _vector_add(access: _Access, type_: Vec) -> str:
    w, dtype, width, kind = access.w, type_.dtype, type_.width, llvm_type(type_)
    parts = [w.let(f"extractelement {kind} {access.values[0]}, i64 {lane}") for lane in range(width)]
    if access.target.sm >= 90:
        letter, number = ("f", "float") if dtype is f32 else ("h", "i16")
        if dtype is not f32:
            parts = [as_integer(w, part, dtype.llvm, 16) for part in parts]
        outputs, inputs = (", ".join(f"${k + first}" for k in range(width)) for first in (0, width + 1))
        text = f"atom.{access.words()}.add.v{width}.{_ADDED[dtype]} {{{outputs}}}, [${width}], {{{inputs}}};"
        constraints = ",".join([*[f"={letter}"] * width, "l", *[letter] * width, "~{memory}"])
        result = "{ " + ", ".join([number] * width) + " }"
        given = ", ".join([access.address()[0], *(f"{number} {part}" for part in parts)])
        both = w.let(f'call {result} asm sideeffect "{text}", "{constraints}"({given})')
        found = [from_integer(w, w.let(f"extractvalue {result} {both}, {k}"), dtype.llvm, 16) if dtype is not f32
                 else w.let(f"extractvalue {result} {both}, {k}") for k in range(width)]  # fmt: skip
    else:
        found = _single_adds(access, dtype, parts)
    value = "poison"
    for lane, one in enumerate(found):
        value = w.let(f"insertelement {kind} {value}, {dtype.llvm} {one}, i64 {lane}")
    return value


def _single_adds(access: _Access, dtype: DType, parts: Sequence[str]) -> list[str]:
    """The neighbours one by one, where no instruction takes them together."""
    access.fence(("release", "acq_rel"))
    order, start = access.order, access.where
    access.order = "relaxed"
    found: list[str] = []
    for lane, part in enumerate(parts):
        access.where = access.w.let(f"getelementptr inbounds {dtype.llvm}, {access.pointer} {start}, i64 {lane}")
        access.values = [part]
        suffix = _native("add", dtype, access.target)
        found.append(_instruction(access, "add", suffix) if suffix else _loop(access, "add"))
    access.order = order
    access.fence(("acquire", "acq_rel"))
    return found


def _wide(access: _Access, type_: Vec, kind: str) -> str:
    """128 bits at once."""
    if access.target.sm < 90:
        raise TargetLimit.at(
            "TW020", f"{access.target.name} cannot do atomic {kind} of 128 bits: that needs sm_90", access.op.span
        )
    w, vector = access.w, llvm_type(type_)
    values = [(f"i128 {as_integer(w, v, vector, 128)}", "q") for v in access.values]
    places = ", ".join(f"${2 + k}" for k in range(len(values)))
    word = "exch" if kind == "exchange" else "cas"
    return from_integer(
        w, access.assembly(f"atom.{access.words()}.{word}.b128 $0, [$1], {places};", "i128", "q", *values), vector, 128
    )


def _access_words(access: _Access) -> str:
    return f"volatile.{access.space}" if access.order == "volatile" else access.words()


def atomic_load(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    access = _Access(w, op, operands, target)
    type_ = op.results[0].type
    assert isinstance(type_, Scalar | Vec)
    bits = _bits(type_)
    register = max(bits, 16)
    found = access.assembly(f"ld.{_access_words(access)}.b{bits} $0, [$1];", f"i{register}", _LETTERS[register])
    if bits == 8:
        found = w.let(f"trunc i16 {found} to i8")
    return [from_integer(w, found, llvm_type(type_), bits)]


def atomic_store(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    access = _Access(w, op, operands, target)
    type_ = op.operands[-1].type
    assert isinstance(type_, Scalar | Vec)
    bits = _bits(type_)
    register = max(bits, 16)
    value = as_integer(w, access.values[0], llvm_type(type_), bits)
    if bits == 8:
        value = w.let(f"zext i8 {value} to i16")
    where, kind = access.address()
    text = f"st.{_access_words(access)}.b{bits} [$0], $1;"
    w.line(f'call void asm sideeffect "{text}", "{kind},{_LETTERS[register]},~{{memory}}"({where}, i{register} {value})')
    return []
