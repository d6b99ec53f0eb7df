"""Variables of an explicit kernel on their way through its control flow.

A `Scope` has the variables of one function (each call of a device function has one of its own). `save` and `restore` let branches
start from the same state. A variable has one dtype in the whole function, the one that all its assignments meet in: kernels are
built over and over until no dtype changes (`Types`), so that `total = 0.0` is an f32 where f32 numbers are added to it later.

`break`, `continue` and `return` are flags that what follows is guarded with. A flag only exists where something reads it; that too
is found out by building again.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable
from dataclasses import dataclass, field

from tilewright.frontend.simt_source import FunctionSource
from tilewright.frontend.simt_values import Val
from tilewright.tree.infer import TypePair

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


@dataclass(frozen=True)
class State:
    """What a scope knows at one point."""

    variables: dict[str, Val]
    missing: frozenset[str]
    dead: bool


@dataclass(eq=False)
class Scope:
    """The variables of one function while it is read."""

    key: Key
    source: FunctionSource
    outer: Scope | None = None
    """Of a nested function: the scope around it, whose variables it can read."""
    node: ast.FunctionDef | ast.Lambda | None = None
    """The function, where it is not all of its source."""
    variables: dict[str, Val] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Variables that have a value on some ways to this point only."""
    dead: bool = False
    """Whether this point is never reached."""
    loops: list[Loop] = field(default_factory=list)
    """The loops around this point."""

    def save(self) -> State:
        return State(dict(self.variables), frozenset(self.missing), self.dead)

    def restore(self, state: State) -> None:
        self.variables, self.missing, self.dead = dict(state.variables), set(state.missing), state.dead


@dataclass(eq=False)
class Loop:
    """A loop that is being read."""

    number: int
    left: list[frozenset[str]] = field(default_factory=list)
    """For each `break`: the names that have a value there."""
