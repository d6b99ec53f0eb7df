"""A kernel's programs on the CPU that are compiled in tiers (`compile/tiers.py`).

In: what a call is compiled for. Out: the program to run: quick code until the background has the optimised one, which takes its place between two calls.
Quick code has no entry stub, so that its calls come through Python, where programs are exchanged; the calls of optimised code know nothing of tiers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

from tilewright.base.artifact import Artifact
from tilewright.base.forks import fork_safe_lock
from tilewright.compile import tiers
from tilewright.compile.tiers import Tier
from tilewright.execute.speed_warnings import announced, caller
from tilewright.runtime.cpu import program as cpu


class TieredPrograms:
    """Programs whose optimised code is on its way, by what they are compiled for."""

    def __init__(self, name: str) -> None:
        self.name = name
        """That of the kernel."""
        self.lock = fork_safe_lock()
        """Held while a first program is kept."""
        self._tiers: dict[Hashable, Tier] = {}
        self._new: list[Tier] = []
        """Those that the background has not heard of."""

    def first(self, begin: Callable[[], Artifact | Tier]) -> tuple[cpu.CpuProgram, Tier | None]:
        """The program for a first call, and its tier if it is quick code; `begin` is asked for them."""
        found = begin()
        if not isinstance(found, Tier):
            return cpu.load(announced(found)), None
        found.load = cpu.load
        tiers.count_call()
        return cpu.load(found.artifact), found

    def add(self, key: Hashable, tier: Tier) -> None:
        """Remember the tier of the program with this key; the background hears of it after the call."""
        self._tiers[key] = tier
        self._new.append(tier)

    def holds(self, key: Hashable) -> bool:
        """Whether the program with this key is still to be exchanged."""
        return key in self._tiers

    def after_call(self) -> None:
        """A call is over, whose threads the background would have slowed down."""
        while self._new:
            tiers.add(self._new.pop())

    def exchanged(self, key: Hashable, program: cpu.CpuProgram, now: bool = False) -> cpu.CpuProgram:
        """The program that takes the place of another one; that one where there is none yet. `now`: waits for it."""
        tier = self._tiers.get(key)
        if tier is None:
            return program
        if now and tier.error is None:
            tier.finish()
        if tier.ready is not None:
            assert isinstance(tier.ready, cpu.CpuProgram)
            if self._tiers.pop(key, None) is not None:
                tiers.count_exchange()
                announced(tier.ready.artifact)
            return tier.ready
        if tier.error is None:
            tiers.add(tier)
            tiers.count_call()
        elif self._tiers.pop(key, None) is not None:
            path, line = caller()
            text = f"{self.name} stays with quickly compiled code: the optimised one could not be compiled in the background: {tier.error}"
            warnings.warn_explicit(RuntimeWarning(text), None, path, line)
        return program
