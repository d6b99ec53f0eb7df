"""Choose how a contraction is computed on a GPU: a short list of schedules, and a cost model that ranks them by the sizes at hand.

The model counts what decides: how many rounds of tiles the multiprocessors take (a last round that is nearly empty costs as much as a
full one), the rate each tile shape reaches, and what finishing a tile costs where nothing overlaps it. Its constants were fitted to
measurements on an H200. The tuner measures the best ranked; without it the first one is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.analysis import divisors
from tilewright.analysis.contraction import Contraction, Factor, find_contraction, image, plane, restates_bounds
from tilewright.base.dtypes import f32
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.ops_matrix import MATRIX_DTYPES, accumulator_dtype
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.choose_contraction_cpu import cpu_schedules
from tilewright.passes.choose_mma import mma_schedules
from tilewright.passes.repack import packable
from tilewright.passes.schedule_matrix import MatrixSchedule, parse_schedule

SHORT_SUM = 32
"""A summed index shorter than this is not worth steps of its own."""
LARGE = 1 << 14
"""What an extent nobody knows is taken for."""


@record
class Shape:
    """The sizes of one contraction."""

    batch: int
    m: int
    n: int
    k: int


def shape_of(found: Contraction, hints: Mapping[str, int]) -> Shape:
    def number(size: Size) -> int:
        return size.evaluate(hints) if size.names <= hints.keys() else LARGE

    return Shape(number(found.size(found.batch)), number(found.size(found.m)), number(found.size(found.n)), number(found.k_size))


def matrix_schedules(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules for the contraction the kernel is, best first; none where it is not one, or where plain loops serve it."""
    found = find_contraction(kernel)
    if found is None or not all(f.guard is None or restates_bounds(found, f) for f in (found.a, found.b)):
        # A term that a condition leaves out is not the same as one with a factor of zero: the other may be infinite.
        return ()
    if not target.is_gpu:
        return cpu_schedules(kernel, found, target)
    inner = _inner(found, hints)
    if "wgmma" in target.features and _multiplies(found, str(kernel.attrs.get("precision", "ieee"))):
        # Where several indices on a side are no matrix, the innermost alone may be.
        for apart in (False, True) if len(found.m) + len(found.n) > 2 else (False,):
            lying = found.apart() if apart else found
            ways = [_way(kernel, lying, factor, inner) for factor in (lying.a, lying.b)]
            if all(ways) and ways.count("image") < 2:
                shape = shape_of(lying, hints)
                candidates = [_with_copies(s, ways) for s in _wgmma(lying, shape, target) if _in_blocks(lying, s, ways, inner)]
                candidates = [replace(s, inner=inner, apart=apart) for s in candidates if s.b_copy != "image"]
                candidates = [s for s in candidates if s.a_copy != "image" or s.cluster == 1]
                raw = raw_of(kernel, lying, lying.a, inner), raw_of(kernel, lying, lying.b, inner)
                candidates += [replace(s, inner=inner, apart=apart) for s in _from_registers(lying, shape, target, ways, raw, inner)]
                candidates.sort(key=lambda s: cost(s, shape, target, lying, raw))
                return (*candidates, *_by_warps(kernel, found, target, hints, inner))
    return _by_warps(kernel, found, target, hints, inner)


def _by_warps(
    kernel: Kernel, found: Contraction, target: Target, hints: Mapping[str, int], inner: int
) -> tuple[MatrixSchedule, ...]:
    """Schedules any GPU of the family has."""
    shape = shape_of(found, hints)
    return tuple(replace(s, inner=inner) for s in mma_schedules(kernel, found, target, shape.batch, shape.m, shape.n, shape.k))


def forced(text: str, found: tuple[MatrixSchedule, ...], kernel: Kernel) -> MatrixSchedule:
    """The schedule somebody asked for. How operands are brought is kept from the choice, for it must fit them; what cannot be is refused."""
    asked = parse_schedule(text)
    alike = [s for s in found if s.family == asked.family]
    if not alike:
        families = ", ".join(dict.fromkeys(s.family for s in found))
        raise UserError.at(
            "TW020", f"schedule '{text}': {kernel.name} cannot be computed with family={asked.family} here", kernel.span,
            f"it can with {families}",
        )  # fmt: skip
    if asked.family != "wgmma":
        return asked if asked.family == "cpu" else replace(asked, inner=alike[0].inner)
    computed = asked.a_copy == "registers"
    like = next((s for s in alike if s.swap == asked.swap and (s.a_copy == "registers") == computed), None)
    if like is None and computed:
        raise UserError.at(
            "TW020", f"schedule '{text}': the {'second' if asked.swap else 'first'} factor of {kernel.name} cannot be computed in registers",
            kernel.span, "it can where it is computed from an array whose rows run along the sum, with whole 16 bytes from one to the next",
        )  # fmt: skip
    if like is None:
        other = next(s for s in alike if s.a_copy != "registers")
        like = replace(other, a_copy=other.b_copy, b_copy=other.a_copy)
    whole = replace(asked, a_copy=like.a_copy, b_copy=like.b_copy, inner=like.inner, apart=like.apart)
    contraction = find_contraction(kernel)
    assert contraction is not None
    lying = contraction.apart() if whole.apart else contraction
    ways = [whole.b_copy, whole.a_copy] if whole.swap else [whole.a_copy, whole.b_copy]
    legal = whole.k * lying.a.dtype.itemsize == 128 and whole.m % 64 == 0 and whole.n % 8 == 0 and whole.n <= 256
    if computed and (whole.cluster > 1 or whole.stages < 2):
        legal = False  # words of the next step are computed before this one is given back
    if not legal or not _in_blocks(lying, whole, ways, whole.inner) or whole.b_copy == "image":
        raise UserError.at(
            "TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span,
            "a tile has m % 64 == 0, n % 8 == 0 up to 256, k of 128 bytes; factors that lie across the sum need whole blocks of 128 bytes",
        )  # fmt: skip
    return whole


# -- Hopper ---------------------------------------------------------------------------------------------------------


def _multiplies(found: Contraction, precision: str) -> bool:
    """Whether warp-group instructions multiply what is multiplied here."""
    dtype = found.a.dtype
    if dtype is not found.b.dtype or dtype not in MATRIX_DTYPES or accumulator_dtype(dtype) is not found.accumulator:
        return False
    return dtype is not f32 or precision == "tf32"


def _inner(found: Contraction, hints: Mapping[str, int]) -> int:
    """Of several summed indices the one to cut into steps: the longest, if it is long enough."""
    lengths = [e.evaluate(hints) if e.names <= hints.keys() else LARGE for e in found.reduce_extents]
    if len(lengths) == 1 or max(lengths) < SHORT_SUM:
        return -1
    return max(range(len(lengths)), key=lambda p: (lengths[p], p))


def _way(kernel: Kernel, found: Contraction, factor: Factor, inner: int) -> str:
    """How a factor gets to shared memory: as it lies, as pixels, or packed first."""
    if _copyable(kernel, found, factor, inner):
        return "tma"
    lies, tensor = image(found, factor), factor.tensor
    if lies is not None and tensor is not None and lies.channel == inner and _aligned(kernel, tensor):
        return "image"
    return "pack" if packable(found, factor, inner) else ""


def _in_blocks(found: Contraction, schedule: MatrixSchedule, ways: list[str], inner: int) -> bool:
    """A factor whose rows run across the sum comes in blocks of 128 bytes: the tile must have whole ones."""
    # The blocks of a cluster bring a part each of the tile's rows.
    part = schedule.m // schedule.cluster
    extents = (schedule.n, part) if schedule.swap else (part, schedule.n)
    for factor, way, extent in zip((found.a, found.b), ways, extents, strict=True):
        lies, tensor = plane(found, factor, inner), factor.tensor
        if way == "tma" and lies is not None and tensor is not None and lies.k != tensor.rank - 1 and extent * tensor.dtype.itemsize % 128:
            return False
    return True


def _with_copies(schedule: MatrixSchedule, ways: list[str]) -> MatrixSchedule:
    first, second = reversed(ways) if schedule.swap else ways
    return replace(schedule, a_copy=first, b_copy=second)


def _copyable(kernel: Kernel, found: Contraction, factor: Factor, inner: int, across: bool = False) -> bool:
    """Whether the copy engine reads a factor as it lies; `across`: whichever way that is."""
    lies, tensor = plane(found, factor, inner), factor.tensor
    if lies is None or tensor is None or tensor.rank > 5 or not _aligned(kernel, tensor):
        return False
    last = tensor.rank - 1
    if lies.k != last and (lies.row != last or (tensor.dtype.itemsize != 2 and not across)):
        return False
    # Copies begin at whole 16 bytes.
    form, step = found.access(factor)[last], 16 // tensor.dtype.itemsize
    moving = {*found.k, *found.indices}
    shifts = [form.constant, *(f for v, f in form.factors if f != ONE or v not in moving)]
    alone = sum(1 for _, f in form.factors if f == ONE) == 1
    return alone and all(divisors.of_size(x, kernel.facts) % step == 0 for x in shifts)


def _aligned(kernel: Kernel, tensor: Tensor) -> bool:
    """Whether the copy engine can read it: neighbours along the last axis, everything else 16 bytes apart."""
    if tensor.align < 16 or tensor.strides[-1] != ONE:
        return False
    size = tensor.dtype.itemsize
    return all(divisors.of_size(x, kernel.facts) * size % 16 == 0 for x in tensor.strides[:-1])


@record
class Raw:
    """What a factor that warp groups can compute in registers is computed from."""

    bytes: int
    """Of the arrays that have its size, for each element."""
    groups: bool
    """Others have an element for each group of steps."""


def raw_of(kernel: Kernel, found: Contraction, factor: Factor, inner: int) -> Raw | None:
    """What a factor is computed from, where warp groups can do it in registers: what has its size can be copied in rows along the sum (f32
    also across it), and all else is the same for a row, a column, or a step."""
    if factor.guard is not None or (factor.load is not None and _way(kernel, found, factor, inner) != "pack"):
        return None
    made = {result: op for op in walk(found.parallel.regions[0]) for result in op.results}
    rows = {found.indices[p] for p in (found.m if factor is found.a else found.n)}
    total, groups = 0, False
    waiting, seen = [factor.value], set[Value]()
    while waiting:
        value = waiting.pop()
        op = made.get(value)
        if op is None or value in seen:
            continue
        seen.add(value)
        if op.regions or op.attrs.get("masked"):
            return None
        if op.opcode != "load":
            waiting += op.operands
            continue
        as_factor = replace(factor, value=value, dtype=dtype_of(value.type), load=op)
        lying = replace(found, a=as_factor) if factor is found.a else replace(found, b=as_factor)
        lies, tensor = plane(lying, as_factor, inner), as_factor.tensor
        assert tensor is not None
        if lies is not None:
            across = tensor.rank - 1 == lies.row and factor.dtype is f32 and tensor.dtype is f32
            if not (lies.k == tensor.rank - 1 or across) or not _copyable(kernel, lying, as_factor, inner, across):
                return None
            total += tensor.dtype.itemsize
            continue
        depends = [_sources(v, made) for v in op.operands[1:]]
        if any(rows & d for d in depends) and any(set(found.k) & d for d in depends):
            walking = [v for v, d in zip(op.operands[1:], depends, strict=True) if set(found.k) & d]
            if not all(_by_groups(v, found, made, 128 // factor.dtype.itemsize) for v in walking):
                return None
            groups = True
    return Raw(total, groups) if total else None


Raws = tuple[Raw | None, Raw | None]
"""Of the first factor and of the second."""


def _sources(value: Value, made: Mapping[Value, Op]) -> set[Value]:
    """All values an index is made of."""
    found, waiting = set[Value](), [value]
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += made[value].operands if value in made else ()
    return found


def _by_groups(value: Value, found: Contraction, made: Mapping[Value, Op], step: int) -> bool:
    """Whether an index is the number of a group along the sum that is made of whole steps."""
    op = made.get(value)
    if op is None or op.opcode != "floordiv" or op.operands[0] not in found.k:
        return False
    size = found.forms[op.operands[1]]
    return not size.factors and size.constant.constant is not None and size.constant.constant % step == 0


def _from_registers(
    found: Contraction, shape: Shape, target: Target, ways: list[str], raw: Raws, inner: int
) -> list[MatrixSchedule]:
    """Schedules whose first factor is computed by the warp groups that multiply it: factors are exchanged where that is the second one."""
    candidates: list[MatrixSchedule] = []
    for swap, factor, made_of, way in ((False, found.a, raw[0], ways[1]), (True, found.b, raw[1], ways[0])):
        if made_of is None or way == "image":
            continue
        for s in _wgmma(found, shape, target):
            given = replace(s, swap=swap) if (s.m, s.n) in _SHAPES else s
            rows = given.m // given.groups
            # Taking turns leaves nobody to multiply while words are computed; parts of a sum need masks in every step.
            if given.turns or given.parts > 1 or given.swap != swap or given.cluster > 1 or rows * given.n > 128 * 128 + 64 * 128 * (given.groups == 1):
                continue
            # What is left beside the results on their way out.
            room = target.max_shared - 1280 - (given.groups * given.buffers * 64 * 128 if given.store == "tma" else 0)
            stages = min(max(given.stages, 4), room // (given.k * (given.m * made_of.bytes + given.n * factor.dtype.itemsize)))
            whole = replace(given, stages=stages, wait=0, a_copy="registers", b_copy=way)
            if stages >= FEWEST and _in_blocks(found, whole, [way, "registers"] if swap else ["registers", way], inner):
                candidates.append(whole)
    return candidates


_TILES: tuple[tuple[float, MatrixSchedule], ...] = (
    (1.000, MatrixSchedule("wgmma", 128, 256, 64, stages=4, groups=2)),
    (1.020, MatrixSchedule("wgmma", 128, 192, 64, stages=4, groups=2, turns=True, wait=1, buffers=3)),
    (0.985, MatrixSchedule("wgmma", 128, 128, 64, stages=6, groups=2, turns=True, wait=1)),
    (0.950, MatrixSchedule("wgmma", 192, 192, 64, stages=4, groups=3, buffers=1)),
    (0.950, MatrixSchedule("wgmma", 192, 192, 64, stages=4, groups=3, buffers=1, cluster=2)),
    (0.850, MatrixSchedule("wgmma", 64, 128, 64, stages=8, groups=2, turns=True, wait=1)),
    (0.800, MatrixSchedule("wgmma", 128, 64, 64, stages=8, groups=2)),
)
"""Tiles worth having, and the rate each reaches relative to the first when all multiprocessors are busy."""
_SHAPES = {(s.m, s.n) for _, s in _TILES}
_THIN = (8, 16, 32, 64)
"""Results along the short side of a product with few rows, whose time is that of reading the other factor."""

MATRIX_RATE = 5.7e6
"""Multiplications and additions of two-byte floats one multiprocessor does in a microsecond."""
FEED = 115e3
"""Bytes a microsecond that reach one multiprocessor from the L2 cache when rows are whole lines of it; ragged rows touch more lines."""
FEED_RAGGED = 46e3
STREAM = 3.9e6
"""Bytes a microsecond from memory, over all."""
STEP, STEP_OF_GROUPS = 0.30, 0.35
"""Microseconds one step of a factor computed in registers takes besides a part of what its instructions do; the second with scales of its own."""
BESIDE = 0.68
"""That part: the other warp group's instructions run meanwhile."""
FEWEST = 4
"""Stages such a factor needs: two steps hold theirs at once."""
START = 2.0
"""Microseconds before the first and after the last tile."""
SECOND = 2.5
"""Microseconds a second kernel takes that adds up few parts, besides its traffic."""


def _wgmma(found: Contraction, shape: Shape, target: Target) -> list[MatrixSchedule]:
    size = found.a.dtype.itemsize
    candidates: list[MatrixSchedule] = []
    for _, tile in _TILES:
        candidates += _in_parts(tile, shape, target)
    few = min(shape.m, shape.n)
    if few <= 64:
        # Nearly all of the time goes into reading the long side: many blocks, and deep rings.
        width = next((w for w in _THIN if w >= few), 64)
        for rows in (64, 128):
            thin = MatrixSchedule("wgmma", rows, width, 64, groups=rows // 64, swap=shape.m <= shape.n, store="direct")
            candidates += _in_parts(_deep(thin), shape, target)
        for long in (16, 32, 64, 128):
            candidates.append(_deep(MatrixSchedule("wgmma", 64, long, 64, swap=shape.m > shape.n, store="direct")))
    # A row of 128 bytes is one step, whatever the element. Only a plain sum can be cut.
    return [replace(s, k=128 // size) for s in candidates if s.parts == 1 or len(found.k) == 1]


def _deep(schedule: MatrixSchedule) -> MatrixSchedule:
    """With as many stages as shared memory holds."""
    return replace(schedule, stages=min(16, (208 << 10) // ((schedule.m + schedule.n) * 128)))


def _in_parts(schedule: MatrixSchedule, shape: Shape, target: Target) -> list[MatrixSchedule]:
    """The schedule, and the same with the sum cut so that more multiprocessors take part."""
    tiles = max(1, _tiles(schedule, shape))
    found = [schedule]
    if tiles < target.multiprocessors and schedule.cluster == 1:
        most = min(32, target.multiprocessors // tiles, shape.k // 512)
        found += [replace(schedule, parts=parts) for parts in {most, most // 2, 2} if parts > 1]
    return found


def _tiles(schedule: MatrixSchedule, shape: Shape) -> int:
    m, n = (shape.n, shape.m) if schedule.swap else (shape.m, shape.n)
    return shape.batch * -(-m // schedule.m) * -(-n // (schedule.n * schedule.cluster)) * schedule.cluster


def cost(
    schedule: MatrixSchedule, shape: Shape, target: Target, found: Contraction, raw: Raws = (None, None)
) -> float:
    """Estimated microseconds. `raw`: what the factors are computed from."""
    size = found.a.dtype.itemsize
    rate = next(
        (r for r, s in _TILES if (s.m, s.n, s.turns, s.cluster) == (schedule.m, schedule.n, schedule.turns, schedule.cluster)), 0.8
    )
    k = -(-shape.k // schedule.parts)
    rounds = -(-_tiles(schedule, shape) * schedule.parts // target.multiprocessors)
    area = schedule.m * schedule.n
    ragged = _is_ragged(found, shape)
    # Blocks of a cluster share a's rows.
    rows = schedule.m / schedule.cluster + schedule.n
    feed = rows * k * size / (FEED_RAGGED if ragged else FEED)
    # The rate goes with the bytes of an element: 32 bytes of the sum in one instruction.
    compute = 2 * area * k * size / 2 / (MATRIX_RATE * rate)
    finish = 2 * 64 * area / MATRIX_RATE
    sizes = [size, size]
    if schedule.a_copy == "registers":
        made_of = raw[int(schedule.swap)] or Raw(size, False)
        steps = -(-k // schedule.k)
        compute = max(compute, BESIDE * compute + steps * (STEP_OF_GROUPS if made_of.groups else STEP))
        sizes[int(schedule.swap)] = made_of.bytes
    main = rounds * max(compute, feed) + finish * (1 if schedule.turns else rounds)
    traffic = shape.batch * shape.k * (shape.m * sizes[0] + shape.n * sizes[1]) / STREAM
    # Reading hides computing only so far.
    total = START + max(main, traffic) + 0.1 * min(main, traffic)
    packed = (schedule.b_copy, schedule.a_copy) if schedule.swap else (schedule.a_copy, schedule.b_copy)
    for way, across in zip(packed, (shape.m, shape.n), strict=True):
        if way == "pack":
            total += SECOND + 3 * shape.batch * across * shape.k * size / STREAM
    if schedule.parts > 1:
        total += SECOND + 2 * 4 * schedule.parts * shape.batch * shape.m * shape.n / (1.5 * STREAM)
    return total


def _is_ragged(found: Contraction, shape: Shape) -> bool:
    """Whether rows of operands begin in the middle of the L2 cache's lines."""
    lengths = []
    for factor, across in ((found.a, shape.m), (found.b, shape.n)):
        lies, tensor = plane(found, factor), factor.tensor
        if lies is not None and tensor is not None:
            lengths.append((shape.k if lies.k == tensor.rank - 1 else across) * tensor.dtype.itemsize)
    return any(length % 128 for length in lengths)
