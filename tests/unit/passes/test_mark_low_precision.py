"""Functions of whose results few bits count: how many instructions they take on a GPU, and that they are right everywhere."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from kernels_matrix import gelu, on
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device
from tilewright.ir.nodes import walk

H200 = parse_target("sm_90a")


@tw.kernel
def gelu_f16(x: tw.Array) -> tw.Array:
    out = tw.empty(x.shape, tw.f16)
    for i in tw.grid(x.shape[0]):
        out[i] = tw.gelu(x[i])
    return out


@tw.kernel
def written_out(x: tw.Array) -> tw.Array:
    out = tw.empty(x.shape, tw.f16)
    for i in tw.grid(x.shape[0]):
        v = x[i]
        out[i] = 0.5 * v * (1.0 + tw.tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))
    return out


@tw.kernel
def scaled_power(x: tw.Array) -> tw.Array:
    out = tw.empty(x.shape, tw.f16)
    for i in tw.grid(x.shape[0]):
        out[i] = tw.exp(x[i] * 0.125 + 0.5)
    return out


def arithmetic(kernel: tw.Kernel[..., Any]) -> dict[str, int]:
    """The ops on floats one vector of results takes."""
    (call,) = kernel.stages(np.empty(1 << 20, np.float32), target="sm_90a").stages.thread.calls
    wanted = {"add", "mul", "fma", "exp2_approx", "rcp_approx", "neg", "div"}
    found = [op for op in walk(call.kernel.body) if op.opcode in wanted and "f32" in str(op.results[0].type)]
    powers = sum(op.opcode == "exp2_approx" for op in found)
    return {name: count // powers for name, count in Counter(op.opcode for op in found).items()}


@pytest.mark.parametrize("kernel", [gelu_f16, written_out])
def test_constants_of_a_gelu_are_one(kernel: tw.Kernel[..., Any]) -> None:
    # x x, its polynomial, times x, the power, plus one, the reciprocal, times x.
    assert arithmetic(kernel) == {"mul": 3, "fma": 1, "exp2_approx": 1, "add": 1, "rcp_approx": 1}


def test_the_base_of_a_power_is_part_of_what_it_is_scaled_by() -> None:
    assert arithmetic(scaled_power) == {"fma": 1, "exp2_approx": 1}


def points() -> np.ndarray:
    rng = np.random.default_rng(3)
    spread = rng.standard_normal(3000) * np.exp2(rng.uniform(-40, 6, 3000))
    return np.concatenate([spread, np.linspace(-12, 12, 1000), [0.0, -0.0, 1e19, -1e19, 3e38, -3e38, 1e-40]]).astype(np.float32)


@pytest.mark.parametrize("kernel", [gelu_f16, written_out])
def test_gelu_is_as_near_as_its_rounding_lets_it(kernel: tw.Kernel[..., Any]) -> None:
    x = points()
    found = on(kernel, emulator_device("thread", H200))((x,)).astype(np.float64)
    with np.errstate(all="ignore"):
        want = gelu(x.astype(np.float64))
        want = np.where(np.abs(want) > 65519, np.sign(want) * np.inf, want)
        far = np.abs(found - want) > np.abs(want) * (2.0**-11 + 2.0**-15) + 2.0**-25
    # What float64 loses below -6 is more than f16 would show.
    far &= ~((x < -6) & (np.abs(found) < 2.0**-24))
    assert not (far & np.isfinite(want)).any(), x[far & np.isfinite(want)]
    assert (found[np.isinf(want)] == want[np.isinf(want)]).all()


def test_gelu_of_infinity_and_nan() -> None:
    x = np.array([np.inf, np.nan, -np.inf] * 64, np.float32)
    found = on(gelu_f16, emulator_device("thread", H200))((x,))
    assert found[0] == np.inf
    assert np.isnan(found[1:3]).all()  # -inf times zero
