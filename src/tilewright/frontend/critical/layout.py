"""How a state object lies in memory. In: a class's annotations; out: fields with offsets, as a C compiler would place them.

A field is a number (`tw.i64`, `int`, `float`, `bool`), an array of numbers of a fixed shape (`tw.f64[64]`), another state, or an array of states
(`Level[8]`). `int` is an i64, `float` an f64. Every field is aligned to its own size, the whole to the largest of its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, FixedArray, bool_, f64, from_numpy, i64
from tilewright.base.errors import UserError

PYTHON: Mapping[type, DType] = {bool: bool_, int: i64, float: f64}
"""What Python's own types are in memory."""


@dataclass(frozen=True)
class StateField:
    """One field. Either `dtype` or `state` is given; `shape` is () for a single one."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: DType | None = None
    state: type | None = None
    layout: StateLayout | None = None
    """Of `state`."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        if self.dtype is not None:
            return self.dtype.itemsize
        assert self.layout is not None
        return self.layout.size

    @property
    def size(self) -> int:
        return self.itemsize * prod(self.shape)


@dataclass(frozen=True)
class StateLayout:
    """All fields of a class, in the order of memory."""

    name: str
    fields: tuple[StateField, ...]
    size: int
    align: int

    def numpy(self) -> np.dtype[Any]:
        """The structured dtype of NumPy that lies the same."""
        formats: list[Any] = []
        for field in self.fields:
            if field.dtype is not None:
                formats.append((field.dtype.numpy, field.shape))
            else:
                assert field.layout is not None
                formats.append((field.layout.numpy(), field.shape))
        return np.dtype({"names": [f.name for f in self.fields], "formats": formats, "offsets": [f.offset for f in self.fields], "itemsize": self.size})


def said_type(annotation: object) -> object:
    """What an annotation says of memory: of `Annotated[np.ndarray, tw.f64[64]]`, which type checkers take for an array, the part behind the comma."""
    said = getattr(annotation, "__metadata__", None)
    return said[0] if isinstance(said, tuple) and said else annotation


def number_type(annotation: object) -> DType | None:
    """The dtype that an annotation names; None where it names none that state objects and critical functions take."""
    found = annotation if isinstance(annotation, DType) else PYTHON.get(annotation) if isinstance(annotation, type) else None
    if found is None and isinstance(annotation, type) and issubclass(annotation, np.generic):
        found = from_numpy(np.dtype(annotation))
    if found is None or found.is_packed or found.is_small_float:
        return None
    return found


def lay_out(name: str, annotations: Mapping[str, object], align: int = 1) -> StateLayout:
    """Fields one after the other. Raises `UserError` for annotations that are no field."""
    fields: list[StateField] = []
    end = 0
    for field, said in annotations.items():
        annotation = said_type(said)
        element: Any = annotation.element if isinstance(annotation, FixedArray) else annotation
        shape = annotation.shape if isinstance(annotation, FixedArray) else ()
        dtype = number_type(element)
        layout = getattr(element, "__layout__", None) if isinstance(element, type) else None
        if dtype is None and not isinstance(layout, StateLayout):
            shown = getattr(annotation, "__name__", None) or repr(annotation)
            raise UserError.at(
                "TW009", f"field '{field}' of {name} is annotated as {shown}",
                help="fields are bool, int, float, dtypes of up to 64 bits such as tw.i32, fixed arrays such as tw.f64[64], and state classes",
            )  # fmt: skip
        own = dtype.itemsize if dtype is not None else layout.align  # type: ignore[union-attr]
        offset = -(-end // own) * own
        made = StateField(field, offset, shape, dtype, None if dtype is not None else element, None if dtype is not None else layout)
        fields.append(made)
        end = offset + made.size
        align = max(align, own)
    return StateLayout(name, tuple(fields), -(-max(end, 1) // align) * align, align)
