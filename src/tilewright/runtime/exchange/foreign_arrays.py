"""Arrays of other libraries on a CUDA device, as they describe themselves. In: an object; out: pointer, shape, strides, dtype, stream.

Read are `__cuda_array_interface__`, and the methods of PyTorch where that says too little. DLPack is in `dlpack`.
"""

from __future__ import annotations

from typing import Any

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.runtime.memory.device_array import foreign_dtype, row_major

Description = tuple[int, tuple[int, ...], tuple[int, ...], DType, int | None, bool]

_torch_dtypes: dict[object, DType] = {}


def torch_dtype(tensor: Any) -> DType:
    """The dtype of a PyTorch tensor; UserError where there is no such dtype here."""
    kind = tensor.dtype
    found = _torch_dtypes.get(kind)
    if found is None:
        found = foreign_dtype(tensor, "")
        if found is None:
            raise UserError.at("TW009", f"arrays of {kind} are not supported on a device")
        _torch_dtypes[kind] = found
    return found


def describe(item: object) -> Description:
    """Pointer, shape, strides in elements, dtype, producer's stream (None where it wants no waiting) and read-only flag."""
    interface = None
    try:
        interface = getattr(item, "__cuda_array_interface__", None)
    except (KeyError, TypeError, RuntimeError):
        # PyTorch has no code for its 8-bit floats and refuses tensors that need gradients; its own methods tell all.
        if getattr(item, "requires_grad", False):
            raise
    if isinstance(interface, dict):
        return _from_interface(item, interface)
    data_pointer, stride = getattr(item, "data_ptr", None), getattr(item, "stride", None)
    if data_pointer is None or stride is None or not getattr(item, "is_cuda", False):
        raise UserError.at(
            "TW009",
            f"a {type(item).__name__} is not an array on a CUDA device",
            help="pass a DeviceArray, or an array with __cuda_array_interface__ (PyTorch, CuPy, Numba, JAX)",
        )
    dtype = foreign_dtype(item, "")
    if dtype is None:
        raise UserError.at("TW009", f"arrays of {getattr(item, 'dtype', '?')} are not supported on a device")
    return _with_memory(int(data_pointer()), tuple(getattr(item, "shape", ()))), tuple(getattr(item, "shape", ())), tuple(stride()), dtype, None, False


def _from_interface(item: object, interface: dict[str, Any]) -> Description:
    typestr = str(interface["typestr"])
    dtype = foreign_dtype(item, typestr)
    if dtype is None:
        raise UserError.at("TW009", f"arrays of type '{typestr}' are not supported on a device")
    if interface.get("mask") is not None:
        raise UserError.at("TW009", "masked arrays are not supported on a device")
    shape = tuple(int(extent) for extent in interface["shape"])
    steps = interface.get("strides")
    if steps is not None and any(step % dtype.itemsize for step in steps):
        raise UserError.at("TW009", f"strides {tuple(steps)} are not multiples of the {dtype.itemsize} bytes of {dtype}")
    strides = row_major(shape) if steps is None else tuple(int(step) // dtype.itemsize for step in steps)
    if any(extent < 0 for extent in shape) or (steps is not None and len(steps) != len(shape)):
        raise UserError.at("TW009", f"an array cannot have shape {list(shape)} and strides {steps}")
    pointer, readonly = interface["data"]
    return _with_memory(int(pointer or 0), shape), shape, strides, dtype, interface.get("stream"), bool(readonly)


def _with_memory(pointer: int, shape: tuple[int, ...]) -> int:
    """An address, which an array with elements has."""
    if not pointer and 0 not in shape:
        raise UserError.at(
            "TW009", f"an array of shape {list(shape)} has no memory", help="it is a stand-in, or its storage was freed: pass one with values"
        )
    return pointer
