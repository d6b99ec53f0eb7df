"""`tw.Ring[Order, 1024]`: a ring between one producer and one consumer, without locks, in native memory.

In: the class of a state, or a dtype, and a capacity that is a power of two. Out: a class of states with `head`, `tail` (each on cache lines of its own) and
`items`. In a critical function the producer claims a slot, fills it and publishes it; the consumer looks at the front and releases it. What was written
before `publish` is seen after `front` (release and acquire). From Python, `push` and `pop` do the same by critical functions of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, get_args, get_origin

from tilewright.base.dtypes import DType, i64
from tilewright.base.errors import UserError
from tilewright.execute.critical.function import critical
from tilewright.frontend.critical.layout import number_type
from tilewright.frontend.critical.state import NativeState
from tilewright.frontend.words.python_words import python_word

_WORDS = 16
"""Numbers between head and tail: two lines of the cache, since neighbours are fetched together."""
atomic_load: Any = python_word("atomic_load")
atomic_store: Any = python_word("atomic_store")

# The bodies below are read by the compiler, in the place of `ring.claim()` and its like. Positions count up for ever; a slot is a position modulo the capacity.


def _claim(ring: Any) -> int:
    tail = atomic_load(ring.tail, 0)
    if tail - atomic_load(ring.head, 0, order="acquire") >= len(ring.items):
        return -1
    return tail & (len(ring.items) - 1)  # type: ignore[no-any-return]


def _publish(ring: Any) -> None:
    atomic_store(ring.tail, 0, atomic_load(ring.tail, 0) + 1, order="release")


def _front(ring: Any) -> int:
    head = atomic_load(ring.head, 0)
    if head == atomic_load(ring.tail, 0, order="acquire"):
        return -1
    return head & (len(ring.items) - 1)  # type: ignore[no-any-return]


def _release(ring: Any) -> None:
    atomic_store(ring.head, 0, atomic_load(ring.head, 0) + 1, order="release")


def _count(ring: Any) -> int:
    return atomic_load(ring.tail, 0, order="acquire") - atomic_load(ring.head, 0, order="acquire")  # type: ignore[no-any-return]


def _push(ring: Any, value: Any) -> bool:
    slot = ring.claim()
    if slot < 0:
        return False
    ring.items[slot] = value
    ring.publish()
    return True


if TYPE_CHECKING:
    import typing_extensions

    E = typing_extensions.TypeVar("E", default=Any)
    N = typing_extensions.TypeVar("N", default=Any)

    class _RingState(NativeState, Generic[E, N]):
        """`tw.Ring[Order, Literal[64]]` is a type to type checkers."""
else:
    E = N = Any
    _RingState = {(Any, Any): NativeState}


class SpscRing(_RingState[E, N]):
    """A ring between one producer and one consumer: `tw.Ring[Order, 1024]` is a class, an object of it a ring in native memory.

    In critical functions: `slot = ring.claim()` (-1 where it is full), `ring.items[slot]…`, `ring.publish()`; `slot = ring.front()` (-1 where it is empty),
    `ring.items[slot]…`, `ring.release()`; `ring.push(value)` of a ring of numbers gives whether there was room; `ring.count()`. From Python: `push` gives
    whether there was room, `pop` gives an item or None. One thread at a time may produce, and one consume.
    """

    capacity = 0
    """Items that it holds at most."""
    if TYPE_CHECKING:
        items: Any
        """The slots."""

    if not TYPE_CHECKING:

        def __class_getitem__(cls, item: Any) -> Any:
            if cls is not SpscRing:
                return super().__class_getitem__(item)
            if not isinstance(item, tuple) or len(item) != 2:
                raise UserError.at("TW016", f"tw.Ring[...] takes what it holds and how many, got {item!r}", help="for instance tw.Ring[tw.i64, 1024]")
            held, capacity = item
            if get_origin(capacity) is Literal:  # what type checkers take for a number in brackets
                (capacity,) = get_args(capacity)
            return _ring_class(held, capacity)

    def claim(self) -> int:
        """The slot that the producer may fill; -1 where the ring is full."""
        return int(_operations(type(self))[0](self))

    def publish(self) -> None:
        """The slot that was claimed is the consumer's from now on."""
        _operations(type(self))[1](self)

    def front(self) -> int:
        """The slot of the oldest item; -1 where the ring is empty."""
        return int(_operations(type(self))[2](self))

    def release(self) -> None:
        """The oldest item's slot is the producer's again."""
        _operations(type(self))[3](self)

    def count(self) -> int:
        """How many items are in it now."""
        return int(_operations(type(self))[4](self))

    def push(self, value: object) -> bool:
        """Put an item in, from Python: a number, or a state, which is copied. False where the ring is full; then nothing is changed."""
        claim, publish, _, _, _ = _operations(type(self))
        slot = claim(self)
        if slot < 0:
            return False
        items = self.items
        if isinstance(value, NativeState):
            place = items[slot]
            if type(place) is not type(value):
                raise UserError.at("TW009", f"{type(self).__name__} does not hold a {type(value).__name__}")
            place._memory[:] = value._memory
        else:
            items[slot] = value
        publish(self)
        return True

    def pop(self) -> Any:
        """Take the oldest item out, from Python; None where the ring is empty."""
        _, _, front, release, _ = _operations(type(self))
        slot = front(self)
        if slot < 0:
            return None
        found = self.items[slot]
        value = found.copy() if isinstance(found, NativeState) else found.item()
        release(self)
        return value

    def __len__(self) -> int:
        """How many items are in it now."""
        return self.count()

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {len(self)} of {self.capacity}>"


SpscRing.__critical__ = {"claim": _claim, "publish": _publish, "front": _front, "release": _release, "count": _count, "push": _push}
Ring = SpscRing
"""The name that `tilewright` offers."""


@functools.cache
def _ring_class(element: Any, capacity: int) -> type[SpscRing]:
    dtype = number_type(element)
    if dtype is None and not (isinstance(element, type) and issubclass(element, NativeState)):
        raise UserError.at("TW009", f"a ring holds numbers or states, not {element!r}", help="give a dtype, or a class of tw.State")
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1 or capacity & (capacity - 1):
        raise UserError.at("TW009", f"the capacity of a ring is {capacity!r}", help="give a power of two")
    name = dtype.name if isinstance(dtype, DType) else element.__name__
    fields = {"head": i64[_WORDS], "tail": i64[_WORDS], "items": (dtype or element)[capacity]}
    return type(f"Ring_{name}_{capacity}", (SpscRing,), {"__annotations__": fields, "capacity": capacity, "__module__": SpscRing.__module__})


def _operations(kind: Any) -> tuple[Callable[..., Any], ...]:
    """What Python's own methods of a ring call: made once for each class."""
    known: tuple[Callable[..., Any], ...] | None = kind.__dict__.get("_operations")
    if known is not None:
        return known

    @critical
    def claim(ring: kind) -> int:
        return ring.claim()  # type: ignore[no-any-return]

    @critical
    def publish(ring: kind) -> None:
        ring.publish()

    @critical
    def front(ring: kind) -> int:
        return ring.front()  # type: ignore[no-any-return]

    @critical
    def release(ring: kind) -> None:
        ring.release()

    @critical
    def count(ring: kind) -> int:
        return ring.count()  # type: ignore[no-any-return]

    kind._operations = claim, publish, front, release, count
    return claim, publish, front, release, count
