"""What the checker knows while it walks: scopes and their bindings, and the state that one walk leaves for the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewright.tree.infer import TypePair
from tilewright.tree.solve import Equations, Solution
from tilewright.tree.typed import ArrayInfo, Expr, LoopVar, ScalarInfo, Shape, Variable

Key = tuple[int, str]
"""A declaration: the identity of its syntax node, and the name."""


@dataclass
class VariableState:
    """What the walks so far know about a declared variable."""

    weak: TypePair | None = None
    """What its weak values meet in, and what the others do."""
    strong: TypePair | None = None
    assigned: bool = False


@dataclass
class OutputState:
    """What the walks so far know about an output that is only written to."""

    pair: TypePair | None = None
    shape: Shape | None = None


@dataclass
class State:
    """What one walk over the kernel leaves for the next; walks repeat until nothing changes."""

    equations: Equations
    solution: Solution = field(default_factory=Solution)
    variables: dict[Key, VariableState] = field(default_factory=dict)
    outputs: dict[str, OutputState] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    """Names of arrays the kernel returns."""
    changed: bool = False
    """What is known about variables changed."""
    reshaped: bool = False
    """The extent of an output changed."""


@dataclass(frozen=True)
class Slot:
    """A name bound to a variable."""

    var: Variable
    key: Key
    depth: int
    """Loops around the declaration."""
    fixed: bool = False
    """Its dtype was written down."""
    immutable: bool = False


@dataclass(frozen=True)
class Alias:
    """A name for a value that needs no variable: weak scalars, and array values not yet computed."""

    value: Expr
    key: Key


@dataclass(frozen=True)
class Poison:
    """A name whose declaration was wrong; using it says nothing more."""


Binding = Slot | Alias | Poison | LoopVar | ArrayInfo | ScalarInfo | tuple[Expr, ...]


class Scope:
    """Names of a block; looks outwards."""

    def __init__(self, parent: Scope | None = None) -> None:
        self.names: dict[str, Binding] = {}
        self.parent = parent

    def find(self, name: str) -> Binding | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None

    def visible(self) -> list[str]:
        own = list(self.names)
        return own if self.parent is None else own + [n for n in self.parent.visible() if n not in self.names]
