"""Machine code of the runtime itself. In: for a name, what builds its object; out: the object, when somebody needs it.

The code generator and the runtime do not know each other; whoever knows both says here where code comes from.
"""

from __future__ import annotations

from collections.abc import Callable

_builders: dict[str, Callable[[], bytes]] = {}


def provide(name: str, build: Callable[[], bytes]) -> None:
    """Tell where the object `name` comes from."""
    _builders[name] = build


def builder(name: str) -> Callable[[], bytes] | None:
    """What builds the object; None where nobody said."""
    return _builders.get(name)
