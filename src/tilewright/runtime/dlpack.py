"""DLPack export: the struct other array libraries read. In: a description of memory and its `Block`; out: a capsule.

The capsule is the unversioned form every consumer accepts. While it, or the consumer that took it over, is alive the block is on
loan and its memory stays. The two C callbacks below may run at any time, also late in interpreter shutdown; so they and all they
touch are kept alive for the whole process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from tilewright.base.dtypes import DType, bf16, f8e4m3, f8e5m2
from tilewright.base.errors import DeviceError
from tilewright.runtime.device_memory import Block

CPU = 1
CUDA = 2

_KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}
_SPECIAL = {bf16: 4, f8e4m3: 10, f8e5m2: 12}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("rank", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_Loan = tuple[_Managed, ctypes.Array[ctypes.c_int64], ctypes.Array[ctypes.c_int64], Block]
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_NAME = b"dltensor"

# Prototypes of our own: `ctypes.pythonapi.<name>` is shared by the process, and others may have set its argument types.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_keep_forever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def _make_callbacks(
    is_valid: Callable[[int, bytes], int], get_pointer: Callable[[int, bytes], int], name: bytes
) -> tuple[dict[int, _Loan], ctypes._CFunctionType, ctypes._CFunctionType]:
    """The loans under way, what ends one, and what a dropped capsule runs. Closures, since module globals die at exit."""
    loans: dict[int, _Loan] = {}

    def end_loan(address: int) -> None:
        loan = loans.pop(address, None)
        if loan is not None:
            loan[3].end_loan()

    def drop_capsule(capsule: int) -> None:
        # The capsule is dying and must not be made a Python object again: it stays an address.
        # A consumer that took the tensor over has renamed the capsule and will call the deleter itself.
        if is_valid(capsule, name):
            end_loan(get_pointer(capsule, name))

    return loans, _Deleter(end_loan), _Destructor(drop_capsule)


_loans, _deleter, _destructor = _make_callbacks(_is_valid, _get_pointer, _NAME)
_keep_forever(_deleter)
_keep_forever(_destructor)


def export(
    block: Block, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, device: tuple[int, int]
) -> object:
    """A capsule for the strided array at `pointer` inside `block`; strides in elements."""
    code = _SPECIAL.get(dtype, _KINDS.get(dtype.kind))
    if code is None:
        raise DeviceError.at("TW033", f"an array of {dtype} cannot be shared through DLPack", help="share its bytes as u8")
    rank = len(shape)
    extents, steps = (ctypes.c_int64 * rank)(*shape), (ctypes.c_int64 * rank)(*strides)
    tensor = _Tensor(
        pointer, _Device(*device), rank, _DataType(code, dtype.bits, 1),
        ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64)), ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64)), 0,
    )  # fmt: skip
    managed = _Managed(tensor, None, _deleter)
    address = ctypes.addressof(managed)
    _loans[address] = (managed, extents, steps, block)
    block.lend()
    capsule: object = _new_capsule(address, _NAME, ctypes.cast(_destructor, ctypes.c_void_p))
    return capsule
