"""Loads under a condition -> LLVM text for NVIDIA GPUs: one predicated instruction, no branch.

In: a thread-stage `load` with a mask, the names of its operands and the writer of the function. Out: the name of the value, 0 where
the condition does not hold. LLVM would make a branch of it, and nothing could then be moved past the load.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType
from tilewright.base.errors import CompilerBug
from tilewright.codegen.llvm.emitter import FunctionWriter, memory_type
from tilewright.ir.nodes import Op
from tilewright.ir.types import Tensor, Vec

_SINGLE = {1: ("u8", "h", 16), 2: ("b16", "h", 16), 4: ("b32", "r", 32), 8: ("b64", "l", 64)}
"""For that many bytes: the type, the constraint and the bits of the register they are loaded into."""


_SPACES = {"global": 1, "shared": 3}


def registers(dtype: DType, width: int) -> tuple[int, int, str, str, int]:
    """For that many elements: elements in a register, registers, and the type, the constraint and the bits of one."""
    size = dtype.itemsize
    per_word = max(1, 4 // size) if width * size >= 4 else 1
    return per_word, width // per_word, *_SINGLE[size * per_word]


WIDEST = 16
"""Bytes that one instruction loads or stores at most, before sm_100."""


def pieces(words: int, dtype: DType, per_word: int) -> list[tuple[int, int, str, str]]:
    """The instructions for that many registers: the first of each, how many, the address's offset and the shape as PTX has them."""
    size = dtype.itemsize * per_word
    most = max(1, WIDEST // size)
    found = []
    for first in range(0, words, most):
        count = min(most, words - first)
        found.append((first, count, f"+{first * size}" if first else "", f".v{count}" if count > 1 else ""))
    return found


def register_list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"


def masked_load(w: FunctionWriter, op: Op, operands: Sequence[str], read_only: bool, ordered: bool) -> str:
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    if memory.space not in _SPACES:
        raise CompilerBug.at("TW040", f"no load under a condition from {memory.space} memory", op.span)
    width = op.results[0].type.width if isinstance(op.results[0].type, Vec) else 1
    per_word, words, kind, letter, bits = registers(memory.dtype, width)
    where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
    names = [f"${k}" for k in range(words)]
    zeros = " ".join(f"mov.b{bits} {name}, 0;" for name in names)
    path = ".nc" if read_only else ""
    loads = [
        f"@${words + 1} ld.{memory.space}{path}{shape}.{kind} {register_list(names[first : first + count])}, [${words}{offset}];"
        for first, count, offset, shape in pieces(words, memory.dtype, per_word)
    ]
    text = " ".join([zeros, *loads])
    result = f"i{bits}" if words == 1 else "{ " + ", ".join([f"i{bits}"] * words) + " }"
    constraints = ",".join([f"=&{letter}"] * words + ["l", "b"])
    effect = " sideeffect" if ordered else ""
    found = w.let(
        f'call {result} asm{effect} "{text}", "{constraints}"(ptr addrspace({_SPACES[memory.space]}) {where}, i1 {operands[-1]})'
    )
    parts = [found] if words == 1 else [w.let(f"extractvalue {result} {found}, {k}") for k in range(words)]
    return value_of(w, parts, op, width, per_word, bits)


def value_of(w: FunctionWriter, parts: list[str], op: Op, width: int, per_word: int, bits: int) -> str:
    """The registers as elements of the tensor."""
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    dtype = memory.dtype
    element = memory_type(dtype)
    singles: list[str] = []
    for part in parts:
        if dtype.itemsize == 1 and per_word == 1:
            singles.append(w.let(f"trunc i{bits} {part} to i8"))
        elif per_word == 1:
            singles.append(part if element == f"i{bits}" else w.let(f"bitcast i{bits} {part} to {element}"))
        else:
            pair = f"<{per_word} x {element}>"
            own = w.let(f"bitcast i{bits} {part} to {pair}")
            singles += [w.let(f"extractelement {pair} {own}, i64 {lane}") for lane in range(per_word)]
    if dtype.itemsize == 1 and per_word == 1 and element != "i8":
        singles = [w.let(f"bitcast i8 {one} to {element}") for one in singles]
    if dtype.is_bool:
        singles, element = [w.let(f"icmp ne i8 {one}, 0") for one in singles], "i1"
    if width == 1:
        return singles[0]
    value = "poison"
    for lane, one in enumerate(singles):
        value = w.let(f"insertelement <{width} x {element}> {value}, {element} {one}, i64 {lane}")
    return value
