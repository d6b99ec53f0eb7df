"""Words of explicit kernels for memory: accesses with orders, scopes and caches, asynchronous copies, mbarriers and clusters.

An element is an array and an index, or a tuple of indices. Copies take shared memory as an array and the index of its first element.
A few neighbours (`width`) are a tuple; they must lie at a multiple of their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.base.dtypes import i32, i64, u64
from tilewright.base.sizes import Size
from tilewright.frontend.simt_build import Emitter, arguments, shape_of
from tilewright.frontend.simt_ops import VALUES, element, word
from tilewright.frontend.simt_values import NOTHING, Arguments, Host, Memory, Seq, Text, Val, describe, literal
from tilewright.frontend.simt_words_warp import plain
from tilewright.ir.nodes import Attr, Value
from tilewright.ir.opdef import TypeRuleError
from tilewright.ir.ops import result_types
from tilewright.ir.ops_simt import (
    ACCESS_SCOPES,
    ATOMICS,
    COPY_CACHES,
    LOAD_CACHES,
    LOAD_ORDERS,
    ORDERS,
    STORE_CACHES,
    STORE_ORDERS,
)

_SWIZZLES = (0, 32, 64, 128)


def emit(e: Emitter, opcode: str, operands: Sequence[Value], attrs: dict[str, Attr]) -> tuple[Value, ...]:
    """Append an op; what its type rule refuses is the user's error."""
    try:
        result_types(opcode, [v.type for v in operands], attrs)
    except TypeRuleError as error:
        raise e.fail(f"{opcode}: {error}", code="TW009") from None
    return e.b.emit(opcode, operands, attrs)


def neighbours(e: Emitter, value: Value, width: int) -> Val:
    """A vec as a tuple of numbers."""
    return Seq(tuple(e.num(e.b.op("extract", value, lane=k)) for k in range(width))) if width > 1 else e.num(value)


def packed(e: Emitter, memory: Memory, val: Val, what: str) -> Value:
    """A number, or a tuple of neighbours, as what is stored in that array."""
    items = val.items if isinstance(val, Seq) else (val,)
    dtype = memory.type.dtype
    numbers = [e.use(e.convert(e.number(item, what), dtype, f"'{memory.name}'")) for item in items]
    return numbers[0] if len(numbers) == 1 else e.b.op("pack", *numbers)


def offset(e: Emitter, val: Val, index: Val, what: str) -> tuple[Memory, Value]:
    """A shared array, and the place of one of its elements counted from the first."""
    memory, place = element(e, val, index)
    if memory.type.space != "shared":
        raise e.fail(f"{what} is {describe(memory)}, which is not shared memory", "make it with tw.shared(...)", "TW009")
    found: Value | None = None
    for one, stride in zip(place, memory.type.strides, strict=True):
        part = one if stride.constant == 1 else e.b.mul(one, e.b.index(stride))
        found = part if found is None else e.b.add(found, part)
    assert found is not None
    return memory, found


def _outside(e: Emitter, val: Val, index: Val, what: str) -> tuple[Memory, tuple[Value, ...]]:
    memory, place = element(e, val, index)
    if memory.type.space != "global":
        raise e.fail(f"{what} is {describe(memory)}, which is not an array the kernel was given", code="TW009")
    return memory, place


def _choice(e: Emitter, found: dict[str, Val], name: str, choices: Sequence[str]) -> dict[str, Attr]:
    """An argument that is one of some words, as an attribute; nothing where it is left out or None."""
    if name not in found or found[name] == Seq(()):
        return {}
    return {name: e.text(found[name], f"'{name}'", choices)}


def _width(e: Emitter, found: dict[str, Val]) -> int:
    """How many neighbours an access is about."""
    width = e.constant(found["width"], "width") if "width" in found else 1
    if width not in (1, 2, 4, 8, 16):
        raise e.fail(f"the width of an access is {width}", "choose 1, 2, 4, 8 or 16", "TW009")
    return width


def _wide(width: int) -> dict[str, Attr]:
    return {"width": width} if width > 1 else {}


# -- accesses -----------------------------------------------------------------------------------------------------


@word("vload")
def _load(e: Emitter, given: Arguments) -> Val:
    """`vload(array, index, width=1, cache=None)`: an element, or a tuple of neighbours; `cache` says how caches treat it."""
    found = arguments(e, given, "vload", ("array", "index", "width", "cache"), 2)
    memory, place = element(e, found["array"], found["index"])
    width = _width(e, found)
    (value,) = emit(e, "load", (memory.value, *place), _wide(width) | _choice(e, found, "cache", LOAD_CACHES))
    return neighbours(e, value, width)


@word("vstore")
def _store(e: Emitter, given: Arguments) -> Val:
    """`vstore(array, index, value, cache=None)`: write an element, or a tuple of neighbours."""
    found = arguments(e, given, "vstore", ("array", "index", "value", "cache"), 3)
    memory, place = element(e, found["array"], found["index"])
    value = packed(e, memory, found["value"], "the value")
    emit(e, "store", (memory.value, *place, value), _choice(e, found, "cache", STORE_CACHES))
    return NOTHING


@word("prefetch")
def _prefetch(e: Emitter, given: Arguments) -> Val:
    """`prefetch(array, index)`: that element will be needed soon; it may lie outside the array."""
    found = arguments(e, given, "prefetch", ("array", "index"))
    memory, place = _outside(e, found["array"], found["index"], "what is fetched ahead")
    e.b.multi("prefetch", memory.value, *place)
    return NOTHING


def _atomic(kind: str) -> None:
    name = f"atomic_{kind}"
    values = ("expected", "value") if kind == "cas" else ("value",)

    def call(e: Emitter, given: Arguments) -> Val:
        found = arguments(e, given, name, ("array", "index", *values, "scope", "order", "rank"), 2 + len(values))
        memory, place = element(e, found["array"], found["index"])
        remote = found.get("rank", NOTHING) != NOTHING
        attrs: dict[str, Attr] = {"kind": kind, "scope": "cluster" if remote else "device", "order": "relaxed"}
        attrs |= _choice(e, found, "scope", ACCESS_SCOPES) | _choice(e, found, "order", ORDERS)
        operands = [packed(e, memory, found[v], v) for v in values]
        if remote:
            memory, at = _remote(e, found)
            (old,) = emit(e, "atomic_remote", (memory.value, at, _rank(e, found["rank"]), *operands), attrs)
            return e.num(old)
        (old,) = emit(e, "atomic", (memory.value, *place, *operands), attrs)
        first = found["value"]
        return neighbours(e, old, len(first.items) if isinstance(first, Seq) else 1)

    more = "expected, value" if kind == "cas" else "value"
    call.__doc__ = f"`{name}(array, index, {more}, scope='device', order='relaxed', rank=None)`: one step for all threads; gives the old value."
    word(name)(call)


for _kind in ATOMICS:
    _atomic(_kind)


@word("atomic_load")
def _atomic_load(e: Emitter, given: Arguments) -> Val:
    """`atomic_load(array, index, order='relaxed', scope='device', width=1)`: one access that is made where it stands, every time."""
    found = arguments(e, given, "atomic_load", ("array", "index", "order", "scope", "width"), 2)
    memory, place = element(e, found["array"], found["index"])
    attrs: dict[str, Attr] = {"order": "relaxed", "scope": "device"}
    width = _width(e, found)
    attrs |= _choice(e, found, "order", LOAD_ORDERS) | _choice(e, found, "scope", ACCESS_SCOPES) | _wide(width)
    (value,) = emit(e, "atomic_load", (memory.value, *place), attrs)
    return neighbours(e, value, width)


@word("atomic_store")
def _atomic_store(e: Emitter, given: Arguments) -> Val:
    """`atomic_store(array, index, value, order='relaxed', scope='device')`: write an element, or neighbours of 128 bits at most, as one."""
    found = arguments(e, given, "atomic_store", ("array", "index", "value", "order", "scope"), 3)
    memory, place = element(e, found["array"], found["index"])
    attrs: dict[str, Attr] = {"order": "relaxed", "scope": "device"}
    attrs |= _choice(e, found, "order", STORE_ORDERS) | _choice(e, found, "scope", ACCESS_SCOPES)
    emit(e, "atomic_store", (memory.value, *place, packed(e, memory, found["value"], "the value")), attrs)
    return NOTHING


@word("fence")
def _fence(e: Emitter, given: Arguments) -> Val:
    """`fence(scope='device')`: accesses before it are seen before those after it: at scope thread, block, cluster, device or system."""
    found = arguments(e, given, "fence", ("scope",), 0)
    e.b.multi("fence", scope=e.text(found.get("scope", Text("device")), "the scope of a fence", ("thread", *ACCESS_SCOPES)))
    return NOTHING


# -- copies by threads --------------------------------------------------------------------------------------------


@word("copy_async")
def _copy_async(e: Emitter, given: Arguments) -> Val:
    """`copy_async(to, at, source, index, count=1, where=True, cache=None, prefetch=0)`: start copying 4, 8 or 16 bytes to shared memory."""
    names = ("to", "at", "source", "index", "count", "where", "cache", "prefetch")
    found = arguments(e, given, "copy_async", names, 4)
    target, at = offset(e, found["to"], found["at"], "the target")
    source, place = _outside(e, found["source"], found["index"], "the source")
    count = e.constant(found["count"], "count") if "count" in found else 1
    attrs: dict[str, Attr] = {"bytes": count * source.type.dtype.itemsize} | _choice(e, found, "cache", COPY_CACHES)
    if "prefetch" in found and (ahead := e.constant(found["prefetch"], "prefetch")):
        attrs["prefetch"] = ahead
    operands = [target.value, at, source.value, *place]
    if "where" in found:
        operands.append(e.use(e.truth(found["where"], "'where'")))
        attrs["masked"] = True
    emit(e, "copy_async", operands, attrs)
    return NOTHING


plain("copy_commit", "copy_commit", "`copy_commit()`: close the thread's group of `copy_async`.")


def _waiting(name: str, opcode: str, doc: str, read: bool = False) -> None:
    names = ("pending", "read") if read else ("pending",)

    def call(e: Emitter, given: Arguments) -> Val:
        found = arguments(e, given, name, names, 0)
        attrs: dict[str, Attr] = {"pending": e.constant(found["pending"], "pending") if "pending" in found else 0}
        if read and "read" in found and e.truth(found["read"]).const:
            attrs["read"] = True
        emit(e, opcode, (), attrs)
        return NOTHING

    call.__doc__ = f"`{name}(pending=0{', read=False' if read else ''})`: {doc}"
    word(name)(call)


_waiting("copy_wait", "copy_wait", "wait until at most `pending` of the thread's groups of `copy_async` are unfinished.")


# -- mbarriers ----------------------------------------------------------------------------------------------------


@word("mbarriers")
def _mbarriers(e: Emitter, given: Arguments) -> Val:
    """`mbarriers(n)`: n barriers in shared memory that count arrivals and copied bytes."""
    (count,) = arguments(e, given, "mbarriers", ("n",)).values()
    return e.array("shared", shape_of(e, count, "the number of mbarriers"), u64, "shared", align=16)


def _barrier(e: Emitter, found: dict[str, Val]) -> tuple[Value, Value]:
    memory, at = offset(e, found["barriers"], found["i"], "the first argument")
    if memory.type.dtype is not u64:
        raise e.fail(f"{describe(memory)} is no array of mbarriers", "make it with tw.mbarriers(n)", "TW009")
    return memory.value, at


def _on_barrier(name: str, opcode: str, doc: str, attribute: str = "", operand: str = "") -> None:
    names = ("barriers", "i", *((attribute,) if attribute else ()), *((operand,) if operand else ()))
    least = len(names) - (operand == "rank")

    def call(e: Emitter, given: Arguments) -> Val:
        found = arguments(e, given, name, names, least)
        attrs: dict[str, Attr] = {attribute: e.constant(found[attribute], attribute)} if attribute else {}
        operands = [*_barrier(e, found)]
        if found.get(operand, NOTHING) != NOTHING:
            operands.append(e.use(e.integer(found[operand], operand), i32))
            attrs |= {"remote": True} if operand == "rank" else {}
        emit(e, opcode, operands, attrs)
        return NOTHING

    shown = ", ".join(f"{n}=None" if n == "rank" else n for n in names)
    call.__doc__ = f"`{name}({shown})`: {doc}"
    word(name)(call)


_on_barrier(
    "mbarrier_init",
    "mbarrier_init",
    "make it one that expects `count` arrivals in every phase; by one thread, before a barrier.",
    "count",
)
_on_barrier("mbarrier_arrive", "mbarrier_arrive", "arrive, here or in the block of the cluster with that rank.", operand="rank")
_on_barrier("mbarrier_expect", "mbarrier_expect", "arrive, and expect that many bytes to be copied in this phase.", "bytes")
_on_barrier(
    "mbarrier_wait", "mbarrier_wait", "wait until the phase of that parity has ended: 0 waits for the first.", operand="parity"
)
plain("fence_init", "fence_init", "`fence_init()`: initialised mbarriers are seen by the whole cluster and the copy engine.")
plain(
    "fence_async",
    "fence_async",
    "`fence_async()`: what this thread wrote to shared memory is seen by the copy engine and matrix units.",
)


# -- the copy engine ----------------------------------------------------------------------------------------------


@word("bulk_load")
def _bulk_load(e: Emitter, given: Arguments) -> Val:
    """`bulk_load(to, at, source, index, count, barriers, i)`: start copying neighbours to shared memory; their bytes count on the mbarrier."""
    found = arguments(e, given, "bulk_load", ("to", "at", "source", "index", "count", "barriers", "i"))
    target, at = offset(e, found["to"], found["at"], "the target")
    source, place = _outside(e, found["source"], found["index"], "the source")
    count = e.use(e.integer(found["count"], "count"), i64)
    emit(e, "bulk_load", (target.value, at, source.value, *place, count, *_barrier(e, found)), {})
    return NOTHING


@word("bulk_store")
def _bulk_store(e: Emitter, given: Arguments) -> Val:
    """`bulk_store(source, at, to, index, count)`: start copying neighbours from shared memory, as part of the thread's open group."""
    found = arguments(e, given, "bulk_store", ("source", "at", "to", "index", "count"))
    source, at = offset(e, found["source"], found["at"], "the source")
    target, place = _outside(e, found["to"], found["index"], "the target")
    emit(e, "bulk_store", (source.value, at, target.value, *place, e.use(e.integer(found["count"], "count"), i64)), {})
    return NOTHING


@dataclass(frozen=True, eq=False)
class TensorMap:
    """How the copy engine sees an array; only the words of copies take it."""

    value: Value
    rank: int


@word("tensor_map")
def _tensor_map(e: Emitter, given: Arguments) -> Val:
    """`tensor_map(array, box, swizzle=0)`: how the copy engine sees an array: the box one copy moves, and how its rows are swizzled."""
    found = arguments(e, given, "tensor_map", ("array", "box", "swizzle"), 2)
    memory = e.memory(found["array"], "the array")
    box = shape_of(e, found["box"], "the box")
    swizzle = e.constant(found["swizzle"], "swizzle") if "swizzle" in found else 0
    if memory.type.space != "global" or memory.given:
        raise e.fail(f"a map of {describe(memory)}", "give an array of the kernel's arguments", "TW009")
    if len(box) != memory.type.rank or swizzle not in _SWIZZLES:
        raise e.fail(
            f"a box of {list(box)} with swizzle {swizzle}",
            f"'{memory.name}' has {memory.type.rank} axes; swizzle is 0, 32, 64 or 128",
            "TW009",
        )
    shape: tuple[Size, ...] = memory.type.shape
    attrs: dict[str, Attr] = {"shape": shape, "strides": memory.type.strides, "box": box, "swizzle": swizzle}

    def make(b: object) -> Value:
        with e.prologue.at(e.b.span):
            return e.prologue.emit("tensor_map", (memory.value,), attrs)[0]

    return Host(TensorMap(e.once(("map", memory.value, box, swizzle), make), len(box)))


def _map(e: Emitter, val: Val) -> TensorMap:
    if isinstance(val, Host) and isinstance(val.object, TensorMap):
        return val.object
    raise e.fail(f"{describe(val)} is no map", "make it with tw.tensor_map(array, box)", "TW009")


def _corner(e: Emitter, map_: TensorMap, val: Val) -> list[Value]:
    items = val.items if isinstance(val, Seq) else (val,)
    if len(items) != map_.rank:
        raise e.fail(f"{len(items)} coordinate(s) for a map of {map_.rank} axes", code="TW003")
    return [e.use(e.integer(item, "a coordinate"), i32) for item in items]


@word("tma_load")
def _tma_load(e: Emitter, given: Arguments) -> Val:
    """`tma_load(to, at, map, index, barriers, i)`: start copying the box there into shared memory; its bytes count on the mbarrier."""
    found = arguments(e, given, "tma_load", ("to", "at", "map", "index", "barriers", "i"))
    target, at = offset(e, found["to"], found["at"], "the target")
    map_ = _map(e, found["map"])
    emit(e, "tma_load", (target.value, at, map_.value, *_barrier(e, found), *_corner(e, map_, found["index"])), {})
    return NOTHING


@word("tma_store")
def _tma_store(e: Emitter, given: Arguments) -> Val:
    """`tma_store(source, at, map, index)`: start copying a box from shared memory, as part of the thread's open group."""
    found = arguments(e, given, "tma_store", ("source", "at", "map", "index"))
    source, at = offset(e, found["source"], found["at"], "the source")
    map_ = _map(e, found["map"])
    emit(e, "tma_store", (source.value, at, map_.value, *_corner(e, map_, found["index"])), {})
    return NOTHING


plain("bulk_commit", "tma_commit", "`bulk_commit()`: close the thread's group of bulk and tensor stores.")
_waiting(
    "bulk_wait",
    "tma_wait",
    "wait until at most `pending` of the thread's groups of stores are unfinished, or have been `read`.",
    read=True,
)


# -- clusters -----------------------------------------------------------------------------------------------------


def _remote(e: Emitter, found: dict[str, Val]) -> tuple[Memory, Value]:
    memory, at = offset(e, found["array"], found["index"], "the array")
    if memory.type.rank != 1:
        raise e.fail(f"{describe(memory)} has {memory.type.rank} axes", "other blocks reach shared arrays of one axis", "TW003")
    return memory, at


def _rank(e: Emitter, val: Val) -> Value:
    return e.use(e.integer(val, "the rank"), i32)


VALUES["cluster.rank"] = lambda e: e.index(e.once("rank", lambda b: b.cast(b.op("cluster_rank"), i64)))
VALUES["cluster.size"] = lambda e: literal(e.launch.cluster)
plain("cluster_sync", "cluster_sync", "`cluster_sync()`: every thread of the cluster arrives before any leaves.")


@word("load_remote")
def _load_remote(e: Emitter, given: Arguments) -> Val:
    """`load_remote(array, index, rank)`: an element of the same shared memory in the block of the cluster with that rank."""
    found = arguments(e, given, "load_remote", ("array", "index", "rank"))
    memory, at = _remote(e, found)
    return e.num(emit(e, "load_remote", (memory.value, at, _rank(e, found["rank"])), {})[0])


@word("store_remote")
def _store_remote(e: Emitter, given: Arguments) -> Val:
    """`store_remote(array, index, rank, value)`: write an element of the same shared memory in the block with that rank."""
    found = arguments(e, given, "store_remote", ("array", "index", "rank", "value"))
    memory, at = _remote(e, found)
    emit(e, "store_remote", (memory.value, at, _rank(e, found["rank"]), packed(e, memory, found["value"], "the value")), {})
    return NOTHING
