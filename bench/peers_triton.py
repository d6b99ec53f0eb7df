"""Triton kernels as its tutorials write them, with 16 elements a thread: add, GELU and row sums."""

# Triton reads the kernels' source in its own way: their parameters are pointers and numbers without Python types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl

BLOCK = 4096
WARPS = 8


@triton.jit
def _add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def _gelu_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, mask=inside).to(tl.float32)
    u = 1.5957691216057308 * (v + 0.044715 * v * v * v)
    # 0.5 * (1 + tanh(u / 2)) is sigmoid(u)
    tl.store(out + at, (v * tl.sigmoid(u)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_sums_kernel(x, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + at, mask=at < cols, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(v, axis=0).to(out.dtype.element_ty))


def add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    n = x.numel()
    _add_kernel[(triton.cdiv(n, BLOCK),)](x, y, out, n, BLOCK=BLOCK, num_warps=WARPS)


def gelu(x: torch.Tensor, out: torch.Tensor) -> None:
    n = x.numel()
    _gelu_kernel[(triton.cdiv(n, BLOCK),)](x, out, n, BLOCK=BLOCK, num_warps=WARPS)


def row_sums(x: torch.Tensor, out: torch.Tensor) -> None:
    """`x` is contiguous."""
    rows, cols = x.shape
    _row_sums_kernel[(rows,)](x, out, cols, BLOCK=triton.next_power_of_2(cols), num_warps=WARPS)
