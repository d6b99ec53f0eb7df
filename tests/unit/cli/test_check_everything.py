"""`tilewright check` and `fmt` on files of beginners: every wrong line is reported, and what is right is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.cli.main import cli


def run(tmp_path: Path, text: str, name: str = "f.zyn", command: str = "check", *options: str) -> tuple[int, str]:
    path = tmp_path / name
    path.write_text(text)
    result = CliRunner().invoke(cli, [command, str(path), *options])
    return result.exit_code, result.output


def lines_of(text: str, mark: str = "# wrong") -> set[int]:
    return {number for number, line in enumerate(text.splitlines(), 1) if mark in line}


def reported(output: str, severity: str = "error") -> set[int]:
    return {int(line.split(":")[1]) for line in output.splitlines() if f"{severity}[TW" in line and line.count(":") > 3}


PYTHON = """import numpy as np
import tilewright as tw


@tw.kernel
def first(x: tw.Array) -> tw.Array:
    out = tw.empty_like(x)
    for i in tw.grid(len(x)):
        out[i] = tw.foo(x[i])  # wrong
        out[i] = x[i] + nope  # wrong
        import os  # wrong
        out[i] = np.fft(x[i])  # wrong
        out[i] = out[i] + lost  # wrong
    for row in x:  # wrong
        out[0] = bar(row)  # wrong
    if missing > 3:  # wrong
        out[0] = gone  # wrong
    return out


@tw.kernel
def second(x: tw.Array) -> tw.Array:
    out = tw.empty_like(x)
    acc = []  # wrong
    for i in range(len(x)):
        acc.append(x[i])  # wrong
        out[i] = x[i] + 'text'  # wrong
        y = tw.baz(x[i])  # wrong
        out[i] = y * 2
    return out


@tw.kernel
def third(x: tw.Array) -> tw.Array:
    with open("f") as f:  # wrong
        y = 3
    z = x * y
    return x + unknown_name  # wrong


@tw.gpu
def explicit(x, y):
    i = tw.gpu_thread_id()
    y[i] = tw.sqroot(x[i])  # wrong
    y[i] = wht * 2  # wrong


@tw.cpu
def on_cpu(x, y):
    y[0] = tw.foo(x[0])  # wrong
"""


def test_every_wrong_line_of_a_python_file_is_reported(tmp_path: Path) -> None:
    code, output = run(tmp_path, PYTHON, "k.py")
    assert code == 1
    assert reported(output) == lines_of(PYTHON)
    assert "could not be read" not in output
    assert "did you mean 'sqrt'?" in output


def test_a_right_file_with_explicit_kernels_names_them(tmp_path: Path) -> None:
    text = "import tilewright as tw\nW = 3\n@tw.gpu\ndef k(x):\n    i = tw.gpu_thread_id()\n    if i < len(x): x[i] = helper(x[i]) * W\ndef helper(v):\n    return abs(v)\n"
    assert run(tmp_path, text, "k.py") == (0, f"{tmp_path / 'k.py'}: ok (k)\n")


ZYN = """let a = compute(x) {
    for i in 0..n:
        out[i] = foo(x[i])  # wrong
        let z = bar(x[i])  # wrong
}
let b = compute(x) {
    for i in 0..n: out[i] = baz(x[i])  # wrong
}
let c = concate([a, b])  # wrong
let d = compute(x) {
    "a text"  # wrong
    for i in 0..n: out[i] = x[i]
}
let e = reshape(x)  # wrong
let f = sort(x)  # wrong
"""


def test_every_wrong_line_of_a_program_is_reported(tmp_path: Path) -> None:
    code, output = run(tmp_path, ZYN)
    assert code == 1
    assert reported(output) == lines_of(ZYN)
    assert "use a block with @kernel sort" in output


RECORDS = {
    "typed": "pipeline classify(x, model: record):\n    return x * model.layers[0].weight\n\nlet y = classify(x, model)\n",
    "by name": "pipeline classify(x, model: record):\n    return x * model.layers[0].weight\n\nlet y = classify(model=net, x=x)\n",
    "untyped": "fn classify(x, model):\n    return x * model.layers[0].weight\n\nlet y = classify(x, model)\n",
    "handed on": "fn inner(m):\n    return m.layers[0].weight\n\nfn outer(x, model):\n    return x * inner(model)\n\nlet y = outer(x, net)\n",
    "not called": "pipeline classify(x, model: record):\n    return x * model.layers[0].weight\n",
    "a list": "pipeline classify(x, weights: list):\n    return x * weights[0]\n\nlet y = classify(x, weights)\n",
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_known_by_type_and_use(tmp_path: Path, name: str) -> None:
    code, output = run(tmp_path, RECORDS[name])
    assert (code, "error" in output) == (0, False), output


def test_an_input_that_looks_like_a_slip_is_warned_of(tmp_path: Path) -> None:
    text = "let total = reduce(+, x)\nlet mean = totl / 3\n"
    code, output = run(tmp_path, text)
    assert code == 0
    assert reported(output, "warning") == {2}
    assert "did you mean 'total'?" in output
    assert "warning" not in run(tmp_path, text, "f.zyn", "check", "--args", "totl=float x=f32[*]")[1]
    inside = "let scale = 2\nlet y = compute(x) { for i in 0..n: out[i] = x[i] * scael }\n"
    assert "did you mean 'scale'?" in run(tmp_path, inside)[1]


@pytest.mark.parametrize("names", ["w1 w2", "scores score", "query_weight key_weight", "x xs"])
def test_names_of_other_things_are_not(tmp_path: Path, names: str) -> None:
    defined, free = names.split()
    assert "warning" not in run(tmp_path, f"let {defined} = x0 * 2\nlet y = {defined} + {free}\n")[1]


def test_fmt_replaces_tabs(tmp_path: Path) -> None:
    text = 'let y = compute(x) {\n\tfor i in 0..n:\n\t\tout[i] = x[i]\t# c\n    \tlet z = 3\n}\nprint("a\tb")\n'
    code, output = run(tmp_path, "fn f(x):\n\tif x > 0:\n\t\treturn x\n\treturn -x\n", "f.zyn", "fmt")
    assert code == 0, output
    assert (tmp_path / "f.zyn").read_text() == "fn f(x):\n    if x > 0:\n        return x\n    return -x\n"
    code, output = run(tmp_path, text.replace("    \tlet z = 3\n", ""), "g.zyn", "fmt")
    assert (tmp_path / "g.zyn").read_text() == 'let y = compute(x) {\n    for i in 0..n:\n        out[i] = x[i]  # c\n}\nprint("a\tb")\n'


def test_a_missing_input_is_asked_for_as_commands_take_it(tmp_path: Path) -> None:
    code, output = run(tmp_path, "let y = x * 2\n", "f.zyn", "run")
    assert code == 1
    assert "give --in x=…" in output


def test_precision_of_the_command_line_holds(tmp_path: Path) -> None:
    text = 'import tilewright as tw\n@tw.kernel(precision="tf32")\ndef mm(a: tw.Array, b: tw.Array) -> tw.Array:\n    return a @ b\n'
    shapes = ("--args", "a=f32[256,256] b=f32[256,256]", "--target", "sm_90a")
    assert "family=fma" not in run(tmp_path, text, "k.py", "inspect", *shapes)[1]
    assert "family=fma" in run(tmp_path, text, "k.py", "inspect", *shapes, "--precision", "ieee")[1]
