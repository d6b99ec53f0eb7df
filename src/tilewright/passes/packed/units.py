"""Sums over packed rows, a unit of a block at a time. In: a loop-stage kernel planned as `family=gemv` with a unit; out: one whose sums walk units.

A unit is what one lane of a GPU takes at once: some neighbouring bytes of a block, read as wide words, with the scales they share. A term
`w[i, k] * x(k)` becomes the terms of a whole unit, written out:

    reduce 256*n (%k) { yield mul (element of %w at %k), x(%k) }    ->    reduce 4*n (%u) { %q = load %w.words, …; …; yield sum of 64 terms }

Whole numbers become floats by their bits: those of 2^23 with the number in its last places, less 2^23. A number that lies `p` bits further up comes out
2^p times as large, which the scale takes back; all of that is exact. Scales are factors of sums, so each is applied once for a unit. The parameter is
seen as words as wide as blocks are aligned: 32 bits for q4_k, 16 for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import DType, bf16, by_name, f16, f32, i8, i32, u8, u16, u32
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size, floordiv
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.rewrite import clone_ops, eliminate_dead
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.packed.matrix_units import matrix_format
from tilewright.passes.packed.unit_words import PackedUnit, UnitFormat, k_scales
from tilewright.passes.schedules.gemv import Gemv


@record
class PackedTerm:
    """A sum's term: an element of a packed row times something."""

    reduction: Op
    tensor: Value
    lead: tuple[Value, ...]
    format: str
    other: Value
    """What the element is multiplied with."""


def packed_terms(kernel: Kernel) -> tuple[PackedTerm, ...]:
    """The terms of a kernel's sums, where each is an element of a packed row that can be walked in units, times something; else none."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1:
        return ()
    reductions = [op for op in parallels[0].regions[0].ops if op.opcode == "reduce"]
    terms = [_term(op, parallels[0]) for op in reductions]
    return tuple(t for t in terms if t is not None) if terms and None not in terms else ()


def unit_of(terms: Sequence[PackedTerm]) -> int:
    """Elements of the units that all terms are walked in; 0 where they differ."""
    sizes = {_elements(t.format) for t in terms}
    return sizes.pop() if len(sizes) == 1 else 0


def _elements(name: str) -> int:
    found = UNITS.get(name) or matrix_format(name)
    assert found is not None
    return found.elements


def _term(reduction: Op, parallel: Op) -> PackedTerm | None:
    region = reduction.regions[0]
    if len(region.args) != 1 or len(reduction.results) != 1 or reduction.attrs["kind"] != "add":
        return None
    if dtype_of(reduction.results[0].type) is not f32 or any(op.regions for op in region.ops):
        return None
    made = {result: op for op in region.ops for result in op.results}
    product = made.get(region.yields[0])
    if product is None or product.opcode != "mul":
        return None
    for value, other in (product.operands, tuple(reversed(product.operands))):
        element = made.get(value)
        format_ = str(element.attrs.get("packed", "")) if element is not None else ""
        way = UNITS.get(format_) or matrix_format(format_)
        if way is None or _depends_on_bytes(other, made):
            continue
        loads = [made[v] for v in sources(value, made) if v in made and made[v].opcode == "load" and dtype_of(v.type) is u8]
        places = {op.operands[0]: op for op in loads}
        if len(places) != 1:
            continue
        ((tensor, load),) = places.items()
        block = made.get(load.operands[-2])
        lead = load.operands[1:-2]
        if block is not None and block.opcode in ("floordiv", "shr") and block.operands[0] is region.args[0] and not any(v in made for v in lead):
            memory = tensor.type
            assert isinstance(memory, Tensor)
            if memory.strides[-1] == ONE and _aligned(memory, way.word):
                return PackedTerm(reduction, tensor, lead, format_, other)
    return None


def _aligned(memory: Tensor, word: DType) -> bool:
    """Whether all blocks begin at whole words."""
    size = word.itemsize
    return memory.align % size == 0 and all(stride.divisible_by(size) for stride in (*memory.strides[:-1], memory.shape[-1]))


def sources(value: Value, made: dict[Value, Op]) -> set[Value]:
    found, waiting = set[Value](), [value]
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += made[value].operands if value in made else ()
    return found


def _depends_on_bytes(value: Value, made: dict[Value, Op]) -> bool:
    return any(v in made and "packed" in made[v].attrs for v in sources(value, made))


def _is_constant(value: Value, made: dict[Value, Op], number: int) -> bool:
    op = made.get(value)
    return op is not None and op.opcode == "const" and op.attrs["value"] == number


def packed_units(kernel: Kernel, schedule: Gemv) -> Kernel:
    """The kernel with sums over units; the very same one where its sums are of other things."""
    terms = {id(t.reduction): t for t in packed_terms(kernel)}
    if not terms:
        return kernel
    ways: dict[str, UnitFormat] = {}
    for term in terms.values():
        way = matrix_format(term.format) if schedule.matrix else plain_format(term.format, schedule.unit)
        if way is None or (way.lanes > 1 and way.lanes != schedule.lanes_n):
            raise UserError.at("TW005", f"{schedule.describe()}: rows of {term.format} are not walked so", kernel.span, _help(term.format))
        ways[term.format] = way
    views = {t.tensor: Value(words_of(t.tensor, ways[t.format].word), t.tensor.name) for t in terms.values()}
    b = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    for op in kernel.body.ops:
        if op.opcode != "parallel":
            clone_ops(b, [op], mapping)
            continue
        region = op.regions[0]

        def body(inner: Builder, *indices: Value, region: Block = region) -> list[Value]:
            local = dict(mapping) | dict(zip(region.args, indices, strict=True))
            for part in region.ops:
                if id(part) in terms:
                    _sum(inner, terms[id(part)], ways[terms[id(part)].format], views, local, schedule.matrix)
                elif part.opcode != "yield":
                    clone_ops(inner, [part], local)
            return []

        with b.at(op.span):
            b.parallel([mapping.get(v, v) for v in op.operands], body, [a.name for a in region.args])
    blocks = {t.tensor.name: by_name(t.format).block // ways[t.format].elements for t in terms.values()}
    attrs = MappingProxyType({**kernel.attrs, "packed_rows": tuple(blocks), "packed_units": tuple(blocks.values())})
    changed = replace(kernel, params=tuple(views.get(p, p) for p in kernel.params), body=Block((), tuple(b.ops)), attrs=attrs)
    return eliminate_dead(changed)


def _help(name: str) -> str:
    ways = (("matrix=1", matrix_format(name)), ("matrix=0", UNITS.get(name)), ("matrix=0", FINE_UNITS.get(name)))
    return "possible: " + ", ".join(f"{text} lanes_n={way.lanes} unit={way.elements}" for text, way in ways if way is not None)


def words_of(tensor: Value, word: DType) -> Tensor:
    """Bytes seen as words."""
    memory = tensor.type
    assert isinstance(memory, Tensor)
    size = Size.of(word.itemsize)
    shape = (*memory.shape[:-1], floordiv(memory.shape[-1], size))
    return replace(memory, dtype=word, shape=shape, strides=(*(floordiv(s, size) for s in memory.strides[:-1]), ONE))


def _sum(b: Builder, term: PackedTerm, way: UnitFormat, views: dict[Value, Value], local: dict[Value, Value], matrix: bool) -> None:
    reduction = term.reduction
    region = reduction.regions[0]
    made = {result: op for op in region.ops for result in op.results}
    needed = sources(term.other, made)
    # What `stage_units` laid out is found by the number of the unit and the place in it.
    numbers, places = (
        [op.results[0] for op in region.ops if op.opcode == opcode and op.operands[0] is region.args[0] and _is_constant(op.operands[1], made, way.elements)]
        for opcode in ("floordiv", "mod")
    )
    known = {*numbers, *places} if any(op.attrs.get("staged") for op in region.ops) else set[Value]()
    ops = [op for op in region.ops if any(r in needed for r in op.results) and not any(r in known for r in op.results)]
    length = b.op("floordiv", local.get(reduction.operands[0], reduction.operands[0]), b.index(way.elements))

    wanted, cast = term.other, made.get(term.other)
    if matrix and cast is not None and cast.opcode == "cast" and dtype_of(cast.operands[0].type) in (bf16, f16):
        wanted = cast.operands[0]

    def body(inner: Builder, number: Value) -> list[Value]:
        def other(at: Builder, position: Value, offset: int) -> Value:
            own = {**local, region.args[0]: position}
            if known:
                own |= dict.fromkeys(numbers, number) | dict.fromkeys(places, at.index(offset))
            clone_ops(at, ops, own)
            return own.get(wanted, wanted)

        lead = [local.get(v, v) for v in term.lead]
        return [way.sum(PackedUnit(inner, views[term.tensor], lead, number, other, way.elements))]

    with b.at(reduction.span):
        results = b.reduce("add", [length], body, [region.args[0].name])
    local.update(zip(reduction.results, results, strict=True))


class _Sums:
    """Sums of products of numbers that lie at different places of words: one for each place."""

    def __init__(self, unit: PackedUnit) -> None:
        self.unit = unit
        self.parts: dict[int, Value] = {}

    def add(self, shift: int, number: Value, x: Value) -> None:
        b = self.unit.b
        before = self.parts.get(shift)
        self.parts[shift] = b.mul(number, x) if before is None else b.fma(number, x, before)

    def total(self) -> Value:
        b = self.unit.b
        found: Value | None = None
        for shift, part in self.parts.items():
            if found is None:
                found = self.unit.times(part, 2.0**-shift)
            else:
                found = b.fma(part, b.const(2.0**-shift, f32), found) if shift else b.add(found, part)
        assert found is not None
        return found


_LOW = ((0, 0), (8, 0), (16, 0), (8, 16))
_HIGH = ((4, 0), (12, 0), (4, 16), (12, 16))
"""Of each byte of a word: where its low and its high nibble lie, once the word is moved down by so many bits. None but the first lies at the end, where
compilers cut it out by two instructions."""


def _nibbles(unit: PackedUnit, word: Value, low: _Sums, high: _Sums, xs: Sequence[tuple[Value, Value]], less: int) -> None:
    moved = unit.shr(word, 16)
    for sums, places, side in ((low, _LOW, 0), (high, _HIGH, 1)):
        for (shift, down), pair in zip(places, xs, strict=True):
            number = unit.float_of(moved if down else word, 15 << shift, less << shift)
            sums.add(shift, number, pair[side])


def _plus(b: Builder, values: Sequence[Value]) -> Value:
    found = list(values)
    while len(found) > 1:
        found = [*map(b.add, found[::2], found[1::2]), *found[len(found) & ~1 :]]
    return found[0]


def _q4_k(unit: PackedUnit) -> Value:
    """64 elements: 32 bytes, the low nibbles of which are one sub-block and the high ones the next."""
    b = unit.b
    unit.split(4)
    x0 = b.mul(unit.number, b.index(64))
    words = [unit.word(b.mul(unit.place, b.index(8)), 4 + j) for j in range(8)]
    head = [unit.word(None, j) for j in range(4)]
    xs = [(unit.x(x0, t), unit.x(x0, 32 + t)) for t in range(32)]
    low, high = _Sums(unit), _Sums(unit)
    for j, word in enumerate(words):
        _nibbles(unit, word, low, high, xs[4 * j : 4 * j + 4], 0)
    total: Value | None = None
    for side, (sums, (scale, minimum)) in enumerate(zip((low, high), k_scales(unit, head), strict=True)):
        plain = _plus(b, [pair[side] for pair in xs])
        own = b.sub(b.mul(scale, sums.total()), b.mul(minimum, plain))
        total = own if total is None else b.add(total, own)
    assert total is not None
    return total


def _q8_0(unit: PackedUnit) -> Value:
    """8 elements: 8 bytes."""
    b = unit.b
    unit.split(4)
    x0 = b.mul(unit.number, b.index(8))
    base = b.mul(unit.place, b.index(4))
    sums = _Sums(unit)
    words = [unit.word(base, 1 + j) for j in range(4)]
    d = unit.half(unit.word(None, 0))
    for j, word in enumerate(words):
        sums.add(0, unit.float_of(word, 255, 128, 128), unit.x(x0, 2 * j))
        sums.add(8, unit.float_of(word, 255 << 8, 128 << 8, 128 << 8), unit.x(x0, 2 * j + 1))
    return b.mul(d, sums.total())


def _q4_0(unit: PackedUnit) -> Value:
    """8 elements: the low nibbles of four bytes, and 16 elements further on the high ones."""
    b = unit.b
    unit.split(4)
    x0 = b.add(b.mul(unit.block, b.index(32)), b.mul(unit.place, b.index(4)))
    base = b.mul(unit.place, b.index(2))
    word = unit.joined(unit.word(base, 1), unit.word(base, 2))
    d = unit.half(unit.word(None, 0))
    low, high = _Sums(unit), _Sums(unit)
    _nibbles(unit, word, low, high, [(unit.x(x0, t), unit.x(x0, 16 + t)) for t in range(4)], 8)
    return b.mul(d, b.add(low.total(), high.total()))


def _q6_k(unit: PackedUnit) -> Value:
    """16 elements: four neighbours in each of four rows of 32, which share bytes."""
    b = unit.b
    unit.split(16)
    part, four = unit.digit(unit.place, 8, 0), unit.digit(unit.place, 1, 8)
    x0 = b.add(b.add(b.mul(unit.block, b.index(256)), b.mul(part, b.index(128))), b.mul(four, b.index(4)))
    low = unit.at((part, 32), (four, 2))
    first, second = (unit.joined(unit.word(low, j), unit.word(low, j + 1)) for j in (0, 16))
    above = unit.at((part, 16), (four, 2))
    high = unit.joined(unit.word(above, 64), unit.word(above, 65))
    scale_base = b.mul(part, b.index(4))
    scales = [unit.word(scale_base, 96 + quarter) for quarter in range(4)]
    d = unit.half(unit.word(None, 104))
    down = b.cast(b.mul(b.op("floordiv", four, b.index(4)), b.index(8)), u32)
    fours = 0x0F0F0F0F, 0x30303030
    numbers = (
        b.op("or", unit.mask(first, fours[0]), unit.mask(unit.shl(high, 4), fours[1])),
        b.op("or", unit.mask(second, fours[0]), unit.mask(unit.shl(high, 2), fours[1])),
        b.op("or", unit.mask(unit.shr(first, 4), fours[0]), unit.mask(high, fours[1])),
        b.op("or", unit.mask(unit.shr(second, 4), fours[0]), unit.mask(unit.shr(high, 2), fours[1])),
    )
    total: Value | None = None
    for quarter, number in enumerate(numbers):
        own: Value | None = None
        for t in range(4):
            place = 8 * t if t < 3 else 0
            value = unit.float_of(number if t < 3 else unit.shr(number, 24), 63 << place, 32 << place)
            x = unit.times(unit.x(x0, 32 * quarter + t), 2.0**-place)
            own = b.mul(value, x) if own is None else b.fma(value, x, own)
        assert own is not None
        byte = b.cast(b.op("shr", scales[quarter], down), u8)
        scale = b.cast(b.cast(b.bitcast(byte, i8), i32), f32)
        total = b.mul(scale, own) if total is None else b.fma(scale, own, total)
    assert total is not None
    return b.mul(d, total)


def _fine_q4_k(unit: PackedUnit) -> Value:
    return _fine_quarter(unit, 4)


def _fine_q5_k(unit: PackedUnit) -> Value:
    return _fine_quarter(unit, 5)


def _fine_quarter(unit: PackedUnit, bits: int) -> Value:
    """8 elements: one word, whose low nibbles are four neighbours and whose high ones those 32 elements further on. Lanes read neighbours, of the row as of what it is multiplied with, and each
    makes the scales of its own: what is best where there are few elements for each lane."""
    b = unit.b
    unit.split(32)
    quarter, four = unit.digit(unit.place, 8, 0), unit.digit(unit.place, 1, 8)
    x0 = b.add(b.add(b.mul(unit.block, b.index(256)), b.mul(quarter, b.index(64))), b.mul(four, b.index(4)))
    word = unit.word(unit.place, 4 if bits == 4 else 12)
    fives = [word, unit.shr(word, 4)]
    if bits == 5:
        above = b.op("shr", unit.word(four, 4), b.cast(b.mul(quarter, b.index(2)), u32))
        fives = [b.op("or", unit.mask(low, 0x0F0F0F0F), unit.shl(unit.mask(unit.shr(above, side), 0x01010101), 4)) for side, low in enumerate(fives)]
    head = [unit.word(None, j) for j in range(4)]
    total: Value | None = None
    for side, (scale, minimum) in enumerate(k_scales(unit, head, quarter)):
        xs = [unit.x(x0, 32 * side + t) for t in range(4)]
        own = b.sub(b.mul(scale, _bytes(unit, fives[side], bits, 0, xs)), b.mul(minimum, _plus(b, xs)))
        total = own if total is None else b.add(total, own)
    assert total is not None
    return total


def _bytes(unit: PackedUnit, word: Value, bits: int, less: int, xs: Sequence[Value]) -> Value:
    """The last bits of each byte of a word, less a number, times the four factors."""
    sums, moved = _Sums(unit), unit.shr(word, 16)
    for (shift, down), x in zip(_LOW, xs, strict=True):
        sums.add(shift, unit.float_of(moved if down else word, ((1 << bits) - 1) << shift, less << shift), x)
    return sums.total()


def _thirty_two(unit: PackedUnit, bits: int, minimum: bool) -> Value:
    """8 elements of q4_1, q5_0, q5_1: the low nibbles of four bytes, and 16 elements further on the high ones; fifth bits lie side by side."""
    b = unit.b
    unit.split(4)
    x0 = b.add(b.mul(unit.block, b.index(32)), b.mul(unit.place, b.index(4)))
    head = unit.word(None, 0)
    if minimum:
        word, above = unit.word(unit.place, 1 + (bits == 5)), unit.word(None, 1) if bits == 5 else None
    else:
        base, at = b.mul(unit.place, b.index(2)), 1 + 2 * (bits == 5)
        word = unit.joined(unit.word(base, at), unit.word(base, at + 1))
        above = unit.joined(unit.word(None, 1), unit.word(None, 2)) if bits == 5 else None
    total: Value | None = None
    factors: list[Value] = []
    for side in (0, 1):
        low = unit.shr(word, 4) if side else word
        if above is not None:
            four = unit.mask(b.op("shr", above, b.cast(unit.at((unit.place, 4)) if not side else b.add(unit.at((unit.place, 4)), b.index(16)), u32)), 15)
            # Four bits become the same bit of four bytes.
            spread = unit.mask(b.mul(four, b.const(0x00204081 << 4, u32)), 0x10101010)
            low = b.op("or", unit.mask(low, 0x0F0F0F0F), spread)
        xs = [unit.x(x0, 16 * side + t) for t in range(4)]
        factors += xs
        own = _bytes(unit, low, bits, 0 if minimum else 1 << bits - 1, xs)
        total = own if total is None else b.add(total, own)
    assert total is not None
    scaled = b.mul(unit.half(head), total)
    return b.fma(unit.half(unit.shr(head, 16)), _plus(b, factors), scaled) if minimum else scaled


def plain_format(name: str, elements: int) -> UnitFormat | None:
    """How a format is walked in units of so many elements by plain arithmetic; None where it is not."""
    return next((way for way in (UNITS.get(name), FINE_UNITS.get(name)) if way is not None and way.elements == elements), None)


FINE_UNITS: dict[str, UnitFormat] = {
    "q4_k": UnitFormat(u32, 8, _fine_q4_k), "q5_k": UnitFormat(u32, 8, _fine_q5_k), "q5_0": UnitFormat(u16, 8, lambda unit: _thirty_two(unit, 5, False)),
    "q4_1": UnitFormat(u32, 8, lambda unit: _thirty_two(unit, 4, True)), "q5_1": UnitFormat(u32, 8, lambda unit: _thirty_two(unit, 5, True)),
}  # fmt: skip
"""Units of products with few elements for each lane, where those of `UNITS` are too large, or are for matrix instructions alone."""
UNITS: dict[str, UnitFormat] = {
    "q4_k": UnitFormat(u32, 64, _q4_k, whole=True), "q8_0": UnitFormat(u16, 8, _q8_0, whole=True), "q4_0": UnitFormat(u16, 8, _q4_0), "q6_k": UnitFormat(u16, 16, _q6_k),
}  # fmt: skip
"""Formats that are walked in units."""
