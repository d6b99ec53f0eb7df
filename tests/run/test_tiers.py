"""Tiers: quick code first, the same bits from the optimised code later; under threads, forks and exits, and when the background fails."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from kernel_table import CASES, Case
from tilewright.base.errors import UserError
from tilewright.compile import driver, store, tiers
from tilewright.compile.tiers import Tier
from tilewright.execute.kernel import Kernel


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was compiled before."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    store.disk_cache.cache_clear()
    driver.forget()
    yield
    tw.tiers(False)
    settle()
    store.disk_cache.cache_clear()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Tier]:
    """What the background would do: tests do it when they want."""
    waiting: list[Tier] = []
    monkeypatch.setattr(tiers._background, "add", lambda tier: None if tier in waiting else waiting.append(tier))
    return waiting


def settle(seconds: float = 60.0) -> None:
    """Wait until the background has nothing to do."""
    end = time.monotonic() + seconds
    while tw.tiers().waiting and time.monotonic() < end:
        time.sleep(0.01)
    assert not tw.tiers().waiting


def softmax(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i in tw.grid(rows):
        e = tw.exp(x[i, :] - tw.max(x[i, :]))
        out[i, :] = e / tw.sum(e)
    return out


def gelu(x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = tw.tanh(x[i]) * y[i] + 1.0
    return out


def picked(x: tw.Array, at: tw.Array) -> tw.Array:
    (n,) = at.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[at[i]]
    return out


VECTOR, MATRIX = np.linspace(-3, 3, 999, dtype=np.float32), np.linspace(-4, 4, 31 * 77, dtype=np.float32).reshape(31, 77)


def tiered(function: Callable[..., object]) -> Kernel[..., object]:
    return tw.kernel(optimize="tiered")(function)


def level(kernel: Kernel[..., object]) -> str:
    assert kernel.last is not None
    return kernel.last.level


@pytest.mark.parametrize(("function", "arguments"), [(softmax, (MATRIX,)), (gelu, (VECTOR, VECTOR))])
def test_the_first_calls_run_quick_code_and_later_ones_the_optimised(function: Callable[..., object], arguments: tuple[np.ndarray, ...], held: list[Tier]) -> None:
    kernel, before = tiered(function), tw.tiers()
    first = kernel(*arguments)
    assert level(kernel) == "O0" and len(held) == 1
    again = kernel(*arguments)
    assert level(kernel) == "O0" and tw.tiers().quick_calls == before.quick_calls + 2
    held[0].run()
    later = kernel(*arguments)
    assert level(kernel) == "O2" and tw.tiers().exchanged == before.exchanged + 1
    assert first.tobytes() == again.tobytes() == later.tobytes() == tw.kernel(function)(*arguments).tobytes()
    straight = kernel(*arguments, out=np.zeros_like(first))  # by the entry stub now
    assert straight.tobytes() == first.tobytes() and tw.tiers().quick_calls == before.quick_calls + 2


@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith(("blur", "scaled_sum", "variance", "matrix_product", "sum_and_difference", "newton"))][:8], ids=lambda case: case.name)
def test_kernels_of_the_table_are_right_in_both_tiers(case: Case, held: list[Tier]) -> None:
    tw.tiers(True)
    case.kernel.forget_programs()
    try:
        for _ in range(2):
            for shape in case.shapes:
                case.check("cpu", shape)
            while held:
                held.pop().run()
    finally:
        case.kernel.forget_programs()


def test_what_was_compiled_before_has_no_quick_code(held: list[Tier]) -> None:
    tiered(softmax)(MATRIX)
    held.pop().run()
    driver.forget()
    kernel, before = tiered(softmax), tw.tiers().quick
    kernel(MATRIX)
    assert level(kernel) == "O2" and tw.tiers().quick == before and not held


def test_the_background_does_it_by_itself() -> None:
    kernel = tiered(softmax)
    kernel(MATRIX)
    assert level(kernel) == "O0"
    settle()
    kernel(MATRIX)
    assert level(kernel) == "O2"


def test_tiers_are_for_kernels_that_name_no_level(held: list[Tier]) -> None:
    plain, own = tw.kernel(softmax), tw.kernel(optimize="O1")(softmax)
    assert tw.tiers(True).on
    plain(MATRIX)
    own(MATRIX)
    assert (level(plain), level(own)) == ("O0", "O1")
    assert not tw.tiers(False).on
    other = tw.kernel(gelu)
    other(VECTOR, VECTOR)
    assert level(other) == "O2"
    with pytest.raises(UserError, match="was given 1"):
        tw.tiers(1)  # type: ignore[arg-type]


def test_other_arguments_are_other_code(held: list[Tier]) -> None:
    kernel = tiered(gelu)
    kernel(VECTOR, VECTOR)
    wide = VECTOR.astype(np.float64)
    kernel(wide, wide)
    assert len(held) == 2
    held[1].run()
    kernel(wide, wide)
    assert level(kernel) == "O2"
    kernel(VECTOR, VECTOR)
    assert level(kernel) == "O0"


def test_indices_are_checked_in_both_tiers(held: list[Tier]) -> None:
    kernel = tiered(picked)
    for _ in range(2):
        with pytest.raises(UserError, match="index"):
            kernel(VECTOR, np.array([0, 5000]))
        np.testing.assert_array_equal(kernel(VECTOR, np.array([3, 1])), VECTOR[[3, 1]])
        while held:
            held.pop().run()


def test_a_recorded_graph_has_optimised_code(held: list[Tier]) -> None:
    kernel, x, out = tiered(gelu), VECTOR.copy(), np.zeros_like(VECTOR)
    with tw.capture(device="cpu") as graph:
        kernel(x, x, out=out)
    assert level(kernel) == "O2"
    graph.replay()
    np.testing.assert_array_equal(out, tw.kernel(gelu)(x, x))


def test_an_error_of_the_background_is_reported_and_quick_code_stays(held: list[Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tiered(gelu)
    first = kernel(VECTOR, VECTOR)
    monkeypatch.setattr(driver.FinalKernel, "keep", lambda self, verify=False: (_ for _ in ()).throw(RuntimeError("LLVM is unwell")))
    held[0].run()
    with pytest.warns(RuntimeWarning, match="gelu stays with quickly compiled code.*LLVM is unwell"):
        again = kernel(VECTOR, VECTOR)
    assert level(kernel) == "O0" and again.tobytes() == first.tobytes()
    assert any("LLVM is unwell" in text for text in tw.tiers().failed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel(VECTOR, VECTOR)  # said once


def test_what_passes_made_is_verified_before_it_is_kept(held: list[Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.ir import verify

    seen: list[str] = []
    plain = verify.verify_program
    monkeypatch.setattr(verify, "verify_program", lambda program, *more: (seen.append(program.name), plain(program, *more))[1])
    tiered(gelu)(VECTOR, VECTOR)
    assert not seen
    held[0].run()
    assert seen == ["gelu"]


def test_many_threads_exchange_code_between_their_calls() -> None:
    kernel = tiered(softmax)
    wanted = tw.kernel(softmax)(MATRIX).tobytes()
    wrong: list[object] = []
    stop = time.monotonic() + 1.0
    seen: set[str] = set()

    def call() -> None:
        try:
            while time.monotonic() < stop:
                if kernel(MATRIX).tobytes() != wanted:
                    wrong.append("other bits")
                seen.add(level(kernel))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    settle()
    kernel(MATRIX)
    assert level(kernel) == "O2" and seen


SCRIPT = """
import os, sys, time
import numpy as np
import tilewright as tw

@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i in tw.grid(rows):
        e = tw.exp(x[i, :] - tw.max(x[i, :]))
        out[i, :] = e / tw.sum(e)
    return out

@tw.kernel
def doubled(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] * 2.0
    return out

tw.tiers(True)
x = np.linspace(-4, 4, 31 * 77, dtype=np.float32).reshape(31, 77)
"""


def _run(body: str, tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + textwrap.dedent(body), encoding="utf-8")
    environment = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path / "own")}
    done = subprocess.run([sys.executable, "-X", "faulthandler", str(path)], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_exchanges_code_too(tmp_path: Path) -> None:
    text = _run(
        """
        first = softmax(x)
        doubled(x[0])  # the background has two kernels to do
        child = os.fork()
        for _ in range(3000):
            same = softmax(x).tobytes() == first.tobytes()
            assert same
            if softmax.last.level == "O2":
                break
            time.sleep(0.01)
        doubled(x[0])
        os.write(1, softmax.last.level.encode() + bytes([10]))
        if child:
            assert os.waitpid(child, 0)[1] == 0
        else:
            os._exit(0)
        """,
        tmp_path,
    )
    assert text.split() == ["O2", "O2"]


def test_the_interpreter_ends_while_the_background_works(tmp_path: Path) -> None:
    assert _run("softmax(x); doubled(x[0]); print(softmax.last.level)", tmp_path).split() == ["O0"]
