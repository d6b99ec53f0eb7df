"""Arrays that a kernel writes where they lie. In: an argument, or all arrays of a call; out: the same, refused where it cannot be.

Such an array is never copied or converted, so one that is read-only, not aligned, or whose elements share memory is refused. Two arguments that
share memory would mean something else with every order in which elements are reached:

    both are written        refused (TW018), with both names
    only one is written     the other is read from a copy made before the kernel starts, as with `out=`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from tilewright.base.artifact import Artifact
from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.execute.speed_warnings import copied
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.tree.syntax import Function

A = TypeVar("A")
_MOST_WORK = 10_000
"""Steps of the exact search for a common element; beyond it arrays whose ranges meet count as sharing memory."""


def check_in_place(name: str, value: object, array: np.ndarray | DeviceArray | None, span: Span) -> None:
    """Refuse an argument that cannot be written where it lies. `array` is what was read of `value`."""
    if array is None:
        raise UserError.at("TW009", f"argument '{name}' is written in place and must be an array, got a {type(value).__name__}", span)
    readonly = array.readonly if isinstance(array, DeviceArray) else not array.flags.writeable
    if readonly:
        raise UserError.at("TW018", f"argument '{name}' is read-only, and the kernel writes to it", span, "pass an array that can be written, or a copy")
    if isinstance(array, np.ndarray) and array is not value and array.flags.owndata:  # what was read is a copy
        raise UserError.at(
            "TW018", f"argument '{name}' is written in place, and its elements are not aligned as {array.dtype} wants", span,
            "pass an array whose memory and strides are whole elements",
        )  # fmt: skip
    size = array.itemsize if isinstance(array, np.ndarray) else 1
    if not elements_apart(array.shape, tuple(s // size for s in array.strides)):
        raise UserError.at(
            "TW018", f"argument '{name}' is written in place, and some of its elements share memory (shape {list(array.shape)}, strides {list(array.strides)})",
            span, "pass a copy: numpy.array(…)",
        )  # fmt: skip


def elements_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements surely or maybe share memory: each stride reaches beyond all that smaller ones do."""
    reach = 0
    for stride, extent in sorted((abs(stride), extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1):
        if stride <= reach:
            return 0 in shape
        reach += stride * (extent - 1)
    return True


def share_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two host arrays have an element in common; also where that is too hard to tell."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=_MOST_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def apart(
    artifact: Artifact, arrays: Mapping[str, A], overlap: Callable[[A, A], bool], copy: Callable[[A], A], span: Span
) -> dict[str, A]:
    """The arrays of a call; those that are read and share memory with one that is written are copies."""
    written = [param.name for param in artifact.in_place if param.name in arrays]
    found = dict(arrays)
    for position, name in enumerate(written):
        for other in written[position + 1 :]:
            if overlap(arrays[name], arrays[other]):
                raise UserError.at(
                    "TW018", f"'{name}' and '{other}' share memory, and {artifact.name} writes to both in place", span, "pass arrays that do not overlap"
                )
        for other, array in arrays.items():
            if other not in written and found[other] is array and overlap(arrays[name], array):
                found[other] = copy(array)
    return found


def host_apart(artifact: Artifact, arrays: Mapping[str, np.ndarray], span: Span) -> dict[str, np.ndarray]:
    """As `apart`, for arrays of the host."""
    if not artifact.in_place:
        return dict(arrays)
    names = {id(array): name for name, array in arrays.items()}

    def copy(array: np.ndarray) -> np.ndarray:
        copied(names[id(array)], array, span, f"it shares memory with an array that {artifact.name} writes in place", "pass arrays that do not overlap")
        fresh = _same_strides(array)  # the code that runs was made for these
        fresh[...] = array
        return fresh

    return apart(artifact, arrays, share_memory, copy, span)


def _same_strides(array: np.ndarray) -> np.ndarray:
    """New memory with the array's shape and strides."""
    reaches = [stride * (extent - 1) for stride, extent in zip(array.strides, array.shape, strict=True)]
    low, high = sum(min(r, 0) for r in reaches), sum(max(r, 0) for r in reaches)
    memory = np.zeros(high - low + array.itemsize, np.uint8)
    return np.ndarray(array.shape, array.dtype, memory.data, -low, array.strides)


def check_given(artifact: Artifact, arrays: Mapping[str, A], given: Mapping[str, A], overlap: Callable[[A, A], bool], span: Span) -> None:
    """Refuse an `out=` that shares memory with an array that is written in place."""
    for param in artifact.in_place:
        for name, target in given.items():
            if param.name in arrays and overlap(arrays[param.name], target):
                raise UserError.at(
                    "TW018", f"out= for '{name}' and '{param.name}' share memory, and {artifact.name} writes to both", span, "pass arrays that do not overlap"
                )


def refuse_in_place(artifact: Artifact, where: str, span: Span) -> None:
    """Refuse what would write other arrays than the caller's: recordings of the emulator, which work on copies."""
    if artifact.in_place:
        raise UserError.at(
            "TW036", f"'{artifact.in_place[0].name}' is written in place, which a graph of {where} cannot do: it works on copies", span,
            "capture the graph on the CPU or on a GPU",
        )  # fmt: skip


def refuse_function(function: Function, what: str, help: str) -> None:
    """Refuse a kernel with arrays that are written in place: `what` would not be what its author means."""
    name = next((p.name for p in function.params if p.in_place), None)
    if name is not None:
        raise UserError.at("TW016", f"{function.name} writes '{name}' in place, {what}", function.span, help)
