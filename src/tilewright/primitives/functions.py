"""Functions of numbers as ops: what a user's lambda, or a name such as 'sum', becomes inside a primitive.

In: the tree of a function (`frontend.python.functions`) and the dtypes it is called with. It is checked and lowered as the body
of a loop over arrays, so that everything kernels know about numbers holds for it too. Out: a `ScalarFunction`, whose ops
`apply` puts into a kernel. A `Monoid` is an associative function of two numbers with, where there is one, the number that
changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from tilewright.base.dtypes import DType, f32, f64, i64
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.ir.nodes import Op, Value
from tilewright.ir.nodes import walk as walk_ops
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import Scalar, dtype_of
from tilewright.primitives.code import Code, Num
from tilewright.tree import syntax
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.syntax import Argument, Expr, Function, Stmt
from tilewright.tree.typed import ArrayArg, Cast, SetVar, Store, TypedKernel
from tilewright.tree.typed_walk import walk

_VALUE = "value$"
_OUT = "out$"
_ARGUMENT = "argument$"
_INDEX = "index$"


@record
class ScalarFunction:
    """Ops that compute one number from others."""

    arguments: tuple[Value, ...]
    ops: tuple[Op, ...]
    value: Value
    key: str
    """Equal for functions that compute the same."""

    @property
    def result(self) -> DType:
        return dtype_of(self.value.type)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        return tuple(dtype_of(a.type) for a in self.arguments)

    def apply(self, code: Code, *numbers: Num) -> Num:
        mapping = {a: n.to(dtype_of(a.type)).value for a, n in zip(self.arguments, numbers, strict=True)}
        clone_ops(code.b, self.ops, mapping)
        return Num(code, mapping[self.value])

    @property
    def is_straight(self) -> bool:
        """Whether it has no branches or loops: it can be applied to vectors."""
        return not any(op.regions for op in self.ops)

    def apply_vector(self, code: Code, *vectors: Num) -> Num:
        """The function of each element."""
        width = vectors[0].width
        known = {a: v.to(dtype_of(a.type)).value for a, v in zip(self.arguments, vectors, strict=True)}
        for op in self.ops:
            if op.opcode == "const":
                known[op.results[0]] = code.b.op("broadcast", code.b.emit("const", [], op.attrs)[0], width=width)
            else:
                known[op.results[0]] = code.b.emit(op.opcode, [known[o] for o in op.operands], op.attrs)[0]
        return Num(code, known[self.value])


def scalar_function(tree: Function, dtypes: Sequence[DType], result: DType | None = None) -> ScalarFunction:
    """The function for arguments of these dtypes; its result is converted to `result` where that is given."""
    from tilewright.passes.routes import lower_function
    from tilewright.passes.runner import Trace

    wanted = len(tree.params)
    if wanted != len(dtypes):
        raise UserError.at("TW016", f"'{tree.name}' takes {wanted} number(s), but is called with {len(dtypes)}", tree.span)
    natural = _literal_dtype(tree) or _result_dtype(check_kernel(elementwise(tree, result or f64), [ArrayArg(d, 1) for d in dtypes]))
    final = result or natural
    typed = check_kernel(elementwise(tree, final), [ArrayArg(d, 1) for d in dtypes])
    kernel = lower_function(typed, Trace())
    (loop,) = (op for op in kernel.body.ops if op.opcode == "parallel")
    before = [op for op in kernel.body.ops if op is not loop]
    inside = [op for op in loop.regions[0].ops if op.opcode != "yield"]
    loads = {op.operands[0]: op for op in inside if op.opcode == "load"}
    (store,) = (op for op in inside if op.opcode == "store")
    arguments = []
    by_name = {param.name: load for param, load in loads.items()}
    for position, dtype in enumerate(dtypes):
        load = by_name.get(f"{_ARGUMENT}{position}")  # none where the function does not look at it
        arguments.append(load.results[0] if load is not None else Value(Scalar(dtype)))
    skipped = {id(op) for op in (*loads.values(), store)}
    ops = tuple(op for op in (*before, *inside) if id(op) not in skipped)
    loops = next((op for op in ops if op.opcode == "reduce"), None)
    if loops is not None:
        raise UserError.at("TW005", f"'{tree.name}' has a loop, which functions of primitives cannot have", loops.span or tree.span)
    ops = _needed(ops, store.operands[-1])
    text = repr((tree, tuple(d.name for d in dtypes), final.name))
    return ScalarFunction(tuple(arguments), ops, store.operands[-1], hashlib.sha256(text.encode()).hexdigest())


def _needed(ops: Sequence[Op], value: Value) -> tuple[Op, ...]:
    """The ops that the value depends on."""
    wanted, kept = {value}, []
    for op in reversed(ops):
        if wanted.intersection(op.results):
            kept.append(op)
            for inner in (op, *(o for region in op.regions for o in walk_ops(region))):
                wanted.update(inner.operands)
    return tuple(reversed(kept))


def elementwise(tree: Function, result: DType) -> Function:
    """A kernel that applies the function to every element of its arrays."""
    span = tree.span

    def name(text: str) -> Expr:
        return syntax.Name(text, span=span)

    def at(array: str) -> Expr:
        return syntax.Index(name(array), (name(_INDEX),), span=span)

    def call(function: str, *values: Expr) -> Expr:
        return syntax.Call(name(function), tuple(Argument(v, None) for v in values), span=span)

    arrays = [f"{_ARGUMENT}{k}" for k in range(len(tree.params))]
    last = tree.body[-1]
    assert isinstance(last, syntax.Return) and last.value is not None
    inner: list[Stmt] = [
        syntax.Let((p.name,), at(array), mutable=True, span=p.span) for p, array in zip(tree.params, arrays, strict=True)
    ]
    inner += tree.body[:-1]
    inner.append(syntax.Let((_VALUE,), last.value, mutable=True, span=last.span))
    inner.append(syntax.Assign(at(_OUT), call("cast", name(_VALUE), name(result.name)), span=last.span))
    extent = syntax.Index(syntax.Attribute(name(arrays[0]), "shape", span=span), (syntax.Number(0, span=span),), span=span)
    over = syntax.RangeExpr(syntax.Number(0, span=span), name("n$"), span=span)
    body = (
        syntax.Let(("n$",), extent, mutable=True, span=span),
        syntax.Let((_OUT,), call("empty", syntax.Tuple((name("n$"),), span=span), name(result.name)), mutable=True, span=span),
        syntax.For((_INDEX,), (over,), tuple(inner), "yes", span=span),
        syntax.Return(name(_OUT), span=span),
    )
    params = tuple(syntax.Param(array, syntax.Name("array"), None, span=p.span) for p, array in zip(tree.params, arrays, strict=True))
    return replace(tree, params=params, result=None, body=body)


def _literal_dtype(tree: Function) -> DType | None:
    """Of a function that is a number written down."""
    last = tree.body[-1]
    number = last.value.value if isinstance(last, syntax.Return) and isinstance(last.value, syntax.Number) else None
    return None if number is None else f32 if isinstance(number, float) else i64


def _result_dtype(typed: TypedKernel) -> DType:
    """The dtype of what the function returns."""
    for statement in walk(typed.body):
        if isinstance(statement, SetVar) and statement.var.name.startswith(_VALUE):
            return statement.var.dtype
    (store,) = (s for s in walk(typed.body) if isinstance(s, Store))  # a constant needs no variable
    return store.value.value.dtype if isinstance(store.value, Cast) else store.value.dtype


@record
class Monoid:
    """An associative function of two numbers of one dtype."""

    dtype: DType
    opcode: str = ""
    function: ScalarFunction | None = None

    @property
    def key(self) -> str:
        return f"{self.dtype}:{self.function.key if self.function else self.opcode}"

    @property
    def identity(self) -> int | float | bool | None:
        """The number that changes nothing: x combined with it is x, to the bit."""
        if self.function is not None:
            return None
        if self.opcode in ("min", "max") and self.dtype.is_float:
            return float("inf") if self.opcode == "min" else float("-inf")
        first = {"add": -0.0 if self.dtype.is_float else 0, "mul": 1, "min": self.dtype.max_value, "max": self.dtype.min_value}
        return {**first, "and": -1, "or": 0, "xor": 0}[self.opcode]

    def __call__(self, a: Num, b: Num) -> Num:
        if self.function is not None:
            return self.function.apply(a.code, a, b)
        return a.code.binary(self.opcode, a, b)
