"""Random ZynML programs of host statements: numbers at the edges, strings, lists, records, arrays, functions, loops.

In: a random generator. Out: the text of a program, which may be wrong in any way; running it gives results or an error of ours.
"""

from __future__ import annotations

import random

NUMBERS = (
    "0", "1", "2", "-1", "3", "7", "63", "64", "-64", "0.5", "-0.0", "1e308", "1e-320", "inf", "-inf", "(inf - inf)", "true", "false", "9223372036854775807",
    "-9223372036854775808", "18446744073709551615", "4294967296", "1000000000000", "64KB", "5ms", "i8(200)", "u8(3)", "f16(1e6)", "f32(0.1)", "bf16(3)", "cast(3, i32)",
)  # fmt: skip
BINARY = ("+", "-", "*", "/", "%", "**", "&", "|", "^", "<<", ">>", "==", "!=", "<", "<=", ">", ">=", "and", "or", "@")
FUNCTIONS = (
    "exp", "log", "sqrt", "rsqrt", "abs", "floor", "round", "tanh", "relu", "sigmoid", "gelu", "erf", "softplus", "len", "str", "copy", "transpose",
    "i8", "i32", "u64", "f16", "bf16", "bool", "f", "g", "row_max", "dot",
)  # fmt: skip
WITH_TWO = ("min", "max", "pow", "reshape", "split", "concat", "full", "cast", "zeros", "ones", "h")
PARTS = (".shape", ".size", ".ndim", ".dtype", ".T", ".a", ".b", "[0]", "[-1]", "[1:2]", "[5:1]", "[0, 0]", '["a"]', "[inf]", "[0.5]", "[true]", "[9223372036854775807]")
VALUES = ('"text"', '""', "[]", "[1, 2, 3]", "[[1], 2]", "(1, 2)", "{a: 1, b: [2]}", "zeros(3)", "ones([2, 3])", "zeros(0)", "full([2], 7)", "x", "w", "n", "f32", "zeros(2, 2).T")
NAMES = ("y", "z", "t", "p", "q")


def expression(choice: random.Random, depth: int = 3) -> str:
    """An expression of any kind."""
    kind = choice.randrange(12) if depth else choice.randrange(3)
    if kind < 2:
        return choice.choice(NUMBERS)
    if kind == 2:
        return choice.choice((*VALUES, *NAMES, "x", "n"))
    if kind < 6:
        return f"({expression(choice, depth - 1)} {choice.choice(BINARY)} {expression(choice, depth - 1)})"
    if kind == 6:
        return f"{choice.choice(FUNCTIONS)}({expression(choice, depth - 1)})"
    if kind == 7:
        return f"{choice.choice(WITH_TWO)}({expression(choice, depth - 1)}, {expression(choice, depth - 1)})"
    if kind == 8:
        return f"{choice.choice((*VALUES, *NAMES, 'x', 'w'))}{choice.choice(PARTS)}"
    if kind == 9:
        return f"({expression(choice, depth - 1)} if {expression(choice, depth - 1)} else {expression(choice, depth - 1)})"
    if kind == 10:
        return f"({choice.choice(('-', '~', 'not '))}{expression(choice, depth - 1)})"
    return f"[{expression(choice, depth - 1)}, {expression(choice, depth - 1)}]"


def statement(choice: random.Random, inner: bool = False) -> str:
    kind = choice.randrange(8)
    name = choice.choice(NAMES)
    if kind < 4 or inner:
        return f"{choice.choice(('let', 'var'))} {name} = {expression(choice)}" if kind < 5 else f"{name} = {expression(choice, 2)}"
    if kind == 4:
        return f"{name}{choice.choice(PARTS)} = {expression(choice, 2)}"
    if kind == 5:
        low, high = choice.choice(("0", "-2", "3", "inf", "n")), choice.choice(("3", "0", "2.0", "0.5", "(0 / 1)", '"s"', "n"))
        return f"for i in {low}..{high}{choice.choice(('', ' step 2', ' step 0', ' step -1'))}:\n    {statement(choice, True)}"
    if kind == 6:
        return f"if {expression(choice, 2)}:\n    {statement(choice, True)}\nelse:\n    {statement(choice, True)}"
    return f"let ({name}, t) = {expression(choice, 2)}"


def program(choice: random.Random) -> str:
    """A program with functions f, g and h, and a few statements."""
    functions = [f"fn f(a): return {choice.choice(('a + 1', 'g(a)', 'a * a', 'a[0]'))}", f"fn g(a): return {choice.choice(('a', '-a', 'f(a)', 'g(a)', 'exp(a)'))}"]
    functions.append(f"fn h(a, b = 2): return {choice.choice(('a ** b', 'a / b', 'a << b', 'f(a) + b', 'h(b, a)'))}")
    return "\n".join([*functions, *(statement(choice) for _ in range(choice.randrange(1, 5)))]) + "\n"
