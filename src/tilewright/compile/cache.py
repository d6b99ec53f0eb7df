"""Compiled artifacts on disk, found by content. In: a key (a hash of all that decides the code); out: the artifact, or None.

One file per entry: a magic and format number, the SHA-256 of key and payload, the payload. A payload is JSON for what is small
and the raw code after it, so reading one can never run anything. A file appears whole or not at all (written beside, then
renamed), and is checked when read: what is damaged is removed and simply compiled again. Several processes may share a directory.
Code read from here is executed, so only what no other user can have written counts (`base/private_files.py`): if the directory is
open to others, or cannot be written, there is one warning and no cache; an entry that is open to them is removed and compiled again.
When the directory outgrows its size the entries not used for longest go first.

Keys hold the compiler's version, so no version reads what another wrote. What older formats left is removed when the first entry is
written; entries that nobody has used for a month, as those of a version that is gone, are removed when entries are counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from tilewright.base import environment
from tilewright.base.artifact import Artifact
from tilewright.base.private_files import TEMPORARY, PrivateFolder, UnsafeFile, cache_root, say_once
from tilewright.compile.serial import deserialise, serialise

__all__ = ["CacheInfo", "DiskCache", "deserialise", "parse_bytes", "serialise"]

MAGIC = b"TILEWRGT"
VERSION = 1
DEFAULT_BYTES = 1 << 30
_HEADER = struct.Struct("<8sI32s")
_SUFFIX = ".twa"
_STALE_SECONDS = 3600
_UNUSED_SECONDS = 30 * 24 * 3600
"""How long an entry is kept that nobody uses."""
_log = logging.getLogger("tilewright")


@dataclass(frozen=True)
class CacheInfo:
    """Where the cache is and what is in it."""

    path: Path
    entries: int
    bytes: int


def parse_bytes(text: str) -> int | None:
    """`1048576`, `512M`, `2GiB` as a number of bytes; None when it is not one."""
    match = re.fullmatch(r"\s*(\d+)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if not match:
        return None
    return int(match.group(1)) << 10 * " kmgt".index(match.group(2).lower() or " ")


class DiskCache:
    """A directory of artifacts. No method fails because of the disk: it warns once and goes on without."""

    def __init__(self, root: Path | None = None, max_bytes: int | None = None) -> None:
        self._warned = False
        self._written: int | None = None
        self.enabled = environment.is_on("TILEWRIGHT_CACHE")
        self.max_bytes = self._size_limit() if max_bytes is None else max_bytes
        try:
            self.root = root or cache_root()
        except RuntimeError as error:  # no home directory
            self.root = Path()
            self._disable(f"there is no place for it: {error}")
        # Entries sit one level down: a directory we make ourselves, closed to others, new for each format.
        self._directory = self.root / f"v{VERSION}"
        self._folder = PrivateFolder(self._directory)

    # -- use ----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Artifact | None:
        """The artifact stored under `key`, or None."""
        if not self._usable(create=False):
            return None
        name = self._name(key)
        path = os.path.join(self._directory, name)
        try:
            artifact = _unpack(key, self._folder.read(name))
        except FileNotFoundError:
            return None
        except UnsafeFile as problem:
            if self._usable(create=False):
                self._warn(f"{problem}; it is not read")
                self._folder.remove(name)
            return None
        except OSError as error:
            self._warn(f"cannot read {path}: {error}")
            return None
        if artifact is None:
            self._folder.remove(name)
        else:
            with contextlib.suppress(OSError):
                os.utime(path)
        return artifact

    def put(self, key: str, artifact: Artifact) -> None:
        """Store the artifact; what was there under `key` is replaced."""
        if not self._usable(create=True):
            return
        payload = serialise(artifact)
        data = _HEADER.pack(MAGIC, VERSION, _digest(key, payload)) + payload
        if len(data) > self.max_bytes:
            return
        try:
            self._folder.write(self._name(key), data)
        except UnsafeFile as problem:
            self._disable(str(problem))
            return
        except FileNotFoundError:
            # The directory was removed under us; it is made again next time.
            return
        except OSError as error:
            self._warn(f"cannot write to {self._directory}: {error}")
            return
        self._account(len(data))

    def info(self) -> CacheInfo:
        """The directory, the number of entries and their bytes."""
        entries = self._entries() if self._usable(create=False) else []
        return CacheInfo(self.root, len(entries), sum(size for _, size, _ in entries))

    def clear(self) -> int:
        """Remove every entry; how many there were."""
        if not self._usable(create=False):
            return 0
        removed = 0
        for _, _, path in self._entries(stale_after=0):
            try:
                os.unlink(path)
                removed += 1
            except FileNotFoundError:
                pass
            except OSError as error:
                self._warn(f"cannot remove {path}: {error}")
        self._written = None
        return removed

    # -- inside -------------------------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return (key if re.fullmatch("[0-9a-f]{16,128}", key) else hashlib.sha256(key.encode()).hexdigest()) + _SUFFIX

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("the cache of compiled kernels is limited: %s", message)

    def _disable(self, message: str) -> None:
        self.enabled = False
        if not self._warned:
            self._warned = True
            say_once(f"the cache in {self.root} is not used: {message}")

    def _size_limit(self) -> int:
        text = environment.text("TILEWRIGHT_CACHE_SIZE")
        limit = parse_bytes(text) if text else DEFAULT_BYTES
        if limit is None:
            raise environment.refusal("TILEWRIGHT_CACHE_SIZE", "set it to a number of bytes, such as 512M or 2G, or not at all")
        return limit

    def _usable(self, create: bool) -> bool:
        """Whether the directory is there and out of the reach of others. It is looked at for each use: that may change."""
        if not self.enabled:
            return False
        try:
            if create and not self._directory.is_dir():
                self._folder.make()
                self._remove_older_formats()
            elif not self._directory.is_dir():
                return False
            else:
                self._folder.require()
        except UnsafeFile as problem:
            self._disable(str(problem))
            return False
        except OSError as error:
            if create:
                self._disable(f"{error.strerror or error}")
            return False
        return True

    def _remove_older_formats(self) -> None:
        """Directories of formats that this version does not read; those of newer ones are left alone."""
        for directory in self.root.glob("v*"):
            number = directory.name[1:]
            if number.isdigit() and int(number) < VERSION and directory.is_dir() and not directory.is_symlink():
                shutil.rmtree(directory, ignore_errors=True)

    def _entries(self, stale_after: float = _STALE_SECONDS) -> list[tuple[float, int, str]]:
        """Time of last use, bytes and path of each entry. Temporary files left by a killed process are removed."""
        found: list[tuple[float, int, str]] = []
        now = time.time()
        try:
            with os.scandir(self._directory) as listing:
                for item in listing:
                    # Another process may remove an entry at any moment.
                    with contextlib.suppress(OSError):
                        status = item.stat(follow_symlinks=False)
                        if item.name.endswith(_SUFFIX):
                            found.append((status.st_mtime, status.st_size, item.path))
                        elif item.name.startswith(TEMPORARY) and now - status.st_mtime >= stale_after:
                            os.unlink(item.path)
        except OSError:
            return found
        return found

    def _account(self, nbytes: int) -> None:
        """Evict when full. Counting every file at every put would be slow, so what we wrote is added to the last count."""
        if self._written is not None:
            self._written += nbytes
            if self._written <= self.max_bytes:
                return
        entries = sorted(self._entries())
        oldest = time.time() - _UNUSED_SECONDS
        for used, _, path in entries:
            if used < oldest:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        entries = [entry for entry in entries if entry[0] >= oldest]
        total = sum(size for _, size, _ in entries)
        if total > self.max_bytes:
            # A margin, so that not every further put counts again.
            goal = self.max_bytes - self.max_bytes // 10
            for _, size, path in entries[:-1]:
                if total <= goal:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    total -= size
        self._written = total


def _digest(key: str, payload: bytes) -> bytes:
    # The key is part of it: a file under another entry's name is not mistaken for that entry.
    return hashlib.sha256(key.encode() + b"\0" + payload).digest()


def _unpack(key: str, data: bytes) -> Artifact | None:
    """The artifact in a file's bytes; None when they are damaged or of another format."""
    if len(data) < _HEADER.size:
        return None
    magic, version, digest = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]
    if magic != MAGIC or version != VERSION or digest != _digest(key, payload):
        return None
    try:
        return deserialise(payload)
    except ValueError:
        return None
