"""Pictures of what `tune` and `inspect` found, with Matplotlib where it is installed, and sparklines for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.compile.tuning import Measurement

_BARS = "▁▂▃▄▅▆▇█"


@record
class Roof:
    """A launch under its roof: operations per byte; TFLOP/s and TB/s, 0 where unknown."""

    name: str
    intensity: float
    peak: float
    bandwidth: float


def sparkline(values: Sequence[float | None], width: int = 60) -> str:
    """Values as bars, the smallest lowest; None, something that failed, as a cross."""
    shown = list(values)[:width]
    known = [v for v in shown if v is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    steps = len(_BARS) - 1
    return "".join("×" if v is None else _BARS[round((v - low) / (high - low) * steps) if high > low else 0] for v in shown)


def plot_search(trials: Sequence[Measurement], chosen: str, title: str, path: str) -> str:
    """The time of each schedule in the order tried, as a picture; a line that says where it is.

    Short measurements are drawn apart from those made again at the end, which alone decide.
    """
    pyplot = _pyplot()
    points = [(i, m.seconds * 1e6, m) for i, m in enumerate(trials, 1) if m.ok]
    most = max((m.rounds for _, _, m in points), default=1)
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for again, label, colour in ((False, "measured shortly", "tab:grey"), (True, "measured again at the end", "tab:blue")):
        shown = [(i, t) for i, t, m in points if (m.rounds == most) is again]
        axes.plot([i for i, _ in shown], [t for _, t in shown], "o", label=label, color=colour, alpha=0.8)
    best: list[float] = []
    for _, t, _ in points:
        best.append(min(t, best[-1]) if best else t)
    axes.step([i for i, _, _ in points], best, where="post", label="lowest so far", color="tab:grey", linewidth=1)
    for i, t, m in points:
        if m.schedule == chosen:
            axes.plot([i], [t], "o", markersize=13, fillstyle="none", color="tab:red", label="chosen")
    failed = [i for i, m in enumerate(trials, 1) if not m.ok]
    if failed and points:
        axes.plot(failed, [max(t for _, t, _ in points)] * len(failed), "x", color="black", label="failed")
    axes.set_xlabel("schedules tried")
    axes.set_ylabel("time of a call in µs")
    axes.set_title(title)
    axes.legend()
    return _save(figure, path)


def plot_roofline(roofs: Sequence[Roof], chip: str, path: str) -> str:
    """Launches under the roofs of their arithmetic, as a picture; a line that says where it is."""
    pyplot = _pyplot()
    known = [r for r in roofs if r.peak and r.bandwidth and r.intensity]
    if not known:
        return "no roofline to plot: the extents or the target's peak are not known"
    figure, axes = pyplot.subplots(figsize=(9, 5))
    low = min(0.1, *(r.intensity / 4 for r in known))
    high = max(2 * r.peak / r.bandwidth for r in known)
    high = max(high, *(4 * r.intensity for r in known))
    for peak, bandwidth in sorted({(r.peak, r.bandwidth) for r in known}):
        ridge = peak / bandwidth
        axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color="grey")
        axes.annotate(f"{peak:g} TFLOP/s", (high, peak), ha="right", va="bottom")
    for r in known:
        reach = min(r.peak, r.intensity * r.bandwidth)
        axes.plot([r.intensity], [reach], "o")
        axes.annotate(r.name, (r.intensity, reach), textcoords="offset points", xytext=(4, -12))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s attainable")
    axes.set_title(f"Roofline of {chip}")
    return _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError.at("TW007", "plots need Matplotlib, which is not installed", help="pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _save(figure: Any, path: str) -> str:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UserError.at("TW007", f"'{path}' cannot be written: {error}") from None
    return f"plot: {path}"
