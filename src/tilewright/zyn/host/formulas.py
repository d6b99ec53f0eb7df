"""Arithmetic of the host language on floats that kernels compute, as one function. In: a formula and what its names were; out: a function of such numbers.

    sqrt(total / n)  ->  def formula(v0, v1):
                             if type(v0) is not T2 or v1 is not …: return general(v0, v1)
                             with errstate(all="ignore"):
                                 return f3(f4(v0, C5))

It calls what `values.py` calls, for formulas of which every part is a NumPy float: these need no questions about kinds of numbers. Others have no function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewright.tree import syntax
from tilewright.tree.syntax import Expr
from tilewright.zyn.host import values

_OPERATORS = ("+", "-", "*", "zdiv", "**")
_UNLIKE = frozenset({"relu", "sign", "isinf", "isfinite", "isnan", "conj", "real", "imag", "round"})
"""Functions that ask for the kind of their argument, or do not give a number of that kind."""


class _NoFormula(Exception):
    """A part is no float."""


def compiled(formula: Expr, given: Mapping[str, object], general: Callable[..., object]) -> Callable[..., object] | None:
    """The formula as a function of `given`, in order; `general` computes it from numbers of other types. None where it is not of floats alone."""
    names: dict[str, Any] = {"general": general, "errstate": np.errstate}
    places = {name: f"v{number}" for number, name in enumerate(given)}
    guards = []
    for name, value in given.items():
        if not isinstance(value, np.floating):
            return None
        guards.append(f"type({places[name]}) is not {_named(names, type(value))}")
    try:
        text = _text(formula, places, names)
    except _NoFormula:
        return None
    parameters = ", ".join(places.values())
    lines = (f"def formula({parameters}):", f"    if {' or '.join(guards)}: return general({parameters})", "    with errstate(all='ignore'):", f"        return {text}")
    exec(compile("\n".join(lines), "<formula>", "exec"), names)
    made: Callable[..., object] = names["formula"]
    return made


def _named(names: dict[str, Any], value: object) -> str:
    name = f"f{len(names)}"
    names[name] = value
    return name


def _text(node: Expr, places: Mapping[str, str], names: dict[str, Any]) -> str:
    """Python text of a part that is a float."""
    if isinstance(node, syntax.Name) and node.id in places:
        return places[node.id]
    if isinstance(node, syntax.Binary) and node.op in _OPERATORS:
        sides = [_number(side, places, names) for side in (node.left, node.right)]
        if any(not constant for _, constant in sides):
            return f"{_named(names, values.operator(node.op))}({', '.join(text for text, _ in sides)})"
    if isinstance(node, syntax.Unary) and node.op == "-":
        return f"{_named(names, np.negative)}({_text(node.operand, places, names)})"
    if isinstance(node, syntax.Call) and isinstance(node.function, syntax.Name) and len(node.args) == 1 and node.function.id not in _UNLIKE:
        function = values.function(node.function.id, 1)
        if function is not None:
            return f"{_named(names, function)}({_text(node.args[0].value, places, names)})"
    raise _NoFormula


def _number(node: Expr, places: Mapping[str, str], names: dict[str, Any]) -> tuple[str, bool]:
    """An operand, and whether it is a number of the text."""
    if isinstance(node, syntax.Number):
        return _named(names, node.value), True
    return _text(node, places, names), False
