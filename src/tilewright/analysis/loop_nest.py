"""What schedules need to know of a loop nest: its extents, its reductions, and which index walks memory one element at a time.

In: a loop-stage kernel. Out: a `Nest`, and answers to single questions about it.
"""

from __future__ import annotations

from tilewright.analysis.affine import Affine, address, analyse
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, dtype_of


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
    reduce_stride_one: int
    """Bytes accessed with stride one along the innermost reduction index."""
    reduce_extent: Size
    """How long the innermost reduction is (at most)."""
    widest: int
    """Bytes of the widest element accessed."""
    narrowest: int


def nest_of(kernel: Kernel) -> Nest:
    """What the model needs to know of this kernel."""
    forms = analyse(kernel)
    parallel = next(op for op in kernel.body.ops if op.opcode == "parallel")
    indices = parallel.regions[0].args
    extents = tuple(constant_of(forms[v]) for v in parallel.operands)
    reductions = tuple(op for op in parallel.regions[0].ops if op.opcode == "reduce")
    sweeps = tuple(op for op in parallel.regions[0].ops if is_sweep(op))
    inner: tuple[Value, ...] = tuple(op.regions[0].args[-1] for op in (*reductions, *sweeps) if op.operands)
    weights = [0] * len(indices)
    reduce_weight = 0
    sizes: list[int] = []
    reduced = {id(inner) for op in (*reductions, *sweeps) for inner in walk(op.regions[0])}
    for op in walk(kernel.body):
        if op.opcode not in ("load", "store") or (reduced and id(op) not in reduced):
            continue  # beside a reduction, what is accessed once per result hardly counts
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        form = address(op, forms)
        size = memory.dtype.itemsize
        sizes.append(size)
        for position, index in enumerate(indices):
            if form.factor(index) == ONE:
                weights[position] += size * (2 if op.opcode == "store" else 1)
        if any(form.factor(index) == ONE for index in inner):
            reduce_weight += size * 2
    reduce_extent = ONE
    declared = kernel.attrs.get("reduce_extent")
    if isinstance(declared, Size):
        reduce_extent = declared
    elif reductions and reductions[0].operands:
        reduce_extent = constant_of(forms[reductions[0].operands[-1]])
    elif sweeps:
        reduce_extent = constant_of(forms[sweeps[0].operands[1]])
    return Nest(
        parallel, extents, reductions, sweeps, tuple(weights), reduce_weight, reduce_extent, max(sizes, default=4), min(sizes, default=4)
    )


def is_sweep(op: Op) -> bool:
    """A serial loop by ones that carries nothing and whose iterations the checker found independent."""
    return op.opcode == "for" and bool(op.attrs.get("independent")) and len(op.operands) == 3


def constant_of(form: Affine) -> Size:
    """The form as a size; one that nobody knows where it depends on indices."""
    return form.constant if not form.factors else Size.of("$dynamic")


def vector_index(nest: Nest) -> int:
    """The parallel index with most stride-one traffic, the innermost on ties; -1 when no access has stride one."""
    best = -1
    for position, weight in enumerate(nest.stride_one):
        if weight and (best < 0 or weight >= nest.stride_one[best]):
            best = position
    return best


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


def can_repeat(kernel: Kernel) -> bool:
    """Whether computing an element twice is the same as once: nothing that is written is read."""
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    return not any(op.opcode in ("load", "atomic", "accumulate") and op.operands[0] in written for op in walk(kernel.body))
