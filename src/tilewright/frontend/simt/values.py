"""What names and expressions of an explicit kernel stand for while it is read.

A `NumberValue` is one number of a thread: a constant, or an IR value. Like expressions of other kernels it may be weak (`tree.check.infer`): a
literal, a loop index or a thread's index takes the dtype of what it meets. `Seq` and `RecordValue` are numbers side by side: tuples, and
structs with named fields; `Simd` is several in one register. `MemoryValue` is an array, `WordValue` a word of Tilewright (`thread.x`, `gpu_sync`), `DeviceFunction` a function whose
body takes the place of its calls, `Host` any other Python object.

A `SimtScope` has the variables of one function (each call of a device function has one of its own). `save` and `restore` let branches
start from the same state.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tilewright.base.dtypes import DType, bool_, f64, i64
from tilewright.base.simd import SimdType
from tilewright.frontend.simt.source import FunctionSource
from tilewright.frontend.simt.state import Key
from tilewright.ir.nodes import Value
from tilewright.ir.types import Scalar, Tensor, Vec
from tilewright.tree.check.infer import TypePair

Number = int | float | bool


@dataclass(frozen=True)
class NumberValue:
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
class RecordValue:
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
    lanes: NumberValue


@dataclass(frozen=True)
class Method:
    """`v.sum` of a register, before it is called."""

    owner: Simd
    name: str


@dataclass(frozen=True)
class MemoryValue:
    """An array. `given` are the first indices of `a[i][j]`, already read."""

    name: str
    value: Value
    given: tuple[Value, ...] = ()

    @property
    def type(self) -> Tensor:
        assert isinstance(self.value.type, Tensor)
        return self.value.type


@dataclass(frozen=True, eq=False)
class StateValue:
    """An object in memory whose fields are arrays of their own, or such objects. `axes`: how many indices it still takes, where it is an array of
    objects. `single`: the fields that are one number."""

    name: str
    kind: type
    fields: dict[str, MemoryValue | StateValue]
    single: frozenset[str]
    axes: int = 0


@dataclass(frozen=True)
class WordValue:
    """A word of the language, with dots: `block.size.x`."""

    name: str


@dataclass(frozen=True, eq=False)
class DeviceFunction:
    """A function to be put in the place of its calls, and the scope a nested one sees."""

    source: FunctionSource
    node: ast.FunctionDef | ast.Lambda
    name: str
    outer: SimtScope | None = None


@dataclass(frozen=True, eq=False)
class Host:
    """A Python object that is no number: a module, a class, a dtype."""

    object: object


@dataclass(frozen=True)
class TextValue:
    text: str


Val = NumberValue | Seq | RecordValue | Simd | Method | MemoryValue | StateValue | WordValue | DeviceFunction | Host | TextValue
NOTHING = Seq(())
"""What a call without a result gives."""


@dataclass(frozen=True)
class Arguments:
    """What a word was called with."""

    items: tuple[Val, ...]
    named: dict[str, Val] = field(default_factory=dict)


@dataclass(frozen=True)
class SimtState:
    """What a scope knows at one point."""

    variables: dict[str, Val]
    missing: frozenset[str]
    dead: bool


@dataclass(eq=False)
class SimtScope:
    """The variables of one function while it is read."""

    key: Key
    source: FunctionSource
    outer: SimtScope | None = None
    """Of a nested function: the scope around it, whose variables it can read."""
    node: ast.FunctionDef | ast.Lambda | None = None
    """The function, where it is not all of its source."""
    variables: dict[str, Val] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    """Variables that have a value on some ways to this point only."""
    dead: bool = False
    """Whether this point is never reached."""
    loops: list[OpenLoop] = field(default_factory=list)
    """The loops around this point."""

    def save(self) -> SimtState:
        return SimtState(dict(self.variables), frozenset(self.missing), self.dead)

    def restore(self, state: SimtState) -> None:
        self.variables, self.missing, self.dead = dict(state.variables), set(state.missing), state.dead


@dataclass(eq=False)
class OpenLoop:
    """A loop that is being read."""

    number: int
    left: list[frozenset[str]] = field(default_factory=list)
    """For each `break`: the names that have a value there."""


def leaf_type(path: Path, dtype: DType) -> Scalar | Vec:
    """The IR type of a number at that place."""
    return Vec(dtype, path[-1].width) if path and isinstance(path[-1], SimdType) else Scalar(dtype)


def literal(value: Number, default_float: DType = f64) -> NumberValue:
    if isinstance(value, bool):
        return NumberValue(bool_, "", None, value)
    if isinstance(value, int):
        return NumberValue(i64, "int", None, value)
    return NumberValue(default_float, "float", None, float(value))


Path = tuple["int | SimdType", ...]
"""Where in a value a number is; the last step to the lanes of a register is their type."""


def leaves(val: Val, path: Path = ()) -> Iterator[tuple[Path, NumberValue]]:
    """The numbers a value is made of; nothing for arrays and the like."""
    if isinstance(val, NumberValue):
        yield path, val
    elif isinstance(val, Simd):
        yield (*path, val.kind), val.lanes
    elif isinstance(val, Seq | RecordValue):
        for position, item in enumerate(val.items):
            yield from leaves(item, (*path, position))


def is_numbers(val: Val) -> bool:
    """Whether the value is made of numbers alone."""
    if isinstance(val, Seq | RecordValue):
        return all(map(is_numbers, val.items))
    return isinstance(val, NumberValue | Simd)


def rebuilt(val: Val, numbers: Iterator[NumberValue]) -> Val:
    """A value of the same form with these numbers in it."""
    if isinstance(val, NumberValue):
        return next(numbers)
    if isinstance(val, Simd):
        return Simd(val.kind, next(numbers))
    if isinstance(val, Seq | RecordValue):
        return replace(val, items=tuple(rebuilt(item, numbers) for item in val.items))
    return val


def describe(val: Val) -> str:
    """How a message names a value."""
    if isinstance(val, NumberValue):
        if val.const is not None and val.weak:
            return f"the number {val.const}"
        kind = {"int": "an integer", "index": "an index", "float": "a float", "": ""}[val.weak]
        return kind or f"a number of type {val.dtype}"
    if isinstance(val, Seq):
        return f"a tuple of {len(val.items)}" if val.items else "nothing"
    if isinstance(val, RecordValue):
        return f"a {getattr(val.kind, '__name__', 'struct')}"
    if isinstance(val, Simd):
        return f"a value of type {val.kind.__name__}"
    if isinstance(val, Method):
        return f"{val.owner.kind.__name__}.{val.name}"
    if isinstance(val, MemoryValue):
        return f"the array '{val.name}'"
    if isinstance(val, StateValue):
        return f"{'an array of' if val.axes else 'a'} {val.kind.__name__}"
    if isinstance(val, WordValue):
        return f"tilewright.{val.name}"
    if isinstance(val, DeviceFunction):
        return f"the function '{val.name}'"
    if isinstance(val, TextValue):
        return f"the text {val.text!r}"
    return f"a Python {type(val.object).__name__}"
