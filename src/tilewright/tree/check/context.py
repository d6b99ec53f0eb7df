"""Where one walk over a kernel is: its scope, the loops and conditions around, and the statements it has made.

Everything that checks a part of the kernel is given the same `Context`. It knows nothing of how expressions or statements are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tilewright.base.errors import Diagnostics
from tilewright.base.sizes import is_number
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.check.infer import default_float
from tilewright.tree.check.state import Key, Scope, State
from tilewright.tree.typed import Expr, IndexRef, Local, LoopVar, Shape, SizeValue, Stmt, TileLocal, Variable
from tilewright.tree.typed_walk import walk_expr

Late = tuple[Expr, tuple[Stmt, ...]]
"""An expression, and the statements that must come before it."""


class Skip(Exception):
    """An error was reported; the statement it is in is given up."""


@dataclass
class Spread:
    """A loop body that runs for every element of tiles of this shape; axes of extent 1 have no index."""

    shape: Shape
    vars: tuple[LoopVar | None, ...]
    depth: int
    """Loops around it."""
    guards: list[tuple[Expr, ...]] = field(default_factory=list)
    """What each statement about tiles is guarded by."""
    once: bool = False
    """It has stores that do not move along every axis."""

    def at(self, place: int) -> LoopVar | None:
        """The index of an axis, counted from the last as -1."""
        return self.vars[place] if -place <= len(self.vars) else None


class Context:
    """The place the walk is at: what it knows from earlier walks, the scope, the loops and conditions around, and the statements so far."""

    def __init__(self, flavour: str, state: State, sink: Diagnostics) -> None:
        self.is_python = flavour == "kernel"
        self.default_float = default_float(flavour)
        """What a weak float is when it meets nothing."""
        self.state = state
        self.sink = sink
        self.scope = Scope()
        self.loops: list[LoopVar] = []
        """The indices of the loops around."""
        self.fors: list[int] = []
        """The loops around, by the identity of their syntax nodes."""
        self.guarded = 0
        """Conditions around the current place: an access there may not happen."""
        self.guards: list[frozenset[LoopVar] | None] = []
        """The loop indices that each of them speaks of; None where it cannot be told."""
        self.spoken: dict[Variable, frozenset[LoopVar] | None] = {}
        """The loop indices that the values of variables so far depend on; None where it cannot be told."""
        self.out: list[Stmt] = []
        """The statements of the block being checked."""
        self.spread: Spread | None = None
        """The loop whose body runs for every element of tiles."""
        self.spread_key = 0
        """That loop, by the identity of its syntax node."""
        self.versions: dict[Variable | str, int] = {}
        """How often variables, and arrays by name, have been assigned so far."""
        self.implicits: set[str] = set()
        """Arrays between blocks that were put into one kernel: like ZynML's outputs they are as large as what is written to them."""
        self.carrying = False
        """The statement around assigns whole arrays."""
        self.in_turn: int | None = None
        """The statement of the kernel's top around, by the identity of its syntax node, where no loop around runs in any order."""
        self.tile_keys: dict[Variable, Key] = {}
        """The declarations of tiles that do not change."""
        self.masks: list[Expr] = []
        """The masks that select elements."""
        self.written_later: frozenset[str] = frozenset()
        """Arrays whose elements an ordered loop around writes: its reads may be of what iterations before wrote."""
        self.in_grid = False
        """A loop around runs its iterations in any order."""
        self._numbered = 0

    def fail(self, code: str, message: str, span: Span, help: str = "") -> Skip:
        """Report an error; the caller raises what comes back."""
        self.sink.error(code, message, span, help)
        return Skip()

    def outside_loops(self, what: str, span: Span) -> None:
        if self.loops or self.guarded or self.scope.parent is not None:
            raise self.fail("TW005", f"{what} must be at the top of the kernel, outside loops and ifs", span)

    def fresh(self, name: str) -> str:
        """A name for something the source does not name."""
        self._numbered += 1
        return f"{name}{self._numbered}"

    def changed(self, what: Variable | str) -> None:
        """A variable, or an array by name, is assigned to."""
        self.versions[what] = self.versions.get(what, 0) + 1

    def keep(self, tile: Variable, arrays: bool) -> None:
        """A tile is needed after what it is made of has changed: the next walk puts it into memory, where arrays can be assigned. `arrays`: arrays alone have changed, and
        the statement around need not assign any as a whole."""
        key = self.tile_keys.get(tile)
        if key is not None and key not in self.state.kept and (self.carrying or (arrays and self.in_turn is not None)):
            if not self.carrying and self.in_turn is not None:
                self.state.carried.setdefault(self.in_turn, {})
            self.state.kept.add(key)
            self.state.changed = True
            raise Skip

    # -- statements ---------------------------------------------------------------------------------------------------

    def emit(self, stmt: Stmt) -> None:
        """A statement comes next in the block being checked."""
        self.out.append(stmt)

    @contextmanager
    def collected(self) -> Iterator[list[Stmt]]:
        """Statements inside go to a list of their own."""
        before, self.out = self.out, []
        try:
            yield self.out
        finally:
            self.out = before

    @contextmanager
    def block(self) -> Iterator[list[Stmt]]:
        """Statements inside go to a list of their own, names to a scope of their own; loops entered inside end with it."""
        outer, self.scope = self.scope, Scope(self.scope)
        depth = len(self.loops)
        try:
            with self.collected() as statements:
                yield statements
        finally:
            self.scope = outer
            del self.loops[depth:]

    @contextmanager
    def loop_body(self, loop: syntax.For) -> Iterator[list[Stmt]]:
        """The block of a loop."""
        self.fors.append(id(loop))
        try:
            with self.block() as statements:
                yield statements
        finally:
            self.fors.pop()

    @contextmanager
    def inside(self, indices: Sequence[LoopVar]) -> Iterator[list[Stmt]]:
        """As `collected`, in loops over these indices."""
        self.loops.extend(indices)
        try:
            with self.collected() as statements:
                yield statements
        finally:
            del self.loops[len(self.loops) - len(indices) :]

    @contextmanager
    def condition(self, cond: Expr | None = None) -> Iterator[None]:
        """What is inside happens under a condition only."""
        self.guarded += 1
        self.guards.append(None if cond is None else self._guard(cond))
        try:
            yield
        finally:
            self.guarded -= 1
            self.guards.pop()

    def trusts(self, index: Expr, reach: bool = False) -> bool:
        """Whether a condition around may keep the index inside its array: it speaks of it, or may do so.

        `reach` asks how far the index goes: a condition on numbers alone says nothing about sizes, but may keep the access from happening."""
        own = self._spoken_of(index) or None
        return any(guard is None or own is None or guard & own or (reach and not guard) for guard in self.guards)

    def assigned(self, var: Variable, value: Expr) -> None:
        """A variable gets a value, maybe one of several: it speaks of what they speak of, and of what decides between them."""
        parts = [self.spoken.get(var, frozenset()), self._spoken_of(value), *self.guards]
        self.spoken[var] = frozenset().union(*(p for p in parts if p is not None)) if all(p is not None for p in parts) else None

    def _guard(self, cond: Expr) -> frozenset[LoopVar] | None:
        """What a condition speaks of. One about sizes alone may be about any index: it compares their bounds."""
        found = self._spoken_of(cond)
        about_sizes = any(isinstance(e, SizeValue) and not all(map(is_number, e.size.names)) for e in walk_expr(cond))
        return None if not found and (about_sizes or any(isinstance(e, Local) for e in walk_expr(cond))) else found

    def _spoken_of(self, expr: Expr) -> frozenset[LoopVar] | None:
        """The loop indices in an expression, also through variables; None where it cannot be told."""
        found: frozenset[LoopVar] = frozenset()
        for part in walk_expr(expr):
            if isinstance(part, IndexRef):
                found |= {part.var}
            elif isinstance(part, TileLocal):
                return None
            elif isinstance(part, Local):
                own = self.spoken.get(part.var)
                if own is None:
                    return None
                found |= own
        return found
