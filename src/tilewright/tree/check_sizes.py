"""Checking sizes: which are equal, what an access of an array tells about them, and whether it stays inside.

In come typed indices and shapes; out go equations of sizes for the next walk, errors, and checks that only a call can decide. This is the base of
the checker: it knows the loops around and the sizes found so far.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tilewright.base.errors import Diagnostics
from tilewright.base.sizes import ONE, ZERO, Call, Size, minimum
from tilewright.base.source import Span
from tilewright.tree.bounds import affine, interval, surely_negative, surely_nonnegative, surely_positive
from tilewright.tree.check_state import Scope, State
from tilewright.tree.infer import Typing, default_float, size_of
from tilewright.tree.typed import ArrayInfo, Expr, IndexRef, LoopVar, Shape, SizeCheck
from tilewright.tree.typed_text import show_expr


class SizeChecker(Typing, ABC):
    """Knows the sizes of the place it is at."""

    def __init__(self, flavour: str, state: State, sink: Diagnostics) -> None:
        super().__init__(sink, default_float(flavour))
        self.flavour = flavour
        self.state = state
        self.scope = Scope()
        self.loops: list[LoopVar] = []
        self.guarded = 0
        """Conditions around the current place: an access there may not happen."""
        self.checks: dict[tuple[Size, str, Size], SizeCheck] = {}
        self.inputs: dict[str, ArrayInfo] = {}
        self.ranges: dict[str, dict[Size | None, Span]] = {}
        """For each input axis, the ranges of the bare indices it was read with (None: another index)."""

    @property
    def is_python(self) -> bool:
        return self.flavour == "kernel"

    # -- what is equal ------------------------------------------------------------------------------------------------

    def equal(self, a: str, b: str) -> None:
        if a != b:
            self.state.equations.same[a, b] = None

    def raw_name(self, size: Size) -> str | None:
        return self.state.solution.raw(size).name

    def require(self, left: Size, relation: str, right: Size, message: str, span: Span, code: str = "TW004") -> None:
        """Something that must hold at calls."""
        self.checks.setdefault((left, relation, right), SizeCheck(left, relation, right, message, code, span=span))

    def broadcast(self, shapes: Sequence[Shape], span: Span) -> Shape:
        """Shapes meet from the last axis on; an extent of 1 repeats, others must be equal."""
        result: list[Size] = []
        for axis in range(1, max((len(s) for s in shapes), default=0) + 1):
            met = ONE
            for shape in shapes:
                if axis > len(shape) or shape[-axis] == ONE or shape[-axis] == met:
                    continue
                if met != ONE:
                    self.make_equal(met, shape[-axis], span)
                else:
                    met = shape[-axis]
            result.append(met)
        return tuple(reversed(result))

    def make_equal(self, a: Size, b: Size, span: Span) -> None:
        """Two extents of one operation must be the same: so they are, or calls check it."""
        left, right = self.state.solution.raw(a), self.state.solution.raw(b)
        if a == b:
            return
        if a.constant is not None and b.constant is not None:
            raise self.fail("TW004", f"extents {a} and {b} do not match", span)
        if left.name is not None and right.name is not None:
            self.equal(left.name, right.name)
        elif left.name is not None:
            self.state.equations.defined.setdefault((left.name, right), span)
        elif right.name is not None:
            self.state.equations.defined.setdefault((right.name, left), span)
        else:
            self.require(a, "eq", b, "extents {left} and {right} do not match", span)

    # -- accesses -----------------------------------------------------------------------------------------------------

    def learn(self, array: ArrayInfo, values: Sequence[Expr], span: Span, write: bool = False) -> None:
        for axis, value in enumerate(values):
            if array.role == "input":
                self.bind(array, axis, value, span)
            elif not write:
                self.bind_made(array, axis, value, span)
            if not self.guarded:
                self.stay_inside(array, axis, value, span, write)

    @abstractmethod
    def bind_made(self, array: ArrayInfo, axis: int, value: Expr, span: Span) -> None:
        """What a reading access tells about sizes, where the array is one that blocks pass on."""

    def bind(self, array: ArrayInfo, axis: int, value: Expr, span: Span) -> None:
        """What an access tells about the extent of an input's axis."""
        own = f"{array.name}${axis}"
        equations, linear = self.state.equations, affine(value)
        bare = linear.bare if linear is not None else None
        full = bare.full if bare is not None else None
        name = self.raw_name(full) if full is not None else None
        if name is not None and not self.guarded:
            self.equal(own, name)
        elif name is not None:
            equations.perhaps[name, Size.of(own)] = None
        elif bare is not None and bare.step != ONE:
            # `x[i]` with i in 0..n step 2, or in n-1..-1 step -1: n is the extent unless something else says what it is.
            last = bare.first + 1 if bare.step.constant == -1 and bare.first is not None else size_of(bare.hi)
            stop = self.raw_name(last) if last is not None else None
            if stop is not None and not self.is_python:
                equations.perhaps[stop, Size.of(own)] = None
        elif linear is not None and len(linear.terms) == 1:
            # `2*d` and `2*d + 1` with d in 0..head_dim/2 run over an axis of head_dim.
            ((var, factor),) = linear.terms
            whole = _numerator(var.full)
            scale, offset = factor.constant, linear.offset.constant
            if whole is not None and whole[1] == scale and offset is not None and 0 <= offset < scale:
                inner = self.raw_name(whole[0])
                if inner is not None:
                    equations.perhaps[inner, Size.of(own)] = None
        if not self.guarded:
            known = full if full is not None and full.constant is None else None
            self.ranges.setdefault(own, {}).setdefault(known, span)

    def stay_inside(self, array: ArrayInfo, axis: int, value: Expr, span: Span, write: bool = False) -> None:
        """Prove that an index stays inside its axis, or leave it to a check at calls."""
        extent = array.shape[axis]
        if isinstance(value, IndexRef) and value.var.full == extent:
            return
        reach = interval(value)
        if reach is None:
            return
        low, high = reach
        spare = extent - high - 1
        text = show_expr(value)
        if not self.implicit(array, write):
            if surely_negative(spare):
                raise self.fail("TW013", f"index {text} of '{array.name}' reaches {_size_text(high)}, but axis {axis} has extent {_size_text(extent)}", span)
            if not surely_nonnegative(spare):
                left = self.when_reached(high + 1, spare) - 1
                message = f"index {text} of '{array.name}' reaches {{left}}, but axis {axis} has extent {{right}}"
                self.require(left, "lt", extent, message, span, "TW013")
        if surely_negative(low):
            raise self.fail("TW013", f"index {text} of '{array.name}' goes down to {_size_text(low)} on axis {axis}", span)
        if not surely_nonnegative(low):
            message = f"index {text} of '{array.name}' goes down to {{right}} on axis {axis}"
            self.require(ZERO, "le", self.when_reached(low, low), message, span, "TW013")

    @abstractmethod
    def implicit(self, array: ArrayInfo, write: bool = True) -> bool:
        """Whether the array is as large as its accesses make it; those it is read with do not count where blocks pass it on."""

    def when_reached(self, size: Size, spare: Size) -> Size:
        """The size, or 0 when a loop around has no iterations (unless `spare` is fine then anyway)."""
        for var in self.loops:
            if var.count is None or surely_positive(var.count):
                continue
            if var.count.name is not None and surely_nonnegative(spare.substitute({var.count.name: ZERO})):
                continue
            size = size * minimum(var.count, ONE)
        return size

    def not_empty(self, kind: str, extents: Sequence[Size], outer: Sequence[Size], span: Span) -> None:
        """argmin and argmax of nothing have no answer."""
        reached = ONE
        for extent in outer:
            if not surely_positive(extent):
                reached = reached * minimum(extent, ONE)
        for extent in extents:
            if not surely_positive(extent):
                self.require(reached, "le", extent, f"{kind} of an empty axis", span)


def _size_text(size: Size) -> str:
    """A size as a message names it: an axis nobody named is `x.shape[0]`."""
    return re.sub(r"([\w.]+)\$(\d+)", r"\1.shape[\2]", str(size))


def _numerator(size: Size | None) -> tuple[Size, int] | None:
    """`floordiv(a, c)` as (a, c)."""
    if size is None or len(size.terms) != 1 or size.terms[0][1] != 1 or len(size.terms[0][0]) != 1:
        return None
    atom = size.terms[0][0][0]
    if not isinstance(atom, Call) or atom.op != "floordiv" or atom.b.constant is None:
        return None
    return atom.a, atom.b.constant
