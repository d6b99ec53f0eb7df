"""What names and expressions of an explicit kernel stand for while it is read.

A `Num` is one number of a thread: a constant, or an IR value. Like expressions of other kernels it may be weak (`tree.infer`): a
literal, a loop index or a thread's index takes the dtype of what it meets. `Seq` and `Record` are numbers side by side: tuples, and
structs with named fields; `Simd` is several in one register. `Memory` is an array, `Word` a word of Tilewright (`thread.x`, `gpu_sync`), `Device` a function whose
body takes the place of its calls, `Host` any other Python object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tilewright.base.dtypes import DType, bool_, f64, i64
from tilewright.base.simd import SimdType
from tilewright.ir.nodes import Value
from tilewright.ir.types import Scalar, Tensor, Vec
from tilewright.tree.infer import TypePair

if TYPE_CHECKING:
    from tilewright.frontend.simt_source import FunctionSource
    from tilewright.frontend.simt_state import Scope

Number = int | float | bool


@dataclass(frozen=True)
class Num:
    """A number. `value` is None for a constant that no op has been made for yet."""

    dtype: DType
    weak: str = ""
    value: Value | None = None
    const: Number | None = None

    @property
    def pair(self) -> TypePair:
        return self.dtype, self.weak


@dataclass(frozen=True)
class Seq:
    items: tuple[Val, ...]


@dataclass(frozen=True)
class Record:
    """A struct of numbers: a dataclass or a named tuple. `kind` is its Python class."""

    kind: object
    names: tuple[str, ...]
    items: tuple[Val, ...]

    def get(self, name: str) -> Val | None:
        return self.items[self.names.index(name)] if name in self.names else None


@dataclass(frozen=True)
class Simd:
    """Numbers in one register: `lanes` has a vec as its value, of the kind's dtype and width."""

    kind: SimdType
    lanes: Num


@dataclass(frozen=True)
class Method:
    """`v.sum` of a register, before it is called."""

    owner: Simd
    name: str


@dataclass(frozen=True)
class Memory:
    """An array. `given` are the first indices of `a[i][j]`, already read."""

    name: str
    value: Value
    given: tuple[Value, ...] = ()

    @property
    def type(self) -> Tensor:
        assert isinstance(self.value.type, Tensor)
        return self.value.type


@dataclass(frozen=True)
class Word:
    """A word of the language, with dots: `block.size.x`."""

    name: str


@dataclass(frozen=True, eq=False)
class Device:
    """A function to be put in the place of its calls, and the scope a nested one sees."""

    source: FunctionSource
    node: ast.FunctionDef | ast.Lambda
    name: str
    outer: Scope | None = None


@dataclass(frozen=True, eq=False)
class Host:
    """A Python object that is no number: a module, a class, a dtype."""

    object: object


@dataclass(frozen=True)
class Text:
    text: str


Val = Num | Seq | Record | Simd | Method | Memory | Word | Device | Host | Text
NOTHING = Seq(())
"""What a call without a result gives."""


@dataclass(frozen=True)
class Arguments:
    """What a word was called with."""

    items: tuple[Val, ...]
    named: dict[str, Val] = field(default_factory=dict)


def leaf_type(path: Path, dtype: DType) -> Scalar | Vec:
    """The IR type of a number at that place."""
    return Vec(dtype, path[-1].width) if path and isinstance(path[-1], SimdType) else Scalar(dtype)


def literal(value: Number, default_float: DType = f64) -> Num:
    if isinstance(value, bool):
        return Num(bool_, "", None, value)
    if isinstance(value, int):
        return Num(i64, "int", None, value)
    return Num(default_float, "float", None, float(value))


Path = tuple["int | SimdType", ...]
"""Where in a value a number is; the last step to the lanes of a register is their type."""


def leaves(val: Val, path: Path = ()) -> Iterator[tuple[Path, Num]]:
    """The numbers a value is made of; nothing for arrays and the like."""
    if isinstance(val, Num):
        yield path, val
    elif isinstance(val, Simd):
        yield (*path, val.kind), val.lanes
    elif isinstance(val, Seq | Record):
        for position, item in enumerate(val.items):
            yield from leaves(item, (*path, position))


def is_numbers(val: Val) -> bool:
    """Whether the value is made of numbers alone."""
    if isinstance(val, Seq | Record):
        return all(map(is_numbers, val.items))
    return isinstance(val, Num | Simd)


def rebuilt(val: Val, numbers: Iterator[Num]) -> Val:
    """A value of the same form with these numbers in it."""
    if isinstance(val, Num):
        return next(numbers)
    if isinstance(val, Simd):
        return Simd(val.kind, next(numbers))
    if isinstance(val, Seq | Record):
        return replace(val, items=tuple(rebuilt(item, numbers) for item in val.items))
    return val


def describe(val: Val) -> str:
    """How a message names a value."""
    if isinstance(val, Num):
        if val.const is not None and val.weak:
            return f"the number {val.const}"
        kind = {"int": "an integer", "index": "an index", "float": "a float", "": ""}[val.weak]
        return kind or f"a number of type {val.dtype}"
    if isinstance(val, Seq):
        return f"a tuple of {len(val.items)}" if val.items else "nothing"
    if isinstance(val, Record):
        return f"a {getattr(val.kind, '__name__', 'struct')}"
    if isinstance(val, Simd):
        return f"a value of type {val.kind.__name__}"
    if isinstance(val, Method):
        return f"{val.owner.kind.__name__}.{val.name}"
    if isinstance(val, Memory):
        return f"the array '{val.name}'"
    if isinstance(val, Word):
        return f"tilewright.{val.name}"
    if isinstance(val, Device):
        return f"the function '{val.name}'"
    if isinstance(val, Text):
        return f"the text {val.text!r}"
    return f"a Python {type(val.object).__name__}"
