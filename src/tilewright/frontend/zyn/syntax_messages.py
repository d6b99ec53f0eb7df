"""Human words for the ZynML parser's state: what was found, and what could have stood there.

In: the token that did not fit and the terminals that would have. Out: phrases such as "an expression or ')'" for error messages.
"""

from __future__ import annotations

from collections.abc import Iterable

import lark
from lark import Token
from lark.lexer import PatternStr

_WORDS = {
    "$END": "the end of the text", "NEWLINE": "the end of the line", "INDENT": "an indented block", "DEDENT": "the end of the block",
    "NAME": "a name", "STRING": "a string", "RANGE": "'..'", "ASSIGN": "an assignment", "LRECORD": "'{'", "ELSE_VALUE": "'else'",
}  # fmt: skip
"""Terminals whose spelling is not their text."""

_EXPRESSION = frozenset({"NAME", "INT", "STRING", "LPAR"})
"""Where all of these fit, an expression does."""

_STARTERS = _EXPRESSION | frozenset(
    ["FLOAT", "IMAGINARY", "QUANTITY", "INF", "TRUE", "FALSE", "LSQB", "LRECORD", "MINUS", "TILDE", "NOT", "AWAIT", "COMPUTE"]
)  # fmt: skip
_STATEMENT = frozenset({"LET", "FOR", "RETURN"})
_CONTINUATIONS = frozenset(
    ["PLUS", "MINUS", "STAR", "SLASH", "PERCENT", "AT", "AMPERSAND", "VBAR", "CIRCUMFLEX", "SHIFT", "COMPARE", "AND", "OR", "IF", "DOT", "LPAR", "LSQB", "ASSIGN"]
)
"""What may follow any complete expression: naming all of it would bury what matters."""

_ORDER = ("EQUAL", "COLON", "LBRACE", "RPAR", "RSQB", "RBRACE", "COMMA", "IN", "RANGE", "NEWLINE")
_CONTEXTUAL = frozenset(["VAR", "SHARED", "STEP", "TIMEOUT", "KERNEL", "COMPUTE", "INOUT", "BREAK", "CONTINUE", "PIPELINE", "FN", "CONFIG", "IMPORT", "AS", "SEMICOLON"])


def found(token: Token) -> str:
    """The token that did not fit."""
    if token.type in ("$END", "NEWLINE", "INDENT", "DEDENT"):
        return _WORDS[token.type]
    return token.value if token.type == "STRING" else f"'{token}'"


def expectation(accepts: Iterable[str], parser: lark.Lark) -> str:
    """What could have stood in its place, in few words."""
    terminals = set(accepts)
    texts = {t.name: t.pattern.value for t in parser.terminals if isinstance(t.pattern, PatternStr)}
    phrases: list[str] = []
    if terminals >= _STATEMENT:
        phrases.append("a statement")
        terminals = terminals & {"RBRACE"}
    elif terminals >= _EXPRESSION:
        phrases.append("an expression")
        terminals -= _STARTERS
    elif "NAME" in terminals:
        phrases.append("a name")
        terminals.discard("NAME")
    operators = {t for t in terminals if t in _CONTINUATIONS or texts.get(t) in ("|>", "**")}
    terminals -= operators
    named = sorted(terminals - _CONTEXTUAL, key=lambda t: (_ORDER.index(t) if t in _ORDER else len(_ORDER), t))
    phrases.extend(_WORDS.get(t) or f"'{texts.get(t, t.lower())}'" for t in named)
    if not phrases:
        phrases = [f"'{t.lower()}'" for t in sorted({"STEP", "TIMEOUT", "AS"} & terminals)] or ["an operator"]
    if len(phrases) > 5:
        phrases = [*phrases[:4], "something else"]
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} or {phrases[-1]}"
