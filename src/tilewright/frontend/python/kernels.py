"""The Python front end: a function in loop style in, untyped tree out.

`parse_function` reads the source of a live function; captured numbers become literals. `parse_python_file` finds the functions under
`@tw.kernel` in a file without running it. Decorators and their arguments are not looked at further.

What holds for the tree: the kind is "kernel"; words of Tilewright are plain names (`tw.exp` is `exp`, `tw.f32` is `f32`); a name's
first assignment that is visible in a block is a `Let(mutable=True)`, later ones are `Assign`; `tw.grid` loops are parallel 'yes',
`range` loops 'no'. Annotations: `tw.Array` is `array`, a dtype its name, `Annotated[tw.Array, "f32[rows, cols]"]` and the bare string
`"f32[rows, cols]"` are `Index(Name("f32"), (Name("rows"), Name("cols")))`. Spans point into the real file.

Everything a kernel cannot contain is reported at once, as TW005, with what to write instead.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from tilewright.base.errors import Diagnostics, UserError
from tilewright.base.source import Source, Span
from tilewright.frontend.python.annotations import check_parameter, without_none
from tilewright.frontend.python.defaults import check_default, check_result, constant
from tilewright.frontend.python.expressions import ExpressionReader, SourcePlace
from tilewright.frontend.python.kernel_options import decorated
from tilewright.frontend.python.names import PACKAGE, Called, Environment, Opaque, Word, is_package
from tilewright.frontend.python.nesting import reading
from tilewright.frontend.python.sources import lines_of, missing_source
from tilewright.tree import syntax
from tilewright.tree.inline import inline, nodes
from tilewright.tree.jumps import without_jumps
from tilewright.tree.syntax import Expr, Stmt

_HELP: dict[type[ast.stmt], tuple[str, str]] = {
    ast.Try: ("try", "check the values before the kernel is called"),
    ast.With: ("with", "open resources before the kernel is called"),
    ast.AsyncWith: ("async with", "open resources before the kernel is called"),
    ast.AsyncFor: ("async for", "loop over tw.grid(...) or range(...)"),
    ast.Delete: ("del", "leave it out: variables end with their block"),
    ast.Global: ("global", "pass the value as a parameter and return the result"),
    ast.Nonlocal: ("nonlocal", "pass the value as a parameter and return the result"),
    ast.Import: ("import", "import at the top of the file"),
    ast.ImportFrom: ("import", "import at the top of the file"),
    ast.ClassDef: ("class", "use plain variables"),
    ast.FunctionDef: ("a nested function", "write its body where it is called"),
    ast.AsyncFunctionDef: ("a nested function", "write its body where it is called"),
    ast.Raise: ("raise", "check the values before the kernel is called"),
    ast.Match: ("match", "use if and elif"),
}

_MAKERS = ("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "shared", "local")

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.MatMult: "@",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
}  # fmt: skip


def parse_function(function: Callable[..., object], attributes: tuple[syntax.KernelAttribute, ...] = ()) -> syntax.Function:
    """The tree of a live Python function, with attributes its decorator gave it. Raises `UserError`."""
    refuse_wrapper(function)
    function = inspect.unwrap(function)
    name = getattr(function, "__name__", repr(function))
    module, place, span = parse_live(function, name)
    definition = next((n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), None)
    if definition is None or definition.name != name:
        raise UserError.at("TW005", f"'{name}' is not a kernel: only a 'def' can be one", span, "write it as a function with 'def'")
    sink = Diagnostics()
    with reading(function, name):
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items() if p.default is not p.empty}
        tree = FunctionReader(place, Environment.of_function(function), sink, attributes, defaults).read(definition)
    sink.raise_if_errors()
    return tree


def refuse_wrapper(function: Callable[..., object]) -> None:
    """A decorator under that of the kernel may put a function of its own around it; what that does would be lost. Raises `UserError`."""
    inner = getattr(function, "__wrapped__", None)
    if isinstance(function, types.FunctionType) and isinstance(inner, types.FunctionType):
        place = Span(Source(inner.__code__.co_filename, "".join(linecache.getlines(inner.__code__.co_filename))), inner.__code__.co_firstlineno, 1, inner.__code__.co_firstlineno, 2)
        raise UserError.at(
            "TW005", f"'{inner.__name__}' is wrapped in another function by a decorator, which a kernel cannot run", place,
            "put that decorator above the one of the kernel, or remove it",
        )  # fmt: skip


def parse_live(function: Callable[..., object], name: str) -> tuple[ast.Module, SourcePlace, Span]:
    """Python's tree of the lines a live function stands on, their place, and where they begin. Raises `UserError`."""
    try:
        lines, first_line = _source_lines(function) if name != "<lambda>" else _lambda_lines(function)
        path = _path(function)
    except (OSError, TypeError):
        raise missing_source(name, getattr(function, "__code__", None)) from None
    text = "".join(lines)
    # Put under an `if`, an indented function parses as it is, and columns stay those of the file.
    indented = text[:1] in (" ", "\t")
    place = SourcePlace(Source(path, text, first_line), line_offset=first_line - (2 if indented else 1))
    module = _parse_text("if 1:\n" + text if indented else text, place)
    return module, place, Span(place.source, first_line, 1, first_line, 1)


def _source_lines(function: Callable[..., object]) -> tuple[list[str], int]:
    """The function's lines and the number of the first one.

    `inspect` tokenises to find where a function ends; its bytecode says so too, a hundred times faster.
    """
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType) and code.co_firstlineno > 0:
        lines = lines_of(code, getattr(function, "__globals__", None))
        first = code.co_firstlineno
        last = max((end for _, end, _, _ in code.co_positions() if end), default=0)
        text = lines[first - 1 : last]
        if text and text[0].lstrip().startswith(("def", "@", "async")) and _is_complete(text):
            return text, first
        if lines and not linecache.getlines(code.co_filename):
            return inspect.getblock(lines[first - 1 :]), first
    return inspect.getsourcelines(function)


def _lambda_lines(function: Callable[..., object]) -> tuple[list[str], int]:
    """The lines a lambda stands on and the number of the first one."""
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType) and not linecache.getlines(code.co_filename):
        lines = lines_of(code)
        if lines:
            return inspect.getblock(lines[code.co_firstlineno - 1 :]), code.co_firstlineno
    return inspect.getsourcelines(function)


def _path(function: Callable[..., object]) -> str:
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType) and code.co_filename.startswith("<"):
        return code.co_filename
    return inspect.getsourcefile(function) or (code.co_filename if isinstance(code, types.CodeType) else "<unknown>")


def _is_complete(lines: list[str]) -> bool:
    """Whether the lines are a whole definition: a closing bracket may stand alone on the line after the last instruction."""
    text = "".join(lines)
    try:
        ast.parse("if 1:\n" + text if text[:1] in (" ", "\t") else text)
    except SyntaxError:
        return False
    return True


def parse_python_file(text: str, path: str, sink: Diagnostics | None = None) -> list[syntax.Function]:
    """The trees of all kernels in a Python file, in order, without executing it. Errors of all of them are raised together, or go to
    the `sink`: what could not be read is `syntax.Broken` in the trees then."""
    text = text.removeprefix("\ufeff")  # the byte order mark of some editors
    place = SourcePlace(Source(path, text))
    module = _parse_text(text, place)
    environment = Environment.of_file(module)
    raises, sink = sink is None, Diagnostics() if sink is None else sink

    def read(node: ast.FunctionDef | ast.AsyncFunctionDef) -> syntax.Function:
        with reading(node, node.name):
            attributes, options = decorated([d for d in node.decorator_list if _is_kernel(d, environment)], place, sink)
            return replace(FunctionReader(place, environment, sink, attributes).read(node), options=options)

    for node in module.body:
        if isinstance(node, ast.FunctionDef) and any(_is_kernel(d, environment) for d in node.decorator_list):
            environment.define(node.name, Called(node.name, node, partial(read, node)))
    functions = [
        read(node)
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(_is_kernel(d, environment) for d in node.decorator_list)
    ]
    if raises:
        sink.raise_if_errors()
    return sorted(functions, key=lambda f: (f.span.line, f.span.column))


@lru_cache(maxsize=64)
def read_library(text: str) -> syntax.Function:
    """The tree of a kernel that stands for a function."""
    (found,) = parse_python_file(text, "<tilewright>")
    return found


def _parse_text(text: str, place: SourcePlace) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise _syntax_error(error, place) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError.at("TW001", f"the text is not Python: {error}", Span(place.source)) from None


def _is_kernel(decorator: ast.expr, environment: Environment) -> bool:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    if isinstance(decorator, ast.Name):
        return environment.meaning(decorator.id) == Word("kernel")
    if isinstance(decorator, ast.Attribute) and decorator.attr == "kernel" and isinstance(decorator.value, ast.Name):
        owner = environment.meaning(decorator.value.id)
        return (isinstance(owner, Opaque) and is_package(owner.value)) or (owner is None and decorator.value.id == PACKAGE)
    return False


def _syntax_error(error: SyntaxError, place: SourcePlace) -> UserError:
    line = (error.lineno or 1) + place.line_offset
    column = error.offset or 1
    end = max(column + 1, error.end_offset or 0) if error.end_lineno in (None, error.lineno) else column + 1
    result = UserError.at("TW001", f"invalid Python: {error.msg}", Span(place.source, line, column, line, end))
    assert isinstance(result, UserError)
    return result


class FunctionReader:
    """Reads one function definition. `_visible` mirrors the blocks that are open: which names have a value there."""

    def __init__(
        self, place: SourcePlace, environment: Environment, sink: Diagnostics, attributes: tuple[syntax.KernelAttribute, ...] = (),
        defaults: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        """`defaults`: those of a live function, whatever expressions they came from."""
        self._attributes = attributes
        self._defaults = defaults
        self._place = place
        self._environment = environment
        self._sink = sink
        self._visible: list[set[str]] = []
        self._gone: dict[str, int] = {}
        """Names whose block has ended, with the line of their first assignment."""
        self._stale: dict[str, tuple[int, int]] = {}
        """Variables that were the index of a loop since their last assignment, with its line and the blocks around it."""
        self._around = 0
        """Loops around the current place."""
        self._loop_blocks: list[tuple[str, ...]] = []
        """The indices of these loops."""
        self._chains = 0
        """Assignments with several targets so far."""
        self._hidden = 0
        """Names made up so far for what nobody reads."""
        self._ignores = False
        """Whether `_` is only ever assigned."""

    def read(self, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> syntax.Function:
        try:
            return self._read(definition)
        except RecursionError:
            raise UserError.at(
                "TW005", f"'{definition.name}' is nested too deeply", self._place.head(definition), "split long expressions into variables"
            ) from None

    def _read(self, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> syntax.Function:
        if isinstance(definition, ast.AsyncFunctionDef):
            self._unsupported(definition, "an async function", "write it with a plain 'def'")
        local_names = _local_names(definition)
        self._expressions = ExpressionReader(self._place, self._environment, self._sink, local_names, self._check_read, read_library)
        params = self._params(definition.args)
        self._ignores = not any(isinstance(n, ast.Name) and n.id == "_" and isinstance(n.ctx, ast.Load) for n in ast.walk(definition))
        self._visible = [{p.name for p in params}]
        body = self._block(definition.body, own_scope=False)
        result = None if definition.returns is None else self._expressions.annotation(definition.returns)
        check_result(definition.name, result, self._sink)
        tree = syntax.Function(definition.name, params, result, body, "kernel", self._attributes, span=self._span(definition))
        return inline(without_jumps(tree, self._sink), self._sink)

    def _span(self, node: ast.stmt | ast.expr | ast.arg) -> Span:
        return self._place.span(node)

    def _unsupported(self, node: ast.stmt | ast.expr | ast.arg, what: str, help: str) -> None:
        self._sink.error("TW005", f"{what} is not available in a kernel", self._span(node), help)

    def _params(self, arguments: ast.arguments) -> tuple[syntax.Param, ...]:
        for extra, star in ((arguments.vararg, "*"), (arguments.kwarg, "**")):
            if extra is not None:
                self._unsupported(extra, f"'{star}{extra.arg}'", "name every parameter")
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
        defaults += [*arguments.defaults, *arguments.kw_defaults]
        params: list[syntax.Param] = []
        for argument, default in zip([*positional, *arguments.kwonlyargs], defaults):
            written = None if argument.annotation is None else self._expressions.annotation(argument.annotation)
            annotation, optional = without_none(written)
            check_parameter(argument.arg, annotation, self._sink)
            value = None if default is None else self._default(argument.arg, default)
            optional = optional or (written is None and isinstance(value, syntax.Nothing))
            only, in_place = argument in arguments.kwonlyargs, self._expressions.is_in_place(argument.annotation)
            params.append(syntax.Param(argument.arg, annotation, value, optional, only, in_place, span=self._span(argument)))
            check_default(params[-1], self._sink)
        return tuple(params)

    def _default(self, name: str, node: ast.expr) -> Expr | None:
        """A default as an expression; None for an array, which only calls from Python can use."""
        if self._defaults is None or name not in self._defaults:
            return self._expressions.read(node)
        return constant(self._defaults[name], self._span(node))

    def _hide(self, name: str) -> str:
        """A name of its own for each `_` that nobody reads."""
        if name != "_" or not self._ignores:
            return name
        self._hidden += 1
        return f"_${self._hidden}"

    # -- names ------------------------------------------------------------------------------------------------------

    def _is_visible(self, name: str) -> bool:
        return any(name in names for names in self._visible)

    def _check_read(self, node: ast.Name) -> None:
        """Python's variables live on after their block; in a kernel they do not, so say what to do."""
        if node.id in self._stale and not any(node.id in names for names in self._visible[self._stale[node.id][1] :]):
            self._sink.error(
                "TW010", f"'{node.id}' was the index of the loop of line {self._stale[node.id][0]}: in Python it has its last value after that", self._span(node),
                "choose another name for the index",
            )  # fmt: skip
        elif not self._is_visible(node.id) and node.id in self._gone:
            self._sink.error(
                "TW005", f"'{node.id}' has a value only inside the block of line {self._gone[node.id]}", self._span(node),
                f"assign '{node.id}' before that block",
            )  # fmt: skip

    def _declare(self, name: str, line: int) -> None:
        self._visible[-1].add(name)
        self._gone.setdefault(name, line)

    # -- statements -------------------------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt], own_scope: bool = True, names: Sequence[str] = ()) -> tuple[Stmt, ...]:
        if own_scope:
            self._visible.append(set(names))
        result: list[Stmt] = []
        for statement in body:
            known = len(self._sink.items)
            read = self._statement(statement)
            result.extend(read if read or len(self._sink.items) == known else self._broken(statement))
        if own_scope:
            self._visible.pop()
        return tuple(result)

    def _statement(self, node: ast.stmt) -> list[Stmt]:
        span = self._span(node)
        if isinstance(node, ast.Pass):
            return []
        if isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Yield) and node.value.value is not None and self._attributes:
                return [syntax.Yield(self._expressions.read(node.value.value), span=span)]
            if isinstance(node.value, ast.Call) and self._expressions.called_word(node.value) == "print":
                return self._print(node.value, span)
            is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            return [] if is_text else [syntax.ExprStmt(self._expressions.read(node.value), span=span)]
        if isinstance(node, ast.Assign):
            value = self._expressions.read(node.value)
            if len(node.targets) > 1:
                return self._chained(node, value, span)
            return self._assign(node.targets[0], value, span)
        if isinstance(node, ast.AnnAssign):
            return self._annotated(node, span)
        if isinstance(node, ast.AugAssign):
            target, value = self._expressions.read(node.target), self._expressions.read(node.value)
            return [syntax.Assign(target, value, _OPERATORS[type(node.op)], span=span)]
        if isinstance(node, ast.Return):
            is_none = node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
            return [syntax.Return(None if is_none or node.value is None else self._expressions.read(node.value), span=span)]
        if isinstance(node, ast.If):
            condition = self._expressions.test(node.test)
            # What both branches assign lives on after them, as in Python; the zero it starts with is never seen.
            both = sorted(name for name in _always_assigned([node]) if not self._is_visible(name))
            for name in both:
                self._declare(name, node.lineno + self._place.line_offset)
            start = [syntax.Let((name,), syntax.Number(0, span=span), mutable=True, span=span) for name in both]
            return [*start, syntax.If(condition, self._block(node.body), self._block(node.orelse), span=span)]
        if isinstance(node, ast.While):
            self._no_else(node.orelse, "while")
            test = self._expressions.test(node.test)
            self._around += 1
            body = self._block(node.body)
            self._around -= 1
            return [syntax.While(test, body, span=span)]
        if isinstance(node, ast.Assert):
            if node.msg is not None and not (isinstance(node.msg, ast.Constant) and isinstance(node.msg.value, str)):
                self._unsupported(node.msg, "a message that is computed", "write it as a text; print the numbers before it")
                return []
            message = str(node.msg.value) if isinstance(node.msg, ast.Constant) else ast.unparse(node.test)
            return [syntax.Assert(self._expressions.test(node.test), message, span=span)]
        if isinstance(node, ast.Break | ast.Continue):
            return [syntax.Break(span=span) if isinstance(node, ast.Break) else syntax.Continue(span=span)]
        if isinstance(node, ast.For):
            self._no_else(node.orelse, "for")
            return self._for(node, span)
        what, help = _HELP.get(type(node), (type(node).__name__.lower(), "leave it out of the kernel"))
        self._sink.error("TW005", f"{what} is not available in a kernel", self._place.head(node), help)
        return []

    def _broken(self, node: ast.stmt) -> list[Stmt]:
        """A statement that was not read: the names it gives a value have one nobody knows."""
        span = self._place.head(node)
        names = dict.fromkeys(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and not self._is_visible(n.id))
        for name in names:
            self._declare(name, node.lineno + self._place.line_offset)
        nothing = syntax.Broken(span=span)
        return [syntax.Let((name,), nothing, mutable=True, span=span) for name in names] or [syntax.ExprStmt(nothing, span=span)]

    def _print(self, node: ast.Call, span: Span) -> list[Stmt]:
        """`print(…)`: texts, f-strings and numbers; `sep` and `end` are texts."""
        words = {"sep": " ", "end": "\n"}
        for keyword in node.keywords:
            if keyword.arg not in words or not isinstance(keyword.value, ast.Constant) or not isinstance(keyword.value.value, str):
                self._unsupported(keyword.value, f"'{keyword.arg}' of print", "its arguments are sep and end, two texts")
                return []
            words[keyword.arg] = keyword.value.value
        parts: list[str] = []
        values: list[Expr] = []
        for argument in node.args:
            pieces = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
            text = ""
            for piece in pieces:
                if isinstance(piece, ast.Constant) and isinstance(piece.value, str):
                    text += _escaped(piece.value)
                    continue
                inner = piece.value if isinstance(piece, ast.FormattedValue) else piece
                spec = piece.format_spec if isinstance(piece, ast.FormattedValue) else None
                form = "".join(str(v.value) for v in spec.values if isinstance(v, ast.Constant)) if isinstance(spec, ast.JoinedStr) else ""
                if isinstance(piece, ast.FormattedValue) and (piece.conversion != -1 or (isinstance(spec, ast.JoinedStr) and any(not isinstance(v, ast.Constant) for v in spec.values))):
                    self._unsupported(inner, "'!' or a computed format in an f-string", "write the format out")
                    return []
                text += f"{{:{form}}}" if form else "{}"
                values.append(self._expressions.read(inner))
            parts.append(text)
        return [syntax.Print(_escaped(words["sep"]).join(parts) + _escaped(words["end"]), tuple(values), span=span)]

    def _no_else(self, body: list[ast.stmt], loop: str) -> None:
        if body:
            self._unsupported(body[0], f"'else' after '{loop}'", "set a flag in the loop and test it in an if")

    def _assign(self, target: ast.expr, value: Expr, span: Span) -> list[Stmt]:
        if isinstance(target, ast.Name):
            if len(self._visible) <= self._stale.get(target.id, (0, 0))[1]:
                del self._stale[target.id]
            if self._is_visible(target.id):
                return [syntax.Assign(self._expressions.read(target), value, span=span)]
            self._declare(target.id, target.lineno + self._place.line_offset)
            return [_shared(target.id, value, span) or syntax.Let((target.id,), value, mutable=True, span=span)]
        if isinstance(target, ast.Tuple | ast.List):
            return self._destructure(target, value, span)
        return [syntax.Assign(self._expressions.read(target), value, span=span)]

    def _chained(self, node: ast.Assign, value: Expr, span: Span) -> list[Stmt]:
        """`a = out[i] = value`: the value is computed once, and every target gets it, from left to right."""
        if isinstance(value, syntax.Number | syntax.Bool):
            return [s for target in node.targets for s in self._assign(target, value, span)]
        creation = self._expressions.called_word(node.value)
        if isinstance(value, syntax.Tuple) or creation in _MAKERS or any(isinstance(t, ast.Tuple | ast.List) for t in node.targets):
            what = "one array under several names" if creation in _MAKERS else "a tuple with several targets"
            self._unsupported(node, what, "write one assignment for each target")
            return []
        self._chains += 1
        name = f"value{self._chains}$"
        result: list[Stmt] = [syntax.Let((name,), value, mutable=True, span=span)]
        for target in node.targets:
            result += self._assign(target, syntax.Name(name, span=value.span), span)
        return result

    def _destructure(self, target: ast.Tuple | ast.List, value: Expr, span: Span) -> list[Stmt]:
        starred = next((t for t in target.elts if isinstance(t, ast.Starred)), None)
        if starred is not None:
            self._unsupported(starred, "a starred target", "name every variable")
            return []
        if any(isinstance(t, ast.Tuple | ast.List) for t in target.elts) or _makes_arrays(target, value):
            return self._nested(target, value, span)
        names = [self._hide(t.id) for t in target.elts if isinstance(t, ast.Name)]
        new = [name for name in names if not self._is_visible(name)]
        if len(names) == len(target.elts) and len(set(new)) == len(names):
            for name in names:
                self._declare(name, target.lineno + self._place.line_offset)
            return [syntax.Let(tuple(names), value, mutable=True, destructure=True, span=span)]
        for name in new:
            self._declare(name, target.lineno + self._place.line_offset)
        # What new names start with is never seen.
        start = [syntax.Let((name,), syntax.Number(0, span=span), mutable=True, span=span) for name in dict.fromkeys(new)]
        own = iter(names)
        items = [syntax.Name(next(own), span=self._span(t)) if isinstance(t, ast.Name) else self._expressions.read(t) for t in target.elts]
        return [*start, syntax.Assign(syntax.Tuple(tuple(items), span=self._span(target)), value, span=span)]

    def _nested(self, target: ast.Tuple | ast.List, value: Expr, span: Span) -> list[Stmt]:
        """`(m, d), n = x.shape, y.shape[1]` and `a, b = tw.empty(…), tw.empty(…)`: one assignment after the other, which is the same where all names
        are new."""
        names = [n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        plain = all(isinstance(n, ast.Name | ast.Tuple | ast.List | ast.expr_context) for n in ast.walk(target))
        if not isinstance(value, syntax.Tuple) or not plain or len(set(names)) < len(names) or any(self._is_visible(n) for n in names):
            self._unsupported(target, "this tuple of targets", "write one assignment for each part")
            return []
        if len(value.items) != len(target.elts):
            self._sink.error("TW003", f"there are {len(value.items)} values, but {len(target.elts)} targets are given", span)
            return []
        return [s for part, item in zip(target.elts, value.items) for s in self._assign(part, item, span)]

    def _annotated(self, node: ast.AnnAssign, span: Span) -> list[Stmt]:
        if not isinstance(node.target, ast.Name):
            self._unsupported(node, "a type on an element or field", "remove the type")
            return []
        if node.value is None:
            self._unsupported(node, f"'{node.target.id}' without a value", f"write '{node.target.id}: type = value'")
            return []
        if self._is_visible(node.target.id):
            self._unsupported(node, f"a second type for '{node.target.id}'", "give the type at the first assignment")
            return []
        value = self._expressions.read(node.value)
        self._declare(node.target.id, node.lineno + self._place.line_offset)
        return [syntax.Let((node.target.id,), value, mutable=True, type=self._expressions.annotation(node.annotation), span=span)]

    # -- loops ------------------------------------------------------------------------------------------------------

    def _for(self, node: ast.For, span: Span) -> list[Stmt]:
        names = self._loop_names(node.target)
        word = self._expressions.called_word(node.iter)
        if word not in ("range", "grid") or not isinstance(node.iter, ast.Call):
            self._unsupported(node.iter, "a loop over this", "loop over tw.grid(...) or range(...) and index")
            return self._broken_loop(node, names, span)
        if node.iter.keywords:
            self._unsupported(node.iter, f"a keyword in {word}()", "give the bounds in order")
            return self._broken_loop(node, names, span)
        before: list[Stmt] = []
        if word == "range":
            found = [self._range(node.iter)]
        else:
            before, bounds = self._spread(node.iter.args, len(names))
            found = [self._extent(argument) if isinstance(argument, ast.expr) else argument for argument in bounds]
        ranges = tuple(r for r in found if r is not None)
        if not names or not ranges:
            if not node.iter.args:
                self._unsupported(node.iter, f"{word}() without bounds", f"write {word}(n)")
            return self._broken_loop(node, names, span)
        if len(names) != len(ranges):
            self._sink.error(
                "TW016", f"{len(names)} loop variable(s) for {len(ranges)} range(s)", self._span(node.target),
                f"give {word}() one bound for each variable" if word == "grid" else "use tw.grid(...) for several variables",
            )  # fmt: skip
            return self._broken_loop(node, names, span)
        for name in names:
            self._gone.setdefault(name, node.lineno + self._place.line_offset)
        indices = {name for block in self._loop_blocks for name in block}
        hidden = [name for name in names if self._is_visible(name) and name not in indices]
        if hidden and self._around:
            self._sink.error("TW010", f"'{hidden[0]}' has a value already, and the loop would change it", self._span(node.target), "choose another name for the index")
        self._around += 1
        self._loop_blocks.append(names)
        body = self._block(node.body, names=names)
        self._loop_blocks.pop()
        self._around -= 1
        for name in hidden:
            self._stale[name] = node.lineno + self._place.line_offset, len(self._visible)
        return [*before, syntax.For(names, ranges, body, "yes" if word == "grid" else "no", span=span)]

    def _spread(self, arguments: Sequence[ast.expr], count: int) -> tuple[list[Stmt], list[ast.expr | syntax.RangeExpr]]:
        """Bounds of a grid with `*x.shape` among them: the loop variables say how many axes it has, which is checked."""
        starred = [a for a in arguments if isinstance(a, ast.Starred)]
        if not starred:
            return [], list(arguments)
        own = count - len(arguments) + 1
        if len(starred) > 1 or own < 1:
            self._unsupported(starred[-1], "this '*' in tw.grid()", "give one '*' at most, and a variable for each axis")
            return [], []
        span = self._span(starred[0])
        self._hidden += 1
        extents = tuple(f"extent${self._hidden}${axis}" for axis in range(own))
        let = syntax.Let(extents, self._expressions.read(starred[0].value), mutable=True, destructure=True, span=span)
        ranges = [syntax.RangeExpr(syntax.Number(0, span=span), syntax.Name(name, span=span), span=span) for name in extents]
        place = arguments.index(starred[0])
        return [let], [*arguments[:place], *ranges, *arguments[place + 1 :]]

    def _broken_loop(self, node: ast.For, names: tuple[str, ...], span: Span) -> list[Stmt]:
        """A loop whose head was not read; its body is, for what else is wrong."""
        nothing = syntax.Broken(span=self._span(node.iter))
        names = names or tuple(dict.fromkeys(n.id for n in ast.walk(node.target) if isinstance(n, ast.Name))) or ("_",)
        self._around += 1
        body = self._block(node.body, names=names)
        self._around -= 1
        return [syntax.For(names, (syntax.RangeExpr(nothing, nothing, span=nothing.span),) * len(names), body, "no", span=span)]

    def _loop_names(self, target: ast.expr) -> tuple[str, ...]:
        items = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        names = tuple(self._hide(t.id) for t in items if isinstance(t, ast.Name))
        if len(names) != len(items):
            self._unsupported(target, "this loop variable", "use plain names")
            return ()
        return names

    def _range(self, call: ast.Call) -> syntax.RangeExpr | None:
        span = self._span(call)
        if not 1 <= len(call.args) <= 3:
            if call.args:
                self._sink.error("TW016", f"range takes 1 to 3 arguments, got {len(call.args)}", span, "write range(start, stop, step)")
            return None
        bounds = [self._expressions.read(a) for a in call.args]
        if len(bounds) == 1:
            bounds.insert(0, syntax.Number(0, span=span))
        return syntax.RangeExpr(bounds[0], bounds[1], bounds[2] if len(bounds) > 2 else None, span=span)

    def _extent(self, node: ast.expr) -> syntax.RangeExpr | None:
        """One bound of `tw.grid`: an extent, or a `range` of its own."""
        if isinstance(node, ast.Call) and self._expressions.called_word(node) == "range":
            return self._range(node)
        span = self._span(node)
        return syntax.RangeExpr(syntax.Number(0, span=span), self._expressions.read(node), span=span)


def _makes_arrays(target: ast.Tuple | ast.List, value: Expr) -> bool:
    """Whether names are given arrays that the kernel makes, of sizes that none of these names holds."""
    items = value.items if isinstance(value, syntax.Tuple) else ()
    names = {t.id for t in target.elts if isinstance(t, ast.Name)}
    made = any(isinstance(item, syntax.Call) and isinstance(item.function, syntax.Name) and item.function.id in _MAKERS for item in items)
    return made and not any(isinstance(node, syntax.Name) and node.id in names for node in nodes(items))


def _shared(name: str, value: Expr, span: Span) -> syntax.Let | None:
    """`name = tw.shared(shape, dtype)` is a declaration of its own."""
    if not isinstance(value, syntax.Call) or value.function != syntax.Name("shared") or not 1 <= len(value.args) <= 2:
        return None
    arguments = {a.keyword or ("shape", "dtype")[position]: a.value for position, a in enumerate(value.args)}
    if "shape" not in arguments or not set(arguments) <= {"shape", "dtype"}:
        return None
    return syntax.Let((name,), None, mutable=True, type=arguments.get("dtype"), shared=True, extents=(arguments["shape"],), span=span)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _always_assigned(body: Sequence[ast.stmt]) -> set[str]:
    """Names that have a value after the statements, whichever branches were taken."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Assign):
            names.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.If):
            names |= _always_assigned(node.body) & _always_assigned(node.orelse)
    return names


def _local_names(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """Every name the function binds: in Python such a name is local in the whole function."""
    names = {a.arg for a in ast.walk(definition.args) if isinstance(a, ast.arg)}
    for node in ast.walk(ast.Module(definition.body, [])):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)
