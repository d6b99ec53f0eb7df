"""Load and run ZynML programs.

In: a file or a text, and the inputs of a run by name. Out: all names the program defines at its top level, as a dictionary. Each
`compute` becomes a function of kind "compute" and is handed to `run_compute`, which compiles and launches it; everything between is
evaluated here. Nothing runs before the whole program has been checked for missing inputs and constructs that cannot be executed.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tilewright.api import host_values
from tilewright.api.module_check import Check, operands, replacements
from tilewright.base.errors import Diagnostics, UserError
from tilewright.base.source import Span
from tilewright.frontend.zyn import parse_module
from tilewright.runtime import streams
from tilewright.tree import syntax
from tilewright.tree.compose import kernel_of
from tilewright.tree.inline import has_calls
from tilewright.tree.names import BodyNames, body_names, is_output
from tilewright.tree.syntax import Argument, Expr, KernelAttribute, Stmt

RunCompute = Callable[[syntax.Function, dict[str, object], str], object]
"""`run_compute(function, arguments, device)`: run one compute block on a device and return its result."""


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
        self._checks: dict[frozenset[str], Check] = {}
        """What was found right for inputs of these names."""

    def inputs(self) -> tuple[str, ...]:
        """The names `run` needs, in order of first use."""
        return tuple(Check(self.tree, frozenset()).missing)

    def run(self, device: str | None = None, **inputs: object) -> dict[str, object]:
        """Run the program from top to bottom; the result holds every name it defines at its top level.

        A block's own `@device` comes first, then `device`, then the program's `config`, then "auto".
        """
        given = frozenset(inputs)
        check = self._checks.get(given)
        if check is None:
            check = Check(self.tree, given)
            check.report(inputs)
            self._checks[given] = check
        return _Run(check, self._run_compute, device, inputs).run(self.tree)


class _Run:
    """One run: the values of names so far."""

    def __init__(self, check: Check, run_compute: RunCompute, device: str | None, inputs: dict[str, object]) -> None:
        self._check = check
        self._run_compute = run_compute
        self._device = device
        self._default_device = "auto"
        self._values = dict(inputs)
        self._program = self._values
        """Those of the program itself, which its functions see."""
        self._label = "compute"

    def run(self, module: syntax.Module) -> dict[str, object]:
        return self._statements(module.body)

    def _statements(self, body: Sequence[Stmt]) -> dict[str, object]:
        """Runs statements; gives what they define."""
        defined: dict[str, object] = {}
        for statement in body:
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
        if isinstance(node, syntax.Call | syntax.Pipe) and self._is_apart(_called(node)):
            return self._blocks(node)
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

    def _is_apart(self, call: syntax.Call) -> bool:
        """Whether it calls a function that runs block by block."""
        return isinstance(call.function, syntax.Name) and call.function.id in self._check.functions and id(call) not in self._check.callees

    def _blocks(self, node: syntax.Call | syntax.Pipe) -> object:
        call = _called(node)
        assert isinstance(call.function, syntax.Name)
        function = self._check.functions[call.function.id]
        given = [*([node.value] if isinstance(node, syntax.Pipe) else []), *(a.value for a in call.args)]
        if len(given) > len(function.params) or any(p.default is None for p in function.params[len(given) :]):
            shown = f"{function.name}({', '.join(p.name for p in function.params)})"
            raise UserError.at("TW016", f"{shown} takes {len(function.params)} argument(s), got {len(given)}", node.span)
        nodes = [*given, *(p.default for p in function.params[len(given) :] if p.default is not None)]
        values = {p.name: self._evaluate(value) for p, value in zip(function.params, nodes, strict=True)}
        inner = _Run(self._check, self._run_compute, self._device, {**self._program, **values})
        inner._default_device, inner._program = self._default_device, self._program
        inner._statements(function.body[:-1])
        last = function.body[-1]
        assert isinstance(last, syntax.Return)
        assert last.value is not None
        inner._label = function.name
        return inner._evaluate(last.value)

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
        if all(s is not None for s in scalars.values()) and not _has_reduce(formula) and not has_calls(formula):
            return self._scalar(formula, {n: s for n, s in scalars.items() if s is not None})
        for name, value in leaves.items():
            if scalars[name] is None and not hasattr(value, "shape"):
                raise UserError.at("TW009", f"arithmetic with a {type(value).__name__}", node.span, "use numbers and arrays")
        made = id(node), self._label, tuple(leaves)
        found = self._check.kernels.get(made)
        if found is None:
            sink = Diagnostics()
            function = kernel_of(self._label, tuple(syntax.Param(name, span=node.span) for name in leaves), formula, sink)
            sink.raise_if_errors()
            found = self._check.kernels[made] = function, body_names(function.body)
        function, names = found
        result = function.body[0]
        if len(function.body) == 1 and isinstance(result, syntax.Assign) and all(n in scalars for n in names.free) and not _has_reduce(result.value):
            known = {n: s for n, s in scalars.items() if s is not None}
            if len(known) == len(scalars):
                return self._scalar(result.value, known)
        return self._launch(function, names, leaves, self._device or self._default_device)

    def _launch(self, function: syntax.Function, names: BodyNames, arguments: dict[str, object], device: str) -> object:
        """Run a kernel, with values of the program that its body names as further arguments."""
        listed = len(arguments)
        params = list(function.params)
        for name, span in names.free.items():
            if name not in arguments and name in self._values and not self._is_size(name, names, arguments, span):
                arguments[name] = self._values[name]
                params.append(syntax.Param(name, span=span))
        if len(arguments) > listed:
            made = id(function), function.name, tuple(arguments)
            known = self._check.captured.get(made)
            if known is None:
                known = self._check.captured[made] = function, replace(function, params=tuple(params))
            function = known[1]
        if getattr(self._run_compute, "takes_futures", False) or not _is_asynchronous(function, arguments):
            return self._run_compute(function, arguments, device)
        from tilewright.api import async_blocks

        return async_blocks.run_at_once(self._run_compute, function, arguments, device)

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
        callee = self._check.callees.get(id(_called(node))) if isinstance(node, syntax.Call | syntax.Pipe) else None
        if isinstance(node, syntax.Pipe) and not self._is_apart(node.call):
            first = Argument(node.value, span=node.value.span)
            node = replace(node.call, args=(first, *node.call.args), span=node.span)
        if callee is not None and isinstance(node, syntax.Call):
            node = replace(node, function=callee)
        if isinstance(node, syntax.Call) and not self._is_apart(node):
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
        body = self._check.bodies[id(node)]
        arguments: dict[str, object] = {}
        params: list[syntax.Param] = []
        fresh = iter(replacements(node))
        label = self._label
        for item in node.inputs:
            name = item.id if isinstance(item, syntax.Name) else next(fresh)[1].id
            if name not in arguments:
                arguments[name] = self._evaluate(item)
                params.append(syntax.Param(name, span=item.span))
        made = id(node), label, tuple(arguments)
        found = self._check.kernels.get(made)
        if found is None:
            function = syntax.Function(label, tuple(params), None, body.statements, "compute", node.attributes, span=node.span)
            found = self._check.kernels[made] = function, body.names
        function = found[0]
        return self._launch(function, body.names, arguments, self._device_of(node.attributes))

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
    return isinstance(node, syntax.Binary | syntax.Unary | syntax.IfExpr) and any(_has_reduce(o) for o in operands(node))


def _called(node: syntax.Call | syntax.Pipe) -> syntax.Call:
    return node.call if isinstance(node, syntax.Pipe) else node
