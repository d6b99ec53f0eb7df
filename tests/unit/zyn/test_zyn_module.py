"""Loading and running ZynML programs, with a stand-in for the compiler that records what it is asked to run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewright.base.errors import UserError
from tilewright.tree import syntax
from tilewright.tree.show import show
from tilewright.zyn.module import ZynModule, load


class FakeCompiler:
    """Keeps the calls; answers with what it was told to, else with the first argument."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[syntax.Function, dict[str, object], str]] = []

    def __call__(self, function: syntax.Function, arguments: dict[str, object], device: str) -> object:
        assert function.kind == "compute"
        assert [p.name for p in function.params] == list(arguments)
        self.calls.append((function, arguments, device))
        return self.answers.pop(0) if self.answers else next(iter(arguments.values()))


def message(caught: pytest.ExceptionInfo[UserError]) -> list[str]:
    """The lines that are no source excerpt."""
    return [line for line in str(caught.value).split("\n") if " | " not in line and not line.endswith(" |") and not line.startswith("   |")]


SCALED = """
let scaled = compute(matrix, vector) @device("auto") {
    @kernel elementwise
    for i in 0..rows, j in 0..cols:
        out[i, j] = matrix[i, j] * vector[j] + eps
}
"""


def test_a_compute_becomes_a_function() -> None:
    compiler = FakeCompiler("result")
    matrix, vector = np.ones((2, 3)), np.ones(3)
    assert load(SCALED, compiler).run(matrix=matrix, vector=vector, eps=1e-5) == {"scaled": "result"}
    ((function, arguments, device),) = compiler.calls
    assert (function.name, device) == ("scaled", "auto")
    assert arguments == {"matrix": matrix, "vector": vector, "eps": 1e-5}
    assert [a.name for a in function.attributes] == ["device", "kernel"]
    assert show(function.body[0]).startswith("for i in 0..rows, j in 0..cols {")
    assert load(SCALED, compiler).inputs() == ("matrix", "vector", "eps")


def test_results_feed_later_blocks_and_scalars_are_captured() -> None:
    compiler = FakeCompiler("first", "second")
    text = "let n = 2 * 3\nlet a = compute(x) { out = x * n }\nlet b = compute(a) { out = a }"
    assert load(text, compiler).run(x=np.ones(1)) == {"n": 6, "a": "first", "b": "second"}
    assert compiler.calls[0][1]["n"] == 6
    assert compiler.calls[1][1] == {"a": "first"}


def test_inputs_that_are_no_names_get_one() -> None:
    compiler = FakeCompiler()
    text = "let y = compute(x, w.up, w.down[0]) { for i in 0..n: out[i] = x[i] * w.up[i] + w.down[0][i] }"
    load(text, compiler).run(x=1, w={"up": 2, "down": [3]})
    function, arguments, _ = compiler.calls[0]
    assert arguments == {"x": 1, "_0": 2, "_1": 3}
    assert "out[i] = ((x[i] * _0[i]) + _1[i])" in show(function)


def test_pipe_on_scalar_and_array() -> None:
    text = "let norm = compute(x) { @kernel reduce(+) for i in 0..n: yield x[i] } |> sqrt()"
    result = load(text, FakeCompiler(np.float32(9.0))).run(x=np.ones(4))["norm"]
    assert result == 3.0
    assert isinstance(result, np.float32)
    assert load(text, FakeCompiler(np.array(4.0))).run(x=np.ones(4))["norm"] == 2.0
    compiler = FakeCompiler(np.ones(4), "roots")
    assert load(text, compiler).run(x=np.ones(4)) == {"norm": "roots"}
    function, arguments, _ = compiler.calls[1]
    assert show(function) == "@kernel fused\ncompute norm(_0) {\n    out = sqrt(_0)\n}\n"
    assert list(arguments) == ["_0"]


def test_array_arithmetic_is_one_kernel() -> None:
    compiler = FakeCompiler("sum")
    assert load("let s = (x + 1.0) * exp(-x) / k\nlet m = 1", compiler).run(x=np.ones(4), k=2.0) == {"s": "sum", "m": 1}
    function, arguments, _ = compiler.calls[0]
    assert "out = (((x + 1.0) * exp((-x))) / k)" in show(function)
    assert list(arguments) == ["x", "k"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("7 / 2", 3), ("-7 / 2", -4), ("7.0 / 2", 3.5), ("-7 % 4", 1), ("2 ** 10", 1024), ("2 ** -1", 0.5), ("max(1, 2, 3)", 3),
     ("1 if 2 < 3 else 0", 1), ("not (1 < 2 and 3 == 3)", False), ("relu(-2.0) + abs(-1.5)", 1.5), ("clamp(5, 0, 3)", 3),
     ("4 |> sqrt() |> max(3)", 3.0), ("(1, [2, 3])[1]", [2, 3]), ("{a: 4}.a", 4), ("64KB", 65536), ('"t"', "t"), ("6 & 3 | 8", 10)],
)  # fmt: skip
def test_host_values(text: str, value: object) -> None:
    result = load(f"let r = {text}", FakeCompiler()).run()["r"]
    assert result == value
    assert type(result) is type(value)


def test_variables_and_destructuring() -> None:
    text = "var n = 1\nn += 2\nlet (a, b) = (n, n * 2)\nlet a = a + 10"
    assert load(text, FakeCompiler()).run() == {"n": 3, "a": 13, "b": 6}


def test_devices() -> None:
    text = 'let a = compute(x) @device("cuda:0") { out = x }\nlet b = compute(x) { out = x }\nconfig { compute_device: "cpu" }\nlet c = compute(x) { out = x }'
    compiler = FakeCompiler()
    load(text, compiler).run(x=1)
    assert [call[2] for call in compiler.calls] == ["cuda:0", "auto", "cpu"]
    compiler.calls.clear()
    load(text, compiler).run("emulator", x=1)
    assert [call[2] for call in compiler.calls] == ["cuda:0", "emulator", "emulator"]


def test_sizes_are_not_arguments() -> None:
    """`K` is an input of the program, but in the product it is the extent of the loops."""
    text = """
let c = compute(A, B) {
    for i in 0..M, j in 0..N:
        var s = 0.0
        for k in 0..K: s += A[i, k] * B[k, j]
        out[i, j] = s
}"""
    compiler = FakeCompiler()
    load("let q = compute(K) { out = K }" + text, compiler).run(A=np.ones((2, 3)), B=np.ones((3, 4)), K=np.ones(9))
    assert list(compiler.calls[1][1]) == ["A", "B"]


def test_a_given_size_must_agree() -> None:
    text = "let y = compute(x) { for i in 0..n: out[i] = x[i] / n }"
    compiler = FakeCompiler()
    load(text, compiler).run(x=np.ones(4), n=4)
    assert list(compiler.calls[0][1]) == ["x"]
    with pytest.raises(UserError) as caught:
        load(text, compiler).run(x=np.ones(4), n=5)
    assert message(caught) == [
        "<string>:1:34: error[TW004]: 'n' is 5, but axis 0 of 'x' has 4 element(s)", "help: leave out 'n': it is taken from 'x'"
    ]  # fmt: skip


def test_a_loop_count_is_an_argument() -> None:
    compiler = FakeCompiler()
    text = """
let y = compute(x) {
    for i in 0..n:
        var a = x[i]
        for t in 0..steps: a = a * a
        out[i] = a
}"""
    load(text, compiler).run(x=np.ones(4), steps=3)
    assert list(compiler.calls[0][1]) == ["x", "steps"]


def test_missing_inputs_are_listed_at_their_first_use() -> None:
    with pytest.raises(UserError) as caught:
        load(SCALED, FakeCompiler()).run(vector=1)
    assert message(caught) == [
        "<string>:2:22: error[TW008]: missing input 'matrix'", "help: call run(vector=…, matrix=…, eps=…)",
        "<string>:5:48: error[TW008]: missing input 'eps'", "help: call run(vector=…, matrix=…, eps=…)",
    ]  # fmt: skip


def test_unexpected_inputs() -> None:
    with pytest.raises(UserError) as caught:
        load("let y = compute(x) { out = x }", FakeCompiler()).run(x=1, z=2, y=3)
    assert message(caught) == [
        "error[TW008]: unexpected input 'z': it is not used by the program", "help: the program takes x",
        "error[TW008]: unexpected input 'y': it is defined by the program itself", "help: the program takes x",
    ]  # fmt: skip
    with pytest.raises(UserError, match="did you mean 'matrix'"):
        load(SCALED, FakeCompiler()).run(matrx=1, vector=1, eps=1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("let y = sqr(2)", "<string>:1:9: error[TW002]: unknown function 'sqr'"),
        ("let y = 1\ny = 2", "<string>:2:1: error[TW015]: 'y' was declared with let and cannot be assigned"),
        ("y = 2", "<string>:1:1: error[TW015]: 'y' is not declared and cannot be assigned"),
        ("let y = 1 / 0", "<string>:1:9: error[TW016]: this has no value: division by zero"),
        ("let (a, b) = (1, 2, 3)", "<string>:1:1: error[TW016]: 2 name(s) on the left, 3 value(s) on the right"),
        ("let y = [1][3]", "<string>:1:9: error[TW013]: index out of range: list index out of range"),
        ("let y = [1] + 2", "<string>:1:9: error[TW009]: arithmetic with a list"),
        ("config { compute_devise: \"cpu\" }", "<string>:1:26: error[TW011]: unknown setting 'compute_devise'"),
        ("let y = {a: 1}.b", "<string>:1:9: error[TW002]: there is no 'b' in this record"),
    ],
)
def test_other_errors(text: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load(text + "\n", FakeCompiler()).run()
    assert message(caught)[0] == line


def test_load_from_file(tmp_path: Path) -> None:
    path = tmp_path / "a.zyn"
    path.write_text("let y = 1 +")
    with pytest.raises(UserError) as caught:
        load(path, FakeCompiler())
    assert message(caught) == [f"{path}:1:12: error[TW001]: expected an expression, found the end of the line"]
    path.write_text("let y = 1 + 1")
    assert load(str(path), FakeCompiler()).run() == {"y": 2}


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    for name in ("violet.zyn", "nothing"):
        with pytest.raises(UserError) as caught:
            load(name, FakeCompiler())
        assert str(caught.value) == (
            f"error[TW007]: file '{name}' does not exist\nhelp: give the path of a .zyn file, or the text of a program"
        )
    (tmp_path / "b.zyn").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"error\[TW007\]: file '.*b.zyn' is not UTF-8 text"):
        load(tmp_path / "b.zyn", FakeCompiler())
    with pytest.raises(UserError, match=r"error\[TW007\]: file '.*' cannot be read"):
        load(tmp_path, FakeCompiler())


def test_text_on_one_line() -> None:
    assert isinstance(load("let x = 1", FakeCompiler()), ZynModule)
