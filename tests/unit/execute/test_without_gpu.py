"""What is written for GPUs, on a machine without one: it runs on the CPU, or is refused with its line, at a launch and by `check`."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.base.errors import DeviceError, TargetLimit, UserError
from tilewright.cli.main import cli
from tilewright.runtime.cuda import device as cuda


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_found", ())
    monkeypatch.setattr(cuda, "_reason", "there is none")


# -- memory ---------------------------------------------------------------------------------------------------------


def test_pinned_memory_is_plain_memory() -> None:
    for device in (None, "cpu"):
        made = tw.allocate((3, 4), tw.f16, device, pinned=True)
        assert isinstance(made, np.ndarray) and made.shape == (3, 4) and made.dtype == np.float16
    values = np.ones(5)
    with tw.pinned(values) as inside:
        assert inside is values
    with pytest.raises(DeviceError, match="not present"):
        tw.allocate((3,), device="cuda", pinned=True)
    with pytest.raises(DeviceError, match="managed memory needs"):
        tw.allocate((3,), managed=True)


def test_zynml_pins_and_pools_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "memory.zyn"
    path.write_text(
        "let pinned = allocate(shape=[4, 4], dtype=f32, pinned=true)\n"
        "let pool = memory_pool(\"cpu\", size=1MB)\n"
        "let other = memory_pool(size=1MB)\n"
        "let x = pool.allocate(shape=[8, 8])\n"
        "pool.free(x)\n"
        "pool.reset()\n"
        "let size = [len(pinned), len(other.allocate(shape=[3]))]\n"
    )  # fmt: skip
    assert CliRunner().invoke(cli, ["check", str(path)]).exit_code == 0
    found = tw.load(str(path)).run(device="cpu")
    assert list(found["size"]) == [4, 3]


def test_a_pool_of_the_host_uses_memory_again() -> None:
    pool = tw.memory_pool("cpu")
    first = pool.allocate((100,), tw.f32)
    assert isinstance(first, np.ndarray) and first.ctypes.data % 64 == 0 and first.flags.writeable
    address, view = first.ctypes.data, first[10:]
    first[:] = 7
    del first
    gc.collect()
    other = pool.allocate((100,), tw.f32)
    assert other.ctypes.data != address and (view == 7).all()  # a view still has it
    del view
    gc.collect()
    again = pool.allocate((25, 4), np.int32)
    assert again.ctypes.data == address
    found = pool.statistics()
    assert (found.allocations, found.frees, found.grown, found.cached) == (3, 1, 2, 0)
    assert found.in_use == found.peak == 2 * 448


def test_arrays_of_a_pool_are_freed_once_and_stay_valid() -> None:
    pool, other = tw.memory_pool("cpu"), tw.memory_pool("cpu")
    x = pool.allocate(8)
    x[:] = 3
    pool.free(x)
    y = pool.allocate(8)
    y[:] = 4
    assert (x == 3).all()
    with pytest.raises(DeviceError, match="was freed before"):
        pool.free(x)
    with pytest.raises(DeviceError, match="is not of this pool"):
        other.free(y)
    with pytest.raises(DeviceError, match="is not of this pool"):
        pool.free(np.zeros(8, np.float32))
    with pytest.raises(UserError, match="a list is no array of a pool"):
        pool.free([1])
    pool.reset()
    assert pool.statistics().in_use == 0 and (y == 4).all()
    del x, y
    gc.collect()
    assert pool.flush() == 128 and pool.statistics().cached == 0
    assert repr(pool) == "Pool(cpu, 0 bytes in use, 0 cached)"


@pytest.mark.parametrize("word", ["size", "limit"])
def test_a_pool_of_the_host_has_a_limit(word: str) -> None:
    pool = tw.memory_pool("cpu", **{word: "4KiB"})
    kept = pool.allocate((512,), tw.f32)
    with pytest.raises(DeviceError, match=r"no memory for an array of shape \[1024\] and f32: 4096 bytes, and 2048 of the pool's 4096 are in use"):
        pool.allocate((1024,), tw.f32)
    del kept
    gc.collect()
    assert pool.allocate((1024,), tw.f32).size == 1024  # what was kept makes room
    with pytest.raises(UserError, match="an array cannot have shape"):
        pool.allocate((-1,))
    with pytest.raises(UserError, match="a size or a limit, not both"):
        tw.memory_pool("cpu", size=1, limit=1)


def test_new_arrays_of_a_thread_come_from_a_pool() -> None:
    pool = tw.memory_pool("cpu")
    seen: list[int] = []
    with pool:
        made = tw.allocate((4,), tw.f64)
        thread = threading.Thread(target=lambda: seen.append(tw.allocate((4,), tw.f64).size))
        thread.start()
        thread.join()
    outside = tw.allocate((4,), tw.f64)
    assert seen == [4] and pool.statistics().allocations == 1
    pool.free(made)
    with pytest.raises(DeviceError, match="is not of this pool"):
        pool.free(outside)


# -- words ----------------------------------------------------------------------------------------------------------

TEXT = '''import tilewright as tw

@tw.gpu{mark}
def together(x: tw.GpuBuffer[tw.i32]):
    x[0] = 1
    tw.grid_sync()

@tw.gpu{mark}
def copied(x: tw.GpuBuffer[tw.f32]):
    bars = tw.mbarriers(1)
    if tw.thread.x == 0:
        tw.mbarrier_init(bars, 0, 1)

@tw.gpu{mark}
def ranked(o: tw.GpuBuffer[tw.i32]):
    o[0] = tw.i32(tw.cluster.rank)

@tw.gpu{mark}
def product(a: tw.Array, c: tw.Array):
    tw.wmma_store(c, (0, 0), tw.wmma_mma(tw.wmma_load(a, (0, 0), "a"), tw.wmma_load(a, (0, 0), "b"), tw.wmma_fill()))

@tw.gpu{mark}
def plain(x: tw.GpuBuffer[tw.i32]):
    tw.named_barrier(1, 32)
    tw.atomic_add(x, 0, tw.popcount(tw.ballot(True)))
'''


def messages(path: Path, *options: str) -> dict[int, str]:
    """Errors by line."""
    found = CliRunner().invoke(cli, ["check", "--json", *options, str(path)], catch_exceptions=False)
    errors = {e["line"]: e["message"] for e in json.loads(found.output) if e["severity"] == "error"}
    assert found.exit_code == bool(errors)
    return errors


@pytest.mark.parametrize(("mark", "options"), [("", ["--target", "cpu"]), ("(device='cpu')", []), ("(device='cpu:0/2')", [])])
def test_check_refuses_what_a_cpu_lacks_with_the_line(tmp_path: Path, mark: str, options: list[str]) -> None:
    path = tmp_path / "words.py"
    path.write_text(TEXT.replace("{mark}", mark))
    assert messages(path, *options) == {
        6: "grid_sync, a barrier of the grid, is not available on a CPU: only GPUs have it",
        12: "mbarrier_init, a barrier of copies or of clusters, is not available on a CPU: only GPUs have it",
        16: "cluster.rank, a barrier of copies or of clusters, is not available on a CPU: only GPUs have it",
        20: "wmma_mma, a matrix instruction, is not available on a CPU: only GPUs have it",
    }


def test_check_knows_what_a_gpu_lacks(tmp_path: Path) -> None:
    path = tmp_path / "words.py"
    path.write_text(TEXT.replace("{mark}", ""))
    assert messages(path) == {} and messages(path, "--target", "sm_90a") == {}
    assert messages(path, "--target", "sm_75") == {
        12: "sm_75 cannot do mbarrier_init: it has no mbarrier", 16: "sm_75 cannot do cluster.rank: it has no cluster",
    }  # fmt: skip


def test_launches_on_a_cpu_name_the_same_lines(tmp_path: Path) -> None:
    import importlib.util

    path = tmp_path / "refused_words.py"
    path.write_text(TEXT.replace("{mark}", ""))
    spec = importlib.util.spec_from_file_location("refused_words", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    whole, half = np.zeros(32, np.int32), np.zeros((16, 16), np.float16)
    cases = [
        (module.together, (whole,), 6), (module.copied, (half,), 12), (module.ranked, (whole,), 16), (module.product, (half, half.astype(np.float32)), 20),
    ]  # fmt: skip
    for kernel, args, line in cases:
        args = tuple(a.astype(np.float32).reshape(-1) if kernel is module.copied else a for a in args)
        with pytest.raises(TargetLimit, match="only GPUs have it") as caught:
            kernel[1, 32](*args, device="cpu")
        assert f"refused_words.py:{line}:" in str(caught.value)
    module.plain[1, 32](whole, device="cpu")
    assert whole[0] == 32 * 32
