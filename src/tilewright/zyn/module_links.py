"""ZynML programs put together: files that a program imports become part of it, and a call of one function becomes a program.

In: parsed programs. Out: programs without `import`. A file imported `as layers` is in the program once, however often it is imported: its names
have `layers__` in front, and `layers.norm` of any text that imports it is that name. Without `as` its names are those of the text that imports
it. Paths are relative to the file that imports; `program_files` says which files those may be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tilewright.base.errors import Diagnostics, UserError
from tilewright.tree import syntax
from tilewright.tree.inline import declared, nodes
from tilewright.tree.syntax import Argument, Function, Module, Stmt
from tilewright.zyn.program_files import import_roots, imported_file, parse_program

RESULT = "result_"
MOST_NESTED = 64
"""How many files may import one another in a row."""


def linked(module: Module, roots: Sequence[str | os.PathLike[str]] = ()) -> Module:
    """The program with the files it imports in it. Raises UserError for files that are missing, lie elsewhere or import each other."""
    return linked_files(module, roots)[0]


def linked_files(module: Module, roots: Sequence[str | os.PathLike[str]] = ()) -> tuple[Module, tuple[str, ...]]:
    """The same, and what names of imported files begin with."""
    if not any(isinstance(s, syntax.Import) for s in module.body):
        return module, ()
    linker = _FileLinker(import_roots(module, roots))
    source = next((s.span.source.path for s in module.body if s.span.source is not None), "")
    chain = (Path(source).resolve(),) if source and not source.startswith("<") else ()
    body, _ = linker.link(module, "", chain)
    return replace(module, body=tuple(body)), tuple(linker.prefixes)


class _FileLinker:
    """The files of one program. Each is parsed once, and is there once under an alias, and once in each text that takes its names."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._parsed: dict[Path, Module] = {}
        self._names: dict[tuple[str | None, Path], dict[str, str]] = {}
        """What the names of a file are in the program: by the file, and the text that took its names (None: under an alias)."""
        self.prefixes: dict[str, None] = {}

    def link(self, module: Module, prefix: str, chain: tuple[Path, ...]) -> tuple[list[Stmt], dict[str, str]]:
        """The statements of a file and of those it imports, with their names in the program; and those names by the file's own."""
        sink = Diagnostics()
        aliases: dict[str, dict[str, str]] = {}
        taken: dict[str, str] = {}
        found: dict[int, list[Stmt]] = {}
        for position, statement in enumerate(module.body):
            if isinstance(statement, syntax.Import):
                try:
                    found[position], names = self._import(statement, prefix, chain)
                    if statement.alias and aliases.setdefault(statement.alias, names) is not names:
                        raise UserError.at("TW005", f"'{statement.alias}' is the name of two imports", statement.span, "give one of them another name")
                    taken |= {} if statement.alias else names
                except UserError as error:
                    for item in error.diagnostics:
                        sink.error(item.code, item.message, item.span, item.help)
        sink.raise_if_errors()
        names = taken | {name: prefix + name for name in _top_names(module)}
        new = {name: renamed for name, renamed in names.items() if name != renamed}
        renamer = _LinkNames(new, aliases, sink)
        body: list[Stmt] = []
        for position, statement in enumerate(module.body):
            body += found[position] if position in found else [renamer.of(statement)]
        sink.raise_if_errors()
        return body, names

    def _import(self, node: syntax.Import, prefix: str, chain: tuple[Path, ...]) -> tuple[list[Stmt], dict[str, str]]:
        """What an import adds to the program, which is nothing where the file is there already, and the names of the file."""
        path, real = imported_file(node, self._roots)
        if real in chain:
            circle = " imports ".join(f"'{p.name}'" for p in (*chain[chain.index(real) :], path))
            raise UserError.at("TW005", f"{circle}: files cannot import each other in a circle", node.span, "put what both use into a third file")
        key = None if node.alias else prefix, real
        if key in self._names:
            return [], self._names[key]
        if len(chain) > MOST_NESTED:
            raise UserError.at("TW005", f"more than {MOST_NESTED} files import one another in a row", node.span, "import them from one file")
        if real not in self._parsed:
            self._parsed[real] = parse_program(path, node.span, "paths of imports are relative to the file they stand in")
        inner = self._new_prefix(f"{prefix}{node.alias}__") if node.alias else prefix
        body, names = self.link(self._parsed[real], inner, (*chain, real))
        self._names[key] = names
        return body, names

    def _new_prefix(self, wanted: str) -> str:
        while wanted in self.prefixes:
            wanted += "_"
        self.prefixes[wanted] = None
        return wanted


def _top_names(module: Module) -> dict[str, None]:
    found: dict[str, None] = {}
    for statement in module.body:
        if isinstance(statement, Function):
            found[statement.name] = None
        elif isinstance(statement, syntax.Let):
            found |= dict.fromkeys(statement.targets)
    return found


class _LinkNames:
    """Statements with new names, and with one name for `alias.name`."""

    def __init__(self, new: Mapping[str, str], aliases: Mapping[str, Mapping[str, str]], sink: Diagnostics) -> None:
        self._new, self._aliases, self._sink = new, aliases, sink

    def of(self, statement: Stmt) -> Stmt:
        if isinstance(statement, Function):
            own = {p.name for p in statement.params} | set(declared(statement.body))
            own |= {n.id for p in statement.params if p.type is not None for n in nodes((p.type,)) if isinstance(n, syntax.Name)}
            changed = self._without(own).any(statement)
            named: Function = replace(changed, name=self._new.get(statement.name, statement.name))
            return named
        found: Stmt = self.any(statement)
        return found

    def _without(self, own: set[str]) -> _LinkNames:
        """The same where these names mean something else."""
        new, aliases = ({k: v for k, v in names.items() if k not in own} for names in (self._new, self._aliases))
        return _LinkNames(new, aliases, self._sink)  # type: ignore[arg-type]

    def _for(self, loop: syntax.For) -> syntax.For:
        """The variables of a loop are its own."""
        inner = self._without(set(loop.vars)) if set(loop.vars) & {*self._new, *self._aliases} else self
        return replace(loop, ranges=self.any(loop.ranges), over=self.any(loop.over), body=inner.any(loop.body))

    def any(self, item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(self.any(part) for part in item)
        if not isinstance(item, syntax.Node):
            return item
        if isinstance(item, syntax.Name) and "." not in item.id:
            return replace(item, id=self._new[item.id]) if item.id in self._new else item
        if isinstance(item, syntax.Name):
            # A word such as `random.uniform`, unless a file is imported under that name.
            owner, _, name = item.id.partition(".")
            return self.any(syntax.Attribute(syntax.Name(owner, span=item.span), name, span=item.span)) if owner in self._aliases else item
        if isinstance(item, syntax.For):
            return self._for(item)
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
