"""Loop stage -> tile stage for contractions on a CPU with a matrix unit (AMX): panels of narrow numbers, multiplied by the unit.

In: a loop-stage kernel that is a contraction of bf16 with sums in f32, or of 8-bit integers with sums in i32, and its schedule of
family `amx`. Out: a tile-stage kernel, as `lower_contraction_cpu` makes it, with other panels. Copies keep the factors' own dtype; those
of the second are words of neighbours along k, as the unit wants them, and all are filled up with zeros to whole steps of 64 bytes:

    panel_begin; … panel_dot %sums, %rows, %columns, where, row, panel, steps, first …; panel_end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.contraction import Contraction, find_contraction
from tilewright.base.dtypes import u8, u16, u32
from tilewright.base.errors import CompilerBug
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Value
from tilewright.ir.ops_matrix import PANEL_STEP
from tilewright.passes.schedules.matrix import Amx
from tilewright.passes.to_tile.lower_contraction_cpu import PanelLowering

LINES = 16
"""Words along k of one step."""


def lower_contraction_amx(kernel: Kernel, schedule: Amx, target: Target) -> Kernel:
    """The tile-stage kernel."""
    found = find_contraction(kernel)
    if found is None:
        raise CompilerBug.at("TW040", f"{kernel.name} is not a contraction", kernel.span)
    return _AmxLowering(kernel, found, schedule, target).run_contraction()


class _AmxLowering(PanelLowering):
    def __init__(self, kernel: Kernel, found: Contraction, schedule: Amx, target: Target) -> None:
        super().__init__(kernel, found, schedule, target)
        self.a.dtype, self.b.dtype = found.a.dtype, found.b.dtype
        self.step = PANEL_STEP // self.a.dtype.itemsize
        self.group = 4 // self.a.dtype.itemsize
        # Rows always lie along k.
        self.a.along_side = False
        self.a.along_k = self.a.walks(found, self.k_indices[-1])

    def _placed(self) -> tuple[int, ...]:
        return ()

    def _block(self, b: Builder, env: dict[Value, Value], down: tuple[Value, Value], across: tuple[Value, Value]) -> None:
        b.multi("panel_begin")
        super()._block(b, env, down, across)
        b.multi("panel_end")

    def _allocate(self, b: Builder, whole_a: bool) -> None:
        s = self.matrix
        # Rows lie a line more than the sum's stretch apart, panels a row: not on the same places of the cache.
        self.rows = self._local(b, "rows", (s.m // s.mr if whole_a else 1, s.mr, s.k + self.step), self.a.dtype)
        self.columns = self._local(b, "columns", (1 if whole_a else s.n // s.nr, s.k // self.group + 1, s.nr), u32)

    def _steps(self, b: Builder, count: Value) -> Value:
        """Steps of the unit in `count` terms; one at least."""
        return b.op("max", b.op("floordiv", b.add(count, b.index(self.step - 1)), b.index(self.step)), b.index(1))

    # -- one tile -----------------------------------------------------------------------------------------------

    def _one_tile(
        self, b: Builder, env: dict[Value, Value], where: Value, panels: tuple[Value, Value], stretch: tuple[Value, Value], last: Value,
        down: tuple[Value, Value], across: tuple[Value, Value], direct: bool,
    ) -> None:  # fmt: skip
        s = self.matrix
        start, count = stretch
        first = b.op("eq", start, b.index(0))
        b.multi("panel_dot", self.sums, self.rows, self.columns, where, *panels, self._steps(b, count), first, second=self.b.dtype)
        digit = self._apart(b, across[0], self.b.numbered)[-1]
        full = self._run_fits(b, digit, across[0], s.nr, across[1], self.b)
        full = b.logical_and(full, b.op("le", b.add(down[0], b.index(s.mr)), down[1]))

        def finish(at: Builder) -> list[Value]:
            at.if_(full, lambda end: self._finish_full(end, env, where, down[0], across[0]), lambda end: self._finish(end, env, where, down, across))
            return []

        b.if_(last, finish, lambda end: [])

    def _finish_full(self, b: Builder, env: dict[Value, Value], where: Value, top: Value, left: Value) -> list[Value]:
        """The rest of the kernel on a tile no part of which is outside: whole rows."""
        s, found = self.matrix, self.found
        rest = [op for op in found.parallel.regions[0].ops if op is not found.reduction]
        local = dict(env)
        digit = self._bind(b, local, self.b.indices, self.b.numbered, left)

        def by_row(at: Builder, row: Value) -> list[Value]:
            own = {**local, self.b.indices[-1]: self.index_tile(at, digit, 1, s.nr)}
            self._bind(at, own, self.a.indices, self.a.extents, at.add(top, row))
            own[found.reduction.results[0]] = at.op("load", self.sums, where, row, self.index_tile(at, at.index(0), 1, s.nr))
            self.ops(at, rest, own, [])
            return []

        b.for_(b.index(0), b.index(s.mr), b.index(1), [], by_row, name="row")
        return []

    # -- copying factors ----------------------------------------------------------------------------------------

    def _pack_rows(
        self, b: Builder, env: dict[Value, Value], panel: Value, top: Value, bottom: Value, start: Value, count: Value
    ) -> None:
        super()._pack_rows(b, env, panel, top, bottom, start, count)
        end = b.mul(self._steps(b, count), b.index(self.step))

        def clear(at: Builder, row: Value) -> list[Value]:
            def one(inner: Builder, k: Value) -> list[Value]:
                return list(inner.multi("store", self.rows, panel, row, k, inner.const(0, self.a.dtype)))

            at.for_(count, end, at.index(1), [], one, name="k")
            return []

        def rows(at: Builder) -> list[Value]:
            at.for_(at.index(0), at.index(self.matrix.mr), at.index(1), [], clear, name="row")
            return []

        b.if_(b.op("lt", count, end), rows, lambda at: [])

    def _pack_columns(
        self, b: Builder, env: dict[Value, Value], across: tuple[Value, Value], number: Value, panel: Value, start: Value, count: Value
    ) -> None:
        s, side = self.matrix, self.b
        zero, one = b.index(0), b.index(1)
        first = b.add(across[0], b.mul(number, b.index(s.nr)))
        end = b.op("min", b.add(first, b.index(s.nr)), across[1])
        lines = b.mul(self._steps(b, count), b.index(LINES))
        whole = b.op("floordiv", count, b.index(self.group))
        some_left = b.op("lt", b.mul(whole, b.index(self.group)), count)
        used = b.add(whole, b.select(some_left, one, zero))

        def blank(inner: Builder, line: Value) -> list[Value]:
            nothing = inner.op("broadcast", inner.const(0, u32), shape=(1, s.nr))
            return list(inner.multi("store", self.columns, panel, line, self.index_tile(inner, zero, 1, s.nr), nothing))

        partly = b.op("lt", b.sub(end, first), b.index(s.nr))
        b.for_(b.select(partly, zero, used), lines, one, [], blank, name="k")
        if side.along_k and len(self.k_indices) == 1:
            self._transpose_words(b, env, (first, end), panel, start, (count, whole, some_left))
            return

        def segment(at: Builder, digits: Sequence[Value], low: Value, high: Value, base: Value) -> None:
            local = {**env, **dict(zip(side.copied, digits, strict=False))}
            shift = at.sub(base, first)

            def some(inner: Builder, place: Value, width: int) -> list[Value]:
                def value(deep: Builder, found: dict[Value, Value]) -> Value:
                    return self._value(deep, side, {**local, **found, side.copied[-1]: self._several(deep, place, width)})

                def put(deep: Builder, line: Value, word: Value) -> None:
                    wide = self.widen(deep, word, (1, width)) if width > 1 else word
                    deep.multi("store", self.columns, panel, line, self._several(deep, deep.add(shift, place), width), wide)

                def line(deep: Builder, number: Value, *k: Value) -> list[Value]:
                    parts = []
                    for _ in range(self.group):
                        parts.append(value(deep, dict(zip(self.k_indices, k, strict=True))))
                        k = tuple(self._count_up(deep, k)) if len(k) > 1 else (deep.add(k[0], deep.index(1)),)
                    put(deep, number, self._word(deep, parts))
                    return list(k)

                k = inner.for_(zero, whole, one, self._steps_apart(inner, start), line, name="k")

                def rest(deep: Builder) -> list[Value]:
                    put(deep, whole, self._last_word(deep, k, count, width, value))
                    return []

                inner.if_(some_left, rest, lambda deep: [])
                return []

            self._strips_of(at, low, high, (s.nr, self.lanes), some, True)

        self._segments(b, side.copied_extents, side.copied_extents[-1], first, end, segment)

    def _word(self, b: Builder, parts: Sequence[Value]) -> Value:
        """Neighbours along k as one number, the first lowest."""
        bits = 32 // self.group
        word: Value | None = None
        for position, part in enumerate(parts):
            wide = b.cast(b.bitcast(part, u16 if bits == 16 else u8), u32)
            if word is not None:
                wide = b.op("or", word, b.op("shl", wide, b.splat(position * bits, wide)))
            word = wide
        assert word is not None
        return word

    def _last_word(
        self, b: Builder, k: Sequence[Value], count: Value, width: int, value: Callable[[Builder, dict[Value, Value]], Value]
    ) -> Value:
        """A word of which only some terms are there."""
        left = b.op("mod", count, b.index(self.group))
        digits = list(k)
        parts: list[Value] = []
        for position in range(self.group):

            def there(at: Builder, now: Sequence[Value] = tuple(digits)) -> list[Value]:
                found = value(at, dict(zip(self.k_indices, now, strict=True)))
                return [self.widen(at, found, (1, width)) if width > 1 else found]

            def outside(at: Builder) -> list[Value]:
                nothing = at.const(0, self.b.dtype)
                return [at.op("broadcast", nothing, shape=(1, width)) if width > 1 else nothing]

            (part,) = b.if_(b.op("lt", b.index(position), left), there, outside)
            parts.append(part)
            digits = self._count_up(b, digits) if len(digits) > 1 else [b.add(digits[0], b.index(1))]
        return self._word(b, parts)

    def _transpose_words(
        self, b: Builder, env: dict[Value, Value], side: tuple[Value, Value], panel: Value, start: Value, lines: tuple[Value, Value, Value]
    ) -> None:
        """Copy a panel of a factor that lies along k: a step's words of each column in turn."""
        first, end = side
        count, whole, some_left = lines
        zero, one = b.index(0), b.index(1)
        columns = b.sub(end, first)

        def value_at(at: Builder, c: Value, found: dict[Value, Value]) -> Value:
            local = {**env, **found}
            self._bind(at, local, self.b.indices, self.b.extents, at.add(first, c))
            return self._value(at, self.b, local)

        def block(at: Builder, low: Value) -> list[Value]:
            high = at.op("min", at.add(low, at.index(LINES)), whole)

            def column(inner: Builder, c: Value) -> list[Value]:
                def line(deep: Builder, number: Value) -> list[Value]:
                    k = deep.add(start, deep.mul(number, deep.index(self.group)))
                    parts = [value_at(deep, c, {self.k_indices[0]: deep.add(k, deep.index(j))}) for j in range(self.group)]
                    return list(deep.multi("store", self.columns, panel, number, c, self._word(deep, parts)))

                inner.for_(low, high, one, [], line, name="k")
                return []

            at.for_(zero, columns, one, [], column, name="c")
            return []

        b.for_(zero, whole, b.index(LINES), [], block, name="k")

        def rest(at: Builder) -> list[Value]:
            k = [at.add(start, at.mul(whole, at.index(self.group)))]

            def column(inner: Builder, c: Value) -> list[Value]:
                word = self._last_word(inner, k, count, 1, lambda deep, found: value_at(deep, c, found))
                return list(inner.multi("store", self.columns, panel, whole, c, word))

            at.for_(zero, columns, one, [], column, name="c")
            return []

        b.if_(some_left, rest, lambda at: [])
