"""Runs of a ZynML program with inputs of the same names, the second of a kind recorded and the next ones replayed.

In: inputs in order; out: what the program gives. The first run with inputs of some shapes and element types goes statement by statement, the
second is recorded on the way (`trace.py`), and from then on calls like it are straight calls of machine code (`codegen.py`). A program
that cannot be recorded runs statement by statement each time.
"""

from __future__ import annotations

from typing import Any, Protocol

from tilewright.base.errors import UserError
from tilewright.base.forks import fork_safe_lock
from tilewright.runtime.core.streams import FAST_PATH_OFF
from tilewright.tree import syntax
from tilewright.zyn.host.block_runner import BlockRunner, RecordableBlocks
from tilewright.zyn.host.run import Run
from tilewright.zyn.limits import within_limits
from tilewright.zyn.module_check import ModuleCheck
from tilewright.zyn.replay.types import MISS, Replay

MOST_REPLAYS = 32
"""Forms of inputs that are kept for one program, the latest."""
_MOST_SEEN = 1024


class ReplayedProgram(Protocol):
    """What runs are made of: a checked tree, and who runs its blocks."""

    tree: syntax.Module
    run_compute: BlockRunner
    wanted: frozenset[str] | None
    """The names that runs give; None: all."""

    def checked(self, inputs: dict[str, object]) -> ModuleCheck:
        """What was found out about it, which has all it needs with these inputs and is right."""

    def is_shown(self, name: str) -> bool:
        """Whether a name belongs to the results of a run."""


class RepeatedCalls:
    """Calls `(device, *values)` of one program; any thread may make them."""

    def __init__(self, module: ReplayedProgram, names: tuple[str, ...], only: str | None = None) -> None:
        self._module, self._names, self._only = module, names, only
        self.replays: list[Replay] = []
        """The newest first."""
        self._seen: dict[object, bool] = {}
        """Forms of inputs of earlier runs, and whether a run is to be recorded when they come again."""
        self._lock = fork_safe_lock()
        self.obstacle = ""
        """Why the latest run that could not be recorded was not."""

    def __call__(self, device: str | None, *values: object) -> Any:
        for replay in self.replays:
            found = replay(device, *values)
            if found is not MISS:
                return found
        return self.run(device, *values)

    def run(self, device: str | None, *values: object) -> Any:
        """The same where no replay is for these inputs."""
        for name, value in zip(self._names, values, strict=True):
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise UserError.at("TW006", f"input '{name}' is {value}, which no 64-bit integer holds")
        with within_limits("the run of the program"):
            return self._run(device, dict(zip(self._names, values, strict=True)))

    def _run(self, device: str | None, inputs: dict[str, object]) -> object:
        module = self._module
        check = module.checked(inputs)
        blocks = module.run_compute
        if isinstance(blocks, RecordableBlocks) and self._is_repeated(device, inputs):
            from tilewright.zyn.replay.codegen import linked
            from tilewright.zyn.replay.trace import NotRecorded, record

            try:
                found, recorder = record(check, blocks, device, module.tree, inputs, module.wanted)
                recording = recorder.recording
                recording.result = {name: part for name, part in recording.result.items() if module.is_shown(name)}
                made = linked(recording, device, self._only)
            except NotRecorded as error:
                self.obstacle = str(error)
            else:
                with self._lock:
                    self.replays = [made, *self.replays[: MOST_REPLAYS - 1]]
                return self._wanted(found)
            with self._lock:
                self._seen[_key(device, inputs)] = False
        return self._wanted(Run(check, blocks, device, dict(inputs)).run(module.tree, module.wanted))

    def _wanted(self, found: dict[str, object]) -> object:
        if self._only is not None:
            return found[self._only]
        return {name: value for name, value in found.items() if self._module.is_shown(name)}

    def _is_repeated(self, device: str | None, inputs: dict[str, object]) -> bool:
        """Whether inputs of these forms came before and nothing is known to be in the way."""
        if FAST_PATH_OFF.value:
            return False
        key = _key(device, inputs)
        if key is None:
            return False
        with self._lock:
            known = self._seen.get(key)
            if known is None:
                if len(self._seen) >= _MOST_SEEN:
                    self._seen.clear()
                self._seen[key] = True
            return bool(known)


def _key(device: str | None, inputs: dict[str, object]) -> object:
    """The forms of inputs; None where something among them is no array, number, string, list or record."""
    from tilewright.zyn.replay.trace import form_of

    try:
        key = device, tuple(map(form_of, inputs.values()))
        hash(key)
    except TypeError:
        return None
    return key
