"""Tile stage -> thread stage for products with few rows: every lane adds up its own terms of a row, and lanes meet once, at the end.

In: a tile-stage kernel of `lower_gemv`, with tiles along the sum carried through its loop and folded behind it by `reduce_tile`. Out: a
thread-stage kernel. `lower_tiles` would carry the tile as it is, a register for each element. Here a sum that is only added to, and then
folded, is held as what each thread's elements come to: one number for each row. Loads of a step come first, so that all of them are on their
way together, and edges are predicates, not branches.

    %s = for … (%acc: tile<f32, [4, 512]>) { %w = load …; %x = load …; yield fma %w, %x, %acc }; %r = reduce_tile %s {add}
    -> four f32 are carried; each step is a chain of `fma` for each row; %r is five shuffles for each row

`dot_pairs` becomes matrix instructions, whose 16 rows are two registers of 8 lanes, and whose sums go over 4 lanes. What a lane holds of a row is to be added
up by itself, so b's 8 columns keep lanes apart. Where 8 lanes have different rows, column 2 t is the factor of lanes 4 g + t, and zero in the places of all other t; column 2 t + 1
is that of another row of x. Where all 32 lanes walk the same row, column g is the factor of lanes 4 g … 4 g + 3, and the sum of those four is what lies on the
diagonal; all else counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import f32, u32
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, Tile, Vec, dtype_of
from tilewright.passes.common.registers import Cell, Held, Registers, Shape, shape_of
from tilewright.passes.to_thread.lower_tiles import TileLowering


def lower_row_dots(kernel: Kernel, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return RowDotLowering(kernel, target).run()


class RowDotLowering(TileLowering):
    """`lower_tiles`, with sums held as one number for each row."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        self.sums = thread_sums(kernel)
        """Tiles of which a thread holds what its elements come to."""
        self.has_pairs = any(op.opcode == "dot_pairs" for op in walk(kernel.body))

    def coordinates(self, b: Builder) -> None:
        super().coordinates(b)
        if self.has_pairs:
            group, twice = b.op("shr", self.lane, b.index(2)), b.mul(b.op("and", self.lane, b.index(3)), b.index(2))
            self.even, self.odd = b.op("eq", group, twice), b.op("eq", group, b.add(twice, b.index(1)))
            """Lanes whose column is the first or the second of the two that they get results of."""

    def summed_shape(self, shape: Shape) -> Shape:
        return tuple(1 if a == self.axis else e for a, e in enumerate(shape))

    # -- sums ---------------------------------------------------------------------------------------------------

    def lower_op(self, b: Builder, op: Op) -> None:
        if op.opcode in ("pair_bytes", "dot_pairs"):
            shape = shape_of(op.result)
            operands = [self.registers(b, self.env[v], shape) for v in op.operands]
            cells = self._paired(b, op, operands[0]) if op.opcode == "pair_bytes" else self._dots(b, op, operands)
            self.env[op.result] = Registers(shape, cells)
            return
        if not any(r in self.sums for r in op.results) or op.opcode in ("for", "if", "broadcast"):
            super().lower_op(b, op)
            return
        total = next(v for v in op.operands if v in self.sums)
        held = self._sum(b, total, self.env[total])
        assert op.opcode in ("add", "fma")
        shape = shape_of(op.result)
        terms = [self.registers(b, self.env[v], shape) for v in op.operands if v is not total]
        cells = dict(held.cells)
        for cell in sorted(self.cells(shape), key=lambda c: (c[self.axis], c)):
            own = self.collapsed(cell, held.shape)
            parts = [self._elements(b, t.cells[cell]) for t in terms]
            for numbers in zip(*parts, strict=True):
                cells[own] = b.op("add", cells[own], numbers[0]) if op.opcode == "add" else b.fma(numbers[0], numbers[1], cells[own])
        self.env[op.result] = Registers(held.shape, cells)

    # -- words of two floats ------------------------------------------------------------------------------------

    def _paired(self, b: Builder, op: Op, words: Registers) -> dict[Cell, Value]:
        high = b.const(int(op.attrs["high"]) * 0x01010101, u32)  # type: ignore[call-overload]
        selector = b.const(0x4342 if op.attrs.get("upper") else 0x4140, u32)
        found = {word: b.op("byte_perm", word, high, selector) for word in dict.fromkeys(words.cells.values())}
        return {cell: found[word] for cell, word in words.cells.items()}

    def _dots(self, b: Builder, op: Op, operands: Sequence[Registers]) -> dict[Cell, Value]:
        half = len(operands) // 2
        apart = op.attrs.get("spread", 1) == 1
        dots: dict[int, dict[tuple[tuple[Value, ...], tuple[Value, ...]], list[Cell]]] = {}
        for cell in self.cells(shape_of(op.result)):
            words = tuple(o.cells[cell] for o in operands)
            dots.setdefault(cell[-1], {}).setdefault((words[:half], words[half:]), []).append(cell)
        cells: dict[Cell, Value] = {}
        for wanted in dots.values():
            rows, columns = (list(dict.fromkeys(key[side] for key in wanted)) for side in (0, 1))
            for first in range(0, len(rows), 2):
                pair = rows[first : first + 2]
                for at in range(0, len(columns), 2 if apart else 1):
                    own = columns[at : at + 2] if apart else columns[at : at + 1]
                    if not any((row, column) in wanted for row in pair for column in own):
                        continue
                    results = self._multiplied(b, op, pair, own, apart)
                    for r, row in enumerate(pair):
                        for c, column in enumerate(own):
                            cells.update(dict.fromkeys(wanted.get((row, column), ()), results[r][c]))
        return cells

    def _multiplied(
        self, b: Builder, op: Op, rows: Sequence[tuple[Value, ...]], columns: Sequence[tuple[Value, ...]], apart: bool
    ) -> list[list[Value]]:
        """The sums of two rows (or one, twice) with one or two columns; with one column where lanes share a row."""
        zero, none = b.const(0.0, f32), b.const(0, u32)
        sums = [zero] * 4
        for k in range(0, len(rows[0]), 2):
            a = [rows[r % len(rows)][k + at] for at in (0, 1) for r in (0, 1)]
            factors = [columns[0][k], columns[0][k + 1]]
            if apart:
                others = [columns[1][k], columns[1][k + 1]] if len(columns) > 1 else [none, none]
                seconds = [b.select(self.odd, other, none) if other is not none else none for other in others]
                factors = [b.select(self.even, one, other) for one, other in zip(factors, seconds, strict=True)]
            sums = list(b.emit("mma", [*a, *factors, *sums], {"dtype": op.attrs["dtype"]}))
        if apart:
            return [sums[:2], sums[2:]]
        return [[b.select(self.even, sums[r], b.select(self.odd, sums[r + 1], zero))] for r in (0, 2)]

    def _sum(self, b: Builder, value: Value, held: Held) -> Registers:
        """A sum as a thread has it. Zeros, from which sums begin, may have other uses: they are tiles like others until here."""
        shape = self.summed_shape(shape_of(value))
        assert isinstance(held, Registers)
        if held.shape == shape:
            return held
        zero = b.const(0, dtype_of(value.type))
        return Registers(shape, dict.fromkeys(self.cells(shape), zero))

    def _elements(self, b: Builder, value: Value) -> list[Value]:
        return [b.op("extract", value, lane=lane) for lane in range(value.type.width)] if isinstance(value.type, Vec) else [value]

    def reduce_tile(self, b: Builder, op: Op) -> None:
        if op.operands[0] not in self.sums:
            super().reduce_tile(b, op)
            return
        held = self._sum(b, op.operands[0], self.env[op.operands[0]])
        self.env[op.result] = self.reductions.of_sums(b, op, held, in_loop=self.depth > 0)

    def flat(self, b: Builder, values: Sequence[Value], helds: Sequence[Held]) -> list[Value]:
        flat: list[Value] = []
        for value, held in zip(values, helds, strict=True):
            if value in self.sums:
                flat += self._sum(b, value, held).cells.values()
            else:
                flat += super().flat(b, [value], [held])
        return flat

    def bind(self, values: Sequence[Value], flat: Sequence[Value]) -> None:
        remaining = list(flat)
        for value in values:
            if value in self.sums:
                shape = self.summed_shape(shape_of(value))
                cells = self.cells(shape)
                self.env[value] = Registers(shape, dict(zip(cells, remaining[: len(cells)], strict=True)))
            else:
                cells = self.cells(value.type.shape) if isinstance(value.type, Tile) else [()]
                super().bind([value], remaining[: len(cells)])
            del remaining[: len(cells)]

    # -- loads --------------------------------------------------------------------------------------------------

    def ops(self, b: Builder, ops: Sequence[Op]) -> tuple[Held, ...]:
        return super().ops(b, loads_first(ops) if any(r in self.sums for op in ops for r in op.results) else ops)

    def guarded_load(self, b: Builder, memory: Value, indices: Sequence[Value], width: int, cond: Value) -> Value:
        assert isinstance(memory.type, Tensor)
        if memory.type.space != "global":
            return super().guarded_load(b, memory, indices, width, cond)
        if width == 1:
            return b.op("load", memory, *indices, cond, masked=True)
        return b.op("load", memory, *indices, cond, width=width, masked=True)


def loads_first(ops: Sequence[Op]) -> list[Op]:
    """The ops with loads, and what these need, before all else. Where something is written the order stays."""
    if any(inner.opcode in ("store", "accumulate", "atomic", "barrier") for op in ops for inner in (op, *(i for r in op.regions for i in walk(r)))):
        return list(ops)
    made = {result: op for op in ops for result in op.results}
    early: set[int] = set()
    waiting = [op for op in ops if op.opcode == "load"]
    while waiting:
        op = waiting.pop()
        if id(op) not in early:
            early.add(id(op))
            inside = [v for region in op.regions for inner in walk(region) for v in inner.operands]
            waiting += [made[v] for v in (*op.operands, *inside) if v in made]
    return [*(op for op in ops if id(op) in early), *(op for op in ops if id(op) not in early)]


def thread_sums(kernel: Kernel) -> set[Value]:
    """Tiles that are sums on their way: they begin as zeros, are added to, pass through loops and conditions, and end in one `reduce_tile`
    along the last axis. Nobody else looks at them."""
    made: dict[Value, Op] = {}
    carried: dict[Value, tuple[Op, int]] = {}
    users: dict[Value, list[Op]] = {}
    for op in walk(kernel.body):
        made.update(dict.fromkeys(op.results, op))
        for operand in op.operands:
            users.setdefault(operand, []).append(op)
        if op.opcode == "for":
            carried.update((arg, (op, position)) for position, arg in enumerate(op.regions[0].args[1:]))
    found: set[Value] = set()
    for op in walk(kernel.body):
        if op.opcode == "reduce_tile" and op.attrs["kind"] == "add" and len(op.operands) == 1 and op.attrs["axis"] == len(shape_of(op.operands[0])) - 1:
            chain = _chain(op.operands[0], made, carried)
            if chain is not None and _is_private(chain, made, users, op):
                found |= chain
    return found


def _chain(last: Value, made: dict[Value, Op], carried: dict[Value, tuple[Op, int]]) -> set[Value] | None:
    chain: set[Value] = set()
    waiting = [last]
    while waiting:
        value = waiting.pop()
        if value in chain:
            continue
        chain.add(value)
        if value in carried:
            loop, position = carried[value]
            waiting += [loop.operands[3 + position], loop.regions[0].yields[position], loop.results[position]]
            continue
        op = made.get(value)
        if op is None:
            return None
        match op.opcode:
            case "for":
                position = op.results.index(value)
                waiting += [op.operands[3 + position], op.regions[0].yields[position], op.regions[0].args[1 + position]]
            case "if":
                waiting += [region.yields[op.results.index(value)] for region in op.regions]
            case "fma":
                waiting.append(op.operands[2])
            case "add":
                before = [v for v in op.operands if _is_sum(v, made, carried)]
                if len(before) != 1 or op.operands[0] is op.operands[1]:
                    return None
                waiting.append(before[0])
            case "broadcast" if _is_zero(op.operands[0], made):
                pass
            case _:
                return None
    return chain


def _is_sum(value: Value, made: dict[Value, Op], carried: dict[Value, tuple[Op, int]]) -> bool:
    """Whether a value may be the sum so far, and not a term: what a loop carries or leaves behind."""
    op = made.get(value)
    return value in carried or (op is not None and op.opcode in ("for", "if", "fma", "add") and bool(shape_of(value)) and (
        op.opcode in ("for", "if") or any(_is_sum(v, made, carried) for v in op.operands)
    ))


def _is_zero(value: Value, made: dict[Value, Op]) -> bool:
    op = made.get(value)
    return op is not None and op.opcode == "const" and op.attrs["value"] == 0 and dtype_of(value.type) is not None


def _is_private(chain: set[Value], made: dict[Value, Op], users: dict[Value, list[Op]], end: Op) -> bool:
    for value in chain:
        if value in made and made[value].opcode == "broadcast":
            continue
        for user in users.get(value, []):
            if user is end or user.opcode in ("yield", "for", "if"):
                continue
            if user.opcode not in ("add", "fma") or user.result not in chain or (user.opcode == "fma" and value in user.operands[:2]):
                return False
    return True


