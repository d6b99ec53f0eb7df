"""A gallery of explicit kernels with one bug each, and of the same kernels without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simt_gallery.cases import Case


def all_cases() -> list[Case]:
    """Every case, by kind of bug."""
    from simt_gallery import barriers, bounds, copies, global_races, shared_races, uninitialised, warps

    modules = (bounds, shared_races, global_races, barriers, uninitialised, warps, copies)
    return [case for module in modules for case in module.gallery.cases]
