"""What drivers made of our code, kept on disk. In: the driver and its version in words, the code; out: the bytes that were kept for both, or None.

A driver's own form of a program saves the time to compile it again. It is good for that very driver alone, so its version is part of the name. Files are whole
or not there, begin with their digest, and count only where nobody else can write (`base/private_files.py`). `TILEWRIGHT_CACHE=0` keeps nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os

from tilewright.base import environment
from tilewright.base.private_files import PrivateFolder, UnsafeFile, cache_root, say_once

_DIGEST = 32
_MOST = 256
"""Files that are kept; the oldest go."""


def _folder() -> PrivateFolder | None:
    if not environment.is_on("TILEWRIGHT_CACHE"):
        return None
    try:
        return PrivateFolder(cache_root() / "drivers")
    except RuntimeError:  # no home folder
        return None


def _name(driver: str, code: bytes) -> str:
    return hashlib.sha256(driver.encode() + b"\0" + code).hexdigest()[:40] + ".bin"


def kept(driver: str, code: bytes) -> bytes | None:
    """What the driver made of the code in an earlier process."""
    folder = _folder()
    if folder is None:
        return None
    try:
        content = folder.read(_name(driver, code))
    except UnsafeFile as problem:
        say_once(f"the drivers' programs in {folder.path} are not used: {problem}")
        return None
    except OSError:
        return None
    body = content[_DIGEST:]
    return body if hashlib.sha256(body).digest() == content[:_DIGEST] else None


def keep(driver: str, code: bytes, made: bytes) -> None:
    """Keep it for later processes; a folder that cannot be written to is nobody's error."""
    folder = _folder()
    if folder is None:
        return
    try:
        folder.make()
        folder.write(_name(driver, code), hashlib.sha256(made).digest() + made)
        _trim(folder)
    except UnsafeFile as problem:
        say_once(f"the drivers' programs in {folder.path} are not kept: {problem}")
    except OSError:
        return


def forget(driver: str, code: bytes) -> None:
    """The driver does not take what was kept."""
    folder = _folder()
    if folder is not None:
        folder.remove(_name(driver, code))


def _trim(folder: PrivateFolder) -> None:
    names = [entry.name for entry in os.scandir(folder.path)]
    if len(names) <= _MOST:
        return

    def age(name: str) -> float:
        with contextlib.suppress(OSError):
            return os.stat(folder.path / name).st_mtime
        return 0.0

    for name in sorted(names, key=age)[: len(names) - _MOST * 3 // 4]:
        folder.remove(name)
