"""Exported GPU code, launched by its own loader in a process without Tilewright."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import parse_target
from tilewright.runtime.cuda import device as cuda

pytestmark = pytest.mark.requires("cuda")


@tw.kernel
def scaled(x: tw.Array, gain: float) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j] = x[i, j] * gain
    return out


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    n, k = a.shape
    m = b.shape[1]
    out = tw.empty((n, m), a.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def centred(x: tw.Array) -> tw.Array:
    n, m = x.shape
    means = tw.empty((m,), tw.f32)
    for j in tw.grid(m):
        total = 0.0
        for i in range(n):
            total += x[i, j]
        means[j] = total / n
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        out[i, j] = x[i, j] - means[j]
    return out


@tw.kernel(launches=1)
def together(x: tw.Array) -> tw.Array:
    """Two kernels in one cooperative launch."""
    n, m = x.shape
    means = tw.empty((m,), tw.f32)
    for j in tw.grid(m):
        total = 0.0
        for i in range(n):
            total += x[i, j]
        means[j] = total / n
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        out[i, j] = x[i, j] - means[j]
    return out


TEXT = """
import sys
sys.modules['tilewright'] = None
import torch
from scaled import scaled
from product import product
from centred import centred
from together import together
torch.manual_seed(0)
x = torch.randn(1024, 512, device='cuda')
out = torch.full_like(x, float('nan'))
assert scaled(x, 2.5, out=out) is out
assert torch.equal(out, x * 2.5)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    again = scaled(x, 0.5, stream=side.cuda_stream)
side.synchronize()
assert torch.equal(again, x * 0.5)
a, b = (torch.randn(1024, 512, device='cuda').bfloat16(), torch.randn(512, 768, device='cuda').bfloat16())
error = (product(a, b).double() - a.double() @ b.double()).abs().max().item()
assert error < 0.5, error
assert (centred(x) - (x - x.double().mean(0))).abs().max() < 1e-5
assert (together(x) - (x - x.double().mean(0))).abs().max() < 1e-5
try:
    product(a, b[:256])
except ValueError as problem:
    print(problem)
"""


def test_loaders(tmp_path: Path) -> None:
    target = cuda.devices()[0].target.name
    x = np.zeros((1024, 512), np.float32)
    half = np.zeros((1024, 512), tw.bf16.numpy)
    tw.export(scaled, x, 2.5, target=target, folder=tmp_path)
    tw.export(product, half, np.zeros((512, 768), tw.bf16.numpy), target=target, folder=tmp_path)
    tw.export(centred, x, target=target, folder=tmp_path)
    tw.export(together, x, target=target, folder=tmp_path)
    done = subprocess.run([sys.executable, "-c", TEXT], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "'b' has shape (256, 768), but (512, 768) is needed"


def test_ptx_alone(tmp_path: Path) -> None:
    """Without the cubin the driver compiles the PTX."""
    target = cuda.devices()[0].target.name
    assert parse_target(target).is_gpu
    tw.export(scaled, np.zeros((64, 64), np.float32), 2.5, target=target, folder=tmp_path)
    (tmp_path / "scaled.cubin").write_bytes(b"not code")
    text = (
        "import torch\nfrom scaled import scaled, Program, DESCRIPTION\nx = torch.randn(64, 64, device='cuda')\n"
        "only = Program({**DESCRIPTION, 'code': ('scaled.ptx',)})\nassert torch.equal(only(x, 3.0), x * 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
