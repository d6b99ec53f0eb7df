"""Handles of a tensor graph: a `GraphNode` makes values, a `Tensor` is a value or a view of one.

In: nodes, and the shapes and orders a user asks for. Out: tensors with symbolic shapes. A view holds the tensor that it is a view of and one
`ViewStep`; the planner turns chains of them into index arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.base.dtypes import DType, u8
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size, product, size_text

Extent = int | str | Size
SizeShape = tuple[Size, ...]


@dataclass(frozen=True)
class ViewStep:
    """One step of a view: `reshape` (to `shape`), `transpose` (by `axes`), `slice` (`size` elements along `axis` from `start`, `step` apart),
    `drop` (`axis`, of one element), `expand` (repeat axes of one element up to `shape`) or `blocks` (packed blocks as bytes)."""

    kind: str
    shape: SizeShape = ()
    axes: tuple[int, ...] = ()
    axis: int = 0
    start: Size = field(default_factory=lambda: Size.of(0))
    step: int = 1


@dataclass(eq=False)
class GraphNode:
    """A node: an op with its inputs and parameters, or a leaf (`op` is None): an input, a weight or a cache."""

    name: str
    kind: str
    """`input`, `weight`, `cache` or `op`."""
    op: str | None = None
    inputs: dict[str, Tensor | str | int | float] = field(default_factory=dict)
    """By the names of the op's record. A string is the name of a node that may come later."""
    params: dict[str, Any] = field(default_factory=dict)
    results: tuple[Tensor, ...] = ()
    """What it makes, once that is known."""
    constraints: list[tuple[Size, Size, str]] = field(default_factory=list)
    """Sizes that must be equal in a call, and what they are."""
    data: Any = None
    """The array of a weight."""
    number: int = 0
    """In the order of building."""

    def __repr__(self) -> str:
        return f"<node {self.name}: {self.op or self.kind}>"


class GraphTensor:
    """A value of a graph, or a view of one. Its extents are sizes: numbers, names, or arithmetic with them."""

    def __init__(self, graph: Any, node: GraphNode, index: int, shape: SizeShape, dtype: DType, base: Tensor | None = None, step: ViewStep | None = None) -> None:
        self.graph, self.node, self.index, self.dtype = graph, node, index, dtype
        self.sizes = shape
        self.base, self.step = base, step

    @property
    def shape(self) -> tuple[int | Size, ...]:
        """Extents: numbers where they are known."""
        return tuple(size if size.constant is None else size.constant for size in self.sizes)

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def form(self) -> str:
        return f"{self.dtype}[{', '.join(map(size_text, self.sizes))}]"

    def __repr__(self) -> str:
        return f"<tensor {self.name}: {self.form}>"

    # -- views --------------------------------------------------------------------------------------------------

    def _view(self, shape: SizeShape, step: ViewStep) -> Tensor:
        return GraphTensor(self.graph, self.node, self.index, shape, self.dtype, self, step)

    def reshape(self, *shape: Extent | Sequence[Extent]) -> Tensor:
        """Another shape of the same elements; one extent may be -1."""
        asked = as_sizes(shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape)
        count = product(self.sizes)
        open_ = [axis for axis, size in enumerate(asked) if size.constant == -1]
        if len(open_) > 1:
            raise UserError.at("TW016", f"reshape of '{self.name}' has {len(open_)} extents of -1", help="leave at most one open")
        if open_:
            rest = product(size for axis, size in enumerate(asked) if axis != open_[0])
            asked = (*asked[: open_[0]], quotient(count, rest), *asked[open_[0] + 1 :])
        if asked == self.sizes:
            return self
        total = product(asked)
        if total != count and total.constant is not None and count.constant is not None:
            raise UserError.at("TW004", f"'{self.name}' is {self.form}: it cannot have the shape ({', '.join(map(size_text, asked))})", help="the number of elements must stay")
        return self._view(asked, ViewStep("reshape", asked))

    def transpose(self, *axes: int) -> Tensor:
        """Axes in another order; without arguments the reverse one."""
        order = tuple(a % self.ndim if -self.ndim <= a < self.ndim else a for a in axes) or tuple(reversed(range(self.ndim)))
        if sorted(order) != list(range(self.ndim)):
            raise UserError.at("TW003", f"transpose{axes} of '{self.name}', which is {self.form}", help=f"give each of its {self.ndim} axes once")
        if order == tuple(range(self.ndim)):
            return self
        return self._view(tuple(self.sizes[a] for a in order), ViewStep("transpose", axes=order))

    @property
    def T(self) -> Tensor:
        return self.transpose()

    def slice(self, axis: int, start: Extent, size: Extent, step: int = 1) -> Tensor:
        """`size` elements along an axis, from `start` on, `step` apart."""
        self._check_axis(axis)
        axis %= self.ndim
        first, count = Size.of(start), Size.of(size)
        last, extent = first + (count - 1) * step, self.sizes[axis]
        if last.constant is not None and extent.constant is not None and count.constant and not (0 <= last.constant < extent.constant and 0 <= (first.constant or 0) < extent.constant):
            raise UserError.at("TW013", f"the slice of '{self.name}' along axis {axis} reaches {size_text(last)}, but its extent is {size_text(extent)}")
        shape = (*self.sizes[:axis], count, *self.sizes[axis + 1 :])
        return self._view(shape, ViewStep("slice", shape, axis=axis, start=first, step=step))

    def drop(self, axis: int) -> Tensor:
        """Without an axis of one element."""
        self._check_axis(axis)
        axis %= self.ndim
        return self._view((*self.sizes[:axis], *self.sizes[axis + 1 :]), ViewStep("drop", axis=axis))

    def expand(self, *shape: Extent) -> Tensor:
        """Axes of one element repeated; new ones in front."""
        asked = as_sizes(shape)
        if asked == self.sizes:
            return self
        own = (*(Size.of(1) for _ in range(len(asked) - self.ndim)), *self.sizes)
        if len(own) != len(asked) or any(a != b and a.constant != 1 and a.constant is not None and b.constant is not None for a, b in zip(own, asked, strict=True)):
            raise UserError.at("TW004", f"'{self.name}' is {self.form}: it cannot be repeated to ({', '.join(map(size_text, asked))})")
        return self._view(asked, ViewStep("expand", asked))

    def blocks(self) -> Tensor:
        """Packed blocks as their bytes: [..., blocks, bytes of one]."""
        if not self.dtype.is_packed:
            raise UserError.at("TW009", f"'{self.name}' is {self.form}, which has no packed blocks")
        shape = (*self.sizes[:-1], quotient(self.sizes[-1], Size.of(self.dtype.block)), Size.of(self.dtype.block_bytes))
        return GraphTensor(self.graph, self.node, self.index, shape, u8, self, ViewStep("blocks", shape))

    def rows(self) -> Tensor:
        """As a matrix: the last axis, and all others as one."""
        return self if self.ndim == 2 else self.reshape((product(self.sizes[:-1]), *self.sizes[-1:]))

    def __getitem__(self, index: Any) -> Tensor:
        """`x[i, a:b]`: numbers drop an axis, slices keep it. Steps must be positive."""
        found, axis = self, 0
        for item in index if isinstance(index, tuple) else (index,):
            if axis >= found.ndim:
                raise UserError.at("TW003", f"'{self.name}' is {self.form}, and has {len(index)} indices")
            extent = found.sizes[axis]
            if isinstance(item, slice):
                if extent.constant is None and ((item.stop is None) or (isinstance(item.stop, int) and item.stop < 0)):
                    start = Size.of(item.start or 0)
                    stop = extent if item.stop is None else extent + item.stop
                    found = found.slice(axis, start, stop - start)
                elif extent.constant is None:
                    found = found.slice(axis, item.start or 0, Size.of(item.stop) - (item.start or 0))
                else:
                    start_, stop_, step = item.indices(extent.constant)
                    if step < 1:
                        raise UserError.at("TW005", f"the slice of '{self.name}' has step {step}", help="use a positive step")
                    found = found.slice(axis, start_, max(0, -(-(stop_ - start_) // step)), step)
                axis += 1
            else:
                at = Size.of(item)
                if at.constant is not None and at.constant < 0:
                    at = extent + at
                found = found.slice(axis, at, 1).drop(axis)
        return found

    def _check_axis(self, axis: int) -> None:
        if not -self.ndim <= axis < self.ndim:
            raise UserError.at("TW003", f"axis {axis} of '{self.name}', which is {self.form}")

    # -- arithmetic ---------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        return self.graph.op("Add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self.graph.op("Add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self.graph.op("Sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.graph.op("Sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return self.graph.op("Mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self.graph.op("Mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self.graph.op("Div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self.graph.op("Div", other, self)


Tensor = GraphTensor


def as_sizes(shape: Sequence[Any]) -> SizeShape:
    """Extents as sizes."""
    found: list[Size] = []
    for extent in shape:
        if isinstance(extent, bool) or not (isinstance(extent, int | str | Size) or hasattr(extent, "__index__")):
            raise UserError.at("TW009", f"the extent {extent!r} is a {type(extent).__name__}", help="give whole numbers, or names of sizes such as 'batch'")
        if isinstance(extent, str) and not extent.isidentifier():
            raise UserError.at("TW009", f"{extent!r} is no name of a size", help="use a name such as 'batch'")
        found.append(Size.of(extent) if isinstance(extent, Size | str) else Size.of(int(extent)))
    return tuple(found)


def quotient(count: Size, rest: Size) -> Size:
    """`count // rest`, without the division where it comes out even."""
    if rest.constant == 1:
        return count
    if count == rest:
        return Size.of(1)
    if rest.constant and all(f % rest.constant == 0 for _, f in count.terms):
        return Size(tuple((m, f // rest.constant) for m, f in count.terms))
    if len(rest.terms) == 1 and len(count.terms) == 1:
        (atoms, factor), (own, other) = count.terms[0], rest.terms[0]
        left = list(atoms)
        for atom in own:
            if atom not in left:
                return count // rest
            left.remove(atom)
        if factor % other == 0:
            return Size(((tuple(left), factor // other),))
    return count // rest
