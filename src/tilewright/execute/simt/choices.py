"""Ways to launch an explicit kernel, of which calls without a grid take one: `@tw.gpu(choices=[tw.LaunchChoice(...), ...])`.

In: a kernel's choices and the arguments of a call. Out: the configured kernel to call. A choice has the sizes of a launch, as numbers or as
functions of the arguments, and constants: names that the kernel uses, or parameters of its own that a call leaves out. Code is made for the
values of constants. The tuning table says which choice was fastest (`execute/simt/tuning.py`); without it the first is taken.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilewright.base.dtypes import DType
from tilewright.base.errors import TilewrightError, UserError
from tilewright.base.source import Span
from tilewright.frontend.simt.source import FunctionSource

Number = int | float | bool
Sized = int | tuple[int, ...] | Callable[..., object]


class LaunchChoice:
    """One way to launch a kernel: `tw.LaunchChoice(block=128, threads=lambda x: x.size, ITEMS=4)`.

    `grid` says how many blocks, or `threads` how many threads: those beyond do nothing. `shared` is the dynamic shared memory in bytes. All
    three may be functions; their parameters are named as arguments of the kernel or constants. `min_blocks` is as in `tw.gpu`. Every other
    name is a constant.
    """

    def __init__(
        self, *, block: int | tuple[int, ...], grid: Sized | None = None, threads: int | Callable[..., object] | None = None,
        shared: int | Callable[..., object] = 0, min_blocks: int | None = None, **constants: Number | DType,
    ) -> None:  # fmt: skip
        if (grid is None) == (threads is None):
            given = "both" if grid is not None else "neither"
            raise UserError.at("TW016", f"tw.LaunchChoice takes grid= or threads=, got {given}", help="for instance tw.LaunchChoice(block=128, threads=lambda x: x.size)")
        for name, value in constants.items():
            if not isinstance(value, int | float | DType):
                raise UserError.at("TW009", f"the constant '{name}' of tw.LaunchChoice is {value!r}", help="give a number, a bool or a dtype")
        self.block, self.grid, self.threads, self.shared, self.min_blocks = block, grid, threads, shared, min_blocks
        self.constants: dict[str, Number | DType] = constants

    def describe(self) -> str:
        """All of it but functions, as the tuning table has it."""
        numbers = {"grid": self.grid, "threads": self.threads, "shared": self.shared or None, "min_blocks": self.min_blocks}
        shown = {n: v for n, v in numbers.items() if v is not None and not callable(v)}
        words = {"block": self.block, **shown, **self.constants}
        return " ".join(f"{n}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}" for n, v in words.items())

    def size(self, what: str, arguments: Mapping[str, object], kernel: str, span: Span) -> object:
        """The grid, the number of threads or the bytes of shared memory of a call."""
        value = getattr(self, what)
        if not callable(value):
            return value
        values: dict[str, object] = {**arguments, **self.constants}
        wanted = [p.name for p in inspect.signature(value).parameters.values() if p.default is p.empty or p.name in values]
        unknown = [name for name in wanted if name not in values]
        if unknown:
            raise UserError.at(
                "TW016", f"{what}= of the choice '{self.describe()}' of {kernel} asks for '{unknown[0]}'", span, f"there are {', '.join(values)}"
            )
        try:
            return value(**{name: values[name] for name in wanted})
        except TilewrightError:
            raise
        except Exception as error:
            raise UserError.at(
                "TW009", f"{what}= of the choice '{self.describe()}' of {kernel} failed: {type(error).__name__}: {error}", span
            ) from error

    def __repr__(self) -> str:
        functions = [f"{n}={getattr(v, '__name__', 'function')}" for n in ("grid", "threads", "shared") if callable(v := getattr(self, n))]
        return f"tw.LaunchChoice({', '.join([*self.describe().split(), *functions])})"


def checked_choices(name: str, choices: object) -> tuple[LaunchChoice, ...]:
    """The choices of a kernel as they were given. Raises `UserError`."""
    if not isinstance(choices, Sequence) or not all(isinstance(c, LaunchChoice) for c in choices):
        raise UserError.at("TW009", f"choices of {name} are {choices!r}", help="give a list of tw.LaunchChoice(...)")
    first = choices[0].constants.keys() if choices else ()
    for choice in choices:
        if choice.constants.keys() != first:
            raise UserError.at(
                "TW016", f"the choice '{choice.describe()}' of {name} has other constants than '{choices[0].describe()}'", help="give every choice the same names"
            )
    return tuple(choices)


def choice_texts(choices: Sequence[LaunchChoice]) -> dict[str, LaunchChoice]:
    """Every choice by the text that stands for it; those that look alike, as they differ in functions, are counted."""
    found: dict[str, LaunchChoice] = {}
    for choice in choices:
        text, count = choice.describe(), 2
        while text in found:
            text, count = f"{choice.describe()} ({count})", count + 1
        found[text] = choice
    return found


def with_constants(source: FunctionSource, constants: Mapping[str, object]) -> FunctionSource:
    """The kernel with these names as constants: parameters among them are left out."""
    old = source.node.args
    positional = [*old.posonlyargs, *old.args]
    used = {n.id for n in ast.walk(source.node) if isinstance(n, ast.Name)} | {a.arg for a in (*positional, *old.kwonlyargs)}
    for name in constants:
        if name not in used:
            raise UserError.at(
                "TW002", f"'{name}' is a constant of a tw.LaunchChoice, but {source.name} does not use it", source.head(), "name a parameter of the kernel, or a constant it reads"
            )

    def kept(arguments: Sequence[ast.arg]) -> list[ast.arg]:
        return [a for a in arguments if a.arg not in constants]

    defaults = [d for a, d in zip(positional[len(positional) - len(old.defaults) :], old.defaults, strict=True) if a.arg not in constants]
    named = [d for a, d in zip(old.kwonlyargs, old.kw_defaults, strict=True) if a.arg not in constants]
    arguments = ast.arguments(kept(old.posonlyargs), kept(old.args), old.vararg, kept(old.kwonlyargs), named, old.kwarg, defaults)
    # A new node: what was found out about the old one hangs on it.
    fields = {field: getattr(source.node, field) for field in source.node._fields}
    node = ast.copy_location(type(source.node)(**{**fields, "args": arguments}), source.node)
    return replace(source, node=node, names={**source.names, **constants})
