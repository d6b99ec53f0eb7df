"""A pre-trade risk check on the critical path: a state in native memory, a function that is proved to allocate nothing, and its latency.

    python examples/critical.py
    tilewright inspect --critical examples/critical.py --kernel check
"""

from __future__ import annotations

import tilewright as tw


class Account(tw.State):
    """Limits and what was used of them."""

    position: int
    most_position: int = 1_000_000
    most_order: int = 1_000
    used: float
    most_used: float = 1e12
    open: bool = True


@tw.critical
def exceeds(value: int, most: int) -> bool:
    return value > most or value < -most


@tw.no_allocation
@tw.no_syscalls
@tw.critical(max_latency_ns=100)
def check(account: Account, quantity: int, price: float) -> bool:
    """Whether an order may go out."""
    if not account.open or exceeds(quantity, account.most_order):
        return False
    if exceeds(account.position + quantity, account.most_position):
        return False
    return account.used + price * abs(quantity) <= account.most_used


@tw.no_allocation
@tw.no_syscalls
@tw.critical(max_latency_ns=200)
def fill(account: Account, quantity: int, price: float) -> int:
    """Book an order that was filled; the position after it."""
    account.position += quantity
    account.used += price * abs(quantity)
    return account.position


if __name__ == "__main__":
    account = Account(most_position=50)
    for quantity in (30, 30, -60):
        allowed = check(account, quantity, 101.5)
        print(quantity, allowed, fill(account, quantity, 101.5) if allowed else account.position)
    print(tw.latency(check, (account, 1, 101.5)))
    print(tw.latency(fill, (Account(), 1, 101.5)))
