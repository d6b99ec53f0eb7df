"""Explicit kernels of a Python file through the front end, without running the file.

In: the definitions under `@tw.gpu` and `@tw.cpu`, and the file around them. Out: the errors that there are whatever the arguments and the launch
are. A file is read, not executed: of the names around a kernel only imports of well-known modules, plain constants and functions have a value
here. A kernel that uses others is left to its compilation. What is not annotated is assumed in several ways, and an error that one of
them does not give is none.
"""

from __future__ import annotations

import ast
import builtins
import math
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType

import numpy as np

from tilewright.base.dtypes import DType, f16, f32, i32, i64, u8
from tilewright.base.errors import Diagnostic, TilewrightError, UserError
from tilewright.frontend.python.expressions import SourcePlace
from tilewright.frontend.python.names import PACKAGE
from tilewright.frontend.simt.build import LaunchShape
from tilewright.frontend.simt.kernels import Parameter, SimtArg, build_kernel, read_parameters
from tilewright.frontend.simt.source import FunctionSource
from tilewright.tree.typed import ArrayArg, ScalarArg

_MODULES = {"math": math, "numpy": np}
_UNKNOWN = object()
_ALIGN = 16
_ASSUMED: tuple[tuple[DType, str, LaunchShape], ...] = (
    (f32, "array 1", LaunchShape((256, 1, 1), 1)),
    (i32, "number int", LaunchShape((16, 16, 1), 2)),
    (f16, "array 2", LaunchShape((32, 1, 1), 3, shared_bytes=32768)),
    (u8, "number float", LaunchShape((128, 1, 1), 1, cluster=2)),
)
"""Element type, what a parameter is that nothing tells about, and the launch."""
_SERIAL = LaunchShape((1, 1, 1), 1, vendor="cpu")


def values_around(module: ast.Module, place: SourcePlace) -> dict[str, object]:
    """The names of a file whose values its text shows."""
    known: dict[str, object] = {}
    for statement in module.body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                found = sys.modules[PACKAGE] if alias.name == PACKAGE else _MODULES.get(alias.name, _UNKNOWN)
                _set(known, (alias.asname or alias.name).split(".")[0], found if alias.asname or "." not in alias.name else _UNKNOWN)
        elif isinstance(statement, ast.ImportFrom):
            home = sys.modules[PACKAGE] if statement.module == PACKAGE else _MODULES.get(statement.module or "", _UNKNOWN)
            for alias in statement.names:
                _set(known, alias.asname or alias.name, getattr(home, alias.name, _UNKNOWN))
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                _assign(known, target, _value(statement.value, known))
        elif isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
            _set(known, statement.name, _stand_in(statement, place, known))
        else:
            for name in _stored(statement):
                _set(known, name, _UNKNOWN)
    return {name: value for name, value in known.items() if value is not _UNKNOWN}


def _set(known: dict[str, object], name: str, value: object) -> None:
    known[name] = _UNKNOWN if name in known else value  # which of two it is depends on when the kernel is called


def _assign(known: dict[str, object], target: ast.expr, value: object) -> None:
    if isinstance(target, ast.Name):
        _set(known, target.id, value)
    elif isinstance(target, ast.Tuple | ast.List):
        items = value if isinstance(value, tuple) and len(value) == len(target.elts) else (_UNKNOWN,) * len(target.elts)
        for part, item in zip(target.elts, items, strict=True):
            _assign(known, part, item)


def _value(node: ast.expr, known: Mapping[str, object]) -> object:
    """What an expression of numbers, texts, tuples and names of modules is."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, known)
        return getattr(owner, node.attr, _UNKNOWN) if any(owner is m for m in (*_MODULES.values(), sys.modules[PACKAGE])) else _UNKNOWN
    if isinstance(node, ast.Tuple):
        items = tuple(_value(item, known) for item in node.elts)
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
    if isinstance(node, ast.UnaryOp | ast.BinOp):
        parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        values = [_value(part, known) for part in parts]
        if all(isinstance(v, int | float) and abs(v) < 1 << 40 for v in values) and not isinstance(getattr(node, "op", None), ast.Pow | ast.LShift):
            names = dict(zip("ab", values, strict=False))
            shown: ast.expr = ast.UnaryOp(node.op, ast.Name("a", ast.Load())) if isinstance(node, ast.UnaryOp) else ast.BinOp(ast.Name("a", ast.Load()), node.op, ast.Name("b", ast.Load()))
            code = compile(ast.fix_missing_locations(ast.Expression(shown)), "<constant>", "eval")
            try:
                return eval(code, {"__builtins__": {}}, names)
            except (ArithmeticError, TypeError, ValueError):
                return _UNKNOWN
    return _UNKNOWN


def _stand_in(node: ast.FunctionDef, place: SourcePlace, names: Mapping[str, object]) -> FunctionType:
    """A function that is read, never called."""

    def read() -> None: ...

    assert isinstance(read, FunctionType)
    read.__name__, read.__module__ = node.name, "__main__"
    read.__simt_source__ = FunctionSource(node.name, node, place, names)  # type: ignore[attr-defined]
    return read


def body_errors(kernel: ast.FunctionDef, place: SourcePlace, known: Mapping[str, object], around: set[str], serial: bool) -> list[Diagnostic]:
    """What is wrong with a kernel for all arguments. `around` are the names that the file gives some value."""
    if not _is_known(kernel, known, around, set()):
        return []
    source = FunctionSource(kernel.name, kernel, place, known)
    try:
        parameters = read_parameters(source)
    except UserError as error:
        return list(error.diagnostics)
    if any(p.form == "struct" for p in parameters):
        return []
    found: list[dict[object, Diagnostic]] = []
    for dtype, form, launch in _ASSUMED:
        args = [_argument(p, kernel, dtype, form) for p in parameters]
        try:
            build_kernel(source, parameters, args, _SERIAL if serial else launch)
        except UserError as error:
            found.append({(d.code, d.span.line, d.span.column): d for d in error.diagnostics})
        except TilewrightError:
            return []  # what only a compilation finds is its own to say
        else:
            return []
    return [d for place_of, d in found[0].items() if all(place_of in other for other in found)]


def _is_known(function: ast.FunctionDef, known: Mapping[str, object], around: set[str], seen: set[str]) -> bool:
    """Whether all that a function uses of its file has a value here, or none anywhere."""
    own = set(_stored(function)) | {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
    parts = [*function.body, *function.args.defaults, *(d for d in function.args.kw_defaults if d), *(a.annotation for a in _arguments(function) if a.annotation)]
    for node in (n for part in parts for n in ast.walk(part)):
        if not isinstance(node, ast.Name) or node.id in own or node.id in seen:
            continue
        if node.id in around and node.id not in known and not hasattr(builtins, node.id):
            return False
        helper = getattr(known.get(node.id), "__simt_source__", None)
        if helper is not None and not _is_known(helper.node, known, around, seen | {node.id}):
            return False
    return True


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _argument(parameter: Parameter, kernel: ast.FunctionDef, dtype: DType, form: str) -> SimtArg:
    chosen = parameter.dtype or dtype
    if parameter.form == "number" or isinstance(parameter.default, int | float):
        if parameter.dtype is None:
            annotation = next((a.annotation for a in _arguments(kernel) if a.arg == parameter.name), None)
            whole = (isinstance(annotation, ast.Name) and annotation.id in ("int", "bool")) or (annotation is None and isinstance(parameter.default, int))
            return ScalarArg(i64 if whole else f32, weak=True)
        return ScalarArg(chosen)
    if parameter.form == "buffer":
        return ArrayArg(chosen, 1, None, _ALIGN)
    rank = _rank(parameter.name, kernel)
    if rank and form == "array 2":
        rank += 1  # an index may stand for a row
    if rank is None and parameter.form != "array" and form.startswith("number"):
        return ScalarArg(i64 if form == "number int" else f32, weak=True)
    return ArrayArg(chosen, rank if rank else 2 if form == "array 2" else 1, None, _ALIGN)


def _rank(name: str, kernel: ast.FunctionDef) -> int | None:
    """The axes of a parameter as indices show them; None where nothing shows that it is an array, 0 where something does, but not its rank."""
    found: int | None = None
    for node in ast.walk(kernel):
        if isinstance(node, ast.Subscript):
            count = 0
            inner: ast.expr = node
            while isinstance(inner, ast.Subscript):
                count += len(inner.slice.elts) if isinstance(inner.slice, ast.Tuple) else 1
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == name:
                found = max(found or 0, count)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape" and isinstance(node.value.value, ast.Name):
            if node.value.value.id == name and isinstance(node.targets[0], ast.Tuple):
                found = max(found or 0, len(node.targets[0].elts))
        elif (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name and node.attr in ("shape", "size", "ndim", "dtype")) or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and any(isinstance(a, ast.Name) and a.id == name for a in node.args)):
            found = found or 0
    return found


def _stored(root: ast.AST) -> Iterator[str]:
    for node in ast.walk(root):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node is not root:
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
    if isinstance(root, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield root.name
