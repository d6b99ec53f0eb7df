"""Which kinds of devices there are. In: a kind, with a function that loads it; out: the kind, when somebody asks for it.

The first word of a device's name is its kind: `cpu`, `cuda:1`, `emulator:thread`. The package registers the kinds it brings along;
a program may register others (`docs/add-a-backend.md`). Nothing is loaded before a device of the kind is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Registration:
    """What is known of a kind before it is loaded.

    `load` gives the `execute.kinds.DeviceKind`; `usage` is how names of its devices are written, for messages (`gpu, gpu:N`); `example` is a
    name for messages, empty where it is none; `automatic`: whether `auto` means its first device, where there is one.
    """

    # A plain class: this module is part of every import of the package, and making a dataclass takes a millisecond.
    __slots__ = ("automatic", "example", "kind", "load", "usage")

    def __init__(self, kind: str, load: Callable[[], Any], usage: str, example: str, automatic: bool) -> None:
        self.kind, self.load, self.usage, self.example, self.automatic = kind, load, usage, example, automatic


_registered: dict[str, Registration] = {}
_loaded: dict[str, Any] = {}
_listeners: list[Callable[[], None]] = []


def register(kind: str, load: Callable[[], Any], usage: str = "", example: str = "", automatic: bool = False) -> None:
    """From now on names that begin with `kind` mean devices of the kind that `load()` gives."""
    _registered[kind] = Registration(kind, load, usage or f"{kind}, {kind}:N", example, automatic)
    _forget(kind)


def unregister(kind: str) -> None:
    """Forget a kind."""
    _registered.pop(kind, None)
    _forget(kind)


def _forget(kind: str) -> None:
    _loaded.pop(kind, None)
    for listener in _listeners:
        listener()


def when_kinds_change(listener: Callable[[], None]) -> None:
    """Have `listener` called whenever a kind comes or goes: what it remembers of devices by name may be wrong then."""
    _listeners.append(listener)


def registered() -> list[Registration]:
    """All kinds, in the order they were registered."""
    return list(_registered.values())


def is_registered(kind: str) -> bool:
    return kind in _registered


def load(kind: str) -> Any:
    """The kind, loaded."""
    found = _loaded.get(kind)
    if found is None:
        found = _loaded.setdefault(kind, _registered[kind].load())
    return found


def loaded() -> list[Any]:
    """The kinds that were loaded."""
    return list(_loaded.values())


def usage() -> str:
    """How devices are named, for messages."""
    return f"{', '.join(r.usage for r in _registered.values())} or auto"


def examples(quote: str = "'") -> str:
    """Names as examples: `'cpu' or 'gpu:0'`."""
    return " or ".join(f"{quote}{r.example}{quote}" for r in _registered.values() if r.example)


def accelerator() -> str:
    """The kind whose first device `auto` means, and that what needs a device with memory of its own asks for by default."""
    return next(r.kind for r in _registered.values() if r.automatic)


def accelerator_examples() -> str:
    """Names of two such devices, as a list in Python."""
    return f'["{accelerator()}:0", "{accelerator()}:1"]'
