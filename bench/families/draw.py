"""How a problem is drawn: sizes, dtypes, layouts and spellings by a seed, from ranges that each family states.

In: a seed and a family. Out: a `Problem`: the kernel as a user would write it, what it is called with, and the peers. The same seed draws the same
problems everywhere. A small draw has the same spellings at sizes a test can afford.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spec:
    """An input: its shape, its dtype, and what its numbers are like."""

    shape: tuple[int, ...]
    dtype: str = "f32"
    kind: str = "normal"
    """normal; uniform (0 to 1); dominant (a square matrix that needs no pivots); positive (0.5 to 1.5); bits (any whole number)."""
    scale: float = 1.0


@dataclass(frozen=True)
class Problem:
    """One draw of a family."""

    title: str
    """What was drawn, in words: it names the spelling, too."""
    shape: tuple[int, ...]
    inputs: tuple[Spec, ...]
    ours: Callable[..., Any]
    """Arrays in, the result out."""
    exact: Callable[..., Any]
    """The same in float64: tensors of PyTorch in and out, or arrays of NumPy where the family is for CPUs alone."""
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """By name: `torch…` are called with tensors, all others with NumPy arrays. `numba…` give the function when called with nothing."""
    tolerance: float = 1e-4
    """Of the largest magnitude of the result."""
    flops: float = 0.0

    @property
    def dtype(self) -> str:
        return self.inputs[0].dtype


class Draw:
    """Numbers for one problem."""

    def __init__(self, seed: int, family: str, index: int, device: str, small: bool = False) -> None:
        self.random = random.Random(f"{seed} {family} {index}")
        self.device = device
        self.small = small

    @property
    def on_gpu(self) -> bool:
        return self.device == "gpu"

    def size(self, low: int, high: int, small: int = 9) -> int:
        """A size, as likely between 10 and 20 as between 100 and 200; rarely a power of two."""
        if self.small:
            low, high = min(low, 2), max(small, 2)
        return round(math.exp(self.random.uniform(math.log(low), math.log(high))))

    def count(self, low: int, high: int) -> int:
        """A small whole number, all equally likely; small draws have the same."""
        return self.random.randint(low, high)

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def fitting(self, budget: float, *ranges: tuple[int, int]) -> tuple[int, ...]:
        """Sizes from the ranges whose product is near a budget, so that no draw takes minutes or nothing: all are scaled alike, inside their ranges."""
        sizes = [self.size(low, high) for low, high in ranges]
        if self.small:
            return tuple(sizes)
        for _ in range(8):
            factor = (budget / math.prod(sizes)) ** (1 / len(sizes))
            if 0.7 < factor < 1.4:
                break
            sizes = [min(max(round(s * factor), low), high) for s, (low, high) in zip(sizes, ranges, strict=True)]
        return tuple(sizes)


@dataclass(frozen=True)
class Family:
    name: str
    ranges: str
    """What is drawn from where, for readers."""
    build: Callable[[Draw], Problem]
    bars: Mapping[str, float]
    """The ratio promised, by device: `gpu`, `cpu`. A family is measured where it has a bar."""
