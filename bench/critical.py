"""Critical functions: latencies native and from Python, beside Numba's calls where it is installed.

    python -m bench.critical                  prints the table
    python -m bench.critical --out FOLDER     also writes a line of JSON and a picture (SVG) for each function

The works are those of a trading desk: a risk check, a position update, an order into a ring with its risk check (and a consumer that takes it out), a signal of 32 features with
windows of 64 numbers that is computed anew each time, a call that does nothing, and the replay of a day of 5 million events by `examples/trading`. The thread is pinned; times are of this machine as it is, so run it on a quiet one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw

FEATURES, WINDOW = 32, 64


class Desk(tw.State):
    position: int
    most_position: int = 1 << 40
    most_order: int = 1_000
    used: float
    most_used: float = 1e300
    average: float
    open: bool = True
    sent: int


class Order(tw.State):
    id: int
    quantity: int
    price: float
    when: int


class Signal(tw.State):
    windows: tw.f32[FEATURES, WINDOW]
    taps: tw.f32[WINDOW]
    weights: tw.f32[FEATURES]


Orders = tw.Ring[Order, 1024]


@tw.no_allocation
@tw.no_syscalls
@tw.critical
def nothing() -> None:
    pass


@tw.no_allocation
@tw.no_syscalls
@tw.critical(max_latency_ns=100)
def risk_check(desk: Desk, quantity: int, price: float) -> bool:
    size = abs(quantity)
    if not desk.open or size > desk.most_order or abs(desk.position + quantity) > desk.most_position:
        return False
    return desk.used + price * size <= desk.most_used


@tw.no_allocation
@tw.no_syscalls
@tw.critical(max_latency_ns=200)
def position_update(desk: Desk, quantity: int, price: float) -> float:
    desk.position += quantity
    desk.used += price * abs(quantity)
    desk.average = desk.average * 0.9 + price * 0.1
    return desk.average


@tw.no_allocation
@tw.no_syscalls
@tw.critical(max_latency_ns=500)
def order_submission(desk: Desk, orders: Orders, quantity: int, price: float) -> int:
    """An order goes into the ring, and a consumer takes it out, so that there is always room."""
    if not risk_check(desk, quantity, price):
        return -2
    slot = orders.claim()
    if slot < 0:
        return -1
    order = orders.items[slot]
    order.id = desk.sent
    order.quantity = quantity
    order.price = price
    order.when = tw.clock()
    orders.publish()
    desk.sent += 1
    orders.release()
    return slot


@tw.no_allocation
@tw.no_syscalls
@tw.critical(max_latency_ns=1000)
def signal_evaluation(signal: Signal) -> float:
    total = tw.f32(0.0)
    for f in range(FEATURES):
        a = tw.f32x4(0.0)
        b = tw.f32x4(0.0)
        c = tw.f32x4(0.0)
        d = tw.f32x4(0.0)
        for k in tw.unrolled(range(0, WINDOW, 16)):
            a = tw.fma(tw.f32x4.load(signal.windows, f, k), tw.f32x4.load(signal.taps, k), a)
            b = tw.fma(tw.f32x4.load(signal.windows, f, k + 4), tw.f32x4.load(signal.taps, k + 4), b)
            c = tw.fma(tw.f32x4.load(signal.windows, f, k + 8), tw.f32x4.load(signal.taps, k + 8), c)
            d = tw.fma(tw.f32x4.load(signal.windows, f, k + 12), tw.f32x4.load(signal.taps, k + 12), d)
        total += ((a + b) + (c + d)).sum() * signal.weights[f]
    return total


def works() -> list[tuple[Any, tuple[object, ...]]]:
    """The functions with arguments like those of a running desk."""
    random = np.random.default_rng(0)
    signal = Signal(windows=random.standard_normal((FEATURES, WINDOW)).astype(np.float32), taps=random.standard_normal(WINDOW).astype(np.float32))
    signal.weights[:] = random.standard_normal(FEATURES)
    wanted = float((signal.windows.astype(np.float64) @ signal.taps) @ signal.weights)
    assert abs(signal_evaluation(signal) - wanted) < 1e-3 * max(1.0, abs(wanted))
    return [
        (nothing, ()), (risk_check, (Desk(), 1, 101.5)), (position_update, (Desk(), 1, 101.5)), (order_submission, (Desk(), Orders(), 1, 101.5)),
        (signal_evaluation, (signal,)),
    ]  # fmt: skip


def call_time(function: Callable[..., object], arguments: tuple[object, ...], calls: int = 20_000, rounds: int = 60) -> float:
    """Nanoseconds of one call from a loop of Python, less the loop: the best of some rounds."""
    names = ", ".join(f"a{k}" for k in range(len(arguments)))
    made: dict[str, Any] = {}
    exec(f"def run(n, f, {names}):\n    for _ in range(n): f({names})\ndef bare(n, f, {names}):\n    for _ in range(n): pass\n", made)
    times = {}
    for name in ("run", "bare"):
        found = []
        for _ in range(rounds):
            begin = time.perf_counter()
            made[name](calls, function, *arguments)
            found.append(time.perf_counter() - begin)
        times[name] = min(found)
    return (times["run"] - times["bare"]) / calls * 1e9


def peers() -> dict[str, float]:
    """What a call of a function that does nothing takes, by who compiled it."""

    def plain() -> None:
        return

    found = {"tilewright": call_time(nothing, ()), "tilewright .entry": call_time(nothing.entry, ()), "Python def": call_time(plain, ())}
    try:
        import numba
    except ImportError:
        return found
    jitted = numba.njit(plain)
    jitted()
    return found | {"Numba njit": call_time(jitted, ())}


def replayed(events: int, rounds: int = 5) -> Any:
    """A synthetic day through the desk of `examples/trading`: its `Result`."""
    folder = Path(__file__).parents[1] / "examples/trading"
    sys.path.insert(0, str(folder))
    try:
        from language import read_strategy
        from replay import replay, synthetic_day
    finally:
        sys.path.remove(str(folder))
    return replay(read_strategy((folder / "momentum.desk").read_text(encoding="utf-8")), synthetic_day(events), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder for lines of JSON and pictures")
    parser.add_argument("-n", type=int, default=1_000_000, help="calls of each function")
    parser.add_argument("--events", type=int, default=5_000_000, help="events of the replay; 0 leaves it out")
    options = parser.parse_args()
    rows = []
    for function, arguments in works():
        found = tw.latency(function, arguments, n=options.n)
        assert found.python is not None
        proof = function.proof()
        rows.append({
            "work": found.name, "native_p50": found.native.p50, "native_p99": found.native.p99, "native_p99_9": found.native.p99_9, "native_p99_99": found.native.p99_99, "native_most": found.native.most,
            "python_p50": found.python.p50, "python_p99": found.python.p99, "python_p99_99": found.python.p99_99, "python_most": found.python.most, "batch": found.native.batch, "resolution_ns": found.resolution_ns,
            "instructions": proof.instructions, "path": proof.path, "no_allocation": proof.no_allocation,
            "estimate_cycles": proof.estimate.repeated, "estimate_ns": proof.estimate.repeated * found.cycle_ns, "estimate_core": proof.estimate.core, "ghz": 1 / found.cycle_ns,
        })  # fmt: skip
        print(f"{found.name:<20} native p50 {found.native.p50:8.1f}  p99 {found.native.p99:8.1f}   from Python p50 {found.python.p50:7.1f}  p99 {found.python.p99:8.1f}   ({proof.instructions} instructions; estimate {proof.estimate.repeated * found.cycle_ns:.1f})")
        if options.out:
            found.plot(Path(options.out) / f"critical-{found.name.replace('_', '-')}.svg")
    empty = peers()
    print("a call that does nothing, ns: " + ", ".join(f"{name} {value:.1f}" for name, value in empty.items()))
    if options.events:
        day = replayed(options.events)
        print(day)
        rows.append({
            "work": "replay", "events": day.events, "events_per_second": day.rate, "events_per_own_second": day.events / day.own_seconds, "p50": day.percentile(0.5), "p99": day.percentile(0.99), "p99_9": day.percentile(0.999),
            "counter_step_ns": day.step_ns, "sent": int(day.desk.sent[0]), "fills": day.desk.fills, "cash": day.desk.cash,
        })  # fmt: skip
    if options.out:
        rows.append({"work": "empty call", **empty, "load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
        (Path(options.out) / "critical.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
