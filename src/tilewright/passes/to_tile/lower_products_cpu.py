"""Loop stage -> tile stage for several products of the same rows on a CPU: one block computes the same rectangle of all of them.

In: a loop-stage kernel that `fuse_horizontally` made, and its schedule of family `cpu` with `beside`. Out: a tile-stage kernel. It is what
`lower_contraction_cpu` makes of one product, but every block keeps the columns of each second factor, rows are copied into panels once for all
products, and the rest of the kernel runs on the tiles of all sums:

    for %panel of rows { copy rows; for %panel of columns { sums of the first; sums of the second; keep both, or finish } }
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tilewright.analysis.contraction import Contraction, find_products
from tilewright.base.errors import CompilerBug
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.passes.schedules.matrix import CpuPanels
from tilewright.passes.to_tile.lower_contraction_cpu import PanelLowering
from tilewright.passes.to_tile.panels.sides import Side


def lower_products_cpu(kernel: Kernel, schedule: CpuPanels, target: Target) -> Kernel:
    """The tile-stage kernel."""
    products = find_products(kernel)
    if len(products) != schedule.horizontal or schedule.keep != "b":
        raise CompilerBug.at(
            "TW040", f"{kernel.name} has {len(products)} products for a schedule of {schedule.horizontal}", kernel.span
        )
    return _Products(kernel, products, schedule, target).run_contraction()


class _Products(PanelLowering):
    """`found`, `b`, `columns` and `k_indices` are those of the product at hand."""

    def __init__(self, kernel: Kernel, products: Sequence[Contraction], schedule: CpuPanels, target: Target) -> None:
        super().__init__(kernel, products[0], schedule, target)
        self.products = products
        self.sides = [Side(found, found.b, self.b.positions, self.k_order) for found in products]
        self.kept: list[Value] = []
        """The copies of each second factor."""

    @contextmanager
    def _at_hand(self, number: int) -> Iterator[None]:
        before = self.found, self.b, self.columns, self.k_indices
        found = self.products[number]
        self.found, self.b, self.columns = found, self.sides[number], self.kept[number]
        self.k_indices = tuple(found.k[p] for p in self.k_order)
        try:
            yield
        finally:
            self.found, self.b, self.columns, self.k_indices = before

    def _allocate(self, b: Builder, whole_a: bool) -> None:
        super()._allocate(b, whole_a)
        s = self.matrix
        self.kept = [self.columns]
        for number, side in enumerate(self.sides[1:], 1):
            self.kept.append(self._local(b, f"columns{number}", (s.n // s.nr, s.k + 1, s.nr), side.dtype))

    def _pack_all_columns(
        self,
        b: Builder,
        env: dict[Value, Value],
        across: tuple[Value, Value],
        panels: Value,
        start: Value,
        count: Value,
    ) -> None:
        for product in range(len(self.products)):
            with self._at_hand(product):
                super()._pack_all_columns(b, env, across, panels, start, count)

    def _one_tile(
        self, b: Builder, env: dict[Value, Value], where: Value, panels: tuple[Value, Value], stretch: tuple[Value, Value], last: Value,
        down: tuple[Value, Value], across: tuple[Value, Value], direct: bool,
    ) -> None:  # fmt: skip
        columns = self.index_tile(b, b.index(0), 1, self.matrix.nr)
        for product in range(len(self.products)):
            with self._at_hand(product):
                own = self._own(b, where, product)
                for number, row in enumerate(self._multiply(b, env, own, *panels, *stretch, direct)):
                    b.multi("store", self.sums, own, b.index(number), columns, row)
        b.if_(last, lambda end: self._finish(end, env, where, down, across), lambda end: [])

    def _own(self, b: Builder, where: Value, product: int) -> Value:
        """Where a product's tile of sums is, given that of the first."""
        return b.add(where, b.index(product * self.tiles)) if product else where

    def _tiles_of(self, b: Builder, where: Value) -> dict[Op, Value]:
        return {found.reduction: self._own(b, where, number) for number, found in enumerate(self.products)}
