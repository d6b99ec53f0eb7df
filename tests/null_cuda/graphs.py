"""Captures and graphs. In: calls on a stream that captures; out: nodes with what they come after, and graphs that run them.

A capture belongs to the stream it began on; streams that wait for its events join it and must be joined back before it ends. What
a capture forbids spoils it: it can only be ended then, with an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

from null_cuda.execution import Event, ExecutionCalls
from null_cuda.programs import Config, Function, Parameters
from null_cuda.state import INVALID_HANDLE, INVALID_VALUE, Context, Handle, Refused, Stream

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
_ILLEGAL_STATE, _UNSUPPORTED, _INVALIDATED, _MERGE, _UNMATCHED, _UNJOINED, _IMPLICIT = 401, 900, 901, 902, 903, 904, 906
_WRONG_THREAD, _UPDATE_FAILURE = 908, 910
KERNEL, MEMCPY, MEMSET, HOST, CHILD, EMPTY = 0, 1, 2, 3, 4, 5


class Node(Handle):
    """One piece of work of a graph."""

    kind = "node"

    def __init__(self, number: int, graph: Graph, type_: int, name: str, body: Callable[[], None] | None, after: tuple[Node, ...]) -> None:
        super().__init__(None, number)
        self.graph, self.type, self.name, self.body, self.after = graph, type_, name, body, after
        self.function: Function | None = None
        self.config: Config | None = None
        self.parameters: Parameters | None = None


class Graph(Handle):
    kind = "graph"

    def __init__(self, number: int) -> None:
        super().__init__(None, number)
        self.nodes: list[Node] = []


class Step:
    """A node of an executable graph: a copy that can change."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.body, self.function, self.config, self.parameters = node.body, node.function, node.config, node.parameters


class Executable(Handle):
    kind = "executable graph"

    def __init__(self, context: Context, number: int, graph: Graph) -> None:
        super().__init__(context, number)
        self.steps = {node.number: Step(node) for node in graph.nodes}
        self.order = {node.number: tuple(before.number for before in node.after) for node in graph.nodes}
        self.last: object = None


class Capture:
    """A capture under way."""

    def __init__(self, graph: Graph, origin: Stream, mode: int, number: int) -> None:
        self.graph, self.origin, self.mode, self.number = graph, origin, mode, number
        self.thread = threading.get_ident()
        self.spoilt = False
        self.streams: list[Stream] = [origin]


class GraphCalls(ExecutionCalls):
    """Captures, graphs and what executes them."""

    def start_graphs(self) -> None:
        self.captures: list[Capture] = []

    # -- capture ------------------------------------------------------------------------------------------------

    def forbid_in_capture(self, context: Context) -> None:
        mine = getattr(self.thread, "capture_mode", GLOBAL)
        if mine == RELAXED:
            return
        for capture in self.captures:
            here = capture.thread == threading.get_ident()
            if capture.mode == RELAXED or (not here and (capture.mode == THREAD_LOCAL or mine == THREAD_LOCAL)):
                continue
            capture.spoilt = True
            raise Refused(_UNSUPPORTED)

    def spoil(self, stream: Stream) -> None:
        if isinstance(stream.capture, Capture):
            stream.capture.spoilt = True

    def spoil_capture(self, capture: object) -> None:
        if isinstance(capture, Capture):
            capture.spoilt = True

    def failing(self, name: str, arguments: tuple[object, ...]) -> None:
        super().failing(name, arguments)
        if name == "cuStreamEndCapture":
            # However it fails, the capture is over.
            found = self.handles.get(int(arguments[0] or 0))  # type: ignore[call-overload]
            if isinstance(found, Stream) and isinstance(found.capture, Capture):
                self._end(found.capture)

    def cuCtxSynchronize(self) -> None:
        if self.captures:
            for capture in self.captures:
                capture.spoilt = True
            raise Refused(_UNSUPPORTED)
        ExecutionCalls.cuCtxSynchronize(self)

    def _refuse_implicit_sync(self, stream: Stream) -> None:
        context = stream.context
        assert context is not None
        if stream is not context.default:
            return
        for other in context.streams.values():
            if other.blocking and isinstance(other.capture, Capture):
                other.capture.spoilt = True
                raise Refused(_IMPLICIT)

    def _live(self, stream: Stream) -> Capture:
        capture = stream.capture
        assert isinstance(capture, Capture)
        if capture.spoilt:
            raise Refused(_INVALIDATED)
        return capture

    def record(self, stream: Stream, name: str, body: Callable[[], None], wait: bool, host: bool) -> None:
        capture = self._live(stream)
        if wait:
            capture.spoilt = True
            raise Refused(_UNSUPPORTED)
        type_ = HOST if host else MEMSET if name.startswith("cuMemset") else CHILD if name == "cuGraphLaunch" else MEMCPY
        self._record(stream, capture, self._node(capture.graph, type_, name, body, stream.last_nodes))

    def record_kernel(self, stream: Stream, function: Function, config: Config, parameters: Parameters) -> None:
        capture = self._live(stream)
        node = self._node(capture.graph, KERNEL, function.entry.name, None, stream.last_nodes)
        node.function, node.config, node.parameters = function, config, parameters
        self._record(stream, capture, node)

    def _record(self, stream: Stream, capture: Capture, node: Node) -> None:
        capture.graph.nodes.append(node)
        stream.last_nodes = (node,)

    def _node(self, graph: Graph, type_: int, name: str, body: Callable[[], None] | None, after: tuple[object, ...]) -> Node:
        before = tuple(node for node in after if isinstance(node, Node))
        return self.keep(Node(self.new_number(), graph, type_, name, body, before))

    def join_capture(self, stream: Stream, event: Event) -> None:
        capture = event.captured
        assert isinstance(capture, Capture)
        context = stream.context
        assert context is not None
        if capture not in self.captures:
            self.spoil(stream)
            raise Refused(INVALID_VALUE)
        if capture.spoilt:
            raise Refused(_INVALIDATED)
        if stream.capture is capture:
            stream.last_nodes = tuple(dict.fromkeys((*stream.last_nodes, *event.nodes)))
            return
        if stream.capture is not None:
            self.spoil(stream)
            capture.spoilt = True
            raise Refused(_MERGE)
        if stream is context.default:
            capture.spoilt = True
            raise Refused(_IMPLICIT)
        stream.capture, stream.last_nodes = capture, event.nodes
        capture.streams.append(stream)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> None:
        found = self.stream(stream)
        assert found.context is not None
        if int(mode) not in (GLOBAL, THREAD_LOCAL, RELAXED):
            raise Refused(INVALID_VALUE)
        if found is found.context.default:
            raise Refused(_UNSUPPORTED)
        if found.capture is not None:
            raise Refused(_ILLEGAL_STATE)
        capture = Capture(Graph(self.new_number()), found, int(mode), len(self.captures) + 1 + self.counts["cuStreamBeginCapture"])
        found.capture, found.last_nodes = capture, ()
        self.captures.append(capture)

    def cuStreamEndCapture(self, stream: int) -> int:
        found = self.stream(stream)
        capture = found.capture
        if not isinstance(capture, Capture):
            raise Refused(_ILLEGAL_STATE)
        if capture.mode != RELAXED and capture.thread != threading.get_ident():
            self._end(capture)
            raise Refused(_WRONG_THREAD)
        if capture.origin is not found:
            capture.spoilt = True
            raise Refused(_UNMATCHED)
        joined, reached = set(found.last_nodes), list(found.last_nodes)
        while reached:
            node = reached.pop()
            assert isinstance(node, Node)
            fresh = set(node.after) - joined
            joined |= fresh
            reached.extend(fresh)
        loose = any(set(other.last_nodes) - joined for other in capture.streams)
        if capture.spoilt or loose:
            self._end(capture)
            raise Refused(_INVALIDATED if capture.spoilt else _UNJOINED)
        self._leave(capture)
        return self.keep(capture.graph).number

    def _leave(self, capture: Capture) -> None:
        for stream in capture.streams:
            stream.capture, stream.last_nodes = None, ()
        self.captures.remove(capture)

    def _end(self, capture: Capture) -> None:
        """The capture ends without a graph."""
        self._leave(capture)
        for node in capture.graph.nodes:
            self.drop(node)

    def cuStreamIsCapturing(self, stream: int) -> int:
        found = self.stream(stream)
        self._refuse_implicit_sync(found)
        capture = found.capture
        status = 0 if not isinstance(capture, Capture) else 2 if capture.spoilt else 1
        return self.CUstreamCaptureStatus(status)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[object, ...]:
        found = self.stream(stream)
        capture = found.capture
        if not isinstance(capture, Capture):
            return self.CUstreamCaptureStatus(0), 0, None, None, None, 0
        nodes = [node.number for node in found.last_nodes if isinstance(node, Node)]
        status = self.CUstreamCaptureStatus(2 if capture.spoilt else 1)
        return status, capture.number, capture.graph.number, nodes, None, len(nodes)

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> int:
        before = getattr(self.thread, "capture_mode", GLOBAL)
        self.thread.capture_mode = int(mode)
        return self.CUstreamCaptureMode(before)

    # -- graphs -------------------------------------------------------------------------------------------------

    def cuGraphCreate(self, flags: int) -> int:
        return self.keep(Graph(self.new_number())).number

    def cuGraphDestroy(self, graph: int) -> None:
        found = self.find(Graph, graph)
        for node in found.nodes:
            self.drop(node)
        self.drop(found)

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[list[int], int]:
        nodes = [node.number for node in self.find(Graph, graph).nodes]
        return (nodes[:count], len(nodes)) if count else ([], len(nodes))

    def cuGraphNodeGetType(self, node: int) -> int:
        return self.CUgraphNodeType(self.find(Node, node).type)

    def cuGraphNodeGetDependencies(self, node: int, count: int = 0) -> tuple[list[int], object, int]:
        before = [other.number for other in self.find(Node, node).after]
        return (before[:count], None, len(before)) if count else ([], None, len(before))

    def cuGraphGetEdges(self, graph: int, count: int = 0) -> tuple[list[int], list[int], object, int]:
        edges = [(before.number, node.number) for node in self.find(Graph, graph).nodes for before in node.after]
        kept = edges[:count]
        return [a for a, _ in kept], [b for _, b in kept], None, len(edges)

    def CUDA_KERNEL_NODE_PARAMS(self) -> SimpleNamespace:
        return SimpleNamespace(
            func=0, gridDimX=0, gridDimY=0, gridDimZ=0, blockDimX=0, blockDimY=0, blockDimZ=0, sharedMemBytes=0, kernelParams=0, extra=0,
            kern=None, ctx=None,
        )  # fmt: skip

    def cuGraphKernelNodeGetParams(self, node: int) -> SimpleNamespace:
        found = self._kernel_node(node)
        assert found.config is not None
        assert found.function is not None
        assert found.parameters is not None
        made = GraphCalls.CUDA_KERNEL_NODE_PARAMS(self)
        made.func, made.sharedMemBytes, made.kernelParams = found.function.number, found.config.shared, found.parameters.table
        made.gridDimX, made.gridDimY, made.gridDimZ = found.config.grid
        made.blockDimX, made.blockDimY, made.blockDimZ = found.config.block
        return made

    def _kernel_node(self, node: int) -> Node:
        found = self.find(Node, node)
        if found.type != KERNEL:
            raise Refused(INVALID_VALUE, f"{found!r} is no kernel node")
        return found

    def _read_node(self, given: SimpleNamespace, old: Config | None) -> tuple[Function, Config, Parameters]:
        function = self.find(Function, given.func)
        grid, block = (given.gridDimX, given.gridDimY, given.gridDimZ), (given.blockDimX, given.blockDimY, given.blockDimZ)
        base = old or Config(grid, block, 0, 0)
        config = Config(grid, block, given.sharedMemBytes, 0, base.cluster, base.cooperative, base.dependent)
        self.check_launch(function, config)
        return function, config, Parameters(int(given.kernelParams or 0), function.entry.sizes or ())

    def cuGraphAddKernelNode(self, graph: int, after: list[int] | None, count: int, given: SimpleNamespace) -> int:
        found = self.find(Graph, graph)
        before = tuple(self.find(Node, number) for number in (after or [])[:count])
        parts = self._read_node(given, None)
        node = self._node(found, KERNEL, parts[0].entry.name, None, before)
        node.function, node.config, node.parameters = parts
        found.nodes.append(node)
        return node.number

    def cuGraphKernelNodeSetParams(self, node: int, given: SimpleNamespace) -> None:
        found = self._kernel_node(node)
        found.function, found.config, found.parameters = self._read_node(given, found.config)

    def cuGraphInstantiate(self, graph: int, flags: int) -> int:
        return self.keep(Executable(self.current(), self.new_number(), self.find(Graph, graph))).number

    def cuGraphInstantiateWithFlags(self, graph: int, flags: int) -> int:
        return GraphCalls.cuGraphInstantiate(self, graph, flags)

    def cuGraphExecDestroy(self, executable: int) -> None:
        self.drop(self.find(Executable, executable))

    def cuGraphUpload(self, executable: int, stream: int) -> None:
        self.find(Executable, executable)
        self.stream(stream)

    def cuGraphExecKernelNodeSetParams(self, executable: int, node: int, given: SimpleNamespace) -> None:
        found = self.find(Executable, executable)
        step = found.steps.get(self._kernel_node(node).number)
        if step is None:
            raise Refused(INVALID_VALUE, f"the node {int(node):#x} is not of this graph")
        function, config, parameters = self._read_node(given, step.config)
        if step.function is not None and function.context is not step.function.context:
            raise Refused(INVALID_VALUE)
        step.function, step.config, step.parameters = function, config, parameters

    def cuGraphExecUpdate(self, executable: int, graph: int) -> object:
        found, new = self.find(Executable, executable), self.find(Graph, graph)
        info = SimpleNamespace(result=self.CUgraphExecUpdateResult(0), errorNode=None, errorFromNode=None)
        old = list(found.steps.values())
        place = {node.number: index for index, node in enumerate(new.nodes)}
        old_place = {number: index for index, number in enumerate(found.steps)}
        wanted = [(node.type, sorted(place[b.number] for b in node.after)) for node in new.nodes]
        had = [(step.node.type, sorted(old_place[b] for b in found.order[step.node.number])) for step in old]
        if wanted != had:
            kinds = [kind for kind, _ in wanted] == [kind for kind, _ in had]
            info.result = self.CUgraphExecUpdateResult(2 if kinds or len(wanted) != len(had) else 3)
            self.last_update = info
            raise Refused(_UPDATE_FAILURE)
        for step, node in zip(old, new.nodes, strict=True):
            step.body, step.function, step.config, step.parameters = node.body, node.function, node.config, node.parameters
        return info

    def cuGraphLaunch(self, executable: int, stream: int) -> None:
        found, queue = self.find(Executable, executable), self.stream(stream)
        if found.context is not queue.context:
            raise Refused(INVALID_HANDLE, f"{found!r} belongs to another context than the stream")
        steps = [(number, step.body, step.function, step.config, step.parameters) for number, step in found.steps.items()]
        order = dict(found.order)

        def body() -> None:
            done: set[int] = set()
            left = list(steps)
            while left:
                ready = [step for step in left if all(before in done for before in order[step[0]])]
                step = ready[-1] if self.queue.mode == "reverse" else self.queue.random.choice(ready) if self.queue.mode == "random" else ready[0]
                left.remove(step)
                number, work, function, config, parameters = step
                if function is not None and config is not None and parameters is not None:
                    self.execute(function, config, parameters)
                elif work is not None:
                    work()
                done.add(number)

        self.enqueue(queue, "cuGraphLaunch", body)
