"""Results that lie across: where factors are exchanged, a tile's rows are what lies side by side in the array of results.

`Across` is `Epilogue` with a way out for them: a piece of 64 x 64 results of two bytes is turned on its way from registers to shared
memory (`stmatrix` with `trans`) and then leaves by the copy engine as any other.

    accumulators [64 rows, 64 columns] -> shared memory [64 columns][64 rows], swizzled -> out[column.., row..]
"""

from __future__ import annotations

from tilewright.analysis import divisors
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.ir.types import Tensor, Tile
from tilewright.passes.registers import Registers
from tilewright.passes.wgmma_epilogue import PIECE_ROWS, Epilogue


class Across(Epilogue):
    """An epilogue whose results may lie across."""

    is_across = False
    """The results that leave by the copy engine do."""

    def _can_leave_by_copy(self, op: Op) -> bool:
        if super()._can_leave_by_copy(op):
            return True
        self.is_across = self._lies_across(op)
        return self.is_across

    def _lies_across(self, op: Op) -> bool:
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor)
        value, size = op.operands[1 + tensor.rank].type, tensor.dtype.itemsize
        if self.out_maps or not isinstance(value, Tile) or value.shape != (self.schedule.m, self.schedule.n):
            return False
        if size * PIECE_ROWS != ROW_BYTES or tensor.rank > 5 or tensor.align < 16 or self.schedule.n % PIECE_ROWS:
            return False
        try:
            row_axis, _ = self.axes(op, 0)
        except CompilerBug:
            return False
        if row_axis != tensor.rank - 1 or tensor.strides[-1] != ONE:
            return False
        return all(divisors.of_size(x, self.kernel.facts) * size % 16 == 0 for x in tensor.strides[:-1])

    def _fill_by_matrix(self, b: Builder, registers: Registers, buffer: Value) -> None:
        """Each lane gives the place of one column: eight rows of it side by side."""
        if not self.is_across:
            super()._fill_by_matrix(b, registers, buffer)
            return
        assert self.window is not None
        column = b.op("and", self.lane, b.index(7))
        pair = b.op("shr", self.lane, b.index(4))
        half = b.op("and", b.op("shr", self.lane, b.index(3)), b.index(1))
        chunk = b.op("xor", b.add(b.mul(self.warp, b.index(2)), half), column)
        along = b.add(b.mul(pair, b.index(8)), column)
        start = b.add(b.add(buffer, b.mul(along, b.index(64))), b.mul(chunk, b.index(8)))
        for number in range(0, len(self.window[1]), 2):
            top, left = self.window[0].start, self.window[1].start + number
            cells = [(top, left), (top + 1, left), (top, left + 1), (top + 1, left + 1)]
            place = b.add(start, b.index(8 * 64 * number))
            b.multi("stmatrix", self.out, place, *(b.op("to_bits", registers.cells[c]) for c in cells), trans=True)
