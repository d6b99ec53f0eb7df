"""Checking arrays: parameters, arrays a kernel makes, and outputs that exist by being written to.

An `ArrayChecker` knows every array of the kernel, whether it has been written, and, for outputs of ZynML kernels, how far the
stores reach.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.errors import Diagnostics
from tilewright.base.sizes import Size, contiguous_strides, maximum
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.bounds import affine, clamped, interval
from tilewright.tree.check_expr import CREATORS, ExprChecker
from tilewright.tree.check_state import Alias, Key, OutputState, State
from tilewright.tree.infer import Skip, TypePair, join, size_of
from tilewright.tree.typed import (
    ArgSpec,
    ArrayArg,
    ArrayAssign,
    ArrayInfo,
    Expr,
    Reduce,
    ScalarArg,
    ScalarInfo,
    Shape,
    SizeValue,
    Stmt,
    Whole,
    row_major,
)
from tilewright.tree.typed_text import show_expr
from tilewright.tree.typed_walk import walk_expr


class ArrayChecker(ExprChecker):
    def __init__(self, function: syntax.Function, args: Sequence[ArgSpec], state: State, sink: Diagnostics) -> None:
        super().__init__(function.kind, state, sink)
        self.params: list[ArrayInfo | ScalarInfo] = []
        self.arrays: dict[str, ArrayInfo] = {}
        """Arrays the kernel makes, by unique name."""
        self.temporaries: set[str] = set()
        """Those made for reductions, never written again."""
        self.written: set[str] = set()
        self.out: list[Stmt] = []
        """The statements of the block being checked."""
        self.implicits: set[str] = set()
        """Arrays between blocks that were put into one kernel: like ZynML's outputs they are as large as what is written to them."""
        self.reach: dict[str, list[Shape]] = {}
        """ZynML outputs: for each store, one more than the largest index along each axis."""
        for param, arg in zip(function.params, args, strict=True):
            self.declare_param(param, arg)

    # -- parameters -------------------------------------------------------------------------------------------------

    def declare_param(self, param: syntax.Param, arg: ArgSpec) -> None:
        if isinstance(arg, ScalarArg):
            weak = ("float" if arg.dtype.is_float else "index" if arg.dtype.is_int else "") if arg.weak else ""
            dtype = self.default_float if weak == "float" else arg.dtype
            scalar = ScalarInfo(param.name, dtype, weak)
            self.params.append(self.annotated_scalar(param, scalar))
        else:
            shape = tuple(self.state.solution.of(f"{param.name}${axis}") for axis in range(arg.rank))
            strides = contiguous_strides(shape) if arg.strides is None else tuple(
                Size.of(f"{param.name}$s{axis}" if s is None else s) for axis, s in enumerate(arg.strides)
            )  # fmt: skip
            array = ArrayInfo(param.name, arg.dtype, shape, strides, "input", arg.align)
            self.inputs[param.name] = array
            self.params.append(array)
            self.written.add(param.name)
            self.annotated_array(param, arg)
        self.scope.names[param.name] = self.params[-1]

    def annotated_scalar(self, param: syntax.Param, scalar: ScalarInfo) -> ScalarInfo:
        """An annotation with a dtype makes a plain number that dtype."""
        node = param.type
        if isinstance(node, syntax.Index) or (isinstance(node, syntax.Name) and node.id.lower() in ("array", "tensor")):
            self.sink.error("TW009", f"'{param.name}' must be an array, got a number ({scalar.dtype})", param.span)
        if isinstance(node, syntax.Name) and dtypes.is_name(node.id) and node.id not in ("int", "float", "bool"):
            dtype = dtypes.by_name(node.id)
            if dtype is scalar.dtype or scalar.weak:
                return ScalarInfo(scalar.name, dtype)
            self.sink.error("TW009", f"'{param.name}' must be {dtype}, got {scalar.dtype}", param.span)
        return scalar

    def annotated_array(self, param: syntax.Param, arg: ArrayArg) -> None:
        """`f32[rows, 4]`: dtype, rank, names and constants of the extents."""
        node = param.type
        if not isinstance(node, syntax.Index):
            if isinstance(node, syntax.Name) and (node.id in ("int", "float", "bool") or dtypes.is_name(node.id)):
                self.sink.error("TW009", f"'{param.name}' must be a number ({node.id}), got an array of rank {arg.rank}", param.span)
            return
        if isinstance(node.value, syntax.Name) and dtypes.is_name(node.value.id):
            dtype = dtypes.by_name(node.value.id)
            if dtype is not arg.dtype:
                self.sink.error("TW009", f"'{param.name}' must be {dtype}, got {arg.dtype}", param.span)
        if len(node.indices) != arg.rank:
            self.sink.error("TW003", f"'{param.name}' must have rank {len(node.indices)}, got {arg.rank}", param.span)
            return
        equations = self.state.equations
        for axis, extent in enumerate(node.indices):
            name = f"{param.name}${axis}"
            if isinstance(extent, syntax.Name):
                equations.used.setdefault(extent.id, extent.span)
                self.equal(name, extent.id)
                if self.is_python:
                    size = SizeValue(self.state.solution.of(extent.id), span=extent.span)
                    self.scope.names.setdefault(extent.id, Alias(size, (id(extent), extent.id)))
            elif isinstance(extent, syntax.Number) and isinstance(extent.value, int):
                equations.defined.setdefault((name, Size.of(extent.value)), extent.span)

    def expected(self, name: str, value: Expr, stmt: syntax.Expect) -> None:
        """An argument of a kernel called here is what the parameter's annotation says; its size names mean extents of it."""
        node, span = stmt.type, stmt.span
        if isinstance(node, syntax.Name):
            if node.id.lower() in ("array", "tensor") and not value.shape:
                raise self.fail("TW009", f"{name} must be an array, got a number ({value.dtype})", span)
            if dtypes.is_name(node.id) and value.shape:
                raise self.fail("TW009", f"{name} must be a number ({node.id}), got an array of rank {len(value.shape)}", span)
            return
        assert isinstance(node, syntax.Index)
        if isinstance(node.value, syntax.Name) and dtypes.is_name(node.value.id):
            dtype = dtypes.by_name(node.value.id)
            if dtype is not value.dtype:
                raise self.fail("TW009", f"{name} must be {dtype}, got {value.dtype}", span)
        if len(node.indices) != len(value.shape):
            raise self.fail("TW003", f"{name} must have rank {len(node.indices)}, got {len(value.shape)}", span)
        for extent, found in zip(node.indices, value.shape, strict=True):
            known = self.scope.find(extent.id) if isinstance(extent, syntax.Name) else Alias(self.expr(extent), (0, ""))
            size = size_of(known.value) if isinstance(known, Alias) else None
            if size is not None:
                self.make_equal(size, found, span)
            elif isinstance(extent, syntax.Name):
                value = SizeValue(found, span=extent.span)
                self.scope.names[extent.id] = Alias(value, (id(extent), extent.id))
                self.call_sizes([extent.id], [value])

    # -- arrays -----------------------------------------------------------------------------------------------------

    def new_array(self, name: str, dtype: DType, shape: Shape, role: str | None = None) -> ArrayInfo:
        unique, number = name, 0
        while unique in self.arrays or any(p.name == unique for p in self.params):
            number += 1
            unique = f"{name}${number}"
        role = role or ("output" if unique in self.state.returned else "scratch")
        array = row_major(unique, dtype, shape, role, self.alignment())
        self.arrays[unique] = array
        return array

    def alignment(self) -> int:
        """What arrays made for a call are aligned to: as well as its inputs are, since devices that care align all they make."""
        return max((array.align for array in self.inputs.values()), default=0)

    def outside_loops(self, what: str, span: Span) -> None:
        if self.loops or self.guarded or self.scope.parent is not None:
            raise self.fail("TW005", f"{what} must be at the top of the kernel, outside loops and ifs", span)

    def create(self, name: str, node: syntax.Expr) -> bool:
        """`name = empty(shape, dtype)` and its kin; False when it is something else."""
        if not isinstance(node, syntax.Call) or not isinstance(node.function, syntax.Name):
            return False
        maker = node.function.id
        if maker not in CREATORS or self.loops:
            return False
        self.outside_loops(f"{maker}()", node.span)
        values = {a.keyword or position: a.value for position, a in enumerate(node.args)}
        if maker.endswith("_like"):
            source = self.array(values[0]) if set(values) <= {0, 1, "dtype"} and 0 in values else None
            if source is None:
                raise self.fail("TW016", f"{maker}() takes an array", node.span, f"write {maker}(x)")
            shape = source.shape
            given = values.get(1) or values.get("dtype")
            dtype = source.dtype if given is None else self.dtype_argument(given)
        else:
            wanted = ("shape", "value", "dtype") if maker == "full" else ("shape", "dtype")
            ordered = [values.get(position, values.get(key)) for position, key in enumerate(wanted)]
            if any(v is None for v in ordered) or len(values) != len(wanted):
                raise self.fail("TW016", f"{maker}() takes {', '.join(wanted)}, got {len(node.args)} arguments", node.span)
            assert ordered[0] is not None
            assert ordered[-1] is not None
            shape = self.shape_argument(ordered[0])
            dtype = self.dtype_argument(ordered[-1])
        fill: Expr | None = None
        if maker == "full":
            assert ordered[1] is not None
            value = self.expr(ordered[1])
            fill = self.assignable(value, dtype, f"'{name}'", node.span)
        elif maker != "empty" and maker != "empty_like":
            fill = self.convert(self.literal(int(maker == "ones"), node.span), dtype)
        array = self.new_array(name, dtype, shape)
        self.scope.names[name] = array
        if fill is not None:
            self.written.add(array.name)
            self.out.append(ArrayAssign(array, fill, span=node.span))
        return True

    def shape_argument(self, node: syntax.Expr) -> Shape:
        items = self.extents(node)
        if items is None:
            items = (self.expr(node),)
        sizes: list[Size] = []
        for item in items:
            size = size_of(item)
            if size is None:
                raise self.fail("TW014", f"extent {show_expr(item)} is not made of sizes of the inputs", node.span, "use x.shape[…] or a constant")
            sizes.append(size)
        return tuple(sizes)

    def declare_array(self, name: str, value: Expr, key: Key, span: Span) -> None:
        """A name for an array value: computed where it is used, unless what it reads may change."""
        self.outside_loops(f"the array '{name}'", span)
        value = self.settled(value)
        if isinstance(value, Whole):
            self.scope.names[name] = value.array
            return
        if any(isinstance(e, Whole) and e.array.role != "input" and e.array.name not in self.temporaries for e in walk_expr(value)):
            array = self.new_array(name, value.dtype, value.shape)
            self.out.append(ArrayAssign(array, value, span=span))
            self.written.add(array.name)
            self.scope.names[name] = array
            return
        self.scope.names[name] = Alias(value, key)

    def materialise(self, value: Reduce) -> Expr:
        array = row_major(f"{value.kind}${len(self.arrays)}", value.dtype, value.shape, "scratch", self.alignment())
        self.arrays[array.name] = array
        self.temporaries.add(array.name)
        self.written.add(array.name)
        self.out.append(ArrayAssign(array, value, span=value.span))
        return Whole(array, span=value.span)

    def on_read(self, array: ArrayInfo, span: Span) -> None:
        if array.name not in self.written and self.sink.errors:
            # The store that is missing may be the one that was wrong.
            raise Skip
        if array.name not in self.written:
            raise self.fail("TW017", f"'{array.name}' is read before anything is written to it", span, "store to it first, or make it with zeros")

    def implicit(self, array: ArrayInfo, write: bool = True) -> bool:
        if array.name in self.implicits:
            return write
        return not self.is_python and array.role == "output"

    def is_place(self, name: str) -> bool:
        """Whether an array exists by being written to."""
        return name in self.implicits or (not self.is_python and is_output_name(name))

    def implicit_array(self, base: syntax.Expr) -> ArrayInfo | None:
        """ZynML: `out` and `out_name` are outputs, known from earlier walks."""
        if not isinstance(base, syntax.Name) or not self.is_place(base.id):
            return None
        return self.arrays.get(base.id)

    def passed_on(self, stmt: syntax.Made) -> None:
        """A block that writes these arrays begins, or is done: from there on they are arrays like others."""
        for name in stmt.names:
            if not stmt.done:
                self.implicits.add(name)
            elif name in self.arrays:
                self.scope.names[name] = self.arrays[name]
            elif not self.sink.errors:
                raise self.fail("TW017", f"nothing is written to '{name}'", stmt.span, "write out[…] = …, or yield in a reduce block")

    def bind_made(self, array: ArrayInfo, axis: int, value: Expr, span: Span) -> None:
        linear = affine(value)
        bare = linear.bare if linear is not None else None
        if bare is not None and bare.full is not None:
            self.bind_size(array, axis, bare.full, span)

    def bind_size(self, array: ArrayInfo, axis: int, size: Size, span: Span) -> None:
        """ZynML: a loop over `0..size` reads all of an axis of an array that an earlier block made."""
        known = self.state.outputs.get(array.name)
        if self.is_python or self.guarded or is_output_name(array.name) or (known is not None and known.shape is None):
            return
        if self.raw_name(size) is not None:
            self.make_equal(size, array.shape[axis], span)

    def output(self, name: str, rank: int, pair: TypePair, span: Span) -> ArrayInfo:
        """The output of that name, with one more value of type `pair` stored to it."""
        known = self.state.outputs.setdefault(name, OutputState())
        joined = pair if known.pair is None else join(known.pair, pair)
        if joined is None:
            assert known.pair is not None
            raise self.fail("TW006", f"'{name}' is {known.pair[0]}, and {pair[0]} does not fit it", span, "cast one of the values")
        if joined != known.pair:
            known.pair = joined
            self.state.changed = True
        if name in self.arrays:
            return self.arrays[name]
        shape = known.shape
        if shape is None or len(shape) != rank:
            shape = tuple(Size.of(f"{name}${axis}") for axis in range(rank))
        role = "scratch" if name in self.implicits and name not in self.state.returned else "output"
        array = row_major(name, joined[0], shape, role, self.alignment())
        self.arrays[name] = array
        return array

    # -- outputs of ZynML kernels ------------------------------------------------------------------------------------

    def shape_output(self, name: str, shape: Shape) -> None:
        known = self.state.outputs[name]
        if known.shape != shape:
            known.shape, self.state.changed = shape, True

    def reach_output(self, place: ArrayInfo, indices: Sequence[Expr], span: Span) -> None:
        ends: list[Size] = []
        for axis, index in enumerate(indices):
            reach = interval(index)
            if reach is None:
                raise self.fail(
                    "TW014", f"the extent of '{place.name}' along axis {axis} cannot be found from index {show_expr(index)}", span,
                    "use loop indices and sizes only",
                )  # fmt: skip
            ends.append(reach[1] + 1)
        self.reach.setdefault(place.name, []).append(tuple(ends))

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

    def call_sizes(self, names: Sequence[str], items: Sequence[Expr]) -> None:
        """A Python variable that holds one size gives it its name."""
        for name, item in zip(names, items, strict=False):
            raw = self.raw_name(item.size) if isinstance(item, SizeValue) else None
            if self.is_python and raw is not None:
                self.state.equations.calls[raw, name] = None


def is_output_name(name: str) -> bool:
    return name == "out" or name.startswith("out_")
