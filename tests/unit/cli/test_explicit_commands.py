"""`run`, `export`, `inspect` and `compile` find explicit kernels; arguments may be described instead of given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.cli.main import cli

TEXT = """import tilewright as tw


@tw.gpu
def saxpy(a: float, x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    if i < len(y):
        y[i] = a * x[i] + y[i]


@tw.cpu
def total(x: tw.Array, out: tw.Array):
    s = 0.0
    for i in range(len(x)):
        s += x[i]
    out[0] = s


@tw.kernel
def double(x: tw.Array) -> tw.Array:
    return x * 2
"""
X, Y = np.arange(300, dtype=np.float32), np.ones(300, np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "k.py").write_text(TEXT)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    np.save(tmp_path / "o.npy", np.zeros(1, np.float32))
    return tmp_path


def command(folder: Path, name: str, *words: str) -> tuple[int, str]:
    words = tuple(str(folder / w[1:]) if w.startswith("@") else w.replace("=@", f"={folder}/") for w in words)
    result = CliRunner().invoke(cli, [name, str(folder / "k.py"), *words])
    return result.exit_code, result.output


@pytest.mark.parametrize("launch", [(), ("--block", "64"), ("--grid", "5", "--block", "64"), ("--device", "emulator")])
def test_run_launches(folder: Path, launch: tuple[str, ...]) -> None:
    code, output = command(folder, "run", "--kernel", "saxpy", "--in", "a=2", "--in", "x=@x.npy", "--in", "y=@y.npy", "--out", "y=@r.npy", *launch)
    assert code == 0, output
    np.testing.assert_array_equal(np.load(folder / "r.npy"), 2 * X + Y)


def test_run_serial_functions_and_plain_kernels(folder: Path) -> None:
    code, output = command(folder, "run", "--kernel", "total", "--in", "x=@x.npy", "--in", "out=@o.npy")
    assert code == 0 and "44850" in output
    code, output = command(folder, "run", "--kernel", "double", "--in", "x=@x.npy")
    assert code == 0 and "598" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kernel", "saxpy", "--in", "a=2", "--in", "x=@x.npy"), "give --in y=…"),
        (("--kernel", "saxpy", "--in", "q=2"), "--in: saxpy has no argument 'q'"),
        (("--kernel", "nobody",), "has no kernel 'nobody'"),
        (("--kernel", "double", "--grid", "3", "--in", "x=@x.npy"), "--grid does nothing here"),
        (("--kernel", "saxpy", "--in", "a=2", "--in", "x=@x.npy", "--in", "y=@y.npy", "--grid", "a"), "--grid is 'a'"),
    ],
)
def test_run_refuses(folder: Path, words: tuple[str, ...], message: str) -> None:
    code, output = command(folder, "run", *words)
    assert code == 1 and message in output


def test_inspect_and_compile_find_them(folder: Path) -> None:
    code, output = command(folder, "inspect", "--kernel", "total", "--args", "x=f32[*] out=f32[1]")
    assert code == 0 and "arrays written: out" in output and "bytes of code" in output
    code, output = command(folder, "inspect", "--kernel", "saxpy", "--args", "a=float", "--target", "cpu")
    assert code == 0 and "arrays written: y" in output
    code, output = command(folder, "compile", "--kernel", "total", "--args", "x=f32[*] out=f32[1]", "--stage", "thread")
    assert code == 0 and "kernel @total" in output


def test_exported_libraries_run_without_tilewright(folder: Path) -> None:
    for kernel, args in (("saxpy", "a=float"), ("total", "x=f32[*] out=f32[*]")):
        code, output = command(folder, "export", "--kernel", kernel, "--args", args, "--block", "64" if kernel == "saxpy" else "256", "-o", "@out")
        assert code == 0, output
    header = (folder / "out" / "saxpy.h").read_text()
    assert "int32_t saxpy(float a, const float *x, float *y, int64_t grid_x, int64_t x_0, int64_t y_0);" in header
    if not (folder / "out" / "saxpy.py").exists():
        pytest.skip("loaders are written for Linux")
    script = "import sys, numpy as np\nfrom saxpy import saxpy\nfrom total import total\nx, y, o = np.arange(300, dtype='f'), np.ones(300, 'f'), np.zeros(1, 'f')\nsaxpy(2.0, x, y, 5)\ntotal(x, o, 1)\nassert (y == 2 * x + 1).all() and o[0] == 44850\nassert 'tilewright' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=folder / "out")


def test_exported_for_a_gpu(folder: Path) -> None:
    code, output = command(folder, "export", "--kernel", "saxpy", "--args", "a=float", "--block", "64", "--target", "sm_90a", "-o", "@out")
    assert code == 0, output
    assert "TW_SAXPY_0_THREADS 64" in (folder / "out" / "saxpy.h").read_text()
    assert ".entry tw_saxpy_0" in (folder / "out" / "saxpy.ptx").read_text()
    code, output = command(folder, "export", "--kernel", "saxpy", "--args", "a=float", "--target", "wgsl", "-o", "@out")
    assert code == 1


@tw.kernel
def scale(m: tw.Array, v: tw.Array, by: int) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), m.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, j] * v[j] * by
    return out


@tw.gpu
def first(x: tw.Array, out: tw.Array):  # type: ignore[no-untyped-def]
    out[tw.thread.x] = x[tw.thread.x, 0]


def test_texts_describe_arguments(tmp_path: Path) -> None:
    assert scale.compile("f32[64,*]", "f32[*]", 2, target="sm_90a").kind == "ptx"
    assert scale.stages("f64[*,*]", v="f64[*]", by="int").stages.loop.name == "scale"
    assert b".entry" in first[1, 32].compile("f16[*,4]", "f16[*]").code
    assert [p.name for p in tw.export(scale, "f32[*,*]", "f32[*]", "int", folder=tmp_path)][:1] == ["scale.o"]
    assert [p.name for p in tw.export(first[1, 32], "f32[*,*]", "f32[*]", folder=tmp_path)][:1] == ["first.o"]
    for wrong in ("f33[3]", "f32[a]", "hello world", ""):
        with pytest.raises(TypeError, match=r"describes no argument|is no extent"):
            scale.compile(wrong, "f32[*]", 2)
    with pytest.raises(ValueError, match="whose block is part of its code"):
        tw.export(first, "f32[*,*]", "f32[*]")  # type: ignore[call-overload]
