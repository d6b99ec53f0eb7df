"""Thread-stage IR as structured text: names, blocks, branches and loops. In: a kernel's body. Out: lines.

A value is a constant of the language, defined once; what a loop carries, and what a branch gives, is a variable. A language is a subclass: it
spells types, constants and variables, and has a table of ops. Numbers of the IR (`const`) are written where they are used.

    %3 = for %lo, %hi, %1, %a (%i, %s) {…}         var s1 = a;
                                             ->    for (var at2 = lo; at2 < hi; at2 = at2 + 1) { …; s1 = next; }
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.base.errors import TargetLimit
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import Type


class StructuredWriter(ABC):
    """Writes the body of one kernel."""

    handlers: Mapping[str, Callable[[Any, Op], None]] = {}
    """Ops that are more than an expression."""

    def __init__(self, kernel: Kernel, depth: int = 1) -> None:
        self.kernel, self.depth = kernel, depth
        self.lines: list[str] = []
        self.names: dict[Value, str] = {}
        self.mutable: set[str] = set()
        self.counter = 0

    # -- what a language says -------------------------------------------------------------------------------------------

    @abstractmethod
    def constant(self, name: str, type_: Type, text: str) -> str:
        """The definition of a constant."""

    @abstractmethod
    def variable(self, name: str, type_: Type, text: str) -> str:
        """The definition of a variable that begins as `text`; empty: undefined."""

    @abstractmethod
    def literal(self, op: Op) -> str:
        """A number of a `const` op."""

    @abstractmethod
    def expression(self, op: Op) -> str | None:
        """The result of an op as an expression of its operands; None where the language has none."""

    @abstractmethod
    def compare_index(self, index: str, high: str, type_: Type) -> str:
        """Whether a loop's index is below its end."""

    @abstractmethod
    def advance(self, index: str, step: str, type_: Type) -> str:
        """The index of the next step."""

    # -- lines and names ------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def fresh(self, letter: str = "v") -> str:
        self.counter += 1
        return f"{letter}{self.counter}"

    def of(self, value: Value) -> str:
        return self.names[value]

    def let(self, value: Value, text: str) -> None:
        """The value is a constant with this text."""
        name = self.names[value] = self.fresh()
        self.line(self.constant(name, value.type, text))

    def assign(self, name: str, text: str) -> None:
        self.line(f"{name} = {text};")

    # -- regions --------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        for op in block.ops:
            if op.opcode != "yield":
                self.op(op)

    def op(self, op: Op) -> None:
        handler = self.handlers.get(op.opcode) or _STRUCTURE.get(op.opcode)
        if handler is not None:
            handler(self, op)
            return
        text = self.expression(op)
        if text is None:
            raise self.unknown(op)
        self.let(op.results[0], text)

    def unknown(self, op: Op) -> Exception:
        types = ", ".join(str(v.type) for v in (*op.operands, *op.results))
        return TargetLimit.at("TW020", f"{self.kernel.name}: this target cannot do {op.opcode} of ({types})", op.span if op.span.line else self.kernel.span)

    def const(self, op: Op) -> None:
        self.names[op.results[0]] = self.literal(op)

    def inside(self, head: str, write: Callable[[], None]) -> None:
        """Lines in braces after `head`."""
        self.line(f"{head} {{")
        self.depth += 1
        write()
        self.depth -= 1
        self.line("}")

    def give(self, targets: Sequence[str], values: Sequence[Value]) -> None:
        """Assign all at once: a variable that is assigned may be read by a later one."""
        texts = [self.of(value) for value in values]
        if any(text in self.mutable and text != target for text, target in zip(texts, targets, strict=True)):
            held = []
            for text, value in zip(texts, values, strict=True):
                name = self.fresh("t")
                self.line(self.constant(name, value.type, text))
                held.append(name)
            texts = held
        for target, text in zip(targets, texts, strict=True):
            if target != text:
                self.assign(target, text)

    def hold(self, values: Sequence[Value], first: Sequence[str]) -> list[str]:
        """Variables for values, that begin as `first`."""
        names = []
        for value, text in zip(values, first, strict=True):
            name = self.fresh("c")
            self.line(self.variable(name, value.type, text))
            self.mutable.add(name)
            names.append(name)
        return names

    def if_(self, op: Op) -> None:
        results = self.hold(op.results, [""] * len(op.results))
        self.names.update(zip(op.results, results, strict=True))
        then, *otherwise = op.regions

        def branch(region: Block) -> None:
            self.block(region)
            self.give(results, region.yields)

        cond = self.of(op.operands[0])
        if _is_empty(then) and not results and otherwise:
            self.inside(f"if (!({cond}))", lambda: branch(otherwise[0]))
            return
        self.inside(f"if ({cond})", lambda: branch(then))
        if otherwise and not (_is_empty(otherwise[0]) and not results):
            self.lines[-1] = "  " * self.depth + "} else {"
            self.depth += 1
            branch(otherwise[0])
            self.depth -= 1
            self.line("}")

    def for_(self, op: Op) -> None:
        (region,) = op.regions
        low, high, step = (self.of(value) for value in op.operands[:3])
        carried = self.hold(op.results, [self.of(v) for v in op.operands[3:]])
        index, type_ = self.fresh("at"), region.args[0].type
        self.names.update(zip(region.args, (index, *carried), strict=True))
        first = self.variable(index, type_, low).rstrip(";")

        def body() -> None:
            self.block(region)
            self.give(carried, region.yields)

        self.inside(f"for ({first}; {self.compare_index(index, high, type_)}; {index} = {self.advance(index, step, type_)})", body)
        self.names.update(zip(op.results, carried, strict=True))

    def while_(self, op: Op) -> None:
        carried = self.hold(op.results, [self.of(v) for v in op.operands])
        test, region = op.regions

        def body() -> None:
            self.names.update(zip(test.args, carried, strict=True))
            self.block(test)
            go, *values = test.yields
            self.give(carried, values)
            self.line(f"if (!({self.of(go)})) {{ break; }}")
            self.names.update(zip(region.args, carried, strict=True))
            self.block(region)
            self.give(carried, region.yields)

        self.inside("while (true)", body)
        self.names.update(zip(op.results, carried, strict=True))


def _is_empty(block: Block) -> bool:
    return all(op.opcode == "yield" for op in block.ops)


_STRUCTURE: Mapping[str, Callable[[StructuredWriter, Op], None]] = {
    "const": StructuredWriter.const, "if": StructuredWriter.if_, "for": StructuredWriter.for_, "while": StructuredWriter.while_,
}  # fmt: skip
STRUCTURE = frozenset({*_STRUCTURE, "yield"})
