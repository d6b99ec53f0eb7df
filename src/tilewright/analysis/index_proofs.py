"""Which accesses stay in their arrays whatever the call: a proof for each index, from the loops and conditions around it.

In: a loop-stage kernel and what its calls check. Out: for each load and store, the axes whose index is *not* proven to lie inside. Sizes and loop
indices are integers of any size here. What could wrap around in 64 bits is an atom of its own: sums with a number that comes from memory or from an
argument, unless it is narrower than an index.

    for i in range(n): if i > 0: … x[i - 1]      facts: i >= 0, n - 1 - i >= 0, i - 1 >= 0; each gives what the index needs
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from tilewright.analysis.inequalities import Inequality, contradict, negated, plus, related
from tilewright.base.dtypes import i64
from tilewright.base.intervals import surely_nonnegative, surely_positive
from tilewright.base.sizes import ONE, Atom, Monomial, Size, SizeCall, floordiv, maximum, minimum, product
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import ProgramCheck
from tilewright.ir.types import Scalar, Tensor, Vec

Linear = Inequality
"""`constant + Σ factor * atom`, where an atom is a pair: an index or None, and a product of sizes."""
_Rest = tuple[Inequality, int]
"""What a condition divides, and by which number."""
SPLITS = 4
"""Choices (of a minimum, of a condition) that one proof looks into."""
TRIES = 128
"""Cases that one proof looks at in all; those of real kernels take fewer than 100. What is not proven by then is tested as it runs."""
_LARGE = 1 << 31
"""Factors from which on products of indices may wrap around."""


def unproven_accesses(
    kernel: Kernel, checks: Sequence[ProgramCheck] = (), opcodes: Collection[str] = ("load", "store", "accumulate")
) -> Iterator[tuple[Op, tuple[int, ...]]]:
    """Accesses by these ops, with the axes whose index may lie outside. `checks` hold wherever the kernel runs."""
    yield from _Proofs(kernel, checks, opcodes).block(kernel.body, ())


def explained(kernel: Kernel, checks: Sequence[ProgramCheck] = ()) -> Iterator[tuple[Op, int, tuple[str, ...] | None]]:
    """Every load and store, axis by axis: what proves that its index lies inside, as few inequalities as it takes; None where nothing does."""
    yield from _Proofs(kernel, checks, ("load", "store", "accumulate")).explained(kernel.body, ())


def reaches(kernel: Kernel, checks: Sequence[ProgramCheck] = ()) -> Iterator[tuple[Op, int, Size]]:
    """Loads that are not proven, where loops and conditions on their indices say how far they go: the axis, and one more than the last index.

    0 where a loop around has no turns. An array that is longer than that makes the proof."""
    yield from _Proofs(kernel, checks, ("load",)).reaches(kernel.body, (), (), (), ())


def access_width(op: Op) -> int:
    """Elements that an access has to do with."""
    types = [*(r.type for r in op.results), *(v.type for v in op.operands)]
    return next((t.width for t in types if isinstance(t, Vec)), 1)


Facts = tuple[Linear, ...]

_Axes = dict[Op, tuple[int, ...]]
_latest: tuple[Kernel, tuple[ProgramCheck, ...], _Axes] | None = None
"""The kernel that was looked at last, what its calls check, and the axes of its accesses that are not proven. Several passes ask one after the other."""


def _axes_of(kernel: Kernel, checks: tuple[ProgramCheck, ...]) -> _Axes:
    """What is known of a kernel's accesses under these checks; whoever finds more adds it."""
    global _latest
    latest = _latest
    if latest is not None and latest[0] is kernel and latest[1] == checks:
        return latest[2]
    known: _Axes = {}
    _latest = kernel, checks, known
    return known


class _Proofs:
    def __init__(self, kernel: Kernel, checks: Sequence[ProgramCheck], opcodes: Collection[str]) -> None:
        self.opcodes = opcodes
        self.axes = _axes_of(kernel, tuple(checks))
        self.counts: dict[str, Linear] = {"thread_id": _number(kernel.threads)}
        """How many blocks and threads there are, by op."""
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.written = {op.operands[0] for op in walk(kernel.body) if op.operands and OPS[op.opcode].effect == "write"}
        self.names: dict[Value, Hashable] = {}
        """What stands for a value: equal for values that are computed alike."""
        self.linear: dict[Value, Linear] = {}
        self.bounded: set[Value] = set()
        """Loop indices: they do not come near what 64 bits hold."""
        self.checks = checks
        self.loops: dict[Hashable, list[Linear]] = {}
        """What loops say of their own index."""
        self.facts: Facts = ()
        """What holds where the proof at hand is made."""
        self.asked: set[Hashable] = set()
        """Divisors whose sign is looked for just now."""
        self.held: dict[int, list[Linear]] = {}
        """What checks say in a place, by the identity of its facts."""
        self.kept: list[Facts] = []
        self.of_atoms: dict[Hashable, list[Linear]] = {}
        """What holds of atoms."""
        self.tries = TRIES

    # -- the walk -----------------------------------------------------------------------------------------------------

    def block(self, block: Block, facts: Facts) -> Iterator[tuple[Op, tuple[int, ...]]]:
        for op in block.ops:
            if op.opcode in self.opcodes and isinstance(op.operands[0].type, Tensor):
                axes = self.unproven(op, facts)
                if axes:
                    yield op, axes
            for place, region in enumerate(op.regions):
                yield from self.block(region, (*facts, *self.inside(op, place, facts)))

    def explained(self, block: Block, facts: Facts) -> Iterator[tuple[Op, int, tuple[str, ...] | None]]:
        for op in block.ops:
            if op.opcode in self.opcodes and isinstance(memory := op.operands[0].type, Tensor):
                outside = self.unproven(op, facts)
                for axis, (index, extent) in enumerate(zip(op.operands[1 : 1 + memory.rank], memory.shape)):
                    yield op, axis, None if axis in outside else self._reason(index, extent, facts)
            for place, region in enumerate(op.regions):
                yield from self.explained(region, (*facts, *self.inside(op, place, facts)))

    def _reason(self, index: Value, extent: Size, facts: Facts) -> tuple[str, ...]:
        """What a proof needs of the facts: those without which there is none."""
        needed = facts
        for fact in facts:
            fewer = tuple(other for other in needed if other is not fact)
            if self.is_inside(index, extent, fewer):
                needed = fewer
        checks, held, self.checks, self.held = self.checks, self.held, (), {}
        called = () if self.is_inside(index, extent, needed) else ("what every call checks of its arrays",)
        self.checks, self.held = checks, held
        low, high = self.form(index), plus(plus(_of_size(extent), self.form(index), -1), _number(-1))
        return (*(_shown(fact) for fact in needed), *called) or (_shown(low), _shown(high))

    def reaches(
        self, block: Block, facts: Facts, guards: Facts, extents: tuple[Size, ...], rests: tuple[_Rest, ...]
    ) -> Iterator[tuple[Op, int, Size]]:
        """`guards`: which of the facts are conditions. `extents`: those of the loops around. `rests`: what conditions divide."""
        for op in block.ops:
            if op.opcode == "load" and isinstance(op.operands[0].type, Tensor) and op.operands[0] not in self.written:
                for axis in self.unproven(op, facts):
                    last = self._last(op.operands[1 + axis], facts, guards)
                    turns = self._turns_of_rests(op.operands[1 + axis], rests)
                    if last is not None and turns is not None and self.proves(self.form(op.operands[1 + axis]), facts):
                        around = (*extents, *turns)
                        yield op, axis, product((last + 1, *(minimum(extent, ONE) for extent in around if not surely_positive(extent))))
            for place, region in enumerate(op.regions):
                if not all(map(self._is_of_indices, op.operands)) or op.opcode == "while":
                    continue
                if op.opcode == "if" and not self._compares(op.operands[0], place == 0):
                    continue
                more = tuple(self.inside(op, place, facts))
                counts = [_as_size(self.form(v)) for v in op.operands] if op.opcode in ("parallel", "reduce") else []
                around = (*extents, *(count for count in counts if count is not None))
                if op.opcode == "if":
                    own = tuple(fact for fact in more if not self._divides(fact))
                    yield from self.reaches(region, (*facts, *more), (*guards, *own), around, (*rests, *self._rests(op.operands[0])))
                else:
                    yield from self.reaches(region, (*facts, *more), guards, around, rests)

    def _compares(self, value: Value, holds: bool) -> bool:
        """Whether a condition, or its opposite, is made of comparisons that all hold."""
        op = self.made.get(value)
        if op is None:
            return False
        if op.opcode == "not":
            return self._compares(op.operands[0], not holds)
        if op.opcode == ("and" if holds else "or"):
            return all(self._compares(part, holds) for part in op.operands)
        return op.opcode in ("lt", "le", "gt", "ge") or (holds and op.opcode == "eq" and self._rest(op) is not None)

    def _rest(self, op: Op) -> _Rest | None:
        """What `x % number == rest` divides."""
        own = self.made.get(op.operands[0])
        if op.opcode != "eq" or own is None or own.opcode != "mod" or self.form(op.operands[1])[0]:
            return None
        factors, divisor = self.form(own.operands[1])
        return (self.form(own.operands[0]), divisor) if not factors and 0 <= self.form(op.operands[1])[1] < divisor else None

    def _rests(self, condition: Value) -> Iterator[_Rest]:
        op = self.made.get(condition)
        if op is not None and op.opcode == "and":
            for part in op.operands:
                yield from self._rests(part)
        rest = self._rest(op) if op is not None else None
        if rest is not None:
            yield rest

    def _divides(self, fact: Linear) -> bool:
        """Whether a fact is about a quotient or a rest by a number: what it says of indices, others say."""
        made = [self.made.get(value) for atom in fact[0] if (value := _value(_pair(atom)[0])) is not None]
        return any(op is not None and op.opcode in ("mod", "floordiv") and not self.form(op.operands[1])[0] for op in made)

    def _turns_of_rests(self, index: Value, rests: Sequence[_Rest]) -> tuple[Size, ...] | None:
        """What has to be positive so that every value of an index is met: the whole rounds of another index, which leaves all rests. None where there is no other."""
        found: list[Size] = []
        for (factors, _), divisor in rests:
            if self.form(index)[0].keys().isdisjoint(factors):
                continue
            others = [a for a, factor in factors.items() if abs(factor) == 1 and a not in self.form(index)[0]]
            ends = [end for a in others if (end := self._most(({a: 1}, 0))) is not None]
            if not ends:
                return None
            found.append(floordiv(ends[0] + 1, Size.of(divisor)))
        return tuple(found)

    def _last(self, index: Value, facts: Facts, guards: Facts) -> Size | None:
        """The largest value that facts leave to a loop index. Conditions about it and others together would keep it from being reached; those about indices that
        have nothing to do with it leave it its loop."""
        factors, constant = self.form(index)
        if len(factors) != 1:
            return None
        ((atom, factor),) = factors.items()
        others = [self._indices(guard) for guard in guards if atom not in guard[0]]
        about = frozenset[Hashable]().union(*(self._indices(guard) for guard in guards if atom in guard[0]))
        if factor != 1 or _pair(atom)[0] not in self.loops or not all(other and other.isdisjoint(about) for other in others):
            return None
        ends = [self._most(plus(fact, ({atom: 1}, 0))) for fact in facts if fact[0].get(atom) == -1]
        found = [end for end in ends if end is not None]
        return functools.reduce(minimum, found) + constant if found else None

    def _indices(self, guard: Linear) -> frozenset[Hashable]:
        """The indices that a condition speaks of; none where it speaks of something else, too."""
        found = frozenset(index for atom in guard[0] if (index := _pair(atom)[0]) is not None)
        return found if found <= self.loops.keys() else frozenset()

    def _is_of_indices(self, value: Value) -> bool:
        """Whether a value is made of loop indices, sizes and constants alone."""
        op = self.made.get(value)
        if op is None:
            return value in self.bounded
        return not op.regions and op.opcode != "load" and all(map(self._is_of_indices, op.operands))

    def inside(self, op: Op, place: int, facts: Facts) -> list[Linear]:
        """What holds in a region of an op, besides what holds around it."""
        args = op.regions[place].args
        found: list[Linear] = []
        if op.opcode in ("parallel", "reduce"):
            for extent, index in zip(op.operands, args, strict=True):
                self.bounded.add(index)
                found += self._between(index, _number(0), self.form(extent))
        elif op.opcode == "for":
            self.bounded.add(args[0])
            found += self._between(args[0], self.form(op.operands[0]), self.form(op.operands[1]))
        elif op.opcode == "if":
            found += self.condition(op.operands[0], place == 0, facts)
        return found

    def _between(self, index: Value, low: Linear, end: Linear) -> list[Linear]:
        own = self.form(index)
        facts = [plus(own, low, -1), plus(plus(end, own, -1), _number(-1))]
        self.loops[self.name(index)] = facts
        return facts

    def condition(self, value: Value, holds: bool, facts: Facts | None = None) -> list[Linear]:
        """What a condition says where it holds, or where it does not, besides the facts. Without facts, which a proof has that is under way, it says less."""
        op = self.made.get(value)
        if op is None:
            return []
        if op.opcode == "not":
            return self.condition(op.operands[0], not holds, facts)
        if op.opcode == ("and" if holds else "or"):
            both: list[Linear] = []
            for part in op.operands:
                both += self.condition(part, holds, None if facts is None else (*facts, *both))
            return both
        if op.opcode not in ("lt", "le", "gt", "ge", "eq", "ne") or not _is_integer(op.operands[0]):
            return []
        left, right = self.form(op.operands[0]), self.form(op.operands[1])
        kind = op.opcode if holds else _OPPOSITE[op.opcode]
        if kind in ("gt", "ge"):
            left, right, kind = right, left, "lt" if kind == "gt" else "le"
        if kind == "ne":
            return [] if facts is None else self._beside(left, right, facts)
        found = [plus(plus(right, left, -1), _number(-1 if kind == "lt" else 0))]
        return [*found, *self._of_quotients(found[0]), plus(left, right, -1)] if kind == "eq" else [*found, *self._of_quotients(found[0])]

    def _beside(self, left: Linear, right: Linear, facts: Facts) -> list[Linear]:
        """What it says that two numbers differ: where one is never the smaller one, it is larger by one at least."""
        self.facts = facts
        for larger, smaller in ((left, right), (right, left)):
            apart = plus(larger, smaller, -1)
            if apart[0] and self.proves(apart, facts):
                return [plus(apart, _number(-1))]
        return []

    def _of_quotients(self, fact: Linear) -> Iterator[Linear]:
        """What a bound of a quotient by a number says of what is divided: `x // 2 >= a` is `x >= 2 a`, `x // 2 < a` is `x < 2 a`."""
        for atom, factor in fact[0].items():
            index, sizes = _pair(atom)
            value = _value(index)
            op = self.made.get(value) if value is not None else None
            if op is None or op.opcode != "floordiv" or sizes or abs(factor) != 1:
                continue
            factors, divisor = self.form(op.operands[1])
            if factors or divisor <= 0:
                continue
            rest = plus(fact, ({atom: 1}, 0), -factor)
            scaled = plus(rest, rest, divisor - 1)
            # Below a bound: the largest number with that quotient is `divisor - 1` above its multiple.
            yield plus(plus(scaled, self.form(op.operands[0]), factor), _number(divisor - 1 if factor < 0 else 0))

    # -- one access ---------------------------------------------------------------------------------------------------

    def unproven(self, op: Op, facts: Facts) -> tuple[int, ...]:
        self.facts = facts
        found = self.axes.get(op)
        if found is None:
            found = self.axes[op] = self._unproven(op, facts)
        return found

    def _unproven(self, op: Op, facts: Facts) -> tuple[int, ...]:
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        # The elements of a vector follow one another in memory, so along the last axis if that is dense: it must have room for all of them.
        more = access_width(op) - 1
        rooms = [*memory.shape[:-1], *(extent - more for extent in memory.shape[-1:])]
        apart = more and (not memory.rank or memory.strides[-1] != ONE)
        return tuple(
            axis
            for axis, (index, room) in enumerate(zip(op.operands[1 : 1 + memory.rank], rooms, strict=True))
            if apart or not self.is_inside(index, room, facts)
        )

    def is_inside(self, index: Value, extent: Size, facts: Facts) -> bool:
        room = extent.constant
        if room is not None and (reach := self._digits(index)) is not None and reach[0] >= 0 and reach[1] < room:
            return True
        self.facts = facts
        own = self.form(index)
        low, high = own, plus(plus(_of_size(extent), own, -1), _number(-1))
        if any(high == fact for fact in facts) and any(low == fact for fact in facts):
            return True
        return self.proves(low, facts) and self.proves(high, facts)

    def _digits(self, value: Value) -> tuple[int, int] | None:
        """The least and the largest value of a sum of digits, such as `i % 256 // 64 * 32 + i % 32`, whatever the loops."""
        factors, constant = self.form(value)
        if not factors:
            return constant, constant
        op = self.made.get(value)
        if op is None or op.opcode not in ("mod", "floordiv", "add", "mul"):
            return None
        a, b = op.operands
        right = self._digits(b)
        if op.opcode == "mod" and right is not None and right[0] == right[1] > 0:
            left = self._digits(a)
            return left if left is not None and left[0] >= 0 and left[1] < right[0] else (0, right[0] - 1)
        left = self._digits(a)
        if left is None or right is None:
            return None
        if op.opcode == "add":
            return left[0] + right[0], left[1] + right[1]
        if op.opcode == "mul":
            ends = [x * y for x in left for y in right]
            return min(ends), max(ends)
        return (left[0] // right[0], left[1] // right[0]) if right[0] == right[1] > 0 else None

    def proves(self, goal: Linear, facts: Facts) -> bool:
        """Whether it is not negative."""
        if not goal[0]:
            return goal[1] >= 0
        against = negated(goal)
        # Most goals follow from what says nothing of minima: hardly any choices, and few inequalities.
        for plain in (True, False):
            self.tries = TRIES
            if self._contradict([against], facts, SPLITS, plain):
                return True
        return False

    def _contradict(self, assumed: Sequence[Linear], facts: Facts, splits: int, plain: bool = False) -> bool:
        """Whether what is assumed cannot be, given the facts; `plain`: given those of the checks that have no minima or maxima."""
        own = self._completed(assumed, assumed[0])
        checked = self._checked(facts)
        near = related((atom for fact in own for atom in fact[0]), [*facts, *(filter(_is_plain, checked) if plain else checked)])
        known = self._completed([*assumed, *near], assumed[0])
        if contradict(known):
            return True
        self.tries -= 1
        if not splits or self.tries <= 0:
            return False
        atoms = {atom for fact in known for atom in fact[0]}
        for case in self._cases(atoms):
            if all(self._contradict([*assumed, *more], facts, splits - 1, plain) for more in case if not self._is_known(more, assumed)):
                return not any(self._is_known(more, assumed) for more in case)
        return False

    @staticmethod
    def _is_known(more: Sequence[Linear], assumed: Sequence[Linear]) -> bool:
        return all(fact in assumed for fact in more)

    def _checked(self, facts: Facts) -> list[Linear]:
        """What the checks of a call say, as far as it is linear here."""
        key = id(facts)
        found = self.held.get(key)
        if found is not None:
            return found
        self.kept.append(facts)  # so that no other facts get the same identity
        found = self.held[key] = []
        for check in self.checks:
            left, right = self._reached(check.left, facts), self._reached(check.right, facts)
            found.append(plus(_of_size(right - left), _number(-1 if check.relation == "lt" else 0)))
            if check.relation == "eq":
                found.append(_of_size(left - right))
        return found

    def _reached(self, size: Size, facts: Facts) -> Size:
        """The size with 1 for every `min(extent, 1)` of a loop that runs here."""
        total = Size.of(0)
        for monomial, factor in size.terms:
            kept: list[Atom] = []
            for atom in monomial:
                extent = _count(atom)
                if extent is None or not self._contradict([negated(plus(_of_size(extent), _number(-1)))], facts, 0):
                    kept.append(atom)
            total = total + Size(((tuple(kept), factor),))
        return total

    def _completed(self, facts: Sequence[Linear], goal: Linear) -> list[Linear]:
        """The facts, and what holds of their atoms anyway."""
        known, seen, waiting = list(facts), set[Hashable](), list(facts)
        while waiting and len(known) < 120:
            fact = waiting.pop(0)
            for atom in fact[0]:
                if atom in seen:
                    continue
                seen.add(atom)
                more = self._of_atom(atom, goal)
                known += more
                waiting += more
        return known

    def _of_atom(self, atom: Hashable, goal: Linear) -> Sequence[Linear]:
        """What holds of an atom; of a quotient, the goal times its divisor, too."""
        index, sizes = _pair(atom)
        key = (atom, id(self.facts)) if self._depends_on_place(index) else atom
        found = self.of_atoms.get(key)
        if found is None:
            found = list(self._about(index, sizes, atom))
            if not self.asked:
                self.of_atoms[key] = found
                self.kept.append(self.facts)
        divisor = self._divisor(index) if not sizes else None
        return [*found, *_times(goal, divisor)] if divisor is not None else found

    def _depends_on_place(self, index: Hashable) -> bool:
        """Whether what is known of a value depends on the facts around: is a divisor positive, is what it divides never negative?"""
        value = _value(index)
        op = self.made.get(value) if value is not None else None
        if op is None or op.opcode not in ("mod", "floordiv") or not _is_integer(op.operands[1]):
            return False
        return any(self.form(v)[0] for v in (op.operands if op.opcode == "floordiv" else op.operands[1:]))

    def _about(self, index: Hashable, sizes: Monomial, atom: Hashable) -> Iterator[Linear]:
        if index is None:
            if surely_nonnegative(Size(((sizes, 1),))):
                yield {atom: 1}, 0
            for part in sizes:
                if isinstance(part, SizeCall):
                    others = _without(sizes, part)
                    for fact in _of_call(part):
                        yield from _times(fact, others)
            return
        own = list(self._of_index(index))
        for fact in own:
            yield from _times(fact, sizes)
        if sizes:
            for fact in self.loops.get(index, ()):
                yield from _times(fact, sizes)

    def _divisor(self, index: Hashable) -> Monomial | None:
        """The product of sizes that a value is divided by."""
        value = _value(index)
        op = self.made.get(value) if value is not None else None
        if op is None or op.opcode != "floordiv":
            return None
        factors, constant = self.form(op.operands[1])
        if constant or len(factors) != 1:
            return None
        (((own, sizes), factor),) = ((_pair(a), f) for a, f in factors.items())
        return sizes if own is None and factor == 1 and surely_nonnegative(Size(((sizes, 1),))) else None

    def _of_index(self, index: Hashable) -> Iterator[Linear]:
        """What the op says that computes a value."""
        value = _value(index)
        if value is None:
            return
        own: Linear = ({(index, ()): 1}, 0)
        dtype = value.type.dtype if isinstance(value.type, Scalar) else i64
        if dtype.is_int and (dtype.bits < 64 or dtype.kind == "u"):
            yield plus(own, _number(int(dtype.min_value)), -1)
            yield plus(_number(int(dtype.max_value)), own, -1)
        op = self.made.get(value)
        if op is None or dtype is not i64:
            return
        operands = [self.form(v) for v in op.operands if _is_integer(v)]
        if op.opcode in _COUNTED:
            yield own
            if op.opcode in self.counts:
                yield plus(plus(self.counts[op.opcode], own, -1), _number(-1))
        elif op.opcode == "min":
            yield from (plus(a, own, -1) for a in operands)
        elif op.opcode == "max":
            yield from (plus(own, a, -1) for a in operands)
        elif op.opcode == "and" and len(operands) == 2:
            for a in operands:
                if not a[0] and a[1] >= 0:
                    yield own
                    yield plus(a, own, -1)
        elif op.opcode in ("mod", "floordiv"):
            a, b = operands
            if not (self._is_positive(b) if b[0] else b[1] > 0):
                return
            if op.opcode == "mod":
                yield own
                yield plus(plus(b, own, -1), _number(-1))
                return
            if self._is_positive(plus(a, _number(1))):
                yield own
            if not b[0]:
                yield plus(a, own, -b[1])
                yield plus(plus(own, own, b[1] - 1), plus(_number(b[1] - 1), a, -1))
            else:
                product = self._product(own, b)
                if product is not None:
                    yield plus(a, product, -1)
                    yield plus(plus(plus(product, b), _number(-1)), a, -1)
            most, divisor = self._most(a), _as_size(b)
            if most is not None and divisor is not None:
                # The quotient of the largest numerator, as checks of calls write it.
                yield plus(_of_size(floordiv(most, maximum(divisor, ONE))), own, -1)

    def _most(self, form: Linear) -> Size | None:
        """The largest value of a sum of loop indices, where their loops end at sizes."""
        total = _number(form[1])
        for atom, factor in form[0].items():
            index, sizes = _pair(atom)
            part: Linear = ({atom: 1}, 0)
            if index is not None:
                if sizes or factor < 0 or index not in self.loops:
                    return None
                part = plus(self.loops[index][1], part)
            total = plus(total, part, factor)
        return _as_size(total)

    def _is_positive(self, size: Linear) -> bool:
        """Whether a divisor is positive where the proof at hand is made."""
        key = (frozenset(size[0].items()), size[1])
        if key in self.asked:
            return False
        self.asked.add(key)
        try:
            return self._contradict([negated(plus(size, _number(-1)))], self.facts, 0)
        finally:
            self.asked.discard(key)

    @staticmethod
    def _product(own: Linear, size: Linear) -> Linear | None:
        """A value times a size."""
        ((atom, _),) = own[0].items()
        index = _pair(atom)[0]
        factors: dict[Hashable, int] = {}
        for other, factor in size[0].items():
            part, sizes = _pair(other)
            if part is not None:
                return None
            factors[index, sizes] = factor
        if size[1]:
            factors[index, ()] = size[1]
        return factors, 0

    def _cases(self, atoms: Iterable[Hashable]) -> Iterator[list[list[Linear]]]:
        """Choices that an atom stands for: one of these lists of facts holds."""
        for atom in atoms:
            index, sizes = _pair(atom)
            if index is None:
                for part in sizes:
                    if isinstance(part, SizeCall) and part.op in ("min", "max") and len(sizes) == 1:
                        yield _either(({atom: 1}, 0), _of_size(part.a), _of_size(part.b), part.op)
                continue
            value = _value(index)
            op = self.made.get(value) if value is not None else None
            if op is None or value is None or sizes:
                continue
            own: Linear = ({atom: 1}, 0)
            if op.opcode in ("min", "max") and _is_integer(value):
                yield _either(own, self.form(op.operands[0]), self.form(op.operands[1]), op.opcode)
            elif op.opcode in ("select", "if") and _is_integer(value):
                sides = op.operands[1:] if op.opcode == "select" else [r.yields[op.results.index(value)] for r in op.regions]
                yield [[*_equal(own, self.form(side)), *self.condition(op.operands[0], place == 0)] for place, side in enumerate(sides)]

    # -- forms --------------------------------------------------------------------------------------------------------

    def form(self, value: Value) -> Linear:
        found = self.linear.get(value)
        if found is None:
            found = self.linear[value] = self._form(value)
        return found

    def _form(self, value: Value) -> Linear:
        op = self.made.get(value)
        alone: Linear = ({(self.name(value), ()): 1}, 0)
        if op is None:
            return alone
        if op.opcode == "const":
            return _number(int(op.attrs["value"]))  # type: ignore[arg-type]
        if op.opcode == "size":
            size = op.attrs["value"]
            assert isinstance(size, Size)
            return _of_size(size)
        if op.opcode == "cast" and _is_integer(op.operands[0]) and _widens(op.operands[0], value):
            return self.form(op.operands[0])
        if value.type != Scalar(i64) or op.opcode not in ("add", "sub", "mul", "neg") or not all(map(self._is_bounded, op.operands)):
            return alone
        operands = [self.form(v) for v in op.operands]
        if op.opcode == "neg":
            result: Linear | None = plus(_number(0), operands[0], -1)
        elif op.opcode == "mul":
            result = _multiplied(*operands)
        else:
            result = plus(operands[0], operands[1], 1 if op.opcode == "add" else -1)
        if result is None or any(abs(f) >= _LARGE for f in (*result[0].values(), result[1])):
            return alone
        self.bounded.add(value)
        return result

    def _is_bounded(self, value: Value) -> bool:
        """Whether sums of a few such values do not wrap around."""
        if value in self.bounded:
            return True
        dtype = value.type.dtype if isinstance(value.type, Scalar) else None
        if dtype is None or not dtype.is_int:
            return False
        op = self.made.get(value)
        if op is None:
            return dtype.bits < 64
        if op.opcode == "const":
            return abs(int(op.attrs["value"])) < _LARGE  # type: ignore[arg-type]
        if op.opcode == "size" or op.opcode in _COUNTED:
            return True
        if dtype is i64 and op.opcode in ("add", "sub", "mul", "neg"):
            self.form(value)
            return value in self.bounded
        if op.opcode == "cast" and _is_integer(op.operands[0]):
            return dtype_bits(op.operands[0]) < 64 or (dtype is i64 and self._is_bounded(op.operands[0]))
        if dtype is i64 and op.opcode in ("min", "max", "mod", "floordiv"):
            return all(map(self._is_bounded, op.operands)) or (op.opcode == "mod" and self._is_bounded(op.operands[1]))
        if dtype is i64 and op.opcode in ("select", "if"):
            sides = op.operands[1:] if op.opcode == "select" else [r.yields[op.results.index(value)] for r in op.regions]
            return all(map(self._is_bounded, sides))
        return dtype.bits < 64

    def name(self, value: Value) -> Hashable:
        """Equal for values that are surely equal."""
        known = self.names.get(value)
        if known is None:
            known = self.names[value] = self._name(value)
        return known

    def _name(self, value: Value) -> Hashable:
        op = self.made.get(value)
        same = op is not None and not op.regions and len(op.results) == 1
        if op is None or not same or (op.opcode == "load" and op.operands[0] in self.written) or op.opcode == "if":
            return _Named(value, id(value))
        if op.opcode in ("const", "size"):
            return _Named(value, (op.opcode, str(op.attrs["value"]), str(value.type)))
        attrs = tuple(sorted((k, repr(v)) for k, v in op.attrs.items()))
        return _Named(value, (op.opcode, str(value.type), attrs, *(self.name(v) for v in op.operands)))


class _Named:
    """A value, equal to others that are computed alike."""

    __slots__ = ("_hash", "key", "value")

    def __init__(self, value: Value, key: Hashable) -> None:
        self.value, self.key, self._hash = value, key, hash(key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named) and (self is other or (self._hash == other._hash and self.key == other.key))

    def __hash__(self) -> int:
        return self._hash


_COUNTED = frozenset({"thread_id", "program_id", "grid_size"})
"""Ops that count threads and blocks."""
_OPPOSITE: Mapping[str, str] = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def _shown(fact: Linear) -> str:
    """An inequality, as one would write it."""
    more, less = ([(atom, abs(factor)) for atom, factor in fact[0].items() if (factor > 0) is sign] for sign in (True, False))
    left, right, constant = " + ".join(map(_term, more)), " + ".join(map(_term, less)), fact[1]
    if not left:
        return f"{right or 0} <= {constant}"
    if constant == -1 and right:
        return f"{right} < {left}"
    if not right:
        return f"{left} >= {-constant}"
    return f"{right} <= {left}" if not constant else f"{right} <= {left} {'+' if constant > 0 else '-'} {abs(constant)}"


def _term(term: tuple[Hashable, int]) -> str:
    index, sizes = _pair(term[0])
    value = _value(index)
    names = [*([value.name] if value is not None else []), *map(str, sizes)]
    return "*".join([*([str(term[1])] if term[1] != 1 else []), *names])


def _pair(atom: Hashable) -> tuple[Hashable, Monomial]:
    assert isinstance(atom, tuple)
    return atom[0], atom[1]


def _value(index: Hashable) -> Value | None:
    return index.value if isinstance(index, _Named) else None


def _number(value: int) -> Linear:
    return {}, value


def _of_size(size: Size) -> Linear:
    return {(None, monomial): factor for monomial, factor in size.terms if monomial}, sum(f for m, f in size.terms if not m)


def _as_size(form: Linear) -> Size | None:
    """What is made of sizes alone, as one."""
    total = Size.of(form[1])
    for atom, factor in form[0].items():
        index, sizes = _pair(atom)
        if index is not None:
            return None
        total = total + Size(((sizes, factor),))
    return total


def _is_plain(fact: Linear) -> bool:
    """Whether no atom has a minimum or maximum of sizes in it."""
    return not any(isinstance(part, SizeCall) and part.op in ("min", "max") for atom in fact[0] for part in _pair(atom)[1])


def _count(atom: Atom) -> Size | None:
    """The extent of `min(extent, 1)`."""
    if not isinstance(atom, SizeCall) or atom.op != "min":
        return None
    return atom.a if atom.b.constant == 1 else atom.b if atom.a.constant == 1 else None


def _without(sizes: Monomial, part: Atom) -> Monomial:
    left = list(sizes)
    left.remove(part)
    return tuple(left)


def _times(fact: Linear, sizes: Monomial) -> Iterator[Linear]:
    """A fact times a product of sizes, which is not negative."""
    if not sizes:
        yield fact
        return
    if not surely_nonnegative(Size(((sizes, 1),))):
        return
    factors: dict[Hashable, int] = {}
    for atom, factor in fact[0].items():
        index, own = _pair(atom)
        factors[index, tuple(sorted((*own, *sizes), key=str))] = factor
    if fact[1]:
        factors[None, sizes] = factors.get((None, sizes), 0) + fact[1]
    yield {atom: factor for atom, factor in factors.items() if factor}, 0


def _of_call(call: SizeCall) -> Iterator[Linear]:
    """What holds of an opaque operation on sizes."""
    own, a, b = _of_size(Size((((call,), 1),))), _of_size(call.a), _of_size(call.b)
    divisor = call.b.constant
    if call.op == "min":
        yield plus(a, own, -1)
        yield plus(b, own, -1)
    elif call.op == "max":
        yield plus(own, a, -1)
        yield plus(own, b, -1)
    elif call.op == "mod" and divisor is not None and divisor > 0:
        yield own
        yield plus(_number(divisor - 1), own, -1)
    elif call.op in ("floordiv", "ceildiv") and divisor is not None and divisor > 0:
        slack = _number(divisor - 1)
        scaled = plus(own, own, divisor - 1)
        if call.op == "floordiv":
            yield plus(a, scaled, -1)
            yield plus(plus(scaled, slack), a, -1)
        else:
            yield plus(scaled, a, -1)
            yield plus(plus(a, slack), scaled, -1)


def _equal(a: Linear, b: Linear) -> list[Linear]:
    return [plus(a, b, -1), plus(b, a, -1)]


def _either(own: Linear, a: Linear, b: Linear, op: str) -> list[list[Linear]]:
    """A minimum or maximum is one of two."""
    difference = plus(b, a, -1) if op == "min" else plus(a, b, -1)
    return [[*_equal(own, a), difference], [*_equal(own, b), plus(_number(0), difference, -1)]]


def _multiplied(a: Linear, b: Linear) -> Linear | None:
    """A product, where one of the two has no index in it."""
    for one, other in ((a, b), (b, a)):
        if any(_pair(atom)[0] is not None for atom in one[0]):
            continue
        total: Linear = _number(0)
        for atom, factor in (*one[0].items(), ((None, ()), one[1])):
            sizes = _pair(atom)[1]
            factors: dict[Hashable, int] = {}
            for place, own in other[0].items():
                index, before = _pair(place)
                factors[index, tuple(sorted((*before, *sizes), key=str))] = own
            constant = 0
            if other[1] and sizes:
                factors[None, sizes] = factors.get((None, sizes), 0) + other[1]
            elif other[1]:
                constant = other[1]
            total = plus(total, ({k: v for k, v in factors.items() if v}, constant), factor)
        return total
    return None


def _is_integer(value: Value) -> bool:
    return isinstance(value.type, Scalar) and value.type.dtype.is_int


def dtype_bits(value: Value) -> int:
    """Bits of a number."""
    assert isinstance(value.type, Scalar)
    return value.type.dtype.bits


def _widens(source: Value, result: Value) -> bool:
    """Whether a conversion between integers keeps every value."""
    assert isinstance(source.type, Scalar) and isinstance(result.type, Scalar)
    a, b = source.type.dtype, result.type.dtype
    return b.min_value <= a.min_value and a.max_value <= b.max_value
