"""A picture of a launch: a row for each processor, a bar for each task, lines along the critical path. SVG, without any library.

In: a `MegaReport`. Out: text of an SVG file. Bars have titles, which browsers show; pale bars are waits. Where there are thousands of bars,
those of one kernel are one path with one title: a file of 5 MB becomes one of 0.6.
"""

from __future__ import annotations

from html import escape

from tilewright.mega.cpu_tasks import TaskTime
from tilewright.mega.report import MegaReport

_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#7a8a99")
WIDTH, LEFT, TOP = 1200, 90, 46
MOST_BARS, MOST_TITLES = 60_000, 4_000


def gantt_svg(report: MegaReport) -> str:
    """The picture of a report."""
    processors = sorted({t.processor for t in report.times})
    row = max(2.0, min(26.0, 620 / max(1, len(processors))))
    rows = {processor: number for number, processor in enumerate(processors)}
    span = max(1, report.span)
    scale = (WIDTH - LEFT - 20) / span
    totals: dict[str, int] = {}
    for time in report.times:
        totals[_kind(time.title)] = totals.get(_kind(time.title), 0) + time.end - time.start
    order = sorted(totals, key=lambda kind: -totals[kind])
    colour = {kind: _COLOURS[number] if number < len(_COLOURS) - 1 else _COLOURS[-1] for number, kind in enumerate(order)}
    shown = [*order[: len(_COLOURS) - 1], *(["other kernels"] if len(order) >= len(_COLOURS) else [])]
    bottom = TOP + row * len(processors)
    legend = -(-len(shown) // 4)
    height = bottom + 44 + 20 * legend
    step = _tick(span)
    unit, name = (1e6, "ms") if span >= 20_000_000 else (1e3, "µs")
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="12" fill="#222">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(report.name)} on {escape(report.device)}: one launch, {report.span / unit:.1f} {name}, {len(report.tasks)} kernels on {report.processors} processors</text>',
    ]  # fmt: skip
    for tick in range(0, span + 1, step):
        x = LEFT + tick * scale
        out.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#ddd"/><text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{tick / unit:g}</text>')
    out.append(f'<text x="{LEFT - 8}" y="{bottom + 16:.1f}" text-anchor="end">{name}</text>')
    every = max(1, round(18 / row))
    for processor, number in rows.items():
        if number % every == 0:
            out.append(f'<text x="{LEFT - 8}" y="{TOP + (number + 0.5) * row + 4:.1f}" text-anchor="end">{processor}</text>')
    out.append(f'<text x="{LEFT - 8}" y="{TOP - 12}" text-anchor="end">processor</text>')
    pad = 0.12 * row
    left_out = max(0, len(report.times) - MOST_BARS)
    times = report.times[:MOST_BARS]
    boxes = {id(time): (LEFT + time.start * scale, TOP + rows[time.processor] * row + pad, max(0.4, (time.end - time.start) * scale)) for time in times}
    tall = row - 2 * pad
    waits = "".join(_box(LEFT + t.arrived * scale, boxes[id(t)][1], (t.start - t.arrived) * scale, tall) for t in times if t.start > t.arrived)
    out.append(f'<path d="{waits}" fill="#e8e8e8"/>')
    if len(times) <= MOST_TITLES:
        bars = [([t], f"{t.start / 1e3:.2f} to {t.end / 1e3:.2f} µs on {t.processor}, waited {max(0, t.start - t.arrived) / 1e3:.2f} µs") for t in times]
    else:
        kernels: dict[str, list[TaskTime]] = {}
        for time in times:
            kernels.setdefault(time.title, []).append(time)
        bars = [(own, f"{min(t.start for t in own) / 1e3:.2f} to {max(t.end for t in own) / 1e3:.2f} µs, {len(own)} tasks") for own in kernels.values()]
    for own, text in bars:
        shape = "".join(_box(*boxes[id(t)], tall) for t in own)
        out.append(f'<path d="{shape}" fill="{colour[_kind(own[0].title)]}"><title>{escape(own[0].title)}: {text}</title></path>')
    points = []
    for number in report.path:
        own = [t for t in report.times if t.number == number]
        if own:
            last = max(own, key=lambda t: t.end)
            points.append(f"{LEFT + last.end * scale:.1f},{TOP + (rows[last.processor] + 0.5) * row:.1f}")
    if len(points) > 1:
        out.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="black" stroke-width="1.2" stroke-opacity="0.55"/>')
    for number, kind in enumerate(shown):
        x, y = LEFT + number % 4 * 270, bottom + 34 + 20 * (number // 4)
        share = totals[kind] if kind in totals else sum(totals[other] for other in order[len(_COLOURS) - 1 :])
        out.append(f'<rect x="{x}" y="{y:.1f}" width="12" height="12" fill="{colour.get(kind, _COLOURS[-1])}"/><text x="{x + 18}" y="{y + 10.5:.1f}">{escape(kind[:30])}, {share / max(1, sum(totals.values())):.0%}</text>')
    if left_out:
        out.append(f'<text x="{WIDTH - 20}" y="20" text-anchor="end">{left_out:,} bars are left out</text>')
    return "\n".join([*out, "</svg>", ""])


def _box(x: float, y: float, wide: float, tall: float) -> str:
    return f"M{x:.1f} {y:.1f}h{wide:.1f}v{tall:.1f}h-{wide:.1f}z"


def _kind(title: str) -> str:
    """Kernels of all layers have one colour: `mul_mat 7` is a `mul_mat`."""
    head, _, tail = title.rpartition(" ")
    return head if head and tail.isdigit() else title


def _tick(span: int) -> int:
    """A round number of nanoseconds, of which about ten fit."""
    step = 1
    while span / step > 12:
        step *= 2 if str(step)[0] in "15" and span / (step * 2) <= 12 else 5 if span / (step * 5) <= 12 else 10
    return step
