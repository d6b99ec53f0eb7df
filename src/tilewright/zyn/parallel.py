"""`@device(["cuda:0", "cuda:1"]) @parallel(data)` of ZynML: a compute block whose batch is split over devices. With `@parallel(model)` it
is its loops that are: each device has a stretch of them, with the weights that stretch reads.

In: the attributes of a block, and its arguments; out: its results, as `distributed/data_parallel.py` or `distributed/model_parallel.py` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.base.errors import Diagnostics
from tilewright.tree.metadata import read_attributes
from tilewright.tree.syntax import Function, KernelAttribute

if TYPE_CHECKING:
    from tilewright.execute.calls.run import Runner


def is_spread(attributes: Sequence[KernelAttribute]) -> bool:
    """Whether a block asks for several devices at once."""
    return bool(spread_over(attributes))


def is_mode(attribute: KernelAttribute) -> bool:
    """Whether it is `@parallel(data)` or `@parallel(model)`, by itself."""
    sink = Diagnostics()
    return bool(read_attributes((attribute,), sink).parallel) and not sink.errors


def spread_over(attributes: Sequence[KernelAttribute]) -> tuple[str, ...]:
    """The devices a block asks for at once; none if it runs on one."""
    return _spread(attributes)[1] if any(attribute.name == "parallel" for attribute in attributes) else ()


def _spread(attributes: Sequence[KernelAttribute]) -> tuple[str, tuple[str, ...]]:
    """`data` or `model`, and the devices; none where nothing is spread, or where attributes are wrong, which the checker says."""
    sink = Diagnostics()
    metadata = read_attributes([a for a in attributes if a.name in ("device", "parallel")], sink)
    names = metadata.device.names
    return metadata.parallel, names if not sink.errors and metadata.parallel and names != ("auto",) else ()


class _SpreadBlock:
    """A compute block with the face of a kernel."""

    def __init__(self, runner: Runner, function: Function, names: tuple[str, ...]) -> None:
        self.runner, self.function, self.parameter_names = runner, function, names
        self.asynchronous = any(attribute.name == "async" for attribute in function.attributes)
        self.ran: tuple[object, ...] = ()
        self.__name__ = function.name

    def bound(self, *args: object) -> dict[str, object]:
        return dict(zip(self.parameter_names, args, strict=True))


def run_spread(runner: Runner, function: Function, arguments: Mapping[str, object]) -> object:
    """Run a block on the devices it names. How it is cut is kept with its runner."""
    names = tuple(arguments)
    found: Any = runner.spreads.get(names)
    if found is None:
        found = runner.spreads[names] = _made(_SpreadBlock(runner, function, names), *_spread(function.attributes))
    return found(*arguments.values())


def _made(block: Any, mode: str, devices: tuple[str, ...]) -> object:
    if mode == "model":
        from tilewright.distributed.model_parallel import ModelParallel

        return ModelParallel(block, list(devices))
    from tilewright.distributed.data_parallel import DataParallel

    return DataParallel(block, list(devices))
