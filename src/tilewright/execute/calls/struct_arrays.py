"""Structs at the border of a call. In: structured arrays of NumPy and state objects; out: strided arrays of their fields, and results the other way round.

Compiled code knows numbers only (`tree/structs`). A field of an array is a view of it, so nothing is copied, but where a field does not lie as its dtype
wants: such a field is read from a copy, written through one where it is `out=`, and refused where the kernel writes it in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.base.errors import Diagnostics, UserError
from tilewright.base.source import Span
from tilewright.execute.speed_warnings import copied
from tilewright.frontend.critical.state import NativeState
from tilewright.tree.structs.layout import Path, StructLayout, layout_of
from tilewright.tree.structs.split import SplitFunction, annotated_layout, has_structs, split_structs
from tilewright.tree.syntax import Function

CALL_WORDS = ("out", "device", "tune", "asynchronous", "stream")
"""Keywords of calls that are no parameters."""


def is_struct(value: object) -> bool:
    """Whether it is a struct, or an array of them."""
    return isinstance(value, NativeState) or (isinstance(value, np.ndarray | np.void) and value.dtype.names is not None)


def any_struct(values: Iterable[object]) -> bool:
    return any(any_struct(v) if isinstance(v, list | tuple) else is_struct(v) for v in values)


def names_structs(function: Function) -> bool:
    """Whether every call of the kernel has structs, as a parameter or a result."""
    return has_structs(function)


@dataclass(frozen=True)
class StructForm:
    """What the structs of a call are: parameters with their dtypes, and whether each is one struct."""

    params: tuple[tuple[str, np.dtype, bool], ...]


@dataclass(frozen=True)
class StructCalls:
    """A kernel without its structs, and how calls become calls of it."""

    split: SplitFunction
    layouts: Mapping[str, StructLayout]

    @property
    def names(self) -> list[str]:
        return [p.name for p in self.split.function.params]

    def signature(self) -> inspect.Signature:
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kinds) for name in self.names])

    def arguments(self, values: Mapping[str, object]) -> list[object]:
        """The arguments in order, with the fields of structs."""
        fields = dict(self.split.params)
        written = {p.name for p in self.split.function.params if p.in_place}
        found: list[object] = []
        for name, value in values.items():
            if name not in fields:
                found.append(value)
                continue
            array = value.numpy() if isinstance(value, NativeState) else value
            assert isinstance(array, np.ndarray | np.void)
            for path, leaf in fields[name]:
                part = _at(array, path)
                if leaf in written:
                    _check_place(name, array, path, part, self.split.function.span)
                elif part.ndim and not _lies_well(part):
                    copied(
                        f"{name}[{'.'.join(path)!r}]",
                        part,
                        self.split.function.span,
                        _why(array, path, part),
                        "make the dtype with numpy.dtype(…, align=True)",
                    )
                    part = np.ascontiguousarray(part)
                found.append(part if part.ndim else part[()])
        return found

    def given(self, out: object) -> tuple[object, list[tuple[np.ndarray, np.ndarray]]]:
        """`out=` with arrays of fields, and what has to be copied where afterwards."""
        results, span, name = self.split.results, self.split.function.span, self.split.function.name
        several = list(out) if isinstance(out, list | tuple) else [out]
        if len(several) != len(results):
            raise UserError.at("TW018", f"out= has {len(several)} array(s), but {name} returns {len(results)}", span)
        flat: list[object] = []
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        for array, layout in zip(several, results, strict=True):
            if layout is None:
                flat.append(array)
                continue
            if not isinstance(array, np.ndarray) or array.dtype.names is None:
                got = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
                raise UserError.at(
                    "TW018",
                    f"out= of {name} is {got}, and the result is {layout}",
                    span,
                    "pass an array of that structured dtype",
                )
            found = layout_of(array.dtype, "out=", span)
            if not found.fits(layout):
                raise UserError.at(
                    "TW018",
                    f"out= of {name} is {found}, and the result is {layout}",
                    span,
                    "pass an array of that structured dtype",
                )
            for path, _ in layout.leaves():
                part = _at(array, path)
                if not _lies_well(part):
                    copies.append((part, np.empty(part.shape, part.dtype)))
                    part = copies[-1][1]
                flat.append(part)
        return (flat[0] if len(flat) == 1 else tuple(flat)), copies

    def gathered(self, result: object) -> object:
        """Results with structs made of their fields."""
        results = self.split.results
        if not any(layout is not None for layout in results):
            return result
        flat = iter(result if isinstance(result, tuple) else (result,))
        made: list[object] = []
        for layout in results:
            if layout is None:
                made.append(next(flat))
                continue
            parts = [(path, next(flat)) for path, _ in layout.leaves()]
            made.append(_gather(layout, parts, self.split.function.span))
        return made[0] if len(made) == 1 else tuple(made)


def form_of(function: Function, values: Mapping[str, object]) -> StructForm:
    """What the structs of a call are. Raises `UserError` where that is not what annotations say."""
    found: list[tuple[str, np.dtype, bool]] = []
    for param in function.params:
        value = values[param.name]
        said = annotated_layout(param.type)
        if not is_struct(value):
            if said is not None and not (value is None and param.optional):
                got = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
                raise UserError.at("TW009", f"argument '{param.name}' must be {said[0]}, got {got}", param.span)
            continue
        array = value.numpy() if isinstance(value, NativeState) else value
        assert isinstance(array, np.ndarray | np.void)
        found.append((param.name, array.dtype, array.ndim == 0))
    return StructForm(tuple(found))


def calls_of(function: Function, form: StructForm) -> StructCalls:
    """The kernel for structs of that form."""
    layouts: dict[str, StructLayout] = {}
    params = {p.name: p for p in function.params}
    for name, dtype, single in form.params:
        layout = layout_of(dtype, f"argument '{name}'", function.span)
        said = annotated_layout(params[name].type)
        if said is not None and not said[0].fits(layout):
            raise UserError.at(
                "TW009",
                f"argument '{name}' must be {said[0]}, got {layout}",
                params[name].span,
                "fields need the same names and dtypes, in the same order",
            )
        if said is not None and single != (said[1] == ()):
            got, want = ("one struct", "an array of them") if single else ("an array of structs", "one struct")
            raise UserError.at("TW009", f"argument '{name}' is {got}, and must be {want}", params[name].span)
        if single and params[name].in_place:
            raise UserError.at(
                "TW009",
                f"argument '{name}' is written in place and must be an array of structs, got one",
                params[name].span,
                "pass an array of one struct",
            )
        layouts[name] = layout
    sink = Diagnostics()
    split = split_structs(function, layouts, sink, {name for name, _, single in form.params if single})
    sink.raise_if_errors()
    return StructCalls(split, layouts)


def _at(array: np.ndarray | np.void, path: Path) -> np.ndarray:
    part = np.asarray(array) if isinstance(array, np.void) else array.view(np.ndarray)
    for name in path:
        part = part[name]
    return part


def _lies_well(part: np.ndarray) -> bool:
    return part.flags.aligned and not any(s % part.itemsize for s in part.strides)


def _check_place(name: str, array: np.ndarray | np.void, path: Path, part: np.ndarray, span: Span) -> None:
    """Refuse a field that is written in place and does not lie as its dtype wants."""
    if not _lies_well(part):
        raise UserError.at(
            "TW018",
            f"field '{'.'.join(path)}' of argument '{name}' is written in place, and {_why(array, path, part)}",
            span,
            "make the dtype with numpy.dtype(…, align=True)",
        )


def _why(array: np.ndarray | np.void, path: Path, part: np.ndarray) -> str:
    """Why a field has to be copied."""
    offset, dtype = 0, array.dtype
    for step in path:
        assert dtype.fields is not None
        dtype, place = dtype.fields[step][:2]
        offset += place
    return (
        f"it is not aligned as {part.dtype} wants: it lies {offset} bytes into structs of {array.dtype.itemsize} bytes"
    )


def _gather(layout: StructLayout, parts: Sequence[tuple[Path, object]], span: Span) -> object:
    """One result, of the arrays of its fields."""
    assert layout.numpy is not None
    if not all(isinstance(part, np.ndarray | np.generic) for _, part in parts):
        other = next(type(part).__name__ for _, part in parts if not isinstance(part, np.ndarray | np.generic))
        raise UserError.at(
            "TW009",
            f"a result is {layout}, and its fields came as {other}: structs are host arrays",
            span,
            "pass NumPy arrays, or return the fields",
        )
    whole = np.zeros(np.asarray(parts[0][1]).shape, layout.numpy)
    for path, part in parts:
        _at(whole, path)[...] = part
    return whole if whole.ndim else whole[()]
