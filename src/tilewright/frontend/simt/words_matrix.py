"""Words of explicit kernels for tensor cores: fragments of matrices in the registers of a warp.

A fragment is a tuple of numbers that only the words here look into. `fragment_a` is 16 rows of a first factor, `fragment_b` 16 columns
of a second one, `fragment_c` 16 x 16 sums; along the sum they have 16 elements of f16 or bf16, 8 of f32 (which counts as tf32), 32 of
i8, u8 or 8-bit floats. `wmma_load` and its relatives have the shapes of CUDA's WMMA; their fragments know shape and dtype, and are made of the registers
of `mma`. `mma_sync` and `ldmatrix` are the single instructions below that, on registers as NVIDIA's manual lays them out.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, f16, f32, f64, i32, i64, u32
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.frontend.simt.build import Emitter
from tilewright.frontend.simt.values import NOTHING, MemoryValue, NumberValue, RecordValue, Seq, Val, describe
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


# -- shapes of CUDA's WMMA ------------------------------------------------------------------------------------------

WMMA_SHAPES = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16), "m16n16k8": (16, 16, 8)}
"""By name: m, n, k."""
_WMMA_DTYPES = ("f16", "bf16", "f32", "i8", "u8")


@record
class WmmaFragment:
    """What a fragment is: a part of a product of that shape."""

    part: str
    m: int
    n: int
    k: int
    """Of sums: 0."""
    dtype: DType

    @property
    def __name__(self) -> str:
        extents = {"a": (self.m, self.k), "b": (self.k, self.n), "c": (self.m, self.n)}[self.part]
        return f"{self.dtype} fragment {self.part} of {extents[0]} x {extents[1]}"

    @property
    def turned(self) -> bool:
        """Whether the transposed product is computed: instructions have 16 rows and 8 columns."""
        return self.m == 8

    @property
    def blocks(self) -> tuple[int, int]:
        """Instructions along rows and columns."""
        m, n = (self.n, self.m) if self.turned else (self.m, self.n)
        return m // 16, n // 8


def matrix_depth(target: Target) -> int:
    """How many products of f16 an instruction adds up at once: Turing's fewer than those after it."""
    return 8 if target.has("mma") and not target.has("bf16") else 16


def _wmma_shape(e: Emitter, args: BoundArguments) -> tuple[int, int, int]:
    return WMMA_SHAPES[e.text(args["shape"], "the shape", tuple(WMMA_SHAPES))] if "shape" in args else WMMA_SHAPES["m16n16k16"]


def _wmma(e: Emitter, val: Val, what: str, parts: str) -> tuple[WmmaFragment, list[Value]]:
    """What a fragment is, and its registers."""
    if not isinstance(val, RecordValue) or not isinstance(val.kind, WmmaFragment) or val.kind.part not in parts:
        raise e.fail(f"{what} is {describe(val)}, not a fragment {parts}", "make it with tw.wmma_load(...), tw.wmma_fill(...) or tw.wmma_mma(...)", "TW009")
    return val.kind, [e.use(e.number(item)) for item in val.items]


def _wmma_value(e: Emitter, kind: WmmaFragment, registers: Sequence[Value]) -> Val:
    return RecordValue(kind, tuple(f"register {r}" for r in range(len(registers))), tuple(map(e.num, registers)))


def _wmma_places(e: Emitter, kind: WmmaFragment, transposed: bool) -> list[list[tuple[Value, Value]]]:
    """For each register, the rows and columns of its elements in the array."""
    b, (group, inner) = e.b, _position(e)
    first = (kind.part == "a") != kind.turned
    found: list[list[tuple[Value, Value]]] = []

    def at(across: int, along: int, base: Value) -> tuple[Value, Value]:
        return b.add(group, b.index(across)), b.add(base, b.index(along))

    if kind.part == "c":
        base, (rows, columns) = b.mul(inner, b.index(2)), kind.blocks
        for row, column in ((i, j) for i in range(rows) for j in range(columns)):
            found += [[at(16 * row + 8 * (r // 2), 8 * column + r % 2, base)] for r in range(4)]
        flipped = kind.turned
    else:
        per = 4 // kind.dtype.itemsize
        base = b.mul(inner, b.index(per))
        steps = kind.k // (4 * per)
        for block in range(kind.blocks[0] if first else kind.blocks[1]):
            # A first factor has two blocks of eight rows in turn, a second one eight columns.
            halves = [(8 * (2 * block + half), step) for step in range(steps) for half in (0, 1)] if first else [(8 * block, step) for step in range(steps)]
            found += [[at(across, 4 * per * step + j, base) for j in range(per)] for across, step in halves]
        flipped = kind.part == "b"
    return [[(y, x) if flipped != transposed else (x, y) for x, y in elements] for elements in found]


@word("wmma_load")
def _wmma_load(e: Emitter, args: BoundArguments) -> Val:
    memory, (row, column) = _matrix(e, args)
    part, (m, n, k), dtype = e.text(args["part"], "the part", ("a", "b", "c")), _wmma_shape(e, args), memory.type.dtype
    if part == "c" and dtype not in (f32, i32):
        raise e.fail(f"sums of tensor cores are f32 or i32, and {describe(memory)} holds {dtype}", code="TW009")
    if part != "c" and (dtype.name not in _WMMA_DTYPES or (k == 8) != (dtype is f32)):
        raise e.fail(
            f"there is no matrix instruction m{m}n{n}k{k} of {dtype}", "f16, bf16, i8 and u8 have m16n16k16, m32n8k16 and m8n32k16, f32 (as tf32) has m16n16k8", "TW009"
        )
    kind = WmmaFragment(part, m, n, 0 if part == "c" else k, dtype)
    b, registers = e.b, []
    for elements in _wmma_places(e, kind, _is_transposed(e, args)):
        items = [b.op("load", memory.value, b.add(row, y), b.add(column, x)) for y, x in elements]
        if part == "c":
            registers += items
        else:
            registers.append(b.bitcast(items[0], u32) if len(items) == 1 else b.op("to_bits", b.op("pack", *items)))
    return _wmma_value(e, kind, registers)


def _is_transposed(e: Emitter, args: BoundArguments) -> bool:
    return bool("transposed" in args and e.truth(args["transposed"], "'transposed'").const)


@word("wmma_fill")
def _wmma_fill(e: Emitter, args: BoundArguments) -> Val:
    dtype = e.dtype(args["dtype"], "dtype") if "dtype" in args else f32
    if dtype not in (f32, i32):
        raise e.fail(f"sums of tensor cores are f32 or i32, not {dtype}", code="TW009")
    m, n, _ = _wmma_shape(e, args)
    value = e.use(e.number(args["value"]), dtype) if "value" in args else e.b.const(0, dtype)
    return _wmma_value(e, WmmaFragment("c", m, n, 0, dtype), [value] * 8)


@word("wmma_mma")
def _wmma_mma(e: Emitter, args: BoundArguments) -> Val:
    (left, a), (right, b), (sums, c) = (_wmma(e, args[name], f"'{name}'", name) for name in "abc")
    dtype = left.dtype
    if (left.m, left.n, left.k, dtype) != (right.m, right.n, right.k, right.dtype):
        raise e.fail(f"a is for m{left.m}n{left.n}k{left.k} of {dtype}, b for m{right.m}n{right.n}k{right.k} of {right.dtype}", code="TW009")
    if (sums.m, sums.n, sums.dtype) != (left.m, left.n, accumulator_dtype(dtype)):
        raise e.fail(
            f"c has {sums.m} x {sums.n} sums of {sums.dtype}; those of a and b are {left.m} x {left.n} of {accumulator_dtype(dtype)}", code="TW009"
        )
    first, second = (b, a) if left.turned else (a, b)
    rows, columns = left.blocks
    one, other = len(first) // rows, len(second) // columns
    attrs: dict[str, Attr] = {"dtype": dtype}
    if dtype.itemsize == 1:
        attrs["k"] = 16
    halves = left.k // matrix_depth(e.launch.target) if dtype is f16 else 1
    if halves == 2:
        attrs["k"] = 8
    results: list[Value] = []
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        left_registers, right_registers = first[one * row : one * (row + 1)], second[other * column : other * (column + 1)]
        total = tuple(c[4 * place : 4 * place + 4])
        for half in range(halves):
            x, y = (part[half * len(part) // halves : (half + 1) * len(part) // halves] for part in (left_registers, right_registers))
            total = emit(e, "mma", (*x, *y, *total), attrs)
        results += total
    return _wmma_value(e, sums, results)


@word("wmma_store")
def _wmma_store(e: Emitter, args: BoundArguments) -> Val:
    memory, (row, column) = _matrix(e, args)
    kind, registers = _wmma(e, args["c"], "'c'", "c")
    for value, ((y, x),) in zip(registers, _wmma_places(e, kind, _is_transposed(e, args)), strict=True):
        e.b.multi("store", memory.value, e.b.add(row, y), e.b.add(column, x), e.use(e.num(value), memory.type.dtype))
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
