"""Operators that compute each element by itself: arithmetic, functions, comparisons, conversions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tilewright.graphs.onnx.loops import X, call, cast, choose
from tilewright.graphs.onnx.operator_rules import NodeView, elementwise, is_float, operator
from tilewright.graphs.onnx.tensors import DTYPES
from tilewright.graphs.onnx.values import Known

BOOL = np.dtype(bool)
MOST_TERMS = 64
"""Inputs that one expression takes."""


def _truncated(a: X, b: X) -> X:
    """Integer division that rounds toward zero, from one that rounds down."""
    quotient = a // b
    return choose((a % b != 0) & ((a < 0) ^ (b < 0)), quotient + 1, quotient)


_ARITHMETIC: dict[str, Callable[[X, X], X]] = {"Add": lambda a, b: a + b, "Sub": lambda a, b: a - b, "Mul": lambda a, b: a * b}


def _pair(node: NodeView) -> tuple[Known, Known]:
    a, b = node.input(0), node.input(1)
    if a.dtype != b.dtype:
        raise node.error(f"its inputs are {a.dtype} and {b.dtype}", "TW009", "put a Cast before one of them")
    return a, b


@operator("Add", "Sub", "Mul")
def arithmetic(node: NodeView) -> Known:
    a, b = _pair(node)
    if a.dtype == BOOL:
        raise node.error("its inputs are bool", "TW009")
    return elementwise(node, (a, b), a.dtype, _ARITHMETIC[node.op])


@operator("Div", note="integers round toward zero")
def divide(node: NodeView) -> Known:
    a, b = _pair(node)
    if is_float(a.dtype):
        return elementwise(node, (a, b), a.dtype, lambda x, y: x / y)
    return elementwise(node, (a, b), a.dtype, _truncated if a.dtype.kind == "i" else lambda x, y: x // y)


@operator("Mod")
def modulo(node: NodeView) -> Known:
    a, b = _pair(node)
    if not node.integer("fmod"):
        return elementwise(node, (a, b), a.dtype, lambda x, y: x % y)
    if is_float(a.dtype):
        return elementwise(node, (a, b), a.dtype, lambda x, y: x - y * call("trunc", x / y))
    return elementwise(node, (a, b), a.dtype, lambda x, y: x - y * _truncated(x, y))


@operator("Pow")
def power(node: NodeView) -> Known:
    a, b = node.input(0), node.input(1)
    number = float(b.host.reshape(-1)[0]) if b.host is not None and b.size == 1 else None
    if number is not None and is_float(a.dtype) and number in (2.0, 3.0, 1.0, 0.5) and not b.rank > a.rank:
        forms: dict[float, Callable[[X], X]] = {2.0: lambda x: x * x, 3.0: lambda x: x * x * x, 1.0: lambda x: x, 0.5: lambda x: call("sqrt", x)}
        return elementwise(node, (a,), a.dtype, forms[number], f"onnx_pow_{str(number).replace('.', '_')}")
    wide = np.dtype(np.float64) if not is_float(a.dtype) else a.dtype
    return elementwise(node, (a, b), a.dtype, lambda x, y: _to(call("pow", _to(x, a.dtype, wide), _to(y, b.dtype, wide)), wide, a.dtype))


def _to(value: X, dtype: np.dtype, wanted: np.dtype) -> X:
    return value if dtype == wanted else cast(value, wanted)


def _hard_sigmoid(node: NodeView, x: X, alpha: float, beta: float) -> X:
    return call("clamp", alpha * x + beta, 0.0, 1.0)


_ERF_SCALE = math.sqrt(0.5)
_FUNCTIONS: dict[str, Callable[[NodeView, X], X]] = {
    "Exp": lambda n, x: call("exp", x),
    "Log": lambda n, x: call("log", x),
    "Sqrt": lambda n, x: call("sqrt", x),
    "Tanh": lambda n, x: call("tanh", x),
    "Cos": lambda n, x: call("cos", x),
    "Sin": lambda n, x: call("sin", x),
    "Tan": lambda n, x: call("tan", x),
    "Sinh": lambda n, x: call("sinh", x),
    "Cosh": lambda n, x: call("cosh", x),
    "Erf": lambda n, x: call("erf", x),
    "Sigmoid": lambda n, x: call("sigmoid", x),
    "Reciprocal": lambda n, x: 1.0 / x,
    "Floor": lambda n, x: call("floor", x),
    "Ceil": lambda n, x: call("ceil", x),
    "Round": lambda n, x: call("round", x),
    "Softplus": lambda n, x: call("softplus", x),
    "Softsign": lambda n, x: x / (1.0 + call("abs", x)),
    "Elu": lambda n, x: choose(x < 0.0, n.number("alpha", 1.0) * (call("exp", x) - 1.0), x),
    "Celu": lambda n, x: call("max", x, 0.0) + call("min", n.number("alpha", 1.0) * (call("exp", x / n.number("alpha", 1.0)) - 1.0), 0.0),
    "Selu": lambda n, x: n.number("gamma", 1.0507010221481323)
    * choose(x > 0.0, x, n.number("alpha", 1.6732631921768188) * (call("exp", x) - 1.0)),
    "LeakyRelu": lambda n, x: choose(x < 0.0, n.number("alpha", 0.01) * x, x),
    "ThresholdedRelu": lambda n, x: choose(x > n.number("alpha", 1.0), x, 0.0),
    "HardSigmoid": lambda n, x: _hard_sigmoid(n, x, n.number("alpha", 0.2), n.number("beta", 0.5)),
    "HardSwish": lambda n, x: x * _hard_sigmoid(n, x, 1 / 6, 0.5),
    "Mish": lambda n, x: x * call("tanh", call("softplus", x)),
    "Gelu": lambda n, x: 0.5 * x * (1.0 + call("erf", x * _ERF_SCALE)) if n.text("approximate", "none") == "none" else call("gelu", x),
    "Swish": lambda n, x: x * call("sigmoid", n.number("alpha", 1.0) * x),
}


@operator(*_FUNCTIONS)
def function(node: NodeView) -> Known:
    node.float_input(0)
    x = node.input(0)
    return elementwise(node, (x,), x.dtype, lambda v: _FUNCTIONS[node.op](node, v))


@operator("Gelu", "FastGelu", "QuickGelu", "BiasGelu", domain="com.microsoft")
def microsoft_gelu(node: NodeView) -> Known:
    node.float_input(0)
    values = [v for v in node.inputs if v is not None]

    def compute(x: X, bias: X | None = None) -> X:
        x = x if bias is None else x + bias
        if node.op == "QuickGelu":
            return x * call("sigmoid", node.number("alpha", 1.702) * x)
        return call("gelu", x) if node.op == "FastGelu" else 0.5 * x * (1.0 + call("erf", x * _ERF_SCALE))

    return elementwise(node, values, values[0].dtype, compute)


@operator("Neg", "Abs", "Relu", "Sign")
def signed_function(node: NodeView) -> Known:
    x = node.input(0)
    if x.dtype == BOOL:
        raise node.error("its input is bool", "TW009")
    zero = 0.0 if is_float(x.dtype) else 0
    one = 1.0 if is_float(x.dtype) else 1
    forms: dict[str, Callable[[X], X]] = {
        "Neg": lambda v: -v,
        "Abs": lambda v: v if x.dtype.kind == "u" else call("abs", v),
        "Relu": lambda v: call("max", v, zero),
        "Sign": lambda v: choose(v > zero, one, choose(v < zero, -one, v)) if x.dtype.kind != "u" else choose(v > zero, one, zero),
    }
    return elementwise(node, (x,), x.dtype, forms[node.op])


@operator("PRelu")
def parametric_relu(node: NodeView) -> Known:
    a, b = _pair(node)
    return elementwise(node, (a, b), a.dtype, lambda x, slope: choose(x < 0, slope * x, x))


@operator("Clip", note="limits as inputs or attributes")
def clip(node: NodeView) -> Known:
    x = node.input(0)
    values = [x]
    low, high = node.maybe(1), node.maybe(2)
    if node.opset < 11:
        low = node.known(np.asarray(node.number("min", -math.inf), x.dtype)) if node.has("min") else None
        high = node.known(np.asarray(node.number("max", math.inf), x.dtype)) if node.has("max") else None
    values += [v for v in (low, high) if v is not None]

    def compute(v: X, *limits: X) -> X:
        rest = list(limits)
        if low is not None:
            v = call("max", v, rest.pop(0))
        return v if high is None else call("min", v, rest.pop(0))

    return elementwise(node, values, x.dtype, compute)


@operator("Not")
def negation(node: NodeView) -> Known:
    if node.input(0).dtype != BOOL:
        raise node.error(f"its input is {node.input(0).dtype}, not bool", "TW009")
    return elementwise(node, (node.input(0),), BOOL, lambda x: ~x)


_LOGIC: dict[str, Callable[[X, X], X]] = {"And": lambda a, b: a & b, "Or": lambda a, b: a | b, "Xor": lambda a, b: a ^ b}


@operator(*_LOGIC)
def logic(node: NodeView) -> Known:
    a, b = _pair(node)
    if a.dtype != BOOL:
        raise node.error(f"its inputs are {a.dtype}, not bool", "TW009")
    return elementwise(node, (a, b), BOOL, _LOGIC[node.op])


_COMPARISONS: dict[str, Callable[[X, X], X]] = {
    "Less": lambda a, b: a < b, "LessOrEqual": lambda a, b: a <= b, "Greater": lambda a, b: a > b, "GreaterOrEqual": lambda a, b: a >= b,
    "Equal": lambda a, b: a == b,
}  # fmt: skip


@operator(*_COMPARISONS)
def comparison(node: NodeView) -> Known:
    a, b = _pair(node)
    return elementwise(node, (a, b), BOOL, _COMPARISONS[node.op])


@operator("IsNaN")
def is_nan(node: NodeView) -> Known:
    node.float_input(0)
    return elementwise(node, (node.input(0),), BOOL, lambda x: call("isnan", x))


@operator("IsInf")
def is_infinite(node: NodeView) -> Known:
    node.float_input(0)
    up, down = bool(node.integer("detect_positive", 1)), bool(node.integer("detect_negative", 1))

    def compute(x: X) -> X:
        if up and down:
            return (x == math.inf) | (x == -math.inf)
        return x == (math.inf if up else -math.inf) if up or down else x != x * 1.0

    return elementwise(node, (node.input(0),), BOOL, compute)


@operator("Where")
def where(node: NodeView) -> Known:
    condition, a, b = node.input(0), node.input(1), node.input(2)
    if condition.dtype != BOOL or a.dtype != b.dtype:
        raise node.error(f"its inputs are {condition.dtype}, {a.dtype} and {b.dtype}", "TW009")
    return elementwise(node, (condition, a, b), a.dtype, choose)


@operator("Min", "Max", "Sum", "Mean")
def several(node: NodeView) -> Known:
    values = [node.input(n) for n in range(len(node.inputs))]
    if not values:
        raise node.error("it has no inputs", "TW008")
    if any(v.dtype != values[0].dtype for v in values):
        raise node.error(f"its inputs are {', '.join(str(v.dtype) for v in values)}", "TW009")

    if len(values) > MOST_TERMS:
        raise node.error(f"has {len(values)} inputs, and {MOST_TERMS} are the most")

    def compute(*terms: X) -> X:
        found = terms[0]
        for term in terms[1:]:
            found = found + term if node.op in ("Sum", "Mean") else call(node.op.lower(), found, term)
        return found / float(len(terms)) if node.op == "Mean" else found

    return elementwise(node, values, values[0].dtype, compute)


# -- conversions ----------------------------------------------------------------------------------------------------


_MOST_F8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest numbers of types that conversions do not leave, unless a node says `saturate=0`."""


def converted(node: NodeView, x: Known, wanted: np.dtype, saturate: bool = True) -> Known:
    """The elements as another type."""
    if x.dtype == wanted:
        return x
    most = _MOST_F8.get(wanted.name) if saturate and is_float(x.dtype) else None
    if x.host is not None and x.size <= 1 << 22 and most is None:
        with np.errstate(all="ignore"):
            return node.known(x.host.astype(wanted))
    zero = 0.0 if is_float(x.dtype) else 0
    name = f"onnx_cast_{wanted.name.replace('float8_', 'f8')}"
    if most is not None:
        return elementwise(node, (x,), wanted, lambda v: cast(call("min", call("max", v, -most), most), wanted), name + "_saturated")
    if wanted == BOOL:
        return elementwise(node, (x,), BOOL, lambda v: v != zero, name)
    if x.dtype == BOOL:
        one, none = (1.0, 0.0) if is_float(wanted) else (1, 0)
        return elementwise(node, (x,), wanted, lambda v: cast(choose(v, one, none), wanted), name)
    return elementwise(node, (x,), wanted, lambda v: cast(v, wanted), name)


@operator("Cast")
def cast_node(node: NodeView) -> Known:
    number = node.integer("to")
    if number not in DTYPES:
        raise node.error(f"converts to element type {number}, which there is not here", "TW009")
    return converted(node, node.input(0), DTYPES[number], bool(node.integer("saturate", 1)))


@operator("CastLike")
def cast_like(node: NodeView) -> Known:
    return converted(node, node.input(0), node.input(1).dtype, bool(node.integer("saturate", 1)))
