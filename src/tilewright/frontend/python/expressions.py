"""Expressions and annotations of Python kernels: from `ast` nodes to nodes of the untyped tree.

In: an expression of a kernel's body and what its names mean. Out: the tree's expression with its span. What a kernel cannot contain is
reported to the sink and stands as `syntax.Broken`, so that the rest of the kernel is still read.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tilewright.base.errors import Diagnostics, UserError
from tilewright.base.source import Source, Span
from tilewright.frontend.python.library import median_text
from tilewright.frontend.python.names import (
    Called,
    Constant,
    Environment,
    Meaning,
    Opaque,
    StructWord,
    Word,
    classify,
    has_words,
    is_package,
    member,
)
from tilewright.frontend.python.nesting import reading
from tilewright.tree import syntax
from tilewright.tree.check.expressions import FUNCTIONS
from tilewright.tree.metadata import REDUCTION_NAMES
from tilewright.tree.syntax import Argument, Expr
from tilewright.tree.unknown_functions import help_for

REDUCTIONS = {
    "sum": "add", "prod": "mul", "min": "min", "max": "max", "all": "and", "any": "or", "argmin": "argmin", "argmax": "argmax",
    "mean": "mean", "var": "var", "std": "std", "norm": "norm",
}  # fmt: skip
"""Functions that, given one array, reduce it; and the IR kind."""

_HELP: dict[type[ast.expr], tuple[str, str]] = {
    ast.Lambda: ("lambda", "write the expression where it is used"),
    ast.ListComp: ("a comprehension", "fill an array in a loop"),
    ast.SetComp: ("a comprehension", "fill an array in a loop"),
    ast.DictComp: ("a comprehension", "fill an array in a loop"),
    ast.GeneratorExp: ("a generator expression", "accumulate in a loop: total += value"),
    ast.Dict: ("a dict", "use plain variables"),
    ast.Set: ("a set", "use plain variables"),
    ast.JoinedStr: ("an f-string", "kernels have no text: return the value and format it outside"),
    ast.Starred: ("'*' in an expression", "write every item"),
    ast.NamedExpr: ("':='", "assign on a line of its own"),
    ast.Yield: ("yield", "write the value into an output array, or mark the kernel with @tw.kernel(reduce=\"+\")"),
    ast.YieldFrom: ("yield from", "yield single values"),
    ast.Await: ("await", "wait for the result outside the kernel"),
}

GROWS = "make an array with tw.empty or tw.zeros and write its elements, or add up in a variable: total += value"

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.MatMult: "@",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "-", ast.Not: "not", ast.Invert: "~"}


@dataclass(frozen=True)
class SourcePlace:
    """Where the parsed text stands in its file."""

    source: Source
    line_offset: int = 0
    _lines: list[str] = field(default_factory=list, compare=False)

    def span(self, node: ast.stmt | ast.expr | ast.arg | ast.keyword) -> Span:
        line = node.lineno + self.line_offset
        end_line = (node.end_lineno or node.lineno) + self.line_offset
        end = node.end_col_offset if node.end_col_offset is not None else node.col_offset
        return Span(self.source, line, self._column(line, node.col_offset), end_line, self._column(end_line, end))

    def head(self, node: ast.stmt) -> Span:
        """Of a statement that may be long: its first line only."""
        full = self.span(node)
        if full.end_line == full.line:
            return full
        return Span(self.source, full.line, full.column, full.line, len(self._line(full.line).rstrip()) + 1)

    def _line(self, number: int) -> str:
        if not self._lines:
            self._lines.extend(self.source.text.split("\n"))
        index = number - self.source.first_line
        return self._lines[index] if 0 <= index < len(self._lines) else ""

    def _column(self, line: int, offset: int) -> int:
        """`ast` counts bytes of UTF-8, a span counts characters."""
        text = self._line(line)
        if text.isascii():
            return offset + 1
        return len(text.encode()[:offset].decode(errors="ignore")) + 1


class ExpressionReader:
    """Reads the expressions of one function. `check_read` is told of every local variable that is read."""

    def __init__(
        self, place: SourcePlace, environment: Environment, sink: Diagnostics, local_names: frozenset[str], check_read: Callable[[ast.Name], None],
        read_text: Callable[[str], syntax.Function],
    ) -> None:  # fmt: skip
        """`read_text` gives the tree of a kernel's source."""
        self._place = place
        self._environment = environment
        self._sink = sink
        self._local_names = local_names
        self._check_read = check_read
        self._read_text = read_text

    def _unsupported(self, node: ast.expr, what: str, help: str) -> Expr:
        span = self._place.span(node)
        self._sink.error("TW005", f"{what} is not available in a kernel", span, help)
        return syntax.Broken(span=span)

    # -- names ------------------------------------------------------------------------------------------------------

    def meaning(self, node: ast.expr) -> Meaning | None:
        """What a name, or a chain of members of a captured object, means; None for local and unknown names."""
        if isinstance(node, ast.Name):
            return None if node.id in self._local_names else self._environment.meaning(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            return member(owner, node.attr) if isinstance(owner, Opaque) else None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self.meaning(node.value)
            value, key = (owner.value, node.slice.value) if isinstance(owner, Opaque) else (None, None)
            if isinstance(value, tuple | list) and isinstance(key, int) and -len(value) <= key < len(value):
                return classify(value[key])
            if isinstance(value, Mapping) and isinstance(key, str | int) and key in value:
                return classify(value[key])
        return None

    def called_word(self, node: ast.expr) -> str | None:
        """The word of the language that a call calls, if it is a call of one."""
        meaning = self.meaning(node.func) if isinstance(node, ast.Call) else None
        return meaning.name if isinstance(meaning, Word) else None

    def _resolved(self, node: ast.expr) -> Expr | None:
        span = self._place.span(node)
        meaning = self.meaning(node)
        if isinstance(meaning, Word):
            return syntax.Name(meaning.name, span=span)
        if isinstance(meaning, Constant):
            return self._literal(meaning.value, node)
        if isinstance(meaning, Called):
            return self._callee(meaning, node)
        if isinstance(meaning, StructWord):
            return syntax.StructType(meaning.layout, span=span)
        if isinstance(meaning, Opaque):
            if is_package(meaning.value):
                return self._unsupported(node, "the module itself", "name one of its members")
            kind = type(meaning.value).__name__ if meaning.value is not None else "object"
            shown = ast.unparse(node)
            if has_words(meaning.value):
                return self._unsupported(node, f"'{shown}' itself", f"name one of its functions, as in {shown}.uniform(seed, i)")
            if callable(meaning.value):
                return self._unsupported(node, f"the Python function '{shown}'", _instead_of(meaning.value))
            return self._unsupported(node, f"'{shown}' (a captured {kind})", _how_to_pass(meaning.value))
        return None

    def _callee(self, meaning: Called, node: ast.expr) -> Expr:
        span = self._place.span(node)
        with reading(meaning.key, meaning.name) as around:
            if around:
                chain = " calls ".join(f"'{name}'" for name in (*around, meaning.name))
                self._sink.error("TW005", f"{chain}: a kernel cannot call itself", span, "use a loop")
                return syntax.Broken(span=span)
            try:
                return syntax.Callee(meaning.read(), span=span)
            except UserError as error:
                self._sink.items += [d for d in error.diagnostics if d not in self._sink.items]
                return syntax.Broken(span=span)

    def _literal(self, value: bool | int | float | complex | str, node: ast.expr) -> Expr:
        span = self._place.span(node)
        if isinstance(value, bool):
            return syntax.Bool(value, span=span)
        if isinstance(value, str):
            return syntax.String(value, span=span)
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            self._sink.error("TW006", f"an integer of {value.bit_length()} bits does not fit in 64", span, "use a float")
            value = 0
        return syntax.Number(value, span=span)

    # -- expressions ------------------------------------------------------------------------------------------------

    def read(self, node: ast.expr) -> Expr:
        span = self._place.span(node)
        if isinstance(node, ast.Name):
            if node.id in self._local_names:
                if isinstance(node.ctx, ast.Load):
                    self._check_read(node)
                return syntax.Name(node.id, span=span)
            return self._resolved(node) or syntax.Name(node.id, span=span)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, bool | int | float | complex | str):
                return self._literal(node.value, node)
            if node.value is None:
                return syntax.Nothing(span=span)
            return self._unsupported(node, f"'{ast.unparse(node)}'", "use a number")
        if isinstance(node, ast.Attribute):
            return self._resolved(node) or syntax.Attribute(self.read(node.value), node.attr, span=span)
        if isinstance(node, ast.Subscript):
            return (self._resolved(node) if self.meaning(node) is not None else None) or self._index(node, span)
        if isinstance(node, ast.BinOp):
            return syntax.Binary(_BINARY[type(node.op)], self.read(node.left), self.read(node.right), span=span)
        if isinstance(node, ast.UnaryOp):
            operand = self.test(node.operand) if isinstance(node.op, ast.Not) else self.read(node.operand)
            return operand if isinstance(node.op, ast.UAdd) else syntax.Unary(_UNARY[type(node.op)], operand, span=span)
        if isinstance(node, ast.BoolOp):
            return self._bool_op(node)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.IfExp):
            return syntax.IfExpr(self.test(node.test), self.read(node.body), self.read(node.orelse), span=span)
        if isinstance(node, ast.Tuple):
            return syntax.Tuple(tuple(self.read(e) for e in node.elts), span=span)
        if isinstance(node, ast.List) and not node.elts:
            return self._unsupported(node, "a list that grows", GROWS)
        if isinstance(node, ast.List):
            return syntax.List(tuple(self.read(e) for e in node.elts), span=span)
        if isinstance(node, ast.Call):
            return self._call(node, span)
        what, help = _HELP.get(type(node), (f"this ({type(node).__name__})", "leave it out of the kernel"))
        return self._unsupported(node, what, help)

    def _join(self, left: Expr, right: Expr) -> Span:
        return Span(self._place.source, left.span.line, left.span.column, right.span.end_line, right.span.end_column)

    def test(self, node: ast.expr) -> Expr:
        """A condition: of what stands under `and`, `or` and `not` only the truth counts."""
        if isinstance(node, ast.BoolOp):
            return self._bool_op(node, tested=True)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return syntax.Unary("not", self.test(node.operand), span=self._place.span(node))
        return self.read(node)

    def _bool_op(self, node: ast.BoolOp, tested: bool = False) -> Expr:
        op = "and" if isinstance(node.op, ast.And) else "or"
        # `a and b` is b, or something that counts as 0: of all but the last only the truth counts.
        last = len(node.values) - 1
        result = self.test(node.values[0]) if tested or op == "and" else self.read(node.values[0])
        for position, value in enumerate(node.values[1:], 1):
            only_truth = tested or (op == "and" and position < last)
            right = self.test(value) if only_truth else self.read(value)
            result = syntax.Binary(op, result, right, not only_truth, span=self._join(result, right))
        return result

    def _compare(self, node: ast.Compare) -> Expr:
        result: Expr | None = None
        left = self.read(node.left)
        for op, comparator in zip(node.ops, node.comparators):
            right = self.read(comparator)
            spelling = _COMPARE.get(type(op))
            if spelling is None:
                if isinstance(op, ast.Is | ast.IsNot) and len(node.ops) == 1 and isinstance(right, syntax.Nothing):
                    return syntax.IsNone(left, isinstance(op, ast.IsNot), span=self._place.span(node))
                return self._unsupported(node, "'in' or 'is'", "compare with == or !=")
            if isinstance(left, syntax.Nothing) or isinstance(right, syntax.Nothing):
                self._sink.error("TW005", f"'{spelling}' with None compares nothing in a kernel", self._place.span(node), "write 'is None' or 'is not None'")
            pair = syntax.Binary(spelling, left, right, span=self._join(left, right))
            result = pair if result is None else syntax.Binary("and", result, pair, span=self._join(result, pair))
            left = right
        assert result is not None
        return result

    def _index(self, node: ast.Subscript, span: Span) -> Expr:
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(items) == 1 and isinstance(items[0], ast.Constant) and items[0].value is ...:
            items = []  # all of it: indices may be missing at the end
        return syntax.Index(self.read(node.value), tuple(self._subscript(i) for i in items), span=span)

    def _subscript(self, node: ast.expr) -> Expr:
        if isinstance(node, ast.Constant) and node.value is ...:
            return syntax.Rest(span=self._place.span(node))
        if not isinstance(node, ast.Slice):
            meaning = self.meaning(node)
            if isinstance(meaning, Opaque) and meaning.value is None:
                return syntax.Nothing(span=self._place.span(node))  # np.newaxis
            return self.read(node)
        low, high, step = (None if part is None else self.read(part) for part in (node.lower, node.upper, node.step))
        return syntax.Slice(low, high, step, span=self._place.span(node))

    # -- calls ------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call, span: Span) -> Expr:
        for keyword in node.keywords:
            if keyword.arg is None:
                return self._unsupported(keyword.value, "'**' in a call", "write every argument")
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "extend", "insert", "pop") and isinstance(node.func.value, ast.Name):
            return self._unsupported(node.func, "a list that grows", GROWS)
        if isinstance(node.func, ast.Name) and node.func.id in self._local_names:
            return self._unsupported(node.func, f"a call of the variable '{node.func.id}'", "choose another name for the variable")
        word = self.called_word(node)
        if word in ("range", "grid"):
            return self._unsupported(node, f"{word}() outside a for", f"write 'for i in {'tw.grid' if word == 'grid' else word}(...):'")
        if word == "float" and len(node.args) == 1:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                return self._float_of_text(first.value, node, span)
        if word == "reduce":
            return self._reduce_word(node, span)
        if word == "median" and 1 <= len(node.args) <= 2:
            return self._median(self.read(node.args[0]), node.args[1] if len(node.args) == 2 else None, node, span)
        if word in REDUCTIONS and (len(node.args) == 1 or (len(node.args) == 2 and word not in ("min", "max"))):
            axis = self.read(node.args[1]) if len(node.args) == 2 else None
            return self._reduce(word, self.read(node.args[0]), axis, node, span)
        if isinstance(node.func, ast.Attribute) and self.meaning(node.func) is None and not isinstance(self.meaning(node.func.value), Opaque):
            method = self._method(node.func, node, span)
            if method is not None:
                return method
        if self.meaning(node.func) is None and isinstance(self.meaning(self._owner(node.func)), Opaque):
            return self._unsupported(node.func, f"'{ast.unparse(node.func)}'", "use a function of tilewright")
        return syntax.Call(self.read(node.func), self._arguments(node), span=span)

    def _reduce_word(self, node: ast.Call, span: Span) -> Expr:
        """`tw.reduce("+", x, axis=k)`: the operation by its name."""
        operation = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        usage = 'write tw.reduce("+", x) or tw.reduce("+", x, axis=k)'
        if not isinstance(operation, str) or operation not in REDUCTION_NAMES:
            help = f"choose one of {', '.join(REDUCTION_NAMES)}" if isinstance(operation, str) else usage
            self._sink.error("TW016", f"unknown reduction {ast.unparse(node.args[0]) if node.args else 'of nothing'}", span, help)
            return syntax.Broken(span=span)
        if not 2 <= len(node.args) <= 3:
            self._sink.error("TW016", f"reduce takes an operation, an array and an axis, got {len(node.args)} argument(s)", span, usage)
            return syntax.Broken(span=span)
        axis = self.read(node.args[2]) if len(node.args) == 3 else None
        found = self._reduce("reduce", self.read(node.args[1]), axis, node, span)
        return replace(found, op=REDUCTION_NAMES[operation]) if isinstance(found, syntax.ReduceExpr) else found

    @staticmethod
    def _owner(node: ast.expr) -> ast.expr:
        return node.value if isinstance(node, ast.Attribute) else node

    def _arguments(self, node: ast.Call) -> tuple[Argument, ...]:
        positional = [Argument(self.read(a), span=self._place.span(a)) for a in node.args]
        keywords = [Argument(self.read(k.value), k.arg, span=self._place.span(k)) for k in node.keywords if not (k.arg in ("dtype", "axis") and _is_none(k.value))]
        return (*positional, *keywords)

    def _float_of_text(self, text: str, node: ast.Call, span: Span) -> Expr:
        try:
            return syntax.Number(float(text), span=span)
        except ValueError:
            return self._unsupported(node, f"float({text!r})", "write the number itself")

    def _reduce(self, name: str, value: Expr, axis: Expr | None, node: ast.Call, span: Span) -> Expr:
        keep = False
        for keyword in node.keywords:
            if keyword.arg == "keepdims" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool):
                keep = keyword.value.value
            elif keyword.arg == "keepdims":
                self._sink.error("TW016", "keepdims must be True or False", self._place.span(keyword))
            elif keyword.arg != "axis" or axis is not None:
                self._sink.error(
                    "TW016", f"{name} does not take '{keyword.arg}=' here", self._place.span(keyword), f"write {name}(x) or {name}(x, axis=k)"
                )
            elif not _is_none(keyword.value):
                axis = self.read(keyword.value)
        return syntax.ReduceExpr(REDUCTIONS.get(name, ""), value, axis, keep, span=span)

    def _median(self, value: Expr, axis: ast.expr | None, node: ast.Call, span: Span) -> Expr:
        """`tw.median(x, axis, keepdims=True)`: a call of its kernel."""
        found = self._reduce("median", value, None if axis is None or _is_none(axis) else self.read(axis), node, span)
        if not isinstance(found, syntax.ReduceExpr):
            return found
        items = () if found.axis is None else found.axis.items if isinstance(found.axis, syntax.Tuple | syntax.List) else (found.axis,)
        axes = [_whole_number(item) for item in items]
        numbers = [a for a in axes if a is not None]
        if len(numbers) != len(axes):
            self._sink.error("TW016", "axis must be a constant integer", span)
            return syntax.Broken(span=span)
        tree = self._read_text(median_text(None if found.axis is None else numbers, found.keep))
        return syntax.Call(syntax.Callee(tree, span=span), (Argument(value, span=value.span),), span=span)

    def _method(self, function: ast.Attribute, node: ast.Call, span: Span) -> Expr | None:
        """`x.sum(axis=1)` is `sum(x, axis=1)`, `x.astype(t)` is `cast(x, t)`, `z.conj()` is `conj(z)`."""
        if function.attr in REDUCTIONS and len(node.args) <= 1:
            axis = self.read(node.args[0]) if node.args and not _is_none(node.args[0]) else None
            return self._reduce(function.attr, self.read(function.value), axis, node, span)
        if function.attr == "median" and len(node.args) <= 1:
            return self._median(self.read(function.value), node.args[0] if node.args else None, node, span)
        if function.attr in ("conj", "conjugate") and not node.args and not node.keywords:
            owner = self.read(function.value)
            return syntax.Call(syntax.Name("conj", span=self._place.span(function)), (Argument(owner, span=owner.span),), span=span)
        if function.attr == "astype":
            owner = self.read(function.value)
            name = syntax.Name("cast", span=self._place.span(function))
            return syntax.Call(name, (Argument(owner, span=owner.span), *self._arguments(node)), span=span)
        return None

    # -- annotations ------------------------------------------------------------------------------------------------

    def annotation(self, node: ast.expr) -> Expr:
        """The type expression of a parameter, variable or result; the module docstring of `kernels.py` lists the forms."""
        span = self._place.span(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._text_annotation(node.value, node, span)
        if isinstance(node, ast.Constant) and node.value is None:
            return syntax.Name("none", span=span)
        if isinstance(node, ast.Subscript) and _last_name(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
            for item in node.slice.elts[1:]:
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    return self.annotation(item)
            return self.annotation(node.slice.elts[0])
        if isinstance(node, ast.Subscript):
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return syntax.Index(self.annotation(node.value), tuple(self.annotation(i) for i in items), span=span)
        if isinstance(node, ast.Name | ast.Attribute):
            meaning = self.meaning(node)
            if isinstance(meaning, Constant):
                return self._literal(meaning.value, node)
            if isinstance(meaning, StructWord):
                return syntax.StructType(meaning.layout, span=span)
            name = meaning.name if isinstance(meaning, Word) else _last_name(node)
            return syntax.Name("array" if name in ("Array", "InOut") else name, span=span)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return syntax.Binary("|", self.annotation(node.left), self.annotation(node.right), span=span)
        return self.read(node)

    def is_in_place(self, node: ast.expr | None) -> bool:
        """Whether an annotation says that the parameter is written where it lies: `tw.InOut`, `tw.InOut[tw.f32]`, `Annotated[tw.InOut, "f32[n]"]`."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                inner = ast.parse(node.value.strip(), mode="eval").body
            except (SyntaxError, ValueError):
                return False  # `annotation` reports it
            return any(isinstance(n, ast.Name | ast.Attribute) and _last_name(n) == "InOut" for n in ast.walk(inner))
        if isinstance(node, ast.Subscript):
            if _last_name(node.value) in ("Annotated", "Optional"):
                return self.is_in_place(node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice)
            return self.is_in_place(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.is_in_place(node.left) or self.is_in_place(node.right)
        return isinstance(node, ast.Name | ast.Attribute) and self.meaning(node) == Word("InOut")

    def _text_annotation(self, text: str, node: ast.expr, span: Span) -> Expr:
        try:
            inner = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError):
            self._sink.error("TW005", f"'{text}' is not a type", span, "write for example 'f32[rows, cols]'")
            return syntax.Name("array", span=span)
        return self._at(inner, span)

    def _at(self, node: ast.expr, span: Span) -> Expr:
        """A type written as text: names are sizes and dtypes, nothing is captured; every part has the text's span."""
        if isinstance(node, ast.Name | ast.Attribute):
            name = _last_name(node)
            meaning = self._environment.meaning(name) if isinstance(node, ast.Name) else None
            if isinstance(meaning, StructWord):
                return syntax.StructType(meaning.layout, span=span)
            return syntax.Name("array" if name in ("Array", "InOut") else name, span=span)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return syntax.Number(node.value, span=span)
        if isinstance(node, ast.Constant) and node.value is None:
            return syntax.Nothing(span=span)
        if isinstance(node, ast.BinOp):
            return syntax.Binary(_BINARY[type(node.op)], self._at(node.left, span), self._at(node.right, span), span=span)
        if isinstance(node, ast.Subscript):
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return syntax.Index(self._at(node.value, span), tuple(self._at(i, span) for i in items), span=span)
        self._sink.error("TW005", f"'{ast.unparse(node)}' is not available in a type", span, "write for example 'f32[rows, cols]'")
        return syntax.Name("array", span=span)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _instead_of(function: object) -> str:
    """What to write instead of a call of a function of Python."""
    name = str(getattr(function, "__name__", ""))
    library = str(getattr(function, "__module__", "") or "").split(".")[0]
    if inspect.isfunction(function) and library not in ("numpy", "torch", "scipy", "jax", "cupy"):
        return "mark it with @tw.kernel: kernels can call kernels"
    if name in FUNCTIONS or name in REDUCTIONS:
        return f"use tw.{name}"
    return help_for(name, (), python=True) or "use a function of tilewright, or write its body where it is called"


def _how_to_pass(value: object) -> str:
    """How a kernel comes by what is in a captured object."""
    if isinstance(value, Mapping):
        return 'name one of its numbers, as in settings["rate"]: such a number is a constant of the kernel'
    if isinstance(value, list | tuple):
        return "pass an array of its numbers as a parameter, or index it with a constant"
    return "pass its numbers and arrays as parameters"


def _whole_number(node: Expr) -> int | None:
    """A constant whole number, as written."""
    sign = -1 if isinstance(node, syntax.Unary) and node.op == "-" else 1
    number = node.operand if isinstance(node, syntax.Unary) and node.op == "-" else node
    return sign * number.value if isinstance(number, syntax.Number) and isinstance(number.value, int) else None
