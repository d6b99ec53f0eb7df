"""ZynML text in, the same program in one style out: indentation by four spaces, one spacing, no stray blank lines.

Lines stay lines: where the author broke a line it stays broken, and long ones are not broken. Comments stay where they are. A block keeps its
braces or its colon. What holds: the result parses to the same tree, and formatting it again changes nothing; both are checked here,
so a mistake of the formatter is an error and never a changed program.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from lark import Token

from tilewright.base.errors import CompilerBug
from tilewright.frontend.zyn.parse import layout_tokens, parse_module
from tilewright.tree.show import show

INDENT = 4
_COMMENT = re.compile(r"(?://|#)[^\n]*")
_VALUES = frozenset({"NAME", "INT", "FLOAT", "IMAGINARY", "QUANTITY", "STRING", "INF", "TRUE", "FALSE", "RPAR", "RSQB", "RBRACE"})
_OPERATORS = frozenset({"+", "-", "*", "/", "%", "@", "**", "|", "^", "&", "<<", ">>"})


def format_text(text: str, path: str = "<string>") -> str:
    """The text in the one style; tabs that indent become four spaces each. Raises UserError where it is not ZynML."""
    text = re.sub(r"^[ \t]+", lambda indent: indent[0].expandtabs(4), text, flags=re.MULTILINE)
    before = show(parse_module(text, path))
    done = _Formatter(text, path).run()
    try:
        if show(parse_module(done, path)) != before or _comments(done, path) != _comments(text, path):
            raise CompilerBug.at("TW040", f"formatting {path} would change the program", help="please report this; nothing was written")
    except CompilerBug:
        raise
    except Exception as error:
        raise CompilerBug.at("TW040", f"formatting {path} gives a text that is not ZynML: {error}", help="please report this; nothing was written") from error
    return done


def _comments(text: str, path: str) -> list[str]:
    return [_comment_text(comment) for comment, _ in _Formatter(text, path).comments]


def _comment_text(comment: str) -> str:
    mark = "//" if comment.startswith("//") else "#"
    rest = comment[len(mark) :].rstrip()
    return f"{mark} {rest.lstrip()}" if rest.strip() and not rest.startswith((" ", "!", "/", "#")) else mark + rest


@dataclass
class _FormatPiece:
    """A token and what its place makes of it."""

    token: Token
    starts: bool
    """It begins a statement, or closes a block."""
    indent: int
    """How deep the line stands if this begins one."""
    inner: str = ""
    """What it stands in: '(', '[', 'slice' (a `[` that holds one), 'record', 'block' or nothing."""
    role: str = ""
    """'attribute' (an `@`), 'unary', 'operator', 'default' (`=` behind a type), 'block' (a brace) or nothing."""
    tight: bool = False
    """In a range or a slice, where operators have no spaces."""

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", self.token.value) if self.token.type == "ELIF" else str(self.token.value)


@dataclass
class _Line:
    """One line of the result."""

    number: int
    """Its line in the text; the last one where a token has several."""
    indent: int
    text: str = ""
    comment: str = ""


@dataclass
class _Open:
    kind: str
    typed: bool = False
    """In `( )`: a type was written since the last comma."""
    line: int = 0
    statement_indent: int = 0
    """That of the statement it stands in."""


class _FormatReader:
    """Goes through the tokens once and says what each is."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.slices = _slices([t for t in tokens if _is_real(t)])
        self.depth = 0
        self.open: list[_Open] = []
        self.statement_indent = 0
        self.header = False
        """Behind `compute(…)` or an attribute, where `@` begins attributes."""
        self.header_level = 0
        """How many brackets were open there."""
        self.in_range = False
        self.previous: Token | None = None

    def pieces(self) -> list[_FormatPiece]:
        found: list[_FormatPiece] = []
        starts = True
        for token in self.tokens:
            if not _is_real(token):
                self.depth += {"INDENT": 1, "DEDENT": -1}.get(token.type, 0)
                starts, self.in_range, self.header = True, False, False
                continue
            piece = self._piece(token, starts)
            found.append(piece)
            if piece.starts:
                self.statement_indent = piece.indent
            self._after(piece)
            starts = _is(token, ";") or (token.type == "LBRACE" and piece.role == "block")
            self.previous = token
        return found

    def _piece(self, token: Token, starts: bool) -> _FormatPiece:
        inner = self.open[-1].kind if self.open else ""
        closes = _is(token, "}") and inner == "block"
        blocks = sum(bracket.kind == "block" for bracket in self.open)
        piece = _FormatPiece(token, starts or closes, self.depth + blocks - closes + self._lines_before_blocks(), inner, tight=self._tight(inner))
        piece.role = self._role(token, starts, inner)
        if not piece.starts:
            brackets = 0
            for bracket in reversed(self.open):
                if bracket.kind == "block":
                    break
                brackets += 1
            closing = token.value in (")", "]", "}") and bool(brackets)
            piece.indent = self.statement_indent + (0 if _is(token, "{") and piece.role == "block" else brackets - closing if brackets else 1)
        return piece

    def _lines_before_blocks(self) -> int:
        """How many brackets hold a block that begins on a line of its own: `[` and, below it, `compute(x) {`."""
        return sum(a.kind != "block" and b.kind == "block" and a.line < b.line for a, b in itertools.pairwise(self.open))

    def _tight(self, inner: str) -> bool:
        return inner == "slice" or (self.in_range and inner in ("", "block"))

    def _role(self, token: Token, starts: bool, inner: str) -> str:
        if token.type == "STRING":
            return ""
        value, before = token.value, self.previous
        if value == "@" and (starts or (self.header and len(self.open) == self.header_level)):
            return "attribute"
        if value in ("{", "}"):
            spaced = inner in ("block", "config") if value == "}" else token.type == "LBRACE" or (before is not None and before.type == "CONFIG")
            return "block" if spaced else ""
        if value == "=" and inner == "(":
            return "default" if self.open[-1].typed else "keyword"
        if value in _OPERATORS or value == "~":
            operand = not starts and before is not None and (before.type in _VALUES or _is(before, ")") or _is(before, "]"))
            return "operator" if operand else "unary"
        return ""

    def _after(self, piece: _FormatPiece) -> None:
        token, value = piece.token, piece.token.value
        if token.type == "STRING":
            return
        line = token.line or 0
        if value == "(":
            self.open.append(_Open("(", line=line))
        elif value == "[":
            self.open.append(_Open("slice" if token.start_pos in self.slices else "[", line=line))
        elif value == "{":
            config = self.previous is not None and self.previous.type == "CONFIG"
            kind = "config" if config else "record" if token.type == "LRECORD" else "block"
            self.open.append(_Open(kind, line=line, statement_indent=self.statement_indent))
            self.header = self.in_range = False
        elif value in (")", "]", "}"):
            closed = self.open.pop()
            if closed.kind == "block":
                self.statement_indent = closed.statement_indent
        elif token.type == "COMPUTE" or piece.role == "attribute":
            self.header, self.header_level = True, len(self.open)
        elif token.type == "IN":
            self.in_range = True
        elif piece.inner == "(" and value in (":", ","):
            self.open[-1].typed = value == ":"
        elif piece.inner in ("", "block") and token.type in ("COMMA", "COLON", "STEP"):
            self.in_range = False
            self.header = self.header and value != ":"


def _is_real(token: Token) -> bool:
    """Whether it stands in the text."""
    return token.type not in ("INDENT", "DEDENT", "NEWLINE")


def _is(token: Token, value: str) -> bool:
    return token.value == value and token.type != "STRING"


def _slices(tokens: list[Token]) -> set[int]:
    """Positions of `[` that hold a slice at their own level."""
    found: set[int] = set()
    open_: list[Token] = []
    for token in tokens:
        if token.type == "STRING":
            continue
        if token.value in ("(", "[", "{"):
            open_.append(token)
        elif token.value in (")", "]", "}"):
            open_.pop()
        elif token.value == ":" and open_ and open_[-1].value == "[":
            found.add(open_[-1].start_pos or 0)
    return found


def _gap(a: _FormatPiece, b: _FormatPiece) -> str:
    """What stands between two tokens of one line."""
    left, right = a.token.value, b.token.value
    if "STRING" in (a.token.type, b.token.type):
        left, right = ("" if t.token.type == "STRING" else t.token.value for t in (a, b))
    if left == ";":
        return " "
    if left in ("(", "[") or right in (")", "]", ",", ";") or a.role in ("attribute", "unary") or "keyword" in (a.role, b.role):
        return ""
    if left == "{" or right == "}":
        return " " if "block" in (a.role, b.role) and left + right != "{}" else ""
    if "." in (left, right) or "RANGE" in (a.token.type, b.token.type) or (right == ":" and left != ","):
        return ""
    if left == ":":
        return "" if a.inner == "slice" else " "
    if right in ("(", "["):
        return "" if a.token.type in _VALUES or a.token.type == "COMPUTE" else " "
    if "operator" in (a.role, b.role):
        operator = a if a.role == "operator" else b
        return "" if operator.tight else " "
    return " "


class _Formatter:
    def __init__(self, text: str, path: str) -> None:
        self.text = text
        self.source = text.split("\n")
        self.pieces = _FormatReader(layout_tokens(text, path)).pieces()
        self.comments = self._find_comments()

    def _find_comments(self) -> list[tuple[str, int]]:
        """Every comment with the position it begins at: they lie between tokens."""
        found: list[tuple[str, int]] = []
        last = 0
        spans = [(p.token.start_pos or 0, p.token.end_pos or 0) for p in self.pieces]
        for start, end in [*spans, (len(self.text), len(self.text))]:
            found += [(m.group(), last + m.start()) for m in _COMMENT.finditer(self.text[last:start])]
            last = max(last, end)
        return found

    def run(self) -> str:
        return self._join(self._with_comments(self._code_lines()))

    def _code_lines(self) -> list[_Line]:
        lines: list[_Line] = []
        previous: _FormatPiece | None = None
        for piece in self.pieces:
            if previous is None or (piece.token.line or 0) > lines[-1].number:
                lines.append(_Line(piece.token.line or 0, piece.indent))
            else:
                lines[-1].text += _gap(previous, piece)
            lines[-1].text += piece.text
            lines[-1].number = piece.token.end_line or lines[-1].number
            previous = piece
        return lines

    # -- comments and blank lines -------------------------------------------------------------------------------

    def _with_comments(self, lines: list[_Line]) -> list[_Line]:
        done = list(lines)
        for comment, position in self.comments:
            number = self.text.count("\n", 0, position) + 1
            behind = next((line for line in lines if line.number == number), None)
            text = _comment_text(comment)
            if behind is not None and self.text[:position].rpartition("\n")[2].strip():
                behind.comment = text
                continue
            column = position - (self.text.rfind("\n", 0, position) + 1)
            done.append(_Line(number, self._comment_indent(lines, number, column), text))
        return sorted(done, key=lambda line: line.number)

    def _comment_indent(self, lines: list[_Line], number: int, column: int) -> int:
        """A comment goes with the line below, or with the one above where it is indented like that one."""
        above = next((line for line in reversed(lines) if line.number < number), None)
        below = next((line for line in lines if line.number > number), None)
        if below is None:
            return above.indent if above is not None and column > 0 else 0
        if above is not None and above.indent > below.indent and column >= self._column(above):
            return above.indent
        return below.indent + (1 if below.text.startswith("}") else 0)

    def _column(self, line: _Line) -> int:
        text = self.source[line.number - 1]
        return len(text) - len(text.lstrip())

    def _join(self, lines: list[_Line]) -> str:
        texts: list[str] = []
        last = 0
        for line in lines:
            blank = last and any(not text.strip() for text in self.source[last : line.number - 1])
            if blank and texts and not texts[-1].endswith("{") and not line.text.startswith("}"):
                texts.append("")
            texts.append(" " * (INDENT * line.indent) + line.text + (f"  {line.comment}" if line.comment else ""))
            last = line.number
        return "\n".join(texts) + "\n" if texts else ""
