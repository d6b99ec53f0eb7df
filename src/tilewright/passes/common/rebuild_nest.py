"""Parts of a kernel's nest, built again in another kernel: what stands around it, values and what they are made of, and the nest with another reduction in place of its own.

In: a loop-stage kernel of one nest, and a builder of the new one. Out: ops of the new kernel, and at last that kernel, with the arrays that it uses.

    parallel m, n { before; acc = reduce k { … }; after }  ->  parallel m, n { before; acc = another reduction; after }
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import DType
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.rewrite import clone_ops, eliminate_dead

Copies = dict[Value, Value]
"""Values of a kernel, and what they are in the new one."""


def copy_outside(b: Builder, kernel: Kernel) -> Copies:
    """What stands around the nest, copied."""
    copies: Copies = {}
    clone_ops(b, [op for op in kernel.body.ops if op.opcode != "parallel"], copies)
    return copies


def copy_nest(b: Builder, kernel: Kernel, parallel: Op, extents: Sequence[Size], reduction: Op, reduce: Callable[[Builder, Copies], Sequence[Value]]) -> None:
    """The kernel's nest, which is `parallel` over `extents`, with what `reduce` gives in place of `reduction`; and what stands around it."""
    region = parallel.regions[0]
    outside = copy_outside(b, kernel)

    def body(inner: Builder, *indices: Value) -> list[Value]:
        copies = outside | dict(zip(region.args, indices, strict=True))
        for op in region.ops[:-1]:
            if op is reduction:
                copies.update(zip(op.results, reduce(inner, copies), strict=True))
            else:
                clone_ops(inner, [op], copies)
        return []

    with b.at(parallel.span):
        b.parallel([b.index(extent) for extent in extents], body, [arg.name for arg in region.args])


class ValueCopier:
    """Copies values of a nest, with the ops that make them."""

    def __init__(self, region: Block) -> None:
        self.everything = list(walk(region))
        self.made = {result: op for op in self.everything for result in op.results}

    def makers(self, values: Sequence[Value], known: Container[Value]) -> list[Op]:
        """The ops that make these values from known ones, in order."""
        wanted: set[Value] = set()
        waiting = [v for v in values if v not in known]
        while waiting:
            value = waiting.pop()
            op = self.made.get(value)
            if value in wanted or op is None or value in known:
                continue
            wanted.update(op.results)
            waiting += [*op.operands, *(v for region in op.regions for inner in walk(region) for v in inner.operands)]
        return [op for op in self.everything if any(r in wanted for r in op.results)]

    def copy(self, b: Builder, values: Sequence[Value], copies: Copies) -> None:
        """Copy the ops that make these values."""
        chosen = self.makers(values, copies)
        nested = {id(inner) for op in chosen for region in op.regions for inner in walk(region)}
        clone_ops(b, [op for op in chosen if id(op) not in nested], copies)

    def where(self, b: Builder, guards: Sequence[Value], copies: Copies, terms: Callable[[Builder, Copies], list[Value]], dtype: DType) -> Sequence[Value]:
        """Terms where all guards hold, and zero elsewhere."""
        if not guards:
            return terms(b, copies)
        self.copy(b, guards, copies)
        inside = all_of(b, [copies[guard] for guard in guards])
        return b.if_(inside, lambda deep: terms(deep, dict(copies)), lambda deep: [deep.const(0, dtype)])


def all_of(b: Builder, conditions: Sequence[Value]) -> Value:
    """Whether all of them hold."""
    return functools.reduce(b.logical_and, conditions)


def finished(kernel: Kernel, name: str, b: Builder, arrays: Sequence[Value], attrs: Mapping[str, Attr] | None = None) -> Kernel:
    """What was built, with those of the kernel's and the new arrays that it uses."""
    body = Block((), tuple(b.ops))
    whole = eliminate_dead(Kernel(name, Stage.LOOP, (), body, facts=kernel.facts, attrs=MappingProxyType({**kernel.attrs, **(attrs or {})}), span=kernel.span))
    used = {v for op in walk(whole.body) for v in op.operands}
    return replace(whole, params=tuple(p for p in (*kernel.params, *arrays) if p in used))
