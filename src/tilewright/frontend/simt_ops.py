"""The words of explicit kernels: a table from Python names to what they build.

`VALUES` has words that stand for a number (`thread.x`, `block.size.y`), `CALLS` functions (`gpu_sync()`, `shared(...)`): each takes
the emitter and its arguments and gives a value. To add an instruction, write a function under `@word("name", …)`; the first line of
its docstring is its line in the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tilewright.base.dtypes import bool_, i64
from tilewright.frontend.simt_build import Emitter, arguments, shape_of
from tilewright.frontend.simt_values import NOTHING, Arguments, Memory, Num, Seq, Val, describe, literal
from tilewright.ir.nodes import Value

Call = Callable[[Emitter, Arguments], Val]
VALUES: dict[str, Callable[[Emitter], Val]] = {}
CALLS: dict[str, Call] = {}
NAMESPACES = frozenset({"thread", "block", "grid", "block.size", "grid.size", "warp", "cluster"})
"""Words that only stand before a dot."""


def word(*names: str) -> Callable[[Call], Call]:
    """Register a function under these names."""

    def register(call: Call) -> Call:
        for name in names:
            CALLS[name] = call
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
VALUES["warp.size"] = lambda e: literal(32)


@word("gpu_thread_id")
def _thread_id(e: Emitter, given: Arguments) -> Val:
    """The thread's number in the whole grid."""
    arguments(e, given, "gpu_thread_id", ())
    return e.index(e.global_id())


@word("lane_id")
def _lane(e: Emitter, given: Arguments) -> Val:
    """The thread's number in its warp, 0 to 31."""
    arguments(e, given, "lane_id", ())
    thread = e.thread()
    return e.index(e.once("lane", lambda b: b.op("mod", thread, b.index(32), name="lane")))


@word("warp_id")
def _warp(e: Emitter, given: Arguments) -> Val:
    """The number of the thread's warp in its block."""
    arguments(e, given, "warp_id", ())
    thread = e.thread()
    return e.index(e.once("warp", lambda b: b.op("floordiv", thread, b.index(32), name="warp")))


# -- memory -------------------------------------------------------------------------------------------------------


@word("shared")
def _shared(e: Emitter, given: Arguments) -> Val:
    """`shared(shape, dtype, align=16)`: an array that the threads of a block share, at a multiple of `align` bytes."""
    found = arguments(e, given, "shared", ("shape", "dtype", "align"), 2)
    align = e.constant(found["align"], "align") if "align" in found else 16
    if align not in (16, 32, 64, 128, 256, 512, 1024):
        raise e.fail(f"align is {align}", "choose a power of two from 16 to 1024", "TW009")
    shape, dtype = shape_of(e, found["shape"], "the shape of a shared array"), e.dtype(found["dtype"], "dtype")
    return e.array("shared", shape, dtype, "shared", **({"align": align} if align > 16 else {}))


@word("local")
def _local(e: Emitter, given: Arguments) -> Val:
    """`local(shape, dtype)`: an array that each thread has for itself."""
    found = arguments(e, given, "local", ("shape", "dtype"))
    return e.array("local", shape_of(e, found["shape"], "the shape of a local array"), e.dtype(found["dtype"], "dtype"), "local")


@word("shared_dynamic")
def _shared_dynamic(e: Emitter, given: Arguments) -> Val:
    """`shared_dynamic(dtype)`: the shared memory that the launch asked for, as an array of one axis."""
    found = arguments(e, given, "shared_dynamic", ("dtype",))
    dtype = e.dtype(found["dtype"], "dtype")
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
def _len(e: Emitter, given: Arguments) -> Val:
    """The extent of an array's first axis, or the items of a tuple."""
    (val,) = arguments(e, given, "len", ("x",)).values()
    if isinstance(val, Seq):
        return literal(len(val.items))
    memory = e.memory(val, "the argument of len")
    return e.size(memory.type.shape[len(memory.given)])


# -- synchronisation ----------------------------------------------------------------------------------------------


@word("gpu_sync", "barrier", "sync_threads")
def _barrier(e: Emitter, given: Arguments) -> Val:
    """Every thread of the block arrives before any leaves; what they wrote is seen by all after."""
    arguments(e, given, "gpu_sync", ())
    e.b.multi("barrier")
    return NOTHING


# -- atomics ------------------------------------------------------------------------------------------------------


def element(e: Emitter, val: Val, index: Val) -> tuple[Memory, tuple[Value, ...]]:
    """The array and indices of one element, given as `a, i` or `a, (i, j)`."""
    memory = e.memory(val, "the first argument")
    return memory, e.place(memory, index.items if isinstance(index, Seq) else (index,))


# -- functions of numbers -----------------------------------------------------------------------------------------


def only(e: Emitter, given: Arguments, name: str) -> Num:
    """The one number a function takes."""
    return e.number(arguments(e, given, name, ("x",))["x"], f"the argument of {name}")


def _function(name: str, opcode: str, count: int = 1) -> None:
    def call(e: Emitter, given: Arguments) -> Val:
        names = ("x", "y", "z")[:count]
        numbers = [e.number(v, f"an argument of {name}") for v in arguments(e, given, name, names).values()]
        return e.function(opcode, *numbers)

    call.__doc__ = f"`{name}({', '.join('xyz'[:count])})`"
    word(name)(call)


for _word in ("exp", "exp2", "log", "log2", "sin", "cos", "tan", "tanh", "sinh", "cosh", "erf", "sqrt", "rsqrt", "sigmoid"):
    _function(_word, _word)
_function("rsqrt_approx", "rsqrt_approx")
_function("pow", "pow", 2)
_function("fma", "fma", 3)


def _rounding(name: str) -> None:
    def call(e: Emitter, given: Arguments) -> Val:
        number = only(e, given, name)
        return number if number.dtype.is_int else e.function(name, number)

    call.__doc__ = f"`{name}(x)`: a float, rounded."
    word(name)(call)


for _word in ("floor", "ceil", "round", "trunc"):
    _rounding(_word)


def _extreme(name: str) -> None:
    def call(e: Emitter, given: Arguments) -> Val:
        if given.named or len(given.items) < 2:
            raise e.fail(f"{name} takes two numbers or more, got {len(given.items)}", code="TW016")
        return e.extreme(name, [e.number(v, f"an argument of {name}") for v in given.items])

    call.__doc__ = f"`{name}(a, b, …)`: NaN if one is NaN."
    word(name, f"{name}imum")(call)


_extreme("min")
_extreme("max")


@word("abs")
def _abs(e: Emitter, given: Arguments) -> Val:
    """`abs(x)`"""
    number = only(e, given, "abs")
    if number.const is not None:
        return Num(number.dtype, number.weak, None, abs(number.const))
    return Num(number.dtype, number.weak, e.b.op("abs", e.use(number)))


@word("isnan")
def _isnan(e: Emitter, given: Arguments) -> Val:
    """`isnan(x)`"""
    number = only(e, given, "isnan")
    if not number.dtype.is_float:
        return literal(False)
    return Num(bool_, "", e.b.op("isnan", e.use(number)))


@word("clamp")
def _clamp(e: Emitter, given: Arguments) -> Val:
    """`clamp(x, low, high)`"""
    found = [e.number(v) for v in arguments(e, given, "clamp", ("x", "low", "high")).values()]
    return e.extreme("min", [e.extreme("max", found[:2]), found[2]])


@word("where")
def _where(e: Emitter, given: Arguments) -> Val:
    """`where(condition, a, b)`: both are computed."""
    condition, a, b = arguments(e, given, "where", ("condition", "a", "b")).values()
    first, second = e.number(a), e.number(b)
    return e.choose(e.number(condition), lambda: first, lambda: second)


@word("cast")
def _cast(e: Emitter, given: Arguments) -> Val:
    """`cast(x, dtype)`, the same as `dtype(x)`"""
    found = arguments(e, given, "cast", ("x", "dtype"))
    return e.cast(e.number(found["x"]), e.dtype(found["dtype"], "dtype"))


@word("bitcast")
def _bitcast(e: Emitter, given: Arguments) -> Val:
    """`bitcast(x, dtype)`: the same bits as another type of the same size."""
    found = arguments(e, given, "bitcast", ("x", "dtype"))
    number, dtype = e.number(found["x"]), e.dtype(found["dtype"], "dtype")
    if number.dtype.bits != dtype.bits or number.dtype.is_bool or dtype.is_bool:
        raise e.fail(f"{describe(number)} has not the bits of a {dtype}", code="TW009")
    return e.num(e.b.bitcast(e.use(number), dtype))


@word("relu")
def _relu(e: Emitter, given: Arguments) -> Val:
    """`relu(x)`"""
    number = only(e, given, "relu")
    return e.extreme("max", [number, literal(0)])


@word("hypot")
def _hypot(e: Emitter, given: Arguments) -> Val:
    """`hypot(x, y)`: the root of the sum of squares, without scaling."""
    x, y = (e.number(v) for v in arguments(e, given, "hypot", ("x", "y")).values())
    return e.function("sqrt", e.binary("+", e.binary("*", x, x), e.binary("*", y, y)))


@word("int")
def _int(e: Emitter, given: Arguments) -> Val:
    """`int(x)`: towards zero."""
    number = only(e, given, "int")
    if number.const is not None:
        return literal(int(number.const))
    return number if number.dtype.is_int else Num(i64, "index", e.use(number, i64))


@word("float")
def _float(e: Emitter, given: Arguments) -> Val:
    """`float(x)`: a float of the kernel's default type, which takes the dtype of what it meets."""
    number = only(e, given, "float")
    if number.const is not None:
        return literal(float(number.const), e.default_float)
    return number if number.dtype.is_float else Num(e.default_float, "float", e.use(number, e.default_float))


@word("bool")
def _bool(e: Emitter, given: Arguments) -> Val:
    """`bool(x)`: whether it is not zero."""
    return e.truth(only(e, given, "bool"))


_MATH = {"fabs": "abs", "fmin": "min", "fmax": "max", "power": "pow", "absolute": "abs", "maximum": "max", "minimum": "min", "rint": "round"}


def word_of(value: object) -> str | None:
    """The word a Python object is: of Tilewright, of `math` and NumPy, or a builtin."""
    own = getattr(value, "__simt__", None)
    if isinstance(own, str):
        return own
    name = getattr(value, "__name__", None)
    module = getattr(value, "__module__", None) or ""
    if not isinstance(name, str) or (isinstance(value, type) and value not in (int, float, bool, range)):
        return None
    if module.startswith("tilewright."):
        return name
    import numpy as np

    if module in ("math", "builtins") or isinstance(value, np.ufunc):
        known = _MATH.get(name, name)
        return known if known in CALLS or known == "range" else None
    return None


def table() -> Sequence[tuple[str, str]]:
    """Every word that has a line of documentation, with it."""
    return [(name, call.__doc__.strip().splitlines()[0]) for name, call in CALLS.items() if call.__doc__]


CONSTANTS = {"inf": math.inf, "nan": math.nan, "pi": math.pi, "e": math.e}
