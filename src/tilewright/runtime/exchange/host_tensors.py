"""Tensors of PyTorch in host memory as arguments and results of a call. In: arguments and `out=`; out: NumPy arrays in the same memory,
and results as tensors where arguments were some.

Nothing here imports PyTorch: a tensor can only be there when its owner did.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tilewright.base.dtypes import COMPLEX, SCALARS, complex_from_numpy, from_numpy
from tilewright.runtime.exchange.imports import from_dlpack
from tilewright.runtime.exchange.libraries import TORCH_NAMES, is_tensor


def is_host_tensor(value: object) -> bool:
    """Whether it is a tensor of PyTorch in host memory."""
    return is_tensor(value) and value.is_cpu  # type: ignore[attr-defined]


def has_host_tensors(values: list[object]) -> bool:
    """Whether some of these are, or tuples of them."""
    if "torch" not in sys.modules:
        return False
    return any(has_host_tensors(list(v)) if isinstance(v, list | tuple) else is_host_tensor(v) for v in values)


def as_array(value: Any) -> Any:
    """A tensor in host memory as an array in the same memory; tuples of them likewise; other values as they are."""
    if isinstance(value, list | tuple):
        return tuple(as_array(part) for part in value)
    if not is_host_tensor(value):
        return value
    if value.requires_grad and not sys.modules["torch"].is_grad_enabled():
        value = value.detach()  # a parameter under no_grad is a tensor like others
    kind = numpy_kinds().get(value.dtype)
    if kind is None or value.requires_grad:
        return from_dlpack(value)
    own, bits = kind
    try:
        if not value.data_ptr() and value.numel():
            return from_dlpack(value)  # its storage was freed: NumPy would make memory of its own for it
        return value.numpy() if bits is None else value.view(bits).numpy().view(own)
    except (RuntimeError, TypeError):
        return from_dlpack(value)  # which says what is wrong with it: sparse, conjugated, without memory


_Kinds = dict[Any, tuple[np.dtype, Any]]
_known: tuple[object, _Kinds] = (None, {})


def numpy_kinds() -> _Kinds:
    """For PyTorch's dtypes: those of NumPy, and the integers of the same size where NumPy has them from another library."""
    global _known
    torch: Any = sys.modules["torch"]
    if _known[0] is not torch:
        found: _Kinds = {}
        for dtype in SCALARS:
            kind = getattr(torch, TORCH_NAMES.get(dtype.name, ""), None)
            if kind is not None:
                foreign = dtype.is_float and (dtype.bits == 8 or dtype.name == "bf16")
                found[kind] = dtype.numpy, getattr(torch, f"int{dtype.bits}") if foreign else None
        found |= {getattr(torch, dtype.name): (dtype.numpy, None) for dtype in COMPLEX if hasattr(torch, dtype.name)}
        _known = torch, found
    return _known[1]


def as_tensor(value: Any) -> Any:
    """A new array as a tensor in the same memory; tuples of them likewise; other values as they are."""
    if isinstance(value, tuple):
        return tuple(as_tensor(part) for part in value)
    if not isinstance(value, np.ndarray | np.generic):
        return value
    dtype = from_numpy(value.dtype)
    torch: Any = sys.modules["torch"]
    if complex_from_numpy(value.dtype) is not None:
        return torch.from_numpy(np.asarray(value))
    kind = getattr(torch, TORCH_NAMES[dtype.name], None) if dtype is not None else None
    if kind is None:
        return value
    # Bits of that size: NumPy has no bf16 that PyTorch knows.
    bits = np.asarray(value).view(f"i{value.dtype.itemsize}")
    return torch.from_numpy(bits).view(kind)
