"""For every place in every order of passes, a small compilation that reaches it.

`PATHS` names, for each order, the compilation that takes its steps; `OTHER` those of steps that only certain kernels take. Nothing here is found in a cache:
kernels are made anew by each function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

import tilewright as tw
from kernels_attention import plain
from kernels_decode import one_length
from tilewright.base.dtypes import f32
from tilewright.base.target import parse_target
from tilewright.compile.driver import compile_kernel
from tilewright.compile.primitives import finished_program
from tilewright.compile.simt import addressed
from tilewright.frontend.python.functions import parse_scalar_function
from tilewright.primitives.functions import Monoid, scalar_function
from tilewright.primitives.scan import scan_program
from tilewright.primitives.scan_plan import ScanPlan, StateFunction

BF16 = ml_dtypes.bfloat16
Reach = Callable[[], object]


def numbers(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)  # type: ignore[call-overload, no-any-return]


@tw.kernel
def scale(m: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), m.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, j] * v[j]
    return out


def halved(x: float) -> float:
    return x * 0.5


@tw.kernel
def scaled_groups(x: tw.Array, w: tw.Array) -> tw.Array:
    """Rows of two axes, with a scale for each step of the first."""
    n, c, h = x.shape
    out = tw.empty((n, c, h), x.dtype)
    for i in tw.grid(n):
        total = tw.sum(x[i])
        for k in range(c):
            for y in range(h):
                out[i, k, y] = x[i, k, y] * w[k] / total
    return out


@tw.kernel
def centred(x: tw.Array) -> tw.Array:
    """Sums along columns, then differences: two kernels, the second of which needs all of the first."""
    rows, cols = x.shape
    total = tw.empty((cols,), tw.f32)
    for j in tw.grid(cols):
        s = 0.0
        for i in range(rows):
            s += x[i, j]
        total[j] = s
    out = tw.empty((rows, cols), x.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = x[i, j] - total[j] / rows
    return out


@tw.kernel
def with_itself(a: tw.Array) -> tw.Array:
    return a @ a.T


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[0]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = tw.f32(0)
        for p in range(k):
            total += a[i, p] * b[j, p]
        out[i, j] = total
    return out


@tw.kernel
def packed_rows(w: tw.Array, x: tw.Array) -> tw.Array:
    n, k = w.shape
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        total = 0.0
        for p in range(k):
            total += w[i, p] * x[p]
        out[i] = total
    return out


@tw.kernel
def gated(x: tw.Array, gate: tw.Array, up: tw.Array) -> tw.Array:
    """Two products of the same rows."""
    n, k = x.shape
    m = gate.shape[1]
    g = tw.empty((n, m), tw.f32)
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * gate[p, j]
        g[i, j] = total
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * up[p, j]
        out[i, j] = tw.silu(g[i, j]) * total
    return out


@tw.kernel
def gated_rows(x: tw.Array, gate: tw.Array, up: tw.Array) -> tw.Array:
    """Two products of the same few rows, with rows of the weights along the sum."""
    n, k = x.shape
    m = gate.shape[0]
    g = tw.empty((n, m), tw.f32)
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * gate[j, p]
        g[i, j] = total
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * up[j, p]
        out[i, j] = tw.silu(g[i, j]) * total
    return out


@tw.kernel
def planes(x: tw.Array, w: tw.Array) -> tw.Array:
    """A convolution of each plane by a window of its own."""
    c, height, width = x.shape
    _, kh, kw = w.shape
    out = tw.empty((c, height, width), x.dtype)
    for q, i, j in tw.grid(c, height, width):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                y = i + r - 1
                z = j + s - 1
                if y >= 0 and y < height and z >= 0 and z < width:
                    acc += x[q, y, z] * w[q, r, s]
        out[q, i, j] = acc
    return out


@tw.kernel
def spread(x: tw.Array, w: tw.Array) -> tw.Array:
    """A transposed convolution along rows, with steps of two."""
    n, channels, height, width = x.shape
    _, filters, taps = w.shape
    out = tw.empty((n, filters, height, 2 * width + 1), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, 2 * width + 1):
        acc = tw.f32(0)
        for c in range(channels):
            for r in range(taps):
                z = j - r
                if z % 2 == 0 and z >= 0 and z // 2 < width:
                    acc += x[b, c, i, z // 2] * w[c, f, r]
        out[b, f, i, j] = acc
    return out


@tw.kernel
def swapped(x: tw.Array, steps: int) -> tw.Array:
    """Steps that swap two arrays."""
    u = x * 1.0
    v = x * 1.0
    for _ in range(steps):
        for i in tw.grid(range(1, len(x))):
            v[i] = u[i - 1] + u[i]
        u, v = v, u
    return u


def doubled(x: tw.Array):
    i = tw.gpu_thread_id()
    if i < len(x):
        x[i] = tw.exp(x[i]) * 2.0 + 1.0


def lanes(x: tw.Array):
    (tw.f32x4.load(x, 0).shuffle(3, 2, 1, 0) + 1.0).store(x, 0)


BLOCKS = """
pipeline turned(x: tensor[n, m]) -> tensor[m, n]:
    let a = compute(x) { for i in 0..n, j in 0..m: out[i, j] = x[i, j] * 2.0 }
    let b = transpose(a, [1, 0])
    let c = compute(b) { for i in 0..m, j in 0..n: out[i, j] = b[i, j] + 1.0 }
    return c
"""


def stages(kernel: tw.Kernel[..., object], target: str, *arguments: object, **options: object) -> Reach:
    return lambda: tw.kernel(**options)(kernel.python).stages(*arguments, target=target)  # type: ignore[arg-type]


def portable(name: str = "wgsl") -> tuple[Any, Any, Any]:
    """A kernel for a GPU that lacks all that portable ones may lack."""
    kernel, target = tw.kernel(scale.python), replace(parse_target(name), max_turns=65535)
    return kernel.function, kernel._signature((numbers(8, 8), numbers(8)), {}, target), target


def compiled() -> object:
    kernel, target = tw.kernel(centred.python), parse_target("cpu")
    return compile_kernel(kernel.function, kernel._signature((numbers(8, 8),), {}, target), target)


SQUARE = numbers(64, 64, dtype=BF16)
ATTENTION = (*(numbers(1, 1, 64, 64, dtype=BF16),) * 3, 0.125)
GATED = numbers(64, 64), numbers(64, 64), numbers(64, 64)
WINDOWS = numbers(2, 16, 16), numbers(2, 3, 3)

SCALED = stages(scale, "sm_90a", numbers(8, 64), numbers(64))
PLANES = stages(planes, "sm_90a", *WINDOWS)
PACKED_ROWS = stages(packed_rows, "sm_90a", tw.quantize(numbers(8, 256), tw.q8_0), numbers(256))
PACKED_ON_ARM = stages(packed_rows, "aarch64-neon", tw.quantize(numbers(8, 256), tw.q8_0), numbers(256))
FEW_ROWS = stages(product, "sm_90a", numbers(2, 256, dtype=BF16), numbers(64, 256, dtype=BF16), schedule="family=gemv m=2 n=2 k=256")
ON_HOPPER = stages(product, "sm_90a", SQUARE, SQUARE, schedule="family=wgmma m=64 n=64 k=64 stages=2")
CACHED = (numbers(8, 64, dtype=np.float16), *(numbers(256, 2, 64, dtype=np.float16) for _ in range(2)), np.array([200], np.int32))
ATTENTION_ON_HOPPER = stages(plain, "sm_90a", *ATTENTION)
EXPLICIT_ON_CPU: Reach = lambda: tw.gpu(doubled)[1, 32](numbers(20), device="cpu")  # noqa: E731

PATHS: dict[str, Reach] = {
    "kernel": SCALED,
    "blocks": lambda: tw.load(BLOCKS).turned(numbers(3, 5), device="cpu"),
    "index checks": SCALED,
    "fusion": stages(centred, "sm_90a", numbers(8, 8)),
    "sizes": PLANES,
    "loop": SCALED,
    "plan": SCALED,
    "program": SCALED,
    "tile": SCALED,
    "thread": SCALED,
    "launches": stages(centred, "sm_90a", numbers(8, 8)),
    "ordered loops": stages(swapped, "x86-64-avx512", numbers(80), 3),
    "one launch": stages(centred, "sm_90a", numbers(8, 8), launches=1),
    "memory": compiled,
    "explicit checks": lambda: tw.gpu(check=True)(doubled)[1, 32](numbers(20), device="cpu"),
    "explicit": EXPLICIT_ON_CPU,
    "critical": lambda: tw.critical(halved)(3.0),
    "explicit addresses": lambda: addressed(tw.gpu(doubled)[1, 32].thread_stage(numbers(20)), parse_target("sm_90a")),
    "primitives": lambda: finished_program(scan_program(ScanPlan((f32,), (f32,), StateFunction(Monoid(f32, "add"))), parse_target("sm_90a")), parse_target("sm_90a")),
    "portable": lambda: compile_kernel(*portable()),
    "functions": lambda: scalar_function(parse_scalar_function(lambda a, b: a * b + 1), (f32, f32), f32),
}
OTHER: dict[tuple[str, str], Reach] = {
    ("loop", "drop_single"): stages(scale, "aarch64-neon", numbers(8, 64), numbers(64)),
    ("tile", "lower_contraction_amx"): stages(product, "x86-64-amx", SQUARE, SQUARE),
    ("tile", "lower_attention_cpu"): stages(plain, "x86-64-avx512", *ATTENTION),
    ("tile", "lower_products_cpu"): stages(gated, "x86-64-avx512", *GATED),
    ("tile", "lower_symmetric_cpu"): stages(with_itself, "x86-64-avx512", numbers(64, 64)),
    ("tile", "lower_contraction_cpu"): stages(product, "x86-64-avx512", numbers(64, 64), numbers(64, 64)),
    ("tile", "lower_attention"): ATTENTION_ON_HOPPER,
    ("tile", "lower_contraction"): ON_HOPPER,
    ("program", "split_blocks"): stages(packed_rows, "x86-64-avx2", tw.quantize(numbers(8, 256), tw.q8_0), numbers(256)),
    ("program", "packed_units"): PACKED_ROWS,
    ("program", "flatten_rows"): stages(scaled_groups, "sm_90a", numbers(2, 3, 8), numbers(3)),
    ("tile", "lower_gemv"): FEW_ROWS,
    ("tile", "fuse_loops"): stages(gated_rows, "sm_90a", numbers(1, 1024), numbers(4096, 1024), numbers(4096, 1024)),
    ("tile", "window_sums"): PLANES,
    ("tile", "fuse_multiply_add"): PLANES,
    ("thread", "lower_wgmma"): ON_HOPPER,
    ("thread", "lower_wgmma_attention"): ATTENTION_ON_HOPPER,
    ("thread", "lower_mma_attention"): stages(plain, "sm_80", *ATTENTION),
    ("thread", "lower_mma"): stages(product, "sm_80", SQUARE, SQUARE),
    ("thread", "lower_row_dots"): FEW_ROWS,
    ("thread", "dot_products"): stages(scale, "aarch64-neon", numbers(8, 64), numbers(64)),
    ("thread", "fetch_results"): stages(scale, "x86-64-avx512", numbers(8, 64), numbers(64)),
    ("thread", "interleave"): stages(scale, "aarch64-neon", numbers(8, 64), numbers(64)),
    ("thread", "choose_values"): stages(scale, "aarch64-neon", numbers(8, 64), numbers(64)),
    ("thread", "short_remainders"): stages(scale, "aarch64-neon", numbers(8, 64), numbers(64)),
    ("tile", "lower_packed_rows"): PACKED_ON_ARM,
    ("thread", "expand_dots"): PACKED_ON_ARM,
    ("thread", "outline"): stages(product, "x86-64-avx512", numbers(64, 64), numbers(64, 64)),
    ("thread", "merge_loads"): PACKED_ROWS,
    ("thread", "fetch_rows"): stages(
        packed_rows, "sm_90a", tw.quantize(numbers(8, 256), tw.q8_0), numbers(256), schedule="family=gemv m=1 n=4 k=256 vector=1 unit=8 matrix=1 pdl=1 fetch=1"
    ),
    ("thread", "merge_stores"): stages(product, "sm_90a", numbers(80, 64, dtype=BF16), tw.quantize(numbers(64, 64), tw.q8_0)),
    ("thread", "fuse_multiply_add"): stages(product, "sm_90a", numbers(32, 256, dtype=BF16), tw.quantize(numbers(64, 256), tw.q4_k)),
    ("thread", "early_loads"): stages(one_length, "sm_90a", *CACHED),
    ("thread", "lower_windows"): PLANES,
    ("thread", "lower_turned"): stages(spread, "sm_90a", np.zeros((8, 64, 48, 64), BF16), np.zeros((64, 128, 3), BF16)),
    ("portable", "split_vectors"): lambda: compile_kernel(*portable("msl")),
    ("explicit", "split_vectors"): lambda: tw.cpu(lanes)(numbers(4), device="emulator"),
}
