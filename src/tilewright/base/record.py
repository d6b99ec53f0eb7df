"""`@record`: frozen dataclasses that cost nothing to define.

`dataclasses` writes and compiles code for each class, half a millisecond apiece, and what it does besides is a fifth of one; there are hundreds of them. A
record has the same fields, defaults, `replace`, `fields`, equality and hash, but shares one generic set of methods. Creating an object is
a little slower than with a dataclass; use it for nodes of trees and for descriptions. A class whose objects are made in inner loops writes its `__init__`,
and its `__eq__` and `__hash__` where they are compared there; with `slots`, objects have no dictionary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")
_MISSING = dataclasses.MISSING


def _init(self: object, *args: object, **keywords: object) -> None:
    cls = type(self)
    positional, defaults, factories, names = cls.__record__  # type: ignore[attr-defined]
    values = self.__dict__
    if not keywords and len(args) == len(names) == len(positional):
        values.update(zip(positional, args))
        return
    if len(args) > len(positional):
        raise TypeError(f"{cls.__name__} takes {len(positional)} positional arguments, got {len(args)}")
    values.update(defaults)
    values.update(zip(positional, args))
    values.update(keywords)
    for name, factory in factories:
        if name not in values:
            values[name] = factory()
    if len(values) != len(names):
        unknown = [n for n in keywords if n not in names]
        missing = [n for n in names if n not in values]
        raise TypeError(f"{cls.__name__}: unknown arguments {unknown}, missing arguments {missing}")


def _frozen(self: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to {type(self).__name__}.{name}")


def _repr(self: object) -> str:
    shown = ", ".join(f"{n}={getattr(self, n)!r}" for n in type(self).__record_shown__)  # type: ignore[attr-defined]
    return f"{type(self).__qualname__}({shown})"


def brief(self: object) -> str:
    """A `__repr__` that leaves out fields with their defaults: `KernelHints(unroll_factor=4)`."""
    cls = type(self)
    _, defaults, factories, _ = cls.__record__  # type: ignore[attr-defined]
    usual = {**defaults, **{name: factory() for name, factory in factories}}
    names = (n for n in cls.__record_shown__ if n not in usual or getattr(self, n) != usual[n])  # type: ignore[attr-defined]
    return f"{cls.__qualname__}({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"


def _key(self: object) -> tuple[object, ...]:
    values = self.__dict__
    return tuple([values[n] for n in type(self).__record_compared__])  # type: ignore[attr-defined]


def _equal(self: object, other: object) -> bool:
    return _key(self) == _key(other) if type(other) is type(self) else NotImplemented


def _hash(self: object) -> int:
    return hash(_key(self))


@overload
def record(cls: type[T]) -> type[T]: ...
@overload
def record(*, kw_only: bool = False, identity: bool = False, slots: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(
    cls: type[T] | None = None, *, kw_only: bool = False, identity: bool = False, slots: bool = False
) -> type[T] | Callable[[type[T]], type[T]]:
    """Make the class a record. `identity` compares by identity instead of by fields. `slots`: a class that writes its `__init__` and compares by identity."""
    if cls is None:
        return lambda wrapped: _make(wrapped, kw_only, identity, slots)
    return _make(cls, kw_only, identity, slots)


@dataclasses.dataclass(init=False, repr=False, eq=False)
class _Plain:
    """What `dataclasses` says of a class without methods of its own."""


_FIELD: object = getattr(dataclasses, "_FIELD")  # noqa: B009
"""The mark that `dataclasses.fields` asks for."""
_NO_FIELDS = ("ClassVar", "typing.ClassVar", "InitVar", "dataclasses.InitVar", "KW_ONLY", "dataclasses.KW_ONLY")
"""How annotations begin that are no fields."""


class _OwnField:
    """A field with what records ask of it. `dataclasses` takes ten times as long for one of its own, which is seldom asked for."""

    __slots__ = ("annotation", "compare", "default", "default_factory", "init", "kw_only", "repr")

    def __init__(self, annotation: object, default: object, kw_only: bool) -> None:
        self.annotation, self.default, self.kw_only = annotation, default, kw_only
        self.default_factory: object = _MISSING
        self.init = self.repr = self.compare = True

    def field(self, name: str) -> dataclasses.Field[object]:
        default: Any = self.default
        made: dataclasses.Field[object] = dataclasses.field(default=default)
        return _settled(made, name, self.annotation, self.kw_only)


def _settled(field: dataclasses.Field[object], name: str, annotation: Any, kw_only: bool) -> dataclasses.Field[object]:
    """The field with what the class says of it."""
    field.name, field.type = name, annotation
    field.kw_only = field.kw_only if isinstance(field.kw_only, bool) else kw_only
    field._field_type = _FIELD  # type: ignore[attr-defined]
    return field


_Fields = dict[str, "dataclasses.Field[object] | _OwnField"]


class _LateFields:
    """Stands where `dataclasses` looks for the fields of a record, and makes them when it does."""

    def __get__(self, instance: object, owner: type) -> dict[str, dataclasses.Field[object]]:
        parts: _Fields = owner.__record_parts__  # type: ignore[attr-defined]
        made = {name: part.field(name) if isinstance(part, _OwnField) else part for name, part in parts.items()}
        setattr(owner, "__dataclass_fields__", made)  # noqa: B010
        return made


_LATE_FIELDS = _LateFields()


def _parts(cls: type, kw_only: bool) -> _Fields:
    """The class's fields, those of its bases first."""
    found: _Fields = {}
    for base in cls.__mro__[-2:0:-1]:
        known = base.__dict__
        found.update(known["__record_parts__"] if "__record_parts__" in known else known.get("__dataclass_fields__", {}))
    for name, annotation in cls.__annotations__.items():
        said = annotation if type(annotation) is str else str(annotation)
        if said.startswith(_NO_FIELDS):
            if "ClassVar" not in said:
                raise TypeError(f"{cls.__name__}.{name}: a record has no {annotation}")
            found.pop(name, None)
            continue
        default = cls.__dict__.get(name, _MISSING)
        if isinstance(default, dataclasses.Field):
            found[name], default = _settled(default, name, annotation, kw_only), default.default
            if default is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, default)
        else:
            found[name] = _OwnField(annotation, default, kw_only)
        if default is not _MISSING and type(default).__hash__ is None:
            raise ValueError(f"{cls.__name__}.{name}: objects would share {default!r}: use a default_factory")
    return found


def _make(cls: type[T], kw_only: bool, identity: bool, slots: bool) -> type[T]:
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # else dataclasses computes a signature to write one
    parts = _parts(cls, kw_only)
    shown = tuple([name for name, part in parts.items() if part.repr])
    written: dict[str, object] = {
        "__record_parts__": parts, "__record_shown__": shown, "__dataclass_fields__": _LATE_FIELDS, "__dataclass_params__": getattr(_Plain, "__dataclass_params__"),  # noqa: B009
    }  # fmt: skip
    if "__match_args__" not in cls.__dict__:
        written["__match_args__"] = tuple([name for name, part in parts.items() if part.init and not part.kw_only])
    if slots:
        return _slotted(cls, parts, written, identity)
    written |= {
        "__record__": (
            tuple([name for name, part in parts.items() if not part.kw_only]),
            {name: part.default for name, part in parts.items() if part.default is not _MISSING},
            tuple([(name, part.default_factory) for name, part in parts.items() if part.default_factory is not _MISSING]),
            frozenset(parts),
        ),
        "__record_compared__": tuple([name for name, part in parts.items() if part.compare]),
        "__init__": _init, "__repr__": _repr, "__setattr__": _frozen,
    }  # fmt: skip
    if not identity:
        written |= {"__eq__": _equal, "__hash__": _hash}
    for name, value in written.items():
        if name not in cls.__dict__ or name not in _OWN:
            setattr(cls, name, value)
    return cls


def replace(item: T, /, **changes: Any) -> T:
    """As `dataclasses.replace`, for passes that make many: of a record it takes a third of the time."""
    cls = type(item)
    parts = getattr(cls, "__record_parts__", None)
    if parts is None:
        return dataclasses.replace(item, **changes)  # type: ignore[type-var]
    if cls.__init__ is not _init:
        for name in parts:
            if name not in changes:
                changes[name] = getattr(item, name)
        return cls(**changes)
    made = object.__new__(cls)
    values, before = made.__dict__, item.__dict__
    # Properties that are computed once lie beside the fields.
    values.update(before if len(before) == len(parts) else {name: before[name] for name in parts})
    values.update(changes)
    if len(values) != len(parts):
        raise TypeError(f"{cls.__name__}: unknown arguments {[name for name in changes if name not in parts]}")
    return made


_OWN = frozenset({"__init__", "__repr__", "__eq__", "__hash__"})
"""Methods that a class may write itself."""


def _slotted(cls: type[T], parts: _Fields, written: dict[str, object], identity: bool) -> type[T]:
    """The class once more, with a place for each field. Slots cannot be added to a class that is there."""
    if not identity or "__init__" not in cls.__dict__:
        raise TypeError(f"{cls.__name__}: a record with slots compares by identity and writes its __init__")
    names = tuple(parts)
    body = {key: value for key, value in cls.__dict__.items() if key not in (*names, "__dict__", "__weakref__")}
    body |= {**written, "__slots__": names, "__qualname__": cls.__qualname__, "__setattr__": _frozen, "__getstate__": _state, "__setstate__": _restore}
    body.setdefault("__repr__", _repr)
    made: type[T] = type(cls)(cls.__name__, cls.__bases__, body)  # type: ignore[misc]
    return made


def _state(self: object) -> list[object]:
    """What is kept of an object with slots."""
    return [getattr(self, f.name) for f in dataclasses.fields(self)]  # type: ignore[arg-type]


def _restore(self: object, state: list[object]) -> None:
    for one, value in zip(dataclasses.fields(self), state, strict=True):  # type: ignore[arg-type]
        object.__setattr__(self, one.name, value)
