"""Nodes of a graph as calls of kernels on values, for the sizes of a run.

In: nodes in order, and the value of each named size. Out: a list of `PlannedCall`: the kernel, and for each of its parameters a number or a `Ref`: which
array, and where its elements are. Views are index arithmetic; where elements do not lie so, a call that copies them comes before.

How a value lies in memory is chosen by those who read it: axes that a reader joins are one axis of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.artifact import Artifact
from tilewright.base.dtypes import DType
from tilewright.base.errors import TilewrightError, UserError
from tilewright.base.sizes import Size, size_text
from tilewright.base.target import host_cpu
from tilewright.compile.build import describe_program
from tilewright.compile.driver import Signature, front_end
from tilewright.execute.calls.checks import bind_sizes
from tilewright.execute.kernel import Kernel
from tilewright.graphs.builder import GraphBuilder
from tilewright.graphs.kernels.elementwise import copy_as
from tilewright.graphs.ops.table import op_record
from tilewright.graphs.registry import lowered, replacement
from tilewright.graphs.tensor import GraphNode, Tensor, ViewStep, as_sizes
from tilewright.tree.block_graph import AffineIndex, StorageLayout, straight
from tilewright.tree.typed import ArgSpec, ArrayArg, ScalarArg
from tilewright.tree.views import reshaped

Shape = tuple[int, ...]
Steps = tuple[tuple[Any, ...], ...]


@dataclass(eq=False)
class PlannedValue:
    """What a call makes: an array between kernels."""

    number: int
    dtype: DType
    shape: Shape
    memory: Shape = ()
    layout: StorageLayout | None = None
    shapes: set[Shape] = field(default_factory=set)
    """Shapes in which it is read, before anything else is done to it."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Ref:
    """An array that a call reads or writes: elements of a value (`places` in its memory), or of a leaf or a constant after `steps`."""

    root: Any
    """A `PlannedValue`, the name of a leaf, or a NumPy array that is a constant."""
    shape: Shape
    dtype: DType
    extents: tuple[int | None, ...] = ()
    places: tuple[AffineIndex, ...] = ()
    steps: Steps = ()

    @property
    def key(self) -> tuple[object, ...]:
        """What is the same array for a program."""
        root = self.root if isinstance(self.root, str) else id(self.root)
        return root, self.shape, self.places, self.steps


@dataclass(eq=False)
class PlannedCall:
    """A kernel and its arguments. `written` are the positions of arguments that it writes in place."""

    node: GraphNode
    kernel: Any
    arguments: dict[str, Any]
    """Tensors at first, `Ref`s and numbers once values lie somewhere."""
    values: tuple[PlannedValue, ...]
    written: tuple[str, ...] = ()
    joins: bool = True
    """Whether it can be a part of a program; a function that is no kernel runs by itself."""
    constant: bool = False
    """Whether it depends on weights alone."""


def is_joinable(kernel: Any) -> bool:
    """Whether a kernel may become part of a program: one without wishes of its own about calls."""
    return isinstance(kernel, Kernel) and kernel.device is None and kernel.precision == "auto" and not (
        kernel.schedule or kernel.asynchronous or kernel.launches or kernel.spread or kernel.watchdog or kernel.check
    )  # fmt: skip


_rules: dict[tuple[int, tuple[ArgSpec, ...]], tuple[object, Artifact]] = {}


def kernel_results(kernel: Kernel[..., Any], arguments: Mapping[str, Any]) -> list[tuple[DType, Shape]]:
    """Dtypes and shapes of what a kernel makes of arguments that have dtypes and shapes."""
    specs = tuple(spec_of(value) for value in arguments.values())
    function = kernel.function
    found = _rules.get((id(function), specs))
    if found is None:
        found = _rules[id(function), specs] = function, describe_program(front_end(function, Signature(specs))[1], host_cpu())
    rule = found[1]
    shapes = {name: _stored(value) for name, value in arguments.items() if hasattr(value, "shape")}
    numbers = {name: value for name, value in arguments.items() if isinstance(value, int | float)}
    sizes = bind_sizes(rule, shapes, {}, function.span, numbers)
    return [(output.dtype, tuple(s.evaluate(sizes) for s in output.shape)) for output in rule.outputs]


def _stored(value: Any) -> Shape:
    """The shape of an array as programs bind it: of packed blocks that of their bytes."""
    shape, dtype = tuple(value.shape), value.dtype
    return (*shape[:-1], shape[-1] // dtype.block, dtype.block_bytes) if dtype.is_packed else shape


def spec_of(value: Any) -> ArgSpec:
    if isinstance(value, bool):
        return ScalarArg(dtypes.bool_)
    if isinstance(value, int | float):
        return ScalarArg(dtypes.i64 if isinstance(value, int) else dtypes.f64, weak=True)
    return ArrayArg(value.dtype, len(value.shape))


@dataclass(frozen=True)
class _Form:
    shape: Shape
    dtype: DType


class Lowering:
    """Makes the calls of one plan."""

    def __init__(self, graph: GraphBuilder, order: Sequence[GraphNode], sizes: Mapping[str, int]) -> None:
        self.graph, self.order, self.sizes = graph, order, sizes
        self.calls: list[PlannedCall] = []
        self.values: list[PlannedValue] = []
        self.results: dict[tuple[str, int], PlannedValue | Tensor] = {}
        """Of nodes: what they make, or the tensor whose memory it is."""
        self.constant: set[str] = set()
        self.copies: dict[tuple[object, ...], Ref] = {}

    def run(self) -> list[PlannedCall]:
        for node in self.order:
            for first, second, what in node.constraints:
                a, b = self.size(node, first), self.size(node, second)
                if a != b:
                    raise UserError.at("TW004", f"node '{node.name}' ({node.op}): {what}: {size_text(first)} = {a} and {size_text(second)} = {b} differ")
            if node.kind == "op":
                self.lower(node)
            elif node.kind == "weight":
                self.constant.add(node.name)
        for tensor in self.graph.outputs.values():
            self.note_shapes(tensor)
        for value in self.values:
            place(value)
        calls, self.calls = self.calls, []
        for call in calls:
            call.arguments = {name: self.argument(call, value) for name, value in call.arguments.items()}
            self.calls.append(call)
        return self.calls

    def size(self, node: GraphNode, size: Size) -> int:
        if not size.names <= self.sizes.keys():
            raise UserError.at("TW014", f"node '{node.name}': the size {size_text(size)} is not bound by any input")
        return size.evaluate(self.sizes)

    def shape(self, tensor: Tensor) -> Shape:
        return tuple(self.size(tensor.node, s) for s in tensor.sizes)

    # -- calls --------------------------------------------------------------------------------------------------

    def lower(self, node: GraphNode) -> None:
        record = op_record(str(node.op))
        call = self.graph.call_of(node)
        own = replacement(record.name, node.name, self.graph.replaced)
        made = lowered(record, call, own)
        kernel, arguments = made.kernel, dict(made.arguments)
        for value in arguments.values():
            if isinstance(value, Tensor):
                self.note_shapes(value)
        joins = is_joinable(kernel)
        written: tuple[str, ...] = ()
        if isinstance(kernel, Kernel):
            written = tuple(p.name for p in kernel.function.params if p.in_place)
        allowed = {*record.writes, *(name for name, value in arguments.items() if isinstance(value, Tensor) and any(value.node is t.node for w in record.writes if isinstance(t := call[w], Tensor)))}
        unasked = [name for name in written if name not in allowed]
        if unasked:
            raise call.fail(f"its kernel {kernel.__name__} writes '{unasked[0]}' in place, and '{record.name}' does not", "TW015")
        forms = [(t.dtype, self.shape(t)) for t in node.results]
        aliases = record.aliases
        results = forms if not aliases else []
        if joins and isinstance(kernel, Kernel) and made.results is not None:
            results = [(t.dtype, tuple(self.size(node, s) for s in as_sizes(t.shape))) for t in made.results]
            self.check(node, kernel, forms if not aliases else [], results)
        elif joins and isinstance(kernel, Kernel):
            given = {name: _Form(self.shape(v), v.dtype) if isinstance(v, Tensor) else _Form(v.shape, dtypes.from_numpy(v.dtype) or dtypes.f32) if isinstance(v, np.ndarray) else v for name, v in arguments.items()}
            try:
                results = kernel_results(kernel, given)
            except TilewrightError as error:
                first = error.diagnostics[0]
                raise type(error).at(first.code, f"node '{node.name}' ({node.op}): {first.message}", first.span, first.help) from None
            self.check(node, kernel, forms if not aliases else [], results)
        values = tuple(self.value(dtype, shape) for dtype, shape in results)
        constant = not written and all(
            v.node.name in self.constant if isinstance(v, Tensor) else True for v in arguments.values()
        )
        if constant:
            self.constant.add(node.name)
        self.calls.append(PlannedCall(node, kernel, arguments, values, written, joins, constant))
        if aliases:
            given_ = node.inputs[record.writes[0]]
            self.results[node.name, 0] = self.graph.settled(node, given_) if isinstance(given_, str) else given_  # type: ignore[assignment]
        for index, value in enumerate(values):
            self.results[node.name, index] = value
            value.shapes.add(forms[index][1])

    def check(self, node: GraphNode, kernel: Any, wanted: Sequence[tuple[DType, Shape]], found: Sequence[tuple[DType, Shape]]) -> None:
        """Whether a kernel makes what the rule of the op says, in whatever shape."""
        name = getattr(kernel, "__name__", "its kernel")
        if len(wanted) != len(found):
            raise UserError.at("TW016", f"node '{node.name}' ({node.op}): {name} makes {len(found)} result(s), not {len(wanted)}")
        for (dtype, shape), (own, made) in zip(wanted, found, strict=True):
            if own is not dtype:
                raise UserError.at("TW006", f"node '{node.name}' ({node.op}): {name} makes {own}, not {dtype}")
            if prod(made) != prod(shape) or not _refines(made, shape):
                raise UserError.at("TW004", f"node '{node.name}' ({node.op}): {name} makes {own}{list(made)}, not {dtype}{list(shape)}")

    def value(self, dtype: DType, shape: Shape) -> PlannedValue:
        made = PlannedValue(len(self.values), dtype, shape)
        self.values.append(made)
        return made

    # -- where elements are -------------------------------------------------------------------------------------

    def chain(self, tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What a tensor is a view of, and the views from there on; what only names the memory of another is followed."""
        views: list[Tensor] = []
        while True:
            while tensor.base is not None:
                views.insert(0, tensor)
                tensor = tensor.base
            other = self.results.get((tensor.node.name, tensor.index))
            if not isinstance(other, Tensor):
                return tensor, views
            tensor = other

    def note_shapes(self, tensor: Tensor) -> None:
        """A value that is read in another shape should lie so that this shape is a view."""
        root, views = self.chain(tensor)
        value = self.results.get((root.node.name, root.index))
        if isinstance(value, PlannedValue):
            for view in views:
                if view.step is None or view.step.kind != "reshape":
                    break
                value.shapes.add(self.shape(view))

    def argument(self, call: PlannedCall, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.ref(value, call)
        if isinstance(value, np.ndarray):
            found = dtypes.from_numpy(value.dtype)
            assert found is not None
            return Ref(value, value.shape, found)
        return value

    def ref(self, tensor: Tensor, call: PlannedCall | None = None) -> Ref:
        root, views = self.chain(tensor)
        value = self.results.get((root.node.name, root.index))
        if not isinstance(value, PlannedValue):
            steps = tuple(self.concrete(view) for view in views)
            whole = Ref(root.node.name, self.shape(tensor), tensor.dtype, steps=steps)
            apart = None if root.node.kind == "weight" or root.dtype.is_packed else _first_copy(self.shape(root), steps)
            if apart is None:
                return whole
            # Other elements may lie there in the next run: what is no view of them is copied by a kernel.
            before = self.shape(views[apart - 1]) if apart else self.shape(root)
            made = self.copied(Ref(root.node.name, before, tensor.dtype, steps=steps[:apart]), self.shape(views[apart]), call)
            return self.viewed(made, views[apart + 1 :], call)
        # The value in the shape of the rule, which may be another than the kernel's.
        start = self.shape(root)
        found = self.reshape(value_ref(value), start)
        assert found is not None
        return self.viewed(found, views, call)

    def viewed(self, found: Ref, views: Sequence[Tensor], call: PlannedCall | None) -> Ref:
        """Views of a value, with copies where they are none."""
        for view in views:
            after = self.apply(found, view)
            found = self.copied(found, self.shape(view), call) if after is None else after
        return found

    def concrete(self, view: Tensor) -> tuple[Any, ...]:
        step = view.step
        assert isinstance(step, ViewStep)
        return step.kind, self.shape(view), step.axes, step.axis, self.size(view.node, step.start), step.step

    def apply(self, ref: Ref, view: Tensor) -> Ref | None:
        step = view.step
        assert step is not None
        shape = self.shape(view)
        if step.kind == "reshape":
            return self.reshape(ref, shape)
        if step.kind == "transpose":
            places = tuple(AffineIndex(p.offset, tuple(p.steps[a] for a in step.axes)) for p in ref.places)
            return Ref(ref.root, shape, ref.dtype, tuple(ref.extents[a] for a in step.axes), places)
        if step.kind == "slice":
            start = self.size(view.node, step.start)
            if shape[step.axis] and not 0 <= start <= start + (shape[step.axis] - 1) * step.step < ref.shape[step.axis]:
                raise UserError.at("TW013", f"a slice of '{view.name}' along axis {step.axis} takes {shape[step.axis]} elements from {start} on, of {ref.shape[step.axis]}")
            places = tuple(
                AffineIndex(p.offset + p.steps[step.axis] * start, tuple(s * step.step if a == step.axis else s for a, s in enumerate(p.steps))) for p in ref.places
            )
            return Ref(ref.root, shape, ref.dtype, (*ref.extents[: step.axis], shape[step.axis], *ref.extents[step.axis + 1 :]), places)
        if step.kind == "drop":
            places = tuple(AffineIndex(p.offset, (*p.steps[: step.axis], *p.steps[step.axis + 1 :])) for p in ref.places)
            return Ref(ref.root, shape, ref.dtype, (*ref.extents[: step.axis], *ref.extents[step.axis + 1 :]), places)
        missing = len(shape) - len(ref.shape)
        own = (*([1] * missing), *ref.shape)
        repeats = [a != b for a, b in zip(own, shape, strict=True)]
        if any(r and a != 1 for r, a in zip(repeats, own, strict=True)):
            raise UserError.at("TW004", f"'{view.name}' of shape {ref.shape} cannot be repeated to {shape}")
        places = tuple(
            AffineIndex(p.offset, tuple(0 if r else s for r, s in zip(repeats, (*([0] * missing), *p.steps), strict=True))) for p in ref.places
        )
        extents = tuple(n if r else e for r, n, e in zip(repeats, shape, (*shape[:missing], *ref.extents), strict=True))
        return Ref(ref.root, shape, ref.dtype, extents, places)

    def reshape(self, ref: Ref, shape: Shape) -> Ref | None:
        if ref.shape == shape:
            return ref
        if prod(ref.shape) != prod(shape):
            raise UserError.at("TW004", f"an array of shape {ref.shape} cannot have the shape {shape}")
        if 0 in shape or not shape or not ref.shape:
            places = tuple(AffineIndex(p.offset, (0,) * len(shape)) for p in ref.places)
            return Ref(ref.root, shape, ref.dtype, shape, places)
        found = reshaped(ref.shape, shape, ref.extents, ref.places)
        return None if found is None else Ref(ref.root, shape, ref.dtype, *found)

    def copied(self, ref: Ref, shape: Shape, call: PlannedCall | None) -> Ref:
        """The elements in row-major order, in another shape."""
        key = ref.key, shape
        if key not in self.copies:
            value = self.value(ref.dtype, ref.shape)
            value.shapes.add(shape)
            place(value)
            producer = ref.root if isinstance(ref.root, PlannedValue) else None
            node = call.node if call is not None else next((c.node for c in self.calls if producer in c.values), self.graph.nodes.get(ref.root if isinstance(ref.root, str) else ""))
            assert node is not None
            self.calls.append(PlannedCall(node, copy_as(ref.dtype), {"x": ref}, (value,)))
            self.copies[key] = value_ref(value)
        found = self.reshape(self.copies[key], shape)
        assert found is not None
        return found


def _first_copy(shape: Shape, steps: Steps) -> int | None:
    """The first step of an array of that shape that is no view: a reshape of elements that do not lie one after the other."""
    apart = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    array: Any = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), shape, apart)  # never read: its strides are what is asked
    for number, (kind, wanted, axes, axis, start, step) in enumerate(steps):
        if kind == "reshape":
            array = array.view()
            try:
                array.shape = wanted
            except AttributeError:
                return number
        elif kind == "transpose":
            array = array.transpose(*axes)
        elif kind == "slice":
            array = array[(*(slice(None) for _ in range(axis)), slice(start, start + wanted[axis] * step, step))]
        elif kind == "drop":
            array = array[(*(slice(None) for _ in range(axis)), 0)]
        elif kind == "expand":
            array = np.broadcast_to(array, wanted)
        else:
            return None
    return None


def value_ref(value: PlannedValue) -> Ref:
    """The memory of a value."""
    extents = value.layout.extents if value.layout is not None else ()
    return Ref(value, value.memory, value.dtype, tuple(None for _ in extents), straight(len(value.memory)))


def _splits(shape: Shape) -> set[int]:
    """The numbers of elements behind which an axis of a shape begins."""
    return {prod(shape[axis:]) for axis in range(len(shape))} | {prod(shape)}


def _refines(first: Shape, second: Shape) -> bool:
    """Whether one shape is that of the other with axes split, joined or both: any is, of as many elements."""
    return prod(first) == prod(second)


def place(value: PlannedValue) -> None:
    """Choose how a value lies in memory: as its kernel writes it, unless a reader joins axes."""
    shape = value.shape
    rank = len(shape)
    value.memory = shape
    value.layout = StorageLayout((None,) * rank, (None,) * rank, straight(rank))
    if 0 in shape or not shape:
        return
    real = tuple(e for e in shape if e != 1)
    common = _splits(real)
    for other in value.shapes:
        common &= _splits(tuple(e for e in other if e != 1))
    if common == _splits(real):
        return
    cuts = sorted(common, reverse=True)
    memory = tuple(a // b for a, b in zip(cuts, (*cuts[1:], 1), strict=True))
    extents: list[int | None] = []
    stored: list[int | None] = list(shape)
    places: list[AffineIndex] = []
    suffix = [prod(shape[axis + 1 :]) for axis in range(rank)]
    for extent, below in zip(memory, (*cuts[1:], 1), strict=True):
        inside = [a for a in range(rank) if shape[a] != 1 and below <= suffix[a] < below * extent]
        steps = tuple(suffix[a] // below if a in inside else 0 for a in range(rank))
        places.append(AffineIndex(0, steps))
        if len(inside) == 1:
            extents.append(None)
            stored[inside[0]] = None
        else:
            extents.append(extent)
    value.memory = memory
    value.layout = StorageLayout(tuple(extents), tuple(stored), tuple(places))


Callee = Callable[..., Any]
