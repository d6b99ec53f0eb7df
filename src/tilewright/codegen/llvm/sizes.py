"""A `Size` as LLVM instructions on i64.

In: a size and an LLVM operand for each of its names. Out: an operand that holds the value, with the instructions appended to a
list. Equal steps are emitted once, as most sizes of a program have factors in common. What is emitted computes exactly what `Size.evaluate` computes (floor division, modulus with the divisor's sign, division
by zero gives zero), as long as no intermediate value leaves 64 bits. A checked emitter says when one does: `take_overflows` gives the
conditions; its module needs `CHECKED_STEPS`, for a step is a call: code that hardly ever runs should be short. Host code is checked; kernels are not,
since their host code has computed or bounded the same sizes before.
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
CHECKED_STEPS = tuple(
    f"""define internal i64 @checked.{word}(i64 %a, i64 %b, ptr %left) noinline nounwind {{
  %both = call {{i64, i1}} @llvm.s{word}.with.overflow.i64(i64 %a, i64 %b)
  %over = extractvalue {{i64, i1}} %both, 1
  %before = load i1, ptr %left
  %now = or i1 %before, %over
  store i1 %now, ptr %left
  %result = extractvalue {{i64, i1}} %both, 0
  ret i64 %result
}}"""
    for word in ("add", "sub", "mul")
)
"""What it must define besides to use those of a checked emitter: `a word b`; `left` is set where 64 bits do not hold it."""


def names_bound(sizes: Iterable[Size]) -> int:
    """A power of two: where every name is below it, and not below its negative, no step of any of the sizes leaves 64 bits. 0 where a
    constant does."""
    found = list(sizes)
    low, high = -1, 62
    while low < high:
        power = (low + high + 1) // 2
        known: dict[Size, int] = {}
        fits = all(_magnitude(size, 1 << power, known) < 1 << 62 for size in found)
        low, high = (power, high) if fits else (low, power - 1)
    return 1 << low if low >= 0 else 0


def _magnitude(size: Size, name: int, known: dict[Size, int]) -> int:
    """The most that the size, and any part of it, can be where no name is more than `name`. `known` are those of other sizes."""
    found = known.get(size)
    if found is not None:
        return found
    total = 0
    for monomial, factor in size.terms:
        term = abs(factor)
        for atom in monomial:
            term *= name if isinstance(atom, str) else max(_magnitude(atom.a, name, known), _magnitude(atom.b, name, known)) + 1
        total += term
    known[size] = max(1, total)
    return known[size]


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
        self._steps: dict[str, str] = {}
        """Instructions, and the registers of their results."""
        self._count = [0]
        self._left = f"%{prefix}_left"
        if checked:
            self.lines += [f"  {self._left} = alloca i1", f"  store i1 false, ptr {self._left}"]

    def branch(self) -> SizeEmitter:
        other = SizeEmitter(self.lines, self.values, self.prefix)
        other.checked = self.checked
        other._done = dict(self._done)
        other._steps = dict(self._steps)
        other._count = self._count
        other._overflows = self._overflows
        return other

    def bind(self, name: str, operand: str) -> None:
        """From now on `name` has this value."""
        self.values[name] = operand

    def take_overflows(self) -> list[str]:
        """Conditions (i1), true where a step since the last time has left 64 bits. Test them before any value is used."""
        found = list(dict.fromkeys(self._overflows))
        self._overflows.clear()
        return [self._new(f"load i1, ptr {self._left}") if condition == self._left else condition for condition in found]

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
        """The product of i64 operands, wherever `lines` has come to; 1 when there are none."""
        known, self._steps = self._steps, {}
        result = self._product(operands)
        self._steps = known
        return result

    def _product(self, operands: list[str]) -> str:
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
        self._overflows.append(self._left)
        return self._emit(f"call i64 @checked.{word}(i64 {a}, i64 {b}, ptr {self._left})")

    def _emit(self, instruction: str) -> str:
        """The register that holds an instruction's result, for instructions whose results depend on their operands alone."""
        register = self._steps.get(instruction)
        if register is None:
            register = self._steps[instruction] = self._new(instruction)
        return register

    def _new(self, instruction: str) -> str:
        self._count[0] += 1
        register = f"%{self.prefix}{self._count[0]}"
        self.lines.append(f"  {register} = {instruction}")
        return register

    def _sum(self, size: Size) -> str:
        total = ""
        for monomial, factor in size.terms:
            atoms = [self.values[a] if isinstance(a, str) else self._call(a) for a in monomial]
            negative = factor < 0 and bool(total)
            # The number last: what comes before it is a step of other terms, too.
            term = self._product([*atoms, self._number(-factor if negative else factor)])
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
