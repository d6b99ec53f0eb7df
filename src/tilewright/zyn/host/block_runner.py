"""Who runs the compute blocks of a program: all that a run asks of them.

`BlockRunner` runs one block. `RecordableBlocks` also says what runs it, so that a run can be recorded; `AbstractBlocks` computes
nothing and gives stand-ins. A plain function is a `PlainBlocks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from tilewright.base.record import record
from tilewright.tree.block_graph import AffineIndex
from tilewright.tree.syntax import Function
from tilewright.zyn.known_extents import Extents
from tilewright.zyn.lazy.lazy_array import viewed

if TYPE_CHECKING:
    from tilewright.execute.calls.run import Runner
    from tilewright.execute.devices import Device
    from tilewright.zyn.lazy.lazy_blocks import BlockFuser, LazyBlocks

RunBlock = Callable[[Function, dict[str, object], str], object]
"""`run(function, arguments, device)`: run one compute block on a device and return its result."""


@record
class LaunchedBlocks:
    """Blocks that ran as one program, and the kernels they became."""

    blocks: tuple[str, ...]
    kernels: tuple[str, ...]
    target: str

    def __str__(self) -> str:
        count = f"{len(self.kernels)} kernel{'' if len(self.kernels) == 1 else 's'}"
        return f"{' + '.join(self.blocks)}: {count} on {self.target} ({', '.join(self.kernels)})"


class BlockRunner(ABC):
    """Runs compute blocks, one by one or those of a pipeline or program together."""

    takes_futures = False
    """Whether it takes blocks that are `@async` or have futures among their arguments; else these are waited for first."""
    joins_blocks = False
    """Whether blocks of a pipeline or program wait for each other, to run as one program."""

    @abstractmethod
    def __call__(self, function: Function, arguments: dict[str, object], device: str) -> object:
        """Run one compute block on a device and return its result."""

    @cached_property
    def fuser(self) -> BlockFuser:
        """What is known of blocks that ran together before."""
        from tilewright.zyn.lazy.lazy_blocks import BlockFuser

        return BlockFuser()

    def waiting(self, pipeline: str) -> LazyBlocks | None:
        """For a call of a pipeline, or a run of a program: where its blocks wait; None where each runs when its turn comes."""
        return self.fuser.waiting(pipeline, self, self.view) if self.joins_blocks else None

    def launched(self) -> tuple[LaunchedBlocks, ...]:
        """What ran so far; nothing where nobody keeps it."""
        return ()

    def view(self, array: object, shape: tuple[int, ...], places: tuple[AffineIndex, ...]) -> object:
        """A view of an array that blocks made together. Who notes what is done has to know of it."""
        return viewed(array, shape, places)


class PlainBlocks(BlockRunner):
    """A function that runs blocks."""

    def __init__(self, run: RunBlock) -> None:
        self._run = run

    def __call__(self, function: Function, arguments: dict[str, object], device: str) -> object:
        return self._run(function, arguments, device)


class RecordableBlocks(BlockRunner):
    """Runs blocks by compiled code, and says by which."""

    @abstractmethod
    def resolve(self, function: Function, arguments: Mapping[str, object], device: str) -> tuple[Runner, Device] | None:
        """What runs a block, and where; None for one that is asynchronous or for several devices."""


class AbstractBlocks(BlockRunner):
    """Computes nothing: values only stand for others of their type."""

    @abstractmethod
    def stand_in(self, name: str, function: Function) -> object:
        """In place of an argument of which nobody knows anything."""

    @abstractmethod
    def looked_at(self, name: str, given: Mapping[str, object]) -> object:
        """What a function of the host language gives: a value of the right rank and type, or one nobody knows."""

    @abstractmethod
    def extents(self, value: object) -> Extents:
        """What is known of the extents of an array."""
