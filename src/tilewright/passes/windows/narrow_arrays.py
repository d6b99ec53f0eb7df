"""CPU: an axis that loops under conditions walk in part counts as long as these loops. `Program -> Program`.

In: a program whose calls check that such loops fit (`guard_checks`). Out: the same, where a window's weights have no more elements along an axis than the window,
so that nothing depends on a condition to stay inside of them:

    reduce p < 3, q < 3 { … if y >= 0 and y < h and z >= 0 and z < w { x[y, z] * v[p, q] } }     v: [a, b] -> v: [3, 3], strides as before

The kernel's attribute `narrowed` names the extents, which strides are still made of: small ones become numbers (`choose/small_sizes.py`).

The rest of the compiler then knows the sum as it knows one over all of `v`: `y` is made of p, so that the condition speaks of p, but only `x` needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import analyse
from tilewright.analysis.guarded import guarded_loads
from tilewright.base.sizes import Size, SizeCall
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Value, is_watched, walk
from tilewright.ir.program import KernelCall, Program, ProgramCheck
from tilewright.ir.rewrite import replace_values
from tilewright.ir.types import Tensor
from tilewright.passes.triangles.square_results import reaches


def narrow_arrays(program: Program, target: Target | None) -> Program:
    """The program with shorter arrays; the very same one where there are none, or on a GPU, whose loads have masks of their own."""
    if target is None or target.simt:
        return program
    inputs = {array.name for array in program.inputs}
    checks = dict.fromkeys(program.checks)
    calls = tuple(_narrowed(call, inputs, checks) for call in program.calls)
    return replace(program, calls=calls, checks=tuple(checks)) if any(a is not b for a, b in zip(calls, program.calls, strict=True)) else program


def _narrowed(call: KernelCall, inputs: set[str], checks: dict[ProgramCheck, None]) -> KernelCall:
    kernel = call.kernel
    if not {"if", "reduce"} <= kernel.opcodes or is_watched(kernel):
        return call
    mapping: dict[Value, Value] = {}
    names: list[str] = []
    for memory in dict.fromkeys(g.load.operands[0] for g in guarded_loads(kernel) if not g.needs_no_guard):
        name = dict(zip(kernel.params, call.args, strict=True)).get(memory)
        shape = _walked(kernel, memory, tuple(checks)) if name in inputs else None
        if shape is None:
            continue
        assert isinstance(memory.type, Tensor)
        for axis, (length, extent) in enumerate(zip(shape, memory.type.shape, strict=True)):
            if length != extent:
                # Weights may be copied whole, though an image without elements has no use for them.
                message = f"a loop over {{left}} elements reads '{name}', whose axis {axis} has extent {{right}}"
                checks[ProgramCheck(length, "le", extent, message, kernel.span, "TW013")] = None
                names += [] if extent.name is None else [extent.name]
        mapping[memory] = Value(replace(memory.type, shape=shape), memory.name)
    if not mapping:
        return call
    body = replace_values(kernel.body, mapping)
    attrs = MappingProxyType({**kernel.attrs, "narrowed": tuple(dict.fromkeys(names))}) if names else kernel.attrs
    return replace(call, kernel=replace(kernel, params=tuple(mapping.get(p, p) for p in kernel.params), body=body, attrs=attrs))


def _walked(kernel: Kernel, memory: Value, checks: Sequence[ProgramCheck]) -> tuple[Size, ...] | None:
    """How long loops are along each axis of an array, or the axis itself; None where it is that everywhere, or more than loads have to do with the array."""
    assert isinstance(memory.type, Tensor)
    forms = analyse(kernel)
    lengths: dict[Value, Size] = {}
    for op in walk(kernel.body):
        if op.opcode in ("parallel", "reduce"):
            for extent, index in zip(op.operands, op.regions[0].args, strict=True):
                if extent in forms and not forms[extent].factors:
                    lengths[index] = forms[extent].constant
    found = [set[Size | None]() for _ in memory.type.shape]
    for op in walk(kernel.body):
        if memory not in op.operands:
            continue
        if op.opcode != "load":
            return None
        for own, index in zip(found, op.operands[1 : 1 + memory.type.rank], strict=True):
            own.add(next((length for v, length in lengths.items() if index in forms and forms[index].is_just(v)), None))
    shape = list(memory.type.shape)
    for axis, own in enumerate(found):
        length = next(iter(own)) if len(own) == 1 else None
        if length is not None and _fits(length, shape[axis], checks):
            shape[axis] = length
    return tuple(shape) if tuple(shape) != memory.type.shape else None


def _fits(length: Size, extent: Size, checks: Sequence[ProgramCheck]) -> bool:
    """Whether calls check that a loop is no longer than an axis, or both are numbers that say so."""
    if length.constant is not None and extent.constant is not None:
        return length.constant <= extent.constant
    return length != extent and (reaches(extent, length, checks) or (length.constant is not None and _may_reach(extent, length, checks)))


def _may_reach(size: Size, length: Size, checks: Sequence[ProgramCheck]) -> bool:
    """Whether calls check that an axis is as long as a window of literal size, or as the image is with its border where that is less. Weights have to be whole all the same."""
    for check in checks:
        if check.relation != "lt" or check.right != size:
            continue
        atoms = [atom for monomial, _ in (check.left + 1).terms for atom in monomial]
        if any(isinstance(atom, SizeCall) and atom.op == "min" and length in (atom.a, atom.b) for atom in atoms):
            return True
    return False
