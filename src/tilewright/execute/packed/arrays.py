"""`tw.quantize`, `tw.dequantize` and `tw.packed_array`: arrays of packed blocks.

In: arrays on the host, on a device, or of another library. Out: a `PackedArray` where the values were, and back. Numbers are rounded on the host;
they are unpacked where they are, by a kernel on devices.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType, f16, f32
from tilewright.base.errors import UserError
from tilewright.base.packed.dequantize import dequantize_blocks
from tilewright.base.packed.quantize import join_group, quantize_blocks
from tilewright.execute.arrays import array_of, as_dtype, to_device
from tilewright.execute.calls.run import Runner
from tilewright.execute.devices import find_device
from tilewright.frontend.python.kernels import parse_function
from tilewright.runtime.exchange.host_tensors import as_array, as_tensor, has_host_tensors
from tilewright.runtime.exchange.libraries import foreign_device, is_foreign
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.packed_array import PackedArray


def packed_dtype(dtype: object, what: str) -> DType:
    """A packed dtype given as ours or by name."""
    if isinstance(dtype, str) and dtypes.is_name(dtype):
        dtype = dtypes.by_name(dtype)
    if not isinstance(dtype, DType) or not dtype.is_packed:
        known = ", ".join(d.name for d in dtypes.ALL if d.is_packed)
        raise UserError.at("TW009", f"{what} takes a packed dtype, got {dtype!r}", help=f"use {known}, or tw.q4_group(…), tw.q8_group(…)")
    return dtype


def quantize(values: Any, dtype: DType | str) -> PackedArray:
    """The values as packed blocks, on the device they are on. The last axis must be a multiple of the block: 32 or 256 elements."""
    kind = packed_dtype(dtype, "tw.quantize")
    if isinstance(values, PackedArray):
        raise UserError.at("TW009", f"{values!r} is packed already", help="unpack it with tw.dequantize first")
    if has_host_tensors([values]):
        return PackedArray(as_tensor(_on_host(np.asarray(as_array(values)), kind)), kind)
    if isinstance(values, DeviceArray) or is_foreign(values):
        array = array_of(values)
        packed = to_device(_on_host(array.numpy(), kind), array.device.id)
        if isinstance(values, DeviceArray):
            return PackedArray(packed, kind)
        # Another library's: its own array over the same memory.
        return PackedArray(_as_library(packed, values), kind)
    return PackedArray(_on_host(array_of(values), kind), kind)


def _as_library(packed: DeviceArray, like: Any) -> Any:
    library: Any = sys.modules.get(type(like).__module__.partition(".")[0])
    return library.from_dlpack(packed) if hasattr(library, "from_dlpack") else packed


def _on_host(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Bytes [..., blocks, bytes of one] of numbers on the host."""
    if not values.ndim:
        raise UserError.at("TW003", f"a number cannot be packed as {dtype}, whose blocks have {dtype.block} elements")
    cols = values.shape[-1]
    if cols % dtype.block:
        raise UserError.at("TW004", f"the last axis has {cols} elements, and {dtype} has blocks of {dtype.block}", help=f"pad it to {-(-cols // dtype.block) * dtype.block}")
    found = dtypes.from_numpy(values.dtype)
    if found is None or not (found.is_float or found.is_int):
        raise UserError.at("TW009", f"values of {values.dtype} cannot be packed", help="convert them to f32")
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, dtype.block)
    if not np.isfinite(rows).all():
        raise UserError.at("TW006", f"the values hold NaN or infinity, which {dtype} has no form for", help="replace them first")
    return quantize_blocks(rows, dtype).reshape(*values.shape[:-1], cols // dtype.block, dtype.block_bytes)


def dequantize(packed: PackedArray, dtype: object = f32) -> Any:
    """The elements of packed blocks as plain numbers, on the device the blocks are on: exact in f32, then rounded to `dtype`."""
    if not isinstance(packed, PackedArray):
        raise UserError.at("TW009", f"tw.dequantize takes a packed array, got a {type(packed).__name__}", help="make one with tw.quantize")
    kind = as_dtype(dtype)
    if not kind.is_float:
        raise UserError.at("TW009", f"packed blocks are unpacked as floats, not as {kind}")
    blocks = packed.blocks
    if isinstance(blocks, DeviceArray) or is_foreign(blocks):
        place = blocks.device.id if isinstance(blocks, DeviceArray) else foreign_device(blocks)
        rows = packed.reshape_rows(packed.size // packed.shape[-1] if packed.shape[-1] else 0)
        result: Any = _unpacker(kind).run({"w": rows}, find_device(place))
        return result.reshape(packed.shape)
    is_tensor = has_host_tensors([blocks])
    array = np.asarray(as_array(blocks) if is_tensor else blocks)
    found = dequantize_blocks(np.ascontiguousarray(array).reshape(-1, packed.dtype.block_bytes), packed.dtype).reshape(packed.shape)
    with np.errstate(over="ignore"):
        found = found.astype(kind.numpy, copy=False)
    return as_tensor(found) if is_tensor else found


@functools.cache
def _unpacker(dtype: DType) -> Runner:
    """A kernel that unpacks rows."""
    from tilewright.frontend import words as tw

    def unpack(w: tw.Array) -> tw.Array:
        rows, cols = w.shape
        out = tw.empty((rows, cols), dtype)
        for i, j in tw.grid(rows, cols):
            out[i, j] = w[i, j]
        return out

    return Runner(parse_function(unpack))


# -- groups ---------------------------------------------------------------------------------------------------------------


def q4_group(block: int = 32, *, scale: DType = f16, zero_point: bool = False) -> DType:
    """Groups of `block` numbers of four bits with one scale each, and a zero point (8 without one): `(q - zero) * scale`."""
    return _group(4, block, scale, zero_point)


def q8_group(block: int = 32, *, scale: DType = f16, zero_point: bool = False) -> DType:
    """Groups of `block` numbers of eight bits with one scale each, and a zero point (128 without one): `(q - zero) * scale`."""
    return _group(8, block, scale, zero_point)


def _group(bits: int, block: int, scale: DType, zero_point: bool) -> DType:
    for dtype in dtypes.GROUPS:
        if (dtype.bits, dtype.block, dtype.scale, dtype.zero_point) == (bits, block, getattr(scale, "name", scale), zero_point):
            return dtype
    blocks = ", ".join(map(str, dtypes.GROUP_BLOCKS))
    raise UserError.at("TW016", f"no groups of {block} numbers with scales of {scale}", help=f"blocks have {blocks} numbers, scales are f16 or f32")


def packed_array(numbers: Any, scales: Any, zero_points: Any = None, *, bits: int = 4) -> PackedArray:
    """Weights as ONNX's `MatMulNBits` has them, as one packed array [n, k]: `numbers` u8 [n, k / block, block * bits / 8], `scales` f16 or f32
    [n, k / block], and `zero_points` u8, packed along each row as the numbers are (4 bits: two in a byte), if there are any."""
    values, factors = np.asarray(numbers), np.asarray(scales)
    if bits not in (4, 8) or values.ndim != 3 or values.dtype != np.uint8:
        raise UserError.at("TW004", f"numbers are {values.dtype}{list(values.shape)} with bits={bits}", help="give u8 [n, k / block, block * bits / 8], bits 4 or 8")
    n, groups, width = values.shape
    factors = factors.reshape(n, -1) if factors.size == n * groups else factors
    kind = dtypes.from_numpy(factors.dtype)
    if factors.shape != (n, groups) or kind not in (f16, f32):
        raise UserError.at("TW004", f"scales are {factors.dtype}{list(factors.shape)}, and the numbers need f16 or f32 [{n}, {groups}]")
    assert kind is not None
    dtype = _group(bits, width * 8 // bits, kind, zero_points is not None)
    rows = values.reshape(n * groups, width)
    plain = np.stack([rows & 15, rows >> 4], axis=-1).reshape(n * groups, -1) if bits == 4 else rows
    zero = None
    if zero_points is not None:
        found = np.asarray(zero_points)
        each = -(-groups * bits // 8)
        if found.dtype != np.uint8 or found.size != n * each:
            raise UserError.at("TW004", f"zero points are {found.dtype}{list(found.shape)}, and the numbers need u8 [{n}, {each}]")
        found = found.reshape(n, each)
        zero = (np.stack([found & 15, found >> 4], axis=-1).reshape(n, -1)[:, :groups] if bits == 4 else found).reshape(n * groups, 1)
    blocks = join_group(plain, np.ascontiguousarray(factors).reshape(n * groups, 1), zero, dtype)
    return PackedArray(blocks.reshape(n, groups, dtype.block_bytes), dtype)
