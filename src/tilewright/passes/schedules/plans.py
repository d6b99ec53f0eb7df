"""What is decided about the calls of a program before they are lowered: one schedule for each, or none where any size is served alike."""

from __future__ import annotations

from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import MatrixSchedule

Plan = MatrixSchedule | Schedule | None
Plans = tuple[Plan, ...]
"""One entry per call. A planned schedule depends on the very sizes of the call; code is kept for each choice."""
