"""`tilewright check` tells the truth: every error of every kernel at once, none that was only assumed, and helps that make sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.cli.language_facts import analyse
from tilewright.cli.main import cli

HEAD = "import math\nimport numpy as np\nimport tilewright as tw\n"

RIGHT = {
    "integers from use": "@tw.kernel\ndef f(x, lengths):\n    out = tw.zeros((x.shape[0],), x.dtype)\n    for b in tw.grid(x.shape[0]):\n        for t in range(lengths[b]):\n            out[b] += x[b, t]\n    return out\n",
    "a default": "@tw.kernel\ndef f(x, slope: float = 0.1):\n    return x * slope\n",
    "rank by a copy": "@tw.kernel\ndef f(x: tw.Array):\n    y = x * 1.0\n    y[1:-1, 1:-1] = y[:-2, 1:-1]\n    return y\n",
    "bits": "@tw.kernel\ndef f(x, y):\n    out = tw.empty_like(x)\n    for i in tw.grid(x.shape[0]):\n        out[i] = x[i] & y[i]\n    return out\n",
    "extents but one": "@tw.kernel\ndef f(w):\n    _, n, _ = w.shape\n    out = tw.empty((n,), w.dtype)\n    for i in tw.grid(n):\n        out[i] = w[0, i, 0]\n    return out\n",
    "a longer array": "@tw.kernel\ndef f(w, n: int):\n    out = tw.empty((n,), w.dtype)\n    for i in tw.grid(n):\n        out[i] = w[i + 1] - w[i]\n    return out\n",
    "in a closure": "def make(k, bias):\n    shift = bias * 2\n    @tw.kernel\n    def f(x):\n        return x * k + shift\n    return f\n",
    "explicit, indices": "@tw.gpu\ndef f(x, places, out):\n    i = tw.gpu_thread_id()\n    out[i] = tw.sqrt(x[places[i]])\n",
    "explicit, rows": "@tw.gpu\ndef f(x, out):\n    out[tw.thread.y][tw.thread.x] = x[tw.thread.x, tw.thread.y]\n",
    "explicit, constants": "S, P = 4, 2\nN = S * P\n@tw.gpu\ndef f(x):\n    a = tw.shared((N,), tw.f32)\n    a[tw.thread.x] = x[tw.thread.x] * math.pi\n    tw.gpu_sync()\n    x[tw.thread.x] = a[N - 1 - tw.thread.x]\n",
    "explicit, what is not known here": "import somewhere\nT = somewhere.table()\n@tw.gpu\ndef f(x):\n    x[0] = T.first + 'a'\n",
    "explicit, in a closure": "def make(k):\n    @tw.gpu\n    def f(x):\n        x[0] = x[1] * k\n    return f\n",
    "explicit, helpers": "def twice(v):\n    return v * 2\n@tw.cpu\ndef f(x):\n    x[0] = twice(x[1])\n",
}


def check(tmp_path: Path, text: str, name: str = "k.py", *options: str) -> tuple[int, str]:
    path = tmp_path / name
    path.write_text(HEAD + text if name.endswith(".py") else text)
    result = CliRunner().invoke(cli, ["check", str(path), *options])
    return result.exit_code, result.output


def lines(text: str) -> set[int]:
    return {number for number, line in enumerate((HEAD + text).splitlines(), 1) if "# wrong" in line}


def reported(output: str) -> set[int]:
    return {int(line.split(":")[1]) for line in output.splitlines() if "error[TW" in line}


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_are_right(tmp_path: Path, name: str) -> None:
    code, output = check(tmp_path, RIGHT[name])
    assert (code, "error" in output) == (0, False), output


WRONG = {
    "explicit": "@tw.gpu\ndef f(x, out):\n    i = tw.thread.x\n    out[i] = tw.isinff(x[i])  # wrong\n    out[i] = nobody  # wrong\n    out[i] = x[i] + 'a'  # wrong\n    out[i] = x[i].zork  # wrong\n    with x:  # wrong\n        pass\n",
    "serial": "@tw.cpu\ndef f(x, out):\n    for i in range(10):\n        out[i] = tw.qqq(x[i])  # wrong\n        out[i] = x[i] + 'a'  # wrong\n",
    "both kinds": "@tw.kernel\ndef f(x):\n    return x + unknown  # wrong\n@tw.gpu\ndef g(x):\n    x[0] = x[0] + 'a'  # wrong\n",
    "a closure": "def make(k):\n    @tw.kernel\n    def f(x):\n        y = x * k\n        return x + nobody  # wrong\n    return f\n",
    "a helper": "def bad(v):\n    return v + 'a'  # wrong\n@tw.gpu\ndef g(x):\n    x[0] = bad(x[1])\n",
    "an annotation": "@tw.gpu\ndef g(x: 'nothing[3]'):  # wrong\n    x[0] = 1\n",
    "ranks that no array has": "@tw.kernel\ndef f(x: tw.Array):\n    rows, cols = x.shape\n    n, = x.shape  # wrong\n    return x * rows * cols * n\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_line_is_reported_once(tmp_path: Path, name: str) -> None:
    code, output = check(tmp_path, WRONG[name])
    assert code == 1
    assert reported(output) == lines(WRONG[name]), output


@pytest.mark.parametrize("name", WRONG)
def test_the_language_server_says_the_same(tmp_path: Path, name: str) -> None:
    found = analyse(HEAD + WRONG[name], str(tmp_path / "k.py")).diagnostics
    assert {d.span.line for d in found if d.severity == "error"} == lines(WRONG[name])


HELPS = {
    "isinff": "did you mean 'isinf'?", "sqroot": "did you mean 'sqrt'?", "mod": "write a % b", "square": "write x * x", "sort": "tw.gpu_sort",
    "argsort": "tw.gpu_argsort", "arctan2": "use tw.atan2", "foo": "", "zork": "", "zin": "did you mean 'sin'?",
}  # fmt: skip


@pytest.mark.parametrize("name", HELPS)
@pytest.mark.parametrize("mark", ["kernel", "gpu"])
def test_near_names_make_sense(tmp_path: Path, name: str, mark: str) -> None:
    text = f"@tw.{mark}\ndef f(x: tw.Array{', out: tw.Array' if mark == 'gpu' else ''}):\n"
    text += "" if mark == "gpu" else "    out = tw.empty_like(x)\n"
    text += f"    for i in range(len(x)):\n        out[i] = tw.{name}(x[i])\n" + ("" if mark == "gpu" else "    return out\n")
    if mark == "gpu" and name in ("sort", "argsort"):
        pytest.skip("tw.sort is a function outside of kernels, and the error is another")
    _, output = check(tmp_path, text)
    helps = [line for line in output.splitlines() if line.startswith("help:")]
    assert HELPS[name] in output if HELPS[name] else "did you mean" not in "".join(helps)


def test_functions_of_numpy_are_one_error(tmp_path: Path) -> None:
    code, output = check(tmp_path, "@tw.kernel\ndef f(x):\n    out = tw.empty_like(x)\n    for i in tw.grid(len(x)):\n        out[i] = np.sqrt(x[i])\n    return out\n")
    assert (code, output.count("error[")) == (1, 1)
    assert "use tw.sqrt" in output


def test_the_inputs_of_a_program_are_named(tmp_path: Path) -> None:
    code, output = check(tmp_path, "let total = reduce(+, x)\nlet mean = totl / 3\n", "f.zyn")
    assert code == 0
    assert "inputs x: f32[*], totl: float" in output
    assert "did you mean 'total'?" in output
    assert "net: record" in check(tmp_path, "pipeline p(x, model: record):\n    return x * model.w\n\nlet y = p(x, net)\n", "g.zyn")[1]
