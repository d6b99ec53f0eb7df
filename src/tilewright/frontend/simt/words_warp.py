"""Words of explicit kernels for what warps and blocks do together, for bits, for fast functions and for time.

What they take and mean is in `frontend/words/rows.py`, their ops in `ir/ops_simt.py`. Where a word takes `lanes`, that is a mask of the lanes that take part: a bit for each lane of
the warp, the same in all of them. Without it all lanes must come.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, f32, i32, i64, u32, u64
from tilewright.frontend.simt.build import Emitter
from tilewright.frontend.simt.values import NOTHING, NumberValue, Seq, TextValue, Val, describe
from tilewright.frontend.simt.words import BoundArguments, word
from tilewright.frontend.words.rows import WORDS
from tilewright.ir.nodes import Attr, Value
from tilewright.ir.ops_simt import REDUX, RELATIONS

_NAMED = 15
"""Named barriers of a block, besides its own."""
_LOG2_E, _LN_2 = 1.4426950408889634, 0.6931471805599453


def lanes_of(e: Emitter, args: BoundArguments) -> tuple[Value, ...]:
    """The mask of the lanes that take part, where one is given."""
    word = u64 if e.launch.ballot_bits == u64.bits else u32
    return (e.use(e.integer(args["lanes"], "lanes"), word),) if args.get("lanes", NOTHING) != NOTHING else ()


def _mask_bits(e: Emitter) -> dict[str, Attr]:
    """What an op says whose result has a bit for each lane: the bits of that word, where they are not 32."""
    return {} if e.launch.ballot_bits == u32.bits else {"bits": e.launch.ballot_bits}


def plain(name: str, **attrs: Attr) -> None:
    """A word without arguments and result."""

    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        e.b.emit(WORDS[name].ops, (), attrs)
        return NOTHING


def _number(name: str, **attrs: Attr) -> None:
    """A word without arguments that stands for a number."""

    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        return e.num(e.b.emit(WORDS[name].ops, (), attrs)[0])


# -- warps --------------------------------------------------------------------------------------------------------


@word("warp_sync")
def _warp_sync(e: Emitter, args: BoundArguments) -> Val:
    e.b.multi("warp_sync", *lanes_of(e, args))
    return NOTHING


def _shuffle(name: str, mode: str, second: str) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        number = e.number(args["value"], "what is shuffled")
        width = e.constant(args["width"], "width") if "width" in args else e.launch.warp_size
        if not 1 <= width <= e.launch.warp_size or width & (width - 1):
            raise e.fail(f"the width of a shuffle is {width}", f"choose a power of two up to {e.launch.warp_size}", "TW009")
        lane = e.use(e.integer(args[second], f"the {second}"), u32)
        return NumberValue(number.dtype, number.weak, e.b.op("shuffle", e.use(number), lane, *lanes_of(e, args), mode=mode, width=width))


_shuffle("shuffle", "idx", "lane")
_shuffle("shuffle_up", "up", "delta")
_shuffle("shuffle_down", "down", "delta")
_shuffle("shuffle_xor", "xor", "mask")


def _vote(name: str, mode: str) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        predicate = e.use(e.truth(args["predicate"], "the predicate"))
        bits = _mask_bits(e) if mode == "ballot" else {}
        return e.num(e.b.emit("vote", (predicate, *lanes_of(e, args)), {"mode": mode, **bits})[0])


_vote("vote_any", "any")
_vote("vote_all", "all")
_vote("vote_uniform", "uniform")
_vote("ballot", "ballot")


def _matched(e: Emitter, args: BoundArguments) -> tuple[Value, ...]:
    number = e.number(args["value"], "what is matched")
    if number.dtype.is_bool or number.dtype.bits not in (32, 64):
        wide = i32 if number.dtype.is_int or number.dtype.is_bool else f32
        number = NumberValue(wide, "", e.use(number, wide))
    return e.use(number), *lanes_of(e, args)


@word("match_any")
def _match_any(e: Emitter, args: BoundArguments) -> Val:
    return e.num(e.b.emit("match", _matched(e, args), {"mode": "any", **_mask_bits(e)})[0])


@word("match_all")
def _match_all(e: Emitter, args: BoundArguments) -> Val:
    lanes, same = e.b.emit("match", _matched(e, args), {"mode": "all", **_mask_bits(e)})
    return Seq((e.num(lanes), e.num(same)))


def _redux(kind: str) -> None:
    name = f"redux_{kind}"

    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        number = e.integer(args["value"], "what is combined")
        if number.dtype.bits == 64 and not number.weak:
            raise e.fail(f"{name} takes integers of 32 bits, got {describe(number)}", "convert it, or use shuffles", "TW009")
        dtype = u32 if number.dtype.kind == "u" else i32
        return e.num(e.b.op("redux", e.use(number, dtype), *lanes_of(e, args), kind=kind))


for _kind in REDUX:
    _redux(_kind)


@word("lane_mask")
def _lane_mask(e: Emitter, args: BoundArguments) -> Val:
    relation = e.text(args.get("relation", TextValue("lt")), "the relation", RELATIONS)
    return e.num(e.once(("lane_mask", relation), lambda b: b.emit("lane_mask", (), {"relation": relation, **_mask_bits(e)})[0]))


@word("active_mask")
def _active_mask(e: Emitter, args: BoundArguments) -> Val:
    return e.num(e.b.emit("active_mask", (), _mask_bits(e))[0])


_number("elect")


# -- blocks and grids ---------------------------------------------------------------------------------------------


def _counting(name: str, kind: str) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        (predicate,) = args.values()
        total = e.b.op("barrier_reduce", e.use(e.truth(predicate, "the predicate")), kind=kind)
        return e.index(e.b.cast(total, i64)) if kind == "count" else e.num(total)


_counting("barrier_count", "count")
_counting("barrier_and", "and")
_counting("barrier_or", "or")


def _named(name: str, **attrs: Attr) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        threads = e.constant(args["threads"], "threads")
        warp_size = e.launch.warp_size
        if threads < warp_size or threads % warp_size or threads > e.launch.threads:
            raise e.fail(f"{name} of {threads} threads", f"give a multiple of {warp_size} up to the block's {e.launch.threads}", "TW009")
        which = e.integer(args["number"], "the barrier's number")
        if which.const is not None and not 1 <= which.const <= _NAMED:
            raise e.fail(f"{name} number {which.const}", f"there are numbers 1 to {_NAMED}; 0 is the block's own barrier", "TW009")
        e.b.emit("named_barrier", (e.use(which, i32),), {"threads": threads, **attrs})
        return NOTHING


_named("named_barrier")
_named("named_arrive", arrive=True)
plain("grid_sync")
plain("wait_previous")
plain("release_next")


# -- bits ---------------------------------------------------------------------------------------------------------


def _count_bits(name: str) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        (val,) = args.values()
        number = e.integer(val, f"the argument of {name}")
        if number.const is not None and number.weak:
            number = NumberValue(u32 if 0 <= number.const < 1 << 32 else i64 if number.const < 1 << 63 else u64, "", None, number.const)
        value = e.b.op(WORDS[name].ops, e.use(number))
        if name == "ffs":
            zero, one = (e.b.const(k, number.dtype) for k in (0, 1))
            value = e.b.select(e.b.op("eq", e.use(number), zero), zero, e.b.add(value, one))
        return e.num(value) if name == "brev" else e.index(e.b.cast(value, i64))


for _name in ("popcount", "clz", "ctz", "ffs", "brev"):
    _count_bits(_name)


def _of_words(name: str, **attrs: Attr) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        words = [e.use(e.integer(v, f"'{k}'"), u32) for k, v in args.items()]
        return e.num(e.b.emit(WORDS[name].ops, words, attrs)[0])


_of_words("byte_perm")
_of_words("funnel_left", mode="left")
_of_words("funnel_right", mode="right")


@word("mul_high")
def _mul_high(e: Emitter, args: BoundArguments) -> Val:
    a, b = (e.integer(v, "a factor") for v in args.values())
    kinds = {number.dtype for number in (a, b) if not number.weak} or {i64}
    dtype: DType = min(kinds, key=lambda d: d.name)
    if len(kinds) > 1 or dtype.bits not in (32, 64):
        raise e.fail(f"mul_high takes two integers of one type of 32 or 64 bits, got {a.dtype} and {b.dtype}", code="TW009")
    return e.num(e.b.op("mul_high", e.use(a, dtype), e.use(b, dtype)))


@word("dp4a")
def _dp4a(e: Emitter, args: BoundArguments) -> Val:
    a, b, c = (e.integer(v, f"'{k}'") for k, v in args.items())
    for number in (a, b):
        if number.dtype not in (i32, u32):
            raise e.fail(f"dp4a takes words of i32 or u32, got {describe(number)}", code="TW009")
    total = i32 if i32 in (a.dtype, b.dtype) else u32
    return e.num(e.b.op("dp4a", e.use(a), e.use(b), e.use(c, total)))


# -- fast functions -----------------------------------------------------------------------------------------------


def _fast(name: str, before: float = 1.0, after: float = 1.0) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        (val,) = args.values()
        value = e.use(e.number(val, f"the argument of {name}"), f32)
        value = value if before == 1.0 else e.b.mul(value, e.b.const(before, f32))
        value = e.b.op(WORDS[name].ops, value)
        return e.num(value if after == 1.0 else e.b.mul(value, e.b.const(after, f32)))


for _name in ("fast_exp2", "fast_log2", "fast_sin", "fast_cos", "fast_sqrt", "fast_rsqrt", "fast_rcp", "fast_tanh"):
    _fast(_name)
_fast("fast_exp", before=_LOG2_E)
_fast("fast_log", after=_LN_2)


@word("fast_divide")
def _fast_divide(e: Emitter, args: BoundArguments) -> Val:
    a, b = (e.use(e.number(v, f"'{k}'"), f32) for k, v in args.items())
    return e.num(e.b.op("div_approx", a, b))


# -- time ---------------------------------------------------------------------------------------------------------

_number("clock")
_number("clock32", bits=32)
_number("global_timer")


@word("nanosleep")
def _nanosleep(e: Emitter, args: BoundArguments) -> Val:
    (val,) = args.values()
    e.b.multi("nanosleep", e.use(e.integer(val, "ns"), u32))
    return NOTHING
