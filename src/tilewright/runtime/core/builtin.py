"""Machine code as builtin functions of Python. In: an address with a signature of CPython's C API; out: a function object.

Also binds the part of Python's C API that entry stubs call, by address, since not every Python exports it to the process.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

from tilewright.runtime.core.objects import bind_symbol

METH_FASTCALL_KEYWORDS = 0x80 | 0x02
METH_NOARGS = 0x04

_FUNCTIONS = (
    "PyFloat_AsDouble", "PyLong_AsLongLong", "PyErr_Occurred", "PyErr_Clear", "PyErr_CheckSignals", "PyErr_SetNone", "PyOS_getsig",
    "PyOS_InterruptOccurred", "PyErr_SetInterrupt",
    "PyObject_CallMethod",
    "PyUnicode_CompareWithASCIIString", "PyEval_SaveThread", "PyEval_RestoreThread", "PyTuple_New", "PyTuple_SetItem",
    "PyTuple_GetItem", "PyObject_Vectorcall", "PyObject_VectorcallMethod", "PyLong_AsUnsignedLongLong",
    "PyLong_AsUnsignedLongLongMask", "PyLong_FromUnsignedLongLong",
    "PyBytes_FromStringAndSize", "PyList_GetItem", "Py_IncRef", "Py_DecRef",
    "PyErr_NoMemory", "Py_IsInitialized", "PyGILState_Ensure", "PyGILState_Release",
)  # fmt: skip
_OBJECTS: dict[str, object] = {
    "_Py_NotImplementedStruct": NotImplemented, "_Py_NoneStruct": None, "_Py_TrueStruct": True, "_Py_FalseStruct": False,
    "PyFloat_Type": float, "PyTuple_Type": tuple, "PyLong_Type": int, "tilewright_name_out": sys.intern("out"),
    "tilewright_keyboard_interrupt": KeyboardInterrupt,
}  # fmt: skip


class MethodDefinition(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


@functools.cache
def bind_python() -> None:
    """Bind Python's C API and the objects stubs name."""
    for name in _FUNCTIONS:
        bind_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0)
    for name, value in _OBJECTS.items():
        bind_symbol(name, id(value))


def builtin_function(definition: MethodDefinition, owner: object) -> Callable[..., Any]:
    """A builtin function. Its `__self__` is `owner`, which must hold the definition and the code and is released last."""
    create = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ctypes.cast(ctypes.pythonapi.PyCFunction_NewEx, ctypes.c_void_p).value or 0
    )
    made: Callable[..., Any] = create(ctypes.addressof(definition), owner, None)
    return made
