"""Arrays of packed blocks become arrays of bytes. In: a loop-stage program as it was written; out: one without packed dtypes.

A packed input `w: q4_k[rows, cols]` becomes `w: u8[rows, w.blocks, 144]`: one axis more, along which the bytes of a block lie. Its number of
blocks is a size that the call gives, and `cols` is 256 times that wherever it stands, so that every later pass knows what divides it. A load
becomes the arithmetic of `elements.py`, with block and place found by `floordiv` and `mod`:

    %0 = load %w, %i, %k : f32   ->   %b = floordiv %k, 256    %e = mod %k, 256    …    %q = load %w, %i, %b, %byte : u8    …

`split_blocks` later turns loops over such an index into loops over blocks and places. What a schedule of its own wants to know: the tensor of
bytes, the index of the row and `floordiv` of the index by the block are all there is to find; `elements.element_at` writes an element from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import DType, u8
from tilewright.base.sizes import ONE, ZERO, Size, contiguous_strides, floordiv, mod
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.ir.program import Program, ProgramArray, ProgramCheck
from tilewright.ir.rewrite import rewrite_block
from tilewright.ir.specialise import substituted
from tilewright.ir.types import Tensor
from tilewright.passes.packed.elements import packed_element


def unpack_blocks(program: Program) -> Program:
    """The program with bytes in place of packed blocks."""
    packed = [array for array in program.input_arrays if array.type.dtype.is_packed]
    if not packed:
        return program
    known: dict[str, Size] = {}
    for array in sorted(packed, key=lambda a: -a.type.dtype.block):
        name = array.type.shape[-1].name
        if name is not None:
            known.setdefault(name, Size.of(f"{array.name}.blocks") * array.type.dtype.block)
    program = substituted(program, known)
    checks = tuple(check for array in program.input_arrays if array.type.dtype.is_packed for check in _whole_blocks(array))
    return replace(
        program,
        inputs=tuple(replace(a, type=bytes_of(a.type)) if isinstance(a, ProgramArray) and a.type.dtype.is_packed else a for a in program.inputs),
        calls=tuple(replace(call, kernel=_unpacked(call.kernel)) for call in program.calls),
        checks=(*program.checks, *checks),
    )


def bytes_of(packed: Tensor) -> Tensor:
    """The tensor of bytes that holds a tensor of packed blocks. Strides of rows that are names count bytes from now on."""
    dtype = packed.dtype
    shape = (*packed.shape[:-1], floordiv(packed.shape[-1], Size.of(dtype.block)), Size.of(dtype.block_bytes))
    if packed.strides == contiguous_strides(packed.shape):
        return replace(packed, dtype=u8, shape=shape, strides=contiguous_strides(shape))
    return replace(packed, dtype=u8, shape=shape, strides=(*packed.strides[:-1], Size.of(dtype.block_bytes), ONE))


def _whole_blocks(array: ProgramArray) -> Sequence[ProgramCheck]:
    """What holds where a row is not known to have whole blocks."""
    extent, dtype = array.type.shape[-1], array.type.dtype
    if extent.divisible_by(dtype.block):
        return ()
    text = f"the last axis of '{array.name}' must be a multiple of {dtype.block}, the block of {dtype}: {{left}} elements are left over"
    return (ProgramCheck(mod(extent, dtype.block), "eq", ZERO, text),)


def _unpacked(kernel: Kernel) -> Kernel:
    formats: dict[Value, DType] = {}
    mapping: dict[Value, Value] = {}
    for param in kernel.params:
        if isinstance(param.type, Tensor) and param.type.dtype.is_packed:
            mapping[param] = Value(bytes_of(param.type), param.name)
            formats[mapping[param]] = param.type.dtype
    if not formats:
        return kernel

    def one(b: Builder, op: Op) -> tuple[Value, ...] | None:
        if op.opcode != "load" or op.operands[0] not in formats:
            return None
        tensor, *indices = op.operands
        element = packed_element(b, tensor, indices[:-1], indices[-1], formats[tensor])
        # The last op says what its result is: `units.py` finds elements by that.
        b.ops[-1] = replace(b.ops[-1], attrs=MappingProxyType({**b.ops[-1].attrs, "packed": formats[tensor].name}))
        assert element in b.ops[-1].results
        return (element,)

    params = tuple(mapping.get(p, p) for p in kernel.params)
    return replace(kernel, params=params, body=rewrite_block(kernel.body, one, dict(mapping)))
