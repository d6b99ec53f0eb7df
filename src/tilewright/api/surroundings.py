"""The Python code around a marked loop: what its names mean, and giving names new values from inside the call that runs the loop.

In: the frame that is about to iterate, or the function that stands for a loop. Names are those of Python: a function's own variables,
those it shares with functions around it, those of the module.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Protocol

_fast_locals = (
    # Before Python 3.13 what is written to `f_locals` has to be put back into the frame.
    ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_int)(("PyFrame_LocalsToFast", ctypes.pythonapi)) if sys.version_info < (3, 13) else None
)


class Surroundings(Protocol):
    """Names around a loop."""

    names: Mapping[str, object]

    def find(self, name: str) -> tuple[bool, object]:
        """Whether the variable of that name has a value, and that value."""

    def assign(self, values: Mapping[str, object]) -> None:
        """Give variables new values."""


class FrameSurroundings:
    """Those of a running frame."""

    def __init__(self, frame: FrameType) -> None:
        self.names: Mapping[str, object] = {**frame.f_globals, **frame.f_locals}
        self._frame = frame

    def _is_global(self, name: str) -> bool:
        code = self._frame.f_code
        own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        return bool(code.co_flags & inspect.CO_OPTIMIZED) and name not in own

    def find(self, name: str) -> tuple[bool, object]:
        where = self._frame.f_globals if self._is_global(name) else self._frame.f_locals
        return name in where, where.get(name)

    def assign(self, values: Mapping[str, object]) -> None:
        frame = self._frame
        variables = frame.f_locals
        for name, value in values.items():
            (frame.f_globals if self._is_global(name) else variables)[name] = value
        if _fast_locals is not None and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            _fast_locals(frame, 0)


class FunctionSurroundings:
    """Those of a function: the variables it shares with others."""

    def __init__(self, function: Callable[..., object], names: Mapping[str, object]) -> None:
        self.names = names
        function = inspect.unwrap(function)
        cells = getattr(function, "__closure__", None) or ()
        self._cells = dict(zip(function.__code__.co_freevars, cells, strict=True))
        self._globals: dict[str, object] = function.__globals__

    def find(self, name: str) -> tuple[bool, object]:
        cell = self._cells.get(name)
        if cell is None:
            return name in self._globals, self._globals.get(name)
        try:
            return True, cell.cell_contents
        except ValueError:
            return False, None

    def assign(self, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            cell = self._cells.get(name)
            if cell is None:
                self._globals[name] = value
            else:
                cell.cell_contents = value


__all__ = ["FrameSurroundings", "FunctionSurroundings", "Surroundings"]
