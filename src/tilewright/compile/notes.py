"""What makes a program slow, found where its kernels are planned.

In: a prepared program at the loop stage, the plans of its calls, the target and what is known of sizes. Out: notes, one for each kernel at
most, that the artifact keeps: `tilewright inspect` and `check` print them, and the first call warns with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.lookalikes import Lookalike, lookalike
from tilewright.analysis.nest_facts import NestFacts
from tilewright.analysis.serial_loops import serial_notes
from tilewright.base.errors import Diagnostic, Note, note_of
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program
from tilewright.passes.choose.refusals import product_refusal, refused_attention
from tilewright.passes.program.split_reductions import would_split
from tilewright.passes.program.split_scans import would_split_scan
from tilewright.passes.schedules.matrix import MatrixSchedule
from tilewright.passes.schedules.plans import Plans


def program_notes(program: Program, plans: Plans, target: Target, sizes: Mapping[str, int]) -> tuple[Note, ...]:
    """The notes of a program, each once."""
    found: list[Diagnostic] = []
    for call, plan in zip(program.calls, plans, strict=True):
        if not isinstance(plan, MatrixSchedule):
            found += _kernel_notes(call.kernel, target, sizes, program.name)
    return tuple(dict.fromkeys(map(note_of, found)))


def _kernel_notes(kernel: Kernel, target: Target, sizes: Mapping[str, int], name: str) -> list[Diagnostic]:
    facts = NestFacts(kernel, sizes, name)
    look = lookalike(facts)
    if look is not None:
        note = _not_recognised(look, kernel, target, sizes)
        if note is not None:
            return [note]
    if would_split_scan(kernel, target, sizes):
        return []
    return serial_notes(facts, target.simt, would_split(kernel, target, sizes))


def _not_recognised(look: Lookalike, kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> Diagnostic | None:
    reason, help = refused_attention(kernel, target) if look.kind == "attention" else product_refusal(kernel, target, sizes)
    if not reason:
        return None
    article = "attention" if look.kind == "attention" else f"a {look.kind}"
    return Diagnostic(
        "TW061", f"the sum over {look.sums} looks like {article} and runs as plain loops: {reason}", look.span, help, "warning"
    )  # fmt: skip
