"""Machine code that runs scheduled tasks on the threads of the CPU pool, as LLVM text.

In: a CPU target. Out: an entry of the pool, `tilewright_walk_tasks(slots, begin, end)`. Every thread that calls it takes the next task of a list, waits until the
counters that the task names have come far enough, runs the task and counts up the counter of its launch. Producers come before consumers in the list, and tasks are
taken in its order: whoever waits, waits for a task that another thread has taken. So nothing hangs, whatever the number of threads is.

Words of `slots`, 8 bytes each: the next task, the end of the list, tasks, waits, counters, the epoch, and where times go or 0. A task is (entry, slots, begin, end,
launch, first wait, waits, 0); a wait is (launch, arrivals of each epoch); a counter has a line of the cache to itself; times are (worker, arrived, started, ended).
"""

from __future__ import annotations

import functools

from tilewright.base.target import Target
from tilewright.codegen.host.pool import pause_of
from tilewright.codegen.llvm.native import compile_object

NEXT, END, TASKS, WAITS, COUNTERS, EPOCH, TIMES, WORDS = range(8)
"""Words of `slots`, and how many there are."""
TASK_WORDS, WAIT_WORDS, COUNTER_WORDS, TIME_WORDS = 8, 2, 16, 4
_PATIENCE = 2000
"""Looks at a counter before a thread lets others run."""

_WALK = """
{pause_declaration}
declare i32 @sched_yield()

define void @tilewright_walk_tasks(ptr %slots, i64 %begin, i64 %end) {{
start:
  %count.slot = getelementptr i64, ptr %slots, i64 {end_word}
  %tasks.slot = getelementptr i64, ptr %slots, i64 {tasks_word}
  %waits.slot = getelementptr i64, ptr %slots, i64 {waits_word}
  %counters.slot = getelementptr i64, ptr %slots, i64 {counters_word}
  %epoch.slot = getelementptr i64, ptr %slots, i64 {epoch_word}
  %times.slot = getelementptr i64, ptr %slots, i64 {times_word}
  %count = load i64, ptr %count.slot
  %tasks = load ptr, ptr %tasks.slot
  %waits = load ptr, ptr %waits.slot
  %counters = load ptr, ptr %counters.slot
  %epoch = load i64, ptr %epoch.slot
  %times = load ptr, ptr %times.slot
  %clocks = icmp ne ptr %times, null
  br label %take
take:
  %number = atomicrmw add ptr %slots, i64 1 monotonic
  %some = icmp slt i64 %number, %count
  br i1 %some, label %found, label %done
found:
  %task = getelementptr [{task_words} x i64], ptr %tasks, i64 %number
  %args.slot = getelementptr i64, ptr %task, i64 1
  %low.slot = getelementptr i64, ptr %task, i64 2
  %high.slot = getelementptr i64, ptr %task, i64 3
  %launch.slot = getelementptr i64, ptr %task, i64 4
  %first.slot = getelementptr i64, ptr %task, i64 5
  %needs.slot = getelementptr i64, ptr %task, i64 6
  %entry = load ptr, ptr %task
  %args = load ptr, ptr %args.slot
  %low = load i64, ptr %low.slot
  %high = load i64, ptr %high.slot
  %launch = load i64, ptr %launch.slot
  %first = load i64, ptr %first.slot
  %needs = load i64, ptr %needs.slot
  br i1 %clocks, label %clock.in, label %ask
clock.in:
  %row = getelementptr [{time_words} x i64], ptr %times, i64 %number
  store i64 %begin, ptr %row
  %arrived.slot = getelementptr i64, ptr %row, i64 1
  %arrived = call i64 @now()
  store i64 %arrived, ptr %arrived.slot
  br label %ask
ask:
  %asked = phi i64 [ 0, %found ], [ 0, %clock.in ], [ %asked.next, %heard ]
  %more = icmp slt i64 %asked, %needs
  br i1 %more, label %name, label %go
name:
  %which = add i64 %first, %asked
  %wait = getelementptr [{wait_words} x i64], ptr %waits, i64 %which
  %parts.slot = getelementptr i64, ptr %wait, i64 1
  %other = load i64, ptr %wait
  %parts = load i64, ptr %parts.slot
  %wanted = mul i64 %parts, %epoch
  %counter = getelementptr [{counter_words} x i64], ptr %counters, i64 %other
  br label %look
look:
  %turn = phi i64 [ 0, %name ], [ %turn.next, %spin ], [ %turn, %yield ]
  %have = load atomic i64, ptr %counter acquire, align 8
  %ready = icmp sge i64 %have, %wanted
  br i1 %ready, label %heard, label %stay
stay:
  %patient = icmp slt i64 %turn, {patience}
  br i1 %patient, label %spin, label %yield
spin:
  {pause}
  %turn.next = add i64 %turn, 1
  br label %look
yield:
  %yielded = call i32 @sched_yield()
  br label %look
heard:
  %asked.next = add i64 %asked, 1
  br label %ask
go:
  br i1 %clocks, label %clock.start, label %run
clock.start:
  %row.start = getelementptr [{time_words} x i64], ptr %times, i64 %number
  %started.slot = getelementptr i64, ptr %row.start, i64 2
  %started = call i64 @now()
  store i64 %started, ptr %started.slot
  br label %run
run:
  call void %entry(ptr %args, i64 %low, i64 %high)
  br i1 %clocks, label %clock.out, label %arrive
clock.out:
  %row.end = getelementptr [{time_words} x i64], ptr %times, i64 %number
  %ended.slot = getelementptr i64, ptr %row.end, i64 3
  %ended = call i64 @now()
  store i64 %ended, ptr %ended.slot
  br label %arrive
arrive:
  %own = getelementptr [{counter_words} x i64], ptr %counters, i64 %launch
  %before = atomicrmw add ptr %own, i64 1 release
  br label %take
done:
  ret void
}}
"""

_CLOCK = """
declare i32 @clock_gettime(i32, ptr)

define internal i64 @now() {{
  %room = alloca [2 x i64], align 8
  %said = call i32 @clock_gettime(i32 {clock}, ptr %room)
  %parts.slot = getelementptr i64, ptr %room, i64 1
  %seconds = load i64, ptr %room
  %parts = load i64, ptr %parts.slot
  %whole = mul i64 %seconds, 1000000000
  %time = add i64 %whole, %parts
  ret i64 %time
}}
"""

_CYCLES = """
declare i64 @llvm.readcyclecounter()

define internal i64 @now() {
  %cycles = call i64 @llvm.readcyclecounter()
  ret i64 %cycles
}
"""
_YIELDS = "\ndeclare i32 @SwitchToThread()\n\ndefine internal i32 @sched_yield() {\n  %said = call i32 @SwitchToThread()\n  ret i32 %said\n}\n"


def walk_ir(target: Target) -> str:
    """LLVM text of the walk for the target's system. Times are nanoseconds; cycles where there is no clock of POSIX."""
    pause, declaration = pause_of(target.triple.split("-", 1)[0])
    text = _WALK.format(
        pause=pause, pause_declaration=declaration, patience=_PATIENCE, end_word=END, tasks_word=TASKS, waits_word=WAITS, counters_word=COUNTERS, epoch_word=EPOCH,
        times_word=TIMES, task_words=TASK_WORDS, wait_words=WAIT_WORDS, counter_words=COUNTER_WORDS, time_words=TIME_WORDS,
    )  # fmt: skip
    if "windows" in target.triple:
        return text.replace("declare i32 @sched_yield()", "") + _YIELDS + _CYCLES
    return text + _CLOCK.format(clock=6 if "darwin" in target.triple or "macos" in target.triple else 1)


@functools.cache
def walk_object(target: Target) -> bytes:
    """The walk as an object; the same for every schedule."""
    return compile_object(walk_ir(target), target, opt=0)
