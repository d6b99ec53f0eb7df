"""`@device(["cuda:0", "cuda:1"]) @parallel(data)` of ZynML: a compute block whose batch is split over devices.

In: the attributes of a block, and its arguments; out: its results, as `api/parallel.py` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.base.errors import Diagnostics
from tilewright.tree.metadata import read_attributes
from tilewright.tree.syntax import Function, KernelAttribute

if TYPE_CHECKING:
    from tilewright.api.execute import Runner


def is_spread(attributes: Sequence[KernelAttribute]) -> bool:
    """Whether a block asks for its batch to be split."""
    return any(attribute.name == "parallel" for attribute in attributes) and bool(_devices(attributes))


def _devices(attributes: Sequence[KernelAttribute]) -> tuple[str, ...]:
    """The devices of a block that is data parallel; none where it is not, or where its attributes are wrong, which the checker says."""
    sink = Diagnostics()
    metadata = read_attributes(attributes, sink)
    names = metadata.device.names
    return names if not sink.errors and metadata.parallel == "data" and names != ("auto",) else ()


class _Block:
    """A compute block with the face of a kernel."""

    def __init__(self, runner: Runner, function: Function, names: tuple[str, ...]) -> None:
        self.runner, self.function, self.parameter_names = runner, function, names
        self.asynchronous = any(attribute.name == "async" for attribute in function.attributes)
        self.ran: tuple[object, ...] = ()
        self.__name__ = function.name

    def bound(self, *args: object) -> dict[str, object]:
        return dict(zip(self.parameter_names, args, strict=True))


def run_spread(runner: Runner, function: Function, arguments: Mapping[str, object]) -> object:
    """Run a block on the devices it names. How its batch is cut is kept with its runner."""
    from tilewright.api.parallel import DataParallel

    names = tuple(arguments)
    found = runner.spreads.get(names)
    if found is None:
        block: Any = _Block(runner, function, names)
        found = runner.spreads[names] = DataParallel(block, list(_devices(function.attributes)))
    assert isinstance(found, DataParallel)
    return found(*arguments.values())
