"""A `Program`: kernel calls in order, with the arrays between them. What one user call compiles to.

Arrays of a program are named. Inputs come from the caller (those of role 'inout' are written, too), outputs are created for (or given by) the caller, scratch lives
for the call. Sizes are symbolic; a name is *bound* by the first input axis whose extent is just that name; every other axis
of an input must equal its size (`axis_checks`), and `checks` hold what else must be true, such as index bounds.
A scalar input is passed by value. Passes that split or fuse kernels are `Program -> Program`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

from tilewright.base.artifact import IndexSite
from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.base.sizes import Size, add_numbers
from tilewright.base.source import NOWHERE, Span
from tilewright.ir.nodes import Kernel
from tilewright.ir.types import Tensor


@record
class ProgramArray:
    """A named array of the program: 'input', 'inout' (an input that is written where it lies), 'output' or 'scratch'."""

    name: str
    type: Tensor
    role: str


@record
class ScalarInput:
    name: str
    dtype: DType


@record
class KernelCall:
    """Launch `kernel` with these arrays or scalars, one name per kernel parameter."""

    kernel: Kernel
    args: tuple[str, ...]


@record
class ProgramCheck:
    """`left relation right` must hold when the program is called. Relations: eq, le, lt."""

    left: Size
    relation: str
    right: Size
    message: str
    """What is wrong, with `{left}` and `{right}` for the values."""
    span: Span = field(default=NOWHERE, compare=False)
    code: str = "TW004"


@record
class Binding:
    """Size name `name` is the extent (or, for strides, the stride in elements) of input `array` along `axis`."""

    name: str
    array: str
    axis: int
    stride: bool = False


@record
class Program:
    name: str
    inputs: tuple[ProgramArray | ScalarInput, ...]
    """In call order."""
    outputs: tuple[ProgramArray, ...]
    scratch: tuple[ProgramArray, ...]
    calls: tuple[KernelCall, ...]
    checks: tuple[ProgramCheck, ...] = ()
    span: Span = field(default=NOWHERE, compare=False)
    launch_sizes: tuple[str, ...] = ()
    """Size names that no array binds: the launch gives them, as the grid of an explicit kernel."""
    computed: tuple[tuple[str, Size], ...] = ()
    """Sizes that the call computes from its whole-number inputs (`base.sizes.number_name`) and from extents, never negative."""
    sites: tuple[IndexSite, ...] = field(default=(), compare=False)
    """The indices that are checked as it runs, in the order of their numbers in the array `base.FAILURE`."""

    def array(self, name: str) -> ProgramArray:
        for array in (*self.inputs, *self.outputs, *self.scratch):
            if array.name == name and isinstance(array, ProgramArray):
                return array
        raise KeyError(name)

    @property
    def input_arrays(self) -> tuple[ProgramArray, ...]:
        return tuple(a for a in self.inputs if isinstance(a, ProgramArray))

    def bindings(self) -> tuple[Binding, ...]:
        """Where each size or stride name gets its value: inputs first, then outputs (only strides are left by then)."""
        found: dict[str, Binding] = {}
        computed = {name for name, _ in self.computed}
        for array in (*self.input_arrays, *self.outputs):
            for axis, extent in enumerate(array.type.shape):
                if extent.name and extent.name not in found and extent.name not in computed:
                    found[extent.name] = Binding(extent.name, array.name, axis)
            for axis, stride in enumerate(array.type.strides):
                if stride.name and stride.name not in found and stride.name not in computed:
                    found[stride.name] = Binding(stride.name, array.name, axis, stride=True)
        return tuple(found.values())

    def axis_checks(self) -> Iterator[tuple[ProgramArray, int, Size]]:
        """Input and output axes whose extent must equal a size bound elsewhere (or a constant)."""
        bound = {(b.array, b.axis) for b in self.bindings() if not b.stride}
        for array in (*self.input_arrays, *self.outputs):
            for axis, extent in enumerate(array.type.shape):
                if (array.name, axis) not in bound:
                    yield array, axis, extent

    def sizes(
        self, shapes: Mapping[str, tuple[int, ...]], strides: Mapping[str, tuple[int, ...]], numbers: Mapping[str, object] | None = None
    ) -> dict[str, int]:
        """Values of all bound names, given each array's actual shape and strides (in elements), and the numbers of the call."""
        values: dict[str, int] = {}
        for b in self.bindings():
            source = strides if b.stride else shapes
            if b.array in source:
                values[b.name] = source[b.array][b.axis]
        add_numbers(values, numbers or {}, self.computed)
        return values
