"""Running a megakernel: weights, caches, inputs and a position in, outputs out.

In: a plan, and a device that it was compiled for. Out: a `MegaRunner`. Everything is checked before anything is launched. On a GPU and in the emulator a launch is
one persistent kernel (`persistent/`); on a CPU the tasks of the plan run on threads that stay (`cpu_step.py`).
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, u8
from tilewright.base.errors import DeviceError, UserError
from tilewright.execute.devices import Device, array_device
from tilewright.graphs.builder import array_dtype
from tilewright.graphs.executor import new_zeros
from tilewright.graphs.plan import GraphPlan
from tilewright.graphs.tensor import Tensor
from tilewright.graphs.workspace import ALIGNMENT
from tilewright.mega.cpu_step import CpuStep, ViewsOnly
from tilewright.mega.cpu_tasks import CpuTasks, TaskTime
from tilewright.mega.persistent.entry import PersistentStep
from tilewright.mega.persistent.kept import KeptStep, find_step, step_key
from tilewright.mega.planning import TapePlan, executor_of, plan_graph
from tilewright.mega.report import MegaReport, report_of
from tilewright.mega.tape_graph import POSITION, graph_of
from tilewright.runtime.core import streams
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.packed_array import PackedArray

_open: weakref.WeakSet[MegaRunner] = weakref.WeakSet()


class MegaRunner:
    """A megakernel on a device, with its weights and caches. Close it: what it holds is large."""

    def __init__(self, plan: TapePlan, place: Device, workers: int | None = None, ring_bytes: int | None = None) -> None:
        self.plan, self.place, self.device, self.ring_bytes = plan, place, place.id, ring_bytes
        self._closed = False
        if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 1024):
            raise UserError.at("TW009", f"workers is {workers!r}", help="give how many threads run the tasks")
        self._workers = workers
        self.found = graph_of(plan.tape)  # its weights and caches are its own
        self.executor = executor_of(self.found)
        self.layout = plan.workspace
        self._given: set[int] = set()
        self._arrays: dict[str, Any] = {}
        self._step: CpuStep | PersistentStep | ViewsOnly | None = None
        self._limits = self._cache_limits()
        self._make_arrays()
        _open.add(self)

    @cached_property
    def graph_plan(self) -> GraphPlan:
        """The programs, with the workspace of the tape."""
        made = plan_graph(self.found, self.executor, self.plan.fuse)
        layout = self.plan.workspace
        made.offsets, made.peak_bytes = dict(layout.values), layout.nbytes
        return made

    def _cache_limits(self) -> list[tuple[str, int, int]]:
        """Of nodes that append: their name, how many rows, and what the cache holds."""
        found = []
        sizes = self.found.sizes
        for node in self.found.graph.nodes.values():
            cache, rows = node.inputs.get("cache"), node.inputs.get("rows")
            if node.op == "KVAppend" and isinstance(cache, Tensor) and isinstance(rows, Tensor) and "table" not in node.inputs:
                found.append((node.name, rows.sizes[-3].evaluate(sizes), cache.sizes[-3].evaluate(sizes)))
        return found

    def _make_arrays(self) -> None:
        sizes, gpu = self.found.sizes, array_device(self.place)
        if gpu is None:
            room = np.zeros(self.layout.nbytes + ALIGNMENT, np.uint8)
            self.workspace: Any = room[-room.ctypes.data % ALIGNMENT :][: self.layout.nbytes]
        else:
            self.workspace = gpu.empty((max(self.layout.nbytes, 1),), u8, streams.current(gpu.ordinal) or 0)
            self.workspace.fill(0)
        for node in self.found.graph.nodes.values():
            tensor = node.results[0] if node.results else None
            if node.kind == "input" and tensor is not None:
                shape = tuple(size.evaluate(sizes) for size in tensor.sizes)
                self._arrays[node.name] = self._part(self.layout.input_offsets[node.name], shape, tensor.dtype)
            elif node.kind == "cache" and tensor is not None:
                self._arrays[node.name] = new_zeros(tuple(size.evaluate(sizes) for size in tensor.sizes), tensor.dtype, self.place, node.name)

    def _part(self, at: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """An array in the workspace."""
        if isinstance(self.workspace, DeviceArray):
            return DeviceArray.at(self.workspace.device, self.workspace.owner, self.workspace.offset + at, shape, dtype)
        return self.workspace[at : at + math.prod(shape) * dtype.itemsize].view(dtype.numpy).reshape(shape)

    # -- what users call ----------------------------------------------------------------------------------------

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the output; of the first, where there are several."""
        return next(iter(self.plan.output_shapes.values()))

    @property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.plan.output_shapes

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any] | None = None, /, **named: Any) -> None:
        """The numbers of the frozen slots that the tape declares without them: all, in order, or by name."""
        self._check_open()
        slots = self.plan.tape.weights if self.plan.tape.source is None else []
        by_name = {slot.name: slot for slot in slots}
        if weights is not None and not isinstance(weights, Mapping):
            given = list(weights)
            if len(given) != len(slots):
                raise UserError.at("TW016", f"{len(given)} weight(s) were given, and the tape '{self.plan.tape.name}' has {len(slots)}", help=f"they are {', '.join(by_name) or 'none'}")
            pairs = dict(zip(by_name, given, strict=True))
        else:
            pairs = dict(weights or {})
        pairs |= named
        for name in pairs:
            if name not in by_name:
                raise UserError.at("TW008", f"the tape '{self.plan.tape.name}' has no weight '{name}' to set", help=f"they are {', '.join(by_name) or 'none'}")
        ready: list[tuple[int, Any]] = []
        for name, array in pairs.items():
            slot = by_name[name]
            if not isinstance(array, np.ndarray | PackedArray):
                if not hasattr(array, "shape"):
                    raise UserError.at("TW009", f"the weight '{name}' ({slot.form}) was given as a {type(array).__name__}, not as an array")
                array = np.asarray(array)
            dtype = array_dtype(array)
            if tuple(array.shape) != slot.shape:
                raise UserError.at("TW004", f"the weight '{name}' is {slot.form}, and was given as {dtype}{list(array.shape)}, for {self._reader(slot.number)}")
            if dtype is not slot.dtype:
                raise UserError.at("TW006", f"the weight '{name}' is {slot.form}, and was given as {dtype}{list(array.shape)}, for {self._reader(slot.number)}", help="convert it first")
            ready.append((slot.number, array if isinstance(array, PackedArray) else np.ascontiguousarray(array)))
        for number, array in ready:
            self.found.graph.nodes[self.found.weights[number]].data = array
            self._given.add(number)
        self.executor.weights.clear()
        self.executor.folded.clear()
        self._forget()

    def _reader(self, slot: int) -> str:
        found = next((one for one in self.plan.tape.instructions if slot in one.inputs), None)
        return found.label if found is not None else "no instruction"

    def set_kv_cache(self, k: Any, v: Any) -> None:
        """The caches of keys and values, used where they lie: for each layer an array, or one array with an axis of layers in front."""
        self._check_open()
        caches = self.plan.tape.caches
        if caches is None:
            raise UserError.at("TW008", f"the tape '{self.plan.tape.name}' has no caches", help="declare them: tape.kv_cache(layers, capacity, heads, depth)")
        ready: dict[str, Any] = {}
        for stem, given in (("keys", k), ("values", v)):
            layers = list(given)
            if len(layers) != caches.layers:
                raise UserError.at("TW016", f"{stem} of {len(layers)} layer(s) were given, and the tape '{self.plan.tape.name}' has {caches.layers}")
            for layer, array in enumerate(layers):
                self._check_cache(f"{stem}_{layer}", array, caches.shape, caches.dtype)
                ready[f"{stem}_{layer}"] = array
        self._arrays.update(ready)
        self._forget()

    def _check_cache(self, name: str, array: Any, shape: tuple[int, ...], dtype: DType) -> None:
        if isinstance(array, np.ndarray) and array_device(self.place) is not None:
            raise UserError.at("TW018", f"the cache '{name}' is written in place on '{self.device}', and was given as an array of the host", help="give an array of the device: tw.to_device(…)")
        if not isinstance(array, np.ndarray | DeviceArray) or array_dtype(array) is not dtype or tuple(array.shape) != shape:
            form = f"{array_dtype(array)}{list(array.shape)}" if hasattr(array, "shape") else f"a {type(array).__name__}"
            raise UserError.at("TW004", f"the cache '{name}' is {dtype}{list(shape)}, and was given as {form}")
        address = array.pointer if isinstance(array, DeviceArray) else int(array.__array_interface__["data"][0])
        if address % 16 and self.place.kind != "cpu":
            raise UserError.at("TW018", f"the cache '{name}' lies at an address that is no multiple of 16", help="give an array of its own for each layer")
        contiguous = array.is_contiguous if isinstance(array, DeviceArray) else array.flags.c_contiguous
        if not contiguous or (isinstance(array, np.ndarray) and not array.flags.writeable):
            raise UserError.at("TW018", f"the cache '{name}' is written in place, and was given as an array that is {'read-only' if contiguous else 'not contiguous'}")

    def launch(self, inputs: Any = None, position: Any = 0, *, clocks: bool = False, **named: Any) -> Any:
        """One launch: the output for these inputs, or a dictionary by name where there are several. Inputs are a mapping, or one array where the tape has one input.

        `position` is where rows are appended to the caches, and what `AutoPositionIds` begins with; caches count position + 1 rows then.
        """
        self._check_open()
        given = self._inputs(inputs, named)
        at = self._position(position)
        missing = [slot for slot in self.plan.tape.weights if slot.number not in self._given] if self.plan.tape.source is None else []
        if missing:
            raise UserError.at("TW008", f"the weight '{missing[0].name}' ({missing[0].form}) has no numbers, for {self._reader(missing[0].number)}", help="give them: runner.set_weights(…)")
        step = self._bound(clocks)
        for name, array in given.items():
            self._write(name, array)
        if at is not None:
            self._write(POSITION, at)
        if isinstance(step, CpuStep):
            step.launch(clocks=clocks)
        else:
            step.launch()
            if isinstance(self.workspace, DeviceArray):
                step.check_failures()
        return self._results(step.outputs, any(isinstance(array, DeviceArray) for array in given.values()))

    def _write(self, name: str, array: Any) -> None:
        target = self._arrays[name]
        if not isinstance(target, DeviceArray):
            target[...] = array
        elif isinstance(array, DeviceArray):
            target.device.copy(target, array if array.is_contiguous else array.copy(), streams.current(target.device.ordinal) or 0)
        else:
            target.copy_from(np.ascontiguousarray(array))

    def timeline(self) -> list[TaskTime]:
        """When each task of the latest launch with `clocks=True` ran, and where."""
        self._check_open()
        return self.report().times

    def report(self) -> MegaReport:
        """What the latest launch with `clocks=True` did: tasks, what they moved, the critical path."""
        self._check_open()
        if not isinstance(self._step, CpuStep | PersistentStep) or (isinstance(self._step, PersistentStep) and not self._step.clocks):
            raise UserError.at("TW016", f"no launch of '{self.plan.tape.name}' had clocks", help="runner.launch(…, clocks=True)")
        return report_of(self.plan.tape.name, self.device, self._step)

    @property
    def tasks(self) -> CpuTasks:
        """The schedule of a CPU's threads."""
        self._check_open()
        step = self._bound()
        if not isinstance(step, CpuStep):
            raise UserError.at("TW005", f"the tasks on {self.device} are those of the kernel", help="plan.compile(\"cpu\") has a schedule of threads")
        return step.tasks

    def cache(self, name: str) -> Any:
        """The array of a cache: `keys_0`, `values_0`, …"""
        self._check_open()
        if name not in self._arrays or self.found.graph.nodes[name].kind != "cache":
            raise UserError.at("TW002", f"the tape '{self.plan.tape.name}' has no cache '{name}'")
        return self._arrays[name]

    def close(self) -> None:
        """Give up threads, weights and caches."""
        if not self._closed:
            self._closed = True
            self._forget()
            self._arrays.clear()
            self.executor.weights.clear()
            _open.discard(self)

    def __enter__(self) -> MegaRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(ResourceWarning(f"the runner of '{self.plan.tape.name}' on {self.device} was never closed"), stacklevel=2)
            self.close()

    def __repr__(self) -> str:
        return f"<runner of {self.plan.tape.name} on {self.device}{', closed' if self._closed else ''}>"

    # -- checks -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError.at("TW033", f"the runner of '{self.plan.tape.name}' was used after it was closed")

    def _inputs(self, inputs: Any, named: Mapping[str, Any]) -> dict[str, Any]:
        wanted = [name for name in self._arrays if self.found.graph.nodes[name].kind == "input" and (name != POSITION or self.plan.tape.source is not None)]
        if self.plan.tape.source is not None:
            wanted = [name for name in wanted if name != POSITION]
        if inputs is not None and not isinstance(inputs, Mapping):
            if len(wanted) != 1:
                raise UserError.at("TW016", f"one array was given, and the tape '{self.plan.tape.name}' has {len(wanted)} inputs", help=f"give them by name: {', '.join(wanted)}")
            inputs = {wanted[0]: inputs}
        given = {**(inputs or {}), **named}
        for name in given:
            if name not in wanted:
                raise UserError.at("TW008", f"the tape '{self.plan.tape.name}' has no input '{name}'", help=f"its inputs are {', '.join(wanted) or 'none'}")
        missing = [name for name in wanted if name not in given]
        if missing:
            raise UserError.at("TW008", f"the tape '{self.plan.tape.name}' is missing the input '{missing[0]}'", help=f"its inputs are {', '.join(wanted)}")
        found: dict[str, Any] = {}
        for name, value in given.items():
            target = self._arrays[name]
            array = value if isinstance(value, np.ndarray | DeviceArray) else np.asarray(value)
            slot = self.plan.tape.slots[self.plan.tape.inputs[name]]
            shape = slot.shape if slot.shape is not None else target.shape
            if tuple(array.shape) != tuple(shape):
                raise UserError.at("TW004", f"the input '{name}' is {slot.form}, and was given as {list(array.shape)}, for {self._reader(slot.number)}")
            if array_dtype(array) is not slot.dtype:
                raise UserError.at("TW006", f"the input '{name}' is {slot.form}, and was given as {array_dtype(array) or array.dtype}, for {self._reader(slot.number)}", help="convert it first")
            found[name] = array.reshape(target.shape)
        return found

    def _position(self, position: Any) -> np.ndarray | None:
        if POSITION not in self._arrays or self.found.graph.nodes[POSITION].kind != "input":
            if not (isinstance(position, int) and position == 0):
                raise UserError.at("TW016", f"position is {position!r}, and nothing in the tape '{self.plan.tape.name}' reads it")
            return None
        target = self._arrays[POSITION]
        values = np.asarray(position)
        if values.dtype.kind not in "iu" or values.shape not in ((), target.shape):
            raise UserError.at("TW009", f"position is {position!r}", help=f"give a whole number{f', or {target.size} of them' if target.size > 1 else ''}")
        if int(values.min()) < 0:
            raise UserError.at("TW013", f"position is {int(values.min())}", help="positions begin with 0")
        for label, rows, capacity in self._limits:
            if int(values.max()) + rows > capacity:
                raise UserError.at("TW013", f"{label}: position is {int(values.max())}, and the cache holds {capacity} positions" + (f", of which it would append {rows}" if rows > 1 else ""))
        if int(values.max()) >= 1 << 31:
            raise UserError.at("TW013", f"position is {int(values.max())}", help="positions are below 2^31")
        return values.astype(np.int32)

    # -- recording ----------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None

    def _bound(self, clocks: bool = False) -> CpuStep | PersistentStep | ViewsOnly:
        """The plan, bound to the arrays that it works on. A persistent kernel with clocks is another kernel."""
        if clocks and isinstance(self._step, PersistentStep) and not self._step.clocks:
            self._forget()
        if self._step is None:
            if self.place.kind == "cpu":
                self._step = CpuStep(self.executor, self.graph_plan, self.place, self._arrays, self.workspace, self._workers)
            elif (kept := self._kept(clocks)) is not None:
                self._step = PersistentStep(self.executor, kept.plan, self.place, self._arrays, workspace=self.workspace, clocks=clocks, kept=kept)
            elif all(segment.constant for segment in self.graph_plan.segments):
                self._step = ViewsOnly(self.executor, self.graph_plan, self.place, self._arrays)
            else:
                self._step = PersistentStep(self.executor, self.graph_plan, self.place, self._arrays, workspace=self.workspace, clocks=clocks, ring_bytes=self.ring_bytes, keep_as=self._key(clocks))
        return self._step

    def _key(self, clocks: bool) -> str:
        """Where the step is in the cache."""
        if not self.plan.key:
            return ""
        return step_key(self.found.graph, self.found.sizes, self.place.target, self.place.multiprocessors, {"tape": self.plan.key, "clocks": clocks, "ring_bytes": self.ring_bytes})

    def _kept(self, clocks: bool) -> KeptStep | None:
        """The step as the cache has it: nothing is planned again."""
        return find_step(self._key(clocks), self.place.target)

    def _results(self, outputs: Mapping[str, Any], stay: bool) -> Any:
        found: dict[str, Any] = {}
        for name in self.plan.tape.outputs:
            if name in self.found.constants:
                found[name] = self.found.constants[name].copy()
                continue
            array = outputs[name]
            if isinstance(array, DeviceArray):
                array = array.copy() if stay else array.numpy()
            found[name] = (array if isinstance(array, DeviceArray) else np.array(array)).reshape(self.plan.output_shapes[name])
        found |= {name: array.copy() for name, array in self.plan.tape.constants.items()}
        return next(iter(found.values())) if len(found) == 1 else found


def check_leaks() -> None:
    """Raise an error that names every runner that was not closed."""
    left = sorted(repr(runner) for runner in _open)
    if left:
        raise DeviceError.at("TW033", f"{len(left)} runner(s) were not closed: {', '.join(left)}", help="call runner.close(), or use `with`")
