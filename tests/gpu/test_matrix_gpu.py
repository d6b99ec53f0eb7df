"""Contractions on a real GPU, against float64 and against PyTorch: every kernel of the table, odd and zero sizes, outputs that
are given, the same bits twice, and results of more than 2^31 elements.

`TILEWRIGHT_MATRIX_DEVICE=emulator:thread` runs the same tests on another device, at few and small sizes.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from conftest import require
from kernels_matrix import BY_NAME, MATRIX_CASES, Arrays, MatrixCase, Sizes, again, product_kernel
from tilewright.base.dtypes import bf16, f8e4m3, f16
from tilewright.execute.devices import find_device

DEVICE = os.environ.get("TILEWRIGHT_MATRIX_DEVICE", "cuda")
IS_GPU = DEVICE.startswith("cuda")
MOST_WORK = 1e9 if IS_GPU else 2e5
"""Multiplications above which a size is left out."""
WORSE = 1.5
"""How many times PyTorch's error ours may be."""
ENOUGH = 2048
"""Results from which on the largest error is not a matter of luck."""
TORCH_BITS = {bf16.numpy: ("bfloat16", np.int16), f16.numpy: ("float16", np.int16), f8e4m3.numpy: ("float8_e4m3fn", np.uint8)}


@pytest.fixture(autouse=True)
def _device() -> None:
    if IS_GPU:
        require("cuda")


def run(kernel: tw.Kernel[..., Any], arguments: Arrays, **keywords: object) -> np.ndarray:
    return np.asarray(kernel(*arguments, device=DEVICE, **keywords))


def sizes_of(case: MatrixCase) -> tuple[Sizes, ...]:
    every = (*case.sizes, *case.long)
    return every if IS_GPU else tuple(s for s in every if float(np.prod([max(1, x) for x in s])) <= MOST_WORK)[:2]


@pytest.mark.parametrize("case", MATRIX_CASES, ids=lambda case: case.name)
def test_the_table(case: MatrixCase) -> None:
    for sizes in sizes_of(case):
        case.check(lambda arguments: run(case.kernel, arguments), sizes, f"on {DEVICE}")


@pytest.mark.parametrize("case", MATRIX_CASES, ids=lambda case: case.name)
def test_zero_sizes(case: MatrixCase) -> None:
    for sizes in case.empty:
        case.check(lambda arguments: run(case.kernel, arguments), sizes, f"on {DEVICE}")


@pytest.mark.parametrize(
    "schedule",
    [
        "m=128 n=64 k=64 stages=8 math_warpgroups=2 to_channels_last=both",
        "m=128 n=128 k=64 stages=6 math_warpgroups=2 pingpong=1 mma_in_flight=1 to_channels_last=both",
        "m=128 n=64 k=64 stages=9 math_warpgroups=2 swap_ab=1 store=direct to_channels_last=image",
        "m=128 n=128 k=64 stages=6 math_warpgroups=2 pingpong=1 mma_in_flight=1 swap_ab=1 store=direct to_channels_last=image",
    ],
)
@pytest.mark.parametrize("name", ["conv_nchw_s1p1d1_bf16", "conv_nchw_s2p3d2_bf16", "conv_nchw_gelu_and_residual"])
def test_images_with_channels_first(name: str, schedule: str) -> None:
    if "wgmma" not in find_device(DEVICE).target.features:
        pytest.skip("turned images are for warp-group instructions")
    case = BY_NAME[name]
    kernel = again(case.kernel, schedule=f"family=wgmma {schedule}")
    for sizes in ((5, 64, 28, 28, 64, 3, 3), (3, 128, 14, 14, 256, 3, 3), (2, 40, 31, 33, 65, 3, 3)) if IS_GPU else ((2, 40, 5, 4, 17, 3, 3),):
        case.check(lambda arguments: run(kernel, arguments), sizes, f"on {DEVICE}")


# -- beside PyTorch ---------------------------------------------------------------------------------------------------


def to_torch(torch: Any, array: np.ndarray) -> Any:
    name, bits = TORCH_BITS.get(array.dtype, ("", np.dtype))
    tensor = torch.from_numpy(array.view(bits)).view(getattr(torch, name)) if name else torch.from_numpy(array)
    return tensor.to(DEVICE) if IS_GPU else tensor


def from_torch(torch: Any, tensor: Any) -> np.ndarray:
    wide: np.ndarray = tensor.detach().to(torch.float64).cpu().numpy()
    return wide


def errors(found: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """The largest, and the root of the mean square."""
    off = np.abs(found.astype(want.dtype) - want).astype(np.float64)
    return float(off.max(initial=0.0)), float(np.sqrt(np.mean(off**2)))


def chain_errors(case: MatrixCase, arguments: Arrays, want: np.ndarray) -> tuple[float, float]:
    """Those of one chain of multiply-adds in f32, where the case is a convolution of f32: that is what sums in parts promise (docs/numerics.md). PyTorch cuts some
    sums into so many pieces that it is closer still."""
    way = re.fullmatch(r"conv_nchw_s(\d)p(\d)d(\d)_f32", case.name)
    if way is None:
        return 0.0, 0.0
    stride, pad, dilation = map(int, way.groups())
    x, w = (a.astype(np.float64) for a in arguments[:2])
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    total = np.zeros(want.shape, np.float32)
    for c, u, v in itertools.product(*(range(e) for e in w.shape[1:])):
        at = padded[:, c, u * dilation :, v * dilation :][:, ::stride, ::stride][:, : want.shape[2], : want.shape[3]]
        total = (total + at[:, None] * w[None, :, c, u, v, None, None]).astype(np.float32)
    return errors(total, want)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="this Python has no torch")
@pytest.mark.parametrize("case", [c for c in MATRIX_CASES if c.torch], ids=lambda case: case.name)
def test_no_further_from_float64_than_torch(case: MatrixCase) -> None:
    import torch as module

    torch: Any = module
    if IS_GPU and not torch.cuda.is_available():
        pytest.skip("this torch sees no GPU")
    assert case.torch is not None
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.precision == "tf32"
    try:
        for sizes in case.long if IS_GPU else case.sizes[-1:]:
            arguments = case.arguments(sizes)
            # Of f64 only more bits tell who is closer.
            want = case.product(*(a.astype(np.longdouble) for a in arguments)) if case.accumulator == "f64" else case.expected(arguments)
            theirs = errors(from_torch(torch, case.torch(torch, *(to_torch(torch, a) for a in arguments))), want)
            ours = errors(run(case.kernel, arguments), want)
            if want.size >= ENOUGH and (IS_GPU or case.precision == "ieee"):
                label = f"{case.name}{list(sizes)}: largest and mean errors {ours}, of torch {theirs}"
                if case.precision == "tf32" and theirs[0] < 1e-5 * np.abs(want).max():
                    continue  # torch did not use tf32 here: it does not for sizes that are not aligned
                chain = chain_errors(case, arguments, want)
                assert ours[0] <= max(WORSE * theirs[0], chain[0]), label
                assert ours[1] <= max(WORSE * theirs[1], chain[1]), label
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


# -- outputs, repetition, arrays of the device ------------------------------------------------------------------------

SOME = (
    "kn_bf16",
    "nk_f16",
    "kn_f32",
    "nk_tf32",
    "kn_f64",
    "nk_i8",
    "bias_gelu_residual",
    "batched_bf16",
    "conv_nhwc_s1p1d1_bf16",
)


@pytest.mark.parametrize("name", SOME)
def test_the_same_bits_every_time(name: str) -> None:
    case = BY_NAME[name]
    for sizes in case.long[-2:] if IS_GPU else sizes_of(case)[-1:]:
        arguments = case.arguments(sizes)
        seen = {run(case.kernel, arguments).tobytes() for _ in range(10 if IS_GPU else 2)}
        assert len(seen) == 1, f"{name}{list(sizes)}"


def test_the_same_bits_when_the_sum_is_cut() -> None:
    """Few results of a long sum: several blocks compute parts of each."""
    case, sizes = BY_NAME["nk_bf16_to_f32"], (64, 64, 16384 if IS_GPU else 1030)
    arguments = case.arguments(sizes)
    seen = [run(case.kernel, arguments) for _ in range(10 if IS_GPU else 2)]
    case.compare(seen[0], arguments, sizes)
    assert len({s.tobytes() for s in seen}) == 1


@pytest.mark.parametrize("name", SOME)
def test_an_output_that_is_given_is_filled(name: str) -> None:
    case = BY_NAME[name]
    sizes = sizes_of(case)[-1]
    arguments = case.arguments(sizes)
    want = run(case.kernel, arguments)
    out = np.full(want.shape, 77, want.dtype)
    assert case.kernel(*arguments, device=DEVICE, out=out) is out
    np.testing.assert_array_equal(out, want)


def test_views() -> None:
    case, sizes = BY_NAME["kn_bf16"], (33, 31, 65)
    a, b = case.arguments(sizes)
    given = {
        "every second": (np.repeat(a, 2, axis=1)[:, ::2], np.repeat(b, 3, axis=0)[::3]),
        "backwards": (a[::-1, ::-1], b[::-1, ::-1]),
        "transposed": (np.asfortranarray(a), np.asfortranarray(b)),
        "from the middle": (np.pad(a, 3)[3:-3, 3:-3], np.pad(b, 1)[1:-1, 1:-1]),
    }
    for name, views in given.items():
        case.compare(run(case.kernel, views), views, sizes, name)


@pytest.mark.skipif(not IS_GPU, reason="device arrays are a GPU's")
@pytest.mark.parametrize("shift", [1, 3, 8])
def test_device_arrays_that_begin_anywhere(shift: int) -> None:
    """No alignment may be assumed of a view, neither for the copy engine nor for wide loads and stores."""
    from tilewright.runtime.cuda import device as cuda

    gpu = cuda.devices()[0]
    case, sizes = BY_NAME["nk_bf16"], (64, 72, 136)
    arguments = case.arguments(sizes)
    want = run(case.kernel, arguments)

    def shifted(array: np.ndarray) -> Any:
        whole: Any = gpu.from_numpy(np.concatenate([np.zeros(shift, array.dtype), array.ravel()]))
        return whole[shift:].reshape(*array.shape)

    result: Any = case.kernel(*(shifted(a) for a in arguments))
    case.compare(result.numpy(), arguments, sizes)
    target = shifted(np.zeros_like(want))
    case.kernel(*(gpu.from_numpy(a) for a in arguments), out=target)
    np.testing.assert_array_equal(target.numpy(), want)


# -- NaN, infinity, many elements -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kn_bf16", "nk_bf16", "nk_tf32", "kn_f32", "kn_f64"])
def test_nan_and_infinity_reach_their_row_or_column_only(name: str) -> None:
    case = BY_NAME[name]
    m, n, k = (257, 131, 203) if IS_GPU else (35, 67, 43)
    arguments = case.arguments((m, n, k))
    rows, columns = arguments[0], arguments[1] if name.startswith("kn") else arguments[1].T
    rows[m - 1, k - 1], columns[k - 1, n - 1] = np.nan, np.inf
    wide = run(case.kernel, arguments).astype(np.float64)
    reached = np.zeros(wide.shape, bool)
    reached[m - 1], reached[:, n - 1] = True, True
    assert np.isnan(wide[m - 1]).all()
    assert np.isinf(wide[: m - 1, n - 1]).all()
    assert np.isfinite(wide[~reached]).all()


@pytest.mark.skipif(not IS_GPU, reason="needs a GPU's memory")
@pytest.mark.parametrize("k", [8, 5], ids=["as it is", "packed"])
def test_more_than_two_to_the_31_results(k: int) -> None:
    from tilewright.runtime.cuda import device as cuda

    gpu = cuda.devices()[0]
    m = n = 46_400
    if gpu.memory < 12 << 30:
        pytest.skip("needs 12 GB of device memory")
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, 4, (rows, k)).astype(bf16.numpy) for rows in (m, n))
    result: Any = product_kernel("nk")(gpu.from_numpy(a), gpu.from_numpy(b))
    assert result.shape == (m, n) and m * n > 2**31
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    # Small whole numbers: every sum is exact. The last rows lie beyond 2^31 elements.
    for first in (0, 2**31 // n - 64, m - 128):
        part = np.asarray(result[first : first + 128].numpy()).astype(np.float32)
        np.testing.assert_array_equal(part, wide_a[first : first + 128] @ wide_b.T)
