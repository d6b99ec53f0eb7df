"""Linear inequalities over integers: what is said to contradict does, and plain contradictions are found."""

from __future__ import annotations

import itertools
import random

from tilewright.analysis.inequalities import Inequality, contradict, negated


def holds(fact: Inequality, values: dict[str, int]) -> bool:
    return fact[1] + sum(factor * values[str(atom)] for atom, factor in fact[0].items()) >= 0


def test_no_point_satisfies_what_is_said_to_contradict() -> None:
    rng = random.Random(4)
    found = 0
    points = [dict(zip("xyz", p, strict=True)) for p in itertools.product(range(-5, 6), repeat=3)]
    for _ in range(300):
        facts: list[Inequality] = [
            ({a: f for a in "xyz" if (f := rng.randint(-2, 2))}, rng.randint(-6, 4)) for _ in range(rng.randint(2, 6))
        ]
        if contradict(facts):
            found += 1
            assert not any(all(holds(f, p) for f in facts) for p in points), facts
    assert found > 20


def test_bounds_of_an_index_prove_that_it_stays_inside() -> None:
    facts: list[Inequality] = [({"i": 1}, 0), ({"n": 1, "i": -1}, -1)]  # 0 <= i < n
    assert contradict([*facts, negated(({"n": 2, "i": -2}, -1))])  # 2 i + 1 < 2 n
    assert not contradict([*facts, negated(({"n": 1, "i": -1}, -2))])  # i + 1 < n
    assert contradict([({"i": 2}, -1), ({"i": -2}, 1)])  # 2 i = 1


class CountedAtom:
    """An atom that counts how often it is hashed: atoms are trees, and that is what costs."""

    hashes = 0

    def __hash__(self) -> int:
        CountedAtom.hashes += 1
        return id(self)


def test_atoms_are_hashed_once_for_each_fact_and_not_in_each_step() -> None:
    atoms = [CountedAtom() for _ in range(8)]
    rng = random.Random(1)
    facts: list[Inequality] = [({a: rng.choice((-2, -1, 1, 2)) for a in rng.sample(atoms, 3)}, rng.randint(0, 9)) for _ in range(24)]
    CountedAtom.hashes = 0
    contradict(facts)
    assert CountedAtom.hashes <= 3 * 24
