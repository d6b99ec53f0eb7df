"""A `Size` as LLVM instructions on i64.

In: a size and an LLVM operand for each of its names. Out: an operand that holds the value, with the instructions appended to a
list. What is emitted computes exactly what `Size.evaluate` computes (floor division, modulus with the divisor's sign, division
by zero gives zero), as long as no intermediate value leaves 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.base.sizes import Call, Size

DECLARATIONS = (
    "declare i64 @llvm.smin.i64(i64, i64)",
    "declare i64 @llvm.smax.i64(i64, i64)",
)
"""What a module must declare to use the instructions."""


class SizeEmitter:
    """Appends instructions to `lines`; equal sizes are computed once, so `lines` must be straight-line code.

    `branch` gives an emitter for code that `lines` dominates but that does not dominate what follows.
    """

    def __init__(self, lines: list[str], values: Mapping[str, str], prefix: str = "size") -> None:
        self.lines = lines
        self.values = dict(values)
        self.prefix = prefix
        self._done: dict[Size, str] = {}
        self._count = [0]

    def branch(self) -> SizeEmitter:
        other = SizeEmitter(self.lines, self.values, self.prefix)
        other._done = dict(self._done)
        other._count = self._count
        return other

    def bind(self, name: str, operand: str) -> None:
        """From now on `name` has this value."""
        self.values[name] = operand

    def value(self, size: Size) -> str:
        """An i64 operand: a literal or a register."""
        constant = size.constant
        if constant is not None:
            return str(constant)
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
            result = self._emit(f"mul i64 {result}, {operand}") if result else operand
        return result or "1"

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
            term = self.product([str(-factor if negative else factor), *atoms])
            total = self._emit(f"{'sub' if negative else 'add'} i64 {total}, {term}") if total else term
        return total

    def _call(self, atom: Call) -> str:
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
            negated = self._emit(f"sub i64 0, {a}")
            return self._emit(f"sub i64 0, {self._divide('floordiv', negated, b, divisor)}")
        if divisor is not None and divisor > 0 and divisor & (divisor - 1) == 0:
            if op == "mod":
                return self._emit(f"and i64 {a}, {divisor - 1}")
            return self._emit(f"ashr i64 {a}, {divisor.bit_length() - 1}")
        is_zero = ""
        if divisor is None:
            is_zero = self._emit(f"icmp eq i64 {b}, 0")
            b = self._emit(f"select i1 {is_zero}, i64 1, i64 {b}")
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
            minus = self._emit(f"sext i1 {adjust} to i64")
            result = self._emit(f"add i64 {quotient}, {minus}")
        return self._emit(f"select i1 {is_zero}, i64 0, i64 {result}") if is_zero else result
