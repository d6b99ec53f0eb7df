"""The table of contractions that every GPU target must run: `MATRIX_CASES`, each a loop nest with its answer in NumPy's float64.

In: sizes, from which a case makes its arguments. Out: what the kernel should give, and how far from it a result may be. The error
allowed is made of the result's own rounding, the roundings of a sum as long as this one, and what the precision asked for costs
each product.
"""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import tilewright as tw
from kernel_table import from_text
from support import as_wide
from tilewright.base import dtypes
from tilewright.base.dtypes import DType, from_numpy
from tilewright.execute.devices import Device

Sizes = tuple[int, ...]
Arrays = tuple[np.ndarray, ...]
Wide = np.ndarray

ODD: tuple[Sizes, ...] = ((1, 1, 1), (1, 2, 7), (7, 65, 2), (17, 16, 15), (31, 33, 32), (63, 64, 65), (129, 31, 127))
"""m, n, k: no size that a tile has, and each neighbour of one."""
EMPTY: tuple[Sizes, ...] = ((0, 4, 3), (4, 0, 3), (4, 3, 0), (0, 0, 0))
LONG: tuple[Sizes, ...] = ((128, 127, 129), (257, 255, 256), (1000, 257, 33), (33, 1000, 1000), (1, 1000, 257), (1000, 1, 1000))
"""For real devices, besides."""
UNITS = {"f64": 2.0**-53, "tf32": 2.0**-9, "3xtf32": 2.0**-19}
"""What one product may be off by, relative to its size, where it is not exact in the accumulator."""


@dataclass(frozen=True)
class MatrixCase:
    """One kernel. `product` and `finish` get the arguments with floats widened to f64; `finish` makes the result of the sums."""

    name: str
    kernel: tw.Kernel[..., Any]
    inputs: Callable[[np.random.Generator, Sizes], Arrays]
    product: Callable[..., Wide]
    finish: Callable[..., Wide] | None = None
    gain: Callable[..., Wide | float] | None = None
    """What the epilogue multiplies errors of the sums by, where that is more than a little."""
    terms: Callable[[Sizes], int] = lambda sizes: sizes[2]
    sizes: tuple[Sizes, ...] = ODD
    empty: tuple[Sizes, ...] = EMPTY
    long: tuple[Sizes, ...] = LONG
    accumulator: str = "f32"
    precision: str = "ieee"
    torch: Callable[..., Any] | None = None
    """The same in PyTorch, of the module and the tensors; None where it has no such operation."""

    def arguments(self, sizes: Sizes) -> Arrays:
        return self.inputs(np.random.default_rng(zlib.crc32(f"{self.name}{sizes}".encode())), sizes)

    def expected(self, arguments: Arrays) -> Wide:
        wide = [as_wide(a) for a in arguments]
        with np.errstate(all="ignore"):
            sums = self.product(*wide)
            return sums if self.finish is None else self.finish(sums, *wide)

    def allowed(self, arguments: Arrays, want: Wide, dtype: DType, sizes: Sizes) -> Wide | float:
        """The largest error a right result may have, element by element."""
        if not dtype.is_float:
            return 0.0
        wide = [as_wide(a) for a in arguments]
        unit = UNITS["f64"] if self.accumulator == "f64" else 2.0**-24
        # Eight-bit floats are added up with fewer bits on a real Hopper.
        each = UNITS.get(self.precision, 0.0) + (2.0**-13 if any(a.dtype.itemsize == 1 for a in arguments[:2]) else 0.0)
        gain = 2.0 if self.gain is None else 2.0 * np.abs(self.gain(*wide))
        with np.errstate(all="ignore"):
            total = self.product(*(np.abs(a) for a in wide[:2]), *wide[2:])
            sums = gain * np.abs(total) * ((4 + np.sqrt(self.terms(sizes))) * unit + each)
            others = max((float(np.abs(a).max(initial=0.0)) for a in wide[2:]), default=0.0)
            tiny = 2.0**-24 if dtype.bits <= 16 else 1e-37
            return np.asarray(sums + 8 * unit * others + 2.0 ** -(dtype.mantissa + 1) * 1.01 * np.abs(want) + tiny)

    def check(self, run: Callable[[Arrays], Any], sizes: Sizes, label: str = "") -> np.ndarray:
        """Run it and compare; gives the result."""
        arguments = self.arguments(sizes)
        found = np.asarray(run(arguments))
        self.compare(found, arguments, sizes, label)
        return found

    def compare(self, found: np.ndarray, arguments: Arrays, sizes: Sizes, label: str = "") -> None:
        want = self.expected(arguments)
        dtype = from_numpy(found.dtype)
        assert dtype is not None
        assert found.shape == want.shape, f"{self.name}{list(sizes)} {label}: shape {found.shape}, expected {want.shape}"
        error = np.abs(as_wide(found) - want)
        allowed = np.broadcast_to(self.allowed(arguments, want, dtype, sizes), want.shape)
        bad = np.argwhere(~(error <= allowed))
        if len(bad):
            at = tuple(bad[0])
            raise AssertionError(
                f"{self.name}{list(sizes)} {label}: {len(bad)} of {found.size} wrong, first at {tuple(map(int, at))}: "
                f"got {as_wide(found)[at]!r}, expected {want[at]!r} within {allowed[at]:.3g}"
            )


def on(kernel: tw.Kernel[..., Any], device: Device) -> Callable[[Arrays], Any]:
    """Runs the kernel on a device that has no name of its own, such as the emulator of another target."""
    names = tuple(inspect.signature(kernel.python).parameters)
    return lambda arguments: kernel.runner.run(dict(zip(names, arguments, strict=True)), device)


def again(kernel: tw.Kernel[..., Any], precision: str = "ieee", schedule: str = "") -> tw.Kernel[..., Any]:
    """The same function with other options."""
    return tw.kernel(precision=precision, schedule=schedule)(kernel.python)


# -- texts ----------------------------------------------------------------------------------------------------------


def nest(
    arrays: str,
    sizes: str,
    shape: str,
    dtype: str,
    grid: str,
    sums: Sequence[tuple[str, str]],
    term: str,
    result: str = "acc",
    zero: str = "tw.f32(0)",
    inside: Sequence[str] = (),
) -> tw.Kernel[..., Any]:
    """A kernel that adds up `term` over `sums` (index, extent) for each point of `grid` (`i: m, j: n`). `inside`: lines before
    the term, the last of which may be an `if`."""
    indices, extents = zip(*(word.strip().split(": ") for word in grid.split(",")), strict=True)
    lines = [f"def contraction({', '.join(f'{a.strip()}: tw.Array' for a in arrays.split(','))}) -> tw.Array:"]
    lines += [f"    {line.strip()}" for line in sizes.split(";")]
    lines += [f"    out = tw.empty(({shape}), {dtype})", f"    for {', '.join(indices)} in tw.grid({', '.join(extents)}):"]
    lines.append(f"        acc = {zero}")
    pad = " " * 8
    for index, extent in sums:
        lines.append(f"{pad}for {index} in range({extent}):")
        pad += "    "
    for line in inside:
        lines.append(f"{pad}{line}")
        pad += "    " if line.startswith("if ") else ""
    lines += [f"{pad}acc += {term}", f"        out[{', '.join(indices)}] = {result}", "    return out", ""]
    return from_text("\n".join(lines))


_INDEX = {
    "kn": ("m, k = a.shape; n = b.shape[1]", "a[i, p]", "b[p, j]"),
    "nk": ("m, k = a.shape; n = b.shape[0]", "a[i, p]", "b[j, p]"),
    "tn": ("k, m = a.shape; n = b.shape[1]", "a[p, i]", "b[p, j]"),
    "tt": ("k, m = a.shape; n = b.shape[0]", "a[p, i]", "b[j, p]"),
}


def product_kernel(
    layout: str,
    zero: str = "tw.f32(0)",
    dtype: str = "a.dtype",
    term: str = "{a} * {b}",
    result: str = "acc",
    extra: str = "",
    inside: Sequence[str] = (),
    columns: bool = False,
) -> tw.Kernel[..., Any]:
    """A product of two matrices that lie as `layout` says: `kn` is [m, k] by [k, n], `nk` [m, k] by [n, k], `tn` and `tt` have
    the first one as [k, m]."""
    sizes, a, b = _INDEX[layout]
    grid, shape = ("j: n, i: m", "n, m") if columns else ("i: m, j: n", "m, n")
    return nest(f"a, b{extra}", sizes, shape, dtype, grid, [("p", "k")], term.format(a=a, b=b), result, zero, inside)


# -- data -----------------------------------------------------------------------------------------------------------


def values(rng: np.random.Generator, shape: Sizes, dtype: DType) -> np.ndarray:
    if dtype.is_int:
        info = np.iinfo(dtype.numpy)
        return rng.integers(info.min, info.max, shape, dtype.numpy, endpoint=True)
    return rng.standard_normal(shape).astype(dtype.numpy)


def factors(
    layout: str, dtype: DType, *others: str, second: DType | None = None, beside: DType = dtypes.f32
) -> Callable[[np.random.Generator, Sizes], Arrays]:
    """The two matrices, and vectors and matrices beside them: `m`, `n`, `mn` or `nm`."""

    def make(rng: np.random.Generator, sizes: Sizes) -> Arrays:
        m, n, k = sizes
        first = values(rng, (k, m) if layout[0] == "t" else (m, k), dtype)
        last = values(rng, (n, k) if layout in ("nk", "tt") else (k, n), second or dtype)
        length = {"m": m, "n": n}
        return (first, last, *(values(rng, tuple(length[c] for c in other), beside) for other in others))

    return make


def matrices(layout: str, a: Wide, b: Wide, *_: Wide) -> Wide:
    left = a.T if layout[0] == "t" else a
    right = b.T if layout in ("nk", "tt") else b
    # Whole numbers stay whole: they are added up modulo 2^32, as the kernel does.
    if left.dtype.kind in "iu":
        return (left.astype(np.int64) @ right.astype(np.int64)).astype(np.int32)
    product: Wide = left @ right
    return product


def torch_matrices(layout: str, torch: Any, a: Any, b: Any) -> Any:
    return torch.matmul(a.T if layout[0] == "t" else a, b.T if layout in ("nk", "tt") else b)


def gelu(x: Wide) -> Wide:
    wide: Wide = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return wide


# -- the table ------------------------------------------------------------------------------------------------------

MATRIX_CASES: list[MatrixCase] = []


def add(
    name: str,
    kernel: tw.Kernel[..., Any],
    inputs: Callable[[np.random.Generator, Sizes], Arrays],
    product: Callable[..., Wide],
    **keywords: Any,
) -> None:
    assert all(c.name != name for c in MATRIX_CASES), name
    MATRIX_CASES.append(MatrixCase(name, kernel, inputs, product, **keywords))


WHOLE = "tw.i32({a}) * tw.i32({b})"
PLAIN = {layout: product_kernel(layout) for layout in _INDEX}
for _layout in _INDEX:
    for _dtype in (dtypes.bf16, dtypes.f16, dtypes.f32):
        add(
            f"{_layout}_{_dtype}",
            PLAIN[_layout],
            factors(_layout, _dtype),
            partial(matrices, _layout),
            torch=partial(torch_matrices, _layout),
        )
for _layout in ("kn", "nk"):
    for _precision in ("tf32", "3xtf32"):
        add(
            f"{_layout}_{_precision}",
            again(PLAIN[_layout], _precision),
            factors(_layout, dtypes.f32),
            partial(matrices, _layout),
            precision=_precision,
            torch=partial(torch_matrices, _layout),
        )
    add(
        f"{_layout}_f64",
        product_kernel(_layout, "tw.f64(0)", "tw.f64"),
        factors(_layout, dtypes.f64),
        partial(matrices, _layout),
        accumulator="f64",
        torch=partial(torch_matrices, _layout),
    )
    add(
        f"{_layout}_i8",
        product_kernel(_layout, "tw.i32(0)", "tw.i32", WHOLE),
        factors(_layout, dtypes.i8),
        partial(matrices, _layout),
        accumulator="i32",
    )
    add(
        f"{_layout}_f8e4m3",
        product_kernel(_layout, dtype="tw.bf16"),
        factors(_layout, dtypes.f8e4m3),
        partial(matrices, _layout),
    )
add(
    "nk_u8",
    product_kernel("nk", "tw.i32(0)", "tw.i32", WHOLE),
    factors("nk", dtypes.u8),
    partial(matrices, "nk"),
    accumulator="i32",
)
add("nk_bf16_to_f32", product_kernel("nk", dtype="tw.f32"), factors("nk", dtypes.bf16), partial(matrices, "nk"))
add("kn_f16_to_bf16", product_kernel("kn", dtype="tw.bf16"), factors("kn", dtypes.f16), partial(matrices, "kn"))
add("kn_f32_by_bf16", product_kernel("kn"), factors("kn", dtypes.f32, second=dtypes.bf16), partial(matrices, "kn"))
add("into_columns", product_kernel("kn", dtype="tw.f32", columns=True), factors("kn", dtypes.bf16), lambda a, b: (a @ b).T)
add(
    "lower_part",
    product_kernel("kn", dtype="tw.f32", inside=["if p <= i:"]),
    factors("kn", dtypes.f32),
    lambda a, b: np.tril(a) @ b,
)

# Epilogues.
add(
    "bias",
    product_kernel("nk", result="acc + c[j]", extra=", c"),
    factors("nk", dtypes.bf16, "n"),
    partial(matrices, "nk"),
    finish=lambda s, a, b, c: s + c,
)
add(
    "bias_gelu_residual",
    product_kernel("nk", result="tw.gelu(acc + c[j]) + r[i, j]", extra=", c, r"),
    factors("nk", dtypes.bf16, "n", "mn"),
    partial(matrices, "nk"),
    finish=lambda s, a, b, c, r: gelu(s + c) + r,
)
add(
    "gelu_f32",
    product_kernel("kn", result="tw.gelu(acc)"),
    factors("kn", dtypes.f32),
    partial(matrices, "kn"),
    finish=lambda s, a, b: gelu(s),
)
add(
    "scaled_rows_and_columns",
    product_kernel("nk", dtype="tw.f16", result="acc * r[i] * c[j]", extra=", r, c"),
    factors("nk", dtypes.f16, "m", "n"),
    partial(matrices, "nk"),
    finish=lambda s, a, b, r, c: s * r[:, None] * c,
    gain=lambda a, b, r, c: r[:, None] * c,
)
add(
    "scaled_i8",
    product_kernel("nk", "tw.i32(0)", "tw.bf16", WHOLE, "tw.f32(acc) * r[i] * c[j]", ", r, c"),
    factors("nk", dtypes.i8, "m", "n"),
    partial(matrices, "nk"),
    finish=lambda s, a, b, r, c: s * r[:, None] * c,
    accumulator="i32",
    gain=lambda a, b, r, c: np.zeros((len(r), len(c))),
)
add(
    "relu_to_i8",
    product_kernel("kn", dtype="tw.i8", result="tw.cast(tw.clamp(acc * 64.0, 0.0, 100.0), tw.i8)"),
    lambda rng, sizes: tuple(
        np.sign(a.astype(np.float32)).astype(dtypes.bf16.numpy) for a in factors("kn", dtypes.bf16)(rng, sizes)
    ),
    partial(matrices, "kn"),
    finish=lambda s, a, b: np.clip(s * 64, 0, 100).astype(np.int8),
)

# Prologues.


def dequantised(rng: np.random.Generator, sizes: Sizes) -> Arrays:
    m, n, k = sizes
    return values(rng, (m, k), dtypes.bf16), values(rng, (k, n), dtypes.i8), (np.abs(values(rng, (n,), dtypes.f32)) + 0.01) / 32


def by_scale(a: Wide, b: Wide, s: Wide) -> Wide:
    weights: Wide = (b * s).astype(np.float32).astype(dtypes.bf16.numpy).astype(np.float64)
    return np.asarray(a @ weights)


add(
    "dequantised_weights",
    product_kernel("kn", term="{a} * tw.cast(tw.f32({b}) * s[j], tw.bf16)", extra=", s"),
    dequantised,
    by_scale,
)


def quantised(rng: np.random.Generator, sizes: Sizes, group: int = 0) -> Arrays:
    """Weights of i8 as rows along the sum, with a scale for each row, or for each group along it."""
    m, n, k = sizes
    scales = (n, -(-k // group)) if group else (n,)
    return values(rng, (m, k), dtypes.bf16), values(rng, (n, k), dtypes.i8), (np.abs(values(rng, scales, dtypes.f32)) + 0.01) / 32


def by_row(a: Wide, b: Wide, s: Wide) -> Wide:
    return by_scale(a, b.T, s)


def by_group(group: int, a: Wide, b: Wide, s: Wide) -> Wide:
    scales = np.repeat(s, group, axis=1)[:, : b.shape[1]]
    weights: Wide = (b * scales).astype(np.float32).astype(dtypes.bf16.numpy).astype(np.float64)
    return np.asarray(a @ weights.T)


add("dequantised_rows", product_kernel("nk", term="{a} * tw.cast(tw.f32({b}) * s[j], tw.bf16)", extra=", s"), quantised, by_row)
for _group in (64, 128):
    add(
        f"dequantised_groups_of_{_group}",
        product_kernel("nk", term=f"{{a}} * tw.cast(tw.f32({{b}}) * s[j, p // {_group}], tw.bf16)", extra=", s"),
        partial(quantised, group=_group),
        partial(by_group, _group),
    )
add(
    "cast_to_bf16",
    product_kernel("nk", dtype="tw.f32", term="tw.cast({a}, tw.bf16) * {b}"),
    factors("nk", dtypes.f32, second=dtypes.bf16),
    lambda a, b: a.astype(np.float32).astype(dtypes.bf16.numpy).astype(np.float64) @ b.T,
)


def scaled(a: Wide, b: Wide, r: Wide, c: Wide) -> Wide:
    narrow = (a.astype(np.float32) * r.astype(np.float32)) * c.astype(np.float32)[:, None]
    return np.asarray(narrow.astype(dtypes.bf16.numpy).astype(np.float64) @ b.T)


add(
    "scaled_columns_of_the_first",
    product_kernel("nk", dtype="tw.f32", term="tw.cast({a} * r[p] * c[i], tw.bf16) * {b}", extra=", r, c"),
    lambda rng, sizes: (
        *factors("nk", dtypes.bf16)(rng, sizes),
        *(np.abs(values(rng, (length,), dtypes.f32)) + np.float32(0.1) for length in (sizes[2], sizes[0])),
    ),
    scaled,
)
add(
    "scaled_rows_of_the_first",
    product_kernel("nk", dtype="tw.f32", term="({a} * r[i]) * {b}", extra=", r"),
    factors("nk", dtypes.f32, "m"),
    lambda a, b, r: (a * r[:, None]) @ b.T if len(a) else matrices("nk", a, b),
    gain=lambda a, b, r: np.full((len(r), 1), 2.0),
)

add(
    "scaled_rows_tf32",
    again(MATRIX_CASES[-1].kernel, "tf32"),
    factors("nk", dtypes.f32, "m"),
    MATRIX_CASES[-1].product,
    gain=MATRIX_CASES[-1].gain,
    precision="tf32",
)

# Batches. Sizes: batch, m, n, k.
BATCHES: tuple[Sizes, ...] = ((1, 1, 1, 1), (3, 17, 33, 15), (2, 65, 7, 64), (5, 16, 16, 16))
NO_BATCHES: tuple[Sizes, ...] = ((0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0))
LONG_BATCHES: tuple[Sizes, ...] = ((7, 129, 127, 128), (33, 257, 65, 1000))
_BATCHED: dict[str, Any] = {"sizes": BATCHES, "empty": NO_BATCHES, "long": LONG_BATCHES, "terms": lambda sizes: sizes[3]}


def batches(dtype: DType, shared: bool, rows: bool) -> Callable[[np.random.Generator, Sizes], Arrays]:
    def make(rng: np.random.Generator, sizes: Sizes) -> Arrays:
        t, m, n, k = sizes
        last = (n, k) if rows else (k, n)
        return values(rng, (t, m, k), dtype), values(rng, last if shared else (t, *last), dtype)

    return make


for _dtype in (dtypes.bf16, dtypes.f32):
    add(
        f"batched_{_dtype}",
        nest(
            "a, b",
            "t, m, k = a.shape; n = b.shape[2]",
            "t, m, n",
            "a.dtype",
            "h: t, i: m, j: n",
            [("p", "k")],
            "a[h, i, p] * b[h, p, j]",
        ),
        batches(_dtype, False, False),
        lambda a, b: a @ b,
        torch=lambda torch, a, b: torch.matmul(a, b),
        **_BATCHED,
    )
    add(
        f"batched_rows_{_dtype}",
        nest(
            "a, b",
            "t, m, k = a.shape; n = b.shape[1]",
            "t, m, n",
            "a.dtype",
            "h: t, i: m, j: n",
            [("p", "k")],
            "a[h, i, p] * b[h, j, p]",
        ),
        batches(_dtype, False, True),
        lambda a, b: a @ b.transpose(0, 2, 1),
        torch=lambda torch, a, b: torch.matmul(a, b.transpose(1, 2)),
        **_BATCHED,
    )
    add(
        f"batched_shared_{_dtype}",
        nest(
            "a, b",
            "t, m, k = a.shape; n = b.shape[1]",
            "t, m, n",
            "a.dtype",
            "h: t, i: m, j: n",
            [("p", "k")],
            "a[h, i, p] * b[p, j]",
        ),
        batches(_dtype, True, False),
        lambda a, b: a @ b,
        torch=lambda torch, a, b: torch.matmul(a, b),
        **_BATCHED,
    )

# Convolutions. Sizes: n, c, h, w, k, r, s (images, channels in, height, width, channels out, window).
IMAGES: tuple[Sizes, ...] = (
    (1, 1, 1, 1, 1, 3, 3),
    (2, 3, 5, 7, 4, 3, 3),
    (1, 8, 9, 6, 16, 3, 3),
    (2, 32, 6, 5, 17, 2, 3),
    (1, 40, 4, 4, 8, 1, 1),
)
NO_IMAGES: tuple[Sizes, ...] = ((0, 3, 5, 5, 4, 3, 3), (1, 0, 5, 5, 4, 3, 3), (1, 3, 5, 5, 0, 3, 3))
LONG_IMAGES: tuple[Sizes, ...] = ((2, 64, 31, 33, 65, 3, 3), (3, 17, 64, 9, 128, 3, 3), (1, 256, 15, 16, 33, 5, 2))


def _channels_last(shape: Sizes) -> Sizes:
    return shape[0], *shape[2:], shape[1]


def images(dtype: DType, last: bool, groups: int = 0) -> Callable[[np.random.Generator, Sizes], Arrays]:
    """The input and the weights, [n, c, h, w] and [k, c, r, s] or both with channels last; groups have channels of their own."""

    def make(rng: np.random.Generator, sizes: Sizes) -> Arrays:
        n, c, h, w, k, r, s = sizes
        if groups:
            return values(rng, (n, groups, c, h, w), dtype), values(rng, (groups, k, c, r, s), dtype)
        shapes = ((n, c, h, w), (k, c, r, s))
        return tuple(values(rng, _channels_last(x) if last else x, dtype) for x in shapes)

    return make


def convolved(x: Wide, w: Wide, stride: int = 1, pad: int = 1, dilation: int = 1) -> Wide:
    """[n, c, h, w] by [k, c, r, s]."""
    n, _, height, width = x.shape
    k, _, r, s = w.shape
    down, along = (max(0, (e + 2 * pad - dilation * (t - 1) - 1) // stride + 1) for e, t in ((height, r), (width, s)))
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    out = np.zeros((n, k, down, along))
    for u, v in itertools.product(range(r), range(s)):
        at = padded[:, :, u * dilation :, v * dilation :][:, :, ::stride, ::stride][:, :, :down, :along]
        out += np.einsum("nchw,kc->nkhw", at, w[:, :, u, v])
    return out


def convolution_kernel(
    last: bool, stride: int = 1, pad: int = 1, dilation: int = 1, select: bool = False
) -> tw.Kernel[..., Any]:
    extent = {e: f"({e} + {2 * pad} - {dilation} * ({t} - 1) - 1) // {stride} + 1" for e, t in (("h", "r"), ("w", "s"))}
    y = [f"y = i * {stride} + u * {dilation} - {pad}", f"z = j * {stride} + v * {dilation} - {pad}"]
    inside = "y >= 0 and y < h and z >= 0 and z < w"
    if last:
        sizes, grid, sums = (
            "n, h, w, c = x.shape; k, r, s, d = f.shape",
            "b: n, i: oh, j: ow, o: k",
            [("u", "r"), ("v", "s"), ("q", "c")],
        )
        term, shape = "x[b, y, z, q] * f[o, u, v, q]", "n, oh, ow, k"
    else:
        sizes, grid, sums = (
            "n, c, h, w = x.shape; k, d, r, s = f.shape",
            "b: n, o: k, i: oh, j: ow",
            [("q", "c"), ("u", "r"), ("v", "s")],
        )
        term, shape = "x[b, q, y, z] * f[o, q, u, v]", "n, k, oh, ow"
    sizes += f"; oh = {extent['h']}; ow = {extent['w']}"
    term = f"({term} if {inside} else 0.0)" if select else term
    return nest("x, f", sizes, shape, "x.dtype", grid, sums, term, inside=y if select else [*y, f"if {inside}:"])


def torch_convolution(last: bool, stride: int, pad: int, dilation: int, torch: Any, x: Any, w: Any) -> Any:
    convolve = torch.nn.functional.conv2d
    if last:
        x, w = x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2)
    out = convolve(x, w, stride=stride, padding=pad, dilation=dilation)
    return out.permute(0, 2, 3, 1) if last else out


_CONVOLVED: dict[str, Any] = {"sizes": IMAGES, "empty": NO_IMAGES, "long": LONG_IMAGES, "terms": lambda z: z[1] * z[5] * z[6]}


def in_order(last: bool, function: Callable[..., Wide]) -> Callable[..., Wide]:
    """A function of images with channels first, of ones that have them last."""
    if not last:
        return function
    return lambda x, w: function(x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)


for _last, _way in (
    (False, (1, 1, 1)),
    (True, (1, 1, 1)),
    (False, (2, 1, 1)),
    (True, (2, 1, 1)),
    (True, (1, 0, 1)),
    (True, (1, 2, 2)),
    (False, (2, 3, 2)),
):
    for _dtype in (dtypes.bf16, dtypes.f32) if _way == (1, 1, 1) else (dtypes.bf16,):
        _stride, _pad, _dilation = _way
        add(
            f"conv_{'nhwc' if _last else 'nchw'}_s{_stride}p{_pad}d{_dilation}_{_dtype}",
            convolution_kernel(_last, *_way),
            images(_dtype, _last),
            in_order(_last, partial(convolved, stride=_stride, pad=_pad, dilation=_dilation)),
            torch=partial(torch_convolution, _last, *_way),
            **(_CONVOLVED if _pad else {**_CONVOLVED, "sizes": IMAGES[1:]}),
        )


add(
    "conv_nhwc_tf32",
    again(convolution_kernel(True), "tf32"),
    images(dtypes.f32, True),
    in_order(True, convolved),
    precision="tf32",
    torch=partial(torch_convolution, True, 1, 1, 1),
    **{**_CONVOLVED, "sizes": ((2, 32, 6, 5, 17, 2, 3), (1, 40, 4, 4, 8, 3, 3), (2, 3, 5, 7, 4, 3, 3))},
)


def grouped(x: Wide, w: Wide) -> Wide:
    return np.stack([convolved(x[:, g], w[g]) for g in range(x.shape[1])], axis=1)


add(
    "conv_groups_bf16",
    nest(
        "x, f",
        "n, g, c, h, w = x.shape; g2, k, c2, r, s = f.shape",
        "n, g, k, h, w",
        "x.dtype",
        "b: n, e: g, o: k, i: h, j: w",
        [("q", "c"), ("u", "r"), ("v", "s")],
        "x[b, e, q, y, z] * f[e, o, q, u, v]",
        inside=["y = i + u - 1", "z = j + v - 1", "if y >= 0 and y < h and z >= 0 and z < w:"],
    ),
    images(dtypes.bf16, False, 3),
    grouped,
    **{**_CONVOLVED, "sizes": ((1, 2, 5, 4, 3, 3, 3), (2, 17, 4, 6, 9, 3, 3)), "long": ((2, 33, 16, 17, 65, 3, 3),)},
)


def depthwise(x: Wide, w: Wide) -> Wide:
    return np.concatenate([convolved(x[:, c : c + 1], w[c : c + 1, None]) for c in range(x.shape[1])], axis=1)


add(
    "depthwise_bf16",
    nest(
        "x, f",
        "n, c, h, w = x.shape; c2, r, s = f.shape",
        "n, c, h, w",
        "x.dtype",
        "b: n, q: c, i: h, j: w",
        [("u", "r"), ("v", "s")],
        "x[b, q, y, z] * f[q, u, v]",
        inside=["y = i + u - 1", "z = j + v - 1", "if y >= 0 and y < h and z >= 0 and z < w:"],
    ),
    lambda rng, z: (values(rng, z[:4], dtypes.bf16), values(rng, (z[1], *z[5:]), dtypes.bf16)),
    depthwise,
    sizes=((1, 1, 1, 1, 0, 3, 3), (2, 5, 7, 9, 0, 3, 3)),
    empty=((0, 2, 3, 3, 0, 3, 3),),
    long=((2, 65, 31, 33, 0, 3, 3),),
    terms=lambda z: z[5] * z[6],
)

# Arrays as large as the results, which lie as they do or otherwise.
add(
    "gelu_and_residual",
    product_kernel("nk", result="tw.gelu(acc + c[j]) + r[i, j]", extra=", c, r"),
    factors("nk", dtypes.bf16, "n", "mn", beside=dtypes.bf16),
    partial(matrices, "nk"),
    finish=lambda s, a, b, c, r: gelu(s + c) + r,
)
add(
    "residual_f32",
    product_kernel("nk", dtype="tw.f32", result="acc + 2 * r[i, j]", extra=", r"),
    factors("nk", dtypes.bf16, "mn"),
    partial(matrices, "nk"),
    finish=lambda s, a, b, r: s + 2 * r,
)
add(
    "residual_across",
    product_kernel("nk", result="acc + r[j, i]", extra=", r"),
    factors("nk", dtypes.bf16, "nm", beside=dtypes.bf16),
    partial(matrices, "nk"),
    finish=lambda s, a, b, r: s + r.T,
)

# Images with channels first, of which Hopper makes ones that have them last.
CHANNELS_FIRST: tuple[Sizes, ...] = ((2, 32, 6, 5, 17, 2, 3), (1, 72, 9, 7, 80, 3, 3), (3, 40, 4, 8, 64, 1, 1), (1, 64, 12, 11, 40, 3, 2))
for _way, _dtype in (((1, 1, 1), dtypes.f16), ((1, 2, 2), dtypes.bf16), ((3, 0, 1), dtypes.bf16)):
    add(
        f"conv_nchw_s{_way[0]}p{_way[1]}d{_way[2]}_{_dtype}",
        convolution_kernel(False, *_way),
        images(_dtype, False),
        partial(convolved, stride=_way[0], pad=_way[1], dilation=_way[2]),
        torch=partial(torch_convolution, False, *_way),
        **{**_CONVOLVED, "sizes": CHANNELS_FIRST},
    )


def images_and_more(rng: np.random.Generator, sizes: Sizes) -> Arrays:
    n, _, h, w, k, r, s = sizes
    beside = values(rng, (k,), dtypes.f32), values(rng, (n, k, h + 3 - r, w + 3 - s), dtypes.bf16)
    return *images(dtypes.bf16, False)(rng, sizes), *beside


add(
    "conv_nchw_gelu_and_residual",
    nest(
        "x, f, c, t",
        "n, d, h, w = x.shape; k, e, r, s = f.shape; oh = h + 3 - r; ow = w + 3 - s",
        "n, k, oh, ow",
        "x.dtype",
        "b: n, o: k, i: oh, j: ow",
        [("q", "d"), ("u", "r"), ("v", "s")],
        "x[b, q, y, z] * f[o, q, u, v]",
        result="tw.gelu(acc + c[o]) + t[b, o, i, j]",
        inside=["y = i + u - 1", "z = j + v - 1", "if y >= 0 and y < h and z >= 0 and z < w:"],
    ),
    images_and_more,
    lambda x, f, c, t: convolved(x, f),
    finish=lambda s, x, f, c, t: gelu(s + c[:, None, None]) + t,
    **{**_CONVOLVED, "sizes": CHANNELS_FIRST},
)

BY_NAME = {case.name: case for case in MATRIX_CASES}
