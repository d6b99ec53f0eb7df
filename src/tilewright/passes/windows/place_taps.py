"""Compute a transposed convolution as one product for all taps, and put its results in their places. `Program -> Program`, for GPUs.

In: a program whose sums have one condition each (`join_guards.py`), the target and the sizes of the call. Out: the same, where a sum over channels and taps that asks `p % s == 0`, with p the
place of a result less that of a tap, is two kernels, if no result has terms of two taps (steps are as long as the window, or longer), or phases would be many or short (`_pays`).

    parallel o { reduce c, r { p = o + 1 - r; if p % 3 == 0 and 0 <= p // 3 < n { x[c, p // 3] * w[c, r] } else { 0 } }; store y[o] }
    -> parallel r, i { reduce c { x[c, i] * w[c, r] }; store products[r, i] }
       parallel o { r = (o + 1) % 3; i = (o + 1) // 3; store y[o] = if r < 2 and i < n { products[r, i] } else { 0 } }

The product reads each input once, where phases (`split_phases.py`) read it once each, and its columns are filters and taps together: wide tiles, also of few filters. The second
kernel writes whole rows, with what is made of an empty sum between the products. Where windows overlap, it adds up the products of a result. Two kernels are compiled, however many phases
there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from tilewright.analysis.affine import analyse
from tilewright.base.record import record
from tilewright.base.sizes import Size, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, is_watched, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead, use_counts
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.common.simplify import simplify
from tilewright.passes.windows.multiply_taps import Taps, find_taps
from tilewright.passes.windows.placing import PlacedAxis, place_values

MOST_STEPS = 64
"""From one tap to the next, along rows: what is done for a result does not depend on it."""
TOGETHER = 2
"""Phases that are launched together in less time than two kernels one after the other take, and compiled in reasonable time."""
SMALL, SMALL_STACKED = 1 << 20, 4 << 20
"""Bytes of results for which the time of launches alone counts, of four-byte factors and of two-byte ones: phases of these are copied each before it."""
MOST_STACKED = 16
"""Phases of two-byte factors: those that read the same windows are one convolution (`stacked_phases.py`), which takes less time than to write and read all products."""
MOST_PHASES = 7
"""Phases that are compiled in reasonable time: more of them have to gain by it."""
MOST_TERMS, MOST_EACH = 32, 5.0
"""Products of a result: each is code of its own. On average, as far as reads of them are known to be as fast as memory."""
MOST_BYTES = 4 << 30
"""Of products of windows that overlap: they need several times the memory of the results."""
_START, _LAUNCH, _BYTE, _PRODUCT, _PHASED = 8e6, 4e6, 0.29, 0.0125, 0.02
"""Picoseconds: what two kernels need, a phase's launch, to move a byte, one floating-point operation of the product, and one of phases. Measured on an H200."""
_FILTERS, _CHANNELS = 64, 32
"""Fewer leave a part of a phase's tiles empty."""
_HURRY = 1.15
"""How much longer two kernels may take than many phases: they are compiled in a fraction of the time."""


def place_taps(program: Program, target: Target | None, sizes: Mapping[str, int], given: str = "") -> Program:
    """The program with such kernels cut; a given schedule that gathers is one of phases."""
    if target is None or not target.simt or target.has("serial") or "gather=" in given:
        return program
    calls: list[KernelCall] = []
    scratch = list(program.scratch)
    for call in program.calls:
        taps = None if call.varies or call.loops or is_watched(call.kernel) else find_taps(call.kernel, MOST_STEPS)
        if taps is None or not _pays(taps, sizes):
            calls.append(call)
            continue
        placed = _Placed(replace(taps, batch=None))
        products = placed.products(len(scratch))
        assert isinstance(products.type, Tensor)
        scratch.append(ProgramArray(products.name, products.type, "scratch"))
        names = dict(zip(call.kernel.params, call.args, strict=True))
        for kernel in (placed.multiplying(products), placed.placing(products)):
            calls.append(KernelCall(kernel, tuple(names.get(p, products.name) for p in kernel.params)))
    return replace(program, calls=tuple(calls), scratch=tuple(scratch))


def _pays(taps: Taps, sizes: Mapping[str, int]) -> bool:
    """Whether two kernels take less time than a kernel for each phase."""
    itemsize = taps.image.dtype.itemsize
    phases, terms = prod(axis.steps for axis in taps.axes), prod(axis.terms for axis in taps.axes)
    each = prod(axis.taps for axis in taps.axes) / phases
    extents = product(taps.extent(n) for n in range(len(taps.nest.operands)))
    results = extents.evaluate(sizes) if extents.names <= sizes.keys() else None
    if terms > MOST_TERMS or (terms > 1 and results is not None and each * dtype_of(taps.reduction.result.type).itemsize * results > MOST_BYTES):
        return False
    small = results is not None and results * itemsize < (SMALL if itemsize >= 4 else SMALL_STACKED)
    if small or terms == 1:
        return phases > TOGETHER or not small
    if results is None or itemsize < 4:
        return phases > MOST_STACKED
    return each <= MOST_EACH and _product_time(taps, sizes, each) < _phase_time(taps, sizes, each) * (_HURRY if phases > MOST_PHASES else 1.0)


def _operations(taps: Taps, sizes: Mapping[str, int], each: float) -> tuple[float, float, float, float]:
    """Operations, results, channels and filters."""
    forms = analyse(taps.kernel)
    channels = prod(_number(forms[taps.flat.extents[n]].constant, sizes) for n in taps.channels)
    results = prod(_number(taps.extent(n), sizes) for n in range(len(taps.nest.operands)))
    filters = prod(_number(taps.extent(n), sizes) for n in taps.others if n != taps.batch)
    return 2.0 * channels * each * results, results, channels, filters


def _number(size: Size, sizes: Mapping[str, int]) -> int:
    return size.evaluate(sizes) if size.names <= sizes.keys() else _FILTERS


def _product_time(taps: Taps, sizes: Mapping[str, int], each: float) -> float:
    """Picoseconds of two kernels: products are written and read."""
    operations, results, _, _ = _operations(taps, sizes, each)
    return _START + _PRODUCT * operations + _BYTE * taps.image.dtype.itemsize * results * (2 * each + 1)


def _phase_time(taps: Taps, sizes: Mapping[str, int], each: float) -> float:
    """Picoseconds of phases, one after another."""
    operations, results, channels, filters = _operations(taps, sizes, each)
    full = min(1.0, filters / _FILTERS) * min(1.0, channels / _CHANNELS)
    return _LAUNCH * prod(axis.steps for axis in taps.axes) + _PHASED * operations / max(full, 1e-3) + _BYTE * taps.image.dtype.itemsize * results


@record
class _Placed:
    """A transposed convolution."""

    taps: Taps

    @property
    def kept(self) -> Op:
        """The op whose result is kept for every tap: the sum, or what rounds it where nothing else reads it and nothing is added to it."""
        taps = self.taps
        if any(axis.terms > 1 for axis in taps.axes):
            return taps.reduction
        readers = [op for op in taps.nest.regions[0].ops if taps.reduction.result in op.operands]
        alone = use_counts(taps.kernel.body)[taps.reduction.result] == 1
        return readers[0] if alone and len(readers) == 1 and readers[0].opcode == "cast" else taps.reduction

    def products(self, number: int) -> Value:
        """For every filter and tap, an image."""
        taps = self.taps
        extents = (*(taps.extent(n) for n in taps.others), *(Size.of(axis.taps) for axis in taps.axes), *(axis.extent for axis in taps.axes))
        return Value(tensor(dtype_of(self.kept.result.type), *extents, align=16), f"{taps.kernel.name}.products{number}")

    def multiplying(self, products: Value) -> Kernel:
        """The products of all taps with all of the image."""
        taps, b = self.taps, Builder(self.taps.kernel.span)
        args, terms, axes = taps.nest.regions[0].args, taps.flat.args, taps.axes
        outer: dict[Value, Value] = {}
        clone_ops(b, [op for op in taps.kernel.body.ops if op is not taps.nest], outer)

        def body(at: Builder, *indices: Value) -> list[Value]:
            others, own, places = indices[: len(taps.others)], indices[-2 * len(axes) : -len(axes)], indices[-len(axes) :]
            mapping = dict(outer)
            mapping.update(zip((args[n] for n in taps.others), others, strict=True))
            mapping.update(zip((terms[axis.tap] for axis in axes), own, strict=True))
            # What is made of results' places is not needed any more.
            mapping.update(zip((args[axis.result] for axis in axes), places, strict=True))
            clone_ops(at, taps.before_sum(), mapping)

            def term(inner: Builder, *channels: Value) -> list[Value]:
                mapping.update(zip((terms[n] for n in taps.channels), channels, strict=True))
                for op in taps.flat.ops:
                    if op is not taps.load:
                        clone_ops(inner, [op], mapping)
                        continue
                    with inner.at(op.span):
                        lead = [mapping.get(v, v) for v in op.operands[1 : 1 + taps.image.rank - len(axes)]]
                        mapping[op.result] = inner.op("load", op.operands[0], *lead, *places)
                return [mapping[taps.flat.term]]

            (total,) = at.reduce("add", [mapping.get(taps.flat.extents[n], taps.flat.extents[n]) for n in taps.channels], term)
            if self.kept is not taps.reduction:
                mapping[taps.reduction.result] = total
                clone_ops(at, [self.kept], mapping)
                total = mapping[self.kept.result]
            at.multi("store", products, *indices, total)
            return []

        extents = [outer.get(taps.nest.operands[n], taps.nest.operands[n]) for n in taps.others]
        with b.at(taps.reduction.span):
            b.parallel([*extents, *(b.index(axis.taps) for axis in axes), *(b.index(axis.extent) for axis in axes)], body)
        return self._kernel("multiply", b, products, {})

    def placing(self, products: Value) -> Kernel:
        """Every result takes its products, or is made of an empty sum."""
        taps, b = self.taps, Builder(self.taps.kernel.span)
        args = taps.nest.regions[0].args
        outer: dict[Value, Value] = {}
        clone_ops(b, [op for op in taps.kernel.body.ops if op is not taps.nest], outer)
        skipped = (taps.reduction, self.kept)
        rest = [op for op in taps.nest.regions[0].ops if op not in skipped and op.opcode != "yield"]
        assert isinstance(products.type, Tensor)
        first = next(n for n in range(len(args)) if n not in taps.others)
        shape = products.type.shape
        flat = Value(tensor(products.type.dtype, *shape[:first], product(shape[first:]), align=16), products.name)

        def finish(at: Builder, indices: list[Value], value: Value) -> None:
            clone_ops(at, rest, {**outer, **dict(zip(args, indices, strict=True)), self.kept.result: value})

        with b.at(taps.reduction.span):
            place_values(b, self._axes(products.type), flat, 0.0, finish)
        return self._kernel("place", b, flat, {"placed": True})

    def _axes(self, products: Tensor) -> list[PlacedAxis]:
        """How each index of the results says where its products lie."""
        taps, found = self.taps, list[PlacedAxis]()
        images = dict(zip(taps.others, products.strides, strict=False))
        slots, places = products.strides[-2 * len(taps.axes) : -len(taps.axes)], products.strides[-len(taps.axes) :]
        walked = {axis.result: (axis, slot, place) for axis, slot, place in zip(taps.axes, slots, places, strict=True)}
        for position in range(len(taps.nest.operands)):
            if position in images:
                found.append(PlacedAxis(taps.extent(position), images[position]))
                continue
            axis, slot, place = walked[position]
            rests = (axis.offsets(rest - axis.shift) for rest in range(axis.steps))
            own = tuple(tuple((slot * tap, far) for tap, far in taken) for taken in rests)
            found.append(PlacedAxis(taps.extent(position), place, axis.steps, axis.shift, own, axis.extent))
        return found

    def _kernel(self, name: str, b: Builder, products: Value, attrs: Mapping[str, bool]) -> Kernel:
        whole, body = self.taps.kernel, Block((), tuple(b.ops))
        used = {v for op in walk(body) for v in op.operands}
        params = (*(p for p in whole.params if p in used), products)
        found = Kernel(f"{whole.name}.{name}", Stage.LOOP, params, body, attrs=MappingProxyType(dict(attrs)), facts=whole.facts, span=whole.span)
        return simplify(eliminate_dead(found))
