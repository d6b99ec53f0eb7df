"""Loop nests of scientific codes as people write them: results are those of the plain loops, and what can run in parallel does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.artifact import SMALL_EXTENT
from tilewright.base.target import host_cpu
from tilewright.ir.text import print_kernel
from tilewright.passes.choose.small_sizes import small_sums
from tilewright.passes.routes import lower, specialise
from tilewright.passes.runner import Trace
from tilewright.passes.schedules.loops import Schedule
from tilewright.tree.typed import TypedLoop, TypedWhile

pytestmark = pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
DEVICES = ("cpu", "emulator:loop", "emulator:thread")


def kinds(kernel: Any, *arguments: object) -> list[str]:
    """What becomes of the loops at the top of a kernel."""
    return [s.kind for s in kernel.stages(*arguments, target="cpu").typed.body if isinstance(s, TypedLoop | TypedWhile)]


# -- statements that need each other in one iteration alone ----------------------------------------------------------


@tw.kernel
def atax(a: tw.Array, x: tw.Array) -> tw.Array:
    m, n = a.shape
    y = tw.zeros((n,), a.dtype)
    product = tw.empty((m,), a.dtype)
    for i in range(m):
        product[i] = 0.0
        for j in range(n):
            product[i] = product[i] + a[i, j] * x[j]
        for j in range(n):
            y[j] = y[j] + a[i, j] * product[i]
    return y


@tw.kernel
def atax_with_a_number(a: tw.Array, x: tw.Array) -> tw.Array:
    m, n = a.shape
    y = tw.zeros((n,), a.dtype)
    for i in range(m):
        product = 0.0
        for j in range(n):
            product += a[i, j] * x[j]
        for j in range(n):
            y[j] += a[i, j] * product
    return y


@tw.kernel
def bicg(a: tw.Array, p: tw.Array, r: tw.Array) -> tuple[tw.Array, tw.Array]:
    n, m = a.shape
    s = tw.zeros((m,), a.dtype)
    q = tw.empty((n,), a.dtype)
    for i in range(n):
        q[i] = 0.0
        for j in range(m):
            s[j] += r[i] * a[i, j]
            q[i] += a[i, j] * p[j]
    return s, q


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 5), (19, 34)])
def test_sums_of_rows_and_columns_in_one_loop(m: int, n: int, device: str) -> None:
    rng = np.random.default_rng(m)
    a, x, r = rng.standard_normal((m, n)), rng.standard_normal(n), rng.standard_normal(m)
    for kernel in (atax, atax_with_a_number):
        np.testing.assert_allclose(np.asarray(kernel(a, x, device=device)), a.T @ (a @ x), rtol=1e-10, atol=1e-12)
        assert set(kinds(kernel, a, x)) == {"parallel"}
    s, q = bicg(a, x, r, device=device)
    np.testing.assert_allclose(np.asarray(s), r @ a, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(np.asarray(q), a @ x, rtol=1e-10, atol=1e-12)
    assert set(kinds(bicg, a, x, r)) == {"parallel"}


@tw.kernel
def smoothed_total(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    """The second statement reads what later iterations of the first one write: the loop stays one."""
    (n,) = x.shape
    u = x * 1.0
    t = tw.zeros((n,), x.dtype)
    for i in range(n - 1):
        u[i] = u[i] * 0.5
        t[i] = u[i] + u[i + 1]
    return u, t


@tw.kernel
def carried(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    """So does one whose first statement reads what the second one wrote an iteration before."""
    (n,) = x.shape
    u = x * 1.0
    t = tw.zeros((n,), x.dtype)
    for i in range(1, n):
        t[i] = u[i - 1] * 2.0
        u[i] = u[i] + t[i]
    return u, t


def test_statements_that_need_other_iterations_stay_together() -> None:
    x = np.random.default_rng(0).standard_normal(40)
    halves, sums = smoothed_total(x)
    np.testing.assert_allclose(np.asarray(sums)[:-1], x[:-1] * 0.5 + x[1:])
    np.testing.assert_allclose(np.asarray(halves)[:-1], x[:-1] * 0.5)
    u, t = x.copy(), np.zeros(40)
    for i in range(1, 40):
        t[i] = u[i - 1] * 2
        u[i] += t[i]
    found = carried(x)
    np.testing.assert_allclose(np.asarray(found[0]), u, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(found[1]), t, rtol=1e-12)


@tw.kernel
def of_columns(a: tw.Array, x: tw.Array) -> tw.Array:
    n, m = a.shape
    y = x * 1.0
    for i in range(n):
        for j in range(m):
            y[j] = y[j] - a[i, j] * 2.0 + a[i, j] * a[i, j]
    return y


@pytest.mark.parametrize("device", DEVICES)
def test_an_element_with_itself_is_a_sum(device: str) -> None:
    a, x = np.random.default_rng(1).standard_normal((9, 21)), np.random.default_rng(2).standard_normal(21)
    np.testing.assert_allclose(np.asarray(of_columns(a, x, device=device)), x - 2 * a.sum(0) + (a * a).sum(0), rtol=1e-10)
    assert kinds(of_columns, a, x) == ["parallel"]


# -- arrays that are not square --------------------------------------------------------------------------------------


@tw.kernel
def diagonal(a: tw.Array) -> tw.Array:
    _rows, n = a.shape
    out = tw.empty((n,), a.dtype)
    for k in range(n):
        out[k] = a[k, k]
    return out


@tw.kernel
def jordan(a: tw.Array) -> tw.Array:
    n, m = a.shape
    u = a * 1.0
    for k in range(n):
        pivot = u[k, k]
        for j in range(m):
            u[k, j] = u[k, j] / pivot
        for i in range(n):
            if i != k:
                factor = u[i, k]
                for j in range(m):
                    u[i, j] -= factor * u[k, j]
    return u


def test_a_diagonal_does_not_say_that_an_array_is_square() -> None:
    a = np.random.default_rng(3).standard_normal((7, 4))
    np.testing.assert_array_equal(np.asarray(diagonal(a)), np.diag(a))
    with pytest.raises(tw.UserError, match="reaches 6, but axis 0 has extent 4"):
        diagonal(a.T.copy())
    wide = np.random.default_rng(4).standard_normal((5, 8)) + 9 * np.eye(5, 8)
    np.testing.assert_allclose(np.asarray(jordan(wide))[:, 5:], np.linalg.solve(wide[:, :5], wide[:, 5:]), rtol=1e-9)


# -- several sums of the same terms -----------------------------------------------------------------------------------


@tw.kernel
def forces(p: tw.Array, mass: tw.Array) -> tw.Array:
    n = p.shape[0]
    out = tw.empty((n, 3), p.dtype)
    for i in tw.grid(n):
        x = 0.0
        y = 0.0
        z = 0.0
        for j in range(n):
            dx = p[j, 0] - p[i, 0]
            dy = p[j, 1] - p[i, 1]
            dz = p[j, 2] - p[i, 2]
            square = dx * dx + dy * dy + dz * dz + 0.01
            inverse = mass[j] / (square * tw.sqrt(square))
            x += dx * inverse
            y += dy * inverse
            z += dz * inverse
        out[i, 0] = x
        out[i, 1] = y
        out[i, 2] = z
    return out


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_sums_side_by_side_share_a_loop(dtype: str) -> None:
    rng = np.random.default_rng(5)
    p, mass = rng.standard_normal((45, 3)), rng.random(45)
    away = p[None] - p[:, None]
    square = (away**2).sum(-1) + 0.01
    wanted = (away * (mass[None] / square**1.5)[..., None]).sum(1)
    kind = np.float32 if dtype == "f32" else np.float64
    np.testing.assert_allclose(np.asarray(forces(p.astype(kind), mass.astype(kind))), wanted, rtol=1e-4 if dtype == "f32" else 1e-10, atol=1e-5 if dtype == "f32" else 1e-12)
    text = "".join(print_kernel(call.kernel) for call in forces.stages(p.astype(kind), mass.astype(kind), target="cpu").stages.tile.calls)
    assert 1 <= text.count("= sqrt ") <= 3, "whole tiles, whole registers and what is left: each once for all three sums"


# -- products written in other orders ---------------------------------------------------------------------------------


@tw.kernel
def covariance(data: tw.Array) -> tw.Array:
    n, m = data.shape
    mean = tw.zeros((m,), data.dtype)
    centred = tw.empty((n, m), data.dtype)
    out = tw.empty((m, m), data.dtype)
    for j in range(m):
        for i in range(n):
            mean[j] += data[i, j]
        mean[j] = mean[j] / n
    for i in range(n):
        for j in range(m):
            centred[i, j] = data[i, j] - mean[j]
    for i in range(m):
        for j in range(i, m):
            total = 0.0
            for k in range(n):
                total += centred[k, i] * centred[k, j]
            total = total / (n - 1)
            out[i, j] = total
            out[j, i] = total
    return out


@tw.kernel
def below(x: tw.Array) -> tw.Array:
    """A diagonal of its own, and columns that end before it."""
    n, m = x.shape
    out = tw.empty((n, n), x.dtype)
    for i in range(n):
        out[i, i] = 1.0
        for j in range(i):
            total = 0.0
            for k in range(m):
                total += x[i, k] * x[j, k]
            out[i, j] = total
            out[j, i] = -total
    return out


@tw.kernel
def rank_update(a: tw.Array, b: tw.Array, c: tw.Array) -> tw.Array:
    n, m = a.shape
    out = c * 1.0
    for i in range(n):
        for j in range(i + 1):
            out[i, j] *= 0.5
        for k in range(m):
            for j in range(i + 1):
                out[i, j] += a[j, k] * 1.5 * b[i, k] + b[j, k] * 1.5 * a[i, k]
    return out


@tw.kernel
def scaled_product(a: tw.Array, b: tw.Array, c: tw.Array) -> tw.Array:
    n, m = a.shape
    columns = b.shape[1]
    out = c * 1.0
    for i in range(n):
        for j in range(columns):
            out[i, j] *= 0.5
        for k in range(m):
            for j in range(columns):
                out[i, j] -= 1.5 * a[i, k] * b[k, j]
    return out


@tw.kernel
def stored_twice(a: tw.Array, b: tw.Array) -> tw.Array:
    n, m = a.shape
    columns = b.shape[1]
    out = tw.empty((n, columns), a.dtype)
    for i in range(n):
        for j in range(columns):
            out[i, j] = 0.0
            for k in range(m):
                out[i, j] += a[i, k] * b[k, j]
    return out


def products(kernel: Any, *arguments: object) -> int:
    """How many of a kernel's launches are products in panels."""
    calls = kernel.stages(*arguments, target="cpu").stages.thread.calls
    return sum("family=cpu" in str(call.kernel.attrs.get("schedule")) for call in calls)


@pytest.mark.parametrize("n", [1, 5, 40])
def test_symmetric_results_are_products(n: int) -> None:
    rng = np.random.default_rng(n)
    data = rng.standard_normal((n + 4, n))
    np.testing.assert_allclose(np.asarray(covariance(data)), np.atleast_2d(np.cov(data.T)), rtol=1e-9, atol=1e-12)
    x = rng.standard_normal((n, n + 9))
    wanted = np.tril(x @ x.T, -1)
    np.testing.assert_allclose(np.asarray(below(x)), wanted - wanted.T + np.eye(n), rtol=1e-9, atol=1e-12)
    if n == 40:
        assert products(covariance, data) == products(below, x) == 1


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_products_whose_sum_is_not_the_innermost_loop(dtype: str) -> None:
    rng, kind = np.random.default_rng(7), np.float32 if dtype == "f32" else np.float64
    a, b, c = rng.standard_normal((68, 50)), rng.standard_normal((68, 50)), rng.standard_normal((68, 68))
    update = 1.5 * (a @ b.T + b @ a.T)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == "f32" else {"rtol": 1e-9, "atol": 1e-10}
    arrays = [x.astype(kind) for x in (a, b, c)]
    np.testing.assert_allclose(np.asarray(rank_update(*arrays)), np.triu(c, 1) + np.tril(0.5 * c + update), **tolerance)
    assert products(rank_update, *arrays) == 2
    arrays[1] = b.T.astype(kind)
    np.testing.assert_allclose(np.asarray(scaled_product(*arrays)), 0.5 * c - 1.5 * a @ b.T, **tolerance)
    np.testing.assert_allclose(np.asarray(stored_twice(*arrays[:2])), a @ b.T, **tolerance)
    assert products(scaled_product, *arrays) == products(stored_twice, *arrays[:2]) == 1


# -- short sums in long loops -------------------------------------------------------------------------------------------


@tw.kernel
def nearest(x: tw.Array, centres: tw.Array) -> tw.Array:
    n, d = x.shape
    label = tw.empty((n,), tw.i32)
    for i in tw.grid(n):
        best = 1e30
        at = 0
        for j in range(centres.shape[0]):
            total = 0.0
            for q in range(d):
                away = x[i, q] - centres[j, q]
                total += away * away
            if total < best:
                best = total
                at = j
        label[i] = at
    return label


@tw.kernel
def shortest(x: tw.Array, y: tw.Array) -> tw.Array:
    n, d = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        best = 1e30
        for j in range(y.shape[0]):
            total = 0.0
            for q in range(d):
                away = x[i, q] - y[j, q]
                total += away * away
            best = min(best, total)
        out[i] = best
    return out


@tw.kernel
def energies(p: tw.Array) -> tw.Array:
    n, d = p.shape
    out = tw.zeros((n,), p.dtype)
    for i in range(n):
        for j in range(n):
            if j != i:
                square = 0.0
                for q in range(d):
                    away = p[i, q] - p[j, q]
                    square += away * away
                out[i] += 1.0 / square
    return out


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("d", [1, 3, 5, 16])
def test_points_that_run_through_short_sums(d: int, dtype: str) -> None:
    rng, kind = np.random.default_rng(d), np.float32 if dtype == "f32" else np.float64
    x, y = rng.standard_normal((1201, d)).astype(kind), rng.standard_normal((37, d)).astype(kind)
    squares = ((x[:, None].astype(np.float64) - y[None]) ** 2).sum(-1)
    np.testing.assert_allclose(np.asarray(shortest(x, y)), squares.min(1), rtol=1e-4 if dtype == "f32" else 1e-12)
    found = np.asarray(nearest(x, y))
    np.testing.assert_allclose(squares[np.arange(len(x)), found], squares.min(1), rtol=1e-4)
    away = ((x[:, None].astype(np.float64) - x[None]) ** 2).sum(-1)
    np.fill_diagonal(away, np.inf)
    np.testing.assert_allclose(np.asarray(energies(x)), (1 / away).sum(1), rtol=2e-2 if dtype == "f32" else 1e-6)


def test_vectors_lie_along_points_with_short_sums() -> None:
    x, y = np.zeros((1201, 5)), np.zeros((37, 5))
    for kernel in (nearest, shortest):
        program = kernel.stages(x, y, target="cpu").program
        assert small_sums(program.calls) == ((frozenset({"d"}), frozenset({"n"}), SMALL_EXTENT),)
        first, *_ = lower(specialise(program, {"d": 5}, Trace()), host_cpu()).schedules
        assert isinstance(first, Schedule) and not first.vector_on_reduction and first.vector_index >= 0


# -- arrays of a step ----------------------------------------------------------------------------------------------------


@tw.kernel
def power_iteration(a: tw.Array, start: tw.Array, steps: int) -> tw.Array:
    n = a.shape[0]
    x = start * 1.0
    for _ in range(steps):
        y = a @ x
        square = 0.0
        for i in range(n):
            square += y[i] * y[i]
        length = tw.sqrt(square)
        for i in range(n):
            x[i] = y[i] / length
    return x


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_of_a_step_outlives_its_factors(device: str) -> None:
    rng = np.random.default_rng(8)
    a, x = rng.random((9, 9)), rng.random(9)
    wanted = x
    for _ in range(4):
        wanted = a @ wanted
        wanted = wanted / np.linalg.norm(wanted)
    np.testing.assert_allclose(np.asarray(power_iteration(a, x, 4, device=device)), wanted, rtol=1e-10)


# -- sums over bodies that run as long as they like ---------------------------------------------------------------------


@tw.kernel
def turns(x: tw.Array) -> int:
    (n,) = x.shape
    total = 0
    for i in range(n):
        v = x[i]
        while v != 1:
            if v % 2 == 0:
                v = v // 2
            else:
                v = 3 * v + 1
            total += 1
    return total


@tw.kernel
def halvings(x: tw.Array) -> tuple[float, float]:
    (n,) = x.shape
    total = 0.0
    largest = 0.0
    for i in range(n):
        v = x[i]
        count = 0.0
        while v > 0.01:
            v = v / 2
            count += 1.0
        total += count
        largest = max(largest, count)
    return total, largest


@pytest.mark.parametrize("device", [*DEVICES, "emulator:tile"])
@pytest.mark.parametrize("n", [1, 77])
def test_sums_of_while_loops(n: int, device: str) -> None:
    def steps(v: int) -> int:
        count = 0
        while v != 1:
            v, count = v // 2 if v % 2 == 0 else 3 * v + 1, count + 1
        return count

    x = np.random.default_rng(n).integers(1, 60, n)
    assert int(turns(x, device=device)) == sum(steps(int(v)) for v in x)
    y = np.random.default_rng(n).random(n) + 0.02
    counts = np.ceil(np.log2(y / 0.01))
    total, largest = halvings(y, device=device)
    assert (float(total), float(largest)) == (counts.sum(), counts.max())
    assert kinds(turns, x) == ["reduce"]


# -- sums into several elements of one array ------------------------------------------------------------------------------


@tw.kernel
def pulls(places: tw.Array, mass: tw.Array) -> tw.Array:
    n = places.shape[0]
    out = tw.zeros((n, 3), places.dtype)
    for i in range(n):
        for j in range(n):
            dx = places[j, 0] - places[i, 0]
            dy = places[j, 1] - places[i, 1]
            squared = dx * dx + dy * dy + 0.1
            out[i, 0] += dx * mass[j] / squared
            out[i, 2] += dy * mass[j] / squared
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "axes"), [(1, 2), (37, 2), (70, 3)])
def test_sums_into_different_elements_of_one_array(n: int, axes: int, device: str) -> None:
    rng = np.random.default_rng(n)
    places, mass = rng.random((n, axes)), rng.random(n)
    away = places[None, :, :2] - places[:, None, :2]
    wanted = np.zeros((n, 3))
    wanted[:, ::2] = (away * (mass[:, None] / ((away * away).sum(2) + 0.1)[:, :, None])).sum(1)
    np.testing.assert_allclose(np.asarray(pulls(places, mass, device=device)), wanted, rtol=1e-10, atol=1e-10)
    _, loop = pulls.stages(places, mass, target="cpu").typed.body
    assert isinstance(loop, TypedLoop) and loop.kind == "parallel" and [s.kind for s in loop.body if isinstance(s, TypedLoop)] == ["reduce"]


def test_points_that_meet_records_are_lanes() -> None:
    places, mass = np.zeros((100, 2)), np.zeros(100)
    pulls(places, mass)
    assert pulls.last is not None
    *_, schedule = pulls.last.schedule.splitlines()
    assert "vector" in schedule and "reduce_tile" not in schedule


# -- arrays that every iteration writes first ---------------------------------------------------------------------------


@tw.kernel
def rows_times(a: tw.Array, c: tw.Array) -> tw.Array:
    blocks, rows, n = a.shape
    out = a * 1.0
    row = tw.zeros((n,), a.dtype)
    for b in range(blocks):
        for i in range(rows):
            for j in range(n):
                row[j] = 0.0
                for k in range(n):
                    row[j] += out[b, i, k] * c[k, j]
            for j in range(n):
                out[b, i, j] = row[j]
    return out


@tw.kernel
def turned_rows(x: tw.Array) -> tw.Array:
    m, n = x.shape
    out = tw.empty_like(x)
    row = tw.empty((n,), x.dtype)
    for i in range(m):
        for j in range(n):
            row[j] = x[i, j] + 1.0
        for j in range(n):
            out[i, j] = row[n - 1 - j] * row[0]
    return out


@tw.kernel
def rows_so_far(x: tw.Array) -> tw.Array:
    m, n = x.shape
    out = tw.empty_like(x)
    row = tw.zeros((n,), x.dtype)
    for i in range(m):
        for j in range(1, n):
            row[j] = row[j - 1] + x[i, j]
        for j in range(n):
            out[i, j] = row[j]
    return out


@tw.kernel
def last_row(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    m, n = x.shape
    out = tw.empty_like(x)
    row = tw.zeros((n,), x.dtype)
    for i in range(m):
        for j in range(n):
            row[j] = 2.0 * x[i, j]
        for j in range(n):
            out[i, j] = row[n - 1 - j]
    return out, row + 1.0


@pytest.mark.parametrize("device", DEVICES)
def test_iterations_have_temporary_rows_of_their_own(device: str) -> None:
    rng = np.random.default_rng(3)
    a, c, x = rng.random((3, 5, 7)), rng.random((7, 7)), rng.random((5, 9))
    np.testing.assert_allclose(np.asarray(rows_times(a, c, device=device)), a @ c, rtol=1e-12)
    assert set(kinds(rows_times, a, c)) == {"parallel"}
    np.testing.assert_allclose(np.asarray(turned_rows(x, device=device)), (x[:, ::-1] + 1.0) * (x[:, :1] + 1.0), rtol=1e-12)
    assert set(kinds(turned_rows, x)) == {"parallel"}


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_live_on_are_one_array(device: str) -> None:
    x = np.random.default_rng(4).random((4, 6))
    sums = np.cumsum(np.where(np.arange(6) > 0, x, 0.0), axis=1)
    np.testing.assert_allclose(np.asarray(rows_so_far(x, device=device)), sums, rtol=1e-12)
    out, row = last_row(x, device=device)
    np.testing.assert_allclose(np.asarray(out), 2.0 * x[:, ::-1], rtol=1e-12)
    np.testing.assert_allclose(np.asarray(row), 2.0 * x[-1] + 1.0, rtol=1e-12)


# -- what stays in order --------------------------------------------------------------------------------------------


@tw.kernel
def number_of_a_group_that_is_in_order(u: tw.InOut, s: tw.Array, y: tw.InOut) -> None:
    n, m = y.shape
    for i in range(m):
        first = u[0]
        for j in range(n):
            u[j] += s[i]
        y[0, i] += first


@pytest.mark.parametrize("device", DEVICES)
def test_a_kept_number_stays_beside_what_makes_it(device: str) -> None:
    rng = np.random.default_rng(5)
    u, s, y = rng.random(4), rng.random(7), rng.random((4, 7))
    before = np.concatenate([[0], np.cumsum(s)])
    rows, firsts = u + before[-1], y[0] + u[0] + before[:-1]
    number_of_a_group_that_is_in_order(u, s, y, device=device)
    np.testing.assert_allclose(u, rows, rtol=1e-12)
    np.testing.assert_allclose(y[0], firsts, rtol=1e-12)


@tw.kernel
def pivot_under_a_condition(a: tw.Array, u: tw.Array) -> tw.Array:
    n, m = a.shape
    s = tw.full(m, 3, a.dtype)
    for i in range(1, n):
        for j in range(m):
            if i != 0:
                for k in range(m):
                    t = a[i, k]
                    s[k] = max(s[k], s[j] - t + u[i])
    return s


def test_variables_of_the_pivot_are_set_where_they_are_read() -> None:
    rng = np.random.default_rng(6)
    a, u = rng.random((5, 70)), rng.random(5)
    s = np.full(70, 3.0)
    for i in range(1, 5):
        for j in range(70):
            for k in range(70):
                s[k] = max(s[k], s[j] - a[i, k] + u[i])
    np.testing.assert_allclose(np.asarray(pivot_under_a_condition(a, u)), s, rtol=1e-12)


@tw.kernel
def triangle_of_steps(n: int, b: tw.Array, u: tw.InOut) -> None:
    for i in range(n):
        for j in range(i + 1):
            for k in range(j):
                if i != k:
                    u[k] = b[k, 0] + i


def test_steps_that_end_at_the_step_around_say_how_far_loads_reach() -> None:
    b, u = np.random.default_rng(7).random((11, 3)), np.zeros(12)
    triangle_of_steps(12, b, u)
    np.testing.assert_allclose(u, [*(b[:, 0] + 11), 0], rtol=1e-12)
    with pytest.raises(tw.UserError, match=r"'b' .* extent"):
        triangle_of_steps(12, b[:10], u)
