"""`tilewright demo`: the gallery, the ZynML programs and a tensor graph on every device found, checked against float64, in two tables.

In: `examples/gallery.py`, `monte_carlo.py`, `layers.py`, `blocks.py`, `tours.py` and `decode_graph.py` of the repository. Out: the tables, and the PTX of every kernel in a folder, made with or without a GPU. Times are
the best of a few calls after the first; the emulator runs small inputs and is there to be right, not fast. Contractions have a rate of
arithmetic, the others one of memory.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from tilewright.base.dtypes import f64, from_numpy, i64
from tilewright.base.errors import TilewrightError, UserError
from tilewright.base.target import DEFAULT_NVPTX, NVPTX
from tilewright.cli import repository
from tilewright.cli.commands import demo_graphs, demo_tours
from tilewright.cli.commands.demo_rows import DemoRow, as_list, duration, max_error, speed_class
from tilewright.cli.guess import GuessedArguments
from tilewright.cli.sources import read_source, walk
from tilewright.compile.driver import compile_kernel
from tilewright.execute.devices import Device, array_device, devices
from tilewright.execute.kernel import Kernel
from tilewright.execute.kinds import absences, kind_of
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.zyn.load import load

_ELEMENTS = {"host": 1 << 22, "device": 1 << 25, "simulated": 1 << 11}
"""By how fast a device is: one that uses the host's memory, one with memory of its own, one that only has to be right."""
_SECONDS = 0.15
"""Time spent on measuring one thing."""

_BATCH = 10

Inputs = Mapping[str, object]


@dataclass(frozen=True)
class Item:
    """One example of the gallery, as the demo needs it."""

    name: str
    program: Kernel[..., object] | Path
    make: Callable[[np.random.Generator, int], Inputs]
    reference: Callable[..., object]
    result: str
    operations: Callable[..., float] | None = None
    """Multiplications and additions for these inputs, of a contraction."""
    tolerance: float = 1e-5
    """Largest error accepted, in units of the largest magnitude in the result (at least 1)."""


def demo(ptx_folder: str | None = None) -> bool:
    """Run everything, print the table; whether every result was right. PTX goes to a temporary folder where none is named."""
    ptx_folder = ptx_folder or tempfile.mkdtemp(prefix="tilewright-ptx-")
    gallery = read_gallery()
    tours = demo_tours.read_tours()
    places = devices()
    console = Console()
    rows: list[DemoRow] = []
    shown: list[DemoRow] = []
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(gallery) * (len(places) + 1) + (len(tours) + 1) * len(places))
        for item in gallery:
            for place, row in zip(places, run_item(item, places), strict=True):
                rows.append(row)
                progress.update(task, description=f"{item.name} on {place.id}", advance=1)
        for tour in tours:
            for place, row in zip(places, demo_tours.run_tour(tour, places, best_seconds), strict=True):
                shown.append(row)
                progress.update(task, description=f"{tour.name} on {place.id}", advance=1)
        for place, row in zip(places, demo_graphs.run_graph(places, best_seconds), strict=True):
            shown.append(row)
            progress.update(task, description=f"decode_graph on {place.id}", advance=1)
        written: list[Path] = []
        for item in gallery:
            progress.update(task, description=f"{item.name} to PTX")
            written += write_ptx(item, Path(ptx_folder))
            progress.advance(task)
    console.print(_table(rows))
    console.print(demo_tours.table(shown))
    rows += shown
    for row in rows:
        if row.failure:
            console.print(f"{row.name} on {row.device}: {row.failure}", markup=False, highlight=False)
    wrong = sum(not row.ok for row in rows)
    console.print(f"{len(rows) - wrong} of {len(rows)} results right; PTX for {DEFAULT_NVPTX}: {len(written)} files in {ptx_folder}/", highlight=False)
    for reason in absences():
        console.print(reason, markup=False, highlight=False)
    return not wrong


def read_gallery() -> list[Item]:
    """The examples of the repository's gallery."""
    module = repository.load("examples/gallery.py", "tilewright_gallery")
    layers = repository.load("examples/layers.py", "tilewright_layers")
    blocks = repository.load("examples/blocks.py", "tilewright_blocks")
    drawn = repository.load("examples/monte_carlo.py", "tilewright_monte_carlo")
    examples = (*module.GALLERY, *module.CONTRACTIONS, *drawn.EXAMPLES, *layers.LAYERS, *blocks.BLOCKS)
    return [Item(e.name, e.program, e.make, e.reference, e.result, e.operations, e.tolerance) for e in examples]


def run_item(item: Item, places: list[Device]) -> Iterator[DemoRow]:
    """One row for each device. Sizes differ by device; NumPy is timed on the same inputs."""
    known: dict[int, float] = {}
    for place in places:
        size = _ELEMENTS[speed_class(place)]
        inputs = item.make(np.random.default_rng(0), size)
        try:
            result, seconds = _run(item, inputs, place)
        except TilewrightError as error:
            yield DemoRow(item.name, place.id, failure=str(error))
            continue
        if not kind_of(place).simulated and size not in known:
            known[size] = best_seconds(functools.partial(item.reference, *inputs.values()))
        operations = item.operations(*inputs.values()) if item.operations else 0.0
        yield DemoRow(
            item.name, place.id, seconds, _bytes(inputs.values()) + _bytes(result), operations, known.get(size, 0.0),
            max_error(result, item.reference(*map(_exact, inputs.values()))), item.tolerance,
        )  # fmt: skip


def _caller(item: Item, inputs: Inputs, device: str) -> Callable[[], object]:
    program = item.program
    if isinstance(program, Path):
        module = load(program)
        return lambda: module.run(device=device, **inputs)[item.result]
    if device == "cpu":
        return lambda: program(*inputs.values())
    return lambda: program(*inputs.values(), device=device)


def _run(item: Item, inputs: Inputs, place: Device) -> tuple[list[object], float]:
    """The results as host values, and the time of one call."""
    if kind_of(place).simulated:
        start = time.perf_counter()
        result = _caller(item, inputs, place.id)()
        return as_list(result), time.perf_counter() - start
    gpu = array_device(place)
    if gpu is None:
        call = _caller(item, inputs, place.id)
        return as_list(call()), best_seconds(call)
    moved = {name: gpu.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}
    call = _caller(item, moved, place.id)
    result = as_list(call())
    gpu.synchronize()
    # Several calls between two events: the host runs ahead and its own time is hidden.
    milliseconds = min(gpu.time(lambda: [call() for _ in range(_BATCH)], repeats=5)) / _BATCH
    return [r.numpy() if isinstance(r, DeviceArray) else r for r in result], milliseconds / 1e3


def best_seconds(call: Callable[[], object]) -> float:
    """The quickest of several calls."""
    best = float("inf")
    end = time.perf_counter() + _SECONDS
    for _ in range(50):
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    return best


def write_ptx(item: Item, folder: Path) -> list[Path]:
    """The PTX of an example's kernels for the default GPU."""
    inputs = item.make(np.random.default_rng(0), _ELEMENTS["device"] >> 10)
    stem = item.name.replace(".", "_").replace(" ", "_")
    if isinstance(item.program, Path):
        given = {name: _given(value) for name, value in inputs.items()}
        entries = walk(read_source(str(item.program)), given).raise_if_errors().entries
        target = NVPTX[DEFAULT_NVPTX]
        codes = [compile_kernel(e.function, e.signature(gpu=True), target).code for e in entries]
    else:
        codes = [item.program.compile(*inputs.values(), target=DEFAULT_NVPTX).code]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / (f"{stem}.ptx" if len(codes) == 1 else f"{stem}_{number}.ptx") for number in range(len(codes))]
        for path, code in zip(paths, codes):
            path.write_bytes(code)
    except OSError as error:
        raise UserError.at("TW007", f"'{folder}' cannot be written: {error.strerror or error}") from None
    return paths


def _given(value: object) -> GuessedArguments:
    if isinstance(value, np.ndarray):
        dtype = from_numpy(value.dtype)
        assert dtype is not None
        return GuessedArguments(dtype, value.shape)
    return GuessedArguments(i64, plain="int") if isinstance(value, int) else GuessedArguments(f64, plain="float")


def _exact(value: object) -> object:
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value


def _bytes(values: Iterable[object]) -> int:
    return sum(np.asarray(v).nbytes for v in values)


def _table(rows: list[DemoRow]) -> Table:
    table = Table("kernel", "device", "time", "rate", "× NumPy", "error", "ok", pad_edge=False)
    for column in table.columns[2:6]:
        column.justify = "right"
    for row in rows:
        real = not row.device.startswith("emulator") and not row.failure
        table.add_row(
            row.name, row.device.removesuffix(":thread"), "" if row.failure else duration(row.seconds),
            row.rate if real else "",
            f"{row.numpy_seconds / row.seconds:.1f}" if real else "",
            "" if row.failure else f"{row.error:.0e}" if row.error else "0", "[green]ok[/]" if row.ok else "[red]WRONG[/]",
        )  # fmt: skip
    return table
