"""`@record`: frozen dataclasses that cost nothing to define.

`dataclasses` writes and compiles code for each class, half a millisecond apiece, and the trees have a hundred of them. A record
has the same fields, defaults, `replace`, `fields`, equality and hash, but shares one generic set of methods. Creating an object is
a little slower than with a dataclass; use it for nodes of trees and for descriptions, not for values made in inner loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar, dataclass_transform, overload

T = TypeVar("T")
_MISSING = dataclasses.MISSING


def _init(self: object, *args: object, **keywords: object) -> None:
    cls = type(self)
    positional, defaults, factories, names = cls.__record__  # type: ignore[attr-defined]
    values = self.__dict__
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
def record(*, kw_only: bool = False, identity: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(
    cls: type[T] | None = None, *, kw_only: bool = False, identity: bool = False
) -> type[T] | Callable[[type[T]], type[T]]:
    """Make the class a record. `identity` compares by identity instead of by fields."""
    if cls is None:
        return lambda wrapped: _make(wrapped, kw_only, identity)
    return _make(cls, kw_only, identity)


def _make(cls: type[T], kw_only: bool, identity: bool) -> type[T]:
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # else dataclasses computes a signature to write one
    dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only, match_args=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
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
    if "__repr__" in cls.__dict__:
        del methods["__repr__"]
    for name, value in methods.items():
        setattr(cls, name, value)
    return cls
