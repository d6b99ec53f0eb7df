"""The ZynML front end: text in, untyped tree out.

`parse_module` lexes, lays out (`layout.py`) and parses (`zyn.lark`, LALR) in one pass, building nodes as rules are recognised. Every
node has the exact span of its text. Whatever is wrong with the text is a `UserError`; nothing else leaves this module. After a mistake the
text is read on from the next declaration at the left margin, so that one error tells of all of them.
"""

from __future__ import annotations

import functools
import re

import lark

from tilewright.base.errors import UserError, in_order
from tilewright.base.forks import fork_safe_lock
from tilewright.base.source import Source, Span
from tilewright.frontend.zyn.build_tree import TreeBuilder, syntax_error, token_span
from tilewright.frontend.zyn.grammar_tables import make_parser
from tilewright.frontend.zyn.layout import LayoutError, LayoutReader
from tilewright.frontend.zyn.quick_parse import NotParsed, QuickParser
from tilewright.frontend.zyn.shipped_tables import packaged
from tilewright.frontend.zyn.syntax_messages import expectation, found
from tilewright.tree import syntax
from tilewright.tree.inline import parts_backwards

MOST_ERRORS = 20
"""Mistakes of one text that are told together."""
_DECLARATION = re.compile(r"^(?:(?:let|var|shared|fn|pipeline|config|import)\b|@)", re.MULTILINE)
"""What begins a declaration, at the left margin."""
MARK = "\ufeff"
"""The byte order mark, which some editors write before a text."""


def parse_module(text: str, path: str = "<string>") -> syntax.Module:
    """The tree of one ZynML text. Raises `UserError` (TW001) with the places that are not ZynML: the first of each stretch between declarations."""
    parser = _parser()
    # The builder and the layout step hold the state of one parse.
    with parser.lock:
        return parser.parse(Source(path, text.removeprefix(MARK)))


def layout_tokens(text: str, path: str = "<string>") -> list[lark.Token]:
    """The tokens of a text that parses, as the grammar sees them."""
    parser = _parser()
    with parser.lock:
        return parser.tokens(Source(path, text.removeprefix(MARK)))


class _ZynParser:
    def __init__(self) -> None:
        self.lock = fork_safe_lock()
        self._layout = LayoutReader()
        self._builder = TreeBuilder()
        grammar = packaged("zyn.lark")
        self._lark = make_parser(grammar, self._layout, self._builder)
        self._quick = QuickParser(self._lark)

    def parse(self, source: Source) -> syntax.Module:
        self._builder.source = source
        try:
            return self._parse_text(source, source.text)
        except UserError as error:
            raise self._every_error(error, source) from None

    def _every_error(self, error: UserError, source: Source) -> UserError:
        """The error, with those of the text behind it: reading goes on at declarations, as if nothing stood before them."""
        every = list(error.diagnostics)
        begin = 0
        for _ in range(MOST_ERRORS - 1):
            declaration = self._next_declaration(source, begin, error.diagnostics[0].span)
            if declaration is None:
                break
            begin = declaration
            blank = re.sub(r"[^\n]", " ", source.text[:begin])
            try:
                self._parse_text(source, blank + source.text[begin:])
                break
            except UserError as more:
                error = more
                if not _is_stray_closer(more, source):
                    every += more.diagnostics
        return UserError(*in_order(dict.fromkeys(every)))

    @staticmethod
    def _next_declaration(source: Source, begin: int, wrong: Span) -> int | None:
        """Where the text goes on: at a declaration behind the mistake; or at the one that was found where a bracket was still open."""
        for declaration in _DECLARATION.finditer(source.text, begin + 1):
            line = source.text.count("\n", 0, declaration.start()) + 1
            if line > wrong.line or (line == wrong.line and wrong.column == 1):
                return declaration.start()
        return None

    def _parse_text(self, source: Source, text: str) -> syntax.Module:
        self._layout.prepare(text)
        try:
            module = self._tree_of(text)
        except LayoutError as error:
            raise UserError.at("TW001", error.message, token_span(error.token, source), error.help) from None
        except lark.exceptions.UnexpectedCharacters as error:
            raise self._bad_character(error, source) from None
        except lark.exceptions.UnexpectedToken as error:
            raise self._bad_token(error, source) from None
        except lark.exceptions.LarkError as error:
            raise UserError.at("TW001", f"the text is not ZynML: {error}", Span(source)) from None
        assert isinstance(module, syntax.Module)
        _check_depth(module)
        return module

    def _tree_of(self, text: str) -> object:
        try:
            return self._quick.parse(text)
        except (NotParsed, lark.exceptions.LarkError):
            return self._lark.parse(text)  # which says what is wrong

    def tokens(self, source: Source) -> list[lark.Token]:
        self._layout.prepare(source.text)
        return list(self._lark.lex(source.text))

    def _bad_character(self, error: lark.exceptions.UnexpectedCharacters, source: Source) -> UserError:
        character = source.text[error.pos_in_stream or 0]
        line, column = error.line, error.column
        span = Span(source, line, column, line, column + 1)
        if character in "\"'":
            rest = len(source.line(line)) + 1
            span = Span(source, line, column, line, rest)
            return syntax_error("this string is not closed on its line", span, f"add {character} where it ends")
        shown = f"'{character}'" if character.isprintable() else f"U+{ord(character):04X}"
        return syntax_error(f"unexpected character {shown}", span)

    def _bad_token(self, error: lark.exceptions.UnexpectedToken, source: Source) -> UserError:
        token = error.token
        # `accepts` tries each terminal; `expected` would also list those that fail a few reductions later.
        accepts = error.accepts or error.expected
        message = f"expected {expectation(accepts, self._lark)}, found {found(token)}"
        span = _end_of_text(source) if token.type == "$END" else token_span(token, source)
        opener = self._layout.open_bracket
        help = ""
        if opener is not None and (opener.line or 0) < (token.line or 0):
            help = f"the '{opener}' of line {opener.line} is still open"
        return syntax_error(message, span, help)


MAX_DEPTH = 100
"""How deep operators and members may be nested in one expression: `a + b + c` is two deep. Later stages go down by recursion."""


def _check_depth(module: syntax.Module) -> None:
    """Refuse expressions too deep for the stages that follow."""
    waiting: list[tuple[object, int]] = [(module, 0)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, tuple):
            waiting.extend([(part, depth) for part in item])
        elif isinstance(item, syntax.Node):
            depth = depth + 1 if isinstance(item, _OPERATORS) else 0 if isinstance(item, syntax.Compute) else depth
            if depth > MAX_DEPTH:
                raise syntax_error(f"more than {MAX_DEPTH} operators or conditions are nested here", item.span, "compute parts in let statements")
            values = item.__dict__
            waiting.extend([(values[name], depth) for name in parts_backwards(type(item))])


_OPERATORS = (
    syntax.Binary, syntax.Unary, syntax.IfExpr, syntax.Attribute, syntax.Index, syntax.Call, syntax.Pipe, syntax.Tuple, syntax.List,
    syntax.Record, syntax.Await, syntax.ReduceExpr, syntax.If,
)  # fmt: skip


@functools.cache
def _parser() -> _ZynParser:
    return _ZynParser()


def _is_stray_closer(error: UserError, source: Source) -> bool:
    """Whether it is only about a bracket that was opened before the place where reading went on."""
    span = error.diagnostics[0].span
    return source.line(span.line)[span.column - 1 : span.column] in tuple(")]}")


def _end_of_text(source: Source) -> Span:
    lines = source.text.split("\n")
    while len(lines) > 1 and not lines[-1].strip():
        lines.pop()
    column = len(lines[-1].rstrip()) + 1
    return Span(source, len(lines), column, len(lines), column + 1)
