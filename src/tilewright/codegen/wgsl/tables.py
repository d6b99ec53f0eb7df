"""WGSL as data: how dtypes lie in registers, the expression of every op, and the functions that stand for what the language lacks.

A register is f32, i32, u32 or bool. Narrow integers are extended to one; narrow floats are their bits; integers of 64 bits are two words, the
low one first. The letters of a table's keys: f f32, i i32, u u32, b bool, l i64, m u64, h bits of a narrow float,
e f16 where the device has it.
"""

from __future__ import annotations

from collections.abc import Mapping

REGISTERS: Mapping[str, tuple[str, str]] = {
    "f32": ("f32", "f"), "i32": ("i32", "i"), "u32": ("u32", "u"), "bool": ("bool", "b"), "i8": ("i32", "i"), "i16": ("i32", "i"), "u8": ("u32", "u"),
    "u16": ("u32", "u"), "f16": ("u32", "h"), "bf16": ("u32", "h"), "f8e4m3": ("u32", "h"), "f8e5m2": ("u32", "h"), "i64": ("vec2<u32>", "l"),
    "u64": ("vec2<u32>", "m"),
}  # fmt: skip
"""By dtype: the type of its register, and the letter of the tables. `h`: bits of a float that nothing is computed with."""

OPS: Mapping[str, Mapping[str, str]] = {
    "add": {"fiu": "{0} + {1}", "lm": "tw_add64({0}, {1})"},
    "sub": {"fiu": "{0} - {1}", "lm": "tw_sub64({0}, {1})"},
    "mul": {"fiu": "{0} * {1}", "lm": "tw_mul64({0}, {1})"},
    "div": {"f": "{0} / {1}"},
    "fma": {"f": "fma({0}, {1}, {2})"},
    "neg": {"fi": "-{0}", "u": "0u - {0}", "lm": "tw_sub64(vec2<u32>(), {0})"},
    "abs": {"f": "tw_abs({0})", "i": "abs({0})", "um": "{0}", "l": "tw_abs64({0})"},
    "floor": {"f": "floor({0})"}, "ceil": {"f": "ceil({0})"}, "round": {"f": "round({0})"}, "trunc": {"f": "trunc({0})"}, "sqrt": {"f": "sqrt({0})"},
    "floordiv": {"f": "floor({0} / {1})", "i": "tw_floordiv({0}, {1})", "u": "tw_div({0}, {1})", "l": "tw_floordiv64({0}, {1})", "m": "tw_div64({0}, {1}).xy"},
    "mod": {"i": "tw_mod({0}, {1})", "u": "tw_rem({0}, {1})", "l": "tw_mod64({0}, {1})", "m": "tw_div64({0}, {1}).zw", "f": "tw_fmod({0}, {1})"},
    "min": {"f": "tw_min({0}, {1})", "iu": "min({0}, {1})", "l": "select({1}, {0}, tw_lt64({0}, {1}))", "m": "select({1}, {0}, tw_ult64({0}, {1}))", "b": "{0} & {1}"},
    "max": {"f": "tw_max({0}, {1})", "iu": "max({0}, {1})", "l": "select({0}, {1}, tw_lt64({0}, {1}))", "m": "select({0}, {1}, tw_ult64({0}, {1}))", "b": "{0} | {1}"},
    "smaller": {"f": "select({1}, {0}, {0} < {1})"}, "larger": {"f": "select({1}, {0}, {0} > {1})"},
    "and": {"biulmh": "{0} & {1}"}, "or": {"biulmh": "{0} | {1}"}, "xor": {"iulmh": "{0} ^ {1}", "b": "{0} != {1}"}, "not": {"iulm": "~{0}", "b": "!{0}"},
    "shl": {"i": "{0} << (u32({1}) & {m}u)", "u": "{0} << ({1} & {m}u)", "lm": "tw_shl64({0}, {1}.x & 63u)"},
    "shr": {"i": "{0} >> (u32({1}) & {m}u)", "u": "{0} >> ({1} & {m}u)", "l": "tw_sar64({0}, {1}.x & 63u)", "m": "tw_shr64({0}, {1}.x & 63u)"},
    "eq": {"fiube": "{0} == {1}", "lm": "all({0} == {1})", "h": ""}, "ne": {"fe": "!({0} == {1})", "iub": "{0} != {1}", "lm": "any({0} != {1})", "h": ""},
    "lt": {"fiu": "{0} < {1}", "l": "tw_lt64({0}, {1})", "m": "tw_ult64({0}, {1})", "b": "!{0} & {1}"},
    "gt": {"fiu": "{0} > {1}", "l": "tw_lt64({1}, {0})", "m": "tw_ult64({1}, {0})", "b": "{0} & !{1}"},
    "le": {"fiu": "{0} <= {1}", "l": "!tw_lt64({1}, {0})", "m": "!tw_ult64({1}, {0})", "b": "!{0} | {1}"},
    "ge": {"fiu": "{0} >= {1}", "l": "!tw_lt64({0}, {1})", "m": "!tw_ult64({0}, {1})", "b": "{0} | !{1}"},
    "isnan": {"f": "tw_isnan({0})"},
    "popcount": {"iu": "countOneBits({0})", "lm": "vec2<u32>(countOneBits({0}.x) + countOneBits({0}.y), 0u)"},
    "clz": {"iu": "countLeadingZeros({0})", "lm": "vec2<u32>(tw_clz64({0}), 0u)"},
    "ctz": {"iu": "countTrailingZeros({0})", "lm": "vec2<u32>(tw_ctz64({0}), 0u)"},
    "brev": {"iu": "reverseBits({0})", "lm": "reverseBits({0}).yx"},
    "mul_high": {"u": "tw_umulh({0}, {1})", "i": "tw_imulh({0}, {1})"},
    "byte_perm": {"u": "tw_byte_perm({0}, {1}, {2})"},
}  # fmt: skip
"""Expressions by op and letter of the first operand."""

CASTS: Mapping[str, str] = {
    "ii": "{0}", "uu": "{0}", "bb": "{0}", "ff": "{0}", "iu": "u32({0})", "ui": "i32({0})", "if": "f32({0})", "uf": "f32({0})", "bf": "select(0.0, 1.0, {0})",
    "bi": "select(0, 1, {0})", "bu": "select(0u, 1u, {0})", "fb": "{0} != 0.0", "ib": "{0} != 0", "ub": "{0} != 0u", "lb": "any({0} != vec2<u32>())",
    "mb": "any({0} != vec2<u32>())", "fi": "tw_to_i32({0}, {low}, {high})", "fu": "tw_to_u32({0}, {high})", "il": "tw_widen({0})", "im": "tw_widen({0})",
    "ul": "vec2<u32>({0}, 0u)", "um": "vec2<u32>({0}, 0u)", "bl": "vec2<u32>(select(0u, 1u, {0}), 0u)", "bm": "vec2<u32>(select(0u, 1u, {0}), 0u)",
    "li": "i32({0}.x)", "mi": "i32({0}.x)", "lu": "{0}.x", "mu": "{0}.x", "ll": "{0}", "lm": "{0}", "ml": "{0}", "mm": "{0}", "lf": "tw_from_i64({0})",
    "mf": "tw_from_u64({0})", "fl": "tw_to_i64({0})", "fm": "tw_to_u64({0})",
    "ef": "f32({0})", "fe": "tw_to_f16({0})", "ie": "tw_to_f16(f32({0}))", "ue": "tw_to_f16(f32({0}))", "be": "select(0.0h, 1.0h, {0})", "ee": "{0}",
    "le": "tw_to_f16(tw_from_i64({0}))", "me": "tw_to_f16(tw_from_u64({0}))", "eb": "{0} != 0.0h", "ei": "tw_to_i32(f32({0}), {low}, {high})",
    "eu": "tw_to_u32(f32({0}), {high})", "el": "tw_to_i64(f32({0}))", "em": "tw_to_u64(f32({0}))",
}  # fmt: skip
"""Conversions by the letters of both dtypes. Languages leave open how a conversion to f16 rounds: `tw_to_f16` converts numbers that f16 has. Integers that f32 does not hold are beyond f16's largest number: rounding them twice gives what once would."""

BITCASTS: Mapping[str, str] = {
    "fi": "bitcast<i32>({0})", "fu": "bitcast<u32>({0})", "if": "bitcast<f32>({0})", "uf": "bitcast<f32>({0})", "iu": "u32({0})", "ui": "i32({0})", "hu": "{0}",
    "uh": "{0}", "hh": "{0}", "ii": "{0}", "uu": "{0}", "ff": "{0}", "lm": "{0}", "ml": "{0}", "hi": "i32({0})", "ih": "u32({0})",
    "eu": "tw_bits_of({0})", "ue": "tw_half({0})", "ei": "i32(tw_bits_of({0}))", "ie": "tw_half(u32({0}))", "ee": "{0}",
}  # fmt: skip

ATOMICS: Mapping[str, str] = {
    "add": "atomicAdd", "sub": "atomicSub", "min": "atomicMin", "max": "atomicMax", "and": "atomicAnd", "or": "atomicOr", "xor": "atomicXor",
    "exchange": "atomicExchange",
}  # fmt: skip

FUNCTIONS: Mapping[str, str] = {
    "tw_f32": "fn tw_f32(x: u32) -> f32 { return bitcast<f32>(x); }",
    "tw_keep": "fn tw_keep(x: f32, zero: u32) -> f32 { return bitcast<f32>(bitcast<u32>(x) ^ zero); }",
    "tw_fma": """fn tw_fma(a: f32, b: f32, c: f32, zero: u32) -> f32 {
  let p = tw_keep(a * b, zero);
  let ah = bitcast<f32>(bitcast<u32>(a) & 0xfffff000u);
  let bh = bitcast<f32>(bitcast<u32>(b) & 0xfffff000u);
  let al = a - ah;
  let bl = b - bh;
  let low = tw_keep(tw_keep(tw_keep(ah * bh - p, zero) + ah * bl, zero) + al * bh, zero) + al * bl;
  let s = tw_keep(p + c, zero);
  let t = tw_keep(s - p, zero);
  let e = (p - tw_keep(s - t, zero)) + (c - t);
  return select(s, s + (e + low), (bitcast<u32>(s) & 0x7f800000u) != 0x7f800000u);
}""",
    "tw_abs": "fn tw_abs(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) & 0x7fffffffu); }",
    "tw_to_f16": """fn tw_to_f16(x: f32) -> f16 {
  let bits = bitcast<u32>(x);
  let size = bits & 0x7fffffffu;
  let normal = select((bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u, (bits & 0x80000000u) | 0x7f800000u, size >= 0x477ff000u);
  let near = select(bitcast<f32>(normal), round(x * 16777216.0) / 16777216.0, size < 0x38800000u);
  return f16(select(near, x, size > 0x7f800000u));
}""",
    "tw_bits_of": "fn tw_bits_of(x: f16) -> u32 { return pack2x16float(vec2<f32>(f32(x), 0.0)) & 0xffffu; }",
    "tw_half": "fn tw_half(x: u32) -> f16 { return f16(unpack2x16float(x).x); }",
    "tw_isnan": "fn tw_isnan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }",
    "tw_min": "fn tw_min(a: f32, b: f32) -> f32 { return select(select(b, a, a < b), a + b, tw_isnan(a) || tw_isnan(b)); }",
    "tw_max": "fn tw_max(a: f32, b: f32) -> f32 { return select(select(b, a, a > b), a + b, tw_isnan(a) || tw_isnan(b)); }",
    "tw_fmod": "fn tw_fmod(a: f32, b: f32) -> f32 { return a - floor(a / b) * b; }",
    "tw_div": "fn tw_div(a: u32, b: u32) -> u32 { if (b == 0u) { return 0u; } return a / b; }",
    "tw_rem": "fn tw_rem(a: u32, b: u32) -> u32 { if (b == 0u) { return 0u; } return a % b; }",
    "tw_floordiv": """fn tw_floordiv(a: i32, b: i32) -> i32 {
  if (b == 0) { return 0; }
  if (b == -1) { return 0 - a; }
  let q = a / b;
  return select(q, q - 1, (a - q * b != 0) && ((a ^ b) < 0));
}""",
    "tw_mod": "fn tw_mod(a: i32, b: i32) -> i32 { if (b == 0) { return 0; } return a - tw_floordiv(a, b) * b; }",
    "tw_to_i32": """fn tw_to_i32(x: f32, low: i32, high: i32) -> i32 {
  if (tw_isnan(x)) { return 0; }
  if (x >= f32(high)) { return high; }
  if (x <= f32(low)) { return low; }
  return i32(x);
}""",
    "tw_to_u32": """fn tw_to_u32(x: f32, high: u32) -> u32 {
  if (tw_isnan(x) || x <= 0.0) { return 0u; }
  if (x >= f32(high)) { return high; }
  return u32(x);
}""",
    "tw_widen": "fn tw_widen(x: i32) -> vec2<u32> { return vec2<u32>(u32(x), u32(x >> 31u)); }",
    "tw_add64": "fn tw_add64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { let x = a.x + b.x; return vec2<u32>(x, a.y + b.y + select(0u, 1u, x < a.x)); }",
    "tw_sub64": "fn tw_sub64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x)); }",
    "tw_umulh": """fn tw_umulh(a: u32, b: u32) -> u32 {
  let al = a & 0xffffu; let ah = a >> 16u; let bl = b & 0xffffu; let bh = b >> 16u;
  let m = ah * bl + ((al * bl) >> 16u);
  let n = al * bh + (m & 0xffffu);
  return ah * bh + (m >> 16u) + (n >> 16u);
}""",
    "tw_imulh": """fn tw_imulh(a: i32, b: i32) -> i32 {
  return i32(tw_umulh(u32(a), u32(b)) - select(0u, u32(b), a < 0) - select(0u, u32(a), b < 0));
}""",
    "tw_mul64": "fn tw_mul64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return vec2<u32>(a.x * b.x, tw_umulh(a.x, b.x) + a.x * b.y + a.y * b.x); }",
    "tw_abs64": "fn tw_abs64(a: vec2<u32>) -> vec2<u32> { return select(a, tw_sub64(vec2<u32>(), a), (a.y >> 31u) != 0u); }",
    "tw_ult64": "fn tw_ult64(a: vec2<u32>, b: vec2<u32>) -> bool { return a.y < b.y || (a.y == b.y && a.x < b.x); }",
    "tw_lt64": "fn tw_lt64(a: vec2<u32>, b: vec2<u32>) -> bool { return i32(a.y) < i32(b.y) || (a.y == b.y && a.x < b.x); }",
    "tw_shl64": """fn tw_shl64(a: vec2<u32>, n: u32) -> vec2<u32> {
  if (n == 0u) { return a; }
  if (n >= 32u) { return vec2<u32>(0u, a.x << (n & 31u)); }
  return vec2<u32>(a.x << n, (a.y << n) | (a.x >> (32u - n)));
}""",
    "tw_shr64": """fn tw_shr64(a: vec2<u32>, n: u32) -> vec2<u32> {
  if (n == 0u) { return a; }
  if (n >= 32u) { return vec2<u32>(a.y >> (n & 31u), 0u); }
  return vec2<u32>((a.x >> n) | (a.y << (32u - n)), a.y >> n);
}""",
    "tw_sar64": """fn tw_sar64(a: vec2<u32>, n: u32) -> vec2<u32> {
  if (n == 0u) { return a; }
  let sign = u32(i32(a.y) >> 31u);
  if (n >= 32u) { return vec2<u32>(u32(i32(a.y) >> (n & 31u)), sign); }
  return vec2<u32>((a.x >> n) | (a.y << (32u - n)), u32(i32(a.y) >> n));
}""",
    "tw_clz64": "fn tw_clz64(a: vec2<u32>) -> u32 { return select(countLeadingZeros(a.y), 32u + countLeadingZeros(a.x), a.y == 0u); }",
    "tw_ctz64": "fn tw_ctz64(a: vec2<u32>) -> u32 { return select(countTrailingZeros(a.x), 32u + countTrailingZeros(a.y), a.x == 0u); }",
    "tw_div64": """fn tw_div64(a: vec2<u32>, b: vec2<u32>) -> vec4<u32> {
  if (all(b == vec2<u32>())) { return vec4<u32>(); }
  if (a.y == 0u && b.y == 0u) { return vec4<u32>(a.x / b.x, 0u, a.x % b.x, 0u); }
  var q = vec2<u32>();
  var r = vec2<u32>();
  for (var i = 63; i >= 0; i = i - 1) {
    let over = r.y >> 31u;
    r = tw_shl64(r, 1u) | vec2<u32>(tw_shr64(a, u32(i)).x & 1u, 0u);
    if (over != 0u || !tw_ult64(r, b)) {
      r = tw_sub64(r, b);
      q = q | tw_shl64(vec2<u32>(1u, 0u), u32(i));
    }
  }
  return vec4<u32>(q, r);
}""",
    "tw_floordiv64": """fn tw_floordiv64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  let zero = vec2<u32>();
  if (all(b == zero)) { return zero; }
  let d = tw_div64(tw_abs64(a), tw_abs64(b));
  if (((a.y ^ b.y) >> 31u) == 0u) { return d.xy; }
  let q = tw_sub64(zero, d.xy);
  return select(q, tw_sub64(q, vec2<u32>(1u, 0u)), any(d.zw != zero));
}""",
    "tw_mod64": "fn tw_mod64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { if (all(b == vec2<u32>())) { return b; } return tw_sub64(a, tw_mul64(tw_floordiv64(a, b), b)); }",
    "tw_from_u64": """fn tw_from_u64(a: vec2<u32>) -> f32 {
  if (a.y == 0u) { return f32(a.x); }
  let n = countLeadingZeros(a.y);
  let s = tw_shl64(a, n);
  return f32(s.y | select(0u, 1u, s.x != 0u)) * bitcast<f32>((159u - n) << 23u);
}""",
    "tw_from_i64": "fn tw_from_i64(a: vec2<u32>) -> f32 { let x = tw_from_u64(tw_abs64(a)); return select(x, -x, (a.y >> 31u) != 0u); }",
    "tw_to_u64": """fn tw_to_u64(x: f32) -> vec2<u32> {
  if (tw_isnan(x) || x < 1.0) { return vec2<u32>(); }
  if (x >= 18446744073709551616.0) { return vec2<u32>(0xffffffffu, 0xffffffffu); }
  let bits = bitcast<u32>(x);
  let e = i32(bits >> 23u) - 150;
  let m = vec2<u32>((bits & 0x7fffffu) | 0x800000u, 0u);
  if (e < 0) { return tw_shr64(m, u32(-e)); }
  return tw_shl64(m, u32(e));
}""",
    "tw_to_i64": """fn tw_to_i64(x: f32) -> vec2<u32> {
  if (x >= 9223372036854775808.0) { return vec2<u32>(0xffffffffu, 0x7fffffffu); }
  if (x <= -9223372036854775808.0) { return vec2<u32>(0u, 0x80000000u); }
  let m = tw_to_u64(tw_abs(x));
  return select(m, tw_sub64(vec2<u32>(), m), x < 0.0);
}""",
    "tw_byte_perm": """fn tw_byte_perm(a: u32, b: u32, s: u32) -> u32 {
  var r = 0u;
  for (var k = 0u; k < 4u; k = k + 1u) {
    let c = (s >> (4u * k)) & 15u;
    let byte = (select(a, b, (c & 4u) != 0u) >> (8u * (c & 3u))) & 0xffu;
    r = r | (select(byte, select(0u, 0xffu, byte > 127u), c > 7u) << (8u * k));
  }
  return r;
}""",
}  # fmt: skip
"""Functions by name; a module has those that its kernels use, and that these use."""
