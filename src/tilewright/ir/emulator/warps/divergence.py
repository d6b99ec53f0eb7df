"""Words for threads that are not where the others are. In: a frame and lanes of it; out: text for a message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.ir.emulator.frames import Frame
from tilewright.ir.nodes import Op

Array = np.ndarray


def thread_ranges(threads: Sequence[int]) -> str:
    """`thread 3`, `threads 0-15, 20`."""
    parts: list[list[int]] = []
    for thread in threads:
        if parts and thread == parts[-1][1] + 1:
            parts[-1][1] = thread
        else:
            parts.append([thread, thread])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    return f"thread{'s' if len(threads) > 1 else ''} {text}"


def elsewhere(frame: Frame, first: int, missing: Array, lane: int) -> str:
    """Where the threads of a warp that are not here went."""
    places: dict[Op, list[int]] = {}
    for each in missing:
        left = frame.left_at(lane + int(each))
        if left is not None:
            places.setdefault(left, []).append(first + int(each))
    texts = [
        f"{thread_ranges(threads)} {'went the other way at' if op.opcode == 'if' else 'left'} "
        f"the `{op.opcode}` at {op.span.place()}"
        for op, threads in places.items()
    ]
    return f": {', '.join(texts)}" if texts else ""
