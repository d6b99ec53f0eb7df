"""Streams, events and launches. In: driver calls; out: ops in the queue, or nodes of a graph while a stream captures.

An op comes after its stream's last one. The default stream waits for all blocking streams and they for it; a non-blocking stream
waits for nobody but the events it was told to. A fault of an op ends its context: nothing of it runs any more, and every later
call gives the fault's code.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable

from null_cuda.memory import MemoryCalls
from null_cuda.programs import (
    BAD_CLUSTER,
    INVALID_PTX,
    ISA,
    UNSUPPORTED_PTX,
    Config,
    Entry,
    Function,
    LaunchConfig,
    Module,
    Parameters,
    read_config,
)  # fmt: skip
from null_cuda.state import INVALID_HANDLE, INVALID_VALUE, NOT_READY, Context, Fault, Handle, Refused, Stream
from null_cuda.work import Op

Kernel = Callable[[int, tuple[int, int, int]], None]
"""Gets the address of the table of parameter pointers, and the grid."""
Executor = Callable[["Function", Config, Parameters], bool]
"""Runs a kernel if it knows it; whether it did."""
LAUNCH_FAILED = 719
_INVALID_IMAGE = 200
_COOPERATIVE_TOO_LARGE, _NOT_FOUND, _OUT_OF_RESOURCES = 720, 500, 701
_GRID, _BLOCK, _THREADS = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024
SHARED, SHARED_OPTIN = 48 << 10, 227 << 10


class Event(Handle):
    kind = "event"

    def __init__(self, context: Context, number: int, timed: bool) -> None:
        super().__init__(context, number)
        self.timed = timed
        self.op: Op | None = None
        self.captured: object = None
        """The capture it was last recorded in, and the nodes that were last then."""
        self.nodes: tuple[object, ...] = ()


class ExecutionCalls(MemoryCalls):
    """Streams, events, host functions, modules and launches."""

    def start_execution(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.executors: list[Executor] = []
        self.durations: dict[str, float] = {}
        """Milliseconds a kernel takes, by entry."""
        self.kernel_errors: list[BaseException] = []
        self.ptx_log = b""
        self.function_attributes = {
            "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 1024, "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 0, "CU_FUNC_ATTRIBUTE_NUM_REGS": 32,
            "CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES": 0, "CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES": 0,
        }  # fmt: skip

    # -- queueing -----------------------------------------------------------------------------------------------

    def enqueue(self, stream: Stream, name: str, body: Callable[[], None], wait: bool = False, host: bool = False) -> None:
        """Queue work on a stream, or record it; `wait`: the call returns when it is done."""
        if stream.capture is not None:
            self.record(stream, name, body, wait, host)
            return
        self._refuse_implicit_sync(stream)
        self._add(stream, name, body, (), host)
        if wait:
            self._finish(stream.context, [stream.tail])

    def _add(self, stream: Stream, name: str, body: Callable[[], None], after: tuple[Op | None, ...] = (), host: bool = False) -> Op:
        context = stream.context
        assert context is not None
        if stream is context.default:
            after = (*after, *(s.tail for s in context.streams.values() if s.blocking))
        elif stream.blocking:
            after = (*after, context.default.tail)
        op = stream.tail = Op(name, lambda: self._perform(context, body), (*after, stream.tail), host)
        op.context = context.number
        self.queue.add(op)
        return op

    def _perform(self, context: Context, body: Callable[[], None]) -> None:
        if context.error:
            return
        try:
            body()
        except Fault as fault:
            context.error = fault.code
        except Exception as error:
            traceback.print_exception(error)
            self.kernel_errors.append(error)
            context.error = LAUNCH_FAILED

    def _finish(self, context: Context | None, ops: list[Op | None]) -> None:
        self.queue.finish(ops)
        if context is not None and context.error:
            raise Refused(context.error)

    def record(self, stream: Stream, name: str, body: Callable[[], None], wait: bool, host: bool) -> None:
        raise NotImplementedError

    def _refuse_implicit_sync(self, stream: Stream) -> None:
        raise NotImplementedError

    def _before(self, stream: Stream) -> list[Op | None]:
        context = stream.context
        assert context is not None
        if stream is not context.default:
            return [stream.tail]
        return [stream.tail, *(s.tail for s in context.streams.values() if s.blocking)]

    def cuCtxSynchronize(self) -> None:
        context = self.current()
        self._finish(context, [op for op in self.queue.pending if op.context == context.number])

    # -- streams ------------------------------------------------------------------------------------------------

    def cuStreamCreate(self, flags: int) -> int:
        return ExecutionCalls.cuStreamCreateWithPriority(self, flags, 0)

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> int:
        if int(flags) not in (0, 1):
            raise Refused(INVALID_VALUE)
        context = self.current()
        made = self.keep(Stream(context, self.new_number(), int(flags) == 0, max(-5, min(0, int(priority)))))
        context.streams[made.number] = made
        return made.number

    def cuStreamDestroy(self, stream: int) -> None:
        found = self.find(Stream, stream)
        if found.capture is not None:
            self.spoil(found)
            raise Refused(900)
        self.drop(found)
        assert found.context is not None
        if found.tail is None or found.tail.state == "done":
            del found.context.streams[found.number]
        # A blocking stream's queued work is still ordered with the default stream; it stays listed until that is done.

    def cuStreamSynchronize(self, stream: int) -> None:
        found = self.stream(stream)
        if found.capture is not None:
            self.spoil(found)
            raise Refused(900)
        self._finish(found.context, self._before(found))

    def cuStreamQuery(self, stream: int) -> None:
        found = self.stream(stream)
        if found.capture is not None:
            self.spoil(found)
            raise Refused(900)
        for op in self._before(found):
            if op is not None and op.state != "done":
                if self.queue.mode != "background":
                    self.queue.step(op)
                raise Refused(NOT_READY)
        if found.context is not None and found.context.error:
            raise Refused(found.context.error)

    def cuStreamGetFlags(self, stream: int) -> int:
        return 0 if self.stream(stream).blocking else 1

    def cuStreamGetPriority(self, stream: int) -> int:
        return self.stream(stream).priority

    def cuStreamGetCtx(self, stream: int) -> int:
        context = self.stream(stream).context
        assert context is not None
        return context.number

    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        return 0, -5

    def cuLaunchHostFunc(self, stream: int, function: object, data: object) -> None:
        """`function` is a C function's address (or an object that holds one), as in the bindings."""
        address, argument = int(function), int(data or 0)  # type: ignore[call-overload]
        native = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        self.enqueue(self.stream(stream), "cuLaunchHostFunc", lambda: native(argument), host=True)

    def spoil(self, stream: Stream) -> None:
        """The stream's capture is no longer valid."""

    def spoil_capture(self, capture: object) -> None:
        """This capture is no longer valid."""

    # -- events -------------------------------------------------------------------------------------------------

    def cuEventCreate(self, flags: int) -> int:
        if int(flags) & ~7 or (int(flags) & 4 and not int(flags) & 2):
            raise Refused(INVALID_VALUE)
        return self.keep(Event(self.current(), self.new_number(), not int(flags) & 2)).number

    def cuEventDestroy(self, event: int) -> None:
        self.drop(self.find(Event, event))

    def cuEventRecord(self, event: int, stream: int) -> None:
        found, queue = self.find(Event, event), self.stream(stream)
        if found.context is not queue.context:
            raise Refused(INVALID_HANDLE, f"{found!r} and the stream belong to different contexts")
        if queue.capture is not None:
            found.captured, found.nodes, found.op = queue.capture, queue.last_nodes, None
            return
        self._refuse_implicit_sync(queue)

        def body() -> None:
            self.queue.now += 0.25

        found.captured = None
        found.op = self._add(queue, "cuEventRecord", body)

    def cuEventRecordWithFlags(self, event: int, stream: int, flags: int) -> None:
        ExecutionCalls.cuEventRecord(self, event, stream)

    def _settled(self, event: Event) -> Op | None:
        if event.captured is not None:
            self.spoil_capture(event.captured)
            raise Refused(907)
        return event.op

    def cuEventQuery(self, event: int) -> None:
        found = self.find(Event, event)
        op = self._settled(found)
        if op is not None and op.state != "done":
            if self.queue.mode != "background":
                self.queue.step(op)
            raise Refused(NOT_READY)

    def cuEventSynchronize(self, event: int) -> None:
        found = self.find(Event, event)
        self._finish(found.context, [self._settled(found)])

    def cuEventElapsedTime(self, start: int, stop: int) -> float:
        first, last = self.find(Event, start), self.find(Event, stop)
        ops = [self._settled(event) for event in (first, last)]
        if not (first.timed and last.timed) or None in ops:
            raise Refused(INVALID_HANDLE, "an event without a time: not recorded, or made without timing")
        if any(op is not None and op.state != "done" for op in ops):
            raise Refused(NOT_READY)
        assert ops[0] is not None
        assert ops[1] is not None
        return ops[1].finished_at - ops[0].finished_at

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        queue, found = self.stream(stream), self.find(Event, event)
        if int(flags) not in (0, 1):
            raise Refused(INVALID_VALUE)
        if found.captured is not None:
            self.join_capture(queue, found)
            return
        if queue.capture is not None:
            if found.op is not None:
                self.spoil(queue)
                raise Refused(905)
            return
        if found.op is not None:
            self._refuse_implicit_sync(queue)
            self._add(queue, "cuStreamWaitEvent", lambda: None, (found.op,))

    def join_capture(self, stream: Stream, event: Event) -> None:
        raise NotImplementedError

    # -- modules ------------------------------------------------------------------------------------------------

    def failing(self, name: str, arguments: tuple[object, ...]) -> None:
        if name == "cuModuleLoadDataEx":
            self._tell(arguments[3], self.ptx_log)

    def _tell(self, values: object, text: bytes) -> None:
        for value in values if isinstance(values, list) else ():
            if isinstance(value, bytearray):
                value[: len(text)] = text

    def cuModuleLoadDataEx(self, image: bytes, count: int, options: list[int], values: list[object]) -> int:
        assert len(options) == len(values) == count
        return self._load(image, values)

    def cuModuleLoadData(self, image: bytes) -> int:
        return self._load(image, [])

    def _load(self, image: bytes, values: list[object]) -> int:
        assert image.endswith(b"\0"), "an image that does not end is read beyond its end"
        ptx = image.rstrip(b"\0").decode()
        self._check_ptx(ptx, values)
        try:
            module = Module(self.current(), self.new_number(), ptx)
        except Refused as refused:
            self._tell(values, refused.why.encode())
            raise
        for variable in module.variables.values():
            self.adopt(ctypes.addressof(variable), len(variable), self.current().ordinal)
        return self.keep(module).number

    def _check_ptx(self, ptx: str, values: list[object]) -> None:
        words = ptx.replace(",", " ").split()
        if ".version" not in words:
            raise Refused(_INVALID_IMAGE)
        wanted = tuple(int(n) for n in words[words.index(".version") + 1].split("."))
        newest = max(isa for driver, isa in ISA.items() if driver <= (self.version // 1000, self.version % 1000 // 10))
        if wanted > newest:
            text = f"ptxas application ptx input, line 1; fatal   : Unsupported .version {wanted[0]}.{wanted[1]}; current version is '{newest[0]}.{newest[1]}'"
            self._tell(values, text.encode())
            raise Refused(UNSUPPORTED_PTX)
        if ".target" in words:
            target = words[words.index(".target") + 1].removeprefix("sm_")
            number, exact = int(target.rstrip("af")), target.endswith("a")
            own = self.capability[0] * 10 + self.capability[1]
            if number > own or (exact and number != own):
                raise Refused(INVALID_PTX)

    def cuModuleUnload(self, module: int) -> None:
        found = self.find(Module, module)
        for function in found.functions.values():
            self.drop(function)
        for variable in found.variables.values():
            self.disown(ctypes.addressof(variable))
        self.drop(found)

    def cuModuleGetFunction(self, module: int, name: bytes) -> int:
        found = self.find(Module, module)
        text = name.decode()
        if text not in found.functions:
            entry = found.entries.get(text)
            if entry is None and found.entries:
                raise Refused(_NOT_FOUND)
            found.functions[text] = self.keep(Function(found, self.new_number(), entry or Entry(text, None)))
        return found.functions[text].number

    def cuModuleGetGlobal(self, module: int, name: bytes) -> tuple[int, int]:
        variable = self.find(Module, module).variables.get(name.decode())
        if variable is None:
            raise Refused(_NOT_FOUND)
        return ctypes.addressof(variable), len(variable)

    def _attribute(self, function: Function, name: str) -> int:
        if name in function.allowed:
            return function.allowed[name]
        bound = function.entry.bounds.get("maxntid") or function.entry.bounds.get("reqntid")
        if name == "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK" and bound:
            return min(bound, self.function_attributes[name])
        if name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES":
            return SHARED - self.function_attributes["CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"]
        if name == "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED":
            return 0
        if name not in self.function_attributes:
            raise Refused(INVALID_VALUE)
        return self.function_attributes[name]

    def cuFuncGetAttribute(self, attribute: int, function: int) -> int:
        return self._attribute(self.find(Function, function), self.CUfunction_attribute(attribute).name)

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        found, name = self.find(Function, function), self.CUfunction_attribute(attribute).name
        static = self.function_attributes["CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"]
        if name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES" and not 0 <= value + static <= SHARED_OPTIN:
            raise Refused(INVALID_VALUE)
        if name in ("CU_FUNC_ATTRIBUTE_NUM_REGS", "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES", "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK"):
            raise Refused(INVALID_VALUE)
        found.allowed[name] = value

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> int:
        return self._occupancy(self.find(Function, function), threads, shared)

    def cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(self, function: int, threads: int, shared: int, flags: int) -> int:
        return self._occupancy(self.find(Function, function), threads, shared)

    def _occupancy(self, function: Function, threads: int, shared: int) -> int:
        if threads <= 0:
            raise Refused(INVALID_VALUE)
        registers = self._attribute(function, "CU_FUNC_ATTRIBUTE_NUM_REGS")
        static = self._attribute(function, "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES")
        blocks = min(32, 2048 // threads, 65536 // max(1, registers * threads))
        return min(blocks, (228 << 10) // (shared + static + 1024)) if threads <= _THREADS else 0

    # -- launches -----------------------------------------------------------------------------------------------

    def cuLaunchKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int, parameters: int, extra: int
    ) -> None:
        self.launch(function, Config((gx, gy, gz), (bx, by, bz), shared, int(stream or 0)), parameters, extra)

    def cuLaunchCooperativeKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int, parameters: int
    ) -> None:
        self.launch(function, Config((gx, gy, gz), (bx, by, bz), shared, int(stream or 0), cooperative=True), parameters, 0)

    def cuLaunchKernelEx(self, config: LaunchConfig | int, function: int, parameters: int, extra: int) -> None:
        """`config` is an object as the bindings have it, or, called natively, an address."""
        self.launch(function, read_config(config) if isinstance(config, int) else config.read(), parameters, extra)

    def CUlaunchConfig(self) -> LaunchConfig:
        return LaunchConfig()

    def launch(self, function: int, config: Config, parameters: int, extra: int = 0) -> None:
        found, stream = self.find(Function, function), self.stream(config.stream)
        if extra:
            raise Refused(INVALID_VALUE, "the null driver takes parameters as a table only")
        self.check_launch(found, config)
        if found.entry.sizes is None:
            self._launch_unknown(found, config, stream, int(parameters or 0))
            return
        copied = Parameters(int(parameters or 0), found.entry.sizes)
        if stream.capture is not None:
            self.record_kernel(stream, found, config, copied)
            return
        self.enqueue(stream, found.entry.name, lambda: self.execute(found, config, copied))

    def _launch_unknown(self, function: Function, config: Config, stream: Stream, table: int) -> None:
        name = function.entry.name
        kernel = self.kernels.get(name)

        def body() -> None:
            self.queue.now += self.durations.get(name, 0.0)
            if kernel is not None:
                kernel(table, config.grid)

        self.enqueue(stream, name, body)
        if stream.capture is None:
            self.queue.finish([stream.tail])

    def record_kernel(self, stream: Stream, function: Function, config: Config, parameters: Parameters) -> None:
        raise NotImplementedError

    def execute(self, function: Function, config: Config, parameters: Parameters) -> None:
        """Run a kernel on the device."""
        name = function.entry.name
        self.queue.now += self.durations.get(name, 0.0)
        kernel = self.kernels.get(name)
        if kernel is not None:
            kernel(parameters.table, config.grid)
            return
        for executor in self.executors:
            if executor(function, config, parameters):
                return

    def check_launch(self, function: Function, config: Config) -> None:
        """Refuse what the hardware cannot run."""
        if function.context is not self.current():
            raise Refused(INVALID_HANDLE, f"kernel '{function.entry.name}' belongs to another context than the current one")
        threads = config.block[0] * config.block[1] * config.block[2]
        fits = all(1 <= n <= most for n, most in zip((*config.grid, *config.block), (*_GRID, *_BLOCK), strict=True))
        if not fits or threads > _THREADS:
            raise Refused(INVALID_VALUE)
        bounds = function.entry.bounds
        if threads != bounds.get("reqntid", threads) or threads > bounds.get("maxntid", threads):
            raise Refused(INVALID_VALUE)
        if threads > self._attribute(function, "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK"):
            raise Refused(_OUT_OF_RESOURCES)
        if config.shared > self._attribute(function, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"):
            raise Refused(INVALID_VALUE)
        cluster = max(config.cluster, bounds.get("reqnctapercluster", 1))
        most = 16 if self._attribute(function, "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED") else 8
        if cluster > most:
            raise Refused(BAD_CLUSTER)
        if config.grid[0] * config.grid[1] * config.grid[2] % cluster:
            raise Refused(BAD_CLUSTER)
        if config.cooperative:
            room = self._occupancy(function, threads, config.shared) * self.multiprocessors
            if config.grid[0] * config.grid[1] * config.grid[2] > room:
                raise Refused(_COOPERATIVE_TOO_LARGE)
