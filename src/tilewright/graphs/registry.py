"""What each op of a tensor graph is: inputs, parameters, a rule for shapes and dtypes, and its kernel.

In: records, the package's own (`ops/`) and those of users (`tw.graph.register`). Out: `op_record(name)` and, for a node, a `Lowered`: the kernel and
what its parameters are. Kernels are ordinary ones, written in plain loops.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.base.sizes import Size, size_text
from tilewright.execute.kernel import Kernel
from tilewright.graphs.tensor import Extent, Tensor, as_sizes

REQUIRED: Any = object()
"""In place of a default: the parameter must be given."""


class TensorType(NamedTuple):
    """Shape and dtype of what a node makes."""

    shape: Sequence[Extent]
    dtype: DType


@dataclass(frozen=True)
class OpParam:
    """A parameter of an op that is no tensor: a number, a text, a dtype."""

    name: str
    type: type | tuple[type, ...] = float
    default: Any = REQUIRED
    alias: str = ""
    """Another name under which it may be given."""
    doc: str = ""


@dataclass(frozen=True)
class Lowered:
    """The kernel of a node, and what its parameters are: tensors (views are index arithmetic), arrays that are constants, or numbers."""

    kernel: Kernel[..., Any] | Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[TensorType, ...] | None = None
    """What the kernel makes, in the shapes in which it writes them; None: its text is asked."""


@dataclass(frozen=True)
class OpRecord:
    """One op. `inputs` are names; one with `?` at its end may be left out, `*` before the last takes any number of tensors.

    `rule(call)` gives a `TensorType`, or a tuple of them. `kernel` is a kernel whose parameters have the names of inputs and parameters, or a
    function of the call that gives such a kernel or a `Lowered`.
    """

    name: str
    inputs: tuple[str, ...]
    rule: Callable[[NodeCall], Any]
    kernel: Kernel[..., Any] | Callable[[NodeCall], Any]
    params: tuple[OpParam, ...] = ()
    results: int = 1
    writes: tuple[str, ...] = ()
    """Inputs that are written in place. The first result is then the array after the write, if the op has results of its kind (`aliases`)."""
    aliases: bool = False
    """Whether the only result is the input that is written, after it was written."""
    doc: str = ""

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(name.strip("*?") for name in self.inputs)

    @property
    def needed(self) -> tuple[str, ...]:
        return tuple(name for name in self.inputs if not name.endswith("?") and not name.startswith("*"))

    @property
    def variadic(self) -> str:
        return self.inputs[-1][1:] if self.inputs and self.inputs[-1].startswith("*") else ""


class NodeCall:
    """A node as its record sees it: inputs as tensors and numbers, parameters as values."""

    def __init__(self, name: str, op: str, inputs: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        self.name, self.op, self.inputs, self.params = name, op, inputs, params
        self.constraints: list[tuple[Size, Size, str]] = []

    def __getitem__(self, name: str) -> Any:
        return self.params[name] if name in self.params else self.inputs.get(name)

    def __contains__(self, name: str) -> bool:
        return self[name] is not None

    def fail(self, text: str, code: str = "TW004", help: str = "") -> UserError:
        """The error to raise, with the node's name in front."""
        error = UserError.at(code, f"node '{self.name}' ({self.op}): {text}", help=help)
        assert isinstance(error, UserError)
        return error

    def same(self, first: Extent, second: Extent, what: str) -> None:
        """Two extents have to be equal: an error now where they cannot be, one of the call where its sizes decide."""
        a, b = as_sizes((first, second))
        if a == b:
            return
        if a.constant is not None and b.constant is not None:
            raise self.fail(f"{what}: {size_text(a)} and {size_text(b)} differ")
        self.constraints.append((a, b, what))

    def same_dtype(self, first: Tensor, second: Tensor) -> None:
        if first.dtype is not second.dtype:
            raise self.fail(f"'{first.name}' is {first.form} and '{second.name}' is {second.form}: their dtypes differ", "TW006", "cast one with a Copy node: g.op(\"Copy\", x, dtype=…)")

    def rank(self, name: str, *ranks: int) -> Tensor:
        """The tensor of that name, which has one of these ranks."""
        found: Tensor = self[name]
        if found.ndim not in ranks:
            raise self.fail(f"'{name}' is {found.form}, and has to have {' or '.join(map(str, ranks))} axes", "TW003")
        return found


_records: dict[str, OpRecord] = {}
_replaced: dict[tuple[str, str], Callable[..., Any]] = {}
"""Kernels for all graphs, by op and name of the node (or '')."""
_changes: list[str] = []


def add_op(record: OpRecord) -> OpRecord:
    """Make an op known. The package's own cannot be declared anew: `register(kernel=…)` replaces kernels."""
    if record.name in _records:
        raise UserError.at("TW016", f"there is an op '{record.name}' already", help=f"replace its kernel with tw.graph.register(\"{record.name}\", kernel=…)")
    _records[record.name] = record
    return record


def known_ops() -> dict[str, OpRecord]:
    """The records so far; `ops/table.py` brings those of the package along."""
    return dict(sorted(_records.items()))


def replace_everywhere(record: OpRecord, kernel: Callable[..., Any] | None, node: str = "") -> None:
    """Another kernel for an op in all graphs; None for the record's own again."""
    if kernel is None:
        _replaced.pop((record.name, node), None)
    else:
        check_replacement(record, kernel)
        _replaced[record.name, node] = kernel
    _changes.append(record.name)


def changes() -> int:
    """How often kernels were replaced for all graphs: plans from before are not used."""
    return len(_changes)


def replacement(op: str, node: str, own: Mapping[tuple[str, str], Callable[..., Any]]) -> Callable[..., Any] | None:
    """The kernel that stands in for the record's: the graph's own before that of all graphs, a node's before that of an op."""
    for table in (own, _replaced):
        for key in ((op, node), (op, "")):
            if key in table:
                return table[key]
    return None


def parameter_names(kernel: Callable[..., Any]) -> tuple[str, ...]:
    if isinstance(kernel, Kernel):
        return tuple(kernel.parameter_names)
    return tuple(inspect.signature(kernel).parameters)


def check_replacement(record: OpRecord, kernel: Callable[..., Any]) -> None:
    if not callable(kernel):
        raise UserError.at("TW009", f"the kernel for '{record.name}' is a {type(kernel).__name__}", help="give a kernel, or a function of arrays")
    known = (*record.input_names, *(p.name for p in record.params))
    several = record.variadic
    unknown = [name for name in parameter_names(kernel) if name not in known and not (several and name.startswith(several) and name[len(several) :].isdigit())]
    if unknown:
        name = getattr(kernel, "__name__", "the kernel")
        raise UserError.at("TW016", f"{name} has a parameter '{unknown[0]}', which '{record.name}' does not have", help=f"parameters are found by name: {', '.join(known)}")


def lowered(record: OpRecord, call: NodeCall, replaced: Callable[..., Any] | None) -> Lowered:
    """The kernel of a node and its arguments."""
    found: Any = replaced
    if found is None:
        found = record.kernel if isinstance(record.kernel, Kernel) else record.kernel(call)
    if isinstance(found, Lowered):
        made = found
    else:
        made = Lowered(found)
    arguments = {}
    for name in parameter_names(made.kernel):
        if name in made.arguments:
            arguments[name] = made.arguments[name]
        elif call[name] is not None:
            arguments[name] = call[name]
        else:
            raise call.fail(f"its kernel {getattr(made.kernel, '__name__', '')} has a parameter '{name}' that the node does not have", "TW008")
    return Lowered(made.kernel, arguments, made.results)


def check_param(call_name: str, record: OpRecord, param: OpParam, value: Any) -> Any:
    """The value of a parameter, as the record wants it."""
    types = param.type if isinstance(param.type, tuple) else (param.type,)
    if isinstance(value, np.generic):
        value = value.item()
    if float in types and isinstance(value, int) and not isinstance(value, bool) and int not in types:
        value = float(value)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = " or ".join(t.__name__ for t in types)
        raise UserError.at("TW009", f"node '{call_name}' ({record.name}): '{param.name}' is {value!r}, not {names}")
    return value
