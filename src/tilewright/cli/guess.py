"""What a kernel's arguments are, when nobody said.

In: an untyped tree and the name of a parameter. Out: a `GuessedArguments`: an array of a rank, or a number. An annotation decides where there is
one, else a default; else the uses do: `x[i, j]` and `rows, cols = x.shape` mean rank 2, `range(n)` and `tw.empty((n,), …)` a whole number, `range(lengths[b])`
whole elements, also by way of variables. Element types nobody wrote are f32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.base import dtypes
from tilewright.base.dtypes import DType, bool_, f32, f64, i64
from tilewright.base.errors import UserError
from tilewright.cli.guess_uses import rank_of_use
from tilewright.tree import syntax
from tilewright.tree.check.random_draws import DTYPES as RANDOM
from tilewright.tree.inline import parts_backwards
from tilewright.tree.syntax import Node
from tilewright.tree.typed import ArgSpec, ArrayArg, NoneArg, ScalarArg
from tilewright.zyn.host.kind_parameters import parameters_in_scope

_PLAIN: dict[str, ScalarArg] = {"float": ScalarArg(f64, weak=True), "int": ScalarArg(i64, weak=True), "bool": ScalarArg(bool_)}
NOTHING = "none"
"""In place of the kind of a number: None, for a parameter that is left out."""


@dataclass(frozen=True)
class GuessedArguments:
    """One argument: an array with its extents (None where any will do), or a number."""

    dtype: DType
    extents: tuple[int | None, ...] | None = None
    """None is a number."""
    plain: str = ""
    """`float` or `int`: a number as Python has it, which takes the dtype of what it meets."""
    guessed: bool = False
    value: int | float | None = None
    """Of a number that the command line gives: its value, for names that a kernel has from around it."""

    def spec(self, gpu: bool) -> ArgSpec:
        if self.extents is not None:
            return ArrayArg(self.dtype, len(self.extents), None, 16 if gpu else 0)
        if self.plain == NOTHING:
            return NoneArg()
        return _PLAIN[self.plain] if self.plain else ScalarArg(self.dtype)

    def __str__(self) -> str:
        if self.extents is None:
            return self.plain or self.dtype.name
        return f"{self.dtype}[{', '.join('*' if e is None else str(e) for e in self.extents)}]"


_NUMBER = re.compile(r"[\s,;]*([A-Za-z_]\w*)\s*[=:]\s*([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+))(?![\w\[])")


def parse_arguments(text: str) -> dict[str, GuessedArguments]:
    """`x=f32[1024,*] v=f32[*] eps=float stride=2` as arguments by name."""
    found: dict[str, GuessedArguments] = {}
    position = 0
    pattern = re.compile(r"[\s,;]*([A-Za-z_]\w*)\s*[=:]\s*([A-Za-z_]\w*)\s*(?:\[([^\]]*)\])?")
    while text[position:].strip(" \t\n,;"):
        number = _NUMBER.match(text, position)
        if number is not None:
            value = int(number[2]) if number[2].lstrip("+-").isdigit() else float(number[2])
            kind = "int" if isinstance(value, int) else "float"
            found[number[1]] = GuessedArguments(_PLAIN[kind].dtype, plain=kind, value=value)
            position = number.end()
            continue
        match = pattern.match(text, position)
        if match is None:
            rest = text[position:].strip()
            raise UserError.at("TW016", f"--args: '{rest}' is not name=dtype[extents]", help='write for example --args "x=f32[1024,*] eps=float"')
        name, kind, extents = match.groups()
        if not dtypes.is_name(kind):
            known = ", ".join(d.name for d in dtypes.SCALARS)
            raise UserError.at("TW016", f"--args: '{kind}' is not an element type", help=f"choose one of {known}")
        if extents is None:
            found[name] = GuessedArguments(_PLAIN[kind].dtype, plain=kind) if kind in ("float", "int") else GuessedArguments(dtypes.by_name(kind))
        else:
            found[name] = GuessedArguments(dtypes.by_name(kind), _extents(name, extents))
        position = match.end()
    return found


def _extents(name: str, text: str) -> tuple[int | None, ...]:
    parts = [p.strip() for p in text.split(",")] if text.strip() else []
    for part in parts:
        if part != "*" and not part.isdigit():
            raise UserError.at("TW016", f"--args: '{part}' is no extent of '{name}'", help="write a number, or * for any size")
    return tuple(None if p == "*" else int(p) for p in parts)


def guess(name: str, type_: syntax.Expr | None, root: Node) -> GuessedArguments:
    """What `name` is in `root`. Arrays are f32 and numbers Python's float unless the annotation says otherwise."""
    if isinstance(type_, syntax.Index):
        element = type_.value.id if isinstance(type_.value, syntax.Name) else ""
        extents = tuple(e.value if isinstance(e, syntax.Number) and isinstance(e.value, int) else None for e in type_.indices)
        if dtypes.is_name(element):
            return GuessedArguments(dtypes.by_name(element), extents)
        return GuessedArguments(f32, extents, guessed=True)
    if isinstance(type_, syntax.Name) and type_.id.lower() not in ("array", "tensor"):
        if type_.id in ("float", "int"):
            return GuessedArguments(_PLAIN[type_.id].dtype, plain=type_.id)
        if dtypes.is_name(type_.id):
            return GuessedArguments(dtypes.by_name(type_.id))
    default = _default_of(name, root) if type_ is None else None
    if default is not None:
        return default
    rank = rank_in(name, root)
    if rank is not None and name in uses_in(root).places:
        return GuessedArguments(i64, (None,) * rank, guessed=True)
    if rank is None and type_ is None:
        rank = rank_of_use(name, root, nodes(root), rank_in)
        if rank is None and name in uses_in(root).whole:
            return GuessedArguments(i64, plain="int", guessed=True)
        if rank is None:
            return GuessedArguments(f64, plain="float", guessed=True)
    return GuessedArguments(f32, (None,) * (1 if rank is None else rank), guessed=True)


def _default_of(name: str, root: Node) -> GuessedArguments | None:
    """What a parameter without an annotation is by its default."""
    params = root.params if isinstance(root, syntax.Function) else ()
    default = next((p.default for p in params if p.name == name), None)
    if isinstance(default, syntax.Bool):
        return GuessedArguments(bool_)
    if isinstance(default, syntax.Number):
        plain = "int" if isinstance(default.value, int) else "float"
        return GuessedArguments(_PLAIN[plain].dtype, plain=plain)
    return None


def rank_in(name: str, root: Node) -> int | None:
    """The rank of the array `name` as its uses show it; None when nothing shows an array."""
    uses = uses_in(root)
    exact = list(uses.exact.get(name, ()))
    if not exact and isinstance(root, syntax.Module):
        exact += _passed(name, root, {s.name: s for s in root.body if isinstance(s, syntax.Function)}, ())
    if exact:
        return max(exact)
    return max(uses.at_least[name]) if name in uses.at_least else None


def _passed(name: str, root: Node, functions: Mapping[str, syntax.Function], around: tuple[str, ...]) -> Iterator[int]:
    """The ranks that functions of the program take `name` to have, where it is given to them."""
    for function, param in parameters_given(name, root, functions):
        if function.name in around:
            continue
        if isinstance(param.type, syntax.Index):
            yield len(param.type.indices)
        rank = rank_in(param.name, function)
        yield from [rank] if rank is not None else _passed(param.name, function, functions, (*around, function.name))


def parameters_given(name: str, root: Node, functions: Mapping[str, syntax.Function]) -> Iterator[tuple[syntax.Function, syntax.Param]]:
    """The functions that are called with a name, and what it is there."""
    for called, place in uses_in(root).given.get(name, ()):
        function = functions.get(called)
        params = () if function is None else function.params
        found = [p for position, p in enumerate(params) if place in (position, p.name)]
        if function is not None and found:
            yield function, found[0]


class Uses:
    """How a tree uses names; its nodes are looked at once, since each input of a program asks about all of them."""

    def __init__(self, root: Node) -> None:
        self.exact: dict[str, list[int]] = {}
        """Ranks that uses show."""
        self.at_least: dict[str, list[int]] = {}
        """Ranks below which uses would be wrong."""
        self.places: set[str] = set()
        """Arrays whose elements are indices of others: `x[places[i]]`."""
        self.whole: set[str] = set()
        """Names that stand where only whole numbers do: in bounds of loops, in indices, in parameters of kinds."""
        self.given: dict[str, list[tuple[str, int | str]]] = {}
        """Functions that are called with a name, and where among the arguments it is, or as which of them."""
        self.fields: dict[str, set[str]] = {}
        """What stands behind the point of a name."""
        self._parts: dict[int, list[int]] = {}
        for part, axes in _parts(root):
            self._parts.setdefault(id(part), []).append(axes)
        self._values: dict[str, list[syntax.Expr]] = {}
        """What variables are assigned."""
        for node in nodes(root):
            if isinstance(node, syntax.Let) and len(node.targets) == 1 and node.value is not None:
                self._values.setdefault(node.targets[0], []).append(node.value)
        for node in nodes(root):
            self._add(node)
        for name, values in self._values.items():
            for array in filter(None, map(_shape_like, values)):
                # What is made in the shape of an array has its rank.
                if array not in self.exact and name in self.exact:
                    self.exact[array] = self.exact[name]

    def _add(self, node: Node) -> None:
        if isinstance(node, syntax.Index):
            self._index(node)
        elif isinstance(node, syntax.Let):
            if node.destructure and node.value is not None and (array := _shape_of(node.value)):
                self.exact.setdefault(array, []).append(len(node.targets))
        elif isinstance(node, syntax.ReduceExpr):
            if isinstance(node.value, syntax.Name):
                # A reduction along an axis leaves something: nobody writes one for a vector.
                least = 1 if node.axis is None else max(2, *(axis + 1 for axis in _axes(node.axis)))
                self.at_least.setdefault(node.value.id, []).append(least)
        elif isinstance(node, syntax.Attribute):
            if isinstance(node.value, syntax.Name):
                self.at_least.setdefault(node.value.id, []).append(1)
                self.fields.setdefault(node.value.id, set()).add(node.name)
        elif isinstance(node, syntax.RangeExpr):
            self._whole(node.lo, node.hi, node.step)
        elif isinstance(node, syntax.KernelAttribute):
            if node.name == "kernel":
                self._whole(*(a.value for inner in nodes(node) if isinstance(inner, syntax.Call) for a in inner.args if a.keyword))
        elif isinstance(node, syntax.Compute):
            self.whole |= parameters_in_scope(node.attributes)
        elif isinstance(node, syntax.Pipe):
            self._call(node.call, node.value)
        elif isinstance(node, syntax.Call):
            self._call(node, None)

    def _whole(self, *places: syntax.Expr | None) -> None:
        """Names and arrays in places where only whole numbers stand, and in what variables there are made of."""
        waiting = [place for place in places if place is not None]
        while waiting:
            node = waiting.pop()
            if isinstance(node, syntax.Index) and isinstance(node.value, syntax.Name):
                self.places.add(node.value.id)
            elif isinstance(node, syntax.Name):
                if node.id not in self.whole:
                    waiting += self._values.get(node.id, ())
                self.whole.add(node.id)
            elif isinstance(node, syntax.Binary):
                waiting += (node.left, node.right)
            elif isinstance(node, syntax.Unary):
                waiting.append(node.operand)
            elif isinstance(node, syntax.IfExpr):
                waiting += (node.then, node.otherwise)
            elif isinstance(node, syntax.Tuple):
                waiting += node.items
            elif isinstance(node, syntax.Call) and isinstance(node.function, syntax.Name) and node.function.id in ("min", "max", "abs"):
                waiting += (argument.value for argument in node.args)

    def _index(self, node: syntax.Index) -> None:
        if isinstance(node.value, syntax.Name):
            found = self.exact.setdefault(node.value.id, [])
            slices = sum(isinstance(i, syntax.Slice) for i in node.indices)
            given = sum(not isinstance(i, syntax.Nothing | syntax.Rest) for i in node.indices)
            if any(isinstance(i, syntax.Rest) for i in node.indices):
                self.at_least.setdefault(node.value.id, []).append(given)
            else:
                found += [given + max(0, (axes if slices else 1) - slices) for axes in self._parts.get(id(node), ())]
                found.append(given)
        elif (array := _shape_of(node.value)) and isinstance(node.indices[0], syntax.Number):
            self.at_least.setdefault(array, []).append(int(node.indices[0].value.real) + 1)
        for index in node.indices:
            self._whole(*((index.lo, index.hi, index.step) if isinstance(index, syntax.Slice) else (index,)))

    def _call(self, call: syntax.Call, piped: syntax.Expr | None) -> None:
        if isinstance(call.function, syntax.Name) and call.function.id in ("empty", "zeros", "ones", "full", "shared"):
            self._whole(*(a.value for position, a in enumerate(call.args) if a.keyword == "shape" or (position == 0 and a.keyword is None)))
        if isinstance(call.function, syntax.Name) and call.function.id in RANDOM:
            self._whole(*(a.value for a in call.args if a.keyword != "dtype"))  # the seed, and indices
        if isinstance(call.function, syntax.Name):
            values = [*([] if piped is None else [(None, piped)]), *((a.keyword, a.value) for a in call.args)]
            for position, (keyword, value) in enumerate(values):
                if isinstance(value, syntax.Name):
                    self.given.setdefault(value.id, []).append((call.function.id, keyword or position))


_TILE_FUNCTIONS = {"dot": 1, "transpose": 2, "matmul": 2, "row_max": 2, "row_min": 2, "row_sum": 2}


def _parts(root: Node) -> Iterator[tuple[syntax.Expr, int]]:
    """Expressions used as vectors or matrices, and how many axes such a part has; a name stands for what it was declared with."""
    declared = {s.targets[0]: s.value for s in nodes(root) if isinstance(s, syntax.Let) and len(s.targets) == 1}
    for node in nodes(root):
        operands: list[tuple[syntax.Expr, int]] = []
        if isinstance(node, syntax.Binary) and node.op == "@":
            operands = [(node.left, 2), (node.right, 2)]
        elif isinstance(node, syntax.Call) and isinstance(node.function, syntax.Name) and node.function.id in _TILE_FUNCTIONS:
            operands = [(a.value, _TILE_FUNCTIONS[node.function.id]) for a in node.args]
        for operand, axes in operands:
            value = declared.get(operand.id) if isinstance(operand, syntax.Name) else None
            yield value or operand, axes


_walked: dict[int, tuple[Node, tuple[Node, ...]]] = {}
"""The last program that was asked about, and its functions, by identity, and the nodes of each."""
_WALKED = 256
"""How many are kept: files without a program have functions, too."""
_uses: dict[int, tuple[Node, Uses]] = {}
"""Of that program and its functions, by identity."""


def nodes(root: Node) -> Sequence[Node]:
    """The node and everything inside it, but for functions: their names are their own."""
    known = _walked.get(id(root))
    if known is not None:
        return known[1]
    found = tuple(_nodes(root))
    if isinstance(root, syntax.Module):
        _walked.clear()
        _uses.clear()
    if isinstance(root, syntax.Module | syntax.Function):
        if len(_walked) >= _WALKED:
            _walked.clear()
        _walked[id(root)] = root, found
    return found


def uses_in(root: Node) -> Uses:
    known = _uses.get(id(root))
    if known is None:
        nodes(root)  # a new program lets go of the one before
        known = _uses[id(root)] = root, Uses(root)
    return known[1]


def _nodes(root: Node) -> Iterator[Node]:
    yield root
    values = root.__dict__
    waiting: list[object] = [values[name] for name in parts_backwards(type(root))]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind is tuple:
            waiting.extend(reversed(item))  # type: ignore[call-overload]
        elif (parts := _INNER[kind] if kind in _INNER else _inner(kind)) is not None:
            yield item  # type: ignore[misc]
            values = item.__dict__
            waiting.extend([values[name] for name in parts])


_INNER: dict[type, tuple[str, ...] | None] = {}


def _inner(kind: type) -> tuple[str, ...] | None:
    """The parts of a kind of node that `_nodes` goes on with; None for functions, and for what is no node."""
    found = _INNER[kind] = parts_backwards(kind) if issubclass(kind, Node) and not issubclass(kind, syntax.Function) else None
    return found


def _shape_of(node: syntax.Expr) -> str:
    """The array whose shape it is; empty where it is none."""
    return node.value.id if isinstance(node, syntax.Attribute) and node.name == "shape" and isinstance(node.value, syntax.Name) else ""



def _shape_like(node: syntax.Expr) -> str:
    """The array whose shape a new one has: `zeros(x.shape, …)`, `empty_like(x)`; empty where there is none."""
    if not isinstance(node, syntax.Call) or not isinstance(node.function, syntax.Name) or not node.args:
        return ""
    first = node.args[0].value
    if node.function.id.endswith("_like"):
        return first.id if isinstance(first, syntax.Name) else ""
    return _shape_of(first) if node.function.id in ("empty", "zeros", "ones", "full") else ""


def _axes(node: syntax.Expr | None) -> list[int]:
    """The axes written in a reduction; one that is no plain number counts as the first."""
    if isinstance(node, syntax.Tuple):
        return [axis for item in node.items for axis in _axes(item)]
    if isinstance(node, syntax.Number):
        return [int(node.value.real)]
    return [0]
