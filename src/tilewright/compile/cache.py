"""Compiled artifacts on disk, found by content. In: a key (a hash of all that decides the code); out: the artifact, or None.

One file per entry: a magic and format number, the SHA-256 of key and payload, the payload. A payload is JSON for what is small
and the raw code after it, so reading one can never run anything. A file appears whole or not at all (written beside, then
renamed), and is checked when read: what is damaged is removed and simply compiled again. Several processes may share a directory.
Code read from here is executed, so the directory must belong to this user and be closed to others; if it is not, or cannot be
written, there is one warning and no cache. When it outgrows its size the entries not used for longest go first.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tilewright.base.artifact import Artifact
from tilewright.compile.serial import deserialise, serialise

__all__ = ["CacheInfo", "DiskCache", "default_root", "deserialise", "parse_bytes", "serialise"]

MAGIC = b"TILEWRGT"
VERSION = 1
DEFAULT_BYTES = 1 << 30
_HEADER = struct.Struct("<8sI32s")
_SUFFIX = ".twa"
_TEMPORARY = ".tmp-"
_STALE_SECONDS = 3600
_OFF = ("0", "off", "no", "false")
_log = logging.getLogger("tilewright")


@dataclass(frozen=True)
class CacheInfo:
    """Where the cache is and what is in it."""

    path: Path
    entries: int
    bytes: int


def default_root() -> Path:
    """`$TILEWRIGHT_CACHE_DIR`, or the platform's place for caches."""
    chosen = os.environ.get("TILEWRIGHT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tilewright"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "tilewright" / "cache"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "tilewright"


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
        self._ready: bool | None = None
        self.enabled = os.environ.get("TILEWRIGHT_CACHE", "1").strip().lower() not in _OFF
        self.max_bytes = self._size_limit() if max_bytes is None else max_bytes
        try:
            self.root = root or default_root()
        except RuntimeError as error:  # no home directory
            self.root = Path()
            self._disable(f"there is no place for it: {error}")
        # Entries sit one level down: a directory we make ourselves, closed to others, new for each format.
        self._directory = self.root / f"v{VERSION}"

    # -- use ----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Artifact | None:
        """The artifact stored under `key`, or None."""
        if not self._usable(create=False):
            return None
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"cannot read {path}: {error}")
            return None
        artifact = _unpack(key, data)
        with contextlib.suppress(OSError):
            if artifact is None:
                os.unlink(path)
            else:
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
        temporary = self._directory / f"{_TEMPORARY}{os.getpid()}-{os.urandom(8).hex()}"
        try:
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                os.replace(temporary, self._path(key))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except FileNotFoundError:
            # The directory was removed under us; it is made again next time.
            self._ready = None
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

    def _path(self, key: str) -> str:
        name = key if re.fullmatch("[0-9a-f]{16,128}", key) else hashlib.sha256(key.encode()).hexdigest()
        return os.path.join(self._directory, name + _SUFFIX)

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("the cache of compiled kernels is limited: %s", message)

    def _disable(self, message: str) -> None:
        self.enabled = False
        if not self._warned:
            self._warned = True
            _log.warning("the cache of compiled kernels is off: %s", message)

    def _size_limit(self) -> int:
        text = os.environ.get("TILEWRIGHT_CACHE_SIZE")
        if not text:
            return DEFAULT_BYTES
        limit = parse_bytes(text)
        if limit is None:
            self._warn(f"TILEWRIGHT_CACHE_SIZE is '{text}', which is no number of bytes; using 1 GiB")
            return DEFAULT_BYTES
        return limit

    def _usable(self, create: bool) -> bool:
        """Whether the directory is there and safe; looked at once."""
        if not self.enabled or self._ready:
            return self.enabled
        try:
            if create:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            elif not self._directory.is_dir():
                return False
            problem = _unsafe(self.root)
            if create and not problem:
                self._directory.mkdir(mode=0o700, exist_ok=True)
            problem = problem or _unsafe(self._directory)
        except OSError as error:
            if create:
                self._disable(f"{self.root}: {error.strerror or error}")
            return False
        if problem:
            self._disable(problem)
            return False
        self._ready = True
        return True

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
                        elif item.name.startswith(_TEMPORARY) and now - status.st_mtime >= stale_after:
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


def _unsafe(directory: Path) -> str:
    """Why code must not be read from a directory; '' when it may."""
    if not hasattr(os, "geteuid"):
        return ""
    status = os.stat(directory)
    if status.st_uid != os.geteuid():
        return f"{directory} belongs to another user (uid {status.st_uid})"
    if status.st_mode & stat.S_IWOTH:
        return f"{directory} can be written by every user"
    return ""
