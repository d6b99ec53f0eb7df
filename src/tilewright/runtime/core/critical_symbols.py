"""Symbols that the entries of critical functions name beside those of other stubs: how Python's numbers are made, NumPy's type and dtypes."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from tilewright.base import dtypes
from tilewright.runtime.core.builtin import bind_python
from tilewright.runtime.core.objects import bind_symbol

_FUNCTIONS = ("PyFloat_FromDouble", "PyLong_FromLongLong", "PyLong_FromUnsignedLongLong", "PyObject_GetAttrString")


@functools.cache
def bind_critical() -> None:
    """Bind them, once."""
    bind_python()
    for name in _FUNCTIONS:
        bind_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0)
    bind_symbol("tilewright_ndarray", id(np.ndarray))
    for dtype in dtypes.ALL:
        bind_symbol(f"tilewright_descr_{dtype.name}", id(dtype.numpy))
