"""An ONNX file, opened: read, checked as a whole, and with what its inputs and outputs are called.

In: a path or bytes. Out: an `OpenedModel`. What is wrong with the file is a `UserError` that names the file and the field or node; operators
without a rule are all listed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tilewright.base.errors import UserError
from tilewright.graphs.onnx.model import Model, NodeRecord, ValueRecord, read_model
from tilewright.graphs.onnx.tensors import MOST_ELEMENTS, ExternalFiles, dtype_of, map_file
from tilewright.graphs.onnx.translate import check_functions, unsupported
from tilewright.graphs.onnx.values import PackedWeights
from tilewright.graphs.onnx.wire import Malformed

OLDEST, NEWEST = 7, 23
"""Opsets of ONNX whose operators the rules know."""
_MOST_LISTED = 40


@dataclass(frozen=True)
class ModelInput:
    """An input or output: its dtype, and extents that are numbers, names of sizes, or None where nothing is said."""

    name: str
    dtype: np.dtype
    dims: tuple[int | str | None, ...] | None

    @property
    def form(self) -> str:
        """As messages show it."""
        dims = "…" if self.dims is None else ", ".join("?" if d is None else str(d) for d in self.dims)
        return f"{self.name}: {self.dtype.name}[{dims}]"


@dataclass(eq=False)
class OpenedModel:
    """A model whose file was read."""

    name: str
    model: Model
    files: ExternalFiles
    inputs: tuple[ModelInput, ...]
    outputs: tuple[str, ...]
    bytes: int
    constants: dict[int, np.ndarray] = field(default_factory=dict)
    packed: PackedWeights = field(default_factory=PackedWeights)


def open_model(source: str | Path | bytes | bytearray | memoryview) -> OpenedModel:
    """The model in a file, or in bytes. Raises `UserError`."""
    if isinstance(source, bytes | bytearray | memoryview):
        name, data, folder = "model", memoryview(source).cast("B"), None
    else:
        path = Path(source)
        name, folder = path.name, path.parent
        try:
            data = map_file(path)
        except OSError as error:
            raise UserError.at("TW007", f"{path}: {error.strerror or error}") from None
    try:
        model = read_model(data)
        return _checked(name, model, ExternalFiles(folder), len(data))
    except Malformed as error:
        raise UserError.at("TW007", f"{name} is no ONNX model: {error}") from None


def _checked(name: str, model: Model, files: ExternalFiles, size: int) -> OpenedModel:
    graph = model.graph
    if graph is None:
        raise Malformed("it has no graph")
    if graph.sparse:
        raise UserError.at("TW005", f"{name} has {graph.sparse} sparse initializer(s)", help="store them as dense tensors")
    version = model.opsets.get("")
    if version is None and any(not node.domain for node in graph.nodes):
        raise Malformed("it does not say which opset it uses")
    if version is not None and not OLDEST <= version <= NEWEST:
        raise UserError.at("TW005", f"{name} uses opset {version}, and {OLDEST} to {NEWEST} are known", help="convert it with onnx.version_converter")
    check_functions(model)
    missing = unsupported(model)
    if missing:
        raise UserError.at("TW005", f"{name} has {len(missing)} node(s) whose operators are unknown:\n{_listed(missing, model)}", help="`tw.graph.onnx_operators()` lists those that are known")
    constants = {t.name for t in graph.initializers}
    inputs = tuple(_input(value) for value in graph.inputs if value.name not in constants)
    names = [value.name for value in graph.inputs]
    if len(set(names)) != len(names) or len({o.name for o in graph.outputs}) != len(graph.outputs):
        raise Malformed("two of its inputs or outputs have one name")
    if not graph.outputs:
        raise Malformed("it has no outputs")
    return OpenedModel(graph.name or name, model, files, inputs, tuple(o.name for o in graph.outputs), size)


def _listed(nodes: list[NodeRecord], model: Model) -> str:
    lines = [f"  {n.op} (domain '{n.domain or 'ai.onnx'}', opset {model.opsets.get(n.domain, '?')}): node '{n.name or next(iter(n.outputs), '')}'" for n in nodes[:_MOST_LISTED]]
    return "\n".join([*lines, *([f"  and {len(nodes) - _MOST_LISTED} more"] if len(nodes) > _MOST_LISTED else [])])


def _input(value: ValueRecord) -> ModelInput:
    if value.kind != "tensor":
        raise Malformed(f"input '{value.name}' is a {value.kind}, not a tensor")
    for extent in value.dims or ():
        if isinstance(extent, int) and not 0 <= extent <= MOST_ELEMENTS:
            raise Malformed(f"input '{value.name}' has an extent of {extent}")
    return ModelInput(value.name, dtype_of(value.elem_type, f"input '{value.name}'"), None if value.dims is None else tuple(value.dims))
