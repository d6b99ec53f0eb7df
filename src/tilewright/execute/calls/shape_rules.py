"""What a kernel would return, without running or compiling it: the shapes and dtypes of its results.

In: a kernel's tree and, per argument, a dtype and extents (numbers, or what other libraries use for unknown numbers) or a number.
Out: extents and dtype per result. The rules come from the checker and are kept per combination of dtypes and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.base.artifact import Artifact, ScalarParam
from tilewright.base.dtypes import DType, bool_, f64, i64
from tilewright.base.errors import UserError
from tilewright.base.sizes import add_numbers
from tilewright.base.target import host_cpu
from tilewright.compile.build import describe_program
from tilewright.compile.driver import Signature, front_end
from tilewright.execute.calls.repeated_axes import repeating
from tilewright.tree.syntax import Function, Name, Param, Return, Tuple
from tilewright.tree.typed import ArgSpec, ArrayArg, NoneArg, ScalarArg

_WEAK = {float: f64, int: i64}


@dataclass(frozen=True)
class OutputForm:
    """An array: its dtype and extents."""

    dtype: DType
    shape: tuple[Any, ...]


Form = OutputForm | int | float | bool | None


_MOST_RULES = 256
_rules: dict[tuple[int, tuple[ArgSpec, ...]], tuple[Function, Artifact]] = {}
"""By the tree's identity, since comparing trees takes longer than a call; the tree is kept, so that the number stays its own."""


def _rule(function: Function, args: tuple[ArgSpec, ...]) -> Artifact:
    found = _rules.get((id(function), args))
    if found is None:
        _, program = front_end(function, Signature(args))
        if len(_rules) >= _MOST_RULES:
            _rules.clear()
        found = _rules[id(function), args] = (function, describe_program(program, host_cpu()))
    return found[1]


def _spec(form: Any) -> ArgSpec:
    if isinstance(form, OutputForm):
        return ArrayArg(form.dtype, len(form.shape))
    if form is None:
        return NoneArg()
    if isinstance(form, bool):
        return ScalarArg(bool_)
    return ScalarArg(_WEAK[float] if isinstance(form, float) else _WEAK[int], weak=True)


def results(function: Function, forms: Sequence[Form]) -> list[OutputForm]:
    """The results of a call with arguments of these forms."""
    names = [param.name for param in function.params]
    if len(forms) != len(names):
        raise UserError.at("TW016", f"{function.name} takes {len(names)} argument(s) ({', '.join(names)}), got {len(forms)}", function.span)
    specs = tuple(_spec(form) for form in forms)
    shapes = {n: f.shape for n, f in zip(names, forms, strict=True) if isinstance(f, OutputForm) and all(type(extent) is int for extent in f.shape)}
    ones = repeating(function, specs, shapes) if any(1 in shape for shape in shapes.values()) else {}
    rule = _rule(function, tuple(replace(s, ones=ones[n]) if n in ones and isinstance(s, ArrayArg) else s for n, s in zip(names, specs, strict=True)))
    given = dict(zip(names, forms, strict=True))
    values: dict[str, Any] = {p.name: given[p.name] for p in rule.inputs if isinstance(p, ScalarParam) and p.dtype.is_int}
    for binding in rule.bindings:
        form = given.get(binding.array)
        if isinstance(form, OutputForm) and not binding.stride:
            values[binding.name] = form.shape[binding.axis]
    add_numbers(values, given, rule.computed)
    return [OutputForm(out.dtype, tuple(extent.evaluate(values) for extent in out.shape)) for out in rule.outputs]


def number_type(param: Param) -> type | None:
    """float, int or bool where a parameter is annotated as a number; None where it is an array."""
    kind = param.type
    return {"float": float, "int": int, "bool": bool}.get(kind.id) if isinstance(kind, Name) else None


def result_count(function: Function) -> int:
    """How many arrays the kernel returns."""
    last = function.body[-1] if function.body else None
    if not isinstance(last, Return) or last.value is None:
        raise UserError.at("TW005", f"{function.name} does not end with a return", function.span)
    return len(last.value.items) if isinstance(last.value, Tuple) else 1
