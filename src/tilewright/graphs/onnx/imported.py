"""`tw.graph.from_onnx`: an ONNX model that runs on any device.

In: a file. Out: an `OnnxGraph`. For each set of sizes of its inputs (and of the numbers that shapes depend on) the model becomes a `TensorGraph`, which
is kept; what depends on shapes alone is computed then, on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.errors import UserError, public_methods
from tilewright.execute.devices import default_device, find_device
from tilewright.graphs.builder import array_dtype
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.onnx.opened import ModelInput, open_model
from tilewright.graphs.onnx.operator_rules import OPERATORS, NeedsValues
from tilewright.graphs.onnx.quick import QuickRun
from tilewright.graphs.onnx.sink import GraphSink
from tilewright.graphs.onnx.translate import MOST_SMALL, Translation
from tilewright.graphs.onnx.values import Known
from tilewright.graphs.registry import changes
from tilewright.runtime.core import observe as runtime_observe
from tilewright.runtime.core.streams import FAST_PATH_OFF
from tilewright.runtime.memory.device_array import DeviceArray

_MOST_GRAPHS = 64
"""Graphs of one model that are kept, for different sizes."""


class _Built:
    """The graph for one set of sizes, and the outputs that are known without running it."""

    def __init__(self, graph: TensorGraph, constants: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]], inputs: tuple[str, ...]) -> None:
        self.graph, self.constants, self.shapes, self.inputs = graph, constants, shapes, inputs
        self._quick: tuple[tuple[int, int, str, bool], QuickRun] | None = None

    def run(self, arrays: Mapping[str, Any], device: str | None, fuse: bool) -> Mapping[str, Any]:
        """The outputs of the graph by name. Runs of NumPy arrays on a CPU go the short way from the second one on."""
        if not self.graph.outputs:
            return {}
        plain = fuse and not FAST_PATH_OFF.value and runtime_observe.observer is None and all(isinstance(a, np.ndarray) for a in arrays.values())
        key = (self.graph.version, changes(), device or default_device(), fuse)
        quick = self._quick
        if plain and quick is not None and quick[0] == key and quick[1].ready:
            found = quick[1](arrays)
            if found is not NotImplemented:
                return found  # type: ignore[no-any-return]
        made = self.graph.run(device=device, fuse=fuse, **arrays)
        place = find_device(key[2])
        if plain and place.kind == "cpu" and (quick is None or quick[0] != key):
            executor = self.graph.executor
            self._quick = key, QuickRun(executor, executor.plan(executor.bind(dict(arrays)), fuse), place)
        return made if len(self.graph.outputs) > 1 else {next(iter(self.graph.outputs)): made}


@public_methods("__init__")
class OnnxGraph:
    """A model of an ONNX file. `run` takes its inputs by name and gives its outputs."""

    def __init__(self, source: str | Path | bytes, max_bytes: int = 1 << 34) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise UserError.at("TW009", f"max_bytes is {max_bytes!r}", help="give the number of bytes that one tensor may take")
        self._opened = open_model(source)
        self._inputs = {value.name: value for value in self._opened.inputs}
        self.name = self._opened.name
        self.max_bytes = max_bytes
        """The largest tensor that a node may make."""
        self._valued: set[str] = set()
        """Inputs whose numbers decide about shapes."""
        self._graphs: dict[tuple[object, ...], _Built] = {}

    @property
    def inputs(self) -> dict[str, ModelInput]:
        """The inputs by name: dtypes, and extents that are numbers, names of sizes, or None."""
        return dict(self._inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return self._opened.outputs

    @property
    def opset(self) -> int:
        """The version of ONNX's operators that the model is written for."""
        return self._opened.model.opsets.get("", 0)

    def run(self, inputs: Mapping[str, Any] | None = None, /, *, device: str | None = None, fuse: bool = True, **named: Any) -> Any:
        """The outputs for these inputs: one array, or a dictionary by their names. Inputs are keywords, or a mapping for names that are none."""
        given = self._given({**(inputs or {}), **named})
        built = self._built(given)
        arrays = {name: _with_axes(given[name]) for name in built.inputs}
        made = built.run(arrays, device, fuse)
        results: dict[str, Any] = {}
        for name in self.outputs:
            if name in built.constants:
                results[name] = built.constants[name].copy()
            else:
                shape = built.shapes[name]
                results[name] = made[name] if shape else made[name].reshape(())
        return next(iter(results.values())) if len(results) == 1 else results

    def graph(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> TensorGraph:
        """The tensor graph for these inputs (arrays): its nodes can be looked at, replaced, planned and profiled."""
        return self._built(self._given({**(inputs or {}), **named})).graph

    def constants(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, np.ndarray]:
        """The outputs that such inputs decide by their shapes alone."""
        return dict(self._built(self._given({**(inputs or {}), **named})).constants)

    # -- inputs -----------------------------------------------------------------------------------------------------

    def _given(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs, checked against what the model says of them."""
        known = self._inputs
        if inputs.keys() != known.keys():
            forms = ", ".join(v.form for v in known.values()) or "none"
            for name in inputs:
                if name not in known:
                    raise UserError.at("TW008", f"the model '{self.name}' has no input '{name}'", help=f"its inputs are {forms}")
            missing = [name for name in known if name not in inputs]
            raise UserError.at("TW008", f"the model '{self.name}' is missing the input '{missing[0]}'", help=f"its inputs are {forms}")
        sizes: dict[str, tuple[int, str]] = {}
        found: dict[str, Any] = {}
        for name, value in known.items():
            array = inputs[name]
            if isinstance(array, bool | int | float | list | tuple | np.generic):
                try:
                    array = np.asarray(array, value.dtype)
                except (ValueError, TypeError, OverflowError) as error:
                    raise UserError.at("TW009", f"input {value.form} was given as {array!r}: {error}") from None
            dtype = array_dtype(array) if hasattr(array, "shape") else None
            if dtype is None or dtype is not dtypes.from_numpy(value.dtype):
                raise UserError.at("TW006" if dtype is not None else "TW009", f"input {value.form} was given as {dtype or type(array).__name__}", help="convert it first")
            shape = tuple(map(int, array.shape))
            if value.dims is not None and len(value.dims) != len(shape):
                raise UserError.at("TW003", f"input {value.form} was given with the shape {list(shape)}")
            for axis, extent in enumerate(value.dims or ()):
                if isinstance(extent, int) and extent != shape[axis]:
                    raise UserError.at("TW004", f"input {value.form} was given with the shape {list(shape)}")
                if isinstance(extent, str):
                    other, where = sizes.setdefault(extent, (shape[axis], f"axis {axis} of '{name}'"))
                    if other != shape[axis]:
                        raise UserError.at("TW004", f"the size '{extent}' is {other} ({where}) and {shape[axis]} (axis {axis} of '{name}')")
            found[name] = array
        return found

    # -- graphs -----------------------------------------------------------------------------------------------------

    def _built(self, given: Mapping[str, Any]) -> _Built:
        while True:
            numbers = {name: _on_host(given[name]) for name in sorted(self._valued)}
            key = (
                tuple(tuple(map(int, array.shape)) for array in given.values()),
                tuple((name, array.shape, array.tobytes()) for name, array in numbers.items()),
            )
            found = self._graphs.get(key)
            if found is not None:
                return found
            try:
                found = self._translated(given, numbers)
            except NeedsValues as needed:
                self._valued |= needed.names
                continue
            if len(self._graphs) >= _MOST_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = found
            return found

    def _translated(self, given: Mapping[str, Any], numbers: Mapping[str, np.ndarray]) -> _Built:
        graph = TensorGraph(self.name)
        sink = GraphSink(graph)
        values: dict[str, Known] = {}
        for name, wanted in self.inputs.items():
            shape = tuple(map(int, given[name].shape))
            if name in numbers:
                values[name] = Known(shape, wanted.dtype, numbers[name])
                continue
            small = int(np.prod(shape)) <= MOST_SMALL
            values[name] = Known(shape, wanted.dtype, None, graph.input(name, shape or (1,), dtypes.from_numpy(wanted.dtype)), frozenset([name]) if small else None)
        inputs = tuple(node.name for node in graph.input_nodes)
        model = self._opened
        made = Translation(model.model, model.files, sink, self.max_bytes, model.constants, model.packed).run(values)
        constants: dict[str, np.ndarray] = {}
        for name, value in made.items():
            if value.host is not None:
                constants[name] = value.host
            else:
                graph.output(name, value.handle)
        return _Built(graph, constants, {name: value.shape for name, value in made.items()}, inputs)

    def __repr__(self) -> str:
        return f"<ONNX model {self.name}: {', '.join(v.form for v in self._opened.inputs)} -> {', '.join(self.outputs)}>"


def _with_axes(array: Any) -> Any:
    """A number as an array of one element."""
    return array if len(array.shape) else array.reshape((1,))


def _on_host(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, DeviceArray):
        return array.numpy()
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def onnx_operators() -> dict[str, str]:
    """The ONNX operators that are known: names (with their domain, where it is not ONNX's own), and notes."""
    found = {(f"{rule.domain}." if rule.domain else "") + rule.name: rule.note for rule in OPERATORS.values()}
    return dict(sorted(found.items()))
