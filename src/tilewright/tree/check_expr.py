"""Checking expressions: names to things, operators and functions to typed operations, accesses to sizes and bounds.

In come syntax expressions; out come typed ones. On the way every access of an array is looked at: the number of indices,
which sizes it makes equal, and whether it stays inside; what cannot be decided here becomes a check at calls.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.base import dtypes
from tilewright.base.dtypes import DType, i64
from tilewright.base.sizes import ONE, Size, product
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.check_sizes import SizeChecker
from tilewright.tree.check_state import Alias, Poison, Shared, Slot, Tile
from tilewright.tree.infer import (
    COMPARISONS,
    FLOAT_FUNCTIONS,
    ROUNDINGS,
    Skip,
    sum_dtype,
)
from tilewright.tree.metadata import suggest
from tilewright.tree.names import is_output
from tilewright.tree.typed import (
    FALSE,
    TRUE,
    Apply,
    ArrayInfo,
    Cast,
    Choose,
    Const,
    Element,
    Expr,
    IndexRef,
    Local,
    LoopVar,
    Reduce,
    ScalarInfo,
    ScalarRef,
    Shape,
    SizeValue,
    Stmt,
    Whole,
)
from tilewright.tree.typed_walk import walk_expr

_ARITY: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys((*FLOAT_FUNCTIONS, *ROUNDINGS, "abs", "relu", "silu", "softplus", "isnan", "len"), (1, 1)),
    "gelu": (1, 2), "min": (2, 99), "max": (2, 99), "pow": (2, 2), "clamp": (3, 3), "fma": (3, 3), "where": (3, 3),
    "select": (3, 3), "cast": (2, 2), "maximum": (2, 99), "minimum": (2, 99), "dot": (2, 2), "matmul": (2, 2), "transpose": (1, 1),
    "row_max": (1, 1), "row_min": (1, 1), "row_sum": (1, 1),
}  # fmt: skip
_TILE_FUNCTIONS = ("dot", "matmul", "transpose", "row_max", "row_min", "row_sum")
CREATORS = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like")
FUNCTIONS = (*_ARITY, *CREATORS, "reduce", "grid", "range", "shared", "barrier")


Late = tuple[Expr, tuple[Stmt, ...]]
"""An expression, and the statements that must come before it."""


class ExprChecker(SizeChecker):
    """Types expressions in the scope it is at."""

    # -- names ------------------------------------------------------------------------------------------------------

    def unbound(self, name: str, span: Span) -> Expr:
        """A name that nothing declares: in ZynML it is a size, to be found from the accesses."""
        if self.is_python:
            raise self.unknown(name, span)
        self.state.equations.used.setdefault(name, span)
        return SizeValue(self.state.solution.of(name), span=span)

    def unknown(self, name: str, span: Span) -> Skip:
        known = [n for n in self.scope.visible() if "$" not in n]
        return self.fail("TW002", f"unknown name '{name}'", span, suggest(name, known) or f"known names: {', '.join(known)}")

    def name(self, node: syntax.Name) -> Expr:
        found = self.scope.find(node.id)
        if found is None:
            return self.unbound(node.id, node.span)
        if isinstance(found, Poison):
            raise Skip
        if isinstance(found, Slot):
            return Local(found.var, span=node.span)
        if isinstance(found, Alias):
            return replace(found.value, span=node.span)
        if isinstance(found, Tile):
            return self.tile_value(found, node.span)
        if isinstance(found, Shared):
            self.on_read(found.array, node.span)
            return self.view(found.array, found.lead, (), node.span)
        if isinstance(found, LoopVar):
            return IndexRef(found, span=node.span)
        if isinstance(found, ScalarInfo):
            return ScalarRef(found, span=node.span)
        if isinstance(found, ArrayInfo):
            self.on_read(found, node.span)
            return Whole(found, span=node.span)
        raise self.fail("TW009", f"'{node.id}' is a tuple, not a number", node.span, f"take an item, as in {node.id}[0]")

    @abstractmethod
    def on_read(self, array: ArrayInfo, span: Span) -> None:
        """An array is read: it must have been written."""

    def array(self, node: syntax.Expr) -> ArrayInfo | Expr | None:
        """The array (or array value) an expression names, or None when it is something else."""
        dotted = _dotted(node)
        if dotted is None:
            return None
        found = self.scope.find(dotted)
        if isinstance(found, ArrayInfo):
            return found
        if isinstance(found, Shared):
            return found.array
        if isinstance(found, Alias) and found.value.shape:
            return found.value
        if isinstance(found, Tile):
            return self.tile_value(found, node.span)
        if isinstance(found, Poison):
            raise Skip
        return None

    def extents(self, node: syntax.Expr) -> tuple[Expr, ...] | None:
        """The items of a tuple of numbers: `x.shape`, a tuple, a name of one; None when it is no tuple."""
        if isinstance(node, syntax.Tuple | syntax.List):
            return tuple(self.expr(item) for item in node.items)
        if isinstance(node, syntax.Attribute) and node.name == "shape":
            array = self.array(node.value)
            if array is None:
                raise self.fail("TW009", f"'{_text(node.value)}' is not an array and has no shape", node.span)
            return tuple(SizeValue(s, span=node.span) for s in array.shape[len(self.lead(node.value)) :])
        if isinstance(node, syntax.Name):
            found = self.scope.find(node.id)
            return found if isinstance(found, tuple) else None
        return None

    # -- expressions ------------------------------------------------------------------------------------------------

    def expr(self, node: syntax.Expr) -> Expr:
        """The typed expression; reports and raises Skip where there is none."""
        span = node.span
        if isinstance(node, syntax.Number | syntax.Bool):
            return self.literal(node.value, span)
        if isinstance(node, syntax.Name):
            return self.name(node)
        if isinstance(node, syntax.Binary):
            return self.operator(node)
        if isinstance(node, syntax.Unary):
            operand = self.expr(node.operand)
            return self.negate(operand, span) if node.op == "-" else self.invert(node.op, operand, span)
        if isinstance(node, syntax.Index):
            return self.indexed(node)
        if isinstance(node, syntax.Call):
            return self.call(node)
        if isinstance(node, syntax.IfExpr):
            cond = self.expr(node.cond)
            then, otherwise = self.aside(node.then), self.aside(node.otherwise)
            if then[1] or otherwise[1]:
                return self.late(cond, then, otherwise, span)
            return self.select(cond, then[0], otherwise[0], span, lazy=True)
        if isinstance(node, syntax.ReduceExpr):
            return self.reduction(node)
        if isinstance(node, syntax.Attribute):
            return self.attribute(node)
        if isinstance(node, syntax.Pipe):
            first = syntax.Argument(node.value, span=node.value.span)
            return self.call(replace(node.call, args=(first, *node.call.args), span=span))
        kind = type(node).__name__.lower()
        raise self.fail("TW005", f"a {kind} cannot be used as a number in a kernel", span)

    def operator(self, node: syntax.Binary) -> Expr:
        if node.op in ("and", "or"):
            left = self.logical(self.expr(node.left), node.span)
            found, before = self.aside(node.right)
            right = self.logical(found, node.span)
            if before:
                sides: tuple[Late, Late] = ((right, before), (FALSE, ())) if node.op == "and" else ((TRUE, ()), (right, before))
                return self.late(left, *sides, node.span)
            if left.shape or right.shape or not _reads(right):
                return self.apply(node.op, [left, right], (dtypes.bool_, ""), node.span)
            # The right side reads memory: only where the left one lets it.
            then, otherwise = (right, FALSE) if node.op == "and" else (TRUE, right)
            return Choose(left, then, otherwise, dtypes.bool_, span=node.span)
        a, b = self.expr(node.left), self.expr(node.right)
        if node.op == "@":
            return self.matrix_product("'@'", a, b, node.span)
        if node.op not in COMPARISONS and node.op not in ("+", "-", "*", "/", "zdiv", "//", "%", "**", "&", "|", "^", "<<", ">>"):
            raise self.fail("TW005", f"operator '{node.op}' is not available in kernels", node.span)
        return self.binary(node.op, a, b, node.span)

    def attribute(self, node: syntax.Attribute) -> Expr:
        array = self.array(node)
        if array is not None:
            if isinstance(array, ArrayInfo):
                self.on_read(array, node.span)
                return Whole(array, span=node.span)
            return array
        if node.name == "T":
            return self.tile_function("transpose", [self.expr(node.value)], node.span)
        owner = self.array(node.value)
        if owner is not None and node.name == "size":
            return SizeValue(product(owner.shape[len(self.lead(node.value)) :]), span=node.span)
        if owner is not None and node.name == "ndim":
            return self.literal(len(owner.shape) - len(self.lead(node.value)), node.span)
        if owner is not None:
            known = ["shape", "size", "ndim", "dtype"]
            raise self.fail(
                "TW002", f"an array has no attribute '{node.name}' in a kernel", node.span,
                suggest(node.name, known) or f"it has {', '.join(known)}",
            )  # fmt: skip
        raise self.fail("TW002", f"unknown name '{_text(node)}'", node.span)

    # -- accesses ---------------------------------------------------------------------------------------------------

    def indexed(self, node: syntax.Index) -> Expr:
        base, indices = flatten_index(node)
        items = self.extents(base) if isinstance(base, syntax.Attribute | syntax.Tuple | syntax.Name) and (
            not isinstance(base, syntax.Attribute) or base.name == "shape"
        ) else None  # fmt: skip
        if items is not None:
            return self._item(items, indices, node)
        array = self.array(base)
        if array is None:
            array = self.implicit_array(base)
        if array is None and (_dotted(base) is None or (isinstance(base, syntax.Attribute) and base.name == "T")):
            value = self.expr(base)
            array = value.array if isinstance(value, Whole) else value if value.shape else None
        if array is None:
            name = _dotted(base)
            if name is not None and self.scope.find(name) is None:
                if not self.is_python and is_output(name):
                    raise self.fail("TW017", f"'{name}' is read before anything is written to it", node.span, f"store to {name}[…] first")
                arrays = [n for n in self.scope.visible() if isinstance(self.scope.find(n), ArrayInfo)]
                raise self.fail("TW002", f"unknown name '{name}'", base.span, suggest(name, arrays) or f"known arrays: {', '.join(arrays)}")
            raise self.fail("TW003", f"'{_text(base)}' is not an array and cannot be indexed", node.span)
        if isinstance(array, ArrayInfo):
            self.on_read(array, node.span)
            lead = self.lead(base)
            if len(indices) + len(lead) < array.rank or any(isinstance(i, syntax.Slice) for i in indices):
                return self.view(array, lead, indices, node.span)
            return Element(array, self.access(array, indices, node.span, lead=lead), span=node.span)
        if self.loops:
            return self.part_of_tile(_text(base), array, indices, node.span)
        values = self.index_values(_text(base), array.shape, indices, node.span)
        return self.pick(array, values, node.span)

    def lead(self, base: syntax.Expr) -> tuple[Expr, ...]:
        """The indices that come before those written: which of the shared arrays of one name it is."""
        found = self.scope.find(base.id) if isinstance(base, syntax.Name) else None
        return found.lead if isinstance(found, Shared) else ()

    @abstractmethod
    def implicit_array(self, base: syntax.Expr) -> ArrayInfo | None:
        """The output of that name, where outputs exist by being written to."""

    def _item(self, items: tuple[Expr, ...], indices: tuple[syntax.Expr, ...], node: syntax.Index) -> Expr:
        position = self.expr(indices[0])
        if len(indices) != 1 or not isinstance(position, Const) or not isinstance(position.value, int):
            raise self.fail("TW016", "a shape is indexed with one constant integer", node.span)
        if not -len(items) <= position.value < len(items):
            raise self.fail("TW013", f"axis {position.value} of something with {len(items)} axes", node.span)
        return items[position.value]

    def index_values(self, name: str, shape: Shape, indices: Sequence[syntax.Expr], span: Span) -> tuple[Expr, ...]:
        if len(indices) != len(shape):
            plural = "index" if len(indices) == 1 else "indices"
            raise self.fail("TW003", f"'{name}' has rank {len(shape)} but is indexed with {len(indices)} {plural}", span)
        return tuple(self.index_value(name, extent, index) for index, extent in zip(indices, shape, strict=True))

    def index_value(self, name: str, extent: Size, index: syntax.Expr) -> Expr:
        if isinstance(index, syntax.Slice):
            raise self.fail("TW005", f"a slice of the tile '{name}'", index.span, "slice the array it is made from")
        value = self.expr(index)
        if value.shape or not value.dtype.is_int:
            raise self.fail("TW009", f"an index of '{name}' must be an integer, got {value.dtype}", index.span)
        if self.is_python and isinstance(value, Const) and isinstance(value.value, int) and value.value < 0:
            value = SizeValue(extent + value.value, span=index.span)
        return value if value.dtype is i64 else Cast(value, i64, span=index.span)

    def access(
        self, array: ArrayInfo, indices: Sequence[syntax.Expr], span: Span, write: bool = False, lead: tuple[Expr, ...] = ()
    ) -> tuple[Expr, ...]:  # fmt: skip
        """The typed indices of one access; learns sizes from it and sees that it stays inside."""
        values = lead + self.index_values(array.name, array.shape[len(lead) :], indices, span)
        self.learn(array, values, span, write)
        return values

    def pick(self, value: Expr, indices: tuple[Expr, ...], span: Span) -> Expr:
        """One element of an array value that has not been computed."""
        if not value.shape:
            return value
        own = indices[len(indices) - len(value.shape) :]
        own = tuple(self.literal(0, span) if s == ONE else i for s, i in zip(value.shape, own, strict=True))
        if isinstance(value, Whole):
            self.learn(value.array, own, span)
            return Element(value.array, own, span=span)
        if isinstance(value, Apply):
            return replace(value, args=tuple(self.pick(a, indices, span) for a in value.args), shape=())
        if isinstance(value, Cast):
            return replace(value, value=self.pick(value.value, indices, span))
        raise Skip

    # -- calls ------------------------------------------------------------------------------------------------------

    def call(self, node: syntax.Call) -> Expr:
        span = node.span
        if not isinstance(node.function, syntax.Name):
            raise self.fail("TW005", f"'{_text(node.function)}' cannot be called in a kernel", span)
        name = node.function.id
        if dtypes.is_name(name):
            if len(node.args) != 1:
                raise self.fail("TW016", f"{name}() takes 1 argument, got {len(node.args)}", span)
            return self.cast(self.expr(node.args[0].value), self.scalar_dtype(name, span), span)
        if name in CREATORS and self.loops:
            return self.filled(name, node)
        if name in CREATORS:
            raise self.fail("TW005", f"{name}() must be assigned to a name at the top of the kernel", span, f"write out = {name}(…)")
        if name == "shared":
            raise self.fail("TW016", "shared() takes shape, dtype and is assigned to a new name", span, "write x = shared((n,), f32)")
        if name not in _ARITY:
            raise self.fail(
                "TW002", f"unknown function '{name}'", node.function.span, suggest(name, FUNCTIONS) or f"known: {', '.join(_ARITY)}"
            )
        least, most = _ARITY[name]
        if not least <= len(node.args) <= most:
            wanted = f"{least} or more" if most == 99 else str(least) if least == most else f"{least} to {most}"
            noun = "argument" if wanted == "1" else "arguments"
            raise self.fail("TW016", f"{name}() takes {wanted} {noun}, got {len(node.args)}", span)
        self._keywords(name, node)
        if name == "len":
            return self._length(node)
        if name == "cast":
            return self.cast(self.expr(node.args[0].value), self.dtype_argument(node.args[1].value), span)
        if name == "gelu" and len(node.args) == 2:
            flag = node.args[1].value
            if not isinstance(flag, syntax.Bool):
                raise self.fail("TW016", "approximate must be True or False", flag.span)
            return self.composite("gelu", self.expr(node.args[0].value), span, flag.value)
        return self.apply_function(name, [self.expr(a.value) for a in node.args], span)

    def _keywords(self, name: str, node: syntax.Call) -> None:
        allowed = {"gelu": ["approximate"], "cast": ["dtype"]}.get(name, [])
        for argument in node.args:
            if argument.keyword is not None and argument.keyword not in allowed:
                raise self.fail("TW016", f"{name}() has no argument '{argument.keyword}'", argument.span)

    def apply_function(self, name: str, args: list[Expr], span: Span) -> Expr:
        if name in FLOAT_FUNCTIONS:
            return self.function(name, args[0], span)
        if name in ROUNDINGS:
            return self.rounding(name, args[0], span)
        if name == "abs":
            return self.absolute(args[0], span)
        if name in ("min", "max", "minimum", "maximum"):
            return self.extreme(name[:3], args, span)
        if name in _TILE_FUNCTIONS:
            return self.tile_function(name, args, span)
        if name == "pow":
            return self.power(args[0], args[1], span)
        if name == "clamp":
            return self.extreme("min", [self.extreme("max", args[:2], span), args[2]], span)
        if name == "fma":
            return self.fused(args, span)
        if name in ("where", "select"):
            return self.select(args[0], args[1], args[2], span, lazy=False)
        if name == "isnan":
            if not args[0].dtype.is_float:
                return Const(False, dtypes.bool_, span=span)
            return self.apply("isnan", args, (args[0].dtype, ""), span, dtypes.bool_)
        return self.composite(name, args[0], span)

    def _length(self, node: syntax.Call) -> Expr:
        argument = node.args[0].value
        items = self.extents(argument)
        if items is not None:
            return self.literal(len(items), node.span)
        array = self.array(argument)
        if array is None or not array.shape:
            raise self.fail("TW009", f"len() takes an array, got '{_text(argument)}'", node.span)
        return SizeValue(array.shape[len(self.lead(argument))], span=node.span)

    def scalar_dtype(self, name: str, span: Span) -> DType:
        dtype = dtypes.by_name(name)
        if dtype not in dtypes.SCALARS:
            raise self.fail("TW005", f"{dtype} holds packed blocks and cannot be computed with", span)
        return dtype

    def dtype_argument(self, node: syntax.Expr) -> DType:
        """A dtype as written: its name, or the dtype of an array."""
        if isinstance(node, syntax.Name | syntax.String):
            name = node.id if isinstance(node, syntax.Name) else node.value
            if dtypes.is_name(name):
                return self.scalar_dtype(name, node.span)
            known = [d.name for d in dtypes.SCALARS]
            raise self.fail("TW002", f"unknown dtype '{name}'", node.span, suggest(name, known) or f"known: {', '.join(known)}")
        if isinstance(node, syntax.Attribute) and node.name == "dtype":
            array = self.array(node.value)
            if array is not None:
                return array.dtype
        raise self.fail("TW016", "a dtype is expected here", node.span, "write for example f32")

    # -- whole-array reductions -------------------------------------------------------------------------------------

    def reduction(self, node: syntax.ReduceExpr) -> Expr:
        span = node.span
        if self.guarded and not self.loops:
            raise self.fail("TW005", "a reduction of a whole array cannot be inside an if", span, "compute it before, into a variable")
        value = self.settled(self.expr(node.value))
        if not value.shape:
            raise self.fail("TW003", f"reduce() takes an array, got a number ({value.dtype})", span)
        axes = self._axes(node.axis, len(value.shape))
        if node.op in ("and", "or"):
            value = self.logical(value, span)
        elif node.op not in ("argmin", "argmax"):
            value = self.convert(value, sum_dtype(value.dtype, node.op))
        shape = tuple(s for axis, s in enumerate(value.shape) if axis not in axes)
        if node.op in ("argmin", "argmax"):
            self.not_empty(node.op, [value.shape[a] for a in axes], shape, span)
        if self.loops:
            return self.tile_reduction(node.op, value, axes, False, span)
        reduce = Reduce(node.op, value, axes, sum_dtype(value.dtype, node.op), shape, span=span)
        return self.materialise(reduce)

    def _axes(self, node: syntax.Expr | None, rank: int) -> tuple[int, ...]:
        if node is None:
            return tuple(range(rank))
        items = self.extents(node) if isinstance(node, syntax.Tuple | syntax.List) else (self.expr(node),)
        axes: set[int] = set()
        for item in items or ():
            if not isinstance(item, Const) or not isinstance(item.value, int):
                raise self.fail("TW016", "axis must be a constant integer", node.span)
            if not -rank <= item.value < rank:
                raise self.fail("TW003", f"axis {item.value} of an array of rank {rank}", node.span)
            axes.add(item.value % rank)
        return tuple(sorted(axes))

    # -- tiles ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def aside(self, node: syntax.Expr) -> Late:
        """An expression that is evaluated only under a condition, and the statements it needs first."""

    @abstractmethod
    def late(self, cond: Expr, then: Late, otherwise: Late, span: Span) -> Expr:
        """A choice whose sides need statements."""

    @abstractmethod
    def view(self, array: ArrayInfo, lead: tuple[Expr, ...], nodes: Sequence[syntax.Expr], span: Span) -> Expr:
        """A part of an array: some indices are slices, or missing at the end."""

    @abstractmethod
    def part_of_tile(self, name: str, value: Expr, nodes: Sequence[syntax.Expr], span: Span) -> Expr:
        """`value[i, a:b]` of an array value inside a loop."""

    @abstractmethod
    def element(self, value: Expr, indices: Sequence[Expr], span: Span) -> Expr:
        """One element of an array value, inside a loop; loops it needs are put before it."""

    @abstractmethod
    def tile_value(self, tile: Tile, span: Span) -> Expr:
        """A named tile as a value."""

    @abstractmethod
    def tile_function(self, name: str, args: Sequence[Expr], span: Span) -> Expr:
        """dot, transpose, row_max and the like."""

    @abstractmethod
    def matrix_product(self, what: str, a: Expr, b: Expr, span: Span) -> Expr:
        """`a @ b`"""

    @abstractmethod
    def tile_reduction(self, kind: str, value: Expr, axes: tuple[int, ...], keep: bool, span: Span) -> Expr:
        """A reduction of an array value inside a loop."""

    @abstractmethod
    def filled(self, maker: str, node: syntax.Call) -> Expr:
        """`zeros(64, d)` and its kin inside a loop: a tile of one value."""

    @abstractmethod
    def materialise(self, value: Reduce) -> Expr:
        """Give a reduction memory of its own, and the array as a value."""


def flatten_index(node: syntax.Index) -> tuple[syntax.Expr, tuple[syntax.Expr, ...]]:
    """`x[i][j]` is `x[i, j]`."""
    if isinstance(node.value, syntax.Index):
        base, before = flatten_index(node.value)
        return base, (*before, *node.indices)
    return node.value, node.indices


def _dotted(node: syntax.Expr) -> str | None:
    if isinstance(node, syntax.Name):
        return node.id
    if isinstance(node, syntax.Attribute):
        owner = _dotted(node.value)
        return None if owner is None else f"{owner}.{node.name}"
    return None


def _text(node: syntax.Expr) -> str:
    return _dotted(node) or "this expression"


def _reads(expr: Expr) -> bool:
    return any(isinstance(e, Element) for e in walk_expr(expr))
