"""Tiers of explicit kernels, and code that tuning chose in the place of code that runs: the same results before and after, under threads, forks and exits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import UserError
from tilewright.base.target import host_cpu
from tilewright.compile import driver, store, tiers, tuning
from tilewright.compile.simt import FinalSimt
from tilewright.compile.tiers import Job
from tilewright.compile.tuning import Measurement
from tilewright.execute.devices import find_device
from tilewright.execute.tune import extents_of, neighbourhood

X = np.linspace(-3, 3, 1000, dtype=np.float32)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was compiled or measured before."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    store.disk_cache.cache_clear()
    tuning.use_store(tuning.TuningStore(tmp_path / "tuning"))
    driver.forget()
    yield
    tw.tiers(False)
    settle()
    tuning.use_store(None)
    store.disk_cache.cache_clear()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What the background would do: tests do it when they want."""
    waiting: list[Job] = []
    monkeypatch.setattr(tiers._background, "add", lambda job: None if job in waiting else waiting.append(job))
    return waiting


def settle(seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while tw.tiers().waiting and time.monotonic() < end:
        time.sleep(0.01)
    assert not tw.tiers().waiting


def by_thread(x: tw.Array, out: tw.Array) -> None:
    i = tw.gpu_thread_id()
    if i < x.size:
        out[i] = tw.exp(x[i]) * x[i] + 1.0


def beyond(x: tw.Array, out: tw.Array) -> None:
    i = tw.gpu_thread_id()
    out[i + 1] = x[i]


def by_function(x: tw.Array, out: tw.Array) -> None:
    for i in range(x.size):
        out[i] = x[i] * x[i] + 0.5


def level(kernel: Any) -> str:
    assert kernel.last is not None
    return str(kernel.last.level)


def launched(kernel: Any) -> bytes:
    out = np.zeros_like(X)
    kernel[8, 128](X, out)
    return out.tobytes()


# -- explicit kernels -------------------------------------------------------------------------------------------------


def test_launches_run_quick_code_first_and_the_optimised_later(held: list[Job]) -> None:
    kernel, before = tw.gpu(device="cpu", optimize="tiered")(by_thread), tw.tiers()
    first = launched(kernel)
    assert level(kernel) == "O0" and len(held) == 1 and tw.tiers().quick == before.quick + 1
    again = [launched(kernel) for _ in range(5)]  # none of them goes straight to quick code
    assert level(kernel) == "O0" and tw.tiers().quick_calls == before.quick_calls + 6
    held[0].run()
    later = [launched(kernel) for _ in range(5)]
    assert level(kernel) == "O2" and tw.tiers().exchanged == before.exchanged + 1
    assert {first, *again, *later} == {launched(tw.gpu(device="cpu")(by_thread))}
    assert tw.tiers().quick_calls == before.quick_calls + 6


def test_a_cpu_function_has_tiers(held: list[Job]) -> None:
    function = tw.cpu(optimize="tiered")(by_function)
    out = np.zeros_like(X)
    function(X, out)
    first = out.copy()
    assert level(function.kernel) == "O0"
    held[0].run()
    for _ in range(4):
        out[:] = 0
        function(X, out)
        assert out.tobytes() == first.tobytes()
    assert level(function.kernel) == "O2"
    np.testing.assert_allclose(first, X * X + 0.5, rtol=1e-6)


def test_tiers_hold_for_explicit_kernels_without_a_level(held: list[Job]) -> None:
    tw.tiers(True)
    plain, own = tw.gpu(device="cpu")(by_thread), tw.gpu(device="cpu", optimize="O1")(by_thread)
    assert launched(plain) == launched(own)
    assert (level(plain), level(own)) == ("O0", "O1")


def test_what_was_compiled_before_has_no_quick_code(held: list[Job]) -> None:
    launched(tw.gpu(device="cpu", optimize="tiered")(by_thread))
    held.pop().run()
    driver.forget()
    kernel = tw.gpu(device="cpu", optimize="tiered")(by_thread)
    launched(kernel)
    assert level(kernel) == "O2" and not held


def test_accesses_are_checked_in_both_tiers(held: list[Job]) -> None:
    kernel = tw.gpu(device="cpu", optimize="tiered")(beyond)
    x = np.arange(8, dtype=np.float32)
    for wanted in ("O0", "O2"):
        with pytest.raises(UserError, match="8"):
            kernel[1, 8](x, np.zeros(8, np.float32))
        out = np.zeros(9, np.float32)
        kernel[1, 8](x, out)
        np.testing.assert_array_equal(out[1:], x)
        assert level(kernel) == wanted
        while held:
            held.pop().run()


def test_an_error_of_the_background_is_reported(held: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tw.gpu(device="cpu", optimize="tiered")(by_thread)
    first = launched(kernel)
    monkeypatch.setattr(FinalSimt, "keep", lambda self, verify=False: (_ for _ in ()).throw(RuntimeError("LLVM is unwell")))
    held[0].run()
    with pytest.warns(RuntimeWarning, match="by_thread stays with quickly compiled code.*LLVM is unwell"):
        assert launched(kernel) == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [launched(kernel) for _ in range(4)] == [first] * 4
    assert level(kernel) == "O0"


def test_threads_launch_while_code_is_exchanged() -> None:
    kernel = tw.gpu(device="cpu", optimize="tiered")(by_thread)
    wanted, stop = launched(tw.gpu(device="cpu")(by_thread)), time.monotonic() + 1.0
    wrong: list[object] = []

    def launch() -> None:
        try:
            while time.monotonic() < stop:
                if launched(kernel) != wanted:
                    wrong.append("other bits")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=launch) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    settle()
    launched(kernel)
    assert level(kernel) == "O2"


# -- tuned code -------------------------------------------------------------------------------------------------------


def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    _, n = b.shape
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = tw.f32(0)
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


A = np.random.default_rng(3).standard_normal((192, 160), dtype=np.float32)
B = np.random.default_rng(4).standard_normal((160, 224), dtype=np.float32)


def measure(kernel: Any) -> str:
    """Put a table on disk that says that another schedule than the model's first is the fastest; gives that."""
    arguments = kernel.runner.arguments(kernel.bound(A, B), gpu=False)
    signature = kernel.runner.signature(arguments, gpu=False)
    extents = extents_of(arguments)
    first = driver.contraction_schedules(kernel.function, signature, host_cpu(), extents)[0]
    best = neighbourhood(host_cpu())(first)[0]
    key = tuning.kernel_key(kernel.function, signature.args, kernel.precision, host_cpu())
    version = driver.compiler_version()
    entries = [Measurement(extents, s.describe(), seconds, version=version, rounds=5) for s, seconds in ((first, 1.0), (best, 1e-6))]
    tuning.store().add(key, kernel.function.name, host_cpu().name, entries)
    return best.describe()


def running(held: list[Job]) -> Any:
    """A kernel in tiers with optimised code."""
    kernel = tw.kernel(optimize="tiered")(product)
    kernel(A, B)
    while held:
        held.pop().run()
    kernel(A, B)
    assert level(kernel) == "O2"
    return kernel


def test_tuned_code_takes_the_place_of_code_that_runs(held: list[Job]) -> None:
    kernel, before = running(held), tw.tiers()
    best = measure(kernel)
    assert kernel.last is not None and best not in kernel.last.schedule
    kernel.take_tuned(find_device("cpu"))
    np.testing.assert_allclose(kernel(A, B), A @ B, rtol=1e-4, atol=1e-4)  # still with what it has
    assert level(kernel) == "O2" and best not in kernel.last.schedule and len(held) == 1
    held.pop().run()
    np.testing.assert_allclose(kernel(A, B), A @ B, rtol=1e-4, atol=1e-4)
    assert level(kernel) == "O2" and best in kernel.last.schedule and not held
    after = tw.tiers()
    assert (after.tuned, after.quick, after.quick_calls) == (before.tuned + 1, before.quick, before.quick_calls)


def test_without_tiers_tuned_code_is_compiled_at_the_next_call(held: list[Job]) -> None:
    kernel: Any = tw.kernel(product)
    kernel(A, B)
    best = measure(kernel)
    kernel.take_tuned(find_device("cpu"))
    kernel(A, B)
    assert not held and kernel.last is not None and best in kernel.last.schedule


def test_tuned_code_that_cannot_be_compiled_leaves_what_runs(held: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = running(held)
    best = measure(kernel)
    kernel.take_tuned(find_device("cpu"))
    with monkeypatch.context() as patched:
        patched.setattr(tiers, "compile_kernel", lambda *args: (_ for _ in ()).throw(RuntimeError("LLVM is unwell")))
        held.pop().run()
    np.testing.assert_allclose(kernel(A, B), A @ B, rtol=1e-4, atol=1e-4)
    assert kernel.last is not None and best not in kernel.last.schedule
    assert any("product: LLVM is unwell" in text for text in tw.tiers().failed)


def test_threads_call_while_tuned_code_comes() -> None:
    kernel: Any = tw.kernel(optimize="tiered")(product)
    wrong: list[object] = []
    kernel(A, B)
    settle()
    kernel(A, B)
    best, stop, expected = measure(kernel), time.monotonic() + 1.5, A @ B

    def call() -> None:
        try:
            while time.monotonic() < stop:
                np.testing.assert_allclose(kernel(A, B), expected, rtol=1e-4, atol=1e-4)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    kernel.take_tuned(find_device("cpu"))
    for thread in threads:
        thread.join()
    settle()
    kernel(A, B)
    assert not wrong and kernel.last is not None and best in kernel.last.schedule


# -- forks and exits --------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
import numpy as np
import tilewright as tw

@tw.gpu(device="cpu")
def doubled(x: tw.Array, out: tw.Array) -> None:
    i = tw.gpu_thread_id()
    if i < x.size:
        out[i] = x[i] * 2.0

tw.tiers(True)
x = np.arange(1000, dtype=np.float32)
out = np.zeros_like(x)
doubled[8, 128](x, out)
assert doubled.last.level == "O0"
"""


def _run(body: str, tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + textwrap.dedent(body), encoding="utf-8")
    environment = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path / "own")}
    done = subprocess.run([sys.executable, "-X", "faulthandler", str(path)], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_exchanges_code_too(tmp_path: Path) -> None:
    text = _run(
        """
        child = os.fork()
        for _ in range(3000):
            out[:] = 0
            doubled[8, 128](x, out)
            assert (out == x * 2).all()
            if doubled.last.level == "O2":
                break
            time.sleep(0.01)
        os.write(1, doubled.last.level.encode() + bytes([10]))
        if child:
            assert os.waitpid(child, 0)[1] == 0
        else:
            os._exit(0)
        """,
        tmp_path,
    )
    assert text.split() == ["O2", "O2"]


def test_the_interpreter_ends_while_the_background_works(tmp_path: Path) -> None:
    assert _run("print((out == x * 2).all())", tmp_path).split() == ["True"]
