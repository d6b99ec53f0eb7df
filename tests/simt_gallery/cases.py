"""What a case of the gallery is: a kernel with a bug, its corrected twin, how both are launched, and what the emulator must say.

In the source of a bad kernel the comment `# fault` marks the line the error points at, any other one-word comment a line that its
text names; in `message` such a place is written as `<word>`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np

import tilewright as tw

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Case:
    name: str
    bad: tw.GpuKernel[...]
    good: tw.GpuKernel[...]
    grid: object
    block: object
    arrays: Callable[[], Arrays]
    message: str
    result: Callable[[Arrays], np.ndarray] | None = None
    """What the last array holds after the good kernel, from the arrays before it."""
    shared: int = 0
    numbers: tuple[float, ...] = ()
    """Arguments after the arrays."""
    only_gpu: bool = False
    """Whether a CPU has nothing of the kind."""
    tool: str = ""
    """The tool of compute-sanitizer that sees the bug on a GPU: memcheck or racecheck; empty where none does."""


@dataclass
class Gallery:
    """The cases of one module."""

    cases: list[Case] = field(default_factory=list)

    def add(self, name: str, bad: tw.GpuKernel[...], good: tw.GpuKernel[...], grid: object, block: object, arrays: Callable[[], Arrays],
            message: str, **more: object) -> None:  # fmt: skip
        self.cases.append(Case(name, bad, good, grid, block, arrays, message, **more))  # type: ignore[arg-type]


def marks(kernel: tw.GpuKernel[...]) -> dict[int, str]:
    """The marked lines of a kernel's file."""
    lines, first = inspect.getsourcelines(kernel.python)
    found = ((first + n, re.search(r"#\s*(\w+)\s*$", line)) for n, line in enumerate(lines))
    return {line: match[1] for line, match in found if match}


def marked(kernel: tw.GpuKernel[...], text: str) -> tuple[str, str]:
    """The mark of the line an error points at, and its message with the marks of the places in it."""
    path, known = re.escape(inspect.getsourcefile(kernel.python) or ""), marks(kernel)
    named = re.sub(rf"{path}:(\d+):\d+", lambda m: f"<{known.get(int(m[1]), m[1])}>", text.splitlines()[0])
    head, _, message = named.partition(": error[TW050]: ")
    return head, message


@contextmanager
def as_written() -> Iterator[None]:
    """Kernels are compiled though their text shows a fault, for the emulator to find it too."""
    with patch("tilewright.analysis.thread_faults.check_threads", lambda kernel: None):
        yield


def launch(case: Case, kernel: tw.GpuKernel[...], arrays: Arrays, device: str | None, check: bool = False) -> None:
    with as_written() if kernel is case.bad else nullcontext():
        kernel[case.grid, case.block, case.shared](*arrays, *case.numbers, device=device, check=check)


def floats(*sizes: int) -> Callable[[], Arrays]:
    """Arrays of different f32 numbers, none of them 0."""
    return lambda: [np.arange(1, n + 1, dtype=np.float32) + 1000 * k for k, n in enumerate(sizes)]


def integers(*sizes: int) -> Callable[[], Arrays]:
    """The same of i32, the last all 0."""
    return lambda: [np.arange(1, n + 1, dtype=np.int32) if k + 1 < len(sizes) else np.zeros(n, np.int32) for k, n in enumerate(sizes)]
