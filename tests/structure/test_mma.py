"""The shape of contractions on GPUs without warp-group instructions: inner loops that are arithmetic, wide copies, no spills."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from assembled import assemble
from tilewright.ir.nodes import Op, walk
from tilewright.passes.routes import Stages

BF16 = ml_dtypes.bfloat16
N = 4096


def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[i, p] * b[p, j]
        out[i, j] = acc
    return out


def product_f64(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        acc = tw.f64(0)
        for p in range(k):
            acc += a[i, p] * b[p, j]
        out[i, j] = acc
    return out


def product_of_bytes(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.i32)
    for i, j in tw.grid(m, n):
        acc = tw.i32(0)
        for p in range(k):
            acc += tw.i32(a[i, p]) * tw.i32(b[p, j])
        out[i, j] = acc
    return out


CASES: dict[str, tuple[Callable[..., tw.Array], type, str]] = {
    "f32": (product, np.float32, "ieee"), "tf32": (product, np.float32, "tf32"), "3xtf32": (product, np.float32, "3xtf32"),
    "bf16": (product, BF16, "ieee"), "f16": (product, np.float16, "ieee"), "f64": (product_f64, np.float64, "ieee"),
    "i8": (product_of_bytes, np.int8, "ieee"),
}  # fmt: skip


def stages(name: str, target: str, m: int = N, n: int = N, k: int = N) -> Stages:
    function, dtype, precision = CASES[name]
    a, b = np.zeros((m, k), dtype), np.zeros((k, n), dtype)
    return tw.kernel(precision=precision)(function).stages(a, b, target=target).stages


def ptx(name: str, target: str, m: int = N, n: int = N, k: int = N) -> str:
    function, dtype, precision = CASES[name]
    a, b = np.zeros((m, k), dtype), np.zeros((k, n), dtype)
    return tw.kernel(precision=precision)(function).compile(a, b, target=target).code.decode()


def sum_loop(found: Stages) -> list[Op]:
    """The ops of the innermost loop along the sum."""
    loops = [op for call in found.thread.calls for op in walk(call.kernel.body) if op.opcode == "for"]
    (loop,) = (op for op in loops if not any(inner.opcode == "for" for inner in walk(op.regions[0])))
    return list(walk(loop.regions[0]))


def counted(ops: list[Op], opcode: str) -> int:
    return sum(op.opcode == opcode for op in ops)


def loop_text(text: str) -> str:
    """The PTX of the loop along the sum: the longest stretch without labels that ends in a branch back."""
    return max(
        re.split(r"^\$L__BB.*:$", text, flags=re.MULTILINE),
        key=lambda part: part.count("fma.rn") + part.count("mma.sync"),
    )


@pytest.mark.parametrize("shape", [(N, N, N), (3000, 5120, 1537)], ids=str)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize("name", CASES)
def test_no_spills(name: str, target: str, shape: tuple[int, int, int]) -> None:
    found = assemble(ptx(name, target, *shape), target)
    assert found.spills == 0, found.log
    assert found.local == 0, found.log


@pytest.mark.parametrize("name", ["f32", "f64", "3xtf32"])
def test_no_spills_on_hopper(name: str) -> None:
    found = assemble(ptx(name, "sm_90a"), "sm_90a")
    assert found.spills == 0, found.log


def test_the_loop_of_f32_is_nearly_all_multiply_adds() -> None:
    loop = loop_text(ptx("f32", "sm_90a"))
    instructions = len(re.findall(r"^\t[a-z@{]", loop, flags=re.MULTILINE))
    arithmetic = loop.count("fma.rn.f32")
    assert arithmetic >= 1024
    assert instructions - arithmetic < 0.11 * arithmetic
    assert "ld.shared.b32" not in loop  # shared memory is read 16 bytes at a time
    assert loop.count("bar.sync") == 1


@pytest.mark.parametrize(("name", "per_read"), [("bf16", 4), ("f16", 4), ("i8", 4)])
def test_one_read_of_shared_memory_feeds_several_matrix_instructions(name: str, per_read: int) -> None:
    loop = sum_loop(stages(name, "sm_80"))
    assert counted(loop, "mma") >= per_read * counted(loop, "ldmatrix")
    assert counted(loop, "barrier") == 1
    assert not any(op.opcode == "load" and op.operands[0].type.space == "shared" for op in loop)  # type: ignore[union-attr]


def test_three_products_of_tf32_for_one_of_f32() -> None:
    once, thrice = (sum_loop(stages(name, "sm_80", 1024, 1024, 1024)) for name in ("tf32", "3xtf32"))
    areas = [
        s.m * s.n // (s.warps_m * s.warps_n) * s.k
        for s in (stages(n, "sm_80", 1024, 1024, 1024).schedules[0] for n in ("tf32", "3xtf32"))
    ]  # type: ignore[union-attr]
    assert counted(thrice, "mma") * areas[0] == 3 * counted(once, "mma") * areas[1]


@pytest.mark.parametrize("name", ["tf32", "bf16", "f64"])
def test_aligned_operands_come_in_asynchronous_copies_of_16_bytes(name: str) -> None:
    loop = sum_loop(stages(name, "sm_80"))
    assert {op.attrs["bytes"] for op in loop if op.opcode == "copy_async"} == {16}
    assert not any(op.opcode == "load" and op.operands[0].type.space == "global" for op in loop)  # type: ignore[union-attr]


def test_without_asynchronous_copies_operands_pass_through_registers() -> None:
    loop = sum_loop(stages("f32", "sm_75"))
    loads = [op for op in loop if op.opcode == "load" and op.operands[0].type.space == "global"]  # type: ignore[union-attr]
    assert {op.attrs.get("width", 1) for op in loads} == {4}
    assert not counted(loop, "copy_async")
