"""What fusion did with the kernels of a program, and what it left apart. Records alone: whoever has one kernel needs no more of fusion."""

from __future__ import annotations

from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.source import Span


@record
class Fused:
    """An array that two kernels no longer pass through memory."""

    array: str
    how: str
    producer: Span
    consumer: Span
    saved: Size
    """Bytes that are neither written nor read."""


@record
class Refused:
    """An array that still goes through memory, and why."""

    array: str
    producer: Span
    consumer: Span
    reason: str
    needed: Size | None = None
    """Bytes of it that one result of its reader needs, where that is more than one element: what a block would have to keep."""


@record
class FusionReport:
    fused: tuple[Fused, ...]
    refused: tuple[Refused, ...]
    before: int
    after: int
    """Kernels before and after."""
