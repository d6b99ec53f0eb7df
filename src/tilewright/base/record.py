"""`@record`: frozen dataclasses that cost nothing to define.

`dataclasses` writes and compiles code for each class, half a millisecond apiece, and what it does besides is a fifth of one; there are hundreds of them. A
record has the same fields, defaults, `replace`, `fields`, equality and hash, but shares one generic set of methods. Creating an object is
a little slower than with a dataclass; use it for nodes of trees and for descriptions. A class whose objects are made in inner loops writes its `__init__`,
and its `__eq__` and `__hash__` where they are compared there; with `slots`, objects have no dictionary.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TypeVar, dataclass_transform, overload

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


def _fields(cls: type, kw_only: bool) -> tuple[dataclasses.Field[object], ...]:
    """The class's fields, those of its bases first, written where `dataclasses` looks for them."""
    found: dict[str, dataclasses.Field[object]] = {}
    for base in reversed(cls.__mro__[1:]):
        found.update(getattr(base, "__dataclass_fields__", {}))
    for name, annotation in inspect.get_annotations(cls).items():
        said = str(annotation).removeprefix("typing.").removeprefix("dataclasses.")
        if said.startswith("ClassVar"):
            found.pop(name, None)
            continue
        if said.startswith(("InitVar", "KW_ONLY")):
            raise TypeError(f"{cls.__name__}.{name}: a record has no {annotation}")
        default = cls.__dict__.get(name, _MISSING)
        own: dataclasses.Field[object] = default if isinstance(default, dataclasses.Field) else dataclasses.field(default=default)
        if default is own:
            if own.default is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, own.default)
        if own.default is not _MISSING and type(own.default).__hash__ is None:
            raise ValueError(f"{cls.__name__}.{name}: objects would share {own.default!r}: use a default_factory")
        own.name, own.type = name, annotation
        own.kw_only = own.kw_only if isinstance(own.kw_only, bool) else kw_only
        own._field_type = _FIELD  # type: ignore[attr-defined]
        found[name] = own
    written: dict[str, object] = {"__dataclass_fields__": found, "__dataclass_params__": getattr(_Plain, "__dataclass_params__")}  # noqa: B009
    if "__match_args__" not in cls.__dict__:
        written["__match_args__"] = tuple(f.name for f in found.values() if f.init and not f.kw_only)
    for key, value in written.items():
        setattr(cls, key, value)
    return tuple(found.values())


def _make(cls: type[T], kw_only: bool, identity: bool, slots: bool) -> type[T]:
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # else dataclasses computes a signature to write one
    fields = _fields(cls, kw_only)
    if slots:
        return _slotted(cls, fields, identity)
    methods: dict[str, object] = {
        "__record__": (
            tuple(f.name for f in fields if not f.kw_only),
            {f.name: f.default for f in fields if f.default is not _MISSING},
            tuple((f.name, f.default_factory) for f in fields if f.default_factory is not _MISSING),
            frozenset(f.name for f in fields),
        ),
        "__record_shown__": tuple(f.name for f in fields if f.repr),
        "__record_compared__": tuple(f.name for f in fields if f.compare),
        "__init__": _init, "__repr__": _repr, "__setattr__": _frozen,
    }  # fmt: skip
    if not identity:
        methods |= {"__eq__": _equal, "__hash__": _hash}
    for name, value in methods.items():
        if name not in cls.__dict__ or name not in _OWN:
            setattr(cls, name, value)
    return cls


_OWN = frozenset({"__init__", "__repr__", "__eq__", "__hash__"})
"""Methods that a class may write itself."""


def _slotted(cls: type[T], fields: tuple[dataclasses.Field[object], ...], identity: bool) -> type[T]:
    """The class once more, with a place for each field. Slots cannot be added to a class that is there."""
    if not identity or "__init__" not in cls.__dict__:
        raise TypeError(f"{cls.__name__}: a record with slots compares by identity and writes its __init__")
    names = tuple(f.name for f in fields)
    body = {key: value for key, value in cls.__dict__.items() if key not in (*names, "__dict__", "__weakref__")}
    body |= {"__slots__": names, "__qualname__": cls.__qualname__, "__record_shown__": tuple(f.name for f in fields if f.repr)}
    body |= {"__setattr__": _frozen, "__getstate__": _state, "__setstate__": _restore}
    body.setdefault("__repr__", _repr)
    made: type[T] = type(cls)(cls.__name__, cls.__bases__, body)  # type: ignore[misc]
    return made


def _state(self: object) -> list[object]:
    """What is kept of an object with slots."""
    return [getattr(self, f.name) for f in dataclasses.fields(self)]  # type: ignore[arg-type]


def _restore(self: object, state: list[object]) -> None:
    for one, value in zip(dataclasses.fields(self), state, strict=True):  # type: ignore[arg-type]
        object.__setattr__(self, one.name, value)
