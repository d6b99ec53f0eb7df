"""Images as convolutions read them: copies of pixels by the engine at the thread stage, and `load_image` at the tile stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tilewright.base.dtypes import DType, bf16, f32, i32, u64
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size, contiguous_strides
from tilewright.base.source import Source, Span
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_kernel
from tilewright.ir.emulator.warps.copies import swizzled
from tilewright.ir.nodes import Attr, Block, Kernel, Stage, Value
from tilewright.ir.opdef import TypeRuleError
from tilewright.ir.ops import result_types
from tilewright.ir.text import print_kernel
from tilewright.ir.text_parse import parse_kernel
from tilewright.ir.types import INDEX, CopyMap, Scalar, Tensor, Tile, tensor
from tilewright.ir.verify import verify_kernel

LINE = Span(Source("k.zyn", "out = x"), 1, 1, 1, 4)


@dataclass(frozen=True)
class Convolution:
    images: int
    height: int
    width: int
    channels: int
    filter: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    @property
    def upper(self) -> tuple[int, int]:
        return self.pad[0] - (self.filter[0] - 1) * self.dilation[0], self.pad[1] - (self.filter[1] - 1) * self.dilation[1]

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the result."""
        height = (self.height + self.pad[0] + self.upper[0] - 1) // self.stride[0] + 1
        width = (self.width + self.pad[1] + self.upper[1] - 1) // self.stride[1] + 1
        return height, width

    @property
    def rows(self) -> int:
        return self.images * self.out[0] * self.out[1]

    def data(self, dtype: DType) -> np.ndarray:
        shape = self.images, self.height, self.width, self.channels
        return np.random.default_rng(3).integers(1, 200, shape).astype(dtype.numpy)

    def wanted(self, x: np.ndarray, r: int, s: int) -> np.ndarray:
        """What the filter's element (r, s) sees, a row for each element of the result: padding and slices, nothing else."""
        padded = np.pad(x, ((0, 0), (self.pad[0],) * 2, (self.pad[1],) * 2, (0, 0)))
        down, across = r * self.dilation[0], s * self.dilation[1]
        seen = padded[:, down :: self.stride[0], across :: self.stride[1]][:, : self.out[0], : self.out[1]]
        return seen.reshape(self.rows, self.channels)


CASES = {
    "plain": Convolution(2, 9, 8, 64),
    "padded": Convolution(2, 7, 6, 64, pad=(1, 1)),
    "stride": Convolution(2, 11, 10, 64, stride=(2, 2), pad=(1, 1)),
    "uneven": Convolution(3, 12, 7, 64, filter=(1, 5), stride=(3, 1), pad=(0, 2)),
    "dilated": Convolution(1, 12, 13, 64, pad=(2, 3), dilation=(2, 3)),
    "dilated stride": Convolution(2, 12, 13, 64, filter=(2, 3), stride=(1, 2), pad=(1, 0), dilation=(3, 2)),
    "channels": Convolution(2, 8, 8, 104, pad=(1, 1)),
    "few channels": Convolution(1, 9, 9, 8, pad=(1, 1), stride=(2, 1)),
    "one": Convolution(1, 3, 3, 64),
    "much padding": Convolution(2, 2, 3, 64, pad=(4, 5), filter=(2, 2)),
}


def copying(
    case: Convolution, pixels: int, channels: int, dtype: DType = bf16, swizzle: int = 128, multicast: bool = False,
    symbolic: bool = True,
    start: tuple[int, int] = (0, 0), offset: tuple[int, int] | None = None, expect: int | None = None, pitch: int = 0,
) -> Kernel:  # fmt: skip
    """Block b copies pixels from row `b * pixels` of the product on, for the filter's element and the channel that are its
    parameters, and writes the shared memory as it lies. Pixels lie `pitch` elements apart. `start` and `offset` make it wrong. With
    `multicast` a cluster's first block copies for both."""
    names = ("n", "h", "w", "c") if symbolic else (case.images, case.height, case.width, case.channels)
    x_type = tensor(dtype, *names)
    if pitch:
        x_type = replace(x_type, strides=contiguous_strides((*x_type.shape[:3], Size.of(pitch))))
    x = Value(x_type, "x")
    out = Value(tensor(dtype, "tiles", pixels * channels), "out")
    r, s, c = (Value(Scalar(i32), name) for name in ("r", "s", "c"))
    b = Builder(LINE)
    buffer = b.op("alloc", dtype=dtype, shape=(pixels * channels,), space="shared", align=1024, name="buffer")
    full = b.op("alloc", dtype=u64, shape=(1,), space="shared", name="full")
    lower: tuple[Attr, ...] = tuple(-p for p in case.pad)
    upper: tuple[Attr, ...] = tuple(Size.of("ph" if axis == 0 else "pw") for axis in (0, 1)) if symbolic else case.upper
    map_ = b.op(
        "tensor_map", x, shape=x_type.shape, strides=x_type.strides, box=(1, 1, 1, channels), swizzle=swizzle, pixels=pixels,
        lower=lower, upper=upper, steps=case.stride, name="map",
    )  # fmt: skip
    zero, thread, block = b.index(0), b.op("thread_id"), b.op("program_id", axis=0)
    first = b.op("eq", thread, zero)
    height, width = case.out
    where = b.mul(b.sub(block, b.op("mod", block, b.index(2))) if multicast else block, b.index(pixels))
    line = b.op("floordiv", where, b.index(width))
    image, p = b.op("floordiv", line, b.index(height)), b.op("mod", line, b.index(height))
    q = b.op("mod", where, b.index(width))
    h = b.add(b.mul(p, b.index(case.stride[0])), b.index(start[0] - case.pad[0]))
    w = b.add(b.mul(q, b.index(case.stride[1])), b.index(start[1] - case.pad[1]))

    def init(b: Builder) -> list[Value]:
        b.multi("mbarrier_init", full, zero, count=1)
        b.multi("fence_init")
        b.multi("mbarrier_expect", full, zero, bytes=pixels * channels * dtype.itemsize if expect is None else expect)
        return []

    def load(b: Builder) -> list[Value]:
        down = b.mul(r, b.const(case.dilation[0], i32)) if offset is None else b.const(offset[0], i32)
        across = b.mul(s, b.const(case.dilation[1], i32)) if offset is None else b.const(offset[1], i32)
        mask = [b.const(3, i32)] if multicast else []
        attrs: dict[str, Attr] = {"multicast": True} if multicast else {}
        where = [image, h, w, c, down, across]
        b.multi("tma_load", buffer, zero, map_, full, zero, *where, *mask, **attrs)  # type: ignore[arg-type]
        return []

    b.if_(first, init, lambda b: [])
    b.multi("cluster_sync" if multicast else "barrier")
    loads = b.op("and", first, b.op("eq", b.op("cluster_rank"), b.const(0, i32))) if multicast else first
    b.if_(loads, load, lambda b: [])
    b.multi("mbarrier_wait", full, zero, zero)

    def copy(b: Builder, i: Value) -> list[Value]:
        b.multi("store", out, block, i, b.op("load", buffer, i))
        return []

    b.for_(thread, b.index(pixels * channels), b.index(32), [], copy)
    if multicast:
        b.multi("cluster_sync")
    attrs: Mapping[str, Attr] = {"cluster": 2} if multicast else {}
    made = Kernel("k", Stage.THREAD, (x, out, r, s, c), Block((), tuple(b.ops)), (Size.of("tiles"),), 32, attrs=attrs, span=LINE)
    verify_kernel(made)
    return made


def copied(case: Convolution, kernel: Kernel, tiles: int, x: np.ndarray, r: int = 0, s: int = 0, c: int = 0) -> np.ndarray:
    """What the blocks found in shared memory."""
    out_type = kernel.params[1].type
    assert isinstance(out_type, Tensor)
    out = np.zeros((tiles, out_type.shape[1].constant or 0), x.dtype)
    sizes = {"n": case.images, "h": case.height, "w": case.width, "c": case.channels, "tiles": tiles}
    sizes |= {"ph": case.upper[0], "pw": case.upper[1]}
    run_kernel(kernel, [x, out, r, s, c], sizes)
    return out


def product_rows(wanted: np.ndarray, tiles: int, pixels: int, channel: int, channels: int) -> np.ndarray:
    """The product's operand in tiles, with zeros after its last row and channel."""
    whole = np.zeros((tiles * pixels, channel + channels), wanted.dtype)
    whole[: len(wanted), : wanted.shape[1]] = wanted[:, : channel + channels]
    return whole[:, channel:].reshape(tiles, pixels * channels)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("symbolic", [True, False])
def test_copies_of_pixels(name: str, symbolic: bool) -> None:
    case, pixels, channels = CASES[name], 48, 64
    x = case.data(bf16)
    kernel = copying(case, pixels, channels, symbolic=symbolic)
    tiles = -(-case.rows // pixels) + 1
    lies = swizzled(np.arange(pixels * channels) * 2) // 2
    for r, s in {(0, 0), (case.filter[0] - 1, case.filter[1] - 1), (0, case.filter[1] - 1)}:
        for c in range(0, case.channels, channels):
            found = copied(case, kernel, tiles, x, r, s, c)
            wanted = product_rows(case.wanted(x, r, s), tiles, pixels, c, channels)
            np.testing.assert_array_equal(found[:, lies].astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize(("dtype", "channels", "swizzle"), [(f32, 32, 128), (bf16, 32, 64), (bf16, 8, 32), (f32, 64, 0)])
def test_copies_of_pixels_of_other_widths(dtype: DType, channels: int, swizzle: int) -> None:
    case = CASES["stride"]
    x = case.data(dtype)
    tiles, size = -(-case.rows // 16), dtype.itemsize
    found = copied(case, copying(case, 16, channels, dtype, swizzle), tiles, x, 2, 1)
    lies = swizzled(np.arange(16 * channels) * size, swizzle) // size
    wanted = product_rows(case.wanted(x, 2, 1), tiles, 16, 0, channels)
    np.testing.assert_array_equal(found[:, lies].astype(np.float32), wanted.astype(np.float32))


def test_pixels_go_to_every_block_that_is_named() -> None:
    case = CASES["padded"]
    x = case.data(bf16)
    found = copied(case, copying(case, 32, 64, multicast=True), 2, x, 1, 2)
    wanted = product_rows(case.wanted(x, 1, 2), -(-case.rows // 32), 32, 0, 64)[0]
    lies = swizzled(np.arange(32 * 64) * 2) // 2
    for block in found:
        np.testing.assert_array_equal(block[lies].astype(np.float32), wanted.astype(np.float32))


def test_rows_that_are_further_apart_than_they_are_long() -> None:
    case = CASES["padded"]
    whole = Convolution(case.images, case.height, case.width, 96).data(bf16)
    x = whole[..., :64]
    found = copied(case, copying(case, 32, 64, symbolic=False, pitch=96), 3, x, 1, 1)
    wanted = product_rows(case.wanted(x, 1, 1), 3, 32, 0, 64)
    np.testing.assert_array_equal(found[:, swizzled(np.arange(2048) * 2) // 2].astype(np.float32), wanted.astype(np.float32))


def message(case: Convolution, kernel: Kernel) -> str:
    with pytest.raises(UserError) as error:
        copied(case, kernel, 1, case.data(bf16))
    return str(error.value)


def test_copies_of_pixels_that_cannot_be() -> None:
    case, stride = CASES["padded"], CASES["stride"]
    text = message(case, copying(case, 16, 64, start=(-1, 0)))
    assert "tma_load of 'x': [-2, -1] is no base position: they are from [-1, -1] to [5, 4]" in text
    assert "[-1, 5] is no base position: they are from" in message(case, copying(case, 16, 64, start=(0, 6)))
    text = message(stride, copying(stride, 16, 64, start=(1, 0)))
    assert "[0, -1] is no base position: they are multiples of [2, 2] from [-1, -1]" in text
    for offset in ((256, 0), (0, -1)):
        text = message(case, copying(case, 16, 64, offset=offset))
        assert f"the offset {list(offset)} from the base position is not within 0 to 255" in text
    wide, small = Convolution(1, 7, 6, 64, pad=(0, 129)), Convolution(1, 7, 2, 64)
    text = message(wide, copying(wide, 16, 64))
    assert "a map of 'x': the corners [0, -129] and [-2, 127] are not all between -128 and 127" in text
    assert "a map of 'x': there are no base positions from [0, 0] to [4, -1]" in message(small, copying(small, 16, 64))
    # All pixels count on the mbarrier, those outside too.
    assert "0 of 1 arrivals and -1024 bytes to come" in message(case, copying(case, 16, 64, expect=1024))


def test_text_of_pixels() -> None:
    for symbolic in (True, False):
        kernel = copying(CASES["stride"], 128, 64, symbolic=symbolic)
        text = print_kernel(kernel)
        assert "map<bf16, [1, 1, 1, 64], 128, pixels=128>" in text
        again = parse_kernel(text)
        verify_kernel(again)
        assert print_kernel(again) == text
    (map_,) = (op for op in again.body.ops if op.opcode == "tensor_map")
    assert map_.result.type == CopyMap(bf16, (1, 1, 1, 64), 128, 128)


X = tensor(bf16, "n", "h", "w", "c")
PIXELS: dict[str, Attr] = {
    "shape": X.shape, "strides": X.strides, "box": (1, 1, 1, 64), "swizzle": 128, "pixels": 64, "lower": (-1, Size.of("low")),
    "upper": (-1, Size.of("up")), "steps": (1, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pixels": 0}, "pixels are 1 to 1024"),
        ({"pixels": 1025}, "pixels are 1 to 1024"),
        ({"box": (1, 1, 8, 64)}, r"a box of \[1, 1, 1, channels\]"),
        ({"box": (1, 1, 64), "shape": X.shape[:3], "strides": X.strides[:3]}, "of four or five axes"),
        ({"lower": (0,)}, "lower and upper have a size for each axis"),
        ({"upper": (0, 1.5)}, "lower and upper have a size for each axis"),
        ({"steps": (1, 9)}, "steps are integers from 1 to 8, one for each axis"),
        ({"steps": (0, 1)}, "steps are integers from 1 to 8, one for each axis"),
    ],
)
def test_maps_with_wrong_pixels(change: dict[str, Attr], problem: str) -> None:
    assert result_types("tensor_map", [X], PIXELS) == (CopyMap(bf16, (1, 1, 1, 64), 128, 64),)
    with pytest.raises(TypeRuleError, match=problem):
        result_types("tensor_map", [X], {**PIXELS, **change})
    plain = {name: value for name, value in PIXELS.items() if name != "pixels"}
    with pytest.raises(TypeRuleError, match="are for maps with pixels"):
        result_types("tensor_map", [X], plain)


def test_operands_of_copies_of_pixels() -> None:
    map_ = CopyMap(bf16, (1, 1, 1, 64), 128, 64)
    buffer, full = tensor(bf16, 4096, space="shared"), tensor(u64, 1, space="shared")
    assert result_types("tma_load", [buffer, INDEX, map_, full, INDEX, *[INDEX] * 6], {}) == ()
    with pytest.raises(TypeRuleError, match="takes 6 integers here, got 4"):
        result_types("tma_load", [buffer, INDEX, map_, full, INDEX, *[INDEX] * 4], {})
    with pytest.raises(TypeRuleError, match="cannot store by a map with pixels"):
        result_types("tma_store", [buffer, INDEX, map_, *[INDEX] * 6], {})


# -- load_image -----------------------------------------------------------------------------------------------------


def reading(case: Convolution, m: int, k: int, dtype: DType) -> Kernel:
    """Block b reads rows `b * m` on of the product for a filter's element and a channel."""
    x, out = Value(tensor(dtype, "n", "h", "w", "c"), "x"), Value(tensor(dtype, "tiles", m, k), "out")
    r, s, c = (Value(INDEX, name) for name in ("r", "s", "c"))
    b = Builder(LINE)
    block = b.op("program_id", axis=0)
    tile = b.op(
        "load_image", x, b.mul(block, b.index(m)), b.mul(r, b.index(case.dilation[0])), b.mul(s, b.index(case.dilation[1])), c,
        rows=Size.of("rows"), columns=Size.of("columns"), lower=(Size.of("low"), -case.pad[1]), steps=case.stride, shape=(m, k),
    )  # fmt: skip
    at = b.op("broadcast", block, shape=(1, 1))
    b.multi("store", out, at, b.op("iota", shape=(m, 1), axis=0), b.op("iota", shape=(1, k), axis=1), tile)
    made = Kernel("k", Stage.TILE, (x, out, r, s, c), Block((), tuple(b.ops)), (Size.of("tiles"),))
    verify_kernel(made)
    return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
def test_load_image(name: str, dtype: DType) -> None:
    case, m, k = CASES[name], 48, 64
    x, tiles = case.data(dtype), -(-case.rows // 48) + 1
    kernel = parse_kernel(print_kernel(reading(case, m, k, dtype)))
    sizes = {"n": case.images, "h": case.height, "w": case.width, "c": case.channels, "tiles": tiles, "low": -case.pad[0]}
    sizes |= {"rows": case.out[0], "columns": case.out[1]}
    for r in range(case.filter[0]):
        for s in range(case.filter[1]):
            for c in range(0, case.channels, k):
                out = np.full((tiles, m, k), 9, x.dtype)
                run_kernel(kernel, [x, out, r, s, c], sizes)
                wanted = product_rows(case.wanted(x, r, s), tiles, m, c, k).reshape(tiles, m, k)
                np.testing.assert_array_equal(out.astype(np.float32), wanted.astype(np.float32))


def test_load_image_of_nothing() -> None:
    case = CASES["padded"]
    out = np.full((1, 16, 64), 9, np.float32)
    sizes = {"n": 0, "h": 7, "w": 6, "c": 64, "tiles": 1, "low": -1, "rows": 7, "columns": 6}
    run_kernel(reading(case, 16, 64, f32), [np.zeros((0, 7, 6, 64), np.float32), out, 0, 0, 0], sizes)
    assert not out.any()


def test_rule_of_load_image() -> None:
    attrs: dict[str, Attr] = {"rows": Size.of("p"), "columns": 8, "lower": (0, -1), "steps": (1, 2), "shape": (128, 64)}
    assert result_types("load_image", [X, *[INDEX] * 4], attrs) == (Tile(bf16, (128, 64)),)
    wrong: list[tuple[dict[str, Attr], str]] = [
        ({"rows": "p"}, "sizes rows and columns"), ({"lower": (0,)}, "lower is a size for each axis"),
        ({"steps": (0, 1)}, "a positive integer for each axis"), ({"shape": (8, 8, 8)}, "a tile of two axes"),
    ]  # fmt: skip
    for change, problem in wrong:
        with pytest.raises(TypeRuleError, match=problem):
            result_types("load_image", [X, *[INDEX] * 4], {**attrs, **change})
    with pytest.raises(TypeRuleError, match="a global tensor of four axes"):
        result_types("load_image", [tensor(bf16, 8, 8, 8), *[INDEX] * 4], attrs)
    with pytest.raises(TypeRuleError, match="takes integers, got f32"):
        result_types("load_image", [X, *[INDEX] * 3, Scalar(f32)], attrs)
    deep = tensor(bf16, "n", "d", "h", "w", "c")
    whole: dict[str, Attr] = {**attrs, "planes": 3, "lower": (0, 0, -1), "steps": (2, 1, 2)}
    assert result_types("load_image", [deep, *[INDEX] * 5], whole) == (Tile(bf16, (128, 64)),)
    with pytest.raises(TypeRuleError, match="with planes five axes"):
        result_types("load_image", [X, *[INDEX] * 4], whole)
