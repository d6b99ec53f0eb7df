"""The words of explicit kernels: a table from Python names to what they build.

`VALUES` has words that stand for a number (`thread.x`, `block.size.y`), `CALLS` functions (`gpu_sync()`, `shared(...)`): each takes
the emitter and its arguments by name and gives a value. To add an instruction, write a row in `frontend/words/rows.py` (signature,
documentation, ops) and here a function under `@word("name")`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from tilewright.base.dtypes import DType, arithmetic_dtype, bool_, f32, f64, i32, i64, u8, u16, u32, u64
from tilewright.frontend.simt.build import Emitter, arguments, shape_of
from tilewright.frontend.simt.values import NOTHING, Arguments, MemoryValue, NumberValue, Seq, Val, describe, literal
from tilewright.frontend.words.rows import explicit_parameters
from tilewright.ir.nodes import Value

Call = Callable[[Emitter, Arguments], Val]
BoundArguments = Mapping[str, Val]
"""The arguments of a call by the names that the word's row gives them, in that order; those left out are missing."""
Build = Callable[[Emitter, BoundArguments], Val]
VALUES: dict[str, Callable[[Emitter], Val]] = {}
CALLS: dict[str, Call] = {}
NAMESPACES = frozenset({"thread", "block", "grid", "block.size", "grid.size", "warp", "cluster", "random"})
"""Words that only stand before a dot."""


def word(name: str, *aliases: str) -> Callable[[Build], Build]:
    """Register what builds a word, under its name and others that mean the same; its row says which arguments it takes."""

    def register(build: Build) -> Build:
        call = functools.partial(_bind_and_build, name, build)
        CALLS.update(dict.fromkeys((name, *aliases), call))
        return build

    return register


def _bind_and_build(name: str, build: Build, e: Emitter, given: Arguments) -> Val:
    names, least = explicit_parameters(name)
    bound = arguments(e, given, name, names, least)
    return build(e, {n: bound[n] for n in names if n in bound})


def variadic_word(*names: str) -> Callable[[Call], Call]:
    """Register what builds a word that takes any number of arguments."""

    def register(call: Call) -> Call:
        CALLS.update(dict.fromkeys(names, call))
        return call

    return register


# -- indices ------------------------------------------------------------------------------------------------------


def _index(make: Callable[[Emitter, int], Value], axis: int) -> Callable[[Emitter], Val]:
    return lambda e: e.index(make(e, axis))


for _axis, _name in enumerate("xyz"):
    VALUES[f"thread.{_name}"] = _index(Emitter.thread_axis, _axis)
    VALUES[f"block.{_name}"] = _index(Emitter.block_axis, _axis)
    VALUES[f"grid.{_name}"] = _index(Emitter.global_axis, _axis)
    VALUES[f"grid.size.{_name}"] = _index(Emitter.grid_axis, _axis)
    VALUES[f"block.size.{_name}"] = lambda e, axis=_axis: literal(e.launch.block[axis])  # type: ignore[misc]
VALUES["warp.size"] = lambda e: literal(e.launch.warp_size)


@word("gpu_thread_id")
def _thread_id(e: Emitter, args: BoundArguments) -> Val:
    return e.index(e.global_id())


@word("lane_id")
def _lane(e: Emitter, args: BoundArguments) -> Val:
    thread = e.thread()
    return e.index(e.once("lane", lambda b: b.op("mod", thread, b.index(e.launch.warp_size), name="lane")))


@word("warp_id")
def _warp(e: Emitter, args: BoundArguments) -> Val:
    thread = e.thread()
    return e.index(e.once("warp", lambda b: b.op("floordiv", thread, b.index(e.launch.warp_size), name="warp")))


# -- memory -------------------------------------------------------------------------------------------------------


@word("shared")
def _shared(e: Emitter, args: BoundArguments) -> Val:
    align = e.constant(args["align"], "align") if "align" in args else 16
    if align not in (16, 32, 64, 128, 256, 512, 1024):
        raise e.fail(f"align is {align}", "choose a power of two from 16 to 1024", "TW009")
    shape, dtype = shape_of(e, args["shape"], "the shape of a shared array"), e.dtype(args["dtype"], "dtype")
    return e.array("shared", shape, dtype, "shared", **({"align": align} if align > 16 else {}))


@word("local")
def _local(e: Emitter, args: BoundArguments) -> Val:
    return e.array("local", shape_of(e, args["shape"], "the shape of a local array"), e.dtype(args["dtype"], "dtype"), "local")


@word("shared_dynamic")
def _shared_dynamic(e: Emitter, args: BoundArguments) -> Val:
    dtype = e.dtype(args["dtype"], "dtype")
    count = e.launch.shared_bytes // dtype.itemsize
    if count < 1:
        raise e.fail(
            f"the launch gives {e.launch.shared_bytes} bytes of dynamic shared memory, too few for one {dtype}",
            "launch with kernel[grid, block, bytes](...)", "TW016",
        )  # fmt: skip
    if e.dynamic:
        raise e.fail("a kernel has one dynamic shared array", "take parts of it by adding to the index")
    e.dynamic = True
    return e.array("shared_dynamic", (count,), dtype, "shared")


@word("len")
def _len(e: Emitter, args: BoundArguments) -> Val:
    (val,) = args.values()
    if isinstance(val, Seq):
        return literal(len(val.items))
    memory = e.memory(val, "the argument of len")
    return e.size(memory.type.shape[len(memory.given)])


# -- synchronisation ----------------------------------------------------------------------------------------------


@word("gpu_sync", "barrier", "sync_threads")
def _barrier(e: Emitter, args: BoundArguments) -> Val:
    e.b.multi("barrier")
    return NOTHING


# -- atomics ------------------------------------------------------------------------------------------------------


def element(e: Emitter, val: Val, index: Val) -> tuple[MemoryValue, tuple[Value, ...]]:
    """The array and indices of one element, given as `a, i` or `a, (i, j)`."""
    memory = e.memory(val, "the first argument")
    return memory, e.place(memory, index.items if isinstance(index, Seq) else (index,))


# -- functions of numbers -----------------------------------------------------------------------------------------


def _only(e: Emitter, args: BoundArguments, name: str) -> NumberValue:
    """The one number a function takes."""
    return e.number(args["x"], f"the argument of {name}")


def _function(name: str) -> None:
    """A word that is an op of the same name, of numbers."""

    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        return e.function(name, *[e.number(v, f"an argument of {name}") for v in args.values()])


for _word in (
    "exp", "exp2", "log", "log2", "sin", "cos", "tan", "tanh", "sinh", "cosh", "erf", "sqrt", "rsqrt", "sigmoid", "pow", "fma",
    "exp10", "expm1", "log10", "log1p", "asin", "acos", "atan", "asinh", "acosh", "atanh", "cbrt", "erfc", "lgamma", "tgamma", "atan2", "hypot", "fmod", "copysign",
):  # fmt: skip
    _function(_word)


@word("rsqrt_approx")
def _rsqrt_approx(e: Emitter, args: BoundArguments) -> Val:
    number = _only(e, args, "rsqrt_approx")
    if not number.weak and not (number.dtype.is_float and number.dtype.bits <= f32.bits):
        raise e.fail(f"rsqrt_approx is of f32, got {describe(number)}", "convert it: tw.f32(...)", "TW009")
    return e.num(e.b.op("rsqrt_approx", e.use(number, f32)))


def _rounding(name: str) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        number = _only(e, args, name)
        return number if number.dtype.is_int else e.function(name, number)


for _word in ("floor", "ceil", "round", "trunc"):
    _rounding(_word)


def _extreme(name: str) -> None:
    @variadic_word(name, f"{name}imum")
    def call(e: Emitter, given: Arguments) -> Val:
        if given.named or len(given.items) < 2:
            raise e.fail(f"{name} takes two numbers or more, got {len(given.items)}", code="TW016")
        return e.extreme(name, [e.number(v, f"an argument of {name}") for v in given.items])


_extreme("min")
_extreme("max")


@word("abs")
def _abs(e: Emitter, args: BoundArguments) -> Val:
    number = _only(e, args, "abs")
    if number.dtype.is_bool:
        return number
    if number.const is not None:
        return NumberValue(number.dtype, number.weak, None, abs(number.const))
    # Exact both ways where the dtype is computed in a wider one.
    size = e.b.op("abs", e.use(number, arithmetic_dtype(number.dtype)))
    return NumberValue(number.dtype, number.weak, e.b.cast(size, number.dtype))


@word("isnan")
def _isnan(e: Emitter, args: BoundArguments) -> Val:
    number = _only(e, args, "isnan")
    if not number.dtype.is_float:
        return literal(False)
    return NumberValue(bool_, "", e.b.op("isnan", e.use(number, arithmetic_dtype(number.dtype))))


def _endless(name: str, opcode: str, otherwise: bool) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        number = _only(e, args, name)
        if not number.dtype.is_float:
            return literal(otherwise)
        size = e.b.op("abs", e.use(number, arithmetic_dtype(number.dtype)))
        return NumberValue(bool_, "", e.b.op(opcode, size, e.b.splat(math.inf, size)))


_endless("isinf", "eq", False)
_endless("isfinite", "lt", True)


@word("sign")
def _sign(e: Emitter, args: BoundArguments) -> Val:
    number = _only(e, args, "sign")
    if number.dtype.is_bool:
        return number
    if number.const is not None and number.const == number.const:
        value = (number.const > 0) - (number.const < 0)
        return NumberValue(number.dtype, number.weak, None, float(value) if number.dtype.is_float else value)
    dtype = arithmetic_dtype(number.dtype)
    x = e.use(number, dtype)
    zero, one = e.b.const(0, dtype), e.b.const(1, dtype)
    result = e.b.select(e.b.op("eq", x, zero), zero, x)
    if number.dtype.kind != "u":
        result = e.b.select(e.b.op("lt", x, zero), e.b.const(-1, dtype), result)
    result = e.b.select(e.b.op("gt", x, zero), one, result)
    return NumberValue(number.dtype, number.weak, e.b.cast(result, number.dtype))


@word("nextafter")
def _nextafter(e: Emitter, args: BoundArguments) -> Val:
    x, y = (e.number(v, "an argument of nextafter") for v in args.values())
    # In the dtype itself, not in that which it is computed in.
    kinds = [n.dtype for n in (x, y) if n.dtype.is_float and not n.weak]
    if kinds and all(k is kinds[0] for k in kinds) and kinds[0].is_small_float:
        return e.num(e.b.op("nextafter", e.use(x, kinds[0]), e.use(y, kinds[0])))
    return e.function("nextafter", x, y)


def _as_float(e: Emitter, number: NumberValue) -> tuple[Value, DType]:
    """The number in the float that functions of it are computed in."""
    given = arithmetic_dtype(number.dtype)
    dtype = given if given.is_float else e.default_float if number.weak or given.bits <= 16 else f64
    return e.use(number, dtype), dtype


@word("ldexp")
def _ldexp(e: Emitter, args: BoundArguments) -> Val:
    x, n = e.number(args["x"]), e.integer(args["n"], "the second argument of ldexp")
    value, _ = _as_float(e, x)
    if n.const is not None:
        power = e.b.const(int(max(-_MOST, min(_MOST, n.const))), i32)
    elif n.dtype.bits < 32:
        power = e.use(n, i32)
    else:
        limited = e.b.op("min", e.use(n), e.b.const(_MOST, n.dtype))
        power = e.b.cast(limited if n.dtype.kind == "u" else e.b.op("max", limited, e.b.const(-_MOST, n.dtype)), i32)
    return e.num(e.b.op("scale_by_power", value, power))


_MOST = 1 << 14
"""Powers of two beyond this are 0 or infinite in every float."""


@word("frexp")
def _frexp(e: Emitter, args: BoundArguments) -> Val:
    value, _ = _as_float(e, _only(e, args, "frexp"))
    return Seq((e.num(e.b.op("frexp_fraction", value)), e.num(e.b.op("frexp_exponent", value))))


_UNSIGNED = {8: u8, 16: u16, 32: u32, 64: u64}


def _rotate(name: str, towards: str, back: str) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        x, n = e.integer(args["x"], f"the argument of {name}"), e.integer(args["n"], f"the second argument of {name}")
        own = _UNSIGNED[x.dtype.bits]
        value = e.use(x) if x.dtype is own else e.b.bitcast(e.use(x), own)
        count = e.b.cast(e.b.op("and", e.use(n, i64), e.b.const(own.bits - 1, i64)), own)
        other = e.b.op("sub", e.b.const(own.bits, own), count)
        turned = e.b.op("or", e.b.op(towards, value, count), e.b.op(back, value, other))
        return e.num(turned if x.dtype is own else e.b.bitcast(turned, x.dtype))


_rotate("rotate_left", "shl", "shr")
_rotate("rotate_right", "shr", "shl")


@word("clamp")
def _clamp(e: Emitter, args: BoundArguments) -> Val:
    x, low, high = (e.number(v) for v in args.values())
    return e.extreme("min", [e.extreme("max", [x, low]), high])


@word("where")
def _where(e: Emitter, args: BoundArguments) -> Val:
    condition, a, b = args.values()
    first, second = e.number(a), e.number(b)
    return e.choose(e.number(condition), lambda: first, lambda: second)


@word("cast")
def _cast(e: Emitter, args: BoundArguments) -> Val:
    return e.cast(e.number(args["value"]), e.dtype(args["dtype"], "dtype"))


@word("bitcast")
def _bitcast(e: Emitter, args: BoundArguments) -> Val:
    number, dtype = e.number(args["x"]), e.dtype(args["dtype"], "dtype")
    if number.dtype.bits != dtype.bits or number.dtype.is_bool or dtype.is_bool:
        raise e.fail(f"{describe(number)} has not the bits of a {dtype}", code="TW009")
    return e.num(e.b.bitcast(e.use(number), dtype))


@word("relu")
def _relu(e: Emitter, args: BoundArguments) -> Val:
    number = _only(e, args, "relu")
    return e.extreme("max", [number, literal(0)])


@word("int")
def _int(e: Emitter, args: BoundArguments) -> Val:
    number = _only(e, args, "int")
    if number.const is not None:
        return literal(int(number.const))
    return number if number.dtype.is_int else NumberValue(i64, "index", e.use(number, i64))


@word("float")
def _float(e: Emitter, args: BoundArguments) -> Val:
    number = _only(e, args, "float")
    if number.const is not None:
        return literal(float(number.const), e.default_float)
    return number if number.dtype.is_float else NumberValue(e.default_float, "float", e.use(number, e.default_float))


@word("bool")
def _bool(e: Emitter, args: BoundArguments) -> Val:
    return e.truth(_only(e, args, "bool"))


_MATH = {"fabs": "abs", "fmin": "min", "fmax": "max", "power": "pow", "absolute": "abs", "maximum": "max", "minimum": "min", "rint": "round", "gamma": "tgamma", **{f"arc{n}": f"a{n}" for n in ("sin", "cos", "tan", "tan2", "sinh", "cosh", "tanh")}}


def word_of(value: object) -> str | None:
    """The word a Python object is: of Tilewright, of `math` and NumPy, or a builtin."""
    spelled = getattr(value, "__simt__", None)
    if isinstance(spelled, str):
        return spelled
    name = getattr(value, "__name__", None)
    module = getattr(value, "__module__", None) or ""
    if not isinstance(name, str) or (isinstance(value, type) and value not in (int, float, bool, range)):
        return None
    if module.partition(".")[0] == "tilewright":
        return name
    import numpy as np

    if module in ("math", "builtins") or isinstance(value, np.ufunc):
        known = _MATH.get(name, name)
        return known if known in CALLS or known == "range" else None
    return None


CONSTANTS = {"inf": math.inf, "nan": math.nan, "pi": math.pi, "e": math.e}
