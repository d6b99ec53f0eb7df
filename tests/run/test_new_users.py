"""What people met in their first hour: one test for each thing that somebody tried, by what they did. Each asserts what they should have got.

That the README is clean for type checkers, which somebody found it was not, is in `tests/unit/test_types_of_calls.py`; the speed of
pairwise distances beside Numba's is a row of `bench`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import tilewright as tw
from null_cuda.install import installed
from tilewright.cli.main import cli
from tilewright.execute.devices import find_device

ROOT = Path(__file__).parents[2]
rng = np.random.default_rng(7)


def command(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def defined(text: str) -> dict[str, Any]:
    """The names that a text of Python makes."""
    return tw.run_source("import numpy as np\nimport tilewright as tw\n\n" + textwrap.dedent(text))


def message(call: Callable[[], object], kind: type[Exception] = tw.TilewrightError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def is_parallel(kernel: Any, *arguments: object, **options: Any) -> bool:
    """Whether a call neither warns that one thread does the work nor lacks parallel loops."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel(*arguments, **options)
    return not [w for w in caught if issubclass(w.category, tw.PerformanceWarning)]


# -- kernels ---------------------------------------------------------------------------------------------------------


def test_a_default_of_a_parameter_applies() -> None:
    leaky = defined("""
        @tw.kernel
        def leaky(x, slope: float = 0.1):
            (n,) = x.shape
            out = tw.empty((n,), x.dtype)
            for i in tw.grid(n):
                out[i] = x[i] if x[i] > 0 else slope * x[i]
            return out
    """)["leaky"]
    np.testing.assert_allclose(leaky(np.array([-1.0, 2.0])), [-0.1, 2.0])
    np.testing.assert_allclose(leaky(np.array([-1.0, 2.0]), 0.5), [-0.5, 2.0])


HEAT = """
    @tw.kernel
    def heat(u, steps: int):
        n, m = u.shape
        a = tw.empty((n, m), u.dtype)
        b = tw.empty((n, m), u.dtype)
        for i, j in tw.grid(n, m):
            a[i, j] = u[i, j]
            b[i, j] = u[i, j]
        for t in range(steps):
            for i, j in tw.grid(n - 2, m - 2):
                b[i + 1, j + 1] = 0.25 * (a[i, j + 1] + a[i + 2, j + 1] + a[i + 1, j] + a[i + 1, j + 2])
            for i, j in tw.grid(n - 2, m - 2):
                a[i + 1, j + 1] = b[i + 1, j + 1]
        return a
"""


def test_a_time_loop_around_a_grid_is_parallel_inside_each_step() -> None:
    heat = defined(HEAT)["heat"]
    u = rng.random((40, 50)).astype(np.float32)
    expected = u.copy()
    for _ in range(5):
        expected[1:-1, 1:-1] = 0.25 * (expected[:-2, 1:-1] + expected[2:, 1:-1] + expected[1:-1, :-2] + expected[1:-1, 2:])
    np.testing.assert_allclose(heat(u, 5), expected, rtol=1e-5)
    assert is_parallel(heat, u, 5)
    code = heat.compile(u, 5, target="sm_90a").code.decode()
    assert "%ctaid" in code  # every block has its part of a step
    np.testing.assert_allclose(heat(u[:9, :8].copy(), 2, device="emulator"), heat(u[:9, :8].copy(), 2), rtol=1e-6)


def test_monte_carlo_over_a_number_is_parallel() -> None:
    pi = defined("""
        @tw.kernel
        def pi(n: int, seed: int) -> float:
            inside = 0
            for i in range(n):
                x = tw.random.uniform(seed, 2 * i)
                y = tw.random.uniform(seed, 2 * i + 1)
                if x * x + y * y < 1.0:
                    inside += 1
            return 4.0 * inside / n
    """)["pi"]
    assert abs(pi(400_000, 3) - np.pi) < 0.02
    assert is_parallel(pi, 400_000, 3)


def test_a_histogram_in_a_grid_is_parallel() -> None:
    histogram = defined("""
        @tw.kernel
        def histogram(k, w, bins: int):
            (n,) = k.shape
            out = tw.zeros((bins,), w.dtype)
            for i in tw.grid(n):
                out[k[i]] += w[i]
            return out
    """)["histogram"]
    k, w = rng.integers(0, 16, 10_000), rng.random(10_000)
    np.testing.assert_allclose(histogram(k, w, 16), np.bincount(k, w, 16))
    assert is_parallel(histogram, k, w, 16)


def test_pairwise_distances_are_right_for_few_and_many_dimensions() -> None:
    distances = defined("""
        @tw.kernel
        def distances(a, b):
            n, d = a.shape
            m = b.shape[0]
            out = tw.empty((n, m), a.dtype)
            for i, j in tw.grid(n, m):
                total = 0.0
                for k in range(d):
                    total += (a[i, k] - b[j, k]) ** 2
                out[i, j] = tw.sqrt(total)
            return out
    """)["distances"]
    for d in (3, 8, 16, 256):
        a, b = rng.random((60, d)).astype(np.float32), rng.random((50, d)).astype(np.float32)
        np.testing.assert_allclose(distances(a, b), np.sqrt(((a[:, None] - b) ** 2).sum(-1)), rtol=2e-5)


def test_random_numbers() -> None:
    draw = defined("""
        @tw.kernel
        def draw(n: int):
            out = tw.empty((n,), tw.f32)
            for i in tw.grid(n):
                out[i] = tw.random.uniform(1, i)
            return out
    """)["draw"]
    found = draw(1000)
    assert 0 <= found.min() < found.max() < 1 and abs(found.mean() - 0.5) < 0.05


@pytest.mark.parametrize(
    ("name", "expected"),
    [("atan2", np.arctan2), ("isinf", lambda a, b: np.isinf(a)), ("fmod", np.fmod)],
)
def test_functions_people_look_for_are_there(name: str, expected: Callable[..., np.ndarray]) -> None:
    call = "1.0 if tw.isinf(x[i]) else 0.0" if name == "isinf" else f"tw.{name}(x[i], y[i])"
    applied = defined(f"""
        @tw.kernel
        def applied(x, y):
            (n,) = x.shape
            out = tw.empty((n,), tw.f64)
            for i in tw.grid(n):
                out[i] = {call}
            return out
    """)["applied"]
    x, y = np.array([1.5, -2.5, np.inf if name == "isinf" else 7.0]), np.array([0.5, 2.0, 3.0])
    np.testing.assert_allclose(applied(x, y), expected(x, y))


@pytest.mark.parametrize(("name", "hint"), [("mod", "fmod|%"), ("square", r"\*"), ("sort", "sort"), ("argsort", "argsort|sort")])
def test_functions_that_are_not_there_get_a_sensible_hint(name: str, hint: str) -> None:
    text = f"""
        @tw.kernel
        def applied(x):
            (n,) = x.shape
            out = tw.empty((n,), x.dtype)
            for i in tw.grid(n):
                out[i] = tw.{name}(x[i])
            return out
    """
    shown = message(lambda: defined(text)["applied"](np.ones(3)))
    assert re.search(hint, shown.split("help:")[-1]), shown
    assert not re.search("did you mean '?(tan|sin|sigmoid|sqrt|shared|rsqrt)'?", shown), shown


def test_an_array_of_indices_picks_elements() -> None:
    pick = defined("""
        @tw.kernel
        def pick(x, idx):
            return x[idx]
    """)["pick"]
    x, idx = rng.random(20), np.array([3, 0, 19], np.int64)
    np.testing.assert_array_equal(pick(x, idx), x[idx])


def test_a_list_in_a_kernel_is_refused_with_what_there_is() -> None:
    text = """
        @tw.kernel
        def collect(x):
            (n,) = x.shape
            acc = []
            for i in range(n):
                acc.append(x[i])
            return acc
    """
    shown = message(lambda: defined(text)["collect"](np.ones(3)))
    assert "list" in shown and re.search("tw.empty|tw.zeros|tw.local", shown), shown


def test_a_captured_dictionary_is_read() -> None:
    text = """
        settings = {"gain": 2.0}

        @tw.kernel
        def gained(x):
            (n,) = x.shape
            out = tw.empty((n,), x.dtype)
            for i in tw.grid(n):
                out[i] = x[i] * settings["gain"]
            return out
    """
    np.testing.assert_allclose(defined(text)["gained"](np.ones(3)), 2.0)


def test_a_function_of_numpy_names_ours() -> None:
    text = """
        @tw.kernel
        def roots(x):
            (n,) = x.shape
            out = tw.empty((n,), x.dtype)
            for i in tw.grid(n):
                out[i] = np.sqrt(x[i])
            return out
    """
    assert "tw.sqrt" in message(lambda: defined(text)["roots"](np.ones(3)))


def test_axes_of_extent_one_broadcast() -> None:
    add = defined("""
        @tw.kernel
        def add(a, b):
            return a + b
    """)["add"]
    a, b = rng.random((3, 1)), rng.random((3, 4))
    np.testing.assert_allclose(add(a, b), a + b)


def test_none_in_an_index_makes_an_axis() -> None:
    outer = defined("""
        @tw.kernel
        def outer(x, y):
            return x[:, None] * y[None, :]
    """)["outer"]
    x, y = rng.random(3), rng.random(4)
    np.testing.assert_allclose(outer(x, y), np.outer(x, y))


def test_underscores_in_a_shape() -> None:
    middle = defined("""
        @tw.kernel
        def middle(w):
            _, n, _ = w.shape
            out = tw.empty((n,), w.dtype)
            for i in tw.grid(n):
                out[i] = w[0, i, 0]
            return out
    """)["middle"]
    w = rng.random((2, 5, 3))
    np.testing.assert_array_equal(middle(w), w[0, :, 0])


CONVOLUTION = """
    S, D = 1, 1

    @tw.kernel
    def conv(x, w):
        N, C, H, W = x.shape
        F, _, KH, KW = w.shape
        out = tw.empty((N, F, H - KH + 1, W - KW + 1), x.dtype)
        for n, f, i, j in tw.grid(N, F, H - KH + 1, W - KW + 1):
            total = 0.0
            for c in range(C):
                for a in range(KH):
                    for b in range(KW):
                        BODY
            out[n, f, i, j] = total
        return out
"""
PADDED = """
    @tw.kernel
    def conv(x, w):
        N, C, H, W = x.shape
        F, _, KH, KW = w.shape
        out = tw.empty((N, F, H, W), x.dtype)
        for n, f, i, j in tw.grid(N, F, H, W):
            total = 0.0
            for c in range(C):
                for a in range(KH):
                    for b in range(KW):
                        y = i + a - 1
                        z = j + b - 1
                        BODY
            out[n, f, i, j] = total
        return out
"""


def family(kernel: Any, *arguments: object) -> str:
    """The schedule that a GPU gets."""
    return str(kernel.compile(*arguments, target="sm_90a").schedule)


def images() -> tuple[np.ndarray, np.ndarray]:
    return rng.random((2, 16, 8, 8)).astype(np.float16), rng.random((16, 16, 3, 3)).astype(np.float16)


def test_a_captured_one_in_a_remainder_is_folded() -> None:
    plain = defined(CONVOLUTION.replace("BODY", "total += x[n, c, i + a, j + b] * w[f, c, a, b]"))["conv"]
    folded = defined(
        CONVOLUTION.replace(
            "BODY", "if (i + a) % S == 0 and (j + b) % D == 0:\n                            total += x[n, c, (i + a) // S, (j + b) // D] * w[f, c, a, b]"
        )
    )["conv"]
    x, w = images()
    np.testing.assert_array_equal(plain(x, w), folded(x, w))
    assert "mma" in family(plain, x, w) and family(plain, x, w) == family(folded, x, w)


def test_nested_conditions_around_a_sum_are_one_condition() -> None:
    joined = defined(PADDED.replace("BODY", "if 0 <= y < H and 0 <= z < W:\n                            total += x[n, c, y, z] * w[f, c, a, b]"))["conv"]
    nested = defined(
        PADDED.replace("BODY", "if 0 <= y < H:\n                            if 0 <= z < W:\n                                total += x[n, c, y, z] * w[f, c, a, b]")
    )["conv"]
    x, w = images()
    np.testing.assert_array_equal(joined(x, w), nested(x, w))
    assert "mma" in family(joined, x, w) and family(joined, x, w) == family(nested, x, w)


def test_a_guarded_store_after_a_product_is_an_epilogue() -> None:
    text = """
        @tw.kernel
        def product(a, b):
            n, k = a.shape
            m = b.shape[1]
            out = tw.zeros((n, m), a.dtype)
            for i, j in tw.grid(n, m):
                total = 0.0
                for p in range(k):
                    total += a[i, p] * b[p, j]
                if GUARD:
                    out[i, j] = total
            return out
    """
    a = rng.random((64, 64)).astype(np.float16)
    guarded, plain = defined(text.replace("GUARD", "j <= i"))["product"], defined(text.replace("GUARD", "True"))["product"]
    np.testing.assert_allclose(guarded(a, a).astype(np.float32), np.tril(a.astype(np.float32) @ a.astype(np.float32)), rtol=2e-3)
    assert "mma" in family(plain, a, a) and "mma" in family(guarded, a, a)


@pytest.mark.parametrize("index", [100_000, -100_000])
def test_an_index_out_of_range_on_a_cpu_is_an_error_with_the_index(index: int) -> None:
    gather = defined("""
        @tw.kernel
        def gather(x, idx):
            (n,) = idx.shape
            out = tw.empty((n,), x.dtype)
            for i in tw.grid(n):
                out[i] = x[idx[i]]
            return out
    """)["gather"]
    shown = message(lambda: gather(np.ones(10), np.array([1, index])), tw.TilewrightError)
    assert str(index) in shown and "x" in shown


def test_print_in_a_kernel_prints(capfd: pytest.CaptureFixture[str]) -> None:
    show = defined("""
        @tw.kernel
        def show(x):
            (n,) = x.shape
            out = tw.empty((n,), x.dtype)
            for i in range(n):
                print(x[i])
                out[i] = x[i]
            return out
    """)["show"]
    show(np.array([1.5, 2.5]))
    sys.stdout.flush()
    assert capfd.readouterr().out.split() == ["1.5", "2.5"]


def test_differences_of_neighbours() -> None:
    differences = defined("""
        @tw.kernel
        def differences(w, n: int):
            out = tw.empty((n,), w.dtype)
            for i in tw.grid(n):
                out[i] = w[i + 1] - w[i]
            return out
    """)["differences"]
    w = rng.random(9)
    np.testing.assert_allclose(differences(w, 8), np.diff(w))


def test_an_index_that_never_goes_below_zero() -> None:
    turned = defined("""
        @tw.kernel
        def turned(r):
            (n,) = r.shape
            out = tw.zeros((n,), r.dtype)
            for k in range(1, n):
                total = 0.0
                for i in range(k):
                    total += r[k - i - 1]
                out[k] = total
            return out
    """)["turned"]
    r = rng.random(7)
    np.testing.assert_allclose(turned(r), np.concatenate([[0], np.cumsum(r)[:-1]]))


def test_forward_substitution_into_an_empty_array() -> None:
    solve = defined("""
        @tw.kernel
        def solve(L, b):
            (n,) = b.shape
            x = tw.empty((n,), b.dtype)
            for i in range(n):
                total = b[i]
                for j in range(i):
                    total -= L[i, j] * x[j]
                x[i] = total / L[i, i]
            return x
    """)["solve"]
    lower, b = np.tril(rng.random((6, 6))) + np.eye(6), rng.random(6)
    np.testing.assert_allclose(solve(lower, b), np.linalg.solve(lower, b))


def test_slices_as_stencils_and_a_helper_in_a_time_loop() -> None:
    names = defined("""
        @tw.kernel
        def step(a):
            (n,) = a.shape
            b = tw.empty((n,), a.dtype)
            for i in tw.grid(n):
                b[i] = a[i]
            b[1:-1] = 0.5 * (a[:-2] + a[2:])
            return b

        @tw.kernel
        def run(a, steps: int):
            (n,) = a.shape
            u = tw.empty((n,), a.dtype)
            for i in tw.grid(n):
                u[i] = a[i]
            for t in range(steps):
                u = step(u)
            return u
    """)
    a = rng.random(12)
    expected = a.copy()
    for _ in range(4):
        expected[1:-1] = 0.5 * (expected[:-2] + expected[2:])
    np.testing.assert_allclose(names["run"](a, 4), expected)


def test_a_sum_inside_while() -> None:
    halves = defined("""
        @tw.kernel
        def halves(x):
            (n,) = x.shape
            a = tw.empty((n,), x.dtype)
            for i in tw.grid(n):
                a[i] = x[i]
            total = a.sum()
            while total > 1.0:
                for i in tw.grid(n):
                    a[i] = 0.5 * a[i]
                total = a.sum()
            return a
    """)["halves"]
    x = rng.random(100)
    expected = x.copy()
    while expected.sum() > 1.0:
        expected *= 0.5
    np.testing.assert_allclose(halves(x), expected)


def test_reshape_inside_a_kernel_is_a_view() -> None:
    pairs = defined("""
        @tw.kernel
        def pairs(x):
            return x.reshape(-1, 2).sum(axis=1)
    """)["pairs"]
    x = rng.random(10)
    np.testing.assert_allclose(pairs(x), x.reshape(-1, 2).sum(1))


def test_the_time_to_compile_a_nest_is_linear_in_its_depth() -> None:
    import time

    def nest(depth: int) -> float:
        names = [f"i{k}" for k in range(depth)]
        lines = ["@tw.kernel", "def nest(x):", "    (n,) = x.shape", "    total = 0.0"]
        lines += ["    " * (k + 1) + f"for {name} in range(2):" for k, name in enumerate(names)]
        lines += ["    " * (depth + 1) + f"total += x[({' + '.join(names)}) % n]", "    return total"]
        kernel = defined("\n".join(lines))["nest"]
        began = time.process_time()
        kernel.compile(np.ones(7))
        return time.process_time() - began

    nest(2)
    short, deep = min(nest(4) for _ in range(2)), min(nest(11) for _ in range(2))
    assert deep < 12 * short + 0.5, (short, deep)


def test_grouped_decode_is_split_over_the_keys() -> None:
    decode = defined("""
        @tw.kernel
        def decode(q, k, v):
            H, D = q.shape
            G, T, _ = k.shape
            out = tw.empty((H, D), q.dtype)
            for h in tw.grid(H):
                g = h // (H // G)
                top = -1e30
                for t in range(T):
                    s = 0.0
                    for d in range(D):
                        s += q[h, d] * k[g, t, d]
                    top = tw.max(top, s)
                total = 0.0
                for t in range(T):
                    s = 0.0
                    for d in range(D):
                        s += q[h, d] * k[g, t, d]
                    total += tw.exp(s - top)
                for e in range(D):
                    mixed = 0.0
                    for t in range(T):
                        s = 0.0
                        for d in range(D):
                            s += q[h, d] * k[g, t, d]
                        mixed += tw.exp(s - top) / total * v[g, t, e]
                    out[h, e] = mixed
            return out
    """)["decode"]
    q, k = rng.random((4, 8)).astype(np.float32), rng.random((2, 20, 8)).astype(np.float32)
    scores = np.einsum("hd,htd->ht", q, k.repeat(2, 0))
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = np.einsum("ht,htd->hd", weights / weights.sum(1, keepdims=True), k.repeat(2, 0))
    np.testing.assert_allclose(decode(q, k, k), expected, rtol=1e-5)


# -- the tools around ------------------------------------------------------------------------------------------------


def test_check_takes_a_record_of_a_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "classify.zyn"
    path.write_text("pipeline classify(x, model: record) {\n    return relu(x @ model.layers[0].weight)\n}\n")
    found = command("check", path)
    assert found.exit_code == 0, found.output


def test_check_infers_integers_from_their_use(tmp_path: Path) -> None:
    path = tmp_path / "sums.py"
    path.write_text(textwrap.dedent("""
        import tilewright as tw

        @tw.kernel
        def sums(x, lengths):
            n, m = x.shape
            out = tw.empty((n,), x.dtype)
            for b in tw.grid(n):
                total = 0.0
                for t in range(lengths[b]):
                    total += x[b, t]
                out[b] = total
            return out
    """))
    found = command("check", path)
    assert found.exit_code == 0, found.output


def test_check_reports_every_error_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    kernels = [
        f"@tw.kernel\ndef wrong{number}(x):\n    (n,) = x.shape\n    out = tw.empty((n,), x.dtype)\n    for i in tw.grid(n):\n        out[i] = {body}\n    return out\n"
        for number, body in enumerate(["tw.sine(x[i])", "missing(x[i])", "y[i]", "x[i] + 'a'", "x.layers[i]", "tw.exp(x[i], 1)"] * 3)
    ][:17]
    path.write_text("import tilewright as tw\n\n\n" + "\n\n".join(kernels))
    found = json.loads(command("check", "--json", path).output)
    lines = path.read_text().splitlines()
    reported = {entry["line"] for entry in found if entry["severity"] == "error"}
    assert reported == {number for number, line in enumerate(lines, 1) if "out[i] = " in line}


GPU_ERRORS = """
    @tw.gpu
    def wrong(x: tw.GpuBuffer[tw.f32]):
        i = tw.thread.x
        x[i] = tw.sine(x[i])
        x[i] = unknown
        x[i] = tw.expp(x[i])
"""


def test_check_finds_an_unknown_function_in_an_explicit_kernel(tmp_path: Path) -> None:
    path = tmp_path / "explicit.py"
    path.write_text("import tilewright as tw\n" + textwrap.dedent(GPU_ERRORS))
    found = command("check", path)
    assert found.exit_code == 1 and "sine" in found.output + found.stderr


def test_an_explicit_kernel_reports_all_its_errors() -> None:
    shown = message(lambda: defined(GPU_ERRORS)["wrong"][1, 32](np.ones(32, np.float32), device="cpu"))
    assert all(name in shown for name in ("sine", "unknown", "expp")), shown


def test_dir_and_tab_show_every_name() -> None:
    import rlcompleter

    assert len([name for name in dir(tw) if not name.startswith("_")]) >= 300
    completer = rlcompleter.Completer({"tw": tw})
    found = [completer.complete("tw.at", number) for number in range(12)]
    assert {"tw.atan2", "tw.atan", "tw.atanh"} <= {str(name).rstrip("(") for name in found}


def test_tensors_of_pytorch_give_tensors() -> None:
    torch = pytest.importorskip("torch")
    names = defined("""
        @tw.kernel
        def doubled(x):
            (n,) = x.shape
            out = tw.empty((n,), x.dtype)
            for i in tw.grid(n):
                out[i] = 2.0 * x[i]
            return out
    """)
    for dtype in (torch.float32, torch.bfloat16):
        x, out = torch.ones(5, dtype=dtype), torch.zeros(5, dtype=dtype)
        found = names["doubled"](x)
        assert isinstance(found, torch.Tensor) and found.dtype == dtype and (found == 2).all()
        names["doubled"](x, out=out)
        assert (out == 2).all()


def test_a_typo_in_zynml_is_no_input(tmp_path: Path) -> None:
    path = tmp_path / "typo.zyn"
    path.write_text("let total = sum(x)\nlet mean = totl / 3\n")
    found = command("check", path)
    assert "did you mean 'total'?" in found.output + found.stderr


def test_break_in_zynml_leaves_a_loop(tmp_path: Path) -> None:
    path = tmp_path / "stops.zyn"
    path.write_text("var total = 0\nfor i in 0..10 {\n    if i == 3 { break }\n    total = total + i\n}\n")
    found = command("check", path)
    assert found.exit_code == 0, found.stderr
    assert tw.load(path).run()["total"] == 3
    path.write_text("let total = 0\nbreak\n")
    found = command("check", path)
    assert found.exit_code == 1 and "break" in found.stderr + found.output and "input" not in found.stderr + found.output


def test_a_profile_has_a_column_for_compilation() -> None:
    product = defined("""
        @tw.kernel
        def product(a, b):
            return a @ b
    """)["product"]
    a = rng.random((37, 41)).astype(np.float32)
    with tw.profile() as found:
        for _ in range(5):
            product(a, a.T.copy())
    (row,) = found.rows()
    assert row.calls == 5 and row.compile > 0
    assert row.seconds < row.compile  # five small products take less than their compilation, which is not among them
    assert "compile" in str(found).splitlines()[0]


def test_a_typo_in_a_notebook_shows_the_message_only() -> None:
    text = """
        @tw.kernel
        def wrong(x):
            (n,) = x.shape
            out = tw.empty((n,), x.dtype)
            for i in tw.grid(n):
                out[i] = tw.sine(x[i])
            return out
    """
    with pytest.raises(tw.UserError) as caught:
        defined(text)["wrong"](np.ones(3))
    shown = caught.value._render_traceback_()  # what IPython shows in place of a traceback
    assert len("\n".join(shown).splitlines()) < 15 and "sine" in "\n".join(shown) and "site-packages" not in "\n".join(shown)


def test_examples_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = command("check", "examples/gallery.py")
    assert found.exit_code == 0 and "ok (relu, " in found.output
    assert command("examples", "--to", "mine").exit_code == 0
    assert (tmp_path / "mine/gallery.py").read_text() == (ROOT / "examples/gallery.py").read_text()


def test_histograms_have_weights_and_edges() -> None:
    x, w = rng.random(500).astype(np.float32), rng.random(500).astype(np.float32)
    edges = np.array([0.0, 0.1, 0.5, 1.0], np.float32)
    np.testing.assert_allclose(tw.gpu_histogram(x, edges, weights=w, device="cpu"), np.histogram(x, edges, weights=w)[0], rtol=1e-4)


def test_what_was_compiled_shows_itself_in_one_line() -> None:
    double = defined("""
        @tw.kernel
        def double(x):
            return x + x
    """)["double"]
    double(np.ones(3))
    assert str(double.last).count("\n") == 0 and len(str(double.last)) < 120


def test_gpu_and_h100_are_other_names(tmp_path: Path) -> None:
    with installed(count=2):
        assert [find_device(name).id for name in ("gpu", "gpu:1", "h100", "H100:1", "h200")] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
        assert "device 'a100' is not present: this machine has no GPUs for sm_80" in message(lambda: find_device("a100"))
    found = command("compile", ROOT / "examples/zyn/relu.zyn", "--target", "h100")
    assert ".target sm_90a" in found.output
    assert ".target sm_90a" in command("compile", ROOT / "examples/zyn/relu.zyn", "--target", "gpu").output


def test_without_cuda_bindings_the_message_tells_what_to_install() -> None:
    code = "import sys; sys.modules['cuda'] = None\nimport tilewright as tw, numpy as np\ntw.to_device(np.ones(3), 'cuda')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 1 and "pip install 'tilewright[cuda]'" in done.stderr


def test_a_missing_input_on_the_command_line() -> None:
    found = command("run", ROOT / "examples/zyn/relu.zyn")
    assert found.exit_code == 1 and "--in x=" in found.stderr and "call run(" not in found.stderr


def test_fmt_replaces_tabs(tmp_path: Path) -> None:
    path = tmp_path / "tabs.zyn"
    path.write_text("pipeline twice(x) {\n\treturn x + x\n}\n")
    found = command("fmt", path)
    assert found.exit_code == 0, found.stderr
    assert "\t" not in path.read_text() and "    return x + x" in path.read_text()


def test_the_number_of_threads_can_be_asked_for_first() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", "import tilewright as tw; print(tw.get_num_threads())"], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0 and int(done.stdout) >= 1


def test_the_demo_writes_nothing_into_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.cli.commands import demo, demo_graphs, demo_tours
    from tilewright.cli.commands.demo_rows import DemoRow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_ELEMENTS", {"host": 300, "device": 300, "simulated": 60})
    monkeypatch.setattr(demo, "_SECONDS", 0.0)
    gallery = demo.read_gallery()[:1]
    monkeypatch.setattr(demo, "read_gallery", lambda: gallery)
    monkeypatch.setattr(demo_tours, "read_tours", list)
    monkeypatch.setattr(demo_graphs, "run_graph", lambda places, best: (DemoRow("decode_graph", place.id, seconds=1e-6) for place in places))
    found = command("demo")
    assert not list(tmp_path.iterdir())
    assert re.search(r"files in \S*tilewright-ptx-", found.output.replace("\n", " ")), found.output


def test_inspect_sees_globals_and_takes_values_of_a_closure(tmp_path: Path) -> None:
    path = tmp_path / "closure.py"
    path.write_text(textwrap.dedent("""
        import tilewright as tw

        S, P = 4, 2

        @tw.kernel
        def strided(x):
            (n,) = x.shape
            out = tw.empty((n // S,), x.dtype)
            for i in tw.grid(n // S):
                out[i] = x[i * S] * P
            return out


        def make(stride, gain):
            @tw.kernel
            def inner(x):
                (n,) = x.shape
                out = tw.empty((n // stride,), x.dtype)
                for i in tw.grid(n // stride):
                    out[i] = x[i * stride] * gain
                return out
            return inner
    """))
    found = command("inspect", path, "--kernel", "strided", "--args", "x=f32[64]")
    assert found.exit_code == 0, found.stderr
    found = command("inspect", path, "--kernel", "inner", "--args", "x=f32[64] stride=2 gain=-1.5e0")
    assert found.exit_code == 0, found.stderr
    shown = command("compile", path, "--kernel", "inner", "--args", "x=f32[64] stride=3 gain=0.5", "--stage", "typed").output
    assert "3" in shown and "0.5" in shown and "stride" not in shown
    found = command("inspect", path, "--kernel", "inner", "--args", "x=f32[64]")
    assert found.exit_code == 1 and "stride" in found.stderr
    found = command("inspect", path, "--kernel", "strided", "--args", "x=f32[64] strde=2")
    assert found.exit_code == 1 and "has no argument 'strde'" in found.stderr
