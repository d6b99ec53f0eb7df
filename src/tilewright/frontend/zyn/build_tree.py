"""The tree builder of the ZynML front end: one method per rule of `zyn.lark`.

In: the parts of a rule the parser has just completed, all tokens included. Out: a node of the untyped tree whose span runs from the
rule's first to its last piece of text. What the grammar allows but the language does not (assigning to a sum, an attribute on
nothing) is a `UserError` from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lark import Token, Transformer

from tilewright.base import dtypes
from tilewright.base.errors import UserError, close_matches
from tilewright.base.source import NOWHERE, Source, Span
from tilewright.tree import syntax
from tilewright.tree.check.random_draws import DTYPES as RANDOM
from tilewright.tree.syntax import Argument, Expr, KernelAttribute, Node, Stmt

REDUCTIONS: dict[str, str] = {
    "+": "add", "*": "mul", "add": "add", "sum": "add", "mul": "mul", "prod": "mul", "min": "min", "max": "max",
    "and": "and", "all": "and", "or": "or", "any": "or", "argmin": "argmin", "argmax": "argmax",
}  # fmt: skip
"""How a reduction may be written, and the IR kind it means."""

UNITS: dict[str, int | float] = {
    "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1,
}  # fmt: skip
"""Sizes are in bytes, times in seconds."""

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", '"': '"', "'": "'"}
LAYOUT_TOKENS = frozenset({"NEWLINE", "INDENT", "DEDENT"})


@dataclass(frozen=True)
class _TextPiece:
    """Something a rule yields that is not a node of the tree but a part of one."""

    span: Span


@dataclass(frozen=True)
class _BlockText(_TextPiece):
    items: tuple[Stmt | KernelAttribute, ...]


@dataclass(frozen=True)
class _Head(_TextPiece):
    """One loop of a `for`."""

    names: tuple[str, ...]
    range: syntax.RangeExpr | None
    over: Expr | None


@dataclass(frozen=True)
class _BuildResult(_TextPiece):
    value: Expr


@dataclass(frozen=True)
class _Field(_TextPiece):
    name: str
    value: Expr


@dataclass(frozen=True)
class _Arguments(_TextPiece):
    items: tuple[Argument, ...]


Part = Token | Node | _TextPiece
"""What a method gets."""


def syntax_error(message: str, span: Span, help: str = "", code: str = "TW001") -> UserError:
    error = UserError.at(code, message, span, help)
    assert isinstance(error, UserError)
    return error


def token_span(token: Token, source: Source) -> Span:
    line, column = token.line or 1, token.column or 1
    if token.type in LAYOUT_TOKENS:
        return Span(source, line, column, line, column + 1)
    return Span(source, line, column, token.end_line or line, token.end_column or column + 1)


def _tokens(parts: Sequence[Part], kind: str) -> list[str]:
    return [str(p) for p in parts if isinstance(p, Token) and p.type == kind]


def _nodes(parts: Sequence[Part]) -> list[Expr]:
    """The expressions among the parts. The grammar lets nothing else stand where this is used."""
    return [p for p in parts if isinstance(p, Node)]  # type: ignore[misc]


def _block(part: Part) -> tuple[Stmt, ...]:
    """The statements of a block that holds no attributes: `_statements` saw to that."""
    assert isinstance(part, _BlockText)
    return part.items  # type: ignore[return-value]


def _with_dotted_word(function: Expr) -> Expr:
    """`random.uniform`, called, is one name; so is one that is nearly that."""
    if isinstance(function, syntax.Attribute) and isinstance(function.value, syntax.Name):
        name = f"{function.value.id}.{function.name}"
        if function.value.id == "random" and (name in RANDOM or close_matches(function.name, [r.partition(".")[2] for r in RANDOM], 1, 0.7)):
            return syntax.Name(name, span=function.span)
    return function


def _typed(node: Expr) -> Expr:
    """A type with its element type in front: `tensor[64, 64, bf16]` is `bf16[64, 64]`."""
    if isinstance(node, syntax.Tuple):
        return replace(node, items=tuple(_typed(item) for item in node.items))
    if not isinstance(node, syntax.Index) or len(node.indices) < 2 or not isinstance(node.value, syntax.Name):
        return node
    last = node.indices[-1]
    if node.value.id.lower() not in ("tensor", "array") or not isinstance(last, syntax.Name) or not dtypes.is_name(last.id):
        return node
    return replace(node, value=last, indices=node.indices[:-1])


class TreeBuilder(Transformer[Token, syntax.Module]):
    """One method per rule of the grammar, called with its parts as soon as the rule is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.source = Source("<string>", "")

    def _span(self, parts: Sequence[Part]) -> Span:
        """From the first to the last piece of real text."""
        first = last = NOWHERE
        for part in parts:
            span = self._part_span(part)
            if span.line:
                first = span
                break
        for part in reversed(parts):
            span = self._part_span(part)
            if span.line:
                last = span
                break
        return Span(self.source, first.line, first.column, last.end_line, last.end_column)

    def _part_span(self, part: Part) -> Span:
        if isinstance(part, Token):
            return NOWHERE if part.type in LAYOUT_TOKENS else token_span(part, self.source)
        return part.span

    # -- statements -------------------------------------------------------------------------------------------------

    def start(self, parts: list[Part]) -> syntax.Module:
        return syntax.Module(self._statements(parts), span=self._span(parts))

    def _statements(self, parts: Sequence[Part]) -> tuple[Stmt, ...]:
        """The statements of a list, attributes put on the function that follows them."""
        statements: list[Stmt] = []
        attributes: list[KernelAttribute] = []
        functions: dict[str, syntax.Function] = {}
        for part in parts:
            if isinstance(part, KernelAttribute):
                attributes.append(part)
            elif isinstance(part, Node):
                statement: Stmt = part  # type: ignore[assignment]
                if attributes and isinstance(statement, syntax.Function):
                    statement = replace(statement, attributes=tuple(attributes))
                    attributes = []
                elif attributes:
                    break
                if isinstance(statement, syntax.Function):
                    before = functions.setdefault(statement.name, statement)
                    if before is not statement:
                        raise syntax_error(f"'{statement.name}' is defined in line {before.span.line} already", statement.span, "choose another name", "TW010")
                statements.append(statement)
        if attributes:
            raise syntax_error(
                f"'@{attributes[0].name}' stands before nothing it can apply to", attributes[0].span,
                "put it in the header of a compute, at the top level of its block, or before a function",
            )  # fmt: skip
        return tuple(statements)

    def block(self, parts: list[Part]) -> _BlockText:
        return _BlockText(self._span(parts), self._statements(parts))

    def compute_block(self, parts: list[Part]) -> _BlockText:
        return _BlockText(self._span(parts), tuple(p for p in parts if isinstance(p, Node)))  # type: ignore[misc]

    def let(self, parts: list[Part]) -> syntax.Let:
        names = _tokens(parts, "NAME")
        values = _nodes(parts)
        destructure = len(names) > 1 or bool(_tokens(parts[:2], "LPAR"))
        return syntax.Let(
            tuple(names), values[-1], mutable=bool(_tokens(parts[:1], "VAR")), type=_typed(values[0]) if len(values) > 1 else None,
            destructure=destructure, span=self._span(parts),
        )  # fmt: skip

    def shared(self, parts: list[Part]) -> syntax.Let:
        close = next(i for i, p in enumerate(parts) if isinstance(p, Token) and p.type == "RSQB")
        annotation = _nodes(parts[close:])
        return syntax.Let(
            tuple(_tokens(parts, "NAME")), None, mutable=True, type=annotation[0] if annotation else None, shared=True,
            extents=tuple(_nodes(parts[:close])), span=self._span(parts),
        )  # fmt: skip

    def assign(self, parts: list[Part]) -> syntax.Assign:
        target, value = _nodes(parts)
        self._check_target(target)
        op = str(parts[1])[:-1]
        return syntax.Assign(target, value, "zdiv" if op == "/" else op, span=self._span(parts))

    def _check_target(self, target: Expr) -> None:
        if isinstance(target, syntax.Tuple) and target.items:
            for item in target.items:
                self._check_target(item)
        elif not isinstance(target, syntax.Name | syntax.Index | syntax.Attribute):
            raise syntax_error("this cannot be assigned to", target.span, "assign to a name, an element or a field")

    def _value(self, parts: Sequence[Part]) -> Expr:
        values = _nodes(parts)
        return values[0] if len(values) == 1 else syntax.Tuple(tuple(values), span=self._span(values))

    def return_statement(self, parts: list[Part]) -> syntax.Return:
        return syntax.Return(self._value(parts) if len(parts) > 1 else None, span=self._span(parts))

    def jump(self, parts: list[Part]) -> syntax.Break | syntax.Continue:
        return syntax.Break(span=self._span(parts)) if str(parts[0]) == "break" else syntax.Continue(span=self._span(parts))

    def yield_statement(self, parts: list[Part]) -> syntax.Yield:
        return syntax.Yield(self._value(parts), span=self._span(parts))

    def import_statement(self, parts: list[Part]) -> syntax.Import:
        alias = _tokens(parts, "NAME")
        path = self._unescape(parts[1])
        return syntax.Import(path, alias[0] if alias else "", span=self._span(parts))

    def expression_statement(self, parts: list[Part]) -> syntax.ExprStmt:
        value = _nodes(parts)[0]
        return syntax.ExprStmt(value, span=self._span(parts))

    def for_range(self, parts: list[Part]) -> _Head:
        bounds = _nodes(parts)
        span = Span(self.source, bounds[0].span.line, bounds[0].span.column, bounds[-1].span.end_line, bounds[-1].span.end_column)
        domain = syntax.RangeExpr(
            bounds[0], bounds[1], bounds[2] if len(bounds) > 2 else None, inclusive=_tokens(parts, "RANGE") == ["..="], span=span
        )
        return _Head(self._span(parts), (str(parts[0]),), domain, None)

    def for_over(self, parts: list[Part]) -> _Head:
        return _Head(self._span(parts), tuple(_tokens(parts, "NAME")), None, _nodes(parts)[0])

    def for_loop(self, parts: list[Part]) -> syntax.For:
        heads = [p for p in parts if isinstance(p, _Head)]
        body = _block(parts[-1])
        ranges = tuple(h.range for h in heads if h.range is not None)
        if len(ranges) == len(heads):
            names = tuple(name for h in heads for name in h.names)
            return syntax.For(names, ranges, body, span=self._span(parts))
        if len(heads) > 1:
            other = next(h for h in heads if h.over is not None)
            raise syntax_error("a loop over a list cannot share its 'for' with another loop", other.span, "nest the loops")
        return syntax.For(heads[0].names, (), body, over=heads[0].over, span=self._span(parts))

    def while_loop(self, parts: list[Part]) -> syntax.While:
        return syntax.While(_nodes(parts)[0], _block(parts[-1]), span=self._span(parts))

    def if_statement(self, parts: list[Part]) -> syntax.If:
        end = self._span(parts)
        otherwise: tuple[Stmt, ...] = ()
        position = len(parts)
        first = parts[0]
        assert isinstance(first, Token)
        while position > 0:
            word = parts[position - 2]
            if isinstance(word, Token) and word.type == "ELSE":
                self._check_aligned(first, word)
                otherwise = _block(parts[position - 1])
                position -= 2
                continue
            keyword, condition, body = parts[position - 3 : position]
            assert isinstance(keyword, Token)
            self._check_aligned(first, keyword)
            start = token_span(keyword, self.source)
            span = Span(self.source, start.line, start.column, end.end_line, end.end_column)
            statement = syntax.If(_nodes([condition])[0], _block(body), otherwise, span=span)
            otherwise = (statement,)
            position -= 3
        return statement

    def _check_aligned(self, first: Token, word: Token) -> None:
        """`if a: if b: x` with an `else` on the next line reads two ways; the column decides, so it must be right."""
        start = (word.start_pos or 0) - (word.column or 1) + 1
        begins_line = not self.source.text[start : word.start_pos].strip()
        before = (first.start_pos or 0) - (first.column or 1) + 1
        if_begins_line = not self.source.text[before : first.start_pos].strip(" \t}")
        if begins_line and not if_begins_line:
            raise syntax_error(
                f"this '{word}' would belong to the 'if' inside line {first.line}", token_span(word, self.source),
                "put that 'if' on a line of its own",
            )  # fmt: skip

    def function(self, parts: list[Part]) -> syntax.Function:
        results = [p.value for p in parts if isinstance(p, _BuildResult)]
        return syntax.Function(
            _tokens(parts, "NAME")[0], tuple(p for p in parts if isinstance(p, syntax.Param)), results[0] if results else None,
            _block(parts[-1]), "pipeline" if _tokens(parts[:1], "PIPELINE") else "function", span=self._span(parts),
        )  # fmt: skip

    def parameter(self, parts: list[Part]) -> syntax.Param:
        annotation = default = None
        for mark, value in zip(parts[1::2], parts[2::2]):
            if mark == ":":
                annotation = _typed(_nodes([value])[0])
            else:
                default = _nodes([value])[0]
        optional = annotation is None or isinstance(default, syntax.Nothing)
        return syntax.Param(str(parts[0]), annotation, default, optional, span=self._span(parts))

    def result(self, parts: list[Part]) -> _BuildResult:
        return _BuildResult(self._span(parts), _typed(_nodes(parts)[0]))

    def config(self, parts: list[Part]) -> syntax.Config:
        return syntax.Config(self._fields(parts), span=self._span(parts))

    def field(self, parts: list[Part]) -> _Field:
        return _Field(self._span(parts), str(parts[0]), _nodes(parts)[0])

    def _fields(self, parts: Sequence[Part]) -> tuple[tuple[str, Expr], ...]:
        fields: dict[str, Expr] = {}
        for part in parts:
            if isinstance(part, _Field):
                if part.name in fields:
                    raise syntax_error(f"field '{part.name}' is given twice", part.span, "remove one of them")
                fields[part.name] = part.value
        return tuple(fields.items())

    # -- attributes and compute -------------------------------------------------------------------------------------

    def attribute(self, parts: list[Part]) -> KernelAttribute:
        if str(parts[1]) == "kernel" and len(parts) == 2:
            raise syntax_error("'@kernel' without a kind", self._span(parts), "write for example '@kernel elementwise'")
        return KernelAttribute(str(parts[1]), self._attribute_arguments(parts), span=self._span(parts))

    def kernel_attribute(self, parts: list[Part]) -> KernelAttribute:
        kind: Expr = syntax.Name(str(parts[2]), span=self._span(parts[2:3]))
        if len(parts) > 3:
            kind = syntax.Call(kind, self._attribute_arguments(parts), span=self._span(parts[2:]))
        return KernelAttribute("kernel", (Argument(kind, span=kind.span),), span=self._span(parts))

    def _attribute_arguments(self, parts: Sequence[Part]) -> tuple[Argument, ...]:
        arguments = next((p.items for p in parts if isinstance(p, _Arguments)), ())
        return tuple(
            replace(a, value=replace(a.value, id=REDUCTIONS[a.value.id]))
            if isinstance(a.value, syntax.Name) and a.value.id in ("+", "*") else a
            for a in arguments
        )  # fmt: skip

    def compute(self, parts: list[Part]) -> syntax.Compute:
        inputs = self._plain_arguments(next(p.items for p in parts if isinstance(p, _Arguments)), in_place=True)
        for argument in inputs:
            if argument.keyword is not None:
                raise syntax_error(f"'{argument.keyword}=' in compute", argument.span, "the inputs of a compute are positional")
        in_place = [a.value.id for a in inputs if a.in_place and isinstance(a.value, syntax.Name)]
        for name in in_place:
            if [a.value for a in inputs].count(syntax.Name(name)) > 1:
                raise syntax_error(f"'{name}' is given twice, and written in place", self._span(parts), "give it once", "TW010")
        header = [p for p in parts if isinstance(p, KernelAttribute)]
        block = parts[-1]
        assert isinstance(block, _BlockText)
        inner = [p for p in block.items if isinstance(p, KernelAttribute)]
        body = tuple(p for p in block.items if not isinstance(p, KernelAttribute))
        return syntax.Compute(tuple(a.value for a in inputs), (*header, *inner), body, tuple(in_place), span=self._span(parts))

    # -- expressions ------------------------------------------------------------------------------------------------

    def pipe(self, parts: list[Part]) -> syntax.Pipe:
        value, call = _nodes(parts)
        if isinstance(call, syntax.Name | syntax.Attribute):
            call = syntax.Call(_with_dotted_word(call), (), span=call.span)
        if not isinstance(call, syntax.Call):
            raise syntax_error("the right side of '|>' must be a call", call.span, "write for example '|> sqrt()'")
        return syntax.Pipe(value, call, span=self._span(parts))

    def if_expression(self, parts: list[Part]) -> syntax.IfExpr:
        then, condition, otherwise = _nodes(parts)
        return syntax.IfExpr(condition, then, otherwise, span=self._span(parts))

    def _await(self, value: Expr, parts: Sequence[Part], timeout: Expr | None = None, otherwise: Expr | None = None) -> syntax.Await:
        mode = "one"
        if (
            isinstance(value, syntax.Call) and isinstance(value.function, syntax.Name) and value.function.id in ("all", "any")
            and len(value.args) == 1 and value.args[0].keyword is None
        ):  # fmt: skip
            mode, value = value.function.id, value.args[0].value
        return syntax.Await(mode, value, timeout, otherwise, span=self._span(parts))

    def await_value(self, parts: list[Part]) -> syntax.Await:
        return self._await(_nodes(parts)[0], parts)

    def await_timeout(self, parts: list[Part]) -> syntax.Await:
        value, timeout, otherwise = _nodes(parts)
        return self._await(value, parts, timeout, otherwise)

    def binary(self, parts: list[Part]) -> syntax.Binary:
        left, right = _nodes(parts)
        op = str(parts[1])
        return syntax.Binary("zdiv" if op == "/" else op, left, right, span=self._span(parts))

    def unary(self, parts: list[Part]) -> syntax.Unary:
        return syntax.Unary(str(parts[0]), _nodes(parts)[0], span=self._span(parts))

    def comparison(self, parts: list[Part]) -> syntax.Binary | syntax.IsNone:
        result: syntax.Binary | syntax.IsNone | None = None
        for position in range(1, len(parts), 2):
            left, right = _nodes([parts[position - 1], parts[position + 1]])
            span, sign = self._span(parts[position - 1 : position + 2]), str(parts[position])
            pair: syntax.Binary | syntax.IsNone = syntax.Binary(sign, left, right, span=span)
            if sign in ("==", "!=") and isinstance(right, syntax.Nothing):
                pair = syntax.IsNone(left, sign == "!=", span=span)
            result = pair if result is None else syntax.Binary("and", result, pair, span=self._span(parts[: position + 2]))
        assert result is not None
        return result

    def member(self, parts: list[Part]) -> syntax.Attribute:
        return syntax.Attribute(_nodes(parts)[0], str(parts[2]), span=self._span(parts))

    def call(self, parts: list[Part]) -> syntax.Call | syntax.ReduceExpr:
        function = _nodes(parts[:1])[0]
        arguments = next(p.items for p in parts if isinstance(p, _Arguments))
        if isinstance(function, syntax.Name) and function.id == "reduce":
            return self._reduce(arguments, self._span(parts))
        function = _with_dotted_word(function)
        return syntax.Call(function, self._plain_arguments(arguments), span=self._span(parts))

    def _reduce(self, arguments: tuple[Argument, ...], span: Span) -> syntax.ReduceExpr:
        usage = "write reduce(op, x) or reduce(op, x, axis=k)"
        values = {name: a for name, a in zip(("op", "x", "axis"), arguments) if a.keyword is None}
        for argument in arguments:
            if argument.keyword is not None:
                if argument.keyword != "axis" or "axis" in values:
                    raise syntax_error(f"reduce does not take '{argument.keyword}=' here", argument.span, usage, "TW016")
                values["axis"] = argument
        if "x" not in values or len(values) != len(arguments):
            raise syntax_error(f"reduce takes an operator, an array and an axis, got {len(arguments)} argument(s)", span, usage, "TW016")
        op = values["op"].value
        if not isinstance(op, syntax.Name) or op.id not in REDUCTIONS:
            raise syntax_error("unknown reduction", op.span, "use one of + * min max and or argmin argmax", "TW016")
        return syntax.ReduceExpr(REDUCTIONS[op.id], values["x"].value, values["axis"].value if "axis" in values else None, span=span)

    def _plain_arguments(self, arguments: tuple[Argument, ...], in_place: bool = False) -> tuple[Argument, ...]:
        for argument in arguments:
            if argument.in_place and not in_place:
                raise syntax_error("'inout' in a call", argument.span, "it stands before an input of compute(…)")
            if isinstance(argument.value, syntax.Name) and argument.value.id in ("+", "*", "and", "or"):
                raise syntax_error(f"'{argument.value.id}' has no operands", argument.span, "an operator alone can only be given to reduce")
        return arguments

    def arguments(self, parts: list[Part]) -> _Arguments:
        return _Arguments(self._span(parts), tuple(p for p in parts if isinstance(p, Argument)))

    def argument(self, parts: list[Part]) -> Argument:
        return Argument(_nodes(parts)[0], str(parts[0]) if len(parts) > 1 else None, span=self._span(parts))

    def in_place_argument(self, parts: list[Part]) -> Argument:
        name = syntax.Name(str(parts[1]), span=self._span(parts[1:]))
        return Argument(name, in_place=True, span=self._span(parts))

    def operator_argument(self, parts: list[Part]) -> Argument:
        span = self._span(parts)
        return Argument(syntax.Name(str(parts[0]), span=span), span=span)

    def index(self, parts: list[Part]) -> syntax.Index:
        value, *indices = _nodes(parts)
        return syntax.Index(value, tuple(indices), span=self._span(parts))

    def slice_value(self, parts: list[Part]) -> syntax.Slice:
        colon = next(i for i, p in enumerate(parts) if isinstance(p, Token))
        low, high = _nodes(parts[:colon]), _nodes(parts[colon:])
        return syntax.Slice(low[0] if low else None, high[0] if high else None, span=self._span(parts))

    def name(self, parts: list[Part]) -> syntax.Name | syntax.Nothing:
        span = self._span(parts)
        return syntax.Nothing(span=span) if str(parts[0]) == "none" else syntax.Name(str(parts[0]), span=span)

    def integer_value(self, parts: list[Part]) -> syntax.Number:
        span = self._span(parts)
        digits = str(parts[0])
        try:
            value = int(digits, 0 if digits[:2].lower() in ("0x", "0b") else 10)
        except ValueError:
            raise syntax_error("this is not an integer", span) from None
        if value >= 1 << 64:
            raise syntax_error("integer does not fit in 64 bits", span, "the largest is 18446744073709551615")
        return syntax.Number(value, span=span)

    def float_value(self, parts: list[Part]) -> syntax.Number:
        value = float(str(parts[0]))
        if math.isinf(value):
            raise syntax_error("number is too large for a float", self._span(parts), "write inf for infinity")
        return syntax.Number(value, span=self._span(parts))

    def imaginary_value(self, parts: list[Part]) -> syntax.Number:
        value = complex(str(parts[0]))
        if math.isinf(value.imag):
            raise syntax_error("number is too large for a float", self._span(parts), "write complex(0, inf)")
        return syntax.Number(value, span=self._span(parts))

    def quantity(self, parts: list[Part]) -> syntax.Number:
        text = str(parts[0])
        unit = next(u for u in sorted(UNITS, key=len, reverse=True) if text.endswith(u))
        number = text[: -len(unit)]
        scale = UNITS[unit]
        try:
            value: int | float = int(number) * scale if "." not in number else float(number) * scale
            if isinstance(scale, int) and value == int(value):
                value = int(value)
        except (ValueError, OverflowError):
            raise syntax_error("this is not a quantity", self._span(parts), "write fewer digits") from None
        if value >= 1 << 64:
            raise syntax_error("quantity does not fit in 64 bits", self._span(parts), "the largest is 18446744073709551615")
        return syntax.Number(value, unit, span=self._span(parts))

    def string_value(self, parts: list[Part]) -> syntax.String:
        return syntax.String(self._unescape(parts[0]), span=self._span(parts))

    def _unescape(self, part: Part) -> str:
        body = str(part)[1:-1]
        result: list[str] = []
        position = 0
        while position < len(body):
            character = body[position]
            if character == "\\":
                position += 1
                if body[position] not in _ESCAPES:
                    raise syntax_error(f"unknown escape '\\{body[position]}'", self._span([part]), 'write \\\\ for a backslash')
                character = _ESCAPES[body[position]]
            result.append(character)
            position += 1
        return "".join(result)

    def infinity(self, parts: list[Part]) -> syntax.Number:
        return syntax.Number(math.inf, span=self._span(parts))

    def boolean(self, parts: list[Part]) -> syntax.Bool:
        return syntax.Bool(str(parts[0]) == "true", span=self._span(parts))

    def group(self, parts: list[Part]) -> Expr:
        """Parentheses leave no node, but they belong to the span."""
        return replace(_nodes(parts)[0], span=self._span(parts))

    def tuple_value(self, parts: list[Part]) -> syntax.Tuple:
        return syntax.Tuple(tuple(_nodes(parts)), span=self._span(parts))

    def list_value(self, parts: list[Part]) -> syntax.List:
        return syntax.List(tuple(_nodes(parts)), span=self._span(parts))

    def record_value(self, parts: list[Part]) -> syntax.Record:
        return syntax.Record(self._fields(parts), span=self._span(parts))
