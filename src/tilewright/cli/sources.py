"""Files the commands are given, as kernels ready to be compiled.

In: the path of a `.py` or `.zyn` file and what is known of the arguments. Out: `Entry`s: the tree of one kernel with what each argument
is. A Python file is read, never executed. A ZynML program is walked from top to bottom with stand-ins for values: each `compute` is
checked, and gives results of the right type to what follows.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tilewright.base.dtypes import bool_, from_numpy
from tilewright.base.errors import Diagnostic, Diagnostics, UserError
from tilewright.cli.guess import NOTHING, GuessedArguments, guess, nodes, parameters_given, uses_in
from tilewright.compile.driver import Signature, front_end
from tilewright.execute.calls.arguments import DIVISORS, read_argument, size_class
from tilewright.execute.calls.watchdog import watchdog_nanoseconds
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.tree.check.expressions import UNREAD
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.inline import nodes as all_nodes
from tilewright.tree.metadata import CONTRACTIONS
from tilewright.tree.syntax import Function, Module
from tilewright.tree.typed import NoneArg, ScalarArg, TypedKernel
from tilewright.zyn.host.abstract_run import Looker, look, stand_in
from tilewright.zyn.host.dimensions import AbstractValue
from tilewright.zyn.host.functions import METHODS
from tilewright.zyn.known_extents import KnownExtents
from tilewright.zyn.module import ZynModule
from tilewright.zyn.module_check import ModuleCheck
from tilewright.zyn.module_links import call_module, linked
from tilewright.zyn.program_files import read_program

_ARRAY_PARTS = frozenset({"shape", "size", "ndim", "dtype", "T", *METHODS})


@dataclass(frozen=True)
class Entry:
    """One kernel of a file."""

    name: str
    function: Function
    args: tuple[tuple[str, GuessedArguments], ...]

    def signature(self, gpu: bool) -> Signature:
        """What to compile it for; extents that were given promise what divides them."""
        divisors: list[tuple[str, int, int]] = []
        hints: list[tuple[str, int, int]] = []
        extents: list[tuple[str, int, int]] = []
        for name, given in self.args:
            for axis, extent in enumerate(given.extents or ()):
                if gpu and extent is not None:
                    divisor = next((d for d in DIVISORS if extent % d == 0), 1)
                    divisors += [(name, axis, divisor)] if divisor > 1 else []
                    hints.append((name, axis, size_class(extent)))
                    extents.append((name, axis, extent))
        specs = tuple(given.spec(gpu) for _, given in self.args)
        found = Signature(specs, tuple(divisors), (), tuple(hints), extents=tuple(extents))
        return with_options(found, self.function, gpu)

    def without_precision(self) -> Entry:
        """The kernel without a precision of its own, for those who were given another."""
        return replace(self, function=replace(self.function, attributes=tuple(a for a in self.function.attributes if a.name != "precision")))

    def assumptions(self) -> str:
        """`scale(m: f32[*, *], v: f32[*])`, for the user to see what was taken for granted."""
        return f"{self.name}({', '.join(f'{name}: {given}' for name, given in self.args)})"


def with_options(signature: Signature, function: Function, gpu: bool) -> Signature:
    """The signature with what the decorator of a kernel in a file asks of compilations."""
    if not function.options:
        return signature
    watchdog, launches = function.option("watchdog"), function.option("launches")
    return replace(
        signature, schedule=str(function.option("schedule") or ""),
        watchdog=watchdog_nanoseconds(watchdog) if gpu and watchdog is not None else 0,  # type: ignore[arg-type]  # checked there
        launches=1 if gpu and launches == 1 else 0,
    )  # fmt: skip


@dataclass(frozen=True)
class File:
    """A parsed file: a list of Python kernels, or a ZynML program."""

    path: str
    kernels: tuple[Function, ...] = ()
    program: Module | None = None
    errors: tuple[Diagnostic, ...] = ()
    """What could not be read of Python kernels, where the caller goes on to check the rest."""


@dataclass
class Walk:
    """What walking a file found: its kernels, their typed trees, and everything that is wrong."""

    entries: list[Entry] = field(default_factory=list)
    typed: list[TypedKernel] = field(default_factory=list)
    """One for each entry; fewer when there are errors."""
    errors: list[Diagnostic] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    """Inputs of a program that are records or lists."""
    warnings: list[Diagnostic] = field(default_factory=list)
    """Inputs of a program that look like names it defines."""

    def raise_if_errors(self) -> Walk:
        if self.errors:
            raise UserError(*sorted(self.errors, key=lambda d: (d.span.line, d.span.column)))
        return self


def read_source(path: str, every_error: bool = False) -> File:
    """Read and parse a file. Raises UserError, but for what `parse_source` keeps."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".py", ".zyn"):
        raise UserError.at("TW007", f"'{path}' is neither a .zyn nor a .py file", help="give a ZynML program or a Python file with kernels")
    return parse_source(read_program(Path(path), help=""), path, every_error)


def parse_source(text: str, path: str, every_error: bool = False) -> File:
    """The same for a text; the path's ending says which language it is. With `every_error`, what is wrong in parts of Python kernels is
    kept for `walk`, which finds the rest."""
    if Path(path).suffix.lower() == ".zyn":
        return File(path, program=parse_module(text, path))
    from tilewright.frontend.python.kernels import parse_python_file

    sink = Diagnostics()
    kernels = tuple(parse_python_file(text, path, sink if every_error else None))
    return File(path, kernels, errors=tuple(sink.errors))


def inputs_of(file: File, known: Mapping[str, GuessedArguments]) -> dict[str, GuessedArguments]:
    """What a ZynML program takes: as told, or as its uses show."""
    return _inputs(file, known)[0]


def _inputs(file: File, known: Mapping[str, GuessedArguments]) -> tuple[dict[str, GuessedArguments], ModuleCheck | None]:
    """The same, and the check of the program with them, where that is of this very tree."""
    assert file.program is not None
    module = ZynModule(file.program, _no_compute)
    names, check = module.with_inputs()
    _check_names(known, names, file.path)
    return {name: known.get(name) or guess(name, None, file.program) for name in names}, check if module.tree is file.program else None


def walk(file: File, known: Mapping[str, GuessedArguments], only: str | None = None) -> Walk:
    """Check every kernel of the file, or in a Python file the one called `only`. Errors are collected, not raised, but for names in
    `known` that nothing has."""
    if file.program is not None:
        inputs, check = _inputs(file, known)
        found = _walk_program(file.program, inputs, check)
        found.warnings = mistyped(file.program, [name for name in inputs if name not in known])
        return found
    if any(function.name == only for function in file.kernels):
        file = replace(file, kernels=tuple(function for function in file.kernels if function.name == only))
    result = Walk(errors=list(file.errors))
    _check_names(known, [p.name for function in file.kernels for p in function.params], file.path)
    for function in file.kernels:
        args = tuple((p.name, known.get(p.name) or guess(p.name, p.type, function)) for p in function.params)
        _check(Entry(function.name, function, args), result)
        if any(p.optional for p in function.params):
            _check_without(function, args, result)
    return result


def _check_without(function: Function, args: tuple[tuple[str, GuessedArguments], ...], result: Walk) -> None:
    """The kernel where a call leaves all optional parameters out."""
    specs = tuple(NoneArg() if p.optional else given.spec(False) for p, (_, given) in zip(function.params, args, strict=True))
    try:
        check_kernel(function, specs)
    except UserError as error:
        result.errors += [d for d in error.diagnostics if d not in result.errors]


def _check(entry: Entry, result: Walk) -> TypedKernel | None:
    result.entries.append(entry)
    try:
        typed = check_kernel(entry.function, entry.signature(gpu=False).args)
        if typed.metadata.kind in CONTRACTIONS:
            # Whether they are contractions is seen in the loops they become.
            from tilewright.passes.choose.hints import check_kind

            check_kind(typed.metadata, front_end(entry.function, entry.signature(gpu=False))[1])
        conflicts = _sizes(typed, entry.args).conflicts()
        if conflicts:
            raise UserError(*conflicts)
    except UserError as error:
        result.errors += [d for d in error.diagnostics if d.message != UNREAD]
        return None
    result.typed.append(typed)
    return typed


def _sizes(typed: TypedKernel, args: Sequence[tuple[str, GuessedArguments]]) -> KnownExtents:
    return KnownExtents(typed, {name: given.extents for name, given in args if given.extents is not None})


class _SourceLooker(Looker):
    """Runs no block: checks it, and gives results of the right type. `stand_in` is an array for what nobody knows anything of."""

    def __init__(self, result: Walk, values: Mapping[str, object], inputs: Mapping[str, GuessedArguments]) -> None:
        super().__init__()
        self._result, self._values, self._inputs = result, values, inputs
        self._seen: dict[tuple[object, ...], object] = {}
        self._taken: set[str] = {entry.name for entry in result.entries}
        for name, value in values.items():
            if isinstance(value, np.ndarray) and (extents := inputs[name].extents) is not None:
                self.knows(value, extents)

    def stand_in(self, name: str, function: Function) -> object:
        given = guess(name, None, function)
        return AbstractValue() if given.extents is None else stand_in(given.dtype, (None,) * len(given.extents))

    def __call__(self, function: Function, arguments: dict[str, object], device: str) -> object:
        if any(isinstance(value, AbstractValue) for value in arguments.values()):
            return AbstractValue()
        args = tuple((name, self._given(name, value)) for name, value in arguments.items())
        seen = id(function), args
        if seen in self._seen:
            return self._seen[seen]
        typed = _check(Entry(_unique(function.name, self._taken), function, args), self._result)
        if typed is None:
            return AbstractValue()
        made = [self.array(output.dtype, extents) for output, extents in zip(typed.outputs, _sizes(typed, args).results(), strict=True)]
        self._seen[seen] = made[0] if len(made) == 1 else tuple(made)
        return self._seen[seen]

    def _given(self, name: str, value: object) -> GuessedArguments:
        if name in self._inputs and self._values[name] is value:
            return self._inputs[name]
        if value is None:
            return GuessedArguments(bool_, plain=NOTHING)
        argument = read_argument(name, value)
        if isinstance(argument.value, np.ndarray):
            dtype = from_numpy(argument.value.dtype)
            assert dtype is not None
            return GuessedArguments(dtype, self.extents(value))
        plain = "" if isinstance(value, bool | np.generic) else "float" if isinstance(value, float) else "int"
        assert isinstance(argument.spec, ScalarArg)
        return GuessedArguments(argument.spec.dtype, plain=plain)


def _walk_program(program: Module, inputs: Mapping[str, GuessedArguments], check: ModuleCheck | None = None) -> Walk:
    program = linked(program)
    result = Walk(records=[name for name in inputs if is_record(name, program)])
    values: dict[str, object] = {name: AbstractValue() if name in result.records else _stand_in(given) for name, given in inputs.items()}
    _look(program, values, inputs, result, check)
    called = {n.id for n in nodes(program) if isinstance(n, syntax.Name)} | {
        n.id for s in program.body if isinstance(s, Function) for n in nodes(s) if isinstance(n, syntax.Name)
    }
    for function in program.body:
        if isinstance(function, Function) and function.name not in called and "__" not in function.name:
            _look_at_function(program, function, result)
    return result


def _look(program: Module, values: Mapping[str, object], inputs: Mapping[str, GuessedArguments], result: Walk, check: ModuleCheck | None = None) -> None:
    found = look(program, _SourceLooker(result, values, inputs), values, check)
    result.errors += [error for error in found if error not in result.errors]


def _look_at_function(program: Module, function: Function, result: Walk) -> None:
    """A function that the program does not call: with stand-ins for its parameters and for names of the program."""
    params = {p.name: p for p in function.params}
    module = call_module(program, function, tuple(params))
    names, check = ZynModule(module, _no_compute).with_inputs()
    inputs = {n: guess(n, params[n].type if n in params else None, function) for n in names}
    functions = {s.name: s for s in program.body if isinstance(s, Function)}
    records = {n for n in names if (_takes_record(function, params[n], functions, ()) if n in params else is_record(n, function))}
    values = {
        n: AbstractValue() if n in records or (inputs[n].guessed and inputs[n].extents is None) else _stand_in(inputs[n]) for n in names
    }  # fmt: skip
    _look(module, values, inputs, result, check)


def is_record(name: str, root: syntax.Node) -> bool:
    """Whether the uses of a name show a record: a field is taken that arrays do not have."""
    functions = {s.name: s for s in (root.body if isinstance(root, Module) else ()) if isinstance(s, Function)}
    owners: list[syntax.Node] = [root, *(s for s in functions.values() if all(p.name != name for p in s.params))]
    if any(uses_in(owner).fields.get(name, _ARRAY_PARTS) - _ARRAY_PARTS for owner in owners):
        return True
    return any(_takes_record(function, param, functions, ()) for owner in owners for function, param in parameters_given(name, owner, functions))


def _takes_record(function: Function, param: syntax.Param, functions: Mapping[str, Function], around: tuple[str, ...]) -> bool:
    """Whether a parameter is a record or a list: its type says so, its uses do, or those of functions it is handed on to."""
    if param.type is not None:
        return isinstance(param.type, syntax.Name) and param.type.id in ("record", "list")
    if function.name in around:
        return False
    if uses_in(function).fields.get(param.name, _ARRAY_PARTS) - _ARRAY_PARTS:
        return True
    inner = parameters_given(param.name, function, functions)
    return any(_takes_record(called, taken, functions, (*around, function.name)) for called, taken in inner)


def mistyped(program: Module, inputs: Sequence[str]) -> list[Diagnostic]:
    """Warnings about inputs that are spelled almost as a name that the program itself defines."""
    whole = list(all_nodes(program))
    defined = {name for n in whole if isinstance(n, syntax.Let) for name in n.targets} | {n.name for n in whole if isinstance(n, syntax.Param | Function)}
    found: list[Diagnostic] = []
    for name in inputs:
        close = [other for other in difflib.get_close_matches(name, sorted(defined), 3, 0.8) if _is_slip(name, other)]
        span = next((n.span for n in whole if isinstance(n, syntax.Name) and n.id == name), None)
        if close and span is not None:
            help = f"did you mean '{close[0]}'? If it is an input, say what it is: --args {name}=…"
            found.append(Diagnostic("TW002", f"'{name}' is defined nowhere and becomes an input", span, help, "warning"))
    return found


def _is_slip(name: str, other: str) -> bool:
    """Whether one name may be the other with a slip: names of two things differ in numbers, in what follows a _, or are one and many."""
    if min(len(name), len(other)) < 4 or re.sub(r"\d", "", name) == re.sub(r"\d", "", other):
        return False
    return name.count("_") == other.count("_") == 0 and name.rstrip("s") != other.rstrip("s") and name.lower() != other.lower()


def _stand_in(given: GuessedArguments) -> object:
    if given.extents is not None:
        return stand_in(given.dtype, given.extents)
    if given.plain:
        return 1.0 if given.plain == "float" else 1
    return given.dtype.numpy.type(1)


def _unique(name: str, taken: set[str]) -> str:
    count = 1
    while (label := name if count == 1 else f"{name}_{count}") in taken:
        count += 1
    taken.add(label)
    return label


def _no_compute(function: Function, arguments: dict[str, object], device: str) -> object:
    raise AssertionError("nothing runs here")


def _check_names(known: Mapping[str, GuessedArguments], names: list[str] | tuple[str, ...], path: str) -> None:
    for name in known:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            help = f"did you mean '{close[0]}'?" if close else f"its arguments are {', '.join(dict.fromkeys(names)) or 'none'}"
            raise UserError.at("TW008", f"{path} has no argument '{name}'", help=help)


def choose(entries: list[Entry], name: str | None, path: str) -> list[Entry]:
    """All entries, or the one of that name."""
    names = [e.name for e in entries]
    if not entries:
        raise UserError.at("TW016", f"{path} has no kernels", help="mark Python functions with @tilewright.kernel; in ZynML write compute(…) { … }")
    if name is None:
        return entries
    if name not in names:
        raise UserError.at("TW016", f"{path} has no kernel '{name}'", help=f"it has {', '.join(names)}")
    return [entries[names.index(name)]]
