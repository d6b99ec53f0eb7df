"""Every block of a short product computes the rows it multiplies with. `Program -> Program`, at the thread stage.

In: a program of kernels, and the sizes of the call. Out: the same, where a kernel that makes few rows, a norm for instance, is no launch of its own: every block of the product that reads them first
(`family=gemv`) computes all of them and keeps them in shared memory. What others need of them, the first block writes. A row is some thousand numbers that lie in a cache by then; a launch less is
worth more. `row_prologues` does so at the loop stage for weights that are plain numbers; packed ones are read in an order of their own, and several norms in a row are too much for it.

    call @norm(x, h)  grid=[1]               call @product(x, w, y)  grid=[512]
    call @product(h, w, y)  grid=[512]  ->       %s = alloc shared; norm of x to %s; barrier; product of %s and w
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.artifact import FAILURE
from tilewright.base.sizes import product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_block, rewrite_block
from tilewright.ir.types import Tensor
from tilewright.passes.late.early_loads import loads_first
from tilewright.passes.launches.launch_together import APART, arrays_of

MOST_BLOCKS = 8
"""Blocks of the rows' kernel, each of which every block of the product does in turn."""
MOST_BYTES = 20 << 10
"""Of the rows in shared memory."""
MOST_WAVES = 3
"""Times that the product's blocks fill all multiprocessors, at most: each wave computes the rows again."""


def block_prologues(program: Program, target: Target, sizes: Mapping[str, int]) -> Program:
    """The program with fewer launches."""
    if not target.simt or program.loops:
        return program
    number = 0
    while number < len(program.calls):
        made = _moved(program, number, target, sizes)
        if made is None:
            number += 1
        else:
            program = made
    return program


def _moved(program: Program, number: int, target: Target, sizes: Mapping[str, int]) -> Program | None:
    """The program with the rows of a call computed by the product that reads them first; None where they are not."""
    call = program.calls[number]
    touched, written = arrays_of(call)
    first = next((n for n in range(number + 1, len(program.calls)) if written & arrays_of(program.calls[n])[0]), None)
    if first is None or not _makes_rows(call, sizes):
        return None
    reader = program.calls[first]
    if not _is_short_product(reader.kernel, target, sizes) or reader.kernel.threads != call.kernel.threads:
        return None
    if any(arrays_of(between)[1] & touched for between in program.calls[number + 1 : first]) or written & arrays_of(reader)[1] or arrays_of(reader)[1] & touched:
        return None
    scratch = {a.name for a in program.scratch}
    later = {name for n in range(first + 1, len(program.calls)) for name in arrays_of(program.calls[n])[0]}
    kept = {name for name in written if name not in scratch or name in later}
    shapes = _staged(call, reader, written, sizes)
    if shapes is None:
        return None
    joined = _Prologue(call, reader, shapes, kept).call()
    calls = [joined if n == first else other for n, other in enumerate(program.calls) if n != number]
    used = {name for other in calls for name in other.args}
    return replace(program, calls=tuple(calls), scratch=tuple(a for a in program.scratch if a.name in used))


def _makes_rows(call: KernelCall, sizes: Mapping[str, int]) -> bool:
    """Whether a call has few blocks, whose threads hold whole rows, and does nothing that counts blocks or launches."""
    kernel = call.kernel
    blocks, said = product(kernel.grid), str(kernel.attrs.get("schedule", ""))
    if call.loops or len(kernel.grid) != 1 or kernel.attrs.get("cluster", 1) != 1 or "whole=True" not in said or "shifted" in said or ";" in said:
        return False
    if not blocks.names <= sizes.keys() or not 1 <= blocks.evaluate(sizes) <= MOST_BLOCKS or FAILURE in call.args:
        return False
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode == "store" and op.operands[0] in kernel.params}
    read = {op.operands[0] for op in walk(kernel.body) if op.opcode == "load"}
    plain = all(op.opcode in ("load", "store") or not any(v in kernel.params and isinstance(v.type, Tensor) for v in op.operands) for op in walk(kernel.body))
    return plain and not any(op.opcode in APART for op in walk(kernel.body)) and bool(written) and not written & read


def _is_short_product(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> bool:
    said, blocks = str(kernel.attrs.get("schedule", "")), product(kernel.grid)
    if not said or any("family=gemv" not in part for part in said.split(";")) or not blocks.names <= sizes.keys():
        return False
    resident = kernel.attrs.get("min_blocks", 1)
    assert isinstance(resident, int)
    return blocks.evaluate(sizes) <= MOST_WAVES * target.multiprocessors * max(1, resident)


def _staged(call: KernelCall, reader: KernelCall, written: set[str], sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]] | None:
    """Extents in shared memory of the arrays that the product reads, the last as long as the rows' schedule serves; None where it reads them by other means than loads, or they take too much."""
    most = re.search(r"reduce_tile=(\d+)", str(call.kernel.attrs.get("schedule", "")))
    found: dict[str, tuple[int, ...]] = {}
    total = 0
    for param, name in zip(reader.kernel.params, reader.args, strict=True):
        if name not in written or not isinstance(param.type, Tensor):
            continue
        own = next(p.type for p, n in zip(call.kernel.params, call.args, strict=True) if n == name)
        assert isinstance(own, Tensor)
        uses = [op for op in walk(reader.kernel.body) if param in op.operands]
        known = all(size.names <= sizes.keys() for type_ in (own, param.type) for size in (*type_.shape, *type_.strides))
        if most is None or not known or any(op.opcode != "load" for op in uses):
            return None
        shape, strides = ([size.evaluate(sizes) for size in values] for values in (own.shape, own.strides))
        if [s.evaluate(sizes) for s in param.type.shape] != shape or [s.evaluate(sizes) for s in param.type.strides] != strides or not shape or shape[-1] > int(most[1]) or own.dtype is not param.type.dtype:
            return None
        found[name] = (*shape[:-1], int(most[1]))
        count = own.dtype.itemsize
        for extent in found[name]:
            count *= extent
        total += count
    return found if found and total <= MOST_BYTES else None


class _Prologue:
    """A product with the rows of another kernel ahead of its own code."""

    def __init__(self, rows: KernelCall, reader: KernelCall, shapes: Mapping[str, tuple[int, ...]], kept: set[str]) -> None:
        self.rows, self.reader, self.kept = rows, reader, kept
        self.params: dict[tuple[str, str], Value] = {}
        self.b = Builder(reader.kernel.span)
        dtypes = {name: param.type.dtype for param, name in zip(rows.kernel.params, rows.args, strict=True) if isinstance(param.type, Tensor)}
        self.staged = {name: self.b.op("alloc", dtype=dtypes[name], shape=shape, space="shared", align=16, common=True) for name, shape in shapes.items()}

    def call(self) -> KernelCall:
        b, kernel = self.b, self.reader.kernel
        own = self.own_body()
        early = any(k.attrs.get("dependent") for k in (kernel, self.rows.kernel))
        waits: tuple[Op, ...] = ()
        if early:
            start = Builder(kernel.span)
            start.multi("release_next")
            start.multi("wait_previous")
            waits = tuple(start.ops)
        block = b.op("program_id", axis=0, name="block")
        self.is_first = b.op("eq", block, b.index(0))
        written = {op.operands[0] for op in walk(own) if op.operands and OPS[op.opcode].effect == "write"}
        ops = self.ahead_of([op for op in own.ops if op.opcode not in ("release_next", "wait_previous")], {block}, written)
        attrs = MappingProxyType({**kernel.attrs, **({"dependent": True} if early else {})})
        facts = MappingProxyType({**self.rows.kernel.facts, **kernel.facts})
        made = replace(kernel, params=tuple(self.params.values()), body=Block((), (*waits, *b.ops, *ops)), attrs=attrs, facts=facts)
        return KernelCall(made, tuple(name for name, _ in self.params))

    def ahead_of(self, ops: Sequence[Op], blocks: set[Value], written: set[Value]) -> list[Op]:
        """The rows' code ahead of a product's, with what both read first of all: weights are on their way while rows are computed. Of kernels that are launched together, ahead of each."""
        blocks = blocks | {op.result for op in ops if op.opcode == "program_id"}
        *head, last = ops
        made = {r: op for op in head for r in op.results}
        test = made.get(last.operands[0]) if last.opcode == "if" else None
        plain = all(OPS[op.opcode].effect == "pure" or op.opcode == "alloc" for op in head)
        if test is not None and plain and test.opcode == "lt" and test.operands[0] in blocks and not last.results:
            regions = tuple(Block(r.args, (*self.ahead_of(r.ops[:-1], blocks, written), r.ops[-1])) for r in last.regions)
            return [*head, replace(last, regions=regions)]
        first = Builder(self.reader.kernel.span)
        memory, body = self.rows_body()
        self.b.ops += memory
        grid = product(self.rows.kernel.grid)
        if grid.constant == 1:
            first.ops += self.placed(body, first.index(0)).ops
        else:

            def each(inner: Builder, index: Value) -> Sequence[Value]:
                inner.ops += self.placed(body, index).ops
                inner.multi("barrier")
                return []

            first.for_(first.index(0), first.index(grid), first.index(1), [], each)
        first.multi("barrier")
        stored = {op.operands[0] for op in walk(body) if op.opcode == "store"}
        read_only = {p for p in self.params.values() if isinstance(p.type, Tensor)} - written - stored
        return list(loads_first((*first.ops, *ops), read_only))

    def own_body(self) -> Block:
        """The product's code, which reads rows from shared memory."""
        mapping: dict[Value, Value] = {}
        for param, name in zip(self.reader.kernel.params, self.reader.args, strict=True):
            mapping[param] = self.staged[name] if name in self.staged else self.params.setdefault((name, str(param.type)), Value(param.type, param.name))
        return clone_block(self.reader.kernel.body, mapping)

    def rows_body(self) -> tuple[list[Op], Block]:
        """The rows' memory and code, which writes to shared memory, and for others to where it did."""
        mapping: dict[Value, Value] = {}
        stored: dict[Value, str] = {}
        for param, name in zip(self.rows.kernel.params, self.rows.args, strict=True):
            own = self.params.setdefault((name, str(param.type)), Value(param.type, param.name)) if name in self.kept or name not in self.staged else Value(param.type, param.name)
            mapping[param] = own
            stored[own] = name
        memory: list[Op] = []

        def place(b: Builder, op: Op) -> Sequence[Value] | None:
            if op.opcode in ("wait_previous", "release_next"):
                return []
            if op.opcode == "alloc":
                memory.append(replace(op, attrs=MappingProxyType({**op.attrs, "common": True})))
                return op.results
            if op.opcode == "store" and op.operands[0] in stored:
                self.store(b, op, stored[op.operands[0]])
                return []
            return None

        return memory, rewrite_block(clone_block(self.rows.kernel.body, mapping), place, {})

    def store(self, b: Builder, op: Op, name: str) -> None:
        if name in self.staged:
            b.append(replace(op, operands=(self.staged[name], *op.operands[1:])))
        if name in self.kept:

            def write(inner: Builder) -> Sequence[Value]:
                inner.append(op)
                return []

            b.if_(self.is_first, write, lambda _: [])

    def placed(self, body: Block, index: Value) -> Block:
        return rewrite_block(body, lambda _, op: [index] if op.opcode == "program_id" else None, {})
