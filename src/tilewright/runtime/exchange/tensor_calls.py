"""Calls with PyTorch's tensors in host memory that no line of Python sees. In: an entry stub and where other calls go; out: a builtin function.

The machine code (`codegen/host/tensor_entry.py`) reads what it must know of PyTorch from a table that is filled here. Before it is used it is tried: each
dtype makes its way there and back, as arrays and as numbers. What does not come back as it was is left to Python.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.base import abi
from tilewright.base.forks import fork_safe_lock
from tilewright.runtime.core import machine_code
from tilewright.runtime.core.builtin import METH_FASTCALL_KEYWORDS, MethodDefinition, bind_python, builtin_function
from tilewright.runtime.core.objects import ObjectCode, bind_symbol
from tilewright.runtime.exchange.dlpack import CODES
from tilewright.runtime.exchange.host_tensors import as_tensor, numpy_kinds
from tilewright.runtime.exchange.torch_tensors import TensorAccess, tensor_access

_loading = fork_safe_lock()


class _TensorCode:
    """The machine code, and what it knows of PyTorch."""

    def __init__(self, build: Callable[[], bytes], access: TensorAccess) -> None:
        torch: Any = sys.modules["torch"]
        kinds = numpy_kinds()
        self._kept: list[object] = [torch.Tensor, torch.nn.Parameter, as_tensor, list(kinds.values())]
        self._dtypes = (ctypes.c_uint64 * (2 * abi.TENSOR_MOST_DTYPES))()
        for kind, (own, _) in kinds.items():
            number = _dtype_number(access, torch.empty(0, dtype=kind))
            if number < abi.TENSOR_MOST_DTYPES:
                self._dtypes[2 * number], self._dtypes[2 * number + 1] = id(own), own.itemsize
        codes = {dtype.numpy: code for code, dtype in CODES.items()}
        rows = [(own, codes[own]) for own, _ in kinds.values() if own in codes]
        words = abi.TENSOR_RESULT_BYTES // 8
        self._results = (ctypes.c_uint64 * (words * (len(rows) + 1)))()
        self.table = (ctypes.c_uint64 * (abi.TENSOR_BYTES // 8))()
        ask = access.functions
        fields = {
            abi.TENSOR_TYPE: id(torch.Tensor), abi.TENSOR_PARAMETER: id(torch.nn.Parameter), abi.TENSOR_OFFSET: access.offset,
            abi.TENSOR_KEYS: access.keys, abi.TENSOR_PLAIN: access.plain, abi.TENSOR_INFERENCE: access.inference, abi.TENSOR_GRADIENT: access.gradient,
            abi.TENSOR_DTYPES: ctypes.addressof(self._dtypes), abi.TENSOR_RESULTS: ctypes.addressof(self._results), abi.TENSOR_ADOPT: access.adopt,
            abi.TENSOR_PYTHON: id(as_tensor), abi.TENSOR_DATA: ask["aoti_torch_get_data_ptr"], abi.TENSOR_DIM: ask["aoti_torch_get_dim"],
            abi.TENSOR_SIZES: ask["aoti_torch_get_sizes"], abi.TENSOR_STRIDES: ask["aoti_torch_get_strides"], abi.TENSOR_DTYPE: ask["aoti_torch_get_dtype"],
            abi.TENSOR_GRADIENTS_ON: access.gradients_on, abi.TENSOR_REQUIRES: ask["tilewright_requires_grad"],
        }  # fmt: skip
        for field, value in fields.items():
            self.table[field // 8] = value
        bind_python()
        bind_symbol("tilewright_ndarray", id(np.ndarray))
        bind_symbol(abi.TENSORS, ctypes.addressof(self.table))
        self._objects = ObjectCode(build())
        self.adopt = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(self._objects.address(abi.TENSORS_ADOPT))
        self._call = MethodDefinition(b"kernel", self._objects.address(abi.TENSORS_CALL), METH_FASTCALL_KEYWORDS, None)
        good = 0
        for own, code in rows if access.adopt else []:
            self._results[words * good : words * good + words] = [id(own), id(own.type) if own.kind != "b" else 0, code]
            good += self._comes_back(own)
        self._results[words * good : words * good + words] = [0] * words

    def _comes_back(self, dtype: np.dtype) -> bool:
        """Whether tensors made of arrays and numbers of the dtype are what they should be."""
        try:
            for value in (np.arange(6).reshape(2, 3).astype(dtype), np.ones((), dtype)[()]):
                made, wanted = self.adopt(value), as_tensor(value.copy())
                if made.dtype != wanted.dtype or made.shape != wanted.shape or not _equal(made, wanted):
                    return False
        except (RuntimeError, TypeError, ValueError, BufferError):
            return False
        return True

    def function(self, stub: Callable[..., object], rest: Callable[..., object]) -> Callable[..., object]:
        """The function for calls of one kernel."""
        return builtin_function(self._call, (stub, rest))


def _equal(made: Any, wanted: Any) -> bool:
    return bool((made == wanted).all()) if made.is_complex() else bool((made.double() == wanted.double()).all())


def _dtype_number(access: TensorAccess, tensor: Any) -> int:
    """PyTorch's number of a dtype."""
    got = ctypes.c_int32()
    question = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(access.functions["aoti_torch_get_dtype"])
    status = question(id(tensor) + access.offset, ctypes.addressof(got))
    return abi.TENSOR_MOST_DTYPES if status else got.value


@functools.cache
def _code() -> _TensorCode | None:
    """The process's code, which is never freed: tensors anywhere may have to be released through it."""
    access, build = tensor_access(), machine_code.builder("tensors")
    if access is None or build is None or not access.keys or not access.gradients_on:
        return None
    made = _TensorCode(build, access)
    ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))(made)
    return made


def tensor_call(stub: Callable[..., object], rest: Callable[..., object]) -> Callable[..., object] | None:
    """A function that takes calls with tensors in host memory to `stub`, and all others to `rest`. The stub must be machine code that hands nothing on.
    None where PyTorch is not there, or not known well enough."""
    if tensor_access() is None:
        return None
    with _loading:
        code = _code()
    return None if code is None else code.function(stub, rest)
