"""What calls on the CPU and on the emulator share: results in NumPy arrays. In: an artifact, sizes and `out=`; out: arrays to write to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewright.base.artifact import ArrayParam, Artifact
from tilewright.base.errors import DeviceError
from tilewright.base.source import Span
from tilewright.execute.calls.arguments import element_strides
from tilewright.execute.calls.checks import check_output
from tilewright.execute.calls.in_place import check_given, elements_apart, share_memory
from tilewright.execute.calls.outputs import given_outputs
from tilewright.execute.speed_warnings import copied
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.syntax import Function


def output_arrays(
    artifact: Artifact, sizes: Mapping[str, int], out: object, arrays: Mapping[str, np.ndarray], span: Span
) -> tuple[dict[str, np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
    """Arrays to write to, and (given, temporary) pairs to copy back where the given one cannot be written directly."""
    given = given_outputs(artifact, out, span)
    check_given(artifact, arrays, {n: t for n, t in given.items() if isinstance(t, np.ndarray)}, share_memory, span)
    outputs: dict[str, np.ndarray] = {}
    copies: list[tuple[np.ndarray, np.ndarray]] = []
    for param in artifact.outputs:
        shape = tuple(s.evaluate(sizes) for s in param.shape)
        if param.name not in given:
            outputs[param.name] = _allocate(shape, param)
            continue
        target = check_output(param, given[param.name], shape, span)
        placed = any(b.array == param.name and b.stride for b in artifact.bindings)
        others = [*arrays.values(), *(t for n, t in given.items() if n != param.name and isinstance(t, np.ndarray))]
        if (target.flags.c_contiguous or placed) and not any(np.may_share_memory(target, o) for o in others):
            outputs[param.name] = target
        else:
            if not target.flags.c_contiguous and not placed:
                copied("out", target, span, f"its strides are {target.strides} bytes, and results are written one after the other", "pass a contiguous out=")
            outputs[param.name] = _allocate(shape, param)
            copies.append((target, outputs[param.name]))
    return outputs, copies


def result_strides(function: Function, out: object) -> tuple[tuple[int | None, ...] | None, ...]:
    """Strides of the arrays given for results, as code is made for them; () where all are contiguous, or one cannot be written where it lies.

    Graphs of blocks lay out their results themselves: their code is made for contiguous ones.
    """
    if isinstance(function, BlockGraph):
        return ()
    given = (out,) if isinstance(out, np.ndarray) else out if isinstance(out, tuple) else ()
    if all(isinstance(target, np.ndarray) and target.flags.c_contiguous for target in given):
        return ()
    found: list[tuple[int | None, ...] | None] = []
    for target in given:
        if not isinstance(target, np.ndarray) or not target.flags.aligned or any(s % target.itemsize for s in target.strides):
            return ()
        strides = element_strides(target)
        if not elements_apart(target.shape, strides):
            return ()
        found.append(None if target.flags.c_contiguous else tuple(1 if s == 1 and axis == target.ndim - 1 else None for axis, s in enumerate(strides)))
    return tuple(found)


def recorded_result(artifact: Artifact, outputs: Mapping[str, object], out: object) -> object:
    """As `result_of`, for arrays a replay will write: those of rank 0 stay arrays."""
    values = tuple(outputs[p.name] for p in artifact.outputs)
    return out if out is not None or not values else values[0] if len(values) == 1 else values


def strides_of(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """Strides in elements."""
    return {name: element_strides(array) for name, array in arrays.items()}


def _allocate(shape: tuple[int, ...], param: ArrayParam) -> np.ndarray:
    try:
        return np.empty(shape, param.dtype.numpy)
    except (MemoryError, ValueError) as error:
        raise DeviceError.at("TW031", f"no memory for the result '{param.name}' of shape {list(shape)}: {error}") from error
