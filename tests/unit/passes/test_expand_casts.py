"""Conversions as integer arithmetic: exhaustive where the source is small."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from support import array, cast_kernel, run_cpu
from tilewright.base.dtypes import DType, bf16, f8e4m3, f8e5m2, f16, f32, f64, i32, i64, u32
from tilewright.base.sizes import ONE
from tilewright.base.target import parse_target
from tilewright.ir.build import Builder
from tilewright.ir.emulator import run_kernel, run_program
from tilewright.ir.nodes import Block, Kernel, Stage, walk
from tilewright.ir.program import Program
from tilewright.ir.types import dtype_of
from tilewright.ir.verify import verify_kernel
from tilewright.passes.late.expand_casts import expand_casts

EIGHTS = (f8e4m3, f8e5m2)


@pytest.mark.parametrize(("packed", "pairs"), [(True, False), (False, True)])
def test_what_was_loaded_one_by_one_is_not_widened_in_pairs(packed: bool, pairs: bool) -> None:
    x, o = array("x", bf16, 4, align=8), array("o", f32, 4, align=16)
    b = Builder()
    value = b.op("pack", *(b.op("load", x, b.index(k)) for k in range(4))) if packed else b.op("load", x, b.index(0), width=4)
    b.multi("store", o, b.index(0), b.cast(value, f32))
    kernel = expand_casts(Kernel("k", Stage.THREAD, (x, o), Block((), tuple(b.ops)), (ONE,), threads=32), parse_target("sm_90a"))
    verify_kernel(kernel)
    assert any(op.opcode == "to_bits" for op in walk(kernel.body)) is pairs
    data, result = np.array([1.5, -0.0, np.inf, 3e-40], ml_dtypes.bfloat16), np.zeros(4, np.float32)
    run_kernel(kernel, [data, result], {})
    np.testing.assert_array_equal(result, data.astype(np.float32))


def expanded(source: DType, target: DType, machine: str) -> tuple[Program, Kernel]:
    whole = cast_kernel(source, [target])
    call = whole.calls[0]
    kernel = expand_casts(call.kernel, parse_target(machine))
    return replace(whole, calls=(replace(call, kernel=kernel),)), kernel


def same(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    bits = f"u{found.itemsize}"
    with np.errstate(invalid="ignore"):
        both_nan = np.isnan(found.astype(float)) & np.isnan(wanted.astype(float))
    return (found.view(bits) == wanted.view(bits)) | both_nan


@pytest.mark.parametrize("machine", ["sm_90a", "x86-64-avx2"])
@pytest.mark.parametrize("source", EIGHTS, ids=str)
def test_every_f8_code_widens_exactly(source: DType, machine: str) -> None:
    codes = np.arange(256, dtype=np.uint8).view(source.numpy)
    for target in (f32, f64, f16, bf16):
        whole, kernel = expanded(source, target, machine)
        assert not any(op.opcode == "cast" and dtype_of(op.operands[0].type) in EIGHTS for op in walk(kernel.body))
        found = run_program(whole, {"a": codes})[f"o_{target}"]
        with np.errstate(all="ignore"):
            wanted = codes.astype(np.float32).astype(target.numpy)
        assert same(found, wanted).all(), target


@pytest.mark.parametrize("source", [f16, bf16], ids=str)
def test_every_sixteen_bit_code_narrows_to_f8(source: DType) -> None:
    codes = np.arange(65536, dtype=np.uint16).view(source.numpy)
    for target in EIGHTS:
        whole, _ = expanded(source, target, "sm_90a")
        found = run_program(whole, {"a": codes})[f"o_{target}"]
        with np.errstate(all="ignore"):
            wanted = codes.astype(np.float32).astype(target.numpy)
        bad = ~same(found, wanted)
        assert not bad.any(), f"{codes[bad][:4]} gave {found[bad][:4]}, not {wanted[bad][:4]}"


def test_every_bf16_code_widens_and_every_boundary_narrows_on_a_cpu() -> None:
    codes = np.arange(65536, dtype=np.uint16).view(bf16.numpy)
    whole, kernel = expanded(bf16, f32, "x86-64-avx2")
    assert not any(op.opcode == "cast" and dtype_of(op.operands[0].type) is bf16 for op in walk(kernel.body))
    assert same(run_program(whole, {"a": codes})["o_f32"], codes.astype(np.float32)).all()
    # Each f32 halfway between two bf16 numbers, and its neighbours.
    half = (np.arange(65536, dtype=np.uint32) << 16) + 0x8000
    values = np.concatenate([half - 1, half, half + 1]).view(np.float32)
    whole, _ = expanded(f32, bf16, "x86-64-avx2")
    with np.errstate(all="ignore"):
        assert same(run_program(whole, {"a": values})["o_bf16"], values.astype(bf16.numpy)).all()


@pytest.mark.parametrize("target", [f16, bf16, f8e4m3, f8e5m2], ids=str)
def test_wide_sources_round_once(target: DType) -> None:
    """A value just beside a halfway point must not be rounded to it first."""
    with np.errstate(invalid="ignore"):
        codes = np.arange(256**target.itemsize).astype(f"u{target.itemsize}").view(target.numpy).astype(np.float64)
    codes = np.unique(codes[np.isfinite(codes)])
    exact = codes[(codes > 0) & (codes < 400)]
    middle = (exact[1:] + exact[:-1]) / 2
    values = np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, 0), -np.nextafter(middle, np.inf)])
    whole = cast_kernel(f64, [target])
    found = run_cpu(whole, {"a": values})[f"o_{target}"].astype(np.float64)
    error = np.abs(found - values)
    place = np.clip(np.searchsorted(codes, values), 1, len(codes) - 1)
    best = np.minimum(np.abs(codes[place] - values), np.abs(codes[place - 1] - values))
    np.testing.assert_array_equal(error, best)


@pytest.mark.parametrize("source", [i32, u32, i64], ids=str)
@pytest.mark.parametrize("target", [bf16, f16, f8e5m2], ids=str)
def test_integers_round_once(source: DType, target: DType) -> None:
    rng = np.random.default_rng(8)
    high = 60000 if target is not bf16 else np.iinfo(source.numpy).max
    values = rng.integers(0 if source.kind == "u" else -high, high, 4001, source.numpy)
    found = run_cpu(cast_kernel(source, [target]), {"a": values})[f"o_{target}"]
    wanted = run_program(cast_kernel(source, [target]), {"a": values})[f"o_{target}"]
    assert same(found, wanted).all()


def test_a_gpu_keeps_its_own_bf16_conversions() -> None:
    _, kernel = expanded(f32, bf16, "sm_90a")
    assert [op.opcode for op in walk(kernel.body)].count("cast") == 1
