"""Which sizes are equal, and what each is called.

Every axis of an input has a name of its own (`x$0`). The checker records what it learns: that two names are the same
size, that a name is a size made of others, what the user calls it. `solve` gives each name the size it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.source import Span


@dataclass
class Equations:
    """What walks over the kernel found out about sizes. Only ever grows, in order of discovery."""

    axes: tuple[str, ...]
    """The axis names of the inputs, in call order."""
    same: dict[tuple[str, str], None] = field(default_factory=dict)
    defined: dict[tuple[str, Size], Span] = field(default_factory=dict)
    calls: dict[tuple[str, str], None] = field(default_factory=dict)
    """(name, what the user calls it): only how it is printed."""
    perhaps: dict[tuple[str, Size], None] = field(default_factory=dict)
    """Taken when the name is not bound by anything else."""
    used: dict[str, Span] = field(default_factory=dict)
    """Names the user wrote, where first."""
    ranges: set[str] = field(default_factory=set)
    """Those used as a loop bound."""

    def count(self) -> int:
        """Grows whenever something new was learnt."""
        return len(self.same) + len(self.defined) + len(self.calls) + len(self.perhaps) + len(self.used) + len(self.ranges)


@record
class Conflict:
    """A name that would have to be two different constants."""

    name: str
    first: Size
    second: Size
    span: Span


@record
class Solution:
    sizes: Mapping[str, Size] = field(default_factory=dict)
    unbound: frozenset[str] = frozenset()
    conflicts: tuple[Conflict, ...] = ()
    leftover: tuple[tuple[Size, Size, Span], ...] = ()
    """Pairs that must be equal and are not so by construction: checked at calls."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """For each name that appears in `sizes`, one the equations are written in."""

    def raw(self, size: Size) -> Size:
        """The size in the names that equations are written in."""
        return size.substitute({n: Size.of(self.origin[n]) for n in size.names if self.origin.get(n, n) != n})

    def of(self, name: str) -> Size:
        return self.sizes.get(name, Size.of(name))


class _Classes:
    """Sets of names that mean one size."""

    def __init__(self, axes: Iterable[str]) -> None:
        self.parent: dict[str, str] = {}
        self.axes = list(axes)
        self.user: dict[str, None] = {}

    def find(self, name: str) -> str:
        self.parent.setdefault(name, name)
        while self.parent[name] != name:
            name = self.parent[name]
        return name

    def union(self, a: str, b: str) -> None:
        first, second = self.find(a), self.find(b)
        if first != second:
            self.parent[second] = first

    def bound(self, name: str) -> bool:
        root = self.find(name)
        return any(self.find(axis) == root for axis in self.axes)


def solve(equations: Equations, reserved: frozenset[str]) -> Solution:
    """Every name's size. `reserved` names (parameters) are not used for sizes the user only happened to call so."""
    classes = _Classes(equations.axes)
    for name in (*equations.axes, *equations.used):
        classes.find(name)
    for a, b in equations.same:
        classes.union(a, b)
    definitions: dict[str, Size] = {}
    conflicts: list[Conflict] = []
    leftover: list[tuple[Size, Size, Span]] = []
    for (name, size), span in equations.defined.items():
        root = classes.find(name)
        known = definitions.get(root)
        if known is None and root not in {classes.find(n) for n in size.names}:
            definitions[root] = size
        elif known is not None and known != size:
            if known.constant is not None and size.constant is not None:
                conflicts.append(Conflict(name, known, size, span))
            else:
                leftover.append((known, size, span))
    for name, size in equations.perhaps:
        root = classes.find(name)
        if classes.bound(name) or root in definitions:
            continue
        if size.name is not None:
            classes.union(size.name, name)
        elif root not in {classes.find(n) for n in size.names}:
            definitions[root] = size
    definitions = {classes.find(root): size for root, size in definitions.items()}
    names = _titles(classes, equations, reserved)
    roots = {name: classes.find(name) for name in classes.parent}
    direct = {name: definitions.get(root, Size.of(names[root])) for name, root in roots.items()}
    sizes = {name: _expand(size, direct) for name, size in direct.items()}
    unbound = frozenset(n for n in equations.used if not classes.bound(n) and roots[n] not in definitions)
    missing = {n for n in equations.used if roots[n] in definitions and sizes[n].names & unbound}
    origin: dict[str, str] = {}
    for name, root in roots.items():
        origin.setdefault(names[root], name)
    return Solution(sizes, unbound | missing, tuple(conflicts), tuple(leftover), origin)


def _titles(classes: _Classes, equations: Equations, reserved: frozenset[str]) -> dict[str, str]:
    """What each set of names is called: by a name the user wrote as a size, one a variable has, or the first axis."""
    titles: dict[str, str] = {}
    taken: set[str] = set()
    for name in equations.used:
        root = classes.find(name)
        if root not in titles:
            titles[root] = name
            taken.add(name)
    for name, title in equations.calls:
        root = classes.find(name)
        if root not in titles and title not in taken and title not in reserved and title not in equations.used:
            titles[root] = title
            taken.add(title)
    for name in (*equations.axes, *classes.parent):
        titles.setdefault(classes.find(name), name)
    return titles


def _expand(size: Size, direct: Mapping[str, Size]) -> Size:
    """A definition with the names inside replaced by theirs; a circle stays as it is after a few rounds."""
    for _ in range(8):
        expanded = size.substitute({n: direct[n] for n in size.names if n in direct and direct[n] != Size.of(n)})
        if expanded == size:
            break
        size = expanded
    return size
