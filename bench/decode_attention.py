"""Attention of one new token over the keys and values of those before it, read from a cache; against PyTorch's own, by every backend that takes it.

In: whether the run is quick. Out: cases for `harness.measure`. Lengths are read from memory by our kernel; peers are given views of as many keys. A
case has as many copies of its cache as keep it out of the L2 cache, and the bytes that count are those of keys and values that are attended to.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Variant

COLD_BYTES = 256 << 20
"""Bytes between two reads of the same cache."""


def decode(q: tw.Array, k: tw.Array, v: tw.Array, lengths: tw.Array) -> tw.Array:
    B, H, D = q.shape
    G = H // k.shape[2]
    scale = 1.0 / tw.sqrt(tw.f32(D))
    out = tw.empty((B, H, D), q.dtype)
    for b, h in tw.grid(B, H):
        n = int(lengths[b])
        m = -tw.inf
        for j in range(n):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, d] * k[b, j, h // G, d]
            m = max(m, s * scale)
        total = tw.f32(0)
        for j in range(n):
            s = tw.f32(0)
            for d in range(D):
                s += q[b, h, d] * k[b, j, h // G, d]
            total += tw.exp(s * scale - m)
        for e in range(D):
            o = tw.f32(0)
            for j in range(n):
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, d] * k[b, j, h // G, d]
                o += tw.exp(s * scale - m) * v[b, j, h // G, e]
            out[b, h, e] = o / total
    return out


def decode_window(q: tw.Array, k: tw.Array, v: tw.Array, lengths: tw.Array, window: int) -> tw.Array:
    B, H, D = q.shape
    T = k.shape[1]
    G = H // k.shape[2]
    scale = 1.0 / tw.sqrt(tw.f32(D))
    out = tw.empty((B, H, D), q.dtype)
    for b, h in tw.grid(B, H):
        m = -tw.inf
        for j in range(T):
            if j < lengths[b] and j >= lengths[b] - window:
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, d] * k[b, j, h // G, d]
                m = max(m, s * scale)
        total = tw.f32(0)
        for j in range(T):
            if j < lengths[b] and j >= lengths[b] - window:
                s = tw.f32(0)
                for d in range(D):
                    s += q[b, h, d] * k[b, j, h // G, d]
                total += tw.exp(s * scale - m)
        for e in range(D):
            o = tw.f32(0)
            for j in range(T):
                if j < lengths[b] and j >= lengths[b] - window:
                    s = tw.f32(0)
                    for d in range(D):
                        s += q[b, h, d] * k[b, j, h // G, d]
                    o += tw.exp(s * scale - m) * v[b, j, h // G, e]
            out[b, h, e] = o / total
    return out


@dataclass(frozen=True)
class DecodeShape:
    """`longest` keys fit the cache, of which `length` are attended to, the last `window` of them where that is not 0."""

    batch: int
    heads: int
    groups: int
    longest: int
    depth: int
    length: int = 0
    window: int = 0
    bar: float = 1.0

    @property
    def keys(self) -> int:
        length = self.length or self.longest
        return min(length, self.window or length)

    def nbytes(self, itemsize: int) -> int:
        return itemsize * self.batch * self.depth * (2 * self.keys * self.groups + 2 * self.heads)


GPU_SHAPES = (
    DecodeShape(1, 32, 8, 32768, 128, bar=1.2),
    DecodeShape(1, 32, 8, 1024, 128),
    DecodeShape(1, 32, 8, 8192, 128),
    DecodeShape(1, 32, 8, 131072, 128, bar=1.2),
    DecodeShape(8, 32, 8, 8192, 128, bar=1.2),
    DecodeShape(1, 32, 8, 32768, 64, bar=1.2),
    DecodeShape(1, 16, 8, 32768, 256, bar=1.2),
    DecodeShape(1, 32, 32, 8192, 128),
    DecodeShape(1, 32, 8, 32768, 128, length=5000),
    DecodeShape(1, 32, 8, 32768, 128, window=4096),
)
CPU_SHAPES = (DecodeShape(1, 8, 2, 2048, 64), DecodeShape(1, 8, 2, 8192, 128, length=3000), DecodeShape(1, 4, 4, 4096, 64, window=512))


def _label(shape: DecodeShape, dtype: str) -> str:
    more = [f"{shape.heads // shape.groups} queries a key"]
    more += [f"length {shape.length}"] if shape.length else []
    more += [f"window {shape.window}"] if shape.window else []
    return f"{dtype}, {', '.join(more)}"


@contextmanager
def _backend(torch: Any, name: str) -> Iterator[None]:
    attention = importlib.import_module("torch.nn.attention")
    with attention.sdpa_kernel(getattr(attention.SDPBackend, name)):
        yield


def _reference(torch: Any, q: Any, k: Any, v: Any) -> Any:
    """In f32, on the CPU or the GPU: queries [B, H, D], keys and values [B, n, G, D] that count."""
    repeat = q.shape[1] // k.shape[2]
    keys, values = (x.float().transpose(1, 2).repeat_interleave(repeat, 1) for x in (k, v))
    scores = (q.float()[:, :, None] @ keys.transpose(2, 3)) / q.shape[2] ** 0.5
    return (scores.softmax(-1) @ values)[:, :, 0]


def _case(shape: DecodeShape, dtype: str, device: str) -> Case:
    def prepare() -> Prepared:
        torch: Any = importlib.import_module("torch")
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
        s = shape
        slots = max(1, -(-COLD_BYTES // s.nbytes(kind.itemsize))) if device == "cuda" else 1
        slots = min(slots, 64)
        generator = torch.Generator(device=device).manual_seed(7)
        q = torch.randn(s.batch, s.heads, s.depth, device=device, generator=generator).to(kind)
        caches = [
            [torch.randn(s.batch, s.longest, s.groups, s.depth, device=device, generator=generator).to(kind) for _ in range(2)]
            for _ in range(slots)
        ]
        lengths = torch.full((s.batch,), s.length or s.longest, dtype=torch.int32, device=device)
        end = s.length or s.longest
        views = [[x[:, end - s.keys : end].transpose(1, 2) for x in pair] for pair in caches]
        wanted = [_reference(torch, q, *(x[:, end - s.keys : end] for x in pair)) for pair in caches]
        kernel = tw.kernel(device=device)(decode_window if s.window else decode)
        more = (s.window,) if s.window else ()
        given: list[Any] = [q, *caches, lengths]
        if device == "cpu" and kind is not torch.bfloat16:
            given = [q.numpy(), *([x.numpy() for x in pair] for pair in caches), lengths.numpy()]
        variants = [Variant(OURS, lambda slot: kernel(given[0], *given[1 + slot], given[-1], *more), returns=True)]
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION") if device == "cuda" else ("FLASH_ATTENTION", "MATH"):

            def run(slot: int, backend: str = backend) -> Any:
                with _backend(torch, backend):
                    attend = torch.nn.functional.scaled_dot_product_attention
                    return attend(q[:, :, None], *views[slot], enable_gqa=s.heads != s.groups)[:, :, 0]

            try:
                run(0)
            except RuntimeError:
                continue  # this backend does not take such shapes
            variants.append(Variant(f"torch {backend.split('_')[0].lower()}", run, returns=True))

        def verify(slot: int, returned: Any, variant: Variant) -> str:
            found = returned if isinstance(returned, torch.Tensor) else torch.from_dlpack(returned)
            error = float((found.float().to(wanted[slot].device) - wanted[slot]).abs().max())
            return "" if error < (2e-2 if dtype == "bf16" else 4e-3) else f"off by {error:.2g}"

        return Prepared(variants, lambda: None, verify, slots=slots)

    itemsize = 4 if dtype == "f32" else 2
    shape_numbers = (shape.batch, shape.heads, shape.groups, shape.longest, shape.depth)
    return Case("decode_attention", shape_numbers, _label(shape, dtype), shape.nbytes(itemsize), prepare, Bar(shape.bar))


def gpu_cases(quick: bool) -> list[Case]:
    return [_case(shape, "bf16", "cuda") for shape in GPU_SHAPES]


def cpu_cases(quick: bool) -> list[Case]:
    return [_case(shape, "f32", "cpu") for shape in CPU_SHAPES]

