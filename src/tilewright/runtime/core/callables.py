"""Classes whose objects Python calls straight into machine code. In: a class with `__call__`; out: a subclass whose objects hold a code address.

Python calls an object by its `__call__` through a tuple and a look-up, which takes longer than a short function. Objects of these classes have a
vectorcall slot: once `set_code` has put an address there, a call goes to it with the arguments as they lie. Until then calls go to `__call__`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TypeVar

T = TypeVar("T")

_HEADER = object.__basicsize__
_VECTORCALL, _DICTIONARY, _WEAK = _HEADER, _HEADER + 8, _HEADER + 16
_SSIZE, _READONLY = 19, 1
_TP_MEMBERS, _TP_GETSET = 72, 73
_HAVE_VECTORCALL, _BASETYPE, _DEFAULT = 1 << 11, 1 << 10, 1 << 18


class _MemberDefinition(ctypes.Structure):
    """CPython's PyMemberDef."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("type", ctypes.c_int), ("offset", ctypes.c_ssize_t), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    ]  # fmt: skip


class _AccessDefinition(ctypes.Structure):
    """CPython's PyGetSetDef."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("get", ctypes.c_void_p), ("set", ctypes.c_void_p), ("doc", ctypes.c_char_p), ("closure", ctypes.c_void_p),
    ]  # fmt: skip


class _TypeSlot(ctypes.Structure):
    """CPython's PyType_Slot."""

    _fields_ = [("slot", ctypes.c_int), ("value", ctypes.c_void_p)]


class _TypeSpec(ctypes.Structure):
    """CPython's PyType_Spec."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("basicsize", ctypes.c_int), ("itemsize", ctypes.c_int), ("flags", ctypes.c_uint),
        ("slots", ctypes.POINTER(_TypeSlot)),
    ]  # fmt: skip


_kept: list[object] = []
"""What the classes point to: CPython copies none of it."""


def _python(name: str) -> int:
    """Where a function of Python's C API is."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


@functools.cache
def with_code(base: type[T]) -> type[T]:
    """A subclass of `base`, which has `__slots__ = ()`, whose objects take a code address. `base` itself where this interpreter makes no such class."""
    if sys.implementation.name != "cpython" or base.__basicsize__ != _HEADER:
        return base
    members = (_MemberDefinition * 4)(
        _MemberDefinition(b"__vectorcalloffset__", _SSIZE, _VECTORCALL, _READONLY, None),
        _MemberDefinition(b"__dictoffset__", _SSIZE, _DICTIONARY, _READONLY, None),
        _MemberDefinition(b"__weaklistoffset__", _SSIZE, _WEAK, _READONLY, None),
        _MemberDefinition(),
    )
    accesses = (_AccessDefinition * 2)(
        _AccessDefinition(b"__dict__", _python("PyObject_GenericGetDict"), _python("PyObject_GenericSetDict"), None, None), _AccessDefinition()
    )
    slots = (_TypeSlot * 3)(
        _TypeSlot(_TP_MEMBERS, ctypes.addressof(members)), _TypeSlot(_TP_GETSET, ctypes.addressof(accesses)), _TypeSlot()
    )
    name = f"{base.__module__}.{base.__name__}".encode()
    spec = _TypeSpec(name, _HEADER + 24, 0, _DEFAULT | _HAVE_VECTORCALL, slots)
    _kept.extend((members, accesses, slots, name, spec))
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object)(_python("PyType_FromSpecWithBases"))
    made: type[T] = make(ctypes.addressof(spec), (base,))
    if not made.__flags__ & _HAVE_VECTORCALL or made.__basicsize__ != _HEADER + 24:
        return base
    made.__doc__ = base.__doc__
    return made


def takes_code(kind: type) -> bool:
    """Whether objects of a class take a code address."""
    return bool(kind.__flags__ & _HAVE_VECTORCALL) and kind.__basicsize__ == _HEADER + 24


def set_code(item: object, address: int) -> None:
    """Calls of the object go to the code at `address` from now on: `ptr (ptr self, ptr args, i64 count, ptr names)`. The caller keeps the code alive."""
    assert takes_code(type(item))
    ctypes.c_void_p.from_address(id(item) + _VECTORCALL).value = address
