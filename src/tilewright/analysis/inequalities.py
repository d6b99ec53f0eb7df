"""Whether linear inequalities over integers can all hold: Fourier's elimination, for a few of them.

An inequality says that `constant + Σ factor * atom` is not negative. Atoms are anything hashable. Every answer is safe: `False` means "not proven".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import gcd

Terms = Mapping[Hashable, int]
Inequality = tuple[dict[Hashable, int], int]
"""The factors of atoms, and the constant."""
_Numbered = tuple[dict[int, int], int]
"""An inequality whose atoms are numbers."""
_Key = tuple[tuple[int, int], ...]
"""The factors of numbered atoms, in order."""

MOST = 240
"""Inequalities that are looked at together; beyond it nothing is proven."""


def plus(a: Inequality, b: Inequality, scale: int = 1) -> Inequality:
    """`a + scale * b`"""
    factors = dict(a[0])
    for atom, factor in b[0].items():
        total = factors.get(atom, 0) + factor * scale
        if total:
            factors[atom] = total
        else:
            factors.pop(atom, None)
    return factors, a[1] + b[1] * scale


def negated(goal: Inequality) -> Inequality:
    """What holds where the goal does not: it is -1 or less."""
    return {atom: -factor for atom, factor in goal[0].items()}, -goal[1] - 1


def related(goal: Iterable[Hashable], facts: Sequence[Inequality]) -> list[Inequality]:
    """The facts that have to do with the goal's atoms, directly or through others."""
    atoms, waiting, found = set(goal), list(facts), list[Inequality]()
    while True:
        near = [fact for fact in waiting if any(atom in atoms for atom in fact[0]) or not fact[0]]
        if not near:
            return found
        found += near
        waiting = [fact for fact in waiting if not any(fact is other for other in near)]
        for fact in near:
            atoms.update(fact[0])


def contradict(facts: Sequence[Inequality]) -> bool:
    """Whether no integers satisfy all of them."""
    # Atoms may be large trees, whose hashes cost more than all the rest: here they are numbers, in the order they come in.
    numbers: dict[Hashable, int] = {}
    current: dict[_Key, int] = {}
    for factors, constant in facts:
        numbered = {numbers.setdefault(atom, len(numbers)): factor for atom, factor in factors.items()}
        if not _keep(current, (numbered, constant)):
            return True
    while current:
        signs: dict[int, list[int]] = {}
        for key in current:
            for atom, factor in key:
                signs.setdefault(atom, [0, 0])[factor > 0] += 1
        if not signs:
            return False
        atom = min(signs, key=lambda a: (signs[a][0] * signs[a][1] - sum(signs[a]), a))
        above, below, rest = list[_Numbered](), list[_Numbered](), dict[_Key, int]()
        for key, constant in current.items():
            factors_of = dict(key)
            factor = factors_of.get(atom, 0)
            if not factor:
                rest[key] = constant
            else:
                (above if factor > 0 else below).append((factors_of, constant))
        for low in above:
            for high in below:
                if not _keep(rest, _combined(low, -high[0][atom], high, low[0][atom])):
                    return True
        if len(rest) > MOST:
            return False
        current = rest
    return False


def _combined(a: _Numbered, scale_a: int, b: _Numbered, scale_b: int) -> _Numbered:
    """`scale_a * a + scale_b * b`"""
    factors = {atom: factor * scale_a for atom, factor in a[0].items()}
    for atom, factor in b[0].items():
        total = factors.get(atom, 0) + factor * scale_b
        if total:
            factors[atom] = total
        else:
            factors.pop(atom, None)
    return factors, a[1] * scale_a + b[1] * scale_b


def _keep(known: dict[_Key, int], fact: _Numbered) -> bool:
    """Note a fact, made as tight as integers allow. False where it cannot hold."""
    factors, constant = fact
    if not factors:
        return constant >= 0
    common = gcd(*factors.values())
    key = tuple(sorted((atom, factor // common) for atom, factor in factors.items()))
    least = constant // common
    if key not in known or least < known[key]:
        known[key] = least
        opposite = tuple((atom, -factor) for atom, factor in key)
        if opposite in known and known[opposite] + least < 0:
            return False
    return True
