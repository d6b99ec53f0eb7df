"""`g.capture(…)`: a graph recorded once and replayed, with positions and lengths read from device memory.

In: a graph, and inputs whose forms stay. Out: a `CapturedStep`. On a GPU it is one CUDA graph; on the host and the emulator one list of launches. The
kernels are those of a run, so results are the same bits. Inputs are copied into arrays that stay; one capture serves all positions up to the extent of the
caches, and growing them records it again, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewright.base.errors import PerformanceWarning, UserError
from tilewright.execute import graphs
from tilewright.execute.devices import array_device, place_of
from tilewright.graphs.builder import array_dtype
from tilewright.graphs.executor import Executor
from tilewright.runtime.core import streams
from tilewright.runtime.memory.device_array import DeviceArray


class CapturedStep:
    """A recorded run. Call it with new values for inputs; outputs are arrays that every replay fills."""

    def __init__(self, executor: Executor, device: str | None, max_position: int | None, inputs: Mapping[str, Any], launches: int = 0) -> None:
        streams.refuse_in_capture("g.capture() inside a capture")
        self.executor = executor
        self.place = executor.device(inputs, device)
        self.device = self.place.id
        self.launches = launches
        if max_position is not None:
            self._set_capacity(max_position)
        executor.check_inputs(inputs)
        reads = place_of(list(inputs.values()), self.place)
        self.inputs: dict[str, Any] = {}
        """The arrays that replays read."""
        for name, value in inputs.items():
            node = executor.graph.nodes[name]
            self.inputs[name] = self._own(executor.given(node, value, reads)) if node.kind == "input" else value
        self._reads = reads
        self.captures = 0
        """How often it was recorded."""
        self.graph: graphs.Graph | None = None
        self._check_positions(inputs)
        self._record()

    def _own(self, value: Any) -> Any:
        """A copy that replays may overwrite."""
        gpu = array_device(self.place)
        if gpu is None:
            return np.array(value, order="C")
        made = gpu.empty(value.shape, value.dtype, streams.current(gpu.ordinal) or 0)
        gpu.copy(made, value if value.is_contiguous else value.copy(), streams.current(gpu.ordinal) or 0)
        return made

    # -- recording ----------------------------------------------------------------------------------------------

    def _record(self) -> None:
        executor = self.executor
        self.plan = executor.plan(executor.bind(self.inputs), True, self.launches)
        if all(segment.constant for segment in self.plan.segments):
            raise UserError.at("TW016", f"the graph '{executor.graph.name}' has nothing to capture: its outputs depend on weights alone")
        executor.prepare(self.plan, self.place, self.inputs)
        self.workspace = executor.workspace(self.plan, self.place)
        if self.graph is not None:
            self.graph.close()
        if self._is_list:
            # The emulator's graphs work on copies of arrays in place: there the list of segments is what is replayed.
            self.outputs = {name: np.array(array) for name, array in self._listed().items()}
        else:
            with graphs.capture(self.device) as self.graph:
                self.outputs = executor.execute(self.plan, self.inputs, self.place, workspace=self.workspace)
        self.captures += 1

    @property
    def _is_list(self) -> bool:
        return self.place.kind == "emulator" and any(segment.written for segment in self.plan.segments)

    def _listed(self) -> dict[str, Any]:
        return self.executor.execute(self.plan, self.inputs, self.place, workspace=self.workspace)

    def _set_capacity(self, positions: int) -> None:
        """Caches with a named extent hold so many positions; others have to hold as many."""
        if isinstance(positions, bool) or not isinstance(positions, int) or positions < 1:
            raise UserError.at("TW009", f"max_position is {positions!r}", help="give the number of positions that caches hold")
        names = self.executor.capacity_names()
        for cache, extent in self.executor.cache_lengths():
            if extent.constant is not None and extent.constant < positions:
                raise UserError.at("TW004", f"max_position is {positions}, and the cache '{cache}' holds {extent.constant}", help="give the cache a named extent, or a larger one")
        if names:
            self.executor.set_capacity(dict.fromkeys(names, positions))

    # -- running ------------------------------------------------------------------------------------------------

    def __call__(self, **inputs: Any) -> Any:
        """Replay with these inputs; those that are not named keep their values. Gives the outputs, as `g.run` does but for copies: a later replay fills
        the same arrays."""
        executor = self.executor
        unknown = [name for name in inputs if name not in self.inputs]
        if unknown:
            raise UserError.at("TW008", f"the captured graph '{executor.graph.name}' has no input '{unknown[0]}'", help=f"its inputs are {', '.join(self.inputs)}")
        if self._check_positions(inputs):
            self._record()
        for name, value in inputs.items():
            self._write(name, value)
        if self.graph is not None:
            self.graph.replay()
        else:
            for name, array in self._listed().items():
                self.outputs[name][...] = array
        return next(iter(self.outputs.values())) if len(self.outputs) == 1 else dict(self.outputs)

    replay = __call__

    def _write(self, name: str, value: Any) -> None:
        target = self.inputs[name]
        if value is target:
            return
        if tuple(getattr(value, "shape", ())) != tuple(target.shape) or (array_dtype(value) if hasattr(value, "dtype") else None) is not array_dtype(target):
            tensor = self.executor.graph.nodes[name].results[0]
            form = f"{array_dtype(value)}{list(value.shape)}" if hasattr(value, "shape") else f"a {type(value).__name__}"
            raise UserError.at("TW004", f"the input '{name}' ({tensor.form}) was captured as {array_dtype(target)}{list(target.shape)}, and is now {form}", help="capture the graph for such inputs, too")
        if isinstance(target, np.ndarray):
            target[...] = np.asarray(value)
        elif isinstance(value, np.ndarray):
            target.copy_from(np.ascontiguousarray(value))
        else:
            source = value if isinstance(value, DeviceArray) else target.device.wrap(value)
            target.device.copy(target, source if source.is_contiguous else source.copy(), streams.current(target.device.ordinal) or 0)

    def _check_positions(self, inputs: Mapping[str, Any]) -> bool:
        """Whether caches had to grow for positions that the host knows."""
        grow: dict[str, int] = {}
        for name, cache, tokens, extent in self.executor.appends(self.inputs):
            value = inputs.get(name)
            if not isinstance(value, np.ndarray) or not value.size:
                continue
            needed = int(value.max()) + tokens
            room = extent.evaluate(self.executor.capacity)
            if needed <= room:
                continue
            if extent.name is None:
                raise UserError.at("TW013", f"'{name}' is {int(value.max())}, and the cache '{cache}' holds {room} positions", help="give the cache a named extent, which grows")
            grow[extent.name] = max(grow.get(extent.name, 0), needed, 2 * room)
        if not grow:
            return False
        for name, positions in grow.items():
            warnings.warn(PerformanceWarning(f"the caches of '{self.executor.graph.name}' grow from {self.executor.capacity[name]} to {positions} positions, and the graph is captured again"), stacklevel=3)
        self.executor.set_capacity(grow)
        return True

    @property
    def nodes(self) -> int:
        """How many pieces of work a replay runs."""
        return self.graph.nodes if self.graph is not None else len(self.plan.segments)

    def close(self) -> None:
        """Give up what it holds."""
        if self.graph is not None:
            self.graph.close()

    def __repr__(self) -> str:
        return f"<captured {self.executor.graph.name} on {self.device}: {self.nodes} launches>"


