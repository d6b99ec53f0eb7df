"""Loops of explicit kernels.

A `for` over a range is a `for` of the IR, or a `while` that counts where it can be left early; the variables its body changes are handed
from turn to turn. Loops over tuples and unrolled ranges have their body once for every item.
"""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import MappingProxyType

from tilewright.base.dtypes import i64
from tilewright.base.simd import SimdType
from tilewright.frontend.simt.flow import RESULT, RETURN, Flow
from tilewright.frontend.simt.tree import jumps, loop_number, names_outside, stored_names
from tilewright.frontend.simt.values import (
    MemoryValue,
    NumberValue,
    OpenLoop,
    Path,
    RecordValue,
    Seq,
    Simd,
    SimtState,
    Val,
    WordValue,
    describe,
    is_numbers,
    leaf_type,
    leaves,
    literal,
    rebuilt,
)
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Op, Value
from tilewright.ir.types import Scalar
from tilewright.tree.check.infer import TypePair, join

_MOST_UNROLLED = 1024


class Loops(Flow):
    """Reads loops; what stands in them is for `block` to read."""

    @abstractmethod
    def block(self, statements: Sequence[ast.stmt]) -> None:
        """Read statements in order."""

    @abstractmethod
    def store_to(self, target: ast.expr, val: Val) -> None:
        """Assign to a name, an element or several of these."""

    def _while_statement(self, node: ast.While) -> None:
        self._no_else(node)

        def condition() -> NumberValue:
            return self.truth(self.test(node.test), "the condition of a while")

        forever = isinstance(node.test, ast.Constant) and bool(node.test.value)
        self._loop(node, node.body, [node.test], condition, None, None, forever)

    def _for_statement(self, node: ast.For) -> None:
        self._no_else(node)
        iterated = node.iter
        if isinstance(iterated, ast.Call):
            called = self.read(iterated.func)
            if isinstance(called, WordValue) and called.name == "range":
                self._range_loop(node, iterated)
                return
            if isinstance(called, WordValue) and called.name in ("unrolled", "static_range"):
                self._unrolled(node, iterated, called.name)
                return
        val = self.read(iterated)
        if not isinstance(val, Seq | RecordValue):
            raise self.unsupported(
                iterated, f"a loop over {describe(val)}", "loop over range(...), tw.unrolled(range(...)) or a tuple"
            )
        self._each(node, val.items)

    def _no_else(self, node: ast.For | ast.While) -> None:
        if node.orelse:
            raise self.unsupported(node.orelse[0], "'else' of a loop", "set a flag before break and test it after the loop")

    def _bounds(self, call: ast.Call) -> tuple[NumberValue, NumberValue, NumberValue]:
        if call.keywords or not 1 <= len(call.args) <= 3:
            raise self.unsupported(
                call, f"range with {len(call.args) + len(call.keywords)} arguments", "give one to three integers"
            )
        numbers = [self.integer(self.read(a), "an argument of range") for a in call.args]
        if len(numbers) == 1:
            numbers.insert(0, literal(0))
        if len(numbers) == 2:
            numbers.append(literal(1))
        if numbers[2].const == 0:
            raise self.fail("the step of a range is 0", code="TW009")
        return numbers[0], numbers[1], numbers[2]

    def _unrolled(self, node: ast.For, call: ast.Call, word: str) -> None:
        """`for i in unrolled(range(4))`: the body four times, with a constant for i."""
        inner = call
        if word == "unrolled":
            if len(call.args) != 1 or not isinstance(call.args[0], ast.Call):
                raise self.unsupported(call, "unrolled without a range", "write tw.unrolled(range(n))")
            inner = call.args[0]
        low, high, step = (self.constant(n, "a bound of an unrolled range") for n in self._bounds(inner))
        values = range(low, high, step)
        if len(values) > _MOST_UNROLLED:
            raise self.fail(f"{len(values)} copies of a loop's body are too many", f"unroll up to {_MOST_UNROLLED}", "TW009")
        self._each(node, [literal(value) for value in values])

    def _each(self, node: ast.For, items: Sequence[Val]) -> None:
        """The body once for every item, one after the other."""
        leaving = jumps(node, own=True)
        loop = OpenLoop(loop_number(node))
        breaking, continuing = f"$break{loop.number}", f"$continue{loop.number}"

        def from_(position: int) -> None:
            if position == len(items):
                return
            self.store_to(node.target, items[position])
            self.scope.loops.append(loop)
            if self._flag(continuing) in self.types.flags:
                self.scope.variables[continuing] = literal(False)
            self.block(node.body)
            self.scope.loops.pop()
            if not leaving:
                from_(position + 1)
                return
            self.scope.dead = False
            flags = [f for f, kind in ((breaking, ast.Break), (RETURN, ast.Return)) if kind in leaving]
            self.branch(self._is_clear(flags), lambda: from_(position + 1), lambda: None)

        if self._flag(breaking) in self.types.flags:
            self.scope.variables[breaking] = literal(False)
        from_(0)
        for name in (breaking, continuing):
            self.scope.variables.pop(name, None)

    def _range_loop(self, node: ast.For, call: ast.Call) -> None:
        with self.b.at(self.span(call)):
            low, high, step = self._bounds(call)
            pair = join(join(low.pair, high.pair) or low.pair, step.pair)
            if pair is None or not pair[0].is_int:
                raise self.fail(
                    f"the bounds of a range are {low.dtype}, {high.dtype} and {step.dtype}", "convert them to one type", "TW006"
                )
            dtype, weak = pair[0], "index" if pair[1] else ""
            first, last = self.use(low, dtype), self.use(high, dtype)
            count_down = step.const is not None and step.const < 0
            if count_down:
                # Downwards: the index is counted from zero and turned round.
                size = self.b.const(-int(step.const or 1), dtype)
                more = self.b.op("sub", first, last)
                turns = self.b.op("floordiv", self.b.op("sub", self.b.add(more, size), self.b.const(1, dtype)), size)
                lo, hi, by = self.b.const(0, dtype), turns, self.b.const(1, dtype)
            else:
                lo, hi, by = first, last, self.use(step, dtype)
                if step.const is None:
                    positive = self.b.op("gt", by, self.b.const(0, dtype))
                    hi = self.b.select(positive, hi, lo)

        def index(turn: Value) -> NumberValue:
            if count_down:
                turn = self.b.op("sub", first, self.b.mul(turn, size))
            return NumberValue(dtype, weak, turn)

        early = {ast.Break, ast.Return} & jumps(node, own=True)
        if not early:
            self._loop(node, node.body, [node.target], None, (lo, hi, by), lambda turn: self.store_to(node.target, index(turn)))
            return
        # Left early: a `while` that counts.
        counter = f"$turn{loop_number(node)}"
        self.scope.variables[counter] = self.num(lo)

        def condition() -> NumberValue:
            turn = self.scope.variables[counter]
            assert isinstance(turn, NumberValue)
            return self.num(self.b.op("lt", self.use(turn), hi))

        def begin(_: Value) -> None:
            turn = self.scope.variables[counter]
            assert isinstance(turn, NumberValue)
            value = self.use(turn)
            self.scope.variables[counter] = self.num(self.b.add(value, by))
            self.store_to(node.target, index(value))

        self._loop(node, node.body, [node.target], condition, None, begin, counter=counter)
        self.scope.variables.pop(counter, None)

    def _loop(
        self, node: ast.For | ast.While, body: Sequence[ast.stmt], heads: Sequence[ast.expr], condition: Callable[[], NumberValue] | None,
        bounds: tuple[Value, Value, Value] | None, begin: Callable[[Value], None] | None, forever: bool = False, counter: str = "",
    ) -> None:  # fmt: skip
        """A `for` over `bounds`, or a `while` of `condition`. `begin` stands before the body."""
        scope, types = self.scope, self.types
        loop = OpenLoop(loop_number(node))
        leaving = jumps(node, own=True)
        breaking, continuing = f"$break{loop.number}", f"$continue{loop.number}"
        stops = [name for name, kind in ((breaking, ast.Break), (RETURN, ast.Return)) if kind in leaving]
        for name in (breaking, continuing, RETURN):
            if self._flag(name) in types.flags and (name != RETURN or name not in scope.variables):
                scope.variables[name] = literal(False)
        before = scope.save()
        names = self._carried(node, [*body, *heads], [counter] if counter else [], [*stops, breaking, continuing])
        forms = {name: self._carried_form(name, before) for name in names}
        slots = [
            (name, path, self._slot_pair(name, path, number)) for name, form in forms.items() for path, number in leaves(form)
        ]
        initial = [self._leaf(before.variables.get(name), path, pair, self.b) for name, path, pair in slots]

        def enter(values: Sequence[Value]) -> None:
            incoming = iter(
                NumberValue(pair[0], "index" if pair[1] == "int" else pair[1], value)
                for (_, _, pair), value in zip(slots, values, strict=True)
            )
            for name, form in forms.items():
                scope.variables[name] = rebuilt(form, incoming)
            scope.missing = set(before.missing) | {name for name in forms if name not in before.variables}

        def leave(builder: Builder) -> list[Value]:
            return [self._leaf(scope.variables.get(name), path, pair, builder) for name, path, pair in slots]

        def arguments() -> tuple[Value, ...]:
            return tuple(Value(leaf_type(path, pair[0]), name if not name.startswith("$") else "") for name, path, pair in slots)

        tested: Block | None = None
        if condition is not None:
            own = arguments()
            enter(own)
            with self.inside() as builder:
                wanted = condition
                test = self.both(lambda: self._is_clear(stops), wanted, True) if stops else wanted()
                builder.multi("yield", self.use(test), *leave(builder))
            tested = Block(own, tuple(builder.ops))
        own = arguments()
        turn = Value(bounds[0].type, "i") if bounds is not None else None
        enter(own)
        scope.loops.append(loop)
        with self.inside() as builder:
            if self._flag(continuing) in types.flags:
                scope.variables[continuing] = literal(False)
            if begin is not None:
                begin(turn if turn is not None else Value(Scalar(i64)))
            self.block(body)
            self._same_arrays(before, body)
            builder.multi("yield", *leave(builder))
        scope.loops.pop()
        region = Block((turn, *own) if turn is not None else own, tuple(builder.ops))
        results = arguments()
        if bounds is not None:
            op = Op("for", (*bounds, *initial), results, MappingProxyType({}), (region,), self.b.span)
        else:
            assert tested is not None
            op = Op("while", tuple(initial), results, MappingProxyType({}), (tested, region), self.b.span)
        self.b.append(op)
        scope.restore(before)
        enter(results)
        for name in (breaking, continuing):
            scope.variables.pop(name, None)
        self._after_loop(forms, before, loop, forever)
        if forever and not loop.left and ast.Return in leaving:
            scope.dead = True

    def _same_arrays(self, before: SimtState, body: Sequence[ast.stmt]) -> None:
        """Arrays cannot be handed from turn to turn: a name that stood for one must still do so."""
        for name in sorted(set().union(*(stored_names(part) for part in body))):
            known, now = before.variables.get(name), self.scope.variables.get(name)
            if isinstance(known, MemoryValue) and now != known:
                raise self.error(
                    "TW005", f"'{name}' stands for the array '{known.name}' and changes inside a loop", self.b.span,
                    "choose between elements, or write the loop's body twice",
                )  # fmt: skip

    def _after_loop(self, forms: dict[str, Val], before: SimtState, loop: OpenLoop, forever: bool) -> None:
        """Which of the loop's variables are sure to have a value now."""
        sure = frozenset.intersection(*loop.left) if forever and loop.left else frozenset()
        for name in forms:
            had = name in before.variables and name not in before.missing
            if had or name in sure or name.startswith("$"):
                self.scope.missing.discard(name)
            else:
                self.scope.missing.add(name)

    def _carried(self, node: ast.For | ast.While, parts: Sequence[ast.AST], own: list[str], flags: list[str]) -> list[str]:
        """The variables a loop changes that somebody looks at later: in the next turn, or after it."""
        stored = set().union(*(stored_names(part) for part in parts))
        outside = names_outside(self.scope.node or self.scope.source.node, node)
        found = own + [n for n in flags if self._flag(n) in self.types.flags and not n.startswith("$continue")]
        if ast.Return in jumps(node, own=True) and self.calls:
            found.append(RESULT)
        for name in sorted(stored):
            val = self.scope.variables.get(name)
            if val is not None and not is_numbers(val):
                continue
            if val is not None or (name in outside and self._known(name)):
                found.append(name)
        return list(dict.fromkeys(n for n in found if n in self.scope.variables or n in stored or self._known(n)))

    def _known(self, name: str) -> bool:
        return any(key[: len(self.scope.key) + 1] == (*self.scope.key, name) for key in self.types.pairs)

    def _carried_form(self, name: str, before: SimtState) -> Val:
        found = before.variables.get(name)
        if found is not None:
            return found
        prefix = (*self.scope.key, name)
        paths = sorted(key[len(prefix) :] for key in self.types.pairs if key[: len(prefix)] == prefix)
        return _form_of_paths(paths, lambda path: NumberValue(*self.types.pairs[(*prefix, *path)]))

    def _slot_pair(self, name: str, path: Path, number: NumberValue) -> TypePair:
        if name.startswith("$turn"):
            return number.pair
        return self._pair_of(name, path, number.pair)


def _form_of_paths(paths: Sequence[tuple[object, ...]], leaf: Callable[[tuple[object, ...]], NumberValue]) -> Val:
    if paths == [()]:
        return leaf(())
    if isinstance(paths[0][0], SimdType):
        return Simd(paths[0][0], leaf(paths[0]))
    count = 1 + max(path[0] for path in paths)  # type: ignore[type-var, operator]
    return Seq(tuple(
        _form_of_paths([p[1:] for p in paths if p[0] == i], lambda path, i=i: leaf((i, *path))) for i in range(count)  # type: ignore[misc]
    ))  # fmt: skip
