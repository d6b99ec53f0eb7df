"""OpenCL and Vulkan devices through the public API: the gallery, arrays, streams, futures, launches, primitives, refusals. Skipped where there is no such device."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from gallery_cases import CONTRACTION_CASES, GALLERY_CASES
from kernel_table import CASES as TABLE
from kernel_table import Case
from simt_constructs import CASES as CONSTRUCTS
from simt_constructs import check as check_construct
from simt_kernels import Case as ExplicitCase
from simt_kernels import all_cases, assert_equal, outcome
from tilewright.base.errors import CompilerBug, DeviceError, TargetLimit, UserError
from tilewright.cli.main import cli
from tilewright.execute.devices import find_device, named_devices, own_memory
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.portable.waits import wait_blocked
from webgpu_cases import ROUNDS_TWICE, refusal
from zyn_cases import CASES as ZYN
from zyn_cases import Case as ZynProgram
from zyn_cases import close

CASES = {case.name: case for case in (*GALLERY_CASES, *CONTRACTION_CASES)}
DEVICES = [pytest.param(name, marks=pytest.mark.requires(name)) for name in ("opencl", "vulkan")]
on_each = pytest.mark.parametrize("device", DEVICES)


@tw.kernel
def scale(x: tw.Array, y: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        out[i] = x[i] * y[i]
    return out


@tw.kernel
def scatter(x: tw.Array, places: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.zeros((n,), tw.f32)
    for i in tw.grid(n):
        out[places[i]] = x[i]
    return out


@tw.gpu
def add_one(x: tw.GpuBuffer[tw.f32], n: tw.i32):  # type: ignore[no-untyped-def]
    i = tw.gpu_thread_id()
    if i < n:
        x[i] = x[i] + 1.0


def numbers(count: int = 100) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


@on_each
@pytest.mark.parametrize("name", CASES)
def test_gallery(name: str, device: str) -> None:
    case = CASES[name]
    for elements in (1, 77, 1000):
        case.check(device, case.arguments(elements))


@on_each
def test_arrays_go_there_and_back(device: str) -> None:
    host = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    x = tw.to_device(host, device)
    assert isinstance(x, DeviceArray)
    assert x.device.id == f"{device}:0"
    np.testing.assert_array_equal(x.numpy(), host)
    np.testing.assert_array_equal(x[1:4, ::2].numpy(), host[1:4, ::2])
    np.testing.assert_array_equal(x.T.copy().numpy(), host.T)
    x[2] = 7.0
    x[0, 1:3] = np.array([1.5, 2.5], np.float32)
    host[2], host[0, 1:3] = 7.0, [1.5, 2.5]
    np.testing.assert_array_equal(tw.to_device(x, "cpu"), host)
    np.testing.assert_array_equal(tw.array(x, tw.f16).numpy(), host.astype(np.float16))
    target = np.empty_like(host)
    tw.copy(target, x)
    np.testing.assert_array_equal(target, host)
    ticket = tw.copy(x, 2 * host, wait=False)
    assert ticket is not None
    ticket.wait()
    np.testing.assert_array_equal(x.numpy(), 2 * host)
    many = np.random.default_rng(1).standard_normal((40, 41)).astype(np.float32)
    np.testing.assert_array_equal(tw.to_device(many, device).T.copy().numpy(), many.T)  # more pieces than are copied one by one


@on_each
def test_calls_run_where_their_arrays_are(device: str) -> None:
    x = tw.to_device(numbers(), device)
    y = scale(x, x)
    assert isinstance(y, DeviceArray)
    np.testing.assert_array_equal(y.numpy(), numbers() ** 2)
    out = tw.allocate((100,), tw.f32, device)
    assert scale(x, y, out=out) is out
    np.testing.assert_array_equal(out.numpy(), numbers() ** 3)
    np.testing.assert_array_equal(scale(x[3:50], x[4:51]).numpy(), numbers()[3:50] * numbers()[4:51])  # not aligned
    np.testing.assert_array_equal(scale(x[::2], x[1::2]).numpy(), numbers()[::2] * numbers()[1::2])
    assert scale(x[:50], x[:50], out=x[10:60]) is not None
    np.testing.assert_array_equal(x[10:60].numpy(), numbers(50) ** 2)
    assert scale(numbers(0), numbers(0), device=device).shape == (0,)


@tw.kernel
def shifted(x: tw.Array, a: float, n: int) -> tw.Array:
    count = x.shape[0]
    out = tw.empty((count,), tw.f32)
    for i in tw.grid(count):
        out[i] = x[i] * tw.f32(a) + tw.f32(n)
    return out


@tw.kernel
def lengthened(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    n = x.shape[0]
    order = tw.empty((n,), tw.i32)
    magnitude = tw.empty((n,), tw.i64)
    for i in tw.grid(n):
        long = tw.i64(x[i])
        order[i] = tw.where(long < 0, 1, 0) + tw.where(long > 2, 2, 0) + tw.where(long <= -3, 4, 0) + tw.where(long >= 1, 8, 0) + tw.where(long == -1, 16, 0)
        magnitude[i] = abs(long)
    return order, magnitude


@on_each
@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "u4", "i8"])
def test_comparisons_of_numbers_made_longer(device: str, kind: str) -> None:
    """Drivers must not shorten these comparisons again, as Mesa did with a constant and the unsigned order."""
    x = np.resize(np.array([-5, -3, -1, 0, 1, 2, 3, 100], "i8").astype(kind), 1037)
    long = x.astype(np.int64)
    order, magnitude = lengthened(x, device=device)
    np.testing.assert_array_equal(order, (long < 0) + 2 * (long > 2) + 4 * (long <= -3) + 8 * (long >= 1) + 16 * (long == -1))
    np.testing.assert_array_equal(magnitude, abs(long))


@on_each
def test_launches_that_differ_in_one_argument(device: str) -> None:
    """Each of them gets its own numbers, arrays and sizes, whatever the launch before it had."""
    x, y = (tw.to_device(numbers(33) + k, device) for k in range(2))
    out = tw.allocate((33,), tw.f32, device)
    for array, a, n in ((x, 2.0, 1), (x, 2.0, 1), (y, 2.0, 1), (y, 3.0, 1), (y, 3.0, 2), (y, 0.0, 0), (y, -0.0, 0), (x, float("nan"), 0), (x, 2.0, 0)):
        got = shifted(array, a, n, out=out).numpy()
        want = (array.numpy() * np.float32(a) + np.float32(n)).astype(np.float32)
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(shifted(x[:7], 2.0, 0).numpy(), 2 * numbers(7))
    np.testing.assert_array_equal(shifted(x[4:11], 2.0, 0).numpy(), 2 * numbers(11)[4:])
    assert shifted(x[:0], 2.0, 0).shape == (0,)
    np.testing.assert_array_equal(shifted(x, 2.0, 0).numpy(), 2 * numbers(33))


@on_each
def test_memory_is_reused_and_given_back(device: str) -> None:
    runtime = own_memory(find_device(device))
    x = tw.to_device(numbers(1000), device)
    held = runtime.default_pool().in_use
    x.free()
    with pytest.raises(DeviceError, match="used after it was freed"):
        x.numpy()
    assert runtime.default_pool().in_use < held
    with pytest.raises(DeviceError, match=f"{device}:0"):
        tw.allocate((1 << 44,), tw.f32, device)


@on_each
def test_futures_streams_and_events(device: str) -> None:
    x = tw.to_device(numbers(), device)
    chained = scale(scale(x, x, asynchronous=True), x, asynchronous=True)
    np.testing.assert_array_equal(chained.result().numpy(), numbers() ** 3)
    one, other = tw.Stream(device), tw.Stream(device)
    with one:
        y = scale(x, x)
    other.wait(one.record())
    with other:
        z = scale(y, x)
    other.synchronize()
    assert other.done()
    np.testing.assert_array_equal(z.numpy(), numbers() ** 3)
    with tw.timed(device) as timer:
        scale(x, x)
    assert timer.milliseconds >= 0


@on_each
def test_explicit_kernels_and_primitives(device: str) -> None:
    x = tw.to_device(numbers(), device)
    for _ in range(2):
        tw.gpu_launch(add_one, 100, 32, x, 100)
    np.testing.assert_array_equal(x.numpy(), numbers() + 2)
    total = tw.gpu_reduce(x, 0.0, "sum")
    assert float(total.numpy()) == float((numbers() + 2).sum())
    np.testing.assert_allclose(tw.gpu_scan(x).numpy(), np.cumsum(numbers() + 2), rtol=1e-6)


@on_each
def test_an_index_outside_is_reported(device: str) -> None:
    with pytest.raises(UserError, match=r"scatter writes 'out' at index 700, but its extent there is 100") as caught:
        scatter(numbers(), np.where(numbers() == 13, 700, numbers()).astype(np.int64), device=device)
    assert "test_spirv_devices.py" in str(caught.value)
    np.testing.assert_array_equal(scatter(numbers(), numbers()[::-1].astype(np.int64), device=device), numbers()[::-1])  # the device goes on


@on_each
def test_what_it_cannot_do_is_refused(device: str) -> None:
    with pytest.raises(UserError, match=f"graphs cannot be captured on '{device}:0'"), tw.capture(device):
        pass
    with pytest.raises(UserError, match="has no pinned memory"):
        tw.allocate((3,), device=device, pinned=True)
    with pytest.raises(UserError, match="does not see host memory"):
        tw.to_device(numbers(), device, copy=False)


@on_each
def test_names(device: str) -> None:
    # A CPU that plays a GPU is not among the devices that programs choose from.
    assert f"{device}:0" in {found.id for found in (*tw.devices(), *named_devices())}
    assert not any(one.target.has("serial") for one in tw.devices() if one.kind == device)
    found = find_device(device)
    assert (found.kind, found.target.name) == (device, f"spirv-{device}")
    with pytest.raises(DeviceError, match=f"'{device}:9' is not present"):
        find_device(f"{device}:9")
    listed = CliRunner().invoke(cli, ["devices"], env={"COLUMNS": "200"})
    assert f"{device}:0" in listed.output and (found.id in {one.id for one in named_devices()}) == ("by name only" in listed.output and f"spirv-{device}" not in listed.output)


# -- drivers that fail ------------------------------------------------------------------------------------------------------


@on_each
def test_a_rejected_module_is_a_bug_with_its_code(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime: Any = own_memory(find_device(device))
    scale(numbers(), numbers(), device=device)
    assert scale.last is not None
    if device == "vulkan":  # Mesa takes anything, and ends the process

        def refuse(*given: object) -> None:
            raise runtime.vk.VkErrorInitializationFailed

        monkeypatch.setattr(runtime.vk, "vkCreateShaderModule", refuse)
    with pytest.raises(CompilerBug, match=rf"{device}:0 .* rejects the code of 'scale'") as caught:
        runtime.load(replace(scale.last, code=b"no SPIR-V at all"))
    place = Path(str(caught.value).rpartition(" is in ")[2].split()[0])
    assert place.read_bytes() == b"no SPIR-V at all"
    place.unlink()


@on_each
def test_waits_end_and_a_lost_device_says_so(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime: Any = own_memory(find_device(device))
    x = tw.to_device(numbers(), device)
    scale(x, x)
    monkeypatch.setenv("TILEWRIGHT_WATCHDOG", "1")
    if device == "vulkan":
        monkeypatch.setattr(runtime.commands, "reached", lambda: 0)
        with pytest.MonkeyPatch.context() as late:
            late.setattr(runtime.vk, "vkWaitSemaphores", _raising(runtime.vk.VkTimeout))
            with pytest.raises(DeviceError, match=r"vulkan:0 .*: the work of a stream was not done after 1 seconds"):
                x.numpy()
        monkeypatch.setattr(runtime.vk, "vkWaitSemaphores", _raising(runtime.vk.VkErrorDeviceLost))
    else:
        with pytest.MonkeyPatch.context() as late:
            late.setattr(type(runtime), "completed", lambda self, point: False)
            late.setattr("tilewright.runtime.opencl.device.wait_blocked", lambda block, *given: wait_blocked(lambda: time.sleep(2), *given))
            with pytest.raises(DeviceError, match=r"opencl:0 .*: the work of a stream was not done after 1 seconds"):
                x.numpy()
        monkeypatch.setattr(type(runtime), "failure", lambda self, point: "a kernel or copy failed with code -5")
    try:
        with pytest.raises(DeviceError):
            x.numpy()
        with pytest.raises(DeviceError, match=rf"{device}:0 .* cannot be used any more"):
            scale(x, x)
    finally:
        if device == "vulkan":
            runtime.commands.lost = ""
        else:
            runtime._lost = ""
        monkeypatch.undo()
    np.testing.assert_array_equal(x.numpy(), numbers())


def _raising(error: type[Exception]) -> Any:
    def call(*given: object) -> None:
        raise error

    return call


# -- the tables that every device runs ------------------------------------------------------------------------------------

WHOLE = os.environ.get("TILEWRIGHT_WHOLE_TABLE") == "1"
"""Whether all kernels of the table run, and not a sixth of them: a driver takes half a second for each."""
TWO_ROUNDINGS = {"modulo_f64", "power_f64"}
"""Kernels that count on an fma with one rounding. Vulkan promises none, and lavapipe has none."""
REFUSED = {("vulkan", "warps"): "spirv-vulkan cannot do vote where not every thread of the block comes by"}


@on_each
@pytest.mark.parametrize("case", TABLE if WHOLE else TABLE[::6], ids=lambda case: case.name)
def test_table(case: Case, device: str) -> None:
    if device == "vulkan" and case.name in TWO_ROUNDINGS:
        pytest.skip("it counts on an fma that rounds once")
    for shape in case.shapes if WHOLE else case.shapes[-1:]:
        case.check(device, shape)


@on_each
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_construct_of_explicit_kernels(name: str, device: str) -> None:
    kernel, launch, arguments, _ = CONSTRUCTS[name]
    given = arguments()
    if (device, name) in REFUSED:
        with pytest.raises(TargetLimit, match=REFUSED[device, name]) as caught:
            kernel[launch](*given, device=device)
        assert caught.value.diagnostics[0].span.line
        return
    kernel[launch](*given, device=device)
    check_construct(name, given)


@on_each
@pytest.mark.parametrize("case", [case for case in ZYN if WHOLE or case.name in ("softmax", "rms_norm", "sum", "axpy")], ids=str)
def test_program(case: ZynProgram, device: str) -> None:
    inputs = case.inputs(1)
    module = tw.load(case.path)
    for _ in range(2):
        found = module.run(device=device, **inputs)
        for name, wanted in case.references(inputs).items():
            close(found[name], wanted, case.tolerance, name)


@on_each
@pytest.mark.parametrize("one", all_cases()[:: 1 if WHOLE else 40], ids=str)
def test_explicit(one: ExplicitCase, device: str) -> None:
    got: list[np.ndarray] = []
    if refusal(lambda: got.extend(outcome(one, device))):
        return
    if device == "vulkan" and one.name in ROUNDS_TWICE:
        for mine, want in zip(got, outcome(one, "emulator"), strict=True):
            np.testing.assert_allclose(mine, want, rtol=2e-5, atol=1e-5)
        return
    assert_equal(got, outcome(one, "emulator"), one.ulp, one.name)


@on_each
def test_primitives(device: str) -> None:
    x = np.random.default_rng(0).integers(-1000, 1000, 4099).astype(np.int32)
    given = tw.to_device(x, device)
    np.testing.assert_array_equal(tw.gpu_scan(given).numpy(), np.cumsum(x, dtype=np.int32))
    np.testing.assert_array_equal(tw.gpu_sort(given).numpy(), np.sort(x))
    np.testing.assert_array_equal(tw.gpu_filter(given, lambda v: v > 0).numpy(), x[x > 0])


@pytest.mark.requires("vulkan")
def test_memory_the_host_does_not_see() -> None:
    """By way of the staging buffer, as on a GPU with memory of its own."""
    runtime: Any = own_memory(find_device("vulkan"))
    runtime.staged = True
    try:
        big = np.random.default_rng(0).standard_normal(1_300_007).astype(np.float32)  # more than the buffer holds
        np.testing.assert_array_equal(scale(tw.to_device(big, "vulkan"), tw.to_device(big, "vulkan")).numpy(), big * big)
    finally:
        runtime.staged = False
