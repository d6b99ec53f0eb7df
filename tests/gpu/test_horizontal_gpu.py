"""Products of the same rows side by side, and a whole transformer block, on a real GPU: against float64, the same bits as the products
alone, and the block on arrays that never leave the device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from conftest import require
from support import as_wide
from tilewright.runtime.memory.device_array import DeviceArray

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _device() -> None:
    require("cuda")


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"gpu_{name}", EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


SWIGLU = load("layers").swiglu
APART = {
    "bf16": "family=wgmma m=128 n=128 k=64 stages=4 math_warpgroups=2", "f16": "family=mma m=64 n=64 k=32 stages=4 warps_m=2 warps_n=2 persistent=0",
}  # fmt: skip
JOINED = {
    "bf16": "family=wgmma m=128 n=128 k=64 stages=4 math_warpgroups=2 horizontal=2",
    "f16": "family=wgmma m=128 n=64 k=64 stages=6 math_warpgroups=2 pingpong=1 mma_in_flight=1 horizontal=2 pdl=1",
}


def made(dtype: str, n: int, k: int, m: int) -> list[np.ndarray]:
    random = np.random.default_rng(n + k + m)
    kind: Any = ml_dtypes.bfloat16 if dtype == "bf16" else np.float16
    return [random.standard_normal((n, k)).astype(kind), *((random.standard_normal((k, m)) / k**0.5).astype(kind) for _ in range(2))]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("sizes", [(1000, 200, 520), (64, 64, 64), (129, 1000, 72), (4096, 768, 3072)], ids=str)
def test_gate_and_up(dtype: str, sizes: tuple[int, int, int]) -> None:
    arrays = made(dtype, *sizes)
    x, gate, up = (as_wide(a) for a in arrays)
    opened = x @ gate
    want = opened / (1 + np.exp(-opened)) * (x @ up)
    bound = 2.0 ** (-8 if dtype == "bf16" else -11) * np.abs(want) + 1e-5
    for kernel in (SWIGLU, tw.kernel(schedule=JOINED[dtype])(SWIGLU.python)):
        found = np.asarray(kernel(*arrays, device="cuda"))
        assert (np.abs(as_wide(found) - want) <= bound).all()
        assert len(kernel.last.launches) == 1
        again = np.asarray(kernel(*arrays, device="cuda"))
        assert found.tobytes() == again.tobytes()


def test_the_same_bits_as_one_product_at_a_time() -> None:
    arrays = made("bf16", 520, 264, 384)
    joined, apart = (tw.kernel(schedule=text)(SWIGLU.python) for text in (JOINED["bf16"], APART["bf16"]))
    first, second = (np.asarray(kernel(*arrays, device="cuda")) for kernel in (joined, apart))
    assert (len(joined.last.launches), len(apart.last.launches)) == (1, 2)
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_block_stays_on_the_device(dtype: str) -> None:
    module = load("transformer")
    random = np.random.default_rng(5)
    kind: Any = np.float32 if dtype == "f32" else ml_dtypes.bfloat16
    weights = {name: value.astype(kind) for name, value in module.make_weights(random, 256, 512).items()}
    x = random.standard_normal((2 * 64, 256)).astype(kind)
    want = module.reference(x, weights, 2, 4)
    there = {name: tw.to_device(value, "cuda") for name, value in weights.items()}
    given = tw.to_device(x, "cuda")
    found = module.block(given, there, batch=2, heads=4)
    assert isinstance(found, DeviceArray)
    bound = 2e-5 if dtype == "f32" else 16 * 2.0**-8
    assert np.abs(as_wide(found.numpy()) - want).max() <= bound
    target = tw.to_device(np.zeros_like(x), "cuda")
    assert module.block(given, there, batch=2, heads=4, out=target) is target
    assert target.numpy().tobytes() == found.numpy().tobytes()
