"""Conditions on indices that most tiles of a CPU answer alike: `if 0 < i < n - 1` holds for a whole vector, but for those at the borders.

In: a loop-stage kernel. Out: its `if`s for which a tile's branch without masks pays. Their condition is made of indices and sizes alone, and what stands
under it is loaded or stored: with masks a CPU does that element by element.
"""

from __future__ import annotations

from tilewright.ir.nodes import Kernel, Op, Value, walk

_BORING = frozenset({"const", "size", "cast"})
_INDEXING = _BORING | {"add", "sub", "mul", "and", "or", "not", "lt", "le", "gt", "ge", "min", "max"}


def border_tests(kernel: Kernel) -> set[int]:
    """The identities of such `if`s."""
    parallel = next((op for op in kernel.body.ops if op.opcode == "parallel"), None)
    if parallel is None or any(op.opcode in ("reduce", "for", "while") for op in walk(parallel.regions[0])):
        return set()
    made = {result: op for op in walk(kernel.body) for result in op.results}
    return {id(op) for op in parallel.regions[0].ops if op.opcode == "if" and _accesses(op) and _is_of_indices(op.operands[0], made)}


def _accesses(op: Op) -> bool:
    return any(inner.opcode in ("load", "store") for region in op.regions for inner in walk(region))


def _is_of_indices(value: Value, made: dict[Value, Op]) -> bool:
    op = made.get(value)
    return op is None or (op.opcode in _INDEXING and all(_is_of_indices(v, made) for v in op.operands))
