"""Loops over packed rows become loops over blocks and places in them. In and out: a kernel at the loop stage.

Where the body of a `reduce` or `parallel` takes a loop's index apart by `floordiv` and `mod` with constants, as `unpack_blocks` writes it, and the
loop has whole blocks, the index becomes several: the block, and the digits of the place in it. All indices are then sums of loop indices, scales
are those of the outer loops, and along the innermost loop bytes follow each other.

    reduce 256*n (%k) {                          reduce n, 4, 2, 32 (%b, %c, %h, %t) {
      %b = floordiv %k, 256                        load %w, %i, %b, 16 + 32*%c + %t
      %e = mod %k, 256                    ->       load %x, 256*%b + 64*%c + 32*%h + %t
      … floordiv %e, 64, mod %e, 64 …              …

The kernel is marked `blocks`, which says that vectors of sums are carried through the outer loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.sizes import Size, floordiv
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import INDEX

Chain = list[tuple[Value, int]]
"""An index and what it is divided by; then the remainder, and so on."""


def split_blocks(kernel: Kernel) -> Kernel:
    """The kernel with loops over blocks; the very same one where no loop walks any."""
    made = {result: op for op in walk(kernel.body) for result in op.results}
    if not any(op.opcode == "mod" and _constant(op.operands[1], made) for op in walk(kernel.body)):
        return kernel
    splitting = _Splitting(made, dict(kernel.facts))
    body = splitting.block(kernel.body, {})
    if not splitting.changed:
        return kernel
    return replace(kernel, body=body, attrs=MappingProxyType({**kernel.attrs, "blocks": True}))


def _constant(value: Value, made: Mapping[Value, Op]) -> int:
    """The positive constant that a value is, or 0."""
    op = made.get(value)
    number = op.attrs["value"] if op is not None and op.opcode == "const" else 0
    return number if isinstance(number, int) and number > 0 else 0


class _Splitting:
    def __init__(self, made: Mapping[Value, Op], facts: Mapping[str, int]) -> None:
        self.made, self.facts = made, facts
        self.changed = False

    def block(self, block: Block, values: dict[Value, Value]) -> Block:
        b = Builder()
        for op in block.ops:
            self.op(b, op, values)
        return Block(block.args, tuple(b.ops))

    def op(self, b: Builder, op: Op, values: dict[Value, Value]) -> None:
        if op.results and all(result in values for result in op.results):
            return  # a digit, which is an index now
        operands = tuple(values.get(v, v) for v in op.operands)
        if op.opcode in ("reduce", "parallel"):
            chains = [self.chain(op.regions[0], arg, extent) for arg, extent in zip(op.regions[0].args, op.operands, strict=True)]
            if any(chains):
                b.span = op.span
                b.append(self.split(b, replace(op, operands=operands), chains, values))
                return
        b.append(replace(op, operands=operands, regions=tuple(self.block(region, values) for region in op.regions)))

    def chain(self, region: Block, index: Value, extent: Value) -> Chain:
        """How the body takes an index apart; empty where it does not, or where the loop has no whole blocks."""
        found: Chain = []
        value = index
        while True:
            parts = [op for op in walk(region) if op.opcode in ("floordiv", "mod") and op.operands[0] is value]
            divisors = {_constant(op.operands[1], self.made) for op in parts}
            rests = [op for op in parts if op.opcode == "mod"]
            if len(divisors) != 1 or not rests or 0 in divisors:
                break
            (divisor,) = divisors
            if found and found[-1][1] % divisor:
                break
            found.append((value, divisor))
            if len(rests) != 1:
                break  # written twice: simplify has not seen it
            value = rests[0].results[0]
        if not found:
            return found
        size = self.size(extent)
        return found if size is not None and size.divisible_by(found[0][1], self.facts) else []

    def size(self, value: Value) -> Size | None:
        op = self.made.get(value)
        if op is None:
            return None
        if op.opcode == "size":
            found = op.attrs["value"]
            return found if isinstance(found, Size) else None
        number = op.attrs["value"] if op.opcode == "const" else None
        return Size.of(number) if isinstance(number, int) else None

    def split(self, b: Builder, op: Op, chains: Sequence[Chain], values: dict[Value, Value]) -> Op:
        self.changed = True
        (region,) = op.regions
        args: list[Value] = []
        extents: list[Value] = []
        inner = Builder(op.span)
        for arg, extent, chain in zip(region.args, op.operands, chains, strict=True):
            if not chain:
                args.append(arg)
                extents.append(extent)
                continue
            size = self.size(extent)
            assert size is not None
            divisors = [divisor for _, divisor in chain]
            extents.append(b.index(floordiv(size, Size.of(divisors[0]))))
            extents += [b.index(above // below) for above, below in zip(divisors, (*divisors[1:], 1), strict=True)]
            digits = [Value(INDEX, f"{arg.name}.{number}") for number in range(len(divisors) + 1)]
            args += digits
            self.join(inner, region, chain, digits, values)
        inner_block = self.block(region, values)
        return replace(op, operands=tuple(extents), regions=(Block(tuple(args), (*inner.ops, *inner_block.ops)),))

    def join(self, b: Builder, region: Block, chain: Chain, digits: Sequence[Value], values: dict[Value, Value]) -> None:
        """What the index, its quotients and its remainders are now."""
        rest = digits[-1]
        for (value, divisor), digit in zip(reversed(chain), reversed(digits[:-1]), strict=True):
            for op in walk(region):
                if op.opcode in ("floordiv", "mod") and op.operands[0] is value:
                    values[op.results[0]] = digit if op.opcode == "floordiv" else rest
            rest = b.add(b.mul(digit, b.index(divisor)), rest)
            values[value] = rest
