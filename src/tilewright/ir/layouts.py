"""Layouts: how a tile's elements are spread over the threads of a block. Each is one function.

`Blocked` is a product over the axes. Along axis `a` of extent `E` an element's coordinate is

    ((register * warps[a] + warp) * lanes[a] + lane) * vector[a] + v

with `register < E / (vector*lanes*warps)`. Lane and warp numbers are row-major over their tuples (last axis fastest).
An axis of extent 1 is held by every thread along it: reduced and broadcast values need no layout of their own.
`Shared` describes a tile in shared memory, `Accumulator` and `Operand` the fragments of tensor-core instructions.
"""

from __future__ import annotations

from math import prod

from tilewright.base.record import record


def _split(number: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major digits of `number` in mixed radix `sizes`."""
    digits: list[int] = []
    for size in reversed(sizes):
        digits.append(number % size)
        number //= size
    return tuple(reversed(digits))


@record
class Blocked:
    vector: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]

    def __str__(self) -> str:
        return f"blocked({list(self.vector)}, {list(self.lanes)}, {list(self.warps)})"

    @property
    def threads(self) -> int:
        return prod(self.lanes) * prod(self.warps)

    def span(self, axis: int) -> int:
        """Elements one register step covers along an axis."""
        return self.vector[axis] * self.lanes[axis] * self.warps[axis]

    def registers(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Register steps along each axis; 1 along axes of extent 1."""
        return tuple(1 if e == 1 else max(1, e // self.span(a)) for a, e in enumerate(shape))

    def coordinate(
        self, shape: tuple[int, ...], warp: int, lane: int, register: tuple[int, ...], v: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The tile coordinate held by that thread in that register slot."""
        lanes, warps = _split(lane, self.lanes), _split(warp, self.warps)
        return tuple(
            0
            if extent == 1
            else ((register[a] * self.warps[a] + warps[a]) * self.lanes[a] + lanes[a]) * self.vector[a] + v[a]
            for a, extent in enumerate(shape)
        )


@record
class Shared:
    """A tile in shared memory: `order` lists axes from slowest to fastest, `swizzle` bytes (0, 32, 64 or 128)."""

    order: tuple[int, ...]
    swizzle: int = 0

    def __str__(self) -> str:
        return f"shared({list(self.order)}, {self.swizzle})"


@record
class Accumulator:
    """The result fragment of a matrix instruction: `family` is 'mma' or 'wgmma', `shape` its m, n, k."""

    family: str
    shape: tuple[int, int, int]
    warps: tuple[int, int]

    def __str__(self) -> str:
        return f"accumulator({self.family}, {list(self.shape)}, {list(self.warps)})"


@record
class Operand:
    """Operand `side` ('a' or 'b') of the matrix instruction whose result has layout `parent`."""

    side: str
    parent: Accumulator

    def __str__(self) -> str:
        return f"operand({self.side}, {self.parent})"


Layout = Blocked | Shared | Accumulator | Operand
