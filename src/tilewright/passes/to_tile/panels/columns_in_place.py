"""Columns of a contraction's second factor that are read where they lie, or copied by where they lie, as the pixels of a convolution are.

In: the factor (`sides.py`), where in the result and the sum a block is, and places: where each step of the sum is read as seen from column 0. Out: tile-stage ops
that read a row of a panel, or that fill a panel with columns which cross the ends of rows: gathered, under masks, or merged in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.affine import Affine
from tilewright.base.dtypes import i32
from tilewright.base.sizes import ONE, ZERO
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.to_tile.panels.active_steps import ActiveSteps
from tilewright.passes.to_tile.panels.frames import column_step, is_inside
from tilewright.passes.to_tile.panels.short_rows import ROWS_APART, ShortRows, merges_apart, span_of
from tilewright.passes.to_tile.panels.sides import needed_ops
from tilewright.passes.to_tile.panels.steps import PanelSteps

LINE = 64
"""Bytes of a cache line."""
STEPS_AHEAD = 16
"""Rows of the second factor from when a line of it is fetched to its copy."""
PLACES_AHEAD = 32
"""Steps of a sum from when a line of several rows is fetched to its copy."""
COLUMNS_TOGETHER = 12
"""Columns that lie apart and are copied side by side: their places and addresses have room in registers."""


class ColumnsInPlace(PanelSteps):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    placed: tuple[int, ...]
    """Which indices of the second factor's load change along the sum, where the places of its steps are written down."""
    frame: tuple[Affine, ...]
    """What is at least 0 where an element of the second factor counts, where that is tested as columns are read."""
    direct: bool
    """Whether panels of the second factor that lie side by side are read without a copy."""
    columns: Value
    """The panels of the second factor."""
    places: Value
    """Where each step of the sum is read then."""
    place_row: Value | None = None
    """The row of `places` that the panel at hand has, where steps that do not count for it are left out (`active_steps.py`)."""
    active: ActiveSteps | None = None

    def _placed(self) -> tuple[int, ...]:
        """A factor that is copied panel by panel, each for a few tiles only, is read by places: where a step of the sum is, plus where a column is."""
        side, load = self.b, self.b.factor.load
        if self.matrix.keep != "a" or load is None or (side.factor.guard is not None and not self.frame):
            return ()
        if dtype_of(load.operands[0].type) is not self.dtype or side.factor.value is not load.result:
            return ()
        if side.along_k and len(self.k_indices) == 1:
            return ()  # columns are copied vector by vector
        forms = self.found.access(side.factor)
        indices = {*self.found.indices, *self.k_indices}
        if not all(value in indices for form in forms for value in form.values):
            return ()
        return tuple(p for p, form in enumerate(forms) if any(k in form.values for k in self.k_indices))

    def _direct(self) -> bool:
        """It needs no copy where its columns lie side by side as they are, or, where a CPU has permutations of any lanes, a few elements apart."""
        if not self.placed or not (self.b.along_side or self.target.has_lane_masks):
            return False
        steps = [form.factor(self.b.copied[-1]) for form in self.found.access(self.b.factor)]
        plain = self.b.along_side and [step for step in steps if step != ZERO] == [ONE]
        return plain or column_step(self.found, self.b.copied[-1], self.target) > 1

    def _columns_from(self, b: Builder, first: Value, width: int) -> Value:
        """The last index of a load of `width` columns, of which the first is at `first`."""
        step = next(form.factor(self.b.copied[-1]) for form in self.found.access(self.b.factor) if form.factor(self.b.copied[-1]) != ZERO)
        if step == ONE:
            return self.index_tile(b, first, 1, width)
        places = self.index_tile(b, b.index(0), 1, width)
        return b.add(b.like(first, places), b.mul(places, b.like(b.index(step), places)))

    def _notes_places(self) -> bool:
        """Whether places of steps are used: by reads without a copy, and by copies where an element's place is one sum. More of them are a product each."""
        return self.direct or len(self.placed) == 1

    def _load_indices(
        self, b: Builder, env: dict[Value, Value], k: dict[Value, Value], columns: dict[Value, Value]
    ) -> list[Value]:
        load = self.b.factor.load
        assert load is not None
        zero = b.index(0)
        local = {**env, **dict.fromkeys((*self.k_indices, *self.b.indices), zero), **k, **columns}
        self.ops(b, [op for op in self.b.ops if op is not load], local, [])
        return [local[v] for v in load.operands[1:]]

    def _note_places(self, b: Builder, env: dict[Value, Value], start: Value, count: Value) -> None:
        """Write down where each step of the sum is read, as seen from column 0."""

        def each(at: Builder, k: Value, found: dict[Value, Value]) -> None:
            indices = self._load_indices(at, env, found, {})
            for number, position in enumerate(self.placed):
                at.multi("store", self.places, at.index(number), k, indices[position])
            if self.active is not None:
                self.active.note(at, k, found)

        self._k_loop(b, start, count, each)

    def _place_row(self, b: Builder, number: int) -> Value:
        """The row of `places` for one of the indices that change along the sum."""
        return b.index(number) if self.place_row is None else self.place_row

    def _in_one_run(self, b: Builder, left: Value, end: Value) -> Value:
        """Whether the panel from column `left` on lies side by side, and wholly inside of what it is read from."""
        side, nr = self.b, b.index(self.matrix.nr)
        inside = b.op("le", b.add(left, nr), end)
        digits = self._apart(b, left, side.copied_extents)
        together = b.logical_and(inside, b.op("le", b.add(digits[-1], nr), b.index(side.copied_extents[-1])))
        if not self.frame:
            return together
        columns = dict(zip(side.copied, digits, strict=True))
        return b.logical_and(together, is_inside(b, self.found, self.frame, columns, side.copied[-1], self.matrix.nr))

    def _reader(self, b: Builder, env: dict[Value, Value], left: Value, count: Value) -> Callable[[Builder, Value], Value]:
        """`read(builder, k)` gives a row of the panel from column `left` on, of `count` rows."""
        side, load = self.b, self.b.factor.load
        assert load is not None
        digits = dict(zip(side.copied, self._apart(b, left, side.copied_extents), strict=True))
        here, origin = self._load_indices(b, env, {}, digits), self._load_indices(b, env, {}, {})
        along = next(p for p, form in enumerate(self.found.access(side.factor)) if form.factor(side.copied[-1]) != ZERO)

        def row(at: Builder, k: Value) -> list[Value]:
            indices: list[Value] = []
            for position, (index, first) in enumerate(zip(here, origin, strict=True)):
                if position in self.placed:
                    place = at.op("load", self.places, self._place_row(at, self.placed.index(position)), k)
                    index = at.add(at.sub(index, first), place)
                indices.append(index)
            return indices

        def read(at: Builder, k: Value) -> Value:
            # Rows of the array itself lie further apart than those of a copy: more of them than hardware follows.
            ahead = row(at, at.op("min", at.add(k, at.index(STEPS_AHEAD)), at.sub(count, at.index(1))))
            reach = self.matrix.nr * column_step(self.found, side.copied[-1], self.target)
            for column in range(0, reach, LINE // self.dtype.itemsize):
                at.multi("prefetch", load.operands[0], *ahead[:along], at.add(ahead[along], at.index(column)), *ahead[along + 1 :])
            indices = row(at, k)
            indices[along] = self._columns_from(at, indices[along], self.matrix.nr)
            return at.op("load", load.operands[0], *indices)

        return read

    def _gather_columns(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, count: Value
    ) -> list[Value]:
        """Copy columns first..end to place `panel`, a few at a time and element by element: they may lie apart, as those of a window with a stride do, and in
        several short rows. Behind the end the last column is copied again."""
        s, load = self.matrix, self.b.factor.load
        assert load is not None
        zero, one, last = b.index(0), b.index(1), b.sub(end, b.index(1))
        together = max(n for n in range(1, COLUMNS_TOGETHER + 1) if s.nr % n == 0)

        def group(at: Builder, number: Value) -> list[Value]:
            left = at.mul(number, at.index(together))
            columns = [at.add(left, at.index(p)) for p in range(together)]
            origin = self._load_indices(at, env, {}, {})
            shifts: list[list[Value]] = []
            for column in columns:
                at_most = at.op("min", at.add(first, column), last)
                digits = dict(zip(self.b.copied, self._apart(at, at_most, self.b.copied_extents), strict=True))
                here = self._load_indices(at, env, {}, digits)
                shifts.append([at.sub(v, origin[p]) if p in self.placed else v for p, v in enumerate(here)])

            def by_k(inner: Builder, k: Value) -> list[Value]:
                steps = {p: inner.op("load", self.places, self._place_row(inner, n), k) for n, p in enumerate(self.placed)}
                for column, shift in zip(columns, shifts, strict=True):
                    indices = [inner.add(v, steps[p]) if p in steps else v for p, v in enumerate(shift)]
                    inner.multi("store", self.columns, panel, k, column, inner.op("load", load.operands[0], *indices))
                return []

            at.for_(zero, count, one, [], by_k, name="k")
            return []

        b.for_(zero, b.index(s.nr // together), one, [], group, name="group")
        return []

    def _masks_columns(self) -> bool:
        """Whether columns that are neighbours in short rows are copied by vectors under masks."""
        load = self.b.factor.load
        if not self.target.has_lane_masks or not self.direct or load is None or len(self.placed) != 1:
            return False
        memory = load.operands[0].type
        assert isinstance(memory, Tensor)
        return memory.strides[-1] == ONE and self.found.access(self.b.factor)[-1].factor(self.b.copied[-1]) != ZERO

    def _mask_columns(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, start: Value, count: Value, low: Value | None = None
    ) -> list[Value]:
        """Copy columns first..end to place `panel`, row by row of the array: what a row has of them is a vector or two, whose lanes are masked behind its end.
        Columns behind the last are zero. `low`: the first step that is copied, where it is not that of the stretch."""
        s, side, load = self.matrix, self.b, self.b.factor.load
        assert load is not None
        zero, one, lanes = b.index(0), b.index(1), b.index(self.lanes)
        begin = zero if low is None else low

        def blank(inner: Builder, k: Value) -> list[Value]:
            nothing = inner.op("broadcast", inner.const(0, side.dtype), shape=(1, s.nr))
            return list(inner.multi("store", self.columns, panel, k, self.index_tile(inner, zero, 1, s.nr), nothing))

        partly = b.op("lt", b.sub(end, first), b.index(s.nr))
        b.if_(partly, lambda inner: inner.for_(begin, count, one, [], blank, name="k"), lambda inner: [])

        def segment(at: Builder, digits: Sequence[Value], low: Value, high: Value, base: Value) -> None:
            origin, shift = self._load_indices(at, env, {}, {}), at.sub(base, first)

            def vector(inner: Builder, place: Value) -> list[Value]:
                here = self._load_indices(inner, env, {}, {**dict(zip(side.copied, digits, strict=False)), side.copied[-1]: place})
                index = self.index_tile(inner, place, 1, self.lanes)
                mask, across = inner.op("lt", index, inner.like(high, index)), self.index_tile(inner, inner.add(shift, place), 1, self.lanes)

                def each(deep: Builder, k: Value, terms: dict[Value, Value]) -> None:
                    steps = {p: deep.op("load", self.places, self._place_row(deep, n), k) for n, p in enumerate(self.placed)}
                    indices = [deep.add(deep.sub(v, origin[p]), steps[p]) if p in steps else v for p, v in enumerate(here)]
                    indices[-1] = self._columns_from(deep, indices[-1], self.lanes)
                    counts = mask
                    if self.frame:
                        counts = deep.logical_and(mask, self._inside(deep, {**env, **dict(zip(side.copied, digits, strict=False)), side.copied[-1]: index, **terms}))
                    value = deep.op("load", load.operands[0], *indices, counts, masked=True)
                    deep.multi("store", self.columns, panel, k, across, value, mask, masked=True)

                if self.frame:
                    self._k_loop(inner, start, count, each)
                    return []

                def by_k(deep: Builder, k: Value) -> list[Value]:
                    each(deep, k, {})
                    return []

                inner.for_(begin, count, one, [], by_k, name="k")
                return []

            at.for_(low, high, lanes, [], vector, name="c")

        self._segments(b, side.copied_extents, side.copied_extents[-1], first, end, segment)
        return []

    def _inside(self, b: Builder, env: dict[Value, Value]) -> Value:
        """Which columns of a vector count, by the guard of the second factor."""
        guard, local = self.b.factor.guard, dict(env)
        assert guard is not None
        self.ops(b, needed_ops(self.found, [guard]) or (), local, [])
        return self.widen(b, local[guard], (1, self.lanes))

    def _merges_rows(self) -> bool:
        """Whether a vector of columns may be merged of neighbours in short rows."""
        side = self.b
        if self.frame or not self._masks_columns() or merges_apart(self.found, side):
            return False
        return self.found.access(side.factor)[-1].factor(side.copied[-1]) == ONE

    def _rows_fit(self, b: Builder, rows: int) -> Value:
        """Whether no vector of columns has part of more than `rows` rows."""
        return b.op("ge", b.index(self.b.copied_extents[-1]), b.index(-(-self.lanes // (rows - 1))))

    def _merging_reader(self, b: Builder, env: dict[Value, Value], first: Value, end: Value, count: Value, rows: int) -> Callable[[Builder, Value], list[Value]]:
        """`read(builder, k)` gives columns first..end at a step of the sum, vector by vector: each is merged of what at most `rows` rows of the array have of its columns.
        Columns behind the last are zero."""
        side, load = self.b, self.b.factor.load
        assert load is not None
        # Masks of 32 bits for each lane are one instruction, those of 64 three; loads and merges have the same ones.
        zero, lane = b.index(0), b.cast(self.index_tile(b, b.index(0), 1, self.lanes), i32)
        origin, length = self._load_indices(b, env, {}, {}), b.index(side.copied_extents[-1])

        def bound(number: Value) -> Value:
            return b.like(b.cast(b.op("min", number, b.index(self.lanes)), i32), lane)

        def pieces(left: Value) -> list[tuple[list[Value], Value]]:
            """Where the first lane of each row would be read, and which lanes are."""
            found: list[tuple[list[Value], Value]] = []
            begin, inside = zero, b.sub(end, left)
            for _ in range(rows):
                digits = self._apart(b, b.add(left, begin), side.copied_extents)
                *outer, last = self._load_indices(b, env, {}, dict(zip(side.copied, digits, strict=True)))
                stop = b.sub(b.add(begin, length), digits[-1])
                lanes = b.op("lt", lane, bound(b.op("max", zero, b.op("min", stop, inside))))
                if found:
                    lanes = b.logical_and(lanes, b.op("ge", lane, bound(begin)))
                here = [*outer, b.sub(last, begin)]
                found.append(([b.sub(v, origin[p]) if p in self.placed else v for p, v in enumerate(here)], lanes))
                begin = stop
            return found

        vectors = [pieces(b.add(first, b.index(place))) for place in range(0, self.matrix.nr, self.lanes)]
        last = b.sub(count, b.index(1))

        def read(at: Builder, k: Value) -> list[Value]:
            row = self._place_row(at, 0)
            step = at.op("load", self.places, row, k)
            ahead = at.op("load", self.places, row, at.op("min", at.add(k, at.index(PLACES_AHEAD)), last))
            values: list[Value] = []
            for parts in vectors:
                # What the panels before have read is near: of each vector the line in which it ends is not.
                far = [at.add(v, ahead) if p in self.placed else v for p, v in enumerate(parts[-1][0])]
                at.multi("prefetch", load.operands[0], *far[:-1], at.add(far[-1], at.index(self.lanes - 1)))
                value: Value | None = None
                for here, lanes in parts:
                    indices = [at.add(v, step) if p in self.placed else v for p, v in enumerate(here)]
                    indices[-1] = self.index_tile(at, indices[-1], 1, self.lanes)
                    found = at.op("load", load.operands[0], *indices, lanes, masked=True)
                    value = found if value is None else at.select(lanes, found, value)
                assert value is not None
                values.append(value)
            return values

        return read

    def _merge_rows(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, count: Value, rows: int
    ) -> list[Value]:
        """Copy columns first..end to place `panel`, step by step of the sum: a vector is merged of its rows and is written once."""
        read = self._merging_reader(b, env, first, end, count, rows)

        def by_k(at: Builder, k: Value) -> list[Value]:
            for number, value in enumerate(read(at, k)):
                at.multi("store", self.columns, panel, k, self.index_tile(at, at.index(number * self.lanes), 1, self.lanes), value)
            return []

        b.for_(b.index(0), count, b.index(1), [], by_k, name="k")
        return []

    def _merge_apart(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, start: Value, count: Value
    ) -> list[Value]:
        """Copy columns first..end that lie a few elements apart: merged of short rows (`short_rows.py`), but for the terms that lie at the end of the array."""
        side, load = self.b, self.b.factor.load
        assert load is not None
        rows = ShortRows(
            load.operands[0], side.copied_extents, column_step(self.found, side.copied[-1], self.target), self.lanes, self.index_tile,
            lambda at, digits: self._load_indices(at, env, {}, dict(zip(side.copied, digits, strict=True)))[0],
        )  # fmt: skip
        span, outer = span_of(self.found, side, self.k_indices, self.k_extents)
        origin = self._load_indices(b, env, {}, {})[0]

        vectors = b.op("floordiv", b.add(b.sub(end, first), b.index(self.lanes - 1)), b.index(self.lanes))

        def merged(at: Builder, number: int) -> list[Value]:
            def vector(inner: Builder, place: Value, least: Value) -> list[Value]:
                shift = inner.mul(place, inner.index(self.lanes))
                pieces = rows.pieces(inner, inner.add(first, shift), end, number)
                within = inner.sub(rows.steps_within(inner, pieces, span, outer), start)
                whole = inner.op("max", inner.index(0), inner.op("min", within, count))
                rows.merge(inner, pieces, origin, (self.places, self.columns, panel, shift), whole)
                return [inner.op("min", least, whole)]

            return list(at.for_(at.index(0), vectors, at.index(1), [count], vector, name="vector"))

        def any_length(at: Builder, numbers: Sequence[int]) -> list[Value]:
            if not numbers:
                self._gather_columns(at, env, first, end, panel, count)
                return [count]
            fits = at.op("ge", at.index(side.copied_extents[-1]), at.index(-(-self.lanes // (numbers[0] - 1))))
            return list(at.if_(fits, lambda inner: merged(inner, numbers[0]), lambda inner: any_length(inner, numbers[1:])))

        (whole,) = any_length(b, ROWS_APART)
        left = b.op("lt", whole, count)
        b.if_(left, lambda inner: self._mask_columns(inner, env, first, end, panel, start, count, whole), lambda inner: [])
        return []
