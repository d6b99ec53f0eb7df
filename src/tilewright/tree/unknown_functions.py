"""What to say of a function that kernels do not have: the one that is meant, or what to write in its place.

In: the name as NumPy, PyTorch or C have it. Out: the help of an error. A name that is nearly one of ours is taken for a slip; one that
means something else never is: `sort` is no `sqrt`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.tree.metadata import suggest

SAME = {
    "absolute": "abs", "fabs": "abs", "amax": "max", "amin": "min", "fmax": "max", "fmin": "min", "power": "pow", "clip": "clamp", "rint": "round",
    "fix": "trunc", "around": "round", "expit": "sigmoid", "logistic": "sigmoid", "swish": "silu", "inner": "dot", "vdot": "dot",
    "mm": "matmul", "bmm": "matmul", "product": "prod", "astype": "cast", "syncthreads": "barrier", "arange": "range", "ndindex": "grid",
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arctan2": "atan2", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh", "gamma": "tgamma",
    "gammaln": "lgamma", "loggamma": "lgamma", "signum": "sign", "rotl": "rotate_left", "rotr": "rotate_right", "bitwise_count": "popcount", "popcnt": "popcount",
    "scalbn": "ldexp", "sgn": "sign", "average": "mean",
}  # fmt: skip
"""Other names of functions that there are."""

_WRITE = {
    "square": "x * x", "sqr": "x * x", "mod": "a % b", "remainder": "a % b", "floor_divide": "a // b", "divide": "a / b",
    "true_divide": "a / b", "multiply": "a * b", "add": "a + b", "subtract": "a - b", "negative": "-x", "reciprocal": "1 / x",
    "isposinf": "x == tw.inf", "isneginf": "x == -tw.inf", "nan_to_num": "tw.where(tw.isnan(x), 0, x)",
    "heaviside": "tw.where(x > 0, 1, 0)", "radians": "x * 0.017453292519943295", "deg2rad": "x * 0.017453292519943295", "degrees": "x * 57.29577951308232",
    "rad2deg": "x * 57.29577951308232",
    "logical_and": "a and b", "logical_or": "a or b", "logical_not": "not a",
    "leaky_relu": "x if x > 0 else slope * x",
    "elu": "x if x > 0 else tw.expm1(x)", "logaddexp": "tw.softplus(a - b) + b", "lerp": "a + (b - a) * t", "softmax": "e / tw.sum(e) with e = tw.exp(x - tw.max(x))",
    "outer": "a[i] * b[j] in loops over i and j",
    "einsum": "the sum as a loop: total += a[i, k] * b[k, j]", "count_nonzero": "total += 1 under an if, in a loop",
}  # fmt: skip
"""What computes the same."""

_ZYNML = {
    "mean": "reduce(+, x) / n", "average": "reduce(+, x) / n", "norm": "sqrt(reduce(+, x * x))", "var": "reduce(+, (x - mean) * (x - mean)) / n",
    "std": "sqrt(reduce(+, (x - mean) * (x - mean)) / n)", "sum": "reduce(+, x)", "prod": "reduce(*, x)", "any": "reduce(or, x)", "all": "reduce(and, x)",
}  # fmt: skip
"""Reductions, as ZynML writes them."""

_OUTSIDE = {
    "sort": ("tw.gpu_sort", "@kernel sort"), "argsort": ("tw.gpu_argsort", "@kernel sort"), "cumsum": ("tw.gpu_scan", "@kernel scan(+)"),
    "cumprod": ("tw.gpu_scan", "@kernel scan(*)"), "scan": ("tw.gpu_scan", "@kernel scan(+)"), "histogram": ("tw.gpu_histogram", "@kernel histogram"),
    "bincount": ("tw.gpu_histogram", "@kernel histogram"), "unique": ("tw.gpu_unique", "@kernel sort"), "filter": ("tw.gpu_filter", "@kernel filter"),
    "nonzero": ("tw.gpu_filter", "@kernel filter"), "compress": ("tw.gpu_filter", "@kernel filter"), "topk": ("tw.gpu_sort", "@kernel sort"),
    "searchsorted": ("tw.gpu_sort", "@kernel sort"),
}  # fmt: skip
"""What is done to whole arrays, by a primitive."""

_ARRAYS = ("concatenate", "concat", "stack", "hstack", "vstack", "tile", "repeat", "linspace", "meshgrid", "pad", "roll", "flip", "array", "asarray", "eye", "identity", "diag", "append", "list")


def help_for(name: str, known: Sequence[str], python: bool) -> str:
    """What to do about a function that is unknown; empty where nothing is known of the name either."""
    tw = "tw." if python else ""
    if not python and name in _ZYNML:
        return f"write {_ZYNML[name]}"
    if name in SAME:
        return f"use {tw}{SAME[name]}"
    if name in _WRITE:
        return f"write {_WRITE[name] if python else _WRITE[name].replace('tw.', '')}"
    if name in _OUTSIDE:
        function, kind = _OUTSIDE[name]
        return f"it needs all elements at once: call {function} outside the kernel" if python else f"it needs all elements at once: use a block with {kind}"
    if name in _ARRAYS:
        return f"make the array with {tw}empty or {tw}zeros and fill it in a loop" if python else "write each element of out in a loop"
    return suggest(name, known)
