"""Explicit memory of explicit kernels: `gpu_alloc`, `gpu_copy_to`, `gpu_copy_from`, `gpu_free` and `gpu_sync`."""

from __future__ import annotations


def gpu_sync() -> None:
    """On the host: wait for all work on all GPUs. In a kernel: every thread of the block arrives before any leaves."""
    from tilewright.runtime import cuda

    for device in cuda.devices():
        device.synchronize()
