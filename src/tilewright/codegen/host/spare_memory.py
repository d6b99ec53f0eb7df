"""Machine code that hands out memory to CPU kernels and keeps what they give back for the next ones, as LLVM text.

In: a CPU target. Out: an object with two functions, which programs know as `abi.TAKE` and `abi.GIVE`:

    spare_take(bytes)   memory, or null
    spare_give(memory)  it is no longer needed; null is nothing

The system takes back what large blocks lie in, and gives it again page by page: a convolution that copies its input into a frame would pay more for
pages than for the copy. So large blocks are kept, `MOST` bytes of them at most, for calls that want half of their size or more, or until the
system refuses memory. Nothing here locks:
whoever exchanges a slot's block for null owns the block. `sizes` says what to expect in a slot, and may be late; a block's own size stands before it.
"""

from __future__ import annotations

import functools

from tilewright.base.target import Target
from tilewright.codegen.llvm.native import compile_object

SLOTS = 64
LEAST = 1 << 16
"""Bytes below which malloc is as quick."""
MOST = 1 << 27
"""Bytes that are kept for later at most."""

_TEXT = """
@slots = internal global [{slots} x ptr] zeroinitializer
@sizes = internal global [{slots} x i64] zeroinitializer
@kept = internal global i64 0
@turn = internal global i64 0
declare ptr @malloc(i64) nonlazybind
declare void @free(ptr) nonlazybind

define internal i1 @is_near(i64 %size, i64 %wanted) {{
  %enough = icmp uge i64 %size, %wanted
  %twice = shl i64 %wanted, 1
  %near = icmp ule i64 %size, %twice
  %fits = and i1 %enough, %near
  ret i1 %fits
}}

define internal void @release(ptr %memory) {{
  %block = getelementptr i8, ptr %memory, i64 -16
  call void @free(ptr %block)
  ret void
}}

define internal void @drop(ptr %memory) {{
  %block = getelementptr i8, ptr %memory, i64 -16
  %size = load i64, ptr %block
  %before = atomicrmw sub ptr @kept, i64 %size monotonic
  call void @free(ptr %block)
  ret void
}}

define internal void @drop_all() {{
entry:
  br label %next
next:
  %slot = phi i64 [ 0, %entry ], [ %after, %on ]
  %at = getelementptr ptr, ptr @slots, i64 %slot
  %memory = atomicrmw xchg ptr %at, ptr null acq_rel
  %none = icmp eq ptr %memory, null
  br i1 %none, label %on, label %some
some:
  call void @drop(ptr %memory)
  br label %on
on:
  %after = add i64 %slot, 1
  %more = icmp ult i64 %after, {slots}
  br i1 %more, label %next, label %done
done:
  ret void
}}

define ptr @spare_take(i64 %bytes) {{
entry:
  %small = icmp ult i64 %bytes, {least}
  br i1 %small, label %new, label %look
look:
  %slot = phi i64 [ 0, %entry ], [ %next, %on ]
  %at = getelementptr ptr, ptr @slots, i64 %slot
  %size.at = getelementptr i64, ptr @sizes, i64 %slot
  %expected = load atomic i64, ptr %size.at monotonic, align 8
  %likely = call i1 @is_near(i64 %expected, i64 %bytes)
  br i1 %likely, label %claim, label %on
claim:
  %found = atomicrmw xchg ptr %at, ptr null acq_rel
  %none = icmp eq ptr %found, null
  br i1 %none, label %on, label %check
check:
  %found.block = getelementptr i8, ptr %found, i64 -16
  %size = load i64, ptr %found.block
  %fits = call i1 @is_near(i64 %size, i64 %bytes)
  br i1 %fits, label %again, label %other
other:
  call void @drop(ptr %found)
  br label %on
again:
  %less = atomicrmw sub ptr @kept, i64 %size monotonic
  ret ptr %found
on:
  %next = add i64 %slot, 1
  %end = icmp eq i64 %next, {slots}
  br i1 %end, label %new, label %look
new:
  %whole = add i64 %bytes, 16
  %first = call ptr @malloc(i64 %whole)
  %failed = icmp eq ptr %first, null
  br i1 %failed, label %empty, label %made
empty:
  ; What is kept may be what is missing.
  call void @drop_all()
  %second = call ptr @malloc(i64 %whole)
  %refused = icmp eq ptr %second, null
  br i1 %refused, label %nothing, label %made
nothing:
  ret ptr null
made:
  %block = phi ptr [ %first, %new ], [ %second, %empty ]
  store i64 %bytes, ptr %block
  %memory = getelementptr i8, ptr %block, i64 16
  ret ptr %memory
}}

define void @spare_give(ptr %memory) {{
entry:
  %nothing = icmp eq ptr %memory, null
  br i1 %nothing, label %done, label %some
some:
  %block = getelementptr i8, ptr %memory, i64 -16
  %size = load i64, ptr %block
  %small = icmp ult i64 %size, {least}
  %large = icmp ugt i64 %size, {most}
  %plain = or i1 %small, %large
  br i1 %plain, label %free, label %keep
free:
  call void @release(ptr %memory)
  br label %done
keep:
  %before = atomicrmw add ptr @kept, i64 %size monotonic
  br label %room
room:
  ; Older blocks make room for this one.
  %old = phi i64 [ 0, %keep ], [ %old.next, %older ], [ %old.next, %old.drop ]
  %held = load atomic i64, ptr @kept monotonic, align 8
  %over = icmp ugt i64 %held, {most}
  %left = icmp ult i64 %old, {slots}
  %drops = and i1 %over, %left
  br i1 %drops, label %older, label %look
older:
  %old.at = getelementptr ptr, ptr @slots, i64 %old
  %old.memory = atomicrmw xchg ptr %old.at, ptr null acq_rel
  %old.next = add i64 %old, 1
  %gone = icmp eq ptr %old.memory, null
  br i1 %gone, label %room, label %old.drop
old.drop:
  call void @drop(ptr %old.memory)
  br label %room
look:
  %slot = phi i64 [ 0, %room ], [ %next, %on ]
  %at = getelementptr ptr, ptr @slots, i64 %slot
  %pair = cmpxchg ptr %at, ptr null, ptr %memory acq_rel monotonic
  %placed = extractvalue {{ ptr, i1 }} %pair, 1
  br i1 %placed, label %note, label %on
on:
  %next = add i64 %slot, 1
  %end = icmp eq i64 %next, {slots}
  br i1 %end, label %full, label %look
full:
  %turn = atomicrmw add ptr @turn, i64 1 monotonic
  %chosen = urem i64 %turn, {slots}
  %chosen.at = getelementptr ptr, ptr @slots, i64 %chosen
  %instead = atomicrmw xchg ptr %chosen.at, ptr %memory acq_rel
  %empty = icmp eq ptr %instead, null
  br i1 %empty, label %note, label %instead.drop
instead.drop:
  call void @drop(ptr %instead)
  br label %note
note:
  %place = phi i64 [ %slot, %look ], [ %chosen, %full ], [ %chosen, %instead.drop ]
  %size.at = getelementptr i64, ptr @sizes, i64 %place
  store atomic i64 %size, ptr %size.at monotonic, align 8
  br label %done
done:
  ret void
}}
"""


def spare_memory_ir() -> str:
    """LLVM text of both functions."""
    return _TEXT.format(slots=SLOTS, least=LEAST, most=MOST)


@functools.cache
def spare_memory_object(target: Target) -> bytes:
    """Their code as an object; the same for every program."""
    return compile_object(spare_memory_ir(), target, opt=0)
