"""Tensors of PyTorch in host memory as arguments and results of a call. In: arguments and `out=`; out: NumPy arrays in the same memory,
and results as tensors where arguments were some.

Nothing here imports PyTorch: a tensor can only be there when its owner did.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tilewright.base.dtypes import from_numpy
from tilewright.runtime.exchange.imports import from_dlpack
from tilewright.runtime.exchange.libraries import TORCH_NAMES, is_tensor


def is_host_tensor(value: object) -> bool:
    """Whether it is a tensor of PyTorch in host memory."""
    return is_tensor(value) and value.device.type == "cpu"  # type: ignore[attr-defined]


def has_host_tensors(values: list[object]) -> bool:
    """Whether some of these are, or tuples of them."""
    if "torch" not in sys.modules:
        return False
    return any(has_host_tensors(list(v)) if isinstance(v, list | tuple) else is_host_tensor(v) for v in values)


def as_array(value: Any) -> Any:
    """A tensor in host memory as an array in the same memory; tuples of them likewise; other values as they are."""
    if isinstance(value, list | tuple):
        return tuple(as_array(part) for part in value)
    return from_dlpack(value) if is_host_tensor(value) else value


def as_tensor(value: Any) -> Any:
    """A new array as a tensor in the same memory; tuples of them likewise; other values as they are."""
    if isinstance(value, tuple):
        return tuple(as_tensor(part) for part in value)
    if not isinstance(value, np.ndarray | np.generic):
        return value
    dtype = from_numpy(value.dtype)
    torch: Any = sys.modules["torch"]
    kind = getattr(torch, TORCH_NAMES[dtype.name], None) if dtype is not None else None
    if kind is None:
        return value
    # Bits of that size: NumPy has no bf16 that PyTorch knows.
    bits = np.asarray(value).view(f"i{value.dtype.itemsize}")
    return torch.from_numpy(bits).view(kind)
