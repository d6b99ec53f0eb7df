"""What the kind of a compute block says about sizes: `conv2d` names those of its image, windows and results.

In: the kind with its parameters, and what the walk over the body found out. Out: equations for names that no access binds, and checks
for every call: that a window fits its image, that groups divide the channels. A parameter that nothing in the body uses is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.errors import Diagnostics
from tilewright.base.sizes import Size, floordiv
from tilewright.tree import syntax
from tilewright.tree.check.state import State
from tilewright.tree.inline import nodes
from tilewright.tree.kernel_words import KIND
from tilewright.tree.metadata import KernelKind, KernelMetadata, kind_numbers
from tilewright.tree.typed import ArgSpec, ArrayArg, SizeCheck

_WITH_SIZES = ("stride", "padding")
"""Parameters that also say how large results are: a body that names those sizes uses them."""


def check_parameters(function: syntax.Function, metadata: KernelMetadata, sink: Diagnostics) -> None:
    """Report parameters of the kind that change nothing."""
    word = KIND.get(metadata.label or metadata.kind.value)
    named = {node.id for node in nodes(function.body) if isinstance(node, syntax.Name)}
    for name, value in metadata.params:
        declared = word.parameter(name) if word is not None else None
        if word is not None and (declared is None or not declared.in_body or value == declared.default):
            continue
        if name in named or (name in _WITH_SIZES and word is not None and named & {"out_h", "out_w"}):
            continue
        attribute = next(a for a in function.attributes if a.name == "kernel")
        sink.error(
            "TW012", f"@kernel {metadata.label or metadata.kind.value}({name}={value}), but nothing in the block uses '{name}'", attribute.span,
            f"name '{name}' where the body computes with it, or leave it out",
        )  # fmt: skip


def _convolution(function: syntax.Function, args: Sequence[ArgSpec], metadata: KernelMetadata) -> dict[str, Size]:
    """The sizes that a convolution names; none where the block is none, or its arrays have other ranks."""
    depthwise = metadata.kind is KernelKind.CONV2D_DEPTHWISE
    if metadata.kind is not KernelKind.CONV2D and not depthwise:
        return {}
    arrays = [(p.name, a.rank) for p, a in zip(function.params, args, strict=True) if isinstance(a, ArrayArg)]
    if len(arrays) < 2 or arrays[0][1] != 4 or arrays[1][1] != (3 if depthwise else 4):
        return {}
    image, kernel = arrays[0][0], arrays[1][0]
    names = {"batch": f"{image}$0", "in_h": f"{image}$2", "in_w": f"{image}$3"}
    if depthwise:
        names |= {"channels": f"{image}$1", "kernel_h": f"{kernel}$1", "kernel_w": f"{kernel}$2"}
    else:
        names |= {"in_channels": f"{image}$1", "out_channels": f"{kernel}$0"}
        names |= {"kernel_h": f"{kernel}$2", "kernel_w": f"{kernel}$3"}
    known: dict[str, Size] = {name: Size.of(axis) for name, axis in names.items()}
    given = kind_numbers(metadata)
    stride, padding, dilation = (int(given[name]) for name in ("stride", "padding", "dilation"))
    for out, inside, window in _SIDES:
        known[out] = floordiv(known[inside] + 2 * padding - dilation * (known[window] - 1) - 1, stride) + 1
    return known


_SIDES = (("out_h", "in_h", "kernel_h"), ("out_w", "in_w", "kernel_w"))


def bind_by_kind(function: syntax.Function, args: Sequence[ArgSpec], metadata: KernelMetadata, state: State) -> None:
    """Names that a kind of kernel gives its sizes, where accesses do not say."""
    for name, size in _convolution(function, args, metadata).items():
        if name in state.equations.used:
            state.equations.perhaps[name, size] = None


def kind_checks(function: syntax.Function, args: Sequence[ArgSpec], metadata: KernelMetadata, state: State) -> list[SizeCheck]:
    """What the sizes of a call must be for the kind to make sense."""
    known = _convolution(function, args, metadata)
    if not known:
        return []
    checks: list[SizeCheck] = []
    span = next((a.span for a in function.attributes if a.name == "kernel"), function.span)
    sizes, given = state.solution.sizes, kind_numbers(metadata)
    label = metadata.kind.value

    def means(name: str) -> bool:
        """Whether the body uses the name, and for what the kind says."""
        return name in state.equations.used and sizes.get(name) == known[name].substitute(sizes)

    for out, inside, window in _SIDES:
        if means(out):
            reach = int(given["dilation"]) * (known[window] - 1) + 1
            room = known[inside] + 2 * int(given["padding"])
            message = f"@kernel {label}: windows reach over {{left}} elements of {inside}, which has {{right}} with its padding"
            checks.append(SizeCheck(reach.substitute(sizes), "le", room.substitute(sizes), message, span=span))
    groups = int(given.get("groups", 1))
    if metadata.kind is KernelKind.CONV2D and (means("in_channels") or means("out_channels")) and (means("kernel_h") or means("kernel_w")):
        (image, windows) = [p.name for p, a in zip(function.params, args, strict=True) if isinstance(a, ArrayArg)][:2]
        deep, channels = groups * Size.of(f"{windows}$1").substitute(sizes), Size.of(f"{image}$1").substitute(sizes)
        message = f"@kernel {label}: windows of {groups} group(s) are for {{left}} channels, and the image has {{right}}"
        if deep != channels:
            checks.append(SizeCheck(deep, "eq", channels, message, span=span))
    if groups > 1:
        for name in ("in_channels", "out_channels"):
            if means(name):
                whole = known[name].substitute(sizes)
                message = f"@kernel {label}: groups={groups} does not divide {name}: {{left}} of {{right}} would be computed"
                checks.append(SizeCheck(groups * floordiv(whole, groups), "eq", whole, message, span=span))
    return checks
