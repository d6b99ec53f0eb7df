"""What a name means inside a Python kernel: a variable, a word of Tilewright, a captured constant, or something unusable.

In: a function's globals and closure, or the imports and constants of a file that is not executed. Out: for each name that is not
local to the kernel an `Expr`-making `Meaning`. A kernel sees captured numbers as literals; everything else it needs it must be passed.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import math
import numbers
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.frontend.critical.layout import StateLayout
from tilewright.tree.structs.layout import StructField, StructLayout, layout_of
from tilewright.tree.syntax import Function

PACKAGE = "tilewright"
_NOTHING: Mapping[str, object] = MappingProxyType({})
GIVEN: ContextVar[Mapping[str, object]] = ContextVar("given names", default=_NOTHING)
"""Values of names around kernels of a file that is not executed, from the command line."""


@record
class Word:
    """A word of the kernel language: a function, a dtype, `Array`."""

    name: str


@record
class Constant:
    value: bool | int | float | complex | str


@record
class Opaque:
    """A captured object that is no number; members of it may still be."""

    value: object


@record
class Called:
    """A kernel, to be called from another: `key` tells it from others, `read` gives its tree."""

    name: str
    key: object
    read: Callable[[], Function]


@record
class StructWord:
    """A class of `tw.State`, or a structured dtype of NumPy."""

    layout: StructLayout


Meaning = Word | Constant | Opaque | Called | StructWord
"""None in the functions below means that the name is unknown."""

_CONSTANTS = {"inf": math.inf, "nan": math.nan, "pi": math.pi, "e": math.e}
_MATH_NAMES = {"fabs": "abs", "fmin": "min", "fmax": "max", "gamma": "tgamma"}
_FILE_MODULES = ("math", "numpy")
_PLAIN = frozenset({"Array", "InOut", "empty", "empty_like", "full", "grid", "ones", "zeros"})
"""Words that nearly all kernels have. Nothing is asked of their objects, which are made from a large table, but that they are neither modules nor dtypes."""
"""Modules whose members a file may use; they are known without running the file."""


class Environment:
    """The names around a kernel."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = dict(names)

    def define(self, name: str, meaning: Meaning) -> None:
        self._names[name] = meaning

    def meaning(self, name: str) -> Meaning | None:
        if name in self._names:
            return classify(self._names[name])
        if hasattr(builtins, name):
            return Word(name)
        return None

    @classmethod
    def of_function(cls, function: Callable[..., object]) -> Environment:
        return cls(surroundings(function))

    @classmethod
    def of_file(cls, module: ast.Module) -> Environment:
        """From the imports and the numeric constants at the top level; nothing is executed."""
        names: dict[str, object] = {}
        for statement in module.body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    _bind_import(names, alias)
            elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
                for alias in statement.names:
                    _bind_member(names, statement.module or "", alias)
            elif isinstance(statement, ast.ClassDef):
                names[statement.name] = _state_class(statement, names) or Opaque(None)
            elif isinstance(statement, ast.Assign):
                value = _constants(statement.value, names)
                value = _structured_dtype(statement.value, names) if value is None else value
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        names[target.id] = Opaque(None) if value is None else value
                    elif isinstance(target, ast.Tuple | ast.List):
                        _bind_parts(names, target, value)
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
                value = _constants(statement.value, names)
                names[statement.target.id] = Opaque(None) if value is None else value
        return cls({**names, **GIVEN.get()})


def is_package(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__ == PACKAGE


def surroundings(function: Callable[..., object]) -> dict[str, object]:
    """The values of names around a function: its globals, and its closure before them."""
    names: dict[str, object] = dict(getattr(function, "__globals__", {}))
    code = getattr(function, "__code__", None)
    for name, cell in zip(code.co_freevars if code else (), getattr(function, "__closure__", None) or ()):
        try:
            names[name] = cell.cell_contents
        except ValueError:
            # Not assigned yet when the kernel is defined: unknown, not the global of the same name.
            names.pop(name, None)
    return names


def classify(value: object) -> Meaning:
    """What a captured object means in a kernel."""
    if isinstance(value, Word | Constant | Opaque | Called | StructWord):
        return value
    if isinstance(value, ModuleType):
        return Opaque(value)
    if isinstance(value, np.dtype):
        return StructWord(layout_of(value, "a dtype")) if value.names is not None else Opaque(value)
    if isinstance(value, type) and isinstance(layout := value.__dict__.get("__layout__"), StateLayout) and layout.fields:
        return StructWord(layout_of(layout.numpy(), layout.name, name=layout.name, defaults=value.__dict__.get("__defaults__")))
    if isinstance(value, DType):
        return Word(value.name)
    if isinstance(value, bool | str):
        return Constant(value)
    if isinstance(value, numbers.Integral):
        return Constant(int(value))
    if isinstance(value, numbers.Real):
        return Constant(float(value))
    if isinstance(value, numbers.Complex):
        return Constant(complex(value))
    if type(value).__module__ == "numpy" and type(value).__name__ == "bool":
        return Constant(bool(value))
    python = getattr(value, "python", None) if type(value).__module__ == f"{PACKAGE}.execute.kernel" else None
    if callable(python):
        owner: Any = value
        return Called(python.__name__, python, lambda: owner.function)
    name = None if has_words(value) else _word(value)
    return Opaque(value) if name is None else Word(name)


def has_words(value: object) -> bool:
    """Whether its members are words: `tw.random`."""
    return getattr(value, "__simt__", None) == "random"


def member(owner: Opaque, name: str) -> Meaning | None:
    """`owner.name`, for a module or any captured object."""
    value = owner.value
    if is_package(value):
        if name in _CONSTANTS:
            return Constant(_CONSTANTS[name])
        if name in _PLAIN:
            return Word(name)
        found = getattr(value, name, None)
        if isinstance(found, ModuleType) or has_words(found):
            return Opaque(found)
        return Word(found.name if isinstance(found, DType) else name)
    if not hasattr(value, name):
        return Word(f"random.{name}") if has_words(value) else None
    return classify(getattr(value, name))


def _word(value: object) -> str | None:
    """The spelling of an object the kernel language knows, or None."""
    spelled = getattr(value, "__simt__", None)
    if isinstance(spelled, str) and "." in spelled:
        return spelled
    name = getattr(value, "__name__", None)
    module = getattr(value, "__module__", None)
    if isinstance(value, ModuleType) or not isinstance(name, str):
        return None
    package = sys.modules.get(PACKAGE)
    if package is not None and getattr(package, name, None) is value:
        return name
    if module == "math":
        return _MATH_NAMES.get(name, name)
    if module == "builtins" and getattr(builtins, name, None) is value:
        return name
    if isinstance(module, str) and module.split(".")[0] == PACKAGE:
        return name
    if module == "numpy" and isinstance(value, type) and dtypes.is_name(name):
        return name
    return None


def _state_class(node: ast.ClassDef, names: Mapping[str, object]) -> StructWord | None:
    """The struct that a class of `tw.State` in a file is; None for other classes, and for those with fields that are no numbers."""
    bases = [_file_meaning(base, names) for base in node.bases]
    if Word("State") not in bases:
        return None
    fields: list[StructField] = []
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        said = _file_meaning(statement.annotation, names)
        default = None if statement.value is None else _constant(statement.value, names)
        number = default if isinstance(default, bool | int | float) else 0
        if isinstance(said, StructWord):
            fields.append(StructField(statement.target.id, said.layout))
        elif isinstance(said, Word) and dtypes.is_name(said.name):
            word = {"int": "i64", "float": "f64"}.get(said.name, said.name)
            fields.append(StructField(statement.target.id, dtypes.by_name(word), number))
        else:
            return None
    return StructWord(StructLayout(tuple(fields), node.name)) if fields else None


def _file_meaning(node: ast.expr, names: Mapping[str, object]) -> Meaning | None:
    """What a name in a file means, or a member of a module that it imports."""
    if isinstance(node, ast.Name):
        return classify(names[node.id]) if node.id in names else Word(node.id) if hasattr(builtins, node.id) else None
    if isinstance(node, ast.Attribute):
        owner = _file_meaning(node.value, names)
        return member(owner, node.attr) if isinstance(owner, Opaque) else None
    return None


def _structured_dtype(node: ast.expr, names: Mapping[str, object]) -> np.dtype | None:
    """`np.dtype([("x", "f4"), …])` in a file; None where it is something else, or not all of it is literal."""
    if (
        not isinstance(node, ast.Call)
        or not node.args
        or not isinstance(node.func, ast.Attribute)
        or not isinstance(node.func.value, ast.Name)
    ):
        return None
    if node.func.attr != "dtype" or names.get(node.func.value.id) is not np:
        return None
    try:
        found = np.dtype(ast.literal_eval(node.args[0]))
    except (ValueError, TypeError, SyntaxError):
        return None
    return found if found.names is not None else None


def _bind_import(names: dict[str, object], alias: ast.alias) -> None:
    if alias.name == PACKAGE or alias.name in _FILE_MODULES:
        names[alias.asname or alias.name] = importlib.import_module(alias.name)
    else:
        names[alias.asname or alias.name.split(".")[0]] = Opaque(None)


def _bind_member(names: dict[str, object], module: str, alias: ast.alias) -> None:
    name = alias.asname or alias.name
    if module == PACKAGE:
        found = member(Opaque(importlib.import_module(PACKAGE)), alias.name)
        names[name] = found if isinstance(found, Opaque) and has_words(found.value) else _CONSTANTS.get(alias.name, Word(alias.name))
    elif module in _FILE_MODULES and hasattr(importlib.import_module(module), alias.name):
        names[name] = getattr(importlib.import_module(module), alias.name)
    elif module != "__future__":
        names[name] = Opaque(None)


def _bind_parts(names: dict[str, object], target: ast.Tuple | ast.List, value: object) -> None:
    """`S, P = 4, 2`"""
    parts = value if isinstance(value, tuple) and len(value) == len(target.elts) else (None,) * len(target.elts)
    for item, part in zip(target.elts, parts):
        if isinstance(item, ast.Name):
            names[item.id] = Opaque(None) if part is None else part


def _constants(node: ast.expr, names: Mapping[str, object]) -> object:
    """The value of a constant, or of a tuple, list or dict of constants; None where it is something else."""
    if isinstance(node, ast.Tuple | ast.List):
        parts = tuple(_constants(item, names) for item in node.elts)
        return parts if None not in parts else None
    if isinstance(node, ast.Dict):
        table = {key.value if isinstance(key, ast.Constant) else None: _constants(value, names) for key, value in zip(node.keys, node.values)}
        return table if None not in table and None not in table.values() else None
    return _constant(node, names)


def _constant(node: ast.expr, names: Mapping[str, object]) -> bool | int | float | complex | str | None:
    """The value of a simple constant expression: literals, earlier constants, + - * / // % ** and signs."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, bool | int | float | complex | str) else None
    if isinstance(node, ast.Name):
        meaning = classify(names[node.id]) if node.id in names else None
        return meaning.value if isinstance(meaning, Constant) else None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
        owner = classify(names[node.value.id])
        found = member(owner, node.attr) if isinstance(owner, Opaque) else None
        return found.value if isinstance(found, Constant) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _constant(node.operand, names)
        return -value if isinstance(value, int | float | complex) else None
    if isinstance(node, ast.BinOp):
        left, right = _constant(node.left, names), _constant(node.right, names)
        if isinstance(left, int | float) and isinstance(right, int | float):
            return _arithmetic(node.op, left, right)
    return None


def _arithmetic(op: ast.operator, left: int | float, right: int | float) -> int | float | None:
    result: int | float | None = None
    try:
        if isinstance(op, ast.Add):
            result = left + right
        elif isinstance(op, ast.Sub):
            result = left - right
        elif isinstance(op, ast.Mult):
            result = left * right
        elif isinstance(op, ast.Div):
            result = left / right
        elif isinstance(op, ast.FloorDiv):
            result = left // right
        elif isinstance(op, ast.Mod):
            result = left % right
        elif isinstance(op, ast.Pow) and abs(right) < 1024 and abs(left) < 1 << 64:
            power: object = left**right
            result = power if isinstance(power, int | float) else None
    except (ArithmeticError, ValueError):
        return None
    return result
