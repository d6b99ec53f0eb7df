"""Arguments of ZynML functions and the sizes their types name, checked where a function is called.

In: a function, the values it is called with, and whether their extents mean anything. Out: its parameters' values and the named sizes
(`tensor[batch, seq]` makes `batch` and `seq` numbers of the function). A size that two arguments disagree on is an error that names both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.base import dtypes
from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.syntax import Expr, Function
from tilewright.zyn.host import functions as host_functions
from tilewright.zyn.host import values as host_values
from tilewright.zyn.lazy.lazy_array import LazyArray
from tilewright.zyn.type_forms import bounded

_ANY = frozenset({"tensor", "array", "Tensor", "Array"})
_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,), "string": (str,), "str": (str,), "list": (list, tuple), "record": (dict,)}


class AbstractValue:
    """A value nobody knows anything of, where a program is only looked at: all it is used for is taken to be right."""

    def __repr__(self) -> str:
        return "an unknown value"


def shape_names(node: Expr | None) -> tuple[str, ...]:
    """The sizes that a type names: those that are an axis by themselves."""
    if isinstance(node, syntax.Tuple):
        return tuple(name for item in node.items for name in shape_names(item))
    if not isinstance(node, syntax.Index):
        return ()
    names = (i.id if isinstance(i, syntax.Name) else bounded(i) for i in node.indices)
    return tuple(name for name in names if name is not None)


def parameter_sizes(function: Function) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for p in function.params for name in shape_names(p.type)))


def count_mismatch(function: Function, positional: int, keywords: Sequence[str]) -> str:
    """What is wrong with the arguments of a call; empty where nothing is."""
    names = [p.name for p in function.params]
    shown = f"{function.name}({', '.join(names)})"
    for keyword in keywords:
        if keyword not in names:
            return f"{shown} has no parameter '{keyword}'"
        if keyword in names[:positional] or list(keywords).count(keyword) > 1:
            return f"{shown} gets '{keyword}' twice"
    missing = [p.name for p in function.params[positional:] if p.default is None and p.name not in keywords]
    if positional > len(names) or (missing and not keywords):
        return f"{shown} takes {len(names)} argument(s), got {positional}"
    return f"{shown} lacks '{missing[0]}'" if missing else ""


class NamedSizes:
    """The named sizes of one call, each with what gave it."""

    def __init__(self, name: str, call: Span, exact: bool, known: Mapping[str, int] | None = None) -> None:
        self._name, self._call, self._exact = name, call, exact
        self.values: dict[str, int] = dict(known or {})
        self._from: dict[str, str] = dict.fromkeys(self.values, "the program")

    def take(self, what: str, type_: Expr | None, value: object, number: Callable[[Expr, Mapping[str, object]], object]) -> object:
        """Hold a value against its type; new names of the type become sizes. Gives the value, a future's result where it was one."""
        if type_ is None or isinstance(value, AbstractValue):
            self._unknown(type_)
            return value
        if isinstance(type_, syntax.Tuple):
            if not isinstance(value, tuple | list) or len(value) != len(type_.items):
                got = f"{len(value)} values" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
                raise self._fail("TW009", f"{what} is {got}, its type has {len(type_.items)}")
            return tuple(self.take(f"{what}[{n}]", t, v, number) for n, (t, v) in enumerate(zip(type_.items, value, strict=True)))
        if not isinstance(type_, syntax.Index):
            self._plain(what, type_, value)
            return value
        value = value if isinstance(value, LazyArray) else host_functions.settled(value)
        shape = getattr(value, "shape", None)
        if not isinstance(shape, tuple):
            raise self._fail("TW009", f"{what} is a {type(value).__name__}, its type is an array of rank {len(type_.indices)}")
        if len(shape) != len(type_.indices):
            raise self._fail("TW003", f"{what} has rank {len(shape)} (shape {list(shape)}), its type rank {len(type_.indices)}")
        self._element(what, type_.value, value)
        for axis, (wanted, extent) in enumerate(zip(type_.indices, shape, strict=True)):
            self._axis(f"axis {axis} of {what}", wanted, int(extent), number)
        return value

    def _unknown(self, type_: Expr | None) -> None:
        for name in shape_names(type_):
            self.values.setdefault(name, 4)

    def _axis(self, place: str, wanted: Expr, extent: int, number: Callable[[Expr, Mapping[str, object]], object]) -> None:
        size = bounded(wanted)
        if size is not None:
            self._axis(place, syntax.Name(size, span=wanted.span), extent, number)
            if self._exact and not host_values.as_scalar(number(wanted, self.values)):
                where = wanted.span
                shown = where.source.line(where.line)[where.column - 1 : where.end_column - 1] if where.source is not None and where.line else size
                raise self._fail("TW004", f"{place} has {extent} element(s), but its type says {shown}", "give an array whose size is within these bounds")
            return
        if isinstance(wanted, syntax.Name) and wanted.id not in self.values:
            self.values[wanted.id], self._from[wanted.id] = extent, place
            return
        if isinstance(wanted, syntax.Slice) or not self._exact:
            return
        if isinstance(wanted, syntax.Name):
            if self.values[wanted.id] != extent:
                raise self._fail(
                    "TW004", f"'{wanted.id}' is {self.values[wanted.id]} by {self._from[wanted.id]}, but {extent} by {place}",
                    f"give arrays whose sizes '{wanted.id}' agree",
                )  # fmt: skip
            return
        expected = host_values.as_scalar(number(wanted, self.values))
        if expected != extent:
            raise self._fail("TW004", f"{place} has {extent} element(s), its type says {expected}")

    def _element(self, what: str, type_: Expr, value: object) -> None:
        name = type_.id if isinstance(type_, syntax.Name) else "?"
        if name in _ANY:
            return
        found = getattr(value, "dtype", None)
        if not dtypes.is_name(name):
            raise self._fail("TW002", f"the type of {what} is unknown: '{name}'", "write tensor[…], or an element type such as f32[…]")
        if host_functions.dtype_of(found) != dtypes.by_name(name):
            raise self._fail("TW009", f"{what} is an array of {host_functions.dtype_of(found)}, its type says {dtypes.by_name(name)}")

    def _plain(self, what: str, type_: Expr, value: object) -> None:
        name = type_.id if isinstance(type_, syntax.Name) else ""
        if name in _ANY:
            if not hasattr(value if isinstance(value, LazyArray) else host_functions.settled(value), "shape"):
                raise self._fail("TW009", f"{what} is a {type(value).__name__}, no array")
            return
        number = host_values.as_scalar(value)
        if name == "int":
            fits = host_values.as_whole(value) is not None
        elif name in ("float", "bool", "complex") or (dtypes.is_name(name) and name not in _SCALARS):
            takes_complex = name == "complex" or (dtypes.is_name(name) and dtypes.by_name(name).is_complex)
            fits = number is not None and (takes_complex or not host_values.is_complex(number))
        elif name in _SCALARS:
            fits = isinstance(value, _SCALARS[name])
        else:
            fits = True
        if self._exact and not fits:
            raise self._fail("TW009", f"{what} is {host_functions.shown(value)}, its type says {name}")

    def _fail(self, code: str, message: str, help: str = "") -> UserError:
        error = UserError.at(code, f"{self._name}: {message}", self._call, help)
        assert isinstance(error, UserError)
        return error
