"""`repr` of everything a user can hold is one short line that says what it is; `dir(tw)` has every public name and no others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import tilewright as tw
from models.random_models import RandomModel
from null_cuda.install import installed
from tilewright.api.profile import Profile
from tilewright.compile.tuning import Measurement, TuningTable
from tilewright.execute.tune_search import Tuning
from tilewright.execute.tuning_files import TuningFile

LONGEST = 160
EXAMPLES = Path(__file__).parents[3] / "examples"


@tw.kernel
def scale(m: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), m.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, j] * v[j]
    return out


@tw.gpu
def double(x: tw.GpuBuffer[tw.f32]) -> None:
    i = tw.thread.x
    if i < x.shape[0]:
        x[i] = x[i] * 2.0


@tw.cpu
def halve(x: tw.GpuBuffer[tw.f32]) -> None:
    for i in range(x.shape[0]):
        x[i] = x[i] * 0.5


@tw.critical
def passes(price: tw.i64, limit: tw.i64) -> tw.i64:
    return 1 if price <= limit else 0


class Price(tw.State):
    ticks: tw.i64


class Counter(tw.State):
    seen: tw.i64
    prices: tw.fixed(tw.f64, 512)  # type: ignore[valid-type]
    levels: Price[64]


M = np.ones((64, 300), np.float32)


def graph() -> tw.TensorGraph:
    built = tw.TensorGraph("layer")
    x = built.input("x", ("batch", 300), tw.f32)
    built.output("y", built.op("MulMat", x, weight=built.weight("w", np.ones((8, 300), np.float32)), name="fc"))
    return built


def profile() -> Profile:
    with tw.profile() as found:
        scale(M, M[0])
    return found


def metadata() -> object:
    @tw.kernel(precision="tf32", optimize="O1")
    def other(x: tw.Array) -> tw.Array:
        return x + 1.0

    return other.metadata


def error(*arguments: object) -> Exception:
    try:
        scale(*arguments)  # type: ignore[arg-type, call-arg]
    except tw.TilewrightError as found:
        return found
    raise AssertionError


PUBLIC: dict[str, Callable[[], object]] = {
    "CompileTarget": lambda: tw.CompileTarget.CPU,
    "CompilerBug": lambda: tw.CompilerBug.at("TW050", "a pass ended"),
    "CpuFunction": lambda: halve,
    "CriticalFunction": lambda: passes,
    "CriticalProof": lambda: pytest.importorskip("capstone") and passes.proof(),
    "DType": lambda: tw.bf16,
    "Device": lambda: tw.devices()[0],
    "DeviceError": lambda: tw.DeviceError.at("TW040", "no such device"),
    "DeviceTarget": lambda: scale.metadata.device,
    "DeviceWarning": lambda: tw.DeviceWarning("slow"),
    "Event": lambda: tw.Event(),
    "ExecutionConstraints": lambda: tw.ExecutionConstraints(no_allocation=True),
    "Future": lambda: scale(M, M[0], asynchronous=True),
    "GpuKernel": lambda: double,
    "Kernel": lambda: scale,
    "KernelHints": lambda: tw.KernelHints(unroll_factor=4),
    "KernelKind": lambda: tw.KernelKind.CUSTOM,
    "KernelMetadata": metadata,
    "Latency": lambda: tw.latency(passes, (1, 2), n=2000),
    "LaunchChoice": lambda: tw.LaunchChoice(block=128, threads=lambda x: x.size),
    "OnnxGraph": lambda: tw.graph.from_onnx(EXAMPLES / "onnx/classifier.onnx"),
    "PackedArray": lambda: tw.quantize(np.ones((64, 256), np.float32), tw.q8_0),
    "PerformanceWarning": lambda: tw.PerformanceWarning("slow"),
    "Pool": lambda: tw.memory_pool("cpu"),
    "Profile": profile,
    "Ring": lambda: tw.Ring[Price, Literal[64]](),
    "State": Counter,
    "StateArray": lambda: Counter().levels,
    "Stream": lambda: tw.Stream(),
    "TargetLimit": lambda: tw.TargetLimit.at("TW020", "too much shared memory"),
    "Tensor": lambda: graph().outputs["y"],
    "TensorGraph": graph,
    "TierReport": lambda: tw.tiers(False),
    "TilewrightError": lambda: error(M),
    "Tuning": lambda: Tuning("scale", "cpu", (TRIAL, TRIAL), TRIAL, TRIAL, TuningTable("scale", "sm_90a", (TRIAL,) * 40), 2.5),
    "TuningFile": lambda: TuningFile("tuned.json", ("scale",) * 60, 900, 2),
    "UserError": lambda: error(M, M[0, :5]),
}
TRIAL = Measurement(((64, 64, 64)), "128x128x64 stages=4", 1.2e-5, version="0.1.0" * 20)
ABSTRACT = {"Array", "GpuBuffer", "InOut", "OpParam", "TensorType", "Graph", "Pipeline", "debug"}
"""Annotations, and what other tests of this file make."""


def check(shown: str) -> None:
    assert "\n" not in shown and len(shown) <= LONGEST, shown
    assert " object at 0x" not in shown and " at 0x" not in shown, shown


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_class_shows_itself_in_one_line(name: str) -> None:
    made = PUBLIC[name]()
    assert isinstance(made, getattr(tw, name)), made
    shown = repr(made)
    if isinstance(made, Exception):
        assert len(shown) <= 400 and str(made).splitlines()[0] in str(made)  # the whole text, as Python shows it
    else:
        check(shown)


def test_no_public_class_is_forgotten() -> None:
    classes = {name for name in dir(tw) if inspect.isclass(getattr(tw, name))}
    assert classes == set(PUBLIC) | ABSTRACT


HELD: dict[str, Callable[[], object]] = {
    "launch": lambda: double[2, 32],
    "artifact": lambda: scale.compile(M, M[0]),
    "artifact of a GPU": lambda: scale.compile(M, M[0], target="sm_90a"),
    "target": lambda: tw.devices()[0].target,
    "limits": lambda: tw.devices()[0].limits,
    "tuning table": lambda: TuningTable("scale", "sm_90a", (TRIAL,) * 40),
    "measurement": lambda: TRIAL,
    "plan": lambda: graph().plan(device="cpu", x=np.ones((2, 300), np.float32)),
    "captured step": lambda: graph().capture("cpu", x=np.ones((2, 300), np.float32)),
    "profile row": lambda: profile().rows()[0],
    "profiled call": lambda: profile().calls[0],
    "distribution": lambda: tw.latency(passes, (1, 2), n=2000).native,
    "program": lambda: tw.load(EXAMPLES / "zyn/axpy.zyn"),
    "state class": lambda: Counter,
    "array type": lambda: tw.GpuBuffer[tw.f32],
}


@pytest.mark.parametrize("name", sorted(HELD))
def test_what_calls_give_back_shows_itself_in_one_line(name: str) -> None:
    check(repr(HELD[name]()))


def test_objects_of_a_gpu() -> None:
    with installed():
        x = tw.to_device(M, "cuda:0")
        for made in (x, tw.Stream("cuda:0"), tw.Event("cuda:0"), tw.memory_pool("cuda:0"), tw.devices()[0], tw.devices()[0].limits):
            check(repr(made))


def test_a_recorded_graph() -> None:
    with tw.capture("cpu") as found:
        scale(M, M[0])
    check(repr(found))
    assert isinstance(found, tw.Graph)


def test_models(tmp_path: Path) -> None:
    for architecture in ("llama", "bert"):
        path = RandomModel(architecture, heads=4, depth=16).gguf(tmp_path / f"{architecture}.gguf")
        check(repr(tw.models.load(path, device="cpu")))


def test_dir_shows_all_names_and_no_modules_behind_them() -> None:
    shown = {name for name in dir(tw) if not name.startswith("_")}
    assert shown == set(tw.__all__) and len(shown) >= 300
    assert {"kernel", "gpu", "sin", "atan2", "f32", "Array", "profile", "random", "latency"} <= shown
    assert not shown & {"annotations", "base", "codegen", "registry"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(hasattr(tw, name) for name in shown)
    assert "__version__" in dir(tw)
