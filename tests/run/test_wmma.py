"""Fragments of CUDA's WMMA shapes in explicit kernels: what the emulator computes, which instructions they become, and what is refused."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from assembled import assemble
from tilewright.base.errors import TargetLimit, TilewrightError, UserError
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device
from tilewright.execute.simt.kernels import GpuKernel

SHAPES = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16), "m16n16k8": (16, 16, 8)}
NARROW = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8, "u8": np.uint8}
CASES = [(shape, name) for shape in SHAPES for name in (("f32",) if shape == "m16n16k8" else NARROW)]


def product(shape: str, turned: bool) -> GpuKernel[...]:
    """c + a @ b by one warp, two steps along the sum; of transposed matrices, and to one, where `turned`."""
    depth = SHAPES[shape][2]

    @tw.gpu
    def multiply(a: tw.Array, b: tw.Array, c: tw.Array, o: tw.Array):
        sums = tw.wmma_load(c, (1, 2), "c", shape)
        for k in range(0, a.shape[0] if turned else a.shape[1], depth):
            left = tw.wmma_load(a, (k, 0) if turned else (0, k), "a", shape, transposed=turned)
            right = tw.wmma_load(b, (0, k) if turned else (k, 0), "b", shape, transposed=turned)
            sums = tw.wmma_mma(left, right, sums)
        tw.wmma_store(o, (0, 0), sums, transposed=turned)

    return multiply


def operands(shape: str, name: str, turned: bool) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    m, n, k = SHAPES[shape]
    generator = np.random.default_rng(3)
    whole = name in ("i8", "u8")
    dtype = np.float32 if name == "f32" else NARROW[name]
    a, b = (generator.integers(0 if name == "u8" else -100, 101, extents).astype(dtype) for extents in ((m, 2 * k), (2 * k, n)))
    if not whole:
        a, b = (a / np.asarray(16, dtype)).astype(dtype), (b / np.asarray(16, dtype)).astype(dtype)
    c = generator.integers(-50, 50, (m + 1, n + 2)).astype(np.int32 if whole else np.float32)
    wanted = a.astype(np.float64) @ b.astype(np.float64) + c[1:, 2:]
    if turned:
        return (np.ascontiguousarray(a.T), np.ascontiguousarray(b.T), c, np.zeros((n, m), c.dtype)), wanted.T
    return (a, b, c, np.zeros((m, n), c.dtype)), wanted


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("shape", "name"), CASES)
def test_products_on_the_emulator(shape: str, name: str, turned: bool) -> None:
    args, wanted = operands(shape, name, turned)
    product(shape, turned)[1, 32](*args, device="emulator")
    # Sums of these products are exact in f32: any difference is an element in another place.
    assert np.array_equal(args[3], wanted)


@pytest.mark.parametrize("shape", ["m16n16k16", "m32n8k16", "m8n32k16"])
def test_products_of_turing_on_the_emulator(shape: str) -> None:
    args, wanted = operands(shape, "f16", False)
    kernel = product(shape, False)
    kernel[1, 32](*args, device=emulator_device("thread", parse_target("sm_75")))
    assert np.array_equal(args[3], wanted)
    depths = {target: {op.attrs.get("k") for op in _ops(kernel, args, target)} for target in ("sm_75", "sm_80")}
    assert depths == {"sm_75": {8}, "sm_80": {None}}


def _ops(kernel: GpuKernel[...], args: tuple[np.ndarray, ...], target: str) -> list[object]:
    from tilewright.ir.nodes import walk

    body = kernel[1, 32].thread_stage(*args, target=target).calls[0].kernel.body
    found = [op for op in walk(body) if op.opcode == "mma"]
    assert found
    return found  # type: ignore[return-value]


INSTRUCTIONS = {
    "f16": "m16n8k16.row.col.f32.f16.f16.f32", "bf16": "m16n8k16.row.col.f32.bf16.bf16.f32", "f32": "m16n8k8.row.col.f32.tf32.tf32.f32",
    "i8": "m16n8k16.row.col.s32.s8.s8.s32", "u8": "m16n8k16.row.col.s32.u8.u8.s32",
}  # fmt: skip


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize(("shape", "name"), CASES)
def test_products_assemble(shape: str, name: str, target: str) -> None:
    args, _ = operands(shape, name, True)
    launch = product(shape, True)[1, 32]
    if target == "sm_75" and name != "f16":
        with pytest.raises(TargetLimit, match="sm_75 cannot do mma") as caught:
            launch.compile(*args, target=target)
        assert "test_wmma.py" in str(caught.value)
        return
    ptx = launch.compile(*args, target=target).code.decode()
    found = set(re.findall(r"mma\.sync\.aligned\.([\w.]+)", ptx))
    assert found == {"m16n8k8.row.col.f32.f16.f16.f32" if target == "sm_75" else INSTRUCTIONS[name]}
    assemble(ptx, target, level=1)


def test_sums_begin_as_a_number_and_round_to_the_array() -> None:
    @tw.gpu
    def fill(o: tw.Array, whole: tw.Array):
        tw.wmma_store(o, (0, 0), tw.wmma_fill(1.0 / 3, "m8n32k16"))
        tw.wmma_store(whole, (0, 0), tw.wmma_fill(7, "m32n8k16", tw.i32))

    o, whole = np.zeros((8, 32), np.float16), np.zeros((32, 8), np.int32)
    fill[1, 32](o, whole, device="emulator")
    assert (o == np.float16(np.float32(1 / 3))).all() and (whole == 7).all()


def test_matrices_in_shared_memory_and_with_gaps() -> None:
    @tw.gpu
    def multiply(a: tw.Array, b: tw.Array, o: tw.Array):
        tile = tw.shared((16, 16), tw.f16)
        for step in range(8):
            at = 32 * step + tw.lane_id()
            tile[at // 16, at % 16] = b[at // 16, at % 16]
        tw.gpu_sync()
        tw.wmma_store(o, (0, 0), tw.wmma_mma(tw.wmma_load(a, (0, 0), "a"), tw.wmma_load(tile, (0, 0), "b"), tw.wmma_fill()))

    numbers = (np.arange(32 * 32).reshape(32, 32) % 11).astype(np.float16)
    a, b, o = numbers[::2, ::2], np.asfortranarray(numbers[:16, :16]), np.zeros((16, 16), np.float32)
    multiply[1, 32](a, b, o, device="emulator")
    assert np.array_equal(o, a.astype(np.float32) @ b.astype(np.float32))


def refused(line: str, *args: np.ndarray, device: str = "emulator") -> TilewrightError:
    import linecache

    name = f"<wmma {line}>"
    text = f"import tilewright as tw\n@tw.gpu\ndef kernel(h: tw.Array, f: tw.Array, b: tw.Array):\n    {line}\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, GpuKernel[...]] = {}
    exec(compile(text, name, "exec"), space)
    with pytest.raises(TilewrightError) as caught:
        space["kernel"][1, 32](
            np.zeros((16, 16), np.float16), np.zeros((16, 16), np.float32), np.zeros((16, 16), np.int8), device=device
        )
    return caught.value


@pytest.mark.parametrize(("line", "message"), [
    ("tw.wmma_load(h, (0, 0), 'd')", "the part is 'd'"),
    ("tw.wmma_load(h, (0, 0), 'a', 'm8n8k16')", "the shape is 'm8n8k16'"),
    ("tw.wmma_load(f, (0, 0), 'a')", "there is no matrix instruction m16n16k16 of f32"),
    ("tw.wmma_load(h, (0, 0), 'a', 'm16n16k8')", "there is no matrix instruction m16n16k8 of f16"),
    ("tw.wmma_load(h, (0, 0), 'c')", "sums of tensor cores are f32 or i32, and the array 'h' holds f16"),
    ("tw.wmma_fill(0.0, dtype=tw.f16)", "sums of tensor cores are f32 or i32, not f16"),
    ("tw.wmma_mma(1, 2, 3)", "'a' is the number 1, not a fragment a"),
    ("tw.wmma_store(f, (0, 0), tw.wmma_load(h, (0, 0), 'a'))", "'c' is a f16 fragment a of 16 x 16, not a fragment c"),
    ("tw.wmma_mma(tw.wmma_load(h, (0, 0), 'a'), tw.wmma_load(b, (0, 0), 'b'), tw.wmma_fill())", "a is for m16n16k16 of f16, b for m16n16k16 of i8"),
    ("tw.wmma_mma(tw.wmma_load(h, (0, 0), 'a'), tw.wmma_load(h, (0, 0), 'b'), tw.wmma_fill(0, dtype=tw.i32))", "c has 16 x 16 sums of i32; those of a and b are 16 x 16 of f32"),
    ("tw.wmma_mma(tw.wmma_load(h, (0, 0), 'a'), tw.wmma_load(h, (0, 0), 'b'), tw.wmma_fill(0, 'm32n8k16'))", "c has 32 x 8 sums"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(line: str, message: str) -> None:
    error = refused(line)
    assert isinstance(error, UserError) and message in str(error) and ":4:" in str(error)


def test_an_element_outside_is_found() -> None:
    error = refused("tw.wmma_store(f, (8, 0), tw.wmma_fill())")
    assert "out of bounds" in str(error) or "index" in str(error)


def test_a_cpu_refuses_with_the_line() -> None:
    error = refused("tw.wmma_mma(tw.wmma_load(h, (0, 0), 'a'), tw.wmma_load(h, (0, 0), 'b'), tw.wmma_fill())", device="cpu")
    assert isinstance(error, TargetLimit) and ":4:" in str(error)
