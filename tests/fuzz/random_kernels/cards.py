"""Random kernels on a GPU that is elsewhere: cubins built here, run there, many in one process.

`build` compiles seeds for a target and leaves in a folder

    cache/         Tilewright's own cache of artifacts, which the other machine uses
    cubins/        what ptxas makes of their PTX, by its hash
    seeds.jsonl    a line for each seed: built, or refused and why

`replay` runs those that were built. The driver gets the cubin in place of the PTX, so that nothing is compiled on the machine with
the GPU. A kernel that ends the context costs its own process, and the next one goes on after it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tilewright as tw
from tilewright.codegen.nvptx.ptxas import cubin
from tilewright.runtime.cuda.driver import Driver

from .arithmetic import KINDS, Undecided
from .draw import draw
from .model import Kernel
from .reference import TooLong
from .trial import arguments, compiled, expected

FOLDER = "TILEWRIGHT_FUZZ_CUBINS"
"""Names the folder to a child that runs kernels of one."""


def ptx_hash(code: bytes) -> str:
    return hashlib.sha256(code.rstrip(b"\0")).hexdigest()


def artifact(kernel: Kernel, target: str) -> Any:
    """What a call of the kernel on a GPU compiles."""
    numbers = [KINDS[n.dtype].numpy(n.value) if n.dtype != "bool" else bool(n.value) for n in kernel.numbers]
    numbers += [kernel.extents[dim] for dim in kernel.given]
    values = [*arguments(kernel).arrays.values(), *numbers]
    function = compiled(kernel)
    return (function[kernel.grid, kernel.block] if kernel.explicit else function).compile(*values, target=target)


def build(folder: Path, seeds: range, target: str = "sm_90a") -> Iterator[tuple[int, str]]:
    """Compile and assemble; a word on each seed."""
    (folder / "cubins").mkdir(parents=True, exist_ok=True)
    with (folder / "seeds.jsonl").open("a", encoding="utf-8") as log:
        for seed in seeds:
            kernel = draw(seed)
            line: dict[str, object] = {"seed": seed}
            try:
                expected(kernel)
                made = artifact(kernel, target)
                name = ptx_hash(made.code)
                code = cubin(made.code.decode(), target)
                if code is None:
                    raise RuntimeError("ptxas is not installed")
                (folder / "cubins" / f"{name}.cubin").write_bytes(code)
                line |= {"status": "built", "ptx": name}
            except (Undecided, TooLong):
                line["status"] = "undecided"
            except (tw.UserError, tw.TargetLimit) as refusal:
                line |= {"status": f"refused {refusal.code}"}
            except tw.TilewrightError as bug:
                line |= {"status": f"failed {bug.code}", "detail": str(bug)}
            log.write(json.dumps(line) + "\n")
            yield seed, str(line["status"])


def built_seeds(folder: Path) -> list[int]:
    lines = (folder / "seeds.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted({int(d["seed"]) for d in map(json.loads, lines) if d["status"] == "built"})


def load_cubins(folder: Path) -> None:
    """From now on the driver is given cubins of the folder in place of PTX they were made of."""
    plain = Driver.attempt

    @functools.wraps(plain)
    def attempt(self: Driver, api: str, *values: Any) -> Any:
        if api == "cuModuleLoadDataEx":
            path = folder / "cubins" / f"{ptx_hash(values[0])}.cubin"
            if path.exists():
                values = (path.read_bytes(), *values[1:])
        return plain(self, api, *values)

    Driver.attempt = attempt  # type: ignore[method-assign]


def environment(folder: Path) -> dict[str, str]:
    """What a child that runs the folder's kernels is started with."""
    return {FOLDER: str(folder), "TILEWRIGHT_CACHE": "1", "TILEWRIGHT_CACHE_DIR": str(folder / "cache")}


def prepare_child() -> None:
    """In a child: take cubins from the folder it was told of."""
    folder = os.environ.get(FOLDER)
    if folder:
        load_cubins(Path(folder))
