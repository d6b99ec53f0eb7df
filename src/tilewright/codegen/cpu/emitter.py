"""Thread-stage IR -> LLVM text for a CPU: one function per kernel that runs a range of blocks.

`void entry(ptr slots, i64 begin, i64 end)` reads its arguments from the slots (`base.abi`) and executes blocks
`begin <= b < end`. A block is one "thread" whose vecs are SIMD registers; there is nothing to synchronise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType

from tilewright.base.abi import ASSERT_BITS, ASSERT_MARK, GIVE, SLOT_BYTES, STOP, STOP_DECLARATION, TAKE
from tilewright.base.artifact import FAILURE_EXTENT, FAILURE_INDEX
from tilewright.base.dtypes import f32, f64
from tilewright.base.errors import CompilerBug, DeviceError
from tilewright.base.levels import DEFAULT, LEVELS
from tilewright.base.record import record
from tilewright.codegen.cpu import lanes as cpu_lanes
from tilewright.codegen.cpu import shared_blocks
from tilewright.codegen.cpu.outlined import OutliningWriter
from tilewright.codegen.llvm.constants import initialiser
from tilewright.codegen.llvm.emitter import FunctionWriter, memory_type
from tilewright.ir.needs import free_values
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Scalar, Tensor, dtype_of

_STACK = 32768
"""Bytes of local arrays a function keeps on its stack; threads may have little of it."""
_LINE = 64
_MOST = 1 << 47
"""Bytes that no process has: more than its addresses."""
_SMALL_STEP = 1 << 10
_INNER_TURNS, _OUTER_TURNS = 1 << 16, 1 << 4
"""Turns after which an innermost loop, or one around others, asks whether to stop."""
_FEW = 64
"""Turns of a loop that is over before anybody could want it to stop."""


class CpuDialect:
    """What CPUs do their own way."""

    def __init__(self, kernel: Kernel, has_range: bool) -> None:
        self.loops = _Loops(kernel)
        self.has_range = has_range
        """Whether `min` and `max` may be AVX-512's `vrange`."""
        self.block = "%block"
        self.local: dict[Value, str] = {}
        """Where each `alloc` lies."""
        self.shared: dict[Op, shared_blocks.SharedBlocks] = {}
        """The functions of `run_blocks`."""
        self.failures: list[Op] = faults(kernel)
        """The assertions of the whole kernel, in order."""

    def better(self, writer: FunctionWriter, op: Op, operands: Sequence[str]) -> str | None:
        if op.opcode == "const" and isinstance(op.attrs.get("kept"), str):
            # An instruction, not a number in others: the code made of it does not depend on its value, and functions that differ in it share a body.
            return writer.let(f"add i64 0, {op.attrs['value']}")
        if self.has_range and op.opcode in ("min", "max") and dtype_of(op.operands[0].type) in (f32, f64):
            from tilewright.codegen.cpu import avx512

            return avx512.extreme(writer, op, operands)
        return None

    def emit(self, writer: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str] | None:
        if op.opcode == "program_id":
            return [self.block]
        if op.opcode == "prefetch":
            where = writer.element_pointer(op.operands[0], operands[1:])
            writer.call("void", "llvm.prefetch.p0", ("ptr", where), ("i32", "1" if op.attrs.get("write") else "0"), ("i32", "3"), ("i32", "1"))
            return []
        if op.opcode == "ldexp":
            from tilewright.codegen.cpu import avx512

            return [avx512.ldexp(writer, op, operands)]
        if op.opcode in ("panel_begin", "panel_end", "panel_dot"):
            from tilewright.codegen.cpu import amx

            amx.emit(writer, op, operands)
            return []
        if op.opcode == "alloc":
            return [self.local[op.results[0]]]
        if op.opcode == "thread_id":
            return ["0"]
        if op.opcode == "print":
            from tilewright.codegen.cpu.printing import c_print

            return c_print(writer, op, operands)
        if op.opcode == "fence":
            if op.attrs.get("scope", "device") in ("device", "system"):
                writer.line("fence seq_cst")
            return []
        if op.opcode in ("barrier", "warp_sync"):
            return []
        if op.opcode in ("atomic", "atomic_load", "atomic_store"):
            from tilewright.codegen.cpu import atomics

            return atomics.emit(writer, op, operands)
        if op.opcode == "clock":
            now = writer.call("i64", "llvm.readcyclecounter")
            return [now if op.attrs.get("bits", 64) == 64 else writer.let(f"trunc i64 {now} to i32")]
        if op.opcode == "report":
            self._report(writer, op, operands)
            return []
        if op.opcode == "fault":
            self._fault(writer, op, operands)
            return []
        if op.opcode == "run_blocks":
            shared_blocks.launch(writer, op, self.shared[op], operands[0], operands[1])
            return []
        return cpu_lanes.emit(writer, op, operands)

    def _report(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
        """Leave site, index and extent, if nobody has yet, and leave the function."""
        cell, index, extent = operands
        where = {field: w.let(f"getelementptr i64, ptr {cell}, i64 {field}") for field in (FAILURE_INDEX, FAILURE_EXTENT)}
        tried = w.let(f"cmpxchg ptr {cell}, i64 0, i64 {op.attrs['site']} monotonic monotonic")
        first = w.new_label("first")
        w.line(f"br i1 {w.let(f'extractvalue {{ i64, i1 }} {tried}, 1')}, label %{first}, label %out")
        w.open_label(first)
        w.line(f"store i64 {index}, ptr {where[FAILURE_INDEX]}, align 8")
        w.line(f"store i64 {extent}, ptr {where[FAILURE_EXTENT]}, align 8")
        w.line("br label %out")
        w.open_label(w.new_label("after"))

    def _fault(self, w: FunctionWriter, op: Op, operands: Sequence[str]) -> None:
        """Report a failed assertion, if none has been, and leave the function."""
        ordinal = next(k for k, one in enumerate(self.failures) if one is op)
        word = w.let(f"or i64 {operands[0]}, {w.let(f'shl i64 {operands[1]}, {ASSERT_BITS[0]}')}")
        word = w.let(f"or i64 {word}, {_failure_word(ordinal)}")
        w.let(f"cmpxchg ptr %report, i64 0, i64 {word} monotonic monotonic")
        w.line("br label %out")
        w.open_label(w.new_label("after"))

    def pointer(self, space: str) -> str:
        return "ptr"

    def load_suffix(self, memory: Value) -> str:
        return ""

    def location(self, op: Op) -> str:
        return ""

    def turn(self, w: FunctionWriter, op: Op) -> None:
        """Loops that cannot rest now and then ask at every turn whether to stop."""
        if op.opcode == "while" or self.loops.has_long(op) or self.loops.should_ask(op):
            self.pause(w)

    def rest(self, w: FunctionWriter, op: Op) -> int:
        """Loops ask now and then. Innermost ones of tiles, which sizes bound and vectors run through, are left to the loops around them."""
        if not self.loops.has_small_steps(op):
            return 0
        return _OUTER_TURNS if self.loops.has_long(op) else _INNER_TURNS if self.loops.should_ask(op) else 0

    def before_report(self, w: FunctionWriter, loaded: Sequence[Value]) -> None: ...

    def pause(self, w: FunctionWriter) -> None:
        w.declarations.add(STOP_DECLARATION)
        asked = w.let(f"load atomic i32, ptr @{STOP} monotonic, align 4")
        on = w.new_label("on")
        w.line(f"br i1 {w.let(f'icmp ne i32 {asked}, 0')}, label %out, label %{on}")
        w.open_label(on)


class _Loops:
    """What is known of a kernel's loops: which are short, and which may go on for any time."""

    def __init__(self, kernel: Kernel) -> None:
        self._constants: dict[Value, int] = {}
        self._free = free_values(kernel)
        # Loops of tiles are over sizes, and mostly of vectors.
        self._tiled = "schedule" in kernel.attrs
        for op in walk(kernel.body):
            value = op.attrs.get("value")
            if op.opcode == "const" and isinstance(value, int):
                self._constants[op.results[0]] = value

    def is_long(self, op: Op) -> bool:
        """Whether it is a loop whose turns are not known to be few."""
        if op.opcode != "for":
            return op.opcode == "while"
        low, high = (self._constants.get(v) for v in op.operands[:2])
        return low is None or high is None or high - low > _FEW

    def has_long(self, op: Op) -> bool:
        """Whether such a loop is in it."""
        return any(self.is_long(inner) for region in op.regions for inner in walk(region))

    def should_ask(self, op: Op) -> bool:
        """Whether it is an innermost loop that may take long by itself."""
        if not self.is_long(op) or self.has_long(op):
            return False
        free = any(v in self._free for v in op.operands[:3])
        return free or not self._tiled or any(isinstance(v.type, Scalar) for v in op.operands[3:])

    def has_small_steps(self, op: Op) -> bool:
        """Whether the steps of many turns are a number that its index can hold."""
        return 1 <= self._constants.get(op.operands[2], 0) <= _SMALL_STEP and dtype_of(op.operands[0].type).bits >= 32


def faults(kernel: Kernel) -> list[Op]:
    """The assertions of a kernel, in order. A kernel with any takes the address of a word to report to after all its other arguments; so
    does one with more local memory than the stack holds."""
    return [op for op in walk(kernel.body) if op.opcode == "fault"]


def heap_bytes(kernel: Kernel) -> int:
    """Bytes of local and shared arrays that a call of the kernel's function takes from the heap; 0 where the stack has room."""
    _, size = _local_places(kernel)
    return max([size if size > _STACK else 0, *(heap_bytes(body) for body in shared_blocks.bodies(kernel).values())])


def _failure_word(ordinal: int) -> int:
    """What is reported of a failure, but for block and thread."""
    return (ASSERT_MARK | ordinal << (ASSERT_BITS[0] + ASSERT_BITS[1])) - (1 << 64)


@record
class FunctionParts:
    """The LLVM text of a kernel's function, in parts."""

    entry: str
    head: tuple[str, ...]
    """Lines of the function itself: they read its arguments from the slots."""
    arguments: tuple[str, ...]
    """What it calls its body with, and `params`, the names these have there: arrays and numbers, sizes, and where failures are reported."""
    params: tuple[str, ...]
    sizes: tuple[str, ...]
    """Lines at the beginning of the body that compute sizes from those given."""
    lines: tuple[str, ...]
    attributes: str
    held: str
    """Constant arrays."""
    metadata: tuple[str, ...]
    parts: tuple[str, ...]
    """Functions of `run_blocks`, and of code that is outlined."""
    declarations: frozenset[str]

    def text(self) -> str:
        written = "\n".join((*self.body(self.params, (*self.sizes, *self.lines)), *self.function(self.entry, (), self.arguments)))
        return "\n".join((self.held + written + "\n" + "\n".join(self.metadata), *self.parts))

    def body(self, params: Sequence[str], lines: Sequence[str]) -> list[str]:
        """The body as a function. It stays one: LLVM would go through it twice, before and after."""
        return [f"define internal void @{self.entry}.body({', '.join([*params, 'i64 %begin', 'i64 %end'])}) noinline {self.attributes} {{", "entry:", *lines, "}", ""]

    def function(self, called: str, sizes: Sequence[str], arguments: Sequence[str]) -> list[str]:
        """The function, which calls the body of `called`."""
        return [
            f"define void @{self.entry}(ptr %slots, i64 %begin, i64 %end) {self.attributes} {{", "entry:", *self.head, *sizes,
            f"  call void @{called}.body({', '.join([*arguments, 'i64 %begin', 'i64 %end'])})", "  ret void", "}",
        ]  # fmt: skip


def cpu_function(kernel: Kernel, entry: str) -> tuple[str, frozenset[str]]:
    """The LLVM text of the kernel's function, and the declarations it needs."""
    function = function_parts(kernel, entry)
    return function.text(), function.declarations


def function_parts(kernel: Kernel, entry: str, has_range: bool = False, failures: list[Op] | None = None) -> FunctionParts:
    """The kernel's function. `has_range`: as the target says; `failures`: the assertions of the kernel that it is a part of."""
    if len(kernel.grid) > 1 or kernel.threads != 1:
        raise CompilerBug.at("TW040", f"{kernel.name}: CPU kernels have a one-dimensional grid of single threads")
    level = LEVELS[str(kernel.attrs.get("optimize", DEFAULT))]
    head, arguments = read_slots(kernel)
    aliases = kernel.attrs.get("noalias", True)
    failing = _may_fail(kernel)

    # The body is a function of its own, so that `noalias` parameters tell LLVM that arrays do not overlap.
    dialect = CpuDialect(kernel, has_range)
    if failures is not None:
        dialect.failures = failures
    body = OutliningWriter(kernel, dialect, entry, dialect.local)
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
    before_lines = len(body.lines)
    parts: list[FunctionParts] = []
    for number, (op, part) in enumerate(shared_blocks.bodies(kernel).items()):
        slots = body.let(f"alloca [{len(part.params) + len(part.size_names) + 1} x i64], align 8")
        dialect.shared[op] = shared_blocks.SharedBlocks(part, f"{entry}.{number}", slots, bool(faults(part)) or bool(heap_bytes(part)))
        if level.name != DEFAULT:
            part = replace(part, attrs=MappingProxyType({**part.attrs, "optimize": level.name}))
        parts.append(function_parts(part, f"{entry}.{number}", has_range, dialect.failures))
    places, owned = _local_arrays(kernel, body)
    dialect.local.update(places)
    constants = [op for op in walk(shared_blocks.without_bodies(kernel).body) if op.opcode == "alloc" and "values" in op.attrs]
    dialect.local.update({op.results[0]: f"@{entry}.constant{number}" for number, op in enumerate(constants)})
    if level.prefetch:
        for position in (position for position, param in enumerate(kernel.params) if isinstance(param.type, Tensor)):
            body.call("void", "llvm.prefetch.p0", ("ptr", f"%p{position}"), ("i32", "0"), ("i32", "3"), ("i32", "1"))
    body.line("br label %blocks")
    before = body.label
    body.open_label("blocks")
    body.line(f"%block = phi i64 [ %begin, %{before} ], [ %following, %again ]")
    body.line("%more = icmp slt i64 %block, %end")
    body.line("br i1 %more, label %one, label %out")
    body.open_label("one")
    dialect.pause(body)
    body.block(kernel.body)
    body.current = None
    body.line("br label %again")
    body.open_label("again")
    body.line("%following = add nsw i64 %block, 1")
    body.line("br label %blocks")
    body.open_label("out")
    if owned:
        body.call("void", GIVE, ("ptr", owned))
    body.line("ret void")
    held = "".join(
        f"{dialect.local[op.results[0]]} = internal unnamed_addr constant {initialiser(op)}, align {_LINE}\n" for op in constants
    )
    # Rows whose sums are empty would be a loop of their own, and that a call of memset.
    sums = any(op.opcode == "for" and op.results for op in walk(kernel.body))
    attributes = 'nounwind "no-builtin-memset"' if sums else "nounwind"
    attributes += " minsize optsize" * (level.size > 0) + f" align {level.align}" * (level.align > 0)
    declarations = body.declarations.union(*(part.declarations for part in parts))
    return FunctionParts(
        entry, tuple(head), tuple(arguments), tuple(params), tuple(body.lines[:before_lines]), tuple(body.lines[before_lines:]), attributes, held,
        tuple(body.metadata), (*body.functions(attributes), *(renumbered(part.text(), 1000 * number) for number, part in enumerate(parts, 1))),
        frozenset(declarations),
    )  # fmt: skip


def _may_fail(kernel: Kernel) -> bool:
    return bool(faults(kernel)) or bool(heap_bytes(kernel))


def read_slots(kernel: Kernel) -> tuple[list[str], list[str]]:
    """Lines that read what a kernel's function is called with, and what is read: its parameters, its sizes, and where failures are reported."""
    lines: list[str] = []
    arguments: list[str] = []

    def let(text: str) -> str:
        name = f"%v{len(lines) + 1}"
        lines.append(f"  {name} = {text}")
        return name

    def slot(stored: str) -> str:
        where = let(f"getelementptr inbounds i8, ptr %slots, i64 {len(arguments) * SLOT_BYTES}")
        return let(f"load {stored}, ptr {where}, align 8")

    for param in kernel.params:
        if isinstance(param.type, Tensor):
            arguments.append(f"ptr {slot('ptr')}")
            continue
        assert isinstance(param.type, Scalar)
        value = slot(memory_type(param.type.dtype))
        if param.type.dtype.is_bool:
            value = let(f"icmp ne i8 {value}, 0")
        arguments.append(f"{param.type.dtype.llvm} {value}")
    for _ in kernel.size_names:
        arguments.append(f"i64 {slot('i64')}")
    if _may_fail(kernel):
        arguments.append(f"ptr {slot('ptr')}")
    return lines, arguments


def renumbered(text: str, shift: int) -> str:
    """LLVM text whose marks on loops have other numbers, so that it can stand beside other text."""
    return re.sub(r"!(\d+)", lambda mark: f"!{int(mark.group(1)) + shift}", text)


def _local_places(kernel: Kernel) -> tuple[dict[Value, int], int]:
    """Where each local array begins, in bytes, and how many all take."""
    places: dict[Value, int] = {}
    size = 0
    for op in walk(shared_blocks.without_bodies(kernel).body):
        if op.opcode == "alloc" and "values" not in op.attrs:
            memory = op.results[0].type
            assert isinstance(memory, Tensor)
            size = -(-size // _LINE) * _LINE
            places[op.results[0]] = size
            size += prod(extent.evaluate({}) for extent in memory.shape) * memory.dtype.itemsize
            if size > _MOST:
                raise DeviceError.at(
                    "TW031", f"out of memory on cpu: {size} bytes for local and shared arrays of kernel {kernel.name}, with "
                    f"'{op.results[0].name}', {memory.dtype}[{', '.join(map(str, memory.shape))}] for all threads that run together",
                    op.span, help="make the array smaller",
                )  # fmt: skip
    return places, size


def _local_arrays(kernel: Kernel, writer: FunctionWriter) -> tuple[dict[Value, str], str]:
    """Room for every local array, once for all blocks: on the stack when it is little. Gives what is to be freed, if anything."""
    places, size = _local_places(kernel)
    if not places:
        return {}, ""
    owned = ""
    if size <= _STACK:
        base = writer.let(f"alloca [{size} x i8], align {_LINE}")
    else:
        owned = writer.call("ptr", TAKE, ("i64", str(size + _LINE)))
        none, some = writer.new_label("exhausted"), writer.new_label("memory")
        writer.line(f"br i1 {writer.let(f'icmp eq ptr {owned}, null')}, label %{none}, label %{some}")
        writer.open_label(none)
        writer.let(f"cmpxchg ptr %report, i64 0, i64 {_failure_word(len(faults(kernel)))} monotonic monotonic")
        writer.line("br label %out")
        writer.open_label(some)
        over = writer.let(f"and i64 {writer.let(f'ptrtoint ptr {owned} to i64')}, {_LINE - 1}")
        base = writer.let(f"getelementptr i8, ptr {owned}, i64 {writer.let(f'sub i64 {_LINE}, {over}')}")
    return {v: writer.let(f"getelementptr inbounds i8, ptr {base}, i64 {place}") for v, place in places.items()}, owned
