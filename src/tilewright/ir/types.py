"""Types of IR values.

    f32                                        one number
    vec<f32, 4>                                thread stage: a short vector in one thread's registers
    tile<f32, [64, 128]>                       tile stage: a block's value of static shape, with a layout once assigned
    tensor<f32, [rows, cols], [cols, 1]>       memory: shape, strides in elements, then space and alignment if not default
    map<bf16, [128, 64], 128>                  how the copy engine sees a tensor: the box of one copy, and its swizzle
    map<bf16, [1, 1, 1, 64], 128, pixels=128>  the same for images: one copy moves that many pixels, each a box
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, bool_, i64
from tilewright.base.record import record
from tilewright.base.sizes import Size, contiguous_strides
from tilewright.ir.layouts import Layout

SPACES = ("global", "shared", "constant", "local")
"""Address spaces a tensor can live in (PTX numbers 1, 3, 4, 5)."""
_set = object.__setattr__


@record
class Scalar:
    dtype: DType

    def __init__(self, dtype: DType) -> None:
        _set(self, "dtype", dtype)

    def __eq__(self, other: object) -> bool:
        return self.dtype == other.dtype if isinstance(other, Scalar) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.dtype,))

    def __str__(self) -> str:
        return self.dtype.name


@record
class Vec:
    dtype: DType
    width: int

    def __init__(self, dtype: DType, width: int) -> None:
        _set(self, "dtype", dtype)
        _set(self, "width", width)

    def __eq__(self, other: object) -> bool:
        return self.width == other.width and self.dtype == other.dtype if isinstance(other, Vec) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.dtype, self.width))

    def __str__(self) -> str:
        return f"vec<{self.dtype}, {self.width}>"


@record
class Tile:
    dtype: DType
    shape: tuple[int, ...]
    layout: Layout | None = None

    def __init__(self, dtype: DType, shape: tuple[int, ...], layout: Layout | None = None) -> None:
        _set(self, "dtype", dtype)
        _set(self, "shape", shape)
        _set(self, "layout", layout)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tile):
            return NotImplemented
        return self.shape == other.shape and self.dtype == other.dtype and self.layout == other.layout

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self.layout))

    def __str__(self) -> str:
        layout = f", {self.layout}" if self.layout else ""
        return f"tile<{self.dtype}, [{', '.join(map(str, self.shape))}]{layout}>"


@record
class Tensor:
    dtype: DType
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    space: str = "global"
    align: int = 0
    """Bytes the first element's address is known to be a multiple of; 0 means the element's own size."""

    def __init__(self, dtype: DType, shape: tuple[Size, ...], strides: tuple[Size, ...], space: str = "global", align: int = 0) -> None:
        _set(self, "dtype", dtype)
        _set(self, "shape", shape)
        _set(self, "strides", strides)
        _set(self, "space", space)
        _set(self, "align", align)

    def __str__(self) -> str:
        text = f"tensor<{self.dtype}, [{', '.join(map(str, self.shape))}], [{', '.join(map(str, self.strides))}]"
        if self.space != "global":
            text += f", {self.space}"
        if self.align:
            text += f", align={self.align}"
        return text + ">"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_contiguous(self) -> bool:
        return self.strides == contiguous_strides(self.shape)


@record
class CopyMap:
    dtype: DType
    box: tuple[int, ...]
    swizzle: int = 0
    pixels: int = 0
    """Boxes one copy moves, along w, h and n of an image; 0 where it moves a single box."""

    def __str__(self) -> str:
        pixels = f", pixels={self.pixels}" if self.pixels else ""
        return f"map<{self.dtype}, [{', '.join(map(str, self.box))}], {self.swizzle}{pixels}>"


Type = Scalar | Vec | Tile | Tensor | CopyMap
NumberType = Scalar | Vec | Tile
INDEX = Scalar(i64)
BOOL = Scalar(bool_)


def with_dtype(type_: Type, dtype: DType) -> NumberType:
    """The same container holding another element type."""
    if isinstance(type_, Scalar):
        return Scalar(dtype)
    if isinstance(type_, Vec):
        return Vec(dtype, type_.width)
    if isinstance(type_, Tile):
        return Tile(dtype, type_.shape, type_.layout)
    raise TypeError(f"{type_} holds no numbers")


def is_number(type_: Type) -> bool:
    return isinstance(type_, Scalar | Vec | Tile)


def dtype_of(type_: Type) -> DType:
    """The element type."""
    return type_.dtype


def tensor(dtype: DType, *shape: Size | int | str, space: str = "global", align: int = 0) -> Tensor:
    """A row-major tensor type."""
    sizes = tuple(Size.of(s) for s in shape)
    return Tensor(dtype, sizes, contiguous_strides(sizes), space, align)
