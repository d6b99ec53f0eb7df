"""No collection of garbage while something is compiled: in blocks that nest, in threads, after forks."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest

from tilewright.compile import collection
from tilewright.compile.collection import no_collection


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    was = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was else gc.disable)()


def test_blocks_nest() -> None:
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_goes_on_after_an_error() -> None:
    with pytest.raises(KeyError), no_collection():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()


def test_it_goes_on_when_the_last_thread_leaves() -> None:
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with no_collection():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    with no_collection():
        thread.start()
        inside.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_child_does_not_wait_for_threads_that_it_has_not(is_inside: bool) -> None:
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with no_collection():
            inside.set()
            leave.wait(60)

    def child_collects() -> bool:
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(60)
    if is_inside:
        with no_collection():
            assert not child_collects()
    else:
        assert child_collects()
    leave.set()
    thread.join()


def young_after(monkeypatch: pytest.MonkeyPatch, modules: int) -> bool:
    """Whether an object that a block made, while it loaded so many modules, is young still."""
    with no_collection():
        gc.collect()
        made: list[object] = []
        for number in range(modules):
            monkeypatch.setitem(sys.modules, f"stand_in_{number}", ModuleType(f"stand_in_{number}"))
        # Nothing may be collected between the end of the block and the question.
        monkeypatch.setattr(gc, "enable", lambda: None)
    is_young = any(one is made for generation in (0, 1) for one in gc.get_objects(generation))
    monkeypatch.undo()
    gc.enable()
    return is_young


def test_what_many_modules_made_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()  # the suite keeps its own modules from the collector
    try:
        assert young_after(monkeypatch, 0)
        assert young_after(monkeypatch, collection.MANY - 1)
        assert not young_after(monkeypatch, collection.MANY)
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()


def test_objects_that_a_program_froze_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    assert before > 0
    assert young_after(monkeypatch, collection.MANY)
    assert gc.get_freeze_count() > before // 2
