"""The instruction tape of a megakernel: instructions on numbered slots.

In: slots (inputs, frozen weights, values), instructions and caches, declared by hand; or a tensor graph, or an ONNX file. Out: a `Tape`, which is checked
as a whole before anything else is done with it (`check`), and the tensor graph that it means (`tape_graph.py`).

    tape = tw.mega.Tape("five")
    x = tape.input("x", (1, 64), tw.f32)
    y = tape.emit("Silu", x)
    tape.output("y", y)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, f32, from_numpy
from tilewright.base.errors import UserError
from tilewright.execute.arrays import as_dtype
from tilewright.graphs.builder import array_dtype
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.onnx.imported import OnnxGraph
from tilewright.graphs.tensor import Tensor
from tilewright.mega.tape_ops import TAPE_OPS, TapeOp
from tilewright.runtime.memory.packed_array import PackedArray

Shape = tuple[int, ...]


@dataclass
class TapeSlot:
    """A place for one array. `shape` and `dtype` are None where the instruction that writes it says them."""

    number: int
    kind: str
    """`input`, `frozen` or `value`."""
    name: str
    shape: Shape | None = None
    dtype: DType | None = None
    data: Any = None
    """Of a frozen slot: its array, where it is known already."""

    @property
    def form(self) -> str:
        shape = "?" if self.shape is None else list(self.shape)
        return f"{self.dtype or '?'}{shape}"


@dataclass(frozen=True)
class TapeInstruction:
    """One instruction: an op, the slots that it reads and writes, and its attributes."""

    number: int
    op: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"instruction {self.number} ({self.op})"

    def error(self, message: str, code: str = "TW004", help: str = "") -> UserError:
        error = UserError.at(code, f"{self.label}: {message}", help=help)
        assert isinstance(error, UserError)
        return error


@dataclass(frozen=True)
class CacheShape:
    """What the caches of keys and values are: one of each for every layer."""

    layers: int
    capacity: int
    heads: int
    depth: int
    dtype: DType = f32
    batch: int | None = None

    @property
    def shape(self) -> Shape:
        """Of one layer."""
        own = (self.capacity, self.heads, self.depth)
        return own if self.batch is None else (self.batch, *own)


class Tape:
    """Instructions on slots, with inputs, frozen weights, outputs and caches."""

    def __init__(self, name: str = "tape") -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError.at("TW009", f"the name of a tape is {name!r}", help="give a name such as 'decoder'")
        self.name = name
        self.slots: dict[int, TapeSlot] = {}
        self.instructions: list[TapeInstruction] = []
        self.inputs: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.caches: CacheShape | None = None
        self.source: TensorGraph | None = None
        """The graph that the tape stands for, where it came from one."""
        self.sizes: dict[str, int] = {}
        """Values of the named sizes of that graph."""
        self.constants: dict[str, np.ndarray] = {}
        """Outputs of an ONNX model that do not depend on its inputs."""

    # -- slots --------------------------------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int], dtype: object = f32) -> int:
        """An input of every launch."""
        self._by_hand("input")
        if name in self.inputs or name == "position":
            raise UserError.at("TW016", f"the tape '{self.name}' has an input '{name}' already", help="the position of a launch is no input: AutoPositionIds and the caches read it")
        slot = self._slot("input", name, _shape(name, shape), as_dtype(dtype))
        self.inputs[name] = slot.number
        return slot.number

    def frozen(self, name: str, array: Any = None, *, shape: Sequence[int] | None = None, dtype: object = f32) -> int:
        """A weight: an array, or a shape and a dtype (packed ones too), of which `runner.set_weights` gives the numbers."""
        self._by_hand("frozen")
        if any(s.kind == "frozen" and s.name == name for s in self.slots.values()):
            raise UserError.at("TW016", f"the tape '{self.name}' has a weight '{name}' already")
        if array is None:
            if shape is None:
                raise UserError.at("TW008", f"the weight '{name}' has neither an array nor a shape")
            kind = dtype if isinstance(dtype, DType) else as_dtype(dtype)
            extents = _shape(name, shape)
            if kind.is_packed and (not extents or extents[-1] % kind.block):
                raise UserError.at("TW004", f"the weight '{name}' of {kind} has the shape {list(extents)}", help=f"its last extent must be a multiple of {kind.block}")
            return self._slot("frozen", name, extents, kind).number
        if not isinstance(array, np.ndarray | PackedArray):
            array = np.asarray(array.numpy() if hasattr(array, "numpy") and not isinstance(array, list | tuple) else array)
        kind_ = array_dtype(array)
        if kind_ is None:
            raise UserError.at("TW009", f"the weight '{name}' has dtype {array.dtype}, which kernels do not have")
        if shape is not None and tuple(shape) != tuple(array.shape):
            raise UserError.at("TW004", f"the weight '{name}' is {kind_}{list(array.shape)}, and {list(shape)} was asked for")
        return self._slot("frozen", name, tuple(int(n) for n in array.shape), kind_, array).number

    def slot(self, shape: Sequence[int] | None = None, dtype: object = None, name: str = "") -> int:
        """A slot that an instruction writes. What is declared of it is checked against what the instruction makes."""
        self._by_hand("slot")
        return self._slot("value", name, None if shape is None else _shape(name or "slot", shape), None if dtype is None else as_dtype(dtype)).number

    def kv_cache(self, layers: int, capacity: int, heads: int, depth: int, dtype: object = f32, batch: int | None = None) -> None:
        """Caches of keys and values: `layers` of each, [capacity, heads, depth], with `batch` sequences in front where it is given."""
        self._by_hand("kv_cache")
        numbers = {"layers": layers, "capacity": capacity, "heads": heads, "depth": depth, **({} if batch is None else {"batch": batch})}
        for what, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UserError.at("TW009", f"{what} of the caches is {number!r}", help="give a whole number above 0")
        self.caches = CacheShape(layers, capacity, heads, depth, as_dtype(dtype), batch)

    def output(self, name: str, slot: int) -> None:
        """What a launch gives."""
        self._by_hand("output")
        if name in self.outputs:
            raise UserError.at("TW016", f"the tape '{self.name}' has an output '{name}' already")
        self.outputs[name] = slot

    # -- instructions -------------------------------------------------------------------------------------------

    def instruction(self, op: str, inputs: Sequence[int | None], outputs: Sequence[int], **attributes: Any) -> TapeInstruction:
        """One more instruction, as it is: `check` says what is wrong with it."""
        self._by_hand("instruction")
        made = TapeInstruction(len(self.instructions), op, tuple(inputs), tuple(outputs), dict(attributes))
        self.instructions.append(made)
        return made

    def emit(self, op: str, *inputs: int | np.ndarray | None, **attributes: Any) -> Any:
        """One more instruction with new slots for what it makes: gives its slot, a tuple of them, or None. Arrays among the inputs become frozen slots."""
        known = TAPE_OPS.get(op)
        slots = [self.frozen(f"constant_{len(self.slots)}", value) if isinstance(value, np.ndarray) else value for value in inputs]
        outputs = [self.slot() for _ in range(known.results if known is not None else 1)]
        self.instruction(op, slots, outputs, **attributes)
        return outputs[0] if len(outputs) == 1 else tuple(outputs) or None

    def _slot(self, kind: str, name: str, shape: Shape | None = None, dtype: DType | None = None, data: Any = None) -> TapeSlot:
        number = len(self.slots)
        made = self.slots[number] = TapeSlot(number, kind, name or f"slot_{number}", shape, dtype, data)
        return made

    def _by_hand(self, what: str) -> None:
        if self.source is not None:
            raise UserError.at("TW016", f"the tape '{self.name}' stands for a tensor graph: {what} changes nothing in it", help="change the graph, and make a tape of it again")

    # -- where tapes come from ----------------------------------------------------------------------------------

    @classmethod
    def from_graph(cls, graph: TensorGraph, sizes: Mapping[str, int] | None = None, **named: int) -> Tape:
        """The tape of a tensor graph: a slot for each leaf and for each result of a node. `sizes` are the values of its named sizes."""
        if not isinstance(graph, TensorGraph):
            raise UserError.at("TW009", f"a tape is made of a tensor graph, not of a {type(graph).__name__}", help="tw.mega.Tape.from_onnx reads ONNX files")
        if not graph.outputs:
            raise UserError.at("TW008", f"the graph '{graph.name}' has no outputs")
        tape = cls(graph.name if graph.name.isidentifier() else "graph")
        values = dict(sizes or {}, **named)
        order = graph.validate()
        needed = {n for node in order for r in node.results for size in r.sizes for n in size.names} | {n for t in graph.outputs.values() for size in t.sizes for n in size.names}
        missing = sorted(needed - values.keys())
        if missing:
            raise UserError.at("TW014", f"the size '{missing[0]}' of the graph '{graph.name}' has no value", help=f"give it: tw.mega.Tape.from_graph(graph, {missing[0]}=…)")
        own: dict[tuple[str, int], int] = {}
        for node in order:
            kinds = {"input": "input", "weight": "frozen", "cache": "cache", "op": "value"}
            for index, result in enumerate(node.results):
                name = node.name if len(node.results) == 1 else f"{node.name}.{index}"
                made = tape._slot(kinds[node.kind], name, tuple(s.evaluate(values) for s in result.sizes), result.dtype, node.data)
                own[node.name, index] = made.number
                if node.kind == "input":
                    tape.inputs[node.name] = made.number
            if node.kind == "op":
                read = tuple(own.get((v.node.name, v.index)) for v in node.inputs.values() if isinstance(v, Tensor))
                tape.instruction(str(node.op), read, [own[node.name, i] for i in range(len(node.results))], node=node.name)
        for name, tensor in graph.outputs.items():
            tape.outputs[name] = own[tensor.node.name, tensor.index]
        tape.source, tape.sizes = graph, {k: int(v) for k, v in values.items()}
        return tape

    @classmethod
    def from_onnx(cls, source: str | Path | bytes | OnnxGraph, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> Tape:
        """The tape of an ONNX model for inputs of these shapes: shapes, or arrays where their numbers decide about shapes."""
        model = source if isinstance(source, OnnxGraph) else OnnxGraph(source)
        given: dict[str, Any] = {}
        for name, value in {**(inputs or {}), **named}.items():
            known = model.inputs.get(name)
            given[name] = value if hasattr(value, "shape") or known is None else np.zeros(_shape(name, value), known.dtype)
        graph = model.graph(given)
        constants = model.constants(given)
        if not graph.outputs:
            raise UserError.at("TW016", f"the outputs of '{model.name}' are constants: there is nothing to run")
        tape = cls.from_graph(graph)
        tape.constants = constants
        return tape

    # -- what is wrong with it ----------------------------------------------------------------------------------

    def unsupported(self) -> list[str]:
        """Names of ops that there are not, each once, in order."""
        if self.source is not None:
            return []
        return list(dict.fromkeys(i.op for i in self.instructions if i.op not in TAPE_OPS))

    def check(self) -> None:
        """Everything that can be known of the tape without its shapes; errors name the instruction."""
        if self.source is not None:
            return
        unknown = [i for i in self.instructions if i.op not in TAPE_OPS]
        if unknown:
            raise unknown[0].error(f"there is no op '{unknown[0].op}'" + (f", nor {', '.join(self.unsupported()[1:])}" if len(self.unsupported()) > 1 else ""), "TW005", "tw.mega.ops() lists the ops of tapes")
        if not self.outputs:
            raise UserError.at("TW008", f"the tape '{self.name}' has no output", help="name one: tape.output(\"y\", slot)")
        written: dict[int, TapeInstruction] = {}
        for one in self.instructions:
            self._check_one(one, TAPE_OPS[one.op], written)
        for name, number in self.outputs.items():
            if number not in self.slots:
                raise UserError.at("TW008", f"the output '{name}' of the tape '{self.name}' is slot {number}, which there is not")
            if self.slots[number].kind == "value" and number not in written:
                raise UserError.at("TW008", f"the output '{name}' of the tape '{self.name}' is slot {number}, which no instruction writes")

    def _check_one(self, one: TapeInstruction, op: TapeOp, written: dict[int, TapeInstruction]) -> None:
        least, most = op.inputs
        if not least <= len(one.inputs) <= most:
            count = str(least) if least == most else f"{least} or more" if most > 64 else f"{least} to {most}"
            raise one.error(f"has {len(one.inputs)} input(s), and takes {count}", "TW016")
        for place, number in enumerate(one.inputs):
            if number is None:
                if place < least:
                    raise one.error(f"its input {place} is missing", "TW008")
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number not in self.slots:
                raise one.error(f"reads slot {number!r}, which there is not", "TW008", f"slots are 0 to {len(self.slots) - 1}")
            if self.slots[number].kind == "value" and number not in written:
                later = next((i for i in self.instructions[one.number :] if number in i.outputs), None)
                raise one.error(f"reads slot {number} before it is written" + (f", by {later.label}" if later is not None else ": no instruction writes it"), "TW008")
        if len(one.outputs) not in ({0, 1} if op.results == 0 else {op.results}):
            raise one.error(f"has {len(one.outputs)} output(s), and makes {op.results}", "TW016")
        for number in one.outputs:
            if number not in self.slots:
                raise one.error(f"writes slot {number!r}, which there is not", "TW008")
            if self.slots[number].kind != "value":
                raise one.error(f"writes slot {number}, which is the {'input' if self.slots[number].kind == 'input' else 'weight'} '{self.slots[number].name}'", "TW015")
            if number in written:
                raise one.error(f"writes slot {number}, which {written[number].label} has written", "TW015", "a slot has one writer")
            written[number] = one
        unknown = [name for name in one.attributes if name not in op.attributes]
        if unknown:
            raise one.error(f"has no attribute '{unknown[0]}'", "TW016", f"it has {', '.join(op.attributes) or 'none'}")
        if op.cached:
            if self.caches is None:
                raise one.error("the tape has no caches", "TW008", "declare them: tape.kv_cache(layers, capacity, heads, depth)")
            layer = one.attributes.get("layer", 0)
            if op.name != "KVCacheSeqLen" and (isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.caches.layers):
                raise one.error(f"layer is {layer!r}, and the caches have {self.caches.layers}", "TW013")

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def weights(self) -> list[TapeSlot]:
        """Frozen slots whose numbers `runner.set_weights` has to give, in order."""
        return [s for s in self.slots.values() if s.kind == "frozen" and s.data is None]

    def key(self) -> str:
        """A hash of what decides the code: instructions, shapes and dtypes, and the numbers of small constants."""
        text = [self.name, repr(self.caches), repr(sorted(self.inputs.items())), repr(sorted(self.outputs.items())), repr(sorted(self.sizes.items()))]
        for slot in self.slots.values():
            data = ""
            if isinstance(slot.data, np.ndarray) and slot.data.size <= 4096 and from_numpy(slot.data.dtype) is not None:
                data = hashlib.sha256(np.ascontiguousarray(slot.data).tobytes()).hexdigest()
            text.append(f"{slot.kind} {slot.form} {data}")
        text += [f"{i.op} {i.inputs} {i.outputs} {sorted(i.attributes.items())!r}" for i in self.instructions]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.instructions)

    def __repr__(self) -> str:
        return f"<tape {self.name}: {len(self.instructions)} instructions on {len(self.slots)} slots, inputs {', '.join(self.inputs) or 'none'}, outputs {', '.join(self.outputs) or 'none'}>"


def _shape(name: str, shape: Any) -> Shape:
    found = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(isinstance(n, bool) or not hasattr(n, "__index__") or int(n) < 0 for n in found):
        raise UserError.at("TW009", f"the shape of '{name}' is {shape!r}", help="give whole numbers: the shapes of a tape are known when it is planned")
    return tuple(int(n) for n in found)
