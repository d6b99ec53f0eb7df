"""The command line, run in this process: what each command prints, writes and exits with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tilewright.cli import repository
from tilewright.cli.commands import bench as bench_command
from tilewright.cli.commands import demo as demo_command
from tilewright.cli.commands import demo_tours
from tilewright.cli.commands import info as info_commands
from tilewright.cli.guess import parse_arguments
from tilewright.cli.main import cli
from tilewright.compile import driver, store
from tilewright.compile.cache import DiskCache
from tilewright.execute.devices import devices

EXAMPLES = Path(__file__).parents[3] / "examples"
ZYN = EXAMPLES / "zyn"
KERNELS = """
import tilewright as tw

raise RuntimeError("this file must never be executed")

@tw.kernel
def scale(m: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), m.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, j] * v[j]
    return out

@tw.kernel
def shift(x: tw.Array, by: float) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] + by
    return out
"""
BROKEN = "let c = compute(x) {\n    @kernel elementwise\n    for i in 0..len:\n        out[i] = x[i\n}\n"
TWO_ERRORS = """
let a = compute(x) {
    @kernel elementwise
    for i in 0..len:
        out[i] = frobnicate(x[i])
}
let b = compute(a) {
    @kernel elementwise
    for i in 0..len:
        out[i] = a[i]
}
let c = compute(x) {
    @kernel elementwise
    for i in 0..len, j in 0..len:
        out[i, j] = x[i] + wibble(x[j])
}
"""


def tilewright(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args], prog_name="tilewright")


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return path


# -- all commands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "compile", "run", "emulate", "devices", "cache", "bench", "demo"])
def test_help_teaches_with_an_example(command: str) -> None:
    result = tilewright(command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"tilewright {command}" in result.output.split("Example")[1]


def test_version() -> None:
    assert tilewright("--version").output.startswith("tilewright 0.")


def test_help_does_not_load_the_compiler() -> None:
    code = "import sys; sys.argv = ['tilewright', '--help']\ntry:\n    from tilewright.cli.main import main; main()\nexcept SystemExit: pass\n"
    code += "print([m for m in sys.modules if m.startswith(('tilewright.cli.', 'rich.'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "['tilewright.cli.main']" in done.stdout


def test_errors_are_text_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_DEBUG", raising=False)
    result = tilewright("check", "nowhere.zyn")
    assert result.exit_code == 1
    assert "error[TW007]: file 'nowhere.zyn' does not exist" in result.stderr
    result = tilewright("compile", "nowhere.zyn")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error[TW007]: file 'nowhere.zyn' does not exist\n"


def test_debugging_shows_where_an_error_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    assert type(tilewright("compile", "nowhere.zyn").exception).__name__ == "UserError"


def test_other_files_are_refused() -> None:
    assert "'kernels.c' is neither a .zyn nor a .py file" in tilewright("compile", "kernels.c").stderr


# -- check ----------------------------------------------------------------------------------------------------------


def test_check_examples() -> None:
    result = tilewright("check", EXAMPLES / "gallery.py", *sorted(ZYN.glob("*.zyn")))
    assert result.exit_code == 0, result.output
    assert result.output.count(": ok (") == 1 + len(list(ZYN.glob("*.zyn")))


def test_check_says_what_it_assumed(kernels: Path) -> None:
    result = tilewright("check", "-v", kernels)
    assert "  scale(m: f32[*, *], v: f32[*]) (assumed)\n  shift(x: f32[*], by: float) (assumed)\n" in result.output


def test_check_reports_the_errors_of_every_kernel_and_file(tmp_path: Path) -> None:
    (tmp_path / "two.zyn").write_text(TWO_ERRORS)
    (tmp_path / "syntax.zyn").write_text(BROKEN)
    result = tilewright("check", tmp_path / "two.zyn", ZYN / "relu.zyn", tmp_path / "syntax.zyn")
    assert result.exit_code == 1
    assert "two.zyn:5:18: error[TW002]: unknown function 'frobnicate'" in result.stderr
    assert "two.zyn:15:" in result.stderr, "the third kernel is checked although the first is wrong"
    assert "two.zyn:10:" not in result.stderr, "what depends on a wrong kernel is not blamed"
    assert "syntax.zyn:5:1: error[TW001]" in result.stderr
    assert "relu.zyn: ok (y)" in result.stdout
    assert "Traceback" not in result.output


# -- compile --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "stage", "expected"),
    [
        ("sm_90a", None, ".target sm_90a"),
        ("nvptx", "asm", ".visible .entry"),
        ("sm_80", "ptx", ".target sm_80"),
        ("x86-64-avx2", None, "ymm"),
        ("aarch64-neon", "asm", ".4s"),
        ("cpu", "syntax", "let scaled = compute(matrix, vector)"),
        ("cpu", "typed", "matrix: f32[rows, cols], vector: f32[cols]"),
        ("sm_90a", "loop", "stage=loop"),
        ("sm_90a", "tile", "stage=tile"),
        ("sm_90a", "thread", "stage=thread"),
        ("cpu", "llvm", "define "),
    ],
)  # fmt: skip
def test_compile_stages(target: str, stage: str | None, expected: str) -> None:
    result = tilewright("compile", ZYN / "scale.zyn", "--target", target, *(["--stage", stage] if stage else []))
    assert result.exit_code == 0, result.stderr
    assert expected in result.stdout


def test_compile_arguments_reach_the_code() -> None:
    wide = tilewright("compile", ZYN / "relu.zyn", "--args", "x=f64[*]", "--stage", "loop").stdout
    assert "tensor<f64, [len], [1]>" in wide
    known = tilewright("compile", ZYN / "relu.zyn", "--args", "x=f32[4096]", "--stage", "thread", "--target", "sm_90a").stdout
    assert known != tilewright("compile", ZYN / "relu.zyn", "--stage", "thread", "--target", "sm_90a").stdout


def test_compile_refuses(kernels: Path) -> None:
    relu = ZYN / "relu.zyn"
    assert "error[TW020]: x86-64-avx2 is a CPU: it has no PTX" in tilewright("compile", relu, "--target", "x86-64-avx2", "--stage", "ptx").stderr
    assert "error[TW021]: unknown target 'sm_1'" in tilewright("compile", relu, "--target", "sm_1").stderr
    assert "has no argument 'data'" in tilewright("compile", relu, "--args", "data=f32[*]").stderr
    assert "'f33' is not an element type" in tilewright("compile", relu, "--args", "x=f33[*]").stderr
    assert "'?' is no extent of 'x'" in tilewright("compile", relu, "--args", "x=f32[?]").stderr
    assert "has 2 kernels: scale, shift" in tilewright("compile", kernels).stderr
    assert "has no kernel 'skale'" in tilewright("compile", kernels, "--kernel", "skale").stderr


def test_compile_writes_files(kernels: Path, tmp_path: Path) -> None:
    one = tmp_path / "deep" / "shift.ptx"
    assert tilewright("compile", kernels, "--kernel", "shift", "--target", "sm_80", "-o", one).exit_code == 0
    assert ".entry tw_shift_0" in one.read_text()
    result = tilewright("compile", kernels, "--target", "sm_80", "-o", f"{tmp_path}/all/")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in (tmp_path / "all").iterdir()) == ["scale.ptx", "shift.ptx"]


def test_parse_arguments() -> None:
    found = parse_arguments("x=f32[1024, *] n=int, eps=float s=u8[] t=f64")
    assert {name: str(given) for name, given in found.items()} == {"x": "f32[1024, *]", "n": "int", "eps": "float", "s": "u8[]", "t": "f64"}


# -- run ------------------------------------------------------------------------------------------------------------


def test_run_a_program(tmp_path: Path) -> None:
    x, y = np.arange(5, dtype=np.float32), np.ones(5, np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    out = tmp_path / "r.npy"
    result = tilewright(
        "run", ZYN / "axpy.zyn", "--in", "a=2.5", "--in", f"x={tmp_path}/x.npy", "--in", f"y={tmp_path}/y.npy",
        "--out", f"result={out}", "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "ran on cpu (" in result.stderr
    assert np.array_equal(np.load(out), np.float32(2.5) * x + y)


def test_run_prints_results(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.array([3, 4], np.float32))
    result = tilewright("run", ZYN / "norm.zyn", "--in", f"data={tmp_path}/d.npy", "--device", "emulator:tile")
    assert result.stdout == "norm: float32\n  5.0\n"
    assert "ran on emulator:tile (" in result.stderr


def test_run_a_python_kernel(kernels: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3, dtype=np.float64))
    result = tilewright("run", kernels, "--kernel", "shift", "--in", f"x={tmp_path}/x.npy", "--in", "by=1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "[1. 2. 3.]" in result.stdout


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize(
    ("file", "shapes", "subscripts"),
    [
        ("matmul.zyn", {"a": (20, 24), "b": (24, 17)}, "ik,kj->ij"),
        ("batched_matmul.zyn", {"a": (3, 20, 24), "b": (3, 17, 24)}, "pik,pjk->pij"),
        ("conv2d.zyn", {"image": (2, 3, 3, 3), "weights": (5, 3, 3, 3), "bias": (5,)}, ""),
        ("conv2d_depthwise.zyn", {"image": (2, 3, 4, 5), "windows": (3, 4, 5)}, "bcij,cij->bc"),
    ],
)
def test_run_contractions(file: str, shapes: dict[str, tuple[int, ...]], subscripts: str, device: str, tmp_path: Path) -> None:
    """Windows as large as the image, or centred on its corners, are sums that einsum can say."""
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name, value in inputs.items():
        np.save(tmp_path / f"{name}.npy", value)
    given = [word for name in inputs for word in ("--in", f"{name}={tmp_path}/{name}.npy")]
    result_name = {"matmul.zyn": "product", "batched_matmul.zyn": "products", "conv2d.zyn": "features"}.get(file, "filtered")
    done = tilewright("run", ZYN / file, *given, "--out", f"{result_name}={tmp_path}/r.npy", "--device", device)
    assert done.exit_code == 0, done.output
    got = np.load(tmp_path / "r.npy")
    if subscripts:
        want = np.einsum(subscripts, *inputs.values())
        want = want.reshape(got.shape)
    else:
        image, weights, bias = inputs.values()
        # Stride 2, one pixel of zeros: of a 3x3 image the four windows each see a 2x2 corner.
        want = np.empty((2, 5, 2, 2), np.float32)
        for i, j in np.ndindex(2, 2):
            seen, under = image[:, :, i : i + 2, j : j + 2], weights[:, :, 1 - i : 3 - i, 1 - j : 3 - j]
            want[:, :, i, j] = np.einsum("bcij,ocij->bo", seen, under) + bias
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["matmul", "linear", "conv2d"])
def test_emulate_contractions(name: str) -> None:
    result = tilewright("emulate", EXAMPLES / "gallery.py", "--kernel", name)
    assert result.exit_code == 0, result.output
    assert "OK: no fault at the thread stage on random inputs" in result.output
    assert "[0" not in result.output and " 0]" not in result.output


def test_run_refuses(kernels: Path, tmp_path: Path) -> None:
    relu = ZYN / "relu.zyn"
    assert "error[TW007]: --in x: file 'no.npy' does not exist" in tilewright("run", relu, "--in", "x=no.npy").stderr
    (tmp_path / "bad.npy").write_text("this is no array")
    assert "is no .npy file: it does not begin as one" in tilewright("run", relu, "--in", f"x={tmp_path}/bad.npy").stderr
    assert "error[TW008]: missing input 'x'" in tilewright("run", relu).stderr
    assert "this is not name=value" in tilewright("run", relu, "--in", "x").stderr
    np.save(tmp_path / "x.npy", np.ones(3, np.float32))
    assert "there is no result 'z'" in tilewright("run", relu, "--in", f"x={tmp_path}/x.npy", "--out", "z=z.npy", "--device", "cpu").stderr
    assert "unknown device 'toaster'" in tilewright("run", relu, "--in", f"x={tmp_path}/x.npy", "--device", "toaster").stderr
    assert "missing input 'by'" in tilewright("run", kernels, "--kernel", "shift", "--in", f"x={tmp_path}/x.npy").stderr
    assert "unexpected input 'z'" in tilewright("run", kernels, "--kernel", "shift", "--in", "z=1").stderr


# -- emulate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["loop", "tile", "thread"])
def test_emulate_with_random_inputs(stage: str) -> None:
    result = tilewright("emulate", ZYN / "row_sums.zyn", "--stage", stage)
    assert result.exit_code == 0, result.output
    assert "(matrix: float32[11, 37]) -> row_sums: float32[11]" in result.stdout
    assert f"OK: no fault at the {stage} stage" in result.stdout


def test_emulate_python_kernels(kernels: Path) -> None:
    result = tilewright("emulate", kernels, "--args", "x=f64[6]")
    assert result.exit_code == 0, result.output
    assert "scale(m: float32[11, 37], v: float32[37]) -> " in result.stdout
    assert "shift(x: float64[6], by: float) -> " in result.stdout


def test_emulate_with_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([-1, 2], np.float32))
    result = tilewright("emulate", ZYN / "relu.zyn", "--in", f"x={tmp_path}/x.npy", "--out", f"y={tmp_path}/y.npy")
    assert result.exit_code == 0, result.output
    assert np.array_equal(np.load(tmp_path / "y.npy"), [0, 2])


def test_emulate_reports_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "gather.py"
    path.write_text("""
import tilewright as tw

@tw.kernel
def gather(x: tw.Array, where: "i64[n]") -> tw.Array:
    (n,) = where.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = x[where[i]]
    return out
""")
    np.save(tmp_path / "x.npy", np.ones(4, np.float32))
    np.save(tmp_path / "w.npy", np.array([0, 9]))
    result = tilewright("emulate", path, "--in", f"x={tmp_path}/x.npy", "--in", f"where={tmp_path}/w.npy", "--stage", "loop")
    assert result.exit_code == 1
    assert "gather.py:9:" in result.stderr
    assert "error[TW050]" in result.stderr
    assert "OK" not in result.stdout


# -- devices, cache, bench, demo ------------------------------------------------------------------------------------


def test_devices() -> None:
    result = tilewright("devices")
    assert "cpu" in result.output
    assert "emulator:thread" in result.output


def test_devices_with_limits() -> None:
    shown = tilewright("devices", "--limits").output
    assert re.search(r"^cpu:$", shown, re.MULTILINE)
    assert re.search(r"^  vector bytes +(8|16|32|64)$", shown, re.MULTILINE)
    assert re.search(r"^  simd +\S+$", shown, re.MULTILINE)
    assert re.search(r"^  threads per block +1024$", shown, re.MULTILINE)


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path)
    monkeypatch.setattr(store, "disk_cache", lambda: cache)
    monkeypatch.setattr(info_commands, "disk_cache", lambda: cache)
    driver.forget()
    tilewright("compile", ZYN / "relu.zyn", "--target", "sm_80")
    assert f"{tmp_path}: 1 entries, " in tilewright("cache", "info").stdout
    assert tilewright("cache", "clear").stdout == f"removed 1 entries from {tmp_path}\n"
    assert ": 0 entries, " in tilewright("cache", "info").stdout


def test_bench_hands_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Fake:
        @staticmethod
        def main(*args: object) -> int:
            calls.append(args)
            return 3

    monkeypatch.setattr(bench_command.repository, "load", lambda part, name: Fake)
    assert tilewright("bench", "cpu", "--quick", "--op", "relu").exit_code == 3
    assert tilewright("bench", "gpu", "--json").exit_code == 3
    assert calls == [("cpu", False, ["relu"], True), ("gpu", True, None, False)]


def test_parts_of_the_repository_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(repository, "_HERE", tmp_path / "a" / "b" / "c" / "repository.py")
    result = tilewright("demo")
    assert result.exit_code == 1
    assert "examples/gallery.py is not here" in result.stderr
    assert "clone the Tilewright repository" in result.stderr


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_command, "_ELEMENTS", {"host": 3000, "device": 3000, "simulated": 600})
    monkeypatch.setattr(demo_command, "_SECONDS", 0.0)
    monkeypatch.setattr(demo_tours, "_ELEMENTS", {"host": 300, "device": 300, "simulated": 100})


@pytest.mark.usefixtures("small")
def test_demo(tmp_path: Path) -> None:
    result = tilewright("demo", "--ptx", tmp_path / "ptx")
    assert result.exit_code == 0, result.output
    names = [item.name for item in demo_command.read_gallery()]
    tours = [f"{tour.name}.zyn" for tour in demo_tours.read_tours()]
    assert {"tour_async.zyn", "transformer_block.zyn"} < set(tours)
    count = 2 * len(names) + 2 * len(tours) + 2  # a tensor graph on each device
    assert f"{count} of {count} results right" in result.output or "cuda:0" in result.output
    assert all(result.output.count(f"{tour} ") == len(devices()) for tour in tours)
    stems = {name.replace(".", "_").replace(" ", "_") for name in names}
    written = {p.stem for p in (tmp_path / "ptx").glob("*.ptx")}
    assert written == stems - {"pi_zyn"} | {"pi_zyn_0", "pi_zyn_1"}  # a program of two kernels
    assert all(".target sm_90a" in p.read_text() for p in (tmp_path / "ptx").iterdir())


@pytest.mark.usefixtures("small")
def test_demo_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = demo_command.read_gallery()[:2]
    wrong = demo_command.Item(right[0].name, right[0].program, right[0].make, lambda x: x + 1, "")
    monkeypatch.setattr(demo_command, "read_gallery", lambda: [wrong, right[1]])
    monkeypatch.setattr(demo_tours, "read_tours", list)
    result = tilewright("demo", "--ptx", tmp_path / "ptx")
    assert result.exit_code == 1
    assert "WRONG" in result.output


@pytest.mark.usefixtures("small")
def test_demo_finds_a_wrong_result_of_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tour = demo_tours.read_tours()[0]
    monkeypatch.setattr(demo_command, "read_gallery", list)
    monkeypatch.setattr(demo_tours, "read_tours", lambda: [tour._replace(reference=lambda inputs: {"y": inputs["x"] + 1})])
    result = tilewright("demo", "--ptx", tmp_path / "ptx")
    assert result.exit_code == 1
    assert "WRONG" in result.output


def test_error_measure() -> None:
    exact = np.array([1.0, 100.0])
    assert demo_command.max_error([np.array([1.0, 101.0])], exact) == 0.01
    assert demo_command.max_error([np.array([1.0])], exact) == float("inf")
    assert demo_command.max_error([np.array([1.0, np.nan])], exact) == float("inf")
    assert demo_command.max_error([1.0, 2.0], (1.0, 2.0)) == 0
    assert demo_command.max_error([1.0], (1.0, 2.0)) == float("inf")
