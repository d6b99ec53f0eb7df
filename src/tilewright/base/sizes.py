"""Symbolic sizes: integer arithmetic over named sizes, kept in a canonical form so that equal sizes compare equal.

A `Size` is a sum of integer multiples of products of atoms. An atom is a name (`rows`) or an opaque call
(`floordiv`, `mod`, `min`, `max`, `ceildiv`) of two sizes. `2*rows*cols + 4` and `4 + cols*2*rows` are the same object by `==`.
Shapes, strides, grid sizes and call-time checks are all made of these; they print as and parse from plain arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class SizeCall:
    """An opaque operation on two sizes. Such trees may be deep: hash and text are found once."""

    op: str
    a: Size
    b: Size

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash((self.op, self.a, self.b))
        return known

    def __str__(self) -> str:
        known: str | None = self.__dict__.get("_text")
        if known is None:
            known = self.__dict__["_text"] = f"{self.op}({self.a}, {self.b})"
        return known

    def __reduce__(self) -> tuple[type[SizeCall], tuple[str, Size, Size]]:
        # Hashes of texts are another process's own.
        return SizeCall, (self.op, self.a, self.b)


Atom = str | SizeCall
Monomial = tuple[Atom, ...]


@dataclass(frozen=True)
class Size:
    """`terms` maps products of atoms to integer factors; sorted, without zeros. The constant has the empty product."""

    terms: tuple[tuple[Monomial, int], ...]

    # -- building -----------------------------------------------------------------------------------------------

    @staticmethod
    def of(value: Size | int | str) -> Size:
        if isinstance(value, Size):
            return value
        if isinstance(value, str):
            return Size((((value,), 1),))
        return Size((((), int(value)),)) if value else ZERO

    @staticmethod
    def _from(terms: Mapping[Monomial, int]) -> Size:
        items = [(m, f) for m, f in terms.items() if f]
        if len(items) < 2:
            return Size(tuple(items)) if items else ZERO
        items.sort(key=lambda item: (len(item[0]), [str(a) for a in item[0]]))
        return Size(tuple(items))

    def __add__(self, other: Size | int) -> Size:
        added = Size.of(other).terms
        if not added:
            return self
        result = dict(self.terms)
        for monomial, factor in added:
            result[monomial] = result.get(monomial, 0) + factor
        return Size._from(result)

    __radd__ = __add__

    def __mul__(self, other: Size | int) -> Size:
        if isinstance(other, int):
            return Size(tuple([(m, f * other) for m, f in self.terms])) if other else ZERO
        result: dict[Monomial, int] = {}
        for left, left_factor in self.terms:
            for right, right_factor in other.terms:
                key = tuple(sorted(left + right, key=str))
                result[key] = result.get(key, 0) + left_factor * right_factor
        return Size._from(result)

    __rmul__ = __mul__

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size | int) -> Size:
        taken = Size.of(other).terms
        if not taken:
            return self
        result = dict(self.terms)
        for monomial, factor in taken:
            result[monomial] = result.get(monomial, 0) - factor
        return Size._from(result)

    def __rsub__(self, other: Size | int) -> Size:
        return Size.of(other) - self

    def __floordiv__(self, other: Size | int) -> Size:
        return floordiv(self, Size.of(other))

    def __mod__(self, other: Size | int) -> Size:
        return mod(self, Size.of(other))

    # -- asking -------------------------------------------------------------------------------------------------

    @property
    def constant(self) -> int | None:
        """The value when it has no names, else None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    @property
    def name(self) -> str | None:
        """The name when it is just one name, else None."""
        if len(self.terms) == 1:
            (monomial, factor) = self.terms[0]
            if factor == 1 and len(monomial) == 1 and isinstance(monomial[0], str):
                return monomial[0]
        return None

    @property
    def product_name(self) -> str | None:
        """The text of a single product of names, such as `a*b`, or of one name; else None."""
        if len(self.terms) == 1 and self.terms[0][1] == 1:
            names = [atom for atom in self.terms[0][0] if isinstance(atom, str)]
            return "*".join(names) if len(names) == len(self.terms[0][0]) > 0 else None
        return None

    @cached_property
    def names(self) -> frozenset[str]:
        """All names inside."""
        found: set[str] = set()
        for monomial, _ in self.terms:
            for atom in monomial:
                if isinstance(atom, str):
                    found.add(atom)
                else:
                    found |= atom.a.names | atom.b.names
        return frozenset(found)

    def evaluate(self, values: Mapping[str, int]) -> int:
        """The number, given a number for every name."""
        total = 0
        for monomial, factor in self.terms:
            for atom in monomial:
                if isinstance(atom, str):
                    factor *= values[atom]
                else:
                    factor *= CALLS[atom.op](atom.a.evaluate(values), atom.b.evaluate(values))
            total += factor
        return total

    def substitute(self, values: Mapping[str, Size], known: dict[Size, Size] | None = None) -> Size:
        """The size with names replaced by sizes. `known`: what this gave for other sizes with the same values."""
        if self.names.isdisjoint(values):
            return self
        known = {} if known is None else known
        found = known.get(self)
        if found is None:
            found = known[self] = self._substituted(values, known)
        return found

    def _substituted(self, values: Mapping[str, Size], known: dict[Size, Size]) -> Size:
        total: dict[Monomial, int] = {}
        for monomial, factor in self.terms:
            kept: list[Atom] = []
            others: list[Size] = []
            for atom in monomial:
                if isinstance(atom, str):
                    value = values.get(atom)
                else:
                    a, b = atom.a.substitute(values, known), atom.b.substitute(values, known)
                    value = None if a is atom.a and b is atom.b else call(atom.op, a, b)
                if value is None:
                    kept.append(atom)
                elif value.constant is None:
                    others.append(value)
                else:
                    factor *= value.constant
            term = Size(((tuple(kept), factor),)) if factor else ZERO
            for value in others:
                term = term * value
            for product, times in term.terms:
                total[product] = total.get(product, 0) + times
        return Size._from(total)

    def divisible_by(self, divisor: int, facts: Mapping[str, int] | None = None) -> bool:
        """Whether it is surely a multiple of `divisor`, where `facts` gives known divisors of names."""
        facts = facts or {}
        for monomial, factor in self.terms:
            known = factor
            for atom in monomial:
                if isinstance(atom, str):
                    known *= facts.get(atom, 1)
            if known % divisor:
                return False
        return True

    # -- text ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        text = ""
        # Names first, the constant last: `rows + 1`.
        for monomial, factor in [t for t in self.terms if t[0]] + [t for t in self.terms if not t[0]]:
            size = abs(factor)
            atoms = [str(a) for a in monomial]
            body = "*".join(([str(size)] if size != 1 or not atoms else []) + atoms)
            if not text:
                text = f"-{body}" if factor < 0 else body
            else:
                text += f" - {body}" if factor < 0 else f" + {body}"
        return text

    __repr__ = __str__


ZERO = Size(())
ONE = Size((((), 1),))

CALLS: dict[str, Callable[[int, int], int]] = {
    "floordiv": lambda a, b: a // b if b else 0,
    "ceildiv": lambda a, b: -(-a // b) if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "min": min,
    "max": max,
}


def call(op: str, a: Size, b: Size) -> Size:
    """`op(a, b)`, folded where both are constants or the operation is trivial."""
    left, right = a.constant, b.constant
    if left is not None and right is not None:
        return Size.of(CALLS[op](left, right))
    if op in ("floordiv", "ceildiv") and right == 1:
        return a
    if op in ("floordiv", "ceildiv") and right and all(f % right == 0 for _, f in a.terms):
        return Size(tuple((m, f // right) for m, f in a.terms))
    if op == "mod" and right == 1:
        return ZERO
    if op in ("min", "max"):
        if a == b:
            return a
        gap = (a - b).constant
        if gap is not None:
            return (a if gap < 0 else b) if op == "min" else (b if gap < 0 else a)
        a, b = sorted((a, b), key=str)
    return Size((((SizeCall(op, a, b),), 1),))


def floordiv(a: Size | int, b: Size | int) -> Size:
    return call("floordiv", Size.of(a), Size.of(b))


def ceildiv(a: Size | int, b: Size | int) -> Size:
    return call("ceildiv", Size.of(a), Size.of(b))


def mod(a: Size | int, b: Size | int) -> Size:
    return call("mod", Size.of(a), Size.of(b))


def minimum(a: Size | int, b: Size | int) -> Size:
    return call("min", Size.of(a), Size.of(b))


def maximum(a: Size | int, b: Size | int) -> Size:
    return call("max", Size.of(a), Size.of(b))


# -- numbers of a call --------------------------------------------------------------------------------------------

_NUMBER = "$int"
_COMPUTED = "$size"


def number_name(parameter: str) -> str:
    """The name of a whole-number parameter in sizes. Its value may be negative, unlike that of every other name."""
    return parameter + _NUMBER


def is_number(name: str) -> bool:
    """Whether the name is that of a whole-number parameter."""
    return name.endswith(_NUMBER)


def parameter_of(name: str) -> str:
    """The parameter that such a name stands for."""
    return name.removesuffix(_NUMBER)


def has_numbers(size: Size) -> bool:
    """Whether it is made of parameters that may be negative."""
    return any(is_number(name) for name in size.names)


def computed_name(title: str) -> str:
    """The name of a size that a call computes from its numbers; it is never negative."""
    return title + _COMPUTED


def is_computed(name: str) -> bool:
    return name.endswith(_COMPUTED)


def without_clamp(size: Size) -> Size:
    """`a` for `max(a, 0)`."""
    if len(size.terms) == 1 and size.terms[0][1] == 1 and len(size.terms[0][0]) == 1:
        atom = size.terms[0][0][0]
        if isinstance(atom, SizeCall) and atom.op == "max" and ZERO in (atom.a, atom.b):
            return atom.b if atom.a == ZERO else atom.a
    return size


def times_at_least(size: Size, step: int) -> Size:
    """No more than a size times a negative number: `2 * floordiv(a, 2)` is at most `a`."""
    total = ZERO
    for monomial, factor in size.terms:
        atom = monomial[0] if len(monomial) == 1 else None
        divisor = atom.b.constant if isinstance(atom, SizeCall) and atom.op == "floordiv" else None
        if isinstance(atom, SizeCall) and divisor and divisor > 0 and factor > 0 and (factor * step) % divisor == 0:
            total = total + atom.a * (factor * step // divisor)
        else:
            total = total + Size(((monomial, factor * step),))
    return total


def add_numbers(values: dict[str, int], numbers: Mapping[str, object], computed: Iterable[tuple[str, Size]]) -> None:
    """Give the whole numbers of a call, and the sizes computed from them, their values."""
    values.update({number_name(name): value for name, value in numbers.items() if isinstance(value, int) and not isinstance(value, bool)})
    values.update({name: size.evaluate(values) for name, size in computed if size.names <= values.keys()})


def size_text(size: Size) -> str:
    """The size as the user would write it: `(length - k) // stride + 1`."""
    text = ""
    for monomial, factor in sorted(size.terms, key=lambda term: (not term[0], term[1] < 0)):
        parts = [atom if isinstance(atom, str) else _call_text(atom, len(monomial) > 1 or abs(factor) != 1) for atom in monomial]
        body = " * ".join(([str(abs(factor))] if abs(factor) != 1 or not parts else []) + parts)
        text = f"{text} {'-' if factor < 0 else '+'} {body}" if text else f"-{body}" if factor < 0 else body
    return readable(text or "0")


def _call_text(call: SizeCall, inner: bool) -> str:
    sign = {"floordiv": "//", "mod": "%"}.get(call.op)
    if sign is None:
        return f"{call.op}({size_text(call.a)}, {size_text(call.b)})"
    sides = [text if part.name is not None or part.constant is not None else f"({text})" for part in (call.a, call.b) for text in [size_text(part)]]
    text = f"{sides[0]} {sign} {sides[1]}"
    return f"({text})" if inner else text


def without_marks(text: str) -> str:
    """Text with sizes in it, numbers of the call under their own names."""
    return re.sub(r"(?<=[\w.])\$(?:int|size)\b", "", text)


def readable(text: str) -> str:
    """Text with sizes in it as the user writes them: an axis that nobody named is `x.shape[0]`."""
    return re.sub(r"([\w.]+)\$(\d+)\b", r"\1.shape[\2]", without_marks(text))


def product(sizes: Iterable[Size]) -> Size:
    total = ONE
    for size in sizes:
        total = total * size
    return total


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides in elements."""
    strides: list[Size] = []
    step = ONE
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))


_TOKEN = re.compile(r"\s*(?:(\d+)|([^\W\d][\w.$]*)|(.))")


def parse_size(text: str) -> Size:
    """The size a text such as `2*rows + ceildiv(n, 128)` means. Raises ValueError."""
    tokens: list[str] = [m.group().strip() for m in _TOKEN.finditer(text) if m.group().strip()]
    position = 0

    def peek() -> str:
        return tokens[position] if position < len(tokens) else ""

    def take(expected: str = "") -> str:
        nonlocal position
        token = peek()
        if not token or (expected and token != expected):
            raise ValueError(f"bad size {text!r} near {token or 'its end'!r}")
        position += 1
        return token

    def total() -> Size:
        value = -term() if peek() == "-" and take() else term()
        while peek() in ("+", "-"):
            value = value + term() if take() == "+" else value - term()
        return value

    def term() -> Size:
        value = factor()
        while peek() == "*":
            take()
            value = value * factor()
        return value

    def factor() -> Size:
        token = take()
        if token == "-":
            return -factor()
        if token == "(":
            value = total()
            take(")")
            return value
        if token.isdigit():
            return Size.of(int(token))
        if token in CALLS and peek() == "(":
            take("(")
            a = total()
            take(",")
            b = total()
            take(")")
            return call(token, a, b)
        if not (token[0].isalpha() or token[0] == "_"):
            raise ValueError(f"bad size {text!r} near {token!r}")
        return Size.of(token)

    value = total()
    if position != len(tokens):
        raise ValueError(f"bad size {text!r} near {peek()!r}")
    return value
