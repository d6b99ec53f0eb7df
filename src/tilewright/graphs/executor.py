"""Running a tensor graph: arrays in, plans by sizes, arrays out.

In: a graph and the inputs of a run. Out: its outputs. Weights go to a device once and stay there; nodes that depend on weights alone are computed once;
caches live as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, u8
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.sizes import Size, size_text
from tilewright.execute.arrays import as_shape
from tilewright.execute.calls.outputs import keep
from tilewright.execute.devices import Device, array_device, default_device, device_of, find_device, place_of
from tilewright.execute.kernel import Kernel
from tilewright.graphs.builder import GraphBuilder, array_dtype, bind_inputs
from tilewright.graphs.lower import Lowering, PlannedValue, Ref
from tilewright.graphs.order import ordered
from tilewright.graphs.plan import GraphPlan, GraphSegment
from tilewright.graphs.registry import changes
from tilewright.graphs.tensor import GraphNode, Tensor
from tilewright.graphs.workspace import ALIGNMENT
from tilewright.runtime.core import streams
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.packed_array import PackedArray

Arrays = dict[str, Any]


class Executor:
    """Plans and runs one graph."""

    def __init__(self, graph: GraphBuilder) -> None:
        self.graph = graph
        self.plans: dict[tuple[object, ...], GraphPlan] = {}
        self.version: tuple[int, int] = (-1, -1)
        self.weights: dict[tuple[object, ...], Any] = {}
        """Weights and constants on devices."""
        self.folded: dict[tuple[object, ...], Any] = {}
        """Values of nodes that depend on weights alone, on devices."""
        self.states: dict[tuple[str, str], Any] = {}
        self.capacity: dict[str, int] = {}
        """Values of the named extents of caches."""
        self.order: tuple[GraphNode, ...] = ()

    # -- planning -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Forget plans of the graph as it was."""
        now = self.graph.version, changes()
        if self.version != now:
            self.plans.clear()
            self.folded.clear()
            self.order = ordered(self.graph)
            self.version = now

    def device(self, inputs: Mapping[str, Any], name: str | None) -> Device:
        return find_device(name or device_of(list(inputs.values())) or default_device())

    def plan(self, sizes: Mapping[str, int], fuse: bool, launches: int = 0) -> GraphPlan:
        """The plan for these sizes."""
        self._settle()
        key = tuple(sorted(sizes.items())), fuse, launches
        found = self.plans.get(key)
        if found is None:
            lowering = Lowering(self.graph, self.order, sizes)
            lowering.run()
            outputs = {name: lowering.ref(tensor) for name, tensor in self.graph.outputs.items()}
            dropped = [n for n, node in self.graph.nodes.items() if node.kind == "op" and node not in self.order]
            found = GraphPlan(self.graph.name, lowering.calls, outputs, fuse, dropped, launches)
            keep(self.plans, key, found)
        return found

    def plan_for(self, inputs: Mapping[str, Any], device: str | None, fuse: bool) -> GraphPlan:
        """The plan for inputs that are arrays or shapes."""
        self._settle()
        given = {n: v if hasattr(v, "shape") else _Shaped(as_shape(v)) for n, v in inputs.items()}
        self._check_names(given)
        shapes = {n: tuple(map(int, v.shape)) for n, v in given.items()}
        return self.plan(self._with_capacity(bind_inputs(self.graph, shapes, {n: getattr(v, "dtype", None) and array_dtype(v) for n, v in given.items()})), fuse)

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """All inputs are there, and no others."""
        self._settle()
        self._check_names(inputs)

    def bind(self, arrays: Arrays) -> dict[str, int]:
        """The value of each named size, from arrays."""
        nodes = self.graph.input_nodes
        found = bind_inputs(self.graph, {n.name: tuple(arrays[n.name].shape) for n in nodes}, {n.name: array_dtype(arrays[n.name]) for n in nodes})
        return self._with_capacity(found, arrays)

    # -- how much caches hold -----------------------------------------------------------------------------------

    def _caches(self) -> list[GraphNode]:
        return [node for node in self.graph.nodes.values() if node.kind == "cache"]

    def capacity_names(self) -> list[str]:
        """Names of extents that only caches have."""
        inputs = {name for node in self.graph.input_nodes for size in node.results[0].sizes for name in size.names}
        return sorted({name for node in self._caches() for size in node.results[0].sizes for name in size.names} - inputs)

    def cache_lengths(self) -> list[tuple[str, Size]]:
        """The extent of positions of each cache."""
        return [(node.name, node.results[0].sizes[-3]) for node in self._caches() if node.results[0].ndim >= 3]

    def set_capacity(self, sizes: Mapping[str, int]) -> None:
        known = self.capacity_names()
        for name, value in sizes.items():
            if name not in known:
                raise UserError.at("TW008", f"no cache of '{self.graph.name}' has an extent '{name}'", help=f"named extents: {', '.join(known) or 'none'}")
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError.at("TW009", f"the extent '{name}' is {value!r}", help="give a whole number above 0")
        self.capacity.update(sizes)
        for (name, where), old in list(self.states.items()):
            shape = self._cache_shape(self.graph.nodes[name])
            if tuple(old.shape) == shape:
                continue
            new = new_zeros(shape, self.graph.nodes[name].results[0].dtype, find_device(where), name)
            part = tuple(slice(0, min(a, b)) for a, b in zip(old.shape[:-1], shape[:-1], strict=True))
            part = part if isinstance(old, PackedArray) else (*part, slice(0, min(old.shape[-1], shape[-1])))
            _plain(new)[part] = _plain(old)[part]
            self.states[name, where] = new

    def _with_capacity(self, sizes: dict[str, int], arrays: Arrays | None = None) -> dict[str, int]:
        for node in self._caches():
            for axis, size in enumerate(node.results[0].sizes):
                if size.constant is not None or size.names <= sizes.keys():
                    continue
                if arrays is not None and node.name in arrays and size.name is not None:
                    sizes[size.name] = int(arrays[node.name].shape[axis])
                elif size.name in self.capacity:
                    sizes[str(size.name)] = self.capacity[str(size.name)]
                else:
                    raise UserError.at("TW014", f"the extent {size_text(size)} of the cache '{node.name}' has no value", help=f"give it with g.capacity({size_text(size)}=…)")
        return sizes

    def _cache_shape(self, node: GraphNode) -> tuple[int, ...]:
        sizes = self._with_capacity({})
        return tuple(size.evaluate(sizes) for size in node.results[0].sizes)

    def appends(self, inputs: Arrays) -> list[tuple[str, str, int, Size]]:
        """Of nodes that append to a cache at positions that are an input: that input, the cache, how many tokens, and the extent of positions."""
        found: list[tuple[str, str, int, Size]] = []
        sizes = self.bind(inputs)
        for node in self.order:
            positions, cache, rows = (node.inputs.get(name) for name in ("positions", "cache", "rows"))
            if node.op != "KVAppend" or not (isinstance(positions, Tensor) and isinstance(cache, Tensor) and isinstance(rows, Tensor)) or "table" in node.inputs:
                continue
            if positions.node.kind == "input" and positions.base is None:
                found.append((positions.name, cache.name, rows.sizes[-3].evaluate(sizes), cache.sizes[-3]))
        return found

    def prepare(self, plan: GraphPlan, place: Device, arrays: Arrays) -> None:
        """Weights, caches and constants are where they are needed."""
        self.fold(plan, place)
        for segment in plan.segments:
            for value in segment.arguments.values():
                if isinstance(value, Ref) and not isinstance(value.root, PlannedValue):
                    self.array(value, {}, arrays, plan, place)

    def _check_names(self, inputs: Mapping[str, Any]) -> None:
        known = {node.name: node for node in self.graph.nodes.values() if node.kind in ("input", "cache")}
        needed = {node.name for node in self.order}
        for name in inputs:
            if name not in known:
                raise UserError.at("TW008", f"the graph '{self.graph.name}' has no input '{name}'", help=f"its inputs are {', '.join(n for n, k in known.items() if k.kind == 'input') or 'none'}")
        missing = [node.name for node in self.graph.input_nodes if node.name not in inputs]
        if missing:
            users = [n.name for n in self.graph.nodes.values() if any(getattr(v, "node", None) is self.graph.nodes[missing[0]] for v in n.inputs.values())]
            used = f", which node '{users[0]}' reads" if users and users[0] in needed else ""
            raise UserError.at("TW008", f"the graph '{self.graph.name}' is missing the input '{missing[0]}'{used}", help=f"give {', '.join(missing)}")

    # -- running ------------------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, Any], device: str | None = None, fuse: bool = True, watch: Callable[..., Any] | None = None) -> Any:
        self._settle()
        self._check_names(inputs)
        place = self.device(inputs, device)
        reads = place_of(list(inputs.values()), place)
        arrays: Arrays = {}
        for node in self.graph.nodes.values():
            if node.name in inputs:
                arrays[node.name] = self.given(node, inputs[node.name], reads)
        plan = self.plan(self.bind(arrays), fuse)
        results = self.execute(plan, arrays, place, watch)
        given = {name: reads.give(array) if not isinstance(array, np.generic) else array for name, array in results.items()}
        return next(iter(given.values())) if len(given) == 1 else given

    def given(self, node: GraphNode, value: Any, reads: Any) -> Any:
        """An input as an array of the device."""
        tensor = node.results[0]
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise UserError.at("TW009", f"the input '{node.name}' is the number {value}, and the graph wants {tensor.form}", help=f"give an array of shape ({', '.join(map(str, tensor.shape))})")
        dtype = array_dtype(value) if hasattr(value, "dtype") else None
        if dtype is not None and dtype is not tensor.dtype:
            raise UserError.at("TW006", f"the input '{node.name}' is {tensor.form}, and was given as {dtype}", help="convert it first")
        return value if node.kind == "cache" and isinstance(value, DeviceArray | np.ndarray | PackedArray) else reads.read(node.name, value)

    def execute(self, plan: GraphPlan, arrays: Arrays, place: Device, watch: Callable[..., Any] | None = None, workspace: Any = None) -> Arrays:
        """Run all segments, and give the outputs."""
        made: dict[int, Any] = {}
        self.fold(plan, place)
        workspace = self.workspace(plan, place) if workspace is None else workspace
        for segment in plan.segments:
            if self.is_folded(plan, segment, place):
                continue
            values = {name: self.array(v, made, arrays, plan, place) if isinstance(v, Ref) else v for name, v in segment.arguments.items()}
            if watch is None:
                result = self.run_segment(segment, values, place, self.room(plan, segment, workspace))
            else:
                result = watch(segment, lambda: self.run_segment(segment, values, place, self.room(plan, segment, workspace)))  # noqa: B023
            for value, array in zip(segment.results, result, strict=True):
                made[value.number] = array
            for value in segment.free:
                made.pop(value.number, None)
        return {name: self.array(ref, made, arrays, plan, place) for name, ref in plan.outputs.items()}

    def run_segment(self, segment: GraphSegment, values: Mapping[str, Any], place: Device, out: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        if segment.function is not None:
            return self._call_function(segment, values, place)
        assert segment.runner is not None
        if out is not None:
            segment.runner.run(values, place, out[0] if len(out) == 1 else out)
            return out
        result = segment.runner.run(values, place)
        if not segment.results:
            return ()
        return tuple(np.asarray(r) if isinstance(r, np.generic) else r for r in result) if isinstance(result, tuple) else (np.asarray(result) if isinstance(result, np.generic) else result,)

    # -- the workspace ------------------------------------------------------------------------------------------

    def workspace(self, plan: GraphPlan, place: Device) -> Any:
        """Memory for the values between segments, for one run."""
        if not plan.peak_bytes:
            return None
        gpu = array_device(place)
        if gpu is None:
            room = np.empty(plan.peak_bytes + ALIGNMENT, np.uint8)
            return room[-room.ctypes.data % ALIGNMENT :]
        try:
            return gpu.empty((plan.peak_bytes,), u8, streams.current(gpu.ordinal) or 0)
        except DeviceError as error:
            if error.code != "TW031":
                raise
            raise DeviceError.at("TW031", f"no memory on '{place.id}' for the workspace of '{self.graph.name}', {plan.peak_bytes:,} bytes: {error.diagnostics[0].message}") from None

    def room(self, plan: GraphPlan, segment: GraphSegment, workspace: Any) -> tuple[Any, ...] | None:
        """Where a segment's results go: those that only other segments read, to the workspace; None where all are new arrays."""
        if workspace is None or segment.function is not None or not segment.results or not any(v.number in plan.offsets for v in segment.results):
            return None
        found: list[Any] = []
        for value in segment.results:
            offset = plan.offsets.get(value.number)
            shape = value.memory
            if isinstance(workspace, DeviceArray):
                if offset is None:
                    found.append(workspace.device.empty(shape, value.dtype, streams.current(workspace.device.ordinal) or 0))
                else:
                    found.append(DeviceArray.at(workspace.device, workspace.owner, workspace.offset + offset, shape, value.dtype))
            elif offset is None:
                found.append(np.empty(shape, value.dtype.numpy))
            else:
                found.append(workspace[offset : offset + value.nbytes].view(value.dtype.numpy).reshape(shape))
        return tuple(found)

    def _call_function(self, segment: GraphSegment, values: Mapping[str, Any], place: Device) -> tuple[Any, ...]:
        """A replaced kernel that runs by itself, with what it gives checked."""
        call = segment.calls[0]
        assert segment.function is not None
        node = call.node
        if isinstance(segment.function, Kernel):
            result = segment.function(**values, **({} if segment.function.device else {"device": place.id}))
        else:
            result = segment.function(**values)
        name = getattr(segment.function, "__name__", "its kernel")
        found = result if isinstance(result, tuple) else () if result is None else (result,)
        if len(found) != len(segment.results):
            raise UserError.at("TW016", f"node '{node.name}' ({node.op}): {name} gave {len(found)} result(s), not {len(segment.results)}")
        gpu = array_device(place)
        arrays: list[Any] = []
        for item, value in zip(found, segment.results, strict=True):
            dtype = array_dtype(item) if hasattr(item, "shape") else None
            if dtype is None:
                raise UserError.at("TW009", f"node '{node.name}' ({node.op}): {name} gave a {type(item).__name__}, not an array of {value.dtype}{list(value.shape)}")
            if dtype is not value.dtype:
                raise UserError.at("TW006", f"node '{node.name}' ({node.op}): {name} gave {dtype}{list(item.shape)}, not {value.dtype}{list(value.shape)}")
            if tuple(item.shape) != value.shape:
                raise UserError.at("TW004", f"node '{node.name}' ({node.op}): {name} gave {dtype}{list(item.shape)}, not {value.dtype}{list(value.shape)}")
            array = (item if isinstance(item, DeviceArray) else gpu.wrap(item)) if gpu is not None and not isinstance(item, np.ndarray) else gpu.from_numpy(np.ascontiguousarray(item)) if gpu is not None else np.ascontiguousarray(item)
            arrays.append(array if array.is_contiguous else array.copy()) if isinstance(array, DeviceArray) else arrays.append(array)
        return tuple(a.reshape(v.memory) for a, v in zip(arrays, segment.results, strict=True))

    # -- nodes of weights alone ---------------------------------------------------------------------------------

    def is_folded(self, plan: GraphPlan, segment: GraphSegment, place: Device) -> bool:
        return all(call.constant for call in segment.calls) and all((id(plan), v.number, place.id) in self.folded for v in segment.results)

    def fold(self, plan: GraphPlan, place: Device) -> None:
        """Compute the segments that depend on weights alone, once."""
        for segment in plan.segments:
            if not all(call.constant for call in segment.calls) or self.is_folded(plan, segment, place):
                continue
            values = {name: self.array(v, {}, {}, plan, place) if isinstance(v, Ref) else v for name, v in segment.arguments.items()}
            for value, array in zip(segment.results, self.run_segment(segment, values, place), strict=True):
                self.folded[id(plan), value.number, place.id] = array

    # -- arrays -------------------------------------------------------------------------------------------------

    def array(self, ref: Ref, made: Mapping[int, Any], arrays: Arrays, plan: object, place: Device) -> Any:
        """The array that a reference means now. `plan` is the one whose folded values it may be one of."""
        if isinstance(ref.root, PlannedValue):
            found = made.get(ref.root.number)
            if found is None:
                found = self.folded[id(plan), ref.root.number, place.id]
            return found if ref.shape == ref.root.memory and _is_whole(ref) else strided(found, ref)
        if isinstance(ref.root, np.ndarray):
            return self.weight(("", id(ref.root)), ref.root, place)
        node = self.graph.nodes[ref.root]
        if ref.root in arrays:
            return stepped(arrays[ref.root], ref.steps, node.kind == "cache")
        if node.kind == "weight":
            return self.weight((node.name, ref.steps), node.data, place, ref.steps)
        key = (node.name, place.id)
        if key not in self.states:
            tensor = node.results[0]
            self.states[key] = new_zeros(self._cache_shape(node), tensor.dtype, place, node.name)
        return stepped(self.states[key], ref.steps, True)

    def weight(self, key: tuple[str, object], data: Any, place: Device, steps: tuple[tuple[Any, ...], ...] = ()) -> Any:
        """A weight on a device; moved there when it is first needed."""
        where = (*key, place.id)
        found = self.weights.get(where)
        if found is None:
            base = (key[0], (), place.id) if key[0] else where
            found = self.weights.get(base)
            if found is None:
                found = self._moved(key[0], data, place)
                self.weights[base] = found
            if steps:
                found = stepped(found, steps)
                self.weights[where] = found
        return found

    def _moved(self, name: str, data: Any, place: Device) -> Any:
        try:
            if isinstance(data, PackedArray):
                return PackedArray(place_of([data.blocks], place).read(name, data.blocks), data.dtype)
            return place_of([data], place).read(name or "constant", data)
        except DeviceError as error:
            if error.code != "TW031":
                raise
            total = sum(_nbytes(node.data) for node in self.order if node.kind == "weight")
            raise DeviceError.at("TW031", f"no memory on '{place.id}' for the weight '{name}' of {_nbytes(data):,} bytes; all weights of '{self.graph.name}' take {total:,} bytes: {error.diagnostics[0].message}") from None

    def state(self, name: str, device: str | None = None) -> Any:
        node = self.graph.nodes.get(name)
        if node is None or node.kind != "cache":
            raise UserError.at("TW002", f"the graph '{self.graph.name}' has no cache '{name}'", help=f"its caches are {', '.join(n.name for n in self.graph.nodes.values() if n.kind == 'cache') or 'none'}")
        place = find_device(device or default_device())
        tensor = node.results[0]
        return self.array(Ref(name, self._cache_shape(node), tensor.dtype), {}, {}, None, place)

    def reset(self, device: str | None = None) -> None:
        place = None if device is None else find_device(device).id
        for (_, where), state in self.states.items():
            array = _plain(state)
            if place is None or where == place:
                if isinstance(array, DeviceArray):
                    array.fill(0)
                else:
                    array[...] = 0


class _Shaped:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def _nbytes(data: Any) -> int:
    return int(getattr(data, "nbytes", 0))


def _plain(array: Any) -> Any:
    """An array, or the bytes of packed blocks."""
    return array.blocks if isinstance(array, PackedArray) else array


def new_zeros(shape: tuple[int, ...], dtype: DType, place: Device, name: str) -> Any:
    if dtype.is_packed:
        return PackedArray(new_zeros((*shape[:-1], shape[-1] // dtype.block, dtype.block_bytes), u8, place, name), dtype)
    gpu = array_device(place)
    if gpu is None:
        return np.zeros(shape, dtype.numpy)
    try:
        made = gpu.empty(shape, dtype, streams.current(gpu.ordinal) or 0)
    except DeviceError as error:
        if error.code != "TW031":
            raise
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raise DeviceError.at("TW031", f"no memory on '{place.id}' for the cache '{name}' of {nbytes:,} bytes: {error.diagnostics[0].message}") from None
    made.fill(0)
    return made


def _is_whole(ref: Ref) -> bool:
    return all(p.axis == a for a, p in enumerate(ref.places))


def strided(array: Any, ref: Ref) -> Any:
    """A view of the memory of a value."""
    rank = len(ref.shape)
    if isinstance(array, np.ndarray):
        own = tuple(s // array.itemsize for s in array.strides)
        steps = tuple(sum(p.steps[a] * s for p, s in zip(ref.places, own, strict=True)) * array.itemsize for a in range(rank))
        start = array[tuple(slice(p.offset, None) for p in ref.places)] if array.ndim else array
        return np.lib.stride_tricks.as_strided(start, ref.shape, steps)
    if not isinstance(array, DeviceArray):
        return array
    offset = sum(p.offset * s for p, s in zip(ref.places, array.strides, strict=True))
    return array.strided(offset, ref.shape, tuple(sum(p.steps[a] * s for p, s in zip(ref.places, array.strides, strict=True)) for a in range(rank)))


def stepped(array: Any, steps: tuple[tuple[Any, ...], ...], in_place: bool = False) -> Any:
    """A view of an array of the caller, step by step. Only what is not written may be copied."""
    for kind, shape, axes, axis, start, step in steps:
        if kind == "reshape":
            if isinstance(array, DeviceArray) and not array.is_contiguous and not in_place:
                array = array.copy()
            if isinstance(array, np.ndarray) and in_place and not np.shares_memory(array.reshape(shape), array):
                raise UserError.at("TW018", f"an array of shape {array.shape} and strides {array.strides} that is written in place cannot have the shape {shape}", help="give a contiguous array")
            array = array.reshape(shape)
        elif kind == "blocks":
            array = array.blocks
        elif kind == "transpose":
            array = array.transpose(*axes)
        elif kind == "slice":
            stop = start + shape[axis] * step
            array = array[(*(slice(None) for _ in range(axis)), slice(start, stop, step))]
        elif kind == "drop":
            array = array[(*(slice(None) for _ in range(axis)), 0)]
        else:
            array = np.broadcast_to(array, shape) if isinstance(array, np.ndarray) else array.broadcast_to(shape)
    return array
