"""Functions that users give to primitives, and the numbers that go with them.

In: a lambda, a plain function or a name such as 'sum', and dtypes. Out: `ScalarFunction`s and `Monoid`s, each made once for the same code and captured
values.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewright.base.dtypes import DType, compute_dtype
from tilewright.base.errors import UserError
from tilewright.execute.calls.outputs import keep
from tilewright.execute.places import Number
from tilewright.tree import syntax
from tilewright.tree.names import substitute

if TYPE_CHECKING:
    from tilewright.primitives.functions import Monoid, ScalarFunction

Function = Callable[..., Any]
_NAMES = {
    "sum": "add", "add": "add", "+": "add", "prod": "mul", "mul": "mul", "*": "mul", "min": "min", "max": "max", "and": "and", "&": "and",
    "or": "or", "|": "or", "xor": "xor", "^": "xor",
}  # fmt: skip
"""Functions known by name."""


_trees: dict[object, Any] = {}
_functions: dict[object, tuple[Any, ScalarFunction]] = {}


def tree_of(function: Function) -> Any:
    """The tree of a function. The same text with the same captured values is read once, however often Python makes a function of it."""
    from tilewright.frontend.python.functions import parse_scalar_function

    key = identity_of(function)
    if key is None:
        return parse_scalar_function(function)
    found = _trees.get(key)
    if found is None:
        found = parse_scalar_function(function)
        keep(_trees, key, found)
    return found


def identity_of(function: Any) -> object:
    """What tells a function from others: its code and what it captures; None where that is more than numbers and functions."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return None
    around = getattr(function, "__globals__", {})
    try:
        captured = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return None
    parts: list[object] = [code]
    for value in (*captured, *(around[n] for n in code.co_names if n in around)):
        if isinstance(value, bool | int | float):
            parts.append((type(value), value))
        elif isinstance(value, types.FunctionType):
            inner = identity_of(value) if value is not function else code
            if inner is None:
                return None
            parts.append(inner)
        elif isinstance(value, types.ModuleType) and value.__name__ in ("tilewright", "math", "numpy"):
            parts.append(value.__name__)
        elif isinstance(value, types.BuiltinFunctionType | type):
            parts.append(value)
        else:
            return None
    return tuple(parts)


def function_of(function: Function, dtypes: tuple[DType, ...], result: DType | None = None) -> ScalarFunction:
    from tilewright.primitives.functions import scalar_function

    tree = tree_of(function)
    key = id(tree), dtypes, result
    found = _functions.get(key)
    if found is None:
        found = tree, scalar_function(tree, dtypes, result)
        keep(_functions, key, found)
    return found[1]


def monoid_of(op: str | Function, dtype: DType, what: str) -> Monoid:
    """The function that combines two numbers of that dtype; narrow floats are combined in f32."""
    from tilewright.primitives.functions import Monoid

    if dtype.kind == "q":
        raise UserError.at("TW005", f"{dtype} holds packed blocks and cannot be computed with", help=f"give {what} another dtype=")
    accumulator = compute_dtype(dtype)
    if isinstance(op, str):
        opcode = _NAMES.get(op)
        if opcode is None:
            raise UserError.at("TW016", f"{what} does not know '{op}'", help=f"use one of {', '.join(sorted(_NAMES))}, or a function of two numbers")
        bitwise = opcode in ("and", "or", "xor")
        if dtype.is_float and bitwise:
            raise UserError.at("TW009", f"{what} with '{op}' takes integers, got {dtype}")
        if dtype.is_bool and not bitwise and opcode not in ("min", "max"):
            raise UserError.at("TW009", f"{what} with '{op}' does not take bool", help="give dtype=, for instance tw.i64")
        return Monoid(accumulator, opcode)
    if not callable(op):
        raise UserError.at("TW009", f"{what} combines by a function or a name, got {op!r}")
    return Monoid(accumulator, function=function_of(op, (accumulator, accumulator), accumulator))


def number_of(value: Any, dtype: DType, name: str) -> Number:
    """A number that the dtype holds."""
    try:
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, bool | int | float):
            if dtype.is_float:
                return float(number)
            if dtype.is_bool:
                return bool(number)
            if int(number) == number and dtype.min_value <= number <= dtype.max_value:
                return int(number)
    except (OverflowError, ValueError):
        pass
    raise UserError.at("TW009", f"{name} is {value!r}, which is no {dtype}")


def state_functions_of(function: Function, dtypes: tuple[DType, ...], what: str) -> tuple[ScalarFunction, ...]:
    """A function of two states of several numbers, as a function for each number of its result.

    It takes either two tuples (`lambda s, e: (s[0] * e[0], …)`, `a, b = s`) or the numbers of both (`lambda a, b, c, d: (…)`), and returns a tuple.
    """
    from tilewright.primitives.functions import scalar_function

    if not callable(function):
        raise UserError.at("TW009", f"{what} of {len(dtypes)} arrays combines by a function of two tuples of numbers, got {function!r}")
    tree = tree_of(function)
    key = "state", id(tree), dtypes
    found = _states.get(key)
    if found is None:
        parts = _components(tree, len(dtypes), what)
        found = tree, tuple(scalar_function(part, (*dtypes, *dtypes), dtype) for part, dtype in zip(parts, dtypes, strict=True))
        keep(_states, key, found)
    return found[1]


_states: dict[object, tuple[Any, tuple[ScalarFunction, ...]]] = {}


def _components(tree: syntax.Function, count: int, what: str) -> list[syntax.Function]:
    """A tree for each number of the tuple that a function returns."""
    last = tree.body[-1]
    if not isinstance(last, syntax.Return) or not isinstance(last.value, syntax.Tuple) or len(last.value.items) != count:
        raise UserError.at(
            "TW016", f"'{tree.name}' does not return {count} numbers, one for each array of the {what}", tree.span,
            "end it with one return of a tuple: return a, b",
        )  # fmt: skip
    if len(tree.params) == 2:
        tree = _apart(tree, count)
    elif len(tree.params) != 2 * count:
        raise UserError.at(
            "TW016", f"'{tree.name}' takes {len(tree.params)} argument(s), but a {what} of {count} arrays gives it two tuples, or {2 * count} numbers", tree.span
        )
    last = tree.body[-1]
    assert isinstance(last, syntax.Return) and isinstance(last.value, syntax.Tuple)
    return [replace(tree, body=(*tree.body[:-1], replace(last, value=item))) for item in last.value.items]


def _apart(tree: syntax.Function, count: int) -> syntax.Function:
    """Two parameters that are tuples, as numbers."""
    replacements: list[tuple[syntax.Expr, syntax.Name]] = []
    params: list[syntax.Param] = []
    names = {p.name: [f"{p.name}${k}" for k in range(count)] for p in tree.params}
    for param in tree.params:
        for k, name in enumerate(names[param.name]):
            replacements.append((syntax.Index(syntax.Name(param.name), (syntax.Number(k),)), syntax.Name(name)))
            params.append(replace(param, name=name))
    body: list[syntax.Stmt] = []
    for statement in tree.body:
        source = names.get(statement.value.id) if isinstance(statement, syntax.Let) and isinstance(statement.value, syntax.Name) else None
        if source is None or not isinstance(statement, syntax.Let):
            body.append(statement)
            continue
        if len(statement.targets) != count:
            raise UserError.at("TW016", f"'{tree.name}' takes a tuple of {count} numbers apart into {len(statement.targets)}", statement.span)
        body += [
            replace(statement, targets=(target,), value=syntax.Name(name, span=statement.span), destructure=False)
            for target, name in zip(statement.targets, source, strict=True)
        ]
    return replace(tree, params=tuple(params), body=substitute(tuple(body), replacements))
