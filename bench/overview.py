"""The README's ten figures: `python -m bench.overview` prints the table and draws the picture, from the kept results.

In: the files under `bench/results`, and `CASES`, which names one row of ten of them. Out: `docs/overview.png` and Markdown lines.
Two of the ten are ones we lose: a page that shows only gains says nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bench.plot import FASTER, SLOWER

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = RESULTS.parents[1] / "docs" / "overview.png"


@dataclass(frozen=True)
class Figure:
    """One row: what a reader calls it, and where it is kept."""

    title: str
    kind: str
    op: str
    shape: tuple[int, ...]
    dtype: str


CASES = (
    Figure("matrix product 4096³, bf16", "matmul-nvidia-h200", "matmul", (4096, 4096, 4096), "bf16"),
    Figure("layer with GELU and residual 4096³, bf16", "matmul-nvidia-h200", "linear_gelu", (4096, 4096, 4096), "bf16"),
    Figure("attention, causal, 4 x 16 x 4096 x 128, bf16", "transformer-nvidia-h200", "attention_causal", (4, 16, 4096, 128), "bf16"),
    Figure("softmax 16384 x 4096, bf16", "transformer-nvidia-h200", "softmax", (16384, 4096), "bf16"),
    Figure("transformer block, batch 8, 512 positions, bf16", "zyn-nvidia-h200", "transformer_block", (8, 512, 768, 12, 3072), "bf16"),
    Figure("sort of 2²⁶ f32", "primitives-nvidia-h200", "sort", (67108864,), "f32"),
    Figure("n-body, 65536 bodies, an explicit kernel", "simt-nvidia-h200", "nbody", (65536,), "f32"),
    Figure("convolution 3x3, channels first, 32 x 64 x 56 x 56, bf16", "matmul-nvidia-h200", "conv3x3_nchw", (32, 64, 64, 56, 56), "bf16"),
    Figure("softmax 4096 x 2048 on a CPU, f32", "transformer-cpu", "softmax", (4096, 2048), "f32"),
    Figure("sort of 4 million f32 on a CPU", "primitives-cpu", "sort", (4194304,), "f32"),
)


@dataclass(frozen=True)
class Row:
    """A figure with its times, in milliseconds, the latest that is kept."""

    title: str
    ours: float
    peer: str
    theirs: float
    commit: str

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def rows() -> list[Row]:
    """The ten, in order."""
    return [_latest(figure) for figure in CASES]


def _latest(figure: Figure) -> Row:
    records = [
        json.loads(line)
        for file in sorted(RESULTS.glob(f"{figure.kind}*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    key = (figure.op, list(figure.shape), figure.dtype)
    last = [r for r in records if (r["op"], r["shape"], r["dtype"]) == key and r["ratio"] and not r["error"]][-1]
    return Row(figure.title, last["ours_ms"], last["peer"], last["peer_ms"], last["commit"])


def milliseconds(value: float) -> str:
    """A time with three digits that count."""
    return f"{value * 1000:.3g} µs" if value < 1 else f"{value:.3g} ms"


def table() -> list[str]:
    """Markdown lines."""
    head = ["| work | ours | best peer | its time | ratio |", "|---|---|---|---|---|"]
    return head + [
        f"| {row.title} | {milliseconds(row.ours)} | {row.peer} | {milliseconds(row.theirs)} | {row.ratio:.2f} |" for row in rows()
    ]


def draw(file: Path = PICTURE) -> Path:
    """One bar each: how many times the best peer's speed ours is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = rows()
    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    axes.barh(range(len(shown)), [row.ratio for row in shown], color=[FASTER if row.ratio >= 1 else SLOWER for row in shown], height=0.62)
    axes.axvline(1.0, color="#333333", linewidth=1)
    for place, row in enumerate(shown):
        axes.annotate(f"  {row.ratio:.2f} x {row.peer}", (max(row.ratio, 1.0), place), va="center", fontsize=8.5)
    axes.set_yticks(range(len(shown)), [row.title for row in shown], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(row.ratio for row in shown))
    axes.set_xlabel("best peer's time / ours (NVIDIA H200; CPU rows: two cores of a Xeon)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return file


if __name__ == "__main__":
    print("\n".join(table()))
    print(draw())
