"""Thread-stage IR -> LLVM text for a CPU: one function per kernel that runs a range of blocks.

`void entry(ptr slots, i64 begin, i64 end)` reads its arguments from the slots (`base.abi`) and executes blocks
`begin <= b < end`. A block is one "thread" whose vecs are SIMD registers; there is nothing to synchronise.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.base.abi import ASSERT_BITS, ASSERT_MARK, SLOT_BYTES
from tilewright.base.errors import CompilerBug
from tilewright.codegen import amx, avx512, cpu_atomics, cpu_lanes
from tilewright.codegen.constants import initialiser
from tilewright.codegen.cpu_print import c_print
from tilewright.codegen.llvm import FunctionWriter, memory_type
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Scalar, Tensor

_STACK = 32768
"""Bytes of local arrays a function keeps on its stack; threads may have little of it."""
_LINE = 64


class _CpuDialect:
    def __init__(self) -> None:
        self.block = "%block"
        self.local: dict[Value, str] = {}
        """Where each `alloc` lies."""

    def better(self, writer: FunctionWriter, op: Op, operands: Sequence[str]) -> str | None:
        return None

    def emit(self, writer: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str] | None:
        if op.opcode == "program_id":
            return [self.block]
        if op.opcode == "prefetch":
            where = writer.element_pointer(op.operands[0], operands[1:])
            writer.call("void", "llvm.prefetch.p0", ("ptr", where), ("i32", "0"), ("i32", "3"), ("i32", "1"))
            return []
        if op.opcode == "ldexp":
            return [avx512.ldexp(writer, op, operands)]
        if op.opcode == "panel_begin":
            amx.begin(writer)
            return []
        if op.opcode == "panel_end":
            amx.end(writer)
            return []
        if op.opcode == "panel_dot":
            amx.panel_dot(writer, op, operands)
            return []
        if op.opcode == "alloc":
            return [self.local[op.results[0]]]
        if op.opcode == "thread_id":
            return ["0"]
        if op.opcode == "print":
            return c_print(writer, op, operands)
        if op.opcode == "fence":
            if op.attrs.get("scope", "device") in ("device", "system"):
                writer.line("fence seq_cst")
            return []
        if op.opcode in ("barrier", "warp_sync"):
            return []
        if op.opcode == "atomic":
            return [cpu_atomics.atomic(writer, op, operands)]
        if op.opcode == "atomic_load":
            return [cpu_atomics.atomic_load(writer, op, operands)]
        if op.opcode == "atomic_store":
            cpu_atomics.atomic_store(writer, op, operands)
            return []
        if op.opcode == "clock":
            now = writer.call("i64", "llvm.readcyclecounter")
            return [now if op.attrs.get("bits", 64) == 64 else writer.let(f"trunc i64 {now} to i32")]
        if op.opcode == "fault":
            self._fault(writer, op, operands)
            return []
        return cpu_lanes.emit(writer, op, operands)

    def _fault(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
        """Report a failed assertion, if none has been, and leave the function."""
        ordinal = next(k for k, one in enumerate(faults(w.kernel)) if one is op)
        blocks, threads, *_ = ASSERT_BITS
        word = w.let(f"or i64 {operands[0]}, {w.let(f'shl i64 {operands[1]}, {blocks}')}")
        word = w.let(f"or i64 {word}, {(ASSERT_MARK | ordinal << (blocks + threads)) - (1 << 64)}")
        w.let(f"cmpxchg ptr %report, i64 0, i64 {word} monotonic monotonic")
        w.line("br label %out")
        w.open_label(w.new_label("after"))

    def pointer(self, space: str) -> str:
        return "ptr"

    def load_suffix(self, memory: Value) -> str:
        return ""

    def location(self, op: Op) -> str:
        return ""

    def turn(self, w: FunctionWriter, op: Op) -> None: ...


def faults(kernel: Kernel) -> list[Op]:
    """The assertions of a kernel, in order: it takes the address of a word to report to after all its other arguments."""
    return [op for op in walk(kernel.body) if op.opcode == "fault"]


def cpu_function(kernel: Kernel, entry: str) -> tuple[str, set[str]]:
    """The LLVM text of the kernel's function, and the declarations it needs."""
    if len(kernel.grid) > 1 or kernel.threads != 1:
        raise CompilerBug.at("TW040", f"{kernel.name}: CPU kernels have a one-dimensional grid of single threads")
    writer = FunctionWriter(kernel, _CpuDialect())
    arguments: list[str] = []
    slot = 0
    aliases = kernel.attrs.get("noalias", True)
    for param in kernel.params:
        where = writer.let(f"getelementptr inbounds i8, ptr %slots, i64 {slot * SLOT_BYTES}")
        if isinstance(param.type, Tensor):
            arguments.append(f"ptr {writer.let(f'load ptr, ptr {where}, align 8')}")
        else:
            assert isinstance(param.type, Scalar)
            stored = memory_type(param.type.dtype)
            value = writer.let(f"load {stored}, ptr {where}, align 8")
            if param.type.dtype.is_bool:
                value = writer.let(f"icmp ne i8 {value}, 0")
            arguments.append(f"{param.type.dtype.llvm} {value}")
        slot += 1
    for _ in kernel.size_names:
        where = writer.let(f"getelementptr inbounds i8, ptr %slots, i64 {slot * SLOT_BYTES}")
        arguments.append(f"i64 {writer.let(f'load i64, ptr {where}, align 8')}")
        slot += 1
    failing = bool(faults(kernel))
    if failing:
        where = writer.let(f"getelementptr inbounds i8, ptr %slots, i64 {slot * SLOT_BYTES}")
        arguments.append(f"ptr {writer.let(f'load ptr, ptr {where}, align 8')}")
    head = "\n".join(writer.lines)

    # The body is a function of its own, so that `noalias` parameters tell LLVM that arrays do not overlap.
    dialect = _CpuDialect()
    body = FunctionWriter(kernel, dialect)
    params: list[str] = []
    for position, param in enumerate(kernel.params):
        name = f"%p{position}"
        body.names[param] = name
        if isinstance(param.type, Tensor):
            params.append(f"ptr {'noalias ' if aliases else ''}{name}")
        else:
            params.append(f"{param.type.dtype.llvm} {name}")
    values = {}
    for position, size in enumerate(kernel.size_names):
        params.append(f"i64 %s{position}")
        values[size] = f"%s{position}"
    if failing:
        params.append("ptr %report")
    body.prepare_sizes(values)
    dialect.local, owned = _local_arrays(kernel, body)
    constants = [op for op in walk(kernel.body) if op.opcode == "alloc" and "values" in op.attrs]
    dialect.local |= {op.results[0]: f"@{entry}.constant{number}" for number, op in enumerate(constants)}
    body.line("br label %blocks")
    before = body.label
    body.open_label("blocks")
    body.line(f"%block = phi i64 [ %begin, %{before} ], [ %following, %again ]")
    body.line("%more = icmp slt i64 %block, %end")
    body.line("br i1 %more, label %one, label %out")
    body.open_label("one")
    body.block(kernel.body)
    body.current = None
    body.line("br label %again")
    body.open_label("again")
    body.line("%following = add nsw i64 %block, 1")
    body.line("br label %blocks")
    body.open_label("out")
    if owned:
        body.call("void", "free", ("ptr", owned))
    body.line("ret void")
    held = "".join(
        f"{dialect.local[op.results[0]]} = internal unnamed_addr constant {initialiser(op)}, align {_LINE}\n" for op in constants
    )
    text = (
        f"{held}define internal void @{entry}.body({', '.join([*params, 'i64 %begin', 'i64 %end'])}) nounwind {{\nentry:\n"
        + "\n".join(body.lines)
        + f"\n}}\n\ndefine void @{entry}(ptr %slots, i64 %begin, i64 %end) nounwind {{\nentry:\n{head}\n"
        + f"  call void @{entry}.body({', '.join([*arguments, 'i64 %begin', 'i64 %end'])})\n  ret void\n}}\n"
    )
    return text + "\n".join(body.metadata), body.declarations


def _local_arrays(kernel: Kernel, writer: FunctionWriter) -> tuple[dict[Value, str], str]:
    """Room for every local array, once for all blocks: on the stack when it is little. Gives what is to be freed, if anything."""
    places: dict[Value, int] = {}
    size = 0
    for op in walk(kernel.body):
        if op.opcode == "alloc" and "values" not in op.attrs:
            memory = op.results[0].type
            assert isinstance(memory, Tensor)
            size = -(-size // _LINE) * _LINE
            places[op.results[0]] = size
            size += prod(extent.evaluate({}) for extent in memory.shape) * memory.dtype.itemsize
    if not places:
        return {}, ""
    owned = ""
    if size <= _STACK:
        base = writer.let(f"alloca [{size} x i8], align {_LINE}")
    else:
        owned = writer.call("ptr", "malloc", ("i64", str(size + _LINE)))
        over = writer.let(f"and i64 {writer.let(f'ptrtoint ptr {owned} to i64')}, {_LINE - 1}")
        base = writer.let(f"getelementptr i8, ptr {owned}, i64 {writer.let(f'sub i64 {_LINE}, {over}')}")
    return {v: writer.let(f"getelementptr inbounds i8, ptr {base}, i64 {place}") for v, place in places.items()}, owned
