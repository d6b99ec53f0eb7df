"""What an editor wants to know of a file: messages, types of names and expressions, declarations, symbols, completions.

In: a text and its path. Out: plain Python values; places are lines and columns from 1. Nothing here knows a protocol. A text that does
not parse has messages and nothing else; the server then goes on with what it knew before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilewright.base import levels
from tilewright.base.dtypes import SCALARS
from tilewright.base.errors import Diagnostic, TilewrightError
from tilewright.base.source import Source, Span
from tilewright.cli.bindings import Bindings, NameBinding, bind, holds
from tilewright.cli.commands.check import in_order, warnings
from tilewright.cli.explicit_names import explicit_names
from tilewright.cli.sources import File, Walk, parse_source, walk
from tilewright.tree import syntax, typed
from tilewright.tree.check.expressions import FUNCTIONS
from tilewright.tree.check.random_draws import DTYPES as RANDOM
from tilewright.tree.metadata import PRECISIONS, KernelKind, attribute_names
from tilewright.tree.typed_walk import own_exprs, walk_expr
from tilewright.zyn.program_files import read_program

KEYWORDS = ("let", "var", "for", "in", "if", "elif", "else", "while", "and", "or", "not", "yield", "return", "await", "true", "false", "inf",
            "step", "compute", "inout", "break", "continue", "pipeline", "fn", "config", "import", "as", "shared", "timeout")  # fmt: skip
_ARRAY_MEMBERS = ("shape", "dtype", "size")
_NAME_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789"


@dataclass
class Analysis:
    """All that is known of one text."""

    path: str
    text: str
    diagnostics: list[Diagnostic] = field(default_factory=list)
    program: syntax.Module | None = None
    bindings: Bindings = field(default_factory=Bindings)
    types: list[tuple[Span, str]] = field(default_factory=list)
    """What stands in a span, and its type."""
    results: dict[str, str] = field(default_factory=dict)
    """Types of the program's own results."""


@dataclass(frozen=True)
class Symbol:
    """A declared thing for an outline; `kind` is function, let, var or config."""

    name: str
    kind: str
    place: Span
    whole: Span
    inside: tuple[Symbol, ...] = ()


def analyse(text: str, path: str) -> Analysis:
    """Everything about a text; raises nothing for what its author did wrong."""
    result = Analysis(path, text)
    found: list[Diagnostic] = []
    try:
        file: File = parse_source(text, path, every_error=True)
        found += warnings(file)
        result.program = file.program
        if file.program is not None:
            result.bindings = bind(file.program)
        else:
            found += explicit_names(text, path)[1]
        walked = walk(file, {}, certain=True)
        found += [*walked.errors, *walked.warnings]
        _read_types(walked, result)
    except TilewrightError as error:
        found += error.diagnostics
    result.diagnostics = in_order(found)
    return result


# -- types ----------------------------------------------------------------------------------------------------------


def _read_types(walked: Walk, result: Analysis) -> None:
    for kernel in walked.typed:
        if len(kernel.outputs) == 1:
            result.results.setdefault(kernel.name, str(kernel.outputs[0]))
        for statement in _statements(kernel.body):
            for expr in own_exprs(statement):
                result.types += [fact for part in walk_expr(expr) for fact in _facts(part)]
            if isinstance(statement, typed.Store) and statement.span.line:
                result.types.append((_start(statement.span, statement.array.name), str(statement.array)))


def _statements(body: Sequence[typed.Stmt]) -> Iterator[typed.Stmt]:
    for stmt in body:
        yield stmt
        if isinstance(stmt, typed.TypedLoop | typed.ReduceLoop | typed.TypedWhile):
            yield from _statements(stmt.body)
        elif isinstance(stmt, typed.TypedIf):
            yield from _statements((*stmt.then, *stmt.otherwise))


def _facts(expr: typed.Expr) -> Iterator[tuple[Span, str]]:
    if not expr.span.line:
        return
    if isinstance(expr, typed.SizeValue):
        yield expr.span, f"size {expr.size}" if expr.size.constant is None else f"size = {expr.size}"
    elif isinstance(expr, typed.IndexRef):
        yield expr.span, f"index in {_bound(expr.var.first)}..{_bound(expr.var.high)}"
    else:
        yield expr.span, _type(expr.dtype.name, expr.shape)
    if isinstance(expr, typed.Element | typed.TypedView):
        yield _start(expr.span, expr.array.name), str(expr.array)


def _bound(size: object) -> str:
    return "…" if size is None else str(size)


def _type(dtype: str, shape: Sequence[object]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]" if shape else dtype


def _start(span: Span, name: str) -> Span:
    """The name at the beginning of a span, where it stands there."""
    text = span.source.line(span.line)[span.column - 1 :] if span.source is not None else ""
    length = len(name) if text.startswith(name) else len(text) - len(text.lstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789"))
    return Span(span.source, span.line, span.column, span.line, span.column + length)


def hover(analysis: Analysis, line: int, column: int) -> tuple[str, Span] | None:
    """What stands at a place, as `name: type`, and its span."""
    binding = analysis.bindings.at(line, column)
    if binding is not None:
        place = next(p for p in (binding.place, *binding.uses) if holds(p, line, column))
        return _describe(analysis, binding, place), place
    inside = [(span, text) for span, text in analysis.types if span.path == analysis.path and holds(span, line, column)]
    if not inside:
        return None
    span, text = min(inside, key=lambda fact: _extent(fact[0]))
    return f"{_text_of(span)}: {text}", span


def _describe(analysis: Analysis, binding: NameBinding, place: Span) -> str:
    if isinstance(binding.node, syntax.Function):
        params = ", ".join(p.name for p in binding.node.params)
        return f"{'pipeline' if binding.node.kind == 'pipeline' else 'fn'} {binding.name}({params})"
    by_place = {(span.line, span.column, span.end_line, span.end_column): text for span, text in reversed(analysis.types)}
    found = next(
        (text for p in (place, binding.place, *binding.uses) if (text := by_place.get((p.line, p.column, p.end_line, p.end_column)))), ""
    )
    if binding.kind == "import" and isinstance(binding.node, syntax.Import):
        return f'import "{binding.node.path}"'
    if not found and binding in analysis.bindings.scopes[0][1].values():
        found = analysis.results.get(binding.name, "")
    if not found and binding.kind == "let" and isinstance(binding.node, syntax.Let):
        # A name given to an expression is that expression wherever it is used.
        value = binding.node.value
        span = value.span if value is not None else Span()
        found = by_place.get((span.line, span.column, span.end_line, span.end_column), "")
    if binding.kind == "size":
        extent = found.removeprefix("size").lstrip(" =")
        return f"size {binding.name}" if extent in ("", binding.name) else f"size {binding.name} = {extent}"
    return f"{binding.kind} {binding.name}: {found}" if found else f"{binding.kind} {binding.name}"


def _extent(span: Span) -> tuple[int, int]:
    return span.end_line - span.line, span.end_column - span.column


def _text_of(span: Span) -> str:
    if span.source is None or span.line != span.end_line:
        return "…"
    return span.source.line(span.line)[span.column - 1 : span.end_column - 1]


# -- declarations, symbols, completions -----------------------------------------------------------------------------


def definition(analysis: Analysis, line: int, column: int) -> Span | None:
    """Where the name at a place is declared, in this file or in one it imports."""
    for place, name, owner in analysis.bindings.members:
        if holds(place, line, column):
            return _imported(analysis.path, owner, name)
    binding = analysis.bindings.at(line, column)
    if binding is None:
        return None
    if binding.kind == "import":
        return _imported(analysis.path, binding, "")
    return binding.place


def _imported(path: str, binding: NameBinding, name: str) -> Span | None:
    if not isinstance(binding.node, syntax.Import):
        return None
    target = Path(path).parent / binding.node.path
    try:
        program = parse_source(read_program(target), str(target)).program
    except TilewrightError:
        return None
    if program is None:
        return None
    found = bind(program).scopes[0][1].get(name) if name else None
    return found.place if found is not None else Span(Source(str(target), ""), 1, 1, 1, 1)


def symbols(analysis: Analysis) -> list[Symbol]:
    """The outline of a program."""
    return _symbols(analysis.program.body, analysis.bindings) if analysis.program is not None else []


def _symbols(body: Sequence[syntax.Stmt], bindings: Bindings) -> list[Symbol]:
    found: list[Symbol] = []
    declared = {(b.name, id(b.node)): b for b in bindings.all}
    for stmt in body:
        if isinstance(stmt, syntax.Function):
            binding = declared[stmt.name, id(stmt)]
            found.append(Symbol(stmt.name, "function", binding.place, stmt.span, tuple(_symbols(stmt.body, bindings))))
        elif isinstance(stmt, syntax.Let):
            for name in stmt.targets:
                found.append(Symbol(name, "var" if stmt.mutable else "let", declared[name, id(stmt)].place, stmt.span))
        elif isinstance(stmt, syntax.Config):
            found.append(Symbol("config", "config", stmt.span, stmt.span))
    return found


def completions(analysis: Analysis, text: str, line: int, column: int) -> list[tuple[str, str]]:
    """(word, kind) pairs that fit at a place of the current text; kinds are attribute, kind, member, function, name, type and keyword."""
    lines = text.split("\n")
    before = lines[line - 1][: column - 1] if line <= len(lines) else ""
    head = before.rstrip(_NAME_LETTERS)
    if (head.endswith("@") and not head[:-1].rstrip().endswith((")", "]"))) or head.endswith(") @"):
        return [(name, "attribute") for name in attribute_names()]
    if head.rstrip().endswith("@kernel"):
        return [(kind.value, "kind") for kind in KernelKind]
    if head.rstrip().endswith("@precision("):
        return [(name, "kind") for name in PRECISIONS]
    if head.rstrip().endswith("@optimize("):
        return [(name, "kind") for name in levels.WORDS]
    if head.endswith("random.") and not head[: -len("random.")].endswith((".", *_NAME_LETTERS)) and "random" not in analysis.bindings.visible(line, column):
        return [(name.partition(".")[2], "function") for name in RANDOM]
    if head.endswith("."):
        return [(name, "member") for name in _ARRAY_MEMBERS]
    known = analysis.bindings.visible(line, column)
    names = [(name, "function" if b.kind == "function" else "name") for name, b in known.items()]
    rest = [*((f, "function") for f in FUNCTIONS), *((d.name, "type") for d in SCALARS), *((w, "keyword") for w in KEYWORDS)]
    return names + [(word, kind) for word, kind in rest if word not in known]
