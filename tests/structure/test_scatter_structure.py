"""What scatters compile to: atomics of shared and global memory on GPUs, copies and no atomics on CPUs; ptxas accepts all of it."""

from __future__ import annotations

import numpy as np
import pytest
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
            assert done.spills == 0, f"{kind} {dtype.__name__} {target}"


def test_deterministic_sums_are_integers() -> None:
    text = ptx_of(scatters.scatter_add_deterministic, K, W, LARGE)
    assert "add.f32" not in "\n".join(line for line in text.splitlines() if "atom" in line or "red." in line)
    assert any("add.u64" in line for line in text.splitlines() if "atom" in line or "red." in line)


def test_a_cpu_has_no_atomics() -> None:
    for kernel in (scatters.scatter_add, scatters.scatter_max, scatters.scatter_mul):
        artifact = kernel.compile(K, W, SMALL, target="cpu")
        assert "parts" in artifact.schedule or len(artifact.launches) == 4
