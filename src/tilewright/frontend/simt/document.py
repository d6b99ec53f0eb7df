"""The list of instructions of explicit kernels, from the rows of words: docs/explicit-kernels-instructions.md.

`tools/words.py --write` writes it. For each word: how it is called, what it means, which ops it builds and which
generation of NVIDIA's GPUs has them first.
"""

from __future__ import annotations

from tilewright.frontend.simt import expressions as simt_expressions  # noqa: F401 - it fills the table of words
from tilewright.frontend.simt.words import VALUES
from tilewright.frontend.words.rows import SECTIONS, WordRow, parameters
from tilewright.ir.needs import UNTESTED
from tilewright.ir.ops_simt import (
    ACCESS_SCOPES,
    COPY_CACHES,
    LOAD_CACHES,
    LOAD_ORDERS,
    ORDERS,
    STORE_CACHES,
    STORE_ORDERS,
)

_SINCE = {
    "redux": 80, "copy_async": 80, "copy_commit": 80, "copy_wait": 80, "mma": 80, "ldmatrix": 75, "elect": 90, "stmatrix": 90,
    "bulk_load": 90, "bulk_store": 90, "tensor_map": 90, "tma_load": 90, "tma_store": 90, "tma_commit": 90,
    "tma_wait": 90, "fence_async": 90, "fence_init": 90, "mbarrier_init": 90, "mbarrier_arrive": 90, "mbarrier_expect": 90, "mbarrier_wait": 90,
    "cluster_sync": 90, "cluster_rank": 90, "load_remote": 90, "store_remote": 90, "wait_previous": 90, "release_next": 90,
}  # fmt: skip
"""By op: the first generation of GPUs that has it, where it is not all that Tilewright knows."""

_HOPPER = {"wgmma", "wgmma_wait", "set_registers"}
"""Ops of one generation alone."""


def _since(ops: list[str]) -> str:
    newest = max((_SINCE.get(op, 0) for op in ops), default=0)
    if set(ops) & _HOPPER:
        return "sm_90a only"
    return f"sm_{newest}" if newest else "all"


def _row(row: WordRow) -> str:
    arguments = ", ".join(f"{name}={default}" if default else name for name, default in parameters(row.explicit or row.signature))
    ops = row.ops.split()
    note = " Not tested by `check=True`." if UNTESTED.intersection(ops) else ""
    return f"| `{row.name}({arguments})` | {row.doc}{note} | {', '.join(f'`{op}`' for op in ops)} | {_since(ops)} |"


def _words(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{n}`" for n in names)


_EXAMPLES = """## Examples

Threads of a warp that hold the same key add to its counter once: those that match elect the lowest of them, which adds for all.

```python
import numpy as np
import tilewright as tw

@tw.gpu
def count_keys(keys: tw.GpuBuffer[tw.i32], counts: tw.GpuBuffer[tw.i32]):
    key = keys[tw.gpu_thread_id()]
    same = tw.match_any(key)
    if tw.ffs(same) - 1 == tw.lane_id():
        tw.atomic_add(counts, key, tw.popcount(same))

keys, counts = np.arange(256, dtype=np.int32) % 5, np.zeros(5, np.int32)
count_keys[2, 128](keys, counts, device="emulator")
print(counts.tolist())  # [52, 51, 51, 51, 51]
```

A block hands a number on to the next one: the data first, then a flag with `release`, which the next one reads with `acquire`.

```python
@tw.gpu
def running(x: tw.GpuBuffer[tw.i32], sums: tw.GpuBuffer[tw.i32], flags: tw.GpuBuffer[tw.u32]):
    if tw.thread.x == 0:
        before = 0
        if tw.block.x > 0:
            while tw.atomic_load(flags, tw.block.x - 1, order="acquire") == 0:
                tw.nanosleep(50)
            before = sums[tw.block.x - 1]
        sums[tw.block.x] = before + x[tw.block.x]
        tw.atomic_store(flags, tw.block.x, 1, order="release")

sums, flags = np.zeros(4, np.int32), np.zeros(4, np.uint32)
running[4, 32](np.asarray([1, 2, 3, 4], np.int32), sums, flags, device="emulator")
print(sums.tolist())  # [1, 3, 6, 10]
```

One warp multiplies 16 x 16 matrices on tensor cores:

```python
@tw.gpu
def multiply(a: tw.Array, b: tw.Array, c: tw.Array):
    sums = tw.fragment_c()
    for k in range(0, a.shape[1], 16):
        sums = tw.fragment_mma(tw.fragment_a(a, (0, k)), tw.fragment_b(b, (k, 0)), sums, tw.f16)
    tw.fragment_store(c, (0, 0), sums)

a = (np.arange(16 * 32).reshape(16, 32) % 7).astype(np.float16)
c = np.zeros((16, 16), np.float32)
multiply[1, 32](a, np.ascontiguousarray(a.T), c, device="emulator")
print(np.array_equal(c, a.astype(np.float32) @ a.T.astype(np.float32)))  # True
```

The same for a shape of CUDA's WMMA: 8 x 32 results, whose fragments know what they are.

```python
@tw.gpu
def multiply_wide(a: tw.Array, b: tw.Array, c: tw.Array):
    sums = tw.wmma_fill(0.0, "m8n32k16")
    for k in range(0, a.shape[1], 16):
        sums = tw.wmma_mma(tw.wmma_load(a, (0, k), "a", "m8n32k16"), tw.wmma_load(b, (k, 0), "b", "m8n32k16"), sums)
    tw.wmma_store(c, (0, 0), sums)

wide, c = np.ones((32, 32), np.float16), np.zeros((8, 32), np.float32)
multiply_wide[1, 32](a[:8], wide, c, device="emulator")
print(np.array_equal(c, a[:8].astype(np.float32) @ wide.astype(np.float32)))  # True
```

Bytes come to shared memory by the copy engine while threads do something else; an mbarrier says when they are there.

```python
@tw.gpu
def doubled(x: tw.GpuBuffer[tw.f32], o: tw.GpuBuffer[tw.f32]):
    tile, bars = tw.shared(128, tw.f32, align=128), tw.mbarriers(1)
    t, start = tw.thread.x, 128 * tw.block.x
    if t == 0:
        tw.mbarrier_init(bars, 0, 1)
        tw.fence_init()
    tw.gpu_sync()
    if t == 0:
        tw.mbarrier_expect(bars, 0, 512)
        tw.bulk_load(tile, 0, x, start, 128, bars, 0)
    tw.mbarrier_wait(bars, 0, 0)
    o[start + t] = 2 * tile[t]

x, o = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
doubled[2, 128](x, o, device="emulator")
print(bool((o == 2 * x).all()))  # True
```
"""


def document() -> str:
    """The whole page."""
    lines = [
        "# Instructions of explicit kernels", "",
        "Generated from the rows of words (`frontend/words/rows.py`) by `tools/words.py --write`. All names are `tw.` names; inside a function marked",
        "`@tw.gpu` they are instructions, elsewhere calling one is an error. The third column has the ops of the thread stage ([ops.md](ops.md)), the last",
        "one the first generation of NVIDIA GPUs that has them; for another target a kernel that uses one is refused with its line. The emulator runs all",
        "of them, with the checks of [emulator.md](emulator.md); the CPU those that are not about matrix units, asynchronous copies, mbarriers, clusters, accesses of 128 bits or the timer of all multiprocessors.", "",
    ]  # fmt: skip
    for section in SECTIONS:
        heading = section.heading
        if not heading:
            continue
        lines += [f"## {heading}", ""]
        if heading == "Indices":
            lines += [f"Numbers: {', '.join(f'`{n}`' for n in sorted(VALUES) if not n.startswith('cluster'))}.", ""]
        if heading == "Telling the host":
            lines += [
                "`assert condition, \"text\"` ends the kernel where the condition does not hold: with `DeviceError` TW037 on a GPU or a CPU, and TW050 on",
                "the emulator, each with the line, the block and the thread.", "",
            ]  # fmt: skip
        lines += [section.text, ""] if section.text else []
        if heading == "Memory":
            lines += [
                f"Caches of loads: {_words(LOAD_CACHES)}; of stores: {_words(STORE_CACHES)}; of `copy_async`: {_words(COPY_CACHES)}.",
                "",
            ]
        if heading == "Atomics":
            lines += [
                f"Scopes: {_words(ACCESS_SCOPES)}. Orders: {_words(ORDERS)}; of `atomic_load` {_words(LOAD_ORDERS)}, of `atomic_store` "
                f"{_words(STORE_ORDERS)}.", "",
            ]  # fmt: skip
        lines += ["| call | meaning | ops | since |", "|---|---|---|---|", *map(_row, section.rows), ""]
    return "\n".join(lines) + "\n" + _EXAMPLES

