"""Whole numbers of a call in extents, loop bounds and steps: sizes that the call computes before it launches anything.

In come sizes made of parameters (`length$int + 2*padding$int`) and of axes. Out come names that stand for them (`n$size`), which are never negative, so
that all that follows takes them for extents of arrays, and the checks that make this true. Two expressions that are the same have one name.

    n = (len(x) - k) // stride + 1          n$size = max(floordiv(x$0 - k$int, stride$int) + 1, 0)
    out = tw.empty((n,), x.dtype)     ->    check 0 le floordiv(x$0 - k$int, stride$int) + 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilewright.base.intervals import clamped
from tilewright.base.sizes import (
    ONE,
    ZERO,
    Size,
    SizeCall,
    computed_name,
    has_numbers,
    is_number,
    maximum,
    number_name,
    size_text,
)
from tilewright.base.source import Span
from tilewright.tree.check.context import Context
from tilewright.tree.check.state import ComputedSize
from tilewright.tree.typed import ScalarInfo, SizeValue

Require = Callable[[Size, str, Size, str, Span], None]


class NumberSizes:
    """Knows the sizes of this kernel that calls compute."""

    def __init__(self, context: Context, require: Require) -> None:
        self.context = context
        self.require = require

    def parameter(self, scalar: ScalarInfo, span: Span) -> SizeValue:
        """The value of a plain whole number that the call gives."""
        return self.value(Size.of(number_name(scalar.name)), span)

    def value(self, size: Size, span: Span) -> SizeValue:
        """A size as a value: by the name it has, where a check makes sure that it is one."""
        known = self.context.state.computed.get(self._canonical(size)) if has_numbers(size) else None
        return SizeValue(Size.of(known.name) if known is not None and known.checked else size, span=span)

    def extent(self, size: Size, title: str, span: Span, least: int = 0) -> Size:
        """The size as an extent or a step, which calls refuse where it is below `least`."""
        return self._computed(size, title, span, True, least) if has_numbers(size) else size

    def count(self, size: Size, title: str, span: Span) -> Size:
        """How often a loop turns: not at all where the size is negative."""
        return self._computed(size, title, span, False, 0) if has_numbers(size) else clamped(size)

    def decide(self, *sizes: Size) -> bool:
        """Whether calls look at all numbers in the sizes anyway. A number that is only an index is not one of them: a call with another one is the same call."""
        shaping = {name for key in self.context.state.computed for name in key.names}
        return all(name in shaping for size in sizes for name in size.names if is_number(name))

    def _computed(self, size: Size, title: str, span: Span, checked: bool, least: int) -> Size:
        state, key = self.context.state, self._canonical(size)
        if not has_numbers(key):
            return clamped(key)
        known = state.computed.get(key)
        if known is None:
            taken = {c.name for c in state.computed.values()}
            name, number = computed_name(title or "extent"), 0
            while name in taken:
                number += 1
                name = computed_name(f"{title or 'extent'}{number}")
            known = ComputedSize(name, span)
            state.computed[key], state.changed = known, True
        if checked and not (known.checked and known.least >= least):
            known.checked, known.least, known.span, state.changed = True, max(least, known.least), span, True
        return Size.of(known.name)

    def _canonical(self, size: Size) -> Size:
        """The size in the names of parameters and axes alone."""
        state = self.context.state
        names = {c.name: key for key, c in state.computed.items() if c.checked}
        return state.solution.raw(size.substitute(names))

    # -- what the kernel hands on -------------------------------------------------------------------------------------

    def finish(self) -> tuple[tuple[str, Size], ...]:
        """All that calls compute, in the names of the solution. Adds the checks of what must not be negative."""
        found: list[tuple[str, Size]] = []
        for key, computed in self.context.state.computed.items():
            if self._canonical(key) != key:
                continue  # of an earlier walk, which knew less of sizes
            size = key.substitute(self.context.state.solution.sizes)
            text = size_text(size)
            for divisor in _divisors(size):
                message = f"{text} divides by {size_text(divisor)}, which is 0" + " ({values})"
                self.require(ONE, "le", maximum(divisor, -divisor), message, computed.span)
            if computed.checked:
                what = "the step of a loop" if computed.least else "an extent"
                bound = f"less than {computed.least}" if computed.least else "negative"
                self.require(Size.of(computed.least), "le", size, f"{what} cannot be {bound}: {text} is {{right}} ({{values}})", computed.span)
            found.append((computed.name, maximum(size, ZERO)))
        return tuple(found)


def _divisors(size: Size) -> Iterator[Size]:
    """What a size is divided by that may be 0 at a call."""
    for monomial, _ in size.terms:
        for atom in monomial:
            if isinstance(atom, SizeCall):
                yield from _divisors(atom.a)
                yield from _divisors(atom.b)
                if atom.op in ("floordiv", "ceildiv", "mod") and atom.b.constant is None:
                    yield atom.b
