"""Calls bound to memory: the list that every recorded graph is.

In: launches, as a recorder sees them. A call has a value for each slot (the addresses of its arrays, then numbers), names for
some of the numbers, and the memory it uses. Out: which slots of which calls change when arrays or named numbers are exchanged,
and whether they can be. Executors run the list: the CPU as a table of launches (`cpu/graphs.py`), a GPU as a captured graph
(`cuda/graphs.py`), one whose arrays are others at every replay (`cuda/parametric_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

Number = int | float | bool
Extent = tuple[int, int, bool]
"""Memory: its first address, the one behind its last, and whether it is written."""
Move = tuple[int, int, int]
"""Memory that is exchanged: its first address, the one behind its last, and how far away the other memory is."""


class BoundCall(Protocol):
    """What is launched is known to executors; this is where its arguments come from."""

    @property
    def values(self) -> Sequence[Number]:
        """By slot: addresses of arrays, then numbers."""

    @property
    def array_count(self) -> int:
        """How many slots are addresses."""

    @property
    def scalars(self) -> Mapping[int, str]:
        """Slots of numbers that have a name."""

    @property
    def extents(self) -> Sequence[Extent]:
        """Memory it uses."""


C = TypeVar("C", bound=BoundCall)


class CallIndex:
    """Which slots of which calls hold an address or a named number, and which memory is used at all."""

    def __init__(self, calls: Sequence[BoundCall]) -> None:
        self.addresses: dict[int, list[tuple[int, int]]] = {}
        self.numbers: dict[str, list[tuple[int, int]]] = {}
        self.extents: dict[tuple[int, int], bool] = {}
        """First address and the one behind the last, and whether something is written there."""
        for number, call in enumerate(calls):
            for slot in range(call.array_count):
                self.addresses.setdefault(int(call.values[slot]), []).append((number, slot))
            for slot, name in call.scalars.items():
                self.numbers.setdefault(name, []).append((number, slot))
            for low, high, written in call.extents:
                self.extents[low, high] = written or self.extents.get((low, high), False)

    def uses_within(self, low: int, high: int) -> bool:
        return any(low <= address < high for address in self.addresses)

    def move(self, moves: Sequence[Move]) -> dict[tuple[int, int], int]:
        """Memory is exchanged; the new address of each slot concerned."""
        moving = [(address, shift) for address in self.addresses if (shift := shift_of(address, moves))]
        taken = [(address + shift, self.addresses.pop(address)) for address, shift in moving]
        for address, places in taken:
            self.addresses.setdefault(address, []).extend(places)
        lying = [(memory, shift) for memory in self.extents if (shift := shift_of(memory[0], moves))]
        for (low, high), written in [((m[0] + shift, m[1] + shift), self.extents.pop(m)) for m, shift in lying]:
            self.extents[low, high] = written or self.extents.get((low, high), False)
        return {place: address for address, places in taken for place in places}


class CallList(list[C]):
    """Calls in the order in which they run."""

    _index: CallIndex | None = None

    def used(self) -> CallIndex:
        """Where what is used; made when it is first needed, so after all calls are there."""
        if self._index is None:
            self._index = CallIndex(self)
        return self._index

    def forget_index(self) -> None:
        self._index = None

    def conflict(self, moves: Sequence[Move]) -> bool:
        """Whether after an exchange something would be written that something else uses and did not before."""
        return conflicts([(*memory, written) for memory, written in self.used().extents.items()], moves)

    def exchange(self, moves: Sequence[Move], numbers: Mapping[str, Number]) -> dict[int, list[Number]]:
        """The values of each call that other memory or another named number changes; the index has them from now on.

        The executor puts the calls with these values into the list, or forgets the index.
        """
        index = self.used()
        places: dict[tuple[int, int], Number] = dict(index.move(moves))
        places.update({place: value for name, value in numbers.items() for place in index.numbers.get(name, ())})
        changed: dict[int, list[Number]] = {}
        for (number, slot), value in places.items():
            changed.setdefault(number, list(self[number].values))[slot] = value
        return changed

    def uses(self, low: int, high: int, origin: int) -> list[tuple[int, int, int]]:
        """The slots with an address in some memory: the call, the slot, and how far behind `origin` it is."""
        places = [(address, place) for address, found in self.used().addresses.items() if low <= address < high for place in found]
        return sorted((number, slot, address - origin) for address, (number, slot) in places)


def moved_extents(extents: Sequence[Extent], moves: Sequence[Move]) -> tuple[Extent, ...]:
    """Memory that calls use, after an exchange."""
    return tuple((low + shift_of(low, moves), high + shift_of(low, moves), written) for low, high, written in extents)


def conflicts(extents: Sequence[Extent], moves: Sequence[Move]) -> bool:
    """Whether an exchange lets something written overlap something else that it did not overlap before."""
    moving = [(low + shift, high + shift, written, shift) for low, high, written in extents if (shift := shift_of(low, moves))]
    for low, high, written, shift in moving:
        for other_low, other_high, other_written in extents:
            other_shift = shift_of(other_low, moves)
            apart = low >= other_high + other_shift or other_low + other_shift >= high
            if not apart and (written or other_written) and shift != other_shift:
                return True
    return False


def shift_of(address: int, moves: Sequence[Move]) -> int:
    """How far memory at an address moves."""
    for low, high, shift in moves:
        if low <= address < high:
            return shift
    return 0
