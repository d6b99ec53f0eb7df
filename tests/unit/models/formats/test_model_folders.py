"""Folders of safetensors: which files count, what their tensors are, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base import dtypes
from tilewright.models.formats import model_file
from tilewright.models.formats.safetensors import open_folder

NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.int64): "I64"}


def shard(path: Path, arrays: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, array in arrays.items():
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def folder(path: Path, shards: dict[str, dict[str, np.ndarray]], index: dict[str, Any] | None = None, config: Any = None) -> Path:
    path.mkdir(exist_ok=True)
    for old in path.iterdir():
        old.unlink()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "layers": 2} if config is None else config))
    for name, arrays in shards.items():
        shard(path / name, arrays)
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=ml_dtypes.bfloat16)


@pytest.mark.parametrize("mapped", [False, True])
def test_one_file_and_several(tmp_path: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if mapped:
        monkeypatch.setattr(model_file, "MAPPED_FROM", 0)
    cases = [
        folder(tmp_path / "one", {"model.safetensors": {"a": A, "b": B}, "other.safetensors": {"a": B}}),
        folder(tmp_path / "all", {"x.safetensors": {"a": A}, "y.safetensors": {"b": B}}),
        folder(tmp_path / "index", {"x-1.safetensors": {"a": A}, "x-2.safetensors": {"b": B}, "model.safetensors": {"c": A}}, {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}),
    ]
    for path in cases:
        found = open_folder(path)
        assert found.kind == "safetensors" and found.metadata["model_type"] == "llama" and sorted(found.tensors) == ["a", "b"]
        np.testing.assert_array_equal(found.array("a"), A)
        np.testing.assert_array_equal(found.array("b"), B)
        entry = found.tensors["b"]
        assert entry.dtype is dtypes.bf16 and entry.shape == (4,) and entry.nbytes == 8 and found.nbytes == 32
        assert entry.file.read_bytes()[entry.offset : entry.offset + 8] == B.tobytes()


def test_what_is_refused(tmp_path: Path) -> None:
    def refused(words: str, path: Any) -> None:
        with pytest.raises(tw.UserError, match=words) as error:
            open_folder(path)
        assert error.value.code in ("TW007", "TW009")

    good = {"model.safetensors": {"a": A}}
    place = tmp_path / "m"
    refused("cannot be read", tmp_path / "none")
    refused("cannot be read", "\0")
    refused("a int is no path", 3)
    empty = folder(place, {})
    refused("no safetensors files", empty)
    (empty / "config.json").unlink()
    refused("has no config.json", empty)
    refused("holds no record", folder(place, good, config=[1]))
    for text, words in ((b"{", "no JSON"), (b"\xff", "not UTF-8"), (b"[" * 100000, "nested too deep"), (b'{"a": 1, "a": 2}', "'a' twice")):
        folder(place, good)
        (place / "config.json").write_bytes(text)
        refused(words, place)
    refused("both hold 'a'", folder(place, {"x.safetensors": {"a": A}, "y.safetensors": {"a": A}}))
    for index, words in (
        ({"weight_map": {"a": "../x.safetensors"}}, "no safetensors file of the folder"), ({"weight_map": {"a": 3}}, "no safetensors file"),
        ({"weight_map": {"a": "/etc/passwd"}}, "no safetensors file"), ({"weight_map": []}, "no record weight_map"), ({}, "no record weight_map"),
        ({"weight_map": {"a": "none.safetensors"}}, "does not exist"), ({"weight_map": {"b": "model.safetensors"}}, "says that 'b'"), ({"weight_map": {}}, "no safetensors files"),
    ):  # fmt: skip
        refused(words, folder(place, good, index))
    folder(place, good)
    whole = (place / "model.safetensors").read_bytes()
    for length in range(len(whole)):
        (place / "model.safetensors").write_bytes(whole[:length])
        refused("is no safetensors file", place)
    for shape in ([1] * 40 + [6], [0, 1 << 62]):
        text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 24 if shape[0] else 0]}}).encode()
        (place / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(24 if shape[0] else 0))
        refused("an array cannot have", place)


def test_files_that_shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "m", {"model.safetensors": {"a": np.zeros(5000, np.float32)}})
    monkeypatch.setattr(model_file, "MAPPED_FROM", 0)
    found = open_folder(path)
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(tw.UserError, match="1000 bytes are left"):
        found.array("a")
