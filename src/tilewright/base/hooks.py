"""What an upper layer does for a lower one. In: a name with a function that loads who does it; out: who does it, when somebody asks.

A kernel that is called with a list of devices is spread over them by `distributed`, which stands above `execute`. So `execute` asks
here for what spreads calls, and the package's `__init__`, which knows all layers, says who that is. Nothing is loaded before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_loaders: dict[str, Callable[[], Any]] = {}


def provide(name: str, load: Callable[[], Any]) -> None:
    """From now on `load()` gives what `asked(name)` wants."""
    _loaders[name] = load


def asked(name: str) -> Any:
    """What was provided under this name."""
    return _loaders[name]()
