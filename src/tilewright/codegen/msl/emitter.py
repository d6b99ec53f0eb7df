"""Thread-stage kernels -> Metal Shading Language. In: a kernel after the order `portable` of passes. Out: a kernel function.

Arrays are buffers in the order of the parameters, which the runtime binds at their offsets; after them comes one buffer of words of 64 bits: the
sizes that the host computes (`kernel_sizes`), then the numbers of the call. Shared memory is declared where the function begins. `tables.py` has the
expressions.

    %2 = load %x, %i : f32                const float v2 = a0[v1];
    %3 = mul %2, %2 : f32           ->    const float v3 = v2 * v2;
    store %out, %i, %3                    a1[v1] = v3;
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from tilewright.base.dtypes import DType
from tilewright.base.errors import TargetLimit
from tilewright.base.sizes import Size, contiguous_strides
from tilewright.base.target import Target
from tilewright.codegen.msl.tables import ATOMICS, OPS, ROUNDS, SOURCES, TYPES, UNSIGNED
from tilewright.codegen.text.structured import STRUCTURE, StructuredWriter
from tilewright.ir.needs import element_count
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, Type, dtype_of

_NOTHING = frozenset({"prefetch", "step"})
_WRITES = frozenset({"store", "atomic", "atomic_store", "report"})
_SPACES = {"global": "device", "shared": "threadgroup", "local": "thread", "constant": "thread"}


def kind_of(dtype: DType) -> str:
    """The letter of the tables."""
    if dtype.is_bool:
        return "b"
    if dtype.is_float:
        return {"f32": "f", "f16": "h"}.get(dtype.name, "u")
    return "s" if dtype.kind == "i" else "u"


def spelled(type_: Type) -> str:
    return TYPES[dtype_of(type_).name]


def stored(dtype: DType) -> str:
    """The type of an element in memory."""
    return "uchar" if dtype.is_bool else TYPES[dtype.name]


def kernel_sizes(kernel: Kernel) -> tuple[Size, ...]:
    """The sizes that the code reads, each once, in order: strides of arrays and those of `size` ops."""
    found: dict[Size, None] = {}
    for param in kernel.tensors:
        assert isinstance(param.type, Tensor)
        found.update((stride, None) for stride in param.type.strides if stride.constant is None)
    for op in walk(kernel.body):
        value = op.attrs.get("value")
        if op.opcode == "size" and isinstance(value, Size) and value.constant is None:
            found[value] = None
    return tuple(found)


class MslWriter(StructuredWriter):
    """Writes one kernel."""

    def __init__(self, kernel: Kernel, entry: str, target: Target) -> None:
        super().__init__(kernel)
        self.target = target
        sizes = kernel_sizes(kernel)
        self.values = {size: f"p[{k}]" for k, size in enumerate(sizes)}
        written = {op.operands[0] for op in walk(kernel.body) if op.opcode in _WRITES}
        params: list[str] = []
        for k, param in enumerate(kernel.tensors):
            self.names[param] = f"a{k}"
            constant = "" if param in written or kernel.attrs.get("aliased") else "const "
            params.append(f"device {constant}{stored(dtype_of(param.type))}* a{k} [[buffer({k})]]")
        for k, param in enumerate(kernel.scalars, len(sizes)):
            self.names[param] = _number_at(f"p[{k}]", dtype_of(param.type))
        params += [
            f"constant long* p [[buffer({len(params)})]]", "uint3 block [[threadgroup_position_in_grid]]", "uint3 blocks [[threadgroups_per_grid]]",
            "uint tid [[thread_index_in_threadgroup]]",
        ]  # fmt: skip
        self.shared: list[str] = []
        self.line(f"const int lane = int(tid & {target.warp_size - 1});")
        self.line("(void)lane; (void)p; (void)block; (void)blocks;")
        self.block(kernel.body)
        self.text = "\n".join([f"kernel void {entry}({', '.join(params)}) {{", *self.shared, *self.lines, "}"])

    # -- the language ---------------------------------------------------------------------------------------------------

    def constant(self, name: str, type_: Type, text: str) -> str:
        return f"const {spelled(type_)} {name} = {text};"

    def variable(self, name: str, type_: Type, text: str) -> str:
        return f"{spelled(type_)} {name} = {text};" if text else f"{spelled(type_)} {name};"

    def compare_index(self, index: str, high: str, type_: Type) -> str:
        return f"{index} < {high}"

    def advance(self, index: str, step: str, type_: Type) -> str:
        return f"{index} + {step}"

    def literal(self, op: Op) -> str:
        return number(op.attrs["value"], dtype_of(op.results[0].type))

    def expression(self, op: Op) -> str | None:
        dtype = dtype_of(op.operands[0].type) if op.operands else None
        if dtype is None or op.opcode not in OPS:
            return None
        template = next((text for kinds, text in OPS[op.opcode].items() if kind_of(dtype) in kinds), None)
        if template is None:
            return None
        result = dtype_of(op.results[0].type)
        return template.format(*map(self.of, op.operands), T=TYPES[result.name], U=UNSIGNED[dtype.itemsize], m=dtype.bits - 1)

    # -- numbers --------------------------------------------------------------------------------------------------------

    def cast(self, op: Op) -> None:
        source, result = dtype_of(op.operands[0].type), dtype_of(op.results[0].type)
        text, soft = self.of(op.operands[0]), [d for d in (source, result) if d.is_float and kind_of(d) == "u"]
        if soft:
            raise self.unknown(op)
        if result.is_bool and not source.is_bool:
            text = f"{text} != 0"
        elif source.is_float and result.is_int:
            low, high = int(result.min_value), int(result.max_value)
            text = f"tw_whole<{TYPES[result.name]}>(float({text}), {float(low)!r}f, {float(high + 1)!r}f, {number(low, result)}, {number(high, result)})"
        else:
            text = f"{TYPES[result.name]}({text})"
        self.let(op.results[0], text)

    def bitcast(self, op: Op) -> None:
        to = spelled(op.results[0].type)
        self.let(op.results[0], self.of(op.operands[0]) if to == spelled(op.operands[0].type) else f"as_type<{to}>({self.of(op.operands[0])})")

    def select(self, op: Op) -> None:
        cond, a, b = map(self.of, op.operands)
        self.let(op.results[0], f"{cond} ? {a} : {b}")

    def funnel_shift(self, op: Op) -> None:
        low, high, count = map(self.of, op.operands)
        both = f"(ulong({high}) << 32 | ulong({low}))"
        self.let(op.results[0], f"uint({both} << ({count} & 31) >> 32)" if op.attrs["mode"] == "left" else f"uint({both} >> ({count} & 31))")

    # -- where ----------------------------------------------------------------------------------------------------------

    def size_(self, op: Op) -> None:
        value = op.attrs["value"]
        assert isinstance(value, Size)
        self.names[op.results[0]] = self.size(value)

    def size(self, size: Size) -> str:
        return f"{size.constant}L" if size.constant is not None else self.values[size]

    def position(self, op: Op) -> None:
        axis = op.attrs.get("axis", 0)
        assert isinstance(axis, int)
        text = {"program_id": f"block.{'xyz'[axis]}", "grid_size": f"blocks.{'xyz'[axis]}", "thread_id": "tid", "lane_id": "lane", "warp_id": f"tid / {self.target.warp_size}"}[op.opcode]
        self.let(op.results[0], f"{spelled(op.results[0].type)}({text})")

    # -- memory ---------------------------------------------------------------------------------------------------------

    def alloc(self, op: Op) -> None:
        memory = op.results[0].type
        assert isinstance(memory, Tensor)
        name, count, kind = self.fresh("m"), element_count(memory), stored(memory.dtype)
        self.names[op.results[0]] = name
        if memory.space == "shared":
            self.shared.append(f"  threadgroup {kind} {name}[{count}];")
            return
        values = op.attrs.get("values")
        assert values is None or isinstance(values, tuple)
        self.line(f"const {kind} {name}[{count}] = {{{', '.join(number(v, memory.dtype) for v in values)}}};" if values else f"{kind} {name}[{count}];")

    def _where(self, op: Op) -> tuple[str, Tensor, tuple[Value, ...]]:
        """The element of an access, its array's type, and the operands after the indices."""
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        strides = memory.strides if memory.space == "global" else contiguous_strides(memory.shape)
        terms = [
            self.of(index) if stride.constant == 1 else f"{self.of(index)} * {self.size(stride)}"
            for index, stride in zip(op.operands[1 : 1 + memory.rank], strides, strict=True)
        ]
        return f"{self.of(op.operands[0])}[{' + '.join(terms) or '0'}]", memory, op.operands[1 + memory.rank :]

    def load(self, op: Op) -> None:
        where, memory, rest = self._where(op)
        text = f"{where} != 0" if memory.dtype.is_bool else where
        if op.attrs.get("masked"):
            text = f"({self.of(rest[-1])} ? {text} : {number(0, memory.dtype)})"
        self.let(op.results[0], text)

    def store(self, op: Op) -> None:
        where, memory, rest = self._where(op)
        text = f"{where} = {'uchar' if memory.dtype.is_bool else ''}({self.of(rest[0])});"
        self.line(f"if ({self.of(rest[1])}) {text}" if op.attrs.get("masked") and len(rest) > 1 else text)

    def atomic(self, op: Op) -> None:
        where, memory, rest = self._where(op)
        if op.attrs.get("order", "relaxed") != "relaxed":
            raise TargetLimit.at("TW020", f"{self.target.name} cannot do {op.opcode} with order={op.attrs['order']!r}: Metal's atomics are relaxed", op.span)
        word = "int" if memory.dtype.kind == "i" else "uint"
        pointer = f"({_SPACES[memory.space]} atomic_{word}*)&{where}"
        given = [f"as_type<uint>({self.of(v)})" if memory.dtype.is_float else self.of(v) for v in rest]
        kind, relaxed = str(op.attrs.get("kind", "")), "memory_order_relaxed"
        if op.opcode == "atomic_store":
            self.line(f"atomic_store_explicit({pointer}, {given[0]}, {relaxed});")
            return
        if kind == "cas":
            old = self.fresh("t")
            self.line(f"{word} {old} = {given[0]};")
            self.line(f"while (!atomic_compare_exchange_weak_explicit({pointer}, &{old}, {given[1]}, {relaxed}, {relaxed}) && {old} == {given[0]}) {{}}")
            text = old
        elif op.opcode == "atomic_load":
            text = f"atomic_load_explicit({pointer}, {relaxed})"
        elif kind in ATOMICS:
            text = f"{ATOMICS[kind]}({pointer}, {given[0]}, {relaxed})"
        else:
            raise self.unknown(op)
        self.let(op.results[0], f"as_type<float>({text})" if memory.dtype.is_float else text)

    def report(self, op: Op) -> None:
        """The first thread to come here leaves site, index and extent."""
        cell, index, extent = map(self.of, op.operands)
        first = f"atomic_exchange_explicit((device atomic_uint*){cell}, {op.attrs['site']}u, memory_order_relaxed)"
        self.line(f"if ({first} == 0u) {{ {cell}[1] = {index}; {cell}[2] = {extent}; }}")

    # -- threads together -------------------------------------------------------------------------------------------------

    def barrier(self, op: Op) -> None:
        self.line("threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);")

    def warp_sync(self, op: Op) -> None:
        self.line("simdgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);")

    def shuffle(self, op: Op) -> None:
        width, dtype = op.attrs.get("width", self.target.warp_size), dtype_of(op.operands[0].type)
        assert isinstance(width, int)
        amount, source = self.fresh("n"), self.fresh("n")
        self.line(f"const int {amount} = int({self.of(op.operands[1])}) & {self.target.warp_size - 1};")
        text = SOURCES[str(op.attrs["mode"])].format(lane="lane", low=f"(lane & {-width})", last=width - 1, n=amount)
        self.line(f"const int {source} = {text};")
        function = "tw_shuffle_bool" if dtype.is_bool else "tw_shuffle_wide" if dtype.itemsize == 8 else "tw_shuffle"
        self.let(op.results[0], f"{function}({self.of(op.operands[0])}, {source})")

    def vote(self, op: Op) -> None:
        mask = f" & uint({self.of(op.operands[1])})" if len(op.operands) > 1 else ""
        value, mode = self.of(op.operands[0]), op.attrs["mode"]
        yes, no = (f"(tw_ballot({text}){mask})" for text in (value, f"!{value}"))
        self.let(op.results[0], {"ballot": yes, "any": f"{yes} != 0", "all": f"{no} == 0", "uniform": f"{yes} == 0 || {no} == 0"}[str(mode)])

    def redux(self, op: Op) -> None:
        if len(op.operands) > 1:
            raise TargetLimit.at("TW020", f"{self.target.name} cannot do redux with a mask: a SIMD group combines the lanes that are there", op.span)
        self.let(op.results[0], f"{ROUNDS[str(op.attrs['kind'])]}({self.of(op.operands[0])})")

    def lanes(self, op: Op) -> None:
        below = {"lt": "(1u << lane) - 1u", "le": "(2u << lane) - 1u", "eq": "1u << lane", "ge": "~((1u << lane) - 1u)", "gt": "~((2u << lane) - 1u)"}
        self.let(op.results[0], below[str(op.attrs["relation"])] if op.opcode == "lane_mask" else "tw_ballot(true)")

    def nothing(self, op: Op) -> None:
        return


def number(value: object, dtype: DType) -> str:
    """A literal."""
    assert isinstance(value, int | float)
    if dtype.is_bool:
        return "true" if value else "false"
    if dtype.is_float and kind_of(dtype) == "u":
        import numpy as np

        return f"{TYPES[dtype.name]}({int(np.asarray(value, np.float32).astype(dtype.numpy).view(f'u{dtype.itemsize}'))})"
    if dtype.is_float:
        held = struct.unpack("<f", struct.pack("<f", value))[0] if math.isfinite(value) and abs(value) < 3.5e38 else value
        text = f"as_type<float>({struct.unpack('<I', struct.pack('<f', value))[0]:#x}u)" if not math.isfinite(held) else f"{held!r}f"
        return f"half({text})" if dtype.name == "f16" else f"({text})" if text.startswith("-") else text
    if dtype.name == "i64" and value == -(1 << 63):
        return "(-9223372036854775807L - 1L)"
    suffix = {"i64": "L", "u64": "UL", "u32": "u"}.get(dtype.name, "")
    text = f"({int(value)}{suffix})" if value < 0 else f"{int(value)}{suffix}"
    return text if dtype.bits >= 32 and value != -(1 << 31) else f"{TYPES[dtype.name]}({text})" if dtype.bits < 32 else "(-2147483647 - 1)"


def _number_at(word: str, dtype: DType) -> str:
    """A number of the call, which lies in a word of 64 bits."""
    if dtype.is_bool:
        return f"({word} != 0)"
    if dtype.is_float:
        bits = f"{UNSIGNED[dtype.itemsize]}({word})"
        return f"as_type<{TYPES[dtype.name]}>({bits})" if kind_of(dtype) in "fh" else bits
    return f"{TYPES[dtype.name]}({word})"


_POSITIONS = ("program_id", "grid_size", "thread_id", "lane_id", "warp_id")
_HANDLERS: dict[str, Callable[[MslWriter, Op], None]] = {
    "cast": MslWriter.cast, "bitcast": MslWriter.bitcast, "select": MslWriter.select, "funnel_shift": MslWriter.funnel_shift, "size": MslWriter.size_,
    "alloc": MslWriter.alloc, "load": MslWriter.load, "store": MslWriter.store, "atomic": MslWriter.atomic, "atomic_load": MslWriter.atomic,
    "atomic_store": MslWriter.atomic, "report": MslWriter.report, "barrier": MslWriter.barrier, "warp_sync": MslWriter.warp_sync, "shuffle": MslWriter.shuffle,
    "vote": MslWriter.vote, "redux": MslWriter.redux, "lane_mask": MslWriter.lanes, "active_mask": MslWriter.lanes,
    **dict.fromkeys(_POSITIONS, MslWriter.position), **dict.fromkeys(_NOTHING, MslWriter.nothing),
}  # fmt: skip
MslWriter.handlers = _HANDLERS
KNOWN = frozenset({*_HANDLERS, *OPS, *STRUCTURE})
"""The ops that have a spelling; others are refused with target, construct and line."""
