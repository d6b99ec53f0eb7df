"""What people who come from NumPy are told, and settings of the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright.base import environment
from tilewright.tree.check.expressions import FUNCTIONS
from tilewright.tree.unknown_functions import SAME, help_for

HEAD = "import math\nimport numpy as np\nimport tilewright as tw\nSETTINGS = {'rate': 2.0, 'inner': {'k': 3}}\nPAIR = (4, 0.5)\nROWS, COLUMNS = 8, 2\n"


def kernel(tmp_path: Path, expression: str, name: str = "k") -> tw.Kernel[...]:
    """`out[i] = expression`, in a module of its own."""
    path = tmp_path / f"messages_{name}.py"
    path.write_text(HEAD + f"@tw.kernel\ndef k(x):\n    out = tw.empty_like(x)\n    for i in tw.grid(len(x)):\n        out[i] = {expression}\n    return out\n")
    namespace: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    found = namespace["k"]
    assert isinstance(found, tw.Kernel)
    return found


def error_of(tmp_path: Path, expression: str) -> str:
    with pytest.raises(tw.UserError) as error:
        kernel(tmp_path, expression)(np.ones(3, np.float32))
    return str(error.value)


@pytest.mark.parametrize(
    ("expression", "help"),
    [
        ("np.sqrt(x[i])", "use tw.sqrt"), ("np.exp(x[i])", "use tw.exp"), ("np.clip(x[i], 0, 1)", "use tw.clamp"), ("np.absolute(x[i])", "use tw.abs"),
        ("np.maximum(x[i], 0)", "use tw.maximum"), ("np.sum(x)", "use tw.sum"), ("np.square(x[i])", "write x * x"), ("np.mod(x[i], 2)", "write a % b"),
        ("np.argsort(x)", "call tw.gpu_argsort outside the kernel"), ("np.cumsum(x)", "call tw.gpu_scan outside the kernel"),
        ("np.mean(x)", "use tw.mean"), ("np.isinf(x[i])", "use tw.isinf"), ("x[:, None]", "index the arrays in it"), ("x.dtype(1, 2)", "x.dtype() takes 1 argument, got 2"), ("np.arctan2(x[i], 1)", "use tw.atan2"),
        ("tw.arctan2(x[i], 1)", "use tw.atan2"), ("tw.frexp(x[i])", "write m, e = frexp(x)"), ("tw.ldexp(x[i], x[i])", "write cast(n, i32)"), ("tw.square(x[i])", "write x * x"), ("tw.sort(x)", "call tw.gpu_sort outside the kernel"),
        ("tw.mod(x[i], 2.0)", "write a % b"), ("tw.power(x[i], 2)", "use tw.pow"), ("tw.sqroot(x[i])", "did you mean 'sqrt'?"),
        ("np.log10(x[i])", "use tw.log10"), ("tw.popcount(x[i])", "bitcast() gives the bits of a float"), ("x[i] * SETTINGS", 'as in settings["rate"]'), ("PAIR * x[i]", "pass an array of its numbers"),
    ],
)  # fmt: skip
def test_functions_of_others_get_the_word_to_use(tmp_path: Path, expression: str, help: str) -> None:
    assert help in error_of(tmp_path, expression)


def test_what_help_says_is_right() -> None:
    """The words that are named exist, and what is to be written computes the same."""
    assert set(SAME.values()) <= {*FUNCTIONS, "prod", "barrier", "mean"}
    x = np.array([0.25, -0.75, 1.5])
    names = {"x": x, "a": x, "b": x[::-1], "tw": np, "t": 0.5}
    for name in ("square", "mod", "reciprocal", "deg2rad", "rad2deg", "floor_divide"):
        text = help_for(name, (), python=True).removeprefix("write ")
        given = (names["a"], names["b"]) if " b" in f" {text}" and name in ("mod", "floor_divide") else (x,)
        with np.errstate(all="ignore"):
            found = eval(text, names)
            np.testing.assert_allclose(found[[0]] if np.ndim(found) else found, np.asarray(getattr(np, name)(*given))[..., [0]] if np.ndim(found) else getattr(np, name)(*given), rtol=1e-6)
    assert help_for("arctan2", (), python=True) == "use tw.atan2"
    assert "tw." not in help_for("elu", (), python=False)


def test_numbers_of_captured_containers_are_constants(tmp_path: Path) -> None:
    found = kernel(tmp_path, "x[i] * SETTINGS['rate'] + SETTINGS['inner']['k'] + PAIR[0] + ROWS * COLUMNS", "captured")(np.ones(2, np.float32))
    np.testing.assert_array_equal(found, [25, 25])


def test_lists_that_grow_are_refused_with_what_to_use(tmp_path: Path) -> None:
    path = tmp_path / "messages_list.py"
    path.write_text(HEAD + "@tw.kernel\ndef k(x):\n    acc = []\n    for i in range(3):\n        acc.append(x[i])\n    return acc\n")
    namespace: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    with pytest.raises(tw.UserError, match=r"make an array with tw\.empty or tw\.zeros") as error:
        namespace["k"](np.ones(3))  # type: ignore[operator]
    assert len(error.value.diagnostics) == 2


def test_explicit_kernels_report_all_their_errors() -> None:
    @tw.gpu
    def wrong(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]) -> None:
        i = tw.gpu_thread_id()
        a = tw.foo(x[i])  # type: ignore[attr-defined]
        y[i] = a * 2  # follows from the line above
        if i < undefined_limit:  # type: ignore[name-defined]  # noqa: F821
            y[i] = nope  # type: ignore[name-defined]  # noqa: F821
        y[i] = x[i, i]  # type: ignore[index]

    for device in ("cpu", "emulator"):
        with pytest.raises(tw.UserError) as error:
            wrong[1, 32](np.ones(32, np.float32), np.ones(32, np.float32), device=device)
        said = [d.message for d in error.value.diagnostics]
        assert said == ["tilewright has no 'foo'", "unknown name 'undefined_limit'", "unknown name 'nope'", "'x' has 1 axis, but is used with 2 indices"]


@pytest.mark.parametrize("dtype", [tw.q4_0, "q8_0", tw.q6_k])
def test_arrays_of_quantised_blocks_are_refused(dtype: object) -> None:
    with pytest.raises(tw.UserError, match=r"is a type of packed blocks, which tw\.quantize makes"):
        tw.allocate((4,), dtype)


def test_notebooks_show_the_message_and_the_line() -> None:
    with pytest.raises(tw.UserError) as found:
        tw.allocate((4,), "f23")
    lines = found.value._render_traceback_()
    assert lines[-1] == f"UserTypeError: {found.value}"
    assert lines[1].strip() == 'tw.allocate((4,), "f23")'
    assert len(lines) == 3


# -- the environment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, setting in environment.SETTINGS.items() if setting.words])
def test_settings_refuse_words_they_do_not_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for word in environment.SETTINGS[name].words:
        monkeypatch.setenv(name, f" {word.upper()} ")
        environment.check()
    monkeypatch.setenv(name, "")
    environment.check()
    monkeypatch.setenv(name, "banana")
    with pytest.raises(tw.UserError, match=f"{name} is 'banana'"):
        environment.check()


def test_a_setting_holds_at_the_first_compilation(tmp_path: Path) -> None:
    program = "import numpy as np, tilewright as tw\nexec(compile(open(__import__('sys').argv[1]).read(), __import__('sys').argv[1], 'exec'))\nk(np.ones(2, np.float32))\n"
    here = tmp_path / "kernel.py"
    here.write_text("@tw.kernel\ndef k(x):\n    return x * 3\n")
    for name, value, said in (("TILEWRIGHT_ISOLATE", "sometimes", "set it to auto, always or never"), ("TILEWRIGHT_CACHE_SIZE", "big", "a number of bytes"), ("TILEWRIGHT_WRAN", "off", "did you mean TILEWRIGHT_WARN?")):
        done = subprocess.run([sys.executable, "-c", program, str(here)], env={**os.environ, name: value}, capture_output=True, text=True, timeout=600, check=False)
        assert (name in done.stderr, said in done.stderr) == (True, True), done.stderr


def test_nothing_else_reads_the_environment() -> None:
    package = Path(tw.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "TILEWRIGHT_" in text and path.name not in ("environment.py", "errors.py"):
            assert 'environ.get("TILEWRIGHT_' not in text, path
