"""Copies of a contraction's factors for a CPU: panels of rows and columns in the order the innermost loop reads them.

In: the factors (`sides.py`) and where in the result and the sum a block is. Out: tile-stage ops that fill panels in local memory, with zeros for
what lies outside; or, where columns lie side by side as they are, ops that read them there. `lower_contraction_cpu.py` builds the kernel around this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.base.dtypes import i64
from tilewright.base.sizes import Size, mod, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.common.nest_shapes import Condition, join, shape_of
from tilewright.passes.to_tile.panels.active_steps import ActiveRuns
from tilewright.passes.to_tile.panels.columns_in_place import LINE, STEPS_AHEAD, ColumnsInPlace
from tilewright.passes.to_tile.panels.count_up import count_up
from tilewright.passes.to_tile.panels.short_rows import merges_apart
from tilewright.passes.to_tile.panels.sides import Side, needed_ops
from tilewright.passes.to_tile.panels.steps import local_array
from tilewright.passes.windows.sum_ranges import sum_bounds

PANELS_TOGETHER, ROWS_AHEAD = 8, 4
"""Panels of columns that are copied side by side, and rows from when their lines are fetched to their copy."""
SHORT_ROW, NEAR, EVEN = 2048, 8192, 1024
"""Bytes of a row of the second factor up to which columns are copied on the way: always, and where they are no multiple of the last."""
TURNED_TOGETHER = 4
"""Lanes of a vector up to which as many columns that lie along the sum are copied side by side, each element by a store of its own."""
FEWEST_LANES = 4
"""Columns of a row from which on they are copied as a vector with a mask."""
ROWS_MERGED = (2, 3)
"""Rows of the array that a vector of columns is merged of: their addresses and masks have room in registers."""


class PanelCopies(ColumnsInPlace):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    rows: Value
    """The panels of the first factor."""
    runs: tuple[ActiveRuns, Value] | None = None
    """The runs of steps that count for the rows at hand, and their number; None: all steps do."""
    dots: Value
    """The sums of a tile over one stretch, where they are added up column by column."""

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
                    fits = self._rows_fit(at, rows[0])
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
            return any_length(b, ROWS_MERGED if self._merges_rows() else ())
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
        CPU has registers for all the addresses, or multiplies long vectors."""
        side = self.b
        return (
            (self.target.name.startswith("aarch64") or self.target.vector_bytes == LINE)
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

        def one_by_one(at: Builder) -> list[Value]:
            at.for_(zero, at.index(s.mr), one, [], by_row, name="row")
            return []

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

        if not self._has_runs():
            one_by_one(b)
            return
        if self.target.has_lane_masks:
            self._copy_runs(b, env, panel, (top, bottom), start, count)
            return
        are_long = b.op("ge", b.index(product(self.k_extents[-side.run :])), b.index(self.lanes))
        b.if_(are_long, lambda at: self._copy_runs(at, env, panel, (top, bottom), start, count), one_by_one)

    def _has_runs(self) -> bool:
        """Whether rows of the first factor are elements of an array that lie in runs along the sum of a window."""
        side, load = self.a, self.a.factor.load
        if not side.along_k or side.run == len(self.k_extents) or load is None or side.factor.guard is not None or side.factor.value is not load.result:
            return False
        if dtype_of(load.operands[0].type) is not side.dtype or self.matrix.to_tile != "lower_contraction_cpu":
            return False
        indices = {*self.found.indices, *self.k_indices}
        return all(value in indices for form in self.found.access(side.factor) for value in form.values)

    def _copy_runs(
        self, b: Builder, env: dict[Value, Value], panel: Value, down: tuple[Value, Value], start: Value, count: Value
    ) -> list[Value]:
        """Copy `mr` rows run by run of a window, which all rows have alike: where a run lies is found once for all of them. Behind the last row it is copied again."""
        s, side, load, (top, bottom) = self.matrix, self.a, self.a.factor.load, down
        assert load is not None
        zero, one, lanes = b.index(0), b.index(1), b.index(self.lanes)
        places = local_array(b, "row_places", (len(load.operands) - 1, s.mr), i64)
        others = [op for op in side.ops if op is not load]
        at_first = {**env, **dict.fromkeys((*self.k_indices, *side.indices), zero)}

        def indices(at: Builder, known: Mapping[Value, Value]) -> list[Value]:
            local = {**at_first, **known}
            self.ops(at, others, local, [])
            return [local[v] for v in load.operands[1:]]

        def note(at: Builder, row: Value, *place: Value) -> list[Value]:
            for axis, index in enumerate(indices(at, dict(zip(side.indices, place, strict=True)))):
                at.multi("store", places, at.index(axis), row, index)
            is_last = at.op("ge", at.add(at.add(top, row), one), bottom)
            return [at.select(is_last, here, after) for here, after in zip(place, count_up(at, place, side.extents), strict=True)]

        b.for_(zero, b.index(s.mr), one, self._apart(b, top, side.extents), note, name="row")
        origin = indices(b, {})
        length = product(self.k_extents[-side.run :])
        extents = (*self.k_extents[: -side.run], length)

        def segment(at: Builder, digits: Sequence[Value], low: Value, high: Value, base: Value) -> None:
            run = {**dict(zip(self.k_indices, digits, strict=False)), self.k_indices[-1]: low}
            moved = [at.sub(index, first) for index, first in zip(indices(at, run), origin, strict=True)]
            width, shift = at.sub(high, low), at.add(at.sub(base, start), low)

            def along(deep: Builder, first: Value, place: Value) -> Value:
                return self.index_tile(deep, deep.add(first, place), 1, self.lanes)

            def moved_places(inner: Builder, row: Value) -> list[Value]:
                return [inner.add(inner.op("load", places, inner.index(axis), row), move) for axis, move in enumerate(moved)]

            def masked(inner: Builder, place: Value) -> list[Value]:
                """A vector of each row, which have one mask. What it has behind the end of a run, the next one writes over."""
                lane = self.index_tile(inner, zero, 1, self.lanes)
                inside = inner.op("lt", lane, inner.like(inner.sub(width, place), lane))

                def of_row(deep: Builder, row: Value) -> list[Value]:
                    here = moved_places(deep, row)
                    value = deep.op("load", load.operands[0], *here[:-1], along(deep, here[-1], place), inside, masked=True)
                    return list(deep.multi("store", self.rows, panel, row, along(deep, shift, place), value))

                inner.for_(zero, inner.index(s.mr), one, [], of_row, name="row")
                return []

            def by_row(inner: Builder, row: Value) -> list[Value]:
                here = moved_places(inner, row)

                def vector(deep: Builder, place: Value) -> list[Value]:
                    value = deep.op("load", load.operands[0], *here[:-1], along(deep, here[-1], place))
                    return list(deep.multi("store", self.rows, panel, row, along(deep, shift, place), value))

                def single(deep: Builder, place: Value) -> list[Value]:
                    value = deep.op("load", load.operands[0], *here[:-1], deep.add(here[-1], place))
                    return list(deep.multi("store", self.rows, panel, row, deep.add(shift, place), value))

                whole = inner.mul(inner.op("floordiv", width, lanes), lanes)
                inner.for_(zero, whole, lanes, [], vector, name="c")
                inner.for_(whole, width, one, [], single, name="c")
                return []

            if self.target.has_lane_masks:
                at.for_(zero, width, lanes, [], masked, name="c")
            else:
                at.for_(zero, at.index(s.mr), one, [], by_row, name="row")

        def several(at: Builder, first: Value, end: Value, _: Sequence[Value]) -> list[Value]:
            self._segments(at, extents, length, at.add(start, first), at.add(start, end), segment)
            return []

        if self.runs is None:
            several(b, zero, count, ())
        else:
            self.runs[0].over(b, self.runs[1], [], several)
        return []

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

        def short_run(at: Builder, digits: Sequence[Value], low: Value, high: Value, base: Value) -> None:
            """One vector of a run that is shorter: what it has behind the end of the run, the next one writes over."""
            places = self.index_tile(at, low, 1, self.lanes)
            own = {**env, **dict(zip(self.k_indices, digits, strict=False)), self.k_indices[-1]: places}
            value = self.widen(at, self._value(at, side, own, at.op("lt", places, at.like(high, places))), (1, self.lanes))
            at.multi("store", self.rows, panel, row, self.index_tile(at, at.add(at.sub(base, start), low), 1, self.lanes), value)

        def by_runs(at: Builder) -> list[Value]:
            self._segments(at, extents, length, start, at.add(start, count), short_run)
            return []

        masks = self.target.has_lane_masks and side.dtype is self.dtype and self.matrix.to_tile != "lower_contraction_amx"
        if len(extents) == 1:
            by_vectors(b)
        elif self._has_runs():
            one_by_one(b)  # runs are short
        else:
            b.if_(b.op("ge", b.index(length), b.index(self.lanes)), by_vectors, by_runs if masks else one_by_one)
