"""The CPU thread pool: one control block per process, daemon threads that stay in machine code, started at the first need.

In: the pool's object code (`provide_code`, from the code generator) and the wish for threads (`set_num_threads`,
`TILEWRIGHT_NUM_THREADS`, else the cores this process may use). Out: the symbols through which entry stubs run jobs, and
`launch` for everybody else. The code is loaded with the threads; what is there before, the starter, runs small jobs in their caller.

The control block stays where it is for the life of the process, since loaded stubs hold its address. A forked child has the
block but not the threads: it is cleared there and the workers start again at the first large call. At exit the workers are
asked to leave before the interpreter goes away. The caller of a job always works too, so `n` threads are `n - 1` workers.

A part of the cores (`partition`) has a pool of its own, whose threads stay on those cores; so does whoever calls it, meanwhile.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from tilewright.base import abi, environment
from tilewright.base.errors import CompilerBug, UserError
from tilewright.base.forks import fork_safe_lock
from tilewright.runtime.core.builtin import bind_python
from tilewright.runtime.core.objects import ObjectCode, bind_symbol
from tilewright.runtime.cpu import interrupts

SPIN = 200
"""Microseconds that a worker looks for the next job before it goes to sleep; `TILEWRIGHT_SPIN` changes it. To wake one takes 20 to 100: a call of 50 us takes
three times as long behind one that sleeps."""
_LOOKS = 2000
"""Looks until it is known how long one takes."""
_TIMED_LOOKS = 256

_ALIGN = 128
_JOIN_SECONDS = 5.0

_OneAddress = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Look = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)
_Launch = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_LaunchAll = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def most_threads() -> int:
    """How many threads may be asked for: far more than any kernel gains from, far fewer than a system breaks at."""
    return max(1024, 4 * (os.cpu_count() or 1))


def available_threads() -> int:
    """How many threads a job uses when nobody chose: the environment's number, else the cores this process may run on."""
    chosen = environment.whole("TILEWRIGHT_NUM_THREADS", most_threads())
    if chosen is not None:
        return chosen
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def usable_cores() -> tuple[int, ...]:
    """The cores this process may run on, as the system numbers them."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


class _PoolCode:
    """The pool's code, loaded."""

    def __init__(self, code: bytes) -> None:
        self.objects = ObjectCode(code)
        self.worker = _OneAddress(self.objects.address("tilewright_pool_worker"))
        self.initialise = _OneAddress(self.objects.address("tilewright_pool_init"))
        self.look = _Look(self.objects.address("tilewright_pool_look"))
        self.stop = _OneAddress(self.objects.address("tilewright_pool_stop"))
        self.launch = _Launch(self.objects.address("tilewright_launch_heard"))
        self.launch_all = _LaunchAll(self.objects.address("tilewright_launch_all_heard"))


class ThreadPool:
    """The control block, its code and its threads. With `cores`, they stay on those, and entry stubs know nothing of it."""

    def __init__(self, build: Callable[[], bytes], cores: tuple[int, ...] = (), starter: bytes = b"") -> None:
        """`build` gives the pool's code. `starter`: that of the object through which entry stubs come to this pool."""
        self.cores = cores
        self._build = build
        self._loaded: _PoolCode | None = None
        self._ready: _PoolCode | None = None
        self._memory = ctypes.create_string_buffer(abi.POOL_BYTES + _ALIGN)
        self.address = (ctypes.addressof(self._memory) + _ALIGN - 1) // _ALIGN * _ALIGN
        self._spin = environment.whole("TILEWRIGHT_SPIN", 2**31 - 1) or SPIN
        self._looks = _LOOKS
        self._threads: list[threading.Thread] = []
        self._lock = fork_safe_lock()
        self._loading = fork_safe_lock()
        self._wanted = len(cores) or _chosen or available_threads()
        self._prepare()
        self._start = self.start
        self._starter = self._provide(starter) if starter else None
        atexit.register(self._leave)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _provide(self, starter: bytes) -> ObjectCode:
        """Let entry stubs find this pool."""
        bind_python()
        bind_symbol("tilewright_start_workers", id(self._start))
        code = ObjectCode(starter)
        bind_symbol("tilewright_pool", self.address)
        for name in ("tilewright_pool_start", "tilewright_launch", "tilewright_interrupt_begin", "tilewright_interrupt_end"):
            bind_symbol(name, code.address(name))
        return code

    @property
    def code(self) -> _PoolCode:
        """The pool's functions, loaded when they are first asked for."""
        if self._ready is None:
            with self._loading:
                # Ctrl-C may end a try anywhere: what others may call already stays, and the next one goes on from there.
                if self._loaded is None:
                    interrupts.bind()
                    code = _PoolCode(self._build())
                    code.initialise(self.address)
                    self._loaded = code
                if self._ready is None:
                    self._connect(self._loaded.objects)
                    self._ready = self._loaded
        return self._ready

    def _connect(self, code: ObjectCode) -> None:
        """Let Ctrl-C and the starter find the pool's code."""
        if not self.cores:
            interrupts.provide(code)
        if self._starter is not None:
            functions = (ctypes.c_uint64 * 3).from_address(self._starter.data(abi.FUNCTIONS_OF_POOL))
            functions[:] = [code.address(name) for name in ("tilewright_pool_run", "tilewright_interrupt_begin", "tilewright_interrupt_end")]

    def _field(self, offset: int) -> ctypes.c_int32:
        return ctypes.c_int32.from_address(self.address + offset)

    def _prepare(self) -> None:
        ctypes.memset(self.address, 0, abi.POOL_BYTES)
        self._field(abi.POOL_SPIN).value = self._looks
        if self._loaded is not None:
            self._loaded.initialise(self.address)

    @property
    def threads(self) -> int:
        """Threads a job uses, the caller included."""
        return self._wanted

    @threads.setter
    def threads(self, count: int) -> None:
        with self._lock:
            if count != self._wanted:
                self._send_home()
                self._wanted = count

    @property
    def workers(self) -> int:
        """Worker threads that take part in jobs now; 0 before the first large job."""
        return self._field(abi.POOL_WORKERS).value

    def start(self) -> None:
        """Start the workers unless they run already."""
        with self._lock:
            if self._field(abi.POOL_STARTED).value:
                return
            code = self.code
            self._time_looks(code)
            # The workers of systems without a pool return at once; there is nothing to start.
            count = self._wanted - 1 if os.name == "posix" else 0
            # Ctrl-C may have ended an earlier try between two threads.
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            for number in range(len(self._threads), count):
                name = f"tilewright-{number + 1}"
                work = self._stay if self.cores else code.worker
                thread = threading.Thread(target=work, args=(self.address,), name=name, daemon=True)
                self._threads.append(thread)
                try:
                    thread.start()
                except RuntimeError:
                    # No more threads to be had (a limit, or the interpreter is leaving): go on with those there are.
                    self._threads.pop()
                    break
            self._field(abi.POOL_WORKERS).value = len(self._threads)
            self._field(abi.POOL_STARTED).value = 1

    def _time_looks(self, code: _PoolCode) -> None:
        """Find out how many looks a worker's patience is. The shortest of three: the system may interrupt one."""
        times: list[int] = []
        for _ in range(3):
            begun = time.perf_counter_ns()
            code.look(self.address, _TIMED_LOOKS)
            times.append(time.perf_counter_ns() - begun)
        self._looks = min(2**31 - 1, max(1, self._spin * 1000 * _TIMED_LOOKS // max(1, min(times))))
        self._field(abi.POOL_SPIN).value = self._looks

    def _stay(self, address: int) -> None:
        """A worker that keeps to the pool's cores."""
        with self._on_cores():
            self.code.worker(address)

    @contextmanager
    def _on_cores(self) -> Iterator[None]:
        """This thread runs on the pool's cores inside; where the system has no say in that, anywhere."""
        if not self.cores or not hasattr(os, "sched_setaffinity"):
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def launch(self, entry: int, slots: int, blocks: int, work: int) -> None:
        """Run `entry` over the blocks, `work` elements each, with the GIL released."""
        if not self._field(abi.POOL_STARTED).value:
            self.start()
        if not self.cores:
            interrupts.end_of_call(self.code.launch(self.address, entry, slots, blocks, work))
            return
        # All pools launch through the code of the first: Ctrl-C asks that one who is in a long call.
        code = pool().code
        with self._on_cores():
            interrupts.end_of_call(code.launch(self.address, entry, slots, blocks, work))

    def launch_all(self, jobs: int, count: int) -> None:
        """One launch after another, with the GIL released: `jobs` is the address of a table of entry, slots, blocks and work."""
        if not self._field(abi.POOL_STARTED).value:
            self.start()
        interrupts.end_of_call(self.code.launch_all(self.address, jobs, count))

    def _send_home(self) -> None:
        """Wait for the current job, ask the workers to leave and wait until they have. The next large job starts new ones."""
        if self._threads:
            self.code.stop(self.address)
            for thread in self._threads:
                thread.join(_JOIN_SECONDS)
            self._threads.clear()
        threads = [abi.POOL_THREADS + 4 * number for number in range(abi.POOL_STEERED)]
        for offset in (abi.POOL_WORKERS, abi.POOL_STOP, abi.POOL_READY, abi.POOL_STARTED, abi.POOL_AVOIDED, *threads):
            self._field(offset).value = 0

    def _leave(self) -> None:
        with self._lock:
            self._send_home()
            # What still runs after this runs alone.
            self._field(abi.POOL_STARTED).value = 1

    def _after_fork(self) -> None:
        self._lock, self._loading = fork_safe_lock(), fork_safe_lock()
        self._threads = []
        self._prepare()


_code_source: tuple[Callable[[], bytes], Callable[[], bytes]] | None = None
_pool: ThreadPool | None = None
_chosen: int | None = None
"""The number of threads that `set_num_threads` was given."""
_pool_lock = fork_safe_lock()


def provide_code(build: Callable[[], bytes], starter: Callable[[], bytes]) -> None:
    """Tell where the pool's object code comes from, which is built with the first large job, and the starter's, built when the first program is loaded."""
    global _code_source
    _code_source = build, starter


def pool() -> ThreadPool:
    """The process's pool; its threads start later."""
    global _pool
    if _pool is None:
        with _pool_lock:
            if _pool is None:
                if _code_source is None:
                    raise CompilerBug.at("TW040", "no code for the CPU thread pool was provided before loading a program")
                build, starter = _code_source
                _pool = ThreadPool(build, starter=starter())
    return _pool


_partitions: dict[tuple[int, int], ThreadPool] = {}


def partition_cores(index: int, count: int) -> tuple[int, ...]:
    """The cores of part `index` of `count`: neighbours, as many in each part as can be. Empty where there are not enough."""
    cores = usable_cores()
    return cores[len(cores) * index // count : len(cores) * (index + 1) // count]


def partition(index: int, count: int) -> ThreadPool:
    """The pool of part `index` of `count` of the cores; its threads start later."""
    pool()
    with _pool_lock:
        found = _partitions.get((index, count))
        if found is None:
            assert _code_source is not None
            found = _partitions[index, count] = ThreadPool(_code_source[0], partition_cores(index, count))
        return found


def set_num_threads(count: int) -> None:
    """Use `count` threads for large CPU kernels, the calling thread included."""
    global _chosen
    try:
        number = 0 if isinstance(count, (bool, np.bool_)) else operator.index(count)
    except TypeError:
        number = 0
    if not 1 <= number <= most_threads():
        shown = repr(count) if abs(number) < 10**18 else f"{'-' * (number < 0)}10**18 or more"
        raise UserError.at(
            "TW016", f"the number of threads is {shown if len(shown) <= 40 else shown[:40] + '…'}",
            help=f"give a whole number from 1 to {most_threads()}",
        )  # fmt: skip
    with _pool_lock:
        _chosen = number
        # Before the first program is loaded there is no pool; it is made with this number.
        if _pool is not None:
            _pool.threads = number


def get_num_threads() -> int:
    """How many threads large CPU kernels use, the calling thread included."""
    return _pool.threads if _pool is not None else _chosen or available_threads()
