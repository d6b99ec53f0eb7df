"""Tuning of primitives: how many elements one unit of work has, on a CPU.

In: a primitive such as `tw.scan` and the arguments of a call. Out: a `Tuning`. The call is made once and the programs it asks for are noted; other
numbers are tried that make other programs of them. What was fastest is kept for each of these programs, which later calls ask for again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from tilewright.base import chunks
from tilewright.base.errors import UserError
from tilewright.compile import tuning
from tilewright.compile.primitives import program_key
from tilewright.compile.tuning import Measurement, TuningTable
from tilewright.execute.devices import default_device, device_of, find_device, kind_of
from tilewright.execute.tune_search import Report, TableLedger, Tuning, difference, search

_NUMBERS = (131072, 32768, 262144, 16384, 8192, 4096)
_SECONDS = 0.3
_MOST = 40


class _ChunkNumber(int):
    """Elements of one unit of work; 0 are as many as usual."""

    def describe(self) -> str:
        return f"{tuning.LOOPS} chunk={int(self)}" if self else tuning.LOOPS


def is_primitive(thing: object) -> bool:
    """Whether it is a function of this package that runs programs of primitives."""
    return callable(thing) and str(getattr(thing, "__module__", "")).startswith("tilewright.execute.primitives.")


def tune_primitive(function: Callable[..., object], args: Sequence[object], budget: float, device: str | None, progress: Report | None) -> Tuning:
    """Measure other units of work for these arguments."""
    name = str(getattr(function, "__name__", "primitive"))
    place = find_device(device or device_of(list(args)) or default_device())
    if kind_of(place).simulated:
        raise UserError.at("TW030", "the emulator has no speed to tune", help="use device='cpu'")

    def call() -> list[np.ndarray]:
        made = function(*args, device=place.id)
        return [np.array(part) for part in (made if isinstance(made, tuple) else (made,))]

    with chunks.with_chunk(0), chunks.watched() as seen:
        call()
    usual = [_text(build) for build in seen.values()]
    listed = [_ChunkNumber(0)]
    for number in _NUMBERS:
        with chunks.with_chunk(number):
            if [_text(build) for build in seen.values()] != usual:
                listed.append(_ChunkNumber(number))
    empty = Tuning(name, place.id)
    if place.target.is_gpu or len(listed) == 1:
        return Tuning(name, place.id, reason="its program for this call has no parameter that changes its code (chunk)")
    ledgers = [TableLedger(program_key(what, place.target), name, place.target.name, ()) for what in seen]
    return search(listed, lambda number: [], _CallBench(call), _Ledgers(ledgers), empty, budget, progress)


def _text(build: Callable[[], object]) -> str:
    from tilewright.ir.text import print_program

    return print_program(build())  # type: ignore[arg-type]


def _number(text: str) -> int:
    return int(text.rpartition("=")[2]) if text != tuning.LOOPS else 0


class _CallBench:
    """Makes the call with units of work as a text says."""

    def __init__(self, call: Callable[[], list[np.ndarray]]) -> None:
        self._call = call
        self._expected: list[np.ndarray] | None = None

    def ahead(self, schedules: Sequence[str]) -> None:
        pass

    def usable(self) -> bool:
        return True

    def check(self, schedule: str) -> str:
        with chunks.with_chunk(_number(schedule)):
            found = self._call()
        if self._expected is None:
            self._expected = found
            return ""
        return next((d for d in map(difference, found, self._expected) if d), "")

    def seconds(self, schedules: Sequence[str], rounds: int = 1) -> list[float]:
        times: list[list[float]] = [[] for _ in schedules]
        end = time.perf_counter() + _SECONDS * rounds
        while len(times[0]) < 3 or (len(times[0]) < _MOST * rounds and time.perf_counter() < end):
            for text, own in zip(schedules, times, strict=True):
                with chunks.with_chunk(_number(text)):
                    start = time.perf_counter()
                    self._call()
                    own.append(time.perf_counter() - start)
        return [float(np.median(own)) for own in times]


class _Ledgers:
    """Keeps measurements of a call for each of its programs."""

    def __init__(self, ledgers: Sequence[TableLedger]) -> None:
        self._all = ledgers

    def failed_before(self, schedule: str) -> str:
        return next((found for ledger in self._all if (found := ledger.failed_before(schedule))), "")

    def begin(self, schedule: str) -> None:
        for ledger in self._all:
            ledger.begin(schedule)

    def measured(self, schedule: str, seconds: float, error: str) -> Measurement:
        return self._all[0].measured(schedule, seconds, error)

    def abandon(self, schedule: str) -> None:
        for ledger in self._all:
            ledger.abandon(schedule)

    def finish(self, measurements: Sequence[Measurement]) -> TuningTable | None:
        tables = [ledger.finish(measurements) for ledger in self._all]
        return tables[0]
