"""The arrays of a kernel: parameters, arrays it makes, and outputs that exist by being written to.

An `ArrayTable` knows every array, whether it has been written, and, for outputs of ZynML kernels, how far the stores reach.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.intervals import clamped
from tilewright.base.sizes import ONE, Size, contiguous_strides, has_numbers, maximum
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.bounds import interval
from tilewright.tree.check.context import Context, Skip
from tilewright.tree.check.infer import TypePair, join
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.check.state import Absent, Alias, OutputState, Poison
from tilewright.tree.names import is_output
from tilewright.tree.typed import (
    ArgSpec,
    ArrayArg,
    ArrayAssign,
    ArrayInfo,
    Expr,
    NoneArg,
    Reduce,
    ScalarArg,
    ScalarInfo,
    Shape,
    SizeValue,
    Whole,
    row_major,
)
from tilewright.tree.typed_text import show_expr


class ArrayTable:
    def __init__(self, function: syntax.Function, args: Sequence[ArgSpec], context: Context, sizes: SizeChecker) -> None:
        self.context = context
        self.sizes = sizes
        self.kernel_span = function.span
        self.params: list[ArrayInfo | ScalarInfo] = []
        self.inputs: dict[str, ArrayInfo] = {}
        self.by_name: dict[str, ArrayInfo] = {}
        """Arrays the kernel makes, by unique name."""
        self.temporaries: set[str] = set()
        """Those made for reductions, never written again."""
        self.written: set[str] = set()
        self.reach: dict[str, list[Shape]] = {}
        """ZynML outputs: for each store, one more than the largest index along each axis."""
        for param, arg in zip(function.params, args, strict=True):
            self.declare_param(param, arg)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def declare_param(self, param: syntax.Param, arg: ArgSpec) -> None:
        if isinstance(arg, NoneArg):
            if not param.optional:
                self.context.sink.error(
                    "TW009", f"'{param.name}' must be {_wanted(param.type)}, got None", param.span, f"annotate it as '{_wanted_type(param.type)} | None' where it may be left out"
                )
            self.context.scope.names[param.name] = Absent() if param.optional else Poison()
            return
        if isinstance(arg, ScalarArg):
            plain = arg.weak or (isinstance(param.type, syntax.Name) and param.type.id == "int" and arg.dtype.is_int and arg.dtype is not dtypes.u64)
            weak = ("complex" if arg.dtype.is_complex else "float" if arg.dtype.is_float else "index" if arg.dtype.is_int else "") if plain else ""
            dtype = self.context.default_float if weak == "float" else arg.dtype
            scalar = ScalarInfo(param.name, dtype, weak)
            self.params.append(self.annotated_scalar(param, scalar))
        else:
            for axis in arg.ones:
                self.context.state.equations.defined.setdefault((f"{param.name}${axis}", ONE), param.span)
            shape = tuple(ONE if axis in arg.ones else self.context.state.solution.of(f"{param.name}${axis}") for axis in range(arg.rank))
            strides = contiguous_strides(shape) if arg.strides is None else tuple(
                Size.of(f"{param.name}$s{axis}" if s is None else s) for axis, s in enumerate(arg.strides)
            )  # fmt: skip
            packed = arg.dtype if arg.dtype.is_packed else None
            array = ArrayInfo(param.name, arg.dtype.element, shape, strides, "inout" if param.in_place else "input", arg.align, packed)
            self.inputs[param.name] = array
            self.params.append(array)
            self.written.add(param.name)
            self.annotated_array(param, arg)
            if packed is not None:
                self.check_packed(param, array, packed)
        self.context.scope.names[param.name] = self.params[-1]

    def annotated_scalar(self, param: syntax.Param, scalar: ScalarInfo) -> ScalarInfo:
        """An annotation with a dtype makes a plain number that dtype."""
        node = param.type
        if isinstance(node, syntax.Index) or (isinstance(node, syntax.Name) and node.id.lower() in ("array", "tensor")):
            self.context.sink.error("TW009", f"'{param.name}' must be an array, got a number ({scalar.dtype})", param.span)
        if isinstance(node, syntax.Name) and node.id == "int" and scalar.dtype.is_float:
            self.context.sink.error("TW009", f"'{param.name}' must be a whole number (int), got a number with a fraction (float)", param.span, "annotate it as float, or pass an int")
        if isinstance(node, syntax.Name) and node.id in ("int", "float") and scalar.dtype.is_complex:
            self.context.sink.error("TW009", f"'{param.name}' must be a real number ({node.id}), got {scalar.dtype}", param.span, "annotate it as complex, or pass a real number")
        if isinstance(node, syntax.Name) and node.id == "complex" and not scalar.dtype.is_complex:
            return ScalarInfo(scalar.name, scalar.dtype, scalar.weak)
        if isinstance(node, syntax.Name) and node.id == "bool" and not scalar.dtype.is_bool:
            self.context.sink.error("TW009", f"'{param.name}' must be True or False (bool), got {scalar.dtype}", param.span)
        if isinstance(node, syntax.Name) and dtypes.is_name(node.id) and node.id not in ("int", "float", "bool", "complex"):
            dtype = dtypes.by_name(node.id)
            if dtype is scalar.dtype or scalar.weak:
                return ScalarInfo(scalar.name, dtype)
            self.context.sink.error("TW009", f"'{param.name}' must be {dtype}, got {scalar.dtype}", param.span)
        return scalar

    def check_packed(self, param: syntax.Param, array: ArrayInfo, packed: DType) -> None:
        """Packed blocks are read, and lie along the last axis."""
        if param.in_place:
            self.context.sink.error("TW015", f"'{param.name}' holds packed blocks ({packed}), which kernels read and do not write", param.span, "write to an array of f32, and pack that with tw.quantize")
        if not array.shape:
            self.context.sink.error("TW003", f"'{param.name}' holds packed blocks ({packed}) and has no axis", param.span)
            return
        extent = array.shape[-1].constant
        if extent is not None and extent % packed.block:
            self.context.sink.error("TW004", f"the last axis of '{param.name}' has {extent} elements, and {packed} has blocks of {packed.block}", param.span)

    def annotated_array(self, param: syntax.Param, arg: ArrayArg) -> None:
        """`f32[rows, 4]`: dtype, rank, names and constants of the extents."""
        node = param.type
        if not isinstance(node, syntax.Index):
            if isinstance(node, syntax.Name) and (node.id in ("int", "float", "bool", "complex") or dtypes.is_name(node.id)):
                self.context.sink.error("TW009", f"'{param.name}' must be a number ({node.id}), got an array of rank {arg.rank}", param.span)
            return
        only = node.indices[0] if len(node.indices) == 1 else None
        named = next((n.id for n in (node.value, only) if isinstance(n, syntax.Name) and dtypes.is_name(n.id)), None)
        if named is not None and dtypes.by_name(named) is not arg.dtype:
            self.context.sink.error("TW009", f"'{param.name}' must be {named}, got {arg.dtype}", param.span)
        if isinstance(only, syntax.Name) and only.id == named:
            return  # tw.Array[tw.f32]: of any rank
        if len(node.indices) != arg.rank:
            self.context.sink.error("TW003", f"'{param.name}' must have rank {len(node.indices)}, got {arg.rank}", param.span)
            return
        equations = self.context.state.equations
        for axis, extent in enumerate(node.indices):
            name = f"{param.name}${axis}"
            if isinstance(extent, syntax.Name):
                equations.used.setdefault(extent.id, extent.span)
                self.sizes.equal(name, extent.id)
                if self.context.is_python:
                    size = SizeValue(self.context.state.solution.of(extent.id), span=extent.span)
                    self.context.scope.names.setdefault(extent.id, Alias(size, (id(extent), extent.id)))
            elif (written := _written_size(extent)) is not None:
                for known in written.names:
                    equations.used.setdefault(known, extent.span)
                equations.defined.setdefault((name, written), extent.span)

    # -- arrays -------------------------------------------------------------------------------------------------------

    def new_array(self, name: str, dtype: DType, shape: Shape, role: str | None = None) -> ArrayInfo:
        for extent in shape:
            self.sizes.known(extent, self.kernel_span)
        unique, number = name, 0
        while unique in self.by_name or any(p.name == unique for p in self.params):
            number += 1
            unique = f"{name}${number}"
        role = role or ("output" if unique in self.context.state.returned else "scratch")
        array = row_major(unique, dtype, shape, role, self.alignment())
        self.by_name[unique] = array
        return array

    def temporary(self, name: str, dtype: DType, shape: Shape) -> ArrayInfo:
        """An array for one value, written as soon as it is made."""
        for extent in shape:
            self.sizes.known(extent, self.kernel_span)
        array = row_major(f"{name}${len(self.by_name)}", dtype, shape, "scratch", self.alignment())
        self.by_name[array.name] = array
        self.temporaries.add(array.name)
        self.written.add(array.name)
        return array

    def alignment(self) -> int:
        """What arrays made for a call are aligned to: as well as its inputs are, since devices that care align all they make."""
        return max((array.align for array in self.inputs.values()), default=0)

    def materialise(self, value: Reduce) -> Expr:
        """Give a reduction memory of its own, and the array as a value."""
        array = self.temporary(value.kind, value.dtype, value.shape)
        self.context.emit(ArrayAssign(array, value, span=value.span))
        return Whole(array, span=value.span)

    def on_read(self, array: ArrayInfo, span: Span) -> None:
        """An array is read: it must have been written."""
        if array.name not in self.written and self.context.sink.errors:
            # The store that is missing may be the one that was wrong.
            raise Skip
        if array.name not in self.written and array.name in self.context.written_later:
            return  # an iteration before may have written it
        if array.name not in self.written:
            raise self.context.fail("TW017", f"'{array.name}' is read before anything is written to it", span, "store to it first, or make it with zeros")

    # -- outputs that exist by being written to -----------------------------------------------------------------------

    def is_place(self, name: str) -> bool:
        """Whether an array exists by being written to."""
        return name in self.context.implicits or (not self.context.is_python and is_output(name))

    def implicit_array(self, base: syntax.Expr) -> ArrayInfo | None:
        """ZynML: `out` and `out_name` are outputs, known from earlier walks."""
        if not isinstance(base, syntax.Name) or not self.is_place(base.id):
            return None
        return self.by_name.get(base.id)

    def output(self, name: str, rank: int, pair: TypePair, span: Span) -> ArrayInfo:
        """The output of that name, with one more value of type `pair` stored to it."""
        known = self.context.state.outputs.setdefault(name, OutputState())
        joined = pair if known.pair is None else join(known.pair, pair)
        if joined is None:
            assert known.pair is not None
            raise self.context.fail("TW006", f"'{name}' is {known.pair[0]}, and {pair[0]} does not fit it", span, "cast one of the values")
        if joined != known.pair:
            known.pair = joined
            self.context.state.changed = True
        if name in self.by_name:
            return self.by_name[name]
        shape = known.shape
        if shape is None or len(shape) != rank:
            shape = tuple(Size.of(f"{name}${axis}") for axis in range(rank))
        role = "scratch" if name in self.context.implicits and name not in self.context.state.returned else "output"
        array = row_major(name, joined[0], shape, role, self.alignment())
        self.by_name[name] = array
        return array

    def shape_output(self, name: str, shape: Shape) -> None:
        known = self.context.state.outputs[name]
        if known.shape != shape:
            known.shape, self.context.state.changed = shape, True

    def reach_output(self, place: ArrayInfo, indices: Sequence[Expr], span: Span) -> None:
        """How far a store of one element goes. A place that data decides lies as far as stores before it go."""
        before = self.reach.get(place.name, [None])[0]
        ends = [
            before[axis] if before is not None and interval(index) is None else self.last_index(place, axis, index, span) + 1
            for axis, index in enumerate(indices)
        ]
        self.reached(place, tuple(ends), span)

    def reached(self, place: ArrayInfo, ends: Shape, span: Span) -> None:
        """A store to an output goes that far. What numbers of the call decide is computed by the call."""
        sizes = tuple(self.sizes.numbers.count(end, place.name, span) if has_numbers(end) else end for end in ends)
        self.reach.setdefault(place.name, []).append(sizes)

    def last_index(self, place: ArrayInfo, axis: int, index: Expr, span: Span) -> Size:
        """The largest index that a store to an output has along an axis."""
        reach = interval(index)
        if reach is None:
            raise self.context.fail(
                "TW014", f"the extent of '{place.name}' along axis {axis} cannot be found from index {show_expr(index)}", span,
                "use loop indices and sizes only",
            )  # fmt: skip
        return reach.high

    def learn_outputs(self) -> None:
        """ZynML: extents of outputs from this walk's stores."""
        for name, reaches in self.reach.items():
            axes: list[Size] = []
            for ends in zip(*reaches, strict=True):
                extent = ends[0]
                for end in ends[1:]:
                    extent = maximum(extent, end)
                axes.append(clamped(extent))
            self.shape_output(name, tuple(axes))

    def passed_on(self, stmt: syntax.Made) -> None:
        """A block that writes these arrays begins, or is done: from there on they are arrays like others."""
        for name in stmt.names:
            if not stmt.done:
                self.context.implicits.add(name)
            elif name in self.by_name:
                self.context.scope.names[name] = self.by_name[name]
            elif not self.context.sink.errors:
                raise self.context.fail("TW017", f"nothing is written to '{name}'", stmt.span, "write out[…] = …, or yield in a reduce block")


def _wanted(node: syntax.Expr | None) -> str:
    """What an annotation asks for, in words."""
    kind = node.id if isinstance(node, syntax.Name) else ""
    return f"a number ({kind})" if kind in ("int", "float", "bool", "complex") or dtypes.is_name(kind) else "an array"


def _wanted_type(node: syntax.Expr | None) -> str:
    kind = node.id if isinstance(node, syntax.Name) else ""
    return kind if kind in ("int", "float", "bool", "complex") or dtypes.is_name(kind) else "tw.Array"


def _written_size(node: syntax.Expr) -> Size | None:
    """The size that an extent of an annotation is: a whole number, or sums, differences and products of names and numbers."""
    if isinstance(node, syntax.Number) and isinstance(node.value, int):
        return Size.of(node.value)
    if isinstance(node, syntax.Name):
        return Size.of(node.id)
    if not isinstance(node, syntax.Binary) or node.op not in ("+", "-", "*"):
        return None
    left, right = _written_size(node.left), _written_size(node.right)
    if left is None or right is None:
        return None
    return left + right if node.op == "+" else left - right if node.op == "-" else left * right
