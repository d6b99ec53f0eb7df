"""What a struct is made of. In: a structured dtype of NumPy; out: a `StructLayout`, names and dtypes of fields, nested ones too.

Code never sees a struct: each of its numbers is a variable or a strided array of its own (`split`). So only names and dtypes count in a tree. Where the
fields lie counts at the border of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field as dataclass_field

import numpy as np

from tilewright.base.dtypes import DType, complex_from_numpy, from_numpy
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.source import NOWHERE, Span

Path = tuple[str, ...]
"""The names that lead to a number inside a struct: `("place", "x")`."""


@record
class StructField:
    """One field: a number or a struct."""

    name: str
    type: DType | StructLayout
    default: bool | int | float = 0
    """What it is where a struct is made without it."""


@record
class StructLayout:
    """The fields of a struct, in order. Two are the same when names and dtypes are."""

    fields: tuple[StructField, ...]
    name: str = ""
    """That of its class; '' of a dtype of NumPy."""
    numpy: np.dtype | None = dataclass_field(default=None, compare=False, repr=False)
    """How it lies in memory; None where nobody said."""

    def field(self, name: str) -> StructField | None:
        return next((f for f in self.fields if f.name == name), None)

    def leaves(self) -> Iterator[tuple[Path, DType]]:
        """Every number inside, with the names that lead to it."""
        for field in self.fields:
            if isinstance(field.type, StructLayout):
                yield from (((field.name, *path), dtype) for path, dtype in field.type.leaves())
            else:
                yield (field.name,), field.type

    def fits(self, other: StructLayout) -> bool:
        """Whether fields have the same names and dtypes."""
        return tuple(self.leaves()) == tuple(other.leaves())

    def __str__(self) -> str:
        inside = ", ".join(f"{f.name}: {f.type}" for f in self.fields)
        return f"{self.name or 'struct'}({inside})"


def layout_of(
    dtype: np.dtype, what: str, span: Span = NOWHERE, name: str = "", defaults: Mapping[str, object] | None = None
) -> StructLayout:
    """The layout of a structured dtype. `what` has it, in messages. Raises `UserError` for fields that are no numbers."""
    assert dtype.fields is not None and dtype.names is not None
    if not dtype.names:
        raise UserError.at("TW009", f"{what} is a struct without fields", span)
    fields: list[StructField] = []
    end, before = 0, ""
    for place, field in sorted((dtype.fields[n][1], n) for n in dtype.names):
        if place < end:
            raise UserError.at(
                "TW009",
                f"fields '{before}' and '{field}' of {what} overlap in memory, at byte {place}",
                span,
                "pass the fields as arguments of their own",
            )
        end, before = place + dtype.fields[field][0].itemsize, field
    for field in dtype.names:
        inner = dtype.fields[field][0]
        whose = f"field '{field}' of {what}"
        if inner.subdtype is not None:
            raise UserError.at(
                "TW009", f"{whose} is an array of shape {list(inner.shape)}; fields of structs in kernels are single numbers, or structs of them", span,
                f"pass it as an argument of its own: x[{field!r}]",
            )  # fmt: skip
        default = (defaults or {}).get(field, 0)
        if inner.names is not None:
            fields.append(StructField(field, layout_of(inner, whose, span)))
            continue
        found = from_numpy(inner) or complex_from_numpy(inner)
        if found is None:
            why = "has the other byte order" if not inner.isnative else "is not supported"
            raise UserError.at(
                "TW009",
                f"{whose} has dtype {inner}, which {why}",
                span,
                "fields are bool, integers, floats and complex numbers",
            )
        fields.append(StructField(field, found, default if isinstance(default, bool | int | float) else 0))
    return StructLayout(tuple(fields), name, dtype)
