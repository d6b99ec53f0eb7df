"""Megakernels: an instruction tape as one persistent kernel. `tape` and `tape_ops` say what a tape is, `planning` makes tasks of it, `runner` runs them."""

from tilewright.mega.entry import MegaPlan, check_support, plan
from tilewright.mega.gantt import gantt_svg
from tilewright.mega.report import MegaReport
from tilewright.mega.runner import MegaRunner, check_leaks
from tilewright.mega.tape import Tape
from tilewright.mega.tape_ops import ops

__all__ = ["MegaPlan", "MegaReport", "MegaRunner", "Tape", "check_leaks", "check_support", "gantt_svg", "ops", "plan"]
