"""Parameters of `@kernel kind(…)` as numbers, wherever a program has them from.

In: the attributes of a compute block and the values around it. Out: the same attributes with every parameter as a literal. A parameter
is given in the attribute (`conv2d(stride=s)`), among the block's inputs (`compute(image, w, stride)`), or by a name of the program that
the body uses (`let stride = 2`, `run(stride=2)`): all bind alike, and code is made for the very number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.kernel_words import ALIASES, KIND, KindParameter, Value
from tilewright.tree.metadata import constant
from tilewright.tree.syntax import Argument, Expr, KernelAttribute
from tilewright.zyn.host import functions as host_functions
from tilewright.zyn.host import values as host_values
from tilewright.zyn.host.dimensions import AbstractValue


def kind_of(attributes: Sequence[KernelAttribute]) -> tuple[KernelAttribute | None, str]:
    """The `@kernel` attribute, and the kind it names."""
    for attribute in attributes:
        if attribute.name == "kernel" and attribute.args:
            kind = attribute.args[0].value
            name = kind.function if isinstance(kind, syntax.Call) else kind
            label = name.id if isinstance(name, syntax.Name) else name.value if isinstance(name, syntax.String) else ""
            return attribute, ALIASES.get(label, label)
    return None, ""


def parameters_in_scope(attributes: Sequence[KernelAttribute]) -> frozenset[str]:
    """Names that are parameters of the block's kind: values of the program with these names bind them."""
    _, label = kind_of(attributes)
    return frozenset(p.name for p in KIND[label].parameters if p.in_body) if label in KIND else frozenset()


def _given(attributes: Sequence[KernelAttribute]) -> tuple[Argument, ...]:
    """What is given to the block's kind."""
    attribute, _ = kind_of(attributes)
    if attribute is None:
        return ()
    kind = attribute.args[0].value
    return (kind.args if isinstance(kind, syntax.Call) else ()) + attribute.args[1:]


def parameter_expressions(attributes: Sequence[KernelAttribute]) -> list[Expr]:
    """What the kind's parameters are given as, where that is no literal."""
    return [a.value for a in _given(attributes) if a.keyword is not None and constant(a.value) is None]


def parameter_names(attributes: Sequence[KernelAttribute]) -> set[str]:
    """The parameters that are given to the block's kind: names in its body."""
    return {a.keyword for a in _given(attributes) if a.keyword is not None}


def bind_parameters(
    attributes: tuple[KernelAttribute, ...], inputs: Mapping[str, Expr], named: Collection[str], values: Mapping[str, object],
    evaluate: Callable[[Expr], object],
) -> tuple[tuple[KernelAttribute, ...], dict[str, Value]]:  # fmt: skip
    """The attributes with the kind's parameters as literals, and those that are bound. `named` are names that the body uses."""
    attribute, label = kind_of(attributes)
    if attribute is None:
        return attributes, {}
    kind = attribute.args[0].value
    given = _given(attributes)
    word = KIND.get(label)
    found: dict[str, Value] = {}
    args: list[Argument] = []
    for argument in given:
        known = argument.keyword is None or constant(argument.value) is not None or isinstance(argument.value, syntax.List | syntax.Tuple)
        declared = word.parameter(argument.keyword or "") if word is not None else None
        if known or (word is not None and declared is None):
            args.append(argument)
            literal = constant(argument.value)
            if argument.keyword is not None and literal is not None:
                found[argument.keyword] = literal
            continue
        assert argument.keyword is not None
        number = _number(label, argument.keyword, declared, evaluate(argument.value), argument.value.span)
        found[argument.keyword] = number
        args.append(replace(argument, value=_literal(number, argument.value.span)))
    for parameter in word.parameters if word is not None else ():
        name = parameter.name
        if not parameter.in_body or name in found:
            continue
        value: object
        if name in inputs:
            value, span = evaluate(inputs[name]), inputs[name].span
        elif name in named and name in values:
            value, span = values[name], attribute.span
        elif name in named and name == "groups":
            value, span = parameter.default, attribute.span  # said to the passes: channels of groups are no plain product
        else:
            continue
        found[name] = _number(label, name, parameter, value, span)
        args.append(Argument(_literal(found[name], span), name, span=span))
    if tuple(args) == given:
        return attributes, found
    name_node = kind.function if isinstance(kind, syntax.Call) else kind
    call = syntax.Call(name_node, tuple(args), span=kind.span)
    bound = replace(attribute, args=(Argument(call, span=kind.span),))
    return tuple(bound if a is attribute else a for a in attributes), found


def _number(label: str, name: str, declared: KindParameter | None, value: object, span: Span) -> Value:
    """The number that a value is, if the parameter takes it."""
    if isinstance(value, AbstractValue):
        return declared.default if declared is not None and declared.default is not None else 1
    number = host_values.as_scalar(value)
    number = number.item() if isinstance(number, np.generic) else number
    form = declared.form if declared is not None else "a number"
    if number is None or isinstance(number, complex) or (declared is not None and declared.wrong(number)):
        raise UserError.at("TW016", f"'{name}' of @kernel {label} is {host_functions.shown(value)}, and must be {form}", span, f"give {form}")
    return number


def _literal(value: Value, span: Span) -> Expr:
    if isinstance(value, bool):
        return syntax.Bool(value, span=span)
    return syntax.Number(value, span=span)
