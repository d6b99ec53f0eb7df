"""How an explicit kernel is launched: grid, block, shared memory, stream."""

from __future__ import annotations

from tilewright.base.record import record


@record
class LaunchConfig:
    """How a kernel is launched. `count`: threads from this number on do nothing; 0: all threads run."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    stream: object = None
    count: int = 0
    check: bool = False
    """Whether the code checks its indices."""
    asserts: bool = False
    """With checks: assertions stay as they are."""

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def rank(self) -> int:
        """Axes of the grid that code is made for: those after have one block."""
        return 3 if self.grid[2] != 1 else 2 if self.grid[1] != 1 else 1
