"""What the checker knows while it walks: scopes and their bindings, and the state that one walk leaves for the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.check.infer import TypePair
from tilewright.tree.check.solve import Equations, Solution
from tilewright.tree.typed import ArrayInfo, Expr, LoopVar, ScalarInfo, Shape, Variable

Key = tuple[int, str]
"""A declaration: the identity of its syntax node, and the name."""


@dataclass
class VariableState:
    """What the walks so far know about a declared variable."""

    weak: TypePair | None = None
    """What its weak values meet in, and what the others do."""
    strong: TypePair | None = None
    shape: Shape = ()
    """Of one that holds a tile."""


@dataclass
class OutputState:
    """What the walks so far know about an output that is only written to."""

    pair: TypePair | None = None
    shape: Shape | None = None


@dataclass
class ComputedSize:
    """A size that calls compute from their numbers."""

    name: str
    span: Span
    checked: bool = False
    """Calls where it is below `least` are refused; else it counts as 0 there."""
    least: int = 0


class WalkAgain(Exception):
    """What was learnt of sizes is wrong: the walk begins anew."""


@dataclass
class State:
    """What one walk over the kernel leaves for the next; walks repeat until nothing changes."""

    equations: Equations
    solution: Solution = field(default_factory=Solution)
    variables: dict[Key, VariableState] = field(default_factory=dict)
    outputs: dict[str, OutputState] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    """Names of arrays the kernel returns."""
    tiled: dict[int, Shape] = field(default_factory=dict)
    """Loops (by the identity of their syntax node) whose body runs for every element of tiles of that shape."""
    assigned: frozenset[Key] = frozenset()
    """Declarations of names that are assigned to again."""
    carried: dict[int, dict[str, None]] = field(default_factory=dict)
    """Loops, ifs and whiles of the kernel's top (by the identity of their syntax node) that assign whole arrays, and the names of these."""
    stored: set[Key] = field(default_factory=set)
    """Array values whose elements are written later: they are in memory from the start."""
    kept: set[Key] = field(default_factory=set)
    """Tiles in such a statement that are needed after what they are made of has changed."""
    longer: set[str] = field(default_factory=set)
    """Axes of inputs that are longer than the loop that walks over them."""
    bound_whole: set[str] = field(default_factory=set)
    """Axes of inputs that are said to be as long as a loop that walks over them."""
    computed: dict[Size, ComputedSize] = field(default_factory=dict)
    """Sizes that calls compute from their numbers, by what they are made of: parameters and axes."""
    met: set[str] = field(default_factory=set)
    """Axes that meet others in array expressions."""
    changed: bool = False
    """This walk learnt something about a variable or an output."""


@record
class VariableSlot:
    """A name bound to a variable."""

    var: Variable
    key: Key
    depth: int
    """Loops around the declaration."""
    fixed: bool = False
    """Its dtype was written down."""
    immutable: bool = False


@record
class Alias:
    """A name for a value that needs no variable: weak scalars, and array values not yet computed."""

    value: Expr
    key: Key


@record
class TileValue:
    """A name bound to a tile. `limits` grows with what is assigned to it; `value` is what one that never changes was made from."""

    slot: VariableSlot
    shape: Shape
    limits: list[list[Expr]]
    held: bool = True
    value: Expr | None = None
    versions: tuple[tuple[Variable | str, int], ...] = ()


@record
class SharedArray:
    """A name bound to a shared array: one for each iteration of the loops around, so `lead` comes before its own indices."""

    array: ArrayInfo
    lead: tuple[Expr, ...]
    key: Key


@record
class Absent:
    """A parameter that the call left out: it is None."""


@record
class Poison:
    """A name whose declaration was wrong; using it says nothing more."""


Binding = VariableSlot | Alias | TileValue | SharedArray | Absent | Poison | LoopVar | ArrayInfo | ScalarInfo | tuple[Expr, ...]


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

    def rebind(self, name: str, binding: Binding) -> None:
        """A name that is known means something else from here on."""
        scope: Scope | None = self
        while scope is not None and name not in scope.names:
            scope = scope.parent
        assert scope is not None
        scope.names[name] = binding

    def visible(self) -> list[str]:
        names = list(self.names)
        return names if self.parent is None else names + [n for n in self.parent.visible() if n not in self.names]


def assigned_names(function: syntax.Function) -> frozenset[Key]:
    """The declarations whose names are assigned to later, found by the scopes of the source alone."""
    again: set[Key] = set()
    scopes: list[dict[str, Key | None]] = [dict.fromkeys(p.name for p in function.params)]

    def visit(stmts: tuple[syntax.Stmt, ...], names: tuple[str, ...] = ()) -> None:
        scopes.append(dict.fromkeys(names))
        for stmt in stmts:
            if isinstance(stmt, syntax.Let):
                scopes[-1].update((name, (id(stmt), name)) for name in stmt.targets)
            elif isinstance(stmt, syntax.Assign) and isinstance(stmt.target, syntax.Name):
                name = stmt.target.id
                scope = next((s for s in reversed(scopes) if name in s), None)
                if scope is None:
                    scopes[-1][name] = (id(stmt), name)
                elif (key := scope[name]) is not None:
                    again.add(key)
            elif isinstance(stmt, syntax.For):
                visit(stmt.body, stmt.vars)
            elif isinstance(stmt, syntax.ReduceNest):
                visit((stmt.loop,))
            elif isinstance(stmt, syntax.While):
                visit(stmt.body)
            elif isinstance(stmt, syntax.If):
                visit(stmt.then)
                visit(stmt.otherwise)
        scopes.pop()

    visit(function.body)
    return frozenset(again)
