"""The examples of explicit kernels give what NumPy gives, in the emulator and on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "simt"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def test_they_are_there() -> None:
    assert NAMES == ["mandelbrot", "matmul", "nbody", "saxpy", "stencil", "transpose"]


@pytest.mark.parametrize("device", ["emulator", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_example(name: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location(f"simt_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(device=device)
    assert capsys.readouterr().out
