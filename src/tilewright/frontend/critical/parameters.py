"""What a critical function takes: its parameters by their annotations.

In: a function's source. Out: for each parameter a number, a fixed array or a state, with its default. Everything is said by annotations, so a critical
function is compiled once, for one signature.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.base.dtypes import DType, FixedArray
from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.frontend.critical.layout import StateLayout, number_type, said_type
from tilewright.frontend.simt.source import FunctionSource

NO_VALUE = object()
"""A parameter without a default."""
_HELP = "annotate it with int, float, bool, a dtype such as tw.i32, a fixed array such as tw.f64[64], or a class of tw.State"


@dataclass(frozen=True)
class CriticalParameter:
    """One parameter: a number where `shape` is empty and `state` is None."""

    name: str
    span: Span
    dtype: DType | None = None
    shape: tuple[int, ...] = ()
    state: type | None = None
    default: object = NO_VALUE

    @property
    def layout(self) -> StateLayout:
        layout = getattr(self.state, "__layout__", None)
        assert isinstance(layout, StateLayout)
        return layout

    @property
    def is_number(self) -> bool:
        return self.state is None and not self.shape


@dataclass(frozen=True)
class CriticalSignature:
    """All parameters, and what `->` says: a dtype, None for nothing, or `open` where it says nothing."""

    parameters: tuple[CriticalParameter, ...]
    result: DType | None
    open: bool
    positional: int
    """How many of them may be given by position."""


def read_signature(source: FunctionSource, known: Mapping[str, object]) -> CriticalSignature:
    """The signature of a critical function. `known`: annotations whose values Python knew when it was marked. Raises `UserError`."""
    node = source.node
    if isinstance(node, ast.Lambda):
        raise UserError.at("TW005", "a lambda cannot be a critical function", source.head(), "write it as a function with 'def'")
    arguments = node.args
    for extra, star in ((arguments.vararg, "*"), (arguments.kwarg, "**")):
        if extra is not None:
            raise UserError.at("TW005", f"'{star}{extra.arg}' is not available in a critical function", source.span(extra), "name every parameter")
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += [*arguments.defaults, *arguments.kw_defaults]
    found = []
    for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        value = NO_VALUE if default is None else evaluated(source, default, f"the default of '{argument.arg}'")
        found.append(_parameter(source, argument, value, known))
    returns = None if node.returns is None else known["return"] if "return" in known else evaluated(source, node.returns, "what it returns")
    if node.returns is None or returns is None:
        return CriticalSignature(tuple(found), None, node.returns is None, len(positional))
    result = number_type(returns)
    if result is None:
        raise UserError.at("TW009", f"'{source.name}' is annotated to return {returns!r}", source.span(node.returns), "a critical function returns a number or nothing")
    return CriticalSignature(tuple(found), result, False, len(positional))


def _parameter(source: FunctionSource, argument: ast.arg, default: object, known: Mapping[str, object]) -> CriticalParameter:
    span = source.span(argument)
    if argument.annotation is None:
        raise UserError.at("TW009", f"'{argument.arg}' of the critical function '{source.name}' has no annotation", span, _HELP)
    said = known[argument.arg] if argument.arg in known else evaluated(source, argument.annotation, f"the annotation of '{argument.arg}'")
    said = said_type(said)
    dtype = number_type(said)
    if dtype is not None:
        return CriticalParameter(argument.arg, span, dtype, default=default)
    if default is not NO_VALUE:
        raise UserError.at("TW009", f"'{argument.arg}' has a default, but is no number", span, "pass it at every call")
    if isinstance(said, FixedArray):
        element = number_type(said.element)
        if element is not None:
            return CriticalParameter(argument.arg, span, element, said.shape)
    if isinstance(said, type) and isinstance(getattr(said, "__layout__", None), StateLayout):
        return CriticalParameter(argument.arg, span, state=said)
    raise UserError.at("TW009", f"'{argument.arg}' is annotated as {getattr(said, '__name__', None) or repr(said)}", span, _HELP)


def evaluated(source: FunctionSource, node: ast.expr, what: str) -> object:
    """The Python value of an expression outside of the code: an annotation or a default."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        text = ast.unparse(node)
    try:
        return eval(text, {**source.names})
    except Exception as error:
        raise UserError.at("TW009", f"{what} cannot be read: {error}", source.span(node)) from None
