"""The disk cache: what goes in comes out, and no state of the disk makes it fail or lie."""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilewright.base import dtypes
from tilewright.base.artifact import (
    ArrayParam,
    Artifact,
    CallCheck,
    IndexSite,
    Launch,
    MapParam,
    ScalarParam,
    SizeBinding,
    SmallSums,
)
from tilewright.base.errors import Note, UserError
from tilewright.base.private_files import PrivateFolder, UnsafeFile, cache_root, open_to_others
from tilewright.base.sizes import Size, ceildiv, floordiv, maximum, minimum, mod
from tilewright.compile.cache import DiskCache, deserialise, parse_bytes, serialise
from tilewright.compile.tuning import Measurement, TuningStore

ROWS, COLS = Size.of("rows"), Size.of("x.cols$1")
KEY = "0123456789abcdef" * 4


def make(code: bytes = b"code \x00\xff", name: str = "softmax") -> Artifact:
    grid = (ceildiv(ROWS * COLS, 128), minimum(ROWS, maximum(COLS, 4)), mod(ROWS, 3) - floordiv(COLS, ROWS) + 7)
    one, two = Size.of(1), Size.of(2)
    corners = (ROWS * -1, one * -1), (COLS - 3, ROWS)
    maps = (
        MapParam("x", dtypes.bf16, (ROWS, COLS, two, one), (COLS * 2, two, one, one), (1, 1, 1, 64), 128, 96, *corners, (2, 1), True),
        MapParam("x", dtypes.bf16, (ROWS, COLS), (COLS * 2, Size.of(1)), (128, 64), 128),
        MapParam("x", dtypes.f32, (ROWS, COLS), (COLS * 2, Size.of(1)), (128, 32), 128, rounds=True),
        MapParam("partial", dtypes.f8e4m3, (ceildiv(COLS, 64), Size.of(64)), (Size.of(64), Size.of(1)), (1, 64), 64),
    )
    return Artifact(
        name=name,
        target="sm_90a",
        kind="ptx",
        code=code,
        inputs=(
            ArrayParam("x", dtypes.bf16, (ROWS, COLS), (COLS * 2, Size.of(1)), "input", 16),
            ScalarParam("scale", dtypes.f32, typed=True),
            ScalarParam("flag", dtypes.bool_),
        ),
        outputs=(ArrayParam("out", dtypes.f8e4m3, (ROWS,), (Size.of(1),), "output"),),
        scratch=(ArrayParam("partial", dtypes.q4_k, (), (), "scratch", 256),),
        launches=(
            Launch("first", ("x", "partial"), ("rows", "x.cols$1"), grid, 256, 100_000, ROWS * -3 + 1, maps, 2, True, "a.py:3:5", 10**9, True, True, (("a.py:4:9", "x > 0"),), (ROWS * 2,), (COLS + 1,), ROWS + 2, True),
            Launch("second", ("partial", "scale", "out"), (), (Size.of(1),)),
        ),
        bindings=(SizeBinding("rows", "x", 0), SizeBinding("x.cols$1", "x", 1, True)),
        checks=(CallCheck(ROWS, "le", COLS * 2 - 1, "too many 'rows'\n", "file.py:3:4", " 3 | x\n   | ^", "TW013"),),
        facts=(("rows", 16), ("x.cols$1", 4)),
        computed=(("$scale", ROWS * 2 - 1),),
        absent=(1,),
        alias_safe=True,
        host=b"\x7fELF host",
        key=KEY,
        sites=(IndexSite("softmax", "load", "x", 1, 2, "a.py:3:5", " 3 | x\n   | ^"),),
        schedule="first: tile 64x64\nsecond: —",
        notes=(Note("TW060", "it runs on one thread", "write less", "a.py", 3, 5, 9, "    x = y"),),
        level="O1",
        small=(SmallSums((("x", 1),), (("x", 0), ("y", 2))), SmallSums((("y", 0),), (), 1)),
        is_sized=True,
    )


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache")


def entries(cache: DiskCache) -> list[Path]:
    return sorted(path for path in cache.root.rglob("*") if path.is_file())


# -- bytes ----------------------------------------------------------------------------------------------------------


def test_round_trip_of_every_field() -> None:
    artifact = make()
    number = next(p for p in artifact.inputs if isinstance(p, ScalarParam))
    for part in (artifact, number, artifact.launches[0], artifact.launches[0].maps[0]):
        for field in dataclasses.fields(part):
            if field.default is not dataclasses.MISSING:
                assert getattr(part, field.name) != field.default, f"the test says nothing about {field.name}"
    assert deserialise(serialise(artifact)) == artifact


def test_round_trip_of_an_empty_artifact() -> None:
    artifact = Artifact("k", "cpu", "object", b"", (), (), (), (), (), ())
    assert deserialise(serialise(artifact)) == artifact


def test_truncated_or_changed_bytes_are_value_errors() -> None:
    data = serialise(make())
    for length in range(0, len(data), 7):
        with pytest.raises(ValueError):
            deserialise(data[:length])
    with pytest.raises(ValueError):
        deserialise(data + b"x")
    with pytest.raises(ValueError, match="not understood"):
        deserialise(data.replace(b'"launches"', b'"launchez"'))


# -- use ------------------------------------------------------------------------------------------------------------


def test_put_get_info_clear(cache: DiskCache) -> None:
    assert cache.get(KEY) is None
    assert cache.info().entries == 0
    cache.put(KEY, make())
    cache.put("a key that is no hash, with ../ in it", make(name="other"))
    assert cache.get(KEY) == make()
    other = cache.get("a key that is no hash, with ../ in it")
    assert other is not None
    assert other.name == "other"
    info = cache.info()
    assert (info.path, info.entries) == (cache.root, 2)
    assert info.bytes == sum(path.stat().st_size for path in entries(cache))
    assert cache.clear() == 2
    assert cache.get(KEY) is None
    assert entries(cache) == []


def test_put_replaces(cache: DiskCache) -> None:
    cache.put(KEY, make(b"old"))
    cache.put(KEY, make(b"new"))
    found = cache.get(KEY)
    assert found is not None
    assert found.code == b"new"
    assert cache.info().entries == 1


def test_another_cache_object_sees_the_entry(cache: DiskCache) -> None:
    cache.put(KEY, make())
    assert DiskCache(cache.root).get(KEY) == make()


def test_permissions(cache: DiskCache) -> None:
    before = os.umask(0)
    try:
        cache.put(KEY, make())
    finally:
        os.umask(before)
    (entry,) = entries(cache)
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700


# -- damage ---------------------------------------------------------------------------------------------------------


def test_any_flipped_byte_is_noticed_and_removed(cache: DiskCache) -> None:
    cache.put(KEY, make())
    (entry,) = entries(cache)
    good = entry.read_bytes()
    for position in range(0, len(good), 11):
        entry.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        assert cache.get(KEY) is None, position
        assert not entry.exists()
    cache.put(KEY, make())
    assert cache.get(KEY) == make()


@pytest.mark.parametrize("length", [0, 1, 43, 44, 60, 200])
def test_a_cut_file_is_removed(cache: DiskCache, length: int) -> None:
    cache.put(KEY, make())
    (entry,) = entries(cache)
    entry.write_bytes(entry.read_bytes()[:length])
    assert cache.get(KEY) is None
    assert not entry.exists()


def test_an_entry_under_another_name_is_not_taken(cache: DiskCache) -> None:
    cache.put(KEY, make())
    (entry,) = entries(cache)
    other = KEY[::-1]
    entry.rename(entry.with_name(entry.name.replace(KEY, other)))
    assert cache.get(other) is None


def test_a_failed_write_leaves_nothing(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    cache.put(KEY, make(b"before"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        cache.put(KEY, make(b"after"))
        cache.put(KEY, make(b"after"))
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "No space left" in caplog.text
    found = cache.get(KEY)
    assert found is not None
    assert found.code == b"before"
    assert len(entries(cache)) == 1


def test_a_place_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache")
    assert cache.get(KEY) is None
    cache.put(KEY, make())
    cache.put(KEY, make())
    assert cache.get(KEY) is None
    assert cache.info().entries == 0
    assert cache.clear() == 0
    assert len(caplog.records) == 1


def test_a_directory_removed_meanwhile_is_made_again(cache: DiskCache) -> None:
    cache.put(KEY, make())
    (entry,) = entries(cache)
    entry.unlink()
    entry.parent.rmdir()
    assert cache.get(KEY) is None
    cache.put(KEY, make())
    cache.put(KEY, make())
    assert cache.get(KEY) == make()


# -- safety ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no owners of files")
class TestUnsafeDirectories:
    @pytest.mark.parametrize("inner", [False, True])
    def test_world_writable(self, cache: DiskCache, caplog: pytest.LogCaptureFixture, inner: bool) -> None:
        cache.put(KEY, make())
        (entry,) = entries(cache)
        (entry.parent if inner else cache.root).chmod(0o777)
        again = DiskCache(cache.root)
        assert again.get(KEY) is None
        again.put(KEY, make())
        assert not again.enabled
        assert "can be written by every user" in caplog.text
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777])
    @pytest.mark.parametrize("place", ["root", "folder", "above"])
    def test_every_place_that_others_could_write(self, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, place: str) -> None:
        root = tmp_path / "home" / "cache"
        DiskCache(root).put(KEY, make())
        TuningStore(root).add(KEY, "k", "cpu", [Measurement((), "tile=64", 1.0)])
        opened = {"root": root, "folder": root / "v1", "above": root.parent}[place]
        opened.chmod(mode)
        (root / "tuning").chmod(mode)
        again = DiskCache(root)
        for _ in range(2):
            assert again.get(KEY) is None
            again.put(KEY, make(b"new"))
            assert TuningStore(root).get(KEY) is None
        assert not again.enabled and again.info().entries == 0
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2 and all("can be written by" in text and "chmod go-w" in text for text in said), said
        assert str(opened) in said[0]
        opened.chmod(0o700)
        assert DiskCache(root).get(KEY) == make()

    def test_a_sticky_place_above_is_fine(self, tmp_path: Path) -> None:
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared").chmod(0o1777)
        cache = DiskCache(tmp_path / "shared" / "cache")
        cache.put(KEY, make())
        assert DiskCache(cache.root).get(KEY) == make()
        assert open_to_others(tmp_path / "shared" / "cache") == ""
        assert "can be written by every user" in open_to_others(tmp_path / "shared")

    def test_a_directory_opened_to_others_while_in_use(self, cache: DiskCache, caplog: pytest.LogCaptureFixture) -> None:
        cache.put(KEY, make())
        assert cache.get(KEY) == make()
        cache.root.chmod(0o775)
        assert cache.get(KEY) is None
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("kind", ["group", "world", "link", "pipe", "folder"])
    def test_an_entry_others_could_write_is_not_read(self, cache: DiskCache, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
        cache.put(KEY, make())
        (entry,) = entries(cache)
        if kind in ("group", "world"):
            entry.chmod(0o620 if kind == "group" else 0o602)
        else:
            entry.rename(tmp_path / "elsewhere")
            if kind == "link":
                entry.symlink_to(tmp_path / "elsewhere")
            elif kind == "pipe":
                os.mkfifo(entry)
            else:
                entry.mkdir()
        again = DiskCache(cache.root)
        assert again.get(KEY) is None
        assert [record.levelno for record in caplog.records] == [logging.WARNING] and str(entry) in caplog.text
        if kind != "folder":
            again.put(KEY, make())
            assert again.get(KEY) == make() and stat.S_IMODE(entry.lstat().st_mode) == 0o600

    def test_links_on_the_way_are_looked_at(self, tmp_path: Path) -> None:
        open_place, own = tmp_path / "open", tmp_path / "own"
        for folder in (open_place, own):
            (folder / "cache").mkdir(parents=True)
            (folder / "cache").chmod(0o700)
        (own / "link").symlink_to(open_place / "cache")
        (own / "relative").symlink_to("../own/cache")
        (own / "circle").symlink_to("circle")
        assert open_to_others(own / "link") == open_to_others(own / "relative") == ""
        open_place.chmod(0o777)
        assert str(open_place) in open_to_others(own / "link")
        with pytest.raises(UnsafeFile, match="every user"):
            PrivateFolder(own / "link").read("x")
        assert "links" in open_to_others(own / "circle")

    def test_owned_by_another(
        self, cache: DiskCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache.put(KEY, make())
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        again = DiskCache(cache.root)
        assert again.get(KEY) is None
        assert "belongs to another user" in caplog.text
        assert len(caplog.records) == 1


# -- size -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes=62_000)
    keys = [f"{number:064x}" for number in range(5)]
    for age, key in enumerate(keys[:4]):
        cache.put(key, make(b"x" * 12_000))
        path = cache.root / "v1" / f"{key}.twa"
        used = time.time() - 1000 + age
        os.utime(path, (used, used))
    assert cache.get(keys[0]) is not None  # now the newest
    cache.put(keys[4], make(b"x" * 12_000))
    left = [key for key in keys if cache.get(key) is not None]
    assert left == [keys[0], keys[2], keys[3], keys[4]]
    assert cache.info().bytes <= 62_000


def test_entries_of_other_processes_count(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes=30_000)
    for number in range(20):
        DiskCache(cache.root, max_bytes=30_000).put(f"{number:064x}", make(b"x" * 8_000))
    assert cache.info().bytes <= 30_000


def test_what_is_larger_than_the_cache_is_not_stored(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes=10_000)
    cache.put(KEY, make())
    cache.put(KEY[::-1], make(b"x" * 20_000))
    assert cache.get(KEY) is not None
    assert cache.get(KEY[::-1]) is None


def test_stale_temporary_files_are_removed(cache: DiskCache) -> None:
    cache.put(KEY, make())
    old, fresh = cache.root / "v1" / ".tmp-1-aa", cache.root / "v1" / ".tmp-2-bb"
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    assert cache.info().entries == 1
    assert not old.exists()
    assert fresh.exists()
    cache.clear()
    assert not fresh.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [("123", 123), ("4k", 4096), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1 tb", 1 << 40), ("", None), ("lots", None), ("-1", None)],
)
def test_parse_bytes(text: str, value: int | None) -> None:
    assert parse_bytes(text) == value


# -- environment ----------------------------------------------------------------------------------------------------


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.setenv("TILEWRIGHT_CACHE_SIZE", "3M")
    cache = DiskCache(None)
    assert (cache.root, cache.max_bytes, cache.enabled) == (tmp_path / "here", 3 << 20, True)
    monkeypatch.setenv("TILEWRIGHT_CACHE_SIZE", "plenty")
    with pytest.raises(UserError, match="TILEWRIGHT_CACHE_SIZE is 'plenty'"):
        DiskCache(None)
    monkeypatch.delenv("TILEWRIGHT_CACHE_SIZE")
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    off = DiskCache(None)
    off.put(KEY, make())
    assert off.get(KEY) is None
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("platform", "expected"), [("linux", ".cache/tilewright"), ("darwin", "Library/Caches/tilewright")]
)
def test_default_place(platform: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TILEWRIGHT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_root() == tmp_path / expected


# -- several processes ----------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_cache import make
from tilewright.compile.cache import DiskCache
cache = DiskCache(Path(sys.argv[1]), max_bytes=200_000)
bad = 0
for round in range(60):
    key = f"{round % 6:064x}"
    cache.put(key, make(bytes([round % 6]) * 30_000))
    found = cache.get(f"{(round + 3) % 6:064x}")
    bad += found is not None and found.code != bytes([(round + 3) % 6]) * 30_000
print(bad)
"""


def test_concurrent_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "cache"), str(Path(__file__).parent)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for writer in writers:
        output, printed = writer.communicate(timeout=600)
        assert (output.strip(), printed) == ("0", "")
    assert not [path for path in entries(DiskCache(tmp_path / "cache")) if path.name.startswith(".tmp")]
