"""What stands between ONNX and a tensor graph while a model is translated: values, and the sink that takes nodes.

A `Known` value has a shape of plain numbers. Its elements are on the host (constants, and what was computed of shapes), or a handle of
the sink says who makes them. Tensors without axes have one axis of extent 1 behind the handle: kernels index at least one axis.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tilewright.runtime.memory.packed_array import PackedArray
from tilewright.tree.syntax import Function

Shape = tuple[int, ...]


@dataclass(eq=False)
class Known:
    """A value of the model for the sizes of one call."""

    shape: Shape
    dtype: np.dtype
    host: np.ndarray | None = None
    handle: Any = None
    inputs: frozenset[str] | None = None
    """The small integer inputs of the model that it is computed of, where it is of nothing else but these and constants."""

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stored(self) -> Shape:
        """Its shape in kernels."""
        return self.shape or (1,)


class NodeSink(Protocol):
    """Takes the nodes of a translated model."""

    def weight(self, array: np.ndarray | PackedArray) -> Any:
        """A constant array."""

    def kernel(self, label: str, function: Function, args: Sequence[Any], results: Sequence[tuple[Shape, np.dtype]]) -> Sequence[Any]:
        """A launch of a kernel."""

    def reshape(self, handle: Any, shape: Shape) -> Any:
        """The same elements in another shape."""

    def transpose(self, handle: Any, axes: Sequence[int]) -> Any:
        """Axes in another order."""

    def slice(self, handle: Any, axis: int, start: int, size: int, step: int) -> Any:
        """Some elements along an axis; steps are positive."""


class PackedWeights:
    """Weights that were packed: once for a model, not for each translation of it, as long as the arrays that they are made of are there."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], tuple[tuple[weakref.ref[np.ndarray], ...], PackedArray]] = {}

    def of(self, sources: Sequence[np.ndarray], form: tuple[object, ...], make: Callable[[], PackedArray]) -> PackedArray:
        """What `make` gives for these arrays; `form` is what else it depends on."""
        key = (*map(id, sources), *form)
        found = self._found.get(key)
        if found is not None and all(ref() is array for ref, array in zip(found[0], sources, strict=True)):
            return found[1]
        for other in [k for k, (refs, _) in self._found.items() if any(ref() is None for ref in refs)]:
            self._found.pop(other, None)
        made = make()
        self._found[key] = tuple(map(weakref.ref, sources)), made
        return made


def as_rows(array: np.ndarray) -> np.ndarray:
    """The array in row-major order. NumPy's own function gives numbers an axis."""
    return np.asarray(array, order="C")
