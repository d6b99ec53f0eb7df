"""Settings all tests share: what a test needs of the machine.

`@pytest.mark.requires("ptxas")`, or `requires("ptxas")` inside a test through the fixture, skips with the reason where the machine
lacks it. A name listed in `TILEWRIGHT_REQUIRE=cpu,emulator,ptxas` must be there: then what would be a skip is a failure.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# `support` is beside this file, `bench` beside `tests`.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def _cpu() -> str:
    from tilewright.codegen import interpreter

    return "" if interpreter.stubs_work() else "this interpreter takes no entry stubs"


def _ptxas() -> str:
    from support import ptxas_path

    return "" if ptxas_path() else "ptxas is not installed (pip install nvidia-cuda-nvcc)"


def _cuda() -> str:
    from tilewright.runtime import cuda

    return "" if cuda.devices() else f"no CUDA device: {cuda.unavailable_reason()}"


_LACKING: dict[str, Callable[[], str]] = {"cpu": _cpu, "emulator": lambda: "", "ptxas": _ptxas, "cuda": _cuda}


@functools.cache
def lacking(name: str) -> str:
    """Why this machine cannot run tests that need `name`; empty when it can."""
    return _LACKING[name]()


def require(*names: str) -> None:
    """Skip the running test where something is missing, or fail it where that was promised."""
    promised = {n.strip() for n in os.environ.get("TILEWRIGHT_REQUIRE", "").split(",") if n.strip()}
    unknown = promised - _LACKING.keys()
    if unknown:
        pytest.fail(f"TILEWRIGHT_REQUIRE names {', '.join(sorted(unknown))}; known are {', '.join(_LACKING)}")
    for name in names:
        reason = lacking(name)
        if reason and name in promised:
            pytest.fail(f"TILEWRIGHT_REQUIRE promises {name}, but {reason}")
        if reason:
            pytest.skip(reason)


@pytest.fixture
def requires() -> Callable[..., None]:
    return require


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="let tests of long runs take their minute")
    parser.addoption("--record", action="store_true", help="write the hashes of PTX that ran right to tests/gpu/proven.json")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires(*names): needs cpu, emulator, ptxas or cuda on this machine")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("requires"):
        require(*mark.args)
