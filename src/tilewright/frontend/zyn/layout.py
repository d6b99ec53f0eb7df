"""The layout step of ZynML: from raw tokens to tokens with line ends, indented blocks and words that mean something in place.

In: the lexer's tokens, with a NEWLINE for every line break of the text. Out: the tokens the grammar is written in: one NEWLINE
where a statement ends, INDENT and DEDENT around an indented block, LRECORD for the brace of a record, and NAME tokens turned into
VAR, STEP, COMPUTE… where their place makes them words of the language. `zyn.lark` states the rules at its head.

What holds: every INDENT has its DEDENT, brackets match, and every statement ends in exactly one NEWLINE or a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lark import Token

MAX_NESTING = 100

_OPENERS = {"(": ")", "[": "]", "{": "}"}
_CLOSERS = frozenset(_OPENERS.values())
_ENDS_VALUE = frozenset({"NAME", "INT", "FLOAT", "IMAGINARY", "QUANTITY", "STRING", "INF", "TRUE", "FALSE", "RPAR", "RSQB", "RBRACE"})
_STARTS_STATEMENT = frozenset({"NEWLINE", "INDENT", "DEDENT", "LBRACE", "COLON", "SEMICOLON"})
_WORDS = frozenset({"AND", "OR", "NOT", "IN"})
_CONTINUES = frozenset(["+", "-", "*", "/", "%", "**", "@", "&", "|", "^", "~", "=", ",", ".", "|>", "->"])
"""A line that ends in one of these goes on in the next one."""


class LayoutError(Exception):
    """The text breaks a rule of layout; `token` is the place, `help` one action."""

    def __init__(self, message: str, token: Token, help: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.token = token
        self.help = help


@dataclass
class _Context:
    """What is open: the file itself, a bracket, a record or a block in braces."""

    opener: Token | None
    kind: str
    """'file', 'bracket', 'record', 'config', 'block' or 'compute'."""
    column: int | None = None
    """Where statements begin; not known before the first line that begins with one."""
    line_column: int = 1
    """Where the line that is being read begins."""
    indents: list[tuple[int, bool]] = field(default_factory=list)
    """Indented blocks inside: their column, and whether the block is a `compute(…):`."""
    compute_pending: bool = False
    """A `compute(…)` has been read and its block has not begun."""

    @property
    def has_lines(self) -> bool:
        return self.kind in ("file", "block", "compute")


class LayoutReader:
    """The lark post-lexer. One instance serves one parse at a time; `open_bracket` is for messages after a failure."""

    always_accept: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._text = ""
        self._stack: list[_Context] = []
        self._previous: Token | None = None

    def prepare(self, text: str) -> None:
        """Say what text the next `process` is about."""
        self._text = text

    @property
    def open_bracket(self) -> Token | None:
        """The innermost bracket that is still open, if it is one that makes line ends meaningless."""
        context = self._stack[-1] if self._stack else None
        return context.opener if context is not None and not context.has_lines else None

    def process(self, stream: Iterable[Token]) -> Iterator[Token]:
        """The tokens for the parser."""
        self._stack = [_Context(None, "file")]
        self._previous = None
        line_break = True
        for token, following in _with_following(stream):
            context = self._stack[-1]
            if token.type == "NEWLINE":
                line_break = context.has_lines
                continue
            if line_break and token.value != "}":
                yield from self._begin_line(context, token)
            line_break = False
            if token.value in _CLOSERS and token.type != "STRING":
                yield from self._close(token)
            elif token.value in _OPENERS and token.type != "STRING":
                yield self._emit(self._open(context, token))
            else:
                yield self._emit(self._word(context, token, following))
        yield from self._end()

    def _emit(self, token: Token) -> Token:
        self._previous = token
        return token

    def _make(self, kind: str, near: Token) -> Token:
        """A token without text: a NEWLINE stands right behind the token before it, the others at `near`."""
        previous = self._previous
        if kind != "NEWLINE" or previous is None or previous.end_line is None or previous.end_column is None:
            return self._emit(Token.new_borrow_pos(kind, "", near))
        line, column, position = previous.end_line, previous.end_column, previous.end_pos
        return self._emit(Token(kind, "", position, line, column, line, column, position))

    # -- lines and blocks -------------------------------------------------------------------------------------------

    def _begin_line(self, context: _Context, token: Token) -> Iterator[Token]:
        previous = self._previous
        column = token.column or 1
        start = token.start_pos or 0
        if "\t" in self._text[start - column + 1 : start]:
            raise LayoutError("tab in the indentation", token, "indent with spaces; tilewright fmt replaces tabs")
        if previous is not None and (previous.value in _CONTINUES or previous.type in (*_WORDS, "RANGE", "COMPARE", "SHIFT", "ASSIGN")):
            return
        if token.value == "{":
            return
        if token.value == "|>":
            yield from self._close_blocks_before_pipe(context, token)
            return
        if previous is not None and previous.type == "COLON":
            if column <= context.line_column:
                raise LayoutError("expected an indented block after ':'", token, "indent the lines that belong to the block")
            yield self._make("NEWLINE", token)
            yield self._make("INDENT", token)
            context.indents.append((column, context.compute_pending))
            context.compute_pending = False
            context.line_column = column
            self._check_nesting(token)
            return
        context.compute_pending = False
        if previous is not None and previous.type not in ("NEWLINE", "LBRACE"):
            yield self._make("NEWLINE", token)
        while context.indents and context.indents[-1][0] > column:
            yield from self._dedent(context, token)
        expected = context.indents[-1][0] if context.indents else context.column
        if expected is None:
            context.column = column
        elif column > expected:
            raise LayoutError(
                f"unexpected indentation: the block's statements begin in column {expected}, this one in column {column}", token,
                "a block is indented only after ':'",
            )  # fmt: skip
        elif column < expected:
            raise LayoutError(
                f"indentation fits no open block: the nearest one begins in column {expected}, this line in column {column}", token,
                "align the line with the statement it follows",
            )  # fmt: skip
        context.line_column = column

    def _dedent(self, context: _Context, near: Token) -> Iterator[Token]:
        _, is_compute = context.indents.pop()
        yield self._make("DEDENT", near)
        if is_compute:
            yield self._make("NEWLINE", near)

    def _close_blocks_before_pipe(self, context: _Context, token: Token) -> Iterator[Token]:
        """`|>` at the start of a line goes on with what precedes it, which may be a `compute(…):` block that ends here."""
        column = token.column or 1
        if not context.indents or context.indents[-1][0] <= column:
            return
        yield self._make("NEWLINE", token)
        while context.indents and context.indents[-1][0] > column:
            _, is_compute = context.indents.pop()
            yield self._make("DEDENT", token)
            if is_compute:
                return

    def _finish_statements(self, context: _Context, near: Token) -> Iterator[Token]:
        """End the last statement and all indented blocks of a context that is being closed."""
        previous = self._previous
        if previous is not None and previous.type == "COLON":
            raise LayoutError("expected an indented block after ':'", near, "indent the lines that belong to the block")
        if previous is not None and previous.type not in ("NEWLINE", "LBRACE"):
            yield self._make("NEWLINE", near)
        while context.indents:
            yield from self._dedent(context, self._previous or near)

    def _end(self) -> Iterator[Token]:
        context = self._stack[-1]
        if context.opener is not None:
            raise LayoutError(f"'{context.opener}' is never closed", context.opener, f"add '{_OPENERS[context.opener.value]}'")
        if self._previous is not None:
            yield from self._finish_statements(context, self._previous)

    # -- brackets ---------------------------------------------------------------------------------------------------

    def _open(self, context: _Context, token: Token) -> Token:
        kind = "bracket"
        if token.value == "{":
            previous = self._previous.type if self._previous is not None else ""
            if previous == "CONFIG":
                kind = "config"
            elif previous in _ENDS_VALUE or previous == "ELSE":
                kind = "compute" if context.compute_pending else "block"
                context.compute_pending = False
            else:
                kind = "record"
            if kind in ("config", "record"):
                token = token.update(type="LRECORD")
        self._stack.append(_Context(token, kind, line_column=context.line_column))
        self._check_nesting(token)
        return token

    def _close(self, token: Token) -> Iterator[Token]:
        context = self._stack[-1]
        if context.opener is None:
            raise LayoutError(f"'{token}' closes nothing", token, "remove it, or open the bracket it belongs to")
        wanted = _OPENERS[context.opener.value]
        if token.value != wanted:
            raise LayoutError(
                f"'{token}' does not close '{context.opener}' of line {context.opener.line}", token, f"close that one first, with '{wanted}'"
            )
        if context.has_lines:
            yield from self._finish_statements(context, token)
        self._stack.pop()
        yield self._emit(token)
        if context.kind in ("block", "config"):
            yield self._make("NEWLINE", token)

    def _check_nesting(self, token: Token) -> None:
        if len(self._stack) + sum(len(c.indents) for c in self._stack) > MAX_NESTING:
            raise LayoutError(f"more than {MAX_NESTING} blocks and brackets are open", token, "move the inner part into a let")

    # -- words ------------------------------------------------------------------------------------------------------

    def _word(self, context: _Context, token: Token, following: Token | None) -> Token:
        """Give a NAME (or `else`) the token type that its place calls for."""
        previous = self._previous.type if self._previous is not None else "NEWLINE"
        if token.type == "NAME":
            kind = self._name_kind(token, previous, following)
            if kind == "COMPUTE":
                context.compute_pending = True
            return token if kind == "NAME" else token.update(type=kind)
        if previous == "DOT" and token.value.isalpha() and token.type != "STRING":
            return token.update(type="NAME")
        if token.type == "ELSE" and previous not in _STARTS_STATEMENT:
            return token.update(type="ELSE_VALUE")
        return token

    def _name_kind(self, token: Token, previous: str, following: Token | None) -> str:
        word = token.value
        after = following.type if following is not None else "NEWLINE"
        if previous == "DOT":
            return "NAME"
        if previous in ("INT", "FLOAT") and self._previous is not None and self._previous.end_pos == token.start_pos:
            raise LayoutError(f"unknown unit '{word}'", token, "units are KB, MB, GB, TB, ns, us, ms and s")
        starts = previous in _STARTS_STATEMENT
        if word == "var":
            # An operand called var is followed by a name only in `0..var step 4` and the like: there an operator precedes it.
            return "VAR" if after == "NAME" and (starts or previous in ("NAME", "RPAR", "SHARED")) else "NAME"
        if word == "shared":
            return "SHARED" if following is not None and following.value == "var" and previous != "AT" else "NAME"
        if word in ("step", "timeout"):
            operand = after in ("NAME", "INT", "FLOAT", "IMAGINARY", "QUANTITY", "LPAR", "MINUS", "NOT")
            return word.upper() if previous in _ENDS_VALUE and operand else "NAME"
        if word == "kernel":
            return "KERNEL" if previous == "AT" and after == "NAME" else "NAME"
        if word == "compute":
            return "COMPUTE" if after == "LPAR" else "NAME"
        if word == "inout":
            return "INOUT" if previous in ("LPAR", "COMMA") and after == "NAME" else "NAME"
        if word in ("break", "continue"):
            return str(word).upper()
        if word in ("pipeline", "fn"):
            return word.upper() if after == "NAME" and (starts or previous in ("NAME", "RPAR")) else "NAME"
        if word == "config":
            return "CONFIG" if after == "LBRACE" and starts else "NAME"
        if word == "import":
            return "IMPORT" if after == "STRING" and starts else "NAME"
        if word == "as":
            return "AS" if previous == "STRING" and after == "NAME" else "NAME"
        return "NAME"


def _with_following(stream: Iterable[Token]) -> Iterator[tuple[Token, Token | None]]:
    """Each token with the next one. `else if` comes out as one ELIF."""
    iterator = iter(stream)
    held: Token | None = None
    for token in iterator:
        if held is not None:
            if held.type == "ELSE" and token.type == "IF":
                held = Token("ELIF", "else if", held.start_pos, held.line, held.column, token.end_line, token.end_column, token.end_pos)
                continue
            yield held, token
        held = token
    if held is not None:
        yield held, None
