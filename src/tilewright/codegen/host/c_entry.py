"""A CPU program as a C function. In: an `Artifact` (signature, sizes, checks, launches); out: LLVM text to stand beside its kernels.

    int32_t name(inputs..., outputs..., sizes...)
    int32_t name_with(inputs..., outputs..., sizes..., runner, context)
    int32_t name_using(inputs..., outputs..., sizes..., scratch, scratch_bytes, runner, context)
    int64_t name_scratch_bytes(whole numbers..., sizes...)

Arrays are pointers, scalars have their C types, sizes and strides are `int64_t` under the names the kernel gave them, each once. The
result is 0, or says why it was not done: the number of the check that failed (from 1), or one of the codes below. A runner is
called as `runner(context, body, slots, blocks)` for each launch and calls `body(slots, begin, end)` until all blocks have run, from as
many threads as it likes; without one the blocks run here. Arrays between kernels lie in memory of malloc, or with `name_using` in memory of
the caller, who asks `name_scratch_bytes` how much. A number that is *fixed* is part of the code and no parameter.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from types import MappingProxyType

from tilewright.base import abi
from tilewright.base.artifact import FAILURE, ArrayParam, Artifact, CallCheck, ScalarParam
from tilewright.base.dtypes import DType
from tilewright.base.sizes import ONE, ZERO, Size, number_name, product
from tilewright.codegen.llvm.sizes import CHECKED_STEPS, DECLARATIONS, SizeEmitter

NO_MEMORY, NEGATIVE, MISALIGNED, TOO_LARGE, NULL, SCRATCH = -1, -2, -3, -4, -5, -6
OUTSIDE = -1000
"""An index that is checked as the kernel runs lay outside its array: this, less the number of its site (from 1). Arrays may hold part
of the results then."""
Fixed = Mapping[str, bool | int | float]
"""Numbers that are part of the code, by the names of the parameters that take them."""
NOTHING_FIXED: Fixed = MappingProxyType({})
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


def whole_numbers(artifact: Artifact) -> tuple[ScalarParam, ...]:
    """The numbers among the inputs that sizes may be computed from."""
    return tuple(p for p in artifact.inputs if isinstance(p, ScalarParam) and p.dtype.is_int)


def exported_names(name: str) -> tuple[str, ...]:
    """The functions that a program is seen by from outside."""
    return name, f"{name}_with", f"{name}_using", f"{name}_scratch_bytes"


def entry_text(artifact: Artifact, name: str, fixed: Fixed = NOTHING_FIXED) -> str:
    """LLVM text that defines the functions; the kernels' own are in the same module."""
    writer = _Writer(artifact, fixed)
    body = "\n".join(writer.emit())
    plain = writer.parameters
    threads = ["ptr %runner", "ptr %context"]
    memory = ["ptr %scratch", "i64 %scratch_bytes"]

    def function(called: str, parameters: list[str], passed: list[str]) -> str:
        call = f"call i32 @{name}.run({', '.join((*plain, *passed))})"
        return f"define i32 @{called}({', '.join(parameters)}) nounwind {{\nentry:\n  %code = {call}\n  ret i32 %code\n}}\n"

    asked = _Writer(artifact, fixed)
    count = "\n".join(asked.emit_bytes())
    return (
        "\n".join((*DECLARATIONS, *CHECKED_STEPS))
        + f"\ndefine internal i32 @{name}.run({', '.join((*plain, *memory, 'i1 %own', *threads))}) nounwind {{\nentry:\n{body}\n}}\n"
        + function(f"{name}_using", [*plain, *memory, *threads], [*memory, "i1 true", *threads])
        + function(f"{name}_with", [*plain, *threads], ["ptr null", "i64 0", "i1 false", *threads])
        + function(name, plain, ["ptr null", "i64 0", "i1 false", "ptr null", "ptr null"])
        + f"define i64 @{name}_scratch_bytes({', '.join(asked.parameters)}) nounwind {{\nentry:\n{count}\n}}\n"
    )


def _constant(dtype: DType, value: bool | int | float) -> str:
    """A number as LLVM writes it, in the type of its parameter."""
    if dtype.kind != "f":
        return str(int(value))
    number = float(dtype.numpy.type(value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


class CheckedLines:
    """Lines of a function that returns a code where something does not hold. `kind` is the type of the result."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.lines: list[str] = []
        self.count = 0
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
        self.lines += [f"no{self.count}:", f"  ret {self.kind} {code}", f"go{self.count}:"]

    def unless_overflow(self, code: int) -> None:
        """Return `code` where a size computed since the last time left 64 bits."""
        for overflow in self.sizes.take_overflows():
            self.unless(self.new(f"xor i1 {overflow}, true"), code)


class _Writer(CheckedLines):
    def __init__(self, artifact: Artifact, fixed: Fixed) -> None:
        self.artifact = artifact
        self.fixed = fixed
        super().__init__("i32")
        self.parameters: list[str] = []
        self.words: dict[str, str] = {}
        """The i64 that goes into the slot of each array and scalar."""

    def emit(self) -> list[str]:
        artifact = self.artifact
        for position, param in enumerate((*artifact.inputs, *artifact.outputs)):
            self._parameter(param, f"%a{position}")
        self._sizes()
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

    def emit_bytes(self) -> list[str]:
        """How many bytes the scratch arrays need, or a code below 0."""
        self.kind = "i64"
        for position, param in enumerate(whole_numbers(self.artifact)):
            self._parameter(param, f"%a{position}")
        self._sizes()
        amount, _ = self._amount(TOO_LARGE)
        self.line(f"ret i64 {amount}")
        return self.lines

    def _sizes(self) -> None:
        """The sizes that the caller gives, and those computed from them."""
        artifact = self.artifact
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
        if param.name in self.fixed:
            register = _constant(param.dtype, self.fixed[param.name])
        else:
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
        """One piece of memory for all scratch arrays, of the caller or of malloc. Gives what to free; '' where there are none."""
        if not self.artifact.scratch:
            return ""
        unit = abi.SCRATCH_ALIGN
        amount, offsets = self._amount(NO_MEMORY)
        self.line("br i1 %own, label %given, label %taken")
        self.lines.append("given:")
        enough = self.new(f"icmp sge i64 %scratch_bytes, {amount}")
        self.unless(self.new(f"and i1 {enough}, {self.new('icmp ne ptr %scratch, null')}"), SCRATCH)
        self.line("br label %placed")
        given = f"%go{self.count}"
        self.lines.append("taken:")
        heap = self.new(f"call ptr @malloc(i64 {amount})")
        self.unless(self.new(f"icmp ne ptr {heap}, null"), NO_MEMORY)
        self.line("br label %placed")
        taken = f"%go{self.count}"
        self.lines.append("placed:")
        place = self.new(f"phi ptr [ %scratch, {given} ], [ {heap}, {taken} ]")
        freed = self.new(f"phi ptr [ null, {given} ], [ {heap}, {taken} ]")
        start = self.new(f"ptrtoint ptr {place} to i64")
        start = self.new(f"and i64 {self.new(f'add i64 {start}, {unit - 1}')}, {-unit}")
        for array, offset in zip(self.artifact.scratch, offsets, strict=True):
            self.words[array.name] = self.new(f"add i64 {start}, {offset}")
        return freed

    def _amount(self, code: int) -> tuple[str, list[str]]:
        """The bytes of all scratch arrays, with room to align them, and where each begins. `code` where 64 bits do not hold them."""
        if not self.artifact.scratch:
            return "0", []
        unit = abi.SCRATCH_ALIGN
        total = ZERO
        places: list[Size] = []
        for array in self.artifact.scratch:
            places.append(total)
            nbytes = product(array.shape) // array.dtype.block * array.dtype.itemsize
            total = total + (nbytes + (unit - 1)) // unit * unit
        offsets = [self.sizes.value(place) for place in places]
        amount = self.sizes.value(total + unit)
        extents = [
            self.sizes.value(extent)
            for array in self.artifact.scratch
            for extent in array.shape
            if extent.constant is None
        ]
        self.unless_overflow(code)
        for extent in dict.fromkeys(extents):
            self.unless(self.new(f"icmp sge i64 {extent}, 0"), NEGATIVE)
        return amount, offsets

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
