"""Attributes of a compute block that contradict each other, its loops, or the sizes of a call.

In: the attributes, the untyped body and what the checker found out about sizes. Out: errors at the attributes, and for
`@shared(rows * 4)` a check for every call, for what it asks for is known only there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilewright.base.errors import Diagnostics
from tilewright.base.sizes import Size, floordiv
from tilewright.tree import syntax
from tilewright.tree.inline import nodes
from tilewright.tree.metadata import MOST_SHARED, constant, suggest
from tilewright.tree.names import is_output
from tilewright.tree.syntax import Expr, Function, KernelAttribute
from tilewright.tree.typed import SizeCheck

_SEVERAL = frozenset({"broadcast"})
"""Attributes that may be given more than once."""


def check_attributes(function: Function, sink: Diagnostics) -> None:
    """What can be said before anything is known of arguments."""
    seen: dict[str, KernelAttribute] = {}
    for attribute in function.attributes:
        first = seen.setdefault(attribute.name, attribute)
        if first is not attribute and attribute.name not in _SEVERAL:
            sink.error(
                "TW012", f"@{attribute.name} is given twice: line {first.span.line} has one", attribute.span, "keep one of them"
            )
        if attribute.name == "vectorizable":
            met = next((n for n in nodes(function.body) if _meets(n)), None)
            if met is not None:
                sink.error("TW012", "@vectorizable, but iterations share memory here", met.span, "leave @vectorizable out")
        if attribute.name == "broadcast":
            _check_broadcast(attribute, function, sink)


def _check_broadcast(attribute: KernelAttribute, function: Function, sink: Diagnostics) -> None:
    """`@broadcast(v, axis=1)`: the vector lies along that axis of the results, so the index that reads it is the one there."""
    values = {a.keyword or "": a.value for a in attribute.args}
    name, axis = values.get(""), constant(values["axis"]) if "axis" in values else None
    if not isinstance(name, syntax.Name) or not isinstance(axis, int):
        return
    results = _returned(function)
    stores = [n.target for n in nodes(function.body) if isinstance(n, syntax.Assign) and _is_result(n.target, results)]
    reads = [n for n in nodes(function.body) if isinstance(n, syntax.Index) and n.value == name and len(n.indices) == 1]
    for read in reads:
        index = read.indices[0]
        for store in stores:
            assert isinstance(store, syntax.Index)
            if index in store.indices and axis not in (places := [p for p, i in enumerate(store.indices) if i == index]):
                assert isinstance(store.value, syntax.Name)
                shown = index.id if isinstance(index, syntax.Name) else "its index"
                where = f"'{name.id}' is read with '{shown}', which is axis {places[0]} of '{store.value.id}'"
                help = f"write @broadcast({name.id}, axis={places[0]})"
                sink.error("TW012", f"@broadcast({name.id}, axis={axis}), but {where}", attribute.span, help)
                return


def _meets(node: syntax.Node) -> bool:
    """Whether iterations meet here: in shared memory, or at a barrier."""
    if isinstance(node, syntax.Let):
        return node.shared
    return isinstance(node, syntax.Call) and isinstance(node.function, syntax.Name) and node.function.id == "barrier"


def _returned(function: Function) -> frozenset[str]:
    """The names that a Python kernel returns."""
    values = [n.value for n in nodes(function.body) if isinstance(n, syntax.Return) and n.value is not None]
    parts = [item for value in values for item in (value.items if isinstance(value, syntax.Tuple) else (value,))]
    return frozenset(part.id for part in parts if isinstance(part, syntax.Name))


def _is_result(target: Expr, returned: frozenset[str]) -> bool:
    if not isinstance(target, syntax.Index) or not isinstance(target.value, syntax.Name):
        return False
    return target.value.id in returned or (not returned and is_output(target.value.id))


def shared_demand(
    attributes: Sequence[KernelAttribute], sizes: Mapping[str, Size], bound: Iterable[str], sink: Diagnostics
) -> list[SizeCheck]:
    """A check that what `@shared` asks for is not too much; none where it asks for a number. `sizes` are the kernel's by name,
    of which those in `bound` have a value in every call."""
    checks: list[SizeCheck] = []
    known = set(bound)
    for attribute in attributes:
        if attribute.name != "shared" or len(attribute.args) != 1 or constant(attribute.args[0].value) is not None:
            continue
        size = _size(attribute.args[0].value, sizes)
        missing = sorted(size.names - known) if size is not None else []
        if size is None:
            sink.error(
                "TW016",
                "@shared takes a number of bytes, or an expression of sizes",
                attribute.span,
                "write for example @shared(16 * 16 * 4)",
            )
        elif missing:
            names = sorted(known)
            help = suggest(missing[0], names) or f"known sizes: {', '.join(names) or 'none'}"
            sink.error("TW014", f"@shared: size '{missing[0]}' is not bound by any input", attribute.span, help)
        else:
            message = "@shared asks for {left} bytes, and a block has at most {right} on any target"
            checks.append(SizeCheck(size, "le", Size.of(MOST_SHARED), message, "TW020", span=attribute.span))
    return checks


def _size(node: Expr, sizes: Mapping[str, Size]) -> Size | None:
    """An expression of sizes and whole numbers."""
    if isinstance(node, syntax.Number):
        return Size.of(node.value) if isinstance(node.value, int) else None
    if isinstance(node, syntax.Name):
        return sizes.get(node.id, Size.of(node.id))
    if isinstance(node, syntax.Binary):
        left, right = _size(node.left, sizes), _size(node.right, sizes)
        if left is None or right is None:
            return None
        if node.op in ("zdiv", "//"):
            return floordiv(left, right)
        return left + right if node.op == "+" else left - right if node.op == "-" else left * right if node.op == "*" else None
    return None
