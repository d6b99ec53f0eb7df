"""An array of packed blocks: bytes on the host or on a device that know which packed dtype they hold.

In: an array of u8 [..., blocks, bytes of one] (NumPy's, a `DeviceArray`, one of another library) and the dtype. Out: an array with the shape its
elements have. It is read by kernels, by `tw.dequantize`, and row by row; blocks are never cut.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError


class PackedArray:
    """Packed blocks with the shape of their elements. `blocks` are the bytes, with one axis more than `shape`: [..., blocks, bytes of one]."""

    __slots__ = ("blocks", "dtype", "shape")

    def __init__(self, blocks: Any, dtype: DType) -> None:
        if not isinstance(dtype, DType) or not dtype.is_packed:
            raise UserError.at("TW009", f"{dtype!r} is no dtype of packed blocks", help="use tw.q4_0, tw.q8_0, tw.q4_k …")
        shape = tuple(int(extent) for extent in getattr(blocks, "shape", ()))
        if len(shape) < 2 or shape[-1] != dtype.block_bytes or str(getattr(blocks, "dtype", "")).removeprefix("torch.") not in ("uint8", "u8"):
            raise UserError.at(
                "TW004", f"blocks of {dtype} are bytes (u8) with a last axis of {dtype.block_bytes}, got {getattr(blocks, 'dtype', type(blocks).__name__)}{list(shape)}",
                help="give [..., blocks, bytes of one block]",
            )  # fmt: skip
        self.blocks: Any = blocks
        self.dtype: DType = dtype
        self.shape: tuple[int, ...] = (*shape[:-2], shape[-2] * dtype.block)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements there are."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes the blocks have."""
        return self.size // self.dtype.block * self.dtype.block_bytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: object) -> PackedArray:
        """A view along the leading axes. The last axis, which lies in blocks, is never cut."""
        parts = index if isinstance(index, tuple) else (index,)
        spread = self.ndim - sum(part is not Ellipsis and part is not None for part in parts)
        full: list[object] = []
        for part in parts:
            full += [slice(None)] * spread if part is Ellipsis else [part]
        if None in full:
            raise UserError.at("TW009", f"an axis cannot be put into {self!r}", help="reshape what it is made of")
        if len(full) > self.ndim:
            raise UserError.at("TW003", f"{len(full)} indices for {self!r}")
        if len(full) == self.ndim:
            last = full.pop()
            if last != slice(None):
                raise UserError.at(
                    "TW013", f"the last axis of {self!r} lies in blocks of {self.dtype.block} and cannot be indexed or cut",
                    help="index the axes before it, or unpack it with tw.dequantize",
                )  # fmt: skip
        return PackedArray(self.blocks[tuple(full)], self.dtype) if full else self

    def reshape_rows(self, *lead: int) -> PackedArray:
        """The same with other axes before the last one."""
        return PackedArray(self.blocks.reshape((*lead, *self.blocks.shape[-2:])), self.dtype)

    def __array__(self, *args: object, **keywords: object) -> Any:
        raise TypeError(f"{self!r} holds packed blocks; unpack it with tw.dequantize, or take its bytes, .blocks")

    def __repr__(self) -> str:
        return f"PackedArray({self.dtype}[{', '.join(map(str, self.shape))}])"
