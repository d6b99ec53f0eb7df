"""`python tools/targets_table.py [--write]`: the table of docs/targets.md, from running each construct of `tests/target_constructs.py` on each device here.

Rows of devices that this machine has not keep what the page says of them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
PAGE = ROOT / "docs" / "targets.md"
BEGIN, END = "<!-- constructs:begin -->", "<!-- constructs:end -->"
DEVICES = ("cpu", "webgpu", "opencl", "vulkan")


def outcome(run: object, device: str) -> str:
    """`runs`, or why it is refused."""
    from tilewright.base.errors import TilewrightError

    try:
        run(device)  # type: ignore[operator]
    except TilewrightError as error:
        reason = error.diagnostics[0].message.partition("cannot do ")[2] or error.diagnostics[0].message
        return "refused: " + re.sub(r"^wgsl cannot take '\w+' of \w+: ", "", reason).split("; ")[0].replace("|", "\\|")
    return "runs"


def rows(devices: tuple[str, ...] = DEVICES) -> dict[str, dict[str, str]]:
    """By construct and device."""
    from target_constructs import CONSTRUCTS
    from tilewright.base.errors import TilewrightError
    from tilewright.execute.devices import find_device

    found: dict[str, dict[str, str]] = {name: {} for name in CONSTRUCTS}
    for device in devices:
        try:
            find_device(device)
        except TilewrightError:
            continue
        for name, run in CONSTRUCTS.items():
            found[name][device] = outcome(run, device)
    return found


def read(text: str) -> dict[str, dict[str, str]]:
    """What the page says."""
    lines = [line for line in text.partition(BEGIN)[2].partition(END)[0].splitlines() if line.startswith("|")]
    if len(lines) < 2:
        return {}
    heads = [cell.strip(" `") for cell in lines[0].strip("|").split("|")][1:]
    table = {}
    for line in lines[2:]:
        name, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
        table[name] = dict(zip(heads, cells, strict=True))
    return table


def page(text: str) -> str:
    """The page with the table of today."""
    old, new = read(text), rows()
    lines = [f"| construct | {' | '.join(f'`{d}`' for d in DEVICES)} |", "|---" * (len(DEVICES) + 1) + "|"]
    for name, cells in new.items():
        lines.append(f"| {name} | " + " | ".join(cells.get(d) or old.get(name, {}).get(d) or "not run here" for d in DEVICES) + " |")
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    made = page(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        PAGE.write_text(made, encoding="utf-8")
    else:
        print(made)
