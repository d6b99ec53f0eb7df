"""Compute blocks and arithmetic of a ZynML program as kernels.

In: expressions of the host language, and through `evaluate` the values of what in them is no arithmetic. Out: their values. Arithmetic on
numbers is done on the host; arithmetic with arrays, and each `compute`, becomes a function of kind "compute" for `run_compute`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.errors import DeviceError, Diagnostics, UserError
from tilewright.base.source import Span
from tilewright.frontend.zyn.library_calls import LIBRARY
from tilewright.runtime.core import streams
from tilewright.tree import syntax
from tilewright.tree.compose import kernel_of
from tilewright.tree.inline import has_calls, renamed
from tilewright.tree.metadata import KernelKind, KernelMetadata, read_attributes
from tilewright.tree.names import BodyNames, body_names, is_output
from tilewright.tree.syntax import Argument, Expr, KernelAttribute
from tilewright.tree.yielded import PRIMITIVES, stored
from tilewright.zyn.host import functions as host_functions
from tilewright.zyn.host import values as host_values
from tilewright.zyn.host.block_runner import AbstractBlocks, BlockRunner
from tilewright.zyn.host.dimensions import AbstractValue
from tilewright.zyn.host.kind_parameters import bind_parameters, kind_of
from tilewright.zyn.lazy.lazy_array import settled
from tilewright.zyn.module_check import ModuleCheck, operands

if TYPE_CHECKING:
    from tilewright.zyn.lazy.lazy_blocks import LazyBlocks

_PRIMITIVE_NAMES = frozenset(kind.value for kind in PRIMITIVES)
PARTS = (str, list, tuple, dict, dtypes.DType, AbstractValue)
"""Values that are no numbers and no arrays."""


class Blocks(ABC):
    """The values of names so far, and what is computed from them."""

    def __init__(self, check: ModuleCheck, run_compute: BlockRunner, device: str | None, values: dict[str, object]) -> None:
        self._check = check
        self._run_compute = run_compute
        self._device = device
        self._default_device = "auto"
        self._values = self._program = values
        """Names so far, and those of the program itself, which its functions see."""
        self._label = "compute"
        self._abstract = run_compute if isinstance(run_compute, AbstractBlocks) else None
        self._looks = self._abstract is not None
        """Nothing is computed: values only stand for others of their type."""
        self._waiting: LazyBlocks | None = None
        """Blocks of a pipeline, or of the program, that run together; None where each runs when its turn comes."""
        self._known: dict[int, object] = {}
        """By identity of an expression, its value, where that is known before what it is part of is evaluated."""

    @abstractmethod
    def evaluate(self, node: Expr) -> object:
        """The value of an expression."""

    @abstractmethod
    def _is_apart(self, call: syntax.Call) -> bool:
        """Whether it calls a function that runs block by block."""

    def _chosen(self) -> str:
        return self._device or self._default_device

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def _elementwise(self, node: Expr) -> object:
        """Arithmetic: on the host when all values are scalars, else as a kernel of its own."""
        leaves: dict[str, object] = {}
        formula = self._formula(node, leaves)
        if any(isinstance(value, AbstractValue) for value in leaves.values()):
            return AbstractValue()
        scalars = {name: host_values.scalar_leaf(value) for name, value in leaves.items()}
        on_host = all(s is not None or isinstance(leaves[n], PARTS) for n, s in scalars.items())
        if on_host and not _has_reduce(formula) and not has_calls(formula) and not _is_product(formula):
            return self._arithmetic(formula, {n: leaves[n] if s is None else s for n, s in scalars.items()})
        for name, value in leaves.items():
            if scalars[name] is None and not hasattr(value, "shape") and not (value is None and has_calls(formula)):
                raise UserError.at("TW009", f"arithmetic with a {type(value).__name__}", node.span, "use numbers and arrays")
        made = id(node), self._label, tuple(leaves)
        found = self._check.kernels.get(made)
        if found is None:
            sink = Diagnostics()
            function = kernel_of(self._label, tuple(syntax.Param(name, optional=True, span=node.span) for name in leaves), formula, sink)
            sink.raise_if_errors()
            found = self._check.kernels[made] = function, body_names(function.body)
        function, names = found
        result = function.body[0]
        if len(function.body) == 1 and isinstance(result, syntax.Assign) and all(n in scalars for n in names.free) and not _has_reduce(result.value):
            known: dict[str, object] = {n: s for n, s in scalars.items() if s is not None}
            if len(known) == len(scalars):
                return self._arithmetic(result.value, known)
        return self._launch(function, names, leaves, self._chosen())

    def _formula(self, node: Expr, leaves: dict[str, object]) -> Expr:
        """`node` over names and literals alone; what is no arithmetic is evaluated and gets a name."""
        if id(node) in self._known:
            return self._leaf(node, self._known[id(node)], leaves)
        if isinstance(node, syntax.Number | syntax.Bool):
            return node
        if isinstance(node, syntax.IsNone):
            return syntax.Bool(bool(self.evaluate(node)), span=node.span)
        if isinstance(node, syntax.Name) and not is_output(node.id):
            if node.id not in self._values and dtypes.is_name(node.id):
                return node
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
        if isinstance(node, syntax.Call | syntax.Pipe) and not self._is_apart(called(node)):
            callee = self._check.callees.get(id(called(node)))
            if isinstance(node, syntax.Pipe):
                first = Argument(node.value, span=node.value.span)
                node = replace(node.call, args=(first, *node.call.args), span=node.span)
            if isinstance(node.function, syntax.Name) and node.function.id in LIBRARY and node.function.id not in self._check.functions:
                node = LIBRARY[node.function.id](node)
            if callee is not None:
                node = replace(node, function=self._with_program_values(callee, leaves))
            return replace(node, args=tuple(replace(a, value=self._formula(a.value, leaves)) for a in node.args))
        return self._leaf(node, self.evaluate(node), leaves)

    def _with_program_values(self, callee: Expr, leaves: dict[str, object]) -> Expr:
        """A called function whose names mean values of the program also where the caller has others of the same name."""
        if self._values is self._program or not isinstance(callee, syntax.Callee):
            return callee
        function = callee.function
        names = body_names(function.body).free
        new: dict[str, Expr] = {}
        for name in names:
            if name in self._program and self._values.get(name) is not self._program[name] and all(p.name != name for p in function.params):
                new[name] = self._leaf(syntax.Name(name, span=names[name]), self._program[name], leaves)
        return replace(callee, function=replace(function, body=renamed(function.body, new))) if new else callee

    def _leaf(self, node: Expr, value: object, leaves: dict[str, object]) -> syntax.Name:
        name = next(n for number in itertools.count() if (n := f"_{number}") not in leaves and n not in self._values)
        leaves[name] = value
        return syntax.Name(name, span=node.span)

    # -- compute ----------------------------------------------------------------------------------------------------

    def _compute(self, node: syntax.Compute) -> object:
        body = self._check.bodies[id(node)]
        attributes, bound = bind_parameters(node.attributes, body.inputs, body.names.free, self._values, self.evaluate)
        primitive = self._primitive_of(attributes)
        if primitive is not None and node.in_place:
            raise UserError.at("TW012", f"a block of kind {primitive.kind.value} writes '{node.in_place[0]}' in place", node.span, "write it in a block of its own")
        statements, own_names = body.statements, body.names
        if primitive is not None:
            statements = stored(body.statements, primitive.kind, node.span)
            own_names, bound = body_names(statements), {}
            attributes = tuple(a for a in attributes if a.name != "kernel")
        arguments: dict[str, object] = {}
        label = self._label
        for name, item in body.inputs.items():
            if name not in bound:
                arguments[name] = self.evaluate(item)
        made = id(node), label, (*arguments, *(f"{name}={value!r}" for name, value in bound.items()))
        found = self._check.kernels.get(made)
        if found is None:
            attributes = tuple(a for a in attributes if a.name != "device" or _is_plain(a))
            params = tuple(
                syntax.Param(name, optional=True, in_place=name in node.in_place, span=item.span) for name, item in body.inputs.items() if name not in bound
            )
            function = syntax.Function(label, params, None, statements, "compute", attributes, span=node.span)
            names = replace(
                own_names, free={n: s for n, s in own_names.free.items() if n not in bound}, in_ranges=own_names.in_ranges - set(bound)
            ) if bound else own_names  # fmt: skip
            found = self._check.kernels[made] = function, names
        function, names = found
        device = self._device_of(node.attributes)
        values = self._launch(function, names, arguments, device)
        return values if primitive is None else self._primitive(primitive, values, device, node.span)

    def _primitive_of(self, attributes: Sequence[KernelAttribute]) -> KernelMetadata | None:
        """What a block is whose values a primitive takes; None for all others."""
        if kind_of(attributes)[1] not in _PRIMITIVE_NAMES:
            return None
        sink = Diagnostics()
        metadata = read_attributes([a for a in attributes if a.name != "device"], sink)
        for attribute in attributes:
            if attribute.name in ("async", "parallel"):
                sink.error("TW012", f"@{attribute.name} on a block of kind {metadata.kind.value}, which runs at once", attribute.span, f"leave @{attribute.name} out")
        sink.raise_if_errors()
        return metadata

    def _primitive(self, metadata: KernelMetadata, values: Any, device: str, span: Span) -> object:
        """What a primitive makes of the values of a block."""
        if self._looks:
            return values if metadata.kind in (KernelKind.SCAN, KernelKind.SORT) else AbstractValue()
        from tilewright.zyn.host import primitive_blocks

        values = tuple(settled(v) for v in values) if isinstance(values, tuple) else settled(values)
        place = None if device == "auto" else device
        try:
            return primitive_blocks.finished(metadata, values, place, span)
        except UserError as error:
            first = error.diagnostics[0]
            raise error if first.span.line else UserError.at(first.code, first.message, span, first.help) from None

    def _launch(self, function: syntax.Function, names: BodyNames, arguments: dict[str, object], device: str) -> object:
        """Run a kernel, with values of the program that its body names as further arguments."""
        if self._abstract is not None:
            stand_in = self._abstract.stand_in
            arguments = {n: stand_in(n, function) if isinstance(v, AbstractValue) else v for n, v in arguments.items()}
        values = {n: self._values[n] for n in names.free if n not in arguments and n in self._values}
        values = {n: v for n, v in values.items() if not self._is_size(n, names, arguments, names.free[n])}
        self._leave_out_sizes(function, names, arguments, values)
        for name, value in (*arguments.items(), *values.items()):
            if isinstance(value, list | tuple | dict):
                span = next((p.span for p in function.params if p.name == name), None) or names.free[name]
                raise UserError.at("TW009", f"'{name}' is a {type(value).__name__}, a kernel takes numbers and arrays", span)
        if values:
            arguments = {**arguments, **values}
            made = id(function), function.name, tuple(arguments)
            known = self._check.captured.get(made)
            if known is None:
                params = (*function.params, *(syntax.Param(name, optional=True, span=names.free[name]) for name in values))
                known = self._check.captured[made] = function, replace(function, params=params)
            function = known[1]
        in_place = any(p.in_place for p in function.params)
        if self._waiting is not None:
            if in_place:
                self._waiting.run_all()  # what waits may read what is written now
            found = NotImplemented if in_place else self._waiting.block(function, arguments, device)
            if found is not NotImplemented:
                return found
            arguments = {n: settled(v) for n, v in arguments.items()}
        if self._run_compute.takes_futures or not _is_asynchronous(function, arguments):
            return self._run_compute(function, arguments, device)
        from tilewright.zyn import async_blocks

        return async_blocks.run_at_once(self._run_compute, function, arguments, device)

    def _view(self, name: str, given: dict[str, object], span: Span) -> tuple[object, dict[str, object]]:
        """A view of what waits, which need not run for it; or None, and what is given, computed."""
        if self._waiting is None:
            return None, given
        try:
            view = host_functions.view_of(name, given)
        except UserError:
            view = None  # said again, with its place, where it is called
        if view is None and name in ("free", "reset"):
            self._waiting.run_all()  # what waits may read the memory that goes back
        return view, given if view is not None else {key: settled(value) for key, value in given.items()}

    def _new_waiting(self, name: str) -> LazyBlocks | None:
        """For a call of a function: its blocks wait for each other, where `run_compute` knows how to run them together."""
        return self._run_compute.waiting(name)

    def _is_size(self, name: str, names: BodyNames, arguments: dict[str, object], span: Span) -> bool:
        """Whether `name` in a body means the extent of an input, although the program also has a value of that name."""
        value = host_values.as_scalar(self._values[name])
        if name in names.in_ranges and value is None:
            return True
        for size, array, axis in names.axes:
            shape = getattr(arguments.get(array), "shape", None)
            if size == name and isinstance(shape, tuple) and axis < len(shape):
                if value is not None and value != shape[axis] and not self._looks:
                    raise UserError.at(
                        "TW004", f"'{name}' is {value}, but axis {axis} of '{array}' has {shape[axis]} element(s)", span,
                        f"leave out '{name}': it is taken from '{array}'",
                    )  # fmt: skip
                return True
        return False

    def _leave_out_sizes(
        self, function: syntax.Function, names: BodyNames, arguments: dict[str, object], values: dict[str, object]
    ) -> None:  # fmt: skip
        """Take numbers out of `values` that are extents of inputs, by how the body's tiles and steps use them."""
        numbers = {n: int(v) for n, v in values.items() if n in names.in_ranges and isinstance(v, int | np.integer) and not isinstance(v, bool)}
        if not numbers:
            return
        others = {n: v for n, v in values.items() if n not in numbers}
        made = id(function), function.name, tuple({**arguments, **others})
        known = self._check.captured.get(made)
        if known is None:
            params = (*function.params, *(syntax.Param(n, optional=True, span=names.free[n]) for n in others))
            known = self._check.captured[made] = function, replace(function, params=params)
        given = known[1] if others else function
        for name, (array, axis) in self._check.sizes.of(given, {**arguments, **others}, numbers).items():
            extent = {**arguments, **others}[array].shape[axis]  # type: ignore[attr-defined]
            if extent != numbers[name] and not self._looks:
                raise UserError.at(
                    "TW004", f"'{name}' is {numbers[name]}, but axis {axis} of '{array}' has {extent} element(s)", names.free[name],
                    f"leave out '{name}': it is taken from '{array}'",
                )  # fmt: skip
            del values[name]

    def _device_of(self, attributes: Sequence[KernelAttribute]) -> str:
        for attribute in attributes:
            if attribute.name == "device":
                name = self.evaluate(attribute.args[0].value)
                if isinstance(name, list | tuple) and name and all(isinstance(n, str) for n in name):
                    name = self._first_present([str(n) for n in name])
                if isinstance(name, AbstractValue):
                    continue
                if not isinstance(name, str):
                    raise UserError.at("TW009", f"@device takes a name or a list of names, got a {type(name).__name__}", attribute.span)
                if name != "auto":
                    return name
        return self._chosen()

    def _first_present(self, names: Sequence[str]) -> str:
        """The first device of a list that is there; the last one is asked for by name, so that what is missing is told."""
        if self._looks or len(names) == 1:
            return names[0]
        from tilewright.execute.devices import find_device

        for name in names[:-1]:
            try:
                find_device(name)
            except DeviceError:
                continue
            return name
        return names[-1]

    # -- what is done with arrays; somebody who records a run looks here -------------------------------------------

    def _arithmetic(self, formula: Expr, values: dict[str, object]) -> object:
        return scalar(formula, values)

    def _host_call(self, name: str, given: dict[str, object]) -> object:
        return host_functions.call(name, given, self._chosen())

    def _host_method(self, name: str, receiver: object, given: dict[str, object]) -> object:
        return host_functions.method(name, receiver, given)

    def _array_part(self, array: object, name: str) -> object:
        part: object = getattr(array, name)
        return part

    def _element(self, array: Any, indices: tuple[object, ...]) -> object:
        return array[indices]

    def _field(self, container: Any, key: object) -> object:
        """A part of a record, list, tuple or string."""
        found: object = container[key]
        return found

    def _item(self, value: object) -> object:
        """The number of a device array without axes, and what else there is as it is."""
        if getattr(value, "shape", None) == () and not isinstance(value, np.ndarray | np.generic) and hasattr(value, "item"):
            return value.item()
        return value


def scalar(node: Expr, values: Mapping[str, object]) -> object:
    """The value of arithmetic on numbers, strings and lists."""
    if isinstance(node, syntax.Number | syntax.Bool):
        return node.value
    if isinstance(node, syntax.Name):
        return values[node.id] if node.id in values else dtypes.by_name(node.id)
    if isinstance(node, syntax.IfExpr):
        return scalar(node.then if scalar(node.cond, values) else node.otherwise, values)
    if isinstance(node, syntax.Binary) and node.op == "@":
        raise UserError.at("TW003", "'@' takes vectors and matrices, got a number", node.span)
    try:
        if isinstance(node, syntax.Binary):
            return host_values.combine(node.op, scalar(node.left, values), scalar(node.right, values))
        if isinstance(node, syntax.Unary):
            return host_values.unary(node.op, host_values.number(scalar(node.operand, values)))
        if not isinstance(node, syntax.Call) or not isinstance(node.function, syntax.Name):
            raise UserError.at("TW005", "this cannot be computed from numbers alone", node.span, "use an array, or a let statement for each part")
        return host_values.call(node.function.id, [host_values.number(scalar(a.value, values)) for a in node.args])
    except host_values.NoNumber as error:
        raise UserError.at("TW009", str(error), node.span, "use numbers and arrays") from None
    except host_values.NoSuchFunction as error:
        raise UserError.at("TW005", f"'{error}' calls itself: a function cannot", node.span, "use a loop") from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UserError.at("TW016", f"this has no value: {error}", node.span) from None


def called(node: syntax.Call | syntax.Pipe) -> syntax.Call:
    return node.call if isinstance(node, syntax.Pipe) else node


def _is_plain(attribute: KernelAttribute) -> bool:
    """Whether a device is named in the text itself."""
    value = attribute.args[0].value if len(attribute.args) == 1 else None
    items = value.items if isinstance(value, syntax.List | syntax.Tuple) else (value,)
    return all(isinstance(item, syntax.String) for item in items)


def _is_asynchronous(function: syntax.Function, arguments: dict[str, object]) -> bool:
    marked = any(attribute.name == "async" for attribute in function.attributes)
    return marked or any(isinstance(value, streams.FUTURES) for value in arguments.values())


def _has_reduce(node: Expr) -> bool:
    if isinstance(node, syntax.ReduceExpr):
        return True
    if isinstance(node, syntax.Call):
        return any(_has_reduce(a.value) for a in node.args)
    return isinstance(node, syntax.Binary | syntax.Unary | syntax.IfExpr) and any(_has_reduce(o) for o in operands(node))


def _is_product(node: Expr) -> bool:
    """Whether it has a function that only kernels know."""
    if isinstance(node, syntax.Call):
        name = node.function.id if isinstance(node.function, syntax.Name) else ""
        return name in host_values.ARRAY_FUNCTIONS or any(_is_product(a.value) for a in node.args)
    if isinstance(node, syntax.Binary) and node.op == "@":
        return True
    return isinstance(node, syntax.Binary | syntax.Unary | syntax.IfExpr) and any(_is_product(o) for o in operands(node))
