"""What type checkers say: README, tutorial and examples are clean under strict settings, and wrong calls of kernels are found."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted({path.parent for path in (ROOT / "examples").rglob("*.py")})
"""Each is checked as its scripts run: with its own folder on the path."""
PAGES = ("README.md", "docs/tutorial.md")

WRONG = """
import numpy as np
import tilewright as tw


@tw.kernel
def scale(m: tw.Array, v: tw.Array[tw.f32], by: tw.f32 = 1.0, times: tw.i32 = 1) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), tw.f32)
    for i, j in tw.grid(rows, cols):
        out[i, j] = m[i, v[j]] * by * times
    return out


@tw.kernel
def first(x: tw.Array) -> float:
    return scale(x, x)[0, 0] + x[0, 0]


@tw.gpu
def add(x: tw.GpuBuffer[tw.f32], by: tw.f32, n: tw.i32) -> None:
    if tw.grid.x < n:
        x[tw.grid.x] += by


class Particle(tw.State):
    x: tw.f32
    v: tw.f32
    id: tw.i32


@tw.kernel
def moved(p: tw.Array[Particle], log: tw.InOut[Particle], dt: float) -> tw.Array:
    (n,) = p.shape
    out = tw.empty(n, Particle)
    for i in tw.grid(n):
        q = p[i]
        q.x += q.v * dt
        log[i].x = q.x
        out[i] = q if q.x < 1 else Particle(0, -q.v, id=q.id)
    return out


m = np.zeros((2, 2), np.float32)
points = np.zeros(2, Particle.dtype)
"""
GOOD = """
print(scale(m, m).tolist(), scale(m, m, 2.0), scale(m, v=m, times=3), scale(m=m, v=m), scale(m, m, device="emulator"), scale(m, m, out=m))
print(moved(points, points.copy(), 1.0), Particle(1.0, 2.0, id=3).x)
total: float = first(m)


Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def twice(x: Floats) -> Floats:
    return scale(x, x, 2)


tunings: list[tw.Tuning] = [tw.tune(scale, m, m), tw.tune(add, m, 1.0, 4), tw.tune(tw.scan, m, budget=1.0), tw.tune(tw.sort, m), tw.tune(tw.histogram, m, 4)]
"""
CALLS = ("scale(m)", 'scale(m, "hello")', "scale(m, m, 1.0, 2, 3)", "scale(m, w=m)", 'scale(m, m, by="much")', "scale(m, m, times=0.5)", "first(3.0)", "tw.tune(m, m)", 'tw.tune("scan", m)')


def mypy(folder: Path, cache: Path, *paths: Path) -> str:
    """What mypy --strict says about some files, with nothing but `tilewright` and the folder to import from."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--explicit-package-bases", "--follow-imports=silent", f"--cache-dir={cache}"]
    environment = {"MYPYPATH": f"{ROOT / 'src'}:{folder}", "PATH": ""}
    done = subprocess.run([*command, *map(str, paths)], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def pages(folder: Path) -> list[Path]:
    """The Python of each page as one file."""
    made: list[Path] = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
        assert blocks, page
        made.append(folder / f"{Path(page).stem.lower()}_page.py")
        made[-1].write_text("\n".join(blocks), encoding="utf-8")
    # The tutorial exports a kernel and imports what was written.
    (folder / "scale.pyi").write_text("import numpy as np\n\ndef scale(m: np.ndarray, v: np.ndarray) -> np.ndarray: ...\n")
    return made


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mypy reads our own code once for all tests."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_examples_are_clean(folder: Path, cache: Path) -> None:
    said = mypy(folder, cache, *sorted(folder.glob("*.py")))
    assert said.startswith("Success"), said


def test_pages_are_clean(tmp_path: Path, cache: Path) -> None:
    said = mypy(tmp_path, cache, *pages(tmp_path))
    assert said.startswith("Success"), said


def test_right_calls_are_clean_and_wrong_ones_are_found(tmp_path: Path, cache: Path) -> None:
    good, wrong = tmp_path / "good.py", tmp_path / "wrong.py"
    good.write_text(WRONG + GOOD)
    wrong.write_text(WRONG + "\n".join(CALLS) + "\n")
    said = mypy(tmp_path, cache, good, wrong)
    found = {int(line) for line in re.findall(r"^wrong\.py:(\d+): error", said, re.MULTILINE)}
    begin = len(WRONG.splitlines()) + 1
    assert found == set(range(begin, begin + len(CALLS))), said
    assert "good.py" not in said, said


def test_pyright_agrees(tmp_path: Path) -> None:
    beside = Path(sys.executable).parent / "pyright"
    program = str(beside) if beside.exists() else shutil.which("pyright")
    if not program:
        pytest.skip("pyright is not installed")
    for folder in FOLDERS:
        shutil.copytree(folder, tmp_path / "examples" / folder.relative_to(ROOT / "examples"), dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    pages(tmp_path)
    (tmp_path / "good.py").write_text(WRONG + GOOD)
    (tmp_path / "wrong.py").write_text(WRONG + "\n".join(CALLS) + "\n")
    (tmp_path / "pyrightconfig.json").write_text(f'{{"typeCheckingMode": "strict", "extraPaths": ["{ROOT / "src"}"]}}')
    try:
        done = subprocess.run([program, "--pythonpath", sys.executable], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    except subprocess.TimeoutExpired:
        pytest.skip("pyright did not answer: its first start needs a network")
    if done.returncode not in (0, 1):
        pytest.skip(f"pyright cannot start here: {(done.stderr or done.stdout).strip()[-300:]}")
    found = re.findall(r"^\s*(\S+\.py):(\d+):\d+ - error", done.stdout, re.MULTILINE)
    begin = len(WRONG.splitlines()) + 1
    assert {Path(path).name for path, _ in found} == {"wrong.py"}, done.stdout
    assert {int(line) for _, line in found} == set(range(begin, begin + len(CALLS))), done.stdout
