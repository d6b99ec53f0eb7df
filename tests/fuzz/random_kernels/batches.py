"""Many seeds in child processes: one that crashes or hangs costs its own kernel and no other.

A child is given seeds in order and writes a line of JSON before and after each. The parent reads on; where a child ends early or
says nothing for `HANG` seconds of its processor time, the seed it had begun is the one that failed, and the next child goes on after it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from .cards import prepare_child
from .draw import draw
from .trial import STAGES, Outcome, trial

HANG = 20.0
START = 60.0
"""Seconds in which a child must have begun."""
EMULATED = 5
"""Every fifth kernel also runs in the emulator, at every stage."""
ROOT = Path(__file__).parents[3]


def devices_of(seed: int, only: Sequence[str] = ()) -> tuple[str, ...]:
    return tuple(only) or (("cpu", *STAGES) if seed % EMULATED == 0 or seed % 50 == 9 else ("cpu",))


def child(seeds: Iterable[int], only: Sequence[str]) -> None:
    """Run seeds; a line before and after each."""
    prepare_child()
    for seed in seeds:
        print(json.dumps({"begin": seed}), flush=True)
        try:
            outcome = trial(draw(seed), devices_of(seed, only))
        except Exception as error:  # of the generator or the reference, not of Tilewright
            outcome = Outcome("failed", "", "generator", f"{type(error).__name__}: {error}")
        print(json.dumps({"end": seed, **asdict(outcome)}), flush=True)
        if outcome.what.startswith("DeviceError"):
            return  # what comes after would fail with it


def child_environment() -> dict[str, str]:
    """No cache on disk, no warnings; the package and the tests are found."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "TILEWRIGHT_CACHE": "0", "TILEWRIGHT_WARN": "off", "PYTHONPATH": paths}


class Child:
    def __init__(self, seeds: Sequence[int], only: Sequence[str], more: Mapping[str, str]) -> None:
        environment = {**child_environment(), **more}
        command = [sys.executable, "-m", "tests.fuzz.random_kernels", "child", "--devices", ",".join(only)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, seeds)).encode() + b"\n")
        self.process.stdin.close()
        self.out = self.process.stdout
        os.set_blocking(self.out.fileno(), False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.out, selectors.EVENT_READ)
        self.rest = b""

    def lines(self, wait: float) -> list[dict[str, object]] | str:
        """What it says next; `hang` where that is nothing within `wait` seconds, `crash` where it has ended."""
        begun, used = time.monotonic(), self.seconds()
        while True:
            if not self.selector.select(wait):
                # A machine with much else to do is no hang: processor time counts, unless the child waits for ever.
                if self.seconds() - used >= wait or time.monotonic() - begun >= 10 * wait:
                    return "hang"
                continue
            data = self.out.read()
            if not data:
                return "crash"
            *whole, self.rest = (self.rest + data).split(b"\n")
            found = [json.loads(line) for line in whole if line.startswith(b"{")]
            if found:
                return found

    def seconds(self) -> float:
        """Processor time so far; wall time where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.kill()
        self.selector.close()
        self.out.close()
        return self.process.wait()


def run(
    seeds: Sequence[int], only: Sequence[str] = (), batch: int = 400, until: float = float("inf"), more: Mapping[str, str] | None = None
) -> Iterator[tuple[int, Outcome]]:
    """The outcome of every seed, in order; it ends early at `until` (a time of the monotonic clock). `more` is for the children's environment."""
    left = seeds
    while left and time.monotonic() < until:
        running = Child(left[:batch], only, more or {})
        begun: int | None = None
        ended: int | None = None
        done = 0
        try:
            while done < min(batch, len(left)) and time.monotonic() < until:
                lines = running.lines(HANG if begun is not None else START)
                if isinstance(lines, str):
                    code = running.process.wait() if lines == "crash" else running.stop()
                    if begun is not None and begun == ended:
                        break  # it gave up by itself
                    if begun is None:
                        raise RuntimeError(f"a child that runs kernels did not begin ({lines}, status {code})")
                    detail = f"ended with {signal.Signals(-code).name if code < 0 else code}" if lines == "crash" else f"nothing for {HANG:.0f} s"
                    yield begun, Outcome("failed", devices_of(begun, only)[0], lines, detail)
                    done += 1
                    break
                for line in lines:
                    if "begin" in line:
                        begun = int(str(line["begin"]))
                    else:
                        seed = ended = int(str(line.pop("end")))
                        yield seed, Outcome(**{k: str(v) for k, v in line.items()})
                        done += 1
        finally:
            running.stop()
        left = left[done:]


def fails_alike(seed_file: str, wanted: Outcome) -> Callable[[], bool]:
    """For kernels that end the process: whether the case in a file still does."""

    def check() -> bool:
        command = [sys.executable, "-m", "tests.fuzz.random_kernels", "case", seed_file, "--devices", wanted.device or "cpu"]
        try:
            done = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, timeout=HANG + 10)
        except subprocess.TimeoutExpired:
            return wanted.what == "hang"
        return wanted.what == "crash" and done.returncode < 0

    return check
