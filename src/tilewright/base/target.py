"""Targets as data: what a device can do and how much of it there is.

Passes and code generators read limits and features from here and from nowhere else; adding a chip is adding a row.
"""

from __future__ import annotations

import functools
import platform
import re
import sys
from dataclasses import dataclass, replace

from tilewright.base.cost_model import FITTED, H200, CostModel, derived, with_numbers
from tilewright.base.errors import UserError


@dataclass(frozen=True)
class Target:
    """One compilation target."""

    name: str
    """`sm_90a`, `x86-64-avx512`, `aarch64-neon`…"""
    kind: str
    """Code generator family: 'cpu', 'nvptx', or that of a registered backend."""
    warp_size: int = 1
    """Lanes that execute together and can exchange values; a power of two."""
    emulated_warp: int = 32
    """Lanes of a warp in explicit kernels where the device has no warps of its own: a vec stands for one."""
    max_threads: int = 1
    """Threads per block."""
    max_shared: int = 0
    """Bytes of shared memory one block can have."""
    max_local: int = 0
    """Bytes of local memory one thread can have; 0 where only the machine's memory limits them."""
    max_registers: int = 0
    """Registers per thread."""
    multiprocessors: int = 1
    """Parallel units the schedule model plans for: multiprocessors, or cores."""
    vector_bytes: int = 16
    """Widest single memory access (GPU), or the SIMD register (CPU)."""
    index_bits: int = 64
    """Bits in which indices that are proven to fit are computed."""
    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    features: frozenset[str] = frozenset()
    """Instructions and units it has beyond plain arithmetic: `mma`, `cp.async`, `tma`, `approx`, `amx`…; `tiles`: products are multiplied in tiles of
    registers and shared memory without any of them; `vec4`: memory can be one of vectors of four numbers of
    32 bits; `f16`: a portable GPU keeps f16 in memory and converts it, `f16.denormals`: it can be asked to keep small ones; `spir`: SPIR-V becomes LLVM's older form, in which its functions have names; `serial`: a CPU runs the threads one after another, and where they meet is dear."""
    missing_dtypes: frozenset[str] = frozenset()
    """Dtypes it cannot compute with or keep in memory."""
    atomic_bits: frozenset[int] = frozenset({8, 16, 32, 64, 128})
    """Sizes of elements that one atomic access can have."""
    soft_casts: frozenset[str] = frozenset({"f8e4m3", "f8e5m2"})
    """Dtypes that it converts by arithmetic, for want of an instruction."""
    executed: bool = True
    """Whether its code has been run on a device; else it is compiled and checked, and says so."""
    wide_ints: bool = True
    """Whether it computes with integers of 64 bits; where not, indices are those of 32 (`passes/portable/narrow_indices.py`)."""
    vectors: bool = True
    """Whether a thread's registers hold short vectors of any dtype; where not, their elements are numbers of their own."""
    atomic_floats: bool = True
    """Whether it adds and compares floats atomically; where not, that is a loop of compare-and-swap."""
    forward_progress: bool = True
    """Whether a block that has started goes on whatever others do: what waits for another block needs it."""
    max_arrays: int = 0
    """Arrays that one kernel can have; 0 where there is no limit."""
    max_turns: int = 0
    """Iterations of all loops of a thread after which its driver leaves them without a word; 0 where there is no such limit."""
    triple: str = ""
    cpu: str = ""
    cpu_features: str = ""
    ptx: int = 0
    """PTX version times ten."""
    level: str = ""
    """The optimisation level of code for it (`base/levels.py`); empty for the default one."""

    registers_per_sm: int = 0
    shared_per_sm: int = 0
    threads_per_sm: int = 0
    blocks_per_sm: int = 0
    """What the blocks on one multiprocessor share; 0 on a CPU."""
    chip: str = ""
    """The chip that `peaks` and `bandwidth` are of: one for each target, where there are several."""
    peaks: tuple[tuple[str, float], ...] = ()
    """Dense TFLOP/s (TOP/s for integers) by kind of arithmetic: a dtype, `tf32`, and `f64.matrix` for f64 on tensor cores. Empty: unknown.
    f16, bf16, tf32, f8 and i8 are those of tensor cores with sums in 32 bits."""
    bandwidth: float = 0.0
    """TB/s of the device's memory; 0: unknown."""
    tuned: tuple[tuple[str, int], ...] = ()
    """What a schedule of loops says instead of the cost model: numbers of it, as `rows.threads`, and the wishes `vector` and `threads`."""

    @property
    def is_host(self) -> bool:
        """Whether its code is an object that runs in a process of the host, without a device."""
        return self.kind == "cpu"

    @property
    def is_gpu(self) -> bool:
        return not self.is_host

    @property
    def simt(self) -> bool:
        """Whether a block has several threads, with warps and shared memory."""
        return self.max_threads > 1

    @property
    def simt_warp(self) -> int:
        """Lanes of a warp as explicit kernels see it."""
        return self.warp_size if self.has_warps else self.emulated_warp

    @property
    def has_warps(self) -> bool:
        """Whether neighbouring threads of a block exchange values by themselves. Where they do not, a compiled kernel has warps of one lane, and
        the warps of explicit kernels meet in shared memory (`passes/portable/warps_to_shared.py`)."""
        return self.simt and self.warp_size > 1

    @property
    def vector_scale(self) -> int:
        """By how much an SVE register is longer than 16 bytes; 0 where a CPU's vectors are no SVE registers. Code for one length is wrong at another."""
        return self.vector_bytes // 16 if self.is_host and self.name.startswith("aarch64-sve") else 0

    @property
    def has_ieee_maximum(self) -> bool:
        """Whether one instruction of a CPU is the larger of two numbers as IEEE 754-2019 has it: NaN wins, and -0 is below 0."""
        return self.is_host and self.name.startswith("aarch64")

    @property
    def has_range(self) -> bool:
        """Whether a CPU has AVX-512's `vrange`, an IEEE 754-2019 maximum but for NaN."""
        return self.is_host and self.name in _WITH_AVX512 and "-avx512dq" not in self.cpu_features

    @property
    def has_lane_masks(self) -> bool:
        """Whether a CPU loads and stores some lanes of a vector as fast as all of them."""
        return self.is_host and (self.name in _WITH_AVX512 or self.vector_scale > 0)

    @property
    def vector_registers(self) -> int:
        """How many SIMD registers a CPU has."""
        return 32 if self.name in _WITH_AVX512 or self.name.startswith("aarch64") else 16

    @property
    def fetches_results(self) -> bool:
        """Whether a CPU writes memory faster where a loop asks for lines that it will write to: a processor by itself asks for those it reads."""
        return self.is_host and self.name in _WITH_AVX512

    @property
    def ballot_bits(self) -> int:
        """Bits of the word that holds one bit for each lane of a warp."""
        return max(32, self.simt_warp)

    def has(self, *features: str) -> bool:
        """Whether it has all these features."""
        return self.features.issuperset(features)

    @property
    def sm(self) -> int:
        """Compute capability times ten, 0 where that has no meaning."""
        match = re.match(r"sm_(\d+)", self.name)
        return int(match.group(1)) if match else 0

    def peak(self, arithmetic: str) -> float:
        """Dense TFLOP/s of a kind of arithmetic; 0 where it is not known."""
        return dict(self.peaks).get(arithmetic, 0.0)

    @property
    def costs(self) -> CostModel:
        """What things cost there: fitted numbers, or such that are derived from what the device can do."""
        known = FITTED.get(self.name) or (None if self.is_gpu else H200)
        found = known or derived(self.multiprocessors, self.bandwidth, self.peak("bf16"), self.peak("f32"))
        return with_numbers(found, self.tuned) if self.tuned else found

    def __repr__(self) -> str:
        return f"<target {self.name}>"

    def key(self) -> str:
        """What of it decides the generated code; part of the cache key."""
        return "|".join((self.name, self.triple, self.cpu, self.cpu_features, str(self.ptx), str(self.multiprocessors), *self._limits(), *([self.level] if self.level else [])))

    def _limits(self) -> tuple[str, ...]:
        """Of portable GPUs, whose name says little: what the driver reported."""
        return () if self.is_host or (self.wide_ints and self.has_warps) else (str(self.max_threads), str(self.max_shared), str(self.max_arrays), str(self.max_turns), *sorted(self.features))


_WITH_AVX512 = frozenset({"x86-64-avx512", "x86-64-amx"})
"""CPUs whose vectors have masks, with matrix units or without."""

_PER_SM: dict[int, tuple[int, int, int]] = {
    75: (64 << 10, 1024, 16), 80: (164 << 10, 2048, 32), 86: (100 << 10, 1536, 16), 87: (164 << 10, 1536, 16), 89: (100 << 10, 1536, 24),
    90: (228 << 10, 2048, 32), 100: (228 << 10, 2048, 32), 103: (228 << 10, 2048, 32), 120: (100 << 10, 1536, 24),
}  # fmt: skip
"""By compute capability: bytes of shared memory, threads and blocks of one multiprocessor (CUDA C Programming Guide)."""


def _tensor_rates(half: float, f32: float, f64: float, tf32: float = 0.0, f8: float = 0.0, i8: float = 0.0, **more: float) -> dict[str, float]:
    rates = {"f16": half, "bf16": half, "tf32": tf32, "f8e4m3": f8, "f8e5m2": f8, "i8": i8, "u8": i8, "f32": f32, "f64": f64, **more}
    return {name: rate for name, rate in rates.items() if rate}


_CHIPS: dict[int, tuple[str, float, dict[str, float]]] = {
    75: ("T4", 0.320, {"f16": 65.0, "i8": 130.0, "u8": 130.0, "f32": 8.1}),
    80: ("A100 80GB SXM", 2.039, _tensor_rates(312.0, 19.5, 9.7, 156.0, i8=624.0, **{"f64.matrix": 19.5})),
    86: ("RTX 3090", 0.936, _tensor_rates(71.0, 35.6, 0.556, 35.6, i8=284.0)),
    89: ("RTX 4090", 1.008, _tensor_rates(165.2, 82.6, 1.29, 82.6, 330.3, 660.6)),
    90: ("H200 SXM", 4.8, _tensor_rates(989.0, 67.0, 34.0, 494.0, 1979.0, 1979.0, **{"f64.matrix": 67.0})),
    100: ("HGX B200", 7.7, _tensor_rates(2250.0, 75.0, 37.0, 1125.0, 4500.0, 4500.0)),
    120: ("RTX 5090", 1.792, _tensor_rates(209.5, 104.8, 1.64, 104.8, 419.0, 838.0)),
}
"""By compute capability: a chip, its memory's TB/s, and its dense TFLOP/s, from the makers' data sheets; with boost clocks."""


def _nvptx(name: str, ptx: int, shared: int, multiprocessors: int, *features: str) -> Target:
    capability = int(name.removeprefix("sm_").rstrip("a"))
    shared_per_sm, threads_per_sm, blocks_per_sm = _PER_SM[capability]
    chip, bandwidth, peaks = _CHIPS.get(capability, ("", 0.0, {}))
    return Target(
        name=name, kind="nvptx", warp_size=32, max_threads=1024, max_shared=shared, max_local=512 << 10, max_registers=255,
        multiprocessors=multiprocessors, vector_bytes=16, index_bits=32, features=frozenset({"approx", "tiles", *features}),
        triple="nvptx64-nvidia-cuda", cpu=name, ptx=ptx, registers_per_sm=65536, shared_per_sm=shared_per_sm,
        threads_per_sm=threads_per_sm, blocks_per_sm=blocks_per_sm, chip=chip, peaks=tuple(peaks.items()), bandwidth=bandwidth,
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


def _amdgpu(name: str, warp_size: int, units: int, chip: str, bandwidth: float, peaks: dict[str, float], *features: str) -> Target:
    """An AMD GPU. A unit has 64 KB of memory for its blocks. CDNA has waves of 64 lanes and 512 vector registers for each, RDNA waves of 32 with 256,
    and its units come in pairs that a block may use together."""
    wide = warp_size == 64
    return Target(
        name=name, kind="amdgpu", warp_size=warp_size, max_threads=1024, max_shared=64 << 10, max_local=128 << 10,
        max_registers=512 if wide else 256, multiprocessors=units, vector_bytes=16, index_bits=32, atomic_bits=frozenset({8, 16, 32, 64}),
        features=frozenset({"approx", "tiles", "cdna" if wide else "rdna", *features}), executed=False, triple="amdgcn-amd-amdhsa", cpu=name,
        registers_per_sm=4 * 64 * 512 if wide else 2 * 32 * 1536, shared_per_sm=64 << 10, threads_per_sm=2048 if wide else 1024, blocks_per_sm=32,
        chip=chip, peaks=tuple(peaks.items()), bandwidth=bandwidth,
    )  # fmt: skip


AMDGPU: dict[str, Target] = {
    t.name: t
    for t in (
        _amdgpu("gfx90a", 64, 104, "MI210", 1.638, _tensor_rates(181.0, 22.6, 22.6, i8=181.0, **{"f32.matrix": 45.3, "f64.matrix": 45.3}), "mfma", "mfma.i8k16"),
        _amdgpu("gfx942", 64, 304, "MI300X", 5.3, _tensor_rates(1307.4, 163.4, 81.7, f8=2614.9, i8=2614.9, **{"f32.matrix": 163.4, "f64.matrix": 163.4}), "mfma", "mfma.i8k32"),
        _amdgpu("gfx1100", 32, 96, "RX 7900 XTX", 0.960, _tensor_rates(122.8, 61.4, 1.92, i8=122.8), "wmma3"),
        _amdgpu("gfx1201", 32, 64, "RX 9070 XT", 0.640, _tensor_rates(195.0, 48.7, 0.76, f8=389.0, i8=389.0), "wmma4"),
    )
}
"""Compiled, linked and disassembled by tests; none of these has been run: no such device was in reach."""
PORTABLE: dict[str, Target] = {
    t.name: t
    for t in (
        Target(
            name="wgsl", kind="wgsl", warp_size=1, max_threads=256, max_shared=16 << 10, max_local=8 << 10, max_registers=128, multiprocessors=8,
            index_bits=32, max_grid=(65535, 65535, 65535), missing_dtypes=frozenset({"f64"}), atomic_bits=frozenset({32}),
            soft_casts=frozenset({"f8e4m3", "f8e5m2", "f16", "bf16"}), wide_ints=False, vectors=False, atomic_floats=False, forward_progress=False,
            max_arrays=8, features=frozenset({"tiles", "vec4"}), registers_per_sm=65536, shared_per_sm=32 << 10, threads_per_sm=1024, blocks_per_sm=16,
        ),
        Target(
            name="msl", kind="msl", warp_size=32, max_threads=512, max_shared=32 << 10, max_local=16 << 10, max_registers=128, multiprocessors=16,
            index_bits=32, missing_dtypes=frozenset({"f64"}), atomic_bits=frozenset({32}), soft_casts=frozenset({"f8e4m3", "f8e5m2", "bf16"}), vectors=False,
            atomic_floats=False, forward_progress=False, max_arrays=30, features=frozenset({"tiles"}), executed=False, registers_per_sm=65536,
            shared_per_sm=64 << 10, threads_per_sm=1024, blocks_per_sm=16,
        ),
        *(
            Target(
                name=name, kind=name, warp_size=1, max_threads=256, max_shared=16 << 10, max_local=16 << 10, max_registers=128, multiprocessors=8,
                index_bits=32, features=frozenset({"preserve", "tiles"}), atomic_bits=frozenset({32}), soft_casts=frozenset({"f8e4m3", "f8e5m2", "f16", "bf16"}), forward_progress=False,
                registers_per_sm=65536, shared_per_sm=32 << 10, threads_per_sm=1024, blocks_per_sm=16,
            )
            for name in ("spirv-opencl", "spirv-vulkan")
        ),
    )
}
"""GPUs that one text is for: the limits are those that every implementation has; a device says its own."""

_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def may_use_amx() -> bool:
    """Whether this process may use the CPU's matrix unit; the CPU must have it. Linux gives a process room for the unit's registers only when it asks;
    without, the first instruction ends the process. Threads share the answer, and children made by fork inherit it."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    syscall = ctypes.CDLL(None).syscall
    return int(syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQUEST), ctypes.c_long(_TILE_DATA))) == 0


_MATRIX_UNIT = ("amx-tile", "amx-bf16", "amx-int8")
_X86_LEVELS: tuple[tuple[str, int, str], ...] = (("avx512f", 64, "avx512"), ("avx2", 32, "avx2"), ("sse4.1", 16, "sse4.1"))

_SVE_LEVELS = {32: "sve256", 64: "sve512"}
"""Names of levels by the bytes of an SVE register. Registers of 16 bytes have NEON's instructions, which are shorter."""
_GET_SVE_LENGTH, _SVE_LENGTH_MASK = 51, 0xFFFF


@functools.cache
def sve_bytes() -> int:
    """Bytes of this process's SVE registers, as Linux says; 0 without SVE."""
    if not sys.platform.startswith("linux") or platform.machine().lower() not in ("aarch64", "arm64"):
        return 0
    import ctypes

    said = int(ctypes.CDLL(None).prctl(ctypes.c_int(_GET_SVE_LENGTH), *[ctypes.c_ulong(0)] * 4))
    return said & _SVE_LENGTH_MASK if said > 0 else 0


_NO_F16C = ("x86-64", "x86-64-sse4.1", "x86-64-scalar")
"""CPUs whose f16 conversions would be library calls."""


def _soft_casts(name: str) -> frozenset[str]:
    """The dtypes that a CPU converts by arithmetic."""
    return frozenset({"f8e4m3", "f8e5m2", "bf16"} | ({"f16"} if name in _NO_F16C else set()))


@functools.cache
def host_cpu() -> Target:
    """The CPU we run on, with its SIMD level detected."""
    import os

    from tilewright.base.llvm_library import host_features, host_name, process_triple

    features = host_features()
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        level, width = "scalar", 8
        for feature, bytes_, name in _X86_LEVELS:
            if features.get(feature):
                level, width = name, bytes_
                break
        if level == "avx512" and all(features.get(name) for name in _MATRIX_UNIT) and may_use_amx():
            level = "amx"
        base = "x86-64"
    elif machine in ("aarch64", "arm64"):
        base, level, width = "aarch64", "neon", 16
        # Code for one length is wrong at another: only the very length counts.
        if features.get("sve") and sve_bytes() in _SVE_LEVELS:
            level, width = _SVE_LEVELS[sve_bytes()], sve_bytes()
    else:
        base, level, width = machine, "scalar", 8
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    text = ",".join(("+" if there else "-") + name for name, there in features.items())
    if level in ("avx512", "amx"):
        # LLVM prefers 256-bit vectors on many AVX-512 chips; our kernels ask for what they need.
        text += ",-prefer-256-bit"
    return Target(
        name=f"{base}-{level}", kind="cpu", multiprocessors=cores, vector_bytes=width,
        features=frozenset({level}), soft_casts=_soft_casts(f"{base}-{level}"), triple=process_triple(), cpu=host_name(), cpu_features=text,
    )  # fmt: skip


_CPU_PRESETS: dict[str, tuple[str, str, str, int]] = {
    "x86-64-scalar": ("x86_64-unknown-linux-gnu", "x86-64", "", 8),
    "x86-64": ("x86_64-unknown-linux-gnu", "x86-64", "", 16),
    "x86-64-sse4.1": ("x86_64-unknown-linux-gnu", "x86-64", "+sse4.1", 16),
    "x86-64-avx2": ("x86_64-unknown-linux-gnu", "haswell", "", 32),
    "x86-64-avx512": ("x86_64-unknown-linux-gnu", "skylake-avx512", "-prefer-256-bit", 64),
    "x86-64-amx": ("x86_64-unknown-linux-gnu", "sapphirerapids", "-prefer-256-bit", 64),
    "aarch64-scalar": ("aarch64-unknown-linux-gnu", "generic", "", 8),
    "aarch64-neon": ("aarch64-unknown-linux-gnu", "neoverse-n1", "", 16),
    "aarch64-sve256": ("aarch64-unknown-linux-gnu", "neoverse-v1", "", 32),
    "aarch64-sve512": ("aarch64-unknown-linux-gnu", "a64fx", "", 64),
}

_registered: dict[str, Target] = {}
"""Targets of backends from outside, by name."""


def register_target(target: Target) -> None:
    """Let `parse_target` know a target whose code generator is registered from outside."""
    if target.name in ("cpu", "nvptx", *NVPTX, *AMDGPU, *PORTABLE, *_CPU_PRESETS):
        raise UserError.at("TW021", f"'{target.name}' is the name of another target", help="choose another name")
    _registered[target.name] = target


def names() -> list[str]:
    """Every spelling `parse_target` accepts."""
    return ["cpu", *_CPU_PRESETS, "nvptx", *NVPTX, *AMDGPU, *PORTABLE, *_registered]


CHIPS = {
    "gpu": DEFAULT_NVPTX, "t4": "sm_75", "a100": "sm_80", "a30": "sm_80", "a10": "sm_86", "a40": "sm_86", "rtx3090": "sm_86", "l4": "sm_89",
    "l40": "sm_89", "l40s": "sm_89", "rtx4090": "sm_89", "h100": "sm_90a", "h200": "sm_90a", "gh200": "sm_90a", "b200": "sm_100a", "rtx5090": "sm_120",
    "mi210": "gfx90a", "mi250x": "gfx90a", "mi300a": "gfx942", "mi300x": "gfx942", "mi325x": "gfx942", "rx7900xtx": "gfx1100", "rx9070xt": "gfx1201",
}  # fmt: skip
"""GPUs by the names people call them, and `gpu` for the default one: other words for targets."""


def parse_target(name: str) -> Target:
    """The target a user named: `cpu` (this machine), `x86-64-avx2`, `nvptx` (the default GPU), `sm_80`, `h100`…"""
    name = CHIPS.get(name.lower().replace(" ", "").replace("-", ""), name)
    if name == "cpu":
        return host_cpu()
    if name == "nvptx":
        return NVPTX[DEFAULT_NVPTX]
    if name in NVPTX:
        return NVPTX[name]
    if name in AMDGPU:
        return AMDGPU[name]
    if name in PORTABLE:
        return PORTABLE[name]
    if name in _registered:
        return _registered[name]
    if name in _CPU_PRESETS:
        triple, cpu, features, width = _CPU_PRESETS[name]
        return Target(
            name=name, kind="cpu", multiprocessors=2, vector_bytes=width, triple=triple, cpu=cpu, cpu_features=features,
            features=frozenset({"amx"} if name.endswith("-amx") else ()), soft_casts=_soft_casts(name),
        )  # fmt: skip
    raise UserError.at("TW021", f"unknown target '{name}'", help=f"choose one of {', '.join(names())}, or a chip such as h100")


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
