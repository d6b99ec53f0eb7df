"""A compiled megakernel: `plan.compile(target)`.

In: a plan and a target. Out: a `MegaKernel`, and from it a runner. The artifact is found by the tape, the architecture and the compiler's version. On a CPU
it is the list of the programs whose blocks are the tasks; these are in the same cache. For a GPU it is one persistent kernel.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.base.artifact import Artifact
from tilewright.base.errors import UserError
from tilewright.base.target import Target, parse_target
from tilewright.compile.driver import compile_kernel, package_version
from tilewright.compile.store import STORE
from tilewright.execute.devices import default_device, find_device
from tilewright.graphs.executor import stepped
from tilewright.graphs.explain import stand_in
from tilewright.graphs.lower import PlannedValue, Ref
from tilewright.graphs.plan import GraphSegment
from tilewright.mega.persistent.entry import EMULATED_BLOCKS, compile_persistent, plan_step, step_ring
from tilewright.mega.planning import TapePlan
from tilewright.mega.runner import MegaRunner
from tilewright.runtime.memory.packed_array import PackedArray


class MegaKernel:
    """A plan, compiled for one target."""

    def __init__(self, plan: TapePlan, target: str = "cpu", ring_bytes: int | None = None) -> None:
        start = time.perf_counter()
        self.plan, self.ring_bytes = plan, ring_bytes
        self.device, self.target = _target(target)
        if ring_bytes is not None and (not isinstance(ring_bytes, int) or ring_bytes < 0):
            raise UserError.at("TW009", f"ring_bytes={ring_bytes!r}", help="give a number of bytes; 0 is no ring")
        if ring_bytes and self.target.is_host:
            raise UserError.at("TW016", f"ring_bytes={ring_bytes} does nothing on {self.target.name}", help="leave it out: a ring is in the shared memory of a GPU's blocks")
        self.key = hashlib.sha256(f"mega|{plan.key or plan.text}|{self.target.key()}|{ring_bytes}|{package_version()}".encode()).hexdigest()
        """Where it is in the cache: a hash of tape, architecture and compiler."""
        self.from_cache = STORE.find(self.key) is not None
        self.artifact: Artifact = STORE.get_or_build(self.key, self._build)
        self.seconds = time.perf_counter() - start
        """How long that took."""

    def _build(self) -> Artifact:
        plan = self.plan.graph_plan
        if all(segment.constant for segment in plan.segments):
            return Artifact(self.plan.tape.name, self.target.name, "mega", b"[]", (), (), (), (), (), (), key=self.key)
        if self.device.startswith("emulator"):
            step = plan_step(self.plan.executor, plan, self.target)  # what cannot be part of a larger kernel is refused here
            step_ring(step, self.target, EMULATED_BLOCKS, 0, self.ring_bytes or 0)
            listed = json.dumps([op.title for op in step.ops]).encode()
            return Artifact(self.plan.tape.name, self.target.name, "mega", listed, (), (), (), (), (), (), key=self.key)
        if self.target.is_gpu:
            return replace(compile_persistent(self.plan.graph, plan, self.target, self.plan.executor, self.ring_bytes), key=self.key)
        functions = [s.title for s in plan.segments if s.runner is None]
        if functions:
            raise UserError.at("TW005", f"node '{functions[0]}' runs by itself: a function that is no kernel of plain options cannot be part of a megakernel")
        programs = {id(s.runner): program_of(s, self.target, self.plan) for s in plan.segments}
        listed = json.dumps([a.key for a in programs.values()]).encode()
        launches = tuple(launch for artifact in programs.values() for launch in artifact.launches)
        return Artifact(self.plan.tape.name, self.target.name, "mega", listed, (), (), (), launches, (), (), key=self.key)

    def load(self, device: str | None = None, workers: int | None = None) -> MegaRunner:
        """A runner on a device of the target. `workers` is how many threads run the tasks on a CPU."""
        place = find_device(device or self.device)
        if place.kind != find_device_kind(self.device) or place.target.key() != self.target.key():
            raise UserError.at("TW030", f"this megakernel is for {self.target.name}, and '{place.id}' is {place.target.name}", help=f"compile it for that: plan.compile(\"{place.id}\")")
        if workers is not None and place.kind != "cpu":
            raise UserError.at("TW016", f"workers={workers} does nothing on '{place.id}'", help="leave it out: as many blocks run as fit")
        return MegaRunner(self.plan, place, workers, self.ring_bytes)

    def __repr__(self) -> str:
        return f"<megakernel {self.plan.tape.name} for {self.target.name}: {len(self.plan.tape)} instructions, key {self.key[:12]}>"


def find_device_kind(name: str) -> str:
    """The kind of a device that may not be here."""
    return name.partition(":")[0]


def _target(name: str) -> tuple[str, Target]:
    """The device that a target is for, and the target. `name` is either."""
    if name == "cpu":
        return "cpu", parse_target("cpu")
    if name in ("emulator", "auto") or name.startswith(("emulator:", "cuda")):
        place = find_device(default_device() if name == "auto" else name)
        return place.id, place.target
    target = parse_target(name)
    if target.is_host:
        return "cpu", target
    if not target.simt:
        raise UserError.at("TW005", f"megakernels for '{name}' are not there yet", help="compile for a CPU, an NVIDIA GPU or the emulator")
    return "cuda", target


def program_of(segment: GraphSegment, target: Target, whole: TapePlan) -> Artifact:
    """The program of a segment for a target: from the cache, or compiled."""
    runner = segment.runner
    assert runner is not None
    values = {name: _stand_in(value, whole) if isinstance(value, Ref) else value for name, value in segment.arguments.items()}
    packed = {name: value.dtype for name, value in values.items() if isinstance(value, PackedArray)}
    if packed:
        runner = runner.with_packed(packed)
        values = {name: value.blocks if isinstance(value, PackedArray) else value for name, value in values.items()}
    arguments = runner.arguments(values, target.is_gpu)
    return compile_kernel(runner.function, runner.signature(arguments, target.is_gpu), target)


def _stand_in(ref: Ref, whole: TapePlan) -> Any:
    """An array of that form, with nothing in it."""
    if isinstance(ref.root, PlannedValue) or not isinstance(ref.root, str):
        return stand_in(ref) if isinstance(ref.root, PlannedValue) else ref.root
    tensor = whole.graph.nodes[ref.root].results[0]
    shape = tuple(size.evaluate(whole.found.sizes) for size in tensor.sizes)
    base: Any = np.empty(shape, tensor.dtype.numpy) if not tensor.dtype.is_packed else PackedArray(np.empty((*shape[:-1], shape[-1] // tensor.dtype.block, tensor.dtype.block_bytes), np.uint8), tensor.dtype)
    return stepped(base, ref.steps, whole.graph.nodes[ref.root].kind == "cache")
