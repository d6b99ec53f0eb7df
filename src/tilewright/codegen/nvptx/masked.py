"""Loads and stores under a condition -> LLVM text for NVIDIA GPUs: one predicated instruction, no branch.

In: a thread-stage `load` or `store` with a mask, the names of its operands and the writer of the function. Out: of a load the name of the value, 0 where
the condition does not hold. LLVM would make a branch of it: nothing could then be moved past a load, and each store would compute its address anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType
from tilewright.base.errors import CompilerBug
from tilewright.codegen.llvm.emitter import FunctionWriter, llvm_type, memory_type
from tilewright.ir.nodes import Op
from tilewright.ir.types import Tensor, Type, Vec

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


def masked_store(w: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str]:
    memory, type_ = op.operands[0].type, op.operands[-2].type
    assert isinstance(memory, Tensor)
    where = w.element_pointer(op.operands[0], operands[1 : 1 + memory.rank])
    per_word, words, kind, letter, bits = registers(memory.dtype, width_of(type_))
    names = [f"${2 + k}" for k in range(words)]
    text = " ".join(
        f"@$1 st.{memory.space}{shape}.{kind} [$0{offset}], {register_list(names[first : first + count])};"
        for first, count, offset, shape in pieces(words, memory.dtype, per_word)
    )
    given = [f"ptr addrspace({_SPACES[memory.space]}) {where}", f"i1 {operands[-1]}"]
    given += [f"i{bits} {word}" for word in words_of(w, memory, type_, operands[-2])]
    constraints = ",".join(["l", "b", *[letter] * words, "~{memory}"])
    w.line(f'call void asm sideeffect "{text}", "{constraints}"({", ".join(given)})')
    return []


def width_of(type_: Type) -> int:
    return type_.width if isinstance(type_, Vec) else 1


def words_of(w: FunctionWriter, memory: Tensor, type_: Type, value: str) -> list[str]:
    """A value as the registers that a store takes."""
    element, width = memory_type(memory.dtype), width_of(type_)
    per_word, words, _, _, bits = registers(memory.dtype, width)
    if memory.dtype.is_bool:
        value = w.let(f"zext {llvm_type(type_)} {value} to {memory_type(memory.dtype, width)}")
    size = memory.dtype.itemsize * 8 * per_word
    if width == 1:
        singles = [value if element == f"i{size}" else w.let(f"bitcast {element} {value} to i{size}")]
    else:
        whole = memory_type(memory.dtype, width)
        packed = value if whole == f"<{words} x i{size}>" else w.let(f"bitcast {whole} {value} to <{words} x i{size}>")
        if words == 1:
            singles = [w.let(f"bitcast {whole} {value} to i{size}")]
        else:
            singles = [w.let(f"extractelement <{words} x i{size}> {packed}, i64 {k}") for k in range(words)]
    return singles if size == bits else [w.let(f"zext i{size} {one} to i{bits}") for one in singles]


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
