"""What ptxas said of PTX, kept by hash: `tests/data/assembled.json`.

In: PTX, an architecture, a level of optimisation. Out: what ptxas says of it (spills, stack, registers, warnings), from the
table where the same text stands in it, and from ptxas otherwise. A module that fails to assemble never enters the table.

The key is a hash of the text without what depends on where a file lies: comments, `.file`, `.loc`, debug sections and the labels
that only these use. `pytest --record-assembled` writes what is new; `TILEWRIGHT_ASSEMBLE=all` asks ptxas about everything.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tilewright.codegen.nvptx.ptxas import ptxas_path

TABLE = Path(__file__).parent / "data" / "assembled.json"
SIDE_BY_SIDE = 2

_COMMENT = re.compile(r"//[^\n]*")
_DEBUG_SECTION = re.compile(r"^\s*\.section\s+\.debug_\w+\s*\{[^}]*\}", re.MULTILINE)
_DEBUG_LINE = re.compile(r"^\s*(\.loc\b|\.file\b|\$L__(tmp|func_begin|func_end)\d+:$)")
_USUAL = re.compile(r"bytes gmem|Compiling entry function|Function properties|bytes stack frame|Used \d+ registers|Compile time|^\s*$")


@dataclass(frozen=True)
class Assembled:
    """What ptxas says of one module."""

    log: str
    """Its words; from the table, the unusual ones only."""
    spills: int
    """Bytes spilled to local memory, stores and loads together."""
    local: int
    """Bytes of stack frames."""
    registers: tuple[int, ...] = field(default=())


# -- the table ------------------------------------------------------------------------------------------------------


def normalised(ptx: str) -> str:
    """The text without comments, source positions and blank space at line ends."""
    text = _DEBUG_SECTION.sub("", _COMMENT.sub("", ptx))
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not _DEBUG_LINE.match(line))


def key_of(ptx: str, arch: str, level: int) -> str:
    return hashlib.sha256(f"{arch} -O{level}\n{normalised(ptx)}".encode()).hexdigest()[:24]


Entry = list[object]
"""Spills, stack, registers, and ptxas's unusual words if there are any."""


def entry_of(done: Assembled) -> Entry:
    unusual = [line for line in done.log.splitlines() if not _USUAL.search(line)]
    return [done.spills, done.local, list(done.registers), *(["\n".join(unusual)] if unusual else [])]


def from_entry(entry: Sequence[object]) -> Assembled:
    spills, local, registers, *words = entry
    assert isinstance(spills, int) and isinstance(local, int) and isinstance(registers, list)
    recorded = f"recorded: {spills} bytes of spills, {local} bytes of stack, registers {registers}"
    return Assembled("\n".join([recorded, *map(str, words)]), spills, local, tuple(registers))


@functools.cache
def _table() -> Mapping[str, Entry]:
    return json.loads(TABLE.read_text())["modules"] if TABLE.exists() else {}


@dataclass
class Session:
    """What one test process asked for: keys the table had, and what ptxas said of the others."""

    used: set[str] = field(default_factory=set)
    new: dict[str, Entry] = field(default_factory=dict)

    def add(self, used: Iterable[str], new: Mapping[str, Entry]) -> None:
        self.used.update(used)
        self.new.update(new)

    def summary(self) -> str:
        return f"PTX modules: {len(self.used)} from tests/data/assembled.json, {len(self.new)} from ptxas"


SESSION = Session()


def write_table(session: Session, forget_unused: bool) -> int:
    """Write the table with what is new in it, without what a run of all tests did not ask for; the number of entries."""
    kept = {key: entry for key, entry in _table().items() if not forget_unused or key in session.used}
    entries = dict(sorted({**kept, **session.new}.items()))
    rows = ",\n".join(f"{json.dumps(key)}:{json.dumps(entry, separators=(',', ':'))}" for key, entry in entries.items())
    TABLE.write_text(f'{{"ptxas":{json.dumps(ptxas_version())},\n"modules":{{\n{rows}\n}}}}\n')
    return len(entries)


# -- assembling -----------------------------------------------------------------------------------------------------


@functools.cache
def ptxas_version() -> str:
    path = ptxas_path()
    assert path, "ptxas is not installed"
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"V\d[\d.]*", text)
    return release.group() if release else text.splitlines()[-1]


def assemble(ptx: str, arch: str, level: int = 3) -> Assembled:
    """What ptxas says of PTX, from the table or from ptxas; fails with the assembler's words."""
    key = key_of(ptx, arch, level)
    known = _table().get(key) if os.environ.get("TILEWRIGHT_ASSEMBLE") != "all" else None
    known = known or SESSION.new.get(key)
    if known is not None:
        if key not in SESSION.new:
            SESSION.used.add(key)
        return from_entry(known)
    done = run_ptxas(ptx, arch, level)
    SESSION.new[key] = entry_of(done)
    return done


def assemble_all(modules: Iterable[tuple[str, str]], level: int = 3) -> list[Assembled]:
    """The same for several pairs of PTX and architecture; two run side by side."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(lambda module: assemble(*module, level=level), modules))


def run_ptxas(ptx: str, arch: str, level: int = 3) -> Assembled:
    """Assemble PTX for real."""
    path = ptxas_path()
    assert path, "ptxas is not installed"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [path, f"-arch={arch}", f"-O{level}", "-v", str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, f"ptxas -arch={arch}: {done.stderr[:2000]}"
    return parse(done.stderr)


def parse(log: str) -> Assembled:
    numbers = {"stack": 0, "spill": 0}
    registers: list[int] = []
    for line in log.splitlines():
        words = line.replace(",", " ").split()
        if "bytes stack frame" in line:
            numbers["stack"] += int(words[0])
            numbers["spill"] += int(words[4]) + int(words[8])
        if "registers" in words and "Used" in words:
            registers.append(int(words[words.index("registers") - 1]))
    return Assembled(log, numbers["spill"], numbers["stack"], tuple(registers))
