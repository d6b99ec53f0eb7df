"""Kernels whose text is in no file: strings, the command line, standard input, the prompt, cells that are run again."""

from __future__ import annotations

import code
import importlib
import linecache
import os
import pty
import select
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright.frontend.python import sources

KERNEL = """\
import numpy as np
import tilewright as tw

@tw.kernel
def scale(v: tw.Array, k: float = 2.0) -> tw.Array:
    (n,) = v.shape
    out = tw.empty(n, v.dtype)
    # a comment, and a line that is open
    for i in tw.grid(
        n
    ):
        out[i] = v[i] * k
    return out
"""
PROGRAM = KERNEL + """
def square(x):
    return x * x

@tw.cpu
def fill(out: tw.Array, n: int):
    for i in range(n):
        out[i] = 3.0

o = np.zeros(3, np.float32)
fill(o, 3)
print(scale(np.arange(3, dtype=np.float32), device="cpu").tolist(), tw.map(o, lambda x: square(x) + 1, device="cpu").tolist())
for i in tw.prange(3):
    o[i] = i * 2.0
print(o.tolist())
"""
PRINTED = "[0.0, 2.0, 4.0] [10.0, 10.0, 10.0]\n[0.0, 2.0, 4.0]\n"
X = np.arange(3, dtype=np.float32)


def _python(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_a_file_on_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    path.write_text(PROGRAM)
    with path.open() as file:
        done = _python("-", stdin=file)
    assert (done.stdout, done.stderr) == (PRINTED, "")


def test_a_pipe_is_refused() -> None:
    done = _python("-", input=KERNEL + "scale(np.zeros(3))\n")
    assert done.returncode == 1
    assert "the source of 'scale' is not available: <stdin> keeps none" in done.stderr
    assert "python - < file" in done.stderr


def test_the_command_line() -> None:
    done = _python("-c", PROGRAM)
    assert (done.stdout, done.stderr) == (PRINTED, "")


def test_prompt_with_a_file_as_input(tmp_path: Path) -> None:
    path = tmp_path / "typed.txt"
    path.write_text(KERNEL + "\nscale(np.ones(2, np.float32), 3.0).tolist()\n")
    with path.open() as file:
        done = _python("-i", "-q", stdin=file)
    assert "[3.0, 3.0]" in done.stdout, done.stderr


def test_prompt_with_history() -> None:
    pytest.importorskip("readline")
    lines = KERNEL.splitlines()
    changed = [line.replace("v[i] * k", "v[i] + k") for line in lines[3:]]
    typed = [*lines, "", "scale(np.ones(2, np.float32), 3.0).tolist()", *changed, "", "scale(np.ones(2, np.float32), 4.0).tolist()", "exit()"]
    main, child = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PYTHON_BASIC_REPL": "1", "PYTHONSTARTUP": "", "INPUTRC": "/dev/null"}
    process = subprocess.Popen([sys.executable, "-q"], stdin=child, stdout=child, stderr=child, env=environment, close_fds=True)
    os.close(child)
    shown = ""
    deadline = time.monotonic() + 120

    def until_prompt() -> None:
        nonlocal shown
        start = len(shown)
        while not shown[start:].rstrip(" ").endswith((">>>", "...")) and time.monotonic() < deadline:
            if select.select([main], [], [], 1.0)[0]:
                try:
                    shown += os.read(main, 4096).decode(errors="replace")
                except OSError:
                    return
            elif process.poll() is not None:
                return

    try:
        until_prompt()
        for line in typed:
            os.write(main, (line + "\n").encode())
            until_prompt()
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert "[3.0, 3.0]" in shown, shown
    assert "[5.0, 5.0]" in shown, shown


def test_strings_given_to_exec() -> None:
    names: dict[str, object] = {}
    text = KERNEL
    exec(text, names)
    other = KERNEL.replace("v[i] * k", "v[i] - k")
    second: dict[str, object] = {}
    exec(other, second)
    del text, other
    first_kernel, second_kernel = names["scale"], second["scale"]
    assert isinstance(first_kernel, tw.Kernel) and isinstance(second_kernel, tw.Kernel)
    for device in ("cpu", "emulator"):
        np.testing.assert_array_equal(first_kernel(X, device=device), X * 2)
        np.testing.assert_array_equal(second_kernel(X, device=device), X - 2)


def test_strings_that_differ_in_annotations_only() -> None:
    for kind, dtype in (("f32", np.float32), ("f64", np.float64)):
        text = f"import tilewright as tw\nfrom typing import Annotated\n@tw.kernel\ndef twice(v: Annotated[tw.Array, '{kind}[n]']):\n    return v * 2\n"
        names: dict[str, object] = {}
        exec(text, names)
        kernel = names["twice"]
        assert isinstance(kernel, tw.Kernel)
        np.testing.assert_array_equal(kernel(X.astype(dtype), device="cpu"), X * 2)
        with pytest.raises(tw.UserError, match=f"'v' must be {kind}, got i32"):
            kernel(X.astype(np.int32), device="cpu")


def test_strings_in_a_function_of_another_frame() -> None:
    def run(body: str) -> dict[str, object]:
        space: dict[str, object] = {}
        _execute(compile(body, "made_up_name.py", "exec"), space)
        return space

    kernel = run(KERNEL)["scale"]
    assert isinstance(kernel, tw.Kernel)
    np.testing.assert_array_equal(kernel(X, device="cpu"), X * 2)


def _execute(compiled: object, space: dict[str, object]) -> None:
    exec(compiled, space)  # type: ignore[arg-type]


def test_a_console() -> None:
    console = code.InteractiveConsole({})
    for line in [*KERNEL.splitlines(), "", "result = scale(np.ones(2, np.float32), 7.0, device='cpu')"]:
        console.push(line)
    np.testing.assert_array_equal(console.locals["result"], [7, 7])


def test_a_text_that_nobody_holds_is_refused() -> None:
    names: dict[str, object] = {"wide": 2}
    exec("".join(["import tilewright as tw\n@tw.kernel\ndef lost(v):\n    return v", " + 31\n"]), names)
    kernel = names["lost"]
    assert isinstance(kernel, tw.Kernel)
    with pytest.raises(tw.UserError, match=r"the source of 'lost' is not available: <string> keeps none(.|\n)*tw\.run_source"):
        kernel(X)


def test_a_text_like_it_is_not_taken() -> None:
    like = "import tilewright as tw\n@tw.kernel\ndef near(v):\n    return v + 32\n"
    names: dict[str, object] = {}
    exec("".join([like[:-3], "33\n"]), names)
    kernel = names["near"]
    assert isinstance(kernel, tw.Kernel)
    with pytest.raises(tw.UserError, match="the source of 'near' is not available"):
        kernel(X)


def test_run_source() -> None:
    for factor in (3, 4):
        made = tw.run_source("".join([KERNEL, f"\n@tw.kernel\ndef more(v):\n    return v * {factor} + width\n"]), {"width": 1})
        kernel = made["more"]
        assert isinstance(kernel, tw.Kernel)
        np.testing.assert_array_equal(kernel(X, device="cpu"), X * factor + 1)
        np.testing.assert_array_equal(kernel(X, device="emulator"), X * factor + 1)
    with pytest.raises(tw.UserError, match="run_source takes Python text, got a bytes"):
        tw.run_source(b"x")  # type: ignore[arg-type]
    with pytest.raises(SyntaxError):
        tw.run_source("def (")


@pytest.mark.parametrize("same_name", [True, False])
def test_a_cell_that_is_run_again(same_name: bool) -> None:
    """Notebooks put the text of a cell into the line cache; most give a changed cell a new name, some do not."""
    space: dict[str, object] = {"tw": tw}

    def cell(text: str, number: int) -> None:
        path = "<cell>" if same_name else f"<cell-{number}>"
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
        exec(compile(text, path, "exec"), space)

    for number, text in enumerate(("v * 2", "v * 5", "v * 2")):
        cell(f"@tw.kernel\ndef again(v):\n    return {text}\n", number)
        cell("print('another cell')\n", 9)
        kernel = space["again"]
        assert isinstance(kernel, tw.Kernel)
        np.testing.assert_array_equal(kernel(X, device="cpu"), X * (5 if number == 1 else 2))


def test_a_module_that_is_changed_and_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "reloaded_kernels.py"
    path.write_text(KERNEL)
    module = importlib.import_module("reloaded_kernels")
    np.testing.assert_array_equal(module.scale(X, device="cpu"), X * 2)
    path.write_text("# one more line\n" + KERNEL.replace("v[i] * k", "v[i] + 40"))
    os.utime(path, (1, 1))
    importlib.reload(module)
    np.testing.assert_array_equal(module.scale(X, device="cpu"), X + 40)


def test_statements_of_a_history() -> None:
    typed = textwrap.dedent(
        """\
        x = 1
        @decorated(
            "by", two
        )
        def f(a):
            return a
        def f(a):
            return a + 1
        f(2)
        """
    )
    compiled = next(c for c in compile("@decorated(\n    'by', two\n)\ndef f(a):\n    return a\n", "<stdin>", "single").co_consts if hasattr(c, "co_code"))
    found = [s for s in sources._statements(typed, compiled) if sources._defines(s, compiled, "single")]
    assert found == ['@decorated(\n    "by", two\n)\ndef f(a):\n    return a\n\n']
