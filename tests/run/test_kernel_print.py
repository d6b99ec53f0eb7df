"""`print` in kernels: what is written, in which order, on the CPU and at every stage of the emulator; and sums inside `while`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

import tilewright as tw

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


@pytest.mark.parametrize("device", STAGES)
def test_what_the_emulator_prints(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(np.array([1.5, -2.0, 3.0]), device=device) == 2.5
    assert capsys.readouterr().out == WRITTEN
    x = np.array([[1.0, -1.0, 2.0], [-3.0, 4.0, 5.0]])
    np.testing.assert_array_equal(shown_in_grid(x, device=device), x * 2)
    assert capsys.readouterr().out == "0,1,-1\n1,0,-3\n"


def run(text: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_cpu_prints(tmp_path: Any) -> None:
    """Machine code writes to the process's output, past Python's."""
    assert run(f"""
        import numpy as np
        import sys
        sys.path.insert(0, {str(__import__("pathlib").Path(__file__).parent)!r})
        import test_kernel_print as kernels
        kernels.shown(np.array([1.5, -2.0, 3.0]))
        x = np.array([[1.0, -1.0, 2.0], [-3.0, 4.0, 5.0]])
        assert (kernels.shown_in_grid(x) == x * 2).all()
        """) == WRITTEN + "0,1,-1\n1,0,-3\n"


@pytest.mark.parametrize("device", ["emulator"])
def test_blocks_of_zynml_print(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = tw.load('let y = compute(x) {\n    for i in 0..n:\n        print("x", i, x[i])\n        out[i] = x[i]\n}')
    program.run(x=np.array([1.0, 2.5], np.float32), device=device)
    assert capsys.readouterr().out == "x 0 1\nx 1 2.5\n"


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


@pytest.mark.parametrize("device", ["cpu", *STAGES])
def test_sums_inside_while(device: str) -> None:
    assert summed(np.ones(3), device=device) == 13
    assert summed(np.array([0.5]), device=device) == 3.5
