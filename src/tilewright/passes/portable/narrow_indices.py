"""Pass: integers of 64 bits become integers of 32 where the sizes of a call allow it.

In: a thread-stage kernel without vecs, for a target that does not compute with 64-bit integers itself. Out: the same values. One whose
magnitude has a bound made of sizes is computed as i32; the attribute `narrow` of the kernel lists these bounds, and a launch at which one
is 2^31 or more is refused (`Launch.narrow`). What has no such bound, as the elements of an i64 array, stays i64: the code generator splits it.
The low half of it is enough for an index of an access, whose array has fewer elements than 2^31. Arrays of a block or a thread that
hold nothing but such numbers are arrays of i32.

    %i = add (mul %block, 256), %thread : i64;  %c = lt %i, %n   ->   the same in i32, while 256 * grid + 256 < 2^31 and n < 2^31
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tilewright.base.dtypes import DType, i32, i64, u32
from tilewright.base.sizes import Size, floordiv, maximum, minimum, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import eliminate_dead
from tilewright.ir.types import INDEX, Scalar, Tensor, dtype_of

LIMIT = (1 << 31) - 1
_WORD, _UNSIGNED = Scalar(i32), Scalar(u32)
_MOST_BOUNDS = 4
_ROUNDS = 3
"""Arrays whose numbers come from other arrays are found out one after the other."""
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_ACCESSES = frozenset({"load", "store", "atomic", "atomic_load", "atomic_store", "prefetch", "head"})


@dataclass(frozen=True)
class Bound:
    """The magnitude is at most the largest of `sizes`; `natural`: never negative."""

    sizes: frozenset[Size]
    natural: bool


def narrow_indices(kernel: Kernel) -> Kernel:
    """The kernel with short integers, and what its launches must check."""
    analysis = _Analysis(kernel)
    bounds = analysis.run()
    narrower = _IndexNarrower(kernel, bounds, analysis.arrays)
    done = eliminate_dead(narrower.run())
    conditions = sorted(_largest_only(narrower.conditions), key=str)
    return replace(done, attrs=MappingProxyType({**done.attrs, "narrow": tuple(conditions)}))


def _largest_only(sizes: set[Size]) -> list[Size]:
    """Without sizes that another is never below: one with the same terms and no smaller factors."""
    kept: list[dict[object, int]] = []
    found: list[Size] = []
    for size in sorted(sizes, key=lambda s: (-len(s.terms), -sum(factor for _, factor in s.terms))):
        terms = dict(size.terms)
        if _is_natural(size) and any(all(other.get(atoms, 0) >= factor for atoms, factor in terms.items()) for other in kept):
            continue
        found.append(size)
        if _is_natural(size):
            kept.append(dict(size.terms))
    return found


# -- bounds -----------------------------------------------------------------------------------------------------------


def _is_natural(size: Size) -> bool:
    return all(factor >= 0 and all(isinstance(a, str) or (_is_natural(a.a) and _is_natural(a.b)) for a in atoms) for atoms, factor in size.terms)


def _magnitude(size: Size) -> Bound:
    natural = _is_natural(size)
    return Bound(frozenset({size if natural else maximum(size, -size)}), natural)


def _exactly(value: int) -> Bound:
    return Bound(frozenset({Size.of(abs(value))}), value >= 0)


def _kept(sizes: Iterable[Size], natural: bool) -> Bound:
    found = frozenset(sizes)
    if len(found) > _MOST_BOUNDS:
        total = Size.of(0)
        for size in found:
            total = total + size
        found = frozenset({total})
    return Bound(found, natural)


def _hull(a: Bound, b: Bound) -> Bound:
    return _kept(a.sizes | b.sizes, a.natural and b.natural)


def _sum(a: Bound, b: Bound) -> Bound:
    return _kept({x + y for x in a.sizes for y in b.sizes}, a.natural and b.natural)


def _difference(a: Bound, b: Bound) -> Bound:
    return replace(_sum(a, b), natural=False)


def _product(a: Bound, b: Bound) -> Bound:
    return _kept({x * y for x in a.sizes for y in b.sizes}, a.natural and b.natural)


def _largest(a: Bound, b: Bound) -> Bound:
    return replace(_hull(a, b), natural=a.natural or b.natural)


def _least(a: Bound, b: Bound) -> Bound:
    if a.natural and b.natural and len(a.sizes) == len(b.sizes) == 1:
        (x,), (y,) = a.sizes, b.sizes
        return Bound(frozenset({minimum(x, y)}), True)
    return _hull(a, b)


def _bits_both(a: Bound, b: Bound) -> Bound:
    if a.natural and b.natural:
        return _least(a, b)
    return a if a.natural else b if b.natural else _sum(a, _sum(b, _exactly(1)))


def _bits_either(a: Bound, b: Bound) -> Bound:
    return _sum(a, b) if a.natural and b.natural else _difference(_sum(a, b), _exactly(1))


_RULES: Mapping[str, Callable[[Bound, Bound], Bound]] = {
    "add": _sum, "sub": _difference, "mul": _product, "min": _least, "max": _largest, "and": _bits_both, "or": _bits_either, "xor": _bits_either,
}  # fmt: skip
_UNARY: Mapping[str, Callable[[Bound], Bound]] = {
    "neg": lambda a: replace(a, natural=False), "abs": lambda a: replace(a, natural=True), "not": lambda a: _difference(a, _exactly(1)),
    "popcount": lambda a: _exactly(64), "ctz": lambda a: _exactly(64), "clz": lambda a: _exactly(64),
}  # fmt: skip
_SHORTENED = frozenset({*_RULES, "neg", "abs", "floordiv", "mod", "select", "shl", "shr", "not"})
"""Ops that give the same in 32 bits where operands and result fit."""


class _Analysis:
    """The bound of every 64-bit value that has one."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.bounds: dict[Value, Bound] = {}
        self.exact: dict[Value, Size] = {}
        self.makers: dict[Value, Op] = {}
        self.arrays: dict[Value, Bound] = {}
        """The bound of what a block's or a thread's own arrays hold."""

    def run(self) -> Mapping[Value, Bound]:
        stored = _stored(self.kernel)
        self.block(self.kernel.body)
        for _ in range(_ROUNDS):
            # What has a bound has it whatever arrays hold that had none yet.
            found = {array: _joined(self.bounds[v] for v in values) for array, values in stored.items() if all(v in self.bounds for v in values)}
            if found.keys() == self.arrays.keys():
                break
            self.arrays = {**found, **self.arrays}
            self.bounds.clear()
            self.block(self.kernel.body)
        return self.bounds

    def block(self, block: Block) -> None:
        for op in block.ops:
            if op.regions:
                self.structured(op)
            elif op.results and op.results[0].type == INDEX:
                self.note(op.results[0], self.bound(op))
            elif op.results and op.results[0].type == _UNSIGNED:
                self.note(op.results[0], self.unsigned(op))

    def unsigned(self, op: Op) -> Bound | None:
        """The bound of a u32: divisions of indices by sizes are made in that."""
        self.makers[op.results[0]] = op
        if op.opcode == "cast":
            source = self.bounds.get(op.operands[0])
            known = self.exact.get(op.operands[0])
            if known is not None:
                self.exact[op.results[0]] = known
            return source if source is not None and source.natural else None
        if op.opcode == "const":
            value = op.attrs["value"]
            assert isinstance(value, int)
            self.exact[op.results[0]] = Size.of(value)
            return _exactly(value)
        if op.opcode == "floordiv":
            return self.by(op)
        if op.opcode == "min":
            given = [bound for bound in map(self.bounds.get, op.operands) if bound is not None]
            return _least(*given) if len(given) == 2 else given[0] if given else None
        if op.opcode in ("add", "mul"):
            return self.both(op.operands, _RULES[op.opcode])  # what wraps is only smaller
        if op.opcode == "sub":
            # a - (a // b) * b
            back = self.makers.get(op.operands[1])
            quotient = next((self.makers.get(v) for v in back.operands), None) if back is not None and back.opcode == "mul" else None
            if back is not None and quotient is not None and quotient.opcode == "floordiv" and quotient.operands == (op.operands[0], back.operands[1]):
                return self.bounds.get(back.operands[1])
        return None

    def note(self, value: Value, bound: Bound | None) -> None:
        if bound is None:
            self.bounds.pop(value, None)
        else:
            self.bounds[value] = bound

    def bound(self, op: Op) -> Bound | None:
        opcode = op.opcode
        if opcode == "const":
            value = op.attrs["value"]
            assert isinstance(value, int)
            self.exact[op.results[0]] = Size.of(value)
            return _exactly(value)
        if opcode == "size":
            size = op.attrs["value"]
            assert isinstance(size, Size | int | str)
            self.exact[op.results[0]] = Size.of(size)
            return _magnitude(Size.of(size))
        if opcode == "thread_id":
            return _exactly(self.kernel.threads)
        if opcode in ("program_id", "grid_size"):
            axis = op.attrs["axis"]
            assert isinstance(axis, int)
            return _magnitude(self.kernel.grid[axis]) if axis < len(self.kernel.grid) else _exactly(1)
        if opcode == "head":
            return _exactly(128)
        if opcode == "load":
            return self.arrays.get(op.operands[0])
        if opcode == "cast":
            return self.converted(op)
        if opcode == "select":
            return self.both(op.operands[1:], _hull)
        if opcode in _UNARY:
            one = self.bounds.get(op.operands[0])
            return _UNARY[opcode](one) if one else None
        if opcode in ("floordiv", "mod", "shl", "shr"):
            return self.by(op)
        rule = _RULES.get(opcode)
        return self.both(op.operands, rule) if rule else None

    def both(self, values: Sequence[Value], rule: Callable[[Bound, Bound], Bound]) -> Bound | None:
        known = [self.bounds.get(v) for v in values]
        a, b = known
        return rule(a, b) if a is not None and b is not None else None

    def converted(self, op: Op) -> Bound | None:
        source = dtype_of(op.operands[0].type)
        if source.is_bool:
            return _exactly(1)
        if op.operands[0] in self.bounds and op.operands[0].type == _UNSIGNED:
            return self.bounds[op.operands[0]]
        if source.is_int and source.bits <= 32:
            return Bound(frozenset({Size.of(max(-int(source.min_value), int(source.max_value)))}), int(source.min_value) >= 0)
        return None

    def by(self, op: Op) -> Bound | None:
        """Divisions and shifts, whose second operand is often a size."""
        a, b = (self.bounds.get(v) for v in op.operands)
        known = self.exact.get(op.operands[1])
        if op.opcode == "mod":
            return replace(b, natural=b.natural) if b is not None and a is not None else None
        if a is None or b is None:
            return None
        if op.opcode in ("shl", "shr"):
            count = known.constant if known is not None else None
            if count is None:
                return None if op.opcode == "shl" else a
            scaled = {x * (1 << count % 64) if op.opcode == "shl" else floordiv(x, 1 << count % 64) for x in a.sizes}
            return _kept(scaled, a.natural) if a.natural or op.opcode == "shl" else a
        if a.natural and known is not None and _is_natural(known):
            return _kept({_quotient(x, known) for x in a.sizes}, True)
        return _sum(a, _exactly(1)) if not (a.natural and b.natural) else a

    def structured(self, op: Op) -> None:
        if op.opcode == "if":
            for region in op.regions:
                self.block(region)
            for position, result in enumerate(op.results):
                if result.type == INDEX:
                    sides = [region.yields[position] for region in op.regions]
                    self.note(result, self.both(sides, _hull))
            return
        first = 3 if op.opcode == "for" else 0
        skipped = 1 if op.opcode == "for" else 0
        if skipped:
            self.index(op)
        inits = op.operands[first:]
        carried = [region.args[skipped:] for region in op.regions]
        nexts = op.regions[-1].yields
        now = [self.bounds.get(v) if v.type == INDEX else None for v in inits]
        turning = self.turning(op) if op.opcode == "for" else {}
        now = [turning.get(position, bound) for position, bound in enumerate(now)]
        for attempt in range(3):
            for args in carried:
                for arg, bound in zip(args, now, strict=True):
                    self.note(arg, bound)
            if op.opcode == "while":
                # The second region's arguments are what the first one yields after its condition.
                self.block(op.regions[0])
                for arg, value in zip(op.regions[1].args, op.regions[0].yields[1:], strict=True):
                    self.note(arg, self.bounds.get(value) if value.type == INDEX else None)
                self.block(op.regions[1])
            else:
                self.block(op.regions[0])
            later = [
                turning.get(position) or (_hull(bound, self.bounds[value]) if bound is not None and value.type == INDEX and value in self.bounds else None)
                for position, (bound, value) in enumerate(zip(now, nexts, strict=True))
            ]
            if later == now:
                break
            now = later if attempt == 0 else [b if b == c else None for b, c in zip(now, later, strict=True)]
        final = now if op.opcode == "for" else [self.bounds.get(v) if v.type == INDEX else None for v in op.regions[0].yields[1:]]
        for result, bound in zip(op.results, final, strict=True):
            self.note(result, bound)

    def turning(self, loop: Op) -> dict[int, Bound]:
        """Bounds of the places in a ring that a loop carries: `next = 0 if place + 1 == count else place + 1`, also by way of inner loops."""
        for op in _inside(loop):
            if op.opcode == "const" and isinstance(op.attrs["value"], int):
                self.exact[op.results[0]] = Size.of(op.attrs["value"])
        tests = (op for op in _inside(loop) if op.opcode == "eq")
        counts = sorted({count for test in tests if (count := self.number(test.operands[1])) is not None and count > 0})
        for count in counts:
            turned = _RingPlaces(self, count).carried(loop, frozenset())
            if turned:
                return dict.fromkeys(turned, _exactly(count - 1))
        return {}

    def number(self, value: Value) -> int | None:
        known = self.exact.get(value)
        return known.constant if known is not None else None

    def index(self, op: Op) -> None:
        low, high, step = (self.bounds.get(v) for v in op.operands[:3])
        arg = op.regions[0].args[0]
        if arg.type != INDEX:
            return
        known = low is not None and high is not None and step is not None
        self.note(arg, replace(_hull(low, _sum(high, step)), natural=low.natural) if known else None)  # type: ignore[arg-type, union-attr]


def _inside(loop: Op) -> Iterator[Op]:
    for region in loop.regions:
        for op in region.ops:
            yield op
            yield from _inside(op)


@dataclass
class _RingPlaces:
    """Which values are places in a ring of so many."""

    analysis: _Analysis
    count: int

    def carried(self, loop: Op, places: frozenset[Value]) -> set[int]:
        """Positions of what a loop carries that are places in every turn, if `places` are: those that stay so together."""
        first, body = 3, loop.regions[0]
        found = {n for n, value in enumerate(loop.operands[first:]) if value.type == INDEX and self.holds(value, places, {})}
        makers = {result: op for op in body.ops for result in op.results}
        while True:
            inside = places | {body.args[1 + n] for n in found}
            kept = {n for n in found if self.holds(body.yields[n], inside, makers)}
            if kept == found:
                return found
            found = kept

    def holds(self, value: Value, places: frozenset[Value], makers: Mapping[Value, Op]) -> bool:
        if value in places:
            return True
        number, bound = self.analysis.number(value), self.analysis.bounds.get(value)
        if number is not None:
            return 0 <= number < self.count
        if bound is not None and bound.natural and all(size.constant is not None and size.constant < self.count for size in bound.sizes):
            return True
        maker = makers.get(value)
        if maker is None:
            return False
        if maker.opcode == "for":
            return maker.results.index(value) in self.carried(maker, places)
        if maker.opcode != "select":
            return False
        test, again, onward = maker.operands
        asked, step = makers.get(test), makers.get(onward)
        if asked is None or step is None or asked.opcode != "eq" or asked.operands[0] is not onward or step.opcode != "add":
            return False
        numbers = [self.analysis.number(v) for v in (asked.operands[1], step.operands[1])]
        return numbers == [self.count, 1] and self.holds(step.operands[0], places, makers) and self.holds(again, places, makers)


def _joined(bounds: Iterable[Bound]) -> Bound:
    first, *others = bounds
    for other in others:
        first = _hull(first, other)
    return first


def _stored(kernel: Kernel) -> dict[Value, list[Value]]:
    """What is stored to each array of 64-bit integers that a block or a thread has, where it is loaded and stored alone."""
    found: dict[Value, list[Value]] = {}
    for op in walk(kernel.body):
        if op.opcode == "alloc":
            memory = op.results[0].type
            if isinstance(memory, Tensor) and memory.dtype is i64 and not op.attrs.get("values"):
                found[op.results[0]] = []
            continue
        for value in op.operands:
            if value in found and (op.opcode not in ("load", "store") or value is not op.operands[0]):
                del found[value]
        if op.opcode == "store" and op.operands[0] in found:
            memory = op.operands[0].type
            assert isinstance(memory, Tensor)
            found[op.operands[0]].append(op.operands[1 + memory.rank])
    return {array: values for array, values in found.items() if values}


def _quotient(a: Size, b: Size) -> Size:
    """a // b, where b is a factor of every term without it."""
    if len(b.terms) == 1:
        (atoms, factor), reduced = b.terms[0], []
        for term, count in a.terms:
            left = list(term)
            for atom in atoms:
                if atom not in left:
                    break
                left.remove(atom)
            else:
                if count % factor == 0:
                    reduced.append((tuple(left), count // factor))
                    continue
            break
        else:
            total = Size.of(0)
            for term, count in reduced:
                one = Size.of(count)
                for atom in term:
                    one = one * (Size.of(atom) if isinstance(atom, str) else Size((((atom,), 1),)))
                total = total + one
            return total
    return floordiv(a, b)


# -- rewriting --------------------------------------------------------------------------------------------------------


class _IndexNarrower:
    def __init__(self, kernel: Kernel, bounds: Mapping[Value, Bound], arrays: Mapping[Value, Bound]) -> None:
        self.kernel, self.bounds = kernel, bounds
        self.short_arrays: set[Value] = set()
        """Arrays whose elements are of 32 bits now."""
        self.conditions: set[Size] = set()
        self.mapping: dict[Value, Value] = {}
        """Values of the kernel that others stand for now."""
        self.words: dict[Value, Value] = {}
        """The i32 form of a 64-bit value, old or new."""
        self.arrays = arrays
        self.grown = {atoms for p in kernel.params if isinstance(p.type, Tensor) for atoms, _ in product(p.type.shape).terms}

    def run(self) -> Kernel:
        return replace(self.kernel, body=self.region(self.kernel.body, Builder()))

    def fits(self, value: Value) -> bool:
        """Whether a launch that is not refused keeps it below 2^31."""
        if value in self.words:
            return True
        bound = self.bounds.get(value)
        return bound is not None and all(self.usual(size) for size in bound.sizes)

    def usual(self, size: Size) -> bool:
        """Whether a bound is one that calls keep: a square of an extent that no array has is soon too large."""
        if size.constant is not None:
            return size.constant <= LIMIT
        return all(factor <= LIMIT and (len(set(map(str, atoms))) == len(atoms) or atoms in self.grown) for atoms, factor in size.terms)

    def used(self, value: Value) -> None:
        """The value is computed in 32 bits from here on: its bound is a condition."""
        bound = self.bounds.get(value)
        if bound is not None:
            self.conditions.update(size for size in bound.sizes if size.constant is None)

    def region(self, block: Block, builder: Builder, args: tuple[Value, ...] | None = None) -> Block:
        words = dict(self.words)
        for op in block.ops:
            with builder.at(op.span):
                self.op(builder, op)
        self.words = words
        return Block(block.args if args is None else args, tuple(builder.ops))

    def now(self, value: Value) -> Value:
        return self.mapping.get(value, value)

    def word(self, b: Builder, value: Value) -> Value:
        """The i32 form of a 64-bit value of the old kernel."""
        found = self.words.get(value)
        if found is None:
            self.used(value)
            found = self.words[value] = b.cast(self.now(value), i32)
        return found

    def stand_for(self, b: Builder, old: Value, narrow: Value) -> None:
        self.words[old] = narrow
        self.mapping[old] = b.cast(narrow, i64)

    def op(self, b: Builder, op: Op) -> None:
        if op.regions:
            self.structured(b, op)
            return
        numbers = [v for v in op.operands if v.type == INDEX]
        result = op.results[0] if op.results else None
        if op.opcode in _COMPARISONS and numbers and all(map(self.fits, numbers)):
            self.mapping[op.results[0]] = b.op(op.opcode, *(self.word(b, v) for v in op.operands))
            return
        if op.opcode == "cast" and numbers and self.fits(numbers[0]):
            target = op.attrs["dtype"]
            assert isinstance(target, DType)
            if target is not i64:
                self.mapping[op.results[0]] = b.cast(self.word(b, numbers[0]), target)
                return
        if op.opcode in _ACCESSES:
            self.access(b, op)
            return
        if op.opcode == "alloc" and op.results[0] in self.arrays and all(map(self.usual, self.arrays[op.results[0]].sizes)):
            self.short_arrays.add(op.results[0])
            self.mapping[op.results[0]] = b.emit("alloc", [], {**op.attrs, "dtype": i32})[0]
            return
        if result is not None and result.type == INDEX and self.fits(result) and all(map(self.fits, numbers)):
            short = self.shortened(b, op)
            if short is not None:
                self.used(result)
                self.stand_for(b, result, short)
                return
        b.append(replace(op, operands=tuple(map(self.now, op.operands))))

    def shortened(self, b: Builder, op: Op) -> Value | None:
        name = op.results[0].name
        if op.opcode == "const":
            value = op.attrs["value"]
            assert isinstance(value, int)
            return b.const(value, i32)
        if op.opcode == "cast" and dtype_of(op.operands[0].type).bits <= 32 and not dtype_of(op.operands[0].type).is_float:
            return b.cast(self.now(op.operands[0]), i32)
        if op.opcode in _SHORTENED:
            operands = [self.word(b, v) if v.type == INDEX else self.now(v) for v in op.operands]
            return b.op(op.opcode, *operands, name=name)
        if op.opcode in ("size", "thread_id", "program_id", "grid_size"):
            return b.cast(b.append(op)[0], i32)
        return None

    def access(self, b: Builder, op: Op) -> None:
        """Indices are the low halves; what is stored keeps its dtype."""
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        indices = [self.words.get(v) or (self.word(b, v) if self.fits(v) else b.cast(self.now(v), i32)) if v.type == INDEX else self.now(v)
                   for v in op.operands[1 : 1 + memory.rank]]  # fmt: skip
        given = op.operands[1 + memory.rank :]
        if op.operands[0] in self.short_arrays:
            rest = [self.word(b, v) if v.type == INDEX else self.now(v) for v in given]
            found = b.emit(op.opcode, [self.now(op.operands[0]), *indices, *rest], op.attrs)
            if op.opcode == "load":
                self.used(op.results[0])
                self.stand_for(b, op.results[0], found[0])
            return
        rest = list(map(self.now, given))
        results = b.append(replace(op, operands=(self.now(op.operands[0]), *indices, *rest)))
        if op.opcode == "head" and self.fits(results[0]):
            self.words[results[0]] = b.cast(results[0], i32)

    # -- loops and branches -----------------------------------------------------------------------------------------

    def structured(self, b: Builder, op: Op) -> None:
        first = {"for": 3, "while": 0, "if": 1}[op.opcode]
        loop_index = op.opcode == "for" and op.operands[0].type == INDEX
        short_index = loop_index and all(map(self.fits, (*op.operands[:3], op.regions[0].args[0])))
        heads = [self.word(b, v) if short_index else self.now(v) for v in op.operands[:first]]
        if short_index:
            self.used(op.regions[0].args[0])
        short = [r.type == INDEX and self.fits(r) for r in op.results]
        for position, is_short in enumerate(short):
            # Every value on the way must fit, too: a loop's first, carried and next ones, a branch's sides.
            onward = [region.yields[position + (op.opcode == "while" and region is op.regions[0])] for region in op.regions]
            if op.opcode != "if":
                onward += [op.operands[first + position], *(region.args[position + (op.opcode == "for")] for region in op.regions)]
            short[position] = is_short and all(map(self.fits, onward))
        inits = [self.word(b, v) if s else self.now(v) for v, s in zip(op.operands[first:], short, strict=True)] if op.opcode != "if" else []
        regions = []
        for region in op.regions:
            inner = Builder(op.span)
            args: list[Value] = []
            for position, arg in enumerate(region.args):
                carried = position - (op.opcode == "for")
                narrow = short_index if carried < 0 else short[carried]
                if narrow:
                    self.used(arg)
                    fresh = Value(_WORD, arg.name)
                    args.append(fresh)
                    self.stand_for(inner, arg, fresh)
                else:
                    args.append(arg)
            extra = 1 if op.opcode == "while" and region is op.regions[0] else 0
            regions.append(self.finished(region, inner, tuple(args), short, extra))
        results = tuple(Value(_WORD, r.name) if s else r for r, s in zip(op.results, short, strict=True))
        b.append(replace(op, operands=(*heads, *inits), results=results, regions=tuple(regions)))
        for old, new, is_short in zip(op.results, results, short, strict=True):
            if is_short:
                self.used(old)
                self.stand_for(b, old, new)

    def finished(self, block: Block, builder: Builder, args: tuple[Value, ...], short: Sequence[bool], extra: int) -> Block:
        """A region with its `yield` in the new types."""
        words = dict(self.words)
        *ops, last = block.ops
        for op in ops:
            with builder.at(op.span):
                self.op(builder, op)
        yields = [self.now(v) for v in last.operands[:extra]]
        yields += [self.word(builder, v) if s else self.now(v) for v, s in zip(last.operands[extra:], short, strict=True)]
        builder.append(replace(last, operands=tuple(yields)))
        self.words = words
        return Block(args, tuple(builder.ops))
