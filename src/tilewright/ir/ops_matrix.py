"""Rows of the op table for matrix units and asynchronous copies: what one thread of a fast contraction executes.

Shared memory is addressed as a tensor and an element offset from its start. A *swizzled* tile is stored in rows of 128 bytes;
of a byte's linear place `p` (from the tensor's start, which is aligned to 1024 bytes) the bits 4-6 are exchanged with those of
its row: it lies at `p ^ ((p >> 3) & 0x70)`. `swizzled_place` is that function; copies, matrix reads and the emulator share it.

An mbarrier is an element of a shared u64 tensor. It counts arrivals and outstanding bytes; when both are done its phase ends
and the next begins. `mbarrier_wait` with parity p returns once the phase of that parity has ended: 0 waits for the first.

A map with `pixels` is in the engine's im2col mode. It sees images [n, h, w, c]; a *base position* (n, h, w) is where a filter's
first element lies, which may be outside. Base positions form a box: along h from `lower[0]` to h - 1 + `upper[0]`, along w alike.
A copy walks `pixels` of them, w fastest, `steps` apart, and reads `channels` elements at a fixed offset from each.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, bf16, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, u8, u32, u64
from tilewright.base.sizes import Size
from tilewright.ir.layouts import INSTRUCTIONS
from tilewright.ir.nodes import Attr, Attrs
from tilewright.ir.opdef import OpDef, Rule, TypeRuleError, integer
from tilewright.ir.ops_simt import COPY_CACHES, check_cache
from tilewright.ir.types import BOOL, CopyMap, Scalar, Tensor, Type, Vec

ROW_BYTES = 128
"""Bytes of one row of a swizzled tile."""


MOST_PIXELS, MOST_STEP = 1024, 8
"""Pixels of one copy of an image; elements from one base position to the next."""
CORNERS = {4: (-128, 127), 5: (-16, 15)}
"""Between which the corners of an image's box of base positions lie, as offsets from the image's own."""
MOST_OFFSET = {4: 255, 5: 31}
"""How far from its base position a pixel is read, along h and along w."""


PANEL = 32
"""Rows and columns of the tile of sums a `panel_dot` adds to."""
PANEL_STEP = 64
"""Bytes along k of one of its steps."""
PANEL_DTYPES = frozenset({(bf16, bf16, f32), *((a, b, i32) for a in (i8, u8) for b in (i8, u8))})
"""Dtypes of the factors and the sums of a `panel_dot`."""


def swizzled_place(place: int) -> int:
    """Where the byte with that linear place lies in a swizzled tile."""
    return place ^ ((place >> 3) & 0x70)


def _fail(message: str) -> TypeRuleError:
    return TypeRuleError(message)


def _is_index(type_: Type) -> bool:
    return isinstance(type_, Scalar) and type_.dtype.is_int


def _shared(type_: Type, dtype: DType | None = None) -> Tensor:
    if not isinstance(type_, Tensor) or type_.space != "shared" or (dtype is not None and type_.dtype is not dtype):
        raise _fail(f"takes a shared tensor{f' of {dtype}' if dtype else ''}, got {type_}")
    return type_


def _indices(types: Sequence[Type], count: int | None = None) -> None:
    if count is not None and len(types) != count:
        raise _fail(f"takes {count} integers here, got {len(types)}")
    for t in types:
        if not _is_index(t):
            raise _fail(f"takes integers, got {t}")


def _tensor_map(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Tensor) or types[0].space != "global":
        raise _fail("takes a global tensor")
    box, shape, strides = (attrs.get(name) for name in ("box", "shape", "strides"))
    if not all(isinstance(x, tuple) for x in (box, shape, strides)):
        raise _fail("needs attributes box, shape and strides")
    assert isinstance(box, tuple) and isinstance(shape, tuple) and isinstance(strides, tuple)
    if not 1 <= len(box) <= 5 or len(shape) != len(box) or len(strides) != len(box):
        raise _fail("box, shape and strides need one number per axis, five axes at most")
    if not all(isinstance(x, int) and 0 < x <= 256 for x in box):
        raise _fail("a box has 1 to 256 elements along each axis")
    if not all(isinstance(x, int | Size) for x in (*shape, *strides)):
        raise _fail("shape and strides are sizes")
    swizzle = integer(attrs, "swizzle")
    if swizzle not in (0, 32, 64, 128):
        raise _fail("swizzle is 0, 32, 64 or 128 bytes")
    if attrs.get("round") and types[0].dtype is not f32:
        raise _fail("only f32 is rounded")
    return (CopyMap(types[0].dtype, tuple(x for x in box if isinstance(x, int)), swizzle, _pixels(box, attrs)),)


def _pixels(box: tuple[Attr, ...], attrs: Attrs) -> int:
    """How many pixels a copy moves; 0 for a map that is not of images."""
    lower, upper, steps = (attrs.get(name) for name in ("lower", "upper", "steps"))
    if "pixels" not in attrs:
        if not lower is upper is steps is None:
            raise _fail("lower, upper and steps are for maps with pixels")
        return 0
    pixels = integer(attrs, "pixels")
    if not 1 <= pixels <= MOST_PIXELS or len(box) not in (4, 5) or any(x != 1 for x in box[:-1]):
        raise _fail(f"pixels are 1 to {MOST_PIXELS}, of four or five axes, with a box of [1, 1, 1, channels] or [1, 1, 1, 1, channels]")
    for corner in (lower, upper):
        if not isinstance(corner, tuple) or len(corner) != len(box) - 2 or not all(isinstance(x, int | Size) for x in corner):
            raise _fail("lower and upper have a size for each axis of an image: h and w, or d, h and w")
    if not isinstance(steps, tuple) or len(steps) != len(box) - 2 or not all(isinstance(x, int) and 1 <= x <= MOST_STEP for x in steps):
        raise _fail(f"steps are integers from 1 to {MOST_STEP}, one for each axis of an image")
    return pixels


def _tma(types: Sequence[Type], attrs: Attrs, barriers: bool) -> tuple[Type, ...]:
    if len(types) < 3 or not isinstance(types[2], CopyMap):
        raise _fail("takes a shared tensor, an offset into it and a map")
    if _shared(types[0]).dtype.itemsize != types[2].dtype.itemsize or not _is_index(types[1]):
        raise _fail(f"{types[0]} and {types[2]} hold elements of different size")
    rest = list(types[3:])
    if types[2].pixels and not barriers:
        raise _fail("cannot store by a map with pixels")
    if barriers:
        if len(rest) < 2 or not _is_index(rest[1]):
            raise _fail("takes mbarriers and the number of one")
        _shared(rest[0], u64)
        rest = rest[2:]
    _indices(rest, len(types[2].box) + (len(types[2].box) - 2 if types[2].pixels else 0) + (1 if attrs.get("multicast") else 0))
    return ()


def _barrier(extra: int) -> Rule:
    def rule(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
        if not types:
            raise _fail("takes mbarriers")
        _shared(types[0], u64)
        _indices(types[1:], 1 + extra + (1 if attrs.get("remote") else 0))
        return ()

    return rule


def _counted(name: str, rule: Rule) -> Rule:
    def checked(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
        if integer(attrs, name) < 0:
            raise _fail(f"{name} must not be negative")
        return rule(types, attrs)

    return checked


def _nothing(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if types:
        raise _fail("takes no operands")
    return ()


def _map_only(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], CopyMap):
        raise _fail("takes a map")
    return ()


def _one_index(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _indices(types, 1)
    return ()


def _elect(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _nothing(types, attrs)
    return (BOOL,)


def _rank(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _nothing(types, attrs)
    return (Scalar(i32),)


def _load_remote(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 3:
        raise _fail("takes a shared tensor, an index and a rank")
    memory = _shared(types[0])
    _indices(types[1:])
    return (Scalar(memory.dtype),)


MATRIX_DTYPES = (bf16, f16, f32, f8e4m3, f8e5m2, i8, u8)


def accumulator_dtype(dtype: DType) -> DType:
    """What a matrix unit adds products of this dtype up in."""
    return i32 if dtype.is_int else f64 if dtype is f64 else f32


def _wgmma(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    fresh = bool(attrs.get("fresh"))
    if (len(types) != 4) if fresh else (len(types) < 5):
        raise _fail("takes two shared tensors, an offset into each, and accumulators (none where `fresh`)")
    a, b = _shared(types[0]), _shared(types[2])
    if a.dtype is not b.dtype or a.dtype not in MATRIX_DTYPES or not _is_index(types[1]) or not _is_index(types[3]):
        raise _fail(f"cannot multiply {a} and {b}")
    n, k = integer(attrs, "n"), integer(attrs, "k")
    if n % 8 or not 8 <= n <= 256 or k * a.dtype.itemsize != 32:
        raise _fail("n is a multiple of 8 up to 256, k fills 32 bytes")
    steps = attrs.get("steps")
    if not isinstance(steps, tuple) or not all(isinstance(s, tuple) and len(s) == 3 for s in steps):
        raise _fail("needs steps: offsets of a and b in elements, and the first accumulator, of each instruction")
    for name in ("a_major", "b_major"):
        if attrs.get(name, "k") not in ("k", "mn") or (attrs.get(name, "k") == "mn" and a.dtype.itemsize != 2):
            raise _fail(f"{name} is k, or mn for elements of two bytes")
    wanted = Scalar(accumulator_dtype(a.dtype))
    if any(t != wanted for t in types[4:]):
        raise _fail(f"accumulates in {wanted}")
    for step in steps:
        assert isinstance(step, tuple)
        if not isinstance(step[2], int) or (step[2] != 0 if fresh else step[2] + n // 2 > len(types) - 4):
            raise _fail("a step's accumulators are not all there")
    return (wanted,) * (n // 2) if fresh else tuple(types[4:])


def _wgmma_registers(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    dtype, words = attrs.get("dtype"), integer(attrs, "words")
    fresh = bool(attrs.get("fresh"))
    if words < 4 or words % 4 or len(types) < words + (2 if fresh else 3) or any(t != Scalar(u32) for t in types[:words]):
        raise _fail("takes words of u32, four for each 64 x k tile of a, then a shared tensor, an offset into it, and accumulators")
    b = _shared(types[words])
    if not isinstance(dtype, DType) or b.dtype is not dtype or dtype not in MATRIX_DTYPES or not _is_index(types[words + 1]):
        raise _fail(f"cannot multiply words of {dtype} and {b}")
    n, k = integer(attrs, "n"), integer(attrs, "k")
    if n % 8 or not 8 <= n <= 256 or k * dtype.itemsize != 32:
        raise _fail("n is a multiple of 8 up to 256, k fills 32 bytes")
    if attrs.get("b_major", "k") not in ("k", "mn") or (attrs.get("b_major", "k") == "mn" and dtype.itemsize != 2):
        raise _fail("b_major is k, or mn for elements of two bytes")
    accumulators = types[words + 2 :]
    wanted = Scalar(accumulator_dtype(dtype))
    if any(t != wanted for t in accumulators):
        raise _fail(f"accumulates in {wanted}")
    steps = attrs.get("steps")
    if not isinstance(steps, tuple) or not all(isinstance(s, tuple) and len(s) == 3 for s in steps):
        raise _fail("needs steps: the first word of a, the offset of b in elements, and the first accumulator, of each instruction")
    for step in steps:
        assert isinstance(step, tuple)
        first, _, start = step
        there = n // 2 if fresh else len(accumulators)
        if not isinstance(first, int) or not 0 <= first <= words - 4 or not isinstance(start, int) or start + n // 2 > there:
            raise _fail("a step's words or accumulators are not all there")
    if fresh and accumulators:
        raise _fail("takes no accumulators where `fresh`")
    return (wanted,) * (n // 2) if fresh else tuple(accumulators)


def _same_scalars(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if not types or any(not isinstance(t, Scalar) for t in types):
        raise _fail("takes scalars")
    return tuple(types)


MMA_SHAPES: dict[str, tuple[tuple[int, int, int], int, int, int]] = {
    "bf16": ((16, 8, 16), 4, 2, 4), "f16": ((16, 8, 16), 4, 2, 4), "f32": ((16, 8, 8), 4, 2, 4), "i8": ((16, 8, 32), 4, 2, 4),
    "u8": ((16, 8, 32), 4, 2, 4), "f64": ((8, 8, 4), 1, 1, 2),
}  # fmt: skip
"""By operand dtype: m, n, k of one `mma`, and how many registers a, b and the accumulator have in each thread (f32 is tf32)."""
MMA_EIGHT_BITS: dict[str, tuple[tuple[int, int, int], int, int, int]] = {
    "f8e4m3": ((16, 8, 32), 4, 2, 4), "f8e5m2": ((16, 8, 32), 4, 2, 4),
}  # fmt: skip
"""The same of floats of 8 bits. No pass uses these: Hopper makes them of f16, and has its own matrix instructions for them."""


_MMA_DEPTHS = {"f64": (4, 8, 16), "i8": (16,), "u8": (16,), "f16": (8,)}
"""What `k` may say."""


def mma_shape(attrs: Attrs) -> tuple[tuple[int, int, int], int, int, int]:
    """The same for one op. f64 has instructions of 16 rows too, from Hopper on: `k` says how much of the sum they take. i8, u8 and f16 have some that take
    half as much as those above."""
    dtype, k = attrs["dtype"], attrs.get("k")
    assert isinstance(dtype, DType)
    if not isinstance(k, int):
        return (MMA_SHAPES | MMA_EIGHT_BITS)[dtype.name]
    return ((16, 8, k), k // 2, k // 4, 4) if dtype is f64 else ((16, 8, k), 2, 1, 4)


def _mma(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    dtype = attrs.get("dtype")
    if not isinstance(dtype, DType) or dtype.name not in MMA_SHAPES | MMA_EIGHT_BITS:
        raise _fail(f"dtype is one of {', '.join(MMA_SHAPES | MMA_EIGHT_BITS)}")
    if "k" in attrs and attrs["k"] not in _MMA_DEPTHS.get(dtype.name, ()):
        raise _fail("k is 4, 8 or 16 for f64, 16 for i8 and u8, 8 for f16")
    _, a, b, c = mma_shape(attrs)
    operand = Scalar(f64 if dtype is f64 else u32)
    wanted = Scalar(accumulator_dtype(dtype))
    if len(types) != a + b + c or any(t != operand for t in types[: a + b]) or any(t != wanted for t in types[a + b :]):
        raise _fail(f"takes {a} + {b} of {operand} and {c} of {wanted}")
    return (wanted,) * c


def _wave_mma(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    found = INSTRUCTIONS.get(str(attrs.get("instruction")))
    if found is None:
        raise _fail(f"instruction is one of {', '.join(INSTRUCTIONS)}")
    piece, sums = Vec(found.dtype, found.width // found.pieces), Vec(found.total, found.sums)
    if list(types) != [piece] * (2 * found.pieces) + [sums]:
        raise _fail(f"takes {found.pieces} + {found.pieces} of {piece} and {sums}")
    return (sums,)


def _ldmatrix(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 2:
        raise _fail("takes a shared tensor and an offset")
    _shared(types[0])
    _indices(types[1:])
    if integer(attrs, "count") not in (1, 2, 4):
        raise _fail("count is 1, 2 or 4")
    return (Scalar(u32),) * integer(attrs, "count")


def _stmatrix(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) not in (3, 4, 6) or not _is_index(types[1]) or any(t != Scalar(u32) for t in types[2:]):
        raise _fail("takes a shared tensor, an offset, and 1, 2 or 4 of u32")
    _shared(types[0])
    return ()


def _copy_async(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) < 3 or not isinstance(types[2], Tensor) or not _is_index(types[1]):
        raise _fail("takes a shared tensor, an offset, a global tensor and its indices")
    target, source = _shared(types[0]), types[2]
    rest = list(types[3:])
    if attrs.get("masked") and (not rest or rest.pop() != BOOL):
        raise _fail("the last operand says whether to copy; elsewhere zeros are written")
    _indices(rest, source.rank)
    if target.dtype is not source.dtype or integer(attrs, "bytes") not in (4, 8, 16):
        raise _fail("copies 4, 8 or 16 bytes of one dtype")
    check_cache(source, attrs, COPY_CACHES)
    if attrs.get("prefetch", 0) not in (0, 64, 128, 256) or (attrs.get("cache") == "cg" and attrs["bytes"] != 16):
        raise _fail("prefetch is 64, 128 or 256 bytes; only 16 bytes can leave out the first-level cache (cg)")
    return ()


def _copy_remote(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 7 or not _is_index(types[1]) or not _is_index(types[3]):
        raise _fail("takes a shared tensor and an offset, the same to copy from, mbarriers, the number of one, and a rank")
    target, source = _shared(types[0]), _shared(types[2])
    _shared(types[4], u64)
    _indices(types[5:])
    size = integer(attrs, "count") * source.dtype.itemsize
    if target.dtype is not source.dtype or size <= 0 or size % 16:
        raise _fail("copies a multiple of 16 bytes of one dtype")
    return ()


def _to_bits(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Vec) or types[0].dtype.bits * types[0].width != 32:
        raise _fail("takes a vec of 32 bits")
    return (Scalar(u32),)


def _from_bits(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    dtype = attrs.get("dtype")
    if list(types) != [Scalar(u32)] or not isinstance(dtype, DType) or dtype.bits not in (8, 16):
        raise _fail("takes a u32, and dtype of 8 or 16 bits")
    return (Vec(dtype, 32 // dtype.bits),)


def _flag(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    flags = types[0] if types else None
    if not isinstance(flags, Tensor) or flags.space != "global" or flags.dtype is not u32 or flags.rank != 1:
        raise _fail("takes a global tensor of u32 with one axis, and an index")
    _indices(types[1:], 1)
    return ()


def _count_up(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return _flag(types, attrs)


def _await_count(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 3 or types[2] != Scalar(u32):
        raise _fail("takes counters, the index of one, and the number to wait for, a u32")
    return _flag(types[:2], attrs)


def _tensor_at(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    table = types[0] if types else None
    if not isinstance(table, Tensor) or table.space != "global" or table.dtype is not u64 or table.rank != 1:
        raise _fail("takes a global tensor of u64 with one axis, and an index")
    _indices(types[1:], 1)
    dtype, shape, strides, align = attrs.get("dtype"), attrs.get("shape"), attrs.get("strides"), attrs.get("align", 0)
    if not isinstance(dtype, DType) or not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) != len(strides) or not isinstance(align, int):
        raise _fail("needs dtype, shape and strides of the tensor")
    if not all(isinstance(n, int) for n in (*shape, *strides)):
        raise _fail("shape and strides are numbers")
    return (Tensor(dtype, tuple(Size.of(int(str(n))) for n in shape), tuple(Size.of(int(str(n))) for n in strides), "global", align),)


def _panel_dot(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 8 or not all(isinstance(t, Tensor) for t in types[:3]) or not all(map(_is_index, types[3:7])) or types[7] != BOOL:
        raise _fail("takes sums, rows and columns, a place in each, the number of steps, and whether the sums start at zero")
    sums, rows, columns = (t for t in types[:3] if isinstance(t, Tensor))
    second = attrs.get("second")
    if sums.rank != 3 or rows.rank != 3 or columns.rank != 3 or not isinstance(second, DType):
        raise _fail("takes tensors of rank 3, and `second`, the dtype of the second factor")
    if (rows.dtype, second, sums.dtype) not in PANEL_DTYPES or columns.dtype is not u32:
        raise _fail("sums products of bf16 in f32, or of i8 and u8 in i32; columns are words of u32")
    if [s.constant for s in sums.shape[1:]] != [PANEL, PANEL] or rows.shape[1].constant != PANEL or columns.shape[2].constant != PANEL:
        raise _fail(f"panels are {PANEL} wide")
    return ()


def _row(name: str, doc: str, rule: Rule, effect: str, group: str = "matrix") -> OpDef:
    return OpDef(name, doc, rule, frozenset({"thread"}), effect, group)


DEFINITIONS: tuple[OpDef, ...] = (
    _row("tensor_map", "How the copy engine sees a global tensor: `shape` and `strides` (in elements, last axis 1) of up to five axes, the "
         "`box` one copy moves, and the `swizzle` of its rows in shared memory. `pixels`, `lower`, `upper`, `steps`: of images "
         "[n, h, w, c] a copy moves that many pixels, each a box [1, 1, 1, channels]. Their base positions run along w from `lower[1]` "
         "to w - 1 + `upper[1]`, `steps[1]` apart, then on along h, from `lower[0]` to h - 1 + `upper[0]`, `steps[0]` apart, then along n. `round`: "
         "f32 is rounded to tf32, ties to even, on its way to shared memory.",
         _tensor_map, "pure", "copy"),
    _row("prefetch_map", "Fetch a map's description ahead of its first use.", _map_only, "sync", "copy"),
    _row("tma_load", "`tma_load %to, %offset, %map, %barriers, %i, %c0…`: start copying the box at those coordinates into shared memory, "
         "row by row; outside the tensor zeros. Its bytes count on the mbarrier. `multicast`: a last operand has a bit for each block of the "
         "cluster that gets it too. By a map with pixels: `… %n, %h, %w, %c, %oh, %ow`, the first base position and channel, and "
         "the offset from each base position to its pixel.", lambda t, a: _tma(t, a, True), "write", "copy"),
    _row("tma_store", "`tma_store %from, %offset, %map, %c0…`: start copying a box from shared memory; what lies outside the tensor is "
         "left out. Joins the thread's open group.", lambda t, a: _tma(t, a, False), "write", "copy"),
    _row("tma_commit", "Close the thread's group of stores.", _nothing, "sync", "copy"),
    _row("tma_wait", "Wait until at most `pending` of the thread's groups are unfinished; with `read`, until their shared memory has been "
         "read.", _counted("pending", _nothing), "sync", "copy"),
    _row("fence_async", "What this thread wrote to shared memory is seen by the copy engine and by matrix units.", _nothing, "sync", "copy"),
    _row("copy_async", "`copy_async %to, %offset, %from, %i… {bytes}`: start copying neighbouring elements, by this thread. `masked`: a last "
         "operand says whether, else zeros. `cache`: " + " ".join(COPY_CACHES) + "; `prefetch`: bytes to have in L2 around it.", _copy_async, "write", "copy"),
    _row("copy_commit", "Close the thread's group of `copy_async`.", _nothing, "sync", "copy"),
    _row("copy_wait", "Wait until at most `pending` of the thread's groups of `copy_async` are unfinished.", _counted("pending", _nothing),
         "sync", "copy"),
    _row("copy_remote", "`copy_remote %to, %offset, %from, %offset, %barriers, %i, %rank {count}`: start copying that many elements of shared "
         "memory to that of the block with that rank in the cluster. Their bytes count on that block's mbarrier.", _copy_remote, "write", "copy"),
    _row("mbarrier_init", "Make an mbarrier that expects `count` arrivals in every phase.", _counted("count", _barrier(0)), "sync", "barrier"),
    _row("fence_init", "Initialised mbarriers are seen by the whole cluster and the copy engine.", _nothing, "sync", "barrier"),
    _row("mbarrier_arrive", "Arrive. `remote`: a last operand is the rank of the block in the cluster whose mbarrier it is.", _barrier(0),
         "sync", "barrier"),
    _row("mbarrier_expect", "Arrive, and expect `bytes` to be copied in this phase.", _counted("bytes", _barrier(0)), "sync", "barrier"),
    _row("mbarrier_wait", "`mbarrier_wait %barriers, %i, %parity`: wait until the phase of that parity has ended.", _barrier(1), "sync",
         "barrier"),
    _row("named_barrier", "`named_barrier %id {threads}`: barrier number id among that many threads of the block; with `arrive`, do not "
         "wait.", _counted("threads", _one_index), "sync", "barrier"),
    _row("cluster_rank", "This block's number in its cluster.", _rank, "pure", "barrier"),
    _row("load_remote", "`load_remote %shared, %i, %rank`: an element of the same shared memory in the block with that rank in the cluster.",
         _load_remote, "read", "copy"),
    _row("cluster_sync", "Every thread of the cluster arrives before any leaves. `arrived`: this thread has arrived, by `cluster_arrive`.", _nothing, "sync",
         "barrier"),
    _row("cluster_arrive", "This thread has read all it wants of the memory of others in its cluster, and only waits at the next `cluster_sync`.", _nothing,
         "sync", "barrier"),
    _row("wait_previous", "Wait for the kernel launched before, where this one may start before its end.", _nothing, "sync", "barrier"),
    _row("release_next", "The kernel launched next may start.", _nothing, "sync", "barrier"),
    _row("raise_flag", "`raise_flag %flags, %i`: make it 1, after all that this thread, and those it has met at a barrier, have written.", _flag,
         "write", "barrier"),
    _row("await_flag", "`await_flag %flags, %i`: wait until it is not 0; what was written before it was raised is seen from here on. Only blocks of "
         "lower number may be waited for: those have started.", _flag, "sync", "barrier"),
    _row("count_up", "`count_up %counters, %i`: add 1 to it, after all that this thread, and those it has met at a barrier, have written.", _count_up, "write", "barrier"),
    _row("await_count", "`await_count %counters, %i, %n`: wait until it has come to `%n`, counted modulo 2^32; what was written before those steps is seen from here on. All "
         "blocks must run at once: the launch is cooperative. `code`: a number by which a watchdog names the wait; `pause`: nanoseconds between "
         "two looks; `polls` relaxed, fence: looks do not acquire, but one more behind the last, or a fence.", _await_count, "sync", "barrier"),
    _row("tensor_at", "`tensor_at %table, %i {dtype, shape, strides, align}`: the tensor at the address that the table holds there. `constant`: nobody writes to it "
         "while the kernel runs.", _tensor_at, "read", "memory"),
    _row("set_registers", "Give registers back or take more: `count` for each thread of the warp group; `increase` or not.",
         _counted("count", _nothing), "sync", "thread"),
    _row("elect", "True in one thread of the warp.", _elect, "sync", "thread"),
    _row("wgmma", "`wgmma %a, %oa, %b, %ob, %acc… {n, k, steps}`: a group of matrix instructions of the four warps of a warp group, started "
         "here: each adds the product of a 64 x k tile of a and a k x n tile of b, both swizzled. A step gives offsets to add to oa and ob and the "
         "first of its n/2 accumulators. `a_major`, `b_major`: `k` (rows along k) or `mn` (rows of k hold 64 elements along m or n; blocks of 64 lie "
         "`a_block` or `b_block` elements apart). Accumulator r of thread t: row 16 (t / 32) + 8 (r / 2 % 2) + t % 32 / 4, column 8 (r / 4) + "
         "2 (t % 4) + r % 2. `fresh`: there are no accumulators before, all steps add to the same, which begin as zero. `negate` is not offered.", _wgmma, "sync"),
    _row("wgmma_registers", "`wgmma_registers %w…, %b, %ob, %acc… {dtype, words, n, k, steps}`: `wgmma` with a from registers: `words` of u32, four "
         "for each 64 x k tile. A step gives its first word, an offset to add to ob, and the first of its accumulators. With v = 4 bytes of elements in a "
         "word, word r of thread t holds row 16 (t / 32) + 8 (r % 2) + t % 32 / 4, columns 4 v (r / 2) + v (t % 4) and following. `fresh` as for `wgmma`.",
         _wgmma_registers, "sync"),
    _row("wgmma_wait", "Wait until at most `pending` groups of `wgmma` are unfinished; gives the accumulators. `finished`: those given are of no group "
         "that is.",
         _counted("pending", _same_scalars), "sync"),
    _row("mma", "`mma %a… %b… %c… {dtype}`: the warp's matrix instruction on registers; f32 means tf32. f8 needs a GPU that has it. f64 with `k` (4, 8, 16): the "
         "instructions of 16 rows that Hopper has; i8 and u8 with `k` 16, f16 with 8 (from sm_75 on): half of the usual sum.", _mma, "sync"),
    _row("wave_mma", "`wave_mma %a…, %b…, %c {instruction}`: a matrix instruction of AMD's waves: the product of a 16 x k and a k x 16 matrix added to c. "
         "`ir/layouts.py` says which element lies where.", _wave_mma, "sync"),
    _row("ldmatrix", "`ldmatrix %t, %offset {count, trans}`: count 8x8 matrices of 16-bit elements from shared memory; lane l gives the place of "
         "row l % 8 of matrix l / 8, and gets elements 2 (l % 4) and the next of row l / 4 (with `trans`, of column l / 4).", _ldmatrix, "sync"),
    _row("stmatrix", "The reverse of `ldmatrix`.", _stmatrix, "sync"),
    OpDef("panel_begin", "From here on this thread uses a CPU's matrix unit.", _nothing, frozenset({"tile", "thread"}), "sync", "matrix"),
    OpDef("panel_end", "It no longer does.", _nothing, frozenset({"tile", "thread"}), "sync", "matrix"),
    OpDef("panel_dot", "`panel_dot %sums, %rows, %columns, %where, %row, %panel, %steps, %first {second}`: add the product of panel `row` of rows, "
          "[32, k], and panel `panel` of columns, [k / g, 32] in words of g neighbours along k, to tile `where` of sums, [32, 32]; to zero instead "
          "if `first`. A step is 64 bytes along k. Of bf16, denormal factors and sums count as zero; of each step the sums over even and over "
          "odd k are made first.", _panel_dot, frozenset({"tile", "thread"}), "write", "matrix"),
    _row("to_bits", "A vec of 32 bits as one u32, first element lowest.", _to_bits, "pure", "thread"),
    _row("from_bits", "A u32 as a vec of `dtype`.", _from_bits, "pure", "thread"),
)  # fmt: skip
