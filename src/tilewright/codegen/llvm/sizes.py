"""A `Size` as LLVM instructions on i64.

In: a size and an LLVM operand for each of its names. Out: an operand that holds the value, with the instructions appended to a
list. What is emitted computes exactly what `Size.evaluate` computes (floor division, modulus with the divisor's sign, division
by zero gives zero), as long as no intermediate value leaves 64 bits. A checked emitter says when one does: `take_overflows` gives the
conditions. Host code is checked; kernels are not, since their host code has computed or bounded the same sizes before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilewright.base.sizes import Size, SizeCall

DECLARATIONS = (
    "declare i64 @llvm.smin.i64(i64, i64)",
    "declare i64 @llvm.smax.i64(i64, i64)",
    *(f"declare {{i64, i1}} @llvm.s{word}.with.overflow.i64(i64, i64)" for word in ("add", "sub", "mul")),
)
"""What a module must declare to use the instructions."""


def names_bound(sizes: Iterable[Size]) -> int:
    """A power of two: where every name is below it, and not below its negative, no step of any of the sizes leaves 64 bits. 0 where a
    constant does."""
    found = list(sizes)
    for power in range(62, -1, -1):
        if all(_magnitude(size, 1 << power) < 1 << 62 for size in found):
            return 1 << power
    return 0


def _magnitude(size: Size, name: int) -> int:
    """The most that the size, and any part of it, can be where no name is more than `name`."""
    total = 0
    for monomial, factor in size.terms:
        term = abs(factor)
        for atom in monomial:
            term *= name if isinstance(atom, str) else max(_magnitude(atom.a, name), _magnitude(atom.b, name)) + 1
        total += term
    return max(1, total)


class SizeEmitter:
    """Appends instructions to `lines`; equal sizes are computed once, so `lines` must be straight-line code.

    `branch` gives an emitter for code that `lines` dominates but that does not dominate what follows.
    """

    def __init__(self, lines: list[str], values: Mapping[str, str], prefix: str = "size", checked: bool = False) -> None:
        self.lines = lines
        self.values = dict(values)
        self.prefix = prefix
        self.checked = checked
        self._overflows: list[str] = []
        self._done: dict[Size, str] = {}
        self._count = [0]

    def branch(self) -> SizeEmitter:
        other = SizeEmitter(self.lines, self.values, self.prefix, self.checked)
        other._done = dict(self._done)
        other._count = self._count
        other._overflows = self._overflows
        return other

    def bind(self, name: str, operand: str) -> None:
        """From now on `name` has this value."""
        self.values[name] = operand

    def take_overflows(self) -> list[str]:
        """Conditions (i1), one for each step since the last time that may have left 64 bits: true where it did. Test them before any
        value is used."""
        found = list(self._overflows)
        self._overflows.clear()
        return found

    def value(self, size: Size) -> str:
        """An i64 operand: a literal or a register."""
        constant = size.constant
        if constant is not None:
            return self._number(constant)
        if size.name is not None:
            return self.values[size.name]
        done = self._done.get(size)
        if done is None:
            done = self._sum(size)
            self._done[size] = done
        return done

    def product(self, operands: list[str]) -> str:
        """The product of i64 operands; 1 when there are none."""
        result = ""
        for operand in operands:
            if operand == "1":
                continue
            result = self._exact("mul", result, operand) if result else operand
        return result or "1"

    def _number(self, value: int) -> str:
        """A literal. One that 64 bits do not hold is an overflow that always happens: host code refuses every call, and the kernel never runs."""
        if -(1 << 63) <= value < 1 << 63:
            return str(value)
        self._overflows.append("true")
        return "0"

    def _exact(self, word: str, a: str, b: str) -> str:
        """`a word b`, and a condition for a result that 64 bits do not hold."""
        if not self.checked:
            return self._emit(f"{word} i64 {a}, {b}")
        both = self._emit(f"call {{i64, i1}} @llvm.s{word}.with.overflow.i64(i64 {a}, i64 {b})")
        self._overflows.append(self._emit(f"extractvalue {{i64, i1}} {both}, 1"))
        return self._emit(f"extractvalue {{i64, i1}} {both}, 0")

    def _emit(self, instruction: str) -> str:
        self._count[0] += 1
        register = f"%{self.prefix}{self._count[0]}"
        self.lines.append(f"  {register} = {instruction}")
        return register

    def _sum(self, size: Size) -> str:
        total = ""
        for monomial, factor in size.terms:
            atoms = [self.values[a] if isinstance(a, str) else self._call(a) for a in monomial]
            negative = factor < 0 and bool(total)
            term = self.product([self._number(-factor if negative else factor), *atoms])
            total = self._exact("sub" if negative else "add", total, term) if total else term
        return total

    def _call(self, atom: SizeCall) -> str:
        key = Size((((atom,), 1),))
        done = self._done.get(key)
        if done is None:
            a, b = self.value(atom.a), self.value(atom.b)
            if atom.op in ("min", "max"):
                done = self._emit(f"call i64 @llvm.s{atom.op}.i64(i64 {a}, i64 {b})")
            else:
                done = self._divide(atom.op, a, b, atom.b.constant)
            self._done[key] = done
        return done

    def _divide(self, op: str, a: str, b: str, divisor: int | None) -> str:
        if divisor == 0:
            return "0"
        if op == "ceildiv":
            # ceil(a / b) = -floor(-a / b)
            negated = self._exact("sub", "0", a)
            return self._emit(f"sub i64 0, {self._divide('floordiv', negated, b, divisor)}")
        if divisor is not None and divisor > 0 and divisor & (divisor - 1) == 0:
            if op == "mod":
                return self._emit(f"and i64 {a}, {divisor - 1}")
            return self._emit(f"ashr i64 {a}, {divisor.bit_length() - 1}")
        is_zero = minus = ""
        if divisor is None:
            # The smallest number over -1 ends the process on some CPUs: by 1, and negated.
            is_zero = self._emit(f"icmp eq i64 {b}, 0")
            minus = self._emit(f"icmp eq i64 {b}, -1")
            b = self._emit(f"select i1 {self._emit(f'or i1 {is_zero}, {minus}')}, i64 1, i64 {b}")
        remainder = self._emit(f"srem i64 {a}, {b}")
        inexact = self._emit(f"icmp ne i64 {remainder}, 0")
        mixed = self._emit(f"xor i64 {remainder}, {b}")
        differ = self._emit(f"icmp slt i64 {mixed}, 0")
        adjust = self._emit(f"and i1 {inexact}, {differ}")
        if op == "mod":
            fixed = self._emit(f"add i64 {remainder}, {b}")
            result = self._emit(f"select i1 {adjust}, i64 {fixed}, i64 {remainder}")
        else:
            quotient = self._emit(f"sdiv i64 {a}, {b}")
            down = self._emit(f"sext i1 {adjust} to i64")
            result = self._emit(f"add i64 {quotient}, {down}")
            if minus:
                result = self._emit(f"select i1 {minus}, i64 {self._exact('sub', '0', a)}, i64 {result}")
        return self._emit(f"select i1 {is_zero}, i64 0, i64 {result}") if is_zero else result
