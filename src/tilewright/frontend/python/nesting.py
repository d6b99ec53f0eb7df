"""Which kernels are being read: one that calls another has that read too, and none may come round to itself.

In: kernels by a key, as their reading begins. Out: the names on the way from an unfinished reading of the same kernel, if there is one. Each
thread has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_open: ContextVar[tuple[tuple[object, str], ...]] = ContextVar("kernels being read", default=())


@contextmanager
def reading(key: object, name: str) -> Iterator[tuple[str, ...]]:
    """Inside, the kernel counts as being read. Gives the names from its unfinished reading to here: empty where there is none."""
    around = _open.get()
    start = next((n for n, (other, _) in enumerate(around) if other is key), None)
    token = _open.set((*around, (key, name)))
    try:
        yield () if start is None else tuple(dict.fromkeys(other for _, other in around[start:]))
    finally:
        _open.reset(token)
