"""Where the running CPython and NumPy keep what an entry stub reads: object headers, array fields, the key of their ABI.

Entry stubs read these fields without a call. Offsets are taken from the running interpreter, and `stubs_work` compares what they
yield with what Python says of a real array, so that an unknown build gets no stub instead of a wrong one.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig

import numpy as np

HEADER = object.__basicsize__
"""Bytes of the object header; the type pointer is its last word."""
TYPE = HEADER - 8
FLOAT_VALUE = HEADER
INT_SIZE = HEADER
INT_DIGIT = HEADER + 8
TUPLE_SIZE = HEADER
TUPLE_ITEMS = tuple.__basicsize__

ARRAY_DATA = HEADER
ARRAY_RANK = HEADER + 8
ARRAY_SHAPE = HEADER + 16
ARRAY_STRIDES = HEADER + 24
ARRAY_DESCR = HEADER + 40
ARRAY_FLAGS = HEADER + 48

C_CONTIGUOUS = 0x1
ALIGNED = 0x100
WRITEABLE = 0x400

# Indices in NumPy's C function table; the table is append-only.
NUMPY_RETURN = 76
NUMPY_EMPTY = 184


@functools.cache
def stubs_work() -> bool:
    """Whether entry stubs can read this interpreter's objects."""
    # Builds without the lock begin with 3.13; the table that says so takes a while to load.
    if sys.implementation.name != "cpython" or (sys.version_info >= (3, 13) and sysconfig.get_config_var("Py_GIL_DISABLED")):
        return False
    if ctypes.sizeof(ctypes.c_void_p) != 8 or sys.byteorder != "little":
        return False
    array = np.zeros((3, 5), np.float32)[:, ::2]
    number, pair = 0.7310585786, (array, "second")

    def word(address: int) -> int:
        return ctypes.c_int64.from_address(address).value

    def number32(address: int) -> int:
        return ctypes.c_int32.from_address(address).value

    at = id(array)
    shape, strides = word(at + ARRAY_SHAPE), word(at + ARRAY_STRIDES)
    flags = number32(at + ARRAY_FLAGS)
    return (
        word(at + TYPE) == id(np.ndarray)
        and word(at + ARRAY_DATA) == array.__array_interface__["data"][0]
        and number32(at + ARRAY_RANK) == 2
        and (word(shape), word(shape + 8)) == array.shape
        and (word(strides), word(strides + 8)) == array.strides
        and word(at + ARRAY_DESCR) == id(array.dtype)
        and flags & (C_CONTIGUOUS | ALIGNED | WRITEABLE) == ALIGNED | WRITEABLE
        and ctypes.c_double.from_address(id(number) + FLOAT_VALUE).value == number
        and word(id(pair) + TUPLE_SIZE) == 2
        and word(id(pair) + TUPLE_ITEMS + 8) == id(pair[1])
    )


@functools.cache
def small_ints() -> str:
    """How this interpreter keeps whole numbers below 2^30: `size` (a signed count of digits, then the digit), `tag` (from 3.12 on: the sign in two bits below
    the count), or '' where neither reads back what Python says."""
    samples = (0, 1, -1, 7, -300, (1 << 30) - 1, 1 - (1 << 30))

    def word(value: int) -> int:
        return ctypes.c_int64.from_address(id(value) + INT_SIZE).value

    def digit(value: int) -> int:
        return ctypes.c_uint32.from_address(id(value) + INT_DIGIT).value

    if not stubs_work():
        return ""
    if all(-1 <= word(v) <= 1 and word(v) * digit(v) == v for v in samples) and not -1 <= word(1 << 30) <= 1:
        return "size"
    if all(0 <= word(v) < 16 and (1 - (word(v) & 3)) * digit(v) == v for v in samples) and not 0 <= word(1 << 30) < 16:
        return "tag"
    return ""


def abi_key() -> str:
    """What a stub's code depends on beside its artifact; part of the cache key of a host part."""
    numpy_major = np.__version__.split(".", 1)[0]
    return f"{sys.implementation.cache_tag}|numpy{numpy_major}|{HEADER}|{TUPLE_ITEMS}|{small_ints()}"
