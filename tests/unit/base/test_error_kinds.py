"""Errors as they leave the package: of Python's own kinds, and with no line of ours in their tracebacks."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import CompilerBug, leave, public

PACKAGE = str(Path(tw.__file__).parent)
M, V = np.ones((3, 4), np.float32), np.ones(4, np.float32)


@tw.kernel
def scale(m: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), m.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, j] * v[j]
    return out


@tw.kernel
def keyword_only(x: tw.Array, *, factor: float) -> tw.Array:
    return x * factor


@tw.kernel
def gather(x: tw.Array, places: tw.Array) -> tw.Array:
    out = tw.empty((places.shape[0],), x.dtype)
    for i in tw.grid(places.shape[0]):
        out[i] = x[places[i]]
    return out


@tw.gpu(device="cpu")
def explicit(x, out):  # type: ignore[no-untyped-def]
    i = tw.gpu_thread_id()
    out[i] = x[i]


@tw.cpu
def serial(x, out):  # type: ignore[no-untyped-def]
    out[0] = x[0]


def program(text: str) -> Callable[..., object]:
    return tw.load(text).run


CASES: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "too few": (TypeError, lambda: scale(M)),  # type: ignore[call-arg]
    "too many": (TypeError, lambda: scale(M, V, V)),  # type: ignore[call-overload]
    "unknown keyword": (TypeError, lambda: scale(M, V, q=3)),  # type: ignore[call-overload]
    "twice": (TypeError, lambda: scale(M, V, m=M)),  # type: ignore[call-overload]
    "by position": (TypeError, lambda: keyword_only(V, 2.0)),  # type: ignore[call-overload]
    "keyword only": (TypeError, lambda: keyword_only(V, factor="2")),  # type: ignore[call-overload]
    "a text": (TypeError, lambda: scale(M, "hello")),  # type: ignore[call-overload]
    "a strange dtype": (TypeError, lambda: scale(M, np.array(["a"] * 4))),
    "rank": (ValueError, lambda: scale(V, V)),
    "size": (ValueError, lambda: scale(M, V[:3])),
    "out": (ValueError, lambda: scale(M, V, out=np.ones((2, 2), np.float32))),
    "target": (ValueError, lambda: scale.compile(M, V, target="sm_1")),
    "optimize": (ValueError, lambda: tw.kernel(optimize="O9")),
    "decorator": (ValueError, lambda: tw.kernel(precision="much")(lambda x: x)),  # type: ignore[arg-type]
    "index": (IndexError, lambda: gather(V, np.array([1, 100000]))),
    "explicit, too few": (TypeError, lambda: explicit[1, 4](V)),
    "explicit, too many": (TypeError, lambda: explicit[1, 4](V, V, V)),
    "explicit, no grid": (TypeError, lambda: explicit(V, V)),
    "explicit, block": (ValueError, lambda: explicit[1, 4096](V, V)),
    "explicit, a list": (TypeError, lambda: explicit[[1], 4](V, V)),
    "serial, too few": (TypeError, lambda: serial(V)),  # type: ignore[call-arg]
    "serial, count": (ValueError, lambda: serial[-1](V, V)),
    "primitive": (TypeError, lambda: tw.sort("abc")),
    "primitive, keyword": (TypeError, lambda: tw.sort(V, zork=3)),  # type: ignore[call-overload]
    "primitive, axis": (ValueError, lambda: tw.sort(M, axis=9)),
    "threads": (ValueError, lambda: tw.set_num_threads(0)),
    "array": (TypeError, lambda: tw.allocate((4,), "f23")),
    "random": (TypeError, lambda: tw.random.uniform("seed", shape=3)),  # type: ignore[call-overload]
    "a word outside": (tw.UserError, lambda: tw.sqrt(3.0)),
    "program, missing": (TypeError, lambda: program("let y = x * 2\n")()),
    "program, function": (TypeError, lambda: tw.load("fn f(a, b):\n    return a + b\n").f(1)),
    "program, text": (tw.UserError, lambda: tw.load("let y = x *\n")),
    "graph": (TypeError, lambda: tw.graph(3)),  # type: ignore[arg-type]
    "graph, node": (TypeError, lambda: tw.TensorGraph().op("Relu", 1, 2, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_are_of_pythons_kind_and_show_the_callers_code_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, call = CASES[name]
    monkeypatch.delenv("TILEWRIGHT_DEBUG", raising=False)
    with pytest.raises(kind) as caught:
        call()
    if name != "primitive, keyword":  # Python's own error
        assert isinstance(caught.value, tw.UserError)
    assert not [f.filename for f in traceback.extract_tb(caught.value.__traceback__) if f.filename.startswith(PACKAGE)]
    assert PACKAGE not in "".join(traceback.format_exception(caught.value))


def test_debugging_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pytest.raises(TypeError) as caught:
        scale(M)  # type: ignore[call-arg]
    assert PACKAGE in "".join(traceback.format_exception(caught.value))


def test_what_a_script_prints(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\nimport tilewright as tw\n@tw.kernel\ndef f(x):\n    return x * 2\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "TILEWRIGHT_DEBUG": ""},
        check=False,
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr, "what the caller was handling stays"
    assert "UserTypeError" in done.stderr and "f is missing 'x'" in done.stderr
    assert PACKAGE not in done.stderr


def test_bugs_of_the_compiler_keep_their_frames() -> None:
    @public
    def broken() -> None:
        raise CompilerBug.at("TW040", "a bug")

    with pytest.raises(CompilerBug) as caught:
        broken()
    assert "broken" in [f.name for f in traceback.extract_tb(caught.value.__traceback__)]


def test_errors_of_several_kinds_are_none_of_them() -> None:
    error = tw.UserError(*tw.UserError.at("TW009", "a").diagnostics, *tw.UserError.at("TW004", "b").diagnostics)
    leave(error)
    assert type(error) is tw.UserError


def test_context_managers_leave_too() -> None:
    with pytest.raises(tw.TilewrightError) as caught, tw.capture(device="nowhere"):
        pass
    assert PACKAGE not in "".join(traceback.format_exception(caught.value))


def test_every_function_that_is_offered_is_public() -> None:
    from tilewright import _HOMES

    for name, home in _HOMES.items():
        if isinstance(getattr(importlib.import_module(f"tilewright.{home}"), name), FunctionType):
            assert hasattr(getattr(tw, name), "__public__"), name
