"""The text form of the IR, printing side: a `Kernel` or a `Program` in, text out that `text_parse` reads back.

Nothing is lost: printing, parsing and printing again gives the same text. Value names are the hints made unique within the
kernel (`%x`, `%x.1`), or `%0`, `%1`… in order where there is no hint. Invalid IR prints too: the verifier needs that. With
`locations` the header names the source file and every op that has a place ends with `@ line:column-endcolumn`.

    kernel @scale stage=loop {
      param %m: tensor<f32, [rows], [1]>
      fact rows 4
      %rows = size {value = rows} : i64
      parallel %rows (%i: i64) {
        %0 = load %m, %i : f32
        %1 = add %0, %0 : f32
        store %m, %i, %1
        yield
      }
    }
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from tilewright.base.dtypes import DType, is_name
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import Size
from tilewright.base.source import Span
from tilewright.ir.nodes import Attr, Attrs, Block, Kernel, Op, Value
from tilewright.ir.program import KernelCall, OrderedCalls, Program, ProgramArray, ProgramCheck, ScalarInput, call_tree

INDENT = "  "
IDENTIFIER = re.compile(r"[^\W\d][\w.$]*")
"""What needs no quotes as a name."""
RESERVED_VALUES = frozenset({"true", "false", "inf", "nan", "size"})
"""Words that are not the name of a size when they stand where an attribute's value is expected; nor are dtypes."""


def quote_name(name: str) -> str:
    """A name as it stands, or in quotes where it is no identifier."""
    return name if IDENTIFIER.fullmatch(name) else json.dumps(name)


def print_attr(value: Attr) -> str:
    """One attribute value; each kind has a form of its own, so that it parses back as the same kind."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Size):
        return _print_size_attr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(print_attr, value))}]"
    raise CompilerBug.at("TW042", f"an attribute cannot be a {type(value).__name__}: {value!r}")


def _print_size_attr(value: Size) -> str:
    text = str(value)
    first = IDENTIFIER.match(text)
    if first is None or first.group() in RESERVED_VALUES or is_name(first.group()):
        return f"size({text})"
    return text


def print_attrs(attrs: Attrs) -> str:
    return "{" + ", ".join(f"{quote_name(key)} = {print_attr(value)}" for key, value in attrs.items()) + "}"


def print_kernel(kernel: Kernel, locations: bool = False) -> str:
    """The kernel as text, ending in a newline."""
    return _Printer(locations).kernel(kernel, kernel.name)


def print_program(program: Program, locations: bool = False) -> str:
    """The program as text: arrays, checks and calls first, then each kernel once, in order of its first call."""
    labels = _kernel_labels(program)
    path = f" path={json.dumps(program.span.path)}" if locations else ""
    lines = [f"program @{quote_name(program.name)}{path} {{"]
    for word, arrays in (("input", program.inputs), ("output", program.outputs), ("scratch", program.scratch)):
        lines += [f"{INDENT}{array.role if isinstance(array, ProgramArray) else word} {_print_array(array)}" for array in arrays]
    lines += [f"{INDENT}computed {quote_name(name)} = {size}" for name, size in program.computed]
    for check in program.checks:
        place = _print_place(check.span, program.span.path) if locations else ""
        lines.append(f"{INDENT}check {_print_check(check)}{place}")
    lines += _print_calls(call_tree(program), labels, INDENT)
    lines.append("}" + (_print_place(program.span, program.span.path) if locations else ""))
    kernels = [_Printer(locations).kernel(kernel, label) for kernel, label in labels.items()]
    return "\n".join(["\n".join(lines) + "\n", *kernels])


def print_op(op: Op, kernel: Kernel | None = None) -> str:
    """One op without its regions, with the names it has in `kernel`; for messages."""
    printer = _Printer(False)
    if kernel is not None:
        printer.kernel(kernel, kernel.name)
    return printer.head(op)


def _print_calls(items: Sequence[KernelCall | OrderedCalls], labels: Mapping[Kernel, str], indent: str) -> list[str]:
    lines: list[str] = []
    for item in items:
        if isinstance(item, KernelCall):
            lines.append(f"{indent}call @{quote_name(labels[item.kernel])}({', '.join(map(quote_name, item.args))})")
            continue
        loop = item.loop
        steps = f"count {loop.count}" if loop.count is not None else f"cell {quote_name(loop.cell)}"
        lines.append(f"{indent}ordered {quote_name(loop.name)} {steps} {{")
        for turn, calls in item.turns:
            if turn.period == 1:
                lines += _print_calls(calls, labels, indent + INDENT)
            else:
                lines.append(f"{indent}{INDENT}turn {turn.turn} of {turn.period} {{")
                lines += _print_calls(calls, labels, indent + 2 * INDENT)
                lines.append(f"{indent}{INDENT}}}")
        lines.append(f"{indent}}}")
    return lines


def _kernel_labels(program: Program) -> dict[Kernel, str]:
    """A unique label for each kernel of the program: its name, with a number where another kernel has that name."""
    labels: dict[Kernel, str] = {}
    names = _ValueNames()
    for call in program.calls:
        if call.kernel not in labels:
            labels[call.kernel] = names.unique(call.kernel.name)
    return labels


def _print_array(array: ProgramArray | ScalarInput) -> str:
    kind = array.type if isinstance(array, ProgramArray) else array.dtype
    return f"{quote_name(array.name)}: {kind}"


def _print_check(check: ProgramCheck) -> str:
    code = f" {check.code}" if check.code != "TW004" else ""
    return f"{check.left} {check.relation} {check.right} {json.dumps(check.message)}{code}"


def _print_place(span: Span, path: str) -> str:
    """` @ line:column` and the end where it is known; the file too where it is not `path`. Empty for no place."""
    if not span.line:
        return ""
    text = " @ " if span.path == path else f" @ {json.dumps(span.path)}:"
    text += f"{span.line}:{span.column}"
    if span.end_line == span.line:
        return text + f"-{span.end_column}"
    return text + (f"-{span.end_line}:{span.end_column}" if span.end_line else "")


class _ValueNames:
    """Makes names unique by adding `.1`, `.2`…"""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.next: dict[str, int] = {}

    def unique(self, name: str) -> str:
        found = name
        while found in self.taken:
            number = self.next.get(name, 1)
            self.next[name] = number + 1
            found = f"{name}.{number}"
        self.taken.add(found)
        return found


class _Printer:
    """Prints one kernel; remembers the names it gave."""

    def __init__(self, locations: bool) -> None:
        self.locations = locations
        self.path = ""
        self.names: dict[Value, str] = {}
        self.unique = _ValueNames()
        self.unnamed = 0
        self.lines: list[str] = []

    def kernel(self, kernel: Kernel, label: str) -> str:
        self.path = kernel.span.path
        header = f"kernel @{quote_name(label)}"
        if label != kernel.name:
            header += f" name={json.dumps(kernel.name)}"
        header += f" stage={kernel.stage}"
        if kernel.grid:
            header += f" grid=[{', '.join(map(str, kernel.grid))}]"
        if kernel.threads != 1:
            header += f" threads={kernel.threads}"
        if self.locations:
            header += f" path={json.dumps(self.path)}"
        if kernel.attrs:
            header += f" {print_attrs(kernel.attrs)}"
        self.lines.append(header + " {")
        for param in kernel.params:
            self.lines.append(f"{INDENT}param {self.typed(param)}")
        for name, divisor in kernel.facts.items():
            self.lines.append(f"{INDENT}fact {quote_name(name)} {divisor}")
        for op in kernel.body.ops:
            self.op(op, INDENT)
        self.lines.append("}" + (_print_place(kernel.span, self.path) if self.locations else ""))
        return "\n".join(self.lines) + "\n"

    def op(self, op: Op, indent: str) -> None:
        text = indent + self.head(op)
        for number, region in enumerate(op.regions):
            start = f"{indent}}}" if number else text
            self.lines.append(f"{start}{self.arguments(region)} {{")
            for inner in region.ops:
                self.op(inner, indent + INDENT)
            text = f"{indent}}}"
        self.lines.append(text + _print_place(op.span, self.path) if self.locations else text)

    def head(self, op: Op) -> str:
        """All of an op but its regions and its place."""
        names = self.names
        text = op.opcode
        if op.results:
            text = f"{', '.join([names.get(r) or self.name(r) for r in op.results])} = {text}"
        if op.operands:
            text += f" {', '.join([names.get(o) or self.name(o) for o in op.operands])}"
        if op.attrs:
            text += f" {print_attrs(op.attrs)}"
        if op.results:
            text += f" : {', '.join([str(r.type) for r in op.results])}"
        return text

    def arguments(self, region: Block) -> str:
        return f" ({self.typed_list(region.args)})" if region.args else ""

    def typed_list(self, values: Iterable[Value]) -> str:
        return ", ".join(map(self.typed, values))

    def typed(self, value: Value) -> str:
        return f"{self.name(value)}: {value.type}"

    def name(self, value: Value) -> str:
        """The value's name; given when it is first seen, which in valid IR is where it is defined."""
        name = self.names.get(value)
        if name is None:
            if value.name:
                name = f"%{quote_name(self.unique.unique(value.name))}"
            else:
                name = f"%{self.unnamed}"
                self.unnamed += 1
            self.names[value] = name
        return name
