"""Ops of the thread stage -> SPIR-V instructions: a function for each.

In: the writer of a kernel's function and the op. Out: the parts of its results. `HANDLERS` is the table; what is not in it is refused before code
is made (`passes/late/check_target.py`), with target, construct and line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.artifact import FAILURE_EXTENT, FAILURE_INDEX
from tilewright.base.dtypes import DType, bool_, f16, f32, i32, u32
from tilewright.base.sizes import Size
from tilewright.codegen.spirv.division import floor_divide
from tilewright.codegen.spirv.emitter import KernelText, Parts, width_of
from tilewright.codegen.spirv.module import OPENCL
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Tensor, Type, dtype_of, with_dtype

Handler = Callable[[KernelText, Op], Sequence[Parts]]


def _given(w: KernelText, op: Op) -> list[Parts]:
    return [w.names[v] for v in op.operands]


def _truth(type_: Type) -> Type:
    return with_dtype(type_, bool_)


# -- elementwise ------------------------------------------------------------------------------------------------------

_ARITHMETIC = {
    "add": ("OpIAdd", "OpFAdd", "OpLogicalOr"), "sub": ("OpISub", "OpFSub", ""), "mul": ("OpIMul", "OpFMul", "OpLogicalAnd"), "div": ("OpSDiv", "OpFDiv", ""),
    "and": ("OpBitwiseAnd", "", "OpLogicalAnd"), "or": ("OpBitwiseOr", "", "OpLogicalOr"), "xor": ("OpBitwiseXor", "", "OpLogicalNotEqual"),
}  # fmt: skip
"""For integers, floats and bools."""


def _arithmetic(w: KernelText, op: Op) -> Sequence[Parts]:
    type_ = op.operands[0].type
    integer, number, truth = _ARITHMETIC[op.opcode]
    word = number if dtype_of(type_).is_float else truth if dtype_of(type_).is_bool else integer
    return [w.each(word, type_, *_given(w, op), decorate=dtype_of(type_).is_float)]


_COMPARE = {
    "eq": ("OpIEqual", "OpIEqual", "OpFOrdEqual"), "ne": ("OpINotEqual", "OpINotEqual", "OpFUnordNotEqual"),
    "lt": ("OpSLessThan", "OpULessThan", "OpFOrdLessThan"), "le": ("OpSLessThanEqual", "OpULessThanEqual", "OpFOrdLessThanEqual"),
    "gt": ("OpSGreaterThan", "OpUGreaterThan", "OpFOrdGreaterThan"), "ge": ("OpSGreaterThanEqual", "OpUGreaterThanEqual", "OpFOrdGreaterThanEqual"),
}  # fmt: skip
"""For signed and unsigned integers, and floats."""


def compare(w: KernelText, name: str, type_: Type, a: Parts, b: Parts) -> Parts:
    dtype = dtype_of(type_)
    if dtype.is_bool and name in ("eq", "ne"):
        return w.each("OpLogicalEqual" if name == "eq" else "OpLogicalNotEqual", type_, a, b)
    if dtype.is_bool:  # false is below true
        low, high = (a, b) if name in ("lt", "le") else (b, a)
        inverted = w.each("OpLogicalNot", type_, low)
        return w.each("OpLogicalAnd" if name in ("lt", "gt") else "OpLogicalOr", type_, inverted, high)
    word = _COMPARE[name][2 if dtype.is_float else 0 if dtype.kind == "i" else 1]
    return w.each(word, _truth(type_), a, b)


def _compare(w: KernelText, op: Op) -> Sequence[Parts]:
    return [compare(w, op.opcode, op.operands[0].type, *_given(w, op))]


def is_nan(w: KernelText, type_: Type, value: Parts) -> Parts:
    """For OpenCL a comparison: translators make a call of the instruction."""
    return w.each("OpFUnordNotEqual", _truth(type_), value, value) if w.flavour is OPENCL else w.each("OpIsNan", _truth(type_), value)


def _isnan(w: KernelText, op: Op) -> Sequence[Parts]:
    return [is_nan(w, op.operands[0].type, w.names[op.operands[0]])]


def select(w: KernelText, type_: Type, condition: Parts, a: Parts, b: Parts) -> Parts:
    return w.each("OpSelect", type_, condition, a, b)


def _select(w: KernelText, op: Op) -> Sequence[Parts]:
    condition, a, b = _given(w, op)
    type_ = op.results[0].type
    if width_of(op.operands[0].type) != width_of(type_):
        condition = w.filled(condition[0], _truth(type_))
    return [select(w, type_, condition, a, b)]


def extreme(w: KernelText, name: str, type_: Type, a: Parts, b: Parts) -> Parts:
    """The smaller or the larger, NaN where either is."""
    dtype = dtype_of(type_)
    if dtype.is_bool:
        return w.each("OpLogicalAnd" if name == "min" else "OpLogicalOr", type_, a, b)
    found = select(w, type_, compare(w, "lt" if name == "min" else "gt", type_, a, b), a, b)
    return select(w, type_, is_nan(w, type_, a), a, found) if dtype.is_float else found


def _extreme(w: KernelText, op: Op) -> Sequence[Parts]:
    return [extreme(w, op.opcode, op.operands[0].type, *_given(w, op))]


def _pick(w: KernelText, op: Op) -> Sequence[Parts]:
    type_, (a, b) = op.operands[0].type, _given(w, op)
    return [select(w, type_, compare(w, "lt" if op.opcode == "smaller" else "gt", type_, a, b), a, b)]


def _divide(w: KernelText, op: Op) -> Sequence[Parts]:
    type_, (a, b) = op.operands[0].type, _given(w, op)
    dtype = dtype_of(type_)
    element = w.module.element(dtype)
    parts = zip(w.widths(type_), a, b, strict=True)
    return [tuple(floor_divide(w, x, y, element, width, dtype.kind == "i", op.opcode == "mod") for width, x, y in parts)]


def _shift(w: KernelText, op: Op) -> Sequence[Parts]:
    type_, (value, count) = op.operands[0].type, _given(w, op)
    dtype = dtype_of(type_)
    count = w.each("OpBitwiseAnd", type_, count, w.splat(dtype.bits - 1, type_))
    word = "OpShiftLeftLogical" if op.opcode == "shl" else "OpShiftRightArithmetic" if dtype.kind == "i" else "OpShiftRightLogical"
    return [w.each(word, type_, value, count)]


def _negate(w: KernelText, op: Op) -> Sequence[Parts]:
    type_ = op.operands[0].type
    return [w.each("OpFNegate" if dtype_of(type_).is_float else "OpSNegate", type_, *_given(w, op))]


def _absolute(w: KernelText, op: Op) -> Sequence[Parts]:
    type_, (value,) = op.operands[0].type, _given(w, op)
    dtype = dtype_of(type_)
    if dtype.is_float:
        return [w.function("abs", type_, value)]
    if dtype.kind == "u" or dtype.is_bool:
        return [value]
    return [select(w, type_, compare(w, "lt", type_, value, w.splat(0, type_)), w.each("OpSNegate", type_, value), value)]


def _not(w: KernelText, op: Op) -> Sequence[Parts]:
    type_ = op.operands[0].type
    return [w.each("OpLogicalNot" if dtype_of(type_).is_bool else "OpNot", type_, *_given(w, op))]


def _function(w: KernelText, op: Op) -> Sequence[Parts]:
    found = w.function(op.opcode, op.operands[0].type, *_given(w, op))
    if w.flavour is not OPENCL and op.opcode == "fma":
        w.module.decorations += [f"OpDecorate {name} NoContraction" for name in found]
    return [found]


def _reciprocal(w: KernelText, op: Op) -> Sequence[Parts]:
    type_, (value,) = op.operands[0].type, _given(w, op)
    return [w.each("OpFDiv", type_, w.splat(1.0, type_), value)]


def _quotient(w: KernelText, op: Op) -> Sequence[Parts]:
    return [w.each("OpFDiv", op.operands[0].type, *_given(w, op))]


def _cast(w: KernelText, op: Op) -> Sequence[Parts]:
    source, target = op.operands[0].type, op.results[0].type
    (value,) = _given(w, op)
    a, b = dtype_of(source), dtype_of(target)
    if a is b:
        return [value]
    if b is bool_:
        return [compare(w, "ne", source, value, w.splat(0, source))]
    if a is bool_:
        return [select(w, target, value, w.splat(1, target), w.splat(0, target))]
    if a.is_float and b.is_float:
        return [w.each("OpFConvert", target, value)]
    if a.is_float:
        return [_to_integer(w, value, source, target)]
    if b.is_float and a.bits < 32:  # drivers convert words: lavapipe makes anything of bytes
        wide = with_dtype(source, i32 if a.kind == "i" else u32)
        value = w.each("OpSConvert" if a.kind == "i" else "OpUConvert", wide, value)
    if b is f16:  # integers that f32 does not hold are beyond its largest number
        wide = with_dtype(target, f32)
        return [w.each("OpFConvert", target, w.each("OpConvertSToF" if a.kind == "i" else "OpConvertUToF", wide, value))]
    if b.is_float:
        return [w.each("OpConvertSToF" if a.kind == "i" else "OpConvertUToF", target, value)]
    if a.bits == b.bits:
        return [value]
    if a is i32 and b.bits == 64 and w.flavour is not OPENCL:
        # Mesa compares a word that was made a long number wrongly with constants: it must not see what this is.
        natural = w.each("OpBitwiseXor", source, value, w.splat(-(1 << 31), source))
        return [w.each("OpISub", target, w.each("OpUConvert", target, natural), w.splat(1 << 31, target))]
    return [w.each("OpSConvert" if a.kind == "i" and b.bits > a.bits else "OpUConvert", target, value)]


def _to_integer(w: KernelText, value: Parts, source: Type, target: Type) -> Parts:
    """Truncates; beyond the ends gives the ends, NaN gives 0."""
    if dtype_of(source).bits < 32:
        source = with_dtype(source, f32)
        value = w.each("OpFConvert", source, value)
    dtype = dtype_of(target)
    low, high = dtype.min_value, dtype.max_value
    above = compare(w, "ge", source, value, w.splat(float(high + 1), source))
    below = compare(w, "le" if low else "lt", source, value, w.splat(float(low), source))
    inside = w.each("OpLogicalNot", _truth(source), w.each("OpLogicalOr", _truth(source), above, below))
    nan = is_nan(w, source, value)
    inside = w.each("OpLogicalAnd", _truth(source), inside, w.each("OpLogicalNot", _truth(source), nan))
    safe = select(w, source, inside, value, w.splat(0.0, source))
    wide = with_dtype(target, i32 if dtype.kind == "i" else u32) if dtype.bits < 32 else target
    found = w.each("OpConvertFToS" if dtype.kind == "i" else "OpConvertFToU", wide, safe)
    if wide is not target:
        found = w.each("OpUConvert", target, found)
    found = select(w, target, above, w.splat(high, target), found)
    return select(w, target, below, w.splat(low, target), found)


def _bitcast(w: KernelText, op: Op) -> Sequence[Parts]:
    (value,) = _given(w, op)
    before, after = (w.module.element(dtype_of(t)) for t in (op.operands[0].type, op.results[0].type))
    return [value if before == after else w.each("OpBitcast", op.results[0].type, value)]


def _const(w: KernelText, op: Op) -> Sequence[Parts]:
    value = op.attrs["value"]
    assert isinstance(value, int | float)
    return [(w.const(dtype_of(op.result.type), value),)]


def _size(w: KernelText, op: Op) -> Sequence[Parts]:
    value = op.attrs["value"]
    assert isinstance(value, Size | int | str)
    return [(w.size(Size.of(value)),)]


# -- vecs -------------------------------------------------------------------------------------------------------------


def _broadcast(w: KernelText, op: Op) -> Sequence[Parts]:
    return [w.filled(w.names[op.operands[0]][0], op.result.type)]


def _extract(w: KernelText, op: Op) -> Sequence[Parts]:
    lane = op.attrs["lane"]
    assert isinstance(lane, int)
    return [(w.lane(w.names[op.operands[0]], op.operands[0].type, lane),)]


def _pack(w: KernelText, op: Op) -> Sequence[Parts]:
    return [w.packed([w.names[v][0] for v in op.operands], op.result.type)]


def _split(w: KernelText, op: Op) -> Sequence[Parts]:
    source = op.operands[0].type
    lanes = w.lanes(w.names[op.operands[0]], source)
    half = len(lanes) // 2
    return [w.packed(lanes[:half], op.results[0].type), w.packed(lanes[half:], op.results[1].type)]


def _every(w: KernelText, op: Op) -> Sequence[Parts]:
    found, truth = "", w.module.type("bool")
    for part, width in zip(w.names[op.operands[0]], w.widths(op.operands[0].type), strict=True):
        one = part if width == 1 else w.let("OpAll", truth, part)
        found = w.let("OpLogicalAnd", truth, found, one) if found else one
    return [(found,)]


def _to_bits(w: KernelText, op: Op) -> Sequence[Parts]:
    source, (value,) = op.operands[0].type, _given(w, op)
    if len(value) == 1:
        return [(w.let("OpBitcast", w.module.type("i32"), value[0]),)]
    return [(_joined(w, w.lanes(value, source), dtype_of(source)),)]


def _joined(w: KernelText, lanes: Sequence[str], dtype: DType) -> str:
    """Small numbers side by side in one word, the first lowest."""
    word, total = w.module.type("i32"), ""
    for k, lane in enumerate(lanes):
        wide = w.let("OpUConvert", word, lane)
        moved = w.let("OpShiftLeftLogical", word, wide, w.module.constant("i32", k * dtype.bits)) if k else wide
        total = w.let("OpBitwiseOr", word, total, moved) if total else moved
    return total


def _from_bits(w: KernelText, op: Op) -> Sequence[Parts]:
    return [w.each("OpBitcast", op.result.type, *_given(w, op))]


# -- memory -----------------------------------------------------------------------------------------------------------


def _access(w: KernelText, op: Op) -> tuple[Value, str, tuple[Value, ...]]:
    """The tensor, the element, and the operands after the indices."""
    memory = op.operands[0]
    assert isinstance(memory.type, Tensor)
    end = 1 + memory.type.rank
    return memory, w.offset(memory, [w.names[v][0] for v in op.operands[1:end]]), op.operands[end:]


def _load(w: KernelText, op: Op) -> Sequence[Parts]:
    type_, aligned = op.result.type, not op.attrs.get("unaligned")
    if not op.attrs.get("masked"):
        memory, offset, _ = _access(w, op)
        return [w.read(memory, offset, type_, aligned)]

    def taken() -> Sequence[Parts]:
        memory, offset, _ = _access(w, op)
        return [w.read(memory, offset, type_, aligned)]

    (condition,) = w.names[op.operands[-1]]
    return w.choose(condition, taken, lambda: [w.splat(0, type_)], [type_])


def _store(w: KernelText, op: Op) -> Sequence[Parts]:
    aligned = not op.attrs.get("unaligned")

    def put() -> Sequence[Parts]:
        memory, offset, rest = _access(w, op)
        w.put(memory, offset, w.names[rest[0]], rest[0].type, aligned)
        return []

    if op.attrs.get("masked"):
        w.choose(w.names[op.operands[-1]][0], put, list, [])
    else:
        put()
    return []


def _alloc(w: KernelText, op: Op) -> Sequence[Parts]:
    w.allocate(op)
    return [()]


def _head(w: KernelText, op: Op) -> Sequence[Parts]:
    memory, offset, _ = _access(w, op)
    assert isinstance(memory.type, Tensor)
    size, word = op.attrs["bytes"], w.module.type("i64")
    assert isinstance(size, int)
    address = w.let("OpConvertPtrToU", word, w.pointer(memory, offset))
    left = w.let("OpBitwiseAnd", word, w.let("OpSNegate", word, address), w.index(size - 1))
    return [(w.let("OpShiftRightLogical", word, left, w.index(memory.type.dtype.itemsize.bit_length() - 1)),)]


def _report(w: KernelText, op: Op) -> Sequence[Parts]:
    """Leave site, index and extent, if nobody has. The thread goes on; one that is alone in its block, as on a CPU, ends."""
    cell = op.operands[0]
    assert isinstance(cell.type, Tensor)
    module = w.module
    word, truth = module.type("i32"), module.type("bool")
    site = module.constant("i32", int(str(op.attrs["site"])))
    if w.flavour is OPENCL:
        place = w.let("OpBitcast", module.pointer("CrossWorkgroup", word), w.memory[cell])
    else:
        place = w.let("OpConvertUToPtr", module.pointer("PhysicalStorageBuffer", word), w.memory[cell])
    none = module.constant("i32", 0)
    before = w.let("OpAtomicCompareExchange", word, place, module.constant("i32", 1), none, none, site, none)
    first = w.let("OpIEqual", truth, before, none)

    def leave() -> Sequence[Parts]:
        for field, value in ((FAILURE_INDEX, op.operands[1]), (FAILURE_EXTENT, op.operands[2])):
            w.put(cell, w.index(field), w.names[value], value.type)
        return []

    w.choose(first, leave, list, [])
    if not w.simt:
        w.line("OpReturn")
        w.open(module.fresh())
    return []


# -- threads ----------------------------------------------------------------------------------------------------------


def _position(what: str) -> Handler:
    def handler(w: KernelText, op: Op) -> Sequence[Parts]:
        axis = op.attrs.get("axis", 0)
        assert isinstance(axis, int)
        return [(w.position(what, axis),)]

    return handler


def _grid_size(w: KernelText, op: Op) -> Sequence[Parts]:
    """From the sizes: a grid that a device has no room for is launched in parts."""
    axis = op.attrs.get("axis", 0)
    assert isinstance(axis, int)
    return [(w.size(w.kernel.grid[axis]) if axis < len(w.kernel.grid) else w.index(1),)]


def _barrier(w: KernelText, op: Op) -> Sequence[Parts]:
    block = w.module.constant("i32", 2)
    w.line(f"OpControlBarrier {block} {block} {w.module.constant('i32', w.flavour.barrier)}")
    return []


def _fence(w: KernelText, op: Op) -> Sequence[Parts]:
    scope = {"block": 2, "device": 1, "system": 1}.get(str(op.attrs.get("scope", "device")))
    if scope is not None:
        w.line(f"OpMemoryBarrier {w.module.constant('i32', scope)} {w.module.constant('i32', w.flavour.barrier)}")
    return []


def _nothing(w: KernelText, op: Op) -> Sequence[Parts]:
    return []


# -- bits -------------------------------------------------------------------------------------------------------------


def _mul_high(w: KernelText, op: Op) -> Sequence[Parts]:
    type_ = op.operands[0].type
    dtype = dtype_of(type_)
    if w.flavour is OPENCL:
        return [w.function("s_mul_hi" if dtype.kind == "i" else "u_mul_hi", type_, *_given(w, op))]
    if dtype.bits == 64:
        x, y = (v[0] for v in _given(w, op))
        return [(_high_of_64(w, x, y, dtype.kind == "i"),)]
    word = "OpSConvert" if dtype.kind == "i" else "OpUConvert"
    wide = w.module.type("i64")
    a, b = (w.let(word, wide, v[0]) for v in _given(w, op))
    product = w.let("OpIMul", wide, a, b)
    return [(w.let("OpUConvert", w.module.type("i32"), w.let("OpShiftRightLogical", wide, product, w.index(32))),)]


def _high_of_64(w: KernelText, a: str, b: str, signed: bool) -> str:
    """By products of halves; a negative factor's 2^64 is taken off."""
    wide = w.module.type("i64")

    def let(word: str, x: str, y: str) -> str:
        return w.let(word, wide, x, y)

    half, mask = w.index(32), w.index(0xFFFFFFFF)
    low_a, low_b = let("OpBitwiseAnd", a, mask), let("OpBitwiseAnd", b, mask)
    high_a, high_b = let("OpShiftRightLogical", a, half), let("OpShiftRightLogical", b, half)
    low = let("OpShiftRightLogical", let("OpIMul", low_a, low_b), half)
    cross = let("OpIAdd", let("OpIMul", high_a, low_b), low)
    other = let("OpIAdd", let("OpIMul", low_a, high_b), let("OpBitwiseAnd", cross, mask))
    found = let("OpIAdd", let("OpIMul", high_a, high_b), let("OpShiftRightLogical", cross, half))
    found = let("OpIAdd", found, let("OpShiftRightLogical", other, half))
    if signed:
        sign = w.index(63)
        for x, y in ((a, b), (b, a)):
            found = let("OpISub", found, let("OpBitwiseAnd", let("OpShiftRightArithmetic", x, sign), y))
    return found


def _popcount(w: KernelText, op: Op) -> Sequence[Parts]:
    type_, (value,) = op.operands[0].type, _given(w, op)
    if w.flavour is OPENCL:
        return [w.function("popcount", type_, value)]
    return [_by_words(w, value, type_, lambda word: w.let("OpBitCount", w.module.type("i32"), word), lambda low, high: w.let("OpIAdd", w.module.type("i32"), low, high))]


def _by_words(w: KernelText, value: Parts, type_: Type, one: Callable[[str], str], both: Callable[[str, str], str]) -> Parts:
    """A count of an integer's bits from those of its words of 32 bits, element by element."""
    bits, word = dtype_of(type_).bits, w.module.type("i32")
    found = []
    for lane in w.lanes(value, type_):
        if bits == 64:
            low = w.let("OpUConvert", word, lane)
            high = w.let("OpUConvert", word, w.let("OpShiftRightLogical", w.module.type("i64"), lane, w.index(32)))
            found.append(w.let("OpUConvert", w.module.type("i64"), both(one(low), one(high))))
        else:
            wide = lane if bits == 32 else w.let("OpUConvert", word, lane)
            count = one(wide)
            found.append(count if bits == 32 else w.let("OpUConvert", w.type(dtype_of(type_)), count))
    return w.packed(found, type_)


def _leading(w: KernelText, op: Op) -> Sequence[Parts]:
    type_, (value,) = op.operands[0].type, _given(w, op)
    if w.flavour is OPENCL:
        return [w.function("clz", type_, value)]
    word = w.module.type("i32")
    bits = dtype_of(type_).bits

    def one(x: str) -> str:
        return w.let("OpISub", word, w.module.constant("i32", 31 if bits >= 32 else bits - 1), w.let("OpExtInst", word, "%functions FindUMsb", x))

    def both(low: str, high: str) -> str:
        whole = w.module.constant("i32", 32)
        return w.let("OpSelect", word, w.let("OpIEqual", w.module.type("bool"), high, whole), w.let("OpIAdd", word, low, whole), high)

    return [_by_words(w, value, type_, one, both)]


def _trailing(w: KernelText, op: Op) -> Sequence[Parts]:
    type_, (value,) = op.operands[0].type, _given(w, op)
    # The lowest 1 alone, minus 1, has as many bits as there are zeros below it.
    minus = w.each("OpISub", type_, value, w.splat(1, type_))
    below = w.each("OpBitwiseAnd", type_, minus, w.each("OpNot", type_, value))
    if w.flavour is OPENCL:
        return [w.function("popcount", type_, below)]
    return [_by_words(w, below, type_, lambda word: w.let("OpBitCount", w.module.type("i32"), word), lambda low, high: w.let("OpIAdd", w.module.type("i32"), low, high))]


def _funnel_shift(w: KernelText, op: Op) -> Sequence[Parts]:
    low, high, count = (v[0] for v in _given(w, op))
    wide, word = w.module.type("i64"), w.module.type("i32")
    both = w.let("OpShiftLeftLogical", wide, w.let("OpUConvert", wide, high), w.index(32))
    both = w.let("OpBitwiseOr", wide, both, w.let("OpUConvert", wide, low))
    by = w.let("OpUConvert", wide, w.let("OpBitwiseAnd", word, count, w.module.constant("i32", 31)))
    if op.attrs["mode"] == "left":
        moved = w.let("OpShiftRightLogical", wide, w.let("OpShiftLeftLogical", wide, both, by), w.index(32))
    else:
        moved = w.let("OpShiftRightLogical", wide, both, by)
    return [(w.let("OpUConvert", word, moved),)]


def _reverse(w: KernelText, op: Op) -> Sequence[Parts]:
    """Bits in reverse order, by exchanging neighbours of 1, 2, 4… bits."""
    type_, (value,) = op.operands[0].type, _given(w, op)
    bits = dtype_of(type_).bits
    step = 1
    while step < bits:
        mask = sum(((1 << step) - 1) << k for k in range(0, bits, 2 * step))
        kept, by = w.splat(mask, type_), w.splat(step, type_)
        upper = w.each("OpShiftLeftLogical", type_, w.each("OpBitwiseAnd", type_, value, kept), by)
        lower = w.each("OpBitwiseAnd", type_, w.each("OpShiftRightLogical", type_, value, by), kept)
        value, step = w.each("OpBitwiseOr", type_, upper, lower), 2 * step
    return [value]


def _byte_perm(w: KernelText, op: Op) -> Sequence[Parts]:
    low, high, choice = (v[0] for v in _given(w, op))
    module = w.module
    wide, word, truth = module.type("i64"), module.type("i32"), module.type("bool")
    both = w.let("OpShiftLeftLogical", wide, w.let("OpUConvert", wide, high), w.index(32))
    both = w.let("OpBitwiseOr", wide, both, w.let("OpUConvert", wide, low))
    total = ""
    for k in range(4):
        nibble = w.let("OpShiftRightLogical", word, choice, module.constant("i32", 4 * k))
        place = w.let("OpShiftLeftLogical", word, w.let("OpBitwiseAnd", word, nibble, module.constant("i32", 7)), module.constant("i32", 3))
        octet = w.let("OpUConvert", word, w.let("OpShiftRightLogical", wide, both, w.let("OpUConvert", wide, place)))
        octet = w.let("OpBitwiseAnd", word, octet, module.constant("i32", 255))
        sign = w.let("OpINotEqual", truth, w.let("OpBitwiseAnd", word, octet, module.constant("i32", 128)), module.constant("i32", 0))
        signs = w.let("OpSelect", word, sign, module.constant("i32", 255), module.constant("i32", 0))
        asked = w.let("OpINotEqual", truth, w.let("OpBitwiseAnd", word, nibble, module.constant("i32", 8)), module.constant("i32", 0))
        octet = w.let("OpSelect", word, asked, signs, octet)
        octet = w.let("OpShiftLeftLogical", word, octet, module.constant("i32", 8 * k)) if k else octet
        total = w.let("OpBitwiseOr", word, total, octet) if total else octet
    return [(total,)]


def _dp4a(w: KernelText, op: Op) -> Sequence[Parts]:
    word = w.module.type("i32")
    total = w.names[op.operands[2]][0]
    for k in range(4):
        factors = []
        for value in op.operands[:2]:
            up = w.let("OpShiftLeftLogical", word, w.names[value][0], w.module.constant("i32", 24 - 8 * k))
            down = "OpShiftRightArithmetic" if dtype_of(value.type).kind == "i" else "OpShiftRightLogical"
            factors.append(w.let(down, word, up, w.module.constant("i32", 24)))
        total = w.let("OpIAdd", word, total, w.let("OpIMul", word, *factors))
    return [(total,)]


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_ARITHMETIC, _arithmetic), **dict.fromkeys(_COMPARE, _compare), "isnan": _isnan, "select": _select, "min": _extreme, "max": _extreme,
    "smaller": _pick, "larger": _pick, "floordiv": _divide, "mod": _divide, "shl": _shift, "shr": _shift, "neg": _negate, "abs": _absolute, "not": _not,
    "floor": _function, "ceil": _function, "round": _function, "trunc": _function, "sqrt": _function, "fma": _function, "exp2_approx": _function,
    "log2_approx": _function, "sin_approx": _function, "cos_approx": _function, "sqrt_approx": _function, "rsqrt_approx": _function,
    "rcp_approx": _reciprocal, "div_approx": _quotient, "cast": _cast, "bitcast": _bitcast, "const": _const, "size": _size, "broadcast": _broadcast,
    "extract": _extract, "pack": _pack, "split": _split, "every": _every, "to_bits": _to_bits, "from_bits": _from_bits, "load": _load, "store": _store,
    "alloc": _alloc, "head": _head, "report": _report, "program_id": _position("WorkgroupId"), "grid_size": _grid_size,
    "thread_id": _position("LocalInvocationId"), "barrier": _barrier, "fence": _fence, "prefetch": _nothing, "mul_high": _mul_high,
    "popcount": _popcount, "clz": _leading, "ctz": _trailing, "brev": _reverse, "funnel_shift": _funnel_shift, "byte_perm": _byte_perm, "dp4a": _dp4a,
}  # fmt: skip
