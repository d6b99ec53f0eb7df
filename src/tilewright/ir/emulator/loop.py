"""The loop stage: lanes are the points of the `parallel` domain.

A domain is run in chunks of at most `CHUNK` lanes. `reduce` adds lanes: one per lane outside and point of its domain, whose
values are combined block by block. Extents may differ from lane to lane; the points beyond a lane's own are masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.ir.emulator.frames import Frame
from tilewright.ir.emulator.machine import Machine, Results, Steps, drain
from tilewright.ir.emulator.reductions import combine, identities
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.ir.types import dtype_of

Array = np.ndarray
CHUNK = 1 << 20
"""Most lanes run together."""
_RUN = 1 << 12
"""Points of a reduction kept together before lanes outside it are."""


@dataclass(frozen=True)
class Expansion:
    """Lanes `rows` of a frame times `points` points each, as a frame of its own (lanes outer, points inner)."""

    frame: Frame
    rows: Array
    points: int


class LoopMachine(Machine):
    def __init__(self, kernel: Kernel, sizes: Mapping[str, int]) -> None:
        super().__init__(kernel, sizes)
        self.control["parallel"] = self._parallel
        self.control["reduce"] = self._reduce

    def launch(self, arguments: Sequence[Array | int | float | bool]) -> None:
        frame = Frame(1)
        for param, argument in zip(self.kernel.params, arguments, strict=True):
            self.bind(param, argument, frame)
        drain(self.run(self.kernel.body, frame))

    def describe(self, frame: Frame, lane: int) -> str:
        if not frame.points:
            return f"kernel {self.kernel.name}"
        return "iteration " + ", ".join(f"{v.name or 'index'} = {int(frame.full(v)[lane])}" for v in frame.points)

    def _expand(self, frame: Frame, extents: Sequence[Value], args: Sequence[Value]) -> Iterator[Expansion]:
        """All points of the active lanes' domains, a chunk at a time; each lane's points in order."""
        rows = np.arange(frame.lanes) if frame.mask is None else np.flatnonzero(frame.mask)
        own = [np.broadcast_to(frame.get(v), (frame.lanes,))[rows] for v in extents]
        shape = tuple(max(0, int(extent.max(initial=0))) for extent in own)
        total = prod(shape)
        if total == 0 or len(rows) == 0:
            return
        ragged = [(axis, extent) for axis, extent in enumerate(own) if (extent != shape[axis]).any()]
        rows_at_once = max(1, CHUNK // min(total, _RUN))
        points_at_once = max(1, CHUNK // min(rows_at_once, len(rows)))
        for row in range(0, len(rows), rows_at_once):
            chosen = rows[row : row + rows_at_once]
            for point in range(0, total, points_at_once):
                points = min(points_at_once, total - point)
                flat = np.tile(np.arange(point, point + points), len(chosen))
                indices = np.unravel_index(flat, shape) if shape else ()
                mask: Array | None = None
                for axis, extent in ragged:
                    valid = indices[axis] < np.repeat(extent[row : row + rows_at_once], points)
                    mask = valid if mask is None else mask & valid
                if mask is not None and not mask.any():
                    continue
                inner = frame.child(np.repeat(chosen, points), mask)
                inner.points = (*frame.points, *args)
                inner.values.update(zip(args, indices, strict=True))
                yield Expansion(inner, chosen, points)

    def _parallel(self, op: Op, frame: Frame) -> Steps:
        for part in self._expand(frame, op.operands, op.regions[0].args):
            yield from self.run(op.regions[0], part.frame)
        return ()

    def _reduce(self, op: Op, frame: Frame) -> Steps:
        kind = str(op.attrs["kind"])
        dtypes = [dtype_of(v.type) for v in op.results]
        empty = identities(kind, dtypes)
        results = [np.full(frame.lanes, e[0], e.dtype) for e in empty]
        pending: list[Results] = []
        rows: Array | None = None
        for part in self._expand(frame, op.operands, op.regions[0].args):
            if rows is not None and part.rows is not rows:
                self._finish(kind, results, rows, pending, dtypes)
                pending = []
            rows = part.rows
            yielded = yield from self.run(op.regions[0], part.frame)
            values = [part.frame.spread(v) for v in yielded]
            if part.frame.mask is not None:
                values = [np.where(part.frame.mask, v, e) for v, e in zip(values, empty, strict=True)]
            pending.append(combine(kind, [v.reshape(len(rows), part.points) for v in values], dtypes, 1))
        if rows is not None:
            self._finish(kind, results, rows, pending, dtypes)
        return tuple(results)

    @staticmethod
    def _finish(
        kind: str, results: Sequence[Array], rows: Array, pending: Sequence[Results], dtypes: Sequence[DType]
    ) -> None:
        """Combine what the blocks of some lanes' domains gave."""
        columns = [np.concatenate(parts, axis=1) for parts in zip(*pending, strict=True)]
        for result, column in zip(results, combine(kind, columns, dtypes, 1), strict=True):
            result[rows] = column[:, 0]
