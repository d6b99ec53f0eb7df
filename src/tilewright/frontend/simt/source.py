"""The source of an explicit kernel or of a function it calls, and what the names around it mean.

In: a live Python function. Out: its definition as Python's own tree, where that stands in its file, and a look-up of names that are
not its own: closure first, then globals, then builtins.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tilewright.base.errors import TargetLimit, UserError
from tilewright.base.source import Span
from tilewright.frontend.python.expressions import SourcePlace
from tilewright.frontend.python.kernels import parse_live, refuse_wrapper
from tilewright.frontend.python.names import surroundings


@dataclass(frozen=True, eq=False)
class FunctionSource:
    """A definition, its place and its surroundings."""

    name: str
    node: ast.FunctionDef | ast.Lambda
    place: SourcePlace
    names: Mapping[str, object]

    def span(self, node: ast.stmt | ast.expr | ast.arg | ast.keyword) -> Span:
        return self.place.span(node)

    def head(self) -> Span:
        """Where the definition begins."""
        return self.place.head(self.node) if isinstance(self.node, ast.FunctionDef) else self.place.span(self.node)

    def find(self, name: str) -> tuple[bool, object]:
        """Whether a name around the function has a value, and that value."""
        if name in self.names:
            return True, self.names[name]
        return (True, getattr(builtins, name)) if hasattr(builtins, name) else (False, None)


def alternative(function: Callable[..., object], vendor: str) -> Callable[..., object]:
    """The definition for a target, of a function that has several. Raises `TargetLimit` where there is none."""
    known: dict[str, Callable[..., object]] | None = getattr(function, "__simt_alternatives__", None)
    if known is None:
        return function
    if vendor not in known:
        name = getattr(function, "__name__", repr(function))
        raise TargetLimit.at(
            "TW020", f"'{name}' is defined for {', '.join(known)}, but not for {vendor}", read_source(function).head(),
            f"add a definition under @tw.target({'cpu=True' if vendor == 'cpu' else f'gpu={vendor!r}'})",
        )  # fmt: skip
    return known[vendor]


def read_source(function: Callable[..., object]) -> FunctionSource:
    """The source of a live function or lambda. Raises `UserError`."""
    refuse_wrapper(function)
    function = inspect.unwrap(function)
    name = getattr(function, "__name__", repr(function))
    module, place, span = parse_live(function, name)
    node = _lambda(function, module, span, place) if name == "<lambda>" else _definition(name, module, span)
    return FunctionSource(name, node, place, surroundings(function))


def _definition(name: str, module: ast.Module, span: Span) -> ast.FunctionDef:
    found = next((n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), None)
    if isinstance(found, ast.AsyncFunctionDef):
        raise UserError.at("TW005", f"'{name}' is an async function", span, "write it with a plain 'def'")
    if found is None or found.name != name:
        raise UserError.at(
            "TW005", f"'{name}' is not a kernel: only a 'def' can be one", span, "write it as a function with 'def'"
        )
    return found


def _lambda(function: Callable[..., object], module: ast.Module, span: Span, place: SourcePlace) -> ast.Lambda:
    """The lambda among those of its lines that begins where the code object does."""
    found = [n for n in ast.walk(module) if isinstance(n, ast.Lambda)]
    if len(found) > 1:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        starts = {(line - place.line_offset, column) for line, _, column, _ in function.__code__.co_positions() if line}
        found = [
            n for n in found if tuple(a.arg for a in n.args.args) == names and (n.body.lineno, n.body.col_offset) in starts
        ] or found
    if len(found) != 1:
        raise UserError.at("TW005", f"{len(found)} lambdas stand on this line", span, "write it as a function with 'def'")
    return found[0]
