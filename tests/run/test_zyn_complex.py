"""Complex numbers in ZynML: arrays made between blocks, and blocks whose results are complex, alone and one after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright.frontend.zyn.format import format_text

TEXT = """pipeline turn(x):
    let a = compute(x) {
        for i in 0..n:
            out[i] = x[i] * complex(0.0, 2.0)
    }
    let b = compute(a) {
        for i in 0..n:
            out[i] = a[i] * a[i] + 1
    }
    return b
let z = zeros(3, complex64)
let o = ones(2, 3, complex128)
let y = turn(x)
"""


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_blocks_with_complex_results(dtype: type, tmp_path: Path) -> None:
    path = tmp_path / "turn.zyn"
    path.write_text(TEXT)
    program = tw.load(str(path))
    for size in (1, 33, 33, 5, 33):
        x = np.arange(size).astype(dtype)
        found = program.run(x=x)
        wanted = np.complex64 if np.dtype(dtype).itemsize // (2 if np.dtype(dtype).kind == "c" else 1) == 4 else np.complex128
        assert found["y"].dtype == wanted
        np.testing.assert_allclose(found["y"], (x * 2j) ** 2 + 1, rtol=1e-6)
        assert found["z"].dtype == np.complex64 and (found["z"] == 0).all()
        assert found["o"].shape == (2, 3) and found["o"].dtype == np.complex128


LITERALS = """let a = 1 + 2j
let b = compute(x) {
    for i in 0..n: out[i] = x[i] * 2j - 1.5e0j
}
fn turn(v): return v * a
fn same(v: complex) -> complex: return v
let c = turn(b) * same(s)
let d = [abs(3 + 4j), real(a), imag(a), conj(a), a ** 2, complex(1, inf), complex(f32(1), f32(2)), -2j, a == 1 + 2j]
"""


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.complex128])
def test_literals(dtype: type, device: str) -> None:
    x = np.arange(5).astype(dtype)
    wide = x.astype(np.complex128)
    for factor in (2j, 3.0, np.complex64(1 - 1j)):
        found = tw.load(LITERALS).run(x=x, s=factor, device=device)
        np.testing.assert_allclose(found["b"], wide * 2j - 1.5j, rtol=1e-6)
        np.testing.assert_allclose(found["c"], (wide * 2j - 1.5j) * (1 + 2j) * complex(factor), rtol=1e-6)
        assert np.asarray(found["c"]).dtype == (np.complex128 if dtype is np.complex128 else np.complex64)
        assert found["a"] == 1 + 2j
        assert found["d"] == [5.0, 1.0, 2.0, 1 - 2j, -3 + 4j, complex(1, np.inf), 1 + 2j, -2j, True]
    assert format_text(LITERALS) == format_text(format_text(LITERALS))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("let a = 2j < 3\n", "no order, which < needs"),
        ("let a = max(1, 2j)\n", "no order, which max needs"),
        ("let a = zeros(2j)\n", "an extent is 2j, no whole number"),
        ("fn f(s: float): return s\nlet a = f(2j)\n", "'s' is 2j, its type says float"),
        ("fn f(s: int): return s\nlet a = f(2j)\n", "'s' is 2j, its type says int"),
        ("let a = 1e400j\n", "too large for a float"),
        ("let a = 3jx\n", "unknown unit 'jx'"),
        ("let a = 2 j\n", "expected the end of the line, found 'j'"),
    ],
)
def test_what_literals_cannot_do(text: str, message: str) -> None:
    with pytest.raises(tw.UserError, match=message):
        tw.load(text).run()
