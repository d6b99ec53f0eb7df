"""Whole pipelines, exported: one C function runs all kernels in memory that the caller gives, and says what is wrong with a call."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.base.errors import TargetLimit, UserError
from tilewright.cli.main import cli
from tilewright.zyn.load import load

COMPILER = shutil.which("clang-19") or shutil.which("clang") or shutil.which("cc")
needs_c = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs Linux and a C compiler (clang-19, clang or cc)"
)

SCORES = """
pipeline scores(x: tensor[n, k], w: tensor[k, m], gain, shift):
    let eps = 0.001
    let power = 2
    let product = compute(x, w) {
        for i in 0..n, j in 0..m:
            var total = 0.0
            for p in 0..k: total += x[i, p] * w[p, j]
            out[i, j] = total
    }
    let sums = compute(product, eps, power, gain) {
        for i in 0..n:
            var total = 0.0
            for j in 0..m: total += product[i, j] * product[i, j]
            out[i] = gain * (total + eps) * f32(power)
    }
    let scaled = compute(product, sums, gain, shift) {
        for i in 0..n, j in 0..m: out[i, j] = gain * product[i, j] / sqrt(sums[i]) + f32(shift)
    }
    return (scaled, sums)
"""


def joined(text: str) -> str:
    """The same program, whose blocks stay blocks: a block with a vector width cannot be written into another function, and is joined with the others."""
    assert "@vector" not in text
    return text.replace(") {", ") @vector(4) {", 1)


CALLER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "scores.h"

static int threads_of_runner;
static void runner(void *context, tilewright_body body, void *slots, int64_t blocks) {
    (void)context; ++threads_of_runner;
    for (int64_t b = blocks; b-- > 0;) body(slots, b, b + 1);
}

int main(void) {
    enum { N = 37, K = 19, M = 45, GUARD = 64 };
    static float x[N * K], w[K * M], scaled[N * M], sums[N], again[N * M], again_sums[N];
    FILE *in = fopen("in.bin", "rb"), *out = fopen("out.bin", "wb");
    if (!in || !out || fread(x, 4, N * K, in) != N * K || fread(w, 4, K * M, in) != K * M) return 1;
    int64_t bytes = scores_scratch_bytes(3, N, K, M);
    if (bytes <= 0) return 2;
    unsigned char *memory = malloc(bytes + GUARD + 1);
    memset(memory, 0xA5, bytes + GUARD + 1);
    unsigned char *scratch = memory + 1;  /* at an odd address */
    int32_t code = scores_using(x, w, 1.5f, 3, scaled, sums, N, K, M, scratch, bytes, NULL, NULL);
    if (code) { printf("%s\\n", scores_error(code)); return 3; }
    for (int i = 0; i < GUARD; ++i) if (scratch[bytes + i] != 0xA5) return 4;
    if (memory[0] != 0xA5) return 5;
    fwrite(scaled, 4, N * M, out); fwrite(sums, 4, N, out); fclose(out);
    if (scores_using(x, w, 1.5f, 3, again, again_sums, N, K, M, scratch, bytes, runner, NULL)) return 6;
    if (memcmp(scaled, again, sizeof scaled) || memcmp(sums, again_sums, sizeof sums)) return 7;
    memset(again, 0, sizeof again);
    if (scores(x, w, 1.5f, 3, again, again_sums, N, K, M) || memcmp(scaled, again, sizeof scaled)) return 8;
    memset(again, 0x11, sizeof again);
    printf("%s\\n", scores_error(scores_using(x, w, 1.5f, 3, again, again_sums, N, K, M, scratch, bytes - 1, NULL, NULL)));
    printf("%s\\n", scores_error(scores_using(x, w, 1.5f, 3, again, again_sums, N, K, M, NULL, bytes, NULL, NULL)));
    printf("%s\\n", scores_error(scores_using(x, w, 1.5f, 3, again, again_sums, -1, K, M, scratch, bytes, NULL, NULL)));
    printf("%s\\n", scores_error(scores_using(NULL, w, 1.5f, 3, again, again_sums, N, K, M, scratch, bytes, NULL, NULL)));
    printf("%s\\n", scores_error((int32_t)scores_scratch_bytes(3, -1, K, M)));
    printf("%s\\n", scores_error((int32_t)scores_scratch_bytes(3, INT64_MAX / 2, K, INT64_MAX / 2)));
    for (int i = 0; i < N * M; ++i) { int bits; memcpy(&bits, &again[i], 4); if (bits != 0x11111111) return 9; }
    return threads_of_runner > 0 ? 0 : 10;
}
"""


def built(folder: Path, source: str, objects: list[str], name: str = "main") -> subprocess.CompletedProcess[str]:
    """Compile a C program against objects of the folder, and run it there."""
    (folder / f"{name}.c").write_text(source)
    assert COMPILER is not None
    made = subprocess.run(
        [COMPILER, "-Wall", "-Wextra", "-Werror", "-std=c11", f"{name}.c", *objects, "-lm", "-o", name],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return subprocess.run([f"./{name}"], cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def invoked(*arguments: str) -> str:
    done = CliRunner().invoke(cli, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@needs_c
@pytest.mark.parametrize("form", ["one kernel function", "joined blocks"])
def test_a_pipeline_from_c(tmp_path: Path, form: str) -> None:
    (tmp_path / "scores.zyn").write_text(SCORES if form == "one kernel function" else joined(SCORES))
    said = invoked(
        "export",
        str(tmp_path / "scores.zyn"),
        "--pipeline",
        "scores",
        "--args",
        "x=f32[*,*] w=f32[*,*] gain=float shift=int",
        "-o",
        str(tmp_path),
    )
    assert re.search(r"scores\(x: f32\[\*, \*\], w: f32\[\*, \*\], gain: float, shift: int\) in [2-9] kernels", said)
    header = (tmp_path / "scores.h").read_text()
    # Numbers of the pipeline itself are part of the code; a number that two blocks take is one parameter.
    assert "int32_t scores(const float *x, const float *w, float gain, int64_t shift, float *" in header
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((37, 19)).astype(np.float32), rng.standard_normal((19, 45)).astype(np.float32)
    (tmp_path / "in.bin").write_bytes(x.tobytes() + w.tobytes())
    done = built(tmp_path, CALLER, ["scores.o"])
    assert done.returncode == 0, (done.returncode, done.stdout)
    made = np.frombuffer((tmp_path / "out.bin").read_bytes(), np.float32).astype(np.float64)
    product = x.astype(np.float64) @ w
    sums = 1.5 * ((product**2).sum(1) + 0.001) * 2
    np.testing.assert_allclose(made[37 * 45 :], sums, rtol=1e-5)
    np.testing.assert_allclose(
        made[: 37 * 45].reshape(37, 45), 1.5 * product / np.sqrt(sums)[:, None] + 3, rtol=1e-5, atol=1e-5
    )
    small, negative, null, large = (
        "the scratch memory is NULL or too small",
        "a size is negative",
        "an array with elements is NULL",
        "a number computed from the sizes is more than 64 bits hold",
    )
    assert done.stdout.splitlines() == [small, small, negative, null, negative, large]


@tw.kernel
def centred(x: tw.Array) -> tw.Array:
    """Several kernels: the means are scratch."""
    n, m = x.shape
    means = tw.empty((m,), tw.f32)
    for j in tw.grid(m):
        total = 0.0
        for i in range(n):
            total += x[i, j]
        means[j] = total / n
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        out[i, j] = x[i, j] - means[j]
    return out


CENTRED = """
#include <stdio.h>
#include <stdlib.h>
#include "centred.h"
int main(void) {
    enum { N = 50, M = 33 };
    static float x[N * M], out[N * M];
    FILE *in = fopen("in.bin", "rb"), *file = fopen("out.bin", "wb");
    if (!in || !file || fread(x, 4, N * M, in) != N * M) return 1;
    int64_t bytes = centred_scratch_bytes(N, M);
    void *scratch = malloc(bytes);
    int32_t code = centred_using(x, out, N, M, scratch, bytes, NULL, NULL);
    fwrite(out, 4, N * M, file); fclose(file);
    printf("%d %s\\n", (int)(bytes >= 4 * M), centred_error(centred_using(x, out, N, M, NULL, 0, NULL, NULL)));
    return code;
}
"""


@needs_c
def test_a_python_kernel_that_is_several_from_c(tmp_path: Path) -> None:
    tw.export(centred, "f32[*,*]", folder=tmp_path)
    x = np.random.default_rng(1).standard_normal((50, 33)).astype(np.float32)
    (tmp_path / "in.bin").write_bytes(x.tobytes())
    done = built(tmp_path, CENTRED, ["centred.o"])
    assert (done.returncode, done.stdout) == (0, "1 the scratch memory is NULL or too small\n")
    made = np.frombuffer((tmp_path / "out.bin").read_bytes(), np.float32).reshape(50, 33)
    np.testing.assert_allclose(made, x - x.astype(np.float64).mean(0), rtol=1e-5, atol=1e-5)


def loaded(folder: Path, name: str) -> object:
    """The exported function, by its loader."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"exported_{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are made for Linux")
def test_an_image_pipeline(tmp_path: Path) -> None:
    """Eleven kernels, two results, a table that indices are looked up in: as a call of the program gives them."""
    program = load("examples/images/pipeline.zyn")
    tw.export(program.develop, "u8[*,*]", "float", folder=tmp_path)
    function = loaded(tmp_path, "develop")
    for shape in ((8, 10), (33, 47)):
        raw = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        picture, edges = function(raw, 0.6)  # type: ignore[operator]
        wanted = program.develop(raw, 0.6)
        np.testing.assert_array_equal(picture, wanted[0])
        np.testing.assert_array_equal(edges, wanted[1])


HEADS = """
pipeline heads(x, count):
    let twice = compute(x) @vector(4) { for i in 0..n, j in 0..m: out[i, j] = 2.0 * x[i, j] }
    let split = reshape(twice, [x.shape[0], count, 4])
    let sums = compute(split) {
        for i in 0..n, h in 0..c:
            var total = 0.0
            for k in 0..d: total += split[i, h, k]
            out[i, h] = total
    }
    return sums
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are made for Linux")
def test_extents_that_views_depend_on_are_part_of_the_code(tmp_path: Path) -> None:
    program = load(HEADS)
    with pytest.raises(UserError, match="reshape"):
        tw.export(program.heads, "f32[*,*]", "int", folder=tmp_path)
    tw.export(program.heads, "f32[6,8]", 2, folder=tmp_path)
    function = loaded(tmp_path, "heads")
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    np.testing.assert_allclose(function(x), (2 * x.astype(np.float64)).reshape(6, 2, 4).sum(2), rtol=1e-5)  # type: ignore[operator]
    for shape in ((6, 12), (7, 8), (3, 16)):
        with pytest.raises(ValueError, match=r"must have|needed"):
            function(np.zeros(shape, np.float32))  # type: ignore[operator]


TYPED = """
pipeline typed(a: tensor[n, n], b: tensor[n, 4]):
    let x = compute(a) { for i in 0..r, j in 0..c: out[i, j] = a[i, j] + 1.0 }
    let y = compute(b) { for i in 0..r, j in 0..c: out[i, j] = b[i, j] * 2.0 }
    return (x, y)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are made for Linux")
@pytest.mark.parametrize("form", ["one kernel function", "joined blocks"])
def test_types_of_a_pipeline_are_checked(tmp_path: Path, form: str) -> None:
    """Its blocks alone would take any of these."""
    tw.export(
        load(TYPED if form == "one kernel function" else joined(TYPED)).typed,
        a="f32[*,*]",
        b="f32[*,*]",
        folder=tmp_path,
    )
    function = loaded(tmp_path, "typed")
    a, b = np.ones((5, 5), np.float32), np.ones((5, 4), np.float32)
    x, y = function(a, b)  # type: ignore[operator]
    assert (x == 2).all() and (y == 2).all()
    for wrong in ((np.ones((5, 6), np.float32), b), (a, np.ones((6, 4), np.float32)), (a, np.ones((5, 3), np.float32))):
        with pytest.raises(ValueError, match=r"by axis|by its type|needed"):
            function(*wrong)  # type: ignore[operator]


OUTER = """
pipeline outer(x, flag, scale=2.5):
    let y = compute(x, scale) @vector(4) { for i in 0..n: out[i] = x[i] * scale }
    let z = compute(y, flag, bias) { for i in 0..n: out[i] = y[i] + (bias if flag else 0.0) }
    return z

pipeline nested(x, flag):
    let y = outer(x, flag)
    let z = compute(y) { for i in 0..n: out[i] = y[i] * 2.0 }
    return z

let r = nested(x, flag)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are made for Linux")
def test_defaults_names_of_the_program_and_conditions(tmp_path: Path) -> None:
    """A default is part of the code, a name of the program is a parameter; a pipeline that stays apart runs by itself."""
    program = load(OUTER)
    tw.export(program.outer, "f32[*]", "bool", bias="float", folder=tmp_path)
    assert (
        "int32_t outer(const float *x, uint8_t flag, float bias, float *z, int64_t n);"
        in (tmp_path / "outer.h").read_text()
    )
    function = loaded(tmp_path, "outer")
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(function(x, True, 3.0), 2.5 * x + 3)  # type: ignore[operator]
    np.testing.assert_array_equal(function(x, False, 3.0), 2.5 * x)  # type: ignore[operator]
    with pytest.raises(UserError, match="pipeline 'outer' needs 'bias'"):
        tw.export(program.outer, "f32[*]", "bool", folder=tmp_path)
    with pytest.raises(UserError, match="pipeline 'nested' does not run as one program"):
        tw.export(program.nested, "f32[*]", "bool", bias="float", folder=tmp_path)


FIRST = "    let y = compute(x) @vector(4) { for i in 0..n: out[i] = x[i] + 1.0 }\n"
"""A block that is no part of another function."""
AROUND = [
    (
        "    let s = x[0]\n    let z = compute(y, s) { for i in 0..n: out[i] = y[i] * s }\n    return z\n",
        "reads an element of an array outside",
    ),
    (
        "    let s = k * 2\n    let z = compute(y, s) { for i in 0..n: out[i] = y[i] + f32(s) }\n    return z\n",
        "'s' is a number that is computed outside blocks",
    ),
    (
        "    let s = x.shape[0]\n    let z = compute(y, s) { for i in 0..n: out[i] = y[i] + f32(s) }\n    return z\n",
        "'s' is a number that is computed outside blocks",
    ),
    (
        "    if k > 1500:\n        return compute(y) { for i in 0..n: out[i] = y[i] * 2.0 }\n    return y\n",
        "depends on sizes or numbers",
    ),
    ("    return y[0:2]\n", "is not what its blocks make"),
    (
        "    let z = compute(y) @strict { for i in 0..n: out[i] = y[i] * 2.0 }\n    return z\n",
        "does not run as one program",
    ),
]


@pytest.mark.parametrize(("rest", "message"), AROUND, ids=["element", "number", "size", "condition", "view", "apart"])
def test_what_is_no_single_program_is_refused(tmp_path: Path, rest: str, message: str) -> None:
    program = load(f"pipeline wrong(x, k):\n{FIRST}{rest}")
    with pytest.raises(UserError, match=re.escape(message)) as error:
        tw.export(program.wrong, "f32[*]", "int", folder=tmp_path)
    assert error.value.diagnostics[0].code == "TW020"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are made for Linux")
@pytest.mark.parametrize("rest", [rest for rest, _ in AROUND[:3]], ids=["element", "number", "size"])
def test_work_around_blocks_that_become_one_function(tmp_path: Path, rest: str) -> None:
    """Elements, numbers and sizes around blocks are part of the code where all is one function."""
    program = load(f"pipeline right(x, k):\n{FIRST.replace('@vector(4) ', '')}{rest}")
    tw.export(program.right, "f32[*]", "int", folder=tmp_path)
    function = loaded(tmp_path, "right")
    for size, k in ((5, 3), (33, 1501), (16, 0)):
        x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        np.testing.assert_allclose(function(x, k), program.right(x, k), rtol=1e-6)  # type: ignore[operator]


def test_wrong_calls(tmp_path: Path) -> None:
    file = tmp_path / "scores.zyn"
    file.write_text(SCORES)

    def refused(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["export", *arguments, "-o", str(tmp_path / "out")])
        assert done.exit_code != 0
        return done.output + str(done.exception or "")

    assert "has no pipeline 'score'" in refused(str(file), "--pipeline", "score")
    assert "has no argument 'y'" in refused(str(file), "--pipeline", "scores", "--args", "y=f32[*]")
    assert "is no ZynML program" in refused("examples/gallery.py", "--pipeline", "scale")
    assert "whole pipeline" in refused(str(file), "--pipeline", "scores", "--kernel", "sums")
    with pytest.raises(TargetLimit, match="whole pipelines are exported for CPUs, not for sm_90a"):
        tw.export(load(SCORES).scores, "f32[*,*]", "f32[*,*]", "float", "int", target="sm_90a", folder=tmp_path / "out")
    with pytest.raises(UserError, match="lacks 'shift'"):
        tw.export(load(SCORES).scores, "f32[*,*]", "f32[*,*]", "float", folder=tmp_path / "out")
    with pytest.raises(UserError, match="must have rank 2, got 1"):
        tw.export(load(SCORES).scores, "f32[*]", "f32[*,*]", "float", "int", folder=tmp_path / "out")
