"""Schedules of products with few rows: `y[n] = sum_k w[n, k] * x[k]`, and the same for a few vectors x at once. Data only.

The time of such a product is that of reading `w` once. A warp, or `warps_k` of them, walks a row of `w`; a warp has several rows, so that what
it loads of `x` serves all of them. Every lane keeps `vectors` loads of `vector` elements in flight for each row. How one is chosen is in
`passes/choose/gemv.py`.
"""

from __future__ import annotations

from typing import ClassVar

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.layouts import MMA_LANES, Accumulator, Blocked
from tilewright.passes.schedules.matrix import MatrixSchedule


@record
class Gemv(MatrixSchedule):
    """`m` rows of x and `n` rows of w for a block; `k` terms of each sum in one step."""

    family: ClassVar[str] = "gemv"
    to_thread: ClassVar[str] = "lower_row_dots"

    vector: int = 8
    """Elements of a row that a lane reads at once."""
    warps_n: int = 1
    """Warps of a block that have rows of their own."""
    warps_k: int = 1
    """Warps that share a row; they meet in shared memory."""
    m_index: int = -1
    """Which parallel index walks the rows of x; -1 where there is one row."""
    n_index: int = 0
    """Which parallel index walks the rows of w."""
    unit: int = 1
    """Elements of a packed row that a lane takes together."""
    stage_x: bool = False
    """Lay x out first so that lanes that walk units read neighbours (`passes/packed/stage_units.py`)."""
    matrix: bool = False
    """Multiply by matrix instructions: packed rows as words of two narrow floats (`passes/packed/matrix_units.py`), others as they lie, with 2 to 8 rows of x (`passes/to_thread/row_matrix.py`)."""
    lanes_n: int = 1
    """Lanes of a warp that have different rows; the others walk the sum."""
    stages: int = 1
    """Steps of packed rows that are in shared memory at once (`passes/to_thread/staged_rows.py`); 1: lanes read rows where they lie."""
    resident: int = 0
    """Blocks that are to find room on a multiprocessor at once. The assembler then spends the registers that this leaves on loads in flight; with 0
    it saves registers, and loads wait for each other."""
    pdl: bool = False
    """Programmatic dependent launch: start before the kernel launched before has ended."""
    fetch: int = 0
    """Steps whose part of w is asked for before that kernel has ended (`passes/late/fetch_rows.py`)."""
    horizontal: int = 1
    """Products of the same x that one block computes side by side, `n` rows of each w; `fuse_horizontally` makes them one kernel."""

    @property
    def to_tile(self) -> str:
        return "lower_gemv"

    @property
    def threads(self) -> int:
        return MMA_LANES * self.warps_n * self.warps_k

    @property
    def vectors(self) -> int:
        """Vectors of a row that a lane loads in one step."""
        return self.k // self.step

    @property
    def rows(self) -> int:
        """Rows of w that a lane has."""
        return self.n // (self.warps_n * self.lanes_n)

    @property
    def step(self) -> int:
        """Terms of a sum that the lanes that share it take at once."""
        return MMA_LANES // self.lanes_n * self.warps_k * self.vector * self.unit

    @property
    def is_row_matrix(self) -> bool:
        """Whether matrix instructions multiply rows that are not packed (`passes/to_thread/row_matrix.py`)."""
        return self.matrix and self.unit == 1

    @property
    def staged_bytes(self) -> int:
        return 4 * self.m * self.n * self.warps_k

    def layout(self, operand: DType, total: DType) -> Accumulator | Blocked:
        """Lanes walk the sum. The axes are those of the tiles: an index of which a block has one element has none."""
        order = sorted((index, extent) for index, extent in ((self.m_index, self.m), (self.n_index, self.n)) if extent > 1)
        across = [self.warps_n if index == self.n_index else 1 for index, _ in order]
        lanes = [self.lanes_n if index == self.n_index else 1 for index, _ in order]
        ones = (1,) * len(order)
        return Blocked((*ones, self.vector), (*lanes, MMA_LANES // self.lanes_n), (*across, self.warps_k))

    def validate(self) -> None:
        for name in ("vector", "warps_n", "warps_k", "unit", "lanes_n"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise UserError.at("TW005", f"{name}={value}: a schedule of family {self.family} has powers of two there")
        if not 1 <= self.stages <= 8:
            raise UserError.at("TW005", f"stages={self.stages}: 1 to 8")
        if not 0 <= self.fetch <= 16:
            raise UserError.at("TW005", f"fetch={self.fetch}: 0 to 16 steps")
        if self.lanes_n > (8 if self.matrix else 4 if self.unit > 1 else 1):
            raise UserError.at("TW005", f"lanes_n={self.lanes_n}: 1, or up to 8 with matrix=1, up to 4 for other packed rows")
        step = MMA_LANES // self.lanes_n * self.warps_k * self.vector * self.unit
        if self.m < 1 or self.n < 1 or self.n % (self.warps_n * self.lanes_n) or self.k < step or self.k % step:
            raise UserError.at(
                "TW005", f"n={self.n} k={self.k}: a block has warps_n={self.warps_n} * lanes_n={self.lanes_n} times some rows, and steps of "
                f"{MMA_LANES} lanes / lanes_n * warps_k * vector * unit = {step} times some terms",
            )  # fmt: skip

    def refusal(self, target: Target, operand: DType) -> str:
        if self.stage_x and self.unit < 2:
            return "stage_x lays out what packed rows are multiplied with: these rows are not packed"
        if self.fetch and not self.pdl:
            return "fetch asks for rows before the kernel launched before has ended: it needs pdl=1"
        if self.stages > 1 and (self.unit < 2 or not target.has("cp.async")):
            return "stages copies packed rows ahead, which needs asynchronous copies"
        if self.is_row_matrix and (self.stage_x or self.lanes_n != 8 or self.vector != 8 or self.rows % 2 or not 1 < self.m <= 8 or operand.name not in ("bf16", "f16")):
            return "matrix=1 multiplies 2 to 8 rows with rows of bf16 or f16, of which 8 lanes have two or four each (lanes_n=8 vector=8); or packed rows, with x as it lies"
        if self.matrix and self.stage_x:
            return "matrix=1 multiplies packed rows, with x as it lies"
        if self.matrix and not (target.has("mma") and target.has("bf16")):
            return f"{target.name} has no matrix instructions of bf16"
        if self.threads > target.max_threads:
            return f"{self.threads} threads are more than the {target.max_threads} of a block"
        if not self.has_room(target):
            return "a lane has no registers for so many rows and vectors"
        return ""

    def has_room(self, target: Target) -> bool:
        legal = min(self.m, self.n, self.warps_n, self.warps_k, self.vector) >= 1 and self.n % (self.warps_n * self.lanes_n) == 0 and self.vectors >= 1
        words = self.vectors * (self.rows + self.m) * 4 + 2 * self.m * self.rows
        if self.unit > 1:
            words = self.vectors * self.unit * (2 * self.rows + 4 * self.m) // 8 + 2 * self.m * self.rows
        if self.matrix:
            words //= 2
        return legal and self.k % self.step == 0 and self.threads <= target.max_threads and words <= 160
