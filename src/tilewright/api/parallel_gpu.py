"""`parallel_gpu(n, block)`: a region of ordinary Python code that runs as an explicit kernel, where it stands.

In: a function of one index under `@tw.parallel_gpu(n, block)`. It runs at once for every index below n; the arrays and numbers around it
that it uses become arguments of the kernel, so arrays are written in place. What was compiled for a region is kept: it runs again, in
a loop say, without being read again, whatever the numbers are then.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType

import numpy as np

from tilewright.api.simt import GpuKernel
from tilewright.api.simt_language import gpu_thread_id
from tilewright.base.errors import UserError
from tilewright.frontend.simt_source import FunctionSource, read_source, surroundings
from tilewright.frontend.simt_tree import local_names
from tilewright.runtime.device_array import DeviceArray

_INDEX = "__tilewright_index__"
_MOST_REGIONS = 256
_regions: dict[tuple[CodeType, tuple[str, ...]], tuple[GpuKernel[...], FunctionType]] = {}
"""By the code of a region and the names it takes from around it; the function is kept, for its code."""


def parallel_gpu(
    n: int, block: int | tuple[int, ...] = 256, *, device: str | None = None, shared: int = 0, stream: object = None
) -> Callable[[Callable[[int], object]], None]:
    """Run the function that follows for every index below `n`, in blocks of `block` threads. Its name stands for None afterwards."""

    def run(function: Callable[[int], object]) -> None:
        if not isinstance(function, FunctionType):
            raise UserError.at(
                "TW009", f"parallel_gpu was given a {type(function).__name__}", help="put it before a 'def' with one parameter"
            )
        names = surroundings(function)
        captured = tuple(name for name in _loaded(function) if name in names and is_argument(names[name]))
        kernel = _kernel(function, captured, names)
        options = {} if device is None else {"device": device}
        kernel.over(n, block, shared, stream)(*(names[name] for name in captured), **options)

    return run


def _loaded(function: FunctionType) -> tuple[str, ...]:
    """Names a region may take from around it, in a certain order."""
    code = function.__code__
    return tuple(dict.fromkeys((*code.co_freevars, *_global_names(code))))


def _global_names(code: CodeType) -> list[str]:
    found = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += [*_global_names(constant), *(n for n in constant.co_freevars if n not in code.co_cellvars)]
    return found


def is_argument(value: object) -> bool:
    """Whether a value becomes an argument: arrays and numbers do, all else is read with the region."""
    if isinstance(value, bool | int | float | np.generic | np.ndarray | DeviceArray):
        return True
    if isinstance(value, type):
        return False
    return hasattr(value, "__cuda_array_interface__") or hasattr(value, "__dlpack__")


def _kernel(function: FunctionType, captured: tuple[str, ...], names: Mapping[str, object]) -> GpuKernel[...]:
    key = (function.__code__, captured)
    found = _regions.get(key)
    if found is None:
        if len(_regions) >= _MOST_REGIONS:
            _regions.pop(next(iter(_regions)))
        kernel: GpuKernel[...] = GpuKernel(function)
        kernel.__dict__["source"] = _source(function, captured, names)
        found = _regions[key] = kernel, function
    return found[0]


def _source(function: FunctionType, captured: tuple[str, ...], names: Mapping[str, object]) -> FunctionSource:
    """The region as a kernel: what it captures are its parameters, its index is the thread's number."""
    source = read_source(function)
    node = source.node
    assert isinstance(node, ast.FunctionDef)
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    if len(parameters) != 1 or node.args.vararg is not None or node.args.kwarg is not None:
        raise UserError.at(
            "TW016", f"the region '{node.name}' takes {len(parameters)} parameters", source.head(), "give it one: the index"
        )
    clash = sorted(local_names(node) & set(captured))
    if clash:
        raise UserError.at(
            "TW015",
            f"the region assigns to '{clash[0]}', which is of the code around it",
            source.head(),
            "write to an element of an array",
        )
    made = copy.copy(node)
    index = parameters[0]
    first = ast.Assign([ast.Name(index.arg, ast.Store())], ast.Call(ast.Name(_INDEX, ast.Load()), [], []))
    for part in ast.walk(first):
        ast.copy_location(part, index)
    made.args = ast.arguments([], [_parameter(name, node) for name in captured], None, [], [], None, [])
    made.body = [first, *node.body]
    made.decorator_list, made.returns = [], None
    return FunctionSource(source.name, made, source.place, {**names, _INDEX: gpu_thread_id})


def _parameter(name: str, node: ast.FunctionDef) -> ast.arg:
    return ast.copy_location(ast.arg(name), node)
