"""The driver's contract as scenarios: calls and the status codes they give. The null driver and a real one must answer alike.

`run(module)` takes NVIDIA's bindings, or the null driver, and gives the answers by name; `EXPECTED` has them as an H200 gave them
(driver of CUDA 13.0), from `data/driver_answers.json`.
Each scenario leaves nothing behind. Nothing here ends a context.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry fill(.param .u64 out, .param .f32 value) {
    .reg .b64 %rd<2>; .reg .f32 %f<2>;
    ld.param.u64 %rd1, [out]; ld.param.f32 %f1, [value]; st.global.f32 [%rd1], %f1; ret;
}
.visible .entry add(.param .u64 out, .param .f32 value) {
    .reg .b64 %rd<2>; .reg .f32 %f<3>;
    ld.param.u64 %rd1, [out]; ld.param.f32 %f1, [value]; ld.global.f32 %f2, [%rd1]; add.f32 %f2, %f2, %f1; st.global.f32 [%rd1], %f2; ret;
}
.visible .entry few() .maxntid 64, 1, 1 { ret; }
.visible .entry exact() .reqntid 64, 1, 1 { ret; }
\0"""
Answers = dict[str, object]


class Calls:
    """The driver with results taken apart, and a context."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def code(self, name: str, *arguments: object) -> int:
        return int(getattr(self.module, name)(*arguments)[0])

    def get(self, name: str, *arguments: object) -> Any:
        status, *rest = getattr(self.module, name)(*arguments)
        assert int(status) == 0, f"{name}: {status!r}"
        return rest[0] if len(rest) == 1 else tuple(rest)

    def constant(self, enumeration: str, name: str) -> Any:
        return getattr(getattr(self.module, enumeration), name)

    def stream(self, blocking: bool = False) -> Any:
        return self.get("cuStreamCreate", 0 if blocking else 1)

    def event(self, flags: int = 2) -> Any:
        return self.get("cuEventCreate", flags)

    def mode(self, name: str = "GLOBAL") -> Any:
        return self.constant("CUstreamCaptureMode", f"CU_STREAM_CAPTURE_MODE_{name}")


class Table:
    """Parameters of `fill` and `add`, as a launch passes them."""

    def __init__(self, pointer: object, value: float) -> None:
        self.pointer, self.value = ctypes.c_uint64(int(pointer)), ctypes.c_float(value)  # type: ignore[call-overload]
        self.table = (ctypes.c_void_p * 2)(ctypes.addressof(self.pointer), ctypes.addressof(self.value))
        self.address = ctypes.addressof(self.table)


def read(api: Calls, pointer: object) -> float:
    value = ctypes.c_float()
    api.get("cuMemcpyDtoH", ctypes.addressof(value), pointer, 4)
    return value.value


def launch(api: Calls, function: object, stream: object = 0, table: Table | None = None, grid: tuple[int, int, int] = (1, 1, 1),
           block: tuple[int, int, int] = (1, 1, 1), shared: int = 0) -> int:  # fmt: skip
    return api.code("cuLaunchKernel", function, *grid, *block, shared, stream, table.address if table else 0, 0)


# -- scenarios ------------------------------------------------------------------------------------------------------


def devices(api: Calls, add: Callable[[str, object], None]) -> None:
    add("device out of range", api.code("cuDeviceGet", 99))
    api.get("cuCtxSetCurrent", 0)
    add("allocate without a context", api.code("cuMemAlloc", 16))
    add("pop an empty stack", api.code("cuCtxPopCurrent"))
    add("synchronise without a context", api.code("cuCtxSynchronize"))
    api.get("cuCtxSetCurrent", api.context)  # type: ignore[attr-defined]
    add("init with flags", api.code("cuInit", 1))


def memory(api: Calls, add: Callable[[str, object], None]) -> None:
    pointer = api.get("cuMemAlloc", 1024)
    host = (ctypes.c_char * 8192)()
    add("allocate nothing", api.code("cuMemAlloc", 0))
    add("allocate too much", api.code("cuMemAlloc", 1 << 50))
    add("aligned", int(pointer) % 256)
    add("copy in", api.code("cuMemcpyHtoD", pointer, ctypes.addressof(host), 1024))
    large = (ctypes.c_char * (64 << 20))()
    add("copy beyond the end", api.code("cuMemcpyHtoD", pointer, ctypes.addressof(large), len(large)))
    add("free inside", api.code("cuMemFree", int(pointer) + 256))
    add("free", api.code("cuMemFree", pointer))
    add("free twice", api.code("cuMemFree", pointer))
    add("free null", api.code("cuMemFree", 0))
    kind = api.constant("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_MEMORY_TYPE")
    add("attribute of pageable memory", api.code("cuPointerGetAttribute", kind, ctypes.addressof(host)))
    start = -(-ctypes.addressof(host) // 4096) * 4096
    add("register", api.code("cuMemHostRegister", start, 4096, 0))
    add("register twice", api.code("cuMemHostRegister", start, 4096, 0))
    add("memory type of registered", int(api.get("cuPointerGetAttribute", kind, start)))
    add("unregister", api.code("cuMemHostUnregister", start))
    add("unregister twice", api.code("cuMemHostUnregister", start))
    pinned = api.get("cuMemHostAlloc", 4096, 0)
    add("free pinned as device memory", api.code("cuMemFree", int(pinned)))
    add("free pinned", api.code("cuMemFreeHost", pinned))
    add("free pinned twice", api.code("cuMemFreeHost", pinned))
    add("managed without a side", api.code("cuMemAllocManaged", 4096, 0))
    managed = api.get("cuMemAllocManaged", 4096, 1)
    add("memory type of managed", int(api.get("cuPointerGetAttribute", kind, managed)))
    add("free managed", api.code("cuMemFree", managed))


def events(api: Calls, add: Callable[[str, object], None]) -> None:
    timed, other, plain = api.event(0), api.event(0), api.event(2)
    add("query an event never recorded", api.code("cuEventQuery", timed))
    add("synchronise an event never recorded", api.code("cuEventSynchronize", timed))
    add("wait for an event never recorded", api.code("cuStreamWaitEvent", 0, timed, 0))
    add("elapsed of events never recorded", api.code("cuEventElapsedTime", timed, other))
    for event in (timed, other, plain):
        api.get("cuEventRecord", event, 0)
    api.get("cuCtxSynchronize")
    add("query a past event", api.code("cuEventQuery", timed))
    add("elapsed", api.code("cuEventElapsedTime", timed, other))
    add("elapsed without timing", api.code("cuEventElapsedTime", timed, plain))
    add("event with unknown flags", api.code("cuEventCreate", 64))
    add("stream with unknown flags", api.code("cuStreamCreate", 64))
    add("query an idle stream", api.code("cuStreamQuery", 0))
    for event in (timed, other, plain):
        api.get("cuEventDestroy", event)


def modules(api: Calls, add: Callable[[str, object], None]) -> None:
    add("no PTX", api.code("cuModuleLoadDataEx", b"nonsense\0", 0, [], []))
    add("PTX of the future", api.code("cuModuleLoadDataEx", b".version 99.0\n.target sm_90\n\0", 0, [], []))
    add("PTX for another GPU", api.code("cuModuleLoadDataEx", b".version 8.6\n.target sm_100a\n.address_size 64\n.visible .entry a() { ret; }\0", 0, [], []))
    module = api.get("cuModuleLoadDataEx", PTX, 0, [], [])
    add("missing function", api.code("cuModuleGetFunction", module, b"nothing"))
    add("unload", api.code("cuModuleUnload", module))


def limits(api: Calls, add: Callable[[str, object], None]) -> None:
    module = api.get("cuModuleLoadDataEx", PTX, 0, [], [])
    few, exact = (api.get("cuModuleGetFunction", module, name) for name in (b"few", b"exact"))
    fill = api.get("cuModuleGetFunction", module, b"fill")
    pointer = api.get("cuMemAlloc", 64)
    table = Table(pointer, 1.0)
    cases: dict[str, Any] = {
        "empty grid": {"grid": (0, 1, 1)}, "empty block": {"block": (0, 1, 1)}, "wide block": {"block": (2048, 1, 1)},
        "large block": {"block": (1024, 2, 1)}, "deep block": {"block": (1, 1, 65)}, "tall grid": {"grid": (1, 65536, 1)},
        "deep grid": {"grid": (1, 1, 65536)}, "free shared memory": {"shared": 48 << 10}, "too much shared memory": {"shared": (48 << 10) + 16},
        "full block": {"block": (1024, 1, 1)},
    }  # fmt: skip
    for name, options in cases.items():
        add(name, launch(api, fill, 0, table, **options))
    add("within maxntid", launch(api, few, block=(64, 1, 1)))
    add("beyond maxntid", launch(api, few, block=(65, 1, 1)))
    add("as reqntid", launch(api, exact, block=(64, 1, 1)))
    add("not as reqntid", launch(api, exact, block=(32, 1, 1)))
    most = api.constant("CUfunction_attribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES")
    add("allow shared memory", api.code("cuFuncSetAttribute", fill, most, 227 << 10))
    add("use it", launch(api, fill, 0, table, shared=227 << 10))
    add("allow more than there is", api.code("cuFuncSetAttribute", fill, most, (227 << 10) + 16))
    threads = api.constant("CUfunction_attribute", "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK")
    add("set what cannot be set", api.code("cuFuncSetAttribute", fill, threads, 32))
    add("max threads of maxntid", int(api.get("cuFuncGetAttribute", threads, few)))
    for count, blocks in ((2, 4), (2, 5), (8, 8), (16, 16)):
        add(f"{blocks} blocks in clusters of {count}", clustered(api, fill, table, blocks, count))
    wide = api.constant("CUfunction_attribute", "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED")
    api.get("cuFuncSetAttribute", fill, wide, 1)
    add("clusters of 16 when allowed", clustered(api, fill, table, 16, 16))
    add("clusters of 32 when allowed", clustered(api, fill, table, 32, 32))
    add("cooperative", api.code("cuLaunchCooperativeKernel", fill, 4, 1, 1, 32, 1, 1, 0, 0, table.address))
    add("cooperative, too large", api.code("cuLaunchCooperativeKernel", fill, 1 << 20, 1, 1, 32, 1, 1, 0, 0, table.address))
    api.get("cuCtxSynchronize")
    add("written", read(api, pointer))
    api.get("cuMemFree", pointer)
    api.get("cuModuleUnload", module)


def clustered(api: Calls, function: object, table: Table, blocks: int, cluster: int) -> int:
    attribute = api.module.CUlaunchAttribute()
    attribute.id = api.constant("CUlaunchAttributeID", "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION")
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
    config = api.module.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.sharedMemBytes, config.hStream = 0, 0
    config.attrs, config.numAttrs = [attribute], 1
    return api.code("cuLaunchKernelEx", config, function, table.address, 0)


def captures(api: Calls, add: Callable[[str, object], None]) -> None:
    add("capture the default stream", api.code("cuStreamBeginCapture", 0, api.mode()))
    stream, other, blocking = api.stream(), api.stream(), api.stream(blocking=True)
    event, past = api.event(), api.event()
    module = api.get("cuModuleLoadDataEx", PTX, 0, [], [])
    fill = api.get("cuModuleGetFunction", module, b"fill")
    pointer = api.get("cuMemAlloc", 64)
    table = Table(pointer, 1.0)
    api.get("cuEventRecord", past, 0)
    host = (ctypes.c_char * 64)()
    add("end what did not begin", api.code("cuStreamEndCapture", stream))

    def during(name: str, action: Callable[[], int], mode: str = "GLOBAL", where: Any = None) -> None:
        captured = stream if where is None else where
        api.get("cuStreamBeginCapture", captured, api.mode(mode))
        launch(api, fill, captured, table)
        add(name, action())
        status, graph = api.module.cuStreamEndCapture(captured)[:2]
        add(f"{name}: end", int(status))
        if int(status) == 0:
            api.get("cuGraphDestroy", graph)

    def fork() -> int:
        api.get("cuEventRecord", event, stream)
        return api.code("cuStreamWaitEvent", other, event, 0)

    def fork_and_leave() -> int:
        fork()
        return launch(api, fill, other, table)

    def fork_and_join() -> int:
        fork_and_leave()
        api.get("cuEventRecord", event, other)
        return api.code("cuStreamWaitEvent", stream, event, 0)

    def end_elsewhere() -> int:
        fork()
        return api.code("cuStreamEndCapture", other)

    def recorded(name: str) -> int:
        api.get("cuEventRecord", event, stream)
        return api.code(name, event)

    def on_thread() -> int:
        codes: list[int] = []

        def work() -> None:
            api.get("cuCtxSetCurrent", api.context)  # type: ignore[attr-defined]
            codes.append(api.code("cuStreamEndCapture", stream))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return codes[0]

    def allocate() -> int:
        status, made = api.module.cuMemAlloc(16)[:2]
        if int(status) == 0:
            kept.append(made)
        return int(status)

    def registered() -> int:
        start = -(-ctypes.addressof(large) // 4096) * 4096
        api.code("cuMemHostRegister", start, 4096, 0)
        return start

    large = (ctypes.c_char * 8192)()
    most = api.constant("CUfunction_attribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES")
    kept: list[Any] = []
    during("launch", lambda: launch(api, fill, stream, table))
    during("begin twice", lambda: api.code("cuStreamBeginCapture", stream, api.mode()))
    during("allocate", allocate)
    during("allocate, relaxed", allocate, "RELAXED")
    during("allocate, thread local", allocate, "THREAD_LOCAL")
    during("synchronise the stream", lambda: api.code("cuStreamSynchronize", stream))
    during("query the stream", lambda: api.code("cuStreamQuery", stream))
    during("synchronise another stream", lambda: api.code("cuStreamSynchronize", other))
    during("synchronise the context", lambda: api.code("cuCtxSynchronize"))
    during("synchronise the context, relaxed", lambda: api.code("cuCtxSynchronize"), "RELAXED")
    during("copy at once", lambda: api.code("cuMemcpyHtoD", pointer, ctypes.addressof(host), 16))
    during("copy at once, relaxed", lambda: api.code("cuMemcpyHtoD", pointer, ctypes.addressof(host), 16), "RELAXED")
    during("copy from pageable memory", lambda: api.code("cuMemcpyHtoDAsync", pointer, ctypes.addressof(host), 16, stream))
    during("copy to pageable memory", lambda: api.code("cuMemcpyDtoHAsync", ctypes.addressof(host), pointer, 16, stream))
    during("launch on the default stream", lambda: launch(api, fill, 0, table))
    during("launch on the default stream, blocking", lambda: launch(api, fill, 0, table), where=blocking)
    during("query a captured event", lambda: recorded("cuEventQuery"))
    during("synchronise a captured event", lambda: recorded("cuEventSynchronize"))
    during("wait for an event from before", lambda: api.code("cuStreamWaitEvent", stream, past, 0))
    during("fork", fork)
    during("fork and leave", fork_and_leave)
    during("fork and join", fork_and_join)
    during("end elsewhere", end_elsewhere)
    during("end on another thread", on_thread)
    during("create a stream", lambda: api.code("cuStreamDestroy", api.stream()))
    during("free", lambda: api.code("cuMemFree", kept.pop()))
    during("allocate pinned", lambda: api.code("cuMemFreeHost", api.module.cuMemHostAlloc(16, 0)[1] or 0))
    during("register", lambda: api.code("cuMemHostUnregister", registered()))
    during("memory left", lambda: api.code("cuMemGetInfo"))
    during("set an attribute", lambda: api.code("cuFuncSetAttribute", fill, most, 64 << 10))
    during("load a module, global", lambda: api.code("cuModuleLoadDataEx", PTX, 0, [], []))
    during("create an event", lambda: api.code("cuEventDestroy", api.event()))
    during("load a module", lambda: api.code("cuModuleUnload", api.get("cuModuleLoadDataEx", PTX, 0, [], [])), "RELAXED")
    api.get("cuStreamBeginCapture", other, api.mode())
    during("merge", lambda: (api.get("cuEventRecord", event, other), api.code("cuStreamWaitEvent", stream, event, 0))[1])
    add("merge: end of the other", api.code("cuStreamEndCapture", other))
    add("wait for an event of an ended capture", api.code("cuStreamWaitEvent", stream, event, 0))
    for made in (*kept, pointer):
        api.get("cuMemFree", made)
    for made in (stream, other, blocking):
        api.get("cuStreamDestroy", made)
    for made in (event, past):
        api.get("cuEventDestroy", made)
    api.get("cuModuleUnload", module)


def graphs(api: Calls, add: Callable[[str, object], None]) -> None:
    module = api.get("cuModuleLoadDataEx", PTX, 0, [], [])
    fill, plus = (api.get("cuModuleGetFunction", module, name) for name in (b"fill", b"add"))
    stream, pointer = api.stream(), api.get("cuMemAlloc", 64)

    def captured(*launches: tuple[Any, float]) -> Any:
        api.get("cuStreamBeginCapture", stream, api.mode())
        for function, value in launches:
            table = Table(pointer, value)
            assert launch(api, function, stream, table) == 0
            table.value.value = -1.0
        return api.get("cuStreamEndCapture", stream)

    graph = captured((fill, 2.0), (plus, 3.0))
    executable = api.get("cuGraphInstantiate", graph, 0)
    nodes, count = api.get("cuGraphGetNodes", graph, 2)
    add("nodes", int(count))
    types = [int(api.get("cuGraphNodeGetType", node)) for node in nodes]
    add("types", types)

    def replay() -> float:
        api.get("cuGraphLaunch", executable, stream)
        api.get("cuStreamSynchronize", stream)
        return read(api, pointer)

    add("replay", replay())
    table = Table(pointer, 10.0)
    parameters = api.module.CUDA_KERNEL_NODE_PARAMS()
    parameters.func, parameters.sharedMemBytes, parameters.kernelParams = plus, 0, table.address
    parameters.gridDimX = parameters.gridDimY = parameters.gridDimZ = 1
    parameters.blockDimX = parameters.blockDimY = parameters.blockDimZ = 1
    last = next(node for node in nodes if int(api.get("cuGraphKernelNodeGetParams", node).func) == int(plus))
    add("set parameters", api.code("cuGraphExecKernelNodeSetParams", executable, last, parameters))
    add("replay with other parameters", replay())
    same, longer = captured((fill, 5.0), (plus, 6.0)), captured((fill, 5.0), (plus, 6.0), (plus, 7.0))
    add("update", api.code("cuGraphExecUpdate", executable, same))
    add("replay the update", replay())
    add("update with another shape", api.code("cuGraphExecUpdate", executable, longer))
    add("set parameters of a foreign node", api.code("cuGraphExecKernelNodeSetParams", executable, api.get("cuGraphGetNodes", longer, 3)[0][2], parameters))
    parameters.blockDimX = 4096
    add("set impossible parameters", api.code("cuGraphExecKernelNodeSetParams", executable, last, parameters))
    for made in (graph, same, longer):
        api.get("cuGraphDestroy", made)
    add("replay after the graph is gone", replay())
    api.get("cuGraphExecDestroy", executable)
    api.get("cuStreamDestroy", stream)
    api.get("cuMemFree", pointer)
    api.get("cuModuleUnload", module)


SCENARIOS = (devices, memory, events, modules, limits, captures, graphs)


def run(module: Any) -> Answers:
    """Every answer, by scenario and name. An exception is an answer too."""
    api = Calls(module)
    found: Answers = {}
    found["before init: count"] = api.code("cuDeviceGetCount")
    api.get("cuInit", 0)
    device = api.get("cuDeviceGet", 0)
    api.context = api.get("cuDevicePrimaryCtxRetain", device)  # type: ignore[attr-defined]
    api.get("cuCtxSetCurrent", api.context)  # type: ignore[attr-defined]
    for scenario in SCENARIOS:
        def add(name: str, value: object, within: str = scenario.__name__) -> None:
            found[f"{within}: {name}"] = value

        try:
            scenario(api, add)
        except Exception as error:
            add("ended by", f"{type(error).__name__}: {error}")
    api.get("cuDevicePrimaryCtxRelease", device)
    return found


EXPECTED: Answers = json.loads((Path(__file__).parent / "data" / "driver_answers.json").read_text())
