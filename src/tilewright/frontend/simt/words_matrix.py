"""Words of explicit kernels for tensor cores: fragments of matrices in the registers of a warp.

A fragment is a tuple of numbers that only the words here look into. `fragment_a` is 16 rows of a first factor, `fragment_b` 16 columns
of a second one, `fragment_c` 16 x 16 sums; along the sum they have 16 elements of f16 or bf16, 8 of f32 (which counts as tf32), 32 of
i8, u8 or 8-bit floats. `mma_sync` and `ldmatrix` are the single instructions below that, on registers as NVIDIA's manual lays them out.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, f32, f64, i32, i64, u32
from tilewright.frontend.simt.build import Emitter
from tilewright.frontend.simt.values import NOTHING, MemoryValue, NumberValue, Seq, Val, describe
from tilewright.frontend.simt.words import BoundArguments, element, word
from tilewright.frontend.simt.words_memory import emit, offset
from tilewright.ir.layouts import MMA_LANES
from tilewright.ir.nodes import Attr, Value
from tilewright.ir.ops_matrix import MMA_EIGHT_BITS, MMA_SHAPES, accumulator_dtype
from tilewright.ir.types import dtype_of

_SHAPES = {name: shape for name, shape in (MMA_SHAPES | MMA_EIGHT_BITS).items() if name != "f64"}


def _shape(e: Emitter, dtype: DType) -> int:
    """Elements along the sum of a fragment."""
    if dtype.name not in _SHAPES:
        raise e.fail(f"tensor cores take no {dtype}", f"they take {', '.join(_SHAPES)}", "TW009")
    return _SHAPES[dtype.name][0][2]


def _position(e: Emitter) -> tuple[Value, Value]:
    """The thread's row and column among the registers of a warp."""
    thread = e.thread()
    lane = e.once("lane", lambda b: b.op("mod", thread, b.index(MMA_LANES), name="lane"))
    return e.once("fragment_row", lambda b: b.op("floordiv", lane, b.index(4))), e.once(
        "fragment_column", lambda b: b.op("mod", lane, b.index(4))
    )


def _matrix(e: Emitter, args: BoundArguments) -> tuple[MemoryValue, tuple[Value, Value]]:
    memory, place = element(e, args["array"], args["index"])
    if memory.type.rank != 2 or memory.given:
        raise e.fail(f"{describe(memory)} is no matrix: it has {memory.type.rank} axes", code="TW003")
    return memory, (place[0], place[1])


def _operand(name: str, second: bool) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        memory, (row, column) = _matrix(e, args)
        _shape(e, memory.type.dtype)
        transposed = bool("transposed" in args and e.truth(args["transposed"], "'transposed'").const)
        return Seq(tuple(_words(e, memory, row, column, second, second != transposed)))


def _words(e: Emitter, memory: MemoryValue, row: Value, column: Value, second: bool, along_rows: bool) -> list[NumberValue]:
    """The registers of a fragment. `along_rows`: the sum runs along the first axis of the array."""
    b, (group, inner) = e.b, _position(e)
    dtype = memory.type.dtype
    per = 4 // dtype.itemsize
    first = b.mul(inner, b.index(per))
    made: list[NumberValue] = []
    for register in range(4):
        # The first factor has two blocks of eight rows in turn; of the second, eight columns come after the other eight.
        block, step = (register // 2, register % 2) if second else (register % 2, register // 2)
        across = b.add(group, b.index(8 * block))
        along = b.add(first, b.index(4 * per * step))
        items: list[Value] = []
        for k in range(per):
            at = b.add(along, b.index(k))
            place = (b.add(row, at), b.add(column, across)) if along_rows else (b.add(row, across), b.add(column, at))
            items.append(b.op("load", memory.value, *place))
        word_ = b.bitcast(items[0], u32) if per == 1 else b.op("to_bits", b.op("pack", *items))
        made.append(e.num(word_))
    return made


_operand("fragment_a", False)
_operand("fragment_b", True)


@word("fragment_c")
def _fragment_c(e: Emitter, args: BoundArguments) -> Val:
    dtype = e.dtype(args["dtype"], "dtype") if "dtype" in args else f32
    if dtype.name not in ("f32", "i32"):
        raise e.fail(f"sums of tensor cores are f32 or i32, not {dtype}", code="TW009")
    value = e.use(e.number(args["value"]), dtype) if "value" in args else e.b.const(0, dtype)
    return Seq(tuple(e.num(value) for _ in range(8)))


def _numbers(e: Emitter, val: Val, what: str, count: int, dtype: DType) -> list[Value]:
    items = val.items if isinstance(val, Seq) else (val,)
    if len(items) != count:
        raise e.fail(f"{what} has {len(items)} register(s), not {count}", code="TW016")
    numbers = [e.number(item, what) for item in items]
    if any(n.dtype is not dtype and not n.weak for n in numbers):
        raise e.fail(f"{what} is made of {numbers[0].dtype}, not {dtype}", code="TW009")
    return [e.use(n, dtype) for n in numbers]


@word("fragment_mma")
def _fragment_mma(e: Emitter, args: BoundArguments) -> Val:
    dtype = e.dtype(args["dtype"], "dtype")
    _shape(e, dtype)
    total = accumulator_dtype(dtype)
    a, b = (_numbers(e, args[name], f"'{name}'", 4, u32) for name in "ab")
    c = _numbers(e, args["c"], "'c'", 8, total)
    halves = [emit(e, "mma", (*a, *b[2 * k : 2 * k + 2], *c[4 * k : 4 * k + 4]), {"dtype": dtype}) for k in (0, 1)]
    return Seq(tuple(e.num(v) for half in halves for v in half))


def _sum_places(e: Emitter, row: Value, column: Value) -> list[tuple[Value, Value]]:
    """Where in a matrix each register of 16 x 16 sums belongs."""
    b, (group, inner) = e.b, _position(e)
    places: list[tuple[Value, Value]] = []
    for register in range(8):
        half, r = divmod(register, 4)
        down = b.add(row, b.add(group, b.index(8 * (r // 2))))
        across = b.add(column, b.add(b.mul(inner, b.index(2)), b.index(8 * half + r % 2)))
        places.append((down, across))
    return places


@word("fragment_load")
def _fragment_load(e: Emitter, args: BoundArguments) -> Val:
    memory, (row, column) = _matrix(e, args)
    return Seq(tuple(e.num(e.b.op("load", memory.value, *place)) for place in _sum_places(e, row, column)))


@word("fragment_store")
def _fragment_store(e: Emitter, args: BoundArguments) -> Val:
    memory, (row, column) = _matrix(e, args)
    items = args["c"].items if isinstance(args["c"], Seq) else ()
    if len(items) != 8:
        raise e.fail(
            f"{describe(args['c'])} is no fragment of sums", "make it with tw.fragment_c() or tw.fragment_mma(...)", "TW009"
        )
    for item, place in zip(items, _sum_places(e, row, column), strict=True):
        e.b.multi("store", memory.value, *place, e.use(e.number(item), memory.type.dtype))
    return NOTHING


# -- single instructions ------------------------------------------------------------------------------------------


@word("mma_sync")
def _mma_sync(e: Emitter, args: BoundArguments) -> Val:
    dtype = e.dtype(args["dtype"], "dtype")
    if dtype is f64:
        _, *counts = MMA_SHAPES["f64"]
    else:
        _shape(e, dtype)
        counts = list(_SHAPES[dtype.name][1:])
    operand, total = (f64 if dtype is f64 else u32), accumulator_dtype(dtype)
    a, b, c = (
        _numbers(e, args[n], f"'{n}'", count, kind)
        for n, count, kind in zip("abc", counts, (operand, operand, total), strict=True)
    )
    return Seq(tuple(map(e.num, emit(e, "mma", (*a, *b, *c), {"dtype": dtype}))))


def _transposed(e: Emitter, args: BoundArguments) -> dict[str, Attr]:
    return {"trans": True} if "trans" in args and e.truth(args["trans"], "'trans'").const else {}


@word("ldmatrix")
def _ldmatrix(e: Emitter, args: BoundArguments) -> Val:
    memory, at = offset(e, args["array"], args["index"], "the array")
    count = e.constant(args["count"], "count") if "count" in args else 4
    words = emit(e, "ldmatrix", (memory.value, at), {"count": count} | _transposed(e, args))
    return Seq(tuple(map(e.num, words)))


@word("stmatrix")
def _stmatrix(e: Emitter, args: BoundArguments) -> Val:
    memory, at = offset(e, args["array"], args["index"], "the array")
    words: Sequence[Val] = args["words"].items if isinstance(args["words"], Seq) else (args["words"],)
    emit(e, "stmatrix", (memory.value, at, *(e.use(e.integer(w, "a word"), u32) for w in words)), _transposed(e, args))
    return NOTHING


@word("pack_bits")
def _pack_bits(e: Emitter, args: BoundArguments) -> Val:
    dtype = e.dtype(args["dtype"], "dtype")
    items = args["values"].items if isinstance(args["values"], Seq) else (args["values"],)
    if dtype.is_bool or dtype.bits * len(items) != 32 or len(items) < 2:
        raise e.fail(f"{len(items)} of {dtype} are not 32 bits", "give two numbers of 16 bits or four of 8", "TW009")
    numbers = [e.use(e.number(item, "a value"), dtype) for item in items]
    return e.num(e.b.op("to_bits", e.b.op("pack", *numbers)))


@word("unpack_bits")
def _unpack_bits(e: Emitter, args: BoundArguments) -> Val:
    dtype = e.dtype(args["dtype"], "dtype")
    if dtype.is_bool or dtype.bits not in (8, 16):
        raise e.fail(f"32 bits are not several of {dtype}", "name a dtype of 16 or 8 bits", "TW009")
    (value,) = emit(e, "from_bits", (e.use(e.integer(args["word"], "the word"), u32),), {"dtype": dtype})
    return Seq(tuple(e.num(e.b.op("extract", value, lane=k)) for k in range(32 // dtype.bits)))


# -- warp groups --------------------------------------------------------------------------------------------------


@word("wgmma")
def _wgmma(e: Emitter, args: BoundArguments) -> Val:
    a, at = offset(e, args["a"], args["a_index"], "'a'")
    b, bt = offset(e, args["b"], args["b_index"], "'b'")
    n, count = e.constant(args["n"], "n"), e.constant(args["steps"], "steps") if "steps" in args else 1
    total = accumulator_dtype(a.type.dtype)
    sums = _numbers(e, args["sums"], "'sums'", n // 2, total)
    k = 32 // a.type.dtype.itemsize
    attrs: dict[str, Attr] = {"n": n, "k": k, "steps": tuple((s * k, s * k, 0) for s in range(count))}
    places = (a.value, e.b.cast(at, i64), b.value, e.b.cast(bt, i64))
    return Seq(tuple(map(e.num, emit(e, "wgmma", (*places, *sums), attrs))))


@word("wgmma_wait")
def _wgmma_wait(e: Emitter, args: BoundArguments) -> Val:
    items = args["sums"].items if isinstance(args["sums"], Seq) else (args["sums"],)
    sums = [e.use(e.number(item, "a sum")) for item in items]
    for value in sums:
        if dtype_of(value.type) not in (f32, i32):
            raise e.fail(f"sums of warp groups are f32 or i32, not {dtype_of(value.type)}", "give what tw.wgmma(...) gave", "TW009")
    pending = e.constant(args["pending"], "pending") if "pending" in args else 0
    return Seq(tuple(map(e.num, emit(e, "wgmma_wait", sums, {"pending": pending}))))


@word("set_registers")
def _set_registers(e: Emitter, args: BoundArguments) -> Val:
    count = e.constant(args["count"], "count")
    if count % 8 or not 24 <= count <= 240:
        raise e.fail(f"{count} registers", "give a multiple of 8 from 24 to 240", "TW009")
    increase = e.text(args["direction"], "the direction", ("increase", "decrease")) == "increase"
    emit(e, "set_registers", (), {"count": count, "increase": increase})
    return NOTHING
