"""Schedules one step away from a given one, for a search that climbs.

In: a schedule. Out: schedules of the same family that differ in one choice. Whether a target has room for them is for `has_room`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright.passes.schedules.attention import CpuAttention, GpuAttention, MmaAttention, WgmmaAttention
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.matrix import Amx, CpuPanels, GpuProduct, MatrixSchedule, WarpProduct, Wgmma

RASTERS = (1, 2, 4, 8, 16, 32)


def neighbours(schedule: MatrixSchedule) -> Iterator[MatrixSchedule]:
    """Schedules one step away; the same one may come more than once."""
    match schedule:
        case Wgmma() | WarpProduct():
            yield from _product(schedule)
        case Gemv():
            yield from _gemv(schedule)
        case WgmmaAttention() | MmaAttention():
            yield from _attention(schedule)
        case CpuPanels():
            yield from _panels(schedule)
        case Amx():
            yield from _amx(schedule)
        case CpuAttention():
            yield from _attention_cpu(schedule)


def _product(s: GpuProduct) -> Iterator[GpuProduct]:
    for raster in RASTERS:
        yield replace(s, raster=raster)
    for stages in (s.stages - 1, s.stages + 1, s.stages - 2, s.stages + 2):
        yield replace(s, stages=stages)
    yield replace(s, persistent=not s.persistent)
    if isinstance(s, Wgmma):
        yield from _wgmma(s)
    elif isinstance(s, WarpProduct):
        yield from _warps(s)


def _wgmma(s: Wgmma) -> Iterator[Wgmma]:
    yield replace(s, mma_in_flight=1 - min(1, s.mma_in_flight))
    for epilogue_stages in (1, 2, 3, 4):
        yield replace(s, epilogue_stages=epilogue_stages)
    yield replace(s, pingpong=not s.pingpong)
    for m in (64, 128, 192, 256):
        for n in (64, 128, 192, 256):
            if abs(m - s.m) + abs(n - s.n) <= 128:
                groups = s.math_warpgroups if s.pingpong else max(1, min(3, m // 64))
                room = max(2, s.stages * (s.m + s.n) // (m + n))
                yield replace(s, m=m, n=n, math_warpgroups=groups, stages=min(8, room))


def _warps(s: WarpProduct) -> Iterator[WarpProduct]:
    for m, n in ((s.m // 2, s.n), (s.m * 2, s.n), (s.m, s.n // 2), (s.m, s.n * 2), (s.m * 2, s.n // 2), (s.m // 2, s.n * 2)):
        yield replace(s, m=m, n=n)
    for warps_m, warps_n in ((s.warps_n, s.warps_m), (s.warps_m * 2, s.warps_n), (s.warps_m, s.warps_n * 2)):
        yield replace(s, warps_m=warps_m, warps_n=warps_n)
    yield replace(s, k=s.k * 2)
    yield replace(s, k=s.k // 2)


def _gemv(s: Gemv) -> Iterator[Gemv]:
    step = s.k // s.vectors
    for vectors in range(1, 9):
        yield replace(s, k=step * vectors)
    for n in (s.n // 2, s.n * 2):
        yield replace(s, n=n)
    for warps_n in (s.warps_n // 2, s.warps_n * 2):
        yield replace(s, warps_n=warps_n, n=s.rows * warps_n)
    for warps_k in (s.warps_k // 2, s.warps_k * 2):
        yield replace(s, warps_k=warps_k, k=s.k // s.warps_k * warps_k)
    yield replace(s, pdl=not s.pdl)


def _attention(s: GpuAttention) -> Iterator[GpuAttention]:
    for raster in RASTERS:
        yield replace(s, raster=raster)
    for stages in (s.stages - 1, s.stages + 1):
        yield replace(s, stages=stages)
    for n in (s.n // 2, s.n - 32, s.n - 16, s.n + 16, s.n + 32, s.n * 2):
        yield replace(s, n=n)
    if isinstance(s, WgmmaAttention):
        for groups in (1, 2, 3, 4):
            yield replace(s, m=64 * groups, math_warpgroups=groups, blocks=1)
        for blocks in (2, 3):  # of one group each: others have not been seen to work on every shape
            yield replace(s, m=64, math_warpgroups=1, blocks=blocks)
        yield replace(s, a_copy="tma" if s.a_copy == "rs" else "rs")
        yield replace(s, dynamic=not s.dynamic)
        yield replace(s, pdl=not s.pdl)
    elif isinstance(s, MmaAttention):
        for rows in (16, 32):
            for warps in (2, 4, 8):
                yield replace(s, m=rows * warps, warps_m=warps)
        yield replace(s, a_copy="cp_async" if s.a_copy == "rs" else "rs")
        yield replace(s, persistent=not s.persistent)


def _panels(s: CpuPanels) -> Iterator[CpuPanels]:
    lanes = s.nr // max(1, s.vectors)
    for mr, vectors in ((s.mr - 2, s.vectors), (s.mr + 2, s.vectors), (s.mr, s.vectors + 1), (s.mr, s.vectors - 1), (s.mr // 2, s.vectors * 2)):
        if mr > 0 and vectors > 0:
            m, n = max(1, s.m // mr) * mr, max(1, s.n // (vectors * lanes)) * vectors * lanes
            yield replace(s, mr=mr, vectors=vectors, nr=vectors * lanes, m=m, n=n)
    yield replace(s, keep="a" if s.keep == "b" else "b")
    for scale in (0.5, 2.0):
        yield replace(s, k=max(1, int(s.k * scale)))
        yield replace(s, m=max(1, int(s.m * scale) // s.mr) * s.mr)
        yield replace(s, n=max(1, int(s.n * scale) // s.nr) * s.nr)


def _amx(s: Amx) -> Iterator[Amx]:
    yield replace(s, keep="a" if s.keep == "b" else "b")
    for m, n, k in ((s.m * 2, s.n, s.k), (s.m // 2, s.n, s.k), (s.m, s.n * 2, s.k), (s.m, s.n // 2, s.k), (s.m, s.n, s.k * 2), (s.m, s.n, s.k // 2)):
        yield replace(s, m=m // s.mr * s.mr, n=n // s.nr * s.nr, k=k)


def _attention_cpu(s: CpuAttention) -> Iterator[CpuAttention]:
    for n in (s.n * 2, s.n // 2):
        yield replace(s, n=max(1, n // (2 * s.mr)) * 2 * s.mr)
    for m in (s.m * 2, s.m // 2):
        yield replace(s, m=max(1, m // s.nr) * s.nr)
