"""Programs on devices with pooled memory. In: an artifact, arrays, numbers and sizes; out: its launches queued, each with arguments in order.

What a launch needs that never changes is worked out once; a call evaluates sizes, takes scratch memory and hands over arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.base.artifact import FAILURE, ArrayParam, Artifact, Launch, ScalarParam
from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, TargetLimit, UserError
from tilewright.base.target import Target
from tilewright.runtime.core.device import LoadedProgram, Number, Workspace
from tilewright.runtime.core.run_sizes import scratch_bytes
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.portable.pooled import PooledDevice
from tilewright.runtime.portable.turns import TurnLimit

Argument = tuple[DType, DeviceArray | Number]
"""An array, or a number of that dtype."""


class PooledProgram(LoadedProgram):
    """An artifact's kernels on a device."""

    code_kind = "spirv"
    """What its code is."""

    def __init__(self, device: PooledDevice, artifact: Artifact, target: Target) -> None:
        if artifact.kind != self.code_kind or artifact.target != target.name:
            raise DeviceError.at("TW030", f"'{artifact.name}' is {artifact.kind} code for {artifact.target}, which {device.label} cannot run")
        self.device, self.artifact, self.target = device, artifact, target
        given = (*artifact.inputs, *artifact.outputs, *artifact.scratch)
        self._dtypes = {p.name: p.dtype for p in given if isinstance(p, ArrayParam | ScalarParam)}
        self._arrays = [p.name for p in (*artifact.inputs, *artifact.outputs) if isinstance(p, ArrayParam)]
        self._scratch = [p for p in artifact.scratch if p.name != FAILURE]
        self._cell = device.report_cell(artifact) if artifact.sites else None
        self._turns = TurnLimit(artifact, target, device.label)
        self._fixed = [tuple(e.constant for e in one.grid) for one in artifact.launches]

    @abstractmethod
    def launch(self, position: int, launch: Launch, grid: tuple[int, int, int], arguments: Sequence[Argument], sizes: Sequence[int], stream: int) -> None:
        """Queue one launch, whose grid has blocks."""

    def run(
        self, arrays: Mapping[str, Any], scalars: Mapping[str, Number], sizes: Mapping[str, int], stream: int = 0, *,
        take: Callable[[int], Workspace] | None = None,
    ) -> None:  # fmt: skip
        device, given = self.device, dict(arrays)
        device.check_alive()
        for name in self._arrays:
            self._check(name, given[name], stream)
        launches = [(position, one, grid) for position, one in enumerate(self.artifact.launches) if min(grid := self._grid(position, sizes), default=1) > 0]
        for position, _, _ in launches:
            self._turns.check(position, sizes)
        self._turns.check_numbers(sizes, scalars)
        self._turns.warn([one for _, one, _ in launches])
        for param in self._scratch:
            nbytes = scratch_bytes(self.artifact, param, sizes, device.label)
            given[param.name] = device.empty((nbytes // param.dtype.itemsize,), param.dtype, stream)
        if self._cell is not None:
            given[FAILURE] = self._cell
            self._cell.owner.use_on(stream)
        for position, one, grid in launches:
            x, y, z = (*grid, 1, 1, 1)[:3]
            arguments = [(self._dtypes[name], given[name] if name in given else scalars[name]) for name in one.args]
            self.launch(position, one, (x, y, z), arguments, [sizes[name] for name in one.sizes], stream)
        if self._cell is not None:
            device.expect_reports()

    def _grid(self, position: int, sizes: Mapping[str, int]) -> list[int]:
        launch = self.artifact.launches[position]
        return [e if e is not None else size.evaluate(sizes) for e, size in zip(self._fixed[position], launch.grid, strict=True)]

    def _check(self, name: str, array: DeviceArray, stream: int) -> None:
        array.check_usable()
        if array.device is not self.device:
            raise UserError.at("TW009", f"an array on {array.device.label} was given to a program on {self.device.label}")
        array.owner.use_on(stream)

    def too_many_blocks(self, launch: Launch, grid: Sequence[int], most: Sequence[int]) -> TargetLimit:
        """The error of a grid beyond what the device allows."""
        where = f" ({launch.place})" if launch.place else ""
        error = TargetLimit.at(
            "TW020", f"{self.artifact.name}{where} has a grid of {' x '.join(map(str, grid))} blocks; {self.target.name} on {self.device.label} allows "
            f"{' x '.join(map(str, most))}", help="work on smaller pieces",
        )  # fmt: skip
        assert isinstance(error, TargetLimit)
        return error

    def __del__(self) -> None:
        cell = getattr(self, "_cell", None)
        if cell is not None:
            self.device.forget_cell(cell)
