"""Words of explicit kernels for memory: accesses with orders, scopes and caches, asynchronous copies, mbarriers and clusters.

An element is an array and an index, or a tuple of indices. Copies take shared memory as an array and the index of its first element.
A few neighbours (`width`) are a tuple; they must lie at a multiple of their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.base.dtypes import i32, i64, u64
from tilewright.base.sizes import Size
from tilewright.frontend.simt.build import Emitter, shape_of
from tilewright.frontend.simt.values import (
    NOTHING,
    Host,
    MemoryValue,
    Seq,
    TextValue,
    Val,
    describe,
    literal,
)
from tilewright.frontend.simt.words import VALUES, BoundArguments, element, word
from tilewright.frontend.simt.words_warp import plain
from tilewright.frontend.words.rows import WORDS
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


def packed(e: Emitter, memory: MemoryValue, val: Val, what: str) -> Value:
    """A number, or a tuple of neighbours, as what is stored in that array."""
    items = val.items if isinstance(val, Seq) else (val,)
    dtype = memory.type.dtype
    numbers = [e.use(e.convert(e.number(item, what), dtype, f"'{memory.name}'")) for item in items]
    return numbers[0] if len(numbers) == 1 else e.b.op("pack", *numbers)


def offset(e: Emitter, val: Val, index: Val, what: str) -> tuple[MemoryValue, Value]:
    """A shared array, and the place of one of its elements counted from the first."""
    memory, place = element(e, val, index)
    if memory.type.space != "shared":
        raise e.fail(f"{what} is {describe(memory)}, which is not shared memory", "make it with tw.shared(...)", "TW009")
    distance: Value | None = None
    for index_value, stride in zip(place, memory.type.strides, strict=True):
        along_axis = index_value if stride.constant == 1 else e.b.mul(index_value, e.b.index(stride))
        distance = along_axis if distance is None else e.b.add(distance, along_axis)
    assert distance is not None
    return memory, distance


def _outside(e: Emitter, val: Val, index: Val, what: str) -> tuple[MemoryValue, tuple[Value, ...]]:
    memory, place = element(e, val, index)
    if memory.type.space != "global":
        raise e.fail(f"{what} is {describe(memory)}, which is not an array the kernel was given", code="TW009")
    return memory, place


def _choice(e: Emitter, args: BoundArguments, name: str, choices: Sequence[str]) -> dict[str, Attr]:
    """An argument that is one of some words, as an attribute; nothing where it is left out or None."""
    if name not in args or args[name] == Seq(()):
        return {}
    return {name: e.text(args[name], f"'{name}'", choices)}


def _width(e: Emitter, args: BoundArguments) -> int:
    """How many neighbours an access is about."""
    width = e.constant(args["width"], "width") if "width" in args else 1
    if width not in (1, 2, 4, 8, 16):
        raise e.fail(f"the width of an access is {width}", "choose 1, 2, 4, 8 or 16", "TW009")
    return width


def _wide(width: int) -> dict[str, Attr]:
    return {"width": width} if width > 1 else {}


# -- accesses -----------------------------------------------------------------------------------------------------


@word("vload")
def _load(e: Emitter, args: BoundArguments) -> Val:
    memory, place = element(e, args["array"], args["index"])
    width = _width(e, args)
    (value,) = emit(e, "load", (memory.value, *place), _wide(width) | _choice(e, args, "cache", LOAD_CACHES))
    return neighbours(e, value, width)


@word("vstore")
def _store(e: Emitter, args: BoundArguments) -> Val:
    memory, place = element(e, args["array"], args["index"])
    value = packed(e, memory, args["value"], "the value")
    emit(e, "store", (memory.value, *place, value), _choice(e, args, "cache", STORE_CACHES))
    return NOTHING


@word("prefetch")
def _prefetch(e: Emitter, args: BoundArguments) -> Val:
    memory, place = _outside(e, args["array"], args["index"], "what is fetched ahead")
    e.b.multi("prefetch", memory.value, *place)
    return NOTHING


def _atomic(kind: str) -> None:
    name = f"atomic_{kind}"
    values = ("expected", "value") if kind == "cas" else ("value",)

    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        memory, place = element(e, args["array"], args["index"])
        remote = args.get("rank", NOTHING) != NOTHING
        attrs: dict[str, Attr] = {"kind": kind, "scope": "cluster" if remote else "device", "order": "relaxed"}
        attrs |= _choice(e, args, "scope", ACCESS_SCOPES) | _choice(e, args, "order", ORDERS)
        operands = [packed(e, memory, args[v], v) for v in values]
        if remote:
            memory, at = _remote(e, args)
            (old,) = emit(e, "atomic_remote", (memory.value, at, _rank(e, args["rank"]), *operands), attrs)
            return e.num(old)
        (old,) = emit(e, "atomic", (memory.value, *place, *operands), attrs)
        first = args["value"]
        return neighbours(e, old, len(first.items) if isinstance(first, Seq) else 1)


for _kind in ATOMICS:
    _atomic(_kind)


@word("atomic_load")
def _atomic_load(e: Emitter, args: BoundArguments) -> Val:
    memory, place = element(e, args["array"], args["index"])
    attrs: dict[str, Attr] = {"order": "relaxed", "scope": "device"}
    width = _width(e, args)
    attrs |= _choice(e, args, "order", LOAD_ORDERS) | _choice(e, args, "scope", ACCESS_SCOPES) | _wide(width)
    (value,) = emit(e, "atomic_load", (memory.value, *place), attrs)
    return neighbours(e, value, width)


@word("atomic_store")
def _atomic_store(e: Emitter, args: BoundArguments) -> Val:
    memory, place = element(e, args["array"], args["index"])
    attrs: dict[str, Attr] = {"order": "relaxed", "scope": "device"}
    attrs |= _choice(e, args, "order", STORE_ORDERS) | _choice(e, args, "scope", ACCESS_SCOPES)
    emit(e, "atomic_store", (memory.value, *place, packed(e, memory, args["value"], "the value")), attrs)
    return NOTHING


@word("fence")
def _fence(e: Emitter, args: BoundArguments) -> Val:
    e.b.multi("fence", scope=e.text(args.get("scope", TextValue("device")), "the scope of a fence", ("thread", *ACCESS_SCOPES)))
    return NOTHING


# -- copies by threads --------------------------------------------------------------------------------------------


@word("copy_async")
def _copy_async(e: Emitter, args: BoundArguments) -> Val:
    target, at = offset(e, args["to"], args["at"], "the target")
    source, place = _outside(e, args["source"], args["index"], "the source")
    count = e.constant(args["count"], "count") if "count" in args else 1
    attrs: dict[str, Attr] = {"bytes": count * source.type.dtype.itemsize} | _choice(e, args, "cache", COPY_CACHES)
    if "prefetch" in args and (ahead := e.constant(args["prefetch"], "prefetch")):
        attrs["prefetch"] = ahead
    operands = [target.value, at, source.value, *place]
    if "where" in args:
        operands.append(e.use(e.truth(args["where"], "'where'")))
        attrs["masked"] = True
    emit(e, "copy_async", operands, attrs)
    return NOTHING


plain("copy_commit")


def _waiting(name: str) -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        attrs: dict[str, Attr] = {"pending": e.constant(args["pending"], "pending") if "pending" in args else 0}
        if "read" in args and e.truth(args["read"]).const:
            attrs["read"] = True
        emit(e, WORDS[name].ops, (), attrs)
        return NOTHING


_waiting("copy_wait")


# -- mbarriers ----------------------------------------------------------------------------------------------------


@word("mbarriers")
def _mbarriers(e: Emitter, args: BoundArguments) -> Val:
    (count,) = args.values()
    return e.array("shared", shape_of(e, count, "the number of mbarriers"), u64, "shared", align=16)


def _barrier(e: Emitter, args: BoundArguments) -> tuple[Value, Value]:
    memory, at = offset(e, args["barriers"], args["i"], "the first argument")
    if memory.type.dtype is not u64:
        raise e.fail(f"{describe(memory)} is no array of mbarriers", "make it with tw.mbarriers(n)", "TW009")
    return memory.value, at


def _on_barrier(name: str, attribute: str = "", operand: str = "") -> None:
    @word(name)
    def build(e: Emitter, args: BoundArguments) -> Val:
        attrs: dict[str, Attr] = {attribute: e.constant(args[attribute], attribute)} if attribute else {}
        operands = [*_barrier(e, args)]
        if args.get(operand, NOTHING) != NOTHING:
            operands.append(e.use(e.integer(args[operand], operand), i32))
            attrs |= {"remote": True} if operand == "rank" else {}
        emit(e, WORDS[name].ops, operands, attrs)
        return NOTHING


_on_barrier("mbarrier_init", attribute="count")
_on_barrier("mbarrier_arrive", operand="rank")
_on_barrier("mbarrier_expect", attribute="bytes")
_on_barrier("mbarrier_wait", operand="parity")
plain("fence_init")
plain("fence_async")


# -- the copy engine ----------------------------------------------------------------------------------------------


@word("bulk_load")
def _bulk_load(e: Emitter, args: BoundArguments) -> Val:
    target, at = offset(e, args["to"], args["at"], "the target")
    source, place = _outside(e, args["source"], args["index"], "the source")
    count = e.use(e.integer(args["count"], "count"), i64)
    emit(e, "bulk_load", (target.value, at, source.value, *place, count, *_barrier(e, args)), {})
    return NOTHING


@word("bulk_store")
def _bulk_store(e: Emitter, args: BoundArguments) -> Val:
    source, at = offset(e, args["source"], args["at"], "the source")
    target, place = _outside(e, args["to"], args["index"], "the target")
    emit(e, "bulk_store", (source.value, at, target.value, *place, e.use(e.integer(args["count"], "count"), i64)), {})
    return NOTHING


@dataclass(frozen=True, eq=False)
class TensorMapValue:
    """How the copy engine sees an array; only the words of copies take it."""

    value: Value
    rank: int


@word("tensor_map")
def _tensor_map(e: Emitter, args: BoundArguments) -> Val:
    memory = e.memory(args["array"], "the array")
    box = shape_of(e, args["box"], "the box")
    swizzle = e.constant(args["swizzle"], "swizzle") if "swizzle" in args else 0
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

    return Host(TensorMapValue(e.once(("map", memory.value, box, swizzle), make), len(box)))


def _map(e: Emitter, val: Val) -> TensorMapValue:
    if isinstance(val, Host) and isinstance(val.object, TensorMapValue):
        return val.object
    raise e.fail(f"{describe(val)} is no map", "make it with tw.tensor_map(array, box)", "TW009")


def _corner(e: Emitter, map_: TensorMapValue, val: Val) -> list[Value]:
    items = val.items if isinstance(val, Seq) else (val,)
    if len(items) != map_.rank:
        raise e.fail(f"{len(items)} coordinate(s) for a map of {map_.rank} axes", code="TW003")
    return [e.use(e.integer(item, "a coordinate"), i32) for item in items]


@word("tma_load")
def _tma_load(e: Emitter, args: BoundArguments) -> Val:
    target, at = offset(e, args["to"], args["at"], "the target")
    map_ = _map(e, args["map"])
    emit(e, "tma_load", (target.value, at, map_.value, *_barrier(e, args), *_corner(e, map_, args["index"])), {})
    return NOTHING


@word("tma_store")
def _tma_store(e: Emitter, args: BoundArguments) -> Val:
    source, at = offset(e, args["source"], args["at"], "the source")
    map_ = _map(e, args["map"])
    emit(e, "tma_store", (source.value, at, map_.value, *_corner(e, map_, args["index"])), {})
    return NOTHING


plain("bulk_commit")
_waiting("bulk_wait")


# -- clusters -----------------------------------------------------------------------------------------------------


def _remote(e: Emitter, args: BoundArguments) -> tuple[MemoryValue, Value]:
    memory, at = offset(e, args["array"], args["index"], "the array")
    if memory.type.rank != 1:
        raise e.fail(f"{describe(memory)} has {memory.type.rank} axes", "other blocks reach shared arrays of one axis", "TW003")
    return memory, at


def _rank(e: Emitter, val: Val) -> Value:
    return e.use(e.integer(val, "the rank"), i32)


VALUES["cluster.rank"] = lambda e: e.index(e.once("rank", lambda b: b.cast(b.op("cluster_rank"), i64)))
VALUES["cluster.size"] = lambda e: literal(e.launch.cluster)
plain("cluster_sync")


@word("load_remote")
def _load_remote(e: Emitter, args: BoundArguments) -> Val:
    memory, at = _remote(e, args)
    return e.num(emit(e, "load_remote", (memory.value, at, _rank(e, args["rank"])), {})[0])


@word("store_remote")
def _store_remote(e: Emitter, args: BoundArguments) -> Val:
    memory, at = _remote(e, args)
    emit(e, "store_remote", (memory.value, at, _rank(e, args["rank"]), packed(e, memory, args["value"], "the value")), {})
    return NOTHING
