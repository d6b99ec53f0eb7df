"""Targets as data: what a device can do and how much of it there is.

Passes and code generators read limits and features from here and from nowhere else; adding a chip is adding a row.
"""

from __future__ import annotations

import functools
import platform
import re
from dataclasses import dataclass, replace

from tilewright.base.errors import UserError


@dataclass(frozen=True)
class Target:
    """One compilation target."""

    name: str
    """`sm_90a`, `x86-64-avx512`, `aarch64-neon`…"""
    kind: str
    """Code generator family: 'cpu' or 'nvptx'."""
    warp_size: int = 1
    max_threads: int = 1
    """Threads per block."""
    max_shared: int = 0
    """Bytes of shared memory one block can have."""
    max_registers: int = 0
    """Registers per thread."""
    multiprocessors: int = 1
    """Parallel units the schedule model plans for: multiprocessors, or cores."""
    vector_bytes: int = 16
    """Widest single memory access (GPU), or the SIMD register (CPU)."""
    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    features: frozenset[str] = frozenset()
    triple: str = ""
    cpu: str = ""
    cpu_features: str = ""
    ptx: int = 0
    """PTX version times ten."""

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    @property
    def sm(self) -> int:
        """Compute capability times ten, 0 where that has no meaning."""
        match = re.match(r"sm_(\d+)", self.name)
        return int(match.group(1)) if match else 0

    def key(self) -> str:
        """What of it decides the generated code; part of the cache key."""
        return "|".join((self.name, self.triple, self.cpu, self.cpu_features, str(self.ptx), str(self.multiprocessors)))


def _nvptx(name: str, ptx: int, shared: int, multiprocessors: int, *features: str) -> Target:
    return Target(
        name=name, kind="nvptx", warp_size=32, max_threads=1024, max_shared=shared, max_registers=255,
        multiprocessors=multiprocessors, vector_bytes=16, features=frozenset(features),
        triple="nvptx64-nvidia-cuda", cpu=name, ptx=ptx,
    )  # fmt: skip


_AMPERE = ("mma", "cp.async", "bf16")
_HOPPER = (*_AMPERE, "fp8", "tma", "cluster", "mbarrier", "early")
NVPTX: dict[str, Target] = {
    t.name: t
    for t in (
        _nvptx("sm_75", 70, 64 << 10, 40, "mma"),
        _nvptx("sm_80", 71, 163 << 10, 108, *_AMPERE),
        _nvptx("sm_86", 71, 99 << 10, 82, *_AMPERE),
        _nvptx("sm_87", 74, 163 << 10, 16, *_AMPERE),
        _nvptx("sm_89", 78, 99 << 10, 128, *_AMPERE, "fp8"),
        _nvptx("sm_90", 80, 227 << 10, 132, *_HOPPER),
        _nvptx("sm_90a", 80, 227 << 10, 132, *_HOPPER, "wgmma", "setmaxnreg"),
        _nvptx("sm_100", 86, 227 << 10, 148, *_HOPPER),
        _nvptx("sm_100a", 86, 227 << 10, 148, *_HOPPER, "tcgen05", "setmaxnreg"),
        _nvptx("sm_103", 88, 227 << 10, 148, *_HOPPER),
        _nvptx("sm_120", 87, 99 << 10, 170, *_HOPPER),
    )
}
DEFAULT_NVPTX = "sm_90a"

_X86_LEVELS: tuple[tuple[str, int, str], ...] = (("avx512f", 64, "avx512"), ("avx2", 32, "avx2"), ("sse4.1", 16, "sse4.1"))


@functools.cache
def host_cpu() -> Target:
    """The CPU we run on, with its SIMD level detected."""
    import os

    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        level, width = "scalar", 8
        for feature, bytes_, name in _X86_LEVELS:
            if features.get(feature):
                level, width = name, bytes_
                break
        base = "x86-64"
    elif machine in ("aarch64", "arm64"):
        base, level, width = "aarch64", "neon", 16
    else:
        base, level, width = machine, "scalar", 8
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    text = features.flatten()
    if level == "avx512":
        # LLVM prefers 256-bit vectors on many AVX-512 chips; our kernels ask for what they need.
        text += ",-prefer-256-bit"
    return Target(
        name=f"{base}-{level}", kind="cpu", multiprocessors=cores, vector_bytes=width,
        features=frozenset({level}), triple=llvm.get_process_triple(), cpu=llvm.get_host_cpu_name(), cpu_features=text,
    )  # fmt: skip


_CPU_PRESETS: dict[str, tuple[str, str, str, int]] = {
    "x86-64": ("x86_64-unknown-linux-gnu", "x86-64", "", 16),
    "x86-64-sse4.1": ("x86_64-unknown-linux-gnu", "x86-64", "+sse4.1", 16),
    "x86-64-avx2": ("x86_64-unknown-linux-gnu", "haswell", "", 32),
    "x86-64-avx512": ("x86_64-unknown-linux-gnu", "skylake-avx512", "-prefer-256-bit", 64),
    "aarch64-neon": ("aarch64-unknown-linux-gnu", "neoverse-n1", "", 16),
}


def names() -> list[str]:
    """Every spelling `parse_target` accepts."""
    return ["cpu", *_CPU_PRESETS, "nvptx", *NVPTX]


def parse_target(name: str) -> Target:
    """The target a user named: `cpu` (this machine), `x86-64-avx2`, `nvptx` (the default GPU), `sm_80`…"""
    if name == "cpu":
        return host_cpu()
    if name == "nvptx":
        return NVPTX[DEFAULT_NVPTX]
    if name in NVPTX:
        return NVPTX[name]
    if name in _CPU_PRESETS:
        triple, cpu, features, width = _CPU_PRESETS[name]
        return Target(
            name=name, kind="cpu", multiprocessors=2, vector_bytes=width, triple=triple, cpu=cpu, cpu_features=features
        )
    raise UserError.at("TW021", f"unknown target '{name}'", help=f"choose one of {', '.join(names())}")


def for_device(major: int, minor: int, multiprocessors: int, max_shared: int) -> Target:
    """The best target for a GPU of that compute capability, with the numbers the driver reported."""
    number = f"sm_{major}{minor}"
    known = NVPTX.get(number + "a") or NVPTX.get(number)
    if known is None:
        older = [t for t in NVPTX.values() if t.sm // 10 == major and t.sm <= major * 10 + minor and t.name[-1] != "a"]
        if not older:
            raise UserError.at("TW021", f"no code generator for compute capability {major}.{minor}")
        known = max(older, key=lambda t: t.sm)
    return replace(known, multiprocessors=multiprocessors, max_shared=max_shared)
