"""Files of arrays: safetensors against files written by hand, NumPy's own, damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.api.array_files import nested, read_safetensors, read_values
from tilewright.cli.main import cli

KINDS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64, "U8": np.uint8, "BOOL": np.bool_, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def write(path: Path, arrays: dict[str, np.ndarray], pad: int = 0, **changes: Any) -> Path:
    """A safetensors file, with `pad` bytes of spaces behind its header."""
    names = {np.dtype(v): k for k, v in KINDS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, array in arrays.items():
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [position, position + array.nbytes]}
        position += array.nbytes
    for name, entry in changes.items():
        header[name] = {**header.get(name, {}), **entry}
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values()))
    return path


@pytest.mark.parametrize("pad", [0, 1, 3])
def test_every_element_type(tmp_path: Path, pad: int) -> None:
    """Also where the data begins at an odd address."""
    arrays = {kind.lower(): (np.arange(6) % 2).reshape(2, 3).astype(dtype) for kind, dtype in KINDS.items()}
    arrays["empty"], arrays["number"] = np.empty((0, 4), np.float32), np.array(7, np.int64)
    found = read_safetensors(write(tmp_path / "w.safetensors", arrays, pad))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)
        assert not array.size or found[name].flags.aligned


def test_names_with_dots_are_records() -> None:
    one, two = np.ones(1), np.zeros(1)
    assert nested({"layers.0.w": one, "layers.1.w": two, "head": one}) == {"layers": [{"w": one}, {"w": two}], "head": one}
    assert nested({"layers.0": one, "layers.2": two}) == {"layers": {"0": one, "2": two}}
    for names in (("a", "a.b"), ("a.b", "a")):
        with pytest.raises(tw.UserError, match=r"'a(\.b)?' of 'file' is (inside an array|an array and has others inside)"):
            nested(dict.fromkeys(names, one), "file")


def test_numpy_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    np.savez(tmp_path / "w.npz", **{"up.weight": np.ones(2), "bias": np.zeros(1)})
    np.testing.assert_array_equal(read_values(tmp_path / "x.npy"), np.arange(3))
    found = read_values(tmp_path / "w.npz")
    np.testing.assert_array_equal(found["up"]["weight"], np.ones(2))
    assert list(found) == ["up", "bias"]


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    good = {"a": np.ones(4, np.float32)}
    cases = [
        (b"", "it has 0 bytes, its header would have 0"),
        ((1 << 40).to_bytes(8, "little") + b"{}", f"it has 10 bytes, its header would have {1 << 40}"),
        ((4).to_bytes(8, "little") + b"{{{{", "its header is no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "its header is no record"),
    ]
    for content, reason in cases:
        path.write_bytes(content)
        with pytest.raises(tw.UserError) as caught:
            read_values(path)
        assert f"file '{path}' is no safetensors file: {reason}" in str(caught.value)
    for change, reason in (
        ({"data_offsets": [0, 20]}, r"'a' is F32 \[4\], 16 bytes, at 0..20 of 16"), ({"data_offsets": [8, 24]}, "at 8..24 of 16"),
        ({"shape": [5]}, r"'a' is F32 \[5\], 20 bytes, at 0..16 of 16"), ({"shape": [-4]}, "-16 bytes"), ({"data_offsets": 3}, "'a' has no dtype"),
        ({"dtype": "F4"}, "has element type 'F4'"),
    ):  # fmt: skip
        write(path, good, a=change)
        with pytest.raises(tw.UserError, match=reason):
            read_values(path)
    with pytest.raises(tw.UserError, match=r"'w\.bin' is no file of arrays"):
        read_values("w.bin")
    with pytest.raises(tw.UserError, match=r"gone.safetensors' does not exist"):
        read_values(tmp_path / "gone.safetensors")


def test_programs_and_the_command_line_read_them(tmp_path: Path) -> None:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    write(tmp_path / "w.safetensors", {"layers.0.up": w, "layers.1.up": w + 1})
    np.save(tmp_path / "x.npy", np.ones((1, 2), np.float32))
    program = tmp_path / "p.zyn"
    program.write_text("fn apply(x: tensor[n, k], layer: int = 0): return x @ model.layers[layer].up\nlet y = apply(x, 1)\n")
    read = tw.load(f'let model = read("{tmp_path}/w.safetensors")\n' + program.read_text()).run(x=np.ones((1, 2), np.float32))
    np.testing.assert_array_equal(read["y"], [[5, 7, 9]])
    common = ["--in", f"x={tmp_path}/x.npy", "--in", f"model={tmp_path}/w.safetensors", "--device", "cpu"]
    result = CliRunner().invoke(cli, ["run", str(program), *common, "--out", f"y={tmp_path}/y.npy"])
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), [[5, 7, 9]])
    result = CliRunner().invoke(cli, ["run", str(program), "--kernel", "apply", *common])
    assert result.exit_code == 0, result.output
    assert "apply: float32[1, 3]\n  [[3. 5. 7.]]\n" in result.output
    result = CliRunner().invoke(cli, ["run", str(program), "--in", f"model={tmp_path}/gone.npz", "--in", "x=1"])
    assert f"--in model: file '{tmp_path}/gone.npz' does not exist" in result.output
    result = CliRunner().invoke(cli, ["emulate", str(program)])
    assert "error[TW008]: 'model' is a record, which is not made at random" in result.output
