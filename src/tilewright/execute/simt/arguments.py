"""Arguments of explicit kernels: what a launch was given in, leaves with their types out.

A leaf is an array or a number with the name of the IR's parameter. Structs have a leaf for each field. Annotations are checked:
an array of another dtype, a float for an integer or a host object that is no array is an error that names the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.source import Span
from tilewright.execute.calls.arguments import Number, read_argument
from tilewright.frontend.simt.kernels import NO_DEFAULT, Parameter, SimtArg, StructArg
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.tree.typed import ArrayArg, ScalarArg


@record
class Leaf:
    """One parameter of the IR: a name and what was given for it."""

    name: str
    value: np.ndarray | DeviceArray | Number


def bind_parameters(
    name: str, parameters: Sequence[Parameter], args: tuple[object, ...], named: Mapping[str, object], span: Span
) -> list[object]:
    """The values of all parameters in order, as Python binds them."""
    names = [p.name for p in parameters]
    if len(args) > len(names):
        raise UserError.at("TW016", f"{name} takes {len(names)} argument(s) ({', '.join(names)}), got {len(args)}", span)
    values = dict(zip(names, args, strict=False))
    for key, value in named.items():
        if key not in names:
            raise UserError.at("TW016", f"{name} has no argument '{key}'", span, f"its arguments are {', '.join(names)}")
        if key in values:
            raise UserError.at("TW016", f"{name} got '{key}' twice", span)
        values[key] = value
    for parameter in parameters:
        if parameter.default is not NO_DEFAULT:
            values.setdefault(parameter.name, parameter.default)
    missing = [n for n in names if n not in values]
    if missing:
        raise UserError.at("TW008", f"{name} is missing {', '.join(map(repr, missing))}", span)
    return [values[n] for n in names]


@record
class ArgumentPart:
    """A number or an array that was given, with its parameter: one of the kernel's, or a field of one."""

    name: str
    parameter: Parameter
    value: object


def split_values(parameters: Sequence[Parameter], values: Sequence[object]) -> list[ArgumentPart]:
    """What was given, structs as their fields."""
    parts: list[ArgumentPart] = []
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.form != "struct":
            parts.append(ArgumentPart(parameter.name, parameter, value))
            continue
        assert parameter.kind is not None
        if not isinstance(value, parameter.kind):
            raise UserError.at(
                "TW009", f"'{parameter.name}' is a {parameter.kind.__name__}, got a {type(value).__name__}", parameter.span
            )
        parts += [ArgumentPart(f"{parameter.name}.{field.name}", field, getattr(value, field.name)) for field in parameter.fields]
    return parts


def read_leaves(parameters: Sequence[Parameter], parts: Sequence[ArgumentPart], gpu: bool) -> tuple[list[Leaf], list[SimtArg]]:
    """Every leaf, and the type of every parameter. Foreign device arrays must be wrapped before."""
    leaves: list[Leaf] = []
    found = iter([_read(part, leaves, gpu) for part in parts])
    args: list[SimtArg] = []
    for parameter in parameters:
        if parameter.kind is not None:
            args.append(StructArg(parameter.kind, tuple((field.name, next(found)) for field in parameter.fields)))
        else:
            args.append(next(found))
    return leaves, args


def _read(part: ArgumentPart, leaves: list[Leaf], gpu: bool) -> ArrayArg | ScalarArg:
    parameter, name, value = part.parameter, part.name, part.value
    if parameter.form == "number" and parameter.dtype is not None:
        leaves.append(Leaf(name, checked_number(name, value, parameter.dtype, parameter.span)))
        return ScalarArg(parameter.dtype)
    argument = read_argument(name, value, parameter.span, gpu)
    if isinstance(argument.spec, ScalarArg):
        if parameter.form in ("buffer", "array"):
            raise UserError.at("TW009", f"'{name}' is an array, got {value!r}", parameter.span)
        assert argument.value is not None
        leaves.append(Leaf(name, argument.value))
        return argument.spec
    array = argument.value
    assert isinstance(array, np.ndarray | DeviceArray) and isinstance(argument.spec, ArrayArg)
    if parameter.form == "number":
        raise UserError.at("TW009", f"'{name}' is a number, got an array of shape {list(array.shape)}", parameter.span)
    dtype = argument.spec.dtype
    if parameter.dtype is not None and dtype is not parameter.dtype:
        raise UserError.at(
            "TW009",
            f"'{name}' holds {parameter.dtype}, got an array of {dtype}",
            parameter.span,
            "convert it with .astype(...) before the launch",
        )
    if parameter.form == "buffer":
        leaves.append(Leaf(name, _flat(array, name, parameter.span)))
        return ArrayArg(dtype, 1, None, argument.spec.align)
    leaves.append(Leaf(name, array))
    return argument.spec


def _flat(array: np.ndarray | DeviceArray, name: str, span: Span) -> np.ndarray | DeviceArray:
    """A buffer is one row."""
    contiguous = array.is_contiguous if isinstance(array, DeviceArray) else array.flags.c_contiguous
    if not contiguous:
        raise UserError.at(
            "TW009", f"'{name}' is a GpuBuffer, but the array of shape {list(array.shape)} has gaps or another order", span,
            "annotate it as tw.Array, which takes strides, or copy it first",
        )  # fmt: skip
    return array if array.ndim == 1 else array.reshape(-1)


def checked_number(name: str, value: object, dtype: DType, span: Span) -> Number:
    """A number for a parameter of that dtype."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise UserError.at("TW009", f"'{name}' is {dtype}, got a {type(value).__name__}", span)
    if dtype.is_float:
        return float(value)
    if isinstance(value, float):
        raise UserError.at("TW006", f"'{name}' is {dtype}, got {value!r}", span, "convert it with int(...)")
    if dtype.is_bool:
        return bool(value)
    if not dtype.min_value <= int(value) <= dtype.max_value:
        raise UserError.at("TW006", f"'{name}' is {dtype}, which cannot hold {value}", span)
    return int(value)
