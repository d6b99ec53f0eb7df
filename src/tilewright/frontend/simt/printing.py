"""`print` and `assert` of explicit kernels, and the f-strings they take: texts with numbers in them.

An f-string is read into a text with places and the numbers for them; it has a meaning only for `print`, and without numbers for the
message of an `assert`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from tilewright.base.dtypes import DType, arithmetic_dtype
from tilewright.frontend.simt.build import Emitter
from tilewright.frontend.simt.values import (
    NOTHING,
    Arguments,
    Host,
    NumberValue,
    RecordValue,
    Seq,
    TextValue,
    Val,
    describe,
)
from tilewright.frontend.simt.words import variadic_word
from tilewright.ir.printing import FormatError, pieces


@dataclass(frozen=True, eq=False)
class Template:
    """A text with places, as Python's format strings have them, and the numbers for them."""

    text: str
    numbers: tuple[NumberValue, ...] = ()


def escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def read_template(e: Emitter, node: ast.JoinedStr, read: Callable[[ast.expr], Val]) -> Val:
    """An f-string."""
    text, numbers = "", list[NumberValue]()
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += escaped(str(part.value))
            continue
        assert isinstance(part, ast.FormattedValue)
        if part.conversion != -1:
            raise e.fail("'!' in an f-string of a kernel", "leave it out: numbers have one form", "TW005")
        spec = ""
        if part.format_spec is not None:
            assert isinstance(part.format_spec, ast.JoinedStr)
            if not all(isinstance(v, ast.Constant) for v in part.format_spec.values):
                raise e.fail("a format that is computed", "write the format out", "TW005")
            spec = "".join(str(v.value) for v in part.format_spec.values if isinstance(v, ast.Constant))
        more = template_of(e, read(part.value), spec)
        text, numbers = text + more.text, [*numbers, *more.numbers]
    return Host(Template(text, tuple(numbers)))


def template_of(e: Emitter, val: Val, spec: str = "") -> Template:
    """How a value is written."""
    if isinstance(val, Host) and isinstance(val.object, Template):
        return val.object
    if isinstance(val, TextValue):
        return Template(escaped(val.text))
    if isinstance(val, Host) and isinstance(val.object, DType):
        return Template(val.object.name)
    if isinstance(val, NumberValue):
        return Template(f"{{:{spec}}}" if spec else "{}", (val,))
    if isinstance(val, Seq | RecordValue):
        parts = [template_of(e, item, spec) for item in val.items]
        inside = ", ".join(part.text for part in parts)
        return Template(f"({inside})", tuple(n for part in parts for n in part.numbers))
    raise e.fail(f"{describe(val)} cannot be printed", "print its elements", "TW009")


def _words(e: Emitter, given: Arguments, name: str, default: str) -> str:
    val = given.named.get(name)
    if val is None or val == Seq(()):
        return default
    if not isinstance(val, TextValue):
        raise e.fail(f"'{name}' is {describe(val)}, not a text", code="TW009")
    return val.text


@variadic_word("print")
def _print(e: Emitter, given: Arguments) -> Val:
    unknown = given.named.keys() - {"sep", "end"}
    if unknown:
        raise e.fail(f"print has no argument '{min(unknown)}' in a kernel", "its arguments are sep and end", "TW016")
    parts = [template_of(e, val) for val in given.items]
    text = escaped(_words(e, given, "sep", " ")).join(part.text for part in parts) + escaped(_words(e, given, "end", "\n"))
    numbers = [n for part in parts for n in part.numbers]
    values = [e.use(n, arithmetic_dtype(n.dtype)) for n in numbers]
    try:
        pieces(text, [arithmetic_dtype(n.dtype) for n in numbers])
    except FormatError as error:
        raise e.fail(str(error), code="TW009") from None
    if "\0" in text:
        raise e.fail("a text with a zero byte", code="TW009")
    e.b.multi("print", *values, text=text)
    return NOTHING


def read_assert(e: Emitter, test: NumberValue, text: str, message: Val | None) -> None:
    """`assert test, message`; `text` is how the test is written."""
    if message is not None:
        template = template_of(e, message)
        if template.numbers:
            raise e.fail("the message of an assert has numbers in it", "print them before it", "TW005")
        text = template.text.replace("{{", "{").replace("}}", "}")
    condition = e.truth(test, "the condition of an assert")
    if condition.const is not None and condition.const:
        return
    e.b.multi("assert", e.use(condition), text=text)
