"""Which numbers of a ZynML program are sizes in a compute block, and not values it is given.

In: a block, its arguments, and numbers of the program whose names stand in its loops and shapes. Out: for those that the block itself can find
from its arrays, the array and axis they are the extent of: in `for q in 0..seq step 64: … Q[b, q:q+64] …`, `seq` is an extent of `Q`. Others,
such as how often a loop runs, are arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.base.errors import Diagnostics, UserError
from tilewright.execute.calls.arguments import read_argument
from tilewright.tree import syntax
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArgSpec, ArrayInfo, ScalarArg
from tilewright.zyn.host.functions import settled
from tilewright.zyn.lazy.lazy_array import LazyArray, spec_of

Found = dict[str, tuple[str, int]]
_MOST = 6
"""Numbers that are tried in all combinations."""


class KnownSizes:
    """Answers, each found once for a block and the types of its arguments."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[syntax.Function, Found]] = {}

    def of(self, function: syntax.Function, arguments: Mapping[str, object], numbers: Mapping[str, int]) -> Found:
        try:
            specs = [spec_of(v) if isinstance(v, LazyArray) else read_argument(n, settled(v)).spec for n, v in arguments.items()]
        except UserError:
            return {}
        key = id(function), tuple(map(repr, specs)), tuple(numbers)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = function, _found(function, specs, list(numbers))
        return known[1]


def _found(function: syntax.Function, specs: Sequence[ArgSpec], numbers: Sequence[str]) -> Found:
    for count in range(min(len(numbers), _MOST), 0, -1):
        for sizes in itertools.combinations(numbers, count):
            found = _with_sizes(function, specs, sizes, [n for n in numbers if n not in sizes])
            if found is not None:
                return found
    return {}


def _with_sizes(function: syntax.Function, specs: Sequence[ArgSpec], sizes: Sequence[str], others: Sequence[str]) -> Found | None:
    """Where the sizes are extents of inputs, with the other numbers as arguments; None where the block is wrong so."""
    from tilewright.base.dtypes import i64

    given = replace(function, params=(*function.params, *(syntax.Param(name, span=function.span) for name in others))) if others else function
    try:
        typed = check_kernel(given, (*specs, *(ScalarArg(i64, weak=True) for _ in others)), Diagnostics())
    except UserError:
        return None
    found: Found = {}
    for item in typed.inputs:
        for axis, extent in enumerate(item.shape if isinstance(item, ArrayInfo) else ()):
            if extent.name in sizes:
                found.setdefault(str(extent.name), (item.name, axis))
    return found if len(found) == len(sizes) else None
