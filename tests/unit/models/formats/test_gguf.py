"""GGUF files: what is written is read again, and what is wrong is refused. Nothing here may crash or allocate what a file does not hold."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base import dtypes
from tilewright.models.formats import gguf, model_file
from tilewright.models.formats.gguf import open_gguf, write_gguf
from tilewright.models.formats.gguf_strings import decode, follow

PACKED = [d for d in dtypes.ALL if d.is_packed]
RNG = np.random.default_rng(7)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file(keys: list[bytes] = [], tensors: list[bytes] = [], data: bytes = b"", version: int = 3, alignment: int = 32, counts: tuple[int, int] | None = None) -> bytes:  # noqa: B006
    tensor_count, key_count = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def read_all(path: Path) -> None:
    opened = open_gguf(path)
    dict(opened.metadata)
    for name in opened.tensors:
        opened.array(name)


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., None]:
    def check(data: bytes, *words: str, code: str = "TW007") -> None:
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        with pytest.raises(tw.UserError) as error:
            read_all(path)
        assert error.value.code == code, str(error.value)
        for word in (*words, "bad.gguf"):
            assert word in str(error.value)

    return check


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.int": 7,
    "a.negative": -7,
    "a.large": 1 << 40,
    "a.lowest": -(1 << 40),
    "a.float": 0.5,
    "a.f64": np.float64(0.1),
    "a.u8": np.uint8(200),
    "a.empty": "",
    "a.strings": ["", "a", "ünïcödé", "\n", "a longer one" * 40, "with a \0 in it", ""],
    "a.numbers": [1, 2, 3],
    "a.floats": np.array([1.5, -2.5], np.float32),
    "a.bools": [True, False, True],
    "a.none": [],
    "a.i8": np.array([-1, 2], np.int8),
    "a.u64": np.array([1 << 63], np.uint64),
}


def test_metadata_come_back(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", METADATA, {})
    found = open_gguf(tmp_path / "m.gguf")
    assert list(found.metadata) == list(METADATA)
    for name, value in METADATA.items():
        wanted = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        assert found.metadata[name] == wanted, name
        assert type(found.metadata[name]) is type(wanted), name
    assert dict(found.tensors) == {}
    assert "nothing" not in found.metadata and found.metadata.get("nothing") is None


@pytest.mark.parametrize("alignment", [8, 32, 4096])
@pytest.mark.parametrize("mapped", [False, True])
def test_arrays_come_back(tmp_path: Path, mapped: bool, alignment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if mapped:
        monkeypatch.setattr(model_file, "MAPPED_FROM", 0)
    kinds = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16, np.int8, np.int16, np.int32, np.int64]
    arrays: dict[str, Any] = {f"t.{np.dtype(kind).name}": RNG.standard_normal((3, 5)).astype(kind) for kind in kinds}
    arrays |= {"odd": np.arange(7, dtype=np.float32), "scalar": np.float32(3), "empty": np.empty((0, 4), np.float32), "four": np.ones((2, 1, 3, 2), np.float16)}
    arrays["strided"] = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3]
    arrays["big endian"] = np.arange(4, dtype=">f4")
    packed = {f"p.{dtype}": tw.quantize(RNG.standard_normal((3, 512)).astype(np.float32), dtype) for dtype in PACKED}
    write_gguf(tmp_path / "m.gguf", {}, {**arrays, **packed}, alignment=alignment)
    found = open_gguf(tmp_path / "m.gguf")
    assert list(found.tensors) == [*arrays, *packed]
    for name, array in arrays.items():
        got = found.array(name)
        assert isinstance(got, np.ndarray) and got.shape == np.shape(array) == found.tensors[name].shape
        assert got.dtype == np.asarray(array).dtype.newbyteorder("=") and not got.flags.writeable
        np.testing.assert_array_equal(got, array)
        assert found.tensors[name].nbytes == got.nbytes and found.tensors[name].offset % alignment == 0
    for name, array in packed.items():
        got = found.array(name)
        assert isinstance(got, tw.PackedArray) and got.dtype is array.dtype is found.tensors[name].dtype
        assert found.tensors[name].shape == got.shape == (3, 512)
        np.testing.assert_array_equal(got.blocks, array.blocks)
        assert found.tensors[name].nbytes == got.nbytes
    assert found.nbytes == sum(e.nbytes for e in found.tensors.values())
    with pytest.raises(tw.UserError, match="did you mean 'scalar'"):
        found.array("scaler")


def test_version_2_and_holes(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(file([], [tensor("b", [2], offset=64), tensor("a", [3, 2])], np.arange(18, dtype=np.float32).tobytes(), version=2))
    found = open_gguf(str(path))
    np.testing.assert_array_equal(found.array("a"), np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(found.array("b"), [16, 17])


def test_headers_longer_than_what_is_read_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "LOOK", 64)
    write_gguf(tmp_path / "m.gguf", METADATA, {"w": np.ones(3, np.float32)})
    found = open_gguf(tmp_path / "m.gguf")
    assert found.metadata["a.strings"] == METADATA["a.strings"] and found.array("w").shape == (3,)


def test_models_in_several_files(tmp_path: Path) -> None:
    def written(number: int, tensors: dict[str, Any], count: int = 3, total: int = 3) -> None:
        keys = {"split.no": np.uint16(number), "split.count": np.uint16(count), "split.tensors.count": np.int32(total)}
        write_gguf(tmp_path / f"m-{number + 1:05}-of-00003.gguf", {**keys, "a.part": number}, tensors)

    first = tmp_path / "m-00001-of-00003.gguf"
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    for number in range(3):
        written(number, {f"w{number}": w + number})
    found = open_gguf(first)
    assert list(found.tensors) == ["w0", "w1", "w2"] and found.metadata["a.part"] == 0
    for number in range(3):
        np.testing.assert_array_equal(found.array(f"w{number}"), w + number)
        assert found.tensors[f"w{number}"].file.name == f"m-{number + 1:05}-of-00003.gguf"
    with pytest.raises(tw.UserError, match=r"(?s)one of 3 parts.*give the first"):
        open_gguf(tmp_path / "m-00002-of-00003.gguf")
    written(1, {"w0": w})
    with pytest.raises(tw.UserError, match="has tensor 'w0', and so has"):
        open_gguf(first)
    written(1, {"w1": w}, count=4)
    with pytest.raises(tw.UserError, match="not part 1 of 3"):
        open_gguf(first)
    written(1, {"w1": w, "more": w})
    with pytest.raises(tw.UserError, match=r"split\.tensors\.count is 3, and its 3 parts have 4"):
        open_gguf(first)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(tw.UserError, match=r"00003-of-00003\.gguf' does not exist"):
        open_gguf(first)


def test_every_prefix_is_refused(tmp_path: Path, refused: Callable[..., None]) -> None:
    write_gguf(tmp_path / "m.gguf", {"a": 1, "b": ["x", "yy"], "c": "text"}, {"w": np.ones((2, 40), np.float32), "q": tw.quantize(np.ones((2, 64), np.float32), tw.q8_0)})
    whole = (tmp_path / "m.gguf").read_bytes()
    last = open_gguf(tmp_path / "m.gguf").tensors["q"]
    for length in range(last.offset + last.nbytes):
        refused(whole[:length])


def test_headers_that_are_wrong(refused: Callable[..., None]) -> None:
    refused(b"", "begins with b''")
    refused(b"GGUX" + bytes(40), "begins with b'GGUX'")
    refused(b"FUGG" + bytes(40), "other byte order")
    refused(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian")
    refused(file(version=1), "version 1")
    refused(file(version=4), "version 4")
    refused(file(counts=(1 << 60, 0)), f"{1 << 60} tensors")
    refused(file(counts=(0, 1 << 60)), f"{1 << 60} keys")
    refused(file(counts=(0, 1)), "the type of key ''")


def test_keys_that_are_wrong(refused: Callable[..., None]) -> None:
    one = struct.pack("<I", 1)
    refused(file([key("a", 4, one), key("a", 4, one)]), "'a' twice")
    refused(file([key(b"\xff\xfe", 4, one)]), "name of key 0", "not UTF-8")
    refused(file([key("a", 8, text(b"\xff"))]), "'a' is not UTF-8")
    refused(file([key("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text(b"\xc3"))]), "'a' is not UTF-8")
    refused(file([key("a", 13, one)]), "value type 13")
    refused(file([key("a", 9, struct.pack("<IQ", 13, 1))]), "value type 13")
    refused(file([key("a", 8, struct.pack("<Q", 1 << 62))]), "takes", "are left")
    refused(file([struct.pack("<Q", 1 << 63) + b"aaaaaaaaaaaaaaaaaaaaaaaa"]), "name of key 0", str(1 << 63))
    refused(file([key("a", 9, struct.pack("<IQ", 12, 1 << 61))]), f"array of {1 << 61}")
    refused(file([key("a", 9, struct.pack("<IQ", 8, 1 << 61))]), f"array of {1 << 61} strings")
    refused(file([key("a", 9, struct.pack("<IQ", 8, 3) + text("x") + struct.pack("<Q", (1 << 64) - 8))], data=bytes(64)), "string 1 of key 'a'")
    nested = struct.pack("<IQ", 9, 1) * 50 + struct.pack("<IQ", 0, 0)
    refused(file([key("a", 9, nested)]), "array of arrays")
    for alignment in (0, 3, 48, 1 << 31):
        refused(file([key("general.alignment", 4, struct.pack("<I", alignment))]), "power of two")
    refused(file([key("general.alignment", 8, text("32"))]), "power of two")
    refused(file([key("split.count", 2, struct.pack("<H", 3))]), "one of 3 parts", "00001-of-00003")


def test_tensors_that_are_wrong(refused: Callable[..., None]) -> None:
    data = bytes(4096)
    refused(file([], [tensor("a", [2]), tensor("a", [2], offset=32)], data), "'a' twice")
    refused(file([], [tensor(b"\x80", [2])], data), "name of tensor 0", "not UTF-8")
    refused(file([], [tensor("a", [1, 1, 1, 1, 1])], data), "5 axes")
    refused(file([], [tensor("a", [1 << 60])], data), "'a'")
    refused(file([], [tensor("a", [1 << 32, 1 << 32, 1 << 32])], data), "'a'")
    refused(file([], [tensor("a", [(1 << 63) + 1, 2])], data), "'a'")
    refused(file([], [tensor("a", [0, 1 << 60])], data), "'a'")
    refused(file([], [tensor("a", [1025])], data), "4100 bytes", "'a'")
    refused(file([], [tensor("a", [2], offset=(1 << 64) - 32)], data), "'a'")
    refused(file([], [tensor("a", [2], offset=4)], data), "multiple of 32")
    refused(file([], [tensor("a", [64]), tensor("b", [2], offset=32)], data), "'b'", "overlaps tensor 'a'")
    refused(file([], [tensor("a", [2]), tensor("b", [2])], data), "overlaps")
    refused(file([], [tensor("a", [33], 2)], data), "q4_0[33]", "blocks of 32")
    refused(file([], [tensor("a", [], 2)], data), "q4_0")
    refused(file([], [tensor("a", [288, 2], 12)], data), "blocks of 256")


def test_types_that_are_not_read_are_listed(refused: Callable[..., None]) -> None:
    listed = [tensor("w", [256], 10), tensor("x", [256], 23, 256), tensor("y", [2], 0, 512), tensor("z", [256], 999, 1024)]
    refused(file([], listed, bytes(4096)), "3 tensor(s)", "'w' is Q2_K", "'x' is IQ4_XS", "'z' is number 999", "Q4_K", "BF16", code="TW005")


def test_paths_that_are_wrong(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path, "\0", 7):
        with pytest.raises(tw.UserError, match="TW007"):
            open_gguf(path)  # type: ignore[arg-type]


def test_files_that_shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, {"w": np.arange(10000, dtype=np.float32)})
    read = open_gguf(path)
    monkeypatch.setattr(model_file, "MAPPED_FROM", 0)
    mapped = open_gguf(path)
    with path.open("r+b") as opened:
        opened.truncate(20000)
    np.testing.assert_array_equal(read.array("w"), np.arange(10000, dtype=np.float32))
    with pytest.raises(tw.UserError, match="shorter while it was read: 20000 bytes are left"):
        mapped.array("w")


def test_what_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for metadata, tensors, code in (
        ({"a": None}, {}, "TW009"), ({"a": ["x", 1]}, {}, "TW009"), ({"a": {}}, {}, "TW009"), ({"a": [[1]]}, {}, "TW009"), ({"a": 1 << 64}, {}, "TW009"),
        ({"a": 1j}, {}, "TW009"), ({"a": "\ud800"}, {}, "TW009"), ({"": 1}, {}, "TW009"), ({"a": np.ones((2, 2), np.float32)}, {}, "TW003"),
        ({}, {"w": np.ones(2, np.complex64)}, "TW006"), ({}, {"w": np.ones(2, np.uint8)}, "TW006"), ({}, {"w": np.ones((1,) * 5, np.float32)}, "TW003"),
        ({"general.alignment": 64}, {}, "TW016"),
    ):  # fmt: skip
        with pytest.raises(tw.UserError) as error:
            write_gguf(path, metadata, tensors)  # type: ignore[arg-type]
        assert error.value.code == code, (metadata, tensors)
    with pytest.raises(tw.UserError, match="cannot be written"):
        write_gguf(tmp_path / "none" / "m.gguf", {}, {})
    with pytest.raises(tw.UserError, match="alignment=33"):
        write_gguf(path, {}, {}, alignment=33)
    assert list(tmp_path.iterdir()) == []


# -- strings ----------------------------------------------------------------------------------------------------------


def test_strings_are_found_as_a_plain_loop_finds_them() -> None:
    """Short and long ones, empty ones, zeros inside, ends in the middle."""
    for case in range(60):
        kinds = RNG.integers(0, 6, RNG.integers(0, 400))
        lengths = {0: lambda: 0, 1: lambda: int(RNG.integers(1, 20)), 2: lambda: int(RNG.integers(250, 260)), 3: lambda: int(RNG.integers(0, 3)), 4: lambda: int(RNG.integers(1, 9)), 5: lambda: int(RNG.integers(65530, 65540)) if RNG.random() < 0.1 else 4}
        strings = [("\0" if case % 3 == 0 and RNG.random() < 0.2 else "aé"[i % 2]) * lengths[int(k)]() for i, k in enumerate(kinds)]
        raw = b"pre" + b"".join(map(text, strings))
        data = np.frombuffer(raw + b"behind", np.uint8)
        starts, end = follow(data, 3, len(strings))
        assert end == len(raw)
        wanted, at = [], 3
        for string in strings:
            wanted.append(at)
            at += 8 + len(string.encode())
        assert starts.tolist() == wanted
        assert decode(data, starts, end) == strings
        for cut in RNG.integers(0, len(raw), 5).tolist():
            some, stop = follow(data[:cut], 3, len(strings))
            complete = [w for w, s in zip(wanted, strings) if w + 8 + len(s.encode()) <= cut]
            assert some.tolist() == complete and stop <= max(cut, 3)


# -- the package gguf -------------------------------------------------------------------------------------------------


def test_the_package_gguf_reads_what_is_written_and_writes_what_is_read(tmp_path: Path) -> None:
    package: Any = pytest.importorskip("gguf", reason="the package gguf is not installed")
    values = RNG.standard_normal((4, 512)).astype(np.float32)
    plain = {name: value for name, value in METADATA.items() if name != "a.none"}
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    write_gguf(ours, plain, {"f": values, "h": values.astype(np.float16), **{str(d): tw.quantize(values, d) for d in PACKED}})
    read = package.GGUFReader(ours)
    for name, value in plain.items():
        assert read.fields[name].contents() == (value.tolist() if isinstance(value, np.ndarray | np.generic) else value), name
    for tensor_read in read.tensors:
        got = open_gguf(ours).array(tensor_read.name)
        assert tuple(reversed(tensor_read.shape.tolist())) == got.shape
        wanted = tw.dequantize(got) if isinstance(got, tw.PackedArray) else got
        np.testing.assert_array_equal(package.dequantize(tensor_read.data, tensor_read.tensor_type), wanted)
    writer = package.GGUFWriter(theirs, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_array("a.words", ["x", "", "日本"])
    writer.add_custom_alignment(64)
    writer.add_tensor("f", values)
    packed = package.quantize(values, package.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", packed, raw_dtype=package.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(theirs)
    assert found.metadata["general.architecture"] == "llama" and found.metadata["a.number"] == 7 and found.metadata["a.words"] == ["x", "", "日本"]
    np.testing.assert_array_equal(found.array("f"), values)
    got = found.array("q")
    assert isinstance(got, tw.PackedArray) and got.shape == (4, 512) and got.blocks.tobytes() == packed.tobytes()
