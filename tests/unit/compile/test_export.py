"""Exported kernels: used from Python without Tilewright, from C, and as libraries of other machines."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import CompilerBug, UserError
from tilewright.base.target import parse_target
from tilewright.codegen.host.shared_library import ARM, _bind_arm, _Object, _stub, shared_library
from tilewright.compile.export import export_target


@tw.kernel
def shift_rows(x: tw.Array, step: int, gain: tw.f32) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j] = x[i, j] * gain + step
    return out


@tw.kernel
def column_norms(x: tw.Array) -> tw.Array:
    """Two loops: the sums are scratch."""
    n, m = x.shape
    totals = tw.empty((m,), tw.f32)
    for j in tw.grid(m):
        total = 0.0
        for i in range(n):
            total += x[i, j] * x[i, j]
        totals[j] = total
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        out[i, j] = x[i, j] / tw.sqrt(totals[j])
    return out


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    n, k = a.shape
    m = b.shape[1]
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


def run(folder: Path, text: str) -> str:
    """Run Python text in a process that cannot import Tilewright."""
    guard = "import sys\nsys.modules['tilewright'] = None\nimport numpy as np\nrng = np.random.default_rng(0)\n"
    done = subprocess.run([sys.executable, "-c", guard + text], cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="libraries are made for Linux")


@needs_linux
def test_elementwise_in_python(tmp_path: Path) -> None:
    x = np.zeros((4, 5), np.float32)
    written = tw.export(shift_rows, x, 3, np.float32(2), folder=tmp_path)
    assert sorted(p.name for p in written) == ["libshift_rows.so", "shift_rows.h", "shift_rows.o", "shift_rows.py"]
    run(
        tmp_path,
        """
from shift_rows import shift_rows
for shape in ((1, 1), (31, 33), (0, 7), (257, 1031)):
    x = rng.standard_normal(shape).astype("f4")
    for threads in (1, 3):
        out = np.full(shape, np.nan, "f4")
        assert shift_rows(x, 3, 1.5, out=out, threads=threads) is out
        np.testing.assert_allclose(out, x.astype("f8") * 1.5 + 3, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(shift_rows(x, -3, 0.5), x.astype("f8") * 0.5 - 3, rtol=1e-6, atol=1e-6)
""",
    )


@needs_linux
def test_scratch_and_contraction_in_python(tmp_path: Path) -> None:
    a = np.zeros((4, 5), np.float32)
    tw.export(column_norms, a, folder=tmp_path)
    tw.export(product, a, a, folder=tmp_path, name="times")
    run(
        tmp_path,
        """
from column_norms import column_norms
from times import times
for n, k, m in ((1, 1, 1), (31, 33, 65), (97, 0, 5), (200, 129, 301)):
    a, b = rng.standard_normal((n, k)).astype("f4"), rng.standard_normal((k, m)).astype("f4")
    np.testing.assert_allclose(times(a, b), a.astype("f8") @ b, rtol=1e-4, atol=1e-4)
    if k:
        want = a.astype("f8") / np.sqrt((a.astype("f8") ** 2).sum(0))
        np.testing.assert_allclose(column_norms(a), want, rtol=1e-5)
""",
    )


@tw.kernel
def medians(x: tw.Array) -> tw.Array:
    return tw.median(x, axis=1)


@needs_linux
def test_kernels_that_run_parts_of_others(tmp_path: Path) -> None:
    """Parts have functions of their own, which nobody else sees: two exports can be linked together."""
    tw.export(medians, np.zeros((4, 5), np.float32), folder=tmp_path)
    run(
        tmp_path,
        """
from medians import medians
for shape in ((1, 1), (31, 33), (7, 128)):
    x = rng.standard_normal(shape).astype("f4")
    for threads in (1, 3):
        np.testing.assert_array_equal(medians(x, threads=threads), np.median(x, axis=1))
""",
    )
    for target in ("cpu", "aarch64-neon", "aarch64-sve256"):
        (found,) = (p.read_bytes() for p in tw.export(medians, np.zeros((4, 5), np.float32), target=target, folder=tmp_path) if p.suffix == ".o")
        assert global_functions(found) == {"medians", "medians_with", "medians_using", "medians_scratch_bytes"}


def global_functions(code: bytes) -> set[str]:
    return {symbol.name for symbol in _Object(code).symbols if symbol.bind and symbol.section}


@tw.kernel
def smoothed(u: tw.Array, steps: int) -> tw.Array:
    n, m = u.shape
    a = u * 1.0
    b = u * 1.0
    for _ in range(steps):
        for i, j in tw.grid(n - 2, m - 2):
            b[i + 1, j + 1] = (a[i, j + 1] + a[i + 2, j + 1] + a[i + 1, j] + a[i + 1, j + 2]) / 4
        a, b = b, a
    return a


@needs_linux
def test_ordered_loops_in_python(tmp_path: Path) -> None:
    tw.export(smoothed, np.zeros((4, 5), np.float32), 3, folder=tmp_path)
    run(
        tmp_path,
        """
from smoothed import smoothed
for shape in ((3, 3), (33, 65), (300, 401)):
    for steps in (0, 1, 2, 9):
        x = rng.random(shape).astype("f4")
        a, b = x.copy(), x.copy()
        for _ in range(steps):
            b[1:-1, 1:-1] = (a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]) / 4
            a, b = b, a
        for threads in (1, 3):
            np.testing.assert_allclose(smoothed(x, steps, threads=threads), a, rtol=1e-5)
""",
    )


@needs_linux
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("times(x, x)", "'b' has shape (4, 5), but (5, 5) is needed"),
        ("times(x.astype('f8'), x)", "'a' has elements of type <f8, but this code takes f32"),
        ("times(x[:, ::2], x[:3])", "'a' has strides (5, 2) (in elements), but this code was made for (3, 1)"),
        ("times(x)", "times takes a, b; got 1 argument(s)"),
        ("times(x, 3)", "'b' is a int, not an array with __array_interface__"),
        ("times(x, x[0])", "'b' has 1 axes, but this code takes 2"),
        ("times(x, x.T.copy(), out=(x, x))", "out= has 2 array(s), but there are 1 results"),
        ("times(x, x.T.copy(), out=x)", "'out' has shape (4, 5), but (4, 4) is needed"),
    ],
)
def test_wrong_calls(tmp_path_factory: pytest.TempPathFactory, call: str, message: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "wrong_calls"
    if not (folder / "times.py").exists():
        tw.export(product, np.zeros((4, 5), np.float32), np.zeros((5, 4), np.float32), folder=folder, name="times")
    text = f"from times import times\nx = np.zeros((4, 5), 'f4')\ntry:\n    {call}\nexcept (ValueError, TypeError) as error:\n    print(error)"
    assert run(folder, text).replace("product takes", "times takes").strip() == message


CALLER = """
#include <stdio.h>
#include <stdlib.h>
#include "column_norms.h"
#include "times.h"

static int pieces;
static void runner(void *context, tilewright_body body, void *slots, int64_t blocks) {
    *(int *)context += 1;
    for (int64_t b = blocks; b-- > 0; ++pieces) body(slots, b, b + 1);
}

int main(void) {
    enum { N = 70, K = 40, M = 50 };
    float *a = malloc(4 * N * K), *b = malloc(4 * K * M), *out = malloc(4 * N * M), *again = malloc(4 * N * M);
    for (int i = 0; i < N * K; ++i) a[i] = (float)(i % 13) - 6;
    for (int i = 0; i < K * M; ++i) b[i] = (float)(i % 7) - 3;
    int launches = 0;
    if (times(a, b, out, N, K, M) || times_with(a, b, again, N, K, M, runner, &launches)) return 1;
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < M; ++j) {
            double total = 0;
            for (int p = 0; p < K; ++p) total += (double)a[i * K + p] * b[p * M + j];
            if (out[i * M + j] != (float)total || again[i * M + j] != (float)total) return 2;
        }
    if (column_norms(a, again, N, K)) return 3;
    printf("%d launch, %s\\n", launches, times_error(times(a, b, out, -1, K, M)));
    return pieces > 0 ? 0 : 4;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler")
@pytest.mark.parametrize("linked", ["objects", "libraries"])
def test_from_c(tmp_path: Path, linked: str) -> None:
    a = np.zeros((4, 5), np.float32)
    tw.export(product, a, np.zeros((5, 4), np.float32), folder=tmp_path, name="times")
    tw.export(column_norms, a, folder=tmp_path)
    (tmp_path / "main.c").write_text(CALLER)
    what = ["times.o", "column_norms.o"] if linked == "objects" else ["-L.", "-ltimes", "-lcolumn_norms", "-Wl,-rpath,."]
    subprocess.run(["cc", "-Wall", "-Werror", "-std=c11", "main.c", *what, "-o", "main"], cwd=tmp_path, check=True, timeout=600)
    done = subprocess.run(["./main"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "1 launch, a size is negative\n")


def test_files_for_a_gpu(tmp_path: Path) -> None:
    a = np.zeros((256, 256), tw.bf16.numpy)
    written = {p.name: p for p in tw.export(product, a, a, target="sm_90a", folder=tmp_path)}
    assert {"product.ptx", "product.h", "product.py"} <= written.keys()
    assert ".target sm_90a" in written["product.ptx"].read_text()
    text = written["product.py"].read_text()
    assert "tilewright." not in text.replace("tilewright export", "")
    if shutil.which("cc"):
        subprocess.run(["cc", "-Wall", "-Werror", "-std=c11", "-fsyntax-only", "-x", "c", "product.h"], cwd=tmp_path, check=True, timeout=600)
    run(tmp_path, "import product\nd = product.DESCRIPTION\nassert d['launches'][0]['maps'] and d['code'][-1] == 'product.ptx'")


@pytest.mark.parametrize("target", ["aarch64-neon", "x86-64-avx2", "x86-64-sse4.1"])
def test_libraries_of_other_machines(tmp_path: Path, target: str) -> None:
    """Only the form can be looked at here: they are for other machines."""
    written = {p.name: p.read_bytes() for p in tw.export(column_norms, np.zeros((4, 5), np.float32), target=target, folder=tmp_path)}
    library = written["libcolumn_norms.so"]
    assert struct.unpack_from("<HH", library, 16) == (3, 183 if target.startswith("aarch64") else 62)
    assert b"column_norms_with\0" in library and b"malloc\0" in library


@pytest.mark.parametrize(
    ("kind", "word", "target", "place", "bound"),
    [
        (275, 0x90000010, 0x12345, 0x10008, 0xD0000010),  # adrp x16, two pages on
        (275, 0x90000000, 0x1008, 0x3000, 0xD0FFFFE0),  # adrp x0, two pages back
        (277, 0x91000000, 0x12345, 0, 0x910D1400),  # add x0, x0, #0x345
        (286, 0xF9400210, 0x12348, 0, 0xF941A610),  # ldr x16, [x16, #0x348]
        (299, 0x3DC00000, 0x12340, 0, 0x3DC0D000),  # ldr q0, [x0, #0x340]
        (283, 0x94000000, 0x1008, 0x1000, 0x94000002),  # bl, two instructions on
        (282, 0x14000000, 0x1000, 0x1008, 0x17FFFFFE),  # b, two instructions back
        (261, 0, 0x1000, 0x1008, 0xFFFFFFF8),
    ],
)
def test_addresses_in_arm_code(kind: int, word: int, target: int, place: int, bound: int) -> None:
    data = bytearray(struct.pack("<I", word))
    _bind_arm(data, 0, kind, target, place)
    assert struct.unpack("<I", data)[0] == bound


def test_jump_in_arm_code() -> None:
    """adrp x16, one page on; ldr x16, [x16, #8]; br x16."""
    assert struct.unpack("<4I", _stub(ARM, 0x10010, 0x11008)) == (0xB0000010, 0xF9400610, 0xD61F0200, 0xD4200000)


def test_matrix_units_are_left_out() -> None:
    assert export_target(parse_target("x86-64-amx")).name == "x86-64-avx512"
    assert export_target(parse_target("x86-64-avx2")).name == "x86-64-avx2"


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"export\(\) takes a kernel, not a function"):
        tw.export(lambda x: x, np.zeros(3))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        tw.export(shift_rows, np.zeros((2, 2), np.float32), 1, 1.0, folder=tmp_path / "file")
    with pytest.raises(CompilerBug, match="not a little-endian 64-bit ELF object"):
        shared_library(b"MZ", ("f",), "libf.so")


@needs_linux
def test_loaders_take_nothing_for_what_it_is_not(tmp_path: Path) -> None:
    """Odd strides, read-only and overlapping results, other element types, masks, numbers that do not fit: a result, or an error."""
    tw.export(shift_rows, np.zeros((4, 5), np.float32), 3, np.float32(2), folder=tmp_path)
    run(
        tmp_path,
        """
from shift_rows import shift_rows
def refused(kind, *args, **keywords):
    try:
        shift_rows(*args, **keywords)
    except kind as error:
        return str(error)
    raise AssertionError(f"{args} {keywords} was taken")
x = rng.standard_normal((4, 6)).astype("f4")
good = x * np.float32(2) + 3
np.testing.assert_allclose(shift_rows(x, 3, 2.0), good, rtol=1e-6)
packed = np.zeros((4, 6), [("a", "<f4"), ("b", "<u2")])
assert "not whole elements" in refused(ValueError, packed["a"], 3, 2.0)
shifted = np.frombuffer(b"x" + x.tobytes(), "f4", 24, 1).reshape(4, 6)
assert "not a multiple" in refused(ValueError, shifted, 3, 2.0)
for other in (x[:, ::-1], x[::2], x.T, np.broadcast_to(x[0], (4, 6))):
    refused(ValueError, other, 3, 2.0)
for other in (x.astype("f8"), x.astype(">f4"), x.astype("i4"), np.ma.array(x, mask=x > 0), x.tolist(), None, "x"):
    refused(TypeError, other, 3, 2.0)
refused(ValueError, x[0], 3, 2.0)
class Null:
    __array_interface__ = {"version": 3, "shape": (4, 6), "typestr": "<f4", "data": (0, False)}
assert "no memory" in refused(ValueError, Null(), 3, 2.0)
out = np.zeros((4, 6), "f4")
out.flags.writeable = False
assert "read-only" in refused(ValueError, x, 3, 2.0, out=out)
assert not out.any()
for wrong in (np.zeros((4, 7), "f4"), np.zeros((6, 4), "f4").T, np.zeros((4, 12), "f4")[:, ::2]):
    refused(ValueError, x, 3, 2.0, out=wrong)
    assert not wrong.any()
refused(TypeError, x, 3, 2.0, out=np.zeros((4, 6), ">f4"))
class Copying:
    def __array__(self, *args, **keywords):
        return np.zeros((4, 6), "f4")
assert "does not share its memory" in refused(TypeError, x, 3, 2.0, out=Copying())
for number in (2.5, "3", None, 1j, np.ones(2, int)):
    refused(TypeError, x, number, 2.0)
for number in (1 << 63, -(1 << 63) - 1, np.uint64(1 << 63)):
    refused(ValueError, x, number, 2.0)
refused(TypeError, x, 3, "2")
np.testing.assert_allclose(shift_rows(x, np.int8(3), np.float64(2)), good, rtol=1e-6)
# In place, and shifted by a row: the inputs are read as they were.
memory = np.concatenate([x, np.zeros((1, 6), "f4")])
assert shift_rows(memory[:4], 3, 2.0, out=memory[1:]).base is not None
np.testing.assert_allclose(memory[1:], good, rtol=1e-6)
same = x.copy()
shift_rows(same, 3, 2.0, out=same)
np.testing.assert_allclose(same, good, rtol=1e-6)
""",
    )


@needs_linux
def test_loaders_tell_small_floats_apart(tmp_path: Path) -> None:
    import ml_dtypes

    tw.export(shift_rows, np.zeros((4, 5), ml_dtypes.bfloat16), 3, np.float32(2), folder=tmp_path)
    run(
        tmp_path,
        """
import ml_dtypes
from shift_rows import shift_rows
x = np.ones((2, 3), ml_dtypes.bfloat16)
out = shift_rows(x, 3, 2.0)
try:
    shift_rows(np.ones((2, 3), "f2"), 3, 2.0)
except TypeError as error:
    assert "float16" in str(error)
else:
    raise AssertionError("float16 was taken for bfloat16")
""",
    )


@needs_linux
def test_arrays_without_memory_are_refused_in_c(tmp_path: Path) -> None:
    """One that has elements; an empty one need not have any."""
    tw.export(shift_rows, np.zeros((4, 5), np.float32), 3, np.float32(2), folder=tmp_path)
    function = ctypes.CDLL(str(tmp_path / "libshift_rows.so")).shift_rows
    header = (tmp_path / "shift_rows.h").read_text()
    assert 'case -5: return "an array with elements is NULL";' in header
    x, out = np.ones((4, 5), np.float32), np.zeros((4, 5), np.float32)

    def call(x: int | None, out: int | None, rows: int, columns: int) -> int:
        sizes = ctypes.c_int64(rows), ctypes.c_int64(columns)
        return int(function(ctypes.c_void_p(x), ctypes.c_int64(3), ctypes.c_float(2), ctypes.c_void_p(out), *sizes))

    assert call(x.ctypes.data, out.ctypes.data, 4, 5) == 0
    assert (out == 5).all()
    assert call(None, out.ctypes.data, 4, 5) == call(x.ctypes.data, None, 4, 5) == call(None, None, 1, 1) == -5
    assert call(None, None, 0, 5) == call(None, None, 4, 0) == 0
