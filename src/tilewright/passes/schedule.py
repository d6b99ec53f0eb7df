"""Schedules: how a loop nest is cut into blocks, tiles and threads. Data, chosen by a model of the target.

`choose(kernel, target, hints)` looks at the nest's accesses: which index walks memory one element at a time (the vector
axis), whether that index is reduced, how wide the elements are. Sizes are symbolic; `hints` are the sizes of the call that
caused the compilation and only steer the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from math import prod

from tilewright.analysis.affine import Affine, address, analyse
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.shift_rows import read_shared, row_start, walked


@record
class Schedule:
    """One choice. Axes are numbered by the nest's parallel indices; `reduce_axis` is the reduced one, if tiled."""

    tiles: tuple[int, ...]
    """Elements of one block along each parallel index (1: the index is a scalar of the block)."""
    reduce_tile: int = 1
    """Elements of one step along the innermost reduction index; 1 means a serial loop."""
    vector: int = 1
    """Elements one thread accesses at once, along the vector axis (on a CPU the whole tile: a vector of several registers)."""
    vector_on_reduction: bool = False
    """Whether the vector axis is the reduction's."""
    vector_index: int = -1
    """Which parallel index is the vector axis, when it is not the reduction's; -1 for none."""
    threads: int = 1
    across: int = 1
    """Lanes along the other tiled index, where loads walk memory along that one: both loads and stores then use whole sectors."""
    window: bool = False
    """GPU: results read overlapping windows, and each thread has several of them to share what it loads (`lower_windows`)."""
    along: int = -1
    """With `window`: the parallel index along which a thread has all results of the tile, besides its vector; -1 for none."""
    warps_on_reduction: bool = True
    """Whether warps beyond the vector axis spread over the reduction (and then meet in shared memory)."""
    chunk: int = 1
    """CPU: elements of one block along the vector axis, walked in steps of the tile."""
    repeat: bool = False
    """CPU: what is left of a row is done by a vector that ends where it does, computing a few elements twice."""
    whole: bool = False
    """GPU: a step along the reduction holds all of it, so that a row is read once and stays in registers."""
    cluster: int = 1
    """GPU: blocks that share a row, meeting in each other's shared memory."""
    shifted: bool = False
    """GPU, with `whole`: a row's tile begins before the row, where vectors lie at multiples of their size (`shift_rows`)."""
    resident: int = 0
    """GPU: blocks that are to find room on a multiprocessor at once; 0 leaves it to the assembler how many registers a thread has."""
    turned: int = -1
    turns: int = 1
    """CPU: a block does `turns` neighbours along the parallel index `turned`, one after the other; short rows are not worth a block each."""
    block_search: int = 0
    """CPU: argmin/argmax look for the extreme value in runs of this many elements and for its place only when it wins."""

    @property
    def row_step(self) -> int:
        """Elements of a row that the threads hold with one vector each."""
        return self.vector * self.threads * self.cluster // (self.tiles[-1] if self.tiles else 1)

    def describe(self) -> str:
        flags = ("whole", "shifted")
        return ", ".join(f"{k}={v}" for k, v in asdict(self).items() if v not in (1, -1, 0, False, ()) or (k in flags and v))


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
    forms = analyse(kernel)
    parallel = next(op for op in kernel.body.ops if op.opcode == "parallel")
    indices = parallel.regions[0].args
    extents = tuple(_constant(forms[v]) for v in parallel.operands)
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
        reduce_extent = _constant(forms[reductions[0].operands[-1]])
    elif sweeps:
        reduce_extent = _constant(forms[sweeps[0].operands[1]])
    return Nest(
        parallel, extents, reductions, sweeps, tuple(weights), reduce_weight, reduce_extent, max(sizes, default=4), min(sizes, default=4)
    )


def is_sweep(op: Op) -> bool:
    """A serial loop by ones that carries nothing and whose iterations the checker found independent."""
    return op.opcode == "for" and bool(op.attrs.get("independent")) and len(op.operands) == 3


def _constant(form: Affine) -> Size:
    return form.constant if not form.factors else Size.of("$dynamic")


def choose(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> Schedule:
    """The schedule for this kernel."""
    nest = nest_of(kernel)
    return _choose_gpu(kernel, nest, target, hints) if target.is_gpu else _choose_cpu(kernel, nest, target)


def _hint(size: Size, hints: Mapping[str, int]) -> int:
    """What the size was in the call at hand; a large number when unknown."""
    return size.evaluate(hints) if size.names <= hints.keys() else 1 << 20


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


def vector_index(nest: Nest) -> int:
    """The parallel index with most stride-one traffic, the innermost on ties; -1 when no access has stride one."""
    best = -1
    for position, weight in enumerate(nest.stride_one):
        if weight and (best < 0 or weight >= nest.stride_one[best]):
            best = position
    return best


def _compute_bytes(kernel: Kernel) -> int:
    """Bytes of the widest value computed with, indices aside: it decides how many fit a SIMD register."""
    return max((dtype_of(r.type).itemsize for op in walk(kernel.body) for r in op.results if dtype_of(r.type).is_float), default=4)


# -- CPU ----------------------------------------------------------------------------------------------------------

CPU_CHUNK = 65536
"""Elements of one unit of work for the thread pool."""
CPU_TURNS = 16
"""Rows of one unit of work where each is short and a sum over a window."""
CPU_COLUMNS = 4096
"""Results of one unit of work where each is a reduction across rows."""


def _choose_cpu(kernel: Kernel, nest: Nest, target: Target) -> Schedule:
    rank = len(nest.extents)
    lanes = max(1, target.vector_bytes // max(_compute_bytes(kernel), nest.widest if not nest.reductions else 1))
    heavy = sum(1 for op in walk(kernel.body) if op.opcode not in ("load", "store", "const", "size"))
    unroll = 4 if heavy < 24 else 2
    on_reduction = bool(nest.reductions or nest.sweeps) and nest.reduce_stride_one > max(nest.stride_one, default=0)
    window = _slides(kernel, nest)
    if on_reduction and not window:
        arg = any(str(op.attrs["kind"]).startswith("arg") for op in nest.reductions)
        width = lanes * (8 if heavy < 8 else 4)
        return Schedule((1,) * rank, width, width, vector_on_reduction=True, block_search=2048 if arg else 0)
    axis = vector_index(nest)
    if axis < 0:
        return Schedule((1,) * rank)
    chunk = CPU_CHUNK if not nest.reductions else CPU_COLUMNS
    if (window or _slides(kernel, nest, beside=True)) and _can_repeat(kernel):
        # Rows of images are short: a step of two registers, then of one; so are their channels. A block does several of them.
        tiles = tuple(lanes * (2 if window else 4) if position == axis else 1 for position in range(rank))
        turned = next((p for p in reversed(range(rank)) if p != axis), -1)
        return Schedule(tiles, 1, lanes, vector_index=axis, chunk=chunk, repeat=True, turned=turned, turns=CPU_TURNS if turned >= 0 else 1)
    tiles = tuple(lanes * unroll if position == axis else 1 for position in range(rank))
    return Schedule(tiles, 1, lanes * unroll, vector_index=axis, chunk=chunk)


def _slides(kernel: Kernel, nest: Nest, beside: bool = False) -> bool:
    """Whether a reduction walks a window of an array that its results walk too: `x[j + s]`. Such windows are short. `beside`: not only where
    memory is walked one element after the other, but along any axis."""
    forms = analyse(kernel)
    inner = [op.regions[0].args[-1] for op in nest.reductions if op.operands]
    if beside:
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


def _can_repeat(kernel: Kernel) -> bool:
    """Whether computing an element twice is the same as once: nothing that is written is read."""
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic")}
    return not any(op.opcode in ("load", "atomic") and op.operands[0] in written for op in walk(kernel.body))


# -- GPU ----------------------------------------------------------------------------------------------------------


def _choose_gpu(kernel: Kernel, nest: Nest, target: Target, hints: Mapping[str, int]) -> Schedule:
    rank = len(nest.extents)
    vector = max(1, min(8, target.vector_bytes // nest.narrowest))
    if not nest.reductions and not nest.sweeps:
        return _gpu_map(nest, rank, vector, hints)
    if rank and not nest.sweeps and _hint(nest.reduce_extent, hints) <= FEW_TERMS and vector_index(nest) >= 0:
        # Every thread adds up its few terms itself. Where the terms are neighbours too (a window that slides along memory), vectors would
        # not be aligned.
        return _gpu_map(nest, rank, 1 if nest.reduce_stride_one else vector, hints, vectors=1)
    if nest.reduce_stride_one > max(nest.stride_one, default=0):
        return _gpu_rows(nest, rank, vector, hints)
    return _gpu_columns(nest, rank, vector, hints)


ACROSS = 8
"""Lanes of a warp along the index that what is read lies along, where results lie along another."""
FEW_TERMS = 32
"""So short a reduction, where results lie side by side too, is not spread over threads."""


def _gpu_map(nest: Nest, rank: int, vector: int, hints: Mapping[str, int], vectors: int = 2) -> Schedule:
    # Two vectors a thread in flight; measured best or within noise of it on an H200 for one to three streams.
    threads = 128 if nest.widest >= 4 else 256
    axis = vector_index(nest)
    if axis < 0:
        axis, vector = rank - 1, 1
    per_block = threads * vector * vectors
    if rank == 0:
        return Schedule((), threads=32)
    tiles = [1] * rank
    turned = next((p for p, weight in enumerate(nest.stride_one) if weight and p != axis), None)
    if turned is not None and not nest.reductions and vector > 1 and _hint(nest.extents[turned], hints) >= ACROSS:
        # Lanes take 4 vectors along the axis: a tile has at least these, and no more than the array.
        tiles[axis] = max(4 * vector, min(16 * vector, _power_of_two(_hint(nest.extents[axis], hints))))
        tiles[turned] = per_block // tiles[axis]
        return Schedule(tuple(tiles), 1, vector, vector_index=axis, threads=threads, across=ACROSS)
    tiles[axis] = min(per_block, max(_power_of_two(_hint(nest.extents[axis], hints)), vector * 8))
    other = next((p for p in reversed(range(rank)) if p != axis), None)
    if other is None:
        tiles[axis] = max(tiles[axis], 32 * vector)
    else:
        rest = per_block // tiles[axis]
        tiles[other] = max(min(rest, _power_of_two(_hint(nest.extents[other], hints))), 32 * vector // tiles[axis], 1)
    threads = max(32, min(threads, prod(tiles) // vector))
    return Schedule(tuple(tiles), 1, vector, vector_index=axis, threads=threads)


def _gpu_rows(nest: Nest, rank: int, vector: int, hints: Mapping[str, int]) -> Schedule:
    """The reduction walks memory: lanes and warps along it; several rows per block when rows are short."""
    length = _power_of_two(_hint(nest.reduce_extent, hints))
    # Wide accumulators and (value, index) pairs leave room for fewer vectors in flight.
    pairs = any(str(op.attrs["kind"]).startswith("arg") for op in nest.reductions)
    steps = 4 if nest.narrowest >= 4 and not pairs else 2
    # A row of ordinary length takes 128 threads, the long stretches of a split reduction more.
    most = 128 if length <= 8192 else 512 if nest.narrowest >= 4 and not pairs else 256
    per_row = max(32, min(most, length // vector))
    reduce_tile = min(per_row * vector * steps, max(per_row * vector, length))
    rows = max(1, 128 // per_row)
    tiles = [1] * rank
    if rank and rows > 1:
        tiles[rank - 1] = rows
    else:
        rows = 1
    return Schedule(tuple(tiles), reduce_tile, vector, vector_on_reduction=True, threads=per_row * rows)


ROW_VALUES = 64
"""Elements of a row one thread may hold, if it holds no others beside them; of several arrays half as many each."""
ROW_MOST = 80
"""The same for a row of one array that one block then holds: rather a few more than a larger block."""
ROW_SHARE = 16
"""Elements of four bytes of a row one thread holds where rows are of ordinary length, twice as many narrower ones: enough loads in flight,
and enough blocks."""
ROW_THREADS = 256
"""Threads of a block, if they can hold the row; twice as many wait longer for one another."""
ROW_CLUSTER = 8
"""Blocks that share a row no block can hold."""
ROW_VECTOR = 8
"""Where rows begin anywhere and vectors would have fewer bytes than this, they are shifted."""
ROW_RESIDENT = 3
"""Blocks that find room at once where rows of a cluster begin anywhere and vectors are of many elements, or the ends of rows take too many registers.
Where long rows are scaled by another array, two do: the assembler would spill a few registers for a third."""


def row_schedule(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> Schedule | None:
    """The schedule for rows that are walked several times and fit the registers of a block, or of a cluster; None for all else. It serves
    rows up to its `reduce_tile` that need all its steps, so the sizes of the call must be known."""
    nest = nest_of(kernel)
    if not target.is_gpu or not _walks_rows(kernel, nest) or not nest.reduce_extent.names <= sizes.keys():
        return None
    length = max(1, nest.reduce_extent.evaluate(sizes))
    vector = max(1, min(8, target.vector_bytes // nest.narrowest))
    while vector > 1 and not nest.reduce_extent.divisible_by(vector, kernel.facts):
        vector //= 2
    tiles = [1] * len(nest.extents)
    threads, cluster = _row_threads(kernel, nest, target, length, vector)
    if tiles and threads < 128:
        tiles[-1] = 128 // threads
    steps = -(-length // (threads * vector * cluster))
    if steps * vector > _most_values(kernel, nest, threads, cluster):
        return None
    scaled = steps * vector > ROW_VALUES // 2 and cluster == 1 and len(read_shared(kernel, (*nest.reductions, *nest.sweeps))) == 1
    found = Schedule(
        tuple(tiles), steps * vector * threads * cluster, vector, vector_on_reduction=True, threads=threads * (tiles[-1] if tiles else 1),
        whole=True, cluster=cluster, resident=max(1, 2 * ROW_THREADS // threads) if scaled else 0,
    )  # fmt: skip
    narrow, known = vector * nest.narrowest < ROW_VECTOR, nest.reduce_extent.name or nest.reduce_extent.constant is not None
    return (_shifted(kernel, nest, found, length) if narrow and known and all(t == 1 for t in tiles) else None) or found


def _row_threads(kernel: Kernel, nest: Nest, target: Target, length: int, vector: int) -> tuple[int, int]:
    """Threads of a block, and blocks, that hold a row: as few as can."""
    whole = _power_of_two(length)
    share = max(vector, ROW_SHARE * (1 if nest.narrowest >= 4 else 2))
    threads = max(32, min(ROW_THREADS, whole // share), min(128, whole // max(vector, ROW_SHARE)))
    if length <= threads * _most_values(kernel, nest, threads, 1):
        return threads, 1
    if length <= 2 * ROW_THREADS * _most_values(kernel, nest, 2 * ROW_THREADS, 1):
        return 2 * ROW_THREADS, 1
    if "cluster" not in target.features or not nest.extents:
        return 1024, 1
    for threads in (ROW_THREADS, 2 * ROW_THREADS):
        cluster = max(2, whole // (_most_values(kernel, nest, threads, 2) * threads))
        if cluster <= ROW_CLUSTER:
            break
    return threads, min(ROW_CLUSTER, cluster)


def _most_values(kernel: Kernel, nest: Nest, threads: int, cluster: int) -> int:
    """Elements of a row that one thread of such blocks may hold."""
    if threads == 1024:
        return ROW_VALUES // 4
    if len(walked(kernel, (*nest.reductions, *nest.sweeps))) > 1:
        return ROW_VALUES // 2
    return ROW_MOST if threads <= ROW_THREADS and cluster == 1 else ROW_VALUES


def _shifted(kernel: Kernel, nest: Nest, plain: Schedule, length: int) -> Schedule | None:
    """The same for rows that begin anywhere, with wide vectors all the same: of 16 bytes, or of 8 where a row then leaves clearly
    fewer registers empty, or where single elements are read beside them, which lie the further apart the wider vectors are. None
    where arrays begin differently, or the last full step would not be surely full."""
    walks = (*nest.reductions, *nest.sweeps)
    shared = bool(read_shared(kernel, walks))
    best: Schedule | None = None
    for size in (2 * ROW_VECTOR, ROW_VECTOR):
        vector = min(8, size // nest.narrowest)
        step = vector * plain.threads * plain.cluster
        steps = -(-(length + vector - 1) // step)
        most = _most_values(kernel, nest, plain.threads, plain.cluster)
        if vector < 2 or steps * vector > most or length < (steps - 1) * step:
            continue
        if row_start(kernel, nest.parallel, walks, vector) is None:
            continue
        if best is None or shared or 10 * steps * step < 9 * best.reduce_tile:
            crowded = plain.cluster > 1 and plain.threads == ROW_THREADS and vector == 8 and nest.sweeps
            resident = ROW_RESIDENT if crowded else plain.resident
            best = replace(plain, reduce_tile=steps * step, vector=vector, shifted=True, resident=resident)
    return best


def _walks_rows(kernel: Kernel, nest: Nest) -> bool:
    """Whether all reductions and sweeps of a kernel walk one axis from its beginning to its end, and more than once."""
    if len(nest.reductions) + len(nest.sweeps) < 2 or not nest.reductions or "reduce_extent" in kernel.attrs:
        return False
    if nest.reduce_stride_one <= max(nest.stride_one, default=0):
        return False
    forms = analyse(kernel)
    for op in (*nest.reductions, *nest.sweeps):
        if any(inner.regions and inner.opcode != "if" for inner in walk(op.regions[0])) or str(op.attrs.get("kind", "")).startswith("arg"):
            return False
        low, high, step = (ZERO, _constant(forms[op.operands[-1]]), ONE) if op in nest.reductions else (_constant(forms[v]) for v in op.operands)
        if len(op.regions[0].args) != 1 or (low, high, step) != (ZERO, nest.reduce_extent, ONE):
            return False
    others = [op for op in nest.parallel.regions[0].ops if op.regions and op not in nest.reductions and op not in nest.sweeps]
    return all(op.opcode == "if" for op in others)


def _gpu_columns(nest: Nest, rank: int, vector: int, hints: Mapping[str, int]) -> Schedule:
    """The reduction crosses rows: lanes along the kept index, warps down the rows, meeting in shared memory."""
    axis = vector_index(nest)
    if axis < 0:
        axis, vector = rank - 1, 1
    if rank == 0:
        return Schedule((), 256, 1, vector_on_reduction=True, threads=256)
    tiles = [1] * rank
    tiles[axis] = 32 * vector
    warps, deep = (8, 4) if nest.narrowest >= 4 else (4, 8)
    return Schedule(tuple(tiles), warps * deep, vector, vector_index=axis, threads=32 * warps)
