"""What a ZynML program needs and cannot do, found before any of it runs.

In: a parsed program and the names of the inputs it is given. Out: the inputs it lacks, everything wrong with it, the bodies of its blocks with the
functions they call in them, and for each call of a function what is called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tilewright.base import dtypes, registry
from tilewright.base.errors import Diagnostics, UserError, close_matches, in_order
from tilewright.base.source import Span
from tilewright.frontend.zyn.library_calls import LIBRARY
from tilewright.tree import syntax
from tilewright.tree.check.expressions import STATISTICS
from tilewright.tree.check.random_draws import DTYPES as RANDOM
from tilewright.tree.compose import Apart, Composer, call_of, kernel_of
from tilewright.tree.inline import inline, nodes
from tilewright.tree.jumps import block_without_jumps
from tilewright.tree.kernel_words import FUNCTION, KINDS
from tilewright.tree.metadata import read_attributes
from tilewright.tree.names import BodyNames, body_names, substitute
from tilewright.tree.syntax import Expr, Stmt
from tilewright.tree.unknown_functions import help_for
from tilewright.zyn.host import functions as host_functions
from tilewright.zyn.host import values as host_values
from tilewright.zyn.host.dimensions import count_mismatch, parameter_sizes, shape_names
from tilewright.zyn.host.kind_parameters import kind_of, parameter_expressions, parameter_names
from tilewright.zyn.host.sizes import KnownSizes
from tilewright.zyn.parallel import is_mode, is_spread
from tilewright.zyn.type_forms import bounded, check_type
from tilewright.zyn.unreached import leaves

_SETTINGS = ("compute_device",)
_KINDS_WITH_SIZES = frozenset({*(word.name for word in KINDS if word.sizes), "attention", "flash_attention"})
"""Kernel kinds that bind size names which no access in the body binds."""


Complete = Callable[[UserError, syntax.Module, Mapping[str, object]], UserError]
"""An error with all others that a program has for some inputs."""


@dataclass(frozen=True)
class Body:
    """The statements of a compute block, and what they say of names they do not declare."""

    statements: tuple[Stmt, ...]
    names: BodyNames
    inputs: dict[str, Expr]
    """What the kernel is given, by the names it has in the body."""


class ModuleCheck:
    """What a program needs and cannot do, found before it runs."""

    def __init__(self, module: syntax.Module, given: frozenset[str], complete: Complete = lambda error, module, inputs: error) -> None:
        self.sink = Diagnostics()
        self.complete = complete
        self._module = module
        self.roots: tuple[Path, ...] = ()
        """The folders that the program may read; none where it is not known yet."""
        self.given = given
        self.missing: dict[str, Span] = {}
        self.used: set[str] = set()
        self.defined: set[str] = set()
        self.mutable: set[str] = set()
        self._outer = (self.defined, self.mutable)
        """What the program itself has defined, for the functions it calls."""
        self._kinds: dict[str, str] = {}
        """What is known of a name: that it is a 'future', or the 'result' of a block that is not asynchronous."""
        self._in_function = 0
        self.functions = {s.name: s for s in module.body if isinstance(s, syntax.Function)}
        self._loops = 0
        """Loops of the program around the statement."""
        self.writes_in_place = False
        """Whether a block of it writes an array in place."""
        self.bodies: dict[int, Body] = {}
        """By identity of the compute."""
        self.callees: dict[int, Expr] = {}
        """By identity of a call of a function: what is called. Calls of functions that run block by block are not here."""
        self.kernels: dict[tuple[int, str, tuple[str, ...]], tuple[syntax.Function, BodyNames]] = {}
        """By identity of an expression or block, the name of its result and those of its arguments: the kernel it is."""
        self.captured: dict[tuple[int, str, tuple[str, ...]], tuple[syntax.Function, syntax.Function]] = {}
        """By identity of a kernel: itself, and it with values of the program as further arguments."""
        self._composer = Composer(self.functions, lambda name: name in self._outer[0] or name in self.given, self.sink, is_host_call, LIBRARY)
        self.sizes = KnownSizes()
        """Which numbers of the program are sizes in its blocks."""
        self._apart: list[str] = []
        """Functions being checked block by block."""
        self._apart_done: set[int] = set()
        for function in self.functions.values():
            self._head(function)
        self._statements(module.body)
        self._uncalled(module)

    def _head(self, function: syntax.Function) -> None:
        """What stands before a function, and the types in its head."""
        metadata = read_attributes(function.attributes, self.sink, FUNCTION)
        seen: set[str] = set()
        for attribute in function.attributes:
            if attribute.name in seen:
                self.sink.error("TW012", f"@{attribute.name} is given twice", attribute.span, "keep one of them")
            seen.add(attribute.name)
        if metadata.is_device_function:
            try:
                self._composer.callee(function.name, function.span)
            except Apart as why:
                self.sink.error("TW012", f"@device_function, but '{function.name}' cannot stand in kernels: {why}", why.span, "leave @device_function out")
        for type_ in (*(p.type for p in function.params), function.result):
            check_type(type_, self.sink)

    def report(self, inputs: dict[str, object]) -> None:
        """Raise everything that is wrong."""
        self.note_inputs(inputs)
        if self.sink.errors:
            raise self.complete(UserError(*in_order(self.sink.errors)), self._module, inputs)

    def note_inputs(self, inputs: dict[str, object]) -> None:
        """Put inputs that are missing, or that nobody wants, with the errors."""
        needed = [n for n in self.missing if n not in inputs]
        call = f"call run({', '.join(f'{n}=…' for n in [*sorted(self.used & set(inputs)), *needed])})"
        for name in needed:
            close = close_matches(name, [n for n in self.defined if n != name], 1, 0.75)
            self.sink.error("TW008", f"missing input '{name}'", self.missing[name], f"did you mean '{close[0]}'? If it is an input, {call}" if close else call)
        for name in inputs:
            if name not in self.used:
                close = close_matches(name, [n for n in (*needed, *self.used) if n not in inputs], 1)
                takes = ", ".join(sorted(self.used | set(needed))) or "no inputs"
                reason = "is defined by the program itself" if name in self.defined else "is not used by the program"
                self.sink.error(
                    "TW008", f"unexpected input '{name}': it {reason}", help=f"did you mean '{close[0]}'?" if close else f"the program takes {takes}"
                )

    def require_apart(self, function: syntax.Function, node: syntax.Call) -> None:
        """Have a function checked as one that runs block by block, if it was not."""
        if id(function) not in self._apart_done:
            self._blocks(function, node)
            self.sink.raise_if_errors()

    def _need(self, name: str, span: Span) -> None:
        if name not in self.defined:
            self._need_input(name, span)

    def _need_input(self, name: str, span: Span) -> None:
        if dtypes.is_name(name) and name not in self.given:
            return
        if name in self.given:
            self.used.add(name)
        else:
            self.missing.setdefault(name, span)

    # -- statements -------------------------------------------------------------------------------------------------

    def _statements(self, body: Sequence[Stmt]) -> None:
        left = ""
        for statement in body:
            if left:
                self._unreached(statement, left)
            self._statement(statement)
            left = left or leaves(statement)

    def _unreached(self, statement: Stmt, why: str) -> None:
        what = "this await" if any(isinstance(part, syntax.Await) for part in nodes((statement,))) else "this"
        self.sink.error("TW005", f"{what} is never reached: {why}", statement.span, "remove it")

    def _never(self, cond: Expr, holds: bool, body: Sequence[Stmt]) -> None:
        """An await under a condition that is written as a constant, if it is the wrong one. Other statements may be left out so."""
        waits = [s for s in body if any(isinstance(part, syntax.Await) for part in nodes((s,)))]
        if waits and isinstance(cond, syntax.Bool) and cond.value is not holds:
            self._unreached(waits[0], f"the condition of line {cond.span.line} is always {'true' if cond.value else 'false'}")

    def _block(self, body: Sequence[Stmt], names: Sequence[str] = ()) -> None:
        """Statements with a scope of their own, in which `names` are defined."""
        defined, mutable = set(self.defined), set(self.mutable)
        is_program = self._outer[0] is self.defined
        self.defined |= set(names)
        self.mutable -= set(names)
        for statement in body:
            if isinstance(statement, syntax.Import) and not self._in_function:
                self.sink.error("TW005", "an import inside a block", statement.span, "import at the top level")
        self._statements(body)
        self.defined, self.mutable = defined, mutable
        if is_program:
            self._outer = (self.defined, self.mutable)

    def _statement(self, node: Stmt) -> None:
        if isinstance(node, syntax.Let):
            self._let(node)
        elif isinstance(node, syntax.Assign):
            self._assign(node)
        elif isinstance(node, syntax.ExprStmt):
            self._expression(node.value, used=False)
        elif isinstance(node, syntax.Config):
            self._config(node)
        elif isinstance(node, syntax.If):
            self._expression(node.cond)
            self._never(node.cond, True, node.then)
            self._never(node.cond, False, node.otherwise)
            self._block(node.then)
            self._block(node.otherwise)
        elif isinstance(node, syntax.While):
            self._expression(node.cond)
            self._never(node.cond, True, node.body)
            self._loops += 1
            self._block(node.body)
            self._loops -= 1
        elif isinstance(node, syntax.For):
            for item in (*(e for r in node.ranges for e in (r.lo, r.hi, r.step)), node.over):
                if item is not None:
                    self._expression(item)
            self._loops += 1
            self._block(node.body, node.vars)
            self._loops -= 1
        elif isinstance(node, syntax.Return):
            if not self._in_function:
                self.sink.error("TW005", "return outside a function", node.span, "names of the top level are results by themselves")
            if node.value is not None:
                self._expression(node.value)
        elif isinstance(node, syntax.Break | syntax.Continue):
            if not self._loops:
                word = "break" if isinstance(node, syntax.Break) else "continue"
                self.sink.error("TW005", f"'{word}' outside a loop", node.span, "leave it out")
        elif isinstance(node, syntax.Yield):
            self.sink.error("TW005", "yield outside a kernel", node.span, "yield stands in the loops of a compute block")
        elif isinstance(node, syntax.Function) and self._in_function:
            self.sink.error("TW005", f"function '{node.name}' inside another", node.span, "declare it at the top level")
        elif isinstance(node, syntax.Import) and self._in_function:
            self.sink.error("TW005", "an import inside a function", node.span, "import at the top level")

    def _let(self, node: syntax.Let) -> None:
        if node.shared or node.value is None:
            self.sink.error("TW005", "a shared variable outside a kernel", node.span, "declare it in a compute block")
            return
        self._expression(node.value)
        check_type(node.type, self.sink)
        self._extents(node.type)
        self.defined.update(node.targets)
        self.mutable -= set(node.targets)
        if node.mutable:
            self.mutable.update(node.targets)
        for name in node.targets:
            self._kinds.pop(name, None)
        if isinstance(node.value, syntax.Compute) and not node.mutable:
            kind = "future" if any(a.name == "async" for a in node.value.attributes) else "result"
            self._kinds.update(dict.fromkeys(node.targets, kind))

    def _extents(self, type_: Expr | None) -> None:
        """Extents of a type that are computed: what they are computed from must be there."""
        for item in type_.items if isinstance(type_, syntax.Tuple) else (type_,):
            for index in item.indices if isinstance(item, syntax.Index) else ():
                if not isinstance(index, syntax.Name) and bounded(index) is None:
                    self._expression(index)

    def _assign(self, node: syntax.Assign) -> None:
        self._expression(node.value)
        targets = node.target.items if isinstance(node.target, syntax.Tuple) else (node.target,)
        for target in targets:
            owner = target
            while isinstance(owner, syntax.Index | syntax.Attribute):
                for index in owner.indices if isinstance(owner, syntax.Index) else ():
                    self._expression(index)
                owner = owner.value
            if not isinstance(owner, syntax.Name):
                self.sink.error("TW015", "this is no place that can be assigned", target.span, "assign to a variable, or to a part of one")
            elif owner.id not in self.mutable:
                reason = "was declared with let" if owner.id in self.defined else "is an input" if owner.id in self.given else "is not declared"
                self.used |= {owner.id} & self.given
                name = f"{owner.id}_" if reason == "is an input" else owner.id
                value = owner.id if reason == "is an input" else "…"
                self.sink.error("TW015", f"'{owner.id}' {reason} and cannot be assigned", target.span, f"write 'var {name} = {value}' first")

    def _config(self, node: syntax.Config) -> None:
        for name, value in node.fields:
            if name not in _SETTINGS:
                close = close_matches(name, _SETTINGS, 1)
                self.sink.error("TW011", f"unknown setting '{name}'", value.span, f"did you mean '{close[0]}'?" if close else f"known: {', '.join(_SETTINGS)}")
            elif not isinstance(value, syntax.String):
                self.sink.error("TW009", "compute_device must be a string", value.span, f"write for example {registry.examples(chr(34))}")

    # -- expressions ------------------------------------------------------------------------------------------------

    def _expression(self, node: Expr, used: bool = True) -> None:
        if isinstance(node, syntax.Compute):
            self._compute(node)
        elif isinstance(node, syntax.Name):
            self._need(node.id, node.span)
        elif isinstance(node, syntax.Pipe):
            self._expression(node.value)
            self._call(node.call, piped=True, used=used)
        elif isinstance(node, syntax.Call):
            self._call(node, used=used)
        elif isinstance(node, syntax.Await):
            if node.mode == "one" and isinstance(node.value, syntax.Name) and self._kinds.get(node.value.id) == "result":
                self.sink.error("TW009", f"await of '{node.value.id}', which is no future", node.span, "mark the block that makes it @async")
            for child in (node.value, node.timeout, node.otherwise):
                if child is not None:
                    self._expression(child)
        elif isinstance(node, syntax.Binary | syntax.Unary | syntax.IfExpr):
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
            for bound in (node.lo, node.hi):
                if bound is not None:
                    self._expression(bound)

    def _call(self, node: syntax.Call, piped: bool = False, used: bool = True) -> None:
        for argument in node.args:
            self._expression(argument.value)
        function = node.function
        keywords = [a.keyword for a in node.args if a.keyword is not None]
        positional = len(node.args) - len(keywords) + piped
        if isinstance(function, syntax.Attribute):
            self._expression(function.value)
            self._known_call(f".{function.name}", function.name, host_functions.METHODS, node, positional, keywords)
        elif not isinstance(function, syntax.Name):
            self.sink.error("TW005", "this is no function", node.span, "call a function by its name")
        elif function.id in self.functions:
            self._function(self.functions[function.id], node, positional, keywords, used)
        elif function.id in host_functions.FUNCTIONS:
            self._known_call(function.id, function.id, host_functions.FUNCTIONS, node, positional, keywords)
        elif function.id in host_values.ELEMENTWISE | host_values.ARRAY_FUNCTIONS or function.id == "cast" or dtypes.is_name(function.id):
            if function.id in LIBRARY:
                given = (syntax.Argument(node, span=node.span),) if piped else ()
                self._composer.expanded(replace(node, args=(*given, *node.args)))
                return
            if function.id in STATISTICS and set(keywords) <= {"axis", "keepdims"}:
                return
            if keywords:
                self.sink.error("TW016", f"'{function.id}' takes no keywords{' but axis= and keepdims=' if function.id in STATISTICS else ''}", node.span, "give the arguments in order")
        elif function.id in RANDOM:
            self.sink.error(
                "TW005", f"'{function.id}' draws numbers in kernels", node.span, f"write compute(x) {{ for i in 0..n: out[i] = {function.id}(seed, i) }}"
            )
        else:
            known = sorted(host_values.ELEMENTWISE | host_values.ARRAY_FUNCTIONS | set(self.functions) | set(host_functions.FUNCTIONS))
            self.sink.error("TW002", f"unknown function '{function.id}'", function.span, help_for(function.id, known, python=False))

    def _known_call(
        self, shown: str, name: str, table: Mapping[str, host_functions.HostSignature], node: syntax.Call, positional: int, keywords: list[str]
    ) -> None:
        signature = table.get(name)
        if signature is None:
            close = close_matches(name, table, 1)
            self.sink.error("TW002", f"unknown method '{shown}'", node.span, f"did you mean '.{close[0]}'?" if close else f"there are {', '.join(sorted(table))}")
            return
        wrong = host_functions.mismatch(shown, signature, positional, keywords)
        if wrong:
            self.sink.error("TW016", wrong, node.span, f"write {signature.shown(shown)}")

    def _function(self, function: syntax.Function, node: syntax.Call, given: int, keywords: list[str], used: bool) -> None:
        """A call of a function: as part of the kernel it is called in where that goes, else block by block."""
        wrong = count_mismatch(function, given, keywords)
        if wrong:
            self.sink.error("TW016", wrong, node.span)
            return
        try:
            callee = self._composer.callee(function.name, node.span)
            if not isinstance(callee, syntax.Callee):
                return
            kernel = kernel_of("call", function.params, call_of(callee, function.params, node.span), self.sink)
            names = body_names(kernel.body)
            for name, span in names.free.items():
                if name not in names.in_ranges and name not in self._outer[0] and all(name != p.name for p in function.params):
                    self._need_input(name, span)
            self.callees[id(node)] = callee
        except Apart:
            self._blocks(function, node, used)

    def _uncalled(self, module: syntax.Module) -> None:
        """Functions that the program does not call may be called from outside: they must be right too, but need no inputs yet."""
        called = {n.id for n in nodes(module.body) if isinstance(n, syntax.Name)}
        missing, used = dict(self.missing), set(self.used)
        for function in self.functions.values():
            if function.name not in called:
                names = [p.name for p in function.params]
                args = tuple(syntax.Argument(syntax.Name(name, span=function.span), span=function.span) for name in names)
                call = syntax.Call(syntax.Name(function.name, span=function.span), args, span=function.span)
                self._function(function, call, len(names), [], used=False)
        self.missing, self.used = missing, used

    def _blocks(self, function: syntax.Function, node: syntax.Call, used: bool = True) -> None:
        if function.name in self._apart:
            self.sink.error("TW005", f"'{function.name}' calls itself", node.span, "use a loop")
            return
        if used and not _returns(function.body):
            self.sink.error("TW017", f"'{function.name}' returns nothing", function.span, "return what it computes")
        if id(function) in self._apart_done:
            return
        self._apart.append(function.name)
        self._apart_done.add(id(function))
        around = self.defined, self.mutable, self._kinds
        outer = self._outer
        self.defined, self.mutable, self._kinds = set(outer[0]), set(), {}
        for param in function.params:
            if param.default is not None:
                self._expression(param.default)
        self.defined |= {p.name for p in function.params} | set(parameter_sizes(function))
        for type_ in (*(p.type for p in function.params), function.result):
            self._extents(type_)
        for name in shape_names(function.result):
            if name not in self.defined:
                self._need(name, function.result.span if function.result is not None else function.span)
        self._in_function += 1
        around_loops, self._loops = self._loops, 0
        self._statements(function.body)
        self._loops = around_loops
        self._in_function -= 1
        (self.defined, self.mutable, self._kinds), self._outer = around, outer
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
        self.writes_in_place = self.writes_in_place or bool(node.in_place)
        for attribute in node.attributes:
            if attribute.name == "parallel" and node.in_place:
                self.sink.error("TW016", f"@parallel on a block that writes '{node.in_place[0]}' in place: each device has a part", attribute.span, "leave it out")
            if attribute.name == "parallel" and not several:
                if is_mode(attribute):  # what is wrong with another word, the kernel's check says
                    self.sink.error("TW016", "@parallel without a list of devices", attribute.span, f"write @device({registry.accelerator_examples()}) @parallel(data)")
            elif attribute.name == "device" and not several:
                if len(attribute.args) != 1 or attribute.args[0].keyword is not None:
                    self.sink.error("TW016", "@device takes a name or a list of names", attribute.span, 'write @device("auto")')
                for argument in attribute.args:
                    self._expression(argument.value)
        for item in (*node.inputs, *parameter_expressions(node.attributes)):
            self._expression(item)
        replaced = replacements(node)
        body = self._linked(node, substitute(node.body, replaced))
        body = block_without_jumps(body, {i.id for i in node.inputs if isinstance(i, syntax.Name)}, self.sink)
        names = body_names(body)
        fresh = iter(replaced)
        inputs: dict[str, Expr] = {}
        for item in node.inputs:
            inputs.setdefault(item.id if isinstance(item, syntax.Name) else next(fresh)[1].id, item)
        self.bodies[id(node)] = Body(body, names, inputs)
        own_sizes = kind_of(node.attributes)[1] in _KINDS_WITH_SIZES
        listed = {i.id for i in node.inputs if isinstance(i, syntax.Name)} | parameter_names(node.attributes)
        for name, span in names.free.items():
            if name in listed or name in self.defined:
                continue
            if name in self.given:
                self.used.add(name)
            elif name not in names.in_ranges and not own_sizes and not re.fullmatch(r"_\d+", name):
                self.missing.setdefault(name, span)


def is_host_call(call: syntax.Call) -> bool:
    """Whether a call can only be made outside kernels: so that the function it is in runs block by block."""
    name = call.function.id if isinstance(call.function, syntax.Name) else ""
    if name in ("zeros", "ones", "full", "transpose"):
        return len(call.args) > 1 or any(isinstance(a.value, syntax.List) or a.keyword is not None for a in call.args)
    return name in host_functions.FUNCTIONS


def _returns(body: Sequence[Stmt]) -> bool:
    """Whether a value is returned on some way through."""
    for node in body:
        if isinstance(node, syntax.Return) and node.value is not None:
            return True
        inside = (*node.then, *node.otherwise) if isinstance(node, syntax.If) else node.body if isinstance(node, syntax.For | syntax.While) else ()
        if _returns(inside):
            return True
    return False


def replacements(node: syntax.Compute) -> list[tuple[Expr, syntax.Name]]:
    """For each input that is no name, what stands for it in the function: `_0`, `_1`…"""
    others = [item for item in node.inputs if not isinstance(item, syntax.Name)]
    return [(item, syntax.Name(f"_{number}", span=item.span)) for number, item in enumerate(others)]


def operands(node: syntax.Binary | syntax.Unary | syntax.IfExpr) -> tuple[Expr, ...]:
    if isinstance(node, syntax.Binary):
        return node.left, node.right
    return (node.operand,) if isinstance(node, syntax.Unary) else (node.cond, node.then, node.otherwise)
