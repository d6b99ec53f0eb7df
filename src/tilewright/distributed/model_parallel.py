"""A kernel of several steps as a pipeline over devices: each has a stretch of the steps, and the weights that stretch reads.

In: a kernel and devices, in the order in which they are to have its steps. Out: its results; `last` says what ran where. The
steps are the kernels that are left after fusion; stretches are cut so that the slowest device has least to do, by the model of
`distributed/placement.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.base.errors import UserError
from tilewright.distributed.heterogeneous import HeterogeneousKernel
from tilewright.distributed.placement import PlacedJob
from tilewright.execute.devices import Device


class ModelParallel(HeterogeneousKernel):
    """A kernel whose steps are on the devices it was given, one stretch on each."""

    def placement_of(self, jobs: Sequence[PlacedJob]) -> Mapping[str, str]:
        if len(jobs) < len(self.devices):
            steps = f"{len(jobs)} step{'s' if len(jobs) > 1 else ''} after fusion"
            raise UserError.at(
                "TW012", f"@parallel(model) over {len(self.devices)} devices, but the block is {steps}",
                self.kernel.function.span,
                "name as many devices as it has steps, or split its batch with @parallel(data)",
            )  # fmt: skip
        stops = cuts(jobs, self.devices)
        return {
            job.name: self.devices[place].id
            for place, (start, stop) in enumerate(zip((0, *stops), stops))
            for job in jobs[start:stop]
        }  # fmt: skip


def cuts(jobs: Sequence[PlacedJob], devices: Sequence[Device]) -> list[int]:
    """Where each device's stretch of jobs ends. Each has one at least, and the longest is as short as can be."""
    seconds = [[job.seconds(device) for job in jobs] for device in devices]
    # best[n]: the longest stretch, and the stops, when the devices so far have the first n jobs.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for place, own in enumerate(seconds):
        found: dict[int, tuple[float, list[int]]] = {}
        for stop in range(place + 1, len(jobs) - (len(devices) - place - 1) + 1):
            found[stop] = min(
                (max(longest, sum(own[start:stop])), [*stops, stop]) for start, (longest, stops) in best.items() if start < stop
            )
        best = found
    return best[len(jobs)][1]
