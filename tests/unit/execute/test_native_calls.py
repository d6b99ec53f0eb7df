"""Calls that machine code takes on null GPUs: which ones it takes, what it hands on, and that both ways give the same."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed
from tilewright.base import dtypes
from tilewright.base.errors import DeviceError, UserError
from tilewright.device_kinds.cuda import native_calls
from tilewright.device_kinds.cuda.calls import CudaCalls
from tilewright.runtime.core import streams
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda import launcher as cuda_launcher
from tilewright.runtime.exchange import torch_tensors
from tilewright.runtime.memory.device_memory import HOST

pytestmark = pytest.mark.requires("cpu")


def make_axpy() -> Any:
    @tw.kernel
    def axpy(x: tw.Array, y: tw.Array, a: float) -> tw.Array:
        out = tw.empty(x.shape, x.dtype)
        for i in range(x.shape[0]):
            out[i] = a * x[i] + y[i]
        return out

    return axpy


def make_turned() -> Any:
    """Each element depends on another one: `out=` must not be the input."""

    @tw.kernel
    def turned(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in range(n):
            out[i] = x[n - 1 - i]
        return out

    return turned


def make_both() -> Any:
    @tw.kernel
    def both(x: tw.Array, n: int, flag: bool) -> tuple[tw.Array, tw.Array]:
        up = tw.empty(x.shape, x.dtype)
        down = tw.empty(x.shape, x.dtype)
        for i in range(x.shape[0]):
            up[i] = x[i] + n if flag else x[i]
            down[i] = x[i] - n
        return up, down

    return both


def make_share() -> Any:
    """Two launches with scratch between them."""

    @tw.kernel
    def share(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        total = 0.0
        for i in tw.grid(n):
            total += x[i]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] / total
        return out

    return share


def make_product() -> Any:
    @tw.kernel
    def product(a: tw.Array, b: tw.Array) -> tw.Array:
        n, k = a.shape
        _, m = b.shape
        out = tw.empty((n, m), a.dtype)
        for i, j in tw.grid(n, m):
            total = 0.0
            for p in tw.grid(k):
                total += a[i, p] * b[p, j]
            out[i, j] = total
        return out

    return product


@contextmanager
def ways() -> Iterator[list[str]]:
    """The calls that took the general path inside, by the kernel's name."""
    seen: list[str] = []
    original = CudaCalls.run

    def run(self: CudaCalls, *args: object) -> object:
        seen.append(self.function.name)
        return original(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(CudaCalls, "run", run):
        yield seen


def floats(*values: float, device: str = "cuda") -> Any:
    return tw.to_device(np.array(values, np.float32), device)


@pytest.fixture
def driver() -> Iterator[Any]:
    with installed(mode="lazy") as made:
        yield made
    assert made.violations == []
    assert made.kernel_errors == []


def test_the_second_call_is_machine_code(driver: Any) -> None:
    axpy, x, y, out = make_axpy(), floats(1, 2, 3), floats(10, 20, 30), floats(0, 0, 0)
    with ways() as general:
        assert axpy(x, y, 2.0, out=out) is out
        assert type(axpy.entry).__name__ == "builtin_function_or_method"
        assert axpy(x, y, 3.0, out=out) is out
        assert out.numpy().tolist() == [13, 26, 39]
        assert axpy(y, x, -1.0, out=out) is out
        assert out.numpy().tolist() == [-9, -18, -27]
    assert general == ["axpy"]


def test_new_results(driver: Any) -> None:
    axpy, x, y = make_axpy(), floats(1, 2, 3), floats(10, 20, 30)
    with ways() as general:
        results = [axpy(x, y, float(a)) for a in range(4)]
        assert [r.numpy().tolist() for r in results] == [[10 + a, 20 + 2 * a, 30 + 3 * a] for a in range(4)]
    assert general == ["axpy"]
    assert len({r.pointer for r in results}) == 4
    assert axpy(results[0], results[1], 1.0).numpy().tolist() == [21, 42, 63]


def test_every_shape_has_its_form(driver: Any) -> None:
    axpy = make_axpy()
    pairs = [(floats(*range(n)), floats(*[1] * n)) for n in (3, 8, 64, 200, 1024)]
    with ways() as general:
        for _ in range(3):
            for x, y in pairs:
                assert axpy(x, y, 2.0).numpy().tolist() == [2 * i + 1 for i in range(x.shape[0])]
    assert general == ["axpy"] * len(pairs)


def test_views_dtypes_and_alignment_have_forms_of_their_own(driver: Any) -> None:
    axpy, long = make_axpy(), tw.to_device(np.arange(16, dtype=np.float32), "cuda")
    doubles = tw.to_device(np.arange(8.0), "cuda")
    cases = [(long[:8], [3.0 * i for i in range(8)]), (long[::2], [6.0 * i for i in range(8)]),
             (long[1:9], [3.0 * i + 3 for i in range(8)]),
             (doubles, [3.0 * i for i in range(8)]), (long[7::-1], [21.0 - 3 * i for i in range(8)])]  # fmt: skip
    with ways() as general:
        for _ in range(2):
            for x, expected in cases:
                assert axpy(x, x, 2.0).numpy().tolist() == expected
    assert general == ["axpy"] * len(cases)


def make_shaped() -> Any:
    @tw.kernel
    def shaped(x: tw.Array, n: int, bias: tw.Array | None = None, *, step: int = 1, scale: float = 2.0, plus: int = 0) -> tw.Array:
        m = n // step
        out = tw.empty((m,), x.dtype)
        for i in tw.grid(m):
            v = x[i * step] * scale + plus
            if bias is not None:
                v += bias[i]
            out[i] = v
        return out

    return shaped


def test_numbers_that_shape_results_have_forms_as_extents_have(driver: Any) -> None:
    shaped, x = make_shaped(), floats(*range(16))
    with ways() as general:
        for _ in range(3):
            for n, step in ((16, 1), (12, 2), (3, 3)):
                assert shaped(x, n, step=step).numpy().tolist() == [2.0 * i * step for i in range(n // step)]
        for plus in range(5):  # a number that shapes nothing is not looked at
            assert shaped(x, 16, plus=plus, scale=1.0).numpy().tolist() == [float(i + plus) for i in range(16)]
    assert general == ["shaped"] * 3
    with pytest.raises(UserError, match="an extent cannot be negative: n // step is -1"):
        shaped(x, -1)
    with pytest.raises(UserError, match=r"index i [*] step of 'x' reaches 16, but axis 0 has extent 16"):
        shaped(x, 17)
    assert shaped(x, 16).numpy().tolist() == [2.0 * i for i in range(16)]


def test_optional_arrays_keywords_and_defaults_are_machine_code(driver: Any) -> None:
    shaped, x, one = make_shaped(), floats(*range(4)), floats(1, 1, 1, 1)
    with ways() as general:
        for _ in range(2):
            assert shaped(x, 4).numpy().tolist() == [0, 2, 4, 6]
            assert shaped(x, 4, one).numpy().tolist() == [1, 3, 5, 7]
            assert shaped(bias=one, n=4, x=x, scale=1.0).numpy().tolist() == [1, 2, 3, 4]
            assert shaped(x, n=4, bias=None).numpy().tolist() == [0, 2, 4, 6]
            given = floats(0, 0, 0, 0)
            assert shaped(x, 4, scale=3.0, out=given) is given
            assert given.numpy().tolist() == [0, 3, 6, 9]
    assert general == ["shaped"] * 3
    with pytest.raises(UserError, match=r"shaped takes 3 argument\(s\) by position \(x, n, bias\), got 4"):
        shaped(x, 4, one, 1)


def test_several_results_and_all_kinds_of_numbers(driver: Any) -> None:
    both, x = make_both(), floats(1, 2)
    first, second = floats(0, 0), floats(0, 0)
    with ways() as general:
        for n, flag in ((3, True), (-4, False), (1 << 40, True)):
            up, down = both(x, n, flag)
            expected = [np.float32(v) + np.float32(n) if flag else v for v in (1, 2)]
            assert up.numpy().tolist() == expected
            assert down.numpy().tolist() == [np.float32(v) - np.float32(n) for v in (1, 2)]
            given = (first, second)
            assert both(x, n, flag, out=given) is given
            assert first.numpy().tolist() == expected
    assert general == ["both"] * 2


def test_numbers_machine_code_cannot_convert(driver: Any) -> None:
    """A number of bf16 is rounded by Python, once for each value in a row."""
    axpy = make_axpy()
    x = tw.to_device(np.arange(4).astype(ml_dtypes.bfloat16), "cuda")
    with ways() as general:
        for a in (0.0, 1.0, 1.0, 3.5, -2.0):
            found = axpy(x, x, a).numpy().astype(np.float32)
            assert found.tolist() == [i * (a + 1) for i in range(4)]
    assert general == ["axpy"]


@pytest.mark.parametrize("value", [np.float32(2.0), 2, True, np.float64(2.0)])
def test_other_kinds_of_numbers_are_other_calls(driver: Any, value: Any) -> None:
    axpy, x = make_axpy(), floats(1, 2)
    axpy(x, x, 2.0)
    for _ in range(2):
        assert axpy(x, x, value).numpy().tolist() == [float(value) * v + v for v in (1, 2)]


def test_an_integer_too_large(driver: Any) -> None:
    both, x = make_both(), floats(1, 2)
    both(x, 1, True)
    with pytest.raises(UserError, match="which no 64-bit integer holds"):
        both(x, 1 << 63, True)
    assert both(x, -(1 << 63), True)[0].numpy().tolist() == [-float(1 << 63)] * 2


def test_a_freed_array(driver: Any) -> None:
    axpy, x, y, out = make_axpy(), floats(1, 2), floats(1, 2), floats(0, 0)
    axpy(x, y, 1.0, out=out)
    before = len(driver.calls("cuLaunchKernel"))
    for arguments in ((x, y, out), (y, x, out), (y, y, x)):
        if not x.owner.freed:
            x.free()
        with pytest.raises(DeviceError, match="used after it was freed"):
            axpy(arguments[0], arguments[1], 1.0, out=arguments[2])
    assert len(driver.calls("cuLaunchKernel")) == before


def test_a_read_only_result(driver: Any) -> None:
    axpy, x, out = make_axpy(), floats(1, 2), floats(0, 0)
    axpy(x, x, 1.0, out=out)
    out.readonly = True
    with pytest.raises(UserError, match="writable, contiguous"):
        axpy(x, x, 1.0, out=out)


def test_results_of_another_form(driver: Any) -> None:
    axpy, x, out = make_axpy(), floats(1, 2), floats(0, 0)
    axpy(x, x, 1.0, out=out)
    for wrong in (floats(0, 0, 0), tw.to_device(np.zeros(2), "cuda"), (out, out), [out, out]):
        with pytest.raises(UserError, match="TW018"):
            axpy(x, x, 1.0, out=wrong)


def test_results_that_overlap_inputs(driver: Any) -> None:
    turned, whole = make_turned(), tw.to_device(np.arange(12, dtype=np.float32), "cuda")
    apart = tw.to_device(np.zeros(8, np.float32), "cuda")
    turned(whole[:8], out=apart)
    turned(whole[:8], out=whole[:8])
    assert whole.numpy().tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 8, 9, 10, 11]
    turned(whole[:8], out=whole[4:])
    assert whole.numpy().tolist() == [7, 6, 5, 4, 0, 1, 2, 3, 4, 5, 6, 7]


def test_the_same_array_twice_says_nothing_about_other_calls(driver: Any) -> None:
    """Learnt from `f(x, x, out=y)`; then the result is the first argument alone."""

    @tw.kernel
    def mixed(x: tw.Array, y: tw.Array) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in range(n):
            out[i] = x[n - 1 - i] + y[i]
        return out

    x, y, z = floats(1, 2, 3, 4), floats(0, 0, 0, 0), floats(10, 20, 30, 40)
    mixed(x, x, out=y)
    mixed(x, z, out=x)
    assert x.numpy().tolist() == [14, 23, 32, 41]


def test_names_of_devices_take_the_general_path(driver: Any) -> None:
    axpy, x, y = make_axpy(), floats(1, 2), floats(3, 4)
    axpy(x, y, 1.0)
    with ways() as general:
        assert axpy(x, a=2.0, y=y).numpy().tolist() == [5, 8]
        assert axpy(x, y, 2.0, device="cuda").numpy().tolist() == [5, 8]
        with pytest.raises(UserError, match="is missing 'a'"):
            axpy(x, y)
        with pytest.raises(UserError, match="takes 3 argument"):
            axpy(x, y, 1.0, 2.0)
    assert general == ["axpy"]


def test_the_cpu_and_the_gpu_in_turn(driver: Any) -> None:
    axpy, x, host = make_axpy(), floats(1, 2), np.array([1, 2], np.float32)
    axpy(x, x, 1.0), axpy(host, host, 1.0)
    with ways() as general:
        for a in (1.0, 2.0, 3.0):
            assert axpy(x, x, a).numpy().tolist() == [a + 1, 2 * a + 2]
            assert axpy(host, host, a).tolist() == [a + 1, 2 * a + 2]
            tw.set_default_device("cpu")
    assert general == []


def test_a_kernel_for_one_device_alone(driver: Any) -> None:
    axpy, x = make_axpy(), floats(1, 2)
    fixed = tw.Kernel(axpy.python, device="cpu")
    fixed(x, x, 1.0, device="cuda")
    result = fixed(x, x, 2.0)
    assert isinstance(result, np.ndarray)
    assert result.tolist() == [3, 6]


# -- streams and contexts -----------------------------------------------------------------------------------------------


def test_the_stream_a_thread_named(driver: Any) -> None:
    axpy, x, y, out = make_axpy(), floats(1, 2), floats(3, 4), floats(0, 0)
    device = cuda.devices()[0]
    axpy(x, y, 1.0)
    stream = device.create_stream()
    with ways() as general, streams.use(0, stream):
        result = axpy(x, y, 2.0)
        assert set(axpy(x, y, 2.0, out=out).owner.users) == {stream}
        assert floats(0, 0).owner.stream == stream
        assert result.owner.stream == stream
        assert set(x.owner.users) == {stream}
    assert [args[8] for args in driver.calls("cuLaunchKernel")][-2:] == [stream, stream]
    assert result.numpy().tolist() == [5, 8]
    assert general == ["axpy"]  # with out=, for the first time
    axpy(x, y, 2.0)
    assert not driver.calls("cuLaunchKernel")[-1][8]


def test_memory_that_is_no_streams_own(driver: Any) -> None:
    """Managed and pinned memory has a home that is not a stream."""
    axpy, device = make_axpy(), cuda.devices()[0]
    x = device.empty_managed((2,), dtypes.f32)
    x.copy_from(np.array([1, 2], np.float32))
    assert x.owner.stream == HOST
    with ways() as general:
        for a in (1.0, 2.0, 3.0):
            assert axpy(x, x, a).numpy().tolist() == [a + 1, 2 * a + 2]
    assert general == ["axpy"]
    assert set(x.owner.users) == {0}


def test_another_thread_named_a_stream(driver: Any) -> None:
    axpy, x = make_axpy(), floats(1, 2)
    device = cuda.devices()[0]
    axpy(x, x, 1.0)
    stream = device.create_stream()
    with streams.use(0, stream):
        other = threading.Thread(target=lambda: axpy(x, x, 1.0))
        other.start()
        other.join()
    assert not driver.calls("cuLaunchKernel")[-1][8]


def test_while_something_special_goes_on(driver: Any) -> None:
    axpy, x = make_axpy(), floats(1, 2)
    axpy(x, x, 1.0)
    with ways() as general, streams.special():
        axpy(x, x, 1.0)
    assert general == ["axpy"]


def test_another_context_is_current(driver: Any) -> None:
    """As on a new thread, or where another library made its own."""
    axpy, x = make_axpy(), floats(1, 2)
    axpy(x, x, 1.0)
    results: list[object] = []
    with ways() as general:
        thread = threading.Thread(target=lambda: results.extend(axpy(x, x, a).numpy().tolist() for a in (1.0, 2.0, 3.0)))
        thread.start()
        thread.join()
    assert results == [[2, 4], [3, 6], [4, 8]]
    assert general == ["axpy"]  # after which the context is the thread's own


def test_devices_do_not_mix() -> None:
    with installed(count=2) as driver:
        axpy = make_axpy()
        x, y = floats(1, 2, device="cuda:0"), floats(1, 2, device="cuda:1")
        for _ in range(2):
            assert axpy(x, x, 1.0).device.ordinal == 0
            assert axpy(y, y, 1.0).device.ordinal == 1
        before = len(driver.calls("cuLaunchKernel"))
        with pytest.raises(DeviceError, match=r"the array is on cuda:1, but was given to cuda:0"):
            axpy(x, x, 1.0, out=y)
        with pytest.raises((DeviceError, UserError)):
            axpy(x, y, 1.0)
        assert len(driver.calls("cuLaunchKernel")) == before
    assert driver.violations == []


# -- other libraries ------------------------------------------------------------------------------------------------------


class FakeCupy(ModuleType):
    """As much of CuPy as a call needs, on device arrays of ours."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.stream, self.taken, self.adopted = 0, 0, 0
        self.cuda = SimpleNamespace(
            Device=lambda ordinal: contextlib.nullcontext(),
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
            alloc=self.alloc,
        )

        class ndarray:
            def __init__(self, array: Any) -> None:
                self.array = array

            @property
            def __cuda_array_interface__(self) -> dict[str, object]:
                return dict(self.array.__cuda_array_interface__, stream=None)

        ndarray.__module__ = "cupy"
        self.ndarray = ndarray

    def alloc(self, nbytes: int) -> object:
        self.taken += nbytes
        block = cuda.devices()[0].pool.take(nbytes, self.stream)
        return SimpleNamespace(ptr=block.pointer, block=block)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> object:
        known = dtypes.from_numpy(np.dtype(dtype))
        assert known is not None
        return self.ndarray(cuda.devices()[0].empty(shape, known, self.stream))

    def from_dlpack(self, array: Any) -> object:
        self.adopted += 1
        return self.ndarray(array)


@pytest.fixture
def cupy(driver: Any, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    made = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


def test_results_are_of_the_library_of_the_inputs(cupy: FakeCupy, driver: Any) -> None:
    axpy, share, own = make_axpy(), make_share(), floats(1, 2, 3)
    x = cupy.ndarray(own)
    cupy.stream = cuda.devices()[0].create_stream()
    with ways() as general:
        for a in (1.0, 2.0):
            found = axpy(x, own, a)
            assert isinstance(found, cupy.ndarray)
            assert found.array.numpy().tolist() == [a + 1, 2 * a + 2, 3 * a + 3]
            assert driver.calls("cuLaunchKernel")[-1][8] == cupy.stream
            out = cupy.empty((3,), np.float32)
            assert axpy(own, own, a, out=out) is out
            assert isinstance(axpy(own, own, a), type(own))
    assert general == ["axpy"] * 5
    big = cupy.ndarray(tw.to_device(np.ones(4096, np.float32), "cuda"))
    assert share(big).array.numpy()[7] == np.float32(1 / 4096)
    assert cupy.taken > 0


def test_a_graph_keeps_the_results_of_other_libraries(cupy: FakeCupy) -> None:
    axpy, own = make_axpy(), floats(1, 2, 3)
    x = cupy.ndarray(own)
    axpy(x, x, 1.0)
    with tw.capture() as graph:
        found = axpy(x, x, 2.0)
    assert isinstance(found, cupy.ndarray)
    assert cupy.adopted == 1
    graph.replay()
    cuda.devices()[0].synchronize()
    assert found.array.numpy().tolist() == [3, 6, 9]


# -- programs with more to them -------------------------------------------------------------------------------------------


def test_scratch_memory(driver: Any) -> None:
    share = make_share()
    arrays = [tw.to_device(np.arange(1, 4097, dtype=np.float32) * k, "cuda") for k in (1, 2)]
    with ways() as general:
        for _ in range(3):
            for x in arrays:
                np.testing.assert_allclose(share(x).numpy(), np.arange(1, 4097) / (4096 * 4097 / 2), rtol=1e-5)
    assert general == ["share"]
    del x, arrays
    gc.collect()
    device = cuda.devices()[0]
    device.synchronize()
    assert device.pool.usage()[0] == 0


def test_tensor_maps_of_many_addresses(driver: Any) -> None:
    product = make_product()
    generator = np.random.default_rng(3)
    a, b = (generator.integers(-2, 3, (128, 128)).astype(ml_dtypes.bfloat16) for _ in range(2))
    expected = a.astype(np.float32) @ b.astype(np.float32)
    left, right = tw.to_device(a, "cuda"), tw.to_device(b, "cuda")
    outs = [tw.to_device(np.zeros((128, 128), ml_dtypes.bfloat16), "cuda") for _ in range(4)]
    with ways() as general:
        for _ in range(2):
            for out in outs:
                product(left, right, out=out)
        encoded = len(driver.calls("cuTensorMapEncodeTiled"))
        for out in outs:
            product(left, right, out=out)
        assert len(driver.calls("cuTensorMapEncodeTiled")) == encoded
        for out in outs:
            np.testing.assert_array_equal(out.numpy().astype(np.float32), expected)
    assert general == ["product"]
    assert encoded > 0


def test_early_launches_and_much_shared_memory(driver: Any) -> None:
    """The null driver holds each launch against its rule: grid, shared memory, attributes, maps."""
    schedule = "family=wgmma m=128 n=64 k=64 stages=4 math_warpgroups=2 pdl=1"
    product = tw.Kernel(make_product().python, schedule=schedule)
    a = tw.to_device(np.eye(256, dtype=ml_dtypes.bfloat16), "cuda")
    with ways() as general:
        for factor in (1, 2, 3):
            b = tw.to_device(np.full((256, 256), factor, ml_dtypes.bfloat16), "cuda")
            assert (product(a, b).numpy() == factor).all()
    assert general == ["product"]
    (launch,) = product.last.launches
    assert launch.dependent and launch.shared_bytes > 48 << 10
    assert len(driver.calls("cuLaunchKernelEx")) == 3


def test_more_addresses_than_the_table_has_room_for(driver: Any) -> None:
    from tilewright.base import launch_abi

    product, one = make_product(), np.eye(64, dtype=ml_dtypes.bfloat16)
    a = tw.to_device(one * 2, "cuda")
    several = [tw.to_device(one * k, "cuda") for k in range(1, 2 * launch_abi.MAP_SETS * launch_abi.MAP_WAYS)]
    product(a, a)
    with ways() as general:
        out = tw.to_device(one, "cuda")
        product(a, a, out=out)
        for k, b in enumerate(several, 1):
            product(a, b, out=out)
            if k % 16 == 0:
                assert out.numpy()[0, 0] == 2 * k
    assert general == ["product"]


# -- errors and accounts ---------------------------------------------------------------------------------------------------


def test_a_launch_that_fails(driver: Any) -> None:
    axpy, x, out = make_axpy(), floats(1, 2), floats(0, 0)
    axpy(x, x, 1.0, out=out)
    axpy(x, x, 1.0)
    device = cuda.devices()[0]
    gc.collect()
    held = device.pool.usage()[0]
    driver.fail["cuLaunchKernel"] = 1
    with ways() as general:
        for call in (lambda: axpy(x, x, 1.0, out=out), lambda: axpy(x, x, 1.0)):
            with pytest.raises(DeviceError, match=r"cuLaunchKernel failed with .*kernel 'tw_axpy_0', grid \(1, 1, 1\)"):
                call()
    del driver.fail["cuLaunchKernel"]
    assert general == []
    gc.collect()
    assert device.pool.usage()[0] == held
    assert axpy(x, x, 1.0).numpy().tolist() == [2, 4]


def test_no_memory_for_a_result(driver: Any) -> None:
    axpy, x = make_axpy(), floats(*range(1000))
    axpy(x, x, 1.0)
    device = cuda.devices()[0]
    with mock.patch.object(device.pool, "limit", 1):
        gc.collect()
        with pytest.raises(DeviceError, match="TW031"):
            assert [axpy(x, x, 1.0) for _ in range(100)]
    assert axpy(x, x, 1.0).numpy()[3] == 6


def test_kernels_under_way(driver: Any) -> None:
    axpy, share, x = make_axpy(), make_share(), floats(*range(1, 9))
    device = cuda.devices()[0]
    axpy(x, x, 1.0), share(x)
    device.synchronize()
    assert device.launched == {}
    axpy(x, x, 1.0)
    assert list(device.launched) == [(0, "tw_axpy_0")]
    stream = device.create_stream()
    with streams.use(0, stream):
        axpy(x, x, 1.0)
    assert set(device.launched) == {(stream, "tw_axpy_0"), (-1, "tw_axpy_0")}
    device.synchronize(stream)
    assert set(device.launched) == {(-1, "tw_axpy_0")}
    del axpy
    gc.collect()
    assert set(device.launched) == {(-1, "tw_axpy_0")}
    device.synchronize()
    assert device.launched == {}


def test_waiting(driver: Any) -> None:
    axpy, x = make_axpy(), floats(1, 2)
    device = cuda.devices()[0]
    axpy(x, x, 1.0)
    device.synchronize()
    before = len(driver.calls("cuCtxSynchronize"))
    with mock.patch.object(device, "enter", side_effect=AssertionError("machine code waits")):
        axpy(x, x, 1.0)
        device.synchronize()
    assert len(driver.calls("cuCtxSynchronize")) == before + 1
    assert device.launched == {}
    axpy(x, x, 1.0)
    driver.fail["cuCtxSynchronize"] = 700
    with pytest.raises(DeviceError, match=r"TW032.*cuCtxSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS.*tw_axpy_0"):
        device.synchronize()
    del driver.fail["cuCtxSynchronize"]
    with pytest.raises(DeviceError, match="is lost to this process"):
        device.synchronize()


def test_waiting_on_a_thread_without_a_context(driver: Any) -> None:
    axpy, x = make_axpy(), floats(1, 2)
    axpy(x, x, 1.0)
    device, errors = cuda.devices()[0], []

    def work() -> None:
        try:
            device.synchronize()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert device.launched == {}


def test_what_ran_last(driver: Any) -> None:
    axpy, x, host = make_axpy(), floats(1, 2), np.ones(2, np.float32)
    doubles = tw.to_device(np.ones(2), "cuda")
    axpy(x, x, 1.0)
    single = axpy.last
    axpy(doubles, doubles, 1.0)
    double = axpy.last
    assert single is not double
    axpy(x, x, 1.0)
    assert axpy.last is single
    axpy(doubles, doubles, 1.0)
    assert axpy.last is double
    axpy(host, host, 1.0)
    assert axpy.last.kind == "object"
    axpy.forget_programs()
    assert axpy.last is None


# -- lives -----------------------------------------------------------------------------------------------------------------


def test_kernels_end(driver: Any) -> None:
    axpy, x = make_axpy(), floats(1, 2)
    for a in (x, x[:1]):
        axpy(a, a, 1.0)
        axpy(a, a, 1.0, out=floats(*[0] * a.shape[0]))
    seen = weakref.ref(axpy)
    launchers = [weakref.ref(item) for item in axpy.runner.by_kind["cuda"].native.launchers]
    assert len(launchers) == 2
    del axpy
    gc.collect()
    assert seen() is None
    assert all(item() is None for item in launchers)


def test_arrays_are_not_held(driver: Any) -> None:
    axpy, x = make_axpy(), floats(1, 2)
    seen = weakref.ref(x.owner) if hasattr(x.owner, "__weakref__") else None
    axpy(x, x, 1.0)
    axpy(x, x, 1.0)
    device = cuda.devices()[0]
    del x
    gc.collect()
    assert device.pool.usage()[0] == 0
    assert seen is None or seen() is None


def test_more_kinds_of_calls_than_are_kept(driver: Any) -> None:
    axpy = make_axpy()
    with mock.patch.object(native_calls, "MOST_PATTERNS", 2), mock.patch.object(native_calls, "MOST_SPECIALISATIONS", 3):
        for count in range(1, 12):
            x = floats(*range(count))
            calls: list[Callable[[], Any]] = [
                lambda x=x: axpy(x, x, 1.0),
                lambda x=x: axpy(x, x, 1),
                lambda x=x: axpy(x, x, 1.0, out=floats(*[0] * x.shape[0])),
            ]
            for call in (*calls, *calls):
                assert call().numpy().tolist() == [2 * i for i in range(count)]
        assert len(axpy.runner.by_kind["cuda"].native.launchers) <= 2


def test_more_forms_than_are_kept(driver: Any) -> None:
    axpy = make_axpy()
    with mock.patch.object(native_calls, "MOST_SPECIALISATIONS", 4), ways() as general:
        arrays = [floats(*range(count)) for count in range(1, 11)]
        for x in arrays:
            for _ in range(2):
                assert axpy(x, x, 1.0).numpy().tolist() == [2 * i for i in range(x.shape[0])]
        assert general == ["axpy"] * 10
        (launcher,) = axpy.runner.by_kind["cuda"].native.launchers
        assert len(launcher.forms) == 2
        axpy(arrays[0], arrays[0], 1.0)
        assert len(general) == 11


def test_threads_share_a_kernel() -> None:
    with installed(mode="background", record=False) as driver:
        axpy = make_axpy()
        wrong: list[object] = []

        def work(number: int) -> None:
            try:
                n = 8 + number % 4
                x, y = floats(*[number] * n), floats(*range(n))
                out = floats(*[0] * n)
                for turn in range(20):
                    found = axpy(x, y, float(turn)) if turn % 2 else axpy(x, y, float(turn), out=out)
                    if found.numpy().tolist() != [turn * number + i for i in range(n)]:
                        wrong.append((number, turn))
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
    assert driver.violations == []


def test_what_is_known_of_pytorch_outlives_the_loading_of_the_engine() -> None:
    """The first kernel of a process that gets tensors may find what all launchers share not loaded yet."""
    functions = {f"aoti_torch_get_{question}": 8 for question in torch_tensors.QUESTIONS}
    access = torch_tensors.TensorAccess(SimpleNamespace, 16, 24, {**functions, "tilewright_requires_grad": 8}, 8)
    bound: dict[str, int] = {}
    with mock.patch.object(cuda_launcher, "tensor_access", return_value=access), mock.patch.object(cuda_launcher, "bind_symbol", bound.__setitem__):
        cuda_launcher.layout(True)
        known = dict(bound)
        cuda_launcher._bind()
    assert known["tilewright_tensor"] == id(SimpleNamespace)
    assert {name: bound[name] for name in known} == known
