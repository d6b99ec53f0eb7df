"""Variables and branches of explicit kernels: what `if` hands on, and flags that say that a loop or the function was left.

A variable is a value, or several side by side; `branch` reads both ways from the same state and makes results of what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType

from tilewright.base.dtypes import bool_
from tilewright.frontend.simt.expressions import ExpressionBuilder
from tilewright.frontend.simt.numbers import meet
from tilewright.frontend.simt.state import Key
from tilewright.frontend.simt.values import (
    MemoryValue,
    NumberValue,
    Path,
    RecordValue,
    Seq,
    Simd,
    SimtState,
    Val,
    describe,
    is_numbers,
    leaf_type,
    leaves,
    literal,
    rebuilt,
)
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Op, Value
from tilewright.ir.types import Vec
from tilewright.tree.check.infer import TypePair

RETURN, RESULT = "$return", "$result"


class Flow(ExpressionBuilder):
    """Keeps variables through control flow."""

    # -- variables ------------------------------------------------------------------------------------------------

    def assign(self, name: str, val: Val) -> Val:
        """Give a variable a value, in the type all its assignments meet in."""
        if not is_numbers(val):
            self.scope.variables[name] = val
        else:
            numbers = [self._settle(name, path, number) for path, number in leaves(val)]
            self.scope.variables[name] = val = rebuilt(val, iter(numbers))
        self.scope.missing.discard(name)
        return val

    def _settle(self, name: str, path: Path, number: NumberValue) -> NumberValue:
        return self.as_pair(number, self._learn(name, path, number.pair))

    def _learn(self, name: str, path: Path, pair: TypePair) -> TypePair:
        """The type of a variable, after another assignment."""
        key: Key = (*self.scope.key, name, *path)
        known = self.types.pairs.get(key)
        met = pair if known is None or known == pair else meet(known, pair)
        if met is None:
            assert known is not None
            raise self.fail(
                f"'{name}' is {known[0]} at one place and {pair[0]} here",
                f"convert the value, for instance with tw.{known[0]}(...)",
                "TW006",
            )
        if met != known:
            self.types.pairs[key] = met
            self.types.changed |= known is not None
        return met

    def _flag(self, name: str) -> Key:
        return (*self.scope.key, name)

    def _raise_flag(self, name: str) -> None:
        if self._flag(name) in self.types.flags:
            self.scope.variables[name] = literal(True)

    def _is_clear(self, names: Iterable[str]) -> NumberValue:
        """Whether none of these flags is raised."""
        result = literal(True)
        for name in names:
            self.types.read_flag(self._flag(name))
            flag = self.scope.variables.get(name, literal(False))
            assert isinstance(flag, NumberValue)
            clear = self.negation(flag)
            result = self.both(lambda r=result: r, lambda c=clear: c, True)  # type: ignore[misc]
        return result

    # -- branches --------------------------------------------------------------------------------------------------

    def branch(self, condition: NumberValue, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """Both ways, and what variables are after them."""
        if condition.const is not None:
            (then if condition.const else otherwise)()
            return
        test = self.use(condition)
        before = self.scope.save()
        ways: list[tuple[SimtState, Builder]] = []
        for body in (then, otherwise):
            self.scope.restore(before)
            with self.inside() as builder:
                body()
            ways.append((self.scope.save(), builder))
        results = self._merge(before, ways)
        blocks = tuple(Block((), tuple(builder.ops)) for _, builder in ways)
        self.b.append(Op("if", (test,), tuple(results), MappingProxyType({}), blocks, self.b.span))

    def _merge(self, before: SimtState, ways: list[tuple[SimtState, Builder]]) -> list[Value]:
        """End both builders with what the branches hand on; the scope then has the results."""
        (one, first), (other, second) = ways
        yields: tuple[list[Value], list[Value]] = ([], [])
        results: list[Value] = []
        scope = self.scope
        scope.restore(before)
        scope.dead = one.dead and other.dead
        alive = [state for state, _ in ways if not state.dead] or [one, other]
        for name in dict.fromkeys((*one.variables, *other.variables)):
            a, b = one.variables.get(name), other.variables.get(name)
            if any(name not in state.variables or name in state.missing for state in alive):
                scope.missing.add(name)
            else:
                scope.missing.discard(name)
            if a is b or a == b:
                assert a is not None
                scope.variables[name] = a
                continue
            form = self._common_form(name, a, b)
            if form is None:
                # Arrays and functions are what they are on the way that has them.
                live = [state.variables.get(name) for state in alive]
                found = live[0] if len(alive) == 1 else None
                if found is not None:
                    scope.variables[name] = found
                elif isinstance(a, MemoryValue) and isinstance(b, MemoryValue):
                    raise self.fail(
                        f"'{name}' stands for '{a.name}' on one way and for '{b.name}' on the other",
                        "choose between elements: x[i] if c else y[i]",
                    )
                elif name in scope.variables:
                    del scope.variables[name]
                continue
            numbers: list[NumberValue] = []
            for path, shown in leaves(form):
                pair = self._pair_of(name, path, shown.pair)
                result = Value(leaf_type(path, pair[0]), name if not name.startswith("$") else "")
                for val, builder, out in ((a, first, yields[0]), (b, second, yields[1])):
                    out.append(self._leaf(val, path, pair, builder))
                results.append(result)
                numbers.append(NumberValue(pair[0], "index" if pair[1] == "int" else pair[1], result))
            scope.variables[name] = rebuilt(form, iter(numbers))
        first.multi("yield", *yields[0])
        second.multi("yield", *yields[1])
        return results

    def _common_form(self, name: str, a: Val | None, b: Val | None) -> Val | None:
        """What a variable looks like after two ways: numbers of the same form; None where it cannot be carried."""
        form = a if a is not None else b
        assert form is not None
        for val in (a, b):
            if val is not None and not is_numbers(val):
                return None
        if a is not None and b is not None and _form(a) != _form(b):
            raise self.fail(f"'{name}' is {describe(a)} on one way and {describe(b)} on the other", code="TW009")
        return form

    def _pair_of(self, name: str, path: Path, pair: TypePair) -> TypePair:
        if name.startswith("$") and name != RESULT:
            return bool_, ""
        return self.types.pairs.get((*self.scope.key, name, *path), pair)

    def _leaf(self, val: Val | None, path: Path, pair: TypePair, builder: Builder) -> Value:
        """A number of a variable in its type, made at the end of a builder; zero where there is none."""
        outer, self.b = self.b, builder
        try:
            if val is None:
                type_, zero = leaf_type(path, pair[0]), self.b.const(0, pair[0])
                return self.b.op("broadcast", zero, width=type_.width) if isinstance(type_, Vec) else zero
            return self.use(self.as_pair(dict(leaves(val))[path], pair))
        finally:
            self.b = outer


def _form(val: Val) -> object:
    """How a value is made of numbers."""
    if isinstance(val, RecordValue):
        return val.kind, *map(_form, val.items)
    if isinstance(val, Simd):
        return val.kind
    return tuple(map(_form, val.items)) if isinstance(val, Seq) else None
