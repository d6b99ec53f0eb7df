"""Thread-stage IR -> LLVM text: what the CPU and the GPU code generators share.

In: a thread-stage kernel. Out: the lines of one LLVM function body. A scalar is an LLVM scalar, a vec an LLVM vector;
structured control flow becomes labels and phi nodes. `FunctionWriter` knows every elementwise op and memory access; what
differs between devices (indices, barriers, shuffles, address spaces, intrinsics) is in the `Dialect` it is given.

Numerics: no fast-math flags anywhere; fused multiply-adds are explicit ops, min and max propagate NaN, float to integer
conversions saturate, integer division by zero gives zero.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from tilewright.base.dtypes import DType, bool_, f16, f32, f64
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import Size
from tilewright.codegen.llvm import bits
from tilewright.codegen.llvm.sizes import SizeEmitter
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import Scalar, Tensor, Type, Vec, dtype_of, with_dtype


class Dialect(Protocol):
    """What one device does its own way."""

    def emit(self, writer: FunctionWriter, op: Op, operands: Sequence[str]) -> Sequence[str] | None:
        """Emit an op the shared core does not know; the results, or None when it does not know it either."""

    def better(self, writer: FunctionWriter, op: Op, operands: Sequence[str]) -> str | None:
        """The result of an op that the core knows and the device has an instruction for; None where it has not."""

    def pointer(self, space: str) -> str:
        """The LLVM pointer type of an address space."""

    def load_suffix(self, memory: Value) -> str:
        """Metadata to hang on loads from this tensor."""

    def location(self, op: Op) -> str:
        """`, !dbg !n` for the op, or nothing."""

    def turn(self, writer: FunctionWriter, op: Op) -> None:
        """A loop is about to turn: at the end of its body."""

    def rest(self, writer: FunctionWriter, op: Op) -> int:
        """After how many turns a loop rests, each time, where `pause` has its say; 0: never."""

    def pause(self, writer: FunctionWriter) -> None:
        """What a loop does when it rests."""

    def before_report(self, writer: FunctionWriter, loaded: Sequence[Value]) -> None:
        """A branch that only reports an index is next: values that the block has loaded since its beginning, or since the last such branch."""


def llvm_type(type_: Type) -> str:
    """The register type of a number."""
    if isinstance(type_, Vec):
        return f"<{type_.width} x {type_.dtype.llvm}>"
    if isinstance(type_, Scalar):
        return type_.dtype.llvm
    raise CompilerBug.at("TW040", f"no LLVM type for {type_}")


def memory_type(dtype: DType, width: int = 1) -> str:
    """The type an element has in memory: a bool is a byte."""
    name = "i8" if dtype.is_bool else dtype.llvm
    return name if width == 1 else f"<{width} x {name}>"


def literal(value: int | float | bool, dtype: DType) -> str:
    """A constant of that dtype."""
    if dtype.is_bool:
        return "true" if value else "false"
    if not dtype.is_float:
        bits = dtype.bits
        number = int(value) & ((1 << bits) - 1)
        return str(number - (1 << bits) if number >> (bits - 1) else number)
    if dtype is f64:
        return f"0x{struct.unpack('<Q', struct.pack('<d', float(value)))[0]:016X}"
    if dtype is f32:
        import numpy as np

        return f"0x{struct.unpack('<Q', struct.pack('<d', float(np.float32(value))))[0]:016X}"
    import numpy as np

    raw = int(np.array(value).astype(dtype.numpy).view(f"u{dtype.itemsize}"))
    if dtype is f16:
        return f"0xH{raw:04X}"
    return f"0xR{raw:04X}" if dtype.llvm == "bfloat" else str(raw)


class FunctionWriter:
    """Writes the body of one function."""

    def __init__(self, kernel: Kernel, dialect: Dialect, share: bool = False) -> None:
        self.kernel, self.dialect = kernel, dialect
        self.share = share
        """Whether addresses are written with what they have in common, and numbers added up: LLVM has less to do."""
        self.shared: dict[str, str] = {}
        """The result of each such instruction that is known at this place."""
        self.lines: list[str] = []
        self.first: list[str] = []
        """What comes before all lines: memory of the function's own, which a loop must not make again."""
        self.declarations: set[str] = set()
        self.names: dict[Value, str] = {}
        self.sizes: dict[Size, str] = {}
        self.size_names: dict[str, str] = {}
        """The value of every name of a size."""
        self.compared: dict[str, tuple[str, str, str]] = {}
        """The instruction and the operands of each comparison of floats, by its result."""
        self.used = frozenset(v for op in walk(kernel.body) for v in op.operands)
        """Values that some op asks for."""
        self.counter = 0
        self.label = "entry"
        self.metadata: list[str] = []
        self.current: Op | None = None
        self.anchors: dict[tuple[str, str], str] = {}
        """Addresses of rows that loads with `anchored` are counted from, by label and by what they are made of."""

    # -- small helpers ------------------------------------------------------------------------------------------

    def fresh(self, hint: str = "v") -> str:
        self.counter += 1
        return f"%{hint}{self.counter}"

    def line(self, text: str) -> None:
        location = self.dialect.location(self.current) if self.current is not None else ""
        self.lines.append(f"  {text}{location}")

    def let(self, text: str) -> str:
        """Append an instruction and name its result."""
        name = self.fresh()
        self.line(f"{name} = {text}")
        return name

    def once(self, text: str) -> str:
        """As `let`; where addresses are shared, an instruction that is known at this place is not written again."""
        if not self.share:
            return self.let(text)
        name = self.shared.get(text)
        if name is None:
            name = self.shared[text] = self.let(text)
        return name

    def open_label(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.label = label

    def new_label(self, hint: str) -> str:
        self.counter += 1
        return f"{hint}{self.counter}"

    def call(self, result: str, name: str, *arguments: tuple[str, str], attributes: str = "") -> str:
        """Call an external function or intrinsic, declaring it."""
        types = ", ".join(t for t, _ in arguments)
        self.declarations.add(f"declare {result} @{name}({types}){attributes}")
        text = f"call {result} @{name}({', '.join(f'{t} {v}' for t, v in arguments)})"
        if result == "void":
            self.line(text)
            return ""
        return self.let(text)

    # -- sizes --------------------------------------------------------------------------------------------------

    def prepare_sizes(self, values: dict[str, str]) -> None:
        """Compute every symbolic size the body needs, once, at the function's start."""
        self.size_names = values
        lines: list[str] = []
        emitter = SizeEmitter(lines, values)
        needed: set[Size] = set()
        for op in walk(self.kernel.body):
            for attr in op.attrs.values():
                if isinstance(attr, Size):
                    needed.add(attr)
            for operand in op.operands:
                if isinstance(operand.type, Tensor):
                    needed.update(operand.type.strides)
        needed.update(self.kernel.grid)
        for size in sorted(needed, key=str):
            self.sizes[size] = emitter.value(size)
        self.lines += lines
        if any("@llvm.smin" in x or "@llvm.smax" in x for x in lines):
            self.declarations |= {"declare i64 @llvm.smin.i64(i64, i64)", "declare i64 @llvm.smax.i64(i64, i64)"}

    # -- blocks -------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> list[str]:
        """Emit the ops; returns the operands of its `yield`."""
        outside = self.shared
        self.shared = dict(outside) if self.share else outside
        try:
            return self._ops(block)
        finally:
            self.shared = outside

    def _ops(self, block: Block) -> list[str]:
        loaded: list[Value] = []
        for op in block.ops:
            self.current = op
            if op.opcode == "yield":
                return [self.names[v] for v in op.operands]
            if op.opcode == "load":
                loaded += op.results
            elif op.opcode == "if" and loaded and any(inner.opcode == "report" for inner in op.regions[0].ops):
                self.dialect.before_report(self, loaded)
                loaded = []
            results = self.op(op)
            for value, name in zip(op.results, results, strict=True):
                self.names[value] = name
        return []

    def op(self, op: Op) -> Sequence[str]:
        if op.opcode == "for":
            return self._for(op)
        if op.opcode == "if":
            return self._if(op)
        if op.opcode == "while":
            return self._while(op)
        operands = [self.names[v] for v in op.operands]
        handler = None if op.attrs.get("masked") else _HANDLERS.get(op.opcode)
        if handler is not None:
            return [self.dialect.better(self, op, operands) or handler(self, op, operands)]
        if op.opcode == "store":
            if not op.attrs.keys() & {"cache", "masked"} or self.dialect.emit(self, op, operands) is None:
                self._store(op, operands)
            return []
        if op.opcode == "split":
            return self._split(op, operands[0])
        special = self.dialect.emit(self, op, operands)
        if special is None:
            raise CompilerBug.at("TW040", f"no code generation for {op.opcode} on this target", op.span)
        return special

    def elementwise(self, op: Op, operands: Sequence[str]) -> str:
        """The result of an elementwise op whose operands have these names."""
        return self.dialect.better(self, op, operands) or _HANDLERS[op.opcode](self, op, operands)

    # -- control flow -------------------------------------------------------------------------------------------

    def _for(self, op: Op) -> list[str]:
        low, high, step = (self.names[v] for v in op.operands[:3])
        initial = [self.names[v] for v in op.operands[3:]]
        region = op.regions[0]
        kind = llvm_type(op.operands[0].type)
        head, body, latch, done = (self.new_label(h) for h in ("head", "body", "latch", "done"))
        turns = self.dialect.rest(self, op)
        if turns:
            return self._stretches(op, turns)
        entry = self.label
        self.line(f"br label %{head}")
        self.open_label(head)
        index, following = self.fresh("i"), self.fresh("next")
        self.line(f"{index} = phi {kind} [ {low}, %{entry} ], [ {following}, %{latch} ]")
        carried: list[str] = []
        places: list[int] = []
        for value in region.args[1:]:
            name = self.fresh("c")
            carried.append(name)
            places.append(len(self.lines))
            self.lines.append("")
            self.names[value] = name
        self.names[region.args[0]] = index
        sign = "u" if dtype_of(op.operands[0].type).kind == "u" else "s"
        more = self.let(f"icmp {sign}lt {kind} {index}, {high}")
        self.line(f"br i1 {more}, label %{body}, label %{done}")
        self.open_label(body)
        yields = self.block(region)
        self.current = op
        self.dialect.turn(self, op)
        self.line(f"br label %{latch}")
        self.open_label(latch)
        self.line(f"{following} = add n{sign}w {kind} {index}, {step}")
        self.line(f"br label %{head}{self._loop_metadata(op)}")
        for place, name, value, first, last in zip(places, carried, region.args[1:], initial, yields, strict=True):
            self.lines[place] = (
                f"  {name} = phi {llvm_type(value.type)} [ {first}, %{entry} ], [ {last}, %{latch} ]"
                + self.dialect.location(op)
            )
        self.open_label(done)
        return carried

    def _stretches(self, op: Op, turns: int) -> list[str]:
        """A loop over stretches of a loop: the inner one is as short as it would be alone, the outer one rests in between."""
        low, high, step = (self.names[v] for v in op.operands[:3])
        initial = [self.names[v] for v in op.operands[3:]]
        region = op.regions[0]
        kind = llvm_type(op.operands[0].type)
        outer, head, body, latch, rest, again, done = (self.new_label(h) for h in ("outer", "head", "body", "latch", "rest", "again", "done"))
        sign = "u" if dtype_of(op.operands[0].type).kind == "u" else "s"
        entry = self.label
        span = self.let(f"mul {kind} {step}, {turns}")
        self.line(f"br label %{outer}")
        self.open_label(outer)
        index, following, first = self.fresh("i"), self.fresh("next"), self.fresh("from")
        carried = [self.fresh("c") for _ in initial]
        begun = [self.fresh("b") for _ in initial]
        outer_place = len(self.lines)
        self.lines += [""] * (1 + len(initial))
        left = self.let(f"sub {kind} {high}, {first}")
        last = self.let(f"icmp ule {kind} {left}, {span}")
        empty = self.let(f"icmp {sign}ge {kind} {first}, {high}")
        limit = self.let(f"select i1 {self.let(f'or i1 {last}, {empty}')}, {kind} {high}, {kind} {self.let(f'add {kind} {first}, {span}')}")
        self.line(f"br label %{head}")
        self.open_label(head)
        head_place = len(self.lines)
        self.lines += [""] * (1 + len(initial))
        for value, name in zip(region.args[1:], carried, strict=True):
            self.names[value] = name
        self.names[region.args[0]] = index
        more = self.let(f"icmp {sign}lt {kind} {index}, {limit}")
        self.line(f"br i1 {more}, label %{body}, label %{rest}")
        self.open_label(body)
        yields = self.block(region)
        self.current = op
        self.line(f"br label %{latch}")
        self.open_label(latch)
        self.line(f"{following} = add n{sign}w {kind} {index}, {step}")
        self.line(f"br label %{head}{self._loop_metadata(op)}")
        self.open_label(rest)
        over = self.let(f"icmp {sign}ge {kind} {index}, {high}")
        self.line(f"br i1 {over}, label %{done}, label %{again}")
        self.open_label(again)
        self.dialect.pause(self)
        back = self.label
        self.line(f"br label %{outer}")
        at = self.dialect.location(op)
        types = [llvm_type(value.type) for value in region.args[1:]]
        self.lines[outer_place] = f"  {first} = phi {kind} [ {low}, %{entry} ], [ {index}, %{back} ]{at}"
        self.lines[head_place] = f"  {index} = phi {kind} [ {first}, %{outer} ], [ {following}, %{latch} ]{at}"
        for k, (type_, name, start, given, end) in enumerate(zip(types, carried, begun, initial, yields, strict=True), 1):
            self.lines[outer_place + k] = f"  {start} = phi {type_} [ {given}, %{entry} ], [ {name}, %{back} ]{at}"
            self.lines[head_place + k] = f"  {name} = phi {type_} [ {start}, %{outer} ], [ {end}, %{latch} ]{at}"
        self.open_label(done)
        return carried

    def _loop_metadata(self, op: Op) -> str:
        unroll, align = op.attrs.get("unroll"), op.attrs.get("align")
        marks: list[str] = []
        if isinstance(unroll, int):
            marks.append('!"llvm.loop.unroll.disable"' if unroll <= 1 else f'!"llvm.loop.unroll.count", i32 {unroll}')
        if isinstance(align, int):
            marks.append(f'!"llvm.loop.align", i32 {align}')
        if not marks:
            return ""
        first = 1000 + 2 * len(self.metadata)
        names = "".join(f", !{first + 1 + place}" for place in range(len(marks)))
        self.metadata.append(f"!{first} = distinct !{{!{first}{names}}}")
        self.metadata += [f"!{first + 1 + place} = !{{{mark}}}" for place, mark in enumerate(marks)]
        return f", !llvm.loop !{first}"

    def _if(self, op: Op) -> list[str]:
        then, otherwise, done = (self.new_label(h) for h in ("then", "else", "endif"))
        self.line(f"br i1 {self.names[op.operands[0]]}, label %{then}, label %{otherwise}")
        ends: list[str] = []
        yields: list[list[str]] = []
        for label, region in zip((then, otherwise), op.regions, strict=True):
            self.open_label(label)
            found = self.block(region)
            self.current = op
            condition = self.names[op.operands[0]]
            if condition in self.compared:  # LLVM makes a choice of it
                for position, result in enumerate(op.results):
                    found[position] = _fenced_side(self, self.compared[condition], found[position], result.type)
            yields.append(found)
            ends.append(self.label)
            self.line(f"br label %{done}")
        self.open_label(done)
        return [
            self.let(f"phi {llvm_type(r.type)} [ {a}, %{ends[0]} ], [ {b}, %{ends[1]} ]")
            for r, a, b in zip(op.results, *yields, strict=True)
        ]

    def _while(self, op: Op) -> list[str]:
        head, body, done = (self.new_label(h) for h in ("head", "body", "done"))
        condition, loop = op.regions
        entry = self.label
        initial = [self.names[v] for v in op.operands]
        self.line(f"br label %{head}")
        self.open_label(head)
        places: list[int] = []
        carried: list[str] = []
        for value in condition.args:
            name = self.fresh("c")
            carried.append(name)
            places.append(len(self.lines))
            self.lines.append("")
            self.names[value] = name
        test, *passed = self.block(condition)
        self.current = op
        self.line(f"br i1 {test}, label %{body}, label %{done}")
        self.open_label(body)
        for value, name in zip(loop.args, passed, strict=True):
            self.names[value] = name
        yields = self.block(loop)
        self.current = op
        self.dialect.turn(self, op)
        back = self.label
        self.line(f"br label %{head}")
        for place, name, value, first, last in zip(places, carried, condition.args, initial, yields, strict=True):
            self.lines[place] = f"  {name} = phi {llvm_type(value.type)} [ {first}, %{entry} ], [ {last}, %{back} ]"
        self.open_label(done)
        return passed

    # -- memory -------------------------------------------------------------------------------------------------

    def element_pointer(self, memory: Value, indices: Sequence[str]) -> str:
        """The address of an element."""
        assert isinstance(memory.type, Tensor)
        offset, fixed = "", 0
        for index, stride in zip(indices, memory.type.strides, strict=True):
            if stride.constant == 0:
                continue
            if self.share and stride.constant is not None and not index.startswith("%"):
                fixed += int(index) * stride.constant
                continue
            part = index if stride.constant == 1 else self.once(f"mul nsw i64 {index}, {self.sizes[stride]}")
            offset = self.once(f"add nsw i64 {offset}, {part}") if offset else part
        if fixed:
            offset = self.once(f"add nsw i64 {offset}, {fixed}") if offset else str(fixed)
        if not offset:
            return self.names[memory]
        pointer = self.dialect.pointer(memory.type.space)
        return self.once(
            f"getelementptr inbounds {memory_type(memory.type.dtype)}, {pointer} {self.names[memory]}, i64 {offset}"
        )

    def _anchored(self, memory: Value, indices: Sequence[str]) -> str:
        """The address of an element, counted from that of its row's first one: LLVM takes that for an address of its own, and keeps it in a register."""
        assert isinstance(memory.type, Tensor)
        key = self.label, f"{self.names[memory]} {' '.join(indices[:-1])}"
        pointer = self.dialect.pointer(memory.type.space)
        if key not in self.anchors:
            row = self.element_pointer(memory, (*indices[:-1], "0"))
            self.anchors[key] = self.let(f'call {pointer} asm "", "=r,0"({pointer} {row})')
        return self.let(f"getelementptr inbounds {memory_type(memory.type.dtype)}, {pointer} {self.anchors[key]}, i64 {indices[-1]}")

    def load(self, op: Op, operands: Sequence[str]) -> str:
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        dtype = memory.type.dtype
        width = op.results[0].type.width if isinstance(op.results[0].type, Vec) else 1
        indices = operands[1 : 1 + memory.type.rank]
        where = self._anchored(memory, indices) if op.attrs.get("anchored") else self.element_pointer(memory, indices)
        stored = memory_type(dtype, width)
        align = dtype.itemsize * (1 if op.attrs.get("unaligned") else width)
        pointer = self.dialect.pointer(memory.type.space)
        if op.attrs.get("apart"):
            where = self.let(f'call {pointer} asm "", "=r,0"({pointer} {where})')  # nobody knows that it is the same address
        value = self.let(f"load {stored}, {pointer} {where}, align {align}{self.dialect.load_suffix(memory)}")
        if dtype.is_bool:
            zero = "0" if width == 1 else "zeroinitializer"
            return self.let(f"icmp ne {stored} {value}, {zero}")
        return value

    def _store(self, op: Op, operands: Sequence[str]) -> None:
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        value, type_ = operands[-1], op.operands[-1].type
        dtype = memory.type.dtype
        width = type_.width if isinstance(type_, Vec) else 1
        where = self.element_pointer(memory, operands[1 : 1 + memory.type.rank])
        stored = memory_type(dtype, width)
        if dtype.is_bool:
            value = self.let(f"zext {llvm_type(type_)} {value} to {stored}")
        align = dtype.itemsize * (1 if op.attrs.get("unaligned") else width)
        self.line(f"store {stored} {value}, {self.dialect.pointer(memory.type.space)} {where}, align {align}")

    # -- vectors ------------------------------------------------------------------------------------------------

    def splat(self, scalar: str, type_: Type) -> str:
        """A scalar operand repeated to the type."""
        if not isinstance(type_, Vec):
            return scalar
        kind = llvm_type(type_)
        if not scalar.startswith("%"):
            return f"splat ({type_.dtype.llvm} {scalar})"
        one = self.let(f"insertelement {kind} poison, {type_.dtype.llvm} {scalar}, i64 0")
        return self.let(f"shufflevector {kind} {one}, {kind} poison, <{type_.width} x i32> zeroinitializer")

    def _split(self, op: Op, value: str) -> list[str]:
        source = op.operands[0].type
        assert isinstance(source, Vec)
        kind, half = llvm_type(source), source.width // 2
        if half == 1:
            return [self.let(f"extractelement {kind} {value}, i64 {lane}") for lane in (0, 1)]
        results = []
        for start in (0, half):
            lanes = ", ".join(f"i32 {start + k}" for k in range(half))
            results.append(self.let(f"shufflevector {kind} {value}, {kind} poison, <{half} x i32> <{lanes}>"))
        return results


# -- elementwise ops: one function each ---------------------------------------------------------------------------

Handler = Callable[[FunctionWriter, Op, Sequence[str]], str]


def _overloaded(type_: Type) -> str:
    """The suffix LLVM gives overloaded intrinsics: f32, v4f32, i64…"""
    name = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}.get(dtype_of(type_).llvm, dtype_of(type_).llvm)
    return f"v{type_.width}{name}" if isinstance(type_, Vec) else name


def intrinsic(w: FunctionWriter, name: str, type_: Type, *operands: str) -> str:
    """Call an overloaded intrinsic whose operands and result have one type."""
    kind = llvm_type(type_)
    return w.call(kind, f"llvm.{name}.{_overloaded(type_)}", *((kind, o) for o in operands))


def _arithmetic(integer: str, number: str) -> Handler:
    def handler(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
        type_ = op.operands[0].type
        word = number if dtype_of(type_).is_float else integer
        return w.let(f"{word} {llvm_type(type_)} {operands[0]}, {operands[1]}")

    return handler


def _extreme(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    type_ = op.operands[0].type
    dtype, kind = dtype_of(type_), llvm_type(type_)
    a, b = operands
    if dtype.is_bool:
        return w.let(f"{'and' if op.opcode == 'min' else 'or'} {kind} {a}, {b}")
    if not dtype.is_float:
        return intrinsic(w, f"{'s' if dtype.kind == 'i' else 'u'}{op.opcode}", type_, a, b)
    # IEEE 754-2019's: propagates NaN, and -0 is below 0. One instruction on AArch64, a few on x86.
    return intrinsic(w, f"{op.opcode}imum", type_, a, b)


def _pick(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    type_ = op.operands[0].type
    kind = llvm_type(type_)
    mask = f"<{type_.width} x i1>" if isinstance(type_, Vec) else "i1"
    word = "olt" if op.opcode == "smaller" else "ogt"
    first = w.let(f"fcmp {word} {kind} {operands[0]}, {operands[1]}")
    taken = _fenced(w, (f"fcmp {word}", operands[0], operands[1]), operands[0], operands[1], type_)
    return w.let(f"select {mask} {first}, {kind} {taken[0]}, {kind} {taken[1]}")


def _fenced(w: FunctionWriter, compared: tuple[str, str, str], a: str, b: str, type_: Type) -> tuple[str, str]:
    """Both sides of a choice between a number and zero that is made by comparing the two.

    LLVM takes `x < 0 ? x : 0` for a minimum, which is -0 where x is, and the text says 0. It does not look through a fence, which costs
    nothing. `x > 0 ? x : 0` it takes for a maximum, which is right.
    """
    word, left, right = compared
    constants = _zeros(w, type_)
    if {left, right} != {a, b} or not {a, b} & {*constants} or (word, left, right, b) == ("fcmp ogt", a, b, constants[0]):
        return a, b
    return _fenced_side(w, compared, a, type_), _fenced_side(w, compared, b, type_)


def _fenced_side(w: FunctionWriter, compared: tuple[str, str, str], value: str, type_: Type) -> str:
    """One side of such a choice."""
    _, left, right = compared
    if not isinstance(type_, Scalar | Vec) or not type_.dtype.is_float or value not in (left, right):
        return value
    constants = _zeros(w, type_)
    return value if value in constants or not {left, right} & {*constants} else intrinsic(w, "arithmetic.fence", type_, value)


def _zeros(w: FunctionWriter, type_: Type) -> tuple[str, str]:
    """0 and -0, as operands."""
    dtype = dtype_of(type_)
    return w.splat(literal(0.0, dtype), type_), w.splat(literal(-0.0, dtype), type_)


def _head(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    memory, size = op.operands[0], op.attrs["bytes"]
    assert isinstance(memory.type, Tensor)
    assert isinstance(size, int)
    where = w.element_pointer(memory, operands[1:])
    address = w.let(f"ptrtoint {w.dialect.pointer(memory.type.space)} {where} to i64")
    left = w.let(f"and i64 {w.let(f'sub i64 0, {address}')}, {size - 1}")
    return w.let(f"udiv i64 {left}, {memory.type.dtype.itemsize}")


def _divide_integers(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    """Floor division or modulo; by zero gives zero."""
    type_ = op.operands[0].type
    kind, dtype = llvm_type(type_), dtype_of(type_)
    mask = f"<{type_.width} x i1>" if isinstance(type_, Vec) else "i1"
    a, b = operands
    modulo = op.opcode == "mod"
    constant = int(b) if b.lstrip("-").isdigit() else None
    if constant is not None and constant > 0:
        if constant & (constant - 1) == 0:
            if modulo:
                return w.let(f"and {kind} {a}, {constant - 1}")
            return w.let(f"{'ashr' if dtype.kind == 'i' else 'lshr'} {kind} {a}, {constant.bit_length() - 1}")
        if dtype.kind == "u":
            return w.let(f"{'urem' if modulo else 'udiv'} {kind} {a}, {b}")
    zero, one = w.splat("0", type_), w.splat("1", type_)
    is_zero = w.let(f"icmp eq {kind} {b}, {zero}")
    safe = w.let(f"select {mask} {is_zero}, {kind} {one}, {kind} {b}")
    if dtype.kind == "u":
        result = w.let(f"{'urem' if modulo else 'udiv'} {kind} {a}, {safe}")
        return w.let(f"select {mask} {is_zero}, {kind} {zero}, {kind} {result}")
    # The smallest integer over -1 overflows: divide by 1 and negate instead.
    minus = w.let(f"icmp eq {kind} {b}, {w.splat('-1', type_)}")
    safe = w.let(f"select {mask} {minus}, {kind} {one}, {kind} {safe}")
    quotient = w.let(f"sdiv {kind} {a}, {safe}")
    remainder = w.let(f"srem {kind} {a}, {safe}")
    inexact = w.let(f"icmp ne {kind} {remainder}, {zero}")
    mixed = w.let(f"xor {kind} {remainder}, {safe}")
    differ = w.let(f"icmp slt {kind} {mixed}, {zero}")
    adjust = w.let(f"and {mask} {inexact}, {differ}")
    if modulo:
        fixed = w.let(f"add {kind} {remainder}, {safe}")
        result = w.let(f"select {mask} {adjust}, {kind} {fixed}, {kind} {remainder}")
        result = w.let(f"select {mask} {minus}, {kind} {zero}, {kind} {result}")
    else:
        down = w.let(f"sub {kind} {quotient}, {one}")
        result = w.let(f"select {mask} {adjust}, {kind} {down}, {kind} {quotient}")
        negated = w.let(f"sub {kind} {zero}, {a}")
        result = w.let(f"select {mask} {minus}, {kind} {negated}, {kind} {result}")
    return w.let(f"select {mask} {is_zero}, {kind} {zero}, {kind} {result}")


def _shift(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    type_ = op.operands[0].type
    kind, dtype = llvm_type(type_), dtype_of(type_)
    count = operands[1]
    if not count.lstrip("-").isdigit():
        count = w.let(f"and {kind} {count}, {w.splat(str(dtype.bits - 1), type_)}")
    else:
        count = str(int(count) % dtype.bits)
    word = "shl" if op.opcode == "shl" else "ashr" if dtype.kind == "i" else "lshr"
    return w.let(f"{word} {kind} {operands[0]}, {count}")


def _compare(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    type_ = op.operands[0].type
    dtype, kind = dtype_of(type_), llvm_type(type_)
    if dtype.is_float:
        word = "fcmp " + ("une" if op.opcode == "ne" else "o" + op.opcode)
    else:
        sign = "" if op.opcode in ("eq", "ne") else "s" if dtype.kind == "i" else "u"
        word = f"icmp {sign}{op.opcode}"
    result = w.let(f"{word} {kind} {operands[0]}, {operands[1]}")
    if dtype.is_float:
        w.compared[result] = word, operands[0], operands[1]
    return result


def _isnan(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    return w.let(f"fcmp uno {llvm_type(op.operands[0].type)} {operands[0]}, {operands[0]}")


def _select(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    kind, (condition, a, b) = llvm_type(op.operands[1].type), operands
    if condition in w.compared and dtype_of(op.operands[1].type).is_float:
        a, b = _fenced(w, w.compared[condition], a, b, op.operands[1].type)
    return w.let(f"select {llvm_type(op.operands[0].type)} {condition}, {kind} {a}, {kind} {b}")


def _cast(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    source, target = op.operands[0].type, op.results[0].type
    a, b = dtype_of(source), dtype_of(target)
    value, before, after = operands[0], llvm_type(source), llvm_type(target)
    if a is b:
        return value
    if b is bool_:
        zero = w.splat(literal(0, a), source)
        return w.let(f"{'fcmp une' if a.is_float else 'icmp ne'} {before} {value}, {zero}")
    if a is bool_:
        return w.let(f"{'uitofp' if b.is_float else 'zext'} {before} {value} to {after}")
    if a.is_float and b.is_float:
        if a.bits == b.bits:
            # Between f16 and bf16: through f32, which holds both.
            middle = llvm_type(with_dtype(source, f32))
            value, before = w.let(f"fpext {before} {value} to {middle}"), middle
            return w.let(f"fptrunc {before} {value} to {after}")
        return w.let(f"{'fpext' if b.bits > a.bits else 'fptrunc'} {before} {value} to {after}")
    if a.is_float:
        if a.is_small_float:
            # LLVM's own saturating conversion of f16 gives the smallest integer for NaN on CPUs with f16 arithmetic.
            source = with_dtype(source, f32)
            value, before = w.let(f"fpext {before} {value} to {llvm_type(source)}"), llvm_type(source)
        name = f"llvm.fpto{'s' if b.kind == 'i' else 'u'}i.sat.{_overloaded(target)}.{_overloaded(source)}"
        return w.call(after, name, (before, value))
    if b.is_float:
        return w.let(f"{'s' if a.kind == 'i' else 'u'}itofp {before} {value} to {after}")
    if a.bits == b.bits:
        return value
    word = "trunc" if b.bits < a.bits else "sext" if a.kind == "i" else "zext"
    return w.let(f"{word} {before} {value} to {after}")


def _bitcast(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    before, after = llvm_type(op.operands[0].type), llvm_type(op.results[0].type)
    return operands[0] if before == after else w.let(f"bitcast {before} {operands[0]} to {after}")


def _unary(name: str) -> Handler:
    return lambda w, op, operands: intrinsic(w, name, op.operands[0].type, operands[0])


def _negate(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    type_ = op.operands[0].type
    if dtype_of(type_).is_float:
        return w.let(f"fneg {llvm_type(type_)} {operands[0]}")
    return w.let(f"sub {llvm_type(type_)} {w.splat('0', type_)}, {operands[0]}")


def _absolute(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    type_ = op.operands[0].type
    if dtype_of(type_).is_float:
        return intrinsic(w, "fabs", type_, operands[0])
    if dtype_of(type_).kind == "u":
        return operands[0]
    kind = llvm_type(type_)
    return w.call(kind, f"llvm.abs.{_overloaded(type_)}", (kind, operands[0]), ("i1", "false"))


def _not(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    type_ = op.operands[0].type
    ones = w.splat("true" if dtype_of(type_).is_bool else "-1", type_)
    return w.let(f"xor {llvm_type(type_)} {operands[0]}, {ones}")


def _fma(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    return intrinsic(w, "fma", op.operands[0].type, *operands)


def _add_pairs(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    type_, dtype = op.operands[0].type, op.attrs["dtype"]
    assert isinstance(dtype, DType)
    kind = llvm_type(type_)
    pairs = llvm_type(Vec(dtype, 2 * (type_.width if isinstance(type_, Vec) else 1)))
    first, second = (w.let(f"bitcast {kind} {v} to {pairs}") for v in operands)
    total = w.let(f"fadd {pairs} {first}, {second}")
    return w.let(f"bitcast {pairs} {total} to {kind}")


def _const(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    value = op.attrs["value"]
    assert isinstance(value, int | float)
    return literal(value, dtype_of(op.results[0].type))


def _size(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    value = op.attrs["value"]
    assert isinstance(value, Size)
    return w.sizes[value]


def _broadcast(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    return w.splat(operands[0], op.results[0].type)


def _extract(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    return w.let(f"extractelement {llvm_type(op.operands[0].type)} {operands[0]}, i64 {op.attrs['lane']}")


def _pack(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    kind, element = llvm_type(op.results[0].type), llvm_type(op.operands[0].type)
    if not any(o.startswith("%") for o in operands):
        return "<" + ", ".join(f"{element} {o}" for o in operands) + ">"
    value = "poison"
    for lane, operand in enumerate(operands):
        value = w.let(f"insertelement {kind} {value}, {element} {operand}, i64 {lane}")
    return value


def _every(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str:
    kind = op.operands[0].type
    assert isinstance(kind, Vec)
    bits = w.let(f"bitcast {llvm_type(kind)} {operands[0]} to i{kind.width}")
    return w.let(f"icmp eq i{kind.width} {bits}, -1")


_HANDLERS: dict[str, Handler] = {
    "add": _arithmetic("add", "fadd"), "sub": _arithmetic("sub", "fsub"), "mul": _arithmetic("mul", "fmul"),
    "div": _arithmetic("sdiv", "fdiv"), "and": _arithmetic("and", "and"), "or": _arithmetic("or", "or"),
    "xor": _arithmetic("xor", "xor"), "min": _extreme, "max": _extreme, "smaller": _pick, "larger": _pick, "floordiv": _divide_integers, "mod": _divide_integers,
    "shl": _shift, "shr": _shift, "eq": _compare, "ne": _compare, "lt": _compare, "le": _compare, "gt": _compare,
    "ge": _compare, "isnan": _isnan, "select": _select, "cast": _cast, "bitcast": _bitcast, "neg": _negate, "abs": _absolute,
    "not": _not, "floor": _unary("floor"), "ceil": _unary("ceil"), "round": _unary("roundeven"), "trunc": _unary("trunc"),
    "sqrt": _unary("sqrt"), "fma": _fma, "add_pairs": _add_pairs, "const": _const, "size": _size, "broadcast": _broadcast, "extract": _extract,
    "pack": _pack, "every": _every, "load": FunctionWriter.load, "head": _head, **bits.HANDLERS,
}  # fmt: skip
