"""Scratch arrays that are never needed at the same time lie in the same memory: a program holds less of it, and more of that is in a cache.

In: a program at the thread stage, and the same at the loop stage, which says what each call reads and writes. Out: the program with fewer scratch
arrays, each as large as the largest of those it stands for. An array is needed from the call that writes it first, which must not read it, to the
last one that has to do with it; the calls of a program run one after the other.

    call @a(x, p)  call @b(p, q)  call @c(q, r)  call @d(r, out)     ->     p and r are one array
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.base.record import record
from tilewright.base.sizes import Size, maximum, product
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import Tensor
from tilewright.passes.program.fuse import read_by, written_by


@record
class _Room:
    """Memory that arrays take in turn."""

    arrays: tuple[ProgramArray, ...]
    until: int
    """The last call that needs it so far."""


def reuse_buffers(program: Program, loop: Program) -> Program:
    """The program with scratch arrays in common memory."""
    spans = _spans(program, loop)
    rooms: list[_Room] = []
    for name in sorted(spans, key=lambda n: spans[n][0]):
        array = program.array(name)
        first, last = spans[name]
        free = [r for r in rooms if r.until < first and r.arrays[0].type.dtype is array.type.dtype]
        # What was used last is most likely still in a cache.
        room = max(free, key=lambda r: r.until, default=None)
        if room is not None:
            rooms.remove(room)
        rooms.append(_Room((*(room.arrays if room is not None else ()), array), last))
    return _moved(program, [room.arrays for room in rooms if len(room.arrays) > 1])


def _spans(program: Program, loop: Program) -> dict[str, tuple[int, int]]:
    """First and last call of each scratch array that may lie anywhere."""
    if len(program.calls) != len(loop.calls):
        return {}
    found: dict[str, tuple[int, int]] = {}
    for array in program.scratch:
        uses = [n for n, call in enumerate(program.calls) if array.name in call.args]
        if not uses or not array.type.dtype.is_float:
            continue
        start = loop.calls[uses[0]]
        if array.name in written_by(start) and array.name not in read_by(start):
            found[array.name] = uses[0], uses[-1]
    return found


def _moved(program: Program, groups: list[tuple[ProgramArray, ...]]) -> Program:
    names: dict[str, str] = {}
    types: dict[str, Tensor] = {}
    for group in groups:
        size = product(group[0].type.shape)
        for array in group[1:]:
            size = maximum(size, product(array.type.shape))
        first = group[0]
        names |= {array.name: first.name for array in group}
        align = max(array.type.align for array in group)
        types[first.name] = replace(first.type, shape=(size,), strides=(Size.of(1),), align=align)
    scratch = tuple(
        replace(a, type=types.get(a.name, a.type)) for a in program.scratch if names.get(a.name, a.name) == a.name
    )
    calls = tuple(replace(call, args=tuple(_name(names, argument) for argument in call.args)) for call in program.calls)
    return replace(program, scratch=scratch, calls=calls)


def _name(names: Mapping[str, str], argument: str) -> str:
    return names.get(argument, argument)
