"""Folders whose files only this user can have written. In: a path; out: bytes of its files, or why they must not be believed.

What is kept in a cache is executed or steers what is compiled. So a folder counts only if it and all folders above it are out of reach
of other users: each belongs to this user or to root, and others cannot write to it (or, above the folder itself, it is sticky: there
nobody removes what belongs to others). Links on the way are held to the same rule. A file is opened first and then looked at: it is a
plain file of this user that others cannot write. Files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
from pathlib import Path

from tilewright.base import environment

TEMPORARY = ".tmp-"
"""What names of files begin with that are not whole yet."""

_MOST_LINKS = 40
_log = logging.getLogger("tilewright")
_said: set[str] = set()


def cache_root() -> Path:
    """`$TILEWRIGHT_CACHE_DIR`, or the platform's place for caches. RuntimeError where there is no home folder."""
    chosen = environment.text("TILEWRIGHT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tilewright"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "tilewright" / "cache"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "tilewright"


def say_once(message: str) -> None:
    """A warning that this process gives one time."""
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)


def open_to_others(folder: str | os.PathLike[str]) -> str:
    """Why files of a folder could be of others, and what to do; '' when they cannot. OSError where there is no such folder."""
    if not hasattr(os, "geteuid"):
        return ""
    user, links, path = os.geteuid(), 0, os.path.sep
    status = os.stat(path)
    waiting = _parts(os.path.abspath(folder))
    while waiting:
        problem = _above(path, status, user)
        if problem:
            return problem
        below = os.path.join(path, waiting.pop())
        found = os.lstat(below)
        if not stat.S_ISLNK(found.st_mode):
            path, status = below, found
            continue
        links += 1
        if found.st_uid not in (0, user):
            return f"{below} is a link of another user (uid {found.st_uid})"
        if links > _MOST_LINKS:
            return f"{folder} goes through more than {_MOST_LINKS} links"
        target = os.readlink(below)
        waiting += _parts(target)
        if os.path.isabs(target):
            path, status = os.path.sep, os.stat(os.path.sep)
    return _own(path, status, user)


def _parts(path: str) -> list[str]:
    """The names on a path, the last one first."""
    return [part for part in reversed(path.split(os.path.sep)) if part and part != os.curdir]


def _above(path: str, status: os.stat_result, user: int) -> str:
    if status.st_uid not in (0, user):
        return f"{path} belongs to another user (uid {status.st_uid})"
    return "" if status.st_mode & stat.S_ISVTX else _closed(path, status)


def _own(path: str, status: os.stat_result, user: int) -> str:
    if status.st_uid != user:
        return f"{path} belongs to another user (uid {status.st_uid})"
    return _closed(path, status)


def _closed(path: str, status: os.stat_result) -> str:
    if not status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        return ""
    who = "every user" if status.st_mode & stat.S_IWOTH else f"its group (gid {status.st_gid})"
    return f"{path} can be written by {who}; run chmod go-w on it"


class UnsafeFile(Exception):
    """A file, or its folder, that others could have written. `str()` says why."""


class PrivateFolder:
    """A folder of files of this user. Its methods raise OSError for what the disk refuses, `UnsafeFile` for what others could write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the folder, and those above it that are missing, closed to others. Raises where it is open to them."""
        for folder in (*reversed(self.path.parents), self.path):
            if not os.path.isdir(folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
        if not os.path.isdir(self.path):
            raise NotADirectoryError(20, "Not a directory", str(self.path))
        self.require()

    def require(self) -> None:
        """Raises UnsafeFile where others could have written here."""
        problem = open_to_others(self.path)
        if problem:
            raise UnsafeFile(problem)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        self.require()
        path = os.path.join(self.path, name)
        # A link is not followed, and a pipe is not waited for.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            descriptor = os.open(path, flags)
        except OSError:
            if os.path.islink(path):
                raise UnsafeFile(f"{path} is a link") from None
            raise
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UnsafeFile(f"{path} is no plain file")
            problem = _own(path, status, os.geteuid()) if hasattr(os, "geteuid") else ""
            if problem:
                raise UnsafeFile(problem)
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Make or replace a file: whole, or not at all."""
        self.require()
        temporary = os.path.join(self.path, f"{TEMPORARY}{os.getpid()}-{os.urandom(8).hex()}")
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, os.path.join(self.path, name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def remove(self, name: str) -> None:
        """Remove a file, or a link in its place."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.path, name))
