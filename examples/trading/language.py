"""The language of desks: a text with limits, windows, signals and rules becomes critical functions.

    limit position 5000
    window mid = (bid + ask) / 2
    signal trend = mean(mid, 8) - mean(mid, 64)
    buy 100 at ask when trend > 0.5 and bid_size > ask_size

There is no code generator here. An expression becomes a Python function made of smaller ones; the compiler of critical functions puts the bodies in the
places of the calls, so that nothing of this file is left at run time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from desk import LEVELS, WINDOW, WINDOWS, Book, Desk, Orders, submit

import tilewright as tw

Number = Callable[[Book], float]
Test = Callable[[Book], bool]
Action = Callable[[Desk, Orders, int, Book], None]
LIMITS = ("order", "position", "turnover", "loss")
SIDES = ("bid", "ask", "bid_size", "ask_size")
TOKEN = re.compile(r"\s*(?:(?P<number>\d[\d_]*(?:\.\d+)?(?:e-?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<sign><=|>=|==|!=|[-+*/()<>,=]))")


class DeskError(ValueError):
    """What is wrong with a text, and where."""


# -- meanings: functions that the compiler puts together ---------------------------------------------------------------


def constant(value: float) -> Number:
    def number(book: Book) -> float:
        return value

    return number


def level(name: str, depth: int) -> Number:
    def number(book: Book) -> float:
        return float(getattr(book, name)[depth])

    return number


def last_trade(book: Book) -> float:
    return float(book.last)


def plus(left: Number, right: Number) -> Number:
    def number(book: Book) -> float:
        return left(book) + right(book)

    return number


def minus(left: Number, right: Number) -> Number:
    def number(book: Book) -> float:
        return left(book) - right(book)

    return number


def times(left: Number, right: Number) -> Number:
    def number(book: Book) -> float:
        return left(book) * right(book)

    return number


def over(left: Number, right: Number) -> Number:
    """A division by zero gives zero, so that a rule never meets an infinity."""

    def number(book: Book) -> float:
        divisor = right(book)
        return left(book) / divisor if divisor != 0.0 else 0.0

    return number


def mean(window: int, count: int) -> Number:
    """Four sums side by side, which is what the processor's adders can do."""

    def number(book: Book) -> float:
        first = book.at + WINDOW - count
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        for k in range(0, count, 4):
            a += book.windows[window, first + k]
            b += book.windows[window, first + k + 1]
            c += book.windows[window, first + k + 2]
            d += book.windows[window, first + k + 3]
        return ((a + b) + (c + d)) / count

    return number


def highest(window: int, count: int) -> Number:
    def number(book: Book) -> float:
        first = book.at + WINDOW - count
        found = book.windows[window, first]
        for k in range(1, count):
            found = max(found, book.windows[window, first + k])
        return float(found)

    return number


def lowest(window: int, count: int) -> Number:
    def number(book: Book) -> float:
        first = book.at + WINDOW - count
        found = book.windows[window, first]
        for k in range(1, count):
            found = min(found, book.windows[window, first + k])
        return float(found)

    return number


def ago(window: int, count: int) -> Number:
    def number(book: Book) -> float:
        return float(book.windows[window, book.at + WINDOW - 1 - count])

    return number


OVER_WINDOWS = {"mean": mean, "highest": highest, "lowest": lowest, "ago": ago}


def compare(sign: str, left: Number, right: Number) -> Test:
    def less(book: Book) -> bool:
        return left(book) < right(book)

    def less_or_equal(book: Book) -> bool:
        return left(book) <= right(book)

    def equal(book: Book) -> bool:
        return left(book) == right(book)

    def different(book: Book) -> bool:
        return left(book) != right(book)

    if sign in (">", ">="):
        return compare({">": "<", ">=": "<="}[sign], right, left)
    return {"<": less, "<=": less_or_equal, "==": equal, "!=": different}[sign]


def both(left: Test, right: Test) -> Test:
    def test(book: Book) -> bool:
        return left(book) and right(book)

    return test


def either(left: Test, right: Test) -> Test:
    def test(book: Book) -> bool:
        return left(book) or right(book)

    return test


def inverse(inner: Test) -> Test:
    def test(book: Book) -> bool:
        return not inner(book)

    return test


def order(quantity: int, side: str, offset: int, condition: Test) -> Action:
    def act(desk: Desk, orders: Orders, symbol: int, book: Book) -> None:
        if condition(book):
            submit(desk, orders, symbol, quantity, getattr(book, side)[0] + offset)

    return act


def then(first: Action, second: Action) -> Action:
    def act(desk: Desk, orders: Orders, symbol: int, book: Book) -> None:
        first(desk, orders, symbol, book)
        second(desk, orders, symbol, book)

    return act


def remember(window: int, value: Number) -> Action:
    def act(desk: Desk, orders: Orders, symbol: int, book: Book) -> None:
        seen = value(book)
        book.windows[window, book.at] = seen
        book.windows[window, book.at + WINDOW] = seen

    return act


def nothing(desk: Desk, orders: Orders, symbol: int, book: Book) -> None:
    return


# -- texts --------------------------------------------------------------------------------------------------------------


@dataclass
class Strategy:
    """A text that was read: limits, and what to do when a book changes."""

    name: str
    limits: dict[str, int] = field(default_factory=dict[str, int])
    windows: dict[str, int] = field(default_factory=dict[str, int])
    signals: dict[str, Number] = field(default_factory=dict[str, Number])
    update: Action = nothing
    """Windows get what they are of."""
    rules: Action = nothing
    rule_count: int = 0

    def desk(self) -> Desk:
        """An account with the limits of the text."""
        return Desk(**{f"most_{name}": value for name, value in self.limits.items()})

    def signal(self, name: str) -> tw.CriticalFunction[[Book], float]:
        """One signal as a critical function of a book."""
        value = self.signals[name]

        @tw.no_allocation
        @tw.no_syscalls
        @tw.critical(max_latency_ns=1000)
        def evaluate(book: Book) -> float:
            return value(book)

        return evaluate


class Line:
    """One line, word by word."""

    def __init__(self, name: str, number: int, text: str) -> None:
        self.name, self.number, self.text = name, number, text
        self.words: list[tuple[str, str, int]] = []
        at = 0
        body = text.partition("#")[0].rstrip()
        while at < len(body):
            found = TOKEN.match(body, at)
            if found is None or found.lastgroup is None:
                raise self.error(f"'{body[at:].strip()[0]}' means nothing here", at)
            self.words.append((found.lastgroup, found[found.lastgroup], found.start(found.lastgroup)))
            at = found.end()
        self.words.append(("end", "the end of the line", len(body)))
        self.next = 0

    def error(self, message: str, column: int | None = None) -> DeskError:
        column = self.words[self.next][2] if column is None else column
        return DeskError(f"{self.name}:{self.number}:{column + 1}: {message}\n    {self.text.strip()}")

    @property
    def word(self) -> str:
        return self.words[self.next][1]

    def take(self, kind: str, what: str) -> str:
        if self.words[self.next][0] != kind:
            raise self.error(f"{what} should be here, not {self.word}")
        self.next += 1
        return self.words[self.next - 1][1]

    def skip(self, word: str) -> bool:
        if self.word == word and self.words[self.next][0] != "end":
            self.next += 1
            return True
        return False

    def expect(self, word: str) -> None:
        if not self.skip(word):
            raise self.error(f"'{word}' should be here, not {self.word}")

    def whole(self, what: str) -> int:
        text = self.take("number", what)
        if "." in text or "e" in text:
            self.next -= 1
            raise self.error(f"{what} is a whole number")
        return int(text)

    def end(self) -> None:
        if self.words[self.next][0] != "end":
            raise self.error(f"{self.word} is more than this line takes")


class Reader:
    """Reads a text line by line."""

    def __init__(self, name: str) -> None:
        self.strategy = Strategy(name)

    def read(self, text: str) -> Strategy:
        for number, each in enumerate(text.splitlines(), 1):
            line = Line(self.strategy.name, number, each)
            if len(line.words) > 1:
                self.statement(line)
        return self.strategy

    def statement(self, line: Line) -> None:
        strategy = self.strategy
        word = line.take("name", "limit, window, signal, buy or sell")
        if word == "limit":
            name = line.take("name", "the name of a limit")
            if name not in LIMITS:
                line.next -= 1
                raise line.error(f"there is no limit '{name}': limits are {', '.join(LIMITS)}")
            strategy.limits[name] = line.whole("a limit")
        elif word in ("window", "signal"):
            name = self.new_name(line)
            line.expect("=")
            value = self.sum(line)
            if word == "signal":
                strategy.signals[name] = value
            else:
                if len(strategy.windows) == WINDOWS:
                    raise line.error(f"a desk has {WINDOWS} windows")
                number = strategy.windows[name] = len(strategy.windows)
                strategy.update = then(strategy.update, remember(number, value))
        elif word in ("buy", "sell"):
            quantity = line.whole("how many")
            line.expect("at")
            side = line.take("name", "bid or ask")
            if side not in ("bid", "ask"):
                line.next -= 1
                raise line.error("an order is at bid or at ask, or some ticks beside them")
            offset = line.whole("ticks") if line.skip("+") else -line.whole("ticks") if line.skip("-") else 0
            line.expect("when")
            rule = order(quantity if word == "buy" else -quantity, side, offset, self.test(line))
            strategy.rules = then(strategy.rules, rule)
            strategy.rule_count += 1
        else:
            line.next -= 1
            raise line.error(f"'{word}' begins no line: write limit, window, signal, buy or sell")
        line.end()

    def new_name(self, line: Line) -> str:
        name = line.take("name", "a name")
        if name in self.strategy.signals or name in self.strategy.windows or name in SIDES or name in OVER_WINDOWS or name == "last":
            line.next -= 1
            raise line.error(f"'{name}' has a meaning already")
        return name

    # -- conditions: or, and, not, comparisons

    def test(self, line: Line) -> Test:
        found = self.all_of(line)
        while line.skip("or"):
            found = either(found, self.all_of(line))
        return found

    def all_of(self, line: Line) -> Test:
        found = self.one_test(line)
        while line.skip("and"):
            found = both(found, self.one_test(line))
        return found

    def one_test(self, line: Line) -> Test:
        if line.skip("not"):
            return inverse(self.one_test(line))
        left = self.sum(line)
        sign = line.word
        if sign not in ("<", "<=", ">", ">=", "==", "!="):
            raise line.error(f"a comparison should be here, not {sign}")
        line.next += 1
        return compare(sign, left, self.sum(line))

    # -- numbers: sums, products, single values

    def sum(self, line: Line) -> Number:
        found = self.product(line)
        while line.word in ("+", "-"):
            found = plus(found, self.product(line)) if line.skip("+") else minus(found, self.product(line)) if line.skip("-") else found
        return found

    def product(self, line: Line) -> Number:
        found = self.single(line)
        while line.word in ("*", "/"):
            found = times(found, self.single(line)) if line.skip("*") else over(found, self.single(line)) if line.skip("/") else found
        return found

    def single(self, line: Line) -> Number:
        if line.skip("-"):
            return minus(constant(0.0), self.single(line))
        if line.skip("("):
            found = self.sum(line)
            line.expect(")")
            return found
        if line.words[line.next][0] == "number":
            return constant(float(line.take("number", "a number")))
        name = line.take("name", "a number or a name")
        if name in OVER_WINDOWS:
            return self.over_window(line, name)
        if name in SIDES:
            return level(name, self.depth(line))
        if name == "last":
            return last_trade
        if name in self.strategy.signals:
            return self.strategy.signals[name]
        line.next -= 1
        if name in self.strategy.windows:
            raise line.error(f"'{name}' is a window: write mean({name}, 16), for example")
        raise line.error(f"'{name}' is not known: there are {', '.join([*SIDES, 'last', *self.strategy.signals])}")

    def depth(self, line: Line) -> int:
        if not line.skip("("):
            return 0
        found = line.whole("a level")
        if found >= LEVELS:
            line.next -= 1
            raise line.error(f"books have levels 0 to {LEVELS - 1}")
        line.expect(")")
        return found

    def over_window(self, line: Line, name: str) -> Number:
        line.expect("(")
        window = line.take("name", "a window")
        if window not in self.strategy.windows:
            line.next -= 1
            raise line.error(f"there is no window '{window}'")
        line.expect(",")
        count = line.whole("how many")
        least, most, step = (0, WINDOW - 1, 1) if name == "ago" else (1, WINDOW, 1) if name != "mean" else (4, WINDOW, 4)
        if not least <= count <= most or count % step:
            line.next -= 1
            raise line.error(f"{name} takes {least} to {most} of a window" + (f", in steps of {step}" if step > 1 else ""))
        line.expect(")")
        return OVER_WINDOWS[name](self.strategy.windows[window], count)


def read_strategy(text: str, name: str = "desk") -> Strategy:
    """A strategy from its text. Raises `DeskError` with line and column."""
    return Reader(name).read(text)
