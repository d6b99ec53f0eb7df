"""The picture of a result file: one bar a case, how many times the best peer's speed ours is.

In: records, or a `.jsonl` file (`python -m bench.plot FILE`); out: a PNG beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from bench.harness import Record

FASTER, SLOWER = "#2f7d4f", "#c8553d"
WIDE = 40.0
"""From this ratio on the axis is logarithmic: others could not be told apart."""


def plot(records: Sequence[Record], file: Path) -> Path:
    """Draw the ratios of all records that have one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [r for r in records if r.ratio is not None and not r.error]
    names = [label(r) for r in shown]
    width = 9.5 + 0.08 * max(0, max(map(len, names), default=0) - 30)  # long names must not take the room of the bars
    figure, axes = pyplot.subplots(figsize=(width, 1.6 + 0.36 * max(1, len(shown))), layout="constrained")
    ratios = [r.ratio or 0.0 for r in shown]
    places = range(len(shown))
    axes.barh(places, ratios, color=[FASTER if ratio >= 1 else SLOWER for ratio in ratios], height=0.66)
    if max(ratios, default=0.0) > WIDE:
        axes.set_xscale("log")
    axes.axvline(1.0, color="#333333", linewidth=1)
    for place, record, ratio in zip(places, shown, ratios, strict=True):
        copy = f", {record.of_copy:.0%} of copy" if record.of_copy else ""
        # A bar that names its peers speaks of another ratio than the one drawn.
        bar = record.bar if record.bar_ratio in (None, record.ratio) else None
        if bar is not None:
            axes.plot([bar, bar], [place - 0.4, place + 0.4], color="#1f4e9c", linewidth=2)
        right = max(ratio, 1.0, bar or 0.0)
        axes.annotate(f"  {ratio:.2f}x {record.peer}{copy}", (right, place), va="center", fontsize=8)
    axes.set_yticks(places, names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0 if axes.get_xscale() == "linear" else min(ratios) / 2, 1.45 * max([1.0, *ratios, *(r.bar or 0.0 for r in shown if r.bar_ratio in (None, r.ratio))]))
    axes.set_xlabel("best peer's median time / ours; blue: the bar")
    about = records[0] if records else None
    if about is not None:
        axes.set_title(f"{about.device}, {about.date[:10]}, {about.commit}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return file


def label(record: Record) -> str:
    shape = "x".join(f"2^{n.bit_length() - 1}" if n >= 1 << 16 and n.bit_count() == 1 else str(n) for n in record.shape)
    return " ".join(part for part in (record.op, shape, record.dtype) if part)


def read(file: Path) -> list[Record]:
    """The records of a file; fields that only some kinds of records have are left out."""
    known = {field.name for field in fields(Record)}
    lines = (json.loads(line) for line in file.read_text().splitlines() if line.strip())
    return [Record(**{name: value for name, value in line.items() if name in known}) for line in lines]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(plot(read(Path(name)), Path(name).with_suffix(".png")))
