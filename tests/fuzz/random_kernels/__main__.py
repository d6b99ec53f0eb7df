"""Random kernels from the command line.

    python -m tests.fuzz.random_kernels run [--seconds 600] [--first N] [--count N] [--devices cpu,loop,tile,thread]
    python -m tests.fuzz.random_kernels show SEED
    python -m tests.fuzz.random_kernels case FILE
    python -m tests.fuzz.random_kernels build DIR --count N     cubins for a GPU elsewhere
    python -m tests.fuzz.random_kernels replay DIR              on the GPU

`run` goes on after the last seed of the run before (`build/fuzz/state.json`), shrinks what fails and writes it to
`build/fuzz/failures`; move a case to `tests/data/fuzz` to keep it as a test.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from . import cards
from .batches import ROOT, child, devices_of, fails_alike, run
from .draw import draw
from .model import nests
from .shrink import read_case, shrink, write_case
from .source import kernel_text, signature
from .trial import Outcome, trial

STATE = ROOT / "build" / "fuzz"
SHOWN = ("several nests", "hostile", "gather or scatter", "aliasing out", "explicit", "triangular", "stepped", "while", "reduction", "empty", "numbers as sizes", "ordered", "array in place", "running")


class Tally:
    """Outcomes, and the distribution of what was drawn."""

    def __init__(self, data: dict[str, object] | None = None) -> None:
        data = data or {}
        self.outcomes: Counter[str] = Counter(data.get("outcomes", {}))  # type: ignore[arg-type]
        self.features: Counter[str] = Counter(data.get("features", {}))  # type: ignore[arg-type]
        self.stages: Counter[str] = Counter(data.get("stages", {}))  # type: ignore[arg-type]

    def add(self, seed: int, outcome: Outcome, only: tuple[str, ...]) -> None:
        kernel = draw(seed)
        self.outcomes[outcome.label] += 1
        tags = set(kernel.tags) | ({"several nests"} if nests(kernel) > 1 else set()) | ({"gather or scatter"} if kernel.tags & {"gather", "scatter"} else set())
        tags |= {"numbers as sizes"} if kernel.given else set()
        self.features.update(tags | {f"nests {nests(kernel)}"})
        if outcome.kind == "ok":
            self.stages.update(d for d in devices_of(seed, only) if d == "cpu" or d == "thread" or not kernel.explicit)

    @property
    def total(self) -> int:
        return sum(self.outcomes.values())

    def report(self) -> str:
        total = max(1, self.total)
        lines = [f"{self.total} kernels: " + ", ".join(f"{n} {k}" for k, n in self.outcomes.most_common())]
        lines.append("agreed on: " + ", ".join(f"{k} {n}" for k, n in self.stages.most_common()))
        lines.append("share: " + ", ".join(f"{k} {100 * self.features[k] / total:.0f} %" for k in SHOWN))
        for word in ("dtype", "rank", "nests"):
            found = sorted((k, n) for k, n in self.features.items() if k.startswith(word + " "))
            lines.append(f"{word}: " + ", ".join(f"{k.split()[1]} {100 * n / total:.0f} %" for k, n in found))
        return "\n".join(lines)


def run_seeds(options: argparse.Namespace) -> int:
    only = tuple(d for d in options.devices.split(",") if d)
    path = STATE / "state.json"
    state = json.loads(path.read_text()) if path.exists() and options.first is None else {}
    first = options.first if options.first is not None else int(state.get("next", 0))
    tally = Tally(state)
    here = Tally()
    start = time.monotonic()
    end = start + options.seconds
    failures = 0
    print(f"seeds from {first} on", flush=True)
    for seed, outcome in run(range(first, first + options.count), only, until=end):
        tally.add(seed, outcome, only)
        here.add(seed, outcome, only)
        if outcome.kind == "failed":
            failures += 1
            report(seed, outcome, options.shrink)
        if options.first is None:
            STATE.mkdir(parents=True, exist_ok=True)
            state = {"next": seed + 1, "outcomes": tally.outcomes, "features": tally.features, "stages": tally.stages}
            path.write_text(json.dumps(state))
        if here.total % 100 == 0:
            print(f"{here.total} kernels, seed {seed}, {here.total / (time.monotonic() - start):.1f} a second, {failures} failures", flush=True)
    print(here.report())
    if options.first is None and tally.total != here.total:
        print(f"all runs together, up to seed {state['next'] - 1}:\n{tally.report()}")
    print(f"{here.total / max(1e-9, time.monotonic() - start):.2f} kernels a second")
    return min(1, failures)


def report(seed: int, outcome: Outcome, seconds: float) -> None:
    """Print a failure, shrink it and write the case."""
    kernel = draw(seed)
    print(f"seed {seed} on {outcome.device}: {outcome.what}: {outcome.detail[:400]}", flush=True)
    where = STATE / "failures" / f"seed_{seed}.json"
    devices = outcome.device or "cpu"
    write_case(kernel, where, devices, outcome.what)
    if seconds:
        kernel = shrink(kernel, question(outcome, where.with_suffix(".trial")), seconds)
        write_case(kernel, where, devices, outcome.what)
    print(f"{where}\n{signature(kernel)}\n{kernel_text(kernel)}", flush=True)


def question(outcome: Outcome, scratch: Path):  # type: ignore[no-untyped-def]
    """Whether a kernel fails in the same class."""
    if outcome.what in ("crash", "hang"):

        def in_child(kernel) -> bool:  # type: ignore[no-untyped-def]
            write_case(kernel, scratch, outcome.device or "cpu", outcome.what)
            return fails_alike(str(scratch), outcome)()

        return in_child

    def here(kernel) -> bool:  # type: ignore[no-untyped-def]
        try:
            found = trial(kernel, (outcome.device or "cpu",))
        except Exception:
            return False
        return found.kind == "failed" and found.what == outcome.what

    return here


def build(options: argparse.Namespace) -> int:
    """Cubins in a folder. The cache of artifacts is chosen when Tilewright is loaded, hence the second start."""
    wanted = cards.environment(options.folder.resolve()) | {"TILEWRIGHT_WARN": "off"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", "tests.fuzz.random_kernels", *sys.argv[1:]], {**os.environ, **wanted})
    found: Counter[str] = Counter()
    for seed, status in cards.build(options.folder, range(options.first, options.first + options.count), options.target):
        found[status] += 1
        if found.total() % 100 == 0:
            print(f"seed {seed}: {dict(found)}", flush=True)
    print(dict(found))
    return int(any(status.startswith("failed") for status in found))


def replay(options: argparse.Namespace) -> int:
    """Kernels of a folder on a GPU."""
    folder = options.folder.resolve()
    found: Counter[str] = Counter()
    start = time.monotonic()
    for seed, outcome in run(cards.built_seeds(folder), (options.device,), until=start + options.seconds, more=cards.environment(folder)):
        found[outcome.label] += 1
        if outcome.kind == "failed":
            kernel = draw(seed)
            print(f"seed {seed} on {outcome.device}: {outcome.what}: {outcome.detail[:400]}\n{signature(kernel)}\n{kernel_text(kernel)}", flush=True)
    print(f"{dict(found)}, {found.total() / max(1e-9, time.monotonic() - start):.1f} a second")
    return int(any(label.startswith("failed") for label in found))


def main() -> int:
    parser = argparse.ArgumentParser(prog="random_kernels", description="random kernels against an independent reference")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--seconds", type=float, default=600.0)
    runs.add_argument("--first", type=int, default=None, help="a seed to begin with, without the state of earlier runs")
    runs.add_argument("--count", type=int, default=10**9)
    runs.add_argument("--devices", default="", help="instead of the CPU for all and the emulator for every fifth")
    runs.add_argument("--shrink", type=float, default=45.0, help="seconds for each failure; 0 does not shrink")
    shown = commands.add_parser("show")
    shown.add_argument("seed", type=int)
    case = commands.add_parser("case")
    case.add_argument("file", type=Path)
    case.add_argument("--devices", default="")
    children = commands.add_parser("child")
    children.add_argument("--devices", default="")
    builds = commands.add_parser("build")
    builds.add_argument("folder", type=Path)
    builds.add_argument("--first", type=int, default=0)
    builds.add_argument("--count", type=int, default=2000)
    builds.add_argument("--target", default="sm_90a")
    replays = commands.add_parser("replay")
    replays.add_argument("folder", type=Path)
    replays.add_argument("--device", default="cuda")
    replays.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    if options.command == "run":
        return run_seeds(options)
    if options.command == "show":
        kernel = draw(options.seed)
        print(signature(kernel), kernel_text(kernel), sorted(kernel.tags), sep="\n")
        return 0
    if options.command == "case":
        kernel, devices = read_case(options.file)
        outcome = trial(kernel, tuple(d for d in options.devices.split(",") if d) or devices)
        print(outcome)
        return int(outcome.kind == "failed")
    if options.command == "build":
        return build(options)
    if options.command == "replay":
        return replay(options)
    child(map(int, sys.stdin.readline().split()), tuple(d for d in options.devices.split(",") if d))
    return 0


if __name__ == "__main__":
    sys.exit(main())
