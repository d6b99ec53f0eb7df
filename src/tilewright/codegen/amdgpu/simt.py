"""Exchange within waves and blocks -> LLVM text for AMD GPUs: shuffles, votes, matches, barriers that count, clocks.

In: one op, the names of its operands, the writer of the function and the target. Out: the names of its results.

Lanes of a wave run in step, so nothing has to wait for them: a mask only says whose bits count. A shuffle by a constant `xor` is an
instruction that reads another lane's register (DPP), or the LDS's crossbar (`ds_swizzle`); all others are `ds_bpermute`, which takes the
lane to read from. Neither touches memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.target import Target
from tilewright.codegen.amdgpu.values import (
    Handler,
    as_integer,
    ballot,
    block_barrier,
    from_integer,
    lane_id,
    mask_type,
    resized,
    thread_id,
)
from tilewright.codegen.llvm.emitter import FunctionWriter, llvm_type
from tilewright.ir.nodes import Op
from tilewright.ir.types import dtype_of

_QUAD_PERM, _ROW_ROR_8, _ROW_MIRROR, _HALF_MIRROR, _ROW_XMASK = {1: 0xB1, 2: 0x4E, 3: 0x1B}, 0x128, 0x140, 0x141, 0x160
"""DPP controls: lanes of four in another order; a row of 16 turned by eight, backwards, in halves backwards, with some bits of the lane changed."""
_SWIZZLE_AND = 0x1F
"""`ds_swizzle` in its mode of bits: and, or, xor of the lane's five lower bits."""
_TICK = 10
"""Nanoseconds of one tick of the device's steady clock: 100 MHz."""


# -- shuffles ---------------------------------------------------------------------------------------------------------


def shuffle(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    mode, width = str(op.attrs["mode"]), op.attrs.get("width", target.warp_size)
    assert isinstance(width, int)
    amount, bits = operands[1], dtype_of(op.operands[1].type).bits
    fixed = int(amount) % target.warp_size if amount.lstrip("-").isdigit() else None
    if fixed is not None and mode == "xor" and fixed < width:
        return [_by_words(w, op, operands[0], lambda word: _exchanged(w, word, fixed, target))]
    amount = resized(w, amount, bits, 32)
    place = w.let(f"shl i32 {_source(w, mode, width, amount, target)}, 2")
    return [_by_words(w, op, operands[0], lambda word: w.call("i32", "llvm.amdgcn.ds.bpermute", ("i32", place), ("i32", word)))]


def _source(w: FunctionWriter, mode: str, width: int, amount: str, target: Target) -> str:
    """The lane to read from, by the meaning of the op."""
    lane = lane_id(w, target)
    amount = w.let(f"and i32 {amount}, {target.warp_size - 1}")
    lowest = w.let(f"and i32 {lane}, {-width}")
    if mode == "idx":
        return w.let(f"or i32 {lowest}, {w.let(f'and i32 {amount}, {width - 1}')}")
    if mode == "up":
        there = w.let(f"sub i32 {lane}, {amount}")
        outside = w.let(f"icmp slt i32 {there}, {lowest}")
    else:
        there = w.let(f"{'add' if mode == 'down' else 'xor'} i32 {lane}, {amount}")
        outside = w.let(f"icmp sgt i32 {there}, {w.let(f'or i32 {lowest}, {width - 1}')}")
    return w.let(f"select i1 {outside}, i32 {lane}, i32 {there}")


def _exchanged(w: FunctionWriter, word: str, lanes: int, target: Target) -> str:
    """The word of the lane whose number differs in those bits."""
    newer = target.has("rdna")
    control = _QUAD_PERM.get(lanes) or {7: _HALF_MIRROR, 15: _ROW_MIRROR, 8: _ROW_ROR_8}.get(lanes)
    if control is None and newer and lanes < 16:
        control = _ROW_XMASK + lanes
    if lanes == 0:
        return word
    if control is not None:
        immediate = (("i32", str(control)), ("i32", "15"), ("i32", "15"), ("i1", "true"))
        return w.call("i32", "llvm.amdgcn.update.dpp.i32", ("i32", word), ("i32", word), *immediate)
    if lanes == 16 and newer:
        order = (("i32", str(0x76543210)), ("i32", str(0xFEDCBA98 - (1 << 32))), ("i1", "false"), ("i1", "false"))
        return w.call("i32", "llvm.amdgcn.permlanex16.i32", ("i32", word), ("i32", word), *order)
    if lanes < 32:
        return w.call("i32", "llvm.amdgcn.ds.swizzle", ("i32", word), ("i32", str(lanes << 10 | _SWIZZLE_AND)))
    place = w.let(f"shl i32 {w.let(f'xor i32 {lane_id(w, target)}, {lanes}')}, 2")
    return w.call("i32", "llvm.amdgcn.ds.bpermute", ("i32", place), ("i32", word))


def _by_words(w: FunctionWriter, op: Op, value: str, exchange: Callable[[str], str]) -> str:
    """A number of any dtype, of which 32 bits are exchanged at a time."""
    dtype = dtype_of(op.operands[0].type)
    if dtype.is_bool:
        return w.let(f"trunc i32 {exchange(w.let(f'zext i1 {value} to i32'))} to i1")
    raw = as_integer(w, value, dtype.llvm, dtype.bits)
    if dtype.bits == 64:
        low = w.let(f"trunc i64 {raw} to i32")
        high = w.let(f"trunc i64 {w.let(f'lshr i64 {raw}, 32')} to i32")
        low, high = (w.let(f"zext i32 {exchange(part)} to i64") for part in (low, high))
        raw = w.let(f"or i64 {w.let(f'shl i64 {high}, 32')}, {low}")
    else:
        raw = resized(w, exchange(resized(w, raw, dtype.bits, 32)), 32, dtype.bits)
    return from_integer(w, raw, dtype.llvm, dtype.bits)


# -- votes ------------------------------------------------------------------------------------------------------------


def _within(w: FunctionWriter, lanes: str, op: Op, operands: Sequence[str], count: int, target: Target) -> str:
    """Of those lanes the ones that take part: the operand after the first `count` names them, if there is one."""
    if len(operands) <= count:
        return lanes
    mask = resized(w, operands[count], dtype_of(op.operands[count].type).bits, target.warp_size)
    return w.let(f"and {mask_type(target)} {lanes}, {mask}")


def _word(w: FunctionWriter, lanes: str, op: Op, target: Target) -> str:
    """Lanes as the word that is the op's first result."""
    return resized(w, lanes, target.warp_size, dtype_of(op.results[0].type).bits)


def _no_lane(w: FunctionWriter, op: Op, operands: Sequence[str], condition: str, target: Target) -> str:
    """Whether the bool holds in no lane that takes part."""
    lanes = _within(w, ballot(w, condition, target), op, operands, 1, target)
    return w.let(f"icmp eq {mask_type(target)} {lanes}, 0")


def vote(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    mode = op.attrs["mode"]
    if mode == "ballot":
        return [_word(w, _within(w, ballot(w, operands[0], target), op, operands, 1, target), op, target)]
    none = _no_lane(w, op, operands, operands[0], target) if mode != "all" else ""
    if mode == "any":
        return [w.let(f"xor i1 {none}, true")]
    every = _no_lane(w, op, operands, w.let(f"xor i1 {operands[0]}, true"), target)
    return [every if mode == "all" else w.let(f"or i1 {every}, {none}")]


def match(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    dtype, mask = dtype_of(op.operands[0].type), mask_type(target)
    kind, value = f"i{dtype.bits}", as_integer(w, operands[0], dtype.llvm, dtype.bits)
    if op.attrs["mode"] == "any":
        same = _waterfall(w, value, kind, lambda: ballot(w, "true", target))
        return [_word(w, _within(w, same, op, operands, 1, target), op, target)]
    here = _within(w, ballot(w, "true", target), op, operands, 1, target)
    first = w.call(mask, f"llvm.cttz.{mask}", (mask, here), ("i1", "true"))
    place = w.let(f"shl i32 {resized(w, first, target.warp_size, 32)}, 2")
    leader = _by_words(w, op, operands[0], lambda word: w.call("i32", "llvm.amdgcn.ds.bpermute", ("i32", place), ("i32", word)))
    differs = w.let(f"icmp ne {kind} {value}, {as_integer(w, leader, dtype.llvm, dtype.bits)}")
    alike = _no_lane(w, op, operands, differs, target)
    return [_word(w, w.let(f"select i1 {alike}, {mask} {here}, {mask} 0"), op, target), alike]


def _waterfall(w: FunctionWriter, value: str, kind: str, work: Callable[[], str]) -> str:
    """Do the work once for every value that lanes hold, by just the lanes that hold it."""
    again, mine, following, done = (w.new_label(name) for name in ("again", "mine", "following", "done"))
    w.line(f"br label %{again}")
    w.open_label(again)
    first = w.call(kind, f"llvm.amdgcn.readfirstlane.{kind}", (kind, value))
    same = w.let(f"icmp eq {kind} {value}, {first}")
    w.line(f"br i1 {same}, label %{mine}, label %{following}")
    w.open_label(mine)
    found = work()
    w.line(f"br label %{done}")
    w.open_label(following)
    w.line(f"br label %{again}")
    w.open_label(done)
    return found


def redux(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    kind = str(op.attrs["kind"])
    if kind in ("min", "max") and dtype_of(op.operands[0].type).kind == "u":
        kind = f"u{kind}"

    def combined() -> str:
        return w.call("i32", f"llvm.amdgcn.wave.reduce.{kind}.i32", ("i32", operands[0]), ("i32", "0"))

    if len(operands) == 1:
        return [combined()]
    mask = dtype_of(op.operands[1].type)
    return [_waterfall(w, operands[1], f"i{mask.bits}", combined)]


def active_mask(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    return [_word(w, ballot(w, "true", target), op, target)]


def lane_mask(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    kind, relation = mask_type(target), op.attrs["relation"]
    lane = resized(w, lane_id(w, target), 32, target.warp_size)
    one = w.let(f"shl {kind} 1, {lane}")
    if relation == "eq":
        return [_word(w, one, op, target)]
    below = w.let(f"sub {kind} {one}, 1")
    lanes = below if relation in ("lt", "ge") else w.let(f"or {kind} {below}, {one}")
    return [_word(w, lanes if relation in ("lt", "le") else w.let(f"xor {kind} {lanes}, -1"), op, target)]


def warp_sync(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    w.line('fence syncscope("wavefront") release')
    w.call("void", "llvm.amdgcn.wave.barrier")
    w.line('fence syncscope("wavefront") acquire')
    return []


def barrier_reduce(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    """Each wave adds how many of its lanes say yes to a word of the LDS that thread 0 has cleared."""
    word = f"@{COUNTER}"
    w.declarations.add(f"{word} = internal addrspace(3) global i32 poison, align 4")
    kind = mask_type(target)
    clear, cleared, add, added = (w.new_label(name) for name in ("clear", "cleared", "add", "added"))
    thread = thread_id(w)
    block_barrier(w)
    w.line(f"br i1 {w.let(f'icmp eq i32 {thread}, 0')}, label %{clear}, label %{cleared}")
    w.open_label(clear)
    w.line(f"store i32 0, ptr addrspace(3) {word}, align 4")
    w.line(f"br label %{cleared}")
    w.open_label(cleared)
    block_barrier(w)
    count = resized(w, w.call(kind, f"llvm.ctpop.{kind}", (kind, ballot(w, operands[0], target))), target.warp_size, 32)
    w.line(f"br i1 {w.let(f'icmp eq i32 {lane_id(w, target)}, 0')}, label %{add}, label %{added}")
    w.open_label(add)
    w.line(f'atomicrmw add ptr addrspace(3) {word}, i32 {count} syncscope("workgroup") monotonic, align 4')
    w.line(f"br label %{added}")
    w.open_label(added)
    block_barrier(w)
    total = w.let(f"load i32, ptr addrspace(3) {word}, align 4")
    if op.attrs["kind"] == "count":
        return [total]
    return [w.let(f"icmp ne i32 {total}, 0" if op.attrs["kind"] == "or" else f"icmp eq i32 {total}, {w.kernel.threads}")]


COUNTER = "tilewright.count"
COUNTER_BYTES = 4
"""The word of the LDS that `barrier_reduce` counts in, beyond what the kernel itself shares."""


# -- who and when -----------------------------------------------------------------------------------------------------


def _lane(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    return [lane_id(w, target)]


def _warp(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    return [w.let(f"lshr i32 {thread_id(w)}, {target.warp_size.bit_length() - 1}")]


def _clock(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    return [resized(w, w.call("i64", "llvm.readcyclecounter"), 64, dtype_of(op.results[0].type).bits)]


def _nanoseconds(w: FunctionWriter) -> str:
    return w.let(f"mul i64 {w.call('i64', 'llvm.readsteadycounter')}, {_TICK}")


def _timer(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    return [_nanoseconds(w)]


def _nanosleep(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    until = w.let(f"add i64 {_nanoseconds(w)}, {w.let(f'zext i32 {operands[0]} to i64')}")
    again, done = w.new_label("sleep"), w.new_label("slept")
    w.line(f"br label %{again}")
    w.open_label(again)
    w.call("void", "llvm.amdgcn.s.sleep", ("i32", "1"))
    w.line(f"br i1 {w.let(f'icmp uge i64 {_nanoseconds(w)}, {until}')}, label %{done}, label %{again}")
    w.open_label(done)
    return []


# -- bits -------------------------------------------------------------------------------------------------------------


def dp4a(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> str | None:
    """One instruction where there is one for these signs."""
    first, second = (dtype_of(v.type).kind == "i" for v in op.operands[:2])
    if target.has("rdna"):
        signs = [("i1", str(sign).lower()) for sign in (first, second)]
        given = (signs[0], ("i32", operands[0]), signs[1], ("i32", operands[1]), ("i32", operands[2]), ("i1", "false"))
        return w.call("i32", "llvm.amdgcn.sudot4", *given)
    if first is not second:
        return None
    return w.call("i32", f"llvm.amdgcn.{'s' if first else 'u'}dot4", *(("i32", v) for v in operands), ("i1", "false"))


def _bits(w: FunctionWriter, op: Op, operands: Sequence[str], target: Target) -> Sequence[str]:
    before, after = llvm_type(op.operands[0].type), llvm_type(op.results[0].type)
    return [operands[0] if before == after else w.let(f"bitcast {before} {operands[0]} to {after}")]


HANDLERS: dict[str, Handler] = {
    "shuffle": shuffle, "vote": vote, "match": match, "redux": redux, "active_mask": active_mask, "lane_mask": lane_mask,
    "warp_sync": warp_sync, "barrier_reduce": barrier_reduce, "lane_id": _lane, "warp_id": _warp, "clock": _clock, "global_timer": _timer,
    "nanosleep": _nanosleep, "to_bits": _bits, "from_bits": _bits,
}  # fmt: skip
