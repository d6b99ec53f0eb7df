"""DLPack: the structs array libraries exchange. In: a description of memory and its `Buffer`, or a capsule of another library; out: a
capsule, or the description in it.

A capsule is of the versioned form where the consumer asks for it, else of the form every consumer accepts. While it, or the consumer
that took it over, is alive the block is on loan and its memory stays. The C callbacks below may run at any time, also late in
interpreter shutdown; so they and all they touch are kept alive for the whole process.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewright.base import dtypes
from tilewright.base.dtypes import DType, bf16, f8e4m3, f8e5m2
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.core.device import Buffer

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
VERSION = (1, 0)
_READ_ONLY, _COPIED = 1, 2

_KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
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


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Loan = tuple[_Managed | _ManagedVersioned, ctypes.Array[ctypes.c_int64], ctypes.Array[ctypes.c_int64], Buffer]
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"
_USED = {_NAME: b"used_dltensor", _NAME_VERSIONED: b"used_dltensor_versioned"}

# Prototypes of our own: `ctypes.pythonapi.<name>` is shared by the process, and others may have set its argument types.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_keep_forever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def _make_callbacks(
    is_valid: Callable[[int, bytes], int], get_pointer: Callable[[int, bytes], int], names: tuple[bytes, ...]
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
        for name in names:
            if is_valid(capsule, name):
                end_loan(get_pointer(capsule, name))

    return loans, _Deleter(end_loan), _Destructor(drop_capsule)


_loans, _deleter, _destructor = _make_callbacks(_is_valid, _get_pointer, (_NAME, _NAME_VERSIONED))
_keep_forever(_deleter)
_keep_forever(_destructor)
_keep_forever(_USED)


def export(
    block: Buffer,
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
    device: tuple[int, int],
    versioned: bool = False,
    readonly: bool = False,
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
    managed: _Managed | _ManagedVersioned
    if versioned:
        managed = _ManagedVersioned(*VERSION, None, _deleter, _READ_ONLY if readonly else 0, tensor)
    else:
        managed = _Managed(tensor, None, _deleter)
    address = ctypes.addressof(managed)
    _loans[address] = (managed, extents, steps, block)
    block.lend()
    try:
        capsule: object = _new_capsule(
            address, _NAME_VERSIONED if versioned else _NAME, ctypes.cast(_destructor, ctypes.c_void_p)
        )
    except BaseException:
        del _loans[address]
        block.end_loan()
        raise
    return capsule


# -- import ---------------------------------------------------------------------------------------------------------


class Taken:
    """A tensor taken over from another library; its deleter runs when this goes."""

    __slots__ = ("_address", "_deleter")

    def __init__(self, address: int, deleter: Any) -> None:
        self._address = address
        self._deleter = deleter

    def __del__(self) -> None:
        if self._deleter:
            self._deleter(self._address)


@dataclass(frozen=True)
class Imported:
    """What a capsule says. `keep` owns the memory; strides in elements, None where the array is contiguous."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    device: tuple[int, int]
    readonly: bool
    keep: Taken


CODES: dict[int, DType] = {
    _SPECIAL.get(dtype, _KINDS.get(dtype.kind, 0)) | dtype.bits << 8 | 1 << 16: dtype for dtype in (*dtypes.SCALARS, *dtypes.COMPLEX)
}
"""Dtypes by DLPack's code, bits and lanes as one word."""


_MOST_AXES = 64
_MOST_BYTES = 1 << 62


def _extents(tensor: _Tensor) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape and strides, which lie within the address space."""
    rank = tensor.rank
    if not 0 <= rank <= _MOST_AXES or (rank and not tensor.shape):
        raise UserError.at("TW009", f"a tensor with {rank} axes cannot be an array", help=f"arrays have 0 to {_MOST_AXES} axes, with a shape")
    shape = tuple(tensor.shape[:rank]) if rank else ()
    strides = tuple(tensor.strides[:rank]) if rank and tensor.strides else None
    if any(extent < 0 for extent in shape):
        raise UserError.at("TW009", f"a tensor cannot have shape {list(shape)}")
    size = -(-tensor.dtype.bits // 8)
    reach = sum((extent - 1) * abs(step) for extent, step in zip(shape, strides)) if strides is not None and 0 not in shape else 0
    if max(math.prod(extent or 1 for extent in shape), reach + 1) * size > _MOST_BYTES:
        raise UserError.at("TW009", f"a tensor of shape {list(shape)} and strides {None if strides is None else list(strides)} is larger than memory can be")
    return shape, strides


def take_over(capsule: object) -> Imported:
    """The tensor in a capsule, which is used up. UserError where it holds something that cannot be an array here."""
    name = next((n for n in (_NAME_VERSIONED, _NAME) if _is_valid(id(capsule), n)), None)
    if name is None:
        raise UserError.at("TW009", "the object is no DLPack capsule, or one that was used before")
    address = _get_pointer(id(capsule), name)
    readonly = False
    if name == _NAME_VERSIONED:
        versioned = _ManagedVersioned.from_address(address)
        if versioned.major != VERSION[0]:
            raise UserError.at("TW009", f"the tensor is of DLPack {versioned.major}.{versioned.minor}, not of version 1")
        readonly, tensor, deleter = bool(versioned.flags & _READ_ONLY), versioned.tensor, versioned.deleter
    else:
        managed = _Managed.from_address(address)
        tensor, deleter = managed.tensor, managed.deleter
    kind = tensor.dtype
    dtype = CODES.get(kind.code | kind.bits << 8 | kind.lanes << 16)
    if dtype is None:
        raise UserError.at(
            "TW009", f"tensors of DLPack type code {kind.code}, {kind.bits} bits, {kind.lanes} lanes are not supported on a device"
        )
    shape, strides = _extents(tensor)
    if not tensor.data and 0 not in shape:
        raise UserError.at(
            "TW009", f"a tensor of shape {list(shape)} has no memory", help="it is a stand-in, or its storage was freed: pass one with values"
        )
    pointer = (tensor.data or 0) + tensor.byte_offset
    device = (tensor.device.type, tensor.device.id)
    # From here on the tensor is ours, and so is the duty to end it.
    _set_name(capsule, _USED[name])
    return Imported(pointer, shape, strides, dtype, device, readonly, Taken(address, deleter))
