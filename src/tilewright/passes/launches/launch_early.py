"""Short kernels of a program start before the kernel before them has ended. `Program -> Program`, at the thread stage.

In: a program of kernels, and what is known of its sizes. Out: the same, where a kernel of few threads lets the next one come in and waits for the one before it,
ahead of its first access (programmatic dependent launch). What starts it then overlaps that one's end. A chain of short kernels, as those between the products of
a decode step, is mostly starts.

    kernel @rope { … }    ->    kernel @rope {dependent = true} { release_next; wait_previous; … }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.sizes import product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, walk
from tilewright.ir.program import Program

SHORT = 1 << 17
"""Threads of a short kernel, at most."""
_APART = frozenset({"print", "assert", "wait_previous", "release_next", "grid_sync"})


def launch_early(program: Program, target: Target, hints: Mapping[str, int]) -> Program:
    """The program with short kernels that start early, where there are several kernels and the target can do it."""
    if "early" not in target.features or len(program.calls) < 2 or program.loops:
        return program
    calls = tuple(replace(call, kernel=_early(call.kernel)) if _is_short(call.kernel, hints) else call for call in program.calls)
    return replace(program, calls=calls)


def _early(kernel: Kernel) -> Kernel:
    b = Builder(kernel.span)
    b.multi("release_next")
    b.multi("wait_previous")
    attrs = MappingProxyType({**kernel.attrs, "dependent": True})
    return replace(kernel, body=Block(kernel.body.args, (*b.ops, *kernel.body.ops)), attrs=attrs)


def _is_short(kernel: Kernel, hints: Mapping[str, int]) -> bool:
    """Whether a kernel has few threads, as far as that is known, and neither waits already nor has to run by itself."""
    if kernel.attrs.get("dependent") or any(op.opcode in _APART for op in walk(kernel.body)):
        return False
    threads = product(kernel.grid) * kernel.threads
    return threads.names <= hints.keys() and threads.evaluate(hints) <= SHORT
