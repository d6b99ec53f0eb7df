"""`tw.State`: objects whose fields lie in native memory.

    class Book(tw.State):
        bid: tw.i64
        ask: tw.i64 = 101
        sizes: tw.i32[16]

`book.bid` reads and writes the memory, `book.sizes` is a NumPy view of it, and a critical function that is given the object gets its address. A
state inside a state is a view of the outer one's memory.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import numpy as np

from tilewright.base.dtypes import FixedArray, checked_shape
from tilewright.base.errors import UserError
from tilewright.frontend.critical.layout import StateField, StateLayout, lay_out

StateT = TypeVar("StateT", bound="NativeState")
LINE = 64
"""Bytes that a new object's memory is aligned to: a line of the cache."""


class NativeState:
    """Base of classes whose annotated fields lie in native memory. `State(value, …, field=value, …)` makes one; what is not given is its default, or zero.

    Fields are numbers, fixed arrays (`tw.f64[64]`), other states and arrays of them (`Level[8]`). `numpy()` is a structured NumPy view of all of
    it. Reading a number gives Python's int, float or bool; writing one that does not fit is an error, and nothing is written.
    """

    __slots__ = ("__weakref__", "_memory")
    # The first slot behind the object's header: machine code reads the array there, and the array's data pointer.

    __layout__: ClassVar[StateLayout] = StateLayout("State", (), 1, 1)
    __defaults__: ClassVar[Mapping[str, object]] = {}
    dtype: ClassVar[np.dtype[Any]] = np.dtype([])
    """The structured dtype of NumPy that lies the same: `np.zeros(n, Particle.dtype)`, also `np.zeros(n, Particle)`."""
    __critical__: ClassVar[Mapping[str, Any]] = {}
    """Functions that stand for its methods in critical functions, where those of Python are others."""
    _memory: np.ndarray

    def __init_subclass__(cls, *, align: int = 1, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if not isinstance(align, int) or align < 1 or align & (align - 1) or align > 4096:
            raise UserError.at("TW009", f"the alignment of {cls.__name__} is {align!r}", help="give a power of two up to 4096")
        frame = sys._getframe(1)
        found: dict[str, object] = {}
        for parent in reversed(cls.__mro__[1:]):
            layout = parent.__dict__.get("__layout__")
            if isinstance(layout, StateLayout):
                found |= {f.name: _annotation(f) for f in layout.fields}
        own = {name: _evaluated(cls, name, text, frame.f_globals, frame.f_locals) for name, text in _own_annotations(cls).items()}
        for name in own:
            if name.startswith("_") or hasattr(NativeState, name):
                raise UserError.at("TW009", f"'{name}' cannot be a field of {cls.__name__}", help="names that begin with '_', and those of tw.State, are taken")
        found |= own
        parents = [parent.__layout__.align for parent in cls.__bases__ if issubclass(parent, NativeState)]
        cls.__layout__ = lay_out(cls.__name__, found, max(align, *parents))
        cls.dtype = cls.__layout__.numpy()
        cls.__defaults__ = {**cls.__defaults__, **{name: cls.__dict__[name] for name in own if name in cls.__dict__}}
        for field in cls.__layout__.fields:
            setattr(cls, field.name, _StateMember(field))
        for name in cls.__defaults__:
            _check_value(cls, cls.__layout__, name, cls.__defaults__[name])

    def __init__(self, *fields: Any, **values: Any) -> None:
        layout = self.__layout__
        if len(fields) > len(layout.fields):
            raise UserError.at("TW009", f"{layout.name} has {len(layout.fields)} fields, got {len(fields)} values")
        for field, value in zip(layout.fields, fields, strict=False):
            if field.name in values:
                raise UserError.at("TW009", f"field '{field.name}' of {layout.name} is given twice", help="give it by its place or by its name")
            values[field.name] = value
        align = max(LINE, layout.align)
        raw = np.zeros(layout.size + align, np.uint8)
        start = -raw.__array_interface__["data"][0] % align
        object.__setattr__(self, "_memory", raw[start : start + layout.size])
        for name in values:
            if all(field.name != name for field in layout.fields):
                raise self._unknown(name)
        for name, value in {**self.__defaults__, **values}.items():
            setattr(self, name, value)

    def __class_getitem__(cls, shape: int | tuple[int, ...]) -> FixedArray:
        """`Level[8]`: an array of such objects, as a field of another."""
        return FixedArray(cls, checked_shape(shape))

    def __setattr__(self, name: str, value: object) -> None:
        if not isinstance(getattr(type(self), name, None), _StateMember):
            raise self._unknown(name)
        object.__setattr__(self, name, value)

    @classmethod
    def _unknown(cls, name: str) -> UserError:
        known = ", ".join(f.name for f in cls.__layout__.fields) or "none"
        error = UserError.at("TW002", f"{cls.__name__} has no field '{name}'", help=f"its fields are {known}")
        assert isinstance(error, UserError)
        return error

    @classmethod
    def view(cls, memory: np.ndarray) -> Any:
        """An object over memory that is there already: a contiguous array of bytes, as long as the object and aligned as it needs."""
        layout = cls.__layout__
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous or not memory.flags.writeable or memory.nbytes != layout.size:
            raise UserError.at("TW009", f"{cls.__name__} takes {layout.size} writable bytes side by side", help="give a NumPy array of uint8")
        if memory.__array_interface__["data"][0] % layout.align:
            raise UserError.at("TW009", f"{cls.__name__} needs memory aligned to {layout.align} bytes")
        made = cls.__new__(cls)
        object.__setattr__(made, "_memory", memory)
        return made

    def numpy(self) -> np.ndarray:
        """A structured array without axes over the same memory."""
        found: np.ndarray = self._memory.view(self.__layout__.numpy())[0:1].reshape(())
        return found

    @property
    def address(self) -> int:
        """Where the object lies."""
        return int(self._memory.__array_interface__["data"][0])

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return self.__layout__.size

    def copy(self) -> Any:
        """Another object with the same values."""
        made = type(self)()
        made._memory[:] = self._memory
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), self._memory.tobytes())

    def __repr__(self) -> str:
        shown = []
        for field in self.__layout__.fields:
            value = getattr(self, field.name)
            shown.append(f"{field.name}={value if not field.shape else f'<{_annotation(field)!r}>'}")
        return f"{type(self).__name__}({', '.join(shown)})"


State = NativeState
"""The name that `tilewright` offers."""


class StateArray(Generic[StateT]):
    """Objects side by side, as a field of another. `array[i]` is one of them, `array.price` a NumPy view of that field of all."""

    __slots__ = ("_kind", "_memory", "_shape")

    def __init__(self, kind: type[StateT], memory: np.ndarray, shape: tuple[int, ...]) -> None:
        self._kind, self._memory, self._shape = kind, memory, shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, index: int | tuple[int, ...]) -> StateT:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) != len(self._shape):
            raise UserError.at("TW003", f"an array of {self._kind.__name__} with {len(self._shape)} axes takes as many indices, got {len(parts)}")
        at = 0
        for part, extent in zip(parts, self._shape, strict=True):
            if not -extent <= part < extent:
                raise IndexError(f"index {part} is outside: the array has {extent}")
            at = at * extent + part % extent
        size = self._kind.__layout__.size
        found: StateT = self._kind.view(self._memory[at * size : (at + 1) * size])
        return found

    def numpy(self) -> np.ndarray:
        """A structured array over the same memory."""
        found: np.ndarray = self._memory.view(self._kind.__layout__.numpy()).reshape(self._shape)
        return found

    def __getattr__(self, name: str) -> np.ndarray:
        if all(f.name != name for f in self._kind.__layout__.fields):
            raise AttributeError(f"{self._kind.__name__} has no field '{name}'")
        found: np.ndarray = self.numpy()[name]
        return found

    def __repr__(self) -> str:
        return f"<{FixedArray(self._kind, self._shape)!r}>"


class _StateMember:
    """A field as an attribute of the class."""

    def __init__(self, field: StateField) -> None:
        self.field = field

    def _view(self, owner: NativeState) -> np.ndarray:
        field = self.field
        assert field.dtype is not None
        return np.ndarray(field.shape, field.dtype.numpy, buffer=owner._memory, offset=field.offset)

    def __get__(self, owner: NativeState | None, kind: type) -> Any:
        if owner is None:
            return self
        field = self.field
        if field.dtype is not None:
            found = self._view(owner)
            return found if field.shape else found.item()
        assert field.state is not None
        part = owner._memory[field.offset : field.offset + field.size]
        return StateArray(field.state, part, field.shape) if field.shape else field.state.view(part)  # type: ignore[attr-defined]

    def __set__(self, owner: NativeState, value: object) -> None:
        checked = _check_value(type(owner), owner.__layout__, self.field.name, value)
        field = self.field
        if field.dtype is not None:
            self._view(owner)[...] = checked
            return
        assert isinstance(checked, NativeState)
        owner._memory[field.offset : field.offset + field.size] = checked._memory


def _check_value(kind: type, layout: StateLayout, name: str, value: object) -> Any:
    """The value as it can be written to a field. Raises `UserError` otherwise."""
    field = next(f for f in layout.fields if f.name == name)
    what = f"field '{name}' of {kind.__name__}"
    if field.dtype is None:
        if field.shape or not isinstance(value, NativeState) or type(value) is not field.state:
            _refuse(f"{what} is {_annotation(field)!r}" if field.shape else f"{what} is a {field.state.__name__ if field.state else ''}", value, "set the fields of its objects one by one" if field.shape else "")
        return value
    given = np.asarray(value)
    if given.dtype.kind not in "biuf" or (given.ndim and not field.shape):
        _refuse(f"{what} is {_annotation(field)!r}" if field.shape else f"{what} is {field.dtype}", value)
    dtype = field.dtype
    if dtype.is_int or dtype.is_bool:
        if given.dtype.kind == "f":
            _refuse(f"{what} is {dtype}", value, "convert it: int(...)")
        if given.size and dtype.is_int and (int(given.min()) < dtype.min_value or int(given.max()) > dtype.max_value):
            _refuse(f"{what} is {dtype}, which holds {dtype.min_value} to {dtype.max_value}", value)
        if dtype.is_bool and given.dtype.kind != "b":
            _refuse(f"{what} is bool", value)
    try:
        return np.broadcast_to(given, field.shape)
    except ValueError:
        _refuse(f"{what} is {_annotation(field)!r}", value)


def _refuse(what: str, value: object, help: str = "") -> NoReturn:
    shown = f"an array of shape {list(value.shape)} of {value.dtype}" if isinstance(value, np.ndarray) else repr(value)
    raise UserError.at("TW009", f"{what}, got {shown}", help=help)


def _annotation(field: StateField) -> object:
    element = field.dtype if field.dtype is not None else field.state
    return FixedArray(element, field.shape) if field.shape else element


def _own_annotations(cls: type) -> dict[str, object]:
    return {name: said for name, said in inspect.get_annotations(cls).items() if "ClassVar" not in str(said)}


def _evaluated(cls: type, name: str, annotation: object, names: Mapping[str, object], local: Mapping[str, object]) -> object:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(names), dict(local))
    except Exception as error:
        raise UserError.at("TW009", f"the annotation '{annotation}' of field '{name}' of {cls.__name__} cannot be read: {error}") from None


def _restored(kind: type[NativeState], data: bytes) -> NativeState:
    made = kind()
    made._memory[:] = np.frombuffer(data, np.uint8)
    return made
