"""Checking expressions: names to things, operators and functions to typed operations, accesses to sizes and bounds.

In come syntax expressions; out come typed ones. On the way every access of an array is looked at: the number of indices,
which sizes it makes equal, and whether it stays inside; what cannot be decided here becomes a check at calls.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.record import replace
from tilewright.base.sizes import ONE, Size, product
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.check.arrays import ArrayTable
from tilewright.tree.check.context import Context, Late, Skip
from tilewright.tree.check.elements import ElementBuilder, identity
from tilewright.tree.check.functions.number_functions import ARITY as NUMBER_FUNCTIONS
from tilewright.tree.check.functions.number_functions import NumberFunctions
from tilewright.tree.check.indexing.masks import MaskChecker, is_masked
from tilewright.tree.check.indexing.picks import PickChecker, expanded
from tilewright.tree.check.indexing.reshapes import ReshapeChecker
from tilewright.tree.check.infer import constant_of, size_of, sum_dtype
from tilewright.tree.check.operations import COMPARISONS, FLOAT_FUNCTIONS, ROUNDINGS, Typing
from tilewright.tree.check.random_draws import DTYPES as RANDOM
from tilewright.tree.check.random_draws import RandomDraws
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.check.slices import SliceChecker
from tilewright.tree.check.state import Absent, Alias, Poison, SharedArray, TileValue, VariableSlot
from tilewright.tree.inline import nodes
from tilewright.tree.metadata import suggest
from tilewright.tree.names import is_output
from tilewright.tree.typed import (
    FALSE,
    TRUE,
    ArrayInfo,
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
    TypedView,
    Whole,
)
from tilewright.tree.typed_text import show_expr
from tilewright.tree.typed_walk import walk_expr
from tilewright.tree.unknown_functions import help_for

COMPLEX_PARTS = ("conj", "imag", "real")
_ARITY: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys((*FLOAT_FUNCTIONS, *ROUNDINGS, "abs", "relu", "silu", "softplus", "isnan", "len"), (1, 1)),
    "gelu": (1, 2), "min": (2, 99), "max": (2, 99), "pow": (2, 2), "clamp": (3, 3), "fma": (3, 3), "where": (3, 3),
    "select": (3, 3), "cast": (2, 2), "bitcast": (2, 2), "maximum": (2, 99), "minimum": (2, 99), "dot": (2, 2), "matmul": (2, 2), "transpose": (1, 1),
    "row_max": (1, 1), "row_min": (1, 1), "row_sum": (1, 1), "frexp": (1, 1), "complex": (1, 2), **dict.fromkeys(COMPLEX_PARTS, (1, 1)), **{name: (count, count) for name, count in NUMBER_FUNCTIONS.items()},
}  # fmt: skip
_TILE_FUNCTIONS = ("dot", "matmul", "transpose", "row_max", "row_min", "row_sum")
_RESHAPES = ("reshape", "ravel", "flatten")
CREATORS = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like")
STATISTICS = ("mean", "var", "std", "norm")
"""Reductions that are made of sums."""
UNREAD = "this could not be read"
"""The message about a `syntax.Broken`; whoever read the text has said more."""
FUNCTIONS = (*_ARITY, *_RESHAPES, *CREATORS, *STATISTICS, "median", "reduce", "grid", "range", "shared", "barrier", *RANDOM)


class ExpressionChecker:
    """Types expressions in the scope the walk is at."""

    def __init__(self, context: Context, sizes: SizeChecker, typing: Typing, arrays: ArrayTable, elements: ElementBuilder) -> None:
        self.context = context
        self.sizes = sizes
        self.typing = typing
        self.arrays = arrays
        self.elements = elements
        self.random = RandomDraws(context, typing)
        self.number_functions = NumberFunctions(context, typing)
        self.slices = SliceChecker(context, sizes, typing, elements, self.expr)
        self.masks = MaskChecker(context, sizes)
        self.reshapes = ReshapeChecker(context, sizes, typing)
        self.picks = PickChecker(context, sizes, typing, elements, self.slices, self.expr)

    # -- names --------------------------------------------------------------------------------------------------------

    def unbound(self, name: str, span: Span) -> Expr:
        """A name that nothing declares: in ZynML it is a size, to be found from the accesses."""
        if self.context.is_python:
            raise self.unknown(name, span)
        self.context.state.equations.used.setdefault(name, span)
        return SizeValue(self.context.state.solution.of(name), span=span)

    def unknown(self, name: str, span: Span) -> Skip:
        known = [n for n in self.context.scope.visible() if "$" not in n]
        return self.context.fail("TW002", f"unknown name '{name}'", span, suggest(name, known) or f"known names: {', '.join(known)}")

    def name(self, node: syntax.Name) -> Expr:
        binding = self.context.scope.find(node.id)
        if binding is None:
            return self.unbound(node.id, node.span)
        if isinstance(binding, Poison):
            raise Skip
        if isinstance(binding, Absent):
            raise self.absent(node.id, node.span)
        if isinstance(binding, VariableSlot):
            return Local(binding.var, span=node.span)
        if isinstance(binding, Alias):
            return replace(binding.value, span=node.span)
        if isinstance(binding, TileValue):
            return self.elements.tile_value(binding, node.span)
        if isinstance(binding, SharedArray):
            self.arrays.on_read(binding.array, node.span)
            return self.slices.view(binding.array, binding.lead, (), node.span)
        if isinstance(binding, LoopVar):
            return IndexRef(binding, span=node.span)
        if isinstance(binding, ScalarInfo) and binding.weak == "index":
            return self.sizes.numbers.parameter(binding, node.span)
        if isinstance(binding, ScalarInfo):
            return ScalarRef(binding, span=node.span)
        if isinstance(binding, ArrayInfo):
            self.arrays.on_read(binding, node.span)
            return Whole(binding, span=node.span)
        raise self.context.fail("TW009", f"'{node.id}' is a tuple, not a number", node.span, f"take an item, as in {node.id}[0]")

    def absent(self, name: str, span: Span) -> Skip:
        none, test = ("None", "is not None") if self.context.is_python else ("none", "!= none")
        return self.context.fail("TW009", f"'{name}' is {none} here", span, f"use it under 'if {name} {test}:'")

    def is_none(self, node: syntax.Expr) -> bool:
        """Whether it is a parameter that the call left out."""
        if isinstance(node, syntax.Nothing):
            return True
        binding = self.context.scope.find(node.id) if isinstance(node, syntax.Name) else None
        if isinstance(binding, Absent):
            return True
        if isinstance(binding, Poison):
            raise Skip
        if binding is None:
            self.expr(node)
        return False

    def array(self, node: syntax.Expr) -> ArrayInfo | Expr | None:
        """The array (or array value) an expression names, or None when it is something else."""
        dotted = _dotted(node)
        if dotted is None:
            return None
        binding = self.context.scope.find(dotted)
        if isinstance(binding, ArrayInfo):
            return binding
        if isinstance(binding, SharedArray):
            return binding.array
        if isinstance(binding, Alias) and binding.value.shape:
            return binding.value
        if isinstance(binding, TileValue):
            return self.elements.tile_value(binding, node.span)
        if isinstance(binding, Poison):
            raise Skip
        if isinstance(binding, Absent):
            raise self.absent(dotted, node.span)
        return None

    def extents(self, node: syntax.Expr) -> tuple[Expr, ...] | None:
        """The items of a tuple of numbers: `x.shape`, a tuple, a name of one; None when it is no tuple."""
        if isinstance(node, syntax.Tuple | syntax.List):
            return tuple(self.expr(item) for item in node.items)
        if isinstance(node, syntax.Attribute) and node.name == "shape":
            array = self.array(node.value)
            if array is None:
                raise self.context.fail("TW009", f"'{_text(node.value)}' is not an array and has no shape", node.span)
            self.masks.refuse(array.shape, node.span)
            return tuple(SizeValue(s, span=node.span) for s in array.shape[len(self.lead(node.value)) :])
        if isinstance(node, syntax.Name):
            binding = self.context.scope.find(node.id)
            return binding if isinstance(binding, tuple) else None
        if isinstance(node, syntax.Call) and isinstance(node.function, syntax.Name) and node.function.id == "frexp":
            self._count_arguments("frexp", node)
            return self.number_functions.frexp(self.expr(node.args[0].value), node.span)
        if isinstance(node, syntax.Index) and len(node.indices) == 1 and isinstance(node.indices[0], syntax.Slice) and _may_be_tuple(node.value):
            items = self.extents(node.value)
            return None if items is None else items[slice(*map(self._edge, (node.indices[0].lo, node.indices[0].hi, node.indices[0].step)))]
        return None

    def _edge(self, node: syntax.Expr | None) -> int | None:
        """An end of a slice of a shape."""
        value = None if node is None else self.expr(node)
        if node is not None and (not isinstance(value, Const) or not isinstance(value.value, int)):
            raise self.context.fail("TW016", "a shape is sliced with constant integers", node.span)
        return value.value if isinstance(value, Const) and isinstance(value.value, int) else None

    # -- expressions --------------------------------------------------------------------------------------------------

    def expr(self, node: syntax.Expr) -> Expr:
        """The typed expression; reports and raises Skip where there is none."""
        span = node.span
        if isinstance(node, syntax.Number) and node.given and isinstance(node.value, int):
            return SizeValue(Size.of(node.value), span=span)
        if isinstance(node, syntax.Number | syntax.Bool):
            return self.typing.literal(node.value, span)
        if isinstance(node, syntax.Name):
            return self.name(node)
        if isinstance(node, syntax.IsNone):
            return Const(self.is_none(node.value) != node.negated, dtypes.bool_, span=span)
        if isinstance(node, syntax.Nothing):
            raise self.context.fail("TW009", "None is no number", span, "compare it with 'is None', or pass it to a parameter that may be left out")
        if isinstance(node, syntax.Binary):
            return self.operator(node)
        if isinstance(node, syntax.Unary):
            operand = self.expr(node.operand)
            return self.typing.negate(operand, span) if node.op == "-" else self.typing.invert(node.op, operand, span)
        if isinstance(node, syntax.Index):
            return self.indexed(node)
        if isinstance(node, syntax.Call):
            return self.call(node)
        if isinstance(node, syntax.IfExpr):
            cond = self.expr(node.cond)
            if is_decided(node.cond) and (known := constant_of(cond)) is not None:
                return self.expr(node.then if known else node.otherwise)
            then, otherwise = self.aside(node.then, cond), self.aside(node.otherwise, cond)
            if then[1] or otherwise[1]:
                return self.elements.late(cond, then, otherwise, span)
            return self.typing.select(cond, then[0], otherwise[0], span, lazy=True)
        if isinstance(node, syntax.ReduceExpr):
            return self.reduction(node)
        if isinstance(node, syntax.Attribute):
            return self.attribute(node)
        if isinstance(node, syntax.Pipe):
            first = syntax.Argument(node.value, span=node.value.span)
            return self.call(replace(node.call, args=(first, *node.call.args), span=span))
        if isinstance(node, syntax.Broken):
            raise self.context.fail("TW005", UNREAD, span)
        kind = type(node).__name__.lower()
        raise self.context.fail("TW005", f"a {kind} cannot be used as a number in a kernel", span)

    def operator(self, node: syntax.Binary) -> Expr:
        if node.op in ("and", "or"):
            first = self.expr(node.left)
            left = self.typing.logical(first, node.span)
            known = constant_of(left) if is_decided(node.left) else None
            if known is not None:
                return left if bool(known) == (node.op == "or") else self.expr(node.right)
            value, before = self.aside(node.right, left)
            if node.valued and not (value.dtype.is_bool and (node.op == "and" or first.dtype.is_bool)):
                raise self.context.fail(
                    "TW009", f"'a {node.op} b' of numbers is one of them in Python; in a kernel it is true or false", node.span,
                    f"write {'b if a != 0 else a' if node.op == 'and' else 'a if a != 0 else b'}, or compare the operands",
                )  # fmt: skip
            right = self.typing.logical(value, node.span)
            if before:
                sides: tuple[Late, Late] = ((right, before), (FALSE, ())) if node.op == "and" else ((TRUE, ()), (right, before))
                return self.elements.late(left, *sides, node.span)
            if left.shape or right.shape or not _reads(right):
                return self.typing.apply(node.op, [left, right], (dtypes.bool_, ""), node.span)
            # The right side reads memory: only where the left one lets it.
            then, otherwise = (right, FALSE) if node.op == "and" else (TRUE, right)
            return Choose(left, then, otherwise, dtypes.bool_, span=node.span)
        a, b = self.expr(node.left), self.expr(node.right)
        if node.op == "@":
            return self.elements.matrix_product("'@'", a, b, node.span)
        if node.op not in COMPARISONS and node.op not in ("+", "-", "*", "/", "zdiv", "//", "%", "**", "&", "|", "^", "<<", ">>"):
            raise self.context.fail("TW005", f"operator '{node.op}' is not available in kernels", node.span)
        return self.typing.binary(node.op, a, b, node.span)

    def attribute(self, node: syntax.Attribute) -> Expr:
        array = self.array(node)
        if array is not None:
            if isinstance(array, ArrayInfo):
                self.arrays.on_read(array, node.span)
                return Whole(array, span=node.span)
            return array
        if node.name == "T":
            return self.elements.tile_function("transpose", [self.expr(node.value)], node.span)
        if node.name in ("real", "imag") and (self.array(node.value) is not None or _dotted(node.value) is None or self.context.scope.find(_dotted(node.value) or "") is not None):
            return self.typing.real_or_imag(node.name, self.expr(node.value), node.span)
        owner = self.array(node.value)
        if owner is not None and node.name == "size":
            self.masks.refuse(owner.shape, node.span)
            return SizeValue(product(owner.shape[len(self.lead(node.value)) :]), span=node.span)
        if owner is not None and node.name == "ndim":
            return self.typing.literal(len(owner.shape) - len(self.lead(node.value)), node.span)
        if owner is not None:
            known = ["shape", "size", "ndim", "dtype", "real", "imag", "T"]
            if node.name in ("shape", "dtype"):
                what = "a tuple of sizes" if node.name == "shape" else "a type"
                help = "write m, n = x.shape, or x.shape[0]" if node.name == "shape" else "use it where a dtype is given: tw.zeros((n,), x.dtype)"
                raise self.context.fail("TW005", f"'{_text(node)}' is {what} and no number", node.span, help)
            raise self.context.fail(
                "TW002", f"an array has no attribute '{node.name}' in a kernel", node.span,
                suggest(node.name, known) or f"it has {', '.join(known)}",
            )  # fmt: skip
        raise self.context.fail("TW002", f"unknown name '{_text(node)}'", node.span)

    # -- accesses -----------------------------------------------------------------------------------------------------

    def indexed(self, node: syntax.Index) -> Expr:
        base, indices = flatten_index(node)
        if base is not node.value and self.index_arrays(indices[: len(indices) - len(node.indices)]):
            # `x[rows][0]` is an index of what `x[rows]` is.
            base, indices = node.value, node.indices
        items = self.extents(base) if isinstance(base, syntax.Attribute | syntax.Tuple | syntax.Name | syntax.Call) and (
            not isinstance(base, syntax.Attribute) or base.name == "shape"
        ) else None  # fmt: skip
        if items is not None:
            return self._item(items, indices, node)
        array = self.array(base)
        if array is None:
            array = self.arrays.implicit_array(base)
        if array is None and (_dotted(base) is None or (isinstance(base, syntax.Attribute) and base.name == "T")):
            value = self.expr(base)
            array = value.array if isinstance(value, Whole) else value if value.shape else None
        if array is None:
            name = _dotted(base)
            if name is not None and self.context.scope.find(name) is None:
                if not self.context.is_python and is_output(name):
                    raise self.context.fail("TW017", f"'{name}' is read before anything is written to it", node.span, f"store to {name}[…] first")
                arrays = [n for n in self.context.scope.visible() if isinstance(self.context.scope.find(n), ArrayInfo)]
                raise self.context.fail("TW002", f"unknown name '{name}'", base.span, suggest(name, arrays) or f"known arrays: {', '.join(arrays)}")
            raise self.context.fail("TW003", f"'{_text(base)}' is not an array and cannot be indexed", node.span)
        if isinstance(array, ArrayInfo):
            self.arrays.on_read(array, node.span)
        lead = self.lead(base)
        indices = expanded(indices, len(array.shape) - len(lead))
        picks = self.index_arrays(indices)
        is_part = len(indices) < len(array.shape) - len(lead) or any(isinstance(i, syntax.Slice) for i in indices)
        adds = any(isinstance(i, syntax.Nothing) or (isinstance(i, syntax.Slice) and i.step is not None) for i in indices)
        if picks or adds or (is_part and not isinstance(array, ArrayInfo | TypedView)):
            given = sum(not isinstance(i, syntax.Nothing) for i in indices)
            if given > len(array.shape) - len(lead):
                raise self.context.fail("TW003", f"'{_text(base)}' has rank {len(array.shape) - len(lead)} but is indexed with {given} {'index' if given == 1 else 'indices'}", node.span)
            if any(value.dtype.is_bool for value in picks.values()):
                return self.masked(_text(base), array, lead, indices, picks, node.span)
            return self.picks.picked(_text(base), array, lead, indices, picks, node.span)
        self.masks.refuse(array.shape, node.span)
        if isinstance(array, ArrayInfo):
            if is_part:
                return self.slices.view(array, lead, indices, node.span)
            return Element(array, self.slices.access(array, indices, node.span, lead=lead), span=node.span)
        if self.context.loops:
            return self.slices.part_of_tile(_text(base), array, indices, node.span)
        values = self.slices.index_values(_text(base), array.shape, indices, node.span)
        return self.elements.pick(array, values, node.span)

    def masked(self, name: str, array: ArrayInfo | Expr, lead: tuple[Expr, ...], indices: tuple[syntax.Expr, ...], arrays: dict[int, Expr], span: Span) -> Expr:
        """`x[mask]`"""
        if len(indices) != 1:
            raise self.context.fail("TW005", f"'{name}' is indexed with a mask and with something else", span, "a mask is the only index; choose elements with tw.where")
        value = array if not isinstance(array, ArrayInfo) else self.slices.view(array, lead, (), span) if lead else Whole(array, span=span)
        return self.masks.masked(name, value, arrays[0], span)

    def index_arrays(self, indices: tuple[syntax.Expr, ...]) -> dict[int, Expr]:
        """The indices that are arrays, by position."""
        found: dict[int, Expr] = {}
        for position, node in enumerate(indices):
            if not isinstance(node, syntax.Slice | syntax.Nothing | syntax.Rest) and self._names_array(node):
                value = self.typing.settled(self.expr(node))
                if value.shape:
                    found[position] = value
        return found

    def _names_array(self, node: syntax.Expr) -> bool:
        """Whether an expression speaks of a whole array, or of a part of one."""
        if isinstance(node, syntax.Attribute):
            return False
        if isinstance(node, syntax.Name):
            return self.array(node) is not None
        if isinstance(node, syntax.Index):
            base, indices = flatten_index(node)
            array = self.array(base)
            few = array is not None and len(indices) < len(array.shape) - len(self.lead(base))
            return few or any(isinstance(i, syntax.Slice | syntax.Nothing | syntax.Rest) or self._names_array(i) for i in indices)
        if isinstance(node, syntax.ReduceExpr):
            return node.axis is not None
        parts: tuple[syntax.Expr, ...] = ()
        if isinstance(node, syntax.Binary):
            parts = (node.left, node.right)
        elif isinstance(node, syntax.Unary):
            parts = (node.operand,)
        elif isinstance(node, syntax.Call) and not (isinstance(node.function, syntax.Name) and node.function.id == "len"):
            owner = (node.function.value,) if isinstance(node.function, syntax.Attribute) else ()
            parts = (*owner, *(a.value for a in node.args))
        elif isinstance(node, syntax.IfExpr):
            parts = (node.cond, node.then, node.otherwise)
        return any(self._names_array(part) for part in parts)

    def lead(self, base: syntax.Expr) -> tuple[Expr, ...]:
        """The indices that come before those written: which of the shared arrays of one name it is."""
        binding = self.context.scope.find(base.id) if isinstance(base, syntax.Name) else None
        return binding.lead if isinstance(binding, SharedArray) else ()

    def _item(self, items: tuple[Expr, ...], indices: tuple[syntax.Expr, ...], node: syntax.Index) -> Expr:
        position = self.expr(indices[0])
        if len(indices) != 1 or not isinstance(position, Const) or not isinstance(position.value, int):
            raise self.context.fail("TW016", "a shape is indexed with one constant integer", node.span)
        if not -len(items) <= position.value < len(items):
            raise self.context.fail("TW013", f"axis {position.value} of something with {len(items)} axes", node.span)
        return items[position.value]

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, node: syntax.Call) -> Expr:
        span = node.span
        if isinstance(node.function, syntax.Attribute) and node.function.name == "dtype" and self.array(node.function.value) is not None:
            if len(node.args) != 1 or node.args[0].keyword is not None:
                raise self.context.fail("TW016", f"{_text(node.function)}() takes 1 argument, got {len(node.args)}", span)
            return self.typing.cast(self.expr(node.args[0].value), self.dtype_argument(node.function), span)
        if isinstance(node.function, syntax.Attribute) and node.function.name in _RESHAPES:
            owner = syntax.Argument(node.function.value, span=node.function.value.span)
            return self.reshape(node.function.name, (owner, *node.args), span)
        if isinstance(node.function, syntax.Broken):
            raise self.context.fail("TW005", UNREAD, span)
        if not isinstance(node.function, syntax.Name):
            raise self.context.fail("TW005", f"'{_text(node.function)}' cannot be called in a kernel", span)
        name = node.function.id
        if dtypes.is_name(name):
            if len(node.args) != 1:
                raise self.context.fail("TW016", f"{name}() takes 1 argument, got {len(node.args)}", span)
            if node.args[0].keyword is not None:
                raise self.context.fail("TW016", f"{name}() has no argument '{node.args[0].keyword}'", node.args[0].span)
            return self.typing.cast(self.expr(node.args[0].value), self.scalar_dtype(name, span), span)
        if name in CREATORS and self.context.loops:
            return self.filled(name, node)
        if name in CREATORS:
            raise self.context.fail("TW005", f"{name}() must be assigned to a name at the top of the kernel", span, f"write out = {name}(…)")
        if name == "shared":
            raise self.context.fail("TW016", "shared() takes shape, dtype and is assigned to a new name", span, "write x = shared((n,), f32)")
        if name in RANDOM:
            return self._random(name, node)
        if name in STATISTICS:
            return self.reduction(self._statistic_call(name, node))
        if name in _RESHAPES:
            return self.reshape(name, node.args, span)
        if name not in _ARITY:
            raise self.context.fail(
                "TW002", f"unknown function '{name}'", node.function.span, help_for(name, FUNCTIONS, self.context.is_python) or f"known: {', '.join(_ARITY)}"
            )
        self._count_arguments(name, node)
        if name == "frexp":
            raise self.context.fail("TW009", "frexp() gives two numbers", span, "write m, e = frexp(x), or take one of them: frexp(x)[0]")
        if name == "len":
            return self._length(node)
        if name == "cast":
            return self.typing.cast(self.expr(node.args[0].value), self.dtype_argument(node.args[1].value), span)
        if name == "bitcast":
            return self.typing.bitcast(self.expr(node.args[0].value), self.dtype_argument(node.args[1].value), span)
        if name == "gelu" and len(node.args) == 2:
            flag = node.args[1].value
            if not isinstance(flag, syntax.Bool):
                raise self.context.fail("TW016", "approximate must be True or False", flag.span)
            return self.typing.composite("gelu", self.expr(node.args[0].value), span, flag.value)
        return self.apply_function(name, [self.expr(a.value) for a in node.args], span)

    def reshape(self, name: str, args: tuple[syntax.Argument, ...], span: Span) -> Expr:
        """`reshape(x, (a, b))`, `x.reshape(a, b)`, `x.ravel()`"""
        wrong = next((a for a in args if a.keyword not in (None, "shape")), None)
        if wrong is not None:
            raise self.context.fail("TW016", f"{name}() has no argument '{wrong.keyword}'", wrong.span)
        if len(args) != 1 if name != "reshape" else len(args) < 2:
            raise self.context.fail("TW016", f"{name}() takes an array{' and a shape' if name == 'reshape' else ''}, got {len(args)} argument(s)", span, "write x.reshape(a, b); one extent may be -1")
        value = self.expr(args[0].value)
        if not value.shape:
            raise self.context.fail("TW003", f"{name}() takes an array, got a number ({value.dtype})", span)
        self.masks.refuse(value.shape, span)
        extents: list[Size | None] = []
        for argument in args[1:]:
            inner = argument.value.items if isinstance(argument.value, syntax.Tuple | syntax.List) else (argument.value,)
            for node in inner:
                extents += [None] if _is_minus_one(node) else self.shape_argument(node)
        return self.reshapes.reshaped(value, extents if name == "reshape" else [None], span)

    def _statistic_call(self, name: str, node: syntax.Call) -> syntax.ReduceExpr:
        """ZynML's `mean(x, axis=k)` and its kin."""
        given = {a.keyword or ("x", "axis", "")[position]: a for position, a in enumerate(node.args[:3])}
        if "x" not in given or len(given) != len(node.args) or not given.keys() <= {"x", "axis", "keepdims"}:
            usage = f"write {name}(x), {name}(x, axis=k) or {name}(x, axis=k, keepdims=true)"
            raise self.context.fail("TW016", f"{name}() takes an array and an axis, got {len(node.args)} argument(s)", node.span, usage)
        keep = given["keepdims"].value if "keepdims" in given else syntax.Bool(False, span=node.span)
        if not isinstance(keep, syntax.Bool):
            raise self.context.fail("TW016", "keepdims must be true or false", keep.span)
        return syntax.ReduceExpr(name, given["x"].value, given["axis"].value if "axis" in given else None, keep.value, span=node.span)

    def _random(self, name: str, node: syntax.Call) -> Expr:
        dtype = None
        for argument in node.args:
            if argument.keyword == "dtype":
                dtype = self.dtype_argument(argument.value)
            elif argument.keyword is not None:
                raise self.context.fail(
                    "TW016", f"{name}() has no argument '{argument.keyword}' in a kernel", argument.span, "it takes a seed, indices and dtype="
                )
        given = [self.expr(a.value) for a in node.args if a.keyword is None]
        return self.random.draw(name, given, dtype, node.span)

    def _count_arguments(self, name: str, node: syntax.Call) -> None:
        least, most = _ARITY[name]
        if not least <= len(node.args) <= most:
            wanted = f"{least} or more" if most == 99 else str(least) if least == most else f"{least} to {most}"
            noun = "argument" if wanted == "1" else "arguments"
            raise self.context.fail("TW016", f"{name}() takes {wanted} {noun}, got {len(node.args)}", node.span)
        self._keywords(name, node)

    def _keywords(self, name: str, node: syntax.Call) -> None:
        allowed = {"gelu": ["approximate"], "cast": ["dtype"], "bitcast": ["dtype"]}.get(name, [])
        for argument in node.args:
            if argument.keyword is not None and argument.keyword not in allowed:
                raise self.context.fail("TW016", f"{name}() has no argument '{argument.keyword}'", argument.span)

    def apply_function(self, name: str, args: list[Expr], span: Span) -> Expr:
        if name in FLOAT_FUNCTIONS:
            return self.typing.function(name, args[0], span)
        if name in NUMBER_FUNCTIONS:
            return self.number_functions.build(name, args, span)
        if name in ROUNDINGS:
            return self.typing.rounding(name, args[0], span)
        if name == "abs":
            return self.typing.absolute(args[0], span)
        if name in ("min", "max", "minimum", "maximum"):
            return self.typing.extreme(name[:3], args, span)
        if name in _TILE_FUNCTIONS:
            return self.elements.tile_function(name, args, span)
        if name == "pow":
            return self.typing.power(args[0], args[1], span)
        if name == "clamp":
            return self.typing.extreme("min", [self.typing.extreme("max", args[:2], span), args[2]], span)
        if name == "fma":
            return self.typing.fused(args, span)
        if name in ("where", "select"):
            return self.typing.select(args[0], args[1], args[2], span, lazy=False)
        if name == "complex":
            return self.typing.complex(args, span)
        if name in COMPLEX_PARTS:
            return self.typing.conjugate(args[0], span) if name == "conj" else self.typing.real_or_imag(name, args[0], span)
        if name == "isnan":
            if not args[0].dtype.is_inexact:
                return Const(False, dtypes.bool_, span=span)
            return self.typing.apply("isnan", args, (args[0].dtype, ""), span, dtypes.bool_)
        return self.typing.composite(name, args[0], span)

    def _length(self, node: syntax.Call) -> Expr:
        argument = node.args[0].value
        items = self.extents(argument)
        if items is not None:
            return self.typing.literal(len(items), node.span)
        array = self.array(argument)
        if array is None or not array.shape:
            raise self.context.fail("TW009", f"len() takes an array, got '{_text(argument)}'", node.span)
        self.masks.refuse(array.shape, node.span)
        return SizeValue(array.shape[len(self.lead(argument))], span=node.span)

    # -- dtypes -------------------------------------------------------------------------------------------------------

    def scalar_dtype(self, name: str, span: Span) -> DType:
        dtype = dtypes.by_name(name)
        if dtype not in dtypes.SCALARS and not dtype.is_complex:
            raise self.context.fail("TW005", f"{dtype} holds packed blocks and cannot be computed with", span)
        return dtype

    def dtype_argument(self, node: syntax.Expr) -> DType:
        """A dtype as written: its name, or the dtype of an array."""
        if isinstance(node, syntax.Name | syntax.String):
            name = node.id if isinstance(node, syntax.Name) else node.value
            if dtypes.is_name(name):
                return self.scalar_dtype(name, node.span)
            known = [d.name for d in (*dtypes.SCALARS, *dtypes.COMPLEX)]
            raise self.context.fail("TW002", f"unknown dtype '{name}'", node.span, suggest(name, known) or f"known: {', '.join(known)}")
        if isinstance(node, syntax.Attribute) and node.name == "dtype":
            array = self.array(node.value)
            if array is not None:
                return array.dtype
        raise self.context.fail("TW016", "a dtype is expected here", node.span, "write for example f32")

    # -- reductions ---------------------------------------------------------------------------------------------------

    def reduction(self, node: syntax.ReduceExpr) -> Expr:
        span = node.span
        value = self.typing.settled(self.expr(node.value))
        if not value.shape:
            name = node.op if node.op in STATISTICS else "reduce"
            raise self.context.fail("TW003", f"{name}() takes an array, got a number ({value.dtype})", span)
        axes = self._axes(node.axis, len(value.shape))
        if value.dtype.is_complex and node.op not in ("add", "mul", "and", "or", "mean", "norm"):
            self.typing.refuse_complex(node.op, span)
        if node.op in STATISTICS:
            return self._statistic(node.op, value, axes, node.keep, span)
        return self._reduced(node.op, value, axes, node.keep, span)

    def _statistic(self, kind: str, value: Expr, axes: tuple[int, ...], keep: bool, span: Span) -> Expr:
        """Mean, variance, deviation and norm: of sums of floats."""
        value = self.typing.convert(value, self.typing.as_float((value.dtype, ""))[0])
        mask = self.masks.unmasked(value, span)[1]
        if mask is None:
            count: Expr = self.sizes.numbers.value(product([value.shape[a] for a in axes]), span)
        else:
            count = self.typing.convert(self._reduced("add", self.typing.convert(mask, dtypes.i64), tuple(range(len(mask.shape))), False, span), value.dtype)

        if kind == "norm" and value.dtype.is_complex:
            value = self.typing.absolute(value, span)

        def mean_of(terms: Expr, kept: bool) -> Expr:
            return self.typing.binary("/", self._reduced("add", terms, axes, kept, span), count, span)

        def square(of: Expr) -> Expr:
            return self.typing.binary("*", of, of, span)

        if kind == "mean":
            return mean_of(value, keep)
        if kind == "norm":
            return self.typing.function("sqrt", self._reduced("add", square(value), axes, keep, span), span)
        spread = mean_of(square(self.typing.binary("-", value, mean_of(value, len(axes) < len(value.shape)), span)), keep)
        return self.typing.function("sqrt", spread, span) if kind == "std" else spread

    def _selected(self, op: str, value: Expr, keep: bool, span: Span) -> Expr:
        """A value of which a mask selects elements, for a reduction: the others count for nothing."""
        whole, mask = self.masks.unmasked(value, span)
        assert mask is not None
        if op in ("argmin", "argmax") or keep:
            what = f"{op}()" if op in ("argmin", "argmax") else "keepdims="
            raise self.context.fail("TW005", f"{what} of elements that a mask selects", span, "choose with tw.where(mask, x, other) first")
        nothing = Const(identity(op, whole.dtype), whole.dtype, span=span)
        return self.typing.select(mask, whole, nothing, span, lazy=False)

    def _reduced(self, op: str, value: Expr, axes: tuple[int, ...], keep: bool, span: Span) -> Expr:
        if op in ("and", "or"):
            value = self.typing.logical(value, span)
        elif op not in ("argmin", "argmax"):
            value = self.typing.convert(value, sum_dtype(value.dtype, op))
        if is_masked(value.shape):
            value = self._selected(op, value, keep, span)
            axes = tuple(range(len(value.shape)))
        shape = tuple(ONE if axis in axes else s for axis, s in enumerate(value.shape) if keep or axis not in axes)
        if op in ("argmin", "argmax"):
            self.sizes.not_empty(op, [value.shape[a] for a in axes], shape, span)
        if self.context.guarded and not self.context.loops and shape:
            raise self.context.fail("TW005", "a reduction along some axes cannot be inside an if or a while", span, "compute it before, into a variable")
        if self.context.loops or self.context.guarded:
            return self.elements.tile_reduction(op, value, axes, keep, span)
        reduce = Reduce(op, value, axes, sum_dtype(value.dtype, op), shape, span=span)
        return self.arrays.materialise(reduce)

    def _axes(self, node: syntax.Expr | None, rank: int) -> tuple[int, ...]:
        if node is None:
            return tuple(range(rank))
        items = self.extents(node) if isinstance(node, syntax.Tuple | syntax.List) else (self.expr(node),)
        axes: set[int] = set()
        for item in items or ():
            if not isinstance(item, Const) or not isinstance(item.value, int):
                raise self.context.fail("TW016", "axis must be a constant integer", node.span)
            if not -rank <= item.value < rank:
                raise self.context.fail("TW003", f"axis {item.value} of an array of rank {rank}", node.span)
            axes.add(item.value % rank)
        return tuple(sorted(axes))

    def aside(self, node: syntax.Expr, cond: Expr | None = None) -> Late:
        """An expression that is evaluated only under a condition, and the statements it needs first."""
        with self.context.condition(cond), self.context.collected() as statements:
            value = self.expr(node)
        return value, tuple(statements)

    # -- shapes and arrays of one value -------------------------------------------------------------------------------

    def filled(self, maker: str, node: syntax.Call) -> Expr:
        """`zeros(64, d)` and its kin inside a loop: a tile of one value."""
        if maker not in ("zeros", "ones", "full"):
            raise self.context.fail("TW005", f"{maker}() in a loop makes nothing", node.span, "write zeros(…) or full(…), or make the array at the top")
        named = {a.keyword: a.value for a in node.args if a.keyword is not None}
        given = [a.value for a in node.args if a.keyword is None]
        if given and self.extents(given[0]) is None and maker != "full" and all(self.counts(n) for n in given):
            # zeros(64, d)
            shape = tuple(s for n in given for s in self.shape_argument(n))
            given = []
        else:
            node_of_shape = given.pop(0) if given else named.pop("shape", None)
            if node_of_shape is None:
                raise self.context.fail("TW016", f"{maker}() takes a shape", node.span, f"write {maker}(64, 64)")
            shape = self.shape_argument(node_of_shape)
        value: Expr = self.typing.literal(float(maker == "ones"), node.span)
        if maker == "full":
            filling = given.pop(0) if given else named.pop("value", None)
            if filling is None:
                raise self.context.fail("TW016", "full() takes shape, value", node.span)
            value = self.expr(filling)
        wanted = given.pop(0) if given else named.pop("dtype", None)
        if given or named:
            raise self.context.fail("TW016", f"{maker}() takes a shape and a dtype, got {len(node.args)} arguments", node.span)
        if wanted is not None:
            value = self.typing.assignable(value, self.dtype_argument(wanted), f"{maker}()", node.span)
        if value.shape or not isinstance(value, Const):
            raise self.context.fail("TW005", f"{maker}() in a loop takes a constant", node.span, "add the value to zeros(…)")
        return replace(value, shape=shape)

    def counts(self, node: syntax.Expr) -> bool:
        """Whether the argument is an extent, not a dtype."""
        if isinstance(node, syntax.Attribute) and node.name == "dtype":
            return False
        try:
            self.dtype_argument(node)
        except Skip:
            self.context.sink.items.pop()
            return True
        return False

    def shape_argument(self, node: syntax.Expr) -> Shape:
        """A shape as written: a tuple, or one extent."""
        items = self.extents(node)
        if items is None:
            items = (self.expr(node),)
        written = node.items if isinstance(node, syntax.Tuple | syntax.List) else (node,) * len(items)
        sizes: list[Size] = []
        for item, source in zip(items, written, strict=True):
            size = size_of(item)
            if size is None:
                raise self.context.fail(
                    "TW014", f"extent {show_expr(item)} is not made of sizes of the inputs and whole numbers", node.span,
                    "use x.shape[…], an int parameter or a constant",
                )  # fmt: skip
            sizes.append(self.sizes.numbers.extent(size, source.id if isinstance(source, syntax.Name) else "", source.span))
        return tuple(sizes)


def _may_be_tuple(node: syntax.Expr) -> bool:
    return isinstance(node, syntax.Name | syntax.Tuple) or (isinstance(node, syntax.Attribute) and node.name == "shape")


def _is_minus_one(node: syntax.Expr) -> bool:
    if isinstance(node, syntax.Unary) and node.op == "-":
        return isinstance(node.operand, syntax.Number) and node.operand.value == 1
    return isinstance(node, syntax.Number) and node.value == -1


def is_decided(cond: syntax.Expr) -> bool:
    """Whether a condition asks if a parameter was left out: what it excludes is not looked at."""
    return any(isinstance(node, syntax.IsNone) for node in nodes(cond))


def flatten_index(node: syntax.Index) -> tuple[syntax.Expr, tuple[syntax.Expr, ...]]:
    """`x[i][j]` is `x[i, j]`; an index of a slice is not one of the array."""
    if isinstance(node.value, syntax.Index) and not any(isinstance(i, syntax.Slice | syntax.Nothing | syntax.Rest) for i in node.value.indices):
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
