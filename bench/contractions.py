"""Matrix products and convolutions: which are measured, with what data, and how the result is known to be right.

In: a `Row`, which is plain data, and a `Place`, where tensors live. Out: a `Problem`: buffers to go round, our kernel, the peers
of PyTorch (cuBLAS, cuDNN, oneDNN) and NumPy on the same data, and a reference in float64.

A shape is (M, N, K) for products, with the number of matrices before it where there are several, (N, C, K, H, W) for convolutions
and (N, C, H, W) for depthwise ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench import contraction_kernels as kernels

COLD_BYTES = 256 << 20
"""Calls go round buffers of at least this size together: several times the largest level-2 cache."""
FEW_ROWS = 64
"""Up to this many rows a product is bound by reading its weights."""
ROUND_TO = 64
"""Sizes that fit nothing are held against those rounded up to a multiple of this."""

STORED = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "tf32": torch.float32, "3xtf32": torch.float32,
    "f64": torch.float64, "i8": torch.int8, "f8e4m3": torch.float8_e4m3fn,
}  # fmt: skip
RESULT = {**STORED, "i8": torch.int32, "f8e4m3": torch.bfloat16}
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.int32: 0.0}
"""The largest relative error of one rounding to the result's dtype."""

Thunk = Callable[[], Tensor]
"""One call on the buffers of one slot. Returns where the result is, as our kernel would lay it out."""
Bind = Callable[[Sequence[Tensor], Tensor], Thunk]
"""What a peer does with the inputs and the output of a slot, arranged as it likes them before the clock runs."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    rounded: bool = False
    """Ours is also timed with every size rounded up."""

    @property
    def label(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))} {self.dtype}"

    @property
    def flops(self) -> int:
        if self.op.startswith("conv1x1"):
            return 2 * math.prod(self.shape)
        taps = 9 if self.op.startswith(("conv", "depthwise")) else 1
        return 2 * taps * math.prod(self.shape)

    @property
    def terms(self) -> int:
        """How many products one element of the result sums."""
        if self.op.startswith("depthwise"):
            return 9
        if self.op.startswith("conv"):
            return self.shape[1] * (9 if self.op.startswith("conv3x3") else 1)
        return self.shape[-1]

    @property
    def steady(self) -> bool:
        """Timed back to back after launches of the same kernel, as a device at its power limit runs."""
        return False

    @property
    def launches(self) -> int:
        """How many kernels a call may launch, about, whoever's it is: queues hold fewer calls of many."""
        return 1

    @property
    def streams(self) -> bool:
        """Bound by reading and writing its arrays: held against a plain copy."""
        return False

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights where reading them is what takes the time, else 0."""
        few = self.op == "linear" and self.shape[0] <= FEW_ROWS
        return self.shape[1] * self.shape[2] * STORED[self.dtype].itemsize if few else 0

    def rounded_up(self) -> Row:
        return replace(self, shape=tuple(-(-n // ROUND_TO) * ROUND_TO for n in self.shape), rounded=False)


@dataclass(frozen=True)
class Place:
    """Where the tensors live. `wrap` gives one to our kernels without a copy."""

    device: str
    wrap: Callable[[Tensor], object]
    synchronize: Callable[[], None]
    cold_bytes: int = COLD_BYTES
    compile: bool = False
    """Whether torch.compile takes part, where a row has it as a peer."""

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"


def host_view(tensor: Tensor) -> object:
    """A tensor in the host's memory as our kernels take it."""
    small = {torch.bfloat16: (torch.int16, ml_dtypes.bfloat16), torch.float8_e4m3fn: (torch.int8, ml_dtypes.float8_e4m3fn)}
    if tensor.dtype in small:
        storage, dtype = small[tensor.dtype]
        return tensor.view(storage).numpy().view(dtype)
    return tensor.numpy()


@dataclass
class Problem:
    """A row with its data in memory."""

    row: Row
    place: Place
    ours: Callable[[], Callable[..., object]]
    """Our kernel; called once, and may fail where a feature is missing."""
    inputs: Callable[[], list[Tensor]]
    output: Callable[[], Tensor]
    reference: Callable[..., Tensor]
    """Of the inputs as float64."""
    peers: dict[str, Bind]
    data: list[list[Tensor]] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    references: dict[int, Tensor] = field(default_factory=dict)
    bound: Callable[[bool], tuple[float, float | Tensor]] | None = None
    """How far a result may be from float64, of a peer or of ours; `tolerance` where there is none."""
    arrange: Bind | None = None
    """What we do with the tensors of a slot, where that is more than one call of `ours`."""
    optional: bool = False
    """A peer that cannot run is left out with a note, and is no error."""
    launches: Callable[[], int] | None = None
    """How many kernels the latest call of ours launched."""

    def __post_init__(self) -> None:
        first, out = self.inputs(), self.output()
        nbytes = self.nbytes_of([*first, out])
        slots = max(2, min(512, -(-self.place.cold_bytes // nbytes)))
        self.nbytes = nbytes
        self.data = [first, *(self.inputs() for _ in range(slots - 1))]
        self.outs = [out, *(self.output() for _ in range(slots - 1))]
        # The first and the last are checked; the others hold the same kind of data.
        for slot in (0, slots - 1):
            self.references[slot] = self.reference(*(wide(t) for t in self.data[slot]))

    @staticmethod
    def nbytes_of(tensors: Sequence[Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    def our_calls(self) -> list[Thunk]:
        if self.arrange is not None:
            return [self.arrange(inputs, out) for inputs, out in zip(self.data, self.outs, strict=True)]
        kernel = self.ours()
        return [self._our_call(kernel, slot) for slot in range(len(self.data))]

    def _our_call(self, kernel: Callable[..., object], slot: int) -> Thunk:
        wrapped, target, out = [self.place.wrap(t) for t in self.data[slot]], self.place.wrap(self.outs[slot]), self.outs[slot]

        def call() -> Tensor:
            kernel(*wrapped, out=target)
            return out

        return call

    def peer_calls(self, name: str) -> list[Thunk]:
        return [self.peers[name](inputs, out) for inputs, out in zip(self.data, self.outs, strict=True)]

    def poison(self) -> None:
        for slot in self.references:
            out = self.outs[slot]
            # No sum of products of 8-bit numbers comes near this.
            out.fill_(float("nan") if out.is_floating_point() else 2**31 - 1)

    def judge(self, slot: int, got: Tensor, peer: bool) -> tuple[str, float]:
        """What is wrong with a result ('' when nothing is), and its largest distance from the reference."""
        reference = self.references[slot]
        if got.shape != reference.shape:
            return f"shape {tuple(got.shape)}, expected {tuple(reference.shape)}", math.inf
        relative, absolute = self.bound(peer) if self.bound is not None else tolerance(self.row, peer)
        distance = (wide(got) - reference).abs_()
        # A poisoned NaN compares false, so it counts as wrong.
        wrong = ~(distance <= relative * reference.abs() + absolute)
        count = int(wrong.sum())
        if not count:
            return "", float(distance.max())
        flat = int(wrong.reshape(-1).to(torch.uint8).argmax())
        value, expected = wide(got).reshape(-1)[flat].item(), reference.reshape(-1)[flat].item()
        return f"{count} of {reference.numel()} wrong, one at flat index {flat}: {value}, expected {expected}", math.inf


def wide(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.element_size() == 1 else tensor).double()


def tolerance(row: Row, peer: bool) -> tuple[float, float]:
    """How far a result may be from float64: (relative to it, absolute), for factors near one.

    Ours sums in float32 and rounds once. Peers may round partial sums, and each step of several, to the result's dtype.
    """
    unit, terms = UNIT[RESULT[row.dtype]], row.terms
    if row.dtype == "i8":
        return 0.0, 0.0
    # Matrix units add up with truncation: three products of tf32 parts lose a little with each.
    sums = {"f64": 2.0**-49 * terms, "3xtf32": 2.0**-18 * terms}.get(row.dtype, 2.0**-20 * terms)
    if row.dtype in ("tf32", "f8e4m3"):
        # Factors of eleven bits, or sums of about fourteen: errors of either sign.
        sums = 16 * 2.0**-10 * math.sqrt(terms)
    if row.dtype == "f8e4m3":
        # Matrix units add eight-bit floats with fourteen bits and drop the rest: half a unit of the sum so far, 32 terms at a time.
        unit += terms / 32 * 2.0**-14
    if peer:
        return 4 * unit, sums + 4 * unit * math.sqrt(terms)
    return 1.01 * unit, sums


# -- the rows ---------------------------------------------------------------------------------------------------------


def gpu_rows() -> list[Row]:
    """Every row of the GPU table."""
    rows = []
    for dtype in ("bf16", "f16"):
        for op in ("matmul", "linear"):
            rows += [Row(op, (n, n, n), dtype) for n in (1024, 2048, 4096, 8192)]
    rows += [Row("matmul", shape, "bf16") for shape in (
        (3072, 3072, 3072), (6144, 6144, 4096), (4096, 14336, 4096), (512, 4096, 4096), (8192, 1024, 2048), (16384, 4096, 1024),
        (1024, 1024, 8192), (16384, 1024, 1024), (1024, 16384, 4096), (512, 512, 65536), (128, 8192, 8192), (4000, 3000, 1000),
    )]  # fmt: skip
    rows += [Row(op, (3000, 3000, 3000), "bf16", rounded=True) for op in ("matmul", "linear")]
    rows += [Row(op, (2047, 2047, 2047), "bf16", rounded=True) for op in ("matmul", "linear")]
    rows += [Row("matmul", shape, "bf16", rounded=True) for shape in ((333, 777, 555), (3000, 5120, 1537))]
    rows += [Row("matmul_batched", (64, 512, 512, 512), "bf16"), Row("linear_batched", (12, 512, 512, 64), "bf16")]
    rows += [Row("linear", (m, n, n), "bf16") for n in (4096, 8192) for m in (1, 4, 16, 64)]
    rows += [Row(op, (4096, 4096, 4096), dtype) for dtype in ("tf32", "3xtf32", "f32") for op in ("matmul", "linear")]
    rows += [Row("linear", (4096, 4096, 4096), dtype) for dtype in ("i8", "f8e4m3")]
    rows += [Row("linear_gelu", (4096, 4096, 4096), "bf16")]
    for layout in ("nhwc", "nchw"):
        rows += [Row(f"conv3x3_{layout}", shape, "bf16") for shape in ((32, 64, 64, 56, 56), (32, 256, 256, 14, 14))]
        rows += [Row(f"conv1x1_{layout}", (32, 256, 64, 56, 56), "bf16")]
    for layout in ("nhwc", "nchw"):
        for dtype in ("f32", "bf16"):
            shapes = ((32, 64, 56, 56), (32, 256, 14, 14), (32, 256, 56, 56))
            rows += [Row(f"depthwise_{layout}", shape, dtype) for shape in shapes]
    return rows


def cpu_rows() -> list[Row]:
    """Every row of the CPU table."""
    rows = [Row(op, (n, n, n), "f32") for op in ("matmul", "linear") for n in (512, 1024, 2048)]
    rows += [Row("matmul", (1024, 1024, 1024), "f64"), Row("matmul_batched", (32, 256, 256, 256), "f32")]
    rows += [Row("matmul", (n, n, n), "f32", rounded=True) for n in (511, 513, 1023, 1025)]
    rows += [Row("matmul", (777, 333, 555), "f32", rounded=True), Row("matmul", (1024, 1024, 1024), "bf16")]
    for layout in ("nchw", "nhwc"):
        rows += [Row(f"conv3x3_{layout}", (8, 64, 64, 56, 56), "f32"), Row(f"depthwise_{layout}", (8, 64, 56, 56), "f32")]
    return rows


# -- problems ---------------------------------------------------------------------------------------------------------


def problem(row: Row, place: Place) -> Problem:
    """The row's data, kernel and peers."""
    torch.backends.cuda.matmul.allow_tf32 = row.dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = row.dtype == "tf32"
    torch.backends.cudnn.benchmark = True
    if place.gpu:
        torch.backends.cuda.preferred_blas_library("default")
    if row.op.startswith(("conv", "depthwise")):
        return _convolution(row, place)
    return _fused(row, place) if row.op == "linear_gelu" else _product(row, place)


def companions(row: Row, place: Place) -> dict[str, Problem]:
    """Other problems of ours the row is held against, by the name of the variant."""
    if row.rounded:
        up = row.rounded_up()
        return {f"tilewright, {'x'.join(map(str, up.shape))}": problem(up, place)}
    if row.op == "linear_gelu":
        return {"tilewright, plain": problem(replace(row, op="linear"), place)}
    return {}


def random(place: Place, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype is torch.int8:
        return torch.randint(-127, 128, tuple(shape), dtype=dtype, device=place.device)
    return torch.randn(tuple(shape), device=place.device).to(dtype)


def empty(place: Place, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=place.device)


def _product(row: Row, place: Place) -> Problem:
    *batch, m, n, k = row.shape
    stored, transposed = STORED[row.dtype], row.op.startswith("linear")
    weights = (*batch, n, k) if transposed else (*batch, k, n)

    def second(b: Tensor) -> Tensor:
        return b.mT if transposed else b

    return Problem(
        row, place, lambda: _kernel(row), lambda: [random(place, (*batch, m, k), stored), random(place, weights, stored)],
        lambda: empty(place, (*batch, m, n), RESULT[row.dtype]), lambda a, b: torch.matmul(a, second(b)),
        _product_peers(row, place, second),
    )  # fmt: skip


def _kernel(row: Row) -> Callable[..., object]:
    special: dict[tuple[str, str], Any] = {
        ("matmul", "f64"): kernels.matmul_f64, ("linear", "i8"): kernels.linear_i8, ("linear", "f8e4m3"): kernels.linear_f8,
    }  # fmt: skip
    kernel: Any = special.get((row.op, row.dtype)) or getattr(kernels, row.op)
    return kernels.precise(kernel, row.dtype) if row.dtype in ("tf32", "3xtf32") else kernel  # type: ignore[no-any-return]


def _product_peers(row: Row, place: Place, second: Callable[[Tensor], Tensor]) -> dict[str, Bind]:
    if row.dtype == "i8":
        return {"torch _int_mm": writing(lambda a, b, out: torch._int_mm(a, second(b), out=out))}
    if row.dtype == "f8e4m3":
        one = torch.ones((), device=place.device)

        def scaled(fast: bool) -> Bind:
            return lambda inputs, out: lambda: torch._scaled_mm(
                inputs[0], second(inputs[1]), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        return {"torch _scaled_mm": scaled(False), "torch _scaled_mm, fast": scaled(True)}
    multiply = torch.bmm if len(row.shape) == 4 else torch.mm
    plain = writing(lambda a, b, out: multiply(a, second(b), out=out))
    if not place.gpu:
        numpy = {"numpy": _with_numpy(second)} if row.dtype in ("f32", "f64") else {}
        return {"torch": plain, **numpy}
    found = {"cublas": _through("cublas", plain), "cublaslt": _through("cublaslt", plain)}
    if row.op == "linear" and row.shape[0] == 1:
        found["torch mv"] = writing(lambda a, b, out: torch.mv(b, a[0], out=out[0]))
    return found


def writing(function: Callable[..., object]) -> Bind:
    """A peer that is called with the inputs and writes the output it is given."""

    def bind(inputs: Sequence[Tensor], out: Tensor) -> Thunk:
        def call() -> Tensor:
            function(*inputs, out)
            return out

        return call

    return bind


def _through(library: str, bind: Bind) -> Bind:
    """The same with PyTorch's products sent to this library."""

    def rebound(inputs: Sequence[Tensor], out: Tensor) -> Thunk:
        inner = bind(inputs, out)

        def call() -> Tensor:
            torch.backends.cuda.preferred_blas_library(library)
            return inner()

        return call

    return rebound


def _with_numpy(second: Callable[[Tensor], Tensor]) -> Bind:
    def bind(inputs: Sequence[Tensor], out: Tensor) -> Thunk:
        a, b, target = inputs[0].numpy(), second(inputs[1]).numpy(), out.numpy()

        def call() -> Tensor:
            np.matmul(a, b, out=target)
            return out

        return call

    return bind


def _fused(row: Row, place: Place) -> Problem:
    m, n, k = row.shape
    stored = STORED[row.dtype]

    def inputs() -> list[Tensor]:
        return [random(place, shape, stored) for shape in ((m, k), (n, k), (n,), (m, n))]

    def reference(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return functional.gelu(x @ w.mT + bias, approximate="tanh") + residual

    def with_out(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor, out: Tensor) -> None:
        torch.addmm(bias, x, w.mT, out=out)
        torch.ops.aten.gelu.out(out, approximate="tanh", out=out)
        out.add_(residual)

    def layers(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return functional.gelu(functional.linear(x, w, bias), approximate="tanh") + residual

    def epilogue(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return torch._addmm_activation(bias, x, w.mT, use_gelu=True).add_(residual)

    peers = {"torch out=": writing(with_out), "torch layers": returning(layers)}
    if place.gpu:
        peers["torch gelu in cublaslt"] = returning(epilogue)
    return Problem(row, place, lambda: kernels.linear_gelu, inputs, lambda: empty(place, (m, n), stored), reference, peers)


def returning(function: Callable[..., Tensor]) -> Bind:
    return lambda inputs, out: lambda: function(*inputs)


def _convolution(row: Row, place: Place) -> Problem:
    kind, layout = row.op.split("_")
    last = layout == "nhwc"
    depthwise = kind == "depthwise"
    n, c, k, h, w = row.shape if not depthwise else (*row.shape[:2], row.shape[1], *row.shape[2:])
    stored = STORED[row.dtype]
    weights: tuple[int, ...] = {
        "conv3x3": (k, 3, 3, c) if last else (k, c, 3, 3), "conv1x1": (k, c), "depthwise": (3, 3, c) if last else (c, 3, 3),
    }[kind]  # fmt: skip
    name = {"conv3x3": "conv", "conv1x1": "pointwise", "depthwise": "depthwise"}[kind]
    kernel: Any = getattr(kernels, f"{name}_{layout}")

    def logical(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Both as PyTorch numbers their axes, in the memory they have."""
        if kind == "conv1x1":
            weight = weight[:, :, None, None]
        elif depthwise:
            weight = (weight.permute(2, 0, 1) if last else weight)[:, None]
        elif last:
            weight = weight.permute(0, 3, 1, 2)
        return (x.permute(0, 3, 1, 2) if last else x), weight

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        """A sum over the taps, of products of shifted images."""
        image, taps = logical(x, weight)
        size = taps.shape[-1]
        padded = functional.pad(image.permute(0, 2, 3, 1), (0, 0, size // 2, size // 2, size // 2, size // 2))
        total = torch.zeros((n, h, w, k), dtype=torch.float64, device=x.device)
        for r in range(size):
            for s in range(size):
                shifted, tap = padded[:, r : r + h, s : s + w], taps[:, :, r, s]
                total += shifted * tap[:, 0] if depthwise else shifted @ tap.mT
        return total if last else total.permute(0, 3, 1, 2)

    def library(memory: torch.memory_format) -> Bind:
        def bind(inputs: Sequence[Tensor], out: Tensor) -> Thunk:
            image, taps = (t.contiguous(memory_format=memory) for t in logical(*inputs))
            pad, groups = taps.shape[-1] // 2, c if depthwise else 1

            def call() -> Tensor:
                result = functional.conv2d(image, taps, padding=pad, groups=groups)
                return result.permute(0, 2, 3, 1) if last else result

            return call

        return bind

    peers = {"torch channels_last": library(torch.channels_last), "torch contiguous": library(torch.contiguous_format)}
    if kind == "conv1x1" and last:
        peers["torch mm"] = writing(lambda x, weight, out: torch.mm(x.view(-1, c), weight.mT, out=out.view(-1, k)))
    return Problem(
        row, place, lambda: kernel,
        lambda: [random(place, (n, h, w, c) if last else (n, c, h, w), stored), random(place, weights, stored)],
        lambda: empty(place, (n, h, w, k) if last else (n, k, h, w), stored), reference, peers,
    )  # fmt: skip
