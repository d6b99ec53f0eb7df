"""The documents are true: their code runs (that of the tutorial and the how-to pages in `test_pages.py`), their commands exist, their messages and listings are what the compiler says.

Conventions in the documents. ```python blocks of one document run in order as one file, with the document's line numbers, and
`print(…)  # text` must print that text. ```zyn blocks run in the emulator on random inputs; `zyn parse-only` blocks parse and are refused
with TW005. ```sh lines that call `tilewright` or `make` must parse. In `errors.md` a python block is followed by the message it gives.
In ARCHITECTURE.md `text stage=…` blocks are lines of that stage, in order, with `…` for what is left out.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from bench import overview

import tilewright as tw
from tilewright.base.errors import CODES
from tilewright.base.target import parse_target
from tilewright.cli.commands.compile import stage_text
from tilewright.cli.commands.run import emulate
from tilewright.cli.guess import parse_arguments
from tilewright.cli.main import cli
from tilewright.cli.sources import Entry, File, choose, read_source, walk
from tilewright.zyn.host import functions as host_functions

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


@dataclass(frozen=True)
class Fence:
    """A fenced block: what stands after the backticks, its text, the number of its first line."""

    info: str
    text: str
    line: int


def fences(name: str) -> Iterator[Fence]:
    text = (ROOT / name).read_text(encoding="utf-8")
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Fence(match[1], match[2], text.count("\n", 0, match.start()) + 2)


def of_kind(info: str) -> list[tuple[str, Fence]]:
    return [(name, fence) for name in NAMES for fence in fences(name) if fence.info == info]


def label(value: object) -> str:
    return f"line {value.line}" if isinstance(value, Fence) else str(value)


# -- python ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "README.md", "docs/add-a-backend.md", "docs/add-a-model.md", "docs/critical-path.md", "docs/decode.md", "docs/emulator.md", "docs/explicit-kernels.md", "docs/explicit-kernels-instructions.md",
        "docs/graphs.md", "docs/images.md", "docs/language.md", "docs/megakernels.md", "docs/model-files.md", "docs/models.md", "docs/onnx.md", "docs/parallel-loops.md", "docs/python.md", "docs/quantised.md", "docs/runtime-streams.md", "docs/simd.md", "docs/trading.md", "docs/write-a-pass.md",
        "docs/zynml.md",
    ],
)  # fmt: skip
def test_python_blocks_run_and_print_what_they_say(name: str, tmp_path: Path) -> None:
    lines: list[str] = []
    expected: list[str] = []
    for fence in fences(name):
        if fence.info == "python":
            lines += [""] * (fence.line - 1 - len(lines))
            lines += fence.text.splitlines()
            expected += re.findall(r"^print\(.*\)  # (.+)$", fence.text, re.MULTILINE)
    for folder in ("examples", "bench"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    script = tmp_path / f"{Path(name).stem}_md.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert expected
    assert done.stdout.splitlines() == expected


def test_the_c_program_of_critical_functions_runs(tmp_path: Path) -> None:
    """From the Python function of the page to a process without Python, by the command that the page gives."""
    text = (ROOT / "docs/critical-path.md").read_text(encoding="utf-8")
    script = "\n".join(fence.text for fence in fences("docs/critical-path.md") if fence.info == "python")
    (tmp_path / "page.py").write_text(script, encoding="utf-8")
    done = subprocess.run([sys.executable, "page.py"], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (program,) = [fence.text for fence in fences("docs/critical-path.md") if fence.info == "c"]
    (tmp_path / "program.c").write_text(program, encoding="utf-8")
    command, printed = re.findall(r"compiled with `(cc [^`]*)` and prints `([^`]*)`", text)[0]
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    subprocess.run([*shlex.split(command), "-Wall", "-Werror"], cwd=tmp_path, check=True)
    assert subprocess.run([str(tmp_path / "program")], capture_output=True, text=True, check=True).stdout.strip() == printed


# -- ZynML ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fence"), of_kind("zyn"), ids=label)
def test_zyn_blocks_run(name: str, fence: Fence, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "block.zyn"
    path.write_text(fence.text, encoding="utf-8")
    tw.load(path)
    emulate(str(path), None, (), (), "thread", "")
    assert "OK: no fault" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "fence"), of_kind("zyn parse-only"), ids=label)
def test_what_is_said_not_to_run_parses_and_is_refused(name: str, fence: Fence, tmp_path: Path) -> None:
    path = tmp_path / "block.zyn"
    path.write_text(fence.text, encoding="utf-8")
    assert "TW005" in {error.code for error in walk(read_source(str(path)), {}).errors}


def test_the_reference_has_every_function_around_kernels() -> None:
    text = (ROOT / "docs/language.md").read_text(encoding="utf-8")
    part = text[text.index("## The program around kernels") : text.index("## Futures")]
    assert [name for name in host_functions.FUNCTIONS if f"`{name}(" not in part] == []
    assert [name for name in host_functions.METHODS if f".{name}(" not in part] == []


# -- commands -------------------------------------------------------------------------------------------------------


COMMANDS = [(name, line) for name, fence in of_kind("sh") for line in fence.text.splitlines() if line.strip()]


@pytest.mark.parametrize(("name", "line"), COMMANDS)
def test_commands_exist(name: str, line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words if "=" not in word} <= set(targets)
    elif program == "tilewright":
        command = cli.commands[words[0]]
        command.make_context(words[0], words[1:])  # raises for an option or choice that does not exist
        for word in words[1:]:
            if word.startswith("examples/"):
                assert (ROOT / word).exists(), word
    elif program == "pip":
        assert words[0] == "install" and "tilewright" in words
    else:
        assert program == "python"


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for name, command in cli.commands.items():
        assert f"tilewright {name}" in text, name
        for option in command.params:
            if isinstance(option, click.Option) and name == "compile":
                assert any(spelling in text or spelling == "--output" for spelling in option.opts), option.opts


# -- errors ---------------------------------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    parts = re.split(r"^## ", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.split("\n", 1)[0]: part for part in parts}


def test_every_code_has_its_section() -> None:
    assert list(sections()) == [f"{code} {title}" for code, title in CODES.items()]


_RUN_EXAMPLES = """
import json, runpy, sys
from tilewright.base.errors import TilewrightError
messages = []
for path in sys.argv[1:]:
    try:
        runpy.run_path(path)
        messages.append("")
    except TilewrightError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


def test_errors_say_what_the_index_says(tmp_path: Path) -> None:
    found = list(fences("docs/errors.md"))
    pairs = [(a, b) for a, b in itertools.pairwise(found) if a.info == "python"]
    forms = [fence for fence in found if fence.info == "text form"]
    assert len(pairs) + len(forms) == len(CODES)
    paths: list[str] = []
    for number, (example, _) in enumerate(pairs):
        place = tmp_path / str(number) / "example.py"
        place.parent.mkdir()
        place.write_text(example.text, encoding="utf-8")
        paths.append(str(place))
    command = [sys.executable, "-c", _RUN_EXAMPLES, *paths]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=True)
    for (example, message), path, got in zip(pairs, paths, json.loads(done.stdout), strict=True):
        assert got.replace(path, "example.py") == message.text.rstrip("\n"), f"docs/errors.md:{example.line}"


def test_the_error_of_the_readme_is_one_of_the_index() -> None:
    (shown,) = [fence.text.strip() for fence in fences("README.md") if fence.info == "text"]
    assert shown in (ROOT / "docs/errors.md").read_text(encoding="utf-8")


# -- architecture ---------------------------------------------------------------------------------------------------

TOUR = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
SCALE = "m=f32[*,1024] v=f32[1024]"


def scale_entry() -> Entry:
    file = read_source(str(ROOT / "examples/gallery.py"))
    known = parse_arguments(SCALE)
    functions = tuple(f for f in file.kernels if f.name == "scale")
    entries = walk(File(file.path, functions), known).raise_if_errors().entries
    (entry,) = choose(entries, "scale", file.path)
    return entry


def test_every_package_is_named_in_order() -> None:
    packages = {p.parent.name for p in (ROOT / "src/tilewright").glob("*/__init__.py")}
    named = re.findall(r"^\| `(\w+)` \|", TOUR.split("## Front ends")[0], re.MULTILINE)
    assert set(named) == packages
    assert len(named) == len(packages)


STAGES = [fence for fence in fences("ARCHITECTURE.md") if fence.info.startswith("text stage=")]


@pytest.mark.parametrize("fence", STAGES, ids=lambda fence: fence.info)
def test_listings_are_what_the_compiler_prints(fence: Fence) -> None:
    settings = dict(word.split("=") for word in fence.info.split()[1:])
    real = stage_text(scale_entry(), parse_target(settings.get("target", "sm_90a")), settings["stage"]).splitlines()

    def plain(line: str) -> str:
        """Registers are numbered anew by every change, and blocks indented anew; what matters is the operation."""
        return re.sub(r"%(r|rd|p)?\d+", r"%\1_", line).strip()

    rest = iter(map(plain, real))
    for line in fence.text.splitlines():
        if line != "…":
            assert plain(line) in rest, f"ARCHITECTURE.md, listing at line {fence.line}: not printed any more: {line}"


def test_the_kernel_of_the_tour_is_the_one_of_the_gallery() -> None:
    (example,) = [fence.text for fence in fences("ARCHITECTURE.md") if fence.info == "python"]
    assert example in (ROOT / "examples/gallery.py").read_text(encoding="utf-8")


# -- all documents --------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*\]\([^`\n]*`", "", text)  # code such as `kernel[grid](x)`
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        place, _, anchor = link.partition("#")
        target = (ROOT / name).parent / place if place else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_index_lists_every_document() -> None:
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").rglob("*.md"):
        assert path.name == "index.md" or f"({path.relative_to(ROOT / 'docs').as_posix()})" in text, path.name


def test_the_readme_is_short_and_its_figures_are_those_kept() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    shown = re.findall(r"<!-- figures -->.*?(^\|.*?)<!-- /figures -->", text, re.DOTALL | re.MULTILINE)
    assert shown == ["\n".join(overview.table()) + "\n"]
    assert overview.PICTURE.exists()
