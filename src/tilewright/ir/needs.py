"""What code asks of a target and of a call: the feature an op needs, the shared memory of a kernel, and values that no array's size bounds.

In: an op or a kernel. Out: a name in `Target.features`, places and bytes, or values: loops that end at one may run for any time. Checks and code generators read both from here.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.base.dtypes import f8e4m3, f8e5m2, f16, f32
from tilewright.base.sizes import Size, is_computed, is_number
from tilewright.ir.layouts import INSTRUCTIONS
from tilewright.ir.nodes import Attr, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.types import Tensor, dtype_of

FEATURES: Mapping[str, str] = {
    "tensor_map": "tma", "prefetch_map": "tma", "tma_load": "tma", "tma_store": "tma", "tma_commit": "tma", "tma_wait": "tma",
    "fence_async": "tma", "copy_remote": "tma", "copy_async": "cp.async", "copy_commit": "cp.async", "copy_wait": "cp.async",
    "mbarrier_init": "mbarrier", "fence_init": "mbarrier", "mbarrier_arrive": "mbarrier", "mbarrier_expect": "mbarrier",
    "mbarrier_wait": "mbarrier", "cluster_rank": "cluster", "load_remote": "cluster", "cluster_sync": "cluster", "cluster_arrive": "cluster",
    "wait_previous": "cluster", "release_next": "cluster", "set_registers": "setmaxnreg", "elect": "mbarrier", "wgmma": "wgmma",
    "wgmma_registers": "wgmma", "wgmma_wait": "wgmma", "mma": "bf16", "ldmatrix": "mma", "stmatrix": "tma",
    "bulk_load": "tma", "bulk_store": "tma", "store_remote": "cluster", "atomic_remote": "cluster",
    "panel_begin": "amx", "panel_end": "amx", "panel_dot": "amx",
}  # fmt: skip
"""The feature of a target an op needs; ops that are not here need none, or say themselves what they need."""

UNTESTED = frozenset({
    "tma_load", "tma_store", "copy_remote", "ldmatrix", "stmatrix", "wgmma", "wgmma_registers", "mbarrier_init", "mbarrier_arrive", "mbarrier_expect",
    "mbarrier_wait",
})  # fmt: skip
"""Ops whose places in shared memory checks on a device (`check=True`) do not test; the emulator does. What a map reaches outside its array, the
copy engine leaves out itself."""


_ONLY_GPUS = {"matrix": "a matrix instruction", "copy": "an asynchronous copy", "barrier": "a barrier of copies or of clusters"}
_ONLY_OPS = {"grid_barrier": "a barrier of the grid", "global_timer": "a clock of all multiprocessors", "named_barrier": ""}


def only_gpus(opcode: str) -> str:
    """What an op is that only GPUs have; empty where CPUs run it too."""
    return _ONLY_OPS.get(opcode, _ONLY_GPUS.get(OPS[opcode].group, ""))


def feature_of(op: Op) -> str:
    """The feature of a target that the op needs; empty where any will do."""
    if op.opcode == "wave_mma":
        return INSTRUCTIONS[str(op.attrs["instruction"])].feature
    if op.opcode == "mma" and dtype_of(op.results[0].type) is f32 and op.attrs["dtype"] in (f8e4m3, f8e5m2):
        return "fp8"
    if op.opcode == "mma" and op.attrs["dtype"] is f16 and "k" in op.attrs:
        return "mma"
    if op.opcode == "prefetch" and op.attrs.get("bytes"):
        return "tma"
    return FEATURES.get(op.opcode, "")


def assertions(kernel: Kernel) -> list[Op]:
    """The kernel's assertions, in the order of their numbers."""
    return [op for op in walk(kernel.body) if op.opcode == "assert"]


def cluster_of(kernel: Kernel) -> int:
    """Blocks of one of the kernel's clusters."""
    cluster = kernel.attrs.get("cluster", 1)
    assert isinstance(cluster, int)
    return cluster


def alignment(memory: Tensor) -> int:
    """To how many bytes a tensor of a block's own memory is aligned."""
    return max(memory.align, 16)


def element_count(memory: Tensor) -> int:
    """Elements of a tensor of constant shape."""
    count = 1
    for extent in memory.shape:
        count *= extent.constant or 1
    return count


def local_bytes(kernel: Kernel) -> int:
    """Bytes of a thread's own arrays."""
    found = [op.results[0].type for op in walk(kernel.body) if op.opcode == "alloc" and "values" not in op.attrs]
    return sum(element_count(m) * m.dtype.itemsize for m in found if isinstance(m, Tensor) and m.space == "local")


def shared_places(kernel: Kernel) -> tuple[dict[Value, int], int]:
    """Where each shared tensor starts if they lie one after the other, those of every `phase` from the same place, behind those that all phases have in `common`,
    and how long they are together."""
    places: dict[Value, int] = {}
    ends: dict[Attr, int] = {}
    allocs = [op for op in walk(kernel.body) if op.opcode == "alloc"]
    for op in sorted(allocs, key=lambda op: not op.attrs.get("common")):
        memory = op.results[0].type
        assert isinstance(memory, Tensor)
        if memory.space == "shared":
            phase = -1 if op.attrs.get("common") else op.attrs.get("phase", 0)
            start = -(-ends.get(phase, ends.get(-1, 0)) // alignment(memory)) * alignment(memory)
            places[op.results[0]] = start
            ends[phase] = start + element_count(memory) * memory.dtype.itemsize
    return places, max(ends.values(), default=0)


def free_values(kernel: Kernel) -> set[Value]:
    """Numbers of a call, sizes made of them that no array has, what is read from memory, and what is computed from all of these."""
    found: set[Value] = {param for param in kernel.params if not isinstance(param.type, Tensor)}
    extents = {name for param in kernel.params if isinstance(param.type, Tensor) for size in param.type.shape for name in size.names}
    for op in walk(kernel.body):
        if op.opcode in ("load", "atomic", "accumulate") or any(v in found for v in op.operands) or _is_number(op, extents):
            found.update(op.results)
    return found


def _is_number(op: Op, extents: set[str]) -> bool:
    size = op.attrs.get("value")
    return op.opcode == "size" and isinstance(size, Size) and any((is_computed(n) or is_number(n)) and n not in extents for n in size.names)
