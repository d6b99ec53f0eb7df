"""Copy operands the copy engine cannot read into matrices it can. `Program -> Program`.

In: a program and the schedules of its contractions. Where one says `a_copy = pack` (or `b_copy`), that factor, whatever it is
computed from, is first written to scratch as a dense array [batch, rows, sums, k], its rows padded with zeros to whole 16 bytes. Out: the
program with a kernel that packs before the contraction, whose factor is now a plain load. Packing reads and writes the operand once; what
it buys is a product at full speed where rows are not aligned, strides are odd, or elements lie the wrong way round. Plain multiply-adds read
rows that run across the sum, so for these the pack is [batch, sums, k, rows]; so it is for warp-group instructions on elements of two bytes whose rows run across the sum
already: these read either, and copying is faster than turning. A factor is zero where its guard does not hold; a guard by which tiles of the product skip terms stays.

    parallel m, n { acc = reduce k { yield f(x[i, k]) * w[k, j] }; … }
    -> parallel m, kk { store x.pack[i, kk] = kk < k ? f(x[i, kk]) : 0 }
       parallel m, n { acc = reduce k { yield x.pack[i, k] * w[k, j] }; … }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.contraction import Contraction, Factor, find_contraction
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import Size, ceildiv, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.common.rebuild_nest import Copies, ValueCopier, copy_nest, copy_outside, finished
from tilewright.passes.schedules.matrix import Fma, GpuProduct, Wgmma
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.passes.windows.sum_ranges import sum_bounds


def repack(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with packing kernels, and the schedules of its calls."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        if isinstance(schedule, GpuProduct) and "pack" in (schedule.a_copy, schedule.b_copy):
            extra, call, arrays = Packing(call, schedule).run(len(scratch))
            calls += extra
            schedules += [None] * len(extra)
            scratch += arrays
        calls.append(call)
        schedules.append(schedule)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def packable(found: Contraction, factor: Factor, inner: int) -> bool:
    """Whether a factor can be packed: one index on its side, and one of those summed over that steps walk."""
    side = found.m if factor is found.a else found.n
    return len(side) == 1 and (len(found.k) == 1 or inner >= 0)


class Packing:
    """The kernels of one call whose factors are packed."""

    def __init__(self, call: KernelCall, schedule: GpuProduct) -> None:
        found = find_contraction(call.kernel)
        if found is None:
            raise CompilerBug.at("TW040", f"{call.kernel.name} is not a contraction", call.kernel.span)
        found = found.apart() if schedule.apart else found
        self.call, self.kernel, self.found = call, call.kernel, found
        ways = (schedule.b_copy, schedule.a_copy) if schedule.swap_ab else (schedule.a_copy, schedule.b_copy)
        self.packed = [factor for factor, way in zip((found.a, found.b), ways, strict=True) if way == "pack"]
        self.copier = ValueCopier(found.parallel.regions[0])
        inner = schedule.inner if schedule.inner >= 0 and len(found.k) > 1 else len(found.k) - 1
        self.sums = [p for p in range(len(found.k)) if p != inner] + [inner]
        """The summed indices, the one that steps walk last."""
        self.by_engine = isinstance(schedule, Wgmma)
        self.skipping = isinstance(schedule, Wgmma) and schedule.skips and bool(sum_bounds(found))
        """Whether guards of packed factors stay: tiles skip what these leave empty."""
        extents = (schedule.n, schedule.m) if schedule.swap_ab else (schedule.m, schedule.n)
        self.turned = {id(f): isinstance(schedule, Fma) or self._stays(schedule, f, e) for f, e in zip((found.a, found.b), extents, strict=True)}
        """Whether rows of a factor's pack run across the sum."""

    def _stays(self, schedule: GpuProduct, factor: Factor, extent: int) -> bool:
        """Whether a factor of warp-group instructions runs across the sum and stays so: tiles have whole blocks of 128 bytes of it."""
        if not isinstance(schedule, Wgmma) or factor.load is None or factor.dtype.itemsize != 2 or extent * 2 // schedule.cluster % 128:
            return False
        last = self.found.access(factor)[-1]
        row = self.found.indices[self._side(factor)[-1]]
        return row in last.values and not any(k in last.values for k in self.found.k)

    def run(self, number: int) -> tuple[list[KernelCall], KernelCall, list[ProgramArray]]:
        names = dict(zip(self.kernel.params, self.call.args, strict=True))
        packs: dict[int, Value] = {}
        calls: list[KernelCall] = []
        arrays: list[ProgramArray] = []
        for position, factor in enumerate(self.packed):
            pack = self._pack_of(factor, f"{self.kernel.name}.pack{number + position}")
            assert isinstance(pack.type, Tensor)
            packs[id(factor)] = names_pack = pack
            arrays.append(ProgramArray(pack.name, pack.type, "scratch"))
            kernel = self._packing_kernel(factor, pack)
            calls.append(KernelCall(kernel, tuple(pack.name if p is names_pack else names[p] for p in kernel.params), self.call.loops))
        main = self._main_kernel(packs)
        given = {p: p.name for p in packs.values()} | names
        return calls, KernelCall(main, tuple(given[p] for p in main.params), self.call.loops), arrays

    def _side(self, factor: Factor) -> tuple[int, ...]:
        return self.found.m if factor is self.found.a else self.found.n

    def _positions(self, factor: Factor) -> list[int]:
        """The parallel indices the factor depends on."""
        values = [v for v in (factor.value, factor.guard) if v is not None]
        sources = {v for op in self.copier.makers(values, set()) for v in op.operands}
        own = [p for p in self.found.batch if self.found.indices[p] in sources]
        return [*own, *self._side(factor)]

    def _pack_of(self, factor: Factor, name: str) -> Value:
        found = self.found
        step = max(1, 16 // factor.dtype.itemsize)
        *outer, last = (found.reduce_extents[p] for p in self.sums)
        padded = ceildiv(last, Size.of(step)) * step
        *batch, rows = (found.extents[p] for p in self._positions(factor))
        if self.turned[id(factor)]:
            wide = ceildiv(rows, Size.of(step)) * step
            return Value(tensor(factor.dtype, product(batch), product(outer), last, wide, align=16), name)
        return Value(tensor(factor.dtype, product(batch), rows, product(outer), padded, align=16), name)

    def _where(self, b: Builder, factor: Factor, local: Mapping[Value, Value]) -> list[Value]:
        """The place of an element in its pack: batch, row, all summed indices but the inner one, and that."""
        found = self.found
        *batch, row = self._positions(factor)
        *outer, inner = self.sums

        def together(indices: Sequence[Value], extents: Sequence[Size]) -> Value:
            total = b.index(0)
            for position, (index, extent) in enumerate(zip(indices, extents, strict=True)):
                total = local[index] if position == 0 else b.add(b.mul(total, b.index(extent)), local[index])
            return total

        places = [
            together([found.indices[p] for p in batch], [found.extents[p] for p in batch]), local[found.indices[row]],
            together([found.k[p] for p in outer], [found.reduce_extents[p] for p in outer]), local[found.k[inner]],
        ]  # fmt: skip
        return [places[0], *places[2:], places[1]] if self.turned[id(factor)] else places

    def _packing_kernel(self, factor: Factor, pack: Value) -> Kernel:
        found = self.found
        positions = self._positions(factor)
        b = Builder(self.kernel.span)
        mapping = copy_outside(b, self.kernel)
        assert isinstance(pack.type, Tensor)

        turned = self.turned[id(factor)]
        # The copy engine reads the padding of rows, too; threads do not.
        wide = pack.type.shape[-1] if turned and self.by_engine else None

        def body(inner: Builder, *indices: Value) -> list[Value]:
            if turned:
                # The last index is the one along which the pack is written.
                indices = (*indices[: len(positions) - 1], indices[-1], *indices[len(positions) - 1 : -1])
            own, sums = indices[: len(positions)], indices[len(positions) :]
            local = dict(mapping) | dict(zip((found.indices[p] for p in positions), own, strict=True))
            local |= dict(zip((found.k[p] for p in self.sums), sums, strict=True))
            zero = inner.const(0, factor.dtype)
            inside = inner.op("lt", sums[-1], inner.index(found.reduce_extents[self.sums[-1]]))
            if wide is not None:
                inside = inner.op("lt", own[-1], inner.index(found.extents[positions[-1]]))
            result = self._element(inner, factor, local, inside, lambda deep: zero)
            inner.multi("store", pack, *self._where(inner, factor, local), result)
            return []

        names = [*(found.indices[p].name for p in positions), *(found.k[p].name for p in self.sums)]
        last = found.reduce_extents[self.sums[-1]] if turned else pack.type.shape[-1]
        extents = [*(found.extents[p] for p in positions), *(found.reduce_extents[p] for p in self.sums[:-1]), last]
        if turned:
            row = len(positions) - 1
            extents[row] = wide if wide is not None else extents[row]
            names, extents = ([*x[:row], *x[row + 1 :], x[row]] for x in (names, extents))
        with b.at(found.reduction.span):
            b.parallel([b.index(extent) for extent in extents], body, names)
        return finished(self.kernel, f"{self.kernel.name}.pack", b, [pack])

    def _element(self, b: Builder, factor: Factor, local: dict[Value, Value], inside: Value, nothing: Callable[[Builder], Value]) -> Value:
        """A factor's element where it is inside, and where its guard lets it be read."""
        if factor.guard is not None:
            self.copier.copy(b, [factor.guard], local)
            inside = b.logical_and(inside, local[factor.guard])

        def value(deep: Builder) -> list[Value]:
            inside_local = dict(local)
            self.copier.copy(deep, [factor.value], inside_local)
            return [inside_local[factor.value]]

        (found,) = b.if_(inside, value, lambda deep: [nothing(deep)])
        return found

    def _main_kernel(self, packs: dict[int, Value]) -> Kernel:
        found, wide = self.found, self.found.accumulator
        b = Builder(self.kernel.span)
        factors = [f for f in (found.a, found.b) if id(f) not in packs or self.skipping]
        guards = list(dict.fromkeys(f.guard for f in factors if f.guard is not None))
        guards = guards if self.skipping else guards[:1]

        def terms(deep: Builder, inside: Copies) -> list[Value]:
            values: list[Value] = []
            for factor in (found.a, found.b):
                pack = packs.get(id(factor))
                if pack is not None:
                    values.append(deep.cast(deep.op("load", pack, *self._where(deep, factor, inside)), wide))
                else:
                    self.copier.copy(deep, [factor.value], inside)
                    values.append(deep.cast(inside[factor.value], wide))
            return [deep.mul(*values)]

        def reduce(inner: Builder, copies: Copies) -> Sequence[Value]:
            def term(deep: Builder, *sums: Value) -> Sequence[Value]:
                return self.copier.where(deep, guards, copies | dict(zip(found.k, sums, strict=True)), terms, wide)

            with inner.at(found.reduction.span):
                return inner.reduce("add", [inner.index(e) for e in found.reduce_extents], term, [k.name for k in found.k])

        copy_nest(b, self.kernel, found.parallel, found.extents, found.reduction, reduce)
        return finished(self.kernel, self.kernel.name, b, list(packs.values()))
