"""Convolutions with one to three axes, groups and dilations, and transposed ones."""

from __future__ import annotations

import math

from tilewright.graphs.onnx.loops import X, both
from tilewright.graphs.onnx.operator_rules import NodeView, is_float, operator
from tilewright.graphs.onnx.operators.matrices import FEW_ROWS, few_rows
from tilewright.graphs.onnx.operators.windows import SlidingWindow, list_of, sliding
from tilewright.graphs.onnx.values import Known


def _operands(node: NodeView) -> tuple[Known, Known, Known | None, int]:
    x, w, bias, groups = node.input(0), node.input(1), node.maybe(2), node.integer("group", 1)
    if x.rank < 3 or x.rank > 5 or w.rank != x.rank or x.dtype != w.dtype or not is_float(x.dtype):
        raise node.error(f"its operands are {x.dtype}{list(x.shape)} and {w.dtype}{list(w.shape)}", "TW009")
    if groups < 1:
        raise node.error(f"has {groups} groups", "TW004")
    return x, w, bias, groups


@operator("Conv", note="1 to 3 axes, groups, dilations, auto_pad")
def convolution(node: NodeView) -> Known:
    x, w, bias, groups = _operands(node)
    batch, channels = x.shape[:2]
    features, each = w.shape[:2]
    kernel_shape = node.integers("kernel_shape")
    if channels != each * groups or features % groups or (kernel_shape is not None and tuple(kernel_shape) != w.shape[2:]) or 0 in w.shape:
        raise node.error(f"its operands are {list(x.shape)} and {list(w.shape)}, with {groups} groups", "TW004")
    if bias is not None and bias.shape != (features,):
        raise node.error(f"its bias is {list(bias.shape)}, and there are {features} features", "TW004")
    window = sliding(node, x.shape[2:], w.shape[2:])
    several = features // groups
    pixels = window.results
    if groups == 1 and batch == 1 and math.prod(pixels) <= FEW_ROWS and each * math.prod(window.sizes) >= 64:
        found = few_rows(node, _patches(node, x, window), node.reshape(w, (features, each * math.prod(window.sizes))), bias, turned=True)
        return node.reshape(found, (batch, features, *pixels))
    kernel = node.kernel()
    if groups == 1:
        image, weights, biases = x, w, bias
        shape: tuple[int, ...] = (batch, features, *pixels)
    else:
        image = node.reshape(x, (batch, groups, each, *x.shape[2:]))
        weights = node.reshape(w, (groups, several, each, *w.shape[2:]))
        biases = None if bias is None else node.reshape(bias, (groups, several))
        shape = (batch, groups, several, *pixels)
    out = kernel.output(shape, x.dtype)
    with kernel.grid(*shape) as i:
        outer = i[: len(shape) - len(pixels)]
        at = i[len(shape) - len(pixels) :]

        def step(acc: X, k: tuple[X, ...]) -> None:
            places, inside = window.places(kernel, at, k[1:])
            with kernel.when(inside):
                value = kernel.read(image, *outer[:-1], k[0], *places, literal=False)
                kernel.set(acc, value * kernel.read(weights, *outer[1:], *k, literal=False), "+")

        total = kernel.reduce([each, *window.sizes], 0.0, step)
        kernel.store(out, i, total if biases is None else total + kernel.read(biases, *outer[1:]))
    return node.reshape(kernel.finish_one(), (batch, features, *pixels))


def _patches(node: NodeView, x: Known, window: SlidingWindow) -> Known:
    """What each window of one image covers, as a row; zeros outside of the image."""
    kernel = node.kernel("onnx_patches")
    shape = (*window.results, x.shape[1], *window.sizes)
    # Stored under a condition, so that sums over a row do not ask it again for every feature.
    out = kernel.output(shape, x.dtype, None if all(window.inside) else 0.0)
    axes = len(window.sizes)
    with kernel.grid(*shape) as i:
        places, inside = window.places(kernel, i[:axes], i[axes + 1 :])
        with kernel.when(inside):
            kernel.store(out, i, kernel.read(x, 0, i[axes], *places, literal=False))
    return node.reshape(kernel.finish_one(), (math.prod(window.results), x.shape[1] * math.prod(window.sizes)))


@operator("ConvTranspose", note="1 to 3 axes, groups, dilations, output_padding, output_shape")
def transposed_convolution(node: NodeView) -> Known:
    x, w, bias, groups = _operands(node)
    batch, channels = x.shape[:2]
    several = w.shape[1]
    features, each = several * groups, channels // groups
    axes = x.rank - 2
    if w.shape[0] != channels or channels % groups or (bias is not None and bias.shape != (features,)) or 0 in w.shape:
        raise node.error(f"its operands are {list(x.shape)} and {list(w.shape)}, with {groups} groups", "TW004")
    strides, dilations = list_of(node, "strides", axes, 1), list_of(node, "dilations", axes, 1)
    extra = node.integers("output_padding") or [0] * axes
    pads = node.integers("pads") or [0] * (2 * axes)
    asked = node.integers("output_shape")
    automatic = node.text("auto_pad", "NOTSET")
    if len(extra) != axes or len(pads) != 2 * axes or any(not -(1 << 31) < p < 1 << 31 for p in (*pads, *extra)):
        raise node.error(f"pads are {pads}, output_padding {extra}", "TW004")
    full = [(n - 1) * s + extra[a] + (w.shape[2 + a] - 1) * d + 1 for a, (n, s, d) in enumerate(zip(x.shape[2:], strides, dilations, strict=True))]
    if automatic in ("SAME_UPPER", "SAME_LOWER") and asked is None:
        asked = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
    if asked is not None:
        asked = asked[-axes:]
        if len(asked) != axes:
            raise node.error(f"output_shape is {asked}", "TW004")
        before = []
        for whole, wanted in zip(full, asked, strict=True):
            cut = whole - wanted
            before.append(cut // 2 if automatic == "SAME_UPPER" or cut < 0 else cut - cut // 2)
        results = list(asked)
        if automatic == "NOTSET":
            before = [(whole - wanted) // 2 if whole >= wanted else -((wanted - whole) // 2) for whole, wanted in zip(full, asked, strict=True)]
    else:
        before = [0] * axes if automatic == "VALID" else pads[:axes]
        after = [0] * axes if automatic == "VALID" else pads[axes:]
        results = [whole - b - a for whole, b, a in zip(full, before, after, strict=True)]
    kernel = node.kernel()
    image = node.reshape(x, (batch, groups, each, *x.shape[2:]))
    weights = node.reshape(w, (groups, each, several, *w.shape[2:]))
    biases = None if bias is None else node.reshape(bias, (groups, several))
    shape = (batch, groups, several, *results)
    out = kernel.output(shape, x.dtype)
    with kernel.grid(*shape) as i:
        b, g, f, *at = i

        def step(acc: X, k: tuple[X, ...]) -> None:
            places: list[X] = []
            conditions: list[X] = []
            for a in range(axes):
                far = kernel.let(at[a] + before[a] - k[1 + a] * dilations[a])
                place = far if strides[a] == 1 else kernel.let(far // strides[a])
                conditions += [far >= 0, place < x.shape[2 + a]]
                if strides[a] != 1:
                    conditions.append(far % strides[a] == 0)
                places.append(place)
            with kernel.when(both(*conditions)):
                kernel.set(acc, kernel.read(image, b, g, k[0], *places, literal=False) * kernel.read(weights, g, k[0], f, *k[1:], literal=False), "+")

        total = kernel.reduce([each, *w.shape[2:]], 0.0, step)
        kernel.store(out, i, total if biases is None else total + kernel.read(biases, g, f))
    return node.reshape(kernel.finish_one(), (batch, features, *results))


