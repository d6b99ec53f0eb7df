"""Matrix instructions of AMD's waves (`ir/layouts.py`): the fragments one wave reads of shared memory, and their products.

Rings lie along the sum, so that a lane reads its elements in vectors. The second operand of the product is the instruction's first: a lane's
sums are then neighbours along n, as they are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.layouts import SIDE, Accumulator, Blocked, wave_instruction
from tilewright.ir.nodes import Value
from tilewright.passes.common.registers import Cell, ThreadView
from tilewright.passes.schedules.matrix import WarpProduct
from tilewright.passes.to_thread.mma.units import MultiplyUnit
from tilewright.passes.to_thread.stage_operand import WIDEST, Ring


class WaveUnit(MultiplyUnit):
    """Instructions of one wave on registers."""

    def __init__(self, schedule: WarpProduct, operand: DType, total: DType, precision: str, layout: Blocked | Accumulator, target: Target) -> None:
        assert isinstance(layout, Accumulator)
        found = wave_instruction(target.features, operand, total)
        if found is None or found.family != schedule.family:
            raise UserError.at("TW005", f"no matrix instruction of {target.name} multiplies {operand} and adds up in {total}, family={schedule.family}")
        down, across = layout.part(0, schedule.m) // SIDE, layout.part(1, schedule.n) // SIDE
        if not down or not across or schedule.k % found.k:
            raise UserError.at(
                "TW005", f"a wave has {layout.part(0, schedule.m)} x {layout.part(1, schedule.n)} results and {schedule.k} products; instructions take 16 x 16 x {found.k}"
            )
        self.found, self.layout, self.shape, self.stored = found, layout, (schedule.m, schedule.n), operand
        self.down, self.across, self.parts, self.plain = down, across, schedule.k // found.k, True
        self.first_count, self.second_count = down * found.pieces, across * found.pieces
        self.words = down * across * found.sums
        fragment = max(1, found.width * operand.itemsize // 4)
        self.registers = self.words + 2 * (down + across) * fragment + 40

    def major(self, given: str) -> str:
        return "k"

    def pitch(self, extent: int, major: str) -> int:
        return extent + WIDEST // self.stored.itemsize

    def prepare(self, b: Builder, rings: Sequence[Ring], thread: ThreadView) -> None:
        self.rings = rings
        lane = b.op("and", thread.thread, b.index(self.found.lanes - 1))
        across = b.op("and", lane, b.index(SIDE - 1))
        along = b.index(0) if self.found.repeated else b.mul(b.op("shr", lane, b.index(SIDE.bit_length() - 1)), b.index(self.found.width))
        self.bases: list[Value] = []
        for side, ring in enumerate(rings):
            part = b.mul(thread.warp_digits[side], b.index(self.layout.part(side, self.shape[side])))
            self.bases.append(ring.place(b, b.add(part, across), along))

    def zeros(self, b: Builder) -> list[Value]:
        zero = b.op("broadcast", b.const(0, self.found.total), width=self.found.sums)
        return [zero] * (self.down * self.across)

    def read(self, b: Builder, part: int, stage: Value) -> list[Value]:
        piece = self.found.width // self.found.pieces
        fragments: list[Value] = []
        for ring, base, blocks in zip(self.rings, self.bases, (self.down, self.across), strict=True):
            start = b.add(b.mul(stage, b.index(ring.size)), base)
            for block in range(blocks):
                for number in range(self.found.pieces):
                    place = b.add(start, b.index(ring.static(SIDE * block, part * self.found.k + number * piece)))
                    fragments.append(b.op("load", ring.memory, place, width=piece))
        return fragments

    def multiply(self, b: Builder, fragments: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        pieces, result = self.found.pieces, list(sums)
        first, second = fragments[: self.first_count], fragments[self.first_count :]
        for row in range(self.down):
            left = first[pieces * row : pieces * (row + 1)]
            for column in range(self.across):
                right, place = second[pieces * column : pieces * (column + 1)], row * self.across + column
                result[place] = b.op("wave_mma", *right, *left, result[place], instruction=self.found.name)
        return result

    def cells(self, b: Builder, sums: Sequence[Value]) -> list[dict[Cell, Value]]:
        cells: dict[Cell, Value] = {}
        vector = self.layout.vector[1]
        steps = self.found.sums // vector
        for row in range(self.down):
            for column in range(self.across):
                held = sums[row * self.across + column]
                for step in range(steps):
                    cells[row, column * steps + step] = held if steps == 1 else b.op("extract", held, lane=step)
        return [cells]
