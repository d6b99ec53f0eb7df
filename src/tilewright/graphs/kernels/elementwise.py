"""Kernels of one element each, of any rank. Arithmetic takes arrays and numbers."""

from __future__ import annotations

import functools
from typing import Any

from tilewright.base.dtypes import DType
from tilewright.execute.kernel import Kernel, kernel
from tilewright.frontend import words as tw


@kernel
def add(x: Any, y: Any) -> Any:
    return x + y


@kernel
def sub(x: Any, y: Any) -> Any:
    return x - y


@kernel
def mul(x: Any, y: Any) -> Any:
    return x * y


@kernel
def div(x: Any, y: Any) -> Any:
    return x / y


@kernel
def silu(x: tw.Array) -> tw.Array:
    return tw.silu(x)


@kernel
def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + tw.erf(0.7071067811865476 * x))


@kernel
def gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + tw.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@kernel
def relu(x: tw.Array) -> tw.Array:
    return tw.relu(x)


@kernel
def sigmoid(x: tw.Array) -> tw.Array:
    return tw.sigmoid(x)


@kernel
def tanh(x: tw.Array) -> tw.Array:
    return tw.tanh(x)


@kernel
def exp(x: tw.Array) -> tw.Array:
    return tw.exp(x)


@functools.cache
def copy_as(dtype: DType) -> Kernel[..., Any]:
    """All elements, as that dtype, in row-major order."""

    @kernel
    def copied(x: Any) -> Any:
        return tw.cast(x, dtype)

    return copied
