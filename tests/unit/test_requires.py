"""A missing device skips a test with its reason, and fails it where TILEWRIGHT_REQUIRE promises the device."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def without_cuda(requires: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    module = sys.modules[requires.__module__]
    monkeypatch.setattr(module, "lacking", lambda name: "there is none" if name == "cuda" else "")
    return requires


def test_missing_is_a_skip(without_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_REQUIRE", "cpu,emulator")
    without_cuda("cpu")
    with pytest.raises(pytest.skip.Exception, match="there is none"):
        without_cuda("cuda")


def test_missing_but_promised_is_a_failure(without_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_REQUIRE", "cpu, cuda")
    with pytest.raises(pytest.fail.Exception, match="promises cuda, but there is none"):
        without_cuda("cuda")


def test_a_promise_nobody_knows_is_a_failure(without_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_REQUIRE", "cpu,toaster")
    with pytest.raises(pytest.fail.Exception, match="toaster"):
        without_cuda("cpu")


@pytest.mark.requires("cpu", "emulator")
def test_the_mark() -> None:
    """Runs on every machine that can run kernels at all."""
