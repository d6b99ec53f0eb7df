"""A day of market data through a desk: 5 million events, the same result every time, and a histogram of what an event takes.

    python examples/trading/replay.py                         the strategy momentum.desk
    python examples/trading/replay.py --events 200000 my.desk
    tilewright inspect --critical examples/trading/desk.py    what is proved of the desk's functions
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from desk import LEVELS, REASONS, SYMBOLS, WINDOW, Book, Desk, Orders, execute, profit
from language import Strategy, read_strategy
from numpy.typing import NDArray

import tilewright as tw

CHUNK = 50_000
BID, ASK, TRADE = 0, 1, 2
TICKS = 4096
"""Places of the histogram, in steps of the counter; the last holds all that took longer."""


class Event(tw.State):
    """A level of a book has a new price and size, or a trade happened."""

    kind: Annotated[int, tw.u8]
    symbol: Annotated[int, tw.u8]
    level: Annotated[int, tw.u8]
    size: Annotated[int, tw.i32]
    price: Annotated[int, tw.i32]


class Events(tw.State):
    """A stretch of a day."""

    items: Annotated[tw.StateArray[Event], Event[CHUNK]]


class Timing(tw.State):
    """How many events took so many steps of the counter."""

    counts: Annotated[np.ndarray, tw.fixed(tw.i64, TICKS)]


class Replay:
    """A strategy as machine code: what to do for one event, and for a stretch of a day."""

    def __init__(self, strategy: Strategy) -> None:
        update, rules = strategy.update, strategy.rules

        def on_event(desk: Desk, orders: Orders, event: Event) -> None:
            symbol = event.symbol
            book = desk.books[symbol]
            price = event.price
            if event.kind == TRADE:
                book.last = price
                return
            level = event.level
            middle = book.bid[0] + book.ask[0]
            if event.kind == BID:
                book.bid[level] = price
                book.bid_size[level] = event.size
            else:
                book.ask[level] = price
                book.ask_size[level] = event.size
            if level == 0:
                desk.value += book.position * (book.bid[0] + book.ask[0] - middle)
                update(desk, orders, symbol, book)
                book.at = (book.at + 1) & (WINDOW - 1)
                book.seen += 1
                if book.seen >= WINDOW:
                    rules(desk, orders, symbol, book)
                    execute(desk, orders)

        @tw.no_allocation
        @tw.no_syscalls
        @tw.critical
        def run(desk: Desk, orders: Orders, events: Events, count: int) -> int:
            """All events, one after the other; how many orders went out."""
            before = desk.sent[0]
            for k in range(count):
                on_event(desk, orders, events.items[k])
            return int(desk.sent[0] - before)

        @tw.no_allocation
        @tw.no_syscalls
        @tw.critical
        def run_timed(desk: Desk, orders: Orders, events: Events, count: int, timing: Timing) -> int:
            """The same, with the counter read around every event."""
            before = desk.sent[0]
            for k in range(count):
                begin = tw.clock()
                on_event(desk, orders, events.items[k])
                timing.counts[min(tw.clock() - begin, TICKS - 1)] += 1
            return int(desk.sent[0] - before)

        self.strategy, self.on_event, self.run, self.run_timed = strategy, on_event, run, run_timed

    def day(self, events: np.ndarray, timing: Timing | None = None) -> Desk:
        """A day through a new desk: the desk after it."""
        desk, orders = self.strategy.desk(), Orders()
        open_books(desk)
        last = np.zeros(CHUNK, events.dtype)
        for first in range(0, len(events), CHUNK):
            part = events[first : first + CHUNK]
            count = len(part)
            if count < CHUNK:
                last[:count] = part
                part = last
            stretch = Events.view(part.view(np.uint8))
            if timing is None:
                self.run(desk, orders, stretch, count)
            else:
                self.run_timed(desk, orders, stretch, count, timing)
        return desk


def open_books(desk: Desk) -> None:
    """Every book as the market opens, with a spread of two ticks."""
    for symbol in range(SYMBOLS):
        book: Book = desk.books[symbol]
        middle = 10_000 * (symbol + 1)
        book.bid[:] = middle - 1 - np.arange(LEVELS)
        book.ask[:] = middle + 1 + np.arange(LEVELS)
        book.bid_size[:] = book.ask_size[:] = 500


def synthetic_day(count: int = 5_000_000, seed: int = 0) -> np.ndarray:
    """Events of a made-up day: prices that walk at random, with stretches of trend; books that lean the way the price will go."""
    random = np.random.default_rng(seed)
    events = np.zeros(count, np.dtype(Event().numpy().dtype))
    symbol = random.integers(0, SYMBOLS, count)
    kind = random.choice([BID, ASK, TRADE], count, p=[0.42, 0.42, 0.16])
    level = np.minimum(random.geometric(0.5, count) - 1, LEVELS - 1)
    events["kind"], events["symbol"], events["level"] = kind, symbol, level
    for each in range(SYMBOLS):
        mine = np.flatnonzero(symbol == each)
        n = len(mine)
        turns = np.repeat(random.standard_normal(n // 400 + 1), 400)[:n]
        middle = 10_000 * (each + 1) + np.cumsum(random.integers(-1, 2, n) + np.sign(turns).astype(np.int64) * (random.random(n) < 0.02 * np.abs(turns)))
        middle = np.maximum(middle, 100)
        side = np.where(kind[mine] == BID, -1, 1)
        spread = random.integers(1, 3, n)
        events["price"][mine] = np.where(kind[mine] == TRADE, middle, middle + side * (spread + level[mine]))
        leaning = np.clip(-side * turns, -2.0, 2.0)
        events["size"][mine] = np.rint(random.integers(50, 1000, n) * np.exp(0.5 * leaning)).astype(np.int64)
    return events


@dataclass(frozen=True)
class Result:
    """What a day gave, and how long it took."""

    desk: Desk
    events: int
    seconds: float
    own_seconds: float
    """Of the thread alone: what other programs take of the core does not count."""
    timing: Timing
    step_ns: float

    @property
    def rate(self) -> float:
        return self.events / self.seconds

    def percentile(self, share: float) -> float:
        """Nanoseconds that this share of the events did not exceed, to a step of the counter."""
        counts: NDArray[np.int64] = np.add.accumulate(np.asarray(self.timing.counts, np.int64))
        return float(counts.searchsorted(share * float(counts[-1]))) * self.step_ns

    def __str__(self) -> str:
        desk = self.desk
        refused = ", ".join(f"{name} {desk.refused[-code]:,}" for code, name in REASONS.items() if desk.refused[-code]) or "none"
        lines = [
            f"{self.events:,} events in {self.seconds:.3f} s: {self.rate / 1e6:.1f} million a second ({self.events / self.own_seconds / 1e6:.1f} by the thread's own time)",
            f"sent {desk.sent[0]:,}, filled {desk.fills:,}, refused {refused}; {'stopped by its loss' if desk.stopped[0] else 'not stopped'}",
            f"profit {profit(desk):,.1f}, positions {desk.books.position.tolist()}",
            f"an event, with two reads of the counter (a step is {self.step_ns:.1f} ns): " + ", ".join(f"p{100 * share:g} {self.percentile(share):.0f} ns" for share in (0.5, 0.99, 0.999, 0.9999)),
        ]
        most = max(int(self.timing.counts.max()), 1)
        for k in np.flatnonzero(self.timing.counts)[:24]:
            lines.append(f"{k * self.step_ns:9.1f} ns {self.timing.counts[k]:10,} {'#' * round(60 * float(self.timing.counts[k]) / most)}")
        return "\n".join(lines)


def counter_step() -> float:
    """Nanoseconds of a step of the counter that `tw.clock()` reads."""

    @tw.critical
    def now() -> int:
        return tw.clock()

    now.compile()
    begin, first = time.perf_counter_ns(), now()
    while time.perf_counter_ns() - begin < 20_000_000:
        pass
    end, last = time.perf_counter_ns(), now()
    return (end - begin) / (last - first)


def replay(strategy: Strategy, events: np.ndarray, rounds: int = 3) -> Result:
    """Replay a day some times: the best time, and a histogram from one more round. Every round gives the same desk."""
    machine = Replay(strategy)
    machine.day(events[:CHUNK])
    best, own, first = float("inf"), float("inf"), None
    for _ in range(rounds):
        begin, own_begin = time.perf_counter(), time.thread_time()
        desk = machine.day(events)
        best, own = min(best, time.perf_counter() - begin), min(own, time.thread_time() - own_begin)
        assert first is None or desk.numpy().tobytes() == first
        first = desk.numpy().tobytes()
    timing = Timing()
    assert machine.day(events, timing).numpy().tobytes() == first
    return Result(machine.day(events), len(events), best, own, timing, counter_step())


def main(*given: str) -> Any:
    parser = argparse.ArgumentParser(description="Replay a synthetic day.")
    parser.add_argument("strategy", nargs="?", default=str(Path(__file__).with_name("momentum.desk")))
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given or None)
    strategy = read_strategy(Path(options.strategy).read_text(encoding="utf-8"), options.strategy)
    result = replay(strategy, synthetic_day(options.events, options.seed))
    print(result)
    return result


if __name__ == "__main__":
    main()
