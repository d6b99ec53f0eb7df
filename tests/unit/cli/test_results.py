"""Results of `tilewright run` in files, and read back."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from tilewright.cli.main import cli

PROGRAM = """
let y = x * 2
let parts = split(y, 2)
let model = {layers: [{w: y}, {w: x}], file: 3, name_: 1.5}
let label = "text"
let mixed = {w: x, label: label}
let later = compute(x) @async { for i in 0..n: out[i] = x[i] + 1 }
"""
X = np.arange(4, dtype=np.float32)


def run(folder: Path, *options: str, text: str = PROGRAM, x: np.ndarray = X) -> Result:
    np.save(folder / "x.npy", x)
    (folder / "p.zyn").write_text(text)
    return CliRunner().invoke(cli, ["run", str(folder / "p.zyn"), "--in", f"x={folder / 'x.npy'}", "--device", "cpu", *options])


def test_arrays_and_futures(tmp_path: Path) -> None:
    done = run(tmp_path, "--out", f"y={tmp_path}/new/y.npy", "--out", f"later={tmp_path}/l.npy")
    assert done.exit_code == 0, done.output
    np.testing.assert_array_equal(np.load(tmp_path / "new/y.npy"), X * 2)
    np.testing.assert_array_equal(np.load(tmp_path / "l.npy"), X + 1)
    assert f"y: float32[4] -> {tmp_path}/new/y.npy" in done.output


def test_records_and_tuples_come_back(tmp_path: Path) -> None:
    done = run(
        tmp_path, "--out", f"model={tmp_path}/m.npz", "--out", f"parts={tmp_path}/parts.npz", "--out", f"y={tmp_path}/y.npz"
    )
    assert done.exit_code == 0, done.output
    with np.load(tmp_path / "m.npz") as found:
        assert {name: found[name].tolist() for name in found.files} == {
            "layers.0.w": [0, 2, 4, 6], "layers.1.w": [0, 1, 2, 3], "file": 3, "name_": 1.5,
        }  # fmt: skip
    again = "let z = m.layers[0].w + m.layers[1].w\nlet k = m.file\nlet p = concat([x, x])\n"
    done = run(tmp_path, "--in", f"m={tmp_path}/m.npz", "--out", f"z={tmp_path}/z.npy", text=again)
    assert done.exit_code == 0, done.output
    np.testing.assert_array_equal(np.load(tmp_path / "z.npy"), X * 3)
    with np.load(tmp_path / "parts.npz") as found:
        assert [found[name].tolist() for name in ("0", "1")] == [[0, 2], [4, 6]]
    with np.load(tmp_path / "y.npz") as found:
        assert found["y"].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("model=m.npy", "error[TW009]: --out model: a record cannot be saved as .npy"),
        ("parts=p.npy", "error[TW009]: --out parts: a tuple cannot be saved as .npy"),
        ("label=l.npy", "error[TW009]: --out label: a string cannot be saved"),
        ("mixed=m.npz", "error[TW009]: --out mixed: 'label', a string, cannot be saved"),
        ("nothing=n.npy", "error[TW008]: there is no result 'nothing' to save"),
    ],
)
def test_what_cannot_be_saved(option: str, said: str, tmp_path: Path) -> None:
    name, file = option.split("=")
    done = run(tmp_path, "--out", f"{name}={tmp_path / file}")
    assert done.exit_code == 1
    assert said in done.output.splitlines()
    assert not (tmp_path / file).exists()


def test_types_that_files_do_not_have(tmp_path: Path) -> None:
    done = run(tmp_path, "--out", f"y={tmp_path}/y.npy", text="let y = cast(x, bf16)\n")
    assert done.exit_code == 1
    assert "error[TW009]: --out y: .npy files have no type for y, bfloat16" in done.output
    assert np.asarray(1, ml_dtypes.bfloat16).dtype.kind == "V"


@pytest.mark.parametrize("option", ["--in", "--out"])
def test_given_twice(option: str, tmp_path: Path) -> None:
    done = run(tmp_path, option, f"x={tmp_path}/x.npy", *(("--out", f"x={tmp_path}/z.npy") if option == "--out" else ()))
    assert done.exit_code == 1
    assert f"error[TW016]: {option} x is given twice" in done.output
