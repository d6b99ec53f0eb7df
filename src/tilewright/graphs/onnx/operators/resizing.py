"""Resize and Upsample: nearest neighbours, linear and cubic interpolation.

Where each result reads along an axis depends on sizes alone, so places and weights are tables that are made when the model is planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tilewright.graphs.onnx.loops import choose
from tilewright.graphs.onnx.operator_rules import NodeView, is_float, operator
from tilewright.graphs.onnx.values import Known, as_rows

I64 = np.dtype(np.int64)


def _coordinates(node: NodeView, mode: str, extent: int, result: int, scale: float, roi: tuple[float, float]) -> np.ndarray:
    """Where the results lie on the axis they are made of."""
    x = np.arange(result, dtype=np.float64)
    if mode == "half_pixel":
        return (x + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        adjustment = result / (scale * extent)
        return extent / 2 * (1 - adjustment) + (x + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return (x + 0.5) / scale - 0.5 if result > 1 else np.zeros(1)
    if mode == "align_corners":
        span = extent * scale - 1
        return x * (extent - 1) / span if result > 1 and span else np.zeros(result)
    if mode == "asymmetric":
        return x / scale
    if mode == "tf_half_pixel_for_nn":
        return (x + 0.5) / scale
    if mode == "tf_crop_and_resize":
        start, end = roi
        step = (end - start) * (extent - 1) / (result - 1) if result > 1 else 0.0
        return (start * (extent - 1) if result > 1 else 0.5 * (start + end) * (extent - 1)) + x * step
    raise node.error(f"coordinate_transformation_mode is '{mode}'", "TW004")


def _nearest(node: NodeView, places: np.ndarray, how: str) -> np.ndarray:
    functions: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "round_prefer_floor": lambda p: np.ceil(p - 0.5),
        "round_prefer_ceil": lambda p: np.floor(p + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    if how not in functions:
        raise node.error(f"nearest_mode is '{how}'", "TW004")
    return functions[how](places)


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    d = np.abs(distance)
    return np.where(d <= 1, ((a + 2) * d - (a + 3)) * d * d + 1, np.where(d < 2, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a, 0.0))


def _table(node: NodeView, mode: str, extent: int, result: int, scale: float, coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places `[result, taps]` on an axis, and their weights."""
    if mode == "nearest":
        places = _nearest(node, coordinates, "floor" if node.opset < 11 or node.op == "Upsample" else node.text("nearest_mode", "round_prefer_floor"))[:, None]
        return np.clip(places, 0, extent - 1).astype(I64), np.ones_like(places)
    narrow = min(scale, 1.0) if node.integer("antialias") else 1.0
    support = (1.0 if mode == "linear" else 2.0) / narrow
    first = np.floor(coordinates - support).astype(np.int64) + 1
    taps = math.ceil(2 * support)
    places = first[:, None] + np.arange(taps)
    distance = (places - coordinates[:, None]) * narrow
    weights = np.maximum(0.0, 1 - np.abs(distance)) if mode == "linear" else _cubic(distance, node.number("cubic_coeff_a", -0.75))
    outside = (places < 0) | (places >= extent)
    if node.integer("exclude_outside"):
        weights = np.where(outside, 0.0, weights)
    if node.integer("exclude_outside") or node.integer("antialias"):
        weights = weights / weights.sum(1, keepdims=True)
    return np.clip(places, 0, extent - 1).astype(I64), weights


@operator("Resize", "Upsample", note="nearest, linear, cubic; antialias, crops, all coordinate modes")
def resize(node: NodeView) -> Known:
    x = node.input(0)
    mode = node.text("mode", "nearest")
    mode = "linear" if mode == "bilinear" else mode
    if mode not in ("nearest", "linear", "cubic"):
        raise node.error(f"mode is '{mode}'", "TW004")
    old = node.op == "Upsample" or node.opset < 11
    where = 1 if old else 2
    scales = [float(v) for v in node.host(where).reshape(-1)] if node.has_input(where) and node.input(where).size else None
    if old and node.has("scales"):
        values = node.record.attributes["scales"].value
        scales = [float(v) for v in values] if isinstance(values, list) else None
    sizes = node.host_ints(3) if not old and node.has_input(3) and node.input(3).size else None
    axes = [node.axis(a, x.rank) for a in (node.integers("axes") or range(x.rank))]
    roi = [float(v) for v in node.host(1).reshape(-1)] if not old and node.has_input(1) and node.input(1).size else [0.0] * len(axes) + [1.0] * len(axes)
    given = sizes if sizes is not None else scales
    if given is None or len(given) != len(axes) or len(roi) != 2 * len(axes):
        raise node.error(f"has {given} as scales or sizes, for {len(axes)} axes", "TW004")
    if any(not math.isfinite(float(g)) or g < 0 for g in given):
        raise node.error(f"its scales or sizes are {given}", "TW004")
    coordinate = "asymmetric" if old else node.text("coordinate_transformation_mode", "half_pixel")
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    shape, ratios = list(x.shape), [1.0] * x.rank
    if sizes is not None and policy != "stretch":
        pick = min if policy == "not_larger" else max
        ratio = pick(n / x.shape[a] for a, n in zip(axes, sizes, strict=True) if x.shape[a])
        for axis in axes:
            shape[axis], ratios[axis] = math.floor(ratio * x.shape[axis] + 0.5), ratio
    else:
        for axis, value in zip(axes, given, strict=True):
            shape[axis] = int(value) if sizes is not None else math.floor(x.shape[axis] * value)
            ratios[axis] = (shape[axis] / x.shape[axis] if x.shape[axis] else 1.0) if sizes is not None else float(value)
    node.check_size(shape, x.dtype)
    if 0 in x.shape and 0 not in shape:
        raise node.error(f"makes {shape} of {list(x.shape)}", "TW004")
    fill = node.number("extrapolation_value") if coordinate == "tf_crop_and_resize" else None
    for position, axis in enumerate(axes):
        crop = (roi[position], roi[position + len(axes)])
        if shape[axis] == x.shape[axis] and ratios[axis] == 1.0 and coordinate != "tf_crop_and_resize":
            continue
        places_at = _coordinates(node, coordinate, x.shape[axis], shape[axis], ratios[axis], crop)
        places, weights = _table(node, mode, x.shape[axis], shape[axis], ratios[axis], places_at)
        outside = (places_at < 0) | (places_at > x.shape[axis] - 1) if fill is not None else None
        x = _along(node, x, axis, shape[axis], places, weights, outside, fill)
    return x


def _along(node: NodeView, x: Known, axis: int, result: int, places: np.ndarray, weights: np.ndarray, outside: np.ndarray | None, fill: float | None) -> Known:
    """One axis resized by tables."""
    taps = places.shape[1]
    dtype = x.dtype
    table = node.known(as_rows(places))
    plain = taps == 1 and bool(np.all(weights == 1))
    factors = node.known(weights.astype(dtype if dtype == np.float64 else np.float32))
    if not plain and not is_float(dtype):
        raise node.error(f"interpolates {dtype}", "TW009")
    kernel = node.kernel()
    shape = (*x.shape[:axis], result, *x.shape[axis + 1 :])
    out = kernel.output(shape, dtype)
    beyond = node.known(outside) if outside is not None and outside.any() else None
    with kernel.grid(*shape) as i:
        total = None
        for tap in range(taps):
            place = kernel.read(table, i[axis], tap, literal=False)
            value = kernel.read(x, *(place if a == axis else i[a] for a in range(x.rank)), literal=False)
            if not plain:
                value = value * kernel.read(factors, i[axis], tap, literal=False)
            total = value if total is None else total + value
        assert total is not None
        if beyond is not None:


            total = choose(kernel.read(beyond, i[axis], literal=False), fill, total)
        kernel.store(out, i, total)
    return kernel.finish_one()
