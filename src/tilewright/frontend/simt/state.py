"""What is learnt of an explicit kernel's variables while it is built over and over.

A variable has one dtype in the whole function, the one that all its assignments meet in: kernels are built until no dtype changes (`Types`), so
that `total = 0.0` is an f32 where f32 numbers are added to it later.

`break`, `continue` and `return` are flags that what follows is guarded with. A flag only exists where something reads it; that too
is found out by building again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from tilewright.frontend.simt.source import FunctionSource
from tilewright.tree.check.infer import TypePair

Key = tuple[Hashable, ...]


@dataclass
class Types:
    """What was learnt about variables so far; `changed` when the kernel must be built again."""

    pairs: dict[Key, TypePair] = field(default_factory=dict)
    flags: set[Key] = field(default_factory=set)
    changed: bool = False
    sources: dict[object, FunctionSource] = field(default_factory=dict)
    """Functions that were called, already read."""

    def read_flag(self, key: Key) -> None:
        if key not in self.flags:
            self.flags.add(key)
            self.changed = True
