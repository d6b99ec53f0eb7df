"""Stops of one thread at the statements of a kernel, with its variables."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.ir.emulator import run_kernel
from tilewright.ir.emulator.warps.stepping import Steps, Stop, stepping
from tilewright.ir.text_parse import parse_kernel
from tilewright.ir.verify import verify_kernel

KERNEL = """kernel @k stage=thread grid=[g, 2] threads=64 {block = [32, 2, 1]} {
  param %x: tensor<f32, [n], [2]>
  %t = thread_id : i64
  %s = alloc {space = "shared", shape = [64], dtype = f32} : tensor<f32, [64], [1], shared>
  %v = load %x, %t : f32
  step %t, %v, %x, %s {names = ["t", "v", "x", "s"]} @ "k.py":3:1
  store %s, %t, %v
  %c = const {value = 33, dtype = i64} : i64
  %z = lt %t, %c : bool
  if %z {
    step %t, %z, %s {names = ["t", "small", "s"], function = "f"} @ "k.py":5:1
    yield
  } {
    step %t {names = ["t"]} @ "k.py":7:1
    yield
  }
}"""


def stops(**options: object) -> list[Stop]:
    kernel = parse_kernel(KERNEL)
    verify_kernel(kernel)
    found: list[Stop] = []
    x = np.arange(128, dtype=np.float32)[::2]
    with stepping(Steps(found.append, **options)):  # type: ignore[arg-type]
        run_kernel(kernel, [x], {"n": 64, "g": 3})
    run_kernel(kernel, [x], {"n": 64, "g": 3})
    return found


def test_the_variables_of_a_thread() -> None:
    first, second = stops(block=(2, 1), thread=(0, 1))
    assert (first.kernel, first.function, first.span.path, first.line) == ("k", "k", "k.py", 3)
    assert (first.block, first.thread) == ((2, 1), (0, 1))
    assert first.variables["t"] == 32 and first.variables["v"] == 64.0
    assert isinstance(first.variables["t"], int) and isinstance(first.variables["v"], float)
    np.testing.assert_array_equal(first.variables["x"], np.arange(64) * 2)  # type: ignore[arg-type]
    assert np.isnan(first.variables["s"]).all()  # type: ignore[call-overload]
    assert (second.function, second.line, second.variables["small"]) == ("f", 5, True)
    np.testing.assert_array_equal(second.variables["s"], np.arange(64) * 2)  # type: ignore[arg-type]


def test_threads_by_number_and_the_way_they_take() -> None:
    assert [stop.line for stop in stops(thread=40)] == [3, 7]
    assert [stop.block for stop in stops(block=4)] == [(1, 1), (1, 1)]
    assert stops(thread=64) == stops(thread=(0, 2)) == stops(kernel="other") == []


def test_everyone_who_is_there() -> None:
    first, second = stops(thread=3)
    np.testing.assert_array_equal(first.everyone("v"), np.arange(64) * 2)
    np.testing.assert_array_equal(second.everyone("t"), np.where(np.arange(64) < 33, np.arange(64), 0))


def test_an_error_at_a_stop_ends_the_launch() -> None:
    def told(stop: Stop) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), stepping(Steps(told)):
        run_kernel(parse_kernel(KERNEL), [np.zeros(128, np.float32)[::2]], {"n": 64, "g": 3})
