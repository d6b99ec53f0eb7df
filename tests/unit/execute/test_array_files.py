"""Files of arrays: safetensors against files written by hand, NumPy's own, damaged ones."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from tilewright.cli.main import cli
from tilewright.execute import safetensors_files
from tilewright.execute.array_files import nested, read_values
from tilewright.execute.safetensors_files import read_safetensors

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
    read = tw.load(f'let model = read("{tmp_path}/w.safetensors")\n' + program.read_text(), roots=[tmp_path]).run(x=np.ones((1, 2), np.float32))
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


# -- files from strangers ---------------------------------------------------------------------------------------------


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def headed(header: str, data: bytes = bytes(8), version: int = 1) -> bytes:
    """A `.npy` file with a header written by hand."""
    text = header.encode("utf-8" if version == 3 else "latin-1")
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + data


def npz(compressed: bool = False, **arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)
    return buffer.getvalue()


def archive(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, data in members:
            with pytest.warns(UserWarning, match="Duplicate") if name in made.namelist() else open(os.devnull):
                made.writestr(name, data)
    return buffer.getvalue()


def tensors(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def encrypted() -> bytes:
    data = bytearray(npz(a=np.ones(2)))
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


WRONG: dict[str, tuple[str, bytes, str]] = {
    "empty": (".npy", b"", "does not begin as one"),
    "another kind": (".npy", b"hunter2 is the word", "does not begin as one"),
    "a version of tomorrow": (".npy", b"\x93NUMPY\x09\x00" + bytes(20), "it is of version 9.0"),
    "a header longer than the file": (".npy", b"\x93NUMPY\x01\x00\xff\xff{", "its header would have 65535"),
    "a long header": (".npy", headed(" " * 20_000 + "{}", version=2), "more than 10000"),
    "a header that is no literal": (".npy", headed("__import__('os')"), "its header cannot be read"),
    "a deep header": (".npy", headed("(" * 5000), "its header cannot be read"),
    "a header that is not UTF-8": (".npy", headed("x", version=2)[:12] + b"\xff" + bytes(8), "its header cannot be read"),
    "a header with other words": (".npy", headed("{'descr': '<f4'}"), "has not descr, fortran_order and shape"),
    "cut data": (".npy", npy(np.ones(4))[:-3], "32 bytes, but 29 are there"),
    "more data": (".npy", npy(np.ones(4)) + b"x", "32 bytes, but 33 are there"),
    "a claim of a petabyte": (".npy", headed("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,)}"), "but 8 are there"),
    "a negative extent": (".npy", headed("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}"), "its shape is no tuple"),
    "an extent that is a float": (".npy", headed("{'descr': '<f4', 'fortran_order': False, 'shape': (2.0,)}"), "its shape is no tuple"),
    "an extent that is true": (".npy", headed("{'descr': '<f4', 'fortran_order': False, 'shape': (True, 2)}"), "its shape is no tuple"),
    "a hundred axes": (".npy", headed(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 99 + (2,)}}}"), "cannot have 100 axes"),
    "too large and empty": (".npy", headed("{'descr': '<f4', 'fortran_order': True, 'shape': (0, 1099511627776, 1099511627776)}", b""), "cannot have 3 axes"),
    "an order that is no truth": (".npy", headed("{'descr': '<f4', 'fortran_order': 1, 'shape': (2,)}"), "fortran_order"),
    "objects": (".npy", npy(np.array([{}, None], object)), "pickled Python objects"),
    "text": (".npy", npy(np.array(["a"])), "elements of type <U1"),
    "dates": (".npy", npy(np.array(["2020-01-01"], "datetime64[D]")), "elements of type <M8"),
    "complex numbers": (".npy", npy(np.ones(2, complex)), "elements of type <c16"),
    "long doubles": (".npy", headed("{'descr': '<f16', 'fortran_order': False, 'shape': ()}", bytes(16)), "elements of type <f16"),
    "bf16 without its type": (".npy", npy(np.ones(2, ml_dtypes.bfloat16)), "no type for bf16"),
    "records": (".npy", npy(np.zeros(2, [("a", "<f4")])), "records as elements"),
    "an archive": (".npy", npz(a=np.ones(2)), "it is a zip archive; name it .npz"),
    "an array named .npz": (".npz", npy(np.ones(2)), "it is no zip archive"),
    "half an archive": (".npz", npz(a=np.ones(2))[:150], "it is no zip archive"),
    "a damaged member": (".npz", npz(a=np.ones(2)).replace(b"\xf0?", b"\xf1?", 1), "its archive is damaged (BadZipFile)"),
    "a member that is no array": (".npz", archive(("a.txt", b"hunter2")), "its member 'a.txt' is no .npy array"),
    "a member with another content": (".npz", archive(("a.npy", b"hunter2")), "'a': it does not begin as one"),
    "the same name twice": (".npz", archive(("a.npy", npy(np.ones(2))), ("a.npy", npy(np.ones(2)))), "two arrays with the name 'a'"),
    "a secret member": (".npz", encrypted(), "its archive is damaged (RuntimeError)"),
    "pickled objects in it": (".npz", archive(("a.npy", npy(np.array([{}], object)))), "'a': it has pickled Python objects"),
    "an endless extent": (".safetensors", tensors(b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}'), "Infinity is no number"),
    "a fraction": (".safetensors", tensors({"a": entry(shape=[2.0])}), "no whole numbers"),
    "a truth": (".safetensors", tensors({"a": entry(data_offsets=[False, 8])}), "no whole numbers"),
    "a number of many digits": (".safetensors", tensors(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'), "is no JSON"),
    "beyond 64 bits": (".safetensors", tensors({"a": entry(shape=[1 << 70])}), "no whole numbers"),
    "a dtype that is a list": (".safetensors", tensors({"a": entry(dtype=["F32"])}), "has no dtype, shape and offsets"),
    "a name that is a number": (".safetensors", tensors({"a": 3}), "has no dtype, shape and offsets"),
    "axes without end": (".safetensors", tensors({"a": entry(shape=[1] * 99 + [2])}), "cannot have 100 axes"),
    "deep JSON": (".safetensors", tensors(b"[" * 100_000), "nested too deep"),
    "a name of many dots": (".safetensors", tensors({".".join("a" * 5000): entry()}), "has 4999 dots, more than 64"),
    "huge and empty": (".safetensors", tensors({"a": entry(shape=[2**40, 2**40, 0], data_offsets=[0, 0])}, b""), "cannot have 3 axes"),
    "overlap": (".safetensors", tensors({"a": entry(), "b": entry(shape=[1], data_offsets=[4, 8])}), "'b', at 4..8, overlaps 'a', which ends at 8"),
    "the same place": (".safetensors", tensors({"a": entry(), "b": entry()}), "overlaps"),
    "a hole": (".safetensors", tensors({"a": entry(), "b": entry(data_offsets=[12, 20])}, bytes(20)), "between 'a' and 'b' are 4 bytes of no array"),
    "bytes behind": (".safetensors", tensors({"a": entry()}, bytes(9)), "behind 'a' are 1 bytes of no array"),
    "a name twice": (".safetensors", tensors(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}'), "has 'a' twice"),
    "a byte order mark": (".safetensors", tensors(b"\xef\xbb\xbf{}", b""), "byte order mark"),
    "UTF-16": (".safetensors", tensors("{}".encode("utf-16"), b""), "is not UTF-8"),
    "metadata that is a list": (".safetensors", tensors({"__metadata__": [1]}, b""), "__metadata__ is no record"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_every_damage_is_named(tmp_path: Path, case: str) -> None:
    suffix, content, reason = WRONG[case]
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(tw.UserError) as caught:
        read_values(path)
    text = str(caught.value)
    assert caught.value.code == "TW007" and str(path) in text and reason in text, text
    assert "hunter2" not in text
    (tmp_path / "p.zyn").write_text("let y = x\n")
    result = CliRunner().invoke(cli, ["run", str(tmp_path / "p.zyn"), "--in", f"x={path}"])
    assert result.exit_code == 1 and f"--in x: {caught.value.diagnostics[0].message}" in result.output, result.output
    with pytest.raises(tw.UserError, match="TW007"):
        tw.load(f'let y = read("{path}")', roots=[tmp_path]).run()


def test_places_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    for path in (tmp_path / "folder.npy", tmp_path / "pipe.npz", "a\0b.npy", "\udcff.npy", "gone.npz", 3, None):
        with pytest.raises(tw.UserError):
            read_values(path)  # type: ignore[arg-type]


def test_other_orders_keep_their_values(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for number, array in enumerate((values, np.asfortranarray(values), values.astype(">f4"), values.astype(">i2"), values[:, ::2], np.float64(3), np.empty((0, 5)))):
        np.save(tmp_path / f"{number}.npy", array)
        found = read_values(tmp_path / f"{number}.npy")
        assert found.dtype.isnative and found.shape == np.shape(array)
        np.testing.assert_array_equal(found, array)
    np.savez_compressed(tmp_path / "zeros.npz", z=np.zeros(1 << 20))
    assert not read_values(tmp_path / "zeros.npz")["z"].any()


def test_no_change_of_a_file_raises_anything_else(tmp_path: Path) -> None:
    """Flipped bits, cut ends, exchanged and repeated bytes: an error of ours, or arrays."""
    values = {"up.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "down": np.ones(3, np.int8)}
    text = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "b.0": {"dtype": "I64", "shape": [], "data_offsets": [16, 24]}, "__metadata__": {"k": "v"}}
    good = {".npy": npy(values["up.weight"].T), ".npz": npz(**values), ".safetensors": tensors(text, bytes(24))}
    generator, refused = random.Random(20260), list[tuple[str, str]]()
    for suffix, data in [*good.items(), (".npz", npz(True, **values))]:
        for _ in range(900):
            changed = bytearray(data)
            for _ in range(generator.choice((1, 1, 1, 2, 5))):
                at = generator.randrange(max(1, len(changed)))
                how = generator.randrange(5)
                if how == 0:
                    changed[at : at + 1] = bytes([generator.choice((0, 1, 0x7F, 0x80, 0xFF, 0x2D, 0x39, 0x5B, 0x22))])
                elif how == 1:
                    del changed[at:]
                elif how == 2:
                    changed[at:at] = changed[at : at + generator.randrange(1, 9)]
                elif how == 3:
                    del changed[at : at + generator.randrange(1, 9)]
                elif changed:
                    changed[min(at, len(changed) - 1)] ^= 1 << generator.randrange(8)
            path = tmp_path / f"x{suffix}"
            path.write_bytes(changed)
            try:
                read_values(path)
            except tw.TilewrightError as error:
                refused.append((str(path), str(error)))
    assert len(refused) > 2000 and all(path in text for path, text in refused)


def test_programs_read_what_lies_in_their_folder_or_a_declared_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = tmp_path / "program", tmp_path / "elsewhere"
    inside.mkdir()
    outside.mkdir()
    for folder in (inside, outside):
        np.save(folder / "w.npy", np.ones(3))
    (inside / "link.npy").symlink_to(outside / "w.npy")
    (inside / "part").mkdir()
    np.save(inside / "part" / "v.npy", np.full(3, 2.0))
    (inside / "part" / "p.zyn").write_text('fn v(): return read("v.npy")\n')
    main = inside / "main.zyn"
    main.write_text('import "part/p.zyn" as part\nlet y = read("w.npy") + part.v()\n')
    # Relative to the file that says so, whatever the current folder is.
    np.testing.assert_array_equal(tw.load(main).run()["y"], [3, 3, 3])
    for path in ("../elsewhere/w.npy", str(outside / "w.npy"), "link.npy"):
        main.write_text(f'fn get(path): return read(path)\nlet y = get("{path}")\n')
        with pytest.raises(tw.UserError, match=r"main\.zyn:1:\d+: error\[TW007\].*lies outside the folder of the program") as caught:
            tw.load(main).run()
        assert "roots=" in str(caught.value)
        np.testing.assert_array_equal(tw.load(main, roots=[outside]).run()["y"], [1, 1, 1])
        np.testing.assert_array_equal(tw.load(main, roots=[outside]).get(path=path), [1, 1, 1])
    monkeypatch.chdir(inside)
    np.testing.assert_array_equal(tw.load('let y = read("w.npy")').run()["y"], [1, 1, 1])
    with pytest.raises(tw.UserError, match="TW007"):
        tw.load('let y = read("../elsewhere/w.npy")').run()
    monkeypatch.setenv("TILEWRIGHT_ROOTS", str(outside))
    np.testing.assert_array_equal(tw.load('let y = read("../elsewhere/w.npy")').run()["y"], [1, 1, 1])


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_is_made_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool) -> None:
    path = tmp_path / "w.safetensors"
    write(path, {"a": np.arange(1000, dtype=np.float32)})
    monkeypatch.setattr(safetensors_files, "MAPPED_FROM", 1 if mapped else 1 << 26)
    whole = safetensors_files.read_safetensors(path)["a"]
    np.testing.assert_array_equal(whole, np.arange(1000))
    assert not whole.flags.writeable
    if not mapped:
        # What was read does not depend on the file any more.
        os.truncate(path, 100)
        np.testing.assert_array_equal(whole, np.arange(1000))
    del whole
    write(path, {"a": np.arange(1000, dtype=np.float32)})
    header = safetensors_files._header
    monkeypatch.setattr(safetensors_files, "_header", lambda data, wrong: [os.truncate(path, 2000), header(data, wrong)][1])
    with pytest.raises(tw.UserError, match="TW007.*greater than file size" if mapped else "TW007.*made shorter while it was read: [0-9]+ bytes are left of"):
        safetensors_files.read_safetensors(path)
