"""What NVIDIA's assembler says of PTX: registers, spills and static shared memory of each kernel.

In: PTX and the target's name; out: `Assembled` by entry, or None where there is no `ptxas` (it comes with CUDA, or with the Python package
`nvidia-cuda-nvcc`). Nothing else of Tilewright needs it: the driver assembles what runs.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tilewright.base.errors import CompilerBug
from tilewright.base.record import record

INSTALL = "pip install nvidia-cuda-nvcc"
"""How to get it."""


@record
class Assembled:
    """One kernel."""

    registers: int
    spill_bytes: int
    """Stored to and loaded from local memory for want of registers."""
    stack_bytes: int
    shared_bytes: int
    """Static shared memory."""


@functools.cache
def ptxas_path() -> str | None:
    """The assembler: on the path, or in the wheel `nvidia-cuda-nvcc`."""
    found = shutil.which("ptxas")
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).glob("**/bin/ptxas")):
            return str(path)
    return None


def assemble(ptx: str, arch: str) -> dict[str, Assembled] | None:
    """What each entry takes; None where there is no assembler. PTX it refuses is our mistake."""
    done = _run(ptx, arch)
    return None if done is None else parse_log(done[0])


def cubin(ptx: str, arch: str) -> bytes | None:
    """The code for one architecture; None where there is no assembler."""
    done = _run(ptx, arch)
    return None if done is None else done[1]


def _run(ptx: str, arch: str) -> tuple[str, bytes] | None:
    """What the assembler said, and what it made."""
    path = ptxas_path()
    if path is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx.rstrip("\0"), encoding="utf-8")
        command = [path, f"-arch={arch}", "-v", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompilerBug.at("TW040", f"ptxas refuses the PTX for {arch}: {done.stderr.strip()[:2000]}")
        return done.stderr + done.stdout, made.read_bytes()


def parse_log(log: str) -> dict[str, Assembled]:
    """The entries of what `ptxas -v` printed."""
    found: dict[str, Assembled] = {}
    for part in re.split(r"(?=Compiling entry function ')", log)[1:]:
        name = re.match(r"Compiling entry function '([^']+)'", part)
        assert name is not None
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        stack, stores, loads = (int(n) for n in frame.groups()) if frame else (0, 0, 0)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found[name[1]] = Assembled(int(registers[1]) if registers else 0, stores + loads, stack, int(shared[1]) if shared else 0)
    return found
