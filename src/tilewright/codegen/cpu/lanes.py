"""Lanes of vecs on a CPU: LLVM text for gathers, scatters, masked accesses, masks as bits and rearrangements.

In: a function writer, the op and its operands' names. Out: the names of the results, or None for ops that are not of `ir.ops_lanes`. LLVM makes
instructions of these where the CPU has them, and one access after another where it has not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import DType
from tilewright.codegen.llvm.emitter import FunctionWriter, llvm_type, memory_type
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Scalar, Tensor, Vec, dtype_of

Handler = Callable[[FunctionWriter, Op, Sequence[str]], str]
_SMALL = 1 << 31
"""Bytes of a tensor whose offsets fit 32 bits: twice as many lanes of them fit a register."""


def emit(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str] | None:
    if op.opcode in ("scatter", "store_lanes"):
        _write(w, op, operands)
        return []
    handler = _HANDLERS.get(op.opcode)
    return None if handler is None else [handler(w, op, operands)]


def _suffix(dtype: str) -> str:
    return {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}.get(dtype, dtype)


def _word(dtype: DType) -> str:
    """The type as which an element is moved: masked moves of short floats are no instructions, those of short integers are."""
    return "i16" if dtype.is_float and dtype.itemsize == 2 else memory_type(dtype)


def _addresses(w: FunctionWriter, memory: Value, indices: Sequence[Value], names: Sequence[str], width: int) -> str:
    """A vec of pointers."""
    tensor = memory.type
    assert isinstance(tensor, Tensor)
    extents = [extent.constant for extent in tensor.shape]
    count = 1
    for extent in extents:
        count *= extent if extent is not None else _SMALL
    kind = f"<{width} x i64>"
    uniform, varying = "", ""
    for value, name, stride in zip(indices, names, tensor.strides, strict=True):
        if stride.constant == 0:
            continue
        step = w.sizes[stride]
        if isinstance(value.type, Scalar):
            part = name if stride.constant == 1 else w.let(f"mul nsw i64 {name}, {step}")
            uniform = w.let(f"add nsw i64 {uniform}, {part}") if uniform else part
        else:
            if stride.constant == 1:
                part = name
            else:
                part = w.let(f"mul nsw {kind} {name}, {_splat(w, step, width)}")
            varying = w.let(f"add nsw {kind} {varying}, {part}") if varying else part
    base, element = w.names[memory], memory_type(tensor.dtype)
    if uniform:
        base = w.let(f"getelementptr {element}, ptr {base}, i64 {uniform}")
    if not varying:
        one = w.let(f"insertelement <{width} x ptr> poison, ptr {base}, i64 0")
        return w.let(f"shufflevector <{width} x ptr> {one}, <{width} x ptr> poison, <{width} x i32> zeroinitializer")
    if count * tensor.dtype.itemsize < _SMALL:
        kind = f"<{width} x i32>"
        varying = w.let(f"trunc <{width} x i64> {varying} to {kind}")
    return w.let(f"getelementptr {element}, ptr {base}, {kind} {varying}")


def _splat(w: FunctionWriter, scalar: str, width: int) -> str:
    if not scalar.startswith("%"):
        return f"splat (i64 {scalar})"
    one = w.let(f"insertelement <{width} x i64> poison, i64 {scalar}, i64 0")
    return w.let(f"shufflevector <{width} x i64> {one}, <{width} x i64> poison, <{width} x i32> zeroinitializer")


def _read(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    result, memory = op.results[0].type, op.operands[0]
    assert isinstance(result, Vec) and isinstance(memory.type, Tensor)
    dtype, width, rank = result.dtype, result.width, memory.type.rank
    element = _word(dtype)
    stored = f"<{width} x {element}>"
    mask = (f"<{width} x i1>", operands[-1])
    if op.opcode == "gather":
        where = _addresses(w, memory, op.operands[1 : 1 + rank], operands[1 : 1 + rank], width)
        name = f"llvm.masked.gather.v{width}{_suffix(element)}.v{width}p0"
        pointer = f"<{width} x ptr> align {dtype.itemsize}"
    else:
        where = w.element_pointer(memory, operands[1 : 1 + rank])
        name, pointer = f"llvm.masked.load.v{width}{_suffix(element)}.p0", f"ptr align {dtype.itemsize}"
    value = w.call(stored, name, (pointer, where), mask, (stored, "zeroinitializer"))
    if dtype.is_bool:
        return w.let(f"icmp ne {stored} {value}, zeroinitializer")
    return value if element == memory_type(dtype) else w.let(f"bitcast {stored} {value} to {llvm_type(result)}")


def _write(w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
    memory, given = op.operands[0], op.operands[-2].type
    assert isinstance(given, Vec) and isinstance(memory.type, Tensor)
    dtype, width, rank = given.dtype, given.width, memory.type.rank
    element, value = _word(dtype), operands[-2]
    stored = f"<{width} x {element}>"
    if dtype.is_bool:
        value = w.let(f"zext {llvm_type(given)} {value} to {stored}")
    elif element != memory_type(dtype):
        value = w.let(f"bitcast {llvm_type(given)} {value} to {stored}")
    mask = (f"<{width} x i1>", operands[-1])
    if op.opcode == "scatter":
        where = _addresses(w, memory, op.operands[1 : 1 + rank], operands[1 : 1 + rank], width)
        name = f"llvm.masked.scatter.v{width}{_suffix(element)}.v{width}p0"
        pointer = f"<{width} x ptr> align {dtype.itemsize}"
    else:
        where = w.element_pointer(memory, operands[1 : 1 + rank])
        name, pointer = f"llvm.masked.store.v{width}{_suffix(element)}.p0", f"ptr align {dtype.itemsize}"
    w.call("void", name, (stored, value), (pointer, where), mask)


def _lane_ids(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    result = op.results[0].type
    assert isinstance(result, Vec)
    return "<" + ", ".join(f"{result.dtype.llvm} {lane}" for lane in range(result.width)) + ">"


def _mask_bits(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    mask = op.operands[0].type
    assert isinstance(mask, Vec)
    bits = w.let(f"bitcast {llvm_type(mask)} {operands[0]} to i{mask.width}")
    word = dtype_of(op.results[0].type)
    return bits if mask.width == word.bits else w.let(f"zext i{mask.width} {bits} to {word.llvm}")


def _rearrange(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    kind, lanes = llvm_type(op.operands[0].type), op.attrs["lanes"]
    assert isinstance(lanes, tuple)
    if op.attrs.get("table"):
        table = "<" + ", ".join(f"i8 {lane}" for lane in lanes) + ">"
        return w.call(kind, f"llvm.aarch64.neon.tbl{len(operands)}.v16i8", *((kind, value) for value in operands), (kind, table))
    places = ", ".join(f"i32 {lane}" for lane in lanes)
    second = operands[1] if len(operands) > 1 else "poison"
    return w.let(f"shufflevector {kind} {operands[0]}, {kind} {second}, <{len(lanes)} x i32> <{places}>")


def _compress(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    result = op.results[0].type
    assert isinstance(result, Vec)
    stored, mask = memory_type(result.dtype, result.width), f"<{result.width} x i1>"
    value = operands[0]
    if result.dtype.is_bool:
        value = w.let(f"zext {mask} {value} to {stored}")
    name = f"llvm.experimental.vector.compress.v{result.width}{_suffix(memory_type(result.dtype))}"
    value = w.call(stored, name, (stored, value), (mask, operands[1]), (stored, "zeroinitializer"))
    return w.let(f"icmp ne {stored} {value}, zeroinitializer") if result.dtype.is_bool else value


def _insert(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    kind, element = llvm_type(op.operands[0].type), llvm_type(op.operands[1].type)
    return w.let(f"insertelement {kind} {operands[0]}, {element} {operands[1]}, i64 {op.attrs['lane']}")


def _fold(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    """Halves are combined until one lane is left, in the order the op table gives."""
    whole = op.operands[0].type
    assert isinstance(whole, Vec)
    value, width, dtype = operands[0], whole.width, whole.dtype
    if op.attrs.get("together"):
        # Of integers any order gives the same.
        sign = ("s" if dtype.kind == "i" else "u") if op.attrs["kind"] in ("min", "max") else ""
        return w.call(dtype.llvm, f"llvm.vector.reduce.{sign}{op.attrs['kind']}.v{width}i{dtype.bits}", (f"<{width} x {dtype.llvm}>", value))
    while width > 1:
        kind, half = f"<{width} x {dtype.llvm}>", width // 2
        parts = []
        for start in (0, half):
            if half == 1:
                parts.append(w.let(f"extractelement {kind} {value}, i64 {start}"))
            else:
                lanes = ", ".join(f"i32 {start + k}" for k in range(half))
                parts.append(w.let(f"shufflevector {kind} {value}, {kind} poison, <{half} x i32> <{lanes}>"))
        value, width = _combine(w, op, parts, half), half
    return value


def _dot_lanes(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    """The instruction that the op names; without one, LLVM's partial sums of widened products."""
    sums, bytes_ = op.operands[0].type, op.operands[1].type
    assert isinstance(sums, Vec) and isinstance(bytes_, Vec)
    wide, narrow = f"<{bytes_.width} x i32>", f"<{bytes_.width} x i8>"
    unit = op.attrs.get("unit")
    if unit in ("vnni", "maddubs") and bytes_.width == 16:
        return _x86_dot(w, op, operands, unit == "vnni")
    if unit == "sdot":
        parts = [(f"<{sums.width} x i32>", operands[0]), (narrow, operands[1]), (narrow, operands[2])]
        return w.call(f"<{sums.width} x i32>", f"llvm.aarch64.neon.sdot.v{sums.width}i32.v{bytes_.width}i8", *parts)
    a, b = (w.let(f"sext {narrow} {value} to {wide}") for value in operands[1:])
    product = w.let(f"mul {wide} {a}, {b}")
    name = f"llvm.vector.partial.reduce.add.v{sums.width}i32.v{bytes_.width}i32"
    return w.call(f"<{sums.width} x i32>", name, (f"<{sums.width} x i32>", operands[0]), (wide, product))


def _x86_dot(w: FunctionWriter, op: Op, operands: Sequence[str], vnni: bool) -> str:
    """The first factor of x86's instructions is unsigned: where it may be negative, its sign goes to the second one."""
    sums, a, b = operands
    bytes_, wide = "<16 x i8>", "<4 x i32>"
    if not op.attrs.get("positive"):
        b = w.call(bytes_, "llvm.x86.ssse3.psign.b.128", (bytes_, b), (bytes_, a))
        a = w.call(bytes_, "llvm.abs.v16i8", (bytes_, a), ("i1", "false"))
    if vnni:
        return w.call(wide, "llvm.x86.avx512.vpdpbusd.128", (wide, sums), (bytes_, a), (bytes_, b))
    pairs = w.call("<8 x i16>", "llvm.x86.ssse3.pmadd.ub.sw.128", (bytes_, a), (bytes_, b))
    return w.let(f"add {wide} {sums}, {w.call(wide, 'llvm.x86.sse2.pmadd.wd', ('<8 x i16>', pairs), ('<8 x i16>', 'splat (i16 1)'))}")


def _from_bits(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    return w.let(f"bitcast i32 {operands[0]} to {llvm_type(op.results[0].type)}")


def _as_lanes(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    return w.let(f"bitcast {llvm_type(op.operands[0].type)} {operands[0]} to {llvm_type(op.results[0].type)}")


def _join_halves(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    """Arm's `sli` and `sri`, which LLVM does not find where it knows some bits."""
    kind, low = llvm_type(op.operands[0].type), op.attrs["side"] == "low"
    a, b = operands
    if op.attrs.get("arm") and kind == "<16 x i8>":
        return w.call(kind, f"llvm.aarch64.neon.{'vsli' if low else 'vsri'}.v16i8", (kind, a), (kind, b), ("i32", "4"))
    kept = w.let(f"and {kind} {a}, splat (i8 {15 if low else -16})")
    moved = w.let(f"{'shl' if low else 'lshr'} {kind} {b}, splat (i8 4)")
    return w.let(f"or {kind} {kept}, {moved}")


def _combine(w: FunctionWriter, op: Op, parts: Sequence[str], width: int) -> str:
    dtype, kind = dtype_of(op.operands[0].type), str(op.attrs["kind"])
    type_ = Scalar(dtype) if width == 1 else Vec(dtype, width)
    a, b = Value(type_), Value(type_)
    return w.elementwise(Op(kind, (a, b), (Value(type_),), span=op.span), parts)


_HANDLERS: dict[str, Handler] = {
    "gather": _read, "load_lanes": _read, "lane_ids": _lane_ids, "mask_bits": _mask_bits, "rearrange": _rearrange, "compress": _compress, "insert": _insert,
    "fold": _fold, "dot_lanes": _dot_lanes, "from_bits": _from_bits, "as_lanes": _as_lanes, "join_halves": _join_halves,
}  # fmt: skip
