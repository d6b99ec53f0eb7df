"""Convolutions of f32 as convolutions of tf32 parts, for the copy engine and warp-group instructions. `Program -> Program`.

In: a program and the schedules of its contractions. Where one says `tf32_terms`, the convolution's input is first copied to scratch with channels
last, every number as two parts of tf32 (`common/tf32.py`): the small parts of all images, then the large ones. The weights become a matrix of the
same two parts. Out: the program with these copies, and the convolution as a sum over products of parts too, small ones first: with three of them that
of the two small parts is left out. The copy engine then brings whole pixels, and no thread computes addresses or parts.

    parallel n, k, i, j { acc = reduce c, r, s { yield x[n, c, i + r, j + s] * w[k, c, r, s] }; out[n, k, i, j] = f(acc) }
    -> parallel n, h, w, c { store x.parts[n, h, w, c] = small(x[n, c, h, w]); store x.parts[N + n, h, w, c] = large(x[n, c, h, w]) }
       parallel k, rs, c { store w.parts[0, k, rs, c] = small(w[k, c, r, s]); store w.parts[1, k, rs, c] = large(w[k, c, r, s]) }
       parallel n, k, i, j { acc = reduce t, r, s, c { yield x.parts[n + N * u, i + r, j + s, c] * w.parts[v, k, rs, c] }; out[n, k, i, j] = f(acc) }

Images have one to three axes besides batch and channels; one with a single axis gets a second of extent 1. Several convolutions of one array, as the
phases of a transposed one are, share its parts.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.base.errors import CompilerBug
from tilewright.ir.nodes import Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor
from tilewright.passes.schedules.matrix import Wgmma
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.passes.windows.row_parts import parts_form


def split_images(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with kernels that make parts, and the schedules of its calls."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    known: dict[tuple[str, tuple[object, ...]], Value] = {}
    """Parts that were made, by array, order of axes and what is folded into channels: several kernels read them until somebody writes the array."""
    for call, schedule in zip(program.calls, plans, strict=True):
        names = dict(zip(call.kernel.params, call.args, strict=True))
        written = {names[op.operands[0]] for op in walk(call.kernel.body) if op.opcode in ("store", "atomic", "accumulate") and op.operands[0] in names}
        if not isinstance(schedule, Wgmma) or not schedule.tf32_terms:
            calls.append(call)
            schedules.append(schedule)
            known = {key: parts for key, parts in known.items() if key[0] not in written}
            continue
        form = parts_form(call.kernel, schedule.folded, schedule.to_channels_last)
        if form is None:
            raise CompilerBug.at("TW040", f"{call.kernel.name} is no convolution", call.kernel.span)
        key = (names[form.memory], form.key)
        parts = None if call.loops else known.get(key)
        before: list[KernelCall] = []
        if parts is None:
            parts = form.image_parts(len(scratch))
            assert isinstance(parts.type, Tensor)
            scratch.append(ProgramArray(parts.name, parts.type, "scratch"))
            before.append(KernelCall(form.image_kernel(parts), (names[form.memory], parts.name), call.loops))
            if not call.loops:
                known[key] = parts
        weights = form.weight_parts(len(scratch))
        assert isinstance(weights.type, Tensor)
        scratch.append(ProgramArray(weights.name, weights.type, "scratch"))
        seen = form.seen(parts)
        given = names | {seen: parts.name, weights: weights.name}
        pack = form.weight_kernel(weights)
        before.append(KernelCall(pack, tuple(given[p] for p in pack.params), call.loops))
        main = form.main(schedule.tf32_terms, seen, weights)
        known = {key: parts for key, parts in known.items() if key[0] not in written}
        calls += [*before, KernelCall(main, tuple(given[p] for p in main.params), call.loops)]
        schedules += [*(None for _ in before), schedule]
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)
