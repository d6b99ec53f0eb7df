"""A device that does not exist, unlike the real ones in what passes might take for granted: warps of 8 lanes, small blocks, little shared
memory, no f64, no atomic access of 64 bits, no matrix unit."""

from __future__ import annotations

from tilewright.base.target import Target

TOY = Target(
    name="toy8", kind="toy", warp_size=8, max_threads=256, max_shared=16 << 10, max_registers=64, multiprocessors=2, vector_bytes=16,
    index_bits=32, missing_dtypes=frozenset({"f64"}), atomic_bits=frozenset({32}), soft_casts=frozenset(),
    registers_per_sm=16384, shared_per_sm=32 << 10, threads_per_sm=512, blocks_per_sm=4,
)  # fmt: skip
