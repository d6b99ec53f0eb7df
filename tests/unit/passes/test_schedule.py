"""The model that chooses schedules: what it sees in a nest, and its choices where they matter."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from support import add_2d, loop_kernel, map_kernel, reduce_2d, reduce_all, scale_2d, stages_of, strided
from tilewright.analysis.loop_nest import nest_of
from tilewright.base.dtypes import DType, f16, f32, f64, i8
from tilewright.base.sizes import Size
from tilewright.base.target import host_cpu, parse_target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Value
from tilewright.passes.choose.loops import choose
from tilewright.passes.loop.collapse import collapse
from tilewright.passes.schedules.loops import Schedule

GPU = parse_target("sm_90a")


def test_a_nest_knows_its_strides() -> None:
    nest = nest_of(scale_2d())
    assert nest.extents == (Size.of("rows"), Size.of("cols"))
    assert nest.stride_one[0] == 0
    assert nest.stride_one[1] > 0
    assert nest.reductions == ()


def test_a_nest_knows_where_its_reduction_walks() -> None:
    rows, columns = nest_of(reduce_2d("add", 1)), nest_of(reduce_2d("add", 0))
    assert rows.reduce_stride_one > max(rows.stride_one)
    assert columns.reduce_stride_one < max(columns.stride_one)
    assert rows.reduce_extent == Size.of("cols")


@pytest.mark.parametrize(("dtype", "vector"), [(f64, 2), (f32, 4), (f16, 8), (i8, 8)], ids=str)
def test_gpu_vectors_are_sixteen_bytes_at_most(dtype: DType, vector: int) -> None:
    schedule = choose(map_kernel("neg", dtype, 1), GPU, {"n": 1 << 20})
    assert schedule.vector == vector
    assert schedule.vector * dtype.itemsize <= 16


@pytest.mark.parametrize("hints", [{}, {"rows": 1, "cols": 1}, {"rows": 7, "cols": 100000}, {"rows": 100000, "cols": 3}, {"rows": 0, "cols": 0}])
@pytest.mark.parametrize("kernel", [add_2d(), scale_2d(), reduce_2d("add", 0), reduce_2d("add", 1), reduce_2d("argmax", 1)], ids=lambda k: k.name)
@pytest.mark.parametrize("target", ["sm_75", "sm_90a", "sm_120"])
def test_gpu_schedules_fit_the_target(kernel: Kernel, hints: dict[str, int], target: str) -> None:
    chosen = parse_target(target)
    schedule = choose(collapse(kernel), chosen, hints)
    assert 32 <= schedule.threads <= chosen.max_threads
    assert schedule.threads & (schedule.threads - 1) == 0
    for extent in (*schedule.tiles, schedule.reduce_tile):
        assert extent >= 1
        assert extent & (extent - 1) == 0, "tiles are powers of two"
    assert prod(schedule.tiles) * schedule.reduce_tile >= schedule.threads // 32


def test_short_rows_share_a_block() -> None:
    short, long = (choose(reduce_2d(), GPU, {"rows": 4096, "cols": cols}) for cols in (32, 65536))
    assert short.tiles[0] > long.tiles[0] == 1
    aligned = choose(replace(reduce_2d(), facts={"cols": 4}), GPU, {"rows": 4096, "cols": 65536})
    assert aligned.threads > 128
    assert long.shifted and long.threads * long.together > 128  # rows that begin anywhere have several steps on their way instead


def test_columns_keep_lanes_along_memory() -> None:
    schedule = choose(reduce_2d("add", 0), GPU, {"rows": 4096, "cols": 4096})
    assert not schedule.vector_on_reduction
    assert schedule.tiles[0] >= 32


def test_nothing_is_vectorised_without_a_stride_of_one() -> None:
    x, o = strided("x", f32, ["n"], ["s"]), strided("o", f32, ["n"], ["t"])

    def body(b: Builder, i: Value) -> None:
        b.multi("store", o, i, b.op("load", x, i))

    kernel = loop_kernel("strided", [x, o], ["n"], body)
    assert choose(kernel, GPU, {"n": 4096}).vector == 1
    assert choose(kernel, host_cpu(), {}).vector == 1


def test_cpu_searches_extremes_in_runs() -> None:
    assert choose(reduce_all("argmax"), host_cpu(), {}).block_search > 0
    assert choose(reduce_all("max"), host_cpu(), {}).block_search == 0


@pytest.mark.parametrize("target", ["x86-64", "x86-64-avx2", "x86-64-avx512", "aarch64-neon"])
def test_cpu_vectors_are_whole_registers(target: str) -> None:
    chosen = parse_target(target)
    schedule = choose(collapse(add_2d()), chosen, {})
    assert schedule.vector * 4 % chosen.vector_bytes == 0
    assert schedule.chunk % schedule.vector == 0


def test_description_names_what_is_chosen() -> None:
    assert Schedule((1, 256), vector=4, threads=64).describe() == "tiles=(1, 256), vector=4, threads=64"
    stages = stages_of(add_2d(), rows=64, cols=64)
    assert str(stages.tile.calls[0].kernel.attrs["schedule"]) == stages.schedules[0].describe()


def test_hints_never_change_results_only_schedules() -> None:
    assert choose(reduce_2d(), GPU, {"rows": 4, "cols": 64}) != choose(reduce_2d(), GPU, {"rows": 4, "cols": 1 << 20})
