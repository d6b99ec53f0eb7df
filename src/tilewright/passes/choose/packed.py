"""Choose how products of packed weights with several rows are computed on a GPU: unpacked on their way to matrix instructions, or first.

In: a loop-stage kernel, the target and the sizes of the call. Out: schedules of family `mma` with `b_copy=packed`, best first. Every tile of rows unpacks
the weights again, so these come first only where there are few rows (`packed_rows` of the cost model); beyond, weights are unpacked once, to scratch
(`passes/packed/unpack_weights.py`), and multiplied by whatever is fastest then.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.contraction import find_contraction
from tilewright.base.dtypes import bf16, f16, f32
from tilewright.base.sizes import ONE
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.passes.choose.mma import by_matrix, shared_bytes
from tilewright.passes.packed.unpack_weights import PackedFactor, fits_step, packed_factors
from tilewright.passes.schedules.matrix import Mma

STEPS = (64, 128, 32)
"""Elements of a step, the best first."""
TILES = ((16, 64, 1, 4), (16, 128, 1, 4), (32, 64, 2, 2), (32, 128, 2, 4), (64, 64, 2, 2), (64, 128, 2, 4), (128, 64, 4, 2), (128, 128, 2, 4))
"""Rows of x and of the weights that a block has, and its warps along both."""
REGISTERS = 80
"""Of a thread that unpacks weights, beside its sums."""
MOST_PARTS, FEWEST_STEPS = 16, 8
"""Parts a sum is cut into, and steps of each."""


def packed_schedules(kernel: Kernel, target: Target, m: int, n: int, k: int) -> tuple[Mma, ...]:
    """Schedules, best first; none where weights cannot be brought so."""
    factors = packed_factors(kernel)
    step = next((s for s in STEPS if can_bring_packed(kernel, s)), 0)
    if not step or not target.has("mma") or not by_matrix(factors[0].other, f32, "ieee", target):
        return ()
    listed: list[Mma] = []
    for rows, columns, down, across in TILES:
        tile = Mma(rows, columns, step, stages=2, warps_m=down, warps_n=across, persistent=False, b_copy="packed")
        if shared_bytes(tile, factors[0].other, f32) <= target.max_shared:
            listed.append(_in_parts(tile, target, m, n, k, factors[0]))
    return tuple(sorted(listed, key=lambda s: (-(-m // s.m), s.m, s.n)))


def pays(kernel: Kernel, target: Target, m: int) -> bool:
    """Whether weights are better unpacked on their way than first: for few rows, in steps that threads unpack without spilling."""
    return m <= target.costs.warps.packed_rows and can_bring_packed(kernel, STEPS[0])


def resident(schedule: Mma) -> int:
    """Blocks of a multiprocessor its registers are shared between: unpacking takes more instructions than all else, so threads are worth more than registers."""
    sums = schedule.m * schedule.n // schedule.threads
    return max(1, min(4, 65536 // (schedule.threads * (REGISTERS + sums))))


def _in_parts(tile: Mma, target: Target, m: int, n: int, k: int, factor: PackedFactor) -> Mma:
    """The schedule with its sum cut so that all multiprocessors take part."""
    fitting = target.shared_per_sm // (shared_bytes(tile, factor.other, f32) + 1024)
    slots = target.multiprocessors * max(1, min(resident(tile), fitting))
    tiles = -(-m // tile.m) * -(-n // tile.n)
    parts = min(MOST_PARTS, slots // max(1, tiles), k // (FEWEST_STEPS * tile.k))
    return replace(tile, split_k=max(1, parts))


def can_bring_packed(kernel: Kernel, step: int) -> bool:
    """Whether packed weights can be unpacked on their way to shared memory, in steps of so many elements: they are the second factor, their rows are
    those of the results' columns, in order, and have whole steps."""
    found, factors = find_contraction(kernel), packed_factors(kernel)
    if found is None or len(factors) != 1 or len(found.n) != 1 or len(found.k) != 1 or factors[0].other not in (f16, bf16):
        return False
    factor, row = factors[0], found.indices[found.n[0]]
    lead = [found.forms[v] for v in factor.lead]
    walking = [form for form in lead if row in form.values]
    straight = len(walking) == 1 and walking[0].factor(row) == ONE and all(v in found.indices for form in lead for v in form.values)
    same = found.b.value in factor.element.results and found.forms[factor.index].is_just(found.k[0])
    return straight and same and fits_step(factor.format, step) and found.k_size.divisible_by(step, kernel.facts)
