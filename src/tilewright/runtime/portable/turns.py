"""Launches against a driver's limit of loop iterations. In: a launch, the sizes and numbers of a call; out: nothing, or a `TargetLimit` before anything runs.

Mesa's llvmpipe leaves the loops of a thread after 65,535 iterations in all, and says nothing. A launch whose loops may be longer is refused; one with loops
whose end nobody knows before it runs is warned of, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from tilewright.base import environment
from tilewright.base.artifact import Artifact, Launch
from tilewright.base.errors import DeviceWarning, TargetLimit
from tilewright.base.sizes import add_numbers, has_numbers
from tilewright.base.target import Target


class TurnLimit:
    """The limit of a device, for the launches of one program."""

    def __init__(self, artifact: Artifact, target: Target, label: str) -> None:
        self.artifact, self.most, self.label = artifact, target.max_turns, label
        limited = [k for k, one in enumerate(artifact.launches) if self.most and (one.turns.constant is None or one.turns.constant > self.most)]
        self.by_sizes = frozenset(k for k in limited if not has_numbers(artifact.launches[k].turns))
        """Launches whose iterations the sizes of a call decide."""
        self.by_numbers = tuple(k for k in limited if k not in self.by_sizes)
        """Those that numbers of a call decide, too."""
        self._warned = not self.most or environment.word("TILEWRIGHT_WARN") == "off"

    def check(self, position: int, sizes: Mapping[str, int]) -> None:
        """Refuse a launch that is over the limit at these sizes."""
        if position in self.by_sizes:
            self._refuse(self.artifact.launches[position], sizes)

    def check_numbers(self, sizes: Mapping[str, int], scalars: Mapping[str, object]) -> None:
        """Refuse launches that are over the limit with these numbers."""
        if self.by_numbers:
            values = dict(sizes)
            add_numbers(values, {name: int(v) if hasattr(v, "__index__") else v for name, v in scalars.items()}, ())
            for position in self.by_numbers:
                launch = self.artifact.launches[position]
                if all(extent.evaluate(values) > 0 for extent in launch.grid):
                    self._refuse(launch, values)

    def _refuse(self, launch: Launch, values: Mapping[str, int]) -> None:
        count = launch.turns.evaluate(values)
        if count > self.most:
            where = f" ({launch.place})" if launch.place else ""
            raise TargetLimit.at(
                "TW020", f"kernel '{launch.entry}' of '{self.artifact.name}'{where}: the loops of a thread have up to {count} iterations, and {self.label} leaves them "
                f"after {self.most}", help="use smaller arrays or more threads, or another device: this driver is the CPU, which device='cpu' uses better",
            )  # fmt: skip

    def warn(self, launches: Sequence[Launch]) -> None:
        """Say once that loops whose end is not known may be left early."""
        open_ended = [] if self._warned else [one.entry for one in launches if one.open_loops]
        self._warned = True
        if open_ended:
            warnings.warn(
                f"{self.label} leaves the loops of a thread after {self.most} iterations in all, and says nothing; kernel '{open_ended[0]}' of '{self.artifact.name}' "
                "has loops whose length is known only as it runs: if they are longer, its results are wrong", DeviceWarning, stacklevel=2,
            )  # fmt: skip
