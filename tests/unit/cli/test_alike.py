"""Blocks that no check can tell apart are checked once, and `tilewright check` says of each what it would say of it alone."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.cli import sources
from tilewright.cli.alike import form_of
from tilewright.cli.guess import parse_arguments
from tilewright.cli.main import cli
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.syntax import Function

ROOT = Path(__file__).parents[3]


def kernels(text: str, args: str = "") -> list[Function]:
    return [entry.function for entry in sources.walk(sources.parse_source(text, "kernel.zyn"), parse_arguments(args)).entries]


def form(body: str, given: str = "x", kind: str = "custom", args: str = "") -> Hashable | None:
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    (function,) = kernels(f"let r = compute({given}) {{\n    @kernel {kind}\n{lines}\n}}\n", args)
    return form_of(function)


LOOP = "for i in 0..n:\n"


def test_names_of_parameters_and_numbers_in_values_make_no_difference() -> None:
    body = LOOP + "    let t = {x}[i] * {0} + 1.0\n    out[i] = t if t > 0 else exp(t)"
    first = form(body.format("5.0", x="x"))
    assert first is not None and first == form(body.format("99.0", x="other"), "other")


SAME_BUT = {
    "whole numbers and others": ("out[i] = x[i] * 5", "out[i] = x[i] * 5.0"),
    "what is nothing, one or two": ("out[i] = x[i] * 7.0", "out[i] = x[i] * 1.0"),
    "what eight bits hold": ("out[i] = x[i] + 100", "out[i] = x[i] + 200"),
    "what sixteen bits of a float hold": ("out[i] = x[i] + 999", "out[i] = x[i] + 70001"),
    "powers of two": ("out[i] = x[i] * 7", "out[i] = x[i] * 8"),
    "indices": ("out[i] = x[i + 5]", "out[i] = x[i + 7]"),
    "ranges": ("out[i] = 0.0\n    for k in 0..5:\n        out[i] += x[i + k]", "out[i] = 0.0\n    for k in 0..7:\n        out[i] += x[i + k]"),
    "conditions": ("out[i] = x[i] if x[i] > 5 else 3.0", "out[i] = x[i] if x[i] > 7 else 3.0"),
    "statements under a condition": ("if x[i] > 5:\n        out[i] = 5.0", "if x[i] > 5:\n        out[i] = 7.0"),
    "values that are indices": ("let k = i + 5\n    out[i] = x[k]", "let k = i + 7\n    out[i] = x[k]"),
    "values that choose what is read": ("let k = i + 5\n    out[i] = x[i + 1] if k < n else 0.0", "let k = i + 7\n    out[i] = x[i + 1] if k < n else 0.0"),
    "arguments": ("out[i] = max(x[i], 5.0)", "out[i] = max(x[i], 7.0)"),
    "divisors": ("out[i] = x[i] / 5", "out[i] = x[i] / 7"),
    "shape": ("out[i] = x[i] * 5.0 + 7.0", "out[i] = x[i] * 5.0 - 7.0"),
    "other names": ("let t = x[i] * 5.0\n    out[i] = t", "let s = x[i] * 5.0\n    out[i] = s"),
}


@pytest.mark.parametrize("case", SAME_BUT)
def test_what_a_check_may_tell_apart_has_another_form(case: str) -> None:
    first, second = (form(LOOP + "    " + body) for body in SAME_BUT[case])
    assert first is not None and second is not None and first != second


def test_parameters_in_another_order_have_another_form() -> None:
    assert form(LOOP + "    out[i] = a[i] - b[i]", "a, b") != form(LOOP + "    out[i] = b[i] - a[i]", "a, b")
    assert form(LOOP + "    out[i] = a[i] - b[i]", "a, b") == form(LOOP + "    out[i] = b[i] - a[i]", "b, a")


def test_kinds_that_speak_of_names_and_parameters_that_are_words_are_like_nothing() -> None:
    assert form("for i in 0..rows:\n    out[i] = row_sum(x[i, :])", kind="reduce(+, axis=1)") is None
    assert form(LOOP + "    out[i] = exp(exp[i])", "exp") is None
    assert form(LOOP + "    out[i] = _x[i]", "_x") is None


BLOCK = "let {r} = compute({x}) {{\n    @kernel custom\n    for i in 0..n:\n        {body}\n}}\n"
SCAN = """\
let {r} = compute({x}) {{
    @kernel custom
    var total = 0.0
    for i in 0..n {{
        total = total + {x}[i] * {k}.0
        out[i] = total
    }}
    out[n] = total
}}
"""


def blocks(*parts: tuple[str, str, str]) -> str:
    return "".join(BLOCK.format(r=r, x=x, body=body) for r, x, body in parts)


PROGRAMS = {
    "right": (blocks(("a", "x", "out[i] = x[i] * 5.0"), ("b", "z", "out[i] = z[i] * 7.0"), ("c", "x", "out[i] = x[i] * 9.0")), []),
    "one is wrong": (blocks(("a", "x", "out[i] = x[i] * 5.0"), ("b", "z", "out[i] = zz(z[i]) * 7.0"), ("c", "z", "out[i] = z[i] * 9.0")), ["TW002"]),
    "all are wrong alike": (blocks(("a", "x", "out[i] = zz(x[i]) * 5.0"), ("b", "z", "out[i] = zz(z[i]) * 7.0")), ["TW002"] * 2),
    "all are slow alike": (SCAN.format(r="a", x="x", k=5) + SCAN.format(r="b", x="z", k=7), ["TW062"] * 2),
    "results follow": (blocks(("a", "x", "out[i] = x[i] * 5.0"), ("b", "z", "out[i] = z[i] * 7.0"), ("c", "b", "out[i] = b[i] * 9.0")), []),
    "numbers decide": (blocks(("a", "x", "out[i] = x[i] if i < 5 else x[i + 5]"), ("b", "z", "out[i] = z[i] if i < 5 else z[i - 5]")), None),
    "numbers of program": ("let b = x * 5 + z\nlet c = z * 7 + x\nlet d = zz(z) * 9 + x\n", ["TW002"]),
}


def told(path: Path, *words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, ["check", "--verbose", *words, str(path)])
    listed = CliRunner().invoke(cli, ["check", "--json", *words, str(path)])
    return done.exit_code, done.output, json.dumps(json.loads(listed.stdout))


@pytest.mark.parametrize("words", [(), ("--args", "x=f32[64] z=i32[*]"), ("--args", "x=f16[8] z=f64[*]")], ids=["guessed", "f32 and i32", "f16 and f64"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_check_says_the_same_as_of_each_block_alone(name: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "program.zyn"
    text, codes = PROGRAMS[name]
    path.write_text(text, encoding="utf-8")
    shared = told(path, *words)
    if not words and codes is not None:
        assert [said["code"] for said in json.loads(shared[2])] == codes
    monkeypatch.setattr(sources, "form_of", lambda function: None)
    assert shared == told(path, *words)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "zyn").glob("*.zyn")), ids=lambda p: p.stem)
def test_check_says_the_same_of_the_examples(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = told(path)
    monkeypatch.setattr(sources, "form_of", lambda function: None)
    assert shared == told(path)


def test_alike_blocks_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = check_kernel

    def counted(function: Function, *rest: object) -> object:
        checked.append(function.name)
        return check(function, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sources, "check_kernel", counted)
    path = tmp_path / "program.zyn"
    path.write_text("".join(BLOCK.format(r=f"r{k}", x=f"x{k}", body=f"out[i] = x{k}[i] * {2 * k + 9}.0") for k in range(50)), encoding="utf-8")
    status, text, _ = told(path)
    assert status == 0 and all(f"r{k}(x{k}: f32[*])" in text for k in range(50))
    assert checked == ["r0"] * 2  # for people and as a list
