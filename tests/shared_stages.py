"""Tests of `tests/run` lower a kernel once for the same arguments and target: the stages they execute are those of one compilation.

As on real devices, a kernel without contractions and without sums over several axes has one code for all sizes with the same hints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tilewright.base.target import Target
from tilewright.compile.driver import Compilation, Signature, compile_stages
from tilewright.device_kinds import emulator
from tilewright.execute import kernel
from tilewright.ir.nodes import walk
from tilewright.passes.schedules.matrix import MatrixSchedule
from tilewright.tree.syntax import Function

MOST = 24
"""Compilations that are kept."""


def serves_all_sizes(done: Compilation) -> bool:
    """Whether the very sizes of a call surely had no part in the compilation."""
    if any(isinstance(schedule, MatrixSchedule) or schedule.whole for schedule in done.stages.schedules):
        return False  # rows that stay in registers are planned for their length
    for call in done.stages.loop.calls:
        sums = [op for op in walk(call.kernel.body) if op.opcode == "reduce"]
        if len(sums) > 1 or any(len(op.operands) > 1 for op in sums):
            return False
    return True


@contextmanager
def shared_stages() -> Iterator[None]:
    """Within it, compilations are kept."""
    known: OrderedDict[tuple[object, ...], tuple[Function, Compilation]] = OrderedDict()

    def shared(function: Function, signature: Signature, target: Target) -> Compilation:
        general = id(function), signature, target
        exact = *general, signature.extents
        key = general if general in known else exact
        if key not in known:
            done = compile_stages(function, signature, target)
            key = general if serves_all_sizes(done) else exact
            known[key] = function, done
            if len(known) > MOST:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key][1]

    with pytest.MonkeyPatch.context() as patch:
        for module in (kernel, emulator):
            patch.setattr(module, "compile_stages", shared)
        yield
