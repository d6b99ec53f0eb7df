"""`python -m bench.run KIND` (one of `KINDS`): run the benchmarks, print a table or JSON lines, keep the results.

Out: one `Record` per case. The exit status is 0 when every result was right, 1 when one was wrong or failed, 2 when the run
could not start (a peer is missing, no such op). A missed speed bar is shown and does not change the status.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import contraction_run
from bench.harness import Case, Clock, HostClock, Plan, Record, Setting, measure
from bench.peers import PeerMissing, require
from tilewright.base.errors import TilewrightError

RESULTS = Path(__file__).resolve().parent / "results"
KINDS = (
    "cpu",
    "gpu",
    "runtime",
    "zyn",
    "zyn-cpu",
    "simt",
    "primitives",
    "primitives-cpu",
    "scans",
    "scans-cpu",
    "scatter",
    "scatter-cpu",
    "decode-attention",
    "decode-attention-cpu",
    "decode-step",
    "mega",
    "random",
    "random-cpu",
    "ordered",
    "ordered-cpu",
    "checks-cpu",
    "quantised-cpu",
    "onnx-cpu",
    "models",
    "models-cpu",
    "host",
    "compile",
    "portable",
    "opencl",
    "gemv",
    "families",
    "families-cpu",
    *contraction_run.KINDS,
)


@dataclass(frozen=True)
class Job:
    """What `op` names, and what makes its records."""

    label: str
    ops: tuple[str, ...]
    run: Callable[[], Iterator[Record]]


def commit() -> str:
    """The commit the results are of, marked where the tree had changes; `TILEWRIGHT_COMMIT` where there is no repository."""
    if os.environ.get("TILEWRIGHT_COMMIT"):
        return os.environ["TILEWRIGHT_COMMIT"]
    try:
        root = Path(__file__).resolve().parent.parent
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        name = found.group(1) if found else name
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{re.sub(r'[(]R[)]|[(]TM[)]', '', name)}, {threads} threads"


def cpu_jobs(setting: Setting, quick: bool, wanted: Callable[[str], bool]) -> list[Job]:
    from bench import cpu, latency

    plan = Plan(rounds=5, per_round=3, warmups=1, seconds=2.0) if quick else Plan(rounds=15, per_round=3, warmups=2, seconds=10.0)
    clock = HostClock()
    # The calls first: they are shortest, and peers' thread pools are not there yet.
    jobs = [Job("latency", latency.OPS, lambda: latency.records(setting, wanted, quick))]
    jobs += [
        Job(case.label, (case.op,), lambda case=case: iter([measure(case, clock, plan, setting)]))  # type: ignore[misc]
        for case in cpu.cases(quick)
    ]
    return jobs


def gpu_jobs(setting: Setting, quick: bool, wanted: Callable[[str], bool]) -> list[Job]:
    from bench import gpu

    session = gpu.Session.open(setting, quick)
    jobs = [
        Job(case.label, (case.op,), lambda case=case: iter([session.measure(case)]))  # type: ignore[misc]
        for case in gpu.cases(session.machine, quick)
    ]
    copies = [Job(f"copy {d}", ("copy",), lambda d=d: iter([session.copy_record(d)])) for d in gpu.DTYPES]  # type: ignore[misc]
    return [*copies, *jobs, Job("launch_host", ("launch_host",), lambda: iter([session.launch_overhead()]))]


def opencl_jobs(setting: Setting, quick: bool) -> list[Job]:
    from bench import opencl

    plan = Plan(rounds=5, per_round=3, warmups=1, seconds=2.0) if quick else Plan(rounds=15, per_round=3, warmups=2, seconds=10.0)
    clock = HostClock()
    return [
        Job(case.label, (case.op,), lambda case=case: iter([measure(case, clock, plan, setting)]))  # type: ignore[misc]
        for case in opencl.cases(quick)
    ]


def simt_jobs(setting: Setting, quick: bool) -> list[Job]:
    from bench import gpu, simt

    session = gpu.Session.open(setting, quick)
    return [
        Job(case.label, (case.op,), lambda case=case: iter([session.measure(case)]))  # type: ignore[misc]
        for case in simt.cases(session.machine, quick)
    ]


def runtime_jobs(setting: Setting, quick: bool) -> list[Job]:
    from bench import runtime, runtime_graphs, runtime_grid, runtime_memory

    session = runtime.Session.open(setting, quick)
    rows = (*runtime.ROWS, *runtime_graphs.ROWS, *runtime_grid.ROWS, *runtime_memory.ROWS)
    return [Job(row.__name__, (row.__name__,), lambda row=row: iter([row(session)])) for row in rows]  # type: ignore[misc]


def primitive_jobs(kind: str, setting: Setting, quick: bool) -> list[Job]:
    from bench import primitives, scans

    family = scans if kind.startswith("scans") else primitives
    if kind.endswith("-cpu"):
        plan = Plan(rounds=5, per_round=3, warmups=1, seconds=2.0) if quick else Plan(rounds=15, per_round=3, warmups=2, seconds=10.0)
        clock = HostClock()
        return [
            Job(case.label, (case.op,), lambda case=case: iter([measure(case, clock, plan, setting)]))  # type: ignore[misc]
            for case in family.cpu_cases(quick)
        ]
    from bench import gpu

    session = gpu.Session.open(setting, quick)

    def run(case: Case) -> Iterator[Record]:
        yield measure(case, session.machine.clock, session.plan, setting, session.copy_rate("f32"))
        session.release()

    return [Job(case.label, (case.op,), lambda case=case: run(case)) for case in family.gpu_cases(quick)]  # type: ignore[misc]


def quantised_jobs(setting: Setting, quick: bool) -> list[Job]:
    from bench import quantised_cpu

    plan = Plan(rounds=5, per_round=3, warmups=1, seconds=3.0) if quick else Plan(rounds=15, per_round=4, warmups=2, seconds=10.0)
    clock = HostClock()
    return [
        Job(case.label, (case.op,), lambda case=case: iter([measure(case, clock, plan, setting)]))  # type: ignore[misc]
        for case in quantised_cpu.cpu_cases(quick)
    ]


def scatter_jobs(kind: str, setting: Setting, quick: bool) -> list[Job]:
    from bench import decode_attention, decode_step, mega, scatter

    family: Any = mega if kind == "mega" else decode_step if kind == "decode-step" else decode_attention if kind.startswith("decode") else scatter
    if kind.endswith("-cpu"):
        plan = Plan(rounds=5, per_round=3, warmups=1, seconds=3.0) if quick else Plan(rounds=15, per_round=1, warmups=1, seconds=10.0)
        clock = HostClock()
        return [
            Job(case.label, (case.op,), lambda case=case: iter([measure(case, clock, plan, setting)]))  # type: ignore[misc]
            for case in family.cpu_cases(quick)
        ]
    from bench import gpu

    session = gpu.Session.open(setting, quick)

    def run(case: Case) -> Iterator[Record]:
        yield measure(case, session.machine.clock, session.plan, setting, session.copy_rate("f32"))
        session.release()

    return [Job(case.label, (case.op,), lambda case=case: run(case)) for case in family.gpu_cases(quick)]  # type: ignore[misc]


def contraction_jobs(kind: str, setting: Setting, quick: bool) -> list[Job]:
    runner = contraction_run.Runner(kind, setting, quick)
    runner.start()
    return [
        Job(row.label, (row.op,), lambda row=row: iter([runner.measure(row)]))  # type: ignore[misc]
        for row in contraction_run.rows(kind)
    ]


def portable_jobs(setting: Setting, quick: bool) -> list[Job]:
    from bench import portable

    plan = Plan(rounds=3, per_round=2, warmups=1, seconds=10.0) if quick else Plan(rounds=9, per_round=2, warmups=1, seconds=40.0)
    clock = HostClock()
    jobs = [
        Job(case.label, (case.op,), lambda case=case: iter([measure(case, clock, plan, setting)]))  # type: ignore[misc]
        for case in portable.cases(quick)
    ]
    return [*jobs, Job("compile", tuple(portable.COMPILE_BARS), lambda: portable.compile_records(setting))]


def check_jobs(setting: Setting, quick: bool) -> list[Job]:
    from bench import index_checks

    plan = Plan(rounds=5, per_round=3, warmups=1, seconds=3.0) if quick else Plan(rounds=15, per_round=3, warmups=2, seconds=10.0)
    clock = HostClock()
    return [
        Job(case.label, (case.op,), lambda case=case: iter([measure(case, clock, plan, setting)]))  # type: ignore[misc]
        for case in index_checks.cases(quick)
    ]


def onnx_jobs(setting: Setting, quick: bool) -> list[Job]:
    from bench import onnx_cpu

    plan = Plan(rounds=5, per_round=3, warmups=1, seconds=5.0) if quick else Plan(rounds=15, per_round=3, warmups=2, seconds=20.0)
    clock = HostClock()
    return [
        Job(case.label, (case.op,), lambda case=case: iter([measure(case, clock, plan, setting)]))  # type: ignore[misc]
        for case in onnx_cpu.cases(quick)
    ]


def random_jobs(kind: str, setting: Setting, quick: bool) -> list[Job]:
    from bench import random_fill

    if kind == "random-cpu":
        plan = Plan(rounds=5, per_round=2, warmups=1, seconds=3.0) if quick else Plan(rounds=15, per_round=3, warmups=1, seconds=20.0)
        clock = HostClock()
        return [
            Job(case.label, (case.op,), lambda case=case: iter([measure(case, clock, plan, setting)]))  # type: ignore[misc]
            for case in random_fill.cpu_cases(quick)
        ]
    from bench import gpu

    session = gpu.Session.open(setting, quick)

    def run(case: Case) -> Iterator[Record]:
        yield measure(case, session.machine.clock, session.plan, setting, session.copy_rate("f32"))
        session.release()

    return [Job(case.label, (case.op,), lambda case=case: run(case)) for case in random_fill.gpu_cases(quick)]  # type: ignore[misc]


def ordered_jobs(kind: str, setting: Setting, quick: bool) -> list[Job]:
    from bench import ordered

    if kind == "ordered-cpu":
        plan = Plan(rounds=5, per_round=2, warmups=1, seconds=3.0) if quick else Plan(rounds=15, per_round=2, warmups=1, seconds=20.0)
        host = HostClock()
        return [
            Job(case.label, (case.op,), lambda case=case: iter([measure(case, host, plan, setting)]))  # type: ignore[misc]
            for case in ordered.cpu_cases(quick)
        ]
    from bench import gpu

    session = gpu.Session.open(setting, quick)
    plan = replace(session.plan, per_round=2, rounds=min(session.plan.rounds, 5))

    def run(case: Case, clock: Clock, used: Plan, limit: float | None = None) -> Iterator[Record]:
        record = measure(case, clock, used, setting)
        record.bar_ms = limit
        yield record
        session.release()

    jobs: list[Job] = []
    for case in ordered.gpu_cases(quick, compiled=True):
        is_append = case.op == "append"
        used, limit = (session.plan, ordered.APPEND_MS) if is_append else (plan, None)
        jobs.append(Job(case.label, (case.op,), lambda case=case, used=used, limit=limit: run(case, session.machine.clock, used, limit)))  # type: ignore[misc]
    numbers = ordered.gpu_numbers()
    return [*jobs, Job(numbers.label, (numbers.op,), lambda: run(numbers, session.machine.host_clock, session.plan))]


def gemv_jobs(setting: Setting, quick: bool) -> list[Job]:
    from bench import quantised

    return [Job(row.label, (row.op,), lambda row=row: quantised.records(setting, row)) for row in quantised.rows(quick)]  # type: ignore[misc]


def model_jobs(kind: str, setting: Setting, quick: bool) -> list[Job]:
    from bench import models

    session = models.ModelSession(setting, quick, "cpu" if kind == "models-cpu" else "cuda")
    return [Job(row, (row,), lambda row=row: session.records(row)) for row in models.ROWS]  # type: ignore[misc]


def host_jobs(setting: Setting) -> list[Job]:
    from bench import host_times

    return [Job(name, (name,), lambda name=name: iter([host_times.record(name, setting)])) for name in host_times.ROWS]  # type: ignore[misc]


def compile_jobs(setting: Setting, quick: bool) -> list[Job]:
    from bench import compile_times

    rounds = 1 if quick else 5
    return [Job(row, (row,), lambda row=row: iter([compile_times.record(row, setting, rounds)])) for row in compile_times.ROWS]  # type: ignore[misc]


def zyn_jobs(kind: str, setting: Setting, quick: bool) -> list[Job]:
    from bench import zyn

    place = zyn.Place(setting, quick, kind == "zyn")
    return [Job(name, (name,), lambda row=row: iter([row()])) for name, row in zyn.rows(place)]  # type: ignore[misc]


def family_jobs(kind: str, setting: Setting, quick: bool, seed: int, draws: int) -> list[Job]:
    from bench.families.run import works

    return [Job(label, (family,), run) for label, family, run in works(kind, setting, quick, seed, draws)]


def gpu_name() -> str:
    import torch

    return str(torch.cuda.get_device_name(0))


def main(
    kind: str, json: bool = False, ops: list[str] | None = None, quick: bool = False, save: bool = False, only: str = "", seed: int = 1, draws: int = 3
) -> int:
    """Run the benchmarks of a kind of device; `ops` names those to run (all when None), `only` is a pattern of their labels.
    `seed` and `draws` (of each family) are for the kinds that draw their problems."""
    if kind not in KINDS:
        print(f"error: no benchmarks for '{kind}'\nhelp: choose {' or '.join(KINDS)}", file=sys.stderr)
        return 2
    try:
        (contraction_run.require if kind in contraction_run.KINDS else require)(kind)
    except PeerMissing as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 2
    if kind in ("matmul-cpu", "transformer-cpu"):
        # OpenBLAS's threads otherwise go on spinning for a tenth of a second and more, on cores that the next library wants. NumPy's own times
        # do not suffer. The rows run in a process of their own, which reads this when it starts.
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
    device = cpu_name() if kind.endswith("cpu") or kind in ("host", "compile", "portable", "opencl") else gpu_name()
    setting = Setting(device, commit(), datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

    def wanted(op: str) -> bool:
        return not ops or op in ops

    try:
        if kind in contraction_run.KINDS:
            jobs = contraction_jobs(kind, setting, quick)
        elif kind in ("zyn", "zyn-cpu"):
            jobs = zyn_jobs(kind, setting, quick)
        elif kind in ("runtime", "simt"):
            jobs = (runtime_jobs if kind == "runtime" else simt_jobs)(setting, quick)
        elif kind.startswith(("primitives", "scans")):
            jobs = primitive_jobs(kind, setting, quick)
        elif kind.startswith(("scatter", "decode", "mega")):
            jobs = scatter_jobs(kind, setting, quick)
        elif kind == "quantised-cpu":
            jobs = quantised_jobs(setting, quick)
        elif kind == "portable":
            jobs = portable_jobs(setting, quick)
        elif kind == "checks-cpu":
            jobs = check_jobs(setting, quick)
        elif kind == "onnx-cpu":
            jobs = onnx_jobs(setting, quick)
        elif kind.startswith("random"):
            jobs = random_jobs(kind, setting, quick)
        elif kind.startswith("ordered"):
            jobs = ordered_jobs(kind, setting, quick)
        elif kind == "opencl":
            jobs = opencl_jobs(setting, quick)
        elif kind == "gemv":
            jobs = gemv_jobs(setting, quick)
        elif kind.startswith("families"):
            jobs = family_jobs(kind, setting, quick, seed, draws)
        elif kind.startswith("models"):
            jobs = model_jobs(kind, setting, quick)
        elif kind == "host":
            jobs = host_jobs(setting)
        elif kind == "compile":
            jobs = compile_jobs(setting, quick)
        else:
            jobs = (cpu_jobs if kind == "cpu" else gpu_jobs)(setting, quick, wanted)
    except TilewrightError as error:
        print(error, file=sys.stderr)
        return 2
    known = [op for job in jobs for op in job.ops]
    unknown = [op for op in ops or [] if op not in known]
    if unknown:
        names = ", ".join(dict.fromkeys(known))
        print(f"error: no benchmark '{unknown[0]}' for {kind}\nhelp: choose from {names}", file=sys.stderr)
        return 2
    chosen = [job for job in jobs if any(wanted(op) for op in job.ops) and re.search(only, job.label)]
    table = contraction_run.table if kind in contraction_run.KINDS else _table
    records = list(_print_json(chosen) if json else _show(chosen, f"{kind}: {device}", table))
    if kind.startswith("families") and not json:
        from bench.families.run import summary

        print(summary(records))
    if save:
        keep(records, f"{kind}-seed-{seed}" if kind.startswith("families") else kind, setting)
    return 1 if any(record.error for record in records) else 0


def _print_json(jobs: list[Job]) -> Iterator[Record]:
    for job in jobs:
        for record in job.run():
            print(record.line(), flush=True)
            yield record


def _show(jobs: list[Job], title: str, table: Callable[[object, str, list[Record]], None]) -> Iterator[Record]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    records: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=job.label)
            for record in job.run():
                records.append(record)
                yield record
            progress.advance(task)
    table(console, title, records)


def _table(console: object, title: str, records: list[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    with_copy = any(r.of_copy is not None for r in records)
    headings = ["op", "shape", "dtype", "ours", "best", "GB/s", *(["of copy"] if with_copy else []), "best peer", "its time", "ratio", "bar"]
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in (0, 1, 2) or heading == "best peer" else "right")
    for r in records:
        cells = [
            r.op, "x".join(map(str, r.shape)), r.dtype, _time(r.ours_ms), _time(r.ours_min_ms),
            f"{r.GBps:.0f}" if r.GBps else "",
            *([f"{r.of_copy:.1%}" if r.of_copy else ""] if with_copy else []),
            r.peer or "", _time(r.peer_ms), f"{r.ratio:.2f}" if r.ratio else "", _bar(r),
        ]  # fmt: skip
        table.add_row(*cells, style="red" if r.error else None)
    console.print(table)
    for r in records:
        if r.error:
            console.print(f"{r.op} {r.dtype}: {r.error}", markup=False, highlight=False, style="red")
    loads = [r.load for r in records if r.load is not None]
    if loads and max(loads) > 0.1:
        console.print(f"note: other processes kept up to {max(loads):.1f} cores busy: repeat on a quiet machine", highlight=False)
    for note in dict.fromkeys(note for r in records for note in r.notes):
        console.print(f"note: {note}", highlight=False, markup=False)


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    for unit, factor in (("ms", 1.0), ("us", 1e3), ("ns", 1e6)):
        if milliseconds * factor >= 0.1:
            return f"{milliseconds * factor:.3g} {unit}"
    return f"{milliseconds * 1e6:.3g} ns"


def _bar(record: Record) -> str:
    if record.met is None:
        return ""
    mark = "[green]met[/green]" if record.met else "[yellow]missed[/yellow]"
    if record.bar_ms is not None:
        return f"{mark} <= {_time(record.bar_ms)}"
    against = f" (is {record.bar_ratio:.2f})" if record.bar_ratio is not None else ""
    return f"{mark} >= {record.bar:.2f}{against}"


def keep(records: list[Record], kind: str, setting: Setting) -> None:
    """Write the result file, and its plot where there is Matplotlib."""
    from bench.plot import plot

    RESULTS.mkdir(exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", f"{kind} {setting.device}".lower()).strip("-")
    file = RESULTS / f"{slug}-{setting.date[:10]}.jsonl"
    file.write_text("".join(record.line() + "\n" for record in records))
    try:
        picture = str(plot(records, file.with_suffix(".png")))
    except ModuleNotFoundError as error:
        picture = f"none, {error.name} is not installed"
    print(f"results: {file}\nplot: {picture}", file=sys.stderr)


def _command_line() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Tilewright and its peers, side by side.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--op", action="append", metavar="NAME", help="only this one (may be repeated)")
    parser.add_argument("--only", default="", metavar="REGEX", help="only those whose 'op shape dtype' has this in it")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, without torch.compile")
    parser.add_argument("--save", action="store_true", help="keep the results and a plot in bench/results")
    parser.add_argument("--seed", type=int, default=1, help="of families: what is drawn")
    parser.add_argument("--draws", type=int, default=3, help="of families: problems of each")
    parser.add_argument("--ranges", action="store_true", help="of families: print what is drawn from where, and end")
    chosen = parser.parse_args()
    if chosen.ranges:
        if not chosen.kind.startswith("families"):
            parser.error("--ranges is for families and families-cpu")
        from bench.families.run import ranges

        print(ranges("cpu" if chosen.kind.endswith("cpu") else "gpu"))
        return 0
    if not chosen.kind.startswith("families") and (chosen.seed, chosen.draws) != (1, 3):
        parser.error("--seed and --draws are for families and families-cpu")
    return main(chosen.kind, chosen.json, chosen.op, chosen.quick, chosen.save, chosen.only, chosen.seed, chosen.draws)


if __name__ == "__main__":
    sys.exit(_command_line())
