"""Several devices at once, for real: parts of the CPU's cores. Data parallel, pipelines, independent parts, lists of kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kernels_several as kernels
import tilewright as tw
from tilewright.base.errors import DeviceError, UserError
from tilewright.distributed.data_parallel import ranges
from tilewright.distributed.placement import PlacedJob, place
from tilewright.runtime.cpu import pool as cpu_pool

pytestmark = pytest.mark.skipif(len(cpu_pool.usable_cores()) < 2, reason="one core has no parts")
HALVES = ["cpu:0/2", "cpu:1/2"]
RNG = np.random.default_rng(5)


def matrix(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# -- devices --------------------------------------------------------------------------------------------------------


def test_partitions_share_the_cores_out() -> None:
    whole = tw.devices()[0]
    parts = tw.cpu_partitions(2)
    assert [d.id for d in parts] == HALVES
    assert sorted(parts[0].cores + parts[1].cores) == sorted(whole.cores) == sorted(os.sched_getaffinity(0))
    assert not set(parts[0].cores) & set(parts[1].cores)
    assert [d.multiprocessors for d in parts] == [len(d.cores) for d in parts]
    assert whole.type == "cpu" and whole.memory > whole.free_memory > 0
    assert whole.simd and whole.limits.vector_bytes in (8, 16, 32, 64)
    assert {cache.level for cache in whole.caches} >= {1} or not whole.caches


@pytest.mark.parametrize("count", [0, -1, True, "2"])
def test_a_bad_number_of_partitions_is_refused(count: Any) -> None:
    with pytest.raises(UserError, match="the number of CPU partitions is"):
        tw.cpu_partitions(count)


def test_more_partitions_than_cores_are_refused() -> None:
    with pytest.raises(DeviceError, match="cannot be divided by 100000"):
        tw.cpu_partitions(100_000)
    with pytest.raises(UserError, match=r"unknown device 'cpu:2/2'"):
        kernels.softmax_rows()(matrix(4, 4), device="cpu:2/2")


def test_kernels_run_on_the_partitions_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = cpu_pool.partition(1, 2)
    seen: list[set[int]] = []
    code = cpu_pool.pool().code  # that of the first pool: all launch through it
    plain = code.launch

    def launch(*arguments: int) -> int:
        seen.append(os.sched_getaffinity(0))
        return plain(*arguments)

    monkeypatch.setattr(code, "launch", launch)
    before = os.sched_getaffinity(0)
    x = matrix(300, 40)
    kernel = kernels.softmax_rows()
    np.testing.assert_allclose(kernel(x, device="cpu:1/2"), kernel(x), rtol=1e-6)
    assert seen == [set(pool.cores)]
    assert os.sched_getaffinity(0) == before


def test_partitions_serve_many_threads_and_futures() -> None:
    kernel, x = kernels.softmax_rows(), matrix(512, 128)
    expected = kernel(x)
    wrong: list[object] = []

    def work(device: str) -> None:
        for _ in range(20):
            if not np.allclose(kernel(x, device=device), expected, rtol=1e-6):
                wrong.append(device)

    threads = [threading.Thread(target=work, args=(HALVES[n % 2],)) for n in range(6)]
    for thread in threads:
        thread.start()
    futures = [kernel(x, device=device, asynchronous=True) for device in HALVES]
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(np.allclose(future.result(), expected, rtol=1e-6) for future in futures)


def test_a_partition_as_the_default_device() -> None:
    kernel, x = kernels.softmax_rows(), matrix(8, 8)
    tw.set_default_device("cpu:0/2")
    try:
        np.testing.assert_allclose(kernel(x), kernel(x, device="cpu"), rtol=1e-6)
    finally:
        tw.set_default_device("cpu")


def test_devices_stand_for_their_names() -> None:
    kernel, x = kernels.softmax_rows(), matrix(8, 8)
    for device in (*tw.cpu_partitions(2), tw.compute_devices()[0]):
        np.testing.assert_array_equal(kernel(x, device=device), kernel(x))
    tw.set_default_device(tw.cpu_partitions(2)[1])
    try:
        assert tw.default_device() == "cpu:1/2"
    finally:
        tw.set_default_device("cpu")
    with pytest.raises(UserError, match="a device is 5"):
        tw.set_default_device(5)  # type: ignore[arg-type]
    np.testing.assert_allclose(kernel(x, device=["emulator", "cpu"]), kernel(x), rtol=1e-5)


def test_graphs_refuse_partitions() -> None:
    kernel, x = kernels.softmax_rows(), matrix(8, 8)
    kernel(x)
    with pytest.raises(DeviceError, match="cpu:0/2"), tw.capture(device="cpu"):
        kernel(x, device="cpu:0/2")


# -- data parallel --------------------------------------------------------------------------------------------------


def test_ranges_cover_everything_once() -> None:
    for extent in (0, 1, 2, 15, 16, 33, 100, 1000):
        for shares in ([1.0], [1.0, 1.0], [3.0, 1.0], [1.0, 0.0, 2.0], [1.0] * 7):
            cut = ranges(extent, shares)
            assert [start for start, _ in cut][1:] == [stop for _, stop in cut][:-1]
            assert cut[0][0] == 0 and cut[-1][1] == extent
            assert all(start <= stop for start, stop in cut)
    assert ranges(100, [3, 1]) == [(0, 80), (80, 100)]
    assert ranges(10, [1, 1]) == [(0, 5), (5, 10)]


@pytest.mark.parametrize("rows", [0, 1, 2, 31, 1000])
def test_rows_are_shared_out(rows: int) -> None:
    x = matrix(rows, 33)
    kernel = kernels.softmax_rows()
    spread = tw.parallel(kernel, HALVES, data=True)
    np.testing.assert_array_equal(spread(x), kernel(x))
    assert sum(part.stop - part.start for part in spread.last) == rows
    assert len(spread.last) == (2 if rows > 1 else 1)
    assert kernel.ran == spread.last


def test_every_way_to_ask_for_it() -> None:
    x, b = matrix(64, 16), matrix(16)
    kernel = kernels.shifted_exp()
    expected = kernel(x, b)
    np.testing.assert_array_equal(kernel(x, b, device=HALVES), expected)
    np.testing.assert_array_equal(kernel(x, b=b, device=tw.cpu_partitions(2)), expected)
    np.testing.assert_array_equal(kernel(x, b, device=tuple(HALVES), asynchronous=True).result(), expected)
    future = kernels.shifted_exp()(x, b, asynchronous=True)
    np.testing.assert_array_equal(kernel(future, b, device=HALVES), kernel(expected, b))
    out = np.empty_like(x)
    assert kernel(x, b, device=HALVES, out=out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(kernel(x, b), expected)

    @tw.kernel(parallel="data", devices=HALVES)
    def doubled(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] * 2.0
        return out

    for _ in range(3):
        np.testing.assert_array_equal(doubled(b), b * 2)
        assert [part.device for part in doubled.ran] == HALVES
    np.testing.assert_array_equal(doubled(b, device="cpu"), b * 2)


def test_strided_arrays_and_columns() -> None:
    x, b = matrix(40, 70), matrix(70)
    kernel = kernels.shifted_exp()
    np.testing.assert_array_equal(kernel(x[::2, :], b, device=HALVES), kernel(x[::2, :], b))
    columns = tw.parallel(kernel, HALVES, along=("x", 1))
    np.testing.assert_array_equal(columns(x, b), kernel(x, b))
    assert columns.split(x, b).axes == (("x", 1), ("b", 0), ("result", 1))


def test_a_batch_of_one_is_shared_out_along_another_axis() -> None:
    kernel, b = kernels.shifted_exp(), matrix(40)
    for rows, axes in ((1, (("x", 1), ("b", 0), ("result", 1))), (2, (("x", 0), ("result", 0)))):
        x = matrix(rows, 40)
        spread = tw.parallel(kernel, HALVES)
        np.testing.assert_array_equal(spread(x, b), kernel(x, b))
        assert spread.split(x, b).axes == axes
        assert len(spread.last) == 2


def test_sums_are_combined() -> None:
    x = matrix(999, 20)
    kernel = kernels.column_sums()
    np.testing.assert_allclose(tw.parallel(kernel, HALVES, along=("x", 0))(x), x.sum(0, dtype=np.float64), atol=1e-4)
    narrow = x[:100].astype(ml_dtypes.bfloat16)
    found = tw.parallel(kernel, HALVES, along=("x", 0))(narrow)
    np.testing.assert_allclose(found.astype(np.float32), narrow.astype(np.float32).sum(0), rtol=0.02, atol=0.2)
    low, high, total = kernels.extremes()(x[:, 0], device=HALVES)
    assert (low[0], high[0]) == (x[:, 0].min(), x[:, 0].max())
    np.testing.assert_allclose(total, x[:, 0].sum(dtype=np.float64), atol=1e-4)
    inner = tw.parallel(kernels.product(), HALVES, along=("a", 1))
    np.testing.assert_allclose(inner(x[:50, :], x[:20, :]), x[:50] @ x[:20], atol=1e-4)


def test_shares_say_who_gets_how_much() -> None:
    x = matrix(160, 8)
    spread = tw.parallel(kernels.softmax_rows(), HALVES, shares=[3, 1])
    spread(x)
    assert [(part.start, part.stop) for part in spread.last] == [(0, 128), (128, 160)]
    alone = tw.parallel(kernels.softmax_rows(), HALVES, shares=[0, 1])
    alone(x)
    assert [part.device for part in alone.last] == ["cpu:1/2"]


@pytest.mark.parametrize("shares", [[1], [1, -1], [0, 0], [1, float("nan")], [1, True]])
def test_bad_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(UserError, match="shares="):
        tw.parallel(kernels.softmax_rows(), HALVES, shares=shares)


def test_bad_calls_are_refused_before_anything_runs() -> None:
    kernel, x = kernels.softmax_rows(), matrix(8, 8)
    with pytest.raises(UserError, match=r"names 0 device\(s\)"):
        kernel(x, device=[])
    with pytest.raises(UserError, match="a device is 3"):
        kernel(x, device=["cpu", 3])
    with pytest.raises(UserError, match="unknown device 'tpu'"):
        kernel(x, device=["cpu", "tpu"])
    with pytest.raises(UserError, match="stream= is not possible"):
        kernel(x, device=HALVES, stream=tw.Stream("cpu"))
    with pytest.raises(UserError, match=r"out= for 'out' is no f32\[8, 8\]"):
        kernel(x, device=HALVES, out=np.empty((8, 9), np.float32))
    with pytest.raises(UserError, match="shares memory with an input"):
        kernel(x, device=HALVES, out=x)
    with pytest.raises(UserError, match="along the axis that is split"):
        tw.parallel(kernels.product(), HALVES, along=("a", 1))(matrix(4, 5), matrix(6, 4))
    with pytest.raises(UserError, match="parallel is 'model'"):
        tw.kernel(parallel="model", devices=HALVES)
    with pytest.raises(UserError, match="devices is None"):
        tw.kernel(parallel="data")
    with pytest.raises(UserError, match="give one of them"):
        tw.kernel(device="cpu", devices=HALVES)
    with pytest.raises(UserError, match="is no kernel"):
        tw.parallel(np.exp, HALVES)
    with pytest.raises(UserError, match=r"parallel\(\) splits one kernel"):
        tw.parallel(kernel, HALVES, model=True)


def test_an_error_in_a_part_is_raised_once_all_are_done() -> None:
    kernel = kernels.product()
    with pytest.raises(UserError):
        kernel(matrix(64, 5), matrix(6, 4), device=HALVES)
    np.testing.assert_allclose(kernel(matrix(4, 5), matrix(5, 4), device=HALVES).shape, (4, 4))


# -- pipelines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [None, 1, 3, 100])
def test_stages_on_devices_of_their_own(microbatches: int | None) -> None:
    x, b, w = matrix(50, 16), matrix(16), matrix(16, 7)
    first, second, third = kernels.shifted_exp(), kernels.product(), kernels.softmax_rows()
    stages = [tw.stage(first, b), tw.stage(second, w), third]
    line = tw.parallel(stages, [*HALVES, HALVES[0]], model=True, microbatches=microbatches)
    np.testing.assert_allclose(line(x), third(second(first(x, b), w)), rtol=1e-5, atol=1e-6)
    count = min(50, 6 if microbatches is None else microbatches)
    assert len(line.last) == 3 * count
    by_part = {(step.start, step.stage): step for step in line.last}
    for start in {step.start for step in line.last}:
        assert by_part[start, "shifted_exp"].end <= by_part[start, "product"].begin
        assert by_part[start, "product"].end <= by_part[start, "softmax_rows"].begin
    np.testing.assert_allclose(line(x, asynchronous=True).result(), line(x))


def test_microbatches_overlap() -> None:
    x, b = matrix(4096, 256), matrix(256)
    line = tw.parallel([tw.stage(kernels.shifted_exp(), b), kernels.softmax_rows()], HALVES, microbatches=8)
    line(x)
    line(x)
    first = [step for step in line.last if step.device == HALVES[0]]
    second = [step for step in line.last if step.device == HALVES[1]]
    assert min(step.begin for step in second) < max(step.end for step in first)


def test_stages_that_mix_the_batch_are_refused() -> None:
    x = matrix(32, 8)
    with pytest.raises(UserError, match="does not have the batch as its first axis"):
        tw.parallel([kernels.softmax_rows(), kernels.column_sums()], HALVES)(x)
    line = tw.parallel([kernels.softmax_rows(), kernels.column_sums()], HALVES, microbatches=1)
    np.testing.assert_allclose(line(x), kernels.softmax_rows()(x).sum(0), rtol=1e-5)
    with pytest.raises(UserError, match="has the axis of the batch"):
        tw.parallel([tw.stage(kernels.shifted_exp(), matrix(32, 8)), kernels.softmax_rows()], HALVES)(x)
    with pytest.raises(UserError, match=r"2 stage\(s\) and 1 device\(s\)"):
        tw.parallel([kernels.softmax_rows(), kernels.softmax_rows()], ["cpu"])
    with pytest.raises(UserError, match="is no stage"):
        tw.parallel([np.exp], ["cpu"])
    with pytest.raises(UserError, match="microbatches is 0"):
        tw.parallel([kernels.softmax_rows()] * 2, HALVES, microbatches=0)
    with pytest.raises(UserError, match=r"the batch of a pipeline is 3\.0"):
        tw.parallel([kernels.softmax_rows()] * 2, HALVES)(3.0)


# -- independent parts ----------------------------------------------------------------------------------------------


def test_independent_parts_run_on_both_devices() -> None:
    x, y = matrix(3000), np.abs(matrix(2900))
    kernel = kernels.two_ways()
    expected = kernel(x, y, 1.5)
    placed = tw.heterogeneous(kernel, HALVES)
    for found, right in zip(placed(x, y, 1.5), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5)
    assert {ran.device for ran in placed.last} == set(HALVES)
    names = [ran.name for ran in placed.last]
    assert len(names) == len(set(names)) >= 3
    chosen = dict.fromkeys(names, HALVES[1])
    by_name = tw.heterogeneous(kernel, HALVES, chosen)
    np.testing.assert_allclose(by_name(x, y, 1.5)[0], expected[0], rtol=1e-5)
    assert {ran.device for ran in by_name.last} == {HALVES[1]}


def test_heterogeneous_as_a_device() -> None:
    x, y = matrix(100), np.abs(matrix(90))
    kernel = kernels.two_ways()
    expected = kernel(x, y, 2.0)
    for device in ("heterogeneous", tw.CompileTarget.HETEROGENEOUS, tw.CompileTarget.heterogeneous):
        found = kernel(x, y, 2.0, device=device, devices=HALVES)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        assert {ran.device for ran in kernel.ran} <= set(HALVES)
    out = np.empty(100, np.float32), np.empty(90, np.float32)
    assert kernel(x, y, 2.0, device="heterogeneous", out=out) is out
    np.testing.assert_allclose(out[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(kernel(x, y, 2.0, device="heterogeneous", asynchronous=True).result()[1], expected[1])
    np.testing.assert_array_equal(kernel(x, y, 2.0, device=tw.CompileTarget.CPU)[0], expected[0])
    with pytest.raises(UserError, match="placement names 'nothing'"):
        kernel(x, y, 2.0, device="heterogeneous", devices=HALVES, placement={"nothing": "cpu:0/2"})
    with pytest.raises(UserError, match="on 'cuda:7'"):
        kernel(x, y, 2.0, device="heterogeneous", devices=HALVES, placement={kernel.ran[0].name: "cuda:7"})
    with pytest.raises(UserError, match=r"out= for 'c' is no f32\[100\]"):
        kernel(x, y, 2.0, device="heterogeneous", out=(np.empty(3, np.float32), out[1]))


def test_whole_numbers_reach_every_part() -> None:
    @tw.kernel
    def powers(x: tw.Array, y: tw.Array, rounds: int) -> tuple[tw.Array, tw.Array]:
        n, m = x.shape[0], y.shape[0]
        a = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            value = x[i]
            for _ in range(rounds):
                value = value * 2.0
            a[i] = value
        b = tw.empty((m,), y.dtype)
        for i in tw.grid(m):
            b[i] = y[i] * rounds
        return a, b

    x, y = matrix(100), matrix(70)
    a, b = powers(x, y, 3, device="heterogeneous", devices=HALVES)
    np.testing.assert_array_equal(a, x * 8)
    np.testing.assert_array_equal(b, y * 3)
    assert {ran.device for ran in powers.ran} == set(HALVES)
    a, b = powers(x, y, 2, device="heterogeneous", devices=HALVES)
    np.testing.assert_array_equal(a, x * 4)


def test_kernels_with_one_part_and_contractions_are_placed_too() -> None:
    a, b = matrix(64, 48), matrix(48, 80)
    kernel = kernels.product()
    np.testing.assert_allclose(kernel(a, b, device="heterogeneous", devices=HALVES), a @ b, atol=1e-4)
    np.testing.assert_allclose(kernel(a[:50], b, device="heterogeneous", devices=HALVES), a[:50] @ b, atol=1e-4)
    with pytest.raises(UserError):
        kernel(a, a, device="heterogeneous", devices=HALVES)


def test_tasks_wait_for_what_they_need() -> None:
    x, b = matrix(200, 40), matrix(40)
    soft, shift = kernels.softmax_rows(), kernels.shifted_exp()
    left = tw.task(soft, x)
    right = tw.task(shift, x, b, device="cpu:1/2")
    both = tw.task(shift, left, b, name="both")
    done = tw.schedule([both, right], devices=HALVES)
    np.testing.assert_array_equal(done.results[0], shift(soft(x), b))
    np.testing.assert_array_equal(done.results[1], shift(x, b))
    assert {ran.name: ran.device for ran in done.ran}["shifted_exp"] == "cpu:1/2"
    assert [ran.name for ran in done.ran] == [item.name for item in done.plan]
    fixed = tw.schedule([both], devices=HALVES, placement={"both": "cpu:1/2", "softmax_rows": "cpu:0/2"})
    assert {ran.name: ran.device for ran in fixed.ran} == {"both": "cpu:1/2", "softmax_rows": "cpu:0/2"}
    total = tw.task(kernels.column_sums(), left)
    np.testing.assert_allclose(tw.schedule([total], devices=HALVES).results[0], soft(x).sum(0), rtol=1e-4)


def test_bad_tasks_are_refused() -> None:
    x = matrix(8, 8)
    with pytest.raises(UserError, match="is no task"):
        tw.schedule([x])  # type: ignore[list-item]
    with pytest.raises(UserError, match="a task has one result"):
        tw.schedule([tw.task(kernels.extremes(), x[0])], devices=HALVES)
    with pytest.raises(UserError, match="missing 'b'"):
        tw.task(kernels.product(), x)
    with pytest.raises(UserError):
        tw.schedule([tw.task(kernels.product(), tw.task(kernels.softmax_rows(), x), matrix(9, 3))], devices=HALVES)


def test_the_scheduler_uses_what_is_free_and_keeps_what_belongs_together() -> None:
    first, second = tw.cpu_partitions(2)
    work = PlacedJob("a", 0, 12e6, (), ("a",))
    placed = place([work, PlacedJob("b", 0, 12e6, (), ("b",))], [first, second], {}, first)
    assert {item.device for item in placed} == {first.id, second.id}
    assert {item.start for item in placed} == {0.0}
    chain = [work, PlacedJob("c", 0, 12e6, ("a",), ("c",), (0,))]
    after = place(chain, [first, second], {"a": 1 << 20}, first)
    assert after[1].start == after[0].stop
    urgent = [PlacedJob("short", 0, 12e3, (), ()), PlacedJob("long", 0, 12e6, (), ("x",)), PlacedJob("end", 0, 12e6, ("x",), (), (1,))]
    order = place(urgent, [first], {}, first)
    assert order[1].start == 0.0 < order[0].start


# -- processes ------------------------------------------------------------------------------------------------------


def test_forks_and_exits(tmp_path: Any) -> None:
    script = tmp_path / "several_forks.py"
    script.write_text(
        textwrap.dedent("""
        import os
        import numpy as np
        import tilewright as tw

        @tw.kernel
        def doubled(x: tw.Array) -> tw.Array:
            n = x.shape[0]
            out = tw.empty((n,), x.dtype)
            for i in tw.grid(n):
                out[i] = x[i] * 2.0
            return out

        x = np.arange(200_000, dtype=np.float32)
        devices = ["cpu:0/2", "cpu:1/2"]
        assert (doubled(x, device=devices) == x * 2).all()
        child = os.fork()
        assert (doubled(x, device=devices) == x * 2).all()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            doubled(x, device=devices, asynchronous=True)
            print("done")
    """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
