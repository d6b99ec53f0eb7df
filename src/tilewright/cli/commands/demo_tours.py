"""`tilewright demo`, the programs of `examples/tours.py`: every ZynML program that shows the language, on every device found.

In: the tours of the repository and the devices. Out: a row for each program and device: the time of a call of the loaded
program, with copies to and from a GPU, and the largest error of its results against float64. What programs print is left out.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.table import Table

from tilewright.base.errors import TilewrightError
from tilewright.cli import repository
from tilewright.cli.commands.demo_rows import DemoRow, duration, max_error, speed_class
from tilewright.execute.devices import Device, kind_of
from tilewright.runtime.cpu import pool as cpu_pool
from tilewright.zyn.load import load

_ELEMENTS = {"host": 1 << 14, "device": 1 << 14, "simulated": 1 << 9}


def read_tours() -> list[Any]:
    """The programs, but for those that this machine has not enough cores for."""
    tours = repository.load("examples/tours.py", "tilewright_tours").TOURS
    return [tour for tour in tours if tour.name != "tour_parallel" or len(cpu_pool.usable_cores()) > 1]


def run_tour(tour: Any, places: list[Device], best_seconds: Callable[[Callable[[], object]], float]) -> Iterator[DemoRow]:
    """One row for each device; `best_seconds(call)` is the time of a call."""
    import numpy as np

    for place in places:
        inputs = tour.make(np.random.default_rng(0), _ELEMENTS[speed_class(place)])
        name = f"{tour.name}.zyn"
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                call = _caller(tour, inputs, place.id)
                start = time.perf_counter()
                found = call()
                seconds = time.perf_counter() - start
                if not kind_of(place).simulated:
                    seconds = best_seconds(call)
        except TilewrightError as error:
            yield DemoRow(name, place.id, failure=str(error))
            continue
        wanted = tour.reference(inputs)
        errors = [max_error(_list(found[result]), _tuple(exact)) for result, exact in wanted.items()]
        yield DemoRow(name, place.id, seconds, error=max(errors), tolerance=tour.tolerance)


def _caller(tour: Any, inputs: Mapping[str, Any], device: str) -> Callable[[], dict[str, Any]]:
    module = load(tour.path)
    if tour.function:
        function = getattr(module, tour.function)
        return lambda: {tour.function: function(device=device, **inputs)}
    return lambda: module.run(device=device, **inputs)


def _list(value: Any) -> list[object]:
    """Results on the host."""
    items = value if isinstance(value, list | tuple) else [value]
    return [item.numpy() if hasattr(item, "numpy") else item for item in items]


def _tuple(value: Any) -> object:
    return tuple(value) if isinstance(value, list) else value


def table(rows: list[DemoRow]) -> Table:
    made = Table("program", "device", "time", "error", "ok", pad_edge=False)
    for column in made.columns[2:4]:
        column.justify = "right"
    for row in rows:
        made.add_row(
            row.name, row.device.removesuffix(":thread"), "" if row.failure else duration(row.seconds),
            "" if row.failure else f"{row.error:.0e}" if row.error else "0", "[green]ok[/]" if row.ok else "[red]WRONG[/]",
        )  # fmt: skip
    return made
