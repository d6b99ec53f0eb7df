"""The tours of `examples/tours.py` as test cases."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "examples/tours.py"


def load_tours() -> tuple[Any, ...]:
    """Its `TOURS`."""
    return tuple(load_module().TOURS)


def load_module() -> Any:
    found = sys.modules.get("tours")
    if found is None:
        spec = importlib.util.spec_from_file_location("tours", PATH)
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules["tours"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found
