"""The CPU thread pool's machine code: the worker loop and `tilewright_pool_run`, as LLVM text.

In: a CPU target (its system decides how a thread sleeps). Out: LLVM text that works on the control block of `base.abi`. It comes in two objects:
the starter, which is what small launches and entry stubs need and begins with nothing but its caller, and the pool itself, which is loaded by the first
launch that may be shared, or that may last.

A job is open while `generation` is odd. The caller fills in the job, makes the generation odd, claims blocks like everybody
else, makes it even again and waits until no worker is inside. A worker that sees an odd generation first counts itself in
(`pending`) and then looks again: if the generation is unchanged the caller cannot leave before the worker does, so the job's
fields are safe to read; if not, it counts itself out and touches nothing. So a worker that wakes late costs the caller
nothing. Every step of this handshake is sequentially consistent, and so is `generation` against `sleepers`, which
decides whether the caller must wake anybody.

Threads of a job say which cores they run on (Linux). One that finds its core taken moves to a free one, for the system may have put both there, and
would leave them there for as long as a short kernel runs. It may run on the cores that it was given before, before and after.

A worker that the system wakes on the core of its caller does not even begin before the caller's time there is over. So a caller that comes from
another core than the last one first takes its core from those of the workers, where these are few; on the same core it has nothing to do. What somebody
else allows a worker meanwhile stays as it is, but for that one core.

Blocks are claimed from lanes, a stretch of all blocks for each thread (or for several, where there are many): a thread takes those of its own lane first, and helps
others when it is empty. Steps of a loop, and calls on the same arrays, so leave each thread the blocks whose data it has in its caches.

A nested call, or one from a second thread, finds `lock` taken and runs its blocks itself.

`tilewright_launch` decides for every caller alike whether threads pay and how many blocks a claim holds.
"""

from __future__ import annotations

import functools

from tilewright.base import abi
from tilewright.base.target import Target
from tilewright.codegen.llvm.native import compile_object

_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
_SET_CORES = {"x86_64": 203, "aarch64": 122, "riscv64": 122}
"""`sched_setaffinity`; `sched_getaffinity` is the next one."""
_THREAD_NUMBER = {"x86_64": 186, "aarch64": 178, "riscv64": 178}
"""`gettid`."""
_ALL = 2**31 - 1

PARALLEL_WORK = 1 << 16
"""Elements below which a launch stays in its caller: waking a thread costs as much as touching this many."""
CLAIM_WORK = 1 << 13
"""Elements a claim should hold at least."""
CLAIMS_PER_THREAD = 8
"""Claims each thread should get, so that a slow thread does not hold up the rest."""


def pause_of(machine: str) -> tuple[str, str]:
    """What a spinning thread executes so that its core's other half, or the bus, gets some air; and its declaration."""
    if machine == "x86_64":
        return "call void @llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()"
    if machine in ("aarch64", "arm64"):
        return "call void @llvm.aarch64.hint(i32 1)", "declare void @llvm.aarch64.hint(i32)"
    return "", ""


_FUTEX = """
declare i64 @syscall(i64, ...)

define internal void @sleep(ptr %pool, i32 %last) {{
  %ignored = call i64 (i64, ...) @syscall(i64 {number}, ptr %pool, i32 {wait}, i32 %last, ptr null)
  ret void
}}

define internal void @wake(ptr %pool, i32 %count) {{
  %ignored = call i64 (i64, ...) @syscall(i64 {number}, ptr %pool, i32 {wake}, i32 %count)
  ret void
}}

define void @tilewright_pool_init(ptr %pool) {{
  ret void
}}
"""

_CORES = """
declare i32 @sched_getcpu()

; Whether this thread is the first of the job on its core, which is its from now on.
define internal i1 @take_core(ptr %pool) {{
entry:
  %core = call i32 @sched_getcpu()
  %known = icmp ult i32 %core, {bits}
  br i1 %known, label %mark, label %unknown
unknown:
  ret i1 true
mark:
  %cores = getelementptr i8, ptr %pool, i64 {cores}
  %number = lshr i32 %core, 6
  %word = getelementptr i64, ptr %cores, i32 %number
  %rest = and i32 %core, 63
  %rest.wide = zext i32 %rest to i64
  %bit = shl i64 1, %rest.wide
  %before = atomicrmw or ptr %word, i64 %bit monotonic
  %others = and i64 %before, %bit
  %first = icmp eq i64 %others, 0
  ret i1 %first
}}

; With the lock held.
define internal void @first_core(ptr %pool) {{
entry:
  %cores = getelementptr i8, ptr %pool, i64 {cores}
  call void @llvm.memset.p0.i64(ptr %cores, i8 0, i64 {bytes}, i1 false)
  %taken = call i1 @take_core(ptr %pool)
  %core = call i32 @sched_getcpu()
  %number = add i32 %core, 1
  %avoided.slot = getelementptr i8, ptr %pool, i64 {avoided}
  %avoided = load i32, ptr %avoided.slot
  %same = icmp eq i32 %number, %avoided
  %known = icmp ult i32 %core, {bits}
  %other = xor i1 %same, true
  %go = and i1 %known, %other
  br i1 %go, label %count, label %done
count:
  %workers.slot = getelementptr i8, ptr %pool, i64 {workers}
  %workers = load atomic i32, ptr %workers.slot monotonic, align 4
  %few = icmp ule i32 %workers, {most}
  br i1 %few, label %alone, label %done
alone:
  ; A worker that moves just now gives itself back what it had before: the next job sees to it.
  %lock = getelementptr i8, ptr %pool, i64 {steering}
  %held = cmpxchg ptr %lock, i32 0, i32 1 seq_cst seq_cst
  %mine = extractvalue {{ i32, i1 }} %held, 1
  br i1 %mine, label %steer, label %done
steer:
  %i = phi i32 [ 0, %alone ], [ %after, %steer ]
  %all = phi i1 [ true, %alone ], [ %all.next, %steer ]
  %there = call i1 @keep_off(ptr %pool, i32 %i, i32 %core)
  %all.next = and i1 %all, %there
  %after = add i32 %i, 1
  %more = icmp ult i32 %after, %workers
  br i1 %more, label %steer, label %end
end:
  store atomic i32 0, ptr %lock release, align 4
  ; One that has not begun yet is kept off by a later job.
  br i1 %all.next, label %note, label %done
note:
  store i32 %number, ptr %avoided.slot
  br label %done
done:
  ret void
}}

; Take a core from those that a worker may run on, unless it has no other; give it back the one that was taken before. False: it has not begun yet.
define internal i1 @keep_off(ptr %pool, i32 %worker, i32 %core) {{
entry:
  %now = alloca [{words} x i64], align 8
  %threads = getelementptr i8, ptr %pool, i64 {threads}
  %thread.slot = getelementptr i32, ptr %threads, i32 %worker
  %thread = load atomic i32, ptr %thread.slot seq_cst, align 4
  %begun = icmp ne i32 %thread, 0
  br i1 %begun, label %ask, label %absent
absent:
  ret i1 false
ask:
  call void @llvm.memset.p0.i64(ptr %now, i8 0, i64 {bytes}, i1 false)
  %size = call i64 (i64, ...) @syscall(i64 {get}, i32 %thread, i64 {bytes}, ptr %now)
  %told = icmp sgt i64 %size, 0
  br i1 %told, label %compare, label %done
compare:
  %homes = getelementptr i8, ptr %pool, i64 {homes}
  %home = getelementptr [{bytes} x i8], ptr %homes, i32 %worker
  %givens = getelementptr i8, ptr %pool, i64 {givens}
  %given = getelementptr [{bytes} x i8], ptr %givens, i32 %worker
  %differs = call i32 @memcmp(ptr %now, ptr %given, i64 {bytes})
  %changed = icmp ne i32 %differs, 0
  br i1 %changed, label %learn, label %take
learn:
  ; The cores it was made with, or what somebody else has given it since.
  call void @llvm.memcpy.p0.p0.i64(ptr %home, ptr %now, i64 {bytes}, i1 false)
  br label %take
take:
  call void @llvm.memcpy.p0.p0.i64(ptr %given, ptr %home, i64 {bytes}, i1 false)
  %number = lshr i32 %core, 6
  %word = getelementptr i64, ptr %given, i32 %number
  %rest = and i32 %core, 63
  %rest.wide = zext i32 %rest to i64
  %bit = shl i64 1, %rest.wide
  %others = xor i64 %bit, -1
  %old = load i64, ptr %word
  %new = and i64 %old, %others
  store i64 %new, ptr %word
  br label %look
look:
  %i = phi i64 [ 0, %take ], [ %after, %look ]
  %any = phi i64 [ 0, %take ], [ %any.next, %look ]
  %at = getelementptr i64, ptr %given, i64 %i
  %left = load i64, ptr %at
  %any.next = or i64 %any, %left
  %after = add i64 %i, 1
  %more = icmp slt i64 %after, {words}
  br i1 %more, label %look, label %choose
choose:
  %some = icmp ne i64 %any.next, 0
  br i1 %some, label %set, label %restore
restore:
  store i64 %old, ptr %word
  br label %set
set:
  %moved = call i64 (i64, ...) @syscall(i64 {set}, i32 %thread, i64 {bytes}, ptr %given)
  br label %done
done:
  ret i1 true
}}

; Worker `number` has begun.
define internal void @begin(ptr %pool, i32 %number) {{
entry:
  %few = icmp ult i32 %number, {most}
  br i1 %few, label %note, label %done
note:
  %thread = call i64 (i64, ...) @syscall(i64 {thread})
  %short = trunc i64 %thread to i32
  %threads = getelementptr i8, ptr %pool, i64 {threads}
  %thread.slot = getelementptr i32, ptr %threads, i32 %number
  store atomic i32 %short, ptr %thread.slot seq_cst, align 4
  br label %done
done:
  ret void
}}

; Where another thread of the job runs on this core, go to one that has none.
define internal void @own_core(ptr %pool) {{
entry:
  %allowed = alloca [{words} x i64], align 8
  %free = alloca [{words} x i64], align 8
  %first = call i1 @take_core(ptr %pool)
  br i1 %first, label %done, label %alone
alone:
  %lock = getelementptr i8, ptr %pool, i64 {steering}
  %held = cmpxchg ptr %lock, i32 0, i32 1 seq_cst seq_cst
  %mine = extractvalue {{ i32, i1 }} %held, 1
  br i1 %mine, label %ask, label %done
ask:
  %cores = getelementptr i8, ptr %pool, i64 {cores}
  call void @llvm.memset.p0.i64(ptr %allowed, i8 0, i64 {bytes}, i1 false)
  %size = call i64 (i64, ...) @syscall(i64 {get}, i32 0, i64 {bytes}, ptr %allowed)
  %told = icmp sgt i64 %size, 0
  br i1 %told, label %words, label %release
words:
  %i = phi i64 [ 0, %ask ], [ %after, %words ]
  %any = phi i64 [ 0, %ask ], [ %any.next, %words ]
  %taken.at = getelementptr i64, ptr %cores, i64 %i
  %allowed.at = getelementptr i64, ptr %allowed, i64 %i
  %free.at = getelementptr i64, ptr %free, i64 %i
  %taken = load atomic i64, ptr %taken.at monotonic, align 8
  %may = load i64, ptr %allowed.at
  %not = xor i64 %taken, -1
  %left = and i64 %may, %not
  store i64 %left, ptr %free.at
  %any.next = or i64 %any, %left
  %after = add i64 %i, 1
  %more = icmp slt i64 %after, {words}
  br i1 %more, label %words, label %choose
choose:
  %some = icmp ne i64 %any.next, 0
  br i1 %some, label %move, label %release
move:
  %moved = call i64 (i64, ...) @syscall(i64 {set}, i32 0, i64 {bytes}, ptr %free)
  %freed = call i64 (i64, ...) @syscall(i64 {set}, i32 0, i64 {bytes}, ptr %allowed)
  %own = call i1 @take_core(ptr %pool)
  br label %release
release:
  store atomic i32 0, ptr %lock release, align 4
  br label %done
done:
  ret void
}}

declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i32 @memcmp(ptr, ptr, i64)
"""

_NO_CORES = """
define internal void @first_core(ptr %pool) {{
  ret void
}}

define internal void @own_core(ptr %pool) {{
  ret void
}}

define internal void @begin(ptr %pool, i32 %number) {{
  ret void
}}
"""

_PTHREAD = """
declare i32 @pthread_mutex_init(ptr, ptr)
declare i32 @pthread_cond_init(ptr, ptr)
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_broadcast(ptr)

define internal void @sleep(ptr %pool, i32 %last) {{
entry:
  %mutex = getelementptr i8, ptr %pool, i64 {mutex}
  %condition = getelementptr i8, ptr %pool, i64 {condition}
  %locked = call i32 @pthread_mutex_lock(ptr %mutex)
  br label %test
test:
  %now = load atomic i32, ptr %pool seq_cst, align 4
  %same = icmp eq i32 %now, %last
  br i1 %same, label %wait, label %done
wait:
  %waited = call i32 @pthread_cond_wait(ptr %condition, ptr %mutex)
  br label %test
done:
  %unlocked = call i32 @pthread_mutex_unlock(ptr %mutex)
  ret void
}}

define internal void @wake(ptr %pool, i32 %count) {{
  %mutex = getelementptr i8, ptr %pool, i64 {mutex}
  %condition = getelementptr i8, ptr %pool, i64 {condition}
  %locked = call i32 @pthread_mutex_lock(ptr %mutex)
  %woken = call i32 @pthread_cond_broadcast(ptr %condition)
  %unlocked = call i32 @pthread_mutex_unlock(ptr %mutex)
  ret void
}}

define void @tilewright_pool_init(ptr %pool) {{
  %mutex = getelementptr i8, ptr %pool, i64 {mutex}
  %condition = getelementptr i8, ptr %pool, i64 {condition}
  %a = call i32 @pthread_mutex_init(ptr %mutex, ptr null)
  %b = call i32 @pthread_cond_init(ptr %condition, ptr null)
  ret void
}}
"""

_COMMON = """
{pause_declaration}
declare i32 @sched_yield()
declare i64 @llvm.smin.i64(i64, i64)

; Run blocks until none is left: first those of the thread's own lane, then what others have left of theirs. The next launch of as many blocks gives the
; thread the same ones, whose data its caches still hold.
define internal void @claim(ptr %pool, i64 %home) {{
start:
  %entry.slot = getelementptr i8, ptr %pool, i64 {entry}
  %slots.slot = getelementptr i8, ptr %pool, i64 {slots}
  %blocks.slot = getelementptr i8, ptr %pool, i64 {blocks}
  %grain.slot = getelementptr i8, ptr %pool, i64 {grain}
  %lanes.slot = getelementptr i8, ptr %pool, i64 {lanes}
  %entry = load ptr, ptr %entry.slot
  %slots = load ptr, ptr %slots.slot
  %blocks = load i64, ptr %blocks.slot
  %grain = load i64, ptr %grain.slot
  %lanes = load i64, ptr %lanes.slot
  br label %lane
lane:
  %turn = phi i64 [ 0, %start ], [ %turn.next, %over ]
  %place = add i64 %home, %turn
  %number = urem i64 %place, %lanes
  %following = add i64 %number, 1
  %low.all = mul i64 %number, %blocks
  %low = udiv i64 %low.all, %lanes
  %high.all = mul i64 %following, %blocks
  %high = udiv i64 %high.all, %lanes
  %nexts = getelementptr i8, ptr %pool, i64 {next}
  %next = getelementptr [{lane_bytes} x i8], ptr %nexts, i64 %number
  br label %take
take:
  %claimed = atomicrmw add ptr %next, i64 %grain monotonic
  %begin = add i64 %low, %claimed
  %some = icmp slt i64 %begin, %high
  br i1 %some, label %run, label %over
run:
  %stop = add i64 %begin, %grain
  %end = call i64 @llvm.smin.i64(i64 %stop, i64 %high)
  call void %entry(ptr %slots, i64 %begin, i64 %end)
  br label %take
over:
  %turn.next = add i64 %turn, 1
  %more = icmp ult i64 %turn.next, %lanes
  br i1 %more, label %lane, label %done
done:
  ret void
}}

; Looks at the job counter as a worker does: how long one takes differs by ten between processors.
define void @tilewright_pool_look(ptr %pool, i32 %turns) {{
entry:
  br label %look
look:
  %turn = phi i32 [ 0, %entry ], [ %turn.next, %look ]
  %seen = load atomic i32, ptr %pool seq_cst, align 4
  {pause}
  %turn.next = add i32 %turn, 1
  %more = icmp slt i32 %turn.next, %turns
  br i1 %more, label %look, label %done
done:
  ret void
}}

define void @tilewright_pool_worker(ptr %pool) {{
entry:
  %pending = getelementptr i8, ptr %pool, i64 {pending}
  %sleepers = getelementptr i8, ptr %pool, i64 {sleepers}
  %spin.slot = getelementptr i8, ptr %pool, i64 {spin}
  %stop.slot = getelementptr i8, ptr %pool, i64 {stop}
  %ready = getelementptr i8, ptr %pool, i64 {ready}
  %settled.slot = alloca i32
  store i32 -1, ptr %settled.slot
  %first = load atomic i32, ptr %pool seq_cst, align 4
  %counted = atomicrmw add ptr %ready, i32 1 seq_cst
  call void @begin(ptr %pool, i32 %counted)
  %counted.wide = zext i32 %counted to i64
  %home = add i64 %counted.wide, 1
  br label %idle

idle:
  %last = phi i32 [ %first, %entry ], [ %seen, %between ], [ %seen, %leave.job ]
  %stop = load atomic i32, ptr %stop.slot seq_cst, align 4
  %stopped = icmp ne i32 %stop, 0
  br i1 %stopped, label %out, label %spin.start
spin.start:
  %limit = load atomic i32, ptr %spin.slot monotonic, align 4
  br label %spin
spin:
  %turn = phi i32 [ 0, %spin.start ], [ %turn.next, %spin.more ]
  %spinned = load atomic i32, ptr %pool seq_cst, align 4
  %changed = icmp ne i32 %spinned, %last
  br i1 %changed, label %look, label %spin.more
spin.more:
  {pause}
  %turn.next = add i32 %turn, 1
  %again = icmp slt i32 %turn.next, %limit
  br i1 %again, label %spin, label %doze
doze:
  %up = atomicrmw add ptr %sleepers, i32 1 seq_cst
  br label %nap
nap:
  call void @sleep(ptr %pool, i32 %last)
  %slept = load atomic i32, ptr %pool seq_cst, align 4
  %woken = icmp ne i32 %slept, %last
  br i1 %woken, label %rise, label %nap
rise:
  %down = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  br label %look

look:
  %seen = phi i32 [ %spinned, %spin ], [ %slept, %rise ], [ %fresh, %missed ]
  ; Once for each job, also for one that it has come too late for, so that it is in time for the next. Before it counts itself in:
  ; a core that others keep busy is no reason for the caller to wait.
  %rounded = add i32 %seen, 1
  %job = lshr i32 %rounded, 1
  %settled = load i32, ptr %settled.slot
  %known = icmp eq i32 %job, %settled
  br i1 %known, label %decide, label %settle
settle:
  store i32 %job, ptr %settled.slot
  call void @own_core(ptr %pool)
  br label %decide
decide:
  %odd = and i32 %seen, 1
  %open = icmp ne i32 %odd, 0
  br i1 %open, label %enter.job, label %between
between:
  br label %idle
enter.job:
  %in = atomicrmw add ptr %pending, i32 1 seq_cst
  %fresh = load atomic i32, ptr %pool seq_cst, align 4
  %still = icmp eq i32 %fresh, %seen
  br i1 %still, label %work, label %missed
missed:
  %back = atomicrmw sub ptr %pending, i32 1 seq_cst
  br label %look
work:
  call void @claim(ptr %pool, i64 %home)
  br label %leave.job
leave.job:
  %left = atomicrmw sub ptr %pending, i32 1 seq_cst
  br label %idle
out:
  ret void
}}

define void @tilewright_pool_run(ptr %pool, ptr %entry, ptr %slots, i64 %blocks, i64 %grain) {{
start:
  %lock = getelementptr i8, ptr %pool, i64 {lock}
  %workers.slot = getelementptr i8, ptr %pool, i64 {workers}
  %several = icmp slt i64 %grain, %blocks
  %workers = load atomic i32, ptr %workers.slot monotonic, align 4
  %any = icmp sgt i32 %workers, 0
  %try = and i1 %several, %any
  br i1 %try, label %acquire, label %alone
acquire:
  %held = cmpxchg ptr %lock, i32 0, i32 1 seq_cst seq_cst
  %mine = extractvalue {{ i32, i1 }} %held, 1
  br i1 %mine, label %recheck, label %alone
recheck:
  ; the workers may have been sent home between the look and the lock
  %workers.now = load atomic i32, ptr %workers.slot monotonic, align 4
  %none = icmp eq i32 %workers.now, 0
  br i1 %none, label %release.alone, label %publish
release.alone:
  store atomic i32 0, ptr %lock release, align 4
  br label %alone
alone:
  call void %entry(ptr %slots, i64 0, i64 %blocks)
  ret void

publish:
  %entry.slot = getelementptr i8, ptr %pool, i64 {entry}
  %slots.slot = getelementptr i8, ptr %pool, i64 {slots}
  %blocks.slot = getelementptr i8, ptr %pool, i64 {blocks}
  %grain.slot = getelementptr i8, ptr %pool, i64 {grain}
  %lanes.slot = getelementptr i8, ptr %pool, i64 {lanes}
  %nexts = getelementptr i8, ptr %pool, i64 {next}
  %pending = getelementptr i8, ptr %pool, i64 {pending}
  %sleepers = getelementptr i8, ptr %pool, i64 {sleepers}
  %spin.slot = getelementptr i8, ptr %pool, i64 {spin}
  store ptr %entry, ptr %entry.slot
  store ptr %slots, ptr %slots.slot
  store i64 %blocks, ptr %blocks.slot
  store i64 %grain, ptr %grain.slot
  ; a lane for each thread, as long as there is a claim for each
  %reach = sub i64 %blocks, 1
  %claims = sdiv i64 %reach, %grain
  %workers.wide = zext i32 %workers.now to i64
  %others = call i64 @llvm.smin.i64(i64 %claims, i64 %workers.wide)
  %threads = add i64 %others, 1
  %lanes = call i64 @llvm.smin.i64(i64 %threads, i64 {most_lanes})
  store i64 %lanes, ptr %lanes.slot
  br label %clear
clear:
  %lane = phi i64 [ 0, %publish ], [ %lane.after, %clear ]
  %next = getelementptr [{lane_bytes} x i8], ptr %nexts, i64 %lane
  store atomic i64 0, ptr %next monotonic, align 8
  %lane.after = add i64 %lane, 1
  %lane.more = icmp ult i64 %lane.after, %lanes
  br i1 %lane.more, label %clear, label %open
open:
  call void @first_core(ptr %pool)
  %opened = atomicrmw add ptr %pool, i32 1 seq_cst
  %asleep = load atomic i32, ptr %sleepers seq_cst, align 4
  %wanted = icmp sgt i32 %asleep, 0
  br i1 %wanted, label %call, label %work
call:
  ; no more threads than there are claims beside our own
  %asleep.wide = zext i32 %asleep to i64
  %helpers.wide = call i64 @llvm.smin.i64(i64 %claims, i64 %asleep.wide)
  %helpers = trunc i64 %helpers.wide to i32
  call void @wake(ptr %pool, i32 %helpers)
  br label %work
work:
  call void @claim(ptr %pool, i64 0)
  %closed = atomicrmw add ptr %pool, i32 1 seq_cst
  %limit = load atomic i32, ptr %spin.slot monotonic, align 4
  br label %join
join:
  %turn = phi i32 [ 0, %work ], [ %turn.next, %spin ], [ %turn, %yield ]
  %inside = load atomic i32, ptr %pending seq_cst, align 4
  %empty = icmp eq i32 %inside, 0
  br i1 %empty, label %finish, label %wait
wait:
  %patient = icmp slt i32 %turn, %limit
  br i1 %patient, label %spin, label %yield
spin:
  {pause}
  %turn.next = add i32 %turn, 1
  br label %join
yield:
  %yielded = call i32 @sched_yield()
  br label %join
finish:
  store atomic i32 0, ptr %lock release, align 4
  ret void
}}

define void @tilewright_pool_stop(ptr %pool) {{
entry:
  %lock = getelementptr i8, ptr %pool, i64 {lock}
  %workers.slot = getelementptr i8, ptr %pool, i64 {workers}
  %stop.slot = getelementptr i8, ptr %pool, i64 {stop}
  br label %acquire
acquire:
  %held = cmpxchg ptr %lock, i32 0, i32 1 seq_cst seq_cst
  %mine = extractvalue {{ i32, i1 }} %held, 1
  br i1 %mine, label %send, label %again
again:
  %yielded = call i32 @sched_yield()
  br label %acquire
send:
  store atomic i32 0, ptr %workers.slot monotonic, align 4
  store atomic i32 1, ptr %stop.slot seq_cst, align 4
  %bumped = atomicrmw add ptr %pool, i32 2 seq_cst
  call void @wake(ptr %pool, i32 {all})
  store atomic i32 0, ptr %lock release, align 4
  ret void
}}
"""

_LAUNCH = """
declare i64 @llvm.smax.i64(i64, i64)

define void @tilewright_launch(ptr %pool, ptr %entry, ptr %slots, i64 %blocks, i64 %work) {{
start:
  %some = icmp sgt i64 %blocks, 0
  br i1 %some, label %measure, label %done
measure:
  %work.one = call i64 @llvm.smax.i64(i64 %work, i64 1)
  %total = mul i64 %blocks, %work.one
  %large = icmp sge i64 %total, {parallel_work}
  %several = icmp sgt i64 %blocks, 1
  %share = and i1 %large, %several
  br i1 %share, label %parallel, label %alone
alone:
  call void %entry(ptr %slots, i64 0, i64 %blocks)
  ret void
parallel:
  %workers.slot = getelementptr i8, ptr %pool, i64 {workers}
  %workers = load atomic i32, ptr %workers.slot monotonic, align 4
  %threads = add i32 %workers, 1
  %claims = mul i32 %threads, {claims}
  %claims.wide = zext i32 %claims to i64
  %even = udiv i64 %blocks, %claims.wide
  %least = udiv i64 {claim_work}, %work.one
  %larger = call i64 @llvm.smax.i64(i64 %even, i64 %least)
  %grain = call i64 @llvm.smax.i64(i64 %larger, i64 1)
  call void @tilewright_pool_run(ptr %pool, ptr %entry, ptr %slots, i64 %blocks, i64 %grain)
  ret void
done:
  ret void
}}
"""

_LAUNCH_ALL = """
; One launch after another: `jobs` is a table of (entry, slots, blocks, work), 8 bytes each.
define void @tilewright_launch_all(ptr %pool, ptr %jobs, i64 %count) {
start:
  %some = icmp sgt i64 %count, 0
  br i1 %some, label %next, label %done
next:
  %i = phi i64 [ 0, %start ], [ %after, %next ]
  %job = getelementptr [4 x i64], ptr %jobs, i64 %i
  %slots.slot = getelementptr i64, ptr %job, i64 1
  %blocks.slot = getelementptr i64, ptr %job, i64 2
  %work.slot = getelementptr i64, ptr %job, i64 3
  %entry = load ptr, ptr %job
  %slots = load ptr, ptr %slots.slot
  %blocks = load i64, ptr %blocks.slot
  %work = load i64, ptr %work.slot
  call void @tilewright_launch(ptr %pool, ptr %entry, ptr %slots, i64 %blocks, i64 %work)
  %after = add i64 %i, 1
  %more = icmp slt i64 %after, %count
  br i1 %more, label %next, label %done
done:
  ret void
}
"""

_INTERRUPTS = """
@{stop} = external global i32
@tilewright_interrupt_state = global {{ ptr, i64, i32, i32, i32 }} zeroinitializer
declare ptr @PyOS_getsig(i32) nonlazybind
declare i32 @PyOS_InterruptOccurred() nonlazybind
declare void @PyErr_SetInterrupt() nonlazybind
@tilewright_watch = external global i8
declare i64 @pthread_self()
declare i32 @pthread_kill(i64, i32)

; What Ctrl-C calls: what it called before; then, while the main thread is in a long call, kernels are asked to leave. Only the main
; thread asks: another one that the system has chosen hands the signal on, since its word could come after the call's end.
define void @tilewright_on_interrupt(i32 %signal) {{
  %main = load i64, ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 8)
  %self = call i64 @pthread_self()
  %mine = icmp eq i64 %main, %self
  %active = load atomic i32, ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 16) seq_cst, align 4
  %long = icmp ne i32 %active, 0
  %others = xor i1 %mine, true
  %hand = and i1 %others, %long
  br i1 %hand, label %forward, label %here
forward:
  %sent = call i32 @pthread_kill(i64 %main, i32 %signal)
  ret void
here:
  br i1 %mine, label %first, label %tell
first:
  ; The main thread may have been told by another one: then Python knows already.
  %told = atomicrmw xchg ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 24), i32 0 seq_cst
  %relayed = icmp ne i32 %told, 0
  br i1 %relayed, label %known, label %tell
tell:
  %before = load ptr, ptr @tilewright_interrupt_state
  call void %before(i32 %signal)
  br label %known
known:
  ; A long call may have begun since: it has asked Python before Python knew.
  %active.now = load atomic i32, ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 16) seq_cst, align 4
  %long.now = icmp ne i32 %active.now, 0
  br i1 %long.now, label %act, label %done
act:
  br i1 %mine, label %ask, label %relay
relay:
  store atomic i32 1, ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 24) seq_cst, align 4
  %resent = call i32 @pthread_kill(i64 %main, i32 %signal)
  ret void
ask:
  call void @ask()
  br label %done
done:
  ret void
}}

; The word first, then the number: who sees neither, as it begins and as it ends, has met no kernel that left early.
define internal void @ask() {{
  store atomic i32 1, ptr @{stop} seq_cst, align 4
  %count = atomicrmw add ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 20), i32 1 seq_cst
  ret void
}}

; Around long calls, with the GIL held. Gives the number of interrupts so far; one less where kernels are being asked to leave now.
define i32 @tilewright_interrupt_begin() {{
  %count = load atomic i32, ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 20) seq_cst, align 4
  %asked = load atomic i32, ptr @{stop} seq_cst, align 4
  %before = sub i32 %count, %asked
  %main = load i64, ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 8)
  %self = call i64 @pthread_self()
  %mine = icmp eq i64 %main, %self
  br i1 %mine, label %look, label %begin
look:
  %handler = call ptr @PyOS_getsig(i32 {sigint})
  %ours = icmp eq ptr %handler, @tilewright_on_interrupt
  br i1 %ours, label %arm, label %watch
watch:
  call void @call_python(ptr @tilewright_watch)
  %again = call ptr @PyOS_getsig(i32 {sigint})
  %now = icmp eq ptr %again, @tilewright_on_interrupt
  br i1 %now, label %arm, label %heard
arm:
  store atomic i32 1, ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 16) seq_cst, align 4
  ; A signal that came before this is known to Python alone, which looks again when the call has ended.
  %early = call i32 @PyOS_InterruptOccurred()
  %none = icmp eq i32 %early, 0
  br i1 %none, label %heard, label %keep
keep:
  call void @PyErr_SetInterrupt()
  call void @ask()
  br label %begin
heard:
  ; What it called in Python, here or to start the workers, may have raised already, and then our handler may not be there.
  %raised = call ptr @PyErr_Occurred()
  %quiet = icmp eq ptr %raised, null
  br i1 %quiet, label %begin, label %leave
leave:
  call void @ask()
  br label %begin
begin:
  ret i32 %before
}}

; With the GIL held again: whether there was an interrupt since. Calls that keep the GIL look at the word alone, which no other thread
; takes back meanwhile.
define i32 @tilewright_interrupt_end(i32 %before) {{
  %asked = load atomic i32, ptr @{stop} seq_cst, align 4
  %main = load i64, ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 8)
  %self = call i64 @pthread_self()
  %mine = icmp eq i64 %main, %self
  br i1 %mine, label %clear, label %end
clear:
  store atomic i32 0, ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 16) seq_cst, align 4
  store atomic i32 0, ptr @{stop} seq_cst, align 4
  br label %end
end:
  %count = load atomic i32, ptr getelementptr (i8, ptr @tilewright_interrupt_state, i64 20) seq_cst, align 4
  %some = icmp ne i32 %count, %before
  %left = icmp ne i32 %asked, 0
  %either = or i1 %some, %left
  %result = zext i1 %either to i32
  ret i32 %result
}}
"""

_NO_INTERRUPTS = """
define i32 @tilewright_interrupt_begin() {
  ret i32 0
}
define i32 @tilewright_interrupt_end(i32 %before) {
  ret i32 0
}
"""

_CALL_PYTHON = """
declare ptr @PyErr_Occurred() nonlazybind
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr) nonlazybind
declare void @Py_DecRef(ptr) nonlazybind

; What it raises is left for the end of the call.
define internal void @call_python(ptr %function) {
  %result = call ptr @PyObject_Vectorcall(ptr %function, ptr null, i64 0, ptr null)
  %failed = icmp eq ptr %result, null
  br i1 %failed, label %done, label %drop
drop:
  call void @Py_DecRef(ptr %result)
  br label %done
done:
  ret void
}
"""

# The functions of the pool come later: until then a launch is its caller's alone, and nobody hears Ctrl-C before the call ends. Where they did not come
# since starting failed, the end of the call says so.
_STARTER = f"""
@tilewright_start_workers = external global i8
@{abi.FUNCTIONS_OF_POOL} = global [3 x ptr] zeroinitializer

define void @tilewright_pool_start() {{
  call void @call_python(ptr @tilewright_start_workers)
  ret void
}}

define internal void @tilewright_pool_run(ptr %pool, ptr %entry, ptr %slots, i64 %blocks, i64 %grain) {{
  %run = load atomic ptr, ptr @{abi.FUNCTIONS_OF_POOL} acquire, align 8
  %alone = icmp eq ptr %run, null
  br i1 %alone, label %here, label %share
share:
  call void %run(ptr %pool, ptr %entry, ptr %slots, i64 %blocks, i64 %grain)
  ret void
here:
  call void %entry(ptr %slots, i64 0, i64 %blocks)
  ret void
}}

define i32 @tilewright_interrupt_begin() {{
  %begin = load atomic ptr, ptr getelementptr (i8, ptr @{abi.FUNCTIONS_OF_POOL}, i64 8) acquire, align 8
  %absent = icmp eq ptr %begin, null
  br i1 %absent, label %none, label %ask
ask:
  %count = call i32 %begin()
  ret i32 %count
none:
  ret i32 0
}}

define i32 @tilewright_interrupt_end(i32 %before) {{
  %end = load atomic ptr, ptr getelementptr (i8, ptr @{abi.FUNCTIONS_OF_POOL}, i64 16) acquire, align 8
  %absent = icmp eq ptr %end, null
  br i1 %absent, label %none, label %ask
ask:
  %stopped = call i32 %end(i32 %before)
  ret i32 %stopped
none:
  %raised = call ptr @PyErr_Occurred()
  %some = icmp ne ptr %raised, null
  %result = zext i1 %some to i32
  ret i32 %result
}}
"""

_HEARD = """
declare ptr @PyEval_SaveThread() nonlazybind
declare void @PyEval_RestoreThread(ptr) nonlazybind

; Launches for callers in Python, who hold the GIL: between begin and end no code of Python runs that an interrupt could leave.
define i32 @tilewright_launch_heard(ptr %pool, ptr %entry, ptr %slots, i64 %blocks, i64 %work) {
  %before = call i32 @tilewright_interrupt_begin()
  %state = call ptr @PyEval_SaveThread()
  call void @tilewright_launch(ptr %pool, ptr %entry, ptr %slots, i64 %blocks, i64 %work)
  call void @PyEval_RestoreThread(ptr %state)
  %stopped = call i32 @tilewright_interrupt_end(i32 %before)
  ret i32 %stopped
}

define i32 @tilewright_launch_all_heard(ptr %pool, ptr %jobs, i64 %count) {
  %before = call i32 @tilewright_interrupt_begin()
  %state = call ptr @PyEval_SaveThread()
  call void @tilewright_launch_all(ptr %pool, ptr %jobs, i64 %count)
  call void @PyEval_RestoreThread(ptr %state)
  %stopped = call i32 @tilewright_interrupt_end(i32 %before)
  ret i32 %stopped
}
"""

_ALONE = """
define void @tilewright_pool_run(ptr %pool, ptr %entry, ptr %slots, i64 %blocks, i64 %grain) {
  call void %entry(ptr %slots, i64 0, i64 %blocks)
  ret void
}
define void @tilewright_pool_worker(ptr %pool) {
  ret void
}
define void @tilewright_pool_init(ptr %pool) {
  ret void
}
define void @tilewright_pool_stop(ptr %pool) {
  ret void
}
"""


def _launch() -> str:
    return _LAUNCH.format(parallel_work=PARALLEL_WORK, claim_work=CLAIM_WORK, claims=CLAIMS_PER_THREAD, workers=abi.POOL_WORKERS)


def pool_ir(target: Target, futex: bool = True) -> str:
    """LLVM text of the pool for the target's system. Without `futex`, threads sleep on a condition variable everywhere."""
    machine = target.triple.split("-", 1)[0]
    launch = _launch() + _LAUNCH_ALL + _CALL_PYTHON
    if "windows" in target.triple:
        # No pool there yet: the runtime starts no workers, and every job runs in its caller.
        return _ALONE + launch + _NO_INTERRUPTS + _HEARD
    if futex and "linux" in target.triple and machine in _FUTEX_NUMBER:
        sleeping = _FUTEX.format(number=_FUTEX_NUMBER[machine], wait=_FUTEX_WAIT, wake=_FUTEX_WAKE)
        sleeping += _CORES.format(
            cores=abi.POOL_CORES, bytes=abi.POOL_CORE_BYTES, bits=8 * abi.POOL_CORE_BYTES, words=abi.POOL_CORE_BYTES // 8,
            set=_SET_CORES[machine], get=_SET_CORES[machine] + 1, thread=_THREAD_NUMBER[machine], workers=abi.POOL_WORKERS, avoided=abi.POOL_AVOIDED, steering=abi.POOL_STEERING,
            threads=abi.POOL_THREADS, homes=abi.POOL_HOMES, givens=abi.POOL_GIVENS, most=abi.POOL_STEERED,
        )  # fmt: skip
    else:
        sleeping = _PTHREAD.format(mutex=abi.POOL_MUTEX, condition=abi.POOL_CONDITION) + _NO_CORES.format()
    pause, declaration = pause_of(machine)
    common = _COMMON.format(
        pause=pause,
        pause_declaration=declaration,
        all=_ALL,
        pending=abi.POOL_PENDING,
        sleepers=abi.POOL_SLEEPERS,
        next=abi.POOL_NEXT,
        lanes=abi.POOL_LANES,
        lane_bytes=abi.POOL_LANE_BYTES,
        most_lanes=abi.LANES_OF_POOL,
        entry=abi.POOL_ENTRY,
        slots=abi.POOL_SLOTS,
        blocks=abi.POOL_BLOCKS,
        grain=abi.POOL_GRAIN,
        spin=abi.POOL_SPIN,
        stop=abi.POOL_STOP,
        ready=abi.POOL_READY,
        lock=abi.POOL_LOCK,
        workers=abi.POOL_WORKERS,
    )
    return sleeping + common + launch + _INTERRUPTS.format(stop=abi.STOP, sigint=abi.SIGINT) + _HEARD


@functools.cache
def pool_object(target: Target) -> bytes:
    """The pool's code as an object; the same for every program, so compiled once."""
    # Optimising would triple the compile time and save nothing a caller could measure.
    return compile_object(pool_ir(target), target, opt=0)


def starter_ir() -> str:
    """LLVM text of what is there before the pool is."""
    return _launch() + _CALL_PYTHON + _STARTER


@functools.cache
def starter_object(target: Target) -> bytes:
    """The starter's code as an object; the same for every program."""
    return compile_object(starter_ir(), target, opt=0)
