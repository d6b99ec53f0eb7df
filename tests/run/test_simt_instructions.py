"""Python words of instructions: what kernels of them compute on the emulator and the CPU, that they assemble, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from assembled import assemble
from kernels_instructions import CASES
from tilewright.base.errors import TargetLimit, TilewrightError, UserError
from tilewright.base.target import parse_target
from tilewright.frontend.words.rows import SECTIONS

ON_CPU = ("warps", "lanes", "block_votes", "bits", "fast", "vectors", "orders")
"""Cases that need nothing only GPUs have."""


@pytest.mark.parametrize("name", CASES)
def test_on_the_emulator(name: str) -> None:
    case = CASES[name]
    assert case.check is not None
    case.check(case.make(), case.run("emulator"))


@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu(name: str) -> None:
    case = CASES[name]
    if name in ON_CPU:
        assert case.check is not None
        case.check(case.make(), case.run("cpu"))
    else:
        with pytest.raises(
            TargetLimit, match="only GPUs have it"
        ):
            case.run("cpu")


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", CASES)
def test_assembles(name: str, target: str) -> None:
    case = CASES[name]
    launch = case.kernel[case.grid, case.block]
    if parse_target(target).sm < case.sm:
        with pytest.raises(TargetLimit, match=rf"{target} cannot do \w+"):
            launch.compile(*case.make(), target=target)
        return
    ptx = launch.compile(*case.make(), target=target).code.decode()
    assert ".extern .func" not in ptx
    assemble(ptx, target, level=1)


def test_every_word_is_used_by_a_kernel() -> None:
    """The kernels of these tests name each instruction at least once."""
    text = (Path(__file__).parents[1] / "kernels_instructions.py").read_text() + Path(__file__).read_text()
    missing = {row.name for section in SECTIONS if section.heading for row in section.rows if row.offered and f"tw.{row.name}(" not in text}
    assert missing <= {"named_arrive", "grid_sync", "wait_previous", "release_next", "set_registers"} | {
        f"atomic_{k}" for k in ("sub", "min", "and", "or", "xor", "inc", "dec")
    } | {f"redux_{k}" for k in ("and", "or", "xor")} | {"shuffle_up", "shuffle_down", "shuffle_xor", "vote_any", "lane_id", "local", "shared_dynamic"}  # fmt: skip


# -- the rest of the words --------------------------------------------------------------------------------------------


@tw.gpu
def remaining(o: tw.GpuBuffer[tw.i32], t: tw.GpuBuffer[tw.i32]):
    i = tw.gpu_thread_id()
    x = tw.i32(i)
    up, down, across = tw.shuffle_up(x, 1), tw.shuffle_down(x, 1, width=8), tw.shuffle_xor(x, 3)
    o[i] = up + 100 * down + 10000 * across + (1000000 if tw.vote_any(x == 3) else 0)
    tw.atomic_sub(t, 0, 1)
    tw.atomic_min(t, 1, -x)
    tw.atomic_and(t, 2, ~x)
    tw.atomic_or(t, 3, x)
    tw.atomic_xor(t, 4, x)
    tw.atomic_inc(t, 5, 9)
    tw.atomic_dec(t, 6, 9)
    t[7] = tw.redux_and(x | 16) + 100 * tw.redux_or(x) + 10000 * tw.redux_xor(x)


def test_the_rest_of_the_words() -> None:
    o, t = np.zeros(32, np.int32), np.zeros(8, np.int32)
    t[2] = -1
    remaining[1, 32](o, t, device="emulator")
    i = np.arange(32)
    down = np.where(i % 8 == 7, i, i + 1)
    assert np.array_equal(o, np.maximum(i - 1, 0) + 100 * down + 10000 * (i ^ 3) + 1000000)
    inc = dec = 0
    for _ in range(32):
        inc, dec = (0 if inc >= 9 else inc + 1), (9 if dec == 0 or dec > 9 else dec - 1)
    assert t.tolist() == [-32, -31, -32, 31, 0, inc, dec, 16 + 3100]


@tw.gpu
def handing_over(o: tw.GpuBuffer[tw.i32]):
    """One half of the block fills, the other empties; each only arrives where it does not wait."""
    box = tw.shared(64, tw.i32)
    t = tw.thread.x
    if t < 64:
        box[t] = tw.i32(t) * 3
        tw.named_arrive(1, 128)
    else:
        tw.named_barrier(1, 128)
        o[t - 64] = box[127 - t]


def test_producers_do_not_wait() -> None:
    o = np.zeros(64, np.int32)
    handing_over[1, 128](o, device="emulator")
    assert np.array_equal(o, 3 * np.arange(63, -1, -1))


@tw.gpu
def whole_grid(x: tw.GpuBuffer[tw.i32], o: tw.GpuBuffer[tw.i32]):
    tw.wait_previous()
    i = tw.gpu_thread_id()
    x[i] = tw.i32(i)
    tw.grid_sync()
    tw.release_next()
    o[i] = x[127 - i]


def test_blocks_meet() -> None:
    x, o = np.zeros(128, np.int32), np.zeros(128, np.int32)
    whole_grid[4, 32](x, o, device="emulator")
    assert np.array_equal(o, np.arange(127, -1, -1))


# -- telling the host -------------------------------------------------------------------------------------------------


@tw.gpu
def talking(x: tw.GpuBuffer[tw.f32], n: tw.i32):
    i = tw.gpu_thread_id()
    if i < n:
        print("thread", i, (x[i], x[i] > 1), sep="|", end=";\n")
        print(f"{x[i]:6.2f}{{}} {tw.u8(200):x}", "100%", tw.f32)
    assert x[i] >= 0
    assert i < 1000, "too many threads"


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    talking[1, 32](np.arange(32, dtype=np.float32), 2, device="emulator")
    assert capsys.readouterr().out.splitlines() == [
        "thread|0|(0, False);", "thread|1|(1, False);", "  0.00{} c8 100% f32", "  1.00{} c8 100% f32",
    ]  # fmt: skip


def test_threads_beyond_the_count_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """They run where threads work together, but print and assert nothing."""

    @tw.gpu
    def counted(x: tw.GpuBuffer[tw.f32]):
        i = tw.gpu_thread_id()
        total = tw.redux_add(tw.i32(1))
        assert i < 3
        print(i, total)

    tw.gpu_launch(counted, 3, 32, np.zeros(3, np.float32), device="emulator")
    assert capsys.readouterr().out.splitlines() == ["0 32", "1 32", "2 32"]


@pytest.mark.parametrize("device", ["emulator", "cpu"])
def test_assert(device: str) -> None:
    x = np.ones(32, np.float32)
    x[5] = -1
    line = talking.python.__code__.co_firstlineno + 6
    with pytest.raises(TilewrightError) as caught:
        talking[1, 32](x, 0, device=device)
    text = str(caught.value)
    assert "x[i] >= 0" in text
    assert "thread 5" in text
    assert f"test_simt_instructions.py:{line}:" in text


# -- what is refused --------------------------------------------------------------------------------------------------

HEAD = "import tilewright as tw\n\n@tw.gpu\ndef bad(x: tw.GpuBuffer[tw.f32], m: tw.GpuBuffer[tw.u32]):\n    s = tw.shared(64, tw.f32)\n    i = tw.gpu_thread_id()\n"
REFUSED = [
    ("tw.atomic_and(x, i, 1)", "TW009", "atomic: atomic and takes integers, got f32"),
    ("tw.atomic_add(x, i, 1.0, order='seq_cst')", "TW009", "'order' is 'seq_cst'"),
    ("tw.atomic_add(x, i, (1.0, 2.0, 3.0))", "TW009", "neighbours are added: 2 or 4 of f32"),
    ("tw.atomic_load(x, i, width=8)", "TW009", "accesses 8, 16, 32, 64 or 128 bits"),
    ("tw.vload(x, i, width=3)", "TW009", "the width of an access is 3"),
    ("tw.vload(x, i, cache='l3')", "TW009", "'cache' is 'l3'"),
    ("tw.vload(s, i, cache='cg')", "TW009", "caches are told of accesses to global memory, got shared memory"),
    ("tw.copy_async(x, i, x, i)", "TW009", "the target is the array 'x', which is not shared memory"),
    ("tw.copy_async(s, i, x, i, count=3)", "TW009", "copies 4, 8 or 16 bytes of one dtype"),
    ("tw.copy_async(s, i, s, i)", "TW009", "the source is the array 's', which is not an array the kernel was given"),
    ("tw.mbarrier_init(s, 0, 1)", "TW009", "the array 's' is no array of mbarriers"),
    ("tw.tma_load(s, 0, x, 0, s, 0)", "TW009", "the array 'x' is no map"),
    ("tw.tensor_map(x, (8, 8))", "TW009", "a box of [8, 8] with swizzle 0"),
    ("tw.load_remote(x, i, 0)", "TW009", "the array is the array 'x', which is not shared memory"),
    ("tw.fragment_a(x, (0, 0))", "TW003", "'x' has 1 axis, but is used with 2 indices"),
    ("tw.fragment_mma((1, 2), (1, 2), (1.0,), tw.f16)", "TW016", "'a' has 2 register(s), not 4"),
    ("tw.mma_sync((1, 2, 3, 4), (1, 2), (0.0, 0.0, 0.0, 0.0), tw.i16)", "TW009", "tensor cores take no i16"),
    ("tw.pack_bits((1.0, 2.0, 3.0), tw.f16)", "TW009", "3 of f16 are not 32 bits"),
    ("tw.shuffle(x[i], 0, width=3)", "TW009", "the width of a shuffle is 3"),
    ("tw.redux_add(x[i])", "TW009", "what is combined is a number of type f32, not an integer"),
    ("tw.lane_mask('ne')", "TW009", "the relation is 'ne'"),
    ("tw.named_barrier(0, 64)", "TW009", "named_barrier number 0"),
    ("tw.named_barrier(1, 33)", "TW009", "named_barrier of 33 threads"),
    ("tw.set_registers(25, 'increase')", "TW009", "25 registers"),
    ("tw.shared(8, tw.f32, align=48)", "TW009", "align is 48"),
    ("print(x)", "TW009", "the array 'x' cannot be printed"),
    ("print(f'{i!r}')", "TW005", "'!' in an f-string of a kernel"),
    ("print(f'{x[i]:d}')", "TW009", "f32 cannot be written as 'd'"),
    ("print(i, file=3)", "TW016", "print has no argument 'file' in a kernel"),
    ("assert i < 3, f'{i}'", "TW005", "the message of an assert has numbers in it"),
    ("tw.dp4a(i, i, 0)", "TW009", "dp4a takes words of i32 or u32"),
    ("tw.mul_high(m[i], tw.i64(2))", "TW009", "mul_high takes two integers of one type of 32 or 64 bits, got u32 and i64"),
    ("tw.cluster.name", "TW002", "tilewright.cluster has no 'name'"),
]


@pytest.mark.parametrize(("line", "code", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) and v.startswith(("tw.", "print", "assert")) else "")  # fmt: skip
def test_refused(line: str, code: str, message: str, tmp_path: Path) -> None:
    kernel = _defined(HEAD + f"    {line}\n", tmp_path)
    with pytest.raises(UserError) as caught:
        kernel[1, 64](np.zeros(64, np.float32), np.zeros(64, np.uint32), device="emulator")
    assert caught.value.code == code
    assert message in str(caught.value)
    assert "bad_instruction.py:7:" in str(caught.value)


def _defined(text: str, folder: Path) -> tw.GpuKernel[...]:
    import importlib.util
    import sys

    path = folder / "bad_instruction.py"
    path.write_text(text)
    sys.modules.pop("bad_instruction", None)
    spec = importlib.util.spec_from_file_location("bad_instruction", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.bad  # type: ignore[no-any-return]


def test_clusters_divide_the_grid() -> None:
    with pytest.raises(UserError, match=r"the grid of cluster is 3: its blocks along x are not made of clusters of 2"):
        CASES["cluster"].kernel[3, 128]
    with pytest.raises(UserError, match="cluster is 9"):
        tw.gpu(cluster=9)(remaining.python)
