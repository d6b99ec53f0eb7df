"""Functions of numbers that are given to primitives: a lambda or a plain function in, its tree out.

`parse_scalar_function` reads a live function whose parameters and result are numbers. Captured numbers become literals; plain
functions it calls are read alike. The tree that comes out has exactly one `return`, its last statement: a `return` under an
`if` is taken apart into a variable that both branches set.

    lambda a, b: a if a > b else b
    -> kernel lambda(a, b) { return (a if a > b else b) }
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import replace

from tilewright.base.errors import Diagnostics, UserError
from tilewright.base.source import Source
from tilewright.frontend.python.expressions import SourcePlace
from tilewright.frontend.python.kernels import FunctionReader
from tilewright.frontend.python.names import Called, Environment, Opaque
from tilewright.frontend.python.sources import lines_of, missing_source
from tilewright.tree import syntax
from tilewright.tree.syntax import Stmt

RESULT = "result$"
"""The variable a function's result is put into."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef


def parse_scalar_function(function: Callable[..., object]) -> syntax.Function:
    """The tree of a function of numbers. Raises `UserError`."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", repr(function))
    if not isinstance(code, types.CodeType):
        raise UserError.at(
            "TW005", f"'{name}' is a {type(function).__name__}, not a function written in Python", help="write lambda x: … around the call"
        )
    lines = lines_of(code, getattr(function, "__globals__", None))
    if not lines:
        raise missing_source(name, code, "function")
    text = "".join(lines)
    found = _definition(text, code)
    if found is None:
        raise UserError.at(
            "TW007", f"the source of '{name}' is not at line {code.co_firstlineno} of {code.co_filename} any more",
            help="load the changed file again",
        )  # fmt: skip
    sink = Diagnostics()
    place = SourcePlace(Source(code.co_filename, text))
    tree = FunctionReader(place, _environment(function, code), sink).read(found)
    sink.raise_if_errors()
    return _with_one_return(tree)


def _environment(function: Callable[..., object], code: types.CodeType) -> Environment:
    """The names around the function; plain functions among them can be called."""
    environment = Environment.of_function(function)
    for name in (*code.co_names, *code.co_freevars):
        meaning = environment.meaning(name)
        value = meaning.value if isinstance(meaning, Opaque) else None
        if isinstance(value, types.FunctionType):
            environment.define(name, Called(name, value, functools.partial(parse_scalar_function, value)))
    return environment


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _definition(text: str, code: types.CodeType) -> Definition | None:
    """The definition that the code was compiled from."""
    module = _parsed(text)
    if module is None:
        return None
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    if code.co_name != "<lambda>":
        return None
    candidates = [n for n in ast.walk(module) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno]
    if len(candidates) > 1:
        candidates = [n for n in candidates if _extent(code) == (n.body.lineno, n.body.col_offset, n.body.end_lineno, n.body.end_col_offset)]
    if not candidates:
        return None
    found = candidates[0]
    body = ast.copy_location(ast.Return(found.body), found.body)
    return ast.copy_location(ast.FunctionDef("lambda", found.args, [body], [], None, None), found)


def _extent(code: types.CodeType) -> tuple[int, int, int | None, int | None]:
    """The first and the last place of the text that the code's instructions are from."""
    places = list(_places(code))
    first, last = min(p[:2] for p in places), max(p[2:] for p in places)
    return (*first, *last)


def _places(code: types.CodeType) -> Iterator[tuple[int, int, int, int]]:
    for line, end_line, column, end_column in code.co_positions():
        if line and end_line and column is not None and end_column:
            yield line, column, end_line, end_column


def _with_one_return(tree: syntax.Function) -> syntax.Function:
    """The function with all its returns at the end."""
    body = tree.body
    returns = sum(isinstance(s, syntax.Return) for s in _statements(body))
    if returns == 1 and isinstance(body[-1], syntax.Return):
        return tree
    if not body or not _ends(body):
        raise UserError.at("TW005", f"'{tree.name}' does not return a number on every way through it", tree.span, "end it with return")
    start = syntax.Let((RESULT,), syntax.Number(0, span=tree.span), mutable=True, span=tree.span)
    last = syntax.Return(syntax.Name(RESULT, span=tree.span), span=tree.span)
    return replace(tree, body=(start, *_assigning(body), last))


def _statements(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    for statement in body:
        yield statement
        for inner in ("then", "otherwise", "body"):
            yield from _statements(getattr(statement, inner, ()) or ())


def _ends(body: tuple[Stmt, ...]) -> bool:
    """Whether every way through the statements returns a value."""
    for statement in body:
        if isinstance(statement, syntax.Return):
            return statement.value is not None
        if isinstance(statement, syntax.If) and _ends(statement.then) and _ends(statement.otherwise):
            return True
    return False


def _assigning(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The statements with the result put into its variable; what follows an `if` that returns goes into its other branch."""
    done: list[Stmt] = []
    for position, statement in enumerate(body):
        if isinstance(statement, syntax.Return):
            assert statement.value is not None
            return (*done, syntax.Assign(syntax.Name(RESULT, span=statement.span), statement.value, span=statement.span))
        if isinstance(statement, syntax.If) and any(isinstance(s, syntax.Return) for s in _statements((statement,))):
            rest = body[position + 1 :]
            then, otherwise = (_assigning(b if _ends(b) else (*b, *rest)) for b in (statement.then, statement.otherwise))
            return (*done, replace(statement, then=then, otherwise=otherwise))
        if any(isinstance(s, syntax.Return) for s in _statements((statement,))):
            raise UserError.at("TW005", "return inside a loop is not available here", statement.span, "set a variable in the loop")
        done.append(statement)
    return tuple(done)
