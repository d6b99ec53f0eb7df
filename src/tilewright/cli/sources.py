"""Files the commands are given, as kernels ready to be compiled.

In: the path of a `.py` or `.zyn` file and what is known of the arguments. Out: `Entry`s: the tree of one kernel with what each argument
is. A Python file is read, never executed. A ZynML program is walked from top to bottom with stand-ins for values: each `compute` is
checked, and gives results of the right type to what follows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tilewright.base.dtypes import bool_, from_numpy, i64
from tilewright.base.errors import Diagnostic, Diagnostics, UserError, close_matches
from tilewright.cli.alike import form_of
from tilewright.cli.guess import NOTHING, GuessedArguments, guess, nodes, parameters_given, uses_in
from tilewright.compile.driver import Signature, front_end
from tilewright.execute.calls.arguments import divisor_of, read_argument, size_class
from tilewright.execute.calls.watchdog import watchdog_nanoseconds
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.check.expressions import UNREAD
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.inline import nodes as all_nodes
from tilewright.tree.metadata import CONTRACTIONS
from tilewright.tree.syntax import Function, Module
from tilewright.tree.typed import NoneArg, ScalarArg, TypedKernel
from tilewright.zyn.host.abstract_run import Looker, look, stand_in
from tilewright.zyn.host.dimensions import AbstractValue
from tilewright.zyn.host.functions import METHODS
from tilewright.zyn.known_extents import Extents, KnownExtents
from tilewright.zyn.module import ZynModule
from tilewright.zyn.module_check import ModuleCheck
from tilewright.zyn.module_links import call_module, linked
from tilewright.zyn.program_files import read_program

if TYPE_CHECKING:
    from tilewright.zyn.lazy.lazy_blocks import LazyBlocks

_ARRAY_PARTS = frozenset({"shape", "size", "ndim", "dtype", "T", *METHODS})


@dataclass(frozen=True)
class Entry:
    """One kernel of a file."""

    name: str
    function: Function
    args: tuple[tuple[str, GuessedArguments], ...]
    form: Hashable | None = field(default=None, compare=False, repr=False)
    """What kernels have in common that are right and quick together (`alike.py`), where that was asked for."""

    def signature(self, gpu: bool) -> Signature:
        """What to compile it for; extents that were given promise what divides them."""
        divisors: list[tuple[str, int, int]] = []
        hints: list[tuple[str, int, int]] = []
        extents: list[tuple[str, int, int]] = []
        for name, given in self.args:
            for axis, extent in enumerate(given.extents or ()):
                if gpu and extent is not None:
                    divisor = divisor_of(extent, given.spec(gpu))
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
    """One for each entry; fewer when there are errors. Kernels of one form share that of the first."""
    errors: list[Diagnostic] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    """Inputs of a program that are records or lists."""
    inputs: dict[str, GuessedArguments] = field(default_factory=dict)
    """Of a program: what it takes."""
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


def walk(file: File, known: Mapping[str, GuessedArguments], only: str | None = None, joined: bool = False, certain: bool = False, alike: bool = False) -> Walk:
    """Check every kernel of the file, or in a Python file the one called `only`. Errors are collected, not raised, but for names in
    `known` that nothing has. `joined`: blocks of a ZynML program that run as one program are one entry. With `certain`, errors that other
    arguments would not give are left out. With `alike`, blocks of a program that no check can tell apart are checked once."""
    if file.program is not None:
        inputs, check = _inputs(file, known)
        found = _walk_program(file.program, inputs, check, joined, alike)
        found.warnings = mistyped(file.program, [name for name in inputs if name not in known])
        found.inputs = inputs
        return found
    if any(function.name == only for function in file.kernels):
        file = replace(file, kernels=tuple(function for function in file.kernels if function.name == only))
    from tilewright.cli.guess_structs import without_structs

    result = Walk(errors=list(file.errors))
    _check_names(known, [p.name for function in file.kernels for p in function.params], file.path)
    for written in file.kernels:
        sink = Diagnostics()
        function, fields = without_structs(written, sink)
        if sink.errors:
            result.errors += sink.errors
            continue
        args = tuple((p.name, known.get(p.name) or fields.get(p.name) or guess(p.name, p.type, function)) for p in function.params)
        if certain and any(given.guessed for _, given in args):
            args = _likely(function, args)
        _check(Entry(function.name, function, args), result)
        if certain and (around := _from_closures(result.errors)):
            result.errors = [d for d in result.errors if d not in around]
        if certain and any(given.guessed for _, given in args) and len(result.typed) < len(result.entries):
            _leave_out_assumed(function, args, result)
        if any(p.optional for p in function.params):
            _check_without(function, args, result)
    return result


Arguments = tuple[tuple[str, GuessedArguments], ...]
_MOST_WAYS = 24


def _ways(args: Arguments) -> Iterator[Arguments]:
    """What else arguments may be of which nobody said anything: arrays of whole numbers, of more axes; whole numbers."""
    guessed = [at for at, (_, given) in enumerate(args) if given.guessed]

    def other(places: Sequence[int], axes: int, whole: bool) -> Arguments:
        return tuple((name, _another(given, axes, whole) if at in places else given) for at, (name, given) in enumerate(args))

    for axes, whole in ((0, True), (1, False), (2, False), (1, True)):
        yield from (other([at], axes, whole) for at in guessed)
        if len(guessed) > 1:
            yield other(guessed, axes, whole)


def _another(given: GuessedArguments, axes: int, whole: bool) -> GuessedArguments:
    if given.extents is None:
        return replace(given, dtype=i64, plain="int") if whole and given.plain == "float" else given
    return replace(given, dtype=i64 if whole else given.dtype, extents=(*given.extents, *(None,) * axes))


def _from_closures(errors: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Of errors about unknown names, those whose name a function around the kernel has: what it holds shows when that runs."""
    found: list[Diagnostic] = []
    unknown = [(d, match[1]) for d in errors if d.code == "TW002" and (match := re.fullmatch(r"unknown name '(\w+)'", d.message))]
    source = next((d.span.source for d, _ in unknown if d.span.source is not None), None)
    if source is None:
        return []
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError):
        return []
    for outer in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        names = {n.arg for n in ast.walk(outer.args) if isinstance(n, ast.arg)} | {n.id for n in ast.walk(outer) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        inner = [n for n in ast.walk(outer) if isinstance(n, ast.FunctionDef) and n is not outer]
        found += [d for d, name in unknown if name in names and any(n.lineno <= d.span.line <= (n.end_lineno or 0) for n in inner)]
    return found


def _errors_with(function: Function, args: Arguments) -> tuple[Diagnostic, ...]:
    try:
        check_kernel(function, Entry(function.name, function, args).signature(gpu=False).args)
    except UserError as error:
        return error.diagnostics
    return ()


def _likely(function: Function, args: Arguments) -> Arguments:
    """The arguments as they are guessed, or in the first other way that makes a right kernel."""
    if not _errors_with(function, args):
        return args
    return next((way for way in islice(_ways(args), _MOST_WAYS) if not _errors_with(function, way)), args)


def _leave_out_assumed(function: Function, args: Arguments, result: Walk) -> None:
    """Of the errors of the kernel only those stay that there are in every way."""
    places = [{(d.code, d.span.line, d.span.column) for d in _errors_with(function, way)} for way in islice(_ways(args), _MOST_WAYS)]
    own = _errors_with(function, args)
    assumed = [d for d in own if not all((d.code, d.span.line, d.span.column) in found for found in places)]
    if len(assumed) < len(own):
        result.errors = [d for d in result.errors if d not in assumed]


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

    def __init__(self, result: Walk, values: Mapping[str, object], inputs: Mapping[str, GuessedArguments], joined: bool = False, alike: bool = False) -> None:
        super().__init__()
        self.joins_blocks, self._alike = joined, alike
        self._result, self._values, self._inputs = result, values, inputs
        self._seen: dict[tuple[object, ...], object] = {}
        self._right: dict[Hashable, tuple[TypedKernel, list[Extents]]] = {}
        """By the form of a kernel that is right: it, and the extents of its results."""
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
        form = form_of(function) if self._alike else None
        if form is not None:
            form = form, tuple(given for _, given in args)
        entry = Entry(_unique(function.name, self._taken), function, args, form)
        right = self._right.get(form) if form is not None else None
        if right is None:
            typed = _check(entry, self._result)
            if typed is None:
                return AbstractValue()
            right = typed, _sizes(typed, args).results()
            if form is not None:
                self._right[form] = right
        else:
            self._result.entries.append(entry)
            self._result.typed.append(right[0])
        made = [self.array(output.dtype, extents) for output, extents in zip(right[0].outputs, right[1], strict=True)]
        self._seen[seen] = made[0] if len(made) == 1 else tuple(made)
        return self._seen[seen]

    def waiting(self, pipeline: str) -> LazyBlocks | None:
        if not self.joins_blocks:
            return None
        from tilewright.cli.looked_blocks import LookedBlocks

        return LookedBlocks(pipeline, self.fuser, self._together, self.view)

    def _together(self, function: Function, arguments: dict[str, object], device: str) -> object:
        """Blocks that are one program, or one that nobody else waits for."""
        if not isinstance(function, BlockGraph):
            return self(function, arguments, device)
        args = tuple((name, self._given(name, value)) for name, value in arguments.items())
        entry = Entry(_unique(function.name, self._taken), function, args)
        self._result.entries.append(entry)
        typed, _ = front_end(function, entry.signature(gpu=False))
        self._result.typed.append(typed)
        made = [self.array(output.dtype, extents) for output, extents in zip(typed.outputs, _sizes(typed, args).results(), strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

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


def _walk_program(program: Module, inputs: Mapping[str, GuessedArguments], check: ModuleCheck | None = None, joined: bool = False, alike: bool = False) -> Walk:
    program = linked(program)
    result = Walk(records=[name for name in inputs if is_record(name, program)])
    values: dict[str, object] = {name: AbstractValue() if name in result.records else _stand_in(given) for name, given in inputs.items()}
    _look(program, values, inputs, result, check, joined, alike)
    called = {n.id for n in nodes(program) if isinstance(n, syntax.Name)} | {
        n.id for s in program.body if isinstance(s, Function) for n in nodes(s) if isinstance(n, syntax.Name)
    }
    for function in program.body:
        if isinstance(function, Function) and function.name not in called and "__" not in function.name:
            _look_at_function(program, function, result, joined, alike)
    return result


def _look(
    program: Module, values: Mapping[str, object], inputs: Mapping[str, GuessedArguments], result: Walk, check: ModuleCheck | None = None, joined: bool = False,
    alike: bool = False,
) -> None:  # fmt: skip
    found = look(program, _SourceLooker(result, values, inputs, joined, alike), values, check)
    result.errors += [error for error in found if error not in result.errors]


def _look_at_function(program: Module, function: Function, result: Walk, joined: bool = False, alike: bool = False) -> None:
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
    _look(module, values, inputs, result, check, joined, alike)


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
        close = [other for other in close_matches(name, sorted(defined), 3, 0.8) if _is_slip(name, other)]
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


def _is_written(path: str, name: str) -> bool:
    """Whether a file uses a name: what the command line gives it a value for may be a variable around a kernel."""
    return re.search(rf"\b{name}\b", Path(path).read_text(encoding="utf-8")) is not None


def _check_names(known: Mapping[str, GuessedArguments], names: list[str] | tuple[str, ...], path: str) -> None:
    for name, given in known.items():
        if name not in names and not (given.value is not None and _is_written(path, name)):
            close = close_matches(name, names, 1)
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
