"""What schedules need to know of a loop nest: its extents, its reductions, and which index walks memory one element at a time.

In: a loop-stage kernel. Out: a `Nest`, and answers to single questions about it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from tilewright.analysis.affine import Affine, Forms, address, analyse
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, dtype_of

DYNAMIC = "$dynamic"
"""The name of a length that indices decide. No call knows it."""


@record
class Nest:
    """What the model needs to know of a kernel."""

    parallel: Op
    extents: tuple[Size, ...]
    reductions: tuple[Op, ...]
    """Top-level reductions of the body, in order."""
    sweeps: tuple[Op, ...]
    """Top-level serial loops whose iterations are independent: they can share the reductions' axis."""
    stride_one: tuple[int, ...]
    """For each parallel index, bytes accessed with stride one along it."""
    beside: tuple[frozenset[int], ...]
    """For each parallel index, those that accesses with stride one along it move with besides."""
    near: tuple[frozenset[int], ...]
    """The same for loads that lie a few elements apart along it, but not one."""
    reduce_stride_one: int
    """Bytes accessed with stride one along the innermost reduction index."""
    reduce_streamed: int
    """Of these, what moves with as many indices as any access does: the vector `t` of `t[i] * a[i, j]` is read again for every `j`, and stays in a cache."""
    reduce_extent: Size
    """How long the innermost reduction is (at most)."""
    widest: int
    """Bytes of the widest element accessed."""
    narrowest: int

    @property
    def rows_differ(self) -> bool:
        """Whether the length of a reduction depends on the result it makes."""
        return DYNAMIC in self.reduce_extent.names

    @property
    def reduces_along(self) -> bool:
        """Whether most of what reductions read anew lies along their own index, not along one of the results."""
        across = max(self.stride_one, default=0)
        return (self.reduce_streamed if across else self.reduce_stride_one) > across


_known: WeakKeyDictionary[Kernel, Nest] = WeakKeyDictionary()


def nest_of(kernel: Kernel) -> Nest:
    """What the model needs to know of this kernel."""
    found = _known.get(kernel)
    if found is None:
        found = _known[kernel] = _nest_of(kernel)
    return found


def _nest_of(kernel: Kernel) -> Nest:
    forms = analyse(kernel)
    parallel = next(op for op in kernel.body.ops if op.opcode == "parallel")
    indices = parallel.regions[0].args
    extents = tuple(constant_of(forms[v]) for v in parallel.operands)
    reductions = tuple(op for op in parallel.regions[0].ops if op.opcode == "reduce")
    sweeps = tuple(op for op in parallel.regions[0].ops if is_sweep(op))
    inner: tuple[Value, ...] = tuple(op.regions[0].args[-1] for op in (*reductions, *sweeps) if op.operands)
    weights = [0] * len(indices)
    beside: list[set[int]] = [set() for _ in indices]
    near: list[set[int]] = [set() for _ in indices]
    reduce_weight = 0
    streamed: list[tuple[int, int]] = []
    moving = {*indices, *(k for op in (*reductions, *sweeps) for k in op.regions[0].args)}
    summed = moving.difference(indices)
    sizes: list[int] = []
    reduced = {id(inner) for op in (*reductions, *sweeps) for inner in walk(op.regions[0])}
    # Beside a reduction, what is accessed once per result hardly counts.
    accesses = [(op, address(op, forms)) for op in walk(kernel.body) if op.opcode in ("load", "store") and (not reduced or id(op) in reduced)]
    most = max((_moved_by(form, indices) for _, form in accesses), key=len, default=frozenset())
    for op, form in accesses:
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        size = memory.dtype.itemsize
        sizes.append(size)
        depth = sum(value in moving for value in form.values) if moving.issuperset(form.values) else len(moving)
        streamed.append((depth, 0))
        own = _moved_by(form, indices)
        if not reduced and op.opcode == "load" and own and own < most:
            continue  # means by row and scales by channel come from the cache, however they are read
        if reduced and op.opcode == "load" and own and moving.issuperset(form.values) and summed.isdisjoint(form.values):
            continue  # so do terms that are the same all along a sum
        for position, index in enumerate(indices):
            if form.factor(index) == ONE:
                weights[position] += size * (2 if op.opcode == "store" else 1)
                beside[position] |= own
            elif op.opcode == "load" and is_near(form.factor(index)):
                near[position] |= own
        if any(form.factor(index) == ONE for index in inner):
            reduce_weight += size * 2
            streamed.append((depth, size * 2))
    reduce_extent = ONE
    declared = kernel.attrs.get("reduce_extent")
    if isinstance(declared, Size):
        reduce_extent = declared
    elif reductions and reductions[0].operands:
        reduce_extent = constant_of(forms[reductions[0].operands[-1]])
    elif sweeps:
        reduce_extent = constant_of(forms[sweeps[0].operands[1]])
    deepest = max((depth for depth, _ in streamed), default=0)
    return Nest(
        parallel, extents, reductions, sweeps, tuple(weights), tuple(map(frozenset, beside)), tuple(map(frozenset, near)), reduce_weight,
        sum(size for depth, size in streamed if depth == deepest), reduce_extent, max(sizes, default=4), min(sizes, default=4),
    )  # fmt: skip


def _moved_by(form: Affine, indices: Sequence[Value]) -> frozenset[int]:
    """Which parallel indices an address moves with."""
    return frozenset(p for p, index in enumerate(indices) if index in form.values)


def walks_views(kernel: Kernel, nest: Nest) -> bool:
    """Whether nothing lies element by element, and most of what the first reduction reads lies a few elements apart along its own index: every second column, say."""
    along, across = _near_bytes(kernel, nest)
    return along > max(across, default=0)


def view_index(kernel: Kernel, nest: Nest) -> int:
    """The parallel index along which most of what the first reduction reads lies a few elements apart, where nothing lies element by element; -1 where there is none."""
    along, across = _near_bytes(kernel, nest)
    most = max(across, default=0)
    return across.index(most) if most and most >= along else -1


def _near_bytes(kernel: Kernel, nest: Nest) -> tuple[int, list[int]]:
    """Bytes that the first reduction reads a few elements apart: along its own index, and along each parallel one."""
    if any(nest.stride_one) or nest.reduce_stride_one or not nest.reductions or not nest.reductions[0].operands:
        return 0, []
    forms, region = analyse(kernel), nest.reductions[0].regions[0]
    loads = [(address(op, forms), _bytes_of(op)) for op in walk(region) if op.opcode == "load"]

    def near(index: Value) -> int:
        return sum(size for form, size in loads if is_near(form.factor(index)))

    return near(region.args[-1]), [near(index) for index in nest.parallel.regions[0].args]


def is_near(step: Size) -> bool:
    """Whether neighbours along an index lie at most a few elements apart."""
    return step.constant is not None and 0 < abs(step.constant) <= 8


def is_sweep(op: Op) -> bool:
    """A serial loop by ones that carries nothing and whose iterations the checker found independent."""
    return op.opcode == "for" and bool(op.attrs.get("independent")) and len(op.operands) == 3


def inner_walks(kernel: Kernel, nest: Nest) -> tuple[Op, ...]:
    """Reductions and sweeps inside serial loops of a nest that has none at its top, which walk memory one element at a time: the vectors of code that runs in
    order. Of loops inside each other the outermost that most of what the innermost reads lies along. Sweeps at the top with sweeps inside are such loops, too."""
    if (nest.reductions or nest.sweeps) and not any(is_sweep(inner) for op in nest.sweeps for inner in op.regions[0].ops):
        return ()
    forms = analyse(kernel)

    def weight(op: Op) -> int:
        """Bytes that lie along an op's index, in the innermost loops of it."""
        index, ops = op.regions[0].args[-1], list(walk(op.regions[0]))
        deep = {id(inner) for one in ops if one.regions and one.opcode != "if" for inner in walk(one.regions[0])}
        accesses = [one for one in ops if one.opcode in ("load", "store") and (not deep or id(one) in deep)]
        within = [one.regions[0].args[-1] for one in ops if is_sweep(one) and not any(is_sweep(other) for other in walk(one.regions[0]))]
        if within:  # what the innermost loop does not move is read once before it
            accesses = [one for one in accesses if any(value in address(one, forms).values for value in within)]
        return sum(_bytes_of(one) for one in accesses if address(one, forms).factor(index) == ONE)

    def visit(ops: Sequence[Op]) -> Iterator[Op]:
        for op in ops:
            walks = (op.opcode == "reduce" and bool(op.operands)) or is_sweep(op)
            inner = [one for region in op.regions for one in visit(region.ops)]
            own = weight(op) if walks else 0
            if own and own >= max((weight(one) for one in inner), default=0) and _is_plain(op):
                yield op
            elif op.opcode != "reduce":
                yield from inner

    return tuple(visit(nest.parallel.regions[0].ops))


_SHORT_LOOP = 16
"""Turns up to which a serial loop is short."""


def has_long_loops(kernel: Kernel, nest: Nest) -> bool:
    """Whether points run through serial loops that are not surely short: a few of them are work enough for a block."""
    forms = analyse(kernel)
    for op in walk(nest.parallel.regions[0]):
        if op.opcode == "while":
            return True
        if op.opcode == "for":
            turns = (constant_of(forms[op.operands[1]]) - constant_of(forms[op.operands[0]])).constant
            if turns is None or turns > _SHORT_LOOP:
                return True
    return False


def returns_to_elements(kernel: Kernel, nest: Nest) -> bool:
    """Whether points come to elements of arrays more than once, as far as the number of loops tells: a row for each point and a loop along it is every element once."""

    def depth(block: Block) -> float:
        own = {"for": 1.0, "while": math.inf}
        return max((own.get(op.opcode, 0.0) + max(map(depth, op.regions)) for op in block.ops if op.regions), default=0.0)

    most = max((param.type.rank for param in kernel.params if isinstance(param.type, Tensor)), default=0)
    return len(nest.extents) + depth(nest.parallel.regions[0]) > most


def inner_sums(nest: Nest) -> tuple[Op, ...]:
    """The reductions without loops in them that stand in serial loops or in other reductions of a nest; none where there are atomics, or a place is looked for."""
    body = nest.parallel.regions[0]
    if not nest.extents or any(op.opcode in ("atomic", "accumulate") or str(op.attrs.get("kind", "")).startswith("arg") for op in walk(body)):
        return ()
    around = [op for op in body.ops if op.opcode in ("for", "reduce")]
    return tuple(
        op for loop in around for op in walk(loop.regions[0])
        if op.opcode == "reduce" and not any(inner.regions and inner.opcode != "if" for inner in walk(op.regions[0]))
    )  # fmt: skip


def gathers_in_loops(kernel: Kernel, nest: Nest, axis: int) -> bool:
    """Whether most of what serial loops access lies apart for neighbours along a parallel index: each has a matrix of its own, say."""
    forms, index = analyse(kernel), nest.parallel.regions[0].args[axis]
    along = across = 0
    for loop in nest.parallel.regions[0].ops:
        for op in (inner for region in loop.regions for inner in walk(region)):
            if op.opcode in ("load", "store"):
                factor = address(op, forms).factor(index)
                along += _bytes_of(op) * (factor == ONE)
                across += _bytes_of(op) * (factor != ONE and factor != ZERO)
    return across > along


def _is_plain(op: Op) -> bool:
    """Whether it holds no loops but reductions, whose vectors go along."""
    return all(not one.regions or one.opcode in ("if", "reduce") for one in walk(op.regions[0])) and not any(one.opcode == "accumulate" for one in walk(op.regions[0]))


def _bytes_of(op: Op) -> int:
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    return memory.dtype.itemsize * (2 if op.opcode == "store" else 1)


def constant_of(form: Affine) -> Size:
    """The form as a size; one that nobody knows where it depends on indices."""
    return form.constant if not form.factors else Size.of(DYNAMIC)


def vector_index(nest: Nest) -> int:
    """The parallel index with most stride-one traffic, the innermost on ties; -1 when no access has stride one. An index that is always 0 walks nothing."""
    best = -1
    for position, weight in enumerate(nest.stride_one):
        if weight and nest.extents[position] != ONE and (best < 0 or weight >= nest.stride_one[best]):
            best = position
    return best


def aligned_width(kernel: Kernel, nest: Nest, axis: int, width: int) -> int:
    """How many neighbours along a parallel index, at most `width`, every access of reductions that lies along it can take at once: rows of 2247 elements begin
    anywhere, and none of them can be read in vectors."""
    accesses = [inner for op in (*nest.reductions, *nest.sweeps) for inner in walk(op.regions[0])]
    return _aligned(kernel, accesses, nest.parallel.regions[0].args[axis], width)


def stored_width(kernel: Kernel, nest: Nest, axis: int, width: int) -> int:
    """The same of what is stored."""
    return _aligned(kernel, [op for op in walk(kernel.body) if op.opcode == "store"], nest.parallel.regions[0].args[axis], width)


def aligned_rows(kernel: Kernel, nest: Nest, width: int) -> int:
    """The same along the index of the reductions and sweeps themselves."""
    for op in (*nest.reductions, *nest.sweeps):
        if op.regions[0].args:
            width = _aligned(kernel, list(walk(op.regions[0])), op.regions[0].args[-1], width)
    return width


def aligned_walk(kernel: Kernel, loop: Op, width: int) -> int:
    """The same along the index of a loop; 1 where something lies apart along it."""
    forms, index = analyse(kernel), loop.regions[0].args[0]
    accesses = [op for op in walk(loop.regions[0]) if op.opcode in ("load", "store")]
    if any(address(op, forms).factor(index) not in (ZERO, ONE) for op in accesses):
        return 1
    first = forms[loop.operands[0]]
    while width > 1 and not all(size.divisible_by(width, kernel.facts) for size in (first.constant, *(factor for _, factor in first.factors))):
        width //= 2
    return _aligned(kernel, accesses, index, width)


def _aligned(kernel: Kernel, ops: Sequence[Op], index: Value, width: int) -> int:
    forms = analyse(kernel)
    for op in ops:
        if op.opcode not in ("load", "store") or address(op, forms).factor(index) != ONE:
            continue
        memory, place = op.operands[0].type, address(op, forms)
        assert isinstance(memory, Tensor)
        others = [place.constant, *(factor for value, factor in place.factors if value is not index)]
        align = memory.align or memory.dtype.itemsize
        while width > 1 and (align % min(16, width * memory.dtype.itemsize) or not all(size.divisible_by(width, kernel.facts) for size in others)):
            width //= 2
    return width


def crossing_index(kernel: Kernel, nest: Nest, axis: int) -> int:
    """The parallel index along which a load walks memory one element at a time while neighbours along `axis` lie far apart in it, as in a transposition; -1 for none."""
    forms, indices = analyse(kernel), nest.parallel.regions[0].args
    for op in walk(nest.parallel.regions[0]):
        if op.opcode == "load":
            place = address(op, forms)
            along = [p for p, index in enumerate(indices) if p != axis and place.factor(index) == ONE]
            if along and place.factor(indices[axis]) not in (ZERO, ONE):
                return along[-1]
    return -1


def is_strided_sum(kernel: Kernel, nest: Nest) -> bool:
    """Whether a nest is sums (or products, least, largest) whose terms are read at equal distances along their innermost index, without conditions."""
    if not nest.reductions or nest.sweeps or kernel.attrs.keys() & {"blocks", "in_order", "dots"}:
        return False
    forms = analyse(kernel)
    results = {r for op in nest.reductions for r in op.results}
    return all(_walks_evenly(op, kernel, nest, forms, results) for op in nest.reductions)


def _walks_evenly(reduction: Op, kernel: Kernel, nest: Nest, forms: Forms, results: set[Value]) -> bool:
    if not reduction.operands or reduction.attrs["kind"] not in ("add", "mul", "min", "max") or any(op.regions for op in walk(reduction.regions[0])):
        return False
    loads = [address(op, forms) for op in walk(reduction.regions[0]) if op.opcode == "load"]
    known = {*kernel.params, *nest.parallel.regions[0].args, *reduction.regions[0].args}
    if any(v in results for op in walk(reduction.regions[0]) for v in op.operands):
        return False  # one after the other
    return bool(loads) and all(known.issuperset(place.values) for place in loads) and any(place.factor(reduction.regions[0].args[-1]) != ZERO for place in loads)


def compute_bytes(kernel: Kernel) -> int:
    """Bytes of the widest value computed with, indices aside: it decides how many fit a SIMD register."""
    return max((dtype_of(r.type).itemsize for op in walk(kernel.body) for r in op.results if dtype_of(r.type).is_float), default=4)


def slides(kernel: Kernel, nest: Nest, any_axis: bool = False) -> bool:
    """Whether a reduction walks a window of an array that its results walk too: `x[j + s]`. Such windows are short. `any_axis`: not only where
    memory is walked one element after the other, but along any axis."""
    forms = analyse(kernel)
    inner = [op.regions[0].args[-1] for op in nest.reductions if op.operands]
    if any_axis:
        sums = {k for op in nest.reductions for k in op.regions[0].args}
        own = set(nest.parallel.regions[0].args)
        loads = [op for op in walk(nest.parallel.regions[0]) if op.opcode == "load"]
        subscripts = [set(forms[v].values) for op in loads for v in op.operands[1:] if v in forms]
        return any(used & sums and used & own for used in subscripts)
    for op in walk(nest.parallel.regions[0]):
        if op.opcode == "load":
            form = address(op, forms)
            if any(form.factor(k) == ONE for k in inner) and any(form.factor(i) == ONE for i in nest.parallel.regions[0].args):
                return True
    return False


def pairs_of_rows(nest: Nest, forms: Forms) -> tuple[int, int] | None:
    """Where each result is a sum over a row of one array and a row of another one, such as the distance of two points: the parallel index of the first
    array's rows, and that of the second's, along which results are written one after the other. None for other nests."""
    indices, body = nest.parallel.regions[0].args, nest.parallel.regions[0]
    stores = [address(op, forms) for op in walk(body) if op.opcode == "store"]
    along = next((p for p in reversed(range(len(indices))) if stores and all(place.factor(indices[p]) == ONE for place in stores)), None)
    if along is None or not nest.reductions or nest.sweeps:
        return None
    kinds = {str(op.attrs["kind"]) for op in nest.reductions}
    uniform = all(len(op.operands) == 1 and op.operands[0] in forms and not forms[op.operands[0]].factors for op in nest.reductions)
    if not uniform or not kinds <= {"add", "mul", "min", "max"} or any(op.regions and op not in nest.reductions for op in walk(body)):
        return None
    firsts: set[int] = set()
    second = False
    for op in nest.reductions:
        for load in walk(op.regions[0]):
            if load.opcode not in ("load", "store"):
                continue
            place = address(load, forms)
            mine = [p for p, index in enumerate(indices) if place.factor(index) != ZERO]
            if load.opcode == "store" or place.factor(op.regions[0].args[0]) not in (ZERO, ONE) or set(place.values) - {*indices, *op.regions[0].args}:
                return None
            if along in mine:
                if place.factor(indices[along]) == ONE:
                    return None
                second = True
    for op in nest.reductions:
        loads = [address(load, forms) for load in walk(op.regions[0]) if load.opcode == "load"]
        for place in loads:
            if place.factor(indices[along]) == ZERO and place.factor(op.regions[0].args[0]) == ONE:
                firsts |= {p for p, index in enumerate(indices) if place.factor(index) != ZERO and all(o.factor(index) == ZERO for o in loads if o.factor(indices[along]) != ZERO)}
    return (max(firsts), along) if second and firsts else None


def can_repeat(kernel: Kernel) -> bool:
    """Whether computing an element twice is the same as once: nothing that is written is read."""
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    return not any(op.opcode in ("load", "atomic", "accumulate") and op.operands[0] in written for op in walk(kernel.body))


# -- arrays of short records: pairs of a real and an imaginary part, colours of a pixel, coordinates of a point ------

LONGEST = 4
"""Elements of a record."""
FEWEST_LANES = 4
"""Lanes of a register from which on vectors along records pay: with fewer, sorting elements takes as long as what is computed."""


def record_sizes(kernel: Kernel) -> dict[str, int]:
    """Sizes of last axes that only constants walk, and how many elements they reach: `x[i, 0]` and `x[i, 1]` reach two."""
    forms = analyse(kernel)
    found: dict[str, int] = {}
    others: set[str] = set()
    for op in walk(kernel.body):
        if op.opcode == "size":
            value = op.attrs["value"]
            assert isinstance(value, Size)
            others |= value.names
        if op.opcode not in ("load", "store"):
            continue
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        if memory.rank < 2:
            continue
        name, last = memory.shape[-1].name, forms.get(op.operands[memory.rank])
        if name is None or memory.strides[-1].constant != 1 or memory.strides[-2] != memory.shape[-1]:
            continue
        if last is None or last.factors or last.constant.constant is None or last.constant.constant < 0:
            others.add(name)
        else:
            found[name] = max(found.get(name, 0), last.constant.constant + 1)
    return {name: count for name, count in found.items() if name not in others and 2 <= count <= LONGEST}


def record_index(kernel: Kernel, nest: Nest) -> int:
    """The parallel index along which all that moves with it is accessed at strides of up to four elements; -1 where there is none, or where reductions or loops
    have the vectors."""
    if nest.reductions or nest.sweeps or any(op.opcode in ("accumulate", "atomic") for op in walk(kernel.body)):
        return -1
    forms = analyse(kernel)
    places = [(op.opcode, address(op, forms)) for op in walk(kernel.body) if op.opcode in ("load", "store")]
    indices = nest.parallel.regions[0].args
    if not places or any(not set(indices).issuperset(place.values) for _, place in places):
        return -1
    for position, index in reversed(list(enumerate(indices))):
        factors = [(kind, place.factor(index)) for kind, place in places]
        near = all(f == ZERO or (f.constant is not None and 1 <= f.constant <= LONGEST) for _, f in factors)
        if near and all(f != ZERO for kind, f in factors if kind == "store"):
            return position
    return -1
