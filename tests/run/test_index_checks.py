"""Indices that nothing proves are checked as kernels run: what is found, what is said, and what stays as it was."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import parse_target
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import is_watched, walk

NUMBERS = np.arange(100, dtype=np.float32)
ROOM = np.arange(200, dtype=np.float32)
"""Of whose first half a read at 100 is outside, and harmless."""


@tw.kernel
def gather(x: tw.Array, at: tw.Array):
    out = tw.empty((len(at),), x.dtype)
    for i in tw.grid(len(at)):
        out[i] = x[at[i]]
    return out


@tw.kernel
def rows(t: tw.Array, at: tw.Array):
    (n,) = at.shape
    _, cols = t.shape
    out = tw.empty((n, cols), t.dtype)
    for i, j in tw.grid(n, cols):
        out[i, j] = t[at[i], j]
    return out


@tw.kernel
def columns(t: tw.Array, at: tw.Array):
    n, _ = t.shape
    (m,) = at.shape
    out = tw.empty((n, m), t.dtype)
    for i, j in tw.grid(n, m):
        out[i, j] = t[i, at[j]]
    return out


@tw.kernel
def deep(t: tw.Array, at: tw.Array):
    out = tw.empty((len(at),), t.dtype)
    for i in tw.grid(len(at)):
        out[i] = t[0, at[i], 0, at[i]]
    return out


@tw.kernel
def sparse(values: tw.Array, at: tw.Array, starts: tw.Array, x: tw.Array):
    (m,) = starts.shape
    out = tw.empty((m - 1,), values.dtype)
    for i in tw.grid(m - 1):
        total = 0.0
        for k in range(starts[i], starts[i + 1]):
            total += values[k] * x[at[k]]
        out[i] = total
    return out


@tw.kernel
def scatter(y: tw.Array, at: tw.Array, v: tw.Array):
    out = tw.zeros((len(y),), y.dtype)
    for i in range(len(at)):
        out[at[i]] = v[i]
    return out


@tw.kernel
def count(y: tw.Array, at: tw.Array):
    out = tw.zeros((len(y),), y.dtype)
    for i in range(len(at)):
        out[at[i]] += 1
    return out


@tw.kernel
def guarded(x: tw.Array, at: tw.Array):
    out = tw.empty((len(at),), x.dtype)
    for i in tw.grid(len(at)):
        t = 0.0
        if at[i] >= 0:
            t = x[at[i]]
        out[i] = t
    return out


@tw.kernel
def walk_until(x: tw.Array, steps: int):
    out = tw.zeros((1,), x.dtype)
    k = 0
    t = 0.0
    while k < steps:
        t += x[k]
        k += 1
    out[0] = t
    return out


@tw.kernel
def shifted(x: tw.Array, by: int):
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i + by]
    return out


@tw.kernel
def first_sum(x: tw.Array, m: int):
    total = 0.0
    for i in range(m):
        total += x[i]
    return total


@tw.kernel
def first_written(x: tw.Array, m: int):
    out = tw.zeros((len(x),), x.dtype)
    for i in tw.grid(m):
        out[i] = x[0]
    return out


@tw.kernel
def largest_of(x: tw.Array, at: tw.Array):
    best = -1.0e30
    for i in range(len(at)):
        best = max(best, x[at[i]])
    return best


def at(*wrong: int, n: int = 70, dtype: object = np.int32) -> np.ndarray:
    """Indices, the last of which are these."""
    found = np.arange(n) % 50
    if wrong:
        found[-len(wrong) :] = wrong
    return found.astype(dtype)


TABLE = np.arange(5 * 20, dtype=np.float32).reshape(5, 20)
FOUR = np.zeros((2, 3, 2, 4), np.float32)
STARTS = np.array([0, 30, 30, 70])

WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: gather(NUMBERS, at(100)), "gather reads 'x' at index 100, but its extent there is 100"),
    (lambda: gather(NUMBERS, at(-1)), "gather reads 'x' at index -1, "),
    (lambda: gather(NUMBERS, at(-1, 5, dtype=np.int64)), "gather reads 'x' at index -1, "),
    (lambda: gather(NUMBERS, at(2**62, dtype=np.int64)), f"gather reads 'x' at index {2**62}, "),
    (lambda: gather(NUMBERS, at(200, dtype=np.uint8)), "gather reads 'x' at index 200, "),
    (lambda: gather(NUMBERS, at(-128, dtype=np.int8)), "gather reads 'x' at index -128, "),
    (lambda: gather(NUMBERS, at(100, n=1)), "at index 100, "),
    (lambda: gather(NUMBERS[:0], at()), "at index 0, but its extent there is 0"),
    (lambda: rows(TABLE, np.array([0, 5])), "rows reads 't' at index 5 (axis 0), but its extent there is 5"),
    (lambda: columns(TABLE, np.array([0, 20])), "columns reads 't' at index 20 (axis 1), but its extent there is 20"),
    (lambda: deep(FOUR, np.array([0, 3])), "deep reads 't' at index 3 (axis 1), but its extent there is 3"),
    (lambda: sparse(NUMBERS[:70], at(101), STARTS, NUMBERS), "sparse reads 'x' at index 101, "),
    (lambda: sparse(NUMBERS[:69], at(), STARTS, NUMBERS), "sparse reads 'values' at index 69, but its extent there is 69"),
    (lambda: sparse(NUMBERS[:70], at(n=69), STARTS, NUMBERS), "sparse reads 'at' at index 69, but its extent there is 69"),
    (lambda: sparse(NUMBERS[:70], at(), STARTS - 1, NUMBERS), "' at index -1, but its extent there is 70"),
    (lambda: sparse(NUMBERS[:70], at(), np.array([0, 2**63 - 1]), NUMBERS), f"' at index {2**63 - 2}, but its extent there is 70"),
    (lambda: sparse(NUMBERS[:70], at(-1, 3, dtype=np.int64), STARTS, NUMBERS), "sparse reads 'x' at index -1, "),
    (lambda: deep(FOUR, np.where(np.arange(40) == 37, 3, np.arange(40) % 3)), "(axis 1), but its extent there is 3"),
    (lambda: scatter(NUMBERS, at(100), NUMBERS[:70]), "scatter writes 'out' at index 100, but its extent there is 100"),
    (lambda: count(NUMBERS, at(-3)), "'out' at index -3, "),
    (lambda: guarded(NUMBERS, at(-5, 100)), "guarded reads 'x' at index 100, "),
    (lambda: walk_until(NUMBERS, 101), "walk_until reads 'x' at index 100, "),
    (lambda: shifted(NUMBERS, 1), "shifted reads 'x' at index 100, "),
    (lambda: shifted(NUMBERS, -1), "shifted reads 'x' at index -1, "),
    (lambda: shifted(NUMBERS, 2**63 - 1), "shifted reads 'x' at index "),
    (lambda: largest_of(NUMBERS, at(100)), "largest_of reads 'x' at index 100, "),
]


@pytest.mark.parametrize(("call", "text"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_an_index_outside_is_found_and_named(call: Callable[[], object], text: str) -> None:
    for _ in range(2):  # the general path, then the entry stub
        with pytest.raises(tw.UserError, match=re.escape(text)) as caught:
            call()
        assert caught.value.code == "TW050"
        assert re.search(r"\(at .*test_index_checks\.py:\d+:\d+\)", str(caught.value))


def test_what_is_inside_is_as_before() -> None:
    wanted = NUMBERS[at()]
    assert np.array_equal(gather(NUMBERS, at()), wanted)
    assert np.array_equal(gather(NUMBERS, at(dtype=np.int64)), wanted)
    assert np.array_equal(gather(NUMBERS, at(dtype=np.uint8)), wanted)
    assert np.array_equal(guarded(NUMBERS, at(-5)), np.append(wanted[:-1], 0))
    assert np.array_equal(rows(TABLE, np.array([4, 0])), TABLE[[4, 0]])
    assert shifted(NUMBERS, 0)[99] == 99 and walk_until(NUMBERS, 100)[0] == NUMBERS.sum()
    assert first_sum(NUMBERS, 0) == 0 and first_sum(NUMBERS[:0], 0) == 0
    assert gather(NUMBERS[:0], at()[:0]).shape == (0,)
    x = NUMBERS[:70]
    wanted = [np.dot(x[a:b], NUMBERS[at()[a:b]]) for a, b in ((0, 30), (30, 30), (30, 70))]
    assert np.allclose(sparse(x, at(), STARTS, NUMBERS), wanted)


def test_an_error_writes_nothing_outside_and_the_next_call_is_fine() -> None:
    room = np.full(64, 7, np.float32)
    with pytest.raises(tw.UserError, match="first_written"):
        first_written(NUMBERS[:5], 12, out=room[:5])
    assert (room[5:] == 7).all()
    with pytest.raises(tw.UserError, match="scatter"):
        scatter(NUMBERS[:5], np.array([1, 5]), NUMBERS[:2], out=room[:5])
    assert (room[5:] == 7).all()
    assert scatter(NUMBERS[:5], np.array([1, 4]), NUMBERS[1:3], out=room[:5]).tolist() == [0, 1, 0, 0, 2]


def test_graphs_check_every_replay() -> None:
    places = at()
    out = np.empty(70, np.float32)
    with tw.capture(device="cpu") as graph:
        gather(NUMBERS, places, out=out)
    graph.replay()
    assert np.array_equal(out, NUMBERS[places])
    places[3] = 100
    for _ in range(2):
        with pytest.raises(tw.UserError, match="gather reads 'x' at index 100"):
            graph.replay()
    places[3] = 3
    graph.replay()


def test_numbers_that_loops_end_at_are_checked_at_the_call() -> None:
    for call in (lambda: first_sum(NUMBERS, 101), lambda: first_written(NUMBERS, 101), lambda: first_written(NUMBERS[:4], 100_000)):
        with pytest.raises(tw.UserError, match=r"index i of '(x|out)' reaches (100|99999), but axis 0 has extent (100|4)") as caught:
            call()
        assert caught.value.code == "TW013"


def test_unchecked_kernels_have_no_tests() -> None:
    plain = tw.kernel(unchecked=True)(gather.python)
    assert not plain.compile(NUMBERS, at()).sites and gather.compile(NUMBERS, at()).sites
    assert not any(op.opcode == "report" for call in plain.stages(NUMBERS, at()).stages.thread.calls for op in walk(call.kernel.body))
    assert plain(ROOM[:100], at(100))[-1] == 100
    with pytest.raises(tw.UserError, match="both unchecked=True and check=True"):
        tw.kernel(unchecked=True, check=True)(gather.python)
    with pytest.raises(tw.UserError, match="unchecked is 'no'"):
        tw.kernel(unchecked="no")(gather.python)  # type: ignore[call-overload]


PROVEN = """
def f(x: tw.Array, y: tw.Array):
    (n,) = x.shape
    out = tw.zeros((n,), x.dtype)
    for i in tw.grid(n):
        {}
    return out
"""


@pytest.mark.parametrize(
    "body",
    [
        "out[i] = x[(i * 7) % n]",
        "out[i] = x[max(i - 1, 0)] + x[min(i + 1, n - 1)] + x[n - 1 - i]",
        "out[i] = x[i - 1] if i > 0 else x[i]",
        "out[i] = x[i + 1] if not i >= n - 1 else 0.0",
        "out[i] = x[i // 2] + x[(i + n) // 2]",
        "j = i - 3 if i > 3 else 0\n        out[i] = x[j]",
        "out[i] = y[i] if x[i] > 0 else 0.0",
        "t = 0.0\n        for k in range(i):\n            t = t * 0.5 + x[k] + x[i - k - 1]\n        out[i] = t",
        "t = 0.0\n        for k in range(i, n):\n            t = t + x[k]\n        out[i] = t",
        "t = 0.0\n        for k in range(n - i):\n            t += x[i + k]\n        out[i] = t",
    ],
)
def test_what_loops_and_conditions_prove_is_not_tested(body: str) -> None:
    text = PROVEN.format(body)
    path = f"<proven {abs(hash(body))}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    names: dict[str, object] = {"tw": tw}
    exec(compile(text, path, "exec"), names)
    kernel = tw.kernel(names["f"])  # type: ignore[call-overload]
    arguments = NUMBERS[:15], NUMBERS[:15]
    assert not any(is_watched(call.kernel) for call in kernel.stages(*arguments).stages.loop.calls)
    # Threads past the extent run none of it.
    assert np.allclose(kernel(*arguments), kernel(*arguments, device="emulator"))


def run_stage(kernel: tw.kernel, stage: str, *arguments: object, **outputs: np.ndarray) -> dict[str, np.ndarray]:
    """A stage of the kernel as it is compiled for a GPU, in the emulator."""
    program = getattr(kernel.stages(*arguments, target="sm_90a").stages, stage)
    named = dict(zip([p.name for p in program.inputs], arguments, strict=True))
    return run_program(program, named, outputs, target=parse_target("sm_90a"))


@tw.kernel(check=True)
def checked_gather(x: tw.Array, at: tw.Array):
    out = tw.empty((len(at),), x.dtype)
    for i in tw.grid(len(at)):
        out[i] = x[at[i]]
    return out


@tw.kernel
def scattered_rows(y: tw.Array, at: tw.Array, v: tw.Array):
    rows, cols = v.shape
    out = tw.zeros(y.shape, v.dtype)
    for i in range(rows):
        for j in tw.grid(cols):
            out[at[i], j] = v[i, j]
    return out


@tw.kernel
def moved(x: tw.Array, by: int):
    (n,) = x.shape
    out = tw.zeros((n,), x.dtype)
    for i in tw.grid(n):
        out[i + by] = x[i]
    return out


@tw.kernel
def one_row(x: tw.Array, at: int):
    _, n = x.shape
    out = tw.zeros(x.shape, x.dtype)
    for j in tw.grid(n):
        out[at, j] = x[0, j] * 2
    return out


ROWS = np.arange(3 * 33, dtype=np.float32).reshape(3, 33)
ON_GPUS: list[tuple[tw.kernel, tuple[object, ...], tuple[object, ...], str]] = [
    (checked_gather, (NUMBERS, at()), (NUMBERS, at(100)), "checked_gather reads 'x' at index 100, but its extent there is 100"),
    (checked_gather, (NUMBERS, at()), (NUMBERS, at(-1)), "checked_gather reads 'x' at index -1, "),
    (checked_gather, (NUMBERS, at(n=1)), (NUMBERS, at(2**62, n=1, dtype=np.int64)), f"at index {2**62}, "),
    (scatter, (NUMBERS, at(), NUMBERS[:70]), (NUMBERS, at(100), NUMBERS[:70]), "scatter writes 'out' at index 100, "),
    (count, (NUMBERS, at()), (NUMBERS, at(-3)), "count writes 'out' at index -3, "),
    (scattered_rows, (np.zeros((5, 33)), np.array([4, 0, 2]), ROWS), (np.zeros((5, 33)), np.array([4, 5, 2]), ROWS), "'out' at index 5 (axis 0), but its extent there is 5"),
    (one_row, (ROWS, 0), (ROWS, 3), "one_row writes 'out' at index 3 (axis 0), "),
    (one_row, (ROWS[:1], 0), (ROWS[:1], -1), "one_row writes 'out' at index -1 (axis 0), "),
    (moved, (NUMBERS, 0), (NUMBERS, 1), "moved writes 'out' at index 100, "),
    (moved, (NUMBERS, 0), (NUMBERS, -1), "moved writes 'out' at index -1, "),
]


@pytest.mark.parametrize(("kernel", "right", "wrong", "text"), ON_GPUS, ids=lambda v: v if isinstance(v, str) else "")
def test_gpus_leave_out_what_is_outside_and_say_so(kernel: tw.kernel, right: tuple[object, ...], wrong: tuple[object, ...], text: str) -> None:
    wanted = kernel(*right, device="cpu")
    for stage in ("loop", "tile", "thread"):
        assert np.array_equal(run_stage(kernel, stage, *right)["out"], wanted)
    for stage in ("tile", "thread"):
        with pytest.raises(tw.UserError, match=re.escape(text)) as caught:
            run_stage(kernel, stage, *wrong)
        assert caught.value.code == "TW050"
        assert re.search(r"\(at .*test_index_checks\.py:\d+:\d+\)", str(caught.value))
    code = kernel.compile(*right, target="sm_90a").code
    assert b"trap" not in code and b"atom" in code


def test_gpus_write_all_that_is_inside() -> None:
    for by in (1, -1, 5, -100, 100, 2**62):
        given = NUMBERS + 1
        wanted = np.zeros(100, np.float32)
        inside = [i for i in range(100) if 0 <= i + by < 100]
        wanted[[i + by for i in inside]] = given[inside]
        for stage in ("tile", "thread"):
            out = np.full(100, 7, np.float32)
            with pytest.raises(tw.UserError):
                run_stage(moved, stage, given, by, out=out)
            np.testing.assert_array_equal(out, wanted)


def test_gpus_read_unchecked_unless_asked() -> None:
    assert not gather.compile(NUMBERS, at(), target="sm_90a").sites
    assert not tw.kernel(unchecked=True)(scatter.python).compile(NUMBERS, at(), NUMBERS[:70], target="sm_90a").sites
    with pytest.raises(tw.UserError, match=r"load of 'x' at \[100\] is out of bounds"):
        gather(NUMBERS, at(100), device="emulator")


@pytest.mark.parametrize("factor", [2**62 + 1, 2**63 - 1, 2**61 + 1])
def test_constants_of_indices_wrap(factor: int) -> None:
    @tw.kernel
    def wrapped(x: tw.Array):
        (n,) = x.shape
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[(i * factor) % n] + x[((i * factor) * 3 + 1) % n]
        return out

    x = np.arange(11.0)
    i = np.arange(11, dtype=np.int64)
    with np.errstate(over="ignore"):
        f = np.int64(factor)
        wanted = x[(i * f) % 11] + x[(i * f * 3 + 1) % 11]
    assert np.array_equal(wrapped(x), wanted)
    assert np.array_equal(wrapped(x, device="emulator"), wanted)


def test_signs_of_sizes_are_proven() -> None:
    @tw.kernel
    def signs(x: tw.Array, y: tw.Array):
        (n,) = x.shape
        (m,) = y.shape
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            a = 1.0 if min(n - 5, m) >= 0 else 2.0
            b = 10.0 if (n - 5) // 2 >= 0 else 20.0
            out[i] = a + b + (0.0 if i * 9223372036854775807 >= 0 else 100.0)
        return out

    for device in ("cpu", "emulator"):
        assert signs(np.ones(3), np.ones(7), device=device).tolist() == [22.0, 22.0, 122.0]
        assert signs(np.ones(6), np.ones(7), device=device)[0] == 11.0


def test_an_axis_may_be_longer_than_the_loop_over_it() -> None:
    @tw.kernel
    def steps(w: tw.Array, v: tw.Array):
        (n,) = v.shape
        out = tw.empty((n,), w.dtype)
        for i in tw.grid(n):
            out[i] = w[i + 1] - w[i]
        return out

    squares = np.arange(5.0) ** 2
    for device in ("cpu", "emulator"):
        assert steps(squares, squares[:4], device=device).tolist() == [1, 3, 5, 7]
        with pytest.raises(tw.UserError, match=r"index i \+ 1 of 'w' reaches 5, but axis 0 has extent 5"):
            steps(squares, squares, device=device)


def test_explicit_kernels_on_a_cpu_are_checked() -> None:
    def beyond(x, y):
        i = tw.gpu_thread_id()
        y[i] = x[i + 1]

    def serial(x, y):
        for i in range(len(x) + 1):
            y[i] = x[i]

    y = np.zeros(100, np.float32)
    checked = tw.gpu(beyond)
    with pytest.raises(tw.UserError, match=r"load of 'x' at \[100\] is out of bounds"):
        checked[1, 100](NUMBERS, y, device="cpu")
    checked[1, 99](NUMBERS, y, device="cpu")
    tw.gpu(unchecked=True)(beyond)[1, 99](NUMBERS, y, device="cpu")
    with pytest.raises(tw.UserError, match=r"load of 'x' at \[100\] is out of bounds"):
        tw.cpu(serial)(NUMBERS, np.zeros(101, np.float32))
    with pytest.raises(tw.UserError, match="both"):
        tw.gpu(check=True, unchecked=True)(beyond)


@pytest.mark.parametrize("joined", [False, True])
def test_zynml_kernels_are_checked_too(joined: bool) -> None:
    more = "    let b = compute(a) { for i in 0..n: out[i] = a[i] + 1.0 }\n    return b\n" if joined else "    return a\n"
    text = "pipeline pick(x: tensor, at: tensor[n]) -> tensor[n]:\n    let a = compute(x, at) { %s for i in 0..n: out[i] = x[at[i]] }\n" + more
    program = tw.load(text % "")
    assert np.array_equal(program.pick(NUMBERS, at(), device="cpu"), NUMBERS[at()] + joined)
    for _ in range(3):  # statements, then a trace, then a replay
        with pytest.raises(tw.UserError, match="'x' at index 100, but its extent there is 100"):
            program.pick(NUMBERS, at(100), device="cpu")
    unchecked = tw.load(text % "@unchecked")
    assert unchecked.pick(ROOM[:100], at(100), device="cpu")[-1] == 100 + joined


def test_quotients_by_sizes_are_checked_at_the_call() -> None:
    @tw.kernel
    def spread(x: tw.Array, y: tw.Array):
        n, m = len(x), len(y)
        group = m // n
        out = tw.empty((m,), x.dtype)
        for i in tw.grid(m):
            out[i] = x[i // group] + y[i]
        return out

    np.testing.assert_array_equal(spread(NUMBERS[:2], NUMBERS[:6]), [0, 1, 2, 4, 5, 6])
    assert spread.last is not None
    assert spread.last.sites == ()
    assert spread(NUMBERS[:2], NUMBERS[:0]).shape == (0,)
    with pytest.raises(tw.UserError, match=r"TW013.*'x' reaches 2, but axis 0 has extent 2"):
        spread(NUMBERS[:2], NUMBERS[:5])
    with pytest.raises(tw.UserError, match=r"TW013.*'x' is divided by 0"):
        spread(NUMBERS[:2], NUMBERS[:1])


def test_ends_that_an_index_does_not_reach_are_no_errors() -> None:
    @tw.kernel
    def near(x: tw.Array, y: tw.Array):
        (n,) = y.shape
        out = tw.empty((n,), y.dtype)
        for i in tw.grid(n):
            out[i] = x[i % 4] + x[i - i // 2]
        return out

    np.testing.assert_array_equal(near(NUMBERS[:2], NUMBERS[:2]), [0, 2])
    with pytest.raises(tw.TilewrightError, match=r"near reads 'x' at index 2, but its extent there is 2"):
        near(NUMBERS[:2], NUMBERS[:5])


def test_conditions_on_an_index_say_how_far_it_goes() -> None:
    @tw.kernel
    def before(x: tw.Array, y: tw.Array, z: tw.Array):
        n, m = len(x), len(y)
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            total = tw.f32(0)
            for j in range(m):
                if j <= i:
                    total += y[j] * z[j]
            out[i] = total + x[i]
        return out

    @tw.kernel
    def first(x: tw.Array, y: tw.Array, z: tw.Array):
        n, m = len(x), len(y)
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            total = tw.f32(0)
            for j in range(m):
                if i < 3 and j <= i:
                    total += y[j] * z[j]
            out[i] = total + x[i]
        return out

    for kernel in (before, first):
        for n, m, k in ((5, 3, 3), (3, 5, 3), (0, 4, 0), (4, 0, 0)):
            x, y, z = NUMBERS[:n], NUMBERS[:m], NUMBERS[:k]
            want = [x[i] + sum(y[j] * z[j] for j in range(m) if j <= i and (kernel is before or i < 3)) for i in range(n)]
            np.testing.assert_array_equal(kernel(x, y, z), np.float32(want))
    assert before.last is not None
    assert before.last.sites == ()
    with pytest.raises(tw.UserError, match=r"TW013.*'z' is read at indices up to 3, but its axis 0 has extent 3"):
        before(NUMBERS[:4], NUMBERS[:5], NUMBERS[:3])
    first(NUMBERS[:4], NUMBERS[:5], NUMBERS[:3])
    with pytest.raises(tw.TilewrightError, match=r"TW050.*'z' at index 2"):
        first(NUMBERS[:4], NUMBERS[:5], NUMBERS[:2])


@pytest.mark.parametrize("dtype", ["f32", "f64", "i8", "u16", "i64"])
def test_simd_accesses_are_checked(dtype: str) -> None:
    lanes = {"f32": tw.f32x8, "f64": tw.f64x4, "i8": tw.i8x32, "u16": tw.u16x16, "i64": tw.i64x4}[dtype]

    def read(x, y, at: int):
        lanes.load(x, at).store(y, 0)

    def write(x, y, at: int):
        lanes.load(x, 0).store(y, at)

    def row(x, y, at: int):
        lanes.load(x, 1, at).store(y, 0)

    w = lanes.width
    room = np.arange(6 * w).astype({"f": "f", "i": "i", "u": "u"}[dtype[0]] + str(int(dtype[1:]) // 8))
    x, y = room[w : 3 * w], np.zeros(w, room.dtype)
    for at in (0, 1, w):
        tw.cpu(read)(x, y, at)
        np.testing.assert_array_equal(y, x[at : at + w])
    for at, text in ((w + 1, rf"from \[{w + 1}\] on is out of bounds: it has {2 * w} elements"), (-1, "index -1"), (2**62, f"index {2**62}"), (2 * w, f"index {2 * w}")):
        with pytest.raises(tw.UserError, match=text) as caught:
            tw.cpu(read)(x, y, at)
        assert caught.value.code == "TW050"
        target = np.zeros(6 * w, room.dtype)
        with pytest.raises(tw.UserError, match=text):
            tw.cpu(write)(x, target[w : 3 * w], at)
        assert not target.any()
    with pytest.raises(tw.UserError, match="out of bounds"):
        tw.cpu(row)(room[: 4 * w].reshape(2, 2 * w), y, w + 1)
    tw.cpu(unchecked=True)(read)(x, y, w + 1)
    np.testing.assert_array_equal(y, room[2 * w + 1 : 3 * w + 1])


def test_simd_accesses_that_a_loop_proves_have_no_test() -> None:
    def scaled(x: tw.Array, y: tw.Array):
        for i in range(0, len(x) - 3, 4):
            v = tw.f32x4.load(x, i)
            (v + v).store(x, i)
        for i in range(0, len(y), 4):
            tw.f32x4.load(y, i).store(y, i)

    x, y = NUMBERS[:22].copy(), NUMBERS[:22].copy()
    function = tw.cpu(scaled)
    with pytest.raises(tw.UserError, match=r"load of 4 elements of 'y' from \[20\] on is out of bounds: it has 22 elements"):
        function(x, y)
    np.testing.assert_array_equal(x, np.where(np.arange(22) < 20, 2, 1) * NUMBERS[:22])
    (sites,) = function.kernel.runner.sites.values()
    assert {site.array for site in sites} == {"y"}
    function(x, y[:20])


@tw.kernel
def halves_from_five_on(x: tw.Array, c: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.zeros(n, x.dtype)
    for k in range(n):
        if k >= 5:
            out[k] = x[(k - 5) // 2]
        if c[k] > 0:
            out[k] += x[(k - 5) // 2]
    return out


def test_a_quotient_is_proven_where_it_is_read() -> None:
    x = np.arange(20.0)
    c = np.where(np.arange(20) >= 5, 1.0, 0.0)
    expected = np.where(c > 0, 2.0 * ((np.arange(20) - 5) // 2), 0.0)
    np.testing.assert_array_equal(np.asarray(halves_from_five_on(x, c)), expected)
    with pytest.raises(IndexError, match="index -3"):
        halves_from_five_on(x, np.ones(20))


@tw.kernel
def number_under_a_bound(v: tw.Array, x: tw.Array) -> tw.Array:
    out = tw.zeros((len(x),), tw.f64)
    for i in range(len(x)):
        total = 0.0
        for j in range(len(x)):
            if i >= 4:
                total += v[3] * x[j]
        out[i] = total
    return out


@tw.kernel
def number_beside_a_bound(v: tw.Array, x: tw.Array) -> tw.Array:
    out = tw.zeros((len(x),), tw.f64)
    for i in range(len(x)):
        total = 0.0
        for j in range(len(x)):
            if j < 2 or j == 6:
                total += x[j]
            else:
                total += v[3] * x[j]
        out[i] = total
    return out


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("length", [1, 3, 4, 7])
def test_a_number_is_asked_for_where_its_condition_can_hold(count: int, length: int) -> None:
    v, x = np.arange(1.0, length + 1), np.arange(1.0, count + 1)
    first = [x.sum() if i >= 4 else 0.0 for i in range(count)]
    second = [(j >= 2 and j != 6) * x[j] for j in range(count)]
    for kernel, read, factors in ((number_under_a_bound, count >= 5, first), (number_beside_a_bound, count >= 3, second)):
        if read and length <= 3:
            with pytest.raises(tw.UserError, match="'v'"):
                kernel(v, x)
            continue
        expected = np.array(factors) * (v[3] if length > 3 else 0.0)
        if kernel is number_beside_a_bound:
            expected = np.full(count, expected.sum() + sum(x[j] for j in range(count) if j < 2 or j == 6))
        assert np.allclose(kernel(v, x), expected)
