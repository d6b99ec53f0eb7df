"""Recognise contractions: a sum of products of two factors, one that varies along some results, one along others.

`find_contraction(kernel)` looks at a loop-stage kernel, never at what its author called it. In

    parallel batch…, m…, n… { acc = reduce k… { yield a(batch, m, k) * b(batch, k, n) }; epilogue; store }

the first factor depends on no index of n and the second on none of m; either may be any expression (casts, scaling, guards), and
the indices may come in any order. A guard around the product, as convolutions have at their borders, belongs to the factor whose
indices it tests. Sums of a factor that varies along one side only (matrix times vector) are ordinary reductions, not contractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from tilewright.analysis.affine import Affine, Forms, analyse, gap, lowest
from tilewright.base.affine import AffineForm
from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, dtype_of


@record
class Factor:
    """One factor of the product. `value` is what is multiplied, before casts that only widen it."""

    value: Value
    dtype: DType
    load: Op | None
    """The load it is, where nothing else is done to it."""
    guard: Value | None
    """A condition under which the product counts, tested with this factor's indices only."""

    @property
    def tensor(self) -> Tensor | None:
        if self.load is None:
            return None
        type_ = self.load.operands[0].type
        assert isinstance(type_, Tensor)
        return type_


@record
class Contraction:
    """`m`, `n` and `batch` are positions among the parallel indices; the reduction's indices are all summed over."""

    parallel: Op
    extents: tuple[Size, ...]
    reduction: Op
    reduce_extents: tuple[Size, ...]
    a: Factor
    b: Factor
    m: tuple[int, ...]
    n: tuple[int, ...]
    batch: tuple[int, ...]
    forms: Forms

    @property
    def indices(self) -> tuple[Value, ...]:
        return self.parallel.regions[0].args

    @property
    def k(self) -> tuple[Value, ...]:
        return self.reduction.regions[0].args

    def size(self, positions: Sequence[int]) -> Size:
        """The number of points along these parallel indices."""
        total = ONE
        for p in positions:
            total = total * self.extents[p]
        return total

    @property
    def k_size(self) -> Size:
        total = ONE
        for extent in self.reduce_extents:
            total = total * extent
        return total

    @property
    def accumulator(self) -> DType:
        return dtype_of(self.reduction.results[0].type)

    def unguarded(self) -> Contraction:
        """The same of factors that are zero where their guards do not hold."""
        return replace(self, a=replace(self.a, guard=None), b=replace(self.b, guard=None))

    def swapped(self) -> Contraction:
        """The same with the factors exchanged."""
        return replace(self, a=self.b, b=self.a, m=self.n, n=self.m)

    def apart(self) -> Contraction:
        """The same with only the innermost index of each side as its rows or columns; the others count as batch, though one factor does
        not depend on them."""
        batch = sorted((*self.batch, *self.m[:-1], *self.n[:-1]))
        return replace(self, m=self.m[-1:], n=self.n[-1:], batch=tuple(batch))

    def access(self, factor: Factor) -> tuple[Affine, ...]:
        """The affine form of each index of a plain load."""
        assert factor.load is not None and factor.tensor is not None
        return tuple(self.forms[v] for v in factor.load.operands[1 : 1 + factor.tensor.rank])


_found: WeakKeyDictionary[Kernel, Contraction | str] = WeakKeyDictionary()
"""What was said of kernels that passes have at hand: several ask of the same."""


def find_contraction(kernel: Kernel) -> Contraction | None:
    """The contraction the kernel is, or None."""
    found = _asked(kernel)
    return found if isinstance(found, Contraction) else None


def contraction_refusal(kernel: Kernel) -> str:
    """Why the kernel is no contraction, as the end of a sentence; empty where it is one."""
    found = _asked(kernel)
    return "" if isinstance(found, Contraction) else found


def _asked(kernel: Kernel) -> Contraction | str:
    found = _found.get(kernel)
    if found is None:
        found = _found[kernel] = _contraction_or_reason(kernel)
    return found


def _contraction_or_reason(kernel: Kernel) -> Contraction | str:
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1:
        return "its loops are several nests"
    parallel = parallels[0]
    region = parallel.regions[0]
    if not parallel.operands:
        return "no loop over its results runs in any order"
    reductions = [op for op in region.ops if op.opcode == "reduce"]
    if not reductions:
        return "the sum stands under a condition or in a loop that runs in order"
    if len(reductions) > 1:
        return f"the loops over the results hold {len(reductions)} sums"
    reduction = reductions[0]
    beside = next((op for op in region.ops if op.regions and op is not reduction), None)
    if beside is not None:
        return "its result is stored under a condition" if beside.opcode == "if" else "a further loop stands beside the sum"
    if reduction.attrs["kind"] != "add":
        return f"products are combined by {reduction.attrs['kind']}, not added"
    if len(reduction.results) != 1 or not reduction.operands:
        return "one loop computes several sums"
    finder = _ContractionFinder(kernel, parallel, reduction)
    return finder.find() or finder.reason


def find_products(kernel: Kernel) -> tuple[Contraction, ...]:
    """The contractions of a kernel that computes several side by side over the same results; one for what `find_contraction` finds; none for
    any other kernel."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1:
        return ()
    region = parallels[0].regions[0]
    sums = [op for op in region.ops if op.regions]
    if not all(op.opcode == "reduce" and op.attrs["kind"] == "add" and len(op.results) == 1 and op.operands for op in sums):
        return ()
    found = [_ContractionFinder(kernel, parallels[0], op).find() for op in sums]
    return tuple(c for c in found if c is not None) if all(found) else ()


class _ContractionFinder:
    def __init__(self, kernel: Kernel, parallel: Op, reduction: Op) -> None:
        self.parallel, self.reduction = parallel, reduction
        self.forms = analyse(kernel)
        self.made = {result: op for op in walk(parallel.regions[0]) for result in op.results}
        self.memo: dict[Value, frozenset[Value]] = {}
        self.indices = parallel.regions[0].args
        self.leaves = frozenset((*self.indices, *reduction.regions[0].args))
        self.reason = ""
        """Why `find` found none."""

    def _refuse(self, reason: str) -> Contraction | None:
        self.reason = reason
        return None

    def find(self) -> Contraction | None:
        if any(op.opcode == "while" for op in self.made.values()):
            return self._refuse("a while loop stands in it: how often that runs differs from element to element")
        extents = self._sizes(self.parallel)
        reduce_extents = self._sizes(self.reduction)
        if extents is None or reduce_extents is None or len(self.indices) < 2:
            few = extents is not None and reduce_extents is not None
            return self._refuse("its results have one index" if few else "a loop's length depends on another loop's index, or on data")
        product, guards = self._product(self.reduction.regions[0].yields[0])
        if product is None:
            return self._refuse("what is added up is no product of two factors")
        first, second = product.operands
        uses = [self._depends(v) & frozenset(self.indices) for v in (first, second)]
        m = tuple(p for p, i in enumerate(self.indices) if i in uses[0] and i not in uses[1])
        n = tuple(p for p, i in enumerate(self.indices) if i in uses[1] and i not in uses[0])
        batch = tuple(p for p, i in enumerate(self.indices) if i in uses[0] and i in uses[1])
        if not m or not n or len(m) + len(n) + len(batch) != len(self.indices):
            return self._refuse("the two factors that are multiplied last do not each vary along results of their own")
        if not any(k in self._depends(v) for v in (first, second) for k in self.reduction.regions[0].args):
            return self._refuse("no factor varies along the sum")
        split = self._share_guards(guards, uses)
        if split is None:
            return self._refuse("several conditions choose its terms, or one that speaks of the indices of both factors")
        a, b = (self._factor(v, g) for v, g in zip((first, second), split, strict=True))
        if self._innermost_of_result() in [self.indices[p] for p in m]:
            # Results should lie side by side along n.
            a, b, m, n = b, a, n, m
        return Contraction(self.parallel, extents, self.reduction, reduce_extents, a, b, m, n, batch, self.forms)

    def _sizes(self, op: Op) -> tuple[Size, ...] | None:
        forms = [self.forms[v] for v in op.operands]
        return None if any(f.factors for f in forms) else tuple(f.constant for f in forms)

    def _product(self, value: Value) -> tuple[Op | None, list[Value]]:
        """The multiplication the sum's term is, and the conditions it stands under."""
        op = self.made.get(value)
        if op is None:
            return None, []
        if op.opcode == "mul":
            return op, []
        if op.opcode == "if" and self._is_zero(op.regions[1].yields[op.results.index(value)]) and not self._stores(op):
            inner, guards = self._product(op.regions[0].yields[op.results.index(value)])
            return inner, [op.operands[0], *guards]
        if op.opcode == "select" and self._is_zero(op.operands[2]):
            inner, guards = self._product(op.operands[1])
            return inner, [op.operands[0], *guards]
        return None, []

    def _stores(self, op: Op) -> bool:
        return any(inner.opcode in ("store", "atomic", "accumulate") for region in op.regions for inner in walk(region))

    def _is_zero(self, value: Value) -> bool:
        op = self.made.get(value)
        return op is not None and op.opcode == "const" and op.attrs["value"] == 0

    def _share_guards(self, guards: list[Value], uses: list[frozenset[Value]]) -> list[Value | None] | None:
        """Each condition to the factors whose parallel indices are all it needs."""
        found: list[Value | None] = [None, None]
        waiting = list(guards)
        while waiting:
            guard = waiting.pop(0)
            needs = self._depends(guard) & frozenset(self.indices)
            sides = [side for side in (0, 1) if needs <= uses[side]]
            op = self.made.get(guard)
            if not sides and op is not None and op.opcode == "and":
                waiting += op.operands  # each test may speak of one factor
                continue
            if not sides or any(found[side] is not None for side in sides):
                return None
            for side in sides:
                found[side] = guard
        return found

    def _depends(self, value: Value) -> frozenset[Value]:
        """The loop indices a value is made of."""
        known = self.memo.get(value)
        if known is None:
            if value in self.leaves:
                known = frozenset({value})
            else:
                op = self.made.get(value)
                known = frozenset()
                if op is not None:
                    inside = [v for region in op.regions for inner in walk(region) for v in inner.operands]
                    known = known.union(*(self._depends(v) for v in (*op.operands, *inside)))
            self.memo[value] = known
        return known

    def _factor(self, value: Value, guard: Value | None) -> Factor:
        op = self.made.get(value)
        while op is not None and op.opcode == "cast" and _only_widens(dtype_of(op.operands[0].type), dtype_of(value.type)):
            value = op.operands[0]
            op = self.made.get(value)
        load = op if op is not None and op.opcode == "load" and not op.attrs.get("masked") else None
        return Factor(value, dtype_of(value.type), load, guard)

    def _innermost_of_result(self) -> Value | None:
        """The parallel index along which the first store writes neighbours."""
        for op in self.parallel.regions[0].ops:
            if op.opcode == "store":
                memory = op.operands[0].type
                assert isinstance(memory, Tensor)
                for index, stride in zip(op.operands[1 : 1 + memory.rank], memory.strides, strict=True):
                    if stride == ONE:
                        form = self.forms[index]
                        own = [v for v in form.values if v in self.leaves]
                        # Phases of a result lie a few elements apart.
                        return next((v for v in own if form.factor(v) == ONE), own[0] if len(own) == 1 and form.factor(own[0]).constant else None)
        return None


def _only_widens(source: DType, target: DType) -> bool:
    if source.is_float and target.is_float:
        return source.bits < target.bits
    return source.is_int and target.is_int and source.bits < target.bits and (source.kind == "u" or target.kind == "i")


def restates_bounds(contraction: Contraction, factor: Factor) -> bool:
    """Whether a plain load's guard says no more than that its indices are inside the tensor (and that of the other factor, if it has one,
    inside its own): a copy that fills with zeros outside needs no guard."""
    if factor.guard is None:
        return True
    if factor.load is None or factor.tensor is None:
        return False
    made = {result: op for op in walk(contraction.parallel.regions[0]) for result in op.results}
    known = list(zip(contraction.access(factor), factor.tensor.shape, strict=True))
    waiting = [factor.guard]
    while waiting:
        op = made.get(waiting.pop())
        if op is None:
            return False
        if op.opcode == "and":
            waiting += op.operands
            continue
        distance = gap(op, contraction.forms)
        if distance is None:
            return False
        if not any(_same(distance, form) or _same(distance, Affine((), extent - 1).minus(form)) for form, extent in known):
            return False
    return True


def _same(a: Affine, b: Affine) -> bool:
    """Whether both are at least 0 for the same values of their indices: what their factors have in common is divided out first, as `join_guards` does."""
    a, b = lowest(a), lowest(b)
    return a.constant == b.constant and not a.minus(b).factors


@record
class Plane:
    """A plain load as a matrix: axis `row` of its tensor walks the rows (m or n), axis `k` the sum, each by ones from an offset;
    all other indices are the same for the whole tile."""

    row: int
    k: int


def plane(contraction: Contraction, factor: Factor, inner: int = -1) -> Plane | None:
    """How a factor that is a plain load lies in its tensor, when one tensor axis walks each way. `inner`: the summed index that is walked,
    where the others stand still."""
    side = contraction.m if factor is contraction.a else contraction.n
    rows = frozenset(contraction.indices[p] for p in side)
    sums = frozenset(contraction.k if inner < 0 else (contraction.k[inner],))
    # What guards say takes longest to find out.
    if factor.load is None or len(rows) != 1 or len(sums) != 1 or not restates_bounds(contraction, factor):
        return None
    row = k = -1
    for axis, form in enumerate(contraction.access(factor)):
        moving = [v for v in form.values if v in rows or v in sums]
        if not moving:
            continue
        if len(moving) > 1 or form.factor(moving[0]) != ONE:
            return None
        if moving[0] in rows:
            if row >= 0:
                return None
            row = axis
        else:
            if k >= 0:
                return None
            k = axis
    return Plane(row, k) if row >= 0 and k >= 0 else None


@record
class Image:
    """A plain load of a convolution's input [n, h, w, c] or [n, d, h, w, c]: the results are pixels in order (batch, then planes, rows, columns), read
    at `position * step + offset * dilation + lower`, and zero outside. `offsets` are the summed indices along the kernel's axes (None where it has
    extent 1), `channel` the one along c; all are positions among the summed indices."""

    steps: tuple[int, ...]
    dilations: tuple[int, ...]
    lower: tuple[int, ...]
    offsets: tuple[int | None, ...]
    channel: int
    pixels: tuple[int | None, ...]
    """The parallel indices along the axes of the result; None where the image has extent 1 and there is none."""
    moves: bool = False
    """The image's number has a part that other summed indices decide."""


def image(contraction: Contraction, factor: Factor) -> Image | None:
    """How a factor reads an image, when it does."""
    tensor = factor.tensor
    side = contraction.m if factor is contraction.a else contraction.n
    if tensor is None or tensor.rank not in (4, 5) or len(side) < 2 or not restates_bounds(contraction, factor):
        return None
    forms = contraction.access(factor)
    sums = {value: position for position, value in enumerate(contraction.k)}
    channel = next((p for v, p in sums.items() if forms[-1].is_just(v)), None)
    moved = _moved(contraction, forms[0], contraction.indices[side[0]])
    if channel is None or moved is None:
        return None
    windows: list[tuple[int, int, int, int | None]] = []
    pixels: list[int | None] = []
    waiting = list(side[1:])
    for form, extent in zip(forms[1:-1], tensor.shape[1:-1], strict=True):
        is_one = extent == ONE and not form.factors and form.constant == ZERO
        window = (1, 1, 0, None) if is_one else _window(form, contraction.indices[waiting[0]], sums) if waiting else None
        if window is None:
            return None
        windows.append(window)
        pixels.append(None if is_one else waiting.pop(0))
    used = [p for p in (*(w[3] for w in windows), channel, *moved) if p is not None]
    if waiting or sorted(used) != list(range(len(contraction.k))):
        return None
    steps, dilations, lower, offsets = zip(*windows, strict=True)
    return Image(steps, dilations, lower, offsets, channel, tuple(pixels), bool(moved))


def _moved(contraction: Contraction, form: Affine, batch: Value) -> tuple[int, ...] | None:
    """The summed indices that decide, beside the batch's index, which image is read, as positions; None where anything else does."""
    if form.factor(batch) != ONE:
        return None
    rest = form.minus(AffineForm(((batch, ONE),)))
    if not rest.factors:
        return () if rest.constant == ZERO else None
    made = {result: op for op in walk(contraction.reduction.regions[0]) for result in op.results}
    found, waiting = set[int](), list(rest.values)
    while waiting:
        value = waiting.pop()
        if value in contraction.k:
            found.add(contraction.k.index(value))
        elif value in made:
            waiting += made[value].operands
        elif value in contraction.indices:
            return None
    return tuple(sorted(found))


def _window(form: Affine, own: Value, sums: dict[Value, int]) -> tuple[int, int, int, int | None] | None:
    """Step, dilation, lower corner and the summed index of `step * own + dilation * offset + lower`."""
    step, lower = form.factor(own).constant, form.constant.constant
    others = [v for v in form.values if v is not own]
    if step is None or step < 1 or lower is None or len(others) > 1 or any(v not in sums for v in others):
        return None
    dilation = form.factor(others[0]).constant if others else 1
    if dilation is None or dilation < 1:
        return None
    return step, dilation, lower, sums[others[0]] if others else None
