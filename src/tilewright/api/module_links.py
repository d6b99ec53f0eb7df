"""ZynML programs put together: files that a program imports become part of it, and a call of one function becomes a program.

In: parsed programs. Out: programs without `import`. A file imported `as layers` has its names with `layers__` in front, and `layers.norm` of
the importing text is that name; without `as` its names are the program's own. Paths are relative to the file that imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tilewright.base.errors import Diagnostics, UserError
from tilewright.base.source import Span
from tilewright.frontend.zyn import parse_module
from tilewright.tree import syntax
from tilewright.tree.inline import declared, nodes
from tilewright.tree.syntax import Argument, Function, Module, Stmt

RESULT = "result_"


def linked(module: Module, around: tuple[Path, ...] = ()) -> Module:
    """The program with the files it imports in it. Raises UserError for files that are missing or import each other."""
    if not any(isinstance(s, syntax.Import) for s in module.body):
        return module
    sink = Diagnostics()
    aliases: dict[str, dict[str, str]] = {}
    found: dict[int, list[Stmt]] = {}
    for position, statement in enumerate(module.body):
        if isinstance(statement, syntax.Import):
            try:
                found[position] = _imported(statement, around, aliases)
            except UserError as error:
                for item in error.diagnostics:
                    sink.error(item.code, item.message, item.span, item.help)
    sink.raise_if_errors()
    body: list[Stmt] = []
    for position, statement in enumerate(module.body):
        body += found[position] if position in found else [_Names({}, aliases, sink).of(statement)]
    sink.raise_if_errors()
    return replace(module, body=tuple(body))


def _imported(node: syntax.Import, around: tuple[Path, ...], aliases: dict[str, dict[str, str]]) -> list[Stmt]:
    source = node.span.source.path if node.span.source is not None else ""
    folder = Path(source).parent if source and not source.startswith("<") else Path()
    here = around or ((Path(source).resolve(),) if source and not source.startswith("<") else ())
    path = folder / node.path
    if path.resolve() in here:
        chain = " imports ".join(f"'{p.name}'" for p in (*here[here.index(path.resolve()) :], path))
        raise UserError.at("TW005", f"{chain}: files cannot import each other in a circle", node.span, "put what both use into a third file")
    module = linked(parse_module(_text(path, node.span), str(path)), (*here, path.resolve()))
    if not node.alias:
        return list(module.body)
    new = {name: f"{node.alias}__{name}" for name in _top_names(module)}
    aliases[node.alias] = {name: renamed for name, renamed in new.items() if "__" not in name}
    return [_Names(new, {}, Diagnostics()).of(statement) for statement in module.body]


def _text(path: Path, span: Span) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
        raise UserError.at("TW007", f"file '{path}' {reason}", span, "paths of imports are relative to the file they stand in") from None
    except UnicodeDecodeError as error:
        raise UserError.at("TW007", f"file '{path}' is not UTF-8 text: {error.reason}", span, "save it as UTF-8") from None


def _top_names(module: Module) -> dict[str, None]:
    found: dict[str, None] = {}
    for statement in module.body:
        if isinstance(statement, Function):
            found[statement.name] = None
        elif isinstance(statement, syntax.Let):
            found |= dict.fromkeys(statement.targets)
    return found


class _Names:
    """Statements with new names, and with one name for `alias.name`."""

    def __init__(self, new: Mapping[str, str], aliases: Mapping[str, Mapping[str, str]], sink: Diagnostics) -> None:
        self._new, self._aliases, self._sink = new, aliases, sink

    def of(self, statement: Stmt) -> Stmt:
        if isinstance(statement, Function):
            own = {p.name for p in statement.params} | set(declared(statement.body))
            own |= {n.id for p in statement.params if p.type is not None for n in nodes((p.type,)) if isinstance(n, syntax.Name)}
            inner = _Names(
                {k: v for k, v in self._new.items() if k not in own}, {k: v for k, v in self._aliases.items() if k not in own}, self._sink
            )
            changed = inner.any(statement)
            named: Function = replace(changed, name=self._new.get(statement.name, statement.name))
            return named
        found: Stmt = self.any(statement)
        return found

    def any(self, item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(self.any(part) for part in item)
        if not isinstance(item, syntax.Node):
            return item
        if isinstance(item, syntax.Name):
            return replace(item, id=self._new[item.id]) if item.id in self._new else item
        if isinstance(item, syntax.Attribute) and isinstance(item.value, syntax.Name) and item.value.id in self._aliases:
            names = self._aliases[item.value.id]
            if item.name not in names:
                self._sink.error("TW002", f"'{item.value.id}' has no '{item.name}'", item.span, f"it has {', '.join(names) or 'nothing'}")
                return item
            return syntax.Name(names[item.name], span=item.span)
        values = {f.name: self.any(getattr(item, f.name)) for f in fields(item) if f.name != "span"}
        if isinstance(item, syntax.Let):
            values["targets"] = tuple(self._new.get(name, name) for name in item.targets)
        return type(item)(**values, span=item.span)


def call_module(module: Module, function: Function, passed: tuple[str, ...]) -> Module:
    """A program that calls one function with inputs of the names of its parameters, and has nothing of the program that the call does not need."""
    functions = {s.name: s for s in module.body if isinstance(s, Function)}
    wanted = _used_names((function,), functions)
    kept: list[Stmt] = []
    for statement in reversed(module.body):
        targets = statement.targets if isinstance(statement, syntax.Let) else ()
        assigned = {n.id for n in nodes((statement,)) if isinstance(n, syntax.Assign) for n in nodes((n.target,)) if isinstance(n, syntax.Name)}
        if isinstance(statement, syntax.Config | Function):
            kept.append(statement)
        elif not set(passed) & set(targets) and wanted & ({*targets} | assigned):
            kept.append(statement)
            wanted |= _used_names((statement,), functions)
    span = function.span
    args = tuple(Argument(syntax.Name(name, span=span), name, span=span) for name in passed)
    call = syntax.Call(syntax.Name(function.name, span=span), args, span=span)
    return replace(module, body=(*reversed(kept), syntax.Let((RESULT,), call, span=span)))


def _used_names(statements: tuple[Stmt, ...], functions: Mapping[str, Function]) -> set[str]:
    """All names in statements and in the functions they call; some may be their own."""
    found: set[str] = set()
    waiting: list[Stmt] = list(statements)
    seen: set[str] = set()
    while waiting:
        own: set[str] = set()
        statement = waiting.pop()
        if isinstance(statement, Function):
            seen.add(statement.name)
            own = {p.name for p in statement.params}
        for node in nodes((statement,)):
            if isinstance(node, syntax.Name) and node.id not in own:
                found.add(node.id)
                if node.id in functions and node.id not in seen:
                    seen.add(node.id)
                    waiting.append(functions[node.id])
    return found
