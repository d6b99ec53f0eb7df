"""Thread-stage IR -> code of the toy device: Python text of NumPy operations over the threads of a block.

In: a program at the thread stage. Out: one text with a function for each kernel, which runs one block. A number is an array with an
element for each thread, a vec one with a second axis; all threads go in step, with a mask of those that are active, so a barrier is
nothing. `machine.py` has what the instructions do.

    %2 = mul %0, %1 : f32                       v2 = number('mul', F32, v0, v1)
    if %c { store %o, %i, %2 }           ->     m1 = m0 & v9
                                                if m1.any():
                                                    store(p1, v4 * s0, v2, m1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.codegen.registry import Backend, ProgramText, entry_name, register_backend
from tilewright.ir.needs import element_count
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.ops import OPS
from tilewright.ir.program import Program
from tilewright.ir.types import Scalar, Tensor, Type, Vec, dtype_of
from toy_device.target import TOY

_ARITHMETIC = frozenset(
    ["add", "sub", "mul", "min", "max", "floordiv", "mod", "and", "or", "xor", "shl", "shr", "smaller", "larger", "div", "fma", "neg", "abs", "not", "floor", "ceil", "round", "trunc", "sqrt", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "cast", "bitcast"]
)
"""Ops whose meaning is that of `ir.numerics`, thread by thread."""
_NOTHING = frozenset({"barrier", "warp_sync", "fence", "prefetch"})


class KernelWriter:
    """Writes the function of one kernel."""

    def __init__(self, kernel: Kernel, entry: str, target: Target) -> None:
        self.kernel, self.target = kernel, target
        self.names: dict[Value, str] = {}
        self.sizes = {size: f"s{position}" for position, size in enumerate(kernel.size_names)}
        self.lines: list[str] = []
        self.depth, self.counter, self.mask = 1, 0, "m0"
        params = [self._name(param, "p") for param in kernel.params]
        self.lines.append(f"def {entry}(block, grid, {', '.join([*params, *self.sizes.values()])}):")
        for param, name in zip(kernel.params, params, strict=True):
            dtype = dtype_of(param.type)
            given = f"global_memory({name}, '{dtype}')" if isinstance(param.type, Tensor) else f"full({kernel.threads}, '{dtype}', {name})"
            self.line(f"{name} = {given}")
        self.line(f"m0 = full({kernel.threads}, 'bool', True)")
        self.block(kernel.body)

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def fresh(self, letter: str = "v") -> str:
        self.counter += 1
        return f"{letter}{self.counter}"

    def _name(self, value: Value, letter: str = "v") -> str:
        return self.names.setdefault(value, self.fresh(letter))

    def let(self, op: Op, text: str) -> None:
        self.line(f"{', '.join(self._name(result) for result in op.results)} = {text}")

    def of(self, values: Sequence[Value]) -> str:
        return ", ".join(self.names[value] for value in values)

    def size(self, size: Size) -> str:
        """A symbolic size as an expression of the function's parameters."""
        terms = []
        for monomial, factor in size.terms:
            atoms = [self.sizes[atom] if isinstance(atom, str) else f"size_{atom.op}({self.size(atom.a)}, {self.size(atom.b)})" for atom in monomial]
            terms.append("*".join([str(factor), *atoms]))
        return " + ".join(terms) or "0"

    def offset(self, memory: Value, indices: Sequence[Value]) -> str:
        """The element of a tensor that each thread means."""
        type_ = memory.type
        assert isinstance(type_, Tensor)
        terms = [f"index({self.names[i]}) * ({self.size(stride)})" for i, stride in zip(indices, type_.strides, strict=True)]
        return " + ".join(terms) or f"full({self.kernel.threads}, 'i64', 0)"

    # -- regions --------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        for op in block.ops:
            if op.opcode in _ARITHMETIC:
                self._number(op)
            elif op.opcode not in _NOTHING and op.opcode != "yield":
                HANDLERS[op.opcode](self, op)

    def _number(self, op: Op) -> None:
        extra = f", to='{op.attrs['dtype']}'" if op.opcode in ("cast", "bitcast") else ""
        self.let(op, f"number('{op.opcode}', '{dtype_of(op.operands[0].type)}', {self.of(op.operands)}{extra})")

    def region(self, block: Block, mask: str, results: Sequence[str]) -> None:
        """The region for the threads of a mask, whose results it replaces."""
        outer, self.mask = self.mask, mask
        self.depth += 1
        self.block(block)
        for name, value in zip(results, block.yields, strict=True):
            self.line(f"{name} = merge({mask}, {self.names[value]}, {name})")
        if not block.ops:
            self.line("pass")
        self.depth -= 1
        self.mask = outer

    def zeros(self, type_: Type) -> str:
        width = f", {type_.width}" if isinstance(type_, Vec) else ""
        return f"zeros({self.kernel.threads}, '{dtype_of(type_)}'{width})"

    def if_(self, op: Op) -> None:
        results = [self._name(result) for result in op.results]
        for name, result in zip(results, op.results, strict=True):
            self.line(f"{name} = {self.zeros(result.type)}")
        cond = self.names[op.operands[0]]
        for region, sense in zip(op.regions, ("", "~"), strict=False):
            mask = self.fresh("m")
            self.line(f"{mask} = {self.mask} & {sense}{cond}")
            self.line(f"if {mask}.any():")
            self.region(region, mask, results)
            self.line("    pass")

    def for_(self, op: Op) -> None:
        low, high, step, *first = (self.names[value] for value in op.operands)
        index, *carried = (self._name(arg) for arg in op.regions[0].args)
        for name, value in zip((index, *carried), (low, *first), strict=True):
            self.line(f"{name} = {value}")
        mask = self.fresh("m")
        self.line(f"{mask} = {self.mask} & ({index} < {high})")
        self.line(f"while {mask}.any():")
        self.region(op.regions[0], mask, carried)
        self.line(f"    {index} = merge({mask}, {index} + {step}, {index})")
        self.line(f"    {mask} = {mask} & ({index} < {high})")
        for result, name in zip(op.results, carried, strict=True):
            self.names[result] = name

    def while_(self, op: Op) -> None:
        carried = [self.fresh() for _ in op.operands]
        for name, value in zip(carried, op.operands, strict=True):
            self.line(f"{name} = {self.names[value]}")
        mask, go = self.fresh("m"), self.fresh("m")
        self.line(f"{mask} = {self.mask}")
        self.line("while True:")
        for region, results in zip(op.regions, ([go, *carried], carried), strict=True):
            self.names.update(zip(region.args, carried, strict=True))
            if results[0] == go:
                self.line(f"    {go} = {mask} & False")
            self.region(region, mask, results)
            if results[0] == go:
                self.line(f"    {mask} = {mask} & {go}")
                self.line(f"    if not {mask}.any():")
                self.line("        break")
        for result, name in zip(op.results, carried, strict=True):
            self.names[result] = name

    # -- ops ------------------------------------------------------------------------------------------------------------

    def const(self, op: Op) -> None:
        self.let(op, f"full({self.kernel.threads}, '{dtype_of(op.result.type)}', {_literal(op.attrs['value'])})")

    def size_(self, op: Op) -> None:
        size = op.attrs["value"]
        assert isinstance(size, Size | int | str)
        self.let(op, f"full({self.kernel.threads}, 'i64', {self.size(Size.of(size))})")

    def position(self, op: Op) -> None:
        source = "block" if op.opcode == "program_id" else "grid"
        self.let(op, f"full({self.kernel.threads}, 'i64', {source}[{op.attrs['axis']}])")

    def lane(self, op: Op) -> None:
        self.let(op, f"{op.opcode}({self.kernel.threads}, {self.target.warp_size})")

    def lane_mask(self, op: Op) -> None:
        self.let(op, f"lane_mask({self.kernel.threads}, {self.target.warp_size}, '{op.attrs['relation']}')")

    def alloc(self, op: Op) -> None:
        memory = op.result.type
        assert isinstance(memory, Tensor)
        count, dtype = element_count(memory), memory.dtype
        if memory.space == "constant":
            self.let(op, f"constant_memory({list(op.attrs['values'])!r}, '{dtype}')")  # type: ignore[arg-type]
        else:
            self.let(op, f"{memory.space}_memory({count}, '{dtype}', {self.kernel.threads})")

    def load(self, op: Op) -> None:
        indices, rest = self._access(op)
        mask = f"also({self.mask}, {self.names[rest[0]]})" if op.attrs.get("masked") else self.mask
        width = op.result.type.width if isinstance(op.result.type, Vec) else 0
        self.let(op, f"load({self.names[op.operands[0]]}, {indices}, {mask}, {width})")

    def store(self, op: Op) -> None:
        indices, rest = self._access(op)
        mask = f"also({self.mask}, {self.names[rest[1]]})" if op.attrs.get("masked") else self.mask
        self.line(f"store({self.names[op.operands[0]]}, {indices}, {self.names[rest[0]]}, {mask})")

    def atomic(self, op: Op) -> None:
        indices, rest = self._access(op)
        self.let(op, f"atomic('{op.attrs['kind']}', {self.names[op.operands[0]]}, {indices}, {self.mask}, {self.of(rest)})")

    def _access(self, op: Op) -> tuple[str, tuple[Value, ...]]:
        """The places of an access, and its operands after the indices."""
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        end = 1 + memory.type.rank
        return self.offset(memory, op.operands[1:end]), op.operands[end:]

    def select(self, op: Op) -> None:
        self.let(op, f"select({self.of(op.operands)})")

    def broadcast(self, op: Op) -> None:
        assert isinstance(op.result.type, Vec) and isinstance(op.operands[0].type, Scalar)
        self.let(op, f"broadcast({self.of(op.operands)}, {op.result.type.width})")

    def extract(self, op: Op) -> None:
        self.let(op, f"{self.of(op.operands)}[:, {op.attrs['lane']}]")

    def pack(self, op: Op) -> None:
        self.let(op, f"pack({self.of(op.operands)})")

    def split(self, op: Op) -> None:
        self.let(op, f"split({self.of(op.operands)})")

    def every(self, op: Op) -> None:
        self.let(op, f"{self.of(op.operands)}.all(axis=1)")

    def shuffle(self, op: Op) -> None:
        width = op.attrs.get("width", self.target.warp_size)
        self.let(op, f"shuffle({self.of(op.operands[:2])}, '{op.attrs['mode']}', {width}, {self.target.warp_size})")

    def vote(self, op: Op) -> None:
        taking = f"{self.mask}, {self.names[op.operands[1]]}" if len(op.operands) > 1 else self.mask
        self.let(op, f"vote({self.names[op.operands[0]]}, '{op.attrs['mode']}', {self.target.warp_size}, {taking})")

    def bits(self, op: Op) -> None:
        self.let(op, f"{op.opcode}({self.of(op.operands)})")


HANDLERS: dict[str, Callable[[KernelWriter, Op], None]] = {
    "const": KernelWriter.const, "size": KernelWriter.size_, "if": KernelWriter.if_, "for": KernelWriter.for_, "while": KernelWriter.while_,
    "program_id": KernelWriter.position, "grid_size": KernelWriter.position, "thread_id": KernelWriter.lane, "lane_id": KernelWriter.lane,
    "warp_id": KernelWriter.lane, "lane_mask": KernelWriter.lane_mask, "alloc": KernelWriter.alloc, "load": KernelWriter.load,
    "store": KernelWriter.store, "atomic": KernelWriter.atomic, "atomic_load": KernelWriter.load, "atomic_store": KernelWriter.store,
    "select": KernelWriter.select, "broadcast": KernelWriter.broadcast, "extract": KernelWriter.extract, "pack": KernelWriter.pack,
    "split": KernelWriter.split, "every": KernelWriter.every, "shuffle": KernelWriter.shuffle, "vote": KernelWriter.vote,
    "popcount": KernelWriter.bits, "ctz": KernelWriter.bits, "clz": KernelWriter.bits,
}  # fmt: skip


def _literal(value: object) -> str:
    return f"float('{value}')" if isinstance(value, float) else repr(value)


def write(program: Program, target: Target) -> ProgramText:
    """The functions of all kernels."""
    parts = ["\n".join(KernelWriter(call.kernel, entry_name(program, position), target).lines) for position, call in enumerate(program.calls)]
    return ProgramText("\n\n".join(parts) + "\n", (0,) * len(parts))


KNOWN = frozenset({*HANDLERS, *_ARITHMETIC, *_NOTHING, "yield"})
assert OPS.keys() >= KNOWN
BACKEND = Backend("toy", "toy", write, lambda text, target: text.encode(), targets=(TOY,), ops=KNOWN)
register_backend(BACKEND)
