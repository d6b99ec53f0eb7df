"""Programs of several blocks as one program: what one stores and another reads is an array between their kernels.

In: a `BlockGraph` function and the loop-stage program of each of its parts. Out: one program, in which sizes that are the same have one name, sizes that
a view fixes are numbers, and views are gone: a kernel that reads a part of an array, or one with its axes in another order, has the indices of the
array itself.

    qkv[b, s, c] = …                         qkv[b, s, c] = …
    q = reshape(split(qkv, 3)[0], …)    ->
    … q[b, s, h, d] …                        … qkv[b, s, 64*h + d] …
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.base.sizes import Size, contiguous_strides, is_number, number_name
from tilewright.base.source import Span
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray, ProgramCheck, ScalarInput
from tilewright.ir.rewrite import replace_values, rewrite
from tilewright.ir.specialise import substituted
from tilewright.ir.types import Tensor
from tilewright.tree.block_graph import AffineIndex, BlockGraph, BlockView, StorageLayout

_MESSAGE = "extents {left} and {right} of what two blocks share do not match"
_PLACE = "a view is at place {left} of an axis of {right}"


def link_parts(joined: BlockGraph, programs: Sequence[Program]) -> Program:
    """The parts as one program; each was made for row-major arrays in place of views."""
    return _Linking(joined, programs).run()


class _Linking:
    def __init__(self, joined: BlockGraph, programs: Sequence[Program]) -> None:
        self.joined = joined
        self.equal = _Equalities()
        self.taken: set[str] = {p.name for p in joined.params}
        """Names of arrays and numbers so far."""
        self.sizes: set[str] = set()
        self.programs = [self.renamed(program) for program in programs]
        self.inputs: dict[str, ProgramArray | ScalarInput] = {}
        self.memory: list[tuple[str, Tensor]] = []
        """Name and type of each value."""
        self.local: list[dict[str, tuple[str, tuple[AffineIndex, ...] | None]]] = []
        """Of each part, for the names of its program: the name in the whole, and the places of its elements where it is a view."""
        self.scratch: list[ProgramArray] = []
        self.inside: list[tuple[int, Size, Span]] = []
        """Views that stay at one place along an axis: the place and the extent, which is larger."""

    def run(self) -> Program:
        for number, (part, program) in enumerate(zip(self.joined.parts, self.programs, strict=True)):
            self.local.append({})
            for argument, given in zip(part.args, program.inputs, strict=True):
                self.take(number, argument, given)
            for kept, output in zip(part.kept, program.outputs, strict=True):
                self.keep(number, kept, output)
            for array in program.scratch:
                name = self.fresh(array.name)
                self.local[number][array.name] = name, None
                self.scratch.append(replace(array, name=name))
        return self.program()

    # -- names ------------------------------------------------------------------------------------------------------

    def fresh(self, name: str) -> str:
        """A name for an array that nobody has."""
        found, number = name, 0
        while found in self.taken or found in self.sizes:
            number += 1
            found = f"{name}${number}"
        self.taken.add(found)
        return found

    def renamed(self, program: Program) -> Program:
        """The program with size names that no other part has."""
        own = sorted(name for name in _size_names(program) if not is_number(name))
        new: dict[str, Size] = {}
        for name in own:
            found, number = name, 0
            while found in self.sizes or found in new or found in self.taken:
                number += 1
                found = f"{name}${number}"
            new[name] = Size.of(found)
            self.equal.rank[found] = len(self.equal.rank)
            self.sizes.add(found)
        return substituted(program, {n: s for n, s in new.items() if s.name != n}, renames=True)

    # -- arrays -----------------------------------------------------------------------------------------------------

    def take(self, number: int, argument: str | BlockView, given: ProgramArray | ScalarInput) -> None:
        """A parameter of a part."""
        local, span = self.local[number], self.programs[number].span
        if isinstance(argument, BlockView):
            assert isinstance(given, ProgramArray)
            name, memory = self.memory[argument.value]
            for axis, (extent, fixed) in enumerate(zip(given.type.shape, argument.extents, strict=True)):
                self.equal.add(
                    extent, Size.of(fixed) if fixed is not None else _extent(memory, argument.places, axis), span
                )
            for extent, place in zip(memory.shape, argument.places, strict=True):
                if extent.constant is None and not any(place.steps):
                    self.inside.append((place.offset, extent, span))
            local[given.name] = name, argument.places
            return
        local[given.name] = argument, None
        if isinstance(given, ScalarInput) and given.name != argument:
            self.programs[number] = substituted(self.programs[number], {number_name(given.name): Size.of(number_name(argument))})
        known = self.inputs.setdefault(argument, replace(given, name=argument))
        if isinstance(known, ProgramArray) and isinstance(given, ProgramArray):
            if given.role == "inout" != known.role:  # the first block that reads it does not say that a later one writes it
                self.inputs[argument] = known = replace(known, role="inout")
            pairs = zip((*known.type.shape, *known.type.strides), (*given.type.shape, *given.type.strides), strict=True)
            for first, second in pairs:
                self.equal.add(first, second, span)

    def keep(self, number: int, kept: StorageLayout, output: ProgramArray) -> None:
        """A result of a part becomes a value."""
        name = self.fresh(self.programs[number].name if output.name == "out" else output.name)
        for extent, fixed in zip(output.type.shape, kept.stored, strict=True):
            if fixed is not None:
                self.equal.add(extent, Size.of(fixed), self.programs[number].span)
        shape: list[Size] = []
        for known, place in zip(kept.extents, kept.places, strict=True):
            if known is None:
                assert place.axis is not None
                shape.append(output.type.shape[place.axis])
            else:
                shape.append(Size.of(known))
        memory = replace(output.type, shape=tuple(shape), strides=contiguous_strides(tuple(shape)))
        self.memory.append((name, memory))
        self.local[number][output.name] = name, kept.places

    # -- the whole --------------------------------------------------------------------------------------------------

    def program(self) -> Program:
        joined, known = self.joined, self.equal.known
        parts = [substituted(program, known) for program in self.programs]
        types = {name: self.settled(memory) for name, memory in self.memory}
        types |= {name: self.settled(a.type) for name, a in self.inputs.items() if isinstance(a, ProgramArray)}
        types |= {a.name: self.settled(a.type) for a in self.scratch}
        calls = [
            _rewired(call, names, types)
            for program, names in zip(parts, self.local, strict=True)
            for call in program.calls
        ]
        inputs = tuple(self.inputs[p.name] for p in joined.params)
        results = [self.memory[value][0] for value in joined.results]
        between = [ProgramArray(name, types[name], "scratch") for name, _ in self.memory if name not in results]
        return Program(
            joined.name,
            tuple(replace(a, type=types[a.name]) if isinstance(a, ProgramArray) else a for a in inputs),
            tuple(ProgramArray(name, types[name], "output") for name in results),
            (*between, *(replace(a, type=types[a.name]) for a in self.scratch)),
            tuple(calls),
            tuple(dict.fromkeys((*(c for program in parts for c in program.checks if c.left != c.right), *self.equal.checks(), *self.places_inside()))),
            joined.span,
            loops=tuple(
                replace(loop, cell=names[loop.cell][0] if loop.cell else "")
                for program, names in zip(parts, self.local, strict=True) for loop in program.loops
            ),
            computed=tuple(dict.fromkeys(c for program in parts for c in program.computed)),
        )  # fmt: skip

    def places_inside(self) -> list[ProgramCheck]:
        known = self.equal.known
        found = [ProgramCheck(Size.of(offset), "lt", extent.substitute(known), _PLACE, span) for offset, extent, span in self.inside]
        return [check for check in found if check.right.constant is None or check.right.constant <= (check.left.constant or 0)]

    def settled(self, tensor: Tensor) -> Tensor:
        known = self.equal.known
        shape = tuple(s.substitute(known) for s in tensor.shape)
        return replace(tensor, shape=shape, strides=tuple(s.substitute(known) for s in tensor.strides))


class _Equalities:
    """Sizes that are the same, solved for names: the one that came last gives way, and all give way to numbers."""

    def __init__(self) -> None:
        self.rank: dict[str, int] = {}
        self.known: dict[str, Size] = {}
        self.left: list[tuple[Size, Size, Span]] = []

    def add(self, first: Size, second: Size, span: Span) -> None:
        first, second = first.substitute(self.known), second.substitute(self.known)
        if first == second:
            return
        for one, other in ((first, second), (second, first)):
            value = other.constant
            if value is not None and len(one.terms) == 1 and len(one.terms[0][0]) == 1:
                (atom,), factor = one.terms[0]
                if isinstance(atom, str) and factor and value % factor == 0:
                    self.learn(atom, Size.of(value // factor))
                    return
        named = [
            (s.name, o) for s, o in ((first, second), (second, first)) if s.name is not None and s.name not in o.names
        ]
        if named:
            self.learn(*max(named, key=lambda pair: self.rank.get(pair[0], -1)))
            return
        self.left.append((first, second, span))

    def learn(self, name: str, value: Size) -> None:
        new = {name: value}
        self.known = {n: s.substitute(new) for n, s in self.known.items()} | new
        left, self.left = self.left, []
        for first, second, span in left:
            self.add(first, second, span)

    def checks(self) -> list[ProgramCheck]:
        return [
            ProgramCheck(a.substitute(self.known), "eq", b.substitute(self.known), _MESSAGE, span) for a, b, span in self.left
        ]


def _extent(memory: Tensor, places: Sequence[AffineIndex], axis: int) -> Size:
    """The extent of a view along an axis that is one of the memory's."""
    return next(extent for extent, place in zip(memory.shape, places, strict=True) if place.axis == axis)


def _size_names(program: Program) -> set[str]:
    arrays = (*program.input_arrays, *program.outputs, *program.scratch)
    found = {n for a in arrays for s in (*a.type.shape, *a.type.strides) for n in s.names}
    found |= {n for check in program.checks for s in (check.left, check.right) for n in s.names}
    found |= {n for name, value in program.computed for n in (name, *value.names)}
    return found | {n for call in program.calls for n in call.kernel.size_names}


# -- kernels ----------------------------------------------------------------------------------------------------------


def _rewired(
    call: KernelCall, names: Mapping[str, tuple[str, tuple[AffineIndex, ...] | None]], types: Mapping[str, Tensor]
) -> KernelCall:
    """The call on arrays of the whole program, each of them one parameter."""
    params: dict[tuple[str, Tensor | None], Value] = {}
    plain: dict[Value, Value] = {}
    moved: dict[Value, tuple[Value, tuple[AffineIndex, ...]]] = {}
    for param, argument in zip(call.kernel.params, call.args, strict=True):
        name, places = names[argument]
        if not isinstance(param.type, Tensor):
            plain[param] = params.setdefault((name, None), param)
            continue
        type_ = types[name] if places is not None else replace(param.type, align=types[name].align)
        new = params.setdefault((name, type_), Value(type_, name))
        if places is None or [p.axis for p in places] == list(range(param.type.rank)):
            plain[param] = new
        else:
            moved[param] = new, places
    kernel = replace(call.kernel, params=tuple(params.values()), body=replace_values(call.kernel.body, plain))
    if moved:
        kernel = rewrite(kernel, functools.partial(_moved, moved))
    return KernelCall(kernel, tuple(name for name, _ in params), call.loops)


def _moved(moved: Mapping[Value, tuple[Value, tuple[AffineIndex, ...]]], builder: Builder, op: Op) -> Sequence[Value] | None:
    """Accesses to views as those of what they are views of."""
    if not op.operands or op.operands[0] not in moved:
        return None
    memory, places = moved[op.operands[0]]
    rank = len(places[0].steps) if places else 0
    indices = op.operands[1 : 1 + rank]
    found = [_index(builder, place, indices) for place in places]
    return builder.emit(op.opcode, (memory, *found, *op.operands[1 + rank :]), op.attrs)


def _index(builder: Builder, place: AffineIndex, indices: Sequence[Value]) -> Value:
    total: Value | None = None
    for step, index in zip(place.steps, indices, strict=True):
        if step:
            term = index if step == 1 else builder.mul(index, builder.index(step))
            total = term if total is None else builder.add(total, term)
    if total is None:
        return builder.index(place.offset)
    return builder.add(total, builder.index(place.offset)) if place.offset else total
