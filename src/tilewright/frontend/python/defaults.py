"""Whether defaults of parameters are what their annotations say, and whether a kernel can return what it says it returns.

In: the signature of a live function, before its source is read; or a parameter's tree. Out: what is wrong, in words. A kernel is refused when it is
decorated, not at the first call that uses the default.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable

import numpy as np

from tilewright.base import dtypes
from tilewright.base.errors import Diagnostics
from tilewright.base.source import Span
from tilewright.tree import syntax

_NO_RESULTS = ("str", "bytes", "list", "dict", "set", "frozenset", "bytearray")
_RESULT_HELP = "a kernel returns tw.Array, int, float, bool, a dtype such as tw.f32, or a tuple of these"
_UNKNOWN = object()


def wrong_signature(function: Callable[..., object]) -> str:
    """What is wrong with a function's defaults or result, as far as its objects tell; '' where nothing is."""
    signature = inspect.signature(function)
    for name, param in signature.parameters.items():
        if param.default is not param.empty:
            written = "" if param.annotation is param.empty else _annotation_text(param.annotation)
            kind, optional = _kind(written)
            message = wrong_default(name, kind, optional or not written, param.default)
            if message:
                return message
    result = signature.return_annotation
    text = "" if result is signature.empty else _annotation_text(result)
    return _wrong_result(function.__name__, text.partition("[")[0])


def wrong_default(name: str, kind: str, optional: bool, value: object) -> str:
    """What is wrong with a default: `kind` is int, float, bool, a dtype, array, or '' where the annotation does not say."""
    if value is None:
        return "" if optional else f"the default of '{name}' is None, but '{name}' must be {_words(kind)}"
    if isinstance(value, bool | np.bool_):
        fits = kind in ("bool", "")
    elif isinstance(value, int | np.integer):
        fits = kind in ("int", "float", "complex", "") or (dtypes.is_name(kind) and _holds(kind, int(value)))
    elif isinstance(value, float | np.floating):
        fits = kind in ("float", "complex", "") or (dtypes.is_name(kind) and dtypes.by_name(kind).is_inexact)
    elif isinstance(value, complex | np.complexfloating):
        fits = kind in ("complex", "") or (dtypes.is_name(kind) and dtypes.by_name(kind).is_complex)
    else:
        fits = hasattr(value, "shape") and hasattr(value, "dtype") and kind in ("array", "")
    return "" if fits else f"the default of '{name}' is {_shown(value)}, but '{name}' must be {_words(kind)}"


def check_default(param: syntax.Param, sink: Diagnostics) -> None:
    """The same for a parameter that was read; expressions are left to whoever computes them."""
    value = _literal(param.default)
    if param.default is None or value is _UNKNOWN:
        return
    kind = "" if param.type is None else "array"
    if isinstance(param.type, syntax.Name):
        kind = param.type.id if param.type.id in ("int", "float", "bool", "complex") or dtypes.is_name(param.type.id) else "array"
        kind = "" if kind == "array" and param.type.id.lower() in ("any", "object") else kind
    message = wrong_default(param.name, kind, param.optional or param.type is None, value)
    if message:
        sink.error("TW009", message, param.default.span, _help(param.name, kind, value))


def check_result(function: str, node: syntax.Expr | None, sink: Diagnostics) -> None:
    """Report a result that no kernel can give."""
    base = node.value if isinstance(node, syntax.Index) else node
    message = _wrong_result(function, base.id if isinstance(base, syntax.Name) else "")
    if message and node is not None:
        sink.error("TW009", message, node.span, _RESULT_HELP)


def constant(value: object, span: Span) -> syntax.Expr | None:
    """A live default as a literal; None where it is no number."""
    if value is None:
        return syntax.Nothing(span=span)
    if isinstance(value, bool | np.bool_):
        return syntax.Bool(bool(value), span=span)
    if isinstance(value, int | float | np.integer | np.floating):
        return syntax.Number(value.item() if isinstance(value, np.generic) else value, span=span)
    return syntax.String(value, span=span) if isinstance(value, str) else None


def _wrong_result(function: str, kind: str) -> str:
    return f"'{function}' is annotated to return {kind}, which no kernel returns" if kind in _NO_RESULTS else ""


def _literal(node: syntax.Expr | None) -> object:
    if isinstance(node, syntax.Number | syntax.Bool | syntax.String):
        return node.value
    if isinstance(node, syntax.Unary) and node.op == "-" and isinstance(node.operand, syntax.Number):
        return -node.operand.value
    return None if isinstance(node, syntax.Nothing) else _UNKNOWN


def _annotation_text(annotation: object) -> str:
    """`float`, `tw.Array | None`, also where it was kept as text."""
    if isinstance(annotation, str):
        return annotation.strip().strip("'\"")
    return annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)


def _kind(text: str) -> tuple[str, bool]:
    """The word of a type, and whether None is allowed. '' for what only the source tells."""
    optional = bool(re.search(r"\bNone(Type)?\b|\bOptional\b", text))
    parts = [part.strip() for part in re.sub(r"^(typing\.)?Optional\[(.*)\]$", r"\2", text).split("|")]
    words = [part for part in parts if part not in ("None", "NoneType")]
    word = words[0].rpartition(".")[2] if len(words) == 1 and "[" not in words[0] else ""
    known = word in ("int", "float", "bool", "complex", "Array") or dtypes.is_name(word)
    return ("array" if word == "Array" else word if known else ""), optional or not known


def _holds(kind: str, value: int) -> bool:
    dtype = dtypes.by_name(kind)
    return dtype.is_inexact or (not dtype.is_bool and int(dtype.min_value) <= value <= int(dtype.max_value))


def _words(kind: str) -> str:
    return {"array": "an array", "": "an array or a number", "bool": "True or False (bool)", "int": "a whole number (int)"}.get(kind, f"a number ({kind})")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def _help(name: str, kind: str, value: object) -> str:
    if value is None:
        return f"annotate '{name}' as '{'tw.Array' if kind == 'array' else kind} | None', or leave the default out"
    if kind == "int" and isinstance(value, float) and math.isfinite(value):
        return "annotate it as float, or give a whole number"
    return f"give {_words(kind)}, or change the annotation"
