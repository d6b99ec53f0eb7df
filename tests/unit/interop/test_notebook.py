"""`%%zyn` cells, with a stand-in for IPython's shell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewright as tw


class Shell:
    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}
        self.magics_manager = SimpleNamespace(magics={"cell": {}, "line": {}})

    def register_magic_function(self, function: Callable[[str, str], None], magic_kind: str, magic_name: str) -> None:
        self.magics_manager.magics[magic_kind][magic_name] = function

    def cell(self, text: str, line: str = "--device cpu") -> None:
        self.magics_manager.magics["cell"]["zyn"](line, text)


@pytest.fixture
def shell() -> Shell:
    found = Shell()
    tw.load_ipython_extension(found)
    return found


def test_inputs_and_results_are_variables(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.user_ns |= {"x": np.arange(4, dtype=np.float32), "other": object()}
    shell.cell("let y = compute(x) { for i in 0..n: out[i] = x[i] * 2 }\nlet total = reduce(+, y)\nlet parts = [1, 2]\n")
    np.testing.assert_array_equal(shell.user_ns["y"], [0, 2, 4, 6])
    assert shell.user_ns["total"] == 12
    assert capsys.readouterr().out == "y: float32[4]\ntotal: 12.0\nparts: list of 2\n"
    shell.cell("let z = y + 1\n", "-d emulator -q")
    np.testing.assert_array_equal(shell.user_ns["z"], [1, 3, 5, 7])
    assert capsys.readouterr().out == ""


def test_functions_stay(shell: Shell) -> None:
    shell.cell("fn double(x): return x * 2\nfn unused(x): return x\n")
    shell.cell("let y = double(4)\n")
    assert shell.user_ns["y"] == 8
    assert shell.user_ns["double"](5) == 10
    shell.cell("fn double(x): return x * 20\nlet y = double(4)\n")
    assert shell.user_ns["y"] == 80
    assert shell.user_ns["double"](1) == 20


def test_imports_stay(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.zyn").write_text("let eps = 0.5\nfn shift(x): return x + eps\n")
    shell.cell('import "layers.zyn" as layers\nfn twice(x): return layers.shift(x) * 2\n')
    shell.cell("let y = layers.shift(1) + twice(0.0)\n")
    assert shell.user_ns["y"] == 2.5
    assert "layers__eps" not in shell.user_ns
    (tmp_path / "layers.zyn").write_text("fn shift(x): return x + 10\n")
    shell.cell('import "layers.zyn" as layers\nlet y = layers.shift(1)\n')
    assert shell.user_ns["y"] == 11


def test_errors_leave_nothing_behind(shell: Shell) -> None:
    with pytest.raises(tw.UserError) as caught:
        shell.cell("fn f(x): return x\nlet a = b + c\n")
    assert str(caught.value) == "error[TW008]: the notebook has no 'b', 'c'\nhelp: set b in a cell before this one"
    with pytest.raises(tw.UserError, match=r"<zyn cell 2>:1:9: error\[TW002\]: unknown function 'f'"):
        shell.cell("let a = f(1)\n")
    with pytest.raises(tw.UserError, match="%%zyn: unrecognized arguments: --wrong"):
        shell.cell("let a = 1\n", "--wrong")
    assert shell.user_ns == {}


def test_unloading(shell: Shell) -> None:
    tw.unload_ipython_extension(shell)
    assert shell.magics_manager.magics["cell"] == {}
