"""`tilewright tune`: find fast schedules for the kernels of a file on a device here, with random inputs, and keep them.

In: a file and the extents of a call; out: a table of the fastest schedules, a sparkline of the search, a plot on request, and the tuning
table that later calls of the kernel choose by.
"""

from __future__ import annotations

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tilewright.base.errors import UserError
from tilewright.cli.guess import GuessedArguments, parse_arguments
from tilewright.cli.plots import plot_search, sparkline
from tilewright.cli.sources import Entry, choose, read_source, walk
from tilewright.compile.tuning import store
from tilewright.execute import tune as tuner
from tilewright.execute import tune_search as search
from tilewright.execute.devices import Device, find_device
from tilewright.execute.tune_search import Tuning
from tilewright.execute.tuning_files import export_tuning, import_tuning

_SHOWN = 8


def tune(
    path: str, kernel: str | None, arguments: str, device: str | None, precision: str | None, budget: float, plot: str | None
) -> None:
    """Tune the file's kernels, or the one named, and print what was found."""
    entries = choose(walk(read_source(path), parse_arguments(arguments), kernel).raise_if_errors().entries, kernel, path)
    if plot is not None and len(entries) > 1:
        raise UserError.at("TW016", f"{path} has {len(entries)} kernels, and a plot shows one", help="choose one with --kernel NAME")
    place = find_device(device or "auto")
    console = Console()
    for entry in entries if precision is None else [entry.without_precision() for entry in entries]:
        values = random_values(entry)
        found = _tune_one(entry, values, place, precision, budget, console)
        _show(found, console)
        if plot is not None and found.best is not None:
            click.echo(plot_search(found.trials, found.best.schedule, f"{found.kernel} on {place.name}", plot))


def _tune_one(
    entry: Entry, values: dict[str, object], place: Device, precision: str | None, budget: float, console: Console
) -> Tuning:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{entry.name}: the first schedule", total=budget)

        def report(p: search.Progress) -> None:
            best = f"best {_duration(p.best.seconds)}" if p.best else "none yet"
            bar.update(task, completed=min(p.elapsed, budget), description=f"{entry.name}: {len(p.trials)} tried, {best}")

        return tuner.tune_function(entry.function, values, place, precision or "auto", budget, report)


def random_values(entry: Entry) -> dict[str, object]:
    """Inputs of the extents given: every axis needs one."""
    generator = np.random.default_rng(0)
    values: dict[str, object] = {}
    for name, given in entry.args:
        if given.extents is not None and None in given.extents:
            rank = ",".join(["4096"] * len(given.extents))
            raise UserError.at("TW016", f"the extents of '{name}' are not known", help=f'say them: --args "{name}={given.dtype}[{rank}]"')
        values[name] = _random(given, generator)
    return values


def _random(given: GuessedArguments, generator: np.random.Generator) -> object:
    if given.extents is None:
        return (0.75 if given.plain == "float" else 1) if given.plain else given.dtype.numpy.type(1)
    shape = tuple(e for e in given.extents if e is not None)
    if given.dtype.is_float:
        # Small numbers: sums of many products stay finite in every element type.
        return generator.standard_normal(shape, np.float32).astype(given.dtype.numpy)
    return generator.integers(0, 2 if given.dtype.is_bool else 8, shape).astype(given.dtype.numpy)


def share(action: str, file: str | None) -> None:
    """List the tables, write them to a file, or add those of a file."""
    if (file is None) != (action == "list"):
        raise UserError.at("TW016", f"'tilewright tuning {action}' takes {'no file' if file else 'a file'}", help="for instance: tilewright tuning export tuned.json")
    if file is not None:
        click.echo(str(export_tuning(file) if action == "export" else import_tuning(file)))
        return
    for table in store().tables().values():
        shapes = len({m.extents for m in table.entries})
        click.echo(f"{table.kernel} on {table.target}: {len(table.entries)} measurements at {shapes} shape(s)")


def _show(found: Tuning, console: Console) -> None:
    if found.best is None:
        click.echo(str(found))
        return
    assert found.default is not None
    table = Table("time", "× default", "rounds", "schedule", title=f"{found.kernel} on {found.device}", title_justify="left")
    for column in table.columns[:3]:
        column.justify = "right"
    for m in found.ranking()[:_SHOWN]:
        ratio = f"{found.default.seconds / m.seconds:.3f}" if found.default.ok else ""
        marks = (" (chosen)" if m.schedule == found.best.schedule else "") + (" (default)" if m.schedule == found.default.schedule else "")
        table.add_row(_duration(m.seconds), ratio, str(m.rounds), m.schedule + marks)
    console.print(table)
    failed = [m for m in found.trials if not m.ok]
    click.echo(f"search: {sparkline([m.seconds if m.ok else None for m in found.trials])}")
    click.echo(f"{len(found.trials)} schedules in {found.elapsed:.1f} s, {len(failed)} failed")
    click.echo("rows of one round were measured shortly, and the best of them look better than they are")
    for m in failed[:3]:
        click.echo(f"  {m.schedule}: {m.error}")
    click.echo(f"chosen: {found.best.schedule}")


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"
