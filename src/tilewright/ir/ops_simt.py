"""Rows of the op table for explicit kernels: atomics with scope and order, what the lanes of a warp do together, and bit tricks.

A *lane* is a thread's number in its warp. Ops of a warp take, where they say so, a last operand `mask` (a bit for each lane):
the lanes that take part. Every lane that comes there must be named in its own mask, all lanes named must come there, with the same
mask. Without a mask all lanes of the warp take part.

Scopes say who sees an access in order: `thread`, `block`, `cluster`, `device` or `system`. Orders say what it orders: `relaxed`
nothing but the element itself, `release` all accesses of the thread before it, `acquire` all after it, `acq_rel` both.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, bf16, f16, f32, f64, i32, i64, u32, u64
from tilewright.ir.nodes import Attrs
from tilewright.ir.opdef import OpDef, Rule, TypeRuleError, memory_access
from tilewright.ir.types import BOOL, NumberType, Scalar, Tensor, Type, Vec

ATOMICS = ("add", "sub", "min", "max", "and", "or", "xor", "exchange", "cas", "inc", "dec")
ORDERS = ("relaxed", "acquire", "release", "acq_rel")
LOAD_ORDERS = ("relaxed", "acquire", "volatile")
STORE_ORDERS = ("relaxed", "release", "volatile")
ACCESS_SCOPES = ("block", "cluster", "device", "system")
"""Scopes of accesses; a fence has `thread` too, which orders nothing."""
REDUX = ("add", "min", "max", "and", "or", "xor")
RELATIONS = ("lt", "le", "eq", "ge", "gt")
_INTEGER_ONLY = ("and", "or", "xor", "inc", "dec")
_VECTOR_ADDS = {f32: (2, 4), f16: (2, 4, 8), bf16: (2, 4, 8)}
"""By dtype: how many neighbours one atomic addition takes."""
_WORD, _LONG = Scalar(u32), Scalar(u64)


def _fail(message: str) -> TypeRuleError:
    return TypeRuleError(message)


def _one_of(attrs: Attrs, name: str, allowed: Sequence[str], default: str | None = None) -> str:
    value = attrs.get(name, default)
    if value not in allowed:
        raise _fail(f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}")
    return str(value)


def _bits(type_: Type) -> int:
    """Bits of a scalar or vec."""
    assert isinstance(type_, Scalar | Vec)
    return type_.dtype.bits * (type_.width if isinstance(type_, Vec) else 1)


# -- atomics ----------------------------------------------------------------------------------------------------------


def _atomic_problem(kind: str, dtype: DType) -> str:
    """Why there is no such read-modify-write of a single element; empty where there is."""
    if dtype.is_bool or dtype.bits not in (16, 32, 64) or (dtype.is_float and dtype not in (f16, bf16, f32, f64)):
        return f"no atomic of {dtype}: elements have 16, 32 or 64 bits"
    if dtype.is_float and kind in _INTEGER_ONLY:
        return f"atomic {kind} takes integers, got {dtype}"
    return ""


def vector_atomic(kind: str, type_: Vec) -> str:
    """Why there is no such read-modify-write of neighbours; empty where there is."""
    if kind in ("exchange", "cas"):
        return "" if _bits(type_) == 128 else f"atomic {kind} takes a vec of 128 bits, got {type_}"
    if kind != "add" or type_.width not in _VECTOR_ADDS.get(type_.dtype, ()):
        return "neighbours are added: 2 or 4 of f32; 2, 4 or 8 of f16 or bf16"
    return ""


def _accessed(types: Sequence[Type], operands: int) -> tuple[Tensor, NumberType]:
    """The tensor and the type of what is accessed: a vec where the operands after the indices are."""
    memory, access = memory_access(types, operands)
    given = types[-1] if operands else access
    if isinstance(given, Vec) and isinstance(access, Scalar) and given.dtype is memory.dtype:
        access = given
    if any(t != access for t in types[1 + memory.rank :]):
        raise _fail(f"works on {access}, got {types[-1]}")
    return memory, access


def _atomic(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    kind = _one_of(attrs, "kind", ATOMICS)
    memory, access = _accessed(types, 2 if kind == "cas" else 1)
    _one_of(attrs, "scope", ACCESS_SCOPES, "device")
    _one_of(attrs, "order", ORDERS, "relaxed")
    problem = vector_atomic(kind, access) if isinstance(access, Vec) else _atomic_problem(kind, memory.dtype)
    if memory.space not in ("global", "shared"):
        problem = f"no atomic on {memory.space} memory"
    if isinstance(access, Vec) and memory.space != "global" and kind == "add":
        problem = "neighbours are added in global memory only"
    if problem:
        raise _fail(problem)
    return (access,)


def _atomic_load(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    memory, access = memory_access(types, 0)
    width = attrs.get("width", 1)
    if not isinstance(width, int) or width < 1 or not isinstance(access, Scalar):
        raise _fail("takes a tensor and scalar indices, and a positive width")
    result: Type = Vec(memory.dtype, width) if width > 1 else access
    _check_access(memory, result, attrs, LOAD_ORDERS)
    return (result,)


def _atomic_store(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    memory, access = _accessed(types, 1)
    _check_access(memory, access, attrs, STORE_ORDERS)
    return ()


def _check_access(memory: Tensor, access: Type, attrs: Attrs, orders: Sequence[str]) -> None:
    _one_of(attrs, "order", orders, "relaxed")
    _one_of(attrs, "scope", ACCESS_SCOPES, "device")
    if memory.space not in ("global", "shared") or memory.dtype.is_bool or _bits(access) not in (8, 16, 32, 64, 128):
        raise _fail(f"accesses 8, 16, 32, 64 or 128 bits of global or shared memory, got {access} in {memory.space} memory")


# -- copies and other blocks ------------------------------------------------------------------------------------------

LOAD_CACHES = (
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "nc",
    "l1_evict_first",
    "l1_evict_last",
    "l1_no_allocate",
    "l2_evict_first",
    "l2_evict_last",
)
STORE_CACHES = ("wb", "cg", "cs", "wt", "l1_no_allocate", "l2_evict_first", "l2_evict_last")
COPY_CACHES = ("ca", "cg", "l2_evict_first", "l2_evict_last")
BULK_CACHES = ("l2_evict_first", "l2_evict_last")


def check_cache(memory: Tensor, attrs: Attrs, allowed: Sequence[str]) -> None:
    """An attribute `cache` says how caches should treat an access of global memory."""
    if "cache" in attrs:
        _one_of(attrs, "cache", allowed)
        if memory.space != "global":
            raise _fail(f"caches are told of accesses to global memory, got {memory.space} memory")


def _is_index(type_: Type) -> bool:
    return isinstance(type_, Scalar) and type_.dtype.is_int


def _bulk(types: Sequence[Type], told: int) -> None:
    """A shared tensor and an offset, a global tensor and its indices, a count, then `told` operands."""
    if len(types) < 3 or not isinstance(types[0], Tensor) or not isinstance(types[2], Tensor):
        raise _fail("takes a shared tensor and an offset, a global tensor and its indices, and how many elements")
    shared, memory = types[0], types[2]
    numbers = [types[1], *types[3 : 4 + memory.rank]]
    if shared.space != "shared" or memory.space != "global" or shared.dtype is not memory.dtype:
        raise _fail(f"copies between shared and global memory of one dtype, got {shared} and {memory}")
    if len(types) != 4 + memory.rank + told or not all(map(_is_index, numbers)):
        raise _fail("takes an offset, one index for each axis, and how many elements, all integers")


def _bulk_load(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _bulk(types, 2)
    assert isinstance(types[2], Tensor)
    check_cache(types[2], attrs, BULK_CACHES)
    barriers = types[-2]
    if not isinstance(barriers, Tensor) or barriers.space != "shared" or barriers.dtype is not u64 or not _is_index(types[-1]):
        raise _fail("takes mbarriers, a shared tensor of u64, and the number of one, last")
    return ()


def _bulk_store(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _bulk(types, 0)
    return ()


def _remote(types: Sequence[Type], values: int) -> Scalar:
    memory = types[0] if types else None
    if not isinstance(memory, Tensor) or memory.space != "shared" or memory.rank != 1 or len(types) != 3 + values:
        raise _fail(f"takes a shared tensor of one axis, an index, a rank and {values} value(s)")
    if not _is_index(types[1]) or not _is_index(types[2]) or any(t != Scalar(memory.dtype) for t in types[3:]):
        raise _fail(f"takes an index, a rank and values of {memory.dtype}, got {', '.join(map(str, types[1:]))}")
    return Scalar(memory.dtype)


def _store_remote(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _remote(types, 1)
    return ()


def _atomic_remote(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    kind = _one_of(attrs, "kind", ATOMICS)
    access = _remote(types, 2 if kind == "cas" else 1)
    _one_of(attrs, "scope", ACCESS_SCOPES, "cluster")
    _one_of(attrs, "order", ORDERS, "relaxed")
    if problem := _atomic_problem(kind, access.dtype):
        raise _fail(problem)
    return (access,)


# -- warps ------------------------------------------------------------------------------------------------------------


def _split_mask(types: Sequence[Type], count: int) -> Sequence[Type]:
    """The operands without the mask, of which there must be `count`."""
    if len(types) not in (count, count + 1):
        raise _fail(f"takes {count} operands and possibly a mask, got {len(types)}")
    if len(types) == count + 1 and types[-1] not in (_WORD, _LONG):
        raise _fail(f"a mask is u32 or u64, got {types[-1]}")
    return types[:count]


def _lanes(attrs: Attrs) -> Type:
    """A word with a bit for each lane: of 64 `bits` where warps have more lanes than 32."""
    bits = attrs.get("bits", 32)
    if bits not in (32, 64):
        raise _fail(f"bits is 32 or 64, got {bits}")
    return _LONG if bits == 64 else _WORD


def _warp_sync(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _split_mask(types, 0)
    return ()


def _shuffle(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    value, lane = _split_mask(types, 2)
    if not isinstance(value, Scalar) or not isinstance(lane, Scalar) or not lane.dtype.is_int:
        raise _fail("takes a scalar value and a scalar lane, delta or mask")
    _one_of(attrs, "mode", ("idx", "up", "down", "xor"))
    width = attrs.get("width", 1)
    if not isinstance(width, int) or width < 1 or width & (width - 1):
        raise _fail(f"width is a power of two, got {width}")
    if value.dtype.bits not in (8, 16, 32, 64):
        raise _fail(f"cannot shuffle {value}")
    return (value,)


def _vote(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if list(_split_mask(types, 1)) != [BOOL]:
        raise _fail("takes one bool")
    mode = _one_of(attrs, "mode", ("any", "all", "ballot", "uniform"))
    return (_lanes(attrs) if mode == "ballot" else BOOL,)


def _match(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    (value,) = _split_mask(types, 1)
    if not isinstance(value, Scalar) or value.dtype.bits not in (32, 64) or value.dtype.is_bool:
        raise _fail(f"takes a scalar of 32 or 64 bits, got {value}")
    return (_lanes(attrs), BOOL) if _one_of(attrs, "mode", ("any", "all")) == "all" else (_lanes(attrs),)


def _redux(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    (value,) = _split_mask(types, 1)
    _one_of(attrs, "kind", REDUX)
    if value not in (_WORD, Scalar(i32)):
        raise _fail(f"takes i32 or u32, got {value}")
    return (value,)


def _barrier_reduce(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if list(types) != [BOOL]:
        raise _fail("takes one bool")
    return (Scalar(i32) if _one_of(attrs, "kind", ("and", "or", "count")) == "count" else BOOL,)


# -- telling the host --------------------------------------------------------------------------------------------------


def _scalars(types: Sequence[Type]) -> list[DType]:
    for t in types:
        if not isinstance(t, Scalar) or (t.dtype.is_float and t.dtype.bits == 8):
            raise _fail(f"takes numbers, got {t}")
    return [t.dtype for t in types if isinstance(t, Scalar)]


def _text(attrs: Attrs) -> str:
    text = attrs.get("text")
    if not isinstance(text, str) or "\0" in text:
        raise _fail("needs an attribute text, without zero bytes")
    return text


def _print(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    from tilewright.ir.printing import FormatError, pieces

    try:
        pieces(_text(attrs), _scalars(types))
    except FormatError as error:
        raise _fail(str(error)) from error
    return ()


def _assert(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _text(attrs)
    if list(types) != [BOOL]:
        raise _fail("takes one bool")
    return ()


# -- single threads ---------------------------------------------------------------------------------------------------


def _no_operands(result: Type | None) -> Rule:
    def rule(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
        if types:
            raise _fail("takes no operands")
        return () if result is None else (result,)

    return rule


def _lane_mask(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _one_of(attrs, "relation", RELATIONS)
    return _no_operands(_lanes(attrs))(types, attrs)


def _active_mask(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    return _no_operands(_lanes(attrs))(types, attrs)


def _clock(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if attrs.get("bits", 64) not in (32, 64):
        raise _fail(f"bits is 32 or 64, got {attrs['bits']}")
    return _no_operands(_WORD if attrs.get("bits") == 32 else _LONG)(types, attrs)


def _nanosleep(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if list(types) != [_WORD]:
        raise _fail("takes a u32")
    return ()


def _bit_count(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    if len(types) != 1 or not isinstance(types[0], Scalar | Vec) or not types[0].dtype.is_int:
        raise _fail("takes one integer")
    return (types[0],)


def _words(count: int, kinds: tuple[DType, ...] = (u32,)) -> Rule:
    def rule(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
        if (
            len(types) != count
            or not isinstance(types[0], Scalar)
            or types[0].dtype not in kinds
            or any(t != types[0] for t in types)
        ):
            raise _fail(f"takes {count} of one of {', '.join(k.name for k in kinds)}")
        return (types[0],)

    return rule


def _funnel(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    _one_of(attrs, "mode", ("left", "right"))
    return _words(3)(types, attrs)


def _dot_product(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    words = [t.dtype for t in types if isinstance(t, Scalar)]
    if len(types) != 3 or len(words) != 3 or any(d not in (i32, u32) for d in words):
        raise _fail("takes two words of four bytes and a sum, each i32 or u32")
    if (words[2] is i32) != (i32 in words[:2]):
        raise _fail("the sum is i32 where one of the words is signed, else u32")
    return (types[2],)


def _same_floats(count: int) -> Rule:
    def rule(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
        if (
            len(types) != count
            or not isinstance(types[0], Scalar | Vec)
            or types[0].dtype is not f32
            or any(t != types[0] for t in types)
        ):
            raise _fail(f"takes {count} of f32")
        return (types[0],)

    return rule


def _row(
    name: str, doc: str, rule: Rule, effect: str = "pure", group: str = "warp", stages: str = "thread", bound: str = "exact"
) -> OpDef:
    return OpDef(name, doc, rule, frozenset(stages.split()), effect, group, bound)


_FAST = (
    (
        "sin_approx",
        "Sine of radians by the device's own instruction, f32 only: absolute error 2^-20.5 within -pi to pi, more beyond.",
        "2^-20.5 abs",
    ),
    ("cos_approx", "Cosine of radians likewise.", "2^-20.5 abs"),
    (
        "log2_approx",
        "Logarithm to base 2 by the device's own instruction, f32 only, denormals flushed: absolute error 2^-22 near 1.",
        "2^-22 abs",
    ),
    ("sqrt_approx", "Square root by the device's own instruction, f32 only, denormals flushed.", "2"),
    ("rsqrt_approx", "1 / sqrt(a) by the device's own instruction, f32 only, denormals flushed.", "3"),
)
"""Functions that are one instruction: name, meaning, and error."""

DEFINITIONS: tuple[OpDef, ...] = (
    _row("atomic", "`atomic %t, %i, %v {kind, scope, order}`: read-modify-write, gives the old value. Kinds: " + " ".join(ATOMICS) + ". `cas` takes the "
         "expected value first and compares bits; `inc` is 0 from the value on, `dec` is the value from 0 or above it on; min and max of floats give NaN "
         "if either is. Scope (device where not said): " + ", ".join(ACCESS_SCOPES) + "; order (relaxed): " + ", ".join(ORDERS) + ". On a vec: `add` of each "
         "of some neighbours on its own, `exchange` and `cas` of 128 bits as one.", _atomic, "write", "memory", "tile thread"),
    _row("atomic_load", "`atomic_load %t, %i {order, scope, width}`: one access that no other access of another thread comes into the middle of, and that "
         "is made where it stands. Order (relaxed): " + ", ".join(LOAD_ORDERS) + ". With `width` a vec of up to 128 bits.", _atomic_load, "sync", "memory"),
    _row("atomic_store", "`atomic_store %t, %i, %v {order, scope}`: the reverse. Order (relaxed): " + ", ".join(STORE_ORDERS) + ".", _atomic_store, "write", "memory"),
    _row("bulk_load", "`bulk_load %to, %offset, %from, %i…, %count, %barriers, %k`: start copying that many neighbours from global to shared memory by the "
         "copy engine, without a map. Both places and the bytes are multiples of 16; the bytes count on the mbarrier. `cache`: " + " ".join(BULK_CACHES) + ".", _bulk_load, "write", "copy"),
    _row("bulk_store", "`bulk_store %from, %offset, %to, %i…, %count`: the other way; it joins the thread's open group, as `tma_store` does.", _bulk_store,
         "write", "copy"),
    _row("store_remote", "`store_remote %shared, %i, %rank, %v`: write an element of the same shared memory in the block with that rank in the cluster.",
         _store_remote, "write", "copy"),
    _row("atomic_remote", "`atomic_remote %shared, %i, %rank, %v {kind, scope, order}`: `atomic` on shared memory of that block; scope cluster where not said.",
         _atomic_remote, "write", "copy"),
    _row("warp_sync", "Every thread of the warp, or of the `mask`, arrives before any leaves; memory is consistent among them after.", _warp_sync, "sync"),
    _row("barrier_reduce", "A barrier of the block that tells every thread whether its bool holds in all (`kind` and), in some (or), or in how many (count).",
         _barrier_reduce, "sync"),
    _row("shuffle", "`shuffle %v, %lane, %mask? {mode, width}`: the value of another lane of the warp, within groups of `width` lanes: lane number (idx), that "
         "many lanes up or down, or the lane whose number differs in those bits (xor). Its own value where that lane is not in the group; idx wraps, "
         "xor also reaches groups below.",
         _shuffle, "sync"),
    _row("vote", "`vote %b, %mask? {mode}`: over the lanes that take part: any, all, uniform (all alike), or ballot (a bit per lane).", _vote, "sync"),
    _row("match", "`match %v, %mask? {mode}`: `any` gives the lanes that hold the same bits; `all` gives all lanes where all hold the same bits, else 0, "
         "and whether they do.", _match, "sync"),
    _row("redux", "`redux %v, %mask? {kind}`: combine i32 or u32 over the lanes that take part: " + " ".join(REDUX) + ".", _redux, "sync"),
    _row("active_mask", "The lanes of the warp that are here now: a word of `bits`.", _active_mask, "sync"),
    _row("lane_id", "This thread's number in its warp.", _no_operands(Scalar(i32))),
    _row("warp_id", "The number of this thread's warp in its block.", _no_operands(Scalar(i32))),
    _row("lane_mask", "The lanes whose number is in that `relation` (" + " ".join(RELATIONS) + ") to this thread's: a word of `bits`.", _lane_mask),
    _row("clock", "A counter of the multiprocessor's cycles, of `bits` 32 or 64. The emulator counts its own steps.", _clock, "sync", "thread"),
    _row("global_timer", "Nanoseconds, the same clock on all multiprocessors.", _no_operands(Scalar(u64)), "sync", "thread"),
    _row("print", "`print %v… {text}`: write the text, with the numbers in its places (`{}`, `{:08.3f}`), to the process's output. A GPU's output comes "
         "when the host next waits for it; what threads write at once is in no certain order there, in the emulator in that of the threads.", _print,
         "write", "thread", "loop tile thread"),
    _row("assert", "`assert %b {text}`: where the bool is false the kernel ends with an error that says the text, where it is, and which thread it was.",
         _assert, "write", "thread", "loop tile thread"),
    _row("nanosleep", "`nanosleep %ns`: do nothing for about that many nanoseconds.", _nanosleep, "sync", "thread"),
    _row("popcount", "How many bits are 1.", _bit_count, group="bits"),
    _row("clz", "How many bits above the highest 1 are 0; all of them for 0.", _bit_count, group="bits"),
    _row("ctz", "How many bits below the lowest 1 are 0; all of them for 0.", _bit_count, group="bits"),
    _row("brev", "The bits in reverse order.", _bit_count, group="bits"),
    _row("byte_perm", "`byte_perm %a, %b, %s`: four of the eight bytes of a (0 to 3) and b (4 to 7): bits 4k to 4k + 2 of s say which becomes byte k; "
         "where bit 4k + 3 is 1 all its bits are its sign bit.", _words(3), group="bits"),
    _row("funnel_shift", "`funnel_shift %low, %high, %n {mode}`: the 64 bits high:low shifted by n modulo 32: `left` gives the upper, `right` the lower word.",
         _funnel, group="bits"),
    _row("mul_high", "The upper half of the product of two integers of 32 or 64 bits.", _words(2, (i32, u32, i64, u64)), group="bits"),
    _row("dp4a", "`dp4a %a, %b, %c`: c plus the sum of the products of the four bytes of a and b, signed where the word is i32.", _dot_product, group="bits"),
    *(_row(name, doc, _same_floats(1), group="function", bound=bound) for name, doc, bound in _FAST),
    _row("div_approx", "a / b by the device's own instructions, f32 only, denormals flushed; 0 where b is above 2^126.", _same_floats(2), group="bits", bound="2"),
)  # fmt: skip
