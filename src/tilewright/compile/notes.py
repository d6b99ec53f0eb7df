"""What makes a program slow, found where its kernels are planned.

In: a prepared program at the loop stage, the plans of its calls, the target and what is known of sizes. Out: notes, one for each kernel at
most, that the artifact keeps: `tilewright inspect` and `check` print them, and the first call warns with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from tilewright.base.errors import Diagnostic, Note, note_of
from tilewright.base.sizes import ONE
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor
from tilewright.passes.schedules.matrix import GpuProduct, MatrixSchedule
from tilewright.passes.schedules.plans import Plans

if TYPE_CHECKING:
    from tilewright.analysis.lookalikes import Lookalike


def program_notes(program: Program, plans: Plans, target: Target, sizes: Mapping[str, int]) -> tuple[Note, ...]:
    """The notes of a program, each once."""
    found: list[Diagnostic] = []
    for call, plan in zip(program.calls, plans, strict=True):
        if "seldom" in call.kernel.attrs:
            continue  # plain loops on purpose
        if not isinstance(plan, MatrixSchedule):
            found += _kernel_notes(call.kernel, target, sizes, program.name)
        elif isinstance(plan, GpuProduct):
            inputs = {array.name for array in program.inputs if isinstance(array, ProgramArray)}
            found += _packed_notes(call, plan, inputs)
    return tuple(dict.fromkeys(map(note_of, found)))


def _kernel_notes(kernel: Kernel, target: Target, sizes: Mapping[str, int], name: str) -> list[Diagnostic]:
    if kernel.opcodes.isdisjoint(("reduce", "for", "while", "accumulate", "atomic")):
        return []  # no loop inside: what follows need not be loaded
    from tilewright.analysis.lookalikes import lookalike
    from tilewright.analysis.nest_facts import NestFacts
    from tilewright.analysis.serial_loops import serial_notes
    from tilewright.passes.program.split_scans import would_split_scan

    facts = NestFacts(kernel, sizes, name)
    look = lookalike(facts)
    if look is not None:
        note = _not_recognised(look, kernel, target, sizes)
        if note is not None:
            return [note]
    if would_split_scan(kernel, target, sizes):
        return []
    return serial_notes(facts, target.simt, _is_cut(kernel, target, sizes))


def _is_cut(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> bool:
    """Whether several blocks share a sum of the kernel."""
    if not any(op.opcode == "reduce" for op in walk(kernel.body)):
        return False
    from tilewright.passes.program.split_reductions import would_split
    from tilewright.passes.rows.cut_rows import would_cut

    return would_split(kernel, target, sizes) or would_cut(kernel, target, sizes)


def _packed_notes(call: KernelCall, plan: GpuProduct, inputs: Set[str]) -> list[Diagnostic]:
    """Arrays of the caller that a product copies first because of their strides. Other packs (elements that lie the wrong way round for their
    dtype) are part of how such products are computed."""
    if "pack" not in (plan.a_copy, plan.b_copy):
        return []
    from tilewright.analysis.contraction import find_contraction

    contraction = find_contraction(call.kernel)
    if contraction is None:
        return []
    names = dict(zip(call.kernel.params, call.args, strict=True))
    ways = (plan.b_copy, plan.a_copy) if plan.swap_ab else (plan.a_copy, plan.b_copy)
    found: list[Diagnostic] = []
    for factor, way in zip((contraction.a, contraction.b), ways, strict=True):
        if way != "pack" or factor.load is None or factor.tensor is None:
            continue
        name = names.get(factor.load.operands[0], "")
        reason = _odd_rows(factor.tensor, call.kernel.facts)
        if name in inputs and reason:
            found.append(Diagnostic(
                "TW063", f"'{name}' is packed anew at every call, since the copy engine cannot read it as it lies: {reason}", factor.load.span,
                "pass an array that begins at a multiple of 16 bytes, with rows of a multiple of 16 bytes, one after the other", "warning",
            ))  # fmt: skip
    return found


def _odd_rows(array: Tensor, facts: Mapping[str, int]) -> str:
    """Why an array cannot be read in pieces of 16 bytes; empty where it can."""
    if ONE not in array.strides:
        return "none of its axes has its elements one after the other"
    if array.align and array.align % 16:
        return "it does not begin at a multiple of 16 bytes"
    for stride in array.strides:
        known = stride.constant if stride.name is None else facts.get(stride.name, 1)
        if stride != ONE and known is not None and known * array.dtype.itemsize % 16:
            return f"its rows are {stride} elements apart, which is no multiple of 16 bytes"
    return ""


def _not_recognised(look: Lookalike, kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> Diagnostic | None:
    from tilewright.passes.choose.refusals import product_refusal, refused_attention

    reason, help = refused_attention(kernel, target) if look.kind == "attention" else product_refusal(kernel, target, sizes)
    if not reason:
        return None
    article = "attention" if look.kind == "attention" else f"a {look.kind}"
    return Diagnostic(
        "TW061", f"the sum over {look.sums} looks like {article} and runs as plain loops: {reason}", look.span, help, "warning"
    )  # fmt: skip
