"""`tw.mega`: what makes plans of tapes, and says what is missing.

    plan = tw.mega.plan(tape)           the tasks and the workspace
    kernel = plan.compile("cpu")        one artifact, from the cache where it is there
    runner = kernel.load()              weights, caches, launches
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.errors import UserError
from tilewright.graphs.graph import TensorGraph
from tilewright.mega.megakernel import MegaKernel
from tilewright.mega.planning import TapePlan
from tilewright.mega.tape import Tape
from tilewright.mega.tape_ops import TAPE_OPS


class MegaPlan(TapePlan):
    """What a launch does, and the way to a kernel that does it."""

    def compile(self, target: str = "cpu", *, ring_bytes: int | None = None) -> MegaKernel:
        """The megakernel for a target: one artifact, from the cache where it is there.

        `ring_bytes` of shared memory of each block are a ring by which the weights of products come, whatever the block waits for: on GPUs with bulk copies, and in the emulator. Left out, it is chosen: on GPUs where it was measured to pay, and 0 (no ring) elsewhere.
        """
        return MegaKernel(self, target, ring_bytes)


def plan(tape: Tape | TensorGraph, *, fuse: bool = True) -> MegaPlan:
    """What a megakernel of the tape does. Everything that is wrong with the tape is an error here, which names the instruction.

    `fuse=False` makes every instruction a task of its own, with memory for every slot.
    """
    if isinstance(tape, TensorGraph):
        tape = Tape.from_graph(tape)
    if not isinstance(tape, Tape):
        raise UserError.at("TW009", f"a plan is made of a tape, not of a {type(tape).__name__}", help="tw.mega.Tape(…), tw.mega.Tape.from_graph(…) or tw.mega.Tape.from_onnx(…)")
    return MegaPlan(tape, fuse)


def check_support(tape: Tape | Sequence[str]) -> list[str]:
    """Names of the ops of a tape that there are not; empty where it can be planned."""
    if isinstance(tape, Tape):
        return tape.unsupported()
    return list(dict.fromkeys(op for op in tape if op not in TAPE_OPS))
