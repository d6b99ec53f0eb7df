"""A `Program`: kernel calls in order, with the arrays between them. What one user call compiles to.

Arrays of a program are named. Inputs come from the caller (those of role 'inout' are written, too), outputs are created for (or given by) the caller, scratch lives
for the call. Sizes are symbolic; a name is *bound* by the first input axis whose extent is just that name; every other axis
of an input must equal its size (`axis_checks`), and `checks` hold what else must be true, such as index bounds.
A scalar input is passed by value. Passes that split or fuse kernels are `Program -> Program`.

Calls can be marked with *ordered loops*: neighbouring calls of one loop run again and again, one step after the other. Before
a call begins, the one before it is done. Loops nest. A call with a `period` runs only in every so many steps.

    call @clear(u)                                           clear(u)
    ordered t count steps {                                  for t in 0..steps:
      turn 0 of 2 {                                              if t % 2 == 0:
        call @step(u, v)                           means             step(u, v)
      }                                                          if t % 2 == 1:
      turn 1 of 2 {                                                  step(v, u)
        call @step(v, u)
      }
    }
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import groupby

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
class OrderedLoop:
    """Steps that run one after the other. In the kernels of its calls the size `name` is the number of the step, from 0.

    There are `count` steps; or as many as the number in the array `cell`, without axes, says before the first (of i64); or
    steps for as long as the `cell` holds true before each (of bool)."""

    name: str
    count: Size | None = None
    cell: str = ""
    span: Span = field(default=NOWHERE, compare=False)


@record
class LoopTurn:
    """A call's place in an ordered loop: it runs in the steps `turn`, `turn + period`, …"""

    loop: str
    period: int = 1
    turn: int = 0


@record
class SharedKernel:
    """The kernel that a call has in common with others, `own` being what it is once certain size names are replaced by these sizes."""

    kernel: Kernel
    numbers: Mapping[str, Size]
    own: Kernel


@record
class KernelCall:
    """Launch `kernel` with these arrays or scalars, one name per kernel parameter. `loops` are the ordered loops around it, the
    outermost first."""

    kernel: Kernel
    args: tuple[str, ...]
    loops: tuple[LoopTurn, ...] = ()
    shared: SharedKernel | None = field(default=None, compare=False)
    """What `kernel` was made of; it says nothing of a kernel that a pass has changed since (`common`)."""

    @property
    def common(self) -> SharedKernel | None:
        """What the kernel has in common with those of other calls, so that code is generated for all of them at once."""
        return self.shared if self.shared is not None and self.shared.own is self.kernel else None

    @property
    def varies(self) -> bool:
        """Whether sizes of its kernel change from step to step: no array can be made by them."""
        return bool(self.loops) and not {turn.loop for turn in self.loops}.isdisjoint(self.kernel.size_names)


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

    loops: tuple[OrderedLoop, ...] = ()
    """The ordered loops that calls are marked with."""

    def ordered(self, name: str) -> OrderedLoop:
        return next(loop for loop in self.loops if loop.name == name)

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


@record
class OrderedCalls:
    """The calls of one ordered loop, and of those in it. Calls that follow each other and share a turn are one group."""

    loop: OrderedLoop
    turns: tuple[tuple[LoopTurn, tuple[KernelCall | OrderedCalls, ...]], ...]


def call_tree(program: Program, calls: Sequence[KernelCall] | None = None, depth: int = 0) -> tuple[KernelCall | OrderedCalls, ...]:
    """The calls of a program as a tree: those of an ordered loop are in one item. Raises ValueError where a loop's calls are not neighbours."""
    found: list[KernelCall | OrderedCalls] = []
    seen: set[str] = set()
    for name, group in groupby(program.calls if calls is None else calls, key=lambda call: call.loops[depth].loop if len(call.loops) > depth else ""):
        if not name:
            found += group
            continue
        if name in seen:
            raise ValueError(f"the calls of the ordered loop {name!r} are not neighbours")
        seen.add(name)
        turns = tuple((turn, call_tree(program, list(inner), depth + 1)) for turn, inner in groupby(group, key=lambda call: call.loops[depth]))
        found.append(OrderedCalls(program.ordered(name), turns))
    return tuple(found)
