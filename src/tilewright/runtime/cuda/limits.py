"""The limits of a GPU, asked of its driver. In: a device; out: `Limits`. No context is made for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.base.limits import Limits

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext

_CLUSTER = 8
"""Blocks a cluster may have on every GPU that has clusters; more only where a kernel asks for it."""


def limits_of(gpu: CudaContext) -> Limits:
    ask = gpu.attribute
    x, y, z = (ask(f"MAX_BLOCK_DIM_{axis}") for axis in "XYZ")
    across, down, deep = (ask(f"MAX_GRID_DIM_{axis}") for axis in "XYZ")
    return Limits(
        threads_per_block=ask("MAX_THREADS_PER_BLOCK"),
        block=(x, y, z),
        grid=(across, down, deep),
        cluster=_CLUSTER if gpu.capability >= (9, 0) and ask("CLUSTER_LAUNCH") else 1,
        warp_size=ask("WARP_SIZE"),
        shared_per_block=ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_per_multiprocessor=ask("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        registers_per_thread=min(255, ask("MAX_REGISTERS_PER_BLOCK")),
        registers_per_multiprocessor=ask("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        threads_per_multiprocessor=ask("MAX_THREADS_PER_MULTIPROCESSOR"),
        vector_bytes=16,
        l2_bytes=ask("L2_CACHE_SIZE"),
        clock=ask("CLOCK_RATE") * 1000,
        memory_clock=ask("MEMORY_CLOCK_RATE") * 1000,
        memory_bus_bits=ask("GLOBAL_MEMORY_BUS_WIDTH"),
        copy_engines=ask("ASYNC_ENGINE_COUNT"),
    )
