"""ZynML under rough treatment: mutated example programs, random texts for the parser, and very long files.

TILEWRIGHT_FUZZ_SEED picks other mutants, programs and texts, TILEWRIGHT_HOST_PROGRAMS how many programs of host statements are run, TILEWRIGHT_MUTANTS how many a program has, TILEWRIGHT_MUTANT_RUNS how many of them are executed, and
TILEWRIGHT_FUZZ_SECONDS how many seconds of processor time the parser is fuzzed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from zyn_host_programs import program as host_program
from zyn_host_programs import statement as host_statement

import tilewright as tw
from tilewright.base.errors import UserError
from tilewright.cli.commands.check import check
from tilewright.cli.sources import parse_source, walk
from tilewright.frontend.zyn.format import format_text
from tilewright.frontend.zyn.parse import parse_module

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/zyn").glob("*.zyn"))
SEED = int(os.environ.get("TILEWRIGHT_FUZZ_SEED", "0"))
MUTANTS = int(os.environ.get("TILEWRIGHT_MUTANTS", "100"))
RUNS = os.environ.get("TILEWRIGHT_MUTANT_RUNS", "1")
HOST_PROGRAMS = int(os.environ.get("TILEWRIGHT_HOST_PROGRAMS", "160"))
SETTING = "fn f(a): return a + 1\nfn g(a): return -a\nfn h(a, b = 2): return a ** b\nvar y = 3\nvar z = ones([2, 3])\nvar t = {a: 1, b: [2]}\nvar p = [1, 2.5]\nvar q = 0.5\n"
SECONDS = float(os.environ.get("TILEWRIGHT_FUZZ_SECONDS", "4"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_mutants_are_refused_clearly_or_run_right(path: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("zyn_mutants.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(script), str(path), str(SEED), str(MUTANTS), RUNS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=1200, check=False)
    mutant = (tmp_path / "mutant.zyn").read_text(encoding="utf-8")
    assert done.returncode == 0, f"{done.stderr[-3000:]}\nthe mutant:\n{mutant}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == [], "\n\n".join(found["wrong"][:3])
    assert found["refused"] + found["right"] == MUTANTS
    assert found["refused"] >= 0.4 * MUTANTS


def test_host_programs_end_in_results_or_errors_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers at the edges, strings, lists, records, arrays, functions and loops in any combination."""
    given = {"x": np.ones((2, 3), np.float32), "w": {"a": 1, "b": [np.ones(2, np.float32)]}, "n": 3}
    right, refused = 0, list[str]()
    for number in range(HOST_PROGRAMS):
        choice = random.Random(f"{SEED}-{number}")
        text = host_program(choice) if number % 2 else SETTING + host_statement(choice) + "\n"
        try:
            module = tw.load(text)
            module.run(device="cpu", **{name: given.get(name, 2) for name in module.inputs()})
            right += 1
        except tw.TilewrightError as error:
            refused.append(f"{error}\n{text}")
        except Exception as error:
            raise AssertionError(f"program {SEED}-{number} raised {error!r}:\n{text}") from error
    assert not [text for text in refused if "TW040" in text]
    assert right >= 0.1 * HOST_PROGRAMS and len(refused) >= 0.3 * HOST_PROGRAMS


# -- the parser -----------------------------------------------------------------------------------------------------

PIECES = ["let", "var", "for", "in", "if", "elif", "else", "while", "and", "or", "not", "yield", "return", "await", "true", "false", "inf", "step", "compute", "pipeline", "fn", "config", "import", "as", "shared", "timeout", "kernel", "all", "any", "out", "x", "y", "n", "i", "@", "@kernel", "@tile", "(", ")", "[", "]", "{", "}", ":", ",", ";", ".", "..", "..=", "=", "+=", "==", "!=", "<", "<=", "<<", "|>", "->", "+", "-", "*", "/", "%", "**", "~", "&", "|", "^", "0", "1", "2.5", "1e-6", "64KB", "5ms", "0xff", "0b1", '"s"', "'s'", '"', "'", "//", "#", "\\", "$", "é", "𝄞", "\t", "\x00"]  # fmt: skip
TEXTS = st.lists(st.sampled_from([*PIECES, "\n", "\n    ", "\n        ", " "]), max_size=60).map(" ".join)
SNIPPETS = st.lists(st.sampled_from([line for path in EXAMPLES for line in path.read_text(encoding="utf-8").split("\n")]), max_size=25).map("\n".join)


def survives(text: str) -> None:
    """The text parses, and then its formatted form means the same; or it is refused at a place inside it."""
    try:
        module = parse_module(text, "fuzz.zyn")
    except UserError as error:
        diagnostics = error.diagnostics
    else:
        assert parse_module(format_text(text, "fuzz.zyn"), "fuzz.zyn") == module
        return
    assert diagnostics
    for found in diagnostics:
        twice = " already" in found.message or " is given twice" in found.message
        assert found.code == ("TW010" if twice else "TW001")
        assert 1 <= found.span.line <= text.count("\n") + 1
        assert 1 <= found.span.column <= len(found.span.source.line(found.span.line) if found.span.source else "") + 1
        assert found.message


def test_the_parser_is_never_at_a_loss() -> None:
    end = 0.0
    tried = 0

    @seed(SEED)
    @settings(
        max_examples=1_000_000, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(st.one_of(TEXTS, SNIPPETS, st.text(max_size=80)))
    def attempt(text: str) -> None:
        nonlocal end, tried
        end = end or time.process_time() + SECONDS  # Hypothesis takes its time before the first
        if time.process_time() > end:
            raise KeyboardInterrupt
        tried += 1
        survives(text)

    with contextlib.suppress(KeyboardInterrupt):
        attempt()
    print(f"{tried} texts in {SECONDS:g} s")
    assert tried > SECONDS * 5


@pytest.mark.parametrize("text", ["(" * 5000, "[" * 5000 + "]" * 5000, "-" * 20000 + "1", "let x = " + "1 + " * 20000 + "1\n", "if a:\n" * 300, "a." * 20000 + "b\n"])
def test_deep_texts_do_not_overflow(text: str) -> None:
    survives(text)


@pytest.mark.parametrize("text", ["let y = " + "x + " * 100 + "1\n", "let y = " + "-" * 100 + "x\n", "let y = " + "(" * 60 + "x" + " * 2)" * 60 + "\n"])
def test_what_is_just_not_too_deep_goes_all_the_way(text: str) -> None:
    survives(text)
    walk(parse_source(text, "deep.zyn"), {}).raise_if_errors()


def test_too_deep_an_expression_is_refused_at_its_place() -> None:
    with pytest.raises(UserError) as caught:
        parse_module("let y = " + "x + " * 101 + "1\n", "deep.zyn")
    assert caught.value.diagnostics[0].message == "more than 100 operators or conditions are nested here"
    assert (caught.value.span.line, caught.value.span.column) == (1, 9)


# -- long files -----------------------------------------------------------------------------------------------------

BLOCK = """\
let y{0} = compute(x{1}) {{
    @kernel elementwise
    for i in 0..rows, j in 0..cols:
        let t = x{1}[i, j] * {0}.0 + 1.0
        let u = t if t > 0 else exp(t)
        out[i, j] = u * u
}}
let z{0} = y{0} + 1
fn f{0}(a, b): return a * b + {0}
let w{0} = f{0}(z{0}, y{0})
"""


def test_a_long_file_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.zyn"
    path.write_text("".join(BLOCK.format(number, number % 7) for number in range(1000)), encoding="utf-8")
    assert path.read_text(encoding="utf-8").count("\n") == 10_000
    assert check([str(path)], "", False)
    assert f"{path}: ok" in capsys.readouterr().out
