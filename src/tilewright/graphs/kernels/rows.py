"""Kernels over rows: products with weights, norms, softmax, look-ups. Arrays are (rows, features)."""

from __future__ import annotations

import functools
from typing import Any

from tilewright.base.dtypes import DType
from tilewright.execute.kernel import Kernel, kernel
from tilewright.frontend import words as tw


@kernel
def mul_mat(x: tw.Array, weight: tw.Array) -> tw.Array:
    """Rows times the rows of the weight."""
    rows, depth = x.shape
    columns = weight.shape[0]
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        total = 0.0
        for p in range(depth):
            total += x[i, p] * weight[j, p]
        out[i, j] = total
    return out


@kernel
def mul_mat_bias(x: tw.Array, weight: tw.Array, bias: tw.Array) -> tw.Array:
    """Rows times the rows of the weight, plus a number for each of these."""
    rows, depth = x.shape
    columns = weight.shape[0]
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        total = 0.0
        for p in range(depth):
            total += x[i, p] * weight[j, p]
        out[i, j] = total + bias[j]
    return out


@kernel
def mul_row(x: tw.Array, weight: tw.Array) -> tw.Array:
    """One row times the rows of the weight."""
    columns, depth = weight.shape
    out = tw.empty((columns,), x.dtype)
    for j in tw.grid(columns):
        total = 0.0
        for p in range(depth):
            total += weight[j, p] * x[p]
        out[j] = total
    return out


@kernel
def mul_row_bias(x: tw.Array, weight: tw.Array, bias: tw.Array) -> tw.Array:
    """One row times the rows of the weight, plus a number for each of these."""
    columns, depth = weight.shape
    out = tw.empty((columns,), x.dtype)
    for j in tw.grid(columns):
        total = 0.0
        for p in range(depth):
            total += weight[j, p] * x[p]
        out[j] = total + bias[j]
    return out


mul_row_q8: Kernel[..., Any] = kernel(activations="q8")(mul_row.python)
mul_row_bias_q8: Kernel[..., Any] = kernel(activations="q8")(mul_row_bias.python)
mul_mat_q8: Kernel[..., Any] = kernel(activations="q8")(mul_mat.python)
mul_mat_bias_q8: Kernel[..., Any] = kernel(activations="q8")(mul_mat_bias.python)


@kernel
def rms_norm(x: tw.Array, gamma: tw.Array, epsilon: float) -> tw.Array:
    """Rows divided by the root of their mean square."""
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        for j in range(columns):
            total += x[i, j] * x[i, j]
        inverse = 1 / tw.sqrt(total / columns + epsilon)
        for j in range(columns):
            out[i, j] = x[i, j] * inverse * gamma[j]
    return out


@kernel
def layer_norm(x: tw.Array, gamma: tw.Array, beta: tw.Array, epsilon: float) -> tw.Array:
    """Rows less their mean, divided by their standard deviation."""
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        for j in range(columns):
            total += x[i, j]
        mean = total / columns
        spread = 0.0
        for j in range(columns):
            d = x[i, j] - mean
            spread += d * d
        inverse = 1 / tw.sqrt(spread / columns + epsilon)
        for j in range(columns):
            out[i, j] = (x[i, j] - mean) * inverse * gamma[j] + beta[j]
    return out


@kernel
def softmax(x: tw.Array) -> tw.Array:
    """Each row's exponentials, divided by their sum."""
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = -tw.inf
        for j in range(columns):
            most = max(most, x[i, j])
        total = 0.0
        for j in range(columns):
            total += tw.exp(x[i, j] - most)
        for j in range(columns):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


@functools.cache
def embedding_as(dtype: DType) -> Kernel[..., Any]:
    """The rows of the weight that the ids name, as that dtype: rows of packed blocks are unpacked."""

    @kernel
    def embedded(ids: tw.Array, weight: tw.Array) -> tw.Array:
        (rows,) = ids.shape
        columns = weight.shape[1]
        out = tw.empty((rows, columns), dtype)
        for i, j in tw.grid(rows, columns):
            out[i, j] = weight[ids[i], j]
        return out

    return embedded


@kernel
def embedding(ids: tw.Array, weight: tw.Array) -> tw.Array:
    """The rows of the weight that the ids name."""
    (rows,) = ids.shape
    columns = weight.shape[1]
    out = tw.empty((rows, columns), weight.dtype)
    for i, j in tw.grid(rows, columns):
        out[i, j] = weight[ids[i], j]
    return out


@kernel
def argmax(x: tw.Array) -> tw.Array:
    """Where each row is largest; the first place on ties."""
    return tw.argmax(x, axis=1)
