"""Complex numbers in kernels, against NumPy: the table of `kernels_complex`, special values, views, results that are given, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from kernel_table import from_text
from kernels_complex import BY_NAME, CASES, DTYPES, SIZES, draw
from tilewright.base.errors import UserError

EDGES = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan)


@tw.kernel
def multiply(x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] * y[i]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table(case: Any, device: str, dtype: type) -> None:
    for size in SIZES:
        case.check(device, dtype, size)


def _edges(dtype: type) -> np.ndarray:
    return np.array([complex(a, b) for a in EDGES for b in EDGES], dtype)


def _same(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where numbers are the same, or close; all NaNs are."""
    with np.errstate(all="ignore"):
        parts = [(g == w) | (np.isnan(g) & np.isnan(w)) | (np.abs(g - w) <= 1e-5 * np.abs(w)) for g, w in ((got.real, want.real), (got.imag, want.imag))]
    return parts[0] & parts[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["add", "multiply", "divide"])
def test_infinities_and_nans_of_two(name: str, dtype: type) -> None:
    edges = _edges(dtype)
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(edges, edges))
    with np.errstate(all="ignore"):
        want = {"add": np.add, "multiply": np.multiply, "divide": np.divide}[name](x, y)
    got = BY_NAME[f"{name}_loop"].kernel(x, y)
    same = _same(got, want)
    assert same.all(), (x[~same][:1], y[~same][:1], got[~same][:1], want[~same][:1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "reference"), [("root", np.sqrt), ("logarithm", np.log), ("size", np.abs)])
def test_infinities_and_nans_of_one(name: str, reference: Any, dtype: type) -> None:
    x = _edges(dtype)
    with np.errstate(all="ignore"):
        want = reference(x)
    got = BY_NAME[f"{name}_whole"].kernel(x)
    same = _same(got, want)
    assert same.all(), (x[~same], got[~same], want[~same])


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponential_at_infinity(dtype: type) -> None:
    kernel = BY_NAME["exponential_whole"].kernel
    x = np.array([complex(np.inf, 0), complex(-np.inf, np.inf), complex(-np.inf, np.nan), complex(np.nan, 0), complex(-np.inf, 1)], dtype)
    got = kernel(x)
    assert got[0] == np.inf and got[0].imag == 0
    assert (got[[1, 2, 4]] == 0).all()
    assert np.isnan(got[3].real) and got[3].imag == 0
    far = kernel(np.array([complex(np.inf, np.nan)], dtype))[0]
    assert far.real == np.inf and np.isnan(far.imag)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_overflows_on_the_way(dtype: type) -> None:
    limits = np.finfo(np.float32 if dtype is np.complex64 else np.float64)
    large, tiny = limits.max / 2, limits.smallest_subnormal
    x = np.array([complex(large, large), complex(large, -large / 3), complex(tiny, tiny), complex(limits.smallest_normal, 0)], dtype)
    close = 8 * limits.eps
    assert abs(BY_NAME["divide_loop"].kernel(x, x) - 1).max() <= close
    sizes = BY_NAME["size_whole"].kernel(x)
    np.testing.assert_allclose(sizes[:2], [large * np.sqrt(2), large * (np.sqrt(10) / 3)], rtol=close)
    roots = BY_NAME["root_whole"].kernel(x).astype(np.complex128)
    exact = [np.sqrt(complex(z) / 4.0**k) * 2.0**k for z, k in zip(x, (8, 8, -40, -40), strict=True)]
    assert (np.abs(roots - exact) <= close * np.abs(exact) + tiny).all()
    logs = BY_NAME["logarithm_whole"].kernel(x).astype(np.complex128)
    shifted = [np.log(complex(z) / 4.0**k) + k * np.log(4.0) for z, k in zip(x, (8, 8, -40, -40), strict=True)]
    assert (np.abs(logs - shifted) <= close * np.abs(shifted)).all()
    high = np.log(limits.max)
    z = np.array([complex(high * 1.02, np.pi / 2 - limits.eps)], dtype)
    assert np.isfinite(BY_NAME["exponential_whole"].kernel(z).imag).all() == np.isfinite(np.exp(z.astype(np.clongdouble)).imag.astype(limits.dtype)).all()


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_views(dtype: type, device: str) -> None:
    rng = np.random.default_rng(3)
    x, y = draw(rng, 66, dtype), draw(rng, 33, dtype)
    for view in (x[::2], x[32::-1], np.broadcast_to(x[:1], 33), x.reshape(33, 2)[:, 1], x.reshape(2, 33).T[:, 0]):
        np.testing.assert_allclose(multiply(view, y, device=device), view * y, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_that_are_given(dtype: type) -> None:
    rng = np.random.default_rng(4)
    x, y = draw(rng, 33, dtype), draw(rng, 33, dtype)
    out = np.zeros(33, dtype)
    assert multiply(x, y, out=out) is out
    np.testing.assert_allclose(out, x * y, rtol=1e-5)
    wide = np.zeros(66, dtype)
    multiply(x, y, out=wide[::2])
    np.testing.assert_allclose(wide[::2], x * y, rtol=1e-5)
    assert (wide[1::2] == 0).all()
    with pytest.raises(UserError, match="has dtype float64, and the result is complex"):
        multiply(x, y, out=np.zeros((33, 2)))


def test_floats_after_complex_numbers() -> None:
    """Code for pairs never takes arrays of two columns."""
    sums = from_text("def sums(x: tw.Array) -> tw.Array:\n    return x.sum()\n")
    z = np.array([1 + 2j, 3 - 5j], np.complex64)
    for _ in range(3):
        assert sums(z) == 4 - 3j
        assert sums(z.view(np.float32).reshape(2, 2)) == 1
        assert sums(z.astype(np.complex128)) == 4 - 3j


def test_numbers_as_arguments() -> None:
    scale = from_text("def scale(x: tw.Array, s: complex = 2j) -> tw.Array:\n    return x * s\n")
    x = np.arange(5, dtype=np.float32)
    assert scale(x).dtype == np.complex64
    np.testing.assert_array_equal(scale(x), x * 2j)
    np.testing.assert_array_equal(scale(x, 1 - 1j), x * (1 - 1j))
    np.testing.assert_array_equal(scale(x.astype(np.complex64), np.complex64(3j)), x * 3j)
    assert scale(x.astype(np.complex64), np.complex128(3j)).dtype == np.complex128
    assert scale(x, 2.0).dtype == np.float32


def test_mean_along_an_axis() -> None:
    mean = from_text("def mean(x: tw.Array) -> tw.Array:\n    return x.mean(axis=0)\n")
    x = draw(np.random.default_rng(5), 35, np.complex128).reshape(5, 7)
    for device in ("cpu", "emulator"):
        np.testing.assert_allclose(mean(x, device=device), x.mean(axis=0), rtol=1e-12)


PRODUCTS = {
    "plain": ("x @ y", lambda x, y: x @ y),
    "conjugate on the right": ("x @ y.conj()", lambda x, y: x @ y.conj()),
    "conjugate on the left": ("x.conj() @ y", lambda x, y: x.conj() @ y),
    "both": ("x.conj() @ y.conj()", lambda x, y: (x @ y).conj()),
    "of real and complex": ("x.real @ y", lambda x, y: x.real @ y),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_matrices_are_products_of_their_parts(name: str, device: str, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_WARN", "error")  # plain loops in place of a product would be an error
    text, reference = PRODUCTS[name]
    kernel, rng = from_text(f"def product(x, y):\n    return {text}\n"), np.random.default_rng(5)
    for m, k, n in ((1, 1, 1), (5, 31, 33), (33, 7, 2)):
        x, y = draw(rng, m * k, dtype).reshape(m, k), draw(rng, k * n, dtype).reshape(k, n)
        found = kernel(x, y, device=device)
        wanted = reference(x.astype(np.complex128), y.astype(np.complex128))
        assert found.dtype == dtype
        assert np.abs(found - wanted).max() <= 4 * k * np.finfo(dtype).eps * np.abs(x).max() * np.abs(y).max()


def test_in_place_and_scatter() -> None:
    turn = from_text("def turn(x: tw.InOut) -> None:\n    (n,) = x.shape\n    for i in tw.grid(n):\n        x[i] *= 1j\n")
    x = np.array([1, 2j, 3 + 4j], np.complex64)
    turn(x)
    np.testing.assert_array_equal(x, [1j, -2, -4 + 3j])
    bins = from_text("def bins(k: tw.Array, w: tw.Array) -> tw.Array:\n    out = tw.zeros((4,), w.dtype)\n    for i in tw.grid(k.shape[0]):\n        out[k[i]] += w[i]\n    return out\n")
    k = np.array([0, 1, 1, 3, 0], np.int32)
    w = np.array([1j, 2, 3j, 4, 5 + 5j], np.complex128)
    for device in ("cpu", "emulator"):
        np.testing.assert_array_equal(bins(k, w, device=device), [5 + 6j, 2 + 3j, 0, 4])


def test_kernels_that_call_kernels() -> None:
    @tw.kernel
    def square(x: tw.Array) -> tw.Array:
        return x * x

    @tw.kernel
    def fourth(x: tw.Array) -> tw.Array:
        return square(square(x))

    x = np.array([1 + 1j, 2 - 1j], np.complex64)
    np.testing.assert_allclose(fourth(x), x**4, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("x[i] < x[i]", "'<' asks for the order of complex numbers"),
        ("max(x[i], x[i])", "max.. asks for the order of complex numbers"),
        ("x[i] // 2", "'//' does not take complex numbers"),
        ("x[i] % 2", "'%' does not take complex numbers"),
        ("x[i] & x[i]", "takes integers, got complex64"),
        ("~x[i]", "takes integers, got complex64"),
        ("tw.atan(x[i])", r"atan\(\) does not take complex numbers"),
        ("tw.floor(x[i])", r"floor\(\) does not take complex numbers"),
        ("tw.hypot(x[i], x[i])", r"hypot\(\) does not take complex numbers"),
        ("tw.bitcast(x[i], tw.i64)", r"bitcast\(\) does not take complex numbers"),
        ("tw.f32(x[i])", "would lose its imaginary part in f32"),
        ("tw.complex(x[i], 1.0)", r"complex\(\) takes real numbers, got complex64"),
        ("x[x[i]]", "index"),
        ("tw.gelu(x[i])", "does not take complex numbers|order of complex"),
    ],
)
def test_refused_with_the_line(text: str, match: str) -> None:
    kernel = from_text(f"def wrong(x: tw.Array) -> tw.Array:\n    (n,) = x.shape\n    out = tw.empty(n, x.dtype)\n    for i in tw.grid(n):\n        out[i] = {text}\n    return out\n")
    with pytest.raises(UserError, match=match) as caught:
        kernel(np.ones(3, np.complex64))
    assert caught.value.diagnostics[0].span.line == 6


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("def wrong(x: tw.Array) -> tw.Array:\n    return x.max()\n", "order of complex numbers"),
        ("def wrong(x: tw.Array) -> tw.Array:\n    return x.argmin()\n", r"argmin\(\) does not take complex numbers"),
        ("def wrong(x: tw.Array) -> tw.Array:\n    return tw.var(x)\n", r"var\(\) does not take complex numbers"),
        ("def wrong(x: tw.Array) -> tw.Array:\n    out = tw.zeros(3, tw.f32)\n    for i in tw.grid(3):\n        out[i] = x[i]\n    return out\n", "'out' is f32, and complex64 does not fit it"),
        ("def wrong(x: tw.Array) -> tw.Array:\n    out = tw.zeros(3, tw.f32)\n    for i in tw.grid(3):\n        out[i] = 2j\n    return out\n", "2j does not fit f32"),
        ("def wrong(x: tw.Array, k: tw.Array) -> tw.Array:\n    out = tw.ones(3, x.dtype)\n    for i in tw.grid(3):\n        out[k[i]] *= x[i]\n    return out\n", "multiply elements of 'out', which is complex64"),
        ('def wrong(x: tw.Array) -> tw.Array:\n    out = tw.zeros(3, tw.f32)\n    for i in range(3):\n        out[i] = 1.0\n        print(x[i])\n    return out\n', "a complex number cannot be printed"),
        ("def wrong(x: tw.Array, s: float) -> tw.Array:\n    return x * s\n", "'s' must be a real number"),
    ],
)
def test_refused(text: str, match: str) -> None:
    kernel = from_text(text)
    others = {"k": np.zeros(3, np.int32), "s": 1j}
    with pytest.raises(UserError, match=match):
        kernel(np.ones(3, np.complex64), *(others[n] for n in kernel.parameter_names[1:]))


def test_unsupported_widths() -> None:
    with pytest.raises(UserError, match="which has the other byte order"):
        multiply(np.ones(3, ">c8"), np.ones(3, np.complex64))
    with pytest.raises(UserError, match="would lose data"):
        from_text("def mixed(x: tw.Array, k: tw.Array) -> tw.Array:\n    return x * k\n")(np.ones(3, np.complex64), np.ones(3, np.int64))


def test_stages_name_the_dtype() -> None:
    from tilewright.tree.typed_text import show

    x = np.ones(3, np.complex64)
    text = show(multiply.stages(x, x).typed)
    assert "x: complex64[" in text and "out: complex64[" in text
    from tilewright.tree.show import show as show_syntax

    assert "2j" in show_syntax(BY_NAME["subtract_loop"].kernel.function)


_LEAVES = st.sampled_from(["x", "y", "2j", "1.5", "x.real", "(3 - 1j)", "abs(y)"])
_EXPRESSIONS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda e: f"({e} / (2 + abs({e})))"), inner.map(lambda e: f"(-{e})"), inner.map(lambda e: f"tw.exp(1j * tw.real({e}))"), inner.map(lambda e: f"tw.conj({e})"),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(_EXPRESSIONS)
def test_random_expressions(expression: str) -> None:
    kernel = from_text(f"def random_one(x: tw.Array, y: tw.Array) -> tw.Array:\n    return x * 0 + {expression}\n")
    rng = np.random.default_rng(7)
    x, y = draw(rng, 33, np.complex128), draw(rng, 33, np.complex128)

    class Words:
        exp, conj, real = np.exp, np.conj, np.real

    want = x * 0 + eval(expression, {"tw": Words, "x": x, "y": y})
    got = kernel(x, y)
    # The largest value on the way to a result is below this.
    assert np.abs(got - want).max() <= 1e-11 * (1 + np.abs(want).max()) * 100
