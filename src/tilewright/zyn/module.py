"""Load and run ZynML programs.

In: a file or a text, and the inputs of a run by name. Out: all names the program defines at its top level, as a dictionary; or what one of its
functions gives, `module.name(args…)`. Nothing runs before the whole program has been checked for missing inputs and for what is wrong in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from tilewright.base.errors import UserError, close_matches, entered, leave, public
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.zyn.host.block_runner import BlockRunner, LaunchedBlocks, PlainBlocks, RunBlock
from tilewright.zyn.limits import within_limits
from tilewright.zyn.module_check import ModuleCheck
from tilewright.zyn.module_links import RESULT, call_module, linked_files
from tilewright.zyn.program_files import import_roots, parse_program
from tilewright.zyn.replay.cache import RepeatedCalls
from tilewright.zyn.replay.types import MISS


def load(
    path_or_source: str | os.PathLike[str], run_compute: BlockRunner | RunBlock, roots: Sequence[str | os.PathLike[str]] = ()
) -> ZynModule:
    """A program from a `.zyn` file, or from its text: a string is text when it has a line break or a brace, or when it names no
    file, does not end in `.zyn` and has one of the words let, var, fn, pipeline, compute, print in it. Imports lie under the folder of the
    file, or under `roots`."""
    if isinstance(path_or_source, str) and _is_source(path_or_source):
        return ZynModule(parse_module(path_or_source), run_compute, roots)
    if not isinstance(path_or_source, str | os.PathLike):
        raise UserError.at("TW009", f"a {type(path_or_source).__name__} is no program", help="give the path of a .zyn file, or the text of a program")
    return ZynModule(parse_program(Path(path_or_source)), run_compute, roots)


def _every_error(error: UserError, tree: syntax.Module, inputs: Any) -> UserError:
    """A run that fails tells all that is wrong; looking for it takes nothing while runs go well."""
    from tilewright.zyn.collect_errors import every_error

    return every_error(error, tree, inputs)


def _is_source(text: str) -> bool:
    if "\n" in text or "{" in text:
        return True
    if text.endswith(".zyn") or re.search(r"\b(let|var|fn|pipeline|compute|print)\b", text) is None:
        return False
    return "\0" in text or not os.path.exists(text)


class ZynModule:
    """A parsed program. `run` may be called any number of times, from any thread; its functions are attributes that can be called."""

    def __init__(
        self, module: syntax.Module, run_compute: BlockRunner | RunBlock, roots: Sequence[str | os.PathLike[str]] = ()
    ) -> None:
        with within_limits("the program"):
            self.tree, self._hidden = linked_files(module, roots)
        """The whole program, and what names of imported files begin with."""
        self.roots = tuple(import_roots(module, roots))
        """The folders that it may read."""
        self.run_compute = run_compute if isinstance(run_compute, BlockRunner) else PlainBlocks(run_compute)
        self._checks: dict[frozenset[str], ModuleCheck] = {}
        """What was found right for inputs of these names."""
        self._functions = {s.name: s for s in self.tree.body if isinstance(s, syntax.Function)}
        self._calls: dict[tuple[str, tuple[str, ...]], ZynModule] = {}
        self._made: dict[str, Callable[..., object]] = {}
        """Its functions as Python functions."""
        self._repeated: dict[tuple[str, ...], RepeatedCalls] = {}
        """What was recorded of runs, by the names of their inputs."""
        self.wanted: frozenset[str] | None = None
        """The names that runs give; None: all."""

    def __repr__(self) -> str:
        source = self.tree.span.source
        file = os.path.basename(source.path) if source is not None else "text"
        functions = f"; functions {', '.join(list(self._functions)[:4])}{'…' * (len(self._functions) > 4)}" if self._functions else ""
        return f"<ZynML program {file}, {len(self.tree.body)} statements{functions}>"

    @public
    def inputs(self) -> tuple[str, ...]:
        """The names `run` needs, in order of first use."""
        return self.with_inputs()[0]

    def with_inputs(self) -> tuple[tuple[str, ...], ModuleCheck]:
        """The names `run` needs, and what is found when they are given: a name with a value is no size of the functions that use it."""
        with within_limits("the program"):
            return self._with_inputs()

    def _with_inputs(self) -> tuple[tuple[str, ...], ModuleCheck]:
        alone = ModuleCheck(self.tree, frozenset())
        names = tuple(alone.missing)
        check = ModuleCheck(self.tree, frozenset(names)) if names else alone
        if not check.missing and check.used == set(names):
            return names, check
        names = tuple(n for n in dict.fromkeys((*names, *check.missing)) if n in check.used or n in check.missing)
        return names, ModuleCheck(self.tree, frozenset(names))

    @entered
    def run(self, device: str | None = None, **inputs: object) -> dict[str, object]:
        """Run the program from top to bottom; the result holds every name it defines at its top level.

        A block's own `@device` comes first, then `device`, then the program's `config`, then "auto".
        """
        found: dict[str, object]
        try:
            names = tuple(inputs)
            repeated = self._repeated.get(names) or self.repeated(names)
            values = inputs.values()
            for replay in repeated.replays:
                found = replay(device, *values)  # type: ignore[assignment]
                if found is not MISS:
                    return found
            found = repeated.run(device, *values)
            return found
        except BaseException as error:
            leave(error)
            raise

    def giving(self, *names: str) -> ZynModule:
        """The same program, whose runs give these names alone. Blocks that only other names need do not run, and arrays that only blocks read need not be written."""
        defined = list(dict.fromkeys(t for s in self.tree.body if isinstance(s, syntax.Let) for t in s.targets if self.is_shown(t)))
        for name in names:
            if name not in defined:
                close = close_matches(name, defined, 1)
                help = f"did you mean '{close[0]}'?" if close else f"it defines {', '.join(defined) or 'none'}"
                raise UserError.at("TW002", f"the program defines no '{name}' at its top level", help=help)
        if not names:
            raise UserError.at("TW016", "giving() without names would give nothing", help=f"the program defines {', '.join(defined) or 'none'}")
        other = copy(self)
        other.wanted, other._repeated = frozenset(names), {}
        return other

    def launched(self) -> tuple[LaunchedBlocks, ...]:
        """What its runs so far have launched: for each program of blocks its blocks, and the kernels they became."""
        return self.run_compute.launched()

    def repeated(self, names: tuple[str, ...], only: str | None = None) -> RepeatedCalls:
        """Runs with inputs of these names: `calls(device, *values)` gives all results, or the one named `only`."""
        found = self._repeated.get(names)
        if found is None:
            found = self._repeated.setdefault(names, RepeatedCalls(self, names, only))
        return found

    def checked(self, inputs: dict[str, object]) -> ModuleCheck:
        """What was found out about the program, which has all it needs with these inputs and is right."""
        given = frozenset(inputs)
        check = self._checks.get(given)
        if check is None:
            with within_limits("the program"):
                check = ModuleCheck(self.tree, given, _every_error)
                check.roots = self.roots
                check.report(inputs)
            self._checks[given] = check
        return check

    def is_shown(self, name: str) -> bool:
        """Whether a name belongs to the program itself, not to a file it imports."""
        return not (self._hidden and name.startswith(self._hidden))

    def functions(self) -> tuple[str, ...]:
        """The names of its functions and pipelines, in the order of the text."""
        return tuple(name for name in self._functions if not name.startswith(self._hidden))

    def call(self, name: str, args: tuple[object, ...], named: dict[str, Any], device: str | None = None) -> object:
        """What a function gives. `named` has arguments by name, and values for names of the program that the function uses."""
        return self._function_of(name)(*args, device=device, **named)

    def bound(self, name: str, args: tuple[object, ...], named: dict[str, Any]) -> dict[str, object]:
        """The values of a call by name: those given by place, then those given by name."""
        function = self._functions[name]
        params = [p.name for p in function.params]
        if len(args) > len(params):
            raise UserError.at("TW016", f"{name}({', '.join(params)}) takes {len(params)} argument(s), got {len(args)}")
        for param in params[: len(args)]:
            if param in named:
                raise UserError.at("TW016", f"{name}({', '.join(params)}) gets '{param}' twice")
        values = dict(zip(params, args)) | named
        missing = [p.name for p in function.params if p.default is None and p.name not in values]
        if missing:
            raise UserError.at("TW016", f"{name}({', '.join(params)}) lacks '{missing[0]}'", function.span)
        return values

    def _called(self, name: str, passed: tuple[str, ...]) -> ZynModule:
        """The program that is a call of a function with these of its parameters."""
        made = self._calls.get((name, passed))
        if made is None:
            made = ZynModule(call_module(self.tree, self._functions[name], passed), self.run_compute, self.roots)
            made = self._calls.setdefault((name, passed), made)
        return made

    def __getattr__(self, name: str) -> Any:
        functions: dict[str, syntax.Function] = self.__dict__.get("_functions", {})
        if name not in functions:
            known = ", ".join(functions) or "none"
            raise AttributeError(f"the program has no function '{name}'; it has {known}")
        # Python asks here only for what it does not find: from now on it finds it.
        made = self.__dict__[name] = self._function_of(name)
        return made

    def _function_of(self, name: str) -> Callable[..., object]:
        """A function of the program as one of Python's, which knows what calls it has had."""
        made = self._made.get(name)
        return made if made is not None else self._made.setdefault(name, self._new_function(name))

    def _new_function(self, name: str) -> Callable[..., object]:
        known: dict[tuple[object, ...], RepeatedCalls] = {}
        params = [p.name for p in self._functions[name].params]

        @public
        def call(*args: object, device: str | None = None, **named: object) -> object:
            form = len(args), *named
            repeated = known.get(form)
            if repeated is None:
                values = self.bound(name, args, named)
                made = self._called(name, tuple(p for p in params if p in values))
                repeated = known[form] = made.repeated(tuple(values), RESULT)
            for replay in repeated.replays:
                found = replay(device, *args, *named.values())
                if found is not MISS:
                    return found
            return repeated.run(device, *args, *named.values())

        call.__name__ = call.__qualname__ = name
        call.__dict__["pipeline"] = self, name
        return call


def pipeline_of(function: object) -> tuple[ZynModule, str] | None:
    """The program and the name of a function that `program.name` has given; None for any other."""
    found = getattr(function, "__dict__", {}).get("pipeline")
    return found if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], ZynModule) else None
