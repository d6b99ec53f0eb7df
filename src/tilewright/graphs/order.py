"""The order in which the nodes of a graph run.

In: a graph. Out: the nodes that its outputs and caches need, sorted so that inputs come first, in the order of building where that is free. A node
that writes a cache comes after those that read it as it was before.
"""

from __future__ import annotations

import heapq

from tilewright.base.errors import UserError
from tilewright.graphs.builder import GraphBuilder
from tilewright.graphs.ops.table import op_record
from tilewright.graphs.tensor import GraphNode, Tensor


def inputs_of(graph: GraphBuilder, node: GraphNode) -> list[Tensor]:
    """The tensors that a node reads."""
    return [graph.settled(node, v) if isinstance(v, str) else v for v in node.inputs.values() if isinstance(v, str | Tensor)]


def ordered(graph: GraphBuilder) -> tuple[GraphNode, ...]:
    """All nodes that are needed, leaves among them."""
    if not graph.outputs:
        raise UserError.at("TW008", f"the graph '{graph.name}' has no output", help="name one with g.output(name, tensor)")
    for node in list(graph.nodes.values()):
        if node.kind == "op" and not node.results:
            graph.tensor(node.name)
    reads = {node.name: inputs_of(graph, node) for node in graph.nodes.values()}
    live = _live(graph, reads)
    before: dict[str, set[str]] = {name: {t.node.name for t in reads[name]} for name in live}
    writers: dict[tuple[str, int], GraphNode] = {}
    for node in (graph.nodes[name] for name in live if graph.nodes[name].kind == "op"):
        record = op_record(str(node.op))
        for written in record.writes:
            tensor = node.inputs.get(written)
            tensor = graph.settled(node, tensor) if isinstance(tensor, str) else tensor
            if not isinstance(tensor, Tensor):
                continue
            if _root(graph, tensor).kind != "cache":
                raise UserError.at("TW015", f"node '{node.name}' ({node.op}) writes '{tensor.name}', which is no cache", help="make it with g.cache(name, shape, dtype)")
            key = tensor.node.name, tensor.index
            if key in writers and not _apart(tensor, graph, writers[key]):
                raise UserError.at(
                    "TW016", f"nodes '{writers[key].name}' and '{node.name}' both write '{tensor.name}' as it was before either", help="give the second the result of the first"
                )  # fmt: skip
            writers[key] = node
            for other in live:
                if other != node.name and any((t.node.name, t.index) == key for t in reads[other]) and not _writes(graph, other):
                    before[node.name].add(other)
    return _sorted(graph, before)


def _writes(graph: GraphBuilder, name: str) -> bool:
    node = graph.nodes[name]
    return node.kind == "op" and bool(op_record(str(node.op)).writes)


def _apart(tensor: Tensor, graph: GraphBuilder, other: GraphNode) -> bool:
    """Whether two writers of one cache write different parts of it: views by different numbers."""
    name = op_record(str(other.op)).writes[0]
    first = other.inputs[name]
    return isinstance(first, Tensor) and _chain(first) != _chain(tensor)


def _chain(tensor: Tensor) -> tuple[object, ...]:
    return () if tensor.base is None else (*_chain(tensor.base), tensor.step)


def _root(graph: GraphBuilder, tensor: Tensor) -> GraphNode:
    """The leaf whose memory a tensor is, where it is one's."""
    node = tensor.node
    while node.kind == "op" and op_record(str(node.op)).aliases:
        given = node.inputs[op_record(str(node.op)).writes[0]]
        node = (graph.settled(node, given) if isinstance(given, str) else given).node  # type: ignore[union-attr]
    return node


def _live(graph: GraphBuilder, reads: dict[str, list[Tensor]]) -> list[str]:
    """Names of the nodes that outputs need, and those that write caches, with what they need, in the order of building."""
    open_ = [t.node.name for t in graph.outputs.values()]
    open_ += [node.name for node in graph.nodes.values() if node.kind == "op" and op_record(str(node.op)).writes]
    found: set[str] = set()
    while open_:
        name = open_.pop()
        if name not in found:
            found.add(name)
            open_ += [t.node.name for t in reads[name]]
    return [name for name in graph.nodes if name in found]


def _sorted(graph: GraphBuilder, before: dict[str, set[str]]) -> tuple[GraphNode, ...]:
    after: dict[str, list[str]] = {name: [] for name in before}
    left = {name: len(needs) for name, needs in before.items()}
    for name, needs in before.items():
        for need in needs:
            after[need].append(name)
    ready = [(graph.nodes[name].number, name) for name, count in left.items() if not count]
    heapq.heapify(ready)
    found: list[GraphNode] = []
    while ready:
        _, name = heapq.heappop(ready)
        found.append(graph.nodes[name])
        for user in after[name]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, (graph.nodes[user].number, user))
    if len(found) < len(before):
        raise UserError.at("TW016", f"the graph has a cycle: {' -> '.join(_cycle(before, {n.name for n in found}))}", help="a node's inputs must come before it")
    return tuple(found)


def _cycle(before: dict[str, set[str]], done: set[str]) -> list[str]:
    """Nodes that wait for each other."""
    name = next(n for n in before if n not in done)
    path: list[str] = []
    while name not in path:
        path.append(name)
        name = next(n for n in sorted(before[name]) if n not in done)
    return [*path[path.index(name) :], name][::-1]
