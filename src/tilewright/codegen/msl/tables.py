"""Metal Shading Language as data: the type of every dtype, the expression of every op, and the functions that stand for what the language lacks.

Keys of the tables are letters for kinds of dtypes: f f32, h f16, s signed integers, u unsigned ones, b bool. In an expression {0} {1} {2} are the
operands, T is the result's type, U the unsigned one of its size (signed integers wrap, which C++ leaves open), m its bits less one.
"""

from __future__ import annotations

from collections.abc import Mapping

TYPES: Mapping[str, str] = {
    "bool": "bool", "i8": "char", "i16": "short", "i32": "int", "i64": "long", "u8": "uchar", "u16": "ushort", "u32": "uint", "u64": "ulong", "f16": "half",
    "f32": "float", "bf16": "ushort", "f8e4m3": "uchar", "f8e5m2": "uchar",
}  # fmt: skip
"""Floats that Metal does not compute with are their bits."""
UNSIGNED = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"}

_LESS = {"fhsu": "{0} < {1}", "b": "!{0} & {1}"}
OPS: Mapping[str, Mapping[str, str]] = {
    "add": {"fhu": "{0} + {1}", "s": "{T}({U}({0}) + {U}({1}))"}, "sub": {"fhu": "{0} - {1}", "s": "{T}({U}({0}) - {U}({1}))"},
    "mul": {"fhu": "{0} * {1}", "s": "{T}({U}({0}) * {U}({1}))"}, "div": {"fh": "{0} / {1}"}, "fma": {"fh": "fma({0}, {1}, {2})"},
    "neg": {"fh": "-{0}", "su": "{T}({U}(0) - {U}({0}))"}, "abs": {"fh": "fabs({0})", "s": "({0} < 0 ? {T}({U}(0) - {U}({0})) : {0})", "u": "{0}"},
    "floor": {"fh": "floor({0})"}, "ceil": {"fh": "ceil({0})"}, "round": {"fh": "rint({0})"}, "trunc": {"fh": "trunc({0})"}, "sqrt": {"fh": "sqrt({0})"},
    "floordiv": {"s": "tw_floordiv<{U}>({0}, {1})", "u": "tw_udiv({0}, {1})", "fh": "floor({0} / {1})"}, "mod": {"s": "tw_mod({0}, {1})", "u": "tw_urem({0}, {1})"},
    "min": {"fh": "tw_min({0}, {1})", "su": "min({0}, {1})", "b": "{0} & {1}"}, "max": {"fh": "tw_max({0}, {1})", "su": "max({0}, {1})", "b": "{0} | {1}"},
    "smaller": {"fh": "({0} < {1} ? {0} : {1})"}, "larger": {"fh": "({0} > {1} ? {0} : {1})"},
    "and": {"sub": "{0} & {1}"}, "or": {"sub": "{0} | {1}"}, "xor": {"sub": "{0} ^ {1}"}, "not": {"su": "~{0}", "b": "!{0}"},
    "shl": {"su": "{T}({U}({0}) << ({1} & {m}))"}, "shr": {"su": "{0} >> ({1} & {m})"},
    "eq": {"fhsub": "{0} == {1}"}, "ne": {"fhsub": "{0} != {1}"}, "lt": _LESS, "gt": {"fhsu": "{0} > {1}", "b": "{0} & !{1}"},
    "le": {"fhsu": "{0} <= {1}", "b": "!{0} | {1}"}, "ge": {"fhsu": "{0} >= {1}", "b": "{0} | !{1}"}, "isnan": {"fh": "{0} != {0}"},
    "popcount": {"su": "popcount({0})"}, "clz": {"su": "clz({0})"}, "ctz": {"su": "ctz({0})"}, "brev": {"su": "reverse_bits({0})"}, "mul_high": {"su": "mulhi({0}, {1})"},
    "exp2_approx": {"f": "fast::exp2({0})"}, "rcp_approx": {"f": "fast::divide(1.0f, {0})"}, "log2_approx": {"f": "fast::log2({0})"},
    "sqrt_approx": {"f": "fast::sqrt({0})"}, "rsqrt_approx": {"f": "fast::rsqrt({0})"}, "sin_approx": {"f": "fast::sin({0})"}, "cos_approx": {"f": "fast::cos({0})"},
    "tanh_approx": {"f": "fast::tanh({0})"}, "div_approx": {"f": "fast::divide({0}, {1})"},
}  # fmt: skip
"""Expressions by op and kind of the first operand."""

ATOMICS: Mapping[str, str] = {kind: f"atomic_fetch_{kind}_explicit" for kind in ("add", "sub", "min", "max", "and", "or", "xor")} | {"exchange": "atomic_exchange_explicit"}
ROUNDS: Mapping[str, str] = {"add": "simd_sum", "min": "simd_min", "max": "simd_max", "and": "simd_and", "or": "simd_or", "xor": "simd_xor"}
"""Combinations over the lanes of a SIMD group that are here."""
SOURCES: Mapping[str, str] = {
    "idx": "({low} | ({n} & {last}))", "up": "({lane} - {n} < {low} ? {lane} : {lane} - {n})", "down": "({lane} + {n} > ({low} | {last}) ? {lane} : {lane} + {n})",
    "xor": "(({lane} ^ {n}) > ({low} | {last}) ? {lane} : ({lane} ^ {n}))",
}  # fmt: skip
"""The lane that a shuffle reads from."""

FUNCTIONS: Mapping[str, str] = {
    "tw_min": "template <typename T> T tw_min(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b < a ? b : (1 / a < 0 ? a : b); }",
    "tw_max": "template <typename T> T tw_max(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b > a ? b : (1 / a < 0 ? b : a); }",
    "tw_floordiv": """template <typename U, typename T> T tw_floordiv(T a, T b) {
  if (b == 0) return 0;
  if (b == T(-1)) return T(U(0) - U(a));
  T q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}""",
    "tw_mod": "template <typename T> T tw_mod(T a, T b) { if (b == 0 || b == T(-1)) return 0; T r = a % b; return r != 0 && (r < 0) != (b < 0) ? r + b : r; }",
    "tw_udiv": "template <typename T> T tw_udiv(T a, T b) { return b == 0 ? T(0) : T(a / b); }",
    "tw_urem": "template <typename T> T tw_urem(T a, T b) { return b == 0 ? T(0) : T(a % b); }",
    "tw_whole": "template <typename T> T tw_whole(float x, float low, float end, T least, T most) { return x != x ? T(0) : x < low ? least : x >= end ? most : T(x); }",
    "tw_shuffle": "template <typename T> T tw_shuffle(T x, int lane) { return simd_shuffle(x, ushort(lane)); }",
    "tw_shuffle_bool": "inline bool tw_shuffle_bool(bool x, int lane) { return simd_shuffle(ushort(x), ushort(lane)) != 0; }",
    "tw_shuffle_wide": """template <typename T> T tw_shuffle_wide(T x, int lane) {
  ulong w = as_type<ulong>(x);
  ulong low = simd_shuffle(uint(w), ushort(lane)), high = simd_shuffle(uint(w >> 32), ushort(lane));
  return as_type<T>(high << 32 | low);
}""",
    "tw_ballot": "inline uint tw_ballot(bool x) { return uint(ulong(simd_vote::vote_t(simd_ballot(x)))); }",
}  # fmt: skip
"""Functions that kernels call, in an order in which each may call those before it."""
