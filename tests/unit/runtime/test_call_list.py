"""Lists of calls bound to memory: what an exchange of arrays and named numbers changes, and when it is refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tilewright.runtime.core.call_list import CallList, Extent, Number, moved_extents


@dataclass(frozen=True)
class Launch:
    values: list[Number]
    array_count: int
    extents: tuple[Extent, ...]
    scalars: dict[int, str] = field(default_factory=dict)


def two_calls() -> CallList[Launch]:
    """x (100..110) to y (200..210), then y to z (300..310) times the number 'a'."""
    first = Launch([100, 200], 2, ((100, 110, False), (200, 210, True)))
    return CallList([first, Launch([200, 300, 0.5], 2, ((200, 210, False), (300, 310, True)), {2: "a"})])


def test_memory_moves_in_every_call_that_uses_it() -> None:
    assert two_calls().exchange([(200, 210, 1000)], {}) == {0: [100, 1200], 1: [1200, 300, 0.5]}


def test_a_view_moves_with_its_memory() -> None:
    calls = CallList([Launch([104], 1, ((104, 108, True),))])
    assert calls.exchange([(100, 110, -50)], {}) == {0: [54]}


def test_named_numbers() -> None:
    assert two_calls().exchange([], {"a": 2.0, "unused": 1.0}) == {1: [200, 300, 2.0]}


def test_a_second_exchange_begins_where_the_first_ended() -> None:
    calls = two_calls()
    moves = [(100, 110, 400)]
    for number, values in calls.exchange(moves, {}).items():
        calls[number] = replace(calls[number], values=values, extents=moved_extents(calls[number].extents, moves))
    assert calls.exchange([(100, 110, 7)], {}) == {}
    assert calls.exchange([(500, 510, -400)], {}) == {0: [100, 200]}
    calls.forget_index()
    assert calls.used().uses_within(500, 510), "the calls in the list were not moved back"


def test_conflicts() -> None:
    calls = two_calls()
    assert calls.conflict([(100, 110, 200)]), "x would be where z is written"
    assert not calls.conflict([(100, 110, 400)])
    assert not calls.conflict([(200, 210, 1000)]), "both uses of y move"


def test_uses_of_memory() -> None:
    assert two_calls().uses(195, 215, 190) == [(0, 1, 10), (1, 0, 10)]
