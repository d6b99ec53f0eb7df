"""The table of explicit kernels: each runs on the emulator, on the CPU and on a GPU, with equal results.

A `Case` is a kernel, its grid and block, and a function that makes its arguments from a generator of random numbers. Arrays that a kernel
writes are among its arguments; what `outcome` compares is all arrays after the launch. Floats are whole numbers where their order of
summation is open, so that results are equal to the bit; `ulp` is what functions such as exp may differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np

import tilewright as tw

Extents = int | tuple[int, ...]


@dataclass(frozen=True)
class Case:
    name: str
    kernel: Any
    grid: Extents
    block: Extents
    arguments: Callable[[np.random.Generator], list[Any]]
    shared: int = 0
    ulp: float = 0.0

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []


def case(
    grid: Extents, block: Extents, *arguments: Callable[[np.random.Generator], Any] | float | int | bool | np.ndarray,
    shared: int = 0, ulp: float = 0.0, name: str = "",
) -> Callable[[FunctionType], FunctionType]:  # fmt: skip
    """Add the function to the table. Arguments are numbers, or makers of arrays such as `floats(100)`."""

    def make(rng: np.random.Generator) -> list[Any]:
        return [a(rng) if callable(a) else a for a in arguments]

    def add(function: FunctionType) -> FunctionType:
        label = name or function.__name__
        assert all(c.name != label for c in CASES), label
        CASES.append(Case(label, tw.gpu(function), grid, block, make, shared, ulp))
        return function

    return add


Maker = Callable[[np.random.Generator], np.ndarray]


def floats(*shape: int, dtype: Any = np.float32, low: float = -4.0, high: float = 4.0) -> Maker:
    return lambda rng: rng.uniform(low, high, shape).astype(dtype)


def wholes(*shape: int, dtype: Any = np.float32, low: int = -9, high: int = 10) -> Maker:
    """Whole numbers, of any dtype."""
    return lambda rng: rng.integers(low, high, shape).astype(dtype)


def zeros(*shape: int, dtype: Any = np.float32) -> Maker:
    return lambda rng: np.zeros(shape, dtype)


def filled(value: float, *shape: int, dtype: Any = np.float32) -> Maker:
    return lambda rng: np.full(shape, value, dtype)


def permutation(n: int, dtype: Any = np.int32) -> Maker:
    return lambda rng: rng.permutation(n).astype(dtype)


def ordered(n: int, dtype: Any = np.float32, low: int = -50, high: int = 50) -> Maker:
    return lambda rng: np.sort(rng.integers(low, high, n)).astype(dtype)


def outcome(one: Case, device: str, seed: int = 1) -> list[np.ndarray]:
    """All arrays after a launch on that device."""
    arguments = one.arguments(np.random.default_rng(seed))
    config = (one.grid, one.block, one.shared) if one.shared else (one.grid, one.block)
    one.kernel[config](*arguments, device=device)
    return [a for a in arguments if isinstance(a, np.ndarray)]


def assert_equal(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], ulp: float, label: str) -> None:
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if ulp and a.dtype.kind == "f":
            scale = np.spacing(np.maximum(np.abs(b), np.finfo(b.dtype).tiny))
            worst = float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)) / scale, initial=0.0))
            assert worst <= ulp, f"{label}: array {number} is off by {worst} ulp"
        else:
            np.testing.assert_array_equal(a, b, f"{label}: array {number}")


def all_cases() -> list[Case]:
    """The whole table."""
    import simt_blocks
    import simt_control
    import simt_large
    import simt_maps
    import simt_warps

    assert simt_maps and simt_control and simt_blocks and simt_warps and simt_large
    return CASES
