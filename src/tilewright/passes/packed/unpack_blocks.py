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
from typing import TYPE_CHECKING

from tilewright.base.dtypes import DType, f32, u8
from tilewright.base.errors import UserError
from tilewright.base.sizes import ONE, ZERO, Size, contiguous_strides, floordiv, mod
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray, ProgramCheck
from tilewright.ir.rewrite import rewrite_block
from tilewright.ir.specialise import substituted
from tilewright.ir.types import Scalar, Tensor
from tilewright.tree.metadata import KernelMetadata

if TYPE_CHECKING:
    from tilewright.passes.packed.dots import RoundedInput


def unpack_blocks(program: Program, metadata: KernelMetadata | None = None) -> Program:
    """The program with bytes in place of packed blocks; sums with rounded activations where the metadata say so."""
    packed = [array for array in program.input_arrays if array.type.dtype.is_packed]
    if not packed:
        _check_rounded(program, metadata, ())
        return program
    from tilewright.passes.packed.dots import rounding_calls

    known: dict[str, Size] = {}
    for array in sorted(packed, key=lambda a: -a.type.dtype.block):
        name = array.type.shape[-1].name
        if name is not None:
            known.setdefault(name, Size.of(f"{array.name}.blocks") * array.type.dtype.block)
    program = substituted(program, known)
    checks = tuple(check for array in program.input_arrays if array.type.dtype.is_packed for check in _whole_blocks(array))
    calls: list[KernelCall] = []
    scratch: dict[str, ProgramArray] = {}
    for call in program.calls:
        kernel, rounded = _unpacked(call.kernel, _rounds(metadata, call.kernel))
        names = dict(zip(call.kernel.params, call.args, strict=True))
        for x in rounded:
            stem = f"{names[x.source]}.{x.weights.name}"
            names |= {x.numbers: f"{stem}.q", x.scale: f"{stem}.scale", x.sums: f"{stem}.sums"}
            before, arrays = rounding_calls(x, names, call)
            # What an earlier kernel rounded is rounded again: its array may have changed since.
            calls += before
            scratch |= {array.name: array for array in arrays}
        by_name = {p.name: name for p, name in names.items()}
        calls.append(replace(call, kernel=kernel, args=tuple(by_name[p.name] for p in kernel.params)))
    _check_rounded(program, metadata, calls)
    return replace(
        program,
        scratch=(*program.scratch, *scratch.values()),
        inputs=tuple(replace(a, type=bytes_of(a.type)) if isinstance(a, ProgramArray) and a.type.dtype.is_packed else a for a in program.inputs),
        calls=tuple(calls),
        checks=(*program.checks, *checks),
    )


def _rounds(metadata: KernelMetadata | None, kernel: Kernel) -> bool:
    return metadata is not None and metadata.of(kernel.name).activations == "q8"


def _check_rounded(program: Program, metadata: KernelMetadata | None, calls: Sequence[KernelCall]) -> None:
    """`activations="q8"` acts on some sum, or is refused."""
    if metadata is None or not any(own.activations == "q8" for own in (metadata, *(own for _, own in metadata.kernels))):
        return
    # Of a graph of blocks every kernel that says so has a sum of its own; of one kernel, some loop nest has.
    asked = [call.kernel for call in calls if metadata.kernels and metadata.of(call.kernel.name).activations == "q8"]
    if all(kernel.attrs.get("activations") for kernel in asked) and any(call.kernel.attrs.get("activations") for call in calls):
        return
    raise UserError.at(
        "TW016", f"activations=\"q8\" of {program.name} has nothing to round: no sum multiplies packed weights w[…, k] with activations x[…, k] over whole rows",
        program.span, "leave it out, or write total += w[i, k] * x[k] with k over all columns",
    )  # fmt: skip


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


def _unpacked(kernel: Kernel, rounds: bool) -> tuple[Kernel, list[RoundedInput]]:
    formats: dict[Value, DType] = {}
    mapping: dict[Value, Value] = {}
    for param in kernel.params:
        if isinstance(param.type, Tensor) and param.type.dtype.is_packed:
            mapping[param] = Value(bytes_of(param.type), param.name)
            formats[mapping[param]] = param.type.dtype
    if not formats:
        return kernel, []
    from tilewright.passes.packed.dots import sums_of_blocks, with_inputs
    from tilewright.passes.packed.elements import packed_element

    body, rounded = sums_of_blocks(kernel.body, mapping, formats) if rounds else (kernel.body, [])

    def one(b: Builder, op: Op) -> tuple[Value, ...] | None:
        if op.opcode != "load" or op.operands[0] not in formats or op.results[0].type != Scalar(f32):
            return None
        tensor, *indices = op.operands
        element = packed_element(b, tensor, indices[:-1], indices[-1], formats[tensor])
        # The last op says what its result is: `units.py` finds elements by that.
        b.ops[-1] = replace(b.ops[-1], attrs=MappingProxyType({**b.ops[-1].attrs, "packed": formats[tensor].name}))
        assert element in b.ops[-1].results
        return (element,)

    params = tuple(mapping.get(p, p) for p in kernel.params)
    unpacked = replace(kernel, params=params, body=rewrite_block(body, one, dict(mapping)))
    return (with_inputs(unpacked, rounded)[0], rounded) if rounded else (unpacked, [])
