"""What a program can use up: the stack and memory. In: a piece of work on a program; out: the same, with errors of ours where one ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tilewright.base.errors import DeviceError, UserError


@contextmanager
def within_limits(what: str) -> Iterator[None]:
    """Inside, running out of stack or memory is an error that says so."""
    try:
        yield
    except RecursionError:
        raise UserError.at("TW005", f"{what} is nested too deep", help="call fewer functions inside one another, and compute parts in let statements") from None
    except MemoryError:
        raise DeviceError.at("TW031", f"no memory is left for {what}", help="make its arrays smaller") from None
