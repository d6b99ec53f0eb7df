"""The typed tree of one kernel: what the checker hands to lowering.

Every expression has a dtype and a symbolic shape (empty for a scalar). Names are resolved to `Variable`, `LoopVar` and
`ArrayInfo` objects, sizes are solved (equal sizes are equal `Size`s), dtypes agree: the operands of an `Apply` have one
dtype, written out with `Cast`. A dtype narrower than f32 is the declared one; arithmetic on it is done in f32, and only a
`Cast` with `rounds` really rounds.

A *weak* expression (a literal, a size, a loop index and what is made of them alone) has not settled on a dtype: it takes
that of what it meets. The `dtype` of such an expression is what it has when it meets nothing.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from tilewright.base.dtypes import DType, bool_, i64
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size, contiguous_strides
from tilewright.base.source import NOWHERE, Span
from tilewright.tree.metadata import KernelMetadata

Shape = tuple[Size, ...]


# -- what a kernel is specialised for -----------------------------------------------------------------------------


@record
class ArrayArg:
    """An array argument. `strides` None is row-major without gaps; else, per axis, a known stride in elements or None."""

    dtype: DType
    rank: int
    strides: tuple[int | None, ...] | None = None
    align: int = 0
    ones: tuple[int, ...] = ()
    """Axes of extent 1 that repeat along those of other operands: they have that extent in every call."""


@record
class ScalarArg:
    """A number argument. A weak one (a plain Python number) takes the dtype of what it meets, as a literal does."""

    dtype: DType
    weak: bool = False


@record
class NoneArg:
    """None, for a parameter that may be left out."""


ArgSpec = ArrayArg | ScalarArg | NoneArg


# -- named things -------------------------------------------------------------------------------------------------


@record
class ArrayInfo:
    """An array of the kernel: 'input', 'inout' (an argument that is written where it lies), 'output' or 'scratch'. Names are unique within a
    kernel."""

    name: str
    dtype: DType
    shape: Shape
    strides: Shape
    role: str
    align: int = 0
    packed: DType | None = None
    """Of an array of packed blocks: what they are. Its elements are read as `dtype`."""

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def stored(self) -> DType:
        """What lies in memory."""
        return self.packed or self.dtype

    def __str__(self) -> str:
        return f"{self.stored}[{', '.join(map(str, self.shape))}]"


@record
class ScalarInfo:
    name: str
    dtype: DType
    weak: str = ""


@record(identity=True)
class Variable:
    """A scalar variable of a body; compared by identity."""

    name: str
    dtype: DType
    weak: str = ""
    mutable: bool = False


@record(identity=True)
class LoopVar:
    """An index that runs over `lo, lo + step, …` up to `hi` (exclusive); compared by identity.

    `first` and `count` are its start and number of values where these are sizes, `low` and `high` the smallest and the largest value
    where these are known (meaningless when there are none).
    """

    name: str
    lo: Expr
    hi: Expr
    step: Size = ONE
    first: Size | None = None
    count: Size | None = None
    low: Size | None = None
    high: Size | None = None

    @property
    def full(self) -> Size | None:
        """The extent it runs over when it is `0..extent` by ones."""
        return self.count if self.first is not None and self.first.constant == 0 and self.step.constant == 1 else None


# -- expressions --------------------------------------------------------------------------------------------------


@record(kw_only=True)
class TypedNode:
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@record
class Const(TypedNode):
    value: Any
    """A bool, int, float or complex, as the dtype says."""
    dtype: DType
    weak: str = ""
    shape: Shape = ()


@record
class SizeValue(TypedNode):
    """The value of a symbolic size."""

    size: Size
    dtype: DType = i64
    weak: str = "index"
    shape: Shape = ()


@record
class IndexRef(TypedNode):
    """The value of a loop index."""

    var: LoopVar
    dtype: DType = i64
    weak: str = "index"
    shape: Shape = ()


@record
class Local(TypedNode):
    var: Variable

    @property
    def dtype(self) -> DType:
        return self.var.dtype

    @property
    def weak(self) -> str:
        return self.var.weak

    @property
    def shape(self) -> Shape:
        return ()


@record
class ScalarRef(TypedNode):
    """A scalar argument."""

    scalar: ScalarInfo

    @property
    def dtype(self) -> DType:
        return self.scalar.dtype

    @property
    def weak(self) -> str:
        return self.scalar.weak

    @property
    def shape(self) -> Shape:
        return ()


@record
class Element(TypedNode):
    """`array[indices]`"""

    array: ArrayInfo
    indices: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        return self.array.dtype

    @property
    def weak(self) -> str:
        return ""

    @property
    def shape(self) -> Shape:
        return ()


@record
class Whole(TypedNode):
    """All elements of an array, as a value."""

    array: ArrayInfo

    @property
    def dtype(self) -> DType:
        return self.array.dtype

    @property
    def weak(self) -> str:
        return ""

    @property
    def shape(self) -> Shape:
        return self.array.shape


@record
class Apply(TypedNode):
    """An op of the op table, elementwise; operands of fewer axes repeat along the missing leading ones."""

    op: str
    args: tuple[Expr, ...]
    dtype: DType
    weak: str = ""
    shape: Shape = ()


@record
class Cast(TypedNode):
    """A conversion. `rounds`: the user asked for it, so a narrow float really is rounded to that width."""

    value: Expr
    dtype: DType
    rounds: bool = False

    @property
    def weak(self) -> str:
        return ""

    @property
    def shape(self) -> Shape:
        return self.value.shape


@record
class Choose(TypedNode):
    """`then if cond else otherwise`: only the chosen side is evaluated."""

    cond: Expr
    then: Expr
    otherwise: Expr
    dtype: DType
    weak: str = ""
    shape: Shape = ()


@record
class Reduce(TypedNode):
    """`kind` over `axes` of an array value; only as the whole right side of an `ArrayAssign`. For argmin and argmax the result
    is the (row-major) position."""

    kind: str
    value: Expr
    axes: tuple[int, ...]
    dtype: DType
    shape: Shape

    @property
    def weak(self) -> str:
        return ""


# Tile values: parts of arrays inside loops, and what is made of them. Only the checker sees them (`tiles.py`): it turns every
# use into loops over elements.

Limits = tuple[tuple["Expr", ...], ...]
"""For each axis of a tile, upper bounds of how many elements it really has: the last slice of an array may be short."""


@record
class TypedView(TypedNode):
    """`array[i, a:b]`: an index for every axis of the array, and which axes remain; along those it is the first element."""

    array: ArrayInfo
    starts: tuple[Expr, ...]
    kept: tuple[int, ...]
    shape: Shape
    limits: Limits

    @property
    def dtype(self) -> DType:
        return self.array.dtype

    @property
    def weak(self) -> str:
        return ""


@record
class PickedAxis:
    """Where along one axis of a value the elements of a `Picked` lie: at `start + step * i`, with i the index along the result's axis `along`; or,
    with `index`, at that number, or at the elements of that array, whose axes are those of the result from `along` on."""

    along: int = 0
    start: Expr | None = None
    step: int = 1
    index: Expr | None = None


@record
class Picked(TypedNode):
    """`value[::2, None, rows]`: an array of elements of another, at places given for each of its axes."""

    value: Expr
    axes: tuple[PickedAxis, ...]
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def weak(self) -> str:
        return self.value.weak


@record
class AxisIndex(TypedNode):
    """The index of each element along one axis of a shape: what reshaped arrays compute places from."""

    axis: int
    shape: Shape

    @property
    def dtype(self) -> DType:
        return i64

    @property
    def weak(self) -> str:
        return "index"


@record
class Masked(TypedNode):
    """`value[mask]`: the elements where the mask holds. Its one axis has a size that nobody knows."""

    value: Expr
    mask: Expr
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def weak(self) -> str:
        return ""


@record
class Transpose(TypedNode):
    """The axes in reverse order."""

    value: Expr
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def weak(self) -> str:
        return self.value.weak


@record
class Product(TypedNode):
    """`left @ right`, of one dtype: of vectors, matrices, or of matrices along leading axes that meet."""

    left: Expr
    right: Expr
    dtype: DType
    shape: Shape

    @property
    def weak(self) -> str:
        return ""


@record
class Fold(TypedNode):
    """`kind` over `axes` of a tile, which remain with extent 1 where `keep`."""

    kind: str
    value: Expr
    axes: tuple[int, ...]
    keep: bool
    dtype: DType
    shape: Shape

    @property
    def weak(self) -> str:
        return ""


@record
class TileLocal(TypedNode):
    """A named tile: where it is `held`, the element at hand is in `var`. `value` is what it was made from, which still holds while the
    variables and arrays in `versions` have been assigned that many times."""

    var: Variable
    shape: Shape
    limits: Limits
    held: bool = True
    value: Expr | None = None
    versions: tuple[tuple[Variable | str, int], ...] = ()

    @property
    def dtype(self) -> DType:
        return self.var.dtype

    @property
    def weak(self) -> str:
        return self.var.weak


Expr = (
    Const | SizeValue | IndexRef | Local | ScalarRef | Element | Whole | Apply | Cast | Choose | Reduce
    | TypedView | Picked | AxisIndex | Masked | Transpose | Product | Fold | TileLocal
)  # fmt: skip


# -- statements ---------------------------------------------------------------------------------------------------


@record
class SetVar(TypedNode):
    """A variable gets its first (`declares`) or a new value."""

    var: Variable
    value: Expr
    declares: bool = False


@record
class Accumulate(TypedNode):
    """`var = kind(var, value)`, where the value does not read the variable. kind: add mul min max and or."""

    var: Variable
    kind: str
    value: Expr


@record
class Store(TypedNode):
    """`array[indices] = value`; with `kind`, `array[indices] = kind(array[indices], value)`.

    `scatter`: other points of the parallel loop around may combine into the same element, in any order.
    """

    array: ArrayInfo
    indices: tuple[Expr, ...]
    value: Expr
    kind: str = ""
    scatter: bool = False


@record
class ArrayAssign(TypedNode):
    """Every element of `array` from a value of its shape (or one that repeats to it)."""

    array: ArrayInfo
    value: Expr


@record
class TypedLoop(TypedNode):
    """A loop nest over a rectangular domain (one whose ranges do not depend on its own indices, unless there is one index).

    kind: 'parallel' (points are independent), 'reduce' (it only accumulates into outer variables or elements), 'each' (serial,
    but its iterations are independent), 'serial', 'ordered' (one index; its iterations run one after the other, and what
    stands in it runs like statements of the kernel's top); empty until classified. `asked` is what the source said: yes, no, auto.
    """

    vars: tuple[LoopVar, ...]
    body: tuple[Stmt, ...]
    kind: str = ""
    asked: str = "auto"
    until: Variable | None = None
    """The flag that ends the loop, which has one index and runs in order, before its next iteration."""


@record
class ReduceLoop(TypedNode):
    """A nest whose values are combined over the `inner` indices into `array[outer indices]`. The body accumulates into `var`; for
    argmin and argmax it has `TypedYield`s instead."""

    outer: tuple[LoopVar, ...]
    inner: tuple[LoopVar, ...]
    body: tuple[Stmt, ...]
    kind: str
    var: Variable
    array: ArrayInfo


@record
class TypedWhile(TypedNode):
    """kind: 'ordered' as for a `TypedLoop`, or empty."""

    cond: Expr
    body: tuple[Stmt, ...]
    kind: str = ""


@record
class TypedTurns(TypedNode):
    """The only statement of an ordered loop: iterations take the bodies in turn, `bodies[t % len(bodies)]` in iteration t."""

    bodies: tuple[tuple[Stmt, ...], ...]


@record
class TypedIf(TypedNode):
    cond: Expr
    then: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...] = ()


@record
class TypedYield(TypedNode):
    """Hands a value and its index (None: its position in the domain) to the argmin or argmax `ReduceLoop` around it."""

    value: Expr
    index: Expr | None = None


@record
class TypedPrint(TypedNode):
    """Writes a text with numbers in its places. What is around it runs in order."""

    text: str
    values: tuple[Expr, ...]


@record
class TypedAssert(TypedNode):
    """Ends the kernel with an error where the condition does not hold. What is around it runs in order."""

    cond: Expr
    text: str


@record
class TypedBarrier(TypedNode):
    """What stands before it in the loop body is done when what follows begins. Gone once loops are classified."""


Stmt = SetVar | Accumulate | Store | ArrayAssign | TypedLoop | ReduceLoop | TypedWhile | TypedIf | TypedTurns | TypedYield | TypedBarrier | TypedPrint | TypedAssert


@record
class SizeCheck(TypedNode):
    """`left relation right` (eq, le, lt) must hold at every call."""

    left: Size
    relation: str
    right: Size
    message: str
    code: str = "TW004"


@record
class TypedKernel(TypedNode):
    """A checked kernel."""

    name: str
    inputs: tuple[ArrayInfo | ScalarInfo, ...]
    outputs: tuple[ArrayInfo, ...]
    scratch: tuple[ArrayInfo, ...]
    body: tuple[Stmt, ...]
    checks: tuple[SizeCheck, ...]
    metadata: KernelMetadata
    computed: tuple[tuple[str, Size], ...] = ()
    """Sizes that a call computes from its numbers: names and what they are."""
    repeats: tuple[tuple[str, int], ...] = ()
    """Axes of inputs that meet others in array expressions: one of extent 1 may repeat there, in code made for that (`ArrayArg.ones`)."""


def row_major(name: str, dtype: DType, shape: Shape, role: str, align: int = 0) -> ArrayInfo:
    """An array without gaps."""
    return ArrayInfo(name, dtype, shape, contiguous_strides(shape), role, align)


TRUE = Const(True, bool_)
FALSE = Const(False, bool_)
