"""Words of explicit kernels for what warps and blocks do together, for bits, for fast functions and for time.

Each is a row of the table in `simt_ops`. Where a word takes `lanes`, that is a mask of the lanes that take part: a bit for each lane of
the warp, the same in all of them. Without it all lanes must come.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.dtypes import DType, f32, i32, i64, u32, u64
from tilewright.frontend.simt_build import Emitter, arguments
from tilewright.frontend.simt_ops import word
from tilewright.frontend.simt_values import NOTHING, Arguments, Num, Seq, Text, Val, describe
from tilewright.ir.nodes import Attr, Value
from tilewright.ir.ops_simt import REDUX, RELATIONS

_NAMED = 15
"""Named barriers of a block, besides its own."""
_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453


def lanes_of(e: Emitter, found: dict[str, Val]) -> tuple[Value, ...]:
    """The mask of the lanes that take part, where one is given."""
    return (e.use(e.integer(found["lanes"], "lanes"), u32),) if found.get("lanes", NOTHING) != NOTHING else ()


def plain(name: str, opcode: str, doc: str, **attrs: Attr) -> None:
    """A word without arguments and result."""

    def call(e: Emitter, given: Arguments) -> Val:
        arguments(e, given, name, ())
        e.b.emit(opcode, (), attrs)
        return NOTHING

    call.__doc__ = doc
    word(name)(call)


def number_of(name: str, doc: str, make: Callable[[Emitter], Num]) -> None:
    """A word without arguments that stands for a number."""

    def call(e: Emitter, given: Arguments) -> Val:
        arguments(e, given, name, ())
        return make(e)

    call.__doc__ = doc
    word(name)(call)


# -- warps --------------------------------------------------------------------------------------------------------


@word("warp_sync")
def _warp_sync(e: Emitter, given: Arguments) -> Val:
    """`warp_sync(lanes=None)`: every thread of the warp arrives before any leaves; what they wrote is seen by all of them after."""
    e.b.multi("warp_sync", *lanes_of(e, arguments(e, given, "warp_sync", ("lanes",), 0)))
    return NOTHING


def _shuffle(name: str, mode: str, second: str, doc: str) -> None:
    def call(e: Emitter, given: Arguments) -> Val:
        found = arguments(e, given, name, ("value", second, "width", "lanes"), 2)
        number = e.number(found["value"], "what is shuffled")
        width = e.constant(found["width"], "width") if "width" in found else 32
        if width not in (1, 2, 4, 8, 16, 32):
            raise e.fail(f"the width of a shuffle is {width}", "choose a power of two up to 32", "TW009")
        lane = e.use(e.integer(found[second], f"the {second}"), u32)
        return Num(number.dtype, number.weak, e.b.op("shuffle", e.use(number), lane, *lanes_of(e, found), mode=mode, width=width))

    call.__doc__ = f"`{name}(value, {second}, width=32, lanes=None)`: {doc}"
    word(name)(call)


_shuffle("shuffle", "idx", "lane", "the value of another lane of the warp; within groups of `width` lanes its number wraps.")
_shuffle("shuffle_up", "up", "delta", "the value of the lane `delta` below; the lowest of a group keep their own.")
_shuffle("shuffle_down", "down", "delta", "the value of the lane `delta` above; the highest of a group keep their own.")
_shuffle("shuffle_xor", "xor", "mask", "the value of the lane whose number differs in these bits.")


def _vote(name: str, mode: str, doc: str) -> None:
    def call(e: Emitter, given: Arguments) -> Val:
        found = arguments(e, given, name, ("predicate", "lanes"), 1)
        predicate = e.use(e.truth(found["predicate"], "the predicate"))
        return e.num(e.b.op("vote", predicate, *lanes_of(e, found), mode=mode))

    call.__doc__ = f"`{name}(predicate, lanes=None)`: {doc}"
    word(name)(call)


_vote("vote_any", "any", "whether the predicate holds in any lane of the warp.")
_vote("vote_all", "all", "whether the predicate holds in all lanes of the warp.")
_vote("vote_uniform", "uniform", "whether the predicate is the same in all lanes of the warp.")
_vote("ballot", "ballot", "a bit for each lane of the warp: whether the predicate holds there.")


def _matched(e: Emitter, given: Arguments, name: str) -> tuple[Value, ...]:
    found = arguments(e, given, name, ("value", "lanes"), 1)
    number = e.number(found["value"], "what is matched")
    if number.dtype.is_bool or number.dtype.bits not in (32, 64):
        wide = i32 if number.dtype.is_int or number.dtype.is_bool else f32
        number = Num(wide, "", e.use(number, wide))
    return e.use(number), *lanes_of(e, found)


@word("match_any")
def _match_any(e: Emitter, given: Arguments) -> Val:
    """`match_any(value, lanes=None)`: a bit for each lane of the warp: whether it has the same value."""
    return e.num(e.b.op("match", *_matched(e, given, "match_any"), mode="any"))


@word("match_all")
def _match_all(e: Emitter, given: Arguments) -> Val:
    """`match_all(value, lanes=None)`: the lanes if all of them have the same value, else 0; and whether they do."""
    lanes, same = e.b.multi("match", *_matched(e, given, "match_all"), mode="all")
    return Seq((e.num(lanes), e.num(same)))


def _redux(kind: str) -> None:
    name = f"redux_{kind}"

    def call(e: Emitter, given: Arguments) -> Val:
        found = arguments(e, given, name, ("value", "lanes"), 1)
        number = e.integer(found["value"], "what is combined")
        if number.dtype.bits == 64 and not number.weak:
            raise e.fail(f"{name} takes integers of 32 bits, got {describe(number)}", "convert it, or use shuffles", "TW009")
        dtype = u32 if number.dtype.kind == "u" else i32
        return e.num(e.b.op("redux", e.use(number, dtype), *lanes_of(e, found), kind=kind))

    what = {"add": "the sum", "min": "the least", "max": "the greatest"}.get(kind, f"the bitwise {kind}")
    call.__doc__ = f"`{name}(value, lanes=None)`: {what} over the warp, of 32-bit integers, by one instruction."
    word(name)(call)


for _kind in REDUX:
    _redux(_kind)


@word("lane_mask")
def _lane_mask(e: Emitter, given: Arguments) -> Val:
    """`lane_mask(relation="lt")`: a bit for each lane whose number is in that relation (lt, le, eq, ge, gt) to this thread's."""
    found = arguments(e, given, "lane_mask", ("relation",), 0)
    relation = e.text(found.get("relation", Text("lt")), "the relation", RELATIONS)
    return e.num(e.once(("lane_mask", relation), lambda b: b.op("lane_mask", relation=relation)))


number_of(
    "active_mask", "`active_mask()`: a bit for each lane of the warp that is here now.", lambda e: e.num(e.b.op("active_mask"))
)
number_of("elect", "`elect()`: true in one thread of the warp, which must come as a whole.", lambda e: e.num(e.b.op("elect")))


# -- blocks and grids ---------------------------------------------------------------------------------------------


def _counting(name: str, kind: str, doc: str) -> None:
    def call(e: Emitter, given: Arguments) -> Val:
        (predicate,) = arguments(e, given, name, ("predicate",)).values()
        found = e.b.op("barrier_reduce", e.use(e.truth(predicate, "the predicate")), kind=kind)
        return e.index(e.b.cast(found, i64)) if kind == "count" else e.num(found)

    call.__doc__ = f"`{name}(predicate)`: a barrier of the block that tells every thread {doc}"
    word(name)(call)


_counting("barrier_count", "count", "in how many of them the predicate holds.")
_counting("barrier_and", "and", "whether the predicate holds in all of them.")
_counting("barrier_or", "or", "whether the predicate holds in any of them.")


def _named(name: str, doc: str, **attrs: Attr) -> None:
    def call(e: Emitter, given: Arguments) -> Val:
        found = arguments(e, given, name, ("number", "threads"))
        threads = e.constant(found["threads"], "threads")
        if threads < 32 or threads % 32 or threads > e.launch.threads:
            raise e.fail(f"{name} of {threads} threads", f"give a multiple of 32 up to the block's {e.launch.threads}", "TW009")
        which = e.integer(found["number"], "the barrier's number")
        if which.const is not None and not 1 <= which.const <= _NAMED:
            raise e.fail(f"{name} number {which.const}", f"there are numbers 1 to {_NAMED}; 0 is the block's own barrier", "TW009")
        e.b.emit("named_barrier", (e.use(which, i32),), {"threads": threads, **attrs})
        return NOTHING

    call.__doc__ = f"`{name}(number, threads)`: {doc}"
    word(name)(call)


_named(
    "named_barrier", "barrier 1 to 15 of the block among that many of its threads, whole warps: each arrives before any leaves."
)
_named("named_arrive", "arrive at such a barrier without waiting.", arrive=True)
plain(
    "grid_sync", "grid_barrier", "`grid_sync()`: every thread of the grid arrives before any leaves; all blocks must run at once."
)
plain(
    "wait_previous",
    "wait_previous",
    "`wait_previous()`: wait for the kernel launched before, where this one may start before its end.",
)
plain("release_next", "release_next", "`release_next()`: the kernel launched next may start.")


# -- bits ---------------------------------------------------------------------------------------------------------


def _count_bits(name: str, opcode: str, doc: str) -> None:
    def call(e: Emitter, given: Arguments) -> Val:
        (val,) = arguments(e, given, name, ("x",)).values()
        number = e.integer(val, f"the argument of {name}")
        if number.const is not None and number.weak:
            number = Num(u32 if 0 <= number.const < 1 << 32 else i64 if number.const < 1 << 63 else u64, "", None, number.const)
        value = e.b.op(opcode, e.use(number))
        if name == "ffs":
            zero, one = (e.b.const(k, number.dtype) for k in (0, 1))
            value = e.b.select(e.b.op("eq", e.use(number), zero), zero, e.b.add(value, one))
        return e.num(value) if name == "brev" else e.index(e.b.cast(value, i64))

    call.__doc__ = f"`{name}(x)`: {doc}"
    word(name)(call)


_count_bits("popcount", "popcount", "how many bits are 1.")
_count_bits("clz", "clz", "how many bits above the highest 1 are 0; all of them for 0.")
_count_bits("ctz", "ctz", "how many bits below the lowest 1 are 0; all of them for 0.")
_count_bits("ffs", "ctz", "the place of the lowest 1, counted from 1; 0 for 0.")
_count_bits("brev", "brev", "the bits in reverse order.")


def _of_words(name: str, opcode: str, names: tuple[str, ...], doc: str, **attrs: Attr) -> None:
    def call(e: Emitter, given: Arguments) -> Val:
        found = arguments(e, given, name, names)
        words = [e.use(e.integer(v, f"'{k}'"), u32) for k, v in found.items()]
        return e.num(e.b.emit(opcode, words, attrs)[0])

    call.__doc__ = f"`{name}({', '.join(names)})`: {doc}"
    word(name)(call)


_of_words("byte_perm", "byte_perm", ("a", "b", "selector"), "four of the eight bytes of b and a, by the nibbles of the selector.")
_of_words(
    "funnel_left", "funnel_shift", ("low", "high", "n"), "the upper word of high:low shifted left by n modulo 32.", mode="left"
)
_of_words(
    "funnel_right", "funnel_shift", ("low", "high", "n"), "the lower word of high:low shifted right by n modulo 32.", mode="right"
)


@word("mul_high")
def _mul_high(e: Emitter, given: Arguments) -> Val:
    """`mul_high(a, b)`: the upper half of the product of two integers of 32 or 64 bits."""
    a, b = (e.integer(v, "a factor") for v in arguments(e, given, "mul_high", ("a", "b")).values())
    kinds = {number.dtype for number in (a, b) if not number.weak} or {i64}
    dtype: DType = min(kinds, key=lambda d: d.name)
    if len(kinds) > 1 or dtype.bits not in (32, 64):
        raise e.fail(f"mul_high takes two integers of one type of 32 or 64 bits, got {a.dtype} and {b.dtype}", code="TW009")
    return e.num(e.b.op("mul_high", e.use(a, dtype), e.use(b, dtype)))


@word("dp4a")
def _dp4a(e: Emitter, given: Arguments) -> Val:
    """`dp4a(a, b, c)`: c plus the products of the four bytes of a and b, signed where the word is i32."""
    a, b, c = (e.integer(v, f"'{k}'") for k, v in arguments(e, given, "dp4a", ("a", "b", "c")).items())
    for number in (a, b):
        if number.dtype not in (i32, u32):
            raise e.fail(f"dp4a takes words of i32 or u32, got {describe(number)}", code="TW009")
    total = i32 if i32 in (a.dtype, b.dtype) else u32
    return e.num(e.b.op("dp4a", e.use(a), e.use(b), e.use(c, total)))


# -- fast functions -----------------------------------------------------------------------------------------------


def _fast(name: str, opcode: str, doc: str, before: float = 1.0, after: float = 1.0) -> None:
    def call(e: Emitter, given: Arguments) -> Val:
        (val,) = arguments(e, given, name, ("x",)).values()
        value = e.use(e.number(val, f"the argument of {name}"), f32)
        value = value if before == 1.0 else e.b.mul(value, e.b.const(before, f32))
        value = e.b.op(opcode, value)
        return e.num(value if after == 1.0 else e.b.mul(value, e.b.const(after, f32)))

    call.__doc__ = f"`{name}(x)`: {doc}, f32, by the device's own instruction: quick, and less exact."
    word(name)(call)


for _name, _opcode, _doc, _before, _after in (
    ("fast_exp2", "exp2_approx", "2^x", 1.0, 1.0), ("fast_exp", "exp2_approx", "e^x", _LOG2_E, 1.0), ("fast_log2", "log2_approx", "log2(x)", 1.0, 1.0),
    ("fast_log", "log2_approx", "log(x)", 1.0, _LN_2), ("fast_sin", "sin_approx", "sin(x)", 1.0, 1.0), ("fast_cos", "cos_approx", "cos(x)", 1.0, 1.0),
    ("fast_sqrt", "sqrt_approx", "sqrt(x)", 1.0, 1.0), ("fast_rsqrt", "rsqrt_approx", "1 / sqrt(x)", 1.0, 1.0),
    ("fast_rcp", "rcp_approx", "1 / x", 1.0, 1.0), ("fast_tanh", "tanh_approx", "tanh(x)", 1.0, 1.0),
):  # fmt: skip
    _fast(_name, _opcode, _doc, _before, _after)


@word("fast_divide")
def _fast_divide(e: Emitter, given: Arguments) -> Val:
    """`fast_divide(a, b)`: a / b, f32, by the device's own instructions: quick, and less exact; 0 where b is above 2^126."""
    a, b = (e.use(e.number(v, f"'{k}'"), f32) for k, v in arguments(e, given, "fast_divide", ("a", "b")).items())
    return e.num(e.b.op("div_approx", a, b))


# -- time ---------------------------------------------------------------------------------------------------------

number_of("clock", "`clock()`: a counter of the multiprocessor's cycles, of 64 bits.", lambda e: e.num(e.b.op("clock")))
number_of("clock32", "`clock32()`: its lower 32 bits.", lambda e: e.num(e.b.op("clock", bits=32)))
number_of(
    "global_timer",
    "`global_timer()`: nanoseconds, the same clock on all multiprocessors.",
    lambda e: e.num(e.b.op("global_timer")),
)


@word("nanosleep")
def _nanosleep(e: Emitter, given: Arguments) -> Val:
    """`nanosleep(ns)`: do nothing for about that many nanoseconds, at most a million."""
    (val,) = arguments(e, given, "nanosleep", ("ns",)).values()
    e.b.multi("nanosleep", e.use(e.integer(val, "ns"), u32))
    return NOTHING
