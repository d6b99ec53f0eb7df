"""A critical function as LLVM text. In: a thread-stage kernel of one thread and its arguments; out: `i64 @name.body(arguments…, ptr result, ptr detail)`.

The function gives 0, or the number of the fault that ended it (from 1), with two numbers about it in `detail`. It is always inlined, so that result and
detail are registers of what calls it. It asks nobody whether to stop, and may not be turned into calls of the C library (`no-builtins`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.base.dtypes import DType
from tilewright.base.target import Target
from tilewright.codegen.cpu.emitter import CpuDialect, faults
from tilewright.codegen.critical.records import CriticalArgument, CriticalText
from tilewright.codegen.llvm.constants import initialiser
from tilewright.codegen.llvm.emitter import FunctionWriter
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor

_LINE = 64


class CriticalDialect(CpuDialect):
    """A CPU on the critical path: faults leave at once, loops do not rest, the clock is the one that all cores share."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target.has_range)
        self.target = target

    def emit(self, writer: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str] | None:
        if op.opcode == "fault":
            ordinal = next(k for k, one in enumerate(self.failures, 1) if one is op)
            writer.line(f"store i64 {operands[0]}, ptr %detail, align 8")
            second = writer.let("getelementptr inbounds i8, ptr %detail, i64 8")
            writer.line(f"store i64 {operands[1]}, ptr {second}, align 8")
            writer.line(f"store i64 {ordinal}, ptr %code, align 8")
            writer.line("br label %out")
            writer.open_label(writer.new_label("after"))
            return []
        if op.opcode == "clock":
            now = read_counter(writer, self.target)
            return [now if op.attrs.get("bits", 64) == 64 else writer.let(f"trunc i64 {now} to i32")]
        return super().emit(writer, op, operands)

    def turn(self, w: FunctionWriter, op: Op) -> None:
        return

    def rest(self, w: FunctionWriter, op: Op) -> int:
        return 0

    def pause(self, w: FunctionWriter) -> None:
        return


COUNTERS = ("declare i64 @llvm.readcyclecounter()", "declare i64 @llvm.read_volatile_register.i64(metadata)")
"""What readings of the counter call."""


def counter(target: Target, fenced: bool = False) -> str:
    """What LLVM calls to read the counter: CNTVCT on AArch64, RDTSC on x86. `fenced`: after all instructions before it, on the machine we run on."""
    if target.triple.startswith(("aarch64", "arm64")):
        if fenced:
            return 'i64 asm sideeffect "isb sy; mrs $0, cntvct_el0", "=r"()'
        # Assembly would need its parser, which LLVM has for the machine it runs on alone.
        return 'i64 @llvm.read_volatile_register.i64(metadata !{!"cntvct_el0"})'
    if fenced and target.triple.startswith("x86_64"):
        return 'i64 asm sideeffect "lfence; rdtsc; shlq $$32, %rdx; orq %rdx, %rax", "={ax},~{dx},~{dirflag},~{fpsr},~{flags}"()'
    return "i64 @llvm.readcyclecounter()"


def read_counter(writer: FunctionWriter, target: Target) -> str:
    writer.declarations |= set(COUNTERS)
    return writer.let(f"call {counter(target)}")


def llvm_parameter(argument: CriticalArgument, name: str) -> str:
    """A parameter of the body: a bool is an i1."""
    if argument.is_memory:
        return f"ptr noundef nonnull align {argument.align} dereferenceable({argument.size}) {name}"
    assert argument.dtype is not None
    return f"{argument.dtype.llvm} {name}"


def llvm_argument(argument: CriticalArgument) -> str:
    """The type of an argument in a call of the body."""
    if argument.is_memory:
        return "ptr"
    assert argument.dtype is not None
    return argument.dtype.llvm


def body_text(text: CriticalText, target: Target) -> tuple[str, set[str]]:
    """The LLVM text of `@name.body`, and the declarations it needs."""
    kernel = text.kernel
    dialect = CriticalDialect(kernel, target)
    body = FunctionWriter(kernel, dialect)
    by_name = {param.name: param for param in kernel.params}
    params: list[str] = []
    body.line("%code = alloca i64, align 8")
    for position, argument in enumerate(text.arguments):
        name = f"%p{position}"
        params.append(llvm_parameter(argument, name))
        if not argument.is_memory:
            body.names[by_name[argument.name]] = name
        for tensor, offset in argument.pieces:
            body.names[by_name[tensor]] = body.let(f"getelementptr inbounds i8, ptr {name}, i64 {offset}") if offset else name
    if text.result is not None:
        body.names[by_name[text.result_name]] = "%result"
    body.prepare_sizes({})
    body.line("store i64 0, ptr %code, align 8")
    dialect.local = _own_arrays(kernel, body)
    constants = [op for op in walk(kernel.body) if op.opcode == "alloc" and "values" in op.attrs]
    dialect.local |= {op.results[0]: f"@{text.name}.constant{number}" for number, op in enumerate(constants)}
    body.block(kernel.body)
    body.current = None
    body.line("br label %out")
    body.open_label("out")
    body.line(f"ret i64 {body.let('load i64, ptr %code, align 8')}")
    held = "".join(f"{dialect.local[op.results[0]]} = internal unnamed_addr constant {initialiser(op)}, align {_LINE}\n" for op in constants)
    head = f"define internal i64 @{text.name}.body({', '.join([*params, 'ptr %result', 'ptr %detail'])})"
    return f'{held}{head} alwaysinline nounwind "no-builtins" {{\nentry:\n' + "\n".join(body.lines) + "\n}\n" + "\n".join(body.metadata), body.declarations


def fault_texts(kernel: Kernel) -> list[tuple[Op, str]]:
    """The faults of a function in the order of their numbers, with what each says."""
    return [(op, str(op.attrs["text"])) for op in faults(kernel)]


def result_type(dtype: DType) -> str:
    """How a result lies in memory."""
    return "i8" if dtype.is_bool else dtype.llvm


def _own_arrays(kernel: Kernel, writer: FunctionWriter) -> dict[Value, str]:
    """Arrays of the function, on its stack."""
    found: dict[Value, str] = {}
    for op in walk(kernel.body):
        if op.opcode == "alloc" and "values" not in op.attrs:
            memory = op.results[0].type
            assert isinstance(memory, Tensor)
            size = prod(extent.evaluate({}) for extent in memory.shape) * memory.dtype.itemsize
            found[op.results[0]] = writer.let(f"alloca [{size} x i8], align 16")
    return found
