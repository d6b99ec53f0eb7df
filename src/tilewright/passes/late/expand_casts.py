"""Conversions the target has no instruction for, as integer arithmetic; each rounds once, to nearest even.

In: a kernel at any stage. Out: the same, without casts from or to f8 types (everywhere) and, on a CPU, without casts from or
to bf16, from f64 to f16 (on portable GPUs too), and any of f16 on CPUs without them (hardware conversions flush denormals, or are library calls). Pairs of bf16 are
widened by shifts on GPUs too, and bytes made floats by arithmetic, where the conversions are slow. Sits with expand_math, right before code generation.

    %y = cast %x {dtype = f32}     x: bf16
    -> %y = bitcast (shl (cast (bitcast %x {u16}) {u32}) 16) {f32}
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, bf16, by_name, f8e4m3, f8e5m2, f16, f32, f64, i8, u8, u16, u32, u64
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Stage, Value
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Vec, dtype_of


@record
class _CastForm:
    """How a small float is laid out beside an f32."""

    code: DType
    shift: int
    """Mantissa bits an f32 has more."""
    rebias: int
    """Exponent bias an f32 has more."""
    last: int
    """The code of infinity, or of NaN where there is no infinity."""
    nan: int
    has_infinity: bool


_FORMS = {
    f8e4m3: _CastForm(u8, 20, 120, 0x7F, 0x7F, False),
    f8e5m2: _CastForm(u8, 21, 112, 0x7C, 0x7F, True),
    f16: _CastForm(u16, 13, 112, 0x7C00, 0x7E00, True),
}


def expand_casts(kernel: Kernel, target: Target) -> Kernel:
    packed: dict[Value, Sequence[Value]] = {}
    soft = tuple(by_name(name) for name in target.soft_casts)

    def expand(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode == "pack":
            packed[op.results[0]] = op.operands
        if op.opcode != "cast":
            return None
        value = op.operands[0]
        source, result = dtype_of(value.type), dtype_of(op.results[0].type)
        if target.simt and source is bf16 and result is f32 and kernel.stage is Stage.THREAD and isinstance(value.type, Vec):
            if value in packed:  # loaded one by one: no pairs to take apart
                return [b.op("pack", *(_widen(b, lane, bf16) for lane in packed[value]))]
            return [_widen_pairs(b, value)]
        if target.simt and source in (i8, u8) and result in (f32, bf16, f16) and kernel.stage is Stage.THREAD:
            return [_convert(b, _byte(b, value), result, soft, target)]
        if source in soft:
            return [_convert(b, _widen(b, value, source), result, soft, target)]
        if result in soft or (result is f16 and source is f64 and not target.has_warps):
            return [_convert(b, value, result, soft, target)]
        return None

    return rewrite(kernel, expand)


def _convert(b: Builder, value: Value, result: DType, soft: Sequence[DType], target: Target) -> Value:
    """From any type with hardware support to `result`."""
    source = dtype_of(value.type)
    if result not in soft and not (result is f16 and source is f64):
        return b.cast(value, result)
    if source.is_int and source.bits >= 32 and "f64" in target.missing_dtypes:
        value = _odd_integer(b, value)
    elif source is f64 or (source.is_int and source.bits >= 32):
        value = _odd(b, b.cast(value, f64))
    single = b.cast(value, f32)
    if result is f16 and f16 not in soft:
        return b.cast(single, f16)
    return _to_bf16(b, single) if result is bf16 else _to_small(b, single, result)


def _widen_pairs(b: Builder, value: Value) -> Value:
    """Pairs of bf16 as f32. A GPU has an instruction for it, at a quarter of the rate of shifts and masks."""
    parts = [value]
    while isinstance(parts[0].type, Vec) and parts[0].type.width > 2:
        parts = [half for part in parts for half in b.multi("split", part)]
    words: list[Value] = []
    for pair in parts:
        bits = b.op("to_bits", pair)
        words += [b.op("shl", bits, b.splat(16, bits)), b.op("and", bits, b.splat(0xFFFF0000, bits))]
    return b.bitcast(b.op("pack", *words), f32)


def _byte(b: Builder, value: Value) -> Value:
    """A byte as f32, exactly: as the last bits of 2^23 it is a float, from which 2^23 is taken off again; what has a sign is moved up by 128
    meanwhile. A GPU's own conversions run at an eighth of that rate."""
    lowest = 128 if dtype_of(value.type) is i8 else 0
    code = b.cast(b.bitcast(value, u8), u32)
    number = b.bitcast(b.op("xor", code, b.splat(0x4B000000 + lowest, code)), f32)
    return b.sub(number, b.splat(2.0**23 + lowest, number))


def _widen(b: Builder, value: Value, source: DType) -> Value:
    """A small float as f32; exact."""
    if source is bf16:
        bits = b.cast(b.bitcast(value, u16), u32)
        return b.bitcast(b.op("shl", bits, b.splat(16, bits)), f32)
    # The code's exponent and mantissa, shifted into an f32's place, are the value scaled by a power of two; multiplying
    # sets the exponent right, for denormals too.
    form = _FORMS[source]
    code = b.cast(b.bitcast(value, form.code), u32)
    size = b.op("and", code, b.splat((1 << (source.bits - 1)) - 1, code))
    number = b.bitcast(b.op("shl", size, b.splat(form.shift, size)), f32)
    bits = b.bitcast(b.mul(number, b.splat(2.0**form.rebias, number)), u32)
    if form.has_infinity:
        beyond = b.op("or", b.op("shl", size, b.splat(form.shift, size)), b.splat(0x7F800000, size))
    else:
        beyond = b.splat(0x7FC00000, bits)
    bits = b.select(b.op("ge", size, b.splat(form.last, size)), beyond, bits)
    sign = b.op("and", code, b.splat(1 << (source.bits - 1), code))
    return b.bitcast(b.op("or", bits, b.op("shl", sign, b.splat(32 - source.bits, sign))), f32)


def _odd(b: Builder, value: Value) -> Value:
    """f64 to f32, rounded to odd: a second rounding to a narrower type then gives what one rounding would."""
    near = b.cast(value, f32)
    back = b.cast(near, f64)
    bits = b.bitcast(near, u32)
    away = b.op("gt", b.op("abs", back), b.op("abs", value))
    truncated = b.select(away, b.sub(bits, b.splat(1, bits)), bits)
    sticky = b.op("or", truncated, b.splat(1, bits))
    exact = b.op("or", b.op("eq", back, value), b.op("isnan", value))
    return b.bitcast(b.select(exact, bits, sticky), f32)


def _odd_integer(b: Builder, value: Value) -> Value:
    """An integer of 32 or 64 bits as f32, rounded to odd, for targets without f64: its upper 24 bits, the last of them set where others are lost."""
    source = dtype_of(value.type)
    size = b.cast(b.op("abs", value), u64 if source.bits == 64 else u32)
    word, large = size, None
    if source.bits == 64:
        high, low = b.cast(b.op("shr", size, b.splat(32, size)), u32), b.cast(size, u32)
        large = b.op("ne", high, b.splat(0, high))
        word = b.select(large, b.op("or", high, b.cast(b.op("ne", low, b.splat(0, low)), u32)), low)
    kept = b.op("and", word, b.splat(0xFFFFFF00, word))
    lost = b.op("ne", b.op("and", word, b.splat(0xFF, word)), b.splat(0, word))
    sticky = b.select(lost, b.op("or", kept, b.splat(0x100, kept)), kept)
    number = b.cast(b.select(b.op("ge", word, b.splat(1 << 24, word)), sticky, word), f32)
    if large is not None:
        number = b.select(large, b.mul(number, b.splat(2.0**32, number)), number)
    return number if int(source.min_value) == 0 else b.select(b.op("lt", value, b.splat(0, value)), b.op("neg", number), number)


def _to_bf16(b: Builder, value: Value) -> Value:
    bits = b.bitcast(value, u32)
    high = b.op("shr", bits, b.splat(16, bits))
    nudge = b.add(b.op("and", high, b.splat(1, bits)), b.splat(0x7FFF, bits))
    rounded = b.op("shr", b.add(bits, nudge), b.splat(16, bits))
    quiet = b.op("or", high, b.splat(0x40, bits))
    code = b.select(b.op("isnan", value), quiet, rounded)
    return b.bitcast(b.cast(code, u16), bf16)


def _to_small(b: Builder, value: Value, result: DType) -> Value:
    form = _FORMS[result]
    bits = b.bitcast(value, u32)
    size = b.op("and", bits, b.splat(0x7FFFFFFF, bits))
    magnitude = b.bitcast(size, f32)
    last_bit = b.op("and", b.op("shr", size, b.splat(form.shift, size)), b.splat(1, size))
    rounded = b.op("shr", b.add(size, b.add(last_bit, b.splat((1 << (form.shift - 1)) - 1, size))), b.splat(form.shift, size))
    normal = b.sub(rounded, b.splat(form.rebias << result.mantissa, size))
    # Below the smallest normal number the code is the value in units of the smallest denormal.
    tiny = 2.0 ** (form.rebias - 126)
    scaled = b.mul(magnitude, b.splat(2.0**result.mantissa / tiny, magnitude))
    small = b.cast(b.op("round", b.op("min", scaled, b.splat(2.0 ** (result.mantissa + 1), scaled))), u32)
    code = b.select(b.op("lt", magnitude, b.splat(tiny, magnitude)), small, normal)
    code = b.op("min", code, b.splat(form.last, code))
    code = b.select(b.op("isnan", value), b.splat(form.nan, code), code)
    sign = b.op("and", b.op("shr", bits, b.splat(32 - result.bits, bits)), b.splat(1 << (result.bits - 1), bits))
    return b.bitcast(b.cast(b.op("or", code, sign), form.code), result)
