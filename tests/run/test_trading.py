"""The trading sample: replays against plain Python, limits alone and under eight threads, the kill switch, and texts that are wrong."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw

FOLDER = Path(__file__).parents[2] / "examples/trading"
sys.path.insert(0, str(FOLDER))
import desk as sample  # noqa: E402
import language  # noqa: E402
import replay  # noqa: E402

sys.path.remove(str(FOLDER))
pytest.importorskip("capstone")
TEXT = (FOLDER / "momentum.desk").read_text(encoding="utf-8")


class PlainBook:
    def __init__(self, symbol: int) -> None:
        middle = 10_000 * (symbol + 1)
        self.bid = [middle - 1 - k for k in range(4)]
        self.ask = [middle + 1 + k for k in range(4)]
        self.bid_size, self.ask_size = [500] * 4, [500] * 4
        self.mids: deque[float] = deque([0.0] * 64, 64)
        self.position = self.exposure = self.seen = 0


class PlainDesk:
    """momentum.desk in plain Python, written from its text."""

    def __init__(self) -> None:
        self.books = [PlainBook(s) for s in range(8)]
        self.cash = self.fills = self.sent = self.turnover = 0
        self.stopped = False
        self.refused = [0] * 8

    def pnl2(self) -> int:
        return 2 * self.cash + sum(b.position * (b.bid[0] + b.ask[0]) for b in self.books)

    def event(self, kind: int, symbol: int, level: int, size: int, price: int) -> None:
        if kind == 2:
            return
        book = self.books[symbol]
        (book.bid if kind == 0 else book.ask)[level] = price
        (book.bid_size if kind == 0 else book.ask_size)[level] = size
        if level:
            return
        book.mids.append((book.bid[0] + book.ask[0]) / 2)
        book.seen += 1
        if book.seen < 64:
            return
        mids = list(book.mids)

        def mean(count: int) -> float:
            part = mids[64 - count :]
            a, b, c, d = (sum(part[k::4]) for k in range(4))
            return ((a + b) + (c + d)) / count

        trend = mean(8) - mean(64)
        width = max(mids[48:]) - min(mids[48:])
        bids, asks = float(book.bid_size[0] + book.bid_size[1]), float(book.ask_size[0] + book.ask_size[1])
        lean = (bids - asks) / (bids + asks)
        if trend > 2.5 and lean > 0.25 and width < 40:
            self.order(book, 100, book.ask[0])
        if trend < -2.5 and lean < -0.25 and width < 40:
            self.order(book, -100, book.bid[0])

    def order(self, book: PlainBook, quantity: int, price: int) -> None:
        refused = 2 if self.stopped else 5 if abs(book.exposure + quantity) > 3000 else 6 if self.turnover + 100 * price > 4 * 10**12 else 0
        if refused:
            self.refused[refused] += 1
            return
        self.sent += 1
        there = book.ask_size[0] if quantity > 0 else book.bid_size[0]
        done = min(100, there) * (1 if quantity > 0 else -1)
        book.exposure += done
        self.turnover += abs(done) * price
        book.position += done
        self.cash -= done * price
        self.fills += 1
        self.stopped = self.stopped or self.pnl2() < -2 * 3_000_000


def test_a_replay_is_what_plain_python_gives() -> None:
    events = replay.synthetic_day(60_007, 3)
    wanted = PlainDesk()
    for event in events.tolist():
        wanted.event(*event)
    machine = replay.Replay(language.read_strategy(TEXT))
    found = machine.day(events)
    assert wanted.sent > 100
    assert (found.sent[0], found.fills, found.cash, found.turnover[0]) == (wanted.sent, wanted.fills, wanted.cash, wanted.turnover)
    assert found.refused.tolist() == wanted.refused
    assert 2 * found.cash + found.value == wanted.pnl2()
    assert found.books.position.tolist() == [b.position for b in wanted.books]
    assert machine.day(events).numpy().tobytes() == found.numpy().tobytes()
    timing = replay.Timing()
    assert machine.day(events, timing).numpy().tobytes() == found.numpy().tobytes()
    assert timing.counts.sum() == len(events)
    assert machine.run.proof().no_allocation and machine.run.proof().no_syscalls


def test_an_empty_day() -> None:
    assert replay.Replay(language.read_strategy(TEXT)).day(replay.synthetic_day(0)).sent[0] == 0


def book(**values: Any) -> Any:
    made = sample.Book()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_signals() -> None:
    text = "window bids = bid\nwindow mid = (bid + ask) / 2\nsignal a = mean(mid, 8) - mean(mid, 64) * 2\nsignal b = highest(mid, 16) + lowest(bids, 5) / ago(mid, 3)\n"
    text += "signal c = -(bid_size(3) - 1.5) / (ask_size - ask_size)\nsignal d = last - 1e-3"
    strategy = language.read_strategy(text)
    random = np.random.default_rng(1)
    given = book(bid_size=[1, 2, 3, 4], last=7, at=11)
    numbers = random.standard_normal((4, 64))
    given.windows[:, :64] = given.windows[:, 64:] = numbers
    latest = np.roll(numbers, -11, 1)  # the newest is the one before place 11
    bids, mid = latest[0], latest[1]
    assert strategy.signal("a")(given) == pytest.approx(mid[-8:].mean() - 2 * mid.mean(), abs=1e-14)
    assert strategy.signal("b")(given) == mid[-16:].max() + bids[-5:].min() / mid[-4]
    assert strategy.signal("c")(given) == 0.0
    assert strategy.signal("d")(given) == 7 - 1e-3
    # The functions that expressions are made of are Python's, too.
    for name, value in strategy.signals.items():
        assert strategy.signal(name)(given) == value(given)


def test_limits_refuse_and_leave_the_desk_as_it_was() -> None:
    orders = sample.Orders()
    limited = sample.Desk(most_order=100, most_position=150, most_turnover=20_000)

    def refused(code: int, *order: int) -> None:
        before = limited.copy()
        assert sample.submit(limited, orders, *order) == code
        before.refused[-code] += 1
        assert limited.numpy().tobytes() == before.numpy().tobytes()

    refused(sample.ORDER_LIMIT, 0, 101, 10)
    refused(sample.ORDER_LIMIT, 0, -101, 10)
    refused(sample.BAD_ORDER, 0, 0, 10)
    refused(sample.BAD_ORDER, 0, 10, 0)
    refused(sample.TURNOVER_LIMIT, 0, 100, 201)
    assert sample.submit(limited, orders, 0, 100, 100) == 0
    refused(sample.POSITION_LIMIT, 0, 51, 100)
    assert sample.submit(limited, orders, 1, -50, 100) == 1
    with pytest.raises(IndexError, match="index 8 is outside"):
        sample.submit(limited, orders, 8, 1, 1)
    limited.stopped[0] = 0
    sample.stop(limited)
    refused(sample.STOPPED, 2, 1, 1)
    open_desk = sample.Desk()
    full = sample.Orders()
    for k in range(64):
        assert sample.submit(open_desk, full, 0, 1, 1) == k
    limited = open_desk
    orders = full
    refused(sample.RING_FULL, 0, 1, 1)


def test_the_kill_switch_falls_with_a_loss() -> None:
    given = sample.Desk(most_loss=1000)
    given.books[0].bid[0], given.books[0].ask[0] = 90, 92
    assert sample.fill(given, 0, 100, 100) == 100  # worth 91 each: 900 lost
    assert given.stopped[0] == 0
    assert sample.fill(given, 0, 10, 103) == 110
    assert given.stopped[0] == 1
    assert sample.submit(given, sample.Orders(), 0, 1, 1) == sample.STOPPED


def test_limits_hold_under_eight_threads(tmp_path: Path) -> None:
    files = {path.suffix: path for path in tw.export(sample.burst, folder=str(tmp_path))}
    burst = ctypes.CDLL(str(files[".so"])).burst  # without Python's lock: the threads do run at once
    burst.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 4 + [ctypes.c_void_p]
    shared = sample.Desk(most_order=10, most_position=100_003, most_turnover=1_234_567)
    rings = [sample.Orders() for _ in range(8)]
    sent = [ctypes.c_int64() for _ in range(8)]
    codes = [0] * 8

    def run(k: int) -> None:
        codes[k] = burst(shared.address, rings[k].address, 0, 7, 3, 20_000, ctypes.byref(sent[k]))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 8
    total = sum(each.value for each in sent)
    assert total == 100_003 // 7 == shared.sent[0]
    assert shared.books[0].exposure[0] == 7 * total
    assert shared.turnover[0] == 21 * total <= 1_234_567
    assert shared.refused[5] == 160_000 - total


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("limit order 5.5", "1:13", "a limit is a whole number"),
        ("limit ordr 5", "1:7", "there is no limit 'ordr'"),
        ("\nbye 5 at ask when 1 > 0", "2:1", "'bye' begins no line"),
        ("window w = bid\nsignal s = mean(w, 65)", "2:20", "mean takes 4 to 64"),
        ("window w = bid\nsignal s = mean(w, 6)", "2:20", "in steps of 4"),
        ("window w = bid\nsignal s = w", "2:12", "'w' is a window"),
        ("signal s = mean(v, 4)", "1:17", "there is no window 'v'"),
        ("signal s = bid(4)", "1:16", "levels 0 to 3"),
        ("signal bid = 1", "1:8", "has a meaning already"),
        ("buy 5 at mid when 1 > 0", "1:10", "at bid or at ask"),
        ("buy 5 at ask when bid", "1:22", "a comparison should be here"),
        ("buy 5 at ask when bid > (ask", "1:29", "')' should be here"),
        ("signal s = 1 $ 2", "1:13", "'$' means nothing"),
        ("signal s = 1 2", "1:14", "more than this line takes"),
        ("signal s = thing", "1:12", "'thing' is not known"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, where: str, what: str) -> None:
    with pytest.raises(language.DeskError) as caught:
        language.read_strategy(text, "my.desk")
    assert str(caught.value).startswith(f"my.desk:{where}: ")
    assert what in str(caught.value)
