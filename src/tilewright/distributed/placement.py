"""Which device does what: a model of how long work takes on each, and a list scheduler.

In: jobs with their operations, bytes and dependences, and devices; out: a device and a time for each job. The model is rough: what a
device's memory and arithmetic can do at best, a fixed cost for each launch, and the link between the devices. Where it is wrong, a
placement by name overrules it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.base.errors import UserError
from tilewright.execute.devices import Device, array_device, kind_of

_CORE_BANDWIDTH, _CPU_BANDWIDTH = 12e9, 200e9
_CORE_CLOCK = 2.5e9
_GPU_BANDWIDTH, _GPU_RATE = 500e9, 10e12
"""For chips whose data sheet is not known."""
_LINK, _PEER_LINK, _LATENCY = 25e9, 100e9, 15e-6
"""Bytes per second between host and GPU, and between GPUs; seconds until a copy begins."""


@dataclass(frozen=True)
class Rates:
    """What a device does at best: bytes and operations per second, and the seconds any launch takes."""

    bandwidth: float
    operations: float
    launch: float


def rates(device: Device) -> Rates:
    target, kind = device.target, kind_of(device)
    launch = kind.launch_seconds
    if kind.simulated:
        return Rates(1e6, 1e6, launch)
    if array_device(device) is None:
        cores = target.multiprocessors
        return Rates(min(_CPU_BANDWIDTH, cores * _CORE_BANDWIDTH), cores * (target.vector_bytes / 4) * 4 * _CORE_CLOCK, launch)
    return Rates(target.bandwidth * 1e12 or _GPU_BANDWIDTH, target.peak("f32") * 1e12 or _GPU_RATE, launch)


def speed(device: Device) -> float:
    """How much of a batch a device should get, against others: by its memory, which most kernels wait for."""
    return rates(device).bandwidth


def transfer_seconds(nbytes: float, source: Device, target: Device) -> float:
    """A copy from one device's memory to another's; nothing where both use the host's."""
    if source.id == target.id or (array_device(source) is None and array_device(target) is None):
        return 0.0
    link = _PEER_LINK if source.kind == target.kind else _LINK
    return _LATENCY + nbytes / link


@dataclass(frozen=True)
class PlacedJob:
    """Work that runs on one device. `reads` and `writes` name arrays; `after` are the numbers of earlier jobs it needs."""

    name: str
    operations: float
    bytes: float
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    launches: int = 1

    def seconds(self, device: Device) -> float:
        best = rates(device)
        return self.launches * best.launch + max(self.bytes / best.bandwidth, self.operations / best.operations)


@dataclass(frozen=True)
class Placed:
    """Where a job runs and, in the model's seconds, when."""

    name: str
    device: str
    start: float
    stop: float

    def __str__(self) -> str:
        return f"{self.name} on {self.device}, {self.start * 1e6:.0f}..{self.stop * 1e6:.0f} us"


def place(
    jobs: Sequence[PlacedJob],
    devices: Sequence[Device],
    nbytes: Mapping[str, int],
    home: Device,
    wanted: frozenset[str] = frozenset(),
    fixed: Mapping[str, str] | None = None,
) -> list[Placed]:
    """A device for every job, so that the last one ends early. Jobs come in an order in which none needs a later one.

    Arrays nobody writes are on `home` at the start, and those of `wanted` are to be there at the end. `fixed` places jobs by name.
    """
    fixed = check_fixed(jobs, devices, fixed or {})
    urgency = _urgency(jobs, devices)
    known = {device.id: device for device in devices}
    free = {device.id: 0.0 for device in devices}
    written: dict[str, tuple[Device, float]] = {}
    found: dict[int, Placed] = {}
    for number in sorted(range(len(jobs)), key=lambda n: (-urgency[n], n)):
        job = jobs[number]
        options = [known[fixed[job.name]]] if job.name in fixed else list(devices)
        best: tuple[float, float, float, Device] | None = None
        for device in options:
            ready = free[device.id]
            for name in job.reads:
                place_, when = written.get(name, (home, 0.0))
                ready = max(ready, when + transfer_seconds(nbytes.get(name, 0), place_, device))
            ready = max([ready, *(found[n].stop for n in job.after)])
            stop = ready + job.seconds(device)
            back = sum(transfer_seconds(nbytes.get(name, 0), device, home) for name in job.writes if name in wanted)
            if best is None or stop + back < best[0]:
                best = stop + back, ready, stop, device
        assert best is not None
        _, start, stop, chosen = best
        free[chosen.id] = stop
        for name in job.writes:
            written[name] = chosen, stop
        found[number] = Placed(job.name, chosen.id, start, stop)
    return [found[number] for number in range(len(jobs))]


def check_fixed(jobs: Sequence[PlacedJob], devices: Sequence[Device], fixed: Mapping[str, str]) -> Mapping[str, str]:
    """A placement by name, held against what there is."""
    names, ids = {job.name for job in jobs}, [device.id for device in devices]
    for name, device in fixed.items():
        if name not in names:
            raise UserError.at(
                "TW016", f"placement names '{name}', which is not there", help=f"the parts are {', '.join(sorted(names))}"
            )
        if device not in ids:
            raise UserError.at(
                "TW016", f"placement puts '{name}' on '{device}'", help=f"the devices of this call are {', '.join(ids)}"
            )
    return fixed


def _urgency(jobs: Sequence[PlacedJob], devices: Sequence[Device]) -> list[float]:
    """Seconds from a job's start to the end of all that needs it, on an average device. A job is more urgent than what needs it."""
    mean = [sum(job.seconds(device) for device in devices) / len(devices) for job in jobs]
    found = list(mean)
    for number in reversed(range(len(jobs))):
        for earlier in jobs[number].after:
            found[earlier] = max(found[earlier], mean[earlier] + found[number])
    return found
