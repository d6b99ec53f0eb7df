"""A pipeline as one function that can be compiled ahead of time. In: a program, the name of a pipeline, what its arguments are; out: a `WholePipeline`.

The pipeline runs with arrays that stand for others, and its blocks wait for each other as in any call. What would be launched is noted, and nothing is
computed. That happens twice, with other sizes and other numbers. Where both runs launch the same function, it is the function of all calls. Where they
do not, a size or a number has decided about a view, a loop or a condition outside blocks: then those that the caller gave become part of the code, and
calls check them. Whatever else happens outside blocks (another program, work on elements, numbers that are computed) is refused with its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.artifact import ArrayParam, Artifact, CallCheck
from tilewright.base.errors import TilewrightError, UserError
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.target import host_cpu
from tilewright.compile.build import describe_program
from tilewright.compile.driver import Signature, front_end
from tilewright.execute.calls.checks import bind_sizes
from tilewright.tree import syntax
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.syntax import Function
from tilewright.tree.typed import ArgSpec, ArrayArg, ScalarArg
from tilewright.zyn.host.block_runner import BlockRunner
from tilewright.zyn.module import ZynModule
from tilewright.zyn.module_links import RESULT, call_module
from tilewright.zyn.parallel import is_spread

Number = bool | int | float
_WAYS = ((16, 1009, 1.5, 1.0), (24, 2003, 2.5, 0.0))
"""Of two runs: extents nobody gave, the first whole number, the first other number, and what arrays are filled with."""


@record
class PipelineInput:
    """An argument: what it is, of an array the extents that are known, of a number its value where it has one."""

    spec: ArrayArg | ScalarArg
    extents: tuple[int | None, ...] = ()
    value: Number | None = None


@record
class WholePipeline:
    """One function, in the order of the pipeline's parameters. `fixed` are parameters that have one value in all calls."""

    function: Function
    args: tuple[ArgSpec, ...]
    fixed: tuple[tuple[str, Number], ...]
    sources: tuple[tuple[str, str], ...]
    """For each of its other parameters, the pipeline's."""
    extents: tuple[tuple[str, int, int], ...]
    """Extents that its code is made for: parameter, axis, extent."""
    types: tuple[tuple[str, syntax.Expr], ...]
    """The types that the pipeline gives its parameters, under the names of the function's, and its result, under ''."""

    def signature(self) -> Signature:
        return Signature(self.args)

    def checks(self, artifact: Artifact) -> tuple[CallCheck, ...]:
        """What calls check besides what the blocks need: extents the code is made for, and sizes that types name."""
        arrays = {p.name: p for p in artifact.inputs if isinstance(p, ArrayParam)}
        found = [
            CallCheck(arrays[name].shape[axis], "eq", Size.of(extent), f"axis {axis} of '{name}' must have {extent} element(s): this code was made for that")
            for name, axis, extent in self.extents
        ]  # fmt: skip
        named: dict[str, tuple[Size, str]] = {}
        for name, type_ in self.types:
            if name:
                found += _type_checks(type_, arrays[name].shape, f"'{name}'", named)
                continue
            outputs = artifact.outputs
            for part, output in zip(
                type_.items if isinstance(type_, syntax.Tuple) else (type_,), outputs, strict=False
            ):
                found += _type_checks(part, output.shape, f"the result '{output.name}'", named)
        return tuple(check for check in found if check.left != check.right)


def _type_checks(
    type_: syntax.Expr, shape: tuple[Size, ...], what: str, named: dict[str, tuple[Size, str]]
) -> list[CallCheck]:
    if not isinstance(type_, syntax.Index):
        return []
    axes = [i for i in type_.indices if not (isinstance(i, syntax.Name) and dtypes.is_name(i.id))]
    found: list[CallCheck] = []
    for axis, (wanted, size) in enumerate(zip(axes, shape, strict=False)):
        place = f"axis {axis} of {what}"
        if isinstance(wanted, syntax.Name):
            known, origin = named.setdefault(wanted.id, (size, place))
            found.append(
                CallCheck(size, "eq", known, f"'{wanted.id}' is {{right}} by {origin}, but {{left}} by {place}")
            )
        elif isinstance(wanted, syntax.Number) and isinstance(wanted.value, int):
            found.append(
                CallCheck(size, "eq", Size.of(wanted.value), f"{place} must have {wanted.value} element(s) by its type")
            )
        elif not isinstance(wanted, syntax.Slice):
            raise UserError.at(
                "TW020",
                f"{place} has a type with arithmetic or bounds, which an exported pipeline does not check",
                wanted.span,
                "name the size, and check it before the call",
            )
    return found


class _ClosedArray(np.ndarray):
    """An array whose elements nobody may use: it stands for others."""

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise _outside("calculates with an array")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise _outside(f"uses {getattr(func, '__name__', 'a function')} of an array")

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if not isinstance(found, np.ndarray):
            raise _outside("reads an element of an array")
        return found

    def __bool__(self) -> bool:
        raise _outside("asks what an array holds")

    def item(self, *_: Any) -> Any:
        raise _outside("reads an element of an array")

    def tolist(self) -> Any:
        raise _outside("reads the elements of an array")


def _outside(what: str) -> TilewrightError:
    return UserError.at(
        "TW020", f"the pipeline {what} outside its compute blocks, which cannot be exported", help="do it in a block"
    )


def _closed(dtype: dtypes.DType, shape: tuple[int, ...], fill: float) -> Any:
    made = np.broadcast_to(np.asarray(fill).astype(dtype.numpy), shape)
    size = int(np.prod(shape, dtype=np.float64)) if shape else 1
    return (made.copy() if size <= 1 << 20 else made).view(_ClosedArray)


@dataclass(eq=False)
class _Noted(BlockRunner):
    """Runs nothing. Notes the one program that would run, and what it is given."""

    name: str
    fill: float
    function: Function | None = None
    arguments: dict[str, object] | None = None
    made: tuple[object, ...] = ()
    joins_blocks = True

    def __call__(self, function: Function, arguments: dict[str, object], device: str) -> object:
        if self.function is not None:
            raise UserError.at(
                "TW020", f"pipeline '{self.name}' does not run as one program: '{self.function.name}' runs first (line {self.function.span.line}), then '{function.name}'",
                function.span, "blocks with attributes such as @strict, @async or @parallel run by themselves, and work between blocks keeps them apart",
            )  # fmt: skip
        if is_spread(function.attributes):
            raise UserError.at(
                "TW020", f"'{function.name}' runs on several devices, which cannot be exported", function.span
            )
        self.function, self.arguments = function, dict(arguments)
        specs = tuple(_spec(name, value) for name, value in arguments.items())
        artifact = describe_program(front_end(function, Signature(specs))[1], host_cpu())
        shapes = {n: tuple(map(int, v.shape)) for n, v in arguments.items() if isinstance(v, np.ndarray)}
        numbers = {n: v for n, v in arguments.items() if not isinstance(v, np.ndarray)}
        sizes = bind_sizes(artifact, shapes, {}, function.span, numbers)
        self.made = tuple(
            _closed(output.dtype, tuple(s.evaluate(sizes) for s in output.shape), self.fill)
            for output in artifact.outputs
        )
        return self.made[0] if len(self.made) == 1 else self.made


def _spec(name: str, value: object) -> ArgSpec:
    if isinstance(value, np.ndarray):
        dtype = dtypes.from_numpy(value.dtype)
        if dtype is not None and value.ndim:
            return ArrayArg(dtype, value.ndim)
    elif isinstance(value, bool | np.bool_):
        return ScalarArg(dtypes.bool_)
    elif isinstance(value, int | float) and not isinstance(value, np.generic):
        return ScalarArg(dtypes.i64 if isinstance(value, int) else dtypes.f64, weak=True)
    elif isinstance(value, np.generic) and (found := dtypes.from_numpy(value.dtype)) is not None:
        return ScalarArg(found)
    raise UserError.at("TW020", f"'{name}' is a {type(value).__name__}, which an exported function cannot take")


class _Differs(Exception):
    """Two runs with other sizes and numbers launch other functions; says why."""


@record
class _Launch:
    """What one run launches, and where each argument comes from: an input, or a number."""

    function: Function
    origins: tuple[tuple[str, str | Number], ...]
    specs: tuple[ArgSpec, ...]


class _Pipeline:
    """One pipeline of a program, with what its arguments are."""

    def __init__(self, module: ZynModule, name: str, inputs: Mapping[str, PipelineInput]) -> None:
        self.name, self.inputs, self.roots = name, inputs, module.roots
        functions = {s.name: s for s in module.tree.body if isinstance(s, Function)}
        shown = list(module.functions())
        if name not in functions or name not in shown:
            raise UserError.at(
                "TW016", f"the program has no pipeline '{name}'", help=f"it has {', '.join(shown) or 'none'}"
            )
        self.function = functions[name]
        passed = tuple(p.name for p in self.function.params if p.name in inputs)
        missing = [p.name for p in self.function.params if p.default is None and p.name not in inputs]
        self.tree = call_module(module.tree, self.function, passed)
        missing += [
            n
            for n in ZynModule(self.tree, _Noted(name, 0.0), self.roots).inputs()
            if n not in inputs and n not in missing
        ]
        if missing:
            raise UserError.at(
                "TW016",
                f"pipeline '{name}' needs '{missing[0]}'",
                self.function.span,
                "say what each argument is, as x=f32[*,64] or n=int",
            )

    def run(self, way: int, exact: bool) -> _Launch:
        """One run; with `exact`, extents and numbers that were given are what they are."""
        extent, whole, other, fill = _WAYS[way]
        values: dict[str, object] = {}
        for place, (name, given) in enumerate(self.inputs.items()):
            if isinstance(given.spec, ArrayArg):
                typed = self._typed(name)
                shape = tuple(
                    typed.get(axis, extent if not exact or e is None else e) for axis, e in enumerate(given.extents)
                )
                values[name] = _closed(given.spec.dtype, shape, fill)
                continue
            dtype = given.spec.dtype
            number: Number = (
                way == 0
                if dtype.is_bool
                else other + place / 64
                if dtype.is_float
                else whole + place
                if dtype.bits > 16
                else 97 + 3 * place + way
            )
            if exact and given.value is not None:
                number = given.value
            values[name] = number if given.spec.weak or dtype.is_bool else dtype.numpy.type(number)
        noted = _Noted(self.name, fill)
        result = ZynModule(self.tree, noted, self.roots).giving(RESULT).run(None, **values)[RESULT]
        if noted.function is None or noted.arguments is None:
            raise UserError.at(
                "TW020",
                f"pipeline '{self.name}' launches nothing",
                self.function.span,
                "its results must come from compute blocks",
            )
        leaves = result if isinstance(result, tuple) else (result,)
        if len(leaves) != len(noted.made) or any(a is not b for a, b in zip(leaves, noted.made, strict=True)):
            raise UserError.at(
                "TW020", f"the result of pipeline '{self.name}' is not what its blocks make, one array for each: it is a view, or made outside blocks",
                self.function.span, "return the results of blocks",
            )  # fmt: skip
        origins = tuple((name, self._origin(name, value, values, exact)) for name, value in noted.arguments.items())
        return _Launch(noted.function, origins, tuple(_spec(n, v) for n, v in noted.arguments.items()))

    def _typed(self, name: str) -> dict[int, int]:
        """The extents that the type of a parameter says."""
        type_ = next((p.type for p in self.function.params if p.name == name), None)
        indices = type_.indices if isinstance(type_, syntax.Index) else ()
        return {
            axis: i.value for axis, i in enumerate(indices) if isinstance(i, syntax.Number) and isinstance(i.value, int)
        }

    def _origin(self, name: str, value: Any, values: Mapping[str, object], exact: bool) -> str | Number:
        if isinstance(value, np.ndarray):
            found = [n for n, v in values.items() if v is value]
            if found:
                return found[0]
            raise UserError.at(
                "TW020",
                f"'{name}' is no argument of pipeline '{self.name}' and made by none of its blocks: it is a view, or made outside",
                self.function.span,
                "give it as an argument",
            )
        free = {
            n: v
            for n, v in values.items()
            if not isinstance(v, np.ndarray) and not (exact and self.inputs[n].value is not None)
        }
        if isinstance(value, bool | np.bool_):
            return name if name in free and free[name] == value else bool(value)
        same = [n for n, v in free.items() if type(v) is type(value) and v == value]
        if same:
            return same[0]
        return float(value) if isinstance(value, float | np.floating) else int(value)

    def launch(self, exact: bool) -> _Launch:
        """What all calls launch."""
        one, two = self.run(0, exact), self.run(1, exact)
        for (name, first), (_, second) in zip(one.origins, two.origins, strict=False):
            if first != second:
                raise _Differs(f"'{name}' is a number that is computed outside blocks from sizes or arguments")
        if one != two:
            raise _Differs("a view, a loop or a condition outside blocks depends on sizes or numbers")
        return one


def whole_pipeline(module: ZynModule, name: str, inputs: Mapping[str, PipelineInput]) -> WholePipeline:
    """The pipeline as one function, for arguments like these. Raises UserError where it is none."""
    pipeline = _Pipeline(module, name, inputs)
    exact = False
    try:
        launch = pipeline.launch(exact)
    except (_Differs, UserError) as failure:
        exact = True
        if not any(
            None not in given.extents if isinstance(given.spec, ArrayArg) else given.value is not None
            for given in inputs.values()
        ):
            raise _refused(pipeline, failure) from None
        try:
            launch = pipeline.launch(exact)
        except _Differs as again:
            raise _refused(pipeline, again) from None
    return _made(pipeline, launch, exact)


def _refused(pipeline: _Pipeline, failure: _Differs | UserError) -> TilewrightError:
    if isinstance(failure, UserError):
        return failure
    help = "give these extents and numbers with their values (x=f32[64,128] heads=4): then the code is made for them; or compute the number in a block"
    return UserError.at(
        "TW020",
        f"pipeline '{pipeline.name}' is another program for other arguments: {failure}",
        pipeline.function.span,
        help,
    )


def _made(pipeline: _Pipeline, launch: _Launch, exact: bool) -> WholePipeline:
    """The function with its parameters in the pipeline's order. Of joined blocks, a number that several take is one parameter, under its own name."""
    function, origins = launch.function, dict(launch.origins)
    specs = dict(zip(origins, launch.specs, strict=True))
    names = {name: name for name in origins}
    if isinstance(function, BlockGraph):
        taken = set(pipeline.inputs)
        for name, origin in origins.items():
            names[name] = origin if isinstance(origin, str) else name
            while not isinstance(origin, str) and names[name] in taken:
                names[name] += "_"
            taken.add(names[name])
        parts = tuple(
            replace(part, args=tuple(names[a] if isinstance(a, str) else a for a in part.args))
            for part in function.parts
        )
        span = function.span
        function = replace(
            function, parts=parts, params=tuple(syntax.Param(n, span=span) for n in dict.fromkeys(names.values()))
        )
    place = {name: number for number, name in enumerate(pipeline.inputs)}
    order = sorted(
        {names[n]: o for n, o in reversed(origins.items())}.items(),
        key=lambda item: place.get(item[1], len(place)) if isinstance(item[1], str) else len(place),
    )
    known = {names[n]: spec for n, spec in specs.items()}
    params = {p.name: p for p in function.params}
    function = replace(function, name=pipeline.name, params=tuple(params[name] for name, _ in order))
    sources = tuple((name, origin) for name, origin in order if isinstance(origin, str))
    extents = tuple(
        (name, axis, extent)
        for name, origin in sources if exact
        for axis, extent in enumerate(pipeline.inputs[origin].extents) if extent is not None
    )  # fmt: skip
    first = {origin: name for name, origin in reversed(sources)}
    types = tuple((first[p.name], p.type) for p in pipeline.function.params if p.type is not None and p.name in first)
    result = pipeline.function.result
    return WholePipeline(
        function, tuple(known[name] for name, _ in order), tuple((n, o) for n, o in order if not isinstance(o, str)), sources, extents,
        types + ((("", result),) if result is not None else ()),
    )  # fmt: skip
