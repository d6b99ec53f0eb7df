"""`@kernel scan`, `sort`, `filter` and `histogram`: what is done with the values that such a block yields.

In: the kind with its parameters, and the values as arrays. Out: what the primitive of that kind makes of them.
"""

from __future__ import annotations

from typing import Any

from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.execute.primitives.filters import filter
from tilewright.execute.primitives.histograms import histogram
from tilewright.execute.primitives.scans import scan
from tilewright.execute.primitives.sorts import sort
from tilewright.tree.metadata import KernelKind, KernelMetadata

_SCANS = {"add": "sum", "mul": "prod", "min": "min", "max": "max", "and": "and", "or": "or"}


def finished(metadata: KernelMetadata, values: Any, device: str | None, span: Span) -> Any:
    """The result of the block. A pair of arrays is keys and values, values and weights, or values and where they are wanted."""
    given: dict[str, Any] = dict(metadata.params)
    if metadata.kind is KernelKind.SORT:
        keys, moved = values if isinstance(values, tuple) else (values, None)
        axis = block_axis(metadata, keys.ndim, span)
        return sort(keys, moved, axis=-1 if axis is None else axis, descending=given.get("descending", False), device=device)
    if metadata.kind is KernelKind.FILTER:
        kept, wanted = values
        return filter(wanted.reshape(-1), kept.reshape(-1), device=device)
    if metadata.kind is KernelKind.HISTOGRAM:
        if ("low" in given) != ("high" in given):
            raise UserError.at("TW016", "@kernel histogram takes low and high together", span, "give both, or none")
        limits = (given["low"], given["high"]) if "low" in given else None
        counted, weights = values if isinstance(values, tuple) else (values, None)
        axis = block_axis(metadata, counted.ndim, span)
        return histogram(counted, int(given.get("bins", 256)), limits, weights=weights, axis=axis, device=device)
    axis = block_axis(metadata, values.ndim, span)
    options = {name: given.get(name, False) for name in ("exclusive", "reverse")}
    return scan(values, scan_name(metadata, span), axis=-1 if axis is None else axis, init=given.get("init"), device=device, **options)


def scan_name(metadata: KernelMetadata, span: Span) -> str:
    if metadata.reduction not in _SCANS:
        raise UserError.at("TW016", f"@kernel scan cannot combine by {metadata.reduction}", span, "use one of + * min max and or")
    return _SCANS[metadata.reduction]


def block_axis(metadata: KernelMetadata, rank: int, span: Span) -> int | None:
    """The axis that the block's attribute names."""
    axis = dict(metadata.params).get("axis")
    if axis is None:
        return None
    if not -rank <= axis < rank:
        raise UserError.at(
            "TW016", f"'axis' of @kernel {metadata.kind.value} is {axis}, and the block has {rank} loop(s)", span, f"give one from 0 to {rank - 1}"
        )
    return int(axis) % rank
