"""The nodes of the kernel IR: values, ops, blocks and kernels. One page; what each op means is in `ops.py`.

Everything is immutable. A `Value` is defined once (by a kernel parameter, a block argument or an op) and compared by
identity. Control flow is structured: an op may own regions (`Block`s), whose last op is a `yield`. A `Kernel` is at one of
three stages:

    loop     what to compute: loop nests over tensors; `parallel`, `reduce`, `for`, `if`
    tile     what one block of the grid computes, over tiles of static shape; threads are not visible
    thread   what one thread executes; barriers, shuffles and shared memory are explicit
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from enum import Enum
from types import MappingProxyType

from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.source import NOWHERE, Span
from tilewright.ir.types import Scalar, Tensor, Type


class Stage(Enum):
    LOOP = "loop"
    TILE = "tile"
    THREAD = "thread"

    def __str__(self) -> str:
        return self.value


Attr = int | float | str | bool | DType | Size | tuple["Attr", ...]
Attrs = Mapping[str, Attr]
NO_ATTRS: Attrs = MappingProxyType({})
_set = object.__setattr__


@record(identity=True, slots=True)
class Value:
    """Something computed once. `name` is a hint for printing; identity is what counts."""

    type: Type
    name: str = ""

    def __init__(self, type: Type, name: str = "") -> None:
        _set(self, "type", type)
        _set(self, "name", name)

    def __repr__(self) -> str:
        return f"%{self.name or '?'}: {self.type}"


@record(identity=True, slots=True)
class Op:
    """One operation: `results = opcode operands {attrs} regions`."""

    opcode: str
    operands: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    attrs: Attrs = field(default_factory=lambda: NO_ATTRS)
    regions: tuple[Block, ...] = ()
    span: Span = NOWHERE

    def __init__(
        self, opcode: str, operands: tuple[Value, ...] = (), results: tuple[Value, ...] = (), attrs: Attrs = NO_ATTRS, regions: tuple[Block, ...] = (),
        span: Span = NOWHERE,
    ) -> None:  # fmt: skip
        _set(self, "opcode", opcode)
        _set(self, "operands", operands)
        _set(self, "results", results)
        _set(self, "attrs", attrs)
        _set(self, "regions", regions)
        _set(self, "span", span)

    @property
    def result(self) -> Value:
        (only,) = self.results
        return only

    def with_operands(self, *operands: Value) -> Op:
        return replace(self, operands=operands)


@record(identity=True, slots=True)
class Block:
    """A region: arguments, then ops in order. The last op is `yield` (except in a kernel's body)."""

    args: tuple[Value, ...] = ()
    ops: tuple[Op, ...] = ()

    def __init__(self, args: tuple[Value, ...] = (), ops: tuple[Op, ...] = ()) -> None:
        _set(self, "args", args)
        _set(self, "ops", ops)

    @property
    def yields(self) -> tuple[Value, ...]:
        """What the block's `yield` hands out."""
        if self.ops and self.ops[-1].opcode == "yield":
            return self.ops[-1].operands
        return ()


@record(identity=True)
class Kernel:
    """One kernel at one stage.

    `params` are tensors and scalars in call order; tensors that are written are outputs or scratch. `grid` is the number of
    blocks along x, y, z (tile and thread stages), `threads` the threads in a block (thread stage). `facts` are known
    divisors of size names, true for every call of this specialisation.
    """

    name: str
    stage: Stage
    params: tuple[Value, ...]
    body: Block
    grid: tuple[Size, ...] = ()
    threads: int = 1
    facts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    attrs: Attrs = field(default_factory=lambda: NO_ATTRS)
    span: Span = NOWHERE

    @property
    def tensors(self) -> tuple[Value, ...]:
        return tuple(p for p in self.params if isinstance(p.type, Tensor))

    @property
    def scalars(self) -> tuple[Value, ...]:
        return tuple(p for p in self.params if isinstance(p.type, Scalar))

    @functools.cached_property
    def opcodes(self) -> frozenset[str]:
        """The opcodes of all ops of the body; `@name` stands for an attribute that some op has."""
        found: set[str] = set()
        for op in walk(self.body):
            found.add(op.opcode)
            found.update(f"@{name}" for name in op.attrs)
        return frozenset(found)

    @functools.cached_property
    def size_names(self) -> tuple[str, ...]:
        """Every size and stride name the kernel needs at launch, sorted: its hidden integer parameters."""
        names: set[str] = set()
        for param in self.params:
            if isinstance(param.type, Tensor):
                for size in (*param.type.shape, *param.type.strides):
                    names |= size.names
        for op in walk(self.body):
            for attr in op.attrs.values():
                if isinstance(attr, Size):
                    names |= attr.names
        for size in self.grid:
            names |= size.names
        return tuple(sorted(names))


def walk(block: Block) -> Iterator[Op]:
    """Every op of a block, outer before inner, in order."""
    # A stack of its own: generators inside generators would pass every op through all of them.
    left = [iter(block.ops)]
    while left:
        for op in left[-1]:
            yield op
            if op.regions:
                left += [iter(region.ops) for region in reversed(op.regions)]
                break
        else:
            left.pop()


def blocks(block: Block) -> Iterator[Block]:
    """The block and every block inside it."""
    yield block
    for op in block.ops:
        for region in op.regions:
            yield from blocks(region)


def watched_axes(op: Op) -> tuple[int, ...]:
    """The axes of an access whose index is checked when the kernel runs."""
    axes = op.attrs.get("watch", ())
    assert isinstance(axes, tuple)
    return tuple(axis for axis in axes if isinstance(axis, int))


def is_watched(kernel: Kernel) -> bool:
    """Whether some access of the kernel is checked when it runs."""
    return bool(kernel.opcodes & {"@watch", "within"})
