"""The front end for several blocks as one program.

In: a `BlockGraph` function and what its parameters are. Out: a typed kernel that stands for the whole (its inputs, outputs and checks; it has no body
of its own), and the loop-stage program of all its parts. Each part is checked and lowered as if it were alone, for row-major arrays in place of
what other parts make.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import DType
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.passes.choose.hints import check_kind
from tilewright.passes.routes import from_block, fuse_kernels, join_blocks, prepare
from tilewright.passes.runner import Trace
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.metadata import CONTRACTIONS, KernelMetadata
from tilewright.tree.typed import ArgSpec, ArrayArg, ArrayInfo, ScalarInfo, TypedKernel


def check_joined(joined: BlockGraph, args: tuple[ArgSpec, ...]) -> tuple[TypedKernel, Program]:
    """Check and lower all parts."""
    trace = Trace()
    given = {param.name: spec for param, spec in zip(joined.params, args, strict=True)}
    align = max((spec.align for spec in args if isinstance(spec, ArrayArg)), default=0)
    made: list[DType] = []
    programs: list[Program] = []
    said: dict[str, KernelMetadata] = {}
    for part in joined.parts:
        specs = [
            given[a] if isinstance(a, str) else ArrayArg(made[a.value], len(a.extents), None, align) for a in part.args
        ]
        typed = check_kernel(part.function, specs)
        program = from_block(typed, trace)
        if typed.metadata.kind in CONTRACTIONS:
            check_kind(typed.metadata, prepare(fuse_kernels(program, trace)[0], trace))
        programs.append(_with_precision(_named(program, said, typed.metadata), typed.metadata.precision))
        made += [array.dtype for array in typed.outputs]
    program = join_blocks(joined, tuple(programs), trace, KernelMetadata(kernels=tuple(said.items())))
    return _whole(joined, program, tuple(said.items())), program


def _named(program: Program, said: dict[str, KernelMetadata], metadata: KernelMetadata) -> Program:
    """The program with kernels whose names no other part has; `said` gets what is said about each."""
    calls: list[KernelCall] = []
    for call in program.calls:
        name, number = call.kernel.name, 0
        while name in said:
            number += 1
            name = f"{call.kernel.name}_{number}"
        said[name] = metadata
        calls.append(replace(call, kernel=replace(call.kernel, name=name)))
    return replace(program, calls=tuple(calls))


def _with_precision(program: Program, precision: str) -> Program:
    if not precision:
        return program
    calls = (
        replace(c, kernel=replace(c.kernel, attrs=MappingProxyType({**c.kernel.attrs, "precision": precision})))
        for c in program.calls
    )
    return replace(program, calls=tuple(calls))


def _whole(joined: BlockGraph, program: Program, said: tuple[tuple[str, KernelMetadata], ...]) -> TypedKernel:
    inputs = tuple(_info(a) if isinstance(a, ProgramArray) else ScalarInfo(a.name, a.dtype) for a in program.inputs)
    arrays = (tuple(map(_info, some)) for some in (program.outputs, program.scratch))
    outputs, scratch = arrays
    return TypedKernel(joined.name, inputs, outputs, scratch, (), (), KernelMetadata(kernels=said), span=joined.span)


def _info(array: ProgramArray) -> ArrayInfo:
    packed = array.type.dtype if array.type.dtype.is_packed else None
    return ArrayInfo(array.name, array.type.dtype.element, array.type.shape, array.type.strides, array.role, array.type.align, packed)
