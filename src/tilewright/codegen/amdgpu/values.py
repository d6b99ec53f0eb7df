"""Small pieces of LLVM text for AMD GPUs that several files here need: registers of the device, numbers as integers, masks of lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.target import Target
from tilewright.codegen.llvm.emitter import FunctionWriter
from tilewright.ir.nodes import Op

Handler = Callable[[FunctionWriter, Op, Sequence[str], Target], Sequence[str]]
"""Writes one op; the names of its results."""
GLOBAL, SHARED = "ptr addrspace(1)", "ptr addrspace(3)"
SCOPES = {"thread": "singlethread", "warp": "wavefront", "block": "workgroup", "device": "agent", "system": ""}
"""LLVM's names of who sees an access."""


def scope_of(scope: str) -> str:
    """The scope as instructions have it."""
    name = SCOPES[scope]
    return f' syncscope("{name}")' if name else ""


def thread_id(w: FunctionWriter) -> str:
    return w.call("i32", "llvm.amdgcn.workitem.id.x")


def lane_id(w: FunctionWriter, target: Target) -> str:
    """This thread's number in its wave: blocks have one axis."""
    return w.let(f"and i32 {thread_id(w)}, {target.warp_size - 1}")


def as_integer(w: FunctionWriter, value: str, kind: str, bits: int) -> str:
    """A number's or vector's bits as one integer."""
    return value if kind == f"i{bits}" else w.let(f"bitcast {kind} {value} to i{bits}")


def from_integer(w: FunctionWriter, value: str, kind: str, bits: int) -> str:
    return value if kind == f"i{bits}" else w.let(f"bitcast i{bits} {value} to {kind}")


def mask_type(target: Target) -> str:
    """The integer that has a bit for each lane."""
    return f"i{target.warp_size}"


def ballot(w: FunctionWriter, value: str, target: Target) -> str:
    """The lanes that are here and where the bool holds."""
    kind = mask_type(target)
    return w.call(kind, f"llvm.amdgcn.ballot.{kind}", ("i1", value))


def resized(w: FunctionWriter, value: str, before: int, after: int) -> str:
    """An unsigned integer with more or fewer bits."""
    if before == after:
        return value
    return w.let(f"{'trunc' if before > after else 'zext'} i{before} {value} to i{after}")


def block_barrier(w: FunctionWriter) -> None:
    """All threads of the block meet; what they wrote before is seen after."""
    w.line('fence syncscope("workgroup") release')
    w.call("void", "llvm.amdgcn.s.barrier")
    w.line('fence syncscope("workgroup") acquire')
