"""Random critical functions, and what Python makes of them.

`program(seed)` is the source of a function of two ints and two floats: assignments, branches, loops, calls and a table. `reference` runs it in Python with ints
that raise `OverflowError` where 64 bits end, as critical functions do; everything else is Python's own arithmetic.
"""

from __future__ import annotations

import random
import re
from typing import Any

LOW, HIGH = -(1 << 63), (1 << 63) - 1
HEAD = "import numpy as np\n\nimport tilewright as tw\n\nTABLE = np.array([5, -3, 8, 0, 2, 7, -11, 4], np.int64)\n\n\n"


class Int:
    """An int that has 64 bits and does not wrap."""

    def __init__(self, value: int) -> None:
        if not LOW <= value <= HIGH:
            raise OverflowError(value)
        self.v = int(value)

    def __index__(self) -> int:
        return self.v

    def __float__(self) -> float:
        return float(self.v)

    def __bool__(self) -> bool:
        return self.v != 0

    def __hash__(self) -> int:
        return hash(self.v)


def _operator(name: str) -> Any:
    def apply(a: Int, b: Any) -> Any:
        if isinstance(b, float):
            return getattr(float(a.v), name)(b)
        right = int(b)
        if name in ("__lshift__", "__rshift__") and not 0 <= right < 64:
            raise ValueError(right)
        if name == "__truediv__":
            return float(a.v) / float(right) if right else a.v / right
        found = getattr(a.v, name)(right)
        return Int(found) if isinstance(found, int) and not isinstance(found, bool) else found

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "truediv", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Int, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Int, f"__r{_name}__", lambda a, b, name=f"__{_name}__": getattr(float(b), name)(float(a.v)) if isinstance(b, float) else getattr(Int(int(b)), name)(a))
Int.__neg__ = lambda a: Int(-a.v)  # type: ignore[attr-defined]
Int.__abs__ = lambda a: Int(abs(a.v))  # type: ignore[attr-defined]
Int.__invert__ = lambda a: Int(~a.v)  # type: ignore[attr-defined]


class _Writer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.ints, self.floats = ["a", "b"], ["x", "y"]
        self.count = 0

    def whole(self, depth: int) -> str:
        r = self.random
        kind = r.randrange(9) if depth > 0 else r.randrange(2)
        if kind == 0:
            return r.choice(self.ints)
        if kind == 1:
            return f"K({r.choice([0, 1, 2, 3, 7, 10, 63, 1000, 65537, 1 << 31, 1 << 40])})"
        if kind in (2, 3, 4):
            return f"({self.varying(depth - 1)} {r.choice(['+', '-', '*', '+', '-', '*', '//', '%', '&', '|', '^'])} {self.whole(depth - 1)})"
        if kind == 5:
            return f"({self.varying(depth - 1)} {r.choice(['<<', '>>'])} ({self.varying(depth - 1)} & K(7)))"
        if kind == 6:
            return f"(-{self.varying(depth - 1)})" if r.random() < 0.5 else f"abs({self.varying(depth - 1)})"
        if kind == 7:
            return f"({self.whole(depth - 1)} if {self.test(depth - 1)} else {self.whole(depth - 1)})"
        return f"TABLE[{self.varying(depth - 1)} & K(7)]" if r.random() < 0.7 else f"mix({self.varying(depth - 1)}, {self.whole(depth - 1)})"

    def varying(self, depth: int) -> str:
        """A whole number that is no constant: arithmetic of constants that does not fit is refused when it is compiled."""
        found = self.whole(depth)
        return self.random.choice(self.ints) if "a" not in found and "b" not in found else found

    def real(self, depth: int) -> str:
        r = self.random
        kind = r.randrange(6) if depth > 0 else r.randrange(2)
        if kind == 0:
            return r.choice(self.floats)
        if kind == 1:
            return repr(r.choice([0.5, 1.0, -2.25, 3.5e3, 1e-3, 0.1]))
        if kind in (2, 3):
            return f"({self.real(depth - 1)} {r.choice('+-*')} {self.real(depth - 1)})"
        if kind == 4:
            return f"({self.real(depth - 1)} * {self.whole(depth - 1)})"
        return f"({self.real(depth - 1)} if {self.test(depth - 1)} else {self.real(depth - 1)})"

    def test(self, depth: int) -> str:
        r = self.random
        sign = r.choice(["<", "<=", ">", ">=", "==", "!="])
        if depth > 0 and r.random() < 0.3:
            return f"({self.test(depth - 1)} {r.choice(['and', 'or'])} {self.test(depth - 1)})"
        part = self.whole if r.random() < 0.7 else self.real
        return f"{part(min(depth, 1))} {sign} {part(min(depth, 1))}"

    def statements(self, indent: str, depth: int) -> None:
        r = self.random
        for _ in range(r.randint(1, 3)):
            kind = r.randrange(6) if depth > 0 else r.randrange(3)
            if kind == 0:
                self.lines.append(f"{indent}{r.choice(self.ints)} = {self.whole(2)}")
            elif kind == 1:
                self.lines.append(f"{indent}{r.choice(self.floats)} = {self.real(2)}")
            elif kind == 2:
                self.lines.append(f"{indent}{r.choice(self.ints)} {r.choice(['+=', '-=', '^='])} {self.whole(1)}")
            elif kind == 3:
                self.lines.append(f"{indent}if {self.test(1)}:")
                self.statements(indent + "    ", depth - 1)
                if r.random() < 0.5:
                    self.lines.append(f"{indent}else:")
                    self.statements(indent + "    ", depth - 1)
            elif kind == 4:
                self.count += 1
                name = f"i{self.count}"
                self.lines.append(f"{indent}for {name} in range({r.randint(1, 5)}):")
                known = list(self.ints)
                self.statements(indent + "    ", depth - 1)
                self.lines.append(f"{indent}    {r.choice(known)} += {name}")
                if r.random() < 0.3:
                    self.lines.append(f"{indent}    if {self.test(0)}:")
                    self.lines.append(f"{indent}        {r.choice(['break', 'continue'])}")
            else:
                self.lines.append(f"{indent}if {self.test(0)}:")
                self.lines.append(f"{indent}    return {self.whole(1)}")


def program(seed: int) -> str:
    """The function's source; it is called `function`."""
    writer = _Writer(seed)
    writer.statements("    ", 2)
    text = "\n".join(writer.lines)
    return f"{{mark}}def mix(p: int, q: int) -> int:\n    return (p ^ (q >> 3)) + 1\n\n\n{{mark}}def function(a: int, b: int, x: float, y: float) -> {{kind}}:\n{text}\n    {{last}}\n"


def sources(seed: int) -> tuple[str, str]:
    """The program for Tilewright and for Python: it returns an int, unless `seed` is a multiple of three, when its last result is a float of all."""
    text = program(seed)
    body = HEAD + text
    last, kind = "return a ^ b", "int"
    if seed % 3 == 0 and "return" not in text.split("def function")[1].replace("{last}", ""):
        last, kind = "return x + y * a", "float"
    fill = {"{last}": last, "{kind}": kind}
    for key, value in fill.items():
        body = body.replace(key, value)
    return re.sub(r"K\((\d+)\)", r"\1", body.replace("{mark}", "@tw.critical\n")), body.replace("{mark}", "")


def outcome(function: Any, arguments: tuple[Any, ...]) -> object:
    """What a call gives: a number, or the name of an exception."""
    try:
        found = function(*arguments)
    except (OverflowError, ZeroDivisionError, ValueError, IndexError) as error:
        return next(k.__name__ for k in (OverflowError, ZeroDivisionError, IndexError, ValueError) if isinstance(error, k))
    return int(found) if isinstance(found, Int) else found
