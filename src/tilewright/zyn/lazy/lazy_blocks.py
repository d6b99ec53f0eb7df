"""Compute blocks of a pipeline, or of the top level of a program, that wait, to run as one program.

In: blocks as a run comes to them, with arrays and with what earlier blocks will have made. Out: `LazyArray` arrays; nothing runs until somebody
needs numbers. Then all blocks that wait become one `BlockGraph` function, which is compiled, fused and launched as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.artifact import Artifact
from tilewright.base.dtypes import DType
from tilewright.base.target import host_cpu
from tilewright.compile.build import describe_program
from tilewright.compile.driver import Signature, front_end
from tilewright.execute.calls.checks import bind_sizes
from tilewright.execute.calls.complex_arrays import any_complex, makes_complex
from tilewright.execute.calls.outputs import keep
from tilewright.execute.calls.repeated_axes import repeating
from tilewright.execute.devices import device_of
from tilewright.runtime.exchange.libraries import is_tensor
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.tree.block_graph import AffineIndex, BlockCall, BlockGraph, BlockView, StorageLayout, straight
from tilewright.tree.syntax import Function, Param
from tilewright.tree.typed import ArgSpec, ArrayArg, ScalarArg
from tilewright.zyn.lazy.lazy_array import LazyArray, PendingValue, exchanged, spec_of

Shape = tuple[int, ...]
RunBlock = Callable[[Function, dict[str, object], str], object]
TakeView = Callable[[object, Shape, tuple[AffineIndex, ...]], object]
_APART = frozenset({"async", "parallel", "tile", "strict", "gpu_compute", "vectorizable", "unchecked", "deterministic", "activations"})
"""Attributes of blocks that run by themselves: they say when, where or how exactly. Hints without `@strict` go along with a joined block."""
_MOST_PARTS = 32
"""Blocks that are compiled together."""
_MOST_VARIANTS = 16
"""Programs of one pipeline, for different sizes that its views depend on."""


@dataclass(frozen=True, eq=False)
class _PendingBlock:
    """A block that waits: its arguments are views, arrays and numbers."""

    function: Function
    arguments: dict[str, object]
    values: tuple[PendingValue, ...]


class BlockFuser:
    """What is known of blocks that were joined before; one for a program."""

    def __init__(self) -> None:
        self.rules: dict[tuple[int, tuple[ArgSpec, ...]], tuple[Function, Artifact | None]] = {}
        self.made: dict[tuple[int, tuple[object, ...]], tuple[Function, list[tuple[DType, Shape]] | None]] = {}
        self.joined: dict[tuple[object, ...], BlockGraph] = {}
        self.variants: dict[str, int] = {}
        """How many programs were made of a pipeline's blocks."""

    def waiting(self, name: str, run: RunBlock, view: TakeView) -> LazyBlocks | None:
        """For a call of a pipeline. None for one whose views differ from call to call: each needs a program of its own."""
        return LazyBlocks(name, self, run, view) if self.variants.get(name, 0) <= _MOST_VARIANTS else None

    def results(self, function: Function, given: Mapping[str, object]) -> list[tuple[DType, Shape]] | None:
        """Types and shapes of what a block makes; None for one that runs by itself. Sizes that disagree are errors."""
        key = id(function), tuple(map(_form, given.values()))
        found = self.made.get(key)
        if found is None:
            found = function, self._results(function, given)
            keep(self.made, key, found)
        return found[1]

    def _results(self, function: Function, given: Mapping[str, object]) -> list[tuple[DType, Shape]] | None:
        if makes_complex(function) or any_complex(given.values()):
            return None  # code gives pairs of floats; a block of its own makes numbers of them
        specs = [_spec(value) for value in given.values()]
        if any(attribute.name in _APART for attribute in function.attributes) or None in specs:
            return None
        known = tuple(spec for spec in specs if spec is not None)
        rule = self._rule(function, known)
        if rule is None:
            return None
        shapes = {n: tuple(map(int, getattr(v, "shape", ()))) for n, v in given.items() if _is_array(v)}
        if any(1 in shape for shape in shapes.values()) and repeating(function, known, shapes):
            return None  # axes of extent 1 that repeat: code of its own is made for them
        sizes = bind_sizes(rule, shapes, {}, function.span)
        return [(output.dtype, tuple(s.evaluate(sizes) for s in output.shape)) for output in rule.outputs]

    def _rule(self, function: Function, specs: tuple[ArgSpec, ...]) -> Artifact | None:
        """What a block makes of arguments of these types; None where its results are no arrays, or as long as a number says."""
        found = self.rules.get((id(function), specs))
        if found is None:
            artifact: Artifact | None = describe_program(front_end(function, Signature(specs))[1], host_cpu())
            assert artifact is not None
            bound = {b.name for b in artifact.bindings}
            if any(not p.shape or any(not s.names <= bound for s in p.shape) for p in artifact.outputs):
                artifact = None
            found = self.rules[id(function), specs] = function, artifact
        return found[1]


class LazyBlocks:
    """The blocks of one call of a pipeline, or of one run of a program, that have not run."""

    def __init__(self, name: str, joiner: BlockFuser, run: RunBlock, view: TakeView) -> None:
        self._name, self._joiner, self._run, self._view = name, joiner, run, view
        self._blocks: list[_PendingBlock] = []
        self._values: list[PendingValue] = []
        self._device = ""

    def block(self, function: Function, arguments: Mapping[str, object], device: str) -> object:
        """What a block will have made: an array, or a tuple of them. `NotImplemented` where it has to run by itself."""
        given = {n: v.force() if isinstance(v, LazyArray) and v.is_computed else v for n, v in arguments.items()}
        results = self._joiner.results(function, given)
        if results is None:
            return NotImplemented
        name = self._place(given.values(), device)
        if self._blocks and (name != self._device or len(self._blocks) >= _MOST_PARTS):
            self.run_all()
            return self.block(function, arguments, device)
        values: list[PendingValue] = []
        found: list[LazyArray] = []
        for dtype, shape in results:
            places, extents = straight(len(shape)), (None,) * len(shape)
            values.append(
                PendingValue(len(self._values), dtype, shape, StorageLayout(extents, extents, places), self.run_all, self._view)
            )
            self._values.append(values[-1])
            found.append(LazyArray(values[-1], shape, extents, places))
        read = {n: v.view() if isinstance(v, LazyArray) else v for n, v in given.items()}
        self._blocks.append(_PendingBlock(function, read, tuple(values)))
        self._device = name
        return found[0] if len(found) == 1 else tuple(found)

    def _place(self, values: Iterable[object], device: str) -> str:
        """Where a block runs: where its arrays are, or where those it waits for are made."""
        if device != "auto":
            return device
        found = device_of([v for v in values if not isinstance(v, LazyArray)])
        return found or (self._device if any(isinstance(v, LazyArray) for v in values) else "auto")

    # -- running ----------------------------------------------------------------------------------------------------

    def finish(self, result: object) -> object:
        """The result of the pipeline, computed: what it does not need does not run."""
        self._run_for(self._values_in(result))
        return exchanged(result, lambda d: d.force())

    def _values_in(self, result: object) -> Iterable[PendingValue]:
        found: list[LazyArray] = []
        exchanged(result, lambda d: found.append(d))
        return dict.fromkeys(d.value for d in found)

    def finish_all(self, results: Mapping[str, object]) -> dict[str, object]:
        """The same for results by name."""
        self._run_for(self._values_in(tuple(results.values())))
        return {name: exchanged(value, lambda d: d.force()) for name, value in results.items()}

    def run_all(self) -> None:
        """Everything that somebody may still ask for."""
        self._run_for(dict.fromkeys(v for v in self._values if v.views))

    def _run_for(self, wanted: Iterable[PendingValue]) -> None:
        results = [v for v in wanted if v.array is None]
        blocks, self._blocks = self._blocks, []
        values, self._values = self._values, []
        if not results:
            return
        needed: list[_PendingBlock] = []
        open_ = {v.number for v in results}
        for block in reversed(blocks):
            if any(v.number in open_ for v in block.values):
                needed.insert(0, block)
                open_ |= {a.value for a in block.arguments.values() if isinstance(a, BlockView)}
        first = needed[0]
        if (
            len(needed) == 1
            and len(first.values) == len(results)
            and all(v.kept.places == straight(len(v.kept.places)) for v in results)
        ):
            made: object = self._run(first.function, dict(first.arguments), self._device)
            results = list(first.values)
        else:
            function, arguments = self._joined(needed, results)
            made = self._run(function, arguments, self._device)
        for value, array in zip(results, made if isinstance(made, tuple) else (made,), strict=True):
            value.array = array
        del values

    def _joined(self, blocks: Sequence[_PendingBlock], results: Sequence[PendingValue]) -> tuple[BlockGraph, dict[str, object]]:
        """The blocks as one function, and its arguments: an array that several take is one."""
        arguments: dict[str, object] = {}
        names: dict[int, str] = {}
        numbers = {v.number: n for n, v in enumerate(v for b in blocks for v in b.values)}
        wired: list[tuple[str | BlockView, ...]] = []
        for block in blocks:
            args: list[str | BlockView] = []
            for name, value in block.arguments.items():
                if isinstance(value, BlockView):
                    args.append(value._replace(value=numbers[value.value]))
                    continue
                own = names.get(id(value)) if not isinstance(value, int | float | complex | np.generic) else None
                if own is None:
                    own = _fresh(name, arguments)
                    arguments[own], names[id(value)] = value, own
                args.append(own)
            wired.append(tuple(args))
        leaving = tuple(numbers[v.number] for v in results)
        kept = tuple(tuple(v.kept for v in block.values) for block in blocks)
        key = self._name, tuple(id(b.function) for b in blocks), tuple(wired), kept, leaving, tuple(arguments)
        found = self._joiner.joined.get(key)
        if found is None:
            parts = tuple(BlockCall(b.function, args, own) for b, args, own in zip(blocks, wired, kept, strict=True))
            params = tuple(Param(name, span=blocks[0].function.span) for name in arguments)
            found = BlockGraph(self._name, params, None, (), "compute", parts=parts, results=leaving, span=blocks[0].function.span)
            keep(self._joiner.joined, key, found)
            self._joiner.variants[self._name] = self._joiner.variants.get(self._name, 0) + 1
        return found, arguments


def _fresh(name: str, taken: Mapping[str, object]) -> str:
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def _is_array(value: object) -> bool:
    return isinstance(value, LazyArray | np.ndarray | DeviceArray) or is_tensor(value)


def _form(value: Any) -> object:
    """All of an argument that decides about the shapes of results."""
    if _is_array(value):
        return type(value), value.dtype, value.shape
    return value.dtype if isinstance(value, np.generic) else type(value)


def _spec(value: object) -> ArgSpec | None:
    """The type of an argument, as far as shapes of results depend on it; None for one whose block runs by itself."""
    if isinstance(value, LazyArray):
        return spec_of(value)
    if isinstance(value, DeviceArray):
        return ArrayArg(value.dtype, value.ndim)
    if is_tensor(value):
        name = str(value.dtype).rpartition(".")[2]  # type: ignore[attr-defined]
        return ArrayArg(dtypes.by_name(name), value.ndim) if dtypes.is_name(name) else None  # type: ignore[attr-defined]
    if isinstance(value, np.ndarray):
        dtype = dtypes.from_numpy(value.dtype)
        return ArrayArg(dtype, value.ndim) if dtype is not None and value.ndim else None
    if isinstance(value, bool | np.bool_):
        return ScalarArg(dtypes.bool_)
    if isinstance(value, int | float):
        return ScalarArg(dtypes.i64 if isinstance(value, int) else dtypes.f64, weak=True)
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return ScalarArg(dtypes.complex128, weak=True)
    found = dtypes.from_numpy(value.dtype) if isinstance(value, np.generic) else None
    return ScalarArg(found) if found is not None else None
