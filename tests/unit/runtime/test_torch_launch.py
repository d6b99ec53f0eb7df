"""Tensors of PyTorch read by machine code. The tensors are the CPU's and the driver is null, whose memory is the host's too."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from fake_cuda import FakeCuda

from tilewright.base import dtypes
from tilewright.base import launch_abi as abi
from tilewright.base.artifact import ArrayParam, Artifact, Launch, ScalarParam, SizeBinding
from tilewright.base.launch_abi import Pattern, Slot
from tilewright.base.sizes import ONE, Size, ceildiv
from tilewright.codegen.host.launcher import engine_object, key_count, stub_object
from tilewright.runtime.core import streams
from tilewright.runtime.cuda import launcher as cuda_launcher
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.driver import Driver
from tilewright.runtime.cuda.launch_records import Helpers, LaunchRecord
from tilewright.runtime.cuda.launcher import Launcher, Recent
from tilewright.runtime.exchange import torch_tensors

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.requires("cpu")

PTX = b"""
.version 8.3
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 x, .param .f32 factor, .param .u64 out, .param .u64 n) { ret; }
"""
N = Size.of("n")
VECTOR = ArrayParam("x", dtypes.f32, (N,), (ONE,), "input")
SCALE = Artifact(
    "test", "sm_90a", "ptx", PTX, (VECTOR, ScalarParam("factor", dtypes.f32)), (replace(VECTOR, name="out", role="output"),), (),
    (Launch("scale", ("x", "factor", "out"), ("n",), (ceildiv(N, 128),), threads=128),), (SizeBinding("n", "x", 0),), (),
)  # fmt: skip
Current = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_int32, ctypes.c_void_p)


class _Machine:
    """A device, the stream PyTorch is said to be on, and the launches that were made."""

    def __init__(self) -> None:
        self.fake = FakeCuda()
        self.fake.kernels["scale"] = self._scale
        self.device = CudaDevice(Driver(self.fake), 0)
        self.stream, self.status = 0, 0
        self.current = Current(self._current)
        access = torch_tensors.tensor_access()
        assert access is not None
        self.access = replace(access, stream=ctypes.cast(self.current, ctypes.c_void_p).value or 0)
        self.handed_on: list[tuple[object, ...]] = []

    def _current(self, ordinal: int, result: int) -> int:
        assert ordinal == 0
        ctypes.c_uint64.from_address(result).value = self.stream
        return self.status

    def _scale(self, table: int, grid: tuple[int, int, int]) -> None:
        pointers = (ctypes.c_void_p * 4).from_address(table)
        raw = [ctypes.string_at(pointer, 8) for pointer in pointers]  # type: ignore[arg-type]
        x, factor, out, count = (struct.unpack_from(f"<{f}", words)[0] for words, f in zip(raw, "QfQq", strict=True))
        source = np.ctypeslib.as_array((ctypes.c_float * count).from_address(x))
        with np.errstate(invalid="ignore"):
            np.ctypeslib.as_array((ctypes.c_float * count).from_address(out))[:] = source * factor

    def launcher(self, pattern: Pattern) -> Launcher:
        cuda_launcher.load_engine(engine_object)
        with mock.patch.object(cuda_launcher, "tensor_access", return_value=self.access):
            layout = cuda_launcher.layout(True)
            assert layout is not None
            stub = stub_object(pattern, replace(layout, tensor_device=0))
            return Launcher(self.device, "scale", stub, key_count(pattern), Recent())

    def fallback(self, *args: object, **keywords: object) -> str:
        self.handed_on.append(args)
        return "handed on"


@pytest.fixture
def machine() -> Iterator[_Machine]:
    made = _Machine()
    with made.device.active():
        yield made


GIVEN = Pattern((Slot(abi.TENSOR, 1), Slot(abi.FLOAT)), (Slot(abi.TENSOR, 1),), True)
NEW = replace(GIVEN, given=False)


def words(seen: bytes | None) -> list[int]:
    assert seen is not None
    return list(memoryview(seen).cast("Q"))


def test_what_is_read(machine: _Machine) -> None:
    arguments = (Slot(abi.TENSOR, 2), Slot(abi.TENSOR, 0), Slot(abi.INTEGER))
    probe = machine.launcher(Pattern(arguments, (Slot(abi.TENSOR, 3),), True)).probe
    whole = torch.zeros(8, 6, dtype=torch.float64)
    view, single, out = whole[1:5, ::2], torch.ones((), dtype=torch.int32), torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    found = words(probe(view, single, -5, out=out))
    values, keys = found[:4], found[4:]
    assert values == [view.data_ptr(), single.data_ptr(), out.data_ptr(), (1 << 64) - 5]

    def head(tensor: Any, code: int) -> int:
        return code | (tensor.data_ptr() % 16 != 0) << 16 | ((1 << 32) - 1) << 32  # the CPU's index is -1

    assert keys == [head(view, 7), 4, 3, 6, 2, head(single, 3), head(out, 15), 2, 3, 4, 12, 4, 1]


def test_addresses_that_are_not_multiples_of_16(machine: _Machine) -> None:
    probe = machine.launcher(GIVEN).probe
    x = torch.zeros(64)
    first = next(i for i in range(4) if (x.data_ptr() + 4 * i) % 16 == 0)
    even, odd = (words(probe(x[first + i : first + i + 8], 1.0, out=x[40:48]))[3] for i in (0, 1))
    assert odd - even == 1 << 16


class _Subclass(torch.Tensor):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, requires_grad=True),
        lambda: torch.zeros(4, requires_grad=True) * 2,
        lambda: torch.nn.Parameter(torch.zeros(4), requires_grad=False),
        lambda: torch.zeros(4).as_subclass(_Subclass),
        lambda: torch.zeros(2, 2),
        lambda: torch.zeros(4).to("meta"),
        lambda: torch.zeros(4).to_sparse(),
        lambda: np.zeros(4, np.float32),
        lambda: [0.0] * 4,
        lambda: 1.0,
        lambda: None,
    ],
)
def test_what_is_refused(machine: _Machine, make: Any) -> None:
    probe = machine.launcher(GIVEN).probe
    x, wrong = torch.zeros(4), make()
    assert probe(x, 1.0, out=x) is not None
    assert probe(wrong, 1.0, out=x) is None
    assert probe(x, 1.0, out=wrong) is None


def test_calls_of_another_kind_are_refused(machine: _Machine) -> None:
    probe, x = machine.launcher(GIVEN).probe, torch.zeros(4)
    assert probe(x, 1, out=x) is None
    assert probe(x, True, out=x) is None
    assert probe(x, np.float64(1.0), out=x) is None
    assert probe(x, 1.0) is None
    assert probe(x, out=x) is None
    assert probe(x, 1.0, 2.0, out=x) is None
    assert probe(x, factor=1.0, out=x) is None
    assert probe(x, 1.0, other=x) is None
    assert probe(x, 1.0, **{"".join(["o", "ut"]): x}) is not None


def test_a_detached_tensor_is_taken(machine: _Machine) -> None:
    """It has to do with gradients and needs none: PyTorch is asked."""
    probe = machine.launcher(GIVEN).probe
    x = torch.zeros(4, requires_grad=True)
    assert probe(x.detach(), 1.0, out=x.detach().clone()) is not None
    assert probe(torch.zeros(8)[2:6], 1.0, out=torch.zeros(4)) is not None


def test_negated_views(machine: _Machine) -> None:
    pattern = replace(GIVEN, arguments=(Slot(abi.CHECKED_TENSOR, 1), Slot(abi.FLOAT)))
    probe = machine.launcher(pattern).probe
    numbers = torch.complex(torch.ones(4), torch.ones(4))
    assert probe(numbers.imag, 1.0, out=torch.zeros(4)) is not None
    assert numbers.conj().imag.is_neg()
    assert probe(numbers.conj().imag, 1.0, out=torch.zeros(4)) is None


def test_without_the_word_for_gradients_pytorch_is_always_asked(machine: _Machine) -> None:
    machine.access = replace(machine.access, gradient=0)
    probe = machine.launcher(GIVEN).probe
    assert probe(torch.zeros(4), 1.0, out=torch.zeros(4)) is not None
    assert probe(torch.zeros(4, requires_grad=True), 1.0, out=torch.zeros(4)) is None


def _learnt(machine: _Machine, pattern: Pattern, make: Any = None) -> Any:
    launcher = machine.launcher(pattern)
    x, out = torch.zeros(4), torch.zeros(4)
    keywords = {"out": out} if pattern.given else {}
    seen = launcher.probe(x, 1.0, **keywords)
    assert seen is not None
    program = machine.device.load(SCALE)
    helpers = Helpers(make, lambda nbytes, stream: pytest.fail("there is no scratch memory"))
    apart = [(1, 0, 16, 0, 0, 16)] if pattern.given else []
    launcher.add(LaunchRecord(program, {"n": 4}, seen[8 * 3 :], [abi.FLOAT], apart, helpers))
    return launcher.function(machine.fallback)


def test_a_call(machine: _Machine) -> None:
    scale = _learnt(machine, GIVEN)
    x, out = torch.arange(4, dtype=torch.float32), torch.zeros(4)
    assert scale(x, 2.5, out=out) is out
    assert out.tolist() == [0, 2.5, 5, 7.5]
    assert scale(x[:3], 1.0, out=out[:3]) == "handed on"
    assert scale(x.double(), 1.0, out=out) == "handed on"
    assert scale(x, 1.0, out=x) == "handed on"
    assert scale(x, float("inf"), out=out) is out
    assert out.tolist()[1:] == [float("inf")] * 3
    assert scale(x, 1e300, out=out) is out
    assert out.tolist()[1:] == [float("inf")] * 3


def test_new_results_are_tensors(machine: _Machine) -> None:
    made: list[int] = []

    def make(stream: int) -> Any:
        made.append(stream)
        return torch.zeros(4)

    scale = _learnt(machine, NEW, make)
    machine.stream = machine.device.create_stream()
    found = scale(torch.arange(4, dtype=torch.float32), 2.0)
    assert found.tolist() == [0, 2, 4, 6]
    assert made == [machine.stream]
    assert sys.getrefcount(found) == 2


def test_an_error_while_a_result_is_made(machine: _Machine) -> None:
    def make(stream: int) -> Any:
        raise MemoryError("no room")

    scale = _learnt(machine, NEW, make)
    with pytest.raises(MemoryError, match="no room"):
        scale(torch.zeros(4), 1.0)
    assert machine.handed_on == []


def test_streams(machine: _Machine) -> None:
    scale = _learnt(machine, GIVEN)
    x, out = torch.ones(4), torch.zeros(4)
    stream = machine.stream = machine.device.create_stream()
    other = machine.device.create_stream()
    used = functools.partial(machine.fake.calls, "cuLaunchKernel")
    assert scale(x, 1.0, out=out) is out
    assert used()[-1][8] == stream
    with streams.use(0, stream):
        assert scale(x, 1.0, out=out) is out
    with streams.use(0, other):
        assert scale(x, 1.0, out=out) == "handed on"
    with streams.use(1, other):
        assert scale(x, 1.0, out=out) is out
    machine.status = 1
    assert scale(x, 1.0, out=out) == "handed on"
    assert len(used()) == 3


def test_an_unknown_build_of_pytorch() -> None:
    fresh = torch_tensors._access.__wrapped__
    assert fresh() is not None
    with mock.patch.object(torch_tensors, "_offset", side_effect=ValueError):
        assert fresh() is None
    with mock.patch.object(torch_tensors, "_agrees", return_value=False):
        assert fresh() is None
    with mock.patch.object(torch_tensors, "QUESTIONS", ("data_ptr", "colour")):
        assert fresh() is None
    with mock.patch.dict(sys.modules):
        del sys.modules["torch"]
        assert torch_tensors.tensor_access() is None
