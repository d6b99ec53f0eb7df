"""Windows that slide over images: extents, pads, strides and dilations, as convolutions and pools say them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.graphs.onnx.loops import X, both
from tilewright.graphs.onnx.operator_rules import NodeKernel, NodeView


@dataclass(frozen=True)
class SlidingWindow:
    """Windows over the axes behind batch and channels."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    extents: tuple[int, ...]
    """Of the image."""
    results: tuple[int, ...]
    """How many windows there are along each axis."""

    @property
    def inside(self) -> tuple[bool, ...]:
        """Along which axes all windows lie inside the image."""
        return tuple(
            b == 0 and (n - 1) * s + (k - 1) * d < e
            for b, n, s, k, d, e in zip(self.before, self.results, self.strides, self.sizes, self.dilations, self.extents, strict=True)
        )

    def places(self, kernel: NodeKernel, at: Sequence[X], inner: Sequence[X]) -> tuple[list[X], X | None]:
        """Where an element of a window lies in the image, and when that is inside."""
        found: list[X] = []
        conditions: list[X] = []
        for axis, (i, r) in enumerate(zip(at, inner, strict=True)):
            place = i * self.strides[axis] if self.strides[axis] != 1 else i
            if self.sizes[axis] > 1:
                place = place + (r * self.dilations[axis] if self.dilations[axis] != 1 else r)
            if self.before[axis]:
                place = place - self.before[axis]
            if not self.inside[axis]:
                conditions += [place >= 0, place < self.extents[axis]] if self.before[axis] else [place < self.extents[axis]]
            found.append(place)
        return found, both(*conditions)


def list_of(node: NodeView, name: str, count: int, default: int) -> tuple[int, ...]:
    """A list of one positive number for each axis."""
    found = node.integers(name)
    found = [default] * count if found is None else found
    if len(found) != count or any(not 0 < n < 1 << 31 for n in found):
        raise node.error(f"{name} are {found}, for {count} axes", "TW004")
    return tuple(found)


def sliding(node: NodeView, extents: Sequence[int], sizes: Sequence[int], ceil_mode: bool = False) -> SlidingWindow:
    """The windows that the attributes of a node describe."""
    count = len(sizes)
    strides, dilations = list_of(node, "strides", count, 1), list_of(node, "dilations", count, 1)
    spans = [(k - 1) * d + 1 for k, d in zip(sizes, dilations, strict=True)]
    automatic = node.text("auto_pad", "NOTSET")
    pads = node.integers("pads")
    if automatic in ("NOTSET", "VALID", ""):
        pads = [0] * (2 * count) if pads is None or automatic == "VALID" else pads
    elif automatic in ("SAME_UPPER", "SAME_LOWER"):
        pads = [0] * (2 * count)
        for axis, (n, s, span) in enumerate(zip(extents, strides, spans, strict=True)):
            missing = max((-(-n // s) - 1) * s + span - n, 0)
            small, large = missing // 2, missing - missing // 2
            pads[axis], pads[axis + count] = (small, large) if automatic == "SAME_UPPER" else (large, small)
    else:
        raise node.error(f"auto_pad is '{automatic}'", "TW004")
    if len(pads) != 2 * count or any(not 0 <= p < 1 << 31 for p in pads):
        raise node.error(f"pads are {pads}, for {count} axes", "TW004")
    results: list[int] = []
    for axis, (n, s, span) in enumerate(zip(extents, strides, spans, strict=True)):
        free = n + pads[axis] + pads[axis + count] - span
        if free < 0:
            raise node.error(f"a window of {span} is wider than axis {axis} of {n}, with its pads", "TW004")
        windows = (-(-free // s) if ceil_mode else free // s) + 1
        if ceil_mode and (windows - 1) * s >= n + pads[axis]:
            windows -= 1  # a window has to begin inside
        results.append(windows)
    return SlidingWindow(tuple(sizes), strides, dilations, tuple(pads[:count]), tuple(pads[count:]), tuple(extents), tuple(results))
