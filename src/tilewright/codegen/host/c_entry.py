"""A CPU program as a C function. In: an `Artifact` (signature, sizes, checks, launches); out: LLVM text to stand beside its kernels.

    int32_t name(inputs..., outputs..., sizes...)
    int32_t name_with(inputs..., outputs..., sizes..., runner, context)

Arrays are pointers, scalars have their C types, sizes and strides are `int64_t` under the names the kernel gave them, each once. The
result is 0, or says why it was not done: the number of the check that failed (from 1), or one of the codes below. A runner is
called as `runner(context, body, slots, blocks)` for each launch and calls `body(slots, begin, end)` until all blocks have run, from as
many threads as it likes; without one the blocks run here.
"""

from __future__ import annotations

import re

from tilewright.base import abi
from tilewright.base.artifact import FAILURE, ArrayParam, Artifact, CallCheck, ScalarParam
from tilewright.base.dtypes import DType
from tilewright.base.sizes import ONE, ZERO, Size, number_name, product
from tilewright.codegen.llvm.sizes import CHECKED_STEPS, DECLARATIONS, SizeEmitter

NO_MEMORY, NEGATIVE, MISALIGNED, TOO_LARGE, NULL = -1, -2, -3, -4, -5
OUTSIDE = -1000
"""An index that is checked as the kernel runs lay outside its array: this, less the number of its site (from 1). Arrays may hold part
of the results then."""
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
        "\n".join((*DECLARATIONS, *CHECKED_STEPS))
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
        self.sizes = SizeEmitter(self.lines, {}, checked=True)

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

    def unless_overflow(self, code: int) -> None:
        """Return `code` where a size computed since the last time left 64 bits."""
        for overflow in self.sizes.take_overflows():
            self.unless(self.new(f"xor i1 {overflow}, true"), code)

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
        for name, size in artifact.computed:
            self.sizes.bind(name, self.sizes.value(size))
            self.unless_overflow(TOO_LARGE)
        for number, check in enumerate(call_checks(artifact), 1):
            left, right = self.sizes.value(check.left), self.sizes.value(check.right)
            self.unless_overflow(TOO_LARGE)
            self.unless(self.new(f"icmp {_RELATIONS[check.relation]} i64 {left}, {right}"), number)
        for param in (*artifact.inputs, *artifact.outputs):
            if isinstance(param, ArrayParam):
                self._not_null(param)
            if isinstance(param, ArrayParam) and param.align > 1:
                low = self.new(f"and i64 {self.words[param.name]}, {param.align - 1}")
                self.unless(self.new(f"icmp eq i64 {low}, 0"), MISALIGNED)
        blocks = [self.sizes.value(product(launch.grid or (ONE,))) for launch in artifact.launches]
        self.unless_overflow(TOO_LARGE)
        heap = self._scratch()
        cell = self.new(f"inttoptr i64 {self.words[FAILURE]} to ptr") if artifact.sites else ""
        if cell:
            self.line(f"store i64 0, ptr {cell}")
        report = self._launches(blocks)
        site = self.new(f"load i64, ptr {cell}") if cell else ""
        if heap:
            self.line(f"call void @free(ptr {heap})")
        if report:
            self.unless(self.new(f"icmp eq i64 {self.new(f'load i64, ptr {report}')}, 0"), NO_MEMORY)
        if site:
            outside = self.new(f"sub i64 {OUTSIDE}, {site}")
            code = self.new(f"select i1 {self.new(f'icmp eq i64 {site}, 0')}, i64 0, i64 {outside}")
            self.line(f"ret i32 {self.new(f'trunc i64 {code} to i32')}")
        else:
            self.line("ret i32 0")
        return self.lines

    def _not_null(self, param: ArrayParam) -> None:
        """An array has memory, or no elements."""
        fine = self.new(f"icmp ne i64 {self.words[param.name]}, 0")
        for extent in param.shape:
            if extent.constant is None or extent.constant <= 0:
                empty = self.new(f"icmp sle i64 {self.sizes.value(extent)}, 0")
                self.unless_overflow(TOO_LARGE)
                fine = self.new(f"or i1 {fine}, {empty}")
        self.unless(fine, NULL)

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
            self.sizes.bind(number_name(param.name), bits)

    def _scratch(self) -> str:
        """One piece of memory for all scratch arrays; '' where there are none."""
        if not self.artifact.scratch:
            return ""
        unit = abi.SCRATCH_ALIGN
        total = ZERO
        places: list[Size] = []
        for array in self.artifact.scratch:
            places.append(total)
            nbytes = product(array.shape) // array.dtype.block * array.dtype.itemsize
            total = total + (nbytes + (unit - 1)) // unit * unit
        offsets = [self.sizes.value(place) for place in places]
        amount = self.sizes.value(total + unit)
        extents = [self.sizes.value(extent) for array in self.artifact.scratch for extent in array.shape if extent.constant is None]
        self.unless_overflow(NO_MEMORY)
        for extent in dict.fromkeys(extents):
            self.unless(self.new(f"icmp sge i64 {extent}, 0"), NEGATIVE)
        heap = self.new(f"call ptr @malloc(i64 {amount})")
        self.unless(self.new(f"icmp ne ptr {heap}, null"), NO_MEMORY)
        start = self.new(f"ptrtoint ptr {heap} to i64")
        start = self.new(f"and i64 {self.new(f'add i64 {start}, {unit - 1}')}, {-unit}")
        for array, offset in zip(self.artifact.scratch, offsets, strict=True):
            self.words[array.name] = self.new(f"add i64 {start}, {offset}")
        return heap

    def _launches(self, blocks: list[str]) -> str:
        """Run all. Gives where a launch reports that it had no memory for arrays of its own; '' where none needs any."""
        most = max((len(x.args) + len(x.sizes) + 1 for x in self.artifact.launches), default=1)
        slots = self.new(f"alloca [{max(1, most)} x i64], align 8")
        report = word_at = ""
        if any(launch.asserts for launch in self.artifact.launches):
            report = self.new("alloca i64, align 8")
            self.line(f"store i64 0, ptr {report}")
            word_at = self.new(f"ptrtoint ptr {report} to i64")
        for index, launch in enumerate(self.artifact.launches):
            words = [self.words[name] for name in launch.args] + [self.sizes.value(Size.of(name)) for name in launch.sizes]
            if launch.asserts:
                words.append(word_at)
            for position, word in enumerate(words):
                self.line(f"store i64 {word}, ptr {self.new(f'getelementptr i64, ptr {slots}, i64 {position}')}")
            direct = self.new("icmp eq ptr %runner, null")
            self.line(f"br i1 {direct}, label %here{index}, label %there{index}")
            self.lines += [
                f"here{index}:", f"  call void @{launch.entry}(ptr {slots}, i64 0, i64 {blocks[index]})", f"  br label %done{index}",
                f"there{index}:", f"  call void %runner(ptr %context, ptr @{launch.entry}, ptr {slots}, i64 {blocks[index]})",
                f"  br label %done{index}", f"done{index}:",
            ]  # fmt: skip
        return report
