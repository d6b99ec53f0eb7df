"""Runs of a ZynML program with inputs of the same names, the second of a kind recorded and the next ones replayed.

In: inputs in order; out: what the program gives. The first run with inputs of some shapes and element types goes statement by statement, the
second is recorded on the way (`recorded_run.py`), and from then on calls like it are straight calls of machine code (`replays.py`). A program
that cannot be recorded runs statement by statement each time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tilewright.api.host_run import Run
from tilewright.api.replay_types import MISS, Replay
from tilewright.runtime.streams import SPECIAL

if TYPE_CHECKING:
    from tilewright.api.module import ZynModule

MOST_REPLAYS = 32
"""Forms of inputs that are kept for one program, the latest."""
_MOST_SEEN = 1024


class RepeatedCalls:
    """Calls `(device, *values)` of one program; any thread may make them."""

    def __init__(self, module: ZynModule, names: tuple[str, ...], only: str | None = None) -> None:
        self._module, self._names, self._only = module, names, only
        self.replays: list[Replay] = []
        """The newest first."""
        self._seen: dict[object, bool] = {}
        """Forms of inputs of earlier runs, and whether a run is to be recorded when they come again."""
        self._lock = threading.Lock()
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
        return self._run(device, dict(zip(self._names, values, strict=True)))

    def _run(self, device: str | None, inputs: dict[str, object]) -> object:
        module = self._module
        check = module.checked(inputs)
        if self._is_repeated(device, inputs):
            from tilewright.api.recorded_run import NotRecorded, record
            from tilewright.api.replays import linked

            try:
                found, recorder = record(check, module.run_compute, device, module.tree, inputs)
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
        return self._wanted(Run(check, module.run_compute, device, dict(inputs)).run(module.tree))

    def _wanted(self, found: dict[str, object]) -> object:
        if self._only is not None:
            return found[self._only]
        return {name: value for name, value in found.items() if self._module.is_shown(name)}

    def _is_repeated(self, device: str | None, inputs: dict[str, object]) -> bool:
        """Whether inputs of these forms came before and nothing is known to be in the way."""
        if SPECIAL.value or not hasattr(self._module.run_compute, "resolve"):
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
    from tilewright.api.recorded_run import form_of

    try:
        key = device, tuple(map(form_of, inputs.values()))
        hash(key)
    except TypeError:
        return None
    return key
