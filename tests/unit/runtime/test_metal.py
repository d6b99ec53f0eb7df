"""The Metal runtime against a stand-in for pyobjc's Metal, which executes our text as C++; and what is said where there is no Metal."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

import metal_host
import tilewright as tw
from fake_metal import Metal
from tilewright.base.errors import CompilerBug, DeviceError
from tilewright.runtime.metal import device as runtime

needs_clang = pytest.mark.skipif(metal_host.CLANG is None, reason="clang-19 is not installed (Debian: clang-19)")


@tw.kernel
def scale(m: tw.Array, v: tw.Array, by: int) -> tw.Array:
    rows, columns = m.shape
    out = tw.empty((rows, columns), m.dtype)
    for i, j in tw.grid(rows, columns):
        out[i, j] = m[i, j] * v[j] + tw.f32(by)
    return out


@tw.kernel
def row_sums(m: tw.Array) -> tw.Array:
    rows, columns = m.shape
    out = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        total = tw.f32(0.0)
        for j in range(columns):
            total += m[i, j]
        out[i] = total
    return out


@tw.gpu
def doubles(x: tw.Array):
    i = tw.block.x * 32 + tw.thread.x
    if i < len(x):
        x[i] = x[i] * 2


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metal]:
    module = Metal(2)
    monkeypatch.setattr(runtime, "load_metal", lambda: (module, ""))
    runtime.FOUND.forget()
    yield module
    runtime.FOUND.forget()


@needs_clang
def test_calls_and_their_sequence(metal: Metal) -> None:
    m, v = np.arange(33 * 7, dtype=np.float32).reshape(33, 7), np.arange(7, dtype=np.float32)
    np.testing.assert_array_equal(scale(m, v, 5, device="metal"), m * v + np.float32(5))
    loads = [metal.calls.index(name) for name in ("newLibraryWithSource", "newComputePipelineState", "dispatch")]
    assert loads == sorted(loads)
    assert metal.calls[-2:] == ["dispatch", "commit"]
    before = len(metal.calls)
    x = tw.to_device(m, "metal:0")
    y = scale(x, tw.to_device(v, "metal:0"), -3)
    np.testing.assert_array_equal(row_sums(y).numpy(), (m * v + np.float32(-3)).sum(axis=1))
    assert metal.calls[before:].count("newLibraryWithSource") == 1  # the first kernel is loaded
    np.testing.assert_array_equal(y[1:3, ::2].numpy(), (m * v + np.float32(-3))[1:3, ::2])
    assert [one.id for one in tw.devices() if one.kind == "metal"] == ["metal:0", "metal:1"]


@needs_clang
def test_explicit_kernels_streams_and_events(metal: Metal) -> None:
    x = tw.to_device(np.arange(77, dtype=np.float32), "metal")
    stream = tw.Stream("metal")
    with stream:
        doubles[3, 32](x)
    event = stream.record()
    event.synchronize()
    np.testing.assert_array_equal(x.numpy(), 2 * np.arange(77, dtype=np.float32))


def test_rejected_text_is_a_bug_with_the_text_saved(metal: Metal) -> None:
    metal.reject = "program_source:3: error"
    with pytest.raises(CompilerBug, match=r"metal:0 \(Stand-in 0\) rejects the code of 'scale': program_source:3: error") as caught:
        scale(np.ones((2, 2), np.float32), np.ones(2, np.float32), 0, device="metal")
    place = str(caught.value).partition("the text is in ")[2].split()[0]
    with open(place) as file:
        assert "kernel void" in file.read()


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has Metal")
def test_elsewhere_there_is_no_metal() -> None:
    runtime.FOUND.forget()
    with pytest.raises(DeviceError, match=r"device 'metal' is not present: Metal is Apple's: it is there on macOS, and this is Linux"):
        scale(np.ones((2, 2), np.float32), np.ones(2, np.float32), 0, device="metal")
