"""A kernel as the text of a Python function."""

from __future__ import annotations

import math

from .arithmetic import KINDS
from .model import (
    Accumulate,
    Atomic,
    Binary,
    Cast,
    Choice,
    Compare,
    Draw,
    Expr,
    Extent,
    For,
    Function,
    If,
    Index,
    Kernel,
    Lit,
    Load,
    Logic,
    Make,
    Range,
    Set,
    Shared,
    Shuffle,
    Stmt,
    Store,
    Swap,
    Sync,
    Unary,
    Var,
    While,
    Whole,
)


def dtype_word(dtype: str) -> str:
    return "tw.bool_" if dtype == "bool" else f"tw.{dtype}"


def literal(value: int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "tw.inf" if value > 0 else "-tw.inf"
    return repr(value)


class Printer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.whole: tuple[str, ...] = ()
        self.lines: list[str] = []

    def text(self, name: str) -> str:
        kernel = self.kernel
        arguments = [f"{i.name}: {'tw.InOut' if i.written and not kernel.explicit else 'tw.Array'}" for i in kernel.inputs]
        arguments += [f"{n.name}: {'bool' if n.dtype == 'bool' else dtype_word(n.dtype)}" for n in kernel.numbers]
        arguments += [f"{dim}: int" for dim in kernel.given]
        self.add(0, "@tw.gpu" if kernel.explicit else "@tw.kernel")
        self.add(0, f"def {name}({', '.join(arguments)}):")
        if kernel.explicit:
            self.add(1, "t = tw.i32(tw.thread.x)")
            self.add(1, "i = tw.i32(tw.gpu_thread_id())")
        else:
            self.sizes()
        self.block(1, kernel.body)
        if not kernel.explicit and kernel.results:
            self.add(1, f"return {', '.join(kernel.results)}")
        return "\n".join(self.lines) + "\n"

    def add(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def sizes(self) -> None:
        """Dims come from an input that has them as an axis, else they are constants, unless the call gives them."""
        for dim, extent in self.kernel.dims:
            if dim in self.kernel.given:
                continue
            places = [
                f"{i.name}.shape[{axis}]" for i in self.kernel.inputs for axis, s in enumerate(i.shape) if s.dim == dim and s.times == 1 and not s.plus
            ]  # fmt: skip
            self.add(1, f"{dim} = {places[0] if places else extent}")

    # -- statements --------------------------------------------------------------------------------------------------

    def block(self, depth: int, body: tuple[Stmt, ...]) -> None:
        for stmt in body:
            self.statement(depth, stmt)

    def statement(self, depth: int, stmt: Stmt) -> None:
        if isinstance(stmt, Make):
            shape = "(" + "".join(f"{s.text()}, " for s in stmt.shape).rstrip() + ")"
            if stmt.fill is None:
                self.add(depth, f"{stmt.name} = tw.empty({shape}, {dtype_word(stmt.dtype)})")
            elif stmt.fill == 0:
                self.add(depth, f"{stmt.name} = tw.zeros({shape}, {dtype_word(stmt.dtype)})")
            else:
                self.add(depth, f"{stmt.name} = tw.full({shape}, {literal(stmt.fill)}, {dtype_word(stmt.dtype)})")
        elif isinstance(stmt, Set):
            value = self.expr(stmt.value)
            self.add(depth, f"{stmt.name} = {dtype_word(stmt.dtype)}({value})" if stmt.fixed else f"{stmt.name} = {value}")
        elif isinstance(stmt, Accumulate):
            if stmt.op in ("min", "max"):
                self.add(depth, f"{stmt.name} = {stmt.op}({stmt.name}, {self.expr(stmt.value)})")
            elif stmt.op in ("and", "or"):
                self.add(depth, f"{stmt.name} = {stmt.name} {stmt.op} {self.expr(stmt.value)}")
            else:
                self.add(depth, f"{stmt.name} {stmt.op}= {self.expr(stmt.value)}")
        elif isinstance(stmt, Store) and stmt.op in ("min", "max"):
            place = f"{stmt.array}[{self.indices(stmt.indices)}]"
            self.add(depth, f"{place} = tw.{stmt.op}({place}, {self.expr(stmt.value)})")
        elif isinstance(stmt, Swap):
            self.add(depth, f"{', '.join(stmt.names)} = {', '.join((*stmt.names[1:], stmt.names[0]))}")
        elif isinstance(stmt, Store):
            self.add(depth, f"{stmt.array}[{self.indices(stmt.indices)}] {stmt.op}= {self.expr(stmt.value)}")
        elif isinstance(stmt, For):
            self.loop(depth, stmt)
        elif isinstance(stmt, If):
            self.add(depth, f"if {self.expr(stmt.cond)}:")
            self.block(depth + 1, stmt.then)
            if stmt.other:
                self.add(depth, "else:")
                self.block(depth + 1, stmt.other)
        elif isinstance(stmt, While):
            self.add(depth, f"{stmt.counter} = tw.i32(0)")
            self.add(depth, f"while {stmt.counter} < {stmt.most} and {self.expr(stmt.cond)}:")
            self.block(depth + 1, stmt.body)
            self.add(depth + 1, f"{stmt.counter} += 1")
        elif isinstance(stmt, Whole):
            self.assign_whole(depth, stmt)
        elif isinstance(stmt, Shared):
            self.add(depth, f"{stmt.name} = tw.shared({stmt.length}, {dtype_word(stmt.dtype)})")
        elif isinstance(stmt, Sync):
            self.add(depth, "tw.gpu_sync()")
        elif isinstance(stmt, Atomic):
            self.add(depth, f"tw.atomic_{stmt.op}({stmt.array}, {self.expr(stmt.index)}, {self.expr(stmt.value)})")
        else:
            raise TypeError(stmt)

    def loop(self, depth: int, stmt: For) -> None:
        names = ", ".join(stmt.names)
        if stmt.grid:
            bounds = ", ".join(self.range(r, True) for r in stmt.ranges)
            self.add(depth, f"for {names} in tw.grid({bounds}):")
        else:
            assert len(stmt.names) == 1
            self.add(depth, f"for {names} in {self.range(stmt.ranges[0], False)}:")
        self.block(depth + 1, stmt.body)

    def range(self, bounds: Range, grid: bool) -> str:
        start, stop = self.expr(bounds.start), self.expr(bounds.stop)
        if start == "0" and bounds.step == 1:
            return stop if grid else f"range({stop})"
        return f"range({start}, {stop})" if bounds.step == 1 else f"range({start}, {stop}, {bounds.step})"

    def assign_whole(self, depth: int, stmt: Whole) -> None:
        self.whole = stmt.names
        value = self.expr(stmt.value)
        self.whole = ()
        if not stmt.reduce:
            self.add(depth, f"{stmt.name} = {value}")
            return
        axis = "" if len(stmt.axes) == len(stmt.names) else f", axis={stmt.axes[0] if len(stmt.axes) == 1 else stmt.axes}"
        self.add(depth, f"{stmt.name} = tw.{stmt.reduce}({value}{axis})")

    # -- expressions -------------------------------------------------------------------------------------------------

    def indices(self, indices: tuple[Expr, ...]) -> str:
        return ", ".join(map(self.bare, indices)) or "()"

    def bare(self, expr: Expr) -> str:
        text = self.expr(expr)
        return text[1:-1] if isinstance(expr, Binary) and text.startswith("(") else text

    def expr(self, expr: Expr) -> str:
        if isinstance(expr, Lit):
            text = literal(expr.value)
            return f"({text})" if text.startswith("-") else text
        if isinstance(expr, Index | Var):
            return expr.name
        if isinstance(expr, Extent):
            return expr.size.text() if (not expr.size.plus and expr.size.times == 1) or not expr.size.dim else f"({expr.size.text()})"
        if isinstance(expr, Load):
            return expr.array + expr.view if self.whole else f"{expr.array}[{self.indices(expr.indices)}]"
        if isinstance(expr, Binary):
            left, right = self.expr(expr.left), self.expr(expr.right)
            return f"{expr.op}({left}, {right})" if expr.op in ("min", "max") and not self.whole else (
                f"tw.{expr.op}imum({left}, {right})" if expr.op in ("min", "max") else f"({left} {expr.op} {right})"
            )  # fmt: skip
        if isinstance(expr, Unary):
            if expr.op == "abs":
                return f"abs({self.expr(expr.value)})"
            return f"({expr.op}{' ' if expr.op == 'not' else ''}{self.expr(expr.value)})"
        if isinstance(expr, Function):
            return f"{'' if expr.name == 'round' else 'tw.'}{expr.name}({self.expr(expr.value)})"
        if isinstance(expr, Draw):
            bounds = [literal(expr.low), literal(expr.high)] if expr.name == "randint" else []
            return f"tw.random.{expr.name}({', '.join([literal(expr.seed), *bounds, *map(self.bare, expr.indices)])}, dtype={dtype_word(expr.dtype)})"
        if isinstance(expr, Cast):
            return f"{dtype_word(expr.dtype)}({self.expr(expr.value)})"
        if isinstance(expr, Compare | Logic):
            return f"({self.expr(expr.left)} {expr.op} {self.expr(expr.right)})"
        if isinstance(expr, Choice):
            cond, then, other = self.expr(expr.cond), self.expr(expr.then), self.expr(expr.other)
            return f"tw.where({cond}, {then}, {other})" if expr.eager else f"({then} if {cond} else {other})"
        if isinstance(expr, Shuffle):
            return f"tw.shuffle_xor({self.expr(expr.value)}, {expr.mask})"
        raise TypeError(expr)


def kernel_text(kernel: Kernel, name: str = "kernel") -> str:
    """The function under its decorator; it needs `tw`."""
    return Printer(kernel).text(name)


def signature(kernel: Kernel) -> str:
    """One line on the arguments, for reports."""
    arrays = [f"{i.name}: {i.dtype}[{', '.join(str(s.value(kernel.extents)) for s in i.shape)}] {i.layout}" for i in kernel.inputs]
    numbers = [f"{n.name}: {n.dtype} = {n.value}" for n in kernel.numbers] + [f"{dim}: int = {kernel.extents[dim]}" for dim in kernel.given]
    launch = [f"grid {kernel.grid}, block {kernel.block}"] if kernel.explicit else []
    return "; ".join([*arrays, *numbers, *launch, *([f"out={kernel.out}"] if kernel.out else [])])


__all__ = ["KINDS", "kernel_text", "signature"]
