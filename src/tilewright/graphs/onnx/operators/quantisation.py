"""Quantised tensors: to and from integers, products of integers, packed weights."""

from __future__ import annotations

import math

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.graphs.onnx.block_weights import BlockWeights
from tilewright.graphs.onnx.loops import X, call, cast
from tilewright.graphs.onnx.operator_rules import NodeKernel, NodeView, elementwise, is_float, operator
from tilewright.graphs.onnx.operators.matrices import FEW_ROWS, few_rows, product
from tilewright.graphs.onnx.operators.reductions import reduce_nest
from tilewright.graphs.onnx.tensors import DTYPES
from tilewright.graphs.onnx.values import Known, as_rows

F32, I32, U8 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint8)


def _parameter(node: NodeView, kernel: NodeKernel, value: Known, x: Known, i: tuple[X, ...]) -> X:
    """The scale or zero point of an element: one for all, one along an axis, or one for each block along it."""
    if value.size == 1 and value.rank <= 1:
        return kernel.read(value, *([0] * value.rank), literal=False)
    axis, block = node.axis(node.integer("axis", 1), x.rank), node.integer("block_size")
    if value.rank == 1 and not block:
        if value.shape[0] != x.shape[axis]:
            raise node.error(f"its scale is {list(value.shape)} along axis {axis} of {list(x.shape)}", "TW004")
        return kernel.read(value, i[axis], literal=False)
    wanted = tuple(-(-n // block) if a == axis else n for a, n in enumerate(x.shape)) if block > 0 else ()
    if value.shape != wanted:
        raise node.error(f"its scale is {list(value.shape)} for {list(x.shape)} in blocks of {block}", "TW004")
    return kernel.read(value, *(i[a] // block if a == axis else i[a] for a in range(x.rank)), literal=False)


@operator("DequantizeLinear", note="by tensor, axis or block")
def dequantize(node: NodeView) -> Known:
    x, scale, zero = node.input(0), node.input(1), node.maybe(2)
    if not is_float(scale.dtype):
        raise node.error(f"its scale is {scale.dtype}", "TW009")
    kernel = node.kernel()
    out = kernel.output(x.shape, scale.dtype)
    wide = F32 if scale.dtype != np.float64 else scale.dtype
    with kernel.grid(*x.stored) as i:
        value = kernel.read(x, *i, literal=False)
        if is_float(x.dtype) or zero is None:
            number = cast(value, wide)
        else:
            number = cast(cast(value, np.dtype(np.int64)) - cast(_parameter(node, kernel, zero, x, i), np.dtype(np.int64)), wide)
        kernel.store(out, i, number * cast(_parameter(node, kernel, scale, x, i), wide))
    return kernel.finish_one()


@operator("QuantizeLinear", note="by tensor, axis or block; to 8- and 16-bit integers")
def quantize(node: NodeView) -> Known:
    x, scale, zero = node.input(0), node.input(1), node.maybe(2)
    number = node.integer("output_dtype")
    dtype = zero.dtype if zero is not None else DTYPES.get(number, U8)
    if dtype.kind not in "iu" or dtype.itemsize > 2 or not is_float(x.dtype):
        raise node.error(f"makes {dtype} of {x.dtype}", "TW009")
    info = np.iinfo(dtype)
    kernel = node.kernel()
    out = kernel.output(x.shape, dtype)
    with kernel.grid(*x.stored) as i:
        value = call("round", cast(kernel.read(x, *i, literal=False), F32) / cast(_parameter(node, kernel, scale, x, i), F32))
        if zero is not None:
            value = value + cast(_parameter(node, kernel, zero, x, i), F32)
        kernel.store(out, i, cast(call("clamp", value, float(info.min), float(info.max)), dtype))
    return kernel.finish_one()


@operator("DynamicQuantizeLinear")
def dynamic_quantize(node: NodeView) -> list[Known]:
    x = node.input(0)
    if x.dtype != F32:
        raise node.error(f"its input is {x.dtype}", "TW009")
    axes = list(range(x.rank))
    low, high = (reduce_nest(node, x, axes, False, kind) for kind in ("Min", "Max"))
    kernel = node.kernel()
    out, scale_out, zero_out = kernel.output(x.shape, U8), kernel.output((), F32), kernel.output((), U8)

    def parameters() -> tuple[X, X]:
        least, most = call("min", kernel.read(low), 0.0), call("max", kernel.read(high), 0.0)
        scale = kernel.let((most - least) / 255.0)
        return scale, kernel.let(call("clamp", call("round", (0.0 - least) / scale), 0.0, 255.0))

    with kernel.grid(1) as (one,):
        scale, zero = parameters()
        kernel.store(scale_out, (one,), scale)
        kernel.store(zero_out, (one,), cast(zero, U8))
    with kernel.grid(*x.stored) as i:
        scale, zero = parameters()
        kernel.store(out, i, cast(call("clamp", call("round", kernel.read(x, *i, literal=False) / scale) + zero, 0.0, 255.0), U8))
    return kernel.finish()


@operator("MatMulInteger")
def matmul_integer(node: NodeView) -> Known:
    a, b = node.input(0), node.input(1)
    if any(v.dtype.kind not in "iu" or v.dtype.itemsize != 1 for v in (a, b)):
        raise node.error(f"multiplies {a.dtype} and {b.dtype}", "TW009")
    return product(node, _centred(node, a, node.maybe(2), rows=True), _centred(node, b, node.maybe(3), rows=False))


def _centred(node: NodeView, x: Known, zero: Known | None, rows: bool) -> Known:
    """`x - zero` as 32-bit integers; a zero point for each row of the left operand, or each column of the right one."""
    if zero is not None and zero.size != 1 and zero.shape != (x.shape[-2 if rows and x.rank > 1 else -1],):
        raise node.error(f"a zero point is {list(zero.shape)} for {list(x.shape)}", "TW004")
    kernel = node.kernel("onnx_centred")
    out = kernel.output(x.shape, I32)
    with kernel.grid(*x.stored) as i:
        value = cast(kernel.read(x, *i, literal=False), I32)
        if zero is not None:
            place = [0] * zero.rank if zero.size == 1 else [i[-2] if rows else i[-1]]
            value = value - cast(kernel.read(zero, *place, literal=False), I32)
        kernel.store(out, i, value)
    return kernel.finish_one()


@operator("MatMulNBits", domain="com.microsoft", note="2, 4 or 8 bits; weights stay packed")
def matmul_n_bits(node: NodeView) -> Known:
    a, numbers, scales, bias = node.input(0), node.host(1), node.host(2), node.maybe(5)
    columns, depth, bits, block = node.integer("N"), node.integer("K"), node.integer("bits", 4), node.integer("block_size", 32)
    if bits not in (2, 4, 8) or block < 16 or block & (block - 1) or columns < 1 or depth < 1 or node.has_input(4):
        raise node.error(f"N {columns}, K {depth}, bits {bits}, block_size {block}, or an order of groups", "TW004")
    blocks = -(-depth // block)
    if numbers.dtype != np.uint8 or numbers.size != columns * blocks * (block * bits // 8) or a.shape[-1:] != (depth,) or not is_float(a.dtype):
        raise node.error(f"its weights are {numbers.dtype}{list(numbers.shape)}, and its input {a.dtype}{list(a.shape)}", "TW004")
    if scales.size != columns * blocks or not is_float(scales.dtype):
        raise node.error(f"its scales are {scales.dtype}{list(scales.shape)}", "TW004")
    zeros = node.host(3) if node.has_input(3) else None
    if zeros is not None and (zeros.size != columns * (blocks if is_float(zeros.dtype) else -(-blocks * bits // 8)) or not (is_float(zeros.dtype) or zeros.dtype == U8)):
        raise node.error(f"its zero points are {zeros.dtype}{list(zeros.shape)}", "TW004")
    if bias is not None and (bias.shape != (columns,) or bias.dtype != a.dtype):
        raise node.error(f"its bias is {bias.dtype}{list(bias.shape)}", "TW004")
    weights = BlockWeights(columns, blocks, bits, block, numbers, scales, zeros)
    if weights.dtype is None:
        found = product(node, a, node.known(as_rows(weights.floats()[:, :depth].astype(a.dtype).T)))
        return found if bias is None else elementwise(node, (found, bias), a.dtype, lambda x, b: x + b, "onnx_add")
    sources = (numbers, scales) if zeros is None else (numbers, scales, zeros)
    flat = a if a.rank == 2 else node.reshape(a, (math.prod(a.shape[:-1]), depth))
    found = packed_product(node, flat, node.packed(sources, (columns, depth, bits, block), weights.packed), weights.dtype, bias)
    return found if a.rank == 2 else node.reshape(found, (*a.shape[:-1], columns))


ROWS_OF_F32 = 8
"""Rows of f16 or bf16 up to which packed weights are multiplied as the f32 that they are. With more they are rounded: tensor cores multiply what has one type."""


def packed_product(node: NodeView, a: Known, w: Known, dtype: DType, bias: Known | None) -> Known:
    """`a[rows, depth]` times `w[columns, at least depth]`, whose elements are unpacked as they are read; what is beyond `depth` is padding."""
    (rows, depth), columns = a.shape, w.shape[0]
    # Neighbours in one byte (groups of four bits) take longer to unpack: fewer rows may do so each for itself.
    if rows <= (FEW_ROWS // 2 if dtype.scale and dtype.bits == 4 else FEW_ROWS) and a.size:
        return few_rows(node, a, w, bias, block=dtype.block)
    rounds = rows > ROWS_OF_F32 and a.dtype.itemsize == 2
    kernel = node.kernel()
    out = kernel.output((rows, columns), a.dtype)
    with kernel.grid(rows, columns) as (i, j):

        def step(acc: X, k: tuple[X, ...]) -> None:
            weight = kernel.read(w, j, k[0], literal=False)
            kernel.set(acc, kernel.read(a, i, k[0], literal=False) * (cast(weight, a.dtype) if rounds else weight), "+")

        total = kernel.reduce([depth], 0.0, step)
        kernel.store(out, (i, j), total if bias is None else total + kernel.read(bias, j, literal=False))
    return kernel.finish_one()
