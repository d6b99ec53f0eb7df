"""A trading desk on the critical path: books, an account with limits, orders in a ring, fills and profit.

All of it is states in native memory and critical functions over them. Prices are whole numbers of ticks and money is ticks times shares, so that every
sum is exact and a replay gives the same result each time.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np

import tilewright as tw

SYMBOLS, LEVELS, WINDOWS, WINDOW = 8, 4, 4, 64

RING_FULL, STOPPED, BAD_ORDER, ORDER_LIMIT, POSITION_LIMIT, TURNOVER_LIMIT = -1, -2, -3, -4, -5, -6
"""What `submit` gives for an order that does not go out. The desk is then as it was, but for the count of refusals."""
REASONS = {
    RING_FULL: "ring full", STOPPED: "stopped", BAD_ORDER: "bad order", ORDER_LIMIT: "order limit", POSITION_LIMIT: "position limit",
    TURNOVER_LIMIT: "turnover limit",
}  # fmt: skip

Levels = Annotated[np.ndarray, tw.fixed(tw.i64, LEVELS)]
Counter = Annotated[np.ndarray, tw.fixed(tw.i64, 8)]
"""A counter that several threads change: the first of a line of the cache."""


class Book(tw.State):
    """One symbol: what the market shows, windows of what was seen, and what the desk holds."""

    bid: Levels
    bid_size: Levels
    ask: Levels
    ask_size: Levels
    last: int
    """The price of the last trade."""
    windows: Annotated[np.ndarray, tw.fixed(tw.f64, WINDOWS, 2 * WINDOW)]
    """Every number is there twice, so that the latest 64 always lie side by side."""
    at: int
    """Where the next number goes, 0 to 63."""
    seen: int
    position: int
    exposure: Counter
    """The position if all orders under way are filled."""


class Desk(tw.State, align=64):
    """An account: limits, what was used of them, and a book for each symbol."""

    most_order: int = 1_000
    most_position: int = 10_000
    most_turnover: int = 1 << 60
    most_loss: int = 1 << 60
    cash: int
    value: int
    """Twice the market value of all positions, at mid prices."""
    fills: int
    turnover: Counter
    stopped: Counter
    """1 is the kill switch: no order goes out."""
    sent: Counter
    refused: Counter
    """How many orders were refused, by reason: -1 counts at 1."""
    books: Annotated[tw.StateArray[Book], Book[SYMBOLS]]


class Order(tw.State):
    """Buys where the quantity is positive, sells where it is negative; what is not filled at once is dropped."""

    symbol: int
    quantity: int
    price: int


Orders = tw.Ring[Order, Literal[64]]


def reserve(counter: Counter, change: int, most: int) -> bool:
    """Add to a counter that must stay within bounds, as one step for all threads; False where it would not."""
    while True:
        old = tw.atomic_load(counter, 0)
        if abs(old + change) > most:
            return False
        if tw.atomic_cas(counter, 0, old, old + change) == old:
            return True


def risk(desk: Desk, symbol: int, quantity: int, price: int) -> int:
    """Reserve what an order may use at most; 0, or why it may not go out."""
    if tw.atomic_load(desk.stopped, 0) != 0:
        return STOPPED
    if quantity == 0 or price <= 0:
        return BAD_ORDER
    if abs(quantity) > desk.most_order:
        return ORDER_LIMIT
    exposure = desk.books[symbol].exposure
    if not reserve(exposure, quantity, desk.most_position):
        return POSITION_LIMIT
    if not reserve(desk.turnover, abs(quantity) * price, desk.most_turnover):
        tw.atomic_sub(exposure, 0, quantity)
        return TURNOVER_LIMIT
    return 0


@tw.no_allocation
@tw.no_syscalls
@tw.critical(max_latency_ns=500)
def submit(desk: Desk, orders: Orders, symbol: int, quantity: int, price: int) -> int:
    """Send an order after its risk check: its slot in the ring, or why it was refused."""
    slot = orders.claim()
    refused = RING_FULL if slot < 0 else risk(desk, symbol, quantity, price)
    if refused < 0:
        tw.atomic_add(desk.refused, -refused, 1)
        return refused
    order = orders.items[slot]
    order.symbol = symbol
    order.quantity = quantity
    order.price = price
    orders.publish()
    tw.atomic_add(desk.sent, 0, 1)
    return slot


def drop(desk: Desk, symbol: int, quantity: int, price: int) -> None:
    """Give back what an order, or the rest of one, had reserved."""
    tw.atomic_sub(desk.books[symbol].exposure, 0, quantity)
    tw.atomic_sub(desk.turnover, 0, abs(quantity) * price)


@tw.no_allocation
@tw.no_syscalls
@tw.critical(max_latency_ns=200)
def fill(desk: Desk, symbol: int, quantity: int, price: int) -> int:
    """Book a fill: the position after it. The kill switch falls where the loss is beyond its limit."""
    book = desk.books[symbol]
    book.position += quantity
    desk.cash -= quantity * price
    desk.value += quantity * (book.bid[0] + book.ask[0])
    desk.fills += 1
    if 2 * desk.cash + desk.value < -2 * desk.most_loss:
        tw.atomic_store(desk.stopped, 0, 1)
    return book.position


def execute(desk: Desk, orders: Orders) -> None:
    """The exchange: fill each waiting order at the best price that it accepts, as far as there are shares; drop the rest."""
    slot = orders.front()
    while slot >= 0:
        order = orders.items[slot]
        symbol = order.symbol
        quantity = order.quantity
        limit = order.price
        book = desk.books[symbol]
        price = book.ask[0] if quantity > 0 else book.bid[0]
        there = book.ask_size[0] if quantity > 0 else -book.bid_size[0]
        crosses = price <= limit if quantity > 0 else price >= limit
        done = (min(quantity, there) if quantity > 0 else max(quantity, there)) if crosses else 0
        if done != 0:
            fill(desk, symbol, done, price)
        if done != quantity:
            drop(desk, symbol, quantity - done, limit)
        orders.release()
        slot = orders.front()


@tw.critical
def stop(desk: Desk) -> None:
    """Throw the kill switch."""
    tw.atomic_store(desk.stopped, 0, 1)


@tw.critical
def burst(desk: Desk, orders: Orders, symbol: int, quantity: int, price: int, count: int) -> int:
    """Send the same order again and again, with a consumer that only takes orders out; how many went out."""
    sent = 0
    for _ in range(count):
        if submit(desk, orders, symbol, quantity, price) >= 0:
            orders.release()
            sent += 1
    return sent


def profit(desk: Desk) -> float:
    """Cash and positions at mid prices, in ticks times shares."""
    return desk.cash + desk.value / 2
