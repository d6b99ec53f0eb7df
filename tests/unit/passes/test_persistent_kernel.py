"""Kernels of a program as one launch: the same bits as apart, barriers only where one depends on another, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from kernels_attention import plain
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.compile.driver import compile_stages
from tilewright.ir.emulator import run_program
from tilewright.ir.needs import shared_places
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.program import Program
from tilewright.passes.program.persistent_kernel import lean, persistent_kernel

TARGET = parse_target("sm_90a")
SIZES = [0, 1, 31, 33, 127, 1031]
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


@tw.kernel(launches=1)
def centred(x: tw.Array) -> tw.Array:
    """Sums along columns, differences, sums along rows, products: each needs all of the one before."""
    rows, cols = x.shape
    total = tw.empty((cols,), tw.f32)
    for j in tw.grid(cols):
        s = 0.0
        for i in range(rows):
            s += x[i, j]
        total[j] = s
    m = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        s = 0.0
        for j in range(cols):
            s += x[i, j] - total[j] / rows
        m[i] = s
    out = tw.empty((rows, cols), x.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = (x[i, j] - total[j] / rows) * m[rows - 1 - i]
    return out


@tw.kernel(launches=1)
def apart(x: tw.Array, y: tw.Array) -> tuple[tw.Array, tw.Array]:
    """Two nests that have nothing to do with each other."""
    (n,) = x.shape
    (m,) = y.shape
    a = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        a[i] = x[n - 1 - i] * 2.0
    b = tw.empty((m,), y.dtype)
    for i in tw.grid(m):
        b[i] = y[m - 1 - i] + 1.0
    return a, b


@tw.kernel(launches=1)
def shifted(x: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array, tw.Array]:
    """Each result needs elements of the one before that other blocks computed."""
    (n,) = x.shape
    a = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        a[i] = x[n - 1 - i] + 1.0
    b = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        b[i] = a[n - 1 - i] * 2.0
    c = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        c[i] = b[n - 1 - i] - x[i]
    d = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        d[i] = c[n - 1 - i] * a[i]
    return a, b, c, d


@tw.kernel(launches=1)
def projected(x: tw.Array, w: tw.Array, v: tw.Array) -> tw.Array:
    """Two layers."""
    return tw.relu(x @ w) @ v


@tw.kernel(launches=1)
def attended(q: tw.Array, k: tw.Array, v: tw.Array, w: tw.Array, w2: tw.Array) -> tw.Array:
    """Attention, the sum of its heads, and two layers."""
    y = plain(q, k, v, 0.2)
    _, heads, n, d = y.shape
    t = tw.empty((n, d), q.dtype)
    for i, j in tw.grid(n, d):
        total = 0.0
        for h in range(heads):
            total += y[0, h, i, j]
        t[i, j] = total
    return tw.relu(t @ w) @ w2


def programs(kernel: tw.Kernel[..., object], *arrays: np.ndarray) -> tuple[Program, Program]:
    """The thread stage as several kernels and as one, by the same schedules."""
    signature = replace(kernel._signature(arrays, {}, TARGET), launches=0)
    several = compile_stages(kernel.function, signature, lean(TARGET)).stages.thread
    return several, persistent_kernel(several)


def barriers(kernel: Kernel) -> int:
    return sum(op.opcode == "grid_barrier" for op in walk(kernel.body))


def same_bits(several: Program, one: Program, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    wanted, found = run_program(several, inputs), run_program(one, inputs)
    for name, array in wanted.items():
        assert array.tobytes() == found[name].tobytes(), name
    return found


def numbers(dtype: np.dtype, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_small_kernels_in_a_row(n: int, dtype: str) -> None:
    x = numbers(DTYPES[dtype], n)
    several, one = programs(shifted, x)
    assert len(several.calls) > 1
    assert barriers(one.calls[0].kernel) == len(several.calls) - 1
    same_bits(several, one, x=x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (31, 33), (33, 131), (257, 31), (3, 1031)])
def test_sums_along_both_axes(shape: tuple[int, int], dtype: str) -> None:
    x = numbers(DTYPES[dtype], *shape)
    several, one = programs(centred, x)
    (call,) = one.calls
    assert call.kernel.threads == max(c.kernel.threads for c in several.calls)
    found = same_bits(several, one, x=x)["out"]
    wide = x.astype(np.float64)
    centre = wide - wide.sum(axis=0) / max(1, shape[0])
    wanted = centre * centre.sum(axis=1)[::-1, None]
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=1e-5 if dtype == "f32" else 2**-8, atol=2e-3)


def test_smaller_kernels_share_a_block_or_leave_threads_idle() -> None:
    x = numbers(DTYPES["f32"], 33, 513)
    several, one = programs(centred, x)
    kernel = one.calls[0].kernel
    smaller = [c.kernel for c in several.calls if c.kernel.threads < kernel.threads]
    meet = [any(op.opcode == "barrier" for op in walk(k.body)) for k in smaller]
    assert any(meet) and not all(meet), "both ways are part of this test"
    assert any(op.opcode == "named_barrier" for op in walk(kernel.body))
    (thread,) = (op.results[0] for op in kernel.body.ops if op.opcode == "thread_id")
    assert any(op.opcode == "floordiv" and op.operands[0] is thread for op in kernel.body.ops), "some blocks run side by side"


def test_what_is_independent_does_not_wait() -> None:
    x, y = numbers(DTYPES["f32"], 1031), numbers(DTYPES["f32"], 257)
    several, one = programs(apart, x, y)
    assert len(several.calls) == 2
    assert barriers(one.calls[0].kernel) == 0
    same_bits(several, one, x=x, y=y)


def test_products() -> None:
    x, w, v = (numbers(DTYPES["bf16"], *shape) for shape in ((67, 96), (96, 200), (200, 64)))
    several, one = programs(projected, x, w, v)
    assert len(several.calls) > 1
    assert any(op.opcode == "mma" for op in walk(one.calls[0].kernel.body))
    found = next(iter(same_bits(several, one, x=x, w=w, v=v).values())).astype(np.float64)
    wanted = np.maximum(x.astype(np.float64) @ w.astype(np.float64), 0) @ v.astype(np.float64)
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


def test_attention_and_what_follows() -> None:
    """Copies in flight, rings in shared memory, and kernels of 64 and 128 threads."""
    half = np.dtype(np.float16)
    q, k, v = (numbers(half, 1, 3, 37, 64) / half.type(4) for _ in range(3))
    w, w2 = numbers(half, 64, 96) / half.type(8), numbers(half, 96, 64) / half.type(8)
    several, one = programs(attended, q, k, v, w, w2)
    assert {c.kernel.threads for c in several.calls} == {64, 128}
    assert any(op.opcode == "copy_async" for op in walk(one.calls[0].kernel.body))
    (found,) = same_bits(several, one, q=q, k=k, v=v, w=w, w2=w2).values()
    wide = [x.astype(np.float64) for x in (q, k, v, w, w2)]
    scores = wide[0] @ wide[1].swapaxes(2, 3) * 0.2
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    mixed = (weights / weights.sum(axis=3, keepdims=True) @ wide[2])[0].sum(axis=0)
    np.testing.assert_allclose(found, np.maximum(mixed @ wide[3], 0) @ wide[4], atol=5e-3)


def test_shared_memory_is_that_of_the_largest() -> None:
    """…and not the sum: phases follow one another."""
    from tilewright.codegen.nvptx.emitter import kernel_needs

    x = numbers(DTYPES["f32"], 257, 1031)
    several, one = programs(centred, x)
    own = [kernel_needs(c.kernel).shared_bytes or _static(c.kernel) for c in several.calls]
    assert sum(size > 0 for size in own) > 1
    assert kernel_needs(one.calls[0].kernel).shared_bytes == max(own)


def _static(kernel: Kernel) -> int:
    return shared_places(kernel)[1]


def test_without_its_barriers_it_races() -> None:
    """The emulator sees what the barriers are for."""
    from tilewright.ir.rewrite import rewrite

    x = numbers(DTYPES["f32"], 1031 * 8)
    _, one = programs(shifted, x)
    (call,) = one.calls
    seen = iter(range(100))
    # The last barrier stays: the kernel is still cooperative.
    last = barriers(call.kernel) - 1
    bare = rewrite(call.kernel, lambda b, op: [] if op.opcode == "grid_barrier" and next(seen) < last else None)
    with pytest.raises(UserError, match="race on global memory"):
        run_program(replace(one, calls=(replace(call, kernel=bare),)), {"x": x})


def test_one_kernel_stays_as_it_is() -> None:
    @tw.kernel(launches=1)
    def twice(x: tw.Array) -> tw.Array:
        return x * 2.0

    several, one = programs(twice, numbers(DTYPES["f32"], 100))
    assert one is several


def test_an_array_with_two_shapes_is_read_after_it_was_written() -> None:
    """Kernels may see one array with merged axes and with its own; what is written through one is not constant through the other."""

    @tw.kernel(launches=1)
    def turned(x: tw.Array) -> tuple[tw.Array, tw.Array]:
        rows, cols = x.shape
        y = tw.empty((rows, cols), x.dtype)
        for i, j in tw.grid(rows, cols):
            y[i, j] = x[i, j] * 3.0
        out = tw.empty((cols, rows), x.dtype)
        for i, j in tw.grid(cols, rows):
            out[i, j] = y[j, i] + y[rows - 1 - j, cols - 1 - i]
        return y, out

    x = numbers(DTYPES["f32"], 96, 128)
    several, one = programs(turned, x)
    kernel = one.calls[0].kernel
    assert one.calls[0].args.count("y") == 2, "one parameter for each shape"
    from tilewright.codegen.nvptx.emitter import _written

    assert {p for p, name in zip(kernel.params, one.calls[0].args, strict=True) if name == "y"} <= _written(kernel)
    found = same_bits(several, one, x=x)["out"]
    np.testing.assert_array_equal(found, (x * 3 + (x * 3)[::-1, ::-1]).T)


def test_hoppers_own_ways_are_refused_with_the_reason() -> None:
    x, w, v = (numbers(DTYPES["bf16"], *shape) for shape in ((512, 512), (512, 512), (512, 512)))
    signature = replace(projected._signature((x, w, v), {}, TARGET), launches=0)
    several = compile_stages(projected.function, signature, TARGET).stages.thread
    assert any(op.opcode == "wgmma" for call in several.calls for op in walk(call.kernel.body))
    with pytest.raises(UserError, match=r"launches=1: kernel .* uses tensor_map, which cannot be part of a larger kernel"):
        persistent_kernel(several)


@pytest.mark.parametrize("launches", [0, 2, True, "1"])
def test_other_numbers_of_launches(launches: object) -> None:
    with pytest.raises(UserError, match="launches is"):
        tw.kernel(launches=launches)(lambda x: x)  # type: ignore[call-overload]


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_it_assembles(target: str) -> None:
    from tilewright.codegen.nvptx.ptxas import assemble

    arrays = [numbers(DTYPES["bf16"], *shape) for shape in ((67, 96), (96, 200), (200, 64))]
    for kernel, given in ((projected, arrays), (centred, arrays[:1])):
        artifact = kernel.compile(*given, target=target)
        (launch,) = artifact.launches
        assert launch.cooperative and launch.persistent
        assembled = assemble(artifact.code.decode(), target)
        assert assembled is not None and launch.entry in assembled
