"""Which declaration each name of a ZynML program means, for editors.

In: an untyped program. Out: `NameBinding`s: a name, what it is, the place that declares it, and every place that uses it. Names nothing
declares are inputs (of the program) or sizes (of a block): they are declared where they are first used. Nothing is checked here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.names import body_names, is_output
from tilewright.tree.syntax import Expr, Node, Stmt


@dataclass(eq=False)
class NameBinding:
    """One declared name. kind: let, var, index, parameter, function, import, input, size or output."""

    name: str
    kind: str
    place: Span
    """The name itself, where it is declared."""
    node: Node | None = None
    uses: list[Span] = field(default_factory=list)


@dataclass
class Bindings:
    all: list[NameBinding] = field(default_factory=list)
    scopes: list[tuple[Span, dict[str, NameBinding]]] = field(default_factory=list)
    """The text over which names of a block are known, outer ones first."""
    members: list[tuple[Span, str, NameBinding]] = field(default_factory=list)
    """`alias.name` of an import: the place of `name`, the name, and the import."""

    def at(self, line: int, column: int) -> NameBinding | None:
        """The binding whose declaration or use is there."""
        for binding in self.all:
            if any(holds(place, line, column) for place in (binding.place, *binding.uses)):
                return binding
        return None

    def visible(self, line: int, column: int) -> dict[str, NameBinding]:
        """The names known at a place."""
        known: dict[str, NameBinding] = {}
        for span, names in self.scopes:
            if not span.line or holds(span, line, column):
                known |= names
        return known


def holds(span: Span, line: int, column: int) -> bool:
    """Whether a place is in a span; the place right behind it counts, as that of a cursor."""
    return (span.line, span.column) <= (line, column) <= (span.end_line, span.end_column)


def bind(module: syntax.Module) -> Bindings:
    """Resolve every name of a program."""
    found = Bindings()
    _Binder(found).module(module)
    return found


Scopes = list[dict[str, NameBinding]]


class _Binder:
    def __init__(self, found: Bindings) -> None:
        self.found = found
        self._sizes: dict[int, set[str]] = {}
        """By identity of the names of a block: which unknown ones are sizes there."""

    def module(self, module: syntax.Module) -> None:
        names: dict[str, NameBinding] = {}
        self.found.scopes.append((Span(), names))
        for stmt in module.body:
            if isinstance(stmt, syntax.Function):
                self._declare(names, stmt.name, "function", stmt.span, stmt)
        self._block(module.body, [names])

    def _declare(self, names: dict[str, NameBinding], name: str, kind: str, near: Span, node: Node | None = None) -> NameBinding:
        binding = NameBinding(name, kind, place_of(name, near), node)
        names[name] = binding
        self.found.all.append(binding)
        return binding

    def _use(self, name: str, span: Span, scopes: Scopes, kind: str = "") -> None:
        for names in reversed(scopes):
            if name in names:
                names[name].uses.append(span)
                return
        # Sizes and outputs belong to their block (or to the function whose parameter names them), inputs to the program.
        block = next((names for names in reversed(scopes) if id(names) in self._sizes), None)
        if kind:
            self._declare(scopes[-1], name, kind, span).uses.append(span)
        elif block is not None and (is_output(name) or name in self._sizes[id(block)]):
            self._declare(block, name, "output" if is_output(name) else "size", span).uses.append(span)
        else:
            self._declare(scopes[0], name, "input", span).uses.append(span)

    # -- statements -------------------------------------------------------------------------------------------------

    def _block(self, body: Sequence[Stmt], scopes: Scopes) -> None:
        for stmt in body:
            self._statement(stmt, scopes)

    def _inner(self, body: Sequence[Stmt], scopes: Scopes, names: dict[str, NameBinding], span: Span) -> None:
        self.found.scopes.append((span, names))
        self._block(body, [*scopes, names])

    def _statement(self, stmt: Stmt, scopes: Scopes) -> None:
        if isinstance(stmt, syntax.Let):
            for expr in (stmt.value, stmt.type, *stmt.extents):
                self._any(expr, scopes)
            for name in stmt.targets:
                self._declare(scopes[-1], name, "var" if stmt.mutable or stmt.shared else "let", stmt.span, stmt)
        elif isinstance(stmt, syntax.For):
            self._any((stmt.ranges, stmt.over), scopes)
            names: dict[str, NameBinding] = {}
            for name in stmt.vars:
                self._declare(names, name, "index", stmt.span, stmt)
            self._inner(stmt.body, scopes, names, _whole(stmt))
        elif isinstance(stmt, syntax.While):
            self._any(stmt.cond, scopes)
            self._inner(stmt.body, scopes, {}, _whole(stmt))
        elif isinstance(stmt, syntax.If):
            self._any(stmt.cond, scopes)
            self._inner(stmt.then, scopes, {}, _whole(stmt))
            self._inner(stmt.otherwise, scopes, {}, _whole(stmt))
        elif isinstance(stmt, syntax.Function):
            self._function(stmt, scopes)
        elif isinstance(stmt, syntax.Import):
            alias = stmt.alias or re.sub(r"\.zyn$", "", stmt.path.rpartition("/")[2])
            self._declare(scopes[0], alias, "import", stmt.span, stmt)
        else:
            self._any(tuple(getattr(stmt, f.name) for f in dataclasses.fields(stmt) if f.name != "span"), scopes)

    def _function(self, stmt: syntax.Function, scopes: Scopes) -> None:
        if stmt.name not in scopes[-1]:
            self._declare(scopes[-1], stmt.name, "function", stmt.span, stmt)
        names: dict[str, NameBinding] = {}
        for param in stmt.params:
            self._any(param.default, scopes)
            self._declare(names, param.name, "parameter", param.span, param)
            for size in param.type.indices if isinstance(param.type, syntax.Index) else ():
                if isinstance(size, syntax.Name):
                    self._use(size.id, size.span, [*scopes, names], "size")
        self._inner(stmt.body, scopes, names, _whole(stmt))

    # -- expressions ------------------------------------------------------------------------------------------------

    def _any(self, item: object, scopes: Scopes) -> None:
        if isinstance(item, tuple):
            for part in item:
                self._any(part, scopes)
        elif isinstance(item, syntax.Name):
            self._use(item.id, item.span, scopes)
        elif isinstance(item, syntax.Compute):
            self._any(item.inputs, scopes)
            names: dict[str, NameBinding] = {}
            self._sizes[id(names)] = body_names(item.body).in_ranges
            self._inner(item.body, scopes, names, _whole(item))
        elif isinstance(item, syntax.Call):
            self._called(item.function, scopes)
            self._any(item.args, scopes)
        elif isinstance(item, syntax.Attribute):
            self._any(item.value, scopes)
            self._member(item, scopes)
        elif isinstance(item, Node):
            self._any(tuple(getattr(item, f.name) for f in dataclasses.fields(item) if f.name != "span"), scopes)

    def _called(self, function: Expr, scopes: Scopes) -> None:
        """A called name is a function of the program, or one of the language, which is declared nowhere."""
        if isinstance(function, syntax.Name):
            for names in reversed(scopes):
                if function.id in names:
                    names[function.id].uses.append(function.span)
                    return
        else:
            self._any(function, scopes)

    def _member(self, item: syntax.Attribute, scopes: Scopes) -> None:
        owner = scopes[0].get(item.value.id) if isinstance(item.value, syntax.Name) else None
        if owner is not None and owner.kind == "import":
            span = item.span
            column = span.end_column - len(item.name)
            self.found.members.append((Span(span.source, span.end_line, column, span.end_line, span.end_column), item.name, owner))


def _whole(node: Node) -> Span:
    """From where a node begins to where the last thing in it ends: the span of a loop is that of its head."""
    last = max(((s.end_line, s.end_column) for s in _spans(node)), default=(0, 0))
    return Span(node.span.source, node.span.line, node.span.column, last[0], last[1])


def _spans(item: object) -> Iterator[Span]:
    if isinstance(item, tuple):
        for part in item:
            yield from _spans(part)
    elif isinstance(item, Node):
        yield item.span
        for part in dataclasses.fields(item):
            if part.name != "span":
                yield from _spans(getattr(item, part.name))


def place_of(name: str, near: Span) -> Span:
    """Where a name stands for the first time in a span; its beginning if it is not found."""
    if near.source is not None:
        for number in range(near.line, max(near.line, near.end_line) + 1):
            start = near.column - 1 if number == near.line else 0
            match = re.compile(rf"\b{re.escape(name)}\b").search(near.source.line(number), start)
            if match:
                return Span(near.source, number, match.start() + 1, number, match.end() + 1)
    return Span(near.source, near.line, near.column, near.line, near.column + len(name))
