"""A tape as a tensor graph.

In: a tape that was checked. Out: a `TapeGraph`: the graph, the outputs that are known without running it, and what each slot is. `Shape`, `Range` and
`ConstantOfShape` are computed here; where they would depend on data, an error names the instruction. What is declared of a slot has to be what its
instruction makes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.base.dtypes import i32
from tilewright.base.errors import TilewrightError, UserError
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.onnx.sink import GraphSink
from tilewright.graphs.onnx.values import Known, PackedWeights
from tilewright.graphs.tensor import Tensor
from tilewright.mega.tape import Tape, TapeInstruction, TapeSlot
from tilewright.mega.tape_ops import TAPE_OPS, CacheState, TapeNode, storable
from tilewright.runtime.memory.packed_array import PackedArray

POSITION = "position"


@dataclass
class TapeGraph:
    """The graph of a tape, and what became of its slots."""

    graph: TensorGraph
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    """Outputs that are known without running it."""
    tensors: dict[int, Tensor] = field(default_factory=dict)
    """Slots that are arrays of a run."""
    folded: dict[int, np.ndarray] = field(default_factory=dict)
    """Slots that are known when the tape is planned."""
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of all slots."""
    weights: dict[int, str] = field(default_factory=dict)
    """Names of the weight nodes of frozen slots whose numbers come later."""
    uses_position: bool = False
    sizes: dict[str, int] = field(default_factory=dict)


def graph_of(tape: Tape) -> TapeGraph:
    """The graph that a tape means."""
    if tape.source is not None:
        return _given_graph(tape, tape.source)
    tape.check()
    return _TapeTranslation(tape).run()


def _given_graph(tape: Tape, graph: TensorGraph) -> TapeGraph:
    found = TapeGraph(graph, dict(tape.constants), sizes=tape.sizes)
    for number, slot in tape.slots.items():
        name, _, index = slot.name.rpartition(".")
        node = graph.nodes.get(slot.name) or graph.nodes[name]
        found.tensors[number] = node.results[0 if slot.name in graph.nodes else int(index)]
        assert slot.shape is not None
        found.shapes[number] = slot.shape
    found.uses_position = POSITION in tape.inputs
    return found


class _TapeTranslation:
    """One translation of a tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.graph = TensorGraph(tape.name)
        self.sink = GraphSink(self.graph)
        self.packed = PackedWeights()
        self.found = TapeGraph(self.graph)
        self.values: dict[int, Known] = {}
        keys, values = [], []
        if tape.caches is not None:
            for layer in range(tape.caches.layers):
                keys.append(self.graph.cache(f"keys_{layer}", tape.caches.shape, tape.caches.dtype))
                values.append(self.graph.cache(f"values_{layer}", tape.caches.shape, tape.caches.dtype))
        self._position: Tensor | None = None
        self.caches = CacheState(self.graph, keys, values, self.position)

    def position(self) -> Tensor:
        """The position of the launch, in device memory."""
        if self._position is None:
            batch = self.tape.caches.batch if self.tape.caches is not None else None
            self._position = self.graph.input(POSITION, (batch or 1,), i32)
            self.found.uses_position = True
        return self._position

    def run(self) -> TapeGraph:
        for slot in self.tape.slots.values():
            if slot.kind == "input":
                self.values[slot.number] = self._input(slot)
            elif slot.kind == "frozen":
                self.values[slot.number] = self._frozen(slot)
        for one in self.tape.instructions:
            self._instruction(one)
        for name, number in self.tape.outputs.items():
            value = self.values[number]
            if value.host is not None:
                self.found.constants[name] = value.host
            else:
                self.graph.output(name, value.handle)
        for which, layer in sorted(self.caches.appended):
            cache = self.caches.now[which][layer]
            self.graph.output(f"{'keys' if which == 'K' else 'values'}_{layer} after", cache)
        for number, value in self.values.items():
            self.found.shapes[number] = value.shape
            if value.host is not None and self.tape.slots[number].kind == "value":
                self.found.folded[number] = value.host
            elif isinstance(value.handle, Tensor):
                self.found.tensors[number] = value.handle
        return self.found

    def _input(self, slot: TapeSlot) -> Known:
        assert slot.shape is not None and slot.dtype is not None
        made = self.graph.input(slot.name, slot.shape or (1,), slot.dtype)
        return Known(slot.shape, slot.dtype.numpy, None, made)

    def _frozen(self, slot: TapeSlot) -> Known:
        assert slot.shape is not None and slot.dtype is not None
        packed = slot.dtype.is_packed
        if slot.data is not None and not packed:
            return Known(slot.shape, slot.data.dtype, np.asarray(slot.data, order="C"))
        data: Any = slot.data
        if data is None:
            data = _nothing(slot)
        made = self.graph.weight(self.sink.name(slot.name), data)
        if slot.data is None:
            self.found.weights[slot.number] = made.name
        if not slot.shape:
            made = made.reshape((1,))
        return Known(slot.shape, np.dtype(np.float32) if packed else slot.dtype.numpy, None, made)

    def _instruction(self, one: TapeInstruction) -> None:
        op = TAPE_OPS[one.op]
        inputs = [None if number is None else self.values[number] for number in one.inputs]
        names = [self.tape.slots[n].name if n is not None else "" for n in one.inputs]
        try:
            node = TapeNode(one.label, one.op, inputs, names, one.attributes, self.sink, self.caches, self.packed, {})
            made = op.rule(node)
        except TilewrightError as error:
            first = error.diagnostics[0]
            if first.message.startswith(one.label):
                raise
            raise type(error).at(first.code, f"{one.label}: {first.message}", first.span, first.help) from None
        results = [made] if isinstance(made, Known) else list(made)
        for number, value in zip(one.outputs, results, strict=False):
            if value is None:
                raise one.error(f"makes nothing for slot {number}", "TW005")
            self._check(one, self.tape.slots[number], value)
            self.values[number] = value

    def _check(self, one: TapeInstruction, slot: TapeSlot, value: Known) -> None:
        """What was declared is what is made."""
        dtype = storable(value.dtype)
        if slot.shape is not None and slot.shape != value.shape:
            raise one.error(f"slot {slot.number} is declared as {slot.form}, and it makes {dtype}{list(value.shape)}", "TW004")
        if slot.dtype is not None and slot.dtype is not dtype:
            raise one.error(f"slot {slot.number} is declared as {slot.form}, and it makes {dtype}{list(value.shape)}", "TW006", "put a Cast behind it")


def _nothing(slot: TapeSlot) -> Any:
    """An array of that form that takes no memory; a run that is not given another is refused."""
    assert slot.shape is not None and slot.dtype is not None
    if slot.dtype.is_packed:
        form = (*slot.shape[:-1], slot.shape[-1] // slot.dtype.block, slot.dtype.block_bytes)
        return PackedArray(np.broadcast_to(np.zeros(1, np.uint8), form), slot.dtype)
    return np.broadcast_to(np.zeros(1, slot.dtype.numpy), slot.shape)


def weight_error(slot: TapeSlot, message: str, code: str = "TW004") -> UserError:
    error = UserError.at(code, f"the weight '{slot.name}' ({slot.form}) {message}")
    assert isinstance(error, UserError)
    return error
