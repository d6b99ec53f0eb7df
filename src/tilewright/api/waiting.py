"""Compute blocks of a pipeline that wait, to run as one program.

In: blocks as a pipeline comes to them, with arrays and with what earlier blocks will have made. Out: `Deferred` arrays; nothing runs until somebody
needs numbers. Then all blocks that wait become one `Joined` function, which is compiled, fused and launched as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.api.checks import bind_sizes
from tilewright.api.deferred import Deferred, Value, exchanged, spec_of, viewed
from tilewright.api.execute import device_of
from tilewright.api.outputs import keep
from tilewright.base import dtypes
from tilewright.base.artifact import Artifact
from tilewright.base.dtypes import DType
from tilewright.base.target import host_cpu
from tilewright.compile.build import describe_program
from tilewright.compile.driver import Signature, front_end
from tilewright.runtime.device_array import DeviceArray
from tilewright.runtime.libraries import is_tensor
from tilewright.tree.joined import Joined, Kept, Part, Place, View, straight
from tilewright.tree.syntax import Function, Param
from tilewright.tree.typed import ArgSpec, ArrayArg, ScalarArg

Shape = tuple[int, ...]
RunBlock = Callable[[Function, dict[str, object], str], object]
_APART = frozenset({"async", "parallel", "tile", "strict", "schedule", "critical_path"})
"""Attributes of blocks that run by themselves: they say when, where or how exactly."""
_MOST_PARTS = 32
"""Blocks that are compiled together."""
_MOST_VARIANTS = 16
"""Programs of one pipeline, for different sizes that its views depend on."""


@dataclass(frozen=True, eq=False)
class _Block:
    """A block that waits: its arguments are views, arrays and numbers."""

    function: Function
    arguments: dict[str, object]
    values: tuple[Value, ...]


class Joiner:
    """What is known of blocks that were joined before; one for a program."""

    def __init__(self) -> None:
        self.rules: dict[tuple[int, tuple[ArgSpec, ...]], tuple[Function, Artifact | None]] = {}
        self.made: dict[tuple[int, tuple[object, ...]], tuple[Function, list[tuple[DType, Shape]] | None]] = {}
        self.joined: dict[tuple[object, ...], Joined] = {}
        self.variants: dict[str, int] = {}
        """How many programs were made of a pipeline's blocks."""

    def waiting(self, name: str, run: RunBlock) -> Waiting | None:
        """For a call of a pipeline. None for one whose views differ from call to call: each needs a program of its own."""
        return Waiting(name, self, run) if self.variants.get(name, 0) <= _MOST_VARIANTS else None

    def results(self, function: Function, given: Mapping[str, object]) -> list[tuple[DType, Shape]] | None:
        """Types and shapes of what a block makes; None for one that runs by itself. Sizes that disagree are errors."""
        key = id(function), tuple(map(_form, given.values()))
        found = self.made.get(key)
        if found is None:
            found = function, self._results(function, given)
            keep(self.made, key, found)
        return found[1]

    def _results(self, function: Function, given: Mapping[str, object]) -> list[tuple[DType, Shape]] | None:
        specs = [_spec(value) for value in given.values()]
        if any(attribute.name in _APART for attribute in function.attributes) or None in specs:
            return None
        rule = self._rule(function, tuple(spec for spec in specs if spec is not None))
        if rule is None:
            return None
        shapes = {n: tuple(map(int, getattr(v, "shape", ()))) for n, v in given.items() if _is_array(v)}
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


class Waiting:
    """The blocks of one call of a pipeline that have not run."""

    def __init__(self, name: str, joiner: Joiner, run: RunBlock) -> None:
        self._name, self._joiner, self._run = name, joiner, run
        # Somebody who notes what is done has to know of views of what was computed, too.
        note: Callable[..., object] | None = getattr(run, "add", None)
        self._look = viewed if note is None else _noted(note)
        self._blocks: list[_Block] = []
        self._values: list[Value] = []
        self._device = ""

    def block(self, function: Function, arguments: Mapping[str, object], device: str) -> object:
        """What a block will have made: an array, or a tuple of them. `NotImplemented` where it has to run by itself."""
        given = {n: v.force() if isinstance(v, Deferred) and v.is_computed else v for n, v in arguments.items()}
        results = self._joiner.results(function, given)
        if results is None:
            return NotImplemented
        name = self._place(given.values(), device)
        if self._blocks and (name != self._device or len(self._blocks) >= _MOST_PARTS):
            self.run_all()
            return self.block(function, arguments, device)
        values: list[Value] = []
        found: list[Deferred] = []
        for dtype, shape in results:
            places, extents = straight(len(shape)), (None,) * len(shape)
            values.append(
                Value(len(self._values), dtype, shape, Kept(extents, extents, places), self.run_all, self._look)
            )
            self._values.append(values[-1])
            found.append(Deferred(values[-1], shape, extents, places))
        read = {n: v.view() if isinstance(v, Deferred) else v for n, v in given.items()}
        self._blocks.append(_Block(function, read, tuple(values)))
        self._device = name
        return found[0] if len(found) == 1 else tuple(found)

    def _place(self, values: Iterable[object], device: str) -> str:
        """Where a block runs: where its arrays are, or where those it waits for are made."""
        if device != "auto":
            return device
        found = device_of([v for v in values if not isinstance(v, Deferred)])
        return found or (self._device if any(isinstance(v, Deferred) for v in values) else "auto")

    # -- running ----------------------------------------------------------------------------------------------------

    def finish(self, result: object) -> object:
        """The result of the pipeline, computed: what it does not need does not run."""
        found: list[Deferred] = []
        exchanged(result, lambda d: found.append(d))
        self._run_for(dict.fromkeys(d.value for d in found))
        return exchanged(result, lambda d: d.force())

    def run_all(self) -> None:
        """Everything that somebody may still ask for."""
        self._run_for(dict.fromkeys(v for v in self._values if v.views))

    def _run_for(self, wanted: Iterable[Value]) -> None:
        results = [v for v in wanted if v.array is None]
        blocks, self._blocks = self._blocks, []
        values, self._values = self._values, []
        if not results:
            return
        needed: list[_Block] = []
        open_ = {v.number for v in results}
        for block in reversed(blocks):
            if any(v.number in open_ for v in block.values):
                needed.insert(0, block)
                open_ |= {a.value for a in block.arguments.values() if isinstance(a, View)}
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

    def _joined(self, blocks: Sequence[_Block], results: Sequence[Value]) -> tuple[Joined, dict[str, object]]:
        """The blocks as one function, and its arguments: an array that several take is one."""
        arguments: dict[str, object] = {}
        names: dict[int, str] = {}
        numbers = {v.number: n for n, v in enumerate(v for b in blocks for v in b.values)}
        wired: list[tuple[str | View, ...]] = []
        for block in blocks:
            args: list[str | View] = []
            for name, value in block.arguments.items():
                if isinstance(value, View):
                    args.append(value._replace(value=numbers[value.value]))
                    continue
                own = names.get(id(value)) if not isinstance(value, int | float | np.generic) else None
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
            parts = tuple(Part(b.function, args, own) for b, args, own in zip(blocks, wired, kept, strict=True))
            params = tuple(Param(name, span=blocks[0].function.span) for name in arguments)
            found = Joined(
                self._name, params, None, (), "compute", (), (), parts, leaving, span=blocks[0].function.span
            )
            keep(self._joiner.joined, key, found)
            self._joiner.variants[self._name] = self._joiner.variants.get(self._name, 0) + 1
        return found, arguments


def _noted(note: Callable[..., object]) -> Callable[..., object]:
    def look(array: object, shape: Shape, places: tuple[Place, ...]) -> object:
        return note("index", lambda x: viewed(x, shape, places), {"x": array})

    return look


def _fresh(name: str, taken: Mapping[str, object]) -> str:
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def _is_array(value: object) -> bool:
    return isinstance(value, Deferred | np.ndarray | DeviceArray) or is_tensor(value)


def _form(value: Any) -> object:
    """All of an argument that decides about the shapes of results."""
    if _is_array(value):
        return type(value), value.dtype, value.shape
    return value.dtype if isinstance(value, np.generic) else type(value)


def _spec(value: object) -> ArgSpec | None:
    """The type of an argument, as far as shapes of results depend on it; None for one whose block runs by itself."""
    if isinstance(value, Deferred):
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
    found = dtypes.from_numpy(value.dtype) if isinstance(value, np.generic) else None
    return ScalarArg(found) if found is not None else None
