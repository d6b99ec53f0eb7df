"""Arrays that kernels write where they lie: what they hold afterwards, on the CPU and at every stage of the emulator, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from null_cuda import NullCuda
from null_cuda.install import installed
from support import CUDA
from tilewright.frontend.zyn.format import format_text

DEVICES = ["cpu", "emulator:loop", "emulator:tile", "emulator:thread"]


@tw.kernel
def append(cache: tw.InOut, row: tw.Array, position: int) -> None:
    for j in tw.grid(len(row)):
        cache[position, j] = row[j]


@tw.kernel
def double(x: tw.InOut) -> None:
    for i in tw.grid(len(x)):
        x[i] = x[i] * 2


@tw.kernel
def add_to(x: tw.InOut, y: tw.Array) -> float:
    for i in tw.grid(len(y)):
        x[i] += y[i]
    return tw.sum(x)


@tw.kernel
def filled_beside_a_sum(x: tw.InOut, y: tw.Array) -> float:
    """Nothing that follows reads `x`."""
    total = 0.0
    for i in range(len(y)):
        total += y[i]
    for i in tw.grid(len(x)):
        x[i] = 7
    return total


@tw.kernel
def transposed(x: tw.InOut) -> None:
    x = x.T + 1


@tw.kernel
def swap(a: tw.InOut, b: tw.InOut) -> None:
    a, b = b, a


@tw.kernel
def running(x: tw.InOut) -> None:
    for i in range(1, len(x)):
        x[i] += x[i - 1]


@tw.kernel
def normalised(x: tw.InOut) -> tuple[float, float]:
    before = tw.sum(x)
    x = x / before
    return before, tw.sum(x)


@tw.kernel
def old_and_new(x: tw.InOut) -> tuple[tw.Array, tw.Array]:
    old = x * 1
    for i in tw.grid(len(x)):
        x[i] = x[i] + 1
    return old, x * 2


@tw.kernel
def smoothed(x: tw.InOut, times: int) -> None:
    for _ in range(times):
        x = (x + x) / 2 + 1


@tw.kernel
def doubled_sum(x: tw.InOut, y: tw.Array) -> None:
    x[...] = x * 2 + y


@tw.kernel
def every_third(x: tw.InOut, value: float) -> None:
    for i in tw.grid(range(0, len(x), 3)):
        x[i] = value


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("n", [1, 31, 33])
def test_what_arrays_hold(device: str, n: int) -> None:
    random = np.random.default_rng(n)

    def values(*shape: int) -> np.ndarray:
        return random.standard_normal(shape)

    cache, row = values(5, n), values(n)
    wanted = cache.copy()
    wanted[3] = row
    assert append(cache, row, 3, device=device) is None
    np.testing.assert_array_equal(cache, wanted)

    x, y = values(n + 2), values(n)
    wanted = x.copy()
    wanted[:n] += y
    total = add_to(x, y, device=device)
    np.testing.assert_array_equal(x, wanted)
    np.testing.assert_allclose(total, wanted.sum())

    m = values(n, n)
    wanted = m.T + 1
    transposed(m, device=device)
    np.testing.assert_array_equal(m, wanted)

    a, b = values(n), values(n)
    old = a.copy(), b.copy()
    swap(a, b, device=device)
    np.testing.assert_array_equal(a, old[1])
    np.testing.assert_array_equal(b, old[0])

    x = values(n)
    wanted = np.cumsum(x)
    running(x, device=device)
    np.testing.assert_allclose(x, wanted)

    x = abs(values(n)) + 1
    wanted = x / x.sum()
    before, after = normalised(x, device=device)
    np.testing.assert_allclose(x, wanted)
    np.testing.assert_allclose([before, after], [before, 1.0])

    x = values(n)
    wanted = x.copy()
    first, second = old_and_new(x, device=device)
    np.testing.assert_array_equal(first, wanted)
    np.testing.assert_array_equal(x, wanted + 1)
    np.testing.assert_array_equal(second, (wanted + 1) * 2)

    x = values(n)
    wanted = x + 3
    smoothed(x, 3, device=device)
    np.testing.assert_allclose(x, wanted)

    x, y = values(n), values(n)
    wanted = x * 2 + y
    doubled_sum(x, y, device=device)
    np.testing.assert_allclose(x, wanted)

    x = values(n)
    wanted = x.copy()
    wanted[::3] = 7
    every_third(x, 7.0, device=device)
    np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_views_are_written_where_they_lie(device: str) -> None:
    for n in (0, 1, 31, 33):
        for view in (slice(1, 2 * n + 1, 2), slice(None), slice(None, None, -1), slice(2 * n + 1, 0, -2)):
            base = np.arange(2 * n + 3, dtype=np.float64)
            wanted = base.copy()
            wanted[view] *= 2
            double(base[view], device=device)
            np.testing.assert_array_equal(base, wanted)
    base = np.arange(48.0).reshape(4, 3, 4)
    wanted = base.copy()
    double(base[2, ::-1, 1], device=device)
    wanted[2, ::-1, 1] *= 2
    np.testing.assert_array_equal(base, wanted)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float16", "float32", "bool", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("device", ["cpu", "emulator", CUDA])
def test_dtypes(dtype: Any, device: str) -> None:
    cache = np.ones((3, 5)).astype(dtype)
    row = np.array([0, 1, 1, 0, 1]).astype(dtype)
    append(cache, row, 1, device=device)
    np.testing.assert_array_equal(cache[1].astype(float), row.astype(float))
    np.testing.assert_array_equal(cache[::2].astype(float), np.ones((2, 5)))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_an_argument_that_is_only_read_may_share_memory(device: str) -> None:
    cache = np.arange(20.0).reshape(4, 5)
    wanted = cache.copy()
    wanted[3] = cache[1]
    append(cache, cache[1], 3, device=device)
    np.testing.assert_array_equal(cache, wanted)
    square = np.arange(16.0).reshape(4, 4)
    wanted = square.copy()
    wanted[2] = square[::-1, 2]
    append(square, square[::-1, 2], 2, device=device)
    np.testing.assert_array_equal(square, wanted)


@pytest.mark.parametrize("device", ["cpu", "emulator", CUDA])
def test_refused_before_anything_is_written(device: str) -> None:
    def refused(call: Any, *array: np.ndarray) -> str:
        before = [a.copy() for a in array]
        with pytest.raises(tw.UserError) as caught:
            call()
        for a, b in zip(array, before, strict=True):
            np.testing.assert_array_equal(a, b)
        return str(caught.value).splitlines()[0].partition("error")[2]

    x = np.arange(8.0)
    fixed = np.arange(4.0)
    fixed.flags.writeable = False
    # twice: the second call takes the entry stub, which must refuse alike
    for _ in range(2):
        assert refused(lambda: double(fixed, device=device), fixed) == "[TW018]: argument 'x' is read-only, and the kernel writes to it"
        assert refused(lambda: swap(x[:6], x[2:], device=device), x) == "[TW018]: 'a' and 'b' share memory, and swap writes to both in place"
        assert "some of its elements share memory" in refused(lambda: double(np.lib.stride_tricks.as_strided(x, (3,), (0,)), device=device), x)
        packed = np.zeros(4, np.dtype([("a", "i1"), ("b", "f8")]))["b"]
        assert "not aligned" in refused(lambda array=packed: double(array, device=device), packed)
        assert refused(lambda: double(3.0, device=device)) == "[TW009]: argument 'x' is written in place and must be an array, got a float"
        double(x, device=device)
    swap(x[::2], x[1::2], device=device)  # between each other, and apart
    np.testing.assert_array_equal(x[:4], [4.0, 0.0, 12.0, 8.0])
    out = np.zeros((), np.float64)
    assert "share memory" in refused(lambda: add_to(x, np.ones(2), out=x[1:2].reshape(()), device=device), x)
    assert add_to(x, np.ones(2), out=out, device=device) is out
    assert "returns nothing" in refused(lambda: double(x, out=x.copy(), device=device), x)


def test_dtypes_are_never_converted() -> None:
    single = np.zeros(4, np.float32)
    with pytest.raises(tw.UserError, match=r"TW006.*'x' is f32 and cannot become f64"):
        doubled_sum(single, np.ones(4))
    add_to(single, np.ones(4))  # what is stored to an element becomes of its dtype, as ever
    np.testing.assert_array_equal(single, 1)
    swapped = np.zeros(4, ">f8")
    with pytest.raises(tw.UserError, match=r"TW009.*other byte order"):
        double(swapped)
    with pytest.raises(tw.UserError, match=r"TW009"):
        double([1.0, 2.0])


def test_indices_are_checked() -> None:
    cache = np.zeros((4, 5))
    for position in (4, -1):
        with pytest.raises(tw.UserError, match=rf"TW050.*append writes 'cache' at index {position} .axis 0.*extent there is 4"):
            append(cache, np.ones(5), position)
    with pytest.raises(tw.UserError, match=r"TW013.*index j of 'cache' reaches 5, but axis 1 has extent 5"):
        append(cache, np.ones(6), 1)
    np.testing.assert_array_equal(cache, 0)


def test_the_entry_stub_takes_the_calls() -> None:
    cache, row = np.zeros((4, 8), np.float32), np.arange(8, dtype=np.float32)
    append(cache, row, 0)
    stub = append.runner.calls(tw.devices()[0])._latest.call
    assert stub(cache, row, 1) is None
    np.testing.assert_array_equal(cache[1], row)
    fixed = cache.copy()
    fixed.flags.writeable = False
    assert stub(fixed, row, 1) is NotImplemented
    assert stub(cache, cache[1], 2) is NotImplemented
    assert stub(cache, row.astype("f8"), 2) is NotImplemented


# -- the checker ----------------------------------------------------------------------------------------------------


@tw.kernel
def returned(x: tw.InOut) -> tw.Array:
    x[0] = 1.0
    return x


@tw.kernel
def untouched(x: tw.InOut) -> float:
    return x[0]


@tw.kernel
def raced(x: tw.InOut) -> None:
    for i in tw.grid(len(x) - 1):
        x[i] = x[i + 1]


@tw.kernel
def other_name(x: tw.InOut) -> tw.Array:
    w = x
    for i in tw.grid(len(x)):
        x[i] = 0.0
    return w + 1


@tw.kernel
def not_in_place(x: tw.Array) -> None:
    for i in tw.grid(len(x)):
        x[i] = 0.0


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (returned, "TW005.*'x' is written in place: the caller has it, and it cannot be returned as well"),
        (untouched, "TW017.*'x' is to be written in place, and nothing is written to it"),
        (raced, "TW012.*iteration i=0 reads x\\[1\\], which iteration i=1 writes"),
        (other_name, "TW005.*'x' and 'w' may be two names of one array"),
        (not_in_place, "TW015.*'x' is an input and cannot be written"),
    ],
)
def test_wrong_kernels(kernel: Any, message: str) -> None:
    x = np.ones(5)
    with pytest.raises(tw.UserError, match=message):
        kernel(x)
    np.testing.assert_array_equal(x, 1)


# -- kernels in kernels ---------------------------------------------------------------------------------------------


@tw.kernel
def scale_row(x: tw.InOut, i: int, factor: float) -> None:
    for j in range(x.shape[1]):
        x[i, j] *= factor


@tw.kernel
def scale_rows(x: tw.InOut, factors: tw.Array) -> None:
    for i in range(len(factors)):
        scale_row(x, i, factors[i])


@tw.kernel
def scaled_copy(x: tw.Array) -> tw.Array:
    out = x * 1
    scale_row(out, 0, 10.0)
    return out


@tw.kernel
def scales_its_input(x: tw.Array) -> tw.Array:
    scale_row(x, 0, 10.0)
    return x + 1


@pytest.mark.parametrize("device", ["cpu", "emulator", CUDA])
def test_kernels_that_call_such_kernels(device: str) -> None:
    x = np.arange(12.0).reshape(4, 3)
    wanted = x.copy()
    wanted[:3] *= np.array([[1.0], [2.0], [3.0]])
    scale_rows(x, np.array([1.0, 2.0, 3.0]), device=device)
    np.testing.assert_array_equal(x, wanted)
    copy = scaled_copy(x, device=device)
    np.testing.assert_array_equal(copy[0], wanted[0] * 10)
    np.testing.assert_array_equal(copy[1:], wanted[1:])
    np.testing.assert_array_equal(x, wanted)
    with pytest.raises(tw.UserError, match=r"TW015.*'x' is an input and cannot be written"):
        scales_its_input(x, device=device)


# -- graphs, futures, GPUs ------------------------------------------------------------------------------------------


def test_captured_graphs_write_in_place() -> None:
    cache, row = np.zeros((4, 3)), np.arange(3.0)
    with tw.capture("cpu") as graph:
        append(cache, row, 2)
        double(cache[2])
        append(cache, cache[2], 0)
    np.testing.assert_array_equal(cache, 0)
    for turn in range(1, 4):
        row += 1
        graph.replay()
        np.testing.assert_array_equal(cache[2], (np.arange(3.0) + turn) * 2)
        np.testing.assert_array_equal(cache[0], cache[2])
    with pytest.raises(tw.UserError, match=r"TW036"), tw.capture("emulator"):
        append(cache, row, 1, device="emulator")


def test_asynchronous_calls_write_in_place() -> None:
    x = np.ones(1000)
    waiting = double(x, asynchronous=True)
    assert waiting.result() is None
    np.testing.assert_array_equal(x, 2)


def test_tuning_and_several_devices_are_refused() -> None:
    x = np.ones(4)
    with pytest.raises(tw.UserError, match=r"TW016.*writes 'x' in place"):
        tw.tune(double, x)
    with pytest.raises(tw.UserError, match=r"TW016.*writes 'x' in place"):
        double(x, device=["cpu:0/2", "cpu:1/2"])
    np.testing.assert_array_equal(x, 1)


KERNELS = (append, swap, double)
"""Made anew for every null driver, whose memory ends with it."""


@pytest.fixture(params=["lazy", "random"])
def gpu(request: pytest.FixtureRequest) -> Iterator[NullCuda]:
    with installed(mode=request.param) as driver:
        yield driver


def test_on_a_gpu(gpu: NullCuda) -> None:
    append, swap, double = (tw.kernel(kernel.python) for kernel in KERNELS)
    cache = tw.to_device(np.zeros((4, 8), np.float32), "cuda")
    row = tw.to_device(np.arange(8, dtype=np.float32), "cuda")
    for position in (0, 2, 3):  # the later ones by machine code
        assert append(cache, row, position) is None
    wanted = np.zeros((4, 8))
    wanted[[0, 2, 3]] = np.arange(8)
    np.testing.assert_array_equal(cache.numpy(), wanted)
    append(cache, cache[3], 1)
    np.testing.assert_array_equal(cache.numpy()[1], np.arange(8))
    x = tw.to_device(np.arange(8.0), "cuda")
    swap(x[:3], x[3:6])
    swap(x[:3], x[3:6])
    for _ in range(2):
        with pytest.raises(tw.UserError, match=r"TW018.*'a' and 'b' share memory"):
            swap(x[:3], x[2:5])
    np.testing.assert_array_equal(x.numpy(), np.arange(8.0))
    host = np.arange(5.0)
    double(host[::2], device="cuda")
    np.testing.assert_array_equal(host, [0, 1, 4, 3, 8])


def test_graphs_of_a_gpu(gpu: NullCuda) -> None:
    append = tw.kernel(KERNELS[0].python)
    cache = tw.to_device(np.zeros((4, 8), np.float32), "cuda")
    row = tw.to_device(np.arange(8, dtype=np.float32), "cuda")
    with tw.capture("cuda") as graph:
        append(cache, row, 1)
        append(cache, row, 2)
    for _ in range(2):
        graph.replay()
    np.testing.assert_array_equal(cache.numpy()[1:3], np.stack([np.arange(8)] * 2))
    np.testing.assert_array_equal(cache.numpy()[::3], 0)


def test_machine_code_takes_the_calls_on_a_gpu(gpu: NullCuda) -> None:
    append = tw.kernel(KERNELS[0].python)
    cache = tw.to_device(np.zeros((4, 8), np.float32), "cuda")
    row = tw.to_device(np.arange(8, dtype=np.float32), "cuda")
    append(cache, row, 0)
    calls = append.runner.by_kind["cuda"]
    assert len(calls.native.launchers) == 1
    append(cache, row, 1)
    assert calls.native.last is not None
    fixed = cache[:]
    fixed.readonly = True
    with pytest.raises(tw.UserError, match=r"TW018.*'cache' is read-only"):
        append(fixed, row, 2)
    np.testing.assert_array_equal(cache.numpy()[2:], 0)


# -- PyTorch --------------------------------------------------------------------------------------------------------


def test_tensors_are_written_where_they_lie() -> None:
    torch: Any = pytest.importorskip("torch")
    cache = torch.zeros(4, 5, dtype=torch.bfloat16)
    append(cache, torch.arange(5, dtype=torch.bfloat16), 2)
    assert cache[2].tolist() == [0, 1, 2, 3, 4]
    assert cache[[0, 1, 3]].abs().sum() == 0
    x = torch.arange(6.0)
    double(x[1::2])
    assert x.tolist() == [0, 2, 2, 6, 4, 10]
    with pytest.raises(tw.UserError, match=r"TW018.*'a' and 'b' share memory"):
        swap(x[:3], x[1:4])
    with pytest.raises(tw.TilewrightError):
        double(torch.ones(3, requires_grad=True))


# -- export ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are made for Linux")
def test_exported_functions_write_in_place(tmp_path: Path) -> None:
    cache, row = np.zeros((4, 5), np.float32), np.arange(5, dtype=np.float32)
    tw.export(append, cache, row, 1, folder=tmp_path)
    header = (tmp_path / "append.h").read_text()
    assert "int32_t append(float *cache, const float *row, int64_t position" in header
    assert "cache: f32[" in header
    assert "written in place" in header
    text = """
import numpy as np
from append import append
cache, row = np.zeros((4, 5), "f4"), np.arange(5, dtype="f4")
assert append(cache, row, 2) is None
assert (cache[2] == row).all() and (cache[[0, 1, 3]] == 0).all()
fixed = cache.copy()
fixed.flags.writeable = False
for arguments in ((fixed, row, 1), (cache, cache[1], 0), (cache, row, 9)):
    try:
        append(*arguments)
    except (ValueError, IndexError) as error:
        print(error)
assert (cache[[0, 1, 3]] == 0).all()
"""
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "'cache' is read-only, and the function writes to it"
    assert lines[1] == "'cache' is written in place and shares memory with 'row'"
    assert "append writes 'cache' outside its extent on axis 0" in lines[2]


# -- ZynML ----------------------------------------------------------------------------------------------------------

APPEND = """
compute(inout cache, row, position) {
    for j in 0..n: cache[position, j] = row[j]
}
"""

STEP = """
pipeline step(cache, x, position):
    let twice = compute(cache) { for i in 0..r, j in 0..n: out[i, j] = cache[i, j] * 2 }
    compute(inout cache, x, position) { for j in 0..n: cache[position, j] = x[j] }
    return twice + cache
let y = step(cache, x, position)
"""

SEVERAL = """
let total = compute(inout cache, row) {
    for i in 0..rows, j in 0..n:
        cache[i, j] += row[j]
        out[i, j] = cache[i, j] * 2
}
"""


@pytest.mark.parametrize("device", ["cpu", "emulator", CUDA])
def test_blocks_of_zynml_write_in_place(device: str) -> None:
    append, step, several = (tw.load(text) for text in (APPEND, STEP, SEVERAL))
    for turn in range(4):  # the second run would be recorded, and the third replayed, if nothing were written in place
        cache, row = np.zeros((3, 4), np.float32), np.arange(4, dtype=np.float32)
        assert append.run(cache=cache, row=row, position=turn % 3, device=device) == {}
        np.testing.assert_array_equal(cache[turn % 3], row)
        assert np.count_nonzero(cache) == 3
        cache = np.ones((2, 3), np.float32)
        y = step.run(cache=cache, x=np.full(3, 5, np.float32), position=1, device=device)["y"]
        np.testing.assert_array_equal(cache, [[1, 1, 1], [5, 5, 5]])
        np.testing.assert_array_equal(y, [[3, 3, 3], [7, 7, 7]])  # what was computed before does not see the new row
        cache = np.ones((2, 3), np.float32)
        total = several.run(cache=cache, row=np.arange(3, dtype=np.float32), device=device)["total"]
        np.testing.assert_array_equal(cache, [[1, 2, 3]] * 2)
        np.testing.assert_array_equal(total, cache * 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute(inout x) { for i in 0..n: out[i] = x[i] }", "TW017.*'x' is to be written in place, and nothing is written to it"),
        ("let y = f(inout x)", "TW001.*'inout' in a call"),
        ("compute(inout x, x) { for i in 0..n: x[i] = 0.0 }", "TW010.*'x' is given twice"),
        ("compute(x) { for i in 0..n: x[i] = 0.0 }", "TW015.*'x' is not an output and cannot be written"),
        ("compute(inout x) { @kernel sort\n for i in 0..n: yield x[i] }", "TW012.*writes 'x' in place"),
        ('compute(inout x) { @device(["cpu", "cpu"])\n @parallel(data)\n for i in 0..n: x[i] = 0.0 }', "TW016.*writes 'x' in place"),
    ],
)
def test_wrong_blocks(text: str, message: str) -> None:
    x = np.ones(4, np.float32)
    with pytest.raises(tw.UserError, match=message):
        tw.load(text).run(x=x)
    np.testing.assert_array_equal(x, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_that_only_write_in_place_stay_when_others_are_fused(device: str) -> None:
    x, y = np.zeros(5, np.float32), np.arange(33, dtype=np.float32)
    assert filled_beside_a_sum(x, y, device=device) == y.sum()
    np.testing.assert_array_equal(x, 7)


def test_inout_is_a_name_elsewhere() -> None:
    assert tw.load("let inout = 3\nlet b = max(inout, 1)").run()["b"] == 3


def test_the_formatter_knows_the_word() -> None:
    assert format_text("compute( inout   cache,row ){\n for i in 0..n:  cache[i]=row[i]\n}\n") == "compute(inout cache, row) {\n    for i in 0..n: cache[i] = row[i]\n}\n"


class Point(tw.State):
    x: tw.f32
    n: tw.i32


@tw.kernel
def raised(x: tw.InOut[tw.f32], by: float) -> None:
    for i in tw.grid(len(x)):
        x[i] += by


@tw.kernel
def raised_text(x: "tw.InOut[tw.f32]", by: float) -> None:  # noqa: UP037
    for i in tw.grid(len(x)):
        x[i] += by


@tw.kernel
def raised_points(x: tw.InOut[Point], by: float) -> None:
    for i in tw.grid(len(x)):
        x[i].x += by


@pytest.mark.parametrize("device", DEVICES)
def test_a_dtype_in_the_annotation(device: str) -> None:
    """`tw.InOut[tw.f32]`, as a text too, and of structs: it is in place, and another dtype is refused."""
    for kernel in (raised, raised_text):
        x = np.arange(5, dtype=np.float32)
        kernel(x, 2.0, device=device)
        assert x.tolist() == [2, 3, 4, 5, 6]
        with pytest.raises(tw.TilewrightError, match="must be f32"):
            kernel(x.astype(np.float64), 2.0, device=device)
    points = np.zeros(3, Point.dtype)
    raised_points(points, 2.0, device=device)
    assert points["x"].tolist() == [2, 2, 2]
    assert points["n"].tolist() == [0, 0, 0]
