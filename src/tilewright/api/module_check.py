"""What a ZynML program needs and cannot do, found before any of it runs.

In: a parsed program and the names of the inputs it is given. Out: the inputs it lacks, everything wrong with it, the bodies of its blocks with the
functions they call in them, and for each call of a function what is called.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from tilewright.api import host_values
from tilewright.api.zyn_parallel import is_spread
from tilewright.base.errors import Diagnostics
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.compose import Apart, Composer, call_of, kernel_of
from tilewright.tree.inline import inline
from tilewright.tree.names import BodyNames, body_names, substitute
from tilewright.tree.syntax import Expr, KernelAttribute, Stmt

HOST_FUNCTIONS = frozenset(
    {"compute_devices", "allocate", "memory_pool", "reshape", "split", "zeros", "ones", "transpose", "concat", "row_max", "row_sum", "dot", "matmul"}
)
"""Functions of the host language that this version knows by name only."""

_SETTINGS = ("compute_device",)
_KINDS_WITH_SIZES = frozenset({"conv2d", "conv2d_depthwise", "depthwise_conv2d", "attention", "flash_attention"})
"""Kernel kinds that bind size names which no access in the body binds."""


@dataclass(frozen=True)
class Body:
    """The statements of a compute block, and what they say of names they do not declare."""

    statements: tuple[Stmt, ...]
    names: BodyNames


class Check:
    """What a program needs and cannot do, found before it runs."""

    def __init__(self, module: syntax.Module, given: frozenset[str]) -> None:
        self.sink = Diagnostics()
        self.given = given
        self.missing: dict[str, Span] = {}
        self.used: set[str] = set()
        self.defined: set[str] = set()
        self.mutable: set[str] = set()
        self.functions = {s.name: s for s in module.body if isinstance(s, syntax.Function)}
        self.bodies: dict[int, Body] = {}
        """By identity of the compute."""
        self.callees: dict[int, Expr] = {}
        """By identity of a call of a function: what is called. Calls of functions that run block by block are not here."""
        self.kernels: dict[tuple[int, str, tuple[str, ...]], tuple[syntax.Function, BodyNames]] = {}
        """By identity of an expression or block, the name of its result and those of its arguments: the kernel it is."""
        self.captured: dict[tuple[int, str, tuple[str, ...]], tuple[syntax.Function, syntax.Function]] = {}
        """By identity of a kernel: itself, and it with values of the program as further arguments."""
        self._composer = Composer(self.functions, lambda name: name in self.defined or name in self.given, self.sink)
        self._apart: list[str] = []
        """Functions being checked block by block."""
        for statement in module.body:
            self._statement(statement)

    def report(self, inputs: dict[str, object]) -> None:
        needed = [n for n in self.missing if n not in inputs]
        call = f"call run({', '.join(f'{n}=…' for n in [*sorted(self.used & set(inputs)), *needed])})"
        for name in needed:
            self.sink.error("TW008", f"missing input '{name}'", self.missing[name], call)
        for name in inputs:
            if name not in self.used:
                close = difflib.get_close_matches(name, [n for n in (*needed, *self.used) if n not in inputs], 1)
                takes = ", ".join(sorted(self.used | set(needed))) or "no inputs"
                reason = "is defined by the program itself" if name in self.defined else "is not used by the program"
                self.sink.error(
                    "TW008", f"unexpected input '{name}': it {reason}", help=f"did you mean '{close[0]}'?" if close else f"the program takes {takes}"
                )
        self.sink.raise_if_errors()

    def _unavailable(self, what: str, span: Span) -> None:
        self.sink.error("TW005", f"{what} is not available in this version", span)

    def _need(self, name: str, span: Span) -> None:
        if name in self.defined:
            return
        if name in self.given:
            self.used.add(name)
        else:
            self.missing.setdefault(name, span)

    def _statement(self, node: Stmt) -> None:
        if isinstance(node, syntax.Let):
            if node.shared or node.value is None:
                self._unavailable("a shared variable outside a kernel", node.span)
                return
            self._expression(node.value)
            self.defined.update(node.targets)
            self.mutable -= set(node.targets)
            if node.mutable:
                self.mutable.update(node.targets)
        elif isinstance(node, syntax.Assign):
            self._expression(node.value)
            if not isinstance(node.target, syntax.Name):
                self._unavailable("assigning to a part of a value outside a kernel", node.target.span)
            elif node.target.id not in self.mutable:
                reason = "was declared with let" if node.target.id in self.defined else "is not declared"
                self.sink.error("TW015", f"'{node.target.id}' {reason} and cannot be assigned", node.target.span, f"write 'var {node.target.id} = …' first")
        elif isinstance(node, syntax.ExprStmt):
            self._expression(node.value)
        elif isinstance(node, syntax.Config):
            self._config(node)
        elif not isinstance(node, syntax.Function):
            words = {syntax.For: "a loop", syntax.While: "a loop", syntax.If: "if", syntax.Import: "import", syntax.Return: "return", syntax.Yield: "yield"}
            self._unavailable(f"{words[type(node)]} outside a kernel", node.span)

    def _config(self, node: syntax.Config) -> None:
        for name, value in node.fields:
            if name not in _SETTINGS:
                close = difflib.get_close_matches(name, _SETTINGS, 1)
                self.sink.error("TW011", f"unknown setting '{name}'", value.span, f"did you mean '{close[0]}'?" if close else f"known: {', '.join(_SETTINGS)}")
            elif not isinstance(value, syntax.String):
                self.sink.error("TW009", "compute_device must be a string", value.span, 'write for example "cpu" or "cuda:0"')

    def _expression(self, node: Expr) -> None:
        if isinstance(node, syntax.Compute):
            self._compute(node)
        elif isinstance(node, syntax.Name):
            self._need(node.id, node.span)
        elif isinstance(node, syntax.Pipe):
            self._expression(node.value)
            self._call(node.call, piped=True)
        elif isinstance(node, syntax.Call):
            self._call(node)
        elif isinstance(node, syntax.Await):
            for child in (node.value, node.timeout, node.otherwise):
                if child is not None:
                    self._expression(child)
        elif isinstance(node, syntax.Binary | syntax.Unary | syntax.IfExpr):
            if isinstance(node, syntax.Binary) and node.op == "@":
                self._unavailable("'@' outside a kernel", node.span)
            for child in operands(node):
                self._expression(child)
        elif isinstance(node, syntax.ReduceExpr):
            self._expression(node.value)
            if node.axis is not None:
                self._expression(node.axis)
        elif isinstance(node, syntax.Tuple | syntax.List):
            for item in node.items:
                self._expression(item)
        elif isinstance(node, syntax.Record):
            for _, value in node.fields:
                self._expression(value)
        elif isinstance(node, syntax.Attribute):
            self._expression(node.value)
        elif isinstance(node, syntax.Index):
            self._expression(node.value)
            for index in node.indices:
                self._expression(index)
        elif isinstance(node, syntax.Slice):
            self._unavailable("a slice outside a kernel", node.span)

    def _call(self, node: syntax.Call, piped: bool = False) -> None:
        for argument in node.args:
            self._expression(argument.value)
        function = node.function
        if not isinstance(function, syntax.Name):
            shown = f"'.{function.name}()'" if isinstance(function, syntax.Attribute) else "this call"
            self._unavailable(f"{shown} outside a kernel", node.span)
        elif function.id in self.functions:
            self._function(self.functions[function.id], node, len(node.args) + piped)
        elif function.id in HOST_FUNCTIONS:
            self._unavailable(f"'{function.id}' outside a kernel", node.span)
        elif function.id not in host_values.ELEMENTWISE:
            known = sorted(host_values.ELEMENTWISE | set(self.functions))
            close = difflib.get_close_matches(function.id, known, 1)
            self.sink.error("TW002", f"unknown function '{function.id}'", function.span, f"did you mean '{close[0]}'?" if close else "")
        elif any(a.keyword is not None for a in node.args):
            self.sink.error("TW016", f"'{function.id}' takes no keywords", node.span, "give the arguments in order")

    def _function(self, function: syntax.Function, node: syntax.Call, given: int) -> None:
        """A call of a function: as part of the kernel it is called in where that goes, else block by block."""
        try:
            callee = self._composer.callee(function.name, node.span)
            if not isinstance(callee, syntax.Callee):
                return
            least = sum(p.default is None for p in function.params)
            if not any(a.keyword for a in node.args) and not least <= given <= len(function.params):
                shown = f"{function.name}({', '.join(p.name for p in function.params)})"
                self.sink.error("TW016", f"{shown} takes {len(function.params)} argument(s), got {given}", node.span)
                return
            kernel = kernel_of("call", function.params, call_of(callee, function.params, node.span), self.sink)
            names = body_names(kernel.body)
            for name, span in names.free.items():
                if name not in names.in_ranges and all(name != p.name for p in function.params):
                    self._need(name, span)
            self.callees[id(node)] = callee
        except Apart:
            self._blocks(function, node)

    def _blocks(self, function: syntax.Function, node: syntax.Call) -> None:
        if function.name in self._apart:
            self.sink.error("TW005", f"'{function.name}' calls itself", node.span, "use a loop in a compute block")
            return
        if any(a.keyword is not None for a in node.args):
            self._unavailable(f"a keyword in a call of '{function.name}'", node.span)
        self._apart.append(function.name)
        defined, mutable = set(self.defined), set(self.mutable)
        self.defined |= {p.name for p in function.params}
        for position, statement in enumerate(function.body):
            if isinstance(statement, syntax.Return) and position == len(function.body) - 1 and statement.value is not None:
                self._expression(statement.value)
            else:
                self._statement(statement)
        if not function.body or not isinstance(function.body[-1], syntax.Return):
            self.sink.error("TW017", f"'{function.name}' returns nothing", function.span, "return what it computes, as its last statement")
        self.defined, self.mutable = defined, mutable
        self._apart.pop()

    def _linked(self, node: syntax.Compute, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The body of a block with the functions it calls in it."""
        try:
            shell = syntax.Function("compute", (), None, self._composer.linked(body), "compute", span=node.span)
        except Apart as why:
            self.sink.error("TW005", f"a function called in a kernel cannot be part of it: {why}", why.span)
            return body
        return inline(shell, self.sink).body

    def _compute(self, node: syntax.Compute) -> None:
        several = is_spread(node.attributes)
        for attribute in node.attributes:
            if attribute.name == "parallel" and not several:
                self._unavailable("@parallel without (data) and a list of devices", attribute.span)
            elif several or attribute.name != "device":
                continue
            elif not (len(attribute.args) == 1 and isinstance(attribute.args[0].value, syntax.String)):
                self._unavailable("@device with anything but one name", attribute.span)
        for item in node.inputs:
            self._expression(item)
        body = self._linked(node, substitute(node.body, replacements(node)))
        names = body_names(body)
        self.bodies[id(node)] = Body(body, names)
        own_sizes = any(_kernel_kind(a) in _KINDS_WITH_SIZES for a in node.attributes)
        listed = {i.id for i in node.inputs if isinstance(i, syntax.Name)}
        for name, span in names.free.items():
            if name in listed or name in self.defined:
                continue
            if name in self.given:
                self.used.add(name)
            elif name not in names.in_ranges and not own_sizes and not re.fullmatch(r"_\d+", name):
                self.missing.setdefault(name, span)


def _kernel_kind(attribute: KernelAttribute) -> str:
    if attribute.name != "kernel" or len(attribute.args) != 1:
        return ""
    kind = attribute.args[0].value
    if isinstance(kind, syntax.Call):
        kind = kind.function
    return kind.id if isinstance(kind, syntax.Name) else ""


def replacements(node: syntax.Compute) -> list[tuple[Expr, syntax.Name]]:
    """For each input that is no name, what stands for it in the function: `_0`, `_1`…"""
    others = [item for item in node.inputs if not isinstance(item, syntax.Name)]
    return [(item, syntax.Name(f"_{number}", span=item.span)) for number, item in enumerate(others)]


def operands(node: syntax.Binary | syntax.Unary | syntax.IfExpr) -> tuple[Expr, ...]:
    if isinstance(node, syntax.Binary):
        return node.left, node.right
    return (node.operand,) if isinstance(node, syntax.Unary) else (node.cond, node.then, node.otherwise)
