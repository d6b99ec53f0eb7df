"""The text form of the IR, parsing side: text in, a `Kernel` or a `Program` out, `UserError` TW041 where it does not parse.

`text.py` shows the form. A name is known in the whole kernel from its definition on, and given once; whether a use is
legal there is for the verifier to say. `;` starts a comment. Ops take their place from `@ line:column` when the header has
a `path`; otherwise from the text itself, so that errors in hand-written IR point into its file.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from tilewright.base.dtypes import DType, by_name, is_name
from tilewright.base.errors import TilewrightError, UserError
from tilewright.base.sizes import Size, parse_size
from tilewright.base.source import NOWHERE, Source, Span
from tilewright.ir.layouts import Accumulator, Blocked, Layout, Operand, Shared
from tilewright.ir.nodes import NO_ATTRS, Attr, Attrs, Block, Kernel, Op, Stage, Value
from tilewright.ir.program import KernelCall, LoopTurn, OrderedLoop, Program, ProgramArray, ProgramCheck, ScalarInput
from tilewright.ir.types import CopyMap, Scalar, Tensor, Tile, Type, Vec

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+|;[^\n]*)
    |(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<name>[^\W\d][\w.$]*)
    |(?P<mark>[-+*=:,<>(){}\[\]%@])""",
    re.VERBOSE,
)
_GENERATED = Span().path
Item = TypeVar("Item")
_ValueName = str | int
"""`%x` has a name, `%3` has none: its number only counts inside the text."""


def parse_kernel(text: str, path: str = "<kir>") -> Kernel:
    """The one kernel the text holds."""
    parser = _IrParser(text, path)
    _, kernel = parser.kernel()
    parser.end()
    return kernel


def parse_program(text: str, path: str = "<kir>") -> Program:
    """The program the text holds, with its kernels."""
    parser = _IrParser(text, path)
    program = parser.program()
    parser.end()
    return program


class _IrToken(NamedTuple):
    kind: str
    """number, string, name, mark or end."""
    text: str
    start: int


class _IrParser:
    """Recursive descent over the tokens."""

    def __init__(self, text: str, path: str) -> None:
        self.text = text
        self.source = Source(path, text)
        self.line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.position = 0
        self.tokens: list[_IrToken] = []
        self.split()
        self.values: dict[_ValueName, Value] = {}
        self.places: Source | None = None
        """What `@ line:column` refers to, when `explicit_places`."""
        self.explicit_places = False

    # -- tokens -------------------------------------------------------------------------------------------------

    def split(self) -> None:
        start = 0
        while start < len(self.text):
            match = _TOKEN.match(self.text, start)
            if match is None:
                raise self.error(f"unexpected character {self.text[start]!r}", _IrToken("mark", self.text[start], start))
            kind = match.lastgroup or ""
            if kind != "skip":
                self.tokens.append(_IrToken(kind, match.group(), start))
            start = match.end()
        self.tokens.append(_IrToken("end", "", len(self.text)))

    def span(self, first: _IrToken, last: _IrToken) -> Span:
        line, column = self.line_column(first.start)
        end_line, end_column = self.line_column(last.start + len(last.text))
        return Span(self.source, line, column, end_line, end_column)

    def line_column(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def error(self, message: str, token: _IrToken | None = None) -> TilewrightError:
        at = token or self.tokens[self.position]
        return UserError.at("TW041", message, self.span(at, at))

    def peek(self, text: str, ahead: int = 0) -> bool:
        """Whether the next token is this mark or word."""
        token = self.tokens[min(self.position + ahead, len(self.tokens) - 1)]
        return token.text == text and token.kind in ("mark", "name")

    def next(self) -> _IrToken:
        token = self.tokens[self.position]
        if token.kind != "end":
            self.position += 1
        return token

    def accept(self, text: str) -> bool:
        if self.peek(text):
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> _IrToken:
        if not self.peek(text):
            raise self.error(f"expected `{text}`, got {self.found()}")
        return self.next()

    def kind(self, kind: str, what: str) -> _IrToken:
        if self.tokens[self.position].kind != kind:
            raise self.error(f"expected {what}, got {self.found()}")
        return self.next()

    def found(self) -> str:
        token = self.tokens[self.position]
        return "the end" if token.kind == "end" else f"`{token.text}`"

    def end(self) -> None:
        self.kind("end", "the end")

    def items(self, close: str, item: Callable[[], Item]) -> list[Item]:
        """Items between commas up to the closing mark, which is consumed."""
        found: list[Item] = []
        if self.accept(close):
            return found
        while True:
            found.append(item())
            if self.accept(close):
                return found
            self.expect(",")

    # -- small pieces -------------------------------------------------------------------------------------------

    def name(self, what: str = "a name") -> str:
        """A name, in quotes or not."""
        if self.tokens[self.position].kind == "string":
            return self.string()
        return self.kind("name", what).text

    def string(self) -> str:
        token = self.kind("string", "a string")
        try:
            value: str = json.loads(token.text)
        except ValueError as error:
            raise self.error("bad escape in a string", token) from error
        return value

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.kind("number", "an integer")
        if not token.text.isdigit():
            raise self.error(f"expected an integer, got `{token.text}`", token)
        return sign * int(token.text)

    def integers(self) -> tuple[int, ...]:
        self.expect("[")
        return tuple(self.items("]", self.integer))

    def size(self) -> Size:
        """A size: the tokens up to where arithmetic ends, read by `parse_size`."""
        first = self.position
        while True:
            while self.accept("-"):
                pass
            if self.accept("("):
                self.size()
                self.expect(")")
            elif self.tokens[self.position].kind in ("name", "number"):
                self.next()
                if self.accept("("):
                    self.items(")", self.size)
            else:
                raise self.error(f"expected a size, got {self.found()}")
            if not (self.accept("+") or self.accept("*") or self.peek("-")):
                break
        start, last = self.tokens[first], self.tokens[self.position - 1]
        try:
            return parse_size(self.text[start.start : last.start + len(last.text)])
        except ValueError as error:
            raise UserError.at("TW041", str(error), self.span(start, last)) from error

    def sizes(self) -> tuple[Size, ...]:
        self.expect("[")
        return tuple(self.items("]", self.size))

    def dtype(self) -> DType:
        token = self.kind("name", "a dtype")
        if not is_name(token.text):
            raise self.error(f"unknown dtype `{token.text}`", token)
        return by_name(token.text)

    def attr(self) -> Attr:
        token = self.tokens[self.position]
        if token.kind == "string":
            return self.string()
        if self.accept("["):
            return tuple(self.items("]", self.attr))
        if token.kind == "number" or token.text == "-":
            return self.number()
        if token.text in ("true", "false"):
            return self.next().text == "true"
        if token.text in ("inf", "nan"):
            return float(self.next().text)
        if token.text == "size" and self.peek("(", 1):
            self.position += 2
            size = self.size()
            self.expect(")")
            return size
        if token.kind == "name":
            return self.dtype() if is_name(token.text) else self.size()
        raise self.error(f"expected an attribute's value, got {self.found()}")

    def number(self) -> int | float:
        negative = self.accept("-")
        token = self.next()
        if token.kind == "number" and token.text.isdigit():
            return -int(token.text) if negative else int(token.text)
        if token.kind == "number" or token.text in ("inf", "nan"):
            return -float(token.text) if negative else float(token.text)
        raise self.error(f"expected a number, got `{token.text}`", token)

    def attrs(self) -> Attrs:
        """`{name = value, …}` when it is next; a region opens with a brace too, but no name and `=` follow there."""
        named = self.tokens[min(self.position + 1, len(self.tokens) - 1)].kind in ("name", "string")
        if not (self.peek("{") and named and self.peek("=", 2)):
            return NO_ATTRS
        self.next()
        found: dict[str, Attr] = {}

        def item() -> None:
            token = self.tokens[self.position]
            name = self.name("an attribute")
            if name in found:
                raise self.error(f"attribute `{name}` is given twice", token)
            self.expect("=")
            found[name] = self.attr()

        self.items("}", item)
        return MappingProxyType(found)

    # -- types --------------------------------------------------------------------------------------------------

    def type(self) -> Type:
        token = self.kind("name", "a type")
        if is_name(token.text):
            return Scalar(by_name(token.text))
        forms: dict[str, Callable[[DType], Type]] = {"vec": self.vec, "tile": self.tile, "tensor": self.tensor, "map": self.copy_map}
        if token.text not in forms:
            raise self.error(f"unknown type `{token.text}`", token)
        self.expect("<")
        dtype = self.dtype()
        self.expect(",")
        type_ = forms[token.text](dtype)
        self.expect(">")
        return type_

    def copy_map(self, dtype: DType) -> CopyMap:
        self.expect("[")
        box = self.items("]", self.integer)
        self.expect(",")
        swizzle, pixels = self.integer(), 0
        if self.accept(","):
            self.expect("pixels")
            self.expect("=")
            pixels = self.integer()
        return CopyMap(dtype, tuple(box), swizzle, pixels)

    def vec(self, dtype: DType) -> Vec:
        return Vec(dtype, self.integer())

    def tile(self, dtype: DType) -> Tile:
        shape = self.integers()
        return Tile(dtype, shape, self.layout() if self.accept(",") else None)

    def tensor(self, dtype: DType) -> Tensor:
        shape = self.sizes()
        self.expect(",")
        strides = self.sizes()
        space, align = "global", 0
        while self.accept(","):
            if self.peek("align") and self.peek("=", 1):
                self.position += 2
                align = self.integer()
            else:
                space = self.kind("name", "a memory space").text
        return Tensor(dtype, shape, strides, space, align)

    def layout(self) -> Layout:
        token = self.kind("name", "a layout")
        self.expect("(")
        layout: Layout
        if token.text == "blocked":
            vector = self.integers()
            self.expect(",")
            lanes = self.integers()
            self.expect(",")
            warps = self.integers()
            layout = Blocked(vector, lanes, warps, self.integer() if self.accept(",") else 1)
        elif token.text == "shared":
            order = self.integers()
            self.expect(",")
            layout = Shared(order, self.integer())
        elif token.text == "accumulator":
            layout = self.accumulator()
        elif token.text == "operand":
            side = self.kind("name", "a side").text
            self.expect(",")
            self.expect("accumulator")
            self.expect("(")
            layout = Operand(side, self.accumulator())
            self.expect(")")
        else:
            raise self.error(f"unknown layout `{token.text}`", token)
        self.expect(")")
        return layout

    def accumulator(self) -> Accumulator:
        family = self.kind("name", "an instruction family").text
        self.expect(",")
        first = self.tokens[self.position]
        shape = self.integers()
        self.expect(",")
        warps = self.integers()
        if len(shape) != 3 or len(warps) != 2:
            raise self.error("an accumulator has m, n, k and two numbers of warps", first)
        return Accumulator(family, (shape[0], shape[1], shape[2]), (warps[0], warps[1]))

    # -- places -------------------------------------------------------------------------------------------------

    def path(self) -> None:
        """` path="file"` in a header: from here on places are explicit."""
        self.explicit_places = self.accept("path")
        self.places = None
        if self.explicit_places:
            self.expect("=")
            path = self.string()
            self.places = None if path == _GENERATED else Source(path, "")

    def place(self, first: _IrToken) -> Span:
        """The place of what began at `first`: `@ line:column` if it is next, else the text itself or nowhere."""
        last = self.tokens[self.position - 1]
        if not self.accept("@"):
            return NOWHERE if self.explicit_places else self.span(first, last)
        source = self.places
        if self.tokens[self.position].kind == "string":
            path = self.string()
            source = None if path == _GENERATED else Source(path, "")
            self.expect(":")
        line = self.integer()
        self.expect(":")
        column = self.integer()
        if not self.accept("-"):
            return Span(source, line, column)
        end = self.integer()
        return (
            Span(source, line, column, end, self.integer())
            if self.accept(":")
            else Span(source, line, column, line, end)
        )

    # -- kernels ------------------------------------------------------------------------------------------------

    def kernel(self) -> tuple[str, Kernel]:
        """A kernel and the label calls know it by."""
        first = self.expect("kernel")
        self.expect("@")
        label = name = self.name()
        header_end = self.tokens[self.position - 1]
        if self.accept("name"):
            self.expect("=")
            name = self.string()
        stage = self.stage()
        grid: tuple[Size, ...] = ()
        threads = 1
        if self.accept("grid"):
            self.expect("=")
            grid = self.sizes()
        if self.accept("threads"):
            self.expect("=")
            threads = self.integer()
        self.path()
        attrs = self.attrs()
        self.values = {}
        self.expect("{")
        params: list[Value] = []
        while self.accept("param"):
            params.append(self.typed_value())
        facts: dict[str, int] = {}
        while self.accept("fact"):
            fact = self.name("the name of a size")
            facts[fact] = self.integer()
        ops = self.ops()
        # Without an explicit place the header stands for the kernel.
        span = self.place(first) if self.explicit_places else self.span(first, header_end)
        body = Block((), ops)
        return label, Kernel(name, stage, tuple(params), body, grid, threads, MappingProxyType(facts), attrs, span)

    def stage(self) -> Stage:
        self.expect("stage")
        self.expect("=")
        token = self.kind("name", "a stage")
        if token.text not in {stage.value for stage in Stage}:
            raise self.error(f"unknown stage `{token.text}`", token)
        return Stage(token.text)

    def ops(self) -> tuple[Op, ...]:
        """Ops up to the closing brace, which is consumed."""
        found: list[Op] = []
        while not self.accept("}"):
            found.append(self.op())
        return tuple(found)

    def op(self) -> Op:
        first = self.tokens[self.position]
        names: list[tuple[_ValueName, _IrToken]] = []
        if self.peek("%"):
            names.append(self.value_name())
            while self.accept(","):
                names.append(self.value_name())
            self.expect("=")
        opcode = self.kind("name", "an op")
        operands: list[Value] = []
        # A `%` on the next line is the result of the next op.
        if self.peek("%") and "\n" not in self.text[opcode.start : self.tokens[self.position].start]:
            operands.append(self.operand())
            while self.accept(","):
                operands.append(self.operand())
        attrs = self.attrs()
        types: list[Type] = []
        if names:
            self.expect(":")
            types.append(self.type())
            while self.accept(","):
                types.append(self.type())
            if len(types) != len(names):
                raise self.error(f"{len(names)} results but {len(types)} types", first)
        head_end = self.tokens[self.position - 1]
        results = tuple(self.define(name, type_) for name, type_ in zip(names, types, strict=True))
        regions: list[Block] = []
        while self.peek("{") or self.peek("("):
            args = self.items(")", self.typed_value) if self.accept("(") else []
            self.expect("{")
            regions.append(Block(tuple(args), self.ops()))
        span = self.place(first) if self.peek("@") or self.explicit_places else self.span(first, head_end)
        return Op(opcode.text, tuple(operands), results, attrs, tuple(regions), span)

    def value_name(self) -> tuple[_ValueName, _IrToken]:
        """`%name` or `%number`, with the token that errors point at."""
        mark = self.expect("%")
        token = self.tokens[self.position]
        key: _ValueName
        if token.kind == "number" and token.text.isdigit():
            key = int(self.next().text)
        else:
            key = self.name("the name of a value")
        return key, mark._replace(text=self.text[mark.start : token.start + len(token.text)])

    def define(self, name: tuple[_ValueName, _IrToken], type_: Type) -> Value:
        key, token = name
        if key in self.values:
            raise self.error(f"%{key} is defined twice", token)
        value = Value(type_, key if isinstance(key, str) else "")
        self.values[key] = value
        return value

    def typed_value(self) -> Value:
        name = self.value_name()
        self.expect(":")
        return self.define(name, self.type())

    def operand(self) -> Value:
        key, token = self.value_name()
        if key not in self.values:
            raise self.error(f"%{key} is not defined", token)
        return self.values[key]

    # -- programs -----------------------------------------------------------------------------------------------

    def program(self) -> Program:
        first = self.expect("program")
        self.expect("@")
        name = self.name()
        header_end = self.tokens[self.position - 1]
        self.path()
        self.expect("{")
        arrays: dict[str, list[ProgramArray | ScalarInput]] = {"input": [], "inout": [], "output": [], "scratch": []}
        arrays["inout"] = arrays["input"]
        checks: list[ProgramCheck] = []
        computed: list[tuple[str, Size]] = []
        calls: list[tuple[_IrToken, str, tuple[str, ...], tuple[LoopTurn, ...]]] = []
        loops: list[OrderedLoop] = []
        while not self.accept("}"):
            token = self.kind("name", "input, inout, output, scratch, computed, check, call or ordered")
            if token.text in arrays:
                arrays[token.text].append(self.array(token.text))
            elif token.text == "computed":
                label = self.name("the name of a size")
                self.expect("=")
                computed.append((label, self.size()))
            elif token.text == "check":
                checks.append(self.check(token))
            elif token.text in ("call", "ordered"):
                self.calls(token, (), calls, loops)
            else:
                raise self.error(f"expected input, inout, output, scratch, computed, check, call or ordered, got `{token.text}`", token)
        span = self.place(first) if self.explicit_places else self.span(first, header_end)
        kernels: dict[str, Kernel] = {}
        while self.peek("kernel"):
            start = self.tokens[self.position]
            label, kernel = self.kernel()
            if label in kernels:
                raise self.error(f"two kernels are called @{label}", start)
            kernels[label] = kernel
        resolved: list[KernelCall] = []
        for token, label, args, around in calls:
            if label not in kernels:
                raise self.error(f"no kernel is called @{label}", token)
            resolved.append(KernelCall(kernels[label], args, around))
        outputs, scratch = (tuple(a for a in arrays[role] if isinstance(a, ProgramArray)) for role in ("output", "scratch"))
        return Program(
            name, tuple(arrays["input"]), outputs, scratch, tuple(resolved), tuple(checks), span, computed=tuple(computed), loops=tuple(loops)
        )  # fmt: skip

    def calls(
        self, token: _IrToken, around: tuple[LoopTurn, ...], calls: list[tuple[_IrToken, str, tuple[str, ...], tuple[LoopTurn, ...]]],
        loops: list[OrderedLoop],
    ) -> None:  # fmt: skip
        """A call, or an ordered loop with all its calls."""
        if token.text == "call":
            calls.append((*self.call(), around))
            return
        name = self.name("the name of an ordered loop")
        word = self.kind("name", "count or cell")
        if word.text not in ("count", "cell"):
            raise self.error(f"expected count or cell, got `{word.text}`", word)
        loops.append(OrderedLoop(name, self.size()) if word.text == "count" else OrderedLoop(name, None, self.name("the name of an array")))
        self.expect("{")
        while not self.accept("}"):
            inner = self.kind("name", "call, ordered or turn")
            if inner.text in ("call", "ordered"):
                self.calls(inner, (*around, LoopTurn(name)), calls, loops)
                continue
            if inner.text != "turn":
                raise self.error(f"expected call, ordered or turn, got `{inner.text}`", inner)
            number = int(self.kind("number", "the number of a turn").text)
            self.expect("of")
            turn = LoopTurn(name, int(self.kind("number", "a period").text), number)
            self.expect("{")
            while not self.accept("}"):
                self.calls(self.kind("name", "call or ordered"), (*around, turn), calls, loops)

    def array(self, role: str) -> ProgramArray | ScalarInput:
        name = self.name("the name of an array")
        self.expect(":")
        token = self.tokens[self.position]
        type_ = self.type()
        if isinstance(type_, Tensor):
            return ProgramArray(name, type_, role)
        if isinstance(type_, Scalar) and role == "input":
            return ScalarInput(name, type_.dtype)
        raise self.error(f"{role} `{name}` must be a tensor{' or a scalar' if role == 'input' else ''}", token)

    def check(self, first: _IrToken) -> ProgramCheck:
        left = self.size()
        relation = self.kind("name", "eq, le or lt").text
        right = self.size()
        message = self.string()
        code = "TW004"
        if re.fullmatch(r"TW\d+", self.tokens[self.position].text):
            code = self.next().text
        return ProgramCheck(left, relation, right, message, self.place(first), code)

    def call(self) -> tuple[_IrToken, str, tuple[str, ...]]:
        self.expect("@")
        token = self.tokens[self.position]
        label = self.name("the name of a kernel")
        self.expect("(")
        return token, label, tuple(self.items(")", self.name))
