"""Critical functions: thread-stage IR to an object with the function, its CPython entry and its timing loop.

In: what the front end of critical functions built, and the machine's target. Out: a `CompiledCritical`. `passes/pipeline.py` has the passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.base.source import Span
from tilewright.base.target import Target
from tilewright.codegen.critical.body import fault_texts
from tilewright.codegen.critical.entry import module_text
from tilewright.codegen.critical.records import CriticalArgument, CriticalText
from tilewright.codegen.llvm import native
from tilewright.frontend.critical.parameters import CriticalParameter
from tilewright.frontend.critical.reader import RESULT_NAME, BuiltCritical
from tilewright.ir.program import Program


@dataclass(frozen=True)
class CompiledCritical:
    """A critical function as machine code."""

    built: BuiltCritical
    critical: CriticalText
    program: Program
    """The thread stage after all passes."""
    faults: tuple[tuple[Span, str], ...]
    """What a fault's number (from 1) stands for."""
    text: str
    code: bytes


def describe_critical(built: BuiltCritical, program: Program) -> CriticalText:
    """How the function's parameters become those of its kernel."""
    (call,) = program.calls

    def one(parameter: CriticalParameter) -> CriticalArgument:
        pieces = tuple((p.tensor, p.offset) for p in built.pieces if p.parameter == parameter.name)
        written = parameter.name in built.written
        if parameter.state is not None:
            layout = parameter.layout
            return CriticalArgument(parameter.name, None, (), layout.size, layout.align, pieces, layout.name, written)
        assert parameter.dtype is not None
        if parameter.is_number:
            return CriticalArgument(parameter.name, parameter.dtype)
        size = parameter.dtype.itemsize
        for extent in parameter.shape:
            size *= extent
        return CriticalArgument(parameter.name, parameter.dtype, parameter.shape, size, parameter.dtype.itemsize, pieces, "", written)

    arguments = tuple(map(one, built.signature.parameters))
    return CriticalText("critical", call.kernel, arguments, built.result, RESULT_NAME)


def lower_built(built: BuiltCritical, target: Target) -> Program:
    """The thread stage as code generators take it."""
    from tilewright.passes.routes import lower_critical
    from tilewright.passes.runner import Trace

    return lower_critical(built.program, target, Trace())


def compile_critical(built: BuiltCritical, target: Target) -> CompiledCritical:
    """The object of a critical function for the machine we run on."""
    program = lower_built(built, target)
    critical = describe_critical(built, program)
    text = module_text(critical, target)
    faults = tuple((op.span, said) for op, said in fault_texts(critical.kernel))
    return CompiledCritical(built, critical, program, faults, text, native.compile_object(text, target))
