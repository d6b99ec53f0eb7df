"""What a device remembers of faults. In: launch rules as they are loaded, and the fault that ended the context; out: texts of errors.

A kernel's fault surfaces in a later call and takes the whole context with it. It is reported once, with the kernels that could have
caused it and where their source is; whoever uses the device after that gets one short line. An index outside its array is no such
fault: the access is left out, and the next wait raises it (`index_reports`).
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.base.artifact import Launch
from tilewright.base.errors import DeviceError, TilewrightError
from tilewright.runtime.cuda.host_words import HostWords
from tilewright.runtime.cuda.index_reports import IndexReports
from tilewright.runtime.cuda.watchdog import Watchdogs


class Faults:
    """The faults of one device."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.lost = ""
        """Why the context is lost; empty while it is not."""
        self._places: dict[str, dict[str, None]] = {}
        words = HostWords()
        self.watchdogs = Watchdogs(words)
        self.indices = IndexReports(words)

    def note(self, launches: Iterable[Launch]) -> None:
        """Remember where the source of these kernels is."""
        for launch in launches:
            if launch.place:
                self._places.setdefault(launch.entry, {})[launch.place] = None

    def named(self, entries: Iterable[str]) -> list[str]:
        """Kernels with their places, as an error lists them."""
        return [f"{entry} ({', '.join(places)})" if (places := self._places.get(entry)) else entry for entry in dict.fromkeys(entries)]

    def stopped(self) -> TilewrightError | None:
        """The error for a kernel that its watchdog or an assertion stopped; None where that was not the fault."""
        text, place, where = self.watchdogs.failed()
        if where:
            at = f" at {place}" if place else ""
            self.lose(f"an assertion{at} failed: {text}")
            return DeviceError.at(
                "TW037", f"assertion failed{at}: {text}, in {where}, on {self.label}",
                help="the device is lost to this process, which can go on with device='cpu'; run the kernel on the emulator to see more",
            )  # fmt: skip
        what = self.watchdogs.stopped()
        if not what:
            return None
        self.lose(f"the watchdog stopped {what}")
        return DeviceError.at(
            "TW035", f"the watchdog stopped {what}, on {self.label}: a loop turned or waited for too long",
            help="the device is lost to this process, which can go on with device='cpu'; run the kernel on the emulator, or give it more time",
        )  # fmt: skip

    def lose(self, reason: str) -> None:
        """The context is lost."""
        self.lost = self.lost or reason

    def again(self) -> TilewrightError:
        """The error for whoever uses a device that is lost."""
        return DeviceError.at(
            "TW034", f"{self.label} is lost to this process: {self.lost}",
            help="use device='cpu', or restart the process; the first error says more",
        )  # fmt: skip


def unavailable(label: str, mode: int) -> TilewrightError:
    """The error for a GPU that lets no context in. `mode` is its compute mode."""
    if mode == 2:
        message = f"{label} is in compute mode 'prohibited': no process may use it"
    elif mode == 3:
        message = f"{label} is in compute mode 'exclusive process', and another process uses it"
    else:
        message = f"{label} is busy or unavailable"
    return DeviceError.at("TW030", message, help="nvidia-smi shows who uses it; `nvidia-smi -c 0` makes it shared again")
