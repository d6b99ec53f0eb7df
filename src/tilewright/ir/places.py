"""Blocks and threads in words. In: linear numbers, x fastest, and the extents; out: text for messages."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.nodes import Kernel


def split_index(number: int, extents: Sequence[int]) -> tuple[int, ...]:
    """The index along each axis."""
    index: list[int] = []
    for extent in extents:
        index.append(number % extent)
        number //= extent
    return tuple(index)


def block_text(grid: Sequence[int], block: int) -> str:
    return f"block ({', '.join(map(str, split_index(block, grid)))})"


def block_extents(kernel: Kernel) -> tuple[int, ...]:
    """Threads of a block along each axis, up to the last that has several."""
    shape = kernel.attrs.get("block", ())
    extents = [n for n in shape if isinstance(n, int)] if isinstance(shape, tuple) else []
    while extents and extents[-1] == 1:
        extents.pop()
    return tuple(extents) or (kernel.threads,)


def thread_text(kernel: Kernel, thread: int) -> str:
    """A thread of a block: by its indices where the block has several axes."""
    extents = block_extents(kernel)
    return f"thread {thread}" if len(extents) <= 1 else f"thread ({', '.join(map(str, split_index(thread, extents)))})"
