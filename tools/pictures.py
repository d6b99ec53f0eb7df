"""The pictures of the documents, drawn as plain SVG: `docs/pictures`.

    python tools/pictures.py             says which are not as they should be
    python tools/pictures.py --write     draws them

- `figures.svg`: the ratios of the latest files of every kind in `bench/results`, a dot each, one line for each kind.
- `stages.svg`: one kernel at every stage, from what `tilewright compile --stage` prints.
- `memory.svg`: where data lies on a GPU and on a CPU, and the words that put it there.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable
from html import escape
from math import log10
from pathlib import Path

from tilewright.base.target import parse_target
from tilewright.cli.commands.compile import stage_text
from tilewright.cli.guess import parse_arguments
from tilewright.cli.sources import File, choose, read_source, walk

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
RESULTS = ROOT / "bench/results"
INK, PALE, LINE, GOOD, BAD = "#1b1f24", "#57606a", "#afb8c1", "#1a7f37", "#bc4c00"
FILLS = ("#ddf4ff", "#dafbe1", "#fff8c5", "#ffebe9", "#fbefff", "#eaeef2")


class Svg:
    """A picture with a white ground, so that it is legible on a dark page, too."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" font-family="system-ui, sans-serif">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#ffffff"/>',
        ]

    def text(self, x: float, y: float, said: str, size: float = 13, color: str = INK, anchor: str = "start", bold: bool = False, code: bool = False) -> None:
        style = (' font-weight="600"' if bold else "") + (' font-family="ui-monospace, monospace" xml:space="preserve"' if code else "")
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}"{style}>{escape(said)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" stroke="{LINE}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = LINE, width: float = 1, arrow: bool = False) -> None:
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" stroke-width="{width:g}"/>')
        if arrow:
            self.parts.append(f'<path d="M{x2 - 4:g} {y2 - 6:g} L{x2:g} {y2:g} L{x2 + 4:g} {y2 - 6:g}" fill="none" stroke="{color}" stroke-width="{width:g}"/>')

    def dot(self, x: float, y: float, color: str) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{color}" fill-opacity="0.55"/>')

    def whole(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


# -- figures --------------------------------------------------------------------------------------------------------


NO_PEERS = {"an array", "captured graph of ours", "plain read", "python kernel", "read", "unchecked"}
"""What some measurements compare with that is no other tool: ours without a check, or a bound that no code reaches."""
NO_COMPARISONS = {"before-after-nvidia-h200"}
"""Files that have a case more than once."""


def is_of_a_peer(row: object) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("ratio"), (int, float)) or row["ratio"] <= 0:
        return False
    return row.get("peer") not in NO_PEERS and not str(row.get("peer")).startswith("our ")


def ratios() -> dict[str, list[float]]:
    """The peer's time over ours, of the latest results of every kind of measurement on every device."""
    latest: dict[str, Path] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        kind, _, _ = re.sub(r"-\d{4}-\d\d-\d\d$", "|", path.stem).partition("|")
        latest[kind] = path  # dates sort as text
    found: dict[str, list[float]] = {}
    for kind, path in latest.items():
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        numbers = [float(row["ratio"]) for row in rows if is_of_a_peer(row)]
        if kind not in NO_COMPARISONS and numbers:
            found[kind] = numbers
    return found


def readable(kind: str) -> str:
    kind = "elementwise" + kind[3:] if kind.startswith(("cpu-", "gpu-")) else kind
    kind = re.sub(r"families(?:-cpu)?-seed-(\d+)", r"drawn by seed \1", kind)
    kind = kind.replace("-nvidia-h200", " · H200").replace("-cpu-intel", "-intel").replace("-intel-xeon-processor-2-threads", " · Xeon, 2 cores")
    return kind.replace("-cpu-aarch64-2-threads", " · Neoverse, 2 cores").replace("-aarch64-2-threads", " · Neoverse, 2 cores").replace("-x86-64-avx512", " · Xeon, 2 cores")


def figures() -> str:
    kinds = sorted(ratios().items(), key=lambda item: ("h200" not in item[0], item[0]))
    left, right, top, step = 250, 690, 78, 26
    low, high = -1.3, 2.3
    svg = Svg(860, top + step * len(kinds) + 46, "Ratios of all kept measurements")

    def x(ratio: float) -> float:
        return left + (right - left) * (min(max(log10(ratio), low), high) - low) / (high - low)

    svg.text(20, 28, "The best peer's time over ours: the latest results of every kind", 16, bold=True)
    svg.text(20, 48, "To the right of 1 we are faster. A dot is one size and dtype; beyond the ends it lies on the end. Our own code and bounds are no peers.", 12, PALE)
    bottom = top + step * len(kinds) - 6
    for tick in (0.1, 0.3, 1, 3, 10, 30, 100):
        svg.line(x(tick), top - 10, x(tick), bottom, INK if tick == 1 else LINE, 1.5 if tick == 1 else 0.6)
        svg.text(x(tick), bottom + 18, f"{tick:g}", 12, PALE, "middle")
    svg.text(right + 14, top - 14, "median", 12, PALE)
    svg.text(right + 78, top - 14, "we lose", 12, PALE)
    for number, (kind, numbers) in enumerate(kinds):
        y = top + step * number + 6
        svg.text(left - 12, y + 4, readable(kind), 12, anchor="end")
        for ratio in sorted(numbers):
            svg.dot(x(ratio), y, GOOD if ratio >= 1 else BAD)
        svg.text(right + 14, y + 4, f"{statistics.median(numbers):.2f}", 12)
        svg.text(right + 78, y + 4, f"{sum(ratio < 1 for ratio in numbers)} of {len(numbers)}", 12)
    svg.text((left + right) / 2, bottom + 36, "ratio, on a logarithmic scale", 12, PALE, "middle")
    return svg.whole()


# -- stages ---------------------------------------------------------------------------------------------------------

STAGES = (
    ("syntax", "what you wrote, as a tree", 7),
    ("typed", "every name has a shape and a dtype", 7),
    ("loop", "parallel loops and loads; still every device", 7),
    ("tile", "what a block of threads does", 4),
    ("thread", "what one thread does", 9),
    ("ptx", "code for the GPU; for CPUs `asm`", 9),
)
"""Stage, what it is, how many lines are shown."""


def stage_lines(text: str, stage: str, count: int) -> list[str]:
    """Lines that say most: those of the body, without declarations."""
    lines = [line for line in text.splitlines() if line.strip()]
    first = {"loop": "parallel", "tile": r"= load\b", "thread": "load", "ptx": r"ld\.global"}.get(stage)
    start = next((n for n, line in enumerate(lines) if first and re.search(first, line)), 0)
    lines = lines[start : start + count]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    return [line[indent:].replace("\t", "  ") for line in lines]


def stages() -> str:
    file = read_source(str(ROOT / "examples/gallery.py"))
    known = parse_arguments("m=f32[*,1024] v=f32[1024]")
    functions = tuple(function for function in file.kernels if function.name == "scale")
    (entry,) = choose(walk(File(file.path, functions), known).raise_if_errors().entries, "scale", file.path)
    target = parse_target("sm_90a")
    shown = [(stage, said, stage_lines(stage_text(entry, target, stage), stage, count)) for stage, said, count in STAGES]
    heights = [34 + 16 * len(lines) for _, _, lines in shown]
    svg = Svg(860, 60 + sum(heights) + 22 * len(shown), "The stages of one kernel")
    svg.text(20, 28, "One kernel, stage by stage: scale, for sm_90a", 16, bold=True)
    svg.text(20, 46, "Lines from the middle of what `tilewright compile --stage` prints.", 12, PALE)
    y = 58.0
    for number, ((stage, said, lines), height) in enumerate(zip(shown, heights, strict=True)):
        svg.box(20, y, 820, height, FILLS[number])
        svg.text(32, y + 20, stage, 14, bold=True)
        svg.text(110, y + 20, said, 12, PALE)
        for row, line in enumerate(lines):
            svg.text(32, y + 40 + 16 * row, line if len(line) <= 108 else line[:107] + "…", 12, code=True)
        y += height
        if number + 1 < len(shown):
            svg.line(60, y, 60, y + 20, PALE, 1.5, arrow=True)
        y += 22
    return svg.whole()


# -- memory ---------------------------------------------------------------------------------------------------------

GPU_LEVELS = (
    ("registers", "of one thread", "plain variables, tw.local", "no wait"),
    ("shared memory", "of one thread block, some 100 KB", "tw.shared, tw.shared_dynamic", "about 30 cycles"),
    ("L2 cache", "of the whole GPU, some 10 MB", "fills itself", "about 200 cycles"),
    ("global memory", "of the whole GPU, many GB", "tw.to_device, arrays of calls", "about 500 cycles"),
    ("host memory", "of the computer", "NumPy arrays, tw.pinned", "copied over a bus"),
)
CPU_LEVELS = (
    ("registers", "of one core, as vectors", "plain variables", "no wait"),
    ("L1 and L2 cache", "of one core, up to some MB", "tiles, packed panels", "4 to 15 cycles"),
    ("L3 cache", "of all cores", "fills itself", "about 50 cycles"),
    ("memory", "of the computer", "NumPy arrays", "about 300 cycles"),
)


def memory() -> str:
    svg = Svg(860, 520, "Where data lies")
    svg.text(20, 28, "Where data lies, and which words put it there", 16, bold=True)
    svg.text(20, 48, "Above: small and near. Below: large and far. Waits are orders of magnitude; they differ from chip to chip.", 12, PALE)

    def column(left: float, title: str, levels: Iterable[tuple[str, str, str, str]]) -> None:
        rows = list(levels)
        svg.text(left + 200, 76, title, 14, anchor="middle", bold=True)
        for number, (name, whose, words, wait) in enumerate(rows):
            inset = 18 * (len(rows) - 1 - number)
            y = 90 + 84 * number
            svg.box(left + inset, y, 400 - 2 * inset, 66, FILLS[number])
            svg.text(left + 200, y + 20, f"{name}: {wait}", 13, anchor="middle", bold=True)
            svg.text(left + 200, y + 38, whose, 12, PALE, "middle")
            svg.text(left + 200, y + 55, words, 12, anchor="middle", code=True)
            if number + 1 < len(rows):
                svg.line(left + 200, y + 66, left + 200, y + 84, PALE, 1.5, arrow=True)

    column(20, "GPU", GPU_LEVELS)
    column(440, "CPU", CPU_LEVELS)
    return svg.whole()


def pictures() -> dict[str, str]:
    return {"figures.svg": figures(), "stages.svg": stages(), "memory.svg": memory()}


def main() -> int:
    wrong = 0
    for name, text in pictures().items():
        path = FOLDER / name
        if "--write" in sys.argv[1:]:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"docs/pictures/{name} is not as it should be: python tools/pictures.py --write")
            wrong += 1
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
