"""The checks of a call that only its sizes can decide, with messages that name the arguments and the values.

In: an artifact and the arrays of a call. Out: the value of every size name. The CPU's entry stub makes the same checks in
machine code; it refuses the call, and this module says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tilewright.base.artifact import ArrayParam, Artifact
from tilewright.base.errors import Diagnostic, UserError
from tilewright.base.sizes import Size, add_numbers, readable, size_text, without_clamp
from tilewright.base.source import NOWHERE, Span

RELATIONS = {"eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "lt": lambda a, b: a < b}


def bind_sizes(
    artifact: Artifact, shapes: Mapping[str, tuple[int, ...]], strides: Mapping[str, tuple[int, ...]], span: Span = NOWHERE,
    numbers: Mapping[str, object] | None = None,
) -> dict[str, int]:  # fmt: skip
    """Values of the names bound by inputs and of those computed from the call's `numbers`, after checking that everything fits. Raises UserError with all that does not."""
    inputs = {p.name: p for p in artifact.inputs if isinstance(p, ArrayParam)}
    values: dict[str, int] = {}
    origin: dict[str, tuple[str, int]] = {}
    for b in artifact.bindings:
        if b.array in inputs:
            values[b.name] = (strides if b.stride else shapes)[b.array][b.axis]
            origin[b.name] = (b.array, b.axis)
    add_numbers(values, numbers or {}, artifact.computed)
    wrong: list[Diagnostic] = []
    for param in inputs.values():
        for axis, extent in enumerate(param.shape):
            if origin.get(extent.name or "") == (param.name, axis):
                continue
            wanted, found = extent.evaluate(values), shapes[param.name][axis]
            if wanted != found:
                wrong.append(Diagnostic("TW004", mismatch(param.name, axis, found, extent, wanted, origin), span))
    if wrong:
        raise UserError(*wrong)
    for name, made in artifact.computed:
        if values.get(name, 0) >= 1 << 63:
            wrong.append(Diagnostic("TW004", f"{size_text(without_clamp(made))} = {values[name]} is beyond 64 bits ({values_text([made], values)})", span))
    if wrong:
        raise UserError(*wrong)
    for array in (*artifact.outputs, *artifact.scratch):
        if "." in array.name:
            continue  # one of the compiler's own: empty where what it holds is
        what = "the result" if array in artifact.outputs else "the array"
        for axis, extent in enumerate(array.shape):
            if extent.names <= values.keys() and extent.evaluate(values) < 0:
                size = extent.evaluate(values)
                wrong.append(Diagnostic("TW004", f"axis {axis} of {what} '{array.name}' would have extent {size_text(extent)} = {size}", span))
    for check in artifact.checks:
        if not (check.left.names | check.right.names) <= values.keys():
            continue
        left, right = check.left.evaluate(values), check.right.evaluate(values)
        if not RELATIONS[check.relation](left, right):
            message = check.message.replace("{left}", str(left)).replace("{right}", str(right))
            message = message.replace("{values}", values_text((check.left, check.right), values))
            if check.place:
                message = f"{message} (at {check.place})\n{check.excerpt}" if check.excerpt else f"{message} (at {check.place})"
            wrong.append(Diagnostic(check.code, message, span))
    if wrong:
        raise UserError(*wrong)
    return values


def values_text(sizes: Iterable[Size], values: Mapping[str, int]) -> str:
    """What the names in sizes are: `k = 3, x.shape[0] = 2`."""
    names = sorted({name for size in sizes for name in size.names})
    return ", ".join(f"{readable(name)} = {values[name]}" for name in names)


def mismatch(
    name: str, axis: int, found: int, extent: Size, wanted: int, origin: Mapping[str, tuple[str, int]]
) -> str:
    """`size mismatch: axis 0 of 'v' is 5, but 'cols' is 4 (axis 1 of 'm')`"""
    if extent.constant is not None:
        return f"size mismatch: axis {axis} of '{name}' is {found}, but must be {wanted}"
    sources = ", ".join(f"axis {origin[n][1]} of '{origin[n][0]}'" for n in sorted(extent.names) if n in origin)
    label = f"'{extent}'" if extent.name and "$" not in extent.name else f"{extent}" if "$" not in str(extent) else "its counterpart"
    return readable(f"size mismatch: axis {axis} of '{name}' is {found}, but {label} is {wanted}") + (f" ({sources})" if sources else "")


def check_output(param: ArrayParam, given: object, shape: tuple[int, ...], span: Span = NOWHERE) -> np.ndarray:
    """An `out=` array of the right kind, or UserError."""
    if not isinstance(given, np.ndarray):
        raise UserError.at("TW018", f"out= for '{param.name}' is a {type(given).__name__}, not an array", span)
    if given.dtype != param.dtype.numpy:
        raise UserError.at(
            "TW018", f"out= for '{param.name}' has dtype {given.dtype}, but the result is {param.dtype.numpy}", span,
            f"make it with numpy.empty({list(shape)}, dtype='{param.dtype.numpy}')",
        )  # fmt: skip
    if given.shape != shape:
        raise UserError.at("TW018", f"out= for '{param.name}' has shape {list(given.shape)}, but the result has {list(shape)}", span)
    if not given.flags.writeable:
        raise UserError.at("TW018", f"out= for '{param.name}' is read-only", span)
    return given
