"""The thread pool: every block once, by whatever threads there are, across resizing, nesting, forks and exit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cpu_kernels as kernels
import numpy as np
import pytest

from tilewright.base import abi
from tilewright.base.errors import UserError
from tilewright.base.target import host_cpu
from tilewright.codegen.host.pool import CLAIMS_PER_THREAD, PARALLEL_WORK, pool_ir
from tilewright.codegen.llvm.native import compile_object
from tilewright.runtime.core.objects import ObjectCode
from tilewright.runtime.cpu import pool as cpu_pool

pytestmark = pytest.mark.skipif(os.name != "posix", reason="no pool on this system")

# Each block adds one to its own counter, and notes how the blocks were claimed.
COUNT = f"""
define void @count(ptr %slots, i64 %begin, i64 %end) {{
head:
{kernels.slots("ptr", "ptr")}
  %claims = atomicrmw add ptr %p1, i64 1 monotonic
  br label %loop
loop:
  %i = phi i64 [ %begin, %head ], [ %next, %loop ]
  %at = getelementptr i32, ptr %p0, i64 %i
  %old = atomicrmw add ptr %at, i32 1 monotonic
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %loop, label %done
done:
  ret void
}}
; A block that launches a job of its own: slots are (inner counters, inner claims, launch function, pool, count function).
define void @nest(ptr %slots, i64 %begin, i64 %end) {{
head:
{kernels.slots("ptr", "ptr", "ptr", "ptr", "ptr")}
  br label %loop
loop:
  %i = phi i64 [ %begin, %head ], [ %next, %loop ]
  call void %p2(ptr %p3, ptr %p4, ptr %slots, i64 1000, i64 1000)
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""

# Each claim notes its thread and its core, and takes its time.
CORES = f"""
declare i32 @sched_getcpu()
declare i64 @pthread_self()

define void @note(ptr %slots, i64 %begin, i64 %end) {{
head:
{kernels.slots("ptr", "ptr")}
  %thread = call i64 @pthread_self()
  %core = call i32 @sched_getcpu()
  %core.wide = zext i32 %core to i64
  %thread.at = getelementptr i64, ptr %p0, i64 %begin
  %core.at = getelementptr i64, ptr %p1, i64 %begin
  store i64 %thread, ptr %thread.at
  store i64 %core.wide, ptr %core.at
  br label %wait
wait:
  %turn = phi i64 [ 0, %head ], [ %next, %wait ]
  %next = add i64 %turn, 1
  store volatile i64 %thread, ptr %thread.at
  %more = icmp slt i64 %next, 200000
  br i1 %more, label %wait, label %done
done:
  ret void
}}
"""


class Counter:
    """The counting kernel and its buffers."""

    def __init__(self, code: ObjectCode, blocks: int) -> None:
        self.entry = code.address("count")
        self.counters = np.zeros(blocks, np.int32)
        self.claims = np.zeros(1, np.int64)
        self.slots = np.array([a.__array_interface__["data"][0] for a in (self.counters, self.claims)], np.uint64)

    def run(self, pool: cpu_pool.ThreadPool, work: int = PARALLEL_WORK) -> None:
        pool.launch(self.entry, self.slots.__array_interface__["data"][0], len(self.counters), work)


@pytest.fixture(scope="module")
def code() -> ObjectCode:
    return ObjectCode(compile_object(COUNT, host_cpu()))


@pytest.fixture(params=["futex", "condition"])
def pool(request: pytest.FixtureRequest) -> Iterator[cpu_pool.ThreadPool]:
    """A pool of its own, in both ways to sleep; the process's pool keeps its symbols."""
    target = host_cpu()
    made = cpu_pool.ThreadPool(lambda: compile_object(pool_ir(target, futex=request.param == "futex"), target, opt=0))
    yield made
    made.threads = 1


@pytest.mark.parametrize("threads", [1, 2, 5, 8, 19])
def test_every_block_runs_once(pool: cpu_pool.ThreadPool, code: ObjectCode, threads: int) -> None:
    pool.threads = threads
    for blocks in (1, 2, 3, 100, 4001):
        counter = Counter(code, blocks)
        for turn in range(1, 21):
            counter.run(pool)
            assert (counter.counters == turn).all()
    assert pool.workers == threads - 1


def test_workers_that_slept_come_back(pool: cpu_pool.ThreadPool, code: ObjectCode) -> None:
    pool.threads = 3
    counter = Counter(code, 500)
    for turn in range(1, 6):
        counter.run(pool)
        assert (counter.counters == turn).all()
        time.sleep(0.002)  # a worker may still be on its way up from the last sleep, and counted
        deadline = time.monotonic() + 60
        while (asleep := pool._field(abi.POOL_SLEEPERS).value) < 2 and time.monotonic() < deadline:
            time.sleep(0.002)
        assert asleep == 2
    assert pool._field(abi.POOL_PENDING).value == 0
    assert pool._field(abi.POOL_GENERATION).value % 2 == 0


@pytest.mark.skipif(not sys.platform.startswith("linux") or len(cpu_pool.usable_cores()) < 2, reason="one core, or no say in it")
def test_threads_of_a_job_have_cores_of_their_own() -> None:
    target = host_cpu()
    pool = cpu_pool.partition(0, 1)  # a pool of its own, of all cores
    pool.threads = 2
    code = ObjectCode(compile_object(CORES, target))
    entry = code.address("note")
    threads, cores = np.zeros(2, np.int64), np.zeros(2, np.int64)
    slots = np.array([a.__array_interface__["data"][0] for a in (threads, cores)], np.uint64)
    for _ in range(10):  # other processes may want the cores just then
        shared = stacked = 0
        for turn in range(400):
            if turn % 4 == 0:
                time.sleep(0.002)  # they sleep, and are woken again
            pool.launch(entry, slots.__array_interface__["data"][0], 2, PARALLEL_WORK)
            shared += int(threads[0] != threads[1])
            stacked += int(threads[0] != threads[1] and cores[0] == cores[1])
        if stacked <= 5 + shared // 4:
            break
    pool.threads = 1
    # The system may move a thread at any time; without a core of its own it is most of them.
    assert stacked <= 5 + shared // 4, f"{stacked} of {shared} jobs ran both halves on one core"


@pytest.mark.skipif(not sys.platform.startswith("linux") or len(cpu_pool.usable_cores()) < 2, reason="one core, or no say in it")
@pytest.mark.parametrize("pool", ["futex"], indirect=True)
def test_workers_keep_off_the_core_of_their_caller(pool: cpu_pool.ThreadPool, code: ObjectCode) -> None:
    cores = set(cpu_pool.usable_cores())
    first, second = sorted(cores)[:2]
    pool.threads = 3
    counter = Counter(code, 100)

    def allowed(core: int, wanted: list[set[int]]) -> None:
        """After some jobs from this core workers may run there: one that moves just then is seen to by the next job."""
        os.sched_setaffinity(0, {core})
        try:
            deadline = time.monotonic() + 60
            while True:
                counter.run(pool)
                found = [os.sched_getaffinity(thread.native_id or 0) for thread in pool._threads]
                if found == wanted or time.monotonic() > deadline:
                    break
                time.sleep(0.002)
        finally:
            os.sched_setaffinity(0, cores)
        assert found == wanted

    counter.run(pool)
    deadline = time.monotonic() + 60
    while pool._field(abi.POOL_READY).value < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    for _ in range(3):
        allowed(first, [cores - {first}] * 2)
        allowed(second, [cores - {second}] * 2)
    # What somebody else allows is kept: here no core but the caller's, then any.
    one = pool._threads[0].native_id or 0
    os.sched_setaffinity(one, {second})
    allowed(second, [{second}, cores - {second}])
    allowed(first, [{second}, cores - {first}])
    allowed(second, [{second}, cores - {second}])
    os.sched_setaffinity(one, cores)
    allowed(first, [cores - {first}] * 2)
    allowed(second, [cores - {second}] * 2)


@pytest.mark.skipif(not sys.platform.startswith("linux") or len(cpu_pool.usable_cores()) < 2, reason="one core, or no say in it")
def test_new_workers_keep_off_too(code: ObjectCode) -> None:
    pool = cpu_pool.partition(0, 1)
    counter = Counter(code, 100)
    for threads in (2, 3, 2, 9):
        pool.threads = threads
        for _ in range(200):
            counter.run(pool)
            time.sleep(0.001)
            if pool._field(abi.POOL_AVOIDED).value:
                break
        # Where there are many, one that waits for its caller's core is missed little.
        assert (pool._field(abi.POOL_AVOIDED).value != 0) == (threads - 1 <= abi.POOL_STEERED)
    pool.threads = 1


def test_small_launches_stay_in_the_caller(pool: cpu_pool.ThreadPool, code: ObjectCode) -> None:
    pool.threads = 2
    counter = Counter(code, 64)
    counter.run(pool, work=PARALLEL_WORK // 64 - 1)
    assert counter.claims[0] == 1
    counter.run(pool, work=PARALLEL_WORK // 64)
    assert counter.claims[0] > 2


def test_large_launches_are_claimed_in_pieces(pool: cpu_pool.ThreadPool, code: ObjectCode) -> None:
    pool.threads = 2
    counter = Counter(code, 10_000)
    counter.run(pool)
    # A claim that finds nothing left does not run.
    assert 2 * CLAIMS_PER_THREAD <= counter.claims[0] <= 2 * CLAIMS_PER_THREAD + 1


def test_threads_begin_with_blocks_of_their_own(pool: cpu_pool.ThreadPool) -> None:
    code = ObjectCode(compile_object(CORES, host_cpu()))
    pool.threads = 2
    claims = 2 * CLAIMS_PER_THREAD
    threads, cores = np.zeros(claims, np.int64), np.zeros(claims, np.int64)
    slots = np.array([a.__array_interface__["data"][0] for a in (threads, cores)], np.uint64)
    own = 0
    for _ in range(20):
        pool.launch(code.address("note"), slots.__array_interface__["data"][0], claims, PARALLEL_WORK)
        own += bool((threads[: CLAIMS_PER_THREAD // 2] == threading.get_ident()).all())
    assert own > 10  # a thread that waits for its core finds that the other one has helped


def test_no_blocks_no_call(pool: cpu_pool.ThreadPool, code: ObjectCode) -> None:
    counter = Counter(code, 0)
    counter.run(pool)
    assert counter.claims[0] == 0


def test_nested_jobs_run_inside(pool: cpu_pool.ThreadPool, code: ObjectCode) -> None:
    pool.threads = 2
    inner = Counter(code, 1000)
    slots = np.concatenate([
        inner.slots,
        np.array([pool.code.objects.address("tilewright_launch"), pool.address, code.address("count")], np.uint64),
    ])
    pool.launch(code.address("nest"), slots.__array_interface__["data"][0], 40, PARALLEL_WORK)
    assert (inner.counters == 40).all()
    assert inner.claims[0] == 40


def test_concurrent_callers(pool: cpu_pool.ThreadPool, code: ObjectCode) -> None:
    pool.threads = 3
    counters = [Counter(code, 777) for _ in range(4)]

    def work(counter: Counter) -> None:
        for _ in range(100):
            counter.run(pool)

    threads = [threading.Thread(target=work, args=(counter,)) for counter in counters]
    for thread in threads:
        thread.start()
    # Changing the number of threads under way is allowed.
    for count in (2, 4, 1, 3):
        pool.threads = count
    for thread in threads:
        thread.join()
    for counter in counters:
        assert (counter.counters == 100).all()


def test_fork_gets_a_pool_of_its_own(pool: cpu_pool.ThreadPool, code: ObjectCode) -> None:
    pool.threads = 2
    counter = Counter(code, 1000)
    counter.run(pool)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing but the verdict may leave the child.
        verdict = b"bad"
        try:
            before = pool.workers
            counter.run(pool)
            if before == 0 and pool.workers == 1 and (counter.counters == 2).all():
                verdict = b"good"
        finally:
            os.write(writer, verdict)
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 10) == b"good"
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0
    counter.run(pool)
    assert (counter.counters == 2).all()


def test_stub_runs_large_calls_on_the_pool() -> None:
    before = cpu_pool.get_num_threads()
    program = kernels.make(kernels.ADD, kernels.add_artifact())
    a = np.arange(1_000_000, dtype=np.float32)
    try:
        for threads in (1, 2, 3):
            cpu_pool.set_num_threads(threads)
            assert cpu_pool.get_num_threads() == threads
            np.testing.assert_array_equal(program.call(a, a), a + a)
            assert cpu_pool.pool().workers == threads - 1
    finally:
        cpu_pool.set_num_threads(before)


def test_other_python_threads_run_during_a_large_call() -> None:
    program = kernels.make(kernels.ADD, kernels.add_artifact())
    a = np.zeros(1 << 24, np.float32)
    out = np.zeros_like(a)
    ticks: list[float] = []
    leave = threading.Event()

    def tick() -> None:
        while not leave.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody is asked to let go of the GIL
    try:
        spans = []
        for _ in range(10):
            start = time.perf_counter()
            program.call(a, a, out=out)
            spans.append((start, time.perf_counter()))
    finally:
        sys.setswitchinterval(interval)
        leave.set()
        thread.join()
    assert any(start < t < end for start, end in spans for t in ticks)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_number_of_threads_must_be_a_count(count: object) -> None:
    with pytest.raises(UserError, match=r"error\[TW016\]: the number of threads is"):
        cpu_pool.set_num_threads(count)  # type: ignore[arg-type]


def test_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_NUM_THREADS", "7")
    assert cpu_pool.available_threads() == 7
    monkeypatch.setenv("TILEWRIGHT_NUM_THREADS", "many")
    with pytest.raises(UserError, match="TILEWRIGHT_NUM_THREADS is 'many'"):
        cpu_pool.available_threads()
    monkeypatch.delenv("TILEWRIGHT_NUM_THREADS")
    if hasattr(os, "sched_getaffinity"):
        assert cpu_pool.available_threads() == len(os.sched_getaffinity(0))


def _script(body: str) -> subprocess.CompletedProcess[str]:
    head = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import numpy as np
    import cpu_kernels as kernels
    from tilewright.runtime.cpu import pool as cpu_pool
    program = kernels.make(kernels.ADD, kernels.add_artifact())
    a = np.ones(1 << 20, np.float32)
    """
    text = textwrap.dedent(head) + textwrap.dedent(body)
    env = {**os.environ, "TILEWRIGHT_NUM_THREADS": "3"}
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=600, env=env, check=False)


def test_exit_with_sleeping_and_busy_workers() -> None:
    """Leave with workers asleep, and with a daemon thread that never stops calling."""
    done = _script("""
    import threading, time
    program.call(a, a)
    def forever():
        while True:
            program.call(a, a)
    threading.Thread(target=forever, daemon=True).start()
    time.sleep(0.05)
    print(cpu_pool.pool().workers)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_calls_in_exit_handlers_and_fork_pools() -> None:
    done = _script("""
    import atexit, multiprocessing, warnings
    warnings.simplefilter("ignore")
    atexit.register(lambda: print(float(program.call(a, a).sum())))
    def work(i):
        return float(program.call(a[:i], a[:i]).sum())
    program.call(a, a)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(work, [1 << 20, 10, 1 << 19]))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2097152.0, 20.0, 1048576.0]\n2097152.0\n"


def test_code_of_the_pool_comes_with_the_first_large_call() -> None:
    done = _script("""
    print(float(program.call(a[:10], a[:10]).sum()), cpu_pool.pool()._loaded is None)
    print(float(program.call(a, a).sum()), cpu_pool.pool()._loaded is None, cpu_pool.pool().workers)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "20.0 True\n2097152.0 False 2\n", "")


def test_the_first_large_call_is_in_an_exit_handler() -> None:
    done = _script("""
    import atexit
    atexit.register(lambda: print(float(program.call(a, a).sum())))
    program.call(a[:10], a[:10])
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2097152.0\n", "")


def test_what_keeps_the_pool_from_coming_is_raised() -> None:
    done = _script("""
    def fail():
        raise RuntimeError("no code")
    build, cpu_pool.pool()._build = cpu_pool.pool()._build, fail
    try:
        program.call(a, a)
    except RuntimeError as error:
        print(error)
    cpu_pool.pool()._build = build
    print(float(program.call(a, a).sum()), cpu_pool.pool().workers)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "no code\n2097152.0 2\n", "")


def test_no_pool_code_is_our_mistake() -> None:
    text = """
    from tilewright.base.errors import CompilerBug
    from tilewright.runtime.cpu import pool as cpu_pool
    cpu_pool._code_source = None
    try:
        cpu_pool.pool()
    except CompilerBug as error:
        print(error.code)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, check=True)
    assert done.stdout == "TW040\n"


def test_patience_is_counted_in_microseconds(pool: cpu_pool.ThreadPool) -> None:
    """A look takes 18 ns on one processor and 1 on another: how many a worker takes follows from a measurement."""
    pool.threads = 2
    pool.start()
    assert pool._field(abi.POOL_SPIN).value == pool._looks > 1
    begun = time.perf_counter()
    pool.code.look(pool.address, pool._looks)
    assert time.perf_counter() - begun > cpu_pool.SPIN * 1e-6 / 20
