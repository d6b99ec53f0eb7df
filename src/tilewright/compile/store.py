"""The store of artifacts: memory, then disk, else they are built. In: a key (a hash of all that decides the code) and how to build;
out: the artifact.

Many threads may ask for one key: one of them builds, the others wait for it. A build that fails leaves nothing behind, and the next
who asks tries again. What is damaged on disk, or of another version, counts as not there (`cache`).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tilewright.base import environment
from tilewright.base.artifact import Artifact
from tilewright.base.forks import at_work, fork_safe_lock, fork_safe_rlock
from tilewright.base.headroom import LOAD_BYTES, require_room
from tilewright.base.private_files import say_once
from tilewright.compile.cache import DiskCache
from tilewright.runtime.core import observe

log = logging.getLogger("tilewright")
_MOST_RECENT = 16
"""Artifacts that are kept in memory though nobody has them any more."""


@functools.cache
def disk_cache() -> DiskCache:
    return DiskCache()


class ArtifactStore:
    """Artifacts by key."""

    def __init__(self, disk: Callable[[], DiskCache]) -> None:
        self._disk = disk
        self._memory: weakref.WeakValueDictionary[str, Artifact] = weakref.WeakValueDictionary()
        """What somebody still has, such as a loaded program…"""
        self._recent: deque[Artifact] = deque(maxlen=_MOST_RECENT)
        """…or had lately."""
        self._guard = fork_safe_lock()
        self._asked: dict[str, tuple[threading.RLock, int]] = {}
        """Of each key that someone is at: its lock, and how many threads hold it or wait."""

    def get_or_build(self, key: str, build: Callable[[], Artifact]) -> Artifact:
        """The artifact, from memory, from disk or freshly built."""
        found = self._memory.get(key)
        if found is not None:
            return found
        with self.alone(key):
            found = self.find(key)
            if found is None:
                found = build()
                self._disk().put(key, found)
                self._keep(key, found)
            return found

    def keep_also(self, key: str, artifact: Artifact) -> None:
        """Keep an artifact under another key, too."""
        self._disk().put(key, artifact)
        self._keep(key, artifact)

    def in_memory(self, key: str) -> Artifact | None:
        return self._memory.get(key)

    def find(self, key: str) -> Artifact | None:
        """The artifact from memory or from disk; None where it was never built."""
        found = self._memory.get(key)
        if found is not None:
            return found
        start = time.perf_counter()
        found = self._disk().get(key)
        if found is not None:
            if log.isEnabledFor(logging.INFO):
                log.info("loaded %s for %s from cache in %.1f ms", found.name, found.target, (time.perf_counter() - start) * 1e3)
            self._keep(key, found)
        return found

    def _keep(self, key: str, artifact: Artifact) -> None:
        self._memory[key] = artifact
        self._recent.append(artifact)

    @contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """Inside, no other thread looks the key up or builds for it."""
        environment.check()
        for slip in environment.slips():
            say_once(slip)
        require_room(LOAD_BYTES, "compile")
        with at_work(), self._alone(key), _told():
            yield

    @contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        with self._guard:
            lock, users = self._asked.get(key, (fork_safe_rlock(), 0))
            self._asked[key] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._asked.pop(key)
                if users > 1:
                    self._asked[key] = lock, users - 1

    def forget(self, which: Callable[[Artifact], bool] = lambda artifact: True) -> None:
        """Drop artifacts from memory: all, or those of which that holds."""
        for key, artifact in list(self._memory.items()):
            if which(artifact):
                self._memory.pop(key, None)
        self._recent = deque([a for a in list(self._recent) if not which(a)], _MOST_RECENT)


STORE = ArtifactStore(lambda: disk_cache())
"""What this process has compiled or loaded."""


_inside = threading.local()


@contextmanager
def _told() -> Iterator[None]:
    """Whoever profiles is told how long it took; what is inside other such work counts with it."""
    observer = observe.observer
    if observer is None or getattr(_inside, "compiles", False):
        yield
        return
    _inside.compiles, began = True, time.perf_counter()
    try:
        yield
    finally:
        _inside.compiles = False
        observer.compiled(time.perf_counter() - began)
