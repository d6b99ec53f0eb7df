"""Loop stage -> tile stage for contractions on a GPU: which tile of the result a block computes, step by step along the sum.

In: a loop-stage kernel that is a contraction, and its schedule. Out: a tile-stage kernel. Blocks walk the list of result
tiles (batch, then groups of `raster` tiles along m, so that blocks that run together share operands in the L2 cache); of each they
add up products of tiles and finish it with whatever the kernel does to its results. How operands get there and which instructions
multiply them is not visible here.

    for %t = program_id, tiles, blocks {
      %acc = for %k = 0, K, 64 {stages = 4} (%sum) { %a = load A[m.., k..]; %b = load B[k.., n..]; yield dot %a, %b, %sum }
      … the epilogue on tiles [m, n] …
      store C[m.., n..]
    }

Several loop indices on one side (the pixels of a convolution) are walked as one and taken apart again, the innermost fastest. Of several
summed indices one may be cut into steps (`inner`), the others being scalars of the step. An image that threads bring element by element is read by the number of an element,
which is a sum of what places of results and places of the window add to it, and only tests that fail somewhere are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import Affine, gap
from tilewright.analysis.contraction import Contraction, Factor, Image, find_products, image, plane
from tilewright.base.dtypes import f32, i64, u32
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import (
    ONE,
    ZERO,
    Size,
    ceildiv,
    contiguous_strides,
    floordiv,
    minimum,
    times_at_least,
    without_clamp,
)
from tilewright.base.sizes import product as size_product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import INDEX, Tensor
from tilewright.ir.types import tensor as tensor_of
from tilewright.passes.common.nest_shapes import Condition, Shape, join, shape_of
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import GpuProduct, WarpProduct, Wgmma
from tilewright.passes.to_tile.lower_loops import LoopLowering
from tilewright.passes.windows.image_forms import PAIRS
from tilewright.passes.windows.sum_ranges import SumBound, is_half, is_used, result_bounds, sum_bounds, sum_range


def lower_contraction(kernel: Kernel, schedule: GpuProduct, target: Target) -> Kernel:
    """The tile-stage kernel."""
    products = find_products(kernel)
    if len(products) != schedule.horizontal:
        raise CompilerBug.at("TW040", f"{kernel.name} has {len(products)} products for a schedule of {schedule.horizontal}", kernel.span)
    lying = [found.apart() if schedule.apart else found for found in products]
    skips = schedule.horizontal == 1 and skips_steps(schedule)
    terms = isinstance(schedule, Wgmma) and bool(schedule.bf16_terms)
    bounds = sum_bounds(products[0], schedule.inner if terms else -1) if skips else ()
    if terms or (bounds and (isinstance(schedule, Wgmma) or kernel.attrs.get("zeros"))):
        # Factors were packed with zeros where their guards do not hold (`repack`, `split_terms`), or lie so.
        lying = [found.unguarded() for found in lying]
    swapped = [found.swapped() if schedule.swap_ab else found for found in lying]
    half = isinstance(schedule, Wgmma) and terms and schedule.split_k == schedule.cluster == 1 and not schedule.swap_ab and is_half(products[0], (schedule.m, schedule.n), kernel)
    used = result_bounds(products[0]) if skips and not half else ()
    return _ContractionLowering(kernel, swapped, schedule, target, bounds, used, half).run_contraction()


def skips_steps(schedule: GpuProduct) -> bool:
    """Whether blocks skip the steps of a sum that guards leave empty for all of a tile."""
    return schedule.skips if isinstance(schedule, Wgmma) else isinstance(schedule, WarpProduct) and schedule.split_k == 1


class _ContractionLowering(LoopLowering):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    def __init__(
        self, kernel: Kernel, products: Sequence[Contraction], schedule: GpuProduct, target: Target, bounds: tuple[SumBound, ...], used: tuple[Affine, ...], half: bool
    ) -> None:
        found = products[0]
        self.half = half
        """There are no tiles above the diagonal."""
        self.bounds, self.used = bounds, used
        """What is known of the terms that count, and of the results whose sums do."""
        self.stretch: tuple[Value, Value] | None = None
        """Of one of several summed indices, that steps walk: where it begins for this tile, and how many terms there are, in whole steps."""
        super().__init__(kernel, Schedule((1,) * len(found.extents)), target)
        self.found, self.matrix = found, schedule
        self.products = products
        """All of them; they differ in their second factors."""
        self.cluster, self.cluster_k = (schedule.cluster, schedule.cluster_k) if isinstance(schedule, Wgmma) else (1, 1)
        self.rank = 2
        self.unguarded = set()  # the mask of a factor is what makes its tile zero
        region = found.parallel.regions[0]
        self.everything = list(walk(region))
        self.inner = schedule.inner if len(found.k) > 1 or schedule.a_copy == "im2col" else -1
        self.term = 0 if isinstance(schedule, Wgmma) and schedule.tf32_terms else -1
        """The summed index over products of parts, all of which one step computes."""
        self.made = {result: op for op in self.everything for result in op.results}
        self.flat: dict[Value, Value] = {}
        """Arrays that are read by the number of an element, and what they are then."""

    def run_contraction(self) -> Kernel:
        found, schedule = self.found, self.matrix
        b = Builder(self.kernel.span)
        env: dict[Value, Value] = {p: p for p in self.kernel.params}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], env)
        # The blocks of a cluster have neighbouring tiles along n; what follows counts clusters.
        together = self.cluster
        down, across = ceildiv(found.size(found.m), schedule.m), ceildiv(found.size(found.n), schedule.n * together)
        tiles = found.size(found.batch) * (floordiv(down * (down + 1), Size.of(2)) if self.half else down * across)
        most = self.target.multiprocessors // (together * self.cluster_k)
        blocks = minimum(Size.of(most), tiles) if schedule.persistent else tiles
        first = b.op("program_id", axis=0)
        rank: Value | None = None
        if together > 1:
            whole, first = first, b.op("floordiv", first, b.index(together))
            rank = b.sub(whole, b.mul(first, b.index(together)))

        def one(inner: Builder, number: Value) -> list[Value]:
            self._tile(inner, number, rank, down, across, dict(env))
            return []

        if schedule.persistent:
            b.for_(first, b.index(tiles), b.index(blocks), [], one, name="tile", role="tiles")
        else:
            # Blocks begin in order: those that add up most come first, so that none of them is left at the end.
            one(b, b.sub(b.index(tiles - 1), first) if self._grows() else first)
        attrs: dict[str, Attr] = {**self.kernel.attrs, "schedule": schedule.describe()}
        if together > 1:
            attrs["cluster"] = together
        params = tuple(self.flat.get(p, p) for p in self.kernel.params)
        return replace(
            self.kernel, stage=Stage.TILE, params=params, body=Block((), tuple(b.ops)), grid=(blocks * together,), attrs=MappingProxyType(attrs)
        )  # fmt: skip

    def _grows(self) -> bool:
        """Whether later rows of tiles have longer sums."""
        row = self.found.indices[self.found.m[0]]
        signs = [(1 if bound.upper else -1) * (1 if bound.form.factor(row) == ONE else -1) for bound in self.bounds if row in bound.form.values]
        return sum(signs) > 0

    # -- where a tile lies --------------------------------------------------------------------------------------

    def _place(
        self, b: Builder, number: Value, rank: Value | None, down: Size, across: Size
    ) -> tuple[list[Value], Value, Value]:
        """Batch indices, and the first row and column, of tile `number`, or of this block's tile of that cluster. Block numbers fit 32 bits, where division is cheap."""

        def size(value: Size | int) -> Value:
            return b.cast(b.index(Size.of(value)), u32)

        def divide(value: Value, by: Value) -> tuple[Value, Value]:
            quotient = b.op("floordiv", value, by)
            return quotient, b.sub(value, b.mul(quotient, by))

        found, rest = self.found, b.cast(number, u32)
        batch: list[Value] = []
        if found.batch:
            outer, rest = divide(rest, size(floordiv(down * (down + 1), Size.of(2)) if self.half else down * across))
            for position in reversed(found.batch[1:]):
                outer, digit = divide(outer, size(found.extents[position]))
                batch.insert(0, b.cast(digit, i64))
            batch.insert(0, b.cast(outer, i64))
        if self.half:
            row, column = self._below_diagonal(b, rest)
        elif across == ONE:
            row, column = rest, size(0)
        elif self.matrix.raster == 1:
            row, column = divide(rest, size(across))
        else:
            group, inside = divide(rest, size(across * self.matrix.raster))
            top = b.mul(group, size(self.matrix.raster))
            height = b.op("min", b.sub(size(down), top), size(self.matrix.raster))
            column, low = divide(inside, height)
            row = b.add(top, low)
        down_there, along = b.cast(row, i64), b.cast(column, i64)
        if rank is not None:
            along = b.add(b.mul(along, b.index(self.cluster)), rank)
        return batch, b.mul(down_there, b.index(self.matrix.m)), b.mul(along, b.index(self.matrix.n))

    def _below_diagonal(self, b: Builder, number: Value) -> tuple[Value, Value]:
        """The row and the column of a tile on or below the diagonal, where these are counted row by row: of row r the first is r * (r + 1) / 2."""
        one, two = b.const(1, u32), b.const(2, u32)
        root = b.op("sqrt", b.add(b.mul(b.cast(number, f32), b.const(2.0, f32)), b.const(0.25, f32)))
        row = b.cast(b.sub(root, b.const(0.5, f32)), u32)

        def before(value: Value) -> Value:
            return b.op("floordiv", b.mul(value, b.add(value, one)), two)

        # A root may be off by one.
        row = b.select(b.op("gt", before(row), number), b.sub(row, one), row)
        row = b.select(b.op("le", before(b.add(row, one)), number), b.add(row, one), row)
        return row, b.sub(number, before(row))

    def _walk(
        self,
        b: Builder,
        start: Value,
        axis: int,
        extent: int,
        indices: Sequence[Value],
        sizes: Sequence[Size],
        env: dict[Value, Value],
        short: bool = False,
        numbers: Value | None = None,
    ) -> list[Condition]:
        """Bind loop indices to a tile of numbers along an axis; returns the condition that they are inside. `short`: numbers fit 32 bits, where division is cheap."""
        total = ONE
        for size in sizes:
            total = total * size
        number = self.index_tile(b, start, axis, extent) if numbers is None else numbers
        inside: list[Condition] = []
        # A cluster's last tile may lie wholly outside.
        if not total.divisible_by(extent * (self.cluster if extent == self.matrix.n else 1), self.kernel.facts):
            inside.append(Condition(b.op("lt", number, b.like(b.index(total), number)), edge=True))
        if len(indices) == 1:
            env[indices[0]] = number
            return inside
        number = b.cast(number, u32) if short else number
        for index, size in reversed(list(zip(indices[1:], sizes[1:], strict=True))):
            divisor = b.like(b.cast(b.index(size), u32) if short else b.index(size), number)
            quotient = b.op("floordiv", number, divisor)
            env[index] = b.cast(b.sub(number, b.mul(quotient, divisor)), i64)
            number = quotient
        env[indices[0]] = b.cast(number, i64)
        return inside

    def _steps(self) -> Size:
        """The extent of the loop along the sum."""
        return self.found.k_size if self.inner < 0 else self._padded() * self._around()

    def _around(self) -> Size:
        """How often the inner index is walked."""
        return size_product([extent for position, extent in enumerate(self.found.reduce_extents) if position not in (self.inner, self.term)])

    def _padded(self) -> Size:
        """The inner index's extent in whole steps."""
        return ceildiv(self.found.reduce_extents[self.inner], Size.of(self.matrix.k)) * self.matrix.k

    def _step_indices(self, b: Builder, k: Value, env: dict[Value, Value]) -> Value:
        """Bind the summed indices that are scalars of a step; gives the first value of the inner one."""
        found = self.found
        padded = b.cast(b.index(self._padded()) if self.stretch is None else self.stretch[1], u32)
        number = b.cast(k, u32)
        rest = b.op("floordiv", number, padded)
        start = b.cast(b.sub(number, b.mul(rest, padded)), i64)
        start = start if self.stretch is None else b.add(start, self.stretch[0])
        outer = [p for p in range(len(found.k)) if p not in (self.inner, self.term)]
        for position in reversed(outer[1:]):
            divisor = b.cast(b.index(found.reduce_extents[position]), u32)
            quotient = b.op("floordiv", rest, divisor)
            env[found.k[position]] = b.cast(b.sub(rest, b.mul(quotient, divisor)), i64)
            rest = quotient
        if outer:
            env[found.k[outer[0]]] = b.cast(rest, i64)
        return start

    def _is_short(self) -> bool:
        """Whether the length of the sum fits 32 bits: rows of weights of four bytes have an element for each term, and there are several rows."""
        found = self.found
        loads = [f for f in (found.a, found.b) if f.load is not None and f.dtype.itemsize >= 4]
        return any(all(any(form.is_just(k) for form in found.access(f)) for k in found.k) for f in loads)

    def _walk_sum(self, b: Builder, k: Value, axis: int, env: dict[Value, Value]) -> list[Condition]:
        found = self.found
        if self.inner < 0:
            # Where a step is a part of the last index, there is nothing to divide.
            short = len(found.k) > 1 and self._is_short() and not found.reduce_extents[-1].divisible_by(self.matrix.k, self.kernel.facts)
            return self._walk(b, k, axis, self.matrix.k, found.k, found.reduce_extents, env, short)
        start = self._step_indices(b, k, env)
        return self._walk(b, start, axis, self.matrix.k, [found.k[self.inner]], [found.reduce_extents[self.inner]], env)

    def _image(self, b: Builder, factor: Factor, lies: Image, start: Value, extent: int, k: Value, env: dict[Value, Value]) -> Value:
        """A tile of pixels by channels."""
        assert factor.load is not None
        found = self.found
        channel = self._step_indices(b, k, env)
        offsets = [
            b.index(0) if p is None else b.mul(env[found.k[p]], b.index(d)) for p, d in zip(lies.offsets, lies.dilations, strict=True)
        ]
        *planes, rows, columns = (ONE if p is None else found.extents[p] for p in lies.pixels)
        if lies.moves:
            # Pixels of later images, of which there is none in between.
            image_index = factor.load.operands[1]
            side = found.m if factor is found.a else found.n
            local = {**env, found.indices[side[0]]: b.index(0)}
            self._evaluate(b, [op for op in self._needed([image_index]) if op.results[0] not in local], local, [])
            start = b.add(start, b.mul(local[image_index], b.index(size_product([*planes, rows, columns]))))
        attrs: dict[str, Attr] = {"rows": rows, "columns": columns, "lower": lies.lower, "steps": lies.steps, "shape": (extent, self.matrix.k)}
        if planes:
            attrs["planes"] = planes[0]
        with b.at(factor.load.span):
            return b.emit("load_image", [factor.load.operands[0], start, *offsets, channel], attrs)[0]

    # -- one tile -----------------------------------------------------------------------------------------------

    def _tile(
        self, b: Builder, number: Value, rank: Value | None, down: Size, across: Size, env: dict[Value, Value]
    ) -> None:
        found, schedule = self.found, self.matrix
        batch, row, column = self._place(b, number, rank, down, across)
        env.update(zip((found.indices[p] for p in found.batch), batch, strict=True))
        region = found.parallel.regions[0]
        zero = b.op("broadcast", b.const(0, found.accumulator), shape=(schedule.m, schedule.n))

        def step(inner: Builder, k: Value, *totals: Value) -> list[Value]:
            if self.term >= 0:
                return [self._products_of_parts(inner, k, row, column, env, *totals)]
            a = self._factor(inner, found.a, found.m, row, schedule.m, k, 0, dict(env))
            dtype = found.a.dtype if found.a.dtype is found.b.dtype else found.accumulator
            a = inner.cast(a, dtype)
            sums: list[Value] = []
            for product, total in zip(self.products, totals, strict=True):
                self.found = product  # its own index walks the sum
                c = self._factor(inner, product.b, product.n, column, schedule.n, k, 1, dict(env))
                with inner.at(product.reduction.span):
                    sums.append(inner.op("dot", a, inner.cast(c, dtype), total))
            self.found = found
            return sums

        low, high = self._range(b, row, column)
        with b.at(found.reduction.span):
            totals = b.for_(
                low, high, b.index(schedule.k), [zero] * schedule.horizontal, step, name="k", role="sum",
                stages=schedule.stages, **({"skips": True} if (self.bounds or self.used) and isinstance(schedule, Wgmma) else {}),
            )  # fmt: skip
        rows = self.index_tile(b, row, 0, schedule.m)
        masks = self._walk(b, row, 0, schedule.m, [found.indices[p] for p in found.m], [found.extents[p] for p in found.m], env, numbers=rows)
        masks += self._walk(b, column, 1, schedule.n, [found.indices[p] for p in found.n], [found.extents[p] for p in found.n], env)
        numbered = self._number_rows(b, row)
        sums = {product.reduction: total for product, total in zip(self.products, totals, strict=True)}
        env.update((reduction.result, total) for reduction, total in sums.items())
        env.update((op.result, number) for op, number in numbered.items())
        planes = self._planes()
        number = Value(INDEX, "number")
        env[number] = rows
        env.update((flat, flat) for flat in self.flat.values())
        self.ops(b, [self._by_row(op, planes, number) for op in region.ops if op not in sums and op not in numbered], env, masks)

    def _planes(self) -> dict[Value, int]:
        """Arrays whose places all loads and stores of results name by a tile's rows, which follow one another in memory without gaps, and the first axis of these places: such an
        array is seen as one with a row for each of a tile's."""
        found, planes = self.found, dict[Value, int]()
        if len(found.m) == 1 or not isinstance(self.matrix, Wgmma):
            return planes
        accesses: dict[Value, list[Op]] = {}
        others: set[Value] = set()
        for op in walk(self.kernel.body):
            for place, value in enumerate(op.operands):
                if isinstance(value.type, Tensor) and (op.opcode not in ("load", "store") or place or op not in found.parallel.regions[0].ops):
                    others.add(value)
                elif isinstance(value.type, Tensor):
                    accesses.setdefault(value, []).append(op)
        for memory, ops in accesses.items():
            first = self._first_of_rows(memory, ops[0])
            if first is not None and memory in self.kernel.params and memory not in others and all(self._first_of_rows(memory, op) == first for op in ops):
                planes[memory] = first
                self._see_rows(memory, first)
        return planes

    def _first_of_rows(self, memory: Value, op: Op) -> int | None:
        """The first of neighbouring axes that the indices of a tile's rows walk, in order and without gaps; else None."""
        found, tensor = self.found, memory.type
        assert isinstance(tensor, Tensor)
        forms = [found.forms.get(v) for v in op.operands[1 : 1 + tensor.rank]]
        indices, count = [found.indices[p] for p in found.m], len(found.m)
        for first in range(tensor.rank - count + 1):
            here = forms[first : first + count]
            if not all(form is not None and form.is_just(index) for form, index in zip(here, indices, strict=True)):
                continue
            apart = any(form is None or set(form.values) & set(indices) for axis, form in enumerate(forms) if not first <= axis < first + count)
            inner = range(first + 1, first + count)
            follow = all(tensor.strides[axis - 1] == tensor.strides[axis] * tensor.shape[axis] for axis in inner)
            whole = all(without_clamp(found.extents[p]) == without_clamp(tensor.shape[axis]) for p, axis in zip(found.m[1:], inner, strict=True))
            return first if follow and whole and not apart else None
        return None

    def _see_rows(self, memory: Value, first: int) -> None:
        tensor, count = memory.type, len(self.found.m)
        assert isinstance(tensor, Tensor)
        shape = (*tensor.shape[:first], size_product(tensor.shape[first : first + count]), *tensor.shape[first + count :])
        strides = (*tensor.strides[:first], *tensor.strides[first + count - 1 :])
        self.flat[memory] = Value(replace(tensor, shape=shape, strides=strides), memory.name)

    def _by_row(self, op: Op, planes: Mapping[Value, int], number: Value) -> Op:
        """A load or store of results, by the number of a tile's row."""
        if op.opcode not in ("load", "store") or op.operands[0] not in planes:
            return op
        memory, *rest = op.operands
        first = planes[memory]
        return replace(op, operands=(self.flat[memory], *rest[:first], number, *rest[first + len(self.found.m) :]))

    def _number_rows(self, b: Builder, row: Value) -> dict[Op, Value]:
        """Ops that count the rows of all tiles, and the numbers of this tile's: what the copy engine writes is then a plane of its array."""
        found, numbered = self.found, dict[Op, Value]()
        if len(found.m) == 1:
            return numbered
        steps = {found.indices[p]: size_product(found.extents[q] for q in found.m[place + 1 :]) for place, p in enumerate(found.m)}
        for op in found.parallel.regions[0].ops:
            form = found.forms.get(op.results[0]) if len(op.results) == 1 else None
            if form is not None and dict(form.factors) == steps:
                numbered[op] = self.index_tile(b, b.add(row, b.index(form.constant)), 0, self.matrix.m)
        return numbered

    def _range(self, b: Builder, row: Value, column: Value) -> tuple[Value, Value]:
        """The terms that a tile adds up: steps of the sum that the guards leave empty for all of the tile are skipped, and all where no sum is used."""
        found, schedule = self.found, self.matrix
        low, high = b.index(0), b.index(self._steps())
        if not (self.bounds or self.used):
            return low, high
        tile = {
            found.indices[found.m[0]]: (row, b.add(row, b.index(schedule.m))),
            found.indices[found.n[0]]: (column, b.add(column, b.index(schedule.n))),
        }
        first, behind = sum_range(b, self.bounds, tile)
        step = b.index(schedule.k)
        if first is not None:
            first = b.op("max", low, b.mul(b.op("floordiv", first, step), step))
        if self.inner >= 0 and self.bounds:
            # All other indices walk the same stretch of this one.
            begin = low if first is None else first
            end = b.index(self._padded())
            if behind is not None:
                end = b.op("min", end, b.mul(b.op("floordiv", b.add(behind, b.index(schedule.k - 1)), step), step))
            self.stretch = begin, b.op("max", b.sub(end, begin), low)
            high = b.mul(self.stretch[1], b.index(self._around()))
        else:
            low = low if first is None else first
            high = high if behind is None else b.op("min", high, behind)
        return low, b.select(is_used(b, self.used, tile), high, low) if self.used else high

    def _products_of_parts(self, b: Builder, k: Value, row: Value, column: Value, env: Mapping[Value, Value], total: Value) -> Value:
        """One step of a convolution in parts (`split_images`): each part of a factor is brought once."""
        found, schedule = self.found, self.matrix
        assert isinstance(schedule, Wgmma)
        parts: list[dict[int, Value]] = [{}, {}]
        for number, pair in enumerate(PAIRS[len(PAIRS) - schedule.tf32_terms :]):
            for axis, (part, factor, side, start, extent) in enumerate(
                zip(pair, (found.a, found.b), (found.m, found.n), (row, column), (schedule.m, schedule.n), strict=True)
            ):
                if part not in parts[axis]:
                    local = {**env, found.k[self.term]: b.index(number)}
                    parts[axis][part] = self._factor(b, factor, side, start, extent, k, axis, local)
            with b.at(found.reduction.span):
                total = b.op("dot", parts[0][pair[0]], parts[1][pair[1]], total)
        return total

    def _factor(
        self, b: Builder, factor: Factor, side: Sequence[int], start: Value, extent: int, k: Value, axis: int, env: dict[Value, Value]
    ) -> Value:
        """The tile of one factor: rows along `axis`, the sum along the other."""
        found, schedule = self.found, self.matrix
        if axis == 0 and schedule.a_copy == "im2col":
            lies = image(found, factor)
            assert lies is not None and lies.channel == self.inner
            return self._image(b, factor, lies, start, extent, k, env)
        masks = self._walk(b, start, axis, extent, [found.indices[p] for p in side], [found.extents[p] for p in side], env)
        inside = self._walk_sum(b, k, 1 - axis, env)
        shape = (extent, schedule.k) if axis == 0 else (schedule.k, extent)
        values = [v for v in (factor.value, factor.guard) if v is not None]
        needed = self._needed(values)
        conditions = [*masks, *inside]
        for test in self._tests(factor):
            self._evaluate(b, self._needed([test]), env, [])
            conditions.append(Condition(env[test], edge=False))
            inside = [*inside, Condition(env[test], edge=False)]
        if self._is_gathered(factor, side):
            needed = [self._by_number(b, factor, side, shape, env)]
        self._evaluate(b, [op for op in needed if op.results and op.results[0] not in env], env, conditions)
        value = self.widen(b, env[factor.value], shape)
        if factor.load is None and inside:
            # What is computed from masked loads need not be zero where nothing was loaded.
            keep = self.widen(b, inside[0].value, join(shape, shape_of(inside[0].value)))
            for condition in inside[1:]:
                keep = b.logical_and(keep, self.widen(b, condition.value, shape))
            value = b.select(keep, value, b.splat(0, value))
        elif isinstance(schedule, Wgmma):
            self._mark_end(b, factor, env[factor.value])
        return value

    def _tests(self, factor: Factor) -> list[Value]:
        """The guard of a factor, or of an image that is gathered the tests of it that do not hold for all places of results and of the window."""
        side = self.found.m if factor is self.found.a else self.found.n
        if factor.guard is None or not self._is_gathered(factor, side):
            return [factor.guard] if factor.guard is not None else []
        tests: list[Value] = []
        waiting = [factor.guard]
        while waiting:
            value = waiting.pop()
            op = self.made.get(value)
            if op is not None and op.opcode == "and":
                waiting += op.operands
            elif op is None or not self._holds(op):
                tests.append(value)
        return tests

    def _holds(self, test: Op) -> bool:
        """Whether a comparison holds wherever loops go: its distance from zero is least where indices that it falls with are largest."""
        found, distance = self.found, gap(test, self.found.forms)
        if distance is None:
            return False
        extents = dict(zip((*found.indices, *found.k), (*found.extents, *found.reduce_extents), strict=True))
        least = distance.constant
        for value, factor in distance.factors:
            step = factor.constant
            if step is None or value not in extents:
                return False
            if step < 0:
                least = least + times_at_least(without_clamp(extents[value]) - 1, step)
        return least.constant is not None and least.constant >= 0

    def _is_gathered(self, factor: Factor, side: Sequence[int]) -> bool:
        """Whether threads bring a factor element by element: an image of words or more, whose places are several indices, in rows that are not read as they lie."""
        found, tensor, load = self.found, factor.tensor, factor.load
        if load is None or tensor is None or not isinstance(self.matrix, WarpProduct) or len(side) == 1 or found.batch or tensor.dtype.itemsize < 4 or load.attrs:
            return False
        known = {*(found.indices[p] for p in side), *found.k}
        forms = found.access(factor)
        uses = sum(1 for op in walk(self.kernel.body) for v in op.operands if v is load.operands[0])
        dense = tensor.strides == contiguous_strides(tensor.shape)
        if not dense or uses != 1 or load.operands[0] not in self.kernel.params or not all(set(form.values) <= known for form in forms):
            return False
        return not (len(forms[-1].factors) == 1 and forms[-1].is_just(found.indices[side[-1]]))

    def _by_number(self, b: Builder, factor: Factor, side: Sequence[int], shape: Shape, env: dict[Value, Value]) -> Op:
        """A load of the same element by its number in the array: what places of results add to it is known before the sum, and what those of the window add is the same
        for all of them."""
        found, load, tensor = self.found, factor.load, factor.tensor
        assert load is not None and tensor is not None
        forms = found.access(factor)

        def total(values: Sequence[Value]) -> Value | None:
            terms: Value | None = None
            for value in values:
                step = sum((form.factor(value) * stride for form, stride in zip(forms, tensor.strides, strict=True)), ZERO)
                if step != ZERO:
                    term = b.mul(env[value], b.like(b.index(step), env[value]))
                    terms = term if terms is None else self._sum(b, terms, term)
            return terms

        places, window = total([found.indices[p] for p in side]), total(found.k)
        first = b.index(sum((form.constant * stride for form, stride in zip(forms, tensor.strides, strict=True)), ZERO))
        places = first if places is None else b.add(places, b.like(first, places))
        number = places if window is None else b.add(self.widen(b, places, shape), self.widen(b, window, shape))
        memory = load.operands[0]
        if memory not in self.flat:
            self.flat[memory] = Value(tensor_of(tensor.dtype, size_product(tensor.shape), align=tensor.align), memory.name)
        flat, index = self.flat[memory], Value(INDEX, "number")
        env[index], env[flat] = number, flat
        return replace(load, operands=(flat, index))

    def _sum(self, b: Builder, first: Value, second: Value) -> Value:
        wide = join(shape_of(first), shape_of(second))
        return b.add(self.widen(b, first, wide), self.widen(b, second, wide))

    def _mark_end(self, b: Builder, factor: Factor, value: Value) -> None:
        """Say where the sum ends in an array that goes on behind it: the copy engine knows no masks, and what it brings must be zero there. An infinity times the
        other factor's zero would be no number."""
        lies, tensor = plane(self.found, factor, self.inner), factor.tensor
        if lies is None or tensor is None:
            return
        form = self.found.access(factor)[lies.k]
        end = form.constant + self.found.reduce_extents[max(0, self.inner)]
        padded = any(tensor.shape[lies.k] == ceildiv(end, Size.of(n)) * n for n in (1, 4, 8, 16, 64))  # with zeros
        if len(form.factors) == 1 and not padded:
            place = next((n for n, op in enumerate(b.ops) if value in op.results and op.opcode == "load"), None)
            if place is not None:
                b.ops[place] = replace(b.ops[place], attrs=MappingProxyType({**b.ops[place].attrs, "end": end}))

    def _needed(self, values: Sequence[Value]) -> list[Op]:
        """The ops of the nest that make these values, in order."""
        wanted: set[Value] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            op = self.made.get(value)
            if value in wanted or op is None:
                continue
            wanted.update(op.results)
            waiting += op.operands
            waiting += [v for region in op.regions for inner in walk(region) for v in inner.operands]
        inside = {id(inner) for op in self.everything if op.regions and any(r in wanted for r in op.results)
                  for region in op.regions for inner in walk(region)}  # fmt: skip
        return [op for op in self.everything if any(r in wanted for r in op.results) and id(op) not in inside]

    def _evaluate(self, b: Builder, ops: Sequence[Op], env: dict[Value, Value], masks: list[Condition]) -> None:
        self.ops(b, ops, env, masks)


