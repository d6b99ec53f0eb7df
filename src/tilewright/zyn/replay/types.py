"""What whoever makes replays of recorded runs and whoever calls them agree on."""

from __future__ import annotations

from collections.abc import Callable

Replay = Callable[..., object]
"""`replay(device, *inputs)`: the results of a run, or `MISS`."""
MISS = object()
"""What a replay gives for inputs it is not for."""
