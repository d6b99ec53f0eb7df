"""Attention of few queries over a long cache: recognised from plain loops with lengths in memory, cut into parts of the keys; on the CPU, and by
the emulator at the tile and the thread stage for a GPU, against float64. What lies behind a length is NaN: nothing may read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_decode as text
import tilewright as tw
from kernels_decode import attended
from tilewright.base.dtypes import bf16
from tilewright.base.errors import UserError
from tilewright.graphs.kernels.attention import attention_cached
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.attention import CpuAttention, MmaAttention

LENGTHS = (0, 1, 31, 33, 97, 640)


def arrays(seed: int, *shapes: tuple[int, ...], dtype: Any = np.float16) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes]


def on_gpu(kernel: tw.Kernel[..., Any], *arguments: object, stages: tuple[str, ...] = ("tile", "thread")) -> dict[str, np.ndarray]:
    """The results of one compilation, which must be attention in parts."""
    made = kernel.stages(*arguments, target="sm_90a").stages
    assert [type(s) for s in made.schedules][-2:-1] == [MmaAttention], made.schedules
    inputs = {name: getattr(value, "blocks", value) for name, value in kernel.bound(*arguments).items()}
    return {stage: np.asarray(next(iter(run_program(getattr(made, stage), inputs).values()))) for stage in stages}


def on_cpu(kernel: tw.Kernel[..., Any], *arguments: object) -> np.ndarray:
    made = kernel.stages(*arguments, target="aarch64-neon").stages
    assert any(isinstance(s, CpuAttention) for s in made.schedules), made.schedules
    return np.asarray(tw.kernel(device="cpu")(kernel.python)(*arguments))


def near(found: np.ndarray, want: np.ndarray, error: float = 2e-3) -> None:
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=error, atol=error)


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int) -> None:
    q, k, v = arrays(length, (8, 64), (640, 2, 64), (640, 2, 64))
    want = attended(q, k, v, 0, length)
    k[length:], v[length:] = np.nan, np.nan
    given = q, k, v, np.array([length], np.int32)
    for found in on_gpu(text.one_length, *given).values():
        near(found, want)
    near(on_cpu(text.one_length, *(x.astype(np.float32) for x in given[:3]), given[3]), want, 1e-5)


@pytest.mark.parametrize(("depth", "columns"), [(128, 128), (80, 64), (96, 96), (256, 256)])
def test_terms_and_columns(depth: int, columns: int) -> None:
    q, k, v = arrays(depth, (3, depth), (530, 1, depth), (530, 1, columns))
    given = q, k, v, np.array([517], np.int64)
    want = attended(q, k, v, 0, 517)
    for found in on_gpu(text.one_length, *given, stages=("thread",)).values():
        near(found, want)


def test_sequences_of_different_lengths() -> None:
    lengths = np.array([0, 77, 513], np.int32)
    for heads in (4, 2):  # with two heads each has its keys to itself
        q, k, v = arrays(heads, (3, heads, 64), (3, 2, 520, 64), (3, 2, 520, 64), dtype=bf16.numpy)
        want = np.stack([attended(q[b], *(x[b].transpose(1, 0, 2) for x in (k, v)), 0, n, 0.2) for b, n in enumerate(lengths)])
        for found in on_gpu(text.several_lengths, q, k, v, lengths, 0.2).values():
            near(found, want, 1e-2)
        near(on_cpu(text.several_lengths, q, k, v, lengths, 0.2), want, 1e-2)


@pytest.mark.parametrize(("position", "size"), [(0, 5), (40, 7), (500, 100), (90, 1000)])
def test_windows_of_several_tokens(position: int, size: int) -> None:
    q, k, v = arrays(position, (3, 4, 64), (560, 2, 64), (560, 2, 64))
    want = np.stack([attended(q[i], k, v, position + i + 1 - size, position + i + 1) for i in range(3)])
    k[position + 3 :], v[position + 3 :] = np.nan, np.nan
    k[: max(0, position + 1 - size)], v[: max(0, position + 1 - size)] = np.nan, np.nan
    given = q, k, v, np.array([position], np.int32), size
    for found in on_gpu(text.window, *given).values():
        near(found, want)
    near(on_cpu(text.window, *given), want)


@pytest.mark.parametrize("tokens", [1, 5])
def test_ranges_that_end_with_the_token(tokens: int) -> None:
    q, k, v = arrays(tokens, (tokens, 6, 64), (530, 2, 64), (530, 2, 64))
    want = np.stack([attended(q[i], k, v, 0, 300 + i + 1) for i in range(tokens)])
    given = q, k, v, np.array([300], np.int32)
    for found in on_gpu(text.up_to_each, *given).values():
        near(found, want)
    near(on_cpu(text.up_to_each, *given), want)


@pytest.mark.parametrize("page", [16, 24])
def test_pages(page: int) -> None:
    lengths = np.array([1, 500, 333], np.int32)
    pages = -(-512 // page)
    q, k, v = arrays(page, (3, 4, 64), (3 * pages + 1, page, 2, 64), (3 * pages + 1, page, 2, 64))
    table = np.random.default_rng(page).permutation(3 * pages).reshape(3, pages).astype(np.int32)
    whole = [[x[table[b]].reshape(-1, 2, 64) for x in (k, v)] for b in range(3)]
    want = np.stack([attended(q[b], *whole[b], 0, n) for b, n in enumerate(lengths)])
    used = np.zeros(k.shape[:2], bool)
    for b, n in enumerate(lengths):
        for j in range(n):
            used[table[b, j // page], j % page] = True
    k[~used], v[~used] = np.nan, np.nan
    for found in on_gpu(text.paged, q, k, v, table, lengths).values():
        near(found, want)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_attention_of_graphs(tokens: int) -> None:
    kernel = attention_cached if isinstance(attention_cached, tw.Kernel) else tw.kernel(attention_cached)
    q, k, v = arrays(tokens, (2, tokens, 2, 3, 64), (2, 520, 2, 64), (2, 520, 2, 64))
    positions = np.array([0, 400], np.int32)
    want = np.stack([
        np.stack([attended(q[s, i].reshape(6, 64), k[s], v[s], 0, int(p) + i + 1, 0.1) for i in range(tokens)]) for s, p in enumerate(positions)
    ])  # fmt: skip
    given = q, k, v, positions, 0.1
    for found in (*on_gpu(kernel, *given).values(), on_cpu(kernel, *given)):
        near(found.reshape(want.shape), want)


def packed(*values: np.ndarray) -> list[Any]:
    """Blocks of q8_0, and the numbers that are in them."""
    blocks = [tw.quantize(x.astype(np.float32), tw.q8_0) for x in values]
    return [*blocks, *(np.asarray(tw.dequantize(x)) for x in blocks)]


@pytest.mark.parametrize(("length", "depth"), [(0, 64), (1, 32), (33, 128), (517, 64)])
def test_packed_keys_and_values(length: int, depth: int) -> None:
    q, *rows = arrays(length + 7, (6, depth), (530, 2, depth), (530, 2, depth))
    k, v, *numbers = packed(*rows)
    want, at = attended(q, *numbers, 0, length), np.array([length], np.int32)
    for x in (k, v):
        x.blocks[length:] = 0xFF  # scales that are NaN
    for found in on_gpu(text.one_length, q, k, v, at).values():
        near(found, want)
    near(on_cpu(text.one_length, q.astype(np.float32), k, v, at), want, 1e-5)


def test_packed_windows_pages_and_sequences() -> None:
    q, *rows = arrays(3, (2, 4, 64), (560, 2, 64), (560, 2, 64))
    k, v, *numbers = packed(*rows)
    want = np.stack([attended(q[i], *numbers, 150 + i + 1 - 100, 150 + i + 1) for i in range(2)])
    given = k, v, np.array([150], np.int32), 100
    near(on_gpu(text.window, q, *given, stages=("thread",))["thread"], want)
    near(on_cpu(text.window, q.astype(np.float32), *given), want, 1e-5)
    lengths, table = np.array([1, 131], np.int32), np.random.default_rng(3).permutation(104).reshape(2, 52).astype(np.int32)
    rows = arrays(4, (104, 10, 2, 64), (104, 10, 2, 64))
    k, v, *numbers = packed(*rows)
    want = np.stack([attended(q[b], *(x[table[b]].reshape(-1, 2, 64) for x in numbers), 0, n) for b, n in enumerate(lengths)])
    near(on_gpu(text.paged, q, k, v, table, lengths, stages=("thread",))["thread"], want)
    near(np.asarray(text.paged(q.astype(np.float32), k, v, table, lengths)), want, 1e-5)


def test_schedules_with_a_prefetch_give_the_same_bits() -> None:
    q, k, v = arrays(5, (8, 64), (640, 4, 64), (640, 4, 64))
    base = "family=attention_mma m=16 n=32 k=64 head_dim_v=64 stages=3 persistent=0 a_copy=rs splits=3"
    given = q, k, v, np.array([391], np.int32)
    found = [on_gpu(tw.kernel(schedule=base + more)(text.one_length.python), *given, stages=("thread",))["thread"] for more in ("", " prefetch=256")]
    assert np.array_equal(*found)
    near(found[0], attended(q, k, v, 0, 391))
    with pytest.raises(UserError, match="prefetch 0, 128 or 256"):
        tw.kernel(schedule=base + " prefetch=32")(text.one_length.python).stages(*given, target="sm_90a")


@pytest.mark.parametrize("length", [0, 33])
def test_single_precision_on_a_gpu(length: int) -> None:
    """Plain loops: scores, sums and weighted sums of parts are kernels of their own."""
    q, k, v = arrays(length, (4, 24), (200, 2, 24), (200, 2, 24), dtype=np.float32)
    want = attended(q, k, v, 0, length)
    k[length:], v[length:] = np.nan, np.nan
    given = q, k, v, np.array([length], np.int32)
    made = text.one_length.stages(*given, target="sm_90a").stages
    assert len(made.thread.calls) == 4
    found = np.asarray(next(iter(run_program(made.thread, dict(text.one_length.bound(*given))).values())))
    near(found, want, 1e-5)


def test_special_numbers_stay_in_their_row() -> None:
    q, k, v = arrays(5, (4, 64), (600, 2, 64), (600, 2, 64))
    q[0, 3], k[40, 1, 2] = np.nan, np.inf
    q[2:, 2] = np.abs(q[2:, 2])
    given = q, k, v, np.array([555], np.int32)
    want = attended(q, k, v, 0, 555)
    want[0], want[2:] = np.nan, np.nan
    for found in (*on_gpu(text.one_length, *given).values(), on_cpu(text.one_length, *given)):
        near(found, want)


def test_a_length_beyond_the_cache() -> None:
    q, k, v = arrays(6, (4, 64), (600, 2, 64), (600, 2, 64))
    given = q, k, v, np.array([700], np.int32)
    with pytest.raises(UserError, match="reads 'k' at index 699"):
        on_cpu(text.one_length, *given)
    for found in on_gpu(text.one_length, *given, stages=("thread",)).values():
        near(found, attended(q, k, v, 0, 600))


def test_parts_do_not_depend_on_the_length() -> None:
    """One artifact and one list of launches serve all lengths."""
    q, k, v = arrays(7, (4, 64), (640, 2, 64), (640, 2, 64))
    made = [text.one_length.compile(q, k, v, np.array([n], np.int32), target="sm_90a") for n in (3, 640)]
    assert made[0].key == made[1].key
    assert [launch.grid for launch in made[0].launches] == [launch.grid for launch in made[1].launches]
