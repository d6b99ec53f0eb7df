"""Compute blocks of a pipeline that wait, to run as one program.

In: blocks as a pipeline comes to them, with arrays and with what earlier blocks will have made. Out: `Deferred` arrays; nothing runs until somebody
needs numbers. Then all blocks that wait become one `Joined` function, which is compiled, fused and launched as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewright.api.checks import bind_sizes
from tilewright.api.deferred import Deferred, Value, exchanged, spec_of
from tilewright.api.execute import device_of
from tilewright.base import dtypes
from tilewright.base.artifact import Artifact
from tilewright.base.target import host_cpu
from tilewright.compile.build import describe_program
from tilewright.compile.driver import Signature, front_end
from tilewright.runtime.device_array import DeviceArray
from tilewright.tree.joined import Joined, Kept, Part, View, straight
from tilewright.tree.syntax import Function, Param
from tilewright.tree.typed import ArgSpec, ArrayArg, ScalarArg

RunBlock = Callable[[Function, dict[str, object], str], object]
_APART = frozenset({"async", "parallel", "tile", "strict", "schedule", "critical_path"})
"""Attributes of blocks that run by themselves: they say when, where or how exactly."""
_MOST_PARTS = 32
"""Blocks that are compiled together."""


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
        self.joined: dict[tuple[object, ...], Joined] = {}

    def rule(self, function: Function, specs: tuple[ArgSpec, ...]) -> Artifact | None:
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
        self._blocks: list[_Block] = []
        self._values: list[Value] = []
        self._device = ""

    def block(self, function: Function, arguments: Mapping[str, object], device: str) -> object:
        """What a block will have made: an array, or a tuple of them. `NotImplemented` where it has to run by itself."""
        if any(attribute.name in _APART for attribute in function.attributes):
            return NotImplemented
        given = {n: v.force() if isinstance(v, Deferred) and v.is_computed else v for n, v in arguments.items()}
        specs = tuple(_spec(value) for value in given.values())
        if None in specs:
            return NotImplemented
        name = self._place(given.values(), device)
        if self._blocks and (name != self._device or len(self._blocks) >= _MOST_PARTS):
            self.run_all()
            return self.block(function, arguments, device)
        rule = self._joiner.rule(function, specs)  # type: ignore[arg-type]
        if rule is None:
            return NotImplemented
        shapes = {
            n: tuple(map(int, v.shape)) for n, v in given.items() if isinstance(v, np.ndarray | DeviceArray | Deferred)
        }
        sizes = bind_sizes(rule, shapes, {}, function.span)
        values: list[Value] = []
        found: list[Deferred] = []
        for output in rule.outputs:
            shape = tuple(s.evaluate(sizes) for s in output.shape)
            rank = len(shape)
            kept = Kept((None,) * rank, (None,) * rank, straight(rank))
            values.append(Value(len(self._values), output.dtype, kept, self.run_all))
            self._values.append(values[-1])
            found.append(Deferred(values[-1], shape, (None,) * rank, straight(rank)))
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
                    args.append(replace(value, value=numbers[value.value]))
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
            self._joiner.joined[key] = found
        return found, arguments


def _fresh(name: str, taken: Mapping[str, object]) -> str:
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def _spec(value: object) -> ArgSpec | None:
    """The type of an argument, as far as shapes of results depend on it; None for one whose block runs by itself."""
    if isinstance(value, Deferred):
        return spec_of(value)
    if isinstance(value, DeviceArray):
        return ArrayArg(value.dtype, value.ndim)
    if isinstance(value, np.ndarray):
        dtype = dtypes.from_numpy(value.dtype)
        return ArrayArg(dtype, value.ndim) if dtype is not None and value.ndim else None
    if isinstance(value, bool | np.bool_):
        return ScalarArg(dtypes.bool_)
    if isinstance(value, int | float):
        return ScalarArg(dtypes.i64 if isinstance(value, int) else dtypes.f64, weak=True)
    found = dtypes.from_numpy(value.dtype) if isinstance(value, np.generic) else None
    return ScalarArg(found) if found is not None else None
