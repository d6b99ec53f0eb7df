"""Tensor maps: the 128 bytes by which a GPU's copy engine knows an array. In: a `MapParam`, an address and sizes; out: the bytes.

The driver encodes them. It takes axes innermost first and strides in bytes, refuses extents of 0 and looks at strides even where
nothing is ever stepped over; `map_form` gives it what it wants. An array without elements is described as a single element at an
address nobody may read: a kernel launched with such a map (a product over k = 0) must not copy by it.

A map with pixels is encoded in the driver's im2col mode, where the corners of the box of positions have their limits too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilewright.base.artifact import MapParam
from tilewright.base.errors import CompilerBug, TargetLimit

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext

MAP_BYTES = 128
MAP_ALIGN = 64
_UNIT = 16
"""Bytes that divide addresses, strides and the rows of a box."""
_MOST_AXES = 5
_MOST_EXTENT = 1 << 32
_MOST_STRIDE = 1 << 40
_MOST_BOX = 256
_MOST_PIXELS = 1024
_MOST_STEP = 8
_CORNERS = {4: (-128, 127), 5: (-16, 15)}
"""By the axes of an image's array."""
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_ELEMENTS = {
    "bool": "UINT8", "i8": "UINT8", "u8": "UINT8", "f8e4m3": "UINT8", "f8e5m2": "UINT8", "i16": "UINT16", "u16": "UINT16",
    "i32": "INT32", "u32": "UINT32", "i64": "INT64", "u64": "UINT64", "f16": "FLOAT16", "bf16": "BFLOAT16", "f32": "FLOAT32",
    "f64": "FLOAT64",
}  # fmt: skip


@dataclass(frozen=True)
class MapForm:
    """A map in the driver's terms: axes innermost first, one stride in bytes for each axis but the first."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    empty: bool
    """The array has no elements, and the extents are not its own."""
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    """Of a map with pixels, along w and h: the corners of the box of positions, from the array's first and last element."""
    steps: tuple[int, ...] = ()


PROMOTION = "L2_128B"
"""How much the L2 cache fetches at once for a copy. 256 bytes cost 10 % where rows are not whole lines of the cache."""


def check_map(param: MapParam, entry: str) -> None:
    """What is wrong with a map whatever the sizes. Raises CompilerBug."""
    row = param.box[-1] * param.dtype.itemsize if param.box else 0
    if param.dtype.name not in _ELEMENTS:
        problem = f"the copy engine does not know {param.dtype}"
    elif not 1 <= len(param.box) <= _MOST_AXES or not len(param.box) == len(param.shape) == len(param.strides):
        problem = f"it has {len(param.shape)} extents, {len(param.strides)} strides and a box of {len(param.box)} axes"
    elif not all(1 <= extent <= _MOST_BOX for extent in param.box) or row % _UNIT:
        problem = f"the box {param.box} is not of 1 to {_MOST_BOX} elements along each axis with rows of a multiple of {_UNIT} bytes"
    elif param.rounds and param.dtype.name != "f32":
        problem = f"{param.dtype} cannot be rounded to tf32"
    elif param.swizzle not in _SWIZZLES or 0 < param.swizzle < row:
        problem = f"rows of {row} bytes cannot be swizzled by {param.swizzle}"
    else:
        problem = _pixel_problem(param)
    if not problem:
        return
    raise CompilerBug.at("TW040", f"kernel '{entry}', map of '{param.array}': {problem}")


def _pixel_problem(param: MapParam) -> str:
    """What is wrong with the pixels of a map; empty where nothing is."""
    counts = {len(param.lower), len(param.upper), len(param.steps)}
    if not param.pixels:
        return "" if counts == {0} else "it has corners or steps but no pixels"
    axes = len(param.box) - 2
    if not 1 <= param.pixels <= _MOST_PIXELS or len(param.box) not in _CORNERS or any(extent != 1 for extent in param.box[:-1]):
        return f"{param.pixels} pixels with the box {param.box} are not 1 to {_MOST_PIXELS} boxes of (1, 1, 1, channels), or of five axes"
    if counts != {axes} or not all(1 <= step <= _MOST_STEP for step in param.steps):
        corners = f"corners {param.lower} and {param.upper}"
        return f"{corners} and steps {param.steps} are not {axes} of each, with steps of 1 to {_MOST_STEP}"
    return ""


def map_form(param: MapParam, sizes: Mapping[str, int]) -> MapForm:
    """The map for these sizes. Raises CompilerBug where a stride is not what the compiler promised."""
    shape = [extent.evaluate(sizes) for extent in param.shape]
    strides = [stride.evaluate(sizes) for stride in param.strides]
    if max(shape) > _MOST_EXTENT:
        raise TargetLimit.at("TW020", f"'{param.array}' is copied as an array of {shape}, but no extent may exceed {_MOST_EXTENT}")
    empty = min(shape) <= 0
    extents = [1] * len(shape) if empty else shape[::-1]
    if extents[0] > 1 and strides[-1] != 1:
        raise CompilerBug.at("TW040", f"map of '{param.array}', {shape} with strides {strides}: the last axis is not dense")
    size = param.dtype.itemsize
    # The stride of an axis with one element is never used but must be legal: that of the axis before serves.
    legal = -(-extents[0] * size // _UNIT) * _UNIT
    steps: list[int] = []
    for extent, stride in zip(extents[1:], strides[-2::-1], strict=True):
        if extent > 1:
            legal = stride * size
            if legal % _UNIT or not 0 <= legal < _MOST_STRIDE:
                raise CompilerBug.at(
                    "TW040", f"map of '{param.array}', {shape} of {param.dtype} with strides {strides}: a stride of {legal} bytes is "
                    f"not a multiple of {_UNIT} below {_MOST_STRIDE}",
                )  # fmt: skip
        steps.append(legal)
    form = MapForm(tuple(extents), tuple(steps), param.box[::-1], empty)
    return _with_corners(param, form, sizes) if param.pixels else form


def _with_corners(param: MapParam, form: MapForm, sizes: Mapping[str, int]) -> MapForm:
    if form.empty:
        axes = len(form.extents)
        return replace(form, lower=(0,) * (axes - 2), upper=(0,) * (axes - 2), steps=(1,) * axes)
    lower, upper = (tuple(size.evaluate(sizes) for size in corner[::-1]) for corner in (param.lower, param.upper))
    corners = f"{list(lower[::-1])} and end at {list(upper[::-1])}"
    least, most = _CORNERS[len(form.extents)]
    if not all(least <= offset <= most for offset in (*lower, *upper)):
        raise TargetLimit.at(
            "TW020", f"'{param.array}' is copied as an image whose positions start at {corners} from its corners, but these must be "
            f"between {least} and {most}",
        )  # fmt: skip
    if any(extent - 1 + high < low for extent, low, high in zip(form.extents[1:-1], lower, upper, strict=True)):
        problem = f"there are no positions that start at {corners} from its corners"
        raise CompilerBug.at("TW040", f"map of '{param.array}', {list(form.extents[::-1])}: {problem}")
    return replace(form, lower=lower, upper=upper, steps=(1, *param.steps[::-1], 1))


def encode_map(device: CudaContext, param: MapParam, address: int, sizes: Mapping[str, int]) -> bytes:
    """The map of the array at `address`. Raises CompilerBug where its form is not what the compiler promised."""
    form = map_form(param, sizes)
    if form.empty:
        # Arrays without elements may lie anywhere, at 0 too, which is no address.
        address = _UNIT
    elif address % _UNIT:
        raise CompilerBug.at("TW040", f"map of '{param.array}': its address {address:#x} is not a multiple of {_UNIT}")
    driver = device.driver
    long, short = driver.module.cuuint64_t, driver.module.cuuint32_t
    function = "cuTensorMapEncodeTiled"
    box: tuple[object, ...] = ([short(extent) for extent in form.box], [short(1)] * len(form.box))
    if param.pixels:
        function = "cuTensorMapEncodeIm2col"
        box = (list(form.lower), list(form.upper), form.box[0], param.pixels, [short(step) for step in form.steps])
    status, encoded = getattr(driver.module, function)(
        driver.constant("CUtensorMapDataType", f"CU_TENSOR_MAP_DATA_TYPE_{'TFLOAT32' if param.rounds else _ELEMENTS[param.dtype.name]}"),
        len(form.extents),
        address,
        [long(extent) for extent in form.extents],
        # Without an entry the bindings pass a null pointer, which the driver need not take.
        [long(stride) for stride in form.strides or (_UNIT,)],
        *box,
        driver.constant("CUtensorMapInterleave", "CU_TENSOR_MAP_INTERLEAVE_NONE"),
        driver.constant("CUtensorMapSwizzle", f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[param.swizzle]}"),
        driver.constant("CUtensorMapL2promotion", f"CU_TENSOR_MAP_L2_PROMOTION_{PROMOTION}"),
        driver.constant("CUtensorMapFloatOOBfill", "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"),
    )
    if status != 0:
        detail = f"map of '{param.array}' at {address:#x}, {param.dtype}, innermost first: {form}, swizzle {param.swizzle}"
        if param.pixels:
            detail += f", {param.pixels} pixels"
        raise device.error(function, int(status), detail)
    return ctypes.string_at(encoded.getPtr(), MAP_BYTES)
