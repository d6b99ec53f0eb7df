"""`@kernel scan`, `sort`, `filter` and `histogram`: what is done with the values that such a block yields.

In: the kind with its parameters, and the values as arrays. Out: what the device-wide primitive of that kind makes of them. A scan along one
of several axes is a kernel that walks that axis for all places of the others at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.execute.histograms import histogram
from tilewright.execute.primitive_sorts import sort
from tilewright.execute.primitives import filter
from tilewright.execute.scans import scan
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree import syntax
from tilewright.tree.metadata import KernelKind, KernelMetadata

_SCANS = {"add": "sum", "mul": "prod", "min": "min", "max": "max", "and": "and", "or": "or"}
_COMBINED = {"add": "{0} + {1}", "mul": "{0} * {1}", "min": "min({0}, {1})", "max": "max({0}, {1})", "and": "{0} & {1}", "or": "{0} | {1}"}
_IDENTITY = {"add": 0, "mul": 1}


def finished(metadata: KernelMetadata, values: Any, device: str | None, span: Span) -> Any:
    """The result of the block. A pair of arrays is keys and values, or values and where they are wanted."""
    given: dict[str, Any] = dict(metadata.params)
    if metadata.kind is KernelKind.SORT:
        keys, moved = values if isinstance(values, tuple) else (values, None)
        return sort(keys, moved, descending=given.get("descending", False), device=device)
    if metadata.kind is KernelKind.FILTER:
        kept, wanted = values
        return filter(wanted.reshape(-1), kept.reshape(-1), device=device)
    if metadata.kind is KernelKind.HISTOGRAM:
        if ("low" in given) != ("high" in given):
            raise UserError.at("TW016", "@kernel histogram takes low and high together", span, "give both, or none")
        return histogram(values, int(given.get("bins", 256)), (given["low"], given["high"]) if "low" in given else None, device=device)
    return scan(values, scan_name(metadata, span), exclusive=given.get("exclusive", False), init=given.get("init"), device=device)


def scan_name(metadata: KernelMetadata, span: Span) -> str:
    if metadata.reduction not in _SCANS:
        raise UserError.at("TW016", f"@kernel scan cannot combine by {metadata.reduction}", span, "use one of + * min max and or")
    return _SCANS[metadata.reduction]


def scan_axis(metadata: KernelMetadata, rank: int, span: Span) -> int:
    """The axis along which is scanned."""
    axis = dict(metadata.params).get("axis", rank - 1)
    if not -rank <= axis < rank:
        raise UserError.at("TW016", f"'axis' of @kernel scan is {axis}, and the block has {rank} loop(s)", span, f"give one from 0 to {rank - 1}")
    return int(axis) % rank


def scan_along(metadata: KernelMetadata, rank: int, axis: int, span: Span) -> syntax.Function:
    """A kernel that scans one of several axes of its argument `x`."""
    scan_name(metadata, span)
    given = dict(metadata.params)
    init, exclusive = given.get("init"), bool(given.get("exclusive", False))
    if exclusive and init is None:
        init = _IDENTITY.get(metadata.reduction)
        if init is None:
            raise UserError.at("TW008", f"an exclusive scan by {metadata.reduction} needs init=: what the first element becomes", span)
    return _scan_text(metadata.reduction, rank, axis, "" if init is None else repr(init).lower(), exclusive)


@cache
def _scan_text(op: str, rank: int, axis: int, init: str, exclusive: bool) -> syntax.Function:
    names = [f"i{n}" for n in range(rank)]
    others = ", ".join(f"{name} in 0..s{n}" for n, name in enumerate(names) if n != axis)

    def at(index: str) -> str:
        return ", ".join(index if n == axis else name for n, name in enumerate(names))

    combined = _COMBINED[op].format
    value = f"x[{at('t')}]"
    head = f"        var total = x[{at('0')}]\n        for t in 0..s{axis}:\n"
    if exclusive:
        steps = f"            let before = {init} if t == 0 else total\n            out[{at('t')}] = before\n            total = {combined('before', value)}\n"
    else:
        first = combined(init, value) if init else value
        steps = f"            total = {first} if t == 0 else {combined('total', value)}\n            out[{at('t')}] = total\n"
    statement = parse_module(f"let y = compute(x) {{\n    for {others}:\n{head}{steps}}}\n").body[0]
    assert isinstance(statement, syntax.Let)
    assert isinstance(statement.value, syntax.Compute)
    return syntax.Function("scan", (syntax.Param("x"),), None, statement.value.body, "compute", (), span=statement.span)
