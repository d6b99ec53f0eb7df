"""Critical functions: what Python would give, on numbers, states and fixed arrays; and what is wrong, at its line."""

# ruff: noqa: RET503 - a function that ends without a result is one of the mistakes tested
from __future__ import annotations

import math
import pickle
from typing import Annotated

import numpy as np
import pytest

import tilewright as tw

TABLE = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int64)


class Level(tw.State):
    price: float
    size: tw.i32


class Risk(tw.State):
    position: int
    limit: int = 1000
    most: int = 100
    open: bool = True
    total: float
    small: tw.i8
    counts: tw.i64[8]
    grid: tw.f32[2, 3]
    best: Level
    levels: Level[4]


class Other(tw.State):
    position: int


@tw.critical
def nothing() -> None:
    pass


@tw.critical
def whole(a: int, b: int) -> int:
    return (a + b) * (a - b) + a // b - a % b


@tw.critical
def larger(a: float, b: float) -> float:
    return a if a > b else b


@tw.critical(max_latency_ns=100, cpu=0)
def check(s: Risk, quantity: int, price: float) -> bool:
    size = abs(quantity)
    if not s.open or size > s.most or abs(s.position + quantity) > s.limit:
        return False
    s.position += quantity
    s.total += price * quantity
    s.counts[size & 7] += 1
    s.levels[size % 4].size += 1
    s.levels[size % 4].price = price
    s.best.price = larger(s.best.price, price)
    return True


@tw.critical
def total(x: tw.f64[16], n: int) -> float:
    found = 0.0
    for i in range(n):
        if x[i] < 0:
            break
        found += x[i]
    return found


@tw.critical
def collatz(n: int, most: int = 1000) -> int:
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
        if steps >= most:
            return -1
    return steps


@tw.critical
def look(i: int) -> int:
    return TABLE[i]


@tw.critical
def reversed_sum(s: Risk) -> float:
    own = tw.local(6, tw.f64)
    for i in range(2):
        for j in range(3):
            own[5 - (i * 3 + j)] = s.grid[i, j]
    found = 0.0
    for k in range(6):
        found = found * 2.0 + own[k]
    return found


@tw.critical
def narrow(s: Risk, value: int) -> None:
    s.small = value


@tw.critical
def shift(a: int, n: int) -> int:
    return (a << n) ^ (a >> n)


@tw.critical
def truncated(x: float) -> int:
    return int(x)


@tw.critical(overflow="wrap")
def mixed(a: int) -> int:
    return a * 6364136223846793005 + 1442695040888963407


@tw.critical
def logic(a: int, b: bool) -> bool:
    return (a > 3 and not b) or a == 2


@tw.critical
def checked(a: int) -> int:
    assert a >= 0, "a is negative"
    return a


def test_results_are_those_of_python() -> None:
    assert nothing() is None
    for a, b in ((7, 3), (-7, 3), (7, -3), (-7, -3), (0, 5), (1 << 31, 12345)):
        assert whole(a, b) == (a + b) * (a - b) + a // b - a % b
    assert larger(1.0, 2.5) == 2.5
    assert [collatz(n) for n in (1, 6, 27)] == [0, 8, 111]
    assert collatz(27, 10) == -1
    assert collatz(27, most=10) == -1
    assert [look(i) for i in range(8)] == TABLE.tolist()
    assert [shift(5, n) for n in (0, 1, 40)] == [(5 << n) ^ (5 >> n) for n in (0, 1, 40)]
    assert [truncated(x) for x in (2.9, -2.9, 1e18)] == [2, -2, 10**18]
    assert [logic(a, b) for a in (1, 2, 4) for b in (False, True)] == [(a > 3 and not b) or a == 2 for a in (1, 2, 4) for b in (False, True)]
    wanted = (123456789 * 6364136223846793005 + 1442695040888963407 + (1 << 63)) % (1 << 64) - (1 << 63)
    assert mixed(123456789) == wanted
    assert checked(4) == 4


def test_a_state_is_shared_with_numpy() -> None:
    s = Risk(total=1.5)
    assert (s.limit, s.position, s.total, s.open) == (1000, 0, 1.5, True)
    assert check(s, 10, 2.5)
    assert check(s, -4, 7.0)
    assert (s.position, s.total, s.best.price) == (6, 1.5 + 25.0 - 28.0, 7.0)
    assert s.counts.tolist() == [0, 0, 1, 0, 1, 0, 0, 0]
    assert s.levels.size.tolist() == [1, 0, 1, 0]
    assert s.levels[2].price == 2.5
    assert not check(s, 101, 1.0)
    assert not check(s, 100, 1.0) or s.position == 106
    view = s.numpy()
    view["position"] = 999
    assert s.position == 999
    assert not check(s, 5, 1.0)
    s.grid[...] = np.arange(6).reshape(2, 3)
    assert reversed_sum(s) == sum(v * 2.0 ** (5 - k) for k, v in enumerate([5, 4, 3, 2, 1, 0]))
    other = pickle.loads(pickle.dumps(s)).copy()
    assert other.position == 999
    assert s.address % 64 == 0
    assert s.nbytes == Risk.__layout__.numpy().itemsize
    narrow(s, -128)
    assert s.small == -128


def test_arguments_that_are_not_exact_are_converted_or_refused() -> None:
    x = np.arange(16.0)
    assert larger(1, np.float32(0.5)) == 1.0
    assert whole(a=np.int32(7), b=3) == whole(7, 3)
    assert total(x, True) == 0.0
    s = Risk()
    for call, code, words in (
        (lambda: whole(1), "TW016", "missing 'b'"),
        (lambda: whole(1, 2, 3), "TW016", "by position"),
        (lambda: whole(1, 2, b=2), "TW016", "twice"),
        (lambda: whole(1, c=2), "TW016", "no argument 'c'"),
        (lambda: whole(1.0, 2), "TW009", "got the float 1.0"),
        (lambda: whole("1", 2), "TW009", "got a str"),
        (lambda: whole(1 << 63, 2), "TW006", "does not fit i64"),
        (lambda: check(Other(), 1, 1.0), "TW009", "Risk of"),
        (lambda: check(None, 1, 1.0), "TW009", "got a NoneType"),
        (lambda: total(x[::2], 1), "TW009", "f64[16], got float64[8]"),
        (lambda: total(np.zeros(32)[::2], 1), "TW009", "side by side"),
        (lambda: total(np.zeros(16, np.float32), 1), "TW009", "float32"),
        (lambda: total([0.0] * 16, 1), "TW009", "got a list"),
        (lambda: logic(1, 1), "TW009", "is a bool"),
        (lambda: setattr(s, "limit", 1.5), "TW009", "i64"),
        (lambda: setattr(s, "small", 300), "TW009", "-128 to 127"),
        (lambda: setattr(s, "limits", 3), "TW002", "its fields are"),
        (lambda: Risk(limits=3), "TW002", "no field 'limits'"),
    ):
        with pytest.raises(tw.UserError) as raised:
            call()
        assert raised.value.code == code
        assert words in str(raised.value)


def test_faults_are_exceptions_of_python_at_their_line() -> None:
    x, s = np.ones(16), Risk()
    for call, kind, words in (
        (lambda: whole(1, 0), ZeroDivisionError, "1 // 0"),
        (lambda: whole(1 << 62, 1 - (1 << 62)), OverflowError, "does not fit 64 bits"),
        (lambda: whole((1 << 63) - 1, 1), OverflowError, "9223372036854775807 + 1"),
        (lambda: total(x, 17), IndexError, "index 16 is outside 'x', which has extent 16"),
        (lambda: look(-1), IndexError, "index -1"),
        (lambda: narrow(s, 128), OverflowError, "128 does not fit 's.small'"),
        (lambda: shift(1, 64), ValueError, "shifts are by 0 to 63"),
        (lambda: shift(1, 63), OverflowError, "1 << 63"),
        (lambda: truncated(math.nan), OverflowError, "float"),
        (lambda: truncated(9.3e18), OverflowError, "float"),
        (lambda: checked(-1), AssertionError, "a is negative"),
    ):
        with pytest.raises(kind) as raised:
            call()
        assert isinstance(raised.value, tw.UserError)
        assert words in str(raised.value)
        assert "test_critical.py" in str(raised.value)
    assert s.small == 0


def test_what_a_critical_function_cannot_do_is_refused_at_its_line() -> None:
    @tw.critical
    def prints(a: int) -> None:
        print(a)

    @tw.critical
    def no_annotation(a) -> int:  # type: ignore[no-untyped-def]
        return a  # type: ignore[no-any-return]

    @tw.critical
    def pair(a: int) -> int:
        return a, a  # type: ignore[return-value]

    @tw.critical
    def sometimes(a: int) -> int:
        if a > 0:
            return a

    @tw.critical
    def listed(a: int) -> int:
        b = [a for _ in range(3)]
        return b[0]

    @tw.critical
    def recursive(a: int) -> int:
        return recursive(a - 1) if a > 0 else 0

    @tw.critical
    def field(s: Risk) -> int:
        return s.positions

    @tw.critical
    def large() -> float:
        own = tw.local(10000, tw.f64)
        own[0] = 1.0
        return own[0]

    @tw.critical
    def power(a: int, n: int) -> int:
        return a**n  # type: ignore[no-any-return]

    @tw.critical
    def warps(a: int) -> int:
        return tw.lane_id()

    for function, words in (
        (prints, "'print' is not available in a critical function"), (no_annotation, "has no annotation"), (pair, "returns a tuple of 2"),
        (sometimes, "may end without a result"), (listed, "a comprehension"), (recursive, "calls itself"), (field, "no field 'positions'"),
        (large, "80000 bytes"), (power, "exponent that is computed"), (warps, "is not available in a critical function"),
    ):  # fmt: skip
        with pytest.raises(tw.UserError) as raised:
            function.compile()  # type: ignore[attr-defined]
        assert words in str(raised.value)
        assert "test_critical.py" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_latency_ns": 0}, "max_latency_ns is 0"), ({"cpu": -1}, "cpu is -1"), ({"memory": "heap"}, "memory is 'heap'"), ({"overflow": "x"}, "overflow is 'x'"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, object], words: str) -> None:
    with pytest.raises(tw.UserError, match=words):
        tw.critical(**options)(lambda: None)  # type: ignore[call-overload]


def test_a_core_that_is_not_there() -> None:
    @tw.critical(cpu=100000)
    def far() -> None:
        pass

    with pytest.raises(tw.DeviceError, match="no core 100000"), far.pinned():
        pass
    with check.pinned() as core:
        assert core == 0
    assert (check.constraints.target_latency_ns, check.constraints.cpu_affinity, check.constraints.critical_path) == (100, 0, True)
    assert "critical function check" in repr(check)


def test_bad_fields() -> None:
    with pytest.raises(tw.UserError, match="field 'a' of Bad is annotated as str"):

        class Bad(tw.State):
            a: str

    with pytest.raises(tw.UserError, match="cannot be a field"):

        class Taken(tw.State):
            copy: int


class Typed(tw.State):
    """Annotations that type checkers understand."""

    kind: Annotated[int, tw.u8]
    levels: Annotated[np.ndarray, tw.i64[4]]
    parts: Annotated[tw.StateArray[Level], Level[2]]


def reads(name: str, place: int) -> object:
    def read(typed: Typed) -> float:
        return getattr(typed, name)[place] * 2.0

    return read


def test_annotated_fields_and_names_that_are_known() -> None:
    first, second = reads("levels", 1), reads("levels", 3)

    @tw.critical
    def both(typed: Typed, more: Annotated[np.ndarray, tw.f64[2]]) -> float:
        return first(typed) + second(typed) + more[1] + typed.parts[1].price + typed.kind

    typed = Typed(kind=200, levels=[1, 2, 3, 4])
    typed.parts[1].price = 0.5
    assert typed.nbytes == 8 + 32 + 2 * 16
    assert both(typed, np.array([1.0, 10.0])) == 4 + 8 + 10 + 0.5 + 200
    wrong = reads("levls", 0)

    @tw.critical
    def bad(typed: Typed) -> float:
        return wrong(typed)

    with pytest.raises(tw.UserError, match="Typed has no field 'levls'"):
        bad(typed)


@tw.critical
def bumped(s: Other, by: int) -> None:
    if by < 0:
        return
    s.position += by


def helper(s: Other, by: int) -> None:
    for _ in range(3):
        if by < 0:
            return
        s.position += by
    s.position += 100


@tw.critical
def helped(s: Other, by: int) -> int:
    helper(s, by)
    return s.position


def test_functions_that_return_nothing_may_return_early() -> None:
    other = Other()
    assert bumped(other, -1) is None
    assert bumped(other, 5) is None
    assert other.position == 5
    assert helped(other, -1) == 5
    assert helped(other, 2) == 111


def test_a_rings_slots_from_python() -> None:
    ring = tw.Ring[Level, 2]()
    assert (ring.claim(), ring.front(), ring.count()) == (0, -1, 0)
    ring.items[0].price = 2.5
    ring.publish()
    assert (ring.claim(), ring.front(), ring.count(), len(ring)) == (1, 0, 1, 1)
    assert ring.items[ring.front()].price == 2.5
    ring.publish()
    assert ring.claim() == -1
    ring.release()
    assert (ring.claim(), ring.front()) == (0, 1)


def test_fields_by_place() -> None:
    level = Level(3.5, size=2)
    assert (level.price, level.size) == (3.5, 2)
    with pytest.raises(tw.UserError, match=r"TW009.*Level has 2 fields, got 3"):
        Level(1.0, 2, 3)
    with pytest.raises(tw.UserError, match=r"TW009.*'price' of Level is given twice"):
        Level(1.0, price=2.0)
