"""Where tables of measurements lie, and whether there may be any. This is asked for every kernel, and few have one: the tables' own module (`tuning.py`) is
loaded where there may be.
"""

from __future__ import annotations

from pathlib import Path

from tilewright.base import environment
from tilewright.base.private_files import cache_root

_opened = False


def folder(root: Path | None = None) -> Path | None:
    """Where tables are kept; None where they are not kept on disk."""
    if root is None and not environment.is_on("TILEWRIGHT_CACHE"):
        return None
    try:
        return (root or cache_root()) / "tuning"
    except RuntimeError:  # no home directory
        return None


def opened() -> None:
    """Tables are open in this process: it may have some of its own."""
    global _opened
    _opened = True


def enabled() -> bool:
    """Whether tables are asked at all."""
    return environment.is_on("TILEWRIGHT_TUNING")


def may_have_tables() -> bool:
    """Whether there may be tables: in this process, or on disk."""
    if not enabled():
        return False
    where = None if _opened else folder()
    return _opened or (where is not None and where.is_dir())
