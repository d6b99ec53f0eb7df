"""`tilewright.load`: ZynML modules whose compute blocks run through the compiler."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tilewright.execute.calls.run import Runner
from tilewright.execute.devices import Device, device_of, find_device
from tilewright.runtime.core import streams
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.syntax import Function
from tilewright.zyn.host.block_runner import LaunchedBlocks, RecordableBlocks
from tilewright.zyn.parallel import is_spread, run_spread

if TYPE_CHECKING:
    from tilewright.zyn.module import ZynModule


class CompiledBlocks(RecordableBlocks):
    """One `Runner` per compute block, so that a block run again finds its code loaded."""

    takes_futures = joins_blocks = True

    def __init__(self) -> None:
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

    def launched(self) -> tuple[LaunchedBlocks, ...]:
        found: list[LaunchedBlocks] = []
        for function, runner in self._known.items():
            artifact = runner.last
            if artifact is not None:
                blocks = tuple(p.function.name for p in function.parts) if isinstance(function, BlockGraph) else (function.name,)
                found.append(LaunchedBlocks(blocks, tuple(launch.entry for launch in artifact.launches), artifact.target))
        return tuple(found)

    def resolve(self, function: Function, arguments: Mapping[str, object], device: str) -> tuple[Runner, Device] | None:
        if is_spread(function.attributes) or any(attribute.name == "async" for attribute in function.attributes):
            return None
        name = device_of(list(arguments.values())) or "auto" if device == "auto" else device
        return self._runner(function), find_device(name)

    def __call__(self, function: Function, arguments: dict[str, object], device: str) -> object:
        runner = self._runner(function)
        if is_spread(function.attributes):
            return run_spread(runner, function, arguments)
        has_futures = any(isinstance(value, streams.FUTURES) for value in arguments.values())
        if has_futures or any(attribute.name == "async" for attribute in function.attributes):
            from tilewright.zyn import async_blocks

            return async_blocks.run_block(runner, function, arguments, device)
        name = device
        if device == "auto":
            name = device_of(list(arguments.values())) or "auto"
        return runner.run(dict(arguments), find_device(name))


def load(path_or_source: str | os.PathLike[str], roots: Sequence[str | os.PathLike[str]] = ()) -> ZynModule:
    """A ZynML module from a file or from its text. `module.run(x=array, device="auto")` executes it.

    What it imports lies under the folder of the file (of a text: the current folder), or under one of `roots`.
    """
    # The text front end is loaded with the first text: programs of Python kernels start faster without it.
    from tilewright.zyn import module

    return module.load(path_or_source, CompiledBlocks(), roots)
