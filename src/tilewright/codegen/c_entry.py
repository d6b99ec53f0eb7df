"""A CPU program as a C function. In: an `Artifact` (signature, sizes, checks, launches); out: LLVM text to stand beside its kernels.

    int32_t name(inputs..., outputs..., sizes...)
    int32_t name_with(inputs..., outputs..., sizes..., runner, context)

Arrays are pointers, scalars have their C types, sizes and strides are `int64_t` under the names the kernel gave them, each once. The
result is 0, or says why nothing was done: the number of the check that failed (from 1), or one of the codes below. A runner is
called as `runner(context, body, slots, blocks)` for each launch and calls `body(slots, begin, end)` until all blocks have run, from as
many threads as it likes; without one the blocks run here.
"""

from __future__ import annotations

import re

from tilewright.base import abi
from tilewright.base.artifact import ArrayParam, Artifact, CallCheck, ScalarParam
from tilewright.base.dtypes import DType
from tilewright.base.sizes import ONE, ZERO, Size, product
from tilewright.codegen.sizes import DECLARATIONS, SizeEmitter

NO_MEMORY, NEGATIVE, MISALIGNED = -1, -2, -3
_RELATIONS = {"eq": "eq", "le": "sle", "lt": "slt"}
_SCALARS = {"bool": "i8", "f16": "i16", "bf16": "i16", "f8e4m3": "i8", "f8e5m2": "i8", "f32": "float", "f64": "double"}


def identifier(name: str) -> str:
    """A name C and Python accept."""
    text = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{text}" if text[:1].isdigit() else text


def size_names(artifact: Artifact) -> tuple[str, ...]:
    """Sizes and strides a caller gives, in the order they are bound; scalars among them are given as such."""
    scalars = {p.name for p in artifact.inputs if isinstance(p, ScalarParam)}
    return tuple(dict.fromkeys(b.name for b in artifact.bindings if b.name not in scalars))


def call_checks(artifact: Artifact) -> tuple[CallCheck, ...]:
    """All that must hold of the sizes, in the order of their numbers."""
    facts = tuple(
        CallCheck(Size.of(name) % divisor, "eq", ZERO, f"{name} must be a multiple of {divisor}: this code was made for that")
        for name, divisor in artifact.facts
    )
    return (*artifact.checks, *facts)


def scalar_type(dtype: DType) -> str:
    """The LLVM type a scalar is passed as."""
    return _SCALARS.get(dtype.name) or f"i{dtype.bits}"


def entry_text(artifact: Artifact, name: str) -> str:
    """LLVM text that defines `name` and `name_with`; the kernels' own functions are in the same module."""
    writer = _Writer(artifact)
    body = "\n".join(writer.emit())
    plain = ", ".join(writer.parameters)
    passed = ", ".join((*writer.parameters, "ptr null", "ptr null"))
    return (
        "\n".join(DECLARATIONS)
        + f"\ndefine i32 @{name}_with({', '.join((*writer.parameters, 'ptr %runner', 'ptr %context'))}) nounwind {{\nentry:\n{body}\n}}\n"
        + f"define i32 @{name}({plain}) nounwind {{\nentry:\n"
        + f"  %code = call i32 @{name}_with({passed})\n  ret i32 %code\n}}\n"
    )


class _Writer:
    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.lines: list[str] = []
        self.count = 0
        self.parameters: list[str] = []
        self.words: dict[str, str] = {}
        """The i64 that goes into the slot of each array and scalar."""
        self.sizes = SizeEmitter(self.lines, {})

    def line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def new(self, instruction: str) -> str:
        self.count += 1
        self.line(f"%c{self.count} = {instruction}")
        return f"%c{self.count}"

    def unless(self, condition: str, code: int) -> None:
        """Return `code` where the condition does not hold."""
        self.count += 1
        self.line(f"br i1 {condition}, label %go{self.count}, label %no{self.count}")
        self.lines += [f"no{self.count}:", f"  ret i32 {code}", f"go{self.count}:"]

    def emit(self) -> list[str]:
        artifact = self.artifact
        for position, param in enumerate((*artifact.inputs, *artifact.outputs)):
            self._parameter(param, f"%a{position}")
        named = size_names(artifact)
        for position, name in enumerate(named):
            self.parameters.append(f"i64 %s{position}")
            self.sizes.bind(name, f"%s{position}")
        extents = [b.name for b in artifact.bindings if not b.stride and b.name in named]
        for name in dict.fromkeys(extents):
            self.unless(self.new(f"icmp sge i64 {self.sizes.values[name]}, 0"), NEGATIVE)
        for number, check in enumerate(call_checks(artifact), 1):
            left, right = self.sizes.value(check.left), self.sizes.value(check.right)
            self.unless(self.new(f"icmp {_RELATIONS[check.relation]} i64 {left}, {right}"), number)
        for param in (*artifact.inputs, *artifact.outputs):
            if isinstance(param, ArrayParam) and param.align > 1:
                low = self.new(f"and i64 {self.words[param.name]}, {param.align - 1}")
                self.unless(self.new(f"icmp eq i64 {low}, 0"), MISALIGNED)
        heap = self._scratch()
        self._launches()
        if heap:
            self.line(f"call void @free(ptr {heap})")
        self.line("ret i32 0")
        return self.lines

    def _parameter(self, param: ArrayParam | ScalarParam, register: str) -> None:
        if isinstance(param, ArrayParam):
            self.parameters.append(f"ptr {register}")
            self.words[param.name] = self.new(f"ptrtoint ptr {register} to i64")
            return
        kind = scalar_type(param.dtype)
        self.parameters.append(f"{kind} {register}")
        bits = register
        if kind in ("float", "double"):
            bits = self.new(f"bitcast {kind} {register} to i{param.dtype.bits}")
        if param.dtype.is_bool:
            bits = self.new(f"zext i1 {self.new(f'icmp ne i8 {register}, 0')} to i64")
        elif param.dtype.itemsize < 8:
            extend = "sext" if param.dtype.kind == "i" else "zext"
            bits = self.new(f"{extend} i{8 * param.dtype.itemsize} {bits} to i64")
        self.words[param.name] = bits
        if param.dtype.is_int:
            self.sizes.bind(param.name, bits)

    def _scratch(self) -> str:
        """One piece of memory for all scratch arrays; '' where there are none."""
        if not self.artifact.scratch:
            return ""
        unit = abi.SCRATCH_ALIGN
        total = "0"
        offsets: list[str] = []
        for array in self.artifact.scratch:
            offsets.append(total)
            count = self.sizes.value(product(array.shape))
            nbytes = self.new(f"mul i64 {count}, {array.dtype.itemsize}")
            if array.dtype.block > 1:
                nbytes = self.new(f"sdiv i64 {nbytes}, {array.dtype.block}")
            whole = self.new(f"and i64 {self.new(f'add i64 {nbytes}, {unit - 1}')}, {-unit}")
            total = self.new(f"add i64 {total}, {whole}")
        heap = self.new(f"call ptr @malloc(i64 {self.new(f'add i64 {total}, {unit}')})")
        self.unless(self.new(f"icmp ne ptr {heap}, null"), NO_MEMORY)
        start = self.new(f"ptrtoint ptr {heap} to i64")
        start = self.new(f"and i64 {self.new(f'add i64 {start}, {unit - 1}')}, {-unit}")
        for array, offset in zip(self.artifact.scratch, offsets, strict=True):
            self.words[array.name] = self.new(f"add i64 {start}, {offset}")
        return heap

    def _launches(self) -> None:
        most = max((len(x.args) + len(x.sizes) for x in self.artifact.launches), default=1)
        slots = self.new(f"alloca [{max(1, most)} x i64], align 8")
        for index, launch in enumerate(self.artifact.launches):
            words = [self.words[name] for name in launch.args] + [self.sizes.value(Size.of(name)) for name in launch.sizes]
            for position, word in enumerate(words):
                self.line(f"store i64 {word}, ptr {self.new(f'getelementptr i64, ptr {slots}, i64 {position}')}")
            blocks = self.sizes.value(product(launch.grid or (ONE,)))
            direct = self.new("icmp eq ptr %runner, null")
            self.line(f"br i1 {direct}, label %here{index}, label %there{index}")
            self.lines += [
                f"here{index}:", f"  call void @{launch.entry}(ptr {slots}, i64 0, i64 {blocks})", f"  br label %done{index}",
                f"there{index}:", f"  call void %runner(ptr %context, ptr @{launch.entry}, ptr {slots}, i64 {blocks})",
                f"  br label %done{index}", f"done{index}:",
            ]  # fmt: skip
