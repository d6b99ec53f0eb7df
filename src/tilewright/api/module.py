"""Load and run ZynML programs.

In: a file or a text, and the inputs of a run by name. Out: all names the program defines at its top level, as a dictionary. Each
`compute` becomes a function of kind "compute" and is handed to `run_compute`, which compiles and launches it; everything between is
evaluated here. Nothing runs before the whole program has been checked for missing inputs and constructs that cannot be executed.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tilewright.api import host_values
from tilewright.api.host_names import BodyNames, body_names, is_output, substitute
from tilewright.base.errors import Diagnostics, UserError
from tilewright.base.source import Span
from tilewright.frontend.zyn import parse_module
from tilewright.runtime import streams
from tilewright.tree import syntax
from tilewright.tree.syntax import Argument, Expr, KernelAttribute, Stmt

RunCompute = Callable[[syntax.Function, dict[str, object], str], object]
"""`run_compute(function, arguments, device)`: run one compute block on a device and return its result."""

HOST_FUNCTIONS = frozenset(
    {"compute_devices", "allocate", "memory_pool", "reshape", "split", "zeros", "ones", "transpose", "concat", "row_max", "row_sum", "dot", "matmul"}
)
"""Functions of the host language that this version knows by name only."""

_SETTINGS = ("compute_device",)
_KINDS_WITH_SIZES = frozenset({"conv2d", "conv2d_depthwise", "depthwise_conv2d", "attention", "flash_attention"})
"""Kernel kinds that bind size names which no access in the body binds."""


def load(path_or_source: str | os.PathLike[str], run_compute: RunCompute) -> ZynModule:
    """A program from a `.zyn` file, or from its text: a string is text when it has a line break or a brace, or when it names no
    file, does not end in `.zyn` and has one of the words let, var, compute in it."""
    if isinstance(path_or_source, str) and _is_source(path_or_source):
        return ZynModule(parse_module(path_or_source), run_compute)
    path = Path(path_or_source)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
        raise UserError.at("TW007", f"file '{path}' {reason}", help="give the path of a .zyn file, or the text of a program") from None
    except UnicodeDecodeError as error:
        raise UserError.at("TW007", f"file '{path}' is not UTF-8 text: {error.reason}", help="save it as UTF-8") from None
    return ZynModule(parse_module(text, str(path)), run_compute)


def _is_source(text: str) -> bool:
    if "\n" in text or "{" in text:
        return True
    return not text.endswith(".zyn") and re.search(r"\b(let|var|compute)\b", text) is not None and not os.path.exists(text)


class ZynModule:
    """A parsed program. `run` may be called any number of times, from any thread."""

    def __init__(self, module: syntax.Module, run_compute: RunCompute) -> None:
        self.tree = module
        self._run_compute = run_compute

    def inputs(self) -> tuple[str, ...]:
        """The names `run` needs, in order of first use."""
        return tuple(_Check(self.tree, frozenset()).missing)

    def run(self, device: str | None = None, **inputs: object) -> dict[str, object]:
        """Run the program from top to bottom; the result holds every name it defines at its top level.

        A block's own `@device` comes first, then `device`, then the program's `config`, then "auto".
        """
        check = _Check(self.tree, frozenset(inputs))
        check.report(inputs)
        return _Run(check, self._run_compute, device, inputs).run(self.tree)


class _Check:
    """What a program needs and cannot do, found before it runs."""

    def __init__(self, module: syntax.Module, given: frozenset[str]) -> None:
        self.sink = Diagnostics()
        self.given = given
        self.missing: dict[str, Span] = {}
        self.used: set[str] = set()
        self.defined: set[str] = set()
        self.mutable: set[str] = set()
        self.functions = {s.name: s for s in module.body if isinstance(s, syntax.Function)}
        self.bodies: dict[int, BodyNames] = {}
        """By identity of the compute: what its body needs."""
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
            for child in _operands(node):
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
            kind = "pipeline" if self.functions[function.id].kind == "pipeline" else "function"
            self._unavailable(f"calling the {kind} '{function.id}'", node.span)
        elif function.id in HOST_FUNCTIONS:
            self._unavailable(f"'{function.id}' outside a kernel", node.span)
        elif function.id not in host_values.ELEMENTWISE:
            known = sorted(host_values.ELEMENTWISE | set(self.functions))
            close = difflib.get_close_matches(function.id, known, 1)
            self.sink.error("TW002", f"unknown function '{function.id}'", function.span, f"did you mean '{close[0]}'?" if close else "")
        elif any(a.keyword is not None for a in node.args):
            self.sink.error("TW016", f"'{function.id}' takes no keywords", node.span, "give the arguments in order")

    def _compute(self, node: syntax.Compute) -> None:
        for attribute in node.attributes:
            if attribute.name == "parallel":
                self._unavailable(f"@{attribute.name}", attribute.span)
            elif attribute.name == "device" and not (len(attribute.args) == 1 and isinstance(attribute.args[0].value, syntax.String)):
                self._unavailable("@device with anything but one name", attribute.span)
        for item in node.inputs:
            self._expression(item)
        body = substitute(node.body, _replacements(node))
        names = body_names(body)
        self.bodies[id(node)] = names
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


def _replacements(node: syntax.Compute) -> list[tuple[Expr, syntax.Name]]:
    """For each input that is no name, what stands for it in the function: `_0`, `_1`…"""
    others = [item for item in node.inputs if not isinstance(item, syntax.Name)]
    return [(item, syntax.Name(f"_{number}", span=item.span)) for number, item in enumerate(others)]


def _operands(node: syntax.Binary | syntax.Unary | syntax.IfExpr) -> tuple[Expr, ...]:
    if isinstance(node, syntax.Binary):
        return node.left, node.right
    return (node.operand,) if isinstance(node, syntax.Unary) else (node.cond, node.then, node.otherwise)


class _Run:
    """One run: the values of names so far."""

    def __init__(self, check: _Check, run_compute: RunCompute, device: str | None, inputs: dict[str, object]) -> None:
        self._check = check
        self._run_compute = run_compute
        self._device = device
        self._default_device = "auto"
        self._values = dict(inputs)
        self._label = "compute"

    def run(self, module: syntax.Module) -> dict[str, object]:
        defined: dict[str, object] = {}
        for statement in module.body:
            if isinstance(statement, syntax.Let) and statement.value is not None:
                self._label = "_".join(statement.targets)
                value = self._evaluate(statement.value)
                defined.update(self._bind(statement, value))
                self._values.update(defined)
            elif isinstance(statement, syntax.Assign) and isinstance(statement.target, syntax.Name):
                self._label = statement.target.id
                source = statement.value
                if statement.op:
                    source = syntax.Binary(statement.op, statement.target, source, span=statement.span)
                defined[statement.target.id] = self._values[statement.target.id] = self._evaluate(source)
            elif isinstance(statement, syntax.ExprStmt):
                self._label = "compute"
                self._evaluate(statement.value)
            elif isinstance(statement, syntax.Config):
                self._default_device = next(
                    (v.value for n, v in statement.fields if n == "compute_device" and isinstance(v, syntax.String)), self._default_device
                )
        return defined

    def _bind(self, statement: syntax.Let, value: object) -> dict[str, object]:
        if not statement.destructure:
            return {statement.targets[0]: value}
        count = len(statement.targets)
        if not isinstance(value, tuple | list) or len(value) != count:
            got = f"{len(value)} value(s)" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
            raise UserError.at("TW016", f"{count} name(s) on the left, {got} on the right", statement.span, "give one name for each value")
        return dict(zip(statement.targets, value))

    # -- expressions ------------------------------------------------------------------------------------------------

    def _evaluate(self, node: Expr) -> object:
        if isinstance(node, syntax.Number | syntax.Bool | syntax.String):
            return node.value
        if isinstance(node, syntax.Name):
            return self._values[node.id]
        if isinstance(node, syntax.Compute):
            return self._compute(node)
        if isinstance(node, syntax.Tuple):
            return tuple(self._evaluate(i) for i in node.items)
        if isinstance(node, syntax.List):
            return [self._evaluate(i) for i in node.items]
        if isinstance(node, syntax.Record):
            return {name: self._evaluate(value) for name, value in node.fields}
        if isinstance(node, syntax.Attribute):
            return self._member(node)
        if isinstance(node, syntax.Index):
            return self._index(node)
        if isinstance(node, syntax.Await):
            return self._await(node)
        return self._elementwise(node)

    def _await(self, node: syntax.Await) -> object:
        from tilewright.api import async_blocks

        value = self._evaluate(node.value)
        timeout = host_values.as_scalar(self._evaluate(node.timeout)) if node.timeout is not None else None
        otherwise = self._evaluate(node.otherwise) if node.otherwise is not None else None
        return async_blocks.wait_for(node.mode, value, timeout, otherwise, node.span)

    def _member(self, node: syntax.Attribute) -> object:
        value = self._evaluate(node.value)
        if isinstance(value, dict) and node.name in value:
            found: object = value[node.name]
            return found
        if isinstance(value, dict) or not hasattr(value, node.name):
            raise UserError.at("TW002", f"there is no '{node.name}' in this {type(value).__name__}", node.span)
        result: object = getattr(value, node.name)
        return result

    def _index(self, node: syntax.Index) -> object:
        value = self._evaluate(node.value)
        indices = [host_values.as_scalar(self._evaluate(i)) for i in node.indices]
        whole = [int(i) for i in indices if i is not None]
        shape = getattr(value, "shape", None)
        rank = len(shape) if isinstance(shape, tuple) else 1
        if len(whole) != len(indices) or len(indices) > rank or not hasattr(value, "__getitem__"):
            raise UserError.at("TW003", f"{len(indices)} index(es) into a {type(value).__name__} of rank {rank}", node.span)
        try:
            result: object = value[tuple(whole)] if isinstance(shape, tuple) else value[whole[0]]
        except (IndexError, KeyError) as error:
            raise UserError.at("TW013", f"index out of range: {error}", node.span) from None
        return result

    def _elementwise(self, node: Expr) -> object:
        """Arithmetic: on the host when all values are scalars, else as a kernel of its own."""
        leaves: dict[str, object] = {}
        formula = self._formula(node, leaves)
        scalars = {name: host_values.as_scalar(value) for name, value in leaves.items()}
        if all(s is not None for s in scalars.values()) and not _has_reduce(formula):
            return self._scalar(formula, {n: s for n, s in scalars.items() if s is not None})
        for name, value in leaves.items():
            if scalars[name] is None and not hasattr(value, "shape"):
                raise UserError.at("TW009", f"arithmetic with a {type(value).__name__}", node.span, "use numbers and arrays")
        kind = KernelAttribute("kernel", (Argument(syntax.Name("fused", span=node.span), span=node.span),), span=node.span)
        body = (syntax.Assign(syntax.Name("out", span=node.span), formula, span=node.span),)
        params = tuple(syntax.Param(name, span=node.span) for name in leaves)
        function = syntax.Function(self._label, params, None, body, "compute", (kind,), span=node.span)
        return self._run_compute(function, leaves, self._device or self._default_device)

    def _formula(self, node: Expr, leaves: dict[str, object]) -> Expr:
        """`node` over names and literals alone; what is no arithmetic is evaluated and gets a name."""
        if isinstance(node, syntax.Number | syntax.Bool):
            return node
        if isinstance(node, syntax.Name) and not is_output(node.id):
            leaves[node.id] = self._values[node.id]
            return node
        if isinstance(node, syntax.Binary):
            return replace(node, left=self._formula(node.left, leaves), right=self._formula(node.right, leaves))
        if isinstance(node, syntax.Unary):
            return replace(node, operand=self._formula(node.operand, leaves))
        if isinstance(node, syntax.IfExpr):
            parts = [self._formula(p, leaves) for p in (node.cond, node.then, node.otherwise)]
            return replace(node, cond=parts[0], then=parts[1], otherwise=parts[2])
        if isinstance(node, syntax.ReduceExpr):
            return replace(node, value=self._formula(node.value, leaves))
        if isinstance(node, syntax.Pipe):
            first = Argument(node.value, span=node.value.span)
            node = replace(node.call, args=(first, *node.call.args), span=node.span)
        if isinstance(node, syntax.Call):
            return replace(node, args=tuple(replace(a, value=self._formula(a.value, leaves)) for a in node.args))
        name = next(n for number in itertools.count() if (n := f"_{number}") not in leaves and n not in self._values)
        leaves[name] = self._evaluate(node)
        return syntax.Name(name, span=node.span)

    def _scalar(self, node: Expr, values: dict[str, host_values.Scalar]) -> host_values.Scalar:
        if isinstance(node, syntax.Number | syntax.Bool):
            return node.value
        if isinstance(node, syntax.Name):
            return values[node.id]
        if isinstance(node, syntax.IfExpr):
            return self._scalar(node.then if self._scalar(node.cond, values) else node.otherwise, values)
        try:
            if isinstance(node, syntax.Binary):
                return host_values.binary(node.op, self._scalar(node.left, values), self._scalar(node.right, values))
            if isinstance(node, syntax.Unary):
                return host_values.unary(node.op, self._scalar(node.operand, values))
            assert isinstance(node, syntax.Call)
            assert isinstance(node.function, syntax.Name)
            return host_values.call(node.function.id, [self._scalar(a.value, values) for a in node.args])
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UserError.at("TW016", f"this has no value: {error}", node.span) from None

    # -- compute ----------------------------------------------------------------------------------------------------

    def _compute(self, node: syntax.Compute) -> object:
        label = self._label
        replacements = _replacements(node)
        body = substitute(node.body, replacements)
        names = self._check.bodies[id(node)]
        arguments: dict[str, object] = {}
        params: list[syntax.Param] = []
        fresh = iter(replacements)
        for item in node.inputs:
            name = item.id if isinstance(item, syntax.Name) else next(fresh)[1].id
            if name not in arguments:
                arguments[name] = self._evaluate(item)
                params.append(syntax.Param(name, span=item.span))
        for name, span in names.free.items():
            if name not in arguments and name in self._values and not self._is_size(name, names, arguments, span):
                arguments[name] = self._values[name]
                params.append(syntax.Param(name, span=span))
        function = syntax.Function(label, tuple(params), None, body, "compute", node.attributes, span=node.span)
        device = self._device_of(node.attributes)
        if getattr(self._run_compute, "takes_futures", False) or not _is_asynchronous(function, arguments):
            return self._run_compute(function, arguments, device)
        from tilewright.api import async_blocks

        return async_blocks.run_at_once(self._run_compute, function, arguments, device)

    def _is_size(self, name: str, names: BodyNames, arguments: dict[str, object], span: Span) -> bool:
        """Whether `name` in a body means the extent of an input, although the program also has a value of that name."""
        value = host_values.as_scalar(self._values[name])
        if name in names.in_ranges and value is None:
            return True
        for size, array, axis in names.axes:
            shape = getattr(arguments.get(array), "shape", None)
            if size == name and isinstance(shape, tuple) and axis < len(shape):
                if value is not None and value != shape[axis]:
                    raise UserError.at(
                        "TW004", f"'{name}' is {value}, but axis {axis} of '{array}' has {shape[axis]} element(s)", span,
                        f"leave out '{name}': it is taken from '{array}'",
                    )  # fmt: skip
                return True
        return False

    def _device_of(self, attributes: Sequence[KernelAttribute]) -> str:
        for attribute in attributes:
            if attribute.name == "device":
                name = attribute.args[0].value
                if isinstance(name, syntax.String) and name.value != "auto":
                    return name.value
        return self._device or self._default_device


def _is_asynchronous(function: syntax.Function, arguments: dict[str, object]) -> bool:
    marked = any(attribute.name == "async" for attribute in function.attributes)
    return marked or any(isinstance(value, streams.FUTURES) for value in arguments.values())


def _has_reduce(node: Expr) -> bool:
    if isinstance(node, syntax.ReduceExpr):
        return True
    if isinstance(node, syntax.Call):
        return any(_has_reduce(a.value) for a in node.args)
    return isinstance(node, syntax.Binary | syntax.Unary | syntax.IfExpr) and any(_has_reduce(o) for o in _operands(node))
