"""The entry stub: what it accepts, what it refuses, and that it keeps every reference straight."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from dataclasses import replace

import cpu_kernels as kernels
import numpy as np
import pytest

from tilewright.base import dtypes
from tilewright.base.artifact import ArrayParam, Artifact, Launch, ScalarParam, SizeBinding
from tilewright.base.errors import DeviceError
from tilewright.base.sizes import Size
from tilewright.base.target import parse_target
from tilewright.codegen.host import interpreter
from tilewright.runtime.cpu import program as cpu

pytestmark = pytest.mark.skipif(not interpreter.stubs_work(), reason="this interpreter takes no entry stubs")

REFUSED = NotImplemented


@pytest.fixture(scope="module")
def add() -> cpu.CpuProgram:
    return kernels.make(kernels.ADD, kernels.add_artifact())


@pytest.fixture(scope="module")
def strided() -> cpu.CpuProgram:
    return kernels.make(kernels.STRIDED, kernels.strided_artifact())


@pytest.fixture(scope="module")
def total() -> cpu.CpuProgram:
    return kernels.make(kernels.TOTAL, kernels.total_artifact())


@pytest.fixture(scope="module")
def both() -> cpu.CpuProgram:
    return kernels.make(kernels.BOTH, kernels.both_artifact())


@pytest.fixture(scope="module")
def scalars() -> cpu.CpuProgram:
    return kernels.make(kernels.SCALARS, kernels.scalars_artifact())


def vector(count: int, offset: float = 0.0) -> np.ndarray:
    return np.arange(count, dtype=np.float32) + np.float32(offset)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 4096, 4097, 40_000, 300_000])
def test_add_gives_a_new_array(add: cpu.CpuProgram, count: int) -> None:
    a, b = vector(count), vector(count, 0.5)
    result = add.call(a, b)
    assert type(result) is np.ndarray
    assert result.dtype is np.dtype(np.float32)
    np.testing.assert_array_equal(result, a + b)


@pytest.mark.parametrize("count", [0, 1, 17, 300_000])
def test_add_into_out_returns_out(add: cpu.CpuProgram, count: int) -> None:
    a, b, out = vector(count), vector(count, 2.0), np.full(count, np.nan, np.float32)
    assert add.call(a, b, out=out) is out
    np.testing.assert_array_equal(out, a + b)


def test_keyword_is_compared_by_value(add: cpu.CpuProgram) -> None:
    a, out = vector(4), vector(4, 9.0)
    name = "".join(["o", "ut"])
    assert name is not sys.intern("out")
    assert add.call(a, a, **{name: out}) is out


class Subclass(np.ndarray):
    pass


def test_refuses_what_it_does_not_know(add: cpu.CpuProgram) -> None:
    a, b, out = vector(8), vector(8), np.zeros(8, np.float32)
    read_only = vector(8)
    read_only.flags.writeable = False
    misaligned = np.zeros(33, np.uint8)[1:].view(np.float32)
    refused = [
        ((), {}),
        ((a,), {}),
        ((a, b, out), {}),
        ((a, b), {"other": out}),
        ((a, b), {"out": out, "more": 1}),
        ((a, b), {"out": None}),
        ((a, b), {"out": [0.0] * 8}),
        ((a, b), {"out": (out,)}),
        ((a, b), {"out": np.zeros(7, np.float32)}),
        ((a, b), {"out": np.zeros(8, np.float64)}),
        ((a, b), {"out": np.zeros((8, 1), np.float32)}),
        ((a, b), {"out": np.zeros(16, np.float32)[::2]}),
        ((a, b), {"out": read_only}),
        ((a, b.astype(np.float64)), {}),
        ((a, b.astype(">f4")), {}),
        ((a, b[:7]), {}),
        ((a, vector(16)[::2]), {}),
        ((a.reshape(8, 1), b), {}),
        ((a, b.view(Subclass)), {}),
        ((a, misaligned), {}),
        ((a, [1.0] * 8), {}),
        ((a, None), {}),
        ((a, np.float32(1.0)), {}),
        ((np.array(1.0, np.float32), b), {}),
    ]
    for arguments, keywords in refused:
        assert add.call(*arguments, **keywords) is REFUSED, (arguments, keywords)
    assert not out.any()


def test_one_element_arrays_count_as_contiguous(add: cpu.CpuProgram) -> None:
    odd = np.zeros((5, 3), np.float32)[:1, 2]
    np.testing.assert_array_equal(add.call(odd, odd), odd + odd)


def test_bf16_array_is_recognised() -> None:
    array = np.zeros(3, dtypes.bf16.numpy)
    assert array.dtype is dtypes.bf16.numpy


def test_facts_must_hold() -> None:
    program = kernels.make(kernels.ADD, kernels.add_artifact(facts=(("n", 16),)))
    assert program.call(vector(24), vector(24)) is REFUSED
    np.testing.assert_array_equal(program.call(vector(32), vector(32)), 2 * vector(32))


def test_alignment_promise_is_checked() -> None:
    program = kernels.make(kernels.ADD, kernels.add_artifact(align=64))
    raw = np.zeros(1024, np.float32)
    start = (-raw.__array_interface__["data"][0] // 4) % 16
    at = [raw[start + 64 * i : start + 64 * i + 10] for i in range(4)]
    assert program.call(at[0], at[1], out=at[2]) is at[2]
    shifted = raw[start + 1 : start + 11]
    assert program.call(shifted, at[1], out=at[2]) is REFUSED
    assert program.call(at[0], at[1], out=raw[start + 300 : start + 310]) is REFUSED
    # A new array is aligned by chance only: either a right result or a refusal that leaks nothing.
    before = sys.getrefcount(np.dtype(np.float32))
    for _ in range(64):
        result = program.call(at[0], at[1])
        assert result is REFUSED or result.__array_interface__["data"][0] % 64 == 0
        del result
    assert abs(sys.getrefcount(np.dtype(np.float32)) - before) < 4


def test_checks_must_hold(both: cpu.CpuProgram) -> None:
    assert both.call(vector(1001), vector(1001)) is REFUSED
    first, second = both.call(vector(1000), vector(1000, 1.0))
    np.testing.assert_array_equal(first, vector(1000) + vector(1000, 1.0))
    np.testing.assert_array_equal(second, np.full(1000, -1.0, np.float32))


def test_several_outputs_by_tuple(both: cpu.CpuProgram) -> None:
    a, b = vector(10), vector(10, 3.0)
    pair = (np.zeros(10, np.float32), np.zeros(10, np.float32))
    assert both.call(a, b, out=pair) is pair
    np.testing.assert_array_equal(pair[0], a + b)
    np.testing.assert_array_equal(pair[1], a - b)
    for wrong in (list(pair), pair[:1], (pair[0], None), (pair[0], pair[0]), pair[0]):
        assert both.call(a, b, out=wrong) is REFUSED


# -- overlap ------------------------------------------------------------------------------------------------------


def test_out_may_be_an_input_when_that_is_safe(add: cpu.CpuProgram) -> None:
    a, b = vector(5000), vector(5000, 1.0)
    expected = a + b
    assert add.call(a, b, out=a) is a
    np.testing.assert_array_equal(a, expected)


def test_out_may_not_be_an_input_otherwise() -> None:
    program = kernels.make(kernels.ADD, kernels.add_artifact(alias_safe=False))
    a, b = vector(64), vector(64, 1.0)
    assert program.call(a, b, out=a) is REFUSED
    np.testing.assert_array_equal(a, vector(64))
    out = np.zeros(64, np.float32)
    assert program.call(a, b, out=out) is out


def test_shifted_overlap_is_refused_and_neighbours_are_not(add: cpu.CpuProgram) -> None:
    raw = vector(300)
    assert add.call(raw[:100], raw[200:], out=raw[1:101]) is REFUSED
    assert add.call(raw[:100], raw[200:], out=raw[150:250]) is REFUSED
    expected = raw[:100] + raw[200:]
    result = raw[100:200]
    assert add.call(raw[:100], raw[200:], out=result) is result
    np.testing.assert_array_equal(result, expected)


def test_strided_overlap(strided: cpu.CpuProgram) -> None:
    raw = np.arange(48, dtype=np.float32).reshape(6, 8)
    same = raw[::2, ::-1]
    expected = same + np.float32(2)
    out = raw[::2, ::-1]
    assert strided.call(same, 2.0, out=out) is out
    np.testing.assert_array_equal(raw[::2, ::-1], expected)
    # Same start and shape, but other strides.
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    assert strided.call(square, 1.0, out=square.T) is REFUSED
    # Interleaved rows have overlapping ranges although no element is shared: left to the slow path.
    assert strided.call(raw[0::2], 1.0, out=raw[1::2]) is REFUSED
    np.testing.assert_array_equal(square, np.arange(16, dtype=np.float32).reshape(4, 4))


# -- strides ------------------------------------------------------------------------------------------------------


def test_strides_of_every_kind(strided: cpu.CpuProgram) -> None:
    base = np.arange(60, dtype=np.float32).reshape(6, 10)
    views = [base, base.T, base[::-1], base[:, ::3], base[::2, ::-2], np.broadcast_to(base[0], (4, 10)), base[:0], base[:, :0]]
    for view in views:
        np.testing.assert_array_equal(strided.call(view, 0.5), view + np.float32(0.5))
        out = np.zeros((view.shape[1], view.shape[0]), np.float32).T
        assert strided.call(view, 0.5, out=out) is out
        np.testing.assert_array_equal(out, view + np.float32(0.5))


def test_strides_that_do_not_divide_are_refused(strided: cpu.CpuProgram) -> None:
    record = np.zeros(4, np.dtype([("x", np.float32), ("pad", np.uint8, (2,))]))
    odd = np.lib.stride_tricks.as_strided(record["x"], (4, 1), (6, 4))
    assert strided.call(odd, 1.0) is REFUSED


def test_output_written_over_itself_is_refused(strided: cpu.CpuProgram) -> None:
    out = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (3, 4), (0, 4))
    assert strided.call(np.ones((3, 4), np.float32), 1.0, out=out) is REFUSED


def test_constant_stride_must_match_unless_unused() -> None:
    n, m = kernels.N, kernels.M
    a = ArrayParam("a", dtypes.f32, (n, m), (Size.of("a0"), Size.of(1)), "input")
    art = kernels.strided_artifact()
    bindings = tuple(b for b in art.bindings if b.name != "a1")
    # The stride slot that was a1 is read from a0: only column counts of one or dense columns with a0 == 1 would differ.
    launch = replace(art.launches[0], sizes=("m", "a0", "one", "o0", "o1"))
    one = ScalarParam("one", dtypes.i64)
    art = replace(art, inputs=(a, art.inputs[1], one), bindings=bindings, launches=(launch,))
    program = kernels.make(kernels.STRIDED, art)
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(program.call(base[::2], 1.0, 1), base[::2] + 1)
    assert program.call(base[:, ::2], 1.0, 1) is REFUSED
    np.testing.assert_array_equal(program.call(base[:, 2:3], 1.0, 1), base[:, 2:3] + 1)
    np.testing.assert_array_equal(program.call(base.T[:, :1], 1.0, 1), base.T[:, :1] + 1)


def test_constant_extent_must_match(scalars: cpu.CpuProgram) -> None:
    good, bad = np.zeros(5, np.int64), np.zeros(6, np.int64)
    assert scalars.call(1.0, 1.0, 1, 1, True, out=good) is good
    assert scalars.call(1.0, 1.0, 1, 1, True, out=bad) is REFUSED


def test_size_known_only_from_out() -> None:
    out = replace(kernels.array("out", (kernels.N,), "output"))
    launch = Launch("add", ("out", "out", "out"), ("n",), (Size.of(1),))
    art = kernels.artifact("double", (), (out,), (launch,), (SizeBinding("n", "out", 0),))
    program = kernels.make(kernels.ADD, art)
    assert program.call() is REFUSED
    array = vector(9)
    assert program.call(out=array) is array
    np.testing.assert_array_equal(array, 2 * vector(9))


# -- scalars ------------------------------------------------------------------------------------------------------


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_scalars_arrive_with_their_type(scalars: cpu.CpuProgram) -> None:
    words = scalars.call(0.1, 0.2, -5, 255, True)
    assert words[0] == int(np.float32(0.1).view(np.uint32))
    assert words[1] == int(np.float64(0.2).view(np.int64))
    assert list(words[2:]) == [-5, 255, 1]
    # -1 is what the C API returns for an error as well.
    assert list(scalars.call(-1.0, -1.0, -1, 1, True)[2:]) == [-1, 1, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("1.0", 1.0, 1, 1, True),
        (1j, 1.0, 1, 1, True),
        (1.0, None, 1, 1, True),
        (np.ones(1), 1.0, 1, 1, True),
        (1.0, 1.0, 1.0, 1, True),
        (1.0, 1.0, 2.5, 1, True),
        (1.0, 1.0, np.float32(2), 1, True),
        (1.0, 1.0, 1 << 31, 1, True),
        (1.0, 1.0, -(1 << 31) - 1, 1, True),
        (1.0, 1.0, 1 << 70, 1, True),
        (1.0, 1.0, np.array(1), 1, True),
        (1.0, 1.0, 1, -1, True),
        (1.0, 1.0, 1, 256, True),
        (1.0, 1.0, 1, 1, 1),
        (1.0, 1.0, 1, 1, None),
        (1.0, 1.0, 1, 1, np.True_),
        (10**400, 1.0, 1, 1, True),
        # Numbers with a type of their own, and ints for floats, need other code.
        (np.float32(0.1), 1.0, 1, 1, True),
        (np.float64(0.1), 1.0, 1, 1, True),
        (1.0, 3, 1, 1, True),
        (1.0, 1.0, np.int16(7), 1, True),
        (1.0, 1.0, 1, Index(8), True),
        (1.0, 1.0, True, 1, True),
    ],
)
def test_scalars_that_do_not_fit_are_refused_without_an_error(
    scalars: cpu.CpuProgram, arguments: tuple[object, ...]
) -> None:
    assert scalars.call(*arguments) is REFUSED


def test_small_float_scalars_take_the_slow_path(scalars: cpu.CpuProgram) -> None:
    art = scalars.artifact
    small = (ScalarParam("f", dtypes.bf16), *art.inputs[1:])
    program = kernels.make(kernels.SCALARS, replace(art, inputs=small))
    assert program.call(0.5, 1.0, 1, 1, True) is REFUSED


# -- several launches, scratch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4096, 5000, 100_000, 4096 * 2100])
def test_reduction_with_scratch(total: cpu.CpuProgram, count: int) -> None:
    """The largest needs more scratch than the stack holds."""
    x = np.ones(count)
    result = total.call(x)
    assert type(result) is np.float64
    assert result == count
    out = np.array(0.0)
    assert total.call(x, out=out) is out
    assert out[()] == count


def test_zero_blocks_are_skipped(total: cpu.CpuProgram) -> None:
    assert total.call(np.zeros(0)) == 0.0


@pytest.mark.parametrize("times", [1 << 55, 1 << 61, 1 << 62, 1 << 90])
def test_scratch_that_cannot_be_had_is_left_to_the_slow_path(total: cpu.CpuProgram, times: int) -> None:
    """Too much memory, and bytes that would wrap around to few: the slow path has the words for both."""
    huge = kernels.array("parts", (Size.of("n") * times,), "scratch", dtypes.f64)
    program = kernels.make(kernels.TOTAL, replace(total.artifact, scratch=(huge,)))
    x, out = np.ones(8), np.array(0.0)
    watched = (x, out, np.dtype(np.float64))
    before = [sys.getrefcount(value) for value in watched]
    for keywords in ({}, {"out": out}):
        for _ in range(20):
            assert program.call(x, **keywords) is NotImplemented
    with pytest.raises(DeviceError, match=f"{64 * times} bytes for 'parts'") as caught:
        program.run({"x": x, "out": out}, {})
    assert caught.value.code == "TW031"
    gc.collect()
    after = [sys.getrefcount(value) for value in watched]
    assert all(abs(a - b) < 4 for a, b in zip(before, after)), (before, after)


def test_result_too_large_is_left_to_the_slow_path() -> None:
    out = kernels.array("out", (kernels.N * (1 << 58),), "output")
    program = kernels.make(kernels.ADD, replace(kernels.add_artifact(), outputs=(out,), alias_safe=False))
    assert program.call(vector(4), vector(4)) is NotImplemented


# -- references and lifetime ------------------------------------------------------------------------------------------


def test_reference_counts_are_exact(add: cpu.CpuProgram, both: cpu.CpuProgram, scalars: cpu.CpuProgram) -> None:
    a, b, out = vector(16), vector(16), np.zeros(16, np.float32)
    pair = (np.zeros(16, np.float32), np.zeros(16, np.float32))
    number, text = 1234.5, "no"
    watched = [a, b, out, pair, *pair, number, text, np.dtype(np.float32), NotImplemented, None]
    calls = [
        lambda: add.call(a, b),
        lambda: add.call(a, b, out=out),
        lambda: add.call(a, b, out=b[:3]),
        lambda: both.call(a, b),
        lambda: both.call(a, b, out=pair),
        lambda: both.call(a, b, out=(a, b)),
        lambda: scalars.call(number, number, 5, 6, True),
        lambda: scalars.call(text, number, 5, 6, True),
    ]
    for call in calls:
        call()
        before = [sys.getrefcount(x) for x in watched]
        for _ in range(200):
            call()
        after = [sys.getrefcount(x) for x in watched]
        assert all(abs(x - y) < 20 for x, y in zip(before, after)), (before, after)
    result = add.call(a, b)
    assert sys.getrefcount(result) == 2


def test_results_do_not_leak_memory(add: cpu.CpuProgram, total: cpu.CpuProgram) -> None:
    import resource

    a = vector(1 << 18)
    x = np.ones(4096 * 4000)
    for _ in range(5):
        add.call(a, a)
        total.call(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        add.call(a, a)
    for _ in range(20):
        total.call(x)
    # 100 MB of results went through.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_the_function_alone_keeps_its_code() -> None:
    program = kernels.make(kernels.ADD, kernels.add_artifact())
    call = program.call
    code = weakref.ref(program._code)
    del program
    gc.collect()
    assert code() is not None
    np.testing.assert_array_equal(call(vector(5), vector(5)), 2 * vector(5))
    del call
    gc.collect()
    assert code() is None


def test_many_programs_come_and_go() -> None:
    art = kernels.compiled(kernels.ADD, kernels.add_artifact())
    for _ in range(30):
        assert cpu.load(art).call(vector(3), vector(3))[2] == 4.0


# -- without the stub -------------------------------------------------------------------------------------------------


def test_run_by_name(add: cpu.CpuProgram, strided: cpu.CpuProgram, total: cpu.CpuProgram, scalars: cpu.CpuProgram) -> None:
    a, b, out = vector(300_000), vector(300_000, 1.0), np.zeros(300_000, np.float32)
    add.run({"a": a, "b": b, "out": out}, {})
    np.testing.assert_array_equal(out, a + b)
    view, result = a[:600].reshape(20, 30)[::2, ::-3], np.zeros((10, 10), np.float32).T
    strided.run({"a": view, "out": result}, {"scale": 0.25})
    np.testing.assert_array_equal(result, view + np.float32(0.25))
    number = np.zeros(())
    total.run({"x": np.ones(100_000), "out": number}, {})
    assert number[()] == 100_000
    words = np.zeros(5, np.int64)
    scalars.run({"out": words}, {"f": 0.1, "d": 0.2, "i": -5, "u": 200, "flag": True})
    np.testing.assert_array_equal(words[:1], [int(np.float32(0.1).view(np.uint32))])
    assert words[1] == int(np.float64(0.2).view(np.int64))
    assert words[2] & 0xFFFFFFFF == 0xFFFFFFFB
    assert list(words[3:]) == [200, 1]


def test_program_without_a_stub_refuses_every_call(add: cpu.CpuProgram) -> None:
    program = cpu.load(replace(add.artifact, host=b""))
    assert program.call(vector(3), vector(3)) is REFUSED


@pytest.mark.parametrize(
    ("host", "target", "runs"),
    [
        ("aarch64-neon", "aarch64-neon", True), ("aarch64-neon", "aarch64-scalar", True), ("aarch64-neon", "aarch64-sve256", False), ("aarch64-sve256", "aarch64-neon", True),
        ("aarch64-sve256", "aarch64-sve256", True), ("aarch64-sve256", "aarch64-sve512", False), ("aarch64-sve512", "aarch64-sve256", False), ("aarch64-neon", "x86-64-scalar", False),
        ("x86-64-avx2", "x86-64-scalar", True), ("x86-64-scalar", "x86-64-avx2", False), ("x86-64-avx512", "aarch64-scalar", False),
    ],
)  # fmt: skip
def test_levels_that_a_machine_runs(add: cpu.CpuProgram, monkeypatch: pytest.MonkeyPatch, host: str, target: str, runs: bool) -> None:
    monkeypatch.setattr(cpu, "host_cpu", lambda: parse_target(host))
    foreign = replace(add.artifact, target=target)
    with contextlib.nullcontext() if runs else pytest.raises(DeviceError, match="TW030"):
        cpu.load(foreign)


@pytest.mark.parametrize(("target", "kind"), [("aarch64-neon", "object"), ("sm_90a", "ptx"), ("x86-64-avx512", "ptx")])
def test_code_for_another_machine_is_refused(add: cpu.CpuProgram, target: str, kind: str) -> None:
    foreign: Artifact = replace(add.artifact, target=target, kind=kind)
    if (target, kind) == (add.artifact.target, "object") or (target.startswith("aarch64") and "aarch64" in add.artifact.target):
        pytest.skip("this is that machine")
    with pytest.raises(DeviceError, match=rf"error\[TW030\]: 'add' is {kind} code for {target}; this machine"):
        cpu.load(foreign)


@pytest.mark.parametrize("times", [1, 3])
def test_memory_that_lacks_half_way_in_place_is_an_error_at_once(times: int) -> None:
    """Nothing is made twice: the slow path would add again what the call has added."""
    program = kernels.make(kernels.GROW, kernels.grow_artifact(times))
    small, large = np.zeros(100), np.zeros(101)
    assert program.call(small) is None
    assert small.tolist() == [times] * 100
    before = sys.getrefcount(large)
    for count in range(1, 4):
        with pytest.raises(DeviceError, match=r"640 bytes for local and shared arrays of kernel grow at grow\.py:3:5") as caught:
            program.call(large)
        assert caught.value.code == "TW031"
        assert large.tolist() == [count * times] * 101
    del caught
    gc.collect()
    assert abs(sys.getrefcount(large) - before) < 3
    assert program.entry(lambda *arguments: "refused")(small) is None
    assert program.call(small.astype(np.float32)) is NotImplemented
