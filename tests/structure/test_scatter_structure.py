"""What scatters compile to: atomics of shared and global memory on GPUs, copies and no atomics on CPUs; ptxas accepts all of it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.run import test_ragged_rows as rows
from tests.run import test_scatter as scatters

from assembled import assemble
from tilewright.execute.kernel import Kernel

K, W, SMALL, LARGE = np.zeros(100_000, np.int32), np.zeros(100_000, np.float32), np.zeros(256, np.float32), np.zeros(1 << 20, np.float32)


def ptx_of(kernel: Kernel, *arguments: object, target: str = "sm_90a") -> str:
    return kernel.compile(*arguments, target=target).code.decode()


def test_small_arrays_meet_in_shared_memory() -> None:
    text = ptx_of(scatters.scatter_add, K, W, SMALL)
    assert "atom.shared.add.f32" in text or "red.shared.add.f32" in text
    assert ".shared" not in ptx_of(scatters.scatter_add, K, W, LARGE)


@pytest.mark.parametrize("target", ["sm_75", "sm_90a"])
@pytest.mark.parametrize("kind", sorted(scatters.KERNELS))
def test_ptxas_accepts_every_kind(kind: str, target: str) -> None:
    kernel, _ = scatters.KERNELS[kind]
    dtypes = (np.int16, np.uint64) if kind in ("and", "or", "xor") else (np.float16, np.float32, np.float64, np.uint8, np.int64)
    for dtype in dtypes if target == "sm_90a" else dtypes[:1]:
        for first in (SMALL, LARGE) if dtype is not np.float64 else (SMALL,):
            done = assemble(ptx_of(kernel, K, W.astype(dtype), first.astype(dtype), target=target), target)
            assert done.registers, f"{kind} {dtype.__name__} {target}"
            assert done.local <= 64, f"{kind} {dtype.__name__} {target}"  # reports of indices outside may keep a few numbers there


def test_nobody_waits_for_old_values() -> None:
    text = ptx_of(scatters.scatter_add, K, W, LARGE)
    assert "red.relaxed.gpu.global.add.f32" in text and "vote" in text
    assert not any("add.f32" in line for line in text.splitlines() if "atom." in line)


def test_lanes_of_sparse_rows_by_their_mean_length() -> None:
    starts, x = np.zeros(1025, np.int32), np.zeros(64, np.float32)
    for mean, lanes in ((4, 2), (32, 16), (200, 32)):
        columns, v = np.zeros(1024 * mean, np.int32), np.zeros(1024 * mean, np.float32)
        artifact = rows.csr.compile(starts, columns, v, x, target="sm_90a")
        assert f"row_lanes={lanes}" in artifact.schedule, artifact.schedule
    dense = rows.csr_times_dense.compile(starts, columns, v, np.zeros((64, 64), np.float32), target="sm_90a")
    assert "tiles=(16, 64), reduce_tile=4, vector=4, threads=256" in dense.schedule


@pytest.mark.parametrize("target", ["sm_75", "sm_90a"])
def test_ptxas_accepts_sparse_rows(target: str) -> None:
    starts, x, columns, v = np.zeros(1025, np.int32), np.zeros(64, np.float32), np.zeros(32768, np.int32), np.zeros(32768, np.float32)
    for kernel, arguments in (
        (rows.csr, (starts, columns, v, x)), (rows.csr_times_dense, (starts, columns, v, np.zeros((64, 64), np.float32))), (rows.segments, (starts, v)),
        (scatters.csr_transposed, (starts, columns, v, x, x)),
    ):  # fmt: skip
        done = assemble(ptx_of(kernel, *arguments, target=target), target)
        assert done.registers and done.local <= 64, (kernel.__name__, target)


def test_deterministic_sums_are_integers() -> None:
    text = ptx_of(scatters.scatter_add_deterministic, K, W, LARGE)
    assert "add.f32" not in "\n".join(line for line in text.splitlines() if "atom" in line or "red." in line)
    assert any("add.u64" in line for line in text.splitlines() if "atom" in line or "red." in line)


def test_a_cpu_has_no_atomics() -> None:
    for kernel in (scatters.scatter_add, scatters.scatter_max, scatters.scatter_mul):
        artifact = kernel.compile(K, W, SMALL, target="cpu")
        assert "parts" in artifact.schedule or len(artifact.launches) == 4
