"""What a device allows and has, as numbers a program can ask for. Plain data; 0 where a number has no meaning for the device."""

from __future__ import annotations

from tilewright.base.record import record


@record
class Limits:
    """Limits of a device. Sizes are bytes, rates are Hz."""

    threads_per_block: int = 1
    block: tuple[int, int, int] = (1, 1, 1)
    """Most threads of a block along each axis."""
    grid: tuple[int, int, int] = (2**31 - 1, 1, 1)
    """Most blocks along each axis."""
    cluster: int = 1
    """Most blocks of a cluster that every kernel may have."""
    warp_size: int = 1
    shared_per_block: int = 0
    shared_per_multiprocessor: int = 0
    registers_per_thread: int = 0
    registers_per_multiprocessor: int = 0
    threads_per_multiprocessor: int = 0
    vector_bytes: int = 0
    """Widest single access of a thread, or the SIMD registers of a core."""
    l2_bytes: int = 0
    clock: int = 0
    memory_clock: int = 0
    memory_bus_bits: int = 0
    copy_engines: int = 0

    def __repr__(self) -> str:
        shared = f", {self.shared_per_block} bytes of shared memory" if self.shared_per_block else ""
        return f"<limits: {self.threads_per_block} threads in a block{shared}, accesses of {self.vector_bytes} bytes; tilewright devices --limits lists all>"


@record
class Cache:
    """A cache of a CPU: `kind` is data, instruction or unified; `cores` share one of them."""

    level: int
    kind: str
    bytes: int
    cores: int
