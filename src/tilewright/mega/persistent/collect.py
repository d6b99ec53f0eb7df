"""The programs of a tensor graph's plan as ops of one kernel.

In: an executor, a plan and a target. Out: a `StepPlan`: each program is compiled to the thread stage for the very sizes of the plan, without what does not
survive in a larger kernel (clusters, the copy engine, warp groups); programs that repeat become loops.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from tilewright.base.artifact import FAILURE
from tilewright.base.errors import CompilerBug, UserError
from tilewright.base.sizes import Size, product
from tilewright.base.target import Target
from tilewright.compile.driver import Signature, thread_program
from tilewright.execute.calls.arguments import ReadArgument, element_strides
from tilewright.graphs.executor import Executor, stepped
from tilewright.graphs.explain import stand_in
from tilewright.graphs.lower import PlannedValue, Ref
from tilewright.graphs.plan import GraphPlan, GraphSegment
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.specialise import with_sizes
from tilewright.ir.text import print_kernel
from tilewright.ir.types import Tensor
from tilewright.mega.persistent.invariant import settled
from tilewright.mega.persistent.records import ArraySlot, MemoryRegion, PersistentOp, StepPlan, TaskLoop, number_slot
from tilewright.passes.common.simplify import simplify
from tilewright.passes.program.persistent_kernel import lean
from tilewright.runtime.memory.packed_array import PackedArray
from tilewright.tree.typed import ArrayArg

log = logging.getLogger("tilewright")
THREADS = 128
"""Of a block, at most: kernels of one launch have one number of threads, and small blocks share out short ops better."""
SHARED = 45 << 10
"""Bytes of shared memory of a block, at most: several blocks stay on a multiprocessor."""
_REFUSED = frozenset({
    "tensor_map", "mbarrier_init", "cluster_rank", "cluster_sync", "load_remote", "copy_remote", "named_barrier", "set_registers", "wgmma", "wgmma_registers",
    "raise_flag", "await_flag", "grid_barrier", "grid_size", "dynamic_shared", "print", "assert",
})  # fmt: skip
_MOST_PERIOD = 16
"""Programs of a loop's body, at most."""


@dataclass(frozen=True, eq=False)
class _Compiled:
    """A program for certain sizes, with the numbers that go into its code."""

    program: Program
    numbers: dict[str, Any]
    kernels: tuple[Kernel, ...]
    """Those of its calls, as tasks run them."""
    texts: tuple[str, ...]

    @property
    def form(self) -> tuple[object, ...]:
        """What programs have in common whose ops may be ops of one loop: their arrays, and what each call touches."""
        arrays = tuple((a.name, a.role) for a in (*self.program.input_arrays, *self.program.outputs, *self.program.scratch))
        calls = tuple((call.args, frozenset(_written(call.kernel))) for call in self.program.calls)
        return arrays, calls, tuple((name, type(value)) for name, value in self.numbers.items())


def persistent_target(target: Target) -> Target:
    """The target as the programs of a persistent kernel see it."""
    small = lean(target)
    return replace(small, features=small.features | {"thin_mma"}, max_threads=min(target.max_threads, THREADS), max_shared=min(target.max_shared, SHARED))


def collect(executor: Executor, plan: GraphPlan, target: Target) -> StepPlan:
    """The plan as loops of ops."""
    if not target.simt:
        raise UserError.at("TW020", f"a persistent kernel of '{plan.name}' for {target.name}: only GPUs and the emulator run one", help="run the graph with g.run, or its tasks on threads")
    if any(not segment.constant for segment in plan.segments if segment.function is not None):
        segment = next(s for s in plan.segments if s.function is not None and not s.constant)
        raise UserError.at("TW020", f"node '{segment.title}' runs by itself ({getattr(segment.function, '__name__', 'a function')} is no kernel of plain options), and cannot be part of a larger kernel")
    known: dict[tuple[object, ...], int] = {}
    programs: dict[tuple[object, ...], Program] = {}
    compiled: list[_Compiled] = []
    segments = [segment for segment in plan.segments if not segment.constant]
    kinds: list[int] = []
    for segment in segments:
        key, signature, values = _key(executor, segment)
        if key not in known:
            known[key] = len(compiled)
            if key[:2] not in programs:
                programs[key[:2]] = _thread_program(segment, signature, target)
            compiled.append(_compile(segment, programs[key[:2]], values))
        kinds.append(known[key])
    if not segments:
        raise UserError.at("TW016", f"the graph '{plan.name}' has nothing to run: its outputs depend on weights alone")
    return _Collector(executor, plan, target, segments, kinds, compiled).run()


def _key(executor: Executor, segment: GraphSegment) -> tuple[tuple[object, ...], Signature, dict[str, Any]]:
    assert segment.runner is not None
    values: dict[str, Any] = {}
    aligned: dict[str, bool] = {}
    for name, value in segment.arguments.items():
        values[name], aligned[name] = _empty(executor, value) if isinstance(value, Ref) else (value, True)
    arguments = [_placed(argument, values[argument.name], aligned[argument.name]) for argument in segment.runner.arguments(values, True)]
    signature = segment.runner.signature(arguments, True)
    numbers = tuple((n, v) for n, v in values.items() if isinstance(v, bool | int | float))
    return (id(segment.runner), repr(signature), repr(signature.extents), numbers), signature, values


def _placed(argument: ReadArgument, value: Any, aligned: bool) -> ReadArgument:
    """An argument as it lies in device memory: strided where it is a view, and not aligned where a view begins anywhere."""
    spec = argument.spec
    if not isinstance(value, np.ndarray) or not isinstance(spec, ArrayArg):
        return argument
    if not value.flags.c_contiguous:
        last = value.ndim - 1
        strides = tuple(s if s == 0 or (s == 1 and axis == last) else None for axis, s in enumerate(element_strides(value)))
        spec = replace(spec, strides=strides)
    return ReadArgument(argument.name, value, spec if aligned else replace(spec, align=0))


def _empty(executor: Executor, ref: Ref) -> tuple[Any, bool]:
    """An array of that form, with nothing in it, and whether it begins at a multiple of 16 bytes as the whole array does."""
    if isinstance(ref.root, PlannedValue):
        apart: list[int] = []
        step = 1
        for extent in reversed(ref.root.memory):
            apart.insert(0, step)
            step *= extent
        return stand_in(ref), sum(p.offset * s for p, s in zip(ref.places, apart, strict=True)) * ref.dtype.itemsize % 16 == 0
    node = executor.graph.nodes[ref.root] if isinstance(ref.root, str) and ref.steps else None
    if node is None or node.results[0].dtype.is_packed:
        return stand_in(ref), True
    whole = np.empty(tuple(size.evaluate(executor.capacity) for size in node.results[0].sizes), node.results[0].dtype.numpy)
    view = stepped(whole, ref.steps, node.kind == "cache")
    start = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return view, start % 16 == 0


def _thread_program(segment: GraphSegment, signature: Signature, target: Target) -> Program:
    assert segment.runner is not None
    try:
        program = thread_program(segment.runner.function, signature, persistent_target(target))
    except CompilerBug as error:
        # Small blocks are a wish: some kernels have a schedule for larger ones only.
        log.warning("%s: no schedule for blocks of %d threads (%s); larger ones are used", segment.title, THREADS, error.diagnostics[0].message.splitlines()[0])
        program = thread_program(segment.runner.function, signature, lean(target))
    if program.loops:
        raise UserError.at("TW020", f"node '{segment.title}' has ordered loops, and cannot be part of a larger kernel")
    return program


def _compile(segment: GraphSegment, program: Program, values: dict[str, Any]) -> _Compiled:
    arrays = {name: value.blocks if isinstance(value, PackedArray) else value for name, value in values.items() if isinstance(value, np.ndarray | PackedArray)}
    numbers = {name: value for name, value in values.items() if isinstance(value, bool | int | float)}
    shapes = {name: array.shape for name, array in arrays.items()}
    strides = {name: tuple(s // array.itemsize for s in array.strides) for name, array in arrays.items()}
    sizes = program.sizes(shapes, strides, numbers)
    program = with_sizes(program, sizes)
    known = {name: Size.of(number) for name, number in sizes.items()}
    calls = tuple(
        replace(call, kernel=simplify(replace(call.kernel, grid=tuple(size.substitute(known) for size in call.kernel.grid)))) for call in program.calls
    )
    for call in calls:
        _check(call.kernel, segment)
    kernels = tuple(settled(call.kernel, total_tasks(call.kernel)) for call in calls)
    return _Compiled(replace(program, calls=calls), numbers, kernels, tuple(print_kernel(replace(kernel, name="")) for kernel in kernels))


def _check(kernel: Kernel, segment: GraphSegment) -> None:
    found = next((op for op in walk(kernel.body) if op.opcode in _REFUSED), None)
    reason = f"uses {found.opcode}" if found is not None else "has clusters" if kernel.attrs.get("cluster", 1) != 1 else ""
    if not reason and kernel.size_names:
        reason = f"has sizes that are not known: {', '.join(kernel.size_names)}"
    if reason:
        raise UserError.at("TW020", f"nodes {segment.title}: the kernel {kernel.name} {reason}, and cannot be part of a larger kernel", kernel.span)


def _written(kernel: Kernel) -> set[int]:
    """The positions of the parameters that a kernel writes."""
    values = {v for op in walk(kernel.body) if OPS[op.opcode].effect not in ("pure", "read", "control", "barrier", "sync") for v in op.operands}
    return {n for n, param in enumerate(kernel.params) if param in values and isinstance(param.type, Tensor)}


def repeats(kinds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of a sequence that repeat: where each begins, how long its period is, and how often it comes."""
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < len(kinds):
        best = (1, 1)
        for period in range(1, min(_MOST_PERIOD, (len(kinds) - at) // 2) + 1):
            count = 1
            while kinds[at + count * period : at + (count + 1) * period] == kinds[at : at + period]:
                count += 1
            if count > 1 and period * count > best[0] * best[1]:
                best = (period, count)
        found.append((at, *best))
        at += best[0] * best[1]
    return found


def _alike(compiled: Sequence[_Compiled]) -> list[int]:
    """For each program the first one whose loop it can be part of: of its form, and with half of its kernels at least."""
    found: list[int] = []
    for number, one in enumerate(compiled):
        others = (n for n in dict.fromkeys(found) if compiled[n].form == one.form)
        found.append(next((n for n in others if 2 * sum(a == b for a, b in zip(one.texts, compiled[n].texts, strict=True)) >= len(one.texts)), number))
    return found


class _Collector:
    def __init__(self, executor: Executor, plan: GraphPlan, target: Target, segments: Sequence[GraphSegment], kinds: Sequence[int], compiled: Sequence[_Compiled]) -> None:
        self.executor, self.plan, self.segments, self.kinds, self.compiled = executor, plan, segments, list(kinds), compiled
        self.step = StepPlan(plan.name, target, [], [c.program for c in compiled], {})
        self.inplace = {self._leaf(segment.arguments[name]) for segment in segments for name in segment.written}
        """Leaves that somebody writes."""

    @staticmethod
    def _leaf(value: Any) -> str:
        return value.root if isinstance(value, Ref) and isinstance(value.root, str) else ""

    def run(self) -> StepPlan:
        number = 0
        alike = _alike(self.compiled)
        for at, period, count in repeats([alike[kind] for kind in self.kinds]):
            ops: list[PersistentOp] = []
            slots: list[list[dict[str, ArraySlot]]] = []
            for iteration in range(count):
                group = range(at + iteration * period, at + (iteration + 1) * period)
                slots.append([self._slots(self.segments[n], self.kinds[n], len(self.step.loops), n - group[0]) for n in group])
            for place in range(period):
                kinds = [self.kinds[at + place + iteration * period] for iteration in range(count)]
                self._add_numbers(kinds, [programs[place] for programs in slots])
                for call in range(len(self.compiled[kinds[0]].program.calls)):
                    ops.append(self._op(number, kinds, call, place, [programs[place] for programs in slots]))
                    number += 1
            loop = TaskLoop(count, ops, slots, [segment.title for segment in self.segments[at : at + period]])
            loop.columns = [(place, name) for place in range(period) for name in sorted(slots[0][place])]
            loop.first_entry, loop.first_instance = self.step.entries, self.step.length
            self.step.loops.append(loop)
        return self.step

    def _add_numbers(self, kinds: Sequence[int], slots: Sequence[dict[str, ArraySlot]]) -> None:
        """Numbers that are others in other iterations are columns of the table."""
        for name in self.compiled[kinds[0]].numbers:
            given = [self.compiled[kind].numbers[name] for kind in kinds]
            if any(value != given[0] for value in given):
                for row, value in zip(slots, given, strict=True):
                    row[f"#{name}"] = number_slot(value)

    def _op(self, number: int, kinds: Sequence[int], call: int, place: int, slots: Sequence[dict[str, ArraySlot]]) -> PersistentOp:
        """An op of a loop: with a kernel for each kind of program there is among its iterations, where they differ."""
        bodies: dict[str, PersistentOp] = {}
        for kind in kinds:
            compiled = self.compiled[kind]
            one, kernel, text = compiled.program.calls[call], compiled.kernels[call], compiled.texts[call]
            if text not in bodies:
                written = {one.args[n] for n in _written(one.kernel)} - {FAILURE}
                touched = {name for name, param in zip(one.args, kernel.params, strict=True) if isinstance(param.type, Tensor)} - {FAILURE}
                grid = tuple(size.evaluate({}) for size in kernel.grid)
                bodies[text] = PersistentOp(number, kernel.name, kernel, one.args, frozenset(touched), frozenset(written), compiled.numbers, place, prod(grid), grid)
        found = sorted(bodies.values(), key=lambda body: -body.tasks)
        if len(found) > 1:
            found[0].others, found[0].choice = tuple(found[1:]), f"#kernel {number}"
            for row, kind in zip(slots, kinds, strict=True):
                row[found[0].choice] = number_slot(found.index(bodies[self.compiled[kind].texts[call]]))
        return found[0]

    def _slots(self, segment: GraphSegment, kind: int, loop: int, place: int) -> dict[str, ArraySlot]:
        program = self.compiled[kind].program
        found: dict[str, ArraySlot] = {}
        results = dict(zip((a.name for a in program.outputs), segment.results, strict=True))
        for array in (*program.input_arrays, *program.outputs, *program.scratch):
            nbytes = _bytes(array)
            align = array.type.align
            if array.name in results:
                value = results[array.name]
                found[array.name] = ArraySlot(self._value_region(value), value, nbytes, align, False)
            elif array.name in segment.arguments:
                source = segment.arguments[array.name]
                found[array.name] = ArraySlot(self._region(source), source, nbytes, align, self._is_constant(source))
            else:
                # Iterations of a loop take turns: what one keeps to itself, the next may have.
                name = f"{loop}.{place}.{array.name}"
                before, _ = self.step.scratch.get(name, (0, array.type.dtype))
                self.step.scratch[name] = (max(before, nbytes), array.type.dtype)
                if array.name == FAILURE:
                    self.step.failures[name] = program
                found[array.name] = ArraySlot(MemoryRegion(f"scratch {name}"), name, nbytes, align, False)
        return found

    def _value_region(self, value: PlannedValue) -> MemoryRegion:
        offset = self.plan.offsets.get(value.number)
        return MemoryRegion(f"value {value.number}") if offset is None else MemoryRegion("workspace", offset, offset + max(1, value.nbytes))

    def _region(self, source: Any) -> MemoryRegion:
        if isinstance(source.root, PlannedValue):
            return self._value_region(source.root)
        return MemoryRegion(f"leaf {source.root}" if isinstance(source.root, str) else f"constant {id(source.root)}")

    def _is_constant(self, source: Any) -> bool:
        if isinstance(source.root, PlannedValue):
            return any(source.root in segment.results for segment in self.plan.segments if segment.constant)
        if not isinstance(source.root, str):
            return True
        return self.executor.graph.nodes[source.root].kind == "weight" and source.root not in self.inplace


def _bytes(array: ProgramArray) -> int:
    shape = [s.evaluate({}) for s in array.type.shape]
    strides = [s.evaluate({}) for s in array.type.strides]
    if 0 in shape:
        return 0
    return (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) * array.type.dtype.itemsize


def total_tasks(kernel: Kernel) -> int:
    return product(kernel.grid).evaluate({})
