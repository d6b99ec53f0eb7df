"""Few results and long sums of bf16: tiles whose columns fit the results, and rows of words as they lie, in the emulator against float64."""

from __future__ import annotations

import numpy as np
import pytest

from kernels_matrix import PLAIN, again, on
from tilewright.base.dtypes import bf16
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device

FITTED = "family=wgmma k=64 epilogue_stages=1 store=direct"
WORDS = "family=mma persistent=0 k=64 stages=3"


@pytest.mark.parametrize(
    ("layout", "schedule", "sizes"),
    [
        ("kn", f"{FITTED} m=256 n=144 stages=4 split_k=3 swap_ab=1 math_warpgroups=2 pdl=1", (153, 264, 328)),
        ("kn", f"{FITTED} m=192 n=104 stages=5 split_k=2 swap_ab=1 math_warpgroups=3", (97, 200, 192)),
        ("nk", f"{FITTED} m=128 n=40 stages=8 split_k=2 math_warpgroups=2", (131, 37, 136)),
        ("nk", f"{FITTED} m=64 n=200 stages=4 split_k=2 math_warpgroups=1", (33, 199, 200)),
        ("kn", f"{WORDS} m=128 n=96 warps_m=4 warps_n=2 split_k=3", (153, 94, 350)),
        ("nk", f"{WORDS} m=64 n=128 warps_m=2 warps_n=4 split_k=2", (61, 130, 198)),
        ("kn", f"{WORDS} m=128 n=32 warps_m=8 warps_n=1 split_k=2", (31, 34, 130)),
    ],
)
def test_tiles_of_long_sums(layout: str, schedule: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    rng = np.random.default_rng(sizes)
    a = rng.standard_normal((m, k)).astype(bf16.numpy)
    b = rng.standard_normal((k, n) if layout == "kn" else (n, k)).astype(bf16.numpy)
    a[m // 2, k - 1] = np.inf
    kernel = again(PLAIN[layout], schedule=schedule)
    found = np.asarray(on(kernel, emulator_device("thread", parse_target("sm_90a")))((a, b))).astype(np.float64)
    with np.errstate(invalid="ignore"):
        wanted = a.astype(np.float64) @ (b if layout == "kn" else b.T).astype(np.float64)
    whole = np.arange(m) != m // 2
    np.testing.assert_allclose(found[whole], wanted[whole], atol=0.02 * float(np.abs(wanted[whole]).max()))
    np.testing.assert_array_equal(found[m // 2], wanted[m // 2])
