"""Ordered loops around parallel ones: each step runs on the whole device, and the result is that of NumPy, whatever the number of steps.

Kernels are run on the CPU and at every stage of the emulator, for shapes with one element, edges and more than one block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest

import assembled
import tilewright as tw
from null_cuda.install import installed
from tilewright.ir.program import call_tree
from tilewright.ir.text import print_program
from tilewright.ir.text_parse import parse_program
from tilewright.tree.typed_text import show

DEVICES = ("cpu", "emulator:loop", "emulator:tile", "emulator", pytest.param("cuda", marks=pytest.mark.requires("cuda")))
ALPHA = 0.1


@tw.kernel
def heat(x: tw.Array, steps: int) -> tw.Array:
    rows, cols = x.shape
    u = x * 1.0
    v = tw.empty_like(x)
    for _ in range(steps):
        for i, j in tw.grid(rows, cols):
            if 0 < i < rows - 1 and 0 < j < cols - 1:
                v[i, j] = u[i, j] + ALPHA * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1] - 4 * u[i, j])
            else:
                v[i, j] = u[i, j]
        u, v = v, u
    return u


def heat_numpy(x: np.ndarray, steps: int) -> np.ndarray:
    u = x.copy()
    for _ in range(steps):
        v = u.copy()
        v[1:-1, 1:-1] = u[1:-1, 1:-1] + x.dtype.type(ALPHA) * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1])
        u = v
    return u


@tw.kernel
def life(x: tw.Array, steps: int) -> tw.Array:
    rows, cols = x.shape
    u = tw.empty_like(x)
    v = tw.empty_like(x)
    for i, j in tw.grid(rows, cols):
        u[i, j] = x[i, j]
    for _ in range(steps):
        for i, j in tw.grid(rows, cols):
            count = tw.i32(0)
            for di in range(-1, 2):
                for dj in range(-1, 2):
                    if di != 0 or dj != 0:
                        count += u[(i + di + rows) % rows, (j + dj + cols) % cols]
            v[i, j] = 1 if count == 3 or (count == 2 and u[i, j] == 1) else 0
        u, v = v, u
    return u


def life_numpy(x: np.ndarray, steps: int) -> np.ndarray:
    u = x.copy()
    for _ in range(steps):
        count = sum(np.roll(u, (a, b), (0, 1)) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0))
        u = ((count == 3) | ((count == 2) & (u == 1))).astype(x.dtype)
    return u


@tw.kernel
def wave(a: tw.Array, b: tw.Array, steps: int) -> tuple[tw.Array, tw.Array]:
    n = len(a)
    before = a * 1.0
    now = b * 1.0
    after = tw.zeros_like(a)
    for _ in range(steps):
        for i in tw.grid(range(1, n - 1)):
            after[i] = 2 * now[i] - before[i] + 0.25 * (now[i - 1] - 2 * now[i] + now[i + 1])
        before, now, after = now, after, before
    return before, now


def wave_numpy(a: np.ndarray, b: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    before, now, after = a.copy(), b.copy(), np.zeros_like(a)
    for _ in range(steps):
        after[1:-1] = 2 * now[1:-1] - before[1:-1] + a.dtype.type(0.25) * (now[:-2] - 2 * now[1:-1] + now[2:])
        before, now, after = now, after, before
    return before, now


@tw.kernel
def red_black(x: tw.Array, steps: int) -> tw.Array:
    n, m = x.shape
    u = x * 1.0
    for _ in range(steps):
        for colour in range(2):
            for i, j in tw.grid(range(1, n - 1), range(1, m - 1)):
                if (i + j) % 2 == colour:
                    u[i, j] = (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1]) / 4
    return u


def red_black_numpy(x: np.ndarray, steps: int) -> np.ndarray:
    u = x.copy()
    places = np.add.outer(np.arange(x.shape[0]), np.arange(x.shape[1]))[1:-1, 1:-1] % 2
    for _ in range(steps):
        for colour in range(2):
            new = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / x.dtype.type(4)
            u[1:-1, 1:-1] = np.where(places == colour, new, u[1:-1, 1:-1])
    return u


@tw.kernel
def lu(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    a = x * 1.0
    for k in range(n):
        for i in tw.grid(range(k + 1, n)):
            a[i, k] = a[i, k] / a[k, k]
        for i, j in tw.grid(range(k + 1, n), range(k + 1, n)):
            a[i, j] = a[i, j] - a[i, k] * a[k, j]
    return a


def lu_numpy(x: np.ndarray) -> np.ndarray:
    a = x.copy()
    for k in range(len(a)):
        a[k + 1 :, k] /= a[k, k]
        a[k + 1 :, k + 1 :] -= np.outer(a[k + 1 :, k], a[k, k + 1 :])
    return a


@tw.kernel
def cholesky(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    a = x * 1.0
    for k in range(n):
        a[k, k] = tw.sqrt(a[k, k])
        for i in tw.grid(range(k + 1, n)):
            a[i, k] = a[i, k] / a[k, k]
        for i, j in tw.grid(range(k + 1, n), range(k + 1, n)):
            if j <= i:
                a[i, j] = a[i, j] - a[i, k] * a[j, k]
    return a


@tw.kernel
def shortest_paths(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    d = x * 1.0
    e = tw.empty_like(x)
    for k in range(n):
        for i, j in tw.grid(n, n):
            e[i, j] = min(d[i, j], d[i, k] + d[k, j])
        d, e = e, d
    return d


def paths_numpy(x: np.ndarray) -> np.ndarray:
    d = x.copy()
    for k in range(len(d)):
        d = np.minimum(d, d[:, k : k + 1] + d[k : k + 1])
    return d


@tw.kernel
def power(a: tw.Array, steps: int) -> tuple[tw.Array, float]:
    n = a.shape[0]
    v = tw.full((n,), 1.0, a.dtype)
    w = tw.empty((n,), a.dtype)
    norm = 0.0
    for _ in range(steps):
        for i in tw.grid(n):
            total = 0.0
            for j in range(n):
                total += a[i, j] * v[j]
            w[i] = total
        square = 0.0
        for i in range(n):
            square += w[i] * w[i]
        norm = tw.sqrt(square)
        for i in tw.grid(n):
            v[i] = w[i] / norm
    return v, norm


def power_numpy(a: np.ndarray, steps: int) -> tuple[np.ndarray, float]:
    v, norm = np.ones(len(a)), 0.0
    for _ in range(steps):
        w = a.astype(np.float64) @ v
        norm = float(np.sqrt((w * w).sum()))
        v = w / norm
    return v, norm


@tw.kernel
def smoothed(u: tw.Array) -> tw.Array:
    n = len(u)
    out = tw.empty_like(u)
    for i in tw.grid(n):
        out[i] = (u[max(i - 1, 0)] + u[i] + u[min(i + 1, n - 1)]) / 3
    return out


def smoothed_numpy(u: np.ndarray) -> np.ndarray:
    padded = np.concatenate([u[:1], u, u[-1:]]) if len(u) else u
    return ((padded[:-2] + padded[1:-1] + padded[2:]) / u.dtype.type(3)).astype(u.dtype) if len(u) else u


@tw.kernel
def with_helper(x: tw.Array, steps: int) -> tw.Array:
    u = x * 1.0
    for _ in range(steps):
        u = smoothed(u)
    return u


@tw.kernel
def until_steady(x: tw.Array, limit: float) -> tuple[tw.Array, int]:
    n = len(x)
    u = x * 1.0
    v = tw.zeros_like(x)
    change = 1.0e30
    steps = 0
    while change > limit:
        for i in tw.grid(n):
            v[i] = (u[max(i - 1, 0)] + u[i] + u[min(i + 1, n - 1)]) / 3
        change = 0.0
        for i in range(n):
            change = max(change, abs(v[i] - u[i]))
        u, v = v, u
        steps += 1
    return u, steps


def until_steady_numpy(x: np.ndarray, limit: float) -> tuple[np.ndarray, int]:
    u, steps, change = x.copy(), 0, 1e30
    while change > limit:
        v = smoothed_numpy(u)
        change = float(abs(v - u).max())
        u, steps = v, steps + 1
    return u, steps


@tw.kernel
def alternating(x: tw.Array, steps: int) -> tw.Array:
    n = len(x)
    u = x * 1.0
    scale = 1.0
    for t in range(1, 3 * steps, 3):
        if t % 2 == 0:
            for i in tw.grid(n):
                u[i] = u[i] * scale + t
        else:
            for i in tw.grid(n):
                u[i] = u[i] - i
            scale = scale + 1
    return u


def alternating_numpy(x: np.ndarray, steps: int) -> np.ndarray:
    u, scale = x.copy(), 1.0
    for t in range(1, 3 * steps, 3):
        if t % 2 == 0:
            u = (u * u.dtype.type(scale) + u.dtype.type(t)).astype(u.dtype)
        else:
            u = u - np.arange(len(u), dtype=u.dtype)
            scale += 1
    return u


def random(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(7).random(shape).astype(dtype)


def run(kernel: Callable[..., object], *args: object, device: str) -> object:
    """The result; a kernel that runs on one thread says so, and fails here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", tw.PerformanceWarning)
        return kernel(*args, device=device)


SHAPES = ((1, 1), (2, 3), (7, 33), (33, 65))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_heat(device: str, dtype: type) -> None:
    for shape, steps in zip(SHAPES, (3, 2, 5, 4), strict=True):
        x = random(*shape, dtype=dtype)
        np.testing.assert_allclose(run(heat, x, steps, device=device), heat_numpy(x, steps), rtol=1e-5)
    x = random(9, 12, dtype=dtype)
    np.testing.assert_array_equal(run(heat, x, 0, device=device), x)
    np.testing.assert_array_equal(run(heat, x, -3, device=device), x)
    strided = random(18, 40, dtype=dtype)[::2, ::-3]
    np.testing.assert_allclose(run(heat, strided, 3, device=device), heat_numpy(strided, 3), rtol=1e-5)
    assert np.asarray(run(heat, np.empty((0, 5), dtype), 3, device=device)).shape == (0, 5)


@pytest.mark.parametrize("device", DEVICES)
def test_not_a_number_spreads_as_in_numpy(device: str) -> None:
    x = random(12, 40)
    x[5, 7], x[8, 30] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(run(heat, x, 3, device=device), heat_numpy(x, 3), rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_game_of_life(device: str) -> None:
    for shape in ((3, 3), (8, 33)):
        x = (random(*shape) > 0.6).astype(np.int32)
        np.testing.assert_array_equal(run(life, x, 4, device=device), life_numpy(x, 4))


@pytest.mark.parametrize("device", DEVICES)
def test_three_buffers(device: str) -> None:
    a, b = random(70), random(70)[::-1]
    for steps in range(6):
        for mine, wanted in zip(run(wave, a, b, steps, device=device), wave_numpy(a, b, steps), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_red_black(device: str) -> None:
    for shape in ((2, 2), (3, 3), (9, 34)):
        x = random(*shape)
        np.testing.assert_allclose(run(red_black, x, 3, device=device), red_black_numpy(x, 3), rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2, 31])
def test_factorisations(device: str, n: int) -> None:
    x = random(n, n, dtype=np.float64) + n * np.eye(n)
    np.testing.assert_allclose(run(lu, x, device=device), lu_numpy(x), rtol=1e-9)
    symmetric = x + x.T
    np.testing.assert_allclose(np.tril(np.asarray(run(cholesky, symmetric, device=device))), np.linalg.cholesky(symmetric), rtol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_shortest_paths(device: str) -> None:
    for n in (1, 6, 19):
        x = random(n, n)
        np.fill_diagonal(x, 0)
        np.testing.assert_allclose(run(shortest_paths, x, device=device), paths_numpy(x), rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_reduction_inside_a_step(device: str) -> None:
    a = random(37, 37)
    vector, norm = run(power, a, 5, device=device)  # type: ignore[misc]
    wanted = power_numpy(a, 5)
    np.testing.assert_allclose(vector, wanted[0], rtol=1e-4)
    np.testing.assert_allclose(norm, wanted[1], rtol=1e-5)
    assert run(power, a, 0, device=device)[1] == 0  # type: ignore[index]


@pytest.mark.parametrize("device", DEVICES)
def test_helpers_that_make_arrays(device: str) -> None:
    for n, steps in ((1, 3), (5, 2), (130, 5)):
        x = random(n)
        wanted = x
        for _ in range(steps):
            wanted = smoothed_numpy(wanted)
        np.testing.assert_allclose(run(with_helper, x, steps, device=device), wanted, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_while_with_a_condition_of_the_device(device: str) -> None:
    for n in (1, 9, 67):
        x = random(n, dtype=np.float64)
        result, steps = run(until_steady, x, 0.01, device=device)  # type: ignore[misc]
        wanted, count = until_steady_numpy(x, 0.01)
        np.testing.assert_allclose(result, wanted, rtol=1e-9)
        assert steps == count


@pytest.mark.parametrize("device", DEVICES)
def test_conditions_and_variables_between_steps(device: str) -> None:
    x = random(75, dtype=np.float64)
    for steps in range(6):
        np.testing.assert_allclose(run(alternating, x, steps, device=device), alternating_numpy(x, steps), rtol=1e-9)


# -- how it is done ---------------------------------------------------------------------------------------------------


def test_names_change_places_instead_of_copies() -> None:
    text = show(heat.stages(random(8, 8), 3).typed)
    assert "ordered _$1 in 0..steps" in text and "turn 1 of 2" in text
    steps = text[text.index("turn 0") : text.index("parallel home")]
    assert steps.count("parallel") == 2 and "new_v" not in steps
    assert "turn 2 of 3" in show(wave.stages(random(8), random(8), 3).typed)


def test_a_gpu_has_one_launch_for_all_steps() -> None:
    for kernel, args in ((heat, (random(64, 64), 3)), (lu, (random(64, 64),)), (until_steady, (random(64), 0.1)), (power, (random(64, 64), 3))):
        for target in ("sm_80", "sm_90a"):
            artifact = kernel.compile(*args, target=target)
            (steps,) = [launch for launch in artifact.launches if launch.cooperative]
            assert steps.persistent
            assembled.assemble(artifact.code.decode(), target)


def test_the_stages_print_and_parse() -> None:
    stages = heat.stages(random(64, 64), 3, target="sm_90a").stages
    for program in (stages.loop, stages.tile):
        text = print_program(program)
        assert "ordered _$1.0 count steps$size {" in text and "turn 1 of 2 {" in text
        assert print_program(parse_program(text)) == text
        assert len(call_tree(program)) < len(program.calls)
    assert not stages.thread.loops
    host = heat.stages(random(64, 64), 3, target="x86-64-avx512").stages
    assert print_program(host.thread).count("run_blocks") == 2
    assert print_program(parse_program(print_program(host.thread))) == print_program(host.thread)


def test_one_launch_with_ordered_loops() -> None:
    once = tw.kernel(launches=1)(heat.python)
    x = random(20, 70)
    np.testing.assert_allclose(once(x, 3, device="emulator"), heat_numpy(x, 3), rtol=1e-5)
    (launch,) = once.compile(x, 3, target="sm_90a").launches
    assert launch.persistent


def test_out_may_be_the_input() -> None:
    x = random(20, 30)
    wanted = heat_numpy(x, 3)
    assert heat(x, 3, out=x) is x
    np.testing.assert_allclose(x, wanted, rtol=1e-5)


# -- slices -----------------------------------------------------------------------------------------------------------


@tw.kernel
def slices(x: tw.Array, steps: int) -> tw.Array:
    a = x * 1.0
    a[1:] = a[:-1] + 1
    for _ in range(steps):
        a[1:-1] = (a[:-2] + a[1:-1] + a[2:]) / 3
        a[2:-2] += a[4:]
        a[:3] = a[2:5]
    return a


@tw.kernel
def slices_of_rows(x: tw.Array, steps: int) -> tw.Array:
    a = x * 1.0
    for _ in range(steps):
        for r in range(x.shape[0]):
            a[r, 1:] = a[r, :-1] * 2
        a[1:-1, 1:-1] = (a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]) / 4
    return a


@tw.kernel
def slices_in_a_grid(x: tw.Array) -> tw.Array:
    a = x * 1.0
    for r in tw.grid(x.shape[0]):
        a[r, 1:] = a[r, :-1] * 2
    return a


@pytest.mark.parametrize("device", DEVICES)
def test_slices_are_read_before_they_are_written(device: str) -> None:
    x = random(70, dtype=np.float64)
    wanted = x.copy()
    wanted[1:] = wanted[:-1] + 1
    for _ in range(3):
        wanted[1:-1] = (wanted[:-2] + wanted[1:-1] + wanted[2:]) / 3
        wanted[2:-2] += wanted[4:]
        wanted[:3] = wanted[2:5]
    np.testing.assert_allclose(run(slices, x, 3, device=device), wanted, rtol=1e-12)
    y = random(7, 40, dtype=np.float64)
    wanted = y.copy()
    for _ in range(2):
        wanted[:, 1:] = wanted[:, :-1] * 2
        wanted[1:-1, 1:-1] = (wanted[:-2, 1:-1] + wanted[2:, 1:-1] + wanted[1:-1, :-2] + wanted[1:-1, 2:]) / 4
    np.testing.assert_allclose(slices_of_rows(y, 2, device=device), wanted, rtol=1e-12)


@tw.kernel
def swapped_parts(x: tw.Array, steps: int) -> tuple[tw.Array, tw.Array, float]:
    u = x * 1.0
    v = x * 2.0
    largest = 0.0
    for _ in range(steps):
        u[1:-1, 2:] = (u[:-2, 2:] + u[2:, 2:] + v[1:-1, :-2]) / 4
        v[:, 1:-1] = (v[:, :-2] + u[:, 2:]) / 3
        largest = max(largest, tw.max(u))
    return u, v, largest


@tw.kernel
def moving_edge(x: tw.Array, steps: int) -> tw.Array:
    u = x * 1.0
    for t in range(steps):
        u[1:-1] = (u[:-2] + u[2:]) / 2
        u[0] = t
    return u


@tw.kernel
def moving_part(x: tw.Array, steps: int) -> tw.Array:
    u = x * 1.0
    for t in range(steps):
        u[t : t + 4] = u[t + 1 : t + 5] + u[t + 2 : t + 6]
    return u


@tw.kernel
def part_in_place(u: tw.InOut, steps: int) -> None:
    for _ in range(steps):
        u[1:-1] = (u[:-2] + u[2:]) / 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_parts_that_change_places(device: str, steps: int) -> None:
    x = random(5, 39, dtype=np.float64)
    u, v, largest = x.copy(), 2 * x, 0.0
    for _ in range(steps):
        u[1:-1, 2:] = (u[:-2, 2:] + u[2:, 2:] + v[1:-1, :-2]) / 4
        v[:, 1:-1] = (v[:, :-2] + u[:, 2:]) / 3
        largest = max(largest, u.max())
    for found, wanted in zip(swapped_parts(x, steps, device=device), (u, v, largest), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    line = random(40, dtype=np.float64)
    edge, part, inside = line.copy(), line.copy(), line.copy()
    for t in range(steps):
        edge[1:-1] = (edge[:-2] + edge[2:]) / 2
        edge[0] = t
        part[t : t + 4] = part[t + 1 : t + 5] + part[t + 2 : t + 6]
        inside[1:-1] = (inside[:-2] + inside[2:]) / 2
    np.testing.assert_allclose(moving_edge(line, steps, device=device), edge, rtol=1e-12)
    np.testing.assert_allclose(moving_part(line, steps, device=device), part, rtol=1e-12)
    if device != "cuda":
        part_in_place(line, steps, device=device)
        np.testing.assert_allclose(line, inside, rtol=1e-12)


def test_which_parts_change_places() -> None:
    """Those that are the same in every step, of arrays that nothing else changes and that the kernel makes."""
    assert "turn 1 of 2" in show(swapped_parts.stages(random(8, 8), 3).typed)
    for kernel in (moving_edge, moving_part, part_in_place):
        assert "turn" not in show(kernel.stages(random(40), 3).typed)


def test_slices_that_meet_in_a_grid_are_refused() -> None:
    with pytest.raises(tw.TilewrightError, match="reads elements of 'a' while others are written"):
        slices_in_a_grid(random(4, 4))


# -- other orders -------------------------------------------------------------------------------------------------------


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, depth = a.shape
    n = b.shape[1]
    out = tw.zeros((m, n), a.dtype)
    for k in range(depth):
        for i, j in tw.grid(m, n):
            out[i, j] += a[i, k] * b[k, j]
    return out


@tw.kernel
def columns(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.zeros_like(x)
    for i in range(1, n):
        for j in range(m):
            out[i, j] = out[i - 1, j] * 0.5 + x[i, j]
    return out


@pytest.mark.parametrize("device", DEVICES)
def test_steps_that_never_meet_run_inside(device: str) -> None:
    a, b = random(33, 40), random(40, 65)
    np.testing.assert_allclose(run(product, a, b, device=device), a @ b, rtol=1e-5)
    x = random(9, 70, dtype=np.float64)
    wanted = np.zeros_like(x)
    for i in range(1, 9):
        wanted[i] = wanted[i - 1] * 0.5 + x[i]
    np.testing.assert_allclose(run(columns, x, device=device), wanted, rtol=1e-12)


@tw.kernel
def nearest_means(x: tw.Array, start: tw.Array, steps: int) -> tuple[tw.Array, tw.Array]:
    n = len(x)
    k = len(start)
    c = start * 1.0
    sums = tw.zeros((k,), x.dtype)
    counts = tw.zeros((k,), x.dtype)
    for _ in range(steps):
        for j in tw.grid(k):
            sums[j] = 0.0
            counts[j] = 0.0
        for i in range(n):
            best = 0
            for j in range(1, k):
                if abs(x[i] - c[j]) < abs(x[i] - c[best]):
                    best = j
            sums[best] += x[i]
            counts[best] += 1
        for j in tw.grid(k):
            if counts[j] > 0:
                c[j] = sums[j] / counts[j]
    return c, counts


@pytest.mark.parametrize("device", DEVICES)
def test_scatters_inside_a_step(device: str) -> None:
    x, start = random(500, dtype=np.float64), np.array([0.1, 0.4, 0.9])
    means, counts = start, np.zeros(3)
    for _ in range(4):
        labels = abs(x[:, None] - means).argmin(1)
        counts = np.bincount(labels, minlength=3)
        means = np.bincount(labels, x, 3) / counts
    found = run(nearest_means, x, start, 4, device=device)
    np.testing.assert_allclose(found[0], means, rtol=1e-12)  # type: ignore[index]
    np.testing.assert_array_equal(found[1], counts)  # type: ignore[index]


ZYNML = """
let result = compute(x, steps) {
    var u = zeros((rows, cols), f32)
    var v = zeros((rows, cols), f32)
    for i in 0..rows, j in 0..cols:
        u[i, j] = x[i, j]
        v[i, j] = x[i, j]
    for t in 0..steps:
        for i in 1..rows - 1, j in 1..cols - 1:
            v[i, j] = u[i, j] + 0.1 * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1] - 4.0 * u[i, j])
        for i in 0..rows, j in 0..cols:
            u[i, j] = v[i, j]
    out = u
}
"""


def test_zynml_means_the_same() -> None:
    x = random(17, 40)
    result = tw.load(ZYNML).run(x=x, steps=5)["result"]
    np.testing.assert_allclose(np.asarray(result), heat_numpy(x, 5), rtol=1e-5)


ZYNML_SWAP = """
let result = compute(x, steps) {
    var u = zeros((rows, cols), f32)
    var v = zeros((rows, cols), f32)
    for i in 0..rows, j in 0..cols:
        u[i, j] = x[i, j]
        v[i, j] = x[i, j]
    for t in 0..steps:
        for i in 1..rows - 1, j in 1..cols - 1:
            v[i, j] = (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1]) / 4
        (u, v) = (v, u)
    out = u
}
"""


@pytest.mark.parametrize("steps", [0, 1, 6, 7])
def test_zynml_swaps(steps: int) -> None:
    x = random(9, 14)
    now, after = x.copy(), x.copy()
    for _ in range(steps):
        after[1:-1, 1:-1] = (now[:-2, 1:-1] + now[2:, 1:-1] + now[1:-1, :-2] + now[1:-1, 2:]) / 4
        now, after = after, now
    np.testing.assert_allclose(np.asarray(tw.load(ZYNML_SWAP).run(x=x, steps=steps)["result"]), now, rtol=1e-6)


def test_an_index_outside_stops_all_steps() -> None:
    @tw.kernel
    def gathers(x: tw.Array, places: tw.Array, steps: int) -> tw.Array:
        u = x * 1.0
        v = tw.empty_like(x)
        for _ in range(steps):
            for i in tw.grid(len(x)):
                v[i] = u[places[i]]
            u, v = v, u
        return u

    places = np.arange(100)[::-1].copy()
    np.testing.assert_array_equal(gathers(np.arange(100.0), places, 3), np.arange(100.0)[::-1])
    places[50] = 1000
    with pytest.raises(tw.TilewrightError, match=r"TW050.*index 1000"):
        gathers(np.arange(100.0), places, 1 << 40)


# -- graphs ------------------------------------------------------------------------------------------------------------


@tw.kernel
def mixed(u: tw.Array, steps: int) -> tw.Array:
    n, m = u.shape
    a = tw.empty((n, m), u.dtype)
    b = tw.empty((n, m), u.dtype)
    for i, j in tw.grid(n, m):
        a[i, j] = u[i, j]
        b[i, j] = u[i, j]
    for _ in range(steps):
        for i, j in tw.grid(n, m):
            b[i, j] = a[i, j] * 0.5 + a[j, i]
        a, b = b, a
    return a


def test_a_graph_captures_all_steps() -> None:
    start = np.random.default_rng(5).random((24, 24), np.float32)
    with installed() as driver:
        given = tw.to_device(start, "cuda")
        with tw.capture("cuda") as graph:
            found = mixed(given, 5)
        for factor in (1, 3):
            given[...] = tw.to_device(start * np.float32(factor), "cuda")
            graph.replay()
            wanted = start * np.float32(factor)
            for _ in range(5):
                wanted = wanted * np.float32(0.5) + wanted.T
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)
    assert driver.violations == []


@tw.kernel
def above(y: tw.InOut, n: int, k: int):
    for t in range(n):
        for i in tw.grid(range(t + 1, n - k)):
            y[i] = y[i] * 2.0 + y[t]


@tw.kernel
def lower_part(a: tw.InOut, n: int):
    for t in range(n):
        for i, j in tw.grid(range(t + 1, n), range(t, n)):
            a[i, j] = a[i, j] - a[t, j] * 0.5


@pytest.mark.parametrize("device", ["cpu", "emulator:tile", "emulator"])
def test_grids_that_shrink_with_the_step_and_end_at_a_number(device: str) -> None:
    for n, k in ((5, 0), (5, 2), (5, -3), (0, 0), (-2, 1), (7, 9), (1, 0)):
        y = np.random.default_rng(1).integers(1, 4, 9).astype(np.float64)
        expected = y.copy()
        for t in range(n):
            expected[t + 1 : max(n - k, t + 1)] = expected[t + 1 : max(n - k, t + 1)] * 2 + expected[t]
        above(y, n, k, device=device)
        np.testing.assert_array_equal(y, expected)
    for n in (5, 0, -3, 1):
        a = np.random.default_rng(2).integers(1, 4, (6, 6)).astype(np.float64)
        expected = a.copy()
        for t in range(n):
            expected[t + 1 : n, t:n] -= expected[t, t:n] * 0.5
        lower_part(a, n, device=device)
        np.testing.assert_array_equal(a, expected)
