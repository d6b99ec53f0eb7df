"""`tilewright tune` and `tilewright inspect`, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tilewright.analysis.work import work_of
from tilewright.base.occupancy import occupancy
from tilewright.base.target import NVPTX, parse_target
from tilewright.cli.commands import inspect as inspect_command
from tilewright.cli.guess import parse_arguments
from tilewright.cli.main import cli
from tilewright.cli.plots import sparkline
from tilewright.cli.sources import read_source, walk
from tilewright.codegen.nvptx import ptxas
from tilewright.compile import tuning
from tilewright.compile.driver import front_end
from tilewright.compile.tuning import TuningStore
from tilewright.execute import tune as tuner

EXAMPLES = Path(__file__).parents[3] / "examples"
MATMUL = EXAMPLES / "matmul.py"
ATTENTION = Path(__file__).parents[2] / "kernels_attention.py"
SQUARES = "a=bf16[4096,4096] b=bf16[4096,4096]"
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tw_a_0' for 'sm_90a'
ptxas info    : Function properties for tw_a_0
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Compiling entry function 'tw_a_1' for 'sm_90a'
ptxas info    : Function properties for tw_a_1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers
"""


def tilewright(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args], prog_name="tilewright")


@pytest.fixture
def fresh_tables(tmp_path: Path) -> Iterator[None]:
    tuning.use_store(TuningStore(tmp_path / "tables"))
    yield
    tuning.use_store(None)


@pytest.mark.parametrize("command", ["tune", "inspect"])
def test_help_teaches_with_an_example(command: str) -> None:
    result = tilewright(command, "--help")
    assert result.exit_code == 0
    assert f"tilewright {command}" in result.output.split("Example")[1]


# -- inspect --------------------------------------------------------------------------------------------------------


def inspected(*args: str | Path) -> dict[str, object]:
    result = tilewright("inspect", *args, "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_inspect_a_product_for_hopper(fresh_tables: None) -> None:
    found = inspected(MATMUL, "--args", SQUARES, "--target", "sm_90a")
    (launch,) = found["launches"]  # type: ignore[misc]
    assert launch["schedule"].startswith("family=wgmma")  # type: ignore[index]
    assert launch["copies"]["tma"] > 0  # type: ignore[index]
    (name,) = launch["matrix"]  # type: ignore[index]
    assert name.startswith("wgmma m64n") and name.endswith(".f32.bf16.bf16")
    assert found["operations"] == "2*k*m*n"
    roof = found["roofline"]
    assert isinstance(roof, dict)
    assert roof["operations"] == 2 * 4096**3
    assert roof["bytes"] == 3 * 4096**2 * 2
    assert (roof["arithmetic"], roof["peak"], roof["bandwidth"], roof["bound"]) == ("bf16", 989.0, 4.8, "compute")
    assert roof["seconds"] == pytest.approx(2 * 4096**3 / 989e12)


@pytest.mark.parametrize(("words", "arithmetic", "peak"), [((), "bf16", 989 / 6), (("--precision", "tf32"), "tf32", 494.0), (("--precision", "3xtf32"), "tf32", 494 / 3)])
def test_an_f32_product_in_terms_is_several_products(words: tuple[str, ...], arithmetic: str, peak: float, fresh_tables: None) -> None:
    shapes = "a=f32[4096,4096] b=f32[4096,4096]"
    (found,) = json.loads(tilewright("inspect", MATMUL, "--args", shapes, "--target", "sm_90a", "--json", *words).output)
    assert (found["roofline"]["arithmetic"], found["roofline"]["peak"]) == (arithmetic, pytest.approx(peak))


@pytest.mark.requires("ptxas")
def test_inspect_says_what_the_assembler_says(fresh_tables: None) -> None:
    result = tilewright("inspect", MATMUL, "--args", SQUARES, "--target", "sm_90a")
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    assert "(ptxas)" in lines["registers"]
    assert lines["spills"].split()[1] == "none"
    assert "1 block on a multiprocessor" in lines["occupancy"]
    assert "wgmma" in lines["tensor"]


def test_inspect_without_assembler_or_device_says_so(fresh_tables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptxas, "ptxas_path", lambda: None)
    monkeypatch.setattr(inspect_command, "devices", list)
    result = tilewright("inspect", MATMUL, "--args", SQUARES, "--target", "sm_90a")
    assert "registers     unknown: no ptxas" in result.output
    assert "occupancy" not in result.output


def test_inspect_ordinary_kernels(fresh_tables: None) -> None:
    found = inspected(EXAMPLES / "gallery.py", "--kernel", "scale", "--args", "m=f32[1024,2048] v=f32[2048]", "--target", "sm_80")
    (launch,) = found["launches"]  # type: ignore[misc]
    assert launch["matrix"] == {}  # type: ignore[index]
    assert set(launch["copies"]) == {"plain"}  # type: ignore[index]
    roof = found["roofline"]
    assert isinstance(roof, dict)
    assert roof["operations"] == 1024 * 2048
    assert roof["bytes"] == 4 * (2 * 1024 * 2048 + 2048)
    assert (roof["bound"], roof["arithmetic"]) == ("memory", "f32")
    text = tilewright("inspect", EXAMPLES / "gallery.py", "--kernel", "scale", "--target", "sm_80").output
    assert "tensor cores  none" in text
    assert "unknown without extents; give them with --args" in text


def test_inspect_for_a_cpu(fresh_tables: None) -> None:
    result = tilewright("inspect", MATMUL, "--args", "a=f32[512,512] b=f32[512,512]", "--target", "cpu")
    assert result.exit_code == 0, result.output
    assert "schedule" in result.output and "registers" not in result.output
    assert "268.4 Mop" in result.output and "is not known" in result.output


def test_inspect_plots_the_roofline(fresh_tables: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "pictures" / "roof.png"
    result = tilewright("inspect", MATMUL, "--args", SQUARES, "--target", "sm_90a", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG") and f"plot: {picture}" in result.output


def test_the_assemblers_log() -> None:
    found = ptxas.parse_log(LOG)
    assert found == {"tw_a_0": ptxas.Assembled(168, 64, 16, 2048), "tw_a_1": ptxas.Assembled(20, 0, 0, 0)}


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared", "blocks", "warps", "limits"),
    [
        # From NVIDIA's occupancy calculator.
        ("sm_80", 128, 32, 0, 16, 64, ("threads", "registers")),
        ("sm_80", 256, 128, 0, 2, 16, ("registers",)),
        ("sm_90a", 384, 168, 229440, 1, 12, ("registers", "shared memory")),
        ("sm_86", 128, 40, 48 << 10, 2, 8, ("shared memory",)),
        ("sm_75", 32, 16, 0, 16, 16, ("blocks",)),
        ("sm_90a", 1024, 65, 0, 0, 0, ("registers",)),
    ],
)
def test_occupancy(
    target: str, threads: int, registers: int, shared: int, blocks: int, warps: int, limits: tuple[str, ...]
) -> None:
    found = occupancy(parse_target(target), threads, registers, shared)
    assert found is not None
    assert (found.blocks, found.warps, found.limits) == (blocks, warps, limits)
    assert occupancy(parse_target("x86-64-avx2"), threads, registers, shared) is None


def test_every_gpu_has_its_limits() -> None:
    for target in NVPTX.values():
        assert target.registers_per_sm == 65536 and target.shared_per_sm > target.max_shared - 1024 and target.blocks_per_sm >= 16
        assert target.threads_per_sm % 512 == 0
        assert bool(target.chip) == bool(target.peaks) == bool(target.bandwidth)
    assert parse_target("sm_90a").peak("f8e4m3") == 1979.0
    assert parse_target("sm_90a").peak("i4") == 0.0


@pytest.mark.parametrize(
    ("body", "operations", "exact"),
    [
        ("out[i] = x[i] * 2.0 + 1.0", 2 * 10, True),
        ("acc = 0.0\n        for p in range(4):\n            acc += x[i] * x[p]\n        out[i] = acc", 2 * 4 * 10, True),
        ("out[i] = tw.exp(x[i]) if x[i] > 0.0 else x[i]", 10, True),
    ],
)
def test_operations_are_counted(tmp_path: Path, body: str, operations: int, exact: bool) -> None:
    path = tmp_path / "k.py"
    path.write_text(
        "import tilewright as tw\n\n@tw.kernel\ndef k(x: tw.Array) -> tw.Array:\n    (n,) = x.shape\n    out = tw.empty(n, x.dtype)\n"
        f"    for i in tw.grid(n):\n        {body}\n    return out\n"
    )
    (entry,) = walk(read_source(str(path)), parse_arguments("x=f32[10]")).raise_if_errors().entries
    _, program = front_end(entry.function, entry.signature(gpu=True))
    work = [work_of(call.kernel) for call in program.calls]
    assert sum(w.operations.evaluate({"n": 10}) for w in work) == operations
    assert all(w.exact for w in work) is exact
    assert sum(w.bytes.evaluate({"n": 10}) for w in work) == 80


@pytest.mark.parametrize(("kernel", "exact"), [("plain", True), ("ranged", False)])
def test_scores_count_once(kernel: str, exact: bool) -> None:
    """The text of attention has them three times; the values' columns may be a loop or one of the results' indices."""
    arguments = parse_arguments("q=bf16[2,3,5,64] k=bf16[2,3,5,64] v=bf16[2,3,5,64]")
    entries = walk(read_source(str(ATTENTION)), arguments).raise_if_errors().entries
    (entry,) = (e for e in entries if e.name == kernel)
    _, program = front_end(entry.function, entry.signature(gpu=True))
    (work,) = (work_of(call.kernel) for call in program.calls)
    sizes = {name: {"B": 2, "H": 3, "S": 5, "T": 5, "D": 64, "E": 64}[name] for name in work.operations.names}
    found, rows = work.operations.evaluate(sizes), 2 * 3 * 5
    assert work.exact is exact
    if exact:
        # An inner product, its factor, maximum, difference, exponential and sum; the weighted sums; what they are divided by.
        assert found == rows * (5 * (2 * 64 + 5 + 2 * 64) + 64)
    else:
        # Rows of one key at least, for all columns together.
        assert rows * (2 * 64 + 2 * 64) <= found <= rows * (2 * 64 + 8 * 64)


# -- tune -----------------------------------------------------------------------------------------------------------


@pytest.mark.requires("cpu")
def test_tune_on_the_cpu(fresh_tables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tuner._HostBench, "_SECONDS", 0.01)
    picture = tmp_path / "search.png"
    args = "a=f32[64,64] b=f32[64,64]"
    result = tilewright("tune", MATMUL, "--args", args, "--device", "cpu", "--budget", "2", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "matmul on cpu" in result.output
    assert "chosen: family=cpu" in result.output
    assert "search: " in result.output and "schedules in" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.requires("cpu")
def test_tune_says_when_there_is_nothing_to_tune(fresh_tables: None, tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text("import tilewright as tw\n\n\n@tw.kernel\ndef first(x: tw.Array) -> tw.f32:\n    return x[0] + x[0]\n")
    result = tilewright("tune", file, "--kernel", "first", "--args", "x=f32[100]", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "first on cpu: nothing to tune: no parameter" in result.output


@pytest.mark.requires("cpu")
def test_tune_a_map_on_the_cpu(fresh_tables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner._HostBench, "_SECONDS", 0.01)
    result = tilewright("tune", EXAMPLES / "gallery.py", "--kernel", "relu", "--args", "x=f32[100000]", "--device", "cpu", "--budget", "3")
    assert result.exit_code == 0, result.output
    assert "relu on cpu" in result.output and "chosen: family=loops" in result.output


def test_tune_needs_extents() -> None:
    result = tilewright("tune", MATMUL, "--args", "a=f32[64,64]", "--device", "cpu")
    assert result.exit_code == 1
    assert "the extents of 'b' are not known" in result.stderr and "b=f32[4096,4096]" in result.stderr


def test_tune_on_a_device_that_is_not_here() -> None:
    result = tilewright("tune", MATMUL, "--args", SQUARES, "--device", "cuda:97")
    assert result.exit_code == 1
    assert "cuda:97" in result.stderr


def test_sparklines() -> None:
    assert sparkline([1.0, 2.0, None, 8.0]) == "▁▂×█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([None]) == "×"
