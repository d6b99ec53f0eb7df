"""What a scan computes, apart from how: the state that runs along, the function that joins two states, where segments begin.

In: dtypes, functions and options of a call. Out: a `ScanPlan`, from which the programs for CPUs (`cpu_scan`, `cpu_scan_columns`) and GPUs
(`scan`, `scan_columns`) are built. A *state* is a list of numbers, one for each array that is scanned. A segmented scan has one more number before
them: whether a segment begins somewhere in what the state stands for. Joining such states is associative again, so that everything else need not
know of segments:

    (f, v) joined with (g, w)  ->  (f or g, w if g else v joined with w)
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, bool_, u32
from tilewright.base.record import record
from tilewright.primitives.code import Code, Mem, Num
from tilewright.primitives.functions import Monoid, ScalarFunction

State = list[Num]


@record
class StateFunction:
    """An associative function of two states: one of one number, or a function for each number of a state."""

    monoid: Monoid | None = None
    functions: tuple[ScalarFunction, ...] = ()
    segmented: bool = False

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Of the numbers of a state, the mark of segments included."""
        own = (self.monoid.dtype,) if self.monoid is not None else tuple(f.result for f in self.functions)
        return (u32, *own) if self.segmented else own

    @property
    def key(self) -> str:
        own = self.monoid.key if self.monoid is not None else " ".join(f"{f.result}:{f.key}" for f in self.functions)
        return f"{own} segmented" if self.segmented else own

    @property
    def identity(self) -> tuple[int | float | bool, ...] | None:
        """The state that changes nothing."""
        if self.monoid is None or self.monoid.identity is None:
            return None
        return (0, self.monoid.identity) if self.segmented else (self.monoid.identity,)

    @property
    def is_named(self) -> bool:
        """Whether it is one number's function that the compiler knows: commutative, and the same for vectors."""
        return self.monoid is not None and self.monoid.function is None and not self.monoid.dtype.is_bool

    @property
    def takes_vectors(self) -> bool:
        if any(d.is_bool for d in self.dtypes):
            return False
        functions = self.functions or ((self.monoid.function,) if self.monoid is not None and self.monoid.function is not None else ())
        return all(f.is_straight for f in functions)

    def plain(self, a: Sequence[Num], b: Sequence[Num]) -> State:
        """Both values, in this order, without a look at segments."""
        if self.monoid is not None and self.monoid.function is None:
            return [self.monoid(a[0], b[0])]
        functions = self.functions if self.monoid is None else (self.monoid.function,)
        wide = a[0].width > 1
        return [(f.apply_vector if wide else f.apply)(a[0].code, *a, *b) for f in functions if f is not None]

    def __call__(self, a: Sequence[Num], b: Sequence[Num]) -> State:
        if not self.segmented:
            return self.plain(a, b)
        c = a[0].code
        begins = b[0].ne(0)
        joined = self.plain(a[1:], b[1:])
        return [a[0] | b[0], *(c.select(begins, own, both) for own, both in zip(b[1:], joined, strict=True))]


@record
class Segments:
    """How segments are given: `flags` (true where one begins) or `ids` (one begins where the number changes)."""

    kind: str
    dtype: DType
    whole: bool
    """Whether there is one for each element; else one for each place along the axis, for all lines alike."""

    def begins(self, marks: Mem, here: Sequence[Num], neighbour: Sequence[Num], outside: Num) -> Num:
        """Whether a walk begins a segment at `here` (see `ScanPlan.neighbour`)."""
        mark = marks.load(tuple(neighbour))
        return (marks.load(tuple(here)).ne(mark) if self.kind == "ids" else mark) | outside


@record
class ScanPlan:
    """A scan along one axis, for any sizes."""

    dtypes: tuple[DType, ...]
    results: tuple[DType, ...]
    function: StateFunction
    exclusive: bool = False
    init: bool = False
    reverse: bool = False
    segments: Segments | None = None

    @property
    def key(self) -> str:
        given = self.segments
        marks = f"{given.kind} {given.dtype} {given.whole}" if given else ""
        names = " ".join(d.name for d in (*self.dtypes, *self.results))
        return f"{names} {self.function.key} {self.exclusive} {self.init} {self.reverse} {marks}"

    @property
    def value_dtypes(self) -> tuple[DType, ...]:
        """Of the numbers of a state, without the mark of segments."""
        return self.function.dtypes[1:] if self.function.segmented else self.function.dtypes

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(f"x{k}" for k in range(len(self.dtypes))) if len(self.dtypes) > 1 else ("x",)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(f"y{k}" for k in range(len(self.dtypes))) if len(self.dtypes) > 1 else ("y",)

    @property
    def initial(self) -> tuple[str, ...]:
        """The names of the numbers that stand before the first element."""
        if not self.init:
            return ()
        return tuple(f"init{k}" for k in range(len(self.dtypes))) if len(self.dtypes) > 1 else ("init",)

    def place(self, t: Num, size: Num) -> Num:
        """Where the element lies that the walk meets at step `t`."""
        return size - 1 - t if self.reverse else t

    def neighbour(self, place: Num, size: Num) -> tuple[Num, Num]:
        """The place whose mark says whether the walk begins a segment at `place`, and whether it is outside: then one begins there.

        Flags of a forward walk are at the place itself. In a reversed walk a segment begins where the next place in memory begins one. Ids are
        compared with those of the place that the walk came from."""
        assert self.segments is not None
        if self.reverse:
            return (place + 1).min(size - 1), place >= size - 1
        if self.segments.kind == "ids":
            return (place - 1).max(0), place <= 0
        return place, place < 0

    def element(self, c: Code, values: Sequence[Num], begins: Num | None, initial: Sequence[Num]) -> State:
        """The state of one element."""
        own = [v.to(d) for v, d in zip(values, self.value_dtypes, strict=True)]
        if not self.function.segmented:
            return own
        assert begins is not None
        if initial:
            after = self.function.plain(initial, own)
            own = [c.select(begins, a, v) for a, v in zip(after, own, strict=True)]
        return [begins.to(u32), *own]

    def start(self, c: Code, initial: Sequence[Num]) -> State:
        """The state before the first element of a walk that has an initial value."""
        return [c.const(0, u32), *initial] if self.function.segmented else list(initial)

    def shown(self, c: Code, state: State, before: State, element: State, initial: Sequence[Num]) -> list[Num]:
        """What is stored for an element: of the state with it, or, exclusive, of the state before it."""
        if not self.exclusive:
            chosen = state[1:] if self.function.segmented else state
        elif self.function.segmented:
            begins = element[0].ne(0)
            chosen = [c.select(begins, first, v) for first, v in zip(initial, before[1:], strict=True)]
        else:
            chosen = before
        return [v.to(d) for v, d in zip(chosen, self.results, strict=True)]


def nothing(c: Code, function: StateFunction) -> State:
    """A state of the right dtypes: the identity where there is one."""
    numbers = function.identity or (0,) * len(function.dtypes)
    return [c.const(v if d is not bool_ else bool(v), d) for v, d in zip(numbers, function.dtypes, strict=True)]
