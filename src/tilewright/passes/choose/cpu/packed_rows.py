"""Choose how products of packed weights are cut on a CPU.

In: a loop-stage kernel whose sums walk rows of packed weights. Out: a `PackedRows`, or None where the nest is not one of rows times rows: sums beside others,
under conditions, or with indices that are checked as the kernel runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.affine import analyse
from tilewright.base.dtypes import by_name
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Op, Value, is_watched, walk
from tilewright.passes.common.dot_units import dot_unit
from tilewright.passes.packed.find_sums import packed_sums
from tilewright.passes.schedules.packed_rows import PackedRows


def packed_rows(kernel: Kernel, target: Target) -> PackedRows | None:
    """The schedule of a kernel with packed sums, where it can have one."""
    arm = target.triple.startswith("aarch64")
    if target.simt or not (arm or dot_unit(target)) or is_watched(kernel):
        return None
    parallel = next((op for op in kernel.body.ops if op.opcode == "parallel"), None)
    if parallel is None or not ("activations" in kernel.attrs or kernel.attrs.get("blocks")) or any(op.opcode in ("for", "while") and op.attrs.get("independent") for op in parallel.regions[0].ops):
        return None
    region = parallel.regions[0]
    sums = packed_sums(region, analyse(kernel))
    reductions = [op for op in walk(region) if op.opcode == "reduce"]
    inside = {id(op) for found in sums for op in walk(found.op.regions[0])}
    if not sums or any(id(op) not in inside and not any(op is found.op for found in sums) for op in reductions):
        return None
    if any(by_name(s.format).block < 32 or (s.scale is None and not arm) for s in sums):
        return None  # of floats, x86 has wider vecs
    made = {result: op for op in walk(kernel.body) for result in op.results}
    rows = [_indices(found.rows, made, region.args) for found in sums]
    columns = [_indices(found.columns, made, region.args) for found in sums]
    any_row, any_column = ({index for one in found for index in one} for found in (rows, columns))
    both = {index for index in any_row if all(index in one for one in rows)} - any_column
    if len(both) != 1:
        return None
    n_index = both.pop()
    walked = any_column - any_row
    m_index = max(walked) if walked else -1
    few = any(s.scale is None or s.format in ("q4_k", "q5_k") for s in sums) or not (arm or target.vector_bytes == 64)  # of 16 registers
    return PackedRows((1,) * len(region.args), n_index=n_index, m_index=m_index, n=4, m=1 if m_index < 0 else 2 if few else 4)


def _indices(values: tuple[Value, ...], made: Mapping[Value, Op], args: tuple[Value, ...]) -> set[int]:
    """Which parallel indices these depend on."""
    found: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if value in args:
            found.add(args.index(value))
        elif value in made:
            waiting += made[value].operands
    return found
