"""Objects whose calls go to a function that changes. In: functions, one after the other; out: calls of the latest.

Python calls an object that has `__call__` by way of a tuple and a dictionary, which takes longer than all of a stub. From 3.12
on it calls objects of classes made from `functools.partial` without either, and one without arguments of its own hands on what
came: so there an `Entry` is one. What a partial calls must outlive the call, though, and here it may be replaced in the middle
of one, by itself or by another thread. A partial therefore calls one function for good: a piece of machine code, never freed,
that looks up the latest entry and holds it meanwhile. Elsewhere `__call__` is a slot of the object, which holds the latest
function itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tilewright.base import abi
from tilewright.runtime.core.builtin import METH_FASTCALL_KEYWORDS, MethodDefinition, bind_python, builtin_function
from tilewright.runtime.core.objects import ObjectCode

_VECTORCALL = 1 << 11
"""Py_TPFLAGS_HAVE_VECTORCALL."""
_front: tuple[ObjectCode, MethodDefinition] | None = None
_arrange: MethodDefinition | None = None


def provide_front(code: ObjectCode) -> None:
    """Every stub brings the code along; the first is kept."""
    global _front, _arrange
    if _front is None:
        bind_python()
        _front = code, MethodDefinition(b"kernel", code.address(abi.FRONT), METH_FASTCALL_KEYWORDS, None)
        _arrange = MethodDefinition(b"kernel", code.address(abi.ARRANGE), METH_FASTCALL_KEYWORDS, None)


def arranger(
    latest: list[object], names: tuple[str, ...], positional: int, defaults: Mapping[str, object], general: Callable[..., object]
) -> Callable[..., object] | None:
    """A function that puts keywords and defaults in the order of the parameters and calls the entry that `latest` holds, in machine code. What it cannot
    arrange goes to `general` as it came. The first `positional` parameters may be given by position. None where there is no such code yet."""
    if _arrange is None:
        return None
    known = tuple(sys.intern(name) for name in names)
    filled = tuple(defaults.get(name, NotImplemented) for name in names)
    return builtin_function(_arrange, (latest, known, known[:positional], filled, general, (sys.intern("out"),)))


def _not_ready(*args: object, **keywords: object) -> object:
    raise TypeError("the object was never initialised")


if TYPE_CHECKING:

    class _Base:
        def __call__(self, *args: object, **keywords: object) -> object: ...
        def __setstate__(self, state: object) -> None: ...

    _Slot = _Base
else:
    _Base = functools.partial

    class _Slot:
        __slots__ = ("__call__", "__dict__", "__weakref__")


class PartialEntry(_Base):
    """Calls go to the function it was given last."""

    def __new__(cls, *args: Any, **keywords: Any) -> PartialEntry:
        return super().__new__(cls, _not_ready)  # type: ignore[call-arg]

    def __init__(self, function: Callable[..., object]) -> None:
        self._first = function
        self._latest = [function]
        self._fronted = False
        self._call(function)

    @property
    def entry(self) -> Callable[..., object]:
        """Where calls go."""
        return self._latest[0]

    def enter(self, function: Callable[..., object]) -> None:
        """Calls go to `function` from now on."""
        self._latest[0] = function
        if not self._fronted and _front is not None:
            self._fronted = True
            self._call(builtin_function(_front[1], self._latest))

    def _call(self, function: Callable[..., object]) -> None:
        self.__setstate__((function, (), {}, self.__dict__))


class SlotEntry(_Slot):
    """Calls go to the function it was given last."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.enter(function)

    @property
    def entry(self) -> Callable[..., object]:
        """Where calls go."""
        return self.__call__

    def enter(self, function: Callable[..., object]) -> None:
        """Calls go to `function` from now on."""
        self.__call__ = function  # type: ignore[method-assign]


if TYPE_CHECKING or PartialEntry.__flags__ & _VECTORCALL:
    Entry = PartialEntry
else:
    Entry = SlotEntry
