"""A critical function with C's calling convention. In: a `CriticalText`; out: LLVM text of the function alone, and its C header.

A function that cannot fail returns its result. One with faults returns 0 or the number of its fault (`int64_t`), and writes its result, which is then the
last parameter, only where it is 0. States are structs, arrays are pointers to their first element. This is the code that proofs are about.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType
from tilewright.base.target import Target
from tilewright.codegen.critical.body import body_text, fault_texts, llvm_argument, result_type
from tilewright.codegen.critical.records import CriticalArgument, CriticalText
from tilewright.codegen.host.c_entry import identifier

C_TYPES = {
    "bool": "bool", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t", "u8": "uint8_t", "u16": "uint16_t",
    "u32": "uint32_t", "u64": "uint64_t", "f32": "float", "f64": "double",
}  # fmt: skip


def can_fail(text: CriticalText) -> bool:
    return bool(fault_texts(text.kernel))


def _extended(dtype: DType) -> str:
    """The LLVM type of a number in a call by C's rules."""
    if dtype.is_bool:
        return "i8 zeroext"
    return f"{dtype.llvm} {'signext' if dtype.kind == 'i' else 'zeroext'}" if dtype.is_int and dtype.bits < 32 else dtype.llvm


def c_function_text(text: CriticalText, target: Target, symbol: str) -> str:
    """The module with `symbol` and nothing else that is seen from outside."""
    body, needs = body_text(text, target)
    params, lines, passed = [], [], []
    for position, argument in enumerate(text.arguments):
        kind = llvm_argument(argument)
        if argument.is_memory or argument.dtype is None:
            params.append(f"ptr %a{position}")
        else:
            params.append(f"{_extended(argument.dtype)} %a{position}")
        if kind == "i1":
            lines.append(f"  %b{position} = icmp ne i8 %a{position}, 0")
        passed.append(f"{kind} %{'b' if kind == 'i1' else 'a'}{position}")
    fails = can_fail(text)
    result = text.result
    lines += ["  %result = alloca i64, align 8", "  %detail = alloca [2 x i64], align 8"]
    lines.append(f"  %code = call i64 @{text.name}.body({', '.join([*passed, 'ptr %result', 'ptr %detail'])})")
    returns = "void"
    if result is not None:
        lines.append(f"  %value = load {result_type(result)}, ptr %result")
    if fails:
        returns = "i64"
        if result is not None:
            params.append("ptr %to")
            lines += ["  %fine = icmp eq i64 %code, 0", "  br i1 %fine, label %keep, label %done", "keep:", f"  store {result_type(result)} %value, ptr %to", "  br label %done", "done:"]
        lines.append("  ret i64 %code")
    elif result is not None:
        returns = _extended(result).partition(" ")[0]
        lines.append(f"  ret {returns} %value")
    else:
        lines.append("  ret void")
    attribute = "zeroext " if result is not None and not fails and (result.is_bool or (result.kind == "u" and result.bits < 32)) else ""
    attribute = attribute or ("signext " if result is not None and not fails and result.kind == "i" and result.bits < 32 else "")
    head = f'define {attribute}{returns} @{symbol}({", ".join(params)}) nounwind "no-builtins" {{\nentry:\n'
    return "\n".join([*sorted(needs), body, head + "\n".join(lines) + "\n}", ""])


def header_text(text: CriticalText, symbol: str, structs: Sequence[str], places: Sequence[str]) -> str:
    """The C header: the structs of its states, the numbers of its faults, the prototype. `places`: where each fault is in the source."""
    guard = f"TILEWRIGHT_{identifier(symbol).upper()}_H"
    params = [_declaration(argument) for argument in text.arguments]
    fails, result = can_fail(text), text.result
    returns = "int64_t" if fails else C_TYPES[result.name] if result is not None else "void"
    if fails and result is not None:
        params.append(f"{C_TYPES[result.name]} *result")
    said = [f" *   {number}: {what.replace('{0}', 'a').replace('{1}', 'b')} ({place})" for number, ((_, what), place) in enumerate(zip(fault_texts(text.kernel), places, strict=True), 1)]
    comment = ["/* Returns 0, or the number of a fault; the result is written only where it is 0:", *said, " */"] if fails else ["/* It cannot fail. */"]
    lines = [
        f"#ifndef {guard}", f"#define {guard}", "", "#include <stdbool.h>", "#include <stdint.h>", "", "#ifdef __cplusplus", 'extern "C" {', "#endif", "",
        *structs, *comment, f"{returns} {symbol}({', '.join(params) or 'void'});", "", "#ifdef __cplusplus", "}", "#endif", "#endif", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _declaration(argument: CriticalArgument) -> str:
    name = identifier(argument.name)
    const = "" if argument.written else "const "
    if argument.state:
        return f"{const}{identifier(argument.state)} *{name}"
    assert argument.dtype is not None
    if argument.is_memory:
        return f"{const}{C_TYPES[argument.dtype.name]} *{name}"
    return f"{C_TYPES[argument.dtype.name]} {name}"
