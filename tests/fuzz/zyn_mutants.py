"""Programs changed a little, as by a slip of the hand, and what becomes of them. Run as a script, for one file at a time:

    python zyn_mutants.py FILE SEED COUNT RUNS

Every mutant must be refused with a clear error at a place, or run with the same results in the emulator (loop stage) and on the CPU.
`RUNS` of those that pass the checks are run. One JSON object comes out: how many were refused, checked and run, and what was wrong.
A mutant that takes more of the processor's time than `LIMIT_S`, or ten times as long, ends the process; its text is in `mutant.zyn` in the
current directory.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
import traceback
from pathlib import Path

import numpy as np

from tilewright.base.errors import CODES, Diagnostic, TargetLimit, UserError
from tilewright.cli.commands.run import _execute_random, execute
from tilewright.cli.sources import File, Walk, parse_source, walk
from tilewright.frontend.zyn.parse import layout_tokens

LIMIT_S = 60


def mutant(text: str, choice: random.Random) -> tuple[str, str]:
    """A changed text, and what was done to it."""
    places = [(t.start_pos, t.end_pos, t.type) for t in layout_tokens(text) if t.value and t.start_pos is not None]
    places = [(start, end, kind) for start, end, kind in places if text[start:end].strip()]
    way = choice.choice(("delete", "double", "swap", "number", "name", "word", "line", "character"))
    start, end, _ = choice.choice(places)
    if way == "delete":
        return text[:start] + text[end:], f"deleted {text[start:end]!r} at {start}"
    if way == "double":
        return text[:end] + " " + text[start:end] + text[end:], f"doubled {text[start:end]!r} at {start}"
    if way == "swap":
        first, second = sorted((choice.choice(places)[:2], (start, end)))
        if first[1] > second[0]:
            return text, "nothing"
        middle = text[first[1] : second[0]]
        return text[: first[0]] + text[slice(*second)] + middle + text[slice(*first)] + text[second[1] :], f"swapped {first} with {second}"
    if way == "number":
        numbers = [(s, e) for s, e, kind in places if kind in ("INT", "FLOAT")]
        if numbers:
            start, end = choice.choice(numbers)
        return text[:start] + choice.choice(("0", "1", "2", "3", "7", "-1", "0.5", "1e3")) + text[end:], f"a number for {text[start:end]!r} at {start}"
    if way == "name":
        names = [(s, e) for s, e, kind in places if kind == "NAME"]
        (start, end), (s, e) = choice.choice(names), choice.choice(names)
        return text[:start] + text[s:e] + text[end:], f"{text[s:e]!r} for {text[start:end]!r} at {start}"
    if way == "word":
        new = choice.choice(("for", "in", "let", "var", "if", "else", "while", "@", "..", "[", "]", "(", ")", "{", "}", ":", ",", "|>", "inf", "-", "/", "@strict"))
        return text[:start] + new + " " + text[start:], f"inserted {new!r} at {start}"
    if way == "line":
        lines = text.split("\n")
        number = choice.randrange(len(lines))
        lines[number] = choice.choice((" " + lines[number], lines[number][1:], "", lines[choice.randrange(len(lines))]))
        return "\n".join(lines), f"line {number + 1}"
    new = choice.choice("é𝄞\t\0\"'\\;#$?1a")
    return text[:start] + new + text[start:], f"character {new!r} at {start}"


def clear(diagnostics: tuple[Diagnostic, ...] | list[Diagnostic]) -> str:
    """What is wrong with errors; empty if they are clear and have a place."""
    for diagnostic in diagnostics:
        if diagnostic.code not in CODES or not diagnostic.message or diagnostic.code == "TW040":
            return f"unclear: {diagnostic.render()}"
        if not diagnostic.span.line:
            return f"no place: {diagnostic.render()}"
    return "" if diagnostics else "an error without messages"


def same(first: object, second: object) -> bool:
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if not isinstance(first, np.ndarray | np.generic | int | float):
        return type(first) is type(second)
    a, b = np.asarray(first), np.asarray(second)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind in "biu":
        return bool((a == b).all())
    a, b = a.astype(np.float64), b.astype(np.float64)
    # What overflows or is not a number may do so in another step of another order of sums.
    odd = ~(np.isfinite(a) & np.isfinite(b)) | (np.abs(a) > 1e30) | (np.abs(b) > 1e30)
    return bool((odd | (np.abs(a - b) <= 2e-3 * np.maximum(1.0, np.abs(a)) * max(1.0, float(np.abs(a[~odd]).max(initial=0.0)) ** 0.5))).all())


def checked(text: str) -> tuple[File | None, Walk | None, str]:
    """The file if it is right, else what is wrong with how it was refused."""
    try:
        file = parse_source(text, "mutant.zyn")
        found = walk(file, {})
    except UserError as error:
        return None, None, clear(error.diagnostics)
    return (file, found, "") if not found.errors else (None, None, clear(found.errors))


def ran(file: File, found: Walk) -> str:
    """What is wrong with a run of a program that passed its checks."""
    try:
        with np.errstate(all="ignore"):
            slow, inputs = _execute_random(file, None, found, {}, "emulator:loop")
            fast = execute(file, None, inputs, "cpu", [])
    except (UserError, TargetLimit) as error:
        return clear(error.diagnostics)
    wrong = [name for name in slow if not same(slow[name], fast.get(name))]
    return f"results differ: {wrong}" if wrong else ""


def main(path: str, seed: int, count: int, runs: int) -> None:
    text = Path(path).read_text(encoding="utf-8")
    choice = random.Random(f"{Path(path).name} {seed}")
    result: dict[str, object] = {}
    tally = {"refused": 0, "right": 0, "run": 0}
    wrong: list[str] = []
    faulthandler.register(signal.SIGPROF, chain=True)  # where it is, and the end
    for _ in range(count):
        changed, what = mutant(text, choice)
        Path("mutant.zyn").write_text(changed, encoding="utf-8")
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        faulthandler.dump_traceback_later(10 * LIMIT_S, exit=True)
        try:
            file, found, problem = checked(changed)
            tally["refused" if file is None else "right"] += 1
            if file is not None and found is not None and tally["run"] < runs:
                tally["run"] += 1
                problem = ran(file, found)
        except Exception:
            problem = f"crash: {traceback.format_exc(limit=-4)}"
        if problem:
            wrong.append(f"{what}: {problem}\n{changed}")
    signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.cancel_dump_traceback_later()
    result |= tally
    print(json.dumps({**result, "wrong": wrong}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
