"""Products of matrices: MatMul, Gemm, Einsum, and those with packed weights."""

from __future__ import annotations

import math

import numpy as np

from tilewright.graphs.onnx.loops import X, cast
from tilewright.graphs.onnx.operator_rules import NodeView, broadcast, is_float, operator
from tilewright.graphs.onnx.values import Known

F32 = np.dtype(np.float32)


@operator("MatMul")
def matmul(node: NodeView) -> Known:
    a, b = node.input(0), node.input(1)
    if a.dtype != b.dtype or a.rank < 1 or b.rank < 1 or a.dtype.kind == "b":
        raise node.error(f"multiplies {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}", "TW009")
    return product(node, a, b)


def product(node: NodeView, a: Known, b: Known) -> Known:
    """A product of matrices, of vectors, or of many of them."""
    left = node.reshape(a, (1, *a.shape)) if a.rank == 1 else a
    right = node.reshape(b, (*b.shape, 1)) if b.rank == 1 else b
    if left.shape[-1] != right.shape[-2]:
        raise node.error(f"multiplies {list(a.shape)} and {list(b.shape)}", "TW004")
    batch = broadcast(node, left.shape[:-2], right.shape[:-2])
    rows, depth, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if right.rank == 2 and left.rank > 2:  # one matrix for all: rows of all batches are rows
        flat = node.reshape(left, (math.prod(left.shape[:-1]), depth))
        found = node.reshape(_matrix_product(node, flat, right), (*left.shape[:-1], columns))
    elif not batch:
        found = _matrix_product(node, left, right)
    else:
        kernel = node.kernel("onnx_matmul")
        out = kernel.output((*batch, rows, columns), a.dtype)
        with kernel.grid(*batch, rows, columns) as i:

            def step(acc: X, k: tuple[X, ...]) -> None:
                outer, (r, c) = i[:-2], i[-2:]
                one = kernel.spread(left, (*outer, r, k[0]), (*batch, rows, depth), literal=False)
                kernel.set(acc, one * kernel.spread(right, (*outer, k[0], c), (*batch, depth, columns), literal=False), "+")

            total = kernel.reduce([depth], 0.0 if is_float(a.dtype) else 0, step)
            kernel.store(out, i, total if is_float(a.dtype) else cast(total, a.dtype))
        found = kernel.finish_one()
    shape = [*batch, *([rows] if a.rank > 1 else []), *([columns] if b.rank > 1 else [])]
    return found if tuple(shape) == found.shape else node.reshape(found, shape)


FEW_ROWS = 4
"""Rows up to which a product is a sum for each row: a panel of a matrix product would be mostly empty, and packing costs more than it gives."""


def few_rows(node: NodeView, a: Known, w: Known, bias: Known | None = None, turned: bool = False, block: int = 1) -> Known:
    """`a[rows, depth]` times `w[columns, depth]`, for few rows: each row's sums are loops of their own. `turned` gives `[columns, rows]`.
    Where `w` is packed in blocks, whole ones are a loop of their own, and what is left another."""
    (rows, depth), columns = a.shape, w.shape[0]
    whole = depth // block * block
    kernel = node.kernel("onnx_few_rows")
    out = kernel.output((columns, rows) if turned else (rows, columns), a.dtype)
    with kernel.grid(columns) as (j,):
        for row in range(rows):

            def step(acc: X, k: tuple[X, ...], row: int = row) -> None:
                kernel.set(acc, kernel.read(a, row, k[0], literal=False) * kernel.read(w, j, k[0], literal=False), "+")

            total = kernel.reduce([whole], 0.0, step)
            if whole < depth:
                with kernel.loop(depth, whole) as k:
                    step(total, (k,))
            kernel.store(out, (j, row) if turned else (row, j), total if bias is None else total + kernel.read(bias, j, literal=False))
    return kernel.finish_one()


def _matrix_product(node: NodeView, a: Known, b: Known) -> Known:
    if a.shape[0] <= FEW_ROWS and is_float(a.dtype) and b.host is not None and a.size and b.size:
        return few_rows(node, a, node.transpose(b, (1, 0)))
    kernel = node.kernel("onnx_matmul")
    out = kernel.output((a.shape[0], b.shape[1]), a.dtype)
    with kernel.grid(a.shape[0], b.shape[1]) as (i, j):
        total = kernel.reduce(
            [a.shape[1]], 0.0 if is_float(a.dtype) else 0, lambda acc, k: kernel.set(acc, kernel.read(a, i, k[0], literal=False) * kernel.read(b, k[0], j, literal=False), "+")
        )
        kernel.store(out, (i, j), total if is_float(a.dtype) else cast(total, a.dtype))
    return kernel.finish_one()


@operator("Gemm")
def gemm(node: NodeView) -> Known:
    a, b, c = node.input(0), node.input(1), node.maybe(2)
    if a.rank != 2 or b.rank != 2 or a.dtype != b.dtype or (c is not None and c.dtype != a.dtype):
        raise node.error(f"multiplies {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}", "TW009")
    turned_a, turned_b = bool(node.integer("transA")), bool(node.integer("transB"))
    if turned_b and b.host is not None:
        b, turned_b = node.transpose(b, (1, 0)), False
    (rows, depth), (depth_b, columns) = a.shape[:: -1 if turned_a else 1], b.shape[:: -1 if turned_b else 1]
    if depth != depth_b:
        raise node.error(f"multiplies {list(a.shape)} and {list(b.shape)}", "TW004")
    if c is not None and broadcast(node, c.shape, (rows, columns)) != (rows, columns):
        raise node.error(f"adds {list(c.shape)} to {[rows, columns]}", "TW004")
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    integer = not is_float(a.dtype)
    if integer and (alpha != int(alpha) or beta != int(beta)):
        raise node.error(f"multiplies integers by alpha {alpha} or beta {beta}", "TW009")
    kernel = node.kernel()
    out = kernel.output((rows, columns), a.dtype)
    with kernel.grid(rows, columns) as (i, j):

        def step(acc: X, k: tuple[X, ...]) -> None:
            one = kernel.read(a, *((k[0], i) if turned_a else (i, k[0])), literal=False)
            kernel.set(acc, one * kernel.read(b, *((j, k[0]) if turned_b else (k[0], j)), literal=False), "+")

        total = kernel.reduce([depth], 0 if integer else 0.0, step)
        value = total if alpha == 1.0 else total * (int(alpha) if integer else alpha)
        if c is not None and beta:
            term = kernel.spread(c, (i, j), (rows, columns))
            value = value + (term if beta == 1.0 else term * (int(beta) if integer else beta))
        kernel.store(out, (i, j), cast(value, a.dtype) if integer else value)
    return kernel.finish_one()


@operator("Einsum", note="letters and `...`")
def einsum(node: NodeView) -> Known:
    equation = node.text("equation").replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    values = [node.input(n) for n in range(len(node.inputs))]
    if len(terms) != len(values):
        raise node.error(f"its equation '{equation}' has {len(terms)} operands, and there are {len(values)}", "TW016")
    sizes: dict[str, int] = {}
    dots = max((v.rank - len(t.replace("...", "")) for t, v in zip(terms, values, strict=True) if "..." in t), default=0)
    letters: list[list[str]] = []
    for term, value in zip(terms, values, strict=True):
        count = value.rank - len(term.replace("...", ""))
        names = list(term.replace("...", "\0"))
        if "\0" in names:
            at = names.index("\0")
            names[at : at + 1] = [f"dot{dots - count + n}" for n in range(count)]
        if len(names) != value.rank:
            raise node.error(f"its operand '{term}' of '{equation}' does not fit {list(value.shape)}", "TW003")
        for name, extent in zip(names, value.shape, strict=True):
            if sizes.setdefault(name, extent) != extent:
                if sizes[name] != 1 and extent != 1:
                    raise node.error(f"'{name}' of '{equation}' is {sizes[name]} and {extent}", "TW004")
                sizes[name] = max(sizes[name], extent)
        letters.append(names)
    wide = [f"dot{n}" for n in range(dots)]
    if arrow:
        found = [m for c in result.replace("...", "\0") for m in (wide if c == "\0" else [c])]
    else:
        found = wide + sorted(c for c in sizes if not c.startswith("dot") and left.count(c) == 1)
    if any(name not in sizes for name in found) or len(set(found)) != len(found):
        raise node.error(f"the result of '{equation}' does not fit its operands", "TW003")
    summed = [name for name in sizes if name not in found]
    kernel = node.kernel()
    dtype = values[0].dtype
    shape = tuple(sizes[name] for name in found)
    out = kernel.output(shape, dtype)
    with kernel.grid(*(shape or (1,))) as outer:
        place: dict[str, object] = dict(zip(found, outer, strict=False))

        def value_at(inner: tuple[X, ...]) -> X:
            here = {**place, **dict(zip(summed, inner, strict=True))}
            factors = [
                kernel.read(v, *(0 if n == 1 != sizes[name] else here[name] for name, n in zip(names, v.shape, strict=True)), literal=False)
                for names, v in zip(letters, values, strict=True)
            ]
            whole = factors[0]
            for factor in factors[1:]:
                whole = whole * factor
            return whole

        if summed:
            total = kernel.reduce([sizes[s] for s in summed], 0.0 if is_float(dtype) else 0, lambda acc, k: kernel.set(acc, value_at(k), "+"))
        else:
            total = value_at(())
        kernel.store(out, outer, total if is_float(dtype) else cast(total, dtype))
    return kernel.finish_one()
