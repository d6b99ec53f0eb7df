"""`tilewright.load`: ZynML modules whose compute blocks run through the compiler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilewright.api.devices import Device, find_device
from tilewright.api.execute import Runner, device_of
from tilewright.api.zyn_parallel import is_spread, run_spread
from tilewright.runtime import streams
from tilewright.tree.syntax import Function

if TYPE_CHECKING:
    from tilewright.api.module import ZynModule


class _Runners:
    """One `Runner` per compute block, so that a block run again finds its code loaded."""

    takes_futures = True

    def __init__(self) -> None:
        self.joins: dict[str, object] = {}
        """What is known of blocks that run together; see `waiting.py`."""
        self._known: dict[Function, Runner] = {}
        self._seen: dict[int, tuple[Function, Runner]] = {}
        """By identity: trees are long, and comparing them takes its time."""

    def _runner(self, function: Function) -> Runner:
        seen = self._seen.get(id(function))
        if seen is None:
            runner = self._known.get(function)
            if runner is None:
                runner = self._known[function] = Runner(function)
            seen = self._seen[id(function)] = function, runner
        return seen[1]

    def resolve(self, function: Function, arguments: Mapping[str, object], device: str) -> tuple[Runner, Device] | None:
        """What runs a block, and where; None for one that is asynchronous or for several devices."""
        if is_spread(function.attributes) or any(attribute.name == "async" for attribute in function.attributes):
            return None
        name = device_of(list(arguments.values())) or "auto" if device == "auto" else device
        return self._runner(function), find_device(name)

    def __call__(self, function: Function, arguments: Mapping[str, object], device: str) -> object:
        runner = self._runner(function)
        if is_spread(function.attributes):
            return run_spread(runner, function, arguments)
        has_futures = any(isinstance(value, streams.FUTURES) for value in arguments.values())
        if has_futures or any(attribute.name == "async" for attribute in function.attributes):
            from tilewright.api import async_blocks

            return async_blocks.run_block(runner, function, arguments, device)
        name = device
        if device == "auto":
            name = device_of(list(arguments.values())) or "auto"
        return runner.run(dict(arguments), find_device(name))


def load(path_or_source: str | os.PathLike[str]) -> ZynModule:
    """A ZynML module from a file or from its text. `module.run(x=array, device="auto")` executes it."""
    # The text front end is loaded with the first text: programs of Python kernels start faster without it.
    from tilewright.api import module

    return module.load(path_or_source, _Runners())
