"""Axes of extent 1 that repeat: `x + y` with shapes (n, 1) and (n, m), as NumPy has it.

In: a kernel's tree and the arguments of a call. Out: the arguments; where an axis of extent 1 meets a longer one in an array expression of the kernel, its
`ArrayArg` says so, and code is made for that. Code for operands of equal extents knows nothing of it: calls with such arguments are as fast as before. Kernels
that only index elements in loops are never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.base.errors import UserError
from tilewright.execute.calls.arguments import ReadArgument
from tilewright.tree import syntax
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.inline import nodes
from tilewright.tree.typed import ArgSpec, ArrayArg, ArrayInfo, Shape

Axis = tuple[str, int]
_MOST = 256
_known: dict[tuple[int, tuple[ArgSpec, ...]], tuple[syntax.Function, dict[Axis, object], dict[str, Shape]]] = {}
"""For kernels and kinds of arguments: the tree, the axes that meet others, and the shapes of the arguments in names."""


def with_repeats(function: syntax.Function, arguments: list[ReadArgument]) -> list[ReadArgument]:
    """The arguments, with the axes of extent 1 that repeat in this call."""
    if not any(1 in argument.shape for argument in arguments) or isinstance(function, BlockGraph):
        return arguments
    specs = tuple(argument.spec for argument in arguments)
    shapes = {a.name: a.shape for a in arguments if isinstance(a.spec, ArrayArg) and len(a.shape) == a.spec.rank}
    ones = repeating(function, specs, shapes)
    if not ones:
        return arguments
    return [replace(a, spec=replace(a.spec, ones=ones[a.name])) if a.name in ones and isinstance(a.spec, ArrayArg) else a for a in arguments]


def repeating(function: syntax.Function, specs: tuple[ArgSpec, ...], shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """For inputs by name, the axes of extent 1 that repeat."""
    key = id(function), specs
    known = _known.get(key)
    if known is None or known[0] is not function:
        if len(_known) >= _MOST:
            _known.clear()
        known = _known[key] = (function, *_rules(function, specs))
    _, meets, sizes = known
    if not meets:
        return {}
    extents: dict[object, set[int]] = {}
    for name, shape in shapes.items():
        for size, extent in zip(sizes.get(name, ()), shape, strict=False):
            extents.setdefault(size, set()).add(extent)
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        axes = tuple(axis for axis, extent in enumerate(shape) if extent == 1 and (name, axis) in meets and _repeats(sizes[name][axis], extents))
        if axes:
            found[name] = axes
    if not found:
        return {}
    wanted = tuple(replace(s, ones=found[p.name]) if p.name in found and isinstance(s, ArrayArg) else s for p, s in zip(function.params, specs, strict=True))
    return found if _fits(function, wanted) else {}


def _repeats(size: object, extents: dict[object, set[int]]) -> bool:
    """Whether what should have the extent of an axis of extent 1 has another one."""
    name = getattr(size, "name", None)
    return name is None or len(extents.get(size, ())) > 1


def _rules(function: syntax.Function, specs: tuple[ArgSpec, ...]) -> tuple[dict[Axis, object], dict[str, Shape]]:
    """The axes that meet others, and the shapes of arrays; nothing where elements are all that is read."""
    arrays = {p.name: s.rank for p, s in zip(function.params, specs, strict=False) if isinstance(s, ArrayArg)}
    if len(specs) != len(function.params) or not _has_array_values(function.body, arrays):
        return {}, {}
    try:
        kernel = check_kernel(function, specs)
    except UserError:
        return {}, {}  # compiling says what is wrong
    return dict.fromkeys(kernel.repeats), {a.name: a.shape for a in kernel.inputs if isinstance(a, ArrayInfo)}


def _fits(function: syntax.Function, specs: tuple[ArgSpec, ...]) -> bool:
    """Whether the kernel takes arguments of which some axes have extent 1: loops may say that they have not."""
    try:
        check_kernel(function, specs)
    except UserError:
        return False
    return True


def _has_array_values(body: Sequence[syntax.Stmt], arrays: dict[str, int]) -> bool:
    """Whether arrays, or parts of them, are operands."""
    elements: set[int] = set()
    for node in nodes(tuple(body)):
        if isinstance(node, syntax.Attribute) and isinstance(node.value, syntax.Name):
            elements.add(id(node.value))
        elif isinstance(node, syntax.Index) and isinstance(node.value, syntax.Name):
            parts = any(isinstance(i, syntax.Slice | syntax.Nothing | syntax.Rest) for i in node.indices)
            if node.value.id in arrays and (parts or len(node.indices) < arrays[node.value.id]):
                return True
            elements.add(id(node.value))
        elif isinstance(node, syntax.Name) and node.id in arrays and id(node) not in elements:
            return True
    return False
