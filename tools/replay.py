"""Does the compiler still generate the same code? A guard for refactorings.

In: the working tree, and `tools/replay_baseline.json`, in which every case of `tools/replay_cases.py` has one line with
a hash for each target. Out: one line for each case that differs, a summary, and exit status 1 where anything does.

A case is compiled as ever, but LLVM is a stand-in that keeps the text it is given. So neither LLVM's passes nor ptxas
run, and no GPU and no particular CPU is needed. What counts of a case:

- code: the LLVM text of its kernels, with the target's triple, CPU and features,
- launch: grids, blocks, shared memory, arrays, scratch memory, checks and whatever else goes with the code,
- host: the LLVM text of what reads Python objects (entries, stubs, the allocator). It depends on the version of Python;
  where that is not the one of the baseline, it is not compared.

Texts are compared up to names: functions, variables, labels, metadata and files are numbered in the order in which they
appear, and line numbers count from the first one. Names of functions of LLVM, of C and of Python stay. Schedules count
by what they cause, not as text.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fnmatch
import gc
import hashlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "tools" / "replay_baseline.json"
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / part) for part in ("src", "tests", "")]

if TYPE_CHECKING:
    from tools.replay_cases import Case

TARGETS = ("x86-64", "x86-64-avx2", "x86-64-amx", "aarch64-neon", "sm_80", "sm_90a", "sm_120")
PARTS = ("code", "launch", "host")
SHOWN = 40
"""Differences that are listed."""
DIFFED = 3
"""Cases whose unified diff is shown."""


# -- the stand-in for LLVM ---------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """One module that LLVM was given, and the machine it was meant for."""

    machine: str
    text: str


PTX = "ptx"
"""Says of a text that it is PTX already."""
given: list[Text] = []
"""What LLVM was given since the list was last emptied."""


class _Machine:
    """Stands for a target machine."""

    def __init__(self, triple: str, cpu: str = "", features: str = "", opt: int = 2, code_model: str = "small") -> None:
        self.name = f"{triple} codemodel={code_model} cpu={cpu} features={features} opt={opt} reloc=pic"

    def data_layout(self) -> str:
        return ""

    def emit(self, module: _Module, as_object: bool) -> bytes:
        given.append(Text(self.name, module.text))
        return b""


class _Module:
    """Stands for a module of LLVM."""

    def __init__(self, text: str) -> None:
        self.text = text

    def optimise(self, *_: object, **__: object) -> None: ...

    def close(self) -> None: ...


def pin() -> None:
    """From now on nothing of this machine or its user decides: no settings, no cache, no measurements, no GPU, no other
    processes. Neither is there an LLVM. To be called before anything of the compiler is imported."""
    for name in [name for name in os.environ if name.startswith("TILEWRIGHT_")]:
        del os.environ[name]
    os.environ |= {"TILEWRIGHT_CACHE": "0", "TILEWRIGHT_TUNING": "off", "TILEWRIGHT_ISOLATE": "never"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": "/nonexistent"}
    from tilewright.base import llvm_library

    llvm_library.TargetMachine, llvm_library.LlvmModule = _Machine, _Module  # type: ignore[assignment, misc]


# -- names do not count ------------------------------------------------------------------------------------------------

_NAME = r'(?:[-\w.$]+|"[^"]*")'
_TOKEN = re.compile(rf'([%@]){_NAME}|!\d+|!?"[^"]*"|^({_NAME}):|\b(?:line|scopeLine): \d+', re.MULTILINE)
_DEFINED = re.compile(rf"^(?:define\b[^@\n]*(@{_NAME})|(@{_NAME}) = (?!.*\bexternal\b))", re.MULTILINE)
_FUNCTION = re.compile(r"^define\b.*?^\}", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r'^[ \t]*;.*\n|[ \t]+;[^"\n]*$', re.MULTILINE)
_OURS = ("@tilewright", "@tw_")
_SAID = re.compile(r'((?:filename|directory|name|linkageName|producer): )"[^"]*"')


def normalised(text: str) -> str:
    """LLVM text in which names do not count; lines that declare come sorted at the end."""
    text = _COMMENT.sub("", _SAID.sub(r'\1""', text))
    own = {first or second for first, second in _DEFINED.findall(text)}
    outside: dict[str, str] = {}
    local: dict[str, str] = {}
    first_line: list[int] = []

    def number(match: re.Match[str]) -> str:
        token = match[0]
        sign = token[0]
        if sign == "%":
            return local.get(token) or local.setdefault(token, f"%{len(local)}")
        if sign == "@":
            if token.startswith("@llvm.") or not (token in own or token.startswith(_OURS)):
                return token
            return outside.get(token) or outside.setdefault(token, f"@{len(outside)}")
        if sign == "!":
            return token if token[1] == '"' else outside.get(token) or outside.setdefault(token, f"!{len(outside)}")
        if match[2] is not None:
            label = "%" + match[2]
            return (local.get(label) or local.setdefault(label, f"%{len(local)}"))[1:] + ":"
        if sign in "ls" and token[-1].isdigit():
            word, line = token.split()
            first_line.append(int(line))
            return f"{word} {int(line) - first_line[0]}"
        return token

    bodies: list[str] = []
    rest: list[str] = []
    place = 0
    for match in _FUNCTION.finditer(text):
        rest.append(text[place : match.start()])
        place = match.end()
        local.clear()
        bodies.append(_TOKEN.sub(number, match[0]))
    rest.append(text[place:])
    local.clear()
    lines = [line for line in "\n".join(rest).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith("declare") and " external " not in line]
    others = [line for line in lines if line.startswith("declare") or " external " in line]
    bodies.append(_TOKEN.sub(number, "\n".join(kept)))
    return "\n".join([*bodies, *sorted(_TOKEN.sub(number, line) for line in others)]) + "\n"


# -- one case for one target -------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """A case for a target: the normalised texts by part, or why there are none."""

    texts: dict[str, str]
    refused: str = ""

    def line(self) -> str:
        """What the baseline keeps."""
        return self.refused or ".".join(hashed(self.texts[part]) for part in PARTS)


def hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest() if text else "-"


def replay(case: Case, target: str) -> Outcome:
    """Compile one case."""
    from tools.replay_cases import refusal

    given.clear()
    try:
        launches = case.compile(target)
    except Exception as error:
        return Outcome({}, refusal(error))
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for machine, text in given:
        parts["host" if re.search(r"@_?Py", text) else "code"].append(
            f"; {machine}\n{normalised(text) if machine != PTX else text}"
        )
    parts["launch"] = [normalised(text) for text in launches]
    return Outcome({part: "\n".join(texts) for part, texts in parts.items()})


class Job(NamedTuple):
    """What a process has to do; set before it is forked."""

    cases: list[Case]
    targets: tuple[str, ...]
    dump: Path | None


_job: list[Job] = []


def _work(index: int) -> tuple[int, list[str], float]:
    """One case for all targets, in a process of its own."""
    cases, targets, dump = _job[0]
    case, start = cases[index], time.process_time()
    found: list[str] = []
    gc.disable()  # a fifth of the time
    for target in TARGETS:
        if target not in targets:
            found.append("")
        elif target not in case.targets:
            found.append("-")
        else:
            with contextlib.redirect_stdout(io.StringIO()):  # programs print
                outcome = replay(case, target)
            found.append(outcome.line())
            if dump is not None:
                _dump(dump, case.name, target, outcome)
    gc.collect(1)
    return index, found, time.process_time() - start


def _dump(folder: Path, name: str, target: str, outcome: Outcome) -> None:
    place = folder / dumped_name(name, target)
    place.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"== {part} ==\n{text}\n" for part, text in outcome.texts.items()]
    place.write_text("".join(parts) or outcome.refused + "\n", encoding="utf-8")


def dumped_name(name: str, target: str) -> str:
    plain = re.sub(r"[^-\w.]", "_", name)
    return f"{target}/{plain}.txt"


def run(
    cases: list[Case], targets: tuple[str, ...], jobs: int, dump: Path | None = None, slowest: int = 0
) -> dict[str, list[str]]:
    """The lines of cases by name."""
    _job[:] = [Job(cases, targets, dump)]
    found: dict[str, list[str]] = {}
    times: list[tuple[float, str]] = []
    for index, lines, seconds in _progress(_results(len(cases), jobs), len(cases)):
        found[cases[index].name] = lines
        times.append((seconds, cases[index].name))
    for seconds, name in sorted(times, reverse=True)[:slowest]:
        print(f"{seconds:6.2f} s  {name}")
    return {case.name: found[case.name] for case in cases}


def _results(count: int, jobs: int) -> Iterator[tuple[int, list[str], float]]:
    if jobs <= 1:
        yield from map(_work, range(count))
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_work, range(count), 4)


def _progress(results: Iterable[tuple[int, list[str], float]], count: int) -> Iterator[tuple[int, list[str], float]]:
    start = shown = time.monotonic()
    terminal = sys.stderr.isatty()
    for number, result in enumerate(results, 1):
        now = time.monotonic()
        if now - shown > (0.2 if terminal else 20) or (terminal and number == count):
            shown = now
            print(
                f"{number} of {count} cases, {now - start:.0f} s",
                end="\r" if terminal and number < count else "\n",
                file=sys.stderr,
                flush=True,
            )
        yield result


# -- the baseline ------------------------------------------------------------------------------------------------------


def python_version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def read_baseline() -> dict[str, Any]:
    if not BASELINE.exists():
        return {"why": "", "python": python_version(), "targets": list(TARGETS), "cases": {}}
    read: dict[str, Any] = json.loads(BASELINE.read_text(encoding="utf-8"))
    return read


def write_baseline(cases: dict[str, str], why: str) -> None:
    """All cases, a line for each."""
    head = {"why": why, "python": python_version(), "targets": TARGETS}
    said = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in head.items())
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(cases.items()))
    BASELINE.write_text(f'{{\n{said}"cases": {{\n{rows}\n}}\n}}\n', encoding="utf-8")


class Difference(NamedTuple):
    name: str
    target: str
    what: str


def differences(lines: dict[str, list[str]], baseline: dict[str, Any]) -> list[Difference]:
    """What is not as it was."""
    known: dict[str, str] = baseline["cases"]
    compared = PARTS if baseline["python"] == python_version() else PARTS[:2]
    found: list[Difference] = []
    for name, now in lines.items():
        if name not in known:
            found.append(Difference(name, "", "is new"))
            continue
        before = dict(zip(baseline["targets"], known[name].split(" "), strict=True))
        for target, line in zip(TARGETS, now, strict=True):
            what = _changed(before.get(target, "-"), line, compared) if line else ""
            if what:
                found.append(Difference(name, target, what))
    return found


def _changed(before: str, now: str, compared: tuple[str, ...]) -> str:
    if before == now:
        return ""
    old, new = before.split("."), now.split(".")
    if len(old) != len(PARTS) or len(new) != len(PARTS):
        return f"was {_said(before)}, is {_said(now)}"
    parts = [part for part, a, b in zip(PARTS, old, new, strict=True) if a != b and part in compared]
    return f"{' and '.join(parts)} changed" if parts else ""


def _said(line: str) -> str:
    return "not compiled" if line == "-" else "compiled" if line.count(".") == 2 else line


# -- commands ----------------------------------------------------------------------------------------------------------


def show_diff(commit: str, changed: list[Difference]) -> None:
    """Compile what differs at another commit too, and show how the texts differ."""
    names = list(dict.fromkeys(d.name for d in changed if d.target))[: 4 * DIFFED]
    targets = tuple(dict.fromkeys(d.target for d in changed if d.name in names and d.target))
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        folder = Path(temporary)
        tree, chosen = folder / "tree", folder / "names"
        chosen.write_text("\n".join(names), encoding="utf-8")
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            if not (tree / "tools" / "replay.py").exists():
                (tree / "tools").mkdir(exist_ok=True)
                for name in ("replay.py", "replay_cases.py"):
                    (tree / "tools" / name).write_bytes((ROOT / "tools" / name).read_bytes())
            for place, label in ((tree, "before"), (ROOT, "now")):
                command: list[str | Path] = [
                    sys.executable,
                    place / "tools" / "replay.py",
                    "--names",
                    chosen,
                    "--dump",
                    folder / label,
                ]
                for target in targets:
                    command += ["--target", target]
                subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=False)
        shown = 0
        for one in changed:
            file = dumped_name(one.name, one.target)
            sides = [folder / label / file for label in ("before", "now")]
            if not one.target or not all(side.exists() for side in sides):
                continue
            old, new = (side.read_text(encoding="utf-8").splitlines() for side in sides)
            text = list(difflib.unified_diff(old, new, f"{commit} {file}", f"now {file}", lineterm="", n=4))
            if not text:
                continue
            print("\n".join([*text[:80], *([f"… {len(text) - 80} more lines"] if len(text) > 80 else [])]))
            shown += 1
            if shown == DIFFED:
                return
        if not shown:
            print(f"the texts at {commit} are those of the working tree: the baseline is of another commit")


_EPILOG = """
examples:
  python tools/replay.py --quick              is anything different? some cases of every family, half a minute
  python tools/replay.py                      all cases; before every commit of a refactoring
  python tools/replay.py --only 'matrix/*'    cases by name, with * and ?; without them, names that contain the text
  python tools/replay.py --target sm_90a      one target; may be given several times
  python tools/replay.py --diff HEAD          what differs, as unified diffs between HEAD and the working tree
  python tools/replay.py --dump /tmp/now      the normalised texts, one file for each case and target
  python tools/replay.py --record --why "tiles of 64 rows where there are few"
                                              the code was meant to change: make what there is now the baseline

a line reads: case, target, and what changed of it: code, launch, host (see the top of this file), or that it was
compiled and is refused now.
new cases, and ones that are gone, count as differences: record them.
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    about = "Compile many kernels for many targets and compare the generated code with the baseline. Nothing is run."
    parser = argparse.ArgumentParser(
        "replay.py", description=about, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="cases whose name fits; may be repeated"
    )
    parser.add_argument("--names", type=Path, metavar="FILE", help="cases whose names a file lists, one on each line")
    parser.add_argument("--target", action="append", default=[], choices=TARGETS, help="these targets only")
    parser.add_argument("--quick", action="store_true", help="a few cases of every family")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument(
        "--record", action="store_true", help="write the baseline, or with --only the lines of these cases; needs --why"
    )
    parser.add_argument("--why", default="", metavar="REASON", help="why the code changed; kept in the baseline")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write the normalised texts to files")
    parser.add_argument("--diff", metavar="COMMIT", help="show how the texts differ from those at COMMIT")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="show the N cases that took longest")
    parser.add_argument("--list", action="store_true", help="show the names of the cases and stop")
    options = parser.parse_args(arguments)
    if options.record and (not options.why or options.target):
        parser.error("--record needs --why REASON, and takes all targets")
    return options


def chosen(cases: list[Case], options: argparse.Namespace) -> list[Case]:
    if options.quick:
        from tools.replay_cases import quick

        cases = quick(cases)
    if options.names:
        names = set(options.names.read_text(encoding="utf-8").splitlines())
        cases = [case for case in cases if case.name in names]
    if options.only:
        patterns = [p if set(p) & set("*?[") else f"*{p}*" for p in options.only]
        cases = [case for case in cases if any(fnmatch.fnmatchcase(case.name, p) for p in patterns)]
    return cases


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    pin()
    from tools.replay_cases import all_cases

    start = time.monotonic()
    everything = all_cases()
    cases = chosen(everything, options)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    targets = tuple(options.target) or TARGETS
    lines = run(cases, targets, options.jobs, options.dump, options.slowest)
    bugs = [(name, line) for name, found in lines.items() for line in found if line.startswith("bug:")]
    baseline = read_baseline()
    if options.record:
        found = {name: " ".join(line) for name, line in lines.items()}
        write_baseline(found if len(cases) == len(everything) else baseline["cases"] | found, options.why)
        print(f"recorded {len(lines)} cases in {time.monotonic() - start:.0f} s; {len(bugs)} result(s) are bugs")
        return 0
    changed = differences(lines, baseline)
    gone = set(baseline["cases"]) - {case.name for case in everything}
    if not (options.only or options.names or options.quick):
        changed += [Difference(name, "", "is gone") for name in sorted(gone)]
    for one in changed[:SHOWN]:
        print(f"{one.name}  {one.target}  {one.what}")
    if len(changed) > SHOWN:
        print(f"… and {len(changed) - SHOWN} more")
    if baseline["python"] != python_version():
        print(
            f"host parts are not compared: the baseline is of Python {baseline['python']}, this is {python_version()}"
        )
    results = sum(line not in ("", "-") for found in lines.values() for line in found)
    seconds = time.monotonic() - start
    verdict = f"{len(changed)} DIFFERENCE(S)" if changed else "all as in the baseline"
    print(f"{verdict}: {len(cases)} cases, {results} results, {seconds:.0f} s; baseline: {baseline['why']}")
    if changed and options.diff:
        show_diff(options.diff, changed)
    return 1 if changed else 0


if __name__ == "__main__":
    # The cases import this module: it is one and the same.
    sys.modules["tools.replay"] = sys.modules["__main__"]
    sys.exit(main())
