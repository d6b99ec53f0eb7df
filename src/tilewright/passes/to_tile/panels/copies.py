"""Copies of a contraction's factors for a CPU: panels of rows and columns in the order the innermost loop reads them.

In: the factors (`sides.py`) and where in the result and the sum a block is. Out: tile-stage ops that fill panels in local memory, with zeros for
what lies outside; or, where columns lie side by side as they are, ops that read them there. `lower_contraction_cpu.py` builds the kernel around this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.affine import Affine
from tilewright.analysis.contraction import Contraction
from tilewright.base.dtypes import DType, i64
from tilewright.base.sizes import ONE, ZERO, Size, mod, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.nest_shapes import Condition, join, shape_of
from tilewright.passes.schedules.matrix import CpuProduct
from tilewright.passes.to_tile.lower_loops import LoopLowering
from tilewright.passes.to_tile.panels.count_up import count_up
from tilewright.passes.to_tile.panels.frames import column_step, is_inside
from tilewright.passes.to_tile.panels.short_rows import ROWS_APART, ShortRows, merges_apart, span_of
from tilewright.passes.to_tile.panels.sides import Side, needed_ops
from tilewright.passes.windows.sum_ranges import sum_bounds

LINE = 64
"""Bytes of a cache line."""
STEPS_AHEAD = 16
"""Rows of the second factor from when a line of it is fetched to its copy."""
PANELS_TOGETHER, ROWS_AHEAD = 8, 4
"""Panels of columns that are copied side by side, and rows from when their lines are fetched to their copy."""
SHORT_ROW, NEAR, EVEN = 2048, 8192, 1024
"""Bytes of a row of the second factor up to which columns are copied on the way: always, and where they are no multiple of the last."""
TURNED_TOGETHER = 4
"""Lanes of a vector up to which as many columns that lie along the sum are copied side by side, each element by a store of its own."""
FEWEST_LANES = 4
"""Columns of a row from which on they are copied as a vector with a mask."""
PLACES_AHEAD = 32
"""Steps of a sum from when a line of several rows is fetched to its copy."""
ROWS_MERGED = (2, 3)
"""Rows of the array that a vector of columns is merged of: their addresses and masks have room in registers."""
COLUMNS_TOGETHER = 12
"""Columns that lie apart and are copied side by side: their places and addresses have room in registers."""


def _extent(b: Builder, extent: Size, axis: int, phases: bool) -> Value:
    if phases and extent.constant is not None:
        return b.op("const", value=extent.constant, dtype=i64, kept=f"extent{axis}")
    return b.index(extent)


class PanelCopies(LoopLowering):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    found: Contraction
    matrix: CpuProduct
    dtype: DType
    lanes: int
    a: Side
    b: Side
    k_extents: tuple[Size, ...]
    k_indices: tuple[Value, ...]
    placed: tuple[int, ...]
    """Which indices of the second factor's load change along the sum, where the places of its steps are written down."""
    frame: tuple[Affine, ...]
    """What is at least 0 where an element of the second factor counts, where that is tested as columns are read."""
    direct: bool
    """Whether panels of the second factor that lie side by side are read without a copy."""
    rows: Value
    columns: Value
    """The panels."""
    places: Value
    """Where each step of the sum is read then."""
    dots: Value
    """The sums of a tile over one stretch, where they are added up column by column."""

    def _apart(self, b: Builder, number: Value, extents: Sequence[Size], phases: bool = False) -> list[Value]:
        """The digits of a number, the last fastest. `phases`: extents that are numbers are divided by as any other."""
        digits: list[Value] = []
        for axis in reversed(range(1, len(extents))):
            quotient = b.op("floordiv", number, _extent(b, extents[axis], axis, phases))
            digits.insert(0, b.sub(number, b.mul(quotient, _extent(b, extents[axis], axis, phases))))
            number = quotient
        return [number, *digits]

    def _steps_apart(self, b: Builder, number: Value) -> list[Value]:
        """The indices that make up a step of the sum, taken apart once for a block of it. Phases differ in how many terms they have, and in little else: their
        code is the same but for these numbers (`codegen/cpu/same_bodies.py`)."""
        return self._apart(b, number, self.k_extents, "phase_of" in self.kernel.attrs)

    # -- columns read where they lie ------------------------------------------------------------------------------

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

        self._k_loop(b, start, count, each)

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
                    place = at.op("load", self.places, at.index(self.placed.index(position)), k)
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
                steps = {p: inner.op("load", self.places, inner.index(n), k) for n, p in enumerate(self.placed)}
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
                    steps = {p: deep.op("load", self.places, deep.index(n), k) for n, p in enumerate(self.placed)}
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

    def _merge_rows(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, count: Value, rows: int
    ) -> list[Value]:
        """Copy columns first..end to place `panel`, step by step of the sum: a vector is merged of what at most `rows` rows of the array have of its columns, and
        is written once. Columns behind the last are zero."""
        side, load = self.b, self.b.factor.load
        assert load is not None
        zero, lane = b.index(0), self.index_tile(b, b.index(0), 1, self.lanes)
        origin, length = self._load_indices(b, env, {}, {}), b.index(side.copied_extents[-1])

        def pieces(left: Value) -> list[tuple[list[Value], Value]]:
            """Where the first lane of each row would be read, and which lanes are."""
            found: list[tuple[list[Value], Value]] = []
            begin, inside = zero, b.sub(end, left)
            for _ in range(rows):
                digits = self._apart(b, b.add(left, begin), side.copied_extents)
                *outer, last = self._load_indices(b, env, {}, dict(zip(side.copied, digits, strict=True)))
                stop = b.sub(b.add(begin, length), digits[-1])
                lanes = b.op("lt", lane, b.like(b.op("min", stop, inside), lane))
                if found:
                    lanes = b.logical_and(lanes, b.op("ge", lane, b.like(begin, lane)))
                here = [*outer, b.sub(last, begin)]
                found.append(([b.sub(v, origin[p]) if p in self.placed else v for p, v in enumerate(here)], lanes))
                begin = stop
            return found

        vectors = [(place, pieces(b.add(first, b.index(place)))) for place in range(0, self.matrix.nr, self.lanes)]

        last = b.sub(count, b.index(1))

        def by_k(at: Builder, k: Value) -> list[Value]:
            step = at.op("load", self.places, zero, k)
            ahead = at.op("load", self.places, zero, at.op("min", at.add(k, at.index(PLACES_AHEAD)), last))
            for place, parts in vectors:
                # What the panels before have read is near: of each vector the line in which it ends is not.
                far = [at.add(v, ahead) if p in self.placed else v for p, v in enumerate(parts[-1][0])]
                at.multi("prefetch", load.operands[0], *far[:-1], at.add(far[-1], at.index(self.lanes - 1)))
                value: Value | None = None
                for here, lanes in parts:
                    indices = [at.add(v, step) if p in self.placed else v for p, v in enumerate(here)]
                    indices[-1] = self.index_tile(at, indices[-1], 1, self.lanes)
                    read = at.op("load", load.operands[0], *indices, lanes, masked=True)
                    value = read if value is None else at.select(lanes, read, value)
                assert value is not None
                at.multi("store", self.columns, panel, k, self.index_tile(at, at.index(place), 1, self.lanes), value)
            return []

        b.for_(zero, count, b.index(1), [], by_k, name="k")
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

    # -- few rows: columns are used too seldom to be copied -----------------------------------------------------

    def _reads_in_place(self) -> bool:
        """Whether columns of the second factor lie along the sum as rows of the first are copied, so that both can be multiplied vector by vector."""
        side, load = self.b, self.b.factor.load
        if (
            self.matrix.to_tile != "lower_contraction_cpu"
            or self.matrix.keep != "b"
            or load is None
            or side.factor.value is not load.result
        ):
            return False
        if (
            side.factor.guard is not None
            or dtype_of(load.operands[0].type) is not self.dtype
            or not self.dtype.is_float
        ):
            return False
        alone = len(side.indices) == len(self.k_indices) == 1 and not any(
            op.opcode == "load" for op in side.ops if op is not load
        )
        return alone and side.along_k and not self.a.along_side

    def _multiply_in_place(
        self,
        b: Builder,
        env: dict[Value, Value],
        panel: Value,
        left: Value,
        start: Value,
        terms: tuple[Value, Value],
        rows: int,
    ) -> list[Value]:
        """The sums of `rows` rows of a tile from column `left` on, over some terms of a stretch: vectors of terms, of a few columns at a time, whose lanes are
        added up at the end."""
        s, side, load = self.matrix, self.b, self.b.factor.load
        assert load is not None
        zero, one, few = b.index(0), b.index(1), s.vectors
        if self.target.vector_bytes == LINE:
            few = max(n for n in range(1, s.vectors * max(1, s.mr // 2 // rows) + 1) if s.nr % n == 0)
        nothing, none = b.op("broadcast", b.const(0, self.dtype), shape=(1, self.lanes)), b.const(0, self.dtype)
        low, high = terms
        whole = b.add(
            low, b.mul(b.op("floordiv", b.op("max", zero, b.sub(high, low)), b.index(self.lanes)), b.index(self.lanes))
        )

        def group(at: Builder, number: Value) -> list[Value]:
            first = at.mul(number, at.index(few))
            places = [at.add(first, at.index(p)) for p in range(few)]

            def step(width: int) -> Callable[..., list[Value]]:
                def body(inner: Builder, k: Value, *sums: Value) -> list[Value]:
                    along = {self.k_indices[0]: self._several(inner, inner.add(start, k), width)}
                    others = [
                        inner.op(
                            "load",
                            load.operands[0],
                            *self._load_indices(inner, env, along, {side.indices[0]: inner.add(left, place)}),
                        )
                        for place in places
                    ]
                    # Columns lie too far apart for hardware to know which are next.
                    last = {self.k_indices[0]: inner.add(start, inner.add(k, inner.index(width - 1)))}
                    for place in places if width > 1 and self.target.vector_bytes == LINE else ():
                        following_column = inner.add(inner.add(left, place), inner.index(few))
                        ahead = self._load_indices(inner, env, last, {side.indices[0]: following_column})
                        inner.multi("prefetch", load.operands[0], *ahead)
                    following: list[Value] = []
                    for row in range(rows):
                        own = inner.op("load", self.rows, panel, inner.index(row), self._several(inner, k, width))
                        following += [inner.fma(own, other, sums[row * few + p]) for p, other in enumerate(others)]
                    return following

                return body

            vectors = at.for_(low, whole, at.index(self.lanes), [nothing] * (rows * few), step(self.lanes), name="k")
            rest = at.for_(whole, high, one, [none] * (rows * few), step(1), name="k")
            for row in range(rows):
                for p, place in enumerate(places):
                    lanes = at.op("item", at.op("reduce_tile", vectors[row * few + p], kind="add", axis=1))
                    at.multi("store", self.dots, at.index(row), place, at.add(lanes, rest[row * few + p]))
            return []

        b.for_(zero, b.index(s.nr // few), one, [], group, name="group")
        across = self.index_tile(b, zero, 1, s.nr)
        return [b.op("load", self.dots, b.index(row), across) for row in range(rows)]

    def _prefetch_rows(
        self,
        b: Builder,
        env: dict[Value, Value],
        top: Value,
        down: tuple[Value, Value],
        stretch: tuple[Value, Value],
        panel: tuple[Value, Value],
    ) -> None:
        """A share of the rows that are copied next, so that copying them does not wait: as many tiles as there are panels of columns fetch all of them. After
        the panel at `top` these are those of the next one, after the last panel those of the first in the next stretch of the sum."""
        s, load = self.matrix, self.a.factor.load
        if load is None or not self.a.along_k or len(self.k_indices) > 1:
            return
        if any(op.opcode == "load" for op in self.a.ops if op is not load):
            return  # steps behind the last have no places
        (start, count), (number, panels) = stretch, panel
        zero, one, line = b.index(0), b.index(1), b.index(LINE // dtype_of(load.operands[0].type).itemsize)
        lines = b.op("floordiv", b.sub(b.add(count, line), one), line)
        top = b.add(top, b.index(s.mr))
        done = b.op("ge", top, down[1])
        top, start = b.select(done, down[0], top), b.select(done, b.add(start, count), start)
        all_lines = b.mul(lines, b.op("min", b.index(s.mr), b.sub(down[1], top)))
        share = b.op("floordiv", b.sub(b.add(all_lines, panels), one), panels)
        first = b.mul(number, share)
        end = b.op("min", b.add(first, share), all_lines)

        def each(at: Builder, _: Value, row: Value, place: Value) -> list[Value]:
            local = dict(env)
            self._bind(at, local, self.a.indices, self.a.extents, row)
            local[self.k_indices[0]] = at.add(start, place)
            self.ops(at, [op for op in self.a.ops if op is not load], local, [])
            at.multi("prefetch", *(local[v] for v in load.operands))
            following = at.add(place, line)
            over = at.op("ge", following, count)
            return [at.select(over, at.add(row, one), row), at.select(over, zero, following)]

        row = b.op("floordiv", first, b.op("max", lines, one))
        begun = [b.add(top, row), b.mul(b.sub(first, b.mul(row, lines)), line)]
        b.for_(first, end, one, begun, each, name="line")

    # -- copying factors ----------------------------------------------------------------------------------------

    def _value(self, b: Builder, side: Side, env: dict[Value, Value], inside: Value | None = None) -> Value:
        """The factor at the indices in `env`; zero where its guard does not hold. `inside`: the elements that are there; nothing else is read."""
        local = dict(env)
        conditions = [] if inside is None else [Condition(inside, edge=True)]
        guard = side.factor.guard
        if guard is not None:
            before = needed_ops(self.found, [guard])
            assert before is not None
            self.ops(b, before, local, [])
            conditions.append(Condition(local[guard], edge=False))
        self.ops(b, [op for op in side.ops if op.results[0] not in local], local, conditions)
        value = b.cast(local[side.factor.value], side.dtype)
        if guard is None:
            return value
        shape = join(shape_of(value), shape_of(local[guard]))
        value = self.widen(b, value, shape)
        return b.select(self.widen(b, local[guard], shape), value, b.splat(0, value))

    def _still(self, b: Builder, side: Side, env: dict[Value, Value]) -> dict[Value, Value]:
        """`env` with what a factor is computed from that stays the same along the sum, such as the mean of a column."""
        if side.factor.guard is not None:
            return env  # nothing is read where a guard does not hold
        local, moving = dict(env), set(self.k_indices)
        for op in side.ops:
            if not moving.isdisjoint(op.operands):
                moving.update(op.results)
            elif op.results[0] not in local:
                self.ops(b, [op], local, [])
        return local

    def _bind(
        self, b: Builder, env: dict[Value, Value], indices: Sequence[Value], extents: Sequence[Size], number: Value
    ) -> Value:
        """Bind the loop indices that make up `number`; returns the innermost."""
        digits = self._apart(b, number, extents)
        env.update(zip(indices, digits, strict=True))
        return digits[-1]

    def _run_fits(self, b: Builder, inner: Value, number: Value, width: int, end: Value, side: Side) -> Value:
        """Whether `width` numbers from here on differ in the innermost index only, and lie before the end."""
        inside = b.op("le", b.add(number, b.index(width)), end)
        if len(side.extents) == 1:
            return inside
        return b.logical_and(inside, b.op("le", b.add(inner, b.index(width)), b.index(side.limit)))

    def _pack_columns(
        self,
        b: Builder,
        env: dict[Value, Value],
        across: tuple[Value, Value],
        number: Value,
        panel: Value,
        start: Value,
        count: Value,
    ) -> None:
        """Copy columns of panel `number` to place `panel`."""
        s, side = self.matrix, self.b
        first = b.add(across[0], b.mul(number, b.index(s.nr)))
        end = b.op("min", b.add(first, b.index(s.nr)), across[1])
        if side.along_k and len(self.k_indices) == 1:
            self._transpose_columns(b, env, first, end, panel, start, count)
            return
        if self.direct:
            b.if_(
                self._in_one_run(b, first, across[1]),
                lambda inner: self._copy_run(inner, env, first, panel, count),
                lambda inner: self._copy_pieces(inner, env, first, end, panel, start, count),
            )
        elif self._masks(side) and side.along_side:
            b.if_(
                b.op("lt", b.sub(end, first), b.index(s.nr)),
                lambda inner: self._copy_edge(inner, env, first, end, panel, start, count),
                lambda inner: self._copy_pieces(inner, env, first, end, panel, start, count),
            )
        else:
            self._copy_pieces(b, env, first, end, panel, start, count)

    def _copy_run(self, b: Builder, env: dict[Value, Value], first: Value, panel: Value, count: Value) -> list[Value]:
        """Copy columns that lie side by side from `first` on."""
        read, across = self._reader(b, env, first, count), self.index_tile(b, b.index(0), 1, self.matrix.nr)

        def by_k(inner: Builder, k: Value) -> list[Value]:
            return list(inner.multi("store", self.columns, panel, k, across, read(inner, k)))

        b.for_(b.index(0), count, b.index(1), [], by_k, name="k")
        return []

    def _copy_pieces(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, start: Value, count: Value
    ) -> list[Value]:
        """Copy columns first..end, row by row of the array where they cross the end of one."""
        s, side = self.matrix, self.b
        zero, one = b.index(0), b.index(1)
        if self.frame:
            return self._mask_columns(b, env, first, end, panel, start, count)
        if self._masks_columns():
            row = b.index(side.copied_extents[-1])

            def any_length(at: Builder, rows: Sequence[int]) -> list[Value]:
                """By the fewest rows that a vector of columns can have part of, if these are few. Rows of a few columns are as many loops as elements."""
                if rows:
                    fits = at.op("ge", row, at.index(-(-self.lanes // (rows[0] - 1))))
                    merged = lambda inner: self._merge_rows(inner, env, first, end, panel, count, rows[0])  # noqa: E731
                    return list(at.if_(fits, merged, lambda inner: any_length(inner, rows[1:])))
                return list(
                    at.if_(
                        at.op("ge", row, at.index(FEWEST_LANES)),
                        lambda inner: self._mask_columns(inner, env, first, end, panel, start, count),
                        lambda inner: self._gather_columns(inner, env, first, end, panel, count),
                    )
                )

            if merges_apart(self.found, side):
                return self._merge_apart(b, env, first, end, panel, start, count)
            side_by_side = self.found.access(side.factor)[-1].factor(side.copied[-1]) == ONE
            return any_length(b, ROWS_MERGED if side_by_side else ())
        if len(self.placed) == 1:
            return self._gather_columns(b, env, first, end, panel, count)

        def blank(inner: Builder, k: Value) -> list[Value]:
            nothing = inner.op("broadcast", inner.const(0, side.dtype), shape=(1, s.nr))
            return list(inner.multi("store", self.columns, panel, k, self.index_tile(inner, zero, 1, s.nr), nothing))

        far = (
            side.factor.load is not None and side.factor.guard is None and len(self.k_indices) == 1 and side.along_side
        )
        partly = b.op("lt", b.sub(end, first), b.index(s.nr))
        b.if_(partly, lambda inner: inner.for_(zero, count, one, [], blank, name="k"), lambda inner: [])

        def segment(at: Builder, digits: Sequence[Value], low: Value, high: Value, base: Value) -> None:
            local = {**env, **dict(zip(side.copied, digits, strict=False))}
            shift = at.sub(base, first)

            def some(inner: Builder, place: Value, width: int) -> list[Value]:
                still = self._still(inner, side, {**local, side.copied[-1]: self._several(inner, place, width)})

                def each(deep: Builder, k: Value, found: dict[Value, Value]) -> None:
                    if far and width == s.nr:
                        self._fetch(deep, side, {**local, side.copied[-1]: place, **found}, s.nr, STEPS_AHEAD)
                    value = self._value(deep, side, {**still, **found})
                    value = self.widen(deep, value, (1, width)) if width > 1 else value
                    deep.multi(
                        "store", self.columns, panel, k, self._several(deep, deep.add(shift, place), width), value
                    )

                self._k_loop(inner, start, count, each)
                return []

            self._strips_of(at, low, high, (s.nr, self.lanes), some, True)

        self._segments(b, side.copied_extents, side.copied_extents[-1], first, end, segment)
        return []

    def _masks(self, side: Side) -> bool:
        """Whether vectors at an edge are copied as such: the target masks what lies outside, and elements of a vector differ in one index."""
        return self.target.has_lane_masks and len(side.indices) == len(side.copied) == 1 and side.factor.guard is None

    def _copy_edge(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, start: Value, count: Value
    ) -> list[Value]:
        """Copy columns first..end of a panel that is not full, in vectors that are zero behind the end."""
        side = self.b

        def vector(at: Builder, place: Value) -> list[Value]:
            columns = self.index_tile(at, at.add(first, place), 1, self.lanes)
            inside = at.op("lt", columns, at.like(end, columns))
            places = self.index_tile(at, place, 1, self.lanes)

            def each(inner: Builder, k: Value, found: dict[Value, Value]) -> None:
                value = self._value(inner, side, {**env, side.copied[-1]: columns, **found}, inside)
                value = self.widen(inner, value, (1, self.lanes))
                inner.multi("store", self.columns, panel, k, places, value)

            self._k_loop(at, start, count, each)
            return []

        b.for_(b.index(0), self._columns_read(b, first, end), b.index(self.lanes), [], vector, name="c")
        return []

    def _pack_all_columns(
        self,
        b: Builder,
        env: dict[Value, Value],
        across: tuple[Value, Value],
        panels: Value,
        start: Value,
        count: Value,
    ) -> None:
        """Copy all panels of a block to their places. Rows that lie in memory as they are walked are read several panels at a time: a step reads whole lines
        side by side, which hardware foresees."""
        s, side = self.matrix, self.b
        zero, one, wide = b.index(0), b.index(1), b.index(PANELS_TOGETHER)

        def single(at: Builder, number: Value) -> list[Value]:
            self._pack_columns(at, env, across, number, number, start, count)
            return []

        plain = self.matrix.to_tile != "lower_contraction_amx"
        if not (
            plain
            and side.along_side
            and len(side.copied) == len(self.k_indices) == 1
            and side.factor.load is not None
            and side.factor.guard is None
        ):
            b.for_(zero, panels, one, [], single, name="panel")
            return
        whole = b.op("floordiv", b.op("floordiv", b.sub(across[1], across[0]), b.index(s.nr)), wide)
        whole = b.mul(whole, wide)

        def group(at: Builder, number: Value) -> list[Value]:
            first = at.add(across[0], at.mul(number, at.index(s.nr)))
            firsts = [at.add(first, at.index(p * s.nr)) for p in range(PANELS_TOGETHER)]
            places = [at.add(number, at.index(p)) for p in range(PANELS_TOGETHER)]
            still = [
                self._still(at, side, {**env, side.copied[-1]: self.index_tile(at, left, 1, s.nr)}) for left in firsts
            ]
            inside = self.index_tile(at, zero, 1, s.nr)

            def each(inner: Builder, k: Value, found: dict[Value, Value]) -> None:
                self._fetch(inner, side, {**env, side.copied[-1]: first, **found}, PANELS_TOGETHER * s.nr, ROWS_AHEAD)
                for own, place in zip(still, places, strict=True):
                    value = self.widen(inner, self._value(inner, side, {**own, **found}), (1, s.nr))
                    inner.multi("store", self.columns, place, k, inside, value)

            self._k_loop(at, start, count, each)
            return []

        b.for_(zero, whole, wide, [], group, name="panel")
        b.for_(whole, panels, one, [], single, name="panel")

    def _copies_on_the_way(self) -> bool:
        """Whether the first panel of rows reads columns where they lie and leaves their copies for the others: copying then costs next to nothing, where a
        CPU has registers for all the addresses."""
        side = self.b
        return (
            self.target.name.startswith("aarch64")
            and self.matrix.to_tile == "lower_contraction_cpu"
            and self.matrix.keep == "b"
            and side.along_side
            and len(side.copied) == len(side.indices) == len(self.k_indices) == 1
            and side.factor.load is not None
            and side.factor.guard is None
            and not sum_bounds(self.found)
        )

    def _is_near(self, b: Builder) -> Value:
        """Whether rows of the second factor are short: of longer ones a few lines each come too slowly for the innermost loop, and whole powers of two apart they
        drive each other out of the nearest cache."""
        load = self.b.factor.load
        assert load is not None
        size = self.b.copied_extents[-1] * dtype_of(load.operands[0].type).itemsize
        even = b.op("eq", b.index(mod(size, Size.of(EVEN))), b.index(0))
        return b.op("le", b.index(size), b.select(even, b.index(SHORT_ROW), b.index(NEAR)))

    def _copying_reader(
        self, b: Builder, env: dict[Value, Value], panel: Value, left: Value, start: Value
    ) -> Callable[[Builder, Value], Value]:
        """`read(builder, k)` gives a row of the columns from `left` on, and copies it to place `panel`."""
        s, side, (index,) = self.matrix, self.b, self.k_indices
        still = self._still(b, side, {**env, side.copied[-1]: self.index_tile(b, left, 1, s.nr)})
        inside = self.index_tile(b, b.index(0), 1, s.nr)

        def read(at: Builder, k: Value) -> Value:
            place = at.add(start, k)
            self._fetch(at, side, {**env, side.copied[-1]: left, index: place}, s.nr, STEPS_AHEAD)
            value = self.widen(at, self._value(at, side, {**still, index: place}), (1, s.nr))
            at.multi("store", self.columns, panel, k, inside, value)
            return value

        return read

    def _fetch(self, b: Builder, side: Side, env: dict[Value, Value], width: int, steps: int) -> None:
        """Fetch `width` elements that lie side by side and are copied some steps later: each step reads another row, which no hardware foresees."""
        load, (k,) = side.factor.load, self.k_indices
        assert load is not None
        if any(op.opcode == "load" for op in side.ops if op is not load):
            return  # steps behind the last have no places
        line, last = LINE // dtype_of(load.operands[0].type).itemsize, width - 1
        for column in sorted({*range(0, last, line), last}):
            local = {
                **env,
                k: b.add(env[k], b.index(steps)),
                side.copied[-1]: b.add(env[side.copied[-1]], b.index(column)),
            }
            self.ops(b, [op for op in side.ops if op is not load], local, [])
            b.multi("prefetch", *(local[v] for v in load.operands))

    def _several(self, b: Builder, first: Value, width: int) -> Value:
        return self.index_tile(b, first, 1, width) if width > 1 else first

    def _k_loop(
        self, b: Builder, start: Value, count: Value, body: Callable[[Builder, Value, dict[Value, Value]], None]
    ) -> None:
        """`count` steps of the sum from `start` on. The indices that make up a step are counted up, not taken apart every time."""
        zero, one = b.index(0), b.index(1)
        if len(self.k_indices) == 1:

            def plain(inner: Builder, k: Value) -> list[Value]:
                body(inner, k, {self.k_indices[0]: inner.add(start, k)})
                return []

            b.for_(zero, count, one, [], plain, name="k")
            return

        def step(inner: Builder, k: Value, *digits: Value) -> list[Value]:
            body(inner, k, dict(zip(self.k_indices, digits, strict=True)))
            return self._count_up(inner, digits)

        b.for_(zero, count, one, self._steps_apart(b, start), step, name="k")

    def _count_up(self, b: Builder, digits: Sequence[Value]) -> list[Value]:
        """The indices of the next step of the sum."""
        return count_up(b, digits, self.k_extents)

    def _segments(
        self, b: Builder, extents: Sequence[Size], limit: Size, low: Value, high: Value,
        body: Callable[[Builder, Sequence[Value], Value, Value, Value], None],
    ) -> None:  # fmt: skip
        """Cut the numbers low..high where their outer digits change: `body(builder, outer digits, first, end, base)` for each piece, whose
        numbers are `base` and the innermost index, below `limit`."""
        if len(extents) == 1:
            body(b, (), low, high, b.index(0))
            return
        row = b.index(extents[-1])

        def piece(inner: Builder, outer: Value) -> list[Value]:
            base = inner.mul(outer, row)
            first, end = (
                inner.op("max", inner.sub(low, base), inner.index(0)),
                inner.op("min", inner.sub(high, base), inner.index(limit)),
            )
            body(inner, self._apart(inner, outer, extents[:-1]), first, end, base)
            return []

        last = b.op("floordiv", b.sub(b.add(high, row), b.index(1)), row)
        b.for_(b.op("floordiv", low, row), last, b.index(1), [], piece, name="outer")

    def _strips_of(
        self, b: Builder, low: Value, high: Value, widths: Sequence[int], some: Callable[[Builder, Value, int], Sequence[Value]],
        again: bool,
    ) -> None:  # fmt: skip
        """Walk low..high in vectors. With `again`, what is left over is done by a vector that ends there and repeats a few elements."""
        one, lanes = b.index(1), b.index(widths[-1])

        def vectors(at: Builder) -> list[Value]:
            begin = low
            for width in widths[:-1]:
                middle = at.add(begin, at.mul(at.op("floordiv", at.sub(high, begin), at.index(width)), at.index(width)))
                at.for_(begin, middle, at.index(width), [], lambda inner, k, w=width: some(inner, k, w), name="c")
                begin = middle
            if again:
                at.for_(
                    begin,
                    high,
                    lanes,
                    [],
                    lambda inner, k: some(inner, inner.op("min", k, inner.sub(high, lanes)), widths[-1]),
                    name="c",
                )
                return []
            middle = at.add(begin, at.mul(at.op("floordiv", at.sub(high, begin), lanes), lanes))
            at.for_(begin, middle, lanes, [], lambda inner, k: some(inner, k, widths[-1]), name="c")
            at.for_(middle, high, one, [], lambda inner, k: some(inner, k, 1), name="c")
            return []

        def singles(at: Builder) -> list[Value]:
            at.for_(low, high, one, [], lambda inner, k: some(inner, k, 1), name="c")
            return []

        if again:
            b.if_(b.op("ge", b.sub(high, low), lanes), vectors, singles)
        else:
            vectors(b)

    def _transpose_columns(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, start: Value, count: Value
    ) -> None:
        """Copy a panel of a factor that lies along k: a vector of each column in turn, so that no line of memory is read twice."""
        s, side = self.matrix, self.b
        zero, one = b.index(0), b.index(1)
        if self._turns_squares():
            enough = b.op("ge", count, b.index(self.lanes))
            b.if_(
                enough,
                lambda at: self._turn_squares(at, env, first, end, panel, start, count),
                lambda at: self._turn_singles(at, env, first, end, panel, start, count),
            )
            return
        whole = b.mul(b.op("floordiv", count, b.index(self.lanes)), b.index(self.lanes))

        def put(at: Builder, k: Value, c: Value, width: int) -> list[Value]:
            number = at.add(first, c)

            def there(inner: Builder) -> list[Value]:
                local = dict(env)
                self._bind(inner, local, side.indices, side.extents, number)
                local[self.k_indices[0]] = self._several(inner, inner.add(start, k), width)
                value = self._value(inner, side, local)
                return [self.widen(inner, value, (1, width)) if width > 1 else value]

            def outside(inner: Builder) -> list[Value]:
                nothing = inner.const(0, side.dtype)
                return [inner.op("broadcast", nothing, shape=(1, width)) if width > 1 else nothing]

            (value,) = at.if_(at.op("lt", number, end), there, outside)
            at.multi("store", self.columns, panel, self._several(at, k, width), c, value)
            return []

        def steps(low: Value, high: Value, width: int, left: Value) -> None:
            b.for_(
                low, high, b.index(width), [],
                lambda at, k: at.for_(left, at.index(s.nr), one, [], lambda inner, c: put(inner, k, c, width), name="c"),
                name="k",
            )  # fmt: skip

        def group(at: Builder, left: Value) -> list[Value]:
            """As many columns as a vector has lanes, all of which are there."""
            places = [at.add(left, at.index(p)) for p in range(self.lanes)]

            def by_k(inner: Builder, k: Value) -> list[Value]:
                values: list[Value] = []
                for place in places:
                    local = dict(env)
                    self._bind(inner, local, side.indices, side.extents, inner.add(first, place))
                    local[self.k_indices[0]] = self._several(inner, inner.add(start, k), self.lanes)
                    values.append(self.widen(inner, self._value(inner, side, local), (1, self.lanes)))
                for place, value in zip(places, values, strict=True):
                    inner.multi("store", self.columns, panel, self._several(inner, k, self.lanes), place, value)
                return []

            at.for_(zero, whole, at.index(self.lanes), [], by_k, name="k")
            return []

        grouped = zero
        if self.lanes <= TURNED_TOGETHER:
            grouped = b.mul(b.op("floordiv", b.sub(end, first), b.index(self.lanes)), b.index(self.lanes))
            b.for_(zero, grouped, b.index(self.lanes), [], group, name="c")
        steps(zero, whole, self.lanes, grouped)
        steps(whole, count, 1, zero)

    def _turns_squares(self) -> bool:
        """Whether vectors have many lanes: as many columns are then turned in registers, where each element would be a store of its own."""
        lanes = self.lanes
        return lanes > TURNED_TOGETHER and lanes & (lanes - 1) == 0 and len(self.b.indices) == 1 and self.b.dtype.itemsize >= 4

    def _turn_squares(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, start: Value, count: Value
    ) -> list[Value]:
        """As many columns as a vector has lanes at a time, of which the last square repeats a few steps; behind the last column it is copied again."""
        side, lanes = self.b, self.lanes
        zero, last = b.index(0), b.sub(end, b.index(1))
        latest = b.sub(count, b.index(lanes))

        def group(at: Builder, left: Value) -> list[Value]:
            numbers = self.index_tile(at, at.add(first, left), 0, lanes)
            numbers = at.op("min", numbers, at.like(last, numbers))
            still = self._still(at, side, {**env, side.indices[0]: numbers})

            def by_k(inner: Builder, k: Value) -> list[Value]:
                k = inner.op("min", k, latest)
                own = {**still, self.k_indices[0]: self.index_tile(inner, inner.add(start, k), 1, lanes)}
                value = self.widen(inner, self._value(inner, side, own), (lanes, lanes))
                steps, places = self.index_tile(inner, k, 1, lanes), self.index_tile(inner, left, 0, lanes)
                return list(inner.multi("store", self.columns, panel, steps, places, value))

            at.for_(zero, count, at.index(lanes), [], by_k, name="k")
            return []

        b.for_(zero, self._columns_read(b, first, end), b.index(lanes), [], group, name="c")
        return []

    def _turn_singles(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, start: Value, count: Value
    ) -> list[Value]:
        """Fewer steps than a vector has lanes, element by element."""
        side, last = self.b, b.sub(end, b.index(1))

        def put(at: Builder, c: Value) -> list[Value]:
            number = at.op("min", at.add(first, c), last)
            still = self._still(at, side, {**env, side.indices[0]: number})

            def each(inner: Builder, k: Value, found: dict[Value, Value]) -> None:
                inner.multi("store", self.columns, panel, k, c, self._value(inner, side, {**still, **found}))

            self._k_loop(at, start, count, each)
            return []

        b.for_(b.index(0), self._columns_read(b, first, end), b.index(1), [], put, name="c")
        return []

    def _columns_read(self, b: Builder, first: Value, end: Value) -> Value:
        """How many columns of a panel some tile reads: at the right edge there are tiles of fewer registers."""
        s, lanes = self.matrix, b.index(self.lanes)
        if s.to_tile != "lower_contraction_cpu" or s.keep != "b":
            return b.index(s.nr)
        vectors = b.op("floordiv", b.sub(b.add(b.sub(end, first), lanes), b.index(1)), lanes)
        return b.mul(vectors, lanes)

    def _pack_rows(
        self, b: Builder, env: dict[Value, Value], panel: Value, top: Value, bottom: Value, start: Value, count: Value
    ) -> None:
        """Copy `mr` rows from `top` on to place `panel`."""
        s, side = self.matrix, self.a
        zero, one = b.index(0), b.index(1)
        if side.along_side:
            width = -(-s.mr // self.lanes) * self.lanes
            far = side.factor.load is not None and side.factor.guard is None and len(self.k_indices) == 1

            def together(at: Builder) -> list[Value]:
                """As vectors, where rows lie side by side."""
                local = dict(env)
                digit = self._bind(at, local, side.indices, side.extents, top)
                bound = {index: local[index] for index in side.indices}
                local[side.indices[-1]] = self.index_tile(at, digit, 1, width)
                still, places = self._still(at, side, local), self.index_tile(at, zero, 1, width)

                def by_k(inner: Builder, k: Value) -> list[Value]:
                    own = dict(still)
                    self._bind(inner, own, self.k_indices, self.k_extents, inner.add(start, k))
                    if far:
                        self._fetch(
                            inner, side, {**env, **bound, self.k_indices[0]: own[self.k_indices[0]]}, width, STEPS_AHEAD
                        )
                    value = self.widen(inner, self._value(inner, side, own), (1, width))
                    return list(inner.multi("store", self.rows, panel, k, places, value))

                at.for_(zero, count, one, [], by_k, name="k")
                return []

            def masked(at: Builder) -> list[Value]:
                """As vectors that are zero behind the last row."""
                numbers, places = self.index_tile(at, top, 1, width), self.index_tile(at, zero, 1, width)
                inside = at.op("lt", numbers, at.like(bottom, numbers))

                def each(inner: Builder, k: Value, found: dict[Value, Value]) -> None:
                    value = self._value(inner, side, {**env, side.indices[0]: numbers, **found}, inside)
                    inner.multi("store", self.rows, panel, k, places, self.widen(inner, value, (1, width)))

                self._k_loop(at, start, count, each)
                return []

            def apart(at: Builder) -> list[Value]:
                def single(inner: Builder, k: Value, c: Value) -> list[Value]:
                    number = inner.add(top, c)

                    def there(deep: Builder) -> list[Value]:
                        local = dict(env)
                        self._bind(deep, local, self.k_indices, self.k_extents, deep.add(start, k))
                        self._bind(deep, local, side.indices, side.extents, number)
                        return [self._value(deep, side, local)]

                    (value,) = inner.if_(
                        inner.op("lt", number, bottom), there, lambda deep: [deep.const(0, side.dtype)]
                    )
                    return list(inner.multi("store", self.rows, panel, k, c, value))

                def by_k(inner: Builder, k: Value) -> list[Value]:
                    inner.for_(zero, inner.index(width), one, [], lambda deep, c: single(deep, k, c), name="c")
                    return []

                at.for_(zero, count, one, [], by_k, name="k")
                return []

            digit = self._apart(b, top, side.extents)[-1]
            b.if_(self._run_fits(b, digit, top, width, bottom, side), together, masked if self._masks(side) else apart)
            return

        def by_row(at: Builder, row: Value) -> list[Value]:
            number = at.add(top, row)

            def there(inner: Builder) -> list[Value]:
                local = dict(env)
                self._bind(inner, local, side.indices, side.extents, number)
                self._along_k(inner, self._still(inner, side, local), panel, row, start, count)
                return []

            def outside(inner: Builder) -> list[Value]:
                nothing = inner.op("broadcast", inner.const(0, side.dtype), shape=(1, self.lanes))

                def blank(deep: Builder, k: Value) -> list[Value]:
                    return list(deep.multi("store", self.rows, panel, row, self.index_tile(deep, k, 1, self.lanes), nothing))

                inner.for_(zero, count, inner.index(self.lanes), [], blank, name="k")
                return []

            at.if_(at.op("lt", number, bottom), there, outside)
            return []

        b.for_(zero, b.index(s.mr), one, [], by_row, name="row")

    def _along_k(
        self, b: Builder, env: dict[Value, Value], panel: Value, row: Value, start: Value, count: Value
    ) -> None:
        """Copy one row of the first factor, vectors where they follow one another along k."""
        side = self.a

        def each(at: Builder, k: Value, found: dict[Value, Value]) -> None:
            at.multi("store", self.rows, panel, row, k, self._value(at, side, {**env, **found}))

        def one_by_one(at: Builder) -> list[Value]:
            self._k_loop(at, start, count, each)
            return []

        if not side.along_k:
            one_by_one(b)
            return

        def segment(at: Builder, digits: Sequence[Value], low: Value, high: Value, base: Value) -> None:
            local = {**env, **dict(zip(self.k_indices, digits, strict=False))}
            shift = at.sub(base, start)

            def some(inner: Builder, place: Value, width: int) -> list[Value]:
                own = {**local, self.k_indices[-1]: self._several(inner, place, width)}
                value = self._value(inner, side, own)
                value = self.widen(inner, value, (1, width)) if width > 1 else value
                return list(
                    inner.multi(
                        "store", self.rows, panel, row, self._several(inner, inner.add(shift, place), width), value
                    )
                )

            self._strips_of(at, low, high, (4 * self.lanes, self.lanes), some, True)

        env = {**env, **dict.fromkeys(self.k_indices, b.index(0))}
        length = product(self.k_extents[-side.run :])
        extents = (*self.k_extents[: -side.run], length)

        def by_vectors(at: Builder) -> list[Value]:
            self._segments(at, extents, length, start, at.add(start, count), segment)
            return []

        if len(extents) == 1:
            by_vectors(b)
        else:
            b.if_(b.op("ge", b.index(length), b.index(self.lanes)), by_vectors, one_by_one)
