"""Kernels that are the same but for names of parameters and for numbers: what is right of one is right of all.

In: the tree of a kernel. Out: its form, which is equal for kernels that a check cannot tell apart; None where nothing is shared. A form
stands only for "nothing is wrong and nothing is slow": messages have the names and places of their own kernel, so a kernel with any is
looked at by itself.

A number counts as any other of its class (`_class`) only where it is part of a computed value that decides nothing: not in indices,
ranges, conditions, arguments and attributes, and in no kernel where a value could get to one of these.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields

from tilewright.base import dtypes
from tilewright.tree import syntax
from tilewright.tree.inline import nodes
from tilewright.tree.names import is_output
from tilewright.tree.syntax import Function, Node

_KINDS = frozenset({"elementwise", "fused", "custom"})
"""Kernel kinds that say nothing about names."""
_FUNCTIONS = frozenset({"exp", "log", "sqrt", "tanh", "sin", "cos", "sigmoid", "relu", "erf", "abs", "min", "max"})
"""Functions of numbers that give numbers of the same kind."""
_ARITHMETIC = frozenset({"+", "-", "*"})
_COMPUTED = (syntax.Let, syntax.Assign, syntax.For, syntax.RangeExpr, syntax.Name, syntax.Number, syntax.Binary, syntax.Unary, syntax.IfExpr, syntax.Index)
_LARGEST = 2047
"""Every dtype of numbers but the narrowest holds all whole numbers up to this one."""


def form_of(function: Function) -> Hashable | None:
    """The form of a kernel; None where it is like no other."""
    if type(function) is not Function:
        return None  # blocks that are one program
    names = {p.name: place for place, p in enumerate(function.params)}
    if not _is_plain(function) or any(is_output(n) or dtypes.is_name(n) or n.startswith("_") for n in names):
        return None
    form = _TreeForm(names, _numbers_decide_nothing(function))
    made = (form.part(function.params), form.part(function.body), form.part(function.attributes), function.kind, function.result is None, function.sizes, function.options)
    return None if form.words & names.keys() else made


def _is_plain(function: Function) -> bool:
    if function.result is not None:
        return False
    for attribute in function.attributes:
        kind = attribute.args[0].value if len(attribute.args) == 1 else None
        if attribute.name != "kernel" or not isinstance(kind, syntax.Name) or kind.id not in _KINDS:
            return False
    return True


def _numbers_decide_nothing(function: Function) -> bool:
    """Whether no value that the kernel computes gets to an index, a range, or the choice of what is read."""
    found = list(nodes(function.body))
    computed: set[str] = set()
    deciding: list[Node] = []
    for node in found:
        if isinstance(node, syntax.Call):
            if not (isinstance(node.function, syntax.Name) and node.function.id in _FUNCTIONS):
                return False
        elif isinstance(node, syntax.Argument):
            if node.keyword is not None:
                return False
        elif not isinstance(node, _COMPUTED):
            return False
        elif isinstance(node, syntax.Let):
            if node.type is not None or node.shared or node.extents:
                return False
            computed.update(node.targets)
        elif isinstance(node, syntax.Assign):
            if isinstance(node.target, syntax.Name):
                computed.add(node.target.id)
        elif isinstance(node, syntax.Index):
            deciding.extend(node.indices)
        elif isinstance(node, syntax.RangeExpr):
            deciding.append(node)
        elif isinstance(node, syntax.For):
            if node.over is not None or node.until:
                return False
        elif isinstance(node, syntax.IfExpr) and any(isinstance(inner, syntax.Index) for inner in nodes(node)):
            return False
    return not any(isinstance(n, syntax.Index) or (isinstance(n, syntax.Name) and n.id in computed) for n in nodes(tuple(deciding)))


def _class(number: syntax.Number) -> Hashable:
    """What numbers have in common that checks and plans do not tell apart; the number itself where there is no other like it."""
    value = number.value
    if number.unit or type(value) not in (int, float) or not 3 <= value <= _LARGEST:  # type: ignore[operator]
        return type(value), value, number.unit
    whole = value == int(value)  # type: ignore[arg-type]
    return type(value), whole, whole and int(value).bit_count() == 1, value <= 127, value <= 255  # type: ignore[arg-type, operator]


class _TreeForm:
    """Trees as tuples, with the place of a parameter for its name."""

    def __init__(self, names: dict[str, int], loose: bool) -> None:
        self._names, self._loose = names, loose
        self.words: set[object] = set()
        """What stands in the tree as something else than a variable."""

    def part(self, item: object, loose: bool = False) -> Hashable:
        """The form of a node, a tuple of them, or what else they hold. `loose`: a number counts as any of its class."""
        kind = type(item)
        if kind is syntax.Name:
            name: str = item.id  # type: ignore[attr-defined]
            return self._names.get(name, name)
        if kind is tuple:
            return tuple([self.part(inner, loose) for inner in item])  # type: ignore[attr-defined]
        if kind is syntax.Callee:
            self.words.update(self._names)  # it has names of its own
            return kind, item
        if not isinstance(item, Node):
            self.words.add(item)
            return kind, item
        if kind is syntax.Number:
            return (kind, _class(item)) if loose else (kind, type(item.value), repr(item.value), item.unit)  # type: ignore[arg-type, attr-defined]
        values = item.__dict__
        if kind is syntax.Binary:
            inner = loose and values["op"] in _ARITHMETIC
            return kind, values["op"], values["valued"], self.part(values["left"], inner), self.part(values["right"], inner)
        if kind is syntax.IfExpr:
            return kind, self.part(values["cond"]), self.part(values["then"], loose), self.part(values["otherwise"], loose)
        if kind is syntax.Let:
            targets = tuple([self._names.get(name, name) for name in values["targets"]])
            return kind, targets, self.part(values["value"], self._loose), values["mutable"], self.part(values["type"]), values["shared"], self.part(values["extents"]), values["destructure"]
        if kind is syntax.Assign:
            return kind, self.part(values["target"]), self.part(values["value"], self._loose), values["op"]
        if kind is syntax.For:
            variables = tuple([self._names.get(name, name) for name in values["vars"]])
            return kind, variables, self.part(values["ranges"]), self.part(values["body"]), values["parallel"], self.part(values["over"]), values["until"]
        if kind is syntax.Param:
            return kind, self.part(values["type"]), self.part(values["default"]), values["optional"], values["keyword_only"], values["in_place"]
        if kind is syntax.Call and type(values["function"]) is syntax.Name:
            self.words.add(values["function"].id)
            return kind, values["function"].id, self.part(values["args"])
        return (kind, *[self.part(values[f.name]) for f in fields(kind) if f.name != "span"])  # type: ignore[arg-type]
