"""The tables of passes in ARCHITECTURE.md, written from `passes/pipeline.py`.

    python tools/pass_table.py             prints them
    python tools/pass_table.py --write     puts them between the document's markers
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tilewright.passes.pipeline import ORDERS, PICK_TO_TILE, TITLES, TO_THREAD, TO_TILE, LoweringRule
from tilewright.passes.runner import Pass, Step

DOCUMENT = Path(__file__).parents[1] / "ARCHITECTURE.md"
BEGIN, END = "<!-- passes:begin -->", "<!-- passes:end -->"


def tables() -> str:
    """One table for each order. What a pass does stands where the pass appears first."""
    lines: list[str] = []
    shown: set[str] = set()
    for name, steps in ORDERS.items():
        lines += [f"**{TITLES[name]}**", "", "| pass | from → to | what it does | why here |", "|---|---|---|---|"]
        for step in steps:
            for one, why in _rows(step):
                what = one.what if one.name not in shown else ""
                shown.add(one.name)
                lines.append(f"| `{one.name}` | {_stages(one)} | {what} | {why} |")
        lines.append("")
    return "\n".join(lines)


def _rows(step: Step) -> Iterator[tuple[Pass, str]]:
    if isinstance(step.run, Pass):
        yield step.run, f"{step.why} ({_capital(step.only.text)}.)" if step.only else step.why
        return
    rules: tuple[LoweringRule, ...] = TO_TILE if step.run is PICK_TO_TILE else TO_THREAD
    for rule in rules:
        yield rule.lowering, f"For {rule.text}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _stages(one: Pass) -> str:
    words = {"any": "any stage", "tree": "typed tree"}
    source, result = words.get(one.source, one.source), words.get(one.result, one.result)
    return source if source == result else f"{source} → {result}"


def written(document: str) -> str:
    """The document with the tables of now."""
    head, rest = document.split(BEGIN)
    return f"{head}{BEGIN}\n{tables()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables())
