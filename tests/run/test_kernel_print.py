"""`print` in kernels: what is written, in which order, on the CPU and at every stage of the emulator; and sums inside `while`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from support import CUDA

STAGES = ["emulator:loop", "emulator:tile", "emulator:thread"]


@tw.kernel
def shown(x: tw.Array) -> float:
    total = 0.0
    for i in range(len(x)):
        print("x", i, f"is {x[i]:.2f}")
        total += x[i]
    print(f"total {total}", end="!\n")
    return total


@tw.kernel
def shown_in_grid(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j] = x[i, j] * 2
        if x[i, j] < 0:
            print(i, j, x[i, j], sep=",")
    return out


WRITTEN = "x 0 is 1.50\nx 1 is -2.00\nx 2 is 3.00\ntotal 2.5!\n"


@pytest.mark.parametrize("device", [*STAGES, CUDA])
def test_what_the_emulator_prints(device: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert shown(np.array([1.5, -2.0, 3.0]), device=device) == 2.5
    assert capfd.readouterr().out == WRITTEN
    x = np.array([[1.0, -1.0, 2.0], [-3.0, 4.0, 5.0]])
    np.testing.assert_array_equal(shown_in_grid(x, device=device), x * 2)
    assert capfd.readouterr().out == "0,1,-1\n1,0,-3\n"


def run(text: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_cpu_prints(tmp_path: Any) -> None:
    """Machine code writes to the process's output, past Python's."""
    assert run(f"""
        import numpy as np
        import sys
        sys.path[:0] = {[str(p) for p in __import__("pathlib").Path(__file__).parents[:2]]!r}
        import test_kernel_print as kernels
        kernels.shown(np.array([1.5, -2.0, 3.0]))
        x = np.array([[1.0, -1.0, 2.0], [-3.0, 4.0, 5.0]])
        assert (kernels.shown_in_grid(x) == x * 2).all()
        """) == WRITTEN + "0,1,-1\n1,0,-3\n"


@pytest.mark.parametrize("device", ["emulator", CUDA])
def test_blocks_of_zynml_print(device: str, capfd: pytest.CaptureFixture[str]) -> None:
    program = tw.load('let y = compute(x) {\n    for i in 0..n:\n        print("x", i, x[i])\n        out[i] = x[i]\n}')
    program.run(x=np.array([1.0, 2.5], np.float32), device=device)
    assert capfd.readouterr().out == "x 0 1\nx 1 2.5\n"


def test_code_for_a_gpu_prints() -> None:
    artifact = shown.compile(np.ones(3), target="sm_80")
    assert b"vprintf" in artifact.code


@tw.kernel
def prints_an_array(x: tw.Array) -> float:
    print(x)
    return x[0]


def test_arrays_are_not_printed() -> None:
    with pytest.raises(tw.UserError, match=r"TW009.*an array cannot be printed in a kernel"):
        prints_an_array(np.ones(3))


# -- sums inside while ----------------------------------------------------------------------------------------------


@tw.kernel
def summed(x: tw.Array) -> float:
    k = 0
    s = 0.0
    while s < 10 and k < 5:
        s += tw.sum(x)
        if k > 2:
            s += tw.max(x)
        k += 1
    return s


@pytest.mark.parametrize("device", ["cpu", *STAGES, CUDA])
def test_sums_inside_while(device: str) -> None:
    assert summed(np.ones(3), device=device) == 13
    assert summed(np.array([0.5]), device=device) == 3.5


# -- assert ---------------------------------------------------------------------------------------------------------


@tw.kernel
def checked(x: tw.Array, count: tw.InOut) -> float:
    assert len(x) > 1
    total = 0.0
    for i in tw.grid(len(x)):
        assert x[i] >= 0, "only {positive} numbers"
        total += tw.sqrt(x[i])
        count[0] += 1
    return total


@pytest.mark.parametrize("device", ["cpu", *STAGES])
def test_assertions(device: str) -> None:
    count = np.zeros(1, np.int64)
    for _ in range(2):
        assert checked(np.array([4.0, 9.0]), count, device=device) == 5
    assert count[0] == 4
    for _ in range(2):
        with pytest.raises(tw.TilewrightError, match=r"assertion failed.*only \{positive\} numbers") as caught:
            checked(np.array([4.0, -9.0, 1.0]), count, device=device)
        assert f"test_kernel_print.py:{checked.python.__code__.co_firstlineno + 5}" in str(caught.value)
    assert count[0] == 6  # up to the one that failed, and once only
    with pytest.raises(tw.TilewrightError, match=r"assertion failed.*len\(x\) > 1"):
        checked(np.array([4.0]), count, device=device)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_assertions_of_zynml(device: str) -> None:
    program = tw.load('let y = compute(x) {\n    for i in 0..n:\n        assert(x[i] > 0, "x is positive")\n        out[i] = x[i]\n}')
    for _ in range(3):
        np.testing.assert_array_equal(program.run(x=np.ones(3, np.float32), device=device)["y"], 1)
        with pytest.raises(tw.TilewrightError, match=r"assertion failed.*x is positive"):
            program.run(x=np.array([1, -1], np.float32), device=device)


def test_code_for_a_gpu_asserts() -> None:
    artifact = checked.compile(np.ones(3), np.zeros(1, np.int64), target="sm_80")
    assert [text for launch in artifact.launches for _, text in launch.asserts if "positive" in text] == ["only {positive} numbers"]
