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

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import f32, i32, u32
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, Tile, Vec, dtype_of
from tilewright.passes.common.registers import Cell, Held, RegisterIndex, Registers, Shape, shape_of
from tilewright.passes.to_thread.lower_tiles import TileLowering
from tilewright.passes.to_thread.staged_rows import StagedRows, copied_tensors


class RowDotLowering(TileLowering):
    """`lower_tiles`, with sums held as one number for each row."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        self.sums = thread_sums(kernel)
        """Tiles of which a thread holds what its elements come to."""
        self.own: set[int] = set()
        """Loads that only lanes make whose columns they are for."""
        self.staged: StagedRows | None = None
        """Where the loop at hand has copied its rows to."""
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        dots = [op for op in walk(kernel.body) if op.opcode == "dot_pairs"]
        self.has_pairs, self.apart = bool(dots), bool(dots) and all(op.attrs.get("spread", 1) == 1 for op in dots)

    def coordinates(self, b: Builder) -> None:
        super().coordinates(b)
        if self.has_pairs:
            group, twice = b.op("shr", self.lane, b.index(2)), b.mul(b.op("and", self.lane, b.index(3)), b.index(2))
            self.even, self.odd = b.op("eq", group, twice), b.op("eq", group, b.add(twice, b.index(1)))
            """Lanes whose column is the first or the second of the two that they get results of."""
            self.either = b.op("or", self.even, self.odd)
            lane = b.cast(self.lane, u32)
            other = b.op("shuffle", lane, b.const(1, i32), mode="xor")
            zero = b.op("xor", b.op("xor", lane, other), b.const(1, u32))
            self.kept = {value: b.add(b.const(value, u32), zero) for value in sorted(self._kept_words())}
            """Constants in registers: the assembler copies those that it knows all threads share each time they are used. It cannot know that the number of the
            lane and that of its neighbour differ in one bit."""

    def _kept_words(self) -> set[int]:
        return {_high(op) for op in walk(self.kernel.body) if op.opcode == "pair_bytes" and _high(op)} | {
            value for op in walk(self.kernel.body) if op.opcode == "add_pairs" for v in op.operands if (value := self._word(v)) is not None
        }

    def _word(self, value: Value) -> int | None:
        """The constant that a word is, in all elements."""
        op = self.made.get(value)
        if op is not None and op.opcode == "broadcast":
            op = self.made.get(op.operands[0])
        return op.attrs["value"] if op is not None and op.opcode == "const" and isinstance(op.attrs["value"], int) else None

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
        if op.opcode == "add_pairs" and self.has_pairs and shape_of(op.result):
            shape = shape_of(op.result)
            words = [self._word(v) for v in op.operands]
            first, second = (
                dict.fromkeys(self.cells(shape), self.kept[word]) if word is not None else self.registers(b, self.env[v], shape).cells
                for word, v in zip(words, op.operands, strict=True)
            )
            self.env[op.result] = Registers(shape, {c: b.op("add_pairs", first[c], second[c], dtype=op.attrs["dtype"]) for c in self.cells(shape)})
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
        high = self.kept.get(_high(op)) or b.const(_high(op), u32)
        selector = b.const(0x4342 if op.attrs.get("upper") else 0x4140, u32)
        found = {word: b.op("byte_perm", word, high, selector) for word in dict.fromkeys(words.cells.values())}
        return {cell: found[word] for cell, word in words.cells.items()}

    def _dots(self, b: Builder, op: Op, operands: Sequence[Registers]) -> dict[Cell, Value]:
        half = len(operands) // 2
        apart = op.attrs.get("spread", 1) == 1
        self.ready = apart and all(map(self._is_own, op.operands[half:]))
        dots: dict[int, dict[tuple[tuple[Value, ...], tuple[Value, ...]], list[Cell]]] = {}
        for cell in self.cells(shape_of(op.result)):
            words = tuple(o.cells[cell] for o in operands)
            dots.setdefault(cell[-1], {}).setdefault((words[:half], words[half:]), []).append(cell)
        cells: dict[Cell, Value] = {}
        for wanted in dots.values():
            rows, columns = (list(dict.fromkeys(key[side] for key in wanted)) for side in (0, 1))
            # Where lanes take two rows of x in turns, both have the same words.
            turns = apart and any(len(found) > 1 for found in wanted.values()) and len(shape_of(op.result)) > 2
            for first in range(0, len(rows), 2):
                pair = rows[first : first + 2]
                for at in range(0, len(columns), 2 if apart and not turns else 1):
                    own = columns[at : at + 2] if apart and not turns else columns[at : at + 1]
                    if not any((row, column) in wanted for row in pair for column in own):
                        continue
                    results = self._multiplied(b, op, pair, own * 2 if turns else own, apart)
                    for r, row in enumerate(pair):
                        for c, column in enumerate(own):
                            for cell in wanted.get((row, column), ()):
                                cells[cell] = results[r][self._turn(op, cell) if turns else c]
        return cells

    def _turn(self, op: Op, cell: Cell) -> int:
        """Which of the two rows of x that share words a cell belongs to."""
        axis = next(a for a in range(len(cell) - 1) if self.layout.lanes[a] == 1 and shape_of(op.result)[a] > 1)
        return cell[axis] % 2

    def _multiplied(
        self, b: Builder, op: Op, rows: Sequence[tuple[Value, ...]], columns: Sequence[tuple[Value, ...]], apart: bool
    ) -> list[list[Value]]:
        """The sums of two rows (or one, twice) with one or two columns; with one column where lanes share a row."""
        zero, none = b.const(0.0, f32), b.const(0, u32)
        sums = [zero] * 4
        for k in range(0, len(rows[0]), 2):
            a = [rows[r % len(rows)][k + at] for at in (0, 1) for r in (0, 1)]
            factors = [columns[0][k], columns[0][k + 1]]
            if apart and self.ready:
                pass
            elif apart:
                others = [columns[1][k], columns[1][k + 1]] if len(columns) > 1 else [none, none]
                if others == factors:
                    factors = [b.select(self.either, word, none) for word in factors]
                    sums = list(b.emit("mma", [*a, *factors, *sums], {"dtype": op.attrs["dtype"]}))
                    continue
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
        return super().ops(b, loads_first(ops, self._is_staged) if any(r in self.sums for op in ops for r in op.results) else ops)

    def _is_staged(self, op: Op) -> bool:
        return self.staged is not None and op.operands[0] in self.staged.rings

    def for_(self, b: Builder, op: Op) -> None:
        """A loop over steps, whose rows are copied to shared memory some steps ahead where the schedule says so."""
        stages = self.kernel.attrs.get("row_stages", 0)
        names, units = (self.kernel.attrs.get(name, ()) for name in ("packed_rows", "packed_units"))
        assert isinstance(stages, int) and isinstance(names, tuple) and isinstance(units, tuple)
        copied = copied_tensors(self, op, dict(zip(names, units, strict=True)), self.env) if stages > 1 else []  # type: ignore[arg-type]
        if not copied:
            super().for_(b, op)
            return
        staged = StagedRows(self, stages, copied)
        staged.begin(b)
        low, high, step = (self.env[v] for v in op.operands[:3])
        assert isinstance(low, Value) and isinstance(high, Value) and isinstance(step, Value)
        ahead = low
        for number in range(stages - 1):
            staged.copy(b, ahead, high, b.index(number))
            ahead = b.add(ahead, step)
        initial = [b.index(0), ahead, *self.flat(b, op.operands[3:], [self.env[v] for v in op.operands[3:]])]
        region = op.regions[0]

        def body(inner: Builder, index: Value, slot: Value, ahead: Value, *carried: Value) -> list[Value]:
            self.env[region.args[0]] = index
            if region.args[0] in self.divisors:
                self.divisors[index] = self.divisors[region.args[0]]
            self.bind(region.args[1:], carried)
            inner.multi("copy_wait", pending=stages - 2)
            inner.multi("warp_sync")
            before = inner.select(inner.op("eq", slot, inner.index(0)), inner.index(stages - 1), inner.sub(slot, inner.index(1)))
            staged.copy(inner, ahead, high, before)
            staged.slot, self.staged = slot, staged
            self.depth += 1
            yielded = self.ops(inner, region.ops)
            self.depth -= 1
            self.staged = None
            after = inner.select(inner.op("eq", slot, inner.index(stages - 1)), inner.index(0), inner.add(slot, inner.index(1)))
            return [after, inner.add(ahead, step), *self.flat(inner, region.yields, yielded)]

        results = b.for_(low, high, step, initial, body, name=region.args[0].name)
        self.bind(op.results, results[2:])

    def _shared_axis(self, op: Op) -> int | None:
        """The axis of x's rows, where lanes take what they load of two of them in turns: those of even columns read one, those of odd ones the next."""
        shape = shape_of(op.result)
        if not self.apart or op.attrs.get("masked") or not shape or shape[-1] == 1:
            return None
        axes = [a for a in range(len(shape) - 1) if self.layout.lanes[a] == 1 and shape[a] > 1]
        if len(axes) != 1 or shape[axes[0]] % 2 or any(shape[a] > 1 for a in range(len(shape) - 1) if a != axes[0]):
            return None
        walking = [v for v in op.operands[1:] if isinstance(held := self.env[v], RegisterIndex) and axes[0] in held.factors]
        return axes[0] if len(walking) == 1 else None

    def _shared_load(self, b: Builder, op: Op, axis: int) -> None:
        (place,) = (v for v in op.operands[1:] if isinstance(held := self.env[v], RegisterIndex) and axis in held.factors)
        held = self.env[place]
        assert isinstance(held, RegisterIndex)
        one = b.select(self.odd, b.index(held.factors[axis]), b.index(0))
        self.env[place] = RegisterIndex(held.shape, b.add(held.base, one), held.factors)
        self._own_load(b, op, self.either)
        self.env[place] = held
        loaded = self.env[op.result]
        assert isinstance(loaded, Registers)
        cells = {cell: loaded.cells[tuple(c - c % 2 if a == axis else c for a, c in enumerate(cell))] for cell in loaded.cells}
        self.env[op.result] = Registers(loaded.shape, cells)

    def _own_load(self, b: Builder, op: Op, wanted: Value) -> None:
        """A load of x by those lanes alone whose columns it is for; others have zeros."""
        self.env[wanted] = wanted
        super().load(b, replace(op, operands=(*op.operands, wanted), attrs=MappingProxyType({**op.attrs, "masked": True})))
        self.own.add(id(op))

    def _is_factor(self, op: Op) -> bool:
        """Whether an op loads some of x, unmasked."""
        shape = shape_of(op.result)
        rows = [a for a in range(len(shape) - 1) if self.layout.lanes[a] > 1]
        return self.apart and not op.attrs.get("masked") and bool(rows) and shape[-1] > 1 and all(shape[a] == 1 for a in rows)

    def _is_own(self, value: Value) -> bool:
        """Whether a word is zero in all lanes but those whose columns it is for."""
        op = self.made.get(value)
        if op is None or op.opcode == "load":
            return op is not None and id(op) in self.own
        parts = [v for v in op.operands if self._word(v) is None]
        return op.opcode in ("bitcast", "cast", "shl", "or", "broadcast") and bool(parts) and all(map(self._is_own, parts))

    def load(self, b: Builder, op: Op) -> None:
        axis = self._shared_axis(op)
        if axis is not None:
            self._shared_load(b, op, axis)
            return
        if self._is_factor(op) and not self._is_staged(op):
            single = all(e == 1 for e in shape_of(op.result)[:-1])
            self._own_load(b, op, self.even if single else self.either)
            if not single:
                self.own.discard(id(op))
            return
        if self.staged is None or not self._is_staged(op):
            super().load(b, op)
            return
        one = next(c for c in self.staged.copied if c.memory is op.operands[0])
        shape, held = shape_of(op.result), self.env[op.operands[-1]]
        places = held if isinstance(held, Value) else self.registers(b, held, shape_of(op.operands[-1]))
        cells: dict[Cell, Value] = {}
        for cell in self.cells(shape):
            place = places if isinstance(places, Value) else places.cells[self.collapsed(cell, places.shape)]
            cells[cell] = self.staged.load(b, op, one, cell, place)
        self.env[op.result] = Registers(shape, cells)

    def guarded_load(self, b: Builder, memory: Value, indices: Sequence[Value], width: int, cond: Value) -> Value:
        assert isinstance(memory.type, Tensor)
        if memory.type.space != "global":
            return super().guarded_load(b, memory, indices, width, cond)
        if width == 1:
            return b.op("load", memory, *indices, cond, masked=True)
        return b.op("load", memory, *indices, cond, width=width, masked=True)


def _high(op: Op) -> int:
    """The upper bytes of the halves that `pair_bytes` makes, as a word of four of them."""
    high = op.attrs["high"]
    assert isinstance(high, int)
    return high * 0x01010101


def loads_first(ops: Sequence[Op], near: Callable[[Op], bool] = lambda op: False) -> list[Op]:
    """The ops with loads, and what these need, before all else, but for those of what is `near`. Where something is written the order stays."""
    if any(inner.opcode in ("store", "accumulate", "atomic", "barrier") for op in ops for inner in (op, *(i for r in op.regions for i in walk(r)))):
        return list(ops)
    made = {result: op for op in ops for result in op.results}
    early: set[int] = set()
    waiting = [op for op in ops if op.opcode == "load" and not near(op)]
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


