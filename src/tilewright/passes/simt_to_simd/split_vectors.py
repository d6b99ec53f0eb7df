"""Pass: short vectors of a thread become single numbers.

    %v = load %x, %i {width = 2} : vec<f32, 2>        %0 = load %x, %i
    %w = mul %v, %v                           ->      %1 = load %x, %i + 1
                                                      %2 = mul %0, %0
                                                      %3 = mul %1, %1

In and out: a thread-stage kernel. It is what a CPU needs on which threads are lanes of vectors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import DType, u8, u16, u32, u64
from tilewright.base.errors import TargetLimit
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attrs, Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.types import Scalar, Tensor, Type, Vec, dtype_of

_SPLIT_GROUPS = frozenset({"elementwise", "function", "bits"})


def split_vectors(kernel: Kernel) -> Kernel:
    """The kernel without vecs; unchanged where it has none."""
    if not any(isinstance(v.type, Vec) for op in walk(kernel.body) for v in (*op.results, *op.operands)):
        return kernel
    return replace(kernel, body=VectorSplitter().block(kernel.body))


def _parts(type_: Type, name: str) -> list[Value]:
    if isinstance(type_, Vec):
        return [Value(Scalar(type_.dtype), name) for _ in range(type_.width)]
    return [Value(type_, name)]


class VectorSplitter:
    """Splits all vecs of a kernel."""

    def __init__(self) -> None:
        self.parts: dict[Value, list[Value]] = {}

    def get(self, value: Value) -> list[Value]:
        return self.parts.get(value, [value])

    def singles(self, values: Sequence[Value]) -> list[Value]:
        """What scalars have become."""
        return [self.get(v)[0] for v in values]

    def block(self, block: Block) -> Block:
        args: list[Value] = []
        for arg in block.args:
            if isinstance(arg.type, Vec):
                self.parts[arg] = _parts(arg.type, arg.name)
            args += self.get(arg)
        b = Builder()
        for op in block.ops:
            with b.at(op.span):
                self.op(b, op)
        return Block(tuple(args), tuple(b.ops))

    def op(self, b: Builder, op: Op) -> None:
        if op.regions or op.opcode == "yield":
            operands = tuple(p for v in op.operands for p in self.get(v))
            results: list[Value] = []
            for result in op.results:
                if isinstance(result.type, Vec):
                    self.parts[result] = _parts(result.type, result.name)
                results += self.get(result)
            regions = tuple(self.block(region) for region in op.regions)
            b.append(replace(op, operands=operands, results=tuple(results), regions=regions))
        elif not any(isinstance(v.type, Vec) for v in (*op.operands, *op.results)):
            operands = tuple(self.get(v)[0] for v in op.operands)
            b.append(op if operands == op.operands else replace(op, operands=operands))
        else:
            for result, parts in zip(op.results, self.split(b, op), strict=True):
                self.parts[result] = list(parts)

    def split(self, b: Builder, op: Op) -> Sequence[Sequence[Value]]:
        """The numbers that each result becomes."""
        given = [self.get(v) for v in op.operands]
        opcode = op.opcode
        if opcode == "load":
            return [self.load(b, op)]
        if opcode == "store":
            self.store(b, op)
            return []
        if opcode == "broadcast":
            assert isinstance(op.result.type, Vec)
            return [given[0] * op.result.type.width]
        if opcode == "pack":
            return [[one for (one,) in given]]
        if opcode == "extract":
            return [[given[0][_integer(op, "lane")]]]
        if opcode == "insert":
            lane = _integer(op, "lane")
            return [[*given[0][:lane], given[1][0], *given[0][lane + 1 :]]]
        if opcode == "rearrange":
            lanes, joined = op.attrs["lanes"], [p for parts in given for p in parts]
            assert isinstance(lanes, tuple)
            return [[joined[k] for k in lanes if isinstance(k, int)]]
        if opcode == "split":
            half = len(given[0]) // 2
            return [given[0][:half], given[0][half:]]
        if opcode in ("every", "fold"):
            return [[_folded(b, given[0], "and" if opcode == "every" else str(op.attrs["kind"]))]]
        if opcode == "atomic" and op.attrs["kind"] == "add":
            return [self.add(b, op)]
        if opcode == "to_bits":
            return [[_joined_bits(b, given[0], op.result.type)]]
        if opcode == "from_bits":
            return [_separate_bits(b, given[0][0], op.result.type)]
        if OPS[opcode].group not in _SPLIT_GROUPS:
            raise TargetLimit.at(
                "TW020", f"a CPU cannot do {opcode} of several elements at once", op.span, "use one element at a time, or a GPU"
            )  # fmt: skip
        width = max(len(g) for g in given)
        wide = [g * width if len(g) == 1 else g for g in given]
        return [[b.emit(opcode, [w[k] for w in wide], op.attrs)[0] for k in range(width)]]

    def load(self, b: Builder, op: Op) -> list[Value]:
        memory = op.operands[0].type
        assert isinstance(memory, Tensor) and isinstance(op.result.type, Vec)
        indices, rest = self.singles(op.operands[1 : 1 + memory.rank]), self.singles(op.operands[1 + memory.rank :])
        attrs = plain(op)
        return [b.emit("load", [op.operands[0], *after(b, indices, k), *rest], attrs)[0] for k in range(op.result.type.width)]

    def add(self, b: Builder, op: Op) -> list[Value]:
        """Atomic additions to neighbours, each on its own."""
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        indices = self.singles(op.operands[1 : 1 + memory.rank])
        parts = self.get(op.operands[1 + memory.rank])
        return [b.emit("atomic", [op.operands[0], *after(b, indices, k), v], op.attrs)[0] for k, v in enumerate(parts)]

    def store(self, b: Builder, op: Op) -> None:
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        indices, rest = self.singles(op.operands[1 : 1 + memory.rank]), self.singles(op.operands[2 + memory.rank :])
        for k, value in enumerate(self.get(op.operands[1 + memory.rank])):
            b.emit("store", [op.operands[0], *after(b, indices, k), value, *rest], plain(op))


def plain(op: Op) -> Attrs:
    """What an access says besides how wide it is."""
    return MappingProxyType({k: v for k, v in op.attrs.items() if k not in ("width", "unaligned")})


def after(b: Builder, indices: Sequence[Value], count: int) -> list[Value]:
    """The element so many after this one along the last axis."""
    return [*indices[:-1], b.add(indices[-1], b.const(count, indices[-1].type.dtype))] if count else list(indices)


def _folded(b: Builder, parts: Sequence[Value], kind: str) -> Value:
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [b.op(kind, x, y) for x, y in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def _integer(op: Op, name: str) -> int:
    value = op.attrs[name]
    assert isinstance(value, int)
    return value


def _unsigned(bits: int) -> DType:
    return {8: u8, 16: u16, 32: u32, 64: u64}[bits]


def _joined_bits(b: Builder, parts: Sequence[Value], result: Type) -> Value:
    """The bits of several numbers as one word, the first lowest."""
    assert isinstance(result, Scalar)
    word: Value | None = None
    for k, part in enumerate(parts):
        dtype = dtype_of(part.type)
        wide = b.cast(b.bitcast(part, _unsigned(dtype.bits)), result.dtype)
        placed = wide if k == 0 else b.op("shl", wide, b.const(k * dtype.bits, result.dtype))
        word = placed if word is None else b.op("or", word, placed)
    assert word is not None
    return word


def _separate_bits(b: Builder, word: Value, result: Type) -> list[Value]:
    """The numbers whose bits make a word, the lowest first."""
    assert isinstance(result, Vec)
    dtype, wide = result.dtype, dtype_of(word.type)
    shifted = [word if k == 0 else b.op("shr", word, b.const(k * dtype.bits, wide)) for k in range(result.width)]
    return [b.bitcast(b.cast(one, _unsigned(dtype.bits)), dtype) for one in shifted]
