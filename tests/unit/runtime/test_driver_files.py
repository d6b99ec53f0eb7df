"""What drivers made of our code, kept on disk: whole files, for one version of a driver, or none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright.execute.devices import find_device, own_memory
from tilewright.runtime.portable import driver_files


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_CACHE", "1")
    return tmp_path / "drivers"


def test_files_are_whole_and_of_one_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_files.kept("driver 1", b"code") is None
    driver_files.keep("driver 1", b"code", b"made")
    assert driver_files.kept("driver 1", b"code") == b"made"
    assert driver_files.kept("driver 2", b"code") is None
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert driver_files.kept("driver 1", b"code") is None, "a file that was cut short"
    driver_files.forget("driver 1", b"code")
    assert not list(folder.iterdir())
    monkeypatch.setattr(driver_files, "_MOST", 4)
    for number in range(6):
        driver_files.keep("driver", bytes([number]), b"made")
    assert len(list(folder.iterdir())) <= 4
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    assert driver_files.kept("driver", bytes([5])) is None


@tw.kernel
def doubled(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] * 2 + 1
    return out


@pytest.mark.requires("opencl")
def test_opencl_programs_are_taken_from_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = own_memory(find_device("opencl"))
    x = np.arange(7, dtype=np.float32)
    doubled(x, device="opencl")
    assert doubled.last is not None
    artifact = doubled.last
    device.load(artifact)
    (file,) = folder.iterdir()
    written = file.stat().st_mtime_ns
    import tilewright.runtime.opencl.spirv_loading as loading

    monkeypatch.setattr(loading, "_translated", lambda *given: pytest.fail("it is there already"))
    program = device.load(artifact)
    out = device.empty((7,), tw.f32)
    program.run({"x": device.from_numpy(x), artifact.outputs[0].name: out}, {}, {"n": 7})
    assert np.array_equal(out.numpy(), x * 2 + 1)
    file.write_bytes(file.read_bytes()[:100])
    monkeypatch.undo()
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(folder.parent))
    device.load(artifact)
    assert file.stat().st_mtime_ns != written, "made anew"


@pytest.mark.requires("vulkan")
def test_vulkan_pipelines_are_made_with_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every driver puts something into its cache; pipelines are right with one all the same, and with a file of nonsense."""
    device = own_memory(find_device("vulkan"))
    x = np.arange(7, dtype=np.float32)
    assert np.array_equal(doubled(x, device="vulkan"), x * 2 + 1)
    assert doubled.last is not None
    artifact = doubled.last
    monkeypatch.setattr(driver_files, "kept", lambda driver, code: b"nonsense" * 8)
    device.load(artifact)
