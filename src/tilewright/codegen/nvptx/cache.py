"""Accesses that tell caches how to treat them -> LLVM text for NVIDIA GPUs.

In: a thread-stage `load`, `store` or `copy_async` with an attribute `cache`, the names of its operands and the writer of the function.
LLVM has no word for any of this, so they are inline assembly. What is said of the second-level cache goes through a policy, which is
made where it is used: LLVM keeps one of those that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.errors import TargetLimit, UserError
from tilewright.base.target import Target
from tilewright.codegen.llvm.emitter import FunctionWriter
from tilewright.codegen.nvptx.masked import pieces, register_list, registers, value_of, width_of, words_of
from tilewright.ir.nodes import Op
from tilewright.ir.types import Tensor

_LEVEL_1 = {"l1_evict_first": "L1::evict_first", "l1_evict_last": "L1::evict_last", "l1_no_allocate": "L1::no_allocate"}
_LEVEL_2 = {"l2_evict_first": "L2::evict_first", "l2_evict_last": "L2::evict_last"}
_SM_LEVEL_2, _PTX_HINTS = 80, 74


def _words(op: Op, target: Target) -> tuple[str, bool]:
    """The hint as the instruction has it, and whether it takes a policy."""
    cache = str(op.attrs["cache"])
    if cache in _LEVEL_2:
        if target.sm < _SM_LEVEL_2:
            raise TargetLimit.at(
                "TW020", f"{target.name} cannot do {op.opcode} with cache={cache!r}: that needs sm_{_SM_LEVEL_2}", op.span
            )
        return ".L2::cache_hint", True
    return f".{_LEVEL_1.get(cache, cache)}", False


def policy_of(w: FunctionWriter, op: Op) -> str:
    """What is said of the second-level cache, as instructions take it."""
    text = f"createpolicy.fractional.{_LEVEL_2[str(op.attrs['cache'])]}.b64 $0, 1.0;"
    return w.let(f'call i64 asm "{text}", "=l"()')


def ptx_version(op: Op) -> int:
    """The PTX version, times ten, that has what the op says of caches; 0 where any has."""
    cache = op.attrs.get("cache")
    return _PTX_HINTS if cache in _LEVEL_1 or cache in _LEVEL_2 or op.attrs.get("prefetch") else 0


def load(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target, written: bool) -> str:
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    if op.attrs["cache"] == "nc" and written:
        raise UserError.at(
            "TW005", "a load with cache='nc' of an array that the kernel writes, or that may be one it writes", op.span,
            "that path may give old values: leave `cache` out",
        )  # fmt: skip
    where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
    width = width_of(op.results[0].type)
    per_word, words, kind, letter, bits = registers(memory.dtype, width)
    hint, policy = _words(op, target)
    names = [f"${k}" for k in range(words)]
    given_policy = f", ${words + 1}" if policy else ""
    text = " ".join(
        f"ld.global{hint}{shape}.{kind} {register_list(names[first : first + count])}, [${words}{offset}]{given_policy};"
        for first, count, offset, shape in pieces(words, memory.dtype, per_word)
    )
    result = f"i{bits}" if words == 1 else "{ " + ", ".join([f"i{bits}"] * words) + " }"
    written_early = "&" if len(pieces(words, memory.dtype, per_word)) > 1 else ""
    constraints = ",".join([f"={written_early}{letter}"] * words + ["l"] + ["l"] * policy + ["~{memory}"])
    given = f"ptr addrspace(1) {where}" + (f", i64 {policy_of(w, op)}" if policy else "")
    found = w.let(f'call {result} asm sideeffect "{text}", "{constraints}"({given})')
    parts = [found] if words == 1 else [w.let(f"extractvalue {result} {found}, {k}") for k in range(words)]
    return value_of(w, parts, op, width, per_word, bits)


def store(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    memory, type_ = op.operands[0].type, op.operands[-1].type
    assert isinstance(memory, Tensor)
    where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
    per_word, words, kind, letter, bits = registers(memory.dtype, width_of(type_))
    hint, policy = _words(op, target)
    names = [f"${1 + k}" for k in range(words)]
    given_policy = f", ${1 + words}" if policy else ""
    text = " ".join(
        f"st.global{hint}{shape}.{kind} [$0{offset}], {register_list(names[first : first + count])}{given_policy};"
        for first, count, offset, shape in pieces(words, memory.dtype, per_word)
    )
    given = [f"ptr addrspace(1) {where}", *(f"i{bits} {part}" for part in words_of(w, memory, type_, operands[-1]))]
    if policy:
        given.append(f"i64 {policy_of(w, op)}")
    constraints = ",".join(["l"] + [letter] * words + ["l"] * policy + ["~{memory}"])
    w.line(f'call void asm sideeffect "{text}", "{constraints}"({", ".join(given)})')
    return []


def copy_with_hints(w: FunctionWriter, op: Op, to: str, origin: str, wanted: str) -> None:
    """A `copy_async` with a cache or a prefetch; `wanted` says whether to copy, empty for always."""
    bytes_, cache, prefetch = op.attrs["bytes"], str(op.attrs.get("cache", "")), op.attrs.get("prefetch", 0)
    policy = cache in _LEVEL_2
    level = cache if cache in ("ca", "cg") else "cg" if bytes_ == 16 else "ca"
    words = (".L2::cache_hint" if policy else "") + (f".L2::{prefetch}B" if prefetch else "")
    given = [f"i32 {w.let(f'ptrtoint ptr addrspace(3) {to} to i32')}", f"ptr addrspace(1) {origin}"]
    constraints = ["r", "l"]
    tail = ""
    for value, letter in (
        (f"i32 {w.let(f'select i1 {wanted}, i32 {bytes_}, i32 0')}" if wanted else "", "r"),
        (f"i64 {policy_of(w, op)}" if policy else "", "l"),
    ):
        if value:
            tail += f", ${len(given)}"
            given.append(value)
            constraints.append(letter)
    text = f"cp.async.{level}.shared.global{words} [$0], [$1], {bytes_}{tail};"
    w.line(f'call void asm sideeffect "{text}", "{",".join([*constraints, "~{memory}"])}"({", ".join(given)})')
