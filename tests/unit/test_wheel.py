"""The package as others install it: a wheel, away from the repository, and the oldest LLVM that it says it takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

FIRST_KERNELS = '''
import tilewright as tw
import numpy as np


@tw.kernel
def scale(m: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = m.shape
    out = tw.empty((rows, cols), m.dtype)
    for i, j in tw.grid(rows, cols):
        out[i, j] = tw.exp(m[i, j]) * v[j]
    return out


@tw.kernel
def matmul(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows, cols), x.dtype)
    for i in tw.grid(rows):
        top = x[i, :].max()
        total = 0.0
        for j in range(cols):
            total += tw.exp(x[i, j] - top)
        for j in range(cols):
            out[i, j] = tw.exp(x[i, j] - top) / total
    return out


@tw.critical
def check(price: tw.i64, quantity: tw.i64) -> tw.i64:
    return price * quantity if quantity < 1000 else -1


x = np.random.default_rng(0).random((33, 70), dtype=np.float32)
for device in ("cpu", "emulator"):
    np.testing.assert_allclose(scale(x, x[0], device=device), np.exp(x) * x[0], rtol=1e-5)
    np.testing.assert_allclose(softmax(x, device=device), np.exp(x) / np.exp(x).sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(matmul(x, x.T.copy(), device=device), x @ x.T, rtol=1e-5)
assert check(20, 30) == 600 and check(20, 1000) == -1
for target in ("sm_80", "sm_90a", "gfx942", "x86-64-avx2", "aarch64-neon"):
    for kernel, arguments in ((scale, (x, x[0])), (softmax, (x,)), (matmul, (x, x.T.copy()))):
        assert kernel.compile(*arguments, target=target).code
'''


def run(*command: str, path: Path | str, folder: Path, limit: int = 300) -> str:
    """What a command prints, in a folder, with a path of modules of its own and a cache of its own."""
    environment = {**os.environ, "PYTHONPATH": str(path), "XDG_CACHE_HOME": str(folder / "cache"), "TILEWRIGHT_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fetch(requirement: str, folder: Path) -> None:
    """Put a package of the index into a folder; skip where no index can be reached."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"{requirement} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    fetch("setuptools>=77", folder / "tools")
    tree = folder / "tree"
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    wanted = ("src/", "examples/", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
    for name in filter(None, names.split("\0")) or pytest.skip("the repository is not under git"):
        if name.startswith(wanted) and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    run("-c", f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})", path=folder / "tools", folder=tree)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_carries_every_example(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    here = [p.relative_to(ROOT) for p in (ROOT / "examples").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert {f"tilewright/{p.as_posix()}" for p in here} <= names
    assert {"tilewright/py.typed", "tilewright/__init__.pyi", "tilewright/frontend/zyn/zyn.lark"} <= names
    assert not [name for name in names if name.startswith(("tests", "bench", "examples")) or name.endswith(".pyc")]


def test_the_metadata_are_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        found: Message = Parser().parsestr(archive.read(name).decode())
    assert found["Name"] == "tilewright" and found["License-Expression"] == "Apache-2.0" and found["License-File"] == "LICENSE"
    assert all(found[field] for field in ("Version", "Summary", "Keywords", "Author", "Requires-Python", "Description-Content-Type"))
    classifiers = found.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers and "Programming Language :: Python :: 3.11" in classifiers
    assert "pip install tilewright" in str(found.get_payload())
    extras = set(found.get_all("Provides-Extra") or [])
    named = set(re.findall(r"tilewright\[([a-z]+)\]", "".join(p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py"))))
    assert named and named <= extras  # messages that tell what to install


def test_the_installed_package_runs_its_examples(installed: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6, dtype=np.float32))
    assert str(installed) in run("-c", "import tilewright; print(tilewright.__file__)", path=installed, folder=tmp_path)
    tilewright = ("-m", "tilewright")
    listed = run(*tilewright, "examples", path=installed, folder=tmp_path)
    assert "examples/gallery.py" in listed and "examples/trading/momentum.desk" in listed
    assert "ok (relu, " in run(*tilewright, "check", "examples/gallery.py", path=installed, folder=tmp_path)
    assert "result" in run(*tilewright, "run", "examples/zyn/axpy.zyn", "--in", "a=2", "--in", "x=x.npy", "--in", "y=x.npy", path=installed, folder=tmp_path)
    assert ".target sm_90a" in run(*tilewright, "compile", "examples/zyn/relu.zyn", "--target", "sm_90a", path=installed, folder=tmp_path)
    assert not (tmp_path / "examples").exists()
    gallery = "from tilewright.cli.commands import demo, demo_tours; print(len(demo.read_gallery()), len(demo_tours.read_tours()))"
    assert all(int(n) > 5 for n in run("-c", gallery, path=installed, folder=tmp_path).split())


def test_copied_examples_run(installed: Path, tmp_path: Path) -> None:
    assert " files in mine/" in run("-m", "tilewright", "examples", "--to", "mine", path=installed, folder=tmp_path)
    assert "steady" in run("mine/heat.py", path=installed, folder=tmp_path)
    assert "saxpy" in run("mine/simt/saxpy.py", path=installed, folder=tmp_path)
    again = subprocess.run([sys.executable, "-m", "tilewright", "examples", "--to", "mine"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "'mine' is there already, and not empty" in again.stderr


def test_the_readme_runs_with_the_installed_package(installed: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "first.py").write_text(blocks[0], encoding="utf-8")
    printed = run("first.py", path=installed, folder=tmp_path).splitlines()
    assert printed[0] == "[[0.0, 10.0, 200.0], [3.0, 40.0, 500.0]]" and printed[-1].startswith(".version")


def test_the_oldest_llvmlite_that_is_allowed_works(tmp_path: Path) -> None:
    (pin,) = [text for text in PROJECT["dependencies"] if text.startswith("llvmlite")]
    lowest = re.search(r">=(\d+\.\d+)", pin)
    assert lowest
    fetch(f"llvmlite=={lowest[1]}.*", tmp_path / "llvm")
    (tmp_path / "kernels.py").write_text(FIRST_KERNELS + "import llvmlite\nprint(llvmlite.__version__)\n", encoding="utf-8")
    printed = run("kernels.py", path=os.pathsep.join([str(tmp_path / "llvm"), str(ROOT / "src")]), folder=tmp_path)
    assert printed.startswith(lowest[1] + ".")
