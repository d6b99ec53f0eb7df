"""`@tw.auto_parallel`: the loops of an ordinary function run in parallel, or are refused with the dependence that stands in the way.

In: a Python function whose `for` loops over `range` stand at its top level. Each of these becomes an explicit kernel with a thread for
every iteration; the statements between them run as ever. Before a loop first runs for arguments of certain types, its accesses are
looked at: two iterations that touch the same element, one of them writing, or a variable that goes from one iteration to the next, are
an error that names both lines. Nothing is guessed: what cannot be shown to be parallel is refused too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np

from tilewright.analysis.dependences import Dependence, find_dependence
from tilewright.api.parallel_gpu import is_argument
from tilewright.api.simt import GpuKernel
from tilewright.api.simt_arguments import read_leaves, split_values
from tilewright.api.simt_host import host_leaves
from tilewright.api.simt_language import gpu_thread_id
from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.frontend.simt import BuiltKernel, SimtArg, build_kernel
from tilewright.frontend.simt_build import Launch
from tilewright.frontend.simt_source import FunctionSource, read_source, surroundings
from tilewright.frontend.simt_tree import jumps, stored_names
from tilewright.runtime.device_array import DeviceArray

_START, _INDEX, _STEP = "loop_start", "__tilewright_index__", "__tilewright_step__"


class AutoParallel:
    """A function whose loops run in parallel. Call it like the function it was; `device=` is extra."""

    def __init__(self, function: Callable[..., object], block: int | tuple[int, ...] = 256, device: str | None = None) -> None:
        if not isinstance(function, FunctionType):
            raise UserError.at("TW009", f"auto_parallel was given a {type(function).__name__}", help="put it before a 'def'")
        functools.update_wrapper(self, function)
        self.python, self.block, self.device = function, block, device
        self._kernels: dict[tuple[object, ...], GpuKernel[...]] = {}
        self._proven: dict[tuple[object, ...], frozenset[str]] = {}
        """What was shown to be parallel, with the arrays that are written."""

    @functools.cached_property
    def source(self) -> FunctionSource:
        return read_source(self.python)

    def __call__(self, *args: object, **named: object) -> object:
        device = named.pop("device", self.device)
        bound = inspect.signature(self.python).bind(*args, **named)
        bound.apply_defaults()
        names: dict[str, Any] = dict(bound.arguments)
        around = surroundings(self.python)
        node = self.source.node
        assert isinstance(node, ast.FunctionDef)
        for statement in node.body:
            if isinstance(statement, ast.For):
                self._loop(statement, names, around, device)
            elif isinstance(statement, ast.Return):
                return None if statement.value is None else self._evaluated(statement.value, names, around)
            else:
                module = ast.Module([statement], [])
                exec(compile(module, self.source.place.source.path, "exec"), {**around, **names}, names)
        return None

    def _evaluated(self, expression: ast.expr, names: Mapping[str, Any], around: Mapping[str, object]) -> Any:
        return eval(compile(ast.Expression(expression), self.source.place.source.path, "eval"), {**around, **names})

    # -- one loop -------------------------------------------------------------------------------------------------

    def _loop(self, loop: ast.For, names: Mapping[str, Any], around: Mapping[str, object], device: object) -> None:
        turns = self._evaluated(loop.iter, names, around)
        span = self.source.place.head(loop)
        if not isinstance(turns, range) or not isinstance(loop.target, ast.Name) or loop.orelse:
            raise UserError.at("TW005", "this loop is not over a range with one index", span, "write: for i in range(...)")
        self._check_flow(loop, span)
        known = {**around, **names}
        loaded = [n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        captured = tuple(dict.fromkeys(n for n in loaded if n in known and is_argument(known[n]) and n not in stored_names(loop)))
        key = (loop.lineno, captured, turns.step)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._kernel(loop, captured, turns.step, known)
        values = [turns.start, *(known[name] for name in captured)]
        self._check_accesses(kernel, values, span, key)
        options = {} if device is None else {"device": device}
        kernel.over(len(turns), self.block)(*values, **options)

    def _kernel(self, loop: ast.For, captured: tuple[str, ...], step: int, known: Mapping[str, object]) -> GpuKernel[...]:
        """The loop's body for one iteration."""
        assert isinstance(loop.target, ast.Name)
        made = ast.parse(f"def {self.python.__name__}(): {loop.target.id} = {_START} + {_STEP} * {_INDEX}()").body[0]
        assert isinstance(made, ast.FunctionDef)
        for part in ast.walk(made.body[0]):
            ast.copy_location(part, loop.target)
        made.args.args = [ast.copy_location(ast.arg(name), loop) for name in (_START, *captured)]
        made.body += loop.body
        ast.copy_location(made, loop)
        names = {**known, _INDEX: gpu_thread_id, _STEP: step}
        kernel: GpuKernel[...] = GpuKernel(self.python)
        kernel.__dict__["source"] = FunctionSource(self.python.__name__, made, self.source.place, names)
        return kernel

    # -- what stands in the way -----------------------------------------------------------------------------------

    def _check_flow(self, loop: ast.For, span: Span) -> None:
        """Control flow that connects iterations."""
        for node in ast.walk(loop):
            if isinstance(node, ast.Break | ast.Return) and type(node) in jumps(loop, own=True):
                word = "break" if isinstance(node, ast.Break) else "return"
                place = self.source.span(node)
                raise UserError.at(
                    "TW012", f"the loop at {span.place()} is not parallel: '{word}' here ends its later iterations", place
                )

    def _check_accesses(self, kernel: GpuKernel[...], values: list[Any], span: Span, key: tuple[object, ...]) -> None:
        """Elements that two iterations touch, one of them writing."""
        parts = split_values(kernel.parameters, values)
        if any(not hasattr(v, "__array_interface__") and hasattr(v, "__cuda_array_interface__") for v in values):
            parts = [replace(p, value=_flat_stand_in(p.value)) for p in parts]
            _, args = read_leaves(kernel.parameters, parts, gpu=False)
        else:
            _, args, _ = host_leaves(kernel.parameters, values)
        proof = (*key, tuple(args))
        written = self._proven.get(proof)
        if written is None:
            built = self._one_iteration(kernel, args, span)
            found = find_dependence(built.kernel)
            if found is not None:
                raise _refusal(found, span)
            written = self._proven[proof] = built.written
        names = [p.name for p in kernel.parameters]
        reaches = {name: reach for name, value in zip(names, values, strict=True) if (reach := _reach(value)) is not None}
        for name in sorted(written):
            for other, (low, high) in reaches.items():
                if other != name and low < reaches[name][1] and reaches[name][0] < high:
                    raise UserError.at(
                        "TW012", f"the loop is not shown to be parallel: '{name}', which it writes, overlaps '{other}'", span
                    )

    def _one_iteration(self, kernel: GpuKernel[...], args: Sequence[SimtArg], span: Span) -> BuiltKernel:
        """The kernel of one iteration, which finds variables that have their values from another."""
        try:
            return build_kernel(kernel.source, kernel.parameters, args, Launch((1, 1, 1), 1))
        except UserError as error:
            name = re.match(r"'(\w+)' (?:has|may have) no value", error.diagnostics[0].message)
            stores = [
                n
                for n in ast.walk(kernel.source.node)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and name and n.id == name[1]
            ]
            if name is None or not stores:
                raise
            raise UserError.at(
                "TW012", f"the loop at {span.place()} is not parallel: '{name[1]}' goes from one iteration to the next: read here, "
                f"assigned at {self.source.span(stores[0]).place()}", error.span, "sum with tw.gpu_reduce, or tw.atomic_add into an array",
            ) from None  # fmt: skip


def _reach(value: object) -> tuple[int, int] | None:
    """The addresses an array's elements lie between."""
    if isinstance(value, DeviceArray):
        low, high = value.reach()
        return value.pointer + low, value.pointer + high
    if isinstance(value, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(value)
        return int(low), int(high)
    form: Any = getattr(value, "__cuda_array_interface__", None)
    if form is None:
        return None
    size = np.dtype(form["typestr"]).itemsize
    strides = form.get("strides") or ()
    extent = (
        sum((n - 1) * abs(s) for n, s in zip(form["shape"], strides)) if strides else size * (int(np.prod(form["shape"])) - 1)
    )
    return form["data"][0], form["data"][0] + extent + size


def _flat_stand_in(value: object) -> object:
    """A host array of the same type as a device array, without its elements."""
    if isinstance(value, DeviceArray):
        return np.empty((1,) * value.ndim, value.dtype.numpy)
    if hasattr(value, "__cuda_array_interface__"):
        form: Any = value.__cuda_array_interface__
        return np.empty((1,) * len(form["shape"]), np.dtype(form["typestr"]))
    return value


def _refusal(found: Dependence, span: Span) -> UserError:
    what = "written" if found.second_writes else "read"
    if found.second is found.first:
        message = f"'{found.name}' is written here by more than one iteration"
    else:
        apart = f", {found.distance} iteration{'s' if found.distance != 1 else ''} apart" if found.distance else ""
        message = f"'{found.name}' is written here and {what} at {found.second.span.place()} by another iteration{apart}"
    error = UserError.at("TW012", f"the loop at {span.place()} is not parallel: {message}", found.first.span, found.help)
    assert isinstance(error, UserError)
    return error


def auto_parallel(
    function: Callable[..., object] | None = None, *, block: int | tuple[int, ...] = 256, device: str | None = None
) -> AutoParallel | Callable[[Callable[..., object]], AutoParallel]:
    """Run the loops at a function's top level in parallel, one thread for each iteration; what is not parallel is refused."""
    if function is not None:
        return AutoParallel(function)
    return lambda wrapped: AutoParallel(wrapped, block, device)
