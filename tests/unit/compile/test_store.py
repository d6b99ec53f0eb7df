"""The store of artifacts: one build for many who ask, nothing left by a build that fails, and disks that lie."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tilewright.base.artifact import Artifact
from tilewright.compile import cache as cache_module
from tilewright.compile.cache import DiskCache
from tilewright.compile.store import ArtifactStore

KEY = "0123456789abcdef" * 4


def artifact(code: bytes = b"code", name: str = "scale", kind: str = "ptx") -> Artifact:
    return Artifact(name, "sm_90a", kind, code, (), (), (), (), (), (), key=KEY)


def refuse() -> Artifact:
    raise AssertionError("it is there already")


@pytest.fixture
def disk(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path)


@pytest.fixture
def store(disk: DiskCache) -> ArtifactStore:
    return ArtifactStore(lambda: disk)


def file_of(root: Path) -> Path:
    (path,) = root.glob("v*/*.twa")
    return path


def test_memory_then_disk_then_build(store: ArtifactStore, disk: DiskCache) -> None:
    made = artifact()
    assert store.find(KEY) is None and store.in_memory(KEY) is None
    assert store.get_or_build(KEY, lambda: made) is made
    assert store.get_or_build(KEY, refuse) is made
    assert store.in_memory(KEY) is made
    store.forget()
    assert store.in_memory(KEY) is None
    again = store.get_or_build(KEY, refuse)
    assert again == made and again is not made
    assert ArtifactStore(lambda: disk).find(KEY) == made


def test_forgetting_some(store: ArtifactStore) -> None:
    store.get_or_build(KEY, artifact)
    store.get_or_build(KEY[::-1], lambda: artifact(kind="object"))
    store.forget(lambda one: one.kind == "ptx")
    assert store.in_memory(KEY) is None and store.in_memory(KEY[::-1]) is not None


def test_many_askers_build_once(store: ArtifactStore) -> None:
    builds: list[int] = []
    together = threading.Barrier(8)

    def build() -> Artifact:
        builds.append(threading.get_ident())
        time.sleep(0.05)
        return artifact()

    def ask(_: int) -> Artifact:
        together.wait()
        return store.get_or_build(KEY, build)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert len(builds) == 1
    assert all(one is found[0] for one in found)
    assert not store._asked


def test_other_keys_do_not_wait(store: ArtifactStore) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> Artifact:
        inside.set()
        assert go_on.wait(60)
        return artifact()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get_or_build, KEY, slow)
        assert inside.wait(60)
        assert store.get_or_build(KEY[::-1], lambda: artifact(b"other")).code == b"other"
        assert not waiting.done()
        go_on.set()
        assert waiting.result(10).code == b"code"


def test_a_build_may_look_up_its_own_key(store: ArtifactStore) -> None:
    with store.alone(KEY):
        assert store.get_or_build(KEY, artifact).code == b"code"


def test_a_failing_build_leaves_nothing(store: ArtifactStore, tmp_path: Path) -> None:
    def fail() -> Artifact:
        raise ValueError("no such instruction")

    with pytest.raises(ValueError, match="no such instruction"):
        store.get_or_build(KEY, fail)
    assert store.find(KEY) is None and not list(tmp_path.glob("v*/*")) and not store._asked
    assert store.get_or_build(KEY, artifact).code == b"code"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:], lambda data: b""])
def test_a_damaged_file_is_built_again(store: ArtifactStore, tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    store.get_or_build(KEY, lambda: artifact(b"first"))
    path = file_of(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    store.forget()
    assert store.get_or_build(KEY, lambda: artifact(b"second")).code == b"second"
    store.forget()
    assert store.get_or_build(KEY, refuse).code == b"second"


def test_an_older_format_is_not_read_and_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = DiskCache(tmp_path)
    old.put(KEY, artifact(b"old"))
    (tmp_path / f"v{cache_module.VERSION + 2}").mkdir()
    (tmp_path / "very").mkdir()
    monkeypatch.setattr(cache_module, "VERSION", cache_module.VERSION + 1)
    new = DiskCache(tmp_path)
    store = ArtifactStore(lambda: new)
    assert store.get_or_build(KEY, lambda: artifact(b"new")).code == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"v{cache_module.VERSION}", f"v{cache_module.VERSION + 1}", "very"]


def test_entries_of_a_version_that_is_gone_are_removed(tmp_path: Path) -> None:
    """Another version's keys are never asked for; what nobody used for a month goes."""
    DiskCache(tmp_path).put(KEY, artifact(b"old"))
    long_ago = time.time() - 31 * 24 * 3600
    os.utime(file_of(tmp_path), (long_ago, long_ago))
    disk = DiskCache(tmp_path)
    ArtifactStore(lambda: disk).get_or_build(KEY[::-1], lambda: artifact(b"new"))
    assert file_of(tmp_path).stem == KEY[::-1]


def test_an_entry_that_is_used_stays(tmp_path: Path) -> None:
    DiskCache(tmp_path).put(KEY, artifact(b"old"))
    long_ago = time.time() - 31 * 24 * 3600
    os.utime(file_of(tmp_path), (long_ago, long_ago))
    disk = DiskCache(tmp_path)
    store = ArtifactStore(lambda: disk)
    assert store.get_or_build(KEY, refuse).code == b"old"
    store.get_or_build(KEY[::-1], lambda: artifact(b"new"))
    assert len(list(tmp_path.glob("v*/*.twa"))) == 2
