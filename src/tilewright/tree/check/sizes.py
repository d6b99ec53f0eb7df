"""Checking sizes: which are equal, what an access of an array tells about them, and whether it stays inside.

In come typed indices and shapes; out go equations of sizes for the next walk, errors, and checks that only a call can decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.base.intervals import surely_negative, surely_nonnegative, surely_positive
from tilewright.base.sizes import ONE, ZERO, Size, SizeCall, has_numbers, is_computed, is_number, minimum, readable
from tilewright.base.source import Span
from tilewright.tree.bounds import affine, bound_by, interval
from tilewright.tree.check.context import Context
from tilewright.tree.check.infer import constant_of, size_of
from tilewright.tree.check.numbers import NumberSizes
from tilewright.tree.check.state import WalkAgain
from tilewright.tree.names import is_output
from tilewright.tree.typed import Apply, ArrayInfo, Expr, IndexRef, LoopVar, Shape, SizeCheck, SizeValue
from tilewright.tree.typed_text import show_expr
from tilewright.tree.typed_walk import walk_expr

_RELATIONS = {"eq": ("eq", False), "lt": ("lt", False), "le": ("le", False), "gt": ("lt", True), "ge": ("le", True)}
"""Comparisons, as calls check them: the relation, and whether the sides change places."""


class SizeChecker:
    """Knows what this walk found out about sizes."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.numbers = NumberSizes(context, self.require)
        self.checks: dict[tuple[Size, str, Size], SizeCheck] = {}
        """What must hold at calls."""
        self.ranges: dict[str, dict[Size | None, Span]] = {}
        """For each input axis, the ranges of the bare indices it was read with (None: another index)."""

    # -- what is equal ------------------------------------------------------------------------------------------------

    def equal(self, a: str, b: str) -> None:
        """Two names mean one size."""
        if a != b:
            self.context.state.equations.same[a, b] = None

    def raw_name(self, size: Size) -> str | None:
        """The name a size has in the equations, where it is just a name."""
        return self.context.state.solution.raw(size).name

    def call_sizes(self, names: Sequence[str], items: Sequence[Expr]) -> None:
        """A Python variable that holds one size gives it its name."""
        for name, item in zip(names, items, strict=False):
            raw = self.raw_name(item.size) if isinstance(item, SizeValue) else None
            if self.context.is_python and raw is not None and not is_number(raw) and not is_computed(raw):
                self.context.state.equations.calls[raw, name] = None

    def require(self, left: Size, relation: str, right: Size, message: str, span: Span, code: str = "TW004") -> None:
        """Something that must hold at calls."""
        self.checks.setdefault((left, relation, right), SizeCheck(left, relation, right, message, code, span=span))

    def asserted(self, cond: Expr, text: str, span: Span) -> bool:
        """Whether a condition compares sizes, so that calls check it before anything runs."""
        parts = _conjuncts(cond)
        sides = [tuple(map(size_of, part.args)) if isinstance(part, Apply) and part.op in _RELATIONS else () for part in parts]
        if not all(side and None not in side for side in sides):
            return False
        if any(name.startswith("?") for side in sides for size in side if size is not None for name in size.names):
            return False  # a size that is known only when the kernel runs
        for part, side in zip(parts, sides, strict=True):
            assert isinstance(part, Apply)
            relation, turned = _RELATIONS[part.op]
            left, right = reversed(side) if turned else side
            assert left is not None and right is not None
            values = " ({values})" if left.names or right.names else ""
            self.require(left, relation, right, f"assertion failed: {text}{values}", span, "TW037")
        return True

    def broadcast(self, shapes: Sequence[Shape], span: Span) -> Shape:
        """Shapes meet from the last axis on; an extent of 1 repeats, others must be equal."""
        result: list[Size] = []
        for axis in range(1, max((len(s) for s in shapes), default=0) + 1):
            met = ONE
            for shape in shapes:
                if axis > len(shape) or shape[-axis] == ONE or shape[-axis] == met:
                    continue
                if met != ONE:
                    self.meet(met, shape[-axis])
                    self.make_equal(met, shape[-axis], span)
                else:
                    met = shape[-axis]
            result.append(met)
        return tuple(reversed(result))

    def meet(self, *extents: Size) -> None:
        """Extents of one operation: at calls where one is 1 it repeats."""
        self.context.state.met.update(name for extent in extents if (name := self.raw_name(extent)) is not None)

    def known(self, extent: Size, span: Span) -> None:
        """An extent must be one that is known before the kernel runs."""
        if any(name.startswith("?") for name in extent.names):
            raise self.context.fail(
                "TW014", "how many elements the mask selects is known only when the kernel runs", span,
                "reduce it, as in tw.sum(x[mask]), choose with tw.where(mask, x, other), or filter outside of the kernel with tw.gpu_filter",
            )  # fmt: skip

    def make_equal(self, a: Size, b: Size, span: Span) -> None:
        """Two extents of one operation must be the same: so they are, or calls check it."""
        left, right = self.context.state.solution.raw(a), self.context.state.solution.raw(b)
        if a == b:
            return
        if any(name.startswith("?") for name in (*a.names, *b.names)):
            raise self.context.fail(
                "TW004", "elements that a mask selects meet an array, and how many they are is known only when the kernel runs", span,
                "select from both operands with the same mask: x[m] * y[m]",
            )  # fmt: skip
        if _of_call(a) or _of_call(b):
            name, other = (left.name, right) if _of_call(b) else (right.name, left)
            if name is not None and "$" not in name and not has_numbers(other):
                # A name that stands for a size, as in ZynML: it is that one.
                self.context.state.equations.defined.setdefault((name, other), span)
                return
            self.require(a, "eq", b, "extents {left} and {right} do not match", span)
            return
        if a.constant is not None and b.constant is not None:
            raise self.context.fail("TW004", f"extents {a} and {b} do not match", span)
        if left.name is not None and right.name is not None:
            self.equal(left.name, right.name)
        elif left.name is not None:
            self.context.state.equations.defined.setdefault((left.name, right), span)
        elif right.name is not None:
            self.context.state.equations.defined.setdefault((right.name, left), span)
        else:
            self.require(a, "eq", b, "extents {left} and {right} do not match", span)

    # -- accesses -----------------------------------------------------------------------------------------------------

    def learn(self, array: ArrayInfo, values: Sequence[Expr], span: Span, write: bool = False) -> None:
        """What an access tells about sizes, and whether it stays inside."""
        for axis, value in enumerate(values):
            self.learn_axis(array, axis, value, span, write)

    def learn_axis(self, array: ArrayInfo, axis: int, value: Expr, span: Span, write: bool = False) -> None:
        if array.role == "input":
            self.bind(array, axis, value, span)
        elif array.role == "inout":
            self.bind_in_place(array, axis, value)
        elif not write:
            self.bind_made(array, axis, value, span)
        if not self.context.trusts(value, reach=True):
            self.stay_inside(array, axis, value, span, write)

    def bind(self, array: ArrayInfo, axis: int, value: Expr, span: Span) -> None:
        """What an access tells about the extent of an input's axis."""
        axis_name = f"{array.name}${axis}"
        equations, linear = self.context.state.equations, affine(value)
        bare = linear.bare if linear is not None else None
        full = bare.full if bare is not None else None
        name = self.raw_name(full) if full is not None and not _of_call(full) else None
        if name is not None and (axis_name in self.context.state.longer or self.told_apart(array, axis_name, name)):
            pass
        elif name is not None and not self.context.trusts(value):
            if name != axis_name:
                self.context.state.bound_whole.add(axis_name)
            self.equal(axis_name, name)
        elif name is not None:
            equations.perhaps[name, Size.of(axis_name)] = None
        elif bare is not None and bare.step != ONE:
            # `x[i]` with i in 0..n step 2, or in n-1..-1 step -1: n is the extent unless something else says what it is.
            last = bare.first + 1 if bare.step.constant == -1 and bare.first is not None else size_of(bare.hi)
            stop = self.raw_name(last) if last is not None else None
            if stop is not None and not self.context.is_python:
                equations.perhaps[stop, Size.of(axis_name)] = None
        elif linear is not None and len(linear.factors) == 1:
            # `2*d` and `2*d + 1` with d in 0..head_dim/2 run over an axis of head_dim.
            ((var, factor),) = linear.factors
            quotient = _numerator(var.full)
            scale, offset = factor.constant, linear.constant.constant
            if quotient is not None and quotient[1] == scale and offset is not None and 0 <= offset < scale:
                inner = self.raw_name(quotient[0])
                if inner is not None:
                    equations.perhaps[inner, Size.of(axis_name)] = None
        if not self.context.trusts(value):
            known = full if full is not None and full.constant is None and not _of_call(full) else None
            self.ranges.setdefault(axis_name, {}).setdefault(known, span)

    def told_apart(self, array: ArrayInfo, axis_name: str, name: str) -> bool:
        """Whether two names are axes of one array that the user gave names of their own: `a[k, k]` after `m, n = a.shape` does not say that it is square."""
        if not self.context.is_python or name == axis_name or not name.startswith(f"{array.name}$"):
            return False
        titles = [{title for raw, title in self.context.state.equations.calls if raw == axis} for axis in (axis_name, name)]
        return bool(titles[0] and titles[1]) and not titles[0] & titles[1]

    def bind_in_place(self, array: ArrayInfo, axis: int, value: Expr) -> None:
        """An array that is written in place may be longer than a loop that walks over it. In ZynML it still says what a size is that nothing else
        gives a value."""
        linear = affine(value)
        full = linear.bare.full if linear is not None and linear.bare is not None else None
        name = self.raw_name(full) if full is not None else None
        if name is not None and not self.context.is_python:
            self.context.state.equations.perhaps[name, Size.of(f"{array.name}${axis}")] = None

    def stay_inside(self, array: ArrayInfo, axis: int, value: Expr, span: Span, write: bool = False) -> None:
        """Prove that an index stays inside its axis, or leave it to a check at calls."""
        extent = array.shape[axis]
        if isinstance(value, IndexRef) and value.var.full == extent:
            return
        reach = interval(value) if self.is_exact(value) else None
        if reach is None:
            return
        low, high = reach.low, reach.high
        if not self.numbers.decide(low, high):
            return  # a place that the call names: found when the kernel runs
        spare = extent - high - 1
        text = show_expr(value)
        for divisor in _divisors(value):
            message = f"index {text} of '{array.name}' is divided by {{right}}"
            self.require(self.when_reached(ONE, divisor - 1), "le", divisor, message, span, "TW013")
        if not self.implicit(array, write):
            if surely_negative(spare):
                self.may_be_longer(array, axis)
                raise self.context.fail("TW013", f"index {text} of '{array.name}' reaches {_size_text(high)}, but axis {axis} has extent {_size_text(extent)}", span)
            if not surely_nonnegative(spare):
                left = self.when_reached(high + 1, spare) - 1
                message = f"index {text} of '{array.name}' reaches {{left}}, but axis {axis} has extent {{right}}"
                self.require(left, "lt", extent, message, span, "TW013")
        if surely_negative(low):
            raise self.context.fail("TW013", f"index {text} of '{array.name}' goes down to {_size_text(low)} on axis {axis}", span)
        if not surely_nonnegative(low):
            message = f"index {text} of '{array.name}' goes down to {{right}} on axis {axis}"
            self.require(ZERO, "le", self.when_reached(low, low), message, span, "TW013")

    def is_exact(self, value: Expr) -> bool:
        """Whether an index reaches the ends of its interval. Under a loop that may have no turns, depending on the index, it may not; what then lies
        outside is found when the kernel runs."""
        linear = affine(value)
        if linear is None:
            found = [e for e in walk_expr(value) if isinstance(e, IndexRef)]
            if len(found) != len({e.var for e in found}) or any(isinstance(e, Apply) and e.op == "mod" and not _reaches_all(e) for e in walk_expr(value)):
                return False
        own = set(linear.values) if linear is not None else {e.var for e in found}
        if any(own & bound_by(var) - {var} and (affine(var.lo) is None or affine(var.hi) is None) for var in own):
            return False  # windows that are cut at borders: `p in max(0, 1 - i)..min(3, n + 1 - i)` keeps `i + p - 1` inside
        return not any(var not in own and own & bound_by(var) for var in self.context.loops)

    def may_be_longer(self, array: ArrayInfo, axis: int) -> None:
        """An axis that one index walks over from end to end, and another one leaves: it is longer than the first says, then. What it is said to be
        equal to is forgotten, and the kernel is walked over again."""
        name, state = f"{array.name}${axis}", self.context.state
        if array.role == "input" and self.context.is_python and name not in state.longer and name in state.bound_whole:
            state.longer.add(name)
            raise WalkAgain

    def when_reached(self, size: Size, spare: Size) -> Size:
        """The size, or 0 when a loop around has no iterations (unless `spare` is fine then anyway)."""
        for var in self.context.loops:
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

    def implicit(self, array: ArrayInfo, write: bool = True) -> bool:
        """Whether the array is as large as its accesses make it; those it is read with do not count where blocks pass it on."""
        if array.name in self.context.implicits:
            return write
        return not self.context.is_python and array.role == "output"

    def bind_made(self, array: ArrayInfo, axis: int, value: Expr, span: Span) -> None:
        """What a reading access tells about sizes, where the array is one that blocks pass on."""
        linear = affine(value)
        bare = linear.bare if linear is not None else None
        if bare is not None and bare.full is not None:
            self.bind_size(array, axis, bare.full, span)

    def bind_size(self, array: ArrayInfo, axis: int, size: Size, span: Span) -> None:
        """ZynML: a loop over `0..size` reads all of an axis of an array that an earlier block made."""
        known = self.context.state.outputs.get(array.name)
        if self.context.is_python or self.context.guarded or is_output(array.name) or (known is not None and known.shape is None):
            return
        if self.raw_name(size) is not None:
            self.make_equal(size, array.shape[axis], span)

    # -- slices -------------------------------------------------------------------------------------------------------

    def bind_section(self, array: ArrayInfo, axis: int, start: Expr, length: Size | None) -> None:
        """Slices of length k that begin at i in 0..n step k walk over an axis of extent n, also where i ends with the block of another
        such index (0..block + k) or before (0..min(…, n)). Others may: in ZynML, unless something else says what n is."""
        linear = affine(start)
        bare = linear.bare if linear is not None else None
        last = _walked(bare) if bare is not None and bare.first == ZERO else None
        name = self.raw_name(last) if last is not None else None
        if name is None or bare is None:
            return
        if array.role not in ("input", "inout"):
            if bare.step == length and last is not None:
                self.bind_size(array, axis, last, start.span)
            return
        axis_name = f"{array.name}${axis}"
        if bare.step == length and not self.context.guarded and array.role == "input":
            self.equal(axis_name, name)
        elif not self.context.is_python:
            self.context.state.equations.perhaps[name, Size.of(axis_name)] = None

    def bind_end(self, array: ArrayInfo, axis: int, stop: Expr) -> None:
        """ZynML: `x[i, a:n]` says that n is the extent, unless something else says what it is."""
        size = size_of(stop)
        name = self.raw_name(size) if size is not None else None
        if name is not None and array.role in ("input", "inout") and not self.context.is_python:
            self.context.state.equations.perhaps[name, Size.of(f"{array.name}${axis}")] = None
            self.context.state.equations.ranges.add(name)

    # -- staying inside tiles -----------------------------------------------------------------------------------------

    def stay_in_tile(self, name: str, axis: int, extent: Size, index: Expr, span: Span) -> None:
        """As `stay_inside`, for an element of a tile."""
        reach = interval(index)
        if reach is None or self.context.guarded or not self.numbers.decide(reach.low, reach.high):
            return
        text = f"index {show_expr(index)} of '{name}'"
        if surely_negative(extent - reach.high - 1):
            raise self.context.fail("TW013", f"{text} reaches {reach.high}, but axis {axis} has extent {extent}", span)
        if not surely_nonnegative(extent - reach.high - 1):
            message = f"{text} reaches {{left}}, but axis {axis} has extent {{right}}"
            self.require(self.when_reached(reach.high + 1, extent - reach.high - 1) - 1, "lt", extent, message, span, "TW013")
        if surely_negative(reach.low):
            raise self.context.fail("TW013", f"{text} goes down to {reach.low} on axis {axis}", span)


def _of_call(size: Size) -> bool:
    """Whether numbers of the call decide it: then it need not be the extent of what is read with it."""
    return any(is_number(name) or is_computed(name) for name in size.names)


def _reaches_all(remainder: Apply) -> bool:
    """Whether a remainder takes all its values where it takes any: that of an index over whole turns from 0 on."""
    index, by = remainder.args[0], constant_of(remainder.args[1])
    if not isinstance(index, IndexRef) or not isinstance(by, int) or by <= 0:
        return False
    var = index.var
    return var.first == ZERO and var.count is not None and var.step == ONE and var.count.divisible_by(by)


def _divisors(value: Expr) -> Iterator[Size]:
    """Sizes that an index is divided by and that may be 0."""
    for part in walk_expr(value):
        size = size_of(part.args[1]) if isinstance(part, Apply) and part.op == "floordiv" else None
        if size is not None and surely_nonnegative(size) and not surely_positive(size):
            yield size


def _size_text(size: Size) -> str:
    """A size as a message names it: an axis nobody named is `x.shape[0]`."""
    return readable(str(size))


def _numerator(size: Size | None) -> tuple[Size, int] | None:
    """`floordiv(a, c)` as (a, c)."""
    if size is None or len(size.terms) != 1 or size.terms[0][1] != 1 or len(size.terms[0][0]) != 1:
        return None
    atom = size.terms[0][0][0]
    if not isinstance(atom, SizeCall) or atom.op != "floordiv" or atom.b.constant is None:
        return None
    return atom.a, atom.b.constant


def _walked(var: LoopVar) -> Size | None:
    """The extent that an index, with the blocks of its step, walks over: its end, where that is a size, or one of several it ends at, or
    that of the index whose block it ends with."""
    size = size_of(var.hi)
    if size is not None:
        return size
    if isinstance(var.hi, Apply) and var.hi.op == "min":
        sizes = [size for size in map(size_of, var.hi.args) if size is not None]
        return sizes[0] if len(sizes) == 1 else None
    end = affine(var.hi)
    if end is None or len(end.factors) != 1:
        return None
    ((outer, factor),) = end.factors
    return size_of(outer.hi) if factor == ONE and end.constant == outer.step and outer.first == ZERO else None


def _conjuncts(cond: Expr) -> list[Expr]:
    """The conditions that all must hold."""
    if isinstance(cond, Apply) and cond.op == "and":
        return [part for arg in cond.args for part in _conjuncts(arg)]
    return [cond]
