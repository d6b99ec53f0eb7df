"""The options of `@tw.kernel`, declared once: what each takes, what it does, and the attribute of ZynML that it is.

In: options by name, as values or as the text of a decorator in a file that is not executed. Out: attributes of the untyped tree, and the
options that are about calls and compilations. Values of the wrong form are `UserError`s that name the option.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from tilewright.base import levels
from tilewright.base.errors import Diagnostics, UserError, close_matches
from tilewright.base.record import record
from tilewright.base.source import NOWHERE, Span
from tilewright.frontend.python.expressions import SourcePlace
from tilewright.frontend.python.options import reduction
from tilewright.tree import syntax
from tilewright.tree.metadata import PRECISIONS, KernelKind, read_attributes
from tilewright.tree.syntax import Argument, Expr, KernelAttribute


@record
class KernelOption:
    """One option: what it takes, what it does, and the attribute that says the same in ZynML (empty: calls and compilations have it)."""

    name: str
    form: str
    effect: str
    attribute: str = ""
    fate: str = "acts"


KERNEL_OPTIONS: tuple[KernelOption, ...] = (
    KernelOption("device", '"cpu", "cuda:1", "gpu"', "where calls run that name no device", "device"),
    KernelOption("precision", '"auto", "ieee", "tf32", "3xtf32"', "how f32 is multiplied in sums of products", "precision"),
    KernelOption("optimize", '"O0", "O1", "O2", "O3", "Os", "Olatency", "tiered"', "how much work goes into machine code; `tiered`: quick code first, exchanged for the default's", "optimize", "hint"),
    KernelOption("schedule", "a text that `tw.tune` reports", "the schedule of the kernel's products, or of its loops; one that does not fit is an error"),
    KernelOption("asynchronous", "True, False", "calls give a future at once", "async"),
    KernelOption("watchdog", "seconds", "a GPU stops the kernel's open-ended loops after that time"),
    KernelOption("reduce", '"+", "max", …', "combines what the loops yield", "kernel"),
    KernelOption("axis", "a number, or several", "with reduce: the loops that are reduced", "kernel"),
    KernelOption("parallel", '"data"', "with devices: splits the batch of every call", "parallel"),
    KernelOption("devices", "a list of names", "with parallel: the devices that share a call", "device"),
    KernelOption("launches", "1", "all kernels become one launch on a GPU"),
    KernelOption("kind", '"matmul", "elementwise", …', "the loops are held to it", "kernel"),
    KernelOption("tile", "(m, n, k), {'block_q': 64}", "results that one block computes", "tile", "hint"),
    KernelOption("workgroup", "threads, or up to three numbers", "threads of one block on a GPU", "workgroup", "hint"),
    KernelOption("shared", "bytes", "the most shared memory that one block may take on a GPU", "shared", "hint"),
    KernelOption("vector", "a number", "elements that one thread loads and stores at once", "vector", "hint"),
    KernelOption("unroll", "a number", "how often the loops that stay loops are unrolled", "unroll", "hint"),
    KernelOption("max_registers", "a number", "the most registers that a thread may take on a GPU", "max_registers", "hint"),
    KernelOption("tensor_cores", "True, False", "takes a schedule with matrix instructions", "tensor_cores", "hint"),
    KernelOption("async_copy", "True, False", "takes a schedule that copies operands asynchronously", "async_copy", "hint"),
    KernelOption("strict", "True, False", "hints bind: one that cannot be followed is an error", "strict"),
    KernelOption("broadcast", "{'v': 1}", "an input lies along that axis of the results; checked", "broadcast"),
    KernelOption("vectorizable", "True, False", "promises that no loop carries a value; checked", "vectorizable"),
    KernelOption("deterministic", "True, False", "scatters give the same bits on every run and for any number of threads", "deterministic"),
    KernelOption("activations", '"q8"', "numbers that packed weights are multiplied with are rounded to eight bits", "activations"),
    KernelOption("unchecked", "True, False", "leaves out the checks of indices as a CPU kernel runs", "unchecked"),
    KernelOption("check", "True, False", "checks every index that is not proven, on every device"),
    KernelOption("gpu_compute", "True, False", "refuses to run on a CPU", "gpu_compute"),
)
"""All options, in the order of the documents."""

_PRIMITIVES = {
    KernelKind.REDUCE.value: "write reduce=", KernelKind.SCAN.value: "call tw.scan", KernelKind.SORT.value: "call tw.sort",
    KernelKind.FILTER.value: "call tw.filter", KernelKind.HISTOGRAM.value: "call tw.histogram",
}  # fmt: skip
"""Kinds of ZynML that are something else in Python."""
KINDS = tuple(kind.value for kind in KernelKind if kind.value not in _PRIMITIVES)
OPTION = {option.name: option for option in KERNEL_OPTIONS}
_FLAGS = ("tensor_cores", "async_copy", "strict", "vectorizable", "gpu_compute", "unchecked", "deterministic")
_NUMBERS = ("shared", "vector", "unroll", "max_registers")
CALL_OPTIONS = ("device", "schedule", "asynchronous", "watchdog", "parallel", "devices", "launches", "check")
"""Options that are not attributes: those who call or compile the kernel follow them."""


def attributes_of(given: Mapping[str, object], span: Span = NOWHERE) -> tuple[KernelAttribute, ...]:
    """The attributes that options mean. Options that are None or False say nothing. Raises UserError."""
    found = list(reduction(_text(given, "reduce", span), given.get("axis"), span))  # type: ignore[arg-type]  # checked there
    kind = _text(given, "kind", span)
    if kind and found:
        raise UserError.at("TW016", f"kind={kind!r} and reduce={given['reduce']!r}", span, "leave kind= out: reduce= is the kind")
    if kind in _PRIMITIVES:
        raise UserError.at("TW005", f"kind={kind!r} is no kind of kernels in Python", span, f"{_PRIMITIVES[kind]} instead")
    if kind and kind not in KINDS:
        close = close_matches(kind, KINDS, 1)
        raise UserError.at("TW011", f"unknown kernel kind '{kind}'", span, f"did you mean '{close[0]}'?" if close else f"choose one of {', '.join(KINDS)}")
    if kind:
        found.append(KernelAttribute("kernel", (Argument(syntax.Name(kind, span=span), span=span),), span=span))
    for name in ("tile", "workgroup"):
        if (value := given.get(name)) is not None:
            found.append(KernelAttribute(name, _arguments(name, value, span), span=span))
    for name in _NUMBERS:
        if (value := given.get(name)) is not None:
            found.append(KernelAttribute(name, (Argument(_number(name, value, span), span=span),), span=span))
    for name in _FLAGS:
        value = given.get(name, False)
        if not isinstance(value, bool):
            raise UserError.at("TW009", f"{name} is {value!r}", span, "give True or False")
        if value:
            found.append(KernelAttribute(name, (), span=span))
    level = levels.checked(given.get("optimize"), span)
    if level:
        found.append(KernelAttribute("optimize", (Argument(syntax.String(level, span=span), span=span),), span=span))
    activations = _text(given, "activations", span)
    if activations and activations != "q8":
        raise UserError.at("TW016", f"activations={activations!r}", span, 'give "q8", or leave it out')
    if activations:
        found.append(KernelAttribute("activations", (Argument(syntax.String(activations, span=span), span=span),), span=span))
    found += _broadcasts(given.get("broadcast"), span)
    sink = Diagnostics()
    read_attributes(found, sink)
    sink.raise_if_errors()
    return tuple(found)


def _text(given: Mapping[str, object], name: str, span: Span) -> str:
    value = given.get(name) or ""
    if not isinstance(value, str):
        raise UserError.at("TW009", f"{name} is {value!r}", span, f"give a text: {OPTION[name].form}")
    return value


def _number(name: str, value: object, span: Span) -> Expr:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError.at("TW009", f"{name} is {value!r}", span, f"give {OPTION[name].form}")
    number = syntax.Number(abs(value), span=span)
    return number if value >= 0 else syntax.Unary("-", number, span=span)


def _arguments(name: str, value: object, span: Span) -> tuple[Argument, ...]:
    """Numbers in order, or by name."""
    if isinstance(value, Mapping):
        return tuple(Argument(_number(name, item, span), str(key), span=span) for key, item in value.items())
    items = value if isinstance(value, tuple | list) else (value,)
    return tuple(Argument(_number(name, item, span), span=span) for item in items)


def _broadcasts(value: object, span: Span) -> list[KernelAttribute]:
    if value is None:
        return []
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise UserError.at("TW009", f"broadcast is {value!r}", span, "give inputs and their axes: broadcast={'v': 1}")
    return [
        KernelAttribute(
            "broadcast", (Argument(syntax.Name(name, span=span), span=span), Argument(_number("broadcast", axis, span), "axis", span=span)), span=span
        )
        for name, axis in value.items()
    ]


def check_options(given: Mapping[str, object], span: Span = NOWHERE) -> None:
    """Options of calls and compilations have the form they need. Raises UserError."""
    if given.get("precision", "auto") not in PRECISIONS:
        raise UserError.at("TW016", f"precision is {given['precision']!r}", span, f"choose one of {', '.join(PRECISIONS)}")
    for name in ("device", "schedule"):
        value = given.get(name)
        if value is not None and not isinstance(value, str):
            raise UserError.at("TW009", f"{name} is {value!r}", span, f"give a text: {OPTION[name].form}")
    if not isinstance(given.get("asynchronous", False), bool):
        raise UserError.at("TW009", f"asynchronous is {given['asynchronous']!r}", span, "give True or False")
    launches = given.get("launches")
    if launches is not None and (isinstance(launches, bool) or launches != 1):
        raise UserError.at("TW016", f"launches is {launches!r}", span, "choose 1, or leave it out: the compiler decides then")


def decorated(
    decorators: Sequence[ast.expr], place: SourcePlace, sink: Diagnostics
) -> tuple[tuple[KernelAttribute, ...], tuple[tuple[str, object], ...]]:
    """What the `@tw.kernel(…)` of a kernel in a file says: attributes, and options of calls and compilations. Its arguments must be literals."""
    given: dict[str, object] = {}
    span = NOWHERE
    for decorator in decorators:
        if not isinstance(decorator, ast.Call):
            continue
        for keyword in decorator.keywords:
            span = place.span(keyword)
            if keyword.arg not in OPTION:
                close = close_matches(keyword.arg or "**", OPTION, 1)
                help = f"did you mean '{close[0]}'?" if close else f"its options are {', '.join(OPTION)}"
                sink.error("TW016", f"a kernel has no option '{keyword.arg or '**'}'", span, help)
                continue
            try:
                given[keyword.arg] = ast.literal_eval(keyword.value)
            except ValueError:
                sink.error("TW016", f"{keyword.arg}= must be a literal in a file that is not executed", span)
    try:
        check_options(given, span)
        attributes = attributes_of(given, span)
    except UserError as error:
        sink.items += error.diagnostics
        return (), ()
    precision = str(given.get("precision", "auto"))
    if precision != "auto":
        attributes += (KernelAttribute("precision", (Argument(syntax.String(precision, span=span), span=span),), span=span),)
    return attributes, tuple((name, _frozen(value)) for name, value in given.items() if name in CALL_OPTIONS)


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
